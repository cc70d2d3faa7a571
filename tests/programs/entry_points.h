/* entry_points.h - makes the arguments for test_entry_points.sh, and calls functions in child
   processes

   The script writes one function for each declaration, which makes its arguments with the functions
   below and makes the call. A pick is a choice of arguments. A forked child makes all picks of one
   function. If the child dies, each pick runs in its own child, so that one crash does not hide
   another. Limits are in processor time, which does not depend on other load. */
#ifndef ENTRY_POINTS_H
#define ENTRY_POINTS_H

#include <sys/resource.h>

enum { BATCH_SECONDS = 60, PICK_SECONDS = 5, WALL_SECONDS = 400, DATA_BYTES = 65536 };

/* Values for numbers. RANDOM draws a new value for each number. */
enum { ZERO, ONE, TWO, MINUS, LEAST, MOST, INF, NUMBERS, RANDOM = NUMBERS, SMALL };
enum { NO_HANDLES, FIRST_HANDLE, ALL_HANDLES };
enum { TEXT_NULL, TEXT_EMPTY, TEXT_ONE, TEXT_SOME, TEXTS };

typedef struct pick {
    int handles;   /* which handle arguments are valid; the others are NULL */
    int number;    /* the value of numbers: ZERO ... */
    int only;      /* index of the only number that is not 0; -1: all are set */
    int text;      /* buffers to write to and texts to read */
    int data;      /* 1: other pointers point to zeros, and sizes are small */
    int ranks;     /* 2: two threads make the call */
    int owns_data; /* the function keeps or frees its data: always NULL */
    uint32_t random;
    int numbers;  /* numbers made so far */
    int consumes; /* the call frees the context or its group */
    dt_ctx *ctx;
    dt_team *team;
    char guard[3][64];
    size_t sizes[3];
    int guards;
    void *block[24];
    int blocks;
} pick;

static uint32_t next_random(pick *p) {
    return (p->random = p->random * 1664525u + 1013904223u) >> 8;
}

static int number_kind(pick *p, int is_signed) {
    int at = p->numbers++;
    /* unsigned: never -1 */
    if (p->number == SMALL) return (int)(next_random(p) % (is_signed ? 4 : 3));
    if (p->number == RANDOM) return (int)(next_random(p) % NUMBERS);
    return p->only < 0 || p->only == at ? p->number : ZERO;
}

static uint64_t whole_number(pick *p, size_t bytes, int is_signed) {
    uint64_t most = ~(uint64_t)0 >> (64 - 8 * bytes) >> is_signed;
    switch (number_kind(p, is_signed)) {
    case ONE: return 1;
    case TWO: return 2;
    case MINUS: return ~(uint64_t)0;
    case LEAST: return is_signed ? most + 1 : most - 1;
    case MOST: return most;
    case INF: return most / 3;
    }
    return 0;
}

static double real_number(pick *p) {
    static const double of[] = { 0, 1, 2, -1, -1.7e308, NAN, INFINITY };
    return of[number_kind(p, 1)];
}

#define NUMBER(p, x) \
    _Generic((x), float \
             : real_number(p), double \
             : real_number(p), default \
             : whole_number(p, sizeof(x), (__typeof__(x))-1 < (__typeof__(x))1))

/* ---- pointers ---- */

static void *zeros(pick *p) {
    if (p->blocks == 24) abort();
    return p->block[p->blocks++] = calloc(1, DATA_BYTES);
}

static void *data(pick *p) { return p->data && !p->owns_data ? zeros(p) : NULL; }

/* A text to read. */
static const char *words(pick *p, int is_path) {
    static const char *some[] = { NULL, "", "x", "no/such/thing" };
    return some[p->text == TEXT_SOME && is_path && next_random(p) % 2 ? 2 : p->text];
}

/* A buffer for a text, and its size. The guard bytes around the buffer must not change. */
static char *text_buffer(pick *p, size_t *size) {
    static const size_t sizes[] = { 0, 0, 1, 40 };
    char *guard = p->guard[p->guards];
    memset(guard, 0xA5, sizeof p->guard[0]);
    *size = p->sizes[p->guards++] = sizes[p->text];
    if (p->text == TEXT_NULL) return p->random & 256 ? *size = 9, (char *)NULL : NULL;
    return guard + 8;
}

static void check_guards(const pick *p) {
    for (int i = 0; i < p->guards; i++)
        for (size_t at = 0; at < sizeof p->guard[0]; at++)
            if ((at < 8 || at >= 8 + p->sizes[i]) && (unsigned char)p->guard[i][at] != 0xA5) {
                fprintf(stderr, "ERROR: a text of %zu bytes is written at byte %d\n", p->sizes[i],
                    (int)at - 8);
                _exit(9);
            }
}

/* ---- valid handles ---- */

static dt_ctx *the_ctx(pick *p) {
    if (p->ctx) return p->ctx;
    dt_run_desc desc = { .ranks = 1, .timeout_s = 20 };
    p->team = dt_team_make(desc);
    p->ctx = dt_team_ctx(p->team, 0);
    dt_attach_desc attach = { .team = p->team };
    dt_comm_attach(p->ctx, attach);
    return p->ctx;
}

static int is_one_of(const char *word, const char *list) {
    const char *at = strstr(list, word);
    size_t length = strlen(word);
    return at && (at == list || at[-1] == ' ') && (at[length] == 0 || at[length] == ' ');
}

static dt_tensor *the_tensor(pick *p, const char *name) {
    static const int32_t ids[4];
    static const float values[16] = { 1 };
    dt_ctx *ctx = the_ctx(p);
    dt_shape row = DT_SHAPE(4), rows = DT_SHAPE(1, 2), x = DT_SHAPE(1, 2, 4),
             heads = DT_SHAPE(1, 2, 1, 4);
    dt_init ones = DT_ONES;
    if (is_one_of(name, "ids labels rows tokens positions"))
        return dt_input(ctx, DT_I32, rows, ids);
    if (is_one_of(name, "gain bias b")) return dt_input(ctx, DT_F32, row, values);
    if (is_one_of(name, "q k v")) return dt_input(ctx, DT_F32, heads, values);
    if (is_one_of(name, "w table param")) {
        dt_shape square = DT_SHAPE(4, 4);
        return dt_param_find(ctx, "w") ? dt_param_find(ctx, "w") : dt_param(ctx, "w", square, ones);
    }
    dt_tensor *t = dt_input(ctx, DT_F32, x, values);
    return is_one_of(name, "loss scalar") ? dt_mse(t, t, 1) : t;
}

static dt_zero *the_zero(pick *p) {
    dt_zero_desc desc = { .stage = (int)(next_random(p) % 4) };
    the_tensor(p, "w");
    return dt_zero_make(the_ctx(p), desc);
}

static dt_table *the_table(pick *p) {
    dt_table_desc desc = { .name = "t", .width = 2, .optimizer = (int)(next_random(p) % 5) };
    return dt_table_make(the_ctx(p), desc);
}

static dt_weights *the_weights(pick *p) {
    dt_shape shape = DT_SHAPE(2, 2);
    dt_weights_desc desc;
    memset(&desc, 0, sizeof desc);
    char path[64];
    snprintf(path, sizeof path, "w.%d.%p.safetensors", (int)getpid(), (void *)p);
    dt_weights *made = dt_weights_create(the_ctx(p), path, desc);
    dt_weights_declare(made, "t", DT_F32, shape);
    if (next_random(p) % 2) return made;
    dt_weights_write(made, 0, 0, 4, DT_F32, zeros(p));
    dt_weights_close(made);
    return dt_weights_open(the_ctx(p), path);
}

/* type: without const and star. NULL for dt_node, which exists only during a backward. */
static void *handle_of(pick *p, const char *type, const char *name) {
    if (!strcmp(type, "dt_ctx")) return the_ctx(p);
    if (!strcmp(type, "dt_comm")) return dt_world(the_ctx(p));
    if (!strcmp(type, "dt_tensor")) return the_tensor(p, name);
    if (!strcmp(type, "dt_zero")) return the_zero(p);
    if (!strcmp(type, "dt_table")) return the_table(p);
    if (!strcmp(type, "dt_weights")) return the_weights(p);
    if (!strcmp(type, "dt_io")) return (void *)dt_io_default();
    if (!strcmp(type, "dt_json"))
        return dt_json_parse(the_ctx(p), "json", "{\"a\":[1,\"b\",true]}", 18);
    if (!strcmp(type, "dt_work")) return dt_barrier_start(dt_world(the_ctx(p)));
    if (!strcmp(type, "dt_team")) {
        dt_run_desc desc = { .ranks = 1 };
        the_ctx(p);
        /* in a run of two ranks the caller has no team */
        if (!p->team) p->team = dt_team_make(desc);
        return p->team;
    }
    if (!strcmp(type, "dt_checkpoint")) {
        char *dir = (char *)zeros(p);
        snprintf(dir, 64, "c.%d.%p", (int)getpid(), (void *)p);
        dt_checkpoint_desc desc = { .dir = p->random & 256 ? dir : NULL };
        return dt_checkpoint_open(the_zero(p), desc);
    }
    if (!strcmp(type, "dt_cp")) {
        dt_cp_desc desc = { .batch = 1, .tokens = 2 };
        return dt_cp_make(the_ctx(p), NULL, desc);
    }
    if (!strcmp(type, "dt_routing")) {
        dt_route_desc desc = { .k = 1 };
        return dt_route(the_tensor(p, "x"), the_tensor(p, "w"), desc);
    }
    if (!strcmp(type, "dt_schedule")) {
        dt_schedule_desc desc = { .kind = DT_SCHEDULE_1F1B, .ranks = 2, .micros = 3 };
        return dt_schedule_make(the_ctx(p), desc);
    }
    if (!strcmp(type, "dt_sampler")) {
        dt_sampler_desc desc = { .samples = 5, .replicas = 2, .shuffle = 1 };
        return dt_sampler_make(the_ctx(p), desc);
    }
    if (!strcmp(type, "dt_text")) {
        const char *path = "text";
        return dt_text_open(the_ctx(p), &path, 1, 4);
    }
    return NULL;
}

/* The handle for argument number `argument`. Fails if it cannot be made, because the function would
   be untested. */
static void *handle(pick *p, int argument, const char *type, const char *name) {
    if (p->handles == NO_HANDLES || (p->handles == FIRST_HANDLE && argument > 0)) return NULL;
    void *made = handle_of(p, type, name);
    int failed = p->ctx && dt_error(p->ctx) != DT_OK;
    if ((!made || failed) && strcmp(type, "dt_node") && (p->ranks < 2 || !failed)) {
        fprintf(stderr, "ERROR: no valid %s: %s\n", type, dt_error_text(p->ctx));
        _exit(9);
    }
    return made;
}

/* ---- calls ---- */

typedef struct entry {
    const char *name;
    void (*call)(pick *p);
    int numbers; /* number of numbers that a call makes */
    int consumes, owns_data;
} entry;

static const entry entries[]; /* written by the script */
static const int entry_count;

static dt_status call_in_run(dt_ctx *ctx, void *user) {
    const pick *of = *(const pick **)user;
    const entry *e = ((const entry **)user)[1];
    pick own = *of;
    own.ctx = ctx;
    e->call(&own);
    check_guards(&own);
    dt_reset(ctx);
    for (int i = 0; i < own.blocks; i++) free(own.block[i]);
    return dt_error(ctx);
}

/* Makes one call. Afterwards it must be possible to free the context. */
static void make_call(const entry *e, pick p) {
    if (p.ranks == 2) {
        const void *user[2] = { &p, e };
        dt_run_desc desc = { .ranks = 2, .timeout_s = 20 };
        dt_run(desc, call_in_run, user);
        return;
    }
    e->call(&p);
    check_guards(&p);
    if (p.ctx && !e->consumes) {
        (void)strlen(dt_error_text(p.ctx));
        dt_comm_detach(p.ctx, DT_OK);
        dt_ctx_free(p.ctx);
        dt_team_free(p.team);
    }
    for (int i = 0; i < p.blocks; i++) free(p.block[i]);
}

enum { TEXT_PICKS = 3 * TEXTS, MIXED = 36 };

/* The n-th pick of a function; 0: there are no more. First all-zero arguments, then each kind of
   text, each extreme for all numbers and for each number alone, and last mixtures, half of them
   with pointers to data. */
static int pick_of(const entry *e, int n, pick *p) {
    memset(p, 0, sizeof *p);
    p->only = -1;
    p->owns_data = e->owns_data;
    p->random = 12345u + 7919u * (uint32_t)n;
    if (n < TEXT_PICKS) {
        p->handles = n / TEXTS;
        p->text = n % TEXTS;
        return 1;
    }
    n -= TEXT_PICKS;
    int numbers = e->numbers < 12 ? e->numbers : 12,
        each = (numbers > 1 ? numbers + 1 : numbers) * (NUMBERS - 1);
    if (n < 2 * each) {
        p->handles = n % 2 ? ALL_HANDLES : NO_HANDLES;
        p->number = 1 + n / 2 % (NUMBERS - 1);
        p->only = numbers > 1 ? n / 2 / (NUMBERS - 1) - 1 : -1;
        p->text = TEXT_SOME;
        return 1;
    }
    n -= 2 * each;
    if (n >= MIXED) return 0;
    p->data = n % 2;
    p->number = p->data ? SMALL : RANDOM;
    p->handles = n % 3 ? ALL_HANDLES : FIRST_HANDLE;
    p->text = n / 2 % TEXTS;
    p->ranks = n >= MIXED * 2 / 3 && !e->consumes ? 2 : 1;
    return 1;
}

static void describe(const pick *p, char *text, size_t bytes) {
    static const char *kinds[] = { "0", "1", "2", "-1", "the least", "the most", "inf", "random",
        "small" };
    static const char *handles[] = { "no handles", "the first handle", "all handles" };
    static const char *texts[] = { "NULL", "empty", "1 byte", "40 bytes" };
    char number[40] = "numbers";
    if (p->only >= 0) snprintf(number, sizeof number, "number %d", p->only);
    snprintf(text, bytes, "%s, %s %s, texts %s%s%s", handles[p->handles], number, kinds[p->number],
        texts[p->text], p->data ? ", data" : "", p->ranks == 2 ? ", 2 ranks" : "");
}

/* Runs picks `from` to `to` in a child. 0 if all calls returned. */
static int child(const entry *e, int from, int to, const char *log) {
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        struct rlimit cpu;
        cpu.rlim_cur = cpu.rlim_max = to - from > 1 ? BATCH_SECONDS : PICK_SECONDS;
        setrlimit(RLIMIT_CPU, &cpu);
        alarm(WALL_SECONDS);
        int fd = open(log, O_CREAT | O_TRUNC | O_WRONLY, 0600);
        dup2(fd, 1);
        dup2(fd, 2);
        pick p;
        for (int n = from; n < to && pick_of(e, n, &p); n++) make_call(e, p);
        _exit(0);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    return status;
}

/* Writes why a child died: its status and the line of the sanitizer. */
static void reason(int status, const char *log, char *why, size_t bytes) {
    char line[400];
    if (WIFSIGNALED(status))
        snprintf(why, bytes, "signal %d", WTERMSIG(status));
    else
        snprintf(why, bytes, "exit status %d", WEXITSTATUS(status));
    if (WIFSIGNALED(status) && (WTERMSIG(status) == SIGXCPU || WTERMSIG(status) == SIGKILL))
        snprintf(why, bytes, "not done after %d s of processor time", PICK_SECONDS);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
        snprintf(why, bytes, "not done after %d s", WALL_SECONDS);
    FILE *f = fopen(log, "r");
    while (f && fgets(line, sizeof line, f)) {
        char *at = strstr(line, "runtime error: ");
        if (!at) at = strstr(line, "ERROR: ");
        if (!at) at = strstr(line, "    #0 ");
        if (!at) continue;
        line[strcspn(line, "\n")] = 0;
        char *slash = strrchr(line, '/');
        snprintf(why + strlen(why), bytes - strlen(why), "; %s",
            slash && slash > at       ? slash + 1
            : at == line + 4          ? at
            : line[0] == '/' && slash ? slash + 1
                                      : line);
    }
    if (f) fclose(f);
}

static int try_entry(const entry *e, const char *log, int all) {
    int failed = 0;
    char why[1200], what[200];
    pick p;
    if (child(e, 0, 1 << 20, log) == 0) return 0;
    for (int n = 0; pick_of(e, n, &p); n++) {
        int status = child(e, n, n + 1, log);
        if (status == 0) continue;
        describe(&p, what, sizeof what);
        reason(status, log, why, sizeof why);
        if (failed++ == 0 || all)
            printf("FAIL %s (%s): %s\n", e->name, n == 0 ? "all zero" : what, why);
    }
    if (failed > 1) printf("     %s: %d picks fail\n", e->name, failed);
    if (failed == 0)
        printf("FAIL %s: fails with all picks in one process, but with no single pick\n", e->name);
    return 1;
}

/* [NAME...]: only these functions, with every pick that fails. Files go to the current folder. */
int main(int argc, char **argv) {
    int failed = 0, tried = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 0; i < entry_count; i++) {
        int wanted = argc == 1;
        for (int a = 1; a < argc; a++) wanted = wanted || !strcmp(argv[a], entries[i].name);
        if (!wanted) continue;
        tried++;
        failed += try_entry(&entries[i], "log", argc > 1);
    }
    printf("entry_points: %d passed, %d failed\n", tried - failed, failed);
    return failed > 0;
}

#endif
