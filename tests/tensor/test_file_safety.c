/* test_file_safety.c - in folders that others write to, dt touches only its own files

   Works on real files in a new folder. A symbolic link, a hard link, a FIFO or a folder is planted
   where dt writes, reads or removes a file: no other file may change, and no call may block. Also
   tested: jobs that start without descriptors 0 to 2 or with a limit of file size, checkpoints that
   could be saved but not loaded, names with arbitrary bytes, files that cannot be read. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/support/check.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

static char scratch[] = "/tmp/test_file_safety.XXXXXX";

typedef struct path {
    char s[400];
} path;

__attribute__((format(printf, 1, 2))) static path at(const char *fmt, ...) {
    path p;
    va_list args;
    int n = snprintf(p.s, sizeof p.s, "%s/", scratch);
    va_start(args, fmt);
    vsnprintf(p.s + n, sizeof p.s - (size_t)n, fmt, args);
    va_end(args);
    return p;
}

static void must(int ok, const char *what) {
    if (ok) return;
    perror(what);
    exit(2);
}

static void put(path p, const char *text) {
    FILE *f = fopen(p.s, "wb");
    must(f && fwrite(text, 1, strlen(text), f) == strlen(text) && fclose(f) == 0, p.s);
}

/* A file's bytes and a NUL, in memory that the caller frees. NULL if there is no such file. */
static char *get(path p, size_t *bytes) {
    FILE *f = fopen(p.s, "rb");
    if (!f) return NULL;
    char *text = (char *)malloc(4 << 20);
    must(text != NULL, "malloc");
    *bytes = fread(text, 1, (4 << 20) - 1, f);
    text[*bytes] = 0;
    fclose(f);
    return text;
}

static int holds(path p, const char *want) {
    size_t n = 0;
    char *text = get(p, &n);
    int same = text && n == strlen(want) && memcmp(text, want, n) == 0;
    free(text);
    return same;
}

static int is_kind(path p, mode_t kind) {
    struct stat st;
    return lstat(p.s, &st) == 0 && (st.st_mode & S_IFMT) == kind;
}

static int is_there(path p) {
    struct stat st;
    return lstat(p.s, &st) == 0;
}

static void clear(path p) {
    char command[500];
    snprintf(command, sizeof command, "rm -rf '%s'", p.s);
    must(system(command) == 0, p.s);
}

/* ---- a model of one rank, or of each rank of a job ---- */

enum { OUT = 3, IN = 5 };
typedef struct model {
    dt_tensor *w, *b;
    dt_zero *zero;
} model;

static model model_make(dt_ctx *ctx) {
    dt_zero_desc d;
    model m;
    memset(&d, 0, sizeof d);
    m.w = dt_param(ctx, "w", DT_SHAPE(OUT, IN), DT_NORMAL(0.5));
    m.b = dt_param(ctx, "b", DT_SHAPE(OUT), DT_ZEROS);
    m.zero = dt_zero_make(ctx, d);
    return m;
}

static void model_step(dt_ctx *ctx, const model *m) {
    float x[IN] = { 1, 2, 3, 4, 5 }, y[OUT] = { 1, 0, 1 };
    dt_tensor *out = dt_linear(dt_input(ctx, DT_F32, DT_SHAPE(1, IN), x), m->w, m->b);
    dt_backward(dt_mse(out, dt_input(ctx, DT_F32, DT_SHAPE(1, OUT), y), OUT));
    dt_zero_step(m->zero, 0.05);
    dt_reset(ctx);
}

static void silent(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static dt_ctx *quiet(int rank, const dt_io *io) {
    dt_ctx_desc d;
    dt_host host = *dt_host_default();
    memset(&d, 0, sizeof d);
    host.log = silent;
    d.host = &host;
    d.io = io;
    d.rank = rank;
    return dt_ctx_make(d);
}

static dt_checkpoint_desc saves_to(path *dir) {
    dt_checkpoint_desc d;
    memset(&d, 0, sizeof d);
    d.dir = dir->s;
    d.config = "{}";
    d.config_json = "{\"beside\":1}\n";
    return d;
}

/* Runs a job of one rank: resumes from the newest checkpoint in d.dir, then makes `steps` steps and
   saves after each. */
static dt_status job(dt_checkpoint_desc d, int steps, char text[600]) {
    dt_ctx *ctx = quiet(0, NULL);
    model m = model_make(ctx);
    dt_checkpoint *c = dt_checkpoint_open(m.zero, d);
    if (c) dt_checkpoint_load(c, NULL);
    for (int i = 0; i < steps && dt_error(ctx) == DT_OK; i++) {
        model_step(ctx, &m);
        dt_checkpoint_save(c);
    }
    dt_checkpoint_close(c);
    dt_status status = dt_error(ctx);
    snprintf(text, 600, "%s", dt_error_text(ctx));
    dt_ctx_free(ctx);
    return status;
}

/* Loads a checkpoint from `dir` in a job that has no checkpoint folder of its own. Returns its
   step, or -1 and the error in `text`. io NULL: the default table. */
static int64_t load_step(const char *dir, const dt_io *io, char text[600]) {
    dt_ctx *ctx = quiet(0, io);
    model m = model_make(ctx);
    dt_checkpoint_desc d;
    memset(&d, 0, sizeof d);
    dt_checkpoint *c = dt_checkpoint_open(m.zero, d);
    int64_t step = dt_checkpoint_load(c, dir);
    dt_checkpoint_close(c);
    snprintf(text, 600, "%s", dt_error_text(ctx));
    dt_ctx_free(ctx);
    return step;
}

/* ---- 1. links where dt removes files ---- */

static const char *const names[] = { "manifest.json", "config.json", "model.safetensors",
    "optim.safetensors" };

/* A folder with a checkpoint's file names, which dt must not touch. */
static void victim_make(path folder) {
    clear(folder);
    must(mkdir(folder.s, 0777) == 0, folder.s);
    for (int i = 0; i < 4; i++) put(at("%s/%s", strrchr(folder.s, '/') + 1, names[i]), "mine");
}

static int victim_is_unchanged(const char *folder) {
    int same = 1;
    for (int i = 0; i < 4; i++) same &= holds(at("%s/%s", folder, names[i]), "mine");
    return same;
}

static void test_leftovers(void) {
    path ck = at("ck"), victim = at("victim"), inner = at("ck/step-3.00aaff.tmp");
    char text[600];
    clear(ck);
    victim_make(victim);
    must(mkdir(ck.s, 0777) == 0, ck.s);
    /* dt does not make a name like this one ... */
    must(symlink(victim.s, at("ck/step-0.tmp").s) == 0, "symlink");
    must(symlink(victim.s, at("ck/step-0.abcdef.tmp").s) == 0, "symlink");
    must(symlink(victim.s, at("ck/step-7-2.012345.tmp").s) == 0, "symlink");
    /* ... nor one in this spelling */
    must(symlink(victim.s, at("ck/step-07.012345.tmp").s) == 0, "symlink");
    must(mkdir(inner.s, 0777) == 0, inner.s);
    must(symlink(
             at("victim/model.safetensors").s, at("ck/step-3.00aaff.tmp/model.safetensors").s) == 0,
        "symlink");
    must(
        link(at("victim/optim.safetensors").s, at("ck/step-3.00aaff.tmp/optim.safetensors").s) == 0,
        "link");
    must(mkdir(at("ck/step-4.00aaff.tmp").s, 0777) == 0, "mkdir");
    put(at("ck/step-4.00aaff.tmp/model.safetensors"), "left");
    put(at("ck/step-4.00aaff.tmp/notes.txt"), "mine");
    put(at("ck/step-5.00aaff.tmp"), "mine");
    put(at("ck/step-5.00AAFF.tmp"), "mine");
    CHECK_MSG(job(saves_to(&ck), 1, text) == DT_OK, "%s", text);
    CHECK_MSG(victim_is_unchanged("victim"), "the target of a link was removed or changed");
    CHECK(!is_there(at("ck/step-0.abcdef.tmp")) && !is_there(at("ck/step-7-2.012345.tmp")) &&
          !is_there(inner));
    CHECK(is_kind(at("ck/step-0.tmp"), S_IFLNK) && is_kind(at("ck/step-07.012345.tmp"), S_IFLNK));
    CHECK_MSG(holds(at("ck/step-4.00aaff.tmp/notes.txt"), "mine") &&
                  !is_there(at("ck/step-4.00aaff.tmp/model.safetensors")),
        "a file that belongs to no checkpoint was removed, or one that does was not");
    CHECK(holds(at("ck/step-5.00aaff.tmp"), "mine") && holds(at("ck/step-5.00AAFF.tmp"), "mine"));
    CHECK_MSG(load_step(ck.s, NULL, text) == 1, "%s", text);
}

/* keep = 1 removes old checkpoints. One was moved to other storage and has a link in its place,
   another has a file of the user in it: the moved files and the user's file must stay. */
static void test_keep(void) {
    path ck = at("ck"), archive = at("archive");
    char text[600];
    clear(ck);
    clear(archive);
    CHECK_MSG(job(saves_to(&ck), 3, text) == DT_OK, "%s", text);
    must(mkdir(archive.s, 0777) == 0, archive.s);
    must(rename(at("ck/step-2").s, at("archive/step-2").s) == 0, "rename");
    must(symlink("../archive/step-2", at("ck/step-2").s) == 0, "symlink");
    put(at("ck/step-1/notes.txt"), "mine");
    dt_checkpoint_desc d = saves_to(&ck);
    d.keep = 1;
    CHECK_MSG(job(d, 1, text) == DT_OK, "%s", text);
    for (int i = 0; i < 4; i++)
        CHECK_MSG(is_kind(at("archive/step-2/%s", names[i]), S_IFREG), "%s is gone", names[i]);
    CHECK_MSG(load_step(at("archive/step-2").s, NULL, text) == 2, "%s", text);
    CHECK(!is_there(at("ck/step-2")) && !is_there(at("ck/step-3")) && is_there(at("ck/step-4")));
    CHECK(holds(at("ck/step-1/notes.txt"), "mine") && !is_there(at("ck/step-1/manifest.json")));
    CHECK_MSG(job(d, 1, text) == DT_OK && load_step(ck.s, NULL, text) == 5, "%s", text);
}

/* ---- 2. other kinds of file where dt writes ---- */

enum { LINK = 0, DANGLING, HARD_LINK, FIFO, FOLDER, KINDS };
static const char *const kinds[KINDS] = { "a link", "a link to nothing", "a hard link", "a FIFO",
    "a folder" };

static void plant(path p, int kind) {
    int ok = kind == LINK        ? symlink(at("victim/config.json").s, p.s)
             : kind == DANGLING  ? symlink(at("victim/new").s, p.s)
             : kind == HARD_LINK ? link(at("victim/config.json").s, p.s)
             : kind == FIFO      ? mkfifo(p.s, 0666)
                                 : mkdir(p.s, 0777);
    must(ok == 0, p.s);
}

static void unplant(path p, int kind) {
    if (is_there(p)) must((kind == FOLDER ? rmdir(p.s) : unlink(p.s)) == 0, p.s);
}

static void check_victim(const char *what, int kind) {
    CHECK_MSG(victim_is_unchanged("victim") && !is_there(at("victim/new")),
        "%s, %s: another file was written", what, kinds[kind]);
}

/* Each write_ function below writes a file at the path `to`; `writers` has its temporary name. */
static dt_status trace_rank(dt_ctx *ctx, void *user) {
    dt_trace_start(ctx, 100);
    dt_barrier(dt_world(ctx));
    return dt_trace_write(dt_world(ctx), (const char *)user);
}

static dt_status write_trace(const char *to, char text[600]) {
    dt_run_desc d;
    dt_report report;
    dt_host host = *dt_host_default();
    memset(&d, 0, sizeof d);
    host.log = silent;
    d.ranks = 2;
    d.timeout_s = 120;
    d.host = &host;
    d.report = &report;
    dt_status status = dt_run(d, trace_rank, (void *)(uintptr_t)to);
    snprintf(text, 600, "%s", report.text);
    return status;
}

static dt_status write_weights(const char *to, int rank, char text[600]) {
    float ones[4] = { 1, 1, 1, 1 };
    dt_weights_desc d;
    dt_ctx *ctx = quiet(rank, NULL);
    memset(&d, 0, sizeof d);
    dt_weights *w = dt_weights_create(ctx, to, d);
    dt_weights_declare(w, "t", DT_F32, DT_SHAPE(4));
    dt_weights_write(w, 0, 0, 4, DT_F32, ones);
    dt_weights_close(w);
    dt_status status = dt_error(ctx);
    snprintf(text, 600, "%s", dt_error_text(ctx));
    dt_ctx_free(ctx);
    return status;
}
static dt_status write_rank_0(const char *to, char text[600]) { return write_weights(to, 0, text); }
static dt_status write_rank_1(const char *to, char text[600]) { return write_weights(to, 1, text); }

static dt_status write_file(const char *to, char text[600]) {
    dt_ctx *ctx = quiet(0, NULL);
    dt_status status = dt_file_write(ctx, to, "text", 4);
    snprintf(text, 600, "%s", dt_error_text(ctx));
    dt_ctx_free(ctx);
    return status;
}

static dt_status write_export(const char *to, char text[600]) {
    dt_ctx *ctx = quiet(0, NULL);
    model m = model_make(ctx);
    dt_export_desc d;
    memset(&d, 0, sizeof d);
    dt_zero_export(m.zero, to, d);
    dt_status status = dt_error(ctx);
    snprintf(text, 600, "%s", dt_error_text(ctx));
    dt_ctx_free(ctx);
    return status;
}

typedef struct writer {
    const char *name, *to, *temp;
    dt_status (*write)(const char *to, char text[600]);
} writer;
static const writer writers[] = {
    { "dt_file_write", "out.json", "out.json.tmp", write_file },
    { "dt_weights_create", "X.safetensors", "X.safetensors.tmp", write_rank_0 },
    { "dt_weights_create of rank 1", "X.safetensors", "X.safetensors.1.tmp", write_rank_1 },
    { "dt_zero_export", "X.bin", "X.bin.tmp", write_export },
    { "dt_trace_write", "trace.json", "trace.json.tmp", write_trace },
};

static void test_temporaries(void) {
    char text[600];
    for (size_t i = 0; i < sizeof writers / sizeof *writers; i++)
        for (int kind = 0; kind < KINDS; kind++) {
            const writer *w = &writers[i];
            path to = at("%s", w->to), temp = at("%s", w->temp);
            size_t n = 0, m = 0;
            victim_make(at("victim"));
            unlink(to.s);
            CHECK_MSG(w->write(to.s, text) == DT_OK, "%s: %s", w->name, text);
            char *before = get(to, &n);
            plant(temp, kind);
            alarm(60); /* ends the test if a call waits for a FIFO */
            dt_status status = w->write(to.s, text);
            alarm(0);
            check_victim(w->name, kind);
            char *after = get(to, &m);
            CHECK_MSG(status == (kind == FOLDER ? DT_ERR_IO : DT_OK),
                "%s, %s at its temporary name: %s", w->name, kinds[kind], text);
            CHECK_MSG(is_kind(to, S_IFREG) && before && after && n > 0 && m > 0 &&
                          (w->write == write_trace || (n == m && memcmp(before, after, n) == 0)),
                "%s, %s: the file differs from before", w->name, kinds[kind]);
            if (kind == FOLDER)
                CHECK_MSG(
                    strstr(text, w->temp) && strstr(text, "directory"), "%s: %s", w->name, text);
            else
                CHECK_MSG(
                    !is_there(temp), "%s, %s: the temporary file is left", w->name, kinds[kind]);
            unplant(temp, kind);
            free(before);
            free(after);
        }
}

static void invalid_map(const dt_tensor *param, dt_weight_map *place, void *user) {
    (void)param, (void)user;
    place->n = 3;
}

/* An export that fails before it makes its temporary file does not remove an older file of that
   name. */
static void test_failed_export(void) {
    dt_ctx *ctx = quiet(0, NULL);
    model m = model_make(ctx);
    dt_export_desc d;
    memset(&d, 0, sizeof d);
    d.map_weight = invalid_map;
    put(at("Y.bin.tmp"), "mine");
    CHECK(dt_zero_export(m.zero, at("Y.bin").s, d) == DT_ERR_ARG);
    CHECK(holds(at("Y.bin.tmp"), "mine") && !is_there(at("Y.bin")));
    dt_ctx_free(ctx);
}

/* The lock is not a temporary file: another kind of file in its place is an error that names the
   kind. */
static void test_lock(void) {
    static const char *const says[KINDS] = { "symbolic link", "symbolic link", "hard link", "FIFO",
        "directory" };
    path ck = at("ck"), lock = at("ck/lock");
    char text[600];
    for (int kind = 0; kind < KINDS; kind++) {
        victim_make(at("victim"));
        clear(ck);
        must(mkdir(ck.s, 0777) == 0, ck.s);
        plant(lock, kind);
        alarm(60);
        dt_status status = job(saves_to(&ck), 1, text);
        alarm(0);
        check_victim("the lock", kind);
        CHECK_MSG(status == DT_ERR_IO && strstr(text, lock.s) && strstr(text, says[kind]),
            "%s at the lock: %s: %s", kinds[kind], dt_status_name(status), text);
        unplant(lock, kind);
    }
}

/* ---- 3. other kinds of file where dt reads ---- */

/* Runs `fn` in a child process with a limit of 60 s. Returns the exit status, or -signal. */
static int in_time(int (*fn)(const char *path), const char *arg) {
    int status = 0;
    pid_t child = fork();
    must(child >= 0, "fork");
    if (child == 0) {
        alarm(60);
        _exit(fn(arg));
    }
    must(waitpid(child, &status, 0) == child, "waitpid");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/* 0 if the context failed with DT_ERR_IO and a text that names the path and the kind, else 1. */
static int refused(dt_ctx *ctx, const char *p, const char *kind) {
    const char *text = dt_error_text(ctx);
    int ok = dt_error(ctx) == DT_ERR_IO && strstr(text, p) && strstr(text, kind);
    if (!ok) fprintf(stderr, "%s: %s: %s\n", p, dt_status_name(dt_error(ctx)), text);
    return !ok;
}

static int read_fifo(const char *p) {
    size_t n;
    dt_ctx *ctx[3];
    for (int i = 0; i < 3; i++) ctx[i] = quiet(0, NULL);
    dt_file_read(ctx[0], p, 100, &n);
    dt_weights_open(ctx[1], p);
    dt_text_open(ctx[2], &p, 1, 4);
    return refused(ctx[0], p, "FIFO") | refused(ctx[1], p, "FIFO") | refused(ctx[2], p, "FIFO");
}

static int read_device(const char *p) {
    size_t n;
    dt_ctx *ctx = quiet(0, NULL);
    dt_file_read(ctx, p, 100, &n);
    return refused(ctx, p, "not a regular file");
}

/* The manifest of the newest checkpoint, step 2, is a FIFO: a load takes the one of step 1. */
static int read_checkpoint(const char *ck) {
    char text[600];
    return load_step(ck, NULL, text) != 1 || load_step(at("ck/step-2").s, NULL, text) != -1 ||
           !strstr(text, "FIFO");
}

static void test_reading(void) {
    path ck = at("ck"), fifo = at("fifo"), socket = at("socket");
    char text[600];
    must(mkfifo(fifo.s, 0666) == 0, fifo.s);
    must(mknod(socket.s, S_IFSOCK | 0666, 0) == 0, socket.s);
    CHECK_MSG(in_time(read_fifo, fifo.s) == 0, "a FIFO was read, or a call waited for it");
    CHECK(in_time(read_device, "/dev/null") == 0 && in_time(read_device, socket.s) == 0);
    clear(ck);
    CHECK_MSG(job(saves_to(&ck), 2, text) == DT_OK, "%s", text);
    fifo = at("ck/step-2/manifest.json");
    must(unlink(fifo.s) == 0 && mkfifo(fifo.s, 0666) == 0, fifo.s);
    CHECK_MSG(in_time(read_checkpoint, ck.s) == 0,
        "a checkpoint whose manifest is a FIFO was loaded, or a call waited");
}

/* ---- 4. a job that starts without descriptors 0 to 2 ---- */

static void print(double done, void *user) {
    static const char line[] = "nor does this one\n";
    (void)done, (void)user;
    for (int fd = 1; fd <= 2; fd++)
        if (write(fd, line, sizeof line - 1) < 0 && errno != EBADF) abort();
    dt_host_default()->log(NULL, DT_LOG_NOTICE, 0, "a line that belongs in no file");
}

/* Ranks that print to descriptors 1 and 2 while checkpoints are saved, also in the background. */
static dt_status printing_rank(dt_ctx *ctx, void *user) {
    path dir = *(path *)user;
    model m = model_make(ctx);
    dt_checkpoint_desc d = saves_to(&dir);
    d.progress = print;
    d.background = 1;
    dt_checkpoint *c = dt_checkpoint_open(m.zero, d);
    for (int i = 0; i < 3 && dt_error(ctx) == DT_OK; i++) {
        model_step(ctx, &m);
        dt_checkpoint_save(c);
        while (!dt_checkpoint_poll(c)) print(0, NULL);
    }
    dt_checkpoint_close(c);
    return dt_error(ctx);
}

/* Runs a job of two ranks with some descriptors closed: bit fd of `closed` closes fd. */
static int run_with_closed(int closed, dt_backend backend, path dir) {
    dt_run_desc d;
    int status = 0, null = open("/dev/null", O_RDWR);
    fflush(stdout);
    pid_t child = fork();
    must(child >= 0, "fork");
    if (child == 0) {
        for (int fd = 0; fd < 3; fd++) {
            if (closed >> fd & 1)
                close(fd);
            else if (fd)
                dup2(null, fd);
        }
        close(null);
        memset(&d, 0, sizeof d);
        d.ranks = 2;
        d.timeout_s = 120;
        d.backend = backend;
        _exit(dt_run(d, printing_rank, &dir) != DT_OK);
    }
    close(null);
    must(waitpid(child, &status, 0) == child, "waitpid");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static int same_file(path a, path b) {
    size_t n = 0, m = 0;
    char *x = get(a, &n), *y = get(b, &m);
    int same = x && y && n == m && n > 0 && memcmp(x, y, n) == 0;
    free(x);
    free(y);
    return same;
}

static void test_descriptors(void) {
    static const dt_backend backends[2] = { DT_BACKEND_THREADS, DT_BACKEND_PROCS };
    char text[600];
    for (int k = 0; k < 2; k++)
        for (int closed = 0; closed < 8; closed++) {
            path dir = at("fd-%d-%d", k, closed);
            CHECK_MSG(run_with_closed(closed, backends[k], dir) == 0, "descriptors %d closed, %s",
                closed, k ? "procs" : "threads");
            int same = 0;
            for (int step = 1; step <= 3; step++)
                for (int i = 0; i < 4; i++)
                    same += same_file(at("fd-%d-%d/step-%d/%s", k, closed, step, names[i]),
                        at("fd-0-0/step-%d/%s", step, names[i]));
            CHECK_MSG(same == 12, "descriptors %d closed, %s: %d of 12 files have the right bytes",
                closed, k ? "procs" : "threads", same);
            for (int step = 1; step <= 3; step++)
                CHECK_MSG(load_step(at("fd-%d-%d/step-%d", k, closed, step).s, NULL, text) == step,
                    "%s", text);
        }
}

/* ---- 5. a limit of file size ---- */

static int limited(const char *p) {
    struct rlimit most = { 256, 256 };
    static char big[5000];
    char text[600];
    path ck = at("limited"), log = at("log");
    int bad = 0, fd = open(log.s, O_RDWR | O_CREAT, 0666);
    signal(SIGXFSZ, SIG_DFL);
    if (fd < 0 || ftruncate(fd, 256) != 0 || lseek(fd, 0, SEEK_END) != 256) return 1;
    if (setrlimit(RLIMIT_FSIZE, &most) != 0) return 1;
    dt_ctx *ctx = quiet(0, NULL);
    dt_file_write(ctx, p, big, sizeof big);
    bad |= refused(ctx, p, "File too large");
    bad |= write_trace(p, text) != DT_ERR_IO || !strstr(text, p) || !strstr(text, "File too large");
    dt_checkpoint_desc d = saves_to(&ck);
    d.config_json = big;
    memset(big, 'x', sizeof big - 1);
    bad |= job(d, 1, text) != DT_ERR_IO || !strstr(text, "limited/step-1.") ||
           !strstr(text, "File too large");
    if (bad) fprintf(stderr, "%s\n", text);
    dup2(fd, 2); /* now stderr is full too: dt_log must not end the process */
    dt_log(dt_ctx_make((dt_ctx_desc){ .seed = 1 }), DT_LOG_NOTICE, "a line");
    return bad;
}

static void test_limit(void) {
    int result = in_time(limited, at("limited.json").s);
    CHECK_MSG(result == 0, "a file beyond RLIMIT_FSIZE: %d%s", result,
        result == -SIGXFSZ ? ", SIGXFSZ" : "");
    CHECK(!is_there(at("limited.json")) && !is_there(at("limited.json.tmp")) &&
          !is_there(at("limited/step-1")));
}

/* ---- 6. a checkpoint that is saved can be loaded ---- */

/* Opens a checkpoint, saves step 1 and loads it. Returns the name of the first call that failed and
   its error text, or NULL. later: an element of d.extra_state that becomes a copy of the first
   element after the open; NULL: none. */
static const char *saves_and_loads(
    dt_checkpoint_desc d, const dt_extra_state *later, char text[600]) {
    static path dir;
    dt_ctx *ctx = quiet(0, NULL);
    const char *what = NULL;
    dir = at("limits");
    clear(dir);
    d.dir = dir.s;
    model m = model_make(ctx);
    dt_checkpoint *c = dt_checkpoint_open(m.zero, d);
    if (!c) what = "open";
    model_step(ctx, &m);
    if (later) *(dt_extra_state *)(uintptr_t)later = *d.extra_state;
    if (!what && dt_checkpoint_save(c) != DT_OK) what = "save";
    if (!what && dt_checkpoint_load(c, NULL) != 1) what = "load";
    if (!what && d.config && strcmp(dt_checkpoint_config(c), d.config) != 0) what = "config";
    if (what && strcmp(what, "open") == 0 && dt_error(ctx) != DT_ERR_ARG)
        what = "open, but no DT_ERR_ARG";
    if (what && strcmp(what, "load") != 0 && is_there(at("limits/step-1")))
        what = "failed, but the checkpoint exists";
    dt_checkpoint_close(c);
    snprintf(text, 600, "%s", dt_error_text(ctx));
    dt_ctx_free(ctx);
    return what;
}

static void check_limit(
    const char *name, dt_checkpoint_desc d, const char *want, const char *says) {
    char text[600];
    const char *what = saves_and_loads(d, NULL, text);
    CHECK_MSG((what ? strcmp(what, want ? want : "") == 0 : !want) && strstr(text, says),
        "%s: %s, not %s: %s", name, what ? what : "it is saved and loaded",
        want ? want : "saved and loaded", text);
}

static char *filled(size_t bytes, char c) {
    char *text = (char *)malloc(bytes + 1);
    must(text != NULL, "malloc");
    memset(text, c, bytes);
    text[bytes] = 0;
    return text;
}

static void test_limits(void) {
    static double x[2] = { 1, 2 };
    enum { MANY = 4300000, SOME = 100000 };
    double *many = (double *)calloc(MANY, sizeof *many);
    dt_extra_state saved[3] = { { "a", x, 2 }, { "b", x, 1 }, { "a", x, 2 } };
    dt_checkpoint_desc d;
    memset(&d, 0, sizeof d);
    must(many != NULL, "calloc");
    d.extra_state = saved;
    d.n_extra_state = 2;
    check_limit("two entries", d, NULL, "");
    d.n_extra_state = 3;
    check_limit("two entries of one name", d, "open",
        "could not be loaded: manifest.json:1:258: 'a' is there twice");
    d.n_extra_state = 2;
    saved[1].name = NULL;
    check_limit("no name", d, "open", "the name of extra_state[1] has 0 bytes");
    saved[1].name = "";
    check_limit("an empty name", d, "open", "the name of extra_state[1] has 0 bytes");
    char *text = filled((16 << 20) + 1, 'n');
    saved[1].name = text;
    check_limit("a long name", d, "open", "a string of more than 16777216 bytes");
    saved[1].name = "\xff\x01\"\\ \xc3\xa9";
    check_limit("a name of arbitrary bytes", d, NULL, "");
    char why[600];
    const char *what = saves_and_loads(d, &saved[1], why);
    CHECK_MSG(what && strcmp(what, "save") == 0 && strstr(why, "could not be loaded") &&
                  strstr(why, "'a' is there twice"),
        "two entries get one name after the open: %s: %s", what ? what : "saved and loaded", why);
    saved[1].name = "b";
    saved[1].count = -1;
    check_limit("-1 values", d, "open", "has -1 numbers");
    saved[1].count = 1;
    saved[1].values = NULL;
    check_limit("values at NULL", d, "open", "has 1 numbers at NULL");
    saved[1].count = 0;
    check_limit("no values", d, NULL, "");
    saved[1].values = many;
    saved[1].count = MANY;
    check_limit("too many values", d, "open", "107500283 bytes of JSON, at most 100000000");
    saved[1].count = SOME;
    for (int i = 0; i < SOME; i++) many[i] = -1.2345678901234567e-300 * (i + 1);
    check_limit("many values", d, NULL, "");
    many[7] = (double)NAN;
    check_limit("a NaN", d, "save", "number 7 of '");
    many[7] = -(double)INFINITY;
    check_limit("an infinity", d, "save", "is -inf: only finite");
    saved[1].count = 0;
    d.n_extra_state = -1;
    check_limit("-1 entries", d, "open", "n_extra_state is -1");
    d.n_extra_state = 1;
    d.extra_state = NULL;
    check_limit("extra_state NULL", d, "open", "n_extra_state is 1, and extra_state NULL");
    d.n_extra_state = 0;
    d.config = text;
    check_limit("a long config", d, "open", "a string of more than 16777216 bytes");
    text[1 << 20] = 0;
    for (int i = 0; i < 1 << 20; i++) {
        unsigned byte = (unsigned)i * 2654435761u >> 13 & 0xff;
        text[i] = (char)(byte ? byte : 1);
    }
    check_limit("a config of all bytes", d, NULL, "");
    free(text);
    d.config = NULL;
    d.config_json = text = filled(100000001, 'b');
    check_limit("a long config_json", d, "open", "config_json has 100000001 bytes");
    free(text);
    free(many);
}

static void map_to_bad_name(const dt_tensor *param, dt_weight_map *place, void *user) {
    (void)param, (void)user;
    place->n = 1;
    snprintf(place->name[0], sizeof place->name[0], "w\xff");
}

/* A tensor's name must be UTF-8. Other names are refused when the checkpoint is opened, not hours
   later at the first save. */
static void test_tensor_names(void) {
    dt_checkpoint_desc d;
    dt_ctx *ctx = quiet(0, NULL);
    memset(&d, 0, sizeof d);
    d.map_weight = map_to_bad_name;
    check_limit("a mapped name that is not UTF-8", d, "open", "a name is UTF-8");
    CHECK(dt_param(ctx, "w\xff", DT_SHAPE(1), DT_ZEROS) == NULL && dt_error(ctx) == DT_ERR_ARG);
    dt_ctx_free(ctx);
    static const char head[] =
        "{\"\\udc80\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}  ";
    path p = at("bytes.safetensors");
    FILE *f = fopen(p.s, "wb");
    uint64_t n = sizeof head - 1;
    must(f && fwrite(&n, 8, 1, f) == 1 && fwrite(head, n, 1, f) == 1, p.s);
    must(fwrite("\0\0\0", 4, 1, f) == 1 && fclose(f) == 0, p.s);
    ctx = quiet(0, NULL);
    CHECK_MSG(!dt_weights_open(ctx, p.s) && strstr(dt_error_text(ctx), "not UTF-8"), "%s",
        dt_error_text(ctx));
    dt_ctx_free(ctx);
}

/* ---- 7. a checkpoint that cannot be read does not count as damaged ---- */

/* An io table that calls the default one. Reading call number `at` fails with errno `reason`. */
typedef struct broken {
    dt_io io;
    long calls, at;
    int reason;
    const char *hit;
} broken;

static int broken_hit(void *user, const char *what) {
    broken *b = (broken *)user;
    if (++b->calls != b->at) return 0;
    b->hit = what;
    errno = b->reason;
    return 1;
}
static int broken_open(void *user, const char *p, int mode) {
    return broken_hit(user, "open") ? -1 : dt_io_default()->open(NULL, p, mode);
}
static int64_t broken_size(void *user, int fd) {
    return broken_hit(user, "size") ? -1 : dt_io_default()->size(NULL, fd);
}
static int64_t broken_pread(void *user, int fd, void *buf, size_t bytes, int64_t offset) {
    return broken_hit(user, "pread") ? -1 : dt_io_default()->pread(NULL, fd, buf, bytes, offset);
}
static int broken_list(
    void *user, const char *p, void (*each)(void *arg, const char *name), void *arg) {
    return broken_hit(user, "list") ? -1 : dt_io_default()->list_folder(NULL, p, each, arg);
}

static broken broken_make(long number, int reason) {
    broken b;
    memset(&b, 0, sizeof b);
    b.io = *dt_io_default();
    b.io.open = broken_open;
    b.io.size = broken_size;
    b.io.pread = broken_pread;
    b.io.list_folder = broken_list;
    b.at = number;
    b.reason = reason;
    return b;
}

typedef struct pair_job {
    broken table;
    int rank;
    path dir;
    int64_t step[2];
} pair_job;
static dt_status pair_rank(dt_ctx *ctx, void *user) {
    pair_job *j = (pair_job *)user;
    dt_checkpoint_desc d;
    memset(&d, 0, sizeof d);
    if (dt_ctx_rank(ctx) == j->rank) {
        *(dt_io *)dt_ctx_io(ctx) = j->table.io;
        ((dt_io *)dt_ctx_io(ctx))->user = &j->table;
    }
    model m = model_make(ctx);
    dt_checkpoint *c = dt_checkpoint_open(m.zero, d);
    j->step[dt_ctx_rank(ctx)] = dt_checkpoint_load(c, j->dir.s);
    dt_checkpoint_close(c);
    return dt_error(ctx);
}

/* A folder with the checkpoints of step 1 and 2. */
static path two_checkpoints(void) {
    path ck = at("ck");
    char text[600];
    clear(ck);
    CHECK_MSG(job(saves_to(&ck), 2, text) == DT_OK, "%s", text);
    return ck;
}

/* Each reading call of a load fails once, on a single rank or on one of two. The load must fail,
   not fall back to the older checkpoint. */
static void test_unreadable(void) {
    static const int reasons[] = { EACCES, EPERM, EMFILE, ENFILE, EIO, ENOMEM, ESTALE, 0 };
    path ck = two_checkpoints();
    char text[600];
    int cases = 0;
    for (size_t k = 0; k < sizeof reasons / sizeof *reasons; k++)
        for (long number = 1, over = 0; !over; number++, cases++) {
            broken b = broken_make(number, reasons[k]);
            b.io.user = &b;
            int64_t step = load_step(ck.s, &b.io, text);
            const char *why = reasons[k] ? strerror(reasons[k]) : "the io table refused";
            over = !b.hit;
            CHECK_MSG(over ? step == 2 : step == -1 && strstr(text, why) != NULL,
                "call %ld (%s) fails, %s: step %lld "
                "is loaded: %s",
                number, b.hit ? b.hit : "none", why, (long long)step, text);
        }
    for (int rank = 0; rank < 2; rank++)
        for (long number = 1, over = 0; !over; number++, cases++) {
            dt_run_desc d;
            dt_report report;
            dt_host host = *dt_host_default();
            pair_job j = { broken_make(number, EIO), rank, ck, { 0, 0 } };
            memset(&d, 0, sizeof d);
            host.log = silent;
            d.host = &host;
            d.ranks = 2;
            d.timeout_s = 120;
            d.report = &report;
            dt_status status = dt_run(d, pair_rank, &j);
            over = !j.table.hit;
            CHECK_MSG(over ? status == DT_OK && j.step[0] == 2
                           : status == DT_ERR_IO && j.step[0] == -1 &&
                                 strstr(report.text, strerror(EIO)) != NULL,
                "rank %d of 2, call %ld (%s): step %lld: %s", rank, number,
                j.table.hit ? j.table.hit : "none", (long long)j.step[0], report.text);
        }
    printf("unreadable: %d loads\n", cases);
}

/* Nor may a load fall back to the older checkpoint when an allocation fails. */
static long memory_left;
static void *little_alloc(void *user, size_t bytes, dt_mem mem) {
    (void)user;
    if (memory_left >= 0 && memory_left-- == 0) return NULL;
    return dt_host_default()->alloc(NULL, bytes, mem);
}

static void test_no_memory(void) {
    int64_t step = -1;
    path ck = two_checkpoints();
    for (long number = 0; step != 2 && number < 2000; number++) {
        dt_ctx_desc desc;
        dt_host host = *dt_host_default();
        memset(&desc, 0, sizeof desc);
        host.log = silent;
        host.alloc = little_alloc;
        desc.host = &host;
        memory_left = -1;
        dt_ctx *ctx = dt_ctx_make(desc);
        model m = model_make(ctx);
        dt_checkpoint_desc d;
        memset(&d, 0, sizeof d);
        dt_checkpoint *c = dt_checkpoint_open(m.zero, d);
        memory_left = number;
        step = dt_checkpoint_load(c, ck.s);
        memory_left = -1;
        CHECK_MSG(step == 2 || step == -1, "allocation %ld is refused: step %lld is loaded", number,
            (long long)step);
        dt_checkpoint_close(c);
        dt_ctx_free(ctx);
    }
    CHECK(step == 2);
}

/* Files without read permission. Runs as another user, because root may read every file. */
static int forbidden(const char *ck) {
    char text[600], name[64];
    if (getuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)) return 77;
    int bad = load_step(ck, NULL, text) != -1 || !strstr(text, strerror(EACCES));
    if (bad) fprintf(stderr, "%s\n", text);
    int closed = strstr(ck, "closed") != NULL;
    return bad || (closed && dt_checkpoint_newest(dt_io_default(), ck, name, sizeof name) != -2);
}

static void test_forbidden(void) {
    static const char *const what[] = { "step-2", "step-2/manifest.json", "step-2/config.json",
        "step-2/model.safetensors", "step-2/optim.safetensors" };
    path ck = two_checkpoints(), closed = at("closed");
    char name[64];
    chmod(scratch, 0755);
    for (int i = 0; i < 5; i++) {
        path p = at("ck/%s", what[i]);
        struct stat st;
        must(stat(p.s, &st) == 0 && chmod(p.s, 0) == 0, p.s);
        int result = in_time(forbidden, ck.s);
        if (result == 77)
            check_skip("files without read permission: cannot change to another user");
        else
            CHECK_MSG(result == 0, "%s cannot be read: %d", what[i], result);
        must(chmod(p.s, st.st_mode & 0777) == 0, p.s);
    }
    must(rename(ck.s, closed.s) == 0 && chmod(closed.s, 0) == 0, closed.s);
    int result = in_time(forbidden, closed.s);
    CHECK_MSG(result == 0 || result == 77,
        "a folder that cannot be listed counts as one without a checkpoint: %d", result);
    must(chmod(closed.s, 0777) == 0, closed.s);
    put(at("file"), "");
    CHECK(dt_checkpoint_newest(dt_io_default(), at("file").s, name, sizeof name) == -2 &&
          errno == ENOTDIR);
    CHECK(dt_checkpoint_newest(dt_io_default(), at("none").s, name, sizeof name) == -1);
    CHECK(dt_checkpoint_newest(dt_io_default(), closed.s, name, sizeof name) == 2);
    CHECK(strcmp(name, "step-2") == 0);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } parts[] = {
        { "leftovers", test_leftovers },
        { "keep", test_keep },
        { "temporaries", test_temporaries },
        { "export", test_failed_export },
        { "lock", test_lock },
        { "reading", test_reading },
        { "descriptors", test_descriptors },
        { "limit", test_limit },
        { "limits", test_limits },
        { "names", test_tensor_names },
        { "unreadable", test_unreadable },
        { "memory", test_no_memory },
        { "forbidden", test_forbidden },
    };
    must(mkdtemp(scratch) != NULL, scratch);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (argc < 2 || strcmp(argv[1], parts[i].name) == 0) parts[i].run();
    clear(at("%s", ""));
    return check_done("test_file_safety");
}
