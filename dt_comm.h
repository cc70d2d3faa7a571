/* dt_comm.h - v0.2.0 - groups of ranks: launch, collectives, faults - public domain or MIT, see the
   end of the file

   The second of four single-header libraries; dt_tensor.h, which it includes, lists them all. It
   runs one function on many ranks and lets groups of ranks sum, gather and exchange arrays. When a
   rank fails, the waits of all other ranks end, and the error text names the rank that failed
   first. A rank is a thread, a forked process, or a process that exchanges packets with the other
   ranks through a transport (two functions).

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
       cc -O2 train.c -lm -lpthread                 C11 or C++17; gcc, clang
       echo '#include "dt_comm.h"' | cc -O2 -DDT_IMPLEMENTATION -x c -c -o dt.o -
       cc -O2 train.c dt.o -lm -lpthread            the same in two commands, with a train.c that
                                                    does not define DT_IMPLEMENTATION; after an edit
                                                    of train.c only the second one is needed
       nvcc -O3 train.c dt_kernels.cu -lcublasLt -lnccl     CUDA
       mpicc -O3 -DDT_USE_MPI train.c -lm -lpthread     MPI; mpirun -np 4 ./a.out

   OPTIONS (define before including)
       DT_IMPLEMENTATION   adds the code to the declarations; define it in exactly one file
       DT_NO_KERNELS       for a program that only communicates: leaves out the CPU kernels of
                           dt_tensor.h that this header does not need. The program compiles faster
                           and is smaller. Define it together with DT_IMPLEMENTATION.
       DT_USE_MPI          adds the MPI backend, which needs mpi.h of MPI 3.1 or later
       DT_STATIC           makes everything static; define it in every file that includes dt_comm.h,
                           together with DT_IMPLEMENTATION
       DT_NO_CHECKS        leaves out the operation records, the comparison of the ranks' calls in
                           shared memory and the deadlock detection, to measure what they cost

   CONTENTS
     1. Launch (dt_run, backends, rendezvous, launcher, fault injection, simulated network,
        phantom ranks)
     2. Groups (process group, split, traffic, choice of algorithm)
     3. Collectives (all-reduce, reduce-scatter, all-gather, all-to-all, broadcast, barrier)
     4. Send and receive (point-to-point messages)
     5. Nonblocking operations (overlap of communication and computation)
     6. Scalars and agreement
     7. Attach, records, trace (transport, flight recorder, straggler, Chrome trace)
     8. Implementation: three layers, and the state that ranks share
     9. The first failure (failure detection and propagation, abort)
    10. Calls: validation and description
    11. Operation records (flight recorder, deadlock detection, comparison of calls)
    12. Progress engine (waiting: spin, yield, nap)
    13. Messages: one send or receive (eager and rendezvous protocols, credits, matching)
    14. Messages: arriving packets, progress
    15. Transport: shared memory (ring of packets)
    16. Collectives in shared memory (direct all-reduce, windows)
    17. Collective algorithms (ring all-reduce, recursive doubling, tree all-reduce, direct,
        hierarchical)
    18. Begin, wait, end (comparison of calls, device operations)
    19. Hang diagnosis and deadlock detection
    20. Call tables: simulated link, fault injection
    21. Scalars and agreement: code (straggler detection)
    22. Process groups: code
    23. Shared memory: layout, heaps of forked ranks
    24. Launcher discovery (torchrun, mpirun, srun)
    25. Proofs (SHA-256, HMAC)
    26. Sockets and tokens (heartbeat)
    27. Rendezvous
    28. Transport: TCP (failure detection)
    29. Transport: MPI
    30. Attach
    31. Supervisor: threads and forked processes
    32. Trace: code

   CONTRACT
     Memory     dt_run allocates one shared memory segment for all ranks: 34 KiB for each ordered
                pair of ranks and, for the groups of DT_SHARED_SPLITS splits, 2.2 MiB for each rank
                (34 KiB for each rank of each group). Most of its pages stay untouched until
                messages use them. A message that has no receive yet waits in the receiver's memory:
                at most 11 messages of up to DT_EAGER_BYTES from each other rank. A larger message
                waits at its sender, and takes about 250 bytes at the receiver (its announcement)
                until a receive matches it. The receiver accepts 65,536 announcements from each
                other rank, and accepts more when it has received some of those messages. A receive
                that waits for a later message first is a deadlock, which the error text explains. A
                rank that sends a message of another length than was posted, or more than these
                limits allow, is named in the error. Groups belong to the context's world and are
                freed with the world. A group takes about 0.5 KiB and 28 bytes for each of its ranks
                in the memory of each rank: 10,000 groups of 8 ranks take 7 MiB. dt accesses the
                buffers of a call only until the call returns, or for a nonblocking operation until
                its dt_wait returns. After that no other rank touches the buffers, even after an
                error. A forked rank's memory (dt_alloc) lies in the segment too, except that of the
                classes host and optim, which is copied through the segment in windows of
                DT_WINDOW_BYTES. MPI ranks have one segment for each machine, if the machine's
                system allows shared memory. Ranks that are threads on several GPUs access each
                other's memory directly. If one of the GPUs cannot access another one (peer access),
                dt_run fails with DT_ERR_DEVICE; use backend nccl in this case.
     Errors     If a collective cannot be done, its context fails (dt_error, dt_error_text) and the
                call returns the error's status. The failure of one context, also by dt_fail in a
                tensor operation or in your code or by a refused allocation, makes all ranks fail:
                the waiting call and every later call of the other ranks return DT_ERR_PEER, and
                their error text names the rank that failed first and its reason. If ranks call
                different operations, or the same operation with different counts, types, reductions
                or roots, every rank gets an error that names two differing calls and their call
                sites, once all ranks have called (for tcp, nccl, mpi and groups without shared
                memory see dt_run_desc.check). If
                all ranks wait and no message is in flight, every rank gets an error that names the
                cycle of waits, without waiting for the timeout. The error text names a rank that
                has ended or died, and the signal that killed it. For a rank that does not arrive
                within timeout_s the text also gives its state: stopped, spinning, asleep or late.
                Error texts give world ranks. Only the first failure is logged as an error. Timeouts
                count only time in which a rank's process runs, so a job that is suspended as a
                whole (Ctrl-Z, scontrol suspend) continues when resumed.
     Threads    With threads and procs the caller of dt_run is the supervisor, which starts and
                watches the ranks, and not a rank. A dt_comm belongs to its rank's thread. All ranks
                use the tables of dt_run_desc (structs of function pointers) at the same time.
                Several calls of dt_run can run at the same time.
     Order      A reduction computes ((x0 op x1) op x2) ... for every element, where xr is rank r's
                element. The order does not depend on the count, the backend or the algorithm
                (except DT_RING, see dt_comm_set_algorithm), and every rank gets the same bits. bf16
                and f16 are reduced in f32 and rounded once at the end. So an all-reduce equals, bit
                for bit, a reduce followed by a broadcast, and a reduce-scatter followed by an
                all-gather. The exception is NCCL, which reduces device memory in its own
                order. With NCCL the last bits of floating-point sums and products may differ from a
                reduction in rank order, and an all-reduce may differ from a reduce followed by a
                broadcast.
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
    /* As DT_BACKEND_TCP, but each rank has its own GPU and NCCL carries large messages. Needs a
       program that is linked with dt_kernels.cu, compiled where <nccl.h> is found. */
    DT_BACKEND_NCCL
} dt_backend;

/* The first failure of a run; dt_run fills it (dt_run_desc.report). */
typedef struct dt_report {
    dt_status status; /* DT_OK if there was no failure */
    int rank;         /* the rank that recorded the failure, or -1 if the run could not start */
    char text[512];   /* "rank 3: dt_linear(w1): ..." */
    int left_behind;  /* number of ranks whose thread or process still ran when dt_run returned */
} dt_report;

/* One level of a network: one switch connects `ranks` consecutive ranks of the world (those of a
   node, a rack, a pod). latency_s and bytes_per_s are those of an operation whose ranks are all
   under one switch of this level; bytes_per_s is what one rank sends. 0: no limit. */
typedef struct dt_level {
    int ranks;
    double latency_s, bytes_per_s;
} dt_level;
#define DT_MAX_LEVELS 7

/* A simulated slow network, for learning and for predictions. An operation takes at least latency_s
   + bytes / bytes_per_s seconds, where `bytes` is its number of bytes as dt_comm_bytes counts them.
   This time runs from the start of the operation, or from the end of this rank's time for its
   previous operation on the same level if that is later. A message arrives when its send ends, and
   a collective ends on no rank before the time of the last one. A rank that waits for an operation
   sleeps. Scalars (section 6) cost nothing.

   levels (n_levels, innermost first, each with more ranks than the one before): the operations of a
   group take the time of the first level of which one switch has all its ranks; for a message the
   two ranks count. The array must stay valid during the run. The first two fields are the time
   beyond the last level. If they are 0 and there are no levels, no network is simulated. */
typedef struct dt_link {
    double latency_s, bytes_per_s;
    const dt_level *levels;
    int n_levels;
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
    int rank; /* for tcp and nccl: the rank of this process; for phantoms: see `present` */
    /* Phantom ranks, for dry runs of large worlds (dt_parallel.h). present is the number of ranks
       that run, as threads; 0 means all. It divides `ranks` into blocks of consecutive ranks, such
       as the pipeline stages of a mesh. Of each block only rank number `rank` runs; the others are
       phantoms. In a group with phantoms a collective ends at once, as if every rank of the group
       had given the data that this rank has given. A message to a phantom is dropped; one from a
       phantom, and one that dt_recv_any receives in such a group, holds zeros. Groups without
       phantoms, and other messages between two ranks that run, work as usual. */
    int present;
    /* For tcp and nccl: the rendezvous, which is the address where rank 0 listens until all ranks
       have connected, such as "10.0.0.1:29500" or "node17:29500". NULL means "127.0.0.1:29500". A
       name is resolved to an IPv4 address; timeout_s does not limit the time that the system's
       resolver takes. Each other rank listens at a free port of the interface through which it
       reaches rank 0. Before two ranks read anything else from each other, each proves to the other
       that it belongs to the job. At a loopback address (127.0.0.0/8) it then suffices that the
       ranks are processes of one user; at any other address every rank needs the job's token. After
       that nothing is encrypted or signed, which rank 0 says in a notice if other machines can
       reach the address. */
    const char *rendezvous;
    /* Limit on the live bytes of one rank, summed over all classes of dt_memory; 0: no limit. */
    size_t mem_limit;
    /* For tcp, nccl and mpi: the job's secret, at least 16 bytes. Ranks prove to each other that
       they know it. If `token` is NULL, the secret is the contents of the file that the environment
       variable DT_TOKEN_FILE names (only its owner may have permissions for it), else the value of
       DT_TOKEN, which a launcher can set. Without a token rank 0 makes a random secret. For mpi all
       ranks use rank 0's, which MPI carries. For tcp and nccl, at a loopback address only, rank 0
       gives its random secret to processes of its own user, whom the kernel names (SO_PEERCRED of a
       Unix socket). When the rendezvous is complete, dt erases its copy of the token and all keys
       derived from it. `token` and DT_TOKEN themselves stay in memory, so prefer the file. */
    const char *token;
    int read_fault_env; /* 1: read faults from DT_FAULT in the environment, if `fault` is NULL */
    const char *fault;  /* faults to inject, written as described below; NULL: none here */
    /* For tcp, nccl and mpi, and for groups without a place in shared memory (DT_SHARED_SPLITS):
       whether the ranks compare their calls before each collective, so that no rank completes a
       collective that another rank calls differently. 1 means always, -1 never, and 0 in the first
       100 steps (dt_comm_step; at most the first 10,000 collectives of a group), or always if
       DT_CHECK=1 is in the environment. Without it a rank that receives a message of a different
       call, or a message that its own call has no use for, still reports both calls; but other
       ranks may have completed the collective by then. */
    int check;
    /* A flag that a signal handler or another thread sets to 1 to ask for the ranks' status; may be
       NULL. dt then logs the table of dt_ranks_text as a notice and sets the flag to 0 again. For
       procs the supervisor reads its own copy of the flag. For tcp, nccl and mpi a rank reads its
       flag while it waits. */
    int *status_request;
} dt_run_desc;

/* Fault injection, for tests and for learning. A fault is written KIND:rank=R:seq=N[:s=SECONDS];
   commas separate several faults. N counts, from 1, all operations that rank R begins: those of
   sections 3 to 6, each transfer of dt_exchange, dt_comm_step, and two for each dt_comm_split. The
   lines of dt_records_text begin with this number.

   Six kinds take effect before operation N. "kill" and "stop" send the rank SIGKILL or SIGSTOP,
   "exit" ends its process with status 7, and "spin" loops for ever. "delay" sleeps for SECONDS
   (default 1). "drop" skips the call, which then does not count as an operation. Two kinds take
   effect after operation N and change one received element, the middle one of the first block:
   "flip" inverts one bit, and "nan" writes a NaN. Scalars (section 6) and an operation without data
   of yours, such as dt_comm_split, are left as they are.

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
   of ending the job. dt_run returns the first failure on every rank. Without a failure, a rank
   that has ended waits for the others as long as they run. If another rank does not learn of a
   failure within timeout_s, this rank's dt_run does not finalize MPI; the launcher ends the other
   rank once this process has exited with an error. Groups within one machine run their collectives
   in shared memory (see dt_run_desc.node_ranks).

   tcp and mpi copy device memory through host memory; NCCL transfers it directly. */
DT_API dt_status dt_run(
    dt_run_desc desc, dt_status (*rank_main)(dt_ctx *ctx, void *user), void *user);

/* [local] Returns 1 if the program contains the backend, else 0: mpi needs DT_USE_MPI, nccl needs
   dt_kernels.cu. */
DT_API int dt_backend_is_built(dt_backend backend);

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
    DT_AXIS_DP = 0,    /* data parallel */
    DT_AXIS_TP,        /* tensor parallel */
    DT_AXIS_CP,        /* context parallel */
    DT_AXIS_PP,        /* pipeline parallel */
    DT_AXIS_EP,        /* expert parallel */
    DT_AXES
} dt_axis;

/* Number of dt_comm_split calls on the world whose groups get places in the shared memory segment,
   where collectives need no messages. A call on a smaller group counts less: on half of the world's
   ranks, for example, half a call. A program may make any number of further groups. Their
   collectives run as messages, as over tcp, with the same results; for threads and procs a notice
   in the log says so once. */
#define DT_SHARED_SPLITS 64

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
   is not a failure. (Do not use this NULL as a group: it would be a group of one rank.) `name`
   appears in error texts and tables; its first 31 bytes are copied, and NULL means "group". The
   group lives as long as the world, so make a group once and keep it. The number of groups has no
   limit (see DT_SHARED_SPLITS). After a failure the function returns NULL. */
DT_API dt_comm *dt_comm_split(dt_comm *comm, int color, int key, const char *name);
/* [collective: comm] As dt_comm_split, for a color and a key that follow from the rank alone.
   color_of returns the color of rank `rank` of comm and sets *key, which is 0 before. It is called
   for this rank or, in a run with phantom ranks (dt_run_desc.present), for every rank of comm:
   phantoms cannot tell their colors, so dt_comm_split fails there. */
typedef int (*dt_color_fn)(int rank, int *key, void *user);
DT_API dt_comm *dt_comm_split_by(dt_comm *comm, dt_color_fn color_of, void *user, const char *name);
/* [local] Two dt_color_fn; user points to an int n of 1 or more. dt_color_block makes groups of n
   consecutive ranks (6 ranks, n = 3: 0 1 2 and 3 4 5), dt_color_cyclic groups of ranks that are n
   apart (0 3, 1 4 and 2 5). */
DT_API int dt_color_block(int rank, int *key, void *n);
DT_API int dt_color_cyclic(int rank, int *key, void *n);
/* [local] Returns 1 if the group has phantom ranks (dt_run_desc.present), else 0. */
DT_API int dt_comm_has_phantoms(const dt_comm *comm);
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

/* Algorithm of a collective that runs as messages. Section 17 gives the cost of each algorithm. */
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
   Messages through shared memory count too. Collectives without messages, in shared memory or by
   NCCL, and the messages in which ranks compare their calls (dt_run_desc.check) do not count. */
typedef struct dt_traffic {
    size_t messages, bytes;
} dt_traffic;
DT_API dt_traffic dt_comm_traffic(const dt_ctx *ctx);

// ==== 3. Collectives ============================================================================

/* All functions of this section are [collective: comm]. N is the number of ranks in comm. Counts
   are in elements. Types are DT_F32, DT_F64, DT_BF16, DT_F16, DT_I32, DT_I64 and DT_U8 (bytes of
   any meaning, such as packed structs of ranks with one architecture). Reductions are DT_SUM,
   DT_AVG, DT_MAX, DT_MIN and DT_PROD. Sums and products of integers wrap around (two's complement;
   DT_U8 modulo 256). An average is the sum, which may have wrapped, divided by N and rounded toward
   zero. A type that the context's kernel table does not reduce fails with DT_ERR_UNSUPPORTED.

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
   equal the send's, else the receive returns DT_ERR_COMM and the error text names both.

   A send of up to DT_EAGER_BYTES is eager: dt copies the message and the send returns. From one
   rank to another, at least 8 eager messages can be pending; at most 11, because the receiver
   reports only every fourth receive. A larger send, or a further eager message, waits for the
   receiver. So two ranks must not both begin with a large send to each other: use the nonblocking
   calls (section 5). A rank can send up to DT_EAGER_BYTES to itself, or more with a nonblocking
   call. If comm is NULL, the call returns DT_ERR_ARG, because there is no peer; no context
   fails. */
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
   other operation, and between the kernels of its tensor operations. Any number of operations may
   be pending; in shared memory the first DT_MAX_STARTED of each group move their data, and a later
   one begins when an earlier one is complete. A NULL handle means that the operation is already
   complete (if comm is NULL) or that the context has failed; dt_wait accepts NULL and returns the
   context's status. Call dt_wait exactly once for every other handle, in any order. A handle
   without a dt_wait counts as a failure when rank_main returns. */
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
/* [local] As dt_wait, but without the timeout: for a rank that serves requests, whose next one may
   come at any time. Waits for as long as the peers live: a failure, a rank that ends and a deadlock
   are detected as in dt_wait. */
DT_API dt_status dt_wait_idle(dt_ctx *ctx, dt_work *work);
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
   procs; user_bytes and status_request are not used. Returns NULL after a failure, which has been
   logged. */
DT_API dt_team *dt_team_make(dt_run_desc desc);
/* [local] Makes the context of a rank, with the team's tables. The heap of a forked rank lies in
   the shared memory segment. Free the context with dt_ctx_free, after dt_comm_detach. Returns NULL
   after a failure, which the other ranks learn of. */
DT_API dt_ctx *dt_team_ctx(dt_team *team, int rank);
/* [the caller is the supervisor] Frees the team. Call dt_team_free after all ranks have detached,
   or if they will never attach. Returns the status of the first failure and fills desc.report. */
DT_API dt_status dt_team_free(dt_team *team);

#define DT_ANY (-1) /* as `from`: any rank */
#define DT_PACKET_BYTES 8192
/* A transport carries packets between ranks 0 .. size-1. Two functions suffice; the others may be
   NULL. dt matches messages, compares calls, splits large messages, tells other ranks of failures
   and detects deadlocks above all transports. No function may wait. dt calls them only in the
   thread that has attached the rank.

       send     Sends a packet of at most DT_PACKET_BYTES, which consists of head and body (body may
                be NULL if body_bytes is 0). Returns 1 if the transport has taken (copied) the
                packet, 0 if it cannot take it now (dt tries again, and may send to other ranks
                meanwhile), -1 if the rank cannot be reached any more: the context then fails.
                Packets from one rank to another arrive once, whole and in the order of their sends.
                `to` is never this rank.
       recv     Returns the next packet that has arrived from rank `from` (DT_ANY: from any rank; a
                transport may ignore `from`) and sets *sender and *bytes, or returns NULL. The
                packet is aligned to 8 bytes and valid until the next call of recv. dt calls recv
                often while it waits, so the transport can also do here what it has to do regularly.
       lost     Failure detection: returns 1 if the connection to `rank` is lost, else 0. Without it
                the end of a rank's process is noticed only by the timeout. Writes the reason to
                `why` (512 bytes), which ends the error text and so must name the rank: "rank 3 has
                closed its socket".
       pid      The pid of a rank on this machine, or 0.
       pull     (receiver) Begins to receive the data of a message larger than DT_EAGER_BYTES.
       push     (sender) Begins to send them. dt calls pull first, then push on the other rank with
                the same id, which is unique among the messages from one rank to another. Both
                return a request, or NULL on failure. Without push and pull dt sends such data in
                packets.
       test     Returns 1 if the request is complete, 0 if not yet, 2 if not yet but some data have
                moved since the last call, -1 if it has failed, with the reason in `why` (512
                bytes). If it returns 1 or -1, the request is freed.
       cancel   Frees a request. The transport may not use its buffer any more. */
typedef struct dt_transport {
    const char *name;
    void *user;
    int (*send)(void *user, int to, const void *head, size_t head_bytes, const void *body,
        size_t body_bytes);
    const void *(*recv)(void *user, int from, int *sender, size_t *bytes);
    int (*lost)(void *user, int rank, char *why);
    int (*pid)(void *user, int rank);
    void *(*push)(void *user, int to, uint64_t id, const void *buf, size_t bytes);
    void *(*pull)(void *user, int from, uint64_t id, void *buf, size_t bytes);
    int (*test)(void *user, void *request, char *why);
    void (*cancel)(void *user, void *request);
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
   world. Over a transport it returns at once, without waiting for the other ranks. Returns NULL
   after a failure. For a team, make ctx with dt_team_ctx, which gives it the team's tables; for a
   transport with dt_ctx_make. */
DT_API dt_comm *dt_comm_attach(dt_ctx *ctx, dt_attach_desc desc);
/* [local] Ends this rank: frees its groups and tells ranks that wait for it that it has ended.
   `status` is the return value of the rank's function. With a transport this takes at most 0.25 s
   if `send` does not take the packets. The transport must deliver every packet that `send` has
   taken, also after this call. Afterwards dt_error(ctx) tells whether the rank has failed. */
DT_API void dt_comm_detach(dt_ctx *ctx, dt_status status);

/* FLIGHT RECORDER. Each rank keeps records of its last DT_RECORDS operations and their call
   sites. */
#define DT_RECORDS 128
/* [local] Writes one line for each rank to `text`: rank, process, step, seconds, and the operation
   in which the rank waits or which it finished last. For a rank that shares no memory with this one
   the line shows what that rank last reported. Returns the size of the complete text in bytes. If
   `text` is NULL it only returns the size. */
DT_API size_t dt_ranks_text(const dt_ctx *ctx, char *text, size_t bytes);
/* [local] Writes the last operations of this rank, or of a world rank that shares memory with it,
   to `text`: one line for each operation, newest first, beginning with the number of the operation
   among all of its rank. Returns the size as dt_ranks_text does. */
DT_API size_t dt_records_text(const dt_ctx *ctx, int rank, char *text, size_t bytes);
/* [collective: the world] Ends a training step and counts it, for dt_ranks_text and
   dt_run_desc.check. Straggler detection: logs a notice that names a rank if, in 5 of the last 8
   steps, the rank's own work without its waits took more than 1.5 times that of the median rank
   plus 1 ms. It logs at most one such notice in 10 steps. */
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
   counted. A rank without a trace contributes no events. */
DT_API dt_status dt_trace_write(dt_comm *world, const char *path);

/* CALL SITES (section 4 of dt_tensor.h): the functions listed below are also macros. */

/* [local] Sets the call site (file and line) of this rank's next operation, on any group. Returns
   comm. */
DT_API dt_comm *dt_here(dt_comm *comm, const char *file, int line);

#define DT_HERE(comm) dt_here(comm, DT_SITE)
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
#define dt_comm_split_by(comm, ...) dt_comm_split_by(DT_HERE(comm), __VA_ARGS__)
#define dt_comm_step(comm) dt_comm_step(DT_HERE(comm))

#ifdef __cplusplus
}
#endif
#endif /* DT_COMM_H */

// ==== 8. Implementation: three layers, and the state that ranks share ===========================

/* DT__COMM_INTERNALS: declares only the structs of this section, for the NCCL code of
   dt_kernels.cu. */
#if defined(DT_IMPLEMENTATION) && !defined(DT_COMM_IMPL) && !defined(DT__COMM_INTERNALS)
#define DT_COMM_IMPL
#define DT__COMM_CODE

#include "dt_tensor.h"

DT__CPP_WARNINGS_OFF

#include <arpa/inet.h> /* inet_pton, htons */
#include <errno.h>
#include <fcntl.h>   /* open */
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
#include <sys/syscall.h> /* gettid, which not every libc has as a function */
#include <sys/uio.h>     /* struct iovec */
#include <sys/un.h>      /* struct sockaddr_un */
#include <sys/wait.h>    /* waitpid, in dt_run */
#include <unistd.h>      /* sysconf, fork, _exit */
#ifdef DT_USE_MPI
#define OMPI_SKIP_MPICXX 1 /* leaves out MPI's C++ interface, which dt does not use */
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#endif

DT__COLD_BEGIN
#endif /* DT_IMPLEMENTATION */

#if (defined(DT__COMM_CODE) || defined(DT__COMM_INTERNALS)) && !defined(DT__COMM_STRUCTS)
#define DT__COMM_STRUCTS

/* Three layers:

       calls        dt_all_reduce(...)  validate, number, describe, record, compare   (10, 11, 18)
                                |
                all ranks share memory?
                  |yes         |no
       algorithms |             ring, tree, ...: lists of sends and receives          (17)
                  |             match sends with receives; eager and rendezvous       (13, 14)
                  |             protocols
       transports |             carry packets: shared memory (15), TCP (28), MPI (29), your own
                  direct access to each other's buffers, without messages             (16)

   With threads and forks, the default, a collective takes the left way. NCCL replaces both ways for
   data on GPUs. All waits go through one loop, which advances all pending operations (12). A
   failure of any rank ends the waits of all (9).

   The way of one blocking all-reduce, and a good order to read:

       18   dt_all_reduce, dt__op_run, dt__op_begin, dt__work_begin: chooses the way
       12   dt__wait_until_finished, dt__work_advance: until the operation is complete
       16   dt__shared_collective (left), or
       17   dt__rounds_advance: one round of the algorithm after another (right)
       14   dt__p2p_advance: one send or receive of a round
       13   dt__send_packet, dt__match
       15   dt__packet_ring_send, or the transport's send
       18   dt__op_end

   Ranks that are threads or forks share one memory segment, called "the range". It is allocated
   before the first rank starts, so an address in it is valid on all ranks:

       dt__shared | dt__rank_state x N | records | ring table N x N | groups | rings | user | heaps

   Ranks that MPI started have one range for each machine, which all of them map at the same
   address. The range holds no lock. Each word has one writer at a time, except a few counters and
   claims that ranks change by atomic read-modify-write. Other ranks read the word with atomic
   loads. A word that publishes data is stored with release order and loaded with acquire order. */

enum {
    DT__CACHE_LINE = 128,  /* two cache lines of 64 bytes, because processors fetch them in pairs */
    DT__RING_SLOTS = 8,    /* packets that can be in flight from one rank to another */
    DT__EAGER_CREDITS = 8, /* eager messages to one rank that have no receive yet */
    DT__CREDIT_STEP = 4,   /* a receiver reports its receives at the latest after this many */
    /* so when 8 messages have no receive, the sender may count 3 more */
    DT__EAGER_LIMIT = DT__EAGER_CREDITS + DT__CREDIT_STEP - 1,
    DT__ANNOUNCE_CREDITS = 65536, /* announcements to one rank that have no receive yet */
    DT__MAX_RANKS = 65536,
    DT__NAME_BYTES = 32,
    DT__FILE_BYTES = 32 /* dt__site_text cuts names to 31 characters */
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
    DT__CHECK, /* gathers the frames of all ranks, to compare their calls (section 18) */
    DT__OP_CODES
} dt__op_code;

/* Advances an operation as far as possible without waiting. Returns 1 if it is complete, 0 if it is
   not complete yet, -1 if the context has failed. */
typedef int (*dt__advance_fn)(dt_work *work);
/* Begins the next round of an algorithm (section 17). Returns 1, or 0 if there are no more rounds
   or the context has failed. */
typedef int (*dt__round_fn)(dt_work *work);

/* One call: the arguments of all public functions in one struct. */
typedef struct dt__call {
    dt__op_code op;
    dt_dtype dtype;
    dt_op redop;     /* the reduction's op; DT_SUM in other calls */
    int peer;        /* the root; in a send or receive the peer, or DT_ANY; 0 in other calls */
    int tag;         /* of a send or receive */
    int host_memory; /* 1 for scalars, whose data lie in host memory on every device */
    size_t count;
    const void *send;
    void *recv;
    const size_t *send_counts, *recv_counts; /* all-to-all-v */
    /* any_source is 1 in a receive from any rank; *from then gets the sender's rank (from may be
       NULL) */
    int any_source, *from;
    uint64_t seq; /* number of this collective on its group, from 1 */
    /* ZeRO-3 gather: 1 + 4 * bucket + dt__gather_phase; 0 for other calls. Ranks compare it,
       because two buckets may have equal counts. */
    uint32_t gather_id;
} dt__call;
typedef enum dt__gather_phase { /* each of the first three has a gather plan (dt_zero.h) */
    DT__IN_FORWARD,
    DT__IN_BACKWARD,
    DT__IN_WEIGHT_HALF,
    DT__OUTSIDE_OPS,
    DT__GATHER_PLANS = DT__OUTSIDE_OPS /* number of plans */
} dt__gather_phase;

/* A frame says what a call is: its group, number, operation, type, count, reduction or root, and
   call site. It is the header of every packet between ranks, and stands wherever a call is
   published: in posts, records, comparisons and wait reports. */
typedef struct dt__frame {
    /* in a packet: the message's size; its number among all messages from its sender to its
       receiver; its address in shared memory; number of eager messages that the sender of this
       frame has matched */
    uint64_t bytes, id, address, credits;
    uint32_t kind;    /* in a packet: what the packet is (dt__frame_kind) */
    uint32_t channel; /* number of the group */
    uint64_t seq;
    int32_t tag;  /* of a message; below 0 in a message of a collective */
    int32_t line; /* of the call */
    char file[DT__FILE_BYTES];
    uint64_t packed_call; /* operation, type, reduction, root, gather_id (dt__pack_call) */
    uint64_t count;       /* dt__post needs these two fields to be the last ones */
} dt__frame;

/* The largest packet: a frame and the data of an eager message, or a piece of a larger one. */
#define DT__PACKET_DATA (DT_PACKET_BYTES - sizeof(dt__frame))

/* A posted call, or post: one rank's arguments of one collective, which the other ranks of the
   group read. A rank has DT_MAX_STARTED posts in each group and reuses the oldest. */
typedef struct __attribute__((aligned(128))) dt__post {
    /* The cache line that other ranks read begins with call.packed_call and ends with data[0]: one
       line for a call with up to 8 bytes of data. */
    char padding[DT__CACHE_LINE - offsetof(dt__frame, packed_call) - sizeof(double)];
    double link_until; /* dt_work.link_until, if a link is simulated */
    dt__frame call;
    uint64_t number; /* equals dt_work.post once the other fields are written */
    const void *send;
    void *recv;
    /* If other ranks cannot access `send` or `recv`: the address of this rank's staging buffer, in
       which they read these buffers window by window. Else NULL. */
    char *staging;
    int is_inline; /* 1 if the send data lie in `data` */
    /* A small send buffer, or the counts of an all-to-all-v. It extends to the end of the post. */
    uint64_t data[8];
} dt__post;

/* Progress of one rank in its group. Operations move their data in order of their posts, each in
   one or several rounds. `closed` is the last round in which this rank has finished its access to
   other ranks' memory. The rounds of all operations of the group are numbered consecutively. */
typedef struct __attribute__((aligned(128))) dt__member {
    uint64_t closed;
} dt__member;

/* Ranks that share memory have one dt__group in the range, for the members and the posts. Each rank
   has a dt__group of its own too, which lists the group's ranks. */
typedef struct dt__group {
    char name[DT__NAME_BYTES];
    int size;
    uint32_t channel;    /* distinguishes the group's messages from those of other groups */
    int *ranks;          /* (size) the members' world ranks; NULL in the range */
    dt__member *members; /* (size); NULL if the group's ranks do not all share memory */
    char *posts;         /* (size, DT_MAX_STARTED, post_bytes) */
    size_t post_bytes;
} dt__group;

/* The packets from one rank to one other rank in shared memory (section 15). A packet with up to 16
   bytes of data begins in `padding`, so that it fits into two cache lines of 64 bytes; a larger one
   begins in `data`, so that what follows its frame begins at a cache line. */
enum { DT__SLOT_PADDING = 128 - sizeof(uint64_t) - sizeof(dt__frame) };
typedef struct __attribute__((aligned(64))) dt__packet_slot {
    /* number of the packet, from 1, << 16 | its bytes; stored last */
    uint64_t number_and_bytes;
    char padding[DT__SLOT_PADDING];
    char data[sizeof(dt__frame) + DT_EAGER_BYTES];
} dt__packet_slot;
typedef struct __attribute__((aligned(128))) dt__packet_ring {
    /* of the sender: number of packets written, and of those whose slots it knows to be free; where
       the next packet goes */
    uint64_t sent, freed, send_at;
    char padding[DT__CACHE_LINE - 3 * sizeof(uint64_t)];
    /* of the receiver: number of packets whose slots are free again, and of those handed out; where
       the next packet is looked for */
    uint64_t received, taken, recv_at;
    char more_padding[DT__CACHE_LINE - 3 * sizeof(uint64_t)];
    dt__packet_slot slot[DT__RING_SLOTS];
    /* with a simulated link: when the sends of the slots' messages end */
    double link_until[DT__RING_SLOTS];
} dt__packet_ring;

/* Flight recorder entry: one operation, as its rank began it. Other ranks may read a record while
   its rank writes it, so they copy the record word by word and check `number` before and after. */
typedef struct dt__op_record {
    /* number of the operation among the rank's operations, from 1; 0 while the record is written */
    uint64_t number;
    dt__frame call;
    char group[DT__NAME_BYTES];
} dt__op_record;

/* State that one rank publishes: in shared memory, or to ranks without it in wait reports. The
   struct is aligned only to 64, because host memory is not aligned more strictly. */
typedef struct __attribute__((aligned(64))) dt__rank_state {
    int busy; /* 1 while this rank accesses other ranks' memory, else 0 */
    /* 1 if rank_main has returned or the process is gone; 2 if the process has nothing left to do
       but exit with status 0; else 0 */
    int ended;
    int pid, tid;
    int params_sharded; /* 1 at ZeRO-3, where data may be NULL: explains a SIGSEGV */
    /* Progress counter: incremented after every change that another rank, or this rank, may wait
       for (section 11). */
    uint64_t progress;
    /* The sum of all ranks' progress counters. This rank reads it before it checks its operations,
       and stores it if the check found nothing to do. DT__IDLE_FOREVER if the rank has ended. */
    uint64_t idle_at_progress;
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

/* Wait report: a rank's state and the operation in which it waits, or its last one. MPI debuggers
   and NCCL RAS use similar reports to diagnose hangs. Ranks that share memory read each other's
   state and records; a rank sends reports to all others (section 19). */
typedef struct dt__wait_report {
    dt__rank_state state;
    dt__op_record record;
} dt__wait_report;

typedef struct dt__shared {
    int ranks;
    int spins;   /* iterations of the spin phase of a wait; 0 if there are more ranks than cores */
    int claimed; /* 2 + the rank that fills first_failure, 1: the supervisor does, 0: no one yet */
    int aborted; /* the abort word (section 9) */
    int ended;   /* number of ranks of this range that have ended */
    /* 1 if ranks are processes, which can access only this range of each other's memory; else 0 */
    int separate_memory;
    double timeout_s;
    dt_report first_failure; /* valid once `aborted` is set */
    dt_report unreceived;    /* a message that was never received, if its status is not DT_OK */
    int unreceived_claimed;
    /* (ranks); state and all pointers below are NULL if no memory is shared */
    dt__rank_state *state;
    dt__op_record *records;  /* (ranks, DT_RECORDS) */
    dt__packet_ring **rings; /* (receiver, sender); NULL until the first packet */
    char *group_arena;       /* groups are allocated from it */
    size_t group_arena_bytes, group_arena_used;
    char *ring_arena; /* rings are allocated from it */
    size_t ring_arena_bytes, ring_arena_used;
    char *user;  /* shared copy of the object that dt_run's `user` points to */
    char *heaps; /* (ranks, heap_bytes) */
    size_t heap_bytes;
    size_t zeroed_bytes; /* this many bytes at the start of the range must be zero */
    int is_zeroed;       /* 1 if all fresh memory of the range is zero */
    size_t bytes;        /* size of the segment */
} dt__shared;

/* The ranks of a transport that share memory on one machine. (Names say node, texts machine.) */
typedef struct dt__node {
    dt__shared *shared;
    int local_rank; /* this rank's index in the shared range */
    /* (world size) each rank's index in the range; -1 if it is on another machine */
    int *local_ranks;
    int *node_leaders; /* (world size) for each rank, the first rank on its machine */
} dt__node;

/* A list of sends or receives (section 13), the oldest first. */
typedef struct dt__p2p_list {
    struct dt__p2p *first, *last;
} dt__p2p_list;

/* A list of pending operations (section 12), the oldest first. A work is in at most one list. */
typedef struct dt__work_list {
    dt_work *first, *last;
    size_t count;
} dt__work_list;

/* What this rank knows about another rank, and the messages between the two. */
typedef struct dt__peer {
    dt__wait_report report;  /* of a rank that shares no memory with this one: its last report */
    int is_remote;           /* 1 if the transport reaches the rank, 0 if shared memory does */
    dt__p2p_list queued;     /* sends that the transport has not taken */
    dt__p2p_list announced;  /* sends under way by the rendezvous protocol */
    dt__p2p_list pulled;     /* receives under way by the rendezvous protocol */
    uint64_t messages;       /* number of messages sent to that rank so far */
    uint64_t eager_sent;     /* eager messages to that rank */
    uint64_t eager_credited; /* those of them that have a receive there, as far as known */
    uint64_t eager_received; /* eager messages from that rank */
    uint64_t eager_matched;  /* those of them that have a receive here */
    uint64_t eager_told;     /* `eager_matched`, as that rank was last told */
    uint64_t unanswered;     /* announcements to that rank that it has not answered */
    uint64_t unmatched;      /* announcements from that rank that have no receive here */
} dt__peer;

/* Replaces the shared memory segment if no memory is shared. */
typedef struct dt__private_range {
    dt__shared shared;
    dt__rank_state state;
    dt__op_record records[DT_RECORDS];
} dt__private_range;

/* Call table: what happens at the beginning, during and at the end of each operation.
   Fault injection, the simulated link and the trace are tables around the plain one (section 20).
   begin returns NULL if the context has failed. */
typedef struct dt__call_table {
    dt_work *(*begin)(dt_comm *comm, const dt__call *call);
    dt__advance_fn advance;
    dt_status (*end)(dt_work *work);
} dt__call_table;

enum { DT__STRAGGLER_STEPS = 8 }; /* straggler detection looks at so many steps */

/* One rank's private state of a run; dt_ctx_attached returns it. */
typedef struct dt__world {
    dt__shared *shared;
    dt_ctx *ctx;
    const dt_host *host;
    int rank, size;
    int local_rank; /* index in the shared range */
    /* With phantom ranks: of each `block` consecutive ranks one runs. Else 1. */
    int block;
    const dt__node *node;  /* NULL if all ranks share memory, or none; local_rank == rank then */
    dt__rank_state *state; /* this rank's own state and records */
    dt__op_record *records;
    const dt__call_table *calls; /* the outermost table */
    double last_step_own;        /* time outside of operations, at the end of the last step */
    /* Straggler detection: the times of this rank's own work in its last steps; rank 0 only: the
       first step that may log the next notice, and the steps between the last two */
    double own_s[DT__STRAGGLER_STEPS];
    int64_t straggler_notice_step, straggler_pause;
    /* the progress counter of the rank state->waits_for when this rank began to wait for it */
    uint64_t awaited_progress;
    int is_thread; /* 1 if this rank is a thread of this process */
    /* 1 if this rank claimed the first failure; only this rank fills the record */
    int owns_first_failure;
    dt_listener listener;
    dt_comm *comms;   /* all groups of this rank, newest first */
    dt_comm *comm;    /* the world */
    dt_comm *present; /* with phantom ranks: the ranks that run; not counted as memory. Else NULL */
    dt__peer **peers; /* (size); NULL until the first message, or the first report */
    /* reaches the ranks that share no memory with this one; send may be NULL */
    dt_transport transport;
    /* calls of dt__poll_transport; a wait past its spin phase sets it so that each call polls */
    unsigned poll_count;
    /* number of times that this rank has gone through its pending operations; when it last looked
       for packets of the transport, and whether there were any */
    uint64_t pass, polled_pass;
    int poll_found;
    dt__p2p_list posted;                                      /* receives without a message */
    struct dt__arrival *first_unexpected, *last_unexpected;   /* messages without a receive */
    struct dt__arrival *free_arrivals[2], *arrival_chunks[2]; /* of announcements, of eager ones */
    uint32_t channel_count; /* number of channels given to groups so far */
    int is_arena_full;      /* 1 if a group has found no place in the range */
    /* nonblocking operations not waited for, in order of their starts; the operations before
       first_unfinished are complete */
    dt__work_list started;
    dt_work *first_unfinished;
    size_t advance_credit;    /* dt__advance_some explains it */
    dt_work *blocking;        /* the operation that a blocking call waits for, or NULL */
    dt__work_list free_works; /* work objects for reuse */
    dt__work_list device_ops; /* operations that the device has not completed, the oldest first */
    /* Buffer for a copy of a large message that the receiver cannot reach; cached for the next
       message. */
    void *send_copy;
    size_t send_copy_bytes;
    int send_copy_in_use;
    struct dt__faults *faults; /* NULL without planted faults */
    struct dt__link *link;     /* NULL without a simulated link */
    /* with it: when the send of the message ends that this rank sends or receives now */
    double message_until;
    /* NULL, or the virtual clock of a dry run: waits for other ranks do not advance it, but the
       simulated link does */
    double *clock;
    struct dt__trace *trace; /* NULL without a trace */
    struct dt__nccl *nccl;   /* NULL without NCCL */
    size_t bytes[1 + DT_AXES];
    dt_traffic traffic;
    double seconds; /* spent inside operations */
    int check;      /* dt_run_desc.check */
    /* In a dry run for forked ranks: 1 if a forked rank shares the memory at p with the other
       ranks; else NULL. */
    int (*would_share)(const void *p);
    dt__rank_state reported; /* the last wait report that this rank has sent, and when */
    double reported_at;
    int *status_request; /* dt_run_desc.status_request, if no supervisor reads it; else NULL */
} dt__world;

enum { DT__KEY_BYTES = 128 }; /* the size of an ncclUniqueId */

/* What replaces messages: in shared memory whole collectives (section 16), with NCCL also the data
   of large messages (dt_kernels.cu). `choose` and `begin` are never NULL. The functions of messages
   between devices are all NULL or none is. Each other function may be NULL. */
typedef struct dt__direct {
    /* returns the function that advances this call, or NULL if the call is to run as messages */
    dt__advance_fn (*choose)(dt_comm *comm, const dt__call *call);
    void (*begin)(dt_work *work); /* called when a chosen operation begins */
    /* Messages between devices. takes: called when a send or receive begins; returns 1 if the
       device moves its data. send_key: returns DT__KEY_BYTES bytes that travel with the
       announcement, or NULL if the context has failed; recv_key: gets them when the message has
       matched a receive. pulled: the receiver is ready; called in the same order on both sides.
       bulk: advances the transfer as dt_work.advance does. */
    int (*takes)(struct dt__p2p *p2p);
    const void *(*send_key)(struct dt__p2p *p2p);
    void (*recv_key)(struct dt__p2p *p2p, const void *key);
    void (*pulled)(struct dt__p2p *p2p);
    int (*bulk)(struct dt__p2p *p2p);
    /* called when a group has been split; `made` is this rank's new group, or NULL */
    void (*split)(dt_comm *comm, dt_comm *made, int color);
    void (*close)(dt_comm *comm); /* called when a group ends */
    /* called for an operation that the device has not completed; fails the context if the device
       reports an error */
    void (*check_device)(dt_work *work);
    void (*abort)(dt__world *world); /* called when the context has failed */
} dt__direct;

struct dt_comm {
    dt_group base; /* must be first: dt_tensor.h reads it */
    dt__world *world;
    dt__group *group;
    const dt__direct *direct; /* NULL if all collectives run as messages */
    uint64_t seq;             /* number of collectives called so far */
    /* Collectives in shared memory: number begun; the last one that this rank has posted; the last
       one in which it has finished its access to other ranks' memory. */
    uint64_t posts_begun, last_posted, last_moved;
    uint64_t closed_by_all; /* lower bound of the number of rounds that all ranks have closed */
    /* for each post: last round of the operation that used the post last */
    uint64_t last_round[DT_MAX_STARTED];
    char *staging; /* this rank's staging buffer (DT__WINDOWS_BYTES); NULL until needed */
    dt_algorithm algorithm;
    struct dt__nccl_channel *nccl_channel; /* NULL without NCCL */
    /* Number of ranks on each machine, if the group's rank order keeps the ranks of each machine
       together (section 17); else 0. */
    int ranks_per_node;
    int lowest, highest; /* the lowest and the highest world rank of the group */
    int tp_overlap;      /* dt_mesh_desc.tp_overlap, which dt_parallel.h sets */
    dt_axis axis;
    dt_comm *next;
    size_t bytes;        /* size of this struct with its arrays */
    const void **inputs; /* (size) inputs of a reduction */
    void **outputs;      /* (size) outputs of a reduction */
    int32_t *words;      /* (size, 2) values that dt_agree, dt_comm_split and dt_comm_step gather */
};

/* How far an operation has come. */
typedef enum dt__completion {
    DT__TRANSFERRING = 0, /* its data are being transferred */
    DT__TRANSFERRED,      /* its data have been transferred; the simulated link is still busy */
    DT__COMPLETED
} dt__completion;

/* One pending operation: a call and its progress. Comments call it a work, as PyTorch does
   (c10d::Work). */
struct dt_work {
    dt_comm *comm;
    dt__call call;
    dt__frame frame; /* describes the call */
    dt_site site;
    dt_axis axis; /* the group's axis when the operation began */
    dt__completion completion;
    dt__advance_fn advance; /* moves the data */
    /* 1 if the operation is nonblocking: the rank continues meanwhile, and may send to itself */
    int is_started;
    int is_idle;            /* 1: its wait has no timeout (dt_wait_idle) */
    uint64_t record_number; /* number of its flight recorder entry */

    /* as messages (sections 13 and 17) */
    dt__round_fn algorithm; /* NULL in a send or receive */
    int stage, round;       /* phase and round of the algorithm; section 16 uses `round` */
    int p2p_count;          /* number of sends and receives of this round */
    void *scratch;
    size_t scratch_count;
    /* the DT__CHECK work that compares all ranks' calls before this work runs, or NULL; in a
       DT__CHECK work: the work whose calls it compares, else NULL */
    dt_work *check;
    const dt_work *checked_work;

    /* in shared memory (section 16) */
    int state;     /* what the rank waits for */
    int mode;      /* how the data move */
    uint64_t post; /* number of this operation among the group's posts */
    int next_rank; /* ranks 0 .. next_rank - 1 have reached the point that `state` waits for */
    int rounds;    /* number of rounds; `round` of them are closed */
    /* the round that all ranks must have closed before this operation continues, counted over all
       operations of the group */
    uint64_t awaited_round;
    /* elements of each block that one window holds; NCCL begins the next window at element `at` */
    size_t window_count, at;

    /* Times: start; begin of dt_wait; completion, if it is traced; return to the caller; earliest
       completion that the simulated link allows. */
    double start_time, wait_time, end_time, return_time, link_until;
    int fault; /* a planted fault (section 20), applied when the operation ends */

    /* 1 if the operation is complete for the host but not for the device; 1 if a library or a
       device may still finish it */
    int on_device, in_library;
    struct dt__nccl_channel *nccl_channel; /* the nccl channel, and the number on it, from 1 */
    uint64_t nccl_sequence;

    dt_work *next, *prev; /* neighbours in the list of works that this work is in */

    /* kept when this work object is reused; must be last */
    struct dt__p2p *p2p_ops; /* (p2p_capacity) sends and receives of a round */
    int p2p_capacity;
    void *device_event; /* recorded on a device after the operation */
};

/* Properties of an operation. Each flag is 0 or 1. */
typedef struct dt__pattern {
    const char *name;
    char all_send, all_recv; /* 1 if every rank sends (receives), 0 if only the root does */
    char send_blocks;        /* 1 if send holds N blocks, block r for rank r */
    char reduces;
    char counted; /* 1 if dt_comm_bytes counts the operation's bytes */
} dt__pattern;

/* In this order: up to DT__P2P_ANNOUNCED the other rank has not taken part yet. */
typedef enum dt__p2p_state {
    DT__P2P_NEW = 0,
    DT__P2P_QUEUED,    /* a send that waits for earlier sends, or for the transport */
    DT__P2P_POSTED,    /* a receive that waits for a message */
    DT__P2P_ANNOUNCED, /* a send that waits for the receiver's answer */
    DT__P2P_ANSWERING, /* a receive whose answer the transport has not taken yet */
    DT__P2P_BULK,      /* an announced message whose data are under way */
    DT__P2P_LANDING,   /* received data that are being copied to a device */
    DT__P2P_FINISHED
} dt__p2p_state;

/* One send or receive of a point-to-point operation or of one round of a collective. */
typedef struct dt__p2p {
    dt__op_code op; /* DT__SEND or DT__RECV */
    int peer, tag;  /* peer: rank of the group, or DT_ANY; tag: below 0 in a collective */
    size_t count;
    const void *send;
    void *recv;
    dt__p2p_state state;
    dt_work *work;
    /* number of the message among all messages from its sender to its receiver, from 1; in a
       receive it is valid once the message has arrived */
    uint64_t id;
    size_t moved; /* number of bytes sent or received by DATA packets; if is_direct, 1 once NCCL has
        the message */
    /* Host memory that the transport sends from or receives into, instead of `send` or `recv`:
       memory that the receiver can read, or pinned memory. Else NULL. */
    void *copy;
    void
        *device_event; /* recorded after the copy from or to pinned memory; NULL if there is none */
    void *request;     /* the transport's push or pull */
    int is_direct;     /* 1 if comm->direct moves the data between devices */
    uint64_t pulls;    /* if is_direct: number of such messages of the two ranks before this one */
    dt__p2p_list *list; /* the list that this transfer is in, or NULL */
    struct dt__p2p *next, *prev;
} dt__p2p;

/* What the NCCL code of dt_kernels.cu calls of the other files. The two object files then share no
   other symbols than dt__nccl_begin, so this works with DT_STATIC too. struct_bytes tells whether
   both were compiled with the same headers. */
typedef struct dt__comm_functions {
    size_t struct_bytes;
    dt_status (*fail)(dt__world *world, dt_status status, const char *fmt, ...);
    dt_status (*data_failed)(dt_comm *comm, const dt__call *call, dt_status status);
    const dt__pattern *(*pattern)(dt__op_code op);
    dt_status (*run)(dt_comm *comm, dt__call call); /* a blocking operation */
    /* Calls `step` until it returns 1, or -1 because the context has failed. */
    void (*wait)(dt_comm *comm, struct dt__nccl_channel *channel, dt__advance_fn step);
    dt_status (*error)(const dt_ctx *ctx);
    void *(*alloc)(dt_ctx *ctx, dt_mem mem, size_t bytes, const char *what);
    void (*free)(dt_ctx *ctx, dt_mem mem, void *p, size_t bytes);
    void (*log)(dt_ctx *ctx, int level, const char *fmt, ...);
    const dt_kernels *(*kernels)(const dt_ctx *ctx);
    void *(*stream)(const dt_ctx *ctx);
} dt__comm_functions;

#define DT__STRUCT_BYTES \
    (sizeof(dt__shared) + sizeof(dt__world) + sizeof(dt_comm) + sizeof(dt_work) + sizeof(dt__p2p))

/* Makes NCCL run the world's collectives and messages on the device, with the program's
   communicator `given`, or one of its own if `given` is NULL. dt_kernels.cu defines it. This weak
   reference is NULL in a program that is not linked with dt_kernels.cu. */
#ifdef __cplusplus
extern "C"
#else
extern
#endif
    DT__WEAK void
    dt__nccl_begin(dt__world *world, const dt__comm_functions *functions, void *given);

#endif /* DT__COMM_STRUCTS */

#ifdef DT__COMM_CODE

/* Size in bytes of the windows (section 16) through which other ranks access memory that they
   cannot reach directly. */
#define DT_WINDOW_BYTES 262144
/* A staging buffer holds two windows and, for a pipeline, the sum of one chunk of each, which is at
   most half a window. */
#define DT__WINDOWS_BYTES (3 * DT_WINDOW_BYTES)

/* Returns the index of a world rank in this rank's shared range, or -1 if the two ranks share no
   memory. */
static int dt__local_rank_of(const dt__world *world, int rank) {
    if (!world->shared->state) return -1;
    if (world->block > 1)
        return (rank - world->rank) % world->block == 0 ? rank / world->block : -1;
    return world->node ? world->node->local_ranks[rank] : rank;
}

static dt__world *dt__world_of(const dt_ctx *ctx) {
    return ctx ? (dt__world *)dt_ctx_attached(ctx) : NULL;
}

/* Returns the time on the rank's clock; in a dry run with a virtual clock (dt_parallel.h) that is
   the predicted time. */
static double dt__time(const dt__world *world) {
    return world->clock ? *world->clock : world->host->now(world->host->user);
}

static size_t dt__align_up(size_t bytes) {
    return (bytes + DT__CACHE_LINE - 1) / DT__CACHE_LINE * DT__CACHE_LINE;
}

/* Returns 1 if the other ranks can access this address. */
static int dt__reachable(const dt__shared *shared, const void *p) {
    const char *base = (const char *)shared;
    return !shared->separate_memory ||
           ((const char *)p >= base && (const char *)p < base + shared->bytes - DT__CACHE_LINE);
}

static dt__post *dt__post_of(const dt_work *work, int rank) {
    const dt__group *group = work->comm->group;
    size_t at = (size_t)rank * DT_MAX_STARTED + (size_t)(work->post % DT_MAX_STARTED);
    return (dt__post *)(void *)(group->posts + at * group->post_bytes);
}

static char *dt__post_data(dt__post *post) { return (char *)post + offsetof(dt__post, data); }

/* Copies the beginning of a string that may be longer than `to`; pads with zeros. */
static void dt__copy_name(char *to, size_t bytes, const char *from) {
    size_t length = from ? strlen(from) : 0;
    memset(to, 0, bytes);
    if (from) memcpy(to, from, length < bytes ? length : bytes - 1);
}

/* Allocates from an arena in the range. Returns NULL if the arena is full. Any rank may call it at
   any time. */
static char *dt__range_alloc(char *arena, size_t arena_bytes, size_t *used, size_t bytes) {
    if (__atomic_load_n(used, __ATOMIC_RELAXED) > arena_bytes) return NULL;
    size_t at = __atomic_fetch_add(used, bytes, __ATOMIC_RELAXED);
    return at > arena_bytes || bytes > arena_bytes - at ? NULL : arena + at;
}

// ==== 9. The first failure ======================================================================

/* Failure detection and propagation. One record (first_failure of dt__shared) holds the first
   failure of the run. The rank that claims the record (compare and exchange) fills it and sets the
   abort word `aborted`, which is never cleared. Wait loops read the abort word in every iteration,
   and calls read it when they begin. A failure that this header finds takes this way:

       dt__comm_fail       claims the record, and after dt_fail waits for the ranks that still
         |                 access other ranks' memory
       dt_fail             marks the context as failed and calls its listener       (dt_tensor.h)
         |
       dt__on_failure      claims the record, unless dt__comm_fail has; tells the ranks that share
         |                 no memory with this one
       dt__publish_failure fills the record and sets the abort word

   A rank that leaves a collective with an error returns the buffers to its caller, who may free
   them. So the rank must not leave while another rank still copies from or to the buffers, and no
   rank may start a copy after that. Each rank therefore sets its `busy` flag around every access to
   other ranks' memory. This is Dekker's handshake (E. W. Dijkstra, EWD123, 1965):

       copier:  busy = 1;  if (aborted) { busy = 0; leave; }  copy;  busy = 0
       leaver:  set or read aborted = 1;  wait until no rank is busy;  leave

   All four accesses are sequentially consistent, so either the copier sees the abort word or the
   leaver sees the busy flag. Two waits have no timeout with threads and procs: for the busy
   flags and for the record of the failure. Both end: a rank with busy = 1, and a rank that fills
   the record, wait for no other rank, and the supervisor clears the flag and the claim of a process
   that died. MPI ranks on one machine have no supervisor, so they wait at most timeout_s. */

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
    shared->first_failure.status = status;
    shared->first_failure.rank = rank;
    dt__copy_name(shared->first_failure.text, sizeof shared->first_failure.text, text);
    __atomic_store_n(&shared->aborted, 1, __ATOMIC_SEQ_CST);
}

/* section 14 */
static void dt__send_aborts(dt__world *world, int failed, dt_status status, const char *text);

/* A function of dt's listener, which dt_tensor.h calls at the first failure of a context. Several
   ranks may notice the same failure, for example a norm that is not finite. Only the rank that
   claims the record logs the failure: dt__on_failure returns 0 on that rank and 1 on the others. */
static int dt__on_failure(dt_ctx *ctx, dt_status status, const char *text, void *user) {
    dt__world *world = (dt__world *)user;
    (void)ctx;
    int first = world->owns_first_failure || dt__claim(world->shared, world->rank);
    if (first) dt__publish_failure(world->shared, world->rank, status, text);
    if (first && world->transport.send) dt__send_aborts(world, world->rank, status, text);
    if (world->comm && world->comm->direct && world->comm->direct->abort)
        world->comm->direct->abort(world);
    return !first;
}

/* ---- a timeout clock ---- */

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

/* ---- leaving after a failure ---- */

/* Naps between two checks of the wait loops below. Returns 1 if the loop should continue. Returns
   0 after the timeout if ranks of a transport share memory, because they have no supervisor and the
   awaited rank must have died. */
static int dt__nap_after_failure(const dt__world *world, dt__stopwatch *watch) {
    if (!watch->host) *watch = dt__stopwatch_start(world->host, world->shared->timeout_s);
    world->host->sleep(world->host->user, 0);
    return dt__waited(watch) < world->shared->timeout_s || !world->node;
}

/* Waits until the rank that claimed the failure record has filled it. */
static void dt__await_failure_record(const dt__world *world) {
    dt__stopwatch watch = { NULL, 0, 0, 0 };
    while (!dt__aborted(world->shared) && dt__nap_after_failure(world, &watch)) {
    }
}

/* Waits, after this context has failed, until no rank accesses other ranks' memory any more. */
static void dt__await_access_end(const dt__world *world) {
    dt__stopwatch watch = { NULL, 0, 0, 0 };
    dt__await_failure_record(world);
    for (int i = 0; world->shared->state && i < world->shared->ranks; i++) {
        const int *busy = &world->shared->state[i].busy;
        while (__atomic_load_n(busy, __ATOMIC_SEQ_CST) && dt__nap_after_failure(world, &watch)) {
        }
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

/* Fails this context with the text of the rank that failed first. Waits until no rank accesses
   other ranks' memory any more, then returns the context's status. */
static dt_status dt__peer_failed(dt__world *world) {
    dt__await_failure_record(world);
    dt_status status = dt_fail(
        world->ctx, DT_ERR_PEER, "peer failed first: %s", world->shared->first_failure.text);
    dt__await_access_end(world);
    return status;
}

/* Names the block whose backward or recompute is running: the call site is only the line of
   dt_backward. Returns "" outside of a block's backward. */
static dt__text dt__backward_text(const dt_ctx *ctx) {
    const dt_block_state *b = ctx->entered_block;
    if (!b || !b->index || !ctx->root->backward_done) return dt__format("%s", "");
    return dt__format("; rank %d is in the %s of block %d", ctx->rank,
        ctx->recomputing ? "recompute" : "backward", b->index);
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
        dt_fail(world->ctx, status, "%s%s", text, dt__backward_text(world->ctx).s);
    }
    dt__await_access_end(world);
    return dt_error(world->ctx);
}

// ==== 10. Calls: validation and description =====================================================

/* All collectives have one form. Some ranks send and some receive, a send buffer may hold one block
   for each rank, and the received data may be reduced. So a call (dt__call) and the operation's row
   in one table (dt__pattern) suffice to validate an operation, to describe it in texts and frames,
   to compare it between ranks and to count its bytes. */

/* Returns the work that error texts name. For a DT__CHECK work, this is the work whose calls it
   compares; for any other, the work itself. */
static const dt_work *dt__reported_work(const dt_work *work) {
    return work->checked_work ? work->checked_work : work;
}

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

static int dt__gathered_bucket(const dt__call *call) { return (int)((call->gather_id - 1) / 4); }

static int dt__gather_phase_of(const dt__call *call) { return (int)((call->gather_id - 1) % 4); }

/* Returns " of bucket 3 for the forward" for a gather of ZeRO-3; "" for another call. */
static dt__text dt__gather_text(const dt__call *call) {
    static const char *const phases[] = { "the forward", "the backward",
        "the weight half of the backward", "dt_read or dt_write" }; /* rows: dt__gather_phase */
    if (!call->gather_id) return dt__format("%s", "");
    return dt__format(
        " of bucket %d for %s", dt__gathered_bucket(call), phases[dt__gather_phase_of(call)]);
}

/* Describes a call in an error text, for example "all-reduce f32 x 10 sum" or "barrier". */
static dt__text dt__call_text(const dt__call *call) {
    static const char *const reductions[] = { "sum", "avg", "max", "min", "prod" };
    const dt__pattern *pattern = dt__pattern_of(call->op);
    dt__text text = dt__format("%s", pattern->name);
    if (call->op == DT__SUM_DOUBLES) dt__put(&text, " x %zu", call->count);
    if (!pattern->counted && call->op != DT__RECV) return text;
    dt__put(&text, " %s", dt_dtype_name(call->dtype));
    if (call->op != DT__ALL_TO_ALL_V) dt__put(&text, " x %zu", call->count);
    if (pattern->reduces)
        dt__put(&text, " %s", (unsigned)call->redop <= DT_PROD ? reductions[call->redop] : "?");
    if (call->host_memory) dt__put(&text, " in host memory");
    if (dt__is_rooted(call->op)) dt__put(&text, " root %d", call->peer);
    dt__put(&text, "%s", dt__gather_text(call).s);
    return text;
}

/* Packs the arguments of a collective that must be equal on all ranks, except the count, into one
   word. dt__unpack_call restores the arguments for error texts; the word may come from another
   process. An all-gather has no root (peer is 0), so gather_id uses the root's bits. */
static uint64_t dt__pack_call(const dt__call *call) {
    return (uint64_t)call->op | (uint64_t)call->dtype << 8 | (uint64_t)call->redop << 16 |
           (uint64_t)(call->host_memory != 0) << 24 |
           (uint64_t)((uint32_t)call->peer | call->gather_id) << 32;
}

static dt__call dt__unpack_call(uint64_t word, size_t count) {
    int op = (int)(word & 255);
    dt__call call = dt__call_make(op < DT__OP_CODES ? (dt__op_code)op : DT__BARRIER, NULL, NULL,
        count, (dt_dtype)(word >> 8 & 255));
    call.redop = (dt_op)(word >> 16 & 255);
    call.host_memory = (int)(word >> 24 & 1);
    if (call.op == DT__ALL_GATHER)
        call.gather_id = (uint32_t)(word >> 32);
    else
        call.peer = (int)(uint32_t)(word >> 32);
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
    dt_reduce_args args = { .dtype = call->dtype,
        .out = comm->outputs[0],
        .in = comm->inputs,
        .n = input_count,
        .count = count,
        .op = call->redop,
        .copies = comm->outputs + 1,
        .n_copies = output_count - 1,
        .non_temporal = streaming };
    if (count == 0) return DT_OK;
    if (call->host_memory) return dt_kernels_cpu()->reduce(&args, NULL);
    return kernels->reduce ? kernels->reduce(&args, dt_ctx_stream(comm->world->ctx))
                           : DT_ERR_UNSUPPORTED;
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
    size_t n = (size_t)comm->base.size, bytes = dt__call_bytes(call);
    int root = comm->base.rank == call->peer;
    /* scalars, and calls with buffers in host memory, are not counted */
    if (call->host_memory || !dt__pattern_of(call->op)->counted) return 0;
    switch (call->op) {
    case DT__ALL_REDUCE: return 2 * bytes - (2 * bytes + n - 1) / n;
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

static int dt__has_valid_peer(const dt_comm *comm, const dt__call *call) {
    return call->any_source || (unsigned)call->peer < (unsigned)comm->base.size;
}

/* Checks the arguments of this rank's call, without a comparison with the calls of other ranks.
   Returns an error text, or NULL if they are valid. */
static const char *dt__argument_error(const dt_comm *comm, const dt__call *call) {
    size_t max_count = (size_t)-1 / 2 / (dt_dtype_size(call->dtype) * (size_t)comm->base.size);
    int is_p2p = dt__is_p2p(call->op);
    if ((unsigned)call->redop > (unsigned)DT_PROD) return "unknown reduction";
    if (call->count > max_count) return "count too large";
    if (!dt__has_valid_peer(comm, call)) return is_p2p ? "no such rank" : "no such root";
    if (is_p2p && call->tag < 0 && !call->host_memory) return "the tag is negative";
    if (!call->host_memory && call->send && call->recv &&
        dt__beyond_kernels(comm, call->send) != dt__beyond_kernels(comm, call->recv))
        return "one of its buffers is in the device's memory and the other in the host's";
    if (call->op == DT__ALL_TO_ALL_V) {
        if (!call->send_counts || !call->recv_counts) return "counts are NULL";
        for (int i = 0; i < comm->base.size; i++)
            if (call->send_counts[i] > max_count || call->recv_counts[i] > max_count)
                return "count too large";
    }
    if (!call->send && dt__sends(comm, call) && dt__send_count(comm, call)) return "send is NULL";
    if (!call->recv && dt__receives(comm, call) && dt__recv_count(comm, call))
        return "recv is NULL";
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

// ==== 11. Operation records =====================================================================

/* Flight recorder, like PyTorch's for NCCL. Each rank publishes records of the operations that it
   has begun, the rank that it waits for, and a progress counter: in shared memory, and to other
   ranks in wait reports (section 19). Other ranks read them to explain a long wait and to prove
   that a wait will never end.

   Deadlock detection. A rank advances when it takes a packet or a step of an operation; it then
   increments its progress counter. A rank that waits

       1. computes P, the sum of all ranks' progress counters as far as it knows them
       2. takes packets, and tries to advance all of its pending operations
       3. if it has not advanced, publishes P as its idle_at_progress
       4. reads the idle_at_progress of all ranks, and then computes the sum again

   If all ranks have published the same P and the sum is still P, no rank will ever advance. This
   proves a deadlock at once, without a timeout. A rank that may advance by itself, for example when
   a device is ready (dt__is_busy), does not publish P. A rank that has ended counts as one that has
   published P.

   The proof needs two rules. First, a rank makes a change that another rank may wait for, and then
   increments its counter. So a rank whose sum includes the increment can also see the change: in
   shared memory because of the memory order, over a transport because a report never overtakes the
   packets sent before it. Second, a rank does not change its counter between steps 1 and 3. In
   shared memory it stores the counter before it publishes P; a report contains both. So the sum of
   step 4 includes every increment that a rank made before it published P.

   Proof. Suppose that some rank advances after it has published P, and let R be the first. R could
   not advance in step 2, so it needed a change that its sum lacks. The rank that made the change
   made it before it published P, because R is the first to advance after that. So the sum of step 4
   includes the increment for the change, and R's sum does not. Both sums are P, so R's sum includes
   an increment of some rank S that the sum of step 4 lacks. S made this increment after it had
   published P, so S advanced before R: a contradiction. */

static void dt__count_progress(dt__world *world) {
    __atomic_store_n(&world->state->progress, world->state->progress + 1, __ATOMIC_RELEASE);
}

#define DT__IDLE_FOREVER (~(uint64_t)0) /* idle_at_progress of a rank that has ended */

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

/* Makes the frame that describes the call of this work. */
static void dt__describe(dt_work *work) {
    dt__frame *frame = &work->frame;
    frame->channel = work->comm->group->channel;
    frame->packed_call = dt__pack_call(&work->call);
    frame->seq = work->call.seq;
    frame->count = work->call.count;
    frame->tag = work->call.tag;
    frame->line = work->site.line;
    dt__copy_name(frame->file, sizeof frame->file, work->site.file);
}

/* Assigns the operation its number and writes its flight recorder entry. */
static void dt__record_make(dt_work *work) {
    dt__world *world = work->comm->world;
    uint64_t number = (uint64_t)world->state->op_count + 1;
    dt__op_record *slot = &world->records[number % DT_RECORDS];
    if (!DT__UNCHECKED) {
        __atomic_store_n(&slot->number, 0, __ATOMIC_RELEASE);
        dt__atomic_store_words(&slot->call, &work->frame, sizeof slot->call);
        dt__atomic_store_words(slot->group, work->comm->group->name, sizeof slot->group);
        __atomic_store_n(&slot->number, number, __ATOMIC_RELEASE);
    }
    __atomic_store_n(&world->state->op_count, (int64_t)number, __ATOMIC_RELEASE);
    work->record_number = number;
    dt__count_progress(world);
}

/* What this rank knows about one rank of the world: the state and `n` records of a rank that shares
   memory with it, or the last wait report of another rank. */
typedef struct dt__rank_view {
    const dt__rank_state *state; /* NULL if the state is not known */
    const dt__op_record *records;
    int n;
} dt__rank_view;

static dt__rank_view dt__view_of_local_rank(const dt__shared *shared, int local_rank) {
    dt__rank_view view = { &shared->state[local_rank],
        shared->records + (size_t)local_rank * DT_RECORDS, DT_RECORDS };
    return view;
}

static dt__rank_view dt__view_of_rank(const dt__world *world, int rank) {
    dt__rank_view view = { NULL, NULL, 1 };
    if (rank == DT_ANY) return view;
    int local_rank = dt__local_rank_of(world, rank);
    if (local_rank >= 0) return dt__view_of_local_rank(world->shared, local_rank);
    if (rank == world->rank) {
        view.state = world->state;
        view.records = world->records;
        view.n = DT_RECORDS;
    } else if (world->peers && world->peers[rank]) {
        view.state = &world->peers[rank]->report.state;
        view.records = &world->peers[rank]->report.record;
    }
    return view;
}

/* Returns the view with a copy of the state instead of the state itself, which its rank changes. */
static dt__rank_view dt__snapshot(dt__rank_view view, dt__rank_state *copy) {
    if (view.state) dt__atomic_load_words(copy, view.state, sizeof *copy);
    if (view.state) view.state = copy;
    return view;
}

/* Copies record `number` and returns 1. Returns 0 if the record does not exist or has been
   overwritten. */
static int dt__record_get(dt__rank_view view, uint64_t number, dt__op_record *copy) {
    if (!view.records || number == 0) return 0;
    const dt__op_record *slot = &view.records[number % (uint64_t)view.n];
    if (__atomic_load_n(&slot->number, __ATOMIC_ACQUIRE) != number) return 0;
    dt__atomic_load_words(copy, slot, sizeof *copy);
    return __atomic_load_n(&slot->number, __ATOMIC_RELAXED) == number && copy->number == number;
}

/* As dt__site_text. The file's name may come from another process and lack its end. */
static dt__text dt__frame_site(const dt__frame *frame) {
    char file[DT__FILE_BYTES];
    snprintf(file, sizeof file, "%.*s", DT__FILE_BYTES - 1, frame->file);
    return dt__site_text(file, frame->line);
}

static dt__text dt__own_site(const dt_work *work) {
    return dt__site_text(dt__reported_work(work)->site.file, dt__reported_work(work)->site.line);
}

/* Describes an operation, for example "all-reduce f32 x 10 sum #4 on world at train.c:88" or
   "receive f32 x 10 from rank 2 with tag 1 on world at ...". whose: "its " if the peer is a rank of
   the group, "" if it is a world rank. */
static dt__text dt__operation_text(
    const dt__call *call, const char *whose, const char *group, const char *file, int line) {
    dt__text text = dt__call_text(call);
    if (!dt__is_p2p(call->op))
        dt__put(&text, " #%llu", (unsigned long long)call->seq);
    else if (call->peer == DT_ANY)
        dt__put(&text, " from any rank with tag %d", call->tag);
    else
        dt__put(&text, " %s %srank %d with tag %d", call->op == DT__SEND ? "to" : "from", whose,
            call->peer, call->tag);
    dt__put(&text, " on %.31s%s", group, dt__site_text(file, line).s);
    return text;
}

static dt__text dt__record_text(const dt__op_record *r) {
    dt__call call = dt__unpack_call(r->call.packed_call, (size_t)r->call.count);
    call.seq = r->call.seq;
    call.tag = r->call.tag;
    dt__text text = dt__operation_text(&call, "its ", r->group, r->call.file, (int)r->call.line);
    dt__escape(text.s, sizeof text.s);
    return text;
}

dt_comm *dt_here(dt_comm *comm, const char *file, int line) {
    if (comm) dt_ctx_here(comm->world->ctx, file, line);
    return comm;
}

/* Returns "; bucket 3 holds layer1.wq and 5 more" for a gather of ZeRO-3; "" for another call. */
static dt__text dt__bucket_text(const dt_comm *comm, const dt__call *call) {
    const dt_bucket *u =
        call->gather_id ? dt_bucket_get(comm->world->ctx, dt__gathered_bucket(call)) : NULL;
    if (!u) return dt__format("%s", "");
    const char *first = dt_param_get(comm->world->ctx, u->first_param)->name;
    dt__text text = dt__format("; bucket %d holds %.60s", u->index, first);
    if (u->n_params > 1) dt__put(&text, " and %d more", u->n_params - 1);
    return text;
}

static int dt__is_outside_ops(const dt__call *call) {
    return call->gather_id && dt__gather_phase_of(call) == DT__OUTSIDE_OPS;
}

#define DT__OUTSIDE_OPS_HINT \
    "; at ZeRO-3 dt_read and dt_write of a parameter are collective: call them on every rank"

/* Fails the context, because rank world_rank has ended and will never call the collective in which
   this rank waits. Over a transport several ranks may notice this at the same time. In that case
   the text does not name this rank, but the first rank of the group that is not world_rank, so that
   all ranks report the same text. */
static dt_status dt__ended_without(dt_work *work, int world_rank) {
    const dt_comm *comm = work->comm;
    int first = comm->group->ranks[comm->group->ranks[0] == world_rank ? 1 : 0];
    const dt__call *call = &dt__reported_work(work)->call;
    dt__text who =
        comm->group->members
            ? dt__format("in which rank %d waits", comm->world->rank)
            : dt__format("which rank %d and all other ranks of the group must call", first);
    return dt__comm_fail(comm->world, DT_ERR_COMM,
        "rank %d ended without calling %s%s #%llu on %s, %s%s%s%s", world_rank,
        dt__pattern_of(call->op)->name, dt__gather_text(call).s, (unsigned long long)call->seq,
        comm->group->name, who.s, dt__own_site(work).s, dt__bucket_text(comm, call).s,
        dt__is_outside_ops(call) ? DT__OUTSIDE_OPS_HINT
                                 : "; check that all ranks run the same steps");
}

/* Fails the context because two ranks of the group make different calls. */
static dt_status dt__calls_differ(
    const dt_comm *comm, int rank, const dt__frame *its, int other, const dt__frame *theirs) {
    dt__call one = dt__unpack_call(its->packed_call, (size_t)its->count);
    dt__call two = dt__unpack_call(theirs->packed_call, (size_t)theirs->count);
    int is_same_bucket = one.gather_id && dt__gathered_bucket(&one) == dt__gathered_bucket(&two);
    return dt__comm_fail(comm->world, DT_ERR_COMM,
        "rank %d calls %s%s, rank %d calls %s%s (operation %llu on %s)%s%s%s",
        comm->group->ranks[rank], dt__call_text(&one).s, dt__frame_site(its).s,
        comm->group->ranks[other], dt__call_text(&two).s, dt__frame_site(theirs).s,
        (unsigned long long)theirs->seq, comm->group->name,
        dt__is_outside_ops(&one) || dt__is_outside_ops(&two) ? DT__OUTSIDE_OPS_HINT : "",
        dt__bucket_text(comm, &one).s, is_same_bucket ? "" : dt__bucket_text(comm, &two).s);
}

/* Returns 1 if two frames describe the same call of a collective. */
static int dt__same_call(const dt__frame *one, const dt__frame *other) {
    return one->packed_call == other->packed_call && one->count == other->count;
}

/* Compares the calls of all ranks with rank 0's before any rank completes the operation. call_of
   returns the call that a rank has published for it: in shared memory in its post, over a transport
   in a comparison (section 18). All ranks see the same calls, so if calls differ, they report the
   same two. Returns 1, or -1 if calls differ. */
static int dt__compare_calls(
    dt_work *work, const dt__frame *(*call_of)(const dt_work *work, int rank)) {
    const dt__frame *first = call_of(work, 0);
    for (int rank = 1; rank < work->comm->base.size; rank++) {
        const dt__frame *other = call_of(work, rank);
        if (!dt__same_call(other, first))
            return dt__calls_differ(work->comm, rank, other, 0, first), -1;
    }
    return 1;
}

// ==== 12. Progress engine =======================================================================

/* All waits for an operation go through dt__wait_until_finished. Each iteration of a wait advances
   every operation that this rank has pending. Then the waiting thread backs off:

       spin     for about 2 us, because the other rank may be about to arrive, and a system call
                would take longer than the wait
       yield    for about 100 us, so that other threads run
       nap      for 1/16 of the time waited so far, but at least 20 us and at most 1 ms, so that
                the rank wakes up only a little too late

   If there are more ranks than cores, waits do not spin, because a spinning rank could keep the
   awaited rank from running. When data have moved, the back-off starts again from its first phase,
   because each step of a long operation is a separate wait.

       dt__wait_until_finished       one wait
         dt__advance_all, _some      all incomplete nonblocking operations, one after another
         dt__advance                 one operation, by the outermost call table (section 20)
           dt__work_advance          by the innermost call table
             work->advance           dt__shared_collective (16), dt__rounds_advance (17), or NCCL's
               dt__p2p_advance       one send or receive of a round (14) */

/* turns of the first two phases: about 2 us and about 100 us */
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

/* Returns 1 if a rank of the world will send nothing more. */
static int dt__has_ended(const dt__world *world, int rank) {
    const dt__rank_state *state = dt__view_of_rank(world, rank).state;
    return state && __atomic_load_n(&state->ended, __ATOMIC_ACQUIRE);
}

/* section 14 */
static void dt__poll(dt__world *world, int rank);
/* section 18 */
static int dt__check_advance(dt_work *work);
/* section 19 */
static int dt__first_not_begun(const dt_work *work);
static void dt__check_connections(dt__world *world, const dt_work *work);
static dt_status dt__report_timeout(dt_work *work);
static int dt__detect_deadlock(dt_work *work, uint64_t progress_sum, double since);
static uint64_t dt__progress_sum(const dt__world *world);
static void dt__log_all_ranks(dt__world *world);
static void dt__receive_wait_report(dt__world *world, int rank, const dt__wait_report *report);
static int dt__send_wait_report(dt__world *world, const dt_work *work);

/* Called in each wait iteration and for each operation that begins. Every DT__POLL_INTERVAL-th call
   looks for packets of ranks that share no memory with this one: a failure may be among them, even
   if no operation of this rank waits for a packet. */
enum { DT__POLL_INTERVAL = 16 };
static void dt__poll_transport(dt__world *world) {
    if (world->transport.recv && ++world->poll_count % DT__POLL_INTERVAL == 0)
        dt__poll(world, DT_ANY);
}

static int dt__advance(dt_work *work) { return work->comm->world->calls->advance(work); }

/* Advances a work; the `advance` of the innermost call table. */
static int dt__work_advance(dt_work *work) {
    if (work->completion == DT__COMPLETED) return 1;
    int moved = work->check ? dt__check_advance(work) : 1;
    if (moved > 0) moved = work->advance(work);
    if (moved <= 0) return moved;
    dt__count_progress(work->comm->world);
    work->completion = DT__COMPLETED;
    return 1;
}

static void dt__list_append(dt__work_list *list, dt_work *work) {
    work->prev = list->last;
    work->next = NULL;
    *(work->prev ? &work->prev->next : &list->first) = work;
    list->last = work;
    list->count++;
}

static void dt__list_remove(dt__work_list *list, dt_work *work) {
    *(work->prev ? &work->prev->next : &list->first) = work->next;
    *(work->next ? &work->next->prev : &list->last) = work->prev;
    list->count--;
}

/* Advances all incomplete nonblocking operations, in the order of their starts. */
static void dt__advance_all(dt__world *world) {
    for (dt_work *work = world->first_unfinished; work; work = work->next)
        if (work->completion != DT__COMPLETED && dt__advance(work) < 0) return;
    while (world->first_unfinished && world->first_unfinished->completion == DT__COMPLETED)
        world->first_unfinished = world->first_unfinished->next;
}

/* Calls dt__advance_all in some of its calls, for callers that do not wait and may call it at every
   nonblocking start. Every call adds DT__ADVANCE_CREDIT to a credit, and all works advance once the
   credit has reached the number of works. So n nonblocking operations cost O(n), not O(n^2).
   Returns 1 if all works have advanced, else 0. */
enum { DT__ADVANCE_CREDIT = 16 };
static int dt__advance_some(dt__world *world) {
    world->pass++;
    world->advance_credit += DT__ADVANCE_CREDIT;
    if (world->advance_credit < world->started.count) return 0;
    world->advance_credit = 0;
    dt__advance_all(world);
    return 1;
}

/* Waits until `work` is complete. Returns the context's status. If work->start_time is negative
   when the wait leaves its spin phase, sets it to the time of that moment. */
static dt_status dt__wait_until_finished(dt__world *world, dt_work *work) {
    enum { SPIN, YIELD, NAP };
    const dt_host *host = world->host;
    const int spins = world->shared->spins;
    double since = 0, timeout = world->shared->timeout_s;
    dt__stopwatch watch = { NULL, 0, 0, 0 };
    uint64_t last_progress = world->state->progress, progress_sum = 0;
    for (int64_t turn = 0;; turn++) {
        int phase = turn < spins ? SPIN : turn < spins + DT__YIELDS ? YIELD : NAP;
        world->pass++;
        /* first, because the proof of a deadlock requires that this rank then tries to advance */
        if (phase == NAP) progress_sum = dt__progress_sum(world);
        if (phase != SPIN) world->poll_count = DT__POLL_INTERVAL - 1; /* poll in every turn */
        dt__poll_transport(world);
        if (phase == NAP)
            dt__advance_all(world);
        else if (world->first_unfinished)
            dt__advance_some(world);
        int done = dt_error(world->ctx) ? -1 : dt__advance(work);
        if (done > 0) return DT_OK;
        if (done < 0) return dt_error(world->ctx);
        if (world->clock && work->completion == DT__TRANSFERRED) { /* the wait takes this long */
            *world->clock = fmax(*world->clock, work->link_until);
            continue;
        }
        /* a peer may have failed after it had completed this operation: then all parts are here */
        if (dt__aborted(world->shared))
            return dt__advance(work) > 0 ? DT_OK : dt__peer_failed(world);
        if (last_progress != world->state->progress) {
            last_progress = world->state->progress;
            turn = 0; /* data have moved: the back-off starts again */
            phase = spins > 0 ? SPIN : YIELD;
        }
        if (phase == SPIN) {
            dt__pause();
            continue;
        }
        if (turn == spins) {
            watch = dt__stopwatch_start(host, timeout);
            since = world->clock ? watch.last : fmax(watch.last, work->link_until);
            /* below 0 while the simulated link is busy, so that this time does not count towards
               the timeout */
            watch.seconds = watch.last - since;
        }
        double waited = dt__waited(&watch), now = watch.last;
        if (phase == NAP) dt__check_connections(world, work);
        if (work->start_time < 0) work->start_time = dt__time(world);
        if (waited > timeout && !work->is_idle)
            return dt__advance(work) > 0 ? DT_OK : dt__report_timeout(work);
        if (phase == NAP && dt__detect_deadlock(work, progress_sum, since))
            return dt_error(world->ctx);
        double link_left = world->clock ? 0 : work->link_until - now;
        double nap = phase == NAP ? fmax(waited / 16, DT__NAP_MIN) : 0; /* 0 yields */
        host->sleep(host->user, fmin(link_left > 0 ? link_left : nap, DT__NAP_MAX));
    }
}

static dt_status dt__wait_work(dt__world *world, dt_work *work) {
    dt_status status = dt__wait_until_finished(world, work);
    if (world->state->waiting_op) __atomic_store_n(&world->state->waiting_op, 0, __ATOMIC_SEQ_CST);
    if (world->reported.waiting_op && status == DT_OK) dt__send_wait_report(world, NULL);
    return status;
}

// ==== 13. Messages: one send or receive =========================================================

/* Point-to-point messages: matching, and the eager and rendezvous protocols of every MPI, written
   once for all transports.

       eager        sender      EAGER packet with the data -->            the send is complete
       (small)                                              receiver      copies the data

       rendezvous   sender      ANNOUNCE packet -->
       (large)                                              <-- PULL      a receive has matched it
                                data -->                                  the transport's bulk data,
                                                                          or DATA packets
                    in shared memory the receiver reads the announced address itself:
                                                            <-- DONE

   A message matches the oldest posted receive with its group, tag and sender. Messages without a
   receive, and receives without a message, wait in two lists in the order of their arrival. When a
   message matches a receive, its frame is compared with the receive's call: this finds different
   calls of the two ranks, and lengths that differ from what was posted.

   Credits bound the memory that unexpected messages take. An eager message waits as a copy, so a
   rank may send only DT__EAGER_CREDITS of them to another rank before the receiver matches some;
   every frame tells how many. Without a credit a small message is announced like a large one. An
   announcement has no data, and its answer is the credit for the next: beyond DT__ANNOUNCE_CREDITS
   of them sends wait in order at their sender. The receiver keeps nothing for which there was no
   credit: it fails and names the sender. */

typedef enum dt__frame_kind {
    DT__EAGER = 1,
    DT__ANNOUNCE,
    DT__ANNOUNCE_DIRECT, /* of a message between devices; the key of comm->direct follows */
    DT__PULL,            /* answers an announcement: the receiver is ready */
    DT__DATA,            /* a piece of an announced message; `address` is its offset */
    DT__DONE,            /* answers an announcement: the receiver has read the message */
    DT__CREDIT,          /* tells only `credits` */
    DT__REPORT,          /* a wait report follows (section 19) */
    DT__ABORT /* the sender has failed: `tag` is the failed rank, `count` its status; a text */
} dt__frame_kind;

/* A message that has arrived before its receive was posted. Its body follows: the data of an eager
   message, or the key of an announcement between devices. */
typedef struct dt__arrival {
    int from;          /* world rank */
    double link_until; /* dt__world.message_until */
    dt__frame frame;
    struct dt__arrival *next;
} dt__arrival;

static size_t dt__arrival_bytes(int is_eager) {
    return sizeof(dt__arrival) + (is_eager ? (size_t)DT_EAGER_BYTES : (size_t)DT__KEY_BYTES);
}

static size_t dt__p2p_bytes(const dt__p2p *p2p) {
    return p2p->count * dt_dtype_size(p2p->work->call.dtype);
}

/* ---- texts ---- */

/* Returns a description of the transfer for an error text. If the transfer is part of a collective,
   the text describes the collective. */
static dt__text dt__p2p_text(const dt__p2p *p2p) {
    const dt_work *work = dt__reported_work(p2p->work);
    const dt__group *group = work->comm->group;
    dt__call call = work->call;
    if (dt__is_p2p(call.op)) call.host_memory = 0; /* it need not be so at the other rank */
    if (dt__is_p2p(call.op) && p2p->peer != DT_ANY) call.peer = group->ranks[p2p->peer];
    return dt__operation_text(&call, "", group->name, work->site.file, work->site.line);
}

/* Fails the context because the peer has ended and no rank will ever call the matching send or
   receive. Returns -1. */
static int dt__p2p_never_matched(dt__p2p *p2p) {
    dt__world *world = p2p->work->comm->world;
    dt__text text = dt__p2p_text(p2p);
    int other = p2p->peer == DT_ANY ? -1 : p2p->work->comm->group->ranks[p2p->peer];
    if (p2p->tag < 0)
        dt__ended_without(p2p->work, other);
    else if (other == world->rank)
        dt__comm_fail(
            world, DT_ERR_COMM, "%s: a rank that waits for itself waits for ever", text.s);
    else
        dt__comm_fail(world, DT_ERR_COMM,
            "%s ended without the %s: %s; check that all ranks run the same steps",
            other < 0 ? "all other ranks" : dt__format("rank %d", other).s,
            p2p->op == DT__SEND ? "receive that this send needs" : "send that this receive needs",
            text.s);
    return -1;
}

/* Returns the tag of a collective's messages: it is negative, and differs between the collectives
   that may be under way at the same time, and between a collective and its comparison. All rounds
   share it, because messages between two ranks match in the order of their sends. */
static int dt__collective_tag(const dt_work *work) {
    return -1 - (int)(2 * (work->call.seq % 0x80000) + (work->call.op == DT__CHECK));
}

static dt_status dt__counts_differ(
    dt_work *work, int from, size_t sent, int to, size_t expected, const char *site) {
    const dt_comm *comm = work->comm;
    return dt__comm_fail(comm->world, DT_ERR_COMM,
        "rank %d sends %zu to rank %d, which expects %zu (%s #%llu on %s%s)",
        comm->group->ranks[from], sent, comm->group->ranks[to], expected,
        dt__pattern_of(dt__reported_work(work)->call.op)->name,
        (unsigned long long)dt__reported_work(work)->call.seq, comm->group->name, site);
}

/* Compares a message with the receive that it has matched. Returns 1 if both belong to the same
   call; else fails the context and returns -1. */
static int dt__p2p_check(dt__p2p *p2p, int from, const dt__frame *frame) {
    dt_work *work = p2p->work;
    const dt_comm *comm = work->comm;
    size_t size = dt_dtype_size(work->call.dtype);
    const dt__frame *own = &dt__reported_work(work)->frame;
    dt__call its = dt__unpack_call(frame->packed_call, (size_t)frame->count);
    if (dt__is_p2p(work->call.op) &&
        (its.dtype != work->call.dtype || frame->count != p2p->count)) {
        dt__comm_fail(comm->world, DT_ERR_COMM,
            "rank %d sends %s x %zu%s, rank %d receives %s x %zu%s (tag %d on %s); count and type "
            "must be equal",
            comm->group->ranks[from], dt_dtype_name(its.dtype), its.count, dt__frame_site(frame).s,
            comm->world->rank, dt_dtype_name(work->call.dtype), p2p->count, dt__own_site(work).s,
            p2p->tag, comm->group->name);
    } else if (!dt__is_p2p(work->call.op) && work->call.op != DT__CHECK &&
               !dt__same_call(frame, own)) {
        dt__calls_differ(comm, from, frame, comm->base.rank, own);
    } else if (frame->bytes != p2p->count * size) {
        dt__counts_differ(work, from, (size_t)frame->bytes / size, comm->base.rank, p2p->count,
            dt__own_site(work).s);
    } else {
        return 1;
    }
    return -1;
}

/* ---- peers, lists, memory ---- */

/* Allocates memory for DT__ARRIVALS more messages without a receive, eager ones or announcements.
   Returns 0 on failure. */
enum { DT__ARRIVALS = 16 };
static int dt__arrivals_make(dt__world *world, int is_eager) {
    size_t each = dt__arrival_bytes(is_eager);
    char *chunk = (char *)dt_alloc(world->ctx, DT_MEM_HOST, (DT__ARRIVALS + 1) * each, "messages");
    if (!chunk) return 0;
    for (int i = 0; i <= DT__ARRIVALS; i++) { /* the first element links the chunks */
        dt__arrival *one = (dt__arrival *)(void *)(chunk + (size_t)i * each),
                    **list = i ? &world->free_arrivals[is_eager] : &world->arrival_chunks[is_eager];
        one->next = *list;
        *list = one;
    }
    return 1;
}

/* Returns the messages between this rank and another one; NULL if the context has failed. */
static dt__peer *dt__peer_of(dt__world *world, int rank) {
    size_t bytes = (size_t)world->size * sizeof *world->peers;
    if (!world->peers) {
        world->peers = (dt__peer **)dt_alloc(world->ctx, DT_MEM_HOST, bytes, "other ranks");
        if (!world->peers) return NULL;
        memset(world->peers, 0, bytes);
        /* At once: which messages come before their receives is up to the scheduler, and memory
           must not depend on it. */
        if (!dt__arrivals_make(world, 0) || !dt__arrivals_make(world, 1)) return NULL;
    }
    if (world->peers[rank]) return world->peers[rank];
    dt__peer *peer = (dt__peer *)dt_alloc(world->ctx, DT_MEM_HOST, sizeof *peer, "another rank");
    if (!peer) return NULL;
    memset(peer, 0, sizeof *peer);
    peer->is_remote = rank != world->rank && dt__local_rank_of(world, rank) < 0;
    peer->report.state.waits_for = DT_ANY;
    if (peer->is_remote && world->transport.pid)
        peer->report.state.pid = world->transport.pid(world->transport.user, rank);
    world->peers[rank] = peer;
    return peer;
}

static void dt__peers_free(dt__world *world) {
    for (int rank = 0; rank < world->size && world->peers; rank++)
        if (world->peers[rank])
            dt_free(world->ctx, DT_MEM_HOST, world->peers[rank], sizeof(dt__peer));
    dt_free(world->ctx, DT_MEM_HOST, world->peers, (size_t)world->size * sizeof *world->peers);
    world->peers = NULL;
}

/* Returns the rank in the group that a world rank has, or -1 if it is not a member. */
static int dt__rank_in(const dt__group *group, int world_rank) {
    for (int rank = 0; rank < group->size; rank++)
        if (group->ranks[rank] == world_rank) return rank;
    return -1;
}

static void dt__p2p_unlist(dt__p2p *p2p) {
    dt__p2p_list *list = p2p->list;
    if (!list) return;
    *(p2p->prev ? &p2p->prev->next : &list->first) = p2p->next;
    *(p2p->next ? &p2p->next->prev : &list->last) = p2p->prev;
    p2p->list = NULL;
}

/* Moves a transfer to the end of a list. */
static void dt__p2p_append(dt__p2p_list *list, dt__p2p *p2p) {
    dt__p2p_unlist(p2p);
    p2p->list = list;
    p2p->prev = list->last;
    p2p->next = NULL;
    *(p2p->prev ? &p2p->prev->next : &list->first) = p2p;
    list->last = p2p;
}

static void dt__p2p_prepend(dt__p2p_list *list, dt__p2p *p2p) {
    dt__p2p_unlist(p2p);
    p2p->list = list;
    p2p->prev = NULL;
    p2p->next = list->first;
    *(p2p->next ? &p2p->next->prev : &list->last) = p2p;
    list->first = p2p;
}

static dt__arrival *dt__arrival_acquire(dt__world *world, int is_eager) {
    dt__arrival **list = &world->free_arrivals[is_eager], *arrival;
    if (!*list && !dt__arrivals_make(world, is_eager)) return NULL;
    arrival = *list;
    *list = arrival->next;
    return arrival;
}

static void dt__arrival_release(dt__world *world, dt__arrival *arrival) {
    dt__arrival **list = &world->free_arrivals[arrival->frame.kind == DT__EAGER];
    arrival->next = *list;
    *list = arrival;
}

static void dt__arrivals_free(dt__world *world) {
    for (int is_eager = 0; is_eager < 2; is_eager++)
        while (world->arrival_chunks[is_eager]) {
            dt__arrival *chunk = world->arrival_chunks[is_eager];
            world->arrival_chunks[is_eager] = chunk->next;
            dt_free(
                world->ctx, DT_MEM_HOST, chunk, (DT__ARRIVALS + 1) * dt__arrival_bytes(is_eager));
        }
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

/* ---- device memory, which a transport cannot access ---- */

/* Only the kernel tables of real devices have the function `open`. */
static int dt__on_device(const dt_work *work) {
    return !work->call.host_memory && dt_ctx_kernels(work->comm->world->ctx)->open != NULL;
}

/* Returns 1 if memcpy can read and write the data of this work. */
static int dt__is_host_data(const dt_work *work) {
    dt_status (*move)(void *, const void *, size_t, void *) =
        dt_ctx_kernels(work->comm->world->ctx)->move;
    return work->call.host_memory || !move || move == dt_kernels_cpu()->move;
}

/* Starts a copy to or from pinned memory. The host does not wait for the copy: p2p->device_event,
   which is recorded after the copy, tells when it is complete. Returns 1, or -1 if the context has
   failed. */
static int dt__pinned_copy_start(dt__p2p *p2p, void *to, const void *from) {
    dt_work *work = p2p->work;
    const dt_kernels *kernels = dt_ctx_kernels(work->comm->world->ctx);
    void *stream = dt_ctx_stream(work->comm->world->ctx);
    dt_status status = kernels->move(to, from, dt__p2p_bytes(p2p), stream);
    if (status == DT_OK) p2p->device_event = kernels->event_record(stream, p2p->device_event);
    if (status == DT_OK && p2p->device_event) return 1;
    return dt__data_failed(work->comm, &work->call, status ? status : DT_ERR_DEVICE), -1;
}

/* Returns 1 if the copy is complete or there was no copy, 0 if not yet, -1 if the context has
   failed. */
static int dt__pinned_copy_done(dt__p2p *p2p) {
    const dt_kernels *kernels = dt_ctx_kernels(p2p->work->comm->world->ctx);
    int passed = p2p->device_event ? kernels->event_query(p2p->device_event) : 1;
    if (passed < 0) dt__data_failed(p2p->work->comm, &p2p->work->call, DT_ERR_DEVICE);
    return passed;
}

/* Frees the transfer's copy and event. After a failure the device may still be copying; then this
   function waits for the device first. */
static void dt__p2p_release(dt__p2p *p2p) {
    dt__world *world = p2p->work->comm->world;
    int is_pinned = dt__on_device(p2p->work);
    if (is_pinned && p2p->copy && dt__pinned_copy_done(p2p) == 0) dt__comm_sync(world);
    if (p2p->device_event) dt_ctx_kernels(world->ctx)->event_destroy(p2p->device_event);
    if (is_pinned)
        dt_unpin(world->ctx, p2p->copy, dt__p2p_bytes(p2p));
    else
        dt__send_copy_release(world, p2p->copy, dt__p2p_bytes(p2p));
    p2p->copy = p2p->device_event = NULL;
}

static int dt__p2p_finish(dt__p2p *p2p) {
    dt__p2p_release(p2p);
    p2p->state = DT__P2P_FINISHED;
    dt__count_progress(p2p->work->comm->world);
    return 1;
}

/* ---- packets ---- */

/* section 14 */
static int dt__packet_arrived(dt__world *world, int from, const void *packet, size_t bytes);
/* section 15 */
static int dt__packet_ring_send(
    dt__world *world, int to, const dt__frame *frame, const void *body, size_t bytes);

/* Sends one packet. Returns 1 if the transport has taken it, 0 if it must be sent again later, -1
   if the rank cannot be reached any more. */
static int dt__packet_send(
    dt__world *world, int to, dt__frame *frame, const void *body, size_t bytes) {
    dt__peer *peer = dt__peer_of(world, to);
    if (!peer) return -1;
    frame->credits = peer->eager_matched;
    int taken = peer->is_remote ? world->transport.send(
                                      world->transport.user, to, frame, sizeof *frame, body, bytes)
                                : dt__packet_ring_send(world, to, frame, body, bytes);
    if (taken > 0) peer->eager_told = peer->eager_matched;
    if (taken > 0 && frame->kind != DT__REPORT) dt__count_progress(world);
    return taken;
}

/* Sends a packet without data that answers an announcement, or only tells credits. */
static int dt__answer(dt__world *world, int to, dt__frame_kind kind, uint64_t id) {
    dt__frame frame;
    memset(&frame, 0, sizeof frame);
    frame.kind = kind;
    frame.id = id;
    return dt__packet_send(world, to, &frame, NULL, 0);
}

/* Fails the context because the transport cannot reach a rank, or has failed. `why` may be "". The
   rank may have failed or ended just before. Returns -1. */
static int dt__unreachable(dt__p2p *p2p, const char *why) {
    const dt_comm *comm = p2p->work->comm;
    dt__world *world = comm->world;
    const dt_transport *t = &world->transport;
    int other = comm->group->ranks[p2p->peer];
    char lost[512] = "";
    if (dt_error(world->ctx)) return -1;
    dt__poll(world, DT_ANY);
    if (dt__aborted(world->shared)) return dt__peer_failed(world), -1;
    if (dt__has_ended(world, other)) return dt__p2p_never_matched(p2p);
    int is_lost = t->lost && t->lost(t->user, other, lost);
    lost[sizeof lost - 1] = 0;
    if (is_lost)
        dt__comm_fail(world, DT_ERR_PEER, "%s: %s", dt__p2p_text(p2p).s, lost);
    else if (why[0])
        dt__comm_fail(world, DT_ERR_COMM, "%s: %s", dt__p2p_text(p2p).s, why);
    else
        dt__comm_fail(world, DT_ERR_COMM, "%s: the transport '%s' cannot reach rank %d",
            dt__p2p_text(p2p).s, t->name ? t->name : "?", other);
    return -1;
}

/* ---- sends ---- */

/* Makes the host memory that the transport sends from, if it is not the buffer itself. Returns 1 if
   that memory is ready, 0 if not yet, -1 if the context has failed. */
static int dt__send_prepare(dt__p2p *p2p, const dt__peer *peer, int eager) {
    dt_comm *comm = p2p->work->comm;
    size_t bytes = dt__p2p_bytes(p2p);
    if (p2p->is_direct || bytes == 0) return 1;
    if (p2p->copy) return dt__pinned_copy_done(p2p);
    if (peer->is_remote && dt__on_device(p2p->work)) {
        p2p->copy = dt_pin(comm->world->ctx, bytes, "a copy of a device's memory");
        if (!p2p->copy || dt__pinned_copy_start(p2p, p2p->copy, p2p->send) < 0) return -1;
        return dt__pinned_copy_done(p2p);
    }
    if (peer->is_remote || eager || dt__reachable(comm->world->shared, p2p->send)) return 1;
    p2p->copy = dt__send_copy_acquire(comm->world, bytes);
    if (!p2p->copy) return -1;
    dt_status status = dt__comm_copy(comm, &p2p->work->call, p2p->copy, p2p->send, bytes);
    return status ? (dt__data_failed(comm, &p2p->work->call, status), -1) : 1;
}

/* Returns 1 if this rank may send an eager message to rank `to`. The receiver
   reports its matches in steps of DT__CREDIT_STEP, so up to DT__CREDIT_STEP - 1 of the messages
   that count here as pending may have been matched there. */
static int dt__has_credit(const dt__world *world, const dt__peer *peer, int to) {
    if (to == world->rank) return peer->eager_sent - peer->eager_matched < DT__EAGER_CREDITS;
    return peer->eager_sent - peer->eager_credited < DT__EAGER_LIMIT;
}

/* Sends the packet of a queued send. Returns 1 if the transport has taken it, 0 if it is not ready
   or the transport cannot take it yet, -1 if the context has failed. */
static int dt__send_packet(dt__p2p *p2p, dt__peer *peer, int to) {
    dt_comm *comm = p2p->work->comm;
    char bounce[DT_EAGER_BYTES];
    size_t bytes = dt__p2p_bytes(p2p);
    if (to != comm->world->rank && !dt__has_credit(comm->world, peer, to))
        dt__poll(comm->world, to);
    int eager = bytes <= DT_EAGER_BYTES && !p2p->is_direct && dt__has_credit(comm->world, peer, to);
    if (!eager && peer->unanswered == DT__ANNOUNCE_CREDITS) return 0;
    int ready = dt__send_prepare(p2p, peer, eager);
    if (ready <= 0) return ready;
    dt_status status = DT_OK;
    const void *data = p2p->copy ? p2p->copy : p2p->send;
    if (p2p->is_direct && !(data = comm->direct->send_key(p2p))) return -1;
    if (eager && !p2p->copy && bytes > 0 && !dt__is_host_data(p2p->work)) {
        status = dt__comm_copy(comm, &p2p->work->call, bounce, p2p->send, bytes);
        data = bounce;
    }
    if (status == DT_OK && !peer->is_remote && !p2p->work->call.host_memory)
        status = dt__comm_sync(comm->world); /* the receiver may read the data at once */
    if (status) return dt__data_failed(comm, &p2p->work->call, status), -1;
    dt__frame frame = dt__reported_work(p2p->work)->frame;
    frame.kind = eager ? DT__EAGER : p2p->is_direct ? DT__ANNOUNCE_DIRECT : DT__ANNOUNCE;
    frame.tag = p2p->tag;
    frame.bytes = bytes;
    frame.id = p2p->id = peer->messages + 1;
    frame.address = (uint64_t)(uintptr_t)data;
    /* the lists and the state change before the packet leaves, because a message to this rank
       itself is answered inside dt__packet_send */
    dt__p2p_unlist(p2p);
    if (!eager) dt__p2p_append(&peer->announced, p2p);
    p2p->state = DT__P2P_ANNOUNCED;
    peer->eager_sent += (uint64_t)eager;
    peer->unanswered += (uint64_t)!eager;
    peer->messages++;
    comm->world->message_until = p2p->work->link_until;
    int taken = dt__packet_send(comm->world, to, &frame, data,
        eager            ? bytes
        : p2p->is_direct ? DT__KEY_BYTES
                         : 0);
    if (taken > 0) return eager ? dt__p2p_finish(p2p) : 1;
    dt__p2p_prepend(&peer->queued, p2p);
    p2p->state = DT__P2P_QUEUED;
    peer->eager_sent -= (uint64_t)eager;
    peer->unanswered -= (uint64_t)!eager;
    peer->messages--;
    return taken < 0 ? dt__unreachable(p2p, "") : 0;
}

/* Sends the packets of the queued sends to a rank, oldest first, as long as the transport takes
   them. Returns -1 if the context has failed, else 0. */
static int dt__flush(dt__peer *peer, int to) {
    int taken = 1;
    while (taken > 0 && peer->queued.first) taken = dt__send_packet(peer->queued.first, peer, to);
    return taken < 0 ? -1 : 0;
}

/* Sends the next pieces of an announced message as packets. Returns 1 when all pieces are sent, 0
   if the transport cannot take the next one yet, -1 if the rank cannot be reached. */
static int dt__send_pieces(dt__p2p *p2p, int to) {
    const char *data = (const char *)(p2p->copy ? p2p->copy : p2p->send);
    for (size_t left; (left = dt__p2p_bytes(p2p) - p2p->moved) > 0;) {
        size_t bytes = left < DT__PACKET_DATA ? left : DT__PACKET_DATA;
        dt__frame frame;
        memset(&frame, 0, sizeof frame);
        frame.kind = DT__DATA;
        frame.id = p2p->id;
        frame.address = p2p->moved;
        int taken = dt__packet_send(p2p->work->comm->world, to, &frame, data + p2p->moved, bytes);
        if (taken <= 0) return taken;
        p2p->moved += bytes;
    }
    return 1;
}

/* ---- receives ---- */

/* Ends a receive whose data have arrived in host memory. */
static int dt__landed(dt__p2p *p2p) {
    if (!dt__on_device(p2p->work) || !p2p->copy || dt__p2p_bytes(p2p) == 0)
        return dt__p2p_finish(p2p);
    if (dt__pinned_copy_start(p2p, p2p->recv, p2p->copy) < 0) return -1;
    p2p->state = DT__P2P_LANDING;
    return 1;
}

/* Copies an eager message, or in shared memory an announced one, into the receive's buffer. */
static int dt__receive_data(dt__p2p *p2p, int remote, const void *data) {
    dt_comm *comm = p2p->work->comm;
    size_t bytes = dt__p2p_bytes(p2p);
    dt_status status = DT_OK;
    if (p2p->copy) {
        memcpy(p2p->copy, data, bytes);
    } else {
        status = dt__comm_copy(comm, &p2p->work->call, p2p->recv, data, bytes);
        if (status == DT_OK && !remote && !p2p->work->call.host_memory)
            status = dt__comm_sync(comm->world);
    }
    if (status) return dt__data_failed(comm, &p2p->work->call, status), -1;
    return dt__landed(p2p);
}

/* Begins the transport's push or pull of an announced message, if the transport has them. The
   receiver begins before it answers, so that no data arrive before. */
static int dt__bulk_begin(dt__p2p *p2p) {
    const dt_transport *t = &p2p->work->comm->world->transport;
    int other = p2p->work->comm->group->ranks[p2p->peer];
    void *buf = p2p->copy ? p2p->copy : p2p->op == DT__SEND ? (void *)p2p->send : p2p->recv;
    size_t bytes = dt__p2p_bytes(p2p);
    if (p2p->request || p2p->is_direct || !t->push || !t->pull || bytes == 0) return 1;
    p2p->request = p2p->op == DT__SEND ? t->push(t->user, other, p2p->id, buf, bytes)
                                       : t->pull(t->user, other, p2p->id, buf, bytes);
    return p2p->request ? 1 : dt__unreachable(p2p, "");
}

/* Answers the announcement that a receive has matched: DONE if the data are already copied, in
   shared memory, else PULL, which asks the sender for them. Returns 1, 0 if the transport cannot
   take the answer yet, or -1 if the context has failed. */
static int dt__recv_answer(dt__p2p *p2p) {
    dt_comm *comm = p2p->work->comm;
    dt__world *world = comm->world;
    int from = comm->group->ranks[p2p->peer], remote = dt__peer_of(world, from)->is_remote;
    if (remote && dt__bulk_begin(p2p) < 0) return -1;
    world->message_until = p2p->work->start_time; /* the send may end when the receive begins */
    int taken = dt__answer(world, from, remote ? DT__PULL : DT__DONE, p2p->id);
    if (taken <= 0) return taken < 0 ? dt__unreachable(p2p, "") : 0;
    if (!remote) return dt__p2p_finish(p2p);
    p2p->state = DT__P2P_BULK;
    dt__p2p_append(&world->peers[from]->pulled, p2p);
    if (p2p->is_direct) comm->direct->pulled(p2p);
    return 1;
}

/* Gives a message to the receive that it has matched. `from` is the sender's world rank. Returns -1
   if the context has failed. */
static int dt__match(dt__p2p *p2p, int from, const dt__frame *frame, const void *body) {
    dt_comm *comm = p2p->work->comm;
    dt__world *world = comm->world;
    dt__peer *peer = dt__peer_of(world, from);
    if (p2p->peer == DT_ANY) p2p->peer = dt__rank_in(comm->group, from);
    p2p->id = frame->id;
    p2p->state = DT__P2P_ANSWERING;
    if (world->link && !peer->is_remote) /* the two ranks share a time base */
        p2p->work->link_until = fmax(p2p->work->link_until, world->message_until);
    if (frame->kind != DT__EAGER) peer->unmatched--;
    if (dt__p2p_check(p2p, p2p->peer, frame) < 0) return -1;
    if (peer->is_remote && p2p->is_direct != (frame->kind == DT__ANNOUNCE_DIRECT)) {
        dt__comm_fail(world, DT_ERR_COMM,
            "%s: rank %d's buffer is in %s memory, this rank's is not", dt__p2p_text(p2p).s, from,
            p2p->is_direct ? "the host's" : "a device's");
        return -1;
    }
    if (p2p->is_direct && peer->is_remote) comm->direct->recv_key(p2p, body);
    if (p2p->work->call.from) *p2p->work->call.from = p2p->peer;
    if (frame->kind == DT__EAGER) {
        peer->eager_matched++;
        if (dt__receive_data(p2p, peer->is_remote, body) < 0) return -1;
        if (from != world->rank && peer->eager_matched - peer->eager_told >= DT__CREDIT_STEP)
            dt__answer(world, from, DT__CREDIT, 0);
        return 1;
    }
    if (!peer->is_remote) {
        const void *data = (const void *)(uintptr_t)frame->address;
        int is_self = from == world->rank; /* then no other rank may free the buffer meanwhile */
        if (!is_self && !dt__access_begin(world)) return dt__peer_failed(world), -1;
        dt_status status =
            dt__comm_copy(comm, &p2p->work->call, p2p->recv, data, dt__p2p_bytes(p2p));
        if (is_self)
            status = status ? status : dt__comm_sync(world);
        else
            status = dt__access_end(world, status);
        if (status) return dt__data_failed(comm, &p2p->work->call, status), -1;
    }
    /* if the transport does not take the answer now, dt__p2p_advance sends it again */
    return dt__recv_answer(p2p) < 0 ? -1 : 1;
}

static int dt__frame_matches(const dt__p2p *p2p, int from, const dt__frame *frame) {
    const dt__group *group = p2p->work->comm->group;
    if (frame->channel != group->channel || frame->tag != p2p->tag) return 0;
    return p2p->peer == DT_ANY ? dt__rank_in(group, from) >= 0 : group->ranks[p2p->peer] == from;
}

/* Begins a receive: matches it with the oldest message that waits for it, or posts it. */
static int dt__recv_begin(dt__p2p *p2p) {
    dt__world *world = p2p->work->comm->world;
    dt__arrival *before = NULL;
    int local = p2p->peer != DT_ANY &&
                dt__local_rank_of(world, p2p->work->comm->group->ranks[p2p->peer]) >= 0;
    if (dt__on_device(p2p->work) && world->transport.send && !local && !p2p->is_direct &&
        dt__p2p_bytes(p2p) > 0) {
        p2p->copy = dt_pin(world->ctx, dt__p2p_bytes(p2p), "a copy of a device's memory");
        if (!p2p->copy) return -1;
    }
    for (dt__arrival *a = world->first_unexpected; a; before = a, a = a->next) {
        if (!dt__frame_matches(p2p, a->from, &a->frame)) continue;
        if (before)
            before->next = a->next;
        else
            world->first_unexpected = a->next;
        if (world->last_unexpected == a) world->last_unexpected = before;
        world->message_until = a->link_until;
        int matched = dt__match(p2p, a->from, &a->frame, a + 1);
        dt__arrival_release(world, a);
        return matched;
    }
    p2p->state = DT__P2P_POSTED;
    dt__p2p_append(&world->posted, p2p);
    return 1;
}

/* Moves the data of an announced message: by NCCL, by the transport's push and pull, or in
   packets. */
static int dt__bulk_advance(dt__p2p *p2p) {
    dt_comm *comm = p2p->work->comm;
    const dt_transport *t = &comm->world->transport;
    int other = comm->group->ranks[p2p->peer], done = 1;
    char why[512] = "";
    if (dt__bulk_begin(p2p) < 0) return -1;
    if (p2p->request)
        done = t->test(t->user, p2p->request, why);
    else if (p2p->is_direct)
        done = comm->direct->bulk(p2p);
    else if (dt__p2p_bytes(p2p) > 0)
        done = p2p->op == DT__SEND ? dt__send_pieces(p2p, other) : 0;
    if (done == 2) dt__count_progress(comm->world); /* so that the wait does not nap */
    if (done == 0 || done == 2) return 0;
    p2p->request = NULL;
    dt__p2p_unlist(p2p);
    if (done > 0) return p2p->op == DT__SEND ? dt__p2p_finish(p2p) : dt__landed(p2p);
    why[sizeof why - 1] = 0;
    return dt__unreachable(p2p, why);
}

// ==== 14. Messages: arriving packets, progress ==================================================

/* dt__poll takes packets from the transports and gives each to dt__packet_arrived, which hands a
   message to its receive, and an answer or a piece to its transfer. dt__p2p_advance advances one
   send or receive: it begins it, sends what it can, polls, and answers announcements. */

/* Returns the transfer with this number; NULL if there is none. */
static dt__p2p *dt__p2p_find(const dt__p2p_list *list, uint64_t id) {
    dt__p2p *p2p = list->first;
    while (p2p && p2p->id != id) p2p = p2p->next;
    return p2p;
}

/* ---- messages of a collective that no receive takes ---- */

/* In a collective every message has its receive. So if one remains when this rank has completed the
   collective, the sender has made a different call, for example with another root. */

/* Fails the context because this rank has completed the collective of this frame without the
   message. own: this rank's call; NULL if it is no longer known. Returns -1. */
static int dt__left_over(dt_comm *comm, int from, const dt__frame *frame, const dt__frame *own) {
    dt__call its = dt__unpack_call(frame->packed_call, (size_t)frame->count);
    int rank = dt__rank_in(comm->group, from);
    if (own && rank >= 0 && !dt__same_call(frame, own))
        dt__calls_differ(comm, rank, frame, comm->base.rank, own);
    else
        dt__comm_fail(comm->world, DT_ERR_COMM,
            "rank %d has sent %llu bytes of %s #%llu on %s%s to rank %d, which expects none", from,
            (unsigned long long)frame->bytes, dt__call_text(&its).s, (unsigned long long)frame->seq,
            comm->group->name, dt__frame_site(frame).s, comm->world->rank);
    return -1;
}

/* Called when a collective is complete. Returns 1, or -1 if one of its messages is left. */
static int dt__none_left_over(dt_work *work) {
    const dt__frame *own = &dt__reported_work(work)->frame;
    for (dt__arrival *a = work->comm->world->first_unexpected; a; a = a->next)
        if (a->frame.channel == own->channel && a->frame.seq == own->seq &&
            a->frame.tag == dt__collective_tag(work))
            return dt__left_over(work->comm, a->from, &a->frame, own);
    return 1;
}

static dt_comm *dt__comm_of(const dt__world *world, uint32_t channel) {
    dt_comm *comm = world->comms;
    while (comm && comm->group->channel != channel) comm = comm->next;
    return comm;
}

/* Returns 1 if this rank has completed the collective of this group with this number. */
static int dt__has_completed(const dt_comm *comm, uint64_t seq) {
    const dt_work *blocking = comm->world->blocking;
    if (seq > comm->seq || (blocking && blocking->comm == comm && blocking->call.seq == seq))
        return 0;
    for (const dt_work *w = comm->world->first_unfinished; w; w = w->next)
        if (w->completion != DT__COMPLETED && w->comm == comm && w->call.seq == seq) return 0;
    return 1;
}

/* Finds this rank's record of the collective of a frame. Returns 1, or 0 if it is overwritten. */
static int dt__record_of(const dt__world *world, const dt__frame *frame, dt__op_record *r) {
    dt__rank_view own = { world->state, world->records, DT_RECORDS };
    uint64_t last = (uint64_t)world->state->op_count;
    for (uint64_t n = last; n > 0 && n + DT_RECORDS > last; n--)
        if (dt__record_get(own, n, r) && r->call.channel == frame->channel &&
            r->call.seq == frame->seq)
            return 1;
    return 0;
}

/* ---- arriving packets ---- */

/* A message has arrived: gives it to the oldest receive that it matches, or keeps it. */
static int dt__message_arrived(
    dt__world *world, int from, const dt__frame *frame, const void *body, size_t bytes) {
    for (dt__p2p *p2p = world->posted.first; p2p; p2p = p2p->next) {
        if (!dt__frame_matches(p2p, from, frame)) continue;
        dt__p2p_unlist(p2p);
        return dt__match(p2p, from, frame, body);
    }
    dt_comm *comm = frame->seq ? dt__comm_of(world, frame->channel) : NULL;
    dt__op_record own;
    if (comm && dt__has_completed(comm, frame->seq))
        return dt__left_over(
            comm, from, frame, dt__record_of(world, frame, &own) ? &own.call : NULL);
    dt__arrival *arrival = dt__arrival_acquire(world, frame->kind == DT__EAGER);
    if (!arrival) return -1;
    arrival->from = from;
    arrival->link_until = world->message_until;
    arrival->frame = *frame;
    if (bytes) memcpy(arrival + 1, body, bytes);
    arrival->next = NULL;
    if (world->first_unexpected)
        world->last_unexpected->next = arrival;
    else
        world->first_unexpected = arrival;
    world->last_unexpected = arrival;
    return 1;
}

/* The receiver has answered the announcement of a send. */
static int dt__send_answered(dt__p2p *p2p, dt__frame_kind kind) {
    if (kind == DT__DONE) {
        dt__p2p_unlist(p2p);
        return dt__p2p_finish(p2p);
    }
    p2p->state = DT__P2P_BULK;
    if (p2p->is_direct) p2p->work->comm->direct->pulled(p2p);
    return dt__bulk_advance(p2p) < 0 ? -1 : 1;
}

/* A piece of an announced message has arrived. Pieces arrive in order. */
static int dt__piece_arrived(dt__p2p *p2p, const dt__frame *frame, const void *body, size_t bytes) {
    char *to = (char *)(p2p->copy ? p2p->copy : p2p->recv);
    if (bytes == 0 || frame->address != p2p->moved || bytes > dt__p2p_bytes(p2p) - p2p->moved)
        return 0;
    memcpy(to + p2p->moved, body, bytes);
    p2p->moved += bytes;
    if (p2p->moved < dt__p2p_bytes(p2p)) return 1;
    dt__p2p_unlist(p2p);
    return dt__landed(p2p);
}

/* Another rank has failed: records its failure, which ends the waits of this rank. The text begins
   with the name of the rank that failed, whatever the packet says. */
static int dt__abort_arrived(
    dt__world *world, const dt__frame *frame, const char *body, size_t bytes) {
    dt__text name = dt__format("rank %d", (int)frame->tag);
    size_t length = strlen(name.s);
    int is_named = bytes >= length && memcmp(body, name.s, length) == 0;
    dt__text text =
        dt__format("%s%.*s", is_named ? "" : dt__format("%s: ", name.s).s, (int)bytes, body);
    if (frame->tag < 0 || frame->tag >= world->size || frame->count == 0 || frame->count > 255)
        return 0;
    dt__escape(text.s, sizeof text.s);
    if (dt__claim(world->shared, frame->tag))
        dt__publish_failure(world->shared, frame->tag, (dt_status)frame->count, text.s);
    return 1;
}

/* A message has arrived: takes its credit. Returns 1, or -1 if the sender had none. */
static int dt__take_credit(dt__world *world, int from, int is_eager) {
    dt__peer *peer = world->peers[from];
    uint64_t before = is_eager ? peer->eager_received++ - peer->eager_matched : peer->unmatched++;
    uint64_t credits = is_eager ? DT__EAGER_LIMIT : DT__ANNOUNCE_CREDITS;
    if (before < credits) return 1;
    dt__comm_fail(world, DT_ERR_COMM,
        "rank %d has sent more messages than it had credits for: %llu %s have no receive", from,
        (unsigned long long)before, is_eager ? "small ones" : "announcements");
    return -1;
}

/* Handles a packet of another rank. Nothing in it is trusted. A packet that changes nothing is
   malformed too: a stream of them would keep a waiting rank from its timeout. Returns 1, 0 if the
   packet is malformed, or -1 if the context has failed. */
static int dt__packet_arrived(dt__world *world, int from, const void *packet, size_t bytes) {
    dt__peer *peer = dt__peer_of(world, from);
    const dt__frame *frame = (const dt__frame *)packet;
    const char *body = (const char *)(frame + 1);
    if (!peer) return -1;
    if (bytes < sizeof *frame || frame->credits > peer->eager_sent) return 0;
    bytes -= sizeof *frame;
    int has_credits = frame->credits > peer->eager_credited;
    if (has_credits) peer->eager_credited = frame->credits;
    if (frame->kind != DT__REPORT) dt__count_progress(world);
    dt__p2p *p2p = NULL;
    switch (frame->kind) {
    case DT__EAGER:
        if (bytes != frame->bytes || bytes > DT_EAGER_BYTES) return 0;
        if (dt__take_credit(world, from, 1) < 0) return -1;
        return dt__message_arrived(world, from, frame, body, bytes);
    case DT__ANNOUNCE:
    case DT__ANNOUNCE_DIRECT:
        if (bytes != (frame->kind == DT__ANNOUNCE ? 0 : DT__KEY_BYTES)) return 0;
        if (dt__take_credit(world, from, 0) < 0) return -1;
        return dt__message_arrived(world, from, frame, body, bytes);
    case DT__PULL:
    case DT__DONE:
        p2p = dt__p2p_find(&peer->announced, frame->id);
        /* after a failure the transfer may have been cancelled, and the packet is only late */
        if (!p2p || p2p->state != DT__P2P_ANNOUNCED) return dt_error(world->ctx) ? 1 : 0;
        if (peer->is_remote != (frame->kind == DT__PULL)) return 0;
        peer->unanswered--;
        if (world->link && !peer->is_remote)
            p2p->work->link_until = fmax(p2p->work->link_until, world->message_until);
        return dt__send_answered(p2p, (dt__frame_kind)frame->kind);
    case DT__DATA:
        p2p = dt__p2p_find(&peer->pulled, frame->id);
        if (!p2p || p2p->request) return dt_error(world->ctx) ? 1 : 0;
        return dt__piece_arrived(p2p, frame, body, bytes);
    case DT__CREDIT: return bytes == 0 && has_credits;
    case DT__REPORT:
        if (bytes != sizeof(dt__wait_report) || !peer->is_remote) return 0;
        dt__receive_wait_report(world, from, (const dt__wait_report *)(const void *)body);
        return 1;
    case DT__ABORT: return dt__abort_arrived(world, frame, body, bytes);
    default: return 0;
    }
}

/* section 15 */
static const void *dt__packet_ring_recv(dt__world *world, int from, size_t *bytes);

/* Handles the packets that have arrived from a rank; DT_ANY: from every rank. */
enum { DT__PACKETS_PER_POLL = 64 };
static void dt__poll(dt__world *world, int rank) {
    int n = 0, good = 1, from, sender = rank;
    size_t bytes;
    int first = rank == DT_ANY ? 0 : rank, last = rank == DT_ANY ? world->size - 1 : rank;
    const void *packet;
    for (from = first; from <= last && world->shared->state && good > 0; from++) {
        if (from == world->rank || dt__local_rank_of(world, from) < 0) continue;
        while (good > 0 && (packet = dt__packet_ring_recv(world, from, &bytes)))
            good = dt__packet_arrived(world, sender = from, packet, bytes), n++;
    }
    if (world->transport.recv && (rank == DT_ANY || dt__local_rank_of(world, rank) < 0)) {
        int local = n;
        world->polled_pass = world->pass;
        while (good > 0 && n < DT__PACKETS_PER_POLL &&
               (packet = world->transport.recv(world->transport.user, rank, &sender, &bytes))) {
            int is_known = sender >= 0 && sender < world->size && sender != world->rank &&
                           dt__local_rank_of(world, sender) < 0;
            good = is_known ? dt__packet_arrived(world, sender, packet, bytes) : 0;
            n++;
        }
        world->poll_found = n > local;
    }
    if (good == 0) dt__comm_fail(world, DT_ERR_COMM, "rank %d has sent a malformed packet", sender);
}

/* ---- one transfer ---- */

/* Returns 1 if no rank is left that could match this transfer. A nonblocking message to this rank
   itself can still be matched by a later call. */
static int dt__is_hopeless(const dt__p2p *p2p) {
    const dt_comm *comm = p2p->work->comm;
    int first = p2p->peer == DT_ANY ? 0 : p2p->peer,
        last = p2p->peer == DT_ANY ? comm->base.size - 1 : p2p->peer;
    if (p2p->state > DT__P2P_ANNOUNCED) return 0;
    for (int rank = first; rank <= last; rank++) {
        int other = comm->group->ranks[rank];
        if (other == comm->world->rank ? p2p->work->is_started : !dt__has_ended(comm->world, other))
            return 0;
    }
    return 1;
}

static int dt__p2p_begin(dt__p2p *p2p) {
    dt_comm *comm = p2p->work->comm;
    p2p->is_direct = comm->direct && comm->direct->takes && comm->direct->takes(p2p);
    if (p2p->op == DT__RECV) return dt__recv_begin(p2p);
    if (comm->group->ranks[p2p->peer] == comm->world->rank && !p2p->work->is_started &&
        dt__p2p_bytes(p2p) > DT_EAGER_BYTES)
        return dt__p2p_never_matched(p2p);
    dt__peer *peer = dt__peer_of(comm->world, comm->group->ranks[p2p->peer]);
    if (!peer) return -1;
    p2p->state = DT__P2P_QUEUED;
    dt__p2p_append(&peer->queued, p2p);
    return 1;
}

/* Advances a transfer. Returns 1 if it is complete, 0 if not yet, -1 if the context has failed. */
static int dt__p2p_advance(dt__p2p *p2p) {
    dt_comm *comm = p2p->work->comm;
    dt__world *world = comm->world;
    if (p2p->state == DT__P2P_FINISHED) return 1;
    /* read before the packets: a rank may send a message and then end */
    int hopeless = dt__is_hopeless(p2p), other = DT_ANY;
    if (p2p->state == DT__P2P_NEW && dt__p2p_begin(p2p) < 0) return -1;
    if (p2p->state == DT__P2P_FINISHED) return 1;
    if (p2p->peer != DT_ANY) other = comm->group->ranks[p2p->peer];
    if (p2p->state == DT__P2P_QUEUED && dt__flush(world->peers[other], other) < 0) return -1;
    /* Once per pass over the pending operations, unless the last poll found packets. Shared memory
       is polled each time, because it costs little; the poll may bring credits for queued sends. */
    if (p2p->state != DT__P2P_FINISHED && (world->pass != world->polled_pass || world->poll_found ||
                                              !world->transport.recv || world->node))
        dt__poll(world, other);
    if (dt_error(world->ctx)) return -1;
    if (p2p->state == DT__P2P_QUEUED && dt__flush(world->peers[other], other) < 0) return -1;
    int moved = 1;
    if (p2p->state == DT__P2P_ANSWERING) moved = dt__recv_answer(p2p);
    if (moved > 0 && p2p->state == DT__P2P_BULK) moved = dt__bulk_advance(p2p);
    if (moved > 0 && p2p->state == DT__P2P_LANDING) {
        moved = dt__pinned_copy_done(p2p);
        if (moved > 0) dt__p2p_finish(p2p);
    }
    if (moved < 0) return -1;
    if (hopeless && p2p->state <= DT__P2P_ANNOUNCED) return dt__p2p_never_matched(p2p);
    return p2p->state == DT__P2P_FINISHED;
}

/* Ends an unfinished transfer after a failure. Nothing uses its buffers any more. */
static void dt__p2p_cancel(dt__p2p *p2p) {
    const dt_transport *t = &p2p->work->comm->world->transport;
    if (p2p->request) t->cancel(t->user, p2p->request);
    p2p->request = NULL;
    dt__p2p_unlist(p2p);
    dt__p2p_release(p2p);
}

/* Tells all ranks that share no memory with this one that rank `failed` has failed. Tries each rank
   at least once, and spends at most DT__ABORT_S seconds on ranks whose packets the transport cannot
   take. */
#define DT__ABORT_S 0.25
static void dt__send_aborts(dt__world *world, int failed, dt_status status, const char *text) {
    dt__stopwatch watch = dt__stopwatch_start(world->host, 8 * DT__ABORT_S);
    size_t length = strlen(text);
    for (int rank = 0, late = 0; rank < world->size; rank++) {
        dt__frame frame;
        memset(&frame, 0, sizeof frame);
        frame.kind = DT__ABORT;
        frame.tag = failed;
        frame.count = (uint64_t)status;
        if (rank == world->rank || dt__local_rank_of(world, rank) >= 0) continue;
        while (world->transport.send(world->transport.user, rank, &frame, sizeof frame, text,
                   length < 511 ? length : 511) == 0 &&
               !late) {
            late = dt__waited(&watch) > DT__ABORT_S;
            world->host->sleep(world->host->user, 1e-3);
        }
    }
}

// ==== 15. Transport: shared memory ==============================================================

/* The packets from one rank to another go through a ring of slots, which the sender allocates with
   its first packet. A packet is published by its number, which the sender stores in the slot last;
   its slot is free again when the receiver has counted it in `received`.

       slot       0    1    2    3    4    5    6    7
       packet     9   10   11    4    5    6    7    8
                            ^    ^
                  sent = 11 +    + received = 4: the receiver reads packet 5 next; slot 3 is free

   Each word has one writer (L. Lamport, "Specifying concurrent program modules", 1983). The sender
   keeps its last view of `received`, and reads it again only if it finds no free slot (P. Lee, T.
   Bu, G. Chandranmenon, "A lock-free, cache-efficient shared ring buffer", 2009), or before a large
   packet: if the ring is empty then, the packet goes to slot 0 again, which is still in the cache.
   */

enum { DT__REWIND_BYTES = 1024 };

static dt__packet_ring **dt__packet_ring_between(const dt__world *world, int from, int to) {
    dt__shared *shared = world->shared;
    return &shared->rings[(size_t)dt__local_rank_of(world, to) * (size_t)shared->ranks +
                          (size_t)dt__local_rank_of(world, from)];
}

/* Returns where a packet of this size lies in its slot. */
static char *dt__slot_packet(const dt__packet_slot *slot, size_t bytes) {
    return bytes > sizeof(dt__frame) + 16 ? (char *)slot->data : (char *)slot->padding;
}

static int dt__packet_ring_send(
    dt__world *world, int to, const dt__frame *frame, const void *body, size_t bytes) {
    char *packet;
    if (to == world->rank) {
        uint64_t whole[(sizeof *frame + DT_EAGER_BYTES) / sizeof(uint64_t)];
        packet = (char *)whole;
        memcpy(packet, frame, sizeof *frame);
        if (bytes) memcpy(packet + sizeof *frame, body, bytes);
        return dt__packet_arrived(world, to, packet, sizeof *frame + bytes);
    }
    dt__packet_ring **link = dt__packet_ring_between(world, world->rank, to), *ring = *link;
    if (!ring) {
        dt__shared *shared = world->shared;
        ring = (dt__packet_ring *)(void *)dt__range_alloc(
            shared->ring_arena, shared->ring_arena_bytes, &shared->ring_arena_used, sizeof *ring);
        if (!ring) return -1;
        for (int i = 0; i < DT__RING_SLOTS; i++) ring->slot[i].number_and_bytes = 0;
        ring->sent = ring->freed = ring->send_at = 0;
        ring->received = ring->taken = ring->recv_at = 0;
        __atomic_store_n(link, ring, __ATOMIC_RELEASE);
    }
    if (ring->sent - ring->freed == DT__RING_SLOTS || bytes > DT__REWIND_BYTES)
        ring->freed = __atomic_load_n(&ring->received, __ATOMIC_ACQUIRE);
    if (ring->sent - ring->freed == DT__RING_SLOTS) return 0;
    if (ring->sent == ring->freed && bytes > DT__REWIND_BYTES) ring->send_at = 0;
    if (world->link) ring->link_until[ring->send_at % DT__RING_SLOTS] = world->message_until;
    dt__packet_slot *slot = &ring->slot[ring->send_at++ % DT__RING_SLOTS];
    ring->sent++;
    packet = dt__slot_packet(slot, sizeof *frame + bytes);
    memcpy(packet, frame, sizeof *frame);
    if (bytes) memcpy(packet + sizeof *frame, body, bytes);
    __atomic_store_n(
        &slot->number_and_bytes, ring->sent << 16 | (sizeof *frame + bytes), __ATOMIC_RELEASE);
    return 1;
}

/* Returns the next packet from a rank, which stays valid until the next call; NULL if there is
   none. First frees the slot of the packet that the previous call returned. The next packet is in
   the next slot, or in slot 0 if the sender has gone back there. */
static const void *dt__packet_ring_recv(dt__world *world, int from, size_t *bytes) {
    dt__packet_ring *ring =
        __atomic_load_n(dt__packet_ring_between(world, from, world->rank), __ATOMIC_ACQUIRE);
    if (!ring) return NULL;
    if (ring->received != ring->taken)
        __atomic_store_n(&ring->received, ring->taken, __ATOMIC_RELEASE);
    uint64_t at = ring->recv_at % DT__RING_SLOTS, number = 0;
    for (int i = 0; i < 2 && number >> 16 != ring->taken + 1; i++) {
        if (i) at = 0;
        number = __atomic_load_n(&ring->slot[at].number_and_bytes, __ATOMIC_ACQUIRE);
    }
    if (number >> 16 != ring->taken + 1) return NULL;
    const dt__packet_slot *slot = &ring->slot[at];
    if (world->link) world->message_until = ring->link_until[at];
    ring->recv_at = at + 1;
    ring->taken++;
    *bytes = (size_t)(number & 0xffff);
    return dt__slot_packet(slot, *bytes);
}

// ==== 16. Collectives in shared memory ==========================================================

/* The ranks of a group run a collective by accessing each other's memory, in four steps:

       post    each rank publishes its call, with the addresses of its buffers, or with the data
               themselves if they are small (inline)
       open    each rank waits until all ranks have posted, and compares all calls with rank 0's
       move    each rank reads its data from the other ranks (dt__read_from_ranks), or writes its
               part of a sum to all of them (dt__write_to_ranks)
       close   each rank publishes that it is done and waits until all ranks are; only then may
               the buffers change

   Cost: two waits for the slowest rank, and each byte moves once. If all ranks post inline data,
   the second wait is left out, because no rank reads another rank's buffers. A rank reuses its
   oldest post only after dt__member.closed shows that all ranks have finished reading that post.
   Every flag has one writer and many readers (J. Mellor-Crummey and M. Scott, "Algorithms for
   scalable synchronization", 1991). Comparing the calls costs about 10 ns a rank; without the
   comparison, ranks whose calls differ would sum garbage or hang.

   If any rank has a large buffer that other ranks cannot access, all ranks move their data in
   windows, and close every round. A window (not MPI's RMA window) is a piece of a send buffer of at
   most DT_WINDOW_BYTES; in a buffer of blocks it consists of a piece of every block. In round w the
   owner of such a buffer copies window w into its staging buffer, which has two halves that
   alternate, and the other ranks read window w-1 in the other half:

       round       0          1          2          3
       window 0    copy in    read
       window 1               copy in    read
       window 2                          copy in    read

   An all-reduce in windows is a pipeline with one more stage (dt__pipeline_round). Without staging
   the whole buffer is one window, and a collective has one round. */

/* What the rank waits for (dt_work.state). */
enum {
    DT__AWAIT_FREE_POST = 0, /* the close of the last round that used this rank's post */
    DT__AWAIT_POSTS,         /* the posts of all ranks */
    DT__AWAIT_ROUND          /* the close of the previous round on all ranks */
};

/* How the data move (dt_work.mode). */
enum {
    DT__MOVE_INLINE = 0, /* every rank reads the posts, which hold all data */
    DT__MOVE_READ,       /* every rank reads the send buffers or posts of the others */
    /* An all-reduce on a rank whose send buffer other ranks read. Until they have closed, the sum
       must not go to recv, which may be the same buffer. So it goes into the data space of this
       rank's post, which is unused, and is copied into recv after the close. */
    DT__MOVE_READ_TO_POST,
    DT__MOVE_WRITE,   /* every rank sums one chunk and writes the sum to all */
    DT__MOVE_WINDOWS, /* as DT__MOVE_READ, window by window */
    DT__MOVE_PIPELINE /* as DT__MOVE_WRITE, window by window */
};

/* Returns 1 if `rank` has reached the point that the work's state waits for. */
static int dt__rank_reached(const dt_work *work, int rank) {
    if (work->state == DT__AWAIT_POSTS)
        return __atomic_load_n(&dt__post_of(work, rank)->number, __ATOMIC_ACQUIRE) == work->post;
    return __atomic_load_n(&work->comm->group->members[rank].closed, __ATOMIC_ACQUIRE) >=
           work->awaited_round;
}

/* Returns a text like "ranks 0,1 arrived, 3 did not". It lists at most 8 world ranks that have
   reached the point, and at most 8 that have not. */
static dt__text dt__arrivals_text(const dt_work *work) {
    dt__text text = dt__format("ranks ");
    for (int arrived = 1; arrived >= 0; arrived--) {
        int listed = 0;
        for (int rank = 0; rank < work->comm->base.size; rank++) {
            if (dt__rank_reached(work, rank) != arrived || ++listed > 9) continue;
            if (listed > 8)
                dt__put(&text, ",...");
            else
                dt__put(&text, "%s%d", listed > 1 ? "," : "", work->comm->group->ranks[rank]);
        }
        if (arrived)
            dt__put(&text, work->state == DT__AWAIT_POSTS ? " arrived, " : " finished, ");
        else
            dt__put(&text, listed ? " did not" : "the last one just too late");
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
        if (!dt__has_ended(comm->world, of_world) || dt__rank_reached(work, rank)) continue;
        /* a failed rank has ended too, but its failure is what must be reported */
        if (dt__aborted(shared)) return dt__peer_failed(comm->world), -1;
        return dt__ended_without(work, of_world), -1;
    }
    return 0;
}

static const dt__frame *dt__posted_call(const dt_work *work, int rank) {
    return rank == work->comm->base.rank ? &work->frame : &dt__post_of(work, rank)->call;
}

/* Returns 1 if the call is a reduction whose complete sum all ranks or the root receive
   (all-reduce, reduce), so that dt__write_to_ranks can run it. */
static int dt__can_write_sum(const dt__call *call) {
    return dt__pattern_of(call->op)->reduces && !dt__pattern_of(call->op)->send_blocks;
}

/* Returns 1 if the other ranks can access this rank's buffers: send, which they read, and recv if
   they may write a sum to it. */
static int dt__is_accessible(const dt_work *work) {
    const dt_comm *comm = work->comm;
    const dt__call *call = &work->call;
    const dt__shared *shared = comm->world->shared;
    if (dt__sends(comm, call) && !dt__reachable(shared, call->send)) return 0;
    return !dt__can_write_sum(call) || !dt__receives(comm, call) ||
           dt__reachable(shared, call->recv);
}

/* The same for the forked ranks whose memory a dry run counts. */
static int dt__would_be_accessible(const dt_work *work) {
    const dt_comm *comm = work->comm;
    const dt__call *call = &work->call;
    int (*shares)(const void *) = comm->world->would_share;
    return !shares ||
           ((!dt__sends(comm, call) || shares(call->send)) &&
               (!dt__can_write_sum(call) || !dt__receives(comm, call) || shares(call->recv)));
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
    size_t bytes = dt__send_count(comm, call) * dt_dtype_size(call->dtype);
    if (call->op == DT__ALL_TO_ALL_V || !dt__is_host_data(work)) return 0;
    if (bytes > DT_EAGER_BYTES) return 0;
    return bytes <= DT__POST_BYTES || comm->world->shared->spins == 0 || !dt__sends(comm, call) ||
           !dt__is_accessible(work);
}

/* ---- where data lie: pieces ---- */

static const size_t *dt__counts_of(const dt_work *work, int rank) {
    return (const size_t *)(const void *)dt__post_data(dt__post_of(work, rank));
}

/* Elements [at, at + count) of a send buffer. Its 16 bytes are returned in registers, which makes
   small calls faster. */
typedef struct dt__piece {
    size_t at, count;
} dt__piece;

/* Returns one window of the data that rank `from` has for rank `to`. Without windows all data are
   window 0. If ranks sum chunks, rank `to` gets chunk `to` of the window. */
static dt__piece dt__piece_of(const dt_work *work, int window, int from, int to) {
    size_t first = 0, count = work->call.count, at = (size_t)window * work->window_count;
    if (work->call.op == DT__ALL_TO_ALL_V) {
        first = dt__sum_counts(dt__counts_of(work, from), to);
        count = dt__counts_of(work, from)[to];
    } else if (dt__pattern_of(work->call.op)->send_blocks) {
        first = (size_t)to * count;
    }
    count = count < at ? 0 : count - at < work->window_count ? count - at : work->window_count;
    if (work->mode == DT__MOVE_WRITE || work->mode == DT__MOVE_PIPELINE) {
        first = dt__chunk_offset(count, work->comm->base.size, to);
        count = dt__chunk_offset(count, work->comm->base.size, to + 1) - first;
    }
    dt__piece piece = { first + at, count };
    return piece;
}

/* Returns the offset, in bytes, of a piece for rank `to` in the staging buffer of its owner. Both
   consecutive windows and consecutive operations use the two halves in turn: the lines that other
   ranks have just read are still in their caches, and slow to write. */
static size_t dt__staged_at(const dt_work *work, int window, int to, dt__piece piece) {
    size_t first = dt__pattern_of(work->call.op)->send_blocks
                       ? (size_t)to * work->window_count
                       : piece.at - (size_t)window * work->window_count;
    return (size_t)(((uint64_t)window + work->post) & 1) * DT_WINDOW_BYTES +
           first * dt_dtype_size(work->call.dtype);
}

/* Returns where this rank reads a piece that rank `from` has for it. */
static const char *dt__source(const dt_work *work, int window, int from, dt__piece piece) {
    size_t at = piece.at * dt_dtype_size(work->call.dtype);
    int me = work->comm->base.rank;
    /* not its own post: a core that reads what it has just written may have to wait for the cache
       line */
    if (from == me) return (const char *)work->call.send + at;
    const dt__post *post = dt__post_of(work, from);
    return post->staging ? post->staging + dt__staged_at(work, window, me, piece)
                         : (const char *)post->send + at;
}

/* Sets comm->inputs to the pieces that this rank sums, and returns the piece. */
static dt__piece dt__set_inputs(const dt_work *work, int window) {
    int me = work->comm->base.rank;
    dt__piece piece = dt__piece_of(work, window, me, me);
    for (int rank = 0; rank < work->comm->base.size; rank++)
        work->comm->inputs[rank] = dt__source(work, window, rank, piece);
    return piece;
}

/* Returns the offset in this rank's recv, in elements, of the data from rank `from`. */
static size_t dt__recv_offset(const dt_work *work, int from) {
    if (work->call.op == DT__ALL_TO_ALL_V) return dt__sum_counts(work->call.recv_counts, from);
    return dt__pattern_of(work->call.op)->all_send ? (size_t)from * work->call.count : 0;
}

/* ---- moving data ---- */

/* Copies or reduces one window of the data of all ranks into recv. A copy begins with this rank's
   own block and continues with the next rank's, so that the ranks do not all read the same memory
   at the same time. */
static dt_status dt__read_from_ranks(dt_work *work, int window) {
    dt_comm *comm = work->comm;
    const dt__pattern *pattern = dt__pattern_of(work->call.op);
    int n = comm->base.size, me = comm->base.rank;
    size_t size = dt_dtype_size(work->call.dtype);
    char *recv = (char *)work->call.recv + (size_t)window * work->window_count * size;
    dt_status status = DT_OK;
    if (!dt__receives(comm, &work->call)) return DT_OK;
    if (pattern->reduces) {
        dt__piece piece = dt__set_inputs(work, window);
        comm->outputs[0] =
            work->mode == DT__MOVE_READ_TO_POST ? dt__post_data(dt__post_of(work, me)) : recv;
        return dt__reduce_inputs(comm, &work->call, 1, n, piece.count, 0);
    }
    for (int step = 0; step < n && !status; step++) {
        int from = (me + step) % n;
        if (!pattern->all_send && from != work->call.peer) continue;
        dt__piece piece = dt__piece_of(work, window, from, me);
        status = dt__comm_copy(comm, &work->call, recv + dt__recv_offset(work, from) * size,
            dt__source(work, window, from, piece), piece.count * size);
    }
    return status;
}

/* Smallest size, in bytes, of all ranks' send and recv buffers together for which
   dt__write_to_ranks uses streaming (non-temporal) stores. They are up to twice as fast if the
   buffers exceed the cache that the cores share (32 MiB for 8 cores of a server) and no rank sums
   in place. Otherwise they are up to four times as slow: they evict lines that the next step would
   find in the cache. */
enum { DT__STREAMING_BYTES = 24 << 20 };

static int dt__use_streaming_stores(const dt_work *work) {
    int n = work->comm->base.size;
    if (2 * (size_t)n * dt__call_bytes(&work->call) < DT__STREAMING_BYTES) return 0;
    for (int rank = 0; rank < n; rank++)
        if (dt__post_of(work, rank)->send == dt__post_of(work, rank)->recv) return 0;
    return 1;
}

/* Direct all-reduce in shared memory: rank r sums chunk r of all send buffers and writes the sum to
   all recv buffers. Each buffer is read once and written once. A rank transfers 2 (N-1)/N S bytes,
   where N is the number of ranks and S the bytes of one buffer. No algorithm can transfer less (P.
   Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
   2009). DeepSpeed does the same (github.com/deepspeedai/DeepSpeed, csrc/cpu/comm/shm.cpp). A
   reduce writes to the recv buffer of the root only. */
static dt_status dt__write_to_ranks(dt_work *work) {
    dt_comm *comm = work->comm;
    int n = comm->base.size, me = comm->base.rank, to_all = dt__pattern_of(work->call.op)->all_recv;
    dt__piece chunk = dt__set_inputs(work, 0);
    size_t at = chunk.at * dt_dtype_size(work->call.dtype);
    /* each rank writes to its own recv first, so that the ranks do not all write to one buffer */
    int home = to_all ? me : work->call.peer;
    for (int step = 0; step < (to_all ? n : 1); step++)
        comm->outputs[step] = (char *)dt__post_of(work, (home + step) % n)->recv + at;
    return dt__reduce_inputs(comm, &work->call, to_all ? n : 1, n, chunk.count,
        to_all && dt__use_streaming_stores(work));
}

/* Copies this rank's data of one window into its staging buffer, if it has one: either what each
   other rank reads, or the same for all. */
static dt_status dt__copy_in(dt_work *work, int window) {
    dt_comm *comm = work->comm;
    int n = comm->base.size, me = comm->base.rank;
    int pieces =
        work->mode == DT__MOVE_PIPELINE || dt__pattern_of(work->call.op)->send_blocks ? n : 2;
    size_t size = dt_dtype_size(work->call.dtype);
    char *staging = dt__post_of(work, me)->staging;
    dt_status status = DT_OK;
    for (int i = 1; i < pieces && staging && !status; i++) {
        int to = (me + i) % n;
        dt__piece piece = dt__piece_of(work, window, me, to);
        status = dt__comm_copy(comm, &work->call, staging + dt__staged_at(work, window, to, piece),
            (const char *)work->call.send + piece.at * size, piece.count * size);
    }
    return status;
}

/* One round as drawn at the head of the section: copy in the next window, read the last one. */
static dt_status dt__window_round(dt_work *work) {
    dt_status status = work->round > 0 ? dt__read_from_ranks(work, work->round - 1) : DT_OK;
    return status || work->round + 1 == work->rounds ? status : dt__copy_in(work, work->round);
}

/* Returns where the other ranks read rank's sum of its chunk of a window: in the last third of its
   staging buffer, or in its recv. */
static char *dt__sum_of(const dt_work *work, int window, int rank, dt__piece chunk) {
    const dt__post *post = dt__post_of(work, rank);
    return post->staging ? post->staging + (4 + (window & 1)) * (DT_WINDOW_BYTES / 2)
                         : (char *)post->recv + chunk.at * dt_dtype_size(work->call.dtype);
}

/* A pipelined all-reduce. Of each window, rank r sums the r-th chunk:

       round       0          1          2          3
       window 0    copy in    sum        copy out
       window 1               copy in    sum        copy out

   Copy in: a rank copies its data of the chunks that other ranks sum into its staging buffer. Sum:
   it sums its own chunk and writes the sum into its recv and its staging buffer. Copy out: it
   copies the other chunks' sums from the other staging buffers. A rank whose buffers the others can
   access has no staging buffer: they read its send and recv. One wait separates two rounds, so for
   each window all ranks wait once. */
static dt_status dt__pipeline_round(dt_work *work) {
    dt_comm *comm = work->comm;
    int n = comm->base.size, me = comm->base.rank, round = work->round, windows = work->rounds - 2;
    int is_staged = dt__post_of(work, me)->staging != NULL;
    size_t size = dt_dtype_size(work->call.dtype);
    char *recv = (char *)work->call.recv;
    dt_status status = round < windows ? dt__copy_in(work, round) : DT_OK;
    if (round >= 1 && round <= windows && !status) {
        dt__piece chunk = dt__set_inputs(work, round - 1);
        comm->outputs[0] = recv + chunk.at * size;
        comm->outputs[1] = dt__sum_of(work, round - 1, me, chunk);
        status = dt__reduce_inputs(comm, &work->call, 1 + is_staged, n, chunk.count, 0);
    }
    for (int i = 1; i < n && round >= 2 && !status; i++) {
        int rank = (me + i) % n;
        dt__piece chunk = dt__piece_of(work, round - 2, rank, rank);
        status = dt__comm_copy(comm, &work->call, recv + chunk.at * size,
            dt__sum_of(work, round - 2, rank, chunk), chunk.count * size);
    }
    return status;
}

/* ---- states ---- */

/* A function that returns an int returns 1 if this rank may go on, 0 if it must wait, -1 if the
   context has failed. */

/* Compares the counts that this rank expects in an all-to-all-v with the counts that the other
   ranks send to it. */
static dt_status dt__compare_posted_counts(dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank;
    for (int from = 0; from < n; from++) {
        size_t sent = dt__counts_of(work, from)[me], expected = work->call.recv_counts[from];
        if (sent != expected)
            return dt__counts_differ(work, from, sent, me, expected, dt__own_site(work).s);
    }
    return DT_OK;
}

/* Returns the number of elements of the longest block between any two ranks, which is the same on
   all ranks. */
static size_t dt__longest_block(const dt_work *work) {
    size_t longest = work->call.count;
    int n = work->call.op == DT__ALL_TO_ALL_V ? work->comm->base.size : 0;
    for (int from = 0; from < n; from++)
        for (int to = 0; to < n; to++)
            if (dt__counts_of(work, from)[to] > longest) longest = dt__counts_of(work, from)[to];
    return longest;
}

/* Calls are posted in order. The operation that used the same post before must have moved its data,
   and all ranks must have finished with that post. */
static int dt__may_post(dt_work *work) {
    dt_comm *comm = work->comm;
    if (comm->last_posted + 1 != work->post || comm->last_moved + DT_MAX_STARTED < work->post)
        return 0;
    work->awaited_round = comm->last_round[work->post % DT_MAX_STARTED];
    if (comm->closed_by_all >= work->awaited_round) return 1;
    int there = dt__all_reached(work);
    if (there <= 0) return there;
    /* The loop reads cache lines that other ranks write, which is slow. So closed_by_all is
       recomputed only when its old value is too low. */
    comm->closed_by_all = (uint64_t)-1;
    for (int rank = 0; rank < comm->base.size; rank++) {
        uint64_t closed = __atomic_load_n(&comm->group->members[rank].closed, __ATOMIC_ACQUIRE);
        if (closed < comm->closed_by_all) comm->closed_by_all = closed;
    }
    return 1;
}

/* Allocates the staging buffer of the group, if this call is the first to need it. Returns 0 on
   failure. */
static int dt__staging_make(dt_work *work, int needs_staging) {
    dt_comm *comm = work->comm;
    size_t bytes = dt__send_count(comm, &work->call) * dt_dtype_size(work->call.dtype);
    int is_counted = !dt__would_be_accessible(work) &&
                     (work->call.op == DT__ALL_TO_ALL_V || bytes > DT_EAGER_BYTES);
    if ((!needs_staging && !is_counted) || comm->staging) return 1;
    comm->staging =
        (char *)dt_alloc(comm->world->ctx, DT_MEM_COMM, DT__WINDOWS_BYTES, "staging windows");
    return comm->staging != NULL;
}

static int dt__post_call(dt_work *work) {
    dt_comm *comm = work->comm;
    const dt__call *call = &work->call;
    dt__post *post = dt__post_of(work, comm->base.rank);
    post->is_inline = dt__sends_inline(work);
    int needs_staging = !post->is_inline && !dt__is_accessible(work);
    if (!dt__staging_make(work, needs_staging)) return -1;
    post->call = work->frame;
    if (comm->world->link) post->link_until = work->link_until;
    post->send = post->is_inline ? dt__post_data(post) : call->send;
    post->recv = call->recv;
    post->staging = needs_staging ? comm->staging : NULL;
    dt_status status = dt__comm_sync(comm->world);
    if (status) return dt__data_failed(comm, call, status), -1;
    if (call->op == DT__ALL_TO_ALL_V)
        memcpy(dt__post_data(post), call->send_counts, (size_t)comm->base.size * sizeof(size_t));
    else if (post->is_inline && dt__sends(comm, call))
        memcpy(dt__post_data(post), call->send,
            dt__send_count(comm, call) * dt_dtype_size(call->dtype));
    __atomic_store_n(&post->number, work->post, __ATOMIC_RELEASE);
    comm->last_posted = work->post;
    return 1;
}

/* Decides how the data move. Called once all ranks have posted. */
static int dt__plan_collective(dt_work *work) {
    dt_comm *comm = work->comm;
    const dt__pattern *pattern = dt__pattern_of(work->call.op);
    int n = comm->base.size, inline_ranks = 0, staged_ranks = 0;
    int can_write = dt__can_write_sum(&work->call), to_all = pattern->all_recv;
    if (!DT__UNCHECKED && dt__compare_calls(work, dt__posted_call) < 0) return -1;
    if (work->call.op == DT__ALL_TO_ALL_V && dt__compare_posted_counts(work) != DT_OK) return -1;
    for (int rank = 0; rank < n; rank++) {
        inline_ranks += dt__post_of(work, rank)->is_inline;
        staged_ranks += dt__post_of(work, rank)->staging != NULL;
    }
    for (int rank = 0; rank < n && comm->world->link; rank++) /* no rank ends before the last */
        work->link_until = fmax(work->link_until, dt__post_of(work, rank)->link_until);
    size_t longest = dt__longest_block(work), size = dt_dtype_size(work->call.dtype);
    work->window_count = longest;
    work->rounds = 1;
    if (staged_ranks > 0) {
        work->mode = can_write && to_all ? DT__MOVE_PIPELINE : DT__MOVE_WINDOWS;
        work->window_count = DT_WINDOW_BYTES / size / (size_t)(pattern->send_blocks ? n : 1);
        if (work->window_count == 0) work->window_count = 1;
        work->rounds = (int)((longest + work->window_count - 1) / work->window_count) +
                       (work->mode == DT__MOVE_PIPELINE ? 2 : 1);
        /* earlier operations must have finished with the staging buffer */
        work->awaited_round = comm->group->members[comm->base.rank].closed;
    } else if (inline_ranks == n) {
        work->mode = DT__MOVE_INLINE;
    } else if (can_write && inline_ranks == 0) {
        work->mode = DT__MOVE_WRITE;
    } else if (can_write && to_all && !dt__post_of(work, comm->base.rank)->is_inline) {
        work->mode = DT__MOVE_READ_TO_POST;
    } else {
        work->mode = DT__MOVE_READ;
    }
    return 1;
}

/* Moves the data of one round and closes it. */
static int dt__move_round(dt_work *work) {
    dt_comm *comm = work->comm;
    uint64_t *closed = &comm->group->members[comm->base.rank].closed;
    if (work->mode != DT__MOVE_INLINE && !dt__access_begin(comm->world))
        return dt__peer_failed(comm->world), -1;
    dt_status status = work->mode == DT__MOVE_WRITE      ? dt__write_to_ranks(work)
                       : work->mode == DT__MOVE_PIPELINE ? dt__pipeline_round(work)
                       : work->mode == DT__MOVE_WINDOWS  ? dt__window_round(work)
                                                         : dt__read_from_ranks(work, 0);
    if (work->mode != DT__MOVE_INLINE) status = dt__access_end(comm->world, status);
    if (status) return dt__data_failed(comm, &work->call, status), -1;
    work->round++;
    work->awaited_round = comm->last_round[work->post % DT_MAX_STARTED] = *closed + 1;
    __atomic_store_n(closed, work->awaited_round, __ATOMIC_RELEASE);
    /* while a sum is still in the post, later operations wait, because they could reuse the post */
    if (work->round == work->rounds && work->mode != DT__MOVE_READ_TO_POST)
        comm->last_moved = work->post;
    return 1;
}

/* Ends a collective that all ranks have closed. */
static int dt__copy_back_sum(dt_work *work) {
    dt_comm *comm = work->comm;
    if (work->mode != DT__MOVE_READ_TO_POST) return 1;
    const char *sum = dt__post_data(dt__post_of(work, comm->base.rank));
    dt_status status =
        dt__comm_copy(comm, &work->call, work->call.recv, sum, dt__call_bytes(&work->call));
    comm->last_moved = work->post;
    return status ? dt__data_failed(comm, &work->call, status), -1 : 1;
}

/* Returns 1 if all ranks have closed the previous round, so that this rank may begin the next one
   or end the collective. The first round begins without this wait, unless it writes to the staging
   buffer, which other ranks may still read for an earlier operation. */
static int dt__may_continue(dt_work *work) {
    int uses_staging = work->mode == DT__MOVE_WINDOWS || work->mode == DT__MOVE_PIPELINE;
    return work->round == 0 && !uses_staging ? 1 : dt__all_reached(work);
}

/* Advances a collective through its states. */
static int dt__shared_collective(dt_work *work) {
    dt_comm *comm = work->comm;
    if (work->state == DT__AWAIT_FREE_POST) {
        int may_post = dt__may_post(work);
        if (may_post <= 0) return may_post;
        if (dt__post_call(work) < 0) return -1;
        work->state = DT__AWAIT_POSTS;
        dt__count_progress(comm->world);
    }
    if (work->state == DT__AWAIT_POSTS) {
        /* data move in the order of the posts, and an earlier operation has not moved its data */
        if (comm->last_moved + 1 != work->post) return 0;
        int all_posted = dt__all_reached(work);
        if (all_posted <= 0) return all_posted;
        if (dt__plan_collective(work) < 0) return -1;
        work->state = DT__AWAIT_ROUND;
        dt__count_progress(comm->world);
    }
    for (;; dt__count_progress(comm->world)) {
        int may_continue = dt__may_continue(work);
        if (may_continue <= 0) return may_continue;
        if (work->round == work->rounds) return dt__copy_back_sum(work);
        if (dt__move_round(work) < 0) return -1;
        if (work->mode == DT__MOVE_INLINE) return 1;
    }
}

static dt__advance_fn dt__shared_choose(dt_comm *comm, const dt__call *call) {
    (void)comm, (void)call;
    return dt__shared_collective;
}

static void dt__shared_begin(dt_work *work) { work->post = ++work->comm->posts_begun; }

static const dt__direct dt__shared_direct = { .choose = dt__shared_choose,
    .begin = dt__shared_begin };

/* ---- collectives with phantom ranks (dt_run_desc.present) ---- */

/* Every other rank of the group gives what this rank gives: so of each rank this rank receives the
   block that it has for itself, and a sum is this rank's block times the number of ranks. In a dry
   run the buffers have no memory, and the kernel table moves nothing. */
static int dt__phantom_collective(dt_work *work) {
    dt_comm *comm = work->comm;
    const dt__call *call = &work->call;
    const dt__pattern *pattern = dt__pattern_of(call->op);
    int n = comm->base.size, me = comm->base.rank, is_v = call->op == DT__ALL_TO_ALL_V;
    size_t size = dt_dtype_size(call->dtype), first = 0, count = call->count;
    if (is_v) first = dt__sum_counts(call->send_counts, me), count = call->send_counts[me];
    if (!is_v && pattern->send_blocks) first = (size_t)me * count;
    /* of a root that is a phantom this rank receives nothing */
    const char *mine = dt__sends(comm, call) ? (const char *)call->send + first * size : NULL;
    dt_status status = dt__staging_make(work, 0) ? DT_OK : dt_error(comm->world->ctx);
    if (status || !mine || !dt__receives(comm, call)) return status ? -1 : 1;
    for (int rank = 0; rank < n && pattern->reduces; rank++) comm->inputs[rank] = mine;
    comm->outputs[0] = call->recv;
    /* the one sum of large arrays in host memory (gradient norms): n additions would take long */
    int is_scaled = call->op == DT__SUM_DOUBLES && dt__is_host_data(work);
    for (size_t i = 0; i < count && is_scaled; i++)
        ((double *)call->recv)[i] = n * ((const double *)(const void *)mine)[i];
    if (pattern->reduces && !is_scaled) status = dt__reduce_inputs(comm, call, 1, n, count, 0);
    char *recv = (char *)call->recv;
    for (int rank = 0; rank < n && !pattern->reduces && !status; rank++) {
        size_t received = is_v && call->recv_counts[rank] < count ? call->recv_counts[rank] : count;
        if (pattern->all_send || rank == call->peer)
            status = dt__comm_copy(comm, call, recv, mine, received * size);
        if (pattern->all_send) recv += (is_v ? call->recv_counts[rank] : count) * size;
    }
    return status ? (dt__data_failed(comm, call, status), -1) : 1;
}

/* Returns 1 if the other rank of a message is a phantom, or any rank. */
static int dt__is_phantom(const dt_comm *comm, int peer) {
    return peer == DT_ANY || dt__local_rank_of(comm->world, comm->group->ranks[peer]) < 0;
}

static int dt__phantom_message(dt_work *work) {
    dt_comm *comm = work->comm;
    const dt__call *call = &work->call;
    size_t bytes = call->count * dt_dtype_size(call->dtype);
    int peer = call->peer == DT_ANY ? 0 : call->peer;
    if (!dt__peer_of(comm->world, comm->group->ranks[peer])) return -1; /* for the memory account */
    if (call->from) *call->from = peer;
    if (call->op == DT__RECV && dt__is_host_data(work)) memset(call->recv, 0, bytes);
    return 1;
}

static dt__advance_fn dt__phantom_choose(dt_comm *comm, const dt__call *call) {
    (void)comm, (void)call;
    return dt__phantom_collective;
}

static void dt__phantom_begin(dt_work *work) { (void)work; }

static const dt__direct dt__phantom_direct = { .choose = dt__phantom_choose,
    .begin = dt__phantom_begin };

int dt_comm_has_phantoms(const dt_comm *comm) {
    return comm && comm->direct == &dt__phantom_direct;
}

// ==== 17. Collective algorithms =================================================================

/* A collective that runs as messages is a function that is called once for each round. The function
   lists the round's messages (dt__add_send, dt__add_recv) and returns 1, or returns 0 if there are
   no more rounds. Then dt__rounds_advance moves the messages. A round begins when the previous
   round is complete, so it may use the data that the previous round received. dt_send and dt_recv
   run in the same way: they have one round and no algorithm.

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

   A large all-reduce over several machines with k ranks each uses rails (hierarchical all-reduce):
   2kP messages, 2 S bytes, where a rank's chunk is divided into P pieces.

   A sum in rank order gives the same bits with every algorithm; partial sums would not. So the
   inputs of all ranks are sent unreduced to one rank and added there. Of the algorithms in the
   table, only the ring sends partial sums, and each of its chunks begins at a different rank. R.
   Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in
   MPICH", 2005, compares the algorithms. */

/* Advances the sends and receives of the round. When all are complete, lets the algorithm begin the
   next round. Returns 1 if there are no more rounds. */
static int dt__rounds_advance(dt_work *work) {
    for (;;) {
        int waiting = 0;
        for (int i = 0; i < work->p2p_count; i++) {
            int done = dt__p2p_advance(&work->p2p_ops[i]);
            if (done < 0) return -1;
            waiting += !done;
        }
        if (waiting > 0) return 0;
        work->p2p_count = 0;
        int more = work->algorithm ? work->algorithm(work) : 0;
        if (dt_error(work->comm->world->ctx)) return -1;
        if (!more) return work->algorithm ? dt__none_left_over(work) : 1;
        work->round++;
    }
}

/* Consecutive elements of a buffer. */
typedef struct dt__span {
    char *at;
    size_t count;
} dt__span;

static dt__span dt__span_of(const dt_work *work, const void *buf, size_t first, size_t count) {
    dt__span span = { (char *)buf + first * dt_dtype_size(work->call.dtype), count };
    return span;
}

/* Returns the i-th of `chunks` chunks of a span. */
static dt__span dt__chunk_of(const dt_work *work, dt__span whole, int chunks, int i) {
    size_t first = dt__chunk_offset(whole.count, chunks, i);
    return dt__span_of(work, whole.at, first, dt__chunk_offset(whole.count, chunks, i + 1) - first);
}

/* Allocates the work's scratch buffer, which has count elements of the call's type. Returns 0 if
   the context has failed. */
static int dt__scratch(dt_work *work, size_t count) {
    work->scratch_count = count;
    work->scratch = work->comm->words; /* if count is 0, any address that is not NULL suffices */
    if (count == 0) return 1;
    work->scratch =
        dt_alloc(work->comm->world->ctx, work->call.host_memory ? DT_MEM_HOST : DT_MEM_COMM,
            count * dt_dtype_size(work->call.dtype), dt__pattern_of(work->call.op)->name);
    return work->scratch != NULL;
}

static void dt__scratch_free(dt_work *work) {
    if (work->scratch && work->scratch_count > 0)
        dt_free(work->comm->world->ctx, work->call.host_memory ? DT_MEM_HOST : DT_MEM_COMM,
            work->scratch, work->scratch_count * dt_dtype_size(work->call.dtype));
    work->scratch = NULL;
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

/* Adds a send or receive to the current round. */
static dt__p2p *dt__add_p2p(dt_work *work, dt__op_code op, int peer, size_t count) {
    dt__p2p *p2p = &work->p2p_ops[work->p2p_count++];
    memset(p2p, 0, sizeof *p2p);
    p2p->work = work;
    p2p->op = op;
    p2p->peer = peer;
    p2p->count = count;
    p2p->tag = dt__collective_tag(work);
    if (op == DT__SEND && work->call.op != DT__CHECK) {
        work->comm->world->traffic.messages++;
        work->comm->world->traffic.bytes += count * dt_dtype_size(work->call.dtype);
    }
    return p2p;
}

static void dt__add_send(dt_work *work, int peer, dt__span data) {
    dt__add_p2p(work, DT__SEND, peer, data.count)->send = data.at;
}
static void dt__add_recv(dt_work *work, int peer, dt__span data) {
    dt__add_p2p(work, DT__RECV, peer, data.count)->recv = data.at;
}

/* Copies within this rank. */
static void dt__copy_local(dt_work *work, void *to, dt__span from) {
    dt_status status = dt__comm_copy(
        work->comm, &work->call, to, from.at, from.count * dt_dtype_size(work->call.dtype));
    if (status) dt__data_failed(work->comm, &work->call, status);
}

/* Reduces the first n of comm->inputs into `out`. */
static void dt__sum_inputs(dt_work *work, dt__span out, int n) {
    work->comm->outputs[0] = out.at;
    dt_status status = dt__reduce_inputs(work->comm, &work->call, 1, n, out.count, 0);
    /* A device's stream orders the sum and the sends that read it. Without a device the next reader
       may be another rank, so the sum must be complete. */
    if (status == DT_OK && !dt__on_device(work)) status = dt__comm_sync(work->comm->world);
    if (status) dt__data_failed(work->comm, &work->call, status);
}

/* Runs all rounds of the algorithm `one`, then all rounds of the algorithm `other`. */
static int dt__two_phases(dt_work *work, dt__round_fn one, dt__round_fn other) {
    if (work->stage == 0) {
        if (one(work)) return 1;
        if (dt_error(work->comm->world->ctx)) return 0;
        work->stage = 1;
        work->round = 0;
    }
    return other(work);
}

/* ---- blocks ---- */

/* Returns block i of a buffer: the data for rank i or from rank i. In an all-reduce, a reduce and a
   broadcast this is chunk i of the buffer; in other operations the buffer has a block of `count`
   elements for each rank or, in an all-to-all-v, of counts[i] elements. */
static dt__span dt__block_of(const dt_work *work, const void *buf, const size_t *counts, int i) {
    const dt__op_code op = work->call.op;
    size_t count = work->call.count;
    if (op == DT__ALL_REDUCE || op == DT__REDUCE || op == DT__BROADCAST)
        return dt__chunk_of(work, dt__span_of(work, buf, 0, count), work->comm->base.size, i);
    if (counts) return dt__span_of(work, buf, dt__sum_counts(counts, i), counts[i]);
    return dt__span_of(work, buf, (size_t)i * count, count);
}

/* Returns the data of a message to or from `rank`. */
typedef dt__span (*dt__span_fn)(const dt_work *work, int rank);

static dt__span dt__send_block(const dt_work *work, int i) {
    return dt__block_of(work, work->call.send, work->call.send_counts, i);
}
static dt__span dt__recv_block(const dt_work *work, int i) {
    return dt__block_of(work, work->call.recv, work->call.recv_counts, i);
}
static dt__span dt__send_all(const dt_work *work) {
    return dt__span_of(work, work->call.send, 0, work->call.count);
}
static dt__span dt__recv_all(const dt_work *work) {
    return dt__span_of(work, work->call.recv, 0, work->call.count);
}

/* Returns this rank's data for rank `to`. */
static dt__span dt__data_for(const dt_work *work, int to) {
    int in_blocks = dt__pattern_of(work->call.op)->send_blocks;
    return in_blocks ? dt__send_block(work, to) : dt__send_all(work);
}
/* Returns where the data from rank `from` belong. */
static dt__span dt__data_from(const dt_work *work, int from) {
    int in_blocks = dt__pattern_of(work->call.op)->all_send;
    return in_blocks ? dt__recv_block(work, from) : dt__recv_all(work);
}

/* Returns where a direct reduce-scatter has rank's input for the block that this rank sums: in the
   scratch buffer, or in send. */
static dt__span dt__input_from(const dt_work *work, int rank) {
    dt__span own = dt__send_block(work, work->comm->base.rank);
    if (rank == work->comm->base.rank) return own;
    return dt__span_of(work, work->scratch, (size_t)rank * own.count, own.count);
}

/* Returns where this rank's block of the result belongs: in recv or, in a reduce on a rank that is
   not the root, in the place in the scratch buffer that dt__input_from does not use. The block is
   the same for every `peer`; with this parameter the function is a dt__span_fn. */
static dt__span dt__own_result(const dt_work *work, int peer) {
    int me = work->comm->base.rank;
    size_t count = dt__send_block(work, me).count;
    (void)peer;
    if (work->call.op == DT__REDUCE_SCATTER) return dt__recv_all(work);
    if (work->call.op == DT__REDUCE && me != work->call.peer)
        return dt__span_of(work, work->scratch, (size_t)me * count, count);
    return dt__recv_block(work, me);
}

/* ---- direct ---- */

/* Returns 1 if rank `from` has data for rank `to`. In an operation with a root, only the root
   sends, or only the root receives; but the first phase of a reduce is a reduce-scatter. */
static int dt__has_data_for(const dt_work *work, int from, int to) {
    const dt__pattern *pattern = dt__pattern_of(work->call.op);
    return (pattern->all_send || from == work->call.peer) &&
           (pattern->all_recv || to == work->call.peer || (pattern->reduces && work->stage == 0));
}

/* Direct algorithms: one round, in which this rank sends out(r) to each rank r and receives into
   in(r) from each rank r, all at once. In step s every rank sends to a different rank, the one s
   places to its right. In step 0 it copies its own data. */
static int dt__exchange_spans(dt_work *work, dt__span_fn out, dt__span_fn in) {
    int n = work->comm->base.size, me = work->comm->base.rank;
    if (work->round > 0) return 0;
    for (int step = 0; step < n; step++) {
        int to = (me + step) % n, from = (me + n - step) % n;
        dt__span sent = out(work, to), received = in(work, from);
        if (step > 0 && dt__has_data_for(work, me, to)) dt__add_send(work, to, sent);
        if (step > 0 && dt__has_data_for(work, from, me)) dt__add_recv(work, from, received);
        if (step > 0 || !dt__has_data_for(work, me, me)) continue;
        if (sent.count != received.count)
            dt__counts_differ(work, me, sent.count, me, received.count, dt__own_site(work).s);
        else
            dt__copy_local(work, received.at, sent);
    }
    return 1;
}

/* Direct all-gather, gather, scatter, all-to-all and broadcast. */
static int dt__direct_exchange(dt_work *work) {
    return dt__exchange_spans(work, dt__data_for, dt__data_from);
}

/* Direct reduce-scatter: an all-to-all into the scratch buffer, then one sum in rank order. */
static int dt__direct_reduce_scatter(dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank;
    size_t count = dt__send_block(work, me).count;
    if (work->round == 0)
        return dt__scratch(work, (size_t)n * count) &&
               dt__exchange_spans(work, dt__send_block, dt__input_from);
    for (int rank = 0; rank < n; rank++) work->comm->inputs[rank] = dt__input_from(work, rank).at;
    if (count) dt__sum_inputs(work, dt__own_result(work, me), n);
    return 0;
}

/* Sends each rank's block of the sum to the other ranks or, in a reduce, to the root. */
static int dt__direct_gather_sums(dt_work *work) {
    return dt__exchange_spans(work, dt__own_result, dt__recv_block);
}

/* Direct all-reduce: a reduce-scatter and an all-gather, in each of which every rank sends to all
   other ranks at once. There are two rounds. Each rank sends 2(N-1) messages, 2(N-1)/N S bytes, and
   sums in rank order. A direct reduce is the same with a gather to the root instead of the
   all-gather: dt__has_data_for leaves out the other messages. */
static int dt__direct_all_reduce(dt_work *work) {
    return dt__two_phases(work, dt__direct_reduce_scatter, dt__direct_gather_sums);
}

/* ---- ring ---- */

/* Ring all-gather: in each round every rank sends to its right neighbour the block that it received
   in the previous round, so that all links are always busy. Each rank sends N-1 messages, (N-1)/N S
   bytes. As a second phase it finds this rank's own block in recv.

       rank:      0      1      2      3            The path of block 0 with N = 4. The other
       round 0    0 ---> 0                          blocks move at the same time, and each
       round 1           0 ---> 0                   block begins at its own rank.
       round 2                  0 ---> 0 */
static int dt__ring_all_gather(dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank;
    int out = (me - work->round + n) % n, in = (me - work->round - 1 + n) % n;
    if (work->round == n - 1) return 0;
    if (work->round == 0 && work->stage == 0)
        dt__copy_local(work, dt__recv_block(work, me).at, dt__send_all(work));
    dt__add_send(work, (me + 1) % n, dt__recv_block(work, out));
    dt__add_recv(work, (me + n - 1) % n, dt__recv_block(work, in));
    return 1;
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
    size_t longest = dt__send_block(work, 0).count;
    if (work->round == 0 && !dt__scratch(work, 2 * longest)) return 0;
    dt__span outgoing = dt__send_block(work, out);
    if (work->round > 0 && outgoing.count > 0) {
        work->comm->inputs[0] = work->scratch;
        work->comm->inputs[1] = outgoing.at;
        outgoing = last ? dt__own_result(work, me)
                        : dt__span_of(work, work->scratch, longest, outgoing.count);
        dt__sum_inputs(work, outgoing, 2);
    }
    if (last) return 0;
    dt__add_send(work, (me + 1) % n, outgoing);
    dt__add_recv(work, (me + n - 1) % n,
        dt__span_of(work, work->scratch, 0, dt__send_block(work, in).count));
    return 1;
}

/* Ring all-reduce: a ring reduce-scatter, then a ring all-gather. In 2(N-1) rounds each rank sends
   2(N-1) messages, 2(N-1)/N S bytes. No algorithm sends fewer bytes, whatever N is (P. Patarasuk
   and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). The
   path of one of the N chunks, with N = 4:

       partial sums    rank 1 ---> rank 2 ---> rank 3 ---> rank 0        dt__ring_reduce_scatter
       the sum         rank 0 ---> rank 1 ---> rank 2 ---> rank 3        dt__ring_all_gather

   The other chunks move at the same time, and each chunk begins one rank further to the right, so
   every link is always busy. Each chunk is summed in a different order, so the last bits of the
   result differ from the results of other algorithms. */
static int dt__ring_all_reduce(dt_work *work) {
    return dt__two_phases(work, dt__ring_reduce_scatter, dt__ring_all_gather);
}

/* Broadcast in the form of van de Geijn: the root scatters its chunks, then a ring all-gather. A
   broadcast has one buffer, so the root sends from recv, which equals send. */
static int dt__scatter_chunks(dt_work *work) {
    return dt__exchange_spans(work, dt__recv_block, dt__own_result);
}
static int dt__ring_broadcast(dt_work *work) {
    return dt__two_phases(work, dt__scatter_chunks, dt__ring_all_gather);
}

/* ---- recursive doubling ---- */

/* Allocates the scratch buffer for `buffers` send buffers and copies this rank's own into it, as
   the first. Returns 0 if the context has failed. */
static int dt__collect_own(dt_work *work, int buffers) {
    if (!dt__scratch(work, (size_t)buffers * work->call.count)) return 0;
    dt__copy_local(work, work->scratch, dt__send_all(work));
    return 1;
}

/* Returns the send buffers i .. i+n-1 of those that the scratch buffer collects. */
static dt__span dt__collected(const dt_work *work, int i, int n) {
    size_t count = work->call.count;
    return dt__span_of(work, work->scratch, (size_t)i * count, (size_t)n * count);
}

/* The scratch buffer holds the send buffers of ranks first, first+1, ... (modulo N). Sums them in
   rank order, or copies them to recv. Returns 0: there are no more rounds. */
static int dt__finish_collected(dt_work *work, int first) {
    int n = work->comm->base.size, reduces = dt__pattern_of(work->call.op)->reduces;
    for (int i = 0; i < n; i++) {
        int rank = (first + i) % n;
        dt__span its = dt__collected(work, i, 1);
        if (reduces)
            work->comm->inputs[rank] = its.at;
        else if (its.count)
            dt__copy_local(work, dt__recv_block(work, rank).at, its);
    }
    if (reduces) dt__sum_inputs(work, dt__recv_all(work), n);
    return 0;
}

/* Recursive doubling, in the form of J. Bruck et al., "Efficient algorithms for all-to-all
   communications", 1997, which works for any N. The scratch buffer collects the send buffers of
   ranks me, me+1, me+2, ...; each round doubles how many of them this rank has. Each rank sends L
   messages. With N = 4, where "0 <- 1" means that rank 0 receives from rank 1:

       round 0    0 <- 1    1 <- 2    2 <- 3    3 <- 0      then has 2 buffers: me, me+1
       round 1    0 <- 2    1 <- 3    2 <- 0    3 <- 1      then has 4 buffers: me .. me+3

   An all-reduce collects all buffers and sums them in rank order. (The usual version adds in each
   round and sends L S bytes, but not in rank order.) It sends (N-1) S bytes, so this algorithm is
   used for small buffers. A barrier sends no bytes. */
static int dt__doubling(dt_work *work) {
    int n = work->comm->base.size, me = work->comm->base.rank, have = 1 << work->round;
    if (work->round == 0 && !dt__collect_own(work, n)) return 0;
    if (have >= n) return dt__finish_collected(work, me);
    int more = have < n - have ? have : n - have;
    dt__add_send(work, (me - have + n) % n, dt__collected(work, 0, more));
    dt__add_recv(work, (me + have) % n, dt__collected(work, have, more));
    return 1;
}

/* ---- binomial trees ---- */

/* v is a rank's number counted from the root, which has v = 0. The root is rank call.peer; in an
   all-reduce this is rank 0. The subtree of v consists of v, v+1, ..., v+b-1, as far as these ranks
   exist, where b is the lowest set bit of v. The subtree of 0 is all ranks. In a gather the data
   climb the tree, from the nearest children first. In a broadcast and a scatter the data descend
   the tree. Each takes L rounds. The rounds of a gather with N = 8:

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

/* Gather or reduce: the scratch buffer collects the send buffers of v's subtree. v receives from
   its children, nearest first, and then sends all it has to its parent. */
static int dt__tree_up(dt_work *work) {
    int n = work->comm->base.size, v = dt__virtual_rank(work), subtree = dt__subtree_size(v, n);
    int distance = 1 << work->round, has_sent = v % distance != 0;
    if (work->round == 0 && !dt__collect_own(work, subtree)) return 0;
    if (has_sent) return 0;
    if (distance >= n) return dt__finish_collected(work, work->call.peer); /* only the root */
    if (v & distance)
        dt__add_send(work, dt__real_rank(work, v - distance), dt__collected(work, 0, subtree));
    else if (v + distance < n)
        dt__add_recv(work, dt__real_rank(work, v + distance),
            dt__collected(work, distance, dt__subtree_size(v + distance, n)));
    return 1;
}

/* Sends data down the tree. The distance of a round's messages halves in each round, and every rank
   that has data sends to the rank at that distance: all of recv, or in a scatter the buffers of
   that rank's subtree. */
static int dt__tree_down(dt_work *work) {
    int n = work->comm->base.size, v = dt__virtual_rank(work), distance = 1;
    while (distance < n) distance *= 2;
    distance >>= work->round + 1;
    if (distance == 0) return 0;
    dt__span in = dt__recv_all(work), out = in;
    if (work->call.op == DT__SCATTER) {
        in = dt__collected(work, 0, dt__subtree_size(v, n));
        out =
            dt__collected(work, distance, v + distance < n ? dt__subtree_size(v + distance, n) : 0);
    }
    if (v % (2 * distance) == distance) dt__add_recv(work, dt__real_rank(work, v - distance), in);
    if (v % (2 * distance) == 0 && v + distance < n)
        dt__add_send(work, dt__real_rank(work, v + distance), out);
    return 1;
}

static int dt__tree_scatter(dt_work *work) {
    int n = work->comm->base.size, v = dt__virtual_rank(work);
    size_t count = work->call.count;
    if (work->round == 0 && !dt__scratch(work, (size_t)dt__subtree_size(v, n) * count)) return 0;
    for (int i = 0; i < n && work->round == 0 && v == 0 && count; i++)
        dt__copy_local(
            work, dt__collected(work, i, 1).at, dt__send_block(work, dt__real_rank(work, i)));
    if (dt__tree_down(work)) return 1;
    if (count) dt__copy_local(work, work->call.recv, dt__collected(work, 0, 1));
    return 0;
}

/* Tree all-reduce: a reduce to the root up a binomial tree (drawn above dt__virtual_rank), then a
   broadcast down. The inputs climb the tree unreduced, and the root sums them in rank order. The
   busiest rank sends L messages, (L-1+N/2) S bytes: up one message with N/2 inputs, down L-1
   messages. N, S and L are defined at the head of section 17. */
static int dt__tree_all_reduce(dt_work *work) {
    return dt__two_phases(work, dt__tree_up, dt__tree_down);
}

/* ---- rails: hierarchical all-reduce ---- */

/* Hierarchical all-reduce (rails) of large buffers, on M machines with k ranks each. The ranks of a
   machine are neighbours in the group; k is dt_comm.ranks_per_node. Between ranks of one machine
   messages go through shared memory (section 15), so the messages that leave a machine are the
   bottleneck. S is the size of the buffer in bytes, and N = kM. In a ring all-gather (N-1)/N S
   bytes leave each machine, because the ring leaves each machine once. In a direct all-reduce
   2k(N-k)/N S would leave each machine. With rails 2 S leave a machine, but only S leave the first
   and the last machine.

   The buffer is divided into k chunks. The j-th ranks of all machines form rail j. Rail j sums
   chunk j from machine 0 up to machine M-1, and sends the sum down again. It does so in P pieces:

                     partial    complete
                     sums up    sums down
       machine M-1      ^          |         adds its k inputs: the sum is complete
          ...           |          |
       machine 1        |          |         adds its k inputs, in rank order
       machine 0        |          v         adds its k inputs

   In round t a rank with `above` machines above its own machine

       receives piece t of its machine's inputs, and from the machine below the sum of piece t over
       all machines below;
       sends up the sum of piece up = t-1, to which it has just added its machine's inputs in rank
       order (on the last machine this is the complete sum);
       receives from the machine above the complete sum of piece down+1;
       sends the complete sum of piece down = up - 2 above to the other ranks of its machine, and
       down.

   All links are busy in both directions, and the all-reduce takes about P + 2 M rounds. A rank
   sends 2kP messages, 2 S bytes. A piece on its way is kept at the place in recv where its sum will
   be. */

/* Size of the largest piece, in bytes. The piece fits in a cache, but is so large that the fixed
   cost of a round is less than the cost of moving the bytes. */
#ifndef DT__RAIL_BYTES
#define DT__RAIL_BYTES DT_WINDOW_BYTES
#endif

static int dt__rail_pieces(const dt_work *work) {
    size_t longest = dt__chunk_offset(work->call.count, work->comm->ranks_per_node, 1) *
                     dt_dtype_size(work->call.dtype);
    return (int)((longest + DT__RAIL_BYTES - 1) / DT__RAIL_BYTES);
}

/* Returns piece p of chunk i of the buffer buf. */
static dt__span dt__rail_piece(const dt_work *work, const void *buf, int i, int p) {
    dt__span whole = dt__span_of(work, buf, 0, work->call.count);
    dt__span chunk = dt__chunk_of(work, whole, work->comm->ranks_per_node, i);
    return dt__chunk_of(work, chunk, dt__rail_pieces(work), p);
}

/* Sends or receives piece p of chunk i of the buffer buf, if that piece exists. */
static void dt__rail_add(dt_work *work, dt__op_code op, int peer, const void *buf, int i, int p) {
    if (p < 0 || p >= dt__rail_pieces(work)) return;
    (op == DT__SEND ? dt__add_send : dt__add_recv)(work, peer, dt__rail_piece(work, buf, i, p));
}

/* Returns where the scratch buffer has the input of this machine's j-th rank for piece p of this
   rank's chunk. If j is this rank itself: the sum from the machine below. */
static dt__span dt__rail_input(const dt_work *work, int j, int p) {
    size_t longest = dt__rail_piece(work, NULL, 0, 0).count;
    int own = work->comm->base.rank % work->comm->ranks_per_node;
    return dt__span_of(
        work, work->scratch, (size_t)j * longest, dt__rail_piece(work, NULL, own, p).count);
}

static void dt__rail_sum(dt_work *work, int p) {
    dt_comm *comm = work->comm;
    int k = comm->ranks_per_node, own = comm->base.rank % k, n = 0;
    if (comm->base.rank >= k) comm->inputs[n++] = dt__rail_input(work, own, p).at;
    for (int j = 0; j < k; j++)
        comm->inputs[n++] = j == own ? dt__rail_piece(work, work->call.send, own, p).at
                                     : dt__rail_input(work, j, p).at;
    dt__sum_inputs(work, dt__rail_piece(work, work->call.recv, own, p), n);
}

static int dt__rails_all_reduce(dt_work *work) {
    int k = work->comm->ranks_per_node, me = work->comm->base.rank, own = me % k, first = me - own;
    int above = work->comm->base.size / k - 1 - me / k, pieces = dt__rail_pieces(work);
    int t = work->round, up = t - 1, down = up - 2 * above;
    const void *send = work->call.send, *recv = work->call.recv;
    if (t == 0 && !dt__scratch(work, (size_t)k * dt__rail_piece(work, NULL, 0, 0).count)) return 0;
    if (up >= 0 && up < pieces) dt__rail_sum(work, up);
    if (down == pieces) return 0;
    for (int step = 1; step < k; step++) {
        int to = (own + step) % k, from = (own + k - step) % k;
        dt__rail_add(work, DT__SEND, first + to, send, to, t);
        if (t < pieces) dt__add_recv(work, first + from, dt__rail_input(work, from, t));
        dt__rail_add(work, DT__SEND, first + to, recv, own, down);
        dt__rail_add(work, DT__RECV, first + from, recv, from, down);
    }
    if (first > 0) {
        if (t < pieces) dt__add_recv(work, me - k, dt__rail_input(work, own, t));
        dt__rail_add(work, DT__SEND, me - k, recv, own, down);
    }
    if (above > 0) {
        dt__rail_add(work, DT__SEND, me + k, recv, own, up);
        dt__rail_add(work, DT__RECV, me + k, recv, own, down + 1);
    }
    return 1;
}

/* ---- choosing an algorithm ---- */

/* Returns the function that runs `algorithm` for this call, or NULL if there is none. */
static dt__round_fn dt__algorithm_of(const dt__call *call, dt_algorithm algorithm) {
    static const dt__round_fn rows[][DT_ALGORITHMS] = {
        /* columns: dt_algorithm (auto, direct, ring, doubling, tree); rows: dt__op_code */
        /* all-reduce */
        { NULL, dt__direct_all_reduce, dt__ring_all_reduce, dt__doubling, dt__tree_all_reduce },
        { NULL, dt__direct_all_reduce, NULL, NULL, dt__tree_up },               /* reduce */
        { NULL, dt__direct_reduce_scatter, dt__ring_reduce_scatter },           /* reduce-scatter */
        { NULL, dt__direct_exchange, dt__ring_all_gather, dt__doubling },       /* all-gather */
        { NULL, dt__direct_exchange, NULL, NULL, dt__tree_up },                 /* gather */
        { NULL, dt__direct_exchange, NULL, NULL, dt__tree_scatter },            /* scatter */
        { NULL, dt__direct_exchange },                                          /* all-to-all */
        { NULL, dt__direct_exchange },                                          /* all-to-all-v */
        { NULL, dt__direct_exchange, dt__ring_broadcast, NULL, dt__tree_down }, /* broadcast */
    };
    if (call->op > DT__BROADCAST) return algorithm == DT_DOUBLING ? dt__doubling : NULL;
    /* an average of averages is not the average */
    if (algorithm == DT_RING && call->redop == DT_AVG) return NULL;
    return rows[call->op][algorithm];
}

/* Returns 1 if the call is a large all-reduce of a group with rails. Rails send partial sums in the
   type of the buffer. So bf16 and f16, which are rounded only at the end, and averages, which are
   divided only at the end, do not use rails. */
static int dt__use_rails(const dt_comm *comm, const dt__call *call) {
    return comm->ranks_per_node > 0 && call->op == DT__ALL_REDUCE && call->redop != DT_AVG &&
           !dt__narrow(call->dtype) &&
           dt__call_bytes(call) >= (size_t)comm->ranks_per_node * DT__RAIL_BYTES;
}

/* Doubling and trees send few messages, but collect the buffers of up to all ranks on one rank. If
   these have more than this many bytes together, the bytes cost more than the saved messages. */
enum { DT__COLLECT_BYTES = 32768 };

/* Chooses an algorithm when there is no shared memory: one with few messages for small buffers, one
   with few bytes for large buffers. Never chooses a ring for a reduction, because the ring sums in
   another order. */
static dt__round_fn dt__algorithm_by_size(const dt_comm *comm, const dt__call *call) {
    if (dt__use_rails(comm, call)) return dt__rails_all_reduce;
    int is_small = dt__call_bytes(call) * (size_t)comm->base.size <= DT__COLLECT_BYTES;
    int has_ring = call->op == DT__ALL_GATHER || call->op == DT__BROADCAST;
    dt_algorithm for_small = dt__is_rooted(call->op) ? DT_TREE : DT_DOUBLING;
    dt_algorithm for_large = has_ring ? DT_RING : DT_DIRECT;
    dt__round_fn chosen = dt__algorithm_of(call, is_small ? for_small : for_large);
    if (!chosen) chosen = dt__algorithm_of(call, DT_DIRECT);
    return chosen ? chosen : dt__algorithm_of(call, DT_DOUBLING); /* barriers and scalars */
}

// ==== 18. Begin, wait, end ======================================================================

/* The life of an operation:

       begin       validates the call, numbers, describes and records it, chooses how it runs
       advance     moves its data as far as possible without waiting; waits and dt_test call it
                   repeatedly, and so does dt between kernels (dt__on_kernel_done)
       end         counts its bytes and recycles its work object

   The three are the entries of a call table. A blocking call is a start and a wait in one:
   dt__op_run does all three; a nonblocking operation begins in dt__op_start and ends in dt_wait.
   The public functions at the end of the section only fill in a dt__call. */

/* Completes a collective of a group of one. A broadcast and a barrier do nothing; every other
   collective copies send to recv. */
static void dt__single_rank_collective(dt_work *work) {
    const dt__call *call = &work->call;
    if (call->op == DT__ALL_TO_ALL_V && call->send_counts[0] != call->recv_counts[0])
        dt__counts_differ(
            work, 0, call->send_counts[0], 0, call->recv_counts[0], dt__own_site(work).s);
    else if (call->op != DT__BROADCAST && call->op != DT__BARRIER)
        dt__copy_local(work, call->recv, dt__send_block(work, 0));
    work->completion = DT__COMPLETED;
}

/* Returns the call site of the operation that begins now. */
static dt_site dt__site_now(const dt_ctx *ctx) {
    return ctx->site.file ? ctx->site : ctx->next_site;
}

static dt_work *dt__work_acquire(dt_comm *comm, const dt__call *call) {
    dt__world *world = comm->world;
    dt_work *work = world->free_works.last;
    int is_new = !work;
    if (is_new)
        work = (dt_work *)dt_alloc(world->ctx, DT_MEM_HOST, sizeof *work, "dt_work");
    else
        dt__list_remove(&world->free_works, work);
    if (!work) return NULL;
    memset(work, 0, is_new ? sizeof *work : offsetof(dt_work, p2p_ops));
    work->comm = comm;
    work->call = *call;
    work->axis = comm->axis;
    work->site = dt__site_now(world->ctx);
    /* which object a later send or receive gets depends on time: each has memory for it */
    if (dt__p2p_reserve(work, 1)) return work;
    work->comm = NULL;
    dt__list_append(&world->free_works, work);
    return NULL;
}

/* Puts a work on the free list. Ends its transfers and frees its buffers. */
static void dt__work_release(dt_work *work) {
    dt__world *world = work->comm->world;
    for (int i = 0; i < work->p2p_count; i++)
        if (work->p2p_ops[i].state != DT__P2P_FINISHED) dt__p2p_cancel(&work->p2p_ops[i]);
    dt__scratch_free(work);
    if (work->check) dt__work_release(work->check);
    if (work->call.op == DT__CHECK) /* dt__check_make has allocated its frames */
        dt_free(world->ctx, DT_MEM_HOST, (void *)work->call.send,
            (size_t)(work->comm->base.size + 1) * dt__call_bytes(&work->call));
    work->p2p_count = 0;
    work->comm = NULL;
    dt__list_append(&world->free_works, work);
}

/* ---- comparing calls over a transport ---- */

/* Each message carries the frame of its call, which its receiver compares with its own. This finds
   different calls, but a rank that only sends may have completed its own by then. So in the first
   steps, in which most programming errors show, the ranks compare each collective before it runs,
   as they do in shared memory: the operation DT__CHECK gathers the frames of all ranks on all
   ranks. */
enum {
    DT__CHECK_STEPS = 100,
    DT__CHECK_CALLS = 10000, /* the limit for programs without steps: calls on a group */
    DT__CHECK_RANKS = 16     /* larger groups do not compare the counts of an all-to-all-v */
};

static int dt__is_compared(const dt_comm *comm) {
    const dt__world *world = comm->world;
    int is_early = world->state->step < DT__CHECK_STEPS && comm->seq < DT__CHECK_CALLS;
    if (dt_comm_has_phantoms(comm)) return 0;
    return (world->transport.send || !comm->group->members) &&
           (world->check ? world->check > 0 : is_early);
}

static const dt__frame *dt__checked_call(const dt_work *work, int rank) {
    const dt__call *check = &work->check->call;
    return (const dt__frame *)(void *)((char *)check->recv + (size_t)rank * dt__call_bytes(check));
}

/* Makes work->check. If memory runs out, the context fails. In groups of up to DT__CHECK_RANKS
   ranks two arrays follow each frame: the N counts that the rank sends in an all-to-all-v, and the
   N counts that it expects. Every rank of such a group sends its frame directly to every other
   rank, so that a rank waits for exactly the ranks that have not arrived. */
static void dt__check_make(dt_work *work) {
    dt_comm *comm = work->comm;
    size_t n = (size_t)comm->base.size, counted = n <= DT__CHECK_RANKS ? n : 0;
    size_t each = sizeof(dt__frame) + 2 * counted * sizeof(uint64_t);
    dt__call call = dt__call_make(DT__CHECK, NULL, NULL, each / sizeof(int32_t), DT_I32);
    call.host_memory = 1;
    call.seq = work->call.seq;
    dt_work *check = work->check = dt__work_acquire(comm, &call);
    if (!check) return;
    dt__frame *own = (dt__frame *)dt_alloc(
        comm->world->ctx, DT_MEM_HOST, (n + 1) * each, "a comparison of calls");
    check->call.send = own;
    if (!own) return;
    check->call.recv = (char *)own + each;
    check->advance = dt__rounds_advance;
    check->algorithm = counted ? dt__direct_exchange : dt__doubling;
    check->checked_work = work;
    dt__p2p_reserve(check, 2 * comm->base.size);
    memset(own, 0, each);
    *own = work->frame;
    uint64_t *counts = (uint64_t *)(void *)(own + 1);
    for (size_t i = 0; i < counted && work->call.op == DT__ALL_TO_ALL_V; i++) {
        counts[i] = work->call.send_counts[i];
        counts[n + i] = work->call.recv_counts[i];
    }
}

/* Checks that in an all-to-all-v each rank sends the counts that the receivers expect. All ranks
   search in the same order, so they report the same two ranks. Returns 1, or -1 if the context has
   failed. */
static int dt__check_counts(dt_work *work) {
    int n = work->comm->base.size;
    if (work->call.op != DT__ALL_TO_ALL_V || n > DT__CHECK_RANKS) return 1;
    for (int pair = 0; pair < n * n; pair++) {
        int from = pair / n, to = pair % n;
        const dt__frame *its = dt__checked_call(work, from), *theirs = dt__checked_call(work, to);
        uint64_t sent = ((const uint64_t *)(const void *)(its + 1))[to],
                 expected = ((const uint64_t *)(const void *)(theirs + 1))[n + from];
        if (sent == expected) continue;
        dt__counts_differ(work, from, (size_t)sent, to, (size_t)expected, dt__frame_site(theirs).s);
        return -1;
    }
    return 1;
}

/* Advances work->check. Returns 1 if all ranks make the same call, 0 if a frame is still missing,
   -1 if the context has failed. */
static int dt__check_advance(dt_work *work) {
    int done = dt__rounds_advance(work->check);
    if (done <= 0) return done;
    if (dt__compare_calls(work, dt__checked_call) < 0 || dt__check_counts(work) < 0) return -1;
    dt__work_release(work->check);
    work->check = NULL;
    dt__count_progress(work->comm->world);
    return 1;
}

/* Numbers, describes and records the operation, and chooses how it runs: at once (a group of one
   rank), without messages (comm->direct) or as messages. Returns 0 if the context has failed. */
static int dt__work_begin(dt_work *work) {
    dt_comm *comm = work->comm;
    const dt__call *call = &work->call;
    int is_p2p = dt__is_p2p(call->op), is_single = !is_p2p && comm->base.size == 1;
    if (!is_p2p) work->call.seq = ++comm->seq;
    dt__describe(work);
    if (is_p2p && dt_comm_has_phantoms(comm) && dt__is_phantom(comm, call->peer))
        work->advance = dt__phantom_message;
    if (!is_p2p && !is_single) {
        if (comm->algorithm != DT_ALGORITHM_AUTO)
            work->algorithm = dt__algorithm_of(call, comm->algorithm);
        if (!work->algorithm && comm->direct) work->advance = comm->direct->choose(comm, call);
    }
    int without_messages = work->advance != NULL;
    if (dt_error(comm->world->ctx)) return 0;
    if (without_messages && !is_p2p) comm->direct->begin(work);
    dt__record_make(work);
    if (is_single) {
        dt__single_rank_collective(work);
        return 1;
    }
    /* ranks that share memory compare their calls by their posts, if their group has any */
    int compares_posts = without_messages && comm->group->members;
    if (!is_p2p && !compares_posts && dt__is_compared(comm)) dt__check_make(work);
    if (!without_messages) {
        if (!is_p2p && !work->algorithm) work->algorithm = dt__algorithm_by_size(comm, call);
        work->advance = dt__rounds_advance;
        dt__p2p_reserve(work, is_p2p ? 1 : 2 * comm->base.size);
    }
    return dt_error(comm->world->ctx) == DT_OK;
}

/* ---- operations that a device completes ---- */

/* A backend may enqueue an operation on a device and record an event after it
   (dt_kernels.event_record). For the host the operation is then complete: dt_wait makes the rank's
   stream wait for the event and returns. A second dt_work object, called a device operation, stands
   for the part that the device still has to do; it is complete when the device has reached the
   event. A wait for a device has no timeout. So before the host waits for the device, it waits for
   all device operations through the progress engine (section 12), which has a timeout. */

static int dt__device_op_poll(dt_work *work) {
    dt_comm *comm = work->comm;
    dt__op_record r;
    int passed = dt_ctx_kernels(comm->world->ctx)->event_query(work->device_event);
    if (passed < 0) return dt__data_failed(comm, &work->call, DT_ERR_DEVICE), -1;
    if (passed == 0 && comm->direct && comm->direct->check_device) comm->direct->check_device(work);
    int rank = passed == 0 && !dt_error(comm->world->ctx) ? dt__first_not_begun(work) : DT_ANY;
    dt__rank_view seen = dt__view_of_rank(comm->world, rank);
    /* if its last operation was on another group, it may have begun this one before */
    if (rank != DT_ANY && dt__has_ended(comm->world, rank) &&
        dt__record_get(seen, (uint64_t)seen.state->op_count, &r) &&
        r.call.channel == comm->group->channel)
        dt__ended_without(work, rank);
    return dt_error(comm->world->ctx) ? -1 : passed;
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
    device_op->in_library = 1;
    device_op->advance = dt__device_op_poll;
    device_op->frame = work->frame;
    device_op->site = work->site; /* dt__work_acquire has taken the site of the current call */
    dt__list_append(&world->device_ops, device_op);
}

static void dt__device_op_release(dt__world *world) {
    dt_work *device_op = world->device_ops.first;
    dt__list_remove(&world->device_ops, device_op);
    dt__work_release(device_op);
}

/* Calls `step` through the progress engine, until NCCL has made or ended a communicator. The wait
   belongs to no call of the user. Error texts name dt_comm_split, which makes communicators. */
static void dt__library_wait(dt_comm *comm, struct dt__nccl_channel *channel, dt__advance_fn step) {
    dt__world *world = comm->world;
    dt__call call = dt__call_make(DT__SPLIT, NULL, NULL, 0, DT_I32);
    call.host_memory = 1;
    dt_work *work = dt_error(world->ctx) ? NULL : dt__work_acquire(comm, &call);
    if (!work) return;
    work->nccl_channel = channel;
    work->in_library = 1;
    work->advance = step;
    work->record_number = (uint64_t)world->state->op_count;
    dt__wait_work(world, work);
    dt__work_release(work);
}

/* The drain function of this rank's dt_listener, called when the host is about to wait for the
   device without a timeout. Waits until all device operations are complete, or until the context
   has failed and the backend has ended them. Nonblocking operations that have no dt_wait yet may
   stay pending, because other ranks may not have called them yet; if `all` is set, this function
   waits for them too. Returns 0 if a pending NCCL operation may still make the device wait, else
   1. */
static int dt__on_drain(dt_ctx *ctx, int all, void *user) {
    dt__world *world = (dt__world *)user;
    for (dt_work *w = all ? world->started.first : NULL; w && dt_error(ctx) == DT_OK; w = w->next) {
        if (dt__wait_work(world, w) == DT_OK && w->on_device) dt__device_op_track(world, w);
        w->on_device = 0;
    }
    while (world->device_ops.first) {
        if (dt_error(ctx) == DT_OK) dt__wait_work(world, world->device_ops.first);
        dt__device_op_release(world);
    }
    for (const dt_work *w = world->nccl && dt_error(ctx) == DT_OK ? world->started.first : NULL; w;
         w = w->next)
        if (w->completion != DT__COMPLETED ||
            (w->on_device && dt_ctx_kernels(ctx)->event_query(w->device_event) == 0))
            return 0;
    return 1;
}

/* Fails the context because of a wrong argument; "" stands for an unknown type. A function of its
   own, so that its texts take no space on the stack of calls that succeed. */
__attribute__((noinline, cold)) static void dt__refuse_call(
    dt_comm *comm, const dt__call *call, const char *wrong) {
    dt__world *world = comm->world;
    dt__text why = dt__format("%s", wrong);
    dt_site site = dt__site_now(world->ctx);
    if (!wrong[0])
        dt__put(&why, "%d is no element type", (int)call->dtype);
    else if (!dt__has_valid_peer(comm, call))
        dt__put(&why, ": %d of %d", call->peer, comm->base.size);
    dt__comm_fail(world, wrong[0] ? DT_ERR_ARG : DT_ERR_UNSUPPORTED, "%s on %s%s: %s",
        dt__call_text(call).s, comm->group->name, dt__site_text(site.file, site.line).s, why.s);
}

/* Begins any operation; the `begin` of the innermost call table. */
static dt_work *dt__op_begin(dt_comm *comm, const dt__call *call) {
    dt__world *world = comm->world;
    if (dt_error(world->ctx)) return NULL;
    dt__poll_transport(world);
    if (dt__aborted(world->shared)) return dt__peer_failed(world), (dt_work *)NULL;
    while (world->device_ops.first &&
           dt_ctx_kernels(world->ctx)->event_query(world->device_ops.first->device_event) > 0)
        dt__device_op_release(world);
    int is_typed = dt_dtype_size(call->dtype) > 0;
    const char *wrong = is_typed ? dt__argument_error(comm, call) : "";
    if (wrong) dt__refuse_call(comm, call, wrong);
    dt_work *work = dt_error(world->ctx) ? NULL : dt__work_acquire(comm, call);
    if (!work) return NULL;
    if (dt__beyond_kernels(comm, call->send) || dt__beyond_kernels(comm, call->recv))
        work->call.host_memory = 1;
    /* Empty buffers are not accessed, but they get a valid address, because NULL + 0 is undefined
       in C. */
    if (call->op != DT__ALL_TO_ALL_V && call->count == 0)
        work->call.send = work->call.recv = comm->words;
    /* small calls are timed only if they wait, because reading the clock takes half as long as they
       do */
    work->start_time = dt__call_bytes(call) > DT_EAGER_BYTES || world->clock ? dt__time(world) : -1;
    if (!dt__work_begin(work)) {
        dt__work_release(work);
        return NULL;
    }
    if (!dt__is_p2p(call->op)) return work;
    dt__p2p *p2p = dt__add_p2p(work, call->op, call->peer, call->count);
    p2p->tag = call->tag;
    p2p->send = work->call.send;
    p2p->recv = work->call.recv;
    return work;
}

/* Ends an operation: counts its bytes if it succeeded, and recycles its work; the `end` of the
   innermost call table. Returns the context's status. */
static dt_status dt__op_end(dt_work *work) {
    dt__world *world = work->comm->world;
    if (dt_error(world->ctx) == DT_OK)
        world->bytes[1 + (int)work->axis] += dt__sent_bytes(work->comm, &work->call);
    else
        dt__await_access_end(world);
    if (dt_error(world->ctx) == DT_OK && work->on_device) dt__device_op_track(world, work);
    dt__work_release(work);
    return dt_error(world->ctx);
}

static const dt__call_table dt__plain_calls = {
    .begin = dt__op_begin, .advance = dt__work_advance, .end = dt__op_end
};

/* Counts the time since `begin`, which a call has spent in this operation. */
static void dt__count_seconds(dt__world *world, dt_work *work, double begin) {
    work->return_time = dt__time(world);
    world->seconds += work->return_time - begin;
    __atomic_store_n(
        &world->state->last_op_end_us, (int64_t)(work->return_time * 1e6), __ATOMIC_RELAXED);
}

/* Runs a blocking operation. Returns its status. */
static dt_status dt__op_run(dt_comm *comm, dt__call call) {
    if (!comm) return dt__call_without_comm(&call);
    dt__world *world = comm->world;
    /* world->calls is dt__plain_calls, or a table of section 20 around it */
    dt_work *work = world->calls->begin(comm, &call);
    if (!work) return dt_error(world->ctx);
    world->blocking = work; /* dt__works_recycle releases it if pthread_cancel ends the thread */
    dt__wait_work(world, work);
    world->blocking = NULL;
    if (work->start_time >= 0) dt__count_seconds(world, work, work->start_time);
    dt_ctx_here(world->ctx, NULL, 0); /* the next call has no call site unless its macro sets one */
    return world->calls->end(work);
}

static void dt__started_remove(dt__world *world, dt_work *work) {
    if (world->first_unfinished == work) world->first_unfinished = work->next;
    dt__list_remove(&world->started, work);
}

/* Starts a nonblocking operation. Returns its work; NULL if the context has failed or comm is NULL.
   Without a comm a wrong argument remains unreported, because there is no context to fail. */
static dt_work *dt__op_start(dt_comm *comm, dt__call call) {
    if (!comm) {
        dt__call_without_comm(&call);
        return NULL;
    }
    dt__world *world = comm->world;
    double begin = dt__time(world);
    dt_work *work = world->calls->begin(comm, &call);
    if (!work) return NULL;
    work->start_time = begin;
    work->is_started = 1;
    dt__list_append(&world->started, work);
    if (!world->first_unfinished) world->first_unfinished = work;
    /* advance it at once, so that messages leave in the order of the starts */
    if (!dt__advance_some(world)) dt__advance(work);
    world->seconds += dt__time(world) - begin;
    dt_ctx_here(world->ctx, NULL, 0);
    return work;
}

dt_status dt_wait(dt_ctx *ctx, dt_work *work) {
    dt__world *world = dt__world_of(ctx);
    if (!world || !work) return dt_error(ctx);
    if (!work->comm) return dt_fail(ctx, DT_ERR_ARG, "dt_wait: this operation has been waited for");
    work->wait_time = dt__time(world);
    if (dt_error(ctx) == DT_OK) dt__wait_work(world, work);
    dt__count_seconds(world, work, work->wait_time);
    dt__started_remove(world, work);
    return world->calls->end(work);
}

dt_status dt_wait_idle(dt_ctx *ctx, dt_work *work) {
    if (work) work->is_idle = 1;
    return dt_wait(ctx, work);
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

/* Defines `name`, which runs the call with these fields, and name_start, which starts it. The
   parentheses keep the macros of section 7, which add the call site, from expanding. */
#define DT__DEFINE(name, parameters, ...) \
    dt_status(name) parameters { \
        dt__call call = { __VA_ARGS__ }; \
        return dt__op_run(comm, call); \
    } \
    dt_work *(name##_start)parameters { \
        dt__call call = { __VA_ARGS__ }; \
        return dt__op_start(comm, call); \
    }

DT__DEFINE(dt_all_reduce,
    (dt_comm * comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op),
    .op = DT__ALL_REDUCE, .dtype = dtype, .redop = op, .count = count, .send = send, .recv = recv)
DT__DEFINE(dt_reduce,
    (dt_comm * comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op,
        int root),
    .op = DT__REDUCE, .dtype = dtype, .redop = op, .peer = root, .count = count, .send = send,
    .recv = recv)
DT__DEFINE(dt_reduce_scatter,
    (dt_comm * comm, const void *send, void *recv, size_t count, dt_dtype dtype, dt_op op),
    .op = DT__REDUCE_SCATTER, .dtype = dtype, .redop = op, .count = count, .send = send,
    .recv = recv)
DT__DEFINE(dt_all_gather,
    (dt_comm * comm, const void *send, void *recv, size_t count, dt_dtype dtype),
    .op = DT__ALL_GATHER, .dtype = dtype, .count = count, .send = send, .recv = recv)
DT__DEFINE(dt_gather,
    (dt_comm * comm, const void *send, void *recv, size_t count, dt_dtype dtype, int root),
    .op = DT__GATHER, .dtype = dtype, .peer = root, .count = count, .send = send, .recv = recv)
DT__DEFINE(dt_scatter,
    (dt_comm * comm, const void *send, void *recv, size_t count, dt_dtype dtype, int root),
    .op = DT__SCATTER, .dtype = dtype, .peer = root, .count = count, .send = send, .recv = recv)
DT__DEFINE(dt_all_to_all,
    (dt_comm * comm, const void *send, void *recv, size_t count, dt_dtype dtype),
    .op = DT__ALL_TO_ALL, .dtype = dtype, .count = count, .send = send, .recv = recv)
DT__DEFINE(dt_all_to_all_v,
    (dt_comm * comm, const void *send, const size_t *send_counts, void *recv,
        const size_t *recv_counts, dt_dtype dtype),
    .op = DT__ALL_TO_ALL_V, .dtype = dtype, .send = send, .recv = recv, .send_counts = send_counts,
    .recv_counts = recv_counts)
DT__DEFINE(dt_broadcast, (dt_comm * comm, void *buf, size_t count, dt_dtype dtype, int root),
    .op = DT__BROADCAST, .dtype = dtype, .peer = root, .count = count, .send = buf, .recv = buf)
DT__DEFINE(dt_barrier, (dt_comm * comm), .op = DT__BARRIER, .dtype = DT_F32)
DT__DEFINE(dt_send,
    (dt_comm * comm, const void *buf, size_t count, dt_dtype dtype, int to, int tag),
    .op = DT__SEND, .dtype = dtype, .peer = to, .tag = tag, .count = count, .send = buf)
DT__DEFINE(dt_recv, (dt_comm * comm, void *buf, size_t count, dt_dtype dtype, int from, int tag),
    .op = DT__RECV, .dtype = dtype, .peer = from, .tag = tag, .count = count, .recv = buf)
DT__DEFINE(dt_recv_any,
    (dt_comm * comm, void *buf, size_t count, dt_dtype dtype, int tag, int *from), .op = DT__RECV,
    .dtype = dtype, .peer = DT_ANY, .tag = tag, .count = count, .recv = buf, .any_source = 1,
    .from = from)
#undef DT__DEFINE

static dt_status dt__transfers_run(dt_comm *comm, const dt_transfer *transfers, int n) {
    dt__world *world = comm->world;
    dt_work *before = world->started.last;
    dt_site site = dt__site_now(world->ctx);
    if (n < 0 || (n > 0 && !transfers))
        return dt__comm_fail(world, DT_ERR_ARG, "dt_exchange on %s%s: %d transfers%s",
            comm->group->name, dt__site_text(site.file, site.line).s, n,
            n < 0 ? "" : ", which are NULL");
    for (int i = 0; i < n && dt_error(world->ctx) == DT_OK; i++) {
        const dt_transfer *t = &transfers[i];
        if (t->send && t->recv)
            dt__comm_fail(world, DT_ERR_ARG, "dt_exchange: transfer %d both sends and receives", i);
        else if (t->recv)
            (dt_recv_start)(comm, t->recv, t->count, t->dtype, t->peer, t->tag);
        else
            (dt_send_start)(comm, t->send, t->count, t->dtype, t->peer, t->tag);
    }
    while (world->started.last != before)
        dt_wait(world->ctx, before ? before->next : world->started.first);
    return dt_error(world->ctx);
}

dt_status(dt_exchange)(dt_comm *comm, const dt_transfer *transfers, int n) {
    if (!comm) return n != 0 ? DT_ERR_ARG : DT_OK;
    dt_site outer = dt__site_open(comm->world->ctx);
    dt_status status = dt__transfers_run(comm, transfers, n);
    dt__site_close(comm->world->ctx, outer);
    return status;
}

// ==== 19. Hang diagnosis and deadlock detection =================================================

/* A deadlock is proved from the progress counters (section 11), at once and without a timeout. The
   wait-for graph only explains a hang in the error texts. It has one edge from each waiting rank to
   the rank it waits for.

       rank 0 --recv--> rank 1 --recv--> rank 2           After the proof of a deadlock the text
         ^                                  |             lists the waits of the cycle, if there
         +--------------recv----------------+             is one.

       rank 0 --all-reduce--> rank 2 --recv--> rank 3     After a timeout the text follows the path
                                               (state T)  to the culprit: rank 3 does not wait; its
                                                          process is stopped (/proc shows T).

   Every rank publishes its state (section 11): in shared memory, and in wait reports to the ranks
   that share no memory with it. The states are read by the deadlock proof, by the texts of both
   errors and by the table of dt_ranks_text. Read dt__detect_deadlock first. */

/* Returns the operation that must finish before `work` can. Collectives in shared memory finish in
   the order in which they began on the group, so this is the group's oldest unfinished one. Returns
   `work` itself if it runs as messages or is the oldest. */
static dt_work *dt__group_queue_head(dt_work *work) {
    for (dt_work *w = work->comm->world->first_unfinished; w && work->post > 0; w = w->next)
        if (w->comm == work->comm && w->completion != DT__COMPLETED &&
            w->post == work->comm->last_moved + 1)
            return w;
    return work;
}

/* Returns the world rank of the first member that is not known to have begun the collective for
   which this rank's device waits; DT_ANY if all members have. A rank that waits in a collective has
   begun all earlier ones of the group. */
static int dt__first_not_begun(const dt_work *work) {
    const dt_comm *comm = work->comm;
    dt__op_record r;
    for (int i = 0; i < comm->base.size && !dt__is_p2p(work->call.op); i++) {
        int rank = comm->group->ranks[i];
        dt__rank_view seen = dt__view_of_rank(comm->world, rank);
        if (rank == comm->world->rank || !seen.state) continue;
        if (!dt__record_get(seen, (uint64_t)seen.state->op_count, &r) ||
            r.call.channel != comm->group->channel || r.call.seq < work->call.seq)
            return rank;
    }
    return DT_ANY;
}

/* Returns the work's first incomplete transfer, or NULL. */
static const dt__p2p *dt__first_unfinished_p2p(const dt_work *work) {
    for (int i = 0; i < work->p2p_count; i++)
        if (work->p2p_ops[i].state != DT__P2P_FINISHED) return &work->p2p_ops[i];
    return NULL;
}

/* Returns the world rank that this operation waits for; DT_ANY if it does not wait for one
   particular rank. */
static int dt__find_awaited_rank(const dt_work *work) {
    const dt_comm *comm = work->comm;
    if (work->advance == dt__device_op_poll) return dt__first_not_begun(work);
    if (work->check) work = work->check;
    const dt__p2p *p2p = dt__first_unfinished_p2p(work);
    if (p2p) return p2p->peer == DT_ANY ? DT_ANY : comm->group->ranks[p2p->peer];
    for (int rank = 0; rank < comm->base.size && work->post > 0; rank++)
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
    int is_here = state->pid == (int)getpid();
    if (state->pid == 0 || (is_here && state->tid == 0)) return 0;
    snprintf(path, sizeof path, is_here ? "/proc/self/task/%d/stat" : "/proc/%d/stat",
        is_here ? state->tid : state->pid);
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

/* The functions below describe a snapshot of a rank (dt__snapshot). */

/* Appends ", its last operation: ..." or a text that the rank has begun no operation. */
static void dt__put_last_operation(dt__text *text, dt__rank_view seen) {
    dt__op_record r;
    if (seen.state->op_count == 0 && seen.n > 1)
        dt__put(text, ", it has begun no operation");
    else if (dt__record_get(seen, (uint64_t)seen.state->op_count, &r))
        dt__put(text, ", its last operation: %s", dt__record_text(&r).s);
}

/* Returns 1 if the rank of `seen` is in a long wait and its process is neither stopped nor gone.
   Always stores the state of the process in *process. */
static int dt__is_waiting(const dt_io *io, dt__rank_view seen, char *process) {
    *process = dt__process_state(io, seen.state);
    return (!*process || !strchr("TtZX", *process)) && seen.state->waiting_op != 0;
}

/* Appends "waits in ... for rank 3". */
static void dt__put_wait(dt__text *text, dt__rank_view seen) {
    dt__op_record r;
    if (dt__record_get(seen, seen.state->waiting_op, &r))
        dt__put(text, "waits in %s", dt__record_text(&r).s);
    else /* the record of this operation has been overwritten */
        dt__put(text, "waits in its operation %llu of %llu",
            (unsigned long long)seen.state->waiting_op, (unsigned long long)seen.state->op_count);
    if (seen.state->waits_for != DT_ANY) dt__put(text, " for rank %d", seen.state->waits_for);
}

/* Appends the pairs of ranks whose announcement credits are used up. */
static void dt__put_credits(dt__text *text, const dt__world *world) {
    for (int rank = 0; rank < world->size && world->peers; rank++) {
        const dt__peer *peer = world->peers[rank];
        int is_sender = peer && peer->unanswered == DT__ANNOUNCE_CREDITS;
        if (!is_sender && !(peer && peer->unmatched == DT__ANNOUNCE_CREDITS)) continue;
        dt__put(text,
            "; rank %d has no receive for %d sends that rank %d has started, and takes no later "
            "message of rank %d before it receives one of these",
            is_sender ? rank : world->rank, DT__ANNOUNCE_CREDITS, is_sender ? world->rank : rank,
            is_sender ? world->rank : rank);
    }
}

/* Follows the wait-for graph from `rank` for at most 4 edges. Appends the waits on the path, and
   why the last rank does not come: "; rank 3 (process 4711) is stopped (state T), its last
   operation: ...". */
static void dt__put_diagnosis(dt__text *text, const dt__world *world, int rank) {
    const dt_io *io = dt_ctx_io(world->ctx);
    char process;
    for (int step = 0; step < 4 && rank >= 0 && rank != world->rank; step++) {
        dt__rank_state state;
        dt__rank_view seen = dt__snapshot(dt__view_of_rank(world, rank), &state);
        if (!seen.state) return;
        if (dt__is_waiting(io, seen, &process)) {
            dt__put(text, "; rank %d ", rank);
            dt__put_wait(text, seen);
            rank = state.waits_for;
            continue;
        }
        int thread = state.pid == (int)getpid() && state.tid != 0;
        /* read the process state up to three more times while it is R (running), because a rank
           that only polls and naps is also in state R sometimes */
        for (int tries = 0; tries < 3 && process == 'R'; tries++) {
            world->host->sleep(world->host->user, DT__NAP_MAX);
            process = dt__process_state(io, &state);
        }
        if (state.pid == 0 && seen.n > 1)
            dt__put(text, "; rank %d has not begun", rank);
        else if (state.pid == 0)
            dt__put(text, world->transport.pid ? "; it is on another machine and has sent no report"
                                               : "; it has sent no report");
        else
            dt__put(text, "; rank %d (%s %d) %s", rank, thread ? "thread" : "process",
                thread ? state.tid : state.pid, dt__process_word(process));
        if (rank == world->state->waits_for && state.progress != world->awaited_progress)
            dt__put(text, ", it is late: it did other things meanwhile");
        dt__put_last_operation(text, seen);
        return;
    }
}

/* Describes the operation in which this rank waits. */
static dt__text dt__wait_text(const dt_work *work) {
    const dt__p2p *p2p = dt__first_unfinished_p2p(work);
    if (p2p) return dt__p2p_text(p2p);
    dt__text text = dt__format(
        "%s", work->post ? dt__pattern_of(work->call.op)->name : dt__call_text(&work->call).s);
    if (work->call.seq) dt__put(&text, " #%llu", (unsigned long long)work->call.seq);
    dt__put(&text, " on %s%s", work->comm->group->name, dt__own_site(work).s);
    return text;
}

/* Hang diagnosis after a timeout: fails the context with a text that names the missing rank and
   says what the missing rank does instead. */
static dt_status dt__report_timeout(dt_work *work) {
    dt__world *world = work->comm->world;
    work = dt__group_queue_head(work);
    int awaited = dt__find_awaited_rank(work);
    const dt__p2p *p2p = dt__first_unfinished_p2p(work);
    dt__text text =
        dt__format("timeout %.1f s in %s", world->shared->timeout_s, dt__wait_text(work).s);
    if (p2p && p2p->peer == DT_ANY)
        dt__put(&text, ": nobody sent it");
    else if (p2p)
        dt__put(&text, ": rank %d %s", awaited,
            p2p->tag < 0          ? "did not do its part"
            : p2p->op == DT__SEND ? "did not receive it"
                                  : "did not send it");
    else if (work->post)
        dt__put(&text, ": %s", dt__arrivals_text(work).s);
    else if (awaited != DT_ANY)
        dt__put(&text, ": rank %d did not come", awaited);
    dt__put_credits(&text, world);
    dt__put_diagnosis(&text, world, awaited);
    return dt__comm_fail(world, DT_ERR_TIMEOUT, "%s", text.s);
}

/* ---- deadlock detection ---- */

/* Returns the wait-for edge of a rank: the world rank that `rank` waits for; DT_ANY if `rank` waits
   for no particular rank or the edge is unknown. */
static int dt__wait_edge(const dt__world *world, int rank) {
    dt__rank_view seen = dt__view_of_rank(world, rank);
    if (!seen.state || !__atomic_load_n(&seen.state->waiting_op, __ATOMIC_SEQ_CST)) return DT_ANY;
    return __atomic_load_n(&seen.state->waits_for, __ATOMIC_RELAXED);
}

/* Follows the wait-for graph from this rank. If the path leads to a cycle, returns the lowest rank
   of the cycle and stores its length in *length; else returns DT_ANY. */
static int dt__find_cycle(const dt__world *world, int *length) {
    int rank = world->rank;
    /* after as many edges as there are ranks the path is inside the cycle, if there is one */
    for (int i = 0; i < world->size && rank != DT_ANY; i++) rank = dt__wait_edge(world, rank);
    if (rank == DT_ANY) return DT_ANY;
    int lowest = rank;
    *length = 1;
    for (int next = dt__wait_edge(world, rank);
         next != rank && next != DT_ANY && *length < world->size;
         next = dt__wait_edge(world, next)) {
        if (next < lowest) lowest = next;
        ++*length;
    }
    return lowest;
}

/* Fails the context with a text that describes the deadlock: the waits of the cycle to which this
   rank's path leads, starting at its lowest rank, or if there is no cycle the waits of the first
   ranks of the world. */
static void dt__report_deadlock(dt__world *world) {
    enum { NAMED = 4 };
    int length = world->size, first = dt__find_cycle(world, &length), is_cycle = first != DT_ANY;
    dt__rank_state state;
    dt__text text =
        dt__format("deadlock: %s", is_cycle ? "" : "all ranks wait, and nothing is under way: ");
    /* the path ends early if another rank has reported the deadlock meanwhile and has stopped
       waiting */
    for (int i = 0, rank = is_cycle ? first : 0; i < length && i < NAMED && rank != DT_ANY; i++) {
        /* the state is known, because the proof has read it */
        dt__rank_view seen = dt__snapshot(dt__view_of_rank(world, rank), &state);
        dt__put(&text, "%srank %d ", i ? ", " : "", rank);
        if (state.waiting_op)
            dt__put_wait(&text, seen);
        else
            dt__put(&text, "has ended");
        rank = is_cycle ? dt__wait_edge(world, rank) : rank + 1;
    }
    if (length > NAMED && is_cycle)
        dt__put(&text, ", and so on: a circle of %d ranks", length);
    else if (length > NAMED)
        dt__put(&text, ", ...");
    dt__put_credits(&text, world);
    dt__comm_fail(world, DT_ERR_COMM, "%s", text.s);
}

/* Returns 1 if something other than a packet or a rank's store may advance this rank: the simulated
   link, a device, a library, or bulk data under way. The progress counters say nothing about it. */
static int dt__is_busy(const dt_work *work) {
    if (work->completion == DT__COMPLETED) return 0;
    if (work->check) return dt__is_busy(work->check);
    int busy = work->completion == DT__TRANSFERRED || work->in_library;
    for (int i = 0; i < work->p2p_count; i++) {
        const dt__p2p *p2p = &work->p2p_ops[i];
        busy = busy || (p2p->device_event && !p2p->is_direct) || p2p->state == DT__P2P_BULK;
    }
    return busy;
}

/* Returns the sum of all ranks' progress counters, as far as this rank knows them. */
static uint64_t dt__progress_sum(const dt__world *world) {
    uint64_t sum = 0;
    for (int rank = 0; rank < world->size; rank++) {
        const dt__rank_state *state = dt__view_of_rank(world, rank).state;
        if (state) sum += __atomic_load_n(&state->progress, __ATOMIC_ACQUIRE);
    }
    return sum;
}

/* ---- wait reports ---- */

/* A rank reports its wait to the ranks that share no memory with it once it has waited for this
   many seconds, and again when its state has changed: at once if all other ranks wait too, because
   then the change may complete the proof of a deadlock, else after this many seconds. */
#define DT__REPORT_AFTER_S 0.02

/* Sends this rank's state to all ranks that share no memory with it, with the record of `work`, in
   which it waits. If work is NULL, the rank no longer waits, or has ended. A report that the
   transport cannot take is dropped: the next one replaces it. Returns the number of those. */
static int dt__send_wait_report(dt__world *world, const dt_work *work) {
    dt__wait_report report;
    dt__frame frame;
    int dropped = 0;
    memset(&report, 0, sizeof report);
    memset(&frame, 0, sizeof frame);
    frame.kind = DT__REPORT;
    report.state = *world->state;
    dt__record_get(dt__view_of_rank(world, world->rank),
        work ? work->record_number : (uint64_t)report.state.op_count, &report.record);
    for (int rank = 0; rank < world->size; rank++) {
        if (rank == world->rank || dt__local_rank_of(world, rank) >= 0) continue;
        /* a rank that has ended still waits to hear that this one has */
        if (!report.state.ended && dt__has_ended(world, rank)) continue;
        dropped += dt__packet_send(world, rank, &frame, &report, sizeof report) == 0;
    }
    world->reported = report.state;
    world->reported_at = world->host->now(world->host->user);
    return dropped;
}

/* Sends a wait report if one is due. */
static void dt__report_wait(dt__world *world, const dt_work *work, double since) {
    const dt__rank_state *own = world->state, *last = &world->reported;
    double now = world->host->now(world->host->user);
    int all_wait = 1;
    if (now - since < DT__REPORT_AFTER_S) return;
    if (last->waiting_op && own->progress == last->progress && own->waits_for == last->waits_for &&
        own->idle_at_progress == last->idle_at_progress)
        return;
    for (int rank = 0; rank < world->size && all_wait; rank++) {
        const dt__rank_state *its = dt__view_of_rank(world, rank).state;
        all_wait = its && (__atomic_load_n(&its->waiting_op, __ATOMIC_SEQ_CST) ||
                              __atomic_load_n(&its->ended, __ATOMIC_ACQUIRE));
    }
    if (all_wait || now - world->reported_at > DT__REPORT_AFTER_S)
        dt__send_wait_report(world, work);
}

/* Fails the context if the rank that has sent a wait report waits in a collective that this rank
   has enqueued on its device, but has made a different call. Such ranks exchange no messages, so
   nothing else would tell. */
static void dt__compare_report(dt__world *world, int rank, const dt__op_record *r) {
    for (dt_work *w = world->device_ops.first; w; w = w->next) {
        int from = dt__rank_in(w->comm->group, rank);
        if (from < 0 || w->call.seq == 0 || r->call.channel != w->frame.channel ||
            r->call.seq != w->call.seq || dt__is_p2p((dt__op_code)(r->call.packed_call & 255)))
            continue;
        if (!dt__same_call(&r->call, &w->frame))
            dt__calls_differ(w->comm, from, &r->call, w->comm->base.rank, &w->frame);
        return;
    }
}

/* Stores a wait report that has arrived from another rank. Corrects fields that are out of range,
   because these fields index arrays. */
static void dt__receive_wait_report(dt__world *world, int rank, const dt__wait_report *report) {
    int64_t now = (int64_t)(world->host->now(world->host->user) * 1e6);
    dt__wait_report *its = &world->peers[rank]->report;
    dt__rank_state before = its->state;
    memcpy(its, report, sizeof *its);
    its->record.group[DT__NAME_BYTES - 1] = its->record.call.file[DT__FILE_BYTES - 1] = 0;
    if (its->state.waits_for < DT_ANY || its->state.waits_for >= world->size)
        its->state.waits_for = DT_ANY;
    /* the process as this machine knows it, and times of this rank's clock */
    its->state.pid = before.pid;
    int is_new = its->state.waiting_op != before.waiting_op;
    its->state.wait_since_us = is_new ? now : before.wait_since_us;
    its->state.last_op_end_us = is_new ? now : before.last_op_end_us;
    if (its->state.waiting_op) dt__compare_report(world, rank, &its->record);
    /* that it has ended is final, and may end a wait of this rank */
    if (before.ended) its->state.ended = before.ended;
    if (its->state.ended != before.ended) dt__count_progress(world);
}

/* Fails the context if the connection to a rank that has not ended is lost. work: the operation in
   which this rank waits, or NULL. */
static void dt__check_connections(dt__world *world, const dt_work *work) {
    char why[512] = "";
    for (int rank = 0; rank < world->size && world->transport.lost && !dt_error(world->ctx);
         rank++) {
        if (rank == world->rank || dt__local_rank_of(world, rank) >= 0 ||
            dt__has_ended(world, rank) || !world->transport.lost(world->transport.user, rank, why))
            continue;
        dt__poll(world, DT_ANY); /* it may have failed or ended just before */
        why[sizeof why - 1] = 0;
        if (!dt__aborted(world->shared) && !dt__has_ended(world, rank))
            dt__comm_fail(world, DT_ERR_PEER, "%s%s%s", work ? dt__wait_text(work).s : "",
                work ? ": " : "", why);
    }
}

/* Deadlock detection. Called in a long wait, after this rank has read `progress_sum`, the sum of
   all progress counters, and has then tried in vain to advance every pending operation. Publishes
   that this rank has been waiting in `work` since the time `since`, and publishes progress_sum. If
   all ranks have published the same sum and it is still current, no rank will ever advance: then
   fails the context and returns 1. Else returns 0. Section 11 has the proof. */
static int dt__detect_deadlock(dt_work *work, uint64_t progress_sum, double since) {
    dt__world *world = work->comm->world;
    dt__rank_state *own = world->state;
    int awaited = dt__find_awaited_rank(dt__group_queue_head(work)), busy = dt__is_busy(work);
    if (own->waiting_op != work->record_number || awaited != own->waits_for) {
        const dt__rank_state *its = dt__view_of_rank(world, awaited).state;
        world->awaited_progress = its ? __atomic_load_n(&its->progress, __ATOMIC_SEQ_CST) : 0;
    }
    __atomic_store_n(&own->waits_for, awaited, __ATOMIC_RELAXED);
    __atomic_store_n(&own->wait_since_us, (int64_t)(since * 1e6), __ATOMIC_RELAXED);
    __atomic_store_n(&own->waiting_op, work->record_number, __ATOMIC_SEQ_CST);
    if (world->status_request && __atomic_load_n(world->status_request, __ATOMIC_RELAXED))
        dt__log_all_ranks(world);
    for (const dt_work *w = world->first_unfinished; w; w = w->next) busy = busy || dt__is_busy(w);
    if (dt__progress_sum(world) != progress_sum) return 0; /* some rank has moved meanwhile */
    busy = busy || DT__UNCHECKED; /* without records nothing could be reported */
    __atomic_store_n(&own->idle_at_progress, busy ? 0 : progress_sum, __ATOMIC_SEQ_CST);
    if (world->transport.send) dt__report_wait(world, work, since);
    for (int rank = 0; rank < world->size && !busy; rank++) {
        const dt__rank_state *its = dt__view_of_rank(world, rank).state;
        uint64_t sum = its ? __atomic_load_n(&its->idle_at_progress, __ATOMIC_SEQ_CST) : 0;
        if (world->block > 1 && dt__local_rank_of(world, rank) < 0) continue; /* a phantom */
        if (sum != progress_sum && sum != DT__IDLE_FOREVER) return 0;
    }
    if (busy || dt__progress_sum(world) != progress_sum) return 0;
    dt__report_deadlock(world);
    return 1;
}

/* ---- the table of all ranks ---- */

/* Returns one rank's line of the table of dt_ranks_text, without a newline. */
static dt__text dt__rank_line(const dt_host *host, const dt_io *io, int rank, dt__rank_view seen) {
    double now = host->now(host->user);
    dt__rank_state state;
    char process = 0;
    if (!seen.state) return dt__format("rank %d: not known here", rank);
    seen = dt__snapshot(seen, &state);
    dt__text text =
        dt__format("rank %d: process %d, step %lld: ", rank, state.pid, (long long)state.step);
    if (state.ended) {
        dt__put(&text, "has ended");
    } else if (dt__is_waiting(io, seen, &process)) {
        dt__put(&text, "for %.1f s it ", now - (double)state.wait_since_us / 1e6);
        dt__put_wait(&text, seen);
    } else {
        dt__put(&text, "it %s", dt__process_word(process));
        if (state.last_op_end_us)
            dt__put(&text, " since %.1f s", now - (double)state.last_op_end_us / 1e6);
        dt__put_last_operation(&text, seen);
    }
    return text;
}

/* Appends a line to a text of `bytes` bytes that may be NULL, of which *at bytes would be in use if
   it were large enough. */
static void dt__append_line(char *text, size_t bytes, size_t *at, const char *line) {
    size_t length = strlen(line);
    if (text && *at < bytes) snprintf(text + *at, bytes - *at, "%s\n", line);
    *at += length + 1;
}

size_t dt_ranks_text(const dt_ctx *ctx, char *text, size_t bytes) {
    const dt__world *world = dt__world_of(ctx);
    size_t all = 0;
    if (text && bytes) text[0] = 0;
    for (int rank = 0; world && world->comm && rank < world->size; rank++)
        dt__append_line(text, bytes, &all,
            dt__rank_line(world->host, dt_ctx_io(ctx), rank, dt__view_of_rank(world, rank)).s);
    return all;
}

size_t dt_records_text(const dt_ctx *ctx, int rank, char *text, size_t bytes) {
    const dt__world *world = dt__world_of(ctx);
    int known = world && world->comm && rank >= 0 && rank < world->size;
    dt__rank_view seen = dt__view_of_rank(world, known ? rank : DT_ANY);
    int64_t last = seen.state ? __atomic_load_n(&seen.state->op_count, __ATOMIC_ACQUIRE) : 0;
    size_t all = 0;
    dt__op_record r;
    if (text && bytes) text[0] = 0;
    for (int64_t n = last; n > 0 && n > last - seen.n; n--)
        if (dt__record_get(seen, (uint64_t)n, &r))
            dt__append_line(
                text, bytes, &all, dt__format("%lld %s", (long long)n, dt__record_text(&r).s).s);
    return all;
}

/* Answers a request by dt_run_desc.status_request on a rank without a supervisor: logs the table of
   all ranks and clears the request. */
static void dt__log_all_ranks(dt__world *world) {
    const dt_host *host = world->host;
    const dt_io *io = dt_ctx_io(world->ctx);
    __atomic_store_n(world->status_request, 0, __ATOMIC_RELAXED);
    for (int rank = 0; rank < world->size; rank++)
        host->log(host->user, DT_LOG_NOTICE, world->rank,
            dt__rank_line(host, io, rank, dt__view_of_rank(world, rank)).s);
}

// ==== 20. Call tables: simulated link, fault injection ==========================================

/* A call table around the plain one changes what happens to an operation; each calls the table that
   it is around. The link is always around the plain table, so it calls that table's functions by
   name. Without these tables an operation runs no code of this section.

       trace { faults { link { plain } } }        begin, advance and end of each operation

   Fault injection: a planted fault kills, stops, delays or corrupts one rank at a chosen operation.
   A real fault strikes at an unknown operation. The list of faults (dt_run_desc.fault or DT_FAULT)
   is parsed before the run begins, so every rank refuses a wrong list.

       DT_FAULT=kill:rank=2:seq=40,delay:rank=0:seq=7:s=0.5

       operation seq of the rank:   begin    kill stop exit spin delay drop
                                    ... the operation runs ...
                                    end      flip nan   (in the received data) */

/* The call table of the planted faults, and their list. */
enum { DT__FAULTS = 8 };
typedef struct dt__fault {
    int kind, rank;
    uint64_t seq;
    double s;
} dt__fault;
typedef struct dt__faults {
    dt__call_table calls; /* the faults' begin and end, and the inner table's advance */
    const dt__call_table *inner;
    int count; /* number of entries in `list`, the faults planted on this rank */
    dt__fault list[DT__FAULTS];
} dt__faults;

/* ---- the simulated link ---- */

typedef struct dt__link {
    dt_level levels[1 + DT_MAX_LEVELS]; /* the last one is the whole world */
    int n_levels;
    /* for each level: the time at which this rank's link is free again */
    double free_at[1 + DT_MAX_LEVELS];
} dt__link;

/* Returns 1 if the description is valid; else writes the reason to `why` (160 bytes). */
static int dt__link_valid(const dt_link *link, char *why) {
    int n = link->n_levels, inner = 0;
    why[0] = 0;
    if (n < 0 || n > DT_MAX_LEVELS || (n > 0 && !link->levels))
        snprintf(why, 160, "link with %d levels; 0 to %d are possible", n, DT_MAX_LEVELS);
    if (!(link->latency_s >= 0 && link->bytes_per_s >= 0))
        snprintf(why, 160, "link of %g s and %g bytes/s", link->latency_s, link->bytes_per_s);
    for (int i = 0; i < n && !why[0]; i++) {
        const dt_level *l = &link->levels[i];
        if (l->ranks <= inner || (inner > 0 && l->ranks % inner != 0))
            snprintf(why, 160, "level %d of the link has %d ranks, and the level inside it %d", i,
                l->ranks, inner);
        else if (!(l->latency_s >= 0 && l->bytes_per_s >= 0))
            snprintf(why, 160, "level %d of the link: %g s and %g bytes/s", i, l->latency_s,
                l->bytes_per_s);
        inner = l->ranks;
    }
    return !why[0];
}

/* Returns the index of the first level of which one switch has all ranks of the operation. */
static int dt__link_level(const dt__link *link, const dt_comm *comm, const dt__call *call) {
    const int32_t *ranks = comm->group->ranks;
    int is_message = dt__is_p2p(call->op), me = comm->world->rank, i = 0;
    int first = is_message ? call->peer == DT_ANY ? me : ranks[call->peer] : comm->lowest;
    int last = is_message ? me : comm->highest;
    while (i < link->n_levels && first / link->levels[i].ranks != last / link->levels[i].ranks) i++;
    return i;
}

/* Reserves time on the simulated link, and stores in work->link_until when that time ends. */
static dt_work *dt__link_begin(dt_comm *comm, const dt__call *call) {
    dt__world *world = comm->world;
    dt__link *link = world->link;
    dt_work *work = dt__op_begin(comm, call);
    if (!work || work->completion == DT__COMPLETED) return work; /* a group of one rank */
    double now = dt__time(world);
    int at = dt__link_level(link, comm, &work->call);
    const dt_level *level = &link->levels[at];
    /* A receive ends when the message has arrived. Over a transport that time is not known, unless
       the sender shares memory with this rank. */
    int is_known = !world->transport.send ||
                   (call->peer != DT_ANY && call->op == DT__RECV &&
                       dt__local_rank_of(world, comm->group->ranks[call->peer]) >= 0);
    int arrives = call->op == DT__RECV && is_known;
    if (!work->call.host_memory && !arrives) { /* scalars take no time */
        double seconds = level->latency_s;
        if (level->bytes_per_s > 0)
            seconds += (double)dt__sent_bytes(comm, &work->call) / level->bytes_per_s;
        now = link->free_at[at] = fmax(link->free_at[at], now) + seconds;
    } else if (!world->clock && !arrives) {
        return work;
    }
    work->link_until = now;
    return work;
}

static int dt__link_advance(dt_work *work) {
    dt__world *world = work->comm->world;
    if (work->completion != DT__TRANSFERRED) {
        int done = dt__work_advance(work);
        if (done <= 0 || work->link_until <= 0) return done;
        work->completion = DT__TRANSFERRED;
    }
    if (dt__time(world) < work->link_until) return 0;
    if (world->clock) work->end_time = work->link_until; /* not when this rank notices it */
    work->link_until = 0;
    work->completion = DT__COMPLETED;
    dt__count_progress(world);
    return 1;
}

static const dt__call_table dt__link_calls = {
    .begin = dt__link_begin, .advance = dt__link_advance, .end = dt__op_end
};

/* Puts the simulated link around the plain call table. If memory runs out, the context fails. */
static void dt__link_make(dt__world *world, dt_link desc) {
    dt__link link;
    memset(&link, 0, sizeof link);
    link.n_levels = desc.n_levels;
    for (int i = 0; i < desc.n_levels; i++) link.levels[i] = desc.levels[i];
    link.levels[desc.n_levels].latency_s = desc.latency_s;
    link.levels[desc.n_levels].bytes_per_s = desc.bytes_per_s;
    world->link = (dt__link *)dt_alloc(world->ctx, DT_MEM_HOST, sizeof link, "the link");
    if (!world->link) return;
    *world->link = link;
    if (world->faults) { /* these are around the link */
        world->faults->inner = &dt__link_calls;
        world->faults->calls.advance = dt__link_advance;
    } else {
        world->calls = &dt__link_calls;
    }
}

/* ---- fault injection ---- */

/* Kinds of faults; 0 means no fault. */
enum { DT__KILL = 1, DT__STOP, DT__EXIT, DT__SPIN, DT__DELAY, DT__DROP, DT__FLIP, DT__NAN };
static const char *const dt__fault_names[] = { "", "kill", "stop", "exit", "spin", "delay", "drop",
    "flip", "nan" };

/* Parses a number of at most 15 digits, which may have a fraction if `real` is set. Returns the
   position after the number, or NULL if there is no number. */
static const char *dt__parse_number(const char *at, int real, double *value) {
    double scale = 0; /* of the digits after the point; 0 before it */
    int digits = 0;
    for (*value = 0;; at++) {
        if (*at >= '0' && *at <= '9' && digits < 15) {
            *value = 10 * *value + (*at - '0');
            scale *= 10;
            digits++;
        } else if (real && *at == '.' && scale == 0)
            scale = 1;
        else
            break;
    }
    if (scale > 0) *value /= scale;
    return digits ? at : NULL;
}

/* Parses a whole number from min to max. Returns the position after the number, or NULL. */
static const char *dt__parse_int(const char *at, int min, int max, int *value) {
    double number;
    at = dt__parse_number(at, 0, &number);
    if (!at || number < min || number > max) return NULL;
    *value = (int)number;
    return at;
}

/* Parses one fault of the list. Returns the position after the fault, or NULL if its text is
   wrong. */
static const char *dt__fault_parse(const char *at, dt__fault *fault) {
    static const char *const keys[3] = { ":rank=", ":seq=", ":s=" };
    double values[3] = { -1, 0, 1 };
    size_t length = strcspn(at, ":,");
    int kind = DT__NAN;
    while (kind && (strlen(dt__fault_names[kind]) != length ||
                       strncmp(at, dt__fault_names[kind], length) != 0))
        kind--;
    if (!kind) return NULL;
    for (at += length; *at == ':';) {
        int key = 0;
        while (key < 3 && strncmp(at, keys[key], strlen(keys[key])) != 0) key++;
        if (key == 3) return NULL;
        at = dt__parse_number(at + strlen(keys[key]), key == 2, &values[key]);
        if (!at) return NULL;
    }
    if (values[0] < 0 || values[0] >= (double)DT__MAX_RANKS || values[1] < 1) return NULL;
    dt__fault parsed = { kind, (int)values[0], (uint64_t)values[1], values[2] };
    *fault = parsed;
    return *at == 0 || *at == ',' ? at : NULL;
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
        if (spin)
            dt__pause();
        else
            world->host->sleep(world->host->user, DT__NAP_MAX);
}

/* Strikes before the operation `work`. Flips and NaNs are only noted, for the operation's end. */
static void dt__fault_strike(dt__world *world, const dt__fault *fault, int *noted) {
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
        *noted = fault->kind;
}

/* Injects the faults that are planted at this operation. A dropped operation is complete at once,
   and counts as none. */
static dt_work *dt__fault_begin(dt_comm *comm, const dt__call *call) {
    dt__world *world = comm->world;
    dt__faults *faults = world->faults;
    int noted = 0;
    for (int i = 0; i < faults->count && !dt_error(world->ctx); i++) {
        dt__fault fault = faults->list[i];
        if (fault.seq != (uint64_t)world->state->op_count + 1 || noted == DT__DROP) continue;
        faults->list[i].seq = 0;
        dt__fault_strike(world, &fault, &noted);
    }
    if (dt_error(world->ctx)) return NULL;
    /* scalars and dt's own data, such as the colors of a split, are not corrupted */
    if (call->host_memory && noted != DT__DROP) noted = 0;
    dt_work *work =
        noted == DT__DROP ? dt__work_acquire(comm, call) : faults->inner->begin(comm, call);
    if (work) work->fault = noted;
    if (work && noted == DT__DROP) work->completion = DT__COMPLETED;
    return work;
}

/* Corrupts the middle element of the first received block: flips one bit (DT__FLIP) or sets all
   bits, which is a NaN in every floating-point type (DT__NAN). This happens after the operation's
   end, because only then the stream waits for data that a device still moves. A dropped operation
   has no end. */
static dt_status dt__fault_end(dt_work *work) {
    dt_comm *comm = work->comm;
    dt__world *world = comm->world;
    const dt__call call = work->call;
    const int fault = work->fault;
    if (fault == DT__DROP) {
        dt__work_release(work);
        return dt_error(world->ctx);
    }
    dt_status status = world->faults->inner->end(work);
    int corrupts = fault == DT__FLIP || fault == DT__NAN;
    if (status || !corrupts || call.count == 0 || !dt__receives(comm, &call)) return status;
    size_t size = dt_dtype_size(call.dtype);
    char *middle = (char *)call.recv + call.count / 2 * size, element[8];
    dt__comm_copy(comm, &call, element, middle, size);
    dt__comm_sync(world);
    if (fault == DT__FLIP)
        element[0] = (char)(element[0] ^ 1);
    else
        memset(element, 0xff, sizeof element);
    dt__comm_copy(comm, &call, middle, element, size);
    dt__comm_sync(world);
    return dt_error(world->ctx);
}

/* Puts the faults of this rank around the world's call table, if there are any. */
static void dt__faults_make(dt__world *world, const char *text) {
    dt__faults faults = { .calls = { dt__fault_begin, world->calls->advance, dt__fault_end },
        .inner = world->calls };
    faults.count = dt__faults_parse(text, world->rank, world->size, faults.list);
    if (faults.count <= 0) return;
    world->faults =
        (dt__faults *)dt_alloc(world->ctx, DT_MEM_HOST, sizeof faults, "planted faults");
    if (!world->faults) return;
    *world->faults = faults;
    world->calls = &world->faults->calls;
}

// ==== 21. Scalars and agreement: code ============================================================

/* These functions run collectives (section 18) on host memory. They do not use the device's kernel
   table, and dt_comm_bytes does not count them. Straggler detection is in this section too, because
   dt_comm_step gathers the time that each rank spends on its own work. */

static dt_status dt__run_on_host(dt_comm *comm, dt__call call) {
    call.host_memory = 1;
    return dt__op_run(comm, call);
}

dt_status(dt_sum_doubles)(dt_comm *comm, double *values, size_t n) {
    return dt__run_on_host(comm, dt__call_make(DT__SUM_DOUBLES, values, values, n, DT_F64));
}

double(dt_mean)(dt_comm *comm, double mine) {
    if ((dt_sum_doubles)(comm, &mine, 1) != DT_OK) return (double)__builtin_nan("");
    return mine / dt_comm_size(comm);
}

/* Gathers two words of each rank into comm->words. */
static dt_status dt__gather_words(dt_comm *comm, dt__op_code op, const int32_t mine[2]) {
    return dt__run_on_host(comm, dt__call_make(op, mine, comm->words, 2, DT_I32));
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
   all ranks plus DT__STRAGGLER_EXCESS_S seconds, in each of the last DT__STRAGGLER_STEPS steps: so
   each rank sends the shortest time of these steps, which a pause of the machine does not change.
   After a notice, first DT__STRAGGLER_NOTICE_STEPS steps pass before the next one, then twice as
   many each time. */
#define DT__STRAGGLER_RATIO 1.5
#define DT__STRAGGLER_EXCESS_S 1e-3
#define DT__STRAGGLER_UNIT_S 1e-4 /* the unit of the times that the ranks gather */
enum { DT__STRAGGLER_NOTICE_STEPS = 10 };

/* Straggler detection, on rank 0: logs a notice if the slowest rank is a straggler. The first of a
   rank's two words is the time of its own work. */
static void dt__find_straggler(dt__world *world, const dt_comm *comm) {
    const int32_t *own = comm->words;
    int slowest = 0, n = comm->base.size, median = INT32_MAX;
    for (int rank = 0; rank < n; rank++) {
        int at_most = 0; /* number of ranks that took at most as long as this one */
        for (int other = 0; other < n; other++) at_most += own[2 * other] <= own[2 * rank];
        /* if n is even, the lower median */
        if (2 * at_most >= n && own[2 * rank] < median) median = own[2 * rank];
        if (own[2 * rank] > own[2 * slowest]) slowest = rank;
    }
    double slowest_s = own[2 * slowest] * DT__STRAGGLER_UNIT_S,
           median_s = median * DT__STRAGGLER_UNIT_S;
    if (slowest_s <= DT__STRAGGLER_RATIO * median_s + DT__STRAGGLER_EXCESS_S ||
        world->state->step < world->straggler_notice_step)
        return;
    world->straggler_pause =
        world->straggler_pause ? 2 * world->straggler_pause : (int64_t)DT__STRAGGLER_NOTICE_STEPS;
    world->straggler_notice_step = world->state->step + world->straggler_pause;
    dt_log(world->ctx, DT_LOG_NOTICE,
        "rank %d is a straggler: its own work took at least %.1f ms in each of the last %d steps, "
        "the median %.1f ms",
        slowest, slowest_s * 1e3, DT__STRAGGLER_STEPS, median_s * 1e3);
}

dt_status(dt_comm_step)(dt_comm *world_comm) {
    if (!world_comm) return DT_OK;
    dt__world *world = world_comm->world;
    double own = dt__time(world) - world->seconds - world->last_step_own;
    int32_t words[2] = { 0, 0 };
    world->own_s[world->state->step % DT__STRAGGLER_STEPS] = fmax(own, 0);
    for (int i = 0; i < DT__STRAGGLER_STEPS; i++) own = fmin(own, world->own_s[i]);
    words[0] = (int32_t)fmin(fmax(own, 0) / DT__STRAGGLER_UNIT_S, INT32_MAX);
    if (dt__gather_words(world->comm, DT__STEP, words) != DT_OK) return dt_error(world->ctx);
    if (world->state->step >= DT__STRAGGLER_STEPS && world->rank == 0)
        dt__find_straggler(world, world->comm);
    __atomic_store_n(&world->state->step, world->state->step + 1, __ATOMIC_RELAXED);
    world->last_step_own = dt__time(world) - world->seconds;
    return dt_error(world->ctx);
}

// ==== 22. Process groups: code ===================================================================

/* Splitting a process group. All ranks gather (color, key). The new rank of a rank is the number of
   ranks with the same color that come before it, by key and then by old rank.

       6 ranks, color = rank / 3, key = -rank

       rank      0 1 2   3 4 5
       color     0 0 0   1 1 1
       group     a a a   b b b
       new rank  2 1 0   2 1 0

   If the members of a new group share memory, its first rank makes a group in the range, whose
   posts all members use. A second gather tells the other members about it. */

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
    if (!comm || axis < DT_AXIS_NONE || axis >= DT_AXES) return;
    comm->axis = axis;
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

/* ---- groups in shared memory ---- */

/* The size of a post, which has space for a small send buffer or the counts of an all-to-all-v. */
static size_t dt__post_bytes(int size) {
    size_t counts = (size_t)size * sizeof(size_t);
    return dt__align_up(sizeof(dt__post) + (counts > DT_EAGER_BYTES ? counts : DT_EAGER_BYTES));
}

static size_t dt__group_bytes(int size) {
    return dt__align_up(sizeof(dt__group)) +
           (size_t)size * (sizeof(dt__member) + (size_t)DT_MAX_STARTED * dt__post_bytes(size));
}

/* Makes a group of `size` ranks in the range. Returns NULL if the arena is full. Any rank may call
   it at any time. */
static dt__group *dt__group_make(dt__shared *shared, int size, const char *name) {
    size_t n = (size_t)size;
    char *p = dt__range_alloc(shared->group_arena, shared->group_arena_bytes,
        &shared->group_arena_used, dt__group_bytes(size));
    if (!p) return NULL;
    dt__group *group = (dt__group *)(void *)p;
    memset(group, 0, sizeof *group);
    group->size = size;
    group->channel = (uint32_t)((size_t)(p - shared->group_arena) / DT__CACHE_LINE);
    group->post_bytes = dt__post_bytes(size);
    p += dt__align_up(sizeof(dt__group));
    group->members = (dt__member *)(void *)p;
    memset(group->members, 0, n * sizeof(dt__member));
    group->posts = p + n * sizeof(dt__member);
    for (size_t i = 0; i < n * DT_MAX_STARTED && !shared->is_zeroed; i++)
        ((dt__post *)(void *)(group->posts + i * group->post_bytes))->number = 0;
    dt__copy_name(group->name, sizeof group->name, name);
    return group;
}

/* ---- splitting ---- */

/* Rails connect the members that have the same index on their machines (section 17). Returns the
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

static void dt__comms_free(dt__world *world) {
    while (world->comms) {
        dt_comm *comm = world->comms;
        /* before it leaves the list, because a failure during this call aborts all groups */
        if (comm->direct && comm->direct->close) comm->direct->close(comm);
        world->comms = comm->next;
        dt_free(world->ctx, DT_MEM_COMM, comm->staging, DT__WINDOWS_BYTES);
        dt_free(world->ctx, DT_MEM_HOST, comm, comm->bytes);
    }
    world->comm = NULL;
}

/* Writes to `members` the ranks of comm that have this color, in the order of their new ranks,
   computed from comm->words. Returns their number; with members NULL it only counts. */
static int dt__split_members(const dt_comm *comm, int color, int32_t *members) {
    const int32_t *words = comm->words; /* color and key of each rank */
    int n = 0;
    for (int rank = 0; rank < comm->base.size; rank++) {
        if (words[2 * rank] != color) continue;
        int at = n++; /* after the members so far whose key is not greater */
        for (; members && at > 0 && words[2 * members[at - 1] + 1] > words[2 * rank + 1]; at--)
            members[at] = members[at - 1];
        if (members) members[at] = rank;
    }
    return n;
}

/* The size of a dt_comm of n ranks, with its arrays. */
static size_t dt__comm_struct_bytes(int n) {
    return sizeof(dt_comm) + sizeof(dt__group) +
           (size_t)n * (2 * sizeof(void *) + 3 * sizeof(int32_t));
}

/* Prepares the memory of a dt_comm. `inputs`, `outputs` and `words` stay untouched until they are
   used. */
static void dt__comm_init(dt_comm *comm, dt__world *world, int n, const char *name) {
    memset(comm, 0, sizeof(dt_comm) + sizeof(dt__group));
    comm->bytes = dt__comm_struct_bytes(n);
    comm->base.size = n;
    comm->world = world;
    comm->axis = DT_AXIS_NONE;
    comm->group = (dt__group *)(void *)(comm + 1);
    comm->inputs = (const void **)(void *)(comm->group + 1);
    comm->outputs = (void **)(void *)(comm->inputs + n);
    comm->words = (int32_t *)(void *)(comm->outputs + n);
    comm->group->ranks = comm->words + 2 * n;
    comm->group->size = n;
    dt__copy_name(comm->group->name, sizeof comm->group->name, name);
    comm->base.ranks = comm->group->ranks;
    comm->base.name = comm->group->name;
}

/* Makes this rank's handle of a group: of the ranks of `parent` that have this color, or of all
   ranks of the world if `parent` is NULL. Returns NULL if the context has failed. */
static dt_comm *dt__comm_make(
    dt__world *world, const dt_comm *parent, int color, const char *name) {
    const int n = parent ? dt__split_members(parent, color, NULL) : world->size;
    dt_comm *comm =
        (dt_comm *)dt_alloc(world->ctx, DT_MEM_HOST, dt__comm_struct_bytes(n), "dt_comm");
    if (!comm) return NULL;
    dt__comm_init(comm, world, n, name);
    if (parent) dt__split_members(parent, color, comm->group->ranks);
    for (int rank = 0; rank < n; rank++) {
        int32_t *of_world = &comm->group->ranks[rank];
        *of_world = parent ? parent->group->ranks[*of_world] : rank;
        if (*of_world == world->rank) comm->base.rank = rank;
        if (rank == 0 || *of_world < comm->lowest) comm->lowest = *of_world;
        if (*of_world > comm->highest) comm->highest = *of_world;
    }
    comm->ranks_per_node = dt__find_ranks_per_node(world, comm->group);
    comm->next = world->comms;
    world->comms = comm;
    return comm;
}

/* Channels from this number on belong to groups without a place in the range. Smaller ones say
   where in the arena their group lies. */
static uint32_t dt__first_free_channel(const dt__shared *shared) {
    return (uint32_t)(shared->group_arena_bytes / DT__CACHE_LINE) + 1;
}

/* Returns the group in the range that has this channel. */
static dt__group *dt__shared_group(const dt__shared *shared, uint32_t channel) {
    return (dt__group *)(void *)(shared->group_arena + (size_t)channel * DT__CACHE_LINE);
}

/* Returns 1 if all ranks of a group share memory with this rank. */
static int dt__is_on_node(const dt_comm *comm) {
    for (int rank = 0; rank < comm->base.size; rank++)
        if (dt__local_rank_of(comm->world, comm->group->ranks[rank]) < 0) return 0;
    return 1;
}

/* Makes a group use the posts and member states of the group in the range that has this channel. */
static void dt__comm_use_shared(dt_comm *comm, uint32_t channel) {
    const dt__group *shared = dt__shared_group(comm->world->shared, channel);
    comm->group->members = shared->members;
    comm->group->posts = shared->posts;
    comm->group->post_bytes = shared->post_bytes;
    comm->direct = &dt__shared_direct;
    /* without a transport: dt_team_free finds the group of an unread packet by its channel */
    if (!comm->world->transport.send) comm->group->channel = channel;
}

/* With phantom ranks: makes world->present, the group of the ranks that run. Its memory is not
   counted, because a run without phantoms has no such group. */
static void dt__present_make(dt__world *world) {
    const int n = world->size / world->block;
    dt_comm *comm =
        (dt_comm *)world->host->alloc(world->host->user, dt__comm_struct_bytes(n), DT_MEM_HOST);
    if (!comm) {
        dt__comm_fail(world, DT_ERR_MEM, "no memory for the group of the ranks that run");
        return;
    }
    dt__comm_init(comm, world, n, "present");
    for (int i = 0; i < n; i++)
        comm->group->ranks[i] = i * world->block + world->rank % world->block;
    comm->base.rank = world->local_rank;
    comm->lowest = comm->group->ranks[0];
    comm->highest = comm->group->ranks[n - 1];
    dt__comm_use_shared(comm, 0);
    world->present = comm;
}

static void dt__present_free(dt__world *world) {
    if (world->present)
        world->host->free(world->host->user, world->present, world->present->bytes, DT_MEM_HOST);
    world->present = NULL;
}

/* Makes the collectives of a group run in shared memory, or without its phantom ranks.
   `channel` is as for dt__comm_use_shared; without one, the group's collectives are messages. */
static void dt__comm_set_direct(dt_comm *comm, int has_channel, uint32_t channel) {
    if (dt__is_on_node(comm)) {
        if (has_channel) dt__comm_use_shared(comm, channel);
    } else if (comm->world->block > 1) {
        comm->direct = &dt__phantom_direct;
    }
}

/* Logs once, on rank 0 of the group that is split, that groups run their collectives as messages,
   because the arena is full. */
static void dt__note_full_arena(dt__world *world, const dt_comm *comm, const char *name) {
    int is_known = world->is_arena_full;
    world->is_arena_full = 1;
    if (is_known || comm->base.rank != 0 || world->transport.send) return;
    dt_log(world->ctx, DT_LOG_NOTICE,
        "dt_comm_split(%s): the groups of %d splits have filled the shared memory for groups; the "
        "collectives of this group and of later ones run as messages, which takes longer",
        name, (int)DT_SHARED_SPLITS);
}

/* Gathers each rank's color and key into comm->words, or with phantom ranks computes them. */
static dt_status dt__gather_colors(dt_comm *comm, dt_color_fn color_of, void *user) {
    int32_t words[2] = { 0, 0 };
    for (int rank = 0; rank < comm->base.size && dt_comm_has_phantoms(comm); rank++) {
        int key = 0, color = color_of(rank, &key, user);
        comm->words[2 * rank] = color < 0 ? -1 : color;
        comm->words[2 * rank + 1] = key;
    }
    if (dt_comm_has_phantoms(comm)) return dt_error(comm->world->ctx);
    words[0] = color_of(comm->base.rank, &words[1], user);
    if (words[0] < 0) words[0] = -1;
    return dt__gather_words(comm, DT__SPLIT, words);
}

/* Returns the group through which the ranks of comm that run agree on the channels of new groups:
   comm itself or, if comm has phantom ranks, world->present. NULL: this is the only rank of comm
   that runs, or the context has failed. */
static dt_comm *dt__present_of(dt_comm *comm) {
    dt__world *world = comm->world;
    int n = 0;
    if (!dt_comm_has_phantoms(comm)) return comm;
    for (int rank = 0; rank < comm->base.size; rank++)
        n += dt__local_rank_of(world, comm->group->ranks[rank]) >= 0;
    if (n == world->present->base.size && n > 1) return world->present;
    if (n > 1)
        dt__comm_fail(world, DT_ERR_UNSUPPORTED,
            "dt_comm_split_by on %s, of which %d ranks run: one, or all %d, can be in a group with "
            "phantom ranks that is split",
            comm->group->name, n, world->present->base.size);
    return NULL;
}

/* The ranks of comm gather two words: word 0 is the rank's next free channel; the maximum becomes
   the channel of those new groups that have none in the range. Word 1 is the channel of the group
   that the first rank of a new group has made in the range; 0 if it makes none (the world has
   channel 0), -1 if there was no capacity, so that the group runs its collectives as messages. A
   group of one needs none. */
static dt_comm *dt__comm_split_by(
    dt_comm *comm, dt_color_fn color_of, void *user, const char *name) {
    if (!comm) return NULL;
    dt__world *world = comm->world;
    if (!color_of)
        dt__comm_fail(world, DT_ERR_ARG, "dt_comm_split_by: no function that returns colors");
    if (!color_of) return NULL;
    int32_t words[2], channel = (int32_t)world->channel_count, shared = 0, is_full = 0;
    if (dt__gather_colors(comm, color_of, user) != DT_OK) return NULL;
    if (!name) name = "group";
    int color = comm->words[2 * comm->base.rank];
    dt_comm *made = color >= 0 ? dt__comm_make(world, comm, color, name) : NULL,
            *present = dt__present_of(comm);
    words[0] = channel;
    words[1] = 0;
    if (made && made->base.rank == 0 && made->base.size > 1 && dt__is_on_node(made)) {
        const dt__group *own = dt__group_make(world->shared, made->base.size, name);
        words[1] = own ? (int32_t)own->channel : -1;
    }
    if (present && dt__gather_words(present, DT__SPLIT, words) != DT_OK) return NULL;
    for (int rank = 0; present && rank < present->base.size; rank++) {
        if (present->words[2 * rank] > channel) channel = present->words[2 * rank];
        if (made && present->group->ranks[rank] == made->group->ranks[0])
            shared = present->words[2 * rank + 1];
        is_full |= present->words[2 * rank + 1] < 0;
    }
    if (is_full) dt__note_full_arena(world, comm, name);
    world->channel_count = (uint32_t)channel + 1;
    if (made) made->group->channel = (uint32_t)channel;
    /* ranks of other machines have no say in where this machine's ranks share memory */
    if (made) dt__comm_set_direct(made, shared > 0, (uint32_t)shared);
    if (comm->direct && comm->direct->split) { /* NCCL, for all groups of its world */
        if (made) made->direct = comm->direct;
        comm->direct->split(comm, made, color);
    }
    return dt_error(world->ctx) ? NULL : made;
}

/* dt_color_fn of dt_comm_split: this rank's color and key. */
static int dt__given_color(int rank, int *key, void *user) {
    const int *color_key = (const int *)user;
    (void)rank;
    *key = color_key[1];
    return color_key[0];
}

static dt_comm *dt__comm_split(dt_comm *comm, int color, int key, const char *name) {
    int color_key[2] = { color, key };
    if (comm && dt_comm_has_phantoms(comm)) {
        dt__comm_fail(comm->world, DT_ERR_UNSUPPORTED,
            "dt_comm_split(%s): phantom ranks have no color; use dt_comm_split_by",
            name ? name : "group");
        return NULL;
    }
    return dt__comm_split_by(comm, dt__given_color, color_key, name);
}

DT__DEFINE_AT_SITE(dt_comm *, comm_split, comm ? comm->world->ctx : NULL,
    (dt_comm * comm, int color, int key, const char *name), comm, color, key, name)
DT__DEFINE_AT_SITE(dt_comm *, comm_split_by, comm ? comm->world->ctx : NULL,
    (dt_comm * comm, dt_color_fn color_of, void *user, const char *name), comm, color_of, user,
    name)

int dt_color_block(int rank, int *key, void *n) {
    (void)key;
    return n && *(int *)n > 0 ? rank / *(int *)n : -1;
}
int dt_color_cyclic(int rank, int *key, void *n) {
    (void)key;
    return n && *(int *)n > 0 ? rank % *(int *)n : -1;
}

// ==== 23. Shared memory: layout, heaps ==========================================================

/* ---- layout of the range (section 8 has the drawing) ---- */

static size_t dt__align_page(size_t bytes) { return (bytes + 65535) / 65536 * 65536; }

/* Lays out the range at `memory` and copies `shared`, which holds the sizes, to the range's
   beginning. If `memory` is NULL, it only computes the sizes. Pages stay untouched until they are
   used. */
static dt__shared *dt__shared_layout(dt__shared *shared, char *memory, size_t user_bytes) {
    size_t n = (size_t)shared->ranks, at = (0 - (uintptr_t)memory) % DT__CACHE_LINE;
    size_t state = at + dt__align_up(sizeof(dt__shared)),
           records = state + n * sizeof(dt__rank_state),
           rings = records + dt__align_up(n * DT_RECORDS * sizeof(dt__op_record)),
           groups = rings + dt__align_up(n * n * sizeof(dt__packet_ring *));
    /* in the worst case every split makes a group for each rank */
    size_t ring_arena =
        groups + dt__group_bytes(shared->ranks) + (size_t)DT_SHARED_SPLITS * n * dt__group_bytes(1);
    size_t user = ring_arena + n * n * sizeof(dt__packet_ring),
           heaps = dt__align_page(user + dt__align_up(user_bytes));
    shared->group_arena_bytes = ring_arena - groups;
    shared->ring_arena_bytes = user - ring_arena;
    shared->zeroed_bytes = groups;
    shared->bytes = heaps + n * shared->heap_bytes + DT__CACHE_LINE;
    if (!memory) return NULL;
    shared->state = (dt__rank_state *)(void *)(memory + state);
    shared->records = (dt__op_record *)(void *)(memory + records);
    shared->rings = (dt__packet_ring **)(void *)(memory + rings);
    shared->group_arena = memory + groups;
    shared->ring_arena = memory + ring_arena;
    shared->user = memory + user;
    shared->heaps = memory + heaps;
    memcpy(memory + at, shared, sizeof *shared);
    return (dt__shared *)(void *)(memory + at);
}

/* ---- heaps ---- */

/* Each forked rank has a heap in the run's shared memory for the memory classes whose buffers other
   ranks read and write.

       | heap of rank 0                                     | heap of rank 1 ...
       | dt__heap | used | free | used | free | used | free |
             |             ^ |           ^ |           ^
             +--- next ----+ +-- next ---+ +-- next ---+    the last block: never used so far

   First fit: an allocation takes the beginning of the first free block that is large enough. The
   list of free blocks is in address order, and its nodes lie in the blocks. A freed block is
   coalesced with its free neighbours, and its whole pages are returned to the system. */

typedef struct dt__free_block { /* the header of a free block */
    size_t bytes;
    struct dt__free_block *next;
} dt__free_block;

/* The host table `host` passes other calls and other classes on to the table of dt_run's caller. */
typedef struct dt__heap {
    dt_host host;
    const dt_host *caller_host;
    size_t bytes;
    dt__free_block list; /* the head of the list, an empty block */
} dt__heap;

static int dt__is_heap_class(dt_mem mem) { return mem != DT_MEM_HOST && mem != DT_MEM_OPTIM; }

static void *dt__heap_alloc(void *user, size_t bytes, dt_mem mem) {
    dt__heap *heap = (dt__heap *)user;
    const dt_host *base = heap->caller_host;
    if (!dt__is_heap_class(mem)) return base->alloc(base->user, bytes, mem);
    if (bytes > heap->bytes) return NULL;
    bytes = dt__align_up(bytes);
    dt__free_block *before = &heap->list, *block, *rest;
    while (before->next && before->next->bytes < bytes) before = before->next;
    block = before->next;
    if (!block) return NULL;
    before->next = block->next;
    if (block->bytes == bytes) return block;
    rest = (dt__free_block *)(void *)((char *)block + bytes);
    rest->bytes = block->bytes - bytes;
    rest->next = block->next;
    before->next = rest;
    return block;
}

/* Joins a free block with the next free block if the two are adjacent. */
static void dt__heap_coalesce(dt__free_block *block) {
    if (!block->next || (char *)block + block->bytes != (char *)block->next) return;
    block->bytes += block->next->bytes;
    block->next = block->next->next;
}

static void dt__heap_free(void *user, void *p, size_t bytes, dt_mem mem) {
    dt__heap *heap = (dt__heap *)user;
    const dt_host *base = heap->caller_host;
    dt__free_block *before = &heap->list, *block = (dt__free_block *)p;
    if (!dt__is_heap_class(mem)) base->free(base->user, p, bytes, mem);
    if (!dt__is_heap_class(mem) || !p) return;
    while (before->next && before->next < block) before = before->next;
    block->bytes = dt__align_up(bytes);
    block->next = before->next;
    before->next = block;
    uintptr_t from = dt__align_page((uintptr_t)(block + 1)),
              to = ((uintptr_t)p + block->bytes) & ~(uintptr_t)65535;
    if (to > from && base->discard) base->discard(base->user, (void *)from, to - from);
    dt__heap_coalesce(block);
    dt__heap_coalesce(before);
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

/* Makes the heap at the beginning of this rank's part of the heaps. Returns its host table. */
static const dt_host *dt__heap_make(dt__shared *shared, const dt_host *base, int rank) {
    dt__heap *heap = (dt__heap *)(void *)(shared->heaps + (size_t)rank * shared->heap_bytes);
    const size_t head = dt__align_up(sizeof *heap);
    dt__free_block *all = (dt__free_block *)(void *)((char *)heap + head);
    dt__heap made = { .host = { .user = heap,
                          .alloc = dt__heap_alloc,
                          .free = dt__heap_free,
                          .now = dt__heap_now,
                          .sleep = dt__heap_sleep,
                          .log = dt__heap_log },
        .caller_host = base,
        .bytes = shared->heap_bytes - head,
        .list = { 0, all } };
    *heap = made;
    all->bytes = heap->bytes;
    all->next = NULL;
    return &heap->host;
}

// ==== 24. Launcher discovery =====================================================================

/* Launcher discovery: which rank is this process? A launcher (torchrun, mpirun, srun) sets the rank
   of each process in environment variables, whose names are one row of the table below (NULL: it
   has none). The first row whose variables name a rank wins. Later rows that name the same rank
   supply the values that the first row lacks.

       environment --> dt__launchers[] --> rank, size --> local rank --> rendezvous address */

static const char *dt__launch_env(const char *name) { return name ? getenv(name) : NULL; }

typedef struct dt__launcher {
    const char *name;
    struct {
        const char *rank, *size, *local_rank, *local_size;
    } env;
    const char *alt_size; /* used if env.size is not set */
    /* used instead of local_size: a list such as "2(x3),1", and this machine's index in it */
    const char *ranks_per_node, *node_index;
    /* rank 0's machine and port; port_taken is "True" if the launcher itself listens there */
    const char *master_host, *master_port, *port_taken;
    /* used instead of master_host: lists of machines, of which the first has rank 0 */
    const char *node_lists[2];
    /* the job's number, and its step's: a process outside of a step (a batch script) is no rank */
    const char *job[2];
} dt__launcher;

static const dt__launcher dt__launchers[] = {
    { .name = "DT", .env = { "DT_RANK", "DT_WORLD_SIZE", "DT_LOCAL_RANK", "DT_LOCAL_SIZE" } },
    { .name = "torchrun",
        .env = { "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE" },
        .master_host = "MASTER_ADDR",
        .master_port = "MASTER_PORT",
        .port_taken = "TORCHELASTIC_USE_AGENT_STORE" },
    { .name = "Open MPI",
        .env = { "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE" },
        .job = { "PMIX_NAMESPACE" } },
    { .name = "PMI",
        .env = { "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS" },
        .job = { "PMI_JOBID" } },
    { .name = "SLURM",
        .env = { "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL },
        .alt_size = "SLURM_NTASKS",
        .ranks_per_node = "SLURM_STEP_TASKS_PER_NODE",
        .node_index = "SLURM_NODEID",
        .node_lists = { "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST" },
        .job = { "SLURM_JOB_ID", "SLURM_STEP_ID" } },
    /* PMIx sets no size: this row exists so that dt refuses a PMIx job with an error text */
    { .name = "PMIx", .env = { "PMIX_RANK", "PMI_SIZE", NULL, NULL } },
};

enum {
    DT__LAUNCHERS = (int)(sizeof dt__launchers / sizeof dt__launchers[0]),
    DT__RENDEZVOUS_PORT = 29500, /* the default port */
    DT__JOB_PORTS = 20000,       /* first of 10,000 ports for jobs that name no port */
    DT__EPHEMERAL_PORTS = 32768  /* from here on the system may give a port to any socket */
};

static const char dt__host_chars[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                     "0123456789.-_";

/* Refuses the value of a variable: *out is a process without a launcher, and its text says why.
   Shortens a long value. */
static dt_status dt__launch_refuse(
    dt_launch *out, const char *name, const char *value, const char *why) {
    dt_launch refused = { .size = 1, .local_rank = -1 };
    snprintf(refused.text, sizeof refused.text, "%.60s=%.36s%s%.240s", name, value,
        strlen(value) > 36 ? "..." : "", why);
    dt__escape(refused.text, sizeof refused.text);
    *out = refused;
    return DT_ERR_ARG;
}

/* Reads the variable `name` into *number; leaves *number unchanged if the variable is not set. */
static dt_status dt__launch_number(
    dt_launch *out, const char *name, int min, int max, int *number) {
    const char *value = dt__launch_env(name);
    const char *end = value ? dt__parse_int(value, min, max, number) : "";
    if (end && !*end) return DT_OK;
    return dt__launch_refuse(
        out, name, value, dt__format(": not a whole number from %d to %d", min, max).s);
}

/* Returns the number of ranks on machine `node` (from 0), read from a list: "2(x3),1" is three
   machines with 2 ranks each, then one with 1 rank. Returns 0 if the list is too short or wrong. */
static int dt__launch_node_ranks(const char *list, int node) {
    for (int count, times = 1;; times = 1) {
        list = dt__parse_int(list, 1, 999999999, &count);
        if (list && list[0] == '(' && list[1] == 'x') {
            list = dt__parse_int(list + 2, 1, 999999999, &times);
            if (list && *list++ != ')') return 0;
        }
        if (!list) return 0;
        if (node < times) return count;
        node -= times;
        if (*list++ != ',') return 0;
    }
}

/* Stores the first machine of a SLURM node list, for example "rack1n03" for the list
   "rack[1-2,7]n[03-12],login". Returns 1, or 0 if the text is not a node list. */
static int dt__launch_first_host(const char *list, char *host, size_t capacity) {
    size_t used = 0, bytes;
    for (; *list && *list != ','; used += bytes) {
        int is_range = *list == '[';
        list += is_range;
        bytes = strspn(list, is_range ? "0123456789" : dt__host_chars);
        if (bytes == 0 || used + bytes >= capacity) return 0;
        memcpy(host + used, list, bytes);
        list += is_range ? strspn(list, "0123456789,-") : bytes;
        if (is_range && *list++ != ']') return 0;
    }
    host[used] = 0;
    return used > 0;
}

/* Splits "HOST:PORT", ":PORT" or "HOST". Returns 0 if the text is malformed. */
static int dt__split_address(const char *text, char *host, size_t capacity, int *port) {
    size_t length = strcspn(text, ":");
    const char *end = text + length;
    *port = DT__RENDEZVOUS_PORT;
    if (*end == ':') end = dt__parse_int(end + 1, 1, 65535, port);
    if (length >= capacity || !end || *end) return 0;
    memcpy(host, text, length);
    host[length] = 0;
    return 1;
}

/* Sets the rendezvous to a name or an address, which the variable `name` held, and a port. */
static dt_status dt__launch_set_rendezvous(
    dt_launch *out, const char *name, const char *host, int port) {
    size_t length = strspn(host, dt__host_chars);
    if (length == 0 || host[length] || length > sizeof out->rendezvous - sizeof ":65535")
        return dt__launch_refuse(out, name, host, ": not the name or IPv4 address of a machine");
    snprintf(out->rendezvous, sizeof out->rendezvous, "%s:%d", host, port);
    return DT_OK;
}

/* Returns a port derived from the job's name, most likely a different one for each job. */
static int dt__launch_job_port(const dt__launcher *row) {
    uint32_t hash = 0;
    for (int i = 0; i < 2; i++) {
        const char *c = dt__launch_env(row->job[i]);
        while (c && *c) hash = hash * 31 + (unsigned char)*c++;
    }
    return DT__JOB_PORTS + (int)(hash % 10000);
}

/* Finds rank 0's address. DT_RENDEZVOUS overrides the n rows of `same`, which name the same rank.
   If all ranks are on one machine, the loopback address suffices. On several machines a variable
   must name rank 0's address; if there is none, the rendezvous stays empty. */
static dt_status dt__launch_find_rendezvous(
    dt_launch *out, const dt__launcher *const *same, int n) {
    const char *name = "DT_RENDEZVOUS", *given = dt__launch_env(name), *list = NULL;
    char host[64] = "127.0.0.1";
    int port = 0;
    if (given && dt__split_address(given, host, sizeof host, &port))
        return dt__launch_set_rendezvous(out, name, host, port);
    if (given) return dt__launch_refuse(out, name, given, ": not HOST:PORT, as 10.0.0.1:29500");
    if (n == 0) return DT_OK;
    for (int i = 0; i < n; i++) {
        const char *master = dt__launch_env(same[i]->master_host),
                   *taken = dt__launch_env(same[i]->port_taken);
        for (int k = 0; k < 2 && !list; k++) list = dt__launch_env(name = same[i]->node_lists[k]);
        if (!port && dt__launch_env(same[i]->job[0])) port = dt__launch_job_port(same[i]);
        if (!master && !dt__launch_env(same[i]->master_port)) continue;
        port = DT__RENDEZVOUS_PORT;
        if (dt__launch_number(out, same[i]->master_port, 1, 65535, &port) != DT_OK)
            return DT_ERR_ARG;
        if (taken && strcmp(taken, "True") == 0)
            port = port < DT__EPHEMERAL_PORTS - 1 ? port + 1 : DT__JOB_PORTS + port % 10000;
        return dt__launch_set_rendezvous(out, same[i]->master_host, master ? master : host, port);
    }
    int is_one_machine = out->local_size ? out->local_size == out->size : !list;
    if (!is_one_machine && !list) return DT_OK;
    if (!is_one_machine && !dt__launch_first_host(list, host, sizeof host))
        return dt__launch_refuse(out, name, list, ": not a list of machines");
    return dt__launch_set_rendezvous(out, name, host, port ? port : DT__RENDEZVOUS_PORT);
}

static const char *dt__launch_size_name(const dt__launcher *row) {
    return row->alt_size && !dt__launch_env(row->env.size) ? row->alt_size : row->env.size;
}

/* Reads one launcher's variables into `out`. If they are not set, out->size is 0. */
static dt_status dt__launch_read_row(const dt__launcher *row, dt_launch *out) {
    const char *size_name = dt__launch_size_name(row), *size = dt__launch_env(size_name),
               *rank = dt__launch_env(row->env.rank), *counts = dt__launch_env(row->ranks_per_node);
    int node = -1;
    memset(out, 0, sizeof *out);
    out->local_rank = -1;
    if (row->job[1] && !dt__launch_env(row->job[1])) return DT_OK;
    if (!rank && !size) return DT_OK;
    if (!rank || !size)
        return dt__launch_refuse(out, rank ? row->env.rank : size_name, rank ? rank : size,
            dt__format(" is set, but %s is not", rank ? size_name : row->env.rank).s);
    if (dt__launch_number(out, size_name, 1, DT__MAX_RANKS, &out->size) != DT_OK ||
        dt__launch_number(out, row->env.rank, 0, out->size - 1, &out->rank) != DT_OK ||
        dt__launch_number(out, row->env.local_size, 1, out->size, &out->local_size) != DT_OK ||
        dt__launch_number(out, row->node_index, 0, DT__MAX_RANKS - 1, &node) != DT_OK)
        return DT_ERR_ARG;
    if (counts && node >= 0) {
        out->local_size = dt__launch_node_ranks(counts, node);
        if (out->local_size < 1 || out->local_size > out->size)
            return dt__launch_refuse(
                out, row->ranks_per_node, counts, ": not the ranks of each machine");
    }
    return dt__launch_number(out, row->env.local_rank, 0,
        (out->local_size ? out->local_size : out->size) - 1, &out->local_rank);
}

/* Writes the one-line summary. others: the launchers that name a different rank or size. */
static void dt__launch_describe(dt_launch *out, const dt__launcher *row, const char *others) {
    dt__text text = dt__format("rank %d of %d", out->rank, out->size);
    if (out->local_rank >= 0 && out->local_size)
        dt__put(&text, " (local %d of %d)", out->local_rank, out->local_size);
    else if (out->local_rank >= 0)
        dt__put(&text, " (local %d)", out->local_rank);
    dt__put(&text, " by %s: %s, %s; %s%s", row->name, row->env.rank, dt__launch_size_name(row),
        out->rendezvous[0] ? "rendezvous " : "no rendezvous, as DT_RENDEZVOUS is not set",
        out->rendezvous);
    if (others[0]) dt__put(&text, "; also set, but ignored: %s", others);
    dt__copy_name(out->text, sizeof out->text, text.s);
}

DT_API dt_status dt_launch_find(dt_launch *out) {
    const dt__launcher *same[DT__LAUNCHERS];
    dt_launch found;
    dt__text others = dt__format("%s", "");
    int n = 0;
    if (!out) return DT_ERR_ARG;
    for (const dt__launcher *row = dt__launchers; row < dt__launchers + DT__LAUNCHERS; row++) {
        dt_status status = dt__launch_read_row(row, &found);
        if (n == 0) *out = found;
        if (n == 0 && status != DT_OK) return status;
        if (status != DT_OK || found.size == 0) continue;
        if (found.rank != out->rank || found.size != out->size) {
            dt__put(&others, "%s%s", others.used ? ", " : "", row->name);
            continue;
        }
        if (out->local_size == 0) out->local_size = found.local_size;
        if (out->local_rank < 0) out->local_rank = found.local_rank;
        same[n++] = row;
    }
    if (n == 0) { /* a SLURM batch script has some of SLURM's variables but is not a rank */
        int is_batch = dt__launch_env("SLURM_PROCID") && !dt__launch_env("SLURM_STEP_ID");
        out->size = 1;
        snprintf(out->text, sizeof out->text, "not distributed: %s: one process",
            is_batch ? "a batch script of SLURM, where srun starts ranks"
                     : "no launcher's variables are set");
        return dt__launch_find_rendezvous(out, same, n);
    }
    snprintf(out->launcher, sizeof out->launcher, "%s", same[0]->name);
    if (dt__launch_find_rendezvous(out, same, n) != DT_OK) return DT_ERR_ARG;
    dt__launch_describe(out, same[0], others.s);
    return DT_OK;
}

// ==== 25. Proofs (SHA-256, HMAC) ================================================================

/* A proof is an HMAC-SHA256, keyed with the job's token, over the side that proves its identity and
   the hello records of both sides:

       proof = HMAC(SHA-256(token), side | hello of the caller | hello of the host)

   Each hello holds a nonce (the challenge), so a recorded proof is invalid in any other connection,
   and the side makes it invalid for the other side of the same one. (NIST, FIPS 180-4, 2015; H.
   Krawczyk et al., RFC 2104, 1997; the mutual scheme of ISO/IEC 9798-4.) Traffic after the
   handshake is neither encrypted nor signed, so proofs do not stop an attacker who can change
   packets in flight. */

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
    /* as k, but of the square roots of the first 8 primes */
    static const dt__sha256 start = { .h = { 0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19 } };
    *s = start;
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

/* The key has at most 64 bytes. */
static void dt__hmac(
    const void *key, size_t key_bytes, const void *data, size_t bytes, uint8_t digest[32]) {
    uint8_t inner[32]; /* digest cannot hold inner, because digest may be the key */
    dt__sha256 s;
    for (int outer = 0; outer < 2; outer++) {
        dt__sha256_begin(&s);
        for (size_t i = 0; i < 64; i++) {
            uint8_t byte = i < key_bytes ? ((const uint8_t *)key)[i] : 0;
            byte = (uint8_t)(byte ^ (outer ? 0x5c : 0x36));
            dt__sha256_add(&s, &byte, 1);
        }
        dt__sha256_add(&s, outer ? inner : data, outer ? sizeof inner : bytes);
        dt__sha256_end(&s, outer ? digest : inner);
    }
    dt__wipe(inner, sizeof inner);
}

/* The time of the comparison does not reveal where the secrets first differ. */
static int dt__equal_secrets(const uint8_t *a, const uint8_t *b, size_t bytes) {
    volatile uint8_t differ = 0;
    for (size_t i = 0; i < bytes; i++) differ = (uint8_t)(differ | (a[i] ^ b[i]));
    return differ == 0;
}

// ==== 26. Sockets and tokens =====================================================================

/* TCP sockets of IPv4, and the secret by which ranks prove that they belong to the job. It is a
   token that the user gives to all ranks, in dt_run_desc, a file or the environment; the token's
   SHA-256 is the key of the proofs. Without a token, at a loopback address, the key is random: rank
   0 makes it and gives it to the processes of its own user (the local key, below). */

enum {
    DT__TCP_MIN_TOKEN_BYTES = 16,
    DT__TCP_TEXT_BYTES = 512,
    DT__TCP_BACKLOG = 4096, /* if accept's queue is full, a connecting rank retries after 1 s */
    DT__TCP_SOCKET_FLAGS = SOCK_NONBLOCK | SOCK_CLOEXEC
};

/* An IPv4 address in network byte order and a port in host byte order. */
typedef struct dt__tcp_address {
    uint32_t ip, port;
} dt__tcp_address;

static dt__text dt__tcp_address_text(dt__tcp_address address) {
    uint8_t octet[4];
    memcpy(octet, &address.ip, sizeof octet);
    return dt__format(
        "%d.%d.%d.%d:%u", octet[0], octet[1], octet[2], octet[3], (unsigned)address.port);
}

static int dt__tcp_is_loopback(dt__tcp_address address) { return ntohl(address.ip) >> 24 == 127; }

static dt__tcp_address dt__tcp_address_of(const void *sockaddr) {
    struct sockaddr_in at;
    memcpy(&at, sockaddr, sizeof at);
    dt__tcp_address address = { (uint32_t)at.sin_addr.s_addr, ntohs(at.sin_port) };
    return address;
}

static struct sockaddr_in dt__tcp_sockaddr(dt__tcp_address address) {
    struct sockaddr_in at = { .sin_family = AF_INET,
        .sin_port = htons((uint16_t)address.port),
        .sin_addr = { .s_addr = address.ip } };
    return at;
}

/* Returns the address of this machine's first running interface; 0 if it has only the loopback. */
static uint32_t dt__tcp_interface_address(void) {
    struct ifaddrs *all = NULL;
    uint32_t ip = 0;
    if (getifaddrs(&all) != 0) return 0;
    for (const struct ifaddrs *one = all; one && !ip; one = one->ifa_next)
        if (one->ifa_addr && one->ifa_addr->sa_family == AF_INET && one->ifa_flags & IFF_RUNNING &&
            !dt__tcp_is_loopback(dt__tcp_address_of(one->ifa_addr)))
            ip = dt__tcp_address_of(one->ifa_addr).ip;
    freeifaddrs(all);
    return ip;
}

/* Parses "127.0.0.1:29500", "localhost:29500", "node17:29500", or the same without a port. Returns
   0 on failure. Many machines resolve their own name to a loopback address, which no other machine
   can reach: the address of an interface is better. */
static int dt__tcp_address_parse(const char *text, dt__tcp_address *address) {
    const struct addrinfo hints = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM };
    struct addrinfo *found = NULL;
    char host[256];
    int port;
    if (!dt__split_address(text ? text : "", host, sizeof host, &port)) return 0;
    if (!host[0] || strcmp(host, "localhost") == 0) snprintf(host, sizeof host, "127.0.0.1");
    address->port = (uint32_t)port;
    if (inet_pton(AF_INET, host, &address->ip) == 1) return 1;
    /* getaddrinfo would resolve "1.2" to 1.0.0.2 */
    if (strspn(host, "0123456789.") == strlen(host)) return 0;
    if (getaddrinfo(host, NULL, &hints, &found) != 0) return 0;
    address->ip = dt__tcp_address_of(found->ai_addr).ip;
    freeaddrinfo(found);
    uint32_t interface = dt__tcp_is_loopback(*address) ? dt__tcp_interface_address() : 0;
    if (interface) address->ip = interface;
    return address->ip != 0;
}

static int dt__tcp_would_block(void) {
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

static int dt__tcp_close_failed(int fd, int error) {
    close(fd);
    errno = error;
    return -1;
}

static int dt__tcp_socket(void) {
    if (dt__io_guard_std_fds() != 0) return -1;
    return socket(AF_INET, SOCK_STREAM | DT__TCP_SOCKET_FLAGS, 0);
}

#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44 /* since Linux 6.15; older headers lack the name, older kernels fail */
#endif

/* Sets the options of a link: TCP sends small packets at once and probes the peer.
   Heartbeat. With up to 8 TCP keepalive probes the kernel notices within timeout_s + 1 s that a
   peer's machine has vanished. (TCP_USER_TIMEOUT would also close a connection to a rank that
   computes for a long time without reading.) TCP retransmits after 0.2 s, 0.4 s, 0.8 s, ...; newer
   kernels let dt cap these pauses at timeout_s / 8, but at least 1 s, because the kernel closes a
   connection after 15 retransmissions. */
static void dt__tcp_set_options(int fd, double timeout_s) {
    int total_s = 1 + (int)fmin(timeout_s, 32000), interval_s = 1 + total_s / 16;
    int probes = (int)fmin(fmax((total_s - 1) / interval_s, 1), 8);
    const int options[6][3] = {
        { IPPROTO_TCP, TCP_NODELAY, 1 },
        { SOL_SOCKET, SO_KEEPALIVE, 1 },
        { IPPROTO_TCP, TCP_KEEPIDLE, (int)fmax(total_s - probes * interval_s, 1) },
        { IPPROTO_TCP, TCP_KEEPINTVL, interval_s },
        { IPPROTO_TCP, TCP_KEEPCNT, probes },
        { IPPROTO_TCP, TCP_RTO_MAX_MS, (int)(125 * fmin(fmax(timeout_s, 8), 960)) },
    };
    for (int i = 0; i < 6; i++)
        setsockopt(fd, options[i][0], options[i][1], &options[i][2], sizeof options[i][2]);
}

/* Returns the local address of a socket; zeros on failure. */
static dt__tcp_address dt__tcp_own_address(int fd) {
    struct sockaddr_in at;
    socklen_t length = sizeof at;
    if (getsockname(fd, (struct sockaddr *)&at, &length) != 0) memset(&at, 0, sizeof at);
    return dt__tcp_address_of(&at);
}

/* Returns a listening socket, -1 with errno set on failure. Port 0 stands for any free port. */
static int dt__tcp_listen(dt__tcp_address address, int backlog) {
    struct sockaddr_in at = dt__tcp_sockaddr(address);
    int one = 1, fd = dt__tcp_socket();
    if (fd < 0) return -1;
    /* connections of an earlier job to this port may still be in state TIME_WAIT */
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) == 0 && listen(fd, backlog) == 0) return fd;
    return dt__tcp_close_failed(fd, errno);
}

/* ---- the token ---- */

/* Reads the token without trailing white space and returns its length; or says `why` it cannot.
   Refuses a file that other users may read, because those users could join the job. */
static size_t dt__tcp_token_file(const char *path, char *token, size_t capacity, char *why) {
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
    while (n > 0 && memchr("\n\r ", token[n - 1], 3)) n--;
    return n > 0 ? (size_t)n : 0;
}

/* Makes the key of the proofs (HMAC), which the caller must wipe: from the token, or without one at
   random. Returns 1 if there is a token, DT__TCP_NO_TOKEN if there is none and none is needed, and
   0 if the token is missing or invalid; `why` (DT__TCP_TEXT_BYTES) then says what is wrong. */
enum { DT__TCP_NO_TOKEN = 2 };
static int dt__tcp_key(
    const dt_run_desc *desc, dt__tcp_address address, uint8_t key[32], char *why) {
    char buffer[4096];
    const char *token = desc->token, *from = "dt_run_desc.token", *path = getenv("DT_TOKEN_FILE");
    size_t bytes = 0;
    why[0] = 0;
    if (!token && path && path[0]) {
        bytes = dt__tcp_token_file(path, buffer, sizeof buffer, why);
        token = buffer;
        from = "DT_TOKEN_FILE";
    } else {
        if (!token && getenv("DT_TOKEN") && getenv("DT_TOKEN")[0])
            token = getenv(from = "DT_TOKEN");
        if (token) bytes = strlen(token);
    }
    if (token && bytes < DT__TCP_MIN_TOKEN_BYTES && !why[0])
        snprintf(why, DT__TCP_TEXT_BYTES, "the token of %s has %zu bytes; it needs at least %d",
            from, bytes, (int)DT__TCP_MIN_TOKEN_BYTES);
    if (!token && !dt__tcp_is_loopback(address) && desc->ranks > 1)
        snprintf(why, DT__TCP_TEXT_BYTES,
            "the rendezvous %.30s can be reached from other machines, so ranks must prove that "
            "they belong to the job, and there is no token. Make one: head -c 32 /dev/urandom | "
            "base64 > token; chmod 600 token; and start each rank with DT_TOKEN_FILE=token",
            dt__tcp_address_text(address).s);
    else if (!token && getrandom(key, 32, 0) != 32)
        snprintf(why, DT__TCP_TEXT_BYTES, "the system gives no random numbers (error %d)", errno);
    if (token && !why[0]) dt__sha256_of(token, bytes, key);
    dt__wipe(buffer, sizeof buffer);
    return why[0] ? 0 : token ? 1 : DT__TCP_NO_TOKEN;
}

/* ---- the local key ---- */

/* On the loopback any user of the machine could take the place of a rank that has not come yet. So
   without a token the key of the proofs is a random number that rank 0 gives only to processes of
   its own user:

       rank 0                                            rank i
       listens at the local socket, then at the
       rendezvous                                     <- connects to the rendezvous: hello
                                                      <- connects to the local socket
       the caller has this user: the key              -> the listener has this user: reads the key
       ...                                               the proofs of both sides (section 27)

   The local socket is a Unix socket: the kernel tells each end the user of the process at the other
   end (SO_PEERCRED). Its name contains the rendezvous and is abstract. It is no file, so nothing
   remains of a rank that is killed, and like the loopback address it belongs to the network
   namespace. Rank 0 makes it before it listens at the rendezvous. So a rank that reaches the
   rendezvous but no local socket knows that rank 0 has a token, or is not a rank. */

/* Returns a socket, bound to the name of the rendezvous if `is_listener` is 1, else connected to
   it; -1 with errno set on failure. */
static int dt__tcp_local_socket(dt__tcp_address rendezvous, int is_listener) {
    struct sockaddr_un at;
    memset(&at, 0, sizeof at);
    at.sun_family = AF_UNIX; /* the name follows a zero byte */
    int n = snprintf(at.sun_path + 1, sizeof at.sun_path - 1, "dt rendezvous %s",
        dt__tcp_address_text(rendezvous).s);
    socklen_t bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
    int fd =
        dt__io_guard_std_fds() == 0 ? socket(AF_UNIX, SOCK_STREAM | DT__TCP_SOCKET_FLAGS, 0) : -1;
    if (fd < 0) return -1;
    if (is_listener
            ? bind(fd, (struct sockaddr *)&at, bytes) == 0 && listen(fd, DT__TCP_BACKLOG) == 0
            : connect(fd, (struct sockaddr *)&at, bytes) == 0)
        return fd;
    return dt__tcp_close_failed(fd, errno);
}

/* Returns 1 if the process at the other end of a Unix socket has this process's user. Stores its
   user in *user. */
static int dt__tcp_is_same_user(int fd, uint32_t *user) {
    uint32_t ids[3]; /* struct ucred, which libc declares only with _GNU_SOURCE: pid, user, group */
    socklen_t bytes = sizeof ids;
    int is_known = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, ids, &bytes) == 0;
    *user = is_known ? ids[1] : (uint32_t)-1;
    return is_known && *user == (uint32_t)geteuid();
}

// ==== 27. Rendezvous ============================================================================

/* Rendezvous: all ranks connect to each other, one TCP connection per pair of ranks.

       rank 0                             rank i                              rank j < i
       listens at the rendezvous          connects to it, retrying
                                          listens at a free port
                                       <- hello: rank, address, nonce
       hello: nonce                    ->
                                       <- proof
       welcome: rank 0's own proof     ->
       all have connected: addresses   -> connects to each j, same handshake  -> ...

   A connection is pending until the other side's proof has been checked; then it is a link. A
   pending connection carries only handshake records, which have a fixed size, and none of their
   values is trusted. dt__tcp_rules is its state machine:

       accepted   AWAIT_HELLO  --hello / hello-->  AWAIT_PROOF    --proof / welcome-->  link
       dialled    AWAIT_ANSWER --hello / proof-->  AWAIT_WELCOME  --welcome-->          link

   Each accepted connection takes a slot of the listener. When all slots are taken, the listener
   evicts the pending connection that has been silent longest; a rank that is evicted connects
   again. Failed attempts are counted and do not block other connections. Numbers are sent in the
   machine's byte order: a rank with the other byte order is refused, because its version number
   does not match. */

enum {
    DT__TCP_VERSION = 3,
    DT__TCP_FRAME_MAGIC = 0x64744632, /* the first field of the table and of each frame */
    /* 4 * ranks + DT__TCP_PENDING_SLOTS slots, but at most DT__TCP_MAX_PENDING_SLOTS */
    DT__TCP_PENDING_SLOTS = 256,
    DT__TCP_MAX_PENDING_SLOTS = 1024,
    DT__TCP_NAME_BYTES = 64
};
#define DT__TCP_PENDING_S 2.0 /* a pending connection is closed after this many seconds */
/* a pending connection may be evicted only after it has sent no record for this many seconds */
#define DT__TCP_EVICT_SILENCE_S 0.03
#define DT__TCP_SKEW_S 0.5 /* the ranks' timeouts may begin up to this many seconds apart */

static const char dt__tcp_magic[8] = { 'd', 't', ' ', 't', 'c', 'p', '\r', '\n' };

/* The events of a pending connection: a complete record of a kind, or one of the others. */
enum { DT__TCP_HELLO = 1, DT__TCP_PROOF, DT__TCP_WELCOME, DT__TCP_REFUSED };
enum { DT__TCP_FOREIGN = 5, DT__TCP_OTHER_VERSION, DT__TCP_HUNG_UP, DT__TCP_LATE, DT__TCP_ANY };

/* Its states. DT__TCP_ACCEPTED and DT__TCP_DIALLED are the two states of each side. */
enum { DT__TCP_AWAIT_HELLO = 1, DT__TCP_AWAIT_PROOF = 2, DT__TCP_ACCEPTED = 1 | 2 };
enum { DT__TCP_AWAIT_ANSWER = 4, DT__TCP_AWAIT_WELCOME = 8, DT__TCP_DIALLED = 4 | 8 };

/* Why a rank is refused: the second line is told only to a rank whose proof is valid. */
enum { DT__TCP_WRONG_VERSION = 1, DT__TCP_WRONG_TOKEN };
enum { DT__TCP_WRONG_JOB = 3, DT__TCP_WRONG_SIZE, DT__TCP_WRONG_RANK, DT__TCP_RANK_PRESENT };

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
   has failed. The addresses of all ranks follow. */
typedef struct dt__tcp_table {
    uint32_t magic, failed;
    int32_t check;                 /* rank 0's dt_run_desc.check, which all ranks use */
    char text[DT__TCP_TEXT_BYTES]; /* if `failed` is set: why the rendezvous failed */
} dt__tcp_table;

typedef struct dt__tcp_pending {
    int fd, state;               /* fd -1: a free slot, or a dialled connection that has ended */
    int rank;                    /* of a dialled connection: the rank that should listen there */
    size_t received;             /* number of bytes of `record` that have been received */
    double last_heard, deadline; /* time of accept or of the last record; time to close */
    dt__tcp_address address;     /* of the other end */
    const char *why;             /* of a dialled connection: why it was closed */
    dt__tcp_handshake record, ours, theirs; /* the record that is arriving; both hellos */
} dt__tcp_pending;

/* A connection to a rank that has proved that it belongs to the job. */
typedef struct dt__tcp_link {
    int fd, pid; /* fd -1: not connected */
    char host[DT__TCP_NAME_BYTES];
} dt__tcp_link;

typedef struct dt__tcp_rendezvous {
    dt_ctx *ctx;
    int rank, size, check;
    double timeout_s;
    dt__stopwatch watch; /* all deadlines use this clock */
    uint64_t job; /* the job's random number, made by rank 0; 0 if this rank does not know it yet */
    uint8_t *key; /* (32) the HMAC key; this struct holds no copy of it */
    int has_local_key; /* 1 if the ranks get the key at rank 0's local socket */
    int local;         /* this socket, on rank 0 until all ranks have come; else -1 */
    int listener;      /* the socket that accepts the higher ranks; -1: none */
    int slots;
    long rejected;
    dt__text last_rejection;    /* why the last pending connection was rejected */
    dt__tcp_pending *pending;   /* (slots) */
    dt__tcp_address *addresses; /* (size) where each rank listens */
    dt__tcp_link *links;        /* (size) */
} dt__tcp_rendezvous;

/* ---- handshake records ---- */

/* Fails the context if there are no random numbers, because a proof over a known nonce could be a
   recorded one. */
static void dt__tcp_random(dt__tcp_rendezvous *r, void *number, size_t bytes) {
    if (getrandom(number, bytes, 0) != (ssize_t)bytes)
        dt_fail(r->ctx, DT_ERR_IO, "the system gives no random numbers (error %d)", errno);
}

static dt__tcp_handshake dt__tcp_handshake_make(dt__tcp_rendezvous *r, uint32_t kind) {
    dt__tcp_handshake record = { .version = DT__TCP_VERSION,
        .kind = kind,
        .rank = r->rank,
        .size = r->size,
        .pid = (int32_t)getpid(),
        .address = dt__tcp_own_address(r->listener),
        .job = r->job };
    memcpy(record.magic, dt__tcp_magic, sizeof record.magic);
    if (gethostname(record.host, sizeof record.host - 1) != 0) record.host[0] = 0;
    if (kind == DT__TCP_HELLO) dt__tcp_random(r, record.nonce, sizeof record.nonce);
    return record;
}

/* Computes the proof of one side: "caller", the rank that connects, or "host". */
static void dt__tcp_prove(const uint8_t key[32], const char *side, const dt__tcp_handshake *caller,
    const dt__tcp_handshake *host, uint8_t proof[32]) {
    struct {
        char side[16];
        dt__tcp_handshake caller, host;
    } transcript = { "", *caller, *host };
    snprintf(transcript.side, sizeof transcript.side, "dt tcp %s", side);
    dt__hmac(key, 32, &transcript, sizeof transcript, proof);
}

static int dt__tcp_is_proof(const uint8_t key[32], const char *side,
    const dt__tcp_handshake *caller, const dt__tcp_handshake *host, const uint8_t proof[32]) {
    uint8_t expected[32];
    dt__tcp_prove(key, side, caller, host, expected);
    return dt__equal_secrets(expected, proof, sizeof expected);
}

/* Copies the host name that the peer sent, escaped. */
static void dt__tcp_host_name(char name[DT__TCP_NAME_BYTES], const char sent[DT__TCP_NAME_BYTES]) {
    snprintf(name, DT__TCP_NAME_BYTES, "%.*s", DT__TCP_NAME_BYTES - 1, sent[0] ? sent : "?");
    dt__escape(name, DT__TCP_NAME_BYTES);
}

/* Returns the text that says why `host` refuses `caller`. */
static dt__text dt__tcp_reason(const dt__tcp_handshake *caller, const dt__tcp_handshake *host) {
    const struct {
        const char *text;
        int caller, host; /* the numbers in the text */
    } reasons[] = {
        { "reason %d", host->reason, 0 },
        { "version %u of the protocol, not %u", (int)caller->version, (int)host->version },
        { "the token is not this job's", 0, 0 },
        { "it belongs to another job", 0, 0 },
        { "its job has %d ranks, this one has %d", caller->size, host->size },
        { "rank %d is not expected here", caller->rank, 0 },
        { "rank %d is already connected: process %d on %s", caller->rank, host->pid },
    };
    int i = host->reason > 0 && host->reason <= DT__TCP_RANK_PRESENT ? host->reason : 0;
    dt__text text;
    char name[DT__TCP_NAME_BYTES];
    dt__tcp_host_name(name, host->host);
    snprintf(text.s, sizeof text.s, reasons[i].text, reasons[i].caller, reasons[i].host, name);
    return text;
}

/* Returns a text such as "rank 3 (process 4711 on node7)". */
static dt__text dt__tcp_rank_text(int rank, int pid, const char *host) {
    dt__text text = dt__format("rank %d", rank);
    if (pid > 0) dt__put(&text, " (process %d on %s)", pid, host);
    return text;
}

/* ---- pending connections ---- */

/* Counts a rejected connection. who: its address or user. */
static void dt__tcp_count_rejection(dt__tcp_rendezvous *r, const char *who, const char *why) {
    r->last_rejection = dt__format("%.30s: %.150s", who, why);
    if (r->rejected++ == 0)
        dt_log(r->ctx, DT_LOG_NOTICE, "rank %d at %s rejects %s (others will only be counted)",
            r->rank, dt__tcp_address_text(dt__tcp_own_address(r->listener)).s, r->last_rejection.s);
}

static void dt__tcp_reject(dt__tcp_rendezvous *r, dt__tcp_pending *p, const char *why) {
    close(p->fd);
    p->fd = -1;
    p->why = why;
    if (p->state & DT__TCP_ACCEPTED)
        dt__tcp_count_rejection(r, dt__tcp_address_text(p->address).s, why);
}

/* Sends a record, which fits into the empty buffer of a new connection. Returns 0 on failure. */
static int dt__tcp_send_record(const dt__tcp_pending *p, const dt__tcp_handshake *record) {
    return send(p->fd, record, sizeof *record, MSG_NOSIGNAL) == (ssize_t)sizeof *record;
}

static void dt__tcp_make_link(dt__tcp_rendezvous *r, dt__tcp_pending *p, int rank) {
    dt__tcp_link *link = &r->links[rank];
    link->fd = p->fd;
    link->pid = p->theirs.pid;
    dt__tcp_host_name(link->host, p->theirs.host);
    r->addresses[rank] = p->theirs.address;
    dt__tcp_set_options(p->fd, r->timeout_s);
    p->fd = -1;
}

/* Answers the other side's hello: a caller gets a hello, the host gets the proof. */
static void dt__tcp_answer_hello(dt__tcp_rendezvous *r, dt__tcp_pending *p, const char *why) {
    int is_caller = (p->state & DT__TCP_DIALLED) != 0;
    dt__tcp_handshake answer = dt__tcp_handshake_make(r, is_caller ? DT__TCP_PROOF : DT__TCP_HELLO);
    (void)why;
    p->theirs = p->record;
    if (is_caller)
        dt__tcp_prove(r->key, "caller", &p->ours, &p->theirs, answer.proof);
    else
        p->ours = answer;
    dt__tcp_send_record(p, &answer);
}

/* Returns 0 if this rank accepts the caller, else the reason of the refusal. */
static int dt__tcp_check_caller(const dt__tcp_rendezvous *r, const dt__tcp_pending *p) {
    const dt__tcp_handshake *theirs = &p->theirs;
    if (p->record.version != DT__TCP_VERSION) return DT__TCP_WRONG_VERSION;
    if (!dt__tcp_is_proof(r->key, "caller", theirs, &p->ours, p->record.proof))
        return DT__TCP_WRONG_TOKEN;
    if (theirs->job != r->job && (theirs->job || r->rank > 0)) return DT__TCP_WRONG_JOB;
    if (theirs->size != r->size) return DT__TCP_WRONG_SIZE;
    if (theirs->rank <= r->rank || theirs->rank >= r->size) return DT__TCP_WRONG_RANK;
    return r->links[theirs->rank].fd >= 0 ? DT__TCP_RANK_PRESENT : 0;
}

/* Welcomes or refuses the caller. */
static void dt__tcp_decide(dt__tcp_rendezvous *r, dt__tcp_pending *p, const char *why) {
    int reason = dt__tcp_check_caller(r, p), rank = p->theirs.rank;
    dt__tcp_handshake answer =
        dt__tcp_handshake_make(r, reason ? DT__TCP_REFUSED : DT__TCP_WELCOME);
    answer.reason = reason;
    if (reason == DT__TCP_RANK_PRESENT) {
        answer.pid = r->links[rank].pid;
        memcpy(answer.host, r->links[rank].host, sizeof answer.host);
    }
    if (!reason) dt__tcp_prove(r->key, "host", &p->theirs, &p->ours, answer.proof);
    const dt__tcp_handshake *caller = reason == DT__TCP_WRONG_VERSION ? &p->record : &p->theirs;
    int is_sent = dt__tcp_send_record(p, &answer);
    if (is_sent && !reason)
        dt__tcp_make_link(r, p, rank);
    else
        dt__tcp_reject(r, p, reason ? dt__tcp_reason(caller, &answer).s : why);
}

/* Fails the context. why: what is wrong with the rank that listens; NULL: it refuses this rank. */
static void dt__tcp_give_up(dt__tcp_rendezvous *r, dt__tcp_pending *p, const char *why) {
    dt__text at = dt__tcp_address_text(p->address);
    if (p->record.version != DT__TCP_VERSION) p->record.reason = DT__TCP_WRONG_VERSION;
    if (why)
        dt_fail(r->ctx, DT_ERR_COMM, why, at.s, p->rank);
    else
        dt_fail(r->ctx, DT_ERR_COMM, "rank %d at %s refuses this rank: %s", p->rank, at.s,
            dt__tcp_reason(&p->ours, &p->record).s);
    dt__tcp_reject(r, p, why);
}

static void dt__tcp_check_host(dt__tcp_rendezvous *r, dt__tcp_pending *p, const char *why) {
    uint64_t job = p->theirs.job;
    if (!dt__tcp_is_proof(r->key, "host", &p->ours, &p->theirs, p->record.proof) || job == 0 ||
        (p->rank > 0 && job != r->job)) {
        dt__tcp_give_up(r, p, why);
        return;
    }
    r->job = job;
    dt__tcp_make_link(r, p, p->rank);
}

/* The state machine of a pending connection. The first rule that names its state and the event
   applies. */
static const struct dt__tcp_rule {
    int states, event, next; /* next: the state after the action; 0: the action decides */
    void (*action)(dt__tcp_rendezvous *r, dt__tcp_pending *p, const char *why);
    const char *why;
} dt__tcp_rules[] = {
    { DT__TCP_AWAIT_HELLO, DT__TCP_HELLO, DT__TCP_AWAIT_PROOF, dt__tcp_answer_hello, NULL },
    { DT__TCP_AWAIT_PROOF, DT__TCP_PROOF, 0, dt__tcp_decide, "it hung up" },
    { DT__TCP_ACCEPTED, DT__TCP_FOREIGN, 0, dt__tcp_reject, "it does not speak this protocol" },
    { DT__TCP_ACCEPTED, DT__TCP_OTHER_VERSION, 0, dt__tcp_decide, NULL },
    { DT__TCP_ACCEPTED, DT__TCP_HUNG_UP, 0, dt__tcp_reject, "it hung up" },
    { DT__TCP_ACCEPTED, DT__TCP_LATE, 0, dt__tcp_reject, "it did not say who it is" },
    { DT__TCP_ACCEPTED, DT__TCP_ANY, 0, dt__tcp_reject, "it violates the protocol" },
    { DT__TCP_AWAIT_ANSWER, DT__TCP_HELLO, DT__TCP_AWAIT_WELCOME, dt__tcp_answer_hello, NULL },
    { DT__TCP_AWAIT_WELCOME, DT__TCP_WELCOME, 0, dt__tcp_check_host,
        "what listens at %s does not prove that it is rank %d of this job" },
    { DT__TCP_DIALLED, DT__TCP_REFUSED, 0, dt__tcp_give_up, NULL },
    { DT__TCP_DIALLED, DT__TCP_OTHER_VERSION, 0, dt__tcp_give_up, NULL },
    { DT__TCP_DIALLED, DT__TCP_HUNG_UP, 0, dt__tcp_reject,
        "the connection is closed without an answer" },
    { DT__TCP_DIALLED, DT__TCP_LATE, 0, dt__tcp_reject, "there is no answer" },
    { DT__TCP_DIALLED, DT__TCP_ANY, 0, dt__tcp_give_up,
        "what listens at %s is not rank %d of a job" },
};

/* Reads what has arrived at a pending connection. Returns the event as soon as the bytes suffice, 0
   if there is none. */
static int dt__tcp_next_event(dt__tcp_pending *p, double now) {
    const size_t named = sizeof dt__tcp_magic, versioned = offsetof(dt__tcp_handshake, kind);
    const dt__tcp_handshake *record = &p->record;
    ssize_t n =
        recv(p->fd, (char *)&p->record + p->received, sizeof *record - p->received, MSG_DONTWAIT);
    int is_open = n > 0 || (n < 0 && dt__tcp_would_block());
    if (n > 0) p->received += (size_t)n;
    if (memcmp(record->magic, dt__tcp_magic, p->received < named ? p->received : named) != 0)
        return DT__TCP_FOREIGN;
    if (p->received >= versioned && record->version != DT__TCP_VERSION)
        return DT__TCP_OTHER_VERSION;
    if (p->received < sizeof *record)
        return !is_open ? DT__TCP_HUNG_UP : now > p->deadline ? DT__TCP_LATE : 0;
    p->received = 0;
    p->last_heard = now;
    /* only the rank that was dialled may answer */
    int is_from_rank =
        p->state & DT__TCP_ACCEPTED || record->kind == DT__TCP_REFUSED || record->rank == p->rank;
    int is_kind = record->kind >= DT__TCP_HELLO && record->kind <= DT__TCP_REFUSED;
    return is_kind && is_from_rank ? (int)record->kind : DT__TCP_ANY;
}

/* Processes the next event of a pending connection. Returns 0 if there is none. */
static int dt__tcp_read_pending(dt__tcp_rendezvous *r, dt__tcp_pending *p, double now) {
    const struct dt__tcp_rule *rule = dt__tcp_rules;
    int event = dt__tcp_next_event(p, now);
    if (!event) return 0;
    while (!(rule->states & p->state) || (rule->event != event && rule->event != DT__TCP_ANY))
        rule++;
    if (rule->next) p->state = rule->next;
    rule->action(r, p, rule->why);
    return 1;
}

/* ---- the listener ---- */

/* Returns a free slot, if `may_be_free`, else the slot of the pending connection that has been
   silent longest; NULL if none has been silent for DT__TCP_EVICT_SILENCE_S seconds. */
static dt__tcp_pending *dt__tcp_find_slot(dt__tcp_rendezvous *r, double now, int may_be_free) {
    dt__tcp_pending *oldest = NULL;
    for (dt__tcp_pending *p = r->pending; p < r->pending + r->slots; p++) {
        if (p->fd < 0 && may_be_free) return p;
        if (p->fd < 0 || now < p->last_heard + DT__TCP_EVICT_SILENCE_S) continue;
        if (!oldest || p->last_heard < oldest->last_heard) oldest = p;
    }
    return oldest;
}

/* Accepts the connections that are waiting, until no slot or no file descriptor is free. */
static void dt__tcp_accept_new(dt__tcp_rendezvous *r, double now) {
    for (int come = 0; come < r->slots; come++) {
        dt__tcp_pending *p = dt__tcp_find_slot(r, now, 1);
        struct sockaddr_in at;
        socklen_t length = sizeof at;
        if (!p || dt__io_guard_std_fds() != 0) return;
        /* libc declares accept4 only with _GNU_SOURCE */
        int fd = (int)syscall(
            SYS_accept4, r->listener, (struct sockaddr *)&at, &length, DT__TCP_SOCKET_FLAGS);
        if (fd < 0 && (errno == ECONNABORTED || errno == EINTR)) continue;
        if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
            p = dt__tcp_find_slot(r, now, 0);
            if (p) dt__tcp_reject(r, p, "there are no more descriptors");
        }
        if (fd < 0) return;
        if (p->fd >= 0) dt__tcp_reject(r, p, "it said nothing while others came");
        memset(p, 0, sizeof *p);
        p->fd = fd;
        p->state = DT__TCP_AWAIT_HELLO;
        p->last_heard = now;
        p->deadline = now + DT__TCP_PENDING_S;
        p->address = dt__tcp_address_of(&at);
    }
}

/* Gives the key to the processes of this user that ask for it at the local socket. */
static void dt__tcp_give_key(dt__tcp_rendezvous *r) {
    for (int i = 0; i < r->slots && dt__io_guard_std_fds() == 0; i++) {
        int fd = (int)syscall(SYS_accept4, r->local, NULL, NULL, DT__TCP_SOCKET_FLAGS);
        uint32_t user;
        if (fd < 0) return;
        if (dt__tcp_is_same_user(fd, &user))
            send(fd, r->key, 32, MSG_NOSIGNAL); /* fits into the empty buffer of the socket */
        else
            dt__tcp_count_rejection(
                r, dt__format("user %u", user).s, "it asks for the key of another user's job");
        close(fd);
    }
}

/* Opens the local socket, if ranks get the key from it, and then the listener. */
static dt_status dt__tcp_open_listener(dt__tcp_rendezvous *r, dt__tcp_address address) {
    if (r->has_local_key && r->rank == 0) r->local = dt__tcp_local_socket(address, 1);
    if (r->has_local_key && r->rank == 0 && r->local < 0)
        return dt_fail(r->ctx, DT_ERR_COMM,
            "cannot make the local socket of %s, where ranks of this user get the job's key: %s "
            "(error %d). Use another port, or give all ranks a token (DT_TOKEN_FILE)",
            dt__tcp_address_text(address).s,
            errno == EADDRINUSE ? "another program has it" : "the system refuses it", errno);
    r->listener = dt__tcp_listen(address, DT__TCP_BACKLOG);
    if (r->listener >= 0) return DT_OK;
    return dt_fail(r->ctx, DT_ERR_COMM, "cannot listen at %s: %s (error %d)",
        dt__tcp_address_text(address).s,
        errno == EADDRINUSE      ? "another program does"
        : errno == EADDRNOTAVAIL ? "that address is not this machine's"
                                 : "the system refuses it",
        errno);
}

static void dt__tcp_close_listener(dt__tcp_rendezvous *r) {
    if (r->local >= 0) close(r->local);
    r->local = -1;
    if (r->listener < 0) return;
    for (int i = 0; i < r->slots; i++)
        if (r->pending[i].fd >= 0) close(r->pending[i].fd);
    if (r->rejected > 1)
        dt_log(r->ctx, DT_LOG_DETAIL, "rank %d rejected %ld connections, the last %s", r->rank,
            r->rejected, r->last_rejection.s);
    close(r->listener);
    r->listener = -1;
}

/* Sleeps. Then a rank that listens and knows its job serves its pending connections. */
static void dt__tcp_pause(dt__tcp_rendezvous *r, double seconds) {
    r->watch.host->sleep(r->watch.host->user, seconds);
    if (r->listener < 0 || !r->job) return;
    double now = dt__waited(&r->watch);
    if (r->local >= 0) dt__tcp_give_key(r);
    dt__tcp_accept_new(r, now);
    for (int i = 0; i < r->slots; i++)
        if (r->pending[i].fd >= 0) dt__tcp_read_pending(r, &r->pending[i], now);
}

/* Accepts connections until all higher ranks are connected. Rank 0 drops the connections that their
   ranks have closed; these ranks may connect again. A rank sends no data at this time, so any event
   on its socket means that the connection is closed. */
static dt_status dt__tcp_accept_ranks(dt__tcp_rendezvous *r) {
    double deadline = dt__waited(&r->watch) + r->timeout_s;
    for (;; dt__tcp_pause(r, 5e-4)) {
        dt__text missing = dt__format("%s", "");
        int n = 0;
        for (int rank = r->rank + 1; rank < r->size; rank++) {
            struct pollfd event = { r->links[rank].fd, POLLIN, 0 };
            if (event.fd >= 0 && r->rank == 0 && poll(&event, 1, 0) > 0) {
                close(event.fd);
                r->links[rank].fd = -1;
            }
            if (r->links[rank].fd < 0) dt__put(&missing, n++ ? ", %d" : "%d", rank);
        }
        if (n == 0 || dt_error(r->ctx)) return dt_error(r->ctx);
        if (dt__waited(&r->watch) <= deadline) continue;
        dt__text also = dt__format("%s", "");
        if (r->rejected)
            dt__put(&also, "; %ld connection%s rejected, the last %s", r->rejected,
                r->rejected > 1 ? "s were" : " was", r->last_rejection.s);
        return dt_fail(r->ctx, DT_ERR_TIMEOUT,
            "timeout %.1f s at %s: of %d ranks rank%s %s did not come%s", r->timeout_s,
            dt__tcp_address_text(dt__tcp_own_address(r->listener)).s, r->size, n > 1 ? "s" : "",
            missing.s, also.s);
    }
}

/* ---- the dialling rank ---- */

/* Sends or receives bytes on a link. Returns 0 if it is closed or the deadline has passed. */
static int dt__tcp_transfer(
    dt__tcp_rendezvous *r, int fd, int is_send, void *data, size_t bytes, double deadline) {
    char *at = (char *)data, *end = at + bytes;
    while (at < end) {
        ssize_t n = is_send ? send(fd, at, (size_t)(end - at), MSG_NOSIGNAL)
                            : recv(fd, at, (size_t)(end - at), 0);
        if (n > 0)
            at += n;
        else if (n == 0 || !dt__tcp_would_block() || dt__waited(&r->watch) > deadline)
            return 0;
        else
            dt__tcp_pause(r, 2e-4);
    }
    return 1;
}

/* Tries once to connect. Returns -1 with errno set on failure. Repeated calls of connect say what
   has become of the attempt. */
static int dt__tcp_connect(dt__tcp_rendezvous *r, dt__tcp_address address, double deadline) {
    struct sockaddr_in at = dt__tcp_sockaddr(address);
    int fd = dt__tcp_socket();
    if (fd < 0) return -1;
    while (connect(fd, (struct sockaddr *)&at, sizeof at) != 0 && errno != EISCONN) {
        int error = errno;
        if ((error != EINPROGRESS && error != EALREADY) || dt__waited(&r->watch) >= deadline)
            return dt__tcp_close_failed(fd, error);
        dt__tcp_pause(r, 2e-4);
    }
    /* TCP self-connect: if no process listens at the port and the port is in the ephemeral port
       range, the system may give this port to the new socket, which then connects to itself */
    dt__tcp_address own = dt__tcp_own_address(fd);
    if (own.port != address.port || own.ip != address.ip) return fd;
    return dt__tcp_close_failed(fd, ECONNREFUSED);
}

/* Gets the job's key from rank 0. Returns 1 if this rank has it, or if there is no local socket:
   then this rank keeps its own random key, with which no proof is valid. Returns -1 if the context
   has failed, and 0, with the *reason, if an attempt may be repeated. */
static int dt__tcp_get_key(dt__tcp_rendezvous *r, double deadline, const char **reason) {
    uint32_t user;
    int fd = dt__tcp_local_socket(r->addresses[0], 0), is_got;
    *reason = "its local socket does not answer";
    if (fd < 0) return errno == ECONNREFUSED;
    if (!dt__tcp_is_same_user(fd, &user)) {
        close(fd);
        dt_fail(r->ctx, DT_ERR_COMM,
            "the local socket of %s is that of user %u, and this rank has user %u: ranks of "
            "several users need a token, the same for all (DT_TOKEN_FILE)",
            dt__tcp_address_text(r->addresses[0]).s, user, (unsigned)geteuid());
        return -1;
    }
    is_got = dt__tcp_transfer(r, fd, 0, r->key, 32, deadline);
    close(fd);
    return is_got;
}

/* The caller's side of the handshake. Returns 1 if the rank has accepted this rank, -1 if the
   context has failed, and 0, with the *reason, if an attempt may be repeated. */
static int dt__tcp_shake_hands(
    dt__tcp_rendezvous *r, int fd, int rank, double deadline, const char **reason) {
    dt__tcp_pending p = { .fd = fd,
        .state = DT__TCP_AWAIT_ANSWER,
        .rank = rank,
        .deadline = deadline,
        .address = r->addresses[rank] };
    p.ours = dt__tcp_handshake_make(r, DT__TCP_HELLO);
    dt__tcp_send_record(&p, &p.ours);
    int has_key = rank > 0 || !r->has_local_key ? 1 : dt__tcp_get_key(r, deadline, reason);
    if (has_key <= 0) return close(fd), has_key;
    while (p.fd >= 0)
        if (!dt__tcp_read_pending(r, &p, dt__waited(&r->watch))) dt__tcp_pause(r, 2e-4);
    *reason = p.why;
    return dt_error(r->ctx) ? -1 : r->links[rank].fd >= 0;
}

/* Connects to a rank, with retries. After its first connection to rank 0, this rank starts to
   listen on the interface of that connection. Rank 0 may start later than this rank, so every
   failed attempt is repeated. The other ranks listen already: only a failed handshake is repeated,
   because the rank may have evicted this connection. */
static dt_status dt__tcp_dial(dt__tcp_rendezvous *r, int rank) {
    dt__tcp_address address = r->addresses[rank];
    double deadline = dt__waited(&r->watch) + r->timeout_s;
    for (;; dt__tcp_pause(r, 1e-2)) {
        int fd = dt__tcp_connect(r, address, deadline);
        const char *reason =
            errno == ECONNREFUSED ? "nobody listens there" : "it cannot be reached";
        if (fd >= 0 && r->listener < 0) {
            dt__tcp_address here = dt__tcp_own_address(fd);
            here.port = 0;
            if (dt__tcp_open_listener(r, here) != DT_OK) return close(fd), dt_error(r->ctx);
        }
        if (fd >= 0 && dt__tcp_shake_hands(r, fd, rank, deadline + DT__TCP_SKEW_S, &reason))
            return dt_error(r->ctx);
        int is_late = dt__waited(&r->watch) > deadline;
        if (rank > 0 && (fd < 0 || is_late))
            return dt_fail(r->ctx, DT_ERR_PEER, "connection to rank %d was lost: at %s %s", rank,
                dt__tcp_address_text(address).s, reason);
        if (is_late)
            return dt_fail(r->ctx, DT_ERR_TIMEOUT, "timeout %.1f s: rank 0 did not come to %s: %s",
                r->timeout_s, dt__tcp_address_text(address).s, reason);
    }
}

/* ---- the rendezvous ---- */

static dt_status dt__tcp_lost_link(dt__tcp_rendezvous *r, int rank) {
    const dt__tcp_link *link = &r->links[rank];
    return dt_fail(r->ctx, DT_ERR_PEER, "connection to %s was lost at the rendezvous",
        dt__tcp_rank_text(rank, link->pid, link->host).s);
}

/* Rank 0 accepts a connection from each rank, then sends the table and the addresses to each. */
static void dt__tcp_host_rendezvous(dt__tcp_rendezvous *r) {
    if (r->listener < 0) {
        if (dt__tcp_open_listener(r, r->addresses[0]) != DT_OK) return;
        if (!dt__tcp_is_loopback(r->addresses[0]))
            dt_log(r->ctx, DT_LOG_NOTICE,
                "%s: the data of the ranks will be neither encrypted nor signed; use a network "
                "that you trust",
                dt__tcp_address_text(r->addresses[0]).s);
    }
    dt__tcp_random(r, &r->job, sizeof r->job);
    r->job |= 1;
    dt__tcp_accept_ranks(r);
    dt__tcp_close_listener(r);
    dt__tcp_table table = {
        .magic = DT__TCP_FRAME_MAGIC, .failed = dt_error(r->ctx) != DT_OK, .check = r->check
    };
    snprintf(table.text, sizeof table.text, "%s", dt_error_text(r->ctx));
    double deadline = dt__waited(&r->watch) + r->timeout_s;
    size_t bytes = (size_t)r->size * sizeof *r->addresses;
    for (int rank = 1; rank < r->size; rank++) {
        int fd = r->links[rank].fd;
        if (fd >= 0 && (!dt__tcp_transfer(r, fd, 1, &table, sizeof table, deadline) ||
                           !dt__tcp_transfer(r, fd, 1, r->addresses, bytes, deadline)))
            dt__tcp_lost_link(r, rank);
    }
}

/* Receives the addresses of all ranks. Rank 0's timeout may have begun later than this rank's, but
   this rank waits longer: only rank 0's error text can name the missing ranks. */
static dt_status dt__tcp_recv_table(dt__tcp_rendezvous *r) {
    dt__tcp_table table;
    int fd = r->links[0].fd;
    double deadline = dt__waited(&r->watch) + r->timeout_s + DT__TCP_SKEW_S;
    size_t bytes = (size_t)r->size * sizeof *r->addresses;
    if (!dt__tcp_transfer(r, fd, 0, &table, sizeof table, deadline) ||
        !dt__tcp_transfer(r, fd, 0, r->addresses, bytes, deadline) ||
        table.magic != DT__TCP_FRAME_MAGIC)
        return dt__tcp_lost_link(r, 0);
    table.text[sizeof table.text - 1] = 0;
    if (table.failed) return dt_fail(r->ctx, DT_ERR_PEER, "peer failed first: %s", table.text);
    r->check = table.check;
    return DT_OK;
}

/* The other ranks connect to rank 0, then to all lower ranks, then accept the higher ranks. */
static void dt__tcp_join_rendezvous(dt__tcp_rendezvous *r) {
    if (dt__tcp_dial(r, 0) == DT_OK) dt__tcp_recv_table(r);
    for (int rank = 1; rank < r->rank && !dt_error(r->ctx); rank++) dt__tcp_dial(r, rank);
    if (!dt_error(r->ctx)) dt__tcp_accept_ranks(r);
}

/* Rendezvous: connects this rank to all others, links[0 .. desc->ranks). Returns rank 0's
   dt_run_desc.check. After a failure some links may be connected. has_local_key: 1 if the ranks get
   the key from rank 0, which has it here. listening: rank 0's listening socket if it is open
   already, else -1. */
static int dt__tcp_meet(dt_ctx *ctx, const dt_run_desc *desc, dt__tcp_address rendezvous,
    uint8_t key[32], int has_local_key, int listening, dt__tcp_link *links) {
    dt__tcp_rendezvous r = { .ctx = ctx,
        .rank = desc->rank,
        .size = desc->ranks,
        .check = desc->check,
        .timeout_s = desc->timeout_s,
        .watch = dt__stopwatch_start(dt_ctx_host(ctx), desc->timeout_s),
        .key = key,
        .has_local_key = has_local_key,
        .local = -1,
        .listener = listening,
        .links = links };
    int slots = 4 * r.size + DT__TCP_PENDING_SLOTS;
    if (slots > DT__TCP_MAX_PENDING_SLOTS) slots = DT__TCP_MAX_PENDING_SLOTS;
    size_t bytes =
        (size_t)slots * sizeof(dt__tcp_pending) + (size_t)r.size * sizeof(dt__tcp_address);
    r.pending = (dt__tcp_pending *)dt_alloc(ctx, DT_MEM_HOST, bytes, "pending connections");
    for (int rank = 0; rank < r.size; rank++) links[rank].fd = -1;
    if (r.pending) {
        memset(r.pending, 0, bytes);
        for (int i = 0; i < slots; i++) r.pending[i].fd = -1;
        r.slots = slots;
        r.addresses = (dt__tcp_address *)(void *)(r.pending + slots);
        r.addresses[0] = rendezvous;
        if (r.rank == 0)
            dt__tcp_host_rendezvous(&r);
        else
            dt__tcp_join_rendezvous(&r);
    }
    dt__tcp_close_listener(&r);
    dt_free(ctx, DT_MEM_HOST, r.pending, bytes);
    return r.check;
}

// ==== 28. Transport: TCP ========================================================================

/* After the rendezvous (section 27) a connection carries frames: a header and its bytes. A packet
   is one frame.
   Bulk data, a PUSH at the sender and a PULL at the receiver with the same id, are cut into
   segments of DT__TCP_SEGMENT_BYTES, so that a packet waits for one segment at most:

       packet |hd|bytes|hd|bytes|               |hd|bytes|
       bulk                     |hd| segment of 7 |       |hd| segment of 7 |hd| segment of 8 |
       stream ---------------------------------------------------------------------------->

       sender                                             receiver
       packets -> output (per peer) \                    / input -> packets (recv)
                                     >- socket - socket -
       user's memory ---------------/                    \-> user's memory

   To send a packet, dt copies it to the output buffer of its peer and writes it by one system
   call. A received packet stays in the input buffer, which all connections share; an incomplete
   packet is kept with its peer. Bulk data are never copied, except for up to one input buffer of
   them that arrives together with the first header. One poll serves all sockets: dt__tcp_recv
   reads them in turn, and polls again only after it has returned all packets that it read. The
   transport moves data only in calls of recv, send, push and lost. */

enum {
    DT__TCP_SEGMENT_BYTES = 1024 * 1024,
    DT__TCP_OUTPUT_BYTES = 4 * DT_PACKET_BYTES,
    DT__TCP_INPUT_BYTES = 65536,
    /* maximum number of reads from, and of writes to, one peer between two polls */
    DT__TCP_TURNS_PER_POLL = 16
};

enum { DT__TCP_PACKET = 1, DT__TCP_BULK };
typedef struct dt__tcp_header {
    uint32_t magic, kind;
    uint64_t bytes, id; /* id: of the push and the pull; 0 in a packet */
} dt__tcp_header;

/* A push or a pull, also of the MPI transport (section 29). A cancelled pull stays until its data
   have arrived, which are dropped. A cancelled push stays if it has begun to write a segment, which
   it then owns. */
typedef struct dt__bulk {
    int peer, is_pull, is_cancelled;
    uint64_t id;
    char *buf;
    /* done: number of bytes received (pull), in complete segments (push), in begun pieces (MPI) */
    size_t bytes, done;
    size_t told; /* `done` at the last dt__tcp_test */
    struct dt__bulk *next;
#ifdef DT_USE_MPI
    MPI_Request request; /* of the current piece */
#endif
} dt__bulk;

typedef struct dt__tcp_peer {
    int fd;                   /* -1: not connected */
    int error;                /* errno of the call that found the connection lost, or EBADMSG */
    dt__bulk *pushes, *pulls; /* unfinished, the oldest first */
    dt__bulk *pull;           /* the pull whose segment is arriving */
    size_t partial_bytes, output_bytes;
    size_t segment_written; /* written bytes of the first push's next segment and its header */
    char partial[sizeof(dt__tcp_header) + DT_PACKET_BYTES]; /* the first bytes of a packet */
    char output[DT__TCP_OUTPUT_BYTES];                      /* packets that have not been written */
} dt__tcp_peer;

typedef struct dt__tcp {
    dt_ctx *ctx;
    int rank, size, check;         /* check: rank 0's dt_run_desc.check */
    dt__tcp_peer *peers;           /* (size) */
    dt__tcp_link *links;           /* (size) */
    struct pollfd *polls;          /* (size): the result of the last poll */
    int turn, reads;               /* the peer that is being read; number of reads in its turn */
    dt__bulk *unused_bulks;        /* for reuse */
    char *input;                   /* (DT__TCP_INPUT_BYTES), 8-byte aligned; of the peer in turn */
    size_t input_begin, input_end; /* the bytes that have not been parsed */
} dt__tcp;

static size_t dt__tcp_bytes(int size) {
    return sizeof(dt__tcp) +
           (size_t)size * (sizeof(dt__tcp_peer) + sizeof(dt__tcp_link) + sizeof(struct pollfd)) +
           DT__TCP_INPUT_BYTES;
}

static void dt__tcp_close_peer(dt__tcp_peer *peer) {
    if (peer->fd >= 0) close(peer->fd);
    peer->fd = -1;
}

/* A connection on which a write has failed may still be read. */
static int dt__tcp_can_write(const dt__tcp_peer *peer) { return peer->fd >= 0 && !peer->error; }

/* Makes a push or a pull. */
static dt__bulk *dt__bulk_make(
    dt__tcp *t, int is_pull, int peer, uint64_t id, const void *buf, size_t bytes) {
    dt__bulk *bulk = t->unused_bulks;
    if (bulk)
        t->unused_bulks = bulk->next;
    else
        bulk = (dt__bulk *)dt_alloc(t->ctx, DT_MEM_HOST, sizeof *bulk, "a bulk transfer");
    if (!bulk) return NULL;
    memset(bulk, 0, sizeof *bulk);
    bulk->peer = peer;
    bulk->is_pull = is_pull;
    bulk->id = id;
    bulk->buf = (char *)buf;
    bulk->bytes = bytes;
    return bulk;
}

/* Frees the segment that a cancelled push owns. */
static void dt__bulk_free_copy(dt__tcp *t, const dt__bulk *push) {
    const dt_host *host = dt_ctx_host(t->ctx);
    host->free(host->user, push->buf, push->bytes, DT_MEM_HOST);
}

static void dt__bulk_release(dt__tcp *t, dt__bulk *bulk) {
    bulk->is_cancelled = 0;
    bulk->next = t->unused_bulks;
    t->unused_bulks = bulk;
}

static void dt__tcp_unlink(dt__bulk **link, const dt__bulk *bulk) {
    while (*link && *link != bulk) link = &(*link)->next;
    if (*link) *link = bulk->next;
}

/* Returns the number of bytes up to the end of the current segment. */
static size_t dt__tcp_segment_left(const dt__bulk *bulk) {
    size_t left = bulk->bytes - bulk->done,
           in_segment = DT__TCP_SEGMENT_BYTES - bulk->done % DT__TCP_SEGMENT_BYTES;
    return left < in_segment ? left : in_segment;
}

/* ---- reading ---- */

/* Counts n bytes of the segment that is arriving, which now lie in the pull's buffer. */
static void dt__tcp_count_pulled(dt__tcp *t, dt__tcp_peer *peer, size_t n) {
    dt__bulk *pull = peer->pull;
    if (n == dt__tcp_segment_left(pull)) peer->pull = NULL;
    pull->done += n;
    if (pull->done < pull->bytes) return;
    dt__tcp_unlink(&peer->pulls, pull);
    if (pull->is_cancelled) dt__bulk_release(t, pull);
}

/* Checks a header. If it begins a segment, sets the peer's pull. Returns 0 if it is malformed. */
static int dt__tcp_begin_frame(dt__tcp_peer *peer, const dt__tcp_header *header) {
    if (header->magic != DT__TCP_FRAME_MAGIC) return 0;
    if (header->kind == DT__TCP_PACKET)
        return header->id == 0 && header->bytes > 0 && header->bytes <= DT_PACKET_BYTES;
    dt__bulk *pull = peer->pulls;
    while (pull && pull->id != header->id) pull = pull->next;
    if (header->kind != DT__TCP_BULK || !pull) return 0;
    if (header->bytes != dt__tcp_segment_left(pull)) return 0;
    peer->pull = pull;
    return 1;
}

/* Parses the input up to its next whole packet and returns the packet; copies bulk data to their
   pulls. If no whole packet is left, keeps the rest of the input with the peer and returns NULL. */
static const void *dt__tcp_parse(dt__tcp *t, size_t *bytes) {
    dt__tcp_peer *peer = &t->peers[t->turn];
    while (t->input_begin < t->input_end && peer->fd >= 0) {
        char *at = t->input + t->input_begin, *body = at + sizeof(dt__tcp_header);
        size_t left = t->input_end - t->input_begin;
        dt__tcp_header header;
        if (peer->pull) {
            size_t n = dt__tcp_segment_left(peer->pull);
            if (n > left) n = left;
            if (!peer->pull->is_cancelled) memcpy(peer->pull->buf + peer->pull->done, at, n);
            t->input_begin += n;
            dt__tcp_count_pulled(t, peer, n);
            continue;
        }
        if (left >= sizeof header) {
            memcpy(&header, at, sizeof header);
            if (!dt__tcp_begin_frame(peer, &header)) {
                peer->error = EBADMSG;
                dt__tcp_close_peer(peer);
                break;
            }
            t->input_begin += peer->pull ? sizeof header : 0;
            if (peer->pull) continue;
        }
        if (left < sizeof header || left - sizeof header < header.bytes) {
            memcpy(peer->partial, at, left);
            peer->partial_bytes = left;
            break;
        }
        *bytes = (size_t)header.bytes;
        t->input_begin += sizeof header + *bytes;
        char *packet = body - (uintptr_t)body % 8; /* aligned: over the end of its header */
        return packet == body ? packet : memmove(packet, body, *bytes);
    }
    t->input_begin = t->input_end = 0;
    return NULL;
}

/* Reads once from the peer in turn: the rest of a segment straight into its pull's buffer, other
   data into the input, which must be empty. */
static void dt__tcp_read(dt__tcp *t) {
    dt__tcp_peer *peer = &t->peers[t->turn];
    dt__bulk *pull = peer->pull && !peer->pull->is_cancelled ? peer->pull : NULL;
    struct iovec pieces[2];
    ssize_t n;
    pieces[0].iov_base = pull ? pull->buf + pull->done : NULL;
    pieces[0].iov_len = pull ? dt__tcp_segment_left(pull) : 0;
    memcpy(t->input, peer->partial, peer->partial_bytes);
    pieces[1].iov_base = t->input + peer->partial_bytes;
    /* behind a segment only a header, so that the next segment need not be copied */
    pieces[1].iov_len =
        pull ? sizeof(dt__tcp_header) : (size_t)DT__TCP_INPUT_BYTES - peer->partial_bytes;
    do n = readv(peer->fd, pieces, 2);
    while (n < 0 && errno == EINTR);
    int is_filled = n > 0 && (size_t)n == pieces[0].iov_len + pieces[1].iov_len;
    t->reads = is_filled ? t->reads + 1 : DT__TCP_TURNS_PER_POLL;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n < 0 && !peer->error) peer->error = errno;
    if (n <= 0) {
        dt__tcp_close_peer(peer);
        return;
    }
    size_t direct = (size_t)n < pieces[0].iov_len ? (size_t)n : pieces[0].iov_len;
    if (direct) dt__tcp_count_pulled(t, peer, direct);
    t->input_end = peer->partial_bytes + (size_t)n - direct;
    peer->partial_bytes = 0;
}

/* ---- writing ---- */

static int dt__tcp_has_output(const dt__tcp_peer *peer) {
    return dt__tcp_can_write(peer) && (peer->output_bytes > 0 || peer->pushes != NULL);
}

/* Writes as many bytes as fit into the socket's buffer, and returns their number. If the connection
   is lost, sets peer->error; data that the peer sent earlier may still be read. */
static size_t dt__tcp_write_pieces(dt__tcp_peer *peer, struct iovec *pieces, int count) {
    struct msghdr message;
    ssize_t n;
    memset(&message, 0, sizeof message);
    message.msg_iov = pieces;
    message.msg_iovlen = (size_t)count;
    do n = sendmsg(peer->fd, &message, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) peer->error = errno;
    return n < 0 ? 0 : (size_t)n;
}

/* Writes the rest of the first push's next segment. Returns 0 if the socket is full. */
static int dt__tcp_write_segment(dt__tcp *t, dt__tcp_peer *peer) {
    dt__bulk *push = peer->pushes;
    size_t bytes = dt__tcp_segment_left(push), at = peer->segment_written;
    dt__tcp_header header = { DT__TCP_FRAME_MAGIC, DT__TCP_BULK, bytes, push->id };
    size_t in_header = at < sizeof header ? at : sizeof header, in_data = at - in_header;
    struct iovec pieces[2] = { { (char *)&header + in_header, sizeof header - in_header },
        { push->buf + push->done + in_data, bytes - in_data } };
    peer->segment_written += dt__tcp_write_pieces(peer, pieces, 2);
    if (peer->segment_written < sizeof header + bytes) return 0;
    peer->segment_written = 0;
    push->done += bytes;
    if (push->done < push->bytes) return 1;
    peer->pushes = push->next;
    if (push->is_cancelled) {
        dt__bulk_free_copy(t, push);
        dt__bulk_release(t, push);
    }
    return 1;
}

/* Writes until the socket is full: the current segment, packets, further segments. */
static void dt__tcp_write(dt__tcp *t, dt__tcp_peer *peer) {
    for (int i = 0; i < DT__TCP_TURNS_PER_POLL && dt__tcp_has_output(peer); i++) {
        if (peer->output_bytes > 0 && peer->segment_written == 0) {
            struct iovec piece = { peer->output, peer->output_bytes };
            size_t n = dt__tcp_write_pieces(peer, &piece, 1);
            peer->output_bytes -= n;
            memmove(peer->output, peer->output + n, peer->output_bytes);
            if (peer->output_bytes > 0) return;
        } else if (!dt__tcp_write_segment(t, peer)) {
            return;
        }
    }
}

/* ---- the functions of the transport ---- */

static int dt__tcp_send(
    void *user, int to, const void *head, size_t head_bytes, const void *body, size_t body_bytes) {
    dt__tcp *t = (dt__tcp *)user;
    dt__tcp_peer *peer = &t->peers[to];
    dt__tcp_header header = { DT__TCP_FRAME_MAGIC, DT__TCP_PACKET, head_bytes + body_bytes, 0 };
    size_t bytes = sizeof header + head_bytes + body_bytes;
    if (peer->output_bytes + bytes > DT__TCP_OUTPUT_BYTES) dt__tcp_write(t, peer);
    if (!dt__tcp_can_write(peer)) return -1;
    if (peer->output_bytes + bytes > DT__TCP_OUTPUT_BYTES) return 0;
    char *to_write = peer->output + peer->output_bytes;
    memcpy(to_write, &header, sizeof header);
    memcpy(to_write + sizeof header, head, head_bytes);
    if (body_bytes) memcpy(to_write + sizeof header + head_bytes, body, body_bytes);
    peer->output_bytes += bytes;
    dt__tcp_write(t, peer);
    return dt__tcp_can_write(peer) ? 1 : -1;
}

/* Polls all sockets, writes to those that have space, and leaves the reading to the calls that
   follow. Returns 0 if no socket is ready. */
static int dt__tcp_poll(dt__tcp *t) {
    for (int rank = 0; rank < t->size; rank++) {
        t->polls[rank].fd = t->peers[rank].fd; /* poll skips descriptors below 0 */
        t->polls[rank].events =
            (short)(POLLIN | (dt__tcp_has_output(&t->peers[rank]) ? POLLOUT : 0));
        t->polls[rank].revents = 0;
    }
    t->turn = t->reads = 0;
    if (poll(t->polls, (nfds_t)t->size, 0) <= 0) return 0;
    for (int rank = 0; rank < t->size; rank++)
        if (t->polls[rank].revents & POLLOUT) dt__tcp_write(t, &t->peers[rank]);
    return 1;
}

/* Returns the next packet: of the input, else of the sockets that the last poll found ready, else
   after one more poll. */
static const void *dt__tcp_recv(void *user, int from, int *sender, size_t *bytes) {
    dt__tcp *t = (dt__tcp *)user;
    const short readable = POLLIN | POLLHUP | POLLERR;
    (void)from;
    for (int may_poll = 1;;) {
        const void *packet = dt__tcp_parse(t, bytes);
        if (packet) return *sender = t->turn, packet;
        if (t->turn < t->size && t->reads < DT__TCP_TURNS_PER_POLL && t->peers[t->turn].fd >= 0 &&
            t->polls[t->turn].revents & readable)
            dt__tcp_read(t);
        else if (t->turn < t->size)
            t->turn++, t->reads = 0;
        else if (!may_poll-- || !dt__tcp_poll(t))
            return NULL;
    }
}

/* Failure detection. A connection is lost when its socket reports its end, after all packets that
   arrived before. Writes a text such as "connection to rank 3 (process 4711 on node7) was lost: its
   machine does not answer". */
static int dt__tcp_lost(void *user, int rank, char *why) {
    const dt__tcp *t = (const dt__tcp *)user;
    const dt__tcp_link *link = &t->links[rank];
    int error = t->peers[rank].error;
    if (rank == t->rank || t->peers[rank].fd >= 0) return 0;
    int is_silent = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
    snprintf(why, DT__TCP_TEXT_BYTES, "connection to %.400s was lost%s",
        dt__tcp_rank_text(rank, link->pid, link->host).s,
        error == EBADMSG ? ": it sent a malformed frame"
        : is_silent      ? ": its machine does not answer"
                         : "");
    return 1;
}

static int dt__tcp_pid(void *user, int rank) {
    const dt__tcp *t = (const dt__tcp *)user;
    char name[DT__TCP_NAME_BYTES] = "";
    if (gethostname(name, sizeof name - 1) != 0) return 0;
    return strncmp(name, t->links[rank].host, sizeof name - 1) == 0 ? t->links[rank].pid : 0;
}

/* Begins a push or a pull: appends it to its list. */
static dt__bulk *dt__tcp_bulk_begin(
    dt__tcp *t, int is_pull, int peer, uint64_t id, const void *buf, size_t bytes) {
    dt__bulk **end = is_pull ? &t->peers[peer].pulls : &t->peers[peer].pushes;
    while (*end) end = &(*end)->next;
    return *end = dt__bulk_make(t, is_pull, peer, id, buf, bytes);
}

static void *dt__tcp_push(void *user, int to, uint64_t id, const void *buf, size_t bytes) {
    dt__tcp *t = (dt__tcp *)user;
    dt__bulk *push = dt__tcp_bulk_begin(t, 0, to, id, buf, bytes);
    dt__tcp_write(t, &t->peers[to]);
    return push;
}

static void *dt__tcp_pull(void *user, int from, uint64_t id, void *buf, size_t bytes) {
    return dt__tcp_bulk_begin((dt__tcp *)user, 1, from, id, buf, bytes);
}

/* The segment that is being written must be completed, else the peer could not read the next frame.
   The caller may reuse its buffer, so a copy of the segment replaces the push. The receiver of a
   cancelled push gets no wrong data: the copied segment is valid, and without the others its pull
   does not complete. */
static void dt__tcp_cancel(void *user, void *request) {
    dt__tcp *t = (dt__tcp *)user;
    dt__bulk *bulk = (dt__bulk *)request;
    dt__tcp_peer *peer = &t->peers[bulk->peer];
    const dt_host *host = dt_ctx_host(t->ctx);
    size_t bytes = dt__tcp_segment_left(bulk);
    char *copy = NULL;
    if (bulk->is_pull && bulk->done < bulk->bytes) {
        bulk->is_cancelled = 1;
        return;
    }
    int is_begun = bulk == peer->pushes && peer->segment_written > 0 && dt__tcp_can_write(peer);
    if (is_begun) copy = (char *)host->alloc(host->user, bytes, DT_MEM_HOST);
    if (copy) {
        bulk->is_cancelled = 1;
        bulk->buf = (char *)memcpy(copy, bulk->buf + bulk->done, bytes);
        bulk->bytes = bytes;
        bulk->done = 0;
        return;
    }
    if (is_begun) dt__tcp_close_peer(peer);
    dt__tcp_unlink(&peer->pushes, bulk);
    dt__bulk_release(t, bulk);
}

static int dt__tcp_test(void *user, void *request, char *why) {
    dt__tcp *t = (dt__tcp *)user;
    dt__bulk *bulk = (dt__bulk *)request;
    int has_moved = bulk->done > bulk->told;
    bulk->told = bulk->done;
    if (bulk->done == bulk->bytes) return dt__bulk_release(t, bulk), 1;
    if (!dt__tcp_lost(t, bulk->peer, why)) return has_moved ? 2 : 0;
    dt__tcp_cancel(t, bulk);
    return -1;
}

static void dt__tcp_free_bulks(dt__tcp *t, dt__bulk *bulk) {
    for (dt__bulk *next; bulk; bulk = next) {
        next = bulk->next;
        if (bulk->is_cancelled && !bulk->is_pull) dt__bulk_free_copy(t, bulk);
        dt_free(t->ctx, DT_MEM_HOST, bulk, sizeof *bulk);
    }
}

/* Writes what send and push have left over, for at most DT__TCP_FLUSH_S seconds, and closes all
   connections. */
#define DT__TCP_FLUSH_S 0.25
static void dt__tcp_free(dt__tcp *t) {
    const dt_host *host = dt_ctx_host(t->ctx);
    dt__stopwatch watch = dt__stopwatch_start(host, 8 * DT__TCP_FLUSH_S);
    for (;; host->sleep(host->user, 1e-3)) {
        int left = 0;
        for (int rank = 0; rank < t->size; rank++) {
            dt__tcp_write(t, &t->peers[rank]);
            left += dt__tcp_has_output(&t->peers[rank]);
        }
        if (left == 0 || dt__waited(&watch) >= DT__TCP_FLUSH_S) break;
    }
    for (int rank = 0; rank < t->size; rank++) {
        dt__tcp_close_peer(&t->peers[rank]);
        dt__tcp_free_bulks(t, t->peers[rank].pushes);
        dt__tcp_free_bulks(t, t->peers[rank].pulls);
    }
    dt__tcp_free_bulks(t, t->unused_bulks);
    dt_free(t->ctx, DT_MEM_HOST, t, dt__tcp_bytes(t->size));
}

static dt_transport dt__tcp_transport(dt__tcp *t) {
    dt_transport transport = { .name = "tcp",
        .user = t,
        .send = dt__tcp_send,
        .recv = dt__tcp_recv,
        .lost = dt__tcp_lost,
        .pid = dt__tcp_pid,
        .push = dt__tcp_push,
        .pull = dt__tcp_pull,
        .test = dt__tcp_test,
        .cancel = dt__tcp_cancel };
    return transport;
}

static void dt__world_failed(
    dt_ctx *ctx, const dt_attach_desc *desc, const dt__node *node, dt__shared *shared);

/* Connects this rank to all other ranks. On failure fails the context, which ends the waits of the
   ranks that are connected, and returns NULL. Arguments as of dt__tcp_meet. */
static dt__tcp *dt__tcp_make(dt_ctx *ctx, const dt_run_desc *desc, dt__tcp_address rendezvous,
    uint8_t key[32], int has_local_key, int listening) {
    size_t bytes = dt__tcp_bytes(desc->ranks);
    dt__tcp *t = (dt__tcp *)dt_alloc(ctx, DT_MEM_HOST, bytes, "connections");
    if (listening >= 0 && (!t || desc->ranks == 1)) close(listening);
    if (!t) return NULL;
    memset(t, 0, bytes - DT__TCP_INPUT_BYTES);
    t->ctx = ctx;
    t->check = desc->check;
    t->rank = desc->rank;
    t->size = desc->ranks;
    t->peers = (dt__tcp_peer *)(void *)(t + 1);
    t->polls = (struct pollfd *)(void *)(t->peers + t->size);
    t->links = (dt__tcp_link *)(void *)(t->polls + t->size);
    t->input = (char *)t + bytes - DT__TCP_INPUT_BYTES;
    t->links[t->rank].fd = -1;
    if (t->size > 1)
        t->check = dt__tcp_meet(ctx, desc, rendezvous, key, has_local_key, listening, t->links);
    for (int rank = 0; rank < t->size; rank++) t->peers[rank].fd = t->links[rank].fd;
    if (dt_error(ctx) == DT_OK) return t;
    dt_transport transport = dt__tcp_transport(t);
    dt_attach_desc failed = { .rank = t->rank, .transport = &transport, .size = t->size };
    dt__world_failed(ctx, &failed, NULL, NULL);
    dt__tcp_free(t);
    return NULL;
}

// ==== 29. Transport: MPI ========================================================================

/* Each rank is a process that a launcher started: mpirun -np 4 ./a.out.

       ranks of one machine        a memory segment: collectives and packets, as forked ranks
       packets to other machines   communicator `packets`; one receive per rank is always posted
       bulk data                   communicator `bulk`, tag = id modulo MPI_TAG_UB
       failure detection           TCP connections between all ranks (section 27)

   dt does not call MPI_Allreduce, which guarantees no order of its sums. It never blocks inside
   MPI, because MPI does not report failed ranks: it starts each operation and tests for its
   completion. No message is longer than its receive, because MPICH aborts the program when it
   truncates one.

   Every send is synchronous (MPI_Issend): it is complete only when the other rank has begun to
   receive it. At the end of a run a rank whose sends are complete enters a reduction, and receives
   unwanted messages until the reduction is complete. Then no message is in flight that could arrive
   in the next run. (T. Hoefler, C. Siebert, A. Lumsdaine, "Scalable communication protocols for
   dynamic sparse data exchange", 2010; MPI Forum, "MPI: A Message-Passing Interface Standard",
   version 3.1, 2015.) */

#ifdef DT_USE_MPI

/* number of packets that can be in flight to each rank; an abort has a slot of its own */
enum { DT__MPI_SENDS = 8, DT__MPI_SLOTS = DT__MPI_SENDS + 1 };
/* seconds between two polls of the TCP connections; a poll takes longer with more ranks */
#define DT__MPI_POLL_S(ranks) (1e-3 + 2e-5 * (ranks))
/* time limit in seconds for all waits after a rank died; the launcher soon ends all ranks */
#define DT__MPI_AFTER_LOSS_S 0.2
/* bulk data go in pieces of at most this many bytes, because MPI's counts are of type int */
#ifndef DT__MPI_MAX_BYTES
#define DT__MPI_MAX_BYTES ((size_t)1 << 30)
#endif

typedef struct dt__mpi_info { /* each rank sends these values to all ranks, three times */
    char machine[128];        /* names the machine and its namespaces */
    int64_t part;             /* ranks of a machine share memory if their parts are equal */
    /* The segment: where this rank has mapped it, or 0; and on the first rank of the machine, which
       makes it, the process and the descriptor from which the others can map it, and its size. */
    uint64_t address, bytes;
    int64_t pid, fd;
    dt__tcp_address rendezvous; /* rank 0: where it listens, and the key of the connections */
    uint8_t key[32];
} dt__mpi_info;

typedef struct dt__mpi {
    const dt_host *host;
    dt_ctx *ctx;
    int rank, size, max_tag;
    int initialized; /* 1 if dt called MPI_Init_thread, 0 if the program did */
    /* the program's error handler of MPI_COMM_WORLD; during the run dt replaces it by one that
       makes MPI's functions return errors */
    MPI_Errhandler saved_handler;
    MPI_Comm packets, bulk;
    dt__stopwatch watch; /* runs since dt_run began; all deadlines use this clock */
    double timeout_s;
    /* deadlines of the cancelled requests, and of all waits after a rank was lost; 0 if unset */
    double cancel_until, lost_until;
    double next_poll;    /* time of the next poll of the TCP connections, on the host's clock */
    size_t bytes;        /* of this struct and its arrays; not freed if MPI may write into them */
    dt__mpi_info *infos; /* (size) */
    char (*outgoing)[DT_PACKET_BYTES]; /* (size, DT__MPI_SLOTS) */
    char (*incoming)[DT_PACKET_BYTES]; /* (size) */
    MPI_Request *sends;                /* (size, DT__MPI_SLOTS) */
    MPI_Request *receives;             /* (size) from ranks on other machines */
    int *turns;    /* (size) number of packets sent to each rank, modulo DT__MPI_SENDS */
    int delivered; /* the sender of the packet that the last dt__mpi_recv returned, or -1 */
    MPI_Request drain_request; /* receives an unwanted message into drain_buffer */
    void *drain_buffer;
    size_t drain_bytes;
    /* abandoned: 1 if a request has failed or did not end in time; has_met: 1 once all ranks have
       come to the end */
    int abandoned, has_met;
    MPI_Request request;      /* of a collective of MPI, which writes into: */
    int failed, first_failed; /* this rank, and the lowest one, with a failure; else `size` */
    dt_report report;
    dt__tcp *tcp;  /* NULL until all ranks are connected */
    int listener;  /* rank 0's listening socket, or -1 */
    dt__node node; /* its `shared` is NULL if this rank shares memory with no other rank */
} dt__mpi;

static double dt__mpi_deadline(dt__mpi *mpi) { return dt__waited(&mpi->watch) + mpi->timeout_s; }

/* Fails the context and returns 1 if a function of MPI has returned an error. */
static int dt__mpi_failed(dt__mpi *mpi, int error) {
    dt__world *world = dt__world_of(mpi->ctx);
    char text[MPI_MAX_ERROR_STRING + 1] = "";
    int length = 0;
    if (error == MPI_SUCCESS) return 0;
    MPI_Error_string(error, text, &length);
    if (world) dt__comm_fail(world, DT_ERR_COMM, "MPI: %.400s", text);
    return 1;
}

/* ---- packets ---- */

static int dt__mpi_send(
    void *user, int to, const void *head, size_t head_bytes, const void *body, size_t body_bytes) {
    dt__mpi *mpi = (dt__mpi *)user;
    int is_abort = ((const dt__frame *)head)->kind == DT__ABORT, done = 0;
    size_t slot = (size_t)to * DT__MPI_SLOTS + (size_t)(is_abort ? DT__MPI_SENDS : mpi->turns[to]);
    char *packet = mpi->outgoing[slot];
    if (dt__mpi_failed(mpi, MPI_Test(&mpi->sends[slot], &done, MPI_STATUS_IGNORE))) return -1;
    if (!done) return 0;
    memcpy(packet, head, head_bytes);
    if (body_bytes > 0) memcpy(packet + head_bytes, body, body_bytes);
    if (dt__mpi_failed(mpi, MPI_Issend(packet, (int)(head_bytes + body_bytes), MPI_BYTE, to, 0,
                                mpi->packets, &mpi->sends[slot])))
        return -1;
    if (!is_abort) mpi->turns[to] = (mpi->turns[to] + 1) % DT__MPI_SENDS;
    return 1;
}

/* Failure detection: a rank's connection is lost before all ranks have met. Publishes the loss,
   also if the rank died while it wrote the failure record; the lowest rank that is left logs it.
   Clears the rank's busy flag in shared memory. */
static void dt__mpi_rank_lost(dt__mpi *mpi, int rank) {
    const dt__world *world = dt__world_of(mpi->ctx);
    int local_rank = mpi->node.local_ranks[rank];
    dt_report loss = { DT_ERR_PEER, rank, "", 0 };
    char why[DT__TCP_TEXT_BYTES];
    int lowest = 0;
    const dt__tcp_link *link = &mpi->tcp->links[rank];
    snprintf(loss.text, sizeof loss.text, "%.400s is gone: its connection was lost",
        dt__tcp_rank_text(rank, link->pid, link->host).s);
    if (local_rank >= 0)
        __atomic_store_n(&mpi->node.shared->state[local_rank].busy, 0, __ATOMIC_SEQ_CST);
    if (world) {
        dt__claim(world->shared, rank);
        int claimed = __atomic_load_n(&world->shared->claimed, __ATOMIC_SEQ_CST);
        if (claimed == rank + 2 && !dt__aborted(world->shared))
            dt__publish_failure(world->shared, rank, DT_ERR_PEER, loss.text);
    } else if (!mpi->report.status) {
        mpi->report = loss;
    }
    const dt_report *first = world ? &world->shared->first_failure : &mpi->report;
    int is_known = !world || dt__aborted(world->shared);
    while (dt__tcp_lost(mpi->tcp, lowest, why)) lowest++;
    if (mpi->lost_until > 0) return;
    mpi->lost_until = dt__waited(&mpi->watch) + DT__MPI_AFTER_LOSS_S;
    if (lowest == mpi->rank && is_known && strcmp(first->text, loss.text) == 0)
        mpi->host->log(mpi->host->user, DT_LOG_ERROR, mpi->rank, loss.text);
}

/* Returns the next packet that has arrived over TCP, or NULL. Looks for lost connections. */
static const void *dt__mpi_poll_tcp(dt__mpi *mpi, int *sender, size_t *bytes) {
    double now = mpi->host->now(mpi->host->user);
    char why[DT__TCP_TEXT_BYTES];
    if (now < mpi->next_poll) return NULL;
    const void *packet = dt__tcp_recv(mpi->tcp, DT_ANY, sender, bytes);
    if (packet) return packet;
    mpi->next_poll = now + DT__MPI_POLL_S(mpi->size);
    for (int rank = 0; rank < mpi->size; rank++)
        if (dt__tcp_lost(mpi->tcp, rank, why)) dt__mpi_rank_lost(mpi, rank);
    return NULL;
}

static int dt__mpi_post(dt__mpi *mpi, int from) {
    return MPI_Irecv(mpi->incoming[from], DT_PACKET_BYTES, MPI_BYTE, from, 0, mpi->packets,
        &mpi->receives[from]);
}

static const void *dt__mpi_recv(void *user, int from, int *sender, size_t *bytes) {
    dt__mpi *mpi = (dt__mpi *)user;
    MPI_Status status;
    int rank = MPI_UNDEFINED, arrived = 0, count = 0, error = MPI_SUCCESS;
    (void)from;
    if (mpi->delivered >= 0) error = dt__mpi_post(mpi, mpi->delivered);
    mpi->delivered = -1;
    if (!error) error = MPI_Testany(mpi->size, mpi->receives, &rank, &arrived, &status);
    if (dt__mpi_failed(mpi, error) || !arrived || rank == MPI_UNDEFINED)
        return dt__mpi_poll_tcp(mpi, sender, bytes);
    MPI_Get_count(&status, MPI_BYTE, &count);
    *bytes = (size_t)count;
    *sender = mpi->delivered = rank;
    return mpi->incoming[rank];
}

static int dt__mpi_lost(void *user, int rank, char *why) {
    return dt__tcp_lost(((dt__mpi *)user)->tcp, rank, why);
}

static int dt__mpi_pid(void *user, int rank) { return dt__tcp_pid(((dt__mpi *)user)->tcp, rank); }

/* ---- bulk data ---- */

/* Starts the next piece. Returns 0 on failure. */
static int dt__mpi_bulk_next(dt__mpi *mpi, dt__bulk *bulk) {
    size_t left = bulk->bytes - bulk->done, n = left < DT__MPI_MAX_BYTES ? left : DT__MPI_MAX_BYTES;
    int tag = (int)(bulk->id % (uint64_t)mpi->max_tag);
    char *piece = bulk->buf + bulk->done;
    bulk->done += n;
    return !dt__mpi_failed(
        mpi, bulk->is_pull
                 ? MPI_Irecv(piece, (int)n, MPI_BYTE, bulk->peer, tag, mpi->bulk, &bulk->request)
                 : MPI_Issend(piece, (int)n, MPI_BYTE, bulk->peer, tag, mpi->bulk, &bulk->request));
}

static void *dt__mpi_bulk_begin(
    dt__mpi *mpi, int is_pull, int peer, uint64_t id, const void *buf, size_t bytes) {
    dt__bulk *bulk = dt__bulk_make(mpi->tcp, is_pull, peer, id, buf, bytes);
    if (!bulk || dt__mpi_bulk_next(mpi, bulk)) return bulk;
    dt__bulk_release(mpi->tcp, bulk);
    return NULL;
}

static void *dt__mpi_push(void *user, int to, uint64_t id, const void *buf, size_t bytes) {
    return dt__mpi_bulk_begin((dt__mpi *)user, 0, to, id, buf, bytes);
}

static void *dt__mpi_pull(void *user, int from, uint64_t id, void *buf, size_t bytes) {
    return dt__mpi_bulk_begin((dt__mpi *)user, 1, from, id, buf, bytes);
}

static int dt__mpi_test(void *user, void *request, char *why) {
    dt__mpi *mpi = (dt__mpi *)user;
    dt__bulk *bulk = (dt__bulk *)request;
    int done = 0;
    (void)why; /* an error has failed the context */
    while (!dt__mpi_failed(mpi, MPI_Test(&bulk->request, &done, MPI_STATUS_IGNORE))) {
        if (!done) return 0;
        if (bulk->done == bulk->bytes) return dt__bulk_release(mpi->tcp, bulk), 1;
        if (!dt__mpi_bulk_next(mpi, bulk)) break;
    }
    mpi->abandoned = 1;
    return -1;
}

/* ---- waits after a failure, and at the begin and the end ---- */

/* Receives bulk data whose pull was cancelled, one message at a time, because their senders
   wait. */
static void dt__mpi_drain(dt__mpi *mpi) {
    const dt_host *host = mpi->host;
    MPI_Status status;
    int done = 0, there = 0, count = 0;
    MPI_Test(&mpi->drain_request, &done, MPI_STATUS_IGNORE);
    if (!done) return;
    if (mpi->drain_buffer) host->free(host->user, mpi->drain_buffer, mpi->drain_bytes, DT_MEM_HOST);
    mpi->drain_buffer = NULL;
    if (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, mpi->bulk, &there, &status) || !there) return;
    MPI_Get_count(&status, MPI_BYTE, &count);
    mpi->drain_bytes = (size_t)count + 1;
    mpi->drain_buffer = host->alloc(host->user, mpi->drain_bytes, DT_MEM_HOST);
    if (mpi->drain_buffer)
        MPI_Irecv(mpi->drain_buffer, count, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, mpi->bulk,
            &mpi->drain_request);
}

/* Waits for *request. Returns 1 once the request is complete, 0 if the deadline has passed.
   Receives unwanted messages during the wait; packets only at the end of the run. */
static int dt__mpi_wait_for(dt__mpi *mpi, MPI_Request *request, double until) {
    int has_ended = dt__world_of(mpi->ctx) == NULL;
    for (int attempt = 0, done = 0, sender;; attempt++) {
        size_t bytes;
        if (MPI_Test(request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done) return 1;
        if (mpi->tcp && !mpi->has_met) {
            dt__mpi_drain(mpi);
            if (has_ended ? dt__mpi_recv(mpi, DT_ANY, &sender, &bytes)
                          : dt__mpi_poll_tcp(mpi, &sender, &bytes))
                continue;
            if (mpi->lost_until > 0) until = fmin(until, mpi->lost_until);
        }
        if (dt__waited(&mpi->watch) > until) return 0;
        mpi->host->sleep(
            mpi->host->user, attempt < DT__YIELDS ? 0 : fmin(attempt * 1e-6, DT__NAP_MAX));
    }
}

/* Waits for the collective of MPI that has begun with mpi->request, unless it returned an error. */
static int dt__mpi_come(dt__mpi *mpi, int error, double until) {
    return error == MPI_SUCCESS && dt__mpi_wait_for(mpi, &mpi->request, until);
}

/* Cancels a request after this rank has failed, so that MPI no longer uses the caller's buffer. MPI
   can cancel a receive that has not matched a message. The function waits for any other request,
   although a transport's functions should not, because MPI does not give the buffer back earlier:
   the request completes once the other rank has learned of the failure and receives all messages. A
   request that is not complete at cancel_until is abandoned. */
static void dt__mpi_cancel(void *user, void *request) {
    dt__mpi *mpi = (dt__mpi *)user;
    dt__bulk *bulk = (dt__bulk *)request;
    if (bulk->is_pull) MPI_Cancel(&bulk->request);
    if (mpi->cancel_until == 0) mpi->cancel_until = dt__mpi_deadline(mpi);
    if (dt__mpi_wait_for(mpi, &bulk->request, mpi->cancel_until))
        dt__bulk_release(mpi->tcp, bulk);
    else
        mpi->abandoned = 1;
}

static dt_transport dt__mpi_transport(dt__mpi *mpi) {
    dt_transport transport = { .name = "mpi",
        .user = mpi,
        .send = dt__mpi_send,
        .recv = dt__mpi_recv,
        .lost = dt__mpi_lost,
        .pid = dt__mpi_pid,
        .push = dt__mpi_push,
        .pull = dt__mpi_pull,
        .test = dt__mpi_test,
        .cancel = dt__mpi_cancel };
    return transport;
}

/* Every rank gets the report of the lowest rank that has a failure. Returns 0 if not all ranks came
   before the deadline. */
static int dt__mpi_agree(dt__mpi *mpi, double until) {
    mpi->failed = mpi->report.status ? mpi->rank : mpi->size;
    if (!dt__mpi_come(mpi,
            MPI_Iallreduce(
                &mpi->failed, &mpi->first_failed, 1, MPI_INT, MPI_MIN, mpi->packets, &mpi->request),
            until))
        return 0;
    mpi->has_met = mpi->tcp != NULL; /* else this is the beginning of the run */
    if (mpi->first_failed == mpi->size) return 1;
    int came = dt__mpi_come(mpi,
        MPI_Ibcast(&mpi->report, (int)sizeof mpi->report, MPI_BYTE, mpi->first_failed, mpi->packets,
            &mpi->request),
        dt__mpi_deadline(mpi));
    mpi->report.text[sizeof mpi->report.text - 1] = 0;
    dt__escape(mpi->report.text, sizeof mpi->report.text);
    return came;
}

/* ---- begin: ranks of one machine ---- */

/* The ranks of a machine share a memory segment, as forked ranks do. Every rank must map the
   segment at the same address. So the first rank of the machine creates it at an address that is
   probably free in every process, and the other ranks map it through the first rank's /proc/PID/fd.
   If one of these ranks cannot map the segment, none of them uses it. */

static int dt__mpi_exchange_infos(dt__mpi *mpi) {
    int bytes = (int)sizeof *mpi->infos;
    return dt__mpi_come(mpi,
        MPI_Iallgather(
            MPI_IN_PLACE, 0, MPI_BYTE, mpi->infos, bytes, MPI_BYTE, mpi->packets, &mpi->request),
        dt__mpi_deadline(mpi));
}

/* Names this machine, by its boot id and this process's namespaces: the ranks of a machine reach
   each other's memory by process number, and share a loopback address. A rank that cannot read them
   is alone. */
static void dt__mpi_machine_name(int rank, char *name, size_t bytes) {
    char boot[48], pids[32] = "", net[32] = "";
    if (dt__read_text(dt_io_default(), "/proc/sys/kernel/random/boot_id", boot, sizeof boot) > 0 &&
        readlink("/proc/self/ns/pid", pids, sizeof pids - 1) > 0 &&
        readlink("/proc/self/ns/net", net, sizeof net - 1) > 0)
        snprintf(name, bytes, "%s %s %s", boot, pids, net);
    else
        snprintf(name, bytes, "rank %d", rank);
}

/* Maps the segment at exactly this address. Returns NULL if the address is in use. */
static dt__shared *dt__mpi_map(int fd, uint64_t address, size_t bytes) {
    void *wanted = (void *)(uintptr_t)address;
    void *p = mmap(wanted, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (p != wanted && p != MAP_FAILED) munmap(p, bytes);
    return p == wanted ? (dt__shared *)p : NULL;
}

/* Creates the shared memory segment of n ranks. Called on the first of them. `neighbours` is the
   number of all ranks on the machine. If it exceeds the machine's number of cores, waits do not
   spin. (The cores that this rank may use do not matter: each rank may be bound to one core.) */
static void dt__mpi_make_segment(dt__mpi *mpi, int n, int neighbours, dt__mpi_info *mine) {
    static const uint64_t addresses[] = {
#ifdef __SANITIZE_THREAD__ /* if root asks for a reserved address, TSan's mmap maps at 0 */
        0x2000000000,
#endif
        0x200000000000, 0x300000000000, 0x100000000000, 0x2000000000
    };
    size_t machine_bytes = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    dt__shared sizes, *shared = NULL;
    memset(&sizes, 0, sizeof sizes);
    sizes.ranks = n;
    sizes.separate_memory = sizes.is_zeroed = 1;
    sizes.timeout_s = mpi->timeout_s;
    sizes.spins = neighbours <= (int)sysconf(_SC_NPROCESSORS_ONLN) ? DT__SPINS : 0;
    sizes.first_failure.rank = -1;
    mine->fd = dt__io_guard_std_fds() == 0 ? memfd_create("dt", MFD_CLOEXEC) : -1;
    for (size_t heap = dt__align_page(machine_bytes);
         mine->fd >= 0 && !shared && heap > (size_t)64 << 20; heap = dt__align_page(heap / 4)) {
        sizes.heap_bytes = heap;
        dt__shared_layout(&sizes, NULL, 0);
        mine->bytes = sizes.bytes;
        if (dt__io_resize(NULL, (int)mine->fd, (int64_t)sizes.bytes) != 0) continue;
        for (size_t i = 0; i < sizeof addresses / sizeof *addresses && !shared; i++)
            shared = dt__mpi_map((int)mine->fd, addresses[i], sizes.bytes);
    }
    if (!shared) return;
    mpi->node.shared = dt__shared_layout(&sizes, (char *)shared, 0);
    dt__group_make(mpi->node.shared, n, "world");
    mine->address = (uint64_t)(uintptr_t)mpi->node.shared;
}

/* Maps the segment of rank `first`. The link in /proc opens the memfd itself. */
static void dt__mpi_map_segment(dt__mpi *mpi, const dt__mpi_info *first) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)first->pid, (long long)first->fd);
    int can_open = first->address && dt__io_guard_std_fds() == 0;
    int fd = can_open ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    mpi->node.shared = dt__mpi_map(fd, first->address, (size_t)first->bytes);
    if (mpi->node.shared) mpi->infos[mpi->rank].address = first->address;
    close(fd);
}

/* Opens rank 0's listening socket at desc.rendezvous, or if that is NULL at a free port: of the
   loopback address if all ranks are near, else of the first interface. On failure sets `why`. */
static void dt__mpi_listen(dt__mpi *mpi, const dt_run_desc *desc, int all_near, char *why) {
    dt__mpi_info *mine = &mpi->infos[0];
    dt__tcp_address *at = &mine->rendezvous;
    /* MPI carries the key to the other ranks, so none needs a token to get it */
    const dt__tcp_address loopback = { htonl(INADDR_LOOPBACK), 0 };
    /* makes the key valid for this run only, because MPI may store messages */
    uint8_t random[32] = { 0 };
    at->ip = all_near ? 0 : dt__tcp_interface_address();
    if (!at->ip) at->ip = loopback.ip;
    if (desc->rendezvous && !dt__tcp_address_parse(desc->rendezvous, at))
        snprintf(why, DT__TCP_TEXT_BYTES, "rendezvous '%.200s' is no address and port",
            desc->rendezvous);
    else if (dt__tcp_key(desc, loopback, mine->key, why) &&
             (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random ||
                 (mpi->listener = dt__tcp_listen(*at, DT__TCP_BACKLOG)) < 0))
        snprintf(why, DT__TCP_TEXT_BYTES, "rank 0 cannot listen at %.30s (error %d)",
            dt__tcp_address_text(*at).s, errno);
    if (mpi->listener >= 0) at->port = dt__tcp_own_address(mpi->listener).port;
    dt__hmac(mine->key, sizeof mine->key, random, sizeof random, mine->key);
}

/* Shares memory with the other ranks of this machine. Rank 0 listens, or sets `why`. Returns 0 if
   not all ranks came within timeout_s. */
static int dt__mpi_share(dt__mpi *mpi, const dt_run_desc *desc, char *why) {
    dt__mpi_info *all = mpi->infos, *mine = &all[mpi->rank];
    int size = mpi->size, n = 0, neighbours = 0, *leaders = mpi->node.node_leaders;
    int can_share = desc->node_ranks != 1 && !(desc->host && !desc->host->map) &&
                    !(desc->kernels && desc->kernels->alloc);
    mine->part = !can_share ? -1 - mpi->rank : desc->node_ranks ? mpi->rank / desc->node_ranks : 0;
    mine->fd = -1;
    mine->pid = (int64_t)getpid();
    dt__mpi_machine_name(mpi->rank, mine->machine, sizeof mine->machine);
    if (!dt__mpi_exchange_infos(mpi)) return 0;
    for (int rank = 0; rank < size; rank++) { /* finds the first rank of each rank's machine */
        leaders[rank] = 0;
        while (all[rank].part != all[leaders[rank]].part ||
               strcmp(all[rank].machine, all[leaders[rank]].machine) != 0)
            leaders[rank]++;
    }
    int first = leaders[mpi->rank];
    for (int rank = 0; rank < size; rank++) {
        neighbours += strcmp(all[rank].machine, mine->machine) == 0;
        if (rank == mpi->rank) mpi->node.local_rank = n;
        mpi->node.local_ranks[rank] = leaders[rank] == first ? n++ : -1;
    }
    if (mpi->rank == 0) dt__mpi_listen(mpi, desc, neighbours == size, why);
    if (n > 1 && first == mpi->rank) dt__mpi_make_segment(mpi, n, neighbours, mine);
    int all_came = dt__mpi_exchange_infos(mpi);
    if (all_came && n > 1 && first != mpi->rank) dt__mpi_map_segment(mpi, &all[first]);
    all_came = all_came && dt__mpi_exchange_infos(mpi);
    if (mine->fd >= 0) close((int)mine->fd);
    for (int rank = 0; rank < size; rank++)
        if (!all[rank].address) all[leaders[rank]].address = 0;
    if (mpi->node.shared && !all[first].address) {
        munmap(mpi->node.shared, (size_t)all[first].bytes);
        mpi->node.shared = NULL;
    }
    for (int rank = 0; rank < size; rank++)
        if (!all[leaders[rank]].address) leaders[rank] = rank, mpi->node.local_ranks[rank] = -1;
    if (all_came && !mpi->node.shared && n > 1 && first == mpi->rank)
        mpi->host->log(mpi->host->user, DT_LOG_NOTICE, mpi->rank,
            "ranks on this machine share no memory: their collectives go over MPI");
    return all_came;
}

/* ---- begin and end ---- */

/* Allocates the transport's memory. MPI has begun. */
static dt__mpi *dt__mpi_make(const dt_host *host, double timeout_s) {
    int rank, ranks, *max_tag = NULL, there = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &max_tag, &there);
    size_t size = (size_t)ranks, slots = size * DT__MPI_SLOTS;
    size_t bytes = sizeof(dt__mpi) + (slots + size) * (DT_PACKET_BYTES + sizeof(MPI_Request)) +
                   size * (sizeof(dt__mpi_info) + 3 * sizeof(int));
    dt__mpi *mpi = (dt__mpi *)host->alloc(host->user, bytes, DT_MEM_HOST);
    if (!mpi) return NULL;
    memset(mpi, 0, sizeof *mpi);
    mpi->host = host;
    mpi->rank = rank;
    mpi->size = ranks;
    mpi->max_tag = there ? *max_tag : 32767; /* the least that the standard allows */
    mpi->bytes = bytes;
    mpi->timeout_s = timeout_s;
    mpi->watch = dt__stopwatch_start(host, timeout_s);
    mpi->drain_request = MPI_REQUEST_NULL;
    mpi->delivered = mpi->listener = -1;
    mpi->infos = (dt__mpi_info *)(void *)(mpi + 1);
    mpi->incoming = (char(*)[DT_PACKET_BYTES])(void *)(mpi->infos + size);
    mpi->outgoing = mpi->incoming + size; /* its pages stay untouched until used */
    mpi->sends = (MPI_Request *)(void *)(mpi->outgoing + slots);
    mpi->receives = mpi->sends + slots;
    mpi->turns = (int *)(void *)(mpi->receives + size);
    mpi->node.local_ranks = mpi->turns + size;
    mpi->node.node_leaders = mpi->node.local_ranks + size;
    memset(mpi->infos, 0, size * sizeof *mpi->infos);
    memset(mpi->turns, 0, size * sizeof(int));
    for (size_t i = 0; i < slots + size; i++) mpi->sends[i] = MPI_REQUEST_NULL;
    return mpi;
}

/* Makes this process a rank of a run, and initializes MPI if necessary. On failure sets `why`
   (DT__TCP_TEXT_BYTES), and returns NULL unless it is the failure of rank 0 alone. */
static dt__mpi *dt__mpi_open(const dt_host *host, const dt_run_desc *desc, char *why) {
    const char *failure = "";
    int running = 0, finalized = 0, provided = 0, made = 1;
    dt__mpi *mpi = NULL;
    MPI_Initialized(&running);
    MPI_Finalized(&finalized);
    if (finalized)
        failure = "it has ended in this process; a program that calls dt_run twice must begin and "
                  "end MPI itself";
    else if (!running && MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS)
        failure = "MPI_Init_thread fails";
    else if (!(mpi = dt__mpi_make(host, desc->timeout_s)))
        failure = "no memory for it";
    snprintf(why, DT__TCP_TEXT_BYTES, "%s", failure);
    if (!mpi) return NULL;
    mpi->initialized = !running;
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &mpi->saved_handler);
    /* MPICH calls the error handler of MPI_COMM_WORLD also for errors of dt's requests */
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    for (int i = 0; i < 2 && made; i++) {
        MPI_Comm *comm = i ? &mpi->bulk : &mpi->packets;
        made = dt__mpi_come(
            mpi, MPI_Comm_idup(MPI_COMM_WORLD, comm, &mpi->request), dt__mpi_deadline(mpi));
        if (made) MPI_Comm_set_errhandler(*comm, MPI_ERRORS_RETURN);
    }
    if (made && dt__mpi_share(mpi, desc, why)) return mpi;
    snprintf(why, DT__TCP_TEXT_BYTES, "not all its processes came to dt_run within timeout_s");
    if (mpi->listener >= 0) close(mpi->listener);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, mpi->saved_handler);
    MPI_Errhandler_free(&mpi->saved_handler);
    return NULL; /* *mpi is not freed, because MPI may still write into it */
}

/* Connects all ranks over TCP and posts the receives. Returns 0 if some rank has failed. */
static int dt__mpi_connect(dt__mpi *mpi, dt_run_desc desc) {
    mpi->report = *desc.report;
    int all_came = dt__mpi_agree(mpi, dt__mpi_deadline(mpi));
    *desc.report = mpi->report;
    desc.ranks = mpi->size;
    desc.rank = mpi->rank;
    if (all_came && !mpi->report.status)
        mpi->tcp = dt__tcp_make(
            mpi->ctx, &desc, mpi->infos[0].rendezvous, mpi->infos[0].key, 0, mpi->listener);
    else if (mpi->listener >= 0)
        close(mpi->listener);
    dt__wipe(mpi->infos, (size_t)mpi->size * sizeof *mpi->infos);
    if (!all_came && !mpi->report.status)
        dt_fail(mpi->ctx, DT_ERR_TIMEOUT, "not all ranks came to dt_run within timeout_s");
    for (int rank = 0; rank < mpi->size && mpi->tcp; rank++)
        if (rank != mpi->rank && mpi->node.local_ranks[rank] < 0 && dt__mpi_post(mpi, rank))
            dt_fail(mpi->ctx, DT_ERR_COMM, "MPI_Irecv fails");
    return mpi->tcp != NULL;
}

/* Waits until no message is in flight (see the head of this section) and cancels the posted
   receives. Returns 0 if not all ranks came: without a failure, ranks that end wait for the others
   as long as these run. All ranks stay connected until all have passed the reduction, so that no
   rank takes an end for a loss. */
static int dt__mpi_meet(dt__mpi *mpi) {
    double until = mpi->report.status ? dt__mpi_deadline(mpi) : HUGE_VAL;
    if (mpi->abandoned) return 0;
    for (int i = 0; i < mpi->size * DT__MPI_SLOTS; i++)
        if (!dt__mpi_wait_for(mpi, &mpi->sends[i], until)) return 0;
    if (!dt__mpi_agree(mpi, until)) return 0;
    until = dt__mpi_deadline(mpi);
    if (!dt__mpi_come(mpi, MPI_Ibarrier(mpi->packets, &mpi->request), until)) return 0;
    for (int rank = 0; rank < mpi->size; rank++) {
        if (mpi->receives[rank] != MPI_REQUEST_NULL) MPI_Cancel(&mpi->receives[rank]);
        if (!dt__mpi_wait_for(mpi, &mpi->receives[rank], until)) return 0;
    }
    return dt__mpi_wait_for(mpi, &mpi->drain_request, until);
}

/* Ends the rank's use of MPI after the rank has detached, and finalizes MPI if dt initialized it.
   Frees the context. If another rank did not reach the end of the run, MPI is not finalized,
   because MPI_Finalize would wait for that rank for ever; the launcher ends the other processes
   once this process exits with an error. MPI may then still read and write *mpi and the segment,
   which are not freed. */
static void dt__mpi_close(dt__mpi *mpi, dt_report *report) {
    const dt_host *host = mpi->host;
    static const dt_report late = { DT_ERR_PEER, -1, "dt_run: not all ranks ended", 0 };
    mpi->report = *report;
    int settled = dt__mpi_meet(mpi);
    if (!settled && !mpi->report.status) mpi->report = late;
    *report = mpi->report;
    if (settled) {
        MPI_Comm_free(&mpi->bulk);
        MPI_Comm_free(&mpi->packets);
    }
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, mpi->saved_handler);
    MPI_Errhandler_free(&mpi->saved_handler);
    if (settled && mpi->initialized) MPI_Finalize();
    if (mpi->tcp) dt__tcp_free(mpi->tcp);
    dt_ctx_free(mpi->ctx);
    if (!settled) {
        host->log(
            host->user, DT_LOG_NOTICE, mpi->rank, "MPI is not finalized: not all ranks ended");
        return;
    }
    if (mpi->drain_buffer) host->free(host->user, mpi->drain_buffer, mpi->drain_bytes, DT_MEM_HOST);
    if (mpi->node.shared) munmap(mpi->node.shared, mpi->node.shared->bytes);
    host->free(host->user, mpi, mpi->bytes, DT_MEM_HOST);
}

#endif /* DT_USE_MPI */

// ==== 30. Attach =================================================================================

/* Attach makes a context a rank of a run: it creates the context's world (dt__world) and the group
   of all ranks. The ranks communicate in the shared memory of a team, whose ranks are threads or
   forked processes of one process, or over a transport. Detach ends the rank. */

/* A run. dt_run has one for a rank of a transport too, for its host and its description; all other
   fields are then zero. */
struct dt_team {
    dt_host host; /* the caller's dt_host */
    dt_run_desc desc;
    dt__shared *shared;
    void *range;       /* the memory that contains `shared` */
    int64_t oom_kills; /* result of dt__run_oom_kills before the ranks began */
    int block;         /* dt__world.block; desc.ranks is the number of ranks that run */
    /* one for the caller of dt_team_make and one for each rank's thread; the team is freed when
       none is left */
    int references;
    struct dt__rank_job *jobs; /* (ranks), of dt_run; in memory just after this struct */
};

/* Returns the world rank of the team's rank number `rank`. With phantoms they differ: of each block
   of ranks, one is in the team. */
static int dt__team_world_rank(const dt_team *team, int rank) {
    return team && team->block > 1 ? rank * team->block + team->desc.rank : rank;
}

static void dt__set_ended(dt__shared *shared, dt__rank_state *state) {
    __atomic_store_n(&state->ended, 1, __ATOMIC_RELEASE);
    __atomic_fetch_add(&shared->ended, 1, __ATOMIC_RELEASE);
    __atomic_fetch_add(&state->progress, 1, __ATOMIC_SEQ_CST);
    /* stored last, because the rank makes no progress after the increment above */
    __atomic_store_n(&state->idle_at_progress, DT__IDLE_FOREVER, __ATOMIC_SEQ_CST);
}

/* Advances the pending operations. The tensor library calls this function between two kernels. */
static void dt__on_kernel_done(dt_ctx *ctx, void *user) {
    dt__world *world = (dt__world *)user;
    if (world->first_unfinished && dt_error(ctx) == DT_OK) dt__advance_some(world);
}

/* If a rank shares no memory, its private range follows its world in one allocation. */
static size_t dt__world_bytes(const dt__shared *shared) {
    return sizeof(dt__world) + (shared && shared->state ? 0 : sizeof(dt__private_range));
}

/* Makes a rank's world. shared: the memory of a team, or of the ranks of a transport on this
   machine; NULL if a transport's rank shares no memory. */
static dt__world *dt__world_make(
    dt_ctx *ctx, const dt_attach_desc *desc, int size, const dt__node *node, dt__shared *shared) {
    const size_t bytes = dt__world_bytes(shared);
    dt__world *world = (dt__world *)dt_alloc(ctx, DT_MEM_HOST, bytes, "the world");
    if (!world) return NULL;
    memset(world, 0, bytes);
    world->block = desc->team ? desc->team->block : 1;
    world->rank = dt__team_world_rank(desc->team, desc->rank);
    world->local_rank = node ? node->local_rank : desc->rank;
    if (shared) {
        world->state = &shared->state[world->local_rank];
        world->records = shared->records + (size_t)world->local_rank * DT_RECORDS;
    } else {
        dt__private_range *lone = (dt__private_range *)(void *)(world + 1);
        shared = &lone->shared;
        shared->ranks = size;
        shared->timeout_s = desc->timeout_s > 0 ? desc->timeout_s : 120;
        shared->spins = size <= dt__cores() ? DT__SPINS : 0;
        shared->first_failure.rank = -1;
        world->state = &lone->state;
        world->records = lone->records;
    }
    world->shared = shared;
    world->ctx = ctx;
    world->host = dt_ctx_host(ctx);
    world->calls = &dt__plain_calls;
    world->size = size * world->block;
    world->node = node;
    world->is_thread = desc->team && !shared->separate_memory;
    if (!desc->team) world->transport = *desc->transport;
    world->channel_count = dt__first_free_channel(shared);
    __atomic_store_n(&world->state->waits_for, DT_ANY, __ATOMIC_RELAXED);
    __atomic_store_n(&world->state->pid, (int)getpid(), __ATOMIC_RELAXED);
    __atomic_store_n(&world->state->tid, (int)syscall(SYS_gettid), __ATOMIC_RELAXED);
    return world;
}

/* Tells the other ranks that this rank's context failed before it had a world. */
static void dt__world_failed(
    dt_ctx *ctx, const dt_attach_desc *desc, const dt__node *node, dt__shared *shared) {
    dt__shared none;
    int rank = dt__team_world_rank(desc->team, desc->rank);
    if (shared && dt__claim(shared, rank))
        dt__publish_failure(shared, rank, dt_error(ctx), dt_error_text(ctx));
    if (desc->team) return;
    memset(&none, 0, sizeof none);
    dt__world world = { .shared = shared ? shared : &none,
        .ctx = ctx,
        .host = dt_ctx_host(ctx),
        .rank = desc->rank,
        .size = desc->size,
        .node = node,
        .transport = *desc->transport };
    dt__send_aborts(&world, desc->rank, dt_error(ctx), dt_error_text(ctx));
}

static const dt__comm_functions dt__functions = { .struct_bytes = DT__STRUCT_BYTES,
    .fail = dt__comm_fail,
    .data_failed = dt__data_failed,
    .pattern = dt__pattern_of,
    .run = dt__op_run,
    .wait = dt__library_wait,
    .error = dt_error,
    .alloc = dt_alloc,
    .free = dt_free,
    .log = dt_log,
    .kernels = dt_ctx_kernels,
    .stream = dt_ctx_stream };

#define DT__NO_NCCL_TEXT \
    "NCCL is not in this build: link dt_kernels.cu, compiled by nvcc where it finds <nccl.h>"

/* Attaches a rank. node: the ranks on this machine, if ranks of a transport share memory, else
   NULL. run: the description of the team or of dt_run; NULL if there is neither. */
static dt_comm *dt__attach(
    dt_ctx *ctx, dt_attach_desc desc, const dt__node *node, const dt_run_desc *run) {
    int size = desc.team ? desc.team->desc.ranks : desc.size;
    if (!ctx) return NULL;
    dt__shared *shared = desc.team ? desc.team->shared : node ? node->shared : NULL;
    int wrong = dt__world_of(ctx) || !desc.team == !desc.transport || size < 1 || desc.rank < 0 ||
                desc.rank >= size;
    if (wrong && !dt_error(ctx))
        dt_fail(ctx, DT_ERR_ARG, "dt_comm_attach: rank %d of %d, %s", desc.rank, size,
            dt__world_of(ctx) ? "but it is attached already" : "by either a team or a transport");
    char why[160];
    if (!wrong && !run && !dt__link_valid(&desc.link, why)) {
        dt_fail(ctx, DT_ERR_ARG, "dt_comm_attach: %s", why);
        wrong = 1;
    }
    if (wrong) return NULL;
    dt__world *world = dt_error(ctx) ? NULL : dt__world_make(ctx, &desc, size, node, shared);
    if (!world) {
        dt__world_failed(ctx, &desc, node, shared);
        return NULL;
    }
    world->listener.failed = dt__on_failure;
    world->listener.kernel_done = dt__on_kernel_done;
    world->listener.drain = dt__on_drain;
    world->listener.user = world;
    dt_listen(ctx, &world->listener);
    dt_ctx_attach(ctx, world);
    if (run) world->check = run->check;
    if (run && !desc.team) world->status_request = run->status_request;
    dt_link link = run ? run->link : desc.link;
    if (link.latency_s > 0 || link.bytes_per_s > 0 || link.n_levels > 0) dt__link_make(world, link);
    if (run) dt__faults_make(world, run->fault);
    for (int rank = 0; rank < size && world->transport.pid; rank++)
        dt__peer_of(world, rank); /* knows the rank's process, even if it never sends a report */
    world->comm = dt__comm_make(world, NULL, 0, "world");
    if (world->comm) dt__comm_set_direct(world->comm, 1, 0);
    if (world->comm && world->block > 1) dt__present_make(world);
    if (!world->comm || !(desc.nccl || (run && run->backend == DT_BACKEND_NCCL)))
        return world->comm;
    if (dt__nccl_begin)
        dt__nccl_begin(world, &dt__functions, desc.nccl);
    else
        dt__comm_fail(world, DT_ERR_UNSUPPORTED, "%s", DT__NO_NCCL_TEXT);
    return world->comm;
}

dt_comm *dt_comm_attach(dt_ctx *ctx, dt_attach_desc desc) {
    return dt__attach(ctx, desc, NULL, desc.team ? &desc.team->desc : NULL);
}

/* Releases the work objects of operations that a failure has left unfinished. */
static void dt__works_recycle(dt__world *world) {
    dt__on_drain(world->ctx, 0, world);
    if (world->blocking) dt__work_release(world->blocking);
    world->blocking = NULL;
    while (world->started.first) {
        dt_work *work = world->started.first;
        dt__started_remove(world, work);
        dt__work_release(work);
    }
}

static void dt__works_free(dt__world *world) {
    while (world->free_works.first) {
        dt_work *work = world->free_works.first;
        dt__list_remove(&world->free_works, work);
        dt_free(
            world->ctx, DT_MEM_HOST, work->p2p_ops, (size_t)work->p2p_capacity * sizeof(dt__p2p));
        if (work->device_event) dt_ctx_kernels(world->ctx)->event_destroy(work->device_event);
        dt_free(world->ctx, DT_MEM_HOST, work, sizeof *work);
    }
    dt_free(world->ctx, DT_MEM_COMM, world->send_copy, world->send_copy_bytes);
}

/* Ends this rank for the ranks that share no memory with it: tells them that nothing more will
   come, and, if `linger` is 1, waits until they have ended too, at most timeout_s, or DT__GRACE_S
   after a failure. During the wait this rank notices later failures of other ranks. */
#define DT__GRACE_S 0.75
static void dt__goodbye(dt__world *world, int linger) {
    dt__stopwatch watch = dt__stopwatch_start(world->host, world->shared->timeout_s);
    double nap = DT__NAP_MIN, left_s = linger ? world->shared->timeout_s : DT__ABORT_S;
    int is_shortened = 0, missing = -1, untold = 1;
    char why[512];
    for (;;) {
        dt__poll(world, DT_ANY);
        if (untold) untold = dt__send_wait_report(world, NULL);
        missing = -1;
        for (int rank = world->size - 1; rank >= 0; rank--)
            if (rank != world->rank && !dt__has_ended(world, rank) &&
                !(world->transport.lost && world->transport.lost(world->transport.user, rank, why)))
                missing = rank;
        int failed = dt_error(world->ctx) || dt__aborted(world->shared);
        if (failed && !is_shortened++) left_s = fmin(left_s, dt__waited(&watch) + DT__GRACE_S);
        if ((!untold && (missing < 0 || !linger)) || dt__waited(&watch) >= left_s) break;
        world->host->sleep(world->host->user, nap);
        nap = fmin(2 * nap, DT__NAP_MAX);
    }
    dt__poll(world, DT_ANY); /* a rank of this machine sends without a packet that it ends */
    if (linger) dt__check_connections(world, NULL);
    if (linger && missing >= 0 && !dt_error(world->ctx))
        dt_log(world->ctx, DT_LOG_NOTICE,
            "rank %d ends after %.1f s without a goodbye from rank %d", world->rank, watch.seconds,
            missing);
}

/* Returns ", sent at train.c:88"; "" if the message's call site is not known. */
static dt__text dt__sent_text(const dt__frame *frame) {
    return dt__format("%s%s", frame->file[0] ? ", sent" : "", dt__frame_site(frame).s);
}

static dt__text dt__unreceived_text(const dt__frame *frame, int from, int to, const char *group) {
    dt__call call = dt__unpack_call(frame->packed_call, (size_t)frame->count);
    if (frame->seq)
        return dt__format("rank %d ended without calling %s #%llu on %s, which rank %d calls%s", to,
            dt__call_text(&call).s, (unsigned long long)frame->seq, group, from,
            dt__frame_site(frame).s);
    return dt__format("rank %d: rank %d ended without receiving %s x %zu with tag %d on %s%s", from,
        to, dt_dtype_name(call.dtype), call.count, frame->tag, group, dt__sent_text(frame).s);
}

/* If this rank ends without receiving a message, stores a text about one of them. The sender may be
   complete, because an eager send does not wait for its receive. */
static void dt__note_unreceived(dt__world *world) {
    dt__shared *shared = world->shared;
    for (const dt__arrival *a = world->first_unexpected; a && !dt_error(world->ctx); a = a->next) {
        int expected = 0;
        if (!__atomic_compare_exchange_n(
                &shared->unreceived_claimed, &expected, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            continue;
        const dt_comm *comm = dt__comm_of(world, a->frame.channel);
        dt__text text =
            world->transport.send && !a->frame.seq
                ? dt__format(
                      "rank %d: ended without receiving %llu bytes with tag %d from rank %d%s",
                      world->rank, (unsigned long long)a->frame.bytes, a->frame.tag, a->from,
                      dt__sent_text(&a->frame).s)
                : dt__unreceived_text(
                      &a->frame, a->from, world->rank, comm ? comm->group->name : "?");
        dt__escape(text.s, sizeof text.s); /* no context escapes it */
        dt__copy_name(shared->unreceived.text, sizeof shared->unreceived.text, text.s);
        shared->unreceived.rank = world->transport.send ? world->rank : a->from;
        shared->unreceived.status = DT_ERR_COMM;
    }
}

static void dt__trace_free(dt__world *world);

/* Detaches a rank. If `report` is not NULL, waits for the ranks that share no memory with this one,
   and stores the run's first failure as far as this rank knows it. */
static void dt__detach(dt_ctx *ctx, dt_status status, dt_report *report) {
    dt__world *world = dt__world_of(ctx);
    if (!world) return;
    if (status && !dt_error(ctx))
        dt_fail(ctx, status, "rank function returned %s", dt_status_name(status));
    if (!dt_error(ctx)) dt__notify_reset(ctx);
    if (world->started.first && !dt_error(ctx))
        dt_fail(ctx, DT_ERR_ARG, "%s on %s%s was started and never waited for",
            dt__call_text(&world->started.first->call).s, world->started.first->comm->group->name,
            dt__own_site(world->started.first).s);
    if (world->comm && world->peers) dt__poll(world, DT_ANY);
    dt__note_unreceived(world);
    dt__set_ended(world->shared, world->state);
    if (dt_error(ctx)) dt__await_access_end(world);
    dt__works_recycle(world);
    /* A rank that ends because another one has failed passes the failure on before it reports its
       end: the end may arrive before the packet of the rank that failed. */
    const dt_report *first = &world->shared->first_failure;
    if (world->transport.send && dt__aborted(world->shared) && !world->owns_first_failure)
        dt__send_aborts(world, first->rank, first->status, first->text);
    if (world->transport.send) dt__goodbye(world, report != NULL);
    dt__note_unreceived(world);
    if (report && dt__aborted(world->shared))
        *report = world->shared->first_failure;
    else if (report && world->shared->unreceived.status)
        *report = world->shared->unreceived;
    dt__comms_free(world); /* uses the call tables and the work objects, which are freed next */
    dt__trace_free(world);
    dt__present_free(world);
    dt__works_free(world);
    dt__arrivals_free(world);
    dt__peers_free(world);
    dt_free(ctx, DT_MEM_HOST, world->link, sizeof *world->link);
    dt_free(ctx, DT_MEM_HOST, world->faults, sizeof *world->faults);
    dt_ctx_attach(ctx, NULL);
    dt_unlisten(ctx, &world->listener);
    dt_free(ctx, DT_MEM_HOST, world, dt__world_bytes(world->shared));
}

void dt_comm_detach(dt_ctx *ctx, dt_status status) {
    const dt__world *world = dt__world_of(ctx);
    /* Contexts do not log DT_ERR_PEER, because the rank that failed first logs its failure. A lost
       rank cannot, so the rank that has noticed the loss does. */
    if (world && world->owns_first_failure && dt_error(ctx) == DT_ERR_PEER)
        dt_log(ctx, DT_LOG_ERROR, "%s", dt_error_text(ctx));
    dt__detach(ctx, status, NULL);
}

// ==== 31. Supervisor: threads and forked processes ==============================================

/* If the ranks are threads or forked processes, the caller of dt_run is their supervisor. With tcp,
   nccl and mpi the caller is a rank itself. The life of a run:

       dt_run
         |  dt_team_make     checks the description; makes the range and the group of all ranks
         |  dt__run_start    a thread or a fork for each rank -----> dt__run_rank
         |                                                             dt_team_ctx, dt__attach
         |  dt__run_wait     watches the ranks                         rank_main
         |                                                             dt__rank_end: detach, free
         v  dt_team_free     looks for unreceived messages; fills the report

   The supervisor exchanges no messages with ranks. It learns of a failure from the failure record
   (section 9) and records there that a process has died. In each turn it watches:

       waitpid               a process has ended: a failure, unless rank_main had returned
       thread_done           a thread has ended
       the abort word        the clock since the first failure starts
       DT__STOPPED_S later   a stopped process cannot notice the failure: killed
       timeout_s later       a process that computes may never look: killed. A thread cannot be
                             killed: left behind, with the memory of the run that it may use
       2 timeout_s + 1 s     a killed process has not died: left behind
       status_request        the table of all ranks is logged */

#define DT__STOPPED_S 1.0
#define DT__WATCH_NAP_MAX 5e-3 /* the supervisor needs less than 1 % of a core */

/* One rank: what dt__run_rank runs and the supervisor watches. */
typedef struct dt__rank_job {
    dt_attach_desc attach;
    const dt_run_desc *desc;
    const dt__node *node; /* for dt__attach; NULL in a team */
    dt_status (*rank_main)(dt_ctx *ctx, void *user);
    void *user;
    dt_ctx *ctx; /* made by dt__run_rank if the rank is in a team */
    dt_status status;
    int returned;    /* 1 if rank_main has returned `status` */
    int thread_done; /* 1 if the rank's thread no longer uses this job */
    int is_watched;  /* 1 until the rank has ended or is left behind */
    pid_t pid;       /* 0 in a thread */
    pthread_t thread;
} dt__rank_job;

/* Records and logs a failure outside of any context. The record is run->shared's or, if the run has
   not begun (shared is NULL), the report. */
DT_PRINTF(4, 5)
static void dt__run_fail(dt_team *run, int rank, dt_status status, const char *fmt, ...) {
    dt_report failure = { status, rank, "", 0 };
    va_list args;
    va_start(args, fmt);
    vsnprintf(failure.text, sizeof failure.text, fmt, args);
    va_end(args);
    dt__escape(failure.text, sizeof failure.text);
    if (run->shared && !dt__claim(run->shared, rank)) return;
    if (run->shared) dt__publish_failure(run->shared, rank, status, failure.text);
    if (!run->shared && run->desc.report) *run->desc.report = failure;
    run->host.log(run->host.user, DT_LOG_ERROR, rank, failure.text);
}

static const char *dt__backend_name(dt_backend backend) {
    static const char *const names[] = { "threads", "threads", "procs", "tcp", "mpi", "nccl" };
    return backend >= DT_BACKEND_AUTO && backend <= DT_BACKEND_NCCL ? names[backend] : "unknown";
}

int dt_backend_is_built(dt_backend backend) {
#ifdef DT_USE_MPI
    if (backend == DT_BACKEND_MPI) return 1;
#endif
    if (backend == DT_BACKEND_NCCL) return dt__nccl_begin != NULL;
    return backend >= DT_BACKEND_AUTO && backend < DT_BACKEND_MPI;
}

/* Returns the reason for which dt_run or dt_team_make refuses the backend: either this build does
   not contain the backend, or the ranks of the backend are not threads or forks of one process. */
static const char *dt__backend_missing(dt_backend backend) {
    if (dt_backend_is_built(backend)) return "a team is threads or forks of one process";
    if (backend == DT_BACKEND_NCCL) return DT__NO_NCCL_TEXT;
    return backend == DT_BACKEND_MPI ? "MPI is not in this build: mpicc -DDT_USE_MPI"
                                     : "it is not in this version";
}

/* Begins a run's description: fills in the defaults and what the environment sets. */
static dt_team dt__run_env(dt_run_desc desc) {
    const char *check = getenv("DT_CHECK");
    dt_team run;
    memset(&run, 0, sizeof run);
    if (desc.ranks == 0 && desc.backend != DT_BACKEND_MPI) desc.ranks = 1;
    if (desc.timeout_s == 0) desc.timeout_s = 120;
    if (!desc.fault && desc.read_fault_env) desc.fault = getenv("DT_FAULT");
    if (desc.check == 0 && check && strcmp(check, "1") == 0) desc.check = 1;
    run.host = desc.host ? *desc.host : *dt_host_default();
    run.desc = desc;
    return run;
}

/* Returns 1 if the description is valid; else reports the error and returns 0. */
static int dt__run_valid(dt_team *run, int is_team) {
    const dt_run_desc *desc = &run->desc;
    int procs = desc->backend == DT_BACKEND_PROCS;
    char why[160];
    if (is_team && desc->backend > DT_BACKEND_PROCS)
        dt__run_fail(run, -1, DT_ERR_UNSUPPORTED, "dt_run: backend %s: %s",
            dt__backend_name(desc->backend), dt__backend_missing(desc->backend));
    else if (procs && desc->kernels && desc->kernels->open)
        dt__run_fail(run, -1, DT_ERR_UNSUPPORTED,
            "dt_run: forks cannot use their parent's device; use threads, or ranks that a "
            "launcher starts, with backend nccl or tcp");
    else if (procs && desc->host && !desc->host->map)
        dt__run_fail(run, -1, DT_ERR_UNSUPPORTED,
            "dt_run: backend procs needs a host table that maps memory");
    else if (dt__faults_parse(desc->fault, -1, desc->ranks, NULL) < 0)
        dt__run_fail(run, -1, DT_ERR_ARG,
            "dt_run: planted fault '%s': not KIND:rank=R:seq=N[:s=SECONDS], with a KIND of "
            "kill, stop, exit, spin, delay, drop, flip, nan and a rank of the job",
            desc->fault);
    else if (desc->ranks < 0 || desc->ranks > DT__MAX_RANKS)
        dt__run_fail(run, -1, DT_ERR_ARG, "dt_run: %d ranks", desc->ranks);
    else if (!(desc->timeout_s > 0 && desc->timeout_s <= 1e9))
        dt__run_fail(run, -1, DT_ERR_ARG, "dt_run: timeout_s %g", desc->timeout_s);
    else if (desc->present && (!is_team || procs))
        dt__run_fail(run, -1, DT_ERR_ARG, "dt_run: phantom ranks need backend threads, not %s",
            dt__backend_name(desc->backend));
    else if (desc->present < 0 || (desc->present > 0 && desc->ranks % desc->present != 0))
        dt__run_fail(run, -1, DT_ERR_ARG, "dt_run: present %d does not divide %d ranks",
            desc->present, desc->ranks);
    else if (desc->present && (desc->rank < 0 || desc->rank >= desc->ranks / desc->present))
        dt__run_fail(run, -1, DT_ERR_ARG, "dt_run: rank %d of a block of %d", desc->rank,
            desc->ranks / desc->present);
    else if (desc->node_ranks < 0)
        dt__run_fail(run, -1, DT_ERR_ARG, "dt_run: node_ranks %d", desc->node_ranks);
    else if (!dt__link_valid(&desc->link, why))
        dt__run_fail(run, -1, DT_ERR_ARG, "dt_run: %s", why);
    else
        return 1;
    return 0;
}

/* ---- the team ---- */

static size_t dt__team_bytes(int ranks) {
    return sizeof(dt_team) + (size_t)ranks * sizeof(dt__rank_job);
}

/* Drops one reference to the team, and frees the team if no reference is left. */
static void dt__team_release(dt_team *team) {
    if (__atomic_sub_fetch(&team->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    const dt_host host = team->host;
    if (host.map)
        host.unmap(host.user, team->range, team->shared->bytes);
    else
        host.free(host.user, team->range, team->shared->bytes, DT_MEM_COMM);
    host.free(host.user, team, dt__team_bytes(team->desc.ranks), DT_MEM_HOST);
}

/* The heap of each forked rank is as large as the machine's memory, because a page takes physical
   memory only once it is touched. If the system refuses a mapping of this size, the heaps are made
   smaller. */
dt_team *dt_team_make(dt_run_desc desc) {
    dt_team run = dt__run_env(desc);
    const dt_host host = run.host;
    const int separate = desc.backend == DT_BACKEND_PROCS;
    dt__shared sizes;
    if (!dt__run_valid(&run, 1)) return NULL;
    const int ranks = desc.present ? desc.present : run.desc.ranks;
    run.block = run.desc.ranks / ranks;
    run.desc.ranks = ranks;
    memset(&sizes, 0, sizeof sizes);
    sizes.ranks = ranks;
    sizes.separate_memory = separate;
    sizes.timeout_s = run.desc.timeout_s;
    sizes.spins = ranks <= dt__cores() ? DT__SPINS : 0;
    sizes.first_failure.rank = -1;
    sizes.is_zeroed = host.map != NULL;
    const size_t machine_bytes = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE),
                 bytes = dt__team_bytes(ranks);
    size_t heap = separate ? dt__align_page(machine_bytes) : 0;
    dt_team *team = (dt_team *)host.alloc(host.user, bytes, DT_MEM_HOST);
    for (; team && !run.range; heap = dt__align_page(heap / 4)) {
        sizes.heap_bytes = heap;
        dt__shared_layout(&sizes, NULL, desc.user_bytes);
        run.range = host.map ? host.map(host.user, sizes.bytes)
                             : host.alloc(host.user, sizes.bytes, DT_MEM_COMM);
        if (heap <= ((size_t)64 << 20)) break;
    }
    if (!run.range) {
        dt__run_fail(&run, -1, DT_ERR_MEM, "dt_run: %zu bytes that %d ranks share were refused",
            sizes.bytes + bytes, ranks);
        if (team) host.free(host.user, team, bytes, DT_MEM_HOST);
        return NULL;
    }
    if (!sizes.is_zeroed) memset(run.range, 0, sizes.zeroed_bytes + DT__CACHE_LINE);
    run.references = 1;
    *team = run;
    team->desc.host = &team->host; /* the caller may free *desc.host while threads still run */
    team->jobs = (dt__rank_job *)(void *)(team + 1);
    team->shared = dt__shared_layout(&sizes, (char *)run.range, desc.user_bytes);
    dt__group_make(team->shared, ranks, "world");
    return team;
}

/* Makes a rank's context. The rank's number among the ranks of its machine is what the launcher has
   set or, without a launcher, the rank. */
static dt_ctx *dt__rank_ctx(const dt_run_desc *desc, int rank, const dt_host *host) {
    dt_launch launch;
    dt_ctx_desc of = { .seed = desc->seed,
        .rank = rank,
        .kernels = desc->kernels,
        .host = host,
        .io = desc->io,
        .local_rank = rank,
        .mem_limit = desc->mem_limit };
    /* forked processes cannot use a GPU */
    if (!of.kernels && desc->backend == DT_BACKEND_PROCS) of.kernels = dt_kernels_cpu();
    if (desc->backend > DT_BACKEND_PROCS && dt_launch_find(&launch) == DT_OK &&
        launch.rank == rank && launch.local_rank >= 0)
        of.local_rank = launch.local_rank;
    return dt_ctx_make(of);
}

/* The host memory of a forked rank is in shared memory whatever its kernel table is: the staging
   windows and the copies of messages lie in it. Threads read and write each other's device memory,
   so their GPUs need peer access. */
dt_ctx *dt_team_ctx(dt_team *team, int rank) {
    if (!team) return NULL;
    const int ranks = team->desc.ranks, is_rank = rank >= 0 && rank < ranks;
    const dt_host *host = team->desc.host;
    char why[160] = "";
    if (is_rank && team->shared->separate_memory)
        host = dt__heap_make(team->shared, &team->host, rank);
    dt_ctx *ctx = is_rank ? dt__rank_ctx(&team->desc, dt__team_world_rank(team, rank), host) : NULL;
    const dt_kernels *kernels = dt_ctx_kernels(ctx);
    if (!is_rank)
        dt__run_fail(team, -1, DT_ERR_ARG, "dt_team_ctx: rank %d of %d", rank, ranks);
    else if (!ctx)
        dt__run_fail(team, rank, DT_ERR_MEM, "rank %d: no memory for its context", rank);
    else if (!dt_error(ctx) && ranks > 1 && kernels->enable_peer_access &&
             kernels->enable_peer_access(dt_ctx_stream(ctx), ranks, why, sizeof why) != DT_OK)
        dt_fail(ctx, DT_ERR_DEVICE,
            "ranks that are threads need peer access, from %s; those of backend nccl do not", why);
    return ctx;
}

/* An eager send completes without its receiver, so at the end its message may remain: noted by a
   rank that has ended, or still in a ring. The first such message is a failure. */
dt_status dt_team_free(dt_team *team) {
    if (!team) return DT_OK;
    dt__shared *shared = team->shared;
    size_t ranks = (size_t)shared->ranks;
    if (shared->unreceived.status)
        dt__run_fail(team, shared->unreceived.rank, DT_ERR_COMM, "%s", shared->unreceived.text);
    for (size_t i = 0; i < ranks * ranks && !dt__aborted(shared); i++) {
        const dt__packet_ring *ring = shared->rings[i];
        for (int n = 0; ring && n < DT__RING_SLOTS; n++) {
            const dt__packet_slot *slot = &ring->slot[n];
            const dt__frame *frame = (const dt__frame *)(const void *)dt__slot_packet(
                slot, slot->number_and_bytes & 0xffff);
            if (slot->number_and_bytes >> 16 > ring->taken &&
                (frame->kind == DT__EAGER || frame->kind == DT__ANNOUNCE))
                dt__run_fail(team, (int)(i % ranks), DT_ERR_COMM, "%s",
                    dt__unreceived_text(frame, (int)(i % ranks), (int)(i / ranks),
                        frame->channel < dt__first_free_channel(shared)
                            ? dt__shared_group(shared, frame->channel)->name
                            : "a group")
                        .s);
        }
    }
    dt_status status = shared->first_failure.status;
    if (team->desc.report) *team->desc.report = shared->first_failure;
    dt__team_release(team);
    return status;
}

/* ---- a rank ---- */

/* Ends a rank. A cleanup handler of the rank's thread: it runs after rank_main has returned or has
   ended the thread. Over a transport, the caller of dt__run_rank frees the context. */
static void dt__rank_end(void *arg) {
    dt__rank_job *job = (dt__rank_job *)arg;
    dt_team *team = job->attach.team;
    dt__world *world = dt__world_of(job->ctx);
    int cut_short = job->ctx && !job->returned;
    if (cut_short && world) __atomic_store_n(&world->state->busy, 0, __ATOMIC_SEQ_CST);
    if (cut_short)
        dt_fail(job->ctx, DT_ERR_ARG,
            "rank function did not return: its thread was ended by pthread_exit or "
            "pthread_cancel");
    dt__detach(job->ctx, job->status, team ? NULL : job->desc->report);
    if (!team) return;
    dt_ctx_free(job->ctx);
    if (team->shared->separate_memory && !job->returned) _exit(1);
    if (team->shared->separate_memory) return;
    __atomic_store_n(&job->thread_done, 1, __ATOMIC_RELEASE);
    dt__team_release(team);
}

static void *dt__run_rank(void *arg) {
    dt__rank_job *job = (dt__rank_job *)arg;
    pthread_cleanup_push(dt__rank_end, job);
    if (job->attach.team) job->ctx = dt_team_ctx(job->attach.team, job->attach.rank);
    if (job->ctx && dt__attach(job->ctx, job->attach, job->node, job->desc))
        job->status = job->rank_main(job->ctx, job->user);
    else if (job->ctx)
        job->status = dt_error(job->ctx);
    job->returned = 1;
    pthread_cleanup_pop(1);
    return NULL;
}

/* Starts a rank. A process: PR_SET_PDEATHSIG makes the kernel kill it when its supervisor ends; if
   the supervisor ended before that call, the process exits. Returns 0 if the start fails; the ranks
   that have started notice that like any other failure. */
static int dt__run_start(dt__rank_job *job) {
    dt_team *team = job->attach.team;
    const int rank = job->attach.rank, supervisor = (int)getpid();
    if (!team->shared->separate_memory) {
        __atomic_fetch_add(&team->references, 1, __ATOMIC_RELAXED);
        int error = pthread_create(&job->thread, NULL, dt__run_rank, job);
        if (!error) return job->is_watched = 1;
        dt__team_release(team);
        dt__run_fail(team, rank, DT_ERR_MEM, "rank %d: its thread could not be started (error %d)",
            rank, error);
        return 0;
    }
    job->pid = fork();
    if (job->pid > 0)
        __atomic_store_n(&team->shared->state[rank].pid, (int)job->pid, __ATOMIC_RELAXED);
    if (job->pid < 0)
        dt__run_fail(team, rank, DT_ERR_MEM, "rank %d: its process could not be started", rank);
    if (job->pid != 0) return job->is_watched = job->pid > 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if ((int)getppid() != supervisor) _exit(1);
    dt__run_rank(job);
    fflush(NULL);
    __atomic_store_n(&team->shared->state[rank].ended, 2, __ATOMIC_SEQ_CST);
    _exit(0);
}

/* ---- the supervisor ---- */

/* Returns the number of processes of this process's memory cgroup that the kernel's OOM killer has
   killed; -1 if unknown. /proc/self/cgroup names the cgroup ("4:memory:/jobs/7" in version 1,
   "0::/jobs/7" in version 2). In a container this name may not exist under /sys/fs/cgroup, and the
   cgroup may be mounted as the root there. */
static int64_t dt__run_oom_kills(const dt_io *io) {
    static const char *const files[4] = { "/sys/fs/cgroup/memory%.*s/memory.oom_control",
        "/sys/fs/cgroup%.*s/memory.events", "/sys/fs/cgroup/memory/memory.oom_control",
        "/sys/fs/cgroup/memory.events" };
    char groups[2048], path[512], text[1024];
    if (dt__read_text(io, "/proc/self/cgroup", groups, sizeof groups) <= 0) return -1;
    for (int i = 0; i < 4; i++) {
        const char *name = strstr(groups, i % 2 ? "0::" : ":memory:"), *count;
        if (name) name = strchr(name, '/');
        if (!name) continue;
        snprintf(path, sizeof path, files[i], (int)strcspn(name, "\n"), name);
        if (dt__read_text(io, path, text, sizeof text) <= 0) continue;
        count = strstr(text, "oom_kill ");
        if (count) return (int64_t)strtoll(count + 9, NULL, 10);
    }
    return -1;
}

/* Records a failure if a rank's process has ended without success, even if the process died while
   it wrote the failure record. known: 0 if the exit status is unknown, because this process ignores
   SIGCHLD or another part of it has reaped the child; then state.ended == 2 means success. */
static void dt__process_gone(const dt__rank_job *job, int known, int status) {
    static const struct {
        int number;
        const char *name;
    } signals[8] = { { SIGKILL, " (SIGKILL)" }, { SIGSEGV, " (SIGSEGV)" },
        { SIGABRT, " (SIGABRT)" }, { SIGBUS, " (SIGBUS)" }, { SIGFPE, " (SIGFPE)" },
        { SIGILL, " (SIGILL)" }, { SIGTERM, " (SIGTERM)" }, { SIGINT, " (SIGINT)" } };
    dt_team *team = job->attach.team;
    dt__shared *shared = team->shared;
    int rank = job->attach.rank, number = known && WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    dt__rank_state *state = &shared->state[rank];
    int ended = __atomic_load_n(&state->ended, __ATOMIC_ACQUIRE);
    __atomic_store_n(&state->busy, 0, __ATOMIC_SEQ_CST);
    if (known ? ended && WIFEXITED(status) && WEXITSTATUS(status) == 0 : ended == 2) return;
    const char *name = "";
    int oom = number == SIGKILL && dt__run_oom_kills(dt_io_default()) > team->oom_kills;
    for (int i = 0; i < 8; i++)
        if (signals[i].number == number) name = signals[i].name;
    dt__text end =
        !known ? dt__format("was lost; its exit status is not known, because its parent ignores "
                            "SIGCHLD or reaped it elsewhere")
        : number
            ? dt__format("was ended by signal %d%s%s", number, name,
                  oom ? ": out of memory, killed by the kernel (cgroup)"
                  : number == SIGSEGV && state->params_sharded
                      ? "; perhaps the program read a parameter's data, which at ZeRO-3 is NULL "
                        "outside of its block: use dt_data or dt_read"
                      : "")
            : dt__format("exited with status %d in its rank function", WEXITSTATUS(status));
    /* the process died while it wrote the record: its claim is void */
    if (__atomic_load_n(&shared->claimed, __ATOMIC_SEQ_CST) == rank + 2 && !dt__aborted(shared))
        __atomic_store_n(&shared->claimed, 0, __ATOMIC_SEQ_CST);
    dt__run_fail(team, rank, DT_ERR_PEER, "rank %d (process %d) %s", rank, (int)job->pid, end.s);
    if (!ended) dt__set_ended(shared, state);
}

/* Looks after one rank. Returns 0 if it has ended, or if it should have ended so long ago that
   dt_run returns without it. seconds: the time since the first failure. */
static int dt__run_watch(dt__rank_job *job, double seconds) {
    dt_team *team = job->attach.team;
    const double timeout_s = team->desc.timeout_s;
    int status = 0, rank = job->attach.rank;
    pid_t got = job->pid ? waitpid(job->pid, &status, WNOHANG) : 0;
    if (got != 0) {
        dt__process_gone(job, got > 0, status);
    } else if (!job->pid && __atomic_load_n(&job->thread_done, __ATOMIC_ACQUIRE)) {
        pthread_join(job->thread, NULL);
    } else if (seconds > (job->pid ? 2 * timeout_s + DT__STOPPED_S : timeout_s)) {
        team->host.log(team->host.user, DT_LOG_NOTICE, -1,
            dt__format("rank %d is left behind: its %s still runs %.1f s after the failure", rank,
                job->pid ? "process" : "thread", seconds)
                .s);
        team->shared->first_failure.left_behind++;
        if (!job->pid) pthread_detach(job->thread);
    } else {
        const dt__rank_state *state = &team->shared->state[rank];
        int overdue = job->pid && seconds >= fmin(DT__STOPPED_S, timeout_s) &&
                      (seconds > timeout_s || dt__process_state(dt_io_default(), state) == 'T');
        /* no other process has this pid, because waitpid has just seen the child */
        if (overdue) kill(job->pid, SIGKILL);
        return 1;
    }
    return 0;
}

/* Waits until the ranks that have started have ended or are left behind. Looks at all of them in
   each turn. The nap between two turns is about a tenth of the time so far, up to a maximum. */
static void dt__run_wait(dt_team *team) {
    dt__stopwatch failed = { NULL, 0, 0, 0 };
    double seconds = 0, nap = DT__NAP_MIN;
    for (int left = 1; left > 0; nap = fmin(1.1 * nap, DT__WATCH_NAP_MAX)) {
        if (!failed.host && dt__aborted(team->shared))
            failed = dt__stopwatch_start(&team->host, team->desc.timeout_s);
        if (failed.host) seconds = dt__waited(&failed);
        left = 0;
        for (dt__rank_job *job = team->jobs; job < team->jobs + team->desc.ranks; job++)
            left += job->is_watched = job->is_watched && dt__run_watch(job, seconds);
        if (team->desc.status_request &&
            __atomic_exchange_n(team->desc.status_request, 0, __ATOMIC_RELAXED))
            for (int rank = 0; rank < team->desc.ranks; rank++)
                team->host.log(team->host.user, DT_LOG_NOTICE, -1,
                    dt__rank_line(&team->host, dt_io_default(), rank,
                        dt__view_of_local_rank(team->shared, rank))
                        .s);
        if (left) team->host.sleep(team->host.user, nap);
    }
}

static void dt__run_team(const dt_run_desc *desc, dt__rank_job job) {
    dt_team *team = dt_team_make(*desc);
    void *user = job.user;
    if (!team) return;
    const int ranks = team->desc.ranks, separate = team->shared->separate_memory;
    size_t user_bytes = separate ? desc->user_bytes : 0;
    if (separate) team->oom_kills = dt__run_oom_kills(dt_io_default());
    if (separate) fflush(NULL); /* otherwise each child would write stdio's buffers once more */
    if (user_bytes) job.user = memcpy(team->shared->user, user, user_bytes);
    job.desc = &team->desc;
    job.attach.team = team;
    for (job.attach.rank = 0; job.attach.rank < ranks; job.attach.rank++)
        team->jobs[job.attach.rank] = job;
    for (int rank = 0; rank < ranks && dt__run_start(&team->jobs[rank]); rank++) {
    }
    dt__run_wait(team);
    if (user_bytes) memcpy(user, team->shared->user, user_bytes);
    dt_team_free(team);
}

/* ---- dt_run, and a rank over a transport ---- */

/* Stores the failure of a rank over a transport in the report, if there is none yet. Logs it if the
   context has not. ctx: NULL if there was no memory for it. */
static void dt__run_report(dt_team *run, const dt_ctx *ctx, int rank) {
    dt_report *report = run->desc.report;
    if (!ctx && !report->status)
        dt__run_fail(run, -1, DT_ERR_MEM, "rank %d: no memory for its context", rank);
    if (!ctx) return;
    if (report->status == DT_OK && dt_error(ctx)) {
        report->status = dt_error(ctx);
        report->rank = rank;
        dt__copy_name(report->text, sizeof report->text, dt_error_text(ctx));
    }
    int is_logged = dt_error(ctx) && dt_error(ctx) != DT_ERR_PEER;
    if (report->status && report->rank == rank && !is_logged)
        run->host.log(run->host.user, DT_LOG_ERROR, rank, report->text);
}

/* Runs this process as one rank of a job over TCP. Wipes the key. */
static void dt__tcp_rank(dt_team *run, dt__rank_job *job, dt__tcp_address rendezvous,
    uint8_t key[32], int has_local_key) {
    int rank = run->desc.rank;
    dt_ctx *ctx = job->ctx = dt__rank_ctx(&run->desc, rank, run->desc.host);
    dt__tcp *t = ctx ? dt__tcp_make(ctx, &run->desc, rendezvous, key, has_local_key, -1) : NULL;
    dt_transport transport = dt__tcp_transport(t);
    dt__wipe(key, 32);
    if (t) {
        run->desc.check = t->check;
        job->attach.size = t->size;
        job->attach.transport = &transport;
        dt__run_rank(job);
        dt__tcp_free(t);
    }
    dt__run_report(run, ctx, rank);
    dt_ctx_free(ctx);
}

static void dt__run_tcp(dt_team *run, dt__rank_job *job) {
    const dt_run_desc *desc = &run->desc;
    dt__tcp_address rendezvous;
    uint8_t key[32];
    int got;
    char why[DT__TCP_TEXT_BYTES];
    if (!dt__run_valid(run, 0)) return;
    if (desc->rank < 0 || desc->rank >= desc->ranks)
        dt__run_fail(run, -1, DT_ERR_ARG, "dt_run: rank %d of %d", desc->rank, desc->ranks);
    else if (!dt__tcp_address_parse(desc->rendezvous, &rendezvous))
        dt__run_fail(run, -1, DT_ERR_ARG,
            "dt_run: rendezvous '%s': not an address or name that is found, and a port, as "
            "127.0.0.1:29500",
            desc->rendezvous);
    else if (desc->kernels && desc->kernels->alloc && !desc->kernels->open)
        dt__run_fail(run, -1, DT_ERR_UNSUPPORTED,
            "dt_run: backend %s does not reach the memory of a device without queues",
            dt__backend_name(desc->backend));
    else if (!(got = dt__tcp_key(desc, rendezvous, key, why)))
        dt__run_fail(run, -1, DT_ERR_ARG, "dt_run: %s", why);
    else
        dt__tcp_rank(run, job, rendezvous, key, got == DT__TCP_NO_TOKEN);
}

#ifdef DT_USE_MPI

static void dt__run_mpi(dt_team *run, dt__rank_job *job) {
    const dt_run_desc *desc = &run->desc;
    char why[DT__TCP_TEXT_BYTES];
    if (!dt__run_valid(run, 0)) return;
    dt__mpi *mpi = dt__mpi_open(&run->host, desc, why);
    if (why[0]) dt__run_fail(run, -1, DT_ERR_COMM, "dt_run: MPI cannot be used: %s", why);
    if (!mpi) return;
    dt_transport transport = dt__mpi_transport(mpi);
    const dt__node *node = job->node = mpi->node.shared ? &mpi->node : NULL;
    if (desc->ranks != 0 && desc->ranks != mpi->size)
        dt__run_fail(
            run, -1, DT_ERR_ARG, "dt_run: %d ranks, but MPI started %d", desc->ranks, mpi->size);
    else if (!desc->report->status)
        job->ctx = dt__rank_ctx(desc, mpi->rank,
            node ? dt__heap_make(node->shared, &run->host, node->local_rank) : desc->host);
    mpi->ctx = job->ctx;
    job->attach.rank = mpi->rank;
    job->attach.size = mpi->size;
    job->attach.transport = &transport;
    dt__run_report(run, job->ctx, mpi->rank);
    if (dt__mpi_connect(mpi, *desc)) {
        run->desc.check = mpi->tcp->check;
        dt__run_rank(job);
    }
    dt__run_report(run, job->ctx, mpi->rank);
    dt__mpi_close(mpi, desc->report);
}

#endif /* DT_USE_MPI */

dt_status dt_run(dt_run_desc desc, dt_status (*rank_main)(dt_ctx *ctx, void *user), void *user) {
    dt_report report;
    if (!desc.report) desc.report = &report;
    memset(desc.report, 0, sizeof *desc.report);
    dt_team run = dt__run_env(desc); /* the run of a rank over a transport */
    dt__rank_job job = { .desc = &run.desc, .rank_main = rank_main, .user = user };
    job.attach.rank = run.desc.rank;
    job.attach.timeout_s = run.desc.timeout_s;
    int over_tcp = desc.backend == DT_BACKEND_TCP ||
                   (desc.backend == DT_BACKEND_NCCL && dt__nccl_begin != NULL);
    if (!rank_main)
        dt__run_fail(&run, -1, DT_ERR_ARG, "dt_run: rank_main is NULL");
    else if (over_tcp)
        dt__run_tcp(&run, &job);
#ifdef DT_USE_MPI
    else if (desc.backend == DT_BACKEND_MPI)
        dt__run_mpi(&run, &job);
#endif
    else
        dt__run_team(&desc, job);
    return desc.report->status;
}

// ==== 32. Trace: code ===========================================================================

/* Each rank records events in a ring, on its own thread, without a lock and without formatting
   text. dt_trace_write formats the text: each rank its own, which rank 0 appends to one file, in
   pieces of 64 KiB. Measured (build/test_trace cost, gcc -O2, a shared Xeon): tracing adds 70 ns to
   an operation or a mark, of which two reads of the clock take 55 ns; dt_trace_write takes 2 us per
   event.

       open slices (a stack)          ring of ended slices                 text         rank 0
       block F 3 > mark > ..  --end--> [event][event][event]  --write--> [piece] ---> [piece][piece]

   A slice is a bar in the trace viewer: a block ("F 3" is the forward of micro-batch 3), a mark
   (from a dt_trace_begin to its dt_trace_end), an operation or a wait. It is recorded as one event
   when it ends. So a ring that overflows loses complete slices, and the others still nest. */

enum { DT__TRACE_DEPTH = 32, DT__TRACE_TEXT = 65536 };

/* the kinds of events; OP is a blocking operation, STARTED a nonblocking one */
enum {
    DT__TRACED_MARK,
    DT__TRACED_BLOCK,
    DT__TRACED_RECOMPUTE,
    DT__TRACED_MEMORY,
    DT__TRACED_WAIT,
    DT__TRACED_OP,
    DT__TRACED_STARTED
};

typedef struct dt__trace_event {
    double begin, end;     /* on this rank's clock */
    int32_t a, b;          /* block: its number, micro-batch; message: the other rank, tag */
    int16_t tid, send_tid; /* track (0: compute); in a receive with an arrow, the send's, else -1 */
    uint8_t kind, what;    /* what: a block's dt_phase, or a dt__op_code */
    uint8_t algorithm;     /* a dt_algorithm */
    union {
        struct {
            uint64_t bytes, seq; /* a message's seq is the same at both ends, 0 if unknown */
            char group[DT__NAME_BYTES];
            double send_begin; /* as send_tid, on rank 0's clock */
        } op;
        char mark[40];
        size_t memory[DT_MEM_CLASSES];
    } u;
} dt__trace_event;

typedef struct dt__trace {
    const dt__call_table *inner;
    size_t bytes, capacity, used, lost;
    size_t at; /* index in the ring of the next event */
    int depth; /* number of open slices; those beyond DT__TRACE_DEPTH are not recorded */
    size_t live[DT_MEM_CLASSES]; /* bytes in use, as last recorded */
    dt__trace_event open[DT__TRACE_DEPTH];
    dt__trace_event *ring; /* (capacity) in memory just after this struct */
} dt__trace;

/* Returns the next event, cleared. If the ring is full, it is the oldest one. */
static dt__trace_event *dt__trace_next_event(dt__trace *trace) {
    dt__trace_event *event = &trace->ring[trace->at];
    trace->at = trace->at + 1 < trace->capacity ? trace->at + 1 : 0;
    if (trace->used < trace->capacity)
        trace->used++;
    else
        trace->lost++;
    memset(event, 0, sizeof *event);
    return event;
}

/* Begins a mark, or a block if `block` is set. */
static void dt__trace_push(dt__world *world, const dt_event *block, const char *mark) {
    dt__trace *trace = world ? world->trace : NULL;
    if (!trace) return;
    if (trace->depth++ >= DT__TRACE_DEPTH) {
        trace->lost++;
        return;
    }
    dt__trace_event *event = &trace->open[trace->depth - 1];
    memset(event, 0, sizeof *event);
    if (mark) strncpy(event->u.mark, mark, sizeof event->u.mark - 1);
    if (block) {
        event->kind = dt_recomputing(world->ctx) ? DT__TRACED_RECOMPUTE : DT__TRACED_BLOCK;
        event->what = (uint8_t)block->phase;
        event->a = block->block;
        event->b = block->micro;
    }
    event->begin = dt__time(world);
}

/* Ends the innermost mark of the current block; or the innermost block, and its marks. A block that
   began before the trace is not on the stack. Records the bytes in use where they have changed. */
static void dt__trace_pop(dt__world *world, int is_block) {
    dt__trace *trace = world ? world->trace : NULL;
    int slice = trace ? trace->depth - 1 : -1;
    if (slice >= DT__TRACE_DEPTH) {
        trace->depth--;
        return;
    }
    while (is_block && slice >= 0 && trace->open[slice].kind == DT__TRACED_MARK) slice--;
    if (slice < 0 || is_block != (trace->open[slice].kind != DT__TRACED_MARK)) return;
    while (trace->depth > slice) {
        dt__trace_event *open = &trace->open[--trace->depth], *event;
        dt_memory now = dt_memory_used(world->ctx);
        open->end = dt__time(world);
        *dt__trace_next_event(trace) = *open;
        if (memcmp(now.live, trace->live, sizeof now.live) == 0) continue;
        event = dt__trace_next_event(trace);
        event->kind = DT__TRACED_MEMORY;
        event->begin = event->end = open->end;
        memcpy(event->u.memory, now.live, sizeof now.live);
        memcpy(trace->live, now.live, sizeof now.live);
    }
}

static void dt__trace_enter(dt_ctx *ctx, const dt_event *event, void *user) {
    (void)ctx;
    dt__trace_push((dt__world *)user, event, NULL);
}

static void dt__trace_leave(dt_ctx *ctx, const dt_event *event, void *user) {
    (void)ctx;
    (void)event;
    dt__trace_pop((dt__world *)user, 1);
}

void dt_trace_begin(dt_ctx *ctx, const char *name) {
    dt__trace_push(dt__world_of(ctx), NULL, name);
}

void dt_trace_end(dt_ctx *ctx) { dt__trace_pop(dt__world_of(ctx), 0); }

static void dt__trace_add(const dt_work *work, int kind, double begin, double end) {
    const dt_comm *comm = work->comm;
    const dt__call *call = &work->call;
    dt__world *world = comm->world;
    dt__trace_event *event = dt__trace_next_event(world->trace);
    event->kind = (uint8_t)kind;
    event->what = (uint8_t)call->op;
    event->begin = begin;
    event->end = end > begin ? end : begin;
    for (int i = DT_ALGORITHMS - 1; work->algorithm && i >= DT_RING; i--)
        if (dt__algorithm_of(call, (dt_algorithm)i) == work->algorithm)
            event->algorithm = (uint8_t)i;
    event->u.op.bytes = dt_error(world->ctx) ? 0 : dt__sent_bytes(comm, call);
    event->u.op.seq = call->seq;
    memcpy(event->u.op.group, comm->group->name, DT__NAME_BYTES);
    event->a = -1;
    if (!dt__is_p2p(call->op) || work->fault == DT__DROP) return; /* a dropped call moves nothing */
    const dt__p2p *p2p = &work->p2p_ops[0]; /* still valid, although p2p_count is already 0 */
    if (p2p->peer >= 0) event->a = comm->group->ranks[p2p->peer];
    event->b = call->tag;
    event->u.op.seq = p2p->id;
}

/* The trace is a call table around the others (section 20). */
static dt_work *dt__trace_begin_call(dt_comm *comm, const dt__call *call) {
    double begin = dt__time(comm->world);
    dt_work *work = comm->world->trace->inner->begin(comm, call);
    if (work) work->start_time = begin;
    return work;
}

static int dt__trace_advance(dt_work *work) {
    dt__world *world = work->comm->world;
    int done = world->trace->inner->advance(work);
    if (done > 0 && work->end_time <= 0) work->end_time = dt__time(world);
    return done;
}

static dt_status dt__trace_end_call(dt_work *work) {
    if (work->is_started) {
        double end = fmin(work->end_time, work->return_time);
        dt__trace_add(work, DT__TRACED_STARTED, work->start_time, end);
        dt__trace_add(work, DT__TRACED_WAIT, work->wait_time, work->return_time);
    } else {
        dt__trace_add(work, DT__TRACED_OP, work->start_time, work->return_time);
    }
    return work->comm->world->trace->inner->end(work);
}

static const dt__call_table dt__trace_calls = {
    .begin = dt__trace_begin_call, .advance = dt__trace_advance, .end = dt__trace_end_call
};

dt_status dt_trace_start(dt_ctx *ctx, size_t events) {
    dt__world *world = dt__world_of(ctx);
    if (events == 0) events = 65536;
    size_t bytes = sizeof(dt__trace) + events * sizeof(dt__trace_event);
    if (dt_error(ctx)) return dt_error(ctx);
    if (!world || world->trace || events > 0xffffffffu / sizeof(dt__trace_event))
        return dt_fail(ctx, DT_ERR_ARG, "dt_trace_start with %zu events: %s", events,
            !world         ? "the context belongs to no run"
            : world->trace ? "the trace has begun already"
                           : "too many");
    dt__trace *trace = (dt__trace *)dt_alloc(ctx, DT_MEM_HOST, bytes, "the trace");
    if (!trace) return dt_error(ctx);
    memset(trace, 0, bytes); /* so that the system has mapped all pages before the first event */
    trace->bytes = bytes;
    trace->capacity = events;
    trace->ring = (dt__trace_event *)(void *)(trace + 1);
    world->listener.enter = dt__trace_enter;
    world->listener.leave = dt__trace_leave;
    trace->inner = world->calls;
    world->calls = &dt__trace_calls;
    world->trace = trace;
    return DT_OK;
}

size_t dt_trace_lost(const dt_ctx *ctx) {
    const dt__world *world = dt__world_of(ctx);
    return world && world->trace ? world->trace->lost : 0;
}

static void dt__trace_free(dt__world *world) {
    if (world->trace) dt_free(world->ctx, DT_MEM_HOST, world->trace, world->trace->bytes);
    world->trace = NULL;
}

/* ---- dt_trace_write ---- */

/* What each rank tells all ranks: rank 0's clock minus its own; the time of its first event; the
   numbers of its lost events and its sends; the bytes of its next piece of text. */
typedef struct dt__trace_summary {
    double offset, first, lost, sends, text_bytes;
} dt__trace_summary;

typedef struct dt__trace_out {
    dt__world *world;
    dt_comm *comm;         /* the world, or with phantom ranks those that run */
    int me;                /* this rank's rank in comm */
    dt__trace_event *ring; /* (events) */
    size_t events, messages;
    uint32_t *by_time, *by_message, *scratch; /* (events) indices in the ring */
    dt__trace_summary own, *all;              /* all: (ranks) */
    double origin; /* time of the first event of all ranks, on rank 0's clock */
    int tracks;    /* number of comm tracks */
    char *text;    /* (DT__TRACE_TEXT) `used` bytes of text; before the text, scratch memory */
    size_t used;
    dt__new_file file; /* rank 0: the file, and the bytes written to it */
    int64_t at;
} dt__trace_out;

static void dt__trace_p2p(
    const dt__trace_out *out, dt__op_code op, void *buf, size_t doubles, int peer) {
    dt__call call = { .op = op,
        .dtype = DT_F64,
        .peer = peer,
        .tag = -1,
        .count = doubles,
        .send = buf,
        .recv = buf };
    dt__run_on_host(out->comm, call);
}

static dt_status dt__trace_gather(const dt__trace_out *out) {
    const size_t doubles = sizeof out->own / sizeof(double);
    return dt__run_on_host(
        out->comm, dt__call_make(DT__ALL_GATHER, &out->own, out->all, doubles, DT_F64));
}

/* Clock synchronization. Returns rank 0's clock minus this rank's. A rank sends rank 0 a request
   and assumes that rank 0 reads its clock halfway between the request and the arrival of the reply.
   The error is at most half of the round trip, so the fastest of 8 counts (F. Cristian, 1989; D.
   Mills, RFC 5905). Threads and forked processes share one clock. */
static double dt__trace_offset(const dt__trace_out *out) {
    dt__world *world = out->world;
    double best = 1e300, offset = 0, at = 0;
    for (int i = 8; world->transport.send && i < 8 * out->world->size; i++) {
        int is_root = world->rank == 0, peer = is_root ? i / 8 : 0;
        if (!is_root && world->rank != i / 8) continue;
        double begin = world->host->now(world->host->user);
        dt__trace_p2p(out, is_root ? DT__RECV : DT__SEND, &at, 1, peer);
        if (is_root) at = world->host->now(world->host->user);
        dt__trace_p2p(out, is_root ? DT__SEND : DT__RECV, &at, 1, peer);
        double trip = world->host->now(world->host->user) - begin;
        if (is_root || trip >= best) continue;
        best = trip;
        offset = at - (begin + trip / 2);
    }
    return offset;
}

/* The order of time: an enclosing slice first, even if both begin at the same time. */
static int dt__trace_by_time(const void *ring, uint32_t a, uint32_t b) {
    const dt__trace_event *x = (const dt__trace_event *)ring + a,
                          *y = (const dt__trace_event *)ring + b;
    return x->begin != y->begin ? x->begin < y->begin : x->end > y->end;
}

/* The order of messages: sends first. */
static int dt__trace_by_message(const void *ring, uint32_t a, uint32_t b) {
    const dt__trace_event *x = (const dt__trace_event *)ring + a,
                          *y = (const dt__trace_event *)ring + b;
    if (x->what != y->what) return x->what == DT__SEND;
    return x->a != y->a ? x->a < y->a : x->u.op.seq < y->u.op.seq;
}

/* Sorts the events by time, lists the messages, and assigns operations to tracks, so that slices of
   one track do not overlap. Blocking operations never overlap each other and are on track 1. A
   nonblocking one is on the lowest track that is free from its start to its end. */
static void dt__trace_sort(dt__trace_out *out) {
    enum { CAPACITY = DT__TRACE_TEXT / sizeof(double) };
    const dt__trace *trace = out->world->trace;
    double *begins = (double *)(void *)out->text; /* when the track's next slice begins */
    for (int tid = 0; tid < CAPACITY; tid++) begins[tid] = 1e300;
    /* from the newest to the oldest, because an enclosing slice ends after those inside it */
    for (size_t i = 0; i < out->events; i++)
        out->by_time[i] = (uint32_t)((trace->at + trace->capacity - 1 - i) % trace->capacity);
    dt__sort(out->by_time, out->scratch, out->events, dt__trace_by_time, out->ring);
    for (size_t i = out->events; i-- > 0;) {
        dt__trace_event *event = &out->ring[out->by_time[i]];
        event->send_tid = -1;
        event->tid = event->kind >= DT__TRACED_OP;
        while (event->kind == DT__TRACED_STARTED && event->tid < CAPACITY - 1 &&
               begins[event->tid] < event->end)
            event->tid++;
        begins[event->tid] = event->begin;
        if (event->tid > out->tracks) out->tracks = event->tid;
        if (event->tid == 0 || event->a < 0 || event->u.op.seq == 0) continue;
        out->by_message[out->messages++] = out->by_time[i];
        out->own.sends += event->what == DT__SEND;
    }
    dt__sort(out->by_message, out->scratch, out->messages, dt__trace_by_message, out->ring);
}

/* Gives an arrow to each message that sender and receiver have both recorded. Each rank in turn
   broadcasts its sends, and their receivers note them. A receiver writes both ends of an arrow, so
   no arrow lacks an end. As all ranks sort by message, each passes its receives once. */
static void dt__trace_match(dt__trace_out *out) {
    const size_t max = DT__TRACE_TEXT / sizeof(dt__trace_event);
    dt__trace_event *sent = (dt__trace_event *)(void *)out->text;
    size_t at = (size_t)out->own.sends, n; /* at: the first receive not yet passed */
    const int32_t *world_ranks = out->comm->group->ranks;
    for (int rank = 0; rank < out->comm->base.size; rank++) {
        int from = world_ranks[rank];
        for (size_t done = 0, sends = (size_t)out->all[rank].sends; done < sends; done += n) {
            n = sends - done < max ? sends - done : max;
            for (size_t i = 0; rank == out->me && i < n; i++)
                sent[i] = out->ring[out->by_message[done + i]];
            const size_t doubles = n * sizeof *sent / sizeof(double);
            dt__call broadcast = { .op = DT__BROADCAST,
                .dtype = DT_F64,
                .peer = rank,
                .count = doubles,
                .send = sent,
                .recv = sent };
            if (dt__run_on_host(out->comm, broadcast)) return;
            for (size_t i = 0; i < n; i++) {
                while (sent[i].a == out->world->rank &&
                       at < out->messages) { /* the receives up to this send's */
                    dt__trace_event *receive = &out->ring[out->by_message[at]];
                    const uint64_t seq = receive->u.op.seq, its = sent[i].u.op.seq;
                    if (receive->a > from || (receive->a == from && seq > its)) break;
                    at++;
                    if (receive->a < from || seq < its) continue;
                    receive->send_tid = sent[i].tid;
                    receive->u.op.send_begin = sent[i].begin + out->all[rank].offset;
                }
            }
        }
    }
}

DT_PRINTF(4, 5) static void dt__append(char *text, size_t bytes, size_t *at, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    dt__append_list(text, bytes, at, fmt, args);
    va_end(args);
}

#define DT__TRACE_PUT(out, ...) dt__append((out)->text, DT__TRACE_TEXT, &(out)->used, __VA_ARGS__)

/* Writes s as the contents of a JSON string. Invalid UTF-8, as in a truncated name, becomes U+FFFD.
   */
static void dt__trace_escape(char out[256], const char *s) {
    size_t n = strlen(s), bad = dt__utf8_first_invalid(s, n), at = 0;
    out[0] = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        const char *fmt = c < 32 ? "\\u%04x" : c == '"' || c == '\\' ? "\\%c" : "%c";
        if (i == bad) fmt = "\\ufffd";
        dt__append(out, 256, &at, fmt, c);
        if (i == bad) bad = i + 1 + dt__utf8_first_invalid(s + i + 1, n - i - 1);
    }
}

/* Returns nanoseconds since the origin, 0 for an invalid time. Times are formatted as integers, so
   that the locale's decimal point does not matter. */
static int64_t dt__trace_ns(const dt__trace_out *out, double at) {
    double seconds = at - out->origin;
    return seconds > 0 && seconds < 4e6 ? (int64_t)(seconds * 1e9 + 0.5) : 0;
}

static void dt__trace_put_head(
    dt__trace_out *out, const char *phase, int rank, int tid, int64_t ns) {
    DT__TRACE_PUT(out, ",\n{\"ph\":\"%s\",\"pid\":%d,\"tid\":%d,\"ts\":%lld.%03d", phase, rank, tid,
        (long long)(ns / 1000), (int)(ns % 1000));
}

/* Writes event i and, if it is a receive, its arrow: from the beginning of the send to just before
   the end of the receive. */
static void dt__trace_put_event(dt__trace_out *out, uint32_t i) {
    static const char *const classes[] = { "params", "grads", "optim", "acts", "comm", "host",
        "temp" };
    static const char *const phases[] = { "?", "fwd", "bwd", "bwd-input", "bwd-weight" };
    static const char letters[] = "?FBIW";
    static const char *const algorithms[] = { "direct", "direct", "ring", "doubling", "tree" };
    const dt__trace_event *event = &out->ring[i];
    int rank = out->world->rank, kind = event->kind, again = kind == DT__TRACED_RECOMPUTE;
    int64_t begin = dt__trace_ns(out, event->begin + out->own.offset),
            end = dt__trace_ns(out, event->end + out->own.offset);
    char name[256];
    dt__trace_put_head(out, kind == DT__TRACED_MEMORY ? "C" : "X", rank, event->tid, begin);
    DT__TRACE_PUT(
        out, ",\"dur\":%lld.%03d,", (long long)((end - begin) / 1000), (int)((end - begin) % 1000));
    if (kind >= DT__TRACED_WAIT) {
        dt__trace_escape(name, event->u.op.group);
        DT__TRACE_PUT(out, "\"cat\":\"%s\",\"name\":\"%s%s %s\",\"args\":{\"group\":\"%s\"",
            kind == DT__TRACED_WAIT ? "wait" : "comm", kind == DT__TRACED_WAIT ? "wait " : "",
            dt__pattern_of((dt__op_code)event->what)->name, name, name);
        if (event->a >= 0)
            DT__TRACE_PUT(out, ",\"peer\":%d,\"tag\":%d", event->a, event->b);
        else
            DT__TRACE_PUT(out, ",\"seq\":%llu,\"algorithm\":\"%s\"",
                (unsigned long long)event->u.op.seq, algorithms[event->algorithm]);
        if (kind != DT__TRACED_WAIT)
            DT__TRACE_PUT(out, ",\"bytes\":%llu,\"started\":%s",
                (unsigned long long)event->u.op.bytes, kind == DT__TRACED_OP ? "false" : "true");
    } else if (kind == DT__TRACED_MEMORY) {
        DT__TRACE_PUT(out, "\"name\":\"memory\",\"args\":{");
        for (int c = 0; c < DT_MEM_CLASSES; c++)
            DT__TRACE_PUT(out, "%s\"%s\":%zu", c ? "," : "", classes[c], event->u.memory[c]);
    } else if (kind == DT__TRACED_MARK) {
        dt__trace_escape(name, event->u.mark);
        DT__TRACE_PUT(out, "\"cat\":\"mark\",\"name\":\"%s\",\"args\":{", name);
    } else {
        snprintf(name, sizeof name, " block %d", event->a);
        DT__TRACE_PUT(out, "\"cat\":\"%s\",\"name\":\"%c %d%s%s\",\"args\":{\"mb\":%d,\"block\":%d",
            again ? "recompute" : phases[event->what], letters[event->what], event->b,
            event->a > 0 ? name : "", again ? " again" : "", event->b, event->a);
    }
    DT__TRACE_PUT(out, "}}");
    for (int is_end = 0; is_end < 2 && event->send_tid >= 0; is_end++) {
        dt__trace_put_head(out, is_end ? "f" : "s", is_end ? rank : event->a,
            is_end ? event->tid : event->send_tid,
            is_end ? end - (end > begin) : dt__trace_ns(out, event->u.op.send_begin));
        DT__TRACE_PUT(out, ",\"cat\":\"message\",\"name\":\"message\",\"bp\":\"e\",\"id\":%llu}",
            (unsigned long long)rank << 32 | i);
    }
}

/* Writes the name of this rank (tid -1) or of one of its tracks. */
static void dt__trace_put_names(dt__trace_out *out, int tid) {
    static const char *const names[] = { "rank %d", "compute", "comm", "comm %d" };
    int rank = out->world->rank, index = tid < 0 ? rank : tid;
    const char *what = tid < 0 ? "process" : "thread";
    dt__trace_put_head(out, "M", rank, tid < 0 ? 0 : tid, 0);
    DT__TRACE_PUT(out, ",\"name\":\"%s_sort_index\",\"args\":{\"sort_index\":%d}}", what, index);
    dt__trace_put_head(out, "M", rank, tid < 0 ? 0 : tid, 0);
    DT__TRACE_PUT(out, ",\"name\":\"%s_name\",\"args\":{\"name\":\"", what);
    DT__TRACE_PUT(out, names[tid < 2 ? tid + 1 : 3], index);
    DT__TRACE_PUT(out, "\"}}");
}

/* Appends the text to the file. */
static void dt__trace_save(dt__trace_out *out) {
    dt__new_file_write(out->world->ctx, &out->file, out->text, (int64_t)out->used, out->at);
    out->at += (int64_t)out->used;
    out->used = 0;
}

/* Joins the text of all ranks: for each rank the names of its tracks, then its events. In each
   round each rank formats a piece of its text, and rank 0 appends all pieces to the file, until no
   rank has text left. So no rank waits for long. */
static void dt__trace_join(dt__trace_out *out) {
    enum { ITEM_BYTES = 2048 }; /* no name or event has a longer text */
    const size_t names = 2 + (size_t)out->tracks;
    int me = out->me, more = 1;
    for (size_t i = 0; more; out->used = 0) {
        for (; i < names + out->events && out->used + ITEM_BYTES < DT__TRACE_TEXT; i++) {
            if (i < names)
                dt__trace_put_names(out, (int)i - 1);
            else
                dt__trace_put_event(out, out->by_time[i - names]);
        }
        while (out->used % sizeof(double)) DT__TRACE_PUT(out, " "); /* doubles carry the text */
        out->own.text_bytes = (double)out->used;
        if (dt__trace_gather(out) != DT_OK) return;
        more = 0;
        for (int rank = 0; rank < out->comm->base.size; rank++) {
            double bytes = out->all[rank].text_bytes;
            if (!(bytes >= 0 && bytes <= (double)DT__TRACE_TEXT)) {
                dt__comm_fail(out->world, DT_ERR_COMM,
                    "dt_trace_write: rank %d has %g bytes in a piece of its text", rank, bytes);
                return;
            }
            out->used = (size_t)bytes;
            size_t n = out->used / sizeof(double);
            if (n == 0) continue;
            more = 1;
            if (me == rank && me > 0) dt__trace_p2p(out, DT__SEND, out->text, n, 0);
            if (me == 0 && rank > 0) dt__trace_p2p(out, DT__RECV, out->text, n, rank);
            if (me == 0) dt__trace_save(out);
        }
    }
}

/* Rank 0: writes the file under a temporary name, with the text of all ranks, and renames it. */
static void dt__trace_file(dt__trace_out *out, const char *path) {
    dt__new_file_begin(out->world->ctx, &out->file, path, 0);
    /* all other events begin with a comma */
    DT__TRACE_PUT(out,
        "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{\"ph\":\"M\",\"pid\":0,\"tid\":0,"
        "\"name\":\"process_sort_index\",\"args\":{\"sort_index\":0}}");
    dt__trace_join(out);
    DT__TRACE_PUT(out, "\n],\"otherData\":{\"lost\":[");
    for (int rank = 0; rank < out->comm->base.size; rank++) {
        DT__TRACE_PUT(out, "%s%.0f", rank ? "," : "", out->all[rank].lost);
        dt__trace_save(out);
    }
    DT__TRACE_PUT(out, "]}}\n");
    dt__trace_save(out);
    dt__new_file_end(out->world->ctx, &out->file, path);
}

/* All steps of dt_trace_write; out->text is allocated. */
static void dt__trace_all(dt__trace_out *out, const char *path) {
    out->own.offset = dt__trace_offset(out);
    dt__trace_sort(out);
    out->own.first = out->events ? out->ring[out->by_time[0]].begin + out->own.offset : 1e300;
    if (dt__trace_gather(out) != DT_OK) return;
    out->origin = out->own.first;
    for (int rank = 0; rank < out->comm->base.size; rank++)
        out->origin = fmin(out->origin, out->all[rank].first);
    dt__trace_match(out);
    if (out->me == 0)
        dt__trace_file(out, path);
    else
        dt__trace_join(out);
}

dt_status dt_trace_write(dt_comm *comm, const char *path) {
    if (!comm) return DT_ERR_ARG;
    dt__world *world = comm->world;
    dt_ctx *ctx = world->ctx;
    const dt__trace *trace = world->trace;
    const dt__call_table *calls = world->calls;
    dt_traffic traffic = world->traffic;
    double seconds = world->seconds;
    dt__trace_out out;
    if (dt_error(ctx)) return dt_error(ctx);
    if (comm != world->comm || !path)
        return dt__comm_fail(world, DT_ERR_ARG,
            "dt_trace_write on %s: it needs the world, and a path", comm->group->name);
    memset(&out, 0, sizeof out);
    out.world = world;
    out.comm = world->present ? world->present : comm;
    out.me = out.comm->base.rank;
    out.tracks = 1;
    out.ring = trace ? trace->ring : NULL;
    out.events = trace ? trace->used : 0;
    out.own.lost = (double)dt_trace_lost(ctx);
    if (out.own.lost > 0)
        dt_log(ctx, DT_LOG_NOTICE, "%s: rank %d lost %.0f events, the newest %zu are there", path,
            world->rank, out.own.lost, out.events);
    world->calls = &dt__plain_calls; /* the operations below are neither recorded nor delayed */
    size_t all_bytes = (size_t)world->size * sizeof *out.all,
           bytes = DT__TRACE_TEXT + all_bytes + 3 * out.events * sizeof(uint32_t);
    out.text = (char *)dt_alloc(ctx, DT_MEM_HOST, bytes, "the trace");
    if (out.text) {
        out.all = (dt__trace_summary *)(void *)(out.text + DT__TRACE_TEXT);
        out.by_time = (uint32_t *)(void *)(out.all + world->size);
        out.by_message = out.by_time + out.events;
        out.scratch = out.by_message + out.events;
        dt__trace_all(&out, path);
    }
    (dt_barrier)(out.comm); /* after it the file exists; if rank 0 has failed, all ranks fail */
    dt_free(ctx, DT_MEM_HOST, out.text, bytes);
    world->seconds = seconds;
    world->traffic = traffic;
    world->calls = calls;
    return dt_error(ctx);
}

DT__COLD_END
DT__CPP_WARNINGS_ON
#undef DT__COMM_CODE
#endif /* DT_COMM_IMPL */

/* HISTORY
     0.2.0   a message over a simulated link arrives when its send ends, and a collective ends with
             its last rank; a receive takes no time of the link. New: dt_run_desc.present,
             dt_comm_split_by, dt_link.levels
             DT_MAX_SPLITS -> DT_SHARED_SPLITS: no longer a limit. DT_U8, DT_I64, DT_NO_KERNELS
             new names (old -> new): dt_run_desc.ask -> status_request, dt_run_desc.faults ->
             read_fault_env, dt_launch.by -> launcher, DT_NCCL_WIDE -> DT_NCCL_F32_WINDOW,
             DT_NCCL_LEAST -> DT_NCCL_MIN_BYTES
             dt_report.left_behind; every overlap of buffers in an all-to-all is an error
             dt_transport carries packets: send and recv suffice; matching, failures and large
             messages are above it. A large message waits for its receiver over every transport.
             dt_comm_step no longer compares the calls of a step: messages carry their calls
             DT_USE_NCCL is gone: link dt_kernels.cu, which contains the NCCL backend
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
