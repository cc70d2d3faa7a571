/* test_checkpoint_faults.c - dt_zero.h, section 3: checkpoints under power failures, failing disks,
   damaged bits and user errors

       test_checkpoint_faults              a sample of each campaign
       test_checkpoint_faults full         all of it: make faults
       test_checkpoint_faults PART [full]  one part: disk power calls room damage jobs

   A tiny model is trained on a simulated disk (disk_sim.h), and saved after step 1 (A) and step 2
   (B). After any fault a new job must find A or B with equal bits, and it must find every save that
   was reported as complete. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <pthread.h>

/* 1 on a rank that cannot start threads. */
static _Thread_local int no_threads;
static int some_threads(
    pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg) {
    return no_threads ? EAGAIN : pthread_create(thread, attr, run, arg);
}
#define pthread_create some_threads
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/support/check.h"
#include "tests/support/jitter.h"
#include "tests/zero/disk_sim.h"
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS = 4, OUT = 3, IN = 5, VALUES = OUT * IN + OUT, LAST = 3 };
static const char config_text[] = "{\"name\":\"tiny\"}", beside_text[] = "{\"n_layer\":1}\n";

/* ---- the model, and the contents of its checkpoint ---- */

/* Values, first and second moments of w and b; and the extra state that the program saves. */
typedef struct state {
    float value[3][VALUES];
    double seen[2];
} state;
typedef struct model {
    dt_tensor *w, *b;
    dt_zero *zero;
} model;

static model model_make(dt_ctx *ctx, int stage) {
    dt_zero_desc d;
    model m;
    memset(&d, 0, sizeof d);
    d.stage = stage;
    m.w = dt_param(ctx, "w", DT_SHAPE(OUT, IN), DT_NORMAL(0.5));
    m.b = dt_param(ctx, "b", DT_SHAPE(OUT), DT_ZEROS);
    m.zero = dt_zero_make(ctx, d);
    return m;
}

static void model_step(dt_ctx *ctx, const model *m, int step, double *seen) {
    int rank = dt_comm_rank(dt_world(ctx)), ranks = dt_comm_size(dt_world(ctx));
    float x[2 * IN], y[2 * OUT];
    for (int i = 0; i < 2 * IN; i++) x[i] = (float)((step * 37 + rank * 11 + i * 7) % 19) / 19;
    for (int i = 0; i < 2 * OUT; i++) y[i] = (float)((step * 5 + rank * 3 + i) % 7) / 7;
    dt_tensor *out = dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(2, IN), x), m->w, m->b);
    dt_backward(dt_mse(out, dt_input(ctx, DT_F32, DT_SHAPE(2, OUT), y), 2 * OUT * ranks));
    dt_zero_step(m->zero, 0.05);
    dt_reset(ctx);
    seen[0] = step * 16;
    seen[1] = 0.1 * step;
}

static void state_read(const model *m, const double *seen, state *s) {
    memset(s, 0, sizeof *s);
    dt_read(m->w, s->value[0]);
    dt_read(m->b, s->value[0] + OUT * IN);
    for (int k = 0; k < 2; k++) {
        dt_zero_state(m->zero, k, m->w, s->value[1 + k]);
        dt_zero_state(m->zero, k, m->b, s->value[1 + k] + OUT * IN);
    }
    memcpy(s->seen, seen, sizeof s->seen);
}

static void silent(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

/* ---- a job that saves ---- */

typedef struct job {
    int ranks, stage, keep, background;
    int first, last;    /* the first and last step after which the job saves */
    int resume;         /* 1: the job resumes from the newest checkpoint */
    int count;          /* which calls are counted: COUNT_SAVES or COUNT_ALL */
    int without_thread; /* the rank that cannot start a writer thread; 0: every rank can */
    int zero_first;     /* 1: dt_zero_free before dt_checkpoint_close */
    const char *dir;
    disk_seat seat[RANKS];
    state saved[LAST + 1];   /* after each step */
    dt_status status[RANKS]; /* the first error that a call returned, or DT_OK */
    dt_status error[RANKS];
    int64_t loaded;
    dt_status result;
    dt_report report;
    double took_s;
} job;
enum { COUNT_SAVES = 0, COUNT_ALL };

static job job_make(disk *d, int ranks, int first, int last) {
    job j;
    memset(&j, 0, sizeof j);
    j.ranks = ranks;
    j.stage = 2;
    j.dir = "ck";
    j.first = first;
    j.last = last;
    for (int r = 0; r < ranks; r++) {
        j.seat[r].disk = d;
        j.seat[r].root = "";
        j.seat[r].rank = r;
    }
    return j;
}

static dt_checkpoint_desc checkpoint_desc(const char *dir, const dt_extra_state *saved) {
    dt_checkpoint_desc d;
    memset(&d, 0, sizeof d);
    d.dir = dir;
    d.extra_state = saved;
    d.n_extra_state = saved != NULL;
    d.config = config_text;
    d.config_json = beside_text;
    return d;
}

/* Saves, and marks in the log when the save is reported as complete; in the background a poll
   reports it. */
static dt_status job_save(dt_ctx *ctx, job *j, dt_checkpoint *c, int step) {
    dt_status status = dt_checkpoint_save(c);
    /* the save continues during the next steps */
    if (status == DT_OK && j->zero_first) return status;
    while (status == DT_OK && j->background && !dt_checkpoint_poll(c))
        dt_ctx_host(ctx)->sleep(NULL, 0);
    if (status == DT_OK) status = dt_error(ctx);
    if (status == DT_OK) disk_mark(j->seat[0].disk, step);
    return status;
}

static dt_status job_rank(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    int r = dt_ctx_rank(ctx);
    double seen[2] = { 0, 0 };
    dt_extra_state saved = { "seen", seen, 2 };
    /* gives the rank its own seat before the first call */
    *(dt_io *)dt_ctx_io(ctx) = disk_io(&j->seat[r]);
    model m = model_make(ctx, j->stage);
    dt_checkpoint_desc d = checkpoint_desc(j->dir, &saved);
    d.keep = j->keep;
    d.background = j->background;
    j->seat[r].counting = j->count == COUNT_ALL;
    dt_checkpoint *c = dt_checkpoint_open(m.zero, d);
    int64_t from = j->resume ? dt_checkpoint_load(c, NULL) : 0;
    if (r == 0) j->loaded = from;
    j->status[r] = dt_error(ctx);
    no_threads = j->without_thread && r == j->without_thread;
    for (int step = (int)from + 1; step <= j->last && dt_error(ctx) == DT_OK; step++) {
        state s;
        model_step(ctx, &m, step, seen);
        state_read(&m, seen, &s);
        if (r == 0) j->saved[step] = s;
        if (step < j->first) continue;
        /* with zero_first the writer thread may be reading it */
        if (!j->zero_first) j->seat[r].counting = 1;
        j->status[r] = job_save(ctx, j, c, step);
        if (!j->zero_first) j->seat[r].counting = j->count == COUNT_ALL;
    }
    no_threads = 0;
    if (j->zero_first) dt_zero_free(m.zero);
    dt_status closed = dt_checkpoint_close(c);
    if (j->status[r] == DT_OK) j->status[r] = closed;
    j->error[r] = dt_error(ctx);
    return j->error[r];
}

static void job_run(job *j) {
    dt_run_desc d;
    dt_host host = *dt_host_default();
    host.log = silent;
    memset(&d, 0, sizeof d);
    d.ranks = j->ranks;
    d.timeout_s = 5;
    d.host = &host;
    d.report = &j->report;
    for (int r = 0; r < j->ranks; r++) {
        j->seat[r].calls = 0;
        j->seat[r].counting = 0;
    }
    double begin = host.now(host.user);
    j->result = dt_run(d, job_rank, j);
    j->took_s = host.now(host.user) - begin;
}

/* ---- a new job that loads ---- */

typedef struct found {
    /* what dt_checkpoint_load returned; also -1 if the folder could not be opened */
    int64_t step;
    state s;
    char error[600], notices[1500];
    char path[1024];
    int changed; /* 1: a failed load changed values or moments */
    int resaved; /* set by found_at(.., 1): DT_OK if the job trained a step and saved */
} found;

static void found_log(void *user, int level, int rank, const char *text) {
    found *f = (found *)user;
    size_t n = strlen(f->notices);
    (void)rank;
    if (level == DT_LOG_NOTICE) snprintf(f->notices + n, sizeof f->notices - n, "%s\n", text);
}

/* Copies all values and state of a rank from memory. */
static size_t memory_of(const dt_zero *zero, char *out) {
    size_t n = 0;
    for (int u = 0; u < zero->n_buckets; u++) {
        const dt__zero_bucket *z = &zero->buckets[u];
        void *array[3] = { z->bucket.shard, z->state[0], z->state[1] };
        for (int k = 0; k < 3; k++, n += z->count * sizeof(float))
            if (out) memcpy(out + n, array[k], z->count * sizeof(float));
    }
    return n;
}

/* Loads checkpoint `from` on one rank whose folder is `dir` (NULL: load only). If `again`, trains a
   step and saves. */
static void found_at(found *f, disk *d, const char *dir, const char *from, int again) {
    disk_seat seat = { d, "", 0, 0, 0 };
    dt_io io = disk_io(&seat);
    dt_host host = *dt_host_default();
    dt_ctx_desc desc;
    double seen[2] = { 0, 0 };
    dt_extra_state saved = { "seen", seen, 2 };
    memset(f, 0, sizeof *f);
    memset(&desc, 0, sizeof desc);
    host.user = f;
    host.log = found_log;
    desc.host = &host;
    desc.io = &io;
    dt_ctx *ctx = dt_ctx_make(desc);
    model m = model_make(ctx, 1);
    dt_checkpoint_desc cd = checkpoint_desc(dir, &saved);
    cd.keep = again ? 1 : 0;
    dt_checkpoint *c = dt_checkpoint_open(m.zero, cd);
    size_t bytes = memory_of(m.zero, NULL);
    char *before = (char *)malloc(2 * bytes), *after = before + bytes;
    memory_of(m.zero, before);
    f->step = c ? dt_checkpoint_load(c, from) : -1;
    memory_of(m.zero, after);
    f->changed = f->step < 0 && memcmp(before, after, bytes) != 0;
    if (f->step > 0) state_read(&m, seen, &f->s);
    if (f->step > 0 && strcmp(dt_checkpoint_config(c), config_text) != 0) f->changed = 1;
    snprintf(f->path, sizeof f->path, "%s", dt_checkpoint_path(c));
    if (again && f->step >= 0) {
        model_step(ctx, &m, (int)f->step + 1, seen);
        f->resaved = dt_checkpoint_save(c);
    }
    dt_checkpoint_close(c);
    snprintf(f->error, sizeof f->error, "%s", dt_error_text(ctx));
    dt_ctx_free(ctx);
    free(before);
}

static int same_state(const state *a, const state *b) { return memcmp(a, b, sizeof *a) == 0; }

/* Says what is wrong with a load that must find a step in [least, most]; returns NULL if it is
   correct. */
static const char *found_wrong(const found *f, const job *j, int least, int most) {
    if (f->step < 0) return "the load failed";
    if (f->step < least) return "a completed save is lost";
    if (f->step > most) return "a step that was never saved";
    if (f->step > 0 && !same_state(&f->s, &j->saved[f->step]))
        return "the values are not the saved ones";
    return f->changed ? "the config is not the saved one" : NULL;
}

/* 1 if a folder holds a name that ends in .tmp. */
static int leftovers(const disk *d) {
    int n = 0;
    for (int i = 0; i < d->n_entries; i++) {
        size_t bytes = strlen(d->entry[i].name);
        n += bytes > 4 && strcmp(d->entry[i].name + bytes - 4, ".tmp") == 0;
    }
    return n;
}

/* A campaign stops after this many failures, because further ones say the same. */
enum { ENOUGH = 12 };
static int check_enough(int before) { return check_failed - before >= ENOUGH; }

/* ---- the simulated disk itself ---- */

enum { UNSYNCED, UNSYNCED_FOLDER, IN_PLACE, PROPERLY, WAYS };

/* Replaces an old text by a new one, safely or unsafely. Returns in how many cuts the file holds
   neither of them. */
static int disk_way(int way, int *old_text, int *new_text) {
    disk d;
    disk_seat seat = { &d, "", 0, 0, 0 };
    dt_io io = disk_io(&seat);
    char texts[2][1500];
    int bad = 0;
    disk_make(&d);
    memset(texts[0], 'a', sizeof texts[0]);
    memset(texts[1], 'b', sizeof texts[1]);
    for (int k = 0; k < 2; k++) {
        const char *name = way == IN_PLACE ? "f" : "f.tmp";
        int fd = io.open(&seat, name, way == IN_PLACE && k ? DT_IO_WRITE : DT_IO_CREATE);
        int folder = io.open(&seat, "./", DT_IO_READ);
        io.resize(&seat, fd, 0);
        io.pwrite(&seat, fd, texts[k], sizeof texts[k], 0);
        if (k == 0 || way != UNSYNCED) CHECK(io.fsync(&seat, fd) == 0);
        io.close(&seat, fd);
        if (way != IN_PLACE) CHECK(io.rename(&seat, "f.tmp", "f") == 0);
        if (k == 0 || way != UNSYNCED_FOLDER) CHECK(io.fsync(&seat, folder) == 0);
        io.close(&seat, folder);
        disk_mark(&d, k);
    }
    CHECK(d.open == 0);
    for (long i = 0; i < 400 * (d.n_ops + 1); i++) {
        long end = i % (d.n_ops + 1);
        disk image;
        if (!disk_marked(&d, end, 0)) continue;
        disk_cut(&image, &d, end, (uint64_t)i);
        int node = disk_find(&image, "", "f"), whole = 0;
        for (int k = 0; k < 2 && node >= 0; k++)
            if (image.node[node].size == sizeof texts[k] &&
                memcmp(image.node[node].data, texts[k], sizeof texts[k]) == 0) {
                whole = 1;
                ++*(k ? new_text : old_text);
            }
        bad += !whole ||
               (way == PROPERLY && disk_marked(&d, end, 1) && image.node[node].data[0] != 'b');
        disk_free(&image);
    }
    disk_free(&d);
    return bad;
}

static void each_name(void *arg, const char *name) { strcat((char *)arg, name); }

/* The simulated disk refuses the calls that a file system refuses. */
static void disk_refuses(void) {
    disk d;
    disk_seat seat = { &d, "", 0, 0, 0 };
    dt_io io = disk_io(&seat);
    char names[200] = "";
    disk_make(&d);
    static const char *const known[] = { "d", "e" };
    CHECK(io.open(&seat, "a/b", DT_IO_CREATE) < 0 && errno == ENOENT);
    CHECK(io.make_folder(&seat, "a") == 0 && io.make_folder(&seat, "a/") < 0 && errno == EEXIST);
    CHECK(io.open(&seat, "a/b", DT_IO_WRITE) < 0 && errno == ENOENT);
    int fd = io.open(&seat, "a/b", DT_IO_LOCK), other = io.open(&seat, "/a//./b", DT_IO_READ);
    int folder = io.open(&seat, "a", DT_IO_READ);
    CHECK(fd >= 0 && other >= 0 && folder >= 0 && io.open(&seat, "a/b", DT_IO_PRIVATE) < 0 &&
          errno == EEXIST);
    CHECK(io.open(&seat, "a", DT_IO_WRITE) < 0 && errno == EISDIR && io.size(&seat, folder) < 0 &&
          errno == EISDIR);
    CHECK(io.pwrite(&seat, other, "x", 1, 0) < 0 && errno == EBADF);
    CHECK(io.pwrite(&seat, fd, "x", 1, 2) == 1 && io.size(&seat, other) == 3);
    CHECK(io.lock(&seat, fd) == 0 && io.lock(&seat, other) < 0 && errno == EWOULDBLOCK);
    CHECK(io.close(&seat, fd) == 0 && io.lock(&seat, other) == 0);
    CHECK(io.remove(&seat, "a") < 0 && errno == EISDIR);
    CHECK(io.remove_folder(&seat, "a", known, 2) < 0 && errno == ENOTEMPTY);
    CHECK(io.make_folder(&seat, "c") == 0 && io.rename(&seat, "c", "a") < 0 && errno == ENOTEMPTY);
    CHECK(
        io.rename(&seat, "a/b", "b") < 0 && errno == EXDEV && io.rename(&seat, "a/b", "a/d") == 0);
    CHECK(io.list_folder(&seat, "a", each_name, names) == 0 && strcmp(names, "d") == 0);
    CHECK(io.remove_folder(&seat, "a", known, 2) == 0);
    CHECK(io.remove_folder(&seat, "a", known, 2) < 0 && errno == ENOENT);
    CHECK(io.remove(&seat, "a/d") < 0 && errno == ENOENT);
    CHECK(io.close(&seat, other) == 0 && io.close(&seat, folder) == 0 && io.close(&seat, fd) < 0 &&
          d.open == 0);
    disk_free(&d);
}

static void part_disk(int full) {
    int n[WAYS][2] = { { 0 } }, bad[WAYS];
    (void)full;
    for (int way = 0; way < WAYS; way++) bad[way] = disk_way(way, &n[way][0], &n[way][1]);
    CHECK_MSG(bad[UNSYNCED] > 0, "a file without fsync survived every cut");
    CHECK_MSG(bad[IN_PLACE] > 0, "a file overwritten in place survived every cut");
    CHECK_MSG(bad[UNSYNCED_FOLDER] == 0 && n[UNSYNCED_FOLDER][0] > 0 && n[UNSYNCED_FOLDER][1] > 0,
        "a rename in a folder without fsync: %d bad, %d old, %d new", bad[UNSYNCED_FOLDER],
        n[UNSYNCED_FOLDER][0], n[UNSYNCED_FOLDER][1]);
    CHECK_MSG(bad[PROPERLY] == 0 && n[PROPERLY][0] > 0 && n[PROPERLY][1] > 0,
        "fsync, rename and fsync of the folder: %d bad", bad[PROPERLY]);
    disk_refuses();
}

/* ---- 1. the power fails ---- */

typedef struct cuts {
    int n, nothing, a, b, twice, again;
} cuts;

/* One power cut. In some cases the resumed job then trains and saves, or the power fails a second
   time while the resumed job runs. */
static void power_cut(const job *j, const disk *d, long end, uint64_t seed, cuts *sum) {
    disk image, second;
    found f;
    int least = disk_marked(d, end, 2) ? 2 : disk_marked(d, end, 1);
    int again = seed % 8 == 7;
    disk_cut(&image, d, end, seed);
    found_at(&f, &image, j->dir, NULL, again);
    const char *wrong = found_wrong(&f, j, least, 2);
    CHECK_MSG(!wrong,
        "%d ranks, keep %d, background %d: cut after %ld of %ld, seed %llu: step %lld of at least "
        "%d: "
        "%s: %s%s",
        j->ranks, j->keep, j->background, end, d->n_ops, (unsigned long long)seed,
        (long long)f.step, least, wrong, f.error, f.notices);
    if (again && !wrong)
        CHECK_MSG(f.resaved == DT_OK && !leftovers(&image),
            "cut after %ld, seed %llu: the next job could not save: %s", end,
            (unsigned long long)seed, f.error);
    sum->n++;
    *(f.step == 2 ? &sum->b : f.step == 1 ? &sum->a : &sum->nothing) += 1;
    sum->again += again;
    if (again && !wrong) {
        int64_t before = f.step;
        long at = image.settled + (long)(seed / 8 % (uint64_t)(image.n_ops - image.settled + 1));
        disk_cut(&second, &image, at, seed);
        found_at(&f, &second, j->dir, NULL, 0);
        if (f.step != before + 1) wrong = found_wrong(&f, j, (int)before, (int)before);
        CHECK_MSG(!wrong,
            "cut after %ld, seed %llu, and after %ld of the resumed job: %lld instead of "
            "%lld: %s: %s",
            end, (unsigned long long)seed, at, (long long)f.step, (long long)before, wrong,
            f.error);
        disk_free(&second);
        sum->twice++;
    }
    disk_free(&image);
}

typedef struct power_case {
    int ranks, stage, keep, background, folder;
} power_case;
enum { MADE_BY_JOB, SETTLED, NOT_SYNCED, BELOW };

static void part_power(int full) {
    static const power_case cases[] = {
        { 2, 2, 0, 0, MADE_BY_JOB },
        { 4, 1, 1, 0, MADE_BY_JOB },
        { 2, 1, 0, 1, BELOW },
        { 4, 2, 1, 1, SETTLED },
        { 2, 3, 1, 0, SETTLED },
        { 4, 0, 2, 1, NOT_SYNCED },
    };
    int n_cases = (int)(sizeof cases / sizeof cases[0]), before = check_failed;
    cuts sum;
    memset(&sum, 0, sizeof sum);
    for (int k = 0; k < n_cases && !check_enough(before); k++) {
        disk d;
        disk_seat seat = { &d, "", 0, 0, 0 };
        disk_make(&d);
        job j = job_make(&d, cases[k].ranks, 1, 2);
        j.stage = cases[k].stage;
        j.keep = cases[k].keep;
        j.background = cases[k].background;
        if (cases[k].folder == BELOW) disk_mkdir(&seat, "runs");
        if (cases[k].folder == BELOW) j.dir = "runs/ck/";
        if (cases[k].folder == SETTLED || cases[k].folder == NOT_SYNCED) disk_mkdir(&seat, "ck");
        if (cases[k].folder != NOT_SYNCED) d.settled = d.n_ops;
        job_run(&j);
        CHECK_MSG(
            j.result == DT_OK && d.open == 0, "case %d: %s, %d open", k, j.report.text, d.open);
        CHECK(disk_marked(&d, d.n_ops, 1) && disk_marked(&d, d.n_ops, 2));
        for (long end = d.settled; end <= d.n_ops && !check_enough(before); end++)
            for (uint64_t seed = 0; seed < DISK_SEEDS; seed++) power_cut(&j, &d, end, seed, &sum);
        uint64_t state = (uint64_t)k;
        for (int i = 0;
             i < (full ? 240000 : 6000) / n_cases && j.result == DT_OK && !check_enough(before);
             i++) {
            /* a third of the cuts are near the end */
            long changes = d.n_ops - d.settled, last = i % 3 ? changes : changes / 4;
            long end = d.n_ops - (long)(disk_random(&state) % (uint64_t)(last + 1));
            power_cut(&j, &d, end, disk_random(&state) | DISK_SEEDS, &sum);
        }
        disk_free(&d);
    }
    printf("power: %d cuts: nothing %d, A %d, B %d; %d resumed, %d of these were cut again\n",
        sum.n, sum.nothing, sum.a, sum.b, sum.again, sum.twice);
    CHECK(sum.n >= (full ? 200000 : 6000) || check_failed > before);
    CHECK(sum.nothing > 0 && sum.a > 0 && sum.b > 0);
}

/* ---- 2. calls fail ---- */

/* Makes a disk that holds A, and a job that will save B on it. */
static void prepare(disk *d, job *j, int ranks, int background) {
    disk_make(d);
    *j = job_make(d, ranks, 1, 1);
    job_run(j);
    CHECK_MSG(j->result == DT_OK, "%s", j->report.text);
    j->first = j->last = 2;
    j->resume = 1;
    j->keep = 1;
    j->background = background;
}

/* Runs the job on a copy of the disk with a fault. */
static void faulty_run(job *j, disk *d, const disk *before, const disk_fault *fault) {
    disk_copy(d, before);
    d->fault = *fault;
    for (int r = 0; r < j->ranks; r++) j->seat[r].disk = d;
    job_run(j);
    d->fault.how = 0;
    d->fault.room = -1;
}

enum { EITHER = 0, MUST_FAIL, MUST_SUCCEED };

/* Either all ranks saved B, and B survives any power cut; or all ranks failed, A is intact, and B
   may exist or not. */
static void check_outcome(job *j, disk *d, const char *what, int want) {
    int ok = 0, failed = 0;
    disk image;
    found f;
    for (int r = 0; r < j->ranks; r++) {
        ok += j->status[r] == DT_OK && j->error[r] == DT_OK;
        failed += j->status[r] != DT_OK && j->error[r] != DT_OK;
    }
    int good = ok == j->ranks;
    CHECK_MSG(good || failed == j->ranks, "%s: %d ranks succeeded and %d failed: %s", what, ok,
        failed, j->report.text);
    CHECK_MSG(j->result == (good ? DT_OK : DT_ERR_IO), "%s: %s: %s", what,
        dt_status_name(j->result), j->report.text);
    CHECK_MSG(
        in_time(j->took_s, 4.5), "%s: ended after %.1f s: %s", what, j->took_s, j->report.text);
    CHECK_MSG(d->open == 0, "%s: %d descriptors left open", what, d->open);
    CHECK_MSG(want != MUST_FAIL || !good, "%s: the save succeeded", what);
    CHECK_MSG(want != MUST_SUCCEED || good, "%s: the save failed: %s", what, j->report.text);
    for (uint64_t seed = DISK_NOTHING; seed <= DISK_ALL; seed++) {
        disk_cut(&image, d, d->n_ops, seed);
        found_at(&f, &image, NULL, "ck", 0);
        const char *wrong = found_wrong(&f, j, good ? 2 : 1, 2);
        CHECK_MSG(!wrong,
            "%s: %s, but after a cut that keeps %s of the unsynced data, step %lld: %s: %s", what,
            good ? "it saved" : "it failed", seed ? "all" : "nothing", (long long)f.step, wrong,
            f.error);
        if (!good) {
            found_at(&f, &image, NULL, "ck/step-1", 0);
            wrong = found_wrong(&f, j, 1, 1);
            CHECK_MSG(
                !wrong, "%s: the previous checkpoint has changed: %s: %s", what, wrong, f.error);
        }
        if (seed == DISK_ALL) {
            found_at(&f, &image, "ck", NULL, 1);
            CHECK_MSG(f.step > 0 && f.resaved == DT_OK && !leftovers(&image),
                "%s: the next job could not save: %s", what, f.error);
        }
        disk_free(&image);
    }
}

typedef struct call_case {
    const char *name;
    int how, sticky, reason;
} call_case;
static const call_case call_cases[] = {
    { "ENOSPC once", DISK_FAILS, 0, ENOSPC },
    { "ENOSPC from that call on", DISK_FAILS, 1, ENOSPC },
    { "EIO once", DISK_FAILS, 0, EIO },
    { "EIO from that call on", DISK_FAILS, 1, EIO },
    { "EINTR once", DISK_INTERRUPTED, 0, EINTR },
    { "EINTR every second call", DISK_INTERRUPTED, 1, EINTR },
    { "one byte moved once", DISK_SHORT, 0, 0 },
    { "one byte moved from that call on", DISK_SHORT, 1, 0 },
};
enum { CALL_CASES = (int)(sizeof call_cases / sizeof call_cases[0]) };

/* The expected outcome of the save. It must succeed if the failed call cannot harm the new
   checkpoint: removing old checkpoints, removing leftovers of a broken save, closing files that
   were only read. Either outcome is allowed if all later calls fail too, because other calls may
   follow a removal; and for calls that open the folder, because a folder without locks gives only a
   notice. */
static int expected_outcome(const job *j, const disk *d, const call_case *c) {
    const char *p = d->hit_path;
    int of_old = strncmp(p, "ck/step-1", 9) == 0 || strstr(p, ".tmp") != NULL, harmless = 0;
    if (c->how != DISK_FAILS || !d->hits) return MUST_SUCCEED;
    if (strncmp(d->hit, "remove", 6) == 0) harmless = of_old;
    if (strcmp(d->hit, "close") == 0) harmless = !d->hit_writable;
    if (harmless) return c->sticky || j->count == COUNT_ALL ? EITHER : MUST_SUCCEED;
    /* lists the folder to find a name or to remove leftovers */
    if (strcmp(d->hit, "list") == 0) return EITHER;
    if (j->count == COUNT_SAVES) return MUST_FAIL;
    /* the text in the lock file only informs people */
    if (strstr(p, "ck/lock") || strncmp(p, "/proc/", 6) == 0) return EITHER;
    return MUST_FAIL;
}

/* Fails every call of a rank, or every `stride`-th, until the number exceeds the calls that the job
   makes. */
static void calls_of(
    const disk *before, const job *first, int rank, const call_case *c, int stride, int *runs) {
    int start = check_failed;
    for (long at = 1 + stride / 2; !check_enough(start); at += stride) {
        disk d;
        job j = *first;
        char what[300];
        disk_fault fault = { c->how, rank, at, c->sticky, c->reason, -1 };
        faulty_run(&j, &d, before, &fault);
        long calls = j.seat[rank].calls;
        snprintf(what, sizeof what, "%s%s, rank %d, call %ld of %ld, %s(%s)", c->name,
            j.background ? ", background" : "", rank, at, calls, d.hit ? d.hit : "", d.hit_path);
        int want = expected_outcome(&j, &d, c);
        check_outcome(&j, &d, what, want);
        if (want == MUST_FAIL)
            CHECK_MSG(strstr(j.report.text, strerror(c->reason)) != NULL, "%s: the text is '%s'",
                what, j.report.text);
        ++*runs;
        int over = calls < at && j.result == DT_OK;
        disk_free(&d);
        if (over) break;
    }
}

static void part_calls(int full) {
    int runs = 0;
    /* variants: the saves; saves in the background; all calls of a job */
    for (int variant = 0; variant < 3; variant++) {
        disk before;
        job j;
        prepare(&before, &j, 2, variant == 1);
        j.count = variant == 2 ? COUNT_ALL : COUNT_SAVES;
        for (int rank = 0; rank < 2; rank++)
            for (int k = 0; k < CALL_CASES; k++)
                calls_of(&before, &j, rank, &call_cases[k],
                    full                    ? 1
                    : variant == 0 && k < 4 ? 2
                                            : 5 + 2 * variant,
                    &runs);
        disk_free(&before);
    }
    printf("calls: %d saves with a failing call\n", runs);
}

/* ---- 3. the disk is full ---- */

static void part_room(int full) {
    disk before;
    job first;
    int runs = 0, start = check_failed;
    prepare(&before, &first, 2, 0);
    for (int64_t room = 0, total = 1; room <= total && !check_enough(start); room++) {
        disk d;
        job j = first;
        char what[64];
        disk_fault fault = { 0, 0, 0, 0, 0, room };
        if (room == 0) { /* measures how many bytes a save writes */
            disk_fault none = { 0, 0, 0, 0, 0, -1 };
            faulty_run(&j, &d, &before, &none);
            total = d.written;
            check_outcome(&j, &d, "no fault", MUST_SUCCEED);
            disk_free(&d);
        }
        if (!full && room % 7 != 0 && room != total - 1 && room != total) continue;
        faulty_run(&j, &d, &before, &fault);
        snprintf(
            what, sizeof what, "room for %lld of %lld bytes", (long long)room, (long long)total);
        check_outcome(&j, &d, what, room < total ? MUST_FAIL : MUST_SUCCEED);
        if (room < total)
            CHECK_MSG(
                strstr(j.report.text, strerror(ENOSPC)) != NULL, "%s: %s", what, j.report.text);
        runs++;
        disk_free(&d);
    }
    printf("room: %d saves on a full disk\n", runs);
    disk_free(&before);
}

/* ---- 4. damage ---- */

static const char *const files[] = { "model.safetensors", "optim.safetensors", "config.json",
    "manifest.json" };
enum { FILES = 4 };

/* Finds the name of the tensor that a byte of a safetensors file belongs to, "" for the header and
   other files. Parses the format independently: 8 bytes of length, JSON, data. */
static void tensor_at(const disk_node *n, int file, size_t byte, char *name, size_t room) {
    uint64_t head = 0;
    name[0] = 0;
    if (file > 1) return;
    for (int i = 0; i < 8; i++) head |= (uint64_t)n->data[i] << 8 * i;
    if (byte < 8 + head) return;
    dt_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    dt_ctx *ctx = dt_ctx_make(desc);
    dt_json *json = dt_json_parse(ctx, "header", (const char *)n->data + 8, (size_t)head);
    for (int i = 0; i < dt_json_count(json, 0); i++) {
        int node = dt_json_at(json, 0, i), offsets = dt_json_find(json, node, "data_offsets");
        int64_t from = 0, to = 0;
        dt_json_int(json, dt_json_at(json, offsets, 0), &from);
        dt_json_int(json, dt_json_at(json, offsets, 1), &to);
        if ((int64_t)(byte - 8 - head) >= from && (int64_t)(byte - 8 - head) < to)
            snprintf(name, room, "'%s'", dt_json_key(json, node, NULL));
    }
    CHECK_MSG(name[0] != 0, "byte %zu of %s belongs to no tensor", byte, files[file]);
    dt_json_free(json);
    dt_ctx_free(ctx);
}

/* B is damaged: loading B by its path must fail, and loading the newest of the folder must give A
   and a notice. */
static void check_damaged(
    disk *d, const job *j, const char *what, const char *file, const char *tensor, int folder_too) {
    found f;
    found_at(&f, d, NULL, "ck/step-2", 0);
    CHECK_MSG(
        f.step == -1, "%s: the damaged checkpoint loads as step %lld", what, (long long)f.step);
    CHECK_MSG(strstr(f.error, file) && strstr(f.error, "ck/step-2") && strstr(f.error, tensor),
        "%s: the text does not name %s %s: '%s'", what, file, tensor, f.error);
    CHECK_MSG(!f.changed, "%s: values or moments were changed before the load failed", what);
    if (!folder_too) return;
    found_at(&f, d, NULL, "ck", 0);
    const char *wrong = found_wrong(&f, j, 1, 1);
    CHECK_MSG(!wrong && strcmp(f.path, "ck/step-1") == 0, "%s: the previous checkpoint: %s: %s",
        what, wrong, f.error);
    CHECK_MSG(strstr(f.notices, file) && strstr(f.notices, "ck/step-2"), "%s: notices are '%s'",
        what, f.notices);
}

static disk_node *file_of(disk *d, int file) {
    char path[100];
    snprintf(path, sizeof path, "ck/step-2/%s", files[file]);
    int node = disk_find(d, "", path);
    return CHECK_MSG(node >= 0, "no %s", path) ? &d->node[node] : NULL;
}

static int damage_bits(disk *d, const job *j, int file) {
    disk_node *n = file_of(d, file);
    int loads = 0, start = check_failed;
    for (size_t byte = 0; n && byte < n->size && !check_enough(start); byte++) {
        char what[100], tensor[100];
        tensor_at(n, file, byte, tensor, sizeof tensor);
        for (int bit = 0; bit < 8; bit++, loads++) {
            snprintf(what, sizeof what, "%s: bit %d of byte %zu", files[file], bit, byte);
            n->data[byte] ^= (unsigned char)(1 << bit);
            check_damaged(
                d, j, what, files[file], tensor, byte % 13 == 0 && bit == (int)(byte % 8));
            n->data[byte] ^= (unsigned char)(1 << bit);
        }
    }
    return loads;
}

static int damage_lengths(disk *d, const job *j, int file) {
    disk_node *n = file_of(d, file);
    int loads = 0, start = check_failed;
    size_t size = n ? n->size : 0;
    disk_size_to(n, size + 9);
    disk_size_to(n, size);
    for (size_t bytes = 0; n && bytes < size + 9 && !check_enough(start); bytes++, loads++) {
        char what[100];
        if (bytes == size) continue;
        snprintf(what, sizeof what, "%s cut to %zu of %zu bytes", files[file], bytes, size);
        n->size = bytes;
        check_damaged(d, j, what, files[file], "", bytes % 29 == 0);
    }
    n->size = size;
    return loads;
}

static void damage_missing(disk *d, const job *j, int file) {
    disk image;
    char path[100], what[100];
    disk_copy(&image, d);
    disk_seat seat = { &image, "", 0, 0, 0 };
    snprintf(path, sizeof path, "ck/step-2/%s", files[file]);
    snprintf(what, sizeof what, "%s is missing", files[file]);
    CHECK(disk_remove(&seat, path) == 0);
    check_damaged(&image, j, what, files[file], "", 1);
    disk_free(&image);
}

/* Several ranks share the reading and must agree that the file is damaged. */
static void damage_for_all(const disk *before, int ranks, int file) {
    disk d;
    disk_copy(&d, before);
    disk_node *n = file_of(&d, file);
    for (size_t byte = 0; n && byte < n->size; byte += 31) {
        job j = job_make(&d, ranks, LAST, 0); /* the job only loads */
        j.resume = 1;
        n->data[byte] ^= 16;
        job_run(&j);
        n->data[byte] ^= 16;
        CHECK_MSG(j.result == DT_OK && j.loaded == 1, "%s, byte %zu: %d ranks load step %lld: %s",
            files[file], byte, ranks, (long long)j.loaded, j.report.text);
        CHECK_MSG(in_time(j.took_s, 4.5), "the load took %.1f s", j.took_s);
    }
    disk_free(&d);
}

/* The newest checkpoint is damaged, so the previous one is loaded. A checkpoint saved next, at an
   earlier step than the damaged one, must remain, whatever the limit on kept checkpoints. */
static void damage_then_saves(void) {
    disk d;
    found f;
    disk_make(&d);
    job j = job_make(&d, 2, 1, 3);
    job_run(&j);
    CHECK(j.result == DT_OK);
    disk_seat seat = { &d, "", 0, 0, 0 };
    CHECK(disk_remove(&seat, "ck/step-2/manifest.json") == 0 &&
          disk_remove(&seat, "ck/step-3/config.json") == 0);
    job next = job_make(&d, 2, 2, 2);
    next.resume = 1;
    next.keep = 1;
    job_run(&next);
    CHECK_MSG(next.result == DT_OK && next.loaded == 1, "%s: from step %lld", next.report.text,
        (long long)next.loaded);
    found_at(&f, &d, "ck", NULL, 0);
    const char *wrong = found_wrong(&f, &next, 2, 2);
    CHECK_MSG(!wrong,
        "step 2 is saved after a damaged step 3, and then the folder gives step %lld: %s: %s",
        (long long)f.step, wrong, f.error);
    disk_free(&d);
}

static void part_damage(int full) {
    disk d;
    found f;
    int loads = 0;
    (void)full;
    disk_make(&d);
    job j = job_make(&d, 2, 1, 2);
    job_run(&j);
    CHECK_MSG(j.result == DT_OK, "%s", j.report.text);
    found_at(&f, &d, NULL, "ck", 0);
    CHECK_MSG(!found_wrong(&f, &j, 2, 2) && strcmp(f.path, "ck/step-2") == 0 && !f.notices[0],
        "%s%s", f.error, f.notices);
    size_t total = 0;
    for (int file = 0; file < FILES; file++) {
        total += file_of(&d, file) ? file_of(&d, file)->size : 0;
        loads += damage_bits(&d, &j, file);
        loads += damage_lengths(&d, &j, file);
        damage_missing(&d, &j, file);
        damage_for_all(&d, 2, file);
        damage_for_all(&d, 4, file);
    }
    found_at(&f, &d, NULL, "ck/step-2", 0);
    CHECK_MSG(!found_wrong(&f, &j, 2, 2), "without damage: %s", f.error);
    damage_then_saves();
    printf("damage: a checkpoint of %zu bytes with %d different damages\n", total, loads);
    disk_free(&d);
}

/* ---- 5. and 6. two jobs, two folders ---- */

/* A context of one rank with its open checkpoint. */
typedef struct opened {
    dt_ctx *ctx;
    dt_checkpoint *c;
    model m;
} opened;
static opened open_one(const dt_io *io, const char *dir) {
    opened o;
    dt_host host = *dt_host_default();
    dt_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    host.log = silent;
    desc.host = &host;
    desc.io = io;
    o.ctx = dt_ctx_make(desc);
    o.m = model_make(o.ctx, 1);
    o.c = dt_checkpoint_open(o.m.zero, checkpoint_desc(dir, NULL));
    return o;
}

static void close_one(opened *o) {
    dt_checkpoint_close(o->c);
    dt_ctx_free(o->ctx);
}

static int names_process(const char *text, const char *dir, long pid) {
    char who[40];
    snprintf(who, sizeof who, "process %ld ", pid);
    return strstr(text, who) != NULL && strstr(text, dir) != NULL;
}

static void two_jobs(void) {
    disk d;
    disk_seat seat = { &d, "", 0, 0, 0 };
    dt_io io = disk_io(&seat);
    disk_make(&d);
    opened first = open_one(&io, "ck"), second = open_one(&io, "ck"),
           other = open_one(&io, "other");
    CHECK_MSG(first.c && other.c, "%s%s", dt_error_text(first.ctx), dt_error_text(other.ctx));
    const char *text = dt_error_text(second.ctx);
    CHECK_MSG(!second.c && dt_error(second.ctx) == DT_ERR_IO && names_process(text, "ck", getpid()),
        "%s", text);
    close_one(&second);
    close_one(&first);
    second = open_one(&io, "ck");
    CHECK_MSG(second.c != NULL, "after the first job closed: %s", dt_error_text(second.ctx));
    close_one(&second);
    close_one(&other);
    CHECK(d.open == 0);
    disk_free(&d);
}

/* The same with real processes: after the first is killed, the folder is unlocked. */
static void two_processes(void) {
    char root[] = "/tmp/test_checkpoint.XXXXXX", dir[64], word = 0;
    int tell[2];
    if (!CHECK(mkdtemp(root) != NULL && pipe(tell) == 0)) return;
    snprintf(dir, sizeof dir, "%s/ck", root);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        opened o = open_one(NULL, dir);
        word = o.c ? 'y' : 'n';
        if (write(tell[1], &word, 1) != 1) _exit(1);
        for (;;) pause();
    }
    if (CHECK(child > 0 && read(tell[0], &word, 1) == 1 && word == 'y')) {
        opened o = open_one(NULL, dir);
        CHECK_MSG(
            !o.c && dt_error(o.ctx) == DT_ERR_IO && names_process(dt_error_text(o.ctx), dir, child),
            "%s", dt_error_text(o.ctx));
        close_one(&o);
    }
    if (child > 0) {
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        opened o = open_one(NULL, dir);
        CHECK_MSG(o.c != NULL, "after the first job was killed: %s", dt_error_text(o.ctx));
        close_one(&o);
    }
    close(tell[0]);
    close(tell[1]);
    char path[100];
    snprintf(path, sizeof path, "%s/lock", dir);
    CHECK(remove(path) == 0 && remove(dir) == 0 && remove(root) == 0);
}

/* Ranks on machines with different disks. stale: leftovers of another job make rank 1's folder look
   like rank 0's. */
static void two_folders(int ranks, int stale, int background) {
    disk d;
    disk_seat seat = { &d, "", 0, 0, 0 };
    disk_make(&d);
    CHECK(disk_mkdir(&seat, "m0") == 0 && disk_mkdir(&seat, "m1") == 0);
    if (stale) { /* as if a job of one rank had been killed just before its rename */
        job left = job_make(&d, 1, 1, 1);
        left.seat[0].root = "m1/";
        job_run(&left);
        CHECK(left.result == DT_OK);
        CHECK(disk_rename(&seat, "m1/ck/step-1", "m1/ck/step-1.0123ab.tmp") == 0);
    }
    job j = job_make(&d, ranks, 1, 1);
    j.background = background;
    for (int r = 0; r < ranks; r++) j.seat[r].root = r == ranks - 1 ? "m1/" : "m0/";
    job_run(&j);
    int failed = 0;
    for (int r = 0; r < ranks; r++) failed += j.status[r] != DT_OK && j.error[r] != DT_OK;
    CHECK_MSG(j.result == DT_ERR_IO && failed == ranks && strstr(j.report.text, "share the folder"),
        "%d ranks on two disks%s: %d failed, %s: %s", ranks, stale ? ", one with a leftover" : "",
        failed, dt_status_name(j.result), j.report.text);
    CHECK_MSG(d.open == 0 && disk_find(&d, "", "m0/ck/step-1") < 0, "%d open", d.open);
    disk_free(&d);
}

/* Saves in the background when one rank must write in its main thread, or when the optimizer is
   freed before the save is complete. */
static void in_background(int without_thread, int zero_first) {
    disk d;
    disk_make(&d);
    job j = job_make(&d, 3, 1, 2);
    j.background = 1;
    j.without_thread = without_thread;
    j.zero_first = zero_first;
    job_run(&j);
    found f;
    found_at(&f, &d, NULL, "ck", 0);
    CHECK_MSG(j.result == DT_OK && f.step == 2 && same_state(&f.s, &j.saved[2]),
        "%d, %d: step %lld: %s%s", without_thread, zero_first, (long long)f.step, j.report.text,
        f.error);
    CHECK(d.open == 0);
    disk_free(&d);
}

/* Names that no checkpoint can have, and empty paths. */
static void odd_names(void) {
    disk d;
    disk_seat seat = { &d, "", 0, 0, 0 };
    dt_io io = disk_io(&seat);
    found f;
    disk_make(&d);
    job j = job_make(&d, 2, 1, 1);
    job_run(&j);
    CHECK(disk_mkdir(&seat, "ck/step-999999999999999999") == 0 &&
          disk_mkdir(&seat, "ck/step-02") == 0);
    /* a step number that a double cannot represent must not cause an endless search */
    found_at(&f, &d, "ck", NULL, 1);
    CHECK_MSG(f.step == 1 && f.resaved == DT_OK, "step %lld: %s%s", (long long)f.step, f.error,
        f.notices);
    CHECK(disk_find(&d, "", "ck/step-999999999999999999") >= 0 &&
          disk_find(&d, "", "ck/step-2") >= 0);

    j.dir = "\nck";
    job_run(&j);
    CHECK(j.result == DT_OK && io.remove(&seat, "\nck/step-1/manifest.json") == 0);
    /* a path with a newline must not end the line that the ranks compare */
    found_at(&f, &d, NULL, "\nck/step-1", 0);
    CHECK_MSG(f.step == -1 && strstr(f.error, "manifest.json"), "step %lld: %s", (long long)f.step,
        f.error);

    opened o = open_one(&io, "");
    CHECK_MSG(!o.c && dt_error(o.ctx) == DT_ERR_ARG, "%s", dt_error_text(o.ctx));
    close_one(&o);
    o = open_one(&io, "other");
    CHECK(dt_zero_export(o.m.zero, NULL, (dt_export_desc){ .map_weight = NULL }) == DT_ERR_ARG);
    close_one(&o);
    CHECK(d.open == 0);
    disk_free(&d);
}

/* ---- a disk that does not answer ---- */

static struct {
    pthread_mutex_t lock;
    void *block[4096]; /* the blocks that the run has allocated */
    int blocks;
    int stuck, release; /* stuck: the fsync of rank 1's thread is blocked; release ends it */
} mute = { .lock = PTHREAD_MUTEX_INITIALIZER };

static void *tracking_alloc(void *user, size_t bytes, dt_mem mem) {
    void *p = dt_host_default()->alloc(user, bytes, mem);
    pthread_mutex_lock(&mute.lock);
    if (mute.blocks == 4096) abort();
    mute.block[mute.blocks++] = p;
    pthread_mutex_unlock(&mute.lock);
    return p;
}

static void tracking_free(void *user, void *p, size_t bytes, dt_mem mem) {
    pthread_mutex_lock(&mute.lock);
    for (int i = 0; p && i < mute.blocks; i++)
        if (mute.block[i] == p) mute.block[i] = mute.block[--mute.blocks], i = mute.blocks;
    pthread_mutex_unlock(&mute.lock);
    dt_host_default()->free(user, p, bytes, mem);
}

static int blocking_fsync(void *user, int fd) {
    __atomic_store_n(&mute.stuck, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&mute.release, __ATOMIC_ACQUIRE)) usleep(1000);
    return disk_fsync(user, fd);
}

static dt_status no_answer_rank(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    int r = dt_ctx_rank(ctx);
    double seen[2] = { 0, 0 };
    dt_extra_state saved = { "seen", seen, 2 };
    dt_io *io = (dt_io *)dt_ctx_io(ctx);
    *io = disk_io(&j->seat[r]);
    if (r == 1) io->fsync = blocking_fsync;
    model m = model_make(ctx, j->stage);
    dt_checkpoint_desc d = checkpoint_desc(j->dir, &saved);
    d.background = 1;
    dt_checkpoint *c = dt_checkpoint_open(m.zero, d);
    model_step(ctx, &m, 1, seen);
    dt_checkpoint_save(c);
    dt_checkpoint_close(c);
    j->error[r] = dt_error(ctx);
    return dt_error(ctx);
}

/* All ranks fail in time and name the rank and its disk. When the disk answers later, the thread
   continues and must touch no freed memory: all is freed except the thread's own block. */
static void no_answer(void) {
    disk d;
    dt_run_desc desc;
    dt_host host = *dt_host_default();
    disk_make(&d);
    job j = job_make(&d, 3, 1, 1);
    host.log = silent;
    host.alloc = tracking_alloc;
    host.free = tracking_free;
    memset(&desc, 0, sizeof desc);
    desc.ranks = 3;
    desc.timeout_s = 1;
    desc.host = &host;
    desc.report = &j.report;
    double begin = host.now(host.user);
    dt_status status = dt_run(desc, no_answer_rank, &j);
    double took = host.now(host.user) - begin;
    CHECK_MSG(in_time(took, 4), "the job ended only after %.1f s", took);
    CHECK_MSG(status == DT_ERR_TIMEOUT && strstr(j.report.text, "rank 1: ck/step-1.") &&
                  strstr(j.report.text, ".tmp/model.safetensors: fsync: no answer from the disk "
                                        "within 0.8 s"),
        "%s", j.report.text);
    for (int r = 0; r < 3; r++) CHECK_MSG(j.error[r] != DT_OK, "rank %d did not fail", r);
    CHECK(__atomic_load_n(&mute.stuck, __ATOMIC_ACQUIRE));
    CHECK_MSG(mute.blocks == 1, "%d blocks left; only the thread's own may be", mute.blocks);
    __atomic_store_n(&mute.release, 1, __ATOMIC_RELEASE);
    for (int k = 0, open = 1; open && CHECK_MSG(k < 2000, "%d descriptors were not closed", open);
         k++) {
        usleep(1000);
        pthread_mutex_lock(&d.lock);
        open = d.open;
        pthread_mutex_unlock(&d.lock);
    }
    usleep(50000); /* the thread's last call is close */
    for (int i = 0; i < mute.blocks; i++)
        dt_host_default()->free(NULL, mute.block[i], 0, DT_MEM_HOST);
    disk_free(&d);
}

static void part_jobs(int full) {
    (void)full;
    no_answer();
    in_background(1, 0);
    in_background(2, 0);
    in_background(0, 1);
    odd_names();
    two_jobs();
    two_processes();
    for (int background = 0; background < 2; background++)
        for (int ranks = 2; ranks <= 4; ranks += 2)
            for (int stale = 0; stale < 2; stale++) two_folders(ranks, stale, background);
}

// ==== The parts =================================================================================

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(int full);
    } parts[] = {
        { "disk", part_disk },
        { "power", part_power },
        { "calls", part_calls },
        { "room", part_room },
        { "damage", part_damage },
        { "jobs", part_jobs },
    };
    int full = argc > 1 && strcmp(argv[argc - 1], "full") == 0;
    const char *only = argc > 1 + full ? argv[1] : NULL;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        double begin = dt_host_default()->now(NULL);
        if (only && strcmp(only, parts[i].name) != 0) continue;
        parts[i].run(full);
        printf("%s: %.1f s\n", parts[i].name, dt_host_default()->now(NULL) - begin);
    }
    return check_done("test_checkpoint_faults");
}
