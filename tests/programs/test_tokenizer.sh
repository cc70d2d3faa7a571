#!/usr/bin/env bash
# test_tokenizer.sh - examples/tokenizer.h has the ids of the Python package tokenizers, and trains the same vocabulary
#
# Three tokenizers with the regexes and options of GPT-2, Llama 3 and Qwen, trained on the sources of dt. The texts: the
# sources, generated text of 33 scripts with emoji, marks and special tokens (MB: megabytes of both [1]), and every code
# point of Unicode between letters and between combining marks. train_gpt --tokenizer trains on the same tokens.
#
# PYTHON is the program to use [python3]; without tokenizers there the test is skipped.
cd "$(dirname "$0")/../.." || exit 1
. tests/support/slow.sh
B=${B:-build} MAKE=${MAKE:-make} PYTHON=${PYTHON:-python3}
[ -n "$PYTHONPYCACHEPREFIX" ] || export PYTHONDONTWRITEBYTECODE=1
export TOKENIZERS_PARALLELISM=false
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
if ! "$PYTHON" -c 'import tokenizers' >/dev/null 2>&1; then
    echo "SKIP test_tokenizer: $PYTHON has no tokenizers (PYTHON=... names another)${NO_TORCH:+; $NO_TORCH}"
    echo "test_tokenizer.sh: 0 passed, 0 failed, 1 skipped"
    exit 0
fi
passed=0 failed=0
count() { # count STATUS WHAT: counts a check; the first that fails shows the end of the log
    if [ "$1" = 0 ]; then passed=$((passed + 1)); return; fi
    echo "FAIL test_tokenizer.sh: $2"
    tail -n 12 "$dir/log" | sed 's/^/    /'
    failed=$((failed + 1))
}

$MAKE -s "$B/test_tokenizer" >"$dir/log" 2>&1
count $? "test_tokenizer does not build"

"$PYTHON" tests/golden/make_tokenizer.py --full "$dir" "${MB:-1}" >"$dir/log" 2>&1
count $? "make_tokenizer.py --full"
timeout $((120 * SLOW)) "$B/test_tokenizer" --compare "$dir" >"$dir/log" 2>&1
count $? "other ids than the package's"

# The package still has the stored ids of the stored tokenizers.
"$PYTHON" tests/golden/make_tokenizer.py --check tests/golden/tokenizer >"$dir/log" 2>&1
count $? "the stored vectors are not the package's"

# Training: the words of the headers have many pairs with equal counts.
cat dt_*.h >"$dir/train"
timeout $((120 * SLOW)) "$B/test_tokenizer" --train "$dir/train" 2500 "$dir/mine.json" >"$dir/log" 2>&1
count $? "training"
"$PYTHON" tests/golden/make_tokenizer.py --trained "$dir/mine.json" "$dir/train" 2500 >"$dir/log" 2>&1 &&
    [ "$(grep -c ^ok "$dir/log")" = 3 ]
count $? "the trained vocabulary is not the package's"

# train_gpt has the same losses with --tokenizer and with a shard of the package's tokens.
$MAKE -s "$B/train_gpt" >"$dir/log" 2>&1
run="--layers 1 --width 32 --heads 2 --seq 64 --batch 4 --steps 3 --dtype f64 --quiet --log-csv /dev/stdout"
for kind in gpt2 llama3 qwen; do
    "$PYTHON" tests/golden/make_tokenizer.py --shard "$dir/$kind.json" tests/README.md "$dir/shard" >"$dir/log" 2>&1
    vocab=$(cat "$dir/log")
    timeout $((60 * SLOW)) "$B/train_gpt" $run --data "$dir/shard" --vocab "$vocab" >"$dir/theirs" 2>>"$dir/log"
    timeout $((60 * SLOW)) "$B/train_gpt" $run --data tests/README.md --tokenizer "$dir/$kind.json" >"$dir/ours" 2>>"$dir/log"
    [ "$(wc -l <"$dir/ours")" = 4 ] && cmp -s <(cut -d, -f1-3 "$dir/ours") <(cut -d, -f1-3 "$dir/theirs")
    count $? "train_gpt --tokenizer, $kind: other losses than with the package's tokens"
done

echo "test_tokenizer.sh: $passed passed, $failed failed, 0 skipped"
[ "$failed" = 0 ]
