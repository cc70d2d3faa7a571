/* fuzz_config.c - any text as the file of train_gpt --config. An accepted file sets options to
   values that the table of options allows, every key counts, and the same options written as a new
   file mean the same. A refusal is one line that names file, line and column. No other file is
   opened. */
#include "tests/fuzz/fuzz.h"
#include "dt_zero.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#ifdef DT_USE_MPI
#include <mpi.h>
#endif

static struct {
    memory_fs fs;
    char text[1 << 14]; /* what train_gpt writes to standard error */
    size_t used;
    /* memory of train_gpt, which exits without freeing it when it refuses a file */
    void *kept[300];
    int n;
    jmp_buf end;
} fuzz_train;

static __attribute__((noreturn)) void fuzz_exit(int status) {
    fuzz_must(status == 2, "the exit status");
    longjmp(fuzz_train.end, 1);
}

static void *fuzz_keep(void *p) {
    fuzz_must(p && fuzz_train.n < (int)(sizeof fuzz_train.kept / sizeof *fuzz_train.kept),
        "too many allocations");
    return fuzz_train.kept[fuzz_train.n++] = p;
}

static void *fuzz_alloc(void *user, size_t bytes, dt_mem mem) {
    return fuzz_keep(dt_host_default()->alloc(user, bytes, mem));
}

static void fuzz_free(void *user, void *p, size_t bytes, dt_mem mem) {
    int i = 0;
    while (i < fuzz_train.n && fuzz_train.kept[i] != p) i++;
    fuzz_must(i < fuzz_train.n, "memory is freed twice");
    fuzz_train.kept[i] = fuzz_train.kept[--fuzz_train.n];
    dt_host_default()->free(user, p, bytes, mem);
}

static int fuzz_poll(struct pollfd *at, int n, int ms) {
    (void)at, (void)ms;
    return n;
}

static ssize_t fuzz_take(int fd, const void *text, size_t bytes) {
    fuzz_must(fd == 2 && fuzz_train.used + bytes < sizeof fuzz_train.text,
        "output that is too long, or not for standard error");
    memcpy(fuzz_train.text + fuzz_train.used, text, bytes);
    fuzz_train.used += bytes;
    return (ssize_t)bytes;
}

static char *fuzz_strdup(const char *text) { return (char *)fuzz_keep(strdup(text)); }

/* The context that reads files gets them from memory. */
static dt_ctx *fuzz_ctx_make(dt_ctx_desc desc) {
    dt_host host = *desc.host;
    dt_io io = memory_io(&fuzz_train.fs);
    host.alloc = fuzz_alloc;
    host.free = fuzz_free;
    desc.host = &host;
    desc.io = &io;
    return dt_ctx_make(desc);
}

#define main train_main
#define exit fuzz_exit
#define strdup fuzz_strdup
#define dt_ctx_make fuzz_ctx_make
#define poll(at, n, ms) fuzz_poll(at, n, ms)
#define write(fd, text, bytes) fuzz_take(fd, text, bytes)
#include "examples/train_gpt.c"
#undef main
#undef exit
#undef strdup
#undef dt_ctx_make
#undef poll
#undef write

/* Runs train_gpt --config config.json until the options are set. 0 if the file is refused. */
static int fuzz_parse(value *v, const void *data, size_t bytes) {
    static char *argv[] = { (char *)"train_gpt", (char *)"--config", (char *)"config.json", NULL };
    memory_clear(&fuzz_train.fs);
    memory_put(&fuzz_train.fs, "config.json", data, bytes);
    memset(v, 0, N_OPTIONS * sizeof *v);
    memset(&config, 0, sizeof config);
    config.node = -1;
    memset(fuzz_train.text, 0, sizeof fuzz_train.text);
    fuzz_train.used = 0;
    if (!launched.failure_printed) make_flags();
    if (setjmp(fuzz_train.end)) return 0;
    parse(v, 3, argv);
    return 1;
}

static void fuzz_forget(void) {
    while (fuzz_train.n) free(fuzz_train.kept[--fuzz_train.n]);
}

/* The error must be "error: config.json:LINE:COLUMN: why", with a position inside the text. */
static void fuzz_refused(const unsigned char *data, size_t bytes) {
    int line = 0, column = 0, n = 0, lines = 1;
    size_t at = 0;
    char *text = fuzz_train.text, *end = strchr(text, '\n');
    fuzz_must(end && !end[1], "the error is not one line");
    for (unsigned char *c = (unsigned char *)text; c < (unsigned char *)end; c++)
        fuzz_must(*c >= 32 && *c != 127 && (*c != 0xc2 || c[1] >= 0xa0),
            "the error has control characters");
    fuzz_must(strncmp(text, "error: ", 7) == 0, "the error does not begin with 'error: '");
    text += strncmp(text + 7, "--config: ", 10) == 0 ? 17 : 7;
    fuzz_must(
        sscanf(text, "config.json:%d:%d: %n", &line, &column, &n) == 2 && n > 0 && text + n < end,
        "the error has no file, line and column");
    for (; at < bytes && lines < line; at++) lines += data[at] == '\n';
    for (; at < bytes && data[at] != '\n' && column > 1; at++)
        column -= at + 1 == bytes || (data[at + 1] & 0xc0) != 0x80; /* columns count characters */
    fuzz_must(lines == line && column == 1, "the error's position is outside the text");
}

static void fuzz_value(int id, const value *v) {
    const option *o = &table[id];
    int n = 0;
    fuzz_must(v->text && v->text[0] && strlen(v->text) <= CONFIG_TEXT, "a text");
    if (o->kind == INT || o->kind == REAL || o->kind == SIZE) {
        char *end = NULL;
        double x = strtod(v->text, &end);
        x *= *end == 'K' ? 0x1p10 : *end == 'M' ? 0x1p20 : *end == 'G' ? 0x1p30 : 1;
        fuzz_must(v->number >= o->lo && v->number <= o->hi, "its limits");
        fuzz_must(x == v->number && (o->kind == REAL || floor(x) == x), "its number");
    } else if (o->kind == WORD) {
        const char *arg = notation(id), *word = arg;
        for (; n < v->number; n++) word += strcspn(word, "|;") + 1;
        size_t length = strcspn(word, "|;");
        fuzz_must(word < arg + strcspn(arg, ";"), "a word that is built");
        fuzz_must(length == strlen(v->text) && memcmp(word, v->text, length) == 0, "its word");
    } else if (o->kind != TEXT) {
        fuzz_must(strcmp(v->text, v->number ? "on" : "off") == 0, "on or off");
    }
    if (o->availability == NOT_BUILT)
        fuzz_must(
            o->default_text && strtod(o->default_text, NULL) == v->number, "what is not built");
}

/* Every key is an option, which must have the file's value, or a key of DeepSpeed. */
static void fuzz_keys(const value *v, const dt_json *j, int object, const char *prefix) {
    for (int i = 0; i < dt_json_count(j, object); i++) {
        char path[200];
        size_t bytes = 0, at = 0;
        int node = dt_json_at(j, object, i), flag = 0;
        const char *key = dt_json_key(j, node, &bytes), *text;
        double x;
        fuzz_must(strlen(key) == bytes && bytes < 100 && !strchr(key, '.'), "a key");
        snprintf(path, sizeof path, "%s%s", prefix, key);
        while (at < N_DEEPSPEED_KEYS && strcmp(deepspeed[at].path, path) != 0) at++;
        int id = *prefix || dt_json_kind_of(j, node) == DT_JSON_OBJECT ? N_OPTIONS
                                                                       : find_option(key, bytes);
        fuzz_must(at < N_DEEPSPEED_KEYS || id < N_OPTIONS, "an unknown key is accepted");
        if (id == N_OPTIONS && deepspeed[at].to == BLOCK) {
            strcat(path, ".");
            fuzz_keys(v, j, node, path);
        }
        text = dt_json_string(j, node, &bytes);
        if (text && (id < N_OPTIONS || deepspeed[at].to != IGNORED))
            fuzz_must(strlen(text) == bytes, "a NUL in a text");
        if (id == N_OPTIONS || dt_json_kind_of(j, node) == DT_JSON_NULL) continue;
        if (table[id].kind == FLAG && dt_json_bool(j, node, &flag) && !flag) continue;
        fuzz_must(v[id].from == GIVEN_IN_FILE, "a key is ignored");
        if (dt_json_number(j, node, &x) && table[id].kind != WORD && table[id].kind != TEXT)
            fuzz_must(v[id].number == x, "an option has another number than the file");
        if (text)
            fuzz_must(strcmp(v[id].text, text) == 0, "an option has another text than the file");
    }
}

/* Writes the options that the file set as a new file. */
static void fuzz_write(dt_json_out *o, const value *v) {
    dt_json_open(o, NULL, '{');
    for (int i = 0; i < N_OPTIONS; i++) {
        int kind = table[i].kind;
        if (i == O_CONFIG || v[i].from != GIVEN_IN_FILE) continue;
        if (kind == WORD || kind == TEXT)
            dt_json_put_string(o, table[i].name, v[i].text);
        else if (kind == REAL)
            dt_json_put_number(o, table[i].name, v[i].number);
        else if (kind == INT || kind == SIZE)
            dt_json_put_int(o, table[i].name, (int64_t)v[i].number);
        else
            dt_json_put_bool(o, table[i].name, v[i].number != 0);
    }
    dt_json_close(o, '}');
}

static void fuzz_accepted(value *v, const unsigned char *data, size_t bytes) {
    value again[N_OPTIONS];
    int kept = 0;
    memory_fs none;
    memset(&none, 0, sizeof none);
    dt_ctx *ctx = fuzz_ctx(&none);
    dt_json *j = dt_json_parse(ctx, "config", (const char *)data, bytes);
    dt_json_out o = { ctx, NULL, 0, 0 };
    for (int i = 0; i < N_OPTIONS; i++) {
        int given = v[i].from == GIVEN_IN_FILE && i != O_CONFIG;
        fuzz_must(given == config.given[i] && (!given || is_option(i)), "what was given");
        kept += given;
        if (given)
            fuzz_value(i, &v[i]);
        else if (i != O_CONFIG)
            fuzz_must(v[i].text == table[i].default_text, "a preset");
    }
    fuzz_must(fuzz_train.n == kept, "memory is leaked");
    fuzz_keys(v, j, 0, "");
    fuzz_write(&o, v);
    fuzz_must(
        dt_error(ctx) == DT_OK && fuzz_parse(again, o.text, o.used), "its own file is refused");
    for (int i = 0; i < N_OPTIONS; i++) {
        fuzz_must(again[i].from == v[i].from && again[i].number == v[i].number,
            "its own file means another number");
        if (table[i].kind == TEXT && v[i].text)
            fuzz_must(strcmp(again[i].text, v[i].text) == 0, "... another text");
    }
    dt_json_out_free(&o);
    dt_json_free(j);
    dt_ctx_free(ctx);
}

static void fuzz_one(const unsigned char *data, size_t bytes) {
    value v[N_OPTIONS];
    if (bytes > 1 << 20) return;
    if (fuzz_parse(v, data, bytes))
        fuzz_accepted(v, data, bytes);
    else
        fuzz_refused(data, bytes);
    fuzz_must(fuzz_train.fs.open == 0, "a descriptor is leaked");
    memory_clear(&fuzz_train.fs);
    fuzz_forget();
}
