/* fake_nccl.h - the part of fake_cuda.c that replaces NCCL 2.28: ranks are threads of one process

   A call makes a `part`: the tasks of one communicator's rank in one group of calls, mostly a
   single task. The part is one operation of a stream. At the head of the stream it is posted.
   Matching tasks of posted parts are executed at once for all ranks; the part has ended when all
   its tasks are done. So a program that would hang on GPUs hangs here, and mismatched collectives
   are reported, too. The fake is stricter than the real library: sends do not end before their
   receives start, and receive buffers are overwritten with garbage as soon as an operation
   starts. */

#include <nccl.h>
#include <sched.h>

// ==== 1. Communicators ==========================================================================

typedef enum kind {
    ALL_REDUCE,
    REDUCE,
    BROADCAST,
    ALL_GATHER,
    REDUCE_SCATTER,
    ALL_TO_ALL,
    GATHER,
    SCATTER,
    SEND,
    RECV
} kind;
static const char *const KIND_NAMES[] = { "ncclAllReduce", "ncclReduce", "ncclBroadcast",
    "ncclAllGather", "ncclReduceScatter", "ncclAlltoAll", "ncclGather", "ncclScatter", "ncclSend",
    "ncclRecv" };

typedef struct task {
    kind kind;
    const char *send;
    char *recv;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op; /* of sums and the like */
    int root;       /* or the peer of a send or receive */
    int done;
} task;

struct part {
    ncclComm_t comm;
    uint64_t number; /* number of the part in its communicator */
    int posted, stuck, task_count, left, stream_count;
    task *tasks;
    cudaStream_t *streams;
};

/* All ranks of one communicator. */
typedef struct clique {
    struct clique *next;
    uint64_t id; /* the id in its ncclUniqueId; 0: made by a split */
    int number, size, joined, splitting, broken;
    ncclComm_t *comms;
} clique;

struct ncclComm {
    /* list of all communicators ever made, so that a destroyed handle is recognised */
    ncclComm_t next;
    clique *clique;
    int rank, device, blocking;
    int inside;                                     /* threads in a call */
    int joining, splitting, finalizing, unfinished; /* counts of pending events */
    /* 1 after a call returned ncclInProgress; polls that remain until it is complete */
    int in_progress, polls;
    double begun; /* when */
    int aborted, destroyed;
    ncclResult_t state;
    part *held, *posted;
    uint64_t issued, finished;   /* parts */
    int color, key;              /* arguments of the pending split, */
    ncclComm_t child, *child_at; /* its result, and where to store it */
    ncclConfig_t child_config;
    const void *grouped_by; /* the thread whose open group has this communicator */
    char error[200];
};

static struct { /* under fake.lock */
    clique *cliques;
    ncclComm_t comms;
    uint64_t ids;
    int clique_count, one_at_a_time;
    double slow;
    int fail_after[MAX_DEVICES]; /* parts until the planted failure; 0: none */
    int failure[MAX_DEVICES];
} nccl;

/* The calls since ncclGroupStart. */
typedef struct call {
    ncclComm_t comm;
    cudaStream_t stream;
    task task;
} call;
static __thread struct group {
    int depth, call_count, call_room, init_count, aborts;
    ncclResult_t error;
    call *calls;
    ncclComm_t inits[MAX_DEVICES];
    ncclComm_t *init_at[MAX_DEVICES];
} group;

SETTER(fake_nccl_one_at_a_time, int, nccl.one_at_a_time = value)
SETTER(fake_nccl_slow, double, nccl.slow = value)

void fake_nccl_fail(int device, int after, int error) {
    pthread_mutex_lock(&fake.lock);
    nccl.fail_after[device] = after + 1;
    nccl.failure[device] = error;
    pthread_mutex_unlock(&fake.lock);
}

__attribute__((format(printf, 3, 4))) static ncclResult_t comm_error(
    ncclComm_t comm, ncclResult_t error, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(comm->error, sizeof comm->error, format, args);
    va_end(args);
    return error;
}

/* An error that the real library reports for an incorrect program. */
#define MISUSE(comm, code, ...) \
    (comm_error(comm, code, __VA_ARGS__), mistake("%s", (comm)->error), (code))

// ==== 2. Numbers ================================================================================

static size_t type_bytes(ncclDataType_t type) {
    switch (type) {
    case ncclInt8:
    case ncclUint8: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: return 0;
    }
}

static cudaDataType_t half_type(ncclDataType_t type) {
    return type == ncclFloat16 ? CUDA_R_16F : CUDA_R_16BF;
}
static int is_half(ncclDataType_t type) { return type == ncclFloat16 || type == ncclBfloat16; }

/* a = a op b. Sums of integers wrap, which unsigned ones may. */
#define COMBINE(T, U) \
    for (size_t i = 0; i < n; i++) { \
        T *x = (T *)a + i, y = ((const T *)b)[i]; \
        *x = op == ncclProd  ? (T)((U)*x * (U)y) \
             : op == ncclMax ? (*x > y ? *x : y) \
             : op == ncclMin ? (*x < y ? *x : y) \
                             : (T)((U)*x + (U)y); \
    }

static void combine(ncclDataType_t type, ncclRedOp_t op, void *a, const void *b, size_t n) {
    switch (type) {
    case ncclInt8: COMBINE(int8_t, uint32_t) break;
    case ncclUint8: COMBINE(uint8_t, uint32_t) break;
    case ncclInt32: COMBINE(int32_t, uint32_t) break;
    case ncclUint32: COMBINE(uint32_t, uint32_t) break;
    case ncclInt64: COMBINE(int64_t, uint64_t) break;
    case ncclUint64: COMBINE(uint64_t, uint64_t) break;
    case ncclFloat32: COMBINE(float, float) break;
    case ncclFloat64: COMBINE(double, double) break;
    default:
        for (size_t i = 0; i < n; i++) { /* rounded at every hop */
            float x = number_load(half_type(type), a, i), y = number_load(half_type(type), b, i);
            combine(ncclFloat32, op, &x, &y, 1);
            number_store(half_type(type), a, i, x);
        }
    }
}

/* ncclAvg multiplies floats by 1/n before the sum, and divides integers after it. */
static void average(ncclDataType_t type, void *a, size_t n, int ranks, int before) {
    for (size_t i = 0; i < n; i++) {
        if (is_half(type) && before)
            number_store(
                half_type(type), a, i, number_load(half_type(type), a, i) * (1.0f / (float)ranks));
        else if (type == ncclFloat32 && before)
            ((float *)a)[i] *= 1.0f / (float)ranks;
        else if (type == ncclFloat64 && before)
            ((double *)a)[i] *= 1.0 / ranks;
        else if (type == ncclInt8 && !before)
            ((int8_t *)a)[i] = (int8_t)(((int8_t *)a)[i] / ranks);
        else if (type == ncclUint8 && !before)
            ((uint8_t *)a)[i] = (uint8_t)(((uint8_t *)a)[i] / ranks);
        else if (type == ncclInt32 && !before)
            ((int32_t *)a)[i] /= ranks;
        else if (type == ncclUint32 && !before)
            ((uint32_t *)a)[i] /= (uint32_t)ranks;
        else if (type == ncclInt64 && !before)
            ((int64_t *)a)[i] /= ranks;
        else if (type == ncclUint64 && !before)
            ((uint64_t *)a)[i] /= (uint64_t)ranks;
    }
}

// ==== 3. Executing matching tasks ===============================================================

static int reduces(kind k) { return k == ALL_REDUCE || k == REDUCE || k == REDUCE_SCATTER; }
static int has_root(kind k) { return k == REDUCE || k == BROADCAST || k == GATHER || k == SCATTER; }

/* The bytes that a rank sends and receives. */
static void task_bytes(const task *t, int rank, int ranks, size_t *send, size_t *recv) {
    size_t one = t->count * type_bytes(t->type), all = one * (size_t)ranks;
    int root = rank == t->root;
    *send = t->kind == RECV || (t->kind == BROADCAST && !root)   ? 0
            : t->kind == SCATTER                                 ? (root ? all : 0)
            : t->kind == REDUCE_SCATTER || t->kind == ALL_TO_ALL ? all
                                                                 : one;
    *recv = t->kind == SEND || ((t->kind == REDUCE || t->kind == GATHER) && !root) ? 0
            : t->kind == ALL_GATHER || t->kind == ALL_TO_ALL || t->kind == GATHER  ? all
                                                                                   : one;
}

/* Sums n elements from `at` on, along the ring beginning with rank `first`. */
static void ring(char *out, task *const *t, int ranks, int first, size_t at, size_t n) {
    size_t bytes = type_bytes(t[0]->type);
    char *x = (char *)zeroed(n * bytes);
    for (int i = 0; i < ranks; i++) {
        char *to = i ? x : out;
        memcpy(to, t[(first + i) % ranks]->send + at * bytes, n * bytes);
        if (t[0]->op == ncclAvg) average(t[0]->type, to, n, ranks, 1);
        if (i) combine(t[0]->type, t[0]->op, out, x, n);
    }
    if (t[0]->op == ncclAvg) average(t[0]->type, out, n, ranks, 0);
    free(x);
}

/* The sum of each rank's share begins at a different rank, as in a ring; programs must not rely on
   rank order. */
static void reduce(task *const *t, int ranks) {
    size_t bytes = type_bytes(t[0]->type), count = t[0]->count, n = (size_t)ranks;
    size_t total = t[0]->kind == REDUCE_SCATTER ? n * count : count;
    size_t share = t[0]->kind == REDUCE ? total : (total + n - 1) / n;
    char *out = (char *)zeroed(total * bytes);
    for (int r = 0; (size_t)r * share < total; r++) {
        size_t at = (size_t)r * share, part = total - at < share ? total - at : share;
        ring(out + at * bytes, t, ranks, ((t[0]->kind == REDUCE ? t[0]->root : r) + 1) % ranks, at,
            part);
    }
    for (int r = 0; r < ranks; r++) {
        if (t[0]->kind == REDUCE && r != t[0]->root) continue;
        memcpy(t[r]->recv, out + (t[0]->kind == REDUCE_SCATTER ? (size_t)r * count * bytes : 0),
            count * bytes);
    }
    free(out);
}

static void move(task *const *t, int ranks) {
    size_t one = t[0]->count * type_bytes(t[0]->type);
    int root = t[0]->root;
    for (int r = 0; r < ranks; r++)
        for (int from = 0; from < ranks; from++) switch (t[0]->kind) {
            case BROADCAST:
                if (from == root) memmove(t[r]->recv, t[root]->send, one);
                break;
            case GATHER:
                if (r != root) break; /* fall through */
            case ALL_GATHER: memmove(t[r]->recv + (size_t)from * one, t[from]->send, one); break;
            case SCATTER:
                if (from == root) memmove(t[r]->recv, t[root]->send + (size_t)r * one, one);
                break;
            default: memmove(t[r]->recv + (size_t)from * one, t[from]->send + (size_t)r * one, one);
            }
}

static void task_done(ncclComm_t comm, task *t) {
    t->done = 1;
    comm->posted->left--;
}

/* A rank's first task that is not done and is a collective. */
static task *current_collective(ncclComm_t comm) {
    const part *p = comm ? comm->posted : NULL;
    for (int i = 0; p && i < p->task_count; i++)
        if (!p->tasks[i].done && p->tasks[i].kind < SEND) return &p->tasks[i];
    return NULL;
}

static void task_text(char text[2048], const task *t) {
    append(text, "%s of %zu x type %d", KIND_NAMES[t->kind], t->count, (int)t->type);
    if (reduces(t->kind)) append(text, ", operation %d", (int)t->op);
    if (has_root(t->kind)) append(text, ", root %d", t->root);
    if (t->kind >= SEND) append(text, ", peer %d", t->root);
}

static int same_call(const task *a, const task *b) {
    return a->kind == b->kind && a->count == b->count && a->type == b->type && a->op == b->op &&
           a->root == b->root;
}

static void mismatch(clique *c, int rank, const task *a, int other, const task *b) {
    char text[2048] = "";
    append(text, "communicator %d: rank %d calls ", c->number, rank);
    task_text(text, a);
    append(text, ", rank %d ", other);
    task_text(text, b);
    mistake("%s", text);
    c->broken = 1; /* it hangs from here on */
}

static int match_collective(clique *c) {
    task *tasks[c->size], *first = NULL;
    int there = 0, first_rank = 0;
    for (int r = 0; r < c->size; r++) {
        tasks[r] = current_collective(c->comms[r]);
        if (!tasks[r]) continue;
        there++;
        if (!first) first = tasks[r], first_rank = r;
        if (!same_call(first, tasks[r])) {
            mismatch(c, first_rank, first, r, tasks[r]);
            return 0;
        }
    }
    if (there < c->size) return 0;
    if (reduces(first->kind))
        reduce(tasks, c->size);
    else
        move(tasks, c->size);
    for (int r = 0; r < c->size; r++) task_done(c->comms[r], tasks[r]);
    return 1;
}

/* Executes the sends of a rank, each with the first matching receive. */
static void match_sends(clique *c, int rank) {
    const part *p = c->comms[rank] ? c->comms[rank]->posted : NULL;
    for (int i = 0; p && i < p->task_count; i++) {
        task *t = &p->tasks[i];
        ncclComm_t peer = t->kind == SEND && !t->done ? c->comms[t->root] : NULL;
        const part *q = peer ? peer->posted : NULL;
        for (int k = 0; q && k < q->task_count; k++) {
            task *u = &q->tasks[k];
            if (u->kind != RECV || u->done || u->root != rank) continue;
            if (t->count * type_bytes(t->type) != u->count * type_bytes(u->type)) {
                mismatch(c, rank, t, t->root, u);
                return;
            }
            memcpy(u->recv, t->send, t->count * type_bytes(t->type));
            task_done(c->comms[rank], t);
            task_done(peer, u);
            break;
        }
    }
}

static void match(clique *c) {
    uint64_t opened = guard_open(-1);
    while (!c->broken && match_collective(c)) {
    }
    for (int r = 0; r < c->size && !c->broken; r++) match_sends(c, r);
    guard_close(opened);
}

// ==== 4. Parts in streams =======================================================================

static int is_over(ncclComm_t comm) { return comm->aborted || fake.devices[comm->device].failed; }

/* 1 if earlier parts of this device are still pending. */
static int earlier_part(const op *o) {
    int d = ((part *)o->arg)->comm->device;
    FOR_QUEUED(s)
    for (const op *other = s->head; other; other = other->next)
        if (other->kind == OP_NCCL && other->seq < o->seq &&
            ((part *)other->arg)->comm->device == d)
            return 1;
    return 0;
}

/* 1 if the part can be posted or can end. */
static int part_may_run(const op *o) {
    const part *p = (const part *)o->arg;
    if (is_over(p->comm)) return 1;
    if (p->posted) return p->left == 0 && !p->stuck;
    return p->number == p->comm->finished && !(nccl.one_at_a_time && earlier_part(o));
}

/* Overwrites receive buffers: their content is unspecified during an operation and after an
   abort. */
static void spoil(const part *p) {
    uint64_t opened = guard_open(p->comm->device);
    for (int i = 0; i < p->task_count; i++) {
        const task *t = &p->tasks[i];
        size_t send, recv;
        task_bytes(t, p->comm->rank, p->comm->clique->size, &send, &recv);
        int apart = send == 0 || t->send + send <= t->recv || t->recv + recv <= t->send;
        if (recv && !t->done && (apart || is_over(p->comm))) memset(t->recv, 0xff, recv);
    }
    guard_close(opened);
}

/* Returns 1 if the part has ended. */
static int part_run(part *p) {
    ncclComm_t comm = p->comm;
    int d = comm->device;
    if (p->posted || is_over(comm)) {
        if (p->posted && p->left > 0) spoil(p);
        if (comm->posted == p) comm->posted = NULL;
        comm->finished++;
        return 1;
    }
    p->posted = 1;
    p->left = p->task_count;
    spoil(p);
    fake.progress++;
    pthread_cond_broadcast(&fake.changed);
    if (nccl.fail_after[d] && --nccl.fail_after[d] == 0) {
        comm->state =
            comm_error(comm, (ncclResult_t)nccl.failure[d], "the failure that a test planted");
        p->stuck = 1;
    } else {
        comm->posted = p;
        match(comm->clique);
    }
    return 0;
}

static void part_drop(void *arg) {
    part *p = (part *)arg;
    p->comm->unfinished--;
    free(p->tasks);
    free(p->streams);
    free(p);
}

/* For the text about a hang: the part, and the missing ranks. */
static void part_describe(char text[2048], const part *p) {
    const clique *c = p->comm->clique;
    append(text, "rank %d of communicator %d, part %d: ", p->comm->rank, c->number, (int)p->number);
    task_text(text, &p->tasks[0]);
    if (p->task_count > 1) append(text, " and %d more", p->task_count - 1);
    if (!p->posted) append(text, "; not started");
    for (int r = 0; p->posted && r < c->size; r++)
        if (!c->comms[r] || !c->comms[r]->posted) append(text, "; rank %d is not there", r);
}

/* Queues a part in its streams. A group on several streams makes each stream wait for all, as in
   the real library. */
static void part_launch(part *p) {
    cudaStream_t first = p->streams[0];
    for (int i = 1; i < p->stream_count; i++) {
        mark *m = enqueue_record(p->streams[i]);
        enqueue_wait(first, m);
        mark_unref(m);
    }
    op *o = enqueue(first, OP_NCCL, "NCCL");
    o->arg = p;
    o->drop = part_drop;
    if (p->stream_count == 1) return;
    mark *m = enqueue_record(first);
    for (int i = 1; i < p->stream_count; i++) enqueue_wait(p->streams[i], m);
    mark_unref(m);
}

// ==== 5. Calls ==================================================================================

/* Begins a call on a communicator. No other thread may be in a call, and the caller must have seen
   the previous call complete. */
static ncclResult_t comm_enter(ncclComm_t comm) {
    int others = __atomic_fetch_add(&comm->inside, 1, __ATOMIC_SEQ_CST);
    sched_yield(); /* gives a second thread the chance to enter */
    enter();
    const void *grouped_by = comm->grouped_by;
    if (comm->aborted || comm->destroyed)
        return MISUSE(comm, ncclInvalidArgument, "a communicator is used after its end");
    if (others > 0 || (grouped_by && grouped_by != &group))
        return MISUSE(comm, ncclInvalidUsage, "two threads call one communicator at the same time");
    if (comm->in_progress)
        return MISUSE(comm, ncclInvalidUsage,
            "communicator %d, rank %d: a call while the one before is in progress: "
            "ask ncclCommGetAsyncError until it says ncclSuccess",
            comm->clique->number, comm->rank);
    return comm->state;
}

static ncclResult_t comm_leave(ncclComm_t comm, ncclResult_t result) {
    leave(cudaSuccess);
    __atomic_fetch_sub(&comm->inside, 1, __ATOMIC_SEQ_CST);
    return result;
}

/* The result of a call that has started work: a non-blocking communicator may return
   ncclInProgress. */
static ncclResult_t begun(ncclComm_t comm, int surely) {
    if (comm->blocking) return ncclSuccess;
    comm->polls = (int)draw(4) + surely;
    comm->begun = now();
    comm->in_progress = comm->polls > 0;
    return comm->in_progress ? ncclInProgress : ncclSuccess;
}

/* Makes one part of all calls of a communicator in a group. */
static part *part_make(ncclComm_t comm) {
    part *p = (part *)zeroed(sizeof *p);
    p->comm = comm;
    p->number = comm->issued++;
    p->tasks = (task *)zeroed((size_t)group.call_count * sizeof *p->tasks);
    p->streams = (cudaStream_t *)zeroed((size_t)group.call_count * sizeof *p->streams);
    comm->unfinished++;
    comm->grouped_by = NULL;
    for (int i = 0; i < group.call_count; i++) {
        call *c = &group.calls[i];
        if (c->comm != comm) continue;
        p->tasks[p->task_count++] = c->task;
        int known = 0;
        for (int k = 0; k < p->stream_count; k++) known |= p->streams[k] == c->stream;
        if (!known) p->streams[p->stream_count++] = c->stream;
        c->comm = NULL;
    }
    return p;
}

/* Ends a group. A part of a non-blocking communicator enters its stream only with the result
   ncclSuccess. */
static ncclResult_t group_launch(void) {
    ncclResult_t result = group.error;
    for (int i = 0; i < group.call_count; i++) {
        ncclComm_t comm = group.calls[i].comm;
        if (comm && group.error) comm->grouped_by = NULL;
        if (!comm || group.error) continue;
        part *p = part_make(comm);
        if (begun(comm, 0) == ncclInProgress) {
            comm->held = p;
            result = ncclInProgress;
        } else
            part_launch(p);
    }
    free(group.calls);
    group.calls = NULL;
    group.call_count = group.call_room = 0;
    group.error = ncclSuccess;
    return result;
}

static ncclResult_t check_memory_of(ncclComm_t comm, const task *t) {
    size_t send, recv, one = t->count * type_bytes(t->type);
    char what[64];
    task_bytes(t, comm->rank, comm->clique->size, &send, &recv);
    snprintf(what, sizeof what, "%s, rank %d", KIND_NAMES[t->kind], comm->rank);
    if ((send && !t->send) || (recv && !t->recv))
        return comm_error(comm, ncclInvalidArgument, "%s: NULL", what);
    if ((send && !device_reads(t->send, send, comm->device, what)) ||
        (recv && !device_reads(t->recv, recv, comm->device, what)))
        return ncclUnhandledCudaError;
    if (!send || !recv || t->send + send <= t->recv || t->recv + recv <= t->send)
        return ncclSuccess;
    ptrdiff_t distance = t->recv - t->send, mine = (ptrdiff_t)((size_t)comm->rank * one);
    ptrdiff_t in_place = t->kind == ALL_GATHER || t->kind == GATHER        ? -mine
                         : t->kind == REDUCE_SCATTER || t->kind == SCATTER ? mine
                                                                           : 0;
    if (distance == in_place && t->kind != ALL_TO_ALL) return ncclSuccess;
    return MISUSE(
        comm, ncclInvalidArgument, "%s: the buffers overlap, and not as in-place ones", what);
}

static ncclResult_t check_task(ncclComm_t comm, const task *t) {
    if (type_bytes(t->type) == 0)
        return comm_error(comm, ncclInvalidArgument, "type %d", (int)t->type);
    if ((unsigned)t->op >= ncclNumOps)
        return comm_error(comm, ncclInvalidArgument, "operation %d", (int)t->op);
    if (t->root < 0 || t->root >= comm->clique->size)
        return MISUSE(comm, ncclInvalidArgument, "%s: rank %d of %d", KIND_NAMES[t->kind], t->root,
            comm->clique->size);
    return check_memory_of(comm, t);
}

static ncclResult_t call_add(ncclComm_t comm, cudaStream_t handle, const task *t) {
    cudaStream_t s = stream_of(handle);
    if (comm->finalizing) return MISUSE(comm, ncclInvalidUsage, "a call after ncclCommFinalize");
    if (!s) return comm_error(comm, ncclInvalidArgument, "no such stream");
    if (s->device != comm->device)
        return MISUSE(comm, ncclUnhandledCudaError,
            "a stream of device %d, a communicator of device %d", s->device, comm->device);
    ncclResult_t result = check_task(comm, t);
    /* an empty collective does nothing, as in NCCL */
    if (result || (t->count == 0 && t->kind < SEND)) return result;
    if (group.call_count == group.call_room) {
        group.call_room = group.call_room ? 2 * group.call_room : 16;
        group.calls = (call *)realloc(group.calls, (size_t)group.call_room * sizeof *group.calls);
        if (!group.calls) abort();
    }
    group.calls[group.call_count++] = (call){ comm, s, *t };
    comm->grouped_by = &group;
    return ncclSuccess;
}

static ncclResult_t issue(kind kind, const void *send, void *recv, size_t count,
    ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
    if (!comm) return ncclInvalidArgument;
    task t = { kind, (const char *)send, (char *)recv, count, type, op, root, 0 };
    ncclResult_t result = comm_enter(comm);
    if (!result) result = call_add(comm, stream, &t);
    if (result && group.depth > 0) group.error = result;
    if (!result && group.depth == 0) result = group_launch();
    return comm_leave(comm, result);
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
    ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return issue(ALL_REDUCE, send, recv, count, type, op, 0, comm, stream);
}
ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
    ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
    return issue(REDUCE, send, recv, count, type, op, root, comm, stream);
}
ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type,
    int root, ncclComm_t comm, cudaStream_t stream) {
    return issue(BROADCAST, send, recv, count, type, ncclSum, root, comm, stream);
}
ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
    cudaStream_t stream) {
    return issue(BROADCAST, buffer, buffer, count, type, ncclSum, root, comm, stream);
}
ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type,
    ncclComm_t comm, cudaStream_t stream) {
    return issue(ALL_GATHER, send, recv, count, type, ncclSum, 0, comm, stream);
}
ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type,
    ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return issue(REDUCE_SCATTER, send, recv, count, type, op, 0, comm, stream);
}
ncclResult_t ncclAlltoAll(const void *send, void *recv, size_t count, ncclDataType_t type,
    ncclComm_t comm, cudaStream_t stream) {
    return issue(ALL_TO_ALL, send, recv, count, type, ncclSum, 0, comm, stream);
}
ncclResult_t ncclGather(const void *send, void *recv, size_t count, ncclDataType_t type, int root,
    ncclComm_t comm, cudaStream_t stream) {
    return issue(GATHER, send, recv, count, type, ncclSum, root, comm, stream);
}
ncclResult_t ncclScatter(const void *send, void *recv, size_t count, ncclDataType_t type, int root,
    ncclComm_t comm, cudaStream_t stream) {
    return issue(SCATTER, send, recv, count, type, ncclSum, root, comm, stream);
}
ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer,
    ncclComm_t comm, cudaStream_t stream) {
    return issue(SEND, send, NULL, count, type, ncclSum, peer, comm, stream);
}
ncclResult_t ncclRecv(
    void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return issue(RECV, NULL, recv, count, type, ncclSum, peer, comm, stream);
}

// ==== 6. Making communicators ===================================================================

ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    pthread_mutex_lock(&fake.lock);
    memset(id, 0, sizeof *id);
    nccl.ids++;
    memcpy(id->internal, &nccl.ids, sizeof nccl.ids);
    pthread_mutex_unlock(&fake.lock);
    return ncclSuccess;
}

static clique *clique_make(uint64_t id, int size) {
    clique *c = (clique *)zeroed(sizeof *c);
    c->id = id;
    c->size = size;
    c->number = ++nccl.clique_count;
    c->comms = (ncclComm_t *)zeroed((size_t)size * sizeof *c->comms);
    c->next = nccl.cliques;
    return nccl.cliques = c;
}

static ncclComm_t comm_make(clique *c, int rank, int device, int blocking) {
    ncclComm_t comm = (ncclComm_t)zeroed(sizeof *comm);
    comm->clique = c;
    comm->rank = rank;
    comm->device = device;
    comm->blocking = blocking;
    comm->next = nccl.comms;
    c->comms[rank] = comm;
    c->joined++;
    return nccl.comms = comm;
}

/* The last rank has joined: checks that the ranks form a valid clique. */
static void clique_complete(clique *c) {
    const char *allowed = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    ncclResult_t result = ncclSuccess;
    int a = 0, b = 0;
    for (int r = 0; r < c->size; r++)
        for (int q = 0; q < r; q++)
            if (c->comms[q]->device == c->comms[r]->device) a = q, b = r;
    if (b && !(allowed && atoi(allowed) == 1)) result = ncclInvalidUsage;
    for (int r = 0; r < c->size; r++) {
        ncclComm_t comm = c->comms[r];
        comm->joining = 0;
        comm->state = result;
        if (result)
            comm_error(comm, result,
                "Duplicate GPU detected : rank %d and rank %d both on CUDA device %d", a, b,
                c->comms[a]->device);
    }
    pthread_cond_broadcast(&fake.changed);
}

/* In a blocking call, waits for the other ranks' calls. */
static ncclResult_t wait_zero(ncclComm_t comm, const int *zero, const char *what) {
    if (wait_for((target){ .zero = zero, .what = what }))
        return comm_error(comm, ncclSystemError, "%s: no answer", what);
    return comm->aborted ? ncclInternalError : comm->state;
}

static ncclResult_t init_wait(ncclComm_t comm, ncclComm_t *at) {
    ncclResult_t result = wait_zero(comm, &comm->joining, "the other ranks of ncclCommInitRank");
    if (!result) return ncclSuccess;
    comm->destroyed = 1;
    *at = NULL;
    return result;
}

static int config_blocking(const ncclConfig_t *config, int inherited) {
    return config && config->blocking != NCCL_CONFIG_UNDEF_INT ? config->blocking : inherited;
}

/* The clique of an id, with one more rank; NULL if the rank cannot join. */
static clique *clique_of(ncclUniqueId id, int size, int rank) {
    uint64_t number;
    memcpy(&number, id.internal, sizeof number);
    clique *c = nccl.cliques;
    while (c && c->id != number) c = c->next;
    if (size < 1 || rank < 0 || rank >= size || number == 0 || number > nccl.ids)
        mistake("ncclCommInitRank: rank %d of %d, or an id that was never given out", rank, size);
    else if (!c)
        return clique_make(number, size);
    else if (c->size != size || c->comms[rank])
        mistake("ncclCommInitRank: rank %d of %d: others said %d ranks, or it is there already",
            rank, size, c->size);
    else
        return c;
    return NULL;
}

ncclResult_t ncclCommInitRankConfig(
    ncclComm_t *at, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    cudaError_t error = enter();
    *at = NULL;
    if (error || (config && (config->magic != 0xcafebeef || config->size != sizeof *config))) {
        leave(cudaSuccess);
        return error ? ncclUnhandledCudaError : ncclInvalidArgument;
    }
    clique *c = clique_of(id, size, rank);
    if (!c) {
        leave(cudaSuccess);
        return ncclInvalidArgument;
    }
    ncclComm_t comm = comm_make(c, rank, current_device, config_blocking(config, 1));
    *at = comm;
    comm->joining = 1;
    if (c->joined == size) clique_complete(c);
    ncclResult_t result = begun(comm, comm->joining || comm->state);
    if (comm->blocking && group.depth == 0) result = init_wait(comm, at);
    if (comm->blocking && group.depth > 0 && group.init_count < MAX_DEVICES) {
        group.init_at[group.init_count] = at;
        group.inits[group.init_count++] = comm;
    }
    leave(cudaSuccess);
    return result;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(comm, size, id, rank, NULL);
}

/* All ranks have called ncclCommSplit: makes one communicator per color, ordered by key, then by
   rank. */
static void split_complete(clique *c) {
    for (int r = 0; r < c->size; r++) {
        int color = c->comms[r]->color, size = 0, members[c->size];
        if (!c->comms[r]->splitting || color == NCCL_SPLIT_NOCOLOR) {
            c->comms[r]->splitting = 0;
            continue;
        }
        for (int q = r; q < c->size; q++) {
            if (c->comms[q]->color != color) continue;
            int at = size++;
            for (; at > 0 && c->comms[members[at - 1]]->key > c->comms[q]->key; at--)
                members[at] = members[at - 1];
            members[at] = q;
        }
        clique *child = clique_make(0, size);
        for (int i = 0; i < size; i++) {
            ncclComm_t parent = c->comms[members[i]];
            parent->child = comm_make(
                child, i, parent->device, config_blocking(&parent->child_config, parent->blocking));
            parent->splitting = 0;
        }
    }
    c->splitting = 0;
    pthread_cond_broadcast(&fake.changed);
}

ncclResult_t ncclCommSplit(
    ncclComm_t comm, int color, int key, ncclComm_t *child, ncclConfig_t *config) {
    if (!comm || !child) return ncclInvalidArgument;
    ncclResult_t result = comm_enter(comm);
    *child = NULL;
    if (!result && color < 0 && color != NCCL_SPLIT_NOCOLOR)
        result = comm_error(comm, ncclInvalidArgument, "color");
    if (result) return comm_leave(comm, result);
    comm->color = color;
    comm->key = key;
    comm->child = NULL;
    comm->child_at = child;
    comm->child_config = config ? *config : (ncclConfig_t)NCCL_CONFIG_INITIALIZER;
    comm->splitting = 1;
    if (++comm->clique->splitting == comm->clique->size) split_complete(comm->clique);
    begun(comm, 1); /* only the state shows that the split is pending, as in NCCL 2.28 */
    if (comm->blocking) {
        result = wait_zero(comm, &comm->splitting, "the other ranks of ncclCommSplit");
        *child = comm->child;
    }
    return comm_leave(comm, result);
}

// ==== 7. State, end, groups =====================================================================

/* The pending call may complete at any poll. */
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state) {
    if (!comm || !state) return ncclInvalidArgument;
    enter();
    ncclResult_t result = ncclSuccess;
    if (comm->aborted || comm->destroyed)
        result = MISUSE(comm, ncclInvalidArgument, "a communicator after its end");
    else if (comm->in_progress && !comm->state) {
        int waits = comm->joining || comm->splitting || (comm->finalizing && comm->unfinished);
        if (!waits && now() - comm->begun >= nccl.slow && --comm->polls <= 0) {
            comm->in_progress = 0;
            if (comm->held) part_launch(comm->held);
            if (comm->child_at) *comm->child_at = comm->child;
            comm->held = NULL;
            comm->child_at = NULL;
        }
    }
    *state = comm->state ? comm->state : comm->in_progress ? ncclInProgress : ncclSuccess;
    leave(cudaSuccess);
    return result;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    if (!comm) return ncclInvalidArgument;
    ncclResult_t result = comm_enter(comm);
    if (!result && comm->finalizing)
        result = MISUSE(comm, ncclInvalidArgument, "ncclCommFinalize twice");
    if (result) return comm_leave(comm, result);
    comm->finalizing = 1;
    result = begun(comm, comm->unfinished > 0);
    if (comm->blocking)
        result = wait_zero(comm, &comm->unfinished, "ncclCommFinalize's operations");
    return comm_leave(comm, result);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (!comm) return ncclSuccess;
    ncclResult_t result = comm_enter(comm);
    /* NCCL allows it, and finalizes: it waits for the other ranks without a timeout */
    if (!result && !comm->blocking && !comm->finalizing)
        result = MISUSE(comm, ncclInvalidUsage, "ncclCommDestroy before ncclCommFinalize");
    if (!result) result = wait_zero(comm, &comm->unfinished, "ncclCommDestroy's operations");
    if (!result) comm->destroyed = 1;
    return comm_leave(comm, result);
}

/* ncclCommAbort may be called from any thread at any time. This rank's parts end; the other ranks
   continue to wait. The memory of aborted communicators is freed once the device is idle; in a
   group, after all communicators of the group have been aborted. */
static ncclResult_t abort_end(void) {
    return wait_device(current_device) ? ncclUnhandledCudaError : ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (!comm) return ncclSuccess;
    enter();
    ncclResult_t result = ncclSuccess;
    if (comm->aborted || comm->destroyed)
        result = MISUSE(comm, ncclInvalidArgument, "ncclCommAbort after the end");
    if (!result) {
        if (comm->splitting) comm->clique->splitting--;
        if (comm->held) part_drop(comm->held);
        comm->held = comm->posted = NULL;
        comm->joining = comm->splitting = 0;
        comm->aborted = 1;
        pthread_cond_broadcast(&fake.changed);
        if (group.depth > 0)
            group.aborts = 1;
        else
            result = abort_end();
    }
    leave(cudaSuccess);
    return result;
}

static ncclResult_t tell(ncclComm_t comm, int *value, int which) {
    if (!comm || !value) return ncclInvalidArgument;
    ncclResult_t result = comm_enter(comm);
    if (!result) *value = which == 0 ? comm->clique->size : which == 1 ? comm->rank : comm->device;
    return comm_leave(comm, result);
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) { return tell(comm, count, 0); }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) { return tell(comm, rank, 1); }
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) { return tell(comm, device, 2); }

const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const TEXTS[] = { "no error",
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "internal error - please report this issue",
        "invalid argument (run with NCCL_DEBUG=WARN for details)",
        "invalid usage (run with NCCL_DEBUG=WARN for details)",
        "remote process exited or there was a network error", "NCCL operation in progress" };
    return (unsigned)result < ncclNumResults ? TEXTS[result] : "unknown result code";
}
const char *ncclGetLastError(ncclComm_t comm) { return comm ? comm->error : ""; }

ncclResult_t ncclGroupStart(void) {
    group.depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    if (group.depth == 0) return ncclInvalidUsage;
    if (--group.depth > 0) return ncclSuccess;
    enter();
    ncclResult_t result = ncclSuccess;
    for (int i = 0; i < group.init_count && !result; i++)
        result = init_wait(group.inits[i], group.init_at[i]);
    group.init_count = 0;
    if (result) group.error = result;
    result = group_launch();
    if (group.aborts) {
        ncclResult_t end = abort_end();
        if (!result) result = end;
    }
    group.aborts = 0;
    leave(cudaSuccess);
    return result;
}

ncclResult_t ncclMemAlloc(void **p, size_t bytes) {
    return cudaMalloc(p, bytes) ? ncclUnhandledCudaError : ncclSuccess;
}
ncclResult_t ncclMemFree(void *p) { return cudaFree(p) ? ncclUnhandledCudaError : ncclSuccess; }

static int comm_leaks(int print) {
    int n = 0;
    for (ncclComm_t comm = nccl.comms; comm; comm = comm->next) {
        if (comm->aborted || comm->destroyed) continue;
        n++;
        if (print)
            fprintf(stderr, "fake_cuda: rank %d of communicator %d\n", comm->rank,
                comm->clique->number);
    }
    return n;
}

/* Call after the streams were reset, because their parts refer to communicators. */
static void nccl_reset(void) {
    for (ncclComm_t comm = nccl.comms, next; comm; comm = next) {
        next = comm->next;
        if (comm->held) part_drop(comm->held);
        free(comm);
    }
    for (clique *c = nccl.cliques, *next; c; c = next) {
        next = c->next;
        free(c->comms);
        free(c);
    }
    uint64_t ids = nccl.ids; /* so that old ids stay invalid */
    memset(&nccl, 0, sizeof nccl);
    nccl.ids = ids;
    memset(&group, 0, sizeof group);
}
