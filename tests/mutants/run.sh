#!/usr/bin/env bash
# run.sh - planted mistakes: do the tests notice them?
#
#   tests/mutants/run.sh             every *.patch in this folder
#   tests/mutants/run.sh NAME...     only these (NAME or NAME.patch)
#   SAMPLE=12 tests/mutants/run.sh   12 of those that are quick, spread evenly over the names
#
# A mutant is one mistake as a patch (patch -p1 from the project's folder; 'diff -u a/dt_zero.h b/dt_zero.h' makes one).
# Its first line names the test that must fail, a program or a script, and if need be arguments:
#
#       # test: test_zero                       or      # test: test_headers.sh text
#       # the second line says what the mistake is
#
# For each one the project is copied, the copy patched, that test built and run. Caught: the test builds and fails. A
# mutant that survives, does not apply or does not compile is a failure of this run; a test that ends with 77 cannot
# run. LIMIT: seconds for one on an idle machine (90).
# CLEAN=no: do not first run each test without a mistake.
here=$(cd "$(dirname "$0")" && pwd)
ROOT=$(cd "$here/../.." && pwd)
LIMIT=${LIMIT:-90} MAKE=${MAKE:-make}
export TFLAGS=${MUTANT_TFLAGS:--O1} CFLAGS=${MUTANT_TFLAGS:--O1} CASES=all
CPUS=$(nproc 2>/dev/null || echo 2)
unset MAKEFLAGS MAKELEVEL B
cd "$ROOT" && . tests/support/slow.sh
LIMIT=$((LIMIT * SLOW))
S=$(mktemp -d)
trap 'rm -rf "$S"' EXIT

mutant() { # mutant PATCH: prints one line, PASS or FAIL
    local name test args d status first
    name=$(basename "$1" .patch)
    d=$S/$name
    first=$(head -n 1 "$1")
    read -r test args <<<"${first#\# test: }"
    if [ "$first" = "${first#\# test: }" ]; then echo "FAIL $name: its first line is not '# test: NAME'"; return; fi
    mkdir "$d"
    (cd "$ROOT" && tar cf - --exclude=.git --exclude='build*' .) | tar xf - -C "$d"
    cd "$d" || return
    if ! patch -p1 -s -N --no-backup-if-mismatch <"$1" >"$d.log" 2>&1; then
        echo "FAIL $name: the patch does not apply"; tail -n 4 "$d.log" | sed 's/^/    /'
        return
    fi
    case $test in
        *.sh) # what it would build itself, within its limit
            test=$(echo tests/*/"$test")
            if grep -q 'B/train_gpt' "$test" && ! $MAKE -s build/train_gpt >"$d.log" 2>&1; then
                echo "FAIL $name: train_gpt does not build"; tail -n 6 "$d.log" | sed 's/^/    /'
                return
            fi
            set -- bash "$test" $args
            ;;
        *)
            if ! $MAKE -s SHARE=no "build/$test" >"$d.log" 2>&1; then
                echo "FAIL $name: $test does not build"; tail -n 6 "$d.log" | sed 's/^/    /'
                return
            fi
            set -- "build/$test" $args
            ;;
    esac
    timeout -k 5 "$LIMIT" "$@" >"$d.log" 2>&1 </dev/null
    status=$?
    if [ $status = 0 ]; then
        echo "FAIL $name survives $test: $(sed -n '2s/^# *//p' "$here/$name.patch")"
    elif [ $status = 124 ] || [ $status = 137 ]; then
        echo "PASS $name: $test did not end"
    elif grep -q '^FAIL .*does not build' "$d.log"; then
        echo "FAIL $name: $(grep -m 1 '^FAIL .*does not build' "$d.log" | sed 's/^FAIL //')"
    elif [ $status = 77 ]; then
        echo "SKIP $name: $(grep -m 1 '^SKIP' "$d.log" | sed 's/^SKIP *//')"
    else
        echo "PASS $name: $(grep -m 1 '^FAIL' "$d.log" || echo "$test ended with status $status")"
    fi
    rm -rf "$d"
}

patches=()
if [ $# -gt 0 ]; then
    for a in "$@"; do patches+=("$here/$(basename "$a" .patch).patch"); done
else
    for f in "$here"/*.patch; do [ -e "$f" ] && patches+=("$f"); done
fi
if [ -n "$SAMPLE" ] && [ ${#patches[@]} -gt "$SAMPLE" ]; then
    # a sample has only tests that take seconds, even without optimisation
    quick="account comm_started files file_safety gpt groups io_thread layers lora misuse models moe muon nan onebit ops \
           parallel placements replicas schedule seeds tensor tokenizer trace"
    quick=$(echo $quick)
    all=($(grep -lE "^# test: test_(${quick// /|})( |\$)" "${patches[@]}")) total=${#patches[@]} patches=()
    for ((i = 0; i < SAMPLE; i++)); do patches+=("${all[i * ${#all[@]} / SAMPLE]}"); done
    echo "a sample: ${#patches[@]} of $total mutants; make mutants runs all"
fi
if [ ${#patches[@]} -gt 0 ] && ! command -v patch >/dev/null; then
    echo "SKIP mutants: patch is not installed"
    echo "mutants: 0 passed, 0 failed, 1 skipped"
    exit 0
fi

# The tests must pass without a mistake, or everything would count as caught: one run of each test that is named.
[ "$CLEAN" = no ] || for t in $(for p in "${patches[@]}"; do sed -n '1s/^# test: *\([A-Za-z0-9_]*\) *$/\1/p' "$p"; done | sort -u); do
    while [ "$(jobs -rp | wc -l)" -ge "$CPUS" ]; do wait -n; done
    ( cd "$ROOT" && $MAKE -s SHARE=no B="$S/clean.$t" "$S/clean.$t/$t" >"$S/clean.$t.log" 2>&1 &&
        timeout -k 5 "$LIMIT" "$S/clean.$t/$t" >"$S/clean.$t.log" 2>&1 </dev/null || echo "FAIL $t fails without a mistake" >"$S/1.$t.out" ) &
done
for p in "${patches[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge "$CPUS" ]; do wait -n; done
    ( mutant "$p" >"$S/2.$(basename "$p").out" ) &
done
wait
cat "$S"/[12].*.out 2>/dev/null
passed=$(cat "$S"/[12].*.out 2>/dev/null | grep -c '^PASS')
failed=$(cat "$S"/[12].*.out 2>/dev/null | grep -c '^FAIL')
skipped=$(cat "$S"/[12].*.out 2>/dev/null | grep -c '^SKIP')
echo "mutants: $passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
