#!/usr/bin/env bash
# test_index.sh - the reader's index: each concept of index_terms.txt is found in the headers by its usual name, and its
# explanation fits on one screen
#
#   tests/programs/test_index.sh           checks, and shows that a concept whose name is removed fails
#   tests/programs/test_index.sh table     where each concept is: term, file:line, number of lines to read, their kind
#
# index.awk defines when a concept is found.
cd "$(dirname "$0")/../.." || exit 1
here=tests/programs
files="dt_tensor.h dt_comm.h dt_parallel.h dt_zero.h dt_kernels.cu examples/gpt.h"
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
export LC_ALL=C
passed=0 failed=0

look() { awk -f $here/index.awk $here/index_terms.txt "$@"; } # look FILE...

if [ "$1" = table ]; then look $files; exit; fi

look $files >"$T/found"
while IFS=$'\t' read -r term place lines what; do
    if [ "$place" = - ]; then echo "FAIL no comment or CONTENTS line leads to: $term"; failed=$((failed + 1))
    elif [ "$lines" -gt 60 ]; then echo "FAIL $term: $place: $lines lines to read ($what)"; failed=$((failed + 1))
    else passed=$((passed + 1)); fi
done <"$T/found"
[ "$(wc -l <"$T/found")" = "$(grep -c . $here/index_terms.txt)" ] || { echo "FAIL index.awk lost terms"; failed=$((failed + 1)); }

# Planted: a concept whose name is removed from the headers must not be found. Every third one, with CASES=all all.
n=0
while IFS=$'\t' read -r term place lines what; do
    [ "$place" != - ] || continue
    n=$((n + 1))
    [ "$CASES" = all ] || [ $((n % 3)) = 0 ] || continue
    mkdir -p "$T/examples"
    for f in $files; do sed "s/$term/withheld/Ig" $f >"$T/$f"; done
    look $(printf "$T/%s " $files) >"$T/planted"
    if grep -q "^$term	-" "$T/planted"; then passed=$((passed + 1))
    else echo "FAIL planted: $term is removed, and still found"; failed=$((failed + 1)); fi
done <"$T/found"

echo "test_index: $passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
