#!/usr/bin/env bash
# test_hf.sh - Hugging Face's transformers load the models of gpt_save and the models and checkpoints of train_gpt: the
# logits equal those of gpt.h, and the loss that of train_gpt
#
# PYTHON is the program to use [python3]; without transformers and torch there the test is skipped.
cd "$(dirname "$0")/../.." || exit 1
. tests/support/slow.sh
B=${B:-build} MAKE=${MAKE:-make} PYTHON=${PYTHON:-python3}
[ -n "$PYTHONPYCACHEPREFIX" ] || export PYTHONDONTWRITEBYTECODE=1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
find='from importlib.util import find_spec; exit(not all(map(find_spec, ["torch", "transformers", "numpy"])))'
if ! "$PYTHON" -c "$find" >/dev/null 2>&1; then
    echo "SKIP test_hf: $PYTHON has no transformers and torch (PYTHON=... names another)${NO_TORCH:+; $NO_TORCH}"
    echo "test_hf: 0 passed, 0 failed, 1 skipped"
    exit 0
fi
$MAKE -s "$B/test_gpt" && "$B/test_gpt" --save "$dir" && \
    "$PYTHON" tests/golden/make_hf.py --check "$dir" >"$dir/said" 2>"$dir/err"
grep -E '^(ok|WRONG)' "$dir/said" 2>/dev/null | sed 's/^WRONG/FAIL/'
: >>"$dir/said"
passed=$(grep -c '^ok' "$dir/said") failed=$(grep -c '^WRONG' "$dir/said")
if [ $((passed + failed)) != 12 ]; then
    echo "FAIL test_hf: $passed of 12 models were loaded"
    tail -n 3 "$dir/err"
    failed=$((failed + 1))
fi

# transformers' loss of a checkpoint after three steps, compared with train_gpt's loss of step 4.
$MAKE -s "$B/train_gpt"
head -c 5000 README.md >"$dir/text"
layouts=("--arch gpt2 --ranks 4 --tp 2 --pp 2 --zero 0 --micro-batch 2" "--arch gpt2 --ranks 4 --dp 4 --zero 3"
    "--arch llama --kv-heads 2 --ranks 4 --tp 2 --pp 2 --zero 0 --micro-batch 2"
    "--arch llama --kv-heads 2 --tie off --ranks 4 --dp 4 --zero 3")
folders=() steps=()
for layout in "${layouts[@]}"; do
    train="--layers 2 --width 32 --heads 4 --seq 32 --batch 8 --steps 4 --lr 1e-2 --quiet --data $dir/text $layout"
    saved=$dir/saved.${#folders[@]}
    folders+=("$saved/step-3")
    timeout $((60 * SLOW)) "$B/train_gpt" $train --save "$saved" --stop-at 3 >>"$dir/err" 2>&1 &&
        timeout $((60 * SLOW)) "$B/train_gpt" $train --resume "$saved" --log-csv "$saved.csv" >>"$dir/err" 2>&1
    steps+=("$(tail -n 1 "$saved.csv" 2>/dev/null | cut -d, -f1,2)")
done
losses() { # losses TEXT FIRST COUNT: transformers' losses of the folders
    "$PYTHON" tests/golden/next_loss.py "$1" 32 "$2" "$3" "${folders[@]}" >"$dir/losses" 2>>"$dir/err"
    mapfile -t losses <"$dir/losses"
}
compare() { # compares the losses with those of the steps
    for i in "${!layouts[@]}"; do
        next=${steps[i]}
        if awk -v hf="${losses[i]}" -v ours="${next#*,}" -v step="${next%,*}" 'BEGIN { e = ours - hf;
            exit !(step == 4 && hf > 0 && (e < 0 ? -e : e) < 1e-5 * hf) }'; then
            passed=$((passed + 1))
        else
            echo "FAIL test_hf: ${layouts[i]}: the loss of step $next, transformers have '${losses[i]}'"
            tail -n 3 "$dir/err" | sed 's/^/    /'
            failed=$((failed + 1))
        fi
    done
}
losses "$dir/text" 24 8
compare

# transformers' validation loss of mixtures of --save-model, compared with train_gpt's
head -c 1000 "$dir/text" >"$dir/val"
deepseek="--mla 6:8:8:4:8 --route sigmoid --shared-experts 1 --moe-ffn 8 --first-dense 1 --expert-groups 2:1 --router-bias 0.01"
layouts=("--kv-heads 1 --dp 2 --ep 2 --zero 1" "--kv-heads 1 --tp 2 --pp 2 --micro-batch 2"
    "$deepseek --dp 2 --ep 2 --zero 1" "$deepseek --tp 2 --pp 2 --micro-batch 2")
folders=() steps=()
for layout in "${layouts[@]}"; do
    saved=$dir/moe.${#folders[@]}
    folders+=("$saved")
    timeout $((60 * SLOW)) "$B/train_gpt" --layers 2 --width 16 --heads 2 --seq 32 --batch 4 --steps 4 --lr 1e-2 --quiet \
        --arch llama --experts 4 --data "$dir/text" --val "$dir/val" $layout --save-model "$saved" --log-csv "$saved.csv" \
        >>"$dir/err" 2>&1
    steps+=("$(tail -n 1 "$saved.csv" 2>/dev/null | cut -d, -f1,18)")
done
losses "$dir/val" 0 31
compare
echo "test_hf: $passed passed, $failed failed, 0 skipped"
[ "$failed" = 0 ]
