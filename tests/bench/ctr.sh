#!/usr/bin/env bash
# ctr.sh - sparse tables and train_ctr beside their peers, and what a model learns beside numpy
# Public domain or MIT, at your choice; see LICENSE.
#
#   tests/bench/ctr.sh install           installs the peers into folders of $PEERS (about 3 GB)
#   tests/bench/ctr.sh [table] [paddle] [quality]     all of them without arguments
#
# table    bench_table beside FBGEMM 1.9.0 (a training step with row-wise Adagrad) and TensorFlow Recommenders Addons
#          0.8.1 (lookup), one core, 4 million rows, width 16
# paddle   train_ctr with one server and one worker, each a process, beside Paddle 2.6.2 with the same: Wide & Deep, 26
#          slots, width 16, MLP 256-128, batches of 512, asynchronous, on the same 32
#          batches again and again. Both twice, in turns. train_ctr's figure includes
#          the parsing of text, Paddle's does not
# quality  on SEEDS (5) samples of the stream of 20_click_model, each of 0.9 million lines (26 slots of 400 categories):
#          AUC of a factorization machine with one server and WORKERS (2) workers, synchronous, with pulls that are at most 2
#          steps stale and without a bound; of numpy (peers/numpy_fm.py) with the same lines and initial vectors; of a
#          logistic regression; beside Bayes. AUC differs by 0.002 (standard deviation) between seeds, so each column is
#          compared with the synchronous one seed by seed
#
# PEERS: folder of the peers' virtual environments. A peer that is not there is named and left out.
cd "$(dirname "$0")/../.." || exit 1
PEERS=${PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/dt-tests} B=${B:-build} PYTHON=${PYTHON:-python3}
dir=$(mktemp -d) && trap 'rm -rf "$dir"' EXIT

install() { # install NAME PACKAGES...: a virtual environment
    local name=$1
    shift
    "$PYTHON" -m venv "$PEERS/$name" && "$PEERS/$name/bin/pip" -q install "$@"
}
if [ "$1" = install ]; then
    install paddle paddlepaddle==2.6.2 protobuf==4.25.3 'numpy<2' setuptools
    install tfra tensorflow-cpu==2.16.2 tf-keras==2.16.0 tensorflow-recommenders-addons==0.8.1
    install fbgemm torch==2.14.1 numpy && "$PEERS/fbgemm/bin/pip" -q install --no-deps fbgemm-gpu-cpu==1.9.0
    exit
fi

has_peer() {
    [ -x "$PEERS/$1/bin/python" ] && return
    echo "# peer: $1 is not installed; tests/bench/ctr.sh install"
    return 1
}
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.2f", a / b }'; }

table() {
    make -s "$B/bench_table" || return
    "$B/bench_table" | grep -E '^width 16 (uniform|skewed)' | head -n 2 | tee "$dir/table"
    for keys in uniform skewed; do
        read -r pull push step < <(awk -v k=$keys '$3 == k { print $5, $9, $13 }' "$dir/table")
        echo "summary,${keys}_pull_m_keys_s,$pull"
        echo "summary,${keys}_push_m_keys_s,$push"
        echo "summary,${keys}_step_m_ids_s,$step"
    done
    ! has_peer tfra || "$PEERS/tfra/bin/python" tests/bench/peers/tfra_table.py 2>"$dir/err" >"$dir/tfra" || cat "$dir/err"
    ! has_peer fbgemm || "$PEERS/fbgemm/bin/python" tests/bench/peers/fbgemm_table.py 2>"$dir/err" >"$dir/fbgemm" || cat "$dir/err"
    for keys in uniform skewed; do
        read -r pull push step < <(awk -v k=$keys '$3 == k { print $5, $9, $13 }' "$dir/table")
        for peer in tfra fbgemm; do
            [ -s "$dir/$peer" ] || continue
            read -r a b < <(awk -v k=$keys '$1 == k { print $3, $4 }' "$dir/$peer")
            if [ $peer = tfra ]; then
                echo "summary,${keys}_tfra_lookup_m_keys_s,$a"
                echo "summary,${keys}_pull_over_tfra,$(ratio "$pull" "$a")"
            else
                echo "summary,${keys}_fbgemm_forward_m_ids_s,$a"
                echo "summary,${keys}_fbgemm_step_m_ids_s,$b"
                echo "summary,${keys}_step_over_fbgemm,$(ratio "$step" "$b")"
            fi
        done
    done
}

# Paddle's launcher does not always end with its trainer: it is stopped when the result is there.
run_paddle() {
    rm -rf "$dir/log"
    DATA=$dir/criteo.txt setsid "$PEERS/paddle/bin/python" -m paddle.distributed.launch --run_mode ps --server_num 1 \
        --trainer_num 1 --log_dir "$dir/log" tests/bench/peers/paddle_ctr.py >"$dir/err" 2>&1 &
    local id=$!
    for ((i = 0; i < 600; i++)); do
        grep -hs RESULT "$dir/log"/workerlog.0 && break
        kill -0 $id 2>/dev/null || break
        sleep 0.2
    done
    kill -9 -- -$id 2>/dev/null
    wait $id 2>/dev/null
}
run_dt() { # prints samples/s over all steps but those of the first epoch, which makes the rows
    "$B/train_ctr" --data "$dir/criteo.txt" --epochs 8 --model wide-deep --width 16 --hidden 256,128 --batch 512 --rule adam \
        --lr 0.001 --ranks 2 --servers 1 --mode async --backend procs --log-every 32 --quiet --log-csv "$dir/log.csv" || return
    awk -F, '$1 >= 32 { if (at) { seconds += ($2 - at) / $5; n += $2 - at } at = $2 }
        END { printf "%.0f\n", n / seconds }' "$dir/log.csv"
}
paddle() {
    has_peer paddle || return
    make -s "$B/train_ctr" || return
    "$PEERS/paddle/bin/python" tests/bench/peers/paddle_ctr.py write "$dir/criteo.txt" 16384
    local ours=0 theirs=0 n
    for turn in 1 2; do
        n=$(run_dt) && echo "turn $turn: dt $n samples/s"
        [ "${n:-0}" -le $ours ] || ours=$n
        n=$(run_paddle | sed 's/.*median step \([0-9]*\).*/\1/') && echo "turn $turn: Paddle $n samples/s"
        [ "${n:-0}" -le $theirs ] || theirs=$n
    done
    echo "summary,dt_samples_s,$ours"
    echo "summary,paddle_samples_s,$theirs"
    [ $theirs = 0 ] || echo "summary,dt_over_paddle,$(ratio $ours $theirs)"
}

last() { awk -F, -v name="$1" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == name) c = i } { v = $c } END { print v }' "$dir/log.csv"; }
stalest() { awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == "staleness_max") c = i; next } $c > m { m = $c } END { print m + 0 }' "$dir/log.csv"; }
quality() {
    make -s "$B/train_ctr" "$B/20_click_model" || return
    local test=100000000 python="${NUMPY:-$PEERS/fbgemm/bin/python}" workers=${WORKERS:-2}
    local seed ssp ssp_stale async async_stale numpy
    "$B/20_click_model" write 60000 $test >"$dir/test.txt"
    "$B/20_click_model" bayes 60000 $test
    auc() { # auc MODEL ARGS...: prints the AUC on the test lines
        local model=$1
        shift
        "$B/train_ctr" --data "$dir/train.txt" --eval "$dir/test.txt" --model "$model" --width 4 --lr 0.05 --quiet \
            --log-every 100 --log-csv "$dir/log.csv" --seed "$seed" --ranks $((workers + 1)) --servers 1 "$@" && last eval_auc
    }
    echo "seed,sync,ssp_2,async,numpy,lr,ssp_2_staleness_max,async_staleness_max" | tee "$dir/seeds.csv"
    for ((seed = 1; seed <= ${SEEDS:-5}; seed++)); do
        "$B/20_click_model" write "${SAMPLES:-900000}" $((seed * 2000000)) >"$dir/train.txt"
        ssp=$(auc fm --mode ssp:2) ssp_stale=$(stalest)
        async=$(auc fm --mode async) async_stale=$(stalest)
        numpy=$("$python" tests/bench/peers/numpy_fm.py "$dir/train.txt" "$dir/test.txt" $seed)
        echo "$seed,$(auc fm),$ssp,$async,$numpy,$(auc lr),$ssp_stale,$async_stale"
    done | tee -a "$dir/seeds.csv"
    awk -F, 'NR == 1 { for (i = 2; i <= 6; i++) name[i] = $i; next } { n++; for (i = 2; i <= 6; i++) auc[n, i] = $i }
        function summary(name, i, base,    k, x, sum, squares, most, deviation) {
            for (k = 1; k <= n; k++) {
                x = auc[k, i] - (base ? auc[k, base] : 0)
                sum += x; squares += x * x
                if (x < 0) x = -x
                if (x > most) most = x
            }
            deviation = n > 1 ? (squares - sum * sum / n) / (n - 1) : 0
            printf "summary,%s_mean,%.5f\nsummary,%s_deviation,%.5f\n", name, sum / n, name, sqrt(deviation > 0 ? deviation : 0)
            if (base) printf "summary,%s_largest,%.5f\n", name, most
        }
        END { for (i = 2; i <= 6; i++) {
            summary(name[i] "_auc", i, 0)
            if (i > 2) summary(name[i] "_minus_sync", i, 2) } }' "$dir/seeds.csv"
}

for part in ${*:-table paddle quality}; do
    echo "== $part"
    $part
done
