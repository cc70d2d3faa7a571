/* fake_cuda.c - the CUDA runtime, cuBLASLt and NCCL on a CPU, for tests; fake_cuda.h says what it
   is for. Public domain or MIT, at your choice; see LICENSE.

   One lock guards everything. A stream is a queue of operations. The thread that is in a call takes
   ready operations from the heads of queues and runs them; kernels run without the lock. A thread
   sleeps if its wait needs an operation that another thread has not queued yet.

   CONTENTS
     1. State
     2. Mistakes
     3. Memory known by address
     4. Queues
     5. Who runs next
     6. Waiting
     7. Devices and errors
     8. Memory
     9. Copies
    10. Streams and events
    11. Kernels
    12. The fake itself */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#if defined(__has_include) && __has_include(<cublasLt.h>) && __has_include(<nccl.h>)

#include "tests/cuda/fake_cuda.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

// ==== 1. State ==================================================================================

enum { MAX_DEVICES = 64 };

/* One record of an event. cudaStreamWaitEvent waits for the record, not for the event. */
typedef struct mark {
    int refs, done;
    double when;
    cudaStream_t stream; /* while not done */
} mark;

typedef enum op_kind { OP_RUN, OP_RECORD, OP_WAIT, OP_NCCL } op_kind;
typedef struct op op;
struct op {
    op *next;
    op_kind kind;
    uint64_t seq;     /* in the order of calls, over all streams */
    const char *name; /* for the text about a hang */
    void (*run)(void *), (*drop)(void *);
    void *arg;
    mark *mark;
    const char *touched[2]; /* copies: the memory they will read and write */
    size_t touched_bytes[2];
};

struct CUstream_st {
    cudaStream_t next;
    int device, number, is_default, blocking, destroyed;
    int busy;        /* a thread runs the head without the lock */
    int needed;      /* 1 if a wait in the lazy order needs this stream */
    size_t place;    /* index in fake.queued while the stream has operations */
    unsigned weight; /* scheduling weight; 0: not drawn yet */
    op *head, **tail;
};

struct CUevent_st {
    cudaEvent_t next;
    int device;
    unsigned flags;
    mark *latest; /* NULL: never recorded */
};

/* A device's memory while the guard is on: only running operations may touch it. */
typedef struct arena {
    char *base;
    size_t top;
    int open; /* operations */
} arena;

typedef struct device {
    struct CUstream_st default_stream;
    arena arena;
    cudaError_t failed; /* sticky, after a kernel's mistake */
    size_t used;
    unsigned char peer[MAX_DEVICES]; /* access enabled */
} device;

typedef enum block_kind { BLOCK_DEVICE, BLOCK_PINNED, BLOCK_REGISTERED } block_kind;
typedef struct block {
    char *p;
    size_t bytes;
    int device;
    block_kind kind;
} block;

static struct fake {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* signalled when an operation was queued, has ended or was aborted */
    int device_count, order, no_default_stream, no_peers, guard, streams_made;
    device devices[MAX_DEVICES];
    cudaStream_t streams; /* all but the default ones */
    cudaStream_t *queued; /* all streams that have operations */
    size_t queued_count, queued_room;
    cudaEvent_t events;
    block *blocks; /* by address */
    size_t block_count, block_room, memory;
    uint64_t seed, draws, sequence, progress;
    double wait_limit;
    char error[2048];
    int error_unread;
} fake = { .lock = PTHREAD_MUTEX_INITIALIZER };

static __thread int current_device;
static __thread cudaError_t last_error;
static __thread int running_on = -1; /* the device whose kernel this thread runs */
/* the devices whose memory this thread's call has opened */
static __thread uint64_t guard_held;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}
/* 0 .. n-1, from the seed. */
static unsigned draw(unsigned n) {
    return (unsigned)(mix(fake.seed + ++fake.draws * 0x9e3779b97f4a7c15u) >> 33) % n;
}

static void defaults(void) {
    const char *n = getenv("FAKE_CUDA_DEVICES"), *seed = getenv("FAKE_CUDA_SEED"),
               *order = getenv("FAKE_CUDA_ORDER");
    fake.device_count = n ? atoi(n) : 1;
    if (fake.device_count > MAX_DEVICES) fake.device_count = MAX_DEVICES;
    fake.seed = mix(seed ? strtoull(seed, NULL, 10) : 1);
    fake.order = !order                    ? FAKE_CUDA_RANDOM
                 : !strcmp(order, "lazy")  ? FAKE_CUDA_LAZY
                 : !strcmp(order, "eager") ? FAKE_CUDA_EAGER
                                           : FAKE_CUDA_RANDOM;
    fake.draws = 0;
    fake.wait_limit = 20;
    fake.memory = (size_t)8 << 30;
    fake.no_default_stream = fake.no_peers = 0;
    fake.guard = getenv("FAKE_CUDA_GUARD") && atoi(getenv("FAKE_CUDA_GUARD"));
    for (int d = 0; d < MAX_DEVICES; d++) {
        device *device = &fake.devices[d];
        memset(device, 0, sizeof *device);
        device->default_stream.device = d;
        device->default_stream.is_default = 1;
        device->default_stream.tail = &device->default_stream.head;
    }
}

__attribute__((constructor)) static void start(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&fake.changed, &attributes);
    pthread_condattr_destroy(&attributes);
    defaults();
}

// ==== 2. Mistakes ===============================================================================

/* Keeps only the first mistake, because later ones are mostly its consequences. Set a breakpoint
   here. */
__attribute__((format(printf, 1, 2), noinline)) static void mistake(const char *format, ...) {
    if (fake.error[0]) return;
    va_list args;
    va_start(args, format);
    vsnprintf(fake.error, sizeof fake.error, format, args);
    va_end(args);
    fake.error_unread = 1;
}

const char *fake_cuda_error(void) {
    pthread_mutex_lock(&fake.lock);
    const char *text = fake.error[0] ? fake.error : NULL;
    fake.error_unread = 0;
    pthread_mutex_unlock(&fake.lock);
    return text;
}

void fake_cuda_clear_error(void) {
    pthread_mutex_lock(&fake.lock);
    fake.error[0] = 0;
    fake.error_unread = 0;
    pthread_mutex_unlock(&fake.lock);
}

/* Prints a mistake that the test did not read. */
__attribute__((destructor)) static void tell_unread(void) {
    if (fake.error_unread) fprintf(stderr, "fake_cuda: %s\n", fake.error);
}

// ==== 3. Memory known by address ================================================================

/* Index of the first block that ends after p. */
static size_t block_after(const void *p) {
    size_t low = 0, high = fake.block_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (fake.blocks[middle].p + fake.blocks[middle].bytes > (const char *)p)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* The block that contains p; NULL: pageable host memory, or no memory. */
static block *block_of(const void *p) {
    size_t i = block_after(p);
    return i < fake.block_count && fake.blocks[i].p <= (const char *)p ? &fake.blocks[i] : NULL;
}

static void block_add(void *p, size_t bytes, int device, block_kind kind) {
    if (fake.block_count == fake.block_room) {
        fake.block_room = fake.block_room ? 2 * fake.block_room : 64;
        fake.blocks = (block *)realloc(fake.blocks, fake.block_room * sizeof *fake.blocks);
        if (!fake.blocks) abort();
    }
    size_t i = block_after(p);
    memmove(&fake.blocks[i + 1], &fake.blocks[i], (fake.block_count++ - i) * sizeof *fake.blocks);
    fake.blocks[i] = (block){ (char *)p, bytes, device, kind };
}

static void block_remove(const block *b) {
    size_t i = (size_t)(b - fake.blocks);
    memmove(&fake.blocks[i], &fake.blocks[i + 1], (--fake.block_count - i) * sizeof *fake.blocks);
}

/* The guard: each device's memory is one address range, which is accessible only while an operation
   runs that may use it. guard_open opens the ranges for an operation of device d (-1: of any
   device); its result goes to guard_close. */
enum { PAGE = 4096 };
/* address space, not memory; addresses are never reused */
static const size_t ARENA_BYTES = (size_t)1 << 36;

static uint64_t guard_open(int d) {
    uint64_t opened = 0;
    for (int e = 0; e < fake.device_count; e++) {
        arena *a = &fake.devices[e].arena;
        if (!a->base || (d >= 0 && d != e && !fake.devices[d].peer[e])) continue;
        opened |= (uint64_t)1 << e;
        if (a->open++ == 0) mprotect(a->base, a->top, PROT_READ | PROT_WRITE);
    }
    return opened;
}

static void guard_close(uint64_t opened) {
    for (int e = 0; opened >> e && e < MAX_DEVICES; e++) {
        arena *a = &fake.devices[e].arena;
        if (opened >> e & 1 && --a->open == 0) mprotect(a->base, a->top, PROT_NONE);
    }
}

/* Opening and closing takes longer than many kernels, so all operations that one call runs share
   one opening. */
static void guard_hold(int d) {
    uint64_t more = guard_open(d), twice = more & guard_held;
    guard_close(twice);
    guard_held |= more;
}

static void guard_drop(void) {
    guard_close(guard_held);
    guard_held = 0;
}

static int in_arena(const arena *a, const void *p) {
    return a->base && (const char *)p >= a->base && (const char *)p < a->base + ARENA_BYTES;
}

/* Prints the kind of the fault; then the signal kills the process as usual. */
static void guard_hit(int number, siginfo_t *info, void *context) {
    (void)context;
    static const char TEXT[] =
        "fake_cuda: device memory touched by the host, or by a kernel of another device\n";
    for (int d = 0; d < MAX_DEVICES; d++)
        if (in_arena(&fake.devices[d].arena, info->si_addr) && write(2, TEXT, sizeof TEXT - 1) < 0)
            break;
    signal(number, SIG_DFL);
}

/* Places the block so that it ends at the end of its last page, as far as its alignment allows. */
static void *arena_alloc(arena *a, size_t bytes) {
    size_t pages = (bytes + PAGE - 1) / PAGE * PAGE;
    if (!a->base) {
        void *p =
            mmap(NULL, ARENA_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return NULL;
        a->base = (char *)p;
        sigaction(SIGSEGV, &(struct sigaction){ .sa_sigaction = guard_hit, .sa_flags = SA_SIGINFO },
            NULL);
    }
    if (pages + PAGE > ARENA_BYTES - a->top) return NULL;
    char *p = a->base + a->top + (pages - bytes) / 256 * 256;
    a->top += pages + PAGE;
    mprotect(a->base, a->top, PROT_READ | PROT_WRITE);
    memset(p, 0xff, bytes);
    if (a->open == 0) mprotect(a->base, a->top, PROT_NONE);
    return p;
}

static void *device_alloc(int d, size_t bytes) {
    void *p = NULL;
    if (fake.guard) return arena_alloc(&fake.devices[d].arena, bytes);
    if (posix_memalign(&p, 256, bytes) != 0) return NULL;
    return memset(p, 0xff, bytes);
}

static void device_release(const block *b) {
    uintptr_t first = (uintptr_t)b->p / PAGE * PAGE;
    if (!in_arena(&fake.devices[b->device].arena, b->p))
        free(b->p);
    else
        madvise((void *)first, (uintptr_t)b->p + b->bytes - first, MADV_DONTNEED);
}

// ==== 4. Queues =================================================================================

/* Loops over the streams that have operations, which are few. */
#define FOR_QUEUED(s) \
    for (size_t at_ = 0; at_ < fake.queued_count; at_++) \
        for (cudaStream_t s = fake.queued[at_], once_ = s; once_; once_ = NULL)

static void queued_add(cudaStream_t s) {
    if (fake.queued_count == fake.queued_room) {
        fake.queued_room = fake.queued_room ? 2 * fake.queued_room : 64;
        fake.queued = (cudaStream_t *)realloc(fake.queued, fake.queued_room * sizeof *fake.queued);
        if (!fake.queued) abort();
    }
    s->place = fake.queued_count;
    fake.queued[fake.queued_count++] = s;
}

static void queued_remove(cudaStream_t s) {
    cudaStream_t last = fake.queued[--fake.queued_count];
    fake.queued[last->place = s->place] = last;
}

static void mark_unref(mark *m) {
    if (m && --m->refs == 0) free(m);
}

static void *zeroed(size_t bytes) {
    void *p = calloc(1, bytes);
    if (!p) abort();
    return p;
}

static op *enqueue(cudaStream_t s, op_kind kind, const char *name) {
    op *o = (op *)zeroed(sizeof *o);
    o->kind = kind;
    o->name = name;
    o->seq = ++fake.sequence;
    if (!s->head) queued_add(s);
    *s->tail = o;
    s->tail = &o->next;
    pthread_cond_broadcast(&fake.changed);
    return o;
}

static op *enqueue_run(
    cudaStream_t s, const char *name, void (*run)(void *), void *arg, void (*drop)(void *)) {
    op *o = enqueue(s, OP_RUN, name);
    o->run = run;
    o->arg = arg;
    o->drop = drop;
    return o;
}

static mark *enqueue_record(cudaStream_t s) {
    mark *m = (mark *)zeroed(sizeof *m);
    m->refs = 2; /* the queue's and the caller's */
    m->stream = s;
    enqueue(s, OP_RECORD, "an event's record")->mark = m;
    return m;
}

static void enqueue_wait(cudaStream_t s, mark *m) {
    if (!m || m->done) return;
    m->refs++;
    enqueue(s, OP_WAIT, "waits for an event")->mark = m;
}

static void op_free(op *o) {
    if (o->drop) o->drop(o->arg);
    mark_unref(o->mark);
    free(o);
}

static void stream_unlink(cudaStream_t s) {
    cudaStream_t *at = &fake.streams;
    while (*at != s) at = &(*at)->next;
    *at = s->next;
    free(s);
}

/* The head is done. */
static void pop(cudaStream_t s) {
    op *o = s->head;
    s->head = o->next;
    if (!s->head) {
        s->tail = &s->head;
        queued_remove(s);
    }
    op_free(o);
    fake.progress++;
    if (!s->head && s->destroyed) stream_unlink(s);
    pthread_cond_broadcast(&fake.changed);
}

// ==== 5. Who runs next ==========================================================================

/* In fake_nccl.h. */
static int part_may_run(const op *o);
typedef struct part part;
static int part_run(part *p);
static void part_describe(char text[2048], const part *p);

/* The legacy default stream waits for all earlier operations in blocking streams of its device, and
   these streams wait for the default stream. */
static int held_by(const cudaStream_t t, const cudaStream_t s) {
    if (t == s || t->device != s->device || !t->head || t->head->seq > s->head->seq) return 0;
    return (s->is_default && t->blocking) || (t->is_default && s->blocking);
}

static int may_run(cudaStream_t s) {
    const op *o = s->head;
    if (!o || s->busy) return 0;
    if (s->is_default || s->blocking) FOR_QUEUED(t) if (held_by(t, s)) return 0;
    if (o->kind == OP_NCCL) return part_may_run(o);
    return o->kind != OP_WAIT || o->mark->done;
}

/* Runs the head of a stream that may run. A kernel runs without the lock, so other threads can
   continue. */
static void run_head(cudaStream_t s) {
    op *o = s->head;
    if (o->kind == OP_RUN && fake.devices[s->device].failed == cudaSuccess) {
        guard_hold(o->touched[0] ? -1 : s->device); /* a copy may be between devices */
        s->busy = 1;
        pthread_mutex_unlock(&fake.lock);
        running_on = s->device;
        o->run(o->arg);
        running_on = -1;
        pthread_mutex_lock(&fake.lock);
        s->busy = 0;
    } else if (o->kind == OP_RECORD) {
        o->mark->done = 1;
        o->mark->when = now();
    } else if (o->kind == OP_NCCL && !part_run((part *)o->arg)) {
        return;
    }
    pop(s);
}

/* The target of a wait: a record, a count that must reach 0, or all operations up to `seq` of a
   stream or of a device's streams. */
typedef struct target {
    mark *mark;
    const int *zero;
    const char *what; /* the count */
    cudaStream_t stream;
    int device;
    uint64_t seq;
} target;

static int is_target(const target *t, const cudaStream_t s) {
    if (t->zero) return 1;
    return t->mark ? s == t->mark->stream : t->stream ? s == t->stream : s->device == t->device;
}

static int reached(const target *t) {
    if (t->mark) return t->mark->done;
    if (t->zero) return *t->zero == 0;
    FOR_QUEUED(s) if (is_target(t, s) && s->head->seq <= t->seq) return 0;
    return 1;
}

static int need(cudaStream_t s) {
    if (s->needed) return 0;
    return s->needed = 1;
}

/* Marks the streams of all ranks, because the wait may depend on any rank. */
static int need_ranks(void) {
    int more = 0;
    FOR_QUEUED(s)
    for (const op *o = s->head; o && !s->needed; o = o->next)
        if (o->kind == OP_NCCL) more = need(s);
    return more;
}

/* Marks the streams whose operations the target needs. */
static void mark_needed(const target *t) {
    FOR_QUEUED(s) s->needed = is_target(t, s);
    for (int more = 1; more;) {
        more = 0;
        FOR_QUEUED(s) {
            if (!s->needed) continue;
            if (s->head->kind == OP_WAIT && !s->head->mark->done)
                more |= need(s->head->mark->stream);
            if (s->head->kind == OP_NCCL) more |= need_ranks();
            FOR_QUEUED(h) if (held_by(h, s)) more |= need(h);
        }
    }
}

static unsigned weight_of(cudaStream_t s) {
    if (!s->weight)
        s->weight = 1u << 2 * (mix(fake.seed ^ (uint64_t)s->number << 8 ^ (uint64_t)s->device) % 4);
    return s->weight;
}

/* Runs one ready operation, if there is one; in the lazy order only an operation that t needs.
   Streams have random weights, so that some run ahead and others starve. */
static int step(const target *t) {
    int lazy = fake.order == FAKE_CUDA_LAZY && t;
    if (lazy) mark_needed(t);
    unsigned sum = 0, at = 0;
    FOR_QUEUED(s)
    if (may_run(s) && (!lazy || s->needed)) sum += weight_of(s);
    if (sum == 0) return 0;
    unsigned turn = draw(sum);
    FOR_QUEUED(s) {
        if (!may_run(s) || (lazy && !s->needed)) continue;
        at += weight_of(s);
        if (turn >= at) continue;
        run_head(s);
        return 1;
    }
    return 0;
}

// ==== 6. Waiting ================================================================================

__attribute__((format(printf, 2, 3))) static void append(char text[2048], const char *format, ...) {
    size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, 2048 - used, format, args);
    va_end(args);
}

static void describe_stream(char text[2048], cudaStream_t s) {
    if (s->is_default)
        append(text, "the default stream of device %d", s->device);
    else
        append(text, "stream %d of device %d", s->number, s->device);
}

/* Reports which streams wait for what. */
static void report_hang(const target *t) {
    char text[2048] = "a wait for ";
    if (t->mark)
        append(text, "an event");
    else if (t->zero)
        append(text, "%s", t->what);
    else if (t->stream)
        describe_stream(text, t->stream);
    else
        append(text, "device %d", t->device);
    append(text, " does not end:");
    FOR_QUEUED(s) {
        append(text, "\n    ");
        describe_stream(text, s);
        append(text, ": ");
        if (s->head->kind == OP_NCCL)
            part_describe(text, (const part *)s->head->arg);
        else
            append(text, "%s", s->head->name);
        if (s->head->kind == OP_WAIT) {
            append(text, " of ");
            describe_stream(text, s->head->mark->stream);
        }
    }
    mistake("%s", text);
}

static int anybody_busy(void) {
    FOR_QUEUED(s) if (s->busy) return 1;
    return 0;
}

static void sleep_until(double time) {
    struct timespec t = { .tv_sec = (time_t)time };
    t.tv_nsec = (long)(1e9 * (time - (double)t.tv_sec));
    pthread_cond_timedwait(&fake.changed, &fake.lock, &t);
}

static cudaError_t wait_for(target t) {
    uint64_t seen = fake.progress;
    double until = now() + fake.wait_limit;
    if (t.mark) t.mark->refs++;
    cudaError_t error = cudaSuccess;
    while (!reached(&t)) {
        if (step(&t)) continue;
        if (fake.progress != seen || anybody_busy()) {
            seen = fake.progress;
            until = now() + fake.wait_limit;
        }
        if (now() >= until) {
            report_hang(&t);
            error = cudaErrorLaunchTimeout;
            break;
        }
        guard_drop();
        sleep_until(until);
    }
    mark_unref(t.mark);
    return error;
}

static cudaError_t wait_stream(cudaStream_t s) {
    return wait_for((target){ .stream = s, .seq = fake.sequence });
}
static cudaError_t wait_device(int d) {
    return wait_for((target){ .device = d, .seq = fake.sequence });
}

/* Queries a target. Each query runs an operation, so that a polling loop ends. */
static cudaError_t query(target t) {
    if (t.mark) t.mark->refs++;
    while (!reached(&t) && draw(8) > 0 && step(&t)) {
    }
    cudaError_t error = reached(&t) ? cudaSuccess : cudaErrorNotReady;
    mark_unref(t.mark);
    return error;
}

// ==== 7. Devices and errors =====================================================================

/* Every call is enter(); work; return leave(error). */
static cudaError_t enter(void) {
    pthread_mutex_lock(&fake.lock);
    if (fake.device_count < 0) return cudaErrorInsufficientDriver;
    if (fake.device_count == 0) return cudaErrorNoDevice;
    while (fake.order == FAKE_CUDA_RANDOM && draw(4) == 0 && step(NULL)) {
    }
    return fake.devices[current_device].failed;
}

static cudaError_t leave(cudaError_t error) {
    while (fake.order == FAKE_CUDA_EAGER && fake.device_count > 0 && step(NULL)) {
    }
    if (error != cudaSuccess) last_error = error;
    guard_drop();
    pthread_mutex_unlock(&fake.lock);
    return error;
}

static int is_device(int d) { return d >= 0 && d < fake.device_count; }

cudaError_t cudaGetDeviceCount(int *count) {
    cudaError_t error = enter();
    /* as CUDA's, silent when there is none */
    if (fake.device_count > 0) *count = fake.device_count;
    return leave(fake.device_count > 0 ? cudaSuccess : error);
}

cudaError_t cudaSetDevice(int d) {
    cudaError_t error = enter();
    if (fake.device_count > 0) error = is_device(d) ? cudaSuccess : cudaErrorInvalidDevice;
    if (!error) error = fake.devices[current_device = d].failed;
    return leave(error);
}

cudaError_t cudaGetDevice(int *d) {
    cudaError_t error = enter();
    if (fake.device_count > 0) *d = current_device;
    return leave(error);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    cudaError_t error = enter();
    if (!error && !is_device(d)) error = cudaErrorInvalidDevice;
    if (!error) {
        memset(p, 0, sizeof *p);
        snprintf(p->name, sizeof p->name, "emulated device");
        p->totalGlobalMem = fake.memory;
        p->sharedMemPerBlock = 48 << 10;
        p->sharedMemPerBlockOptin = 227 << 10;
        p->sharedMemPerMultiprocessor = 228 << 10;
        p->regsPerBlock = 65536;
        p->warpSize = 32;
        p->maxThreadsPerBlock = 1024;
        p->maxThreadsPerMultiProcessor = 2048;
        p->major = 9;
        p->multiProcessorCount = 8;
        p->unifiedAddressing = 1;
        p->pciBusID = d + 1;
    }
    return leave(error);
}

/* Kernels are compiled for this device. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *code, const void *kernel) {
    (void)kernel;
    memset(code, 0, sizeof *code);
    code->ptxVersion = code->binaryVersion = 90;
    code->maxThreadsPerBlock = 1024;
    return leave(enter());
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int d) {
    cudaError_t error = enter();
    if (!error && !is_device(d)) error = cudaErrorInvalidDevice;
    int known = 0;
    switch ((int)attribute) {
    case cudaDevAttrMaxThreadsPerBlock: known = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: known = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: known = 227 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: known = 228 << 10; break;
    case cudaDevAttrWarpSize: known = 32; break;
    case cudaDevAttrMultiProcessorCount: known = 8; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: known = 2048; break;
    case cudaDevAttrComputeCapabilityMajor: known = 9; break;
    case cudaDevAttrComputeCapabilityMinor: break;
    case cudaDevAttrUnifiedAddressing: known = 1; break;
    case cudaDevAttrPciBusId: known = d + 1; break;
    default:
        if (!error) error = cudaErrorInvalidValue;
    }
    if (!error) *value = known;
    return leave(error);
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int d) {
    cudaError_t error = enter();
    if (!error && !is_device(d)) error = cudaErrorInvalidDevice;
    if (!error) snprintf(text, (size_t)bytes, "0000:%02x:00.0", d + 1);
    return leave(error);
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = fake.device_count < 0 ? 0 : CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int d, int peer) {
    cudaError_t error = enter();
    if (!error && !(is_device(d) && is_device(peer))) error = cudaErrorInvalidDevice;
    if (!error) *can = d != peer && !fake.no_peers;
    return leave(error);
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    cudaError_t error = enter();
    if (!error && (flags || !is_device(peer) || peer == current_device))
        error = cudaErrorInvalidDevice;
    if (!error && fake.no_peers) error = cudaErrorPeerAccessUnsupported;
    if (!error && fake.devices[current_device].peer[peer])
        error = cudaErrorPeerAccessAlreadyEnabled;
    if (!error) fake.devices[current_device].peer[peer] = 1;
    return leave(error);
}

cudaError_t cudaGetLastError(void) {
    cudaError_t sticky = enter(), error = sticky ? sticky : last_error;
    last_error = cudaSuccess;
    guard_drop();
    pthread_mutex_unlock(&fake.lock);
    return error;
}

cudaError_t cudaPeekAtLastError(void) {
    cudaError_t sticky = enter(), error = sticky ? sticky : last_error;
    guard_drop();
    pthread_mutex_unlock(&fake.lock);
    return error;
}

static const struct {
    cudaError_t error;
    const char *name, *text;
} error_texts[] = {
    { cudaSuccess, "cudaSuccess", "no error" },
    { cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument" },
    { cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory" },
    { cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
        "invalid configuration argument" },
    { cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
        "CUDA driver version is insufficient for CUDA runtime version" },
    { cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal" },
    { cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected" },
    { cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle" },
    { cudaErrorNotReady, "cudaErrorNotReady", "device not ready" },
    { cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
        "an illegal memory access was encountered" },
    { cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated" },
    { cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure" },
    { cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled",
        "peer access is already enabled" },
    { cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
        "part or all of the requested memory range is already mapped" },
    { cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
        "pointer does not correspond to a registered memory region" },
};

const char *cudaGetErrorName(cudaError_t error) {
    for (size_t i = 0; i < sizeof error_texts / sizeof *error_texts; i++)
        if (error_texts[i].error == error) return error_texts[i].name;
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error) {
    for (size_t i = 0; i < sizeof error_texts / sizeof *error_texts; i++)
        if (error_texts[i].error == error) return error_texts[i].text;
    return "unrecognized error code";
}

// ==== 8. Memory =================================================================================

cudaError_t cudaMalloc(void **p, size_t bytes) {
    cudaError_t error = enter();
    if (!error && !p) error = cudaErrorInvalidValue;
    if (error) return leave(error);
    *p = NULL;
    if (bytes == 0) return leave(cudaSuccess);
    device *d = &fake.devices[current_device];
    if (bytes <= fake.memory - d->used) *p = device_alloc(current_device, bytes);
    if (!*p) return leave(cudaErrorMemoryAllocation);
    d->used += bytes;
    block_add(*p, bytes, current_device, BLOCK_DEVICE);
    return leave(cudaSuccess);
}

/* Reports queued operations that CUDA does not wait for before it frees the memory: operations of
   other devices, or with host memory. */
static void check_untouched(const block *b, const char *call) {
    FOR_QUEUED(s)
    for (const op *o = s->head; o; o = o->next)
        for (int i = 0; i < 2; i++)
            if (o->touched[i] && o->touched[i] < b->p + b->bytes &&
                b->p < o->touched[i] + o->touched_bytes[i])
                mistake("%s of memory that a queued operation of device %d will touch (%s)", call,
                    s->device, o->name);
}

/* The block that starts at p, of one kind; error if there is none. */
static block *owned(const void *p, block_kind kind, const char *call) {
    block *b = block_of(p);
    if (b && b->p == p && b->kind == kind) return b;
    mistake("%s(%p): %s", call, (void *)p,
        b ? "not what its allocation returned" : "no such allocation");
    return NULL;
}

cudaError_t cudaFree(void *p) {
    cudaError_t error = enter();
    if (error || !p) return leave(error);
    const block *b = owned(p, BLOCK_DEVICE, "cudaFree");
    if (!b) return leave(cudaErrorInvalidValue);
    int d = b->device;
    error = wait_device(d);
    b = owned(p, BLOCK_DEVICE, "cudaFree"); /* the table may have moved meanwhile */
    if (error || !b) return leave(error ? error : cudaErrorInvalidValue);
    check_untouched(b, "cudaFree");
    fake.devices[d].used -= b->bytes;
    device_release(b);
    block_remove(b);
    return leave(fake.devices[d].failed);
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags) {
    (void)flags;
    cudaError_t error = enter();
    if (error) return leave(error);
    *p = NULL;
    if (bytes == 0) return leave(cudaSuccess);
    if (posix_memalign(p, 256, bytes) != 0) return leave(cudaErrorMemoryAllocation);
    memset(*p, 0xff, bytes);
    block_add(*p, bytes, current_device, BLOCK_PINNED);
    return leave(cudaSuccess);
}

cudaError_t cudaMallocHost(void **p, size_t bytes) {
    return cudaHostAlloc(p, bytes, cudaHostAllocDefault);
}

/* CUDA may wait for the device here but does not promise to, so a correct program relies on
   neither. */
cudaError_t cudaFreeHost(void *p) {
    cudaError_t error = enter();
    if (error || !p) return leave(error);
    const block *b = owned(p, BLOCK_PINNED, "cudaFreeHost");
    if (!b) return leave(cudaErrorInvalidValue);
    check_untouched(b, "cudaFreeHost");
    error = wait_device(current_device);
    b = owned(p, BLOCK_PINNED, "cudaFreeHost"); /* the table may have moved meanwhile */
    if (error || !b) return leave(error ? error : cudaErrorInvalidValue);
    block_remove(b);
    free(p);
    return leave(cudaSuccess);
}

cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags) {
    (void)flags;
    cudaError_t error = enter();
    if (!error && (!p || bytes == 0)) error = cudaErrorInvalidValue;
    size_t i = block_after(p);
    if (!error && i < fake.block_count && fake.blocks[i].p < (char *)p + bytes)
        error = cudaErrorHostMemoryAlreadyRegistered;
    if (!error) block_add(p, bytes, current_device, BLOCK_REGISTERED);
    return leave(error);
}

cudaError_t cudaHostUnregister(void *p) {
    cudaError_t error = enter();
    if (error) return leave(error);
    const block *b = owned(p, BLOCK_REGISTERED, "cudaHostUnregister");
    if (!b) return leave(cudaErrorHostMemoryNotRegistered);
    check_untouched(b, "cudaHostUnregister");
    block_remove(b);
    return leave(cudaSuccess);
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    cudaError_t error = enter();
    if (error) return leave(error);
    *available = fake.memory - fake.devices[current_device].used;
    *total = fake.memory;
    return leave(cudaSuccess);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    cudaError_t error = enter();
    const block *b = block_of(p);
    if (error) return leave(error);
    memset(a, 0, sizeof *a);
    a->type = !b                        ? cudaMemoryTypeUnregistered
              : b->kind == BLOCK_DEVICE ? cudaMemoryTypeDevice
                                        : cudaMemoryTypeHost;
    a->device = b ? b->device : -2;
    a->devicePointer = b ? (void *)p : NULL;
    a->hostPointer = b && b->kind != BLOCK_DEVICE ? (void *)p : NULL;
    return leave(cudaSuccess);
}

// ==== 9. Copies =================================================================================

/* The stream of a handle: 0 and cudaStreamLegacy mean the current device's default stream. Returns
   NULL if there is no such stream. */
static cudaStream_t stream_of(cudaStream_t handle) {
    if (handle == NULL || handle == cudaStreamLegacy) {
        if (!fake.no_default_stream) return &fake.devices[current_device].default_stream;
        mistake("the default stream is used");
        return NULL;
    }
    for (cudaStream_t s = fake.streams; s; s = s->next)
        if (s == handle && !s->destroyed) return s;
    mistake("%p is not a stream", (void *)handle);
    return NULL;
}

/* enter() for a call on a stream. */
static cudaError_t enter_stream(cudaStream_t handle, cudaStream_t *s) {
    cudaError_t error = enter();
    *s = error ? NULL : stream_of(handle);
    return error ? error : *s ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

typedef struct copy {
    char *to;
    const char *from;
    size_t to_pitch, from_pitch, width, rows;
    char *snapshot; /* pageable memory was read at the call */
} copy;

static void copy_rows(const copy *c) {
    for (size_t i = 0; i < c->rows; i++)
        memmove(c->to + i * c->to_pitch, c->from + i * c->from_pitch, c->width);
}
static void copy_run(void *arg) { copy_rows((const copy *)arg); }
static void copy_drop(void *arg) {
    free(((copy *)arg)->snapshot);
    free(arg);
}

static size_t extent(size_t pitch, size_t width, size_t rows) { return (rows - 1) * pitch + width; }

/* 1 if the memory may be on this side of a copy of this kind. */
static int fits_kind(const block *b, const void *p, size_t bytes, int wants_device, int any) {
    int on_device = b && b->kind == BLOCK_DEVICE;
    if (b && (const char *)p + bytes > b->p + b->bytes) {
        mistake(
            "a copy of %zu bytes at %p leaves its allocation of %zu", bytes, (void *)p, b->bytes);
        return 0;
    }
    if (any || on_device == wants_device) return 1;
    mistake("a copy's kind says %s memory, %p is not", wants_device ? "device" : "host", (void *)p);
    return 0;
}

static cudaError_t copy_checked(const copy *c, enum cudaMemcpyKind kind) {
    int any = kind == cudaMemcpyDefault;
    int to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    int from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if ((unsigned)kind > cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
    if (c->width > c->to_pitch || c->width > c->from_pitch) return cudaErrorInvalidPitchValue;
    if (!fits_kind(
            block_of(c->to), c->to, extent(c->to_pitch, c->width, c->rows), to_device, any) ||
        !fits_kind(
            block_of(c->from), c->from, extent(c->from_pitch, c->width, c->rows), from_device, any))
        return cudaErrorInvalidValue;
    return cudaSuccess;
}

/* Pageable memory is read at the call; a copy to pageable memory is done when the call returns. */
static cudaError_t copy_enqueue(copy c, enum cudaMemcpyKind kind, cudaStream_t handle, int wait) {
    cudaStream_t s = stream_of(handle);
    if (!s) return cudaErrorInvalidResourceHandle;
    if (c.width == 0 || c.rows == 0) return cudaSuccess;
    cudaError_t error = copy_checked(&c, kind);
    if (error) return error;
    const block *to = block_of(c.to), *from = block_of(c.from);
    if (!from) {
        c.snapshot = (char *)malloc(c.width * c.rows);
        if (!c.snapshot) abort();
        copy_rows(&(copy){ .to = c.snapshot,
            .from = c.from,
            .to_pitch = c.width,
            .from_pitch = c.from_pitch,
            .width = c.width,
            .rows = c.rows });
        c.from = c.snapshot;
        c.from_pitch = c.width;
    }
    copy *kept = (copy *)malloc(sizeof c);
    if (!kept) abort();
    *kept = c;
    op *o = enqueue_run(s, "a copy", copy_run, kept, copy_drop);
    o->touched[0] = c.to, o->touched_bytes[0] = extent(c.to_pitch, c.width, c.rows);
    if (from) o->touched[1] = c.from, o->touched_bytes[1] = extent(c.from_pitch, c.width, c.rows);
    if (to && !wait) return cudaSuccess;
    int d = s->device;
    error = wait_stream(s);
    return error ? error : fake.devices[d].failed;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
    size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    cudaError_t error = enter();
    copy c = { .to = (char *)to,
        .from = (const char *)from,
        .to_pitch = to_pitch,
        .from_pitch = from_pitch,
        .width = width,
        .rows = height };
    return leave(error ? error : copy_enqueue(c, kind, stream, 0));
}

cudaError_t cudaMemcpyAsync(
    void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}

cudaError_t cudaMemcpyPeerAsync(
    void *to, int to_device, const void *from, int from_device, size_t bytes, cudaStream_t stream) {
    if (!is_device(to_device) || !is_device(from_device)) return cudaErrorInvalidDevice;
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    cudaError_t error = enter();
    copy c = { .to = (char *)to,
        .from = (const char *)from,
        .to_pitch = bytes,
        .from_pitch = bytes,
        .width = bytes,
        .rows = 1 };
    return leave(error ? error : copy_enqueue(c, kind, NULL, 1));
}

typedef struct filling {
    void *p;
    int value;
    size_t bytes;
} filling;
static void fill_run(void *arg) {
    const filling *f = (const filling *)arg;
    memset(f->p, f->value, f->bytes);
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream) {
    cudaStream_t s;
    cudaError_t error = enter_stream(stream, &s);
    if (error || bytes == 0) return leave(error);
    const block *b = block_of(p);
    if (!b || !fits_kind(b, p, bytes, 1, 1)) return leave(cudaErrorInvalidValue);
    filling *f = (filling *)malloc(sizeof *f);
    if (!f) abort();
    *f = (filling){ p, value, bytes };
    op *o = enqueue_run(s, "a memset", fill_run, f, free);
    o->touched[0] = (char *)p;
    o->touched_bytes[0] = bytes;
    return leave(cudaSuccess);
}

cudaError_t cudaMemset(void *p, int value, size_t bytes) {
    return cudaMemsetAsync(p, value, bytes, NULL);
}

// ==== 10. Streams and events ====================================================================

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)priority;
    cudaError_t error = enter();
    if (!error && flags > cudaStreamNonBlocking) error = cudaErrorInvalidValue;
    if (error) return leave(error);
    cudaStream_t s = (cudaStream_t)zeroed(sizeof *s);
    s->device = current_device;
    s->number = ++fake.streams_made;
    s->blocking = flags != cudaStreamNonBlocking;
    s->tail = &s->head;
    s->next = fake.streams;
    fake.streams = s;
    *stream = s;
    return leave(cudaSuccess);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    cudaError_t error = enter();
    *least = 0;
    *greatest = -5;
    return leave(error);
}

/* Pending operations still run, as in CUDA. */
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    cudaError_t error = enter();
    cudaStream_t s = stream_of(stream);
    if (!s || s->is_default) return leave(cudaErrorInvalidResourceHandle);
    s->destroyed = 1;
    if (!s->head) stream_unlink(s);
    return leave(error);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    cudaStream_t s;
    cudaError_t error = enter_stream(stream, &s);
    if (error) return leave(error);
    int d = s->device;
    error = wait_stream(s);
    return leave(error ? error : fake.devices[d].failed);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    cudaStream_t s;
    cudaError_t error = enter_stream(stream, &s);
    if (error) return leave(error);
    int d = s->device;
    error = query((target){ .stream = s, .seq = fake.sequence });
    return leave(fake.devices[d].failed ? fake.devices[d].failed : error);
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *d) {
    cudaStream_t s;
    cudaError_t error = enter_stream(stream, &s);
    if (!error) *d = s->device;
    return leave(error);
}

cudaError_t cudaDeviceSynchronize(void) {
    cudaError_t error = enter();
    if (!error) error = wait_device(current_device);
    return leave(error ? error : fake.devices[current_device].failed);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    cudaError_t error = enter();
    if (!error && (!event || flags > 7)) error = cudaErrorInvalidValue;
    if (error) return leave(error);
    cudaEvent_t e = (cudaEvent_t)zeroed(sizeof *e);
    e->device = current_device;
    e->flags = flags;
    e->next = fake.events;
    fake.events = e;
    *event = e;
    return leave(cudaSuccess);
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

/* The event's link in the list; NULL: no such event. */
static cudaEvent_t *event_at(cudaEvent_t event) {
    for (cudaEvent_t *at = &fake.events; *at; at = &(*at)->next)
        if (*at == event) return at;
    mistake("%p is not an event", (void *)event);
    return NULL;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    cudaError_t error = enter();
    cudaEvent_t *at = event_at(event);
    if (!at) return leave(cudaErrorInvalidResourceHandle);
    *at = event->next;
    mark_unref(event->latest);
    free(event);
    return leave(error);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    cudaStream_t s;
    cudaError_t error = enter_stream(stream, &s);
    if (!error && !event_at(event)) error = cudaErrorInvalidResourceHandle;
    if (!error && event->device != s->device) {
        mistake(
            "an event of device %d is recorded on a stream of device %d", event->device, s->device);
        error = cudaErrorInvalidResourceHandle;
    }
    if (error) return leave(error);
    mark_unref(event->latest);
    event->latest = enqueue_record(s);
    return leave(cudaSuccess);
}

/* Waits for the event's latest record at this time; an event that was never recorded does not
   wait. */
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)flags;
    cudaStream_t s;
    cudaError_t error = enter_stream(stream, &s);
    if (!error && !event_at(event)) error = cudaErrorInvalidResourceHandle;
    if (!error) enqueue_wait(s, event->latest);
    return leave(error);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    cudaError_t error = enter();
    if (!error && !event_at(event)) error = cudaErrorInvalidResourceHandle;
    if (error) return leave(error);
    int d = event->device;
    if (event->latest) error = query((target){ .mark = event->latest });
    return leave(fake.devices[d].failed ? fake.devices[d].failed : error);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    cudaError_t error = enter();
    if (!error && !event_at(event)) error = cudaErrorInvalidResourceHandle;
    if (error) return leave(error);
    int d = event->device;
    if (event->latest) error = wait_for((target){ .mark = event->latest });
    return leave(error ? error : fake.devices[d].failed);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    cudaError_t error = enter();
    if (!error && (!event_at(from) || !event_at(to) || !from->latest || !to->latest ||
                      (from->flags | to->flags) & cudaEventDisableTiming))
        error = cudaErrorInvalidResourceHandle;
    if (!error && !(from->latest->done && to->latest->done)) error = cudaErrorNotReady;
    if (!error) *ms = (float)(1e3 * (to->latest->when - from->latest->when));
    return leave(error);
}

// ==== 11. Kernels ===============================================================================

/* The simulator checks shared-memory limits. */
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) {
    (void)kernel;
    (void)attribute;
    (void)value;
    return leave(enter());
}

void fake_cuda_launch(cudaStream_t stream, void (*run)(void *), void *arg, void (*drop)(void *)) {
    cudaStream_t s;
    cudaError_t error = enter_stream(stream, &s);
    if (!error && s->device != current_device) {
        mistake("a kernel is launched on a stream of device %d while device %d is the current one",
            s->device, current_device);
        error = cudaErrorInvalidResourceHandle;
    }
    if (!error)
        enqueue_run(s, "a kernel", run, arg, drop);
    else if (drop)
        drop(arg);
    leave(error);
}

/* 1 if an address is mapped in this process; a number in a kernel's arguments may look like an
   address. */
static int is_mapped(uintptr_t at) {
    unsigned char resident;
    return at >= PAGE && at < (uintptr_t)1 << 47 &&
           mincore((void *)(at / PAGE * PAGE), 1, &resident) == 0;
}

void fake_cuda_check_argument(const char *kernel, const void *argument, size_t bytes) {
    const char *at = (const char *)(((uintptr_t)argument + 7) / 8 * 8),
               *end = (const char *)argument + bytes;
    if (bytes > 1024) return; /* a large table, which may be partly uninitialised */
    pthread_mutex_lock(&fake.lock);
    for (; at + sizeof(uintptr_t) <= end; at += sizeof(uintptr_t)) {
        const void *p = *(void *const *)(const void *)at;
        /* a small number and padding */
        if ((uint32_t)(uintptr_t)p < PAGE || (uintptr_t)p >> 47) continue;
        const block *b = block_of(p);
        int there = b && b->kind == BLOCK_DEVICE && b->device != current_device;
        if (there && !fake.devices[current_device].peer[b->device])
            mistake(
                "%s on device %d is given memory of device %d", kernel, current_device, b->device);
        if (!b && is_mapped((uintptr_t)p))
            mistake("%s is given %p, which is the host's memory", kernel, (void *)p);
    }
    pthread_mutex_unlock(&fake.lock);
}

void fake_cuda_launch_failed(cudaError_t error, const char *text) {
    pthread_mutex_lock(&fake.lock);
    mistake("%s", text);
    if (running_on < 0)
        last_error = error;
    else if (!fake.devices[running_on].failed)
        fake.devices[running_on].failed = error;
    pthread_mutex_unlock(&fake.lock);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t run, void *arg) {
    cudaStream_t s;
    cudaError_t error = enter_stream(stream, &s);
    if (!error) enqueue_run(s, "a host function", run, arg, NULL);
    return leave(error);
}

// ==== 12. The fake itself =======================================================================

#define SETTER(name, type, statement) \
    void name(type value) { \
        pthread_mutex_lock(&fake.lock); \
        statement; \
        pthread_mutex_unlock(&fake.lock); \
    }
SETTER(fake_cuda_devices, int, fake.device_count = value < MAX_DEVICES ? value : MAX_DEVICES)
SETTER(fake_cuda_memory, size_t, fake.memory = value ? value : (size_t)8 << 30)
SETTER(fake_cuda_seed, unsigned long long, fake.seed = mix(value); fake.draws = 0)
SETTER(fake_cuda_order, int, fake.order = value)
SETTER(fake_cuda_no_peers, int, fake.no_peers = value)
SETTER(fake_cuda_forbid_default_stream, int, fake.no_default_stream = value)
SETTER(fake_cuda_guard, int, fake.guard = value)
SETTER(fake_cuda_wait_limit, double, fake.wait_limit = value)

#include "tests/cuda/fake_cublaslt.h"
#include "tests/cuda/fake_nccl.h"

int fake_cuda_leaks(int print) {
    pthread_mutex_lock(&fake.lock);
    int n = (int)fake.block_count;
    for (size_t i = 0; print && i < fake.block_count; i++)
        fprintf(stderr, "fake_cuda: %zu bytes of %s memory, device %d\n", fake.blocks[i].bytes,
            fake.blocks[i].kind == BLOCK_DEVICE ? "device" : "pinned", fake.blocks[i].device);
    for (cudaStream_t s = fake.streams; s; s = s->next) {
        n += !s->destroyed;
        if (print && !s->destroyed)
            fprintf(stderr, "fake_cuda: stream %d of device %d\n", s->number, s->device);
    }
    for (cudaEvent_t e = fake.events; e; e = e->next) {
        n++;
        if (print) fprintf(stderr, "fake_cuda: an event of device %d\n", e->device);
    }
    n += blas.handles + comm_leaks(print);
    if (print && blas.handles) fprintf(stderr, "fake_cuda: %d cuBLASLt handles\n", blas.handles);
    pthread_mutex_unlock(&fake.lock);
    return n;
}

static void forget_queue(cudaStream_t s) {
    for (op *o = s->head, *next; o; o = next) {
        next = o->next;
        op_free(o);
    }
}

void fake_cuda_reset(void) {
    pthread_mutex_lock(&fake.lock);
    for (int d = 0; d < MAX_DEVICES; d++) forget_queue(&fake.devices[d].default_stream);
    for (cudaStream_t s = fake.streams, next; s; s = next) {
        next = s->next;
        forget_queue(s);
        free(s);
    }
    for (cudaEvent_t e = fake.events, next; e; e = next) {
        next = e->next;
        mark_unref(e->latest);
        free(e);
    }
    for (size_t i = 0; i < fake.block_count; i++)
        if (fake.blocks[i].kind != BLOCK_REGISTERED) device_release(&fake.blocks[i]);
    for (int d = 0; d < MAX_DEVICES; d++)
        if (fake.devices[d].arena.base) munmap(fake.devices[d].arena.base, ARENA_BYTES);
    free(fake.blocks);
    fake.blocks = NULL;
    fake.block_count = fake.block_room = 0;
    fake.streams = NULL;
    fake.queued_count = 0;
    fake.streams_made = 0;
    fake.events = NULL;
    fake.error[0] = 0;
    fake.error_unread = 0;
    nccl_reset();
    blas.none = blas.handles = 0;
    blas.refusal = NULL;
    defaults();
    current_device = 0;
    last_error = cudaSuccess;
    pthread_mutex_unlock(&fake.lock);
}

#endif
