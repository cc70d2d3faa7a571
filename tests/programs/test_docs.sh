#!/usr/bin/env bash
# test_docs.sh - the documents: every command in a block marked sh runs; every link, file and function exists
#
# Commands run in a folder with only an input.txt, a tokenizer.json and a small model in llama; train_gpt makes 2 steps. A command with "# ends with status N"
# must end with that status.
cd "$(dirname "$0")/../.." || exit 1
. tests/support/slow.sh
B=${B:-build} MAKE=${MAKE:-make}
ROOT=$PWD
docs="README.md examples/README.md examples/launch/README.md tests/README.md"
D=$(mktemp -d)
trap 'rm -rf "$D"' EXIT
passed=0 failed=0

good() { passed=$((passed + 1)); }
bad() { echo "FAIL $1"; shift; [ $# = 0 ] || tail -n 5 "$1" | sed 's/^/    /'; failed=$((failed + 1)); }

# ---- commands -------------------------------------------------------------------------------------------------------

$MAKE -s "$B/train_gpt" "$B/train_ctr" "$B/20_click_model" >"$D/log" 2>&1 || bad "a program does not build" "$D/log"
mkdir "$D/build"
ln -s "$(cd "$B" && pwd)/train_ctr" "$(cd "$B" && pwd)/20_click_model" "$D/build/"
printf '#!/bin/sh\ncase "$*" in *"--steps 0"*) exec "%s" "$@" ;; esac\nexec "%s" "$@" --steps 2 --stop-at 2\n' \
    "$(cd "$B" && pwd)/train_gpt" "$(cd "$B" && pwd)/train_gpt" >"$D/build/train_gpt"
chmod +x "$D/build/train_gpt"
head -c 60000 dt_tensor.h >"$D/input.txt"
cp tests/golden/tokenizer/gpt2.json "$D/tokenizer.json"
"$D/build/train_gpt" --data "$D/input.txt" --arch llama --layers 1 --width 64 --heads 2 --ffn 128 --seq 64 --save-model "$D/llama" \
    >"$D/log" 2>&1 || bad "the model of the commands" "$D/log"

"$D/build/train_gpt" --help >"$D/help"
"$D/build/train_ctr" --help >>"$D/help"
commands=0
while IFS=$'\t' read -r doc line; do
    commands=$((commands + 1)) want=0
    [[ $line =~ \#\ ends\ with\ status\ ([0-9]+) ]] && want=${BASH_REMATCH[1]}
    (cd "$D" && timeout -k 5 $((300 * SLOW)) bash -c "$line") >"$D/log" 2>&1 </dev/null
    status=$?
    if [ $status = "$want" ]; then good; else bad "$doc: status $status: $line" "$D/log"; fi
done < <(awk -v OFS='\t' 'FNR == 1 { on = 0 } /^```sh/ { on = 1; next } /^```/ { on = 0 } on && NF { print FILENAME, $0 }' $docs)
[ $commands -ge 12 ] && good || bad "only $commands commands found"

# ---- names ----------------------------------------------------------------------------------------------------------

for doc in $docs; do
    folder=$(dirname "$doc")
    for link in $(grep -o '](\([^)#]*\)' "$doc" | sed 's/](//' | grep -v '^http'); do
        if [ -e "$folder/$link" ]; then good; else bad "$doc: no file $link"; fi
    done
    for file in $(grep -oE '\b(tests|examples)/[A-Za-z0-9_/]+\.[a-z]+' "$doc" | sort -u); do
        if [ -e "$file" ]; then good; else bad "$doc: no file $file"; fi
    done
    for file in $(grep -oE '`(test_[a-z0-9_]+|[a-z_]+)\.(c|cc|sh|h)`' "$doc" | tr -d '`' | grep -v '^nccl.h$' | sort -u); do
        if [ -e "$file" ] || compgen -G "tests/*/$file" >/dev/null || compgen -G "examples/$file" >/dev/null; then good
        else bad "$doc: no file $file"; fi
    done
    for name in $(sed 's/\(dt\|DT\)_[A-Za-z0-9_]*\*//g' "$doc" | grep -oE '\b(dt|DT)_[A-Za-z0-9_]*[A-Za-z0-9]' | sort -u); do
        if grep -qw "$name" dt_*.h dt_kernels.cu examples/*.[ch] || compgen -G "$name.*" >/dev/null; then good
        else bad "$doc: nothing is called $name"; fi
    done
    for option in $(grep -oE '(^|[ `|(])--[a-z][a-z0-9_-]*' "$doc" | grep -oE -- '--[a-z0-9_-]+' | sort -u); do
        case $option in # of torchrun, mpirun and srun
        *_* | --mpi | --nnodes | --oversubscribe) continue ;;
        esac
        if grep -q -- "$option\b" "$D/help"; then good; else bad "$doc: no program has $option"; fi
    done
done

echo "test_docs: $passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
