#!/usr/bin/env bash
# footprint.sh - the table of tests/README.md: object size and compile time of each header with its includes, and the bytes of
# an idle context. Not a test: it measures and prints.
set -euo pipefail
cd "$(dirname "$0")/../.."
CC=${CC:-cc}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

measure() { # header, optimisation: "KiB of code and constants | seconds"
    printf '#define DT_IMPLEMENTATION\n#include "%s"\n' "$PWD/$1" >"$dir/x.c"
    local begin end
    begin=$(date +%s.%N)
    $CC "$2" -c "$dir/x.c" -o "$dir/x.o"
    end=$(date +%s.%N)
    size "$dir/x.o" | awk -v s="$(awk "BEGIN{print $end-$begin}")" 'NR==2{printf " %d KiB | %.1f s |", ($1+$2)/1024, s}'
}

for header in dt_tensor.h dt_comm.h dt_parallel.h dt_zero.h; do
    echo "| \`$header\` |$(measure $header -O2)$(measure $header -O3)"
done
cat >"$dir/idle.c" <<CODE
#define DT_IMPLEMENTATION
#include "$PWD/dt_tensor.h"
int main(void) {
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 1 });
    printf("idle context: %zu bytes\n", dt_memory_used(ctx).live_total);
    dt_ctx_free(ctx);
    return 0;
}
CODE
$CC -O0 "$dir/idle.c" -o "$dir/idle" -lm
"$dir/idle"
