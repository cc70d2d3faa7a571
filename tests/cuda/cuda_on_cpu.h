/* cuda_on_cpu.h - runs CUDA C kernels on the CPU, for tests

   A test includes this header, then the unmodified .cu file, and is compiled with g++ or clang++ as
   C++17 (or: g++ -std=c++17 -x c++ -include cuda_on_cpu.h -c some.cu). Every kernel launch then
   runs synchronously: blocks one after another, the threads of a block as fibers that switch at
   barriers and warp operations. No GPU and no CUDA toolkit are needed; if the toolkit's headers are
   on the include path, its types are used. Under nvcc the header is empty.

   WHAT A .cu FILE MUST DO. It uses two macros where CUDA has syntax that C++ lacks, and defines
   them for nvcc; this header defines them for the CPU:

    #ifdef __CUDACC__
    #define DT_LAUNCH(kernel, grid, block, smem, stream, ...) \
        kernel<<<grid, block, smem, stream>>>(__VA_ARGS__)
    #define DT_DYN_SMEM(T, name) \
        extern __shared__ __align__(16) unsigned char dt_dyn_smem[]; \
        T *name = reinterpret_cast<T *>(dt_dyn_smem)
    #endif

   Kernels take at least one argument and are written `__global__ void`, without static; device
   functions are `static __device__`, also templates (of inline functions GCC and the assembler
   refuse shared variables). A template kernel with a comma goes in parentheses:
   DT_LAUNCH((scale<float, 4>), ...). After launches the file asks cudaGetLastError(), as under
   nvcc. Of the CUDA runtime there are the few calls of section 9: memory, copies, waiting, device
   count. Inline PTX needs its own #ifdef, and #pragma unroll the option -Wno-unknown-pragmas.
   Toolkit headers, if any, come before this one. For tensor cores, ldmatrix and cp.async the branch
   without PTX calls the functions of section 11.

   WHAT IT FINDS. A mistake abandons the launch, never the program; cudaGetLastError() and
   dtc_error() then report it, and later launches do nothing until dtc_clear_error(): -
   __syncthreads that not all threads of the block reach, or reach at different places, two on
    one line included; threads that have exited count as missing (stricter than the hardware);
   - a warp operation whose mask names lanes that have exited, do not exist or wait elsewhere; a
    shuffle that reads a lane outside its mask;
   - any other deadlock, and endless waiting with atomics, for example for another block;
   - ldmatrix and cp.async at an address that is not aligned or not in shared memory; a thread that
    exits before a cp.async of its own has landed;
   - a launch beyond the limits: threads, grid, dynamic shared memory without the opt-in.
   What it makes visible to the test's own checks:
   - shared memory read before it is written: it is filled with 0xFF bytes before every block,
    which is NaN as a float;
   - a missing barrier: run the kernel in several lane orders (dtc_set_order: forward, reverse,
    permuted by a seed; warps and blocks follow the same order) and compare bits. One order alone
    can hide it. cuda_races.cc beside this file reports races, but is slower;
   - device memory read before it is written: cudaMalloc gives 0xFF bytes too;
   - what cp.async brings, read before the wait for its group: until then it is 0xFF bytes;
   - reads and writes out of bounds: compile with -fsanitize=address,undefined. With clang only
    the latter sees static __shared__ arrays.

   LATE LAUNCHES. With -DDTC_QUEUED fake_cuda.c, which replaces the CUDA runtime, queues a launch in
   its stream and runs it later; this needs the toolkit's headers. A launch's mistake makes its
   device fail, as in CUDA, and fake_cuda_error() reports it.

   By hand: DTC_ORDER=forward, reverse or permuted:SEED in the environment, where the program sets
   no order itself; a debugger stops at a mistake with `break dtc_fail`: in the thread that made it,
   or in the scheduler when no thread can continue.

   WHAT IT DOES NOT DO. No cooperative groups, textures, constant-memory copies or inline PTX;
   waiting in a loop without atomics hangs. A helper called from two branches is one place: lanes
   that meet in it from both branches count as converged, except under cuda_races.cc, which knows
   the calls. ELF systems only. ASan is told of the stacks, TSan is not. Launches from several host
   threads take turns. */

#ifndef CUDA_ON_CPU_H
#define CUDA_ON_CPU_H
#ifndef __CUDACC__

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <functional>
#include <mutex>
#include <numeric>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// ==== 1. Types: the toolkit's, or our own =======================================================

#if defined(__has_include) && __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#include <vector_functions.h>
#elif defined(DTC_QUEUED)
#error "DTC_QUEUED needs the toolkit's headers: -isystem /usr/local/cuda/include"
#else

struct int2 {
    int x, y;
};
struct int4 {
    int x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct uint3 {
    unsigned x, y, z;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct float3 {
    float x, y, z;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorPeerAccessUnsupported = 217,
    cudaErrorNotReady = 600,
    cudaErrorPeerAccessAlreadyEnabled = 704,
    cudaErrorLaunchFailure = 719
};
enum cudaDeviceAttr {
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76
};
struct cudaFuncAttributes {
    int ptxVersion, maxThreadsPerBlock;
};
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };
enum cudaMemoryType { cudaMemoryTypeUnregistered = 0, cudaMemoryTypeDevice = 2 };
struct cudaPointerAttributes {
    cudaMemoryType type;
};
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

#define __align__(n) __attribute__((aligned(n)))

#endif

// Always inline, or cuda_races.cc would not see `shared[i] = make_float4(...)`.
#define DTC_MAKE(V, parameters, ...) \
    __attribute__((always_inline)) inline V dtc_make_##V parameters { return { __VA_ARGS__ }; }
DTC_MAKE(int2, (int x, int y), x, y)
DTC_MAKE(int4, (int x, int y, int z, int w), x, y, z, w)
DTC_MAKE(uint2, (unsigned x, unsigned y), x, y)
DTC_MAKE(uint4, (unsigned x, unsigned y, unsigned z, unsigned w), x, y, z, w)
DTC_MAKE(float2, (float x, float y), x, y)
DTC_MAKE(float3, (float x, float y, float z), x, y, z)
DTC_MAKE(float4, (float x, float y, float z, float w), x, y, z, w)
#define make_int2 dtc_make_int2
#define make_int4 dtc_make_int4
#define make_uint2 dtc_make_uint2
#define make_uint4 dtc_make_uint4
#define make_float2 dtc_make_float2
#define make_float3 dtc_make_float3
#define make_float4 dtc_make_float4

// ==== 2. CUDA's keywords ========================================================================

#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__

#define __global__ static
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

// All shared variables of a source file are in one section, so that they can be poisoned together.
// GCC drops `section` for variables in templates, but not `noinit`, which is a section, too. `used`
// keeps the compiler from assuming that a variable without writes is zero.
#ifdef __clang__
#define __shared__ static __attribute__((used, section("dt_smem")))
#define DTC_SECTION(part) ".pushsection dt_smem," part "\"aw\",%progbits\n"
#else
#define __shared__ static __attribute__((used, noinit))
#define DTC_SECTION(part) ".pushsection .noinit," part "\"aw\",%nobits\n"
#endif

// Marks of the section's bounds in this file: the assembler puts part 8191 after the variables.
asm(DTC_SECTION("") ".balign 64\n dtc_shared_first:\n .popsection\n" DTC_SECTION(
    "8191,") ".balign 64\n dtc_shared_end:\n .popsection\n");
extern "C" __attribute__((visibility("hidden"))) char dtc_shared_first[], dtc_shared_end[];
struct dtc_range {
    char *first, *end;
};

#define DT_DYN_SMEM(T, name) T *name = reinterpret_cast<T *>(dtc.dynamic)

// For the simulator's own access to the kernel's memory, which the compiler must not report.
#define DTC_UNSEEN __attribute__((no_sanitize("thread")))

// The lambda lets a template kernel find its types in the arguments, as `kernel<<<>>>` does.
#define DT_LAUNCH(kernel, grid, block, smem, stream, ...) \
    dtc_launch( \
        grid, block, smem, stream, #kernel, \
        [=](const auto &...args) DTC_UNSEEN { \
            dtc.observer->thread_starts(); \
            kernel(args...); \
        }, \
        __VA_ARGS__)

#define threadIdx dtc.thread_index
#define blockIdx dtc.block_index
#define blockDim dtc.block_size
#define gridDim dtc.grid_size
#define warpSize 32

// ==== 3. Switching stacks =======================================================================

// dtc_context is a stack that is not running; dtc_switch(from, to) leaves one and enters another.
// By hand, because swapcontext makes a system call each time and a block switches thousands of
// times. -DDTC_UCONTEXT takes swapcontext, as do other processors.

#if defined(__x86_64__) && !defined(DTC_UCONTEXT)

struct dtc_context {
    void *sp;
};
extern "C" void dtc_switch(dtc_context *from, const dtc_context *to);

// Only what a called function must preserve has to be saved: the caller saved the rest.
asm(R"(
    .pushsection .text
    .weak dtc_switch
    .type dtc_switch, %function
dtc_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size dtc_switch, . - dtc_switch
    .popsection
)");

// Lays out what the first switch will pop: six registers, then where to return to, which is the
// start of `entry`, then entry's own return address, which is never used. A function expects the
// stack 8 bytes off a multiple of 16 when it starts.
inline void dtc_context_make(dtc_context *context, char *stack, size_t size, void (*entry)()) {
    void **frame = reinterpret_cast<void **>(stack + size) - 8;
    memset(frame, 0, 8 * sizeof *frame);
    frame[6] = reinterpret_cast<void *>(entry);
    context->sp = frame;
}

#elif defined(__aarch64__) && !defined(DTC_UCONTEXT)

struct dtc_context {
    void *sp;
};
extern "C" void dtc_switch(dtc_context *from, const dtc_context *to);

asm(R"(
    .pushsection .text
    .weak dtc_switch
    .type dtc_switch, %function
dtc_switch:
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    ldr x9, [x1]
    mov sp, x9
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size dtc_switch, . - dtc_switch
    .popsection
)");

// x30, the twelfth of the twenty saved registers, is where `ret` goes.
inline void dtc_context_make(dtc_context *context, char *stack, size_t size, void (*entry)()) {
    void **frame = reinterpret_cast<void **>(stack + size) - 20;
    memset(frame, 0, 20 * sizeof *frame);
    frame[11] = reinterpret_cast<void *>(entry);
    context->sp = frame;
}

#else

#include <ucontext.h>

typedef ucontext_t dtc_context;

inline void dtc_switch(dtc_context *from, const dtc_context *to) { swapcontext(from, to); }

inline void dtc_context_make(dtc_context *context, char *stack, size_t size, void (*entry)()) {
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = size;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
}

#endif

// ASan keeps the bounds of the running stack and must be told of every switch: call dtc_asan_leave
// right before it, and dtc_asan_arrive right after it, on the other stack.
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DTC_ASAN
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) && !defined(DTC_ASAN)
#define DTC_ASAN
#endif

#ifdef DTC_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>

inline void dtc_asan_leave(void **fake_stack, const void *to_stack, size_t to_size) {
    __sanitizer_start_switch_fiber(fake_stack, to_stack, to_size);
}
inline void dtc_asan_arrive(void *fake_stack, const void **from_stack, size_t *from_size) {
    __sanitizer_finish_switch_fiber(fake_stack, from_stack, from_size);
}
inline void dtc_asan_forget(char *stack, size_t size) { ASAN_UNPOISON_MEMORY_REGION(stack, size); }
#else
inline void dtc_asan_leave(void **, const void *, size_t) {}
inline void dtc_asan_arrive(void *, const void **, size_t *) {}
inline void dtc_asan_forget(char *, size_t) {}
#endif

// ==== 4. State ==================================================================================

enum dtc_order { DTC_FORWARD, DTC_REVERSE, DTC_PERMUTED };
enum dtc_state { DTC_READY, DTC_AT_BARRIER, DTC_AT_WARP_OP, DTC_EXITED };

enum {
    DTC_WARP = 32,
    DTC_MAX_THREADS = 1024,
    DTC_STACK_BYTES = 256 << 10,      // only the touched pages become memory
    DTC_GUARD_BYTES = 64 << 10,       // below it; more than a page, for frames with large arrays
    DTC_SMEM_DEFAULT = 48 << 10,      // dynamic shared memory that needs no opt-in
    DTC_SMEM_MAX = 227 << 10,         // and with it, on sm_90
    DTC_COPIES = 256,                 // pending cp.async of one thread
    DTC_SPIN_LIMIT = 10 * 1000 * 1000 // atomics of one thread between two waits
};

// A place in the source where threads wait. The id distinguishes places on one line.
struct dtc_site {
    const char *op, *file;
    int line, id;
};
#define DTC_SITE(op) \
    dtc_site { op, __FILE__, __LINE__, __COUNTER__ }

// The value that a lane contributes to a warp operation.
struct dtc_parcel {
    alignas(8) unsigned char bytes[48];
};

// A pending copy of 16 bytes into shared memory, and the number of its group.
struct dtc_copy {
    void *to;
    unsigned char bytes[16];
    unsigned group;
};

struct dtc_fiber {
    dtc_context context;
    char *stack;      // DTC_STACK_BYTES, below it the guard; kept for later launches
    bool started;     // the context is inside dtc_fiber_main
    void *fake_stack; // ASan's
    uint3 index;      // threadIdx
    int lane, warp;
    dtc_state state;
    dtc_site site;               // where it waits,
    uint64_t path;               // called from where,
    unsigned mask;               // for which lanes (warp operations),
    uint64_t value;              // and what it brings along: to a barrier,
    const void *brings;          // to a warp operation, on its own stack,
    size_t bytes;                // which is at most a parcel
    dtc_copy copies[DTC_COPIES]; // cp.async: those not yet waited for,
    int copying;                 // how many,
    unsigned groups;             // and how often it has committed
};

// Observes the events of a launch; tests/cuda/cuda_races.cc implements one that finds races.
struct dtc_observer {
    virtual void launch_starts() {}
    virtual void launch_ends() {}
    virtual void block_starts() {}
    virtual void thread_starts() {}
    virtual void barrier_opens() {}
    virtual void warp_synced(int, unsigned) {} // warp, mask: after __syncwarp
    virtual void fenced() {}                   // __threadfence
    virtual void read(const void *, size_t) {} // by a function of this header, for the kernel
    virtual void written(const void *, size_t) {}
    virtual void changed(const void *, size_t) {} // atomically
    virtual uint64_t path() { return 0; }         // the calls that the running thread is in,
    virtual std::string calls(int) { return ""; } // and of any thread in words
};
inline dtc_observer dtc_no_observer;

struct dtc_simulator {
    std::mutex lock; // only one launch at a time
    dtc_observer *observer = &dtc_no_observer;
    uint3 thread_index = {}, block_index = {};
    dim3 block_size, grid_size;
    dtc_order order = DTC_FORWARD;
    unsigned seed = 0;
    uint64_t walks = 0; // orders drawn in this launch

    const char *kernel = nullptr; // the launch
    const std::function<void()> *body = nullptr;
    std::vector<dtc_range> shared; // static shared memory, of each source file
    bool poisoned;                 // all of it has been filled
    unsigned char *dynamic = nullptr;
    size_t dynamic_bytes = 0;
    size_t dynamic_allowed = DTC_SMEM_DEFAULT; // bytes a launch may ask for

    int threads = 0;                   // the block
    dtc_fiber fibers[DTC_MAX_THREADS]; // begin as zeros, as all of a global variable does
    dtc_parcel published[DTC_MAX_THREADS / DTC_WARP][DTC_WARP] = {}; // of the last warp operation
    int barrier_count = 0; // threads that came to the last barrier with a true predicate

    dtc_fiber *self = nullptr; // the fiber that runs
    int spins = 0;
    dtc_context scheduler = {}; // the stack that called the launch
    void *scheduler_fake_stack = nullptr;
    const void *scheduler_stack = nullptr;
    size_t scheduler_stack_size = 0;

    cudaError_t failure = cudaSuccess;
    std::string error;
    bool error_was_read = true;

    dtc_simulator();
    ~dtc_simulator();
};

inline dtc_simulator dtc;

struct dtc_file {
    dtc_file(dtc_range shared) { dtc.shared.push_back(shared); }
};
static const dtc_file dtc_this_file(dtc_range{ dtc_shared_first, dtc_shared_end });

// ==== 5. Errors and settings ====================================================================

__attribute__((format(printf, 1, 2))) inline std::string dtc_text(const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return text;
}

// Keeps the first mistake of a launch. Not inlined, so that a debugger can stop here.
__attribute__((noinline)) inline void dtc_fail(cudaError_t failure, const std::string &what) {
    if (dtc.failure != cudaSuccess) return;
    dtc.failure = failure;
    dtc.error = std::string(dtc.kernel) + ": " + what;
    dtc.error_was_read = false;
}

// The first mistake since the last dtc_clear_error, or NULL. Valid until the next dtc_clear_error.
inline const char *dtc_error() {
    std::lock_guard<std::mutex> guard(dtc.lock);
    dtc.error_was_read = true;
    return dtc.failure == cudaSuccess ? nullptr : dtc.error.c_str();
}

inline void dtc_clear_error() {
    std::lock_guard<std::mutex> guard(dtc.lock);
    dtc.failure = cudaSuccess;
    dtc.error.clear();
    dtc.error_was_read = true;
}

// Like CUDA's after a failed kernel, the error stays.
inline cudaError_t dtc_last_error() {
    std::lock_guard<std::mutex> guard(dtc.lock);
    return dtc.failure;
}
#ifndef DTC_QUEUED
#define cudaGetLastError() dtc_last_error()
#define cudaPeekAtLastError() dtc_last_error()
#endif

inline void dtc_set_order(int order, unsigned seed) {
    std::lock_guard<std::mutex> guard(dtc.lock);
    dtc.order = static_cast<dtc_order>(order);
    dtc.seed = seed;
}

// Dynamic shared memory above 48 KB is an opt-in: per kernel in CUDA, for all kernels here.
template <class Kernel>
cudaError_t dtc_func_set_attribute(Kernel *, cudaFuncAttribute attribute, int value) {
    std::lock_guard<std::mutex> guard(dtc.lock);
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || value > DTC_SMEM_MAX) return cudaErrorInvalidValue;
    if (static_cast<size_t>(value) > dtc.dynamic_allowed)
        dtc.dynamic_allowed = static_cast<size_t>(value);
    return cudaSuccess;
}
#define cudaFuncSetAttribute dtc_func_set_attribute

inline dtc_simulator::dtc_simulator() {
    const char *wish = getenv("DTC_ORDER");
    if (!wish || !strcmp(wish, "forward")) return;
    if (!strcmp(wish, "reverse")) {
        order = DTC_REVERSE;
    } else if (!strncmp(wish, "permuted:", 9)) {
        order = DTC_PERMUTED;
        seed = static_cast<unsigned>(strtoul(wish + 9, nullptr, 10));
    } else {
        fprintf(stderr, "cuda_on_cpu: DTC_ORDER=%s: not forward, reverse or permuted:SEED\n", wish);
        exit(1);
    }
}

// ==== 6. Fibers =================================================================================

// Runs one thread until it waits or ends.
inline void dtc_resume(dtc_fiber *fiber) {
    dtc.spins = 0;
    threadIdx = fiber->index;
    dtc.self = fiber;
    dtc_asan_leave(&dtc.scheduler_fake_stack, fiber->stack, DTC_STACK_BYTES);
    dtc_switch(&dtc.scheduler, &fiber->context);
    dtc_asan_arrive(dtc.scheduler_fake_stack, nullptr, nullptr);
    dtc.self = nullptr;
}

// Switches back to the scheduler. Called on the fiber's own stack; returns when the fiber is
// resumed.
inline void dtc_give_way() {
    dtc_fiber *self = dtc.self;
    dtc_asan_leave(&self->fake_stack, dtc.scheduler_stack, dtc.scheduler_stack_size);
    dtc_switch(&self->context, &dtc.scheduler);
    dtc_asan_arrive(self->fake_stack, &dtc.scheduler_stack, &dtc.scheduler_stack_size);
}

// A fiber's life: one kernel thread per round, over all blocks and launches.
inline void dtc_fiber_main() {
    dtc_asan_arrive(nullptr, &dtc.scheduler_stack, &dtc.scheduler_stack_size);
    for (;;) {
        (*dtc.body)();
        dtc.self->state = DTC_EXITED;
        dtc_give_way();
    }
}

inline std::string dtc_thread_name(uint3 block, uint3 thread) {
    return dtc_text("block (%u,%u,%u), thread (%u,%u,%u)", block.x, block.y, block.z, thread.x,
        thread.y, thread.z);
}

// Ends the launch from inside a thread that made a mistake. The thread is never resumed, so no
// object with a destructor may be alive here or in the callers.
__attribute__((format(printf, 1, 2), noreturn)) inline void dtc_abandon(const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    dtc_fail(cudaErrorLaunchFailure, dtc_thread_name(blockIdx, threadIdx) + ": " + text);
    for (;;) dtc_give_way();
}

// A stack that was abandoned midway still has ASan's marks around the variables that lived there.
inline void dtc_start_fiber(dtc_fiber *fiber) {
    if (!fiber->stack) {
        void *memory = mmap(nullptr, DTC_GUARD_BYTES + DTC_STACK_BYTES, PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, DTC_GUARD_BYTES, PROT_NONE) != 0) {
            fprintf(stderr, "cuda_on_cpu: no memory for a stack: %s\n", strerror(errno));
            exit(1);
        }
        fiber->stack = static_cast<char *>(memory) + DTC_GUARD_BYTES;
    }
    dtc_asan_forget(fiber->stack, DTC_STACK_BYTES);
    fiber->fake_stack = nullptr;
    dtc_context_make(&fiber->context, fiber->stack, DTC_STACK_BYTES, dtc_fiber_main);
    fiber->started = true;
}

inline dtc_simulator::~dtc_simulator() {
    for (dtc_fiber &fiber : fibers) {
        if (!fiber.stack) continue;
        dtc_asan_forget(fiber.stack, DTC_STACK_BYTES);
        munmap(fiber.stack - DTC_GUARD_BYTES, DTC_GUARD_BYTES + DTC_STACK_BYTES);
    }
    if (!error_was_read) // the test did not read the error, so print it
        fprintf(stderr, "cuda_on_cpu: %s\n", error.c_str());
}

// ==== 7. Running a block ========================================================================

// A walk visits 0 .. n-1 once each, in the chosen order. A stride coprime to n reaches every
// number, and every walk of a launch draws a new stride.
struct dtc_walk {
    uint64_t n, at, stride;

    explicit dtc_walk(uint64_t count) : n(count), at(0), stride(1) {
        if (dtc.order == DTC_REVERSE) {
            at = n - 1;
            stride = n - 1;
        } else if (dtc.order == DTC_PERMUTED) {
            uint64_t bits = (dtc.seed + (++dtc.walks << 32)) * 0x9e3779b97f4a7c15u;
            bits = (bits ^ bits >> 29) * 0xbf58476d1ce4e5b9u;
            at = (bits >> 32) % n;
            stride = (bits & 0xffffffffu) % n;
            while (std::gcd(stride, n) != 1) stride = (stride + 1) % n;
        }
    }

    uint64_t next() {
        uint64_t now = at;
        at = (at + stride) % n;
        return now;
    }
};

inline int dtc_lanes(int warp) {
    int left = dtc.threads - warp * DTC_WARP;
    return left < DTC_WARP ? left : DTC_WARP;
}

// True if two threads wait at the same place. With an observer of calls, different calls of one
// function are different places.
inline bool dtc_same_place(const dtc_fiber &a, const dtc_fiber &b) {
    return a.site.id == b.site.id && a.path == b.path;
}

// True if all lanes that `lane` waits for are waiting in the same operation with the same mask.
inline bool dtc_has_all_partners(const dtc_fiber *warp, int lanes, int lane) {
    unsigned mask = warp[lane].mask;
    for (int other = 0; other < DTC_WARP; other++) {
        if (!(mask >> other & 1)) continue;
        if (other >= lanes || warp[other].state != DTC_AT_WARP_OP || warp[other].mask != mask ||
            !dtc_same_place(warp[other], warp[lane]))
            return false;
    }
    return true;
}

// Resumes every complete group of lanes. Their values are copied first, because a lane that runs
// ahead overwrites its value.
inline bool dtc_release_warp_ops(int index) {
    dtc_fiber *warp = &dtc.fibers[index * DTC_WARP];
    int lanes = dtc_lanes(index);
    bool released = false;
    for (int lane = 0; lane < lanes; lane++) {
        if (warp[lane].state != DTC_AT_WARP_OP || !dtc_has_all_partners(warp, lanes, lane))
            continue;
        unsigned mask = warp[lane].mask;
        for (int other = 0; other < lanes; other++) {
            if (mask >> other & 1) {
                memcpy(&dtc.published[index][other], warp[other].brings, warp[other].bytes);
                warp[other].state = DTC_READY;
            }
        }
        // __syncwarp; other warp operations move values and do not order memory
        if (warp[lane].bytes == 0) dtc.observer->warp_synced(index, mask);
        released = true;
    }
    return released;
}

// Runs one warp until each of its lanes has exited or waits for another warp.
inline void dtc_run_warp(int index) {
    do {
        dtc_walk walk(static_cast<uint64_t>(dtc_lanes(index)));
        for (uint64_t i = 0; i < walk.n; i++) {
            dtc_fiber *fiber = &dtc.fibers[index * DTC_WARP + static_cast<int>(walk.next())];
            if (fiber->state == DTC_READY) dtc_resume(fiber);
            if (dtc.failure != cudaSuccess) return;
        }
    } while (dtc_release_warp_ops(index));
}

// The barrier opens when every thread of the block waits at the same one.
inline bool dtc_release_barrier() {
    int count = 0;
    for (int i = 0; i < dtc.threads; i++) {
        const dtc_fiber &fiber = dtc.fibers[i];
        if (fiber.state != DTC_AT_BARRIER || !dtc_same_place(fiber, dtc.fibers[0])) return false;
        count += fiber.value != 0;
    }
    dtc.barrier_count = count;
    dtc.observer->barrier_opens();
    for (int i = 0; i < dtc.threads; i++) dtc.fibers[i].state = DTC_READY;
    return true;
}

inline bool dtc_all_exited() {
    for (int i = 0; i < dtc.threads; i++)
        if (dtc.fibers[i].state != DTC_EXITED) return false;
    return true;
}

// Lists the threads of a stuck block; consecutive threads in the same state share a line.
inline std::string dtc_who_waits() {
    std::string text;
    int lines = 0;
    for (int first = 0, end; first < dtc.threads; first = end) {
        const dtc_fiber &fiber = dtc.fibers[first];
        for (end = first + 1; end < dtc.threads; end++) {
            const dtc_fiber &next = dtc.fibers[end];
            if (next.state != fiber.state) break;
            if (fiber.state != DTC_EXITED &&
                (!dtc_same_place(next, fiber) || next.mask != fiber.mask))
                break;
        }
        if (++lines > 8) return text + "\n    and more";
        text += dtc_text("\n    threads %d-%d ", first, end - 1);
        if (fiber.state == DTC_EXITED)
            text += "have exited";
        else
            text += dtc_text("wait at %s, %s:%d", fiber.site.op, fiber.site.file, fiber.site.line);
        if (fiber.state == DTC_AT_WARP_OP) text += dtc_text(", mask %08x", fiber.mask);
        if (fiber.state != DTC_EXITED) text += dtc.observer->calls(first);
    }
    return text;
}

// Why a lane's warp operation can never complete; NULL if the cause is in other lanes.
inline const char *dtc_why_incomplete(const dtc_fiber &fiber) {
    const dtc_fiber *warp = &dtc.fibers[fiber.warp * DTC_WARP];
    bool all_at_warp_ops = true;
    for (int other = 0; other < DTC_WARP; other++) {
        if (!(fiber.mask >> other & 1)) continue;
        if (other >= dtc_lanes(fiber.warp))
            return "a warp operation names a lane that the block does not have";
        if (warp[other].state == DTC_EXITED) return "a warp operation names a lane that has exited";
        if (warp[other].state != DTC_AT_WARP_OP) all_at_warp_ops = false;
    }
    return all_at_warp_ops ? "lanes of a warp wait at different warp operations" : nullptr;
}

// No thread can continue: reports the most informative reason.
inline void dtc_report_stall() {
    const char *why = nullptr;
    bool at_warp_op = false, exited = false;
    for (int i = 0; i < dtc.threads && !why; i++) {
        const dtc_fiber &fiber = dtc.fibers[i];
        exited |= fiber.state == DTC_EXITED;
        if (fiber.state == DTC_AT_WARP_OP) {
            at_warp_op = true;
            why = dtc_why_incomplete(fiber);
        }
    }
    if (!why && at_warp_op)
        why = "deadlock";
    else if (!why && exited)
        why = "divergent barrier: threads exited before it";
    else if (!why)
        why = "divergent barrier: threads wait at different ones";
    dtc_fail(cudaErrorLaunchFailure,
        dtc_text("block (%u,%u,%u): %s", blockIdx.x, blockIdx.y, blockIdx.z, why) +
            dtc_who_waits());
}

// Static shared memory that a kernel uses. All kernels together have so much that filling it for
// every block would take most of the time, so a kernel's part is found out in its first launches,
// and again in every 16th, in which it may take another branch.
struct dtc_used {
    std::vector<dtc_range> ranges;
    unsigned launches;
};

// Poison is 0xff in every byte. These functions also touch ASan's gaps between variables.
__attribute__((no_sanitize("address", "thread"))) inline void dtc_poison(dtc_range range) {
    for (volatile char *p = range.first; p < range.end; p += 8)
        *reinterpret_cast<volatile uint64_t *>(p) = UINT64_MAX;
}

// Poisons what a block has changed, and adds it to `used`.
__attribute__((no_sanitize("address", "thread"))) inline void dtc_find_used(dtc_used *used) {
    for (const dtc_range &range : dtc.shared)
        for (char *p = range.first; p < range.end; p += 8) {
            if (*reinterpret_cast<volatile uint64_t *>(p) == UINT64_MAX) continue;
            dtc_poison({ p, p + 8 });
            if (used->ranges.empty() || used->ranges.back().end != p)
                used->ranges.push_back({ p, p + 8 });
            else
                used->ranges.back().end = p + 8;
        }
}

inline void dtc_prepare_block(size_t smem) {
    memset(dtc.dynamic, 0xff, smem);
    for (int i = 0; i < dtc.threads; i++) {
        dtc_fiber *fiber = &dtc.fibers[i];
        unsigned rest = static_cast<unsigned>(i);
        fiber->index.x = rest % blockDim.x;
        rest /= blockDim.x;
        fiber->index.y = rest % blockDim.y;
        fiber->index.z = rest / blockDim.y;
        fiber->lane = i % DTC_WARP;
        fiber->warp = i / DTC_WARP;
        fiber->state = DTC_READY;
        fiber->copying = 0;
        fiber->groups = 0;
        if (!fiber->started) dtc_start_fiber(fiber);
    }
}

inline void dtc_end_block(dtc_used *used) {
    for (const dtc_range &range : used->ranges) dtc_poison(range);
    if (used->launches <= 2 || used->launches % 16 == 0) dtc_find_used(used);
}

inline void dtc_run_block(size_t smem) {
    int warps = (dtc.threads + DTC_WARP - 1) / DTC_WARP;
    dtc_prepare_block(smem);
    dtc.observer->block_starts();
    do {
        dtc_walk walk(static_cast<uint64_t>(warps));
        for (int i = 0; i < warps && dtc.failure == cudaSuccess; i++)
            dtc_run_warp(static_cast<int>(walk.next()));
    } while (dtc.failure == cudaSuccess && dtc_release_barrier());

    if (dtc.failure == cudaSuccess && !dtc_all_exited()) dtc_report_stall();
    for (int i = 0; i < dtc.threads && dtc.failure == cudaSuccess; i++)
        if (dtc.fibers[i].copying > 0)
            dtc_fail(cudaErrorLaunchFailure,
                dtc_text("block (%u,%u,%u), thread %d exits with a cp.async that it "
                         "has not waited for: it may land at any time",
                    blockIdx.x, blockIdx.y, blockIdx.z, i));
    if (dtc.failure == cudaSuccess) return;
    // abandoned inside the kernel: restart the fiber next time
    for (int i = 0; i < dtc.threads; i++)
        if (dtc.fibers[i].state != DTC_EXITED) dtc.fibers[i].started = false;
}

// ==== 8. Launching ==============================================================================

inline bool dtc_check_launch(dim3 grid, dim3 block, size_t smem) {
    uint64_t threads = static_cast<uint64_t>(block.x) * block.y * block.z;
    if (threads == 0 || threads > DTC_MAX_THREADS || block.x > DTC_MAX_THREADS ||
        block.y > DTC_MAX_THREADS || block.z > 64) {
        dtc_fail(cudaErrorInvalidConfiguration,
            dtc_text("a block cannot be (%u,%u,%u)", block.x, block.y, block.z));
        return false;
    }
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > INT32_MAX || grid.y > UINT16_MAX ||
        grid.z > UINT16_MAX) {
        dtc_fail(cudaErrorInvalidConfiguration,
            dtc_text("a grid cannot be (%u,%u,%u)", grid.x, grid.y, grid.z));
        return false;
    }
    if (smem > dtc.dynamic_allowed) {
        dtc_fail(cudaErrorInvalidValue,
            dtc_text("%zu bytes of dynamic shared memory, %zu are allowed (see "
                     "cudaFuncSetAttribute)",
                smem, dtc.dynamic_allowed));
        return false;
    }
    return true;
}

inline void dtc_run_grid(dim3 grid, dim3 block, size_t smem, const char *name,
    const std::function<void()> &body, dtc_used *used) {
    std::lock_guard<std::mutex> guard(dtc.lock);
    if (dtc.failure != cudaSuccess) // as on a GPU, nothing runs after a failed kernel
        return;
    dtc.kernel = name;
    if (!dtc_check_launch(grid, block, smem)) return;
    dtc.body = &body;
    dtc.threads = static_cast<int>(block.x * block.y * block.z);
    dtc.walks = 0;
    gridDim = grid;
    blockDim = block;
    void *dynamic = nullptr; // aligned to the strictest requirement of any device
    if (posix_memalign(&dynamic, 1024, smem ? smem : 1) != 0) dynamic = nullptr;
    dtc.dynamic = static_cast<unsigned char *>(dynamic);
    dtc.dynamic_bytes = smem;
    if (!dtc.dynamic) {
        dtc_fail(cudaErrorMemoryAllocation, "no memory for dynamic shared memory");
        return;
    }
    if (!dtc.poisoned)
        for (const dtc_range &range : dtc.shared) dtc_poison(range);
    dtc.poisoned = true;
    used->launches++;
    dtc.observer->launch_starts();
    dtc_walk walk(static_cast<uint64_t>(grid.x) * grid.y * grid.z);
    for (uint64_t i = 0; i < walk.n && dtc.failure == cudaSuccess; i++) {
        uint64_t rest = walk.next();
        blockIdx.x = static_cast<unsigned>(rest % grid.x);
        rest /= grid.x;
        blockIdx.y = static_cast<unsigned>(rest % grid.y);
        blockIdx.z = static_cast<unsigned>(rest / grid.y);
        dtc_run_block(smem);
        dtc_end_block(used);
    }
    dtc.observer->launch_ends();
    free(dtc.dynamic);
    dtc.dynamic = nullptr;
}

#ifndef DTC_QUEUED
// The arguments are evaluated once, as in a real launch; each thread gets a copy.
template <class Kernel, class... Args>
void dtc_launch(dim3 grid, dim3 block, size_t smem, cudaStream_t, const char *name, Kernel kernel,
    Args &&...args) {
    static dtc_used
        used; // one for each kernel, because Kernel is the type of a lambda that calls it
    const std::tuple<std::decay_t<Args>...> values(std::forward<Args>(args)...);
    dtc_run_grid(
        grid, block, smem, name, [&] { std::apply(kernel, values); }, &used);
}
#else

// fake_cuda.c's queues; see fake_cuda.h.
extern "C" {
void fake_cuda_launch(cudaStream_t stream, void (*run)(void *), void *arg, void (*drop)(void *));
void fake_cuda_check_argument(const char *kernel, const void *argument, size_t bytes);
void fake_cuda_launch_failed(cudaError_t error, const char *text);
}

struct dtc_queued {
    dim3 grid, block;
    size_t smem;
    const char *name;
    std::function<void()> body;
    dtc_used *used;
};

// Passes the mistake on to the device, because the simulator also serves the other devices.
inline void dtc_hand_over_failure() {
    std::unique_lock<std::mutex> guard(dtc.lock);
    if (dtc.failure == cudaSuccess) return;
    cudaError_t failure = dtc.failure;
    std::string text = dtc.error;
    dtc.failure = cudaSuccess;
    dtc.error.clear();
    dtc.error_was_read = true;
    guard.unlock();
    fake_cuda_launch_failed(failure, text.c_str());
}

// A launch beyond the limits is refused at once, as in CUDA.
inline bool dtc_may_launch(const dtc_queued &launch) {
    std::lock_guard<std::mutex> guard(dtc.lock);
    dtc.kernel = launch.name;
    return dtc_check_launch(launch.grid, launch.block, launch.smem);
}

template <class Kernel, class... Args>
void dtc_launch(dim3 grid, dim3 block, size_t smem, cudaStream_t stream, const char *name,
    Kernel kernel, Args &&...args) {
    (fake_cuda_check_argument(name, &args, sizeof args), ...);
    static dtc_used used; // as above
    std::tuple<std::decay_t<Args>...> values(std::forward<Args>(args)...);
    dtc_queued *launch = new dtc_queued{ grid, block, smem, name,
        [kernel, values] { std::apply(kernel, values); }, &used };
    if (!dtc_may_launch(*launch)) {
        dtc_hand_over_failure();
        delete launch;
        return;
    }
    fake_cuda_launch(
        stream,
        [](void *arg) {
            const dtc_queued *queued = static_cast<dtc_queued *>(arg);
            dtc_run_grid(queued->grid, queued->block, queued->smem, queued->name, queued->body,
                queued->used);
            dtc_hand_over_failure();
        },
        launch, [](void *arg) { delete static_cast<dtc_queued *>(arg); });
}
#endif

#ifndef DTC_QUEUED
// ==== 9. Memory, streams, devices ================================================================

// Device memory is host memory. It starts as 0xFF bytes, and ASan checks its end.
inline cudaError_t dtc_malloc(void **p, size_t bytes) {
    const size_t most = static_cast<size_t>(1) << 40; // no GPU has more
    if (bytes > most || posix_memalign(p, 256, bytes) != 0) return cudaErrorMemoryAllocation;
    memset(*p, 0xff, bytes);
    return cudaSuccess;
}

inline cudaError_t dtc_free(void *p) {
    free(p);
    return cudaSuccess;
}

// Every operation is executed at the call, so streams are always empty.
inline cudaError_t dtc_memcpy(void *to, const void *from, size_t bytes) {
    cudaError_t failure = dtc_last_error();
    if (failure == cudaSuccess) memcpy(to, from, bytes);
    return failure;
}

// A stream, or an event, is an address that is not NULL.
template <class Handle> cudaError_t dtc_handle(Handle *handle) {
    static char place;
    *handle = reinterpret_cast<Handle>(&place);
    return cudaSuccess;
}
inline cudaError_t dtc_stream_create(cudaStream_t *stream, unsigned) { return dtc_handle(stream); }
inline cudaError_t dtc_event_create(cudaEvent_t *event, unsigned) { return dtc_handle(event); }

// The properties that the simulated machine reports, for example no GPU or no driver: set, query,
// reset.
struct dtc_machine {
    int devices, driver;
    cudaError_t error;
    int arch, code, threads;
};
inline dtc_machine dtc_this_machine = { 1, 13000, cudaSuccess, 90, 90, 1024 };

inline cudaError_t dtc_attribute(int *value, cudaDeviceAttr attribute) {
    bool major = attribute == cudaDevAttrComputeCapabilityMajor;
    *value = major ? dtc_this_machine.arch / 10 : dtc_this_machine.arch % 10;
    return cudaSuccess;
}

inline cudaError_t dtc_get_device_count(int *count) // as CUDA's, silent when it fails
{
    if (dtc_this_machine.error == cudaSuccess) *count = dtc_this_machine.devices;
    return dtc_this_machine.error;
}

inline cudaError_t dtc_set_device(int device) {
    if (dtc_this_machine.error != cudaSuccess) return dtc_this_machine.error;
    return device >= 0 && device < dtc_this_machine.devices ? cudaSuccess : cudaErrorInvalidDevice;
}

inline cudaError_t dtc_driver_version(int *version) {
    *version = dtc_this_machine.driver;
    return cudaSuccess;
}

inline const char *dtc_error_name(cudaError_t error) {
    switch (static_cast<int>(error)) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    }
    return "unrecognized error code";
}

// Macros, since the toolkit's headers, if any, have declared the real ones.
#define cudaMalloc(p, bytes) dtc_malloc(p, bytes)
#define cudaFree(p) dtc_free(p)
#define cudaMemcpyAsync(to, from, bytes, kind, stream) \
    (static_cast<void>(kind), static_cast<void>(stream), dtc_memcpy(to, from, bytes))
#define cudaStreamSynchronize(stream) (static_cast<void>(stream), dtc_last_error())
#define cudaStreamCreateWithPriority(stream, flags, priority) dtc_stream_create(stream, flags)
#define cudaDeviceGetStreamPriorityRange(least, most) (*(least) = *(most) = 0, cudaSuccess)
#define cudaStreamDestroy(stream) (static_cast<void>(stream), cudaSuccess)
#define cudaEventCreateWithFlags(event, flags) dtc_event_create(event, flags)
#define cudaEventRecord(event, stream) (static_cast<void>(stream), dtc_last_error())
#define cudaEventQuery(event) (static_cast<void>(event), dtc_last_error())
#define cudaStreamWaitEvent(stream, event, flags) \
    (static_cast<void>(stream), static_cast<void>(event), cudaSuccess)
#define cudaEventDestroy(event) (static_cast<void>(event), cudaSuccess)
#define cudaSetDevice(device) dtc_set_device(device)
#define cudaPointerGetAttributes(of, p) \
    ((of)->type = cudaMemoryTypeDevice, static_cast<void>(p), cudaSuccess)
#define cudaDeviceCanAccessPeer(can, device, peer) \
    (static_cast<void>(device), static_cast<void>(peer), *(can) = 0, cudaSuccess)
#define cudaDeviceEnablePeerAccess(peer, flags) (static_cast<void>(peer), cudaErrorInvalidDevice)
#define cudaMallocHost(p, bytes) dtc_malloc(p, bytes)
#define cudaFreeHost(p) dtc_free(p)
#define cudaGetDevice(device) (*(device) = 0, cudaSuccess)
#define cudaDeviceGetAttribute(value, attribute, device) \
    (static_cast<void>(device), dtc_attribute(value, attribute))
#define cudaFuncGetAttributes(of, kernel) \
    ((of)->ptxVersion = dtc_this_machine.code, \
        (of)->maxThreadsPerBlock = dtc_this_machine.threads, static_cast<void>(kernel), \
        dtc_this_machine.code ? cudaSuccess : cudaErrorInvalidDevice)
#define cudaGetDeviceCount(count) dtc_get_device_count(count)
#define cudaDriverGetVersion(version) dtc_driver_version(version)
#define cudaGetErrorName(error) dtc_error_name(error)
#endif // !DTC_QUEUED

// ==== 10. Barriers and warp operations ==========================================================

// Each name is a macro so that it passes its place in the source.

inline void dtc_syncthreads(dtc_site site, bool predicate) {
    dtc_fiber *self = dtc.self;
    self->site = site;
    self->path = dtc.observer->path();
    self->mask = 0;
    self->value = predicate;
    self->state = DTC_AT_BARRIER;
    dtc_give_way();
}

inline int dtc_syncthreads_count(dtc_site site, bool predicate) {
    dtc_syncthreads(site, predicate);
    return dtc.barrier_count;
}

#define __syncthreads() dtc_syncthreads(DTC_SITE("__syncthreads"), false)
#define __syncthreads_count(p) dtc_syncthreads_count(DTC_SITE("__syncthreads_count"), (p) != 0)
#define __syncthreads_or(p) \
    static_cast<int>(dtc_syncthreads_count(DTC_SITE("__syncthreads_or"), (p) != 0) > 0)
#define __syncthreads_and(p) \
    static_cast<int>(dtc_syncthreads_count(DTC_SITE("__syncthreads_and"), (p) != 0) == dtc.threads)

// Every warp operation is this exchange: contribute a few bytes, wait for the lanes of the mask,
// and get their bytes. The result is valid until the calling lane waits again.
inline const dtc_parcel *dtc_exchange(
    dtc_site site, unsigned mask, const void *brings, size_t bytes) {
    dtc_fiber *self = dtc.self;
    if (!(mask >> self->lane & 1))
        dtc_abandon("%s, %s:%d: lane %d is not in its own mask %08x", site.op, site.file, site.line,
            self->lane, mask);
    self->site = site;
    self->path = dtc.observer->path();
    self->mask = mask;
    self->brings = brings;
    self->bytes = bytes;
    self->state = DTC_AT_WARP_OP;
    dtc_give_way();
    return dtc.published[self->warp];
}

inline unsigned dtc_mask_or_all(unsigned mask = 0xffffffffu) { return mask; }

#define __syncwarp(...) \
    static_cast<void>(dtc_exchange(DTC_SITE("__syncwarp"), dtc_mask_or_all(__VA_ARGS__), "", 0))

inline unsigned dtc_ballot(dtc_site site, unsigned mask, bool predicate) {
    const dtc_parcel *theirs = dtc_exchange(site, mask, &predicate, 1);
    unsigned votes = 0;
    for (int lane = 0; lane < DTC_WARP; lane++)
        if ((mask >> lane & 1) && theirs[lane].bytes[0]) votes |= 1u << lane;
    return votes;
}

inline int dtc_all(dtc_site site, unsigned mask, bool predicate) {
    return dtc_ballot(site, mask, predicate) == mask;
}

#define __ballot_sync(mask, p) dtc_ballot(DTC_SITE("__ballot_sync"), mask, (p) != 0)
#define __any_sync(mask, p) \
    static_cast<int>(dtc_ballot(DTC_SITE("__any_sync"), mask, (p) != 0) != 0)
#define __all_sync(mask, p) dtc_all(DTC_SITE("__all_sync"), mask, (p) != 0)

template <class T> T dtc_read_lane(dtc_site site, unsigned mask, T value, int source) {
    static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 8,
        "shuffles move at most 8 plain bytes");
    if (!(mask >> source & 1))
        dtc_abandon("%s, %s:%d: lane %d reads lane %d, which is not in the mask %08x", site.op,
            site.file, site.line, dtc.self->lane, source, mask);
    const dtc_parcel *theirs = dtc_exchange(site, mask, &value, sizeof value);
    memcpy(&value, &theirs[source], sizeof value);
    return value;
}

// `width` cuts the warp into segments; a source outside the caller's segment gives the caller's
// own value, except that xor may read an earlier segment.
inline void dtc_check_width(dtc_site site, int width) {
    if (width < 1 || width > DTC_WARP || (width & (width - 1)))
        dtc_abandon("%s, %s:%d: width %d is not a power of two up to 32", site.op, site.file,
            site.line, width);
}

template <class T>
T dtc_shfl(dtc_site site, unsigned mask, T value, int source, int width = DTC_WARP) {
    dtc_check_width(site, width);
    int first = dtc.self->lane & ~(width - 1);
    return dtc_read_lane(site, mask, value, first | (source & (width - 1)));
}

template <class T>
T dtc_shfl_up(dtc_site site, unsigned mask, T value, unsigned delta, int width = DTC_WARP) {
    dtc_check_width(site, width);
    int lane = dtc.self->lane, in_segment = lane & (width - 1);
    bool inside = delta <= static_cast<unsigned>(in_segment);
    return dtc_read_lane(site, mask, value, inside ? lane - static_cast<int>(delta) : lane);
}

template <class T>
T dtc_shfl_down(dtc_site site, unsigned mask, T value, unsigned delta, int width = DTC_WARP) {
    dtc_check_width(site, width);
    int lane = dtc.self->lane, in_segment = lane & (width - 1);
    bool inside = delta < static_cast<unsigned>(width - in_segment);
    return dtc_read_lane(site, mask, value, inside ? lane + static_cast<int>(delta) : lane);
}

template <class T>
T dtc_shfl_xor(dtc_site site, unsigned mask, T value, int bits, int width = DTC_WARP) {
    dtc_check_width(site, width);
    int lane = dtc.self->lane, source = lane ^ bits;
    bool inside = source >= 0 && source <= (lane | (width - 1));
    return dtc_read_lane(site, mask, value, inside ? source : lane);
}

#define __shfl_sync(...) dtc_shfl(DTC_SITE("__shfl_sync"), __VA_ARGS__)
#define __shfl_up_sync(...) dtc_shfl_up(DTC_SITE("__shfl_up_sync"), __VA_ARGS__)
#define __shfl_down_sync(...) dtc_shfl_down(DTC_SITE("__shfl_down_sync"), __VA_ARGS__)
#define __shfl_xor_sync(...) dtc_shfl_xor(DTC_SITE("__shfl_xor_sync"), __VA_ARGS__)

// ==== 11. Tensor cores, asynchronous copies =====================================================

// The operations of inline PTX under nvcc, as in the PTX ISA: all 32 lanes take part, and a
// fragment is a lane's share of a matrix. Each name is a macro, as in section 10.

DTC_UNSEEN inline float dtc_bf16_to_float(unsigned bits) {
    float x;
    bits <<= 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// 5 bits of exponent, of which all ones are infinity or NaN and all zeros are denormals.
DTC_UNSEEN inline float dtc_f16_to_float(unsigned bits) {
    int exponent = static_cast<int>(bits >> 10 & 31);
    float fraction = static_cast<float>(bits & 1023), x;
    if (exponent == 31)
        x = fraction != 0 ? NAN : INFINITY;
    else if (exponent == 0)
        x = ldexpf(fraction, -24);
    else
        x = ldexpf(fraction + 1024, exponent - 25);
    return bits >> 15 & 1 ? -x : x;
}

// mma.sync.aligned.m16n8k16.row.col.f32: d[16][8] += a[16][16] b[16][8]. Lane 4 g + t holds rows g
// and g + 8 of d and of a, column g of b, and of each the numbers 2 t and 2 t + 1, of a and b also
// 2 t + 8 and 2 t + 9. Each lane brings its share of a and b as floats and adds up its own four
// sums, k ascending; the hardware uses another order.
template <float (*to_float)(unsigned)>
DTC_UNSEEN void dtc_mma_m16n8k16(
    dtc_site site, float d[4], const unsigned a[4], const unsigned b[2]) {
    float mine[12];
    for (int i = 0; i < 12; i++) {
        unsigned pair = i < 8 ? a[i / 2] : b[i / 2 - 4];
        mine[i] = to_float(i % 2 ? pair >> 16 : pair & 0xffff);
    }
    const dtc_parcel *theirs = dtc_exchange(site, 0xffffffffu, mine, sizeof mine);
    int g = dtc.self->lane / 4, t = dtc.self->lane % 4;
    const float *rows[4], *columns[4], *nexts[4]; // of the lanes that hold two neighbouring k each
    for (int i = 0; i < 4; i++) {
        rows[i] = reinterpret_cast<const float *>(theirs[4 * g + i].bytes);
        columns[i] = reinterpret_cast<const float *>(theirs[8 * t + i].bytes) + 8;
        nexts[i] = reinterpret_cast<const float *>(theirs[8 * t + 4 + i].bytes) + 8;
    }
    float sum[4] = { d[0], d[1], d[2], d[3] };
    for (int late = 0; late < 2; late++)
        for (int i = 0; i < 4; i++) {
            const float *row = rows[i] + 4 * late; // row g; 2 further: row g + 8
            const float *column = columns[i] + 2 * late,
                        *next = nexts[i] + 2 * late; // columns 2 t, 2 t + 1
            for (int odd = 0; odd < 2; odd++) {
                sum[0] += row[odd] * column[odd];
                sum[1] += row[odd] * next[odd];
                sum[2] += row[odd + 2] * column[odd];
                sum[3] += row[odd + 2] * next[odd];
            }
        }
    memcpy(d, sum, sizeof sum);
}
#define dtc_mma_m16n8k16_bf16(...) \
    dtc_mma_m16n8k16<dtc_bf16_to_float>(DTC_SITE("mma.sync"), __VA_ARGS__)
#define dtc_mma_m16n8k16_f16(...) \
    dtc_mma_m16n8k16<dtc_f16_to_float>(DTC_SITE("mma.sync"), __VA_ARGS__)

inline bool dtc_in_shared(const void *p, size_t bytes) {
    uintptr_t at = reinterpret_cast<uintptr_t>(p);
    uintptr_t dynamic = reinterpret_cast<uintptr_t>(dtc.dynamic);
    if (at >= dynamic && at + bytes <= dynamic + dtc.dynamic_bytes) return true;
    for (const dtc_range &range : dtc.shared)
        if (at >= reinterpret_cast<uintptr_t>(range.first) &&
            at + bytes <= reinterpret_cast<uintptr_t>(range.end))
            return true;
    return false;
}

// The 16 bytes at p, which must be in shared memory.
inline void dtc_check_shared16(dtc_site site, const void *p) {
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0)
        dtc_abandon(
            "%s, %s:%d: address %p is not a multiple of 16", site.op, site.file, site.line, p);
    if (!dtc_in_shared(p, 16))
        dtc_abandon(
            "%s, %s:%d: address %p is not in shared memory", site.op, site.file, site.line, p);
}

// Copies bytes whose accesses were already reported to the observer.
DTC_UNSEEN inline void dtc_move(void *to, const void *from, int bytes) {
    for (int i = 0; i < bytes; i++)
        static_cast<unsigned char *>(to)[i] = static_cast<const unsigned char *>(from)[i];
}

// ldmatrix.sync.aligned.m8n8: lane i gives the address of row i % 8 of matrix i / 8, a row being
// eight 16-bit numbers. r[m] is the numbers 2 (lane % 4) and the next of row lane / 4 of matrix m;
// transposed, of its column lane / 4. A lane fetches the row whose address it gives, so what other
// lanes write there must be ordered before it by a barrier.
template <int matrices, bool trans> void dtc_ldmatrix(dtc_site site, unsigned *r, const void *row) {
    unsigned char mine[16] = {};
    if (dtc.self->lane < 8 * matrices) { // the addresses of other lanes are ignored
        dtc_check_shared16(site, row);
        dtc.observer->read(row, sizeof mine);
        dtc_move(mine, row, 16);
    }
    const dtc_parcel *rows = dtc_exchange(site, 0xffffffffu, mine, sizeof mine);
    int g = dtc.self->lane / 4, t = dtc.self->lane % 4;
    for (int m = 0; m < matrices; m++) {
        uint16_t pair[2];
        for (int i = 0; i < 2; i++)
            memcpy(&pair[i],
                trans ? &rows[8 * m + 2 * t + i].bytes[2 * g]
                      : &rows[8 * m + g].bytes[2 * (2 * t + i)],
                2);
        r[m] = pair[0] | static_cast<unsigned>(pair[1]) << 16;
    }
}
#define dtc_ldmatrix_x4(...) dtc_ldmatrix<4, false>(DTC_SITE("ldmatrix.x4"), __VA_ARGS__)
#define dtc_ldmatrix_x4_trans(...) dtc_ldmatrix<4, true>(DTC_SITE("ldmatrix.x4.trans"), __VA_ARGS__)
#define dtc_ldmatrix_x2(...) dtc_ldmatrix<2, false>(DTC_SITE("ldmatrix.x2"), __VA_ARGS__)
#define dtc_ldmatrix_x2_trans(...) dtc_ldmatrix<2, true>(DTC_SITE("ldmatrix.x2.trans"), __VA_ARGS__)

// cp.async.cg.shared.global of 16 bytes: the first `bytes` are read, the rest is zero. The bytes
// arrive as late as possible: when the thread waits for their group, or never.
inline void dtc_cp_async(dtc_site site, void *shared, const void *global, int bytes) {
    dtc_check_shared16(site, shared);
    if (bytes < 0 || bytes > 16)
        dtc_abandon("%s, %s:%d: %d bytes of 16", site.op, site.file, site.line, bytes);
    if (reinterpret_cast<uintptr_t>(global) % 16 != 0 || dtc_in_shared(global, 1))
        dtc_abandon("%s, %s:%d: source %p is not a multiple of 16 in global memory", site.op,
            site.file, site.line, global);
    if (dtc.self->copying == DTC_COPIES)
        dtc_abandon("%s, %s:%d: more than %d under way", site.op, site.file, site.line, DTC_COPIES);
    unsigned char not_yet[16];
    memset(not_yet, 0xff, sizeof not_yet);
    dtc_copy *copy = &dtc.self->copies[dtc.self->copying++];
    *copy = { shared, {}, dtc.self->groups };
    dtc.observer->read(global, static_cast<size_t>(bytes));
    dtc.observer->written(shared, sizeof copy->bytes);
    dtc_move(copy->bytes, global, bytes);
    dtc_move(shared, not_yet, 16);
}
#define dtc_cp_async16(...) dtc_cp_async(DTC_SITE("cp.async"), __VA_ARGS__)

inline void dtc_cp_async_commit() { dtc.self->groups++; }

// cp.async.wait_group: of the committed groups all but the last n have arrived.
inline void dtc_cp_async_wait(int n) {
    dtc_fiber *self = dtc.self;
    int arrived = 0;
    for (; arrived < self->copying; arrived++) {
        const dtc_copy &copy = self->copies[arrived];
        if (copy.group + static_cast<unsigned>(n) >= self->groups) break;
        dtc.observer->written(copy.to, sizeof copy.bytes);
        dtc_move(copy.to, copy.bytes, 16);
    }
    self->copying -= arrived;
    memmove(self->copies, self->copies + arrived,
        static_cast<size_t>(self->copying) * sizeof(dtc_copy));
}

// ==== 12. Atomics, loads and stores, mathematics ================================================

// One fiber runs at a time, so atomics are plain operations. They only detect a thread that polls
// for a value which another thread can never write.
template <class T, class Operation> DTC_UNSEEN T dtc_atomic(T *place, Operation operation) {
    if (dtc.self && ++dtc.spins > DTC_SPIN_LIMIT)
        dtc_abandon("deadlock: waits in a loop of atomics for another thread or block");
    dtc.observer->changed(place, sizeof *place);
    T old = *place;
    *place = operation(old);
    return old;
}

// The operand converts to the type of the memory, as with CUDA's overloads.
template <class T> struct dtc_same { typedef T type; };
template <class T> using dtc_operand = typename dtc_same<T>::type;

template <class T> T atomicAdd(T *p, dtc_operand<T> v) {
    return dtc_atomic(p, [v](T old) { return static_cast<T>(old + v); });
}
template <class T> T atomicSub(T *p, dtc_operand<T> v) {
    return dtc_atomic(p, [v](T old) { return static_cast<T>(old - v); });
}
template <class T> T atomicMin(T *p, dtc_operand<T> v) {
    return dtc_atomic(p, [v](T old) { return v < old ? v : old; });
}
template <class T> T atomicMax(T *p, dtc_operand<T> v) {
    return dtc_atomic(p, [v](T old) { return v > old ? v : old; });
}
template <class T> T atomicAnd(T *p, dtc_operand<T> v) {
    return dtc_atomic(p, [v](T old) { return old & v; });
}
template <class T> T atomicOr(T *p, dtc_operand<T> v) {
    return dtc_atomic(p, [v](T old) { return old | v; });
}
template <class T> T atomicExch(T *p, dtc_operand<T> v) {
    return dtc_atomic(p, [v](T) { return v; });
}
template <class T> T atomicCAS(T *p, dtc_operand<T> expected, dtc_operand<T> v) {
    return dtc_atomic(p, [expected, v](T old) { return old == expected ? v : old; });
}
inline unsigned atomicInc(unsigned *p, unsigned limit) // wraps to 0 after limit
{
    return dtc_atomic(p, [limit](unsigned old) { return old >= limit ? 0 : old + 1; });
}

template <class T> T __ldg(const T *p) { return *p; }
template <class T> T __ldcs(const T *p) { return *p; }
template <class T> T __ldcg(const T *p) { return *p; }
template <class T> void __stcs(T *p, dtc_operand<T> v) { *p = v; }
template <class T> void __stcg(T *p, dtc_operand<T> v) { *p = v; }
inline void __threadfence() { dtc.observer->fenced(); }
inline void __threadfence_block() {}

// Macros, since the C library may declare these names itself.
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define rsqrtf(x) (1.0f / sqrtf(x))
#define rsqrt(x) (1.0 / sqrt(x))

inline float __fdividef(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

template <class To, class From> To dtc_same_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "reinterprets, does not convert");
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
inline unsigned __float_as_uint(float x) { return dtc_same_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return dtc_same_bits<float>(x); }
inline int __float_as_int(float x) { return dtc_same_bits<int>(x); }
inline float __int_as_float(int x) { return dtc_same_bits<float>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}

template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

#endif // !__CUDACC__
#endif
