/* fuzz.h - what the fuzz targets share. Each is one file with a function

       static void fuzz_one(const unsigned char *data, size_t bytes);

   With FUZZ_ENGINE (make fuzz) the file is a libFuzzer target. Without, it is a program that runs
   each file, and each file of a folder, in its arguments: fuzz_json tests/fuzz/corpus/json. With
   FUZZ_REPLAY it has no main: tests/programs/test_fuzz.c runs the corpus through all targets. */
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
/* Runs one file, from a copy of its exact size, so that a sanitizer reports reads past the end. */
static inline int fuzz_file(
    const char *path, void (*one)(const unsigned char *data, size_t bytes)) {
    static unsigned char data[1 << 20];
    FILE *f = fopen(path, "rb");
    if (!f) return 0;
    size_t bytes = fread(data, 1, sizeof data, f);
    fclose(f);
    unsigned char *copy = (unsigned char *)malloc(bytes ? bytes : 1);
    memcpy(copy, data, bytes);
    one(copy, bytes);
    free(copy);
    return 1;
}

/* Runs a file, or all files of a folder. Returns their number. */
static inline int fuzz_replay(
    const char *path, void (*one)(const unsigned char *data, size_t bytes)) {
    int files = 0;
    DIR *folder = opendir(path);
    if (!folder) return fuzz_file(path, one);
    for (struct dirent *e = readdir(folder); e; e = readdir(folder)) {
        char name[1000];
        snprintf(name, sizeof name, "%s/%s", path, e->d_name);
        if (e->d_name[0] != '.') files += fuzz_file(name, one);
    }
    closedir(folder);
    return files;
}

#ifndef FUZZ_REPLAY
int main(int argc, char **argv) {
    int files = 0;
    for (int i = 1; i < argc; i++) files += fuzz_replay(argv[i], fuzz_one);
    printf("%d inputs\n", files);
    return files > 0 ? 0 : 1;
}
#endif
#endif

#endif
