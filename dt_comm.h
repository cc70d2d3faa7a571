/* dt_comm.h - v0.2.0 - groups of ranks: launch, collectives, faults - public domain or MIT, see the
   end of the file

   The second of four single-header libraries; dt_tensor.h, which it includes, lists them all. It
   runs one function on many ranks and lets groups of ranks sum, gather and exchange arrays. When a
   rank fails, the waits of all other ranks end, and the error text names the rank that failed
   first. A rank is a thread, a forked process, or a process that exchanges messages with the other
   ranks through a transport (five functions).

   DOES NOT: install signal handlers, call exit or abort, keep global state, wait for a message
   without a timeout, start threads other than the ranks that the caller of dt_run asked for.

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
       DT_IMPLEMENTATION   adds the code to the declarations; define it in exactly one file
       DT_USE_MPI          adds the MPI backend, which needs mpi.h of MPI 3.1 or later
       DT_USE_NCCL         adds the NCCL backend, which needs nccl.h of NCCL 2.18.1 or later. Under
                           nvcc this header defines DT_USE_NCCL itself if nccl.h is found and
                           DT_NO_NCCL is not defined. With DT_NCCL_DLOPEN the program does not link
                           NCCL: it loads libnccl.so.2 at run time and keeps the library loaded
       DT_NCCL_MIN_BYTES   size in bytes, 4096 by default. Messages between devices that are larger
                           go through NCCL. The value must be equal on every rank
       DT_NCCL_F32_WINDOW  number of elements, 4194304 by default, of each group's f32 window,
                           through which NCCL sums bf16 and f16. The value must be equal on every
                           rank and at least the number of ranks
       DT_STATIC           makes everything static; define it in every file that includes dt_comm.h
       DT_NO_CHECKS        leaves out the operation records, the comparison of the ranks' calls in
                           shared memory and the deadlock detection, to measure what they cost

   CONTENTS
     1. Launch (dt_run, backends, rendezvous, launcher, fault injection)
     2. Groups (process group, split, traffic, choice of algorithm)
     3. Collectives (all-reduce, reduce-scatter, all-gather, all-to-all, broadcast, barrier)
     4. Send and receive (point-to-point messages)
     5. Nonblocking operations (overlap of communication and computation)
     6. Scalars and agreement
     7. Attach, records, trace (transport, flight recorder, straggler, Chrome trace)
     8. Implementation: state that ranks share (the shared memory range and its structs)
     9. The first failure (failure detection and propagation, abort)
    10. Collective calls: validation and description
    11. Operation records (flight recorder, deadlock detection)
    12. Progress engine (waiting: spin, yield, nap)
    13. Messages in shared memory (eager and rendezvous protocols)
    14. Collectives in shared memory (direct all-reduce, windows)
    15. Messages over a transport (pinned copies of device memory)
    16. Collective algorithms (ring all-reduce, recursive doubling, tree all-reduce, direct,
        hierarchical)
    17. Begin, wait, dispatch (comparison of calls, device operations)
    18. Hang diagnosis and deadlock detection
    19. Fault injection
    20. Scalars and agreement: code (straggler detection)
    21. Process groups: code
    22. Shared-memory heap of forked ranks
    23. Launcher discovery (torchrun, mpirun, srun)
    24. TCP (rendezvous, heartbeat, failure detection)
    25. MPI
    26. NCCL
    27. Attach and launch: code
    28. Trace: code

   CONTRACT
     Memory     dt_run allocates one shared memory segment for all ranks: about 130 KiB for each
                pair of ranks and 34 KiB for each rank of each group. Most of its pages stay
                untouched until messages use them. Groups belong to the context's world and are
                freed with the world. dt accesses the buffers of a call only until the call returns,
                or for a nonblocking operation until its dt_wait returns. After that no other rank
                touches the buffers, even after an error. A forked rank's memory of the classes
                params, grads, acts and comm (dt_alloc) lies in the segment too; the rank's other
                memory is copied through the segment in windows of DT_WINDOW_BYTES. MPI ranks have
                one segment for each machine, if the machine's system allows shared memory. Ranks
                that are threads on several GPUs access each other's memory directly. If one of the
                GPUs cannot access another one (peer access), dt_run fails with DT_ERR_DEVICE; use
                backend nccl in this case.
     Errors     If a collective cannot be done, its context fails (dt_error, dt_error_text) and the
                call returns the error's status. The failure of one context, also by dt_fail in an
                op or in your code or by a refused allocation, makes all ranks fail: the waiting
                call and every later call of the other ranks return DT_ERR_PEER, and their error
                text names the rank that failed first and its reason. If ranks call different
                operations, or the same operation with different counts, types, reductions or roots,
                every rank gets an error that names two differing calls and their call sites, once
                all ranks have called (for tcp and mpi see dt_run_desc.check). If all ranks wait and
                no message is in flight, every rank gets an error that names the cycle of waits,
                without waiting for the timeout. The error text names a rank that has ended or died,
                and the signal that killed it. For a rank that does not arrive within timeout_s the
                text also gives its state: stopped, spinning, asleep or late. Error texts give world
                ranks. Only the first failure is logged as an error. Timeouts count only time in
                which a rank's process runs, so a job that is suspended as a whole (Ctrl-Z, scontrol
                suspend) continues when resumed.
     Threads    With threads and procs the caller of dt_run is the supervisor and not a rank. A
                dt_comm belongs to its rank's thread. All ranks use the tables of dt_run_desc at the
                same time. Several calls of dt_run can run at the same time.
     Order      A reduction computes ((x0 op x1) op x2) ... for every element, where xr is rank r's
                element. The order does not depend on the count, the backend or the algorithm
                (except DT_RING, see dt_comm_set_algorithm), and every rank gets the same bits. bf16
                and f16 are reduced in f32 and rounded once at the end. So an all-reduce equals, bit
                for bit, a reduce followed by a broadcast, and a reduce-scatter followed by an
                all-gather. The exception is NCCL, which reduces device memory in its own order
                (section 26). With NCCL the last bits of floating-point sums and products may differ
                from a reduction in rank order, and an all-reduce may differ from a reduce followed
                by a broadcast.
     In place   Three overlaps of a rank's buffers are allowed, as in NCCL. All-reduce and reduce:
                send == recv. Reduce-scatter and scatter: recv == send + rank * count. All-gather
                and gather: send == recv + rank * count. With any other overlap, and with any
                overlap in an all-to-all, the call returns DT_ERR_ARG before it moves data.
     Groups     In every function, comm NULL means a group that consists of the calling rank alone.
                A collective on a group of one rank is a local copy.
     Tags       [local]: a rank calls the function on its own. [pairwise]: two ranks call it.
                [collective: comm]: every rank of the group calls it, and all ranks make their
                collective calls in the same order. */

#ifndef DT_COMM_H
#define DT_COMM_H

#include "dt_tensor.h"

#if DT_VERSION != 200
#error "dt_comm.h 0.2.0 needs dt_tensor.h 0.2.0: copy all headers from one release"
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

/* Backend: what a rank is, and what carries its data. */
typedef enum dt_backend {
    DT_BACKEND_AUTO = 0, /* threads */
    DT_BACKEND_THREADS,  /* each rank is a thread of this process */
    DT_BACKEND_PROCS,    /* each rank is a fork of this process */
    /* each rank is a process that calls dt_run; the processes connect over TCP sockets */
    DT_BACKEND_TCP,
    DT_BACKEND_MPI, /* needs DT_USE_MPI: each rank is a process that MPI's launcher started */
    /* As DT_BACKEND_TCP, but each rank has its own GPU and NCCL carries large messages. Needs
       DT_USE_NCCL. */
    DT_BACKEND_NCCL
} dt_backend;

/* The first failure of a run; dt_run fills it (dt_run_desc.report). */
typedef struct dt_report {
    dt_status status; /* DT_OK if there was no failure */
    int rank;         /* the rank that recorded the failure, or -1 if the run could not start */
    char text[512];   /* "rank 3: dt_linear(w1): ..." */
    int left_behind;  /* number of ranks whose thread or process still ran when dt_run returned */
} dt_report;

/* A simulated slow network, for learning. An operation takes at least latency_s + bytes /
   bytes_per_s seconds, where `bytes` is its number of bytes as dt_comm_bytes counts them. This time
   runs from the start of the operation, or from the end of the rank's previous operation if that is
   later. A rank that waits for the operation sleeps. Scalars (section 6) cost nothing. If both
   fields are 0, no link is simulated. */
typedef struct dt_link {
    double latency_s, bytes_per_s;
} dt_link;

typedef struct dt_run_desc {
    int ranks;          /* number of ranks; 0 means 1, or for mpi the launcher's count */
    dt_backend backend; /* DT_BACKEND_AUTO means threads */
    /* Longest time that a rank waits for another, in seconds, at most 1e9; 0 means 120. A tcp run
       survives a network partition that ends at least max(timeout_s / 8, 1 s) before the timeout.
       On Linux before 6.15 it survives a partition of up to timeout_s / 2. */
    double timeout_s;
    uint64_t seed; /* seed of every rank's context (dt_ctx_desc); 0 means 1 */
    /* The host table; NULL means dt_host_default(). All ranks use the table at the same time. For
       procs the table must have the function `map`. Its `alloc` is not called for the memory
       classes that lie in the shared memory segment. For mpi, ranks share no memory if the table
       has no `map`. */
    const dt_host *host;
    /* NULL means the default of dt_ctx_desc, or for procs dt_kernels_cpu() */
    const dt_kernels *kernels;
    const dt_io *io;   /* NULL means dt_io_default() */
    dt_report *report; /* if not NULL, dt_run writes the first failure to it */
    /* For procs: size in bytes of the object that dt_run's `user` points to. All ranks share one
       copy of the object, and dt_run copies it back before it returns. If user_bytes is 0, each
       rank has its own private copy, made by fork. */
    size_t user_bytes;
    dt_link link;
    /* For mpi: the number of consecutive ranks that share memory. 1 means that no ranks share
       memory, 0 that all ranks of one machine do. */
    int node_ranks;
    int rank; /* for tcp and nccl: the rank of this process */
    /* For tcp and nccl: the rendezvous, which is the address where rank 0 listens until all ranks
       have connected, such as "10.0.0.1:29500" or "node17:29500". NULL means "127.0.0.1:29500". A
       name is resolved to an IPv4 address; timeout_s does not limit the time that the system's
       resolver takes. Each other rank listens at a free port of the interface through which it
       reaches rank 0. If the address is not a loopback address (127.0.0.0/8), every rank must prove
       that it knows the job's token. Nothing is encrypted. */
    const char *rendezvous;
    /* Limit on the live bytes of one rank, summed over all classes of dt_memory; 0: no limit. */
    size_t mem_limit;
    /* For tcp, nccl and mpi: the job's secret, at least 16 bytes. Ranks prove to each other that
       they know it. If `token` is NULL, the secret is the contents of the file that the environment
       variable DT_TOKEN_FILE names (only its owner may have permissions for it), else the value of
       DT_TOKEN. On the loopback no token is needed. For mpi all ranks use rank 0's token, and rank
       0 makes one if it has none. When the rendezvous is complete, dt erases its copy of the token
       and all keys derived from it. `token` and DT_TOKEN themselves stay in memory, so prefer the
       file. */
    const char *token;
    int read_fault_env; /* 1: read faults from DT_FAULT in the environment, if `fault` is NULL */
    const char *fault;  /* faults to inject, written as described below; NULL: none here */
    /* For tcp, nccl and mpi: whether the ranks compare their calls before each operation. 1 means
       always, -1 never, and 0 in the first 100 steps, or always if DT_CHECK=1 is in the
       environment. */
    int check;
    /* A flag that a signal handler or another thread sets to 1 to ask for the ranks' status; may be
       NULL. dt then logs the table of dt_ranks_text as a notice and sets the flag to 0 again. For
       procs the supervisor reads its own copy of the flag. For tcp, nccl and mpi a rank reads its
       flag while it waits. */
    int *status_request;
} dt_run_desc;

/* Fault injection, for tests and for learning. A fault is written KIND:rank=R:seq=N[:s=SECONDS];
   commas separate several faults. N counts, from 1, the operations of sections 3 to 6 that rank R
   begins.

   Six kinds take effect before operation N. "kill" and "stop" send the rank SIGKILL or SIGSTOP,
   "exit" ends its process with status 7, and "spin" loops for ever. "delay" sleeps for SECONDS
   (default 1). "drop" skips the call, which then does not count as an operation. Two kinds take
   effect after operation N and change the middle element of the received data: "flip" inverts one
   bit, and "nan" writes a NaN.

   Of the faults for one rank, the first 8 take effect. A rank that is a thread cannot be killed or
   stopped. Instead of a kill or an exit it fails; after a stop or a spin it begins no operation
   until another rank has failed. */

/* [threads, procs: the caller is the supervisor, not a rank; tcp, nccl, mpi: the caller is one
   rank] Runs rank_main on every rank, each with its own context and its own handle of the world.
   Waits for all ranks and frees the contexts and handles. Returns the status of the first failure,
   which has been logged. Returns DT_OK only if every rank_main returned DT_OK, no context failed
   and every message was received. A rank_main that returns an error counts as a failure even if its
   context has not failed.

   While no rank has failed, dt_run waits for every rank_main to return, because it cannot tell a
   long computation from an endless one. Ranks that have not ended timeout_s after the first failure
   are killed. A stopped rank is killed after one second.

   procs: call dt_run from a process with one thread. Forked ranks flush stdio and end with _exit,
   so atexit handlers do not run in them. Memory that a rank writes is private to the rank, except
   the object `user` if user_bytes is set.

   threads: exit() in a rank ends the whole process. A thread cannot be killed. If a rank's thread
   has not ended in time, dt_run returns without waiting for the thread, logs a notice and counts
   the rank in dt_report.left_behind. (It does the same for a process that the kernel does not let
   die.) Memory of the run that this thread may touch is freed when the thread ends. While the
   thread's rank_main continues, its operations fail, but it still uses `user` and the objects that
   desc points to. Keep these objects valid, or end the process with _exit. A rank_main that ends
   its thread (pthread_exit, pthread_cancel) is a failure of that rank.

   tcp, nccl: rank_main runs in the calling thread, as rank desc.rank. If rank_main ends that
   thread, dt_run cannot return. All ranks must arrive within timeout_s. A rank that has ended waits
   up to timeout_s for the others to end. The status and the report describe the first failure that
   this rank noticed or was told of. DT_OK means that this rank succeeded and learned of no other
   rank's failure.

   mpi: the caller is one rank, which MPI's launcher started, and it runs rank_main itself.
   desc.ranks is 0 or the launcher's number of processes, and all processes call dt_run. dt_run
   initializes and finalizes MPI unless the program has initialized it. MPI can be initialized only
   once in a process, so a program that calls dt_run twice must initialize MPI itself and call
   dt_run from the same thread. During dt_run, errors on MPI_COMM_WORLD return an error code instead
   of ending the job. dt_run returns the first failure on every rank. If another rank does not
   learn of a failure within timeout_s, this rank's dt_run does not finalize MPI; the launcher ends
   the other rank once this process has exited with an error. Groups within one machine run
   their collectives in shared memory (see dt_run_desc.node_ranks).

   tcp and mpi copy device memory through host memory; NCCL transfers it directly. */
DT_API dt_status dt_run(
    dt_run_desc desc, dt_status (*rank_main)(dt_ctx *ctx, void *user), void *user);

/* This process's rank and its rendezvous, as the launcher set them. */
typedef struct dt_launch {
    int rank, size; /* this process's rank, and the number of ranks; 0 and 1 if not distributed */
    /* this process's rank among the ranks of its machine, and their number; -1 and 0 if the
       launcher does not set them */
    int local_rank, local_size;
    /* the address where rank 0 listens, such as "127.0.0.1:29501" or "node3:24711"; "" if it is not
       known */
    char rendezvous[80];
    /* the launcher's name: "DT", "torchrun", "Open MPI", "PMI" or "SLURM"; "" if there is no
       launcher */
    char launcher[16];
    char text[384]; /* one line that says what was found, or what is wrong */
} dt_launch;

/* [local] Launcher discovery: reads the environment. The first launcher below whose variables are
   set wins. A value that this launcher does not set comes from a later launcher in the list, if
   the later launcher gives the same rank and size:
       DT          DT_RANK, DT_WORLD_SIZE, DT_LOCAL_RANK, DT_LOCAL_SIZE: for scripts that start
                   ranks
       torchrun    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. With
                   TORCHELASTIC_USE_AGENT_STORE=True torchrun's own agent listens at MASTER_PORT,
                   so dt takes the next port, or 20000 + MASTER_PORT % 10000 if the next port is
                   32768 or above (the system's ephemeral ports)
       Open MPI    OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
       PMI         PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS, as set by MPICH and by
                   srun --mpi=pmi2
       SLURM       SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_LOCALID, and the first
                   machine of SLURM_STEP_NODELIST or SLURM_JOB_NODELIST. Used only within job
                   steps, because a batch script is not a rank
   DT_RENDEZVOUS overrides the address of every launcher. If no variable gives an address, ranks of
   one machine meet at 127.0.0.1. The port is then derived from the job's name (20000 to 29999), or
   29500 without a job's name. Returns DT_OK with rank 0 and size 1 if no variable is set. Returns
   DT_ERR_ARG, with the variable's name in out->text, if a launcher's variables are incomplete or
   not valid numbers, and also if PMIX_RANK alone is set, because it comes without a size. */
DT_API dt_status dt_launch_find(dt_launch *out);

// ==== 2. Groups =================================================================================

/* The mesh axis that a group belongs to. dt_comm_bytes counts bytes separately for each axis. */
typedef enum dt_axis {
    DT_AXIS_NONE = -1, /* the world, and every group without an axis */
    DT_AXIS_DP = 0,
    DT_AXIS_TP,
    DT_AXIS_CP,
    DT_AXIS_PP,
    DT_AXIS_EP,
    DT_AXES
} dt_axis;

/* Largest number of dt_comm_split calls on the world in one run. On a smaller group more calls are
   possible: a call on half of the world's ranks, for example, counts as half a call. */
#define DT_MAX_SPLITS 64

/* [local] Returns the group of all ranks, or NULL if the context is not attached to a run. (NULL
   works as a group of one rank.) */
DT_API dt_comm *dt_world(dt_ctx *ctx);
/* [local] Return this rank's number in the group, and the number of ranks in the group. If comm is
   NULL, they return 0 and 1. */
DT_API int dt_comm_rank(const dt_comm *comm);
DT_API int dt_comm_size(const dt_comm *comm);
/* [local] Returns the name given to dt_comm_split, such as "tp". The world's name is "world"; for
   NULL the name is "one". */
DT_API const char *dt_comm_name(const dt_comm *comm);
/* [local] Returns the world rank of the group's rank `rank`, or -1 if `rank` is outside the group.
   Returns 0 if comm is NULL. */
DT_API int dt_comm_world_rank(const dt_comm *comm, int rank);
/* [collective: comm] Process group: a subset of the ranks, for collectives among these ranks alone.
   Ranks that pass the same color become one new group. Its ranks are ordered by `key`, and ranks
   with equal keys by their rank in comm. A rank with color < 0 joins no group and gets NULL, which
   is not a failure. `name` (may be NULL) appears in error texts and
   tables; its first 31 bytes are copied. The group lives as long as the world. After a failure the
   function returns NULL; the error is DT_ERR_MEM if more than DT_MAX_SPLITS splits were made. Under
   MPI, a group that does not fit into its machine's shared memory segment exchanges messages
   instead, with the same results. */
DT_API dt_comm *dt_comm_split(dt_comm *comm, int color, int key, const char *name);
/* [local] From this call on, dt_comm_bytes counts the bytes of comm's operations under `axis`. Does
   nothing if comm is NULL. */
DT_API void dt_comm_set_axis(dt_comm *comm, dt_axis axis);
/* [local] Bytes that this rank has sent so far over groups of `axis`. The bytes are logical: a
   property of the operation, not of the algorithm that ran. N is the number of ranks, S the
   number of bytes of the full buffer (all blocks together). This rank sends:
       all-reduce                              2 S (N-1)/N, rounded down
       reduce-scatter, all-gather, all-to-all  S (N-1)/N, which is N-1 blocks
       all-to-all-v                            the blocks for other ranks
       broadcast                               S if it is the root and N > 1, else 0
       scatter                                 N-1 blocks if it is the root, else 0
       reduce                                  S, or 0 if it is the root
       gather                                  one block, or 0 if it is the root
       send                                    the message's bytes
       receive, barrier                        0
   Scalars (section 6), dt_comm_split and failed operations are not counted. */
DT_API size_t dt_comm_bytes(const dt_ctx *ctx, dt_axis axis);
/* [local] Returns the number of seconds that this rank has spent inside operations of sections 3 to
   6, including waits. Of an operation of at most DT_EAGER_BYTES only the time beyond about 2 us is
   counted, unless a trace is recorded. */
DT_API double dt_comm_seconds(const dt_ctx *ctx);

/* Algorithm of a collective that runs as messages. Section 16 gives the cost of each algorithm. */
typedef enum dt_algorithm {
    DT_ALGORITHM_AUTO = 0, /* in shared memory if possible, else chosen by bytes and ranks */
    DT_DIRECT,             /* every rank sends to every other rank at once */
    /* N-1 steps; in each, every rank sends to its right neighbour. Sums are in ring order, which
       differs between the chunks of a buffer. */
    DT_RING,
    DT_DOUBLING, /* recursive doubling: exchanges at distances 1, 2, 4, ... */
    DT_TREE,     /* binomial tree */
    DT_ALGORITHMS
} dt_algorithm;
/* [collective: comm] From this call on, the group's operations run as messages with this algorithm,
   if the algorithm exists for the operation. For learning and tests. All algorithms give the same
   bits, except that DT_RING's sums may differ in rounding. */
DT_API void dt_comm_set_algorithm(dt_comm *comm, dt_algorithm algorithm);
/* [local] The messages and bytes that this rank has really sent, which is what the algorithms cost.
   Messages through shared memory count too. The messages in which ranks compare their calls
   (dt_run_desc.check) do not count. */
typedef struct dt_traffic {
    size_t messages, bytes;
} dt_traffic;
DT_API dt_traffic dt_comm_traffic(const dt_ctx *ctx);

// ==== 3. Collectives ============================================================================

/* All functions of this section are [collective: comm]. N is the number of ranks in comm. Counts
   are in elements. Types are the values of dt_dtype. Another type, or a reduction of a type that
   the context's kernel table does not reduce, fails with DT_ERR_UNSUPPORTED.

   Buffers are memory of the context's device. If the device is a GPU, both buffers of a call may be
   in host memory instead, if they are in host memory on all ranks; the CPU then does the work. This
   is for small data, and dt_comm_bytes does not count it. If comm is NULL, buffers are host memory;
   device memory is allowed only in place, where nothing is copied. A buffer may be NULL if count is
   0 or if the operation does not use the buffer on this rank.

   A call returns the errors listed under CONTRACT at the top of this file, and also DT_ERR_ARG for
   a value outside its range or a missing buffer, DT_ERR_COMM if the ranks' calls differ,
   DT_ERR_TIMEOUT, and the errors of the kernel table. */

/* All-reduce: recv[i] = send_0[i] op send_1[i] op ... on every rank, where send_r is rank r's send.
   send, recv: count elements. */
DT_API dt_status dt_all_reduce(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op);
/* Reduce: like an all-reduce, but only the root gets the result. send: count; recv: count on the
   root, unused on the other ranks. */
DT_API dt_status dt_reduce(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op, int root);
/* Reduce-scatter: reduces like an all-reduce; rank r gets block r of the result. send: N * count;
   recv: count. */
DT_API dt_status dt_reduce_scatter(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op);
/* All-gather: every rank gets the send buffers of all ranks, in rank order. send: count; recv: N *
   count. */
DT_API dt_status dt_all_gather(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype);
/* Gather: the root gets the send buffers of all ranks, in rank order. send: count; recv: N * count
   on the root, unused on the other ranks. */
DT_API dt_status dt_gather(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, int root);
/* Scatter: rank r gets block r of the root's send. send: N * count on the root, unused on the other
   ranks; recv: count. */
DT_API dt_status dt_scatter(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, int root);
/* All-to-all: block j of rank i's send becomes block i of rank j's recv. send, recv: N * count.
   send and recv must not overlap. */
DT_API dt_status dt_all_to_all(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype);
/* All-to-all-v: an all-to-all with blocks of any length; send and recv must not overlap. This rank
   sends send_counts[j] elements to rank j and receives recv_counts[i] elements from rank i. In both
   buffers the blocks lie in rank order without gaps. Both arrays of counts have N entries and are
   read until the operation ends. If the count that a rank expects differs from the count that is
   sent to it, the call returns DT_ERR_COMM and the error text names both counts. */
DT_API dt_status dt_all_to_all_v(dt_comm *comm, const void *send, const size_t *send_counts,
    void *recv, const size_t *recv_counts, dt_dtype dtype);
/* Broadcast: copies rank `root`'s buf to buf on every rank. buf: count. */
DT_API dt_status dt_broadcast(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int root);
/* Barrier: no rank returns before every rank has called dt_barrier. */
DT_API dt_status dt_barrier(dt_comm *comm);

// ==== 4. Send and receive =======================================================================

/* [pairwise] buf: count elements. `to` and `from` are ranks of comm; tag >= 0. A receive takes the
   oldest message from rank `from` of this group with this tag. The receive's count and type must
   equal the send's, else the receive returns DT_ERR_COMM and the error text names both calls.

   A send of up to DT_EAGER_BYTES is eager: dt copies the message and the send returns. From one
   rank to another rank, 8 eager messages can be pending. A larger send, or the 9th eager message,
   waits for the receiver. So two ranks must not both begin with a large send to each other: use the
   nonblocking calls (section 5). A rank can send up to DT_EAGER_BYTES to itself, or more with a
   nonblocking call. If comm is NULL, the call returns DT_ERR_ARG, because there is no peer. */
#define DT_EAGER_BYTES 4096
DT_API dt_status dt_send(
    dt_comm *comm, const void *buf, size_t count, dt_dtype dtype, int to, int tag);
DT_API dt_status dt_recv(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int from, int tag);
/* [pairwise] Receives a message with this tag from any rank of the group: the one that arrives
   first. Stores the sender's rank in *from; `from` may be NULL. */
DT_API dt_status dt_recv_any(
    dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int tag, int *from);

// ==== 5. Nonblocking operations =================================================================

/* Overlap of communication and computation. Each function begins an operation and returns a handle
   (like MPI's request and PyTorch's Work). The functions are [collective: comm] or [pairwise] like
   the blocking ones, and all ranks must begin their collectives in the same order.

       w = dt_all_reduce_start(...)        communication:     |===== all-reduce =====|
       compute()                           computation:    |==== compute ====|
       dt_wait(ctx, w)                     waiting:                          |=======|

   The arguments are the same as in the blocking call. The caller must not use the buffers until
   dt_wait has returned. There is no hidden thread: operations advance while this rank waits in any
   other operation, and between the kernels of its tensor ops. Any number of operations may be
   pending; the other ranks see the first DT_MAX_STARTED of each group. A NULL handle means that the
   operation is already complete (if comm is NULL) or that the context has failed; dt_wait accepts
   NULL and returns the context's status. Call dt_wait exactly once for every other handle, in any
   order. A handle without a dt_wait counts as a failure when rank_main returns. */
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
/* [pairwise] Starts dt_recv_any. dt_wait then stores the sender's rank in *from. */
DT_API dt_work *dt_recv_any_start(
    dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int tag, int *from);

/* [local] Waits until the operation is complete, then frees `work`. After that the caller may use
   the buffers again. Returns dt_error(ctx). */
DT_API dt_status dt_wait(dt_ctx *ctx, dt_work *work);
/* [local] Advances pending operations as far as possible without waiting. If many are pending, each
   call advances only some of them. Returns 1 if `work` is complete (dt_wait(ctx, work) then returns
   at once), else 0. */
DT_API int dt_test(dt_ctx *ctx, dt_work *work);

/* One send or receive of dt_exchange. All transfers of one dt_exchange run concurrently, like the
   calls between NCCL's ncclGroupStart and ncclGroupEnd, so their order does not matter. */
typedef struct dt_transfer {
    const void *send; /* exactly one of `send` and `recv` is not NULL */
    void *recv;
    size_t count; /* elements */
    dt_dtype dtype;
    int peer, tag; /* the other rank, as a rank of comm; the message's tag */
} dt_transfer;
/* [pairwise] Begins the n transfers and returns when all of them are complete. */
DT_API dt_status dt_exchange(dt_comm *comm, const dt_transfer *transfers, int n);

// ==== 6. Scalars and agreement ==================================================================

/* Small values in host memory, such as a loss or a flag. dt_comm_bytes does not count them. */

/* [collective: comm] Replaces values[i] by the sum of values[i] over the ranks, in rank order.
   values: n elements. */
DT_API dt_status dt_sum_doubles(dt_comm *comm, double *values, size_t n);
/* [collective: comm] Returns the mean of `mine` over the ranks, or NaN after a failure. */
DT_API double dt_mean(dt_comm *comm, double mine);
/* [collective: comm] Agreement: returns on every rank the first of the ranks' `mine`, in rank
   order, that is not DT_OK, or DT_OK if all are. The context does not fail because of this status.
   Use it for conditions that only one rank may notice, such as a missing file. */
DT_API dt_status dt_agree(dt_comm *comm, dt_status mine);

// ==== 7. Attach, records, trace =================================================================

/* The functions dt_team_make to dt_comm_detach are for programs that start their own threads or
   bring their own transport. dt_run itself calls them for each rank. */

/* The shared state of one run whose ranks are threads or forked processes that the caller
   starts. */
typedef struct dt_team dt_team;
/* [the caller is the supervisor] Makes a team. desc is as for dt_run, with backend threads or
   procs. Returns NULL after a failure, which has been logged. */
DT_API dt_team *dt_team_make(dt_run_desc desc);
/* [local] Makes the context of a rank, with the team's tables. The heap of a forked rank lies in
   the shared memory segment. Free the context with dt_ctx_free, after dt_comm_detach. Returns NULL
   after a failure, which the other ranks learn of. */
DT_API dt_ctx *dt_team_ctx(dt_team *team, int rank);
/* [the caller is the supervisor] Frees the team. Call dt_team_free after all ranks have detached,
   or if they will never attach. Returns the status of the first failure and fills desc.report. */
DT_API dt_status dt_team_free(dt_team *team);

#define DT_ANY (-1) /* as `from` of a transport's recv: receive from any rank */
/* A transport: five functions that carry messages between ranks 0 .. size-1.

   Messages with the same sender, channel and tag arrive in the order of their sends. A message
   carries a signature of the call that sent it. A transport may deliver the signature 0 instead; dt
   then does not compare the signatures.

       send, recv   begin a transfer and return a request, or NULL on failure. The `from` of recv
                    may be DT_ANY. Many sends and receives can be pending. A send whose receive has
                    not begun must not keep other transfers from making progress
       test         returns 1 if the transfer is complete; the request is then freed. For a receive,
                    *from and *bytes then describe the message (a message's bytes beyond the
                    buffer's size are dropped). Returns 0 if the transfer is not complete yet.
                    Returns a negative number if the transfer can never complete; the request is
                    then freed, and `why` (512 bytes) holds the reason. -1: the peer is lost. -2:
                    the call was wrong. -3: another rank has called fail (`why` holds that rank's
                    text). -4: the peer has ended normally
       cancel       frees the request; the caller may then use the request's buffer again
       fail         tells the other ranks that this rank has failed, and sends them the text */
typedef struct dt_transport {
    const char *name;
    void *user;
    void *(*send)(void *user, int to, uint32_t channel, int tag, uint64_t signature,
        const void *buf, size_t bytes);
    void *(*recv)(void *user, int from, uint32_t channel, int tag, void *buf, size_t bytes);
    int (*test)(
        void *user, void *request, int *from, uint64_t *signature, size_t *bytes, char *why);
    void (*cancel)(void *user, void *request);
    void (*fail)(void *user, const char *text);
} dt_transport;

typedef struct dt_attach_desc {
    int rank;
    dt_team *team;                 /* exactly one of `team` and `transport` is not NULL */
    const dt_transport *transport; /* copied by dt_comm_attach */
    int size;                      /* number of ranks of the transport */
    double timeout_s;              /* for a transport: as in dt_run_desc, in seconds; 0 means 120 */
    dt_link link;                  /* for a transport: as in dt_run_desc */
    /* An ncclComm_t whose ranks are the transport's, in the same order. NCCL then carries large
       messages, and the context must have CUDA's kernel table. NULL means no NCCL. The caller owns
       the communicator. But if the context fails, dt has aborted the communicator: do not destroy
       it then. */
    void *nccl;
} dt_attach_desc;
/* [collective: all ranks of the team or transport] Makes the context ctx a rank and returns its
   world. Returns NULL after a failure. For a team, make ctx with dt_team_ctx, which gives it the
   team's tables; for a transport with dt_ctx_make. */
DT_API dt_comm *dt_comm_attach(dt_ctx *ctx, dt_attach_desc desc);
/* [local] Ends this rank: frees its groups and tells ranks that wait for it that it has ended.
   `status` is the return value of the rank's function. */
DT_API void dt_comm_detach(dt_ctx *ctx, dt_status status);

/* FLIGHT RECORDER. Each rank keeps records of its last DT_RECORDS operations and their call
   sites. */
#define DT_RECORDS 128
/* [local] Writes one line for each rank to `text`: rank, process, step, seconds, and the operation
   in which the rank waits or which it finished last. For tcp ranks and ranks on other machines the
   line shows what the rank last reported. Returns the size of the complete text in bytes. If `text`
   is NULL it only returns the size. */
DT_API size_t dt_ranks_text(const dt_ctx *ctx, char *text, size_t bytes);
/* [local] Writes the last operations of this rank, or of a world rank that shares memory with it,
   to `text`: one line for each operation, newest first. Returns the size as dt_ranks_text does. */
DT_API size_t dt_records_text(const dt_ctx *ctx, int rank, char *text, size_t bytes);
/* [collective: the world] Ends a training step and counts it, for dt_ranks_text and
   dt_run_desc.check. Over tcp and mpi the ranks of each group compare the operations that they
   called in the step; if two ranks differ, the call returns DT_ERR_COMM and the error text names
   them. Straggler detection: logs a notice that names a rank if, in 5 of the last 8 steps, the
   rank's own work without its waits took more than 1.5 times that of the median rank. It logs at
   most one such notice in 10 steps. */
DT_API dt_status dt_comm_step(dt_comm *world);

/* A TRACE records what each rank did and when: blocks (dt_block), operations of sections 3 to 6,
   waits, your own ranges, and memory by class. View the trace in ui.perfetto.dev or
   chrome://tracing, where each rank is a process with these tracks:

       compute         blocks such as "F 3 block 1", the forward (F) of micro-batch 3 in block 1.
                       B, I and W are the backward and its two halves (input and weight gradients);
                       "again" marks the recompute of a block. The track also shows your own ranges
                       and the waits for nonblocking operations, such as "wait all-reduce dp".
                       Events of this track nest
       comm            operations. A blocking operation is shown from its call to its return, a
                       nonblocking operation from its start to its end. Operations that overlap in
                       time use further tracks (comm 2, comm 3, ...). If an operation runs during a
                       block and no wait is shown for it, computation hides the operation
       arrows          each arrow leads from a send to its receive
       memory          bytes by class, at the end of each block or range

   Without a trace, each place that could record an event costs one test of a pointer. */

/* [local] Begins recording into a ring buffer of `events` events of 88 bytes each; 0 means 65536
   events. The ring buffer is allocated in this call, in memory class host; nothing is allocated
   later. When it is full, new events overwrite the oldest. Call dt_trace_start on all ranks,
   between the same two operations and while no messages are pending. A second call fails
   (DT_ERR_ARG). The ring buffer is freed when the rank ends. */
DT_API dt_status dt_trace_start(dt_ctx *ctx, size_t events);
/* [local] dt_trace_begin and dt_trace_end begin and end your own range on the compute track. The
   first 39 bytes of the name are copied. Ranges nest with blocks: a range that begins in a block
   ends with the block at the latest. dt_trace_end ends the innermost open range of the current
   block. Without a trace both functions do nothing. */
DT_API void dt_trace_begin(dt_ctx *ctx, const char *name);
DT_API void dt_trace_end(dt_ctx *ctx);
/* [local] Returns the number of lost events: events that were overwritten, and events in blocks and
   ranges nested more than 32 deep. */
DT_API size_t dt_trace_lost(const dt_ctx *ctx);
/* [collective: the world] Gathers the recorded events of all ranks; rank 0 writes them to one JSON
   file (Trace Event Format) with its io table, as dt_file_write does. The file holds only completed
   events: it omits open blocks and ranges, and operations that had no dt_wait yet. Recording
   continues. Ranks send their events in pieces, so rank 0 needs only about 1 MiB of memory. Times
   are on rank 0's clock. Over a transport this call measures the difference between each clock and
   rank 0's clock, by the fastest of 8 round trips. Messages of this call are neither recorded nor
   counted. */
DT_API dt_status dt_trace_write(dt_comm *world, const char *path);

/* CALL SITES. The functions listed below are also macros, which pass the source line of the call
   for records and error texts. To name the function itself, for example to take its address, put
   its name in parentheses or write no argument list after it. */

/* [local] Sets the call site (file and line) of this rank's next operation, on any group. Returns
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

// ==== 8. Implementation: state that ranks share =================================================

#if defined(DT_IMPLEMENTATION) && !defined(DT_COMM_IMPL)
#define DT_COMM_IMPL

#include "dt_tensor.h"

DT__CPP_WARNINGS_OFF

#include <arpa/inet.h> /* inet_pton, htons */
#include <errno.h>
#include <fcntl.h>   /* fcntl */
#include <ifaddrs.h> /* getifaddrs */
#include <net/if.h>  /* IFF_RUNNING */
#include <netdb.h>   /* getaddrinfo */
#include <netinet/in.h>
#include <netinet/tcp.h> /* TCP_NODELAY */
#include <poll.h>
#include <pthread.h> /* the ranks of DT_BACKEND_THREADS */
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
#include <sys/prctl.h>   /* PR_SET_PDEATHSIG: kills a rank when its supervisor ends */
#include <sys/syscall.h> /* gettid and pidfd_open, which not every libc has as functions */
#include <sys/uio.h>     /* struct iovec */
#include <sys/wait.h>    /* waitpid, in dt_run */
#include <unistd.h>      /* sysconf, fork, _exit */
#ifdef DT_USE_MPI
#define OMPI_SKIP_MPICXX 1 /* leaves out MPI's C++ interface, which dt does not use */
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

/* Threads and forks of one process use the same implementation. All shared state lies in one shared
   memory segment, called "the range" below. The range is allocated before the first rank starts, so
   an address in it is valid on all ranks:

       dt__shared | dt__rank_state x N | dt__pair x N x N x 2 | groups, in order of creation |
       eager copies | overflow messages | records | user | heaps

   Ranks that MPI started have one range for each machine. A group within one machine runs its
   collectives in the range. A collective that spans several machines sends its messages within a
   machine through the range. The program's sends and receives do not use the range under MPI
   (section 25).

   The range holds no lock. Each word has one writer at a time; other ranks read the word with
   atomic loads. A word that publishes data is stored with release order and loaded with acquire
   order. */

enum {
    DT__CACHE_LINE = 128, /* two cache lines of 64 bytes, because processors fetch them in pairs */
    /* eager (copied) messages that can be in flight from one rank to another */
    DT__PAIR_SLOTS = 8,
    /* number of messages beyond DT__PAIR_SLOTS for which the segment has memory, per rank */
    DT__OVERFLOW_SLOTS = 1024,
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

/* One call: the arguments of all public functions in one struct. */
typedef struct dt__call {
    dt__op_code op;
    dt_dtype dtype;
    dt_op redop;     /* the reduction's op; DT_SUM in other calls */
    int peer;        /* the root; in a send or receive the peer, or DT_ANY; 0 in other calls */
    int tag;         /* tag of a send or receive; below 0 in a message of a collective */
    int host_memory; /* 1 for scalars, whose data lie in host memory on every device */
    size_t count;
    const void *send;
    void *recv;
    const size_t *send_counts, *recv_counts; /* all-to-all-v */
    /* any_source is 1 in a receive from any rank; *from then gets the sender's rank (from may be
       NULL) */
    int any_source, *from;
    uint64_t seq; /* number of this collective on its group, from 1 */
} dt__call;

/* A posted call, or post: one rank's arguments of one collective, which the other ranks of the
   group read. A rank has DT_MAX_STARTED posts in each group and reuses the oldest. */
typedef struct __attribute__((aligned(128))) dt__post {
    uint64_t seq;         /* equals dt__call.seq once the other fields are written */
    uint64_t packed_call; /* from dt__pack_call; must be equal on all ranks, as must `count` */
    size_t count;
    const void *send;
    void *recv;
    /* If other ranks cannot access `send` or `recv`: the address of this rank's staging buffer, in
       which they read these buffers window by window. Else NULL. */
    char *staging;
    int is_inline; /* 1 if the send data lie in `data` */
    /* A small send buffer, or the counts of an all-to-all-v. It extends to the end of the post. */
    uint64_t data[8];
} dt__post;

/* Progress of one rank in its group. Operations move their data in order of seq, each in one or
   several windows. Both fields are window numbers. The windows of all operations of the group are
   numbered consecutively, so both fields only grow. */
typedef struct __attribute__((aligned(128))) dt__member {
    uint64_t opened; /* last window that other ranks can read in this rank's staging buffer */
    char padding[DT__CACHE_LINE - sizeof(uint64_t)];
    /* last window in which this rank has finished its access to other ranks' memory */
    uint64_t closed;
} dt__member;

typedef struct dt__group {
    char name[DT__NAME_BYTES];
    int size;
    /* number that distinguishes the group's messages from those of other groups */
    uint32_t channel;
    int *ranks;          /* (size) the members' world ranks */
    dt__member *members; /* (size); NULL if the group's ranks do not all share memory */
    char *posts;         /* (size, DT_MAX_STARTED, post_bytes) */
    size_t post_bytes;
} dt__group;

/* Message slot. The sender fills a free slot. The receiver frees the slot, or sets its state to
   DT__RECEIVED if the sender waits for the receive. */
enum { DT__FREE = 0, DT__POSTED, DT__RECEIVED };
typedef struct __attribute__((aligned(64))) dt__message {
    int state;
    int tag, eager;
    uint64_t signature; /* signature of the sender's call, from dt__signature_of */
    size_t bytes;
    const void *data; /* the eager copy, or the sender's own buffer */
    /* number of the message among all messages of this dt__pair; of several messages that match a
       receive, the one with the lowest number is received first */
    uint64_t order;
    uint32_t channel;         /* channel of the group */
    dt__group *group;         /* the sender's pointer to the group */
    struct dt__message *next; /* next in dt__pair.overflow */
} dt__message;

/* The messages from one rank to one other rank. */
typedef struct __attribute__((aligned(64))) dt__pair {
    /* number of messages posted, and of sends begun; written by the sender */
    uint64_t sent, sends_begun;
    /* list of messages for which no slot in `message` was free; it only grows */
    dt__message *overflow;
    /* The fields from `posted` to `oldest_order` are used only once there is an overflow list. With
       these fields, messages that are received in order need no search of the list. */
    uint64_t posted; /* written by the sender: `sent`, stored after the message is visible */
    /* written by the sender: the end of the list; where it looks first for a free slot */
    dt__message *overflow_tail, *free_hint;
    __attribute__((aligned(64)))
    dt__message *recv_hint; /* written by the receiver: where it looks first in the list */
    /* written by the receiver: the `order` of the oldest message not received, if known */
    uint64_t oldest_order;
    dt__message message[DT__PAIR_SLOTS];
} dt__pair;

/* Flight recorder entry: one operation, as its rank began it. Other ranks may read a record while
   its rank writes it, so they copy the record word by word and check `number` before and after. */
typedef struct dt__op_record {
    /* number of the operation among the rank's operations, from 1; 0 while the record is written */
    uint64_t number;
    uint64_t packed_call, seq; /* as in dt__post */
    uint64_t count;
    int32_t tag, line; /* tag of a message; source line of the call, or 0 if not known */
    char group[DT__NAME_BYTES];
    char file[DT__FILE_BYTES];
} dt__op_record;

/* State that one rank publishes. The struct has DT__CACHE_LINE bytes but is aligned only to 64,
   because some of these structs lie in host memory, which is not aligned more strictly. */
typedef struct __attribute__((aligned(64))) dt__rank_state {
    int busy; /* 1 while this rank accesses other ranks' memory, else 0 */
    /* 1 if rank_main has returned or the process is gone; 2 if the process has nothing left to do
       but exit with status 0; else 0 */
    int ended;
    int pid, tid;
    /* Progress counter: incremented after every change that another rank, or this rank, may wait
       for (section 11). */
    uint64_t progress;
    /* The sum of all ranks' progress counters. This rank reads it before it checks its operations,
       and stores it if the check found nothing to do. DT__IDLE_FOREVER if the rank has ended. */
    uint64_t idle_at_progress;
    /* Only for messages over a transport: number of sends begun, minus number of messages received,
       plus number of sends that this rank does not know to be complete. */
    int64_t in_transit;
    /* Number of the operation in which this rank waits, once the wait has reached its nap phase
       (section 12); 0 if there is none. */
    uint64_t waiting_op;
    int waits_for;    /* the world rank that this rank waits for, or DT_ANY */
    int64_t op_count; /* number of operations begun; the last DT_RECORDS of them have records */
    int64_t step;     /* number of training steps, counted by dt_comm_step */
    /* when the wait in operation waiting_op began, in microseconds of the host's clock */
    int64_t wait_since_us;
    int64_t last_op_end_us; /* when this rank's last timed operation ended, in microseconds */
} dt__rank_state;

typedef struct dt__shared {
    int ranks, spins, claimed, aborted, ended;
    /* 1 if ranks are processes, which can access only this range of each other's memory; else 0 */
    int separate_memory;
    double timeout_s;
    dt_report first_failure; /* valid once `aborted` is set */
    /* (ranks); state and all pointers below are NULL if no memory is shared */
    dt__rank_state *state;
    dt__op_record *records; /* (ranks, DT_RECORDS) */
    /* (ranks, ranks, 2): sender, receiver, and the index described at dt__pair_of */
    dt__pair *pairs;
    char *group_arena; /* groups are allocated from it */
    size_t group_arena_bytes, group_arena_used;
    char *eager_buffers;  /* (ranks, ranks, 2, DT__PAIR_SLOTS, DT_EAGER_BYTES) */
    char *overflow_arena; /* memory from which overflow messages are allocated */
    size_t overflow_arena_bytes, overflow_arena_used;
    char *user;  /* shared copy of the object that dt_run's `user` points to */
    char *heaps; /* (ranks, heap_bytes) */
    size_t heap_bytes;
    size_t bytes; /* size of the segment */
} dt__shared;

/* The ranks of a transport that share memory on one machine. */
typedef struct dt__node {
    dt__shared *shared;
    int local_rank; /* this rank's index in the shared range */
    /* (world size) each rank's index in the range; -1 if it is on another machine */
    int *local_ranks;
    int *node_leaders;        /* (world size) for each rank, the first rank on its machine */
    void (*poll)(void *user); /* checks for failures on other machines and advances the transport */
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

/* Wait report. A rank of a transport sends it to all other ranks when the rank has waited for
   DT__REPORT_AFTER_S seconds (section 18), when that wait ends, and when the rank ends. MPI
   debuggers and NCCL RAS use similar reports to diagnose hangs. */
enum { DT__REPORT_GROUPS = 16, DT__REPORT_RANKS = 24 };
#define DT__REPORT_ENDED (~(uint64_t)0) /* value of waiting_op if the rank has ended */
typedef struct dt__wait_report {
    uint64_t waiting_op; /* as in dt__rank_state, or DT__REPORT_ENDED */
    int64_t op_count, step;
    int32_t waits_for;
    uint32_t group_count;      /* number of entries in `channels` and `begun` */
    uint32_t pending_sends;    /* number of sends that the rank does not know to be complete */
    dt__op_record wait_record; /* the operation in which the rank waits, else its last operation */
    uint32_t wait_channel;     /* dt__counter_of the group of that operation */
    /* for each group of the rank, the group's channel and the number of collectives begun */
    uint32_t channels[DT__REPORT_GROUPS], begun[DT__REPORT_GROUPS];
    /* number of messages to and from each of the first DT__REPORT_RANKS ranks of the world */
    uint32_t sent[DT__REPORT_RANKS], received[DT__REPORT_RANKS];
} dt__wait_report;

/* What this rank knows about the state of another rank when the ranks communicate over a
   transport. */
typedef struct dt__peer_view {
    dt__rank_state state; /* from the last report */
    dt__wait_report last_report;
    /* number of messages from this rank to that rank, and from that rank to this rank */
    uint32_t sent, received;
} dt__peer_view;

/* Control channel: sends wait reports to all other ranks, separately from the messages. A send of a
   report does not wait. */
typedef struct dt__control {
    void *user;
    void (*send_report)(void *user, const void *report, size_t bytes);
    /* returns the pid of a rank on this machine, or 0 for other ranks */
    int (*pid)(void *user, int rank);
    /* returns the number of messages that have arrived from that rank, whether received or not;
       NULL if this is not known */
    uint32_t (*arrived)(void *user, int rank);
    int check; /* rank 0's dt_run_desc.check */
    /* Advances the channel. Returns 0, or for a lost or failed rank an error like dt_transport's
       test. If poll is NULL, only messages reveal lost and failed ranks. */
    int (*poll)(void *user, char *why);
} dt__control;

/* Replaces the shared memory segment if no memory is shared. */
typedef struct dt__private_range {
    dt__shared shared;
    dt__rank_state state;
    dt__op_record records[DT_RECORDS];
} dt__private_range;

/* One rank's private state of a run; dt_ctx_attached returns it. */
typedef struct dt__world {
    dt__shared *shared;
    dt_ctx *ctx;
    const dt_host *host;
    int rank;
    int local_rank;        /* index in the shared range */
    const dt__node *node;  /* NULL if all ranks share memory; local_rank == rank then */
    dt__rank_state *state; /* this rank's own state and records */
    dt__op_record *records;
    const char *file; /* call site of the current operation */
    int line;
    int fault_count; /* number of entries in `faults`, the faults planted on this rank */
    dt__fault faults[DT__FAULTS];
    /* time at the end of the last step, and dt_comm_seconds at that time */
    double last_step_end, last_step_comm_seconds;
    /* Rank 0 only: one bit for each of the last 8 steps, 1 if straggler_rank was a straggler in the
       step. */
    unsigned straggler_steps;
    int straggler_rank, steps_since_notice;
    /* Valid in a wait that has reached its nap phase: the world rank that this rank waits for, and
       that rank's progress counter when the wait began. */
    int awaited_rank;
    uint64_t awaited_progress;
    int is_thread;  /* 1 if this rank is a thread of this process */
    int poll_count; /* number of waits and begun operations, for dt__poll_node */
    /* 1 if this rank claimed the first failure; only this rank fills the record */
    int owns_first_failure;
    dt_listener listener;
    dt_comm *comms;         /* all groups of this rank, newest first */
    dt_comm *comm;          /* the world */
    dt_transport transport; /* used if a transport carries the messages */
    uint32_t channel_count; /* number of channels given to groups so far */
    /* nonblocking operations not waited for, in order of their starts */
    dt_work *first_started, *last_started;
    /* list of the nonblocking operations that are incomplete, in the same order */
    dt_work *first_unfinished, *last_unfinished;
    /* lengths of both lists; dt__advance_some explains advance_credit */
    size_t started_count, unfinished_count, advance_credit;
    dt_work *blocking;   /* the operation that a blocking call waits for, or NULL */
    dt_work *free_works; /* list of work objects for reuse */
    /* list of the operations that the device has not completed, in the order of their waits */
    dt_work *first_device_op, *last_device_op;
    struct dt__nccl *nccl; /* section 26; NULL without NCCL */
    /* (ranks, 2): number of messages in device memory that this rank has enqueued for each rank
       over a transport, and number that it has begun. NULL if there are none. */
    uint64_t *device_sends;
    /* Buffer for a copy of a large message that the receiver cannot reach; cached for the next
       message. */
    void *send_copy;
    size_t send_copy_bytes;
    int send_copy_in_use;
    dt_link link;
    double link_free_at; /* time at which the simulated link is free again */
    size_t bytes[1 + DT_AXES];
    dt_traffic traffic;
    double seconds;             /* spent inside operations */
    const dt__control *control; /* NULL: none */
    dt__peer_view *peers; /* (comm_size) the other ranks' states, if control is set; else NULL */
    int comm_size, check; /* size of the world; dt_run_desc.check */
    int wait_reported;    /* 1 if the other ranks know that this rank waits */
    double wait_reported_at;
    uint32_t arrived_messages;       /* number of messages that had arrived at the last check */
    uint64_t wait_reported_progress; /* progress counter at the last report */
    struct dt__trace *trace;         /* section 28; NULL without a trace */
    int *status_request; /* dt_run_desc.status_request, if no supervisor reads it; else NULL */
} dt__world;

struct dt_comm {
    dt_group base; /* must be first: dt_tensor.h reads it */
    dt__world *world;
    const dt__comm_ops *ops;
    dt__group *group;
    /* number of collectives called so far that dt__comm_ops.collective runs */
    uint64_t seq;
    /* Two of the collectives that seq counts: the last one posted to the group, and the last one in
       which this rank has finished its access to other ranks' memory. */
    uint64_t last_posted, last_moved;
    uint64_t backend_seq; /* number of collectives called so far that NCCL executes */
    /* number of collectives called so far that an algorithm runs (dt_work.algorithm), and a hash of
       these calls */
    uint64_t message_seq;
    uint64_t call_hash;
    uint64_t windows_done;  /* number of windows that this rank has finished */
    uint64_t closed_by_all; /* lower bound of the number of windows that all ranks have finished */
    /* for each post: last window of the operation that used the post last */
    uint64_t last_window[DT_MAX_STARTED];
    /* for each post: 1 if the sum of the operation that used the post last is still in it */
    int sum_in_post[DT_MAX_STARTED];
    char *staging; /* this rank's staging buffer: two windows in the range; NULL until needed */
    dt_algorithm algorithm;
    struct dt__nccl_channel *nccl_channel; /* NULL without NCCL */
    /* Number of ranks on each machine, if the group's rank order keeps the ranks of each machine
       together (section 16); else 0. */
    int ranks_per_node;
    dt_axis axis;
    dt_comm *next;
    size_t bytes;        /* size of this struct with its arrays */
    const void **inputs; /* (size) inputs of a reduction */
    void **outputs;      /* (size) outputs of a reduction */
    int32_t *words;      /* (size, 2) values that dt_agree and dt_comm_split gather */
};

/* Size in bytes of the windows through which other ranks access memory that they cannot reach
   directly. */
#define DT_WINDOW_BYTES 262144

/* Returns the index of a world rank in this rank's shared range, or -1 if that rank is on another
   machine. */
static int dt__local_rank_of(const dt__world *world, int rank) {
    return world->node ? world->node->local_ranks[rank] : rank;
}

static dt__world *dt__world_of(const dt_ctx *ctx) {
    return ctx ? (dt__world *)dt_ctx_attached(ctx) : NULL;
}

static size_t dt__align_up(size_t bytes) {
    return (bytes + DT__CACHE_LINE - 1) / DT__CACHE_LINE * DT__CACHE_LINE;
}

/* The size of a post, which has space for a small send buffer or the counts of an all-to-all-v. */
static size_t dt__post_bytes(int size) {
    size_t counts = (size_t)size * sizeof(size_t);
    return dt__align_up(sizeof(dt__post) + (counts > DT_EAGER_BYTES ? counts : DT_EAGER_BYTES));
}

static size_t dt__group_bytes(int size) {
    return dt__align_up(sizeof(dt__group)) + dt__align_up((size_t)size * sizeof(int)) +
           (size_t)size * (sizeof(dt__member) + (size_t)DT_MAX_STARTED * dt__post_bytes(size));
}

/* The size in the worst case, in which every split makes one group of one rank for each rank. */
static size_t dt__group_arena_bytes(int ranks) {
    return dt__group_bytes(ranks) + (size_t)DT_MAX_SPLITS * (size_t)ranks * dt__group_bytes(1);
}

static size_t dt__align_page(size_t bytes) { return (bytes + 65535) / 65536 * 65536; }

/* Lays out the range at `memory` and copies `shared`, which holds the sizes, to the range's
   beginning. If `memory` is NULL, it only computes the size (shared->bytes). It zeroes only the
   parts that hold flags; all other pages stay untouched until they are used. */
static dt__shared *dt__shared_layout(dt__shared *shared, char *memory, size_t user_bytes) {
    size_t n = (size_t)shared->ranks,
           at = (DT__CACHE_LINE - (uintptr_t)memory % DT__CACHE_LINE) % DT__CACHE_LINE;
    size_t state = at + dt__align_up(sizeof(dt__shared)),
           pairs = state + n * sizeof(dt__rank_state);
    size_t group_arena = pairs + dt__align_up(2 * n * n * sizeof(dt__pair)),
           eager_buffers = group_arena + dt__group_arena_bytes(shared->ranks);
    size_t overflow = eager_buffers + 2 * n * n * (size_t)DT__PAIR_SLOTS * (size_t)DT_EAGER_BYTES;
    size_t records = overflow + n * (size_t)DT__OVERFLOW_SLOTS * (size_t)DT__CACHE_LINE;
    size_t user = records + dt__align_up(n * DT_RECORDS * sizeof(dt__op_record));
    size_t heaps = dt__align_page(user + dt__align_up(user_bytes));
    shared->group_arena_bytes = eager_buffers - group_arena;
    shared->bytes = heaps + n * shared->heap_bytes + DT__CACHE_LINE;
    if (!memory) return NULL;
    memset(memory + at, 0, group_arena - at);
    shared->state = (dt__rank_state *)(void *)(memory + state);
    shared->pairs = (dt__pair *)(void *)(memory + pairs);
    shared->group_arena = memory + group_arena;
    shared->eager_buffers = memory + eager_buffers;
    shared->overflow_arena = memory + overflow;
    shared->overflow_arena_bytes = records - overflow;
    shared->records = (dt__op_record *)(void *)(memory + records);
    shared->user = memory + user;
    shared->heaps = memory + heaps;
    memcpy(memory + at, shared, sizeof *shared);
    return (dt__shared *)(void *)(memory + at);
}

/* Returns 1 if the other ranks can access this address. */
static int dt__reachable(const dt__shared *shared, const void *p) {
    const char *base = (const char *)shared;
    return !shared->separate_memory ||
           ((const char *)p >= base && (const char *)p < base + shared->bytes - DT__CACHE_LINE);
}

/* Returns the dt__pair for a message. Messages of collectives (tag < 0) have their own dt__pair:
   if they shared the slots, a collective could wait until this rank receives the program's
   messages. */
static dt__pair *dt__pair_of(dt__shared *shared, int from, int to, int tag) {
    return &shared->pairs[2 * ((size_t)from * (size_t)shared->ranks + (size_t)to) + (tag < 0)];
}

static char *dt__eager_of(dt__shared *shared, const dt__pair *pair, int message) {
    return shared->eager_buffers +
           ((size_t)(pair - shared->pairs) * DT__PAIR_SLOTS + (size_t)message) * DT_EAGER_BYTES;
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

/* Allocates from an arena in the range. Returns NULL if the arena is full. Any rank may call it at
   any time. */
static char *dt__range_alloc(char *arena, size_t arena_bytes, size_t *used, size_t bytes) {
    if (__atomic_load_n(used, __ATOMIC_RELAXED) > arena_bytes) return NULL;
    size_t at = __atomic_fetch_add(used, bytes, __ATOMIC_RELAXED);
    return at > arena_bytes || bytes > arena_bytes - at ? NULL : arena + at;
}

/* Makes a group of `size` ranks in the range; the caller fills `ranks`. Returns NULL if the arena
   is full. Any rank may call it at any time. */
static dt__group *dt__group_make(dt__shared *shared, int size, const char *name) {
    size_t bytes = dt__group_bytes(size), n = (size_t)size;
    char *p = dt__range_alloc(
        shared->group_arena, shared->group_arena_bytes, &shared->group_arena_used, bytes);
    if (!p) return NULL;
    dt__group *group = (dt__group *)(void *)p;
    memset(group, 0, sizeof *group);
    group->size = size;
    group->channel = (uint32_t)((size_t)(p - shared->group_arena) / DT__CACHE_LINE);
    group->post_bytes = dt__post_bytes(size);
    p += dt__align_up(sizeof(dt__group));
    group->ranks = (int *)(void *)p;
    p += dt__align_up(n * sizeof(int));
    group->members = (dt__member *)(void *)p;
    memset(group->members, 0, n * sizeof(dt__member));
    group->posts = p + n * sizeof(dt__member);
    for (size_t i = 0; i < n * DT_MAX_STARTED; i++)
        ((dt__post *)(void *)(group->posts + i * group->post_bytes))->seq = 0;
    dt__group_name(group, name);
    return group;
}

/* A timeout clock that leaves out the time during which the process is suspended. Between two reads
   the clock advances by at most max_gap, which is an eighth of the timeout but at most 1 s. A
   process that was stopped during a wait (Ctrl-Z, scontrol suspend, a debugger, a suspended
   machine) therefore does not time out, and a job that is suspended as a whole continues when
   resumed. If one rank alone is stopped, the other ranks' clocks advance, and those ranks report
   the stopped rank as late. Each suspension still counts up to max_gap, so a wait ends even in a
   job that is suspended repeatedly. */
#define DT__MAX_CLOCK_GAP_S 1.0
typedef struct dt__stopwatch {
    const dt_host *host;
    double last, seconds, max_gap;
} dt__stopwatch;

static dt__stopwatch dt__stopwatch_start(const dt_host *host, double limit) {
    dt__stopwatch watch = { host, host->now(host->user), 0, fmin(limit / 8, DT__MAX_CLOCK_GAP_S) };
    return watch;
}

/* Returns the seconds counted so far. Wait loops call it every few milliseconds. */
static double dt__waited(dt__stopwatch *watch) {
    double now = watch->host->now(watch->host->user);
    watch->seconds += fmin(now - watch->last, watch->max_gap);
    watch->last = now;
    return watch->seconds;
}

// ==== 9. The first failure ======================================================================

/* Failure detection and propagation. One record (first_failure of dt__shared) holds the first
   failure of the run. The rank that claims the record (compare and exchange) fills it and sets the
   abort word `aborted`, which is never cleared. Wait loops read the abort word in every iteration,
   and calls read it when they begin.

   A rank that leaves a collective with an error returns the buffers to its caller, who may free
   them. So the rank must not leave while another rank still copies from or to the buffers, and no
   rank may start a copy after that. Each rank therefore sets its `busy` flag around every access to
   other ranks' memory. This is Dekker's handshake (E. W. Dijkstra, EWD123, 1965):

       copier:  busy = 1;  if (aborted) { busy = 0; leave; }  copy;  busy = 0
       leaver:  set or read aborted = 1;  wait until no rank is busy;  leave

   All four accesses are sequentially consistent, so either the copier sees the abort word or the
   leaver sees the busy flag. The wait for the busy flags is the only wait without a timeout. It
   ends, because a rank with busy = 1 waits for no other rank, and the supervisor clears the flag of
   a process that died. MPI ranks on one machine have no supervisor, so they wait at most timeout_s
   for the flags and for the record. */

static int dt__aborted(const dt__shared *shared) {
    return __atomic_load_n(&shared->aborted, __ATOMIC_SEQ_CST);
}

/* Claims the failure record for `rank` (-1 for the supervisor). Returns 1 if no other rank has
   claimed it, else 0. */
static int dt__claim(dt__shared *shared, int rank) {
    int expected = 0;
    return __atomic_compare_exchange_n(
        &shared->claimed, &expected, rank + 2, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* Fills the failure record and sets the abort word. Only the rank whose dt__claim returned 1 calls
   this function. */
static void dt__publish_failure(dt__shared *shared, int rank, dt_status status, const char *text) {
    size_t length = strlen(text), max_length = sizeof shared->first_failure.text - 1;
    if (length > max_length) length = max_length;
    shared->first_failure.status = status;
    shared->first_failure.rank = rank;
    memcpy(shared->first_failure.text, text, length);
    /* needed because a rank that died may have begun to write a longer text */
    shared->first_failure.text[length] = 0;
    __atomic_store_n(&shared->aborted, 1, __ATOMIC_SEQ_CST);
}

#ifdef DT_USE_NCCL
static void dt__nccl_abort(dt__world *world);
#else
#define dt__nccl_abort(world) (void)0
#endif

/* A function of dt's listener, which dt_tensor.h calls at the first failure of a context. Several
   ranks may notice the same failure, for example a norm that is not finite. Only the rank that
   claims the record logs the failure: dt__on_failure returns 0 on that rank and 1 on the others. */
static int dt__on_failure(dt_ctx *ctx, dt_status status, const char *text, void *user) {
    dt__world *world = (dt__world *)user;
    (void)ctx;
    int first = world->owns_first_failure || dt__claim(world->shared, world->rank);
    if (first) dt__publish_failure(world->shared, world->rank, status, text);
    if (first && world->transport.fail) world->transport.fail(world->transport.user, text);
    if (world->nccl) dt__nccl_abort(world);
    return !first;
}

/* Sleeps between two checks of the wait loops below. Returns 1 if the loop should continue. Returns
   0 after the timeout if ranks of a transport share memory, because they have no supervisor and the
   awaited rank must have died. */
static int dt__abort_wait_turn(const dt__world *world, dt__stopwatch *watch) {
    if (!watch->host) *watch = dt__stopwatch_start(world->host, world->shared->timeout_s);
    world->host->sleep(world->host->user, 0);
    return dt__waited(watch) < world->shared->timeout_s || !world->node;
}

static void dt__quiesce(const dt__world *world) {
    dt__stopwatch watch = { NULL, 0, 0, 0 };
    for (int i = 0; world->shared->state && i < world->shared->ranks; i++) {
        const int *busy = &world->shared->state[i].busy;
        while (__atomic_load_n(busy, __ATOMIC_SEQ_CST) && dt__abort_wait_turn(world, &watch)) {
        }
    }
}

/* Waits until the rank that claimed the failure record has filled it. */
static void dt__await_record(const dt__world *world) {
    dt__stopwatch watch = { NULL, 0, 0, 0 };
    while (!dt__aborted(world->shared) && dt__abort_wait_turn(world, &watch)) {
    }
}

/* Sets this rank's busy flag and returns 1: the rank may access other ranks' memory until
   dt__access_end. Returns 0, with the flag cleared, if the run is aborted. */
static int dt__access_begin(const dt__world *world) {
    int *busy = &world->shared->state[world->local_rank].busy;
    __atomic_store_n(busy, 1, __ATOMIC_SEQ_CST);
    if (!dt__aborted(world->shared)) return 1;
    __atomic_store_n(busy, 0, __ATOMIC_SEQ_CST);
    return 0;
}

/* Waits until the device's stream is empty. Before that the device may still write memory that
   other ranks are about to read, or copy from memory that other ranks are about to free. */
static dt_status dt__comm_sync(const dt__world *world) {
    const dt_kernels *kernels = dt_ctx_kernels(world->ctx);
    return kernels->sync ? kernels->sync(dt_ctx_stream(world->ctx)) : DT_OK;
}

/* Waits for the device and clears this rank's busy flag. `status` is the result of the copies.
   Returns the first error of the copies and of the device, else DT_OK. */
static dt_status dt__access_end(const dt__world *world, dt_status status) {
    dt_status synced = dt__comm_sync(world);
    __atomic_store_n(&world->shared->state[world->local_rank].busy, 0, __ATOMIC_SEQ_CST);
    return status ? status : synced;
}

/* Waits, after this context has failed, until no rank accesses other ranks' memory any more. */
static void dt__await_quiescence(dt__world *world) {
    dt__await_record(world);
    dt__quiesce(world);
}

/* Fails this context with the text of the rank that failed first. Waits until no rank accesses
   other ranks' memory any more, then returns the context's status. */
static dt_status dt__peer_failed(dt__world *world) {
    dt__await_record(world);
    dt_status status = dt_fail(
        world->ctx, DT_ERR_PEER, "peer failed first: %s", world->shared->first_failure.text);
    dt__quiesce(world);
    return status;
}

/* Fails the context for a reason that this header's code found, often on several ranks at once. The
   first rank records its reason; the other ranks report that a peer failed first. Waits until no
   rank accesses other ranks' memory any more, then returns the context's status. */
DT_PRINTF(3, 4)
static dt_status dt__comm_fail(dt__world *world, dt_status status, const char *fmt, ...) {
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (dt_error(world->ctx) == DT_OK) {
        if (!dt__claim(world->shared, world->rank)) return dt__peer_failed(world);
        world->owns_first_failure = 1;
        dt_fail(world->ctx, status, "%s", text);
    }
    dt__quiesce(world);
    return dt_error(world->ctx);
}

// ==== 10. Collective calls: validation and description ==========================================

/* All collectives have one form. Some ranks send and some receive, a send buffer may hold one block
   for each rank, and the received data may be reduced. So a call (dt__call) and the operation's row
   in one table (dt__pattern) suffice to validate an operation, to describe it in texts and records,
   to compare it between ranks and to count its bytes. */

/* How far an operation has come. If a slow link is simulated (dt_run_desc.link), an operation
   completes only some time after its data have been transferred. */
typedef enum dt__completion {
    DT__TRANSFERRING = 0, /* its data are being transferred */
    DT__TRANSFERRED,      /* its data have been transferred */
    DT__COMPLETED,
    DT__FAILED /* the context failed before the data had been transferred */
} dt__completion;

/* One pending operation: a call and its progress. Comments call it a work, as PyTorch does
   (c10d::Work). */
struct dt_work {
    dt_comm *comm;
    dt__call call;
    dt_axis axis; /* the group's axis when the operation began */
    dt__completion completion;
    int state; /* state of the function that advances the operation */
    /* 1 if the operation is nonblocking: the rank continues meanwhile, and may send to itself */
    int is_started;
    /* While the operation waits until all ranks have called it: ranks 0 .. next_rank - 1 have
       called it. */
    int next_rank;
    /* Function that advances the operation: an algorithm of section 16 or of the backend. NULL if
       the operation is one send or receive, or is run by the backend's `collective` function. */
    int (*algorithm)(dt_work *work);
    int stage, round; /* phase and round of the algorithm */
    /* The current window consists of elements [at, at + window_count) of each block. longest_block
       is the number of elements of the longest block. */
    size_t at, window_count, longest_block;
    uint64_t window;  /* number of the current window, counted over all operations of the group */
    int inline_ranks; /* number of ranks whose posts hold their send data (dt__post.is_inline) */
    int sum_in_post;  /* 1 if the sum is stored in the post first: see dt__must_sum_in_post */
    /* 1 if some rank's buffer cannot be accessed by the others, so that data pass through staging
       buffers */
    int uses_windows;
    struct dt__p2p *p2p_ops; /* (p2p_count) sends and receives of this round */
    int p2p_count, p2p_capacity;
    void *scratch;
    size_t scratch_count;
    /* start of the operation; earliest end that the simulated link allows */
    double start_time, link_until;
    uint64_t record_number; /* number of its flight recorder entry */
    /* the DT__CHECK work that compares all ranks' calls before this work runs; or NULL */
    dt_work *check_work;
    /* in a DT__CHECK work: the work whose calls it compares; else NULL */
    const dt_work *checked_work;
    dt__fault_kind fault; /* injected fault, applied when the operation ends */
    double end_time;      /* time of completion, if the operation is nonblocking and traced */
    /* Event in the device's stream, recorded after the operation; cached for the next use of this
       work. */
    void *device_event;
    /* on_device is 1 if the operation is complete for the host but not for the device. is_device_op
       is 1 if this work tracks the device's part of another operation. */
    int on_device, is_device_op;
    /* 1 if a library runs the operation; this rank then cannot tell which rank it waits for */
    int in_library;
    /* If NCCL runs the operation: its nccl channel, and its number on this channel, from 1. */
    struct dt__nccl_channel *nccl_channel;
    uint64_t nccl_sequence;
    dt_work *next, *prev;                       /* neighbours in the list of nonblocking works */
    dt_work *next_unfinished, *prev_unfinished; /* neighbours in the list of incomplete works */
    int is_unfinished; /* 1 if the work is in the list of incomplete works */
};

/* Returns the work that error texts name. For a DT__CHECK work, this is the work whose calls it
   compares; for any other, the work itself. */
static const dt_work *dt__reported_work(const dt_work *work) {
    return work->checked_work ? work->checked_work : work;
}

/* The functions of a backend. `message` transfers one message. `collective` runs a collective by
   the backend's own code, if that is better than the algorithms of section 16, which are built on
   messages. Both functions advance as far as they can without waiting. They return 1 if the
   transfer is complete, 0 if it is not complete yet, and -1 if the context has failed. */
struct dt__comm_ops {
    const char *name;
    int (*message)(dt_work *work, struct dt__p2p *p2p);
    int (*collective)(dt_work *work);
    /* All functions below may be NULL. `algorithm` returns an algorithm of the backend, or NULL if
       an algorithm of section 16 is to be used. `begin` is called when an operation with a backend
       algorithm begins. `split` is called when a group has been split; `made` is this rank's new
       group, or NULL. `close` is called when a group ends. `check_device` is called for an
       operation that the device has not completed; it fails the context if the operation has failed
       or can never complete, for example because another rank has failed. */
    int (*(*algorithm)(const dt_comm *comm, const dt__call *call))(dt_work *work);
    void (*begin)(dt_work *work);
    void (*split)(dt_comm *comm, dt_comm *made, int color);
    void (*close)(dt_comm *comm);
    void (*check_device)(dt_work *work);
};

/* Properties of an operation. Each flag is 0 or 1. */
typedef struct dt__pattern {
    const char *name;
    char all_send, all_recv; /* 1 if every rank sends (receives), 0 if only the root does */
    char send_blocks;        /* 1 if send holds N blocks, block r for rank r */
    char reduces;
    char counted; /* 1 if dt_comm_bytes counts the operation's bytes */
} dt__pattern;

static const dt__pattern *dt__pattern_of(dt__op_code op) {
    static const dt__pattern patterns[] = {
        /* in the order of dt__op_code */
        { .name = "all-reduce", .all_send = 1, .all_recv = 1, .reduces = 1, .counted = 1 },
        { .name = "reduce", .all_send = 1, .reduces = 1, .counted = 1 },
        { .name = "reduce-scatter",
            .all_send = 1,
            .all_recv = 1,
            .send_blocks = 1,
            .reduces = 1,
            .counted = 1 },
        { .name = "all-gather", .all_send = 1, .all_recv = 1, .counted = 1 },
        { .name = "gather", .all_send = 1, .counted = 1 },
        { .name = "scatter", .all_recv = 1, .send_blocks = 1, .counted = 1 },
        { .name = "all-to-all", .all_send = 1, .all_recv = 1, .send_blocks = 1, .counted = 1 },
        { .name = "all-to-all-v", .all_send = 1, .all_recv = 1, .send_blocks = 1, .counted = 1 },
        { .name = "broadcast", .all_recv = 1, .counted = 1 },
        { .name = "barrier", .all_send = 1, .all_recv = 1 },
        { .name = "dt_sum_doubles", .all_send = 1, .all_recv = 1, .reduces = 1 },
        { .name = "dt_agree", .all_send = 1, .all_recv = 1 },
        { .name = "dt_comm_split", .all_send = 1, .all_recv = 1 },
        { .name = "dt_comm_step", .all_send = 1, .all_recv = 1 },
        { .name = "send", .all_send = 1, .counted = 1 },
        { .name = "receive", .all_recv = 1 },
        { .name = "comparison", .all_send = 1, .all_recv = 1 },
    };
    return &patterns[op];
}

static int dt__is_p2p(dt__op_code op) { return op == DT__SEND || op == DT__RECV; }

static int dt__sends(const dt_comm *comm, const dt__call *call) {
    return dt__pattern_of(call->op)->all_send ||
           (!dt__is_p2p(call->op) && comm->base.rank == call->peer);
}

static int dt__receives(const dt_comm *comm, const dt__call *call) {
    return dt__pattern_of(call->op)->all_recv ||
           (!dt__is_p2p(call->op) && comm->base.rank == call->peer);
}

static int dt__is_rooted(dt__op_code op) {
    return op == DT__REDUCE || op == DT__GATHER || op == DT__SCATTER || op == DT__BROADCAST;
}

static size_t dt__sum_counts(const size_t *counts, int n) {
    size_t sum = 0;
    for (int i = 0; i < n; i++) sum += counts[i];
    return sum;
}

/* Returns the number of elements in the send buffer. */
static size_t dt__send_count(const dt_comm *comm, const dt__call *call) {
    if (call->op == DT__ALL_TO_ALL_V) return dt__sum_counts(call->send_counts, comm->base.size);
    return dt__pattern_of(call->op)->send_blocks ? call->count * (size_t)comm->base.size
                                                 : call->count;
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

/* Appends to the string `text`, a buffer of `bytes` bytes of which *at are used. Truncates what
   does not fit. */
DT_PRINTF(4, 5) static void dt__append(char *text, size_t bytes, size_t *at, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    int length = vsnprintf(text + *at, bytes - *at, fmt, args);
    va_end(args);
    if (length > 0) *at = *at + (size_t)length < bytes ? *at + (size_t)length : bytes - 1;
}

typedef struct dt__phrase {
    char s[192];
} dt__phrase; /* returned by value, so that no caller has to free it */

/* Describes a call in an error text, for example "all-reduce f32 x 10 sum" or "barrier". */
static dt__phrase dt__call_text(const dt__call *call) {
    dt__phrase text;
    size_t at = 0;
    const dt__pattern *pattern = dt__pattern_of(call->op);
    dt__append(text.s, sizeof text.s, &at, "%s", pattern->name);
    if (call->op == DT__SUM_DOUBLES) dt__append(text.s, sizeof text.s, &at, " x %zu", call->count);
    if (!pattern->counted && call->op != DT__RECV) return text;
    dt__append(text.s, sizeof text.s, &at, " %s", dt_dtype_name(call->dtype));
    if (call->op != DT__ALL_TO_ALL_V) dt__append(text.s, sizeof text.s, &at, " x %zu", call->count);
    if (pattern->reduces)
        dt__append(text.s, sizeof text.s, &at, " %s", dt__redop_name(call->redop));
    if (call->host_memory) dt__append(text.s, sizeof text.s, &at, " in host memory");
    if (dt__is_rooted(call->op)) dt__append(text.s, sizeof text.s, &at, " root %d", call->peer);
    return text;
}

/* Packs the arguments of a collective that must be equal on all ranks, except the count, into one
   word. dt__unpack_call restores the arguments for error texts. */
static uint64_t dt__pack_call(const dt__call *call) {
    return (uint64_t)call->op | (uint64_t)call->dtype << 8 | (uint64_t)call->redop << 16 |
           (uint64_t)(call->host_memory != 0) << 24 | (uint64_t)(uint32_t)call->peer << 32;
}

static dt__call dt__unpack_call(uint64_t what, size_t count) {
    dt__call call =
        dt__call_make((dt__op_code)(what & 255), NULL, NULL, count, (dt_dtype)(what >> 8 & 255));
    call.redop = (dt_op)(what >> 16 & 255);
    call.host_memory = (int)(what >> 24 & 1);
    call.peer = (int)(uint32_t)(what >> 32);
    return call;
}

static size_t dt__call_bytes(const dt__call *call) {
    return call->count * dt_dtype_size(call->dtype);
}

/* Copies by the kernel table, because data may lie on a device. Scalars, which lie in host memory,
   are copied by memcpy. */
static dt_status dt__comm_copy(
    dt_comm *comm, const dt__call *call, void *dst, const void *src, size_t bytes) {
    const dt_kernels *kernels = dt_ctx_kernels(comm->world->ctx);
    if (bytes == 0 || dst == src) return DT_OK;
    if (!call->host_memory && kernels->move)
        return kernels->move(dst, src, bytes, dt_ctx_stream(comm->world->ctx));
    memcpy(dst, src, bytes);
    return DT_OK;
}

/* Computes outputs[k] = inputs[0] op inputs[1] op ..., always in rank order, for all k. An output
   may be one of the inputs, unless `streaming` is 1 (see non_temporal of dt_reduce_args). */
static dt_status dt__reduce_inputs(dt_comm *comm, const dt__call *call, int output_count,
    int input_count, size_t count, int streaming) {
    const dt_kernels *kernels = dt_ctx_kernels(comm->world->ctx);
    if (count == 0) return DT_OK;
    if (call->op != DT__SUM_DOUBLES) {
        dt_reduce_args args = { .dtype = call->dtype,
            .out = comm->outputs[0],
            .in = comm->inputs,
            .n = input_count,
            .count = count,
            .op = call->redop,
            .copies = comm->outputs + 1,
            .n_copies = output_count - 1,
            .non_temporal = streaming };
        if (call->host_memory) return dt_kernels_cpu()->reduce(&args, NULL);
        return kernels->reduce ? kernels->reduce(&args, dt_ctx_stream(comm->world->ctx))
                               : DT_ERR_UNSUPPORTED;
    }
    for (size_t i = 0; i < count; i++) {
        double sum = ((const double *)comm->inputs[0])[i];
        for (int rank = 1; rank < input_count; rank++)
            sum += ((const double *)comm->inputs[rank])[i];
        for (int k = 0; k < output_count; k++) ((double *)comm->outputs[k])[i] = sum;
    }
    return DT_OK;
}

/* Fails the context with the error `status` of a copy or a kernel of this call. A device may report
   the error of an earlier operation late. */
static dt_status dt__data_failed(dt_comm *comm, const dt__call *call, dt_status status) {
    return dt__comm_fail(comm->world, status, "%s #%llu on %s: the kernel table '%s' answers %s%s",
        dt__call_text(call).s, (unsigned long long)call->seq, comm->group->name,
        dt_ctx_kernels(comm->world->ctx)->name, dt_status_name(status),
        status == DT_ERR_ARG ? " (an id, a label or a row outside of its table, in this or an "
                               "earlier operation)"
                             : "");
}

/* Returns the number of bytes that dt_comm_bytes counts for this call on this rank. */
static size_t dt__sent_bytes(const dt_comm *comm, const dt__call *call) {
    size_t n = (size_t)comm->base.size, bytes = dt__call_bytes(call), twice = 2 * (n - 1);
    int root = comm->base.rank == call->peer;
    /* scalars, and calls with buffers in host memory, are not counted */
    if (call->host_memory || !dt__pattern_of(call->op)->counted) return 0;
    switch (call->op) {
    case DT__ALL_REDUCE: return bytes / n * twice + bytes % n * twice / n;
    case DT__REDUCE:
    case DT__GATHER: return root ? 0 : bytes;
    case DT__SCATTER: return root ? bytes * (n - 1) : 0;
    case DT__BROADCAST: return root && n > 1 ? bytes : 0;
    case DT__ALL_TO_ALL_V:
        return (dt__send_count(comm, call) - call->send_counts[comm->base.rank]) *
               dt_dtype_size(call->dtype);
    case DT__SEND: return bytes;
    default: return bytes * (n - 1);
    }
}

/* Divides count elements into chunks whose sizes differ by at most one, and returns the index of
   chunk i's first element. */
static size_t dt__chunk_offset(size_t count, int chunks, int i) {
    size_t each = count / (size_t)chunks, extra = count % (size_t)chunks, before = (size_t)i;
    return before * each + (before < extra ? before : extra);
}

/* Allocates the work's scratch buffer, which has count elements of the call's type. Returns NULL if
   the context has failed. */
static void *dt__scratch(dt_work *work, size_t count) {
    work->scratch_count = count;
    work->scratch = work->comm->words; /* if count is 0, any address that is not NULL suffices */
    if (count == 0) return work->scratch;
    work->scratch =
        dt_alloc(work->comm->world->ctx, work->call.host_memory ? DT_MEM_HOST : DT_MEM_COMM,
            count * dt_dtype_size(work->call.dtype), dt__pattern_of(work->call.op)->name);
    return work->scratch;
}

static void dt__scratch_free(dt_work *work) {
    if (work->scratch && work->scratch_count > 0)
        dt_free(work->comm->world->ctx, work->call.host_memory ? DT_MEM_HOST : DT_MEM_COMM,
            work->scratch, work->scratch_count * dt_dtype_size(work->call.dtype));
    work->scratch = NULL;
}

// ==== 11. Operation records =====================================================================

/* Flight recorder, like PyTorch's for NCCL. Each rank publishes records of the operations that it
   has begun, the rank that it waits for, and a progress counter. Other ranks read this state to
   explain a long wait (section 18) and to prove that a wait will never end.

   Deadlock detection. A rank that waits

       1. computes P, the sum of all ranks' progress counters
       2. tries to advance all of its pending operations
       3. if nothing could advance, publishes P as its idle_at_progress

   Once all ranks have published the same P and the sum is still P, each rank has tried to advance
   after the last change that any rank made, and could not. So no rank will ever make progress. This
   proves a deadlock at once, without a timeout. The proof needs a rule: a rank first makes a change
   that another rank may wait for, and then increments its progress counter. So a rank whose sum
   includes the increment also sees the change. */

static void dt__count_progress(dt__world *world) {
    __atomic_store_n(&world->state->progress, world->state->progress + 1, __ATOMIC_RELEASE);
}

#define DT__IDLE_FOREVER (~(uint64_t)0) /* idle_at_progress of a rank that has ended */

static uint64_t dt__total_progress(const dt__shared *shared) {
    uint64_t sum = 0;
    for (int i = 0; i < shared->ranks; i++)
        sum += __atomic_load_n(&shared->state[i].progress, __ATOMIC_ACQUIRE);
    return sum;
}

/* Stores whole 64-bit words atomically. A reader may still see some old and some new words. */
static void dt__atomic_store_words(void *to, const void *from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
        uint64_t word;
        memcpy(&word, (const char *)from + at, sizeof word);
        __atomic_store_n((uint64_t *)(void *)((char *)to + at), word, __ATOMIC_RELEASE);
    }
}

static void dt__atomic_load_words(void *to, const void *from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
        uint64_t word = __atomic_load_n(
            (const uint64_t *)(const void *)((const char *)from + at), __ATOMIC_ACQUIRE);
        memcpy((char *)to + at, &word, sizeof word);
    }
}

/* Assigns the operation its number and writes its flight recorder entry. */
static void dt__record_make(dt_work *work) {
    dt__world *world = work->comm->world;
    uint64_t number = (uint64_t)world->state->op_count + 1;
    dt__op_record *slot = &world->records[number % DT_RECORDS], r;
    r.number = 0;
    r.packed_call = dt__pack_call(&work->call);
    r.seq = work->call.seq;
    r.count = work->call.count;
    r.tag = work->call.tag;
    r.line = world->line;
    memcpy(r.group, work->comm->group->name, sizeof r.group);
    memset(r.file, 0, sizeof r.file);
    if (world->file) strncpy(r.file, world->file, sizeof r.file - 1);
    __atomic_store_n(&slot->number, 0, __ATOMIC_RELEASE);
    dt__atomic_store_words(
        &slot->packed_call, &r.packed_call, sizeof r - offsetof(dt__op_record, packed_call));
    __atomic_store_n(&slot->number, number, __ATOMIC_RELEASE);
    __atomic_store_n(&world->state->op_count, (int64_t)number, __ATOMIC_RELEASE);
    work->record_number = number;
    dt__count_progress(world);
}

/* What this rank knows of another rank. If the two ranks share memory: the other rank's state and
   records. Else: the state and record in the other rank's last wait report. */
typedef struct dt__op_ring {
    const dt__op_record *records;
    int n;
} dt__op_ring;
/* What this rank knows about one rank of the world. If both ranks share memory, these are that
   rank's state and records; else they are taken from that rank's last wait report. */
typedef struct dt__rank_view {
    const dt__rank_state *state; /* NULL if the state is not known */
    dt__op_ring ring;
} dt__rank_view;

static dt__rank_view dt__view_of_local_rank(const dt__shared *shared, int local_rank) {
    dt__rank_view view = { &shared->state[local_rank],
        { shared->records + (size_t)local_rank * DT_RECORDS, DT_RECORDS } };
    return view;
}

static dt__rank_view dt__view_of_rank(const dt__world *world, int rank) {
    dt__rank_view view = { NULL, { NULL, 1 } };
    if (rank == DT_ANY) return view;
    int local_rank = world->shared->state ? dt__local_rank_of(world, rank) : -1;
    if (local_rank >= 0) return dt__view_of_local_rank(world->shared, local_rank);
    if (rank == world->rank) {
        view.state = world->state;
        view.ring.records = world->records;
        view.ring.n = DT_RECORDS;
    } else if (world->peers) {
        view.state = &world->peers[rank].state;
        view.ring.records = &world->peers[rank].last_report.wait_record;
    }
    return view;
}

/* Copies record `number` and returns 1. Returns 0 if the record does not exist or has been
   overwritten. */
static int dt__record_get(dt__op_ring ring, uint64_t number, dt__op_record *copy) {
    if (!ring.records || number == 0) return 0;
    const dt__op_record *slot = &ring.records[number % (uint64_t)ring.n];
    if (__atomic_load_n(&slot->number, __ATOMIC_ACQUIRE) != number) return 0;
    dt__atomic_load_words(copy, slot, sizeof *copy);
    return __atomic_load_n(&slot->number, __ATOMIC_RELAXED) == number && copy->number == number;
}

/* Returns the file name without its directories. */
static const char *dt__file_name(const char *file) {
    const char *slash = strrchr(file, '/');
    return slash ? slash + 1 : file;
}

/* Returns " at train.c:88", or "" if the call site is not known. */
static dt__phrase dt__site_text(const char *file, int line) {
    dt__phrase text;
    text.s[0] = 0;
    if (file && file[0]) snprintf(text.s, sizeof text.s, " at %s:%d", dt__file_name(file), line);
    return text;
}

/* Describes a record, for example "all-reduce f32 x 10 sum #4 on world at train.c:88" or "receive
   f32 x 10 from its rank 2 with tag 1 on world at ...". Roots and peers are ranks of the group. */
static dt__phrase dt__record_text(const dt__op_record *r) {
    dt__call call = dt__unpack_call(r->packed_call, (size_t)r->count);
    dt__phrase text = dt__call_text(&call);
    size_t at = strlen(text.s);
    if (!dt__is_p2p(call.op))
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

/* Returns the call site of the group's collective number `seq` on rank world_rank, or "" if its
   record no longer exists. */
static dt__phrase dt__site_of(const dt_comm *comm, int world_rank, uint64_t seq) {
    dt__rank_view view = dt__view_of_rank(comm->world, world_rank);
    int64_t last = view.state ? __atomic_load_n(&view.state->op_count, __ATOMIC_ACQUIRE) : 0;
    dt__op_record r;
    for (int64_t n = last; n > 0 && n > last - view.ring.n; n--) {
        if (!dt__record_get(view.ring, (uint64_t)n, &r) || r.seq != seq) continue;
        if (!dt__is_p2p((dt__op_code)(r.packed_call & 255)) &&
            strcmp(r.group, comm->group->name) == 0)
            return dt__site_text(r.file, r.line);
    }
    return dt__site_text(NULL, 0);
}

/* Returns the call site of the operation of this work. */
static dt__phrase dt__own_site(const dt_work *work) {
    const dt__world *world = work->comm->world;
    dt__op_record r;
    int there = dt__record_get(
        dt__view_of_rank(world, world->rank).ring, dt__reported_work(work)->record_number, &r);
    return dt__site_text(there ? r.file : NULL, there ? r.line : 0);
}

/* Fails the context, because rank world_rank has ended and will never call the collective in which
   this rank waits. Over a transport several ranks may notice this at the same time. In that case
   the text does not name this rank, but the first rank of the group that is not world_rank, so that
   all ranks report the same text. */
static dt_status dt__ended_without(dt_work *work, int world_rank) {
    const dt_comm *comm = work->comm;
    int first = comm->group->ranks[comm->group->ranks[0] == world_rank ? 1 : 0];
    const char *name = dt__pattern_of(dt__reported_work(work)->call.op)->name;
    if (comm->group->members)
        return dt__comm_fail(comm->world, DT_ERR_COMM,
            "rank %d ended without calling %s #%llu on %s, in which rank %d "
            "waits%s",
            world_rank, name, (unsigned long long)work->call.seq, comm->group->name,
            comm->world->rank, dt__own_site(work).s);
    return dt__comm_fail(comm->world, DT_ERR_COMM,
        "rank %d ended without calling %s #%llu on %s, which rank %d and "
        "all other ranks of the group must call%s",
        world_rank, name, (unsigned long long)work->call.seq, comm->group->name, first,
        dt__own_site(work).s);
}

/* One rank's call, for the error text about two calls that differ. */
typedef struct dt__call_view {
    uint64_t packed_call, count;
    dt__phrase site; /* call site: a text of dt__site_text */
} dt__call_view;

static void dt__own_call_view(const dt_work *work, dt__call_view *own) {
    own->packed_call = dt__pack_call(&work->call);
    own->count = work->call.count;
    own->site = dt__own_site(work);
}

/* Fails the context because two ranks of the group make different calls. */
static dt_status dt__calls_differ(
    dt_work *work, int rank, const dt__call_view *its, int other, const dt__call_view *theirs) {
    const dt_comm *comm = work->comm;
    dt__call one = dt__unpack_call(its->packed_call, (size_t)its->count);
    dt__call two = dt__unpack_call(theirs->packed_call, (size_t)theirs->count);
    return dt__comm_fail(comm->world, DT_ERR_COMM,
        "rank %d calls %s%s, rank %d calls %s%s (operation %llu on %s)", comm->group->ranks[rank],
        dt__call_text(&one).s, its->site.s, comm->group->ranks[other], dt__call_text(&two).s,
        theirs->site.s, (unsigned long long)work->call.seq, comm->group->name);
}

// ==== 12. Progress engine =======================================================================

/* All waits for other ranks go through dt__wait_until_finished. Each iteration of a wait advances
   every operation that this rank has pending. Then the waiting thread backs off:

       spin     for about 2 us, because the other rank may be about to arrive, and a system call
                would take longer than the wait
       yield    for about 100 us, so that other threads run
       nap      for 1/16 of the time waited so far, but at least 20 us and at most 1 ms, so that
                the rank wakes up only a little too late

   If there are more ranks than cores, waits do not spin, because a spinning rank could keep the
   awaited rank from running. When data have moved, the back-off starts again from its first phase,
   because each step of a long operation is a separate wait. */

/* iterations of the first two phases: about 2 us and about 100 us */
enum { DT__SPINS = 50, DT__YIELDS = 200 };
#define DT__NAP_MIN 20e-6
#define DT__NAP_MAX 1e-3

/* Returns the number of cores that this process may use. */
static int dt__cores(void) {
#ifdef CPU_COUNT /* needs _GNU_SOURCE */
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

static int dt__has_ended(const dt__shared *shared, int local_rank) {
    return shared->state && __atomic_load_n(&shared->state[local_rank].ended, __ATOMIC_ACQUIRE);
}

/* Called in each wait iteration and for each operation that begins. If ranks of a transport share
   memory on this node, every DT__POLL_INTERVAL-th call checks for failures on other nodes.
   Operations that begin must count, because a rank whose operations all complete at once never
   waits. */
enum { DT__POLL_INTERVAL = 16 };
static void dt__poll_node(dt__world *world) {
    if (world->node && ++world->poll_count % DT__POLL_INTERVAL == 0)
        world->node->poll(world->node->user);
}

static int dt__algorithm_advance(dt_work *work);
static dt_status dt__report_timeout(dt_work *work);
static int dt__detect_deadlock(dt_work *work, uint64_t at, double since);
static void dt__log_all_ranks(dt__world *world);
static void dt__receive_wait_report(dt__world *world, int rank, const void *report);
static void dt__send_wait_report(dt__world *world, const dt_work *work, int ended);
static int dt__check_advance(dt_work *work);
static void dt__check_free(dt_work *work);
static void dt__fault_before(dt_work *work);
static void dt__fault_after(dt_work *work);

/* The functions of the trace (section 28), which are called only if there is a trace. */
static void dt__trace_op(dt_work *work, double begin, double end);
static void dt__trace_wait(dt_work *work, double begin, double end);
static uint64_t dt__trace_number(dt__world *world, const dt_work *work);
static void dt__trace_free(dt__world *world);

/* Advances one work without waiting. Returns 1 if it is complete, 0 if it is not complete yet, -1
   if the context has failed. */
static int dt__advance(dt_work *work) {
    const dt_host *host = work->comm->world->host;
    if (work->completion == DT__COMPLETED) return 1;
    if (work->completion == DT__FAILED) return -1;
    int checked = work->check_work ? dt__check_advance(work) : 1;
    if (checked <= 0) return checked;
    int as_messages = work->algorithm || dt__is_p2p(work->call.op);
    if (work->completion == DT__TRANSFERRING) {
        int moved = as_messages ? dt__algorithm_advance(work) : work->comm->ops->collective(work);
        if (moved < 0) work->completion = DT__FAILED;
        if (moved <= 0) return moved;
        work->completion = DT__TRANSFERRED;
        dt__count_progress(work->comm->world);
    }
    if (work->link_until > 0 && host->now(host->user) < work->link_until) return 0;
    if (work->comm->world->trace && work->start_time > 0) work->end_time = host->now(host->user);
    dt__count_progress(work->comm->world);
    work->completion = DT__COMPLETED;
    return 1;
}

static void dt__unfinished_remove(dt__world *world, dt_work *work) {
    if (!work->is_unfinished) return;
    work->is_unfinished = 0;
    world->unfinished_count--;
    if (work->prev_unfinished)
        work->prev_unfinished->next_unfinished = work->next_unfinished;
    else
        world->first_unfinished = work->next_unfinished;
    if (work->next_unfinished)
        work->next_unfinished->prev_unfinished = work->prev_unfinished;
    else
        world->last_unfinished = work->prev_unfinished;
}

/* Advances all incomplete nonblocking operations, in the order of their starts. */
static void dt__advance_all(dt__world *world) {
    for (dt_work *work = world->first_unfinished; work; work = work->next_unfinished) {
        if (dt__advance(work) < 0) return;
        if (work->completion == DT__COMPLETED)
            dt__unfinished_remove(world, work); /* does not change work->next_unfinished */
    }
}

/* Calls dt__advance_all in some of its calls, for callers that do not wait and may call it at every
   nonblocking start. Every call adds DT__ADVANCE_CREDIT to a credit, and all works advance once the
   credit has reached the number of works. So n nonblocking operations cost O(n), not O(n^2).
   Returns 1 if all works have advanced, else 0. */
enum { DT__ADVANCE_CREDIT = 16 };
static int dt__advance_some(dt__world *world) {
    world->advance_credit += DT__ADVANCE_CREDIT;
    if (world->advance_credit < world->unfinished_count) return 0;
    world->advance_credit = 0;
    dt__advance_all(world);
    return 1;
}

/* Waits until `work` is complete. Returns the context's status. If *begin is negative when the wait
   leaves its spinning phase, *begin is set to the time of that moment. */
static dt_status dt__wait_until_finished(dt__world *world, dt_work *work, double *begin) {
    const dt_host *host = world->host;
    double since = 0, timeout = world->shared->timeout_s;
    dt__stopwatch watch = { NULL, 0, 0, 0 };
    uint64_t last_progress = world->state->progress, at = 0;
    int passes = 0; /* iterations so far; the first iteration calls only dt__advance_some */
    for (int attempt = -world->shared->spins;; attempt += attempt < DT__YIELDS) {
        if (attempt >= 0)
            world->poll_count = DT__POLL_INTERVAL - 1; /* after the spin phase, poll every time */
        dt__poll_node(world);
        int naps = attempt == DT__YIELDS;
        if (naps && world->shared->state) at = dt__total_progress(world->shared);
        if (world->first_unfinished && passes++)
            dt__advance_all(world);
        else if (world->first_unfinished)
            dt__advance_some(world);
        int done = dt_error(world->ctx) ? -1 : dt__advance(work);
        if (done > 0) return DT_OK;
        if (done < 0) return dt_error(world->ctx);
        if (dt__aborted(world->shared)) return dt__peer_failed(world);
        if (last_progress != world->state->progress) {
            last_progress = world->state->progress;
            attempt = -world->shared->spins;
        }
        if (attempt < 0) {
            dt__pause();
            continue;
        }
        if (attempt == 0) {
            watch = dt__stopwatch_start(host, timeout);
            since = fmax(watch.last, work->link_until);
            /* below 0 while the simulated link is busy, so that this time does not count towards
               the timeout */
            watch.seconds = watch.last - since;
        }
        double waited = dt__waited(&watch), now = watch.last;
        if (*begin < 0) *begin = now;
        if (waited > timeout) return dt__advance(work) > 0 ? DT_OK : dt__report_timeout(work);
        if (naps && attempt == DT__YIELDS && dt__detect_deadlock(work, at, since))
            return dt_error(world->ctx);
        double left = work->link_until - now;
        if (left > 0 || attempt < DT__YIELDS) {
            host->sleep(host->user, left <= 0 ? 0 : left < DT__NAP_MAX ? left : DT__NAP_MAX);
            continue;
        }
        host->sleep(host->user, fmin(fmax(waited / 16, DT__NAP_MIN), DT__NAP_MAX));
    }
}

static dt_status dt__wait_work(dt__world *world, dt_work *work, double *begin) {
    dt_status status = dt__wait_until_finished(world, work, begin);
    if (world->state->waiting_op) __atomic_store_n(&world->state->waiting_op, 0, __ATOMIC_SEQ_CST);
    if (world->wait_reported && status == DT_OK) dt__send_wait_report(world, NULL, 0);
    return status;
}

// ==== 13. Messages in shared memory =============================================================

/* Point-to-point messages, by the eager and the rendezvous protocol of every MPI.

       eager        sender copies the data into a free message slot and returns
       (small)                     receiver copies the data from the slot and frees the slot

       rendezvous   sender publishes the address of its buffer and waits
       (large)                     receiver copies from the buffer and sets DT__RECEIVED
                    sender frees the slot

   The eager protocol copies the data twice. The rendezvous protocol copies them once, but the
   sender waits for the receiver. A buffer that the receiver cannot access is first copied into the
   shared memory segment (section 8). */

/* One send or receive of a point-to-point operation or of one round of a collective. */
typedef struct dt__p2p {
    dt__op_code op; /* DT__SEND or DT__RECV */
    int peer, tag;  /* peer: rank of the group, or DT_ANY */
    size_t count;
    const void *send;
    void *recv;
    /* state: 0 if the transfer has not begun; later values depend on the backend. finished: 1 once
       the transfer is complete. */
    int state, finished;
    /* Sequence number of the message among all sends from its sender to its receiver (dt__pair). In
       a receive it is valid once the message has arrived. */
    uint64_t order;
    dt__message *message;
    uint64_t last_searched; /* used by a receive: see dt__find_message */
    /* copy in the shared memory segment, if the receiver cannot access the send buffer; else
       NULL */
    void *copy;
    /* Copy of a device buffer in pinned host memory, and an event that is recorded after the copy
       from or to the device. */
    void *pinned_copy, *device_event;
    /* in a send from device memory: its number among this rank's sends from device memory to the
       same rank, from 0 */
    uint64_t device_send_seq;
    /* if NCCL transfers the message: its number on the nccl channel, from 0 */
    uint64_t nccl_sequence;
    int is_enqueued; /* 1 if the transfer has its number and an event */
    /* if NCCL transfers the message: the sender's announcement (section 26) */
    void *nccl_announcement;
    void *request; /* the transport's request */
} dt__p2p;

enum { DT__ANNOUNCEMENT_BYTES = 128 };

/* Returns a description of the transfer for an error text. If the transfer is part of a collective,
   the text describes the collective. */
static dt__phrase dt__p2p_text(const dt_work *work, const dt__p2p *p2p) {
    const dt_comm *comm = work->comm;
    dt__call call = p2p->tag < 0 ? dt__reported_work(work)->call
                                 : dt__call_make(p2p->op, NULL, NULL, p2p->count, work->call.dtype);
    dt__phrase text = dt__call_text(&call);
    size_t at = strlen(text.s);
    if (p2p->tag < 0)
        dt__append(text.s, sizeof text.s, &at, " #%llu", (unsigned long long)work->call.seq);
    else if (p2p->peer == DT_ANY)
        dt__append(text.s, sizeof text.s, &at, " from any rank with tag %d", p2p->tag);
    else
        dt__append(text.s, sizeof text.s, &at, " %s rank %d with tag %d",
            p2p->op == DT__SEND ? "to" : "from", comm->group->ranks[p2p->peer], p2p->tag);
    dt__append(text.s, sizeof text.s, &at, " on %s%s", comm->group->name, dt__own_site(work).s);
    return text;
}

/* Fails the context because the peer has ended and no rank will ever call the matching send or
   receive. Returns -1. */
static int dt__p2p_never_matched(dt_work *work, const dt__p2p *p2p) {
    dt__phrase text = dt__p2p_text(work, p2p);
    int other = p2p->peer == DT_ANY ? -1 : work->comm->group->ranks[p2p->peer];
    if (p2p->tag < 0) return dt__ended_without(work, other), -1;
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

/* Fails the context because the type or count of the message differs from the receive's. Returns
   -1. */
static int dt__p2p_mismatch(
    dt_work *work, const dt__p2p *p2p, int from, dt_dtype dtype, size_t count) {
    const dt_comm *comm = work->comm;
    if (p2p->tag < 0) return dt__counts_differ(work, from, count, p2p->count), -1;
    dt__comm_fail(comm->world, DT_ERR_COMM,
        "rank %d sends %s x %zu, rank %d receives %s x %zu (tag %d on %s)",
        comm->group->ranks[from], dt_dtype_name(dtype), count, comm->world->rank,
        dt_dtype_name(work->call.dtype), p2p->count, p2p->tag, comm->group->name);
    return -1;
}

/* Returns the signature of the call that a message belongs to. Bit 63 is set, and the lowest 36
   bits are the low bits of the count. The messages with which ranks compare their calls (DT__CHECK)
   have signature 0. */
static uint64_t dt__signature_of(const dt__call *call, size_t message_count) {
    uint64_t count = dt__is_p2p(call->op) ? (uint64_t)message_count : (uint64_t)call->count;
    uint64_t op = call->op == DT__RECV ? (uint64_t)DT__SEND : (uint64_t)call->op;
    uint64_t peer = dt__is_p2p(call->op) ? 0 : (uint64_t)(uint32_t)call->peer & 0xffff;
    if (call->op == DT__CHECK) return 0;
    return (uint64_t)1 << 63 | op << 59 | (uint64_t)call->dtype << 55 |
           (uint64_t)call->redop << 52 | peer << 36 | (count & 0xfffffffff);
}

static dt_dtype dt__signature_dtype(uint64_t signature) { return (dt_dtype)(signature >> 55 & 15); }

/* Fails the context because a message belongs to a call that differs from this rank's call. Returns
   -1. */
static int dt__signature_mismatch(dt_work *work, const dt__p2p *p2p, int from, uint64_t signature) {
    dt__call_view its, own;
    dt_dtype dtype = dt__signature_dtype(signature);
    if (dt__is_p2p(work->call.op))
        return dt__p2p_mismatch(work, p2p, from, dtype, (size_t)(signature & 0xfffffffff));
    memset(&its, 0, sizeof its);
    its.packed_call = (signature >> 59 & 15) | (uint64_t)dtype << 8 | (signature >> 52 & 7) << 16 |
                      (signature >> 36 & 0xffff) << 32;
    its.count = signature & 0xfffffffff;
    dt__own_call_view(work, &own);
    return dt__calls_differ(work, from, &its, work->comm->base.rank, &own), -1;
}

/* Returns 1 if the message matches this transfer; else fails the context and returns -1. A
   signature of 0 matches every call. */
static int dt__p2p_check(
    dt_work *work, const dt__p2p *p2p, int from, uint64_t signature, size_t bytes) {
    size_t size = dt_dtype_size(work->call.dtype);
    if (signature && signature != dt__signature_of(&work->call, p2p->count))
        return dt__signature_mismatch(work, p2p, from, signature);
    if (bytes != p2p->count * size)
        return dt__p2p_mismatch(work, p2p, from, work->call.dtype, bytes / size);
    return 1;
}

/* Returns the message slot after `message`, or the first slot if `message` is NULL. The overflow
   slots follow the slots of the array. Returns NULL after the last slot. */
static dt__message *dt__next_message(dt__pair *pair, dt__message *message) {
    dt__message *last = pair->message + DT__PAIR_SLOTS - 1;
    if (!message) return pair->message;
    if (message >= pair->message && message < last) return message + 1;
    return __atomic_load_n(message == last ? &pair->overflow : &message->next, __ATOMIC_ACQUIRE);
}

/* Returns the overflow message after `message`; after the last it returns the first. */
static dt__message *dt__overflow_after(dt__pair *pair, dt__message *message) {
    dt__message *next = __atomic_load_n(&message->next, __ATOMIC_ACQUIRE);
    return next ? next : __atomic_load_n(&pair->overflow, __ATOMIC_ACQUIRE);
}

static int dt__is_overflow(const dt__pair *pair, const dt__message *message) {
    return message < pair->message || message >= pair->message + DT__PAIR_SLOTS;
}

static dt__message *dt__free_overflow_message(dt__pair *pair) {
    dt__message *first = pair->free_hint ? pair->free_hint : pair->overflow, *message = first;
    while (message) {
        dt__message *after = dt__overflow_after(pair, message);
        if (__atomic_load_n(&message->state, __ATOMIC_ACQUIRE) == DT__FREE) {
            pair->free_hint = after;
            return message;
        }
        message = after == first ? NULL : after;
    }
    return NULL;
}

/* Returns a free message slot, or NULL if there is none. If no slot is free, two kinds of messages
   get a new slot in the overflow list. A nonblocking send gets one because any number of
   nonblocking sends may be pending. A message of a collective on a node of a transport gets one
   because the receiver may need it before it receives the earlier messages. If the arena is full, a
   send waits until a slot is free; a collective fails, because it would wait for ever. */
static dt__message *dt__free_message(dt__world *world, dt__pair *pair, int tag, int started) {
    dt__message *message = NULL;
    dt__shared *shared = world->shared;
    for (int i = 0; i < DT__PAIR_SLOTS; i++)
        if (__atomic_load_n(&pair->message[i].state, __ATOMIC_ACQUIRE) == DT__FREE)
            return &pair->message[i];
    if ((message = dt__free_overflow_message(pair))) return message;
    if (tag >= 0 ? !started : !world->node) return NULL;
    message = (dt__message *)(void *)(tag >= 0 ? dt__range_alloc(shared->overflow_arena,
                                                     shared->overflow_arena_bytes,
                                                     &shared->overflow_arena_used, DT__CACHE_LINE)
                                               : dt__range_alloc(shared->group_arena,
                                                     shared->group_arena_bytes,
                                                     &shared->group_arena_used, DT__CACHE_LINE));
    if (!message && tag < 0)
        dt__comm_fail(world, DT_ERR_MEM,
            "the shared memory range of this machine has no room for another pending message");
    if (!message) return NULL;
    memset(message, 0, sizeof *message);
    __atomic_store_n(pair->overflow_tail ? &pair->overflow_tail->next : &pair->overflow, message,
        __ATOMIC_RELEASE);
    pair->overflow_tail = message;
    return message;
}

/* Returns a buffer in the shared memory segment for a copy of a large message. The largest buffer
   so far is cached for the next message; while it is in use, a separate buffer is allocated. */
static void *dt__send_copy_acquire(dt__world *world, size_t bytes) {
    if (world->send_copy_in_use)
        return dt_alloc(world->ctx, DT_MEM_COMM, bytes, "send copy in shared memory");
    if (world->send_copy_bytes < bytes) {
        dt_free(world->ctx, DT_MEM_COMM, world->send_copy, world->send_copy_bytes);
        world->send_copy = dt_alloc(world->ctx, DT_MEM_COMM, bytes, "send copy in shared memory");
        world->send_copy_bytes = world->send_copy ? bytes : 0;
    }
    world->send_copy_in_use = world->send_copy != NULL;
    return world->send_copy;
}

static void dt__send_copy_release(dt__world *world, void *copy, size_t bytes) {
    if (copy && copy == world->send_copy)
        world->send_copy_in_use = 0;
    else
        dt_free(world->ctx, DT_MEM_COMM, copy, bytes);
}

/* Writes the send p2p into the free slot `message` and publishes the slot (DT__POSTED). */
static dt_status dt__message_post(
    dt_work *work, dt__p2p *p2p, dt__pair *pair, dt__message *message) {
    dt_comm *comm = work->comm;
    dt__world *world = comm->world;
    size_t bytes = p2p->count * dt_dtype_size(work->call.dtype);
    dt_status status = DT_OK;
    message->tag = p2p->tag;
    message->eager = bytes <= DT_EAGER_BYTES && !dt__is_overflow(pair, message);
    message->signature = dt__signature_of(&work->call, p2p->count);
    message->bytes = bytes;
    message->channel = comm->group->channel;
    message->group = comm->group;
    message->data = p2p->send;
    if (message->eager) {
        char *eager_copy = dt__eager_of(world->shared, pair, (int)(message - pair->message));
        status = dt__comm_copy(comm, &work->call, eager_copy, p2p->send, bytes);
        message->data = eager_copy;
    } else if (bytes > 0 && !dt__reachable(world->shared, p2p->send)) {
        p2p->copy = dt__send_copy_acquire(world, bytes);
        if (!p2p->copy) return dt_error(world->ctx);
        status = dt__comm_copy(comm, &work->call, p2p->copy, p2p->send, bytes);
        message->data = p2p->copy;
    }
    if (status == DT_OK) status = dt__comm_sync(world);
    if (status) return dt__data_failed(comm, &work->call, status);
    message->order = pair->sent++;
    if (world->peers) world->peers[comm->group->ranks[p2p->peer]].sent++;
    __atomic_store_n(&message->state, DT__POSTED, __ATOMIC_RELEASE);
    if (pair->overflow) __atomic_store_n(&pair->posted, pair->sent, __ATOMIC_RELEASE);
    dt__count_progress(world);
    return DT_OK;
}

static int dt__shared_send(dt_work *work, dt__p2p *p2p) {
    dt__world *world = work->comm->world;
    int receiver = dt__local_rank_of(world, work->comm->group->ranks[p2p->peer]);
    int to_self = receiver == world->local_rank && !work->is_started;
    /* the flag is read before the messages: see dt__find_message */
    int ended = to_self || dt__has_ended(world->shared, receiver);
    dt__pair *pair = dt__pair_of(world->shared, world->local_rank, receiver, p2p->tag);
    size_t bytes = p2p->count * dt_dtype_size(work->call.dtype);
    if (p2p->state == 0) { /* the send begins */
        p2p->order = pair->sends_begun++;
        p2p->state = 1;
    }
    /* the send waits until all earlier sends are posted and a slot is free */
    if (p2p->state == 1) {
        if (to_self && bytes > DT_EAGER_BYTES) return dt__p2p_never_matched(work, p2p);
        dt__message *message = NULL;
        if (pair->sent == p2p->order)
            message = dt__free_message(world, pair, p2p->tag, work->is_started);
        if (!message) return ended ? dt__p2p_never_matched(work, p2p) : 0;
        if (dt__message_post(work, p2p, pair, message) != DT_OK) return -1;
        if (message->eager) return 1;
        p2p->message = message;
        p2p->state = 2;
    }
    if (__atomic_load_n(&p2p->message->state, __ATOMIC_ACQUIRE) != DT__RECEIVED)
        return ended ? dt__p2p_never_matched(work, p2p) : 0;
    __atomic_store_n(&p2p->message->state, DT__FREE, __ATOMIC_RELEASE);
    dt__send_copy_release(world, p2p->copy, bytes);
    p2p->copy = NULL;
    return 1;
}

/* Returns the oldest posted message with this group and tag, or NULL. If `group` is NULL, the
   message may have any group and tag. */
static dt__message *dt__oldest_posted(dt__pair *pair, const dt__group *group, int tag) {
    dt__message *oldest = NULL, *message = NULL;
    while ((message = dt__next_message(pair, message))) {
        if (__atomic_load_n(&message->state, __ATOMIC_ACQUIRE) != DT__POSTED) continue;
        if (group && (message->tag != tag || message->channel != group->channel)) continue;
        if (!oldest || message->order < oldest->order) oldest = message;
    }
    return oldest;
}

/* Looks for the oldest message not received (pair->oldest_order) in the first DT__PAIR_SLOTS slots
   and at recv_hint. Returns the message if it is there and has this group and tag, else NULL. */
static dt__message *dt__oldest_if_hinted(dt__pair *pair, const dt__group *group, int tag) {
    for (int i = 0; i <= DT__PAIR_SLOTS; i++) {
        dt__message *message = i < DT__PAIR_SLOTS ? &pair->message[i] : pair->recv_hint;
        if (__atomic_load_n(&message->state, __ATOMIC_ACQUIRE) != DT__POSTED ||
            message->order != pair->oldest_order)
            continue;
        return message->tag == tag && message->channel == group->channel ? message : NULL;
    }
    return NULL;
}

/* Returns the oldest message with this group and tag, or NULL if there is none yet. Two races
   matter. First, a rank may send a message and then end. So its `ended` flag is read before its
   messages: if the flag is set and the message is missing, the message will never come. Second, the
   sender may post two messages during the search, the older one into a slot that the search has
   already passed, the newer one into a slot that the search has not reached. When the search finds
   the newer message, the older message is visible too, so a second search finds the older message.

   Sets *ended to 1 if the sender will not send another message, else to 0. *last_searched holds
   pair->posted + 1 as it was at this receive's last search without a result; the receive searches
   again only after a new post. */
static dt__message *dt__find_message(const dt__shared *shared, dt__pair *pair,
    const dt__group *group, int tag, int from, int to_self, int *ended, uint64_t *last_searched) {
    *ended = to_self || dt__has_ended(shared, from);
    if (!pair->recv_hint)
        return dt__oldest_posted(pair, group, tag) ? dt__oldest_posted(pair, group, tag) : NULL;
    uint64_t posted = __atomic_load_n(&pair->posted, __ATOMIC_ACQUIRE) + 1;
    dt__message *oldest = dt__oldest_if_hinted(pair, group, tag);
    if (oldest || *last_searched == posted) return oldest;
    if (!dt__oldest_posted(pair, group, tag)) {
        *last_searched = posted;
        return NULL;
    }
    pair->oldest_order = dt__oldest_posted(pair, NULL, 0)->order;
    return dt__oldest_posted(pair, group, tag);
}

/* Returns 1 if an earlier receive of this rank waits for a message from rank `from` with this tag,
   else 0. If it returns 1, the caller must leave the message to the earlier receive. */
static int dt__earlier_recv_waits(const dt_work *work, const dt__p2p *p2p, int from) {
    for (const dt_work *w = work->comm->world->first_unfinished; w && w != work;
         w = w->next_unfinished) {
        if (w->comm->group != work->comm->group) continue;
        for (int i = 0; i < w->p2p_count; i++) {
            const dt__p2p *p = &w->p2p_ops[i];
            if (p->op != DT__RECV || p->finished || p->tag != p2p->tag) continue;
            if (p->peer == from || p->peer == DT_ANY) return 1;
        }
    }
    for (const dt__p2p *p = work->p2p_ops; p < p2p; p++) {
        if (p->op == DT__RECV && !p->finished && p->tag == p2p->tag && p->peer == p2p->peer)
            return 1;
    }
    return 0;
}

static int dt__shared_recv_from(
    dt_work *work, dt__p2p *p2p, dt__pair *pair, dt__message *message, int from) {
    dt_comm *comm = work->comm;
    size_t bytes = p2p->count * dt_dtype_size(work->call.dtype);
    if (dt__p2p_check(work, p2p, from, message->signature, message->bytes) < 0) return -1;
    if (!dt__access_begin(comm->world)) return dt__peer_failed(comm->world), -1;
    dt_status status = dt__comm_copy(comm, &work->call, p2p->recv, message->data, bytes);
    status = dt__access_end(comm->world, status);
    if (status) return dt__data_failed(comm, &work->call, status), -1;
    p2p->order = message->order;
    p2p->peer = from;
    if (dt__is_overflow(pair, message)) pair->recv_hint = dt__overflow_after(pair, message);
    if (pair->recv_hint && message->order == pair->oldest_order) pair->oldest_order++;
    if (comm->world->peers) comm->world->peers[comm->group->ranks[from]].received++;
    __atomic_store_n(&message->state, message->eager ? DT__FREE : DT__RECEIVED, __ATOMIC_RELEASE);
    if (work->call.from) *work->call.from = from;
    return 1;
}

static int dt__shared_recv(dt_work *work, dt__p2p *p2p) {
    const dt_comm *comm = work->comm;
    dt__shared *shared = comm->world->shared;
    int me = comm->world->local_rank, n = comm->base.size, none_left = 1;
    /* for DT_ANY the search starts at the right neighbour, so that no sender starves */
    for (int step = 0; step < n; step++) {
        int from = p2p->peer == DT_ANY ? (comm->base.rank + 1 + step) % n : p2p->peer, ended;
        int sender = dt__local_rank_of(comm->world, comm->group->ranks[from]);
        dt__pair *pair = dt__pair_of(shared, sender, me, p2p->tag);
        uint64_t never = 0; /* for DT_ANY, so that each call searches */
        dt__message *message = dt__find_message(shared, pair, comm->group, p2p->tag, sender,
            me == sender && !work->is_started, &ended,
            p2p->peer == DT_ANY ? &never : &p2p->last_searched);
        if (message && !dt__earlier_recv_waits(work, p2p, from))
            return dt__shared_recv_from(work, p2p, pair, message, from);
        none_left = none_left && ended && !message;
        if (p2p->peer != DT_ANY) break;
    }
    return none_left ? dt__p2p_never_matched(work, p2p) : 0;
}

static int dt__shared_message(dt_work *work, dt__p2p *p2p) {
    return p2p->op == DT__SEND ? dt__shared_send(work, p2p) : dt__shared_recv(work, p2p);
}

// ==== 14. Collectives in shared memory ==========================================================

/* The ranks of a group run a collective by accessing each other's memory, in four steps:

       post    each rank publishes its call, with the addresses of its buffers, or with the data
               themselves if they are small (inline)
       open    each rank waits until all ranks have posted, and compares all calls with rank 0's
       move    each rank copies its data from the other ranks (dt__pull), or writes its part of
               a sum to all of them (dt__push)
       close   each rank publishes that it is done and waits until all ranks are; only then may
               the buffers change

   Cost: two waits for the slowest rank, and each byte moves once. If all ranks post inline data,
   the second wait is left out, because no rank reads another rank's buffers. A rank reuses its
   oldest post only after dt__member.closed shows that all ranks have finished reading that post.
   Every flag has one writer and many readers (J. Mellor-Crummey and M. Scott, "Algorithms for
   scalable synchronization", 1991). Comparing the calls costs about 10 ns a rank; without the
   comparison, ranks whose calls differ would sum garbage or hang.

   If any rank has a large buffer that other ranks cannot access, all ranks move their data in
   windows. The owner of the buffer copies one window at a time into its staging buffer, which has
   two halves that alternate, and the other ranks read the window there. An all-reduce in windows is
   a reduce-scatter followed by an all-gather. */

/* State of a collective (dt_work.state), which says what the rank waits for. In the order of the
   values: a free post, the posts of all ranks, a free half of its staging buffer, the current
   window of every other rank, and the close of all ranks. */
enum { DT__AWAIT_SLOT = 0, DT__AWAIT_POSTS, DT__AWAIT_STAGING, DT__AWAIT_WINDOW, DT__AWAIT_CLOSE };

static dt__member *dt__member_of(const dt_comm *comm, int rank) {
    return &comm->group->members[rank];
}

/* Returns 1 if `rank` has reached the point that the work's state waits for. */
static int dt__rank_reached(const dt_work *work, int rank) {
    const dt_comm *comm = work->comm;
    if (work->state == DT__AWAIT_POSTS)
        return __atomic_load_n(&dt__post_of(comm, rank, work->call.seq)->seq, __ATOMIC_ACQUIRE) ==
               work->call.seq;
    const dt__member *member = dt__member_of(comm, rank);
    if (work->state == DT__AWAIT_WINDOW) { /* a buffer without staging can always be read */
        if (!dt__post_of(comm, rank, work->call.seq)->staging) return 1;
        return __atomic_load_n(&member->opened, __ATOMIC_ACQUIRE) >= work->window;
    }
    uint64_t need = work->window;
    if (work->state == DT__AWAIT_SLOT) need = comm->last_window[work->call.seq % DT_MAX_STARTED];
    /* window - 2 used the same half of the staging buffer: all ranks must have finished it */
    if (work->state == DT__AWAIT_STAGING) need = work->window < 2 ? 0 : work->window - 2;
    /* phase 1 (dt__is_two_phase) begins when all ranks have finished the sums of phase 0 */
    if (work->state == DT__AWAIT_STAGING && work->stage == 1 && work->at == 0)
        need = work->window - 1;
    return __atomic_load_n(&member->closed, __ATOMIC_ACQUIRE) >= need;
}

/* Returns a text like "ranks 0,1 arrived, 3 did not". It lists at most 8 world ranks that have
   reached the point, and at most 8 that have not. */
static dt__phrase dt__arrivals_text(const dt_work *work) {
    dt__phrase text;
    size_t at = 0;
    dt__append(text.s, sizeof text.s, &at, "ranks ");
    for (int arrived = 1; arrived >= 0; arrived--) {
        int listed = 0;
        for (int rank = 0; rank < work->comm->base.size; rank++) {
            if (dt__rank_reached(work, rank) != arrived) continue;
            if (++listed > 9) continue;
            if (listed > 8)
                dt__append(text.s, sizeof text.s, &at, ",...");
            else
                dt__append(text.s, sizeof text.s, &at, "%s%d", listed > 1 ? "," : "",
                    work->comm->group->ranks[rank]);
        }
        if (arrived)
            dt__append(text.s, sizeof text.s, &at,
                work->state == DT__AWAIT_POSTS ? " arrived, " : " finished, ");
        else
            dt__append(
                text.s, sizeof text.s, &at, listed ? " did not" : "the last one just too late");
    }
    return text;
}

/* Returns 1 if all ranks have reached the point that the work's state waits for, 0 if not yet.
   Returns -1 after failing the context if a rank has failed, or has ended before that point. */
static int dt__all_reached(dt_work *work) {
    dt_comm *comm = work->comm;
    const dt__shared *shared = comm->world->shared;
    while (work->next_rank < comm->base.size && dt__rank_reached(work, work->next_rank))
        work->next_rank++;
    if (work->next_rank == comm->base.size) {
        work->next_rank = 0;
        return 1;
    }
    if (__atomic_load_n(&shared->ended, __ATOMIC_ACQUIRE) == 0) return 0;
    for (int rank = work->next_rank; rank < comm->base.size; rank++) {
        int of_world = comm->group->ranks[rank];
        if (!dt__has_ended(shared, dt__local_rank_of(comm->world, of_world)) ||
            dt__rank_reached(work, rank))
            continue;
        /* a failed rank has ended too, but its failure is what must be reported */
        if (dt__aborted(shared)) return dt__peer_failed(comm->world), -1;
        return dt__ended_without(work, of_world), -1;
    }
    return 0;
}

/* Compares the posted call of every rank with rank 0's. Every rank reads the same posts, so if
   calls differ, every rank reports the same two. */
static dt_status dt__compare_posts(dt_work *work) {
    dt_comm *comm = work->comm;
    const dt__post *first = dt__post_of(comm, 0, work->call.seq);
    for (int rank = DT__UNCHECKED ? comm->base.size : 1; rank < comm->base.size; rank++) {
        const dt__post *other = dt__post_of(comm, rank, work->call.seq);
        if (other->packed_call == first->packed_call && other->count == first->count) continue;
        dt__call_view its = { other->packed_call, other->count,
            dt__site_of(comm, comm->group->ranks[rank], work->call.seq) };
        dt__call_view one = { first->packed_call, first->count,
            dt__site_of(comm, comm->group->ranks[0], work->call.seq) };
        return dt__calls_differ(work, rank, &its, 0, &one);
    }
    return DT_OK;
}

/* Returns 1 if the call is a reduction whose complete sum all ranks or the root receive
   (all-reduce, reduce). dt__push can write the sum to them. */
static int dt__pushes(const dt__call *call) {
    return dt__pattern_of(call->op)->reduces && !dt__pattern_of(call->op)->send_blocks;
}

/* A send buffer of up to this many bytes is posted inline whatever the number of cores. If each
   rank has a core, other ranks read a larger send buffer in place: the second wait then costs less
   than a copy into the post, which other ranks would have to fetch from this core's cache. If ranks
   share cores, a wait costs more than a copy of 4 KiB. */
#define DT__POST_BYTES 128

/* Returns 1 if this rank posts its data inline. Data in device memory, the data of an all-to-all-v
   and data of more than DT_EAGER_BYTES are never posted inline. Other data are posted inline in any
   of these cases: there are at most DT__POST_BYTES bytes, the ranks share cores, this rank sends
   nothing, or the other ranks cannot access a buffer that they would have to read or write. */
static int dt__sends_inline(const dt_work *work) {
    const dt_comm *comm = work->comm;
    const dt__call *call = &work->call;
    const dt__shared *shared = comm->world->shared;
    dt_status (*move)(void *, const void *, size_t, void *) =
        dt_ctx_kernels(comm->world->ctx)->move;
    size_t bytes = dt__send_count(comm, call) * dt_dtype_size(call->dtype);
    if (call->op == DT__ALL_TO_ALL_V ||
        (!call->host_memory && move && move != dt_kernels_cpu()->move))
        return 0;
    if (bytes > DT_EAGER_BYTES) return 0;
    if (bytes <= DT__POST_BYTES || shared->spins == 0 || !dt__sends(comm, call)) return 1;
    return !dt__reachable(shared, call->send) ||
           (dt__pushes(call) && dt__receives(comm, call) && !dt__reachable(shared, call->recv));
}

/* Returns 1 if this rank must write its sum into its post first. If another rank posts inline and
   this rank does not, all ranks pull (dt__pull), and the other ranks read this rank's send buffer
   until all have closed. recv may be the same buffer. So the sum goes into the data space of this
   rank's post, which is unused, and is copied into recv after the close. Until then the post is not
   reused. */
static int dt__must_sum_in_post(const dt_work *work) {
    const dt_comm *comm = work->comm;
    return work->inline_ranks && dt__pushes(&work->call) && dt__receives(comm, &work->call) &&
           !dt__post_of(comm, comm->base.rank, work->call.seq)->is_inline;
}

/* ---- where data lie: blocks, and windows of them ---- */

/* Returns 1 for an all-reduce in windows. Its phase 0 is a reduce-scatter of chunks, its phase 1 an
   all-gather of the chunks; work->stage is the phase. */
static int dt__is_two_phase(const dt_work *work) {
    const dt__pattern *pattern = dt__pattern_of(work->call.op);
    return work->uses_windows && pattern->reduces && !pattern->send_blocks && pattern->all_recv;
}
static int dt__sends_blocks(const dt_work *work) {
    return dt__is_two_phase(work) ? work->stage == 0 : dt__pattern_of(work->call.op)->send_blocks;
}
static int dt__reduces(const dt_work *work) {
    return dt__is_two_phase(work) ? work->stage == 0 : dt__pattern_of(work->call.op)->reduces;
}

static const size_t *dt__counts_of(const dt_work *work, int rank) {
    return (const size_t *)(const void *)dt__post_data(
        dt__post_of(work->comm, rank, work->call.seq));
}

/* Returns the number of elements that rank `from` has for rank `to`. dt__offset_from_to returns
   their offset, in elements, in the buffer of rank `from`. */
static size_t dt__count_from_to(const dt_work *work, int from, int to) {
    if (work->call.op == DT__ALL_TO_ALL_V) return dt__counts_of(work, from)[to];
    if (!dt__is_two_phase(work)) return work->call.count;
    int chunk = work->stage == 0 ? to : from, n = work->comm->base.size;
    return dt__chunk_offset(work->call.count, n, chunk + 1) -
           dt__chunk_offset(work->call.count, n, chunk);
}

static size_t dt__offset_from_to(const dt_work *work, int from, int to) {
    if (work->call.op == DT__ALL_TO_ALL_V) return dt__sum_counts(dt__counts_of(work, from), to);
    int chunk = work->stage == 0 ? to : from;
    if (dt__is_two_phase(work))
        return dt__chunk_offset(work->call.count, work->comm->base.size, chunk);
    return dt__sends_blocks(work) ? (size_t)to * work->call.count : 0;
}

/* Returns the offset in this rank's recv, in elements, of the data from rank `from`. */
static size_t dt__recv_offset(const dt_work *work, int from) {
    if (work->call.op == DT__ALL_TO_ALL_V) return dt__sum_counts(work->call.recv_counts, from);
    if (dt__is_two_phase(work)) return dt__offset_from_to(work, from, work->comm->base.rank);
    return dt__reduces(work) || !dt__pattern_of(work->call.op)->all_send
               ? 0
               : (size_t)from * work->call.count;
}

/* Returns how many elements of a block of `count` elements lie in the current window. */
static size_t dt__in_window(const dt_work *work, size_t count) {
    if (count <= work->at) return 0;
    return count - work->at < work->window_count ? count - work->at : work->window_count;
}

/* Returns the address where this rank reads the current window of the data that rank `from` has for
   it. */
static const char *dt__source(const dt_work *work, int from) {
    dt__post *post = dt__post_of(work->comm, from, work->call.seq);
    size_t size = dt_dtype_size(work->call.dtype), me = (size_t)work->comm->base.rank;
    if (post->staging)
        return post->staging + (work->window & 1) * DT_WINDOW_BYTES +
               (dt__sends_blocks(work) ? me * work->window_count * size : 0);
    const char *base = (const char *)(work->stage == 1 ? post->recv : post->send);
    return base + (dt__offset_from_to(work, from, (int)me) + work->at) * size;
}

/* Copies the current window of this rank's data into its staging buffer, if it needs one, and
   publishes in `opened` that the other ranks may read it. */
static dt_status dt__stage_window(dt_work *work) {
    dt_comm *comm = work->comm;
    if (!dt__post_of(comm, comm->base.rank, work->call.seq)->staging) return DT_OK;
    size_t size = dt_dtype_size(work->call.dtype),
           blocks = dt__sends_blocks(work) ? (size_t)comm->base.size : 1;
    char *to = comm->staging + (work->window & 1) * DT_WINDOW_BYTES;
    const char *from = (const char *)(work->stage == 1 ? work->call.recv : work->call.send);
    dt_status status = DT_OK;
    for (size_t i = 0; i < blocks && dt__sends(comm, &work->call) && !status; i++) {
        int block = dt__sends_blocks(work) ? (int)i : comm->base.rank;
        status = dt__comm_copy(comm, &work->call, to + i * work->window_count * size,
            from + (dt__offset_from_to(work, comm->base.rank, block) + work->at) * size,
            dt__in_window(work, dt__count_from_to(work, comm->base.rank, block)) * size);
    }
    if (status == DT_OK) status = dt__comm_sync(comm->world);
    if (status) return dt__data_failed(comm, &work->call, status);
    __atomic_store_n(&dt__member_of(comm, comm->base.rank)->opened, work->window, __ATOMIC_RELEASE);
    return DT_OK;
}

/* Sets work->window_count, the number of elements of each block that one window holds. */
static void dt__set_window(dt_work *work) {
    size_t blocks = dt__sends_blocks(work) ? (size_t)work->comm->base.size : 1,
           size = dt_dtype_size(work->call.dtype);
    work->window_count = work->uses_windows ? DT_WINDOW_BYTES / size / blocks : work->longest_block;
    if (work->window_count == 0) work->window_count = 1;
}

/* ---- moving data ---- */

/* Copies or reduces the data of all ranks into recv. A copy begins with this rank's own block and
   continues with the next rank's, so that the ranks do not all read the same memory at the same
   time. */
static dt_status dt__pull(dt_work *work) {
    dt_comm *comm = work->comm;
    const dt__pattern *pattern = dt__pattern_of(work->call.op);
    int n = comm->base.size, me = comm->base.rank;
    size_t size = dt_dtype_size(work->call.dtype);
    char *recv = (char *)work->call.recv + work->at * size;
    dt_status status = DT_OK;
    if (!dt__receives(comm, &work->call)) return DT_OK;
    if (dt__reduces(work)) {
        for (int rank = 0; rank < n; rank++) comm->inputs[rank] = dt__source(work, rank);
        comm->outputs[0] = recv + dt__recv_offset(work, me) * size;
        if (work->sum_in_post)
            comm->outputs[0] = dt__post_data(dt__post_of(comm, me, work->call.seq));
        return dt__reduce_inputs(
            comm, &work->call, 1, n, dt__in_window(work, dt__count_from_to(work, me, me)), 0);
    }
    for (int step = 0; step < n && !status; step++) {
        int from = (me + step) % n;
        if (!pattern->all_send && from != work->call.peer) continue;
        status = dt__comm_copy(comm, &work->call, recv + dt__recv_offset(work, from) * size,
            dt__source(work, from), dt__in_window(work, dt__count_from_to(work, from, me)) * size);
    }
    return status;
}

/* Smallest size, in bytes, of all ranks' send and recv buffers together for which dt__push uses
   streaming (non-temporal) stores. They are up to twice as fast if the buffers exceed all caches
   near a core and no rank sums in place. Otherwise they are up to four times as slow: for example,
   a sum in place writes lines that are already cached. */
enum { DT__STREAMING_BYTES = 8 << 20 };

static int dt__use_streaming_stores(const dt_work *work) {
    size_t n = (size_t)work->comm->base.size;
    if (2 * n * dt__call_bytes(&work->call) < DT__STREAMING_BYTES) return 0;
    for (size_t rank = 0; rank < n; rank++) {
        const dt__post *post = dt__post_of(work->comm, (int)rank, work->call.seq);
        if (post->send == post->recv) return 0;
    }
    return 1;
}

/* Direct all-reduce in shared memory: rank r sums chunk r of all send buffers and writes the sum to
   all recv buffers. Each buffer is read once and written once. A rank transfers 2 (N-1)/N S bytes,
   where N is the number of ranks and S the bytes of one buffer. No algorithm can transfer less (P.
   Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
   2009). DeepSpeed does the same (github.com/deepspeedai/DeepSpeed, csrc/cpu/comm/shm.cpp). A
   reduce writes to the recv buffer of the root only. */
static dt_status dt__push(dt_work *work) {
    dt_comm *comm = work->comm;
    int n = comm->base.size, me = comm->base.rank, to_all = dt__pattern_of(work->call.op)->all_recv;
    size_t first = dt__chunk_offset(work->call.count, n, me),
           at = first * dt_dtype_size(work->call.dtype);
    size_t count = dt__chunk_offset(work->call.count, n, me + 1) - first;
    for (int rank = 0; rank < n; rank++)
        comm->inputs[rank] = (const char *)dt__post_of(comm, rank, work->call.seq)->send + at;
    /* each rank writes to its own recv first, so that the ranks do not all write to one buffer */
    int home = to_all ? me : work->call.peer;
    for (int step = 0; step < (to_all ? n : 1); step++)
        comm->outputs[step] =
            (char *)dt__post_of(comm, (home + step) % n, work->call.seq)->recv + at;
    return dt__reduce_inputs(
        comm, &work->call, to_all ? n : 1, n, count, to_all && dt__use_streaming_stores(work));
}

/* ---- states ---- */

/* Compares the counts that this rank expects in an all-to-all-v with the counts that the other
   ranks send to it. Also sets work->longest_block to the longest block between any two ranks, so
   the value is the same on all ranks. */
static dt_status dt__compare_posted_counts(dt_work *work) {
    dt_comm *comm = work->comm;
    int n = comm->base.size, me = comm->base.rank;
    work->longest_block = 0;
    for (int from = 0; from < n; from++) {
        const size_t *counts = dt__counts_of(work, from);
        for (int to = 0; to < n; to++)
            work->longest_block =
                counts[to] > work->longest_block ? counts[to] : work->longest_block;
        if (counts[me] == work->call.recv_counts[from]) continue;
        return dt__counts_differ(work, from, counts[me], work->call.recv_counts[from]);
    }
    return DT_OK;
}

static int dt__post_call(dt_work *work) {
    dt_comm *comm = work->comm;
    const dt__call *call = &work->call;
    dt__shared *shared = comm->world->shared;
    dt__post *post = dt__post_of(comm, comm->base.rank, call->seq);
    int needs_staging = 0;
    post->is_inline = dt__sends_inline(work);
    if (!post->is_inline && dt__sends(comm, call))
        needs_staging = !dt__reachable(shared, call->send);
    if (!post->is_inline && dt__pushes(call) && dt__receives(comm, call))
        needs_staging = needs_staging || !dt__reachable(shared, call->recv);
    if (needs_staging && !comm->staging) {
        comm->staging =
            (char *)dt_alloc(comm->world->ctx, DT_MEM_COMM, 2 * DT_WINDOW_BYTES, "staging windows");
        if (!comm->staging) return -1;
    }
    post->packed_call = dt__pack_call(call);
    post->count = call->count;
    post->send = post->is_inline ? dt__post_data(post) : call->send;
    post->recv = call->recv;
    post->staging = needs_staging ? comm->staging : NULL;
    dt_status status = dt__comm_sync(comm->world);
    if (call->op == DT__ALL_TO_ALL_V)
        memcpy(dt__post_data(post), call->send_counts, (size_t)comm->base.size * sizeof(size_t));
    else if (post->is_inline && dt__sends(comm, call) && status == DT_OK)
        memcpy(dt__post_data(post), call->send,
            dt__send_count(comm, call) * dt_dtype_size(call->dtype));
    if (status) return dt__data_failed(comm, call, status), -1;
    __atomic_store_n(&post->seq, call->seq, __ATOMIC_RELEASE);
    comm->last_posted = call->seq;
    return 1;
}

/* Decides how the data move. Called once all ranks have posted. Returns 1, or -1 if the context has
   failed. */
static int dt__plan_collective(dt_work *work) {
    dt_comm *comm = work->comm;
    work->longest_block = work->call.count;
    if (dt__compare_posts(work) != DT_OK) return -1;
    if (work->call.op == DT__ALL_TO_ALL_V && dt__compare_posted_counts(work) != DT_OK) return -1;
    for (int rank = 0; rank < comm->base.size; rank++) {
        work->uses_windows = work->uses_windows || dt__post_of(comm, rank, work->call.seq)->staging;
        work->inline_ranks += dt__post_of(comm, rank, work->call.seq)->is_inline;
    }
    work->sum_in_post = comm->sum_in_post[work->call.seq % DT_MAX_STARTED] =
        dt__must_sum_in_post(work);
    if (dt__is_two_phase(work))
        work->longest_block = dt__chunk_offset(work->call.count, comm->base.size, 1);
    dt__set_window(work);
    work->window = comm->windows_done + 1;
    return 1;
}

/* Moves the data of the current window. Returns 1, or -1 if the context has failed. */
static int dt__move_window(dt_work *work) {
    dt_comm *comm = work->comm;
    int in_post = work->inline_ranks == comm->base.size,
        push = !work->inline_ranks && !work->uses_windows && dt__pushes(&work->call);
    if (!in_post && !dt__access_begin(comm->world)) return dt__peer_failed(comm->world), -1;
    dt_status status = push ? dt__push(work) : dt__pull(work);
    if (!in_post) status = dt__access_end(comm->world, status);
    if (status) return dt__data_failed(comm, &work->call, status), -1;
    comm->windows_done = comm->last_window[work->call.seq % DT_MAX_STARTED] = work->window;
    __atomic_store_n(&dt__member_of(comm, comm->base.rank)->closed, work->window, __ATOMIC_RELEASE);
    return 1;
}

/* If the sum lies in this rank's post (dt__must_sum_in_post), copies it into recv. Called after all
   ranks have closed. Returns 1, or -1 if the context has failed. */
static int dt__copy_back_sum(dt_work *work) {
    dt_comm *comm = work->comm;
    if (!work->sum_in_post) return 1;
    const char *sum = dt__post_data(dt__post_of(comm, comm->base.rank, work->call.seq));
    dt_status status =
        dt__comm_copy(comm, &work->call, work->call.recv, sum, dt__call_bytes(&work->call));
    comm->sum_in_post[work->call.seq % DT_MAX_STARTED] = 0;
    return status ? dt__data_failed(comm, &work->call, status), -1 : 1;
}

/* Advances to the next window and returns 1. Returns 0 if the current window is the last. */
static int dt__next_window(dt_work *work) {
    if (work->at + work->window_count < work->longest_block) {
        work->at += work->window_count;
    } else if (dt__is_two_phase(work) && work->stage == 0) {
        work->stage = 1;
        work->at = 0;
        dt__set_window(work);
    } else {
        return 0;
    }
    work->window++;
    return 1;
}

/* Returns 1 if this rank may post its call, 0 if not yet, -1 if the context has failed. Calls are
   posted in order. The operation that used the same post before must have moved its data, and all
   ranks must have finished with that post. */
static int dt__may_post(dt_work *work) {
    dt_comm *comm = work->comm;
    if (comm->last_posted + 1 != work->call.seq ||
        comm->last_moved + DT_MAX_STARTED < work->call.seq)
        return 0;
    if (comm->sum_in_post[work->call.seq % DT_MAX_STARTED]) return 0;
    if (comm->closed_by_all >= comm->last_window[work->call.seq % DT_MAX_STARTED]) return 1;
    int there = dt__all_reached(work);
    if (there <= 0) return there;
    /* The loop reads cache lines that other ranks write, which is slow. So closed_by_all is
       recomputed only when its old value is too low. */
    comm->closed_by_all = comm->windows_done;
    for (int rank = 0; rank < comm->base.size; rank++) {
        uint64_t closed = __atomic_load_n(&dt__member_of(comm, rank)->closed, __ATOMIC_ACQUIRE);
        if (closed < comm->closed_by_all) comm->closed_by_all = closed;
    }
    return 1;
}

/* Advances a collective through its states. Returns 1 if it is complete, 0 if it must wait, -1 if
   the context has failed. */
static int dt__shared_collective(dt_work *work) {
    dt_comm *comm = work->comm;
    for (int moved = 0;; moved = 1) {
        if (moved) dt__count_progress(comm->world);
        if (work->state != DT__AWAIT_SLOT && work->state != DT__AWAIT_CLOSE &&
            comm->last_moved + 1 != work->call.seq)
            return 0;
        /* buffers without staging can always be read */
        int open = work->state == DT__AWAIT_WINDOW && !work->uses_windows;
        int there = work->state == DT__AWAIT_SLOT ? dt__may_post(work)
                    : open                        ? 1
                                                  : dt__all_reached(work);
        if (there <= 0) return there;
        switch (work->state) {
        case DT__AWAIT_SLOT:
            if (dt__post_call(work) < 0) return -1;
            work->state = DT__AWAIT_POSTS;
            continue;
        case DT__AWAIT_POSTS:
            if (dt__plan_collective(work) < 0) return -1;
            work->state = work->uses_windows ? DT__AWAIT_STAGING : DT__AWAIT_WINDOW;
            continue;
        case DT__AWAIT_STAGING:
            if (dt__stage_window(work) != DT_OK) return -1;
            work->state = DT__AWAIT_WINDOW;
            continue;
        case DT__AWAIT_WINDOW:
            if (dt__move_window(work) < 0) return -1;
            if (dt__next_window(work)) {
                work->state = DT__AWAIT_STAGING;
                continue;
            }
            comm->last_moved = work->call.seq;
            if (work->inline_ranks == comm->base.size) return 1;
            work->state = DT__AWAIT_CLOSE;
            continue;
        default: return dt__copy_back_sum(work);
        }
    }
}

// ==== 15. Messages over a transport =============================================================

/* Five functions (dt_transport), which the caller or a backend provides, carry the bytes. Each
   group has two channels, one for the messages of section 4 and one for the messages of
   collectives, so that a message of one kind never matches a receive of the other kind. The
   messages of collectives between ranks of one machine go through shared memory, as in section 13.
   Device memory is copied through pinned host memory. */

static int dt__on_device(const dt_work *work) {
    return !work->call.host_memory && dt_ctx_kernels(work->comm->world->ctx)->open != NULL;
}

/* Starts a copy to or from pinned memory. The host does not wait for the copy: p2p->device_event,
   which is recorded after the copy, tells when it is complete. Returns 1, or -1 if the context has
   failed. */
static int dt__pinned_copy_start(
    dt_work *work, dt__p2p *p2p, void *to, const void *from, size_t bytes) {
    const dt_kernels *kernels = dt_ctx_kernels(work->comm->world->ctx);
    void *stream = dt_ctx_stream(work->comm->world->ctx);
    dt_status status = kernels->move(to, from, bytes, stream);
    if (status == DT_OK) p2p->device_event = kernels->event_record(stream, p2p->device_event);
    if (status == DT_OK && p2p->device_event) return 1;
    return dt__data_failed(work->comm, &work->call, status ? status : DT_ERR_DEVICE), -1;
}

/* Returns 1 if the copy is complete or there was no copy, 0 if not yet, -1 if the context has
   failed. */
static int dt__pinned_copy_done(dt_work *work, const dt__p2p *p2p) {
    int passed = p2p->device_event
                     ? dt_ctx_kernels(work->comm->world->ctx)->event_query(p2p->device_event)
                     : 1;
    if (passed < 0) dt__data_failed(work->comm, &work->call, DT_ERR_DEVICE);
    return passed;
}

/* Frees the transfer's event and pinned copy. After a failure the device may still be copying; then
   this function waits for the device first. */
static void dt__p2p_release_device(dt_work *work, dt__p2p *p2p) {
    dt_ctx *ctx = work->comm->world->ctx;
    if (p2p->pinned_copy && p2p->device_event &&
        dt_ctx_kernels(ctx)->event_query(p2p->device_event) == 0)
        dt__comm_sync(work->comm->world);
    if (p2p->device_event) dt_ctx_kernels(ctx)->event_destroy(p2p->device_event);
    dt_unpin(ctx, p2p->pinned_copy, p2p->count * dt_dtype_size(work->call.dtype));
    p2p->pinned_copy = p2p->device_event = NULL;
}

/* The channel, the peer (a world rank, or DT_ANY) and the tag that a transport needs to send or
   receive a message. */
typedef struct dt__address {
    uint32_t channel;
    int other, tag;
} dt__address;

static dt__address dt__address_of(const dt_work *work, const dt__p2p *p2p) {
    dt__address a = { 2 * work->comm->group->channel + (p2p->tag < 0), DT_ANY, p2p->tag };
    if (p2p->peer != DT_ANY) a.other = work->comm->group->ranks[p2p->peer];
    if (p2p->tag < 0) a.tag = -1 - p2p->tag;
    return a;
}

/* Begins the transport's send or receive. Returns 1, or -1 if the context has failed. */
static int dt__transport_post(
    dt_work *work, dt__p2p *p2p, dt__address to, int sends, void *buf, size_t bytes) {
    dt__world *world = work->comm->world;
    const dt_transport *t = &world->transport;
    uint64_t signature = dt__signature_of(&work->call, p2p->count);
    p2p->request = sends ? t->send(t->user, to.other, to.channel, to.tag, signature, buf, bytes)
                         : t->recv(t->user, to.other, to.channel, to.tag, buf, bytes);
    if (p2p->request) {
        if (sends) __atomic_fetch_add(&world->state->in_transit, 2, __ATOMIC_SEQ_CST);
        if (sends && world->peers) world->peers[to.other].sent++;
        dt__count_progress(world);
        return 1;
    }
    dt__comm_fail(world, DT_ERR_COMM, "%s: the transport '%s' cannot begin it",
        dt__p2p_text(work, p2p).s, t->name);
    return -1;
}

/* Gives a send from a device its number among the sends to the same rank. The send may have to wait
   for its copy to host memory; the number keeps later sends from overtaking it. */
static void dt__device_send_enqueue(dt_work *work, dt__p2p *p2p) {
    uint64_t *device_sends = work->comm->world->device_sends;
    if (device_sends && p2p->op == DT__SEND)
        p2p->device_send_seq = device_sends[2 * work->comm->group->ranks[p2p->peer]]++;
    p2p->is_enqueued = 1;
}

/* Returns 1 if all earlier sends from a device to the same rank have begun, and then counts this
   send as begun; 0 if not yet. Returns 1 for every receive. */
static int dt__device_send_dequeue(dt_work *work, const dt__p2p *p2p) {
    uint64_t *device_sends = work->comm->world->device_sends;
    uint64_t *begun = device_sends && p2p->op == DT__SEND
                          ? &device_sends[2 * work->comm->group->ranks[p2p->peer] + 1]
                          : NULL;
    if (begun && *begun != p2p->device_send_seq) return 0;
    if (begun) ++*begun;
    return 1;
}

/* Begins the transfer. A send from a device is first copied to pinned host memory. Returns 1 if the
   transfer has begun, 0 if not yet, -1 if the context has failed. */
static int dt__transport_begin(dt_work *work, dt__p2p *p2p) {
    dt_ctx *ctx = work->comm->world->ctx;
    size_t bytes = p2p->count * dt_dtype_size(work->call.dtype);
    void *buf = p2p->op == DT__SEND ? (void *)p2p->send : p2p->recv;
    int device = dt__on_device(work);
    if (device && !p2p->is_enqueued) {
        dt__device_send_enqueue(work, p2p);
        if (bytes > 0) p2p->pinned_copy = dt_pin(ctx, bytes, "a copy of a device's memory");
        if (bytes > 0 && !p2p->pinned_copy) return -1;
        if (p2p->op == DT__SEND && bytes > 0 &&
            dt__pinned_copy_start(work, p2p, p2p->pinned_copy, p2p->send, bytes) < 0)
            return -1;
    }
    int there = dt__pinned_copy_done(work, p2p);
    if (there <= 0 || (device && !dt__device_send_dequeue(work, p2p))) return there < 0 ? -1 : 0;
    return dt__transport_post(work, p2p, dt__address_of(work, p2p), p2p->op == DT__SEND,
        p2p->pinned_copy ? p2p->pinned_copy : buf, bytes);
}

/* Returns the rank in the group that a world rank has, or -1 if it is not a member. */
static int dt__rank_in(const dt__group *group, int world_rank) {
    for (int rank = 0; rank < group->size; rank++) {
        if (group->ranks[rank] == world_rank) return rank;
    }
    return -1;
}

/* Fails the context with the error that the transport's test function returned. Returns -1. */
static int dt__transport_failed(dt_work *work, const dt__p2p *p2p, int answer, const char *why) {
    dt__world *world = work->comm->world;
    dt__phrase text = dt__p2p_text(work, p2p);
    if (answer == -3)
        dt__comm_fail(world, DT_ERR_PEER, "peer failed first: %s", why);
    else if (answer == -4)
        dt__p2p_never_matched(work, p2p);
    else
        dt__comm_fail(world, answer == -2 ? DT_ERR_COMM : DT_ERR_PEER, "%s: %s", text.s, why);
    return -1;
}

typedef struct dt__arrival {
    int from;
    uint64_t signature;
    size_t bytes;
} dt__arrival;

/* Tests the transport's request. Returns 1 if it is complete, with the message's sender, signature
   and bytes in *arrival; 0 if not yet; -1 if the context has failed. */
static int dt__transport_test(dt_work *work, dt__p2p *p2p, dt__arrival *arrival) {
    dt__world *world = work->comm->world;
    char why[512] = "";
    arrival->from = DT_ANY;
    arrival->signature = 0;
    int done = world->transport.test(world->transport.user, p2p->request, &arrival->from,
        &arrival->signature, &arrival->bytes, why);
    if (done == 0) return 0;
    p2p->request = NULL;
    why[sizeof why - 1] = 0;
    if (done < 0) return dt__transport_failed(work, p2p, done, why);
    __atomic_fetch_sub(&world->state->in_transit, 1, __ATOMIC_SEQ_CST);
    return 1;
}

/* Checks that the message matches the receive, and stores the sender's rank. Returns 1, or -1 if
   the context has failed. */
static int dt__transport_received(dt_work *work, dt__p2p *p2p, const dt__arrival *arrival) {
    dt__world *world = work->comm->world;
    int from = p2p->peer == DT_ANY ? dt__rank_in(work->comm->group, arrival->from) : p2p->peer;
    if (dt__p2p_check(work, p2p, from, arrival->signature, arrival->bytes) < 0) return -1;
    if (work->call.from) *work->call.from = from;
    p2p->peer = from;
    if (world->peers) world->peers[work->comm->group->ranks[from]].received++;
    return 1;
}

/* Advances a transfer. Returns 1 if it is complete, 0 if not yet, -1 if the context has failed.
   p2p->state: 0 not begun; 1 begun; 2 the message has been sent or received, and received data may
   still be in a copy to the device. */
static int dt__transport_message(dt_work *work, dt__p2p *p2p) {
    dt__world *world = work->comm->world;
    dt__arrival arrival = { DT_ANY, 0, p2p->count * dt_dtype_size(work->call.dtype) };
    if (p2p->tag < 0 && world->node &&
        dt__local_rank_of(world, work->comm->group->ranks[p2p->peer]) >= 0)
        return dt__shared_message(work, p2p);
    if (p2p->state == 0) {
        int begun = dt__transport_begin(work, p2p);
        if (begun <= 0) return begun;
        p2p->state = 1;
    }
    if (p2p->state == 1) {
        int done = dt__transport_test(work, p2p, &arrival);
        if (done <= 0) return done;
        if (p2p->op == DT__RECV && dt__transport_received(work, p2p, &arrival) < 0) return -1;
        if (p2p->op == DT__RECV && p2p->pinned_copy &&
            dt__pinned_copy_start(work, p2p, p2p->recv, p2p->pinned_copy, arrival.bytes) < 0)
            return -1;
        p2p->state = 2;
    }
    int there = dt__pinned_copy_done(work, p2p);
    if (there > 0) dt__p2p_release_device(work, p2p);
    return there;
}

// ==== 16. Collective algorithms =================================================================

/* A collective that runs as messages is a function that is called once for each round. The function
   lists the round's messages (dt__send_to, dt__recv_from) and returns 1, or returns 0 if there are
   no more rounds. A round begins when the previous round is complete, so it may use the data that
   the previous round received.

   The table shows what the busiest rank sends: the number of messages, then the number of bytes. N
   is the number of ranks, S the bytes of the full buffer, and L is log2 N rounded up. (The entries
   with N/2 and S/2 hold if N is a power of two.)

                        direct               ring                 doubling       tree
       all-reduce       2(N-1); 2(N-1)/N S   2(N-1); 2(N-1)/N S   L; (N-1) S     L; (L-1+N/2) S
       reduce           N; S                                                     1; N/2 S
       reduce-scatter   N-1; (N-1)/N S       N-1; (N-1)/N S
       all-gather       N-1; (N-1)/N S       N-1; (N-1)/N S       L; (N-1)/N S
       gather           1; S/N                                                   1; S/2
       scatter          N-1; (N-1)/N S                                           L; (N-1)/N S
       all-to-all       N-1; (N-1)/N S
       broadcast        N-1; (N-1) S         2(N-1); 2(N-1)/N S                  L; L S
       barrier                                                    L; 0

   A sum in rank order gives the same bits with every algorithm; partial sums would not. So the
   inputs of all ranks are sent unreduced to one rank and added there. Of the algorithms in the
   table, only the ring sends partial sums, and each of its chunks begins at a different rank. The
   comment of each function gives the picture and the cost of its algorithm. R. Thakur, R.
   Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", 2005,
   compares the algorithms. */

static dt__p2p *dt__add_p2p(dt_work *work, dt__op_code op, int peer, size_t count) {
    dt__p2p *p2p = &work->p2p_ops[work->p2p_count++];
    memset(p2p, 0, sizeof *p2p);
    p2p->op = op;
    p2p->peer = peer;
    p2p->count = count;
    p2p->tag = -1 - (int)(2 * (work->call.seq % 0x80000) + (work->call.op == DT__CHECK));
    if (op == DT__SEND && work->call.op != DT__CHECK) {
        work->comm->world->traffic.messages++;
        work->comm->world->traffic.bytes += count * dt_dtype_size(work->call.dtype);
    }
    return p2p;
}

static void dt__send_to(dt_work *work, int peer, const void *buf, size_t count) {
    dt__add_p2p(work, DT__SEND, peer, count)->send = buf;
}

static void dt__recv_from(dt_work *work, int peer, void *buf, size_t count) {
    dt__add_p2p(work, DT__RECV, peer, count)->recv = buf;
}

/* Copies within this rank. */
static void dt__copy_local(dt_work *work, void *dst, const void *src, size_t count) {
    dt_status status =
        dt__comm_copy(work->comm, &work->call, dst, src, count * dt_dtype_size(work->call.dtype));
    if (status) dt__data_failed(work->comm, &work->call, status);
}

/* Reduces the n inputs listed in comm->inputs into `out`, which has `count` elements. */
static void dt__sum_inputs(dt_work *work, void *out, int n, size_t count) {
    work->comm->outputs[0] = out;
    dt_status status = dt__reduce_inputs(work->comm, &work->call, 1, n, count, 0);
    if (status == DT_OK && !dt__on_device(work)) status = dt__comm_sync(work->comm->world);
    if (status) dt__data_failed(work->comm, &work->call, status);
}

typedef int (*dt__round_fn)(dt_work *work);

/* Runs all rounds of the algorithm `one`, then all rounds of the algorithm `other`. Returns 1 if a
   round was begun, 0 if there are no more rounds. */
static int dt__two_phases(dt_work *work, dt__round_fn one, dt__round_fn other) {
    if (work->stage == 0) {
        if (one(work)) return 1;
        if (dt_error(work->comm->world->ctx)) return 0;
        work->stage = 1;
        work->round = 0;
    }
    return other(work);
}

/* Returns the offset of block i in the full buffer, in elements. For an all-reduce, a reduce and a
   broadcast, block i is chunk i of the buffer; for other operations the buffer has N blocks of
   `count` elements. */
static size_t dt__block_offset(const dt_work *work, int i) {
    dt__op_code op = work->call.op;
    if (op == DT__ALL_REDUCE || op == DT__SUM_DOUBLES || op == DT__REDUCE || op == DT__BROADCAST)
        return dt__chunk_offset(work->call.count, work->comm->base.size, i);
    return (size_t)i * work->call.count;
}

static size_t dt__block_count(const dt_work *work, int i) {
    return dt__block_offset(work, i + 1) - dt__block_offset(work, i);
}

/* Returns the address of element i of the buffer p. */
static char *dt__element(const dt_work *work, const void *p, size_t i) {
    return (char *)p + i * dt_dtype_size(work->call.dtype);
}

static char *dt__recv_block(const dt_work *work, int i) {
    return dt__element(work, work->call.recv, dt__block_offset(work, i));
}
static char *dt__send_block(const dt_work *work, int i) {
    return dt__element(work, work->call.send, dt__block_offset(work, i));
}

/* ---- all-gather ---- */

/* Direct all-gather: every rank sends its block to all other ranks at once. Each rank sends N-1
   messages, (N-1)/N S bytes. The functions whose names end in _all_gather_phase expect this rank's
   own block in recv. */
static int dt__direct_all_gather_phase(dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank;
    if (work->round > 0) return 0;
    for (int step = 1; step < n; step++) {
        int to = (me + step) % n, from = (me + n - step) % n;
        dt__send_to(work, to, dt__recv_block(work, me), dt__block_count(work, me));
        dt__recv_from(work, from, dt__recv_block(work, from), dt__block_count(work, from));
    }
    return 1;
}

/* Ring all-gather: in each round every rank sends to its right neighbour the block that it received
   in the previous round, so that all links are always busy. Each rank sends N-1 messages, (N-1)/N S
   bytes.

       rank:      0      1      2      3            The path of block 0 with N = 4. The other
       round 0    0 ---> 0                          blocks move at the same time, and each
       round 1           0 ---> 0                   block begins at its own rank.
       round 2                  0 ---> 0 */
static int dt__ring_all_gather_phase(dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank;
    int out = (me - work->round + n) % n, in = (me - work->round - 1 + n) % n;
    if (work->round == n - 1) return 0;
    dt__send_to(work, (me + 1) % n, dt__recv_block(work, out), dt__block_count(work, out));
    dt__recv_from(work, (me + n - 1) % n, dt__recv_block(work, in), dt__block_count(work, in));
    return 1;
}

static int dt__direct_all_gather(dt_work *work) {
    int me = work->comm->base.rank;
    if (work->round == 0)
        dt__copy_local(work, dt__recv_block(work, me), work->call.send, work->call.count);
    return dt__direct_all_gather_phase(work);
}

static int dt__ring_all_gather(dt_work *work) {
    int me = work->comm->base.rank;
    if (work->round == 0)
        dt__copy_local(work, dt__recv_block(work, me), work->call.send, work->call.count);
    return dt__ring_all_gather_phase(work);
}

/* Recursive doubling, in the form of J. Bruck et al., "Efficient algorithms for all-to-all
   communications", 1997, which works for any N. The scratch buffer collects the send buffers of
   ranks me, me+1, me+2, ...; each round doubles how many of them this rank has. Each rank sends L
   messages. With N = 4, where "0 <- 1" means that rank 0 receives from rank 1:

       round 0    0 <- 1    1 <- 2    2 <- 3    3 <- 0      then has 2 buffers: me, me+1
       round 1    0 <- 2    1 <- 3    2 <- 0    3 <- 1      then has 4 buffers: me .. me+3 */
static int dt__doubling_gather_phase(dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank, have = 1 << work->round;
    size_t count = work->call.count;
    if (work->round == 0 && dt__scratch(work, (size_t)n * count))
        dt__copy_local(work, work->scratch, work->call.send, count);
    if (have >= n) return 0;
    size_t more = (size_t)(have < n - have ? have : n - have);
    dt__send_to(work, (me - have + n) % n, work->scratch, more * count);
    dt__recv_from(work, (me + have) % n, dt__element(work, work->scratch, (size_t)have * count),
        more * count);
    return 1;
}

static int dt__doubling_all_gather(dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank;
    if (dt__doubling_gather_phase(work)) return 1;
    for (int i = 0; i < n && work->call.count; i++)
        dt__copy_local(work, dt__recv_block(work, (me + i) % n),
            dt__element(work, work->scratch, (size_t)i * work->call.count), work->call.count);
    return 0;
}

/* All-reduce by recursive doubling: gathers all send buffers on every rank
   (dt__doubling_gather_phase), then every rank sums them in rank order. (The usual version adds in
   each round and sends L S bytes, but not in rank order.) Each rank sends L messages, (N-1) S
   bytes, so this algorithm is used for small buffers. */
static int dt__doubling_all_reduce(dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank;
    if (dt__doubling_gather_phase(work)) return 1;
    for (int i = 0; i < n; i++)
        work->comm->inputs[(me + i) % n] =
            dt__element(work, work->scratch, (size_t)i * work->call.count);
    dt__sum_inputs(work, work->call.recv, n, work->call.count);
    return 0;
}

static int dt__doubling_barrier(dt_work *work) { return dt__doubling_gather_phase(work); }

/* ---- all-to-all ---- */

static int dt__direct_all_to_all(dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank;
    if (work->round > 0) return 0;
    dt__copy_local(work, dt__recv_block(work, me), dt__send_block(work, me), work->call.count);
    for (int step = 1; step < n; step++) {
        int to = (me + step) % n, from = (me + n - step) % n;
        dt__send_to(work, to, dt__send_block(work, to), work->call.count);
        dt__recv_from(work, from, dt__recv_block(work, from), work->call.count);
    }
    return 1;
}

static int dt__direct_all_to_all_v(dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank;
    const size_t *out = work->call.send_counts, *in = work->call.recv_counts;
    if (work->round > 0) return 0;
    if (out[me] != in[me]) return dt__counts_differ(work, me, out[me], in[me]), 0;
    dt__copy_local(work, dt__element(work, work->call.recv, dt__sum_counts(in, me)),
        dt__element(work, work->call.send, dt__sum_counts(out, me)), out[me]);
    for (int step = 1; step < n; step++) {
        int to = (me + step) % n, from = (me + n - step) % n;
        dt__send_to(work, to, dt__element(work, work->call.send, dt__sum_counts(out, to)), out[to]);
        dt__recv_from(
            work, from, dt__element(work, work->call.recv, dt__sum_counts(in, from)), in[from]);
    }
    return 1;
}

/* ---- reductions ---- */

/* Returns the address for this rank's block of the sum: in recv or, in a reduce on a rank that is
   not the root, at the end of the scratch buffer. */
static char *dt__sum_destination(const dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank;
    if (work->call.op == DT__REDUCE_SCATTER) return (char *)work->call.recv;
    if (work->call.op == DT__REDUCE && me != work->call.peer)
        return dt__element(work, work->scratch, (size_t)n * dt__block_count(work, me));
    return dt__recv_block(work, me);
}

/* Direct reduce-scatter: an all-to-all into the scratch buffer, then one sum in rank order. Each
   rank sends N-1 messages, (N-1)/N S bytes. */
static int dt__direct_reduce_scatter(dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank;
    size_t mine = dt__block_count(work, me);
    if (work->round == 0) {
        if (!dt__scratch(work, (size_t)(n + 1) * mine)) return 0;
        for (int step = 1; step < n; step++) {
            int to = (me + step) % n, from = (me + n - step) % n;
            dt__send_to(work, to, dt__send_block(work, to), dt__block_count(work, to));
            dt__recv_from(work, from, dt__element(work, work->scratch, (size_t)from * mine), mine);
        }
        return 1;
    }
    if (mine == 0) return 0;
    for (int rank = 0; rank < n; rank++)
        work->comm->inputs[rank] = rank == me
                                       ? dt__send_block(work, me)
                                       : dt__element(work, work->scratch, (size_t)rank * mine);
    dt__sum_inputs(work, dt__sum_destination(work), n, mine);
    return 0;
}

/* Ring reduce-scatter: in round s this rank adds its own input to the partial sum of block me-1-s,
   which its left neighbour sent in the previous round, and sends the new partial sum to its right
   neighbour. (In round 0 it only sends its own input.) Block r begins at rank r+1 and ends at rank
   r, its owner. Each rank sends N-1 messages, (N-1)/N S bytes. The scratch buffer holds the
   incoming and the outgoing partial sum. In the picture t1 is rank 1's input.

       block 0, N = 4:    rank 1 ------> rank 2 ------> rank 3 ------> rank 0
                                  t1          t1+t2         t1+t2+t3         + t0, the sum */
static int dt__ring_reduce_scatter(dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank, last = work->round == n - 1;
    int out = (me - 1 - work->round + 2 * n) % n, in = (out - 1 + n) % n;
    size_t max_count = dt__block_count(work, 0);
    if (work->round == n) return 0;
    if (work->round == 0 && !dt__scratch(work, 2 * max_count)) return 0;
    char *incoming = (char *)work->scratch, *sum = dt__element(work, incoming, max_count);
    const char *outgoing = dt__send_block(work, out);
    if (work->round > 0 && dt__block_count(work, out) > 0) {
        work->comm->inputs[0] = incoming;
        work->comm->inputs[1] = outgoing;
        dt__sum_inputs(work, last ? dt__sum_destination(work) : sum, 2, dt__block_count(work, out));
        outgoing = sum;
    }
    if (last) return 0;
    dt__send_to(work, (me + 1) % n, outgoing, dt__block_count(work, out));
    dt__recv_from(work, (me + n - 1) % n, incoming, dt__block_count(work, in));
    return 1;
}

/* Direct all-reduce: a reduce-scatter and an all-gather, in each of which every rank sends to all
   other ranks at once. There are two rounds. Each rank sends 2(N-1) messages, 2(N-1)/N S bytes, and
   sums in rank order. */
static int dt__direct_all_reduce(dt_work *work) {
    return dt__two_phases(work, dt__direct_reduce_scatter, dt__direct_all_gather_phase);
}

/* Ring all-reduce: a ring reduce-scatter, then a ring all-gather. In 2(N-1) rounds each rank sends
   2(N-1) messages, 2(N-1)/N S bytes. No algorithm sends fewer bytes, whatever N is (P. Patarasuk
   and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). The
   path of one of the N chunks, with N = 4:

       partial sums    rank 1 ---> rank 2 ---> rank 3 ---> rank 0        dt__ring_reduce_scatter
       the sum         rank 0 ---> rank 1 ---> rank 2 ---> rank 3        dt__ring_all_gather_phase

   The other chunks move at the same time, and each chunk begins one rank further to the right, so
   every link is always busy. Each chunk is summed in a different order, so the last bits of the
   result differ from the results of other algorithms. */
static int dt__ring_all_reduce(dt_work *work) {
    return dt__two_phases(work, dt__ring_reduce_scatter, dt__ring_all_gather_phase);
}

/* Sends every rank's block of the sum to the root. The root's own block is already in its recv. */
static int dt__gather_sums(dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank, root = work->call.peer;
    if (work->round > 0) return 0;
    if (me != root) dt__send_to(work, root, dt__sum_destination(work), dt__block_count(work, me));
    for (int from = 0; from < n && me == root; from++) {
        if (from != me)
            dt__recv_from(work, from, dt__recv_block(work, from), dt__block_count(work, from));
    }
    return 1;
}

static int dt__direct_reduce(dt_work *work) {
    return dt__two_phases(work, dt__direct_reduce_scatter, dt__gather_sums);
}

/* ---- gather, scatter, broadcast: to or from the root at once ---- */

static int dt__direct_gather(dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank, root = work->call.peer;
    if (work->round > 0) return 0;
    if (me != root)
        dt__send_to(work, root, work->call.send, work->call.count);
    else
        dt__copy_local(work, dt__recv_block(work, me), work->call.send, work->call.count);
    for (int from = 0; from < n && me == root; from++) {
        if (from != me) dt__recv_from(work, from, dt__recv_block(work, from), work->call.count);
    }
    return 1;
}

static int dt__direct_scatter(dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank, root = work->call.peer;
    if (work->round > 0) return 0;
    if (me != root)
        dt__recv_from(work, root, work->call.recv, work->call.count);
    else
        dt__copy_local(work, work->call.recv, dt__send_block(work, me), work->call.count);
    for (int to = 0; to < n && me == root; to++) {
        if (to != me) dt__send_to(work, to, dt__send_block(work, to), work->call.count);
    }
    return 1;
}

static int dt__direct_broadcast(dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank, root = work->call.peer;
    if (work->round > 0) return 0;
    if (me != root) dt__recv_from(work, root, work->call.recv, work->call.count);
    for (int to = 0; to < n && me == root; to++) {
        if (to != me) dt__send_to(work, to, work->call.recv, work->call.count);
    }
    return 1;
}

/* The scatter phase of a ring broadcast (van de Geijn): each rank receives its chunk from the
   root. */
static int dt__scatter_phase(dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank, root = work->call.peer;
    if (work->round > 0) return 0;
    if (me != root) dt__recv_from(work, root, dt__recv_block(work, me), dt__block_count(work, me));
    for (int to = 0; to < n && me == root; to++) {
        if (to != me) dt__send_to(work, to, dt__recv_block(work, to), dt__block_count(work, to));
    }
    return 1;
}

static int dt__ring_broadcast(dt_work *work) {
    return dt__two_phases(work, dt__scatter_phase, dt__ring_all_gather_phase);
}

/* ---- rails: M machines of k ranks, which are neighbours in the group ---- */

/* Hierarchical all-reduce of large buffers. Between ranks of one machine messages go through shared
   memory (section 15), so the messages that leave a machine are the bottleneck. S is the size of
   the buffer in bytes, and N = kM. In a ring all-gather (N-1)/N S bytes leave each machine, because
   the ring leaves each machine once. In a direct all-reduce 2k(N-k)/N S would leave each machine.
   With rails 2 S leave a machine, but only S leave the first and the last machine.

   The buffer is divided into k chunks. The j-th ranks of all machines form rail j. Rail j sums
   chunk j from machine 0 up to machine M-1, and sends the sum down again. It does so in P pieces:

       machine M-1    | ^  the complete sum turns round here
          ...         v |
       machine 1      | ^  adds its k inputs, in rank order, and sends the sum up
                      v |
       machine 0      | ^  adds its k inputs

   In round t a rank of machine m, with d = 2(M-1-m),

       receives piece t of its machine's inputs, and from the machine below the sum of piece t
       over machines 0 .. m-1;
       sends up the sum of piece t-1 over machines 0 .. m, which it has just added in rank order
       (on the last machine this is the complete sum);
       receives from the machine above the complete sum of piece t-d;
       sends the complete sum of piece t-d-1 to the other ranks of its machine, and down.

   Round t of machine m runs at the same time as round t-1 of the machine above. All links are busy
   in both directions, and the all-reduce takes about P + 2 M rounds. A rank sends 2kP messages, 2 S
   bytes. A piece on its way is kept at the place in recv where its sum will be. */

/* Size of the largest piece, in bytes. The piece fits in a cache, but is so large that the fixed
   cost of a round is less than the cost of moving the bytes. */
#ifndef DT__RAIL_BYTES
#define DT__RAIL_BYTES DT_WINDOW_BYTES
#endif

static size_t dt__rail_pieces(const dt_work *work) {
    size_t longest = dt__chunk_offset(work->call.count, work->comm->ranks_per_node, 1) *
                     dt_dtype_size(work->call.dtype);
    return (longest + DT__RAIL_BYTES - 1) / DT__RAIL_BYTES;
}

/* Returns the index of the first element of piece p of chunk i. */
static size_t dt__rail_offset(const dt_work *work, int i, int p) {
    size_t first = dt__chunk_offset(work->call.count, work->comm->ranks_per_node, i);
    size_t count = dt__chunk_offset(work->call.count, work->comm->ranks_per_node, i + 1) - first;
    return first + dt__chunk_offset(count, (int)dt__rail_pieces(work), p);
}

/* Adds the send or receive of piece p of chunk i of the buffer buf to the round, if that piece
   exists. */
static void dt__rail_add_p2p(
    dt_work *work, dt__op_code op, int peer, const void *buf, int i, int p) {
    if (p < 0 || p >= (int)dt__rail_pieces(work)) return;
    size_t first = dt__rail_offset(work, i, p);
    dt__p2p *p2p = dt__add_p2p(work, op, peer, dt__rail_offset(work, i, p + 1) - first);
    if (op == DT__SEND)
        p2p->send = dt__element(work, buf, first);
    else
        p2p->recv = dt__element(work, buf, first);
}

/* Returns the address in the scratch buffer of the input of this machine's j-th rank. If j is this
   rank itself, the partial sum from the machine below is kept at that address instead. */
static void *dt__rail_input(const dt_work *work, int j) {
    return dt__element(work, work->scratch,
        (size_t)j * (work->scratch_count / (size_t)work->comm->ranks_per_node));
}

static void dt__rail_sum(dt_work *work, int p) {
    dt_comm *comm = work->comm;
    int k = comm->ranks_per_node, local_rank = comm->base.rank % k, n = 0;
    size_t first = dt__rail_offset(work, local_rank, p),
           count = dt__rail_offset(work, local_rank, p + 1) - first;
    if (comm->base.rank >= k) comm->inputs[n++] = dt__rail_input(work, local_rank);
    for (int j = 0; j < k; j++)
        comm->inputs[n++] =
            j == local_rank ? dt__element(work, work->call.send, first) : dt__rail_input(work, j);
    dt__sum_inputs(work, dt__element(work, work->call.recv, first), n, count);
}

static int dt__rails_all_reduce(dt_work *work) {
    int k = work->comm->ranks_per_node, me = work->comm->base.rank, local_rank = me % k,
        first = me - local_rank, t = work->round;
    int above = work->comm->base.size / k - 1 - me / k, down = t - 2 * above - 1,
        pieces = (int)dt__rail_pieces(work);
    if (t == 0 && !dt__scratch(work, (size_t)k * dt__rail_offset(work, 0, 1))) return 0;
    if (t > 0 && t <= pieces) dt__rail_sum(work, t - 1);
    if (down == pieces) return 0;
    size_t mine =
        t < pieces ? dt__rail_offset(work, local_rank, t + 1) - dt__rail_offset(work, local_rank, t)
                   : 0;
    for (int step = 1; step < k; step++) {
        int to = (local_rank + step) % k, from = (local_rank + k - step) % k;
        dt__rail_add_p2p(work, DT__SEND, first + to, work->call.send, to, t);
        if (mine > 0) dt__recv_from(work, first + from, dt__rail_input(work, from), mine);
        dt__rail_add_p2p(work, DT__SEND, first + to, work->call.recv, local_rank, down);
        dt__rail_add_p2p(work, DT__RECV, first + from, work->call.recv, from, down);
    }
    if (first > 0) {
        if (mine > 0) dt__recv_from(work, me - k, dt__rail_input(work, local_rank), mine);
        dt__rail_add_p2p(work, DT__SEND, me - k, work->call.recv, local_rank, down);
    }
    if (above > 0) {
        dt__rail_add_p2p(work, DT__SEND, me + k, work->call.recv, local_rank, t - 1);
        dt__rail_add_p2p(work, DT__RECV, me + k, work->call.recv, local_rank, down + 1);
    }
    return 1;
}

/* ---- binomial trees ---- */

/* v is a rank's number counted from the root, which has v = 0. The subtree of v consists of v, v+1,
   ..., v+b-1, as far as these ranks exist, where b is the lowest set bit of v. The subtree of 0 is
   all ranks. In a gather the data climb the tree, from the nearest children first. In a broadcast
   the data descend the tree. Each takes L rounds. The rounds of a gather with N = 8:

       v:   0 <- 1    2 <- 3    4 <- 5    6 <- 7      round 0
            0 <------ 2         4 <------ 6           round 1
            0 <---------------- 4                     round 2 */

static int dt__virtual_rank(const dt_work *work) {
    int n = work->comm->base.size;
    return (work->comm->base.rank - work->call.peer + n) % n;
}

static int dt__real_rank(const dt_work *work, int v) {
    return (v + work->call.peer) % work->comm->base.size;
}

/* Returns the number of ranks in the subtree of v, v included. */
static int dt__subtree_size(int v, int n) {
    int all = 1;
    while (all < n && !(v & all)) all *= 2;
    return all < n - v ? all : n - v;
}

/* Collects the send buffers of v's subtree in the scratch buffer: v receives from its children,
   nearest first, and then sends all it has to its parent. */
static int dt__tree_gather_phase(dt_work *work) {
    int n = work->comm->base.size, v = dt__virtual_rank(work), mask = 1 << work->round;
    size_t count = work->call.count;
    if (work->round == 0 && dt__scratch(work, (size_t)dt__subtree_size(v, n) * count))
        dt__copy_local(work, work->scratch, work->call.send, count);
    if (mask >= n || (v & (mask - 1))) return 0;
    if (v & mask)
        dt__send_to(work, dt__real_rank(work, v - mask), work->scratch,
            (size_t)dt__subtree_size(v, n) * count);
    else if (v + mask < n)
        dt__recv_from(work, dt__real_rank(work, v + mask),
            dt__element(work, work->scratch, (size_t)mask * count),
            (size_t)dt__subtree_size(v + mask, n) * count);
    return 1;
}

static int dt__tree_gather(dt_work *work) {
    if (dt__tree_gather_phase(work)) return 1;
    for (int v = 0; v < work->comm->base.size && dt__virtual_rank(work) == 0 && work->call.count;
         v++)
        dt__copy_local(work, dt__recv_block(work, dt__real_rank(work, v)),
            dt__element(work, work->scratch, (size_t)v * work->call.count), work->call.count);
    return 0;
}

static int dt__tree_reduce(dt_work *work) {
    int n = work->comm->base.size;
    if (dt__tree_gather_phase(work)) return 1;
    if (dt__virtual_rank(work) > 0) return 0;
    for (int v = 0; v < n; v++)
        work->comm->inputs[dt__real_rank(work, v)] =
            dt__element(work, work->scratch, (size_t)v * work->call.count);
    dt__sum_inputs(work, work->call.recv, n, work->call.count);
    return 0;
}

/* Returns the distance of this round when data descend the tree; 0 if there are no more rounds. The
   distance halves in each round, and every rank that has the data sends them to the rank at that
   distance. */
static int dt__tree_mask(const dt_work *work) {
    int mask = 1;
    while (mask < work->comm->base.size) mask *= 2;
    return mask >> (work->round + 1);
}

static int dt__tree_broadcast(dt_work *work) {
    int n = work->comm->base.size, v = dt__virtual_rank(work), mask = dt__tree_mask(work);
    if (mask == 0) return 0;
    if (v % (2 * mask) == mask)
        dt__recv_from(work, dt__real_rank(work, v - mask), work->call.recv, work->call.count);
    if (v % (2 * mask) == 0 && v + mask < n)
        dt__send_to(work, dt__real_rank(work, v + mask), work->call.recv, work->call.count);
    return 1;
}

/* Tree all-reduce: a reduce to the root up a binomial tree (drawn at dt__tree_gather_phase), then a
   broadcast down. The inputs climb the tree unreduced, and the root sums them in rank order. The
   busiest rank sends L messages, (L-1+N/2) S bytes: up one message with N/2 inputs, down L-1
   messages. N, S and L are defined at the head of section 16. */
static int dt__tree_all_reduce(dt_work *work) {
    return dt__two_phases(work, dt__tree_reduce, dt__tree_broadcast);
}

static int dt__tree_scatter(dt_work *work) {
    int n = work->comm->base.size, v = dt__virtual_rank(work), mask = dt__tree_mask(work),
        subtree = dt__subtree_size(v, n);
    size_t count = work->call.count;
    if (work->round == 0 && !dt__scratch(work, (size_t)subtree * count)) return 0;
    for (int i = 0; i < n && work->round == 0 && v == 0 && count; i++)
        dt__copy_local(work, dt__element(work, work->scratch, (size_t)i * count),
            dt__send_block(work, dt__real_rank(work, i)), count);
    if (mask == 0) {
        if (count) dt__copy_local(work, work->call.recv, work->scratch, count);
        return 0;
    }
    if (v % (2 * mask) == mask)
        dt__recv_from(work, dt__real_rank(work, v - mask), work->scratch, (size_t)subtree * count);
    if (v % (2 * mask) == 0 && v + mask < n)
        dt__send_to(work, dt__real_rank(work, v + mask),
            dt__element(work, work->scratch, (size_t)mask * count),
            (size_t)dt__subtree_size(v + mask, n) * count);
    return 1;
}

/* ---- choosing an algorithm ---- */

/* The algorithms that exist for one operation. */
typedef struct dt__algorithm_row {
    dt__round_fn direct, ring, doubling, tree; /* NULL: the algorithm does not exist */
} dt__algorithm_row;

/* Returns the function that runs `algorithm` for this call, or NULL if there is none. */
static dt__round_fn dt__algorithm_of(const dt__call *call, dt_algorithm algorithm) {
    static const dt__algorithm_row rows[] = {
        /* In the order of dt__op_code. DT__CHECK, which compares the ranks' calls, has no row:
           dt__check_make chooses its algorithm. */
        { .direct = dt__direct_all_reduce,
            .ring = dt__ring_all_reduce,
            .doubling = dt__doubling_all_reduce,
            .tree = dt__tree_all_reduce },
        { .direct = dt__direct_reduce, .tree = dt__tree_reduce },
        { .direct = dt__direct_reduce_scatter, .ring = dt__ring_reduce_scatter },
        { .direct = dt__direct_all_gather,
            .ring = dt__ring_all_gather,
            .doubling = dt__doubling_all_gather },
        { .direct = dt__direct_gather, .tree = dt__tree_gather },
        { .direct = dt__direct_scatter, .tree = dt__tree_scatter },
        { .direct = dt__direct_all_to_all }, { .direct = dt__direct_all_to_all_v },
        { .direct = dt__direct_broadcast, .ring = dt__ring_broadcast, .tree = dt__tree_broadcast },
        { .doubling = dt__doubling_barrier },
        { .doubling = dt__doubling_all_reduce }, /* dt_sum_doubles */
        { .doubling = dt__doubling_all_gather }, /* dt_agree */
        { .doubling = dt__doubling_all_gather }, /* dt_comm_split */
        { .doubling = dt__doubling_all_gather }, /* dt_comm_step */
    };
    if (dt__is_p2p(call->op)) return NULL;
    const dt__algorithm_row *row = &rows[call->op];
    switch (algorithm) {
    case DT_DIRECT: return row->direct;
    case DT_RING:
        return call->redop == DT_AVG ? NULL
                                     : row->ring; /* an average of averages is not the average */
    case DT_DOUBLING: return row->doubling;
    case DT_TREE: return row->tree;
    default: return NULL;
    }
}

/* Returns 1 if the call is a large all-reduce of a group with rails. Rails send partial sums in the
   type of the buffer. So bf16 and f16, which are rounded only at the end, and averages, which are
   divided only at the end, do not use rails. */
static int dt__use_rails(const dt_comm *comm, const dt__call *call) {
    return comm->ranks_per_node > 0 && call->op == DT__ALL_REDUCE && call->redop != DT_AVG &&
           !dt__narrow(call->dtype) &&
           dt__call_bytes(call) >= (size_t)comm->ranks_per_node * DT__RAIL_BYTES;
}

/* Chooses an algorithm when there is no shared memory: one with few messages for small buffers, one
   with few bytes for large buffers. Never chooses a ring for a reduction, because the ring sums in
   another order. */
static dt__round_fn dt__algorithm_by_size(const dt_comm *comm, const dt__call *call) {
    size_t all = dt__call_bytes(call) * (size_t)comm->base.size;
    if (dt__use_rails(comm, call)) return dt__rails_all_reduce;
    dt_algorithm choice = all <= 32768 ? DT_DOUBLING : DT_DIRECT;
    if (call->op == DT__ALL_GATHER && all > 32768) choice = DT_RING;
    if (dt__is_rooted(call->op))
        choice = all <= 32768 ? DT_TREE : call->op == DT__BROADCAST ? DT_RING : DT_DIRECT;
    if (dt__algorithm_of(call, choice)) return dt__algorithm_of(call, choice);
    return dt__algorithm_of(call, dt__algorithm_of(call, DT_DIRECT) ? DT_DIRECT : DT_DOUBLING);
}

/* Allocates space for `count` transfers, the number in the largest round. Returns 0 if the context
   has failed. */
static int dt__p2p_reserve(dt_work *work, int count) {
    dt_ctx *ctx = work->comm->world->ctx;
    if (work->p2p_capacity >= count) return 1;
    dt_free(ctx, DT_MEM_HOST, work->p2p_ops, (size_t)work->p2p_capacity * sizeof(dt__p2p));
    work->p2p_ops =
        (dt__p2p *)dt_alloc(ctx, DT_MEM_HOST, (size_t)count * sizeof(dt__p2p), "messages");
    work->p2p_capacity = work->p2p_ops ? count : 0;
    return work->p2p_ops != NULL;
}

/* An algorithm returns this value to be called again later. (It returns 1 if it has begun another
   round, and 0 if there are no more rounds.) */
enum { DT__POLL_AGAIN = -1 };

/* Advances the transfers of the round. When all are complete, lets the algorithm begin the next
   round. Returns 1 if there are no more rounds, 0 if a transfer is incomplete, -1 if the context
   has failed. */
static int dt__algorithm_advance(dt_work *work) {
    for (;;) {
        int waiting = 0;
        for (int i = 0; i < work->p2p_count; i++) {
            dt__p2p *p2p = &work->p2p_ops[i];
            int done = p2p->finished ? 1 : work->comm->ops->message(work, p2p);
            if (done < 0) return -1;
            if (done != p2p->finished) dt__count_progress(work->comm->world);
            p2p->finished = done;
            waiting += !done;
        }
        if (waiting > 0) return 0;
        work->p2p_count = 0;
        int more = work->algorithm ? work->algorithm(work) : 0;
        if (dt_error(work->comm->world->ctx)) return -1;
        if (more == DT__POLL_AGAIN) return 0;
        if (!more) return 1;
        work->round++;
    }
}

// ==== 17. Begin, wait, dispatch =================================================================

/* The life of an operation:

       dt__op_begin        validates the call, chooses how it runs, records it
       dt__advance         (section 12) moves its data as far as possible without waiting; waits
                           and dt_test call it repeatedly, and so does dt between kernels
       dt__op_end          counts its bytes and recycles its work object

   A blocking call does all three in dt__op_run. A nonblocking operation begins in dt__op_start and
   ends in dt_wait. The public functions at the end of the section only fill in a dt__call. */

static const dt__comm_ops dt__threads_ops = {
    .name = "threads", .message = dt__shared_message, .collective = dt__shared_collective
};
static const dt__comm_ops dt__transport_ops = { .name = "transport",
    .message = dt__transport_message };
static const dt__comm_ops dt__node_ops = {
    .name = "node", .message = dt__transport_message, .collective = dt__shared_collective
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

/* Returns the reason for which dt_run or dt_team_make refuses the backend: either this build does
   not contain the backend, or the ranks of the backend are not threads or forks of one process. */
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

/* Returns 1 if this rank's kernels cannot access p, for example because p is a local variable and
   tensors lie on a device. The CPU then transfers the data, as it does for scalars. */
static int dt__beyond_kernels(const dt_comm *comm, const void *p) {
    const dt_kernels *kernels = dt_ctx_kernels(comm->world->ctx);
    return p && kernels->can_access && !kernels->can_access(p);
}

/* Returns the number of elements in the recv buffer. */
static size_t dt__recv_count(const dt_comm *comm, const dt__call *call) {
    int shares = call->op == DT__ALL_GATHER || call->op == DT__GATHER || call->op == DT__ALL_TO_ALL;
    if (call->op == DT__ALL_TO_ALL_V) return dt__sum_counts(call->recv_counts, comm->base.size);
    return shares ? call->count * (size_t)comm->base.size : call->count;
}

static int dt__overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
    uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return x < y ? y - x < a_bytes : x - y < b_bytes;
}

/* Returns an error text if send and recv of this rank overlap and the operation could overwrite
   data before it reads them; else NULL. The only legal overlap is an operation in place: this
   rank's block lies at its own offset in the larger buffer. */
static const char *dt__overlap_error(const dt_comm *comm, const dt__call *call) {
    size_t size = dt_dtype_size(call->dtype), mine = (size_t)comm->base.rank * call->count * size;
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

/* Returns a text that names a wrong argument of this rank's call, or NULL if there is none. Does
   not compare the call with the calls of other ranks. */
static const char *dt__argument_error(const dt_comm *comm, const dt__call *call) {
    size_t max_count = (size_t)-1 / 2 / dt_dtype_size(call->dtype) / (size_t)comm->base.size;
    int is_p2p = dt__is_p2p(call->op);
    if ((unsigned)call->redop > (unsigned)DT_PROD) return "unknown reduction";
    if (call->count > max_count) return "count too large";
    if (call->peer < 0 && !call->any_source) return is_p2p ? "no such rank" : "no such root";
    if (call->peer >= comm->base.size) return is_p2p ? "no such rank" : "no such root";
    if (is_p2p && call->tag < 0 && !call->host_memory) return "the tag is negative";
    if (!call->host_memory && call->send && call->recv &&
        dt__beyond_kernels(comm, call->send) != dt__beyond_kernels(comm, call->recv))
        return "one of its buffers is in the device's memory and the other in the host's";
    if (call->op == DT__ALL_TO_ALL_V) {
        if (!call->send_counts || !call->recv_counts) return "counts are NULL";
        for (int i = 0; i < comm->base.size; i++)
            if (call->send_counts[i] > max_count || call->recv_counts[i] > max_count)
                return "count too large";
        if (!call->send && dt__sum_counts(call->send_counts, comm->base.size))
            return "send is NULL";
        if (!call->recv && dt__sum_counts(call->recv_counts, comm->base.size))
            return "recv is NULL";
        return dt__overlap_error(comm, call);
    }
    if (call->count && dt__sends(comm, call) && !call->send) return "send is NULL";
    if (call->count && dt__receives(comm, call) && !call->recv) return "recv is NULL";
    return dt__overlap_error(comm, call);
}

/* Runs a call whose comm is NULL, which means a group of one rank. There is no context in which to
   record an error, so errors are only returned. There is no kernel table either, so memcpy copies
   the data. */
static dt_status dt__call_without_comm(const dt__call *call) {
    const void *send = call->send;
    size_t bytes = dt__call_bytes(call);
    if (dt__is_p2p(call->op) || call->peer != 0) return DT_ERR_ARG;
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

/* Completes a collective of a group of one. A broadcast and a barrier do nothing; every other
   collective copies send to recv. */
static void dt__single_rank_collective(dt_work *work) {
    const dt__call *call = &work->call;
    if (call->op != DT__BROADCAST && call->op != DT__BARRIER)
        dt__copy_local(work, call->recv, call->send,
            call->op == DT__ALL_TO_ALL_V ? call->send_counts[0] : call->count);
    work->completion = DT__COMPLETED;
}

static dt_work *dt__work_acquire(dt_comm *comm, const dt__call *call) {
    dt__world *world = comm->world;
    dt_work *work = world->free_works;
    dt__p2p *p2p_ops = work ? work->p2p_ops : NULL;
    void *device_event = work ? work->device_event : NULL;
    int capacity = work ? work->p2p_capacity : 0;
    if (work)
        world->free_works = work->next;
    else
        work = (dt_work *)dt_alloc(world->ctx, DT_MEM_HOST, sizeof *work, "dt_work");
    if (!work) return NULL;
    memset(work, 0, sizeof *work);
    work->p2p_ops = p2p_ops;
    work->p2p_capacity = capacity;
    work->device_event = device_event;
    work->comm = comm;
    work->call = *call;
    work->axis = comm->axis;
    return work;
}

/* Puts a work on the free list, and releases its requests, buffers and scratch buffer. */
static void dt__work_release(dt__world *world, dt_work *work) {
    for (int i = 0; i < work->p2p_count; i++) {
        dt__p2p *p2p = &work->p2p_ops[i];
        if (p2p->request && !p2p->finished)
            world->transport.cancel(world->transport.user, p2p->request);
        dt__send_copy_release(world, p2p->copy, p2p->count * dt_dtype_size(work->call.dtype));
        dt__p2p_release_device(work, p2p);
        dt_free(world->ctx, DT_MEM_HOST, p2p->nccl_announcement, DT__ANNOUNCEMENT_BYTES);
    }
    dt__scratch_free(work);
    if (work->check_work) dt__check_free(work);
    work->p2p_count = 0;
    work->comm = NULL;
    work->next = world->free_works;
    world->free_works = work;
}

/* Reserves time on the simulated link, and stores in work->link_until when that time ends. */
static void dt__link_begin(dt__world *world, dt_work *work) {
    double bytes = (double)dt__sent_bytes(work->comm, &work->call),
           now = world->host->now(world->host->user);
    if (work->call.host_memory) return; /* scalars use no link time */
    world->link_free_at =
        (world->link_free_at > now ? world->link_free_at : now) + world->link.latency_s;
    if (world->link.bytes_per_s > 0) world->link_free_at += bytes / world->link.bytes_per_s;
    work->link_until = world->link_free_at;
}

/* ---- comparing calls over a transport ---- */

/* In shared memory the ranks compare the posts of a collective (section 14). Over a transport the
   receiver compares the signature that each message carries with its own call (dt__signature_of).
   In the first steps, in which most programming errors show, the ranks also compare each collective
   before it runs: they exchange descriptions of their calls (notices) in a separate all-gather, the
   operation DT__CHECK. */
enum {
    DT__CHECK_STEPS = 100,
    DT__CHECK_CALLS = 10000, /* the limit for programs without steps: calls on a group */
    DT__CHECK_RANKS = 16     /* larger groups do not compare the counts of an all-to-all-v */
};
typedef struct dt__call_notice { /* in groups of up to DT__CHECK_RANKS ranks, counts follow */
    uint64_t packed_call, count;
    int32_t line;
    char file[28];
} dt__call_notice;

static int dt__is_compared(const dt_comm *comm) {
    const dt__world *world = comm->world;
    if (!world->transport.send || world->check) return world->transport.send && world->check > 0;
    return world->state->step < DT__CHECK_STEPS && comm->message_seq < DT__CHECK_CALLS;
}

/* Returns the bytes of one notice and the counts that follow it: the N counts that the rank sends
   in an all-to-all-v, then the N counts that it expects. */
static size_t dt__call_notice_bytes(const dt_comm *comm) {
    size_t n = (size_t)comm->base.size;
    return sizeof(dt__call_notice) + (n <= DT__CHECK_RANKS ? 2 * n * sizeof(uint64_t) : 0);
}

static const dt__call_notice *dt__call_notice_of(const dt_work *check, int rank) {
    const char *all = (const char *)check->call.recv;
    return (const dt__call_notice *)(const void *)(all + (size_t)rank *
                                                             dt__call_notice_bytes(check->comm));
}

static size_t dt__check_bytes(const dt_comm *comm) {
    return (size_t)(comm->base.size + 1) * dt__call_notice_bytes(comm);
}

/* Makes work->check_work, the operation that compares the calls of all ranks before `work` runs. If
   memory runs out, the context fails and check_work stays NULL. In small groups every rank sends
   its notice directly to every other rank, so that a rank waits for exactly the ranks that have not
   arrived. */
static void dt__check_make(dt_work *work) {
    dt_comm *comm = work->comm;
    dt__world *world = comm->world;
    size_t each = dt__call_notice_bytes(comm), n = (size_t)comm->base.size;
    dt__call_notice *own =
        (dt__call_notice *)dt_alloc(world->ctx, DT_MEM_HOST, dt__check_bytes(comm), "a comparison");
    if (!own) return;
    memset(own, 0, each);
    own->packed_call = dt__pack_call(&work->call);
    own->count = work->call.count;
    own->line = world->line;
    if (world->file) strncpy(own->file, dt__file_name(world->file), sizeof own->file - 1);
    for (size_t i = 0; i < n && n <= DT__CHECK_RANKS && work->call.op == DT__ALL_TO_ALL_V; i++) {
        ((uint64_t *)(void *)(own + 1))[i] = work->call.send_counts[i];
        ((uint64_t *)(void *)(own + 1))[n + i] = work->call.recv_counts[i];
    }
    dt__call call =
        dt__call_make(DT__CHECK, own, (char *)own + each, each / sizeof(int32_t), DT_I32);
    call.host_memory = 1;
    call.seq = work->call.seq;
    work->check_work = dt__work_acquire(comm, &call);
    if (!work->check_work) {
        dt_free(world->ctx, DT_MEM_HOST, own, dt__check_bytes(comm));
        return;
    }
    work->check_work->algorithm =
        n <= DT__CHECK_RANKS ? dt__direct_all_gather : dt__doubling_all_gather;
    work->check_work->checked_work = work;
    dt__p2p_reserve(work->check_work, 2 * comm->base.size);
}

static void dt__check_free(dt_work *work) {
    dt_work *check = work->check_work;
    void *notices = (void *)check->call.send;
    dt_comm *comm = check->comm;
    work->check_work = NULL;
    dt__work_release(comm->world, check);
    dt_free(comm->world->ctx, DT_MEM_HOST, notices, dt__check_bytes(comm));
}

/* Checks that in an all-to-all-v each rank sends the counts that the receivers expect. All ranks
   search in the same order, so they report the same two ranks. Returns 1, or -1 if the context has
   failed. */
static int dt__check_counts(dt_work *work) {
    const dt_comm *comm = work->comm;
    int n = comm->base.size;
    if (work->call.op != DT__ALL_TO_ALL_V || n > DT__CHECK_RANKS) return 1;
    for (int pair = 0; pair < n * n; pair++) {
        int from = pair / n, to = pair % n;
        const dt__call_notice *its = dt__call_notice_of(work->check_work, to);
        uint64_t sent =
            ((const uint64_t *)(const void *)(dt__call_notice_of(work->check_work, from) + 1))[to];
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

/* Advances work->check_work. Returns 1 if all ranks make the same call, 0 if a notice is still
   missing, -1 if the context has failed. */
static int dt__check_advance(dt_work *work) {
    int done = dt__algorithm_advance(work->check_work);
    if (done <= 0) return done;
    const dt__call_notice *first = dt__call_notice_of(work->check_work, 0);
    for (int rank = 1; rank < work->comm->base.size; rank++) {
        const dt__call_notice *other = dt__call_notice_of(work->check_work, rank);
        if (other->packed_call == first->packed_call && other->count == first->count) continue;
        dt__call_view its = { other->packed_call, other->count,
            dt__site_text(other->file, other->line) };
        dt__call_view one = { first->packed_call, first->count,
            dt__site_text(first->file, first->line) };
        return dt__calls_differ(work, rank, &its, 0, &one), -1;
    }
    if (dt__check_counts(work) < 0) return -1;
    dt__check_free(work);
    dt__count_progress(work->comm->world);
    return 1;
}

/* Chooses how the operation runs: as messages of an algorithm, as one message, or by the backend's
   own code. Also assigns the sequence number of a collective. Returns 0 if the context has
   failed. */
static int dt__work_route(dt_work *work) {
    dt_comm *comm = work->comm;
    const dt__call *call = &work->call;
    int is_p2p = dt__is_p2p(call->op);
    if (comm->algorithm != DT_ALGORITHM_AUTO)
        work->algorithm = dt__algorithm_of(call, comm->algorithm);
    else if (comm->ops->algorithm)
        work->algorithm = comm->ops->algorithm(comm, call);
    if (work->algorithm && comm->algorithm == DT_ALGORITHM_AUTO) comm->ops->begin(work);
    if (!work->algorithm && !comm->ops->collective && !is_p2p)
        work->algorithm = dt__algorithm_by_size(comm, call);
    if (work->algorithm) {
        work->call.seq = ++comm->message_seq;
        /* FNV-1a hash, one word at a time */
        comm->call_hash = (comm->call_hash ^ dt__pack_call(call)) * 1099511628211u;
        comm->call_hash = (comm->call_hash ^ call->count) * 1099511628211u;
    } else if (!is_p2p) {
        work->call.seq = ++comm->seq;
    }
    return (!work->algorithm && !is_p2p) || dt__p2p_reserve(work, is_p2p ? 1 : 2 * comm->base.size);
}

/* ---- operations that a device completes ---- */

/* A backend may enqueue an operation on a device and record an event after it
   (dt_kernels.event_record). For the host the operation is then complete: dt_wait makes the rank's
   stream wait for the event and returns. A second dt_work object, called a device operation, stands
   for the part that the device still has to do; it is complete when the device has reached the
   event. A wait for a device has no timeout. So before the host waits for the device, it waits for
   all device operations through the progress engine (section 12), which has a timeout. */

static int dt__device_op_poll(dt_work *work) {
    int passed = dt_ctx_kernels(work->comm->world->ctx)->event_query(work->device_event);
    if (passed < 0)
        dt__data_failed(work->comm, &work->call, DT_ERR_DEVICE);
    else if (passed == 0 && work->comm->ops->check_device)
        work->comm->ops->check_device(work);
    return passed == 0 ? DT__POLL_AGAIN : 0;
}

static void dt__device_op_track(dt__world *world, dt_work *work) {
    dt_status status =
        dt_ctx_kernels(world->ctx)->event_wait(dt_ctx_stream(world->ctx), work->device_event);
    dt_work *device_op = status ? NULL : dt__work_acquire(work->comm, &work->call);
    if (status) dt__data_failed(work->comm, &work->call, status);
    if (!device_op) return;
    void *event = device_op->device_event;
    device_op->device_event = work->device_event;
    work->device_event = event;
    device_op->record_number = work->record_number;
    device_op->nccl_channel = work->nccl_channel;
    device_op->is_device_op = 1;
    device_op->algorithm = dt__device_op_poll;
    if (world->first_device_op)
        world->last_device_op->next = device_op;
    else
        world->first_device_op = device_op;
    world->last_device_op = device_op;
}

static void dt__device_op_release(dt__world *world) {
    dt_work *device_op = world->first_device_op;
    world->first_device_op = device_op->next;
    dt__work_release(world, device_op);
}

/* Releases the oldest device operations, as far as they are complete. */
static void dt__device_ops_reap(dt__world *world) {
    while (world->first_device_op &&
           dt_ctx_kernels(world->ctx)->event_query(world->first_device_op->device_event) > 0)
        dt__device_op_release(world);
}

/* The drain function of this rank's dt_listener, called when the host is about to wait for the
   device without a timeout. Waits until all device operations are complete, or until the context
   has failed and the backend has ended them. Nonblocking operations that have no dt_wait yet may
   stay pending, because other ranks may not have called them yet; if `all` is set, this function
   waits for them too. Returns 0 if a pending NCCL operation may still make the device wait, else
   1. */
static int dt__on_settle(dt_ctx *ctx, int all, void *user) {
    dt__world *world = (dt__world *)user;
    for (dt_work *w = all ? world->first_started : NULL; w && dt_error(ctx) == DT_OK; w = w->next) {
        double begin = -1;
        if (dt__wait_work(world, w, &begin) == DT_OK && w->on_device) dt__device_op_track(world, w);
        w->on_device = 0;
    }
    while (world->first_device_op) {
        double begin = -1;
        if (dt_error(ctx) == DT_OK) dt__wait_work(world, world->first_device_op, &begin);
        dt__device_op_release(world);
    }
    for (const dt_work *w = world->nccl && dt_error(ctx) == DT_OK ? world->first_started : NULL; w;
         w = w->next)
        if (w->completion != DT__COMPLETED ||
            (w->on_device && dt_ctx_kernels(ctx)->event_query(w->device_event) == 0))
            return 0;
    return 1;
}

/* Begins any operation, blocking or nonblocking. Returns its work, or NULL if the context has
   failed. */
static dt_work *dt__op_begin(dt_comm *comm, dt__call call) {
    dt__world *world = comm->world;
    if (dt_error(world->ctx)) return NULL;
    dt__poll_node(world);
    if (dt__aborted(world->shared)) return dt__peer_failed(world), (dt_work *)NULL;
    if (world->first_device_op) dt__device_ops_reap(world);
    const char *wrong = dt_dtype_size(call.dtype) ? dt__argument_error(comm, &call) : NULL;
    if (dt_dtype_size(call.dtype) == 0)
        dt__comm_fail(world, DT_ERR_UNSUPPORTED, "%s on %s%s: %d is no element type",
            dt__call_text(&call).s, comm->group->name, dt__site_text(world->file, world->line).s,
            (int)call.dtype);
    else if (wrong)
        dt__comm_fail(world, DT_ERR_ARG, "%s on %s%s: %s", dt__call_text(&call).s,
            comm->group->name, dt__site_text(world->file, world->line).s, wrong);
    dt_work *work = dt_error(world->ctx) ? NULL : dt__work_acquire(comm, &call);
    if (!work) return NULL;
    if (dt__beyond_kernels(comm, call.send) || dt__beyond_kernels(comm, call.recv))
        work->call.host_memory = 1;
    /* Empty buffers are not accessed, but they get a valid address, because NULL + 0 is undefined
       in C. */
    if (call.op != DT__ALL_TO_ALL_V && call.count == 0)
        work->call.send = work->call.recv = comm->words;
    int is_p2p = dt__is_p2p(call.op), is_single = !is_p2p && comm->base.size == 1;
    if (world->fault_count) dt__fault_before(work);
    if (work->fault == DT__DROP) return work;
    if (dt_error(world->ctx) || (!is_single && !dt__work_route(work))) {
        dt__work_release(world, work);
        return NULL;
    }
    if (!DT__UNCHECKED) dt__record_make(work);
    if (is_single) {
        dt__single_rank_collective(work);
        return work;
    }
    if (work->algorithm && dt__is_compared(comm)) dt__check_make(work);
    if (dt_error(world->ctx)) {
        dt__work_release(world, work);
        return NULL;
    }
    if (world->link.latency_s > 0 || world->link.bytes_per_s > 0) dt__link_begin(world, work);
    if (is_p2p) {
        dt__p2p *p2p = dt__add_p2p(work, call.op, call.peer, call.count);
        p2p->tag = call.tag;
        p2p->send = work->call.send;
        p2p->recv = work->call.recv;
        if (world->trace && world->transport.send) p2p->order = dt__trace_number(world, work);
    }
    return work;
}

/* Ends an operation: counts its bytes if it succeeded, and recycles its work. Returns the context's
   status. */
static dt_status dt__op_end(dt__world *world, dt_work *work) {
    dt_status status = dt_error(world->ctx);
    if (work->fault && status == DT_OK) dt__fault_after(work);
    if (status == DT_OK)
        world->bytes[1 + (int)work->axis] += dt__sent_bytes(work->comm, &work->call);
    else
        dt__await_quiescence(world);
    if (status == DT_OK && work->on_device) dt__device_op_track(world, work);
    dt__work_release(world, work);
    return dt_error(world->ctx);
}

/* Runs a blocking operation. Returns its status. */
static dt_status dt__op_run(dt_comm *comm, dt__call call) {
    if (!comm) return dt__call_without_comm(&call);
    dt__world *world = comm->world;
    /* small calls are not timed, because reading the clock takes half as long as their wait */
    int timed = world->trace || dt__call_bytes(&call) > DT_EAGER_BYTES;
    double begin = timed ? world->host->now(world->host->user) : -1;
    dt_work *work = dt__op_begin(comm, call);
    if (!work) return dt_error(world->ctx);
    world->blocking = work; /* dt__works_recycle releases it if pthread_cancel ends the thread */
    dt__wait_work(world, work, &begin);
    world->blocking = NULL;
    double end = begin >= 0 ? world->host->now(world->host->user) : begin;
    world->seconds += end - begin;
    if (begin >= 0)
        __atomic_store_n(&world->state->last_op_end_us, (int64_t)(end * 1e6), __ATOMIC_RELAXED);
    if (world->trace) dt__trace_op(work, begin, end);
    world->file = NULL; /* the next call has no call site unless its macro sets one */
    return dt__op_end(world, work);
}

/* Starts a nonblocking operation. Returns its work; NULL if comm is NULL or the context has
   failed. */
static dt_work *dt__op_start(dt_comm *comm, dt__call call) {
    if (!comm) {
        dt__call_without_comm(&call);
        return NULL;
    }
    dt__world *world = comm->world;
    double begin = world->host->now(world->host->user);
    dt_work *work = dt__op_begin(comm, call);
    if (!work) return NULL;
    work->is_started = work->is_unfinished = 1;
    work->prev = world->last_started;
    if (world->first_started)
        world->last_started->next = work;
    else
        world->first_started = work;
    world->last_started = work;
    world->started_count++;
    work->prev_unfinished = world->last_unfinished;
    if (world->first_unfinished)
        world->last_unfinished->next_unfinished = work;
    else
        world->first_unfinished = work;
    world->last_unfinished = work;
    world->unfinished_count++;
    work->start_time = begin;
    /* advance it at once, so that messages leave in the order of the starts */
    if (!dt__advance_some(world)) dt__advance(work);
    world->seconds += world->host->now(world->host->user) - begin;
    world->file = NULL;
    return work;
}

static void dt__started_remove(dt__world *world, dt_work *work) {
    dt__unfinished_remove(world, work);
    world->started_count--;
    if (work->prev)
        work->prev->next = work->next;
    else
        world->first_started = work->next;
    if (work->next)
        work->next->prev = work->prev;
    else
        world->last_started = work->prev;
}

dt_status dt_wait(dt_ctx *ctx, dt_work *work) {
    dt__world *world = dt__world_of(ctx);
    if (!world || !work) return dt_error(ctx);
    if (!work->comm) return dt_fail(ctx, DT_ERR_ARG, "dt_wait: this operation has been waited for");
    double begin = world->host->now(world->host->user);
    if (dt_error(ctx) == DT_OK) dt__wait_work(world, work, &begin);
    double end = world->host->now(world->host->user);
    world->seconds += end - begin;
    __atomic_store_n(&world->state->last_op_end_us, (int64_t)(end * 1e6), __ATOMIC_RELAXED);
    if (world->trace) dt__trace_wait(work, begin, end);
    dt__started_remove(world, work);
    return dt__op_end(world, work);
}

int dt_test(dt_ctx *ctx, dt_work *work) {
    dt__world *world = dt__world_of(ctx);
    if (!world || !work || !work->comm || dt_error(ctx)) return 1;
    if (dt__aborted(world->shared))
        dt__peer_failed(world);
    else if (!dt__advance_some(world))
        dt__advance(work);
    return work->completion == DT__COMPLETED || dt_error(ctx);
}

/* ---- public functions: each makes a call and runs or starts it ---- */

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

static dt__call dt__p2p_call(
    dt__op_code op, const void *send, void *recv, size_t count, dt_dtype dtype, int peer, int tag) {
    dt__call call = dt__call_make(op, send, recv, count, dtype);
    call.peer = peer;
    call.tag = tag;
    return call;
}

dt_status(dt_all_reduce)(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op) {
    return dt__op_run(comm, dt__reduce_call(DT__ALL_REDUCE, send, recv, count, dtype, op, 0));
}

dt_work *(dt_all_reduce_start)(dt_comm *comm, const void *send, void *recv, size_t count,
    dt_dtype dtype, dt_op op) {
    return dt__op_start(comm, dt__reduce_call(DT__ALL_REDUCE, send, recv, count, dtype, op, 0));
}

dt_status(dt_reduce)(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op, int root) {
    return dt__op_run(comm, dt__reduce_call(DT__REDUCE, send, recv, count, dtype, op, root));
}

dt_work *(dt_reduce_start)(dt_comm *comm, const void *send, void *recv, size_t count,
    dt_dtype dtype, dt_op op, int root) {
    return dt__op_start(comm, dt__reduce_call(DT__REDUCE, send, recv, count, dtype, op, root));
}

dt_status(dt_reduce_scatter)(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op) {
    return dt__op_run(comm, dt__reduce_call(DT__REDUCE_SCATTER, send, recv, count, dtype, op, 0));
}

dt_work *(dt_reduce_scatter_start)(dt_comm *comm, const void *send, void *recv, size_t count,
    dt_dtype dtype, dt_op op) {
    return dt__op_start(comm, dt__reduce_call(DT__REDUCE_SCATTER, send, recv, count, dtype, op, 0));
}

dt_status(dt_all_gather)(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype) {
    return dt__op_run(comm, dt__call_make(DT__ALL_GATHER, send, recv, count, dtype));
}

dt_work *(dt_all_gather_start)(dt_comm *comm, const void *send, void *recv, size_t count,
    dt_dtype dtype) {
    return dt__op_start(comm, dt__call_make(DT__ALL_GATHER, send, recv, count, dtype));
}

dt_status(dt_gather)(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, int root) {
    return dt__op_run(comm, dt__rooted_call(DT__GATHER, send, recv, count, dtype, root));
}

dt_work *(dt_gather_start)(dt_comm *comm, const void *send, void *recv, size_t count,
    dt_dtype dtype, int root) {
    return dt__op_start(comm, dt__rooted_call(DT__GATHER, send, recv, count, dtype, root));
}

dt_status(dt_scatter)(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype, int root) {
    return dt__op_run(comm, dt__rooted_call(DT__SCATTER, send, recv, count, dtype, root));
}

dt_work *(dt_scatter_start)(dt_comm *comm, const void *send, void *recv, size_t count,
    dt_dtype dtype, int root) {
    return dt__op_start(comm, dt__rooted_call(DT__SCATTER, send, recv, count, dtype, root));
}

dt_status(dt_all_to_all)(
    dt_comm *comm, const void *send, void *recv, size_t count, dt_dtype dtype) {
    return dt__op_run(comm, dt__call_make(DT__ALL_TO_ALL, send, recv, count, dtype));
}

dt_work *(dt_all_to_all_start)(dt_comm *comm, const void *send, void *recv, size_t count,
    dt_dtype dtype) {
    return dt__op_start(comm, dt__call_make(DT__ALL_TO_ALL, send, recv, count, dtype));
}

dt_status(dt_all_to_all_v)(dt_comm *comm, const void *send, const size_t *send_counts, void *recv,
    const size_t *recv_counts, dt_dtype dtype) {
    return dt__op_run(comm, dt__all_to_all_v_call(send, send_counts, recv, recv_counts, dtype));
}

dt_work *(dt_all_to_all_v_start)(dt_comm *comm, const void *send, const size_t *send_counts,
    void *recv, const size_t *recv_counts, dt_dtype dtype) {
    return dt__op_start(comm, dt__all_to_all_v_call(send, send_counts, recv, recv_counts, dtype));
}

dt_status(dt_broadcast)(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int root) {
    return dt__op_run(comm, dt__rooted_call(DT__BROADCAST, buf, buf, count, dtype, root));
}

dt_work *(dt_broadcast_start)(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int root) {
    return dt__op_start(comm, dt__rooted_call(DT__BROADCAST, buf, buf, count, dtype, root));
}

dt_status(dt_barrier)(dt_comm *comm) {
    return dt__op_run(comm, dt__call_make(DT__BARRIER, NULL, NULL, 0, DT_F32));
}

dt_work *(dt_barrier_start)(dt_comm *comm) {
    return dt__op_start(comm, dt__call_make(DT__BARRIER, NULL, NULL, 0, DT_F32));
}

dt_status(dt_send)(dt_comm *comm, const void *buf, size_t count, dt_dtype dtype, int to, int tag) {
    return dt__op_run(comm, dt__p2p_call(DT__SEND, buf, NULL, count, dtype, to, tag));
}

dt_work *(
    dt_send_start)(dt_comm *comm, const void *buf, size_t count, dt_dtype dtype, int to, int tag) {
    return dt__op_start(comm, dt__p2p_call(DT__SEND, buf, NULL, count, dtype, to, tag));
}

dt_status(dt_recv)(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int from, int tag) {
    return dt__op_run(comm, dt__p2p_call(DT__RECV, NULL, buf, count, dtype, from, tag));
}

dt_work *(
    dt_recv_start)(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int from, int tag) {
    return dt__op_start(comm, dt__p2p_call(DT__RECV, NULL, buf, count, dtype, from, tag));
}

static dt__call dt__recv_any_call(void *buf, size_t count, dt_dtype dtype, int tag, int *from) {
    dt__call call = dt__p2p_call(DT__RECV, NULL, buf, count, dtype, DT_ANY, tag);
    call.any_source = 1;
    call.from = from;
    return call;
}

dt_status(dt_recv_any)(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int tag, int *from) {
    return dt__op_run(comm, dt__recv_any_call(buf, count, dtype, tag, from));
}

dt_work *(
    dt_recv_any_start)(dt_comm *comm, void *buf, size_t count, dt_dtype dtype, int tag, int *from) {
    return dt__op_start(comm, dt__recv_any_call(buf, count, dtype, tag, from));
}

dt_status(dt_exchange)(dt_comm *comm, const dt_transfer *transfers, int n) {
    if (!comm) return n != 0 ? DT_ERR_ARG : DT_OK;
    dt__world *world = comm->world;
    dt_work *before = world->last_started;
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
    for (dt_work *work = before ? before->next : world->first_started; work;) {
        dt_work *later = work->next;
        dt_wait(world->ctx, work);
        work = later;
    }
    return dt_error(world->ctx);
}

// ==== 18. Hang diagnosis and deadlock detection ==================================================

/* Deadlock detection and hang diagnosis work on the wait-for graph, which has one edge from each
   waiting rank to the rank it waits for.

       rank 0 --recv--> rank 1 --recv--> rank 2           A cycle is a deadlock. It is proved and
         ^                                  |             reported at once, without a timeout.
         +--------------recv----------------+

       rank 0 --all-reduce--> rank 2 --recv--> rank 3     A path ends at the culprit: rank 3 does
                                               (state T)  not wait; its process is stopped.

   Every rank publishes its state (section 11), in shared memory or, over a transport, by wait
   reports. The states are read by the deadlock proof, by the table of dt_ranks_text and by the
   error text of a timeout. That text follows the path to its last rank and takes the state of that
   rank's process from /proc. Read dt__detect_deadlock first. */

/* Returns the operation that must finish before `work` can. Collectives in shared memory finish in
   the order in which they began on the group, so this is the group's oldest unfinished one. Returns
   `work` itself if it runs as messages or is the oldest. */
static dt_work *dt__group_queue_head(dt_work *work) {
    for (dt_work *w = work->comm->world->first_unfinished; w && work->p2p_count == 0;
         w = w->next_unfinished) {
        if (w->comm == work->comm && w->completion != DT__COMPLETED && !w->algorithm &&
            w->call.seq == work->comm->last_moved + 1)
            work = w;
    }
    return work;
}

static uint32_t dt__counter_of(const dt_comm *comm, int posts);

/* Returns the world rank of the first member that has not reported that it has begun the collective
   for which this rank's device waits; DT_ANY if all members have, or if there are no reports. */
static int dt__first_not_begun(const dt_work *work) {
    const dt__world *world = work->comm->world;
    for (int i = 0; world->peers && i < work->comm->base.size && !dt__is_p2p(work->call.op); i++) {
        int rank = work->comm->group->ranks[i], begun = rank == world->rank;
        const dt__wait_report *last = &world->peers[rank].last_report;
        for (uint32_t g = 0; g < last->group_count; g++)
            begun |= last->channels[g] == dt__counter_of(work->comm, 0) &&
                     (int32_t)(last->begun[g] - (uint32_t)work->call.seq) >= 0;
        if (!begun) return rank;
    }
    return DT_ANY;
}

/* Returns the world rank that this operation waits for; DT_ANY if it does not wait for one
   particular rank. */
static int dt__find_awaited_rank(const dt_work *work) {
    const dt_comm *comm = work->comm;
    if (work->is_device_op) return dt__first_not_begun(work);
    if (work->check_work) work = work->check_work;
    for (int i = 0; i < work->p2p_count; i++) {
        int peer = work->p2p_ops[i].peer;
        if (!work->p2p_ops[i].finished) return peer == DT_ANY ? DT_ANY : comm->group->ranks[peer];
    }
    if (work->algorithm || dt__is_p2p(work->call.op) || !comm->group->members) return DT_ANY;
    for (int rank = 0; rank < comm->base.size; rank++)
        if (!dt__rank_reached(work, rank)) return comm->group->ranks[rank];
    return DT_ANY;
}

/* Reads a small file as text. Returns the number of bytes; 0 or less if the file cannot be read. */
static int64_t dt__read_text(const dt_io *io, const char *path, char *text, size_t bytes) {
    int fd = io->open(io->user, path, DT_IO_READ);
    int64_t got = fd < 0 ? -1 : io->pread(io->user, fd, text, bytes - 1, 0);
    if (fd >= 0) io->close(io->user, fd);
    text[got > 0 ? got : 0] = 0;
    return got;
}

/* Returns the state of a rank's process as /proc shows it: 'R' running, 'S' sleeping, 'T' stopped,
   'D' waiting for a device, 'Z' gone; 0 if it is unknown. */
static char dt__process_state(const dt_io *io, const dt__rank_state *state) {
    char path[64], text[256];
    int pid = __atomic_load_n(&state->pid, __ATOMIC_RELAXED),
        tid = __atomic_load_n(&state->tid, __ATOMIC_RELAXED);
    if (pid == 0 || (pid == (int)getpid() && tid == 0)) return 0;
    if (pid == (int)getpid())
        snprintf(path, sizeof path, "/proc/self/task/%d/stat", tid);
    else
        snprintf(path, sizeof path, "/proc/%d/stat", pid);
    /* no file: the process has ended, unless /proc is not mounted at all */
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

/* Appends ", its last operation: ..." or a text that the rank has begun no operation. */
static void dt__append_last_operation(dt__rank_view seen, char *text, size_t bytes, size_t *at) {
    dt__op_record r;
    int64_t last = __atomic_load_n(&seen.state->op_count, __ATOMIC_ACQUIRE);
    if (last == 0 && seen.ring.n > 1)
        dt__append(text, bytes, at, ", it has begun no operation");
    else if (dt__record_get(seen.ring, (uint64_t)last, &r))
        dt__append(text, bytes, at, ", its last operation: %s", dt__record_text(&r).s);
}

/* Returns 1 if the rank of `seen` is in a long wait and its process is neither stopped nor gone; *r
   is then the record of the operation in which it waits. Else returns 0. Stores the state of the
   process in *process in both cases. */
static int dt__is_waiting(const dt_io *io, dt__rank_view seen, char *process, dt__op_record *r) {
    uint64_t waiting = __atomic_load_n(&seen.state->waiting_op, __ATOMIC_SEQ_CST);
    *process = dt__process_state(io, seen.state);
    if (*process == 'T' || *process == 't' || *process == 'Z' || *process == 'X') return 0;
    return dt__record_get(seen.ring, waiting, r);
}

/* Follows the wait-for graph from `rank` for at most 4 edges. Appends the waits on the path, and
   why the last rank does not come: "; rank 3 (process 4711) is stopped (state T), its last
   operation: ...". */
static void dt__append_diagnosis(
    const dt__world *world, int rank, char *text, size_t bytes, size_t *at) {
    const dt_io *io = dt_ctx_io(world->ctx);
    dt__op_record r;
    char process;
    for (int step = 0; step < 4 && rank >= 0 && rank != world->rank; step++) {
        dt__rank_view seen = dt__view_of_rank(world, rank);
        const dt__rank_state *state = seen.state;
        if (!state) return;
        if (dt__is_waiting(io, seen, &process, &r)) {
            int next = __atomic_load_n(&state->waits_for, __ATOMIC_RELAXED);
            dt__append(text, bytes, at, "; rank %d waits in %s", rank, dt__record_text(&r).s);
            if (next != DT_ANY) dt__append(text, bytes, at, " for rank %d", next);
            rank = next;
            continue;
        }
        int pid = __atomic_load_n(&state->pid, __ATOMIC_RELAXED),
            tid = __atomic_load_n(&state->tid, __ATOMIC_RELAXED);
        int thread = pid == (int)getpid() && tid != 0;
        /* read the process state up to three more times while it is R (running), because a rank
           that only polls and naps is also in state R sometimes */
        for (int tries = 0; tries < 3 && process == 'R'; tries++) {
            world->host->sleep(world->host->user, DT__NAP_MAX);
            process = dt__process_state(io, state);
        }
        if (pid == 0 && seen.ring.n > 1)
            dt__append(text, bytes, at, "; rank %d has not begun", rank);
        else if (pid == 0)
            dt__append(text, bytes, at, "; it is on another machine and has sent no report");
        else
            dt__append(text, bytes, at, "; rank %d (%s %d) %s", rank, thread ? "thread" : "process",
                thread ? tid : pid, dt__process_word(process));
        if (rank == world->awaited_rank &&
            __atomic_load_n(&state->progress, __ATOMIC_SEQ_CST) != world->awaited_progress)
            dt__append(text, bytes, at, ", it is late: it did other things meanwhile");
        dt__append_last_operation(seen, text, bytes, at);
        return;
    }
}

/* Hang diagnosis after a timeout: fails the context with a text that names the missing rank and
   says what the missing rank does instead. */
static dt_status dt__report_timeout(dt_work *work) {
    dt__world *world = work->comm->world;
    char text[480];
    size_t at = 0;
    work = dt__group_queue_head(work);
    const char *name = dt__pattern_of(work->call.op)->name, *group = work->comm->group->name;
    dt__phrase site = dt__own_site(work);
    int awaited = dt__find_awaited_rank(work),
        messages = work->algorithm || !work->comm->group->members;
    const dt__p2p *p2p = work->p2p_ops;
    while (p2p && p2p < work->p2p_ops + work->p2p_count && p2p->finished) p2p++;
    dt__append(text, sizeof text, &at, "timeout %.1f s in ", world->shared->timeout_s);
    if (p2p && p2p < work->p2p_ops + work->p2p_count)
        dt__append(text, sizeof text, &at,
            p2p->peer == DT_ANY ? "%s: nobody sent it" : "%s: rank %d %s",
            dt__p2p_text(work, p2p).s, awaited,
            p2p->tag < 0          ? "did not do its part"
            : p2p->op == DT__SEND ? "did not receive it"
                                  : "did not send it");
    else if (work->check_work || work->is_device_op)
        dt__append(text, sizeof text, &at,
            awaited == DT_ANY ? "%s #%llu on %s%s" : "%s #%llu on %s%s: rank %d did not come",
            dt__call_text(&work->call).s, (unsigned long long)work->call.seq, group, site.s,
            awaited);
    else if (messages)
        dt__append(
            text, sizeof text, &at, "%s on %s%s", dt__call_text(&work->call).s, group, site.s);
    else
        dt__append(text, sizeof text, &at, "%s #%llu on %s%s: %s", name,
            (unsigned long long)work->call.seq, group, site.s, dt__arrivals_text(work).s);
    dt__append_diagnosis(world, awaited, text, sizeof text, &at);
    return dt__comm_fail(world, DT_ERR_TIMEOUT, "%s", text);
}

/* ---- deadlock detection ---- */

/* Appends "rank 0 waits in ... for rank 1" or "rank 0 has ended". */
static void dt__append_wait(
    const dt__world *world, int rank, char *text, size_t bytes, size_t *at) {
    dt__rank_view seen = dt__view_of_rank(world, rank);
    dt__op_record r;
    /* no state: another rank has found and reported the same deadlock, and all ranks leave the
       run */
    if (!seen.state) return;
    int other = __atomic_load_n(&seen.state->waits_for, __ATOMIC_RELAXED);
    dt__append(text, bytes, at, "rank %d ", rank);
    if (dt__record_get(seen.ring, __atomic_load_n(&seen.state->waiting_op, __ATOMIC_SEQ_CST), &r))
        dt__append(text, bytes, at, "waits in %s", dt__record_text(&r).s);
    else
        dt__append(text, bytes, at, "has ended");
    if (other != DT_ANY) dt__append(text, bytes, at, " for rank %d", other);
}

/* Returns the wait-for edge of a rank: the world rank that `rank` waits for; DT_ANY if `rank` waits
   for no particular rank or the edge is unknown. */
static int dt__wait_edge(const dt__world *world, int rank) {
    dt__rank_view seen = dt__view_of_rank(world, rank);
    if (!seen.state || !__atomic_load_n(&seen.state->waiting_op, __ATOMIC_SEQ_CST)) return DT_ANY;
    return __atomic_load_n(&seen.state->waits_for, __ATOMIC_RELAXED);
}

/* Fails the context with a text that describes the deadlock. If this rank's path in the wait-for
   graph leads to a cycle, the text lists the waits of that cycle, starting at its lowest rank. Else
   the text lists the waits of the first ranks of the world. */
static void dt__report_deadlock(dt__world *world) {
    enum { NAMED = 4 };
    int n = world->comm->base.size, rank = world->rank, first, length = 1;
    char text[480];
    size_t at = 0;
    for (int i = 0; i < n && rank != DT_ANY; i++) rank = dt__wait_edge(world, rank);
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
    for (int next = dt__wait_edge(world, rank); next != rank && next != DT_ANY && length < n;
         next = dt__wait_edge(world, next)) {
        if (next < first) first = next;
        length++;
    }
    rank = first;
    for (int i = 0; i < length && i < NAMED; i++, rank = dt__wait_edge(world, rank)) {
        dt__append(text, sizeof text, &at, i ? ", " : "deadlock: ");
        dt__append_wait(world, rank, text, sizeof text, &at);
    }
    if (length > NAMED)
        dt__append(text, sizeof text, &at, ", and so on: a circle of %d ranks", length);
    dt__comm_fail(world, DT_ERR_COMM, "%s", text);
}

/* Returns 1 if `work` or another unfinished operation has moved its data and waits only for the
   simulated link. */
static int dt__link_busy(const dt__world *world, const dt_work *work) {
    int busy = work->completion == DT__TRANSFERRED;
    for (const dt_work *w = world->first_unfinished; w; w = w->next_unfinished)
        busy = busy || w->completion == DT__TRANSFERRED;
    return busy;
}

/* Returns 1 if the sum of all ranks' progress counters can prove a deadlock: all ranks share
   memory, and no message is in flight on a transport. */
static int dt__can_sum_progress(const dt__world *world) {
    int64_t in_transit = 0;
    if (!world->shared->state || world->comm->base.size != world->shared->ranks) return 0;
    for (int local_rank = 0; local_rank < world->shared->ranks; local_rank++)
        in_transit +=
            __atomic_load_n(&world->shared->state[local_rank].in_transit, __ATOMIC_SEQ_CST);
    return in_transit == 0;
}

/* Deadlock detection over a transport. Ranks cannot sum each other's progress counters, but each
   rank has the last wait report of every other rank. Either of two conditions proves a deadlock.

   1. A cycle. Every rank of the cycle waits in a collective for the next rank, and the next rank
   also waits and has not begun that collective. Proof: suppose that one rank leaves the cycle
   first. It can leave only after the next rank has begun the collective, so the next rank has left
   the cycle earlier: a contradiction.

   2. Quiescence. All ranks wait, no rank waits for a rank that has already posted its call in
   shared memory (section 14), no rank has an unfinished send, and on every channel as many messages
   have arrived as were sent (channel counting: F. Mattern, "Algorithms for distributed termination
   detection", 1987). The reports need not be taken at the same time. Proof: after its report, a
   rank is woken only by a message. Take the first message that wakes any rank. Its sender has not
   been woken, so it sent the message before its own report, and that report counts the message as
   sent. The report of the woken rank does not count the message as received. So the two counts
   differ: a contradiction.

   The reports prove nothing while a rank has an unfinished send, because the receiver may learn of
   a message's end before the sender does. For a cycle, unfinished sends matter only on transports
   that deliver a message before its receive is posted (control->arrived). On other transports a
   send needs the receiver to take part in the collective.

   dt__is_behind returns 1 if rank `other` has not begun the collective in which `rank` waits. */
static int dt__is_behind(const dt__world *world, int rank, int other) {
    const dt__wait_report *its = &world->peers[rank].last_report,
                          *theirs = &world->peers[other].last_report;
    if (!its->waiting_op || !theirs->waiting_op ||
        dt__is_p2p((dt__op_code)(its->wait_record.packed_call & 255)))
        return 0;
    if (its->pending_sends && world->control->arrived) return 0;
    for (uint32_t i = 0; i < theirs->group_count; i++) {
        /* reports carry the low 32 bits of seq */
        int32_t ahead = (int32_t)(theirs->begun[i] - (uint32_t)its->wait_record.seq);
        if (theirs->channels[i] == its->wait_channel) return ahead < 0;
        /* `other` reports no collective of this group that runs as messages, so it has begun
           none */
        if (theirs->channels[i] == its->wait_channel + 1 && its->wait_channel % 2 == 0) return 1;
    }
    return 0;
}

static int dt__has_wait_cycle(const dt__world *world) {
    int n = world->comm->base.size, rank = world->rank;
    for (int i = 0; i < 2 * n; i++) {
        int other = world->peers[rank].last_report.waits_for;
        if (other == DT_ANY || !dt__is_behind(world, rank, other)) return 0;
        rank = other;
    }
    return 1;
}

static int dt__is_quiescent(const dt__world *world) {
    int n = world->comm->base.size;
    if (n > DT__REPORT_RANKS) return 0;
    for (int rank = 0; rank < n; rank++) {
        const dt__wait_report *its = &world->peers[rank].last_report;
        if (!its->waiting_op || its->pending_sends) return 0;
        int posted =
            its->wait_channel % 2 && !dt__is_p2p((dt__op_code)(its->wait_record.packed_call & 255));
        if (posted && (its->waits_for == DT_ANY || !dt__is_behind(world, rank, its->waits_for)))
            return 0;
    }
    for (int from = 0; from < n; from++) {
        for (int to = 0; to < n; to++)
            if (world->peers[from].last_report.sent[to] !=
                world->peers[to].last_report.received[from])
                return 0;
    }
    return 1;
}

/* Returns the number of unfinished sends of a work and of its check_work. */
static uint32_t dt__count_pending_sends(const dt_work *work) {
    uint32_t n = work->check_work ? dt__count_pending_sends(work->check_work) : 0;
    for (int i = 0; i < work->p2p_count; i++)
        n += work->p2p_ops[i].op == DT__SEND && !work->p2p_ops[i].finished;
    return n;
}

/* Returns the id of one of a group's two counters of collectives. With `posts` 1 it counts the
   collectives that run through posts (section 14), with `posts` 0 those that run as messages. */
static uint32_t dt__counter_of(const dt_comm *comm, int posts) {
    return 2 * comm->group->channel + (uint32_t)(posts != 0);
}

static void dt__report_counter(dt__wait_report *own, uint32_t channel, uint64_t begun) {
    if (own->group_count == DT__REPORT_GROUPS) return;
    own->channels[own->group_count] = channel;
    own->begun[own->group_count++] = (uint32_t)begun;
}

/* Sends a wait report to all other ranks. The report says that this rank waits in `work`. If work
   is NULL, it says that this rank has ended (`ended` is 1) or no longer waits (`ended` is 0). */
static void dt__send_wait_report(dt__world *world, const dt_work *work, int ended) {
    dt__wait_report *own = &world->peers[world->rank].last_report;
    memset(own, 0, sizeof *own);
    own->waiting_op = work ? work->record_number : ended ? DT__REPORT_ENDED : 0;
    own->op_count = world->state->op_count;
    own->step = world->state->step;
    own->waits_for = work ? world->awaited_rank : DT_ANY;
    own->wait_channel = work ? dt__counter_of(work->comm, !work->algorithm) : 0;
    dt__record_get(dt__view_of_rank(world, world->rank).ring,
        work ? work->record_number : (uint64_t)own->op_count, &own->wait_record);
    for (const dt_comm *comm = world->comms; comm; comm = comm->next) {
        int posts = comm->ops->collective != NULL;
        if (!posts || comm->message_seq)
            dt__report_counter(own, dt__counter_of(comm, 0), comm->message_seq);
        if (posts) dt__report_counter(own, dt__counter_of(comm, 1), comm->seq);
    }
    for (int rank = 0; rank < world->comm->base.size && rank < DT__REPORT_RANKS; rank++) {
        own->sent[rank] = world->peers[rank].sent;
        own->received[rank] = world->control->arrived
                                  ? world->control->arrived(world->control->user, rank)
                                  : world->peers[rank].received;
    }
    for (const dt_work *w = world->first_unfinished; work && w; w = w->next_unfinished)
        own->pending_sends += w == work ? 0 : dt__count_pending_sends(w);
    /* A library or the device may still finish this work. Counting it as a pending send keeps the
       other ranks from reporting a deadlock. */
    if (work)
        own->pending_sends +=
            dt__count_pending_sends(work) + (uint32_t)(work->is_device_op || work->in_library);
    world->wait_reported = work != NULL;
    world->wait_reported_progress = world->state->progress;
    world->wait_reported_at = world->host->now(world->host->user);
    world->control->send_report(world->control->user, own, sizeof *own);
}

/* Stores a wait report that has arrived from another rank. Corrects fields that are out of range,
   although the sender belongs to the job, because these fields index arrays. */
static void dt__receive_wait_report(dt__world *world, int rank, const void *report) {
    if (!world || !world->peers || !world->comm) return;
    int64_t now = (int64_t)(world->host->now(world->host->user) * 1e6);
    dt__peer_view *other = &world->peers[rank];
    uint64_t before = other->last_report.waiting_op;
    const dt__wait_report *peer_report = &other->last_report;
    memcpy(&other->last_report, report, sizeof other->last_report);
    other->last_report.wait_record.group[DT__NAME_BYTES - 1] =
        other->last_report.wait_record.file[DT__FILE_BYTES - 1] = 0;
    other->last_report.wait_record.packed_call =
        (peer_report->wait_record.packed_call & 255) <= DT__RECV
            ? peer_report->wait_record.packed_call
            : (uint64_t)DT__BARRIER;
    if (peer_report->group_count > DT__REPORT_GROUPS) other->last_report.group_count = 0;
    if (peer_report->waits_for < DT_ANY || peer_report->waits_for >= world->comm->base.size)
        other->last_report.waits_for = DT_ANY;
    other->state.waiting_op = peer_report->waiting_op;
    other->state.ended = peer_report->waiting_op == DT__REPORT_ENDED;
    other->state.waits_for = other->last_report.waits_for;
    other->state.op_count = peer_report->op_count;
    other->state.step = peer_report->step;
    other->state.progress++;
    if (peer_report->waiting_op != before)
        other->state.wait_since_us = other->state.last_op_end_us = now;
}

/* A rank reports its wait to the other ranks once it has waited for this many seconds. After that
   it sends changed reports no more often than this. */
#define DT__REPORT_AFTER_S 0.02

static int dt__detect_deadlock_remote(dt_work *work, double since) {
    dt__world *world = work->comm->world;
    double now = world->host->now(world->host->user);
    if (!world->peers || now - since < DT__REPORT_AFTER_S) return 0;
    uint32_t arrived = 0; /* a message that arrived since the last check may wake this rank */
    for (int rank = 0; world->control->arrived && rank < world->comm_size; rank++)
        arrived += world->control->arrived(world->control->user, rank);
    if (arrived != world->arrived_messages) {
        world->arrived_messages = arrived;
        return 0;
    }
    const dt__wait_report *own = &world->peers[world->rank].last_report;
    int as_reported = world->wait_reported &&
                      world->state->progress == world->wait_reported_progress &&
                      own->waits_for == world->awaited_rank;
    if (!as_reported && now - world->wait_reported_at > DT__REPORT_AFTER_S)
        dt__send_wait_report(world, work, 0);
    if (!as_reported) return 0;
    int ended = world->awaited_rank != DT_ANY &&
                world->peers[world->awaited_rank].last_report.waiting_op == DT__REPORT_ENDED;
    if (ended && dt__is_behind(world, world->rank, world->awaited_rank)) {
        dt__ended_without(dt__group_queue_head(work), world->awaited_rank);
        return 1;
    }
    if (!dt__has_wait_cycle(world) && !dt__is_quiescent(world)) return 0;
    dt__report_deadlock(world);
    return 1;
}

/* Deadlock detection. Called in a long wait, after this rank has read `progress_sum`, the sum of
   all progress counters, and has then tried in vain to advance every pending operation. Publishes
   that this rank has been waiting in `work` since the time `since`, and publishes progress_sum. If
   all ranks have published the same sum and it is still current, no rank will ever advance: then
   fails the context and returns 1. Else returns 0. Over a transport, dt__detect_deadlock_remote
   decides. */
static int dt__detect_deadlock(dt_work *work, uint64_t progress_sum, double since) {
    dt__world *world = work->comm->world;
    dt__rank_state *own = world->state;
    const dt__shared *shared = world->shared;
    int begins = own->waiting_op != work->record_number,
        awaited = dt__find_awaited_rank(dt__group_queue_head(work));
    if (begins || awaited != world->awaited_rank) {
        const dt__rank_state *its = dt__view_of_rank(world, awaited).state;
        world->awaited_rank = awaited;
        world->awaited_progress = its ? __atomic_load_n(&its->progress, __ATOMIC_SEQ_CST) : 0;
    }
    __atomic_store_n(&own->waits_for, awaited, __ATOMIC_RELAXED);
    __atomic_store_n(&own->wait_since_us, (int64_t)(since * 1e6), __ATOMIC_RELAXED);
    __atomic_store_n(&own->waiting_op, work->record_number, __ATOMIC_SEQ_CST);
    if (world->status_request && __atomic_load_n(world->status_request, __ATOMIC_RELAXED))
        dt__log_all_ranks(world);
    /* Without operation records (DT_NO_CHECKS) a begun operation does not count as progress, so the
       sum proves nothing. */
    if (DT__UNCHECKED || dt__link_busy(world, work)) return 0;
    if (!dt__can_sum_progress(world)) return dt__detect_deadlock_remote(work, since);
    __atomic_store_n(&own->idle_at_progress, progress_sum, __ATOMIC_SEQ_CST);
    for (int local_rank = 0; local_rank < shared->ranks; local_rank++) {
        uint64_t its =
            __atomic_load_n(&shared->state[local_rank].idle_at_progress, __ATOMIC_SEQ_CST);
        if (its != progress_sum && its != DT__IDLE_FOREVER) return 0;
    }
    if (dt__total_progress(shared) != progress_sum || !dt__can_sum_progress(world)) return 0;
    dt__report_deadlock(world);
    return 1;
}

/* ---- the table of all ranks ---- */

static dt__phrase dt__duration_text(double seconds) {
    dt__phrase text;
    snprintf(text.s, sizeof text.s, "%.1f s", seconds);
    return text;
}

/* Appends one rank's line of the table of dt_ranks_text, without a newline. */
static void dt__append_rank_line(const dt_io *io, double now, int rank, dt__rank_view seen,
    char *text, size_t bytes, size_t *at) {
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
    } else if (dt__is_waiting(io, seen, &process, &r)) {
        int other = __atomic_load_n(&state->waits_for, __ATOMIC_RELAXED);
        double seconds =
            now - (double)__atomic_load_n(&state->wait_since_us, __ATOMIC_RELAXED) / 1e6;
        dt__append(text, bytes, at, "for %s it waits in %s", dt__duration_text(seconds).s,
            dt__record_text(&r).s);
        if (other != DT_ANY) dt__append(text, bytes, at, " for rank %d", other);
    } else {
        int64_t left = __atomic_load_n(&state->last_op_end_us, __ATOMIC_RELAXED);
        dt__append(text, bytes, at, "it %s", dt__process_word(process));
        if (left)
            dt__append(text, bytes, at, " since %s", dt__duration_text(now - (double)left / 1e6).s);
        dt__append_last_operation(seen, text, bytes, at);
    }
}

size_t dt_ranks_text(const dt_ctx *ctx, char *text, size_t bytes) {
    const dt__world *world = dt__world_of(ctx);
    size_t all = 0;
    for (int rank = 0; world && world->comm && rank < world->comm->base.size; rank++) {
        char line[512];
        size_t at = 0;
        dt__append_rank_line(dt_ctx_io(ctx), world->host->now(world->host->user), rank,
            dt__view_of_rank(world, rank), line, sizeof line - 1, &at);
        line[at++] = '\n';
        if (text && all < bytes) memcpy(text + all, line, at < bytes - all ? at : bytes - all);
        all += at;
    }
    if (text && bytes) text[all < bytes ? all : bytes - 1] = 0;
    return all;
}

size_t dt_records_text(const dt_ctx *ctx, int rank, char *text, size_t bytes) {
    const dt__world *world = dt__world_of(ctx);
    int known = world && world->comm && rank >= 0 && rank < world->comm->base.size;
    dt__rank_view seen = dt__view_of_rank(world, known ? rank : DT_ANY);
    int64_t last = seen.state ? __atomic_load_n(&seen.state->op_count, __ATOMIC_ACQUIRE) : 0;
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

/* Logs one rank's line of the table of dt_ranks_text. logging_rank: the rank that writes to the
   log; -1 for the supervisor. */
static void dt__log_rank_line(
    const dt_host *host, const dt_io *io, int logging_rank, int rank, dt__rank_view seen) {
    char line[512] = "";
    size_t at = 0;
    dt__append_rank_line(io, host->now(host->user), rank, seen, line, sizeof line, &at);
    host->log(host->user, DT_LOG_NOTICE, logging_rank, line);
}

/* Answers a request by dt_run_desc.status_request on a rank without a supervisor: logs the table of
   all ranks and clears the request. */
static void dt__log_all_ranks(dt__world *world) {
    const dt_host *host = world->host;
    __atomic_store_n(world->status_request, 0, __ATOMIC_RELAXED);
    for (int rank = 0; rank < world->comm->base.size; rank++)
        dt__log_rank_line(
            host, dt_ctx_io(world->ctx), world->rank, rank, dt__view_of_rank(world, rank));
}

// ==== 19. Fault injection ========================================================================

/* Fault injection: a planted fault kills, stops, delays or corrupts one rank at a chosen operation.
   A real fault strikes at an unknown operation. The list of faults (dt_run_desc.fault or DT_FAULT)
   is parsed before the run begins, so every rank refuses a wrong list.

       DT_FAULT=kill:rank=2:seq=40,delay:rank=0:seq=7:s=0.5

       operation seq of the rank:   dt__fault_before   kill stop exit spin delay drop
                                    ... the operation runs ...
                                    dt__fault_after    flip nan   (in the received data) */

static const char *const dt__fault_names[] = { "", "kill", "stop", "exit", "spin", "delay", "drop",
    "flip", "nan" };

/* Parses a number of at most 15 digits, which may have a fraction if `real` is set. Returns the
   position after the number, or NULL if there is no number. */
static const char *dt__fault_parse_number(const char *at, int real, double *value) {
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

/* Parses one fault of the list. Returns the position after the fault, or NULL if its text is
   wrong. */
static const char *dt__fault_parse(const char *at, dt__fault *fault) {
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
        at = dt__fault_parse_number(at + strlen(keys[key]), key == 2, &values[key]);
        if (!at) return NULL;
    }
    fault->rank = values[0] >= 0 && values[0] < (double)DT__MAX_RANKS ? (int)values[0] : -1;
    fault->seq = (uint64_t)values[1];
    fault->s = values[2];
    return fault->rank >= 0 && fault->seq > 0 && (*at == 0 || *at == ',') ? at : NULL;
}

/* Parses the list and stores the faults of `rank`. With rank -1 it only checks the list for a job
   of `ranks` ranks (0: the number is unknown). Returns the number of stored faults, or -1 if the
   text is wrong. */
static int dt__faults_parse(const char *text, int rank, int ranks, dt__fault *faults) {
    int n = 0;
    dt__fault fault;
    for (const char *at = text; at && *at; at += *at == ',') {
        at = dt__fault_parse(at, &fault);
        if (!at || (*at == ',' && !at[1])) return -1;
        if (fault.rank == rank && n < DT__FAULTS) faults[n++] = fault;
        if (rank < 0 && fault.rank >= ranks && ranks > 0) return -1;
    }
    return n;
}

/* Hangs this rank outside of any operation. A process hangs for ever, a thread until another rank
   has failed. The rank spins if `spin` is 1 and sleeps if it is 0. */
static void dt__fault_hang(const dt__world *world, int spin) {
    while (!world->is_thread || !dt__aborted(world->shared))
        if (!spin) world->host->sleep(world->host->user, DT__NAP_MAX);
}

static void dt__fault_inject(dt_work *work, const dt__fault *fault) {
    dt__world *world = work->comm->world;
    int lost = fault->kind == DT__KILL || fault->kind == DT__EXIT;
    /* log the loss of the rank now: a context does not log DT_ERR_PEER, and no other rank reports a
       lost thread */
    if (lost && world->is_thread) {
        dt_fail(
            world->ctx, DT_ERR_PEER, "is lost: a planted fault, %s", dt__fault_names[fault->kind]);
        world->host->log(world->host->user, DT_LOG_ERROR, world->rank, dt_error_text(world->ctx));
    } else if (fault->kind == DT__KILL)
        raise(SIGKILL);
    else if (fault->kind == DT__EXIT)
        _exit(7);
    else if (fault->kind == DT__STOP && !world->is_thread)
        raise(SIGSTOP);
    else if (fault->kind == DT__STOP || fault->kind == DT__SPIN)
        dt__fault_hang(world, fault->kind == DT__SPIN);
    else if (fault->kind == DT__DELAY)
        world->host->sleep(world->host->user, fault->s);
    else
        work->fault = fault->kind;
    if (work->fault == DT__DROP) work->completion = DT__COMPLETED;
}

/* Injects the faults that are planted at this operation. Flips and NaNs are only noted in
   work->fault, for dt__fault_after. */
static void dt__fault_before(dt_work *work) {
    dt__world *world = work->comm->world;
    for (int i = 0; i < world->fault_count; i++) {
        dt__fault fault = world->faults[i];
        if (fault.seq != (uint64_t)world->state->op_count + 1 || work->fault == DT__DROP) continue;
        world->faults[i].seq = 0;
        dt__fault_inject(work, &fault);
    }
}

/* Corrupts the middle element of the received data: flips one bit (DT__FLIP) or sets all bits,
   which is a NaN in every floating-point type (DT__NAN). */
static void dt__fault_after(dt_work *work) {
    const dt__call *call = &work->call;
    size_t size = dt_dtype_size(call->dtype);
    char *middle = (char *)call->recv + call->count / 2 * size, element[8];
    int receives = call->op == DT__RECV || (call->op != DT__SEND && dt__receives(work->comm, call));
    if (work->fault == DT__DROP || !receives || call->count == 0) return;
    dt__comm_copy(work->comm, call, element, middle, size);
    dt__comm_sync(work->comm->world);
    if (work->fault == DT__FLIP)
        element[0] = (char)(element[0] ^ 1);
    else
        memset(element, 0xff, sizeof element);
    dt__comm_copy(work->comm, call, middle, element, size);
    dt__comm_sync(work->comm->world);
}

// ==== 20. Scalars and agreement: code ============================================================

/* These functions run collectives (section 17) on host memory. They do not use the device's kernel
   table, and dt_comm_bytes does not count them. Straggler detection is in this section too, because
   dt_comm_step gathers the time that each rank spends on its own work. */

dt_status(dt_sum_doubles)(dt_comm *comm, double *values, size_t n) {
    dt__call call = dt__call_make(DT__SUM_DOUBLES, values, values, n, DT_F64);
    call.host_memory = 1;
    return dt__op_run(comm, call);
}

double(dt_mean)(dt_comm *comm, double mine) {
    if ((dt_sum_doubles)(comm, &mine, 1) != DT_OK) return (double)__builtin_nan("");
    return mine / dt_comm_size(comm);
}

/* Gathers two words of each rank into comm->words. Keeps the call site of the public function,
   because dt_comm_split gathers twice. */
static dt_status dt__gather_words(dt_comm *comm, dt__op_code op, const int32_t mine[2]) {
    dt__call call = dt__call_make(op, mine, comm->words, 2, DT_I32);
    const char *file = comm->world->file;
    call.host_memory = 1;
    dt_status status = dt__op_run(comm, call);
    comm->world->file = file;
    return status;
}

dt_status(dt_agree)(dt_comm *comm, dt_status mine) {
    int32_t words[2] = { (int32_t)mine, 0 };
    if (!comm) return mine;
    dt_status status = dt__gather_words(comm, DT__AGREE, words);
    for (int rank = 0; rank < comm->base.size && !status; rank++)
        status = (dt_status)comm->words[2 * rank];
    return status;
}

/* A rank is a straggler if its own work took longer than DT__STRAGGLER_RATIO times the median of
   all ranks plus DT__STRAGGLER_EXCESS_S seconds, in at least DT__STRAGGLER_STEPS of the last 8
   steps. After a notice, at least DT__STRAGGLER_NOTICE_STEPS steps pass before the next one. */
#define DT__STRAGGLER_RATIO 1.5
#define DT__STRAGGLER_EXCESS_S 1e-3
enum { DT__STRAGGLER_STEPS = 5, DT__STRAGGLER_NOTICE_STEPS = 10 };

/* Returns the seconds of a rank's own work in the step: the time since the last step minus the time
   in operations. */
static double dt__own_step_seconds(const dt_comm *comm, int rank) {
    double own;
    memcpy(&own, comm->words + 2 * rank, sizeof own);
    return own;
}

/* Straggler detection, on rank 0: logs a notice if the slowest rank is a straggler. The same rank
   must be slow in several steps, because one slow step may have a harmless cause. */
static void dt__find_straggler(dt__world *world, const dt_comm *comm) {
    int slowest = 0, n = comm->base.size;
    double slowest_s = 0, median = 0;
    for (int rank = 0; rank < n; rank++) { /* if n is even, the lower median */
        double own = dt__own_step_seconds(comm, rank);
        int below = 0, equal = 0;
        for (int other = 0; other < n; other++) {
            below += dt__own_step_seconds(comm, other) < own;
            equal += dt__own_step_seconds(comm, other) == own;
        }
        if (below <= (n - 1) / 2 && below + equal > (n - 1) / 2) median = own;
        if (own > slowest_s) slowest = rank;
        if (own > slowest_s) slowest_s = own;
    }
    int is_slow = n > 1 && slowest_s > DT__STRAGGLER_RATIO * median + DT__STRAGGLER_EXCESS_S;
    if (is_slow && slowest != world->straggler_rank &&
        __builtin_popcount(world->straggler_steps) < 2)
        world->straggler_steps = 0;
    if (is_slow && world->straggler_steps == 0) world->straggler_rank = slowest;
    world->straggler_steps =
        (world->straggler_steps << 1 | (is_slow && slowest == world->straggler_rank)) & 0xff;
    if (world->steps_since_notice > 0) world->steps_since_notice--;
    if (!(world->straggler_steps & 1) || world->steps_since_notice > 0) return;
    if (__builtin_popcount(world->straggler_steps) < DT__STRAGGLER_STEPS) return;
    world->steps_since_notice = DT__STRAGGLER_NOTICE_STEPS;
    dt_log(world->ctx, DT_LOG_NOTICE,
        "rank %d is a straggler: its own work took %.1f ms in this step, the "
        "median %.1f ms",
        slowest, slowest_s * 1e3, median * 1e3);
}

/* Checks that all ranks have made the same calls so far. For each group it compares the number of
   collectives and a hash of their arguments. Every rank visits its groups in the order of their
   channels, which is the same on all ranks. Returns the context's status. */
static dt_status dt__compare_step_calls(dt__world *world) {
    for (uint32_t channel = 0; channel < world->channel_count; channel++) {
        dt_comm *comm = world->comms;
        while (comm && comm->group->channel != channel) comm = comm->next;
        if (!comm || comm->ops->collective || comm->base.size == 1) continue;
        int32_t words[2] = { (int32_t)comm->message_seq, (int32_t)(comm->call_hash >> 32) };
        if (dt__gather_words(comm, DT__STEP, words) != DT_OK) break;
        for (int rank = 1; rank < comm->base.size; rank++) {
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
           own = now - world->last_step_end - (world->seconds - world->last_step_comm_seconds);
    int32_t words[2];
    if (world->last_step_end == 0 || own < 0) own = 0;
    memcpy(words, &own, sizeof words);
    if (dt__gather_words(comm, DT__STEP, words) != DT_OK) return dt_error(world->ctx);
    if (world->last_step_end > 0 && comm->base.rank == 0) dt__find_straggler(world, comm);
    if (world->transport.send && dt__compare_step_calls(world) != DT_OK)
        return dt_error(world->ctx);
    __atomic_store_n(&world->state->step, world->state->step + 1, __ATOMIC_RELAXED);
    world->last_step_end = world->host->now(world->host->user);
    world->last_step_comm_seconds = world->seconds;
    return dt_error(world->ctx);
}

// ==== 21. Process groups: code ===================================================================

/* Splitting a process group. All ranks gather (color, key). The new rank of a rank is the number of
   ranks with the same color that come before it, by key and then by old rank.

       6 ranks, color = rank / 3, key = -rank

       rank      0 1 2   3 4 5
       color     0 0 0   1 1 1
       group     a a a   b b b
       new rank  2 1 0   2 1 0

   In shared memory, rank 0 of each new group creates the group in the run's shared memory segment,
   and a second gather tells the other ranks where it is. Over a transport every rank has a private
   copy of the member list. If all members are on one machine, rank 0 also creates the group's state
   in that machine's shared memory. Cost: two gathers of 8 bytes per rank. */

dt_comm *dt_world(dt_ctx *ctx) {
    dt__world *world = dt__world_of(ctx);
    return world ? world->comm : NULL;
}

int dt_comm_rank(const dt_comm *comm) { return comm ? comm->base.rank : 0; }
int dt_comm_size(const dt_comm *comm) { return comm ? comm->base.size : 1; }
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

/* Returns the bytes of a private dt__group. Over a transport each rank has its own copy of a
   group. */
static size_t dt__private_group_bytes(int size) {
    return sizeof(dt__group) + (size_t)size * sizeof(int);
}

/* Rails connect the members that have the same index on their machines (section 16). Returns the
   number of members per machine if the members of a machine have consecutive ranks and every
   machine has the same number of members, at least two. Returns 0 otherwise, and also if all
   members are on one machine. */
static int dt__find_ranks_per_node(const dt__world *world, const dt__group *group) {
    int k = 0, n = group->size;
    if (!world->node) return 0;
    const int *homes = world->node->node_leaders;
    while (k < n && homes[group->ranks[k]] == homes[group->ranks[0]]) k++;
    if (k < 2 || k == n || n % k) return 0;
    for (int rank = 0; rank < n; rank++)
        if (homes[group->ranks[rank]] != homes[group->ranks[rank / k * k]]) return 0;
    return k;
}

/* Makes this rank's handle of a group. If memory runs out, frees `group` if it is private, fails
   the context and returns NULL. */
static dt_comm *dt__comm_make(
    dt__world *world, const dt__comm_ops *ops, dt__group *group, int rank) {
    size_t size = (size_t)group->size;
    size_t bytes = sizeof(dt_comm) + size * (2 * sizeof(void *) + 2 * sizeof(int32_t));
    dt_comm *comm = (dt_comm *)dt_alloc(world->ctx, DT_MEM_HOST, bytes, "dt_comm");
    if (!comm && world->transport.send)
        dt_free(world->ctx, DT_MEM_HOST, group, dt__private_group_bytes(group->size));
    if (!comm) return NULL;
    memset(comm, 0, bytes);
    comm->base.rank = rank;
    comm->base.size = group->size;
    comm->world = world;
    comm->ops = ops;
    comm->group = group;
    comm->ranks_per_node = dt__find_ranks_per_node(world, group);
    comm->axis = DT_AXIS_NONE;
    comm->bytes = bytes;
    comm->inputs = (const void **)(void *)(comm + 1);
    comm->outputs = (void **)(void *)(comm->inputs + size);
    comm->words = (int32_t *)(void *)(comm->outputs + size);
    comm->next = world->comms;
    world->comms = comm;
    return comm;
}

static dt__group *dt__private_group_make(dt__world *world, int size, const char *name) {
    dt__group *group =
        (dt__group *)dt_alloc(world->ctx, DT_MEM_HOST, dt__private_group_bytes(size), "dt_comm");
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
            dt_free(
                world->ctx, DT_MEM_HOST, comm->group, dt__private_group_bytes(comm->group->size));
        dt_free(world->ctx, DT_MEM_COMM, comm->staging, 2 * DT_WINDOW_BYTES);
        dt_free(world->ctx, DT_MEM_HOST, comm, comm->bytes);
    }
    world->comm = NULL;
}

/* Returns the rank that `rank` gets in its new group, computed from comm->words. */
static int dt__split_rank(const dt_comm *comm, int rank) {
    const int32_t *mine = &comm->words[2 * rank];
    int new_rank = 0;
    for (int other = 0; other < comm->base.size; other++) {
        const int32_t *its = &comm->words[2 * other];
        if (its[0] == mine[0] && (its[1] < mine[1] || (its[1] == mine[1] && other < rank)))
            new_rank++;
    }
    return new_rank;
}

/* Makes a new group that lists the members of one color. Returns NULL if there is no memory left or
   no capacity for another group. */
static dt__group *dt__split_group(const dt_comm *comm, int color, const char *name) {
    dt__world *world = comm->world;
    int size = 0;
    for (int rank = 0; rank < comm->base.size; rank++) size += comm->words[2 * rank] == color;
    dt__group *group = world->transport.send ? dt__private_group_make(world, size, name)
                                             : dt__group_make(world->shared, size, name);
    for (int rank = 0; group && rank < comm->base.size; rank++) {
        if (comm->words[2 * rank] == color)
            group->ranks[dt__split_rank(comm, rank)] = comm->group->ranks[rank];
    }
    return group;
}

/* Converts a group's address in shared memory to an index in units of cache lines.
   dt__group_from_index converts the index back. */
static int32_t dt__group_to_index(const dt__shared *shared, const dt__group *group) {
    return (int32_t)((size_t)((const char *)group - shared->group_arena) / DT__CACHE_LINE);
}

static dt__group *dt__group_from_index(const dt__shared *shared, int32_t line) {
    return (dt__group *)(void *)(shared->group_arena + (size_t)line * DT__CACHE_LINE);
}

/* Returns 1 if all ranks of a private group share memory with this rank. */
static int dt__is_on_node(const dt__world *world, const dt__group *group) {
    for (int rank = 0; rank < group->size; rank++)
        if (!world->node || dt__local_rank_of(world, group->ranks[rank]) < 0) return 0;
    return 1;
}

/* Makes a private group use the posts and member states of its counterpart in shared memory. */
static void dt__group_use_shared(dt__group *group, const dt__group *shared) {
    group->members = shared->members;
    group->posts = shared->posts;
    group->post_bytes = shared->post_bytes;
}

/* dt_comm_split over a transport. `first` is the rank in comm that becomes rank 0 of this rank's
   new group. The second gather carries two words of each rank. Word 0 is the rank's next free
   channel; the maximum over all ranks becomes the channel of the new groups. Word 1 is the index of
   the shared state, which rank 0 of a new group creates if all its members are on one machine;
   otherwise it is -1. Without shared state the group's collectives run as messages. */
static dt_comm *dt__split_over_transport(dt_comm *comm, int color, const char *name, int first) {
    dt__world *world = comm->world;
    int new_rank = dt__split_rank(comm, comm->base.rank);
    dt__group *group = color >= 0 ? dt__split_group(comm, color, name) : NULL;
    const dt__comm_ops *ops = world->comm->ops->split ? world->comm->ops : &dt__transport_ops;
    dt_comm *made = group ? dt__comm_make(world, ops, group, new_rank) : NULL;
    int32_t words[2] = { (int32_t)world->channel_count, -1 };
    uint32_t channel = 0;
    if (made && new_rank == 0 && dt__is_on_node(world, group)) {
        const dt__group *shared = dt__group_make(world->shared, group->size, name);
        if (shared) words[1] = dt__group_to_index(world->shared, shared);
    }
    if (dt__gather_words(comm, DT__SPLIT, words) != DT_OK) return NULL;
    for (int rank = 0; rank < comm->base.size; rank++)
        channel =
            (uint32_t)comm->words[2 * rank] > channel ? (uint32_t)comm->words[2 * rank] : channel;
    world->channel_count = channel + 1;
    if (made) group->channel = channel;
    if (ops->split) ops->split(comm, made, color);
    if (!made || dt_error(world->ctx)) return NULL;
    if (comm->words[2 * first + 1] < 0) return made;
    dt__group_use_shared(group, dt__group_from_index(world->shared, comm->words[2 * first + 1]));
    made->ops = &dt__node_ops;
    return made;
}

dt_comm *(dt_comm_split)(dt_comm *comm, int color, int key, const char *name) {
    int32_t words[2] = { color < 0 ? -1 : color, key };
    if (!comm || dt__gather_words(comm, DT__SPLIT, words) != DT_OK) return NULL;
    if (!name) name = "group";
    dt__shared *shared = comm->world->shared;
    int new_rank = dt__split_rank(comm, comm->base.rank), first = comm->base.rank;
    for (int rank = 0; rank < comm->base.size; rank++) {
        if (comm->words[2 * rank] == words[0] && dt__split_rank(comm, rank) == 0) first = rank;
    }
    if (comm->world->transport.send) return dt__split_over_transport(comm, color, name, first);
    /* word 0 for the second gather: on rank 0 of a new group, the index of the group, or -1 if
       there is no capacity; on the other ranks, 0 */
    words[0] = words[1] = 0;
    if (color >= 0 && new_rank == 0) {
        dt__group *group = dt__split_group(comm, color, name);
        words[0] = group ? dt__group_to_index(shared, group) : -1;
    }
    if (dt__gather_words(comm, DT__SPLIT, words) != DT_OK) return NULL;
    for (int rank = 0; rank < comm->base.size; rank++) {
        if (comm->words[2 * rank] >= 0) continue;
        dt__comm_fail(comm->world, DT_ERR_MEM,
            "dt_comm_split(%s) on %s: a run has room for %d splits of its world", name,
            comm->group->name, (int)DT_MAX_SPLITS);
        return NULL;
    }
    if (color < 0) return NULL;
    return dt__comm_make(
        comm->world, comm->ops, dt__group_from_index(shared, comm->words[2 * first]), new_rank);
}

// ==== 22. Shared-memory heap of forked ranks =====================================================

/* Each forked rank has a heap in the run's shared memory. The memory classes whose buffers are used
   for communication (dt__is_heap_class) are allocated from this heap, so other ranks can read and
   write these buffers.

       | heap of rank 0                                  | heap of rank 1 ...
       | dt__heap | used | free | used | free | used | ~ never used ~ |
                           |             ^             ^
                           +-- next -----+             top

   Allocation takes the first block that is large enough (first fit) from a list of free blocks in
   address order. The list nodes are stored in the free blocks. A freed block is coalesced with its
   free neighbours, and the pages that lie entirely in the freed block are returned to the
   system. */

typedef struct dt__free_block { /* the header of a free block */
    size_t bytes;
    struct dt__free_block *next;
} dt__free_block;

/* One rank's heap. Its host table forwards calls to the host table of dt_run's caller, but alloc
   and free use the heap for the memory classes of dt__is_heap_class. */
typedef struct dt__heap {
    dt_host host;
    const dt_host *caller_host;
    char *start;
    size_t bytes, top; /* memory at offset `top` and above is unused */
    dt__free_block *free_list;
} dt__heap;

static int dt__is_heap_class(dt_mem mem) {
    return mem == DT_MEM_PARAMS || mem == DT_MEM_GRADS || mem == DT_MEM_ACTS || mem == DT_MEM_COMM;
}

static void *dt__heap_first_fit(dt__heap *heap, size_t bytes) {
    for (dt__free_block **at = &heap->free_list; *at; at = &(*at)->next) {
        dt__free_block *block = *at;
        if (block->bytes < bytes) continue;
        if (block->bytes > bytes) {
            dt__free_block *rest = (dt__free_block *)(void *)((char *)block + bytes);
            rest->bytes = block->bytes - bytes;
            rest->next = block->next;
            *at = rest;
        } else {
            *at = block->next;
        }
        return block;
    }
    if (bytes > heap->bytes - heap->top) return NULL;
    heap->top += bytes;
    return heap->start + heap->top - bytes;
}

/* Joins a free block with the next free block if the two are adjacent. */
static void dt__heap_coalesce(dt__free_block *block) {
    if (!block->next || (char *)block + block->bytes != (char *)block->next) return;
    block->bytes += block->next->bytes;
    block->next = block->next->next;
}

static void dt__heap_insert(dt__heap *heap, void *p, size_t bytes) {
    const size_t page = 65536;
    dt__free_block **at = &heap->free_list, **before = NULL, *block = (dt__free_block *)p;
    uintptr_t from = ((uintptr_t)p + sizeof(dt__free_block) + page - 1) / page * page,
              to = ((uintptr_t)p + bytes) / page * page;
    for (; *at && (char *)*at < (char *)p; at = &(*at)->next) before = at;
    block->bytes = bytes;
    block->next = *at;
    *at = block;
    if (to > from && heap->caller_host->discard)
        heap->caller_host->discard(heap->caller_host->user, (void *)from, to - from);
    dt__heap_coalesce(block);
    if (before) dt__heap_coalesce(*before);
    if (before && (char *)*before + (*before)->bytes > (char *)p) at = before;
    block = *at;
    if ((char *)block + block->bytes == heap->start + heap->top) {
        heap->top -= block->bytes;
        *at = NULL;
    }
}

static void *dt__heap_alloc(void *user, size_t bytes, dt_mem mem) {
    dt__heap *heap = (dt__heap *)user;
    if (!dt__is_heap_class(mem))
        return heap->caller_host->alloc(heap->caller_host->user, bytes, mem);
    return bytes > heap->bytes ? NULL : dt__heap_first_fit(heap, dt__align_up(bytes));
}

static void dt__heap_free(void *user, void *p, size_t bytes, dt_mem mem) {
    dt__heap *heap = (dt__heap *)user;
    if (!dt__is_heap_class(mem))
        heap->caller_host->free(heap->caller_host->user, p, bytes, mem);
    else if (p)
        dt__heap_insert(heap, p, dt__align_up(bytes));
}

static double dt__heap_now(void *user) {
    const dt_host *base = ((dt__heap *)user)->caller_host;
    return base->now(base->user);
}

static void dt__heap_sleep(void *user, double seconds) {
    const dt_host *base = ((dt__heap *)user)->caller_host;
    base->sleep(base->user, seconds);
}

static void dt__heap_log(void *user, int level, int rank, const char *text) {
    const dt_host *base = ((dt__heap *)user)->caller_host;
    base->log(base->user, level, rank, text);
}

/* Makes the heap at the beginning of this rank's part of the shared memory. Returns the heap's host
   table. */
static const dt_host *dt__heap_make(dt__shared *shared, const dt_host *base, int rank) {
    dt__heap *heap = (dt__heap *)(void *)(shared->heaps + (size_t)rank * shared->heap_bytes);
    memset(heap, 0, sizeof *heap);
    heap->caller_host = base;
    heap->start = (char *)heap + dt__align_up(sizeof *heap);
    heap->bytes = shared->heap_bytes - dt__align_up(sizeof *heap);
    heap->host.user = heap;
    heap->host.alloc = dt__heap_alloc;
    heap->host.free = dt__heap_free;
    heap->host.now = dt__heap_now;
    heap->host.sleep = dt__heap_sleep;
    heap->host.log = dt__heap_log;
    return &heap->host;
}

// ==== 23. Launcher discovery =====================================================================

/* Launcher discovery: which rank is this process? A launcher (torchrun, mpirun, srun) sets the rank
   of each process in environment variables. Each launcher is one row of the table below, and one
   function reads all rows. The first row whose variables name a rank wins. Later rows that name the
   same rank supply the values that the first row lacks.

       environment --> dt__launchers[] --> rank, size --> local rank --> rendezvous address

   A row holds the names of environment variables. NULL means that the launcher has no variable for
   the field. */

static const char *dt__launch_env(const char *name) { return getenv(name); }

typedef struct dt__launcher {
    const char *name;
    const char *required; /* the row counts only if this variable is set */
    const char *rank, *size, *alt_size;
    int size_alone; /* 1: the size may be set without the rank (in a batch script) */
    const char *local_rank, *local_size;
    /* used instead of local_size: a list of how many ranks each machine has, for example "2(x3),1",
       and this machine's index in that list */
    const char *ranks_per_node, *node_index;
    /* the machine of rank 0, and the port at which rank 0 listens */
    const char *master_host, *master_port;
    /* if this variable is "True", the launcher itself listens at master_port, so dt takes another
       port */
    const char *port_taken;
    /* used instead of master_host: a list of machines, of which the first has rank 0 */
    const char *node_list, *alt_node_list;
    const char *job_id, *step_id; /* parts of the job's name, for dt__launch_port */
} dt__launcher;

static const dt__launcher dt__launchers[] = {
    { .name = "DT",
        .rank = "DT_RANK",
        .size = "DT_WORLD_SIZE",
        .local_rank = "DT_LOCAL_RANK",
        .local_size = "DT_LOCAL_SIZE" },
    { .name = "torchrun",
        .rank = "RANK",
        .size = "WORLD_SIZE",
        .local_rank = "LOCAL_RANK",
        .local_size = "LOCAL_WORLD_SIZE",
        .master_host = "MASTER_ADDR",
        .master_port = "MASTER_PORT",
        .port_taken = "TORCHELASTIC_USE_AGENT_STORE" },
    { .name = "Open MPI",
        .rank = "OMPI_COMM_WORLD_RANK",
        .size = "OMPI_COMM_WORLD_SIZE",
        .local_rank = "OMPI_COMM_WORLD_LOCAL_RANK",
        .local_size = "OMPI_COMM_WORLD_LOCAL_SIZE",
        .job_id = "PMIX_NAMESPACE" },
    { .name = "PMI",
        .rank = "PMI_RANK",
        .size = "PMI_SIZE",
        .local_rank = "MPI_LOCALRANKID",
        .local_size = "MPI_LOCALNRANKS",
        .job_id = "PMI_JOBID" },
    { .name = "SLURM",
        .required = "SLURM_STEP_ID",
        .rank = "SLURM_PROCID",
        .size = "SLURM_STEP_NUM_TASKS",
        .alt_size = "SLURM_NTASKS",
        .size_alone = 1,
        .local_rank = "SLURM_LOCALID",
        .ranks_per_node = "SLURM_STEP_TASKS_PER_NODE",
        .node_index = "SLURM_NODEID",
        .node_list = "SLURM_STEP_NODELIST",
        .alt_node_list = "SLURM_JOB_NODELIST",
        .job_id = "SLURM_JOB_ID",
        .step_id = "SLURM_STEP_ID" },
    /* PMIx sets no size: this row exists so that dt refuses a PMIx job with an error text */
    { .name = "PMIx", .rank = "PMIX_RANK", .size = "PMI_SIZE", .size_alone = 1 },
};

enum {
    DT__LAUNCHERS = (int)(sizeof dt__launchers / sizeof dt__launchers[0]),
    DT__LAUNCH_PORT = 29500,      /* dt_run's default port */
    DT__LAUNCH_JOB_PORTS = 20000, /* first of 10,000 ports for jobs that name no port */
    /* start of the ephemeral port range: the system gives these ports to any socket, so the port
       after MASTER_PORT may be in use if it lies in this range */
    DT__LAUNCH_EPHEMERAL_PORTS = 32768
};

/* A variable's value, shortened for an error text. */
typedef struct dt__launch_short_text {
    char s[40];
} dt__launch_short_text;

static dt__launch_short_text dt__launch_shorten(const char *value) {
    dt__launch_short_text shown;
    int length = snprintf(shown.s, sizeof shown.s, "%s", value);
    if (length >= (int)sizeof shown.s) memcpy(shown.s + sizeof shown.s - 4, "...", 3);
    return shown;
}

static dt_status dt__launch_refuse(
    dt_launch *out, const char *name, const char *value, const char *why) {
    snprintf(out->text, sizeof out->text, "%s=%s: %s", name, dt__launch_shorten(value).s, why);
    return DT_ERR_ARG;
}

/* Parses the whole number at `at`. Returns -1 if it has no digits or more than 9. *end points to
   the first character after the digits. */
static int dt__launch_digits(const char *at, const char **end) {
    int value = 0, digits = 0;
    for (; *at >= '0' && *at <= '9'; at++, digits++)
        if (digits < 9) value = 10 * value + (*at - '0');
    *end = at;
    return digits > 0 && digits < 10 ? value : -1;
}

/* Reads the variable `name` into *number; leaves *number unchanged if the variable is not set.
   Returns DT_ERR_ARG if the value is not a number from min to max. */
static dt_status dt__launch_number(
    dt_launch *out, const char *name, int min, int max, int *number) {
    const char *value = name ? dt__launch_env(name) : NULL, *end;
    char why[64];
    if (!value) return DT_OK;
    int got = dt__launch_digits(value, &end);
    snprintf(why, sizeof why, "not a whole number from %d to %d", min, max);
    if (got < min || got > max || *end) return dt__launch_refuse(out, name, value, why);
    *number = got;
    return DT_OK;
}

/* Returns the number of ranks on machine `node` (from 0), read from a list like "2(x3),1": three
   machines with 2 ranks each, then one machine with 1 rank. Returns 0 if the list is shorter or
   malformed. */
static int dt__launch_node_ranks(const char *list, int node) {
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

static int dt__launch_is_host_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           (c && strchr(".-_", c));
}

/* Stores the first machine of a SLURM node list, for example "rack1n03" for the list
   "rack[1-2,7]n[03-12],login". Returns 1, or 0 if the text is not a node list. */
static int dt__launch_first_host(const char *list, char *host, size_t capacity) {
    size_t used = 0, inside;
    for (; *list && *list != ','; list++) {
        if (*list == '[') {
            inside = strspn(++list, "0123456789");
            if (inside == 0 || used + inside >= capacity) return 0;
            memcpy(host + used, list, inside);
            used += inside;
            list += strspn(list, "0123456789,-");
            if (*list != ']') return 0;
        } else {
            if (!dt__launch_is_host_char(*list) || used + 1 >= capacity) return 0;
            host[used++] = *list;
        }
    }
    host[used] = 0;
    return used > 0;
}

/* Returns a port derived from the job's name. The port is the same for all ranks of a job and most
   likely different for two jobs. */
static int dt__launch_port(const dt__launcher *row) {
    const char *names[2] = { dt__launch_env(row->job_id),
        row->step_id ? dt__launch_env(row->step_id) : NULL };
    uint32_t hash = 0;
    for (int i = 0; i < 2; i++)
        for (const char *c = names[i] ? names[i] : ""; *c; c++)
            hash = hash * 31 + (unsigned char)*c;
    return DT__LAUNCH_JOB_PORTS + (int)(hash % 10000);
}

/* Sets the rendezvous to host:port. The host may be a name or an address: the connecting rank
   resolves it. `name` is the variable that held the host. */
static dt_status dt__launch_set_rendezvous(
    dt_launch *out, const char *name, const char *host, int port) {
    size_t length = strlen(host), capacity = sizeof out->rendezvous - sizeof ":65535";
    for (size_t i = 0; i < length; i++)
        if (!dt__launch_is_host_char(host[i])) length = 0;
    if (length == 0 || length > capacity)
        return dt__launch_refuse(out, name, host, "not the name or IPv4 address of a machine");
    snprintf(out->rendezvous, sizeof out->rendezvous, "%s:%d", host, port);
    return DT_OK;
}

/* Finds rank 0's address in the n rows of `same`, which name the same rank. If all ranks are on one
   machine, the loopback address suffices. On several machines a variable must name rank 0's
   address; if there is none, the rendezvous stays empty. */
static dt_status dt__launch_find_rendezvous(
    dt_launch *out, const dt__launcher *const *same, int n) {
    const char *list = NULL, *list_name = NULL, *host, *port_text, *taken;
    char first[64];
    int port = 0;
    for (int i = 0; i < n; i++) {
        host = same[i]->master_host ? dt__launch_env(same[i]->master_host) : NULL;
        port_text = same[i]->master_port ? dt__launch_env(same[i]->master_port) : NULL;
        taken = same[i]->port_taken ? dt__launch_env(same[i]->port_taken) : NULL;
        if (!list && (list_name = same[i]->node_list) != NULL) list = dt__launch_env(list_name);
        if (!list && (list_name = same[i]->alt_node_list) != NULL) list = dt__launch_env(list_name);
        if (!port && same[i]->job_id && dt__launch_env(same[i]->job_id))
            port = dt__launch_port(same[i]);
        if (!host && !port_text) continue;
        port = DT__LAUNCH_PORT;
        if (dt__launch_number(out, same[i]->master_port, 1, 65535, &port) != DT_OK)
            return DT_ERR_ARG;
        if (taken && strcmp(taken, "True") == 0)
            port = port < DT__LAUNCH_EPHEMERAL_PORTS - 1 ? port + 1
                                                         : DT__LAUNCH_JOB_PORTS + port % 10000;
        return dt__launch_set_rendezvous(
            out, same[i]->master_host, host ? host : "127.0.0.1", port);
    }
    if (!port) port = DT__LAUNCH_PORT;
    if (out->local_size == out->size || (out->local_size == 0 && !list))
        return dt__launch_set_rendezvous(out, "", "127.0.0.1", port);
    if (!list) return DT_OK;
    if (!dt__launch_first_host(list, first, sizeof first))
        return dt__launch_refuse(out, list_name, list, "not a list of machines");
    return dt__launch_set_rendezvous(out, list_name, first, port);
}

/* Reads one launcher's variables into `out`. If they are not set, out->size is 0. */
static dt_status dt__launch_read_row(const dt__launcher *row, dt_launch *out) {
    const int max_ranks = DT__MAX_RANKS;
    const char *size = row->alt_size && !dt__launch_env(row->size) ? row->alt_size : row->size;
    const char *rank = dt__launch_env(row->rank),
               *counts = row->ranks_per_node ? dt__launch_env(row->ranks_per_node) : NULL;
    int node = -1;
    memset(out, 0, sizeof *out);
    out->local_rank = -1;
    if (row->required && !dt__launch_env(row->required)) return DT_OK;
    if (!rank && (row->size_alone || !dt__launch_env(size))) return DT_OK;
    if (!rank || !dt__launch_env(size)) {
        snprintf(out->text, sizeof out->text, "%s=%s is set, but %s is not",
            rank ? row->rank : size, dt__launch_shorten(rank ? rank : dt__launch_env(size)).s,
            rank ? size : row->rank);
        return DT_ERR_ARG;
    }
    if (dt__launch_number(out, size, 1, max_ranks, &out->size) != DT_OK ||
        dt__launch_number(out, row->rank, 0, out->size - 1, &out->rank) != DT_OK ||
        dt__launch_number(out, row->local_size, 1, out->size, &out->local_size) != DT_OK ||
        dt__launch_number(out, row->node_index, 0, max_ranks - 1, &node) != DT_OK)
        return DT_ERR_ARG;
    if (counts && node >= 0) {
        out->local_size = dt__launch_node_ranks(counts, node);
        if (out->local_size < 1 || out->local_size > out->size)
            return dt__launch_refuse(
                out, row->ranks_per_node, counts, "not the ranks of each machine");
    }
    if (dt__launch_number(out, row->local_rank, 0,
            (out->local_size ? out->local_size : out->size) - 1, &out->local_rank) != DT_OK)
        return DT_ERR_ARG;
    snprintf(out->launcher, sizeof out->launcher, "%s", row->name);
    snprintf(out->text, sizeof out->text, "%s, %s", row->rank, size);
    return DT_OK;
}

/* Sets the rendezvous from DT_RENDEZVOUS ("HOST" or "HOST:PORT"), which overrides every launcher,
   if it is set. */
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
    return dt__launch_set_rendezvous(out, "DT_RENDEZVOUS", host, port);
}

/* Writes the one-line summary to out->text. names: the variables that were used; others: the
   launchers that name a different rank or size. */
static void dt__launch_describe(dt_launch *out, const char *names, const char *others) {
    char local[48] = "";
    if (out->local_rank >= 0 && out->local_size)
        snprintf(local, sizeof local, " (local %d of %d)", out->local_rank, out->local_size);
    else if (out->local_rank >= 0)
        snprintf(local, sizeof local, " (local %d)", out->local_rank);
    snprintf(out->text, sizeof out->text, "rank %d of %d%s by %s: %s; %s%s%s%s", out->rank,
        out->size, local, out->launcher, names,
        out->rendezvous[0] ? "rendezvous " : "no rendezvous, as DT_RENDEZVOUS is not set",
        out->rendezvous, others[0] ? "; also set, but ignored: " : "", others);
}

/* Describes a process without a launcher as rank 0 of 1. (A SLURM batch script has some of SLURM's
   variables but is not a rank.) */
static dt_status dt__launch_without_launcher(dt_launch *out) {
    int batch = dt__launch_env("SLURM_PROCID") && !dt__launch_env("SLURM_STEP_ID");
    out->size = 1;
    snprintf(out->text, sizeof out->text, "not distributed: %s: one process",
        batch ? "a batch script of SLURM, where srun starts ranks"
              : "no launcher's variables are set");
    return dt__launch_override(out);
}

/* Launcher discovery: takes the first row of the table whose variables are set, takes missing
   values from other rows that name the same rank, then finds the rendezvous. */
static dt_status dt__launch_search(dt_launch *out) {
    const dt__launcher *same[DT__LAUNCHERS];
    dt_launch found;
    char names[80] = "", others[48] = "";
    int n = 0;
    for (int i = 0; i < DT__LAUNCHERS; i++) {
        dt_status status = dt__launch_read_row(&dt__launchers[i], n ? &found : out);
        if (status != DT_OK && n == 0) return status;
        if (status != DT_OK || (n ? &found : out)->size == 0) continue;
        if (n == 0) {
            memcpy(names, out->text, sizeof names - 1);
        } else if (found.rank != out->rank || found.size != out->size) {
            size_t used = strlen(others);
            snprintf(others + used, sizeof others - used, "%s%s", used ? ", " : "", found.launcher);
            continue;
        } else {
            if (out->local_size == 0) out->local_size = found.local_size;
            if (out->local_rank < 0) out->local_rank = found.local_rank;
        }
        same[n++] = &dt__launchers[i];
    }
    if (n == 0) return dt__launch_without_launcher(out);
    if (dt__launch_find_rendezvous(out, same, n) != DT_OK || dt__launch_override(out) != DT_OK)
        return DT_ERR_ARG;
    dt__launch_describe(out, names, others);
    return DT_OK;
}

DT_API dt_status dt_launch_find(dt_launch *out) {
    if (!out) return DT_ERR_ARG;
    dt_status status = dt__launch_search(out);
    dt__escape(out->text, sizeof out->text);
    if (status == DT_OK) return DT_OK;
    out->rank = 0; /* discovery failed: describe a process without a launcher */
    out->size = 1;
    out->local_rank = -1;
    out->local_size = 0;
    out->rendezvous[0] = out->launcher[0] = 0;
    return status;
}

// ==== 24. TCP ====================================================================================

/* Rendezvous and transport over TCP sockets, one connection per pair of ranks.

       rank 0                             rank i                              rank j < i
       listens at the rendezvous          connects to it, retrying
                                          listens at a free port
                                       <- hello: rank, address, nonce
       hello: nonce                    ->
                                       <- proof
       welcome: rank 0's own proof     ->
       all have connected: addresses   -> connects to each j, same handshake  -> ...

   Failed attempts are counted and do not block other connections. Data move only while the
   transport's function `test` runs (dt__tcp_test). Only the rendezvous and the end of a run wait,
   at most timeout_s. Numbers are sent in the machine's byte order. A rank with the other byte order
   is refused, because its version number does not match. Failure detection: a closed connection
   means a lost rank, and keepalive probes notice a vanished machine within about timeout_s. */

enum {
    DT__TCP_PORT = 29500,
    DT__TCP_VERSION = 2,
    DT__TCP_FRAME_MAGIC = 0x64744631, /* the first field of each frame */
    DT__TCP_INPUT_BYTES = 65536,      /* size of the input buffer for short frames */
    DT__TCP_READS_PER_POLL = 16,      /* maximum number of reads from one peer in one poll */
    /* A listener has DT__TCP_PENDING_SLOTS + 4 * ranks slots for pending connections, but at most
       DT__TCP_MAX_PENDING_SLOTS. */
    DT__TCP_PENDING_SLOTS = 256,
    DT__TCP_MAX_PENDING_SLOTS = 1024,
    /* maximum length of the queue for accept; if it is full, a connecting rank retries after a
       second */
    DT__TCP_BACKLOG = 4096,
    DT__TCP_MIN_TOKEN_BYTES = 16, /* minimum length of a token */
    DT__TCP_NAME_BYTES = 64,
    DT__TCP_TEXT_BYTES = 512
};
#define DT__TCP_MAX_MESSAGE_BYTES ((uint64_t)1 << 40) /* a frame with more bytes is malformed */
/* a pending connection without a valid proof is closed after this many seconds */
#define DT__TCP_PENDING_S 2.0
#define DT__TCP_SKEW_S 0.5 /* the ranks' timeouts may begin up to this many seconds apart */
/* a pending connection may be evicted only after it has sent no data for this many seconds */
#define DT__TCP_EVICT_SILENCE_S 0.03
/* a failed rank tries for at most this many seconds to send its abort to peers whose sockets are
   full */
#define DT__TCP_FLUSH_S 0.25
/* a failed rank waits at most this many seconds for the other ranks to read its abort */
#define DT__TCP_GRACE_S 0.75

static const char dt__tcp_magic[8] = { 'd', 't', ' ', 't', 'c', 'p', '\r', '\n' };

/* An IPv4 address in network byte order and a port in host byte order. */
typedef struct dt__tcp_address {
    uint32_t ip, port;
} dt__tcp_address;

enum { DT__TCP_HELLO = 1, DT__TCP_PROOF, DT__TCP_WELCOME, DT__TCP_REFUSED };
/* Why a rank is refused. The first two reasons are sent to every connecting rank, the others only
   to a rank whose proof is valid. */
enum {
    DT__TCP_WRONG_VERSION = 1,
    DT__TCP_WRONG_TOKEN,
    DT__TCP_WRONG_JOB,
    DT__TCP_WRONG_SIZE,
    DT__TCP_WRONG_RANK,
    DT__TCP_RANK_PRESENT
};

/* The handshake record. Until both proofs have been checked, no other data are sent. */
typedef struct dt__tcp_handshake {
    char magic[8];
    uint32_t version, kind;
    int32_t rank, size; /* the sender's rank and its job's size */
    int32_t pid, reason;
    dt__tcp_address address; /* the address where the sender listens */
    uint64_t job;            /* 0 if the sender connects to rank 0 and does not know the job yet */
    uint8_t nonce[32], proof[32];
    char host[DT__TCP_NAME_BYTES];
} dt__tcp_handshake;

/* Rank 0 sends this struct to every connected rank when all ranks have connected or the rendezvous
   has failed. Unless it has failed, the addresses of all ranks follow. */
typedef struct dt__tcp_table {
    uint32_t magic, failed;
    int32_t check, spare;          /* check: rank 0's dt_run_desc.check, which all ranks use */
    char text[DT__TCP_TEXT_BYTES]; /* if `failed` is set: why the rendezvous failed */
} dt__tcp_table;

typedef char dt__wait_report_fits[sizeof(dt__wait_report) <= DT__TCP_TEXT_BYTES ? 1 : -1];

/* After the rendezvous a connection carries frames. A frame is a header and a body:

       data    received into the buffer of a posted receive, or stored until a receive is posted
       abort   the sender has failed; dt__tcp_test then returns the abort's text
       bye     the sender has ended without a failure and will send nothing more
       report  a wait report (section 18) */
enum { DT__TCP_DATA = 1, DT__TCP_ABORT, DT__TCP_BYE, DT__TCP_REPORT };
typedef struct dt__tcp_frame {
    /* in an abort, `channel` is the rank that failed and `tag` is its status */
    uint32_t magic, kind, channel;
    int32_t tag;
    uint64_t bytes, word;
} dt__tcp_frame;

typedef struct dt__tcp_request {
    int is_receive, finished;
    int peer; /* the other rank; in a receive DT_ANY until the sender is known */
    /* 1 if the transport owns this send and its `data`: the send is a wait report, or was cancelled
       while its frame was partly written */
    int is_orphan;
    /* in a receive: channel and tag of the message to receive, and after a match also the
       message's bytes and word */
    dt__tcp_frame frame;
    const char *data;
    char *buf;
    size_t capacity; /* of a receive: size of buf in bytes */
    size_t written;  /* of a send: number of bytes of frame and data that have been written */
    /* next element of the list of sends, of posted receives or of unused requests */
    struct dt__tcp_request *next;
} dt__tcp_request;

/* An unexpected message, which means that it arrived before its receive was posted. The message's
   bytes follow the struct. */
typedef struct dt__tcp_message {
    int from, is_complete;
    dt__tcp_frame frame;
    dt__tcp_request *request; /* the receive that matched the message while it was incomplete */
    struct dt__tcp_message *next;
} dt__tcp_message;

/* A peer's state:

       OPEN    the peer has sent neither an abort nor a bye
       ENDED   the peer has sent an abort or a bye
       LOST    the connection closed before an abort or a bye
       BROKEN  the peer sent a malformed frame */
typedef enum dt__tcp_state {
    DT__TCP_OPEN = 0,
    DT__TCP_ENDED,
    DT__TCP_LOST,
    DT__TCP_BROKEN
} dt__tcp_state;

typedef struct dt__tcp_peer {
    int fd;                 /* -1: not connected */
    int rank, write_closed; /* write_closed: 1 if no more data can be sent to the peer */
    int pid, error;         /* error: errno of the call that found the connection lost */
    uint32_t received;      /* number of complete messages received from the peer */
    char host[DT__TCP_NAME_BYTES];
    dt__tcp_state state;
    dt__tcp_address address;
    dt__tcp_frame frame; /* header of the frame that is arriving */
    /* number of bytes of the header that have been received, and of the body that have not */
    size_t header_read, body_left;
    /* The body goes into a posted receive (target) or into an unexpected message. If both are NULL,
       a message's body is dropped. */
    dt__tcp_request *target;
    dt__tcp_message *message;
    char text[DT__TCP_TEXT_BYTES];           /* the body of an abort or of a wait report */
    dt__tcp_request *first_send, *last_send; /* queued sends, the oldest first */
    /* an abort or a bye, which is sent after the queued sends */
    char last_frame[sizeof(dt__tcp_frame) + DT__TCP_TEXT_BYTES];
    size_t last_frame_sent, last_frame_bytes;
} dt__tcp_peer;

typedef struct dt__tcp_pending {
    int fd;                      /* -1: a free slot */
    int hello_done;              /* 1 if both hellos have been exchanged */
    size_t received;             /* number of bytes of `record` that have been received */
    double last_heard, deadline; /* time of accept or of the last record; time to close */
    dt__tcp_address from;
    dt__tcp_handshake record, their_hello, our_hello; /* record: the one that is arriving */
} dt__tcp_pending;

typedef struct dt__tcp_listener { /* accepts connections of the ranks first_rank and higher */
    int fd, first_rank, slots;
    long rejected;
    dt__phrase last_rejection; /* why the last pending connection was rejected */
    dt__tcp_pending *pending;  /* (slots) */
} dt__tcp_listener;

typedef struct dt__tcp {
    /* report_ctx: the context whose world receives wait reports; NULL: none */
    dt_ctx *ctx, *report_ctx;
    const dt_host *host;
    int rank, size, check;
    double timeout_s;
    dt__stopwatch watch; /* runs since dt__tcp_make; all deadlines use this clock */
    dt__tcp_address rendezvous;
    uint64_t job; /* the job's random number, made by rank 0; 0 if this rank does not know it yet */
    uint8_t key[32], seed[32]; /* the HMAC key; the seed of the nonces */
    uint64_t nonce_count;
    dt__tcp_listener *listener;              /* NULL once all ranks are connected */
    dt__tcp_peer *peers;                     /* (size) */
    struct pollfd *polls;                    /* (size) */
    char *input;                             /* (DT__TCP_INPUT_BYTES) */
    dt__tcp_request *posted, *free_requests; /* posted: receives, the oldest first */
    /* address of the last `next` pointer of the list above; unset if the list is empty */
    dt__tcp_request **posted_end;
    dt__tcp_message *unexpected; /* messages without a posted receive, the oldest first */
    /* address of the last `next` pointer of the list above; unset if the list is empty */
    dt__tcp_message **unexpected_end;
    int busy, closing; /* busy: more than 0 while dt__tcp_progress must not read or write */
    /* number of requests in flight; number of tests since the last poll */
    int active_requests, skipped_tests;
    /* the request whose test made the last poll, if that poll found no socket ready; else NULL */
    dt__tcp_request *last_poller;
    int failed; /* 1 if this rank or another rank has failed */
    /* another rank's failure: its status, rank and text; this rank's own failure: rank and text */
    dt_report first_failure;
    char unreceived[160]; /* description of a message that arrived and was never received */
} dt__tcp;

/* ---- proofs: SHA-256 and HMAC ---- */

/* A proof is an HMAC-SHA256 over both hellos and the name of the side that proves its identity,
   keyed with the job's token. No one can make a proof without the token. A recorded proof is
   invalid in any other connection, and for the other side of the same connection. (NIST, FIPS
   180-4, 2015; H. Krawczyk et al., RFC 2104, 1997; the mutual scheme of ISO/IEC 9798-4.) A job
   whose rendezvous is a loopback address needs no token; the handshake then uses an empty token.
   Traffic after the handshake is neither encrypted nor signed, so proofs do not stop an attacker
   who can change packets in flight. */

/* Zeroes a secret that is no longer needed: the token, its key, or data that reveal them. The
   pointer is volatile, because a compiler drops a memset of memory that is not read again. */
static void dt__wipe(void *secret, size_t bytes) {
    volatile uint8_t *at = (volatile uint8_t *)secret;
    for (size_t i = 0; i < bytes; i++) at[i] = 0;
}

typedef struct dt__sha256 {
    uint32_t h[8];
    uint64_t bytes;
    uint8_t block[64];
} dt__sha256;

static uint32_t dt__rotate_right(uint32_t x, int bits) { return x >> bits | x << (32 - bits); }

static void dt__sha256_block(uint32_t h[8], const uint8_t block[64]) {
    /* the first 32 bits of the fractional parts of the cube roots of the first 64 primes */
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
        w[i] = w[i - 16] + (dt__rotate_right(a, 7) ^ dt__rotate_right(a, 18) ^ a >> 3) + w[i - 7] +
               (dt__rotate_right(b, 17) ^ dt__rotate_right(b, 19) ^ b >> 10);
    }
    memcpy(v, h, sizeof v);
    for (int i = 0; i < 64; i++) { /* v holds the standard's variables a to h */
        uint32_t e = v[4], a = v[0];
        uint32_t one =
            v[7] + (dt__rotate_right(e, 6) ^ dt__rotate_right(e, 11) ^ dt__rotate_right(e, 25)) +
            ((e & v[5]) ^ (~e & v[6])) + k[i] + w[i];
        uint32_t two =
            (dt__rotate_right(a, 2) ^ dt__rotate_right(a, 13) ^ dt__rotate_right(a, 22)) +
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
    static const uint32_t start[8] = { /* as k, but of the square roots of the first 8 primes */
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
    uint8_t short_key[32], inner[32]; /* digest cannot hold inner, because digest may be the key */
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

/* Returns 1 if the secrets are equal. The time of the comparison does not reveal where they first
   differ. */
static int dt__equal_secrets(const uint8_t *a, const uint8_t *b, size_t bytes) {
    volatile uint8_t differ = 0;
    for (size_t i = 0; i < bytes; i++) differ = (uint8_t)(differ | (a[i] ^ b[i]));
    return differ == 0;
}

/* ---- incoming frames ---- */

/* Records the failure in a peer's abort, unless a failure is already recorded. */
static void dt__tcp_record_abort(dt__tcp *t, const dt__tcp_peer *peer) {
    if (t->failed) return;
    t->failed = 1;
    t->first_failure.status = peer->frame.tag > 0 ? (dt_status)peer->frame.tag : DT_ERR_PEER;
    t->first_failure.rank = (int)peer->frame.channel;
    memcpy(t->first_failure.text, peer->text, sizeof t->first_failure.text - 1);
    t->first_failure.text[sizeof t->first_failure.text - 1] = 0;
    dt__escape(t->first_failure.text, sizeof t->first_failure.text);
}

static void dt__tcp_close_peer(dt__tcp_peer *peer, dt__tcp_state state) {
    if (peer->fd >= 0) close(peer->fd);
    peer->fd = -1;
    peer->write_closed = 1;
    if (peer->state == DT__TCP_OPEN) peer->state = state;
}

static int dt__tcp_matches(const dt__tcp_request *r, int from, const dt__tcp_frame *frame) {
    return (r->peer == DT_ANY || r->peer == from) && r->frame.channel == frame->channel &&
           r->frame.tag == frame->tag;
}

/* Removes and returns the oldest receive of the list `posted` that matches the message; NULL if no
   receive matches. */
static dt__tcp_request *dt__tcp_match_posted(dt__tcp *t, int from, const dt__tcp_frame *frame) {
    for (dt__tcp_request **link = &t->posted; *link; link = &(*link)->next) {
        dt__tcp_request *r = *link;
        if (!dt__tcp_matches(r, from, frame)) continue;
        *link = r->next;
        if (!*link) t->posted_end = link;
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

/* Appends an unexpected message. Returns NULL if the allocation fails; the context has then
   failed. */
static dt__tcp_message *dt__tcp_unexpected_add(dt__tcp *t, int from, const dt__tcp_frame *frame) {
    size_t bytes = dt__tcp_message_bytes(frame->bytes);
    t->busy++; /* if the allocation fails, dt__tcp_fail is called and must not read or write */
    dt__tcp_message *m =
        (dt__tcp_message *)dt_alloc(t->ctx, DT_MEM_HOST, bytes, "a message that came early");
    t->busy--;
    if (!m) return NULL;
    memset(m, 0, sizeof *m);
    m->from = from;
    m->frame = *frame;
    if (!t->unexpected) t->unexpected_end = &t->unexpected;
    *t->unexpected_end = m;
    t->unexpected_end = &m->next;
    return m;
}

static void dt__tcp_unexpected_remove(dt__tcp *t, dt__tcp_message *m) {
    dt__tcp_message **link = &t->unexpected;
    while (*link && *link != m) link = &(*link)->next;
    if (*link) *link = m->next;
    if (!*link) t->unexpected_end = link;
    dt_free(t->ctx, DT_MEM_HOST, m, dt__tcp_message_bytes(m->frame.bytes));
}

/* Copies a complete unexpected message into its receive. */
static void dt__tcp_deliver(dt__tcp *t, dt__tcp_message *m, dt__tcp_request *r) {
    size_t bytes = (size_t)m->frame.bytes < r->capacity ? (size_t)m->frame.bytes : r->capacity;
    if (bytes) memcpy(r->buf, m + 1, bytes);
    r->finished = 1;
    dt__tcp_unexpected_remove(t, m);
}

/* Checks the complete header of a frame and chooses where its body goes. Returns 0 if the header is
   malformed. */
static int dt__tcp_begin_frame(dt__tcp *t, dt__tcp_peer *peer) {
    const dt__tcp_frame *f = &peer->frame;
    uint64_t max_bytes = f->kind == DT__TCP_DATA    ? DT__TCP_MAX_MESSAGE_BYTES
                         : f->kind == DT__TCP_ABORT ? DT__TCP_TEXT_BYTES - 1
                                                    : 0;
    int known = f->kind >= DT__TCP_DATA && f->kind <= DT__TCP_REPORT;
    if (f->kind == DT__TCP_REPORT && f->bytes == sizeof(dt__wait_report)) max_bytes = f->bytes;
    if (f->magic != DT__TCP_FRAME_MAGIC || !known || f->bytes > max_bytes ||
        f->bytes > (size_t)-1 / 2)
        return 0;
    if (f->kind == DT__TCP_DATA && f->tag < 0) return 0;
    if (f->kind == DT__TCP_ABORT && f->channel >= (uint32_t)t->size) return 0;
    peer->body_left = (size_t)f->bytes;
    peer->target = NULL;
    peer->message = NULL;
    memset(peer->text, 0, sizeof peer->text);
    if (f->kind != DT__TCP_DATA) return 1;
    peer->target = dt__tcp_match_posted(t, peer->rank, f);
    if (peer->target || t->failed) return 1;
    if (t->closing)
        snprintf(t->unreceived, sizeof t->unreceived, "%zu bytes with tag %d from rank %d",
            peer->body_left, f->tag, peer->rank);
    else
        peer->message = dt__tcp_unexpected_add(t, peer->rank, f);
    return 1;
}

/* Processes a complete frame: finishes its receive, records an abort, or delivers a wait report. */
static void dt__tcp_finish_frame(dt__tcp *t, dt__tcp_peer *peer) {
    dt__tcp_message *m = peer->message;
    if (peer->target) peer->target->finished = 1;
    if (m) m->is_complete = 1;
    if (m && m->request) dt__tcp_deliver(t, m, m->request);
    if (peer->frame.kind == DT__TCP_ABORT) dt__tcp_record_abort(t, peer);
    if (peer->frame.kind == DT__TCP_DATA) peer->received++;
    if (peer->frame.kind == DT__TCP_REPORT)
        dt__receive_wait_report(dt__world_of(t->report_ctx), peer->rank, peer->text);
    else if (peer->frame.kind != DT__TCP_DATA)
        peer->state = DT__TCP_ENDED;
    peer->target = NULL;
    peer->message = NULL;
    peer->header_read = 0;
}

/* Returns the address to which the next bytes of the frame's body are written and sets *capacity to
   the number of bytes that fit there. Returns NULL if the next *capacity bytes are dropped. */
static char *dt__tcp_body_target(dt__tcp_peer *peer, size_t *capacity) {
    size_t done = (size_t)peer->frame.bytes - peer->body_left;
    *capacity = peer->body_left;
    if (peer->frame.kind == DT__TCP_ABORT || peer->frame.kind == DT__TCP_REPORT)
        return peer->text + done;
    if (peer->message) return (char *)(peer->message + 1) + done;
    if (!peer->target || done >= peer->target->capacity) return NULL;
    if (*capacity > peer->target->capacity - done) *capacity = peer->target->capacity - done;
    return peer->target->buf + done;
}

/* Parses n bytes that were read from the peer. Returns 0 if a frame is malformed. */
static int dt__tcp_parse(dt__tcp *t, dt__tcp_peer *peer, const char *bytes, size_t n) {
    while (n > 0) {
        size_t capacity = sizeof peer->frame - peer->header_read, count;
        char *dst = (char *)&peer->frame + peer->header_read;
        int in_head = capacity > 0;
        if (!in_head) dst = dt__tcp_body_target(peer, &capacity);
        count = n < capacity ? n : capacity;
        if (dst) memcpy(dst, bytes, count);
        bytes += count;
        n -= count;
        if (in_head)
            peer->header_read += count;
        else
            peer->body_left -= count;
        if (in_head && peer->header_read < sizeof peer->frame) return 1;
        if (in_head && !dt__tcp_begin_frame(t, peer)) return 0;
        if (peer->body_left == 0) dt__tcp_finish_frame(t, peer);
    }
    return 1;
}

/* Reads the bytes that have arrived at the socket. */
static void dt__tcp_read(dt__tcp *t, dt__tcp_peer *peer) {
    for (int reads = 0; reads < DT__TCP_READS_PER_POLL && peer->fd >= 0; reads++) {
        size_t capacity = 0;
        char *dst =
            peer->header_read == sizeof peer->frame ? dt__tcp_body_target(peer, &capacity) : NULL;
        int direct = dst && capacity >= DT__TCP_INPUT_BYTES; /* 1: read into dst, without a copy */
        if (!direct) capacity = DT__TCP_INPUT_BYTES;
        ssize_t n = recv(peer->fd, direct ? dst : t->input, capacity, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (n <= 0) {
            if (n < 0 && !peer->error) peer->error = errno;
            dt__tcp_close_peer(peer, DT__TCP_LOST);
        } else if (direct) {
            peer->body_left -= (size_t)n;
            if (peer->body_left == 0) dt__tcp_finish_frame(t, peer);
        } else if (!dt__tcp_parse(t, peer, t->input, (size_t)n)) {
            dt__tcp_close_peer(peer, DT__TCP_BROKEN);
        }
    }
}

/* ---- outgoing frames ---- */

static void dt__tcp_release(dt__tcp *t, dt__tcp_request *r) {
    if (t->last_poller == r) t->last_poller = NULL;
    if (!r->is_orphan) t->active_requests--;
    if (r->is_orphan)
        t->host->free(t->host->user, (void *)r->data, (size_t)r->frame.bytes + 1, DT_MEM_HOST);
    r->next = t->free_requests;
    t->free_requests = r;
}

static void dt__tcp_unqueue(dt__tcp_peer *peer, const dt__tcp_request *r) {
    dt__tcp_request *before = NULL, *at = peer->first_send;
    for (; at && at != r; at = at->next) before = at;
    if (!at) return;
    if (before)
        before->next = r->next;
    else
        peer->first_send = r->next;
    if (peer->last_send == r) peer->last_send = before;
}

/* Writes as many bytes of the header and the body as fit into the socket's buffer, and returns
   their number. Returns a negative number if no byte fits now or the connection is lost. A loss
   sets peer->write_closed, but data that the peer sent earlier may still be read. */
static ssize_t dt__tcp_write_pieces(
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
        peer->write_closed = 1;
        peer->error = errno;
    }
    return n;
}

/* Writes the queued sends in order, then the last frame, until the socket's buffer is full. */
static void dt__tcp_write(dt__tcp *t, dt__tcp_peer *peer) {
    const size_t head = sizeof(dt__tcp_frame);
    while (!peer->write_closed && peer->first_send) {
        dt__tcp_request *r = peer->first_send;
        size_t in_head = r->written < head ? r->written : head, in_data = r->written - in_head;
        ssize_t n = dt__tcp_write_pieces(peer, (char *)&r->frame + in_head, head - in_head,
            r->data + in_data, (size_t)r->frame.bytes - in_data);
        if (n < 0) return;
        r->written += (size_t)n;
        if (r->written < head + (size_t)r->frame.bytes) continue;
        r->finished = 1;
        dt__tcp_unqueue(peer, r);
        if (r->is_orphan) dt__tcp_release(t, r);
    }
    while (!peer->write_closed && peer->last_frame_sent < peer->last_frame_bytes) {
        ssize_t n = dt__tcp_write_pieces(peer, peer->last_frame + peer->last_frame_sent,
            peer->last_frame_bytes - peer->last_frame_sent, NULL, 0);
        if (n < 0) return;
        peer->last_frame_sent += (size_t)n;
    }
}

static int dt__tcp_has_output(const dt__tcp_peer *peer) {
    return !peer->write_closed &&
           (peer->first_send || peer->last_frame_sent < peer->last_frame_bytes);
}

/* Polls all sockets once, and reads and writes those that are ready. Returns 1 if any was ready. */
static int dt__tcp_progress(dt__tcp *t) {
    if (t->busy) return 0;
    for (int rank = 0; rank < t->size; rank++) {
        dt__tcp_peer *peer = &t->peers[rank];
        t->polls[rank].fd = peer->fd; /* poll skips descriptors below 0 */
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

/* Queues an abort or a bye as the last frame to a peer. Drops the queued sends of which no byte has
   been written. */
static void dt__tcp_queue_last_frame(
    dt__tcp *t, dt__tcp_peer *peer, uint32_t kind, dt_status status, const char *text) {
    dt__tcp_frame frame;
    size_t bytes = strlen(text);
    memset(&frame, 0, sizeof frame);
    if (bytes > DT__TCP_TEXT_BYTES - 1) bytes = DT__TCP_TEXT_BYTES - 1;
    frame.magic = DT__TCP_FRAME_MAGIC;
    frame.kind = kind;
    frame.channel = (uint32_t)t->rank;
    frame.tag = (int32_t)status;
    frame.bytes = bytes;
    memcpy(peer->last_frame, &frame, sizeof frame);
    memcpy(peer->last_frame + sizeof frame, text, bytes);
    peer->last_frame_sent = 0;
    peer->last_frame_bytes = sizeof frame + bytes;
    dt__tcp_request **rest = peer->first_send && peer->first_send->written > 0
                                 ? &peer->first_send->next
                                 : &peer->first_send;
    for (dt__tcp_request *r = *rest, *next; r; r = next) {
        next = r->next;
        if (r->is_orphan) dt__tcp_release(t, r); /* no caller has a pointer to this send */
    }
    *rest = NULL;
    peer->last_send = peer->first_send;
    dt__tcp_write(t, peer);
}

/* ---- the functions of the transport ---- */

static dt__tcp_request *dt__tcp_request_make(
    dt__tcp *t, int peer, uint32_t channel, int tag, size_t bytes) {
    dt__tcp_request *r = t->free_requests;
    if (r)
        t->free_requests = r->next;
    else
        r = (dt__tcp_request *)dt_alloc(t->ctx, DT_MEM_HOST, sizeof *r, "a request");
    if (!r) return NULL;
    memset(r, 0, sizeof *r);
    r->peer = peer;
    r->frame.magic = DT__TCP_FRAME_MAGIC;
    r->frame.kind = DT__TCP_DATA;
    r->frame.channel = channel;
    r->frame.tag = (int32_t)tag;
    r->frame.bytes = bytes;
    t->active_requests++;
    return r;
}

/* Delivers a message that the rank sends to itself. */
static void dt__tcp_send_self(dt__tcp *t, dt__tcp_request *r) {
    dt__tcp_request *receive = dt__tcp_match_posted(t, t->rank, &r->frame);
    dt__tcp_message *m = receive ? NULL : dt__tcp_unexpected_add(t, t->rank, &r->frame);
    char *to = receive ? receive->buf : (char *)(m + 1);
    size_t bytes = (size_t)r->frame.bytes;
    if (!receive && !m) return;
    t->peers[t->rank].received++;
    if (receive && bytes > receive->capacity) bytes = receive->capacity;
    if (bytes) memcpy(to, r->data, bytes);
    if (receive)
        receive->finished = 1;
    else
        m->is_complete = 1;
    r->finished = 1;
}

static void *dt__tcp_send(
    void *user, int to, uint32_t channel, int tag, uint64_t word, const void *buf, size_t bytes) {
    dt__tcp *t = (dt__tcp *)user;
    dt__tcp_request *r = to < 0 || to >= t->size || tag < 0 || bytes > DT__TCP_MAX_MESSAGE_BYTES
                             ? NULL
                             : dt__tcp_request_make(t, to, channel, tag, bytes);
    if (!r) return NULL;
    r->data = (const char *)buf;
    r->frame.word = word;
    dt__tcp_peer *peer = &t->peers[to];
    if (t->failed || peer->state != DT__TCP_OPEN) return r; /* dt__tcp_test returns the failure */
    if (to == t->rank) {
        dt__tcp_send_self(t, r);
        return r;
    }
    if (peer->first_send)
        peer->last_send->next = r;
    else
        peer->first_send = r;
    peer->last_send = r;
    dt__tcp_write(t, peer);
    return r;
}

static void *dt__tcp_recv(
    void *user, int from, uint32_t channel, int tag, void *buf, size_t bytes) {
    dt__tcp *t = (dt__tcp *)user;
    dt__tcp_request *r =
        from < DT_ANY || from >= t->size ? NULL : dt__tcp_request_make(t, from, channel, tag, 0);
    if (!r) return NULL;
    r->is_receive = 1;
    r->buf = (char *)buf;
    r->capacity = bytes;
    for (dt__tcp_message *m = t->unexpected; m; m = m->next) {
        if (m->request || !dt__tcp_matches(r, m->from, &m->frame)) continue;
        r->peer = m->from;
        r->frame.word = m->frame.word;
        r->frame.bytes = m->frame.bytes;
        m->request = r;
        if (m->is_complete) dt__tcp_deliver(t, m, r);
        return r;
    }
    if (!t->posted) t->posted_end = &t->posted;
    *t->posted_end = r;
    t->posted_end = &r->next;
    return r;
}

/* Sends a wait report to all other ranks; the transport owns the copies. If the last queued send to
   a peer is an older report that has not been written yet, the new report replaces it. */
static void dt__tcp_send_report(void *user, const void *report, size_t bytes) {
    dt__tcp *t = (dt__tcp *)user;
    for (int rank = 0; rank < t->size && !t->failed; rank++) {
        dt__tcp_peer *peer = &t->peers[rank];
        if (peer->fd < 0 || peer->write_closed || peer->state != DT__TCP_OPEN ||
            peer->last_frame_bytes)
            continue;
        if (peer->first_send && peer->last_send->frame.kind == DT__TCP_REPORT &&
            peer->last_send->written == 0) {
            memcpy((char *)peer->last_send->data, report, bytes);
            continue;
        }
        char *copy = (char *)t->host->alloc(t->host->user, bytes + 1, DT_MEM_HOST);
        dt__tcp_request *r = copy ? dt__tcp_request_make(t, rank, 0, 0, bytes) : NULL;
        if (!r) {
            if (copy) t->host->free(t->host->user, copy, bytes + 1, DT_MEM_HOST);
            return;
        }
        memcpy(copy, report, bytes);
        r->frame.kind = DT__TCP_REPORT;
        r->data = copy;
        r->is_orphan = 1;
        t->active_requests--;
        if (peer->first_send)
            peer->last_send->next = r;
        else
            peer->first_send = r;
        peer->last_send = r;
        dt__tcp_write(t, peer);
    }
}

static uint32_t dt__tcp_arrived(void *user, int rank) {
    return ((const dt__tcp *)user)->peers[rank].received;
}

static int dt__tcp_pid(void *user, int rank) {
    const dt__tcp *t = (const dt__tcp *)user;
    char name[DT__TCP_NAME_BYTES] = "";
    if (gethostname(name, sizeof name - 1) != 0) return 0;
    return strncmp(name, t->peers[rank].host, sizeof name - 1) == 0 ? t->peers[rank].pid : 0;
}

/* Cancels a send whose frame is partly written. The rest of the frame must still be sent, else the
   peer could not read the next frame. The caller may reuse its buffer, so the rest is copied. */
static void dt__tcp_orphan(dt__tcp *t, dt__tcp_peer *peer, dt__tcp_request *r) {
    size_t bytes = (size_t)r->frame.bytes, head = sizeof r->frame,
           gone = r->written > head ? r->written - head : 0;
    char *copy = (char *)t->host->alloc(t->host->user, bytes + 1, DT_MEM_HOST);
    if (!copy) {
        dt__tcp_unqueue(peer, r);
        dt__tcp_close_peer(peer, DT__TCP_LOST);
        dt__tcp_release(t, r);
        return;
    }
    if (bytes > gone) memcpy(copy + gone, r->data + gone, bytes - gone);
    r->data = copy;
    r->is_orphan = 1;
    t->active_requests--;
    if (t->last_poller == r) t->last_poller = NULL;
}

static void dt__tcp_cancel(void *user, void *request) {
    dt__tcp *t = (dt__tcp *)user;
    dt__tcp_request *r = (dt__tcp_request *)request;
    dt__tcp_peer *peer = r->peer == DT_ANY ? NULL : &t->peers[r->peer];
    if (!r->is_receive && peer->first_send == r && r->written > 0 && !peer->write_closed) {
        dt__tcp_orphan(t, peer, r);
        return;
    }
    if (!r->is_receive) dt__tcp_unqueue(peer, r);
    for (dt__tcp_request **at = &t->posted; *at; at = &(*at)->next) {
        if (*at != r) continue;
        *at = r->next;
        if (!*at) t->posted_end = at;
        break;
    }
    if (peer && peer->target == r) peer->target = NULL; /* the rest of the body is dropped */
    for (dt__tcp_message *m = t->unexpected; m; m = m->next) {
        if (m->request != r) continue;
        if (peer && peer->message == m) peer->message = NULL;
        dt__tcp_unexpected_remove(t, m);
        break;
    }
    dt__tcp_release(t, r);
}

/* Returns a text such as "rank 3 (process 4711 on node7)". */
static dt__phrase dt__tcp_peer_text(const dt__tcp *t, int rank) {
    dt__phrase text;
    const dt__tcp_peer *peer = &t->peers[rank];
    if (peer->pid > 0)
        snprintf(text.s, sizeof text.s, "rank %d (process %d on %s)", rank, peer->pid, peer->host);
    else
        snprintf(text.s, sizeof text.s, "rank %d", rank);
    return text;
}

/* Returns a text such as "connection to rank 3 (process 4711 on node7) was lost: its machine does
   not answer". */
static dt__phrase dt__tcp_loss_text(const dt__tcp *t, int rank) {
    dt__phrase text;
    size_t at = 0;
    const dt__tcp_peer *peer = &t->peers[rank];
    dt__append(
        text.s, sizeof text.s, &at, "connection to %s was lost", dt__tcp_peer_text(t, rank).s);
    if (peer->state == DT__TCP_BROKEN)
        dt__append(text.s, sizeof text.s, &at, ": it sent a malformed frame");
    if (peer->error == ETIMEDOUT || peer->error == EHOSTUNREACH || peer->error == ENETUNREACH)
        dt__append(text.s, sizeof text.s, &at, ": its machine does not answer");
    return text;
}

/* Failure detection. Returns 0 if the request can still finish, else the negative value that
   dt_transport's function `test` returns. Once any rank is lost, no request can finish, even if its
   peer is another rank: that peer may itself be waiting for the lost rank. */
static int dt__tcp_cannot_finish(const dt__tcp *t, const dt__tcp_request *r, char *why) {
    int ended = 0, any = r->is_receive && r->peer == DT_ANY;
    if (t->failed) return snprintf(why, DT__TCP_TEXT_BYTES, "%s", t->first_failure.text), -3;
    for (int rank = 0; rank < t->size; rank++) {
        if (t->peers[rank].state > DT__TCP_ENDED)
            return snprintf(why, DT__TCP_TEXT_BYTES, "%s", dt__tcp_loss_text(t, rank).s), -1;
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
    /* One poll serves all requests. Poll again only if the last poll found a ready socket, if this
       request made the last poll, or after as many tests as there are requests in flight. */
    if (!r->finished &&
        (!t->last_poller || t->last_poller == r || t->skipped_tests++ >= t->active_requests)) {
        t->skipped_tests = 0;
        t->last_poller = dt__tcp_progress(t) ? NULL : r;
    }
    if (r->finished) {
        *from = r->peer;
        *word = r->frame.word;
        *bytes = (size_t)r->frame.bytes;
        dt__tcp_release(t, r);
        return 1;
    }
    int hopeless = dt__tcp_cannot_finish(t, r, why);
    if (hopeless) dt__tcp_cancel(t, r);
    return hopeless;
}

static int dt__tcp_poll_failures(void *user, char *why) {
    dt__tcp *t = (dt__tcp *)user;
    dt__tcp_progress(t);
    if (t->failed) return snprintf(why, DT__TCP_TEXT_BYTES, "%s", t->first_failure.text), -3;
    for (int rank = 0; rank < t->size; rank++)
        if (t->peers[rank].state > DT__TCP_ENDED)
            return snprintf(why, DT__TCP_TEXT_BYTES, "%s", dt__tcp_loss_text(t, rank).s), -1;
    return 0;
}

static double dt__tcp_now(dt__tcp *t) { return dt__waited(&t->watch); }
static void dt__tcp_nap(const dt__tcp *t, double seconds) {
    t->host->sleep(t->host->user, seconds);
}

/* Sends an abort to all other ranks, unless this rank or another rank has failed before. */
static void dt__tcp_abort(dt__tcp *t, dt_status status, const char *text) {
    int left = 1;
    if (t->failed) return; /* the other ranks know of this or an earlier failure */
    t->failed = 1;
    t->first_failure.rank = t->rank;
    snprintf(t->first_failure.text, sizeof t->first_failure.text, "%s", text);
    for (int rank = 0; rank < t->size; rank++) {
        if (t->peers[rank].fd >= 0)
            dt__tcp_queue_last_frame(t, &t->peers[rank], DT__TCP_ABORT, status, text);
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
    dt__tcp_abort(t, dt_error(t->ctx), text);
}

/* ---- sockets ---- */

static dt__phrase dt__tcp_address_text(dt__tcp_address address) {
    dt__phrase text;
    uint8_t octet[4];
    memcpy(octet, &address.ip, sizeof octet);
    snprintf(text.s, sizeof text.s, "%d.%d.%d.%d:%u", octet[0], octet[1], octet[2], octet[3],
        (unsigned)address.port);
    return text;
}

static int dt__tcp_is_loopback(dt__tcp_address address) {
    uint8_t octet[4];
    memcpy(octet, &address.ip, sizeof octet);
    return octet[0] == 127;
}

/* Returns the address of this machine's first running interface that is not a loopback interface; 0
   if there is none. */
static uint32_t dt__tcp_interface_address(void) {
    struct ifaddrs *all = NULL;
    dt__tcp_address address = { 0, 0 };
    if (getifaddrs(&all) != 0) return 0;
    for (const struct ifaddrs *one = all; one && !address.ip; one = one->ifa_next) {
        struct sockaddr_in at;
        if (!one->ifa_addr || one->ifa_addr->sa_family != AF_INET ||
            !(one->ifa_flags & IFF_RUNNING))
            continue;
        memcpy(&at, one->ifa_addr, sizeof at);
        address.ip = (uint32_t)at.sin_addr.s_addr;
        if (dt__tcp_is_loopback(address)) address.ip = 0;
    }
    freeifaddrs(all);
    return address.ip;
}

/* Returns the address of a host name; 0 on failure. Many machines resolve their own name to a
   loopback address, which no other machine can reach. The function then returns the address of an
   interface of this machine, if there is one. */
static uint32_t dt__tcp_resolve(const char *name) {
    struct addrinfo hints, *found = NULL;
    dt__tcp_address address = { 0, 0 };
    memset(&hints, 0, sizeof hints);
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    /* getaddrinfo would resolve "1.2" to 1.0.0.2 */
    if (strspn(name, "0123456789.") == strlen(name)) return 0;
    if (getaddrinfo(name, NULL, &hints, &found) != 0) return 0;
    struct sockaddr_in at;
    memcpy(&at, found->ai_addr, sizeof at);
    address.ip = (uint32_t)at.sin_addr.s_addr;
    freeaddrinfo(found);
    if (!dt__tcp_is_loopback(address)) return address.ip;
    uint32_t interface = dt__tcp_interface_address();
    return interface ? interface : address.ip;
}

/* Parses "127.0.0.1:29500", "localhost:29500", "node17:29500", or the same without a port. Returns
   0 on failure. */
static int dt__tcp_address_parse(const char *text, dt__tcp_address *address) {
    char host[256] = "127.0.0.1";
    const char *colon = text ? strchr(text, ':') : NULL;
    size_t length = text ? (colon ? (size_t)(colon - text) : strlen(text)) : 0;
    struct in_addr parsed;
    address->port = colon ? 0 : DT__TCP_PORT;
    for (const char *digit = colon ? colon + 1 : ""; *digit; digit++) {
        if (*digit < '0' || *digit > '9' || address->port > 65535) return 0;
        address->port = 10 * address->port + (uint32_t)(*digit - '0');
    }
    if (length >= sizeof host || address->port == 0 || address->port > 65535) return 0;
    if (length > 0) {
        memcpy(host, text, length);
        host[length] = 0;
    }
    if (inet_pton(AF_INET, strcmp(host, "localhost") == 0 ? "127.0.0.1" : host, &parsed) == 1)
        address->ip = (uint32_t)parsed.s_addr;
    else
        address->ip = dt__tcp_resolve(host);
    return address->ip != 0 || strcmp(host, "0.0.0.0") == 0;
}

/* ---- the token ---- */

/* Reads the token from a file, without trailing white space. On failure writes the reason to `why`.
   Refuses a file that other users may read, because those users could join the job. */
static void dt__tcp_token_file(
    const char *path, char *token, size_t capacity, size_t *bytes, char *why) {
    struct stat info;
    int fd = dt__io_open(NULL, path, DT_IO_READ);
    ssize_t n = -1;
    if (fd < 0 || fstat(fd, &info) != 0)
        snprintf(why, DT__TCP_TEXT_BYTES,
            "the token's file DT_TOKEN_FILE=%.200s cannot be opened: %s", path, dt__io_reason());
    else if (info.st_mode & 077)
        snprintf(why, DT__TCP_TEXT_BYTES,
            "others than its owner may use the token's file DT_TOKEN_FILE=%.200s (mode %03o): "
            "chmod 600",
            path, (unsigned)info.st_mode & 0777);
    else if ((n = read(fd, token, capacity)) < 0 || (size_t)n == capacity)
        snprintf(why, DT__TCP_TEXT_BYTES, "DT_TOKEN_FILE=%.200s is not a token file", path);
    if (fd >= 0) close(fd);
    while (n > 0 && (token[n - 1] == '\n' || token[n - 1] == '\r' || token[n - 1] == ' ')) n--;
    *bytes = n > 0 ? (size_t)n : 0;
}

/* Computes the key of the proofs (HMAC) from the token. The caller must wipe the key. Returns 0 if
   the token is missing or invalid; `why` (DT__TCP_TEXT_BYTES) then says what is wrong. */
static int dt__tcp_key(
    const dt_run_desc *desc, dt__tcp_address address, uint8_t key[32], char *why) {
    char buffer[4096];
    const char *token = desc->token, *from = "dt_run_desc.token", *path = getenv("DT_TOKEN_FILE");
    size_t bytes = token ? strlen(token) : 0;
    why[0] = 0;
    if (!token && path && path[0]) {
        from = "DT_TOKEN_FILE";
        token = buffer;
        dt__tcp_token_file(path, buffer, sizeof buffer, &bytes, why);
    } else if (!token && getenv("DT_TOKEN") && getenv("DT_TOKEN")[0]) {
        from = "DT_TOKEN";
        token = getenv("DT_TOKEN");
        bytes = strlen(token);
    }
    if (token && bytes < DT__TCP_MIN_TOKEN_BYTES && !why[0])
        snprintf(why, DT__TCP_TEXT_BYTES, "the token of %s has %zu bytes; it needs at least %d",
            from, bytes, (int)DT__TCP_MIN_TOKEN_BYTES);
    if (!token && !dt__tcp_is_loopback(address) && desc->ranks > 1)
        snprintf(why, DT__TCP_TEXT_BYTES,
            "the rendezvous %s can be reached from other machines, so ranks must prove "
            "that they belong to the job, and there is no token. Make one: head -c 32 /dev/urandom "
            "| "
            "base64 > token; chmod 600 token; and start each rank with DT_TOKEN_FILE=token",
            dt__tcp_address_text(address).s);
    if (!why[0]) dt__sha256_of(token, bytes, key);
    dt__wipe(buffer, sizeof buffer);
    return !why[0];
}

static struct sockaddr_in dt__tcp_sockaddr(dt__tcp_address address) {
    struct sockaddr_in at;
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = address.ip;
    at.sin_port = htons((uint16_t)address.port);
    return at;
}

/* Makes a socket nonblocking and close-on-exec, and lets it send small messages without delay
   (TCP_NODELAY). Returns 0 on failure. */
static int dt__tcp_set_up(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fcntl(fd, F_SETFD, FD_CLOEXEC) == 0 &&
           fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) == 0;
}

#if defined(__linux__) && !defined(TCP_RTO_MAX_MS)
#define TCP_RTO_MAX_MS 44 /* since Linux 6.15; older headers lack the name, older kernels fail */
#endif

/* Heartbeat. With TCP keepalive probes the kernel notices within timeout_s + 1 s that a peer's
   machine has vanished. It sends up to 8 probes, because a probe may be lost. (TCP_USER_TIMEOUT is
   not used: it would also close a connection to a rank that computes for a long time without
   reading. For data in flight it is not needed either, because the rank that waits for the data has
   its own timeout.)

   TCP retransmits after 0.2 s, 0.4 s, 0.8 s, ..., so a network partition of 3.1 s may interrupt a
   connection for 6.2 s. Where the kernel allows it, the function caps the time between two
   retransmissions at timeout_s / 8, but at least 1 s. (A lower cap would be too short, because the
   kernel closes a connection after 15 retransmissions.) */
static void dt__tcp_set_keepalive(int fd, double timeout_s) {
    int one = 1, total_s = 1 + (timeout_s < 32000 ? (int)timeout_s : 32000);
    int interval_s = 1 + total_s / 16, max_probes = (total_s - 1) / interval_s,
        probes = max_probes < 1   ? 1
                 : max_probes < 8 ? max_probes
                                  : 8;
    int idle_s = total_s > probes * interval_s ? total_s - probes * interval_s : 1;
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
#ifdef TCP_RTO_MAX_MS
    int pause_ms = timeout_s < 8 ? 1000 : timeout_s > 960 ? 120000 : (int)(timeout_s * 125);
    setsockopt(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, &pause_ms, sizeof pause_ms);
#endif
#ifdef TCP_KEEPIDLE
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
#else
    (void)idle_s, (void)probes, (void)interval_s;
#endif
}

/* Returns the local address of a connection or of a listening socket; zeros on failure. */
static dt__tcp_address dt__tcp_own_address(int fd) {
    struct sockaddr_in at;
    socklen_t length = sizeof at;
    dt__tcp_address address = { 0, 0 };
    memset(&at, 0, sizeof at);
    if (getsockname(fd, (struct sockaddr *)&at, &length) != 0) return address;
    address.ip = (uint32_t)at.sin_addr.s_addr;
    address.port = ntohs(at.sin_port);
    return address;
}

/* Returns a socket that listens at the address; if its port is 0, at any free port. Returns -1 with
   errno set on failure. */
static int dt__tcp_listen(dt__tcp_address address, int backlog) {
    struct sockaddr_in at = dt__tcp_sockaddr(address);
    int one = 1, fd = dt__io_guard_std_fds() == 0 ? socket(AF_INET, SOCK_STREAM, 0) : -1;
    if (fd < 0) return -1;
    /* connections of an earlier job to this port may still be in state TIME_WAIT */
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (dt__tcp_set_up(fd) && bind(fd, (struct sockaddr *)&at, sizeof at) == 0 &&
        listen(fd, backlog) == 0)
        return fd;
    int reason = errno;
    close(fd);
    errno = reason;
    return -1;
}

/* ---- handshake records ---- */

/* Derives the next nonce, 32 unpredictable bytes, from the seed. */
static void dt__tcp_nonce(dt__tcp *t, uint8_t nonce[32]) {
    t->nonce_count++;
    dt__hmac(t->seed, sizeof t->seed, &t->nonce_count, sizeof t->nonce_count, nonce);
}

static dt__tcp_handshake dt__tcp_handshake_make(dt__tcp *t, uint32_t kind) {
    dt__tcp_handshake record;
    memset(&record, 0, sizeof record);
    memcpy(record.magic, dt__tcp_magic, sizeof record.magic);
    record.version = DT__TCP_VERSION;
    record.kind = kind;
    record.rank = t->rank;
    record.size = t->size;
    record.pid = (int32_t)getpid();
    record.address = dt__tcp_own_address(t->listener->fd);
    record.job = t->job;
    if (gethostname(record.host, sizeof record.host - 1) != 0) record.host[0] = 0;
    if (kind == DT__TCP_HELLO) dt__tcp_nonce(t, record.nonce);
    return record;
}

/* Computes the proof of one side: "caller" is the rank that connects, "host" the rank that accepts
   the connection. */
static void dt__tcp_prove(const dt__tcp *t, const char *side, const dt__tcp_handshake *caller,
    const dt__tcp_handshake *host, uint8_t proof[32]) {
    struct {
        char side[16];
        dt__tcp_handshake caller, host;
    } transcript;
    memset(&transcript, 0, sizeof transcript);
    snprintf(transcript.side, sizeof transcript.side, "dt tcp %s", side);
    transcript.caller = *caller;
    transcript.host = *host;
    dt__hmac(t->key, sizeof t->key, &transcript, sizeof transcript, proof);
}

static int dt__tcp_is_proof(const dt__tcp *t, const char *side, const dt__tcp_handshake *caller,
    const dt__tcp_handshake *host, const uint8_t proof[32]) {
    uint8_t want[32];
    dt__tcp_prove(t, side, caller, host, want);
    return dt__equal_secrets(want, proof, sizeof want);
}

/* Copies the host name that the peer sent. The name is escaped, because the peer is not yet
   authenticated. */
static void dt__tcp_host_name(char name[DT__TCP_NAME_BYTES], const char sent[DT__TCP_NAME_BYTES]) {
    memcpy(name, sent[0] ? sent : "?", sent[0] ? DT__TCP_NAME_BYTES : 2);
    name[DT__TCP_NAME_BYTES - 1] = 0;
    dt__escape(name, DT__TCP_NAME_BYTES);
}

/* Returns the text that says why `host` refuses `caller`. */
static dt__phrase dt__tcp_reason(const dt__tcp_handshake *caller, const dt__tcp_handshake *host) {
    dt__phrase text;
    char name[DT__TCP_NAME_BYTES];
    snprintf(text.s, sizeof text.s, "reason %d", host->reason);
    if (host->reason == DT__TCP_WRONG_VERSION)
        snprintf(text.s, sizeof text.s, "version %u of the protocol, not %u", caller->version,
            host->version);
    if (host->reason == DT__TCP_WRONG_TOKEN)
        snprintf(text.s, sizeof text.s, "the token is not this job's");
    if (host->reason == DT__TCP_WRONG_JOB)
        snprintf(text.s, sizeof text.s, "it belongs to another job");
    if (host->reason == DT__TCP_WRONG_SIZE)
        snprintf(text.s, sizeof text.s, "its job has %d ranks, this one has %d", caller->size,
            host->size);
    if (host->reason == DT__TCP_WRONG_RANK)
        snprintf(text.s, sizeof text.s, "rank %d is not expected here", caller->rank);
    dt__tcp_host_name(name, host->host);
    if (host->reason == DT__TCP_RANK_PRESENT)
        snprintf(text.s, sizeof text.s, "rank %d is already connected: process %d on %s",
            caller->rank, host->pid, name);
    return text;
}

/* Stores a connection in the peer, after the rank at its other end has proved its identity. */
static void dt__tcp_peer_connected(dt__tcp *t, int rank, int fd, const dt__tcp_handshake *record) {
    dt__tcp_peer *peer = &t->peers[rank];
    peer->fd = fd;
    peer->address = record->address;
    peer->pid = record->pid;
    dt__tcp_host_name(peer->host, record->host);
    dt__tcp_set_keepalive(fd, t->timeout_s);
}

/* Sends a few bytes on a new connection, whose empty socket buffer has space for all of them.
   Returns 0 on failure. */
static int dt__tcp_send_small(int fd, const void *p, size_t bytes) {
    return send(fd, p, bytes, MSG_NOSIGNAL) == (ssize_t)bytes;
}

/* ---- pending connections ---- */

/* An accepted connection is pending until its proof has been checked. From a pending connection the
   listener reads only handshake records, which have a fixed size, and trusts none of their values.
   When all slots are taken, it evicts the pending connection that has been silent longest. If a
   rank of the job is evicted, it connects again. */

static void dt__tcp_reject(dt__tcp *t, dt__tcp_pending *pending, const char *why) {
    dt__tcp_listener *listener = t->listener;
    close(pending->fd);
    pending->fd = -1;
    snprintf(listener->last_rejection.s, sizeof listener->last_rejection.s, "%.30s: %.150s",
        dt__tcp_address_text(pending->from).s, why);
    if (listener->rejected++ == 0)
        dt_log(t->ctx, DT_LOG_NOTICE, "rank %d at %s rejects %s (others will only be counted)",
            t->rank, dt__tcp_address_text(dt__tcp_own_address(listener->fd)).s,
            listener->last_rejection.s);
}

/* Returns the pending connection that has been silent longest; NULL if all of them have sent a
   record, or connected, in the last DT__TCP_EVICT_SILENCE_S seconds. */
static dt__tcp_pending *dt__tcp_longest_silent(dt__tcp_listener *listener, double now) {
    dt__tcp_pending *oldest = NULL;
    for (int i = 0; i < listener->slots; i++) {
        dt__tcp_pending *pending = &listener->pending[i];
        if (pending->fd < 0 || now < pending->last_heard + DT__TCP_EVICT_SILENCE_S) continue;
        if (!oldest || pending->last_heard < oldest->last_heard) oldest = pending;
    }
    return oldest;
}

/* Accepts the connections that are waiting. If all slots are taken, each new connection evicts a
   silent one. Stops if none can be evicted or no file descriptor is free. */
static void dt__tcp_accept_new(dt__tcp *t, dt__tcp_listener *listener, double now) {
    for (int next = 0, come = 0; come < listener->slots; come++) {
        while (next < listener->slots && listener->pending[next].fd >= 0) next++;
        dt__tcp_pending *slot = next < listener->slots ? &listener->pending[next]
                                                       : dt__tcp_longest_silent(listener, now);
        struct sockaddr_in at;
        socklen_t length = sizeof at;
        memset(&at, 0, sizeof at);
        if (!slot) return;
        int fd = dt__io_guard_std_fds() == 0 ? accept(listener->fd, (struct sockaddr *)&at, &length)
                                             : -1;
        if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
            dt__tcp_pending *oldest = dt__tcp_longest_silent(listener, now);
            if (oldest) dt__tcp_reject(t, oldest, "there are no more descriptors");
            return;
        }
        if (fd < 0 && (errno == ECONNABORTED || errno == EINTR)) continue;
        if (fd < 0) return;
        if (slot->fd >= 0) dt__tcp_reject(t, slot, "it said nothing while others came");
        memset(slot, 0, sizeof *slot);
        slot->fd = fd;
        slot->last_heard = now;
        slot->deadline = now + DT__TCP_PENDING_S;
        slot->from.ip = (uint32_t)at.sin_addr.s_addr;
        slot->from.port = ntohs(at.sin_port);
        if (!dt__tcp_set_up(fd)) dt__tcp_reject(t, slot, "its connection cannot be set up");
    }
}

static void dt__tcp_refuse(dt__tcp *t, dt__tcp_pending *pending, int reason) {
    dt__tcp_handshake record = dt__tcp_handshake_make(t, DT__TCP_REFUSED);
    const dt__tcp_handshake *caller =
        pending->hello_done ? &pending->their_hello : &pending->record;
    record.reason = reason;
    if (reason == DT__TCP_RANK_PRESENT) {
        record.pid = t->peers[caller->rank].pid;
        memcpy(record.host, t->peers[caller->rank].host, sizeof record.host);
    }
    dt__tcp_send_small(pending->fd, &record, sizeof record);
    dt__tcp_reject(t, pending, dt__tcp_reason(caller, &record).s);
}

/* Returns 0 if this rank accepts the connecting rank, whose proof is valid; else the reason of the
   refusal (DT__TCP_WRONG_JOB, ...). */
static int dt__tcp_check_caller(const dt__tcp *t, const dt__tcp_handshake *theirs) {
    if (theirs->job != t->job && (theirs->job || t->rank > 0)) return DT__TCP_WRONG_JOB;
    if (theirs->size != t->size) return DT__TCP_WRONG_SIZE;
    if (theirs->rank < t->listener->first_rank || theirs->rank >= t->size)
        return DT__TCP_WRONG_RANK;
    return t->peers[theirs->rank].fd >= 0 ? DT__TCP_RANK_PRESENT : 0;
}

/* Answers the complete record of a pending connection. */
static void dt__tcp_answer(dt__tcp *t, dt__tcp_pending *pending) {
    pending->received = 0;
    pending->last_heard = dt__tcp_now(t);
    if (pending->record.kind != (pending->hello_done ? DT__TCP_PROOF : DT__TCP_HELLO)) {
        dt__tcp_reject(t, pending, "it violates the protocol");
        return;
    }
    if (!pending->hello_done) {
        pending->hello_done = 1;
        pending->their_hello = pending->record;
        pending->our_hello = dt__tcp_handshake_make(t, DT__TCP_HELLO);
        if (!dt__tcp_send_small(pending->fd, &pending->our_hello, sizeof pending->our_hello))
            dt__tcp_reject(t, pending, "it hung up");
        return;
    }
    int reason = dt__tcp_is_proof(
                     t, "caller", &pending->their_hello, &pending->our_hello, pending->record.proof)
                     ? dt__tcp_check_caller(t, &pending->their_hello)
                     : DT__TCP_WRONG_TOKEN;
    if (reason) {
        dt__tcp_refuse(t, pending, reason);
        return;
    }
    dt__tcp_handshake welcome = dt__tcp_handshake_make(t, DT__TCP_WELCOME);
    dt__tcp_prove(t, "host", &pending->their_hello, &pending->our_hello, welcome.proof);
    if (!dt__tcp_send_small(pending->fd, &welcome, sizeof welcome)) {
        dt__tcp_reject(t, pending, "it hung up");
        return;
    }
    dt__tcp_peer_connected(t, pending->their_hello.rank, pending->fd, &pending->their_hello);
    pending->fd = -1;
}

/* Reads from a pending connection. Rejects the connection as soon as its data cannot be from a
   rank. */
static void dt__tcp_read_pending(dt__tcp *t, dt__tcp_pending *pending, double now) {
    const size_t named = offsetof(dt__tcp_handshake, version),
                 versioned = offsetof(dt__tcp_handshake, kind);
    ssize_t n = recv(pending->fd, (char *)&pending->record + pending->received,
        sizeof pending->record - pending->received, MSG_DONTWAIT);
    int later = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
    if (n > 0) pending->received += (size_t)n;
    if (memcmp(pending->record.magic, dt__tcp_magic,
            pending->received < named ? pending->received : named) != 0)
        dt__tcp_reject(t, pending, "it does not speak this protocol");
    else if (pending->received >= versioned && pending->record.version != DT__TCP_VERSION)
        pending->hello_done = 0, dt__tcp_refuse(t, pending, DT__TCP_WRONG_VERSION);
    else if (pending->received == sizeof pending->record)
        dt__tcp_answer(t, pending);
    else if (n <= 0 && !later)
        dt__tcp_reject(t, pending, "it hung up");
    else if (now > pending->deadline)
        dt__tcp_reject(t, pending, "it did not say who it is");
}

static void dt__tcp_serve_pending(dt__tcp *t) {
    double now = dt__tcp_now(t);
    dt__tcp_accept_new(t, t->listener, now);
    for (int i = 0; i < t->listener->slots; i++)
        if (t->listener->pending[i].fd >= 0) dt__tcp_read_pending(t, &t->listener->pending[i], now);
}

static void dt__tcp_close_listener(dt__tcp *t) {
    dt__tcp_listener *listener = t->listener;
    if (!listener) return;
    for (int i = 0; listener->pending && i < listener->slots; i++)
        if (listener->pending[i].fd >= 0) close(listener->pending[i].fd);
    if (listener->rejected > 1)
        dt_log(t->ctx, DT_LOG_DETAIL, "rank %d rejected %ld connections, the last %s", t->rank,
            listener->rejected, listener->last_rejection.s);
    if (listener->fd >= 0) close(listener->fd);
    t->listener = NULL;
}

/* ---- the rendezvous ---- */

/* Sleeps for the given seconds. If this rank already knows its job (t->job), it serves its pending
   connections first. */
static void dt__tcp_pause(dt__tcp *t, double seconds) {
    if (t->listener && t->listener->fd >= 0 && t->job) dt__tcp_serve_pending(t);
    dt__tcp_nap(t, seconds);
}

/* Tries once to connect. Returns -1 with errno set on failure. */
static int dt__tcp_connect(dt__tcp *t, dt__tcp_address address, double deadline) {
    struct sockaddr_in at = dt__tcp_sockaddr(address);
    int fd = dt__io_guard_std_fds() == 0 ? socket(AF_INET, SOCK_STREAM, 0) : -1, error = 0;
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
    /* TCP self-connect: if no process listens at the port and the port is in the ephemeral port
       range, the system may give this port to the new socket, which then connects to itself */
    if (error == 0 && dt__tcp_own_address(fd).port == address.port &&
        dt__tcp_own_address(fd).ip == address.ip)
        error = ECONNREFUSED;
    if (error == 0) return fd;
    close(fd);
    errno = error;
    return -1;
}

/* Receives `bytes` bytes. Returns 1 on success, 0 if the connection is closed, -1 if the deadline
   has passed. */
static int dt__tcp_recv_all(dt__tcp *t, int fd, void *p, size_t bytes, double deadline) {
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

/* Sends `bytes` bytes, which may be more than fit into the socket's buffer. Returns 1 on success, 0
   if the connection is closed or the deadline has passed. */
static int dt__tcp_send_all(dt__tcp *t, int fd, const void *p, size_t bytes, double deadline) {
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

/* Rank 0 calls this function until all ranks have connected. It drops the connections that their
   ranks have closed; these ranks may connect again. A rank sends no data at this time, so any event
   on its socket means that the connection is closed. */
static void dt__tcp_drop_closed_peers(dt__tcp *t) {
    for (int rank = 1; rank < t->size; rank++) {
        struct pollfd event = { t->peers[rank].fd, POLLIN, 0 };
        if (event.fd < 0 || poll(&event, 1, 0) <= 0) continue;
        close(event.fd);
        t->peers[rank].fd = -1;
    }
}

/* Returns a list, such as "2, 5", of the ranks >= `first` that are not connected. *n is their
   number. */
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

/* Accepts connections until all ranks >= listener->first_rank are connected. */
static dt_status dt__tcp_accept_ranks(dt__tcp *t, double deadline) {
    char also[320] = "";
    dt__tcp_listener *listener = t->listener;
    for (int missing = 1;;) {
        dt__tcp_serve_pending(t);
        if (t->rank == 0) dt__tcp_drop_closed_peers(t);
        dt__phrase who = dt__tcp_missing(t, listener->first_rank, &missing);
        if (missing == 0) return DT_OK;
        if (dt__tcp_now(t) <= deadline) {
            dt__tcp_nap(t, 5e-4);
            continue;
        }
        if (listener->rejected)
            snprintf(also, sizeof also, "; %ld connection%s rejected, the last %s",
                listener->rejected, listener->rejected > 1 ? "s were" : " was",
                listener->last_rejection.s);
        return dt_fail(t->ctx, DT_ERR_TIMEOUT,
            "timeout %.1f s at %s: of %d ranks rank%s %s did not come%s", t->timeout_s,
            dt__tcp_address_text(dt__tcp_own_address(listener->fd)).s, t->size,
            missing > 1 ? "s" : "", who.s, also);
    }
}

/* Fails the context because this rank cannot listen. */
static dt_status dt__tcp_listen_failed(dt__tcp *t, dt__tcp_address address) {
    int reason = errno;
    return dt_fail(t->ctx, DT_ERR_COMM, "cannot listen at %s: %s (error %d)",
        dt__tcp_address_text(address).s,
        reason == EADDRINUSE      ? "another program does"
        : reason == EADDRNOTAVAIL ? "that address is not this machine's"
                                  : "the system refuses it",
        reason);
}

/* The rendezvous on rank 0: accepts a connection from each rank, then sends the addresses of all
   ranks to each of them. */
static dt_status dt__tcp_host_rendezvous(dt__tcp *t, dt__tcp_address *addresses) {
    uint8_t random[32];
    dt__tcp_table table;
    if (t->listener->fd < 0) t->listener->fd = dt__tcp_listen(t->rendezvous, DT__TCP_BACKLOG);
    if (t->listener->fd < 0) return dt__tcp_listen_failed(t, t->rendezvous);
    dt__tcp_nonce(t, random);
    memcpy(&t->job, random, sizeof t->job);
    t->job |= 1;
    dt__tcp_accept_ranks(t, dt__tcp_now(t) + t->timeout_s);
    dt__tcp_close_listener(t);
    memset(&table, 0, sizeof table);
    table.magic = DT__TCP_FRAME_MAGIC;
    table.failed = dt_error(t->ctx) != DT_OK;
    table.check = t->check;
    snprintf(table.text, sizeof table.text, "%s", dt_error_text(t->ctx));
    double deadline = dt__tcp_now(t) + t->timeout_s;
    for (int rank = 1; rank < t->size; rank++) addresses[rank] = t->peers[rank].address;
    for (int rank = 1; rank < t->size; rank++) {
        int fd = t->peers[rank].fd;
        if (fd < 0) continue;
        if (dt__tcp_send_all(t, fd, &table, sizeof table, deadline) &&
            (table.failed ||
                dt__tcp_send_all(t, fd, addresses, (size_t)t->size * sizeof *addresses, deadline)))
            continue;
        if (!table.failed)
            dt_fail(t->ctx, DT_ERR_PEER, "connection to %s was lost at the rendezvous",
                dt__tcp_peer_text(t, rank).s);
    }
    return dt_error(t->ctx);
}

/* Checks the record with which `rank` has answered this rank. Returns 1 if it is the expected
   record; else fails the context and returns 0. */
static int dt__tcp_is_answer(dt__tcp *t, int rank, dt__tcp_address address, uint32_t kind,
    const dt__tcp_handshake *ours, const dt__tcp_handshake *record) {
    int known = memcmp(record->magic, dt__tcp_magic, sizeof record->magic) == 0;
    if (known && record->version == DT__TCP_VERSION && record->kind == kind && record->rank == rank)
        return 1;
    if (known && (record->kind == DT__TCP_REFUSED || record->version != DT__TCP_VERSION)) {
        dt__tcp_handshake host = *record;
        if (record->version != DT__TCP_VERSION) host.reason = DT__TCP_WRONG_VERSION;
        dt_fail(t->ctx, DT_ERR_COMM, "rank %d at %s refuses this rank: %s", rank,
            dt__tcp_address_text(address).s, dt__tcp_reason(ours, &host).s);
    } else {
        dt_fail(t->ctx, DT_ERR_COMM, "what listens at %s is not rank %d of a job",
            dt__tcp_address_text(address).s, rank);
    }
    return 0;
}

/* The connecting rank's side of the handshake; the proofs name that side "caller". Returns 1 if the
   other rank has accepted this rank; 0 if there was no answer or the connection was closed, with
   the text in *reason; -1 if the context has failed. */
static int dt__tcp_shake_hands(
    dt__tcp *t, int fd, int rank, dt__tcp_address address, double deadline, const char **reason) {
    dt__tcp_handshake ours = dt__tcp_handshake_make(t, DT__TCP_HELLO), theirs,
                      record = dt__tcp_handshake_make(t, DT__TCP_PROOF);
    for (int step = 0; step < 2; step++) {
        if (step) dt__tcp_prove(t, "caller", &ours, &theirs, record.proof);
        int result =
            !dt__tcp_send_small(fd, step ? &record : &ours, sizeof record)
                ? 0
                : dt__tcp_recv_all(t, fd, step ? &record : &theirs, sizeof record, deadline);
        *reason = result < 0 ? "there is no answer" : "the connection is closed without an answer";
        if (result <= 0) return 0;
        if (!dt__tcp_is_answer(t, rank, address, step ? DT__TCP_WELCOME : DT__TCP_HELLO, &ours,
                step ? &record : &theirs))
            return -1;
    }
    if (!dt__tcp_is_proof(t, "host", &ours, &theirs, record.proof) ||
        (rank > 0 && theirs.job != t->job) || !theirs.job) {
        dt_fail(t->ctx, DT_ERR_COMM,
            "what listens at %s does not prove that it is rank %d of this job",
            dt__tcp_address_text(address).s, rank);
        return -1;
    }
    t->job = theirs.job;
    dt__tcp_peer_connected(t, rank, fd, &theirs);
    return 1;
}

/* Tries once to connect and shake hands. After its first connection to rank 0, this rank starts to
   listen on the interface of that connection. Returns the same values as dt__tcp_shake_hands. Sets
   *gone to 1 if it could not connect, else to 0. */
static int dt__tcp_dial(dt__tcp *t, int rank, dt__tcp_address address, double deadline,
    const char **reason, int *gone) {
    int fd = dt__tcp_connect(t, address, deadline), done = -1;
    *gone = fd < 0;
    *reason = errno == ECONNREFUSED ? "nobody listens there" : "it cannot be reached";
    if (fd < 0) return 0;
    if (t->listener->fd < 0) {
        dt__tcp_address here = dt__tcp_own_address(fd);
        here.port = 0;
        t->listener->fd = dt__tcp_listen(here, DT__TCP_BACKLOG);
        if (t->listener->fd < 0) dt__tcp_listen_failed(t, here);
    }
    if (t->listener->fd >= 0)
        done = dt__tcp_shake_hands(t, fd, rank, address, deadline + DT__TCP_SKEW_S, reason);
    if (done <= 0) close(fd);
    return done;
}

/* Connects to a rank, with retries. Rank 0 may start later than this rank, so every failed attempt
   is repeated. The other ranks listen before any rank learns their addresses, so an attempt is
   repeated only if the handshake failed: the rank may have evicted this connection because foreign
   connections fill its slots. */
static dt_status dt__tcp_dial_until(dt__tcp *t, int rank, dt__tcp_address address) {
    double deadline = dt__tcp_now(t) + t->timeout_s;
    for (;;) {
        const char *reason = "";
        int gone = 0, done = dt__tcp_dial(t, rank, address, deadline, &reason, &gone);
        if (done) return done > 0 ? DT_OK : dt_error(t->ctx);
        int late = dt__tcp_now(t) > deadline;
        if (rank > 0 && (gone || late))
            return dt_fail(t->ctx, DT_ERR_PEER, "connection to rank %d was lost: at %s %s", rank,
                dt__tcp_address_text(address).s, reason);
        if (late)
            return dt_fail(t->ctx, DT_ERR_TIMEOUT, "timeout %.1f s: rank 0 did not come to %s: %s",
                t->timeout_s, dt__tcp_address_text(address).s, reason);
        dt__tcp_pause(t, 1e-2);
    }
}

/* Receives the addresses of all ranks. Rank 0's timeout may have begun later than this rank's, but
   this rank waits longer than rank 0: only rank 0's error text can name the missing ranks. */
static dt_status dt__tcp_recv_table(dt__tcp *t, dt__tcp_address *addresses) {
    dt__tcp_table table;
    int fd = t->peers[0].fd;
    double deadline = dt__tcp_now(t) + t->timeout_s + DT__TCP_SKEW_S;
    int result = dt__tcp_recv_all(t, fd, &table, sizeof table, deadline);
    table.text[sizeof table.text - 1] = 0;
    t->check = result > 0 ? table.check : 0;
    if (result > 0 && table.magic == DT__TCP_FRAME_MAGIC && table.failed)
        return dt_fail(t->ctx, DT_ERR_PEER, "peer failed first: %s", table.text);
    if (result > 0 && table.magic == DT__TCP_FRAME_MAGIC)
        result = dt__tcp_recv_all(t, fd, addresses, (size_t)t->size * sizeof *addresses, deadline);
    else if (result > 0)
        result = 0;
    if (result > 0) return DT_OK;
    return dt_fail(t->ctx, DT_ERR_PEER, "connection to %s was lost at the rendezvous",
        dt__tcp_peer_text(t, 0).s);
}

/* The rendezvous on every rank except rank 0: connects to rank 0, then to all lower ranks, then
   accepts connections from the higher ranks. */
static dt_status dt__tcp_join_rendezvous(dt__tcp *t, dt__tcp_address *addresses) {
    if (dt__tcp_dial_until(t, 0, t->rendezvous) == DT_OK) dt__tcp_recv_table(t, addresses);
    double deadline = dt__tcp_now(t) + t->timeout_s;
    for (int rank = 1; rank < t->rank && !dt_error(t->ctx); rank++)
        dt__tcp_dial_until(t, rank, addresses[rank]);
    return dt_error(t->ctx) ? dt_error(t->ctx) : dt__tcp_accept_ranks(t, deadline);
}

/* ---- begin and end ---- */

static size_t dt__tcp_bytes(int size) {
    return sizeof(dt__tcp) + (size_t)size * (sizeof(dt__tcp_peer) + sizeof(struct pollfd)) +
           DT__TCP_INPUT_BYTES;
}

static void dt__tcp_free(dt__tcp *t) {
    for (int rank = 0; rank < t->size; rank++) {
        dt__tcp_close_peer(&t->peers[rank], DT__TCP_LOST);
        while (t->peers[rank].first_send) {
            dt__tcp_request *r = t->peers[rank].first_send;
            t->peers[rank].first_send = r->next;
            dt__tcp_release(t, r);
        }
    }
    while (t->unexpected) dt__tcp_unexpected_remove(t, t->unexpected);
    while (t->free_requests) {
        dt__tcp_request *r = t->free_requests;
        t->free_requests = r->next;
        dt_free(t->ctx, DT_MEM_HOST, r, sizeof *r);
    }
    dt_free(t->ctx, DT_MEM_HOST, t, dt__tcp_bytes(t->size));
}

/* Rendezvous: all ranks connect to each other. The head of this section draws the protocol. Rank 0
   runs dt__tcp_host_rendezvous, and the other ranks run dt__tcp_join_rendezvous. listening: see
   dt__tcp_make. */
static void dt__tcp_rendezvous(dt__tcp *t, int listening) {
    int slots = 4 * t->size + DT__TCP_PENDING_SLOTS < DT__TCP_MAX_PENDING_SLOTS
                    ? 4 * t->size + DT__TCP_PENDING_SLOTS
                    : DT__TCP_MAX_PENDING_SLOTS;
    size_t table_bytes = (size_t)t->size * sizeof(dt__tcp_address),
           pending_bytes = (size_t)slots * sizeof(dt__tcp_pending);
    dt__tcp_address *table =
        (dt__tcp_address *)dt_alloc(t->ctx, DT_MEM_HOST, table_bytes, "addresses");
    dt__tcp_pending *pending =
        (dt__tcp_pending *)dt_alloc(t->ctx, DT_MEM_HOST, pending_bytes, "pending connections");
    dt__tcp_listener listener;
    memset(&listener, 0, sizeof listener);
    listener.fd = listening;
    listener.first_rank = t->rank + 1;
    listener.pending = pending;
    listener.slots = slots;
    t->listener = &listener;
    for (int i = 0; pending && i < slots; i++) pending[i].fd = -1;
    if (getrandom(t->seed, sizeof t->seed, 0) != (ssize_t)sizeof t->seed)
        dt_fail(t->ctx, DT_ERR_IO, "the system gives no random numbers (error %d)", errno);
    if (table) memset(table, 0, table_bytes);
    if (dt_error(t->ctx) == DT_OK && t->rank == 0)
        dt__tcp_host_rendezvous(t, table);
    else if (dt_error(t->ctx) == DT_OK)
        dt__tcp_join_rendezvous(t, table);
    dt__tcp_close_listener(t);
    dt__wipe(t->key, sizeof t->key);
    dt__wipe(t->seed, sizeof t->seed);
    dt_free(t->ctx, DT_MEM_HOST, pending, pending_bytes);
    dt_free(t->ctx, DT_MEM_HOST, table, table_bytes);
}

/* Connects this rank to all other ranks. On failure fails the context and returns NULL. listening:
   a listening socket if rank 0 has already opened one, else -1. */
static dt__tcp *dt__tcp_make(dt_ctx *ctx, const dt_run_desc *desc, dt__tcp_address rendezvous,
    const uint8_t key[32], int listening) {
    dt__tcp *t = (dt__tcp *)dt_alloc(ctx, DT_MEM_HOST, dt__tcp_bytes(desc->ranks), "connections");
    if (t) {
        memset(t, 0, dt__tcp_bytes(desc->ranks) - DT__TCP_INPUT_BYTES);
        t->ctx = t->report_ctx = ctx;
        t->check = desc->check;
        t->host = dt_ctx_host(ctx);
        t->rank = desc->rank;
        t->size = desc->ranks;
        t->timeout_s = desc->timeout_s;
        t->watch = dt__stopwatch_start(t->host, t->timeout_s);
        t->rendezvous = rendezvous;
        /* copied byte by byte, because memcpy could leave the key in a vector register */
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
    dt__tcp_abort(t, dt_error(ctx), dt_error_text(ctx)); /* ends waits of connected ranks */
    dt__tcp_free(t);
    return NULL;
}

/* Returns the number of connected peers whose last frame (an abort or a bye) has not arrived, or to
   which this rank has not yet written all frames. Sets *rank to the lowest of these peers, if there
   is one. */
static int dt__tcp_count_unfinished(const dt__tcp *t, int *rank) {
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

/* Sends a bye to all ranks and waits for their byes, at most timeout_s, or DT__TCP_GRACE_S after a
   failure. During the wait this rank notices later failures of other ranks. Its connections stay
   open, so that its peers can read all data that it has sent. */
static void dt__tcp_goodbye(dt__tcp *t) {
    double begin = dt__tcp_now(t), nap = 2e-5, until = begin + t->timeout_s;
    int rank = 0, is_shortened = 0;
    t->closing = 1;
    for (int i = 0; i < t->size; i++) {
        dt__tcp_peer *peer = &t->peers[i];
        if (peer->fd >= 0 && peer->last_frame_bytes == 0)
            dt__tcp_queue_last_frame(t, peer, DT__TCP_BYE, DT_OK, "");
    }
    while (dt__tcp_count_unfinished(t, &rank) > 0 && dt__tcp_now(t) < until) {
        if (t->failed && !is_shortened++ && until > dt__tcp_now(t) + DT__TCP_GRACE_S)
            until = dt__tcp_now(t) + DT__TCP_GRACE_S;
        if (dt__tcp_progress(t)) continue;
        dt__tcp_nap(t, nap);
        nap = nap * 2 < DT__NAP_MAX ? nap * 2 : DT__NAP_MAX;
    }
    if (dt__tcp_count_unfinished(t, &rank) > 0)
        dt_log(t->ctx, t->failed ? DT_LOG_DETAIL : DT_LOG_NOTICE,
            "rank %d ends after %.1f s without a goodbye from "
            "rank %d",
            t->rank, dt__tcp_now(t) - begin, rank);
}

/* Fills the report with the failure of this rank or of another rank, if there is one. Called after
   rank_main has returned, while the context still exists. */
static void dt__tcp_report(dt__tcp *t, dt_report *report) {
    const dt_host *host = t->host;
    dt_report own;
    memset(&own, 0, sizeof own);
    own.status = dt_error(t->ctx);
    own.rank = t->rank;
    snprintf(own.text, sizeof own.text, "%s", dt_error_text(t->ctx));
    /* another rank's failure; that rank has logged it */
    if (t->failed && t->first_failure.status) {
        *report = t->first_failure;
        return;
    }
    for (int rank = 0; rank < t->size && !own.status; rank++) {
        if (t->peers[rank].state <= DT__TCP_ENDED) continue;
        own.status = DT_ERR_PEER;
        snprintf(own.text, sizeof own.text, "rank %d: %s before it had ended", t->rank,
            dt__tcp_loss_text(t, rank).s);
    }
    if (t->unexpected && !t->unreceived[0])
        snprintf(t->unreceived, sizeof t->unreceived, "%zu bytes with tag %d from rank %d",
            (size_t)t->unexpected->frame.bytes, t->unexpected->frame.tag, t->unexpected->from);
    if (t->unreceived[0] && !own.status) {
        own.status = DT_ERR_COMM;
        snprintf(own.text, sizeof own.text, "rank %d: ended without receiving %s", t->rank,
            t->unreceived);
    }
    if (own.status && own.status != dt_error(t->ctx))
        host->log(host->user, DT_LOG_ERROR, t->rank, own.text);
    else if (own.status == DT_ERR_PEER)
        host->log(host->user, DT_LOG_ERROR, t->rank, own.text);
    *report = own;
}

// ==== 25. MPI ===================================================================================

/* Each rank is a process that a launcher started: mpirun -np 4 ./a.out.

       collective of a group within one machine     shared memory (section 14)
       other collectives, within a machine          messages in shared memory (section 13)
       everything else                              messages over MPI (section 15)
       failures                                     the TCP connections of section 24 (no data)

   dt does not call MPI_Allreduce, which guarantees no order of its sums. It runs its own algorithms
   over MPI messages and so sums in the order of the ranks. Each of the first 8 groups has its own
   communicator. Later groups share these communicators and have different tags. dt creates the
   communicators when the run begins, because creating one later would wait inside MPI for ranks
   that may have failed. The class of an MPI message is 0 for point-to-point messages, 1 for
   messages of collectives and 2 for the payload of a large message, which follows its envelope
   separately (see dt__mpi_envelope). The group and the class determine the communicator and tag:

       group g, class, tag  ->  communicator g % 8, tag (g / 8 * 3 + class) * tag_span + tag

   During the run dt never blocks inside MPI. It starts each operation and tests for its completion
   in the progress engine (section 12) or in dt__mpi_wait_for, which both watch the clock. MPI does
   not report failed ranks, so all ranks also connect over TCP: a failed rank sends an abort, and
   the others notice a dead rank by its lost connection. Rank 0 listens, and broadcasts over MPI its
   address and the key with which ranks authenticate each other in the TCP handshake. At the end all
   ranks synchronize once more, so that no rank still sends when MPI is finalized. MPI Forum, "MPI:
   A Message-Passing Interface Standard", version 3.1, 2015. */

#ifdef DT_USE_MPI

enum {
    DT__MPI_COMMS = 8,            /* number of communicators for groups */
    DT__MPI_GROUPS_PER_COMM = 16, /* maximum number of groups that share one communicator */
    /* after a failure: maximum number of checks whether all messages have arrived */
    DT__MPI_DRAIN_ROUNDS = 200,
    /* a waiting rank reads the clock, and may poll for failures, in one of every 4 tests */
    DT__MPI_POLL_TESTS = 4
};
/* The interval in seconds between two polls of the TCP connections is DT__MPI_POLL_S + ranks *
   DT__MPI_POLL_PER_RANK_S, because a poll takes longer with more ranks. */
#define DT__MPI_POLL_S 1e-3
#define DT__MPI_POLL_PER_RANK_S 2e-5
/* time limit in seconds for cancelled requests after a rank died; the launcher soon ends all
   ranks */
#define DT__MPI_CANCEL_AFTER_LOSS_S 0.2
/* A message with more bytes needs its own MPI datatype, because MPI's counts are of type int. */
#ifndef DT__MPI_MAX_BYTES
#define DT__MPI_MAX_BYTES ((size_t)1 << 30)
#endif

/* Each message begins with an envelope: the message's word, the length of its content, and the
   content itself if it is small. A longer content is sent in a second MPI message, of class 2, and
   the envelope contains that message's tag. The receiver posts the receive of the content when the
   envelope has arrived, and only if the content fits into the buffer. So MPI never truncates a
   message. */
typedef struct dt__mpi_envelope {
    uint64_t word, bytes;
    int64_t tag; /* the MPI tag of the second message, which carries a longer content */
    /* the content if it is small; only the bytes in use are sent */
    char small[DT_EAGER_BYTES];
} dt__mpi_envelope;

typedef struct dt__mpi_request {
    MPI_Request envelope, content;
    MPI_Datatype type; /* the content's MPI datatype: MPI_BYTE, or a type made for this message */
    MPI_Comm *comm;
    int peer;  /* in a send: the receiver's rank; -1 in a receive */
    int from;  /* in a receive: the sender's rank, -1 until the envelope has arrived */
    void *buf; /* in a receive: the buffer */
    size_t bytes;
    int error;           /* MPI's error code */
    const char *refusal; /* if dt itself refuses the request: the reason; else NULL */
    /* 1 if the send's envelope contains the content, so that the send completes for its caller at
       once */
    int is_buffered;
    struct dt__mpi_request *next;
    dt__mpi_envelope e;
} dt__mpi_request;

typedef struct dt__mpi {
    const dt_host *host;
    dt_ctx *ctx;
    int rank, size, tag_span, test_count;
    unsigned content_count; /* number of messages of class 2 sent so far */
    int initialized;        /* 1 if dt called MPI_Init_thread, 0 if the program did */
    /* the program's error handler of MPI_COMM_WORLD; during the run dt replaces it by one that
       makes MPI's functions return errors */
    MPI_Errhandler saved_handler;
    MPI_Comm comms[DT__MPI_COMMS], control_comm;
    int comm_count; /* number of communicators created so far; control_comm is the last */
    dt__mpi_request *free_requests, *buffered_sends;
    dt__stopwatch watch; /* runs since dt_run began; all deadlines use this clock */
    /* cancel_deadline: the deadline of cancelled requests; 0 if no request was cancelled */
    double timeout_s, cancel_deadline;
    int64_t message_balance;          /* MPI messages sent minus MPI messages received */
    MPI_Status last_status;           /* status of dt__mpi_wait_for's last request */
    int64_t sync_own[2], sync_sum[2]; /* buffers of the final synchronization */
    int abandoned;                    /* number of requests that did not end in time */
    MPI_Request drain_request;        /* receives an unwanted message into drain_buffer */
    void *drain_buffer;
    size_t drain_bytes;
    dt_report first_failure;
    /* the context of the TCP connections; it logs nothing, because the functions that use it report
       its failures */
    dt_ctx *tcp_ctx;
    dt_listener listener;
    dt__tcp *tcp; /* NULL until all ranks are connected */
    double next_poll;
    int failure_noticed, rank_lost; /* 1 if another rank has failed; 1 if another rank was lost */
    int other_loopbacks;            /* number of ranks in other network namespaces */
    int *buffered_count;            /* (size) number of buffered sends to each rank */
    dt__node node; /* its `shared` is NULL if this rank shares memory with no other rank */
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

/* Sets *type and *count to an MPI datatype and a count that together have `bytes` bytes. If `bytes`
   exceeds DT__MPI_MAX_BYTES, the new type consists of blocks of DT__MPI_MAX_BYTES and a tail.
   Returns MPI's error code. */
static int dt__mpi_type(size_t bytes, MPI_Datatype *type, int *count) {
    MPI_Datatype block = MPI_BYTE, parts[2] = { MPI_BYTE, MPI_BYTE };
    size_t blocks = bytes / DT__MPI_MAX_BYTES;
    int lengths[2] = { (int)blocks, (int)(bytes % DT__MPI_MAX_BYTES) };
    MPI_Aint offsets[2] = { 0, (MPI_Aint)(blocks * DT__MPI_MAX_BYTES) };
    *type = MPI_BYTE;
    *count = (int)bytes;
    if (bytes <= DT__MPI_MAX_BYTES) return MPI_SUCCESS;
    *count = 1;
    int error = MPI_Type_contiguous((int)DT__MPI_MAX_BYTES, MPI_BYTE, &block);
    if (error) return error;
    parts[0] = block;
    error = MPI_Type_create_struct(2, lengths, offsets, parts, type);
    MPI_Type_free(&block);
    return error ? error : MPI_Type_commit(type);
}

static dt__mpi_request *dt__mpi_request_make(dt__mpi *mpi) {
    dt__mpi_request *r = mpi->free_requests;
    if (r)
        mpi->free_requests = r->next;
    else
        r = (dt__mpi_request *)dt_alloc(mpi->ctx, DT_MEM_HOST, sizeof *r, "an MPI request");
    if (!r) return NULL;
    memset(r, 0, offsetof(dt__mpi_request, e));
    r->envelope = r->content = MPI_REQUEST_NULL;
    r->type = MPI_BYTE;
    r->peer = r->from = -1;
    return r;
}

static void dt__mpi_request_release(dt__mpi *mpi, dt__mpi_request *r) {
    if (r->type != MPI_BYTE) MPI_Type_free(&r->type);
    r->next = mpi->free_requests;
    mpi->free_requests = r;
}

/* Releases the buffered sends that MPI has completed. */
static void dt__mpi_reap_buffered(dt__mpi *mpi) {
    for (dt__mpi_request **at = &mpi->buffered_sends; *at;) {
        dt__mpi_request *r = *at;
        int done = 0;
        if (MPI_Test(&r->envelope, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) {
            at = &r->next;
            continue;
        }
        *at = r->next;
        mpi->buffered_count[r->peer]--;
        dt__mpi_request_release(mpi, r);
    }
}

/* Chooses a message's communicator and MPI tag (*tag) and the tag of its content. If the group or
   the tag is too large, sets r->refusal and returns 0. */
static int dt__mpi_choose_tag(dt__mpi *mpi, dt__mpi_request *r, uint32_t channel, int *tag) {
    uint32_t group = channel / 2;
    int first_tag_range = (int)(group / DT__MPI_COMMS) * 3;
    /* Here the tag is a collective's number. Collectives that are in flight at the same time have
       close numbers, so the remainders differ. */
    if (channel % 2) *tag %= mpi->tag_span;
    if (group >= DT__MPI_COMMS * DT__MPI_GROUPS_PER_COMM)
        r->refusal = "there are more groups than MPI's tags can tell apart";
    else if (*tag >= mpi->tag_span)
        r->refusal = "the tag is too large for MPI's MPI_TAG_UB";
    if (r->refusal) return 0;
    *tag += (first_tag_range + (int)(channel % 2)) * mpi->tag_span;
    r->comm = &mpi->comms[group % DT__MPI_COMMS];
    r->e.tag =
        (first_tag_range + 2) * mpi->tag_span + (int)(mpi->content_count % (unsigned)mpi->tag_span);
    return 1;
}

/* Sends a message. A small message is buffered, so the caller need not wait for the receiver. At
   most DT__PAIR_SLOTS messages to each rank are buffered, as in shared memory. */
static void *dt__mpi_send(
    void *user, int to, uint32_t channel, int tag, uint64_t word, const void *buf, size_t bytes) {
    dt__mpi *mpi = (dt__mpi *)user;
    dt__mpi_request *r = dt__mpi_request_make(mpi);
    size_t small = bytes <= DT_EAGER_BYTES ? bytes : 0;
    int count = 0;
    if (!r || !dt__mpi_choose_tag(mpi, r, channel, &tag)) return r;
    r->peer = to;
    r->e.word = word;
    r->e.bytes = bytes;
    if (small > 0) memcpy(r->e.small, buf, small);
    if (r->refusal) return r;
    if (mpi->buffered_count[to] >= DT__PAIR_SLOTS) dt__mpi_reap_buffered(mpi);
    r->is_buffered = small == bytes && mpi->buffered_count[to] < DT__PAIR_SLOTS;
    mpi->buffered_count[to] += r->is_buffered;
    r->error = MPI_Isend(&r->e, (int)(offsetof(dt__mpi_envelope, small) + small), MPI_BYTE, to, tag,
        *r->comm, &r->envelope);
    mpi->message_balance += !r->error;
    if (r->error || small == bytes) return r;
    mpi->content_count++;
    r->error = dt__mpi_type(bytes, &r->type, &count);
    if (!r->error)
        r->error = MPI_Isend(buf, count, r->type, to, (int)r->e.tag, *r->comm, &r->content);
    mpi->message_balance += !r->error;
    return r;
}

static void *dt__mpi_recv(
    void *user, int from, uint32_t channel, int tag, void *buf, size_t bytes) {
    dt__mpi *mpi = (dt__mpi *)user;
    dt__mpi_request *r = dt__mpi_request_make(mpi);
    if (!r || !dt__mpi_choose_tag(mpi, r, channel, &tag)) return r;
    r->buf = buf;
    r->bytes = bytes;
    r->error = MPI_Irecv(&r->e, (int)sizeof r->e, MPI_BYTE, from == DT_ANY ? MPI_ANY_SOURCE : from,
        tag, *r->comm, &r->envelope);
    return r;
}

/* Continues a receive whose envelope has arrived. If the message is longer than the buffer, its
   content is not received; dt__transport_received then sees its length and fails the context. */
static void dt__mpi_envelope_arrived(dt__mpi *mpi, dt__mpi_request *r, int from) {
    int count = 0;
    r->from = from;
    mpi->message_balance--;
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

static void dt__mpi_set_report(dt_report *note, dt_status status, int rank, const char *text) {
    memset(note, 0, sizeof *note);
    note->status = status;
    note->rank = rank;
    snprintf(note->text, sizeof note->text, "%s", text);
}

/* Records this rank's failure, and tells the other ranks, unless there was a failure before. */
static void dt__mpi_tell_failure(dt__mpi *mpi, dt_status status, const char *text) {
    if (!mpi->first_failure.status)
        dt__mpi_set_report(&mpi->first_failure, status, mpi->rank, text);
    if (mpi->tcp) dt__tcp_abort(mpi->tcp, status, text);
}

static void dt__mpi_fail(void *user, const char *text) {
    dt__mpi *mpi = (dt__mpi *)user;
    const dt__world *world = dt__world_of(mpi->ctx);
    dt__mpi_tell_failure(mpi,
        world && world->shared->first_failure.status ? world->shared->first_failure.status
                                                     : dt_error(mpi->ctx),
        text);
}

/* Fills *report with the loss of a rank. If that rank is on this machine, clears its busy flag in
   shared memory, and publishes its loss if the rank died while it wrote the failure record. */
static void dt__mpi_rank_lost(dt__mpi *mpi, int rank, dt_report *report) {
    dt__shared *shared = mpi->node.shared;
    int lower = 0;
    char text[256];
    snprintf(text, sizeof text, "%s is gone: its connection was lost",
        dt__tcp_peer_text(mpi->tcp, rank).s);
    dt__mpi_set_report(report, DT_ERR_PEER, rank, text);
    mpi->rank_lost = 1;
    for (int other = 0; other < mpi->rank; other++)
        lower += mpi->tcp->peers[other].state <= DT__TCP_ENDED;
    /* only the lowest remaining rank logs that the rank is lost */
    if (lower == 0) mpi->host->log(mpi->host->user, DT_LOG_ERROR, mpi->rank, text);
    if (!shared || mpi->node.local_ranks[rank] < 0) return;
    __atomic_store_n(&shared->state[mpi->node.local_ranks[rank]].busy, 0, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&shared->claimed, __ATOMIC_SEQ_CST) == rank + 2 && !dt__aborted(shared))
        dt__publish_failure(shared, rank, DT_ERR_PEER, text);
}

/* Failure detection: polls the TCP connections. If another rank has failed, stores its failure in
   first_failure, unless a failure is already stored, and publishes it. Every wait of this rank
   checks for a published failure. */
static void dt__mpi_poll_failures(dt__mpi *mpi) {
    dt__world *world = dt__world_of(mpi->ctx);
    dt__tcp *t = mpi->tcp;
    double now = mpi->host->now(mpi->host->user);
    int lost = -1;
    dt_report report;
    if (mpi->buffered_sends) dt__mpi_reap_buffered(mpi);
    if (!t || mpi->failure_noticed || now < mpi->next_poll) return;
    mpi->next_poll = now + DT__MPI_POLL_S + DT__MPI_POLL_PER_RANK_S * mpi->size;
    dt__tcp_progress(t);
    for (int rank = mpi->size - 1; rank >= 0; rank--)
        if (t->peers[rank].state > DT__TCP_ENDED) lost = rank;
    if (t->failed && t->first_failure.status)
        report = t->first_failure;
    else if (lost >= 0)
        dt__mpi_rank_lost(mpi, lost, &report);
    else
        return;
    mpi->failure_noticed = 1;
    if (!mpi->first_failure.status) mpi->first_failure = report;
    dt__shared *shared = world ? world->shared : mpi->node.shared;
    if (shared && dt__claim(shared, report.rank))
        dt__publish_failure(shared, report.rank, report.status, report.text);
}

static void dt__mpi_node_poll(void *user) { dt__mpi_poll_failures((dt__mpi *)user); }

/* ---- test and cancel ---- */

/* Writes to `why` the reason why a request could not begin or why MPI failed it. Always returns -2,
   because MPI does not tell whether another rank has failed. */
static int dt__mpi_request_failed(dt__mpi *mpi, dt__mpi_request *r, char *why) {
    if (r->refusal)
        snprintf(why, 512, "%s", r->refusal);
    else
        dt__mpi_why(r->error, why, 512);
    if (r->is_buffered) mpi->buffered_count[r->peer]--;
    if (r->envelope == MPI_REQUEST_NULL && r->content == MPI_REQUEST_NULL)
        dt__mpi_request_release(mpi, r);
    else
        mpi->abandoned++; /* MPI still uses the request's memory */
    return -2;
}

static int dt__mpi_test(
    void *user, void *request, int *from, uint64_t *word, size_t *bytes, char *why) {
    dt__mpi *mpi = (dt__mpi *)user;
    dt__mpi_request *r = (dt__mpi_request *)request;
    MPI_Status status;
    int done = 0, receives = r->peer < 0;
    if (r->refusal || r->error) return dt__mpi_request_failed(mpi, r, why);
    if (++mpi->test_count % DT__MPI_POLL_TESTS == 0) dt__mpi_poll_failures(mpi);
    r->error = MPI_Test(&r->envelope, &done, &status);
    if (!r->error && !done && r->is_buffered) {
        r->next = mpi->buffered_sends;
        mpi->buffered_sends = r;
        return 1;
    }
    if (!r->error && done && receives && r->from < 0)
        dt__mpi_envelope_arrived(mpi, r, status.MPI_SOURCE);
    int follows = r->content != MPI_REQUEST_NULL;
    if (!r->error && !r->refusal && done && follows)
        r->error = MPI_Test(&r->content, &done, &status);
    if (r->error || r->refusal) return dt__mpi_request_failed(mpi, r, why);
    if (!done) return 0;
    if (receives) {
        mpi->message_balance -= follows;
        *from = r->from;
        *word = r->e.word;
        *bytes = (size_t)r->e.bytes;
    }
    if (r->is_buffered) mpi->buffered_count[r->peer]--;
    dt__mpi_request_release(mpi, r);
    return 1;
}

/* Receives messages that no receive wants, one at a time, because their senders wait. Receives each
   message in full, because MPICH aborts the program when a message is truncated. Returns 1 if it
   has started to receive a message, with the message's status in *status and its length in
   *bytes. */
static int dt__mpi_drain(dt__mpi *mpi, MPI_Status *status, MPI_Count *bytes) {
    const dt_host *host = mpi->host;
    int done = 1, there = 0, count = 0;
    MPI_Message message;
    MPI_Datatype type;
    if (mpi->drain_request != MPI_REQUEST_NULL)
        MPI_Test(&mpi->drain_request, &done, MPI_STATUS_IGNORE);
    if (!done) return 0;
    if (mpi->drain_buffer) host->free(host->user, mpi->drain_buffer, mpi->drain_bytes, DT_MEM_HOST);
    mpi->drain_buffer = NULL;
    mpi->drain_request = MPI_REQUEST_NULL;
    for (int i = 0; i < DT__MPI_COMMS && !there; i++) {
        if (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, mpi->comms[i], &there, status) != MPI_SUCCESS)
            there = 0;
        if (there && MPI_Get_elements_x(status, MPI_BYTE, bytes) != MPI_SUCCESS) there = 0;
        if (!there) continue;
        mpi->drain_bytes = (size_t)*bytes + 1;
        mpi->drain_buffer = host->alloc(host->user, mpi->drain_bytes, DT_MEM_HOST);
        if (!mpi->drain_buffer || dt__mpi_type((size_t)*bytes, &type, &count) != MPI_SUCCESS)
            return 0;
        MPI_Improbe(status->MPI_SOURCE, status->MPI_TAG, mpi->comms[i], &there, &message, status);
        if (there) MPI_Imrecv(mpi->drain_buffer, count, type, &message, &mpi->drain_request);
        mpi->message_balance -= there != 0;
        if (type != MPI_BYTE) MPI_Type_free(&type);
    }
    return there;
}

/* Waits for *request. Returns 1 once the request is complete, 0 if the deadline `until` has passed.
   If `until` is 0, there is no deadline before a failure, but the function returns 0 as soon as a
   rank is lost, and timeout_s after it has noticed any other failure. If `drain` is 1, it also
   receives unwanted messages during the wait (dt__mpi_drain). */
static int dt__mpi_wait_for(dt__mpi *mpi, MPI_Request *request, double until, int drain) {
    double nap = DT__NAP_MIN;
    for (int attempt = 0;; attempt++) {
        int done = 0;
        MPI_Status status;
        MPI_Count bytes;
        if (MPI_Test(request, &done, &mpi->last_status) != MPI_SUCCESS || done) return 1;
        dt__mpi_poll_failures(mpi);
        if (drain && dt__mpi_drain(mpi, &status, &bytes)) continue;
        double now = dt__mpi_now(mpi);
        if (until == 0 && mpi->rank_lost) return 0; /* the lost rank cannot take part */
        if (until == 0 && mpi->first_failure.status) until = now + mpi->timeout_s;
        if (until > 0 && now > until) return 0;
        mpi->host->sleep(mpi->host->user, attempt < DT__YIELDS ? 0 : nap);
        if (attempt >= DT__YIELDS) nap = nap * 2 < DT__NAP_MAX ? nap * 2 : DT__NAP_MAX;
    }
}

/* Cancels a request after this rank has failed, so that MPI no longer uses the rank's buffers. MPI
   can cancel a receive that has not matched a message. The function waits for any other request: it
   completes once the other rank has learned of the failure and receives all messages. A request
   that is not complete at cancel_deadline is abandoned. */
static void dt__mpi_cancel(void *user, void *request) {
    dt__mpi *mpi = (dt__mpi *)user;
    dt__mpi_request *r = (dt__mpi_request *)request;
    MPI_Request *parts[2] = { &r->envelope, &r->content };
    if (r->is_buffered && !r->error) {
        r->next = mpi->buffered_sends;
        mpi->buffered_sends = r;
        return;
    }
    if (r->is_buffered) mpi->buffered_count[r->peer]--;
    if (mpi->cancel_deadline == 0)
        mpi->cancel_deadline =
            dt__mpi_now(mpi) +
            (mpi->rank_lost ? fmin(DT__MPI_CANCEL_AFTER_LOSS_S, mpi->timeout_s) : mpi->timeout_s);
    for (int i = 0; i < 2; i++) {
        int cancelled = 1, receives = r->peer < 0;
        if (*parts[i] == MPI_REQUEST_NULL) continue;
        if (receives) MPI_Cancel(parts[i]);
        if (!dt__mpi_wait_for(mpi, parts[i], mpi->cancel_deadline, 1)) {
            mpi->abandoned++;
            return;
        }
        if (receives) MPI_Test_cancelled(&mpi->last_status, &cancelled);
        mpi->message_balance -= !cancelled; /* the message arrived before the cancellation */
    }
    dt__mpi_request_release(mpi, r);
}

/* ---- begin and end ---- */

static void dt__mpi_free(dt__mpi *mpi) {
    const dt_host *host = mpi->host;
    if (mpi->drain_buffer) host->free(host->user, mpi->drain_buffer, mpi->drain_bytes, DT_MEM_HOST);
    host->free(host->user, mpi->buffered_count, (size_t)mpi->size * sizeof(int), DT_MEM_HOST);
    host->free(host->user, mpi->node.local_ranks, 2 * (size_t)mpi->size * sizeof(int), DT_MEM_HOST);
    host->free(host->user, mpi, sizeof *mpi, DT_MEM_HOST);
}

/* Allocates memory and creates the communicators. The first is a duplicate of MPI_COMM_WORLD, and
   each other communicator is a duplicate of the one before it. Returns NULL, or the text of an
   error. */
static const char *dt__mpi_make(dt__mpi *mpi) {
    const dt_host *host = mpi->host;
    size_t size = (size_t)mpi->size;
    int *max_tag = NULL, there = 0;
    mpi->buffered_count = (int *)host->alloc(host->user, size * sizeof(int), DT_MEM_HOST);
    if (!mpi->buffered_count) return "no memory for it";
    memset(mpi->buffered_count, 0, size * sizeof(int));
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &mpi->saved_handler);
    /* MPICH calls the error handler of MPI_COMM_WORLD also for errors of dt's requests */
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    double until = dt__mpi_now(mpi) + mpi->timeout_s;
    for (; mpi->comm_count <= DT__MPI_COMMS; mpi->comm_count++) {
        MPI_Comm from = mpi->comm_count ? mpi->comms[mpi->comm_count - 1] : MPI_COMM_WORLD;
        MPI_Comm *to =
            mpi->comm_count < DT__MPI_COMMS ? &mpi->comms[mpi->comm_count] : &mpi->control_comm;
        MPI_Request request;
        if (MPI_Comm_idup(from, to, &request) != MPI_SUCCESS) return "no communicator";
        if (!dt__mpi_wait_for(mpi, &request, until, 0))
            return "not all its processes came to dt_run within timeout_s";
        MPI_Comm_set_errhandler(*to, MPI_ERRORS_RETURN);
    }
    if (MPI_Comm_get_attr(mpi->control_comm, MPI_TAG_UB, &max_tag, &there) != MPI_SUCCESS || !there)
        return "no MPI_TAG_UB";
    mpi->tag_span = (int)(((int64_t)*max_tag + 1) / (3 * DT__MPI_GROUPS_PER_COMM));
    return NULL;
}

/* ---- ranks of one machine ---- */

/* The ranks of a machine share a memory segment, as forked ranks do, and run their collectives in
   it (section 14). Every rank must map the segment at the same address. So the first rank of the
   machine creates it at an address that is probably free in every process, and the other ranks map
   it through the first rank's /proc/PID/fd. If one of these ranks cannot map the segment, none of
   them uses it. Sends and receives use MPI. */

typedef struct dt__mpi_rank_info { /* each rank sends these values to all ranks, four times */
    uint64_t machine;  /* hash of machine and PID namespace; 0 if the rank shares no memory */
    uint64_t network;  /* hash of the network namespace; ranks with equal values share a loopback */
    int64_t node_part; /* rank / dt_run_desc.node_ranks; only ranks of one part share memory */
    int64_t pid, fd, device, inode;
    /* address of the shared memory segment, address of its dt__shared, and size of the segment; all
       0 if there is no segment */
    uint64_t range, shared, bytes;
    int64_t mapped;
    int64_t node_leader; /* the lowest rank that shares memory with this rank */
} dt__mpi_rank_info;

static int dt__mpi_exchange_info(
    dt__mpi *mpi, const dt__mpi_rank_info *mine, dt__mpi_rank_info *all) {
    MPI_Request request;
    double until = dt__mpi_now(mpi) + mpi->timeout_s;
    int bytes = (int)sizeof *mine;
    if (MPI_Iallgather(mine, bytes, MPI_BYTE, all, bytes, MPI_BYTE, mpi->control_comm, &request) !=
        MPI_SUCCESS)
        return 0;
    return dt__mpi_wait_for(mpi, &request, until, 0);
}

/* Returns a hash of the machine's name, its boot id and this process's "pid" or "net" namespace; 1
   on failure, never 0. */
static uint64_t dt__mpi_machine_id(const char *names) {
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

/* Maps the segment at exactly this address. Returns NULL on failure. */
static void *dt__mpi_map(int fd, uint64_t address, size_t bytes) {
#ifdef MAP_FIXED_NOREPLACE
    void *wanted = (void *)(uintptr_t)address;
    void *p = mmap(wanted, bytes, PROT_READ | PROT_WRITE,
        MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE, fd, 0);
    if (p == wanted) return p;
    if (p != MAP_FAILED) munmap(p, bytes);
#else
    (void)fd, (void)address, (void)bytes;
#endif
    return NULL;
}

/* Creates the shared memory segment of n ranks. Called on the first of them. `neighbours` is the
   number of all ranks on the machine. If it exceeds the machine's number of cores, waits do not
   spin. (The cores that this rank may use do not matter: each rank may be bound to one core.) */
static void dt__mpi_make_range(
    dt__mpi *mpi, const dt_run_desc *desc, int n, int neighbours, dt__mpi_rank_info *info) {
#ifdef MFD_CLOEXEC
    static const uint64_t addresses[] = {
#ifdef __SANITIZE_THREAD__ /* if root asks for a reserved address, TSan's mmap maps at 0 */
        0x2000000000,
#endif
        0x200000000000, 0x300000000000, 0x100000000000, 0x2000000000
    };
    size_t machine_bytes = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    struct stat file;
    dt__shared sizes;
    memset(&sizes, 0, sizeof sizes);
    sizes.ranks = n;
    sizes.separate_memory = 1;
    sizes.timeout_s = desc->timeout_s;
    sizes.spins = neighbours <= (int)sysconf(_SC_NPROCESSORS_ONLN) ? DT__SPINS : 0;
    sizes.first_failure.rank = -1;
    info->fd = dt__io_guard_std_fds() == 0 ? memfd_create("dt", MFD_CLOEXEC) : -1;
    if (info->fd < 0 || fstat((int)info->fd, &file) != 0) return;
    for (size_t heap = dt__align_page(machine_bytes); !mpi->range && heap > (size_t)64 << 20;
         heap = dt__align_page(heap / 4)) {
        sizes.heap_bytes = heap;
        dt__shared_layout(&sizes, NULL, 0);
        if (dt__io_resize(NULL, (int)info->fd, (int64_t)sizes.bytes) != 0) continue;
        for (size_t i = 0; i < sizeof addresses / sizeof *addresses && !mpi->range; i++)
            mpi->range = dt__mpi_map((int)info->fd, addresses[i], sizes.bytes);
    }
    if (!mpi->range) return;
    mpi->range_bytes = sizes.bytes;
    mpi->node.shared = dt__shared_layout(&sizes, (char *)mpi->range, 0);
    dt__group_make(mpi->node.shared, n, "world");
    info->device = (int64_t)file.st_dev;
    info->inode = (int64_t)file.st_ino;
    info->range = (uint64_t)(uintptr_t)mpi->range;
    info->shared = (uint64_t)(uintptr_t)mpi->node.shared;
    info->bytes = sizes.bytes;
#else
    (void)mpi, (void)desc, (void)n, (void)neighbours, (void)info;
#endif
}

/* Maps the shared memory segment that rank `first` has created. Called on the other ranks. */
static void dt__mpi_map_range(dt__mpi *mpi, const dt__mpi_rank_info *first) {
    char path[64];
    struct stat file;
    if (!first->range) return;
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)first->pid, (long long)first->fd);
    if (dt__io_guard_std_fds() != 0) return;
    int fd = open(path, O_RDWR | O_CLOEXEC); /* opens the memfd itself, through the link in /proc */
    if (fd < 0) return;
    if (fstat(fd, &file) == 0 && (int64_t)file.st_dev == first->device &&
        (int64_t)file.st_ino == first->inode)
        mpi->range = dt__mpi_map(fd, first->range, (size_t)first->bytes);
    close(fd);
    if (!mpi->range) return;
    mpi->range_bytes = (size_t)first->bytes;
    mpi->node.shared = (dt__shared *)(uintptr_t)first->shared;
}

/* Shares memory with the other ranks of this machine. all: size + 1 entries, of which the last is
   this rank's own entry. Returns NULL, or an error text if an exchange with the other ranks does
   not complete within timeout_s. */
static const char *dt__mpi_share_with(
    dt__mpi *mpi, const dt_run_desc *desc, dt__mpi_rank_info *all) {
    const char *timeout_text = "not all its processes came to dt_run within timeout_s";
    int first = mpi->rank, n = 0, neighbours = 0, mapped = 1;
    dt__mpi_rank_info *mine = &all[mpi->size];
    mine->fd = -1;
    mine->pid = (int64_t)getpid();
    if (desc->node_ranks != 1 && !(desc->host && !desc->host->map) &&
        !(desc->kernels && desc->kernels->alloc))
        mine->machine = dt__mpi_machine_id("pid");
    mine->network = dt__mpi_machine_id("net");
    mine->node_part = desc->node_ranks > 1 ? mpi->rank / desc->node_ranks : 0;
    if (!dt__mpi_exchange_info(mpi, mine, all)) return timeout_text;
    for (int rank = 0; rank < mpi->size; rank++) {
        int same_machine = mine->machine != 0 && all[rank].machine == mine->machine;
        int same_part = same_machine && all[rank].node_part == mine->node_part;
        neighbours += same_machine;
        mpi->other_loopbacks += all[rank].network != mine->network;
        if (rank == mpi->rank) mpi->node.local_rank = n;
        mpi->node.local_ranks[rank] = same_part ? n : -1;
        if (same_part && n++ == 0) first = rank;
    }
    if (n > 1 && first == mpi->rank) dt__mpi_make_range(mpi, desc, n, neighbours, mine);
    int shown = dt__mpi_exchange_info(mpi, mine, all);
    if (shown && n > 1 && first != mpi->rank) dt__mpi_map_range(mpi, &all[first]);
    mine->mapped = mpi->range != NULL;
    shown = shown && dt__mpi_exchange_info(mpi, mine, all);
    if (mine->fd >= 0) close((int)mine->fd);
    if (!shown) return timeout_text;
    for (int rank = 0; rank < mpi->size; rank++)
        mapped = mapped && (mpi->node.local_ranks[rank] < 0 || all[rank].mapped);
    if (!mapped) mpi->node.shared = NULL;
    mine->node_leader = mapped ? first : mpi->rank;
    if (!dt__mpi_exchange_info(mpi, mine, all)) return timeout_text;
    for (int rank = 0; rank < mpi->size; rank++)
        mpi->node.node_leaders[rank] = (int)all[rank].node_leader;
    if (!mapped && n > 1 && first == mpi->rank)
        mpi->host->log(mpi->host->user, DT_LOG_NOTICE, mpi->rank,
            "ranks on this machine share no memory: their collectives go over MPI");
    return NULL;
}

static const char *dt__mpi_share(dt__mpi *mpi, const dt_run_desc *desc) {
    const dt_host *host = mpi->host;
    size_t bytes = ((size_t)mpi->size + 1) * sizeof(dt__mpi_rank_info);
    dt__mpi_rank_info *all = (dt__mpi_rank_info *)host->alloc(host->user, bytes, DT_MEM_HOST);
    mpi->node.local_ranks =
        (int *)host->alloc(host->user, 2 * (size_t)mpi->size * sizeof(int), DT_MEM_HOST);
    mpi->node.poll = dt__mpi_node_poll;
    mpi->node.user = mpi;
    if (!all || !mpi->node.local_ranks) return "no memory for it";
    mpi->node.node_leaders = mpi->node.local_ranks + mpi->size;
    memset(all, 0, bytes);
    const char *wrong = dt__mpi_share_with(mpi, desc, all);
    /* after an error `all` is not freed, because MPI may still write into it */
    if (!wrong) host->free(host->user, all, bytes, DT_MEM_HOST);
    return wrong;
}

/* ---- the connections ---- */

typedef struct dt__mpi_rendezvous { /* the values that rank 0 broadcasts */
    dt__tcp_address address;
    uint8_t key[32];
    char why[DT__TCP_TEXT_BYTES]; /* if rank 0 does not listen: the reason; else empty */
} dt__mpi_rendezvous;

/* Opens rank 0's listening socket at desc.rendezvous. If desc.rendezvous is NULL, opens it at a
   free port: of the loopback address, or of the first interface if some rank is in another network
   namespace. Returns -1 with info->why set on failure. */
static int dt__mpi_listen(dt__mpi *mpi, const dt_run_desc *desc, dt__mpi_rendezvous *info) {
    dt__tcp_address *address = &info->address;
    dt_run_desc single_rank_desc = *desc;
    single_rank_desc.ranks = 1; /* so that dt__tcp_key needs no token: the key below is random */
    memset(info, 0, sizeof *info);
    if (desc->rendezvous && !dt__tcp_address_parse(desc->rendezvous, address))
        snprintf(info->why, sizeof info->why, "rendezvous '%.200s' is no address and port",
            desc->rendezvous);
    else if (!desc->rendezvous)
        address->ip = mpi->other_loopbacks ? dt__tcp_interface_address() : htonl(INADDR_LOOPBACK);
    if (address->ip == 0 && !info->why[0])
        snprintf(info->why, sizeof info->why,
            "rank 0 finds no address of its machine: give it as rendezvous");
    if (info->why[0] || !dt__tcp_key(&single_rank_desc, *address, info->key, info->why)) return -1;
    uint8_t random[32]; /* makes the key valid for this run only, because MPI may store messages */
    ssize_t got = getrandom(random, sizeof random, 0);
    dt__hmac(info->key, sizeof info->key, random, sizeof random, info->key);
    dt__wipe(random, sizeof random);
    if (got != (ssize_t)sizeof random)
        return snprintf(info->why, sizeof info->why,
                   "the system gives no random numbers (error %d)", errno),
               -1;
    int fd = dt__tcp_listen(*address, DT__TCP_BACKLOG);
    if (fd >= 0)
        address->port = dt__tcp_own_address(fd).port;
    else
        snprintf(info->why, sizeof info->why, "rank 0 cannot listen at %s (error %d)",
            dt__tcp_address_text(*address).s, errno);
    return fd;
}

static int dt__mpi_ignore_failure(dt_ctx *ctx, dt_status status, const char *text, void *user) {
    (void)ctx, (void)status, (void)text, (void)user;
    return 1;
}

/* Connects all ranks over TCP. Returns NULL, or the text of an error. */
static const char *dt__mpi_connect(dt__mpi *mpi, const dt_run_desc *desc) {
    const dt_host *host = mpi->host;
    MPI_Request request;
    dt_run_desc tcp_desc = *desc;
    dt_ctx_desc quiet;
    int fd = -1;
    memset(&quiet, 0, sizeof quiet);
    quiet.rank = mpi->rank;
    quiet.host = host;
    /* This context computes nothing. With the GPU's kernel table it would open a stream on device
       0. */
    quiet.kernels = dt_kernels_cpu();
    mpi->tcp_ctx = dt_ctx_make(quiet);
    dt__mpi_rendezvous got,
        *info = (dt__mpi_rendezvous *)host->alloc(host->user, sizeof *info, DT_MEM_HOST);
    if (!mpi->tcp_ctx || !info) return "no memory for it";
    mpi->listener.failed = dt__mpi_ignore_failure;
    dt_listen(mpi->tcp_ctx, &mpi->listener);
    if (mpi->rank == 0) fd = dt__mpi_listen(mpi, desc, info);
    int error = MPI_Ibcast(info, (int)sizeof *info, MPI_BYTE, 0, mpi->control_comm, &request);
    if (error || !dt__mpi_wait_for(mpi, &request, dt__mpi_now(mpi) + mpi->timeout_s, 0)) {
        if (fd >= 0) close(fd);
        /* `info` is not freed, because MPI may still write into it */
        return "not all its processes came to dt_run within timeout_s";
    }
    got = *info;
    dt__wipe(info, sizeof *info);
    host->free(host->user, info, sizeof *info, DT_MEM_HOST);
    tcp_desc.ranks = mpi->size;
    tcp_desc.rank = mpi->rank;
    if (got.why[0])
        dt_fail(mpi->tcp_ctx, DT_ERR_COMM, "%s", got.why);
    else
        mpi->tcp = dt__tcp_make(mpi->tcp_ctx, &tcp_desc, got.address, got.key, fd);
    dt__wipe(got.key, sizeof got.key);
    return mpi->tcp ? NULL : dt_error_text(mpi->tcp_ctx);
}

/* Closes the TCP connections. Called after the final synchronization. */
static void dt__mpi_disconnect(dt__mpi *mpi) {
    if (mpi->tcp) {
        dt__tcp_goodbye(mpi->tcp);
        dt__tcp_free(mpi->tcp);
    }
    if (mpi->tcp_ctx) dt_unlisten(mpi->tcp_ctx, &mpi->listener);
    dt_ctx_free(mpi->tcp_ctx);
    mpi->tcp = NULL;
    mpi->tcp_ctx = NULL;
}

/* Initializes MPI if necessary and makes this process a rank. On failure returns NULL and sets
   *why. */
static dt__mpi *dt__mpi_open(const dt_host *host, const dt_run_desc *desc, const char **why) {
    int running = 0, finalized = 0, provided = 0;
    dt__mpi *mpi = (dt__mpi *)host->alloc(host->user, sizeof *mpi, DT_MEM_HOST);
    *why = "no memory for it";
    if (!mpi) return NULL;
    memset(mpi, 0, sizeof *mpi);
    mpi->host = host;
    mpi->timeout_s = desc->timeout_s;
    mpi->watch = dt__stopwatch_start(host, mpi->timeout_s);
    mpi->drain_request = MPI_REQUEST_NULL;
    MPI_Initialized(&running);
    MPI_Finalized(&finalized);
    *why = "it has ended in this process; a program that calls dt_run twice must begin and end MPI "
           "itself";
    if (!finalized && !running) {
        *why = "MPI_Init_thread fails";
        mpi->initialized =
            MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) == MPI_SUCCESS;
    }
    if (!finalized && (running || mpi->initialized)) {
        MPI_Comm_rank(MPI_COMM_WORLD, &mpi->rank);
        MPI_Comm_size(MPI_COMM_WORLD, &mpi->size);
        *why = dt__mpi_make(mpi);
        if (!*why) *why = dt__mpi_share(mpi, desc);
        if (!*why) *why = dt__mpi_connect(mpi, desc);
        if (!*why) return mpi;
    }
    /* once the size is set, *mpi is not freed, because MPI may still write into it */
    if (!mpi->size) host->free(host->user, mpi, sizeof *mpi, DT_MEM_HOST);
    return NULL;
}

/* Waits until this rank has learned of the run's failure or the deadline has passed. If `lost` is
   1, no rank has failed, but some message was never received. The rank to which it was sent then
   finds it (dt__mpi_drain) and tells the other ranks. */
static void dt__mpi_await_failure(dt__mpi *mpi, double until, int lost) {
    const dt_host *host = mpi->host;
    char text[512];
    MPI_Status status;
    MPI_Count bytes = 0;
    while (!mpi->first_failure.status && dt__mpi_now(mpi) < until) {
        dt__mpi_poll_failures(mpi);
        int arrived = dt__mpi_drain(mpi, &status, &bytes);
        if (!arrived) host->sleep(host->user, DT__NAP_MIN);
        if (!arrived || !lost || mpi->first_failure.status ||
            status.MPI_TAG / mpi->tag_span % 3 == 2)
            continue;
        if (!dt__mpi_wait_for(mpi, &mpi->drain_request, until, 0)) break;
        const dt__mpi_envelope *e = (const dt__mpi_envelope *)mpi->drain_buffer;
        snprintf(text, sizeof text,
            "rank %d: ended without receiving a message of rank %d of %llu bytes with tag %d",
            mpi->rank, status.MPI_SOURCE, (unsigned long long)e->bytes,
            status.MPI_TAG % mpi->tag_span);
        dt__mpi_tell_failure(mpi, DT_ERR_COMM, text);
        host->log(host->user, DT_LOG_ERROR, mpi->rank, text);
    }
    if (!mpi->first_failure.status)
        dt__mpi_set_report(&mpi->first_failure, DT_ERR_COMM, -1, "a message was never received");
}

/* The final synchronization tells all ranks whether a rank failed and whether every message was
   received. A rank whose rank_main has returned waits without a timeout for the other ranks, as
   with threads; after a failure it waits at most timeout_s. Returns 0 if not all ranks took
   part. */
static int dt__mpi_final_sync(dt__mpi *mpi) {
    MPI_Request request = MPI_REQUEST_NULL;
    int failed = mpi->first_failure.status != DT_OK;
    if (mpi->rank_lost) return 0;
    mpi->sync_own[0] = failed;
    mpi->sync_own[1] = mpi->message_balance;
    MPI_Iallreduce(
        mpi->sync_own, mpi->sync_sum, 2, MPI_INT64_T, MPI_SUM, mpi->control_comm, &request);
    if (!dt__mpi_wait_for(mpi, &request, 0, failed)) return 0;
    if (mpi->sync_sum[0] == 0 && mpi->sync_sum[1] == 0) return 1;
    double until = dt__mpi_now(mpi) + mpi->timeout_s;
    dt__mpi_await_failure(mpi, until, mpi->sync_sum[0] == 0);
    /* wait for messages in flight, because they must not arrive in the next run */
    for (int round = 0; round < DT__MPI_DRAIN_ROUNDS; round++) {
        mpi->sync_own[1] = mpi->message_balance;
        MPI_Iallreduce(&mpi->sync_own[1], &mpi->sync_sum[1], 1, MPI_INT64_T, MPI_SUM,
            mpi->control_comm, &request);
        if (!dt__mpi_wait_for(mpi, &request, until, 1)) return 0;
        if (mpi->sync_sum[1] == 0) break;
        mpi->host->sleep(mpi->host->user, DT__NAP_MAX);
    }
    return 1;
}

/* Waits at most timeout_s for the requests in flight. Returns 1 if all requests are complete. */
static int dt__mpi_finish_requests(dt__mpi *mpi) {
    double until = dt__mpi_now(mpi) + mpi->timeout_s;
    int settled = mpi->abandoned == 0;
    while (mpi->buffered_sends && settled) {
        settled = dt__mpi_wait_for(mpi, &mpi->buffered_sends->envelope, until, 1);
        dt__mpi_reap_buffered(mpi);
    }
    if (settled && mpi->drain_request != MPI_REQUEST_NULL)
        settled = dt__mpi_wait_for(mpi, &mpi->drain_request, until, 1);
    return settled;
}

/* Ends the rank's use of MPI after the rank has detached, and finalizes MPI if dt initialized it.
   If another rank did not reach the end of the run, MPI is not finalized, because MPI_Finalize
   would wait for that rank for ever; the launcher ends the other processes once this process exits
   with an error. Returns 1 if MPI no longer uses this rank's memory. */
static int dt__mpi_close(dt__mpi *mpi, dt_report *report) {
    int met = dt__mpi_final_sync(mpi), settled = met && dt__mpi_finish_requests(mpi);
    dt__mpi_disconnect(mpi);
    for (int i = 0; i < DT__MPI_COMMS && settled; i++) MPI_Comm_free(&mpi->comms[i]);
    if (settled) MPI_Comm_free(&mpi->control_comm);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, mpi->saved_handler);
    MPI_Errhandler_free(&mpi->saved_handler);
    if (settled && mpi->initialized) MPI_Finalize();
    if (!met && !mpi->first_failure.status)
        dt__mpi_set_report(&mpi->first_failure, DT_ERR_PEER, -1, "dt_run: not all ranks ended");
    *report = mpi->first_failure;
    if (!settled) { /* MPI may still read and write the requests and *mpi */
        mpi->host->log(
            mpi->host->user, DT_LOG_NOTICE, mpi->rank, "MPI is not finalized: not all ranks ended");
        return 0;
    }
    while (mpi->free_requests) {
        dt__mpi_request *r = mpi->free_requests;
        mpi->free_requests = r->next;
        dt_free(mpi->ctx, DT_MEM_HOST, r, sizeof *r);
    }
    dt__mpi_free(mpi);
    return 1;
}

#endif /* DT_USE_MPI */

// ==== 26. NCCL ==================================================================================

#ifdef DT_USE_NCCL

/* Each rank has a GPU. Large data in device memory go through NCCL. Everything else goes over TCP
   as in section 24: scalars, the messages with which ranks compare their calls (DT__CHECK), wait
   reports, failures, and messages of up to DT_NCCL_MIN_BYTES.

   An nccl channel is an ncclComm with its own stream. Each group has one, made by ncclCommSplit
   from that of its parent group. For messages, each ordered pair of ranks (sender, receiver) gets
   an nccl channel with its first message. (A channel without "nccl" is the number that separates a
   group's messages from the messages of other groups.)

       rank 0: ncclGetUniqueId --broadcast--> all ranks: ncclCommInitRankConfig    (the world)
       parent group: ncclCommSplit                                                 (each group)

   Each collective is enqueued on the stream of its group's nccl channel. That stream first waits
   for an event in the rank's own stream, which marks that the collective's inputs are ready.
   Collectives are enqueued in the order of the group's calls, which is the same on all ranks. The
   host regards a collective as done as soon as it is enqueued; section 17 says how it completes on
   the device.

   KNOWN LIMIT. An NCCL kernel occupies the device until the other ranks' kernels of the same
   operation run. If ranks start operations of different groups in different orders, the kernels of
   these operations must run concurrently, and NCCL does not guarantee that they do: with several
   communicators it requires one order on all ranks. So start overlapping operations in the same
   order on all ranks. NCCL 2.26 and later can enforce this order on the device, if the environment
   variable NCCL_LAUNCH_ORDER_IMPLICIT is 1.

   docs.nvidia.com/deeplearning/nccl, "Communicators", "Fault tolerance", "Group calls". */

/* The functions of NCCL that dt calls. With DT_NCCL_DLOPEN they are loaded from libnccl.so.2 when a
   run begins; otherwise the program is linked with NCCL. */
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

typedef struct dt__nccl_channel {
    ncclComm_t comm;
    void *queue;
    int call_in_progress; /* 1 if the last call on comm may be in progress */
    int is_borrowed;      /* 1 if comm belongs to the program, and dt does not free it */
    uint64_t enqueued;    /* number of operations enqueued on the stream so far */
    uint64_t accepted;    /* on the receiver of messages: number of accepted announcements */
    ncclUniqueId id;      /* for messages: sender and receiver initialize comm with this id */
    int has_id;
    float *f32_window; /* (DT_NCCL_F32_WINDOW) memory for sums of 16-bit types in f32 */
} dt__nccl_channel;

#ifndef DT_NCCL_F32_WINDOW
#define DT_NCCL_F32_WINDOW (4 << 20) /* number of elements of dt__nccl_channel.f32_window */
#endif
#ifndef DT_NCCL_MIN_BYTES
#define DT_NCCL_MIN_BYTES DT_EAGER_BYTES /* messages with more bytes go through NCCL */
#endif

typedef struct dt__nccl {
    dt__nccl_functions call;
    dt__nccl_channel world_channel; /* the world's nccl channel */
    /* (2 * ranks): element 2 r is for sends to rank r, element 2 r + 1 for receives from rank r */
    dt__nccl_channel *p2p_channels;
} dt__nccl;

static size_t dt__nccl_bytes(const dt__world *world) {
    return sizeof(dt__nccl) + 2 * (size_t)world->comm->base.size * sizeof(dt__nccl_channel);
}

/* ---- nccl channels ---- */

/* Communicators are nonblocking: a call may return ncclInProgress, and then no other call may use
   the communicator until ncclCommGetAsyncError says that the call is done. After a failure all
   communicators are aborted, because an abort also ends kernels that hang on the device. */

/* Fails the context with NCCL's error texts. Always returns 0. */
static int dt__nccl_fail(
    dt__world *world, const dt__nccl_channel *channel, const char *what, ncclResult_t result) {
    const dt__nccl *nccl = world->nccl;
    const char *more = nccl->call.GetLastError(channel ? channel->comm : NULL);
    dt__comm_fail(world, DT_ERR_COMM, "NCCL: %s: %s%s%s", what, nccl->call.GetErrorString(result),
        more && more[0] ? ": " : "", more ? more : "");
    return 0;
}

/* Checks the result of a call on the communicator. Returns 1 if the call is done or in progress. If
   the call failed, fails the context and returns 0. */
static int dt__nccl_channel_result(
    dt__world *world, dt__nccl_channel *channel, const char *what, ncclResult_t result) {
    channel->call_in_progress = result == ncclInProgress;
    return result == ncclSuccess || channel->call_in_progress ||
           dt__nccl_fail(world, channel, what, result);
}

/* Returns 1 if no call is in progress, so that the next call may be made; 0 if a call is in
   progress or the context has failed. */
static int dt__nccl_channel_is_idle(dt__world *world, dt__nccl_channel *channel) {
    ncclResult_t state = ncclSuccess;
    if (!channel->call_in_progress) return 1;
    ncclResult_t result = world->nccl->call.CommGetAsyncError(channel->comm, &state);
    if (result != ncclSuccess)
        return dt__nccl_fail(world, channel, "ncclCommGetAsyncError", result);
    if (state == ncclInProgress) return 0;
    return dt__nccl_channel_result(world, channel, "a communicator", state);
}

/* Opens the nccl channel's stream on the rank's device. Returns 0 with the context failed on
   failure. */
static int dt__nccl_channel_open(dt__world *world, dt__nccl_channel *channel) {
    char why[160] = "";
    dt_cuda_desc desc = { dt_cuda_device(dt_ctx_stream(world->ctx)), NULL, 1 };
    if (!channel->queue) channel->queue = dt_cuda_open(desc, why, sizeof why);
    if (!channel->queue) dt__comm_fail(world, DT_ERR_DEVICE, "a queue for NCCL: %s", why);
    return channel->queue != NULL;
}

static ncclConfig_t dt__nccl_config(void) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    return config;
}

/* Starts ncclCommInitRankConfig. The communicator can be used once dt__nccl_channel_is_idle returns
   1. Returns 1, or 0 if the context has failed. */
static int dt__nccl_channel_connect(
    dt__world *world, dt__nccl_channel *channel, ncclUniqueId id, int rank, int size) {
    ncclConfig_t config = dt__nccl_config();
    if (!dt__nccl_channel_open(world, channel)) return 0;
    return dt__nccl_channel_result(world, channel, "ncclCommInitRankConfig",
        world->nccl->call.CommInitRankConfig(&channel->comm, size, id, rank, &config));
}

static void dt__nccl_channel_close(dt__world *world, dt__nccl_channel *channel) {
    if (channel->comm && !channel->is_borrowed) world->nccl->call.CommDestroy(channel->comm);
    dt_free(world->ctx, DT_MEM_COMM, channel->f32_window, DT_NCCL_F32_WINDOW * sizeof(float));
    dt_cuda_close(channel->queue);
    memset(channel, 0, sizeof *channel);
}

/* Finalizes the communicator. Called as the `step` of dt__nccl_channel_wait, which watches the
   timeout; ncclCommDestroy alone would wait for the other ranks without a timeout. */
static int dt__nccl_channel_finalized(dt_work *work) {
    dt__world *world = work->comm->world;
    dt__nccl_channel *channel = work->nccl_channel;
    if (!dt__nccl_channel_is_idle(world, channel)) return DT__POLL_AGAIN;
    if (work->stage++ == 0 && channel->comm && !channel->is_borrowed)
        dt__nccl_channel_result(
            world, channel, "ncclCommFinalize", world->nccl->call.CommFinalize(channel->comm));
    return channel->call_in_progress ? DT__POLL_AGAIN : 0;
}

/* Calls `step` in the progress engine (section 12) until it returns 0, which means that no call is
   in progress on the nccl channel. */
static void dt__nccl_channel_wait(
    dt_comm *comm, dt__nccl_channel *channel, int (*step)(dt_work *work)) {
    dt__world *world = comm->world;
    dt__call call = dt__call_make(DT__SPLIT, NULL, NULL, 0, DT_I32);
    double begin = -1;
    if (dt_error(world->ctx)) return;
    call.host_memory = 1;
    dt_work *work = dt__work_acquire(comm, &call);
    if (!work) return;
    work->nccl_channel = channel;
    work->in_library = 1;
    work->algorithm = step;
    work->record_number = (uint64_t)world->state->op_count;
    dt__wait_work(world, work, &begin);
    dt__work_release(world, work);
}

/* Failure detection during an NCCL call. NCCL does not report failures of other ranks, so dt polls
   its TCP connections to them. */
static void dt__poll_peer_failures(dt__world *world) {
    char why[512] = "";
    int answer = world->control && world->control->poll
                     ? world->control->poll(world->control->user, why)
                     : 0;
    if (answer < 0)
        dt__comm_fail(world, DT_ERR_PEER, answer == -3 ? "peer failed first: %s" : "%s", why);
}

static int dt__nccl_channel_connected(dt_work *work) {
    dt__world *world = work->comm->world;
    if (dt__nccl_channel_is_idle(world, work->nccl_channel)) return 0;
    if (dt_error(world->ctx) == DT_OK) dt__poll_peer_failures(world);
    return DT__POLL_AGAIN;
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

/* Returns 1 if the call's sum must be accumulated in f32. NCCL rounds to the element type at every
   hop. So dt casts bf16 and f16 data of more than two ranks to f32, lets NCCL sum them in f32, and
   rounds once, as on every backend. The data are cast in windows of DT_NCCL_F32_WINDOW elements
   (f32_window). A sum of two values is rounded only once anyway. NCCL chooses the order of a
   sum. */
static int dt__needs_f32_window(const dt_comm *comm, const dt__call *call) {
    return dt__pattern_of(call->op)->reduces && dt__narrow(call->dtype) && comm->base.size > 2 &&
           call->redop != DT_MAX && call->redop != DT_MIN;
}

/* Casts the elements of the current window, on the nccl channel's stream. With back = 0, casts them
   from call->send to f32_window, for every block of call->send. With back = 1, casts the result
   from f32_window to call->recv. */
static void dt__nccl_cast(dt_work *work, int back) {
    const dt__call *call = &work->call;
    const dt_kernels *kernels = dt_ctx_kernels(work->comm->world->ctx);
    int all_blocks = !back && dt__pattern_of(call->op)->send_blocks, me = work->comm->base.rank;
    int first = call->op == DT__REDUCE_SCATTER && back ? me : 0;
    size_t n =
        call->count - work->at < work->window_count ? call->count - work->at : work->window_count;
    for (int i = 0; i < (all_blocks ? work->comm->base.size : 1); i++) {
        char *buf = (char *)(back ? call->recv : (void *)call->send);
        void *narrow = buf + ((all_blocks ? (size_t)i * call->count : 0) + work->at) *
                                 dt_dtype_size(call->dtype);
        void *wide = work->nccl_channel->f32_window + (size_t)(first + i) * n;
        dt_cast_args a = { .dtype = back ? call->dtype : DT_F32,
            .from = back ? DT_F32 : call->dtype,
            .out = back ? narrow : wide,
            .in = back ? wide : narrow,
            .count = n };
        dt_status status =
            kernels->cast ? kernels->cast(&a, work->nccl_channel->queue) : DT_ERR_UNSUPPORTED;
        if (status) dt__data_failed(work->comm, call, status);
    }
}

/* Enqueues a gather, scatter or all-to-all as sends and receives, all in one NCCL group call. */
static ncclResult_t dt__nccl_enqueue_p2p(dt_work *work, void *stream) {
    const dt_comm *comm = work->comm;
    const dt__call *c = &work->call;
    const dt__pattern *pattern = dt__pattern_of(c->op);
    const dt__nccl_functions *call = &comm->world->nccl->call;
    ncclDataType_t type = dt__nccl_type(c->dtype);
    ncclResult_t result = call->GroupStart();
    int v = c->op == DT__ALL_TO_ALL_V;
    for (int other = 0; other < comm->base.size; other++) {
        int sends = dt__sends(comm, c) && (pattern->all_recv || other == c->peer);
        int receives = dt__receives(comm, c) && (pattern->all_send || other == c->peer);
        size_t out = v ? c->send_counts[other] : c->count,
               in = v ? c->recv_counts[other] : c->count;
        size_t from = v                      ? dt__sum_counts(c->send_counts, other)
                      : pattern->send_blocks ? (size_t)other * c->count
                                             : 0;
        size_t at = v                   ? dt__sum_counts(c->recv_counts, other)
                    : pattern->all_send ? (size_t)other * c->count
                                        : 0;
        if (other == comm->base.rank &&
            dt__element(work, c->send, from) == dt__element(work, c->recv, at))
            continue;
        if (sends && out > 0 && result == ncclSuccess)
            result = call->Send(dt__element(work, c->send, from), out, type, other,
                work->nccl_channel->comm, (cudaStream_t)stream);
        if (receives && in > 0 && result == ncclSuccess)
            result = call->Recv(dt__element(work, c->recv, at), in, type, other,
                work->nccl_channel->comm, (cudaStream_t)stream);
        if (result == ncclInProgress) result = ncclSuccess; /* GroupEnd returns the final result */
    }
    ncclResult_t end = call->GroupEnd();
    return result == ncclSuccess ? end : result;
}

/* Enqueues the current window of a collective on the nccl channel's stream. wide: 1 if its data are
   in f32_window. */
static ncclResult_t dt__nccl_enqueue_window(dt_work *work, int wide) {
    const dt__call *c = &work->call;
    const dt__nccl_functions *call = &work->comm->world->nccl->call;
    const void *send = wide ? work->nccl_channel->f32_window : c->send;
    size_t n = c->count - work->at < work->window_count ? c->count - work->at : work->window_count;
    void *recv = wide ? work->nccl_channel->f32_window : c->recv;
    ncclDataType_t type = dt__nccl_type(wide ? DT_F32 : c->dtype);
    ncclRedOp_t op = dt__nccl_op(c->redop);
    ncclComm_t comm = work->nccl_channel->comm;
    cudaStream_t stream = (cudaStream_t)dt_cuda_stream(work->nccl_channel->queue);
    switch (c->op) {
    case DT__ALL_REDUCE: return call->AllReduce(send, recv, n, type, op, comm, stream);
    case DT__REDUCE: return call->Reduce(send, recv, n, type, op, c->peer, comm, stream);
    case DT__REDUCE_SCATTER:
        if (wide) recv = work->nccl_channel->f32_window + (size_t)work->comm->base.rank * n;
        return call->ReduceScatter(send, recv, n, type, op, comm, stream);
    case DT__ALL_GATHER: return call->AllGather(send, recv, n, type, comm, stream);
    case DT__BROADCAST: return call->Broadcast(recv, recv, n, type, c->peer, comm, stream);
    default: return dt__nccl_enqueue_p2p(work, stream);
    }
}

/* Records the event `mark` in the rank's own stream, and returns it. Called when the operation is
   called: once the stream reaches the event, the operation's inputs are ready and no earlier kernel
   uses its outputs. A later event could deadlock, because by then the stream may be waiting for
   data that other ranks send only after this operation. On failure fails the context. */
static void *dt__nccl_record_inputs(dt_work *work, void *mark) {
    dt_ctx *ctx = work->comm->world->ctx;
    void *made = dt_ctx_kernels(ctx)->event_record(dt_ctx_stream(ctx), mark);
    if (!made) dt__data_failed(work->comm, &work->call, DT_ERR_DEVICE);
    return made ? made : mark;
}

/* Makes the nccl channel's stream wait for the event `mark`. Returns 0 with the context failed on
   failure. */
static int dt__nccl_channel_wait_event(dt_work *work, dt__nccl_channel *channel, void *mark) {
    dt_status status = dt_ctx_kernels(work->comm->world->ctx)->event_wait(channel->queue, mark);
    if (status) dt__data_failed(work->comm, &work->call, status);
    return !status;
}

/* Records the operation's event after everything that is enqueued on the nccl channel's stream.
   Returns 0 with the context failed on failure. */
static int dt__nccl_channel_record_event(dt_work *work, dt__nccl_channel *channel) {
    void *mark =
        dt_ctx_kernels(work->comm->world->ctx)->event_record(channel->queue, work->device_event);
    if (mark)
        work->device_event = mark;
    else
        dt__data_failed(work->comm, &work->call, DT_ERR_DEVICE);
    work->on_device = 1;
    return mark != NULL;
}

/* Stages. 0: wait until all earlier collectives of the nccl channel are enqueued, then enqueue the
   first window. 1: a window is enqueued; enqueue the next window. */
static int dt__nccl_collective(dt_work *work) {
    dt_comm *comm = work->comm;
    dt__nccl_channel *channel = work->nccl_channel;
    int wide = dt__needs_f32_window(comm, &work->call), sum_here = dt__receives(comm, &work->call);
    size_t shares = dt__pattern_of(work->call.op)->send_blocks ? (size_t)comm->base.size : 1;
    if (work->nccl_sequence != channel->enqueued + 1) return DT__POLL_AGAIN;
    while (dt__nccl_channel_is_idle(comm->world, channel) && dt_error(comm->world->ctx) == DT_OK) {
        if (work->stage == 0) {
            if (!dt__nccl_channel_wait_event(work, channel, work->device_event)) return 0;
            work->window_count = wide ? DT_NCCL_F32_WINDOW / shares : work->call.count + 1;
        } else {
            if (wide && sum_here) dt__nccl_cast(work, 1);
            work->at += work->window_count;
            if (work->at >= work->call.count) {
                channel->enqueued++;
                dt__nccl_channel_record_event(work, channel);
                return 0;
            }
        }
        work->stage = 1;
        if (wide) dt__nccl_cast(work, 0);
        dt__nccl_channel_result(comm->world, channel, dt__pattern_of(work->call.op)->name,
            dt__nccl_enqueue_window(work, wide));
    }
    return DT__POLL_AGAIN;
}

/* Returns dt__nccl_collective if the collective moves data in device memory, and so goes through
   NCCL; else NULL. */
static int (*dt__nccl_algorithm(const dt_comm *comm, const dt__call *call))(dt_work *work) {
    dt__nccl_channel *channel = comm->nccl_channel;
    if (call->host_memory || !channel || dt__is_p2p(call->op) || !dt__pattern_of(call->op)->counted)
        return NULL;
    if (call->count == 0 && call->op != DT__ALL_TO_ALL_V) return NULL;
    if (dt__needs_f32_window(comm, call) && !channel->f32_window)
        channel->f32_window = (float *)dt_alloc(
            comm->world->ctx, DT_MEM_COMM, DT_NCCL_F32_WINDOW * sizeof(float), "sums in f32");
    return dt__nccl_collective;
}

static void dt__nccl_begin_collective(dt_work *work) {
    work->nccl_channel = work->comm->nccl_channel;
    work->nccl_sequence = ++work->comm->backend_seq;
    work->device_event = dt__nccl_record_inputs(work, work->device_event);
}

/* ---- messages ---- */

/* NCCL's messages have no tags: ncclSend and ncclRecv match in the order of their calls. So the
   receiver numbers the messages of an nccl channel:

       sender      announces the message and the nccl channel's id   (matched by group and tag)
       receiver    replies with the message's number
       both        call ncclSend and ncclRecv in the order of the numbers

   The receiver gives a message its number when it has posted a receive for the message. So no
   message waits for an earlier one whose receive is not posted yet. */

static dt__nccl_channel *dt__nccl_channel_of(dt_work *work, const dt__p2p *p2p) {
    dt__nccl *nccl = work->comm->world->nccl;
    return &nccl->p2p_channels[2 * work->comm->group->ranks[p2p->peer] + (p2p->op == DT__RECV)];
}

/* Returns the group, peer and tag with which the receiver's reply is sent. */
static dt__address dt__nccl_reply_address(const dt_work *work, const dt__p2p *p2p) {
    dt__address a = dt__address_of(work, p2p);
    a.channel |= 0x80000000u;
    return a;
}

/* Sends the announcement of a message to its receiver. Returns -1 on failure. */
static int dt__nccl_announce(dt_work *work, dt__p2p *p2p) {
    dt__world *world = work->comm->world;
    dt__nccl_channel *channel = dt__nccl_channel_of(work, p2p);
    ncclResult_t result =
        channel->has_id ? ncclSuccess : world->nccl->call.GetUniqueId(&channel->id);
    if (result != ncclSuccess) return dt__nccl_fail(world, NULL, "ncclGetUniqueId", result) - 1;
    channel->has_id = 1;
    return dt__transport_post(
        work, p2p, dt__address_of(work, p2p), 1, &channel->id, sizeof channel->id);
}

/* Accepts an announcement that has arrived at the receiver: stores the nccl channel's id, gives the
   message its number and sends the number to the sender. Returns -1 on failure. */
static int dt__nccl_accept(dt_work *work, dt__p2p *p2p, dt__arrival *arrival) {
    if (arrival->bytes == sizeof(ncclUniqueId))
        arrival->bytes = p2p->count * dt_dtype_size(work->call.dtype);
    if (dt__transport_received(work, p2p, arrival) < 0) return -1;
    dt__nccl_channel *channel = dt__nccl_channel_of(work, p2p);
    if (!channel->has_id) memcpy(&channel->id, p2p->nccl_announcement, sizeof channel->id);
    channel->has_id = 1;
    p2p->nccl_sequence = channel->accepted++;
    return dt__transport_post(work, p2p, dt__nccl_reply_address(work, p2p), 1, &p2p->nccl_sequence,
        sizeof p2p->nccl_sequence);
}

/* Enqueues the message on the nccl channel's stream if all messages with lower numbers are
   enqueued. Returns 1 if the message is enqueued, 0 if it must wait, -1 on failure. */
static int dt__nccl_enqueue_message(dt_work *work, dt__p2p *p2p) {
    dt__world *world = work->comm->world;
    const dt__nccl_functions *call = &world->nccl->call;
    dt__nccl_channel *channel = dt__nccl_channel_of(work, p2p);
    ncclDataType_t type = dt__nccl_type(work->call.dtype);
    int sends = p2p->op == DT__SEND;
    if (!channel->comm && !dt__nccl_channel_connect(world, channel, channel->id, sends ? 0 : 1, 2))
        return -1;
    if (p2p->nccl_sequence != channel->enqueued || !dt__nccl_channel_is_idle(world, channel))
        return dt_error(world->ctx) ? -1 : 0;
    if (!dt__nccl_channel_wait_event(work, channel, p2p->device_event)) return -1;
    cudaStream_t stream = (cudaStream_t)dt_cuda_stream(channel->queue);
    ncclResult_t result = sends ? call->Send(p2p->send, p2p->count, type, 1, channel->comm, stream)
                                : call->Recv(p2p->recv, p2p->count, type, 0, channel->comm, stream);
    return dt__nccl_channel_result(world, channel, sends ? "ncclSend" : "ncclRecv", result) ? 1
                                                                                            : -1;
}

/* Records the operation's event after the message that has been enqueued. If the message is part of
   a collective's algorithm, also makes the rank's own stream wait for it, because the algorithm's
   next round uses the received data. Returns 1 on success, 0 if the call is still in progress, -1
   on failure. */
static int dt__nccl_message_enqueued(dt_work *work, dt__p2p *p2p) {
    dt__world *world = work->comm->world;
    dt__nccl_channel *channel = dt__nccl_channel_of(work, p2p);
    if (!dt__nccl_channel_is_idle(world, channel)) return dt_error(world->ctx) ? -1 : 0;
    channel->enqueued++;
    work->nccl_channel = channel;
    if (!dt__nccl_channel_record_event(work, channel)) return -1;
    if (work->algorithm &&
        dt_ctx_kernels(world->ctx)->event_wait(dt_ctx_stream(world->ctx), work->device_event) !=
            DT_OK)
        return dt__data_failed(work->comm, &work->call, DT_ERR_DEVICE), -1;
    return 1;
}

static int dt__nccl_begin_message(dt_work *work, dt__p2p *p2p) {
    dt__world *world = work->comm->world;
    if (!p2p->is_enqueued) {
        dt__device_send_enqueue(work, p2p);
        p2p->device_event = dt__nccl_record_inputs(work, p2p->device_event);
        if (p2p->op == DT__RECV)
            p2p->nccl_announcement =
                dt_alloc(world->ctx, DT_MEM_HOST, DT__ANNOUNCEMENT_BYTES, "an announcement");
        if (dt_error(world->ctx) != DT_OK) return -1;
    }
    if (!dt__device_send_dequeue(work, p2p)) return 0;
    return p2p->op == DT__SEND ? dt__nccl_announce(work, p2p)
                               : dt__transport_post(work, p2p, dt__address_of(work, p2p), 0,
                                     p2p->nccl_announcement, DT__ANNOUNCEMENT_BYTES);
}

/* Advances a message. Its states: 0 not begun, 1 announcement in flight, 2 reply in flight, 3 ready
   to be enqueued, 4 enqueued. Returns 1 once the message is done for the host, 0 before, -1 on
   failure. */
static int dt__nccl_message(dt_work *work, dt__p2p *p2p) {
    dt__world *world = work->comm->world;
    size_t bytes = p2p->count * dt_dtype_size(work->call.dtype);
    int sends = p2p->op == DT__SEND, self = p2p->peer == work->comm->base.rank;
    dt__arrival arrival = { DT_ANY, 0, DT__ANNOUNCEMENT_BYTES };
    if (!dt__on_device(work) || bytes <= DT_NCCL_MIN_BYTES || self)
        return dt__transport_message(work, p2p);
    if (p2p->state == 0) {
        int begun = dt__nccl_begin_message(work, p2p);
        if (begun <= 0) return begun;
        p2p->state = 1;
    }
    if (p2p->state == 1) {
        int done = dt__transport_test(work, p2p, &arrival);
        if (done <= 0) return done;
        done = sends ? dt__transport_post(work, p2p, dt__nccl_reply_address(work, p2p), 0,
                           &p2p->nccl_sequence, sizeof p2p->nccl_sequence)
                     : dt__nccl_accept(work, p2p, &arrival);
        if (done < 0) return -1;
        p2p->state = 2;
    }
    if (p2p->state == 2) {
        int done = dt__transport_test(work, p2p, &arrival);
        if (done <= 0) return done;
        if (sends && world->peers) world->peers[work->comm->group->ranks[p2p->peer]].received++;
        dt_free(world->ctx, DT_MEM_HOST, p2p->nccl_announcement, DT__ANNOUNCEMENT_BYTES);
        p2p->nccl_announcement = NULL;
        p2p->state = 3;
    }
    int progressed = p2p->state == 3 ? dt__nccl_enqueue_message(work, p2p) : 1;
    if (progressed <= 0) return progressed;
    p2p->state = 4;
    progressed = dt__nccl_message_enqueued(work, p2p);
    if (progressed > 0) dt__p2p_release_device(work, p2p);
    return progressed;
}

/* ---- groups ---- */

/* Splits the nccl channel of `comm`. All ranks of `comm` must call this function. `made` is this
   rank's new group; it gets an nccl channel if it has more than one rank. */
static void dt__nccl_split(dt_comm *comm, dt_comm *made, int color) {
    dt__world *world = comm->world;
    ncclConfig_t config = dt__nccl_config();
    int several = made && made->base.size > 1;
    if (!comm->nccl_channel || dt_error(world->ctx)) return;
    /* NCCL allows no other operation in flight on a communicator during its split */
    dt__on_settle(world->ctx, 0, world);
    dt__nccl_channel *channel = several ? (dt__nccl_channel *)dt_alloc(world->ctx, DT_MEM_HOST,
                                              sizeof *channel, "an nccl channel")
                                        : NULL;
    if (several && !channel) return;
    ncclComm_t child = NULL;
    if (channel) memset(channel, 0, sizeof *channel);
    if (channel) made->nccl_channel = channel;
    if (channel && !dt__nccl_channel_open(world, channel)) return;
    ncclResult_t result =
        world->nccl->call.CommSplit(comm->nccl_channel->comm, several ? color : NCCL_SPLIT_NOCOLOR,
            several ? made->base.rank : 0, channel ? &channel->comm : &child, &config);
    if (!dt__nccl_channel_result(world, comm->nccl_channel, "ncclCommSplit", result)) return;
    /* NCCL 2.28 returns ncclSuccess from a split that is still in progress */
    comm->nccl_channel->call_in_progress = 1;
    dt__nccl_channel_wait(comm, comm->nccl_channel, dt__nccl_channel_connected);
    if (!channel || dt_error(world->ctx)) return;
    channel->call_in_progress = 1;
    dt__nccl_channel_wait(comm, channel, dt__nccl_channel_connected);
}

static void dt__nccl_free(dt__world *world) {
    dt__nccl *nccl = world->nccl;
    for (int i = 0; i < 2 * world->comm->base.size; i++)
        dt__nccl_channel_close(world, &nccl->p2p_channels[i]);
    world->nccl = NULL;
    dt_free(world->ctx, DT_MEM_HOST, nccl, dt__nccl_bytes(world));
}

/* Closes a group's nccl channel. If the group is the world, which is closed last, also frees the
   other NCCL state. */
static void dt__nccl_close(dt_comm *comm) {
    dt__world *world = comm->world;
    if (comm->nccl_channel) {
        dt__nccl_channel_wait(comm, comm->nccl_channel, dt__nccl_channel_finalized);
        dt__nccl_channel_close(world, comm->nccl_channel);
        if (comm->nccl_channel != &world->nccl->world_channel)
            dt_free(world->ctx, DT_MEM_HOST, comm->nccl_channel, sizeof *comm->nccl_channel);
        comm->nccl_channel = NULL;
    }
    if (world->nccl && comm == world->comm) dt__nccl_free(world);
}

/* Aborts all communicators after the context has failed, because an abort ends kernels that hang on
   the device. Each abort also frees memory, and so waits until the entire device is idle. All
   aborts are therefore in one NCCL group call, so that none of them waits for kernels of another
   communicator. NCCL 2.22 and later can group aborts; in earlier versions the first abort may wait
   for the second. */
static void dt__nccl_abort(dt__world *world) {
    dt__nccl *nccl = world->nccl;
    nccl->call.GroupStart();
    for (dt_comm *comm = world->comms; comm; comm = comm->next) {
        if (comm->nccl_channel && comm->nccl_channel->comm)
            nccl->call.CommAbort(comm->nccl_channel->comm);
        if (comm->nccl_channel) comm->nccl_channel->comm = NULL;
    }
    for (int i = 0; i < 2 * world->comm->base.size; i++) {
        if (nccl->p2p_channels[i].comm) nccl->call.CommAbort(nccl->p2p_channels[i].comm);
        nccl->p2p_channels[i].comm = NULL;
    }
    nccl->call.GroupEnd();
}

/* Compares this collective with the other ranks' wait reports. Fails the context if a rank of the
   group waits in a different call that has the same sequence number. */
static void dt__nccl_compare_reports(dt_work *work) {
    dt_comm *comm = work->comm;
    const dt__world *world = comm->world;
    uint64_t what = dt__pack_call(&work->call), count = work->call.count;
    for (int rank = 0; world->peers && rank < comm->base.size && !dt__is_p2p(work->call.op);
         rank++) {
        const dt__wait_report *last = &world->peers[comm->group->ranks[rank]].last_report;
        const dt__op_record *r = &last->wait_record;
        if (!last->waiting_op || last->waiting_op == DT__REPORT_ENDED ||
            last->wait_channel != dt__counter_of(comm, 0))
            continue;
        if (r->seq != work->call.seq || (r->packed_call == what && r->count == count)) continue;
        dt__call_view its = { r->packed_call, r->count, dt__site_text(r->file, r->line) }, own;
        dt__own_call_view(work, &own);
        dt__calls_differ(work, rank, &its, comm->base.rank, &own);
        return;
    }
}

/* Checks an operation that the device has not finished. Fails the context if the communicator has
   an error, another rank has failed or ended, or the ranks have called different operations. */
static void dt__nccl_check_device(dt_work *work) {
    dt__world *world = work->comm->world;
    ncclResult_t state = ncclSuccess;
    if (work->nccl_channel && work->nccl_channel->comm)
        world->nccl->call.CommGetAsyncError(work->nccl_channel->comm, &state);
    if (state != ncclSuccess && state != ncclInProgress)
        dt__nccl_fail(world, work->nccl_channel, "a communicator", state);
    else
        dt__poll_peer_failures(world);
    if (dt_error(world->ctx) == DT_OK) dt__nccl_compare_reports(work);
    int awaited = dt__first_not_begun(work);
    if (dt_error(world->ctx) == DT_OK && awaited != DT_ANY &&
        world->peers[awaited].last_report.waiting_op == DT__REPORT_ENDED)
        dt__ended_without(work, awaited);
}

static const dt__comm_ops dt__nccl_ops = { .name = "nccl",
    .message = dt__nccl_message,
    .algorithm = dt__nccl_algorithm,
    .begin = dt__nccl_begin_collective,
    .split = dt__nccl_split,
    .close = dt__nccl_close,
    .check_device = dt__nccl_check_device };

/* Loads NCCL's functions. Returns 0 with the context failed on failure. The library is never
   closed, because it has its own threads, for example a thread that ncclGetUniqueId starts. dt
   cannot wait for the end of these threads, and after a dlclose they would execute unmapped code.
   In a later run dlopen returns the library that is still loaded. */
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

/* Warns of lazy kernel loading, which can deadlock the ranks: before CUDA loads a kernel lazily, it
   may wait until the device is idle and so until NCCL's kernels have ended. NCCL's kernels wait for
   the other ranks. One of those may wait for an operation that this rank starts only after the
   kernel is loaded. */
static void dt__nccl_warn_lazy_loading(const dt__world *world) {
    const char *loading = dt__launch_env("CUDA_MODULE_LOADING");
    if (world->rank != 0 || (loading && strcmp(loading, "EAGER") == 0)) return;
    dt_log(world->ctx, DT_LOG_NOTICE,
        "backend nccl: set CUDA_MODULE_LOADING=EAGER before the program starts: a kernel "
        "that CUDA loads late can wait for one of NCCL's, and that for another rank");
}

/* Makes the world's nccl channel from the program's communicator `given`. If `given` is NULL, makes
   a communicator from an id that rank 0 broadcasts. */
static void dt__nccl_begin(dt__world *world, void *given) {
    dt_comm *comm = world->comm;
    dt__nccl *nccl = NULL;
    ncclUniqueId id;
    memset(&id, 0, sizeof id);
    if (!dt_ctx_kernels(world->ctx)->event_record)
        dt__comm_fail(world, DT_ERR_UNSUPPORTED,
            "backend nccl: rank %d runs on %s, and needs a CUDA device", world->rank,
            dt_ctx_kernels(world->ctx)->name);
    else
        nccl = (dt__nccl *)dt_alloc(world->ctx, DT_MEM_HOST, dt__nccl_bytes(world), "NCCL");
    if (!nccl) return;
    memset(nccl, 0, dt__nccl_bytes(world));
    nccl->p2p_channels = (dt__nccl_channel *)(void *)(nccl + 1);
    world->nccl = nccl;
    comm->ops = &dt__nccl_ops;
    if (!dt__nccl_load(world, nccl) || comm->base.size == 1) return;
    dt__nccl_warn_lazy_loading(world);
    comm->nccl_channel = &nccl->world_channel;
    if (given) {
        comm->nccl_channel->comm = (ncclComm_t)given;
        comm->nccl_channel->is_borrowed = 1;
        dt__nccl_channel_open(world, comm->nccl_channel);
        return;
    }
    ncclResult_t result = world->rank == 0 ? nccl->call.GetUniqueId(&id) : ncclSuccess;
    if (result != ncclSuccess) dt__nccl_fail(world, NULL, "ncclGetUniqueId", result);
    dt__call call = dt__call_make(DT__BROADCAST, &id, &id, sizeof id / sizeof(int32_t), DT_I32);
    call.host_memory = 1;
    if (dt__op_run(comm, call) == DT_OK &&
        dt__nccl_channel_connect(world, comm->nccl_channel, id, comm->base.rank, comm->base.size))
        dt__nccl_channel_wait(comm, comm->nccl_channel, dt__nccl_channel_connected);
}

#else

static void dt__nccl_begin(dt__world *world, void *given) {
    (void)given;
    dt__comm_fail(world, DT_ERR_UNSUPPORTED, "%s", dt__backend_missing(DT_BACKEND_NCCL));
}

#endif /* DT_USE_NCCL */

// ==== 27. Attach and launch: code ===============================================================

/* The life of a run. With a thread or a forked process for each rank, dt_run calls:

       dt_team_make    checks the description and creates the run's shared memory
       each rank       calls dt_team_ctx, dt_comm_attach, rank_main and dt_comm_detach
       dt_team_free    looks for unreceived messages and fills the report

   The supervisor exchanges no messages with ranks: every failure is reported through the failure
   record (section 9). */

struct dt_team {
    dt__shared *shared;
    void *range;
    size_t range_bytes;
    const dt_host *host;
    dt_run_desc desc;
    int64_t oom_kills; /* result of dt__run_oom_kills before the ranks began */
    dt_host host_copy; /* copy of the caller's dt_host; `host` points to it */
    /* one for the caller of dt_team_make and one for each rank's thread; the team is freed when
       none is left */
    int references;
    struct dt__rank_job *jobs; /* (ranks) in the team of a dt_run; NULL in other teams */
};

/* Records and logs a failure outside of any context. */
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

static void dt__set_ended(dt__shared *shared, int local_rank) {
    __atomic_store_n(&shared->state[local_rank].ended, 1, __ATOMIC_RELEASE);
    __atomic_fetch_add(&shared->ended, 1, __ATOMIC_RELEASE);
    __atomic_fetch_add(&shared->state[local_rank].progress, 1, __ATOMIC_SEQ_CST);
    /* stored last, because the rank makes no progress after the increment above */
    __atomic_store_n(
        &shared->state[local_rank].idle_at_progress, DT__IDLE_FOREVER, __ATOMIC_SEQ_CST);
}

/* Advances the pending operations. The tensor library calls this function between two kernels. */
static void dt__on_kernel_done(dt_ctx *ctx, void *user) {
    dt__world *world = (dt__world *)user;
    if (world->first_unfinished && dt_error(ctx) == DT_OK) dt__advance_some(world);
}

/* Makes a rank's world. Its ranks communicate in a team's shared memory, or over a transport. With
   a transport its state is in the shared memory of the machine's ranks if `node` is given, else in
   private memory. */
static dt__world *dt__world_make(dt_ctx *ctx, const dt_attach_desc *desc, const dt__node *node) {
    dt__world *world = (dt__world *)dt_alloc(ctx, DT_MEM_HOST, sizeof *world, "the world");
    dt__private_range *lone = NULL;
    if (!world) return NULL;
    memset(world, 0, sizeof *world);
    world->ctx = ctx;
    world->host = dt_ctx_host(ctx);
    world->rank = world->local_rank = desc->rank;
    world->link = desc->team ? desc->team->desc.link : desc->link;
    if (desc->team) {
        world->shared = desc->team->shared;
        world->is_thread = !world->shared->separate_memory;
    } else {
        world->transport = *desc->transport;
        world->channel_count = 1;
    }
    if (node) {
        world->shared = node->shared;
        world->local_rank = node->local_rank;
        world->node = node;
    } else if (!desc->team) {
        lone = (dt__private_range *)dt_alloc(ctx, DT_MEM_HOST, sizeof *lone, "the world");
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
    world->awaited_rank = DT_ANY;
    world->state = lone ? &lone->state : &world->shared->state[world->local_rank];
    world->records =
        lone ? lone->records : world->shared->records + (size_t)world->local_rank * DT_RECORDS;
    __atomic_store_n(&world->state->pid, (int)getpid(), __ATOMIC_RELAXED);
    __atomic_store_n(&world->state->tid, (int)syscall(SYS_gettid), __ATOMIC_RELAXED);
    return world;
}

/* Makes the group of all ranks. */
static dt__group *dt__world_group(dt__world *world, int size) {
    if (!world->transport.send) return dt__group_from_index(world->shared, 0);
    dt__group *group = dt__private_group_make(world, size, "world");
    for (int rank = 0; group && rank < size; rank++) group->ranks[rank] = rank;
    if (group && dt__is_on_node(world, group))
        dt__group_use_shared(group, dt__group_from_index(world->shared, 0));
    return group;
}

static void dt__peer_views_make(dt__world *world, const dt__control *control, int size) {
    size_t bytes = (size_t)size * sizeof(dt__peer_view);
    world->peers = (dt__peer_view *)dt_alloc(world->ctx, DT_MEM_HOST, bytes, "other ranks");
    if (!world->peers) return;
    memset(world->peers, 0, bytes);
    world->control = control;
    world->comm_size = size;
    for (int rank = 0; rank < size; rank++) {
        world->peers[rank].state.waits_for = world->peers[rank].last_report.waits_for = DT_ANY;
        if (rank != world->rank) world->peers[rank].state.pid = control->pid(control->user, rank);
    }
}

/* Tells the other ranks that this rank's context failed before its world could do so (before
   dt_listen). Always returns NULL. */
static dt_comm *dt__attach_failed(dt_ctx *ctx, const dt_attach_desc *desc, dt__shared *shared) {
    if (shared && dt__claim(shared, desc->rank))
        dt__publish_failure(shared, desc->rank, dt_error(ctx), dt_error_text(ctx));
    if (!desc->team && desc->transport && desc->transport->fail)
        desc->transport->fail(desc->transport->user, dt_error_text(ctx));
    return NULL;
}

/* Attaches a rank. node: the ranks on this machine, if ranks of a transport share memory, else
   NULL. control: the functions that carry wait reports, or NULL. run: the description passed to
   dt_run, if dt_run attaches a rank of a transport, else NULL (a team has its own description). */
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
    world->listener.kernel_done = dt__on_kernel_done;
    world->listener.drain = dt__on_settle;
    world->listener.user = world;
    dt_listen(ctx, &world->listener);
    dt_ctx_attach(ctx, world);
    const dt__comm_ops *ops = desc.team ? &dt__threads_ops : &dt__transport_ops;
    if (group && !desc.team && group->members) ops = &dt__node_ops;
    if (desc.team) run = &desc.team->desc;
    if (run) world->fault_count = dt__faults_parse(run->fault, desc.rank, size, world->faults);
    if (run && !desc.team) world->status_request = run->status_request;
    world->check = control ? control->check : run ? run->check : 0;
    if (control && group) dt__peer_views_make(world, control, size);
    if (group) world->comm = dt__comm_make(world, ops, group, desc.rank);
    size_t mail = 2 * (size_t)size * sizeof *world->device_sends;
    if (world->comm && desc.transport && dt_ctx_kernels(ctx)->open) {
        world->device_sends =
            (uint64_t *)dt_alloc(ctx, DT_MEM_HOST, mail, "messages from a device");
        if (world->device_sends) memset(world->device_sends, 0, mail);
    }
    if (world->comm && (desc.nccl || (run && run->backend == DT_BACKEND_NCCL)))
        dt__nccl_begin(world, desc.nccl);
    return world->comm;
}

dt_comm *dt_comm_attach(dt_ctx *ctx, dt_attach_desc desc) {
    return dt__attach(ctx, desc, NULL, NULL, NULL);
}

/* Releases the work objects of operations that a failure has left unfinished. */
static void dt__works_recycle(dt__world *world) {
    dt__on_settle(world->ctx, 0, world);
    if (world->blocking) dt__work_release(world, world->blocking);
    world->blocking = NULL;
    while (world->first_started) {
        dt_work *work = world->first_started;
        dt__started_remove(world, work);
        dt__work_release(world, work);
    }
}

static void dt__works_free(dt__world *world) {
    while (world->free_works) {
        dt_work *work = world->free_works;
        world->free_works = work->next;
        dt_free(
            world->ctx, DT_MEM_HOST, work->p2p_ops, (size_t)work->p2p_capacity * sizeof(dt__p2p));
        if (work->device_event) dt_ctx_kernels(world->ctx)->event_destroy(work->device_event);
        dt_free(world->ctx, DT_MEM_HOST, work, sizeof *work);
    }
    dt_free(world->ctx, DT_MEM_COMM, world->send_copy, world->send_copy_bytes);
}

void dt_comm_detach(dt_ctx *ctx, dt_status status) {
    dt__world *world = dt__world_of(ctx);
    if (!world) return;
    if (status && !dt_error(ctx))
        dt_fail(ctx, status, "rank function returned %s", dt_status_name(status));
    if (!dt_error(ctx)) dt__notify_reset(ctx);
    if (world->first_started && !dt_error(ctx))
        dt_fail(ctx, DT_ERR_ARG, "%s on %s%s was started and never waited for",
            dt__call_text(&world->first_started->call).s, world->first_started->comm->group->name,
            dt__own_site(world->first_started).s);
    if (world->shared->state) dt__set_ended(world->shared, world->local_rank);
    if (world->peers && !dt_error(ctx)) dt__send_wait_report(world, NULL, 1);
    if (dt_error(ctx)) dt__await_quiescence(world);
    dt__trace_free(world);
    if (world->peers)
        dt_free(ctx, DT_MEM_HOST, world->peers, (size_t)world->comm_size * sizeof(dt__peer_view));
    world->peers = NULL;
    dt__works_recycle(world);
    dt_free(ctx, DT_MEM_HOST, world->device_sends,
        world->comm ? 2 * (size_t)world->comm->base.size * sizeof *world->device_sends : 0);
    dt__comms_free(world); /* uses the work objects, which are freed next */
    dt__works_free(world);
    dt_ctx_attach(ctx, NULL);
    dt_unlisten(ctx, &world->listener);
    if (!world->shared->state) dt_free(ctx, DT_MEM_HOST, world->shared, sizeof(dt__private_range));
    dt_free(ctx, DT_MEM_HOST, world, sizeof *world);
}

/* ---- the team ---- */

/* Logs the reason why a run cannot begin, and writes it to *desc->report. */
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

/* Allocates the run's shared memory. If the ranks are forked processes, it contains a heap for each
   rank. The function first tries heaps as large as the machine's memory, because a page takes
   physical memory only once it is touched. If the system refuses a mapping of this size, the
   function tries smaller heaps. */
static void *dt__range_make(dt__shared *sizes, const dt_host *host, size_t user_bytes) {
    size_t machine_bytes = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    for (size_t heap = sizes->separate_memory ? dt__align_page(machine_bytes) : 0;;
         heap = dt__align_page(heap / 4)) {
        sizes->heap_bytes = heap;
        dt__shared_layout(sizes, NULL, user_bytes);
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

/* Sets desc->check and desc->fault, if they are unset, from the environment variables DT_CHECK and
   DT_FAULT (the latter only if desc->read_fault_env is set). */
static void dt__run_env(dt_run_desc *desc) {
    const char *check = getenv("DT_CHECK");
    if (!desc->fault && desc->read_fault_env) desc->fault = getenv("DT_FAULT");
    if (desc->check == 0 && check && strcmp(check, "1") == 0) desc->check = 1;
}

/* Checks the fields of a description that all backends use. Returns 1 if they are valid; else
   reports the error (dt__refuse) and returns 0. */
static int dt__run_valid(dt_run_desc *desc) {
    dt__run_env(desc);
    if (dt__faults_parse(desc->fault, -1, desc->ranks, NULL) < 0)
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

/* Checks that the description's backend has a team and can share memory, then its other fields.
   Returns 1 if they are valid; else reports the error and returns 0. */
static int dt__team_valid(dt_run_desc *desc) {
    int procs = desc->backend == DT_BACKEND_PROCS;
    if (!procs && desc->backend != DT_BACKEND_AUTO && desc->backend != DT_BACKEND_THREADS)
        dt__refuse(desc, DT_ERR_UNSUPPORTED, "dt_run: backend %s: %s",
            dt__backend_name(desc->backend), dt__backend_missing(desc->backend));
    else if (procs && desc->kernels && desc->kernels->open)
        dt__refuse(desc, DT_ERR_UNSUPPORTED,
            "dt_run: forks cannot use their parent's device; use threads, or ranks that a "
            "launcher starts, with backend nccl or tcp");
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
    sizes.separate_memory = desc.backend == DT_BACKEND_PROCS;
    sizes.timeout_s = desc.timeout_s;
    sizes.spins = desc.ranks <= dt__cores() ? DT__SPINS : 0;
    sizes.first_failure.rank = -1;
    void *range = dt__range_make(&sizes, host, desc.user_bytes);
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
    team->host_copy = *host; /* a thread may use it after the caller has freed *desc.host */
    team->host = &team->host_copy;
    if (desc.host) team->desc.host = team->host;
    team->references = 1;
    team->jobs = NULL;
    team->oom_kills = -1;
    team->shared = dt__shared_layout(&sizes, (char *)range, desc.user_bytes);
    dt__group *group = dt__group_make(team->shared, desc.ranks, "world");
    for (int rank = 0; rank < desc.ranks; rank++) group->ranks[rank] = rank;
    return team;
}

/* Returns a rank's number among the ranks of its machine, as the launcher has set it. Without a
   launcher returns the rank, because all ranks are on one machine. */
static int dt__find_local_rank(const dt_run_desc *desc, int rank) {
    dt_launch launch;
    if (desc->backend <= DT_BACKEND_PROCS || dt_launch_find(&launch) != DT_OK) return rank;
    return launch.rank == rank && launch.local_rank >= 0 ? launch.local_rank : rank;
}

static dt_ctx *dt__rank_ctx(const dt_run_desc *desc, int rank, const dt_host *host) {
    dt_ctx_desc of;
    memset(&of, 0, sizeof of);
    of.seed = desc->seed;
    of.rank = rank;
    of.local_rank = dt__find_local_rank(desc, rank);
    of.kernels = desc->kernels;
    /* forked processes cannot use a GPU */
    if (!of.kernels && desc->backend == DT_BACKEND_PROCS) of.kernels = dt_kernels_cpu();
    of.host = host;
    of.io = desc->io;
    of.mem_limit = desc->mem_limit;
    return dt_ctx_make(of);
}

/* Enables peer access between the ranks' GPUs, because ranks that are threads read and write each
   other's device memory. */
static void dt__share_devices(dt_ctx *ctx, int ranks) {
    const dt_kernels *kernels = dt_ctx_kernels(ctx);
    char why[160] = "";
    if (dt_error(ctx) || ranks < 2 || !kernels->enable_peer_access) return;
    if (kernels->enable_peer_access(dt_ctx_stream(ctx), ranks, why, sizeof why) == DT_OK) return;
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
    /* Whatever the kernel table is, host memory for staging windows and for copies of messages must
       be in shared memory. */
    if (team->shared->separate_memory) host = dt__heap_make(team->shared, team->host, rank);
    dt_ctx *ctx = dt__rank_ctx(&team->desc, rank, host);
    if (!ctx)
        dt__run_fail(
            team->shared, team->host, rank, DT_ERR_MEM, "rank %d: no memory for its context", rank);
    else
        dt__share_devices(ctx, team->desc.ranks);
    return ctx;
}

/* Reports one message that was never received, if there is one. An eager send completes without
   its receiver, so its message may remain. */
static void dt__find_unreceived(dt__shared *shared, const dt_host *host) {
    for (int from = 0; from < shared->ranks; from++) {
        for (int to = 0; to < shared->ranks; to++) {
            for (int i = 0; i < DT__PAIR_SLOTS; i++) {
                const dt__message *message = &dt__pair_of(shared, from, to, 0)->message[i];
                if (message->state != DT__POSTED) continue;
                dt_dtype dtype = dt__signature_dtype(message->signature);
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
    int rank, returned; /* returned: 1 if rank_main has returned `status` */
    dt_status status;
    dt_status (*rank_main)(dt_ctx *ctx, void *user);
    void *user;
    pthread_t thread;
    pid_t pid;       /* 0 if there is no process or the process has been reaped */
    int pidfd;       /* -1 if there is no pidfd */
    int thread_done; /* 1 if the rank's thread no longer uses this job */
} dt__rank_job;

/* Drops one reference to the team, and frees the team if no reference is left. */
static void dt__team_release(dt_team *team) {
    if (__atomic_sub_fetch(&team->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    dt_host host = team->host_copy;
    size_t jobs_bytes = (size_t)team->desc.ranks * sizeof *team->jobs;
    if (team->jobs) host.free(host.user, team->jobs, jobs_bytes, DT_MEM_HOST);
    dt__range_free(&host, team->range, team->range_bytes);
    host.free(host.user, team, sizeof *team, DT_MEM_HOST);
}

dt_status dt_team_free(dt_team *team) {
    if (!team) return DT_OK;
    if (!dt__aborted(team->shared)) dt__find_unreceived(team->shared, team->host);
    dt_status status = team->shared->first_failure.status;
    if (team->desc.report) *team->desc.report = team->shared->first_failure;
    dt__team_release(team);
    return status;
}

/* ---- dt_run ---- */

#define DT__STOPPED_S 1.0 /* seconds after a failure until a stopped process is killed */

/* Fails the context of a rank whose rank_main has ended its own thread. Called in that thread's
   cleanup handler. */
static void dt__rank_cut_short(dt_ctx *ctx) {
    dt__world *world = dt__world_of(ctx);
    if (world && world->shared->state) __atomic_store_n(&world->state->busy, 0, __ATOMIC_SEQ_CST);
    dt_fail(ctx, DT_ERR_ARG,
        "rank function did not return: its thread was ended by pthread_exit or "
        "pthread_cancel");
}

/* Detaches the rank and frees its context. A cleanup handler of the rank's thread: it runs after
   rank_main has returned or has ended the thread. */
static void dt__rank_end(void *arg) {
    dt__rank_job *job = (dt__rank_job *)arg;
    dt_team *team = job->team;
    if (job->ctx && !job->returned) dt__rank_cut_short(job->ctx);
    dt_comm_detach(job->ctx, job->status);
    dt_ctx_free(job->ctx);
    if (team->shared->separate_memory && !job->returned) _exit(1);
    if (team->shared->separate_memory) return;
    __atomic_store_n(&job->thread_done, 1, __ATOMIC_RELEASE);
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

/* Logs the table of all ranks if there is a status request (dt_run_desc.status_request). Called by
   the supervisor. */
static void dt__run_log_ranks(dt_team *team) {
    if (!team->desc.status_request ||
        !__atomic_exchange_n(team->desc.status_request, 0, __ATOMIC_RELAXED))
        return;
    for (int rank = 0; rank < team->shared->ranks; rank++)
        dt__log_rank_line(
            team->host, dt_io_default(), -1, rank, dt__view_of_local_rank(team->shared, rank));
}

/* Logs that dt_run returns without waiting for this rank, and counts the rank in left_behind. */
static void dt__run_leave_behind(
    dt_team *team, const dt__rank_job *job, const char *what, double seconds) {
    char text[192];
    snprintf(text, sizeof text,
        "rank %d is left behind: its %s still runs %.1f s after the failure", job->rank, what,
        seconds);
    team->host->log(team->host->user, DT_LOG_NOTICE, -1, text);
    team->shared->first_failure.left_behind++;
}

/* Waits for the rank's thread. Returns 1 if the thread has finished, 0 if timeout_s has passed
   since the first failure. */
static int dt__run_await_thread(dt_team *team, const dt__rank_job *job, dt__stopwatch *failed) {
    const dt_host *host = team->host;
    double nap = DT__NAP_MIN;
    while (!__atomic_load_n(&job->thread_done, __ATOMIC_ACQUIRE)) {
        double limit = team->desc.timeout_s;
        if (!failed->host && dt__aborted(team->shared)) *failed = dt__stopwatch_start(host, limit);
        if (failed->host && dt__waited(failed) > limit) return 0;
        dt__run_log_ranks(team);
        host->sleep(host->user, nap);
        nap = fmin(1.1 * nap, DT__NAP_MAX);
    }
    return 1;
}

/* Starts the ranks' threads and waits for them. If a thread cannot be started, records the failure,
   and the ranks that have started notice it like any other failure. */
static void dt__run_threads(dt_team *team, dt__rank_job *jobs) {
    dt__stopwatch failed = { NULL, 0, 0, 0 };
    int started = 0;
    while (started < team->desc.ranks) {
        __atomic_fetch_add(&team->references, 1, __ATOMIC_RELAXED);
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
        if (dt__run_await_thread(team, &jobs[rank], &failed)) {
            pthread_join(jobs[rank].thread, NULL);
            continue;
        }
        dt__run_leave_behind(team, &jobs[rank], "thread", failed.seconds);
        pthread_detach(jobs[rank].thread);
    }
}

static const char *dt__run_signal_text(int number) {
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

/* Returns the number of processes of this process's memory cgroup that the kernel's OOM killer has
   killed; -1 if unknown. /proc/self/cgroup names the cgroup ("4:memory:/jobs/7" in version 1,
   "0::/jobs/7" in version 2). In a container this name may not exist under /sys/fs/cgroup, and the
   cgroup may be mounted as the root there. */
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

/* Records a failure if a rank's process has ended without success, even if the process died while
   it wrote the failure record. known: 0 if the exit status is unknown, because this process ignores
   SIGCHLD or another part of it has reaped the child; then state.ended == 2 means success. */
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
            WTERMSIG(status), dt__run_signal_text(WTERMSIG(status)),
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

/* Waits until a rank's process has ended (its pidfd is then readable), at most 20 ms. Without
   pidfds sleeps for 1 ms. */
static void dt__run_await_exit(
    dt_team *team, const dt__rank_job *jobs, int started, struct pollfd *ends) {
    int n = 0, has_pidfds = ends != NULL;
    for (int rank = 0; rank < started && has_pidfds; rank++) {
        if (!jobs[rank].pid) continue;
        ends[n].fd = jobs[rank].pidfd;
        ends[n].events = POLLIN;
        has_pidfds = ends[n++].fd >= 0;
    }
    if (has_pidfds)
        poll(ends, (nfds_t)n, 20);
    else
        team->host->sleep(team->host->user, 1e-3);
}

/* Returns 1 if the supervisor must kill this process: timeout_s after the first failure, because a
   process that computes may never check for failures, or DT__STOPPED_S after the failure if the
   process is stopped and so cannot check. seconds: the time since the first failure. */
static int dt__run_overdue(const dt__rank_job *job, double seconds) {
    const dt_team *team = job->team;
    if (!job->pid || seconds < fmin(DT__STOPPED_S, team->desc.timeout_s)) return 0;
    return seconds > team->desc.timeout_s ||
           dt__process_state(dt_io_default(), &team->shared->state[job->rank]) == 'T';
}

/* Kills a process: by its pidfd if there is one, because a pid may be reused, else by its pid. */
static void dt__run_kill(const dt__rank_job *job) {
#ifdef SYS_pidfd_send_signal
    if (job->pidfd >= 0 && syscall(SYS_pidfd_send_signal, job->pidfd, SIGKILL, NULL, 0) == 0)
        return;
    if (job->pidfd >= 0 && errno == ESRCH) return;
#endif
    kill(job->pid, SIGKILL);
}

/* Reaps the processes that have ended. Returns the number of processes that have not. */
static int dt__run_reap(dt_team *team, dt__rank_job *jobs, int started) {
    int left = 0;
    for (int rank = 0; rank < started; rank++) {
        int status = 0;
        pid_t got = jobs[rank].pid ? waitpid(jobs[rank].pid, &status, WNOHANG) : 0;
        left += jobs[rank].pid && got == 0;
        if (!jobs[rank].pid || got == 0) continue;
        dt__process_gone(team, &jobs[rank], got > 0, status);
        jobs[rank].pid = 0;
        if (jobs[rank].pidfd >= 0) close(jobs[rank].pidfd);
    }
    return left;
}

/* Waits for the processes and kills those that are overdue. If a killed process does not die, logs
   it, counts it in left_behind and returns. */
static void dt__run_wait(dt_team *team, dt__rank_job *jobs, int started, struct pollfd *ends) {
    dt__stopwatch failed = { NULL, 0, 0, 0 };
    double seconds = 0, patience = team->desc.timeout_s;
    while (dt__run_reap(team, jobs, started) > 0 && seconds <= 2 * patience + DT__STOPPED_S) {
        if (!failed.host && dt__aborted(team->shared))
            failed = dt__stopwatch_start(team->host, patience);
        if (failed.host) seconds = dt__waited(&failed);
        for (int rank = 0; rank < started && failed.host; rank++)
            if (dt__run_overdue(&jobs[rank], seconds)) dt__run_kill(&jobs[rank]);
        dt__run_log_ranks(team);
        dt__run_await_exit(team, jobs, started, ends);
    }
    for (int rank = 0; rank < started; rank++) {
        if (!jobs[rank].pid) continue;
        dt__run_leave_behind(team, &jobs[rank], "process", seconds);
        if (jobs[rank].pidfd >= 0) close(jobs[rank].pidfd);
    }
}

/* Returns a pidfd, a file descriptor that becomes readable when the process has ended; -1 if that
   fails, for example because the kernel has no pidfds. */
static int dt__run_open_pidfd(pid_t pid) {
#ifdef SYS_pidfd_open
    return dt__io_guard_std_fds() == 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
#else
    (void)pid;
    return -1;
#endif
}

/* Runs a rank in the new process. PR_SET_PDEATHSIG makes the kernel kill the process when its
   supervisor ends; if the supervisor ended before that call, the process exits. */
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
    fflush(NULL); /* otherwise every child would write a copy of the text in stdio's buffers */
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
    /* opened after all forks, so that no child inherits a pidfd */
    for (int rank = 0; rank < started; rank++)
        jobs[rank].pidfd = dt__run_open_pidfd(jobs[rank].pid);
    dt__run_wait(team, jobs, started, ends);
    if (ends) host->free(host->user, ends, bytes, DT_MEM_HOST);
}

/* The argument of dt__transport_rank_end. returned: 1 if rank_main has returned. If rank_main ends
   its thread instead, the connections stay open until the process ends. */
typedef struct dt__transport_rank {
    dt_ctx *ctx;
    dt_status status;
    int returned;
} dt__transport_rank;

static void dt__transport_rank_end(void *arg) {
    dt__transport_rank *life = (dt__transport_rank *)arg;
    if (!life->returned) dt__rank_cut_short(life->ctx);
    dt_comm_detach(life->ctx, life->status);
}

/* Runs the calling process as one rank over a transport. Returns the context's status. */
static dt_status dt__run_transport_rank(dt_ctx *ctx, const dt_run_desc *desc, int rank, int size,
    const dt_transport *transport, const dt__node *node, const dt__control *control,
    dt_status (*rank_main)(dt_ctx *ctx, void *user), void *user) {
    dt_attach_desc attach;
    memset(&attach, 0, sizeof attach);
    attach.rank = rank;
    attach.size = size;
    attach.transport = transport;
    attach.timeout_s = desc->timeout_s;
    attach.link = desc->link;
    dt__transport_rank life = { ctx, DT_OK, 0 };
    pthread_cleanup_push(dt__transport_rank_end, &life);
    int attached = dt__attach(ctx, attach, node, control, desc) != NULL;
    life.status = attached ? rank_main(ctx, user) : dt_error(ctx);
    life.returned = 1;
    pthread_cleanup_pop(1);
    return dt_error(ctx);
}

/* Runs this process as one rank of a job over TCP. Wipes the key. */
static void dt__tcp_rank(const dt_run_desc *desc, dt__tcp_address rendezvous, uint8_t key[32],
    dt_status (*rank_main)(dt_ctx *ctx, void *user), void *user) {
    dt_ctx *ctx = dt__rank_ctx(desc, desc->rank, desc->host);
    dt__tcp *t = ctx ? dt__tcp_make(ctx, desc, rendezvous, key, -1) : NULL;
    dt__wipe(key, 32);
    dt_transport transport = { .name = "tcp",
        .user = t,
        .send = dt__tcp_send,
        .recv = dt__tcp_recv,
        .test = dt__tcp_test,
        .cancel = dt__tcp_cancel,
        .fail = dt__tcp_fail };
    dt__control control = { .user = t,
        .send_report = dt__tcp_send_report,
        .pid = dt__tcp_pid,
        .arrived = dt__tcp_arrived,
        .check = t ? t->check : 0,
        .poll = dt__tcp_poll_failures };
    if (!ctx) dt__refuse(desc, DT_ERR_MEM, "rank %d: no memory for its context", desc->rank);
    if (t) {
        if (dt__run_transport_rank(
                ctx, desc, desc->rank, desc->ranks, &transport, NULL, &control, rank_main, user))
            dt__tcp_fail(t, dt_error_text(ctx)); /* in case the world has not sent the abort */
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
    dt__tcp_address rendezvous;
    uint8_t key[32];
    char why[DT__TCP_TEXT_BYTES];
    if (desc.ranks == 0) desc.ranks = 1;
    if (desc.timeout_s == 0) desc.timeout_s = 120;
    if (!dt__run_valid(&desc)) return desc.report->status;
    if (desc.rank < 0 || desc.rank >= desc.ranks)
        dt__refuse(&desc, DT_ERR_ARG, "dt_run: rank %d of %d", desc.rank, desc.ranks);
    else if (!dt__tcp_address_parse(desc.rendezvous, &rendezvous))
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

/* ---- MPI: dt_run's caller is a rank that a launcher started; there is no supervisor ---- */

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
    dt_transport transport = { .name = "mpi",
        .user = mpi,
        .send = dt__mpi_send,
        .recv = dt__mpi_recv,
        .test = dt__mpi_test,
        .cancel = dt__mpi_cancel,
        .fail = dt__mpi_fail };
    dt__control control = { .user = mpi->tcp,
        .send_report = dt__tcp_send_report,
        .pid = dt__tcp_pid,
        .check = mpi->tcp->check };
    int wrong = desc->ranks != 0 && desc->ranks != mpi->size;
    const dt__node *node = mpi->node.shared ? &mpi->node : NULL;
    const dt_host *of_rank =
        node ? dt__heap_make(node->shared, host, node->local_rank) : desc->host;
    if (!wrong) mpi->ctx = mpi->tcp->report_ctx = dt__rank_ctx(desc, mpi->rank, of_rank);
    dt_status status = DT_OK;
    if (mpi->ctx)
        status = dt__run_transport_rank(
            mpi->ctx, desc, mpi->rank, mpi->size, &transport, node, &control, rank_main, user);
    if (node && !mpi->first_failure.status && dt__aborted(node->shared))
        mpi->first_failure = node->shared->first_failure;
    if (status && !mpi->first_failure.status)
        dt__mpi_tell_failure(mpi, status, dt_error_text(mpi->ctx));
    if (wrong)
        dt__refuse(
            desc, DT_ERR_ARG, "dt_run: %d ranks, but MPI started %d", desc->ranks, mpi->size);
    else if (!mpi->ctx)
        dt__refuse(desc, DT_ERR_MEM, "rank %d: no memory for its context", mpi->rank);
    if (!mpi->ctx) dt__mpi_tell_failure(mpi, desc->report->status, desc->report->text);
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
    int ranks = team->desc.ranks, share_user = team->shared->separate_memory && desc.user_bytes > 0;
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
    if (jobs && team->shared->separate_memory)
        dt__run_processes(team, jobs);
    else if (jobs)
        dt__run_threads(team, jobs);
    if (share_user) memcpy(user, team->shared->user, desc.user_bytes);
    dt_team_free(team);
    return desc.report->status;
}

// ==== 28. Trace: code ===========================================================================

/* The trace of a rank is a preallocated ring of events of 88 bytes. To disturb the run as little as
   possible, the rank's own thread writes its events, without a lock and without formatting text;
   dt_trace_write formats the text later. Measured (tests/comm/test_trace.c, build/test_trace cost,
   gcc -O2, a shared Xeon): tracing adds 110 ns to an operation and 330 ns to a mark or a block, of
   which two reads of the clock take 100 ns. Without a trace a mark costs 3 ns. dt_trace_write takes
   about 6 us per event.

       open slices (a stack)             ring of closed slices
       block F 3 > mark > ...   --end--> [event][event][event] ... --dt_trace_write--> one JSON file

   A slice is a bar in the trace viewer. A block is the slice of one forward or backward, such as
   "F 3", the forward of micro-batch 3. A mark is the slice between a dt_trace_begin and its
   dt_trace_end. Open slices of the compute track are kept on a stack, and each slice is recorded as
   one event when it ends. So if the ring overflows, complete slices are lost, and the remaining
   slices still nest. */

enum { DT__TRACE_DEPTH = 32, DT__TRACE_KEYS = 128 };

typedef enum dt__trace_kind {
    DT__TRACED_BLOCK = 1,
    DT__TRACED_MARK,
    DT__TRACED_OP,
    DT__TRACED_WAIT,
    DT__TRACED_MEMORY
} dt__trace_kind;

enum { DT__TRACED_RECOMPUTED = 1, DT__TRACED_STARTED = 2, DT__TRACED_ARROW = 4 };

typedef struct dt__trace_event {
    /* times on this rank's clock; dt_trace_write converts them to seconds since the first event */
    double begin, end;
    /* In a block, `a` is the block's number and `b` the micro-batch. In a message, `a` is the other
       rank's world rank and `b` the tag. */
    int32_t a, b;
    int16_t depth;      /* nesting depth on the compute track */
    int16_t track;      /* of an operation: index of its comm track */
    uint8_t kind, what; /* what: a dt_phase in a block, a dt__op_code in an operation or a wait */
    uint8_t algorithm, flags;
    union {
        /* seq: in a collective its sequence number; in a message a number that is the same on
           sender and receiver, 0 if unknown */
        struct {
            uint64_t bytes, seq;
            char name[40];
        } op;
        uint64_t memory[DT_MEM_CLASSES];
    } u;
} dt__trace_event;

/* A counter of messages. Messages over a transport carry no number, so the sender and the receiver
   each count the messages with the same channel, tag and other rank. */
typedef struct dt__trace_key {
    uint64_t count;
    uint32_t channel;
    int op, peer, tag;
} dt__trace_key;

typedef struct dt__trace {
    size_t capacity, used, at; /* at: index in the ring of the next event */
    size_t lost;
    /* depth: number of open slices on the stack; too_deep: number of further open slices, which are
       not recorded */
    int depth, too_deep;
    /* largest number of started operations in flight at once; the number of comm tracks is at most
       max_started + 1 */
    int max_started;
    /* 1 after a receive with DT_ANY over a transport: from then on dt__trace_number does not know
       which message a receive gets */
    int any_source_seen;
    size_t live[DT_MEM_CLASSES]; /* bytes in use, as last recorded */
    dt__trace_key keys[DT__TRACE_KEYS];
    dt__trace_event open[DT__TRACE_DEPTH];
    dt__trace_event *ring; /* (capacity) in memory just after this struct */
} dt__trace;

static size_t dt__trace_bytes(size_t events) {
    return sizeof(dt__trace) + events * sizeof(dt__trace_event);
}

static double dt__trace_now(const dt__world *world) { return world->host->now(world->host->user); }

/* Returns the ring's element for the next event; overwrites the oldest event if the ring is
   full. */
static dt__trace_event *dt__trace_next_event(dt__trace *trace) {
    dt__trace_event *event = &trace->ring[trace->at];
    trace->at = trace->at + 1 < trace->capacity ? trace->at + 1 : 0;
    if (trace->used < trace->capacity)
        trace->used++;
    else
        trace->lost++;
    return event;
}

static void dt__trace_name(dt__trace_event *event, const char *name) {
    size_t length = strlen(name), max_length = sizeof event->u.op.name - 1;
    memset(event->u.op.name, 0, sizeof event->u.op.name);
    memcpy(event->u.op.name, name, length < max_length ? length : max_length);
}

/* ---- the compute track ---- */

static void dt__trace_push(
    dt__world *world, dt__trace_kind kind, int what, int a, int b, const char *name) {
    dt__trace *trace = world->trace;
    if (trace->depth == DT__TRACE_DEPTH) {
        trace->too_deep++;
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
    event->flags = dt_recomputing(world->ctx) ? DT__TRACED_RECOMPUTED : 0;
    dt__trace_name(event, name);
    event->begin = dt__trace_now(world);
}

/* Ends the innermost open slice. Also records the bytes of memory in use if they have changed. */
static void dt__trace_pop(dt__world *world) {
    dt__trace *trace = world->trace;
    dt__trace_event *open = &trace->open[--trace->depth];
    dt_memory now = dt_memory_used(world->ctx);
    open->end = dt__trace_now(world);
    *dt__trace_next_event(trace) = *open;
    if (memcmp(now.live, trace->live, sizeof now.live) == 0) return;
    dt__trace_event *event = dt__trace_next_event(trace);
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

/* Ends the innermost open block and the marks that are open inside it. Does nothing if the block
   began before the trace, because it is then not on the stack. */
static void dt__trace_leave(dt_ctx *ctx, const dt_event *event, void *user) {
    dt__world *world = (dt__world *)user;
    dt__trace *trace = world->trace;
    (void)ctx;
    (void)event;
    if (!trace) return;
    if (trace->too_deep > 0) {
        trace->too_deep--;
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
    if (trace->too_deep > 0)
        trace->too_deep--;
    else if (trace->depth > 0 && trace->open[trace->depth - 1].kind == DT__TRACED_MARK)
        dt__trace_pop(world);
}

/* ---- operations ---- */

/* Returns a message's number, which is the same on the sender and the receiver; 0 if unknown. */
static uint64_t dt__trace_number(dt__world *world, const dt_work *work) {
    dt__trace *trace = world->trace;
    const dt__call *call = &work->call;
    if (call->any_source) trace->any_source_seen = 1;
    if (call->any_source || (call->op == DT__RECV && trace->any_source_seen)) return 0;
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
        /* sender and receiver compute the same number, because both know channel, tag and count */
        return (++key->count & 0xffff) | (uint64_t)((uint32_t)call->tag & 0xffff) << 16 |
               (uint64_t)channel << 32;
    }
    return 0;
}

/* Returns the algorithm that an operation runs, as a dt_algorithm. */
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
    dt__trace_event *event = dt__trace_next_event(world->trace);
    event->kind = (uint8_t)kind;
    event->what = (uint8_t)call->op;
    event->flags = (uint8_t)flags;
    event->begin = begin;
    event->end = end > begin ? end : begin;
    event->a = -1;
    event->b = 0;
    event->depth = (int16_t)world->trace->depth;
    event->track = 0;
    event->algorithm = (uint8_t)dt__trace_algorithm(work);
    event->u.op.bytes = dt_error(world->ctx) ? 0 : dt__sent_bytes(comm, call);
    event->u.op.seq = call->seq;
    memcpy(event->u.op.name, comm->group->name, DT__NAME_BYTES);
    event->u.op.name[DT__NAME_BYTES] = 0;
    if (!dt__is_p2p(call->op)) return;
    const dt__p2p *p2p = &work->p2p_ops[0]; /* still valid, although p2p_count is already 0 */
    event->a = p2p->peer >= 0 ? comm->group->ranks[p2p->peer] : -1;
    event->b = call->tag;
    event->u.op.seq = p2p->order + (world->transport.send ? 0 : 1);
}

static void dt__trace_op(dt_work *work, double begin, double end) {
    dt__trace_add(work, DT__TRACED_OP, begin, end, 0);
}

/* Records a started operation and its wait. Called when the wait has ended; begin, end: the times
   of the wait. */
static void dt__trace_wait(dt_work *work, double begin, double end) {
    double finished_at = work->end_time > work->start_time ? work->end_time : work->start_time;
    dt__trace *trace = work->comm->world->trace;
    int under_way = (int)work->comm->world->started_count;
    if (under_way > trace->max_started) trace->max_started = under_way;
    dt__trace_add(work, DT__TRACED_OP, work->start_time, finished_at < end ? finished_at : end,
        DT__TRACED_STARTED);
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
    /* also clears the ring, so that the system has mapped its pages before the first event */
    memset(trace, 0, dt__trace_bytes(events));
    trace->capacity = events;
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
        dt_free(world->ctx, DT_MEM_HOST, world->trace, dt__trace_bytes(world->trace->capacity));
    world->trace = NULL;
}

/* ---- order and tracks ---- */

/* Returns 1 if slice x precedes slice y in the file. An enclosing slice precedes the slices inside
   it, even if both have the same times. */
static int dt__trace_precedes(const dt__trace_event *x, const dt__trace_event *y) {
    if (x->begin != y->begin) return x->begin < y->begin;
    if (x->end != y->end) return x->end > y->end;
    return x->depth < y->depth;
}

/* Sorts the events with heap sort, which works in place and takes O(n log n) in every case. */
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
            if (child + 1 < end && dt__trace_precedes(&v[child], &v[child + 1])) child++;
            if (!dt__trace_precedes(&event, &v[child])) break;
            v[at] = v[child];
        }
        v[at] = event;
    }
}

/* Assigns operations to comm tracks, so that slices of one track do not overlap. Blocking
   operations never overlap each other and are on track 0. A started operation is on the lowest
   track that is free from its start to its end. ends: (tracks) the time at which each track's last
   slice ends. Returns the number of tracks used. */
static int dt__trace_assign_tracks(dt__trace_event *v, size_t n, double *ends, int tracks) {
    size_t blocking = 0; /* index of the first blocking operation after event i */
    int used = 1;
    for (int track = 0; track < tracks; track++) ends[track] = v[0].begin;
    for (size_t i = 0; i < n; i++) {
        if (v[i].kind != DT__TRACED_OP) continue;
        int track = 0;
        if (v[i].flags & DT__TRACED_STARTED) {
            if (blocking <= i) blocking = i + 1;
            while (blocking < n &&
                   (v[blocking].kind != DT__TRACED_OP || (v[blocking].flags & DT__TRACED_STARTED)))
                blocking++;
            if (blocking < n && v[blocking].begin < v[i].end) track = 1;
            while (track < tracks - 1 && ends[track] > v[i].begin) track++;
        }
        v[i].track = (int16_t)track;
        if (ends[track] < v[i].end) ends[track] = v[i].end;
        if (track + 1 > used) used = track + 1;
    }
    return used;
}

/* ---- all ranks' traces in one file ---- */

/* The fields of the summary that each rank sends before its events: the number of its events, the
   number of lost events, the time of the first event on rank 0's clock, the number of tracks. */
enum {
    DT__SUMMARY_EVENTS = 0,
    DT__SUMMARY_LOST,
    DT__SUMMARY_FIRST,
    DT__SUMMARY_TRACKS,
    DT__SUMMARY_FIELDS
};

#define DT__TRACE_TEXT 32768

typedef struct dt__trace_out {
    dt_comm *comm;
    dt_ctx *ctx;
    dt__trace *trace;   /* this rank's trace; NULL if the rank has none */
    double offset;      /* rank 0's clock minus this rank's clock, in seconds */
    double *summaries;  /* (ranks, DT__SUMMARY_FIELDS) */
    double *track_ends; /* (tracks) */
    int track_count;
    double origin; /* time of the earliest event of all ranks, on rank 0's clock */
    size_t chunk;  /* number of events that each rank sends in one gather */
    dt__trace_event *own_events, *all_events; /* (chunk); on rank 0 (ranks, chunk) */
    const char *path;
    char *temp, *text; /* on rank 0: the temporary file's name, and the text not yet written */
    size_t used;
    int64_t at;
    int fd, is_first_event;
} dt__trace_out;

/* Runs a collective on host memory. */
static dt_status dt__trace_collective(const dt__trace_out *out, dt__call call) {
    call.host_memory = 1;
    return dt__op_run(out->comm, call);
}

/* Clock synchronization. Returns rank 0's clock minus this rank's clock, in seconds. A rank sends
   rank 0 a request and assumes that rank 0 reads its clock halfway between the request and the
   arrival of the reply. The error is at most half of the round trip, so of 8 round trips the
   fastest is used (F. Cristian, 1989; D. Mills, RFC 5905). Forked processes and threads share one
   clock; for them the function returns 0. */
static double dt__trace_offset(const dt__trace_out *out) {
    dt__world *world = out->comm->world;
    double best = 0, offset = 0, at = 0;
    if (!world->transport.send) return 0;
    for (int rank = 1; rank < out->comm->base.size; rank++) {
        for (int i = 0; i < 8; i++) {
            double begin = dt__trace_now(world);
            if (out->comm->base.rank == rank) {
                dt__trace_collective(out, dt__p2p_call(DT__SEND, &at, NULL, 1, DT_F64, 0, -1));
                dt__trace_collective(out, dt__p2p_call(DT__RECV, NULL, &at, 1, DT_F64, 0, -1));
                double end = dt__trace_now(world);
                if (i > 0 && end - begin >= best) continue;
                best = end - begin;
                offset = at - (begin + end) / 2;
            } else if (out->comm->base.rank == 0) {
                dt__trace_collective(out, dt__p2p_call(DT__RECV, NULL, &at, 1, DT_F64, rank, -1));
                at = dt__trace_now(world);
                dt__trace_collective(out, dt__p2p_call(DT__SEND, &at, NULL, 1, DT_F64, rank, -1));
            }
        }
    }
    return offset;
}

/* ---- which messages both sides have recorded ---- */

static int dt__trace_is_message(const dt__trace_event *event, int rank) {
    return event->kind == DT__TRACED_OP && dt__is_p2p((dt__op_code)event->what) &&
           event->u.op.seq && event->a == rank;
}

/* Returns twice the message's number, plus 1 if the event is the receive. */
static uint64_t dt__trace_message(const dt__trace_event *event) {
    return event->u.op.seq * 2 + (event->what == DT__RECV);
}

static int dt__trace_contains(const uint64_t *v, size_t n, uint64_t number) {
    size_t low = 0;
    while (low < n) {
        size_t mid = low + (n - low) / 2;
        if (v[mid] < number)
            low = mid + 1;
        else
            n = mid;
    }
    return v[low] == number; /* low may be n: the caller provides a sentinel v[n] */
}

/* Sorts the numbers with Shell sort (D. Shell, 1959). */
static void dt__trace_sort_numbers(uint64_t *v, size_t n) {
    for (size_t gap = n / 2; gap > 0; gap = gap == 2 ? 1 : gap * 5 / 11) {
        for (size_t i = gap; i < n; i++) {
            uint64_t number = v[i];
            size_t at = i;
            for (; at >= gap && v[at - gap] > number; at -= gap) v[at] = v[at - gap];
            v[at] = number;
        }
    }
}

/* Exchanges with each rank the numbers of the recorded messages, and gives an arrow to each message
   that sender and receiver have both recorded. counts: (ranks) how many numbers this rank sends to
   each rank, then (ranks) how many it receives from each rank. */
static void dt__trace_match(
    const dt__trace_out *out, size_t *counts, uint64_t *sent, uint64_t *received) {
    dt__trace *trace = out->trace;
    int n = out->comm->base.size;
    size_t *sent_counts = counts, *received_counts = counts + n, at = 0;
    for (int rank = 0; rank < n; rank++) {
        for (size_t i = 0; trace && sent_counts[rank] && i < trace->used; i++)
            if (dt__trace_is_message(&trace->ring[i], rank))
                sent[at++] = dt__trace_message(&trace->ring[i]);
    }
    if (dt__trace_collective(out,
            dt__all_to_all_v_call(sent, sent_counts, received, received_counts, DT_F64)) != DT_OK)
        return;
    at = 0;
    for (int rank = 0; rank < n; at += received_counts[rank++]) {
        /* the element after the numbers of this rank serves as a sentinel, and is restored below */
        uint64_t next = received[at + received_counts[rank]];
        dt__trace_sort_numbers(received + at, received_counts[rank]);
        received[at + received_counts[rank]] = 0;
        for (size_t i = 0; trace && sent_counts[rank] && i < trace->used; i++) {
            dt__trace_event *event = &trace->ring[i];
            if (!dt__trace_is_message(event, rank)) continue;
            if (dt__trace_contains(
                    received + at, received_counts[rank], dt__trace_message(event) ^ 1))
                event->flags |= DT__TRACED_ARROW;
            else
                event->flags &= (uint8_t)~DT__TRACED_ARROW;
        }
        received[at + received_counts[rank]] = next;
    }
}

static void dt__trace_arrows(const dt__trace_out *out) {
    int n = out->comm->base.size;
    size_t bytes = 2 * (size_t)n * sizeof(size_t);
    size_t *counts = (size_t *)dt_alloc(out->ctx, DT_MEM_HOST, bytes, "the trace");
    if (!counts) return;
    memset(counts, 0, bytes);
    for (size_t i = 0; out->trace && i < out->trace->used; i++) {
        const dt__trace_event *event = &out->trace->ring[i];
        if (event->a >= 0 && event->a < n && dt__trace_is_message(event, event->a))
            counts[event->a]++;
    }
    /* a count has 8 bytes, so it can be sent as an element of any 8-byte type */
    dt__trace_collective(out, dt__call_make(DT__ALL_TO_ALL, counts, counts + n, 1, DT_F64));
    size_t sent = dt__sum_counts(counts, n), received = dt__sum_counts(counts + n, n),
           numbers_bytes = (sent + received + 2) * sizeof(uint64_t);
    uint64_t *numbers = dt_error(out->ctx) ? NULL
                                           : (uint64_t *)dt_alloc(
                                                 out->ctx, DT_MEM_HOST, numbers_bytes, "the trace");
    if (numbers) dt__trace_match(out, counts, numbers, numbers + sent + 1);
    dt_free(out->ctx, DT_MEM_HOST, numbers, numbers_bytes);
    dt_free(out->ctx, DT_MEM_HOST, counts, bytes);
}

/* ---- text ---- */

static void dt__trace_flush(dt__trace_out *out) {
    if (dt_error(out->ctx) == DT_OK)
        dt__file_write_at(out->ctx, out->temp, out->fd, out->text, (int64_t)out->used, out->at);
    out->at += (int64_t)out->used;
    out->used = 0;
}

/* Appends formatted text, of which at most 1,023 bytes are kept. */
DT_PRINTF(2, 3) static void dt__trace_put(dt__trace_out *out, const char *fmt, ...) {
    va_list args;
    if (out->used + 1024 > DT__TRACE_TEXT) dt__trace_flush(out);
    va_start(args, fmt);
    int length = vsnprintf(out->text + out->used, 1024, fmt, args);
    va_end(args);
    if (length > 0) out->used += length < 1024 ? (size_t)length : 1023;
}

/* Writes the contents of a JSON string. Invalid UTF-8, for example in a truncated name, becomes
   U+FFFD. */
static void dt__trace_json_text(dt__trace_out *out, const char *s) {
    size_t n = strlen(s), good = dt__utf8_first_invalid(s, n);
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
        if (i == good) good = i + 1 + dt__utf8_first_invalid(s + i + 1, n - i - 1);
    }
}

/* Converts seconds to nanoseconds; returns 0 for an invalid time. Times are formatted as integers,
   so that the locale's decimal point does not matter. */
static int64_t dt__trace_ns(double seconds) {
    return seconds > 0 && seconds < 4e6 ? (int64_t)(seconds * 1e9 + 0.5) : 0;
}

static void dt__trace_time(dt__trace_out *out, const char *key, int64_t ns) {
    dt__trace_put(out, ",\"%s\":%lld.%03d", key, (long long)(ns / 1000), (int)(ns % 1000));
}

/* Returns the thread id of a comm track in the file. The compute track has tid 0; tids 2 and 3 are
   reserved for offload and data loaders. */
static int dt__trace_tid(int track) { return track == 0 ? 1 : track + 3; }

static void dt__trace_begin_json(dt__trace_out *out, const char *phase, int rank, int track) {
    dt__trace_put(out, "%s{\"ph\":\"%s\",\"pid\":%d,\"tid\":%d", out->is_first_event ? "" : ",\n",
        phase, rank, track);
    out->is_first_event = 0;
}

static void dt__trace_metadata(
    dt__trace_out *out, int rank, int track, const char *what, const char *name) {
    dt__trace_begin_json(out, "M", rank, track);
    dt__trace_put(out, ",\"name\":\"%s\",\"args\":{\"name\":\"%s\"}}", what, name);
}

/* Writes the names of a rank's tracks. */
static void dt__trace_tracks(dt__trace_out *out, int rank, int tracks) {
    char name[32];
    snprintf(name, sizeof name, "rank %d", rank);
    dt__trace_metadata(out, rank, 0, "process_name", name);
    dt__trace_begin_json(out, "M", rank, 0);
    dt__trace_put(out, ",\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%d}}", rank);
    dt__trace_metadata(out, rank, 0, "thread_name", "compute");
    for (int track = 0; track < tracks; track++) {
        snprintf(name, sizeof name, track ? "comm %d" : "comm", track + 1);
        dt__trace_metadata(out, rank, dt__trace_tid(track), "thread_name", name);
        dt__trace_begin_json(out, "M", rank, dt__trace_tid(track));
        dt__trace_put(out, ",\"name\":\"thread_sort_index\",\"args\":{\"sort_index\":%d}}",
            dt__trace_tid(track));
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

/* Writes the name, category and arguments of a slice. */
static void dt__trace_slice(dt__trace_out *out, const dt__trace_event *event) {
    static const char *const phases[] = { "?", "F", "B", "I", "W" };
    static const char *const cats[] = { "?", "fwd", "bwd", "bwd-input", "bwd-weight" };
    int phase = event->what <= DT_BACKWARD_WEIGHT ? event->what : 0,
        again = event->flags & DT__TRACED_RECOMPUTED;
    dt__op_code op = (dt__op_code)event->what;
    if (event->kind == DT__TRACED_MARK) {
        dt__trace_put(out, ",\"cat\":\"mark\",\"name\":\"");
        dt__trace_json_text(out, event->u.op.name);
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
    dt__trace_json_text(out, event->u.op.name);
    dt__trace_put(out, "\",\"args\":{\"group\":\"");
    dt__trace_json_text(out, event->u.op.name);
    dt__trace_put(out, "\"");
    if (!wait) dt__trace_put(out, ",\"bytes\":%llu", (unsigned long long)event->u.op.bytes);
    if (!dt__is_p2p(op)) dt__trace_put(out, ",\"seq\":%llu", (unsigned long long)event->u.op.seq);
    if (event->a >= 0) dt__trace_put(out, ",\"peer\":%d,\"tag\":%d", event->a, event->b);
    if (event->algorithm > DT_DIRECT)
        dt__trace_put(out, ",\"algorithm\":\"%s\"", dt__trace_algorithm_name(event->algorithm));
    if (event->flags & DT__TRACED_STARTED) dt__trace_put(out, ",\"started\":true");
    dt__trace_put(out, "}");
}

/* Writes one end of an arrow inside its slice: at the beginning of the send, or just before the end
   of the receive. */
static void dt__trace_arrow(dt__trace_out *out, const dt__trace_event *event, int rank, int track,
    int64_t begin, int64_t end) {
    int sent = event->what == DT__SEND, from = sent ? rank : event->a, to = sent ? event->a : rank;
    uint64_t pair = (uint64_t)from * (uint64_t)out->comm->base.size + (uint64_t)to,
             n = event->u.op.seq;
    /* a JSON number holds integers of up to 53 bits; 21 of these bits are for n */
    uint64_t id = pair << 21 | ((n ^ n >> 21 ^ n >> 42) & 0x1fffff);
    dt__trace_begin_json(out, sent ? "s" : "f", rank, track);
    dt__trace_put(out, ",\"cat\":\"message\",\"name\":\"message\",\"id\":%llu%s",
        (unsigned long long)id, sent ? "" : ",\"bp\":\"e\"");
    dt__trace_time(out, "ts", sent || end == begin ? begin : end - 1);
    dt__trace_put(out, "}");
}

static void dt__trace_event_text(dt__trace_out *out, const dt__trace_event *event, int rank) {
    static const char *const classes[] = { "params", "grads", "optim", "acts", "comm", "host",
        "temp" };
    int64_t begin = dt__trace_ns(event->begin - out->origin),
            end = dt__trace_ns(event->end - out->origin);
    int track = event->kind == DT__TRACED_OP ? dt__trace_tid(event->track) : 0;
    if (end < begin) end = begin;
    dt__trace_begin_json(out, event->kind == DT__TRACED_MEMORY ? "C" : "X", rank, track);
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

/* Sorts this rank's events, assigns their tracks, and sends a summary to all ranks. */
static void dt__trace_prepare(dt__trace_out *out) {
    dt__trace *trace = out->trace;
    double summary[DT__SUMMARY_FIELDS] = { 0, 0, 1e300, 1 };
    size_t n = (size_t)out->comm->base.size;
    out->summaries = (double *)dt_alloc(out->ctx, DT_MEM_HOST, n * sizeof summary, "the trace");
    if (trace) {
        out->track_count = trace->max_started + 1;
        out->track_ends = (double *)dt_alloc(
            out->ctx, DT_MEM_HOST, (size_t)out->track_count * sizeof(double), "the trace");
    }
    if (dt_error(out->ctx)) return;
    if (trace && trace->used > 0) {
        dt__trace_sort(trace->ring, trace->used);
        /* after the sort the oldest event is at index 0; if the ring is full, the next event
           overwrites it */
        trace->at = trace->used % trace->capacity;
        summary[DT__SUMMARY_TRACKS] =
            dt__trace_assign_tracks(trace->ring, trace->used, out->track_ends, out->track_count);
        summary[DT__SUMMARY_FIRST] = trace->ring[0].begin + out->offset;
    }
    summary[DT__SUMMARY_EVENTS] = trace ? (double)trace->used : 0;
    summary[DT__SUMMARY_LOST] = trace ? (double)trace->lost : 0;
    if (dt__trace_collective(out, dt__call_make(DT__ALL_GATHER, summary, out->summaries,
                                      DT__SUMMARY_FIELDS, DT_F64)) != DT_OK)
        return;
    out->origin = out->summaries[DT__SUMMARY_FIRST];
    for (size_t rank = 1; rank < n; rank++) {
        double first = out->summaries[rank * DT__SUMMARY_FIELDS + DT__SUMMARY_FIRST];
        if (first < out->origin) out->origin = first;
    }
    out->chunk = (1u << 20) / n / sizeof(dt__trace_event);
    if (out->chunk < 16) out->chunk = 16;
    out->own_events = (dt__trace_event *)dt_alloc(
        out->ctx, DT_MEM_HOST, out->chunk * sizeof *out->own_events, "the trace");
}

/* Opens the temporary file and writes the names of all tracks. Called on rank 0. */
static void dt__trace_open(dt__trace_out *out) {
    int n = out->comm->base.size;
    out->temp = dt__concat_text(out->ctx, out->path, strlen(out->path), ".tmp");
    out->text = (char *)dt_alloc(out->ctx, DT_MEM_HOST, DT__TRACE_TEXT, "the trace");
    out->all_events = (dt__trace_event *)dt_alloc(
        out->ctx, DT_MEM_HOST, (size_t)n * out->chunk * sizeof *out->all_events, "the trace");
    out->fd = out->all_events ? dt__file_open(out->ctx, out->temp, 1, 0) : -1;
    if (out->fd < 0) return;
    dt__trace_put(out, "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"lost\":[");
    for (int rank = 0; rank < n; rank++)
        dt__trace_put(out, "%s%.0f", rank ? "," : "",
            out->summaries[rank * DT__SUMMARY_FIELDS + DT__SUMMARY_LOST]);
    dt__trace_put(out, "]},\"traceEvents\":[\n");
    for (int rank = 0; rank < n; rank++) {
        double lost = out->summaries[rank * DT__SUMMARY_FIELDS + DT__SUMMARY_LOST];
        dt__trace_tracks(
            out, rank, (int)out->summaries[rank * DT__SUMMARY_FIELDS + DT__SUMMARY_TRACKS]);
        if (lost > 0)
            dt_log(out->ctx, DT_LOG_NOTICE,
                "%s: rank %d lost %.0f events, the newest %.0f are there", out->path, rank, lost,
                out->summaries[rank * DT__SUMMARY_FIELDS + DT__SUMMARY_EVENTS]);
    }
}

/* Writes the events of all ranks. In each round every rank sends a chunk of its events to rank 0,
   which writes them to the file, until the longest trace has been written. */
static void dt__trace_merge(dt__trace_out *out) {
    int n = out->comm->base.size, is_root = out->comm->base.rank == 0;
    double longest = 0;
    for (int rank = 0; rank < n; rank++)
        if (out->summaries[rank * DT__SUMMARY_FIELDS] > longest)
            longest = out->summaries[rank * DT__SUMMARY_FIELDS];
    for (size_t done = 0; (double)done < longest && dt_error(out->ctx) == DT_OK;
         done += out->chunk) {
        size_t mine = out->trace && out->trace->used > done ? out->trace->used - done : 0;
        memset(out->own_events, 0, out->chunk * sizeof *out->own_events);
        for (size_t i = 0; i < mine && i < out->chunk; i++) {
            out->own_events[i] = out->trace->ring[done + i];
            out->own_events[i].begin += out->offset;
            out->own_events[i].end += out->offset;
        }
        dt__trace_collective(out, dt__rooted_call(DT__GATHER, out->own_events, out->all_events,
                                      out->chunk * sizeof *out->own_events / 8, DT_F64, 0));
        for (int rank = 0; is_root && rank < n; rank++) {
            const dt__trace_event *its = out->all_events + (size_t)rank * out->chunk;
            for (size_t i = 0;
                 i < out->chunk && (double)(done + i) < out->summaries[rank * DT__SUMMARY_FIELDS];
                 i++) {
                if (dt_error(out->ctx) == DT_OK) dt__trace_event_text(out, &its[i], rank);
            }
        }
    }
}

/* Completes the temporary file and renames it to `path`. Called on rank 0. */
static void dt__trace_publish(dt__trace_out *out) {
    if (out->fd >= 0) {
        dt__trace_put(out, "\n]}\n");
        dt__trace_flush(out);
        dt__file_sync_close(out->ctx, out->temp, out->fd);
        if (dt_error(out->ctx) == DT_OK) dt__file_commit(out->ctx, out->temp, out->path);
        if (dt_error(out->ctx)) dt_ctx_io(out->ctx)->remove(dt_ctx_io(out->ctx)->user, out->temp);
    }
    dt__string_free(out->ctx, out->temp);
    dt_free(out->ctx, DT_MEM_HOST, out->text, DT__TRACE_TEXT);
    dt_free(out->ctx, DT_MEM_HOST, out->all_events,
        (size_t)out->comm->base.size * out->chunk * sizeof *out->all_events);
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
    out.is_first_event = 1;
    world->trace = NULL; /* so that the collectives below are not recorded, */
    world->link = none;  /* and so that a simulated link does not delay them */
    out.offset = dt__trace_offset(&out);
    dt__trace_prepare(&out);
    if (dt_error(out.ctx) == DT_OK) dt__trace_arrows(&out);
    if (dt_error(out.ctx) == DT_OK && comm->base.rank == 0) dt__trace_open(&out);
    if (dt_error(out.ctx) == DT_OK) dt__trace_merge(&out);
    if (comm->base.rank == 0) dt__trace_publish(&out);
    /* after the barrier the file exists; if rank 0 failed to write it, all ranks fail */
    (dt_barrier)(comm);
    dt_free(out.ctx, DT_MEM_HOST, out.own_events, out.chunk * sizeof *out.own_events);
    dt_free(out.ctx, DT_MEM_HOST, out.summaries,
        (size_t)comm->base.size * DT__SUMMARY_FIELDS * sizeof(double));
    dt_free(out.ctx, DT_MEM_HOST, out.track_ends, (size_t)out.track_count * sizeof(double));
    memcpy(world->bytes, before.bytes, sizeof before.bytes);
    world->seconds = before.seconds;
    world->traffic = before.traffic;
    world->link = before.link;
    world->trace = out.trace;
    return dt_error(out.ctx);
}

DT__CPP_WARNINGS_ON
#endif /* DT_COMM_IMPL */

/* HISTORY
     0.2.0   new names (old -> new): dt_run_desc.ask -> status_request, dt_run_desc.faults ->
             read_fault_env, dt_launch.by -> launcher, DT_NCCL_WIDE -> DT_NCCL_F32_WINDOW,
             DT_NCCL_LEAST -> DT_NCCL_MIN_BYTES
             dt_report.left_behind; every overlap of buffers in an all-to-all is an error
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
