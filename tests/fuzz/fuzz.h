/* fuzz.h - what the fuzz targets share. Each is one file with a function

       static void fuzz_one(const unsigned char *data, size_t bytes);

   With FUZZ_ENGINE (make fuzz) the file is a libFuzzer target. Without, it is a program that runs
   each file, and each file of a folder, in its arguments, and their mutants: fuzz_json
   tests/fuzz/corpus/json. With FUZZ_REPLAY it has no main: tests/programs/test_fuzz.c runs the
   corpus through all targets. */
#ifndef FUZZ_H
#define FUZZ_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/support/memory_io.h"

static void fuzz_one(const unsigned char *data, size_t bytes);

/* Ends the run, like a crash, if a condition is false. */
static inline void fuzz_must(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "fuzz: %s\n", what);
    abort();
}

static inline void fuzz_silent(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static inline dt_ctx *fuzz_ctx(memory_fs *fs) {
    dt_host host = *dt_host_default();
    dt_io io = memory_io(fs);
    host.log = fuzz_silent;
    return dt_ctx_make((dt_ctx_desc){ .seed = 1, .host = &host, .io = &io });
}

#ifdef FUZZ_ENGINE
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    fuzz_one(data, bytes);
    return 0;
}
#else
typedef void (*fuzz_target)(const unsigned char *data, size_t bytes);

/* Runs an input from a copy of its exact size, so that a sanitizer reports reads past the end. */
static inline void fuzz_copy(const unsigned char *data, size_t bytes, fuzz_target one) {
    unsigned char *copy = (unsigned char *)malloc(bytes ? bytes : 1);
    memcpy(copy, data, bytes);
    one(copy, bytes);
    free(copy);
}

/* Mutants of an input: each byte and each number of 4 and 8 bytes replaced by extreme values, and the
   input cut at each byte. Runs every step-th of them; 0: none. Returns their number. */
static inline int fuzz_mutants(unsigned char *data, size_t bytes, fuzz_target one, int step) {
    static const unsigned char numbers[][3] = { /* the first byte, those between, the last */
        { 0, 0, 0 }, { 0xff, 0xff, 0xff }, { 0xff, 0xff, 0x7f }, { 0, 0, 0x80 }, { 1, 0, 0 },
        { 0, 1, 0 }
    };
    enum { BYTES = 5, NUMBERS = 6, KINDS = 1 + BYTES + 2 * NUMBERS };
    int run = 0;
    for (size_t i = 0; step > 0 && i < bytes * KINDS; i += (size_t)step) {
        unsigned char kept[8], *at = data + i / KINDS;
        size_t kind = i % KINDS, left = bytes - i / KINDS,
               width = kind <= BYTES             ? 1
                       : kind <= BYTES + NUMBERS ? 4
                                                 : 8;
        const unsigned char others[BYTES] = { 0, 0xff, (unsigned char)(*at ^ 1),
            (unsigned char)(*at ^ 0x80), (unsigned char)(*at + 1) };
        if (width > left) continue;
        memcpy(kept, at, width);
        if (width > 1) {
            const unsigned char *number = numbers[(kind - 1 - BYTES) % NUMBERS];
            memset(at, number[1], width);
            at[0] = number[0];
            at[width - 1] = number[2];
        } else if (kind > 0) {
            *at = others[kind - 1];
        }
        fuzz_copy(data, kind > 0 ? bytes : i / KINDS, one);
        memcpy(at, kept, width);
        run++;
    }
    return run;
}

/* Runs one file, and every step-th of its mutants; adds their number to *mutants. */
static inline int fuzz_file(const char *path, fuzz_target one, int step, int *mutants) {
    static unsigned char data[1 << 20];
    FILE *f = fopen(path, "rb");
    if (!f) return 0;
    size_t bytes = fread(data, 1, sizeof data, f);
    fclose(f);
    fuzz_copy(data, bytes, one);
    *mutants += fuzz_mutants(data, bytes, one, step);
    return 1;
}

/* Runs a file, or all files of a folder. Returns their number. */
static inline int fuzz_replay(const char *path, fuzz_target one, int step, int *mutants) {
    int files = 0;
    DIR *folder = opendir(path);
    if (!folder) return fuzz_file(path, one, step, mutants);
    for (struct dirent *e = readdir(folder); e; e = readdir(folder)) {
        char name[1000];
        snprintf(name, sizeof name, "%s/%s", path, e->d_name);
        if (e->d_name[0] != '.') files += fuzz_file(name, one, step, mutants);
    }
    closedir(folder);
    return files;
}

#ifndef FUZZ_REPLAY
int main(int argc, char **argv) {
    int files = 0, mutants = 0;
    for (int i = 1; i < argc; i++) files += fuzz_replay(argv[i], fuzz_one, 1, &mutants);
    printf("%d inputs, %d mutants\n", files, mutants);
    return files > 0 ? 0 : 1;
}
#endif
#endif

#endif
