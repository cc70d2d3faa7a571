/* cuda_races.cc - finds races in kernels that run through cuda_on_cpu.h

   The file with the kernels is compiled with -fsanitize=thread, so that the compiler calls a
   function before every access to memory; those functions are here, instead of the thread
   sanitizer's, which is not linked:

    g++ -std=c++17 -O1 -g -fsanitize=thread --param tsan-distinguish-volatile=1 -fno-inline \
        -fno-thread-jumps -fno-builtin-memcpy -fno-builtin-memset -c kernels_and_test.cc
    g++ -std=c++17 -O1 -g kernels_and_test.o cuda_races.cc -Wl,--wrap=memcpy,--wrap=memset

   Without -fno-inline a call of a helper leaves no trace, and without the options on memcpy GCC
   copies small blocks without calling a function.

   WHAT IS A RACE. Two threads of a launch touch the same byte, at least one of them writes, not both
   by atomics or through volatile, and nothing orders the two accesses. Order comes from:
   - __syncthreads, between the threads of a block;
   - __syncwarp, between the lanes in its mask. Shuffles, votes and mma do not order memory, as CUDA
     says, although lanes wait for each other in them;
   - a fence and an atomic: a thread writes, calls __threadfence and changes a number atomically;
     another thread, of any block, changes the same number later. What came before the fence (in its
     block: before a barrier before the fence) is ordered before what the other thread does next (in
     its block: after the next barrier). Chains of two such steps are not followed.
   cp.async counts as two writes: one when it is issued, since the data may arrive at once, and one
   at the wait.

   A race is reported whatever the order of the threads in this run, but only between accesses that
   were executed: code that did not run is not judged. GCC does not report a struct that a call
   returns directly into memory, p[i] = f() where f is not inline; kernels should store it in a
   variable first. Bytes are exact. Of many threads that read a byte a few are remembered: two of a
   warp, one of another warp, one of another block.

   A barrier or a warp operation is identified by the calls that led to it: the same one, reached
   through two calls of a helper, counts as two. */

#include "tests/cuda/cuda_on_cpu.h"

#include <unistd.h>

#include <map>
#include <unordered_map>

#define HERE __builtin_return_address(0)

// ==== 1. Who, when, where =======================================================================

// Offsets in this program, to tell places of the code in 4 bytes.
extern "C" const char __executable_start[];
typedef uint32_t code_place;

static code_place place_of(const void *pc) {
    return static_cast<code_place>(static_cast<const char *>(pc) - __executable_start);
}

// One access of a thread. A thread's clock advances at its warp's barriers and its fences, the
// epoch is the number of block barriers, and blocks are counted over all launches from 1.
struct doing {
    uint32_t block, epoch, clock;
    code_place at, called_from;
    uint16_t thread, bytes;
};

enum access_kind { READ, WRITE, ATOMIC };

enum { MOST_CALLS = 64 };
struct thread_clock {
    uint32_t seen[DTC_WARP]; // the latest clock of each lane of the warp that is before us; its own
    bool in_kernel;          // not before it, where the arguments are copied
    const void *calls[MOST_CALLS]; // return addresses of the functions it is in
    int depth;                     // and how many those are, more than fit perhaps
};

// The accesses of a thread before its last fence, which other threads may acquire.
struct release {
    uint32_t block, epoch; // block 0: none
    int warp;
    uint32_t seen[DTC_WARP];
};
typedef std::vector<release> releases;

// In this block, thread `by` acquired the first `count` releases of a number.
struct acquired {
    doing by;
    const releases *list;
    size_t count;
};

static thread_clock threads[DTC_MAX_THREADS];
static release fences[DTC_MAX_THREADS];
static std::map<const void *, releases> released; // by the number that was changed
static std::vector<acquired> acquisitions;
static std::vector<uint3> blocks; // of this launch, in the order they ran
static uint32_t first_block = 1, block, epoch;
static thread_local bool launching; // other host threads run the same code

static int running() { return static_cast<int>(dtc.self - dtc.fibers); }
static uint32_t &clock_of(int thread) { return threads[thread].seen[thread % DTC_WARP]; }

// Return addresses of the running functions; 0 is the innermost.
static const void *call(const thread_clock &t, int outwards) {
    int i = t.depth - 1 - outwards;
    return i >= 0 && i < MOST_CALLS ? t.calls[i] : __executable_start + 1;
}

// pc: in the kernel or one of its functions; NULL: in a function of cuda_on_cpu.h that it called.
static doing doing_now(const void *pc, size_t bytes) {
    int me = running();
    const thread_clock &t = threads[me];
    return { block, epoch, clock_of(me), place_of(pc ? pc : call(t, 0)), place_of(call(t, !pc)),
        static_cast<uint16_t>(me), static_cast<uint16_t>(bytes) };
}

static bool within_block_before(const doing &a) {
    int me = running();
    if (a.thread == me || a.epoch < epoch) return true;
    return a.thread / DTC_WARP == me / DTC_WARP && a.clock <= threads[me].seen[a.thread % DTC_WARP];
}

// True if the running thread learned through an atomic that `a` is complete.
static bool told(const doing &a) {
    for (const acquired &q : acquisitions) {
        if (!within_block_before(q.by)) continue;
        for (size_t i = 0; i < q.count; i++) {
            const release &r = (*q.list)[i];
            bool of_its_warp =
                a.thread / DTC_WARP == r.warp && a.clock <= r.seen[a.thread % DTC_WARP];
            if (r.block == a.block && (a.epoch < r.epoch || of_its_warp)) return true;
        }
    }
    return false;
}

// True if `a` is ordered before the running thread's current access.
static bool before(const doing &a) {
    return (a.block == block && within_block_before(a)) || told(a);
}

// ==== 2. Shadow memory ==========================================================================

// Unordered accesses of one kind to a cell that are remembered: two of one warp, one of another
// warp of the block, one of another block. An access that is ordered before a newer one is
// forgotten, because an access that is not ordered after the older one is not ordered after the
// newer one either.
enum { TWO_OF_WARP = 0, OTHER_WARP = 2, OTHER_BLOCK = 3, KEPT = 4 };

struct cell {
    doing written, read[KEPT];
};
struct changes {
    doing changed[KEPT];
};

// A cell is 4 bytes; after a smaller access to the page each byte is a cell.
enum { PAGE = 4096, MOST_PAGES = 4000 };
struct shadow_page {
    size_t grain;
    std::vector<cell> cells;
    std::vector<changes> atomics; // empty on most pages
};

static std::unordered_map<uintptr_t, shadow_page> pages;
static struct {
    uintptr_t number;
    shadow_page *page;
} recent[1024];

static shadow_page *page_at(uintptr_t at) {
    uintptr_t number = at / PAGE;
    auto &slot = recent[number % 1024];
    if (slot.page && slot.number == number) return slot.page;
    shadow_page &page = pages[number];
    if (page.cells.empty()) {
        page.grain = 4;
        page.cells.resize(PAGE / 4);
    }
    slot.number = number;
    slot.page = &page;
    return &page;
}

static void split(shadow_page *page) {
    std::vector<cell> cells(PAGE);
    std::vector<changes> atomics(page->atomics.empty() ? 0 : PAGE);
    for (size_t i = 0; i < PAGE; i++) {
        cells[i] = page->cells[i / 4];
        if (!atomics.empty()) atomics[i] = page->atomics[i / 4];
    }
    page->cells.swap(cells);
    page->atomics.swap(atomics);
    page->grain = 1;
}

// Accesses of earlier launches are ordered before all later ones, and a new block starts with
// unused shared memory.
static bool counts(const doing &a, bool shared) {
    return a.block >= (shared ? block : first_block);
}

static void keep(doing *kept, const doing &now, bool shared) {
    for (int i = 0; i < OTHER_BLOCK; i++) {
        if (!counts(kept[i], shared)) {
            kept[i].block = 0;
        } else if (kept[i].block != block) {
            if (!counts(kept[OTHER_BLOCK], shared)) kept[OTHER_BLOCK] = kept[i];
            kept[i].block = 0;
        } else if (within_block_before(kept[i])) {
            kept[i].block = 0;
        }
    }
    int to = TWO_OF_WARP;
    if (kept[0].block)
        to = kept[0].thread / DTC_WARP == now.thread / DTC_WARP ? TWO_OF_WARP + 1 : OTHER_WARP;
    if (!kept[to].block) kept[to] = now;
}

static const doing *first_unordered(const doing *done, int n, bool shared) {
    for (int i = 0; i < n; i++)
        if (counts(done[i], shared) && !before(done[i])) return &done[i];
    return nullptr;
}

// Records an access to one cell. Returns the conflicting access if there is a race.
static const doing *touch(shadow_page *page, size_t index, access_kind kind, const doing &now,
    bool shared, access_kind *other) {
    cell &c = page->cells[index];
    const doing *conflict = nullptr;
    if (kind == ATOMIC && page->atomics.empty()) page->atomics.resize(page->cells.size());
    doing *changed = page->atomics.empty() ? nullptr : page->atomics[index].changed;

    *other = WRITE;
    conflict = first_unordered(&c.written, 1, shared);
    if (!conflict && kind != READ) {
        *other = READ;
        conflict = first_unordered(c.read, KEPT, shared);
    }
    if (!conflict && kind != ATOMIC && changed) {
        *other = ATOMIC;
        conflict = first_unordered(changed, KEPT, shared);
    }
    if (conflict) return conflict;
    if (kind == READ)
        keep(c.read, now, shared);
    else if (kind == ATOMIC)
        keep(changed, now, shared);
    if (kind != WRITE) return nullptr;
    c.written = now; // all others come before it
    for (int i = 0; i < KEPT; i++) {
        c.read[i].block = 0;
        if (changed) changed[i].block = 0;
    }
    return nullptr;
}

// ==== 3. Reports ================================================================================

// Function, file and line of a return address, from addr2line.
static std::string in_words(code_place place) {
    char program[512], line[1024] = "";
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    program[length > 0 ? length : 0] = 0;
    std::string command = dtc_text("addr2line -Cfpse '%s' 0x%x 2>/dev/null", program, place - 1);
    FILE *answer = popen(command.c_str(), "r");
    if (answer) {
        if (fgets(line, sizeof line, answer)) line[strcspn(line, "\n")] = 0;
        pclose(answer);
    }
    return *line ? line : dtc_text("%s+0x%x", program, place);
}

static std::string words_for(const doing &a, access_kind kind) {
    const dtc_fiber &fiber = dtc.fibers[a.thread];
    const char *verb = kind == ATOMIC ? "atomically changes" : kind == READ ? "reads" : "writes";
    return "\n    " + dtc_thread_name(blocks[a.block - first_block], fiber.index) +
           dtc_text(" %s %d bytes: ", verb, a.bytes) + in_words(a.at) + "\n        called from " +
           in_words(a.called_from);
}

static void report(const void *p, bool shared, const doing &now, access_kind kind,
    const doing &then, access_kind earlier) {
    const char *missing = now.block != then.block ? "the blocks are in no order"
                          : now.thread / DTC_WARP == then.thread / DTC_WARP
                              ? "no __syncwarp or __syncthreads between them"
                              : "no __syncthreads between them";
    dtc_fail(cudaErrorLaunchFailure,
        dtc_text("race in %s memory at %p, %s", shared ? "shared" : "global", p, missing) +
            words_for(then, earlier) + words_for(now, kind));
}

// ==== 4. Every access ===========================================================================

// Most are of a thread's own variables.
static inline bool watched(const void *p) {
    uintptr_t at = reinterpret_cast<uintptr_t>(p);
    return dtc.self && at - reinterpret_cast<uintptr_t>(dtc.self->stack) >= DTC_STACK_BYTES &&
           at - reinterpret_cast<uintptr_t>(&dtc) >= sizeof dtc && threads[running()].in_kernel &&
           dtc.failure == cudaSuccess;
}

static void access(const void *p, size_t bytes, access_kind kind, const void *pc) {
    if (!launching || !watched(p)) return;
    const doing now = doing_now(pc, bytes);
    const bool shared = dtc_in_shared(p, 1);
    uintptr_t at = reinterpret_cast<uintptr_t>(p), end = at + bytes;
    while (at < end) {
        shadow_page *page = page_at(at);
        if (page->grain == 4 && (at % 4 != 0 || (end - at) < 4)) split(page);
        access_kind earlier;
        const doing *conflict = touch(page, at % PAGE / page->grain, kind, now, shared, &earlier);
        if (conflict) {
            report(reinterpret_cast<void *>(at), shared, now, kind, *conflict, earlier);
            for (;;) // as dtc_abandon
                dtc_give_way();
        }
        at += page->grain;
    }
}

// ==== 5. Order ==================================================================================

struct race_observer : dtc_observer {
    race_observer() { dtc.observer = this; }

    void launch_starts() override {
        launching = true;
        first_block = block + 1;
        blocks.clear();
        released.clear();
        if (pages.size() > MOST_PAGES) {
            pages.clear();
            memset(recent, 0, sizeof recent);
        }
    }

    void launch_ends() override { launching = false; }

    void block_starts() override {
        block++;
        epoch = 0;
        blocks.push_back(blockIdx);
        acquisitions.clear();
        for (int i = 0; i < dtc.threads; i++) {
            memset(threads[i].seen, 0, sizeof threads[i].seen);
            clock_of(i) = 1;
            threads[i].in_kernel = false;
            fences[i].block = 0;
        }
    }

    void thread_starts() override {
        threads[running()].in_kernel = true;
        threads[running()].depth = 0;
    }

    void barrier_opens() override { epoch++; }

    void warp_synced(int warp, unsigned mask) override {
        thread_clock *lanes = threads + warp * DTC_WARP;
        uint32_t all[DTC_WARP] = {};
        for (int lane = 0; lane < DTC_WARP; lane++)
            for (int i = 0; i < DTC_WARP && (mask >> lane & 1); i++)
                all[i] = lanes[lane].seen[i] > all[i] ? lanes[lane].seen[i] : all[i];
        for (int lane = 0; lane < DTC_WARP; lane++) {
            if (!(mask >> lane & 1)) continue;
            memcpy(lanes[lane].seen, all, sizeof all);
            lanes[lane].seen[lane]++;
        }
    }

    void fenced() override {
        int me = running();
        fences[me].block = block;
        fences[me].epoch = epoch;
        fences[me].warp = me / DTC_WARP;
        memcpy(fences[me].seen, threads[me].seen, sizeof fences[me].seen);
        clock_of(me)++;
    }

    void read(const void *p, size_t bytes) override { access(p, bytes, READ, nullptr); }
    void written(const void *p, size_t bytes) override { access(p, bytes, WRITE, nullptr); }

    void changed(const void *p, size_t bytes) override {
        access(p, bytes, ATOMIC, nullptr);
        releases &list = released[p];
        if (!list.empty())
            acquisitions.push_back({ doing_now(nullptr, bytes), &list, list.size() });
        if (fences[running()].block) list.push_back(fences[running()]);
    }

    uint64_t path() override {
        const thread_clock &t = threads[running()];
        uint64_t hash = 0;
        for (int i = 0; i < t.depth && i < MOST_CALLS; i++)
            hash = (hash ^ reinterpret_cast<uintptr_t>(t.calls[i])) * 0x9e3779b97f4a7c15u;
        return hash;
    }

    std::string calls(int thread) override {
        std::string text;
        const thread_clock &t = threads[thread];
        for (int i = 1; i < 4; i++) // 0 is the wait itself
            text += "\n        called from " + in_words(place_of(call(t, i)));
        return text;
    }
};

static race_observer observer;

// ==== 6. What the compiler calls ================================================================

// Calls are counted from the kernel on; where a thread ends more of them return.
extern "C" {

void __tsan_init() {}

void __tsan_func_entry(void *caller) {
    if (!launching || !dtc.self) return;
    thread_clock &t = threads[running()];
    if (t.depth < MOST_CALLS) t.calls[t.depth] = caller;
    t.depth++;
}

void __tsan_func_exit() {
    if (launching && dtc.self && threads[running()].depth > 0) threads[running()].depth--;
}

#define ACCESS(n) \
    void __tsan_read##n(void *p) { access(p, n, READ, HERE); } \
    void __tsan_write##n(void *p) { access(p, n, WRITE, HERE); } \
    void __tsan_unaligned_read##n(void *p) { access(p, n, READ, HERE); } \
    void __tsan_unaligned_write##n(void *p) { access(p, n, WRITE, HERE); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

// Volatile accesses are as atomic as CUDA makes them, and order nothing.
#define VOLATILE(n) \
    void __tsan_volatile_read##n(void *p) { access(p, n, ATOMIC, HERE); } \
    void __tsan_volatile_write##n(void *p) { access(p, n, ATOMIC, HERE); }
VOLATILE(1)
VOLATILE(2)
VOLATILE(4)
VOLATILE(8)

void __tsan_read_range(void *p, size_t bytes) { access(p, bytes, READ, HERE); }
void __tsan_write_range(void *p, size_t bytes) { access(p, bytes, WRITE, HERE); }
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}

// The host's atomics; kernels use CUDA's.
#define FETCH(bits, T, op) \
    T __tsan_atomic##bits##_fetch_##op(T *p, T v, int) { return __atomic_fetch_##op(p, v, 5); }
#define ATOMICS(bits, T) \
    T __tsan_atomic##bits##_load(const T *p, int) { return __atomic_load_n(p, 5); } \
    void __tsan_atomic##bits##_store(T *p, T v, int) { __atomic_store_n(p, v, 5); } \
    T __tsan_atomic##bits##_exchange(T *p, T v, int) { return __atomic_exchange_n(p, v, 5); } \
    int __tsan_atomic##bits##_compare_exchange_strong(T *p, T *old, T v, int, int) { \
        return __atomic_compare_exchange_n(p, old, v, false, 5, 5); \
    } \
    FETCH(bits, T, add) FETCH(bits, T, sub) FETCH(bits, T, and) FETCH(bits, T, or)
ATOMICS(8, uint8_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)

void *__real_memcpy(void *to, const void *from, size_t bytes);
void *__real_memset(void *to, int value, size_t bytes);

void *__wrap_memcpy(void *to, const void *from, size_t bytes) {
    access(from, bytes, READ, HERE);
    access(to, bytes, WRITE, HERE);
    return __real_memcpy(to, from, bytes);
}

void *__wrap_memset(void *to, int value, size_t bytes) {
    access(to, bytes, WRITE, HERE);
    return __real_memset(to, value, bytes);
}

} // extern "C"
