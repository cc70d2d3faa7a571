/* test_fuzz.c - runs the corpus of every fuzz target: no crash, and no condition of a target fails
   Public domain or MIT, at your choice; see LICENSE.

   Run:  test_fuzz [folder of the corpora, default tests/fuzz/corpus]

   `make fuzz` looks for new inputs; this test repeats the stored ones. A condition that fails ends
   the program. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define FUZZ_REPLAY
#define fuzz_one fuzz_json
#include "tests/fuzz/fuzz_json.c"
#undef fuzz_one
#define fuzz_one fuzz_safetensors
#include "tests/fuzz/fuzz_safetensors.c"
#undef fuzz_one
#define fuzz_one fuzz_llmc
#include "tests/fuzz/fuzz_llmc.c"
#undef fuzz_one
#define fuzz_one fuzz_shards
#include "tests/fuzz/fuzz_shards.c"
#undef fuzz_one
#define fuzz_one fuzz_rendezvous
#include "tests/fuzz/fuzz_rendezvous.c"
#undef fuzz_one
#define fuzz_one fuzz_config
#include "tests/fuzz/fuzz_config.c"
#undef fuzz_one
#define fuzz_one fuzz_manifest
#include "tests/fuzz/fuzz_manifest.c"
#include "tests/support/check.h"

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*one)(const unsigned char *data, size_t bytes);
    } targets[] = { { "json", fuzz_json }, { "safetensors", fuzz_safetensors },
        { "llmc", fuzz_llmc }, { "shards", fuzz_shards }, { "rendezvous", fuzz_rendezvous },
        { "config", fuzz_config }, { "manifest", fuzz_manifest } };
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++) {
        char path[600];
        snprintf(
            path, sizeof path, "%s/%s", argc > 1 ? argv[1] : "tests/fuzz/corpus", targets[i].name);
        int inputs = fuzz_replay(path, targets[i].one);
        CHECK_MSG(inputs >= 10, "%s: %d inputs", path, inputs);
        printf("%s: %d inputs\n", targets[i].name, inputs);
    }
    return check_done("test_fuzz");
}
