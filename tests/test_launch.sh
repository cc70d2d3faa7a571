#!/usr/bin/env bash
# test_launch.sh - train_gpt as ranks that are started by hand, or by variables as torchrun sets them: each a process of
# its own, which find each other over tcp on the loopback and train exactly as threads do
cd "$(dirname "$0")/.." || exit 1
B=${B:-build} MAKE=${MAKE:-make}
passed=0 failed=0
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
$MAKE -s "$B/train_gpt" || { echo "FAIL train_gpt does not build"; echo "test_launch: 0 passed, 1 failed, 0 skipped"; exit 1; }
head -c 5000 README.md >"$dir/text"
tiny="--layers 1 --width 16 --heads 2 --seq 16 --batch 8 --steps 4 --data $dir/text"

report() { # report OK? TEXT
    if [ "$1" = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAIL $2"; cat "$dir"/err* | head -n 6 | sed 's/^/    /'; fi
}

taken() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
free_port() { # sets port, each time another one
    while :; do port=$((20000 + RANDOM % 10000)); taken $port || return; done
}

ranks_end() { # waits for all of $pids; status: the number of those that failed
    local p bad=0
    for p in $pids; do wait "$p" || bad=$((bad + 1)); done
    return $bad
}

by_hand() { # by_hand N ARGS...
    local n=$1 r
    shift
    free_port
    pids=
    for ((r = 0; r < n; r++)); do
        timeout 60 "$B/train_gpt" --backend tcp --rank $r --ranks $n --rendezvous 127.0.0.1:$port "$@" >"$dir/out$r" 2>"$dir/err$r" </dev/null &
        pids="$pids $!"
    done
    ranks_end
}

column() { cut -d, -f1-3 "$1"; }    # step, loss, grad_norm

for zero in 0 1; do
    timeout 60 "$B/train_gpt" $tiny --ranks 4 --zero $zero --log-csv "$dir/threads$zero.csv" >"$dir/out" 2>"$dir/err"
    report $? "4 threads with --zero $zero"
    by_hand 4 $tiny --zero $zero --log-csv "$dir/tcp$zero.csv"
    report $? "4 tcp ranks with --zero $zero"
    [ "$(wc -l <"$dir/tcp$zero.csv")" = 5 ] && cmp -s <(column "$dir/threads$zero.csv") <(column "$dir/tcp$zero.csv")
    report $? "4 tcp ranks with --zero $zero have the losses and norms of 4 threads to the last digit"
    grep -q '^step *4/4' "$dir/out0" && [ ! -s "$dir/out1" ] && [ ! -s "$dir/out2" ] && [ ! -s "$dir/out3" ]
    report $? "rank 0 alone prints"
done

free_port
pids=
for r in 0 1; do
    RANK=$r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout 60 "$B/train_gpt" $tiny --zero 1 --log-csv "$dir/env.csv" \
        >"$dir/out$r" 2>"$dir/err$r" </dev/null &
    pids="$pids $!"
done
ranks_end
report $? "2 ranks by torchrun's variables"
timeout 60 "$B/train_gpt" $tiny --ranks 2 --zero 1 --log-csv "$dir/two.csv" >"$dir/out" 2>"$dir/err"
cmp -s <(column "$dir/two.csv") <(column "$dir/env.csv") && grep -q 'cpu tcp   2 ranks' "$dir/out0"
report $? "... with the losses of 2 threads"

by_hand 3 --layers 1 --width 16 --heads 2 --seq 16 --batch 6 --steps 50 --data "$dir/text" --optimizer sgd --lr 1e3 --clip 0
[ $? = 3 ] && grep -hq 'error: rank [0-2].*finite\|error: rank [0-2].*NaN\|error: rank [0-2].*inf' "$dir"/err[0-2]
report $? "a run that diverges ends on all ranks, and says why"
free_port
timeout 60 "$B/train_gpt" $tiny --backend tcp --rank 0 --ranks 2 --rendezvous 127.0.0.1:$port --timeout 0.5 >"$dir/out" 2>"$dir/err"
[ $? = 1 ] && [ "$(grep -c '^error: .*rank 1 did not come' "$dir/err")" = 1 ]
report $? "a rank that never comes is named"
for args in "--backend tcp --ranks 2" "--backend tcp --rank 2 --ranks 2" "--rank 0" "--rendezvous 127.0.0.1:5" "--backend tcp --rank 0"; do
    timeout 60 "$B/train_gpt" $tiny $args >"$dir/out" 2>"$dir/err"
    [ $? = 2 ] && [ "$(grep -c '^error: ' "$dir/err")" = 1 ]
    report $? "refused: $args"
done

echo "test_launch: $passed passed, $failed failed, 0 skipped"
[ "$failed" = 0 ]
