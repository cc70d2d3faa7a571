#!/usr/bin/env bash
# test_peft.sh - Hugging Face's PEFT and train_gpt exchange LoRA adapters: PEFT loads what train_gpt --save-model writes,
# train_gpt --adapter loads what PEFT writes, and both have the same losses
#
# PYTHON is the program to use [python3]; without peft, transformers and torch there the test is skipped.
cd "$(dirname "$0")/../.." || exit 1
. tests/support/slow.sh
B=${B:-build} MAKE=${MAKE:-make} PYTHON=${PYTHON:-python3}
[ -n "$PYTHONPYCACHEPREFIX" ] || export PYTHONDONTWRITEBYTECODE=1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
find='from importlib.util import find_spec; exit(not all(map(find_spec, ["torch", "transformers", "peft"])))'
if ! "$PYTHON" -c "$find" >/dev/null 2>&1; then
    echo "SKIP test_peft: $PYTHON has no peft (PYTHON=... names another)${NO_TORCH:+; $NO_TORCH}"
    echo "test_peft: 0 passed, 0 failed, 1 skipped"
    exit 0
fi
$MAKE -s "$B/train_gpt"
passed=0 failed=0
check() { # TEXT A B: two losses agree
    if awk -v a="$2" -v b="$3" 'BEGIN { e = a - b; exit !(a > 0 && (e < 0 ? -e : e) < 1e-5 * b) }'; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL test_peft: $1: train_gpt has '$2', PEFT '$3'"
        tail -n 3 "$dir/err" | sed 's/^/    /'
    fi
}
mkdir "$dir/merged"
cp -r tests/golden/lora/base tests/golden/lora/adapter "$dir"
run() { timeout $((60 * SLOW)) "$B/train_gpt" --data "$dir/tokens" --model "$dir/base" --seq 16 --batch 4 --quiet "$@" 2>>"$dir/err"; }
adam="--steps 20 --lr 1e-2 --lr-schedule constant --clip 0"
python() { "$PYTHON" tests/golden/make_lora.py "$@" 2>>"$dir/err"; }

# PEFT's adapter, trained by both; then train_gpt's, read by PEFT
python --train "$dir" "$dir/tokens" >"$dir/theirs"
for layout in "--ranks 1" "--ranks 4 --dp 2 --tp 2 --sp on --zero 1" "--ranks 4 --dp 2 --pp 2 --zero 0"; do
    run $layout $adam --adapter "$dir/adapter" --log-csv "$dir/csv" --save-model "$dir/trained"
    check "$layout, step 20" "$(tail -n 1 "$dir/csv" | cut -d, -f2)" "$(tail -n 1 "$dir/theirs")"
done
# the same with the scale of rsLoRA
mkdir "$dir/rs"
cp -r "$dir/base" "$dir/adapter" "$dir/rs"
sed -i 's/"use_rslora": false/"use_rslora": true/' "$dir/rs/adapter/adapter_config.json"
python --train "$dir/rs" "$dir/tokens" >"$dir/rs/theirs"
run $adam --adapter "$dir/rs/adapter" --log-csv "$dir/rs/csv"
check "use_rslora, step 20" "$(tail -n 1 "$dir/rs/csv" | cut -d, -f2)" "$(tail -n 1 "$dir/rs/theirs")"
rm -r "$dir/adapter" && mv "$dir/trained" "$dir/adapter"
run --ranks 4 --dp 2 --tp 2 --zero 3 --steps 1 --lr 0 --adapter "$dir/adapter" --merge on --save-model "$dir/merged" \
    --log-csv "$dir/next"
python --check "$dir" "$dir/tokens" >"$dir/said"
check "the trained adapter" "$(tail -n 1 "$dir/next" | cut -d, -f2)" "$(awk '/^loss/ { print $2 }' "$dir/said")"
if grep -q '^ok' "$dir/said"; then
    passed=$((passed + 1))
else
    failed=$((failed + 1))
    echo "FAIL test_peft: $(cat "$dir/said")"
fi
echo "test_peft: $passed passed, $failed failed, 0 skipped"
[ "$failed" = 0 ]
