/* power.c - dt_zero.h, section 3, on a real file system on a block device whose power is cut
   (drive.h). Public domain or MIT, at your choice; see LICENSE.

       power DIR CUTS SEED [ENOUGH]     CUTS cuts; DIR is an empty folder, whose name the disk's
                                        file gets; ends after ENOUGH failures (10)

   power.sh starts this program. It needs root, and makes a separate mount namespace. Jobs of 1 to 4
   ranks train a tiny model and save it after each step, on ext4 in two modes, xfs and btrfs, in the
   foreground and in the background. The power is cut at a write or flush of the disk, at a time,
   when a new checkpoint gets its name, or when a save returns; SEED determines which. The cut loses
   the page cache, and some of the writes since the disk's last flush. Then the file system is
   mounted again. A new job must find the newest checkpoint that was reported complete, or a later
   one whose save was in progress, with the bits of a run without a disk, and no damaged checkpoint;
   and its own save must work. The next life of the disk continues from there.

   The model's bits do not depend on the layout here: ranks 0 and 1 each contribute half of the
   gradient, which is exact, and the other ranks contribute zero. So all jobs share one reference.

   First come controls: programs that do not sync must lose data that they reported as saved. A
   program that syncs must lose nothing, except on a disk that acknowledges flushes without
   performing them. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"

#include "tests/support/check.h"
#include "tests/faults/drive.h"

#include <dirent.h>
#include <sched.h>
#include <sys/wait.h>
#include <time.h>

enum {
    RANKS = 4,
    OUT = 96,
    IN = 128,
    VALUES = OUT * IN + OUT,
    STEPS = 48,
    LIVES = 4,
    HANG_S = 240
};

// ==== File systems ==============================================================================

/* share: percentage of the cuts. sector: bytes that the disk writes atomically. btrfs overwrites
   its superblock of 4,096 bytes in place, and has only one on such a small disk, so it needs a disk
   that does not tear the superblock. */
typedef struct file_system {
    const char *name, *kind, *make, *options;
    int share, sector;
} file_system;
static const file_system systems[] = {
    { "ext4", "ext4", "mkfs.ext4 -q -F -b 4096 -E lazy_itable_init=0,lazy_journal_init=0,nodiscard",
        "", 45, 512 },
    { "ext4 data=writeback", "ext4",
        "mkfs.ext4 -q -F -b 1024 -E lazy_itable_init=0,lazy_journal_init=0,nodiscard",
        "data=writeback", 25, 512 },
    { "xfs", "xfs", "mkfs.xfs -q -f --unsupported", "", 15, 512 },
    { "btrfs", "btrfs", "mkfs.btrfs -q -f -M", "", 15, 4096 },
};
enum { SYSTEMS = sizeof systems / sizeof systems[0] };

typedef struct tally {
    int cuts, in_save, unsure, writes, lost, torn, kept_old, found_new;
} tally;

/* The state of the campaign. */
typedef struct stage {
    drive *disk;
    char folder[200], mounted[200], image[SYSTEMS][220], dir[260];
    int there[SYSTEMS];
    uint64_t seed;
    int cuts, enough;
    tally sum[SYSTEMS];
    double job_s, job_requests; /* estimates for a job without a cut */
} stage;

static uint64_t dice(stage *s, uint64_t below) { return drive_random(&s->seed) % below; }
static double seconds(void) { return dt_host_default()->now(NULL); }

/* Makes the images of new disks. A file system that cannot be made or mounted here is reported as
   skipped. */
static void images_make(stage *s, const char *dir) {
    for (int i = 0; i < SYSTEMS; i++) {
        char command[700], tool[20], why[160] = "";
        snprintf(s->image[i], sizeof s->image[i], "%s/image%d", dir, i);
        snprintf(command, sizeof command, "truncate -s %d '%s' && %s '%s' >'%s/why' 2>&1",
            DRIVE_BYTES, s->image[i], systems[i].make, s->image[i], dir);
        s->there[i] = system(command) == 0;
        if (s->there[i]) continue;
        snprintf(tool, sizeof tool, "%.*s", (int)strcspn(systems[i].make, " "), systems[i].make);
        snprintf(command, sizeof command, "%s/why", dir);
        FILE *f = fopen(command, "r");
        if (f && !fgets(why, sizeof why, f)) why[0] = 0;
        if (f) fclose(f);
        why[strcspn(why, "\n")] = 0;
        snprintf(command, sizeof command, "power: no %s here: %s: %s", systems[i].name, tool, why);
        check_skip(command);
    }
}

/* Mounts the disk with a new loop device. Returns 0, or -1 with errno. */
static int disk_mount(stage *s, int system) {
    char device[40];
    int fd = drive_attach(s->disk, s->folder, device, sizeof device);
    if (fd < 0) return -1;
    int done = -1, flushes = drive_flushes(device);
    if (flushes)
        done = mount(device, s->mounted, systems[system].kind, 0, systems[system].options);
    else
        errno = ENOTSUP;
    int why = errno;
    close(fd);
    errno = why;
    return done;
}

/* Ends every process of a group, and waits until they are gone. */
static void group_end(pid_t group) {
    kill(-group, SIGKILL);
    while (waitpid(-group, NULL, 0) > 0 || errno == EINTR) {
    }
}

static int disk_unmount(stage *s) {
    int done = -1;
    for (double end = seconds() + HANG_S;
         (done = umount2(s->mounted, 0)) != 0 && errno == EBUSY && seconds() < end;)
        usleep(1000);
    if (done != 0) umount2(s->mounted, MNT_DETACH);
    return CHECK_MSG(done == 0, "unmounting: %s", strerror(errno)) ? 0 : -1;
}

/* Cuts the power and ends the job. */
static int disk_cut(stage *s, pid_t group, int sector, drive_loss *loss) {
    __atomic_store_n(&s->disk->on, 0, __ATOMIC_SEQ_CST);
    group_end(group);
    if (disk_unmount(s) != 0) return -1;
    CHECK_MSG(!s->disk->full, "the list of writes overflowed");
    drive_lose(s->disk, &s->seed, sector, loss);
    return 0;
}

// ==== The model =================================================================================

typedef struct state {
    float value[3][VALUES];
    double seen;
} state;
typedef struct model {
    dt_tensor *w, *b;
    dt_zero *zero;
    double seen;
    dt_extra_state saved;
} model;

/* The plan of one life of a disk, drawn by the campaign. */
typedef struct plan {
    int system, ranks, stage, background, saves;
    int keep; /* the same in all lives of a disk */
    int backend;
    /* cut the power when the save of this step returns; 0: no */
    int cut_step;
    int64_t cut_at; /* cut at this request; 0: no */
    /* cut at the first flush from that request on, when the cache is fullest */
    int at_flush;
    double cut_s; /* cut after this time; 0: no */
    /* cut `after` requests after the folder of this step gets its name; 0: no */
    int name_step, after;
    /* bit mask of the background saves after which a job waits */
    unsigned polls;
    const char *dir;
} plan;

/* The findings of a new job. */
typedef struct look {
    int step, same, resaved;
    int damaged;   /* damaged checkpoints */
    int leftovers; /* folders of unfinished saves that remain after opening the folder */
    /* a step that was reported complete and is kept, but cannot be loaded; 0: none */
    int lost;
    char text[600];
} look;

typedef struct page {
    state reference[STEPS + 1]; /* after each step, on one rank without a disk */
    /* atomic; the last steps whose save began, and whose save was reported complete */
    int begun, promised, in_save;
    int wrong; /* a step after which a job's state was not the reference's */
    look look;
    char done[STEPS + 1]; /* 1: reported complete in an earlier life of this disk */
    char text[600];       /* why a job ended */
} page;
static page *shared;
static drive *power;

static void model_make(model *m, dt_ctx *ctx, int stage) {
    dt_zero_desc d;
    memset(&d, 0, sizeof d);
    d.stage = stage;
    m->w = dt_param(ctx, "w", DT_SHAPE(OUT, IN), DT_NORMAL(0.1));
    m->b = dt_param(ctx, "b", DT_SHAPE(OUT), DT_ZEROS);
    m->zero = dt_zero_make(ctx, d);
    m->seen = 0;
    m->saved = (dt_extra_state){ "seen", &m->seen, 1 };
}

static void model_step(model *m, dt_ctx *ctx, int step) {
    int rank = dt_ctx_rank(ctx), ranks = dt_comm_size(dt_world(ctx));
    float x[2 * IN], y[2 * OUT];
    /* the rank's part of the gradient: all, half or none */
    double part = rank < 2 ? 2 * OUT * (ranks > 1 ? 2.0 : 1.0) : 1e300;
    for (int i = 0; i < 2 * IN; i++) x[i] = (float)((step * 37 + i * 7) % 19) / 19;
    for (int i = 0; i < 2 * OUT; i++) y[i] = (float)((step * 5 + i) % 7) / 7;
    dt_tensor *out = dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(2, IN), x), m->w, m->b);
    dt_backward(dt_mse(out, dt_input(ctx, DT_F32, DT_SHAPE(2, OUT), y), part));
    dt_zero_step(m->zero, 0.05);
    dt_reset(ctx);
    m->seen = 8 * step;
}

static void state_read(const model *m, state *s) {
    memset(s, 0, sizeof *s);
    dt_read(m->w, s->value[0]);
    dt_read(m->b, s->value[0] + OUT * IN);
    for (int k = 0; k < 2; k++) {
        dt_zero_state(m->zero, k, m->w, s->value[1 + k]);
        dt_zero_state(m->zero, k, m->b, s->value[1 + k] + OUT * IN);
    }
    s->seen = m->seen;
}

/* [collective: world], as reading the state is. */
static int model_is_right(const model *m, int step) {
    state s;
    state_read(m, &s);
    return step >= 0 && step <= STEPS && memcmp(&s, &shared->reference[step], sizeof s) == 0;
}

static dt_checkpoint *model_open(model *m, const char *dir, int keep, int background) {
    dt_checkpoint_desc d;
    memset(&d, 0, sizeof d);
    d.dir = dir;
    d.keep = keep;
    d.background = background;
    d.extra_state = &m->saved;
    d.n_extra_state = 1;
    d.config = "{\"name\":\"tiny\"}";
    d.config_json = "{}\n";
    return dt_checkpoint_open(m->zero, d);
}

static void raise_to(int *value, int to) {
    int now = __atomic_load_n(value, __ATOMIC_SEQ_CST);
    while (now < to &&
           !__atomic_compare_exchange_n(value, &now, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
}
static int value_of(const int *value) { return __atomic_load_n(value, __ATOMIC_SEQ_CST); }

// ==== A job that saves until the power is cut ===================================================

/* Records that a step's save is reported complete: dt_checkpoint_save returned DT_OK, or a
   background save was reported as finished. */
static void record_complete(const plan *p, int step) {
    raise_to(&shared->promised, step);
    if (p->cut_step == step) __atomic_store_n(&power->on, 0, __ATOMIC_SEQ_CST);
    if (value_of(&shared->begun) == step) __atomic_store_n(&shared->in_save, 0, __ATOMIC_SEQ_CST);
}

/* One save. *before: the step of a background save in progress, or 0. */
static void job_save(dt_ctx *ctx, const plan *p, dt_checkpoint *c, int step, int *before) {
    raise_to(&shared->begun, step);
    __atomic_store_n(&shared->in_save, 1, __ATOMIC_SEQ_CST);
    if (dt_checkpoint_save(c) != DT_OK) return;
    if (*before) record_complete(p, *before);
    *before = step;
    if (p->background && !(p->polls >> step % 32 & 1)) return;
    while (p->background && !dt_checkpoint_poll(c)) usleep(100);
    if (dt_error(ctx) != DT_OK) return;
    record_complete(p, step);
    *before = 0;
}

static dt_status job_rank(dt_ctx *ctx, void *user) {
    const plan *p = (const plan *)user;
    model m;
    int before = 0;
    model_make(&m, ctx, p->stage);
    dt_checkpoint *c = model_open(&m, p->dir, p->keep, p->background);
    int from = (int)dt_checkpoint_load(c, NULL);
    if (dt_error(ctx) == DT_OK && !model_is_right(&m, from)) raise_to(&shared->wrong, from + 1);
    for (int step = from + 1; step <= from + p->saves && dt_error(ctx) == DT_OK; step++) {
        if (before) dt_checkpoint_poll(c);
        model_step(&m, ctx, step);
        if (!model_is_right(&m, step) && dt_error(ctx) == DT_OK) raise_to(&shared->wrong, step);
        job_save(ctx, p, c, step, &before);
    }
    if (dt_checkpoint_close(c) == DT_OK && before && dt_error(ctx) == DT_OK)
        record_complete(p, before);
    return dt_error(ctx);
}

static void silent(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

/* Forks a child that leads a new process group and ends with this process. */
static pid_t group_fork(void) {
    pid_t parent = getpid();
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
    } else if (pid > 0) {
        setpgid(pid, pid);
    } else {
        abort();
    }
    return pid;
}

static pid_t job_start(const plan *p) {
    pid_t pid = group_fork();
    if (pid != 0) return pid;
    dt_host host = *dt_host_default();
    dt_report report = { DT_OK, 0, "", 0 };
    host.log = silent;
    dt_run_desc d = { .ranks = p->ranks, .timeout_s = HANG_S, .host = &host, .report = &report };
    d.backend = p->backend ? DT_BACKEND_PROCS : DT_BACKEND_THREADS;
    dt_status status = dt_run(d, job_rank, (void *)(uintptr_t)p);
    snprintf(shared->text, sizeof shared->text, "%s", report.text);
    _exit(status == DT_OK ? 0 : 1);
}

/* Computes the reference states in a run without a disk. */
static void reference_make(void) {
    pid_t pid = group_fork();
    if (pid == 0) {
        dt_ctx_desc desc;
        model m;
        memset(&desc, 0, sizeof desc);
        dt_ctx *ctx = dt_ctx_make(desc);
        model_make(&m, ctx, 0);
        for (int step = 0; step <= STEPS; step++) {
            if (step > 0) model_step(&m, ctx, step);
            state_read(&m, &shared->reference[step]);
        }
        _exit(dt_error(ctx) != DT_OK);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    CHECK_MSG(status == 0, "the reference run fails");
}

// ==== A new job that checks the disk ============================================================

static void look_log(void *user, int level, int rank, const char *text) {
    look *l = (look *)user;
    (void)level, (void)rank;
    if (!strstr(text, "the checkpoint before it counts")) return;
    l->damaged++;
    snprintf(l->text, sizeof l->text, "%s", text);
}

static dt_ctx *look_ctx(look *l) {
    dt_host host = *dt_host_default();
    dt_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    host.user = l;
    host.log = look_log;
    desc.host = &host;
    return dt_ctx_make(desc);
}

static int leftovers(const char *dir) {
    DIR *d = opendir(dir);
    int n = 0;
    for (struct dirent *e; d && (e = readdir(d));) n += strstr(e->d_name, ".tmp") != NULL;
    if (d) closedir(d);
    return n;
}

/* 1 if an older checkpoint, which the job did not need, can be loaded. */
static int load_older(look *l, const plan *p, int step) {
    char path[300];
    model m;
    dt_ctx *ctx = look_ctx(l);
    snprintf(path, sizeof path, "%s/step-%d", p->dir, step);
    model_make(&m, ctx, 0);
    dt_checkpoint *c = model_open(&m, NULL, 0, 0);
    int right = dt_checkpoint_load(c, path) == step && model_is_right(&m, step);
    dt_checkpoint_close(c);
    dt_ctx_free(ctx);
    return right;
}

/* Loads, trains a step, and saves. */
static void load_train_save(look *l, const plan *p) {
    model m;
    dt_ctx *ctx = look_ctx(l);
    model_make(&m, ctx, 1);
    dt_checkpoint *c = model_open(&m, p->dir, p->keep, 0);
    l->leftovers = leftovers(p->dir);
    l->step = c ? (int)dt_checkpoint_load(c, NULL) : -1;
    l->same = l->step >= 0 && model_is_right(&m, l->step);
    for (int step = 1; l->step >= 0 && p->keep == 0 && step <= STEPS; step++)
        if (shared->done[step] && !load_older(l, p, step)) l->lost = step;
    if (l->same) {
        model_step(&m, ctx, l->step + 1);
        l->resaved = dt_checkpoint_save(c) == DT_OK && model_is_right(&m, l->step + 1);
    }
    dt_checkpoint_close(c);
    if (dt_error(ctx) != DT_OK) snprintf(l->text, sizeof l->text, "%s", dt_error_text(ctx));
    dt_ctx_free(ctx);
}

/* Runs in a child process, so that this process has no open file when the disk is unmounted. */
static int look_after(const plan *p) {
    memset(&shared->look, 0, sizeof shared->look);
    shared->look.step = -1;
    pid_t pid = group_fork();
    if (pid == 0) {
        alarm(HANG_S);
        load_train_save(&shared->look, p);
        _exit(0);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    return status;
}

/* Checks the disk after a cut. `what` describes the cut. */
static int found_right(stage *s, const plan *p, const char *what) {
    const look *l = &shared->look;
    int before = check_failed, least = shared->promised, most = shared->begun;
    int status = look_after(p);
    CHECK_MSG(status == 0, "%s: the checking job ends with status %#x", what, (unsigned)status);
    CHECK_MSG(l->step >= least && l->step <= most,
        "%s: finds step %d, reported complete %d, begun %d: %s", what, l->step, least, most,
        l->text);
    CHECK_MSG(l->damaged == 0, "%s: %d damaged checkpoints: %s", what, l->damaged, l->text);
    CHECK_MSG(l->step < 0 || l->same, "%s: step %d differs in bits", what, l->step);
    CHECK_MSG(l->leftovers == 0, "%s: %d folders of unfinished saves remain", what, l->leftovers);
    CHECK_MSG(l->lost == 0, "%s: step %d was reported complete and kept, but cannot be loaded: %s",
        what, l->lost, l->text);
    CHECK_MSG(l->step < 0 || l->resaved, "%s: the next save fails: %s", what, l->text);
    if (check_failed > before) return 0;
    if (least < most)
        ++*(l->step < most ? &s->sum[p->system].kept_old : &s->sum[p->system].found_new);
    shared->promised = shared->begun = l->step + 1;
    shared->done[l->step + 1] = 1;
    if (l->step > 0) shared->done[l->step] = 1;
    return 1;
}

// ==== The campaign ==============================================================================

/* Draws how this life's job saves, and when the power is cut. */
static plan plan_draw(stage *s, int system, int keep) {
    plan p;
    memset(&p, 0, sizeof p);
    p.system = system;
    p.keep = keep;
    p.dir = s->dir;
    p.ranks = 1 + (int)dice(s, RANKS);
    p.backend = (int)dice(s, 2);
    p.stage = (int)dice(s, 4);
    p.background = (int)dice(s, 2);
    p.saves = 1 + (int)dice(s, 4);
    p.polls = (unsigned)dice(s, 1ull << 32);
    p.at_flush = (int)dice(s, 2);
    p.after = 1 + (int)dice(s, 5);
    uint64_t way = dice(s, 10), part = dice(s, 1000);
    double share = (double)p.saves / 2.5 * ((double)part + 1) / 1000;
    if (way < 5)
        p.cut_at = 1 + (int64_t)(s->job_requests * share);
    else if (way < 7)
        p.cut_s = s->job_s * share;
    else
        *(way < 8 ? &p.cut_step : &p.name_step) =
            shared->promised + 1 + (int)dice(s, (uint64_t)p.saves);
    return p;
}

/* Runs the job until the power is cut. If the job ends before, cuts the power at once. */
static pid_t life(stage *s, const plan *p) {
    int status, ended = 0;
    s->disk->requests = 0;
    s->disk->cut_at = p->cut_at;
    s->disk->at_flush = p->at_flush;
    shared->in_save = shared->wrong = 0;
    char name[300];
    double begin = seconds();
    pid_t pid = job_start(p);
    snprintf(name, sizeof name, "%s/step-%d", p->dir, p->name_step);
    while (value_of(&s->disk->on) && !ended && seconds() - begin < HANG_S) {
        if (p->cut_s > 0 && seconds() - begin >= p->cut_s) break;
        if (p->name_step && s->disk->cut_at == 0 && access(name, F_OK) == 0)
            __atomic_store_n(&s->disk->cut_at, s->disk->requests + p->after, __ATOMIC_SEQ_CST);
        siginfo_t end;
        memset(&end, 0, sizeof end);
        ended =
            waitid(P_PID, (id_t)pid, &end, WEXITED | WNOHANG | WNOWAIT) == 0 && end.si_pid == pid;
        if (!ended) usleep(p->name_step ? 30 : 200);
    }
    int was_on = value_of(&s->disk->on);
    __atomic_store_n(&s->disk->on, 0, __ATOMIC_SEQ_CST);
    s->sum[p->system].in_save += value_of(&shared->in_save);
    if (!ended || !was_on) return pid;
    double weight = 2.5 / p->saves; /* the estimates are for the mean job, of 2.5 saves */
    s->job_s += 0.1 * ((seconds() - begin) * weight - s->job_s);
    s->job_requests += 0.1 * ((double)s->disk->requests * weight - s->job_requests);
    waitpid(pid, &status, 0);
    CHECK_MSG(status == 0, "a job without a cut ends with status %#x: %s", (unsigned)status,
        shared->text);
    return pid;
}

static void plan_text(const plan *p, int cut, int nth, char *text, size_t bytes) {
    char when[80];
    if (p->cut_at)
        snprintf(when, sizeof when, "%s request %lld", p->at_flush ? "the flush from" : "the",
            (long long)p->cut_at);
    else if (p->cut_s > 0)
        snprintf(when, sizeof when, "%.4f s", p->cut_s);
    else if (p->name_step)
        snprintf(when, sizeof when, "%s %d after the name of save %d",
            p->at_flush ? "the flush from request" : "request", p->after, p->name_step);
    else
        snprintf(when, sizeof when, "the return of save %d", p->cut_step);
    snprintf(text, bytes, "cut %d (%s, life %d, %d %s, stage %d, keep %d, %s, %d saves, cut at %s)",
        cut, systems[p->system].name, nth, p->ranks, p->backend ? "procs" : "threads", p->stage,
        p->keep, p->background ? "background" : "foreground", p->saves, when);
}

static int enough(const stage *s) { return check_failed >= s->enough; }

/* Several lives of a new disk, each of which ends with a cut. */
static void disk_lives(stage *s, int system, int *cut) {
    static const int keeps[] = { 0, 1, 2 };
    char what[300] = "a new disk";
    int keep = keeps[dice(s, 3)], good = 1;
    plan p = { .system = system, .keep = keep, .dir = s->dir };
    shared->begun = shared->promised = 0;
    memset(shared->done, 0, sizeof shared->done);
    if (!CHECK_MSG(drive_load(s->disk, s->image[system]), "%s cannot be read", s->image[system]))
        return;
    for (int nth = 0; nth <= LIVES; nth++) {
        int mounted = disk_mount(s, system);
        if (!CHECK_MSG(mounted == 0, "%s: the disk cannot be mounted: %s", what, strerror(errno)))
            return;
        if (nth > 0) good = found_right(s, &p, what);
        drive_loss loss;
        if (!good || nth == LIVES || *cut == s->cuts || enough(s)) {
            disk_unmount(s);
            return;
        }
        p = plan_draw(s, system, keep);
        plan_text(&p, ++*cut, nth, what, sizeof what);
        pid_t pid = life(s, &p);
        CHECK_MSG(shared->wrong == 0, "%s: the job's state after step %d differs in bits", what,
            shared->wrong);
        if (disk_cut(s, pid, systems[system].sector, &loss) != 0) return;
        tally *t = &s->sum[system];
        t->cuts++;
        t->unsure += loss.writes > 0;
        t->writes += loss.writes;
        t->lost += loss.lost;
        t->torn += loss.torn;
    }
}

static int system_draw(stage *s) {
    int all = 0;
    for (int i = 0; i < SYSTEMS; i++) all += s->there[i] ? systems[i].share : 0;
    int at = (int)dice(s, (uint64_t)all), i = 0;
    while (!s->there[i] || (at -= systems[i].share) >= 0) i++;
    return i;
}

static void campaign(stage *s) {
    double begin = seconds();
    int cut = 0;
    s->job_s = 0.1;
    s->job_requests = 120;
    while (cut < s->cuts && !enough(s)) {
        int before = cut, failed = check_failed;
        disk_lives(s, system_draw(s), &cut);
        if (cut == before && check_failed == failed) break;
    }
    tally all = { 0 };
    for (int i = 0; i < SYSTEMS; i++) {
        const tally *t = &s->sum[i];
        if (t->cuts == 0) continue;
        printf("%s: %d cuts, %d in a save; at %d the disk had writes that were not flushed: %d, ",
            systems[i].name, t->cuts, t->in_save, t->unsure, t->writes);
        printf("of which %d were lost, %d torn; of the saves in progress %d survived, %d did not\n",
            t->lost, t->torn, t->found_new, t->kept_old);
        all.cuts += t->cuts;
        all.in_save += t->in_save;
        all.lost += t->lost;
        all.torn += t->torn;
        all.kept_old += t->kept_old;
    }
    printf("%d cuts in %.1f s\n", all.cuts, seconds() - begin);
    if (enough(s)) return;
    CHECK_MSG(all.cuts == s->cuts, "%d cuts of %d", all.cuts, s->cuts);
    /* too few cuts for statistics; the controls have shown that cuts lose writes */
    if (s->cuts < 100) return;
    CHECK_MSG(all.lost > 0 && all.torn > 0 && all.in_save > 0 && all.kept_old > 0,
        "the cuts lose too little: %d writes, %d torn, %d cuts in a save, %d saves", all.lost,
        all.torn, all.in_save, all.kept_old);
}

// ==== Controls ==================================================================================

enum { UNSYNCED, UNSYNCED_FOLDER, IN_PLACE, PROPERLY, LYING_DISK, WAYS };
static const char *const way_names[WAYS] = { "files that are not synced",
    "a folder that is not synced after a rename", "a file written over in place",
    "synced files and folders", "the same on a disk that does not make its flushes" };
enum { FILES = 6, BYTES = 40000 };

static void control_name(
    const stage *s, int way, int k, const char *end, char *path, size_t bytes) {
    snprintf(path, bytes, "%s/f%d%s", s->mounted, way == IN_PLACE ? 0 : k, end);
}

/* Writes FILES texts, safely or unsafely, each to its own file or all in one place. */
static void control_write(const stage *s, int way) {
    static char text[BYTES];
    char path[300], final[300];
    int folder = open(s->mounted, O_RDONLY | O_DIRECTORY);
    for (int k = 1; k <= FILES; k++) {
        control_name(s, way, k, way == IN_PLACE ? "" : ".tmp", path, sizeof path);
        control_name(s, way, k, "", final, sizeof final);
        int fd = open(path, O_RDWR | O_CREAT, 0600);
        memset(text, 'a' + k, sizeof text);
        if (fd < 0 || pwrite(fd, text, sizeof text, 0) != sizeof text) _exit(1);
        int synced = way != UNSYNCED && (way != IN_PLACE || k == 1);
        if (synced && fsync(fd) != 0) _exit(1);
        if (way == IN_PLACE && !synced &&
            sync_file_range(fd, 0, 0,
                SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER) !=
                0)
            _exit(1);
        close(fd);
        if (way != IN_PLACE && rename(path, final) != 0) _exit(1);
        if ((way >= PROPERLY || (way == IN_PLACE && k == 1)) && fsync(folder) != 0) _exit(1);
    }
    _exit(0);
}

/* 1 if all data that was reported as saved is there. */
static int control_whole(const stage *s, int way) {
    static char text[BYTES + 1];
    int right = 0;
    for (int k = 1; k <= FILES; k++) {
        char path[300];
        control_name(s, way, k, "", path, sizeof path);
        int fd = open(path, O_RDONLY), whole = fd >= 0 && read(fd, text, sizeof text) == BYTES;
        for (int i = 0; i < BYTES && whole; i++)
            whole = text[i] == 'a' + (way == IN_PLACE ? FILES : k);
        if (fd >= 0) close(fd);
        right += whole;
    }
    return right == FILES;
}

/* Returns 1 if data was lost, 0 if not, -1 if the control cannot run. */
static int control(stage *s, int way) {
    drive_loss loss;
    int status = -1;
    if (!drive_load(s->disk, s->image[0]) || disk_mount(s, 0) != 0) return -1;
    s->disk->lies = way == LYING_DISK;
    pid_t pid = group_fork();
    if (pid == 0) control_write(s, way);
    waitpid(pid, &status, 0);
    int cut = disk_cut(s, pid, systems[0].sector, &loss);
    s->disk->lies = 0;
    if (status != 0 || cut != 0) return -1;
    if (disk_mount(s, 0) != 0) return 1; /* the file system itself is lost */
    int whole = control_whole(s, way);
    disk_unmount(s);
    return !whole;
}

static void controls(stage *s, int times) {
    for (int way = 0; way < WAYS; way++) {
        int bad = 0, lost = 0;
        for (int i = 0; i < times && bad >= 0; i++) {
            lost = control(s, way);
            bad = lost < 0 ? -1 : bad + lost;
        }
        if (!CHECK_MSG(bad >= 0, "control: %s: it cannot run: %s", way_names[way], strerror(errno)))
            return;
        printf("control: %s: something is lost at %d of %d cuts\n", way_names[way], bad, times);
        CHECK_MSG(way == PROPERLY ? bad == 0 : bad > 0,
            "control: %s: something is lost at %d of %d cuts", way_names[way], bad, times);
    }
}

// ==== Requirements ==============================================================================

/* Returns NULL, or why this machine cannot run the campaign. From here on this process has its own
   mounts, separate from the server's: if the server were the last process that sees them, its end
   would wait for its own answers. */
static const char *stage_make(stage *s, const char *dir) {
    static char why[300];
    const char *slash = strrchr(dir, '/'), *name = slash ? slash + 1 : dir;
    snprintf(s->folder, sizeof s->folder, "%s/drive", dir);
    snprintf(s->mounted, sizeof s->mounted, "%s/mounted", dir);
    snprintf(s->dir, sizeof s->dir, "%s/ck", s->mounted);
    if (mkdir(s->folder, 0700) != 0 || mkdir(s->mounted, 0700) != 0)
        snprintf(why, sizeof why, "%s", dir);
    else if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
        snprintf(why, sizeof why, "no mount namespace (root is needed)");
    else if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0)
        snprintf(why, sizeof why, "no subreaper");
    else if (drive_start(s->disk, s->folder, name) < 0)
        snprintf(why, sizeof why, "no FUSE");
    else if (unshare(CLONE_NEWNS) != 0)
        snprintf(why, sizeof why, "no second mount namespace");
    if (why[0]) {
        snprintf(why + strlen(why), sizeof why - strlen(why), ": %s", strerror(errno));
        return why;
    }
    images_make(s, dir);
    char device[40];
    int fd = drive_attach(s->disk, s->folder, device, sizeof device);
    if (fd < 0)
        snprintf(why, sizeof why, "no loop device over FUSE: %s", strerror(errno));
    else if (!drive_flushes(device))
        snprintf(why, sizeof why, "this kernel's loop devices do not pass flushes on");
    if (fd >= 0) close(fd);
    for (int i = 0; i < SYSTEMS && !why[0]; i++) {
        if (!s->there[i]) continue;
        s->there[i] = drive_load(s->disk, s->image[i]) && disk_mount(s, i) == 0;
        if (s->there[i])
            disk_unmount(s);
        else {
            snprintf(why, sizeof why, "power: this kernel mounts no %s: %s", systems[i].name,
                strerror(errno));
            check_skip(why);
            why[0] = 0;
        }
    }
    return why[0] ? why : s->there[0] ? NULL : "no ext4";
}

int main(int argc, char **argv) {
    static stage s;
    static char text[400];
    if (argc < 4) {
        fprintf(stderr, "usage: power DIR CUTS SEED [ENOUGH]\n");
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* ends with its script */
    s.cuts = atoi(argv[2]);
    s.seed = strtoull(argv[3], NULL, 10);
    s.enough = argc > 4 ? atoi(argv[4]) : 10;
    s.disk = power = drive_make();
    shared = (page *)drive_shared(sizeof *shared);
    const char *why = stage_make(&s, argv[1]);
    if (why) {
        snprintf(text, sizeof text, "power: no block device whose power can be cut: %s", why);
        check_skip(text);
        return check_done("power");
    }
    reference_make();
    if (check_failed == 0) controls(&s, s.cuts < 100 ? 4 : 25);
    if (check_failed == 0) campaign(&s);
    umount2(s.folder, MNT_DETACH);
    return check_done("power");
}
