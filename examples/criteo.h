/* criteo.h - reads click logs in the text format of the Criteo data sets - public domain or MIT, at
   your choice

   A line is one sample: a label 0 or 1, 13 numbers and 26 categories, separated by tabs. Numbers
   and categories may be empty. Include criteo.h after dt_zero.h; all functions are static.

       criteo_reader *r = criteo_open(ctx, "day_0.txt", 1);   a file, a folder or - (standard input)
       while (criteo_skip(r, n)) ...                          skips lines without reading their text
       criteo_read(r, &sample)                                the next line

   What a line becomes:

       label       0 or 1
       number v    ln(1 + v) for v >= 0, -ln(1 - v) for v < 0; 0 if the field is empty
       category    a 64-bit key: a hash of the field's text and its slot (0 to 25). An empty field is
                   a category of its own

   Lines are found with memchr and numbers are read by hand: the reader does not slow a training run
   down. */
#ifndef CRITEO_H
#define CRITEO_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    CRITEO_NUMBERS = 13,
    CRITEO_SLOTS = 26,
    CRITEO_FIELDS = 1 + CRITEO_NUMBERS + CRITEO_SLOTS,
    CRITEO_FIELD_BYTES = 255, /* longest field */
    CRITEO_LINE = 1 << 19,    /* longest line */
    CRITEO_BUFFER = 2 * CRITEO_LINE,
    CRITEO_REPORTED = 3 /* bad lines that a reader prints; it counts all */
};

typedef struct criteo_sample {
    float label;
    float numbers[CRITEO_NUMBERS];
    uint64_t keys[CRITEO_SLOTS];
} criteo_sample;

typedef struct criteo_reader {
    dt_ctx *ctx;
    char **paths;
    int n_paths, at_path; /* at_path: the file that is open, or is opened next */
    int fd;               /* -1: none */
    int skip_bad;         /* 1: bad lines are skipped and counted, else they fail */
    int64_t line;         /* number of the last line in its file, from 1 */
    int64_t lines;        /* of all files so far, with skipped ones */
    int64_t samples, bad; /* good and bad lines among those that were read */
    char *buffer;         /* bytes [begin, end) of it are not yet used */
    size_t begin, end;
    int at_end; /* 1: the open file has no more bytes */
} criteo_reader;

static inline int criteo_by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Appends a path. Returns 0 if memory is refused. */
static inline int criteo_add_path(criteo_reader *r, const char *folder, const char *name) {
    size_t bytes = strlen(folder) + strlen(name) + 2;
    char **more = (char **)realloc(r->paths, sizeof *more * (size_t)(r->n_paths + 1));
    if (more) r->paths = more;
    char *path = more ? (char *)malloc(bytes) : NULL;
    if (!path) return 0;
    snprintf(path, bytes, "%s%s%s", folder, *folder ? "/" : "", name);
    r->paths[r->n_paths++] = path;
    return 1;
}

/* Lists the files of a folder in the order of their names, without hidden ones. */
static inline int criteo_list(criteo_reader *r, const char *folder) {
    DIR *d = opendir(folder);
    if (!d) {
        dt_fail(r->ctx, DT_ERR_IO, "%s: %s", folder, strerror(errno));
        return 0;
    }
    int ok = 1;
    for (struct dirent *e; ok && (e = readdir(d));) {
        struct stat st;
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        if (e->d_name[0] != '.' && stat(path, &st) == 0 && S_ISREG(st.st_mode))
            ok = criteo_add_path(r, folder, e->d_name);
    }
    closedir(d);
    if (!ok) dt_fail(r->ctx, DT_ERR_MEM, "%s: out of memory for its names", folder);
    if (r->n_paths) qsort(r->paths, (size_t)r->n_paths, sizeof *r->paths, criteo_by_name);
    if (ok && !r->n_paths) dt_fail(r->ctx, DT_ERR_ARG, "%s: the folder has no files", folder);
    return ok && r->n_paths;
}

static inline void criteo_close(criteo_reader *r) {
    if (!r) return;
    if (r->fd > 0) close(r->fd);
    for (int i = 0; i < r->n_paths; i++) free(r->paths[i]);
    free(r->paths);
    free(r->buffer);
    free(r);
}

/* Opens a file, the files of a folder, or standard input ("-"). Returns NULL on failure. */
static inline criteo_reader *criteo_open(dt_ctx *ctx, const char *path, int skip_bad) {
    criteo_reader *r = (criteo_reader *)calloc(1, sizeof *r);
    struct stat st;
    int is_stdin = strcmp(path, "-") == 0, ok = r != NULL;
    if (r) *r = (criteo_reader){ .ctx = ctx, .fd = -1, .skip_bad = skip_bad };
    if (r) ok = (r->buffer = (char *)malloc(CRITEO_BUFFER)) != NULL;
    if (!ok) dt_fail(ctx, DT_ERR_MEM, "%s: out of memory for its reader", path);
    if (ok && !is_stdin && stat(path, &st) != 0) {
        dt_fail(ctx, DT_ERR_IO, "%s: %s", path, strerror(errno));
        ok = 0;
    }
    if (ok)
        ok = !is_stdin && S_ISDIR(st.st_mode) ? criteo_list(r, path) : criteo_add_path(r, "", path);
    if (ok) return r;
    criteo_close(r);
    return NULL;
}

/* Starts again at the first line. Standard input cannot. */
static inline void criteo_rewind(criteo_reader *r) {
    if (r->fd > 0) close(r->fd);
    r->fd = -1;
    r->at_path = 0;
    r->lines = 0;
    r->begin = r->end = 0;
}

/* Opens the next file if none is open. Returns 0 if there is none, or on failure. */
static inline int criteo_next_file(criteo_reader *r) {
    if (r->fd >= 0) return 1;
    if (r->at_path == r->n_paths || dt_error(r->ctx) != DT_OK) return 0;
    const char *path = r->paths[r->at_path];
    r->fd = strcmp(path, "-") == 0 ? 0 : open(path, O_RDONLY | O_CLOEXEC);
    r->line = 0;
    r->begin = r->end = 0;
    r->at_end = 0;
    if (r->fd < 0) dt_fail(r->ctx, DT_ERR_IO, "%s: %s", path, strerror(errno));
    return r->fd >= 0;
}

/* Reads more bytes to place `at` of the buffer. */
static inline void criteo_fill(criteo_reader *r, size_t at) {
    ssize_t got;
    do got = read(r->fd, r->buffer + at, CRITEO_BUFFER - at);
    while (got < 0 && errno == EINTR);
    if (got < 0) dt_fail(r->ctx, DT_ERR_IO, "%s: %s", r->paths[r->at_path], strerror(errno));
    if (got <= 0) r->at_end = 1;
    r->end = at + (got > 0 ? (size_t)got : 0);
}

/* Skips the rest of a long line. Its first CRITEO_LINE bytes stay in the buffer. */
static inline void criteo_skip_rest(criteo_reader *r) {
    const char *rest = r->buffer + CRITEO_LINE, *newline = NULL;
    while (!newline && !r->at_end) {
        criteo_fill(r, CRITEO_LINE);
        newline = (const char *)memchr(rest, '\n', r->end - CRITEO_LINE);
    }
    r->begin = newline ? (size_t)(newline + 1 - r->buffer) : r->end;
}

/* Finds the next line, without its newline. The text is valid until the next call. Returns 0 at the
   end of the data or on failure. A line that is longer than CRITEO_LINE counts as one line, and its
   text is its beginning. */
static inline int criteo_line(criteo_reader *r, const char **text, size_t *length) {
    while (criteo_next_file(r)) {
        char *from = r->buffer + r->begin;
        size_t there = r->end - r->begin;
        char *newline = (char *)memchr(from, '\n', there);
        if (!newline && there < CRITEO_LINE && !r->at_end) {
            memmove(r->buffer, from, there);
            r->begin = 0;
            criteo_fill(r, there);
            continue;
        }
        if (!newline && there == 0) { /* the end of this file */
            if (r->fd > 0) close(r->fd);
            r->fd = -1;
            r->at_path++;
            continue;
        }
        *text = from;
        *length = newline ? (size_t)(newline - from) : there;
        r->begin += *length + (newline != NULL);
        r->line++;
        r->lines++;
        if (!newline && !r->at_end) {
            memmove(r->buffer, from, CRITEO_LINE);
            *text = r->buffer;
            *length = CRITEO_LINE;
            criteo_skip_rest(r);
        }
        return dt_error(r->ctx) == DT_OK;
    }
    return 0;
}

/* Skips n lines without reading their fields. Returns the number of lines skipped. */
static inline int64_t criteo_skip(criteo_reader *r, int64_t n) {
    const char *text;
    size_t length;
    int64_t i = 0;
    while (i < n && criteo_line(r, &text, &length)) i++;
    return i;
}

/* A hash of n bytes that begins from a slot number: the bytes of each word are multiplied in, then
   mixed as in MurmurHash3's finalizer. */
static inline uint64_t criteo_key(const char *text, size_t n, int slot) {
    uint64_t h = (uint64_t)(slot + 1) * 0x9e3779b97f4a7c15u ^ n * 0xff51afd7ed558ccdu, word;
    for (; n > 0; n -= n < 8 ? n : 8, text += 8) {
        word = 0;
        memcpy(&word, text, n < 8 ? n : 8);
        h = (h ^ word) * 0xc4ceb9fe1a85ec53u;
        h ^= h >> 32;
    }
    h = (h ^ (h >> 33)) * 0xff51afd7ed558ccdu;
    h = (h ^ (h >> 33)) * 0xc4ceb9fe1a85ec53u;
    return h ^ (h >> 33);
}

/* Reads a decimal number: sign, digits, fraction, exponent. Returns 0 if text is no such number. */
static inline int criteo_number(const char *text, size_t n, double *out) {
    size_t i = n > 0 && (text[0] == '-' || text[0] == '+');
    int digits = 0;
    double v = 0;
    for (; i < n && text[i] >= '0' && text[i] <= '9'; i++, digits++) v = v * 10 + (text[i] - '0');
    if (i < n) { /* rare: not an integer */
        char copy[CRITEO_FIELD_BYTES + 1], *end;
        if (strspn(text + i, ".eE+-0123456789") < n - i || n > CRITEO_FIELD_BYTES) return 0;
        memcpy(copy, text, n);
        copy[n] = 0;
        v = strtod(copy, &end);
        *out = v;
        return *end == 0 && end != copy && isfinite(v);
    }
    *out = text[0] == '-' ? -v : v;
    return digits > 0 && isfinite(v);
}

/* Reports a bad line: fails, or with skip_bad counts it and prints the first ones. Returns 0. */
static inline int criteo_bad(
    criteo_reader *r, int column, const char *text, size_t n, const char *why) {
    char where[4300], field[48];
    size_t used = 0;
    for (size_t i = 0; i < n && i < 20; i++) {
        int plain = text[i] >= ' ' && text[i] < 127;
        used += (size_t)snprintf(field + used, sizeof field - used, plain ? "%c" : "?", text[i]);
    }
    field[used] = 0;
    snprintf(where, sizeof where, "%s:%lld: column %d%s: '%s'%s %s", r->paths[r->at_path],
        (long long)r->line, column,
        column == 1                    ? " (label)"
        : column <= 1 + CRITEO_NUMBERS ? " (number)"
                                       : " (category)",
        field, n > 20 ? "..." : "", why);
    r->bad++;
    if (!r->skip_bad)
        dt_fail(r->ctx, DT_ERR_ARG, "%s; --skip-bad skips and counts such lines", where);
    else if (r->bad <= CRITEO_REPORTED)
        dt_log(r->ctx, DT_LOG_NOTICE, "skipped %s", where);
    return 0;
}

/* Reads the fields of a line. With label_is_optional a line may begin with its first number. */
static inline int criteo_parse(
    criteo_reader *r, const char *text, size_t n, int label_is_optional, criteo_sample *s) {
    const char *field[CRITEO_FIELDS + 1];
    const char *end = text + n;
    int fields = 1;
    if (n > 0 && end[-1] == '\r') end--;
    field[0] = text;
    for (const char *at = text; fields <= CRITEO_FIELDS; fields++) {
        at = (const char *)memchr(at, '\t', (size_t)(end - at));
        if (!at) break;
        field[fields] = ++at;
    }
    int has_label = !(label_is_optional && fields == CRITEO_FIELDS - 1);
    if (fields > CRITEO_FIELDS)
        return criteo_bad(r, CRITEO_FIELDS + 1, field[CRITEO_FIELDS],
            (size_t)(end - field[CRITEO_FIELDS]), "is one field too many: a line has 40");
    if (fields < CRITEO_FIELDS - 1 + has_label)
        return criteo_bad(r, fields, field[fields - 1], (size_t)(end - field[fields - 1]),
            "is the last field: a line has 40");
    s->label = 0;
    for (int c = 0; c < fields; c++) {
        const char *from = field[c];
        size_t length = (size_t)((c + 1 < fields ? field[c + 1] - 1 : end) - from);
        int column = c + 1, kind = c - has_label; /* -1: label, then numbers, then categories */
        double v = 0;
        if (length > CRITEO_FIELD_BYTES)
            return criteo_bad(r, column, from, length, "has more than 255 bytes");
        if (kind < 0) {
            if (length != 1 || (*from != '0' && *from != '1'))
                return criteo_bad(r, column, from, length, "is not 0 or 1");
            s->label = *from == '1';
        } else if (kind < CRITEO_NUMBERS) {
            if (length && !criteo_number(from, length, &v))
                return criteo_bad(r, column, from, length, "is not a number");
            s->numbers[kind] = (float)(v < 0 ? -log1p(-v) : log1p(v));
        } else
            s->keys[kind - CRITEO_NUMBERS] = criteo_key(from, length, kind - CRITEO_NUMBERS);
    }
    return 1;
}

/* Reads the next line. Returns 1 with a sample, 0 for a bad line that was skipped, and -1 at the
   end of the data or on failure (dt_error tells which). */
static inline int criteo_read(criteo_reader *r, int label_is_optional, criteo_sample *s) {
    const char *text;
    size_t length;
    if (!criteo_line(r, &text, &length)) return -1;
    int ok = criteo_parse(r, text, length, label_is_optional, s);
    r->samples += ok;
    return ok || dt_error(r->ctx) == DT_OK ? ok : -1;
}

#endif /* CRITEO_H */
