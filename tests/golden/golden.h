/* golden.h - reads the stored vectors of tests/golden
   Public domain or MIT, at your choice; see LICENSE.

   A file is the line "golden 1\n", then arrays until its end. An array is one text line, its name
   and its dimensions separated by single spaces ("grad.wte.weight 17 12\n"; a scalar has no
   dimensions), and then its elements, row-major, each 8 bytes of little-endian IEEE float64. Token
   ids and labels are stored as float64 too.

       golden *g = golden_open("tests/golden/gpt2_tied.bin");
       int64_t n;
       const double *loss = golden_get(g, "step.1.loss", &n);   // NULL: no file or no such array
       golden_free(g);

   Nothing here prints or exits. C11, everything static. */
#ifndef GOLDEN_H
#define GOLDEN_H

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GOLDEN_MAX_DIMS 8

typedef struct golden_array {
    char name[64];
    int nd;
    int64_t shape[GOLDEN_MAX_DIMS];
    int64_t count;
    double *data;
} golden_array;

typedef struct golden {
    int n_arrays;
    golden_array *array;
} golden;

static inline void golden_free(golden *g) {
    if (!g) return;
    for (int i = 0; i < g->n_arrays; i++) free(g->array[i].data);
    free(g->array);
    free(g);
}

/* Reads a file: *size bytes and a zero after them. Returns NULL and sets errno on failure. */
static inline unsigned char *golden_read_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    unsigned char *bytes = NULL;
    long length = -1;
    if (!file) return NULL;
    if (fseek(file, 0, SEEK_END) == 0) length = ftell(file);
    if (length > INT32_MAX)
        errno = EINVAL; /* fopen also opens folders, which report a huge length */
    else if (length >= 0 && fseek(file, 0, SEEK_SET) == 0) {
        bytes = (unsigned char *)malloc((size_t)length + 1);
        if (bytes && fread(bytes, 1, (size_t)length, file) != (size_t)length) {
            free(bytes);
            bytes = NULL;
            errno = EIO;
        } else if (bytes) {
            bytes[length] = 0;
            *size = (size_t)length;
        }
    }
    fclose(file);
    return bytes;
}

/* Parses "name d0 d1 .." in text[0..length) into a. Returns 0 if the text is malformed. */
static inline int golden_parse_line(golden_array *a, const char *text, size_t length) {
    size_t at = 0;
    while (at < length && text[at] != ' ') at++;
    if (at == 0 || at >= sizeof a->name) return 0;
    memcpy(a->name, text, at);
    a->name[at] = 0;
    a->nd = 0;
    a->count = 1;
    while (at < length) {
        int64_t dim = 0;
        size_t first = ++at; /* steps over the space */
        for (; at < length && text[at] >= '0' && text[at] <= '9'; at++) {
            dim = dim * 10 + (text[at] - '0');
            if (dim > INT32_MAX) return 0;
        }
        if (at == first || (at < length && text[at] != ' ') || a->nd == GOLDEN_MAX_DIMS) return 0;
        a->shape[a->nd++] = dim;
        a->count *= dim;
        if (a->count > INT32_MAX) return 0; /* so the next product cannot overflow */
    }
    return 1;
}

/* Decodes a little-endian double on a machine of any byte order. */
static inline double golden_decode(const unsigned char *bytes) {
    uint64_t bits = 0;
    double value;
    for (int i = 7; i >= 0; i--) bits = bits << 8 | bytes[i];
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Appends the array that starts at *at and moves *at to its end. Returns 0, or an errno value. */
static inline int golden_parse_array(
    golden *g, const unsigned char *bytes, size_t size, size_t *at) {
    const char *line = (const char *)bytes + *at;
    const char *end = (const char *)memchr(line, '\n', size - *at);
    golden_array a;
    if (!end || !golden_parse_line(&a, line, (size_t)(end - line))) return EINVAL;
    size_t first = *at + (size_t)(end - line) + 1;
    if ((size - first) / 8 < (size_t)a.count) return EINVAL;
    void *grown = realloc(g->array, ((size_t)g->n_arrays + 1) * sizeof *g->array);
    if (!grown) return ENOMEM;
    g->array = (golden_array *)grown;
    a.data = (double *)malloc((size_t)a.count * sizeof(double) + 1);
    if (!a.data) return ENOMEM;
    for (int64_t i = 0; i < a.count; i++) a.data[i] = golden_decode(bytes + first + 8 * (size_t)i);
    g->array[g->n_arrays++] = a;
    *at = first + 8 * (size_t)a.count;
    return 0;
}

/* NULL on failure, with errno of fopen, EIO, ENOMEM, or EINVAL if the format is not this one. */
static inline golden *golden_open(const char *path) {
    static const char magic[] = "golden 1\n";
    size_t size = 0, at = sizeof magic - 1;
    unsigned char *bytes = golden_read_file(path, &size);
    if (!bytes) return NULL;
    golden *g = (golden *)calloc(1, sizeof *g);
    int error = !g ? ENOMEM : size < at || memcmp(bytes, magic, at) ? EINVAL : 0;
    while (!error && at < size) error = golden_parse_array(g, bytes, size, &at);
    free(bytes);
    if (error) {
        golden_free(g);
        errno = error;
        return NULL;
    }
    return g;
}

/* The array of that name, or NULL. g may be NULL. */
static inline const golden_array *golden_find(const golden *g, const char *name) {
    for (int i = 0; g && i < g->n_arrays; i++)
        if (!strcmp(g->array[i].name, name)) return &g->array[i];
    return NULL;
}

/* The array's elements, or NULL. *count: their number, 0 without an array. count may be NULL. */
static inline const double *golden_get(const golden *g, const char *name, int64_t *count) {
    const golden_array *a = golden_find(g, name);
    if (count) *count = a ? a->count : 0;
    return a ? a->data : NULL;
}

#endif /* GOLDEN_H */
