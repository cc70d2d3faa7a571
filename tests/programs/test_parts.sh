#!/usr/bin/env bash
# test_parts.sh - the optional parts: the same programs with OpenMP threads inside a rank, and with CBLAS matrix products
#
# OpenMP gives the same bits, so test_kernels tests it like any other build. It has two active levels, because nested
# teams must not use more scratch memory than their caller provided. No test here measures time, so as many run at a time
# as there are processors.
cd "$(dirname "$0")/../.." || exit 1
CC=${CC:-cc}
CPUS=$(nproc 2>/dev/null || echo 2)
D=$(mktemp -d)
trap 'rm -rf "$D"' EXIT

part() { # part NAME PROGRAM WORDS...: builds PROGRAM.c with these words and runs it; prints one line
    local name=$1 program=$2 exe=$D/$1.$2
    shift 2
    if ! $CC -O1 -w -I. $(echo tests/*/"$program.c") -o "$exe" "$@" -lm -lpthread >"$exe.log" 2>&1; then
        echo "SKIP $name: $(grep -m 1 -E 'error|cannot find' "$exe.log")"
    elif "$exe" >"$exe.log" 2>&1; then
        echo "PASS $name: $program"
    else
        echo "FAIL $name: $program"
        grep -m 5 FAIL "$exe.log" | sed 's/^/    /'
    fi
}

begin() { # begin NAME PROGRAM WORDS...: a part in the background
    while [ "$(jobs -rp | wc -l)" -ge "$CPUS" ]; do wait -n; done
    part "$@" >"$D/$1.$2.said" &
}

export OMP_NUM_THREADS=3,2 OMP_MAX_ACTIVE_LEVELS=2 OPENBLAS_NUM_THREADS=1
blas=-lopenblas # or, without the development package's link, the library itself
echo 'int main(void) { return 0; }' | $CC -x c - -o "$D/program" $blas 2>/dev/null || blas=-l:libopenblas.so.0
begin "OpenMP" test_kernels -DDT_USE_OMP -fopenmp
begin "OpenMP" test_ops -O0 -DDT_USE_OMP -fopenmp
begin "CBLAS" test_ops -O0 -DDT_USE_CBLAS $blas # without test_kernels, because CBLAS has other bits
wait
cat "$D"/*.said | tee "$D/said"
count() { grep -c "^$1 " "$D/said"; }
echo "test_parts: $(count PASS) passed, $(count FAIL) failed, $(count SKIP) skipped"
[ "$(count FAIL)" = 0 ] && [ "$(grep -c "^[A-Z]" "$D/said")" = 3 ]
