#!/usr/bin/env bash
# test_restart.sh - train_gpt with --save: killed ranks, SIGTERM, resuming on other ranks, and invalid settings
#
#   tests/programs/test_restart.sh         10 kills, a SIGTERM of each kind: seconds
#   tests/programs/test_restart.sh full    200 kills, 20 SIGTERM of each kind: minutes (make faults)
#
# Whatever happens to a training run, its losses, final weights and final optimizer state have the bits of an undisturbed
# run, and no saved checkpoint is lost. --link-latency makes the steps slow, so that there is time to disturb them.
cd "$(dirname "$0")/../.." || exit 1
. tests/support/report.sh
needs_train_gpt
full=${1:-}
tiny="--layers 2 --width 16 --heads 2 --seq 16 --data $dir/text" common=$tiny

begin() { # begin ARGS...: in the background; sets pid
    : >"$dir/out" >"$dir/err"
    "$B/train_gpt" $tiny "$@" >"$dir/out" 2>"$dir/err" </dev/null &
    pid=$!
    children=($pid)
}

now() { printf -v "$1" '%d' "${EPOCHREALTIME/./}"; } # microseconds
until_in() { # until_in SECONDS COMMAND...: waits until COMMAND succeeds; 1 after SECONDS
    local end t
    now end
    end=$((end + $1 * SLOW * 1000000))
    shift
    until "$@"; do
        now t
        [ "$t" -lt "$end" ] || return 1
        sleep 0.005
    done
}
gone() { ! kill -0 "$1" 2>/dev/null; }
ended_in() { # ended_in SECONDS PID: sets status
    until_in "$1" gone "$2" || kill -9 "$2"
    wait "$2" 2>/dev/null
    status=$?
    [ $status != 137 ]
}
there() { compgen -G "$1" >/dev/null; }
newest() { # newest DIR: the step of the newest checkpoint, 0: none
    local f n=0 step
    for f in "$1"/step-*/; do
        [[ $f =~ /step-([0-9]+)(-[0-9]+)?/$ ]] || continue
        step=${BASH_REMATCH[1]}
        [ "$step" -le "$n" ] || n=$step
    done
    echo "$n"
}
losses() { cut -d, -f1-4,18,20 "$1"; } # step, loss, norm, learning rate, validation, batch
same_end() { # same_end DIR DIR STEP
    cmp -s "$1/step-$3/model.safetensors" "$2/step-$3/model.safetensors" &&
        cmp -s "$1/step-$3/optim.safetensors" "$2/step-$3/optim.safetensors"
}

# ---- kill -9 of a rank ----------------------------------------------------------------------------------------------

STEPS=24
during=0 kills=0

restarts() { grep -c '^restart ' "$dir/err"; }
more_restarts() { [ "$(restarts)" -gt "$1" ] || gone $pid; }
until_saving() { # waits until a save has begun, at most a second, without sleeping
    local end t=0
    now end
    end=$((end + SLOW * 1000000))
    until [ $t -gt $end ] || there "$dir/killed/step-*.tmp" || gone $pid; do now t; done
}

kill_one() { # kills a random rank at a random time or during a save; 1: the run has ended
    local before after ranks n
    if [ $((RANDOM % 2)) = 0 ]; then until_saving; else sleep 0.0$((RANDOM % 9 + 1)); fi
    before=$(newest "$dir/killed") n=$(restarts)
    ! gone $pid || return
    ranks=($(cat "/proc/$pid/task/$pid/children" 2>/dev/null))
    [ ${#ranks[@]} = 4 ] || return 0 # the ranks have just been restarted
    kill -9 "${ranks[RANDOM % 4]}" 2>/dev/null
    ! there "$dir/killed/step-*.tmp" || during=$((during + 1))
    until_in 10 more_restarts "$n"
    kills=$((kills + $(restarts) - n))
    after=$(newest "$dir/killed")
    [ "$after" -ge "$before" ] || { lost="of step $before, now $after"; }
    ! gone $pid
}

killed() { # killed N ARGS...: a run whose ranks are killed N times
    local want=$1 name f bad=0 lost= most=$((kills + $1))
    shift
    rm -rf "$dir/whole" "$dir/killed"
    name="$* --ranks 4"
    timeout $((60 * SLOW)) "$B/train_gpt" $tiny --batch 8 --val "$dir/text" --eval-every 6 --steps $STEPS --ranks 4 --quiet "$@" \
        --save "$dir/whole" --log-csv "$dir/whole.csv" >"$dir/out" 2>"$dir/err" || { report 1 "$name"; return; }
    begin --batch 8 --val "$dir/text" --eval-every 6 --steps $STEPS --ranks 4 --backend procs --link-latency 1 "$@" \
        --save "$dir/killed" --log-csv "$dir/killed.csv" --max-restarts 999
    while [ $kills -lt $most ] && kill_one; do :; done
    ended_in 30 $pid && [ $status = 0 ] && [ -z "$lost" ]
    report $? "$name: status $status after $(restarts) restarts${lost:+; a checkpoint was lost: $lost}"
    same_end "$dir/whole" "$dir/killed" $STEPS
    report $? "$name: after kills and restarts, other bits"
    cmp -s <(losses "$dir/whole.csv") <(losses "$dir/killed.csv")
    report $? "$name: after kills and restarts, another csv: $(diff <(losses "$dir/whole.csv") \
        <(losses "$dir/killed.csv") | head -n 3 | tr '\n' ' ')"
    ! there "$dir/killed/step-*.tmp"
    report $? "$name: the temporary folder of a killed save is left"
    for f in "$dir/killed"/step-*; do # every checkpoint is complete, and equal to that of the undisturbed run
        rm -rf "$dir/copy"
        timeout $((60 * SLOW)) "$B/train_gpt" $tiny --batch 8 --steps $STEPS --quiet "$@" --ranks 4 --resume "$f" --stop-at 1 \
            --save "$dir/copy" >"$dir/out" 2>"$dir/err" && same_end "$dir/copy" "$dir/killed" "${f##*-}" || bad=1
        [ ! -e "$dir/whole/${f##*/}" ] || same_end "$dir/whole" "$dir/killed" "${f##*-}" || bad=1
    done
    report $bad "$name: a checkpoint is incomplete, or differs"
}

if [ ! -r /proc/$$/task/$$/children ]; then
    echo "SKIP test_restart: this kernel does not list the children of a process: no rank is killed"
    skipped=$((skipped + 1))
elif [ -z "$full" ]; then
    killed 3 --save-every 1
    killed 3 --save-every 2 --zero 3 --save-background on
    killed 2 --save-every 5 --tp 2 --zero 1 --keep 2 --dropout 0.1
    killed 2 --save-every 3 --pp 2 --micro-batch 1 --dtype bf16 --shuffle on
else
    layouts=("" "--tp 2" "--pp 2 --micro-batch 1" "--arch llama --cp 2")
    types=(f32 f32 bf16) background=(off on)
    for ((i = 0; kills < 200 && i < 60; i++)); do
        killed 10 --save-every $((1 + i % 5)) --zero $((i % 4)) ${layouts[i / 5 % 4]} --dtype ${types[i % 3]} \
            --save-background ${background[i % 2]} $([ $((i % 7)) = 3 ] && echo --keep 2)
    done
fi
[ $skipped -gt 0 ] || [ $kills -ge $([ "$full" ] && echo 200 || echo 8) ]
report $? "only $kills kills"
echo "kills: $kills, $during of them during a save"

# ---- SIGTERM --------------------------------------------------------------------------------------------------------

STEPS=40
rm -rf "$dir/whole"
try 0 '' --batch 8 --steps $STEPS --ranks 2 --save "$dir/whole" --log-csv "$dir/whole.csv" --quiet

stepped() { [ "$(grep -c '^step ' "$dir/out")" -ge "$1" ] || gone $pid; }
is_there() { [ -e "$1" ]; }
free_port() { # sets port to a free port, each time another one
    while :; do
        port=$((20000 + RANDOM % 10000))
        (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || return
    done
}

term() { # term BACKEND WHO: SIGTERM to one process, or to all of them
    local args="--batch 8 --steps $STEPS --ranks 2 --link-latency 2 --save $dir/stop --log-csv $dir/stop.csv"
    local what="SIGTERM, $*" at t0 t1 bad= last p
    rm -rf "$dir/stop"
    if [ $1 = tcp ]; then
        free_port
        begin $args --backend tcp --rank 0 --rendezvous 127.0.0.1:$port
        "$B/train_gpt" $tiny $args --backend tcp --rank 1 --rendezvous 127.0.0.1:$port >"$dir/out1" 2>"$dir/err1" \
            </dev/null &
        children=($pid $!)
    else
        begin $args --backend $1
    fi
    until_in 20 stepped $((1 + RANDOM % 12))
    at=${children[RANDOM % ${#children[@]}]}
    [ $2 != all ] || at="$pid $(cat /proc/$pid/task/$pid/children)"
    now t0
    kill -TERM $at
    for p in "${children[@]}"; do ended_in 10 $p && [ $status = 143 ] || bad="$bad $status"; done
    now t1
    [ -z "$bad" ] && [ $((t1 - t0)) -lt $((5000000 * SLOW)) ]
    report $? "$what: status${bad:- 143} after $(((t1 - t0) / 1000)) ms, not 143 within 5 s"
    last=$(sed -n 's/^step *\([0-9]*\).*/\1/p' "$dir/out" | tail -n 1)
    [ "${last:-0}" -lt $STEPS ] && [ "$(newest "$dir/stop")" = "${last:-none}" ] &&
        [ "$(grep -c "^stopped by SIGTERM; --resume $dir/stop continues the run" "$dir/out")" = 1 ]
    report $? "$what: the last step is ${last:-none}, the checkpoint of step $(newest "$dir/stop")"
    losses "$dir/stop.csv" >"$dir/both"
    try 0 '' ${args/--link-latency 2/} --resume "$dir/stop"
    grep -q "^resumed $dir/stop/step-$last " "$dir/out" && same_end "$dir/whole" "$dir/stop" $STEPS
    report $? "$what: resumed from step $last, the bits differ"
    cmp -s <(head -n "$(wc -l <"$dir/both")" <(losses "$dir/stop.csv")) "$dir/both" &&
        cmp -s <(losses "$dir/whole.csv") <(losses "$dir/stop.csv")
    report $? "$what: the rows of both runs differ from those of one run"
}

for ((i = 0; i < ${full:+20}${full:-1}; i++)); do
    term threads one
    term procs one
    term procs all
    term tcp one
done 2>/dev/null

rm -rf "$dir/stop"
begin --batch 8 --steps 9 --ranks 2 --link-latency 3000 --save "$dir/stop"
until_in 10 is_there "$dir/stop/lock"
sleep 0.2
kill -TERM $pid
sleep 0.3
! gone $pid
report $? "the first SIGTERM of two ends the run in the middle of a step"
kill -TERM $pid
now t0
ended_in 10 $pid
now t1
[ $status = 143 ] && [ $((t1 - t0)) -lt $((1000000 * SLOW)) ] && [ "$(newest "$dir/stop")" = 0 ] && ! grep -q stopped "$dir/out"
report $? "the second SIGTERM: status $status after $(((t1 - t0) / 1000)) ms"
begin --batch 8 --steps 9999 --ranks 2 --link-latency 5
until_in 10 stepped 1
kill -TERM $pid
ended_in 1 $pid && [ $status = 143 ]
report $? "SIGTERM without --save ends the run at once: status $status"

# ---- other ranks ----------------------------------------------------------------------------------------------------

tree="--batch 24 --micro-batch 1 --reduce tree --steps 8 --quiet"
for zero in 0 2; do
    rm -rf "$dir/eight" "$dir/many"
    try 0 '' $tree --ranks 8 --zero $zero --save "$dir/eight" --log-csv "$dir/eight.csv"
    rm -f "$dir/many.csv"
    more=
    for at in 8:2 6:4 4:6 8:8; do
        try 0 '' $tree --ranks ${at%:*} --zero $zero --stop-at ${at#*:} --save "$dir/many" $more \
            --log-csv "$dir/many.csv"
        more="--resume $dir/many"
    done
    same_end "$dir/eight" "$dir/many" 8
    report $? "--zero $zero: 8, 6, 4 and 8 ranks give other bits than 8"
    cmp -s <(losses "$dir/eight.csv" | cut -d, -f1-3) <(losses "$dir/many.csv" | cut -d, -f1-3)
    report $? "--zero $zero: 8, 6, 4 and 8 ranks give other losses than 8"
    rm -rf "$dir/many"
    DT_FAULT=kill:rank=1:seq=$((40 + RANDOM % 200)) try 0 '' $tree --ranks 8 --zero $zero --backend procs \
        --save "$dir/many" --save-every 1 --log-csv "$dir/many.csv" --max-restarts 2 --min-ranks 4
    how='^restart 1 of 2 with 6 ranks, after: rank 1 \(process [0-9]*\) was ended by signal 9 \(SIGKILL\)$'
    [ "$(grep -Ec "$how" "$dir/err")" = 1 ] && [ "$(grep -c '^restart' "$dir/err")" = 1 ]
    report $? "after one of 8 ranks is killed the run continues with 6: $(tail -n 1 "$dir/err")"
    same_end "$dir/eight" "$dir/many" 8 && cmp -s <(losses "$dir/eight.csv") <(losses "$dir/many.csv")
    report $? "--zero $zero: a run that continues with 6 of 8 ranks has other bits or losses"
done
DT_FAULT=kill:rank=1:seq=30 try 1 'rank 1 .*SIGKILL' $tree --ranks 4 --backend procs --save "$dir/none"
[ "$(cat "$dir/err" | wc -l)" = 1 ]
report $? "without --max-restarts the first failure ends the run"
rm -rf "$dir/none"
try 1 'finite|NaN|inf' --batch 4 --steps 50 --optimizer sgd --lr 1e3 --clip 0 --save "$dir/none" --max-restarts 3
! grep -q '^restart' "$dir/err"
report $? "a failure that would happen again causes no restart"

# ---- folders --------------------------------------------------------------------------------------------------------

small="--batch 4 --steps 6 --ranks 2 --quiet"
rm -rf "$dir/a" "$dir/b"
try 0 '' $small --save "$dir/a" --save-every 2
[ "$(cd "$dir/a" && echo *)" = "lock step-2 step-4 step-6" ]
report $? "--save-every 2 of 6 steps: $(cd "$dir/a" && echo *)"
for background in on off; do
    rm -rf "$dir/b"
    try 0 '' $small --save "$dir/b" --save-every 1 --keep 3 --save-background $background
    [ "$(cd "$dir/b" && echo *)" = "lock step-4 step-5 step-6" ]
    report $? "--keep 3, background $background: $(cd "$dir/b" && echo *)"
done
try 0 '' $small --steps 8 --save "$dir/b" --resume "$dir/b" --keep 1
[ "$(cd "$dir/b" && echo *)" = "lock step-8" ]
report $? "--keep 1 of a folder that had more: $(cd "$dir/b" && echo *)"
rm -rf "$dir/b"
try 0 '' $small --resume "$dir/a/step-4" --stop-at 4 --save "$dir/b"
[ "$(cd "$dir/b" && echo *)" = "lock step-4" ] && same_end "$dir/a" "$dir/b" 4
report $? "a run without steps left copies its checkpoint: $(cd "$dir/b" && echo *)"
try 0 '' $small --resume "$dir/b/" --stop-at 4 --save "$dir/b/"
[ "$(cd "$dir/b" && echo *)" = "lock step-4" ]
report $? "... but not into the folder that has it already: $(cd "$dir/b" && echo *)"
rm -rf "$dir/b"
try 0 '' $small --resume "$dir/a/step-4" --save "$dir/b" --log-csv "$dir/b.csv"
[ "$(cut -d, -f1 "$dir/b.csv" | tr '\n' ' ')" = "step 5 6 " ] && same_end "$dir/a" "$dir/b" 6
report $? "the csv of a resumed run has the steps $(cut -d, -f1 "$dir/b.csv" | tr '\n' ' ')"
try 0 '' $small --resume "$dir/a/step-4" --save "$dir/b2" --log-csv "$dir/b.csv"
[ "$(cut -d, -f1 "$dir/b.csv" | tr '\n' ' ')" = "step 5 6 " ]
report $? "the csv of another run is overwritten: $(cut -d, -f1 "$dir/b.csv" | tr '\n' ' ')"
try 0 '' $small --stop-at 2 --log-csv "$dir/b.csv"
try 0 '' $small --resume "$dir/a/step-4" --log-csv "$dir/b.csv"
[ "$(cut -d, -f1 "$dir/b.csv" | tr '\n' ' ')" = "step 5 6 " ]
report $? "a csv that ends before the step is overwritten: $(cut -d, -f1 "$dir/b.csv" | tr '\n' ' ')"

rm -rf "$dir/c"
begin --batch 4 --steps 99 --ranks 2 --link-latency 300 --save "$dir/c"
until_in 10 grep -qs process "$dir/c/lock"
first=$pid
cp "$dir/out" "$dir/out.first"
try 1 "$dir/c: process $first on .* saves there already" $small --save "$dir/c"
try 1 "process $first on .* saves there already" $small --save "$dir/c" --resume "$dir/a"
try 1 "process $first on .* saves there already" $small --save "$dir/c" --backend procs --max-restarts 1
! grep -q '^restart' "$dir/err"
report $? "a folder that another job holds causes a restart"
{ kill -9 $first; wait $first; } 2>/dev/null
try 0 '' $small --save "$dir/c"

try 2 "save $dir/a has step-6 already: continue from it with --resume $dir/a, or use another folder" $small --save "$dir/a"
try 2 "save $dir/a has step-6 already" $small --save "$dir/a" --resume "$dir/b"
try 2 "save $dir/a has step-6, which is newer than --resume $dir/a/step-4: use another folder, or remove it" \
    $small --save "$dir/a" --resume "$dir/a/step-4"
try 2 "save $dir/text: not a directory but a file" $small --save "$dir/text"
try 2 "resume $dir/nowhere: No such file" $small --resume "$dir/nowhere" --save "$dir/d"
try 2 "resume $dir/text: not a directory but a file" $small --resume "$dir/text"
try 2 "save $dir/no/such/ck: No such file" $small --save "$dir/no/such/ck"
mkdir "$dir/empty"
try 1 "resume $dir/empty: there is no checkpoint" $small --resume "$dir/empty"
[ ! -e "$dir/d" ]
report $? "a run that is refused has made a folder"
try 2 "save '': needs DIR" --save ''
try 2 "resume '': needs DIR" --resume ''
try 2 'save-every 2 needs --save DIR' --save-every 2
try 2 'keep 2 needs --save DIR' --keep 2
try 2 'save-background on needs --save DIR' --save-background on
try 2 'max-restarts 2 needs --save DIR' --max-restarts 2
try 2 'max-restarts 2 is for --backend threads and procs' --max-restarts 2 --save "$dir/d" --backend tcp --rank 0 \
    --ranks 1
try 2 'min-ranks 2 limits the ranks of a restart; use it with --max-restarts N' --ranks 2 --min-ranks 2 \
    --save "$dir/d"
try 2 'min-ranks 3 of --ranks 2; use --min-ranks 2 or less' --ranks 2 --min-ranks 3 --max-restarts 2 --save "$dir/d"

# ---- settings -------------------------------------------------------------------------------------------------------

for x in "layers 3" "width 32" "heads 4" "kv-heads 1 --arch llama" "ffn 32" "vocab 300" "tie off" "experts 2" \
    "seed 7" "optimizer adam" "arch llama --ffn 64"; do
    how="^error: --resume $dir/a: --(${x%% *}|arch) was .*, and is .* now: that would be a different training run"
    timeout $((20 * SLOW)) "$B/train_gpt" $(sed "s/--${x%% *} [^ ]*//" <<<"$tiny") $small --${x} --resume "$dir/a" \
        >"$dir/out" 2>"$dir/err"
    status=$?
    [ $status = 2 ] && [ "$(grep -c '^error' "$dir/err")" = 1 ] && grep -Eq -- "$how" "$dir/err"
    report $? "status $status: --resume with --$x is another training"
done
try 0 '' --batch 8 --steps 8 --ranks 2 --resume "$dir/a" --lr 1e-2 --clip 0.5 --warmup 2 --beta2 0.9 \
    --weight-decay 0.1 --zero 2 --reduce tree
for x in "batch was 4, and is 8" "steps was 6, and is 8" "lr was 0.001, and is 1e-2" "clip was 1, and is 0.5" \
    "warmup was 0, and is 2" "beta2 was 0.95, and is 0.9" "weight-decay was 0, and is 0.1" \
    "reduce was fixed, and is tree" "lr-steps was 6, and is 8"; do
    grep -q -- "^        --$x from here on$" "$dir/out"
    report $? "the run prints that --$x"
done
[ "$(grep -c 'from here on' "$dir/out")" = 9 ] && grep -q "^resumed $dir/a/step-6   step 6 of 8$" "$dir/out" &&
    grep -q '^step *7/8' "$dir/out"
report $? "the run prints all changed options: $(grep 'from here on' "$dir/out" | tr -s ' ' | tr '\n' ' ')"
try 2 "ema was 0, and is 0.9 now: the checkpoint has no EMA of the weights to continue; use --ema 0$" $small --ema 0.9 --resume "$dir/a"
rm -rf "$dir/b"
try 0 '' $small --ema 0.9 --stop-at 2 --save "$dir/b"
try 2 "ema was 0.9, and is 0 now: the checkpoint's EMA of the weights would be lost; use --ema 0.9$" $small --resume "$dir/b"
try 0 '' $small --ema 0.5 --resume "$dir/b"
rm -rf "$dir/b"
try 2 "^error: --resume $dir/a: --seq was 16, and is 8 now: a GPT-2 with 16 positions would lose some" $small --seq 8 \
    --resume "$dir/a"

# ---- going on with more data, longer sequences, another type, another order. With --lr 0 the model stays as it is, so
# the loss of a step is that of the step of an undisturbed run which reads the same sequences.
head -c 1000 README.md >"$dir/data"
still="--layers 1 --width 16 --heads 2 --batch 4 --lr 0 --data $dir/data"
goes() { # goes STEP "ARGS of the saved run" "ARGS of the resumed run" PATTERN...: step 5 has the loss (5 digits) of step STEP of a run with ARGS
    local step=$1 first=$2 then=$3 x
    shift 3
    rm -rf "$dir/g"
    timeout $((60 * SLOW)) "$B/train_gpt" $still $first --steps 4 --quiet --save "$dir/g" 2>"$dir/err"
    head -c 5000 README.md >"$dir/data"
    timeout $((60 * SLOW)) "$B/train_gpt" $still $then --steps 5 --resume "$dir/g" --log-csv "$dir/g.csv" >"$dir/out" 2>>"$dir/err" &&
        timeout $((60 * SLOW)) "$B/train_gpt" $still $then --steps 9 --quiet --log-csv "$dir/w.csv" 2>>"$dir/err"
    report $? "$then after $first runs"
    for x in "$@"; do
        grep -Eq -- "^        $x\$" "$dir/out"
        report $? "$then after $first prints: $x"
    done
    [ -n "$(grep '^5,' "$dir/g.csv")" ] && [ "$(grep '^5,' "$dir/g.csv" | cut -d, -f2 | cut -c1-7)" = "$(grep "^$step," "$dir/w.csv" | cut -d, -f2 | cut -c1-7)" ]
    report $? "$then after $first: another loss than that of the same sequences"
    head -c 1000 README.md >"$dir/data"
}
more="the data had 1000 tokens, and has 5000 from here on"
goes 5 "--seq 8" "--seq 8" "$more" 'the run continues at sequence 16 of 624 \(from 0\) in epoch 0'
goes 3 "--seq 8" "--seq 16" "$more" '--seq was 8, and is 16 from here on' 'the run continues at sequence 8 of 312 .*' \
    'positions 8 to 15 of wpe begin at random, their optimizer state at 0'
goes 3 "--seq 8 --arch llama" "--seq 16 --arch llama --ranks 2 --zero 3" 'the run continues at sequence 8 of 312 .*'
goes 5 "--seq 8" "--seq 8 --dtype f64" '--dtype was f32, and is f64 from here on' \
    "parameters are the nearest f64 of the checkpoint's parameters, as is optimizer state"
goes 5 "--seq 8 --dtype f64" "--seq 8 --dtype bf16" \
    "parameters are the nearest bf16 of .* parameters, .*; f32 master weights begin from the parameters"
goes 5 "--seq 8" "--seq 8 --shuffle on" '--shuffle was off, and is on from here on' \
    'the run continues at sequence 16 of 624 .*, in the new order: this epoch may read some sequences twice'

head -c 4000 README.md >"$dir/other"
timeout $((20 * SLOW)) "$B/train_gpt" ${tiny/$dir\/text/$dir/other} $small --resume "$dir/a" >"$dir/out" 2>"$dir/err"
[ $? = 1 ] && grep -q 'trained on data of 5000 tokens, but this data has 4000$' "$dir/err"
report $? "--resume refuses other data"
printf 'damage' | dd of="$dir/a/step-6/model.safetensors" bs=1 seek=3000 conv=notrunc 2>/dev/null
rm -rf "$dir/b"
try 0 '' $small --resume "$dir/a" --save "$dir/b"
how='step-6/model.safetensors: tensor .* is damaged: .*: the checkpoint before it counts'
same_end "$dir/b" "$dir/c" 6 && grep -q "$how" "$dir/err"
report $? "the newest checkpoint is damaged: the run resumes from the one before it, and says so"
try 1 'step-6/model.safetensors: tensor .* is damaged' $small --resume "$dir/a/step-6"

finish
