#!/usr/bin/env bash
# test_parts.sh - the optional parts: the same programs with OpenMP's threads inside a rank, and with products by CBLAS
#
# OpenMP gives the same bits, so test_kernels compares it as any other build. Two active levels, because a team inside a
# team must stay in the scratch that one caller lent.
cd "$(dirname "$0")/.." || exit 1
CC=${CC:-cc}
passed=0 failed=0 skipped=0
D=$(mktemp -d)
trap 'rm -rf "$D"' EXIT

part() { # part NAME PROGRAM WORDS...: builds and runs tests/PROGRAM.c with these words
    local name=$1 program=$2 log=$D/log
    shift 2
    if ! $CC -O1 -w -I. "tests/$program.c" -o "$D/program" "$@" -lm -lpthread >"$log" 2>&1; then
        echo "SKIP $name: $(grep -m 1 -E 'error|cannot find' "$log")"
        skipped=$((skipped + 1))
    elif "$D/program" >"$log" 2>&1; then
        passed=$((passed + 1))
    else
        echo "FAIL $name: $program"
        grep -m 5 FAIL "$log"
        failed=$((failed + 1))
    fi
}

export OMP_NUM_THREADS=3,2 OMP_MAX_ACTIVE_LEVELS=2 OPENBLAS_NUM_THREADS=1
part "OpenMP" test_kernels -DDT_USE_OMP -fopenmp
part "OpenMP" test_ops -DDT_USE_OMP -fopenmp
blas=-lopenblas # or, without the development package's link, the library itself
echo 'int main(void) { return 0; }' | $CC -x c - -o "$D/program" $blas 2>/dev/null || blas=-l:libopenblas.so.0
part "CBLAS" test_ops -DDT_USE_CBLAS $blas # its bits are not promised, so test_kernels would refuse it
echo "test_parts: $passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
