#!/usr/bin/env bash
# muon.sh - how many steps Muon needs for the validation loss that AdamW reaches
# Public domain or MIT, at your choice; see LICENSE.
#
#   tests/bench/muon.sh TEXT [MORE OPTIONS OF train_gpt]
#
# Trains a GPT (4 layers, width 128) on all but the last 32 KiB of TEXT, which it validates every EVERY steps (20) on the
# rest, for STEPS steps (600) with each optimizer and each of the learning rates LRS (3e-4 1e-3 3e-3 1e-2), constant after
# a warmup. Muon also with each of SCALES (1 0.3): AdamW's learning rate, for embeddings, biases and gains, relative to
# Muon's. AdamW's best loss is the target. Each run is a line; the last two say how many steps each optimizer needs.
here=$(cd "$(dirname "$0")/../.." && pwd)
[ -r "${1:-}" ] || { echo "usage: muon.sh TEXT"; exit 2; }
text=$1 STEPS=${STEPS:-600} EVERY=${EVERY:-20} TRAIN=${TRAIN:-$here/build/train_gpt}
LRS=${LRS:-3e-4 1e-3 3e-3 1e-2} SCALES=${SCALES:-1 0.3}
shift
more=("$@")
[ -x "$TRAIN" ] || make -s -C "$here" build/train_gpt || exit 1
dir=$(mktemp -d) && trap 'rm -rf "$dir"' EXIT
head -c -32768 "$text" >"$dir/train" && tail -c 32768 "$text" >"$dir/val"

# first_step TARGET CSV: the first step whose validation loss is at most TARGET
first_step() {
    awk -F, -v target="$1" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == "val_loss") v = i }
        NR > 1 && $v > 0 && $v <= target { print $1; exit }' "$2"
}
best_loss() {
    awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == "val_loss") v = i }
        NR > 1 && $v > 0 && (!best || $v < best) { best = $v } END { print best + 0 }' "$1"
}

train() { # train OPTIMIZER LR SCALE: one run, for AdamW without SCALE
    local csv=$dir/$1.$2.$3.csv
    "$TRAIN" --data "$dir/train" --val "$dir/val" --eval-every "$EVERY" --layers 4 --width 128 --heads 4 --seq 128 \
        --batch 16 --steps "$STEPS" --lr-schedule constant --warmup 20 --weight-decay 0.1 --quiet \
        --optimizer "$1" --lr "$2" ${3:+--adamw-lr-scale "$3"} --log-csv "$csv" "${more[@]}" || exit 1
    echo "$1 lr $2${3:+, adamw-lr-scale $3}: best validation loss $(best_loss "$csv")"
}

for lr in $LRS; do
    train adamw "$lr" ""
    for scale in $SCALES; do train muon "$lr" "$scale"; done
done
target=$(for csv in "$dir"/adamw.*.csv; do best_loss "$csv"; done | sort -g | head -n 1)
for optimizer in adamw muon; do
    steps=$(for csv in "$dir/$optimizer".*.csv; do first_step "$target" "$csv"; done | sort -n | head -n 1)
    echo "$optimizer needs ${steps:-more than $STEPS} steps for the loss $target"
done
