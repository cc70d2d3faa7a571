/* test_fuzz.c - runs the corpus of every fuzz target, and mutants of what a connection can send: no
   crash, and no condition of a target fails
   Public domain or MIT, at your choice; see LICENSE.

   Run:  test_fuzz [full]

   `make fuzz` looks for new inputs; this test repeats the stored ones. Before and after the
   handshake every field takes extreme values: of these mutants it runs every 7th, and with `full`
   all. A condition that fails ends the program. */
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
#define fuzz_one fuzz_packets
#include "tests/fuzz/fuzz_packets.c"
#undef fuzz_one
#define fuzz_one fuzz_config
#include "tests/fuzz/fuzz_config.c"
#undef fuzz_one
#define fuzz_one fuzz_manifest
#include "tests/fuzz/fuzz_manifest.c"
#undef fuzz_one
#define fuzz_one fuzz_tokenizer
#include "tests/fuzz/fuzz_tokenizer.c"
#include "tests/support/check.h"

int main(int argc, char **argv) {
    const int step = argc > 1 && strcmp(argv[1], "full") == 0 ? 1 : 7;
    const struct {
        const char *name;
        fuzz_target one;
        int step;
    } targets[] = { { "json", fuzz_json, 0 }, { "safetensors", fuzz_safetensors, 0 },
        { "llmc", fuzz_llmc, 0 }, { "shards", fuzz_shards, 0 },
        { "rendezvous", fuzz_rendezvous, step }, { "packets", fuzz_packets, step },
        { "config", fuzz_config, 0 }, { "manifest", fuzz_manifest, 0 },
        { "tokenizer", fuzz_tokenizer, 0 } };
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++) {
        char path[600];
        int mutants = 0;
        snprintf(path, sizeof path, "tests/fuzz/corpus/%s", targets[i].name);
        int inputs = fuzz_replay(path, targets[i].one, targets[i].step, &mutants);
        CHECK_MSG(inputs >= 10, "%s: %d inputs", path, inputs);
        CHECK_MSG(targets[i].step == 0 || mutants > 1000, "%s: %d mutants", path, mutants);
        printf("%s: %d inputs, %d mutants\n", targets[i].name, inputs, mutants);
    }
    return check_done("test_fuzz");
}
