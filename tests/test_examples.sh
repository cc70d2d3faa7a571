#!/usr/bin/env bash
# test_examples.sh - builds the ladder and the demonstration and runs them: each checks itself and ends with status 0
cd "$(dirname "$0")/.." || exit 1
B=${B:-build} MAKE=${MAKE:-make}
passed=0 failed=0
log=$(mktemp)

build() { # the ladder at -O1, which compiles in a third of the time; the demonstration as make does it
    [ "$1" = demo ] && { $MAKE -s "$B/demo"; return; }
    mkdir -p "$B" && ${CC:-cc} -O1 -Wall -Wextra -I. "examples/$1.c" -o "$B/$1" -lm -lpthread
}

run() { # run NAME LIMIT_S ARGS...
    local name=$1 limit=$2 begin=$SECONDS
    shift 2
    if ! build "$name" >"$log" 2>&1; then
        echo "FAIL $name does not build"
    elif ! timeout -k 5 "$limit" "$B/$name" "$@" >"$log" 2>&1 </dev/null; then
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
    [ "$name" = 06_ring_all_reduce ] && run "$name" 60 procs
    [ "$(wc -l <"$f")" -le 150 ] || { echo "FAIL $f: over 150 lines"; failed=$((failed + 1)); }
done
run demo 180
rm -f "$log"
echo "test_examples: $passed passed, $failed failed, 0 skipped"
[ "$failed" = 0 ]
