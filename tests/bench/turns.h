/* turns.h - benchmarks whose contestants are processes that run in turns
   Public domain or MIT, at your choice; see LICENSE.

   Include it after bench.h. Everything is static.

   Each contestant, dt or a peer, runs in its own processes. They run in turns of a few steps while
   the others are stopped (SIGSTOP), so other load on the machine affects all of them. A contestant
   writes lines to its standard output:

       pid,P              the process of a rank; without any, its process group is measured
       step,N,CHECK,MS    step N has taken MS milliseconds; CHECK shows what it computed
       error,TEXT         why it ends */
#ifndef TURNS_H
#define TURNS_H

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>

/* CHECKED: the steps whose CHECK is kept; WARM_UP: the steps of a trial that do not count */
enum { MOST_STEPS = 10000, MOST_PIDS = 64, MOST_WORDS = 600, CHECKED = 5, WARM_UP = 2 };

typedef struct contestant {
    char name[96];
    pid_t pid;                     /* leader of its process group; 0: none */
    int out;                       /* its standard output */
    int ranks[MOST_PIDS], n_ranks; /* the processes of its ranks, if it prints them */
    int stopped;
    double ms[MOST_STEPS];
    int n_ms;
    double check[CHECKED]; /* of the first steps */
    char error[256];
    double rss, pss; /* bytes: peak, and now with each shared page counted once */
    /* processor time of the steps that count, of all ranks and threads */
    double processor;
} contestant;

/* Starts a command, a NULL-terminated list of words, in `folder` if that is not NULL. */
static inline int contestant_start(
    contestant *c, const char *name, const char *const *words, const char *folder) {
    int pipe_of[2];
    memset(c, 0, sizeof *c);
    snprintf(c->name, sizeof c->name, "%s", name);
    for (int i = 0; i < CHECKED; i++) c->check[i] = NAN;
    fflush(stdout);
    if (pipe(pipe_of) != 0) return 0;
    c->pid = fork();
    if (c->pid == 0) {
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(pipe_of[1], 1);
        close(pipe_of[0]);
        close(pipe_of[1]);
        if (!freopen("/dev/null", "w", stderr)) _exit(127);
        if (folder && chdir(folder) != 0) _exit(127);
        execvp(words[0], (char *const *)(uintptr_t)words);
        _exit(127);
    }
    close(pipe_of[1]);
    c->out = pipe_of[0];
    if (c->pid > 0) return setpgid(c->pid, c->pid), 1;
    close(c->out);
    return 0;
}

static inline void contestant_end(contestant *c) {
    if (c->pid <= 0) return;
    kill(-c->pid, SIGKILL);
    waitpid(c->pid, NULL, 0);
    close(c->out);
    c->pid = 0;
}

/* Reads a line of its output within 10 minutes; 0 at the end of the output. */
static inline int contestant_line(contestant *c, char *line, size_t room) {
    struct pollfd ready = { c->out, POLLIN, 0 };
    size_t n = 0;
    while (poll(&ready, 1, 600000) == 1 && read(c->out, line + n, 1) == 1) {
        if (line[n] == '\n') return line[n] = 0, 1;
        if (n + 2 < room) n++;
    }
    return 0;
}

/* The milliseconds of its next step; NAN if it has ended. */
static inline double contestant_step(contestant *c) {
    char line[512];
    long long step;
    double check, ms;
    int pid;
    while (contestant_line(c, line, sizeof line)) {
        if (sscanf(line, "pid,%d", &pid) == 1 && c->n_ranks < MOST_PIDS)
            c->ranks[c->n_ranks++] = pid;
        if (strncmp(line, "error,", 6) == 0)
            snprintf(c->error, sizeof c->error, "%.250s", line + 6);
        int n = sscanf(line, "step,%lld,%lf,%lf", &step, &check, &ms);
        /* llm.c counts steps from 0 */
        if (n != 3) n = sscanf(line, "step %lld: train loss %lf (took %lf ms)", &step, &check, &ms);
        if (n != 3) continue;
        if (step >= 1 && step <= CHECKED) c->check[step - 1] = check;
        return ms;
    }
    if (!c->error[0]) snprintf(c->error, sizeof c->error, "it ended without an error message");
    return NAN;
}

/* Processor time of a process so far. */
static inline double proc_seconds(int pid) {
    char path[64], line[1024] = "";
    double user = 0, system = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *f = fopen(path, "r");
    if (f && fgets(line, sizeof line, f) && strrchr(line, ')'))
        sscanf(strrchr(line, ')') + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lf %lf",
            &user, &system);
    if (f) fclose(f);
    return (user + system) / (double)sysconf(_SC_CLK_TCK);
}

static inline double contestant_processor(const contestant *c) {
    double seconds = c->n_ranks ? 0 : proc_seconds(c->pid);
    for (int i = 0; i < c->n_ranks; i++) seconds += proc_seconds(c->ranks[i]);
    return seconds;
}

/* Lets it run for `steps` steps that count, then stops it. A step in which it was stopped does not
   count. 0 if it has ended. */
static inline int contestant_turn(contestant *c, int steps) {
    struct pollfd ready = { c->out, POLLIN, 0 };
    /* steps that ended before the stop */
    while (c->stopped && poll(&ready, 1, 0) == 1 && isfinite(contestant_step(c))) continue;
    kill(-c->pid, SIGCONT);
    if (c->stopped) contestant_step(c);
    c->stopped = 0;
    double before = contestant_processor(c);
    for (int i = 0; i < steps; i++) {
        double ms = contestant_step(c);
        if (!isfinite(ms)) return 0;
        if (c->n_ms < MOST_STEPS) c->ms[c->n_ms++] = ms;
    }
    kill(-c->pid, SIGSTOP);
    c->processor += contestant_processor(c) - before;
    c->stopped = 1;
    return 1;
}

static inline int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline double median(const double *values, int n) {
    double sorted[MOST_STEPS];
    if (n == 0) return NAN;
    memcpy(sorted, values, (size_t)n * sizeof *sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, by_value);
    return (sorted[(n - 1) / 2] + sorted[n / 2]) / 2;
}

static inline double least(const double *values, int n) {
    double x = NAN;
    for (int i = 0; i < n; i++) x = fmin(x, values[i]);
    return x;
}

/* Returns a field of /proc/PID/FILE in bytes (the file counts kB); 0 if the file lacks it. */
static inline double proc_field(int pid, const char *file, const char *field) {
    char path[64], line[256];
    double kilobytes = 0;
    size_t length = strlen(field);
    snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, field, length) == 0) kilobytes = atof(line + length);
    if (f) fclose(f);
    return 1024 * kilobytes;
}

static inline int group_of(int pid) {
    char path[64], line[1024] = "";
    int group = -1;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *f = fopen(path, "r");
    if (f && fgets(line, sizeof line, f) && strrchr(line, ')'))
        sscanf(strrchr(line, ')') + 1, " %*c %*d %d", &group);
    if (f) fclose(f);
    return group;
}

/* Peak memory: the sum over its ranks, or over its process group if it does not print its ranks. */
static inline void contestant_memory(contestant *c) {
    DIR *d = c->n_ranks == 0 ? opendir("/proc") : NULL;
    struct dirent *e;
    while (d && (e = readdir(d)) && c->n_ranks < MOST_PIDS)
        if (atoi(e->d_name) > 0 && group_of(atoi(e->d_name)) == c->pid)
            c->ranks[c->n_ranks++] = atoi(e->d_name);
    if (d) closedir(d);
    c->rss = c->pss = 0;
    for (int i = 0; i < c->n_ranks; i++) {
        c->rss += proc_field(c->ranks[i], "status", "VmHWM:");
        c->pss += proc_field(c->ranks[i], "smaps_rollup", "Pss:");
    }
}

/* Runs some steps of each variant in `list`, names that are separated by commas, if it has the word
   bf16 in its name or, with bf16 0, if it has not. `start` starts a variant. *best is the variant
   with the fastest step, left stopped. 0 if no variant works. */
static inline int contestant_best(contestant *best, const char *list, int bf16,
    int (*start)(contestant *c, const char *variant, const void *user), const void *user) {
    char variant[96];
    contestant *c = (contestant *)malloc(sizeof *c);
    int found = 0;
    for (const char *at = list; c && *at; at += *at == ',') {
        int length = (int)strcspn(at, ",");
        snprintf(variant, sizeof variant, "%.*s", length, at);
        at += length;
        if ((strstr(variant, "bf16") != NULL) != bf16) continue;
        int works = start(c, variant, user) && contestant_turn(c, WARM_UP + 3);
        c->n_ms = c->n_ms > WARM_UP ? c->n_ms - WARM_UP : 0;
        memmove(c->ms, c->ms + WARM_UP, (size_t)c->n_ms * sizeof *c->ms);
        if (works)
            printf("# %s: best step %.1f ms\n", c->name, least(c->ms, c->n_ms));
        else
            printf("# %s does not work: %s\n", c->name, c->error);
        if (works && (!found || least(c->ms, c->n_ms) < least(best->ms, best->n_ms))) {
            if (found) contestant_end(best);
            *best = *c;
            found = 1;
        } else
            contestant_end(c);
    }
    free(c);
    if (found) best->n_ms = 0, best->processor = 0;
    return found;
}

// ==== PyTorch ===================================================================================

typedef struct torch {
    char version[64]; /* "": not installed */
    const char *python;
    char script[4096];
} torch;

/* Looks for PyTorch in `python`, or in python3 if that is NULL, and for tests/bench/peers/NAME in
   the working directory or beside the program. Prints what it finds. */
static inline torch torch_find(const char *python, const char *name) {
    torch t = { .python = python ? python : "python3" };
    char command[4096], self[2048];
    snprintf(t.script, sizeof t.script, "tests/bench/peers/%s", name);
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (access(t.script, R_OK) != 0 && length > 0) {
        self[length] = 0;
        if (strrchr(self, '/')) *strrchr(self, '/') = 0;
        snprintf(t.script, sizeof t.script, "%s/../tests/bench/peers/%s", self, name);
    }
    snprintf(command, sizeof command,
        "'%s' -c 'import torch; print(torch.__version__)' 2>/dev/null", t.python);
    FILE *f = popen(command, "r");
    if (f && fscanf(f, "%63s", t.version) != 1) t.version[0] = 0;
    if (f) pclose(f);
    if (t.version[0])
        printf("# peer: PyTorch %s by %s\n", t.version, t.python);
    else
        printf("# peer: PyTorch is not installed for %s; python3 -m venv DIR && DIR/bin/pip "
               "install torch numpy, then "
               "--python DIR/bin/python\n",
            t.python);
    return t;
}

#endif /* TURNS_H */
