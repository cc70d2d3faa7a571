#!/usr/bin/env bash
# test_examples.sh - builds the ladder and the demonstration and runs them: each checks itself and ends with status 0
cd "$(dirname "$0")/../.." || exit 1
. tests/support/slow.sh
B=${B:-build} MAKE=${MAKE:-make}
passed=0 failed=0
log=$(mktemp)

D=$(mktemp -d)
trap 'rm -rf "$D" "$log"' EXIT

# As many at a time as there are processors. Group examples of test_headers.sh compiles whole programs without make.
MAKEFLAGS= $MAKE -s -k -j"$(nproc 2>/dev/null || echo 2)" "$B/demo" $(ls examples/[0-9]*.c | sed "s:examples/\(.*\)\.c:$B/\1:") \
    >/dev/null 2>&1

built() { $MAKE -s "$B/$1" && cp "$B/$1" "$D"; } # built NAME: 0 if the program was built, else prints its errors

run() { # run NAME LIMIT_S ARGS...
    local name=$1 limit=$2 begin=$SECONDS
    shift 2
    if ! built "$name" >"$log" 2>&1; then
        echo "FAIL $name does not build"
    elif ! timeout -k 5 $((limit * SLOW)) "$D/$name" "$@" >"$log" 2>&1 </dev/null; then
        echo "FAIL $name $*"
    elif [ "$name" != demo ] && ! grep -q '^ok' "$log"; then
        echo "FAIL $name $* does not say ok"
    else
        echo "PASS $name $*  ($((SECONDS - begin)) s)"
        passed=$((passed + 1))
        return
    fi
    tail -n 8 "$log" | sed 's/^/    /'
    failed=$((failed + 1))
}

for f in examples/[0-9]*.c; do
    name=$(basename "$f" .c)
    case $name in 04_memory) run "$name" 60 --width 300 ;; *) run "$name" 60 ;; esac
    case $name in 06_ring_all_reduce | 17_mini_mpi) run "$name" 60 procs ;; esac
    [ "$(wc -l <"$f")" -le 250 ] || { echo "FAIL $f: over 250 lines"; failed=$((failed + 1)); }
done
run demo 180
# the picture of README.md is the one that the demonstration draws
if cmp -s "$D/schedules.svg" examples/schedules.svg; then
    echo "PASS examples/schedules.svg"; passed=$((passed + 1))
else
    echo "FAIL examples/schedules.svg is not what demo draws"; failed=$((failed + 1))
fi
echo "test_examples: $passed passed, $failed failed, 0 skipped"
[ "$failed" = 0 ]
