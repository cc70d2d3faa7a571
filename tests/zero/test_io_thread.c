/* test_io_thread.c - dt_zero.h, section 13: one I/O thread for offload and background saves

   The io table of these tests wraps the default one. It notes which thread accesses which file, in
   which order and at which priority. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>

static int threads; /* threads that the rank has started */
static int counted_create(
    pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg) {
    __atomic_add_fetch(&threads, 1, __ATOMIC_RELAXED);
    return pthread_create(thread, attr, run, arg);
}
#define pthread_create counted_create
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/support/check.h"
#include <sys/resource.h>

enum { ROWS = 512, COLUMNS = 1024, FDS = 256 };
enum { OTHER = 0, OFFLOADED, SAVED };

typedef struct watch {
    dt_zero *zero;
    pthread_t rank;
    int kind[FDS];
    int64_t unsynced[FDS], most_unsynced, evicted; /* bytes of the saved files */
    int offloads, saves;                           /* transfers that the I/O thread made */
    int strangers;       /* transfers of an offloaded file by another thread */
    int at_gate;         /* atomic; 1 when this piece waits */
    int gate;            /* 1: the next piece of a save waits for a request of offload */
    int waited, between; /* pieces of the save between this piece and the offload's transfer */
    int nice_offload, nice_save;
    pthread_t thread;
} watch;

static char root[64], offload_dir[80], save_dir[80];

static int watch_open(void *user, const char *path, int mode) {
    watch *w = (watch *)user;
    int fd = dt_io_default()->open(NULL, path, mode);
    if (fd >= 0 && CHECK(fd < FDS)) {
        w->kind[fd] = strstr(path, ".offload") ? OFFLOADED : strstr(path, ".tmp/") ? SAVED : OTHER;
        w->unsynced[fd] = 0;
    }
    return fd;
}

/* Waits until a request of offload is the first one. */
static void wait_at_gate(watch *w) {
    dt__io_thread *t = w->zero->io_thread;
    __atomic_store_n(&w->at_gate, 1, __ATOMIC_RELEASE);
    for (int k = 0, there = 0; !there && CHECK(k < 5000); k++) {
        pthread_mutex_lock(&t->lock);
        for (const dt__io_request *r = t->first; r; r = r->next) there |= !r->background;
        pthread_mutex_unlock(&t->lock);
        dt_host_default()->sleep(NULL, 0.001);
    }
    w->gate = 0;
    w->waited = 1;
}

static void watch_transfer(watch *w, int fd, int64_t bytes) {
    if (pthread_equal(pthread_self(), w->rank)) {
        w->strangers += w->kind[fd] == OFFLOADED;
        return;
    }
    if (w->offloads + w->saves == 0) w->thread = pthread_self();
    w->strangers += !pthread_equal(pthread_self(), w->thread);
    if (w->kind[fd] == SAVED) {
        w->saves++;
        w->nice_save = getpriority(PRIO_PROCESS, 0);
        if (w->waited == 1) w->between++;
        if (w->gate) wait_at_gate(w);
        w->unsynced[fd] += bytes;
        if (w->unsynced[fd] > w->most_unsynced) w->most_unsynced = w->unsynced[fd];
    } else if (w->kind[fd] == OFFLOADED) {
        w->offloads++;
        w->nice_offload = getpriority(PRIO_PROCESS, 0);
        if (w->waited == 1) w->waited = 2;
    }
}

static int64_t watch_pread(void *user, int fd, void *buf, size_t bytes, int64_t offset) {
    watch_transfer((watch *)user, fd, (int64_t)bytes);
    return dt_io_default()->pread(NULL, fd, buf, bytes, offset);
}

static int64_t watch_pwrite(void *user, int fd, const void *buf, size_t bytes, int64_t offset) {
    watch_transfer((watch *)user, fd, (int64_t)bytes);
    return dt_io_default()->pwrite(NULL, fd, buf, bytes, offset);
}

static int watch_evict(void *user, int fd, int64_t bytes, int64_t offset) {
    watch *w = (watch *)user;
    if (w->kind[fd] == SAVED) {
        w->evicted += w->unsynced[fd];
        w->unsynced[fd] = 0;
        CHECK(offset == 0 && bytes > 0);
    }
    return dt_io_default()->sync_and_evict(NULL, fd, bytes, offset);
}

typedef struct job {
    int offloads, background;
    watch *watch;
} job;

static dt_status job_rank(dt_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    watch *w = j->watch;
    static float x[COLUMNS], y[ROWS], state[ROWS * COLUMNS], again[ROWS * COLUMNS];
    w->rank = pthread_self();
    threads = 0; /* without the thread that dt_run has started for this rank */
    dt_tensor *p = dt_param(ctx, "w", DT_SHAPE(ROWS, COLUMNS), DT_NORMAL(0.1));
    dt_zero_desc d;
    memset(&d, 0, sizeof d);
    d.stage = 1;
    d.offload_optim = j->offloads ? offload_dir : NULL;
    w->zero = dt_zero_make(ctx, d);
    dt_checkpoint_desc c;
    memset(&c, 0, sizeof c);
    c.dir = save_dir;
    c.background = j->background;
    dt_checkpoint *checkpoint = dt_checkpoint_open(w->zero, c);
    for (int i = 0; i < COLUMNS; i++) x[i] = (float)(i % 7) / 7;
    dt_backward(dt_mse(dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(1, COLUMNS), x), p, NULL),
        dt_input(ctx, DT_F32, DT_SHAPE(1, ROWS), y), ROWS));
    dt_zero_step(w->zero, 0.01);
    dt_reset(ctx);
    dt_zero_state(w->zero, 0, p, state);
    w->gate = j->offloads && j->background;
    dt_checkpoint_save(checkpoint);
    int waits = j->offloads && j->background;
    for (int k = 0; waits && !__atomic_load_n(&w->at_gate, __ATOMIC_ACQUIRE) && CHECK(k < 5000);
         k++)
        dt_host_default()->sleep(NULL, 0.001);
    /* with offload this reads the state from the disk, while the save is in progress */
    dt_zero_state(w->zero, 0, p, again);
    CHECK(memcmp(state, again, sizeof state) == 0);
    CHECK(dt_checkpoint_close(checkpoint) == DT_OK);
    return dt_error(ctx);
}

static void run(int offloads, int background) {
    watch w;
    job j = { offloads, background, &w };
    dt_io io = *dt_io_default();
    int nice = getpriority(PRIO_PROCESS, 0);
    memset(&w, 0, sizeof w);
    io.user = &w;
    io.open = watch_open;
    io.pread = watch_pread;
    io.pwrite = watch_pwrite;
    io.sync_and_evict = watch_evict;
    CHECK(dt_run((dt_run_desc){ .ranks = 1, .timeout_s = 60, .io = &io }, job_rank, &j) == DT_OK);
    printf("offload %d, background %d: %d threads, %d transfers of offload, %d of saves, "
           "%d between, most unsynced %lld bytes\n",
        offloads, background, threads, w.offloads, w.saves, w.between, (long long)w.most_unsynced);
    CHECK_MSG(threads == (offloads || background), "%d threads", threads);
    CHECK((w.offloads > 0) == offloads && (w.saves > 0) == background && w.strangers == 0);
    if (!background) return;
    /* a save is written to the disk as it goes, in small pieces */
    CHECK_MSG(w.most_unsynced < DT__SYNC_BYTES + DT__IO_BUFFER && w.evicted > 4 * DT__SYNC_BYTES,
        "%lld, %lld", (long long)w.most_unsynced, (long long)w.evicted);
    CHECK(w.nice_save == (offloads ? nice : 19));
    if (!offloads) return;
    CHECK_MSG(w.waited == 2 && w.between == 0,
        "a request of offload waited for %d pieces of a save", w.between);
    CHECK(w.nice_offload == nice);
}

int main(void) {
    char command[100];
    snprintf(root, sizeof root, "/tmp/dt_test_io_thread.XXXXXX");
    if (!CHECK(mkdtemp(root) != NULL)) return check_done("test_io_thread");
    snprintf(offload_dir, sizeof offload_dir, "%s", root);
    for (int way = 0; way < 4; way++) {
        snprintf(save_dir, sizeof save_dir, "%s/%d", root, way);
        run(way & 1, way >> 1);
    }
    snprintf(command, sizeof command, "rm -r %s", root);
    CHECK(system(command) == 0);
    return check_done("test_io_thread");
}
