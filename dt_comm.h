/* dt_comm.h - v0.1.0 - groups of ranks: launch, collectives, faults - public domain or MIT, see the
   end of the file

   The second of four single-header libraries; dt_tensor.h, which it includes, names them all. It
   runs one function on many ranks, lets groups of them sum, gather and exchange arrays, and makes
   the first failure on any rank end the wait of every other, with a text that names it. A rank is a
   thread, a forked process, or whatever five functions that carry messages connect.

   DOES NOT: install signal handlers, call exit or abort, keep global state, wait for a message
   without a limit, start threads but those that dt_run was asked for.

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
       nvcc -O3 train.c dt_kernels.cu -lcublasLt -lnccl     CUDA
       mpicc -O3 -DDT_USE_MPI train.c -lm -lpthread     MPI; mpirun -np 4 ./a.out

   OPTIONS (define before including)
       DT_IMPLEMENTATION   in exactly one file: the code, not only the declarations
       DT_USE_MPI          the MPI backend: needs mpi.h of an MPI 3.1 or later
       DT_USE_NCCL         the NCCL backend: nccl.h of NCCL 2.18.1 or later; nvcc sets it where it
                           finds that, unless DT_NO_NCCL. DT_NCCL_DLOPEN: libnccl.so.2 is looked for
                           at run time, and then stays loaded
       DT_NCCL_LEAST       4096: messages between devices of more bytes go by NCCL; the same on
                           every rank
       DT_NCCL_WIDE        4194304: numbers in a group's f32 window, through which sums of bf16 and
                           f16 go by NCCL; the same on every rank, and not less than their number
       DT_STATIC           everything static                                                    (everywhere)
       DT_NO_CHECKS        no records, no comparison in shared memory, no deadlocks found: to
                           measure what they cost

   CONTENTS
     1. Launch
     2. Groups
     3. Collectives
     4. Send and receive
     5. Started operations
     6. Scalars and agreement
     7. Attach, trace
     8. Implementation: what the ranks of a run share
     9. The first failure
    10. Calls: their pattern, text, data, bytes
    11. What each rank is at
    12. Waiting, and what moves meanwhile
    13. Messages in shared memory
    14. Collectives in shared memory
    15. Messages over a transport
    16. Algorithms
    17. Begin, wait, dispatch
    18. Who is waited for, and why
    19. Planted faults
    20. Scalars and agreement: code
    21. Groups: code
    22. Memory that forked ranks share
    23. Who this process is
    24. TCP
    25. MPI
    26. NCCL
    27. Attach and launch: code
    28. Trace: code

   CONTRACT
     Memory     dt_run takes one range for all that ranks share: about 130 KiB for each pair of
                ranks and 34 KiB for each rank of each group, of which it touches little until
                messages use it. Groups belong to the context's world and end with it. Your buffers
                are read and written only between the call and its return, or between a start and
                its dt_wait: then, with an error too, no other rank touches them. Of a forked rank,
                memory of the classes params, grads, acts and comm (dt_alloc) lies in the range too;
                what lies elsewhere is copied through it in windows of DT_WINDOW_BYTES. Ranks of MPI
                have such a range for each machine, where its system lets them. Ranks that are
                threads on several GPUs read and write each other's memory: if one of these has no
                access to another (peer access), dt_run fails with DT_ERR_DEVICE, and backend nccl
                is the way.
     Errors     A collective that cannot be done fails the context (dt_error, dt_error_text) and
                returns its status. Any failure of any context - dt_fail from an op, from your code,
                a refused allocation - poisons the world: every rank that waits, and every later
                call, returns DT_ERR_PEER and a text that names the first rank and its reason. Ranks
                that call different operations, or the same with another count, type, reduction or
                root, learn both sides when all have called, with the places in the source (over tcp
                and mpi: dt_run_desc.check); when all ranks wait and nothing is under way, the
                circle of waits at once. A rank that ended or died is named with its signal; one
                that does not come within timeout_s with what it does instead: stopped, spinning,
                asleep, late. Messages give world ranks. The first failure alone is logged as an
                error. Timeouts count only time in which a rank's process runs: a job that is
                suspended as a whole (Ctrl-Z, scontrol suspend) continues when resumed.
     Threads    dt_run's caller is the supervisor and never a rank. A dt_comm belongs to its rank's
                thread. Tables of dt_run_desc are used by all ranks at once. Several dt_run may run
                at once.
     Order      A reduction is ((r0 op r1) op r2) ... in rank order for every element, whatever the
                count, the backend and the algorithm (but DT_RING, see dt_comm_set_algorithm), and
                the same bits on every rank; of bf16 and f16 it is taken in f32 and rounded once, at
                its end. So an all-reduce equals a reduce and a broadcast, and a reduce-scatter and
                an all-gather, bit for bit. But by NCCL, of what lies on devices, sums and products
                are taken in an order of NCCL's own (section 26): of floating-point numbers their
                last bits, and those of an all-reduce and of a reduce and a broadcast, may differ.
     In place   as in NCCL: all-reduce and reduce send == recv; reduce-scatter and scatter recv ==
                send + rank * count; all-gather and gather send == recv + rank * count. Any other
                overlap of a rank's send and recv, and any overlap in an all-to-all, is DT_ERR_ARG
                before data move.
     Groups     comm NULL is a group of one everywhere, and a group of one is a local copy.
     Tags       [local] any rank by itself; [pairwise] two ranks; [collective: comm] every rank of
                the group, in the same order. */

#ifndef DT_COMM_H
#define DT_COMM_H

#include "dt_tensor.h"

#if DT_VERSION != 100
#error "dt_comm.h 0.1.0 needs dt_tensor.h 0.1.0: copy all headers from one release"
#endif

#if defined(__NVCC__) && defined(__has_include) && !defined(DT_NO_CUDA) && !defined(DT_NO_NCCL)
#if __has_include(<nccl.h>) && !defined(DT_USE_NCCL)
#define DT_USE_NCCL
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ==== 1. Launch =================================================================================

/* What a rank is, and what carries its data. */
typedef enum dt_backend {
    DT_BACKEND_AUTO = 0, /* threads */
    DT_BACKEND_THREADS,  /* a rank is a thread of this process */
    DT_BACKEND_PROCS,    /* a rank is a fork of this process */
    /* the calling process is one rank; others are started elsewhere, and meet over sockets */
    DT_BACKEND_TCP,
    DT_BACKEND_MPI, /* with DT_USE_MPI: a rank is a process that MPI's launcher started */
    /* with DT_USE_NCCL: as tcp, each rank with a GPU of its own; large data go through NCCL */
    DT_BACKEND_NCCL
} dt_backend;

/* The first failure of a run. */
typedef struct dt_report {
    dt_status status; /* DT_OK: none */
    int rank;         /* who recorded it; -1: the run could not start */
    char text[512];   /* "rank 3: dt_linear(w1): ..." */
    int left_behind;  /* ranks whose thread or process still ran when dt_run returned */
} dt_report;

/* A network that is slower than this machine's memory, to learn on: an operation is not over before
   latency_s plus its bytes (as dt_comm_bytes counts them) / bytes_per_s have passed since its start
   or, if later, since the end of the rank's operation before it. Whoever waits for it sleeps.
   Scalars (section 6) are free. All 0: none. */
typedef struct dt_link {
    double latency_s, bytes_per_s;
} dt_link;

typedef struct dt_run_desc {
    int ranks;          /* 0 -> 1; MPI: the launcher's */
    dt_backend backend; /* AUTO -> threads */
    /* 0 -> 120: the longest that a rank waits for another, in seconds, at most 1e9. tcp survives a
       partition that ends max(timeout_s / 8, 1 s) earlier; before Linux 6.15, one of timeout_s /
       2 */
    double timeout_s;
    uint64_t seed; /* 0 -> 1 */
    /* NULL -> dt_host_default(); used by all ranks at once. procs: must map; its alloc is not asked
       for the classes that lie in the range. mpi: one that does not map shares no memory */
    const dt_host *host;
    const dt_kernels *kernels; /* NULL -> as in dt_ctx_desc; of procs dt_kernels_cpu() */
    const dt_io *io;           /* NULL -> dt_io_default() */
    dt_report *report;         /* not NULL: receives the first failure */
    /* procs: `user` points to so much: all ranks share one copy of it, which comes back when dt_run
       returns. 0: each rank has the fork's private copy */
    size_t user_bytes;
    dt_link link;
    /* mpi: as many neighbouring ranks share memory, 1: none; 0: all on one machine */
    int node_ranks;
    int rank; /* tcp, nccl: which of the ranks this process is */
    /* tcp, nccl: where rank 0 listens until all have come, "10.0.0.1:29500" or "node17:29500"; NULL
       -> "127.0.0.1:29500". A name is looked up as an IPv4 address: that takes as long as the
       system's resolver, and timeout_s does not end it. The others listen at free ports of the
       interface by which they reach it. Beyond the loopback (127.0.0.0/8) ranks must prove that
       they know the job's token. Nothing is encrypted */
    const char *rendezvous;
    /* bytes that one rank may have live, over all classes of dt_memory; 0: no limit */
    size_t mem_limit;
    /* tcp, nccl, mpi: the secret that ranks of the job prove they know, 16 bytes or more; NULL:
       what the file holds that DT_TOKEN_FILE names (which nobody else may read), else DT_TOKEN of
       the environment. On the loopback it may be missing; of mpi rank 0's counts, and if that has
       none it makes one. After the rendezvous dt has erased the token and all keys derived from it;
       `token` and DT_TOKEN stay, so prefer the file */
    const char *token;
    int faults;        /* 1: DT_FAULT of the environment is heeded */
    const char *fault; /* planted faults, in place of DT_FAULT's: see below */
    /* tcp, nccl, mpi: 0 -> what the ranks call is compared before each operation in the first 100
       steps, and always with DT_CHECK=1 in the environment; 1 always, -1 never */
    int check;
    /* not NULL: once a signal handler or another thread has set it to 1, the table of dt_ranks_text
       is logged as a notice, and it is 0 again. Of procs the supervisor's counts; over tcp, nccl
       and mpi a rank looks at it while it waits */
    int *ask;
} dt_run_desc;

/* A planted fault, for tests and to see what happens: KIND:rank=R:seq=N[:s=SECONDS], several with
   commas between. N counts the operations of sections 3 to 6 that rank R begins, from 1. Before it:
   "kill" and "stop" (the signals), "exit" with status 7, "spin" for ever, "delay" by SECONDS (1),
   "drop": the call is left out, and not counted. After it, in what the rank received, in the
   middle: "flip" a bit, "nan" an element. Of one rank the first 8 count. A rank that is a thread is
   not killed or stopped: it fails, or stays away from operations until another has failed. */

/* [the caller is the supervisor, never a rank] Runs rank_main on every rank, each with its own
   context and its own end of the world, waits for all and frees both. Returns the status of the
   first failure, which has been logged: DT_OK only if every rank_main returned DT_OK, no context
   failed and every message was received. A rank_main that returns an error without a failed context
   is a failure too. Forked ranks flush stdio and end with _exit: handlers of atexit do not run in
   them; memory that a rank writes is its own, but for `user` (user_bytes). Fork from a process of
   one thread. Those that have not ended timeout_s after the first failure are killed, a stopped one
   after a second. While no rank has failed, dt_run waits for every rank function to return: it
   cannot tell a long computation from an endless one. exit() in a rank that is a thread ends the
   process. A thread cannot be killed: dt_run returns without one that has not ended by then, or a
   process that the kernel does not let die, logs a notice and counts it in dt_report.left_behind.
   The run's memory that such a thread may touch is freed when the thread ends. If its rank_main
   goes on, operations fail, but it still uses `user` and what desc points to: keep both valid, or
   end the process with _exit. A rank_main that ends its thread (pthread_exit, pthread_cancel) is a
   failure of that rank; in the calling thread (tcp, nccl, mpi) dt_run cannot return then. tcp,
   nccl: rank_main runs in the calling thread, as rank `rank`. All ranks must come within timeout_s;
   one that has ended waits as long for the others to end. The status and the report are the first
   failure that this rank noticed, or another rank told it of; DT_OK says that this rank went well,
   and the others as far as it could learn. Under MPI the caller is one rank, which the launcher
   started, and runs rank_main itself: `ranks` is 0 or the number of the launcher's processes, and
   all of them call dt_run alike. MPI is begun and ended in here unless the program has begun it; it
   can be begun once in a process, so a program that calls dt_run twice begins MPI itself, and calls
   dt_run from the thread that did. While dt_run runs, errors of MPI_COMM_WORLD are returned. Every
   rank's dt_run returns the first failure. After one that a rank does not learn of within
   timeout_s, MPI is not ended: the launcher ends such a rank once this process has ended with an
   error. Groups on one machine do their collectives in its memory: node_ranks. A device's memory
   travels through the host's, over tcp and MPI alike; by NCCL not. */
DT_API dt_status dt_run(
    dt_run_desc desc, dt_status (*rank_main)(dt_ctx *ctx, void *user), void *user);

/* Which rank the launcher of this process made it. */
typedef struct dt_launch {
    int rank, size; /* 0 of 1: it is not distributed */
    /* among the ranks of its machine; -1 and 0: the launcher does not say */
    int local_rank, local_size;
    /* where rank 0 is, "127.0.0.1:29501" or "node3:24711". "": nobody says */
    char rendezvous[80];
    /* "DT", "torchrun", "Open MPI", "PMI", "SLURM"; "": no launcher */
    char by[16];
    char text[384]; /* one line: what was found, or what is wrong */
} dt_launch;

/* [local] Reads the environment. The first of these wins that says something, and what it leaves
   open is taken from those behind it that say the same rank and size:
       DT          DT_RANK, DT_WORLD_SIZE, DT_LOCAL_RANK, DT_LOCAL_SIZE: for scripts that start
                   ranks
       torchrun    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. With
                   TORCHELASTIC_USE_AGENT_STORE=True its own agent listens at that port, and dt
                   takes the next one, or 20000 + port % 10000 if the port is one of those that a
                   system gave to torchrun, from 32768 on
       Open MPI    OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
       PMI         PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS: MPICH, and srun --mpi=pmi2
       SLURM       SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_LOCALID, and the first
                   machine of SLURM_STEP_NODELIST or SLURM_JOB_NODELIST. In steps: a batch script is
                   no rank
   DT_RENDEZVOUS goes before what any of them says. Where nobody says it, ranks of one machine meet
   at 127.0.0.1, at a port from 20000 to 29999 that the job's name gives, or 29500. DT_OK with 0 of
   1 if nothing is set. DT_ERR_ARG, and the variable in text, where a launcher's variables are half
   set or are no such numbers; PMIX_RANK alone is that too, as nothing says of how many. */
DT_API dt_status dt_launch_find(dt_launch *out);

// ==== 2. Groups =================================================================================

/* The axis of a layout that a group belongs to: where its bytes are counted. */
typedef enum dt_axis {
    DT_AXIS_NONE = -1, /* the world, and any group that was not told */
    DT_AXIS_DP = 0,
    DT_AXIS_TP,
    DT_AXIS_CP,
    DT_AXIS_PP,
    DT_AXIS_EP,
    DT_AXES
} dt_axis;

/* A run has room for this many dt_comm_split calls on its world. A call on a smaller group counts
   as a part of one. */
#define DT_MAX_SPLITS 64

/* [local] All ranks of the run. NULL, which is a group of one, for a context that is attached to
   none. */
DT_API dt_comm *dt_world(dt_ctx *ctx);
/* [local] This rank's place in the group; 0 of 1 for NULL. */
DT_API int dt_comm_rank(const dt_comm *comm);
DT_API int dt_comm_size(const dt_comm *comm);
/* [local] The name it was made with: "world", "tp". "one" for NULL. */
DT_API const char *dt_comm_name(const dt_comm *comm);
/* [local] The world rank of a member; -1 outside the group. 0 for NULL. */
DT_API int dt_comm_world_rank(const dt_comm *comm, int rank);
/* [collective: comm] One new group for each color, its ranks ordered by key, equal keys by rank in
   comm. color < 0: this rank joins none and gets NULL without a failure. name (may be NULL) is for
   messages; the first 31 bytes are copied. The group lives as long as the world. NULL after a
   failure; DT_ERR_MEM when DT_MAX_SPLITS is used up. Under MPI a group for which a machine's range
   has no room left works over messages, with the same results. */
DT_API dt_comm *dt_comm_split(dt_comm *comm, int color, int key, const char *name);
/* [local] Bytes that this rank sends in the group by operations that begin from here on count under
   axis. NULL comm: nothing. */
DT_API void dt_comm_set_axis(dt_comm *comm, dt_axis axis);
/* [local] Bytes that this rank sent over groups of that axis so far. They are logical: a property
   of the operation, not of the algorithm that ran. With N ranks, and S the bytes of the full buffer
   (all shares together):
       all-reduce                              2 S (N-1)/N, rounded down where N does not divide it
       reduce-scatter, all-gather, all-to-all  S (N-1)/N, which is N-1 shares
       all-to-all-v                            what goes to other ranks
       broadcast                               S from the root if N > 1, nothing from the others
       scatter                                 N-1 shares from the root, nothing from the others
       reduce, gather                          S, or its share, from all but the root
       send                                    its bytes; receive and barrier nothing
   Scalars (section 6) and dt_comm_split are not counted. Operations that failed are not counted. */
DT_API size_t dt_comm_bytes(const dt_ctx *ctx, dt_axis axis);
/* [local] Seconds that this rank has spent inside operations of section 3 to 6, waiting included;
   of those of at most DT_EAGER_BYTES only what is longer than some 2 us, unless there is a
   trace. */
DT_API double dt_comm_seconds(const dt_ctx *ctx);

/* How a collective goes where no shared memory makes it direct: section 16, with messages and
   bytes. */
typedef enum dt_algorithm {
    DT_ALGORITHM_AUTO = 0, /* shared memory where there is; else by size and ranks */
    DT_DIRECT,             /* everyone to everyone at once */
    /* N-1 steps to the right; sums are taken in the ring's order, another for each share */
    DT_RING,
    DT_DOUBLING, /* distances 1, 2, 4, ... */
    DT_TREE,     /* binomial */
    DT_ALGORITHMS
} dt_algorithm;
/* [collective: comm] From here on operations of this group run by this algorithm, as messages,
   where it has one for them; the others as before. For learning and for tests: all have the same
   result, and but for DT_RING's sums the same bits. */
DT_API void dt_comm_set_algorithm(dt_comm *comm, dt_algorithm algorithm);
/* [local] Messages and bytes that this rank really sent so far as messages: what algorithms cost.
   Those through its machine's memory count too, comparisons (dt_run_desc.check) do not. */
typedef struct dt_traffic {
    size_t messages, bytes;
} dt_traffic;
DT_API dt_traffic dt_comm_traffic(const dt_ctx *ctx);

// ==== 3. Collectives ============================================================================

/* All [collective: comm]. Counts are elements; types are those of dt_dtype (others, and a reduction
   of a type that the context's kernel table does not reduce: DT_ERR_UNSUPPORTED). Buffers are
   memory of the context's device (with comm NULL: host memory, or in place) and may be NULL when
   count is 0, and where a rank has none. Where that is a GPU they may lie in host memory instead,
   both of a call and on all ranks alike: it goes by the processors, is for small data, and not in
   dt_comm_bytes. N is the size of the group. Errors besides those of the contract: DT_ERR_ARG for a
   value outside its range or a missing buffer, DT_ERR_COMM when ranks call different things,
   DT_ERR_TIMEOUT, and the kernel table's own. */

/* recv[i] = send of rank 0 [i] op send of rank 1 [i] op ..., on every rank. send, recv: count. */
DT_API dt_status dt_all_reduce(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op);
/* The same sum on the root only. send: count; recv: count on the root, not used on the others. */
DT_API dt_status dt_reduce(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op, int root);
/* The same sum, of which each rank keeps its own share. send: N * count, recv: count = share `rank`
   of the sum. */
DT_API dt_status dt_reduce_scatter(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op);
/* Every rank's share, in rank order, on every rank. send: count, recv: N * count. */
DT_API dt_status dt_all_gather(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype);
/* The same on the root only. send: count; recv: N * count on the root, not used on the others. */
DT_API dt_status dt_gather(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, int root);
/* Share r of the root's send on rank r. send: N * count on the root, not used on the others; recv:
   count. */
DT_API dt_status dt_scatter(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, int root);
/* Share j of rank i's send becomes share i of rank j's recv. send, recv: N * count; not in
   place. */
DT_API dt_status dt_all_to_all(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype);
/* The same with shares of any length, not in place, dense and in rank order on both sides:
   send_counts[j] elements go to rank j, recv_counts[i] come from rank i (both of N numbers, read
   until the operation ends). A rank that expects another count than it is sent: DT_ERR_COMM, naming
   both. */
DT_API dt_status dt_all_to_all_v(dt_comm *comm, const void *send, const size_t *send_counts,
    void *recv, const size_t *recv_counts, dt_dtype dtype);
/* buf of rank `root` on every rank. buf: count. */
DT_API dt_status dt_broadcast(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int root);
/* No rank leaves before the last has come. */
DT_API dt_status dt_barrier(dt_comm *comm);

// ==== 4. Send and receive =======================================================================

/* [pairwise] buf: count. `to` and `from` are ranks of comm, tag >= 0. A receive takes the oldest
   message of that rank, group and tag; its count and type must be those of the send (else
   DT_ERR_COMM, naming both). Up to DT_EAGER_BYTES a send leaves a copy and returns, for 8 messages
   a pair; larger ones, or a 9th, wait for the receiver, so two ranks that send each other much must
   not both send first: start them (section 5). To itself a rank can send up to DT_EAGER_BYTES, or
   start more. NULL comm: DT_ERR_ARG, there is nobody. */
#define DT_EAGER_BYTES 4096
DT_API dt_status dt_send(
    dt_comm *comm, const void *buf, size_t count, dt_dtype dtype, int to, int tag);
DT_API dt_status dt_recv(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int from, int tag);
/* [pairwise] From whichever rank's message of that group and tag is there first; *from (may be
   NULL): its rank. */
DT_API dt_status dt_recv_any(
    dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int tag, int *from);

// ==== 5. Started operations =====================================================================

/* Each begins an operation and returns: [collective: comm] and [pairwise] as above, in the same
   order on all ranks. The arguments are those of the blocking call; buffers are the operation's
   until dt_wait. It moves on while any other operation waits and between the kernels of this rank's
   tensor ops; there is no hidden thread. Any number may be under way; of one group the first
   DT_MAX_STARTED are shown to the other ranks. NULL: done already (comm NULL), or the context
   failed: dt_wait takes it, and returns which. Every other must be waited for, once, in any order:
   one that is not is a failure when the rank's function returns. */
#define DT_MAX_STARTED 8
typedef struct dt_work dt_work;
DT_API dt_work *dt_all_reduce_start(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op);
DT_API dt_work *dt_reduce_start(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op, int root);
DT_API dt_work *dt_reduce_scatter_start(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op);
DT_API dt_work *dt_all_gather_start(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype);
DT_API dt_work *dt_gather_start(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, int root);
DT_API dt_work *dt_scatter_start(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, int root);
DT_API dt_work *dt_all_to_all_start(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype);
DT_API dt_work *dt_all_to_all_v_start(dt_comm *comm, const void *send, const size_t *send_counts,
    void *recv, const size_t *recv_counts, dt_dtype dtype);
DT_API dt_work *dt_broadcast_start(
    dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int root);
DT_API dt_work *dt_barrier_start(dt_comm *comm);
DT_API dt_work *dt_send_start(
    dt_comm *comm, const void *buf, size_t count, dt_dtype dtype, int to, int tag);
DT_API dt_work *dt_recv_start(
    dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int from, int tag);
/* [pairwise] *from is set when it is waited for. */
DT_API dt_work *dt_recv_any_start(
    dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int tag, int *from);

/* [local] Waits until the operation is over: its buffers are yours again, the work is gone. Returns
   dt_error of ctx. */
DT_API dt_status dt_wait(dt_ctx *ctx, dt_work *work);
/* [local] Advances started operations as far as they can go now; if they are many, each call
   advances only some. Returns 1 when this one is over (dt_wait returns at once). */
DT_API int dt_test(dt_ctx *ctx, dt_work *work);

/* Sends and receives of one call, all under way at once, in any order: what NCCL calls a group. */
typedef struct dt_transfer {
    const void *send; /* one of the two, the other NULL */
    void *recv;
    size_t count;
    dt_dtype dtype;
    int peer, tag;
} dt_transfer;
/* [pairwise] Returns when all n are done. */
DT_API dt_status dt_exchange(dt_comm *comm, const dt_transfer *transfers, int n);

// ==== 6. Scalars and agreement ==================================================================

/* Values in host memory that steer a program; they are not counted as traffic. */

/* [collective: comm] values[i] = the sum over ranks, in rank order, in place. values: n. */
DT_API dt_status dt_sum_doubles(dt_comm *comm, double *values, size_t n);
/* [collective: comm] The sum over ranks divided by their number. NaN after a failure. */
DT_API double dt_mean(dt_comm *comm, double mine);
/* [collective: comm] The first status in rank order that is not DT_OK, on every rank. Fails no
   context: what only one rank may notice, such as a file that is missing, ends in this. */
DT_API dt_status dt_agree(dt_comm *comm, dt_status mine);

// ==== 7. Attach, trace ==========================================================================

/* For a program that has its own threads, or its own way to carry messages. dt_run is these calls
   in a loop. */

/* What the ranks of one run share, for threads (and forks) that the caller starts. */
typedef struct dt_team dt_team;
/* [the caller is the supervisor] desc as for dt_run, backend threads or procs. NULL after a
   failure, which has been logged. */
DT_API dt_team *dt_team_make(dt_run_desc desc);
/* [local] The context of a rank, with the team's tables; of forked ranks, with its heap in the
   range. dt_ctx_free ends it, after dt_comm_detach. NULL after a failure, which the others learn
   of. */
DT_API dt_ctx *dt_team_ctx(dt_team *team, int rank);
/* [the caller is the supervisor] After all ranks have detached, or will never attach: the status of
   the first failure; the report is filled. */
DT_API dt_status dt_team_free(dt_team *team);

#define DT_ANY (-1) /* from whoever comes first */
/* Five functions that carry messages between ranks 0 .. size-1. Messages of one (sender, channel,
   tag) arrive in the order of their sends. A message brings the word of its send, which says what
   it is a part of, or 0 in its place: then that is not compared. send and recv begin a transfer and
   return a request, NULL if they cannot; both must be able to have many under way, and a send must
   not need its receive to have begun for others to go on. recv's from may be DT_ANY. test: 1 the
   transfer is over and the request gone (for a receive *from and *bytes say what came; of a message
   longer than its buffer the rest is dropped), 0 not yet; below 0 it cannot be any more and the
   request is gone, why (512 bytes) says the reason: -1 the peer is lost, -2 the call was wrong, -3
   another rank has called fail, with that text, -4 the peer has ended well. cancel: the request is
   gone, its buffer the caller's. fail: this rank has failed, let others know text. */
typedef struct dt_transport {
    const char *name;
    void *user;
    void *(*send)(void *user, int to, uint32_t channel, int tag, uint64_t word, const void *buf,
        size_t bytes);
    void *(*recv)(void *user, int from, uint32_t channel, int tag, void *buf, size_t bytes);
    int (*test)(void *user, void *request, int *from, uint64_t *word, size_t *bytes, char *why);
    void (*cancel)(void *user, void *request);
    void (*fail)(void *user, const char *text);
} dt_transport;

typedef struct dt_attach_desc {
    int rank;
    dt_team *team;                 /* one of the two */
    const dt_transport *transport; /* copied */
    int size;                      /* ranks of a transport */
    double timeout_s;              /* of a transport: 0 -> 120 */
    dt_link link;                  /* of a transport */
    /* an ncclComm_t of the transport's ranks, in the same order: what is large goes through it. The
       context's table is CUDA's. It remains yours, but if the context fails it has been aborted: do
       not destroy it. NULL: none */
    void *nccl;
} dt_attach_desc;
/* [collective: the ranks to be] Makes ctx (from dt_ctx_make) a rank; its world. NULL after a
   failure. A context for a team is made with dt_team_ctx, which gives it the team's tables. */
DT_API dt_comm *dt_comm_attach(dt_ctx *ctx, dt_attach_desc desc);
/* [local] The rank ends: its groups are gone, and who waits for it learns that. status: what its
   function returned. */
DT_API void dt_comm_detach(dt_ctx *ctx, dt_status status);

/* WHO IS WHERE. Each rank keeps a record of its last DT_RECORDS operations, with the place in the
   source that called them. */
#define DT_RECORDS 128
/* [local] One line for each rank: rank, process, step, seconds, and what it waits for or did last;
   as far as this rank can see: of ranks of tcp, and of other machines, only what they have said.
   Returns the bytes of the whole text; with text NULL it only counts. */
DT_API size_t dt_ranks_text(const dt_ctx *ctx, char *text, size_t bytes);
/* [local] The last operations of a world rank that shares memory with this one, or of itself: one
   line each, the newest first, as dt_ranks_text. */
DT_API size_t dt_records_text(const dt_ctx *ctx, int rank, char *text, size_t bytes);
/* [collective: the world] A training step is over: counts it, for the table above and for
   dt_run_desc.check. Over tcp and mpi the ranks of each group compare what they have called in it:
   DT_ERR_COMM names two that differ. A rank whose own work, without its waits, took more than 1.5
   times the median's in 5 of 8 steps is named in a notice, once in 10 steps. */
DT_API dt_status dt_comm_step(dt_comm *world);

/* A TRACE is what each rank did and when: blocks (dt_block), operations of sections 3 to 6, waits,
   your own marks, memory by class. It is for the eyes, in ui.perfetto.dev or chrome://tracing; a
   rank is a process there, with

       compute         blocks "F 3 block 1" (forward, micro-batch 3; B, I, W; "again": a recomputed
                       block's second run), marks, and "wait all-reduce dp": dt_wait of what was
                       started. They nest.
       comm            operations, from call to return; one that was started from its start to its
                       end, here or, where it overlaps another, in comm 2, comm 3, ...: what lies
                       beside a block and has no wait is hidden
       arrows          from a send to its receive
       memory          bytes by class, when a block or a mark ends

   Without a trace each of these places costs one look at a pointer. */

/* [local] Begins to record, into room for `events` (0 -> 65536) of 88 bytes each, class host: that
   is allocated now, and nothing later. Further events take the place of the oldest. On all ranks,
   between the same operations, and while no messages are under way; a second call fails
   (DT_ERR_ARG). The room is given back when the rank ends. */
DT_API dt_status dt_trace_start(dt_ctx *ctx, size_t events);
/* [local] A mark of your own on the compute track; the first 39 bytes of the name are copied. Marks
   nest with blocks: one that is begun in a block ends with it at the latest. dt_trace_end ends the
   innermost open one of the current block. Without a trace neither does anything. */
DT_API void dt_trace_begin(dt_ctx *ctx, const char *name);
DT_API void dt_trace_end(dt_ctx *ctx);
/* [local] Events that are gone: overwritten, or in blocks and marks more than 32 deep. */
DT_API size_t dt_trace_lost(const dt_ctx *ctx);
/* [collective: the world] Rank 0 writes what all ranks have recorded as one JSON file (Trace Event
   Format), through its io table and like dt_file_write. It holds what has ended: no open block or
   mark, no operation that is still to be waited for. Recording goes on. Ranks send their events in
   pieces, so rank 0 needs about 1 MiB. Times are by rank 0's clock: over a transport the others'
   are set against it now, by the fastest of 8 messages there and back. What is sent for this is not
   recorded and not counted. */
DT_API dt_status dt_trace_write(dt_comm *world, const char *path);

/* WHO CALLED. Each of these functions is a macro too, which tells the place in the source that it
   stands in: for records and messages. A function's address, or its name in brackets, is the
   function. */

/* [local] The next operation on comm, or on another group of the rank, is called there. Returns
   comm. */
DT_API dt_comm *dt_here(dt_comm *comm, const char *file, int line);

#define DT_HERE(comm) \
    dt_here(comm, &__FILE__[sizeof __FILE__ > 32 ? sizeof __FILE__ - 32 : 0], __LINE__)
#define dt_all_reduce(comm, ...) dt_all_reduce(DT_HERE(comm), __VA_ARGS__)
#define dt_reduce(comm, ...) dt_reduce(DT_HERE(comm), __VA_ARGS__)
#define dt_reduce_scatter(comm, ...) dt_reduce_scatter(DT_HERE(comm), __VA_ARGS__)
#define dt_all_gather(comm, ...) dt_all_gather(DT_HERE(comm), __VA_ARGS__)
#define dt_gather(comm, ...) dt_gather(DT_HERE(comm), __VA_ARGS__)
#define dt_scatter(comm, ...) dt_scatter(DT_HERE(comm), __VA_ARGS__)
#define dt_all_to_all(comm, ...) dt_all_to_all(DT_HERE(comm), __VA_ARGS__)
#define dt_all_to_all_v(comm, ...) dt_all_to_all_v(DT_HERE(comm), __VA_ARGS__)
#define dt_broadcast(comm, ...) dt_broadcast(DT_HERE(comm), __VA_ARGS__)
#define dt_barrier(comm) dt_barrier(DT_HERE(comm))
#define dt_all_reduce_start(comm, ...) dt_all_reduce_start(DT_HERE(comm), __VA_ARGS__)
#define dt_reduce_start(comm, ...) dt_reduce_start(DT_HERE(comm), __VA_ARGS__)
#define dt_reduce_scatter_start(comm, ...) dt_reduce_scatter_start(DT_HERE(comm), __VA_ARGS__)
#define dt_all_gather_start(comm, ...) dt_all_gather_start(DT_HERE(comm), __VA_ARGS__)
#define dt_gather_start(comm, ...) dt_gather_start(DT_HERE(comm), __VA_ARGS__)
#define dt_scatter_start(comm, ...) dt_scatter_start(DT_HERE(comm), __VA_ARGS__)
#define dt_all_to_all_start(comm, ...) dt_all_to_all_start(DT_HERE(comm), __VA_ARGS__)
#define dt_all_to_all_v_start(comm, ...) dt_all_to_all_v_start(DT_HERE(comm), __VA_ARGS__)
#define dt_broadcast_start(comm, ...) dt_broadcast_start(DT_HERE(comm), __VA_ARGS__)
#define dt_barrier_start(comm) dt_barrier_start(DT_HERE(comm))
#define dt_send(comm, ...) dt_send(DT_HERE(comm), __VA_ARGS__)
#define dt_recv(comm, ...) dt_recv(DT_HERE(comm), __VA_ARGS__)
#define dt_recv_any(comm, ...) dt_recv_any(DT_HERE(comm), __VA_ARGS__)
#define dt_send_start(comm, ...) dt_send_start(DT_HERE(comm), __VA_ARGS__)
#define dt_recv_start(comm, ...) dt_recv_start(DT_HERE(comm), __VA_ARGS__)
#define dt_recv_any_start(comm, ...) dt_recv_any_start(DT_HERE(comm), __VA_ARGS__)
#define dt_exchange(comm, ...) dt_exchange(DT_HERE(comm), __VA_ARGS__)
#define dt_sum_doubles(comm, ...) dt_sum_doubles(DT_HERE(comm), __VA_ARGS__)
#define dt_mean(comm, ...) dt_mean(DT_HERE(comm), __VA_ARGS__)
#define dt_agree(comm, ...) dt_agree(DT_HERE(comm), __VA_ARGS__)
#define dt_comm_split(comm, ...) dt_comm_split(DT_HERE(comm), __VA_ARGS__)
#define dt_comm_step(comm) dt_comm_step(DT_HERE(comm))

#ifdef __cplusplus
}
#endif
#endif /* DT_COMM_H */

// ==== 8. Implementation: what the ranks of a run share ==========================================

#if defined(DT_IMPLEMENTATION) && !defined(DT_COMM_IMPL)
#define DT_COMM_IMPL

#include "dt_tensor.h"

#include <arpa/inet.h> /* inet_pton, htons */
#include <errno.h>
#include <fcntl.h>   /* fcntl */
#include <ifaddrs.h> /* getifaddrs */
#include <net/if.h>  /* IFF_RUNNING */
#include <netdb.h>   /* getaddrinfo */
#include <netinet/in.h>
#include <netinet/tcp.h> /* TCP_NODELAY */
#include <poll.h>
#include <pthread.h> /* pthread_create, pthread_join: in dt_run and nowhere else */
#include <sched.h>   /* sched_getaffinity */
#include <signal.h>  /* kill, in dt_run */
#include <stdarg.h>
#include <stdio.h>  /* vsnprintf, fflush */
#include <stdlib.h> /* getenv */
#include <string.h>
#include <sys/socket.h>
#include <sys/mman.h>    /* memfd_create */
#include <sys/random.h>  /* getrandom */
#include <sys/stat.h>    /* fstat */
#include <sys/prctl.h>   /* prctl: a rank ends with its supervisor */
#include <sys/syscall.h> /* gettid, pidfd_open: not in every libc */
#include <sys/uio.h>     /* struct iovec */
#include <sys/wait.h>    /* waitpid, in dt_run */
#include <unistd.h>      /* sysconf, fork, _exit */
#ifdef DT_USE_MPI
#define OMPI_SKIP_MPICXX 1 /* its C++ interface, which nobody asks for */
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#endif
#ifdef DT_USE_NCCL
#include <nccl.h>
#if NCCL_VERSION_CODE < NCCL_VERSION(2, 18, 1)
#error "dt_comm.h needs NCCL 2.18.1 or later: ncclCommSplit. -DDT_NO_NCCL builds without"
#endif
#ifdef DT_NCCL_DLOPEN
#include <dlfcn.h>
#endif
#endif

/* Ranks that are threads or forks of one process are one implementation. All that they share lies
   in one range that is taken before the first of them starts, so that an address in it means the
   same to all:

       dt__shared | dt__rank_state x N | dt__pair x N x N | groups, in order of their making | eager
       copies | records | user | heaps

   Ranks that MPI started have such a range for each machine: collectives go through it, and of a
   group that spans machines the messages that do not leave one; sends and receives do not: section
   25.

   Nothing in it is a lock: each word has one writer at a time, and others look at it with atomic
   loads. A word that hands over data is stored with release and loaded with acquire. */

enum {
    DT__LINE = 128, /* two cache lines: processors fetch them in pairs */
    /* messages under way from one rank to another that are copied if they are small */
    DT__MESSAGES = 8,
    DT__MORE = 1024, /* and places for others, as many for each rank */
    DT__MAX_RANKS = 65536,
    DT__NAME_BYTES = 32,
    DT__FILE_BYTES = 32
};

#ifdef DT_NO_CHECKS
#define DT__UNCHECKED 1
#else
#define DT__UNCHECKED 0
#endif

typedef enum dt__op_code {
    DT__ALL_REDUCE = 0,
    DT__REDUCE,
    DT__REDUCE_SCATTER,
    DT__ALL_GATHER,
    DT__GATHER,
    DT__SCATTER,
    DT__ALL_TO_ALL,
    DT__ALL_TO_ALL_V,
    DT__BROADCAST,
    DT__BARRIER,
    DT__SUM_DOUBLES,
    DT__AGREE,
    DT__SPLIT,
    DT__STEP,
    DT__SEND,
    DT__RECV,
    DT__CHECK
} dt__op_code;

/* What a rank calls: the arguments of the public functions under one roof. */
typedef struct dt__call {
    dt__op_code op;
    dt_dtype dtype;
    dt_op redop; /* reductions; else DT_SUM */
    int peer;    /* the root; the other of a send or receive, or DT_ANY; else 0 */
    int tag;     /* send, receive; below 0: part of a generic collective */
    int host;    /* the data are host memory whatever the device: scalars */
    size_t count;
    const void *send;
    void *recv;
    const size_t *send_counts, *recv_counts; /* all-to-all-v */
    int any, *from;                          /* receive from any rank; who it was */
    uint64_t seq;                            /* number of the collective on its group, from 1 */
} dt__call;

/* What one rank shows its group of one call. A rank has DT_MAX_STARTED of these in each group and
   uses them in turn. */
typedef struct __attribute__((aligned(128))) dt__post {
    uint64_t seq;  /* = call.seq once the rest is complete */
    uint64_t what; /* operation, type, reduction, root: equal on all ranks, as is count */
    size_t count;
    const void *send;
    void *recv;
    /* not NULL: others cannot reach send or recv; windows of them are shown here */
    char *staging;
    int kept; /* send is in data */
    /* a small send itself, or all-to-all-v's counts; it goes on to the end of the post */
    uint64_t data[8];
} dt__post;

/* How far one rank is in its group. Operations of a group move their data in the order of seq, in
   one window each or in several; both numbers count windows and only grow. */
typedef struct __attribute__((aligned(128))) dt__member {
    uint64_t opened; /* this rank's staging shows that window */
    char apart[DT__LINE - sizeof(uint64_t)];
    uint64_t closed; /* it touches no other's memory of that window any more */
} dt__member;

typedef struct dt__group {
    char name[DT__NAME_BYTES];
    int size;
    uint32_t channel;    /* which group a message belongs to */
    int *ranks;          /* (size) world ranks */
    dt__member *members; /* (size); NULL: not all share memory */
    char *posts;         /* (size, DT_MAX_STARTED, post_bytes) */
    size_t post_bytes;
} dt__group;

/* One message. The sender fills a free one; the receiver frees it, or tells the waiting sender
   to. */
enum { DT__FREE = 0, DT__POSTED, DT__TAKEN };
typedef struct __attribute__((aligned(64))) dt__message {
    int state;
    int tag, eager;
    uint64_t word; /* dt__word_of its call */
    size_t bytes;
    const void *data;         /* the eager copy, or the sender's own buffer */
    uint64_t order;           /* the oldest of those that match is taken first */
    uint32_t channel;         /* of the group */
    dt__group *group;         /* as its sender knows it */
    struct dt__message *next; /* of dt__pair.more */
} dt__message;

typedef struct __attribute__((aligned(64))) dt__pair { /* from one rank to one other */
    uint64_t sent, begun; /* messages posted; and sends begun: both the sender's */
    dt__message *more;    /* places besides these; the list only grows */
    /* With this list, a message that comes in order is found without a scan of the list: */
    uint64_t posted;          /* the sender's: `sent`, stored after the message is visible */
    dt__message *last, *free; /* the sender's: end of `more`; first place to try for a free one */
    __attribute__((aligned(64))) dt__message *next; /* the receiver's: first to try in `more` */
    uint64_t low; /* the receiver's: the oldest message not taken, if known */
    dt__message message[DT__MESSAGES];
} dt__pair;

/* One operation, as its rank began it. Others read it while it is written: word by word, and twice
   its number. */
typedef struct dt__op_record {
    uint64_t number;    /* of the rank's operations, from 1; 0: is being written */
    uint64_t what, seq; /* as in a post */
    uint64_t count;
    int32_t tag, line; /* of a message; in the source, 0: not known */
    char group[DT__NAME_BYTES];
    char file[DT__FILE_BYTES];
} dt__op_record;

/* What one rank shows all others of itself: DT__LINE bytes, aligned like host memory, which holds
   some of these. */
typedef struct __attribute__((aligned(64))) dt__rank_state {
    int busy;  /* this rank reads or writes memory of others now */
    int ended; /* 1: its rank function has returned, or its process is gone; 2: its
                               process has only to exit with 0 */
    int pid, tid;
    /* grows with everything it does that another, or itself, may wait for: section 11 */
    uint64_t moves;
    /* the sum of all ranks' moves before its last look, which found nothing to do; of one that has
       ended DT__FOR_EVER */
    uint64_t idle_at;
    /* of messages that go over a transport: those begun less those received, and sends that this
       rank does not know to be over */
    int64_t away;
    /* the number of the operation it waits in, if it does so for long; else 0 */
    uint64_t waiting;
    int waits_for;   /* then for this world rank, or DT_ANY */
    int64_t records; /* operations begun; the last are in the ring */
    int64_t step;    /* of dt_comm_step */
    int64_t since;   /* when that wait began, in microseconds of the host's clock */
    int64_t left;    /* when the last one was over that took its time */
} dt__rank_state;

typedef struct dt__shared {
    int ranks, spins, claimed, aborted, ended;
    /* ranks are processes: they reach each other's memory in this range only */
    int apart;
    double timeout_s;
    dt_report first;        /* valid once aborted is set */
    dt__rank_state *state;  /* (ranks); NULL where no memory is shared, as all below */
    dt__op_record *records; /* (ranks, DT_RECORDS) */
    dt__pair *pairs;        /* (ranks, ranks, 2): sender, receiver, dt__pair_of */
    char *room;             /* for groups */
    size_t room_bytes, room_used;
    char *eager; /* (ranks, ranks, 2, DT__MESSAGES, DT_EAGER_BYTES) */
    char *more;  /* for messages that find no place among their pair's */
    size_t more_bytes, more_used;
    char *user;  /* the copy of what dt_run's user points to */
    char *heaps; /* (ranks, heap_bytes) */
    size_t heap_bytes;
    size_t bytes; /* of the range */
} dt__shared;

/* The part of a transport's ranks that share a range. */
typedef struct dt__node {
    dt__shared *shared;
    int seat;                 /* of this rank in the range: its local rank */
    int *seats;               /* (world size); -1: that rank is elsewhere */
    int *homes;               /* (world size) the first rank of its machine */
    void (*look)(void *user); /* at failures elsewhere; moves the transport on */
    void *user;
} dt__node;

typedef struct dt__comm_ops dt__comm_ops; /* section 10 */

enum { DT__FAULTS = 8 };
typedef enum dt__fault_kind {
    DT__NO_FAULT = 0,
    DT__KILL,
    DT__STOP,
    DT__EXIT,
    DT__SPIN,
    DT__DELAY,
    DT__DROP,
    DT__FLIP,
    DT__NAN
} dt__fault_kind;
typedef struct dt__fault {
    dt__fault_kind kind;
    int rank;
    uint64_t seq;
    double s;
} dt__fault;

/* What a rank over a transport says to all others when it waits for long, and when it does so no
   longer. */
enum { DT__SAID_GROUPS = 16, DT__SAID_RANKS = 24 };
#define DT__SAID_END (~(uint64_t)0) /* in place of an operation: the rank has ended */
typedef struct dt__bulletin {
    uint64_t waiting; /* as in dt__rank_state; or DT__SAID_END */
    int64_t records, step;
    int32_t waits_for;
    uint32_t groups;    /* listed below */
    uint32_t sends;     /* not over, as far as it knows */
    dt__op_record wait; /* what it waits in; else its last */
    uint32_t channel;   /* dt__way_of that one's group */
    /* collectives on each of its groups */
    uint32_t channels[DT__SAID_GROUPS], begun[DT__SAID_GROUPS];
    /* messages to and from each of the first ranks */
    uint32_t sent[DT__SAID_RANKS], got[DT__SAID_RANKS];
} dt__bulletin;

/* What one rank over a transport knows of another. */
typedef struct dt__other {
    dt__rank_state state; /* of what that has said last */
    dt__bulletin last;
    uint32_t sent, got; /* messages to and from it */
} dt__other;

/* The way for that, beside the messages: to all others, as far as it goes now. */
typedef struct dt__control {
    void *user;
    void (*say)(void *user, const void *bulletin, size_t bytes);
    int (*pid)(void *user, int rank); /* of a process on this machine; else 0 */
    /* messages that have come from it, received or not; NULL: not known */
    uint32_t (*came)(void *user, int rank);
    int check; /* of dt_run_desc, rank 0's */
    /* moves it on: 0, or what dt_transport's test says of a lost or failed rank; NULL: its messages
       tell */
    int (*look)(void *user, char *why);
} dt__control;

/* What stands for a team's range where no memory is shared. */
typedef struct dt__lone {
    dt__shared shared;
    dt__rank_state state;
    dt__op_record records[DT_RECORDS];
} dt__lone;

/* One rank's own side of a run; its context knows it as "attached". */
typedef struct dt__world {
    dt__shared *shared;
    dt_ctx *ctx;
    const dt_host *host;
    int rank;
    int seat;              /* its place in the range */
    const dt__node *node;  /* NULL: a seat is a rank */
    dt__rank_state *state; /* its own; and its own records */
    dt__op_record *records;
    const char *file; /* which place in the source calls now */
    int line;
    int planted; /* faults, for this rank */
    dt__fault faults[DT__FAULTS];
    double stepped, step_wait; /* when the last step was over, and dt_comm_seconds then */
    /* rank 0: of the last 8, a bit each, those in which slow_rank was a straggler */
    unsigned slow_steps;
    int slow_rank, named_ago; /* steps before one is named again */
    /* in a long wait: for this world rank, which had moved so much when it began */
    int awaited;
    uint64_t awaited_moves;
    int thread;  /* the rank is one of this process's threads */
    int turns;   /* of waits and begun operations */
    int claimed; /* this rank's failure is the first: it alone fills the record */
    dt_listener listener;
    dt_comm *comms;                 /* all of this rank's, the newest first */
    dt_comm *comm;                  /* all ranks */
    dt_transport transport;         /* if that carries the messages */
    uint32_t channels;              /* given to groups so far */
    dt_work *first, *last;          /* started and not waited for, in order of their starts */
    dt_work *open, *last_open;      /* the unfinished ones of these, in the same order */
    size_t started, opened, credit; /* lengths of both lists; see dt__advance_some */
    dt_work *blocking;              /* that a blocking call waits for; else NULL */
    dt_work *idle;                  /* works to use again */
    /* what the device has not finished, in the order of their waits */
    dt_work *flight, *last_flight;
    struct dt__nccl *nccl; /* section 26; NULL: none */
    /* (ranks, 2) of messages from a device over a transport: called, and begun; or NULL */
    uint64_t *mail;
    /* of a large message that its receiver cannot reach; kept for the next */
    void *copy;
    size_t copy_bytes;
    int copy_lent;
    dt_link link;
    double link_free; /* when the link is, of dt_run_desc.link */
    size_t bytes[1 + DT_AXES];
    dt_traffic traffic;
    double seconds;             /* inside operations */
    const dt__control *control; /* NULL: none */
    dt__other *others;          /* (comm_size) with it */
    int comm_size, check;       /* of the world; of dt_run_desc */
    int said;                   /* others know that it waits */
    double said_at;
    uint32_t came;           /* messages, before the last look */
    uint64_t said_moves;     /* then */
    struct dt__trace *trace; /* section 28; NULL: none */
    int *ask;                /* of dt_run_desc, where no supervisor looks at it */
} dt__world;

struct dt_comm {
    dt_group place; /* first: dt_tensor.h reads it */
    dt__world *world;
    const dt__comm_ops *ops;
    dt__group *group;
    uint64_t seq; /* collectives called so far that go in the backend's own way */
    /* of these: shown to the group; done with others' memory */
    uint64_t posted, moved;
    uint64_t begun; /* and of those that the backend's own algorithm does */
    /* collectives called so far that go as messages; and what they were */
    uint64_t messages;
    uint64_t chain;
    uint64_t window;        /* windows done with so far */
    uint64_t closed_by_all; /* and by all of the group, at least */
    /* of the operation that used this post last */
    uint64_t last_window[DT_MAX_STARTED];
    /* that operation's sum still lies in the post */
    int aside[DT_MAX_STARTED];
    char *staging; /* two windows, in the range; NULL until needed */
    dt_algorithm algorithm;
    struct dt__lane *lane; /* of NCCL; NULL: none */
    /* ranks on each machine, if these lie one after another: section 16; else 0 */
    int rails;
    dt_axis axis;
    dt_comm *next;
    size_t bytes;    /* of this struct with its two arrays */
    const void **in; /* (size) where a reduction finds its inputs */
    void **out;      /* (size) and puts its result */
    int32_t *words;  /* (size, 2) what dt_agree and dt_comm_split gather */
};

/* The windows in which memory that others cannot reach is shown to them. */
#define DT_WINDOW_BYTES 262144

/* The place of a world rank in this rank's range; -1: it has none. */
static int dt__seat_of(const dt__world *world, int rank) {
    return world->node ? world->node->seats[rank] : rank;
}

static dt__world *dt__world_of(const dt_ctx *ctx) {
    return ctx ? (dt__world *)dt_ctx_attached(ctx) : NULL;
}

static size_t dt__line_up(size_t bytes) { return (bytes + DT__LINE - 1) / DT__LINE * DT__LINE; }

/* A post has room for a small send, or for the counts of all-to-all-v. */
static size_t dt__post_bytes(int size) {
    size_t counts = (size_t)size * sizeof(size_t);
    return dt__line_up(sizeof(dt__post) + (counts > DT_EAGER_BYTES ? counts : DT_EAGER_BYTES));
}

static size_t dt__group_bytes(int size) {
    return dt__line_up(sizeof(dt__group)) + dt__line_up((size_t)size * sizeof(int)) +
           (size_t)size * (sizeof(dt__member) + (size_t)DT_MAX_STARTED * dt__post_bytes(size));
}

/* Splitting n ranks costs most when each gets a group of its own. */
static size_t dt__room_bytes(int ranks) {
    return dt__group_bytes(ranks) + (size_t)DT_MAX_SPLITS * (size_t)ranks * dt__group_bytes(1);
}

static size_t dt__page_up(size_t bytes) { return (bytes + 65535) / 65536 * 65536; }

/* Lays the range out at `memory`; the shared struct holds sizes already, and is copied there.
   Without memory it only counts. What holds flags is zeroed; the rest is not touched before it is
   used. */
static dt__shared *dt__shared_lay(dt__shared *shared, char *memory, size_t user_bytes) {
    size_t n = (size_t)shared->ranks, at = (DT__LINE - (uintptr_t)memory % DT__LINE) % DT__LINE;
    size_t state = at + dt__line_up(sizeof(dt__shared)), pairs = state + n * sizeof(dt__rank_state);
    size_t room = pairs + dt__line_up(2 * n * n * sizeof(dt__pair)),
           eager = room + dt__room_bytes(shared->ranks);
    size_t more = eager + 2 * n * n * (size_t)DT__MESSAGES * (size_t)DT_EAGER_BYTES;
    size_t records = more + n * (size_t)DT__MORE * (size_t)DT__LINE;
    size_t user = records + dt__line_up(n * DT_RECORDS * sizeof(dt__op_record));
    size_t heaps = dt__page_up(user + dt__line_up(user_bytes));
    shared->room_bytes = eager - room;
    shared->bytes = heaps + n * shared->heap_bytes + DT__LINE;
    if (!memory) return NULL;
    memset(memory + at, 0, room - at);
    shared->state = (dt__rank_state *)(void *)(memory + state);
    shared->pairs = (dt__pair *)(void *)(memory + pairs);
    shared->room = memory + room;
    shared->eager = memory + eager;
    shared->more = memory + more;
    shared->more_bytes = records - more;
    shared->records = (dt__op_record *)(void *)(memory + records);
    shared->user = memory + user;
    shared->heaps = memory + heaps;
    memcpy(memory + at, shared, sizeof *shared);
    return (dt__shared *)(void *)(memory + at);
}

/* Can the other ranks read and write there? */
static int dt__reachable(const dt__shared *shared, const void *p) {
    const char *base = (const char *)shared;
    return !shared->apart ||
           ((const char *)p >= base && (const char *)p < base + shared->bytes - DT__LINE);
}

/* Messages with a tag below 0, of collectives, have places of their own: they must not wait for a
   rank's receives. */
static dt__pair *dt__pair_of(dt__shared *shared, int from, int to, int tag) {
    return &shared->pairs[2 * ((size_t)from * (size_t)shared->ranks + (size_t)to) + (tag < 0)];
}

static char *dt__eager_of(dt__shared *shared, const dt__pair *pair, int message) {
    return shared->eager +
           ((size_t)(pair - shared->pairs) * DT__MESSAGES + (size_t)message) * DT_EAGER_BYTES;
}

static dt__post *dt__post_of(const dt_comm *comm, int rank, uint64_t seq) {
    size_t at = (size_t)rank * DT_MAX_STARTED + (size_t)(seq % DT_MAX_STARTED);
    return (dt__post *)(void *)(comm->group->posts + at * comm->group->post_bytes);
}

static char *dt__post_data(dt__post *post) { return (char *)post + offsetof(dt__post, data); }

static void dt__group_name(dt__group *group, const char *name) {
    size_t length = strlen(name);
    memcpy(group->name, name, length < DT__NAME_BYTES ? length : DT__NAME_BYTES - 1);
}

/* The next piece of a room; NULL: it is used up. Any rank may call it. */
static char *dt__room_take(char *room, size_t room_bytes, size_t *used, size_t bytes) {
    if (__atomic_load_n(used, __ATOMIC_RELAXED) > room_bytes) return NULL;
    size_t at = __atomic_fetch_add(used, bytes, __ATOMIC_RELAXED);
    return at > room_bytes || bytes > room_bytes - at ? NULL : room + at;
}

/* A new group of `size` ranks in the range, its list still to be filled; NULL when the room is used
   up. Any rank may call it. */
static dt__group *dt__group_make(dt__shared *shared, int size, const char *name) {
    size_t bytes = dt__group_bytes(size), n = (size_t)size;
    char *p = dt__room_take(shared->room, shared->room_bytes, &shared->room_used, bytes);
    if (!p) return NULL;
    dt__group *group = (dt__group *)(void *)p;
    memset(group, 0, sizeof *group);
    group->size = size;
    group->channel = (uint32_t)((size_t)(p - shared->room) / DT__LINE);
    group->post_bytes = dt__post_bytes(size);
    p += dt__line_up(sizeof(dt__group));
    group->ranks = (int *)(void *)p;
    p += dt__line_up(n * sizeof(int));
    group->members = (dt__member *)(void *)p;
    memset(group->members, 0, n * sizeof(dt__member));
    group->posts = p + n * sizeof(dt__member);
    for (size_t i = 0; i < n * DT_MAX_STARTED; i++)
        ((dt__post *)(void *)(group->posts + i * group->post_bytes))->seq = 0;
    dt__group_name(group, name);
    return group;
}

/* A timeout clock that leaves out time in which the process is suspended: between two reads it
   advances by at most an eighth of the limit, and at most 1 s. So a process that was stopped in a
   wait (Ctrl-Z, scontrol suspend, a debugger, a suspended machine) does not time out, and a job
   that is suspended as a whole continues when resumed. If one rank alone is stopped, the other
   ranks' stopwatches advance, and they report that rank as late. Because each gap counts a little,
   a wait in a job that is suspended again and again ends too. */
#define DT__READ_MOST_S 1.0
typedef struct dt__stopwatch {
    const dt_host *host;
    double last, seconds, most;
} dt__stopwatch;

static dt__stopwatch dt__stopwatch_start(const dt_host *host, double limit) {
    dt__stopwatch watch = { host, host->now(host->user), 0, fmin(limit / 8, DT__READ_MOST_S) };
    return watch;
}

/* Seconds counted so far. A waiting loop calls this every few milliseconds. */
static double dt__waited(dt__stopwatch *watch) {
    double now = watch->host->now(watch->host->user);
    watch->seconds += fmin(now - watch->last, watch->most);
    watch->last = now;
    return watch->seconds;
}

// ==== 9. The first failure ======================================================================

/* One record for the whole run. Whoever claims it (compare and exchange) fills it and sets the
   abort word; that word is never cleared. Waits look at it every turn, calls when they begin.

   A rank that leaves a collective with an error gives its buffers back to its caller, who may free
   them. So it must not leave while another rank still copies from or to them, and none may start
   to. Each rank therefore raises its busy flag around every access to memory of others. This is
   Dekker's handshake (E. W. Dijkstra, EWD123, 1965):

       who copies:  busy = 1;  if (aborted) { busy = 0; leave; }  copy;  busy = 0
       who leaves:  aborted = 1, or has seen it;  wait until no rank is busy;  leave

   All four accesses are sequentially consistent: either the copier sees the abort word, or the
   leaver sees the flag. The wait for the flags is the one without a time limit: nothing between
   busy = 1 and 0 waits for anybody, and the supervisor clears the flag of a process that died.
   MPI's ranks on one machine have no supervisor: they wait for the flags, and for the record,
   timeout_s at most. */

static int dt__aborted(const dt__shared *shared) {
    return __atomic_load_n(&shared->aborted, __ATOMIC_SEQ_CST);
}

/* rank: of the claimer, -1 the supervisor. */
static int dt__claim(dt__shared *shared, int rank) {
    int expected = 0;
    return __atomic_compare_exchange_n(
        &shared->claimed, &expected, rank + 2, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* Only for whoever claimed it. */
static void dt__publish_failure(dt__shared *shared, int rank, dt_status status, const char *text) {
    size_t length = strlen(text), most = sizeof shared->first.text - 1;
    if (length > most) length = most;
    shared->first.status = status;
    shared->first.rank = rank;
    memcpy(shared->first.text, text, length);
    shared->first.text[length] = 0; /* a rank that died may have begun to write a longer one */
    __atomic_store_n(&shared->aborted, 1, __ATOMIC_SEQ_CST);
}

#ifdef DT_USE_NCCL
static void dt__nccl_abort(dt__world *world);
#else
#define dt__nccl_abort(world) (void)0
#endif

/* The listener through which dt_tensor.h tells of every first failure of a context. Several ranks
   may notice the same one, a norm that is not finite for example: one line of log is enough. */
static int dt__on_failure(dt_ctx *ctx, dt_status status, const char *text, void *user) {
    dt__world *world = (dt__world *)user;
    (void)ctx;
    int first = world->claimed || dt__claim(world->shared, world->rank);
    if (first) dt__publish_failure(world->shared, world->rank, status, text);
    if (first && world->transport.fail) world->transport.fail(world->transport.user, text);
    if (world->nccl) dt__nccl_abort(world);
    return !first;
}

/* One turn of these waits. 0: on a node, which has no supervisor, whoever is waited for has
   died. */
static int dt__still(const dt__world *world, dt__stopwatch *watch) {
    if (!watch->host) *watch = dt__stopwatch_start(world->host, world->shared->timeout_s);
    world->host->sleep(world->host->user, 0);
    return dt__waited(watch) < world->shared->timeout_s || !world->node;
}

static void dt__quiesce(const dt__world *world) {
    dt__stopwatch watch = { NULL, 0, 0, 0 };
    for (int seat = 0; world->shared->state && seat < world->shared->ranks; seat++) {
        const int *busy = &world->shared->state[seat].busy;
        while (__atomic_load_n(busy, __ATOMIC_SEQ_CST) && dt__still(world, &watch)) {
        }
    }
}

/* Somebody has claimed the record, and fills it. */
static void dt__await_record(const dt__world *world) {
    dt__stopwatch watch = { NULL, 0, 0, 0 };
    while (!dt__aborted(world->shared) && dt__still(world, &watch)) {
    }
}

/* Returns 1: memory of others may be touched until dt__touch_end; 0: aborted, hands off. */
static int dt__touch_begin(const dt__world *world) {
    int *busy = &world->shared->state[world->seat].busy;
    __atomic_store_n(busy, 1, __ATOMIC_SEQ_CST);
    if (!dt__aborted(world->shared)) return 1;
    __atomic_store_n(busy, 0, __ATOMIC_SEQ_CST);
    return 0;
}

/* Until the stream is empty, it may still fill what others are about to read, or copy what they are
   about to free. */
static dt_status dt__comm_sync(const dt__world *world) {
    const dt_kernels *kernels = dt_ctx_kernels(world->ctx);
    return kernels->sync ? kernels->sync(dt_ctx_stream(world->ctx)) : DT_OK;
}

/* status: how the copies went. Returns the first error of that and the stream's. */
static dt_status dt__touch_end(const dt__world *world, dt_status status) {
    dt_status synced = dt__comm_sync(world);
    __atomic_store_n(&world->shared->state[world->seat].busy, 0, __ATOMIC_SEQ_CST);
    return status ? status : synced;
}

/* The context has failed. Returns when all buffers are free. */
static void dt__hands_off(dt__world *world) {
    dt__await_record(world);
    dt__quiesce(world);
}

/* Another rank failed first: this context fails with that rank's text. Returns when all buffers are
   free. */
static dt_status dt__peer_failed(dt__world *world) {
    dt__await_record(world);
    dt_status status =
        dt_fail(world->ctx, DT_ERR_PEER, "peer failed first: %s", world->shared->first.text);
    dt__quiesce(world);
    return status;
}

/* A failure that this layer noticed, often on several ranks at once: the first is the failure, the
   others have a peer that failed first. Returns the context's status when all buffers are free. */
DT_PRINTF(3, 4)
static dt_status dt__comm_fail(dt__world *world, dt_status status, const char *fmt, ...) {
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (dt_error(world->ctx) == DT_OK) {
        if (!dt__claim(world->shared, world->rank)) return dt__peer_failed(world);
        world->claimed = 1;
        dt_fail(world->ctx, status, "%s", text);
    }
    dt__quiesce(world);
    return dt_error(world->ctx);
}

// ==== 10. Calls: their pattern, text, data, bytes ===============================================

/* What is under way: a call and how far it is. */
struct dt_work {
    dt_comm *comm;
    dt__call call;
    dt_axis axis; /* of the group, when it was begun */
    /* a state of the function that advances it; that is done; and the link lets go */
    int state, done, over;
    int started;                     /* the rank goes on meanwhile, and may send to itself */
    int next;                        /* a meeting: all ranks before this one are there */
    int (*algorithm)(dt_work *work); /* of section 16, or NULL */
    int stage, round;                /* of that */
    /* the window: elements at .. at+run of each share; the longest share */
    size_t at, run, total;
    uint64_t window;        /* its number on the group */
    int kept;               /* by how many ranks in their post */
    int aside;              /* dt__sums_aside */
    int staged;             /* some rank's memory cannot be reached: windows it is */
    struct dt__part *parts; /* messages of this round */
    int n_parts, room;
    void *scratch;
    size_t scratch_count;
    double begun, link_until; /* when it started; when dt_run_desc.link lets it end */
    uint64_t number;          /* of its record */
    dt_work *check;           /* goes first: the comparison of what all ranks call */
    const dt_work *checks;    /* this is one: of that */
    dt__fault_kind fault;     /* planted in what it received, when it is over */
    double ended;             /* of a started one, with a trace: when it was over */
    /* in a queue of the device, behind the operation; kept for the next work */
    void *mark;
    /* over for the host but not for the device; this is that operation's second half */
    int flies, lands;
    int apart; /* what is waited for goes on in a library */
    /* by NCCL: the communicator, and which of its operations it is, from 1 */
    struct dt__lane *lane;
    uint64_t turn;
    dt_work *later, *earlier;           /* neighbours among the started works */
    dt_work *open_later, *open_earlier; /* neighbours among the unfinished ones */
    int open;                           /* it is unfinished, and so in that list */
};

/* The work that a comparison belongs to is the one that texts name. */
static const dt_work *dt__named(const dt_work *work) { return work->checks ? work->checks : work; }

/* What a backend is: how messages go, and how a collective goes if it knows better than the
   algorithms of section 16, which are built on messages. Each function moves things on as far as
   they go now: 1 over, 0 not yet, -1 the context has failed. */
struct dt__comm_ops {
    const char *name;
    int (*message)(dt_work *work, struct dt__part *part);
    int (*collective)(dt_work *work);
    /* What follows may be NULL. Which algorithm of those that the backend adds does a call, NULL:
       one of section 16; it is called; a group has been split, and made (or NULL) is what this rank
       is in; a group ends; is all well with an operation that the device has not finished? Else the
       context fails. */
    int (*(*algorithm)(const dt_comm *comm, const dt__call *call))(dt_work *work);
    void (*begin)(dt_work *work);
    void (*split)(dt_comm *comm, dt_comm *made, int color);
    void (*close)(dt_comm *comm);
    void (*sound)(dt_work *work);
};

/* All collectives are one thing: some ranks send, some receive, what is sent may be cut into a
   share for each, and what is received may be summed. */
typedef struct dt__pattern {
    const char *name;
    char all_send, all_recv; /* else only the root */
    char cut;                /* send has N shares, and rank r is for share r */
    char sums;
    char counted; /* bytes that a rank sends are counted */
} dt__pattern;

static const dt__pattern *dt__pattern_of(dt__op_code op) {
    static const dt__pattern patterns[] = {
        /*                   send  recv  cut  sums  counted */
        { "all-reduce", 1, 1, 0, 1, 1 },
        { "reduce", 1, 0, 0, 1, 1 },
        { "reduce-scatter", 1, 1, 1, 1, 1 },
        { "all-gather", 1, 1, 0, 0, 1 },
        { "gather", 1, 0, 0, 0, 1 },
        { "scatter", 0, 1, 1, 0, 1 },
        { "all-to-all", 1, 1, 1, 0, 1 },
        { "all-to-all-v", 1, 1, 1, 0, 1 },
        { "broadcast", 0, 1, 0, 0, 1 },
        { "barrier", 1, 1, 0, 0, 0 },
        { "dt_sum_doubles", 1, 1, 0, 1, 0 },
        { "dt_agree", 1, 1, 0, 0, 0 },
        { "dt_comm_split", 1, 1, 0, 0, 0 },
        { "dt_comm_step", 1, 1, 0, 0, 0 },
        { "send", 1, 0, 0, 0, 1 },
        { "receive", 0, 1, 0, 0, 0 },
        { "comparison", 1, 1, 0, 0, 0 },
    };
    return &patterns[op];
}

static int dt__is_to_one(dt__op_code op) { return op == DT__SEND || op == DT__RECV; }

static int dt__sends(const dt_comm *comm, const dt__call *call) {
    return dt__pattern_of(call->op)->all_send ||
           (!dt__is_to_one(call->op) && comm->place.rank == call->peer);
}

static int dt__receives(const dt_comm *comm, const dt__call *call) {
    return dt__pattern_of(call->op)->all_recv ||
           (!dt__is_to_one(call->op) && comm->place.rank == call->peer);
}

static int dt__is_rooted(dt__op_code op) {
    return op == DT__REDUCE || op == DT__GATHER || op == DT__SCATTER || op == DT__BROADCAST;
}

static size_t dt__sum_of(const size_t *counts, int n) {
    size_t sum = 0;
    for (int i = 0; i < n; i++) sum += counts[i];
    return sum;
}

/* Elements in send. */
static size_t dt__send_count(const dt_comm *comm, const dt__call *call) {
    if (call->op == DT__ALL_TO_ALL_V) return dt__sum_of(call->send_counts, comm->place.size);
    return dt__pattern_of(call->op)->cut ? call->count * (size_t)comm->place.size : call->count;
}

static dt__call dt__call_make(
    dt__op_code op, const void *send, void *recv, size_t count, dt_dtype dtype) {
    dt__call call;
    memset(&call, 0, sizeof call);
    call.op = op;
    call.dtype = dtype;
    call.count = count;
    call.send = send;
    call.recv = recv;
    return call;
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

/* Appends to text of `bytes` bytes, as far as it fits; *at is its length. */
DT_PRINTF(4, 5) static void dt__append(char *text, size_t bytes, size_t *at, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    int length = vsnprintf(text + *at, bytes - *at, fmt, args);
    va_end(args);
    if (length > 0) *at = *at + (size_t)length < bytes ? *at + (size_t)length : bytes - 1;
}

typedef struct dt__phrase {
    char s[192];
} dt__phrase; /* by value: a text that needs no owner */

/* "all-reduce f32 x 10 sum", "barrier" */
static dt__phrase dt__call_text(const dt__call *call) {
    dt__phrase text;
    size_t at = 0;
    const dt__pattern *pattern = dt__pattern_of(call->op);
    dt__append(text.s, sizeof text.s, &at, "%s", pattern->name);
    if (call->op == DT__SUM_DOUBLES) dt__append(text.s, sizeof text.s, &at, " x %zu", call->count);
    if (!pattern->counted && call->op != DT__RECV) return text;
    dt__append(text.s, sizeof text.s, &at, " %s", dt_dtype_name(call->dtype));
    if (call->op != DT__ALL_TO_ALL_V) dt__append(text.s, sizeof text.s, &at, " x %zu", call->count);
    if (pattern->sums) dt__append(text.s, sizeof text.s, &at, " %s", dt__redop_name(call->redop));
    if (call->host) dt__append(text.s, sizeof text.s, &at, " in host memory");
    if (dt__is_rooted(call->op)) dt__append(text.s, sizeof text.s, &at, " root %d", call->peer);
    return text;
}

/* All but the count of what the ranks of a collective must call alike, in one word; and back, for
   texts. */
static uint64_t dt__what(const dt__call *call) {
    return (uint64_t)call->op | (uint64_t)call->dtype << 8 | (uint64_t)call->redop << 16 |
           (uint64_t)(call->host != 0) << 24 | (uint64_t)(uint32_t)call->peer << 32;
}

static dt__call dt__call_of_what(uint64_t what, size_t count) {
    dt__call call =
        dt__call_make((dt__op_code)(what & 255), NULL, NULL, count, (dt_dtype)(what >> 8 & 255));
    call.redop = (dt_op)(what >> 16 & 255);
    call.host = (int)(what >> 24 & 1);
    call.peer = (int)(uint32_t)(what >> 32);
    return call;
}

static size_t dt__call_bytes(const dt__call *call) {
    return call->count * dt_dtype_size(call->dtype);
}

/* Bytes that travel go through the device's table, except scalars. */
static dt_status dt__comm_move(
    dt_comm *comm, const dt__call *call, void *dst, const void *src, size_t bytes) {
    const dt_kernels *kernels = dt_ctx_kernels(comm->world->ctx);
    if (bytes == 0 || dst == src) return DT_OK;
    if (!call->host && kernels->move)
        return kernels->move(dst, src, bytes, dt_ctx_stream(comm->world->ctx));
    memcpy(dst, src, bytes);
    return DT_OK;
}

/* comm->out[..outs][i] = comm->in[0][i] op comm->in[1][i] op ...: rank order, always. What is
   summed into may be among the inputs, unless it is far: see dt_reduce_args. */
static dt_status dt__combine(
    dt_comm *comm, const dt__call *call, int outs, int n, size_t count, int far) {
    const dt_kernels *kernels = dt_ctx_kernels(comm->world->ctx);
    if (count == 0) return DT_OK;
    if (call->op != DT__SUM_DOUBLES) {
        dt_reduce_args args = { call->dtype, comm->out[0], comm->in, n, count, call->redop,
            comm->out + 1, outs - 1, far };
        if (call->host) return dt_kernels_cpu()->reduce(&args, NULL);
        return kernels->reduce ? kernels->reduce(&args, dt_ctx_stream(comm->world->ctx))
                               : DT_ERR_UNSUPPORTED;
    }
    for (size_t i = 0; i < count; i++) {
        double sum = ((const double *)comm->in[0])[i];
        for (int rank = 1; rank < n; rank++) sum += ((const double *)comm->in[rank])[i];
        for (int k = 0; k < outs; k++) ((double *)comm->out[k])[i] = sum;
    }
    return DT_OK;
}

/* A copy or a kernel of this call answered with an error; or one before it, of which a device tells
   only now. */
static dt_status dt__data_failed(dt_comm *comm, const dt__call *call, dt_status status) {
    return dt__comm_fail(comm->world, status, "%s #%llu on %s: the kernel table '%s' answers %s%s",
        dt__call_text(call).s, (unsigned long long)call->seq, comm->group->name,
        dt_ctx_kernels(comm->world->ctx)->name, dt_status_name(status),
        status == DT_ERR_ARG ? " (an id, a label or a row outside of its table, here or before)"
                             : "");
}

/* What dt_comm_bytes documents. */
static size_t dt__sent_bytes(const dt_comm *comm, const dt__call *call) {
    size_t n = (size_t)comm->place.size, bytes = dt__call_bytes(call), twice = 2 * (n - 1);
    int root = comm->place.rank == call->peer;
    /* in host memory it steers the program */
    if (call->host || !dt__pattern_of(call->op)->counted) return 0;
    switch (call->op) {
    case DT__ALL_REDUCE: return bytes / n * twice + bytes % n * twice / n;
    case DT__REDUCE:
    case DT__GATHER: return root ? 0 : bytes;
    case DT__SCATTER: return root ? bytes * (n - 1) : 0;
    case DT__BROADCAST: return root && n > 1 ? bytes : 0;
    case DT__ALL_TO_ALL_V:
        return (dt__send_count(comm, call) - call->send_counts[comm->place.rank]) *
               dt_dtype_size(call->dtype);
    case DT__SEND: return bytes;
    default: return bytes * (n - 1);
    }
}

/* The first element of chunk i when count elements are cut into `parts` chunks that differ by at
   most one. */
static size_t dt__chunk_first(size_t count, int parts, int i) {
    size_t each = count / (size_t)parts, extra = count % (size_t)parts, before = (size_t)i;
    return before * each + (before < extra ? before : extra);
}

/* Scratch of count elements of the call's type, one for each work; NULL with the context failed. */
static void *dt__scratch(dt_work *work, size_t count) {
    work->scratch_count = count;
    work->scratch = work->comm->words; /* any address will do for nothing */
    if (count == 0) return work->scratch;
    work->scratch = dt_alloc(work->comm->world->ctx, work->call.host ? DT_MEM_HOST : DT_MEM_COMM,
        count * dt_dtype_size(work->call.dtype), dt__pattern_of(work->call.op)->name);
    return work->scratch;
}

static void dt__scratch_free(dt_work *work) {
    if (work->scratch && work->scratch_count > 0)
        dt_free(work->comm->world->ctx, work->call.host ? DT_MEM_HOST : DT_MEM_COMM, work->scratch,
            work->scratch_count * dt_dtype_size(work->call.dtype));
    work->scratch = NULL;
}

// ==== 11. What each rank is at ==================================================================

/* Each rank shows what it has begun (records), whether it waits, for whom, and how much it has
   done: `moves`. From these the others tell why a wait is long (section 18), and that it can never
   end:

   A rank that waits takes the sum P of all ranks' moves, looks at all that it has under way, and if
   nothing moves shows P. Once all have shown the same P, and the sum is still P, each has looked in
   vain after the last thing that any of them did. So none will ever do anything: a deadlock is
   proved, at once and without a limit of time. This rests on counting every change that somebody
   may wait for, after it is made: whoever has a change in its sum can see it. */

static void dt__moved(dt__world *world) {
    __atomic_store_n(&world->state->moves, world->state->moves + 1, __ATOMIC_RELEASE);
}

#define DT__FOR_EVER (~(uint64_t)0)

static uint64_t dt__moves_of_all(const dt__shared *shared) {
    uint64_t sum = 0;
    for (int seat = 0; seat < shared->ranks; seat++)
        sum += __atomic_load_n(&shared->state[seat].moves, __ATOMIC_ACQUIRE);
    return sum;
}

/* Plain stores of whole words, which a reader may meet half-way. */
static void dt__words_put(void *to, const void *from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
        uint64_t word;
        memcpy(&word, (const char *)from + at, sizeof word);
        __atomic_store_n((uint64_t *)(void *)((char *)to + at), word, __ATOMIC_RELEASE);
    }
}

static void dt__words_get(void *to, const void *from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
        uint64_t word = __atomic_load_n(
            (const uint64_t *)(const void *)((const char *)from + at), __ATOMIC_ACQUIRE);
        memcpy((char *)to + at, &word, sizeof word);
    }
}

/* The operation begins: it has a number and a record. */
static void dt__record_make(dt_work *work) {
    dt__world *world = work->comm->world;
    uint64_t number = (uint64_t)world->state->records + 1;
    dt__op_record *slot = &world->records[number % DT_RECORDS], r;
    r.number = 0;
    r.what = dt__what(&work->call);
    r.seq = work->call.seq;
    r.count = work->call.count;
    r.tag = work->call.tag;
    r.line = world->line;
    memcpy(r.group, work->comm->group->name, sizeof r.group);
    memset(r.file, 0, sizeof r.file);
    if (world->file) strncpy(r.file, world->file, sizeof r.file - 1);
    __atomic_store_n(&slot->number, 0, __ATOMIC_RELEASE);
    dt__words_put(&slot->what, &r.what, sizeof r - offsetof(dt__op_record, what));
    __atomic_store_n(&slot->number, number, __ATOMIC_RELEASE);
    __atomic_store_n(&world->state->records, (int64_t)number, __ATOMIC_RELEASE);
    work->number = number;
    dt__moved(world);
}

/* What this rank can see of another: all, where they share memory; else what that has said last. */
typedef struct dt__op_ring {
    const dt__op_record *records;
    int n;
} dt__op_ring;
typedef struct dt__seen {
    const dt__rank_state *state; /* NULL: nothing */
    dt__op_ring ring;
} dt__seen;

static dt__seen dt__seen_of_seat(const dt__shared *shared, int seat) {
    dt__seen seen = { &shared->state[seat],
        { shared->records + (size_t)seat * DT_RECORDS, DT_RECORDS } };
    return seen;
}

static dt__seen dt__seen_of(const dt__world *world, int rank) {
    dt__seen seen = { NULL, { NULL, 1 } };
    if (rank == DT_ANY) return seen;
    int seat = world->shared->state ? dt__seat_of(world, rank) : -1;
    if (seat >= 0) return dt__seen_of_seat(world->shared, seat);
    if (rank == world->rank) {
        seen.state = world->state;
        seen.ring.records = world->records;
        seen.ring.n = DT_RECORDS;
    } else if (world->others) {
        seen.state = &world->others[rank].state;
        seen.ring.records = &world->others[rank].last.wait;
    }
    return seen;
}

/* A copy of one of its records; 0: it is not there, or not any more. */
static int dt__record_get(dt__op_ring ring, uint64_t number, dt__op_record *copy) {
    if (!ring.records || number == 0) return 0;
    const dt__op_record *slot = &ring.records[number % (uint64_t)ring.n];
    if (__atomic_load_n(&slot->number, __ATOMIC_ACQUIRE) != number) return 0;
    dt__words_get(copy, slot, sizeof *copy);
    return __atomic_load_n(&slot->number, __ATOMIC_RELAXED) == number && copy->number == number;
}

/* The file without its folders. */
static const char *dt__file_name(const char *file) {
    const char *slash = strrchr(file, '/');
    return slash ? slash + 1 : file;
}

/* " at train.c:88", or nothing. */
static dt__phrase dt__site_text(const char *file, int line) {
    dt__phrase text;
    text.s[0] = 0;
    if (file && file[0]) snprintf(text.s, sizeof text.s, " at %s:%d", dt__file_name(file), line);
    return text;
}

/* "all-reduce f32 x 10 sum #4 on world at train.c:88", "receive f32 x 10 from its rank 2 with tag 1
   on world at ...": roots and peers are ranks of the group */
static dt__phrase dt__record_text(const dt__op_record *r) {
    dt__call call = dt__call_of_what(r->what, (size_t)r->count);
    dt__phrase text = dt__call_text(&call);
    size_t at = strlen(text.s);
    if (!dt__is_to_one(call.op))
        dt__append(text.s, sizeof text.s, &at, " #%llu", (unsigned long long)r->seq);
    else if (call.peer == DT_ANY)
        dt__append(text.s, sizeof text.s, &at, " from any rank with tag %d", r->tag);
    else
        dt__append(text.s, sizeof text.s, &at, " %s its rank %d with tag %d",
            call.op == DT__SEND ? "to" : "from", call.peer, r->tag);
    dt__append(text.s, sizeof text.s, &at, " on %s%s", r->group, dt__site_text(r->file, r->line).s);
    dt__escape(text.s, sizeof text.s);
    return text;
}

dt_comm *dt_here(dt_comm *comm, const char *file, int line) {
    if (!comm) return NULL;
    comm->world->file = file;
    comm->world->line = line;
    return comm;
}

/* Where that rank called collective `seq` of the group, if its record is still there. */
static dt__phrase dt__site_of(const dt_comm *comm, int world_rank, uint64_t seq) {
    dt__seen seen = dt__seen_of(comm->world, world_rank);
    int64_t last = seen.state ? __atomic_load_n(&seen.state->records, __ATOMIC_ACQUIRE) : 0;
    dt__op_record r;
    for (int64_t n = last; n > 0 && n > last - seen.ring.n; n--) {
        if (!dt__record_get(seen.ring, (uint64_t)n, &r) || r.seq != seq) continue;
        if (!dt__is_to_one((dt__op_code)(r.what & 255)) && strcmp(r.group, comm->group->name) == 0)
            return dt__site_text(r.file, r.line);
    }
    return dt__site_text(NULL, 0);
}

/* Where this rank called it. */
static dt__phrase dt__own_site(const dt_work *work) {
    const dt__world *world = work->comm->world;
    dt__op_record r;
    int there = dt__record_get(dt__seen_of(world, world->rank).ring, dt__named(work)->number, &r);
    return dt__site_text(there ? r.file : NULL, there ? r.line : 0);
}

/* A rank has ended, and will never call the collective that this one waits in. Over a transport
   several ranks may notice that at once: they say it in the same words, and name the first other
   rank of the group. */
static dt_status dt__ended_without(dt_work *work, int world_rank) {
    const dt_comm *comm = work->comm;
    int first = comm->group->ranks[comm->group->ranks[0] == world_rank ? 1 : 0];
    const char *name = dt__pattern_of(dt__named(work)->call.op)->name;
    if (comm->group->members)
        return dt__comm_fail(comm->world, DT_ERR_COMM,
            "rank %d ended without calling %s #%llu on %s, in which rank %d "
            "waits%s",
            world_rank, name, (unsigned long long)work->call.seq, comm->group->name,
            comm->world->rank, dt__own_site(work).s);
    return dt__comm_fail(comm->world, DT_ERR_COMM,
        "rank %d ended without calling %s #%llu on %s, which rank %d and "
        "all of it must call%s",
        world_rank, name, (unsigned long long)work->call.seq, comm->group->name, first,
        dt__own_site(work).s);
}

/* What one rank calls, for a comparison. */
typedef struct dt__shown {
    uint64_t what, count;
    dt__phrase site; /* " at train.c:88", or empty */
} dt__shown;

static void dt__show_own(const dt_work *work, dt__shown *own) {
    own->what = dt__what(&work->call);
    own->count = work->call.count;
    own->site = dt__own_site(work);
}

/* Two ranks of the group call different things. */
static dt_status dt__calls_differ(
    dt_work *work, int rank, const dt__shown *its, int other, const dt__shown *theirs) {
    const dt_comm *comm = work->comm;
    dt__call one = dt__call_of_what(its->what, (size_t)its->count);
    dt__call two = dt__call_of_what(theirs->what, (size_t)theirs->count);
    return dt__comm_fail(comm->world, DT_ERR_COMM,
        "rank %d calls %s%s, rank %d calls %s%s (operation %llu on %s)", comm->group->ranks[rank],
        dt__call_text(&one).s, its->site.s, comm->group->ranks[other], dt__call_text(&two).s,
        theirs->site.s, (unsigned long long)work->call.seq, comm->group->name);
}

// ==== 12. Waiting, and what moves meanwhile =====================================================

/* Every wait for another rank is this one. Where each rank has a core it first spins, because the
   other is about to come and a system call costs more than the wait; then it lets other threads
   run; then it naps, each time for a sixteenth of what it has waited, so that it wakes up little
   too late. Ranks that outnumber the cores go to the second step at once: whoever spins keeps the
   awaited rank from running. Each turn it moves everything that this rank has started; whenever
   that has moved data, the wait begins anew: each step of a long operation is a wait of its own. */

enum { DT__SPINS = 50, DT__YIELDS = 200 }; /* some 2 us; some 100 us */
#define DT__NAP_MIN 20e-6
#define DT__NAP_MAX 1e-3

/* Cores that this process may use. */
static int dt__cores(void) {
#ifdef CPU_COUNT /* declared with _GNU_SOURCE */
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}

static void dt__pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int dt__has_ended(const dt__shared *shared, int seat) {
    return shared->state && __atomic_load_n(&shared->state[seat].ended, __ATOMIC_ACQUIRE);
}

/* Ranks that share memory on one node of a transport: what goes on elsewhere is looked at every so
   many turns of a wait, and operations, for one that is over at once does not wait. */
enum { DT__LOOK = 16 };
static void dt__look(dt__world *world) {
    if (world->node && ++world->turns % DT__LOOK == 0) world->node->look(world->node->user);
}

static int dt__algorithm_advance(dt_work *work);
static dt_status dt__late(dt_work *work);
static int dt__idle(dt_work *work, uint64_t at, double since);
static void dt__answer(dt__world *world);
static void dt__heard(dt__world *world, int rank, const void *bulletin);
static void dt__say_wait(dt__world *world, const dt_work *work, int ended);
static int dt__check_advance(dt_work *work);
static void dt__check_free(dt_work *work);
static void dt__fault_before(dt_work *work);
static void dt__fault_after(dt_work *work);

/* The trace, section 28: called only if there is one. */
static void dt__trace_op(dt_work *work, double begin, double end);
static void dt__trace_wait(dt_work *work, double begin, double end);
static uint64_t dt__trace_number(dt__world *world, const dt_work *work);
static void dt__trace_free(dt__world *world);

/* Moves one work on: 1 over, 0 not yet, -1 the context has failed. */
static int dt__advance(dt_work *work) {
    const dt_host *host = work->comm->world->host;
    if (work->over) return 1;
    int checked = work->check ? dt__check_advance(work) : 1;
    if (checked <= 0) return checked;
    int as_messages = work->algorithm || dt__is_to_one(work->call.op);
    if (!work->done) {
        work->done = as_messages ? dt__algorithm_advance(work) : work->comm->ops->collective(work);
        if (work->done > 0) dt__moved(work->comm->world);
    }
    if (work->done <= 0) return work->done;
    if (work->link_until > 0 && host->now(host->user) < work->link_until) return 0;
    if (work->comm->world->trace && work->begun > 0) work->ended = host->now(host->user);
    dt__moved(work->comm->world);
    return work->over = 1;
}

static void dt__open_end(dt__world *world, dt_work *work) {
    if (!work->open) return;
    work->open = 0;
    world->opened--;
    if (work->open_earlier)
        work->open_earlier->open_later = work->open_later;
    else
        world->open = work->open_later;
    if (work->open_later)
        work->open_later->open_earlier = work->open_earlier;
    else
        world->last_open = work->open_earlier;
}

/* Advances all started works that are unfinished, in the order of their starts. */
static void dt__advance_all(dt__world *world) {
    for (dt_work *work = world->open; work; work = work->open_later) {
        if (dt__advance(work) < 0) return;
        if (work->over) dt__open_end(world, work); /* work->open_later stays */
    }
}

/* The same for callers that do not wait, and so may call once for each start: every call earns
   DT__STEPS of credit, and all works advance once the credit covers their number. So n started
   operations cost O(n), not O(n^2). 1: all have advanced. */
enum { DT__STEPS = 16 };
static int dt__advance_some(dt__world *world) {
    world->credit += DT__STEPS;
    if (world->credit < world->opened) return 0;
    world->credit = 0;
    dt__advance_all(world);
    return 1;
}

/* Until `work` is over. *begin below 0: becomes the time at which it was no longer just about to
   be. */
static dt_status dt__wait_for(dt__world *world, dt_work *work, double *begin) {
    const dt_host *host = world->host;
    double since = 0, timeout = world->shared->timeout_s;
    dt__stopwatch watch = { NULL, 0, 0, 0 };
    uint64_t seen = world->state->moves, at = 0;
    int turned = 0; /* from the second turn on, there is time to advance all */
    for (int turn = -world->shared->spins;; turn += turn < DT__YIELDS) {
        if (turn >= 0) world->turns = DT__LOOK - 1; /* look now: the wait is long enough */
        dt__look(world);
        int naps = turn == DT__YIELDS;
        if (naps && world->shared->state) at = dt__moves_of_all(world->shared);
        if (world->open && turned++)
            dt__advance_all(world);
        else if (world->open)
            dt__advance_some(world);
        int done = dt_error(world->ctx) ? -1 : dt__advance(work);
        if (done > 0) return DT_OK;
        if (done < 0) return dt_error(world->ctx);
        if (dt__aborted(world->shared)) return dt__peer_failed(world);
        if (seen != world->state->moves) {
            seen = world->state->moves;
            turn = -world->shared->spins;
        }
        if (turn < 0) {
            dt__pause();
            continue;
        }
        if (turn == 0) {
            watch = dt__stopwatch_start(host, timeout);
            since = fmax(watch.last, work->link_until);
            watch.seconds = watch.last - since; /* time on the slow link is no wait */
        }
        double waited = dt__waited(&watch), now = watch.last;
        if (*begin < 0) *begin = now;
        if (waited > timeout) return dt__advance(work) > 0 ? DT_OK : dt__late(work);
        if (naps && turn == DT__YIELDS && dt__idle(work, at, since)) return dt_error(world->ctx);
        double left = work->link_until - now;
        if (left > 0 || turn < DT__YIELDS) {
            host->sleep(host->user, left <= 0 ? 0 : left < DT__NAP_MAX ? left : DT__NAP_MAX);
            continue;
        }
        host->sleep(host->user, fmin(fmax(waited / 16, DT__NAP_MIN), DT__NAP_MAX));
    }
}

static dt_status dt__drive(dt__world *world, dt_work *work, double *begin) {
    dt_status status = dt__wait_for(world, work, begin);
    if (world->state->waiting) __atomic_store_n(&world->state->waiting, 0, __ATOMIC_SEQ_CST);
    if (world->said && status == DT_OK) dt__say_wait(world, NULL, 0);
    return status;
}

// ==== 13. Messages in shared memory =============================================================

/*     small:  sender copies into a free message of the pair, goes on   ...   receiver copies out, frees the message
       large:  sender shows its buffer, waits   ...   receiver copies from it, says so   ...   sender frees the message

   One copy more, or one wait more: eager and rendezvous, as in every MPI. Cost: 2 copies of the
   bytes, or 1. A buffer that the receiver cannot reach is copied into the range first. */

/* One message of a work. */
typedef struct dt__part {
    dt__op_code op; /* DT__SEND or DT__RECV */
    int peer, tag;  /* rank of the group, or DT_ANY */
    size_t count;
    const void *send;
    void *recv;
    int state, over;
    /* which of the pair's it is: of a send, and of a receive once it has come */
    uint64_t order;
    dt__message *message;
    uint64_t seen; /* of a receive: see dt__message_there */
    void *copy;    /* of a buffer that cannot be reached */
    /* of a device's buffer, in host memory; behind the copying from it or to it */
    void *aside, *mark;
    uint64_t number; /* of a send from a device: which of those to that rank, from 0 */
    uint64_t turn;   /* by NCCL: which of its lane's messages it is, from 0 */
    int called;      /* it has its number, and a mark */
    void *card;      /* what its sender announces */
    void *request;   /* of a transport */
} dt__part;

enum { DT__CARD_BYTES = 128 };

/* The text of a message in a failure; of one that a collective is made of, the collective's. */
static dt__phrase dt__part_text(const dt_work *work, const dt__part *part) {
    const dt_comm *comm = work->comm;
    dt__call call = part->tag < 0
                        ? dt__named(work)->call
                        : dt__call_make(part->op, NULL, NULL, part->count, work->call.dtype);
    dt__phrase text = dt__call_text(&call);
    size_t at = strlen(text.s);
    if (part->tag < 0)
        dt__append(text.s, sizeof text.s, &at, " #%llu", (unsigned long long)work->call.seq);
    else if (part->peer == DT_ANY)
        dt__append(text.s, sizeof text.s, &at, " from any rank with tag %d", part->tag);
    else
        dt__append(text.s, sizeof text.s, &at, " %s rank %d with tag %d",
            part->op == DT__SEND ? "to" : "from", comm->group->ranks[part->peer], part->tag);
    dt__append(text.s, sizeof text.s, &at, " on %s%s", comm->group->name, dt__own_site(work).s);
    return text;
}

/* The other half of a part will never come: its rank has ended. Always -1. */
static int dt__part_never(dt_work *work, const dt__part *part) {
    dt__phrase text = dt__part_text(work, part);
    int other = part->peer == DT_ANY ? -1 : work->comm->group->ranks[part->peer];
    if (part->tag < 0) return dt__ended_without(work, other), -1;
    if (other == work->comm->world->rank)
        dt__comm_fail(work->comm->world, DT_ERR_COMM,
            "%s: a rank that waits for itself waits for ever", text.s);
    else if (other < 0)
        dt__comm_fail(work->comm->world, DT_ERR_COMM,
            "all other ranks ended without the other half of %s", text.s);
    else
        dt__comm_fail(work->comm->world, DT_ERR_COMM, "rank %d ended without the other half of %s",
            other, text.s);
    return -1;
}

static dt_status dt__counts_differ(dt_work *work, int from, size_t sent, size_t expected) {
    const dt_comm *comm = work->comm;
    return dt__comm_fail(comm->world, DT_ERR_COMM,
        "rank %d sends %zu to rank %d, which expects %zu (%s #%llu on %s%s)",
        comm->group->ranks[from], sent, comm->world->rank, expected,
        dt__pattern_of(work->call.op)->name, (unsigned long long)work->call.seq, comm->group->name,
        dt__own_site(work).s);
}

/* What came is not what was expected. Always -1. */
static int dt__part_differs(
    dt_work *work, const dt__part *part, int from, dt_dtype dtype, size_t count) {
    const dt_comm *comm = work->comm;
    if (part->tag < 0) return dt__counts_differ(work, from, count, part->count), -1;
    dt__comm_fail(comm->world, DT_ERR_COMM,
        "rank %d sends %s x %zu, rank %d receives %s x %zu (tag %d on %s)",
        comm->group->ranks[from], dt_dtype_name(dtype), count, comm->world->rank,
        dt_dtype_name(work->call.dtype), part->count, part->tag, comm->group->name);
    return -1;
}

/* What a message says of the call that it is a part of, in 63 bits and one that is set: of the
   count the last 36. 0 of a comparison. */
static uint64_t dt__word_of(const dt__call *call, size_t part_count) {
    uint64_t count = dt__is_to_one(call->op) ? (uint64_t)part_count : (uint64_t)call->count;
    uint64_t op = call->op == DT__RECV ? (uint64_t)DT__SEND : (uint64_t)call->op;
    uint64_t peer = dt__is_to_one(call->op) ? 0 : (uint64_t)(uint32_t)call->peer & 0xffff;
    if (call->op == DT__CHECK) return 0;
    return (uint64_t)1 << 63 | op << 59 | (uint64_t)call->dtype << 55 |
           (uint64_t)call->redop << 52 | peer << 36 | (count & 0xfffffffff);
}

static dt_dtype dt__word_dtype(uint64_t word) { return (dt_dtype)(word >> 55 & 15); }

/* A message came that is a part of something else than this rank calls. Always -1. */
static int dt__word_differs(dt_work *work, const dt__part *part, int from, uint64_t word) {
    dt__shown its, own;
    dt_dtype dtype = dt__word_dtype(word);
    if (dt__is_to_one(work->call.op))
        return dt__part_differs(work, part, from, dtype, (size_t)(word & 0xfffffffff));
    memset(&its, 0, sizeof its);
    its.what = (word >> 59 & 15) | (uint64_t)dtype << 8 | (word >> 52 & 7) << 16 |
               (word >> 36 & 0xffff) << 32;
    its.count = word & 0xfffffffff;
    dt__show_own(work, &own);
    return dt__calls_differ(work, from, &its, work->comm->place.rank, &own), -1;
}

/* Is the message that came, with word 0 if that is not known, this part's other half? 1, or -1 and
   the rank fails. */
static int dt__part_fits(
    dt_work *work, const dt__part *part, int from, uint64_t word, size_t bytes) {
    size_t size = dt_dtype_size(work->call.dtype);
    if (word && word != dt__word_of(&work->call, part->count))
        return dt__word_differs(work, part, from, word);
    if (bytes != part->count * size)
        return dt__part_differs(work, part, from, work->call.dtype, bytes / size);
    return 1;
}

/* The place after this one; the first for NULL. */
static dt__message *dt__next_message(dt__pair *pair, dt__message *message) {
    dt__message *last = pair->message + DT__MESSAGES - 1;
    if (!message) return pair->message;
    if (message >= pair->message && message < last) return message + 1;
    return __atomic_load_n(message == last ? &pair->more : &message->next, __ATOMIC_ACQUIRE);
}

/* The next message of `more`; after the last comes the first. */
static dt__message *dt__more_after(dt__pair *pair, dt__message *message) {
    dt__message *next = __atomic_load_n(&message->next, __ATOMIC_ACQUIRE);
    return next ? next : __atomic_load_n(&pair->more, __ATOMIC_ACQUIRE);
}

static int dt__is_more(const dt__pair *pair, const dt__message *message) {
    return message < pair->message || message >= pair->message + DT__MESSAGES;
}

static dt__message *dt__free_more(dt__pair *pair) {
    dt__message *first = pair->free ? pair->free : pair->more, *message = first;
    while (message) {
        dt__message *after = dt__more_after(pair, message);
        if (__atomic_load_n(&message->state, __ATOMIC_ACQUIRE) == DT__FREE) {
            pair->free = after;
            return message;
        }
        message = after == first ? NULL : after;
    }
    return NULL;
}

/* A free message of the pair; NULL: none now. One more is made for a started send that finds none,
   of which any number may be under way, and on a node for a collective: the receiver may not take
   the others before it has this one. Without room for it a send waits for one of the others; in a
   collective the rank fails, as it would wait for ever. */
static dt__message *dt__free_message(dt__world *world, dt__pair *pair, int tag, int started) {
    dt__message *message = NULL;
    dt__shared *shared = world->shared;
    for (int i = 0; i < DT__MESSAGES; i++)
        if (__atomic_load_n(&pair->message[i].state, __ATOMIC_ACQUIRE) == DT__FREE)
            return &pair->message[i];
    if ((message = dt__free_more(pair))) return message;
    if (tag >= 0 ? !started : !world->node) return NULL;
    message = (dt__message *)(void *)(tag >= 0 ? dt__room_take(shared->more, shared->more_bytes,
                                                     &shared->more_used, DT__LINE)
                                               : dt__room_take(shared->room, shared->room_bytes,
                                                     &shared->room_used, DT__LINE));
    if (!message && tag < 0)
        dt__comm_fail(world, DT_ERR_MEM,
            "the range of this machine has no room for one more message under way");
    if (!message) return NULL;
    memset(message, 0, sizeof *message);
    __atomic_store_n(pair->last ? &pair->last->next : &pair->more, message, __ATOMIC_RELEASE);
    pair->last = message;
    return message;
}

/* Room in the range for a copy of a large message. One buffer, the largest so far, is kept for the
   next. */
static void *dt__copy_take(dt__world *world, size_t bytes) {
    if (world->copy_lent)
        return dt_alloc(world->ctx, DT_MEM_COMM, bytes, "a copy that others can reach");
    if (world->copy_bytes < bytes) {
        dt_free(world->ctx, DT_MEM_COMM, world->copy, world->copy_bytes);
        world->copy = dt_alloc(world->ctx, DT_MEM_COMM, bytes, "a copy that others can reach");
        world->copy_bytes = world->copy ? bytes : 0;
    }
    world->copy_lent = world->copy != NULL;
    return world->copy;
}

static void dt__copy_give(dt__world *world, void *copy, size_t bytes) {
    if (copy && copy == world->copy)
        world->copy_lent = 0;
    else
        dt_free(world->ctx, DT_MEM_COMM, copy, bytes);
}

/* Fills the message and shows it. */
static dt_status dt__message_post(
    dt_work *work, dt__part *part, dt__pair *pair, dt__message *message) {
    dt_comm *comm = work->comm;
    dt__world *world = comm->world;
    size_t bytes = part->count * dt_dtype_size(work->call.dtype);
    dt_status status = DT_OK;
    message->tag = part->tag;
    message->eager = bytes <= DT_EAGER_BYTES && !dt__is_more(pair, message);
    message->word = dt__word_of(&work->call, part->count);
    message->bytes = bytes;
    message->channel = comm->group->channel;
    message->group = comm->group;
    message->data = part->send;
    if (message->eager) {
        char *copy = dt__eager_of(world->shared, pair, (int)(message - pair->message));
        status = dt__comm_move(comm, &work->call, copy, part->send, bytes);
        message->data = copy;
    } else if (bytes > 0 && !dt__reachable(world->shared, part->send)) {
        part->copy = dt__copy_take(world, bytes);
        if (!part->copy) return dt_error(world->ctx);
        status = dt__comm_move(comm, &work->call, part->copy, part->send, bytes);
        message->data = part->copy;
    }
    if (status == DT_OK) status = dt__comm_sync(world);
    if (status) return dt__data_failed(comm, &work->call, status);
    message->order = pair->sent++;
    if (world->others) world->others[comm->group->ranks[part->peer]].sent++;
    __atomic_store_n(&message->state, DT__POSTED, __ATOMIC_RELEASE);
    if (pair->more) __atomic_store_n(&pair->posted, pair->sent, __ATOMIC_RELEASE);
    dt__moved(world);
    return DT_OK;
}

static int dt__shared_send(dt_work *work, dt__part *part) {
    dt__world *world = work->comm->world;
    int other = dt__seat_of(world, work->comm->group->ranks[part->peer]);
    int alone = other == world->seat && !work->started;
    /* read before the messages: see dt__message_there */
    int ended = alone || dt__has_ended(world->shared, other);
    dt__pair *pair = dt__pair_of(world->shared, world->seat, other, part->tag);
    size_t bytes = part->count * dt_dtype_size(work->call.dtype);
    if (part->state == 0) { /* begun */
        part->order = pair->begun++;
        part->state = 1;
    }
    if (part->state == 1) { /* its turn, and a place */
        if (alone && bytes > DT_EAGER_BYTES) return dt__part_never(work, part);
        dt__message *message = NULL;
        if (pair->sent == part->order)
            message = dt__free_message(world, pair, part->tag, work->started);
        if (!message) return ended ? dt__part_never(work, part) : 0;
        if (dt__message_post(work, part, pair, message) != DT_OK) return -1;
        if (message->eager) return 1;
        part->message = message;
        part->state = 2;
    }
    if (__atomic_load_n(&part->message->state, __ATOMIC_ACQUIRE) != DT__TAKEN)
        return ended ? dt__part_never(work, part) : 0;
    __atomic_store_n(&part->message->state, DT__FREE, __ATOMIC_RELEASE);
    dt__copy_give(world, part->copy, bytes);
    part->copy = NULL;
    return 1;
}

/* The oldest posted message of this group and tag, or NULL; group NULL: of any group and tag. */
static dt__message *dt__oldest(dt__pair *pair, const dt__group *group, int tag) {
    dt__message *oldest = NULL, *message = NULL;
    while ((message = dt__next_message(pair, message))) {
        if (__atomic_load_n(&message->state, __ATOMIC_ACQUIRE) != DT__POSTED) continue;
        if (group && (message->tag != tag || message->channel != group->channel)) continue;
        if (!oldest || message->order < oldest->order) oldest = message;
    }
    return oldest;
}

/* The oldest message not taken, if it is where to look first and of this group and tag; or NULL. */
static dt__message *dt__low_message(dt__pair *pair, const dt__group *group, int tag) {
    for (int i = 0; i <= DT__MESSAGES; i++) {
        dt__message *message = i < DT__MESSAGES ? &pair->message[i] : pair->next;
        if (__atomic_load_n(&message->state, __ATOMIC_ACQUIRE) != DT__POSTED ||
            message->order != pair->low)
            continue;
        return message->tag == tag && message->channel == group->channel ? message : NULL;
    }
    return NULL;
}

/* A rank may send and then end: its flag is read first, so that a message which is not there then
   will never be. And it may send two while we look: the older into a place we have passed, the
   newer into one still ahead. Seeing the newer makes the older visible, so a second look finds it.
   *ended: nobody will send it any more. *seen: pair->posted + 1 at this receive's last search of
   the list: it searches again only after a new post. */
static dt__message *dt__message_there(const dt__shared *shared, dt__pair *pair,
    const dt__group *group, int tag, int from, int alone, int *ended, uint64_t *seen) {
    *ended = alone || dt__has_ended(shared, from);
    if (!pair->next) return dt__oldest(pair, group, tag) ? dt__oldest(pair, group, tag) : NULL;
    uint64_t posted = __atomic_load_n(&pair->posted, __ATOMIC_ACQUIRE) + 1;
    dt__message *low = dt__low_message(pair, group, tag);
    if (low || *seen == posted) return low;
    if (!dt__oldest(pair, group, tag)) {
        *seen = posted;
        return NULL;
    }
    pair->low = dt__oldest(pair, NULL, 0)->order;
    return dt__oldest(pair, group, tag);
}

/* An earlier receive of this rank that waits for a message of rank `from` with that tag goes
   first. */
static int dt__not_its_turn(const dt_work *work, const dt__part *part, int from) {
    for (const dt_work *w = work->comm->world->open; w && w != work; w = w->open_later) {
        if (w->comm->group != work->comm->group) continue;
        for (int i = 0; i < w->n_parts; i++) {
            const dt__part *p = &w->parts[i];
            if (p->op != DT__RECV || p->over || p->tag != part->tag) continue;
            if (p->peer == from || p->peer == DT_ANY) return 1;
        }
    }
    for (const dt__part *p = work->parts; p < part; p++) {
        if (p->op == DT__RECV && !p->over && p->tag == part->tag && p->peer == part->peer) return 1;
    }
    return 0;
}

static int dt__shared_take(
    dt_work *work, dt__part *part, dt__pair *pair, dt__message *message, int from) {
    dt_comm *comm = work->comm;
    size_t bytes = part->count * dt_dtype_size(work->call.dtype);
    if (dt__part_fits(work, part, from, message->word, message->bytes) < 0) return -1;
    if (!dt__touch_begin(comm->world)) return dt__peer_failed(comm->world), -1;
    dt_status status = dt__comm_move(comm, &work->call, part->recv, message->data, bytes);
    status = dt__touch_end(comm->world, status);
    if (status) return dt__data_failed(comm, &work->call, status), -1;
    part->order = message->order;
    part->peer = from;
    if (dt__is_more(pair, message)) pair->next = dt__more_after(pair, message);
    if (pair->next && message->order == pair->low) pair->low++;
    if (comm->world->others) comm->world->others[comm->group->ranks[from]].got++;
    __atomic_store_n(&message->state, message->eager ? DT__FREE : DT__TAKEN, __ATOMIC_RELEASE);
    if (work->call.from) *work->call.from = from;
    return 1;
}

static int dt__shared_recv(dt_work *work, dt__part *part) {
    const dt_comm *comm = work->comm;
    dt__shared *shared = comm->world->shared;
    int me = comm->world->seat, n = comm->place.size, over = 1;
    /* from any: begins at the right neighbour, so that none is starved */
    for (int step = 0; step < n; step++) {
        int from = part->peer == DT_ANY ? (comm->place.rank + 1 + step) % n : part->peer, ended;
        int other = dt__seat_of(comm->world, comm->group->ranks[from]);
        dt__pair *pair = dt__pair_of(shared, other, me, part->tag);
        uint64_t never = 0; /* DT_ANY: search every time */
        dt__message *message = dt__message_there(shared, pair, comm->group, part->tag, other,
            me == other && !work->started, &ended, part->peer == DT_ANY ? &never : &part->seen);
        if (message && !dt__not_its_turn(work, part, from))
            return dt__shared_take(work, part, pair, message, from);
        over = over && ended && !message;
        if (part->peer != DT_ANY) break;
    }
    return over ? dt__part_never(work, part) : 0;
}

static int dt__shared_message(dt_work *work, dt__part *part) {
    return part->op == DT__SEND ? dt__shared_send(work, part) : dt__shared_recv(work, part);
}

// ==== 14. Collectives in shared memory ==========================================================

/* How the ranks of a group do a collective in each other's memory:

       post    each rank shows its call, with the addresses of its buffers, or with the data
               themselves if they are few
       open    it waits until all have, and compares all calls with rank 0's
       move    it fetches what is for it (dt__pull), or writes its part of a sum to all (dt__push)
       close   it says that it is done, and waits until all are: only now may the buffers change

   Cost: two waits for the slowest rank, and each byte moves once. A small send lies in the post,
   which nobody changes soon: where all are kept there, one wait is enough. A rank's posts are used
   in turn; before it uses one again all must be done with it, which `closed` tells. Flags that one
   rank writes and the others read: J. Mellor-Crummey and M. Scott, "Algorithms for scalable
   synchronization", 1991. Comparing costs some 10 ns a rank; without it ranks that disagree would
   sum garbage or hang.

   If large data of any rank cannot be reached, all go on in windows: each such rank copies a window
   into its staging, which has two in turn; the others read it there. An all-reduce is then a
   reduce-scatter and an all-gather. */

/* What a work waits for: to have a post; all posts; its staging; the window of the others; that all
   close. */
enum { DT__NEW = 0, DT__MEETING, DT__TURNING, DT__OPENING, DT__CLOSING };

static dt__member *dt__member_of(const dt_comm *comm, int rank) {
    return &comm->group->members[rank];
}

/* Is that rank as far as the work's state waits for? */
static int dt__is_there(const dt_work *work, int rank) {
    const dt_comm *comm = work->comm;
    if (work->state == DT__MEETING)
        return __atomic_load_n(&dt__post_of(comm, rank, work->call.seq)->seq, __ATOMIC_ACQUIRE) ==
               work->call.seq;
    const dt__member *member = dt__member_of(comm, rank);
    if (work->state == DT__OPENING) { /* memory that can be reached is always open */
        if (!dt__post_of(comm, rank, work->call.seq)->staging) return 1;
        return __atomic_load_n(&member->opened, __ATOMIC_ACQUIRE) >= work->window;
    }
    uint64_t need = work->window;
    if (work->state == DT__NEW) need = comm->last_window[work->call.seq % DT_MAX_STARTED];
    /* that half showed it */
    if (work->state == DT__TURNING) need = work->window < 2 ? 0 : work->window - 2;
    /* all have summed */
    if (work->state == DT__TURNING && work->stage == 1 && work->at == 0) need = work->window - 1;
    return __atomic_load_n(&member->closed, __ATOMIC_ACQUIRE) >= need;
}

/* "ranks 0,1 arrived, 3 did not", in world ranks; at most 8 of each are listed. */
static dt__phrase dt__who_came(const dt_work *work) {
    dt__phrase text;
    size_t at = 0;
    dt__append(text.s, sizeof text.s, &at, "ranks ");
    for (int came = 1; came >= 0; came--) {
        int listed = 0;
        for (int rank = 0; rank < work->comm->place.size; rank++) {
            if (dt__is_there(work, rank) != came) continue;
            if (++listed > 9) continue;
            if (listed > 8)
                dt__append(text.s, sizeof text.s, &at, ",...");
            else
                dt__append(text.s, sizeof text.s, &at, "%s%d", listed > 1 ? "," : "",
                    work->comm->group->ranks[rank]);
        }
        if (came)
            dt__append(text.s, sizeof text.s, &at,
                work->state == DT__MEETING ? " arrived, " : " finished, ");
        else
            dt__append(
                text.s, sizeof text.s, &at, listed ? " did not" : "the last a moment too late");
    }
    return text;
}

/* 1: all are there; 0: not yet; -1: one will never be, and the context has failed. */
static int dt__all_there(dt_work *work) {
    dt_comm *comm = work->comm;
    const dt__shared *shared = comm->world->shared;
    while (work->next < comm->place.size && dt__is_there(work, work->next)) work->next++;
    if (work->next == comm->place.size) {
        work->next = 0;
        return 1;
    }
    if (__atomic_load_n(&shared->ended, __ATOMIC_ACQUIRE) == 0) return 0;
    for (int rank = work->next; rank < comm->place.size; rank++) {
        int of_world = comm->group->ranks[rank];
        if (!dt__has_ended(shared, dt__seat_of(comm->world, of_world)) || dt__is_there(work, rank))
            continue;
        /* a rank that failed has ended too */
        if (dt__aborted(shared)) return dt__peer_failed(comm->world), -1;
        return dt__ended_without(work, of_world), -1;
    }
    return 0;
}

/* Every rank compares the same posts and comes to the same answer. */
static dt_status dt__compare(dt_work *work) {
    dt_comm *comm = work->comm;
    const dt__post *first = dt__post_of(comm, 0, work->call.seq);
    for (int rank = DT__UNCHECKED ? comm->place.size : 1; rank < comm->place.size; rank++) {
        const dt__post *other = dt__post_of(comm, rank, work->call.seq);
        if (other->what == first->what && other->count == first->count) continue;
        dt__shown its = { other->what, other->count,
            dt__site_of(comm, comm->group->ranks[rank], work->call.seq) };
        dt__shown one = { first->what, first->count,
            dt__site_of(comm, comm->group->ranks[0], work->call.seq) };
        return dt__calls_differ(work, rank, &its, 0, &one);
    }
    return DT_OK;
}

/* A sum that all, or the root, want whole is written to them: dt__push. */
static int dt__pushes(const dt__call *call) {
    return dt__pattern_of(call->op)->sums && !dt__pattern_of(call->op)->cut;
}

/* Sends up to this size lie in the post. Where each rank has a core, a longer one is read in place:
   the second wait costs less than bytes that are written once more and fetched from another core's
   cache. Where ranks share cores, a wait costs more than 4 KiB do. */
#define DT__POST_BYTES 128

/* Does this rank's post hold its data? Also if they are small and lie where others cannot reach
   them. */
static int dt__keeps(const dt_work *work) {
    const dt_comm *comm = work->comm;
    const dt__call *call = &work->call;
    const dt__shared *shared = comm->world->shared;
    dt_status (*move)(void *, const void *, size_t, void *) =
        dt_ctx_kernels(comm->world->ctx)->move;
    size_t bytes = dt__send_count(comm, call) * dt_dtype_size(call->dtype);
    if (call->op == DT__ALL_TO_ALL_V || (!call->host && move && move != dt_kernels_cpu()->move))
        return 0;
    if (bytes > DT_EAGER_BYTES) return 0;
    if (bytes <= DT__POST_BYTES || shared->spins == 0 || !dt__sends(comm, call)) return 1;
    return !dt__reachable(shared, call->send) ||
           (dt__pushes(call) && dt__receives(comm, call) && !dt__reachable(shared, call->recv));
}

/* If only others keep theirs, nobody pushes, and this rank's buffer is read until all close. As it
   may sum in place, its sum goes into its post, where there is room, and then into the buffer;
   until then the post is not used again. */
static int dt__sums_aside(const dt_work *work) {
    const dt_comm *comm = work->comm;
    return work->kept && dt__pushes(&work->call) && dt__receives(comm, &work->call) &&
           !dt__post_of(comm, comm->place.rank, work->call.seq)->kept;
}

/* ---- where things are: shares, and windows of them ---- */

/* An all-reduce in windows: its first half is cut into chunks as a reduce-scatter, its second
   gathers them. */
static int dt__halves(const dt_work *work) {
    const dt__pattern *pattern = dt__pattern_of(work->call.op);
    return work->staged && pattern->sums && !pattern->cut && pattern->all_recv;
}
static int dt__cut(const dt_work *work) {
    return dt__halves(work) ? work->stage == 0 : dt__pattern_of(work->call.op)->cut;
}
static int dt__sums(const dt_work *work) {
    return dt__halves(work) ? work->stage == 0 : dt__pattern_of(work->call.op)->sums;
}

static const size_t *dt__counts_of(const dt_work *work, int rank) {
    return (const size_t *)(const void *)dt__post_data(
        dt__post_of(work->comm, rank, work->call.seq));
}

/* Elements that rank `from` has for rank `to`, and where in its send they begin. */
static size_t dt__share_count(const dt_work *work, int from, int to) {
    if (work->call.op == DT__ALL_TO_ALL_V) return dt__counts_of(work, from)[to];
    if (!dt__halves(work)) return work->call.count;
    int chunk = work->stage == 0 ? to : from, n = work->comm->place.size;
    return dt__chunk_first(work->call.count, n, chunk + 1) -
           dt__chunk_first(work->call.count, n, chunk);
}

static size_t dt__share_first(const dt_work *work, int from, int to) {
    if (work->call.op == DT__ALL_TO_ALL_V) return dt__sum_of(dt__counts_of(work, from), to);
    int chunk = work->stage == 0 ? to : from;
    if (dt__halves(work)) return dt__chunk_first(work->call.count, work->comm->place.size, chunk);
    return dt__cut(work) ? (size_t)to * work->call.count : 0;
}

/* Where in this rank's recv what comes from that rank goes. */
static size_t dt__recv_first(const dt_work *work, int from) {
    if (work->call.op == DT__ALL_TO_ALL_V) return dt__sum_of(work->call.recv_counts, from);
    if (dt__halves(work)) return dt__share_first(work, from, work->comm->place.rank);
    return dt__sums(work) || !dt__pattern_of(work->call.op)->all_send
               ? 0
               : (size_t)from * work->call.count;
}

/* Of `count` elements, those in the window. */
static size_t dt__in_window(const dt_work *work, size_t count) {
    if (count <= work->at) return 0;
    return count - work->at < work->run ? count - work->at : work->run;
}

/* Where the window of what that rank has for this one lies. */
static const char *dt__source(const dt_work *work, int from) {
    dt__post *post = dt__post_of(work->comm, from, work->call.seq);
    size_t size = dt_dtype_size(work->call.dtype), me = (size_t)work->comm->place.rank;
    if (post->staging)
        return post->staging + (work->window & 1) * DT_WINDOW_BYTES +
               (dt__cut(work) ? me * work->run * size : 0);
    const char *base = (const char *)(work->stage == 1 ? post->recv : post->send);
    return base + (dt__share_first(work, from, (int)me) + work->at) * size;
}

/* This rank's staging shows the work's window. */
static dt_status dt__show(dt_work *work) {
    dt_comm *comm = work->comm;
    if (!dt__post_of(comm, comm->place.rank, work->call.seq)->staging) return DT_OK;
    size_t size = dt_dtype_size(work->call.dtype),
           shares = dt__cut(work) ? (size_t)comm->place.size : 1;
    char *to = comm->staging + (work->window & 1) * DT_WINDOW_BYTES;
    const char *from = (const char *)(work->stage == 1 ? work->call.recv : work->call.send);
    dt_status status = DT_OK;
    for (size_t i = 0; i < shares && dt__sends(comm, &work->call) && !status; i++) {
        int share = dt__cut(work) ? (int)i : comm->place.rank;
        status = dt__comm_move(comm, &work->call, to + i * work->run * size,
            from + (dt__share_first(work, comm->place.rank, share) + work->at) * size,
            dt__in_window(work, dt__share_count(work, comm->place.rank, share)) * size);
    }
    if (status == DT_OK) status = dt__comm_sync(comm->world);
    if (status) return dt__data_failed(comm, &work->call, status);
    __atomic_store_n(
        &dt__member_of(comm, comm->place.rank)->opened, work->window, __ATOMIC_RELEASE);
    return DT_OK;
}

/* The elements of a window. */
static void dt__set_window(dt_work *work) {
    size_t shares = dt__cut(work) ? (size_t)work->comm->place.size : 1,
           size = dt_dtype_size(work->call.dtype);
    work->run = work->staged ? DT_WINDOW_BYTES / size / shares : work->total;
    if (work->run == 0) work->run = 1;
}

/* ---- move ---- */

/* Each rank begins with its own share and goes round, so that not all read the same memory at the
   same time. */
static dt_status dt__pull(dt_work *work) {
    dt_comm *comm = work->comm;
    const dt__pattern *pattern = dt__pattern_of(work->call.op);
    int n = comm->place.size, me = comm->place.rank;
    size_t size = dt_dtype_size(work->call.dtype);
    char *recv = (char *)work->call.recv + work->at * size;
    dt_status status = DT_OK;
    if (!dt__receives(comm, &work->call)) return DT_OK;
    if (dt__sums(work)) {
        for (int rank = 0; rank < n; rank++) comm->in[rank] = dt__source(work, rank);
        comm->out[0] = recv + dt__recv_first(work, me) * size;
        if (work->aside) comm->out[0] = dt__post_data(dt__post_of(comm, me, work->call.seq));
        return dt__combine(
            comm, &work->call, 1, n, dt__in_window(work, dt__share_count(work, me, me)), 0);
    }
    for (int step = 0; step < n && !status; step++) {
        int from = (me + step) % n;
        if (!pattern->all_send && from != work->call.peer) continue;
        status = dt__comm_move(comm, &work->call, recv + dt__recv_first(work, from) * size,
            dt__source(work, from), dt__in_window(work, dt__share_count(work, from, me)) * size);
    }
    return status;
}

/* Large sums: rank r sums chunk r of all buffers and writes it to them. Each buffer is read once
   and written once: 2 (N-1)/N S a rank, the least possible. Direct all-reduce in shared memory:
   github.com/deepspeedai/DeepSpeed, csrc/cpu/comm/shm.cpp; the bound: P. Patarasuk and X. Yuan,
   "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009. */

/* Do the buffers of all ranks together not fit any cache near a core? And is none summed in place,
   where the lines to write are at hand? Then writing past the caches is up to twice as fast, and
   else up to four times as slow. */
enum { DT__FAR_BYTES = 8 << 20 };

static int dt__is_far(const dt_work *work) {
    size_t n = (size_t)work->comm->place.size;
    if (2 * n * dt__call_bytes(&work->call) < DT__FAR_BYTES) return 0;
    for (size_t rank = 0; rank < n; rank++) {
        const dt__post *post = dt__post_of(work->comm, (int)rank, work->call.seq);
        if (post->send == post->recv) return 0;
    }
    return 1;
}

static dt_status dt__push(dt_work *work) {
    dt_comm *comm = work->comm;
    int n = comm->place.size, me = comm->place.rank,
        to_all = dt__pattern_of(work->call.op)->all_recv;
    size_t first = dt__chunk_first(work->call.count, n, me),
           at = first * dt_dtype_size(work->call.dtype);
    size_t count = dt__chunk_first(work->call.count, n, me + 1) - first;
    for (int rank = 0; rank < n; rank++)
        comm->in[rank] = (const char *)dt__post_of(comm, rank, work->call.seq)->send + at;
    /* each rank begins with its own, so that not all write to the same */
    int home = to_all ? me : work->call.peer;
    for (int step = 0; step < (to_all ? n : 1); step++)
        comm->out[step] = (char *)dt__post_of(comm, (home + step) % n, work->call.seq)->recv + at;
    return dt__combine(comm, &work->call, to_all ? n : 1, n, count, to_all && dt__is_far(work));
}

/* ---- the steps ---- */

/* The expected counts of all-to-all-v against the sent ones; and the longest share, which all ranks
   see alike. */
static dt_status dt__compare_counts(dt_work *work) {
    dt_comm *comm = work->comm;
    int n = comm->place.size, me = comm->place.rank;
    work->total = 0;
    for (int from = 0; from < n; from++) {
        const size_t *counts = dt__counts_of(work, from);
        for (int to = 0; to < n; to++)
            work->total = counts[to] > work->total ? counts[to] : work->total;
        if (counts[me] == work->call.recv_counts[from]) continue;
        return dt__counts_differ(work, from, counts[me], work->call.recv_counts[from]);
    }
    return DT_OK;
}

static int dt__post_call(dt_work *work) {
    dt_comm *comm = work->comm;
    const dt__call *call = &work->call;
    dt__shared *shared = comm->world->shared;
    dt__post *post = dt__post_of(comm, comm->place.rank, call->seq);
    int apart = 0;
    post->kept = dt__keeps(work);
    if (!post->kept && dt__sends(comm, call)) apart = !dt__reachable(shared, call->send);
    if (!post->kept && dt__pushes(call) && dt__receives(comm, call))
        apart = apart || !dt__reachable(shared, call->recv);
    if (apart && !comm->staging) {
        comm->staging = (char *)dt_alloc(
            comm->world->ctx, DT_MEM_COMM, 2 * DT_WINDOW_BYTES, "windows for other ranks");
        if (!comm->staging) return -1;
    }
    post->what = dt__what(call);
    post->count = call->count;
    post->send = post->kept ? dt__post_data(post) : call->send;
    post->recv = call->recv;
    post->staging = apart ? comm->staging : NULL;
    dt_status status = dt__comm_sync(comm->world);
    if (call->op == DT__ALL_TO_ALL_V)
        memcpy(dt__post_data(post), call->send_counts, (size_t)comm->place.size * sizeof(size_t));
    else if (post->kept && dt__sends(comm, call) && status == DT_OK)
        memcpy(dt__post_data(post), call->send,
            dt__send_count(comm, call) * dt_dtype_size(call->dtype));
    if (status) return dt__data_failed(comm, call, status), -1;
    __atomic_store_n(&post->seq, call->seq, __ATOMIC_RELEASE);
    comm->posted = call->seq;
    return 1;
}

/* All have posted: what this operation is. */
static int dt__opened(dt_work *work) {
    dt_comm *comm = work->comm;
    work->total = work->call.count;
    if (dt__compare(work) != DT_OK) return -1;
    if (work->call.op == DT__ALL_TO_ALL_V && dt__compare_counts(work) != DT_OK) return -1;
    for (int rank = 0; rank < comm->place.size; rank++) {
        work->staged = work->staged || dt__post_of(comm, rank, work->call.seq)->staging;
        work->kept += dt__post_of(comm, rank, work->call.seq)->kept;
    }
    work->aside = comm->aside[work->call.seq % DT_MAX_STARTED] = dt__sums_aside(work);
    if (dt__halves(work)) work->total = dt__chunk_first(work->call.count, comm->place.size, 1);
    dt__set_window(work);
    work->window = comm->window + 1;
    return 1;
}

/* Fetches or writes this window's data. 1, or -1 with the context failed. */
static int dt__move_window(dt_work *work) {
    dt_comm *comm = work->comm;
    int in_post = work->kept == comm->place.size,
        push = !work->kept && !work->staged && dt__pushes(&work->call);
    if (!in_post && !dt__touch_begin(comm->world)) return dt__peer_failed(comm->world), -1;
    dt_status status = push ? dt__push(work) : dt__pull(work);
    if (!in_post) status = dt__touch_end(comm->world, status);
    if (status) return dt__data_failed(comm, &work->call, status), -1;
    comm->window = comm->last_window[work->call.seq % DT_MAX_STARTED] = work->window;
    __atomic_store_n(
        &dt__member_of(comm, comm->place.rank)->closed, work->window, __ATOMIC_RELEASE);
    return 1;
}

/* All have closed: a sum that was put aside goes into its buffer. 1, or -1 with the context
   failed. */
static int dt__closed(dt_work *work) {
    dt_comm *comm = work->comm;
    if (!work->aside) return 1;
    const char *sum = dt__post_data(dt__post_of(comm, comm->place.rank, work->call.seq));
    dt_status status =
        dt__comm_move(comm, &work->call, work->call.recv, sum, dt__call_bytes(&work->call));
    comm->aside[work->call.seq % DT_MAX_STARTED] = 0;
    return status ? dt__data_failed(comm, &work->call, status), -1 : 1;
}

/* 1: there is another window, and work is at it. */
static int dt__next_window(dt_work *work) {
    if (work->at + work->run < work->total) {
        work->at += work->run;
    } else if (dt__halves(work) && work->stage == 0) {
        work->stage = 1;
        work->at = 0;
        dt__set_window(work);
    } else {
        return 0;
    }
    work->window++;
    return 1;
}

/* May this rank use the next post? Its operation before last_window must have moved, and all be
   done with it. */
static int dt__may_post(dt_work *work) {
    dt_comm *comm = work->comm;
    if (comm->posted + 1 != work->call.seq || comm->moved + DT_MAX_STARTED < work->call.seq)
        return 0;
    if (comm->aside[work->call.seq % DT_MAX_STARTED]) return 0;
    if (comm->closed_by_all >= comm->last_window[work->call.seq % DT_MAX_STARTED]) return 1;
    int there = dt__all_there(work);
    if (there <= 0) return there;
    /* looked up again only when it is too little: others write these lines */
    comm->closed_by_all = comm->window;
    for (int rank = 0; rank < comm->place.size; rank++) {
        uint64_t closed = __atomic_load_n(&dt__member_of(comm, rank)->closed, __ATOMIC_ACQUIRE);
        if (closed < comm->closed_by_all) comm->closed_by_all = closed;
    }
    return 1;
}

/* Moves a collective on through its states. */
static int dt__shared_collective(dt_work *work) {
    dt_comm *comm = work->comm;
    for (int moved = 0;; moved = 1) {
        if (moved) dt__moved(comm->world);
        if (work->state != DT__NEW && work->state != DT__CLOSING &&
            comm->moved + 1 != work->call.seq)
            return 0;
        /* memory that can be reached is always open */
        int open = work->state == DT__OPENING && !work->staged;
        int there = work->state == DT__NEW ? dt__may_post(work) : open ? 1 : dt__all_there(work);
        if (there <= 0) return there;
        switch (work->state) {
        case DT__NEW:
            if (dt__post_call(work) < 0) return -1;
            work->state = DT__MEETING;
            continue;
        case DT__MEETING:
            if (dt__opened(work) < 0) return -1;
            work->state = work->staged ? DT__TURNING : DT__OPENING;
            continue;
        case DT__TURNING:
            if (dt__show(work) != DT_OK) return -1;
            work->state = DT__OPENING;
            continue;
        case DT__OPENING:
            if (dt__move_window(work) < 0) return -1;
            if (dt__next_window(work)) {
                work->state = DT__TURNING;
                continue;
            }
            comm->moved = work->call.seq;
            if (work->kept == comm->place.size) return 1;
            work->state = DT__CLOSING;
            continue;
        default: return dt__closed(work);
        }
    }
}

// ==== 15. Messages over a transport =============================================================

/* Five functions of the caller's, or of a backend below, carry bytes. A group has two channels: one
   for the messages of section 4, one for those that collectives are made of, so that neither is
   mistaken for the other. Of a node's ranks the latter go through the memory that they share, as in
   section 13. A device's memory travels as a copy in the host's. */

static int dt__on_device(const dt_work *work) {
    return !work->call.host && dt_ctx_kernels(work->comm->world->ctx)->open != NULL;
}

/* The copy lies in pinned memory, and the host does not wait for the device: a mark behind the
   copying says when it is done. */
static int dt__aside_copy(dt_work *work, dt__part *part, void *to, const void *from, size_t bytes) {
    const dt_kernels *kernels = dt_ctx_kernels(work->comm->world->ctx);
    void *stream = dt_ctx_stream(work->comm->world->ctx);
    dt_status status = kernels->move(to, from, bytes, stream);
    if (status == DT_OK) part->mark = kernels->mark(stream, part->mark);
    if (status == DT_OK && part->mark) return 1;
    return dt__data_failed(work->comm, &work->call, status ? status : DT_ERR_DEVICE), -1;
}

/* 1: the copying is done, or there was none. */
static int dt__aside_there(dt_work *work, const dt__part *part) {
    int passed = part->mark ? dt_ctx_kernels(work->comm->world->ctx)->passed(part->mark) : 1;
    if (passed < 0) dt__data_failed(work->comm, &work->call, DT_ERR_DEVICE);
    return passed;
}

/* What a part has of a device. After a failure the copying may be under way still. */
static void dt__part_end(dt_work *work, dt__part *part) {
    dt_ctx *ctx = work->comm->world->ctx;
    if (part->aside && part->mark && dt_ctx_kernels(ctx)->passed(part->mark) == 0)
        dt__comm_sync(work->comm->world);
    if (part->mark) dt_ctx_kernels(ctx)->unmark(part->mark);
    dt_unpin(ctx, part->aside, part->count * dt_dtype_size(work->call.dtype));
    part->aside = part->mark = NULL;
}

/* How the transport knows a message. */
typedef struct dt__address {
    uint32_t channel;
    int other, tag;
} dt__address;

static dt__address dt__address_of(const dt_work *work, const dt__part *part) {
    dt__address a = { 2 * work->comm->group->channel + (part->tag < 0), DT_ANY, part->tag };
    if (part->peer != DT_ANY) a.other = work->comm->group->ranks[part->peer];
    if (part->tag < 0) a.tag = -1 - part->tag;
    return a;
}

/* The transport begins a message of the part. 1, or -1 with the context failed. */
static int dt__transport_take(
    dt_work *work, dt__part *part, dt__address to, int sends, void *buf, size_t bytes) {
    dt__world *world = work->comm->world;
    const dt_transport *t = &world->transport;
    uint64_t word = dt__word_of(&work->call, part->count);
    part->request = sends ? t->send(t->user, to.other, to.channel, to.tag, word, buf, bytes)
                          : t->recv(t->user, to.other, to.channel, to.tag, buf, bytes);
    if (part->request) {
        if (sends) __atomic_fetch_add(&world->state->away, 2, __ATOMIC_SEQ_CST);
        if (sends && world->others) world->others[to.other].sent++;
        dt__moved(world);
        return 1;
    }
    dt__comm_fail(world, DT_ERR_COMM, "%s: the transport '%s' cannot begin it",
        dt__part_text(work, part).s, t->name);
    return -1;
}

/* What a device sends may have to wait for its copy, and nothing later to the same rank may
   overtake it. */
static void dt__mail_enter(dt_work *work, dt__part *part) {
    uint64_t *mail = work->comm->world->mail;
    if (mail && part->op == DT__SEND)
        part->number = mail[2 * work->comm->group->ranks[part->peer]]++;
    part->called = 1;
}

/* 1: all before it have begun, and so does it. */
static int dt__mail_begins(dt_work *work, const dt__part *part) {
    uint64_t *mail = work->comm->world->mail;
    uint64_t *begun =
        mail && part->op == DT__SEND ? &mail[2 * work->comm->group->ranks[part->peer] + 1] : NULL;
    if (begun && *begun != part->number) return 0;
    if (begun) ++*begun;
    return 1;
}

/* A device's part has a copy first: of a send with what is sent. */
static int dt__transport_begin(dt_work *work, dt__part *part) {
    dt_ctx *ctx = work->comm->world->ctx;
    size_t bytes = part->count * dt_dtype_size(work->call.dtype);
    void *buf = part->op == DT__SEND ? (void *)part->send : part->recv;
    int device = dt__on_device(work);
    if (device && !part->called) {
        dt__mail_enter(work, part);
        if (bytes > 0) part->aside = dt_pin(ctx, bytes, "a copy of a device's memory");
        if (bytes > 0 && !part->aside) return -1;
        if (part->op == DT__SEND && bytes > 0 &&
            dt__aside_copy(work, part, part->aside, part->send, bytes) < 0)
            return -1;
    }
    int there = dt__aside_there(work, part);
    if (there <= 0 || (device && !dt__mail_begins(work, part))) return there < 0 ? -1 : 0;
    return dt__transport_take(work, part, dt__address_of(work, part), part->op == DT__SEND,
        part->aside ? part->aside : buf, bytes);
}

/* The rank of the group that a world rank is. */
static int dt__rank_in(const dt__group *group, int world_rank) {
    for (int rank = 0; rank < group->size; rank++) {
        if (group->ranks[rank] == world_rank) return rank;
    }
    return -1;
}

/* What dt_transport's test answers below 0. Always -1. */
static int dt__transport_failed(dt_work *work, const dt__part *part, int answer, const char *why) {
    dt__world *world = work->comm->world;
    dt__phrase text = dt__part_text(work, part);
    if (answer == -3)
        dt__comm_fail(world, DT_ERR_PEER, "peer failed first: %s", why);
    else if (answer == -4)
        dt__part_never(work, part);
    else
        dt__comm_fail(world, answer == -2 ? DT_ERR_COMM : DT_ERR_PEER, "%s: %s", text.s, why);
    return -1;
}

/* 1: the transport's message is over, with who sent it, its word and its bytes; 0: not yet; -1: the
   context failed. */
typedef struct dt__arrival {
    int from;
    uint64_t word;
    size_t bytes;
} dt__arrival;

static int dt__transport_over(dt_work *work, dt__part *part, dt__arrival *came) {
    dt__world *world = work->comm->world;
    char why[512] = "";
    came->from = DT_ANY;
    came->word = 0;
    int done = world->transport.test(
        world->transport.user, part->request, &came->from, &came->word, &came->bytes, why);
    if (done == 0) return 0;
    part->request = NULL;
    why[sizeof why - 1] = 0;
    if (done < 0) return dt__transport_failed(work, part, done, why);
    __atomic_fetch_sub(&world->state->away, 1, __ATOMIC_SEQ_CST);
    return 1;
}

/* A message has come for the part: is it the right one? Then its sender is known. */
static int dt__transport_got(dt_work *work, dt__part *part, const dt__arrival *came) {
    dt__world *world = work->comm->world;
    int from = part->peer == DT_ANY ? dt__rank_in(work->comm->group, came->from) : part->peer;
    if (dt__part_fits(work, part, from, came->word, came->bytes) < 0) return -1;
    if (work->call.from) *work->call.from = from;
    part->peer = from;
    if (world->others) world->others[work->comm->group->ranks[from]].got++;
    return 1;
}

/* States of a part: 0 to be begun, 1 begun, 2 what came is on its way to the device. */
static int dt__transport_message(dt_work *work, dt__part *part) {
    dt__world *world = work->comm->world;
    dt__arrival came = { DT_ANY, 0, part->count * dt_dtype_size(work->call.dtype) };
    if (part->tag < 0 && world->node &&
        dt__seat_of(world, work->comm->group->ranks[part->peer]) >= 0)
        return dt__shared_message(work, part);
    if (part->state == 0) {
        int begun = dt__transport_begin(work, part);
        if (begun <= 0) return begun;
        part->state = 1;
    }
    if (part->state == 1) {
        int done = dt__transport_over(work, part, &came);
        if (done <= 0) return done;
        if (part->op == DT__RECV && dt__transport_got(work, part, &came) < 0) return -1;
        if (part->op == DT__RECV && part->aside &&
            dt__aside_copy(work, part, part->recv, part->aside, came.bytes) < 0)
            return -1;
        part->state = 2;
    }
    int there = dt__aside_there(work, part);
    if (there > 0) dt__part_end(work, part);
    return there;
}

// ==== 16. Algorithms ============================================================================

/* A collective as messages: a function that is asked for one round after another. It names the
   messages of the round (dt__to, dt__of) and answers 1, or 0 when there are no more; a round begins
   when the one before is over, so what that brought may be used. N ranks, S the bytes of the full
   buffer, L = log2 N rounded up. What the busiest rank sends (N/2: if N is a power of two):

                     direct                    ring                      doubling           tree
       all-reduce    2(N-1) msg, 2(N-1)/N S    2(N-1) msg, 2(N-1)/N S    L msg, (N-1) S     L msg, (L-1+N/2) S
       reduce        N msg, S                                                               1 msg, N/2 S
       red.-scatter  N-1 msg, (N-1)/N S        N-1 msg, (N-1)/N S
       all-gather    N-1 msg, (N-1)/N S        N-1 msg, (N-1)/N S        L msg, (N-1)/N S
       gather        1 msg, S/N                                                             1 msg, S/2
       scatter       N-1 msg, (N-1)/N S                                                     L msg, (N-1)/N S
       all-to-all    N-1 msg, (N-1)/N S
       broadcast     N-1 msg, (N-1) S          2(N-1) msg, 2(N-1)/N S                       L msg, L S
       barrier                                                           L msg, 0

   A sum in rank order needs all its terms in one place: they are sent unsummed and added there.
   Only the ring adds on the way, beginning for each share at another rank.

   Of a group that spans machines the messages between ranks of one go through its memory (section
   15). Where these are neighbours, k on each of M machines, a ring crosses each border once, so of
   a large all-gather (N-1)/N S leave a machine. Of a direct all-reduce 2k(N-k)/N S do, and so large
   sums go by rails:

       all-reduce    2kP msg, 2 S, in P pieces; 2 S leave a machine, S the first and the last

   P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms", 2009 (ring); J. Bruck et
   al., "Efficient algorithms for all-to-all communications", 1997 (doubling); R. Thakur, R.
   Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", 2005
   (which one when). */

static dt__part *dt__add_part(dt_work *work, dt__op_code op, int peer, size_t count) {
    dt__part *part = &work->parts[work->n_parts++];
    memset(part, 0, sizeof *part);
    part->op = op;
    part->peer = peer;
    part->count = count;
    part->tag = -1 - (int)(2 * (work->call.seq % 0x80000) + (work->call.op == DT__CHECK));
    if (op == DT__SEND && work->call.op != DT__CHECK) {
        work->comm->world->traffic.messages++;
        work->comm->world->traffic.bytes += count * dt_dtype_size(work->call.dtype);
    }
    return part;
}

static void dt__to(dt_work *work, int peer, const void *buf, size_t count) {
    dt__add_part(work, DT__SEND, peer, count)->send = buf;
}

static void dt__of(dt_work *work, int peer, void *buf, size_t count) {
    dt__add_part(work, DT__RECV, peer, count)->recv = buf;
}

/* A copy inside this rank. */
static void dt__keep(dt_work *work, void *dst, const void *src, size_t count) {
    dt_status status =
        dt__comm_move(work->comm, &work->call, dst, src, count * dt_dtype_size(work->call.dtype));
    if (status) dt__data_failed(work->comm, &work->call, status);
}

/* out = the sum of n inputs, listed in comm->in. */
static void dt__add_up(dt_work *work, void *out, int n, size_t count) {
    work->comm->out[0] = out;
    dt_status status = dt__combine(work->comm, &work->call, 1, n, count, 0);
    if (status == DT_OK && !dt__on_device(work)) status = dt__comm_sync(work->comm->world);
    if (status) dt__data_failed(work->comm, &work->call, status);
}

typedef int (*dt__round_fn)(dt_work *work);

/* First one, then the other. */
static int dt__one_then(dt_work *work, dt__round_fn one, dt__round_fn other) {
    if (work->stage == 0) {
        if (one(work)) return 1;
        if (dt_error(work->comm->world->ctx)) return 0;
        work->stage = 1;
        work->round = 0;
    }
    return other(work);
}

/* Share i of the full buffer: of a buffer that has N shares, or of one that is cut into N chunks to
   be moved by. */
static size_t dt__cut_first(const dt_work *work, int i) {
    dt__op_code op = work->call.op;
    if (op == DT__ALL_REDUCE || op == DT__SUM_DOUBLES || op == DT__REDUCE || op == DT__BROADCAST)
        return dt__chunk_first(work->call.count, work->comm->place.size, i);
    return (size_t)i * work->call.count;
}

static size_t dt__cut_count(const dt_work *work, int i) {
    return dt__cut_first(work, i + 1) - dt__cut_first(work, i);
}

/* The address of element i of p. */
static char *dt__element(const dt_work *work, const void *p, size_t i) {
    return (char *)p + i * dt_dtype_size(work->call.dtype);
}

static char *dt__recv_cut(const dt_work *work, int i) {
    return dt__element(work, work->call.recv, dt__cut_first(work, i));
}
static char *dt__send_cut(const dt_work *work, int i) {
    return dt__element(work, work->call.send, dt__cut_first(work, i));
}

/* ---- from each to all: recv holds this rank's share already ---- */

static int dt__direct_spread(dt_work *work) {
    int n = work->comm->place.size, me = work->comm->place.rank;
    if (work->round > 0) return 0;
    for (int step = 1; step < n; step++) {
        int to = (me + step) % n, from = (me + n - step) % n;
        dt__to(work, to, dt__recv_cut(work, me), dt__cut_count(work, me));
        dt__of(work, from, dt__recv_cut(work, from), dt__cut_count(work, from));
    }
    return 1;
}

/* In each round every rank passes on what it took in the round before, so all links are busy all
   the time. */
static int dt__ring_spread(dt_work *work) {
    int n = work->comm->place.size, me = work->comm->place.rank;
    int out = (me - work->round + n) % n, in = (me - work->round - 1 + n) % n;
    if (work->round == n - 1) return 0;
    dt__to(work, (me + 1) % n, dt__recv_cut(work, out), dt__cut_count(work, out));
    dt__of(work, (me + n - 1) % n, dt__recv_cut(work, in), dt__cut_count(work, in));
    return 1;
}

static int dt__direct_all_gather(dt_work *work) {
    int me = work->comm->place.rank;
    if (work->round == 0) dt__keep(work, dt__recv_cut(work, me), work->call.send, work->call.count);
    return dt__direct_spread(work);
}

static int dt__ring_all_gather(dt_work *work) {
    int me = work->comm->place.rank;
    if (work->round == 0) dt__keep(work, dt__recv_cut(work, me), work->call.send, work->call.count);
    return dt__ring_spread(work);
}

/* The scratch becomes the sends of ranks me, me+1, me+2, ...: as many more in each round as are
   there. */
static int dt__doubling_collect(dt_work *work) {
    int n = work->comm->place.size, me = work->comm->place.rank, have = 1 << work->round;
    size_t count = work->call.count;
    if (work->round == 0 && dt__scratch(work, (size_t)n * count))
        dt__keep(work, work->scratch, work->call.send, count);
    if (have >= n) return 0;
    size_t more = (size_t)(have < n - have ? have : n - have);
    dt__to(work, (me - have + n) % n, work->scratch, more * count);
    dt__of(work, (me + have) % n, dt__element(work, work->scratch, (size_t)have * count),
        more * count);
    return 1;
}

static int dt__doubling_all_gather(dt_work *work) {
    int n = work->comm->place.size, me = work->comm->place.rank;
    if (dt__doubling_collect(work)) return 1;
    for (int i = 0; i < n && work->call.count; i++)
        dt__keep(work, dt__recv_cut(work, (me + i) % n),
            dt__element(work, work->scratch, (size_t)i * work->call.count), work->call.count);
    return 0;
}

static int dt__doubling_all_reduce(dt_work *work) {
    int n = work->comm->place.size, me = work->comm->place.rank;
    if (dt__doubling_collect(work)) return 1;
    for (int i = 0; i < n; i++)
        work->comm->in[(me + i) % n] =
            dt__element(work, work->scratch, (size_t)i * work->call.count);
    dt__add_up(work, work->call.recv, n, work->call.count);
    return 0;
}

static int dt__doubling_barrier(dt_work *work) { return dt__doubling_collect(work); }

/* ---- a share for each ---- */

static int dt__direct_all_to_all(dt_work *work) {
    int n = work->comm->place.size, me = work->comm->place.rank;
    if (work->round > 0) return 0;
    dt__keep(work, dt__recv_cut(work, me), dt__send_cut(work, me), work->call.count);
    for (int step = 1; step < n; step++) {
        int to = (me + step) % n, from = (me + n - step) % n;
        dt__to(work, to, dt__send_cut(work, to), work->call.count);
        dt__of(work, from, dt__recv_cut(work, from), work->call.count);
    }
    return 1;
}

static int dt__direct_all_to_all_v(dt_work *work) {
    int n = work->comm->place.size, me = work->comm->place.rank;
    const size_t *out = work->call.send_counts, *in = work->call.recv_counts;
    if (work->round > 0) return 0;
    if (out[me] != in[me]) return dt__counts_differ(work, me, out[me], in[me]), 0;
    dt__keep(work, dt__element(work, work->call.recv, dt__sum_of(in, me)),
        dt__element(work, work->call.send, dt__sum_of(out, me)), out[me]);
    for (int step = 1; step < n; step++) {
        int to = (me + step) % n, from = (me + n - step) % n;
        dt__to(work, to, dt__element(work, work->call.send, dt__sum_of(out, to)), out[to]);
        dt__of(work, from, dt__element(work, work->call.recv, dt__sum_of(in, from)), in[from]);
    }
    return 1;
}

/* ---- sums ---- */

/* Where the sum of this rank's share goes: its own recv, or for the root's a place at the end of
   the scratch. */
static char *dt__sum_place(const dt_work *work) {
    int n = work->comm->place.size, me = work->comm->place.rank;
    if (work->call.op == DT__REDUCE_SCATTER) return (char *)work->call.recv;
    if (work->call.op == DT__REDUCE && me != work->call.peer)
        return dt__element(work, work->scratch, (size_t)n * dt__cut_count(work, me));
    return dt__recv_cut(work, me);
}

/* An all-to-all into the scratch; then one sum in rank order. */
static int dt__direct_reduce_scatter(dt_work *work) {
    int n = work->comm->place.size, me = work->comm->place.rank;
    size_t mine = dt__cut_count(work, me);
    if (work->round == 0) {
        if (!dt__scratch(work, (size_t)(n + 1) * mine)) return 0;
        for (int step = 1; step < n; step++) {
            int to = (me + step) % n, from = (me + n - step) % n;
            dt__to(work, to, dt__send_cut(work, to), dt__cut_count(work, to));
            dt__of(work, from, dt__element(work, work->scratch, (size_t)from * mine), mine);
        }
        return 1;
    }
    if (mine == 0) return 0;
    for (int rank = 0; rank < n; rank++)
        work->comm->in[rank] = rank == me ? dt__send_cut(work, me)
                                          : dt__element(work, work->scratch, (size_t)rank * mine);
    dt__add_up(work, dt__sum_place(work), n, mine);
    return 0;
}

/* In round s the sum of share me-1-s, begun by its right neighbour, gets this rank's part and goes
   on to the right; the last to add is the share's owner. The scratch holds what came in and what
   goes out. */
static int dt__ring_reduce_scatter(dt_work *work) {
    int n = work->comm->place.size, me = work->comm->place.rank, last = work->round == n - 1;
    int out = (me - 1 - work->round + 2 * n) % n, in = (out - 1 + n) % n;
    size_t most = dt__cut_count(work, 0);
    if (work->round == n) return 0;
    if (work->round == 0 && !dt__scratch(work, 2 * most)) return 0;
    char *came = (char *)work->scratch, *sum = dt__element(work, came, most);
    const char *goes = dt__send_cut(work, out);
    if (work->round > 0 && dt__cut_count(work, out) > 0) {
        work->comm->in[0] = came;
        work->comm->in[1] = goes;
        dt__add_up(work, last ? dt__sum_place(work) : sum, 2, dt__cut_count(work, out));
        goes = sum;
    }
    if (last) return 0;
    dt__to(work, (me + 1) % n, goes, dt__cut_count(work, out));
    dt__of(work, (me + n - 1) % n, came, dt__cut_count(work, in));
    return 1;
}

static int dt__direct_all_reduce(dt_work *work) {
    return dt__one_then(work, dt__direct_reduce_scatter, dt__direct_spread);
}

static int dt__ring_all_reduce(dt_work *work) {
    return dt__one_then(work, dt__ring_reduce_scatter, dt__ring_spread);
}

/* The sums of all shares go to the root, which has summed its own in place. */
static int dt__give_sums(dt_work *work) {
    int n = work->comm->place.size, me = work->comm->place.rank, root = work->call.peer;
    if (work->round > 0) return 0;
    if (me != root) dt__to(work, root, dt__sum_place(work), dt__cut_count(work, me));
    for (int from = 0; from < n && me == root; from++) {
        if (from != me) dt__of(work, from, dt__recv_cut(work, from), dt__cut_count(work, from));
    }
    return 1;
}

static int dt__direct_reduce(dt_work *work) {
    return dt__one_then(work, dt__direct_reduce_scatter, dt__give_sums);
}

/* ---- to and from the root at once ---- */

static int dt__direct_gather(dt_work *work) {
    int n = work->comm->place.size, me = work->comm->place.rank, root = work->call.peer;
    if (work->round > 0) return 0;
    if (me != root)
        dt__to(work, root, work->call.send, work->call.count);
    else
        dt__keep(work, dt__recv_cut(work, me), work->call.send, work->call.count);
    for (int from = 0; from < n && me == root; from++) {
        if (from != me) dt__of(work, from, dt__recv_cut(work, from), work->call.count);
    }
    return 1;
}

static int dt__direct_scatter(dt_work *work) {
    int n = work->comm->place.size, me = work->comm->place.rank, root = work->call.peer;
    if (work->round > 0) return 0;
    if (me != root)
        dt__of(work, root, work->call.recv, work->call.count);
    else
        dt__keep(work, work->call.recv, dt__send_cut(work, me), work->call.count);
    for (int to = 0; to < n && me == root; to++) {
        if (to != me) dt__to(work, to, dt__send_cut(work, to), work->call.count);
    }
    return 1;
}

static int dt__direct_broadcast(dt_work *work) {
    int n = work->comm->place.size, me = work->comm->place.rank, root = work->call.peer;
    if (work->round > 0) return 0;
    if (me != root) dt__of(work, root, work->call.recv, work->call.count);
    for (int to = 0; to < n && me == root; to++) {
        if (to != me) dt__to(work, to, work->call.recv, work->call.count);
    }
    return 1;
}

/* Each gets a chunk from the root; then the chunks go round. */
static int dt__hand_out_chunks(dt_work *work) {
    int n = work->comm->place.size, me = work->comm->place.rank, root = work->call.peer;
    if (work->round > 0) return 0;
    if (me != root) dt__of(work, root, dt__recv_cut(work, me), dt__cut_count(work, me));
    for (int to = 0; to < n && me == root; to++) {
        if (to != me) dt__to(work, to, dt__recv_cut(work, to), dt__cut_count(work, to));
    }
    return 1;
}

static int dt__ring_broadcast(dt_work *work) {
    return dt__one_then(work, dt__hand_out_chunks, dt__ring_spread);
}

/* ---- rails: M machines of k ranks, which are neighbours in the group ---- */

/* The buffer is cut into a chunk for each of the k, and the j-th ranks of all machines are the rail
   on which the sum of chunk j goes up, from machine to machine, and down again, in pieces. In round
   t a rank of machine m

       gets its machine's terms of piece t, and the sum of piece t over machines 0 .. m-1 from below
       sends up that of piece t-1 over machines 0 .. m, which it has just added in rank order: on
       the last it is the sum gets the sum of piece t-d from above, d = 2(M-1-m) has the sum of
       piece t-d-1, which it gives to the others on its machine and sends down

   so round t of machine m goes with round t-1 of the one above, all links are busy both ways, and
   the whole takes some 2 M rounds more than there are pieces. A piece on its way lies in recv,
   where its sum will be. */

/* the most of a piece: it stays in a cache, and a round costs less than its bytes */
#ifndef DT__RAIL_BYTES
#define DT__RAIL_BYTES DT_WINDOW_BYTES
#endif

static size_t dt__rail_pieces(const dt_work *work) {
    size_t longest =
        dt__chunk_first(work->call.count, work->comm->rails, 1) * dt_dtype_size(work->call.dtype);
    return (longest + DT__RAIL_BYTES - 1) / DT__RAIL_BYTES;
}

/* The first element of piece p of chunk i. */
static size_t dt__rail_first(const dt_work *work, int i, int p) {
    size_t first = dt__chunk_first(work->call.count, work->comm->rails, i);
    size_t count = dt__chunk_first(work->call.count, work->comm->rails, i + 1) - first;
    return first + dt__chunk_first(count, (int)dt__rail_pieces(work), p);
}

/* A message with piece p of chunk i of buf, if there is one. */
static void dt__rail_part(dt_work *work, dt__op_code op, int peer, const void *buf, int i, int p) {
    if (p < 0 || p >= (int)dt__rail_pieces(work)) return;
    size_t first = dt__rail_first(work, i, p);
    dt__part *part = dt__add_part(work, op, peer, dt__rail_first(work, i, p + 1) - first);
    if (op == DT__SEND)
        part->send = dt__element(work, buf, first);
    else
        part->recv = dt__element(work, buf, first);
}

/* Where the scratch has this machine's j-th rank's terms; in this rank's own place what came from
   below. */
static void *dt__rail_terms(const dt_work *work, int j) {
    return dt__element(
        work, work->scratch, (size_t)j * (work->scratch_count / (size_t)work->comm->rails));
}

static void dt__rail_add(dt_work *work, int p) {
    dt_comm *comm = work->comm;
    int k = comm->rails, seat = comm->place.rank % k, n = 0;
    size_t first = dt__rail_first(work, seat, p), count = dt__rail_first(work, seat, p + 1) - first;
    if (comm->place.rank >= k) comm->in[n++] = dt__rail_terms(work, seat);
    for (int j = 0; j < k; j++)
        comm->in[n++] =
            j == seat ? dt__element(work, work->call.send, first) : dt__rail_terms(work, j);
    dt__add_up(work, dt__element(work, work->call.recv, first), n, count);
}

static int dt__rails_all_reduce(dt_work *work) {
    int k = work->comm->rails, me = work->comm->place.rank, seat = me % k, first = me - seat,
        t = work->round;
    int above = work->comm->place.size / k - 1 - me / k, down = t - 2 * above - 1,
        pieces = (int)dt__rail_pieces(work);
    if (t == 0 && !dt__scratch(work, (size_t)k * dt__rail_first(work, 0, 1))) return 0;
    if (t > 0 && t <= pieces) dt__rail_add(work, t - 1);
    if (down == pieces) return 0;
    size_t mine =
        t < pieces ? dt__rail_first(work, seat, t + 1) - dt__rail_first(work, seat, t) : 0;
    for (int step = 1; step < k; step++) {
        int to = (seat + step) % k, from = (seat + k - step) % k;
        dt__rail_part(work, DT__SEND, first + to, work->call.send, to, t);
        if (mine > 0) dt__of(work, first + from, dt__rail_terms(work, from), mine);
        dt__rail_part(work, DT__SEND, first + to, work->call.recv, seat, down);
        dt__rail_part(work, DT__RECV, first + from, work->call.recv, from, down);
    }
    if (first > 0) {
        if (mine > 0) dt__of(work, me - k, dt__rail_terms(work, seat), mine);
        dt__rail_part(work, DT__SEND, me - k, work->call.recv, seat, down);
    }
    if (above > 0) {
        dt__rail_part(work, DT__SEND, me + k, work->call.recv, seat, t - 1);
        dt__rail_part(work, DT__RECV, me + k, work->call.recv, seat, down + 1);
    }
    return 1;
}

/* ---- binomial trees: ranks are counted from the root, v; the subtree of v is v, v+1, ... below v
   + its lowest bit ---- */

static int dt__tree_v(const dt_work *work) {
    int n = work->comm->place.size;
    return (work->comm->place.rank - work->call.peer + n) % n;
}

static int dt__tree_rank(const dt_work *work, int v) {
    return (v + work->call.peer) % work->comm->place.size;
}

/* How many ranks hang on v, itself included. */
static int dt__tree_size(int v, int n) {
    int all = 1;
    while (all < n && !(v & all)) all *= 2;
    return all < n - v ? all : n - v;
}

/* The scratch becomes the sends of v, v+1, ...: a rank takes from its children, nearest first, and
   gives to its parent.
*/
static int dt__tree_collect(dt_work *work) {
    int n = work->comm->place.size, v = dt__tree_v(work), mask = 1 << work->round;
    size_t count = work->call.count;
    if (work->round == 0 && dt__scratch(work, (size_t)dt__tree_size(v, n) * count))
        dt__keep(work, work->scratch, work->call.send, count);
    if (mask >= n || (v & (mask - 1))) return 0;
    if (v & mask)
        dt__to(work, dt__tree_rank(work, v - mask), work->scratch,
            (size_t)dt__tree_size(v, n) * count);
    else if (v + mask < n)
        dt__of(work, dt__tree_rank(work, v + mask),
            dt__element(work, work->scratch, (size_t)mask * count),
            (size_t)dt__tree_size(v + mask, n) * count);
    return 1;
}

static int dt__tree_gather(dt_work *work) {
    if (dt__tree_collect(work)) return 1;
    for (int v = 0; v < work->comm->place.size && dt__tree_v(work) == 0 && work->call.count; v++)
        dt__keep(work, dt__recv_cut(work, dt__tree_rank(work, v)),
            dt__element(work, work->scratch, (size_t)v * work->call.count), work->call.count);
    return 0;
}

static int dt__tree_reduce(dt_work *work) {
    int n = work->comm->place.size;
    if (dt__tree_collect(work)) return 1;
    if (dt__tree_v(work) > 0) return 0;
    for (int v = 0; v < n; v++)
        work->comm->in[dt__tree_rank(work, v)] =
            dt__element(work, work->scratch, (size_t)v * work->call.count);
    dt__add_up(work, work->call.recv, n, work->call.count);
    return 0;
}

/* Round r is that of the distance `mask`, halved each time: whoever has the data gives them to the
   rank that far on. */
static int dt__tree_mask(const dt_work *work) {
    int mask = 1;
    while (mask < work->comm->place.size) mask *= 2;
    return mask >> (work->round + 1);
}

static int dt__tree_broadcast(dt_work *work) {
    int n = work->comm->place.size, v = dt__tree_v(work), mask = dt__tree_mask(work);
    if (mask == 0) return 0;
    if (v % (2 * mask) == mask)
        dt__of(work, dt__tree_rank(work, v - mask), work->call.recv, work->call.count);
    if (v % (2 * mask) == 0 && v + mask < n)
        dt__to(work, dt__tree_rank(work, v + mask), work->call.recv, work->call.count);
    return 1;
}

static int dt__tree_all_reduce(dt_work *work) {
    return dt__one_then(work, dt__tree_reduce, dt__tree_broadcast);
}

static int dt__tree_scatter(dt_work *work) {
    int n = work->comm->place.size, v = dt__tree_v(work), mask = dt__tree_mask(work),
        held = dt__tree_size(v, n);
    size_t count = work->call.count;
    if (work->round == 0 && !dt__scratch(work, (size_t)held * count)) return 0;
    for (int i = 0; i < n && work->round == 0 && v == 0 && count; i++)
        dt__keep(work, dt__element(work, work->scratch, (size_t)i * count),
            dt__send_cut(work, dt__tree_rank(work, i)), count);
    if (mask == 0) {
        if (count) dt__keep(work, work->call.recv, work->scratch, count);
        return 0;
    }
    if (v % (2 * mask) == mask)
        dt__of(work, dt__tree_rank(work, v - mask), work->scratch, (size_t)held * count);
    if (v % (2 * mask) == 0 && v + mask < n)
        dt__to(work, dt__tree_rank(work, v + mask),
            dt__element(work, work->scratch, (size_t)mask * count),
            (size_t)dt__tree_size(v + mask, n) * count);
    return 1;
}

/* ---- which ---- */

/* NULL: there is none of that kind for this operation. */
static dt__round_fn dt__algorithm_of(const dt__call *call, dt_algorithm algorithm) {
    /* in the order of dt__op_code and dt_algorithm */
    static const dt__round_fn table[][DT_ALGORITHMS] = {
        { NULL, dt__direct_all_reduce, dt__ring_all_reduce, dt__doubling_all_reduce,
            dt__tree_all_reduce },
        { NULL, dt__direct_reduce, NULL, NULL, dt__tree_reduce },
        { NULL, dt__direct_reduce_scatter, dt__ring_reduce_scatter, NULL, NULL },
        { NULL, dt__direct_all_gather, dt__ring_all_gather, dt__doubling_all_gather, NULL },
        { NULL, dt__direct_gather, NULL, NULL, dt__tree_gather },
        { NULL, dt__direct_scatter, NULL, NULL, dt__tree_scatter },
        { NULL, dt__direct_all_to_all, NULL, NULL, NULL },
        { NULL, dt__direct_all_to_all_v, NULL, NULL, NULL },
        { NULL, dt__direct_broadcast, dt__ring_broadcast, NULL, dt__tree_broadcast },
        { NULL, NULL, NULL, dt__doubling_barrier, NULL },
        { NULL, NULL, NULL, dt__doubling_all_reduce, NULL }, /* dt_sum_doubles */
        /* dt_agree, dt_comm_split, dt_comm_step */
        { NULL, NULL, NULL, dt__doubling_all_gather, NULL },
        { NULL, NULL, NULL, dt__doubling_all_gather, NULL },
        { NULL, NULL, NULL, dt__doubling_all_gather, NULL },
    }; /* a comparison has its own */
    /* an average is no sum of averages */
    if (algorithm == DT_RING && call->redop == DT_AVG) return NULL;
    return dt__is_to_one(call->op) ? NULL : table[call->op][algorithm];
}

/* Large sums of a group with rails. A sum on its way has the type of its terms, so none of those
   that are rounded, or divided, once at the end. */
static int dt__by_rails(const dt_comm *comm, const dt__call *call) {
    return comm->rails > 0 && call->op == DT__ALL_REDUCE && call->redop != DT_AVG &&
           !dt__narrow(call->dtype) && dt__call_bytes(call) >= (size_t)comm->rails * DT__RAIL_BYTES;
}

/* Without shared memory: few messages while they are short, few bytes when they are long. Never
   DT_RING's sums. */
static dt__round_fn dt__algorithm_by_size(const dt_comm *comm, const dt__call *call) {
    size_t all = dt__call_bytes(call) * (size_t)comm->place.size;
    if (dt__by_rails(comm, call)) return dt__rails_all_reduce;
    dt_algorithm few = all <= 32768 ? DT_DOUBLING : DT_DIRECT;
    if (call->op == DT__ALL_GATHER && all > 32768) few = DT_RING;
    if (dt__is_rooted(call->op))
        few = all <= 32768 ? DT_TREE : call->op == DT__BROADCAST ? DT_RING : DT_DIRECT;
    if (dt__algorithm_of(call, few)) return dt__algorithm_of(call, few);
    return dt__algorithm_of(call, dt__algorithm_of(call, DT_DIRECT) ? DT_DIRECT : DT_DOUBLING);
}

/* Room for the messages of the largest round. */
static int dt__parts_make(dt_work *work, int need) {
    dt_ctx *ctx = work->comm->world->ctx;
    if (work->room >= need) return 1;
    dt_free(ctx, DT_MEM_HOST, work->parts, (size_t)work->room * sizeof(dt__part));
    work->parts =
        (dt__part *)dt_alloc(ctx, DT_MEM_HOST, (size_t)need * sizeof(dt__part), "messages");
    work->room = work->parts ? need : 0;
    return work->parts != NULL;
}

/* In place of 1, there is a round, or 0, there is none: ask again. */
enum { DT__NOT_YET = -1 };

/* Moves the messages of the round on, and after them the algorithm to the next. */
static int dt__algorithm_advance(dt_work *work) {
    for (;;) {
        int waiting = 0;
        for (int i = 0; i < work->n_parts; i++) {
            dt__part *part = &work->parts[i];
            int done = part->over ? 1 : work->comm->ops->message(work, part);
            if (done < 0) return -1;
            if (done != part->over) dt__moved(work->comm->world);
            part->over = done;
            waiting += !done;
        }
        if (waiting > 0) return 0;
        work->n_parts = 0;
        int more = work->algorithm ? work->algorithm(work) : 0;
        if (dt_error(work->comm->world->ctx)) return -1;
        if (more == DT__NOT_YET) return 0;
        if (!more) return 1;
        work->round++;
    }
}

// ==== 17. Begin, wait, dispatch =================================================================

static const dt__comm_ops dt__threads_ops = { "threads", dt__shared_message, dt__shared_collective,
    NULL, NULL, NULL, NULL, NULL };
static const dt__comm_ops dt__transport_ops = { "transport", dt__transport_message, NULL, NULL,
    NULL, NULL, NULL, NULL };
static const dt__comm_ops dt__node_ops = { "node", dt__transport_message, dt__shared_collective,
    NULL, NULL, NULL, NULL, NULL };

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

/* Why there are no such ranks: they are not in this build, or not of one process. */
static const char *dt__backend_missing(dt_backend backend) {
#ifndef DT_USE_NCCL
    if (backend == DT_BACKEND_NCCL)
        return "NCCL is not in this build: DT_USE_NCCL, which nvcc sets where it finds <nccl.h>";
#endif
#ifndef DT_USE_MPI
    if (backend == DT_BACKEND_MPI) return "MPI is not in this build: mpicc -DDT_USE_MPI";
#endif
    return backend > DT_BACKEND_NCCL ? "it is not in this version"
                                     : "a team is threads or forks of one process";
}

/* Memory that a rank's kernels cannot read, as a variable of its function where tensors lie on a
   device: such data go the way of scalars. */
static int dt__beyond(const dt_comm *comm, const void *p) {
    const dt_kernels *kernels = dt_ctx_kernels(comm->world->ctx);
    return p && kernels->reaches && !kernels->reaches(p);
}

/* Elements in recv. */
static size_t dt__recv_count(const dt_comm *comm, const dt__call *call) {
    int shares = call->op == DT__ALL_GATHER || call->op == DT__GATHER || call->op == DT__ALL_TO_ALL;
    if (call->op == DT__ALL_TO_ALL_V) return dt__sum_of(call->recv_counts, comm->place.size);
    return shares ? call->count * (size_t)comm->place.size : call->count;
}

static int dt__overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
    uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return x < y ? y - x < a_bytes : x - y < b_bytes;
}

/* NULL, or why this rank's send and recv overlap illegally: the operation would overwrite data
   before it reads them. A legal overlap is in place: this rank's share at its own offset in the
   larger buffer. */
static const char *dt__wrong_place(const dt_comm *comm, const dt__call *call) {
    size_t size = dt_dtype_size(call->dtype), mine = (size_t)comm->place.rank * call->count * size;
    size_t sent = dt__send_count(comm, call) * size, got = dt__recv_count(comm, call) * size;
    const char *send = (const char *)call->send, *recv = (const char *)call->recv;
    if (!dt__sends(comm, call) || !dt__receives(comm, call) || sent == 0 || got == 0) return NULL;
    if (!dt__overlap(send, sent, recv, got)) return NULL;
    switch (call->op) {
    case DT__ALL_REDUCE:
    case DT__REDUCE:
        return send == recv ? NULL : "send and recv overlap; use another buffer, or recv == send";
    case DT__REDUCE_SCATTER:
    case DT__SCATTER:
        return recv == send + mine
                   ? NULL
                   : "send and recv overlap; use another buffer, or recv == send + rank * count";
    case DT__ALL_GATHER:
    case DT__GATHER:
        return send == recv + mine
                   ? NULL
                   : "send and recv overlap; use another buffer, or send == recv + rank * count";
    case DT__ALL_TO_ALL:
    case DT__ALL_TO_ALL_V:
        return "send and recv overlap; use another buffer: it is not possible in place";
    default: return NULL;
    }
}

/* Arguments that are wrong whatever the other ranks do; NULL if none, else what is wrong. One rule
   a line. */
static const char *dt__wrong(const dt_comm *comm, const dt__call *call) {
    size_t most = (size_t)-1 / 2 / dt_dtype_size(call->dtype) / (size_t)comm->place.size;
    int to_one = dt__is_to_one(call->op);
    if ((unsigned)call->redop > (unsigned)DT_PROD) return "unknown reduction";
    if (call->count > most) return "count too large";
    if (call->peer < 0 && !call->any) return to_one ? "no such rank" : "no such root";
    if (call->peer >= comm->place.size) return to_one ? "no such rank" : "no such root";
    if (to_one && call->tag < 0 && !call->host) return "the tag is negative";
    if (!call->host && call->send && call->recv &&
        dt__beyond(comm, call->send) != dt__beyond(comm, call->recv))
        return "one of its buffers is in the device's memory and the other in the host's";
    if (call->op == DT__ALL_TO_ALL_V) {
        if (!call->send_counts || !call->recv_counts) return "counts are NULL";
        for (int i = 0; i < comm->place.size; i++)
            if (call->send_counts[i] > most || call->recv_counts[i] > most)
                return "count too large";
        if (!call->send && dt__sum_of(call->send_counts, comm->place.size)) return "send is NULL";
        if (!call->recv && dt__sum_of(call->recv_counts, comm->place.size)) return "recv is NULL";
        return dt__wrong_place(comm, call);
    }
    if (call->count && dt__sends(comm, call) && !call->send) return "send is NULL";
    if (call->count && dt__receives(comm, call) && !call->recv) return "recv is NULL";
    return dt__wrong_place(comm, call);
}

/* comm NULL: no context, so nothing to fail and no table to copy with. */
static dt_status dt__nobody(const dt__call *call) {
    const void *send = call->send;
    size_t bytes = dt__call_bytes(call);
    if (dt__is_to_one(call->op) || call->peer != 0) return DT_ERR_ARG;
    if (dt_dtype_size(call->dtype) == 0) return DT_ERR_UNSUPPORTED;
    if (call->op == DT__ALL_TO_ALL_V) {
        if (!call->send_counts || !call->recv_counts ||
            call->send_counts[0] != call->recv_counts[0])
            return DT_ERR_ARG;
        bytes = call->send_counts[0] * dt_dtype_size(call->dtype);
    }
    int in_place = send == call->recv && call->op != DT__ALL_TO_ALL && call->op != DT__ALL_TO_ALL_V;
    if (call->op == DT__BROADCAST || call->op == DT__BARRIER || bytes == 0 || in_place)
        return DT_OK;
    if (!send || !call->recv || dt__overlap(send, bytes, call->recv, bytes)) return DT_ERR_ARG;
    memcpy(call->recv, send, bytes);
    return DT_OK;
}

/* With one rank every collective is a copy of send to recv, or nothing. */
static void dt__alone(dt_work *work) {
    const dt__call *call = &work->call;
    if (call->op != DT__BROADCAST && call->op != DT__BARRIER)
        dt__keep(work, call->recv, call->send,
            call->op == DT__ALL_TO_ALL_V ? call->send_counts[0] : call->count);
    work->over = 1;
}

static dt_work *dt__work_take(dt_comm *comm, const dt__call *call) {
    dt__world *world = comm->world;
    dt_work *work = world->idle;
    dt__part *parts = work ? work->parts : NULL;
    void *mark = work ? work->mark : NULL;
    int room = work ? work->room : 0;
    if (work)
        world->idle = work->later;
    else
        work = (dt_work *)dt_alloc(world->ctx, DT_MEM_HOST, sizeof *work, "dt_work");
    if (!work) return NULL;
    memset(work, 0, sizeof *work);
    work->parts = parts;
    work->room = room;
    work->mark = mark;
    work->comm = comm;
    work->call = *call;
    work->axis = comm->axis;
    return work;
}

/* Back to those that are idle; what it holds of a transport or of memory is given back. */
static void dt__work_release(dt__world *world, dt_work *work) {
    for (int i = 0; i < work->n_parts; i++) {
        dt__part *part = &work->parts[i];
        if (part->request && !part->over)
            world->transport.cancel(world->transport.user, part->request);
        dt__copy_give(world, part->copy, part->count * dt_dtype_size(work->call.dtype));
        dt__part_end(work, part);
        dt_free(world->ctx, DT_MEM_HOST, part->card, DT__CARD_BYTES);
    }
    dt__scratch_free(work);
    if (work->check) dt__check_free(work);
    work->n_parts = 0;
    work->comm = NULL;
    work->later = world->idle;
    world->idle = work;
}

/* A simulated link is busy until then. */
static void dt__link_begin(dt__world *world, dt_work *work) {
    double bytes = (double)dt__sent_bytes(work->comm, &work->call),
           now = world->host->now(world->host->user);
    if (work->call.host) return; /* scalars */
    world->link_free = (world->link_free > now ? world->link_free : now) + world->link.latency_s;
    if (world->link.bytes_per_s > 0) world->link_free += bytes / world->link.bytes_per_s;
    work->link_until = world->link_free;
}

/* ---- comparison over a transport ---- */

/* In shared memory the posts of a collective are compared (section 14). Over a transport each
   message carries a word about its call; and in the first steps, where programs go wrong, all ranks
   tell each other what they call before they do it, in a gather of its own. */
enum { DT__CHECK_STEPS = 100, DT__CHECK_OPS = 10000 }; /* of a group, for programs without steps */
typedef struct dt__notice { /* counts follow it in a group that is not large */
    uint64_t what, count;
    int32_t line;
    char file[28];
} dt__notice;
enum { DT__CHECK_RANKS = 16 };

static int dt__compares(const dt_comm *comm) {
    const dt__world *world = comm->world;
    if (!world->transport.send || world->check) return world->transport.send && world->check > 0;
    return world->state->step < DT__CHECK_STEPS && comm->messages < DT__CHECK_OPS;
}

/* One notice with the counts of an all-to-all-v, sent and expected. */
static size_t dt__notice_bytes(const dt_comm *comm) {
    size_t n = (size_t)comm->place.size;
    return sizeof(dt__notice) + (n <= DT__CHECK_RANKS ? 2 * n * sizeof(uint64_t) : 0);
}

static const dt__notice *dt__notice_of(const dt_work *check, int rank) {
    const char *all = (const char *)check->call.recv;
    return (const dt__notice *)(const void *)(all + (size_t)rank * dt__notice_bytes(check->comm));
}

static size_t dt__check_bytes(const dt_comm *comm) {
    return (size_t)(comm->place.size + 1) * dt__notice_bytes(comm);
}

/* Not made without memory: the context has failed then. All tell all directly, if they are not
   many: who waits then waits for one that has not come. */
static void dt__check_make(dt_work *work) {
    dt_comm *comm = work->comm;
    dt__world *world = comm->world;
    size_t each = dt__notice_bytes(comm), n = (size_t)comm->place.size;
    dt__notice *own =
        (dt__notice *)dt_alloc(world->ctx, DT_MEM_HOST, dt__check_bytes(comm), "a comparison");
    if (!own) return;
    memset(own, 0, each);
    own->what = dt__what(&work->call);
    own->count = work->call.count;
    own->line = world->line;
    if (world->file) strncpy(own->file, dt__file_name(world->file), sizeof own->file - 1);
    for (size_t i = 0; i < n && n <= DT__CHECK_RANKS && work->call.op == DT__ALL_TO_ALL_V; i++) {
        ((uint64_t *)(void *)(own + 1))[i] = work->call.send_counts[i];
        ((uint64_t *)(void *)(own + 1))[n + i] = work->call.recv_counts[i];
    }
    dt__call call =
        dt__call_make(DT__CHECK, own, (char *)own + each, each / sizeof(int32_t), DT_I32);
    call.host = 1;
    call.seq = work->call.seq;
    work->check = dt__work_take(comm, &call);
    if (!work->check) {
        dt_free(world->ctx, DT_MEM_HOST, own, dt__check_bytes(comm));
        return;
    }
    work->check->algorithm = n <= DT__CHECK_RANKS ? dt__direct_all_gather : dt__doubling_all_gather;
    work->check->checks = work;
    dt__parts_make(work->check, 2 * comm->place.size);
}

static void dt__check_free(dt_work *work) {
    dt_work *check = work->check;
    void *notices = (void *)check->call.send;
    dt_comm *comm = check->comm;
    work->check = NULL;
    dt__work_release(comm->world, check);
    dt_free(comm->world->ctx, DT_MEM_HOST, notices, dt__check_bytes(comm));
}

/* Of an all-to-all-v: does each rank send what the other expects? Every rank finds the same pair
   first. */
static int dt__check_counts(dt_work *work) {
    const dt_comm *comm = work->comm;
    int n = comm->place.size;
    if (work->call.op != DT__ALL_TO_ALL_V || n > DT__CHECK_RANKS) return 1;
    for (int pair = 0; pair < n * n; pair++) {
        int from = pair / n, to = pair % n;
        const dt__notice *its = dt__notice_of(work->check, to);
        uint64_t sent =
            ((const uint64_t *)(const void *)(dt__notice_of(work->check, from) + 1))[to];
        uint64_t expected = ((const uint64_t *)(const void *)(its + 1))[n + from];
        if (sent == expected) continue;
        dt__comm_fail(comm->world, DT_ERR_COMM,
            "rank %d sends %llu to rank %d, which expects %llu (all-to-all-v #%llu "
            "on %s%s)",
            comm->group->ranks[from], (unsigned long long)sent, comm->group->ranks[to],
            (unsigned long long)expected, (unsigned long long)work->call.seq, comm->group->name,
            dt__site_text(its->file, its->line).s);
        return -1;
    }
    return 1;
}

/* 1: all call the same. */
static int dt__check_advance(dt_work *work) {
    int done = dt__algorithm_advance(work->check);
    if (done <= 0) return done;
    const dt__notice *first = dt__notice_of(work->check, 0);
    for (int rank = 1; rank < work->comm->place.size; rank++) {
        const dt__notice *other = dt__notice_of(work->check, rank);
        if (other->what == first->what && other->count == first->count) continue;
        dt__shown its = { other->what, other->count, dt__site_text(other->file, other->line) };
        dt__shown one = { first->what, first->count, dt__site_text(first->file, first->line) };
        return dt__calls_differ(work, rank, &its, 0, &one), -1;
    }
    if (dt__check_counts(work) < 0) return -1;
    dt__check_free(work);
    dt__moved(work->comm->world);
    return 1;
}

/* How it goes: as messages, by an algorithm or to one other rank, or in the backend's own way. */
static int dt__work_route(dt_work *work) {
    dt_comm *comm = work->comm;
    const dt__call *call = &work->call;
    int to_one = dt__is_to_one(call->op);
    if (comm->algorithm != DT_ALGORITHM_AUTO)
        work->algorithm = dt__algorithm_of(call, comm->algorithm);
    else if (comm->ops->algorithm)
        work->algorithm = comm->ops->algorithm(comm, call);
    if (work->algorithm && comm->algorithm == DT_ALGORITHM_AUTO) comm->ops->begin(work);
    if (!work->algorithm && !comm->ops->collective && !to_one)
        work->algorithm = dt__algorithm_by_size(comm, call);
    if (work->algorithm) {
        work->call.seq = ++comm->messages;
        /* FNV-1a, a word at a time */
        comm->chain = (comm->chain ^ dt__what(call)) * 1099511628211u;
        comm->chain = (comm->chain ^ call->count) * 1099511628211u;
    } else if (!to_one) {
        work->call.seq = ++comm->seq;
    }
    return (!work->algorithm && !to_one) || dt__parts_make(work, to_one ? 1 : 2 * comm->place.size);
}

/* ---- what the device does ---- */

/* A backend may leave an operation to a device, behind a mark of its table: for the host it is over
   then. Whoever waits for it makes the rank's queue wait for the mark, and the host goes on. Its
   second half, the flight, lands when the device has passed the mark. Nothing in a device knows a
   limit of time: so before the host waits for the device without one, all flights land by the wait
   of section 12. */

static int dt__landed(dt_work *work) {
    int passed = dt_ctx_kernels(work->comm->world->ctx)->passed(work->mark);
    if (passed < 0)
        dt__data_failed(work->comm, &work->call, DT_ERR_DEVICE);
    else if (passed == 0 && work->comm->ops->sound)
        work->comm->ops->sound(work);
    return passed == 0 ? DT__NOT_YET : 0;
}

static void dt__fly(dt__world *world, dt_work *work) {
    dt_status status = dt_ctx_kernels(world->ctx)->after(dt_ctx_stream(world->ctx), work->mark);
    dt_work *flight = status ? NULL : dt__work_take(work->comm, &work->call);
    if (status) dt__data_failed(work->comm, &work->call, status);
    if (!flight) return;
    void *mark = flight->mark;
    flight->mark = work->mark;
    work->mark = mark;
    flight->number = work->number;
    flight->lane = work->lane;
    flight->lands = 1;
    flight->algorithm = dt__landed;
    if (world->flight)
        world->last_flight->later = flight;
    else
        world->flight = flight;
    world->last_flight = flight;
}

static void dt__flight_end(dt__world *world) {
    dt_work *flight = world->flight;
    world->flight = flight->later;
    dt__work_release(world, flight);
}

/* Those that have landed by now. */
static void dt__flights_look(dt__world *world) {
    while (world->flight && dt_ctx_kernels(world->ctx)->passed(world->flight->mark) > 0)
        dt__flight_end(world);
}

/* The listener's: all land, or the context has failed, and the backend has ended them. What was
   started and not waited for may go on: others may not have come to it yet. With `all` it is as if
   it were waited for now. */
static int dt__on_settle(dt_ctx *ctx, int all, void *user) {
    dt__world *world = (dt__world *)user;
    for (dt_work *w = all ? world->first : NULL; w && dt_error(ctx) == DT_OK; w = w->later) {
        double begin = -1;
        if (dt__drive(world, w, &begin) == DT_OK && w->flies) dt__fly(world, w);
        w->flies = 0;
    }
    while (world->flight) {
        double begin = -1;
        if (dt_error(ctx) == DT_OK) dt__drive(world, world->flight, &begin);
        dt__flight_end(world);
    }
    for (const dt_work *w = world->nccl && dt_error(ctx) == DT_OK ? world->first : NULL; w;
         w = w->later)
        if (!w->over || (w->flies && dt_ctx_kernels(ctx)->passed(w->mark) == 0)) return 0;
    return 1;
}

/* Every operation begins here. NULL: the context has failed. */
static dt_work *dt__begin(dt_comm *comm, dt__call call) {
    dt__world *world = comm->world;
    if (dt_error(world->ctx)) return NULL;
    dt__look(world);
    if (dt__aborted(world->shared)) return dt__peer_failed(world), (dt_work *)NULL;
    if (world->flight) dt__flights_look(world);
    const char *wrong = dt_dtype_size(call.dtype) ? dt__wrong(comm, &call) : NULL;
    if (dt_dtype_size(call.dtype) == 0)
        dt__comm_fail(world, DT_ERR_UNSUPPORTED, "%s on %s%s: %d is no element type",
            dt__call_text(&call).s, comm->group->name, dt__site_text(world->file, world->line).s,
            (int)call.dtype);
    else if (wrong)
        dt__comm_fail(world, DT_ERR_ARG, "%s on %s%s: %s", dt__call_text(&call).s,
            comm->group->name, dt__site_text(world->file, world->line).s, wrong);
    dt_work *work = dt_error(world->ctx) ? NULL : dt__work_take(comm, &call);
    if (!work) return NULL;
    if (dt__beyond(comm, call.send) || dt__beyond(comm, call.recv)) work->call.host = 1;
    /* not touched; but NULL + 0 is undefined in C */
    if (call.op != DT__ALL_TO_ALL_V && call.count == 0)
        work->call.send = work->call.recv = comm->words;
    int to_one = dt__is_to_one(call.op), alone = !to_one && comm->place.size == 1;
    if (world->planted) dt__fault_before(work);
    if (work->fault == DT__DROP) return work;
    if (dt_error(world->ctx) || (!alone && !dt__work_route(work))) {
        dt__work_release(world, work);
        return NULL;
    }
    if (!DT__UNCHECKED) dt__record_make(work);
    if (alone) {
        dt__alone(work);
        return work;
    }
    if (work->algorithm && dt__compares(comm)) dt__check_make(work);
    if (dt_error(world->ctx)) {
        dt__work_release(world, work);
        return NULL;
    }
    if (world->link.latency_s > 0 || world->link.bytes_per_s > 0) dt__link_begin(world, work);
    if (to_one) {
        dt__part *part = dt__add_part(work, call.op, call.peer, call.count);
        part->tag = call.tag;
        part->send = work->call.send;
        part->recv = work->call.recv;
        if (world->trace && world->transport.send) part->order = dt__trace_number(world, work);
    }
    return work;
}

/* The end of an operation: its bytes count if it went well. */
static dt_status dt__end(dt__world *world, dt_work *work) {
    dt_status status = dt_error(world->ctx);
    if (work->fault && status == DT_OK) dt__fault_after(work);
    if (status == DT_OK)
        world->bytes[1 + (int)work->axis] += dt__sent_bytes(work->comm, &work->call);
    else
        dt__hands_off(world);
    if (status == DT_OK && work->flies) dt__fly(world, work);
    dt__work_release(world, work);
    return dt_error(world->ctx);
}

/* A blocking operation. */
static dt_status dt__do(dt_comm *comm, dt__call call) {
    if (!comm) return dt__nobody(&call);
    dt__world *world = comm->world;
    /* to look at the clock costs half a wait */
    int timed = world->trace || dt__call_bytes(&call) > DT_EAGER_BYTES;
    double begin = timed ? world->host->now(world->host->user) : -1;
    dt_work *work = dt__begin(comm, call);
    if (!work) return dt_error(world->ctx);
    world->blocking = work; /* pthread_cancel may end the thread in the wait */
    dt__drive(world, work, &begin);
    world->blocking = NULL;
    double end = begin >= 0 ? world->host->now(world->host->user) : begin;
    world->seconds += end - begin;
    if (begin >= 0) __atomic_store_n(&world->state->left, (int64_t)(end * 1e6), __ATOMIC_RELAXED);
    if (world->trace) dt__trace_op(work, begin, end);
    world->file = NULL; /* who calls next without a macro calls from nowhere */
    return dt__end(world, work);
}

/* A started one. */
static dt_work *dt__start(dt_comm *comm, dt__call call) {
    if (!comm) {
        dt__nobody(&call);
        return NULL;
    }
    dt__world *world = comm->world;
    double begin = world->host->now(world->host->user);
    dt_work *work = dt__begin(comm, call);
    if (!work) return NULL;
    work->started = work->open = 1;
    work->earlier = world->last;
    if (world->first)
        world->last->later = work;
    else
        world->first = work;
    world->last = work;
    world->started++;
    work->open_earlier = world->last_open;
    if (world->open)
        world->last_open->open_later = work;
    else
        world->open = work;
    world->last_open = work;
    world->opened++;
    work->begun = begin;
    if (!dt__advance_some(world)) dt__advance(work); /* messages leave in start order */
    world->seconds += world->host->now(world->host->user) - begin;
    world->file = NULL;
    return work;
}

static void dt__forget(dt__world *world, dt_work *work) {
    dt__open_end(world, work);
    world->started--;
    if (work->earlier)
        work->earlier->later = work->later;
    else
        world->first = work->later;
    if (work->later)
        work->later->earlier = work->earlier;
    else
        world->last = work->earlier;
}

dt_status dt_wait(dt_ctx *ctx, dt_work *work) {
    dt__world *world = dt__world_of(ctx);
    if (!world || !work) return dt_error(ctx);
    if (!work->comm) return dt_fail(ctx, DT_ERR_ARG, "dt_wait: this operation has been waited for");
    double begin = world->host->now(world->host->user);
    if (dt_error(ctx) == DT_OK) dt__drive(world, work, &begin);
    double end = world->host->now(world->host->user);
    world->seconds += end - begin;
    __atomic_store_n(&world->state->left, (int64_t)(end * 1e6), __ATOMIC_RELAXED);
    if (world->trace) dt__trace_wait(work, begin, end);
    dt__forget(world, work);
    return dt__end(world, work);
}

int dt_test(dt_ctx *ctx, dt_work *work) {
    dt__world *world = dt__world_of(ctx);
    if (!world || !work || !work->comm || dt_error(ctx)) return 1;
    if (dt__aborted(world->shared))
        dt__peer_failed(world);
    else if (!dt__advance_some(world))
        dt__advance(work);
    return work->over || dt_error(ctx);
}

/* ---- the public functions: each a call, done or started ---- */

static dt__call dt__reduce_call(dt__op_code op, const void *send, void *recv, size_t count,
    dt_dtype dtype, dt_op redop, int root) {
    dt__call call = dt__call_make(op, send, recv, count, dtype);
    call.redop = redop;
    call.peer = root;
    return call;
}

static dt__call dt__rooted_call(
    dt__op_code op, const void *send, void *recv, size_t count, dt_dtype dtype, int root) {
    return dt__reduce_call(op, send, recv, count, dtype, DT_SUM, root);
}

static dt__call dt__all_to_all_v_call(const void *send, const size_t *send_counts, void *recv,
    const size_t *recv_counts, dt_dtype dtype) {
    dt__call call = dt__call_make(DT__ALL_TO_ALL_V, send, recv, 0, dtype);
    call.send_counts = send_counts;
    call.recv_counts = recv_counts;
    return call;
}

static dt__call dt__mail_call(
    dt__op_code op, const void *send, void *recv, size_t count, dt_dtype dtype, int peer, int tag) {
    dt__call call = dt__call_make(op, send, recv, count, dtype);
    call.peer = peer;
    call.tag = tag;
    return call;
}

dt_status(dt_all_reduce)(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op) {
    return dt__do(comm, dt__reduce_call(DT__ALL_REDUCE, send, recv, count, dtype, op, 0));
}

dt_work *(dt_all_reduce_start)(dt_comm *comm, const void *send, void *recv, size_t count,
    dt_dtype dtype, dt_op op) {
    return dt__start(comm, dt__reduce_call(DT__ALL_REDUCE, send, recv, count, dtype, op, 0));
}

dt_status(dt_reduce)(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op, int root) {
    return dt__do(comm, dt__reduce_call(DT__REDUCE, send, recv, count, dtype, op, root));
}

dt_work *(dt_reduce_start)(dt_comm *comm, const void *send, void *recv, size_t count,
    dt_dtype dtype, dt_op op, int root) {
    return dt__start(comm, dt__reduce_call(DT__REDUCE, send, recv, count, dtype, op, root));
}

dt_status(dt_reduce_scatter)(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op) {
    return dt__do(comm, dt__reduce_call(DT__REDUCE_SCATTER, send, recv, count, dtype, op, 0));
}

dt_work *(dt_reduce_scatter_start)(dt_comm *comm, const void *send, void *recv, size_t count,
    dt_dtype dtype, dt_op op) {
    return dt__start(comm, dt__reduce_call(DT__REDUCE_SCATTER, send, recv, count, dtype, op, 0));
}

dt_status(dt_all_gather)(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype) {
    return dt__do(comm, dt__call_make(DT__ALL_GATHER, send, recv, count, dtype));
}

dt_work *(dt_all_gather_start)(dt_comm *comm, const void *send, void *recv, size_t count,
    dt_dtype dtype) {
    return dt__start(comm, dt__call_make(DT__ALL_GATHER, send, recv, count, dtype));
}

dt_status(dt_gather)(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, int root) {
    return dt__do(comm, dt__rooted_call(DT__GATHER, send, recv, count, dtype, root));
}

dt_work *(dt_gather_start)(dt_comm *comm, const void *send, void *recv, size_t count,
    dt_dtype dtype, int root) {
    return dt__start(comm, dt__rooted_call(DT__GATHER, send, recv, count, dtype, root));
}

dt_status(dt_scatter)(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, int root) {
    return dt__do(comm, dt__rooted_call(DT__SCATTER, send, recv, count, dtype, root));
}

dt_work *(dt_scatter_start)(dt_comm *comm, const void *send, void *recv, size_t count,
    dt_dtype dtype, int root) {
    return dt__start(comm, dt__rooted_call(DT__SCATTER, send, recv, count, dtype, root));
}

dt_status(dt_all_to_all)(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype) {
    return dt__do(comm, dt__call_make(DT__ALL_TO_ALL, send, recv, count, dtype));
}

dt_work *(dt_all_to_all_start)(dt_comm *comm, const void *send, void *recv, size_t count,
    dt_dtype dtype) {
    return dt__start(comm, dt__call_make(DT__ALL_TO_ALL, send, recv, count, dtype));
}

dt_status(dt_all_to_all_v)(dt_comm *comm, const void *send, const size_t *send_counts, void *recv,
    const size_t *recv_counts, dt_dtype dtype) {
    return dt__do(comm, dt__all_to_all_v_call(send, send_counts, recv, recv_counts, dtype));
}

dt_work *(dt_all_to_all_v_start)(dt_comm *comm, const void *send, const size_t *send_counts,
    void *recv, const size_t *recv_counts, dt_dtype dtype) {
    return dt__start(comm, dt__all_to_all_v_call(send, send_counts, recv, recv_counts, dtype));
}

dt_status(dt_broadcast)(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int root) {
    return dt__do(comm, dt__rooted_call(DT__BROADCAST, buf, buf, count, dtype, root));
}

dt_work *(dt_broadcast_start)(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int root) {
    return dt__start(comm, dt__rooted_call(DT__BROADCAST, buf, buf, count, dtype, root));
}

dt_status(dt_barrier)(dt_comm *comm) {
    return dt__do(comm, dt__call_make(DT__BARRIER, NULL, NULL, 0, DT_F32));
}

dt_work *(dt_barrier_start)(dt_comm *comm) {
    return dt__start(comm, dt__call_make(DT__BARRIER, NULL, NULL, 0, DT_F32));
}

dt_status(dt_send)(dt_comm *comm, const void *buf, size_t count, dt_dtype dtype, int to, int tag) {
    return dt__do(comm, dt__mail_call(DT__SEND, buf, NULL, count, dtype, to, tag));
}

dt_work *(
    dt_send_start)(dt_comm *comm, const void *buf, size_t count, dt_dtype dtype, int to, int tag) {
    return dt__start(comm, dt__mail_call(DT__SEND, buf, NULL, count, dtype, to, tag));
}

dt_status(dt_recv)(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int from, int tag) {
    return dt__do(comm, dt__mail_call(DT__RECV, NULL, buf, count, dtype, from, tag));
}

dt_work *(
    dt_recv_start)(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int from, int tag) {
    return dt__start(comm, dt__mail_call(DT__RECV, NULL, buf, count, dtype, from, tag));
}

static dt__call dt__any_call(void *buf, size_t count, dt_dtype dtype, int tag, int *from) {
    dt__call call = dt__mail_call(DT__RECV, NULL, buf, count, dtype, DT_ANY, tag);
    call.any = 1;
    call.from = from;
    return call;
}

dt_status(dt_recv_any)(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int tag, int *from) {
    return dt__do(comm, dt__any_call(buf, count, dtype, tag, from));
}

dt_work *(
    dt_recv_any_start)(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int tag, int *from) {
    return dt__start(comm, dt__any_call(buf, count, dtype, tag, from));
}

dt_status(dt_exchange)(dt_comm *comm, const dt_transfer *transfers, int n) {
    if (!comm) return n != 0 ? DT_ERR_ARG : DT_OK;
    dt__world *world = comm->world;
    dt_work *before = world->last;
    const char *file = world->file;
    if (n < 0 || (n > 0 && !transfers))
        return dt__comm_fail(world, DT_ERR_ARG, "dt_exchange on %s%s: %d transfers%s",
            comm->group->name, dt__site_text(world->file, world->line).s, n,
            n < 0 ? "" : ", which are NULL");
    for (int i = 0; i < n && dt_error(world->ctx) == DT_OK; i++) {
        const dt_transfer *t = &transfers[i];
        world->file = file;
        if (t->send && t->recv)
            dt__comm_fail(world, DT_ERR_ARG, "dt_exchange: transfer %d both sends and receives", i);
        else if (t->recv)
            (dt_recv_start)(comm, t->recv, t->count, t->dtype, t->peer, t->tag);
        else
            (dt_send_start)(comm, t->send, t->count, t->dtype, t->peer, t->tag);
    }
    for (dt_work *work = before ? before->later : world->first; work;) {
        dt_work *later = work->later;
        dt_wait(world->ctx, work);
        work = later;
    }
    return dt_error(world->ctx);
}

// ==== 18. Who is waited for, and why ============================================================

/* From what the ranks show of themselves (section 11): a proved deadlock, what is missing when a
   wait took too long, and the table that a live run gives when it is asked. A rank that is waited
   for may itself wait for another: the texts follow that to its end. What a process does outside of
   operations the kernel knows: /proc. */

/* Of a group's operations the one that must move before this one can. */
static dt_work *dt__first_to_move(dt_work *work) {
    for (dt_work *w = work->comm->world->open; w && work->n_parts == 0; w = w->open_later) {
        if (w->comm == work->comm && !w->over && !w->algorithm &&
            w->call.seq == work->comm->moved + 1)
            work = w;
    }
    return work;
}

static uint32_t dt__way_of(const dt_comm *comm, int posts);

/* A device waits for the other ranks' part of a collective: the first that has not said that it has
   begun it. */
static int dt__not_begun(const dt_work *work) {
    const dt__world *world = work->comm->world;
    for (int i = 0; world->others && i < work->comm->place.size && !dt__is_to_one(work->call.op);
         i++) {
        int rank = work->comm->group->ranks[i], begun = rank == world->rank;
        const dt__bulletin *last = &world->others[rank].last;
        for (uint32_t g = 0; g < last->groups; g++)
            begun |= last->channels[g] == dt__way_of(work->comm, 0) &&
                     (int32_t)(last->begun[g] - (uint32_t)work->call.seq) >= 0;
        if (!begun) return rank;
    }
    return DT_ANY;
}

/* The world rank that it waits for; DT_ANY: it is not one. */
static int dt__awaited(const dt_work *work) {
    const dt_comm *comm = work->comm;
    if (work->lands) return dt__not_begun(work);
    if (work->check) work = work->check;
    for (int i = 0; i < work->n_parts; i++) {
        int peer = work->parts[i].peer;
        if (!work->parts[i].over) return peer == DT_ANY ? DT_ANY : comm->group->ranks[peer];
    }
    if (work->algorithm || dt__is_to_one(work->call.op) || !comm->group->members) return DT_ANY;
    for (int rank = 0; rank < comm->place.size; rank++)
        if (!dt__is_there(work, rank)) return comm->group->ranks[rank];
    return DT_ANY;
}

/* A small file, as text. Its bytes; 0 or less: it cannot be read. */
static int64_t dt__read_text(const dt_io *io, const char *path, char *text, size_t bytes) {
    int fd = io->open(io->user, path, DT_IO_READ);
    int64_t got = fd < 0 ? -1 : io->pread(io->user, fd, text, bytes - 1, 0);
    if (fd >= 0) io->close(io->user, fd);
    text[got > 0 ? got : 0] = 0;
    return got;
}

/* What the kernel says of a rank: 'R' runs, 'S' sleeps, 'T' stopped, 'D' waits for a device, 'Z'
   gone; 0: not known. */
static char dt__process_state(const dt_io *io, const dt__rank_state *state) {
    char path[64], text[256];
    int pid = __atomic_load_n(&state->pid, __ATOMIC_RELAXED),
        tid = __atomic_load_n(&state->tid, __ATOMIC_RELAXED);
    if (pid == 0 || (pid == (int)getpid() && tid == 0)) return 0;
    if (pid == (int)getpid())
        snprintf(path, sizeof path, "/proc/self/task/%d/stat", tid);
    else
        snprintf(path, sizeof path, "/proc/%d/stat", pid);
    /* it has ended, if there are such files at all */
    if (dt__read_text(io, path, text, sizeof text) <= 0)
        return dt__read_text(io, "/proc/self/stat", text, sizeof text) > 0 ? 'Z' : 0;
    const char *name = strrchr(text, ')');
    return name && name[1] == ' ' ? name[2] : 0;
}

static const char *dt__process_word(char state) {
    switch (state) {
    case 'R': return "is spinning or computing (state R)";
    case 'S': return "is asleep outside of operations (state S)";
    case 'D': return "waits for a device or a file (state D)";
    case 'T':
    case 't': return "is stopped (state T)";
    case 'Z':
    case 'X': return "is gone";
    default: return "is outside of operations";
    }
}

/* ", its last operation: ..." */
static void dt__append_last(dt__seen seen, char *text, size_t bytes, size_t *at) {
    dt__op_record r;
    int64_t last = __atomic_load_n(&seen.state->records, __ATOMIC_ACQUIRE);
    if (last == 0 && seen.ring.n > 1)
        dt__append(text, bytes, at, ", it has begun no operation");
    else if (dt__record_get(seen.ring, (uint64_t)last, &r))
        dt__append(text, bytes, at, ", its last operation: %s", dt__record_text(&r).s);
}

/* Is that rank in a long wait, as it shows, and not stopped in the middle of it? Then its
   record. */
static int dt__waits(const dt_io *io, dt__seen seen, char *process, dt__op_record *r) {
    uint64_t waiting = __atomic_load_n(&seen.state->waiting, __ATOMIC_SEQ_CST);
    *process = dt__process_state(io, seen.state);
    if (*process == 'T' || *process == 't' || *process == 'Z' || *process == 'X') return 0;
    return dt__record_get(seen.ring, waiting, r);
}

/* "; rank 3 (process 4711) is stopped (state T), its last operation: ...": why that rank does not
   come. */
static void dt__append_why(const dt__world *world, int rank, char *text, size_t bytes, size_t *at) {
    const dt_io *io = dt_ctx_io(world->ctx);
    dt__op_record r;
    char process;
    for (int step = 0; step < 4 && rank >= 0 && rank != world->rank; step++) {
        dt__seen seen = dt__seen_of(world, rank);
        const dt__rank_state *state = seen.state;
        if (!state) return;
        if (dt__waits(io, seen, &process, &r)) {
            int next = __atomic_load_n(&state->waits_for, __ATOMIC_RELAXED);
            dt__append(text, bytes, at, "; rank %d waits in %s", rank, dt__record_text(&r).s);
            if (next != DT_ANY) dt__append(text, bytes, at, " for rank %d", next);
            rank = next;
            continue;
        }
        int pid = __atomic_load_n(&state->pid, __ATOMIC_RELAXED),
            tid = __atomic_load_n(&state->tid, __ATOMIC_RELAXED);
        int thread = pid == (int)getpid() && tid != 0;
        /* one that naps is seldom caught at it */
        for (int look = 0; look < 3 && process == 'R'; look++) {
            world->host->sleep(world->host->user, DT__NAP_MAX);
            process = dt__process_state(io, state);
        }
        if (pid == 0 && seen.ring.n > 1)
            dt__append(text, bytes, at, "; rank %d has not begun", rank);
        else if (pid == 0)
            dt__append(text, bytes, at, "; it is on another machine, and says nothing of itself");
        else
            dt__append(text, bytes, at, "; rank %d (%s %d) %s", rank, thread ? "thread" : "process",
                thread ? tid : pid, dt__process_word(process));
        if (rank == world->awaited &&
            __atomic_load_n(&state->moves, __ATOMIC_SEQ_CST) != world->awaited_moves)
            dt__append(text, bytes, at, ", it is late: it did other things meanwhile");
        dt__append_last(seen, text, bytes, at);
        return;
    }
}

/* What this rank waited for did not come in time: says who is missing. */
static dt_status dt__late(dt_work *work) {
    dt__world *world = work->comm->world;
    char text[480];
    size_t at = 0;
    work = dt__first_to_move(work);
    const char *name = dt__pattern_of(work->call.op)->name, *group = work->comm->group->name;
    dt__phrase site = dt__own_site(work);
    int awaited = dt__awaited(work), messages = work->algorithm || !work->comm->group->members;
    const dt__part *part = work->parts;
    while (part && part < work->parts + work->n_parts && part->over) part++;
    dt__append(text, sizeof text, &at, "timeout %.1f s in ", world->shared->timeout_s);
    if (part && part < work->parts + work->n_parts)
        dt__append(text, sizeof text, &at,
            part->peer == DT_ANY ? "%s: nobody sent it" : "%s: rank %d %s",
            dt__part_text(work, part).s, awaited,
            part->tag < 0          ? "did not do its part"
            : part->op == DT__SEND ? "did not receive it"
                                   : "did not send it");
    else if (work->check || work->lands)
        dt__append(text, sizeof text, &at,
            awaited == DT_ANY ? "%s #%llu on %s%s" : "%s #%llu on %s%s: rank %d did not come",
            dt__call_text(&work->call).s, (unsigned long long)work->call.seq, group, site.s,
            awaited);
    else if (messages)
        dt__append(
            text, sizeof text, &at, "%s on %s%s", dt__call_text(&work->call).s, group, site.s);
    else
        dt__append(text, sizeof text, &at, "%s #%llu on %s%s: %s", name,
            (unsigned long long)work->call.seq, group, site.s, dt__who_came(work).s);
    dt__append_why(world, awaited, text, sizeof text, &at);
    return dt__comm_fail(world, DT_ERR_TIMEOUT, "%s", text);
}

/* ---- deadlock ---- */

/* "rank 0 waits in ... for rank 1" */
static void dt__append_wait(
    const dt__world *world, int rank, char *text, size_t bytes, size_t *at) {
    dt__seen seen = dt__seen_of(world, rank);
    dt__op_record r;
    /* another rank has found the same, and all leave: its text counts */
    if (!seen.state) return;
    int other = __atomic_load_n(&seen.state->waits_for, __ATOMIC_RELAXED);
    dt__append(text, bytes, at, "rank %d ", rank);
    if (dt__record_get(seen.ring, __atomic_load_n(&seen.state->waiting, __ATOMIC_SEQ_CST), &r))
        dt__append(text, bytes, at, "waits in %s", dt__record_text(&r).s);
    else
        dt__append(text, bytes, at, "has ended");
    if (other != DT_ANY) dt__append(text, bytes, at, " for rank %d", other);
}

/* For whom a world rank waits, as it shows; DT_ANY: nobody, or that is not known. */
static int dt__next_waited(const dt__world *world, int rank) {
    dt__seen seen = dt__seen_of(world, rank);
    if (!seen.state || !__atomic_load_n(&seen.state->waiting, __ATOMIC_SEQ_CST)) return DT_ANY;
    return __atomic_load_n(&seen.state->waits_for, __ATOMIC_RELAXED);
}

/* No rank will ever move, and waits for others lead from this one into a circle: names it, from its
   lowest rank. If they do not, the waits of some. */
static void dt__deadlocked(dt__world *world) {
    enum { NAMED = 4 };
    int n = world->comm->place.size, rank = world->rank, first, length = 1;
    char text[480];
    size_t at = 0;
    for (int i = 0; i < n && rank != DT_ANY; i++) rank = dt__next_waited(world, rank);
    if (rank == DT_ANY) {
        dt__append(text, sizeof text, &at, "deadlock: all ranks wait, and nothing is under way: ");
        for (int i = 0; i < n && i < NAMED; i++) {
            if (i) dt__append(text, sizeof text, &at, ", ");
            dt__append_wait(world, i, text, sizeof text, &at);
        }
        dt__comm_fail(world, DT_ERR_COMM, "%s%s", text, n > NAMED ? ", ..." : "");
        return;
    }
    first = rank;
    for (int next = dt__next_waited(world, rank); next != rank && next != DT_ANY && length < n;
         next = dt__next_waited(world, next)) {
        if (next < first) first = next;
        length++;
    }
    rank = first;
    for (int i = 0; i < length && i < NAMED; i++, rank = dt__next_waited(world, rank)) {
        dt__append(text, sizeof text, &at, i ? ", " : "deadlock: ");
        dt__append_wait(world, rank, text, sizeof text, &at);
    }
    if (length > NAMED)
        dt__append(text, sizeof text, &at, ", and so on: a circle of %d ranks", length);
    dt__comm_fail(world, DT_ERR_COMM, "%s", text);
}

/* Does anything wait for the time alone? */
static int dt__link_busy(const dt__world *world, const dt_work *work) {
    int busy = work->done > 0 && !work->over;
    for (const dt_work *w = world->open; w; w = w->open_later)
        busy = busy || (w->done > 0 && !w->over);
    return busy;
}

/* Can the proof be made? All ranks share memory, and no message is on its way outside of it. */
static int dt__all_in_sight(const dt__world *world) {
    int64_t away = 0;
    if (!world->shared->state || world->comm->place.size != world->shared->ranks) return 0;
    for (int seat = 0; seat < world->shared->ranks; seat++)
        away += __atomic_load_n(&world->shared->state[seat].away, __ATOMIC_SEQ_CST);
    return away == 0;
}

/* Over a transport there is no sum of moves to look at, but what the ranks have said last. Two
   things prove a deadlock.

   A circle in which each waits in a collective for the next, which waits too and has not begun that
   collective: who left it first would have been let go by one who had left it before.

   All wait, none for a post that has been made or a send, and between each two as many messages
   came as were sent. (F. Mattern, "Algorithms for distributed termination detection", 1987: channel
   counting. Bulletins need not be of one moment: what set a rank going after its own would have
   come from one that was going before.) A send counts because its receiver may know that it is over
   before its sender does. In a circle it does only where messages are taken whether anybody asks
   for them or not: elsewhere it needs the other's part of the collective. */
static int dt__behind(const dt__world *world, int rank, int other) {
    const dt__bulletin *its = &world->others[rank].last, *theirs = &world->others[other].last;
    if (!its->waiting || !theirs->waiting || dt__is_to_one((dt__op_code)(its->wait.what & 255)))
        return 0;
    if (its->sends && world->control->came) return 0;
    for (uint32_t i = 0; i < theirs->groups; i++) {
        /* 32 bits of it are told */
        int32_t ahead = (int32_t)(theirs->begun[i] - (uint32_t)its->wait.seq);
        if (theirs->channels[i] == its->channel) return ahead < 0;
        /* by posts alone so far */
        if (theirs->channels[i] == its->channel + 1 && its->channel % 2 == 0) return 1;
    }
    return 0;
}

static int dt__circle(const dt__world *world) {
    int n = world->comm->place.size, rank = world->rank;
    for (int i = 0; i < 2 * n; i++) {
        int other = world->others[rank].last.waits_for;
        if (other == DT_ANY || !dt__behind(world, rank, other)) return 0;
        rank = other;
    }
    return 1;
}

static int dt__all_quiet(const dt__world *world) {
    int n = world->comm->place.size;
    if (n > DT__SAID_RANKS) return 0;
    for (int rank = 0; rank < n; rank++) {
        const dt__bulletin *its = &world->others[rank].last;
        if (!its->waiting || its->sends) return 0;
        int posted = its->channel % 2 && !dt__is_to_one((dt__op_code)(its->wait.what & 255));
        if (posted && (its->waits_for == DT_ANY || !dt__behind(world, rank, its->waits_for)))
            return 0;
    }
    for (int from = 0; from < n; from++) {
        for (int to = 0; to < n; to++)
            if (world->others[from].last.sent[to] != world->others[to].last.got[from]) return 0;
    }
    return 1;
}

/* Messages of a work that are still being sent. */
static uint32_t dt__sending(const dt_work *work) {
    uint32_t n = work->check ? dt__sending(work->check) : 0;
    for (int i = 0; i < work->n_parts; i++)
        n += work->parts[i].op == DT__SEND && !work->parts[i].over;
    return n;
}

/* Collectives that go by posts are counted apart from those that go as messages. */
static uint32_t dt__way_of(const dt_comm *comm, int posts) {
    return 2 * comm->group->channel + (uint32_t)(posts != 0);
}

static void dt__say_begun(dt__bulletin *own, uint32_t channel, uint64_t begun) {
    if (own->groups == DT__SAID_GROUPS) return;
    own->channels[own->groups] = channel;
    own->begun[own->groups++] = (uint32_t)begun;
}

/* Says to all others what this rank waits in, that it does so no longer, or that it has ended. */
static void dt__say_wait(dt__world *world, const dt_work *work, int ended) {
    dt__bulletin *own = &world->others[world->rank].last;
    memset(own, 0, sizeof *own);
    own->waiting = work ? work->number : ended ? DT__SAID_END : 0;
    own->records = world->state->records;
    own->step = world->state->step;
    own->waits_for = work ? world->awaited : DT_ANY;
    own->channel = work ? dt__way_of(work->comm, !work->algorithm) : 0;
    dt__record_get(dt__seen_of(world, world->rank).ring,
        work ? work->number : (uint64_t)own->records, &own->wait);
    for (const dt_comm *comm = world->comms; comm; comm = comm->next) {
        int posts = comm->ops->collective != NULL;
        if (!posts || comm->messages) dt__say_begun(own, dt__way_of(comm, 0), comm->messages);
        if (posts) dt__say_begun(own, dt__way_of(comm, 1), comm->seq);
    }
    for (int rank = 0; rank < world->comm->place.size && rank < DT__SAID_RANKS; rank++) {
        own->sent[rank] = world->others[rank].sent;
        own->got[rank] = world->control->came ? world->control->came(world->control->user, rank)
                                              : world->others[rank].got;
    }
    for (const dt_work *w = world->open; work && w; w = w->open_later)
        own->sends += w == work ? 0 : dt__sending(w);
    /* it may go on: no deadlock */
    if (work) own->sends += dt__sending(work) + (uint32_t)(work->lands || work->apart);
    world->said = work != NULL;
    world->said_moves = world->state->moves;
    world->said_at = world->host->now(world->host->user);
    world->control->say(world->control->user, own, sizeof *own);
}

/* What another rank said. It is one of the job, but its numbers are looked at. */
static void dt__heard(dt__world *world, int rank, const void *bulletin) {
    if (!world || !world->others || !world->comm) return;
    int64_t now = (int64_t)(world->host->now(world->host->user) * 1e6);
    dt__other *other = &world->others[rank];
    uint64_t before = other->last.waiting;
    const dt__bulletin *said = &other->last;
    memcpy(&other->last, bulletin, sizeof other->last);
    other->last.wait.group[DT__NAME_BYTES - 1] = other->last.wait.file[DT__FILE_BYTES - 1] = 0;
    other->last.wait.what =
        (said->wait.what & 255) <= DT__RECV ? said->wait.what : (uint64_t)DT__BARRIER;
    if (said->groups > DT__SAID_GROUPS) other->last.groups = 0;
    if (said->waits_for < DT_ANY || said->waits_for >= world->comm->place.size)
        other->last.waits_for = DT_ANY;
    other->state.waiting = said->waiting;
    other->state.ended = said->waiting == DT__SAID_END;
    other->state.waits_for = other->last.waits_for;
    other->state.records = said->records;
    other->state.step = said->step;
    other->state.moves++;
    if (said->waiting != before) other->state.since = other->state.left = now;
}

/* How long a wait lasts before the others hear of it, and how soon of what changes meanwhile. */
#define DT__SAY_S 0.02

static int dt__idle_apart(dt_work *work, double since) {
    dt__world *world = work->comm->world;
    double now = world->host->now(world->host->user);
    if (!world->others || now - since < DT__SAY_S) return 0;
    uint32_t came = 0; /* what comes after this look may set the rank going */
    for (int rank = 0; world->control->came && rank < world->comm_size; rank++)
        came += world->control->came(world->control->user, rank);
    if (came != world->came) {
        world->came = came;
        return 0;
    }
    const dt__bulletin *own = &world->others[world->rank].last;
    int as_said =
        world->said && world->state->moves == world->said_moves && own->waits_for == world->awaited;
    if (!as_said && now - world->said_at > DT__SAY_S) dt__say_wait(world, work, 0);
    if (!as_said) return 0;
    int ended =
        world->awaited != DT_ANY && world->others[world->awaited].last.waiting == DT__SAID_END;
    if (ended && dt__behind(world, world->rank, world->awaited)) {
        dt__ended_without(dt__first_to_move(work), world->awaited);
        return 1;
    }
    if (!dt__circle(world) && !dt__all_quiet(world)) return 0;
    dt__deadlocked(world);
    return 1;
}

/* A long wait since `since`: the rank has looked at all that it has under way, after the sum of
   moves was `at`, and nothing could move. Shows that. 1: nothing ever will, and the context has
   failed. */
static int dt__idle(dt_work *work, uint64_t at, double since) {
    dt__world *world = work->comm->world;
    dt__rank_state *own = world->state;
    const dt__shared *shared = world->shared;
    int begins = own->waiting != work->number, awaited = dt__awaited(dt__first_to_move(work));
    if (begins || awaited != world->awaited) {
        const dt__rank_state *its = dt__seen_of(world, awaited).state;
        world->awaited = awaited;
        world->awaited_moves = its ? __atomic_load_n(&its->moves, __ATOMIC_SEQ_CST) : 0;
    }
    __atomic_store_n(&own->waits_for, awaited, __ATOMIC_RELAXED);
    __atomic_store_n(&own->since, (int64_t)(since * 1e6), __ATOMIC_RELAXED);
    __atomic_store_n(&own->waiting, work->number, __ATOMIC_SEQ_CST);
    if (world->ask && __atomic_load_n(world->ask, __ATOMIC_RELAXED)) dt__answer(world);
    /* without records moves do not count what is begun */
    if (DT__UNCHECKED || dt__link_busy(world, work)) return 0;
    if (!dt__all_in_sight(world)) return dt__idle_apart(work, since);
    __atomic_store_n(&own->idle_at, at, __ATOMIC_SEQ_CST);
    for (int seat = 0; seat < shared->ranks; seat++) {
        uint64_t its = __atomic_load_n(&shared->state[seat].idle_at, __ATOMIC_SEQ_CST);
        if (its != at && its != DT__FOR_EVER) return 0;
    }
    if (dt__moves_of_all(shared) != at || !dt__all_in_sight(world)) return 0;
    dt__deadlocked(world);
    return 1;
}

/* ---- the table ---- */

static dt__phrase dt__span_text(double seconds) {
    dt__phrase text;
    snprintf(text.s, sizeof text.s, "%.1f s", seconds);
    return text;
}

/* One line of it, without an end. */
static void dt__rank_line(
    const dt_io *io, double now, int rank, dt__seen seen, char *text, size_t bytes, size_t *at) {
    const dt__rank_state *state = seen.state;
    dt__op_record r;
    char process = 0;
    dt__append(text, bytes, at, "rank %d: ", rank);
    if (!state) {
        dt__append(text, bytes, at, "not known here");
        return;
    }
    dt__append(text, bytes, at,
        "process %d, step %lld: ", __atomic_load_n(&state->pid, __ATOMIC_RELAXED),
        (long long)__atomic_load_n(&state->step, __ATOMIC_RELAXED));
    if (__atomic_load_n(&state->ended, __ATOMIC_ACQUIRE)) {
        dt__append(text, bytes, at, "has ended");
    } else if (dt__waits(io, seen, &process, &r)) {
        int other = __atomic_load_n(&state->waits_for, __ATOMIC_RELAXED);
        double seconds = now - (double)__atomic_load_n(&state->since, __ATOMIC_RELAXED) / 1e6;
        dt__append(text, bytes, at, "for %s it waits in %s", dt__span_text(seconds).s,
            dt__record_text(&r).s);
        if (other != DT_ANY) dt__append(text, bytes, at, " for rank %d", other);
    } else {
        int64_t left = __atomic_load_n(&state->left, __ATOMIC_RELAXED);
        dt__append(text, bytes, at, "it %s", dt__process_word(process));
        if (left)
            dt__append(text, bytes, at, " since %s", dt__span_text(now - (double)left / 1e6).s);
        dt__append_last(seen, text, bytes, at);
    }
}

size_t dt_ranks_text(const dt_ctx *ctx, char *text, size_t bytes) {
    const dt__world *world = dt__world_of(ctx);
    size_t all = 0;
    for (int rank = 0; world && world->comm && rank < world->comm->place.size; rank++) {
        char line[512];
        size_t at = 0;
        dt__rank_line(dt_ctx_io(ctx), world->host->now(world->host->user), rank,
            dt__seen_of(world, rank), line, sizeof line - 1, &at);
        line[at++] = '\n';
        if (text && all < bytes) memcpy(text + all, line, at < bytes - all ? at : bytes - all);
        all += at;
    }
    if (text && bytes) text[all < bytes ? all : bytes - 1] = 0;
    return all;
}

size_t dt_records_text(const dt_ctx *ctx, int rank, char *text, size_t bytes) {
    const dt__world *world = dt__world_of(ctx);
    int known = world && world->comm && rank >= 0 && rank < world->comm->place.size;
    dt__seen seen = dt__seen_of(world, known ? rank : DT_ANY);
    int64_t last = seen.state ? __atomic_load_n(&seen.state->records, __ATOMIC_ACQUIRE) : 0;
    size_t all = 0;
    dt__op_record r;
    for (int64_t n = last; n > 0 && n > last - seen.ring.n; n--) {
        char line[320];
        if (!dt__record_get(seen.ring, (uint64_t)n, &r)) continue;
        size_t at =
            (size_t)snprintf(line, sizeof line, "%lld %s\n", (long long)n, dt__record_text(&r).s);
        if (text && all < bytes) memcpy(text + all, line, at < bytes - all ? at : bytes - all);
        all += at;
    }
    if (text && bytes) text[all < bytes ? all : bytes - 1] = 0;
    return all;
}

/* teller: the rank that logs it; -1: the supervisor. */
static void dt__rank_log(
    const dt_host *host, const dt_io *io, int teller, int rank, dt__seen seen) {
    char line[512] = "";
    size_t at = 0;
    dt__rank_line(io, host->now(host->user), rank, seen, line, sizeof line, &at);
    host->log(host->user, DT_LOG_NOTICE, teller, line);
}

/* Somebody has asked, and no supervisor answers. */
static void dt__answer(dt__world *world) {
    const dt_host *host = world->host;
    __atomic_store_n(world->ask, 0, __ATOMIC_RELAXED);
    for (int rank = 0; rank < world->comm->place.size; rank++)
        dt__rank_log(host, dt_ctx_io(world->ctx), world->rank, rank, dt__seen_of(world, rank));
}

// ==== 19. Planted faults ========================================================================

/* What goes wrong in a cluster, at a known operation. They are read when the run begins, so that a
   text that is wrong is refused by all ranks alike. */

static const char *const dt__fault_names[] = { "", "kill", "stop", "exit", "spin", "delay", "drop",
    "flip", "nan" };

/* A number of at most 15 digits, with a fraction if `real`; NULL: it is none. */
static const char *dt__fault_number(const char *at, int real, double *value) {
    double scale = 1;
    int digits = 0, point = 0;
    for (*value = 0; (*at >= '0' && *at <= '9' && digits < 15) || (real && *at == '.' && !point);
         at++) {
        if (*at == '.') {
            point = 1;
            continue;
        }
        *value = 10 * *value + (*at - '0');
        if (point) scale *= 10;
        digits++;
    }
    *value /= scale;
    return digits ? at : NULL;
}

/* One of a list. Where it ends; NULL: it is wrong there. */
static const char *dt__fault_read(const char *at, dt__fault *fault) {
    static const char *const keys[3] = { ":rank=", ":seq=", ":s=" };
    double values[3] = { -1, 0, 1 };
    size_t length = strcspn(at, ":,");
    memset(fault, 0, sizeof *fault);
    for (int kind = DT__KILL; kind <= DT__NAN; kind++) {
        if (strlen(dt__fault_names[kind]) == length &&
            strncmp(at, dt__fault_names[kind], length) == 0)
            fault->kind = (dt__fault_kind)kind;
    }
    if (!fault->kind) return NULL;
    for (at += length; *at == ':';) {
        int key = 0;
        while (key < 3 && strncmp(at, keys[key], strlen(keys[key])) != 0) key++;
        if (key == 3) return NULL;
        at = dt__fault_number(at + strlen(keys[key]), key == 2, &values[key]);
        if (!at) return NULL;
    }
    fault->rank = values[0] >= 0 && values[0] < DT__MAX_RANKS ? (int)values[0] : -1;
    fault->seq = (uint64_t)values[1];
    fault->s = values[2];
    return fault->rank >= 0 && fault->seq > 0 && (*at == 0 || *at == ',') ? at : NULL;
}

/* The faults of one rank, or with rank -1 whether the text is right for so many ranks (0: not
   known). Returns their number; -1: it is wrong. */
static int dt__faults_read(const char *text, int rank, int ranks, dt__fault *faults) {
    int n = 0;
    dt__fault fault;
    for (const char *at = text; at && *at; at += *at == ',') {
        at = dt__fault_read(at, &fault);
        if (!at || (*at == ',' && !at[1])) return -1;
        if (fault.rank == rank && n < DT__FAULTS) faults[n++] = fault;
        if (rank < 0 && fault.rank >= ranks && ranks > 0) return -1;
    }
    return n;
}

/* Away from operations: a process for ever, a thread until another has failed. */
static void dt__fault_away(const dt__world *world, int spin) {
    while (!world->thread || !dt__aborted(world->shared))
        if (!spin) world->host->sleep(world->host->user, DT__NAP_MAX);
}

static void dt__fault_do(dt_work *work, const dt__fault *fault) {
    dt__world *world = work->comm->world;
    int lost = fault->kind == DT__KILL || fault->kind == DT__EXIT;
    /* a context keeps quiet about lost peers, and here nobody else tells */
    if (lost && world->thread) {
        dt_fail(
            world->ctx, DT_ERR_PEER, "is lost: a planted fault, %s", dt__fault_names[fault->kind]);
        world->host->log(world->host->user, DT_LOG_ERROR, world->rank, dt_error_text(world->ctx));
    } else if (fault->kind == DT__KILL)
        raise(SIGKILL);
    else if (fault->kind == DT__EXIT)
        _exit(7);
    else if (fault->kind == DT__STOP && !world->thread)
        raise(SIGSTOP);
    else if (fault->kind == DT__STOP || fault->kind == DT__SPIN)
        dt__fault_away(world, fault->kind == DT__SPIN);
    else if (fault->kind == DT__DELAY)
        world->host->sleep(world->host->user, fault->s);
    else
        work->fault = fault->kind;
    if (work->fault == DT__DROP) work->over = 1;
}

/* An operation is about to begin. */
static void dt__fault_before(dt_work *work) {
    dt__world *world = work->comm->world;
    for (int i = 0; i < world->planted; i++) {
        dt__fault fault = world->faults[i];
        if (fault.seq != (uint64_t)world->state->records + 1 || work->fault == DT__DROP) continue;
        world->faults[i].seq = 0;
        dt__fault_do(work, &fault);
    }
}

/* It went well: what was received is spoilt, in the middle. All bits set are a NaN in every type of
   floats. */
static void dt__fault_after(dt_work *work) {
    const dt__call *call = &work->call;
    size_t size = dt_dtype_size(call->dtype);
    char *middle = (char *)call->recv + call->count / 2 * size, element[8];
    int receives = call->op == DT__RECV || (call->op != DT__SEND && dt__receives(work->comm, call));
    if (work->fault == DT__DROP || !receives || call->count == 0) return;
    dt__comm_move(work->comm, call, element, middle, size);
    dt__comm_sync(work->comm->world);
    if (work->fault == DT__FLIP)
        element[0] = (char)(element[0] ^ 1);
    else
        memset(element, 0xff, sizeof element);
    dt__comm_move(work->comm, call, middle, element, size);
    dt__comm_sync(work->comm->world);
}

// ==== 20. Scalars and agreement: code ===========================================================

/* The collectives of before on host memory: the device's table is not asked, nothing is counted. */

dt_status(dt_sum_doubles)(dt_comm *comm, double *values, size_t n) {
    dt__call call = dt__call_make(DT__SUM_DOUBLES, values, values, n, DT_F64);
    call.host = 1;
    return dt__do(comm, call);
}

double(dt_mean)(dt_comm *comm, double mine) {
    if ((dt_sum_doubles)(comm, &mine, 1) != DT_OK) return (double)__builtin_nan("");
    return mine / dt_comm_size(comm);
}

/* Gathers two words of each rank into comm->words. Of what several gathers are made of, all are
   called there. */
static dt_status dt__gather_words(dt_comm *comm, dt__op_code op, const int32_t mine[2]) {
    dt__call call = dt__call_make(op, mine, comm->words, 2, DT_I32);
    const char *file = comm->world->file;
    call.host = 1;
    dt_status status = dt__do(comm, call);
    comm->world->file = file;
    return status;
}

dt_status(dt_agree)(dt_comm *comm, dt_status mine) {
    int32_t words[2] = { (int32_t)mine, 0 };
    if (!comm) return mine;
    dt_status status = dt__gather_words(comm, DT__AGREE, words);
    for (int rank = 0; rank < comm->place.size && !status; rank++)
        status = (dt_status)comm->words[2 * rank];
    return status;
}

/* A straggler: so many times the median's own work, and so much more, in so many of 8 steps; named
   so often. */
#define DT__STRAGGLER 1.5
#define DT__STRAGGLER_S 1e-3
enum { DT__STRAGGLER_STEPS = 5, DT__STRAGGLER_PAUSE = 10 };

/* A rank's own work in this step is the time since the last one without its waits. Only rank 0
   speaks of stragglers, and only after several slow steps: one may have a reason. */
static double dt__own_seconds(const dt_comm *comm, int rank) {
    double own;
    memcpy(&own, comm->words + 2 * rank, sizeof own);
    return own;
}

static void dt__find_straggler(dt__world *world, const dt_comm *comm) {
    int slowest = 0, n = comm->place.size;
    double most = 0, median = 0;
    for (int rank = 0; rank < n; rank++) { /* the middle one, the lower of two */
        double own = dt__own_seconds(comm, rank);
        int below = 0, equal = 0;
        for (int other = 0; other < n; other++) {
            below += dt__own_seconds(comm, other) < own;
            equal += dt__own_seconds(comm, other) == own;
        }
        if (below <= (n - 1) / 2 && below + equal > (n - 1) / 2) median = own;
        if (own > most) slowest = rank;
        if (own > most) most = own;
    }
    int slow = n > 1 && most > DT__STRAGGLER * median + DT__STRAGGLER_S;
    if (slow && slowest != world->slow_rank && __builtin_popcount(world->slow_steps) < 2)
        world->slow_steps = 0;
    if (slow && world->slow_steps == 0) world->slow_rank = slowest;
    world->slow_steps = (world->slow_steps << 1 | (slow && slowest == world->slow_rank)) & 0xff;
    if (world->named_ago > 0) world->named_ago--;
    if (!(world->slow_steps & 1) || world->named_ago > 0) return;
    if (__builtin_popcount(world->slow_steps) < DT__STRAGGLER_STEPS) return;
    world->named_ago = DT__STRAGGLER_PAUSE;
    dt_log(world->ctx, DT_LOG_NOTICE,
        "rank %d is a straggler: its own work took %.1f ms in this step, the "
        "median %.1f ms",
        slowest, most * 1e3, median * 1e3);
}

/* What the ranks of each group have called by now. All go through their groups in the order of
   their channels, which is the same for all. */
static dt_status dt__compare_groups(dt__world *world) {
    for (uint32_t channel = 0; channel < world->channels; channel++) {
        dt_comm *comm = world->comms;
        while (comm && comm->group->channel != channel) comm = comm->next;
        if (!comm || comm->ops->collective || comm->place.size == 1) continue;
        int32_t words[2] = { (int32_t)comm->messages, (int32_t)(comm->chain >> 32) };
        if (dt__gather_words(comm, DT__STEP, words) != DT_OK) break;
        for (int rank = 1; rank < comm->place.size; rank++) {
            if (memcmp(comm->words + 2 * rank, comm->words, sizeof words) == 0) continue;
            return dt__comm_fail(world, DT_ERR_COMM,
                "at the end of step %lld rank %d has called %d collectives on %s, "
                "and rank %d %d%s",
                (long long)world->state->step + 1, comm->group->ranks[rank],
                (int)comm->words[2 * rank], comm->group->name, comm->group->ranks[0],
                (int)comm->words[0], comm->words[2 * rank] == comm->words[0] ? " others" : "");
        }
    }
    return dt_error(world->ctx);
}

dt_status(dt_comm_step)(dt_comm *world_comm) {
    if (!world_comm) return DT_OK;
    dt__world *world = world_comm->world;
    dt_comm *comm = world->comm;
    double now = world->host->now(world->host->user),
           own = now - world->stepped - (world->seconds - world->step_wait);
    int32_t words[2];
    if (world->stepped == 0 || own < 0) own = 0;
    memcpy(words, &own, sizeof words);
    if (dt__gather_words(comm, DT__STEP, words) != DT_OK) return dt_error(world->ctx);
    if (world->stepped > 0 && comm->place.rank == 0) dt__find_straggler(world, comm);
    if (world->transport.send && dt__compare_groups(world) != DT_OK) return dt_error(world->ctx);
    __atomic_store_n(&world->state->step, world->state->step + 1, __ATOMIC_RELAXED);
    world->stepped = world->host->now(world->host->user);
    world->step_wait = world->seconds;
    return dt_error(world->ctx);
}

// ==== 21. Groups: code ==========================================================================

/*     6 ranks, color = rank / 3, key = -rank        "a" and "b" are two groups, each with a rank 0,
                                                     1, 2
       rank    0 1 2 3 4 5
       color   0 0 0 1 1 1
       group   a a a b b b
       becomes 2 1 0 2 1 0

   All ranks gather (color, key), so each can count who comes before it. In shared memory the first
   of each new group makes it in the range, and a second gather tells the others where; over a
   transport each lists it for itself, and the first makes what is shared if all are on its node.
   Cost: two gathers of 8 bytes a rank. */

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

void dt_comm_set_algorithm(dt_comm *comm, dt_algorithm algorithm) {
    if (comm && algorithm >= DT_ALGORITHM_AUTO && algorithm < DT_ALGORITHMS)
        comm->algorithm = algorithm;
}

size_t dt_comm_bytes(const dt_ctx *ctx, dt_axis axis) {
    const dt__world *world = dt__world_of(ctx);
    return world && axis >= DT_AXIS_NONE && axis < DT_AXES ? world->bytes[1 + (int)axis] : 0;
}

dt_traffic dt_comm_traffic(const dt_ctx *ctx) {
    const dt__world *world = dt__world_of(ctx);
    dt_traffic none = { 0, 0 };
    return world ? world->traffic : none;
}

double dt_comm_seconds(const dt_ctx *ctx) {
    const dt__world *world = dt__world_of(ctx);
    return world ? world->seconds : 0;
}

/* A group over a transport: each rank's own list. */
static size_t dt__listed_bytes(int size) { return sizeof(dt__group) + (size_t)size * sizeof(int); }

/* Has a group rails? How many of its ranks each machine has, if those of one follow each other,
   there are as many on each, and several; else 0. */
static int dt__rails(const dt__world *world, const dt__group *group) {
    int k = 0, n = group->size;
    if (!world->node) return 0;
    const int *homes = world->node->homes;
    while (k < n && homes[group->ranks[k]] == homes[group->ranks[0]]) k++;
    if (k < 2 || k == n || n % k) return 0;
    for (int rank = 0; rank < n; rank++)
        if (homes[group->ranks[rank]] != homes[group->ranks[rank / k * k]]) return 0;
    return k;
}

/* This rank's end of a group, which goes if that fails; NULL with the context failed. */
static dt_comm *dt__comm_make(
    dt__world *world, const dt__comm_ops *ops, dt__group *group, int rank) {
    size_t size = (size_t)group->size;
    size_t bytes = sizeof(dt_comm) + size * (2 * sizeof(void *) + 2 * sizeof(int32_t));
    dt_comm *comm = (dt_comm *)dt_alloc(world->ctx, DT_MEM_HOST, bytes, "dt_comm");
    if (!comm && world->transport.send)
        dt_free(world->ctx, DT_MEM_HOST, group, dt__listed_bytes(group->size));
    if (!comm) return NULL;
    memset(comm, 0, bytes);
    comm->place.rank = rank;
    comm->place.size = group->size;
    comm->world = world;
    comm->ops = ops;
    comm->group = group;
    comm->rails = dt__rails(world, group);
    comm->axis = DT_AXIS_NONE;
    comm->bytes = bytes;
    comm->in = (const void **)(void *)(comm + 1);
    comm->out = (void **)(void *)(comm->in + size);
    comm->words = (int32_t *)(void *)(comm->out + size);
    comm->next = world->comms;
    world->comms = comm;
    return comm;
}

static dt__group *dt__group_list(dt__world *world, int size, const char *name) {
    dt__group *group =
        (dt__group *)dt_alloc(world->ctx, DT_MEM_HOST, dt__listed_bytes(size), "dt_comm");
    if (!group) return NULL;
    memset(group, 0, sizeof *group);
    group->size = size;
    group->ranks = (int *)(void *)(group + 1);
    dt__group_name(group, name);
    return group;
}

static void dt__comms_free(dt__world *world) {
    while (world->comms) {
        dt_comm *comm = world->comms;
        world->comms = comm->next;
        if (comm->ops->close) comm->ops->close(comm);
        if (world->transport.send)
            dt_free(world->ctx, DT_MEM_HOST, comm->group, dt__listed_bytes(comm->group->size));
        dt_free(world->ctx, DT_MEM_COMM, comm->staging, 2 * DT_WINDOW_BYTES);
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

/* A new group of that color with its members listed. NULL when the room is used up, or the
   memory. */
static dt__group *dt__split_make(const dt_comm *comm, int color, const char *name) {
    dt__world *world = comm->world;
    int size = 0;
    for (int rank = 0; rank < comm->place.size; rank++) size += comm->words[2 * rank] == color;
    dt__group *group = world->transport.send ? dt__group_list(world, size, name)
                                             : dt__group_make(world->shared, size, name);
    for (int rank = 0; group && rank < comm->place.size; rank++) {
        if (comm->words[2 * rank] == color)
            group->ranks[dt__split_place(comm, rank)] = comm->group->ranks[rank];
    }
    return group;
}

/* Where a group is in the room, in lines, and back. */
static int32_t dt__room_line(const dt__shared *shared, const dt__group *group) {
    return (int32_t)((size_t)((const char *)group - shared->room) / DT__LINE);
}

static dt__group *dt__room_group(const dt__shared *shared, int32_t line) {
    return (dt__group *)(void *)(shared->room + (size_t)line * DT__LINE);
}

/* Do all ranks of a listed group share this rank's range? */
static int dt__on_node(const dt__world *world, const dt__group *group) {
    for (int rank = 0; rank < group->size; rank++)
        if (!world->node || dt__seat_of(world, group->ranks[rank]) < 0) return 0;
    return 1;
}

/* A listed group gets what its ranks share. */
static void dt__group_share(dt__group *group, const dt__group *shared) {
    group->members = shared->members;
    group->posts = shared->posts;
    group->post_bytes = shared->post_bytes;
}

/* Over a transport. A channel is free if it is above all that any of the ranks has used, which the
   second gather tells. It also tells where the first of a group on one node has made what is
   shared; if there is no room, messages do. */
static dt_comm *dt__split_listed(dt_comm *comm, int color, const char *name, int first) {
    dt__world *world = comm->world;
    int place = dt__split_place(comm, comm->place.rank);
    dt__group *group = color >= 0 ? dt__split_make(comm, color, name) : NULL;
    const dt__comm_ops *ops = world->comm->ops->split ? world->comm->ops : &dt__transport_ops;
    dt_comm *made = group ? dt__comm_make(world, ops, group, place) : NULL;
    int32_t words[2] = { (int32_t)world->channels, -1 };
    uint32_t channel = 0;
    if (made && place == 0 && dt__on_node(world, group)) {
        const dt__group *shared = dt__group_make(world->shared, group->size, name);
        if (shared) words[1] = dt__room_line(world->shared, shared);
    }
    if (dt__gather_words(comm, DT__SPLIT, words) != DT_OK) return NULL;
    for (int rank = 0; rank < comm->place.size; rank++)
        channel =
            (uint32_t)comm->words[2 * rank] > channel ? (uint32_t)comm->words[2 * rank] : channel;
    world->channels = channel + 1;
    if (made) group->channel = channel;
    if (ops->split) ops->split(comm, made, color);
    if (!made || dt_error(world->ctx)) return NULL;
    if (comm->words[2 * first + 1] < 0) return made;
    dt__group_share(group, dt__room_group(world->shared, comm->words[2 * first + 1]));
    made->ops = &dt__node_ops;
    return made;
}

dt_comm *(dt_comm_split)(dt_comm *comm, int color, int key, const char *name) {
    int32_t words[2] = { color < 0 ? -1 : color, key };
    if (!comm || dt__gather_words(comm, DT__SPLIT, words) != DT_OK) return NULL;
    if (!name) name = "group";
    dt__shared *shared = comm->world->shared;
    int place = dt__split_place(comm, comm->place.rank), first = comm->place.rank;
    for (int rank = 0; rank < comm->place.size; rank++) {
        if (comm->words[2 * rank] == words[0] && dt__split_place(comm, rank) == 0) first = rank;
    }
    if (comm->world->transport.send) return dt__split_listed(comm, color, name, first);
    /* where in the room the group is, in lines; -1: no room; else 0 */
    words[0] = words[1] = 0;
    if (color >= 0 && place == 0) {
        dt__group *group = dt__split_make(comm, color, name);
        words[0] = group ? dt__room_line(shared, group) : -1;
    }
    if (dt__gather_words(comm, DT__SPLIT, words) != DT_OK) return NULL;
    for (int rank = 0; rank < comm->place.size; rank++) {
        if (comm->words[2 * rank] >= 0) continue;
        dt__comm_fail(comm->world, DT_ERR_MEM,
            "dt_comm_split(%s) on %s: a run has room for %d splits of its world", name,
            comm->group->name, (int)DT_MAX_SPLITS);
        return NULL;
    }
    if (color < 0) return NULL;
    return dt__comm_make(
        comm->world, comm->ops, dt__room_group(shared, comm->words[2 * first]), place);
}

// ==== 22. Memory that forked ranks share ========================================================

/* Each forked rank has a heap in the range: what it allocates of the classes that are communicated
   lies there, where the others reach it. Blocks are taken first fit from a list of free ones in the
   order of their addresses, which lie in the blocks themselves; neighbours are joined, and what is
   free goes back to the system page by page. */

typedef struct dt__gap { /* a free block, at its beginning */
    size_t bytes;
    struct dt__gap *next;
} dt__gap;

/* one rank's; its host table is the caller's with alloc and free in the heap */
typedef struct dt__heap {
    dt_host host;
    const dt_host *base;
    char *start;
    size_t bytes, top; /* above top nothing was ever used, or is again */
    dt__gap *gaps;
} dt__heap;

static int dt__in_heap(dt_mem mem) {
    return mem == DT_MEM_PARAMS || mem == DT_MEM_GRADS || mem == DT_MEM_ACTS || mem == DT_MEM_COMM;
}

static void *dt__heap_take(dt__heap *heap, size_t bytes) {
    for (dt__gap **at = &heap->gaps; *at; at = &(*at)->next) {
        dt__gap *gap = *at;
        if (gap->bytes < bytes) continue;
        if (gap->bytes > bytes) {
            dt__gap *rest = (dt__gap *)(void *)((char *)gap + bytes);
            rest->bytes = gap->bytes - bytes;
            rest->next = gap->next;
            *at = rest;
        } else {
            *at = gap->next;
        }
        return gap;
    }
    if (bytes > heap->bytes - heap->top) return NULL;
    heap->top += bytes;
    return heap->start + heap->top - bytes;
}

/* Joins a gap with the one behind it, if they touch. */
static void dt__heap_join(dt__gap *gap) {
    if (!gap->next || (char *)gap + gap->bytes != (char *)gap->next) return;
    gap->bytes += gap->next->bytes;
    gap->next = gap->next->next;
}

static void dt__heap_give(dt__heap *heap, void *p, size_t bytes) {
    const size_t page = 65536;
    dt__gap **at = &heap->gaps, **before = NULL, *gap = (dt__gap *)p;
    uintptr_t from = ((uintptr_t)p + sizeof(dt__gap) + page - 1) / page * page,
              to = ((uintptr_t)p + bytes) / page * page;
    for (; *at && (char *)*at < (char *)p; at = &(*at)->next) before = at;
    gap->bytes = bytes;
    gap->next = *at;
    *at = gap;
    if (to > from && heap->base->discard)
        heap->base->discard(heap->base->user, (void *)from, to - from);
    dt__heap_join(gap);
    if (before) dt__heap_join(*before);
    if (before && (char *)*before + (*before)->bytes > (char *)p) at = before;
    gap = *at;
    if ((char *)gap + gap->bytes == heap->start + heap->top) {
        heap->top -= gap->bytes;
        *at = NULL;
    }
}

static void *dt__heap_alloc(void *user, size_t bytes, dt_mem mem) {
    dt__heap *heap = (dt__heap *)user;
    if (!dt__in_heap(mem)) return heap->base->alloc(heap->base->user, bytes, mem);
    return bytes > heap->bytes ? NULL : dt__heap_take(heap, dt__line_up(bytes));
}

static void dt__heap_free(void *user, void *p, size_t bytes, dt_mem mem) {
    dt__heap *heap = (dt__heap *)user;
    if (!dt__in_heap(mem))
        heap->base->free(heap->base->user, p, bytes, mem);
    else if (p)
        dt__heap_give(heap, p, dt__line_up(bytes));
}

static double dt__heap_now(void *user) {
    const dt_host *base = ((dt__heap *)user)->base;
    return base->now(base->user);
}

static void dt__heap_sleep(void *user, double seconds) {
    const dt_host *base = ((dt__heap *)user)->base;
    base->sleep(base->user, seconds);
}

static void dt__heap_log(void *user, int level, int rank, const char *text) {
    const dt_host *base = ((dt__heap *)user)->base;
    base->log(base->user, level, rank, text);
}

/* At the beginning of the rank's part of the range. */
static const dt_host *dt__heap_make(dt__shared *shared, const dt_host *base, int rank) {
    dt__heap *heap = (dt__heap *)(void *)(shared->heaps + (size_t)rank * shared->heap_bytes);
    memset(heap, 0, sizeof *heap);
    heap->base = base;
    heap->start = (char *)heap + dt__line_up(sizeof *heap);
    heap->bytes = shared->heap_bytes - dt__line_up(sizeof *heap);
    heap->host.user = heap;
    heap->host.alloc = dt__heap_alloc;
    heap->host.free = dt__heap_free;
    heap->host.now = dt__heap_now;
    heap->host.sleep = dt__heap_sleep;
    heap->host.log = dt__heap_log;
    return &heap->host;
}

// ==== 23. Who this process is ===================================================================

/* Launchers tell each process who it is in variables of its environment. What differs between them
   is a row of this table; all else is one function for all. NULL: the launcher has no such
   variable. */

static const char *dt__launch_env(const char *name) { return getenv(name); }

typedef struct dt__launcher {
    const char *by;
    const char *needs; /* the row counts only where this is set */
    const char *rank, *size, *or_size;
    int lone_size; /* the size may be set where the rank is not */
    const char *local_rank, *local_size;
    /* or the ranks of each machine, "2(x3),1", and this one's place in that list */
    const char *counts, *node;
    /* where rank 0 is; the launcher's own process listens at the port where ... */
    const char *host, *port;
    const char *taken;            /* ... this is "True", so that dt takes another one */
    const char *hosts, *or_hosts; /* or a list of machines, the first of which has rank 0 */
    const char *job, *part;       /* names of the job: two on one machine need two ports */
} dt__launcher;

static const dt__launcher dt__launchers[] = { { "DT", NULL, "DT_RANK", "DT_WORLD_SIZE", NULL, 0,
                                                  "DT_LOCAL_RANK", "DT_LOCAL_SIZE", NULL, NULL,
                                                  NULL, NULL, NULL, NULL, NULL, NULL, NULL },
    { "torchrun", NULL, "RANK", "WORLD_SIZE", NULL, 0, "LOCAL_RANK", "LOCAL_WORLD_SIZE", NULL, NULL,
        "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", NULL, NULL, NULL, NULL },
    { "Open MPI", NULL, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", NULL, 0,
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", NULL, NULL, NULL, NULL, NULL,
        NULL, NULL, "PMIX_NAMESPACE", NULL },
    { "PMI", NULL, "PMI_RANK", "PMI_SIZE", NULL, 0, "MPI_LOCALRANKID", "MPI_LOCALNRANKS", NULL,
        NULL, NULL, NULL, NULL, NULL, NULL, "PMI_JOBID", NULL },
    { "SLURM", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", 1,
        "SLURM_LOCALID", NULL, "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", NULL, NULL, NULL,
        "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID" },
    /* PMIx gives no size: only refused */
    { "PMIx", NULL, "PMIX_RANK", "PMI_SIZE", NULL, 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
        NULL, NULL, NULL, NULL } };

enum {
    DT__LAUNCHERS = (int)(sizeof dt__launchers / sizeof dt__launchers[0]),
    DT__LAUNCH_PORT = 29500,  /* dt_run's own */
    DT__LAUNCH_PORTS = 20000, /* of jobs: 10000 from here */
    /* those from here on systems give to whoever asks for any: the next may be taken */
    DT__LAUNCH_GIVEN = 32768
};

/* A value, cut short for a message. */
typedef struct dt__launch_word {
    char s[40];
} dt__launch_word;

static dt__launch_word dt__launch_show(const char *value) {
    dt__launch_word shown;
    int length = snprintf(shown.s, sizeof shown.s, "%s", value);
    if (length >= (int)sizeof shown.s) memcpy(shown.s + sizeof shown.s - 4, "...", 3);
    return shown;
}

static dt_status dt__launch_refuse(
    dt_launch *out, const char *name, const char *value, const char *why) {
    snprintf(out->text, sizeof out->text, "%s=%s: %s", name, dt__launch_show(value).s, why);
    return DT_ERR_ARG;
}

/* Digits from `at`, at most 9 of them, as a number; -1: there are none, or more. *end: behind
   them. */
static int dt__launch_digits(const char *at, const char **end) {
    int value = 0, digits = 0;
    for (; *at >= '0' && *at <= '9'; at++, digits++)
        if (digits < 9) value = 10 * value + (*at - '0');
    *end = at;
    return digits > 0 && digits < 10 ? value : -1;
}

/* The number in a variable, where there is one: *number stays what it is where there is none. */
static dt_status dt__launch_number(
    dt_launch *out, const char *name, int least, int most, int *number) {
    const char *value = name ? dt__launch_env(name) : NULL, *end;
    char why[64];
    if (!value) return DT_OK;
    int got = dt__launch_digits(value, &end);
    snprintf(why, sizeof why, "not a whole number from %d to %d", least, most);
    if (got < least || got > most || *end) return dt__launch_refuse(out, name, value, why);
    *number = got;
    return DT_OK;
}

/* "2(x3),1": ranks of machine `node`, from 0. 0: the list is shorter, or is none. */
static int dt__launch_count(const char *list, int node) {
    for (;;) {
        int count = dt__launch_digits(list, &list), times = 1;
        if (count > 0 && list[0] == '(' && list[1] == 'x') {
            times = dt__launch_digits(list + 2, &list);
            if (*list++ != ')') return 0;
        }
        if (count <= 0 || times <= 0) return 0;
        if (node < times) return count;
        node -= times;
        if (*list++ != ',') return 0;
    }
}

static int dt__launch_host_letter(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           (c && strchr(".-_", c));
}

/* The first machine of a list as SLURM writes them, "rack[1-2,7]n[03-12],login": "rack1n03". 0: it
   is no list. */
static int dt__launch_first_host(const char *list, char *host, size_t room) {
    size_t used = 0, inside;
    for (; *list && *list != ','; list++) {
        if (*list == '[') {
            inside = strspn(++list, "0123456789");
            if (inside == 0 || used + inside >= room) return 0;
            memcpy(host + used, list, inside);
            used += inside;
            list += strspn(list, "0123456789,-");
            if (*list != ']') return 0;
        } else {
            if (!dt__launch_host_letter(*list) || used + 1 >= room) return 0;
            host[used++] = *list;
        }
    }
    host[used] = 0;
    return used > 0;
}

/* A port that is the same for all ranks of the job, and likely another for another job. */
static int dt__launch_port(const dt__launcher *row) {
    const char *names[2] = { dt__launch_env(row->job),
        row->part ? dt__launch_env(row->part) : NULL };
    uint32_t hash = 0;
    for (int i = 0; i < 2; i++)
        for (const char *c = names[i] ? names[i] : ""; *c; c++)
            hash = hash * 31 + (unsigned char)*c;
    return DT__LAUNCH_PORTS + (int)(hash % 10000);
}

/* One word that may be a name or an address; which it is, whoever connects there finds out. */
static dt_status dt__launch_place(dt_launch *out, const char *name, const char *host, int port) {
    size_t length = strlen(host), room = sizeof out->rendezvous - sizeof ":65535";
    for (size_t i = 0; i < length; i++)
        if (!dt__launch_host_letter(host[i])) length = 0;
    if (length == 0 || length > room)
        return dt__launch_refuse(out, name, host, "not the name or IPv4 address of a machine");
    snprintf(out->rendezvous, sizeof out->rendezvous, "%s:%d", host, port);
    return DT_OK;
}

/* Where rank 0 is, by what the n launchers say that tell of the same start. On one machine the
   loopback will do; on several somebody must say it, or there is no rendezvous. */
static dt_status dt__launch_meet(dt_launch *out, const dt__launcher *const *same, int n) {
    const char *list = NULL, *list_name = NULL, *host, *port_text, *taken;
    char first[64];
    int port = 0;
    for (int i = 0; i < n; i++) {
        host = same[i]->host ? dt__launch_env(same[i]->host) : NULL;
        port_text = same[i]->port ? dt__launch_env(same[i]->port) : NULL;
        taken = same[i]->taken ? dt__launch_env(same[i]->taken) : NULL;
        if (!list && (list_name = same[i]->hosts) != NULL) list = dt__launch_env(list_name);
        if (!list && (list_name = same[i]->or_hosts) != NULL) list = dt__launch_env(list_name);
        if (!port && same[i]->job && dt__launch_env(same[i]->job)) port = dt__launch_port(same[i]);
        if (!host && !port_text) continue;
        port = DT__LAUNCH_PORT;
        if (dt__launch_number(out, same[i]->port, 1, 65535, &port) != DT_OK) return DT_ERR_ARG;
        if (taken && strcmp(taken, "True") == 0)
            port = port < DT__LAUNCH_GIVEN - 1 ? port + 1 : DT__LAUNCH_PORTS + port % 10000;
        return dt__launch_place(out, same[i]->host, host ? host : "127.0.0.1", port);
    }
    if (!port) port = DT__LAUNCH_PORT;
    if (out->local_size == out->size || (out->local_size == 0 && !list))
        return dt__launch_place(out, "", "127.0.0.1", port);
    if (!list) return DT_OK;
    if (!dt__launch_first_host(list, first, sizeof first))
        return dt__launch_refuse(out, list_name, list, "not a list of machines");
    return dt__launch_place(out, list_name, first, port);
}

/* What one launcher says; size 0: nothing. */
static dt_status dt__launch_read(const dt__launcher *row, dt_launch *out) {
    const int most = DT__MAX_RANKS;
    const char *size = row->or_size && !dt__launch_env(row->size) ? row->or_size : row->size;
    const char *rank = dt__launch_env(row->rank),
               *counts = row->counts ? dt__launch_env(row->counts) : NULL;
    int node = -1;
    memset(out, 0, sizeof *out);
    out->local_rank = -1;
    if (row->needs && !dt__launch_env(row->needs)) return DT_OK;
    if (!rank && (row->lone_size || !dt__launch_env(size))) return DT_OK;
    if (!rank || !dt__launch_env(size)) {
        snprintf(out->text, sizeof out->text, "%s=%s is set, but %s is not",
            rank ? row->rank : size, dt__launch_show(rank ? rank : dt__launch_env(size)).s,
            rank ? size : row->rank);
        return DT_ERR_ARG;
    }
    if (dt__launch_number(out, size, 1, most, &out->size) != DT_OK ||
        dt__launch_number(out, row->rank, 0, out->size - 1, &out->rank) != DT_OK ||
        dt__launch_number(out, row->local_size, 1, out->size, &out->local_size) != DT_OK ||
        dt__launch_number(out, row->node, 0, most - 1, &node) != DT_OK)
        return DT_ERR_ARG;
    if (counts && node >= 0) {
        out->local_size = dt__launch_count(counts, node);
        if (out->local_size < 1 || out->local_size > out->size)
            return dt__launch_refuse(out, row->counts, counts, "not the ranks of each machine");
    }
    if (dt__launch_number(out, row->local_rank, 0,
            (out->local_size ? out->local_size : out->size) - 1, &out->local_rank) != DT_OK)
        return DT_ERR_ARG;
    snprintf(out->by, sizeof out->by, "%s", row->by);
    snprintf(out->text, sizeof out->text, "%s, %s", row->rank, size);
    return DT_OK;
}

/* DT_RENDEZVOUS goes before what any launcher says: "HOST" or "HOST:PORT". */
static dt_status dt__launch_override(dt_launch *out) {
    const char *value = dt__launch_env("DT_RENDEZVOUS"), *colon = value ? strchr(value, ':') : NULL,
               *end = NULL;
    char host[64];
    int port = DT__LAUNCH_PORT;
    if (!value) return DT_OK;
    size_t length = colon ? (size_t)(colon - value) : strlen(value);
    if (colon) port = dt__launch_digits(colon + 1, &end);
    if (length >= sizeof host || port < 1 || port > 65535 || (end && *end))
        return dt__launch_refuse(out, "DT_RENDEZVOUS", value, "not HOST:PORT, as 10.0.0.1:29500");
    memcpy(host, value, length);
    host[length] = 0;
    return dt__launch_place(out, "DT_RENDEZVOUS", host, port);
}

/* One line about it all. names: of the variables; others: who else has set some. */
static void dt__launch_say(dt_launch *out, const char *names, const char *others) {
    char local[48] = "";
    if (out->local_rank >= 0 && out->local_size)
        snprintf(local, sizeof local, " (local %d of %d)", out->local_rank, out->local_size);
    else if (out->local_rank >= 0)
        snprintf(local, sizeof local, " (local %d)", out->local_rank);
    snprintf(out->text, sizeof out->text, "rank %d of %d%s by %s: %s; %s%s%s%s", out->rank,
        out->size, local, out->by, names,
        out->rendezvous[0] ? "rendezvous " : "no rendezvous, as DT_RENDEZVOUS is not set",
        out->rendezvous, others[0] ? "; also set, and not heeded: " : "", others);
}

/* No launcher at all. A batch script has some of SLURM's variables, but is no rank. */
static dt_status dt__launch_alone(dt_launch *out) {
    int batch = dt__launch_env("SLURM_PROCID") && !dt__launch_env("SLURM_STEP_ID");
    out->size = 1;
    snprintf(out->text, sizeof out->text, "not distributed: %s: one process",
        batch ? "a batch script of SLURM, where srun starts ranks"
              : "no launcher's variables are set");
    return dt__launch_override(out);
}

/* The first launcher of the table that says something; then what it leaves open from those that say
   the same rank. */
static dt_status dt__launch_look(dt_launch *out) {
    const dt__launcher *same[DT__LAUNCHERS];
    dt_launch found;
    char names[80] = "", others[48] = "";
    int n = 0;
    for (int i = 0; i < DT__LAUNCHERS; i++) {
        dt_status status = dt__launch_read(&dt__launchers[i], n ? &found : out);
        if (status != DT_OK && n == 0) return status;
        if (status != DT_OK || (n ? &found : out)->size == 0) continue;
        if (n == 0) {
            memcpy(names, out->text, sizeof names - 1);
        } else if (found.rank != out->rank || found.size != out->size) {
            size_t used = strlen(others);
            snprintf(others + used, sizeof others - used, "%s%s", used ? ", " : "", found.by);
            continue;
        } else {
            if (out->local_size == 0) out->local_size = found.local_size;
            if (out->local_rank < 0) out->local_rank = found.local_rank;
        }
        same[n++] = &dt__launchers[i];
    }
    if (n == 0) return dt__launch_alone(out);
    if (dt__launch_meet(out, same, n) != DT_OK || dt__launch_override(out) != DT_OK)
        return DT_ERR_ARG;
    dt__launch_say(out, names, others);
    return DT_OK;
}

DT_API dt_status dt_launch_find(dt_launch *out) {
    if (!out) return DT_ERR_ARG;
    dt_status status = dt__launch_look(out);
    dt__escape(out->text, sizeof out->text);
    if (status == DT_OK) return DT_OK;
    out->rank = 0; /* nothing is known: one process */
    out->size = 1;
    out->local_rank = -1;
    out->local_size = 0;
    out->rendezvous[0] = out->by[0] = 0;
    return status;
}

// ==== 24. TCP ===================================================================================

/* The five functions of a transport, over sockets. One connection for each two ranks; everything
   moves inside test(), nothing waits but the rendezvous and the end, and those not longer than
   timeout_s.

       rank 0                           rank i                                  rank j < i
       listens at the rendezvous        connects to it, again and again
                                        listens at a port that is free
                                     <- hello: who, where, a random number
       hello, a random number        ->
                                     <- proof
       a seat, and its own proof     ->
       when all are there: the table -> connects to each j, the same four    -> ...

   A proof is the HMAC-SHA256 of both hellos under the job's token, and of the side that speaks: who
   does not know the token can make none, and one that was overheard fits no other conversation, nor
   the other side of this one. (NIST, FIPS 180-4, 2015; H. Krawczyk et al., RFC 2104, 1997; the
   scheme is ISO/IEC 9798-4's for both sides.) Without a token, which only the loopback allows, the
   key is empty and all else the same. What follows the proofs is neither encrypted nor signed: who
   can change packets on their way is not kept out.

   Before its proof nobody is believed anything, and nothing but these frames of one size is read.
   Whoever connects is a guest: one that says something else, or nothing, or hangs up, is counted
   and keeps nobody from coming. If the chairs do not suffice, the guest that has said nothing for
   the longest time gives way. A rank that was sent away so comes again.

   Then frames follow, each a header and its bytes:

       data    for a receive that waits they go straight into its buffer; else they are kept until
               one comes
       abort   the sender has failed: the text is what each rank's test() answers from there on
       bye     the sender has ended well: from it nothing more will come, and that is no failure
       said    a bulletin of section 8

   Numbers travel in the machine's own byte order; a rank of another order is refused by its
   version. A connection without traffic is probed, so that a cut cable is noticed within about
   timeout_s. */

enum {
    DT__TCP_PORT = 29500,
    DT__TCP_VERSION = 2,
    DT__TCP_FRAME = 0x64744631, /* begins each frame */
    DT__TCP_INPUT = 65536,      /* what short frames are read into */
    DT__TCP_TURNS = 16,         /* reads of one peer before it is the next one's turn */
    DT__TCP_GUESTS = 256,       /* at a time, and 4 for each rank; but not more than */
    DT__TCP_MOST_GUESTS = 1024,
    DT__TCP_BACKLOG = 4096, /* who knocks faster than that comes again a second later */
    DT__TCP_SECRET = 16,    /* bytes of a token, at least */
    DT__TCP_NAME = 64,
    DT__TCP_TEXT = 512
};
#define DT__TCP_MOST ((uint64_t)1 << 40) /* bytes of one message: more is no message */
/* a guest that has not proved who it is by then must go */
#define DT__TCP_GUEST_S 2.0
#define DT__TCP_LATE_S 0.5      /* another rank's timeout may begin that much later */
#define DT__TCP_PATIENCE_S 0.03 /* a guest who spoke that recently does not give way */
/* how long a failure is pushed towards peers whose sockets are full */
#define DT__TCP_FLUSH_S 0.25
/* how long a rank that failed waits for the others to have read it */
#define DT__TCP_GRACE_S 0.75

static const char dt__tcp_magic[8] = { 'd', 't', ' ', 't', 'c', 'p', '\r', '\n' };

/* address in network order */
typedef struct dt__tcp_place {
    uint32_t address, port;
} dt__tcp_place;

enum { DT__TCP_HELLO = 1, DT__TCP_PROOF, DT__TCP_WELCOME, DT__TCP_REFUSED };
/* Why a rank is refused: after its proof, but for the first two. */
enum {
    DT__TCP_NO_VERSION = 1,
    DT__TCP_NO_TOKEN,
    DT__TCP_NO_JOB,
    DT__TCP_NO_SIZE,
    DT__TCP_NO_RANK,
    DT__TCP_NO_SEAT
};

/* All that is said before the proofs hold. */
typedef struct dt__tcp_card {
    char magic[8];
    uint32_t version, kind;
    int32_t rank, size; /* of its sender and its job */
    int32_t pid, reason;
    dt__tcp_place place; /* where it listens */
    uint64_t job;        /* 0: not known yet, to a rank that comes to the rendezvous */
    uint8_t nonce[32], proof[32];
    char host[DT__TCP_NAME];
} dt__tcp_card;

/* When all have come, or not: then the places of all follow. */
typedef struct dt__tcp_table {
    uint32_t magic, given_up;
    int32_t check, spare;    /* rank 0's dt_run_desc.check counts */
    char text[DT__TCP_TEXT]; /* why */
} dt__tcp_table;

typedef char dt__bulletin_fits[sizeof(dt__bulletin) <= DT__TCP_TEXT ? 1 : -1];

enum { DT__TCP_DATA = 1, DT__TCP_ABORT, DT__TCP_BYE, DT__TCP_SAID };
typedef struct dt__tcp_frame {
    /* of an abort the channel is the rank that failed, the tag its status */
    uint32_t magic, kind, channel;
    int32_t tag;
    uint64_t bytes, word;
} dt__tcp_frame;

typedef struct dt__tcp_request {
    int receives, over;
    int peer; /* of a receive DT_ANY until it is known */
    /* a send that was cancelled half-way: data is a copy of the transport's own */
    int orphan;
    dt__tcp_frame frame; /* of a send; of a receive its channel, its tag and what came */
    const char *data;
    char *into;
    size_t room;                  /* of into */
    size_t at;                    /* of a send: how much of frame and data has gone */
    struct dt__tcp_request *next; /* sends of a peer; receives nothing has come for; idle ones */
} dt__tcp_request;

typedef struct dt__tcp_message { /* came before its receive; its bytes follow it */
    int from, whole;
    dt__tcp_frame frame;
    dt__tcp_request *request; /* has asked for it meanwhile */
    struct dt__tcp_message *next;
} dt__tcp_message;

/* OPEN; ENDED: it said so; LOST: it did not; BROKEN: it sent what is no frame. */
typedef enum dt__tcp_state {
    DT__TCP_OPEN = 0,
    DT__TCP_ENDED,
    DT__TCP_LOST,
    DT__TCP_BROKEN
} dt__tcp_state;

typedef struct dt__tcp_peer {
    int fd;         /* -1: none */
    int rank, deaf; /* deaf: nothing can be written to it */
    int pid, error; /* error: of the system, with which it was lost */
    uint32_t came;  /* whole messages */
    char host[DT__TCP_NAME];
    dt__tcp_state state;
    dt__tcp_place place;
    /* what comes in now: its header, of which head bytes are here */
    dt__tcp_frame frame;
    size_t head, left;     /* and how many of its bytes are still to come */
    dt__tcp_request *into; /* where they go; both NULL: nowhere */
    dt__tcp_message *message;
    char text[DT__TCP_TEXT];       /* of an abort */
    dt__tcp_request *first, *last; /* sends, the oldest first */
    /* goes after them: an abort or a bye */
    char control[sizeof(dt__tcp_frame) + DT__TCP_TEXT];
    size_t control_at, control_bytes;
} dt__tcp_peer;

typedef struct dt__tcp_guest {
    int fd;              /* -1: a free chair */
    int proves;          /* both hellos have been said */
    size_t at;           /* bytes of its next card that are here */
    double since, until; /* it came, or said hello; it must have a seat */
    dt__tcp_place from;
    dt__tcp_card card, theirs, ours; /* what comes in; the hellos */
} dt__tcp_guest;

typedef struct dt__tcp_door { /* where ranks `first` and above come in */
    int fd, first, room;
    long turned_away;
    dt__phrase last;       /* why the last of them was */
    dt__tcp_guest *guests; /* (room) */
} dt__tcp_door;

typedef struct dt__tcp {
    /* hears: whose world learns what others wait for; NULL: nobody */
    dt_ctx *ctx, *hears;
    const dt_host *host;
    int rank, size, check;
    double timeout_s;
    dt__stopwatch watch; /* since dt__tcp_make; all deadlines are on this clock */
    dt__tcp_place rendezvous;
    uint64_t job;              /* 0: not known yet */
    uint8_t key[32], seed[32]; /* of the proofs; of the random numbers */
    uint64_t nonces;
    dt__tcp_door *door;             /* until all are connected */
    dt__tcp_peer *peers;            /* (size) */
    struct pollfd *polls;           /* (size) */
    char *input;                    /* (DT__TCP_INPUT) */
    dt__tcp_request *posted, *idle; /* receives nothing has come for, the oldest first */
    dt__tcp_request **posted_end;   /* the end of `posted`, unless that is empty */
    dt__tcp_message *kept;          /* unasked for, the oldest first */
    dt__tcp_message **kept_end;     /* the end of `kept`, unless that is empty */
    int busy, closing;
    /* requests under way; tests since the sockets were last looked at */
    int live, skipped;
    dt__tcp_request *probe; /* whose test looked, and found nothing */
    int failed;             /* this rank, or another: */
    /* ... then with its rank and text; of this rank's own failure only the text */
    dt_report first;
    char unread[160]; /* a message that came and that nobody received */
} dt__tcp;

/* ---- proofs: SHA-256 and HMAC ---- */

/* Zeroes a secret that is no longer needed: the token, its key, or data that reveal them. Volatile,
   because a compiler drops a memset of memory that nothing reads again. */
static void dt__wipe(void *secret, size_t bytes) {
    volatile uint8_t *at = (volatile uint8_t *)secret;
    for (size_t i = 0; i < bytes; i++) at[i] = 0;
}

typedef struct dt__sha256 {
    uint32_t h[8];
    uint64_t bytes;
    uint8_t block[64];
} dt__sha256;

static uint32_t dt__turn_right(uint32_t x, int bits) { return x >> bits | x << (32 - bits); }

static void dt__sha256_block(uint32_t h[8], const uint8_t block[64]) {
    /* of the cube roots of the first 64 primes, 32 bits behind the point */
    static const uint32_t k[64] = { 0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b,
        0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3,
        0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6,
        0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d,
        0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
        0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585,
        0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
        0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa,
        0xa4506ceb, 0xbef9a3f7, 0xc67178f2 };
    uint32_t w[64], v[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 |
               (uint32_t)block[4 * i + 2] << 8 | (uint32_t)block[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + (dt__turn_right(a, 7) ^ dt__turn_right(a, 18) ^ a >> 3) + w[i - 7] +
               (dt__turn_right(b, 17) ^ dt__turn_right(b, 19) ^ b >> 10);
    }
    memcpy(v, h, sizeof v);
    for (int i = 0; i < 64; i++) { /* v: the standard's a to h */
        uint32_t e = v[4], a = v[0];
        uint32_t one = v[7] +
                       (dt__turn_right(e, 6) ^ dt__turn_right(e, 11) ^ dt__turn_right(e, 25)) +
                       ((e & v[5]) ^ (~e & v[6])) + k[i] + w[i];
        uint32_t two = (dt__turn_right(a, 2) ^ dt__turn_right(a, 13) ^ dt__turn_right(a, 22)) +
                       ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += one;
        v[0] = one + two;
    }
    for (int i = 0; i < 8; i++) h[i] += v[i];
    dt__wipe(w, sizeof w);
    dt__wipe(v, sizeof v);
}

static void dt__sha256_begin(dt__sha256 *s) {
    static const uint32_t start[8] = { /* likewise of the square roots of the first 8 */
        0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab,
        0x5be0cd19
    };
    memset(s, 0, sizeof *s);
    memcpy(s->h, start, sizeof start);
}

static void dt__sha256_add(dt__sha256 *s, const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        s->block[s->bytes++ % 64] = ((const uint8_t *)data)[i];
        if (s->bytes % 64 == 0) dt__sha256_block(s->h, s->block);
    }
}

static void dt__sha256_end(dt__sha256 *s, uint8_t digest[32]) {
    static const uint8_t padding[64] = { 0x80 }, nothing[64] = { 0 };
    uint8_t length[8];
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)(s->bytes * 8 >> (56 - 8 * i));
    dt__sha256_add(s, padding, 1 + (119 - (size_t)(s->bytes % 64)) % 64);
    dt__sha256_add(s, length, sizeof length);
    for (int i = 0; i < 32; i++) digest[i] = (uint8_t)(s->h[i / 4] >> (24 - 8 * (i % 4)));
    dt__wipe(s, sizeof *s);
    dt__sha256_add(s, nothing, sizeof nothing); /* overwrites registers that held the secret */
}

static void dt__sha256_of(const void *data, size_t bytes, uint8_t digest[32]) {
    dt__sha256 s;
    dt__sha256_begin(&s);
    dt__sha256_add(&s, data, bytes);
    dt__sha256_end(&s, digest);
}

static void dt__hmac_begin(dt__sha256 *s, const uint8_t *key, size_t bytes, int pad) {
    dt__sha256_begin(s);
    for (size_t i = 0; i < 64; i++) {
        uint8_t byte = (uint8_t)((i < bytes ? key[i] : 0) ^ pad);
        dt__sha256_add(s, &byte, 1);
    }
}

static void dt__hmac(
    const void *key, size_t key_bytes, const void *data, size_t bytes, uint8_t digest[32]) {
    uint8_t short_key[32], inner[32]; /* apart from digest, which may be the key */
    dt__sha256 s;
    if (key_bytes > 64) {
        dt__sha256_of(key, key_bytes, short_key);
        key = short_key;
        key_bytes = sizeof short_key;
    }
    dt__hmac_begin(&s, (const uint8_t *)key, key_bytes, 0x36);
    dt__sha256_add(&s, data, bytes);
    dt__sha256_end(&s, inner);
    dt__hmac_begin(&s, (const uint8_t *)key, key_bytes, 0x5c);
    dt__sha256_add(&s, inner, 32);
    dt__sha256_end(&s, digest);
    dt__wipe(short_key, sizeof short_key);
    dt__wipe(inner, sizeof inner);
}

/* In a time that does not tell where they differ. */
static int dt__same_secret(const uint8_t *a, const uint8_t *b, size_t bytes) {
    volatile uint8_t differ = 0;
    for (size_t i = 0; i < bytes; i++) differ = (uint8_t)(differ | (a[i] ^ b[i]));
    return differ == 0;
}

/* ---- frames that come in ---- */

/* The first failure of another rank. */
static void dt__tcp_poison(dt__tcp *t, const dt__tcp_peer *peer) {
    if (t->failed) return;
    t->failed = 1;
    t->first.status = peer->frame.tag > 0 ? (dt_status)peer->frame.tag : DT_ERR_PEER;
    t->first.rank = (int)peer->frame.channel;
    memcpy(t->first.text, peer->text, sizeof t->first.text - 1);
    t->first.text[sizeof t->first.text - 1] = 0;
    dt__escape(t->first.text, sizeof t->first.text);
}

static void dt__tcp_hang_up(dt__tcp_peer *peer, dt__tcp_state state) {
    if (peer->fd >= 0) close(peer->fd);
    peer->fd = -1;
    peer->deaf = 1;
    if (peer->state == DT__TCP_OPEN) peer->state = state;
}

static int dt__tcp_matches(const dt__tcp_request *r, int from, const dt__tcp_frame *frame) {
    return (r->peer == DT_ANY || r->peer == from) && r->frame.channel == frame->channel &&
           r->frame.tag == frame->tag;
}

/* The oldest receive that waits for it, which no longer waits; NULL: none. */
static dt__tcp_request *dt__tcp_claim(dt__tcp *t, int from, const dt__tcp_frame *frame) {
    for (dt__tcp_request **at = &t->posted; *at; at = &(*at)->next) {
        dt__tcp_request *r = *at;
        if (!dt__tcp_matches(r, from, frame)) continue;
        *at = r->next;
        if (!*at) t->posted_end = at;
        r->peer = from;
        r->frame.word = frame->word;
        r->frame.bytes = frame->bytes;
        return r;
    }
    return NULL;
}

static size_t dt__tcp_message_bytes(uint64_t bytes) {
    return sizeof(dt__tcp_message) + (size_t)bytes;
}

/* A place to keep it in, the last of the list. NULL: the memory was refused, and the context has
   failed. */
static dt__tcp_message *dt__tcp_keep(dt__tcp *t, int from, const dt__tcp_frame *frame) {
    size_t bytes = dt__tcp_message_bytes(frame->bytes);
    t->busy++; /* a refusal calls dt__tcp_fail */
    dt__tcp_message *m =
        (dt__tcp_message *)dt_alloc(t->ctx, DT_MEM_HOST, bytes, "a message that came early");
    t->busy--;
    if (!m) return NULL;
    memset(m, 0, sizeof *m);
    m->from = from;
    m->frame = *frame;
    if (!t->kept) t->kept_end = &t->kept;
    *t->kept_end = m;
    t->kept_end = &m->next;
    return m;
}

static void dt__tcp_forget(dt__tcp *t, dt__tcp_message *m) {
    dt__tcp_message **at = &t->kept;
    while (*at && *at != m) at = &(*at)->next;
    if (*at) *at = m->next;
    if (!*at) t->kept_end = at;
    dt_free(t->ctx, DT_MEM_HOST, m, dt__tcp_message_bytes(m->frame.bytes));
}

/* A whole message and the receive that asked for it. */
static void dt__tcp_deliver(dt__tcp *t, dt__tcp_message *m, dt__tcp_request *r) {
    size_t bytes = (size_t)m->frame.bytes < r->room ? (size_t)m->frame.bytes : r->room;
    if (bytes) memcpy(r->into, m + 1, bytes);
    r->over = 1;
    dt__tcp_forget(t, m);
}

/* A header is complete. 0: it is none. */
static int dt__tcp_begin(dt__tcp *t, dt__tcp_peer *peer) {
    const dt__tcp_frame *f = &peer->frame;
    uint64_t most = f->kind == DT__TCP_DATA    ? DT__TCP_MOST
                    : f->kind == DT__TCP_ABORT ? DT__TCP_TEXT - 1
                                               : 0;
    int known = f->kind >= DT__TCP_DATA && f->kind <= DT__TCP_SAID;
    if (f->kind == DT__TCP_SAID && f->bytes == sizeof(dt__bulletin)) most = f->bytes;
    if (f->magic != DT__TCP_FRAME || !known || f->bytes > most || f->bytes > (size_t)-1 / 2)
        return 0;
    if (f->kind == DT__TCP_DATA && f->tag < 0) return 0;
    if (f->kind == DT__TCP_ABORT && f->channel >= (uint32_t)t->size) return 0;
    peer->left = (size_t)f->bytes;
    peer->into = NULL;
    peer->message = NULL;
    memset(peer->text, 0, sizeof peer->text);
    if (f->kind != DT__TCP_DATA) return 1;
    peer->into = dt__tcp_claim(t, peer->rank, f);
    if (peer->into || t->failed) return 1;
    if (t->closing)
        snprintf(t->unread, sizeof t->unread, "%zu bytes with tag %d from rank %d", peer->left,
            f->tag, peer->rank);
    else
        peer->message = dt__tcp_keep(t, peer->rank, f);
    return 1;
}

/* A frame is complete. */
static void dt__tcp_finish(dt__tcp *t, dt__tcp_peer *peer) {
    dt__tcp_message *m = peer->message;
    if (peer->into) peer->into->over = 1;
    if (m) m->whole = 1;
    if (m && m->request) dt__tcp_deliver(t, m, m->request);
    if (peer->frame.kind == DT__TCP_ABORT) dt__tcp_poison(t, peer);
    if (peer->frame.kind == DT__TCP_DATA) peer->came++;
    if (peer->frame.kind == DT__TCP_SAID)
        dt__heard(dt__world_of(t->hears), peer->rank, peer->text);
    else if (peer->frame.kind != DT__TCP_DATA)
        peer->state = DT__TCP_ENDED;
    peer->into = NULL;
    peer->message = NULL;
    peer->head = 0;
}

/* Where the next bytes of the frame go, and how many; NULL: nowhere. */
static char *dt__tcp_spot(dt__tcp_peer *peer, size_t *room) {
    size_t done = (size_t)peer->frame.bytes - peer->left;
    *room = peer->left;
    if (peer->frame.kind == DT__TCP_ABORT || peer->frame.kind == DT__TCP_SAID)
        return peer->text + done;
    if (peer->message) return (char *)(peer->message + 1) + done;
    if (!peer->into || done >= peer->into->room) return NULL;
    if (*room > peer->into->room - done) *room = peer->into->room - done;
    return peer->into->into + done;
}

/* n bytes that were read go where they belong. 0: they are no frames. */
static int dt__tcp_parse(dt__tcp *t, dt__tcp_peer *peer, const char *bytes, size_t n) {
    while (n > 0) {
        size_t room = sizeof peer->frame - peer->head, some;
        char *spot = (char *)&peer->frame + peer->head;
        int in_head = room > 0;
        if (!in_head) spot = dt__tcp_spot(peer, &room);
        some = n < room ? n : room;
        if (spot) memcpy(spot, bytes, some);
        bytes += some;
        n -= some;
        if (in_head)
            peer->head += some;
        else
            peer->left -= some;
        if (in_head && peer->head < sizeof peer->frame) return 1;
        if (in_head && !dt__tcp_begin(t, peer)) return 0;
        if (peer->left == 0) dt__tcp_finish(t, peer);
    }
    return 1;
}

/* Reads what is there. */
static void dt__tcp_read(dt__tcp *t, dt__tcp_peer *peer) {
    for (int turn = 0; turn < DT__TCP_TURNS && peer->fd >= 0; turn++) {
        size_t room = 0;
        char *spot = peer->head == sizeof peer->frame ? dt__tcp_spot(peer, &room) : NULL;
        int direct = spot && room >= DT__TCP_INPUT; /* no copy on the way */
        if (!direct) room = DT__TCP_INPUT;
        ssize_t n = recv(peer->fd, direct ? spot : t->input, room, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (n <= 0) {
            if (n < 0 && !peer->error) peer->error = errno;
            dt__tcp_hang_up(peer, DT__TCP_LOST);
        } else if (direct) {
            peer->left -= (size_t)n;
            if (peer->left == 0) dt__tcp_finish(t, peer);
        } else if (!dt__tcp_parse(t, peer, t->input, (size_t)n)) {
            dt__tcp_hang_up(peer, DT__TCP_BROKEN);
        }
    }
}

/* ---- frames that go out ---- */

static void dt__tcp_release(dt__tcp *t, dt__tcp_request *r) {
    if (t->probe == r) t->probe = NULL;
    if (!r->orphan) t->live--;
    if (r->orphan)
        t->host->free(t->host->user, (void *)r->data, (size_t)r->frame.bytes + 1, DT_MEM_HOST);
    r->next = t->idle;
    t->idle = r;
}

static void dt__tcp_unqueue(dt__tcp_peer *peer, const dt__tcp_request *r) {
    dt__tcp_request *before = NULL, *at = peer->first;
    for (; at && at != r; at = at->next) before = at;
    if (!at) return;
    if (before)
        before->next = r->next;
    else
        peer->first = r->next;
    if (peer->last == r) peer->last = before;
}

/* What the socket takes of one piece of head and one of body. Below 0: nothing now, or never (then
   the peer is deaf: what it sent may still be read). */
static ssize_t dt__tcp_push(
    dt__tcp_peer *peer, const void *head, size_t head_bytes, const void *body, size_t bytes) {
    struct iovec pieces[2];
    struct msghdr message;
    ssize_t n;
    memset(&message, 0, sizeof message);
    pieces[0].iov_base = (void *)head;
    pieces[0].iov_len = head_bytes;
    pieces[1].iov_base = (void *)body;
    pieces[1].iov_len = bytes;
    message.msg_iov = head_bytes ? pieces : pieces + 1;
    message.msg_iovlen = (head_bytes > 0) + (bytes > 0);
    do n = sendmsg(peer->fd, &message, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
        peer->deaf = 1;
        peer->error = errno;
    }
    return n;
}

/* Writes what the socket takes: sends in their order, then the last word. */
static void dt__tcp_write(dt__tcp *t, dt__tcp_peer *peer) {
    const size_t head = sizeof(dt__tcp_frame);
    while (!peer->deaf && peer->first) {
        dt__tcp_request *r = peer->first;
        size_t in_head = r->at < head ? r->at : head, in_data = r->at - in_head;
        ssize_t n = dt__tcp_push(peer, (char *)&r->frame + in_head, head - in_head,
            r->data + in_data, (size_t)r->frame.bytes - in_data);
        if (n < 0) return;
        r->at += (size_t)n;
        if (r->at < head + (size_t)r->frame.bytes) continue;
        r->over = 1;
        dt__tcp_unqueue(peer, r);
        if (r->orphan) dt__tcp_release(t, r);
    }
    while (!peer->deaf && peer->control_at < peer->control_bytes) {
        ssize_t n = dt__tcp_push(peer, peer->control + peer->control_at,
            peer->control_bytes - peer->control_at, NULL, 0);
        if (n < 0) return;
        peer->control_at += (size_t)n;
    }
}

static int dt__tcp_has_output(const dt__tcp_peer *peer) {
    return !peer->deaf && (peer->first || peer->control_at < peer->control_bytes);
}

/* Looks at all sockets once and moves what moves. Returns whether anything did. */
static int dt__tcp_progress(dt__tcp *t) {
    if (t->busy) return 0;
    for (int rank = 0; rank < t->size; rank++) {
        dt__tcp_peer *peer = &t->peers[rank];
        t->polls[rank].fd = peer->fd; /* below 0: poll passes over it */
        t->polls[rank].events = (short)(POLLIN | (dt__tcp_has_output(peer) ? POLLOUT : 0));
        t->polls[rank].revents = 0;
    }
    if (poll(t->polls, (nfds_t)t->size, 0) <= 0) return 0;
    for (int rank = 0; rank < t->size; rank++) {
        if (t->polls[rank].revents & (POLLIN | POLLHUP | POLLERR)) dt__tcp_read(t, &t->peers[rank]);
        if (t->polls[rank].revents & POLLOUT) dt__tcp_write(t, &t->peers[rank]);
    }
    return 1;
}

/* The last word to a peer. What has not begun to go to it never will. */
static void dt__tcp_say(
    dt__tcp *t, dt__tcp_peer *peer, uint32_t kind, dt_status status, const char *text) {
    dt__tcp_frame frame;
    size_t bytes = strlen(text);
    memset(&frame, 0, sizeof frame);
    if (bytes > DT__TCP_TEXT - 1) bytes = DT__TCP_TEXT - 1;
    frame.magic = DT__TCP_FRAME;
    frame.kind = kind;
    frame.channel = (uint32_t)t->rank;
    frame.tag = (int32_t)status;
    frame.bytes = bytes;
    memcpy(peer->control, &frame, sizeof frame);
    memcpy(peer->control + sizeof frame, text, bytes);
    peer->control_at = 0;
    peer->control_bytes = sizeof frame + bytes;
    dt__tcp_request **rest = peer->first && peer->first->at > 0 ? &peer->first->next : &peer->first;
    for (dt__tcp_request *r = *rest, *next; r; r = next) {
        next = r->next;
        if (r->orphan) dt__tcp_release(t, r); /* nobody else knows it */
    }
    *rest = NULL;
    peer->last = peer->first;
    dt__tcp_write(t, peer);
}

/* ---- the five functions ---- */

static dt__tcp_request *dt__tcp_request_make(
    dt__tcp *t, int peer, uint32_t channel, int tag, size_t bytes) {
    dt__tcp_request *r = t->idle;
    if (r)
        t->idle = r->next;
    else
        r = (dt__tcp_request *)dt_alloc(t->ctx, DT_MEM_HOST, sizeof *r, "a request");
    if (!r) return NULL;
    memset(r, 0, sizeof *r);
    r->peer = peer;
    r->frame.magic = DT__TCP_FRAME;
    r->frame.kind = DT__TCP_DATA;
    r->frame.channel = channel;
    r->frame.tag = (int32_t)tag;
    r->frame.bytes = bytes;
    t->live++;
    return r;
}

/* To itself: a copy, at once. */
static void dt__tcp_send_self(dt__tcp *t, dt__tcp_request *r) {
    dt__tcp_request *taker = dt__tcp_claim(t, t->rank, &r->frame);
    dt__tcp_message *m = taker ? NULL : dt__tcp_keep(t, t->rank, &r->frame);
    char *to = taker ? taker->into : (char *)(m + 1);
    size_t bytes = (size_t)r->frame.bytes;
    if (!taker && !m) return;
    t->peers[t->rank].came++;
    if (taker && bytes > taker->room) bytes = taker->room;
    if (bytes) memcpy(to, r->data, bytes);
    if (taker)
        taker->over = 1;
    else
        m->whole = 1;
    r->over = 1;
}

static void *dt__tcp_send(
    void *user, int to, uint32_t channel, int tag, uint64_t word, const void *buf, size_t bytes) {
    dt__tcp *t = (dt__tcp *)user;
    dt__tcp_request *r = to < 0 || to >= t->size || tag < 0 || bytes > DT__TCP_MOST
                             ? NULL
                             : dt__tcp_request_make(t, to, channel, tag, bytes);
    if (!r) return NULL;
    r->data = (const char *)buf;
    r->frame.word = word;
    dt__tcp_peer *peer = &t->peers[to];
    if (t->failed || peer->state != DT__TCP_OPEN) return r; /* test tells */
    if (to == t->rank) {
        dt__tcp_send_self(t, r);
        return r;
    }
    if (peer->first)
        peer->last->next = r;
    else
        peer->first = r;
    peer->last = r;
    dt__tcp_write(t, peer);
    return r;
}

static void *dt__tcp_recv(
    void *user, int from, uint32_t channel, int tag, void *buf, size_t bytes) {
    dt__tcp *t = (dt__tcp *)user;
    dt__tcp_request *r =
        from < DT_ANY || from >= t->size ? NULL : dt__tcp_request_make(t, from, channel, tag, 0);
    if (!r) return NULL;
    r->receives = 1;
    r->into = (char *)buf;
    r->room = bytes;
    for (dt__tcp_message *m = t->kept; m; m = m->next) {
        if (m->request || !dt__tcp_matches(r, m->from, &m->frame)) continue;
        r->peer = m->from;
        r->frame.word = m->frame.word;
        r->frame.bytes = m->frame.bytes;
        m->request = r;
        if (m->whole) dt__tcp_deliver(t, m, r);
        return r;
    }
    if (!t->posted) t->posted_end = &t->posted;
    *t->posted_end = r;
    t->posted_end = &r->next;
    return r;
}

/* A bulletin to all: each has a copy that goes when it can, and in place of an older one that has
   not begun to. */
static void dt__tcp_bulletin(void *user, const void *bulletin, size_t bytes) {
    dt__tcp *t = (dt__tcp *)user;
    for (int rank = 0; rank < t->size && !t->failed; rank++) {
        dt__tcp_peer *peer = &t->peers[rank];
        if (peer->fd < 0 || peer->deaf || peer->state != DT__TCP_OPEN || peer->control_bytes)
            continue;
        if (peer->first && peer->last->frame.kind == DT__TCP_SAID && peer->last->at == 0) {
            memcpy((char *)peer->last->data, bulletin, bytes);
            continue;
        }
        char *copy = (char *)t->host->alloc(t->host->user, bytes + 1, DT_MEM_HOST);
        dt__tcp_request *r = copy ? dt__tcp_request_make(t, rank, 0, 0, bytes) : NULL;
        if (!r) {
            if (copy) t->host->free(t->host->user, copy, bytes + 1, DT_MEM_HOST);
            return;
        }
        memcpy(copy, bulletin, bytes);
        r->frame.kind = DT__TCP_SAID;
        r->data = copy;
        r->orphan = 1;
        t->live--;
        if (peer->first)
            peer->last->next = r;
        else
            peer->first = r;
        peer->last = r;
        dt__tcp_write(t, peer);
    }
}

static uint32_t dt__tcp_came(void *user, int rank) {
    return ((const dt__tcp *)user)->peers[rank].came;
}

static int dt__tcp_pid(void *user, int rank) {
    const dt__tcp *t = (const dt__tcp *)user;
    char name[DT__TCP_NAME] = "";
    if (gethostname(name, sizeof name - 1) != 0) return 0;
    return strncmp(name, t->peers[rank].host, sizeof name - 1) == 0 ? t->peers[rank].pid : 0;
}

/* Half of it has gone: the rest must follow, or what comes after it cannot be read. The buffer is
   the caller's again, so the rest is copied. */
static void dt__tcp_orphan(dt__tcp *t, dt__tcp_peer *peer, dt__tcp_request *r) {
    size_t bytes = (size_t)r->frame.bytes, head = sizeof r->frame,
           gone = r->at > head ? r->at - head : 0;
    char *copy = (char *)t->host->alloc(t->host->user, bytes + 1, DT_MEM_HOST);
    if (!copy) {
        dt__tcp_unqueue(peer, r);
        dt__tcp_hang_up(peer, DT__TCP_LOST);
        dt__tcp_release(t, r);
        return;
    }
    if (bytes > gone) memcpy(copy + gone, r->data + gone, bytes - gone);
    r->data = copy;
    r->orphan = 1;
    t->live--;
    if (t->probe == r) t->probe = NULL;
}

static void dt__tcp_cancel(void *user, void *request) {
    dt__tcp *t = (dt__tcp *)user;
    dt__tcp_request *r = (dt__tcp_request *)request;
    dt__tcp_peer *peer = r->peer == DT_ANY ? NULL : &t->peers[r->peer];
    if (!r->receives && peer->first == r && r->at > 0 && !peer->deaf) {
        dt__tcp_orphan(t, peer, r);
        return;
    }
    if (!r->receives) dt__tcp_unqueue(peer, r);
    for (dt__tcp_request **at = &t->posted; *at; at = &(*at)->next) {
        if (*at != r) continue;
        *at = r->next;
        if (!*at) t->posted_end = at;
        break;
    }
    if (peer && peer->into == r) peer->into = NULL; /* the rest of it goes nowhere */
    for (dt__tcp_message *m = t->kept; m; m = m->next) {
        if (m->request != r) continue;
        if (peer && peer->message == m) peer->message = NULL;
        dt__tcp_forget(t, m);
        break;
    }
    dt__tcp_release(t, r);
}

/* "rank 3 (process 4711 on node7)" */
static dt__phrase dt__tcp_who(const dt__tcp *t, int rank) {
    dt__phrase text;
    const dt__tcp_peer *peer = &t->peers[rank];
    if (peer->pid > 0)
        snprintf(text.s, sizeof text.s, "rank %d (process %d on %s)", rank, peer->pid, peer->host);
    else
        snprintf(text.s, sizeof text.s, "rank %d", rank);
    return text;
}

/* "connection to rank 3 (process 4711 on node7) was lost: it has not answered for 5.0 s" */
static dt__phrase dt__tcp_loss(const dt__tcp *t, int rank) {
    dt__phrase text;
    size_t at = 0;
    const dt__tcp_peer *peer = &t->peers[rank];
    dt__append(text.s, sizeof text.s, &at, "connection to %s was lost", dt__tcp_who(t, rank).s);
    if (peer->state == DT__TCP_BROKEN)
        dt__append(text.s, sizeof text.s, &at, ": it sent what is no message");
    if (peer->error == ETIMEDOUT || peer->error == EHOSTUNREACH || peer->error == ENETUNREACH)
        dt__append(text.s, sizeof text.s, &at, ": its machine does not answer");
    return text;
}

/* Why nothing more will come of it; 0: it may. A rank that is gone without a goodbye is missed by
   somebody, on whom others wait: so it ends the waits of all, as a process that dies does with
   forks. */
static int dt__tcp_hopeless(const dt__tcp *t, const dt__tcp_request *r, char *why) {
    int ended = 0, any = r->receives && r->peer == DT_ANY;
    if (t->failed) return snprintf(why, DT__TCP_TEXT, "%s", t->first.text), -3;
    for (int rank = 0; rank < t->size; rank++) {
        if (t->peers[rank].state > DT__TCP_ENDED)
            return snprintf(why, DT__TCP_TEXT, "%s", dt__tcp_loss(t, rank).s), -1;
        ended += t->peers[rank].state == DT__TCP_ENDED;
    }
    return (!any && t->peers[r->peer].state == DT__TCP_ENDED) ||
                   (any && t->size > 1 && ended == t->size - 1)
               ? -4
               : 0;
}

static int dt__tcp_test(
    void *user, void *request, int *from, uint64_t *word, size_t *bytes, char *why) {
    dt__tcp *t = (dt__tcp *)user;
    dt__tcp_request *r = (dt__tcp_request *)request;
    /* One look at the sockets is enough for all requests that are tested in turn. */
    if (!r->over && (!t->probe || t->probe == r || t->skipped++ >= t->live)) {
        t->skipped = 0;
        t->probe = dt__tcp_progress(t) ? NULL : r;
    }
    if (r->over) {
        *from = r->peer;
        *word = r->frame.word;
        *bytes = (size_t)r->frame.bytes;
        dt__tcp_release(t, r);
        return 1;
    }
    int hopeless = dt__tcp_hopeless(t, r, why);
    if (hopeless) dt__tcp_cancel(t, r);
    return hopeless;
}

static int dt__tcp_look(void *user, char *why) {
    dt__tcp *t = (dt__tcp *)user;
    dt__tcp_progress(t);
    if (t->failed) return snprintf(why, DT__TCP_TEXT, "%s", t->first.text), -3;
    for (int rank = 0; rank < t->size; rank++)
        if (t->peers[rank].state > DT__TCP_ENDED)
            return snprintf(why, DT__TCP_TEXT, "%s", dt__tcp_loss(t, rank).s), -1;
    return 0;
}

static double dt__tcp_now(dt__tcp *t) { return dt__waited(&t->watch); }
static void dt__tcp_nap(const dt__tcp *t, double seconds) {
    t->host->sleep(t->host->user, seconds);
}

/* This rank has failed: tells all others, once. */
static void dt__tcp_tell(dt__tcp *t, dt_status status, const char *text) {
    int left = 1;
    if (t->failed) return; /* they know already */
    t->failed = 1;
    t->first.rank = t->rank;
    snprintf(t->first.text, sizeof t->first.text, "%s", text);
    for (int rank = 0; rank < t->size; rank++) {
        if (t->peers[rank].fd >= 0) dt__tcp_say(t, &t->peers[rank], DT__TCP_ABORT, status, text);
    }
    for (double until = dt__tcp_now(t) + DT__TCP_FLUSH_S;
         left && !t->busy && dt__tcp_now(t) < until;) {
        left = 0;
        for (int rank = 0; rank < t->size; rank++) left += dt__tcp_has_output(&t->peers[rank]);
        if (left && !dt__tcp_progress(t)) dt__tcp_nap(t, 1e-3);
    }
}

static void dt__tcp_fail(void *user, const char *text) {
    dt__tcp *t = (dt__tcp *)user;
    dt__tcp_tell(t, dt_error(t->ctx), text);
}

/* ---- sockets ---- */

static dt__phrase dt__tcp_place_text(dt__tcp_place place) {
    dt__phrase text;
    uint8_t part[4];
    memcpy(part, &place.address, sizeof part);
    snprintf(text.s, sizeof text.s, "%d.%d.%d.%d:%u", part[0], part[1], part[2], part[3],
        (unsigned)place.port);
    return text;
}

static int dt__tcp_is_loopback(dt__tcp_place place) {
    uint8_t part[4];
    memcpy(part, &place.address, sizeof part);
    return part[0] == 127;
}

/* The address of the first interface of this machine that is in use, but for the loopback; 0: there
   is none. */
static uint32_t dt__tcp_interface(void) {
    struct ifaddrs *all = NULL;
    dt__tcp_place place = { 0, 0 };
    if (getifaddrs(&all) != 0) return 0;
    for (const struct ifaddrs *one = all; one && !place.address; one = one->ifa_next) {
        struct sockaddr_in at;
        if (!one->ifa_addr || one->ifa_addr->sa_family != AF_INET ||
            !(one->ifa_flags & IFF_RUNNING))
            continue;
        memcpy(&at, one->ifa_addr, sizeof at);
        place.address = (uint32_t)at.sin_addr.s_addr;
        if (dt__tcp_is_loopback(place)) place.address = 0;
    }
    freeifaddrs(all);
    return place.address;
}

/* The address of a name. Many a system lists its own name as an address of the loopback, where no
   other machine can come: then it is that of an interface. 0: there is none. */
static uint32_t dt__tcp_look_up(const char *name) {
    struct addrinfo hints, *found = NULL;
    dt__tcp_place place = { 0, 0 };
    memset(&hints, 0, sizeof hints);
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    /* else "1.2" would be 1.0.0.2 */
    if (strspn(name, "0123456789.") == strlen(name)) return 0;
    if (getaddrinfo(name, NULL, &hints, &found) != 0) return 0;
    struct sockaddr_in at;
    memcpy(&at, found->ai_addr, sizeof at);
    place.address = (uint32_t)at.sin_addr.s_addr;
    freeaddrinfo(found);
    if (!dt__tcp_is_loopback(place)) return place.address;
    uint32_t interface = dt__tcp_interface();
    return interface ? interface : place.address;
}

/* "127.0.0.1:29500", "localhost:29500", "node17:29500", or without the port. */
static int dt__tcp_place_read(const char *text, dt__tcp_place *place) {
    char host[256] = "127.0.0.1";
    const char *colon = text ? strchr(text, ':') : NULL;
    size_t length = text ? (colon ? (size_t)(colon - text) : strlen(text)) : 0;
    struct in_addr address;
    place->port = colon ? 0 : DT__TCP_PORT;
    for (const char *digit = colon ? colon + 1 : ""; *digit; digit++) {
        if (*digit < '0' || *digit > '9' || place->port > 65535) return 0;
        place->port = 10 * place->port + (uint32_t)(*digit - '0');
    }
    if (length >= sizeof host || place->port == 0 || place->port > 65535) return 0;
    if (length > 0) {
        memcpy(host, text, length);
        host[length] = 0;
    }
    if (inet_pton(AF_INET, strcmp(host, "localhost") == 0 ? "127.0.0.1" : host, &address) == 1)
        place->address = (uint32_t)address.s_addr;
    else
        place->address = dt__tcp_look_up(host);
    return place->address != 0 || strcmp(host, "0.0.0.0") == 0;
}

/* ---- the token ---- */

/* Reads the token's file, without white space at its end, or says why not. Whoever can read the
   file could join the job. */
static void dt__tcp_token_file(
    const char *path, char *token, size_t room, size_t *bytes, char *why) {
    struct stat is;
    int fd = dt__io_open(NULL, path, DT_IO_READ);
    ssize_t n = -1;
    if (fd < 0 || fstat(fd, &is) != 0)
        snprintf(why, DT__TCP_TEXT, "the token's file DT_TOKEN_FILE=%.200s cannot be opened: %s",
            path, dt__io_reason());
    else if (is.st_mode & 077)
        snprintf(why, DT__TCP_TEXT,
            "others than its owner may use the token's file DT_TOKEN_FILE=%.200s (mode %03o): "
            "chmod 600",
            path, (unsigned)is.st_mode & 0777);
    else if ((n = read(fd, token, room)) < 0 || (size_t)n == room)
        snprintf(why, DT__TCP_TEXT, "DT_TOKEN_FILE=%.200s is not a file of a token", path);
    if (fd >= 0) close(fd);
    while (n > 0 && (token[n - 1] == '\n' || token[n - 1] == '\r' || token[n - 1] == ' ')) n--;
    *bytes = n > 0 ? (size_t)n : 0;
}

/* Computes the key of the proofs (HMAC) from the token; the caller wipes the key. 0: the token is
   missing or bad, and why (DT__TCP_TEXT) says so. */
static int dt__tcp_key(const dt_run_desc *desc, dt__tcp_place place, uint8_t key[32], char *why) {
    char room[4096];
    const char *token = desc->token, *from = "dt_run_desc.token", *path = getenv("DT_TOKEN_FILE");
    size_t bytes = token ? strlen(token) : 0;
    why[0] = 0;
    if (!token && path && path[0]) {
        from = "DT_TOKEN_FILE";
        token = room;
        dt__tcp_token_file(path, room, sizeof room, &bytes, why);
    } else if (!token && getenv("DT_TOKEN") && getenv("DT_TOKEN")[0]) {
        from = "DT_TOKEN";
        token = getenv("DT_TOKEN");
        bytes = strlen(token);
    }
    if (token && bytes < DT__TCP_SECRET && !why[0])
        snprintf(why, DT__TCP_TEXT, "the token of %s has %zu bytes; it needs at least %d", from,
            bytes, (int)DT__TCP_SECRET);
    if (!token && !dt__tcp_is_loopback(place) && desc->ranks > 1)
        snprintf(why, DT__TCP_TEXT,
            "the rendezvous %s can be reached from other machines, so ranks must prove "
            "that they belong to the job, and there is no token. Make one: head -c 32 /dev/urandom "
            "| "
            "base64 > token; chmod 600 token; and start each rank with DT_TOKEN_FILE=token",
            dt__tcp_place_text(place).s);
    if (!why[0]) dt__sha256_of(token, bytes, key);
    dt__wipe(room, sizeof room);
    return !why[0];
}

static struct sockaddr_in dt__tcp_sockaddr(dt__tcp_place place) {
    struct sockaddr_in at;
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = place.address;
    at.sin_port = htons((uint16_t)place.port);
    return at;
}

/* Whether this end of the connection is set up: it never blocks, does not wait for more to send,
   and no program that this one starts has it. */
static int dt__tcp_set_up(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fcntl(fd, F_SETFD, FD_CLOEXEC) == 0 &&
           fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) == 0;
}

#if defined(__linux__) && !defined(TCP_RTO_MAX_MS)
#define TCP_RTO_MAX_MS 44 /* Linux 6.15: older headers lack it, older kernels refuse it */
#endif

/* TCP keepalive: notices within timeout_s + 1 s that a peer's machine has vanished, by up to 8
   probes, because probes get lost. (TCP_USER_TIMEOUT would also end connections to a rank that
   computes for long and reads nothing meanwhile. If data is in flight, the rank that waits for it
   has a timeout of its own.)

   TCP retransmits after 0.2 s, 0.4 s, 0.8 s, ...: a partition of 3.1 s may cost 6.2 s. Where the
   kernel can cap this backoff, the cap is max(timeout_s / 8, 1 s). (Not less: after 15
   retransmissions the kernel gives the connection up.) */
static void dt__tcp_probe(int fd, double timeout_s) {
    int one = 1, whole = 1 + (timeout_s < 32000 ? (int)timeout_s : 32000);
    int apart = 1 + whole / 16, most = (whole - 1) / apart,
        probes = most < 1   ? 1
                 : most < 8 ? most
                            : 8;
    int idle = whole > probes * apart ? whole - probes * apart : 1;
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
#ifdef TCP_RTO_MAX_MS
    int pause_ms = timeout_s < 8 ? 1000 : timeout_s > 960 ? 120000 : (int)(timeout_s * 125);
    setsockopt(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, &pause_ms, sizeof pause_ms);
#endif
#ifdef TCP_KEEPIDLE
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &apart, sizeof apart);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
#else
    (void)idle, (void)probes, (void)apart;
#endif
}

/* The place on this side of a connection, or of what listens. */
static dt__tcp_place dt__tcp_own_place(int fd) {
    struct sockaddr_in at;
    socklen_t length = sizeof at;
    dt__tcp_place place = { 0, 0 };
    memset(&at, 0, sizeof at);
    if (getsockname(fd, (struct sockaddr *)&at, &length) != 0) return place;
    place.address = (uint32_t)at.sin_addr.s_addr;
    place.port = ntohs(at.sin_port);
    return place;
}

/* Port 0: any that is free. -1: see errno. */
static int dt__tcp_listen(dt__tcp_place place, int backlog) {
    struct sockaddr_in at = dt__tcp_sockaddr(place);
    int one = 1, fd = dt__io_guard() == 0 ? socket(AF_INET, SOCK_STREAM, 0) : -1;
    if (fd < 0) return -1;
    /* the last job's connections may still die */
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (dt__tcp_set_up(fd) && bind(fd, (struct sockaddr *)&at, sizeof at) == 0 &&
        listen(fd, backlog) == 0)
        return fd;
    int reason = errno;
    close(fd);
    errno = reason;
    return -1;
}

/* ---- cards ---- */

/* Random numbers that nobody can foretell, from the seed. */
static void dt__tcp_nonce(dt__tcp *t, uint8_t nonce[32]) {
    t->nonces++;
    dt__hmac(t->seed, sizeof t->seed, &t->nonces, sizeof t->nonces, nonce);
}

static dt__tcp_card dt__tcp_card_make(dt__tcp *t, uint32_t kind) {
    dt__tcp_card card;
    memset(&card, 0, sizeof card);
    memcpy(card.magic, dt__tcp_magic, sizeof card.magic);
    card.version = DT__TCP_VERSION;
    card.kind = kind;
    card.rank = t->rank;
    card.size = t->size;
    card.pid = (int32_t)getpid();
    card.place = dt__tcp_own_place(t->door->fd);
    card.job = t->job;
    if (gethostname(card.host, sizeof card.host - 1) != 0) card.host[0] = 0;
    if (kind == DT__TCP_HELLO) dt__tcp_nonce(t, card.nonce);
    return card;
}

/* What the side that speaks knows: "caller" or "host". */
static void dt__tcp_prove(const dt__tcp *t, const char *side, const dt__tcp_card *caller,
    const dt__tcp_card *host, uint8_t proof[32]) {
    struct {
        char side[16];
        dt__tcp_card caller, host;
    } said;
    memset(&said, 0, sizeof said);
    snprintf(said.side, sizeof said.side, "dt tcp %s", side);
    said.caller = *caller;
    said.host = *host;
    dt__hmac(t->key, sizeof t->key, &said, sizeof said, proof);
}

static int dt__tcp_is_proof(const dt__tcp *t, const char *side, const dt__tcp_card *caller,
    const dt__tcp_card *host, const uint8_t proof[32]) {
    uint8_t want[32];
    dt__tcp_prove(t, side, caller, host, want);
    return dt__same_secret(want, proof, sizeof want);
}

/* A host name as the peer sent it: unauthenticated, so it is escaped. */
static void dt__tcp_host_name(char name[DT__TCP_NAME], const char said[DT__TCP_NAME]) {
    memcpy(name, said[0] ? said : "?", said[0] ? DT__TCP_NAME : 2);
    name[DT__TCP_NAME - 1] = 0;
    dt__escape(name, DT__TCP_NAME);
}

/* Why `host` refuses `caller`. */
static dt__phrase dt__tcp_reason(const dt__tcp_card *caller, const dt__tcp_card *host) {
    dt__phrase text;
    char name[DT__TCP_NAME];
    snprintf(text.s, sizeof text.s, "a reason of number %d", host->reason);
    if (host->reason == DT__TCP_NO_VERSION)
        snprintf(text.s, sizeof text.s, "version %u of the protocol, not %u", caller->version,
            host->version);
    if (host->reason == DT__TCP_NO_TOKEN)
        snprintf(text.s, sizeof text.s, "the token is not this job's");
    if (host->reason == DT__TCP_NO_JOB) snprintf(text.s, sizeof text.s, "it is of another job");
    if (host->reason == DT__TCP_NO_SIZE)
        snprintf(
            text.s, sizeof text.s, "it is of %d ranks, the job has %d", caller->size, host->size);
    if (host->reason == DT__TCP_NO_RANK)
        snprintf(text.s, sizeof text.s, "rank %d is none here", caller->rank);
    dt__tcp_host_name(name, host->host);
    if (host->reason == DT__TCP_NO_SEAT)
        snprintf(text.s, sizeof text.s, "rank %d is there already: process %d on %s", caller->rank,
            host->pid, name);
    return text;
}

/* A rank has proved who it is. */
static void dt__tcp_seat(dt__tcp *t, int rank, int fd, const dt__tcp_card *card) {
    dt__tcp_peer *peer = &t->peers[rank];
    peer->fd = fd;
    peer->place = card->place;
    peer->pid = card->pid;
    dt__tcp_host_name(peer->host, card->host);
    dt__tcp_probe(fd, t->timeout_s);
}

/* Few bytes on a new connection: the socket takes them whole. */
static int dt__tcp_give(int fd, const void *p, size_t bytes) {
    return send(fd, p, bytes, MSG_NOSIGNAL) == (ssize_t)bytes;
}

/* ---- guests ---- */

static void dt__tcp_turn_away(dt__tcp *t, dt__tcp_guest *guest, const char *why) {
    dt__tcp_door *door = t->door;
    close(guest->fd);
    guest->fd = -1;
    snprintf(
        door->last.s, sizeof door->last.s, "%.30s: %.150s", dt__tcp_place_text(guest->from).s, why);
    if (door->turned_away++ == 0)
        dt_log(t->ctx, DT_LOG_NOTICE, "rank %d at %s turns away %s (others will only be counted)",
            t->rank, dt__tcp_place_text(dt__tcp_own_place(door->fd)).s, door->last.s);
}

/* Of those that have long said nothing the one that has done so longest; NULL: none has. */
static dt__tcp_guest *dt__tcp_oldest(dt__tcp_door *door, double now) {
    dt__tcp_guest *oldest = NULL;
    for (int i = 0; i < door->room; i++) {
        dt__tcp_guest *guest = &door->guests[i];
        if (guest->fd < 0 || now < guest->since + DT__TCP_PATIENCE_S) continue;
        if (!oldest || guest->since < oldest->since) oldest = guest;
    }
    return oldest;
}

/* Whoever knocks comes in as far as there are chairs, and descriptors. */
static void dt__tcp_let_in(dt__tcp *t, dt__tcp_door *door, double now) {
    for (int next = 0, come = 0; come < door->room; come++) {
        while (next < door->room && door->guests[next].fd >= 0) next++;
        dt__tcp_guest *chair = next < door->room ? &door->guests[next] : dt__tcp_oldest(door, now);
        struct sockaddr_in at;
        socklen_t length = sizeof at;
        memset(&at, 0, sizeof at);
        if (!chair) return;
        int fd = dt__io_guard() == 0 ? accept(door->fd, (struct sockaddr *)&at, &length) : -1;
        if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
            dt__tcp_guest *oldest = dt__tcp_oldest(door, now);
            if (oldest) dt__tcp_turn_away(t, oldest, "there are no more descriptors");
            return;
        }
        if (fd < 0 && (errno == ECONNABORTED || errno == EINTR)) continue;
        if (fd < 0) return;
        if (chair->fd >= 0) dt__tcp_turn_away(t, chair, "it said nothing while others came");
        memset(chair, 0, sizeof *chair);
        chair->fd = fd;
        chair->since = now;
        chair->until = now + DT__TCP_GUEST_S;
        chair->from.address = (uint32_t)at.sin_addr.s_addr;
        chair->from.port = ntohs(at.sin_port);
        if (!dt__tcp_set_up(fd)) dt__tcp_turn_away(t, chair, "its connection cannot be set up");
    }
}

static void dt__tcp_refuse(dt__tcp *t, dt__tcp_guest *guest, int reason) {
    dt__tcp_card card = dt__tcp_card_make(t, DT__TCP_REFUSED);
    const dt__tcp_card *caller = guest->proves ? &guest->theirs : &guest->card;
    card.reason = reason;
    if (reason == DT__TCP_NO_SEAT) {
        card.pid = t->peers[caller->rank].pid;
        memcpy(card.host, t->peers[caller->rank].host, sizeof card.host);
    }
    dt__tcp_give(guest->fd, &card, sizeof card);
    dt__tcp_turn_away(t, guest, dt__tcp_reason(caller, &card).s);
}

/* Who has proved that it knows the token: is it a rank that is missing here? 0, or why not. */
static int dt__tcp_judge(const dt__tcp *t, const dt__tcp_card *theirs) {
    if (theirs->job != t->job && (theirs->job || t->rank > 0)) return DT__TCP_NO_JOB;
    if (theirs->size != t->size) return DT__TCP_NO_SIZE;
    if (theirs->rank < t->door->first || theirs->rank >= t->size) return DT__TCP_NO_RANK;
    return t->peers[theirs->rank].fd >= 0 ? DT__TCP_NO_SEAT : 0;
}

/* A guest's card is complete. */
static void dt__tcp_answer(dt__tcp *t, dt__tcp_guest *guest) {
    guest->at = 0;
    guest->since = dt__tcp_now(t);
    if (guest->card.kind != (guest->proves ? DT__TCP_PROOF : DT__TCP_HELLO)) {
        dt__tcp_turn_away(t, guest, "it does not keep to the protocol");
        return;
    }
    if (!guest->proves) {
        guest->proves = 1;
        guest->theirs = guest->card;
        guest->ours = dt__tcp_card_make(t, DT__TCP_HELLO);
        if (!dt__tcp_give(guest->fd, &guest->ours, sizeof guest->ours))
            dt__tcp_turn_away(t, guest, "it hung up");
        return;
    }
    int reason = dt__tcp_is_proof(t, "caller", &guest->theirs, &guest->ours, guest->card.proof)
                     ? dt__tcp_judge(t, &guest->theirs)
                     : DT__TCP_NO_TOKEN;
    if (reason) {
        dt__tcp_refuse(t, guest, reason);
        return;
    }
    dt__tcp_card welcome = dt__tcp_card_make(t, DT__TCP_WELCOME);
    dt__tcp_prove(t, "host", &guest->theirs, &guest->ours, welcome.proof);
    if (!dt__tcp_give(guest->fd, &welcome, sizeof welcome)) {
        dt__tcp_turn_away(t, guest, "it hung up");
        return;
    }
    dt__tcp_seat(t, guest->theirs.rank, guest->fd, &guest->theirs);
    guest->fd = -1;
}

/* What a guest says. What does not begin as a card need not go on. */
static void dt__tcp_listen_to(dt__tcp *t, dt__tcp_guest *guest, double now) {
    const size_t named = offsetof(dt__tcp_card, version), versioned = offsetof(dt__tcp_card, kind);
    ssize_t n = recv(
        guest->fd, (char *)&guest->card + guest->at, sizeof guest->card - guest->at, MSG_DONTWAIT);
    int later = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
    if (n > 0) guest->at += (size_t)n;
    if (memcmp(guest->card.magic, dt__tcp_magic, guest->at < named ? guest->at : named) != 0)
        dt__tcp_turn_away(t, guest, "it does not speak this protocol");
    else if (guest->at >= versioned && guest->card.version != DT__TCP_VERSION)
        guest->proves = 0, dt__tcp_refuse(t, guest, DT__TCP_NO_VERSION);
    else if (guest->at == sizeof guest->card)
        dt__tcp_answer(t, guest);
    else if (n <= 0 && !later)
        dt__tcp_turn_away(t, guest, "it hung up");
    else if (now > guest->until)
        dt__tcp_turn_away(t, guest, "it did not say who it is");
}

static void dt__tcp_guests(dt__tcp *t) {
    double now = dt__tcp_now(t);
    dt__tcp_let_in(t, t->door, now);
    for (int i = 0; i < t->door->room; i++)
        if (t->door->guests[i].fd >= 0) dt__tcp_listen_to(t, &t->door->guests[i], now);
}

static void dt__tcp_close_door(dt__tcp *t) {
    dt__tcp_door *door = t->door;
    if (!door) return;
    for (int i = 0; door->guests && i < door->room; i++)
        if (door->guests[i].fd >= 0) close(door->guests[i].fd);
    if (door->turned_away > 1)
        dt_log(t->ctx, DT_LOG_DETAIL, "rank %d turned away %ld connections, the last %s", t->rank,
            door->turned_away, door->last.s);
    if (door->fd >= 0) close(door->fd);
    t->door = NULL;
}

/* ---- the rendezvous ---- */

/* A moment of waiting. Who comes meanwhile finds the door attended, once this rank knows its
   job. */
static void dt__tcp_pause(dt__tcp *t, double seconds) {
    if (t->door && t->door->fd >= 0 && t->job) dt__tcp_guests(t);
    dt__tcp_nap(t, seconds);
}

/* One attempt; -1: see errno. */
static int dt__tcp_connect(dt__tcp *t, dt__tcp_place place, double deadline) {
    struct sockaddr_in at = dt__tcp_sockaddr(place);
    int fd = dt__io_guard() == 0 ? socket(AF_INET, SOCK_STREAM, 0) : -1, error = 0;
    socklen_t length = sizeof error;
    if (fd < 0) return -1;
    if (!dt__tcp_set_up(fd) ||
        (connect(fd, (struct sockaddr *)&at, sizeof at) != 0 && errno != EINPROGRESS)) {
        error = errno;
    } else {
        struct pollfd wait = { fd, POLLOUT, 0 };
        while (poll(&wait, 1, 0) == 0 && dt__tcp_now(t) < deadline) dt__tcp_pause(t, 2e-4);
        if (!wait.revents)
            error = ETIMEDOUT;
        else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0)
            error = errno;
    }
    /* Where nobody listens at a port that the system gives to anybody, a socket may be given it,
       and meet itself. */
    if (error == 0 && dt__tcp_own_place(fd).port == place.port &&
        dt__tcp_own_place(fd).address == place.address)
        error = ECONNREFUSED;
    if (error == 0) return fd;
    close(fd);
    errno = error;
    return -1;
}

/* 1: all came; 0: the other end is gone; -1: not in time. */
static int dt__tcp_take(dt__tcp *t, int fd, void *p, size_t bytes, double deadline) {
    for (size_t at = 0; at < bytes;) {
        ssize_t n = recv(fd, (char *)p + at, bytes - at, 0);
        if (n > 0)
            at += (size_t)n;
        else if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
            return 0;
        else if (dt__tcp_now(t) > deadline)
            return -1;
        else
            dt__tcp_pause(t, 2e-4);
    }
    return 1;
}

/* More than a socket may take at once. 0: the other end is gone, or does not read in time. */
static int dt__tcp_give_all(dt__tcp *t, int fd, const void *p, size_t bytes, double deadline) {
    for (size_t at = 0; at < bytes;) {
        ssize_t n = send(fd, (const char *)p + at, bytes - at, MSG_NOSIGNAL);
        if (n > 0)
            at += (size_t)n;
        else if ((errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) ||
                 dt__tcp_now(t) > deadline)
            return 0;
        else
            dt__tcp_pause(t, 2e-4);
    }
    return 1;
}

/* A rank that hangs up before the others are there may come again. Nobody has a reason to say
   anything now. */
static void dt__tcp_watch_seats(dt__tcp *t) {
    for (int rank = 1; rank < t->size; rank++) {
        struct pollfd look = { t->peers[rank].fd, POLLIN, 0 };
        if (look.fd < 0 || poll(&look, 1, 0) <= 0) continue;
        close(look.fd);
        t->peers[rank].fd = -1;
    }
}

/* The ranks from `first` on that have no seat, as "2, 5". */
static dt__phrase dt__tcp_missing(const dt__tcp *t, int first, int *n) {
    dt__phrase text;
    size_t at = 0;
    text.s[0] = 0;
    *n = 0;
    for (int rank = first; rank < t->size; rank++) {
        if (t->peers[rank].fd < 0)
            dt__append(text.s, sizeof text.s, &at, (*n)++ ? ", %d" : "%d", rank);
    }
    return text;
}

/* Until all ranks from door->first on have come. */
static dt_status dt__tcp_meet(dt__tcp *t, double deadline) {
    char also[320] = "";
    dt__tcp_door *door = t->door;
    for (int missing = 1;;) {
        dt__tcp_guests(t);
        if (t->rank == 0) dt__tcp_watch_seats(t);
        dt__phrase who = dt__tcp_missing(t, door->first, &missing);
        if (missing == 0) return DT_OK;
        if (dt__tcp_now(t) <= deadline) {
            dt__tcp_nap(t, 5e-4);
            continue;
        }
        if (door->turned_away)
            snprintf(also, sizeof also, "; %ld connection%s turned away, the last %s",
                door->turned_away, door->turned_away > 1 ? "s were" : " was", door->last.s);
        return dt_fail(t->ctx, DT_ERR_TIMEOUT,
            "timeout %.1f s at %s: of %d ranks rank%s %s did not come%s", t->timeout_s,
            dt__tcp_place_text(dt__tcp_own_place(door->fd)).s, t->size, missing > 1 ? "s" : "",
            who.s, also);
    }
}

/* Listening failed. */
static dt_status dt__tcp_no_door(dt__tcp *t, dt__tcp_place place) {
    int reason = errno;
    return dt_fail(t->ctx, DT_ERR_COMM, "cannot listen at %s: %s (error %d)",
        dt__tcp_place_text(place).s,
        reason == EADDRINUSE      ? "another program does"
        : reason == EADDRNOTAVAIL ? "that address is not this machine's"
                                  : "the system refuses it",
        reason);
}

/* Rank 0: all come here, and each learns where the others are. */
static dt_status dt__tcp_host_ranks(dt__tcp *t, dt__tcp_place *places) {
    uint8_t random[32];
    dt__tcp_table table;
    if (t->door->fd < 0) t->door->fd = dt__tcp_listen(t->rendezvous, DT__TCP_BACKLOG);
    if (t->door->fd < 0) return dt__tcp_no_door(t, t->rendezvous);
    dt__tcp_nonce(t, random);
    memcpy(&t->job, random, sizeof t->job);
    t->job |= 1;
    dt__tcp_meet(t, dt__tcp_now(t) + t->timeout_s);
    dt__tcp_close_door(t);
    memset(&table, 0, sizeof table);
    table.magic = DT__TCP_FRAME;
    table.given_up = dt_error(t->ctx) != DT_OK;
    table.check = t->check;
    snprintf(table.text, sizeof table.text, "%s", dt_error_text(t->ctx));
    double deadline = dt__tcp_now(t) + t->timeout_s;
    for (int rank = 1; rank < t->size; rank++) places[rank] = t->peers[rank].place;
    for (int rank = 1; rank < t->size; rank++) {
        int fd = t->peers[rank].fd;
        if (fd < 0) continue;
        if (dt__tcp_give_all(t, fd, &table, sizeof table, deadline) &&
            (table.given_up ||
                dt__tcp_give_all(t, fd, places, (size_t)t->size * sizeof *places, deadline)))
            continue;
        if (!table.given_up)
            dt_fail(t->ctx, DT_ERR_PEER, "connection to %s was lost at the rendezvous",
                dt__tcp_who(t, rank).s);
    }
    return dt_error(t->ctx);
}

/* What a called rank answers: 1 a card of the kind that is due; 0 the context has failed. */
static int dt__tcp_is_answer(dt__tcp *t, int rank, dt__tcp_place place, uint32_t kind,
    const dt__tcp_card *ours, const dt__tcp_card *card) {
    int known = memcmp(card->magic, dt__tcp_magic, sizeof card->magic) == 0;
    if (known && card->version == DT__TCP_VERSION && card->kind == kind && card->rank == rank)
        return 1;
    if (known && (card->kind == DT__TCP_REFUSED || card->version != DT__TCP_VERSION)) {
        dt__tcp_card host = *card;
        if (card->version != DT__TCP_VERSION) host.reason = DT__TCP_NO_VERSION;
        dt_fail(t->ctx, DT_ERR_COMM, "rank %d at %s refuses this rank: %s", rank,
            dt__tcp_place_text(place).s, dt__tcp_reason(ours, &host).s);
    } else {
        dt_fail(t->ctx, DT_ERR_COMM, "what listens at %s is not rank %d of a job",
            dt__tcp_place_text(place).s, rank);
    }
    return 0;
}

/* The conversation on a new connection. 1: this rank has a seat there; 0: closed before that, or
   late: *reason; -1: the context has failed. */
static int dt__tcp_introduce(
    dt__tcp *t, int fd, int rank, dt__tcp_place place, double deadline, const char **reason) {
    dt__tcp_card ours = dt__tcp_card_make(t, DT__TCP_HELLO), theirs,
                 card = dt__tcp_card_make(t, DT__TCP_PROOF);
    for (int step = 0; step < 2; step++) {
        if (step) dt__tcp_prove(t, "caller", &ours, &theirs, card.proof);
        int came = !dt__tcp_give(fd, step ? &card : &ours, sizeof card)
                       ? 0
                       : dt__tcp_take(t, fd, step ? &card : &theirs, sizeof card, deadline);
        *reason = came < 0 ? "there is no answer" : "the connection is closed without an answer";
        if (came <= 0) return 0;
        if (!dt__tcp_is_answer(t, rank, place, step ? DT__TCP_WELCOME : DT__TCP_HELLO, &ours,
                step ? &card : &theirs))
            return -1;
    }
    if (!dt__tcp_is_proof(t, "host", &ours, &theirs, card.proof) ||
        (rank > 0 && theirs.job != t->job) || !theirs.job) {
        dt_fail(t->ctx, DT_ERR_COMM,
            "what listens at %s does not prove that it is rank %d of this job",
            dt__tcp_place_text(place).s, rank);
        return -1;
    }
    t->job = theirs.job;
    dt__tcp_seat(t, rank, fd, &theirs);
    return 1;
}

/* One attempt at a seat with another rank. Once there is a connection to rank 0, this rank opens
   its own door on the same interface. Results as above; *gone: nobody listens. */
static int dt__tcp_dial(
    dt__tcp *t, int rank, dt__tcp_place place, double deadline, const char **reason, int *gone) {
    int fd = dt__tcp_connect(t, place, deadline), done = -1;
    *gone = fd < 0;
    *reason = errno == ECONNREFUSED ? "nobody listens there" : "it cannot be reached";
    if (fd < 0) return 0;
    if (t->door->fd < 0) {
        dt__tcp_place here = dt__tcp_own_place(fd);
        here.port = 0;
        t->door->fd = dt__tcp_listen(here, DT__TCP_BACKLOG);
        if (t->door->fd < 0) dt__tcp_no_door(t, here);
    }
    if (t->door->fd >= 0)
        done = dt__tcp_introduce(t, fd, rank, place, deadline + DT__TCP_LATE_S, reason);
    if (done <= 0) close(fd);
    return done;
}

/* Until there is a seat. Rank 0 may begin later than this one; the others listen before anybody
   learns where, but where strangers crowd the door it may take more than one attempt. */
static dt_status dt__tcp_call(dt__tcp *t, int rank, dt__tcp_place place) {
    double deadline = dt__tcp_now(t) + t->timeout_s;
    for (;;) {
        const char *reason = "";
        int gone = 0, done = dt__tcp_dial(t, rank, place, deadline, &reason, &gone);
        if (done) return done > 0 ? DT_OK : dt_error(t->ctx);
        int late = dt__tcp_now(t) > deadline;
        if (rank > 0 && (gone || late))
            return dt_fail(t->ctx, DT_ERR_PEER, "connection to rank %d was lost: at %s %s", rank,
                dt__tcp_place_text(place).s, reason);
        if (late)
            return dt_fail(t->ctx, DT_ERR_TIMEOUT, "timeout %.1f s: rank 0 did not come to %s: %s",
                t->timeout_s, dt__tcp_place_text(place).s, reason);
        dt__tcp_pause(t, 1e-2);
    }
}

/* The places of all, when all have come. Rank 0 knows better who is missing, and its limit may have
   begun later. */
static dt_status dt__tcp_take_table(dt__tcp *t, dt__tcp_place *places) {
    dt__tcp_table table;
    int fd = t->peers[0].fd;
    double deadline = dt__tcp_now(t) + t->timeout_s + DT__TCP_LATE_S;
    int came = dt__tcp_take(t, fd, &table, sizeof table, deadline);
    table.text[sizeof table.text - 1] = 0;
    t->check = came > 0 ? table.check : 0;
    if (came > 0 && table.magic == DT__TCP_FRAME && table.given_up)
        return dt_fail(t->ctx, DT_ERR_PEER, "peer failed first: %s", table.text);
    if (came > 0 && table.magic == DT__TCP_FRAME)
        came = dt__tcp_take(t, fd, places, (size_t)t->size * sizeof *places, deadline);
    else if (came > 0)
        came = 0;
    if (came > 0) return DT_OK;
    return dt_fail(
        t->ctx, DT_ERR_PEER, "connection to %s was lost at the rendezvous", dt__tcp_who(t, 0).s);
}

/* All other ranks: to rank 0, to those before this one, and then those after it come. */
static dt_status dt__tcp_join(dt__tcp *t, dt__tcp_place *places) {
    if (dt__tcp_call(t, 0, t->rendezvous) == DT_OK) dt__tcp_take_table(t, places);
    double deadline = dt__tcp_now(t) + t->timeout_s;
    for (int rank = 1; rank < t->rank && !dt_error(t->ctx); rank++)
        dt__tcp_call(t, rank, places[rank]);
    return dt_error(t->ctx) ? dt_error(t->ctx) : dt__tcp_meet(t, deadline);
}

/* ---- beginning and end ---- */

static size_t dt__tcp_bytes(int size) {
    return sizeof(dt__tcp) + (size_t)size * (sizeof(dt__tcp_peer) + sizeof(struct pollfd)) +
           DT__TCP_INPUT;
}

static void dt__tcp_free(dt__tcp *t) {
    for (int rank = 0; rank < t->size; rank++) {
        dt__tcp_hang_up(&t->peers[rank], DT__TCP_LOST);
        while (t->peers[rank].first) {
            dt__tcp_request *r = t->peers[rank].first;
            t->peers[rank].first = r->next;
            dt__tcp_release(t, r);
        }
    }
    while (t->kept) dt__tcp_forget(t, t->kept);
    while (t->idle) {
        dt__tcp_request *r = t->idle;
        t->idle = r->next;
        dt_free(t->ctx, DT_MEM_HOST, r, sizeof *r);
    }
    dt_free(t->ctx, DT_MEM_HOST, t, dt__tcp_bytes(t->size));
}

/* All ranks find each other. */
static void dt__tcp_rendezvous(dt__tcp *t, int listening) {
    int room = 4 * t->size + DT__TCP_GUESTS < DT__TCP_MOST_GUESTS ? 4 * t->size + DT__TCP_GUESTS
                                                                  : DT__TCP_MOST_GUESTS;
    size_t table_bytes = (size_t)t->size * sizeof(dt__tcp_place),
           guests_bytes = (size_t)room * sizeof(dt__tcp_guest);
    dt__tcp_place *table = (dt__tcp_place *)dt_alloc(t->ctx, DT_MEM_HOST, table_bytes, "addresses");
    dt__tcp_guest *guests = (dt__tcp_guest *)dt_alloc(t->ctx, DT_MEM_HOST, guests_bytes, "guests");
    dt__tcp_door door;
    memset(&door, 0, sizeof door);
    door.fd = listening;
    door.first = t->rank + 1;
    door.guests = guests;
    door.room = room;
    t->door = &door;
    for (int i = 0; guests && i < room; i++) guests[i].fd = -1;
    if (getrandom(t->seed, sizeof t->seed, 0) != (ssize_t)sizeof t->seed)
        dt_fail(t->ctx, DT_ERR_IO, "the system gives no random numbers (error %d)", errno);
    if (table) memset(table, 0, table_bytes);
    if (dt_error(t->ctx) == DT_OK && t->rank == 0)
        dt__tcp_host_ranks(t, table);
    else if (dt_error(t->ctx) == DT_OK)
        dt__tcp_join(t, table);
    dt__tcp_close_door(t);
    dt__wipe(t->key, sizeof t->key);
    dt__wipe(t->seed, sizeof t->seed);
    dt_free(t->ctx, DT_MEM_HOST, guests, guests_bytes);
    dt_free(t->ctx, DT_MEM_HOST, table, table_bytes);
}

/* This rank's end of all connections; NULL with the context failed. listening: rank 0's door if it
   is open already, else -1. */
static dt__tcp *dt__tcp_make(dt_ctx *ctx, const dt_run_desc *desc, dt__tcp_place rendezvous,
    const uint8_t key[32], int listening) {
    dt__tcp *t = (dt__tcp *)dt_alloc(ctx, DT_MEM_HOST, dt__tcp_bytes(desc->ranks), "connections");
    if (t) {
        memset(t, 0, dt__tcp_bytes(desc->ranks) - DT__TCP_INPUT);
        t->ctx = t->hears = ctx;
        t->check = desc->check;
        t->host = dt_ctx_host(ctx);
        t->rank = desc->rank;
        t->size = desc->ranks;
        t->timeout_s = desc->timeout_s;
        t->watch = dt__stopwatch_start(t->host, t->timeout_s);
        t->rendezvous = rendezvous;
        /* no vector register */
        for (size_t i = 0; i < sizeof t->key; i++) ((volatile uint8_t *)t->key)[i] = key[i];
        t->peers = (dt__tcp_peer *)(void *)(t + 1);
        t->polls = (struct pollfd *)(void *)(t->peers + t->size);
        t->input = (char *)(t->polls + t->size);
        for (int rank = 0; rank < t->size; rank++)
            t->peers[rank].fd = -1, t->peers[rank].rank = rank;
    }
    if (t && t->size > 1)
        dt__tcp_rendezvous(t, listening);
    else if (listening >= 0)
        close(listening);
    if (!t || dt_error(ctx) == DT_OK) return t;
    dt__tcp_tell(t, dt_error(ctx), dt_error_text(ctx)); /* connected ranks may be waiting */
    dt__tcp_free(t);
    return NULL;
}

/* How many peers are still to say their last word, or to be told ours; the first of them in
   *rank. */
static int dt__tcp_unfinished(const dt__tcp *t, int *rank) {
    int left = 0;
    for (int i = t->size - 1; i >= 0; i--) {
        const dt__tcp_peer *peer = &t->peers[i];
        if (i == t->rank || peer->fd < 0 ||
            (peer->state != DT__TCP_OPEN && !dt__tcp_has_output(peer)))
            continue;
        left++;
        *rank = i;
    }
    return left;
}

/* Says goodbye to all and waits for theirs, so that a rank that fails later is known here too, and
   that nobody loses what it has not read yet. A failure ends the wait soon. */
static void dt__tcp_goodbye(dt__tcp *t) {
    double begin = dt__tcp_now(t), nap = 2e-5, until = begin + t->timeout_s;
    int rank = 0, hurried = 0;
    t->closing = 1;
    for (int i = 0; i < t->size; i++) {
        dt__tcp_peer *peer = &t->peers[i];
        if (peer->fd >= 0 && peer->control_bytes == 0) dt__tcp_say(t, peer, DT__TCP_BYE, DT_OK, "");
    }
    while (dt__tcp_unfinished(t, &rank) > 0 && dt__tcp_now(t) < until) {
        if (t->failed && !hurried++ && until > dt__tcp_now(t) + DT__TCP_GRACE_S)
            until = dt__tcp_now(t) + DT__TCP_GRACE_S;
        if (dt__tcp_progress(t)) continue;
        dt__tcp_nap(t, nap);
        nap = nap * 2 < DT__NAP_MAX ? nap * 2 : DT__NAP_MAX;
    }
    if (dt__tcp_unfinished(t, &rank) > 0)
        dt_log(t->ctx, t->failed ? DT_LOG_DETAIL : DT_LOG_NOTICE,
            "rank %d ends after %.1f s without a goodbye from "
            "rank %d",
            t->rank, dt__tcp_now(t) - begin, rank);
}

/* After the rank's function, the context still there: what went wrong, here or elsewhere. */
static void dt__tcp_report(dt__tcp *t, dt_report *report) {
    const dt_host *host = t->host;
    dt_report own;
    memset(&own, 0, sizeof own);
    own.status = dt_error(t->ctx);
    own.rank = t->rank;
    snprintf(own.text, sizeof own.text, "%s", dt_error_text(t->ctx));
    if (t->failed && t->first.status) { /* another rank's: it has logged it */
        *report = t->first;
        return;
    }
    for (int rank = 0; rank < t->size && !own.status; rank++) {
        if (t->peers[rank].state <= DT__TCP_ENDED) continue;
        own.status = DT_ERR_PEER;
        snprintf(own.text, sizeof own.text, "rank %d: %s before it had ended", t->rank,
            dt__tcp_loss(t, rank).s);
    }
    if (t->kept && !t->unread[0])
        snprintf(t->unread, sizeof t->unread, "%zu bytes with tag %d from rank %d",
            (size_t)t->kept->frame.bytes, t->kept->frame.tag, t->kept->from);
    if (t->unread[0] && !own.status) {
        own.status = DT_ERR_COMM;
        snprintf(
            own.text, sizeof own.text, "rank %d: ended without receiving %s", t->rank, t->unread);
    }
    if (own.status && own.status != dt_error(t->ctx))
        host->log(host->user, DT_LOG_ERROR, t->rank, own.text);
    else if (own.status == DT_ERR_PEER)
        host->log(host->user, DT_LOG_ERROR, t->rank, own.text);
    *report = own;
}

// ==== 25. MPI ===================================================================================

/* A rank is a process that a launcher started: mpirun -np 4 ./a.out. What goes over MPI are the
   messages of section 15, so sums keep their order: MPI_Allreduce promises none. The world and each
   group have a communicator of their own as long as there are some (DT__MPI_COMMS, made when the
   run begins, because making one later would mean to wait inside MPI for ranks that may have
   failed); groups beyond share them, and the tag tells them apart:

       group g, class (messages, collectives, contents), tag  ->
           communicator g % 8, tag (g / 8 * 3 + class) * span + tag

   A message is an envelope: the word of its send, its length, and what it says if that is little.
   More follows as a message of its own, of the third class, whose tag the envelope names; its
   receive begins when the envelope has come, from whomever that was. So MPI never has to cut a
   message that is longer than its receive.

   Ranks of one machine share a range as forks do. Groups within it do their collectives there
   (section 14), and of other groups' collectives the messages within it go there (13): MPI is for
   what leaves the machine, and for sends and receives.

   Nothing waits inside MPI before the end, when all have met: whatever takes time is started and
   tested, in section 12's loop or in dt__mpi_meet, which watch the clock. MPI knows no failed rank.
   So all ranks have the connections of section 24 as well, but no data goes over them: a rank that
   fails says so there, one that dies is noticed by its lost connection, and all look at them while
   they wait. Rank 0 opens the door, and MPI carries its address and the token to the others. At the
   end all meet once more: then none is left that could still send. MPI Forum, "MPI: A
   Message-Passing Interface Standard", version 3.1, 2015. */

#ifdef DT_USE_MPI

enum {
    DT__MPI_COMMS = 8,    /* as many groups have a communicator of their own */
    DT__MPI_SHARES = 16,  /* as many groups share one */
    DT__MPI_ROUNDS = 200, /* after a failure, of asking whether all messages have come */
    /* a rank that waits asks for the time, and perhaps for failures, every so many tests */
    DT__MPI_LOOK = 4
};
#define DT__MPI_LOOK_S 1e-3      /* and looks at the connections after so long, plus */
#define DT__MPI_LOOK_EACH_S 2e-5 /* so much for each rank: the look itself takes time */
/* for what is under way when a rank dies: the launcher ends the others soon */
#define DT__MPI_PATIENCE_S 0.2
/* a message of more bytes than this is of a type made for it: MPI counts in int */
#ifndef DT__MPI_MOST
#define DT__MPI_MOST ((size_t)1 << 30)
#endif

typedef struct dt__mpi_envelope {
    uint64_t word, bytes;
    int64_t tag; /* of its content */
    /* its content, if it is no more than this: then this is sent as far as it goes */
    char small[DT_EAGER_BYTES];
} dt__mpi_envelope;

typedef struct dt__mpi_request {
    MPI_Request envelope, content;
    MPI_Datatype type; /* of the content: MPI_BYTE, or made for this message */
    MPI_Comm *comm;
    int peer;  /* of a send; -1: a receive */
    int from;  /* of a receive: who sent it; -1: the envelope has not come */
    void *buf; /* of a receive */
    size_t bytes;
    int error;         /* of MPI */
    const char *wrong; /* why it cannot be, if MPI has no error */
    /* all of it is in the envelope: it is over for its caller at once */
    int flies;
    struct dt__mpi_request *next;
    dt__mpi_envelope e;
} dt__mpi_request;

typedef struct dt__mpi {
    const dt_host *host;
    dt_ctx *ctx;
    int rank, size, tag_span, turns;
    unsigned contents;      /* sent so far */
    int initialized;        /* here, and not by the program */
    MPI_Errhandler handler; /* of MPI_COMM_WORLD, while MPI reports errors to dt */
    MPI_Comm comms[DT__MPI_COMMS], control;
    int made; /* of these, control last */
    dt__mpi_request *idle, *flying;
    dt__stopwatch watch; /* since dt_run began; all deadlines are on this clock */
    /* until when what was cancelled is waited for; 0: nothing was */
    double timeout_s, patience;
    int64_t balance;         /* messages sent less messages received */
    MPI_Status met;          /* of what dt__mpi_meet waited for last */
    int64_t mine[2], all[2]; /* of the last meeting */
    int orphans;             /* requests that did not end in time */
    MPI_Request draining;    /* a message that nobody wants, into waste */
    void *waste;
    size_t waste_bytes;
    dt_report first;
    /* of the connections: its failures are told by whoever asked */
    dt_ctx *quiet;
    dt_listener listener;
    dt__tcp *tcp; /* NULL until all are connected */
    double next_look;
    int noticed, lost; /* another rank's failure; by its end */
    int apart;         /* ranks that do not have this one's loopback */
    int *flies;        /* (size) */
    dt__node node;     /* shared NULL: this rank shares memory with none */
    void *range;
    size_t range_bytes;
} dt__mpi;

static double dt__mpi_now(dt__mpi *mpi) { return dt__waited(&mpi->watch); }

static void dt__mpi_why(int error, char *why, size_t bytes) {
    char text[MPI_MAX_ERROR_STRING + 1];
    int length = 0;
    if (MPI_Error_string(error, text, &length) != MPI_SUCCESS) length = 0;
    text[length] = 0;
    snprintf(why, bytes, "MPI: %.400s", length ? text : "an unknown error");
}

/* ---- one message ---- */

/* How `bytes` bytes are counted in an int: as blocks of DT__MPI_MOST and a tail. MPI's error. */
static int dt__mpi_type(size_t bytes, MPI_Datatype *type, int *count) {
    MPI_Datatype block = MPI_BYTE, parts[2] = { MPI_BYTE, MPI_BYTE };
    size_t whole = bytes / DT__MPI_MOST;
    int lengths[2] = { (int)whole, (int)(bytes % DT__MPI_MOST) };
    MPI_Aint at[2] = { 0, (MPI_Aint)(whole * DT__MPI_MOST) };
    *type = MPI_BYTE;
    *count = (int)bytes;
    if (bytes <= DT__MPI_MOST) return MPI_SUCCESS;
    *count = 1;
    int error = MPI_Type_contiguous((int)DT__MPI_MOST, MPI_BYTE, &block);
    if (error) return error;
    parts[0] = block;
    error = MPI_Type_create_struct(2, lengths, at, parts, type);
    MPI_Type_free(&block);
    return error ? error : MPI_Type_commit(type);
}

static dt__mpi_request *dt__mpi_take(dt__mpi *mpi) {
    dt__mpi_request *r = mpi->idle;
    if (r)
        mpi->idle = r->next;
    else
        r = (dt__mpi_request *)dt_alloc(mpi->ctx, DT_MEM_HOST, sizeof *r, "an MPI request");
    if (!r) return NULL;
    memset(r, 0, offsetof(dt__mpi_request, e));
    r->envelope = r->content = MPI_REQUEST_NULL;
    r->type = MPI_BYTE;
    r->peer = r->from = -1;
    return r;
}

static void dt__mpi_put_back(dt__mpi *mpi, dt__mpi_request *r) {
    if (r->type != MPI_BYTE) MPI_Type_free(&r->type);
    r->next = mpi->idle;
    mpi->idle = r;
}

/* Envelopes that have arrived, or that MPI has copied. */
static void dt__mpi_reap(dt__mpi *mpi) {
    for (dt__mpi_request **at = &mpi->flying; *at;) {
        dt__mpi_request *r = *at;
        int done = 0;
        if (MPI_Test(&r->envelope, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) {
            at = &r->next;
            continue;
        }
        *at = r->next;
        mpi->flies[r->peer]--;
        dt__mpi_put_back(mpi, r);
    }
}

/* Where a message goes: its communicator, its tag, and that of its content. 0 with the request's
   reason: nowhere. */
static int dt__mpi_place(dt__mpi *mpi, dt__mpi_request *r, uint32_t channel, int *tag) {
    uint32_t group = channel / 2;
    int share = (int)(group / DT__MPI_COMMS) * 3;
    /* a collective's number: the others under way are near */
    if (channel % 2) *tag %= mpi->tag_span;
    if (group >= DT__MPI_COMMS * DT__MPI_SHARES)
        r->wrong = "there are more groups than MPI's tags can tell apart";
    else if (*tag >= mpi->tag_span)
        r->wrong = "the tag is too large for MPI's MPI_TAG_UB";
    if (r->wrong) return 0;
    *tag += (share + (int)(channel % 2)) * mpi->tag_span;
    r->comm = &mpi->comms[group % DT__MPI_COMMS];
    r->e.tag = (share + 2) * mpi->tag_span + (int)(mpi->contents % (unsigned)mpi->tag_span);
    return 1;
}

/* Who sends what fits into the envelope can go on: 8 for each receiver, as in shared memory. */
static void *dt__mpi_send(
    void *user, int to, uint32_t channel, int tag, uint64_t word, const void *buf, size_t bytes) {
    dt__mpi *mpi = (dt__mpi *)user;
    dt__mpi_request *r = dt__mpi_take(mpi);
    size_t small = bytes <= DT_EAGER_BYTES ? bytes : 0;
    int count = 0;
    if (!r || !dt__mpi_place(mpi, r, channel, &tag)) return r;
    r->peer = to;
    r->e.word = word;
    r->e.bytes = bytes;
    if (small > 0) memcpy(r->e.small, buf, small);
    if (r->wrong) return r;
    if (mpi->flies[to] >= DT__MESSAGES) dt__mpi_reap(mpi);
    r->flies = small == bytes && mpi->flies[to] < DT__MESSAGES;
    mpi->flies[to] += r->flies;
    r->error = MPI_Isend(&r->e, (int)(offsetof(dt__mpi_envelope, small) + small), MPI_BYTE, to, tag,
        *r->comm, &r->envelope);
    mpi->balance += !r->error;
    if (r->error || small == bytes) return r;
    mpi->contents++;
    r->error = dt__mpi_type(bytes, &r->type, &count);
    if (!r->error)
        r->error = MPI_Isend(buf, count, r->type, to, (int)r->e.tag, *r->comm, &r->content);
    mpi->balance += !r->error;
    return r;
}

static void *dt__mpi_recv(
    void *user, int from, uint32_t channel, int tag, void *buf, size_t bytes) {
    dt__mpi *mpi = (dt__mpi *)user;
    dt__mpi_request *r = dt__mpi_take(mpi);
    if (!r || !dt__mpi_place(mpi, r, channel, &tag)) return r;
    r->buf = buf;
    r->bytes = bytes;
    r->error = MPI_Irecv(&r->e, (int)sizeof r->e, MPI_BYTE, from == DT_ANY ? MPI_ANY_SOURCE : from,
        tag, *r->comm, &r->envelope);
    return r;
}

/* The envelope of a receive has come. Of what is longer than its buffer no more is taken: its
   caller fails. */
static void dt__mpi_opened(dt__mpi *mpi, dt__mpi_request *r, int from) {
    int count = 0;
    r->from = from;
    mpi->balance--;
    if (r->e.bytes > r->bytes) return;
    if (r->e.bytes <= DT_EAGER_BYTES) {
        if (r->e.bytes > 0) memcpy(r->buf, r->e.small, (size_t)r->e.bytes);
        return;
    }
    r->error = dt__mpi_type((size_t)r->e.bytes, &r->type, &count);
    if (!r->error)
        r->error = MPI_Irecv(r->buf, count, r->type, from, (int)r->e.tag, *r->comm, &r->content);
}

/* ---- the failure of another rank ---- */

static void dt__mpi_note(dt_report *note, dt_status status, int rank, const char *text) {
    memset(note, 0, sizeof *note);
    note->status = status;
    note->rank = rank;
    snprintf(note->text, sizeof note->text, "%s", text);
}

/* Tells all others, once. */
static void dt__mpi_tell(dt__mpi *mpi, dt_status status, const char *text) {
    if (!mpi->first.status) dt__mpi_note(&mpi->first, status, mpi->rank, text);
    if (mpi->tcp) dt__tcp_tell(mpi->tcp, status, text);
}

static void dt__mpi_fail(void *user, const char *text) {
    dt__mpi *mpi = (dt__mpi *)user;
    const dt__world *world = dt__world_of(mpi->ctx);
    dt__mpi_tell(mpi,
        world && world->shared->first.status ? world->shared->first.status : dt_error(mpi->ctx),
        text);
}

/* A rank is gone, and with it whatever it was about to do in its machine's range. */
static void dt__mpi_bury(dt__mpi *mpi, int rank, dt_report *report) {
    dt__shared *shared = mpi->node.shared;
    int lower = 0;
    char text[256];
    snprintf(
        text, sizeof text, "%s is gone: its connection was lost", dt__tcp_who(mpi->tcp, rank).s);
    dt__mpi_note(report, DT_ERR_PEER, rank, text);
    mpi->lost = 1;
    for (int other = 0; other < mpi->rank; other++)
        lower += mpi->tcp->peers[other].state <= DT__TCP_ENDED;
    /* one line is enough */
    if (lower == 0) mpi->host->log(mpi->host->user, DT_LOG_ERROR, mpi->rank, text);
    if (!shared || mpi->node.seats[rank] < 0) return;
    __atomic_store_n(&shared->state[mpi->node.seats[rank]].busy, 0, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&shared->claimed, __ATOMIC_SEQ_CST) == rank + 2 && !dt__aborted(shared))
        dt__publish_failure(shared, rank, DT_ERR_PEER, text);
}

/* Has another rank failed? Then its failure becomes the first in this rank's record, where every
   wait sees it. */
static void dt__mpi_look(dt__mpi *mpi) {
    dt__world *world = dt__world_of(mpi->ctx);
    dt__tcp *t = mpi->tcp;
    double now = mpi->host->now(mpi->host->user);
    int lost = -1;
    dt_report report;
    if (mpi->flying) dt__mpi_reap(mpi);
    if (!t || mpi->noticed || now < mpi->next_look) return;
    mpi->next_look = now + DT__MPI_LOOK_S + DT__MPI_LOOK_EACH_S * mpi->size;
    dt__tcp_progress(t);
    for (int rank = mpi->size - 1; rank >= 0; rank--)
        if (t->peers[rank].state > DT__TCP_ENDED) lost = rank;
    if (t->failed && t->first.status)
        report = t->first;
    else if (lost >= 0)
        dt__mpi_bury(mpi, lost, &report);
    else
        return;
    mpi->noticed = 1;
    if (!mpi->first.status) mpi->first = report;
    dt__shared *shared = world ? world->shared : mpi->node.shared;
    if (shared && dt__claim(shared, report.rank))
        dt__publish_failure(shared, report.rank, report.status, report.text);
}

static void dt__mpi_node_look(void *user) { dt__mpi_look((dt__mpi *)user); }

/* ---- test and cancel ---- */

/* A request of this rank could not begin, or MPI gave it up. Always -2: nobody else has failed, as
   far as MPI tells. */
static int dt__mpi_broken(dt__mpi *mpi, dt__mpi_request *r, char *why) {
    if (r->wrong)
        snprintf(why, 512, "%s", r->wrong);
    else
        dt__mpi_why(r->error, why, 512);
    if (r->flies) mpi->flies[r->peer]--;
    if (r->envelope == MPI_REQUEST_NULL && r->content == MPI_REQUEST_NULL)
        dt__mpi_put_back(mpi, r);
    else
        mpi->orphans++; /* MPI has a part of it still */
    return -2;
}

static int dt__mpi_test(
    void *user, void *request, int *from, uint64_t *word, size_t *bytes, char *why) {
    dt__mpi *mpi = (dt__mpi *)user;
    dt__mpi_request *r = (dt__mpi_request *)request;
    MPI_Status status;
    int done = 0, receives = r->peer < 0;
    if (r->wrong || r->error) return dt__mpi_broken(mpi, r, why);
    if (++mpi->turns % DT__MPI_LOOK == 0) dt__mpi_look(mpi);
    r->error = MPI_Test(&r->envelope, &done, &status);
    if (!r->error && !done && r->flies) {
        r->next = mpi->flying;
        mpi->flying = r;
        return 1;
    }
    if (!r->error && done && receives && r->from < 0) dt__mpi_opened(mpi, r, status.MPI_SOURCE);
    int follows = r->content != MPI_REQUEST_NULL;
    if (!r->error && !r->wrong && done && follows) r->error = MPI_Test(&r->content, &done, &status);
    if (r->error || r->wrong) return dt__mpi_broken(mpi, r, why);
    if (!done) return 0;
    if (receives) {
        mpi->balance -= follows;
        *from = r->from;
        *word = r->e.word;
        *bytes = (size_t)r->e.bytes;
    }
    if (r->flies) mpi->flies[r->peer]--;
    dt__mpi_put_back(mpi, r);
    return 1;
}

/* Takes messages that nobody wants, one at a time: their senders wait. In full, for MPICH ends the
   program over a message that it must cut. 1: one began to come; what it is. */
static int dt__mpi_drain(dt__mpi *mpi, MPI_Status *status, MPI_Count *bytes) {
    const dt_host *host = mpi->host;
    int done = 1, there = 0, count = 0;
    MPI_Message message;
    MPI_Datatype type;
    if (mpi->draining != MPI_REQUEST_NULL) MPI_Test(&mpi->draining, &done, MPI_STATUS_IGNORE);
    if (!done) return 0;
    if (mpi->waste) host->free(host->user, mpi->waste, mpi->waste_bytes, DT_MEM_HOST);
    mpi->waste = NULL;
    mpi->draining = MPI_REQUEST_NULL;
    for (int i = 0; i < DT__MPI_COMMS && !there; i++) {
        if (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, mpi->comms[i], &there, status) != MPI_SUCCESS)
            there = 0;
        if (there && MPI_Get_elements_x(status, MPI_BYTE, bytes) != MPI_SUCCESS) there = 0;
        if (!there) continue;
        mpi->waste_bytes = (size_t)*bytes + 1;
        mpi->waste = host->alloc(host->user, mpi->waste_bytes, DT_MEM_HOST);
        if (!mpi->waste || dt__mpi_type((size_t)*bytes, &type, &count) != MPI_SUCCESS) return 0;
        MPI_Improbe(status->MPI_SOURCE, status->MPI_TAG, mpi->comms[i], &there, &message, status);
        if (there) MPI_Imrecv(mpi->waste, count, type, &message, &mpi->draining);
        mpi->balance -= there != 0;
        if (type != MPI_BYTE) MPI_Type_free(&type);
    }
    return there;
}

/* Until *request is over: 1, or 0 after `until` (0: no limit). What the others still send is taken
   if `drain`. */
static int dt__mpi_meet(dt__mpi *mpi, MPI_Request *request, double until, int drain) {
    double nap = DT__NAP_MIN;
    for (int turn = 0;; turn++) {
        int done = 0;
        MPI_Status status;
        MPI_Count bytes;
        if (MPI_Test(request, &done, &mpi->met) != MPI_SUCCESS || done) return 1;
        dt__mpi_look(mpi);
        if (drain && dt__mpi_drain(mpi, &status, &bytes)) continue;
        double now = dt__mpi_now(mpi);
        if (until == 0 && mpi->lost) return 0; /* it will not come */
        if (until == 0 && mpi->first.status) until = now + mpi->timeout_s;
        if (until > 0 && now > until) return 0;
        mpi->host->sleep(mpi->host->user, turn < DT__YIELDS ? 0 : nap);
        if (turn >= DT__YIELDS) nap = nap * 2 < DT__NAP_MAX ? nap * 2 : DT__NAP_MAX;
    }
}

/* This rank has failed, and its buffers are to be its own again. A receive that has not met its
   message can be taken back. Any other ends when the other rank has learned of the failure and
   takes what is sent (dt__mpi_drain); if that does not come within timeout_s, the request is left
   behind. */
static void dt__mpi_cancel(void *user, void *request) {
    dt__mpi *mpi = (dt__mpi *)user;
    dt__mpi_request *r = (dt__mpi_request *)request;
    MPI_Request *parts[2] = { &r->envelope, &r->content };
    if (r->flies && !r->error) {
        r->next = mpi->flying;
        mpi->flying = r;
        return;
    }
    if (r->flies) mpi->flies[r->peer]--;
    if (mpi->patience == 0)
        mpi->patience = dt__mpi_now(mpi) +
                        (mpi->lost ? fmin(DT__MPI_PATIENCE_S, mpi->timeout_s) : mpi->timeout_s);
    for (int i = 0; i < 2; i++) {
        int cancelled = 1, receives = r->peer < 0;
        if (*parts[i] == MPI_REQUEST_NULL) continue;
        if (receives) MPI_Cancel(parts[i]);
        if (!dt__mpi_meet(mpi, parts[i], mpi->patience, 1)) {
            mpi->orphans++;
            return;
        }
        if (receives) MPI_Test_cancelled(&mpi->met, &cancelled);
        mpi->balance -= !cancelled; /* it came */
    }
    dt__mpi_put_back(mpi, r);
}

/* ---- begin and end ---- */

static void dt__mpi_free(dt__mpi *mpi) {
    const dt_host *host = mpi->host;
    if (mpi->waste) host->free(host->user, mpi->waste, mpi->waste_bytes, DT_MEM_HOST);
    host->free(host->user, mpi->flies, (size_t)mpi->size * sizeof(int), DT_MEM_HOST);
    host->free(host->user, mpi->node.seats, 2 * (size_t)mpi->size * sizeof(int), DT_MEM_HOST);
    host->free(host->user, mpi, sizeof *mpi, DT_MEM_HOST);
}

/* Room, and the communicators: each from the one before it, the first from MPI_COMM_WORLD. NULL, or
   what is wrong. */
static const char *dt__mpi_make(dt__mpi *mpi) {
    const dt_host *host = mpi->host;
    size_t size = (size_t)mpi->size;
    int *most = NULL, there = 0;
    mpi->flies = (int *)host->alloc(host->user, size * sizeof(int), DT_MEM_HOST);
    if (!mpi->flies) return "no memory for it";
    memset(mpi->flies, 0, size * sizeof(int));
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &mpi->handler);
    /* MPICH asks this one about dt's requests */
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    double until = dt__mpi_now(mpi) + mpi->timeout_s;
    for (; mpi->made <= DT__MPI_COMMS; mpi->made++) {
        MPI_Comm from = mpi->made ? mpi->comms[mpi->made - 1] : MPI_COMM_WORLD;
        MPI_Comm *to = mpi->made < DT__MPI_COMMS ? &mpi->comms[mpi->made] : &mpi->control;
        MPI_Request request;
        if (MPI_Comm_idup(from, to, &request) != MPI_SUCCESS) return "no communicator";
        if (!dt__mpi_meet(mpi, &request, until, 0))
            return "not all its processes came to dt_run within timeout_s";
        MPI_Comm_set_errhandler(*to, MPI_ERRORS_RETURN);
    }
    if (MPI_Comm_get_attr(mpi->control, MPI_TAG_UB, &most, &there) != MPI_SUCCESS || !there)
        return "no MPI_TAG_UB";
    mpi->tag_span = (int)(((int64_t)*most + 1) / (3 * DT__MPI_SHARES));
    return NULL;
}

/* ---- ranks of one machine ---- */

/* They share a range as forks do, and their collectives are section 14's. Nobody forked them, so
   the first of a machine makes the range, where no process has anything at its addresses; the
   others find it through the first's /proc. If one cannot, none does. Sends and receives stay
   MPI's. */

typedef struct dt__mpi_card { /* what a rank shows all others, in four turns */
    /* which this is, as far as /proc is concerned; 0: this rank shares with none */
    uint64_t machine;
    uint64_t network; /* which loopback this rank has */
    /* of the machine, by dt_run_desc.node_ranks: who has the same shares memory */
    int64_t part;
    int64_t pid, fd, device, inode;
    uint64_t range, shared, bytes; /* of the range; 0: it could not be made */
    int64_t mapped;
    int64_t home; /* the first of those that share memory with this rank */
} dt__mpi_card;

static int dt__mpi_show(dt__mpi *mpi, const dt__mpi_card *mine, dt__mpi_card *all) {
    MPI_Request request;
    double until = dt__mpi_now(mpi) + mpi->timeout_s;
    int bytes = (int)sizeof *mine;
    if (MPI_Iallgather(mine, bytes, MPI_BYTE, all, bytes, MPI_BYTE, mpi->control, &request) !=
        MPI_SUCCESS)
        return 0;
    return dt__mpi_meet(mpi, &request, until, 0);
}

/* A number of this machine, this boot of it, and its names of processes or networks: "pid", "net".
   Never 0. */
static uint64_t dt__mpi_machine(const char *names) {
    char text[512] = "", path[32];
    uint64_t hash = 1469598103934665603u; /* FNV-1a */
    snprintf(path, sizeof path, "/proc/self/ns/%s", names);
    if (gethostname(text, 200) != 0 || readlink(path, text + 200, 100) < 0) return 1;
    int fd = dt__io_open(NULL, "/proc/sys/kernel/random/boot_id", DT_IO_READ);
    ssize_t got = fd < 0 ? 0 : read(fd, text + 300, 100);
    if (fd >= 0) close(fd);
    for (size_t i = 0; i < sizeof text; i++)
        hash = (hash ^ (unsigned char)text[i]) * 1099511628211u;
    return got <= 0 || hash == 0 ? 1 : hash;
}

/* The addresses that it tries are far from where programs, libraries, stacks and sanitizers are. */
static void *dt__mpi_map(int fd, uint64_t address, size_t bytes) {
#ifdef MAP_FIXED_NOREPLACE
    void *want = (void *)(uintptr_t)address;
    void *p = mmap(want, bytes, PROT_READ | PROT_WRITE,
        MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE, fd, 0);
    if (p == want) return p;
    if (p != MAP_FAILED) munmap(p, bytes);
#else
    (void)fd, (void)address, (void)bytes;
#endif
    return NULL;
}

/* The first of n, where `neighbours` ranks share the machine's cores: makes the range. Each rank
   may be bound to a core of its own, so all cores count. */
static void dt__mpi_make_range(
    dt__mpi *mpi, const dt_run_desc *desc, int n, int neighbours, dt__mpi_card *card) {
#ifdef MFD_CLOEXEC
    static const uint64_t places[] = {
#ifdef __SANITIZE_THREAD__ /* its mmap maps reserved addresses at 0, which root may do */
        0x2000000000,
#endif
        0x200000000000, 0x300000000000, 0x100000000000, 0x2000000000
    };
    size_t machine = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    struct stat is;
    dt__shared sizes;
    memset(&sizes, 0, sizeof sizes);
    sizes.ranks = n;
    sizes.apart = 1;
    sizes.timeout_s = desc->timeout_s;
    sizes.spins = neighbours <= (int)sysconf(_SC_NPROCESSORS_ONLN) ? DT__SPINS : 0;
    sizes.first.rank = -1;
    card->fd = dt__io_guard() == 0 ? memfd_create("dt", MFD_CLOEXEC) : -1;
    if (card->fd < 0 || fstat((int)card->fd, &is) != 0) return;
    for (size_t heap = dt__page_up(machine); !mpi->range && heap > (size_t)64 << 20;
         heap = dt__page_up(heap / 4)) {
        sizes.heap_bytes = heap;
        dt__shared_lay(&sizes, NULL, 0);
        if (dt__io_resize(NULL, (int)card->fd, (int64_t)sizes.bytes) != 0) continue;
        for (size_t i = 0; i < sizeof places / sizeof *places && !mpi->range; i++)
            mpi->range = dt__mpi_map((int)card->fd, places[i], sizes.bytes);
    }
    if (!mpi->range) return;
    mpi->range_bytes = sizes.bytes;
    mpi->node.shared = dt__shared_lay(&sizes, (char *)mpi->range, 0);
    dt__group_make(mpi->node.shared, n, "world");
    card->device = (int64_t)is.st_dev;
    card->inode = (int64_t)is.st_ino;
    card->range = (uint64_t)(uintptr_t)mpi->range;
    card->shared = (uint64_t)(uintptr_t)mpi->node.shared;
    card->bytes = sizes.bytes;
#else
    (void)mpi, (void)desc, (void)n, (void)neighbours, (void)card;
#endif
}

/* Any other: finds it. */
static void dt__mpi_find_range(dt__mpi *mpi, const dt__mpi_card *first) {
    char path[64];
    struct stat is;
    if (!first->range) return;
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)first->pid, (long long)first->fd);
    if (dt__io_guard() != 0) return;
    int fd = open(path, O_RDWR | O_CLOEXEC); /* follows /proc's link to the memfd */
    if (fd < 0) return;
    if (fstat(fd, &is) == 0 && (int64_t)is.st_dev == first->device &&
        (int64_t)is.st_ino == first->inode)
        mpi->range = dt__mpi_map(fd, first->range, (size_t)first->bytes);
    close(fd);
    if (!mpi->range) return;
    mpi->range_bytes = (size_t)first->bytes;
    mpi->node.shared = (dt__shared *)(uintptr_t)first->shared;
}

/* (size + 1) cards, of which the last is this rank's. NULL, or what is wrong: that others do not
   come. */
static const char *dt__mpi_share_by(dt__mpi *mpi, const dt_run_desc *desc, dt__mpi_card *all) {
    const char *late = "not all its processes came to dt_run within timeout_s";
    int first = mpi->rank, n = 0, neighbours = 0, mapped = 1;
    dt__mpi_card *mine = &all[mpi->size];
    mine->fd = -1;
    mine->pid = (int64_t)getpid();
    if (desc->node_ranks != 1 && !(desc->host && !desc->host->map) &&
        !(desc->kernels && desc->kernels->alloc))
        mine->machine = dt__mpi_machine("pid");
    mine->network = dt__mpi_machine("net");
    mine->part = desc->node_ranks > 1 ? mpi->rank / desc->node_ranks : 0;
    if (!dt__mpi_show(mpi, mine, all)) return late;
    for (int rank = 0; rank < mpi->size; rank++) {
        int near = mine->machine != 0 && all[rank].machine == mine->machine;
        int here = near && all[rank].part == mine->part;
        neighbours += near;
        mpi->apart += all[rank].network != mine->network;
        if (rank == mpi->rank) mpi->node.seat = n;
        mpi->node.seats[rank] = here ? n : -1;
        if (here && n++ == 0) first = rank;
    }
    if (n > 1 && first == mpi->rank) dt__mpi_make_range(mpi, desc, n, neighbours, mine);
    int shown = dt__mpi_show(mpi, mine, all);
    if (shown && n > 1 && first != mpi->rank) dt__mpi_find_range(mpi, &all[first]);
    mine->mapped = mpi->range != NULL;
    shown = shown && dt__mpi_show(mpi, mine, all);
    if (mine->fd >= 0) close((int)mine->fd);
    if (!shown) return late;
    for (int rank = 0; rank < mpi->size; rank++)
        mapped = mapped && (mpi->node.seats[rank] < 0 || all[rank].mapped);
    if (!mapped) mpi->node.shared = NULL;
    mine->home = mapped ? first : mpi->rank;
    if (!dt__mpi_show(mpi, mine, all)) return late;
    for (int rank = 0; rank < mpi->size; rank++) mpi->node.homes[rank] = (int)all[rank].home;
    if (!mapped && n > 1 && first == mpi->rank)
        mpi->host->log(mpi->host->user, DT_LOG_NOTICE, mpi->rank,
            "ranks on this machine share no memory: their collectives go over MPI");
    return NULL;
}

static const char *dt__mpi_share(dt__mpi *mpi, const dt_run_desc *desc) {
    const dt_host *host = mpi->host;
    size_t bytes = ((size_t)mpi->size + 1) * sizeof(dt__mpi_card);
    dt__mpi_card *all = (dt__mpi_card *)host->alloc(host->user, bytes, DT_MEM_HOST);
    mpi->node.seats =
        (int *)host->alloc(host->user, 2 * (size_t)mpi->size * sizeof(int), DT_MEM_HOST);
    mpi->node.look = dt__mpi_node_look;
    mpi->node.user = mpi;
    if (!all || !mpi->node.seats) return "no memory for it";
    mpi->node.homes = mpi->node.seats + mpi->size;
    memset(all, 0, bytes);
    const char *wrong = dt__mpi_share_by(mpi, desc, all);
    /* else MPI may still write into it */
    if (!wrong) host->free(host->user, all, bytes, DT_MEM_HOST);
    return wrong;
}

/* ---- the connections ---- */

typedef struct dt__mpi_address { /* what rank 0 tells all others */
    dt__tcp_place place;
    uint8_t key[32];
    char why[DT__TCP_TEXT]; /* it has no door */
} dt__mpi_address;

/* Rank 0 opens its door: at desc.rendezvous, or at a free port of the loopback or, if some rank
   could not come there, of the first interface. -1: address->why. */
static int dt__mpi_open_door(dt__mpi *mpi, const dt_run_desc *desc, dt__mpi_address *address) {
    dt__tcp_place *place = &address->place;
    dt_run_desc of = *desc;
    of.ranks = 1; /* no token is needed: the key below is random */
    memset(address, 0, sizeof *address);
    if (desc->rendezvous && !dt__tcp_place_read(desc->rendezvous, place))
        snprintf(address->why, sizeof address->why, "rendezvous '%.200s' is no address and port",
            desc->rendezvous);
    else if (!desc->rendezvous)
        place->address = mpi->apart ? dt__tcp_interface() : htonl(INADDR_LOOPBACK);
    if (place->address == 0 && !address->why[0])
        snprintf(address->why, sizeof address->why,
            "rank 0 finds no address of its machine: give it as rendezvous");
    if (address->why[0] || !dt__tcp_key(&of, *place, address->key, address->why)) return -1;
    uint8_t random[32]; /* MPI may keep messages: send a one-time key, not the token's */
    ssize_t got = getrandom(random, sizeof random, 0);
    dt__hmac(address->key, sizeof address->key, random, sizeof random, address->key);
    dt__wipe(random, sizeof random);
    if (got != (ssize_t)sizeof random)
        return snprintf(address->why, sizeof address->why,
                   "the system gives no random numbers (error %d)", errno),
               -1;
    int fd = dt__tcp_listen(*place, DT__TCP_BACKLOG);
    if (fd >= 0)
        place->port = dt__tcp_own_place(fd).port;
    else
        snprintf(address->why, sizeof address->why, "rank 0 cannot listen at %s (error %d)",
            dt__tcp_place_text(*place).s, errno);
    return fd;
}

static int dt__mpi_told(dt_ctx *ctx, dt_status status, const char *text, void *user) {
    (void)ctx, (void)status, (void)text, (void)user;
    return 1;
}

/* NULL, or what is wrong. */
static const char *dt__mpi_connect(dt__mpi *mpi, const dt_run_desc *desc) {
    const dt_host *host = mpi->host;
    MPI_Request request;
    dt_run_desc of = *desc;
    dt_ctx_desc quiet;
    int fd = -1;
    memset(&quiet, 0, sizeof quiet);
    quiet.rank = mpi->rank;
    quiet.host = host;
    /* it computes nothing: a queue of its own would be device 0's on every rank */
    quiet.kernels = dt_kernels_cpu();
    mpi->quiet = dt_ctx_make(quiet);
    dt__mpi_address got,
        *address = (dt__mpi_address *)host->alloc(host->user, sizeof *address, DT_MEM_HOST);
    if (!mpi->quiet || !address) return "no memory for it";
    mpi->listener.failed = dt__mpi_told;
    dt_listen(mpi->quiet, &mpi->listener);
    if (mpi->rank == 0) fd = dt__mpi_open_door(mpi, desc, address);
    int error = MPI_Ibcast(address, (int)sizeof *address, MPI_BYTE, 0, mpi->control, &request);
    if (error || !dt__mpi_meet(mpi, &request, dt__mpi_now(mpi) + mpi->timeout_s, 0)) {
        if (fd >= 0) close(fd);
        /* and MPI may still write there */
        return "not all its processes came to dt_run within timeout_s";
    }
    got = *address;
    dt__wipe(address, sizeof *address);
    host->free(host->user, address, sizeof *address, DT_MEM_HOST);
    of.ranks = mpi->size;
    of.rank = mpi->rank;
    if (got.why[0])
        dt_fail(mpi->quiet, DT_ERR_COMM, "%s", got.why);
    else
        mpi->tcp = dt__tcp_make(mpi->quiet, &of, got.place, got.key, fd);
    dt__wipe(got.key, sizeof got.key);
    return mpi->tcp ? NULL : dt_error_text(mpi->quiet);
}

/* After the last meeting. */
static void dt__mpi_disconnect(dt__mpi *mpi) {
    if (mpi->tcp) {
        dt__tcp_goodbye(mpi->tcp);
        dt__tcp_free(mpi->tcp);
    }
    if (mpi->quiet) dt_unlisten(mpi->quiet, &mpi->listener);
    dt_ctx_free(mpi->quiet);
    mpi->tcp = NULL;
    mpi->quiet = NULL;
}

/* The launcher's processes become ranks. NULL, and *why. */
static dt__mpi *dt__mpi_open(const dt_host *host, const dt_run_desc *desc, const char **why) {
    int running = 0, over = 0, provided = 0;
    dt__mpi *mpi = (dt__mpi *)host->alloc(host->user, sizeof *mpi, DT_MEM_HOST);
    *why = "no memory for it";
    if (!mpi) return NULL;
    memset(mpi, 0, sizeof *mpi);
    mpi->host = host;
    mpi->timeout_s = desc->timeout_s;
    mpi->watch = dt__stopwatch_start(host, mpi->timeout_s);
    mpi->draining = MPI_REQUEST_NULL;
    MPI_Initialized(&running);
    MPI_Finalized(&over);
    *why =
        "it has ended in this process: a program that runs ranks twice begins and ends MPI itself";
    if (!over && !running) {
        *why = "MPI_Init_thread fails";
        mpi->initialized =
            MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) == MPI_SUCCESS;
    }
    if (!over && (running || mpi->initialized)) {
        MPI_Comm_rank(MPI_COMM_WORLD, &mpi->rank);
        MPI_Comm_size(MPI_COMM_WORLD, &mpi->size);
        *why = dt__mpi_make(mpi);
        if (!*why) *why = dt__mpi_share(mpi, desc);
        if (!*why) *why = dt__mpi_connect(mpi, desc);
        if (!*why) return mpi;
    }
    /* else MPI may still write into it */
    if (!mpi->size) host->free(host->user, mpi, sizeof *mpi, DT_MEM_HOST);
    return NULL;
}

/* Until this rank knows what failed. If that is a message which nobody received, then who did not
   finds it on its way and tells the others. */
static void dt__mpi_hear(dt__mpi *mpi, double until, int lost) {
    const dt_host *host = mpi->host;
    char text[512];
    MPI_Status status;
    MPI_Count bytes = 0;
    while (!mpi->first.status && dt__mpi_now(mpi) < until) {
        dt__mpi_look(mpi);
        int there = dt__mpi_drain(mpi, &status, &bytes);
        if (!there) host->sleep(host->user, DT__NAP_MIN);
        if (!there || !lost || mpi->first.status || status.MPI_TAG / mpi->tag_span % 3 == 2)
            continue;
        if (!dt__mpi_meet(mpi, &mpi->draining, until, 0)) break;
        const dt__mpi_envelope *e = (const dt__mpi_envelope *)mpi->waste;
        snprintf(text, sizeof text,
            "rank %d: ended without receiving a message of rank %d of %llu bytes with tag %d",
            mpi->rank, status.MPI_SOURCE, (unsigned long long)e->bytes,
            status.MPI_TAG % mpi->tag_span);
        dt__mpi_tell(mpi, DT_ERR_COMM, text);
        host->log(host->user, DT_LOG_ERROR, mpi->rank, text);
    }
    if (!mpi->first.status)
        dt__mpi_note(&mpi->first, DT_ERR_COMM, -1, "a message was never received");
}

/* All ranks have ended: they learn whether one failed, and whether every message was received. As
   with threads, who ends first waits for the others as long as they run; after a failure at most
   timeout_s. 0: not all came. */
static int dt__mpi_last_meeting(dt__mpi *mpi) {
    MPI_Request request = MPI_REQUEST_NULL;
    int failed = mpi->first.status != DT_OK;
    if (mpi->lost) return 0;
    mpi->mine[0] = failed;
    mpi->mine[1] = mpi->balance;
    MPI_Iallreduce(mpi->mine, mpi->all, 2, MPI_INT64_T, MPI_SUM, mpi->control, &request);
    if (!dt__mpi_meet(mpi, &request, 0, failed)) return 0;
    if (mpi->all[0] == 0 && mpi->all[1] == 0) return 1;
    double until = dt__mpi_now(mpi) + mpi->timeout_s;
    dt__mpi_hear(mpi, until, mpi->all[0] == 0);
    /* the next run must not get a message that is on its way */
    for (int round = 0; round < DT__MPI_ROUNDS; round++) {
        mpi->mine[1] = mpi->balance;
        MPI_Iallreduce(
            &mpi->mine[1], &mpi->all[1], 1, MPI_INT64_T, MPI_SUM, mpi->control, &request);
        if (!dt__mpi_meet(mpi, &request, until, 1)) return 0;
        if (mpi->all[1] == 0) break;
        mpi->host->sleep(mpi->host->user, DT__NAP_MAX);
    }
    return 1;
}

/* Ends what is under way on the communicators: 1 if nothing is left. */
static int dt__mpi_settle(dt__mpi *mpi) {
    double until = dt__mpi_now(mpi) + mpi->timeout_s;
    int settled = mpi->orphans == 0;
    while (mpi->flying && settled) {
        settled = dt__mpi_meet(mpi, &mpi->flying->envelope, until, 1);
        dt__mpi_reap(mpi);
    }
    if (settled && mpi->draining != MPI_REQUEST_NULL)
        settled = dt__mpi_meet(mpi, &mpi->draining, until, 1);
    return settled;
}

/* The rank has detached. If another rank cannot be brought to its end, MPI is left as it is: ending
   it would wait for that rank for ever, and the launcher ends what is left once this process has
   ended with an error. 1: MPI has nothing of this rank's any more. */
static int dt__mpi_close(dt__mpi *mpi, dt_report *report) {
    int met = dt__mpi_last_meeting(mpi), settled = met && dt__mpi_settle(mpi);
    dt__mpi_disconnect(mpi);
    for (int i = 0; i < DT__MPI_COMMS && settled; i++) MPI_Comm_free(&mpi->comms[i]);
    if (settled) MPI_Comm_free(&mpi->control);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, mpi->handler);
    MPI_Errhandler_free(&mpi->handler);
    if (settled && mpi->initialized) MPI_Finalize();
    if (!met && !mpi->first.status)
        dt__mpi_note(&mpi->first, DT_ERR_PEER, -1, "dt_run: not all ranks ended");
    *report = mpi->first;
    if (!settled) { /* MPI may still read and write these */
        mpi->host->log(mpi->host->user, DT_LOG_NOTICE, mpi->rank,
            "MPI is not ended: not all ranks came to an end");
        return 0;
    }
    while (mpi->idle) {
        dt__mpi_request *r = mpi->idle;
        mpi->idle = r->next;
        dt_free(mpi->ctx, DT_MEM_HOST, r, sizeof *r);
    }
    dt__mpi_free(mpi);
    return 1;
}

#endif /* DT_USE_MPI */

// ==== 26. NCCL ==================================================================================

#ifdef DT_USE_NCCL

/* Ranks with a GPU each. What lies in the devices' memory and is large goes through NCCL; the rest
   as over tcp: scalars, comparisons, what the ranks say of themselves, failures, messages of up to
   DT_EAGER_BYTES.

   A lane is an ncclComm with a queue of its own on the device. Each group has one, split from that
   of the group which it was split from. So has each direction between two ranks that send each
   other messages, from the first one on.

   A collective is put into the lane's queue behind a mark in the rank's own, which has what it
   reads; in the order of the group's calls, so it is the same on all ranks. For the host it is over
   as soon as it is in the queue: section 17 says how it lands.

   A message. NCCL knows no tags: what one rank sends another arrives in the order in which it was
   sent. So

       sender      "here is a message", and the lane's id    as any message: by group, tag, any rank
       receiver                                              "it is number 5 of the lane"
       both        ncclSend and ncclRecv, number after number

   The lane's order is the one in which the receiver asked; no message waits behind another that
   nobody wants.

   Sums. NCCL rounds to the type at every hop. Sums of bf16 and f16 by more than two ranks are taken
   in f32, through windows in memory of the lane, and rounded once, as everywhere. The order of a
   sum is NCCL's own.

   KNOWN LIMIT. A kernel of NCCL holds its place on the device until the other ranks' kernels of the
   same operation run. So operations of different groups that ranks start in different orders need
   room beside each other, which NCCL does not promise: its rule for several communicators is one
   order on all ranks. Start what may be under way at once in one order; NCCL 2.26 and later can
   then hold the device to it too: NCCL_LAUNCH_ORDER_IMPLICIT=1.

   Communicators do not block: a call may answer ncclInProgress, and until ncclCommGetAsyncError
   says that it is done nobody touches the communicator. After a failure all of them are aborted,
   which ends what hangs in the device.

   docs.nvidia.com/deeplearning/nccl, "Communicators", "Fault tolerance", "Group calls". */

/* The functions that are used: linked, or with DT_NCCL_DLOPEN looked up in libnccl.so.2 when a run
   begins. */
#define DT__NCCL_FUNCTIONS(X) \
    X(GetUniqueId) \
    X(CommInitRankConfig) \
    X(CommSplit) \
    X(CommGetAsyncError) \
    X(CommFinalize) \
    X(CommDestroy) \
    X(CommAbort) \
    X(GetErrorString) \
    X(GetLastError) \
    X(AllReduce) \
    X(Reduce) \
    X(ReduceScatter) \
    X(AllGather) \
    X(Broadcast) \
    X(Send) \
    X(Recv) \
    X(GroupStart) \
    X(GroupEnd)

typedef struct dt__nccl_functions {
#define DT__NCCL_POINTER(name) __typeof__(&nccl##name) name;
    DT__NCCL_FUNCTIONS(DT__NCCL_POINTER)
#undef DT__NCCL_POINTER
} dt__nccl_functions;

typedef struct dt__lane {
    ncclComm_t comm;
    void *queue;
    int busy;        /* a call on comm is in progress */
    int borrowed;    /* comm is the caller's */
    uint64_t done;   /* operations in the queue: the next is that one's turn */
    uint64_t asked;  /* of messages: taken by this receiver so far */
    ncclUniqueId id; /* of messages: what both of its ranks begin with */
    int has_id;
    float *wide; /* (DT_NCCL_WIDE) for sums of 16-bit numbers */
} dt__lane;

#ifndef DT_NCCL_WIDE
#define DT_NCCL_WIDE (4 << 20) /* elements of that window */
#endif
#ifndef DT_NCCL_LEAST
#define DT_NCCL_LEAST DT_EAGER_BYTES /* larger messages go by NCCL */
#endif

typedef struct dt__nccl {
    dt__nccl_functions call;
    dt__lane world;  /* the first group's lane */
    dt__lane *lanes; /* (2 * ranks): to each rank, from each */
} dt__nccl;

static size_t dt__nccl_bytes(const dt__world *world) {
    return sizeof(dt__nccl) + 2 * (size_t)world->comm->place.size * sizeof(dt__lane);
}

/* ---- lanes ---- */

/* Always 0, with the context failed. */
static int dt__nccl_fail(
    dt__world *world, const dt__lane *lane, const char *what, ncclResult_t result) {
    const dt__nccl *nccl = world->nccl;
    const char *more = nccl->call.GetLastError(lane ? lane->comm : NULL);
    dt__comm_fail(world, DT_ERR_COMM, "NCCL: %s: %s%s%s", what, nccl->call.GetErrorString(result),
        more && more[0] ? ": " : "", more ? more : "");
    return 0;
}

/* What a call on the lane's communicator answered: 1 it is done, or goes on; 0 with the context
   failed. */
static int dt__lane_called(
    dt__world *world, dt__lane *lane, const char *what, ncclResult_t result) {
    lane->busy = result == ncclInProgress;
    return result == ncclSuccess || lane->busy || dt__nccl_fail(world, lane, what, result);
}

/* 1: nothing goes on there, the next call may come; 0: not yet, or the context has failed. */
static int dt__lane_free(dt__world *world, dt__lane *lane) {
    ncclResult_t state = ncclSuccess;
    if (!lane->busy) return 1;
    ncclResult_t result = world->nccl->call.CommGetAsyncError(lane->comm, &state);
    if (result != ncclSuccess) return dt__nccl_fail(world, lane, "ncclCommGetAsyncError", result);
    if (state == ncclInProgress) return 0;
    return dt__lane_called(world, lane, "a communicator", state);
}

/* A lane's queue, on the rank's device. */
static int dt__lane_open(dt__world *world, dt__lane *lane) {
    char why[160] = "";
    dt_cuda_desc desc = { dt_cuda_device(dt_ctx_stream(world->ctx)), NULL, 1 };
    if (!lane->queue) lane->queue = dt_cuda_open(desc, why, sizeof why);
    if (!lane->queue) dt__comm_fail(world, DT_ERR_DEVICE, "a queue for NCCL: %s", why);
    return lane->queue != NULL;
}

static ncclConfig_t dt__nccl_config(void) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    return config;
}

/* The lane's communicator begins; dt__lane_free tells when it can be used. */
static int dt__lane_join(dt__world *world, dt__lane *lane, ncclUniqueId id, int rank, int size) {
    ncclConfig_t config = dt__nccl_config();
    if (!dt__lane_open(world, lane)) return 0;
    return dt__lane_called(world, lane, "ncclCommInitRankConfig",
        world->nccl->call.CommInitRankConfig(&lane->comm, size, id, rank, &config));
}

static void dt__lane_close(dt__world *world, dt__lane *lane) {
    if (lane->comm && !lane->borrowed) world->nccl->call.CommDestroy(lane->comm);
    dt_free(world->ctx, DT_MEM_COMM, lane->wide, DT_NCCL_WIDE * sizeof(float));
    dt_cuda_close(lane->queue);
    memset(lane, 0, sizeof *lane);
}

/* ncclCommDestroy waits for the others as long as they take; this wait has a limit. */
static int dt__lane_finished(dt_work *work) {
    dt__world *world = work->comm->world;
    dt__lane *lane = work->lane;
    if (!dt__lane_free(world, lane)) return DT__NOT_YET;
    if (work->stage++ == 0 && lane->comm && !lane->borrowed)
        dt__lane_called(
            world, lane, "ncclCommFinalize", world->nccl->call.CommFinalize(lane->comm));
    return lane->busy ? DT__NOT_YET : 0;
}

/* A wait of section 12 for what goes on in a lane: until step says that there is no more. */
static void dt__lane_wait(dt_comm *comm, dt__lane *lane, int (*step)(dt_work *work)) {
    dt__world *world = comm->world;
    dt__call call = dt__call_make(DT__SPLIT, NULL, NULL, 0, DT_I32);
    double begin = -1;
    if (dt_error(world->ctx)) return;
    call.host = 1;
    dt_work *work = dt__work_take(comm, &call);
    if (!work) return;
    work->lane = lane;
    work->apart = 1;
    work->algorithm = step;
    work->number = (uint64_t)world->state->records;
    dt__drive(world, work, &begin);
    dt__work_release(world, work);
}

/* The others may have failed, and a communicator does not learn of it. */
static void dt__others_look(dt__world *world) {
    char why[512] = "";
    int answer = world->control && world->control->look
                     ? world->control->look(world->control->user, why)
                     : 0;
    if (answer < 0)
        dt__comm_fail(world, DT_ERR_PEER, answer == -3 ? "peer failed first: %s" : "%s", why);
}

static int dt__lane_joined(dt_work *work) {
    dt__world *world = work->comm->world;
    if (dt__lane_free(world, work->lane)) return 0;
    if (dt_error(world->ctx) == DT_OK) dt__others_look(world);
    return DT__NOT_YET;
}

/* ---- a group's collectives ---- */

static ncclDataType_t dt__nccl_type(dt_dtype dtype) {
    switch (dtype) {
    case DT_BF16: return ncclBfloat16;
    case DT_F16: return ncclFloat16;
    case DT_I32: return ncclInt32;
    case DT_F64: return ncclFloat64;
    default: return ncclFloat32;
    }
}

static ncclRedOp_t dt__nccl_op(dt_op op) {
    switch (op) {
    case DT_AVG: return ncclAvg;
    case DT_MAX: return ncclMax;
    case DT_MIN: return ncclMin;
    case DT_PROD: return ncclProd;
    default: return ncclSum;
    }
}

/* Is it a sum that must not be rounded on its way? One of two terms is rounded once. */
static int dt__goes_wide(const dt_comm *comm, const dt__call *call) {
    return dt__pattern_of(call->op)->sums && dt__narrow(call->dtype) && comm->place.size > 2 &&
           call->redop != DT_MAX && call->redop != DT_MIN;
}

/* The window's elements of each share, between the call's buffer and the lane's, in the lane's
   queue. */
static void dt__nccl_cast(dt_work *work, int back) {
    const dt__call *call = &work->call;
    const dt_kernels *kernels = dt_ctx_kernels(work->comm->world->ctx);
    int whole = !back && dt__pattern_of(call->op)->cut, me = work->comm->place.rank;
    int first = call->op == DT__REDUCE_SCATTER && back ? me : 0;
    size_t n = call->count - work->at < work->run ? call->count - work->at : work->run;
    for (int i = 0; i < (whole ? work->comm->place.size : 1); i++) {
        char *buf = (char *)(back ? call->recv : (void *)call->send);
        void *narrow =
            buf + ((whole ? (size_t)i * call->count : 0) + work->at) * dt_dtype_size(call->dtype);
        void *wide = work->lane->wide + (size_t)(first + i) * n;
        dt_cast_args a = { back ? call->dtype : DT_F32, back ? DT_F32 : call->dtype,
            back ? narrow : wide, back ? wide : narrow, n, 0 };
        dt_status status =
            kernels->cast ? kernels->cast(&a, work->lane->queue) : DT_ERR_UNSUPPORTED;
        if (status) dt__data_failed(work->comm, call, status);
    }
}

/* Gather, scatter and all-to-all: what the pattern says goes from each to each, all at once. */
static ncclResult_t dt__nccl_each(dt_work *work, void *stream) {
    const dt_comm *comm = work->comm;
    const dt__call *c = &work->call;
    const dt__pattern *pattern = dt__pattern_of(c->op);
    const dt__nccl_functions *call = &comm->world->nccl->call;
    ncclDataType_t type = dt__nccl_type(c->dtype);
    ncclResult_t result = call->GroupStart();
    int v = c->op == DT__ALL_TO_ALL_V;
    for (int other = 0; other < comm->place.size; other++) {
        int to = dt__sends(comm, c) && (pattern->all_recv || other == c->peer);
        int of = dt__receives(comm, c) && (pattern->all_send || other == c->peer);
        size_t out = v ? c->send_counts[other] : c->count,
               in = v ? c->recv_counts[other] : c->count;
        size_t from = v              ? dt__sum_of(c->send_counts, other)
                      : pattern->cut ? (size_t)other * c->count
                                     : 0;
        size_t at = v                   ? dt__sum_of(c->recv_counts, other)
                    : pattern->all_send ? (size_t)other * c->count
                                        : 0;
        if (other == comm->place.rank &&
            dt__element(work, c->send, from) == dt__element(work, c->recv, at))
            continue;
        if (to && out > 0 && result == ncclSuccess)
            result = call->Send(dt__element(work, c->send, from), out, type, other,
                work->lane->comm, (cudaStream_t)stream);
        if (of && in > 0 && result == ncclSuccess)
            result = call->Recv(dt__element(work, c->recv, at), in, type, other, work->lane->comm,
                (cudaStream_t)stream);
        if (result == ncclInProgress) result = ncclSuccess; /* the group's end tells */
    }
    ncclResult_t end = call->GroupEnd();
    return result == ncclSuccess ? end : result;
}

/* One window of a collective goes into the lane's queue. */
static ncclResult_t dt__nccl_issue(dt_work *work, int wide) {
    const dt__call *c = &work->call;
    const dt__nccl_functions *call = &work->comm->world->nccl->call;
    const void *send = wide ? work->lane->wide : c->send;
    size_t n = c->count - work->at < work->run ? c->count - work->at : work->run;
    void *recv = wide ? work->lane->wide : c->recv;
    ncclDataType_t type = dt__nccl_type(wide ? DT_F32 : c->dtype);
    ncclRedOp_t op = dt__nccl_op(c->redop);
    ncclComm_t comm = work->lane->comm;
    cudaStream_t stream = (cudaStream_t)dt_cuda_stream(work->lane->queue);
    switch (c->op) {
    case DT__ALL_REDUCE: return call->AllReduce(send, recv, n, type, op, comm, stream);
    case DT__REDUCE: return call->Reduce(send, recv, n, type, op, c->peer, comm, stream);
    case DT__REDUCE_SCATTER:
        if (wide) recv = work->lane->wide + (size_t)work->comm->place.rank * n;
        return call->ReduceScatter(send, recv, n, type, op, comm, stream);
    case DT__ALL_GATHER: return call->AllGather(send, recv, n, type, comm, stream);
    case DT__BROADCAST: return call->Broadcast(recv, recv, n, type, c->peer, comm, stream);
    default: return dt__nccl_each(work, stream);
    }
}

/* A mark in the rank's own queue, when an operation is called: what it reads is there, and what it
   overwrites was read. Not later: by then the queue may wait for what other ranks send after this
   operation. With NULL it has failed. */
static void *dt__nccl_called(dt_work *work, void *mark) {
    dt_ctx *ctx = work->comm->world->ctx;
    void *made = dt_ctx_kernels(ctx)->mark(dt_ctx_stream(ctx), mark);
    if (!made) dt__data_failed(work->comm, &work->call, DT_ERR_DEVICE);
    return made ? made : mark;
}

/* The lane's queue waits for that. 0: the context has failed. */
static int dt__lane_follow(dt_work *work, dt__lane *lane, void *mark) {
    dt_status status = dt_ctx_kernels(work->comm->world->ctx)->after(lane->queue, mark);
    if (status) dt__data_failed(work->comm, &work->call, status);
    return !status;
}

/* And the mark is set behind all that the lane holds. */
static int dt__lane_mark(dt_work *work, dt__lane *lane) {
    void *mark = dt_ctx_kernels(work->comm->world->ctx)->mark(lane->queue, work->mark);
    if (mark)
        work->mark = mark;
    else
        dt__data_failed(work->comm, &work->call, DT_ERR_DEVICE);
    work->flies = 1;
    return mark != NULL;
}

/* stage 0: begins, in its turn; 1: a window is in the queue; 2: all are. */
static int dt__nccl_collective(dt_work *work) {
    dt_comm *comm = work->comm;
    dt__lane *lane = work->lane;
    int wide = dt__goes_wide(comm, &work->call), sum_here = dt__receives(comm, &work->call);
    size_t shares = dt__pattern_of(work->call.op)->cut ? (size_t)comm->place.size : 1;
    if (work->turn != lane->done + 1) return DT__NOT_YET;
    while (dt__lane_free(comm->world, lane) && dt_error(comm->world->ctx) == DT_OK) {
        if (work->stage == 0) {
            if (!dt__lane_follow(work, lane, work->mark)) return 0;
            work->run = wide ? DT_NCCL_WIDE / shares : work->call.count + 1;
        } else {
            if (wide && sum_here) dt__nccl_cast(work, 1);
            work->at += work->run;
            if (work->at >= work->call.count) {
                lane->done++;
                dt__lane_mark(work, lane);
                return 0;
            }
        }
        work->stage = 1;
        if (wide) dt__nccl_cast(work, 0);
        dt__lane_called(
            comm->world, lane, dt__pattern_of(work->call.op)->name, dt__nccl_issue(work, wide));
    }
    return DT__NOT_YET;
}

/* What the group's lane does: all on the device that moves data. */
static int (*dt__nccl_algorithm(const dt_comm *comm, const dt__call *call))(dt_work *work) {
    dt__lane *lane = comm->lane;
    if (call->host || !lane || dt__is_to_one(call->op) || !dt__pattern_of(call->op)->counted)
        return NULL;
    if (call->count == 0 && call->op != DT__ALL_TO_ALL_V) return NULL;
    if (dt__goes_wide(comm, call) && !lane->wide)
        lane->wide = (float *)dt_alloc(
            comm->world->ctx, DT_MEM_COMM, DT_NCCL_WIDE * sizeof(float), "sums in f32");
    return dt__nccl_collective;
}

static void dt__nccl_begun(dt_work *work) {
    work->lane = work->comm->lane;
    work->turn = ++work->comm->begun;
    work->mark = dt__nccl_called(work, work->mark);
}

/* ---- messages ---- */

static dt__lane *dt__lane_of(dt_work *work, const dt__part *part) {
    dt__nccl *nccl = work->comm->world->nccl;
    return &nccl->lanes[2 * work->comm->group->ranks[part->peer] + (part->op == DT__RECV)];
}

/* Where the receiver answers. */
static dt__address dt__nccl_back(const dt_work *work, const dt__part *part) {
    dt__address a = dt__address_of(work, part);
    a.channel |= 0x80000000u;
    return a;
}

/* A sender announces the message. */
static int dt__nccl_announce(dt_work *work, dt__part *part) {
    dt__world *world = work->comm->world;
    dt__lane *lane = dt__lane_of(work, part);
    ncclResult_t result = lane->has_id ? ncclSuccess : world->nccl->call.GetUniqueId(&lane->id);
    if (result != ncclSuccess) return dt__nccl_fail(world, NULL, "ncclGetUniqueId", result) - 1;
    lane->has_id = 1;
    return dt__transport_take(
        work, part, dt__address_of(work, part), 1, &lane->id, sizeof lane->id);
}

/* The announcement has come: the message has a number, and the lane a beginning. */
static int dt__nccl_accept(dt_work *work, dt__part *part, dt__arrival *came) {
    if (came->bytes == sizeof(ncclUniqueId))
        came->bytes = part->count * dt_dtype_size(work->call.dtype);
    if (dt__transport_got(work, part, came) < 0) return -1;
    dt__lane *lane = dt__lane_of(work, part);
    if (!lane->has_id) memcpy(&lane->id, part->card, sizeof lane->id);
    lane->has_id = 1;
    part->turn = lane->asked++;
    return dt__transport_take(
        work, part, dt__nccl_back(work, part), 1, &part->turn, sizeof part->turn);
}

/* NCCL's part, in the lane's turn. 1: it is in the queue. */
static int dt__nccl_move(dt_work *work, dt__part *part) {
    dt__world *world = work->comm->world;
    const dt__nccl_functions *call = &world->nccl->call;
    dt__lane *lane = dt__lane_of(work, part);
    ncclDataType_t type = dt__nccl_type(work->call.dtype);
    int sends = part->op == DT__SEND;
    if (!lane->comm && !dt__lane_join(world, lane, lane->id, sends ? 0 : 1, 2)) return -1;
    if (part->turn != lane->done || !dt__lane_free(world, lane))
        return dt_error(world->ctx) ? -1 : 0;
    if (!dt__lane_follow(work, lane, part->mark)) return -1;
    cudaStream_t stream = (cudaStream_t)dt_cuda_stream(lane->queue);
    ncclResult_t result = sends ? call->Send(part->send, part->count, type, 1, lane->comm, stream)
                                : call->Recv(part->recv, part->count, type, 0, lane->comm, stream);
    return dt__lane_called(world, lane, sends ? "ncclSend" : "ncclRecv", result) ? 1 : -1;
}

/* It is on its way. An algorithm's next round uses what this one brings: the rank's queue waits. */
static int dt__nccl_moved(dt_work *work, dt__part *part) {
    dt__world *world = work->comm->world;
    dt__lane *lane = dt__lane_of(work, part);
    if (!dt__lane_free(world, lane)) return dt_error(world->ctx) ? -1 : 0;
    lane->done++;
    work->lane = lane;
    if (!dt__lane_mark(work, lane)) return -1;
    if (work->algorithm &&
        dt_ctx_kernels(world->ctx)->after(dt_ctx_stream(world->ctx), work->mark) != DT_OK)
        return dt__data_failed(work->comm, &work->call, DT_ERR_DEVICE), -1;
    return 1;
}

static int dt__nccl_begin_message(dt_work *work, dt__part *part) {
    dt__world *world = work->comm->world;
    if (!part->called) {
        dt__mail_enter(work, part);
        part->mark = dt__nccl_called(work, part->mark);
        if (part->op == DT__RECV)
            part->card = dt_alloc(world->ctx, DT_MEM_HOST, DT__CARD_BYTES, "an announcement");
        if (dt_error(world->ctx) != DT_OK) return -1;
    }
    if (!dt__mail_begins(work, part)) return 0;
    return part->op == DT__SEND ? dt__nccl_announce(work, part)
                                : dt__transport_take(work, part, dt__address_of(work, part), 0,
                                      part->card, DT__CARD_BYTES);
}

/* States of a part: 0 to be begun, 1 the announcement is under way, 2 the answer, 3 it may go, 4 it
   goes. */
static int dt__nccl_message(dt_work *work, dt__part *part) {
    dt__world *world = work->comm->world;
    size_t bytes = part->count * dt_dtype_size(work->call.dtype);
    int sends = part->op == DT__SEND, self = part->peer == work->comm->place.rank;
    dt__arrival came = { DT_ANY, 0, DT__CARD_BYTES };
    if (!dt__on_device(work) || bytes <= DT_NCCL_LEAST || self)
        return dt__transport_message(work, part);
    if (part->state == 0) {
        int begun = dt__nccl_begin_message(work, part);
        if (begun <= 0) return begun;
        part->state = 1;
    }
    if (part->state == 1) {
        int done = dt__transport_over(work, part, &came);
        if (done <= 0) return done;
        done = sends ? dt__transport_take(
                           work, part, dt__nccl_back(work, part), 0, &part->turn, sizeof part->turn)
                     : dt__nccl_accept(work, part, &came);
        if (done < 0) return -1;
        part->state = 2;
    }
    if (part->state == 2) {
        int done = dt__transport_over(work, part, &came);
        if (done <= 0) return done;
        if (sends && world->others) world->others[work->comm->group->ranks[part->peer]].got++;
        dt_free(world->ctx, DT_MEM_HOST, part->card, DT__CARD_BYTES);
        part->card = NULL;
        part->state = 3;
    }
    int moves = part->state == 3 ? dt__nccl_move(work, part) : 1;
    if (moves <= 0) return moves;
    part->state = 4;
    moves = dt__nccl_moved(work, part);
    if (moves > 0) dt__part_end(work, part);
    return moves;
}

/* ---- groups ---- */

/* Of a group that has a lane all ranks come: those of each color get a lane, unless they are
   alone. */
static void dt__nccl_split(dt_comm *comm, dt_comm *made, int color) {
    dt__world *world = comm->world;
    ncclConfig_t config = dt__nccl_config();
    int several = made && made->place.size > 1;
    if (!comm->lane || dt_error(world->ctx)) return;
    /* nothing else may be under way on a communicator that is split */
    dt__on_settle(world->ctx, 0, world);
    dt__lane *lane =
        several ? (dt__lane *)dt_alloc(world->ctx, DT_MEM_HOST, sizeof *lane, "a lane of NCCL")
                : NULL;
    if (several && !lane) return;
    ncclComm_t child = NULL;
    if (lane) memset(lane, 0, sizeof *lane);
    if (lane) made->lane = lane;
    if (lane && !dt__lane_open(world, lane)) return;
    ncclResult_t result =
        world->nccl->call.CommSplit(comm->lane->comm, several ? color : NCCL_SPLIT_NOCOLOR,
            several ? made->place.rank : 0, lane ? &lane->comm : &child, &config);
    if (!dt__lane_called(world, comm->lane, "ncclCommSplit", result)) return;
    comm->lane->busy = 1; /* NCCL 2.28 says ncclSuccess to a split that goes on */
    dt__lane_wait(comm, comm->lane, dt__lane_joined);
    if (!lane || dt_error(world->ctx)) return;
    lane->busy = 1;
    dt__lane_wait(comm, lane, dt__lane_joined);
}

static void dt__nccl_free(dt__world *world) {
    dt__nccl *nccl = world->nccl;
    for (int i = 0; i < 2 * world->comm->place.size; i++) dt__lane_close(world, &nccl->lanes[i]);
    world->nccl = NULL;
    dt_free(world->ctx, DT_MEM_HOST, nccl, dt__nccl_bytes(world));
}

/* A group ends; the first of all is the last to. */
static void dt__nccl_close(dt_comm *comm) {
    dt__world *world = comm->world;
    if (comm->lane) {
        dt__lane_wait(comm, comm->lane, dt__lane_finished);
        dt__lane_close(world, comm->lane);
        if (comm->lane != &world->nccl->world)
            dt_free(world->ctx, DT_MEM_HOST, comm->lane, sizeof *comm->lane);
        comm->lane = NULL;
    }
    if (world->nccl && comm == world->comm) dt__nccl_free(world);
}

/* The context has failed: what hangs in the device ends. In one group, because an abort frees
   memory, for which all of the device has to be idle (from NCCL 2.22 on; before, the end of the
   first may wait for the second). */
static void dt__nccl_abort(dt__world *world) {
    dt__nccl *nccl = world->nccl;
    nccl->call.GroupStart();
    for (dt_comm *comm = world->comms; comm; comm = comm->next) {
        if (comm->lane && comm->lane->comm) nccl->call.CommAbort(comm->lane->comm);
        if (comm->lane) comm->lane->comm = NULL;
    }
    for (int i = 0; i < 2 * world->comm->place.size; i++) {
        if (nccl->lanes[i].comm) nccl->call.CommAbort(nccl->lanes[i].comm);
        nccl->lanes[i].comm = NULL;
    }
    nccl->call.GroupEnd();
}

/* Who waits for long says in what. Does another rank of the group wait in another collective in
   this one's place? */
static void dt__nccl_compare(dt_work *work) {
    dt_comm *comm = work->comm;
    const dt__world *world = comm->world;
    uint64_t what = dt__what(&work->call), count = work->call.count;
    for (int rank = 0; world->others && rank < comm->place.size && !dt__is_to_one(work->call.op);
         rank++) {
        const dt__bulletin *last = &world->others[comm->group->ranks[rank]].last;
        const dt__op_record *r = &last->wait;
        if (!last->waiting || last->waiting == DT__SAID_END || last->channel != dt__way_of(comm, 0))
            continue;
        if (r->seq != work->call.seq || (r->what == what && r->count == count)) continue;
        dt__shown its = { r->what, r->count, dt__site_text(r->file, r->line) }, own;
        dt__show_own(work, &own);
        dt__calls_differ(work, rank, &its, comm->place.rank, &own);
        return;
    }
}

/* An operation that the device has not finished: is its communicator well, and are the others? */
static void dt__nccl_sound(dt_work *work) {
    dt__world *world = work->comm->world;
    ncclResult_t state = ncclSuccess;
    if (work->lane && work->lane->comm)
        world->nccl->call.CommGetAsyncError(work->lane->comm, &state);
    if (state != ncclSuccess && state != ncclInProgress)
        dt__nccl_fail(world, work->lane, "a communicator", state);
    else
        dt__others_look(world);
    if (dt_error(world->ctx) == DT_OK) dt__nccl_compare(work);
    int awaited = dt__not_begun(work);
    if (dt_error(world->ctx) == DT_OK && awaited != DT_ANY &&
        world->others[awaited].last.waiting == DT__SAID_END)
        dt__ended_without(work, awaited);
}

static const dt__comm_ops dt__nccl_ops = { "nccl", dt__nccl_message, NULL, dt__nccl_algorithm,
    dt__nccl_begun, dt__nccl_split, dt__nccl_close, dt__nccl_sound };

/* The functions. 0 with the context failed. The library is never closed: it has threads of its own,
   the one that ncclGetUniqueId starts among them, whose end nobody can wait for, and which would
   run on in code that is gone. Each run's dlopen finds the one that is there. */
static int dt__nccl_load(dt__world *world, dt__nccl *nccl) {
#ifdef DT_NCCL_DLOPEN
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!library) return dt__comm_fail(world, DT_ERR_COMM, "NCCL: %s", dlerror()), 0;
#define DT__NCCL_LOAD(name) \
    *(void **)&nccl->call.name = dlsym(library, "nccl" #name); \
    if (!nccl->call.name) \
        return dt__comm_fail(world, DT_ERR_COMM, "NCCL: this libnccl.so.2 has no nccl" #name), 0;
#else
#define DT__NCCL_LOAD(name) nccl->call.name = nccl##name;
    (void)world;
#endif
    DT__NCCL_FUNCTIONS(DT__NCCL_LOAD)
#undef DT__NCCL_LOAD
    return 1;
}

/* NCCL's kernels wait on the device for the other ranks'. A kernel that CUDA loads at its first
   launch may wait until the device is idle, so for them; and if another rank waits for what comes
   after it, nobody goes on. */
static void dt__nccl_advise(const dt__world *world) {
    const char *loading = dt__launch_env("CUDA_MODULE_LOADING");
    if (world->rank != 0 || (loading && strcmp(loading, "EAGER") == 0)) return;
    dt_log(world->ctx, DT_LOG_NOTICE,
        "backend nccl: set CUDA_MODULE_LOADING=EAGER before the program starts: a kernel "
        "that CUDA loads late can wait for one of NCCL's, and that for another rank");
}

/* The world gets a lane: of `given`, the caller's communicator, or of a new one, whose id rank 0
   tells the others. */
static void dt__nccl_begin(dt__world *world, void *given) {
    dt_comm *comm = world->comm;
    dt__nccl *nccl = NULL;
    ncclUniqueId id;
    memset(&id, 0, sizeof id);
    if (!dt_ctx_kernels(world->ctx)->mark)
        dt__comm_fail(world, DT_ERR_UNSUPPORTED,
            "backend nccl: rank %d runs on %s, and needs a CUDA device", world->rank,
            dt_ctx_kernels(world->ctx)->name);
    else
        nccl = (dt__nccl *)dt_alloc(world->ctx, DT_MEM_HOST, dt__nccl_bytes(world), "NCCL");
    if (!nccl) return;
    memset(nccl, 0, dt__nccl_bytes(world));
    nccl->lanes = (dt__lane *)(void *)(nccl + 1);
    world->nccl = nccl;
    comm->ops = &dt__nccl_ops;
    if (!dt__nccl_load(world, nccl) || comm->place.size == 1) return;
    dt__nccl_advise(world);
    comm->lane = &nccl->world;
    if (given) {
        comm->lane->comm = (ncclComm_t)given;
        comm->lane->borrowed = 1;
        dt__lane_open(world, comm->lane);
        return;
    }
    ncclResult_t result = world->rank == 0 ? nccl->call.GetUniqueId(&id) : ncclSuccess;
    if (result != ncclSuccess) dt__nccl_fail(world, NULL, "ncclGetUniqueId", result);
    dt__call call = dt__call_make(DT__BROADCAST, &id, &id, sizeof id / sizeof(int32_t), DT_I32);
    call.host = 1;
    if (dt__do(comm, call) == DT_OK &&
        dt__lane_join(world, comm->lane, id, comm->place.rank, comm->place.size))
        dt__lane_wait(comm, comm->lane, dt__lane_joined);
}

#else

static void dt__nccl_begin(dt__world *world, void *given) {
    (void)given;
    dt__comm_fail(world, DT_ERR_UNSUPPORTED, "%s", dt__backend_missing(DT_BACKEND_NCCL));
}

#endif /* DT_USE_NCCL */

// ==== 27. Attach and launch: code ===============================================================

/*     dt_team_make     checks, takes the shared range
       a rank           context, dt_comm_attach, the rank function, dt_comm_detach
       dt_team_free     looks for messages nobody received, gives the report

   dt_run is that with a thread or a fork for each rank. The supervisor talks to no rank: whatever
   goes wrong goes through the record of section 9. */

struct dt_team {
    dt__shared *shared;
    void *range;
    size_t range_bytes;
    const dt_host *host;
    dt_run_desc desc;
    int64_t oom_kills;         /* before the ranks began */
    dt_host table;             /* a copy of the caller's; `host` points to it */
    int owners;                /* references: its maker, each rank thread; the last frees it */
    struct dt__rank_job *jobs; /* (ranks) of dt_run, or NULL */
};

/* A failure outside of any context. */
DT_PRINTF(5, 6)
static void dt__run_fail(
    dt__shared *shared, const dt_host *host, int rank, dt_status status, const char *fmt, ...) {
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    dt__escape(text, sizeof text);
    if (!dt__claim(shared, rank)) return;
    dt__publish_failure(shared, rank, status, text);
    host->log(host->user, DT_LOG_ERROR, rank, text);
}

static void dt__set_ended(dt__shared *shared, int seat) {
    __atomic_store_n(&shared->state[seat].ended, 1, __ATOMIC_RELEASE);
    __atomic_fetch_add(&shared->ended, 1, __ATOMIC_RELEASE);
    __atomic_fetch_add(&shared->state[seat].moves, 1, __ATOMIC_SEQ_CST);
    /* after its last move */
    __atomic_store_n(&shared->state[seat].idle_at, DT__FOR_EVER, __ATOMIC_SEQ_CST);
}

/* Between two kernels of a tensor op: what was started moves on. */
static void dt__on_kernel(dt_ctx *ctx, void *user) {
    dt__world *world = (dt__world *)user;
    if (world->open && dt_error(ctx) == DT_OK) dt__advance_some(world);
}

/* The world of a rank: over a team's range, or over a transport with its node's, or with one of its
   own. */
static dt__world *dt__world_make(dt_ctx *ctx, const dt_attach_desc *desc, const dt__node *node) {
    dt__world *world = (dt__world *)dt_alloc(ctx, DT_MEM_HOST, sizeof *world, "the world");
    dt__lone *lone = NULL;
    if (!world) return NULL;
    memset(world, 0, sizeof *world);
    world->ctx = ctx;
    world->host = dt_ctx_host(ctx);
    world->rank = world->seat = desc->rank;
    world->link = desc->team ? desc->team->desc.link : desc->link;
    if (desc->team) {
        world->shared = desc->team->shared;
        world->thread = !world->shared->apart;
    } else {
        world->transport = *desc->transport;
        world->channels = 1;
    }
    if (node) {
        world->shared = node->shared;
        world->seat = node->seat;
        world->node = node;
    } else if (!desc->team) {
        lone = (dt__lone *)dt_alloc(ctx, DT_MEM_HOST, sizeof *lone, "the world");
        if (!lone) {
            dt_free(ctx, DT_MEM_HOST, world, sizeof *world);
            return NULL;
        }
        memset(lone, 0, sizeof *lone);
        world->shared = &lone->shared;
        world->shared->ranks = desc->size;
        world->shared->timeout_s = desc->timeout_s > 0 ? desc->timeout_s : 120;
        world->shared->spins = desc->size <= dt__cores() ? DT__SPINS : 0;
    }
    world->awaited = DT_ANY;
    world->state = lone ? &lone->state : &world->shared->state[world->seat];
    world->records =
        lone ? lone->records : world->shared->records + (size_t)world->seat * DT_RECORDS;
    __atomic_store_n(&world->state->pid, (int)getpid(), __ATOMIC_RELAXED);
    __atomic_store_n(&world->state->tid, (int)syscall(SYS_gettid), __ATOMIC_RELAXED);
    return world;
}

/* The group of all ranks. */
static dt__group *dt__world_group(dt__world *world, int size) {
    if (!world->transport.send) return dt__room_group(world->shared, 0);
    dt__group *group = dt__group_list(world, size, "world");
    for (int rank = 0; group && rank < size; rank++) group->ranks[rank] = rank;
    if (group && dt__on_node(world, group))
        dt__group_share(group, dt__room_group(world->shared, 0));
    return group;
}

static void dt__others_make(dt__world *world, const dt__control *control, int size) {
    size_t bytes = (size_t)size * sizeof(dt__other);
    world->others = (dt__other *)dt_alloc(world->ctx, DT_MEM_HOST, bytes, "other ranks");
    if (!world->others) return;
    memset(world->others, 0, bytes);
    world->control = control;
    world->comm_size = size;
    for (int rank = 0; rank < size; rank++) {
        world->others[rank].state.waits_for = world->others[rank].last.waits_for = DT_ANY;
        if (rank != world->rank) world->others[rank].state.pid = control->pid(control->user, rank);
    }
}

/* The context has failed, and nobody listens to it yet. Always NULL. */
static dt_comm *dt__attach_failed(dt_ctx *ctx, const dt_attach_desc *desc, dt__shared *shared) {
    if (shared && dt__claim(shared, desc->rank))
        dt__publish_failure(shared, desc->rank, dt_error(ctx), dt_error_text(ctx));
    if (!desc->team && desc->transport && desc->transport->fail)
        desc->transport->fail(desc->transport->user, dt_error_text(ctx));
    return NULL;
}

/* node: of a transport's ranks those that share memory, NULL: none do. control: their way to say
   who waits, or NULL. run: what dt_run was told, for a transport's. */
static dt_comm *dt__attach(dt_ctx *ctx, dt_attach_desc desc, const dt__node *node,
    const dt__control *control, const dt_run_desc *run) {
    int size = desc.team ? desc.team->desc.ranks : desc.size;
    if (!ctx) return NULL;
    if (dt_error(ctx))
        return dt__attach_failed(ctx, &desc,
            desc.team ? desc.team->shared
            : node    ? node->shared
                      : NULL);
    if (dt__world_of(ctx) || !desc.team == !desc.transport || size < 1 || desc.rank < 0 ||
        desc.rank >= size) {
        dt_fail(ctx, DT_ERR_ARG, "dt_comm_attach: rank %d of %d, %s", desc.rank, size,
            dt__world_of(ctx) ? "but it is attached already" : "by either a team or a transport");
        return NULL;
    }
    dt__world *world = dt__world_make(ctx, &desc, node);
    dt__group *group = world ? dt__world_group(world, size) : NULL;
    if (!group)
        dt__attach_failed(ctx, &desc,
            desc.team ? desc.team->shared
            : node    ? node->shared
            : world   ? world->shared
                      : NULL);
    if (!world) return NULL;
    world->listener.failed = dt__on_failure;
    world->listener.kernel_done = dt__on_kernel;
    world->listener.settle = dt__on_settle;
    world->listener.user = world;
    dt_listen(ctx, &world->listener);
    dt_ctx_attach(ctx, world);
    const dt__comm_ops *ops = desc.team ? &dt__threads_ops : &dt__transport_ops;
    if (group && !desc.team && group->members) ops = &dt__node_ops;
    if (desc.team) run = &desc.team->desc;
    if (run) world->planted = dt__faults_read(run->fault, desc.rank, size, world->faults);
    if (run && !desc.team) world->ask = run->ask;
    world->check = control ? control->check : run ? run->check : 0;
    if (control && group) dt__others_make(world, control, size);
    if (group) world->comm = dt__comm_make(world, ops, group, desc.rank);
    size_t mail = 2 * (size_t)size * sizeof *world->mail;
    if (world->comm && desc.transport && dt_ctx_kernels(ctx)->open) {
        world->mail = (uint64_t *)dt_alloc(ctx, DT_MEM_HOST, mail, "messages from a device");
        if (world->mail) memset(world->mail, 0, mail);
    }
    if (world->comm && (desc.nccl || (run && run->backend == DT_BACKEND_NCCL)))
        dt__nccl_begin(world, desc.nccl);
    return world->comm;
}

dt_comm *dt_comm_attach(dt_ctx *ctx, dt_attach_desc desc) {
    return dt__attach(ctx, desc, NULL, NULL, NULL);
}

/* Those that a failure left become idle. */
static void dt__works_end(dt__world *world) {
    dt__on_settle(world->ctx, 0, world);
    if (world->blocking) dt__work_release(world, world->blocking);
    world->blocking = NULL;
    while (world->first) {
        dt_work *work = world->first;
        dt__forget(world, work);
        dt__work_release(world, work);
    }
}

static void dt__works_free(dt__world *world) {
    while (world->idle) {
        dt_work *work = world->idle;
        world->idle = work->later;
        dt_free(world->ctx, DT_MEM_HOST, work->parts, (size_t)work->room * sizeof(dt__part));
        if (work->mark) dt_ctx_kernels(world->ctx)->unmark(work->mark);
        dt_free(world->ctx, DT_MEM_HOST, work, sizeof *work);
    }
    dt_free(world->ctx, DT_MEM_COMM, world->copy, world->copy_bytes);
}

void dt_comm_detach(dt_ctx *ctx, dt_status status) {
    dt__world *world = dt__world_of(ctx);
    if (!world) return;
    if (status && !dt_error(ctx))
        dt_fail(ctx, status, "rank function returned %s", dt_status_name(status));
    if (!dt_error(ctx)) dt__tell_reset(ctx);
    if (world->first && !dt_error(ctx))
        dt_fail(ctx, DT_ERR_ARG, "%s on %s%s was started and never waited for",
            dt__call_text(&world->first->call).s, world->first->comm->group->name,
            dt__own_site(world->first).s);
    if (world->shared->state) dt__set_ended(world->shared, world->seat);
    if (world->others && !dt_error(ctx)) dt__say_wait(world, NULL, 1);
    if (dt_error(ctx)) dt__hands_off(world);
    dt__trace_free(world);
    if (world->others)
        dt_free(ctx, DT_MEM_HOST, world->others, (size_t)world->comm_size * sizeof(dt__other));
    world->others = NULL;
    dt__works_end(world);
    dt_free(ctx, DT_MEM_HOST, world->mail,
        world->comm ? 2 * (size_t)world->comm->place.size * sizeof *world->mail : 0);
    dt__comms_free(world); /* takes works too */
    dt__works_free(world);
    dt_ctx_attach(ctx, NULL);
    dt_unlisten(ctx, &world->listener);
    if (!world->shared->state) dt_free(ctx, DT_MEM_HOST, world->shared, sizeof(dt__lone));
    dt_free(ctx, DT_MEM_HOST, world, sizeof *world);
}

/* ---- the team ---- */

/* A run that cannot begin: logged and reported. */
DT_PRINTF(3, 4)
static void dt__refuse(const dt_run_desc *desc, dt_status status, const char *fmt, ...) {
    const dt_host *host = desc->host ? desc->host : dt_host_default();
    dt_report report;
    va_list args;
    memset(&report, 0, sizeof report);
    report.status = status;
    report.rank = -1;
    va_start(args, fmt);
    vsnprintf(report.text, sizeof report.text, fmt, args);
    va_end(args);
    dt__escape(report.text, sizeof report.text);
    host->log(host->user, DT_LOG_ERROR, -1, report.text);
    if (desc->report) *desc->report = report;
}

/* The range: of procs it must be one that forks share, and each rank's heap may grow to the
   machine's memory; no page of it exists before it is touched. If the system refuses so much,
   less. */
static void *dt__range_take(dt__shared *sizes, const dt_host *host, size_t user_bytes) {
    size_t machine = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    for (size_t heap = sizes->apart ? dt__page_up(machine) : 0;; heap = dt__page_up(heap / 4)) {
        sizes->heap_bytes = heap;
        dt__shared_lay(sizes, NULL, user_bytes);
        void *range = host->map ? host->map(host->user, sizes->bytes)
                                : host->alloc(host->user, sizes->bytes, DT_MEM_COMM);
        if (range || heap <= ((size_t)64 << 20)) return range;
    }
}

static void dt__range_free(const dt_host *host, void *range, size_t bytes) {
    if (host->map)
        host->unmap(host->user, range, bytes);
    else
        host->free(host->user, range, bytes, DT_MEM_COMM);
}

/* What the environment says, where the description does not. */
static void dt__run_env(dt_run_desc *desc) {
    const char *check = getenv("DT_CHECK");
    if (!desc->fault && desc->faults) desc->fault = getenv("DT_FAULT");
    if (desc->check == 0 && check && strcmp(check, "1") == 0) desc->check = 1;
}

/* What is wrong with a description, reported; 1: nothing. What every backend takes alike. */
static int dt__run_valid(dt_run_desc *desc) {
    dt__run_env(desc);
    if (dt__faults_read(desc->fault, -1, desc->ranks, NULL) < 0)
        dt__refuse(desc, DT_ERR_ARG,
            "dt_run: planted fault '%s': not KIND:rank=R:seq=N[:s=SECONDS], with a KIND of "
            "kill, stop, exit, spin, delay, drop, flip, nan and a rank of the job",
            desc->fault);
    else if (desc->ranks < 0 || desc->ranks > DT__MAX_RANKS)
        dt__refuse(desc, DT_ERR_ARG, "dt_run: %d ranks", desc->ranks);
    else if (!(desc->timeout_s > 0 && desc->timeout_s <= 1e9))
        dt__refuse(desc, DT_ERR_ARG, "dt_run: timeout_s %g", desc->timeout_s);
    else if (desc->node_ranks < 0)
        dt__refuse(desc, DT_ERR_ARG, "dt_run: node_ranks %d", desc->node_ranks);
    else if (!(desc->link.latency_s >= 0 && desc->link.bytes_per_s >= 0))
        dt__refuse(desc, DT_ERR_ARG, "dt_run: link of %g s and %g bytes/s", desc->link.latency_s,
            desc->link.bytes_per_s);
    else
        return 1;
    return 0;
}

/* Can these ranks share memory? */
static int dt__team_valid(dt_run_desc *desc) {
    int procs = desc->backend == DT_BACKEND_PROCS;
    if (!procs && desc->backend != DT_BACKEND_AUTO && desc->backend != DT_BACKEND_THREADS)
        dt__refuse(desc, DT_ERR_UNSUPPORTED, "dt_run: backend %s: %s",
            dt__backend_name(desc->backend), dt__backend_missing(desc->backend));
    else if (procs && desc->kernels && desc->kernels->open)
        dt__refuse(desc, DT_ERR_UNSUPPORTED,
            "dt_run: forks cannot use a device of the process they come from: ranks "
            "that a launcher starts can, by backend nccl or tcp, and threads");
    else if (procs && desc->host && !desc->host->map)
        dt__refuse(
            desc, DT_ERR_UNSUPPORTED, "dt_run: backend procs needs a host table that maps memory");
    else
        return dt__run_valid(desc);
    return 0;
}

dt_team *dt_team_make(dt_run_desc desc) {
    const dt_host *host = desc.host ? desc.host : dt_host_default();
    dt__shared sizes;
    if (desc.ranks == 0) desc.ranks = 1;
    if (desc.timeout_s == 0) desc.timeout_s = 120;
    if (!dt__team_valid(&desc)) return NULL;
    memset(&sizes, 0, sizeof sizes);
    sizes.ranks = desc.ranks;
    sizes.apart = desc.backend == DT_BACKEND_PROCS;
    sizes.timeout_s = desc.timeout_s;
    sizes.spins = desc.ranks <= dt__cores() ? DT__SPINS : 0;
    sizes.first.rank = -1;
    void *range = dt__range_take(&sizes, host, desc.user_bytes);
    dt_team *team = range ? (dt_team *)host->alloc(host->user, sizeof *team, DT_MEM_HOST) : NULL;
    if (!team) {
        dt__refuse(&desc, DT_ERR_MEM, "dt_run: %zu bytes that %d ranks share were refused",
            sizes.bytes, desc.ranks);
        if (range) dt__range_free(host, range, sizes.bytes);
        return NULL;
    }
    team->range = range;
    team->range_bytes = sizes.bytes;
    team->desc = desc;
    team->table = *host; /* a thread left behind may outlive the caller's table */
    team->host = &team->table;
    if (desc.host) team->desc.host = team->host;
    team->owners = 1;
    team->jobs = NULL;
    team->oom_kills = -1;
    team->shared = dt__shared_lay(&sizes, (char *)range, desc.user_bytes);
    dt__group *group = dt__group_make(team->shared, desc.ranks, "world");
    for (int rank = 0; rank < desc.ranks; rank++) group->ranks[rank] = rank;
    return team;
}

/* A rank's number among those of its machine: what its launcher says, else all are on one. */
static int dt__place(const dt_run_desc *desc, int rank) {
    dt_launch launch;
    if (desc->backend <= DT_BACKEND_PROCS || dt_launch_find(&launch) != DT_OK) return rank;
    return launch.rank == rank && launch.local_rank >= 0 ? launch.local_rank : rank;
}

/* The context of a rank. */
static dt_ctx *dt__rank_ctx(const dt_run_desc *desc, int rank, const dt_host *host) {
    dt_ctx_desc of;
    memset(&of, 0, sizeof of);
    of.seed = desc->seed;
    of.rank = rank;
    of.place = dt__place(desc, rank);
    of.kernels = desc->kernels;
    /* forks have no device */
    if (!of.kernels && desc->backend == DT_BACKEND_PROCS) of.kernels = dt_kernels_cpu();
    of.host = host;
    of.io = desc->io;
    of.mem_limit = desc->mem_limit;
    return dt_ctx_make(of);
}

/* Ranks that are threads read and write each other's memory. */
static void dt__share_devices(dt_ctx *ctx, int ranks) {
    const dt_kernels *kernels = dt_ctx_kernels(ctx);
    char why[160] = "";
    if (dt_error(ctx) || ranks < 2 || !kernels->share) return;
    if (kernels->share(dt_ctx_stream(ctx), ranks, why, sizeof why) == DT_OK) return;
    dt_fail(ctx, DT_ERR_DEVICE,
        "ranks that are threads need peer access, from %s; those of backend nccl do not", why);
}

dt_ctx *dt_team_ctx(dt_team *team, int rank) {
    if (!team || rank < 0 || rank >= team->desc.ranks) {
        if (team)
            dt__run_fail(team->shared, team->host, -1, DT_ERR_ARG, "dt_team_ctx: rank %d of %d",
                rank, team->desc.ranks);
        return NULL;
    }
    const dt_host *host = team->desc.host;
    /* whatever the table: windows and copies of messages must lie in the range */
    if (team->shared->apart) host = dt__heap_make(team->shared, team->host, rank);
    dt_ctx *ctx = dt__rank_ctx(&team->desc, rank, host);
    if (!ctx)
        dt__run_fail(
            team->shared, team->host, rank, DT_ERR_MEM, "rank %d: no memory for its context", rank);
    else
        dt__share_devices(ctx, team->desc.ranks);
    return ctx;
}

/* An eager message is the one thing that can be lost without anybody waiting for it. */
static void dt__find_unreceived(dt__shared *shared, const dt_host *host) {
    for (int from = 0; from < shared->ranks; from++) {
        for (int to = 0; to < shared->ranks; to++) {
            for (int i = 0; i < DT__MESSAGES; i++) {
                const dt__message *message = &dt__pair_of(shared, from, to, 0)->message[i];
                if (message->state != DT__POSTED) continue;
                dt_dtype dtype = dt__word_dtype(message->word);
                dt__run_fail(shared, host, from, DT_ERR_COMM,
                    "rank %d: rank %d ended without receiving %s x %zu with tag %d on %s", from, to,
                    dt_dtype_name(dtype), message->bytes / dt_dtype_size(dtype), message->tag,
                    message->group->name);
                return;
            }
        }
    }
}

typedef struct dt__rank_job {
    dt_team *team;
    dt_ctx *ctx;
    int rank, returned; /* rank_main has returned `status` */
    dt_status status;
    dt_status (*rank_main)(dt_ctx *ctx, void *user);
    void *user;
    pthread_t thread;
    pid_t pid; /* 0: none, or it is gone */
    int end;   /* dt__run_end_of */
    int over;  /* its thread has done all */
} dt__rank_job;

/* Drops a reference; the last one frees the team. */
static void dt__team_release(dt_team *team) {
    if (__atomic_sub_fetch(&team->owners, 1, __ATOMIC_ACQ_REL) > 0) return;
    dt_host host = team->table;
    size_t jobs_bytes = (size_t)team->desc.ranks * sizeof *team->jobs;
    if (team->jobs) host.free(host.user, team->jobs, jobs_bytes, DT_MEM_HOST);
    dt__range_free(&host, team->range, team->range_bytes);
    host.free(host.user, team, sizeof *team, DT_MEM_HOST);
}

dt_status dt_team_free(dt_team *team) {
    if (!team) return DT_OK;
    if (!dt__aborted(team->shared)) dt__find_unreceived(team->shared, team->host);
    dt_status status = team->shared->first.status;
    if (team->desc.report) *team->desc.report = team->shared->first;
    dt__team_release(team);
    return status;
}

/* ---- dt_run ---- */

#define DT__STOPPED_S 1.0 /* after a failure a stopped process is killed that soon */

/* Fails a rank whose rank_main ended its thread; called in that thread's cleanup handler. */
static void dt__rank_cut_short(dt_ctx *ctx) {
    dt__world *world = dt__world_of(ctx);
    if (world && world->shared->state) __atomic_store_n(&world->state->busy, 0, __ATOMIC_SEQ_CST);
    dt_fail(ctx, DT_ERR_ARG,
        "rank function did not return: its thread was ended by pthread_exit or "
        "pthread_cancel");
}

/* Ends a rank, whether rank_main returned or ended its thread: a cleanup handler. */
static void dt__rank_end(void *arg) {
    dt__rank_job *job = (dt__rank_job *)arg;
    dt_team *team = job->team;
    if (job->ctx && !job->returned) dt__rank_cut_short(job->ctx);
    dt_comm_detach(job->ctx, job->status);
    dt_ctx_free(job->ctx);
    if (team->shared->apart && !job->returned) _exit(1);
    if (team->shared->apart) return;
    __atomic_store_n(&job->over, 1, __ATOMIC_RELEASE);
    dt__team_release(team);
}

static void *dt__run_rank(void *arg) {
    dt__rank_job *job = (dt__rank_job *)arg;
    dt_attach_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank = job->rank;
    desc.team = job->team;
    job->ctx = dt_team_ctx(job->team, job->rank);
    pthread_cleanup_push(dt__rank_end, job);
    if (job->ctx && !dt_comm_attach(job->ctx, desc))
        job->status = dt_error(job->ctx);
    else if (job->ctx)
        job->status = job->rank_main(job->ctx, job->user);
    job->returned = 1;
    pthread_cleanup_pop(1);
    return NULL;
}

/* What the supervisor does now and then: the table, if somebody asked. */
static void dt__run_answer(dt_team *team) {
    if (!team->desc.ask || !__atomic_exchange_n(team->desc.ask, 0, __ATOMIC_RELAXED)) return;
    for (int rank = 0; rank < team->shared->ranks; rank++)
        dt__rank_log(team->host, dt_io_default(), -1, rank, dt__seen_of_seat(team->shared, rank));
}

/* Logs and counts a rank that dt_run leaves behind. */
static void dt__run_leave(
    dt_team *team, const dt__rank_job *job, const char *what, double seconds) {
    char text[192];
    snprintf(text, sizeof text,
        "rank %d is left behind: its %s still runs %.1f s after the failure", job->rank, what,
        seconds);
    team->host->log(team->host->user, DT_LOG_NOTICE, -1, text);
    team->shared->first.left_behind++;
}

/* Waits until the rank's thread is done (1), or until timeout_s after the first failure (0). */
static int dt__run_await(dt_team *team, const dt__rank_job *job, dt__stopwatch *failed) {
    const dt_host *host = team->host;
    double nap = DT__NAP_MIN;
    while (!__atomic_load_n(&job->over, __ATOMIC_ACQUIRE)) {
        double most = team->desc.timeout_s;
        if (!failed->host && dt__aborted(team->shared)) *failed = dt__stopwatch_start(host, most);
        if (failed->host && dt__waited(failed) > most) return 0;
        dt__run_answer(team);
        host->sleep(host->user, nap);
        nap = fmin(1.1 * nap, DT__NAP_MAX);
    }
    return 1;
}

/* Starts the ranks and waits for them. After a thread that cannot be started those before it learn
   of it as of any failure. */
static void dt__run_threads(dt_team *team, dt__rank_job *jobs) {
    dt__stopwatch failed = { NULL, 0, 0, 0 };
    int started = 0;
    while (started < team->desc.ranks) {
        __atomic_fetch_add(&team->owners, 1, __ATOMIC_RELAXED);
        int error = pthread_create(&jobs[started].thread, NULL, dt__run_rank, &jobs[started]);
        if (error) {
            dt__team_release(team);
            dt__run_fail(team->shared, team->host, started, DT_ERR_MEM,
                "rank %d: its thread could not be started (error %d)", started, error);
            break;
        }
        started++;
    }
    for (int rank = 0; rank < started; rank++) {
        if (dt__run_await(team, &jobs[rank], &failed)) {
            pthread_join(jobs[rank].thread, NULL);
            continue;
        }
        dt__run_leave(team, &jobs[rank], "thread", failed.seconds);
        pthread_detach(jobs[rank].thread);
    }
}

static const char *dt__run_signal(int number) {
    switch (number) {
    case SIGKILL: return " (SIGKILL)";
    case SIGSEGV: return " (SIGSEGV)";
    case SIGABRT: return " (SIGABRT)";
    case SIGBUS: return " (SIGBUS)";
    case SIGFPE: return " (SIGFPE)";
    case SIGILL: return " (SIGILL)";
    case SIGTERM: return " (SIGTERM)";
    case SIGINT: return " (SIGINT)";
    default: return "";
    }
}

/* How often the kernel has killed a process of this memory cgroup because there was no memory; -1:
   it does not say. /proc/self/cgroup names the group ("4:memory:/jobs/7" of version 1, "0::/jobs/7"
   of version 2), which inside a container may be the root of what is mounted. */
static int64_t dt__run_oom_kills(const dt_io *io) {
    static const char *const files[4] = { "/sys/fs/cgroup/memory%s/memory.oom_control",
        "/sys/fs/cgroup%s/memory.events", "/sys/fs/cgroup/memory/memory.oom_control",
        "/sys/fs/cgroup/memory.events" };
    char groups[2048], path[512], text[1024];
    int64_t got = dt__read_text(io, "/proc/self/cgroup", groups, sizeof groups);
    for (int i = 0; got > 0 && i < 4; i++) {
        char *name = strstr(groups, i % 2 ? "0::" : ":memory:"), group[256] = "";
        if (!name) continue;
        name = strchr(name, '/');
        size_t length = name ? strcspn(name, "\n") : 0;
        if (i < 2 && length < sizeof group) memcpy(group, name ? name : "", length);
        snprintf(path, sizeof path, files[i], group);
        if (dt__read_text(io, path, text, sizeof text) <= 0) continue;
        const char *count = strstr(text, "oom_kill ");
        if (count) return (int64_t)strtoll(count + 9, NULL, 10);
    }
    return -1;
}

/* Records how a rank's process ended, also if it died while it wrote the failure record. Its exit
   status is unknown if this process ignores SIGCHLD or reaps children elsewhere: then state.ended
   == 2 means success. */
static void dt__process_gone(dt_team *team, const dt__rank_job *job, int known, int status) {
    dt__shared *shared = team->shared;
    int rank = job->rank, pid = (int)job->pid;
    int ended = __atomic_load_n(&shared->state[rank].ended, __ATOMIC_ACQUIRE);
    __atomic_store_n(&shared->state[rank].busy, 0, __ATOMIC_SEQ_CST);
    if (known ? ended && WIFEXITED(status) && WEXITSTATUS(status) == 0 : ended == 2) return;
    char text[192];
    int killed = known && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    int oom = killed && dt__run_oom_kills(dt_io_default()) > team->oom_kills;
    if (!known)
        snprintf(text, sizeof text,
            "rank %d (process %d) was lost; its exit status is not known, because "
            "its parent ignores SIGCHLD or reaped it elsewhere",
            rank, pid);
    else if (WIFSIGNALED(status))
        snprintf(text, sizeof text, "rank %d (process %d) was ended by signal %d%s%s", rank, pid,
            WTERMSIG(status), dt__run_signal(WTERMSIG(status)),
            oom ? ": out of memory, killed by the kernel (cgroup)" : "");
    else
        snprintf(text, sizeof text,
            "rank %d (process %d) exited with status %d in its rank function", rank, pid,
            WEXITSTATUS(status));
    int half =
        __atomic_load_n(&shared->claimed, __ATOMIC_SEQ_CST) == rank + 2 && !dt__aborted(shared);
    if (half) {
        dt__publish_failure(shared, rank, DT_ERR_PEER, text);
        team->host->log(team->host->user, DT_LOG_ERROR, rank, text);
    }
    dt__run_fail(shared, team->host, rank, DT_ERR_PEER, "%s", text);
    if (!dt__has_ended(shared, rank)) dt__set_ended(shared, rank);
}

/* Sleeps until a rank's process ends, of which the kernel tells at once, but not long. */
static void dt__run_nap(dt_team *team, const dt__rank_job *jobs, int started, struct pollfd *ends) {
    int n = 0, told = ends != NULL;
    for (int rank = 0; rank < started && told; rank++) {
        if (!jobs[rank].pid) continue;
        ends[n].fd = jobs[rank].end;
        ends[n].events = POLLIN;
        told = ends[n++].fd >= 0;
    }
    if (told)
        poll(ends, (nfds_t)n, 20);
    else
        team->host->sleep(team->host->user, 1e-3);
}

/* After a failure, does a process take too long? One that computes may never look; one that is
   stopped does not. */
static int dt__run_overdue(const dt__rank_job *job, double seconds) {
    const dt_team *team = job->team;
    if (!job->pid || seconds < fmin(DT__STOPPED_S, team->desc.timeout_s)) return 0;
    return seconds > team->desc.timeout_s ||
           dt__process_state(dt_io_default(), &team->shared->state[job->rank]) == 'T';
}

/* Kills by pidfd if there is one, because the pid may be reused by now. */
static void dt__run_kill(const dt__rank_job *job) {
#ifdef SYS_pidfd_send_signal
    if (job->end >= 0 && syscall(SYS_pidfd_send_signal, job->end, SIGKILL, NULL, 0) == 0) return;
    if (job->end >= 0 && errno == ESRCH) return;
#endif
    kill(job->pid, SIGKILL);
}

/* Reaps processes that have ended; returns how many are left. */
static int dt__run_collect(dt_team *team, dt__rank_job *jobs, int started) {
    int left = 0;
    for (int rank = 0; rank < started; rank++) {
        int status = 0;
        pid_t got = jobs[rank].pid ? waitpid(jobs[rank].pid, &status, WNOHANG) : 0;
        left += jobs[rank].pid && got == 0;
        if (!jobs[rank].pid || got == 0) continue;
        dt__process_gone(team, &jobs[rank], got > 0, status);
        jobs[rank].pid = 0;
        if (jobs[rank].end >= 0) close(jobs[rank].end);
    }
    return left;
}

/* Waits for the processes, and kills overdue ones. Leaves behind what the kernel does not let
   die. */
static void dt__run_wait(dt_team *team, dt__rank_job *jobs, int started, struct pollfd *ends) {
    dt__stopwatch failed = { NULL, 0, 0, 0 };
    double seconds = 0, patience = team->desc.timeout_s;
    while (dt__run_collect(team, jobs, started) > 0 && seconds <= 2 * patience + DT__STOPPED_S) {
        if (!failed.host && dt__aborted(team->shared))
            failed = dt__stopwatch_start(team->host, patience);
        if (failed.host) seconds = dt__waited(&failed);
        for (int rank = 0; rank < started && failed.host; rank++)
            if (dt__run_overdue(&jobs[rank], seconds)) dt__run_kill(&jobs[rank]);
        dt__run_answer(team);
        dt__run_nap(team, jobs, started, ends);
    }
    for (int rank = 0; rank < started; rank++) {
        if (!jobs[rank].pid) continue;
        dt__run_leave(team, &jobs[rank], "process", seconds);
        if (jobs[rank].end >= 0) close(jobs[rank].end);
    }
}

/* A file descriptor that is readable once the process has ended; -1: this kernel has none. */
static int dt__run_end_of(pid_t pid) {
#ifdef SYS_pidfd_open
    return dt__io_guard() == 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
#else
    (void)pid;
    return -1;
#endif
}

/* In the new process. It ends with its supervisor, however that ends; which may have happened
   already. */
static void dt__run_child(dt__rank_job *job, pid_t supervisor) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != supervisor) _exit(1);
    dt__run_rank(job);
    fflush(NULL);
    __atomic_store_n(&job->team->shared->state[job->rank].ended, 2, __ATOMIC_SEQ_CST);
    _exit(0);
}

static void dt__run_processes(dt_team *team, dt__rank_job *jobs) {
    const dt_host *host = team->host;
    int started = 0;
    pid_t supervisor = getpid();
    size_t bytes = (size_t)team->desc.ranks * sizeof(struct pollfd);
    struct pollfd *ends = (struct pollfd *)host->alloc(host->user, bytes, DT_MEM_HOST);
    team->oom_kills = dt__run_oom_kills(dt_io_default());
    fflush(NULL); /* or what is in the buffers is printed by every fork */
    while (started < team->desc.ranks) {
        pid_t pid = fork();
        if (pid == 0) dt__run_child(&jobs[started], supervisor);
        if (pid < 0) {
            dt__run_fail(team->shared, team->host, started, DT_ERR_MEM,
                "rank %d: its process could not be started", started);
            break;
        }
        jobs[started].pid = pid;
        __atomic_store_n(&team->shared->state[started].pid, (int)pid, __ATOMIC_RELAXED);
        started++;
    }
    /* no fork has it */
    for (int rank = 0; rank < started; rank++) jobs[rank].end = dt__run_end_of(jobs[rank].pid);
    dt__run_wait(team, jobs, started, ends);
    if (ends) host->free(host->user, ends, bytes, DT_MEM_HOST);
}

/* A rank over a transport. If rank_main ends its thread, the connections stay open until the
   process ends. */
typedef struct dt__rank_life {
    dt_ctx *ctx;
    dt_status status;
    int returned;
} dt__rank_life;

static void dt__rank_over_end(void *arg) {
    dt__rank_life *life = (dt__rank_life *)arg;
    if (!life->returned) dt__rank_cut_short(life->ctx);
    dt_comm_detach(life->ctx, life->status);
}

/* The calling process is one rank, over a transport: runs it. Returns the context's status. */
static dt_status dt__run_over(dt_ctx *ctx, const dt_run_desc *desc, int rank, int size,
    const dt_transport *transport, const dt__node *node, const dt__control *control,
    dt_status (*rank_main)(dt_ctx *ctx, void *user), void *user) {
    dt_attach_desc attach;
    memset(&attach, 0, sizeof attach);
    attach.rank = rank;
    attach.size = size;
    attach.transport = transport;
    attach.timeout_s = desc->timeout_s;
    attach.link = desc->link;
    dt__rank_life life = { ctx, DT_OK, 0 };
    pthread_cleanup_push(dt__rank_over_end, &life);
    int attached = dt__attach(ctx, attach, node, control, desc) != NULL;
    life.status = attached ? rank_main(ctx, user) : dt_error(ctx);
    life.returned = 1;
    pthread_cleanup_pop(1);
    return dt_error(ctx);
}

/* Runs this process's tcp rank, and wipes the key. */
static void dt__tcp_rank(const dt_run_desc *desc, dt__tcp_place rendezvous, uint8_t key[32],
    dt_status (*rank_main)(dt_ctx *ctx, void *user), void *user) {
    dt_ctx *ctx = dt__rank_ctx(desc, desc->rank, desc->host);
    dt__tcp *t = ctx ? dt__tcp_make(ctx, desc, rendezvous, key, -1) : NULL;
    dt__wipe(key, 32);
    dt_transport transport = { "tcp", t, dt__tcp_send, dt__tcp_recv, dt__tcp_test, dt__tcp_cancel,
        dt__tcp_fail };
    dt__control control = { t, dt__tcp_bulletin, dt__tcp_pid, dt__tcp_came, t ? t->check : 0,
        dt__tcp_look };
    if (!ctx) dt__refuse(desc, DT_ERR_MEM, "rank %d: no memory for its context", desc->rank);
    if (t) {
        if (dt__run_over(
                ctx, desc, desc->rank, desc->ranks, &transport, NULL, &control, rank_main, user))
            dt__tcp_fail(t, dt_error_text(ctx)); /* it may have failed before anybody listened */
        dt__tcp_goodbye(t);
        dt__tcp_report(t, desc->report);
        dt__tcp_free(t);
    } else if (ctx) {
        desc->report->status = dt_error(ctx);
        desc->report->rank = desc->rank;
        snprintf(desc->report->text, sizeof desc->report->text, "%s", dt_error_text(ctx));
    }
    dt_ctx_free(ctx);
}

static dt_status dt__run_tcp(
    dt_run_desc desc, dt_status (*rank_main)(dt_ctx *ctx, void *user), void *user) {
    dt__tcp_place rendezvous;
    uint8_t key[32];
    char why[DT__TCP_TEXT];
    if (desc.ranks == 0) desc.ranks = 1;
    if (desc.timeout_s == 0) desc.timeout_s = 120;
    if (!dt__run_valid(&desc)) return desc.report->status;
    if (desc.rank < 0 || desc.rank >= desc.ranks)
        dt__refuse(&desc, DT_ERR_ARG, "dt_run: rank %d of %d", desc.rank, desc.ranks);
    else if (!dt__tcp_place_read(desc.rendezvous, &rendezvous))
        dt__refuse(&desc, DT_ERR_ARG,
            "dt_run: rendezvous '%s': not an address or name that is found, and a port, as "
            "127.0.0.1:29500",
            desc.rendezvous);
    else if (desc.kernels && desc.kernels->alloc && !desc.kernels->open)
        dt__refuse(&desc, DT_ERR_UNSUPPORTED,
            "dt_run: backend %s does not reach the memory of a device without queues",
            dt__backend_name(desc.backend));
    else if (!dt__tcp_key(&desc, rendezvous, key, why))
        dt__refuse(&desc, DT_ERR_ARG, "dt_run: %s", why);
    else
        dt__tcp_rank(&desc, rendezvous, key, rank_main, user);
    return desc.report->status;
}

/* ---- ranks that a launcher started: the caller is one, and there is no supervisor ---- */

#ifdef DT_USE_MPI

static dt_status dt__run_mpi(
    dt_run_desc *desc, dt_status (*rank_main)(dt_ctx *ctx, void *user), void *user) {
    const dt_host *host = desc->host ? desc->host : dt_host_default();
    const char *why = NULL;
    if (desc->timeout_s == 0) desc->timeout_s = 120;
    if (!dt__run_valid(desc)) return desc->report->status;
    dt__mpi *mpi = dt__mpi_open(host, desc, &why);
    if (!mpi) {
        dt__refuse(desc, DT_ERR_COMM, "dt_run: MPI cannot be used: %s", why);
        return desc->report->status;
    }
    dt_transport transport = { "mpi", mpi, dt__mpi_send, dt__mpi_recv, dt__mpi_test, dt__mpi_cancel,
        dt__mpi_fail };
    dt__control control = { mpi->tcp, dt__tcp_bulletin, dt__tcp_pid, NULL, mpi->tcp->check, NULL };
    int wrong = desc->ranks != 0 && desc->ranks != mpi->size;
    const dt__node *node = mpi->node.shared ? &mpi->node : NULL;
    const dt_host *of_rank = node ? dt__heap_make(node->shared, host, node->seat) : desc->host;
    if (!wrong) mpi->ctx = mpi->tcp->hears = dt__rank_ctx(desc, mpi->rank, of_rank);
    dt_status status = DT_OK;
    if (mpi->ctx)
        status = dt__run_over(
            mpi->ctx, desc, mpi->rank, mpi->size, &transport, node, &control, rank_main, user);
    if (node && !mpi->first.status && dt__aborted(node->shared)) mpi->first = node->shared->first;
    if (status && !mpi->first.status) dt__mpi_tell(mpi, status, dt_error_text(mpi->ctx));
    if (wrong)
        dt__refuse(
            desc, DT_ERR_ARG, "dt_run: %d ranks, but MPI started %d", desc->ranks, mpi->size);
    else if (!mpi->ctx)
        dt__refuse(desc, DT_ERR_MEM, "rank %d: no memory for its context", mpi->rank);
    if (!mpi->ctx) dt__mpi_tell(mpi, desc->report->status, desc->report->text);
    dt_ctx *ctx = mpi->ctx;
    void *range = mpi->range;
    size_t range_bytes = mpi->range_bytes;
    int closed = dt__mpi_close(mpi, desc->report);
    dt_ctx_free(ctx);
    if (closed && range) munmap(range, range_bytes);
    return desc->report->status;
}

#endif /* DT_USE_MPI */

dt_status dt_run(dt_run_desc desc, dt_status (*rank_main)(dt_ctx *ctx, void *user), void *user) {
    dt_report report;
    if (!desc.report) desc.report = &report;
    memset(desc.report, 0, sizeof *desc.report);
    if (!rank_main)
        dt__refuse(&desc, DT_ERR_ARG, "dt_run: rank_main is NULL");
    else if (desc.backend == DT_BACKEND_TCP)
        return dt__run_tcp(desc, rank_main, user);
#ifdef DT_USE_NCCL
    if (rank_main && desc.backend == DT_BACKEND_NCCL) return dt__run_tcp(desc, rank_main, user);
#endif
#ifdef DT_USE_MPI
    if (rank_main && desc.backend == DT_BACKEND_MPI) return dt__run_mpi(&desc, rank_main, user);
#endif
    dt_team *team = rank_main ? dt_team_make(desc) : NULL;
    if (!team) return desc.report->status;
    int ranks = team->desc.ranks, share_user = team->shared->apart && desc.user_bytes > 0;
    size_t jobs_bytes = (size_t)ranks * sizeof(dt__rank_job);
    dt__rank_job *jobs =
        (dt__rank_job *)team->host->alloc(team->host->user, jobs_bytes, DT_MEM_HOST);
    team->jobs = jobs;
    if (!jobs)
        dt__run_fail(
            team->shared, team->host, -1, DT_ERR_MEM, "dt_run: no memory for %d ranks", ranks);
    if (share_user) memcpy(team->shared->user, user, desc.user_bytes);
    for (int rank = 0; rank < ranks && jobs; rank++) {
        memset(&jobs[rank], 0, sizeof *jobs);
        jobs[rank].team = team;
        jobs[rank].rank = rank;
        jobs[rank].rank_main = rank_main;
        jobs[rank].user = share_user ? team->shared->user : user;
    }
    if (jobs && team->shared->apart)
        dt__run_processes(team, jobs);
    else if (jobs)
        dt__run_threads(team, jobs);
    if (share_user) memcpy(user, team->shared->user, desc.user_bytes);
    dt_team_free(team);
    return desc.report->status;
}

// ==== 28. Trace: code ===========================================================================

/* Recording must not disturb what it shows: an event is 88 bytes in a ring that is there already,
   written by the rank's own thread, without a lock and without a format; all text is made by
   dt_trace_write. Measured (tests/comm/test_trace.c, build/test_trace cost, gcc -O2, a shared Xeon): 110
   ns more for an operation, 330 for a mark or a block, of which 100 are two looks at the clock;
   without a trace 3 for a mark. Writing takes about 6 us an event.

   What is on the compute track is kept on a stack while it is open, and recorded whole when it
   ends. So a ring that overflows loses whole slices, and what is left still nests. */

enum { DT__TRACE_DEPTH = 32, DT__TRACE_KEYS = 128 };

typedef enum dt__trace_kind {
    DT__TRACED_BLOCK = 1,
    DT__TRACED_MARK,
    DT__TRACED_OP,
    DT__TRACED_WAIT,
    DT__TRACED_MEMORY
} dt__trace_kind;

enum { DT__TRACED_AGAIN = 1, DT__TRACED_STARTED = 2, DT__TRACED_ARROW = 4 };

typedef struct dt__trace_event {
    /* by this rank's clock; dt_trace_write makes them seconds since the first event */
    double begin, end;
    /* block: number, micro-batch; message: world rank of the other, tag */
    int32_t a, b;
    int16_t depth;      /* on the compute track */
    int16_t lane;       /* comm tracks: which */
    uint8_t kind, what; /* what: a dt_phase, or a dt__op_code */
    uint8_t algorithm, flags;
    union {
        /* seq of a message: which of its pair, 0: not known */
        struct {
            uint64_t bytes, seq;
            char name[40];
        } op;
        uint64_t memory[DT_MEM_CLASSES];
    } u;
} dt__trace_event;

/* Messages of a transport carry no number: sender and receiver count those of one (op, other,
   channel, tag) alike. */
typedef struct dt__trace_key {
    uint64_t count;
    uint32_t channel;
    int op, peer, tag;
} dt__trace_key;

typedef struct dt__trace {
    size_t room, used, at; /* at: where the next event goes */
    size_t lost;
    int depth, deeper; /* open slices; those that are too deep to be kept */
    /* started operations that were under way at once: lanes they may need */
    int most;
    /* a receive from any rank over a transport: its keys are no longer known */
    int any;
    size_t live[DT_MEM_CLASSES]; /* as last recorded */
    dt__trace_key keys[DT__TRACE_KEYS];
    dt__trace_event open[DT__TRACE_DEPTH];
    dt__trace_event *ring; /* (room), behind this struct */
} dt__trace;

static size_t dt__trace_bytes(size_t events) {
    return sizeof(dt__trace) + events * sizeof(dt__trace_event);
}

static double dt__trace_now(const dt__world *world) { return world->host->now(world->host->user); }

/* The next place of the ring. */
static dt__trace_event *dt__trace_place(dt__trace *trace) {
    dt__trace_event *event = &trace->ring[trace->at];
    trace->at = trace->at + 1 < trace->room ? trace->at + 1 : 0;
    if (trace->used < trace->room)
        trace->used++;
    else
        trace->lost++;
    return event;
}

static void dt__trace_name(dt__trace_event *event, const char *name) {
    size_t length = strlen(name), most = sizeof event->u.op.name - 1;
    memset(event->u.op.name, 0, sizeof event->u.op.name);
    memcpy(event->u.op.name, name, length < most ? length : most);
}

/* ---- the compute track ---- */

static void dt__trace_push(
    dt__world *world, dt__trace_kind kind, int what, int a, int b, const char *name) {
    dt__trace *trace = world->trace;
    if (trace->depth == DT__TRACE_DEPTH) {
        trace->deeper++;
        trace->lost++;
        return;
    }
    dt__trace_event *event = &trace->open[trace->depth];
    memset(event, 0, sizeof *event);
    event->kind = (uint8_t)kind;
    event->what = (uint8_t)what;
    event->a = a;
    event->b = b;
    event->depth = (int16_t)trace->depth++;
    event->flags = dt_recomputing(world->ctx) ? DT__TRACED_AGAIN : 0;
    dt__trace_name(event, name);
    event->begin = dt__trace_now(world);
}

/* The innermost open slice ends; memory is recorded where it is not what it was. */
static void dt__trace_pop(dt__world *world) {
    dt__trace *trace = world->trace;
    dt__trace_event *open = &trace->open[--trace->depth];
    dt_memory now = dt_memory_used(world->ctx);
    open->end = dt__trace_now(world);
    *dt__trace_place(trace) = *open;
    if (memcmp(now.live, trace->live, sizeof now.live) == 0) return;
    dt__trace_event *event = dt__trace_place(trace);
    memset(event, 0, sizeof *event);
    event->kind = DT__TRACED_MEMORY;
    event->begin = event->end = open->end;
    for (int i = 0; i < DT_MEM_CLASSES; i++) event->u.memory[i] = now.live[i];
    memcpy(trace->live, now.live, sizeof now.live);
}

static void dt__trace_enter(dt_ctx *ctx, const dt_event *event, void *user) {
    dt__world *world = (dt__world *)user;
    (void)ctx;
    if (world->trace)
        dt__trace_push(world, DT__TRACED_BLOCK, (int)event->phase, event->block, event->micro, "");
}

/* Marks that the block left open end with it. A block that was open when the trace began is not on
   the stack. */
static void dt__trace_leave(dt_ctx *ctx, const dt_event *event, void *user) {
    dt__world *world = (dt__world *)user;
    dt__trace *trace = world->trace;
    (void)ctx;
    (void)event;
    if (!trace) return;
    if (trace->deeper > 0) {
        trace->deeper--;
        return;
    }
    int block = trace->depth - 1;
    while (block >= 0 && trace->open[block].kind != DT__TRACED_BLOCK) block--;
    while (block >= 0 && trace->depth > block) dt__trace_pop(world);
}

void dt_trace_begin(dt_ctx *ctx, const char *name) {
    dt__world *world = dt__world_of(ctx);
    if (world && world->trace) dt__trace_push(world, DT__TRACED_MARK, 0, 0, 0, name ? name : "");
}

void dt_trace_end(dt_ctx *ctx) {
    dt__world *world = dt__world_of(ctx);
    dt__trace *trace = world ? world->trace : NULL;
    if (!trace) return;
    if (trace->deeper > 0)
        trace->deeper--;
    else if (trace->depth > 0 && trace->open[trace->depth - 1].kind == DT__TRACED_MARK)
        dt__trace_pop(world);
}

/* ---- operations ---- */

/* Which of its kind this message is, from 1; 0: not known. */
static uint64_t dt__trace_number(dt__world *world, const dt_work *work) {
    dt__trace *trace = world->trace;
    const dt__call *call = &work->call;
    if (call->any) trace->any = 1;
    if (call->any || (call->op == DT__RECV && trace->any)) return 0;
    int peer = work->comm->group->ranks[call->peer];
    uint32_t channel = work->comm->group->channel;
    uint32_t hash =
        ((uint32_t)peer * 31 + (uint32_t)call->tag) * 31 + channel * 2 + (call->op == DT__SEND);
    for (uint32_t i = 0; i < DT__TRACE_KEYS; i++) {
        dt__trace_key *key = &trace->keys[(hash + i) % DT__TRACE_KEYS];
        if (key->count == 0) {
            key->channel = channel;
            key->op = (int)call->op;
            key->peer = peer;
            key->tag = call->tag;
        } else if (key->channel != channel || key->op != (int)call->op || key->peer != peer ||
                   key->tag != call->tag) {
            continue;
        }
        /* both sides know channel, tag and count, so together they are the message's number */
        return (++key->count & 0xffff) | (uint64_t)((uint32_t)call->tag & 0xffff) << 16 |
               (uint64_t)channel << 32;
    }
    return 0;
}

/* The algorithm that a work runs, if it is not the direct one. */
static dt_algorithm dt__trace_algorithm(const dt_work *work) {
    for (int i = DT_RING; i < DT_ALGORITHMS && work->algorithm; i++) {
        if (dt__algorithm_of(&work->call, (dt_algorithm)i) == work->algorithm)
            return (dt_algorithm)i;
    }
    return DT_DIRECT;
}

static void dt__trace_add(
    const dt_work *work, dt__trace_kind kind, double begin, double end, int flags) {
    const dt_comm *comm = work->comm;
    dt__world *world = comm->world;
    const dt__call *call = &work->call;
    dt__trace_event *event = dt__trace_place(world->trace);
    event->kind = (uint8_t)kind;
    event->what = (uint8_t)call->op;
    event->flags = (uint8_t)flags;
    event->begin = begin;
    event->end = end > begin ? end : begin;
    event->a = -1;
    event->b = 0;
    event->depth = (int16_t)world->trace->depth;
    event->lane = 0;
    event->algorithm = (uint8_t)dt__trace_algorithm(work);
    event->u.op.bytes = dt_error(world->ctx) ? 0 : dt__sent_bytes(comm, call);
    event->u.op.seq = call->seq;
    memcpy(event->u.op.name, comm->group->name, DT__NAME_BYTES);
    event->u.op.name[DT__NAME_BYTES] = 0;
    if (!dt__is_to_one(call->op)) return;
    const dt__part *part = &work->parts[0]; /* still there, though n_parts is 0 */
    event->a = part->peer >= 0 ? comm->group->ranks[part->peer] : -1;
    event->b = call->tag;
    event->u.op.seq = part->order + (world->transport.send ? 0 : 1);
}

static void dt__trace_op(dt_work *work, double begin, double end) {
    dt__trace_add(work, DT__TRACED_OP, begin, end, 0);
}

/* A started operation is recorded when it has been waited for. */
static void dt__trace_wait(dt_work *work, double begin, double end) {
    double over = work->ended > work->begun ? work->ended : work->begun;
    dt__trace *trace = work->comm->world->trace;
    int under_way = (int)work->comm->world->started;
    if (under_way > trace->most) trace->most = under_way;
    dt__trace_add(work, DT__TRACED_OP, work->begun, over < end ? over : end, DT__TRACED_STARTED);
    dt__trace_add(work, DT__TRACED_WAIT, begin, end, 0);
}

/* ---- start and end ---- */

dt_status dt_trace_start(dt_ctx *ctx, size_t events) {
    dt__world *world = dt__world_of(ctx);
    if (events == 0) events = 65536;
    if (dt_error(ctx)) return dt_error(ctx);
    if (!world) return dt_fail(ctx, DT_ERR_ARG, "dt_trace_start: the context belongs to no run");
    if (world->trace)
        return dt_fail(ctx, DT_ERR_ARG, "dt_trace_start: the trace has begun already");
    if (events > (size_t)-1 / 4 / sizeof(dt__trace_event))
        return dt_fail(ctx, DT_ERR_ARG, "dt_trace_start: %zu events", events);
    dt__trace *trace =
        (dt__trace *)dt_alloc(ctx, DT_MEM_HOST, dt__trace_bytes(events), "the trace");
    if (!trace) return dt_error(ctx);
    /* the ring too: its pages are there before the first event */
    memset(trace, 0, dt__trace_bytes(events));
    trace->room = events;
    trace->ring = (dt__trace_event *)(void *)(trace + 1);
    world->listener.enter = dt__trace_enter;
    world->listener.leave = dt__trace_leave;
    world->trace = trace;
    return DT_OK;
}

size_t dt_trace_lost(const dt_ctx *ctx) {
    const dt__world *world = dt__world_of(ctx);
    return world && world->trace ? world->trace->lost : 0;
}

static void dt__trace_free(dt__world *world) {
    if (world->trace)
        dt_free(world->ctx, DT_MEM_HOST, world->trace, dt__trace_bytes(world->trace->room));
    world->trace = NULL;
}

/* ---- order and lanes ---- */

/* In the file what encloses comes before what it encloses, also where the clock gives both the same
   time. */
static int dt__trace_before(const dt__trace_event *x, const dt__trace_event *y) {
    if (x->begin != y->begin) return x->begin < y->begin;
    if (x->end != y->end) return x->end > y->end;
    return x->depth < y->depth;
}

/* A heap sort: in place, n log n whatever the order. */
static void dt__trace_sort(dt__trace_event *v, size_t n) {
    for (size_t start = n / 2, end = n; end > 1;) {
        if (start > 0) {
            start--;
        } else {
            dt__trace_event last = v[--end];
            v[end] = v[0];
            v[0] = last;
        }
        dt__trace_event event = v[start];
        size_t at = start;
        for (size_t child; (child = 2 * at + 1) < end; at = child) {
            if (child + 1 < end && dt__trace_before(&v[child], &v[child + 1])) child++;
            if (!dt__trace_before(&event, &v[child])) break;
            v[at] = v[child];
        }
        v[at] = event;
    }
}

/* Slices of one track must nest, and operations that are under way together do not. Blocking ones
   are in lane 0, where they follow one another; a started one goes into the first lane that is free
   from its start to its end. ends: of each lane, how far it is taken. Returns the lanes that are
   used. */
static int dt__trace_lanes(dt__trace_event *v, size_t n, double *ends, int lanes) {
    size_t blocking = 0; /* the first such operation behind the event */
    int most = 1;
    for (int lane = 0; lane < lanes; lane++) ends[lane] = v[0].begin;
    for (size_t i = 0; i < n; i++) {
        if (v[i].kind != DT__TRACED_OP) continue;
        int lane = 0;
        if (v[i].flags & DT__TRACED_STARTED) {
            if (blocking <= i) blocking = i + 1;
            while (blocking < n &&
                   (v[blocking].kind != DT__TRACED_OP || (v[blocking].flags & DT__TRACED_STARTED)))
                blocking++;
            if (blocking < n && v[blocking].begin < v[i].end) lane = 1;
            while (lane < lanes - 1 && ends[lane] > v[i].begin) lane++;
        }
        v[i].lane = (int16_t)lane;
        if (ends[lane] < v[i].end) ends[lane] = v[i].end;
        if (lane + 1 > most) most = lane + 1;
    }
    return most;
}

/* ---- all ranks' traces in one file ---- */

/* What each rank tells of its trace before it sends events. */
enum { DT__TELLS_EVENTS = 0, DT__TELLS_LOST, DT__TELLS_FIRST, DT__TELLS_LANES, DT__TELLS };

#define DT__TRACE_TEXT 32768

typedef struct dt__trace_out {
    dt_comm *comm;
    dt_ctx *ctx;
    dt__trace *trace; /* this rank's; NULL: it has none */
    double offset;    /* of rank 0's clock to this one */
    double *told;     /* (ranks, DT__TELLS) */
    double *ends;     /* lanes */
    int lanes;
    double base;                 /* the first event of all, by rank 0's clock */
    size_t piece;                /* events that a rank sends at once */
    dt__trace_event *mine, *all; /* (piece); on rank 0 (ranks, piece) */
    const char *path;
    char *temp, *text; /* rank 0: the file, and what is to be written next */
    size_t used;
    int64_t at;
    int fd, first;
} dt__trace_out;

/* A collective on host memory. */
static dt_status dt__trace_do(const dt__trace_out *out, dt__call call) {
    call.host = 1;
    return dt__do(out->comm, call);
}

/* rank 0's clock minus this one's. Whoever asks takes the answer as of the middle between question
   and answer: wrong by half of the shorter way at most, so the fastest of 8 counts. D. Mills, RFC
   5905; F. Cristian, 1989. Forks and threads have one clock. */
static double dt__trace_offset(const dt__trace_out *out) {
    dt__world *world = out->comm->world;
    double best = 0, offset = 0, at = 0;
    if (!world->transport.send) return 0;
    for (int rank = 1; rank < out->comm->place.size; rank++) {
        for (int i = 0; i < 8; i++) {
            double begin = dt__trace_now(world);
            if (out->comm->place.rank == rank) {
                dt__trace_do(out, dt__mail_call(DT__SEND, &at, NULL, 1, DT_F64, 0, -1));
                dt__trace_do(out, dt__mail_call(DT__RECV, NULL, &at, 1, DT_F64, 0, -1));
                double end = dt__trace_now(world);
                if (i > 0 && end - begin >= best) continue;
                best = end - begin;
                offset = at - (begin + end) / 2;
            } else if (out->comm->place.rank == 0) {
                dt__trace_do(out, dt__mail_call(DT__RECV, NULL, &at, 1, DT_F64, rank, -1));
                at = dt__trace_now(world);
                dt__trace_do(out, dt__mail_call(DT__SEND, &at, NULL, 1, DT_F64, rank, -1));
            }
        }
    }
    return offset;
}

/* ---- which messages both sides have recorded ---- */

static int dt__trace_is_message(const dt__trace_event *event, int rank) {
    return event->kind == DT__TRACED_OP && dt__is_to_one((dt__op_code)event->what) &&
           event->u.op.seq && event->a == rank;
}

/* Its number, and whether it is the receive. */
static uint64_t dt__trace_message(const dt__trace_event *event) {
    return event->u.op.seq * 2 + (event->what == DT__RECV);
}

static int dt__trace_heard(const uint64_t *v, size_t n, uint64_t number) {
    size_t low = 0;
    while (low < n) {
        size_t mid = low + (n - low) / 2;
        if (v[mid] < number)
            low = mid + 1;
        else
            n = mid;
    }
    return v[low] == number; /* v has a place more */
}

static void dt__trace_sort_numbers(uint64_t *v, size_t n) {
    for (size_t gap = n / 2; gap > 0; gap = gap == 2 ? 1 : gap * 5 / 11) { /* D. Shell, 1959 */
        for (size_t i = gap; i < n; i++) {
            uint64_t number = v[i];
            size_t at = i;
            for (; at >= gap && v[at - gap] > number; at -= gap) v[at] = v[at - gap];
            v[at] = number;
        }
    }
}

/* Tells each rank the numbers of what was sent to it and received from it, hears the same, and
   gives an arrow to what both know. counts: 4 for each rank. */
static void dt__trace_match(
    const dt__trace_out *out, size_t *counts, uint64_t *tell, uint64_t *hear) {
    dt__trace *trace = out->trace;
    int n = out->comm->place.size;
    size_t *told = counts, *heard = counts + n, at = 0;
    for (int rank = 0; rank < n; rank++) {
        for (size_t i = 0; trace && told[rank] && i < trace->used; i++)
            if (dt__trace_is_message(&trace->ring[i], rank))
                tell[at++] = dt__trace_message(&trace->ring[i]);
    }
    if (dt__trace_do(out, dt__all_to_all_v_call(tell, told, hear, heard, DT_F64)) != DT_OK) return;
    at = 0;
    for (int rank = 0; rank < n; at += heard[rank++]) {
        uint64_t next = hear[at + heard[rank]]; /* the place behind them is used as a mark */
        dt__trace_sort_numbers(hear + at, heard[rank]);
        hear[at + heard[rank]] = 0;
        for (size_t i = 0; trace && told[rank] && i < trace->used; i++) {
            dt__trace_event *event = &trace->ring[i];
            if (!dt__trace_is_message(event, rank)) continue;
            if (dt__trace_heard(hear + at, heard[rank], dt__trace_message(event) ^ 1))
                event->flags |= DT__TRACED_ARROW;
            else
                event->flags &= (uint8_t)~DT__TRACED_ARROW;
        }
        hear[at + heard[rank]] = next;
    }
}

static void dt__trace_arrows(const dt__trace_out *out) {
    int n = out->comm->place.size;
    size_t bytes = 2 * (size_t)n * sizeof(size_t);
    size_t *counts = (size_t *)dt_alloc(out->ctx, DT_MEM_HOST, bytes, "the trace");
    if (!counts) return;
    memset(counts, 0, bytes);
    for (size_t i = 0; out->trace && i < out->trace->used; i++) {
        const dt__trace_event *event = &out->trace->ring[i];
        if (event->a >= 0 && event->a < n && dt__trace_is_message(event, event->a))
            counts[event->a]++;
    }
    /* 8 bytes, of whatever */
    dt__trace_do(out, dt__call_make(DT__ALL_TO_ALL, counts, counts + n, 1, DT_F64));
    size_t tell = dt__sum_of(counts, n), hear = dt__sum_of(counts + n, n),
           room = (tell + hear + 2) * sizeof(uint64_t);
    uint64_t *numbers =
        dt_error(out->ctx) ? NULL : (uint64_t *)dt_alloc(out->ctx, DT_MEM_HOST, room, "the trace");
    if (numbers) dt__trace_match(out, counts, numbers, numbers + tell + 1);
    dt_free(out->ctx, DT_MEM_HOST, numbers, room);
    dt_free(out->ctx, DT_MEM_HOST, counts, bytes);
}

/* ---- text ---- */

static void dt__trace_flush(dt__trace_out *out) {
    if (dt_error(out->ctx) == DT_OK)
        dt__file_put(out->ctx, out->temp, out->fd, out->text, (int64_t)out->used, out->at);
    out->at += (int64_t)out->used;
    out->used = 0;
}

/* At most 1,000 bytes at once. */
DT_PRINTF(2, 3) static void dt__trace_put(dt__trace_out *out, const char *fmt, ...) {
    va_list args;
    if (out->used + 1024 > DT__TRACE_TEXT) dt__trace_flush(out);
    va_start(args, fmt);
    int length = vsnprintf(out->text + out->used, 1024, fmt, args);
    va_end(args);
    if (length > 0) out->used += length < 1024 ? (size_t)length : 1023;
}

/* The inside of a JSON string. What is no UTF-8, such as a name that was cut, becomes U+FFFD. */
static void dt__trace_words(dt__trace_out *out, const char *s) {
    size_t n = strlen(s), good = dt__utf8_bad(s, n);
    for (size_t i = 0, plain = 0; i < n; i += plain ? plain : 1) {
        plain = 0;
        for (char c; i + plain < good; plain++)
            if ((unsigned char)(c = s[i + plain]) < 32 || c == '"' || c == '\\') break;
        if (plain > 0)
            dt__trace_put(out, "%.*s", (int)plain, s + i);
        else if (i == good)
            dt__trace_put(out, "\\ufffd");
        else if ((unsigned char)s[i] < 32)
            dt__trace_put(out, "\\u%04x", (unsigned)s[i]);
        else
            dt__trace_put(out, "\\%c", s[i]);
        if (i == good) good = i + 1 + dt__utf8_bad(s + i + 1, n - i - 1);
    }
}

/* Nanoseconds; by whole numbers no locale has a say. A clock that gives no number gives 0. */
static int64_t dt__trace_ns(double seconds) {
    return seconds > 0 && seconds < 4e6 ? (int64_t)(seconds * 1e9 + 0.5) : 0;
}

static void dt__trace_time(dt__trace_out *out, const char *key, int64_t ns) {
    dt__trace_put(out, ",\"%s\":%lld.%03d", key, (long long)(ns / 1000), (int)(ns % 1000));
}

/* Lane 0 is track 1; 2 and 3 are kept for offload and loaders. */
static int dt__trace_track(int lane) { return lane == 0 ? 1 : lane + 3; }

static void dt__trace_head(dt__trace_out *out, const char *phase, int rank, int track) {
    dt__trace_put(
        out, "%s{\"ph\":\"%s\",\"pid\":%d,\"tid\":%d", out->first ? "" : ",\n", phase, rank, track);
    out->first = 0;
}

static void dt__trace_named(
    dt__trace_out *out, int rank, int track, const char *what, const char *name) {
    dt__trace_head(out, "M", rank, track);
    dt__trace_put(out, ",\"name\":\"%s\",\"args\":{\"name\":\"%s\"}}", what, name);
}

/* The names of a rank's tracks. */
static void dt__trace_tracks(dt__trace_out *out, int rank, int lanes) {
    char name[32];
    snprintf(name, sizeof name, "rank %d", rank);
    dt__trace_named(out, rank, 0, "process_name", name);
    dt__trace_head(out, "M", rank, 0);
    dt__trace_put(out, ",\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%d}}", rank);
    dt__trace_named(out, rank, 0, "thread_name", "compute");
    for (int lane = 0; lane < lanes; lane++) {
        snprintf(name, sizeof name, lane ? "comm %d" : "comm", lane + 1);
        dt__trace_named(out, rank, dt__trace_track(lane), "thread_name", name);
        dt__trace_head(out, "M", rank, dt__trace_track(lane));
        dt__trace_put(out, ",\"name\":\"thread_sort_index\",\"args\":{\"sort_index\":%d}}",
            dt__trace_track(lane));
    }
}

static const char *dt__trace_algorithm_name(int algorithm) {
    switch (algorithm) {
    case DT_RING: return "ring";
    case DT_DOUBLING: return "doubling";
    case DT_TREE: return "tree";
    default: return "direct";
    }
}

/* Name, category and arguments of a slice. */
static void dt__trace_slice(dt__trace_out *out, const dt__trace_event *event) {
    static const char *const phases[] = { "?", "F", "B", "I", "W" };
    static const char *const cats[] = { "?", "fwd", "bwd", "bwd-input", "bwd-weight" };
    int phase = event->what <= DT_BACKWARD_WEIGHT ? event->what : 0,
        again = event->flags & DT__TRACED_AGAIN;
    dt__op_code op = (dt__op_code)event->what;
    if (event->kind == DT__TRACED_MARK) {
        dt__trace_put(out, ",\"cat\":\"mark\",\"name\":\"");
        dt__trace_words(out, event->u.op.name);
        dt__trace_put(out, "\"");
        return;
    }
    if (event->kind == DT__TRACED_BLOCK) {
        dt__trace_put(out, ",\"cat\":\"%s\",\"name\":\"%s %d", again ? "recompute" : cats[phase],
            phases[phase], event->b);
        if (event->a > 0) dt__trace_put(out, " block %d", event->a);
        dt__trace_put(out, "%s\",\"args\":{\"mb\":%d,\"block\":%d}", again ? " again" : "",
            event->b, event->a);
        return;
    }
    int wait = event->kind == DT__TRACED_WAIT;
    dt__trace_put(out, ",\"cat\":\"%s\",\"name\":\"%s%s ", wait ? "wait" : "comm",
        wait ? "wait " : "", dt__pattern_of(op)->name);
    dt__trace_words(out, event->u.op.name);
    dt__trace_put(out, "\",\"args\":{\"group\":\"");
    dt__trace_words(out, event->u.op.name);
    dt__trace_put(out, "\"");
    if (!wait) dt__trace_put(out, ",\"bytes\":%llu", (unsigned long long)event->u.op.bytes);
    if (!dt__is_to_one(op))
        dt__trace_put(out, ",\"seq\":%llu", (unsigned long long)event->u.op.seq);
    if (event->a >= 0) dt__trace_put(out, ",\"peer\":%d,\"tag\":%d", event->a, event->b);
    if (event->algorithm > DT_DIRECT)
        dt__trace_put(out, ",\"algorithm\":\"%s\"", dt__trace_algorithm_name(event->algorithm));
    if (event->flags & DT__TRACED_STARTED) dt__trace_put(out, ",\"started\":true");
    dt__trace_put(out, "}");
}

/* An end of an arrow, inside its slice: from the sender's beginning to just before the receiver's
   end. */
static void dt__trace_arrow(dt__trace_out *out, const dt__trace_event *event, int rank, int track,
    int64_t begin, int64_t end) {
    int sent = event->what == DT__SEND, from = sent ? rank : event->a, to = sent ? event->a : rank;
    uint64_t pair = (uint64_t)from * (uint64_t)out->comm->place.size + (uint64_t)to,
             n = event->u.op.seq;
    /* a JSON number holds 53 bits: of n, 21 */
    uint64_t id = pair << 21 | ((n ^ n >> 21 ^ n >> 42) & 0x1fffff);
    dt__trace_head(out, sent ? "s" : "f", rank, track);
    dt__trace_put(out, ",\"cat\":\"message\",\"name\":\"message\",\"id\":%llu%s",
        (unsigned long long)id, sent ? "" : ",\"bp\":\"e\"");
    dt__trace_time(out, "ts", sent || end == begin ? begin : end - 1);
    dt__trace_put(out, "}");
}

static void dt__trace_event_text(dt__trace_out *out, const dt__trace_event *event, int rank) {
    static const char *const classes[] = { "params", "grads", "optim", "acts", "comm", "host",
        "temp" };
    int64_t begin = dt__trace_ns(event->begin - out->base),
            end = dt__trace_ns(event->end - out->base);
    int track = event->kind == DT__TRACED_OP ? dt__trace_track(event->lane) : 0;
    if (end < begin) end = begin;
    dt__trace_head(out, event->kind == DT__TRACED_MEMORY ? "C" : "X", rank, track);
    dt__trace_time(out, "ts", begin);
    if (event->kind == DT__TRACED_MEMORY) {
        dt__trace_put(out, ",\"name\":\"memory\",\"args\":{");
        for (int i = 0; i < DT_MEM_CLASSES; i++)
            dt__trace_put(out, "%s\"%s\":%llu", i ? "," : "", classes[i],
                (unsigned long long)event->u.memory[i]);
        dt__trace_put(out, "}}");
        return;
    }
    dt__trace_time(out, "dur", end - begin);
    dt__trace_slice(out, event);
    dt__trace_put(out, "}");
    if (event->flags & DT__TRACED_ARROW) dt__trace_arrow(out, event, rank, track, begin, end);
}

/* ---- the steps of dt_trace_write ---- */

/* Sorts what this rank has, gives its operations lanes, tells all ranks what is to come. */
static void dt__trace_prepare(dt__trace_out *out) {
    dt__trace *trace = out->trace;
    double mine[DT__TELLS] = { 0, 0, 1e300, 1 };
    size_t n = (size_t)out->comm->place.size;
    out->told = (double *)dt_alloc(out->ctx, DT_MEM_HOST, n * sizeof mine, "the trace");
    if (trace) {
        out->lanes = trace->most + 1;
        out->ends = (double *)dt_alloc(
            out->ctx, DT_MEM_HOST, (size_t)out->lanes * sizeof(double), "the trace");
    }
    if (dt_error(out->ctx)) return;
    if (trace && trace->used > 0) {
        dt__trace_sort(trace->ring, trace->used);
        /* in their order now: the first is the oldest */
        trace->at = trace->used % trace->room;
        mine[DT__TELLS_LANES] = dt__trace_lanes(trace->ring, trace->used, out->ends, out->lanes);
        mine[DT__TELLS_FIRST] = trace->ring[0].begin + out->offset;
    }
    mine[DT__TELLS_EVENTS] = trace ? (double)trace->used : 0;
    mine[DT__TELLS_LOST] = trace ? (double)trace->lost : 0;
    if (dt__trace_do(out, dt__call_make(DT__ALL_GATHER, mine, out->told, DT__TELLS, DT_F64)) !=
        DT_OK)
        return;
    out->base = out->told[DT__TELLS_FIRST];
    for (size_t rank = 1; rank < n; rank++) {
        double first = out->told[rank * DT__TELLS + DT__TELLS_FIRST];
        if (first < out->base) out->base = first;
    }
    out->piece = (1u << 20) / n / sizeof(dt__trace_event);
    if (out->piece < 16) out->piece = 16;
    out->mine = (dt__trace_event *)dt_alloc(
        out->ctx, DT_MEM_HOST, out->piece * sizeof *out->mine, "the trace");
}

/* Rank 0: the file with the names of all tracks. */
static void dt__trace_open(dt__trace_out *out) {
    int n = out->comm->place.size;
    out->temp = dt__join(out->ctx, out->path, strlen(out->path), ".tmp");
    out->text = (char *)dt_alloc(out->ctx, DT_MEM_HOST, DT__TRACE_TEXT, "the trace");
    out->all = (dt__trace_event *)dt_alloc(
        out->ctx, DT_MEM_HOST, (size_t)n * out->piece * sizeof *out->all, "the trace");
    out->fd = out->all ? dt__file_open(out->ctx, out->temp, 1, 0) : -1;
    if (out->fd < 0) return;
    dt__trace_put(out, "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"lost\":[");
    for (int rank = 0; rank < n; rank++)
        dt__trace_put(out, "%s%.0f", rank ? "," : "", out->told[rank * DT__TELLS + DT__TELLS_LOST]);
    dt__trace_put(out, "]},\"traceEvents\":[\n");
    for (int rank = 0; rank < n; rank++) {
        double lost = out->told[rank * DT__TELLS + DT__TELLS_LOST];
        dt__trace_tracks(out, rank, (int)out->told[rank * DT__TELLS + DT__TELLS_LANES]);
        if (lost > 0)
            dt_log(out->ctx, DT_LOG_NOTICE,
                "%s: rank %d lost %.0f events, the newest %.0f are there", out->path, rank, lost,
                out->told[rank * DT__TELLS + DT__TELLS_EVENTS]);
    }
}

/* Every rank sends a piece, rank 0 writes them, until the longest trace is at its end. */
static void dt__trace_merge(dt__trace_out *out) {
    int n = out->comm->place.size, root = out->comm->place.rank == 0;
    double most = 0;
    for (int rank = 0; rank < n; rank++)
        if (out->told[rank * DT__TELLS] > most) most = out->told[rank * DT__TELLS];
    for (size_t done = 0; (double)done < most && dt_error(out->ctx) == DT_OK; done += out->piece) {
        size_t mine = out->trace && out->trace->used > done ? out->trace->used - done : 0;
        memset(out->mine, 0, out->piece * sizeof *out->mine);
        for (size_t i = 0; i < mine && i < out->piece; i++) {
            out->mine[i] = out->trace->ring[done + i];
            out->mine[i].begin += out->offset;
            out->mine[i].end += out->offset;
        }
        dt__trace_do(out, dt__rooted_call(DT__GATHER, out->mine, out->all,
                              out->piece * sizeof *out->mine / 8, DT_F64, 0));
        for (int rank = 0; root && rank < n; rank++) {
            const dt__trace_event *its = out->all + (size_t)rank * out->piece;
            for (size_t i = 0; i < out->piece && (double)(done + i) < out->told[rank * DT__TELLS];
                 i++) {
                if (dt_error(out->ctx) == DT_OK) dt__trace_event_text(out, &its[i], rank);
            }
        }
    }
}

/* Rank 0: the file gets its name when it is complete. */
static void dt__trace_shut(dt__trace_out *out) {
    if (out->fd >= 0) {
        dt__trace_put(out, "\n]}\n");
        dt__trace_flush(out);
        dt__file_shut(out->ctx, out->temp, out->fd);
        if (dt_error(out->ctx) == DT_OK) dt__file_publish(out->ctx, out->temp, out->path);
        if (dt_error(out->ctx)) dt_ctx_io(out->ctx)->remove(dt_ctx_io(out->ctx)->user, out->temp);
    }
    dt__text_drop(out->ctx, out->temp);
    dt_free(out->ctx, DT_MEM_HOST, out->text, DT__TRACE_TEXT);
    dt_free(out->ctx, DT_MEM_HOST, out->all,
        (size_t)out->comm->place.size * out->piece * sizeof *out->all);
}

dt_status dt_trace_write(dt_comm *comm, const char *path) {
    if (!comm) return DT_ERR_ARG;
    dt__world *world = comm->world, before = *world;
    dt__trace_out out;
    dt_link none = { 0, 0 };
    if (dt_error(world->ctx)) return dt_error(world->ctx);
    if (comm != world->comm || !path)
        return dt__comm_fail(world, DT_ERR_ARG,
            "dt_trace_write on %s: it needs the world, and a path", comm->group->name);
    memset(&out, 0, sizeof out);
    out.comm = comm;
    out.ctx = world->ctx;
    out.trace = world->trace;
    out.path = path;
    out.fd = -1;
    out.first = 1;
    world->trace = NULL; /* what follows is not recorded, */
    world->link = none;  /* and takes no time of a simulated link */
    out.offset = dt__trace_offset(&out);
    dt__trace_prepare(&out);
    if (dt_error(out.ctx) == DT_OK) dt__trace_arrows(&out);
    if (dt_error(out.ctx) == DT_OK && comm->place.rank == 0) dt__trace_open(&out);
    if (dt_error(out.ctx) == DT_OK) dt__trace_merge(&out);
    if (comm->place.rank == 0) dt__trace_shut(&out);
    /* nobody goes on before the file is there: its failure is everybody's */
    (dt_barrier)(comm);
    dt_free(out.ctx, DT_MEM_HOST, out.mine, out.piece * sizeof *out.mine);
    dt_free(out.ctx, DT_MEM_HOST, out.told, (size_t)comm->place.size * DT__TELLS * sizeof(double));
    dt_free(out.ctx, DT_MEM_HOST, out.ends, (size_t)out.lanes * sizeof(double));
    memcpy(world->bytes, before.bytes, sizeof before.bytes);
    world->seconds = before.seconds;
    world->traffic = before.traffic;
    world->link = before.link;
    world->trace = out.trace;
    return dt_error(out.ctx);
}

#endif /* DT_IMPLEMENTATION */

/* HISTORY
     0.2.0   dt_report.left_behind; every overlap of buffers in an all-to-all is an error
     0.1.0   threads, processes, tcp, MPI, transports; collectives blocking and started, groups,
             faults, trace

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
