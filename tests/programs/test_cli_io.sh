#!/usr/bin/env bash
# test_cli_io.sh - train_gpt's input and output: closed descriptors, readers that stall or close, special files, unusual
# numbers and names
#
# A run that fails ends with status 1 and invalid input with status 2, after one line that says what failed and where. No
# run hangs, and no byte of a name, a file or a peer is printed as a terminal control character.
cd "$(dirname "$0")/../.." || exit 1
. tests/support/report.sh
limit=${LIMIT_S:-120} # seconds of one run; most take less than 1 s, those that wait for a reader take longer
needs_train_gpt
tiny="--layers 1 --width 16 --heads 2 --seq 16 --batch 4 --data $dir/text"
obeyed='[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]' # control bytes that terminals obey, for grep -P

newest() { # newest DIR: the step of the newest checkpoint, 0: none
    ls "$1" 2>/dev/null | sed -n 's/^step-\([0-9]*\)$/\1/p' | sort -n | tail -n 1 | grep . || echo 0
}

# ---- a reader of standard output that takes nothing -----------------------------------------------------------------

# These runs wait for half of their --timeout, so they start here and are checked last. This script has the FIFO open for
# reading and writing, so it has a reader that never reads. It is filled except for space for the settings and some steps.
stall() { # stall NAME ARGS...
    local name=$1
    shift
    mkfifo "$dir/$name.fifo"
    exec {held}<>"$dir/$name.fifo"
    head -c 57000 /dev/zero >&$held
    { timeout -k 5 $((limit * SLOW)) "$B/train_gpt" $tiny --ranks 2 --timeout 10 --steps 100000 "$@" >"$dir/$name.fifo" \
          2>"$dir/$name.err"
      echo $? >"$dir/$name.status"; } </dev/null &
    children+=($!)
}
stalled() { # stalled NAME TEXT
    local status
    status=$(cat "$dir/$1.status")
    cp "$dir/$1.err" "$dir/err"
    [ "$status" = 1 ] && only_error "$dir/err" "^error: rank 0: $2"
    report $? "$1: status $status, wanted 1 and '$2'"
}
no_reader='standard output: the reader has read nothing for half of --timeout'
stall threads
stall procs --backend procs
stall saved --save "$dir/stalled" --max-restarts 3
# A full pipe as standard error: a notice (the newest checkpoint is damaged) and a failure of a rank.
mkfifo "$dir/err.fifo"
exec 9<>"$dir/err.fifo"
"$B/train_gpt" $tiny --quiet --steps 6 --save "$dir/muted" --save-every 3 2>"$dir/err" ||
    report 1 "train_gpt saves a checkpoint"
truncate -s 100 "$dir/muted/step-6/model.safetensors"
head -c 65536 /dev/zero >&9
{ timeout -k 5 $((limit * SLOW)) "$B/train_gpt" $tiny --quiet --ranks 2 --timeout 10 --steps 8 --resume "$dir/muted" \
    --save "$dir/muted" >"$dir/mute.out" 2>"$dir/err.fifo"; echo $? >"$dir/mute.status"; } </dev/null &
children+=($!)
{ timeout -k 5 $((limit * SLOW)) "$B/train_gpt" $tiny --quiet --ranks 2 --timeout 10 --steps 100 --optimizer sgd --lr 1000 --clip 0 >"$dir/silent.out" \
    2>"$dir/err.fifo"; echo $? >"$dir/silent.status"; } </dev/null &
children+=($!)
mkfifo "$dir/log.fifo"
exec 8<>"$dir/log.fifo"
{ timeout -k 5 $((limit * SLOW)) "$B/train_gpt" $tiny --ranks 2 --timeout 10 --steps 100000 --quiet --log-csv "$dir/log.fifo" \
    >"$dir/log.out" 2>"$dir/log.err"; echo $? >"$dir/log.status"; } </dev/null &
children+=($!)

# ---- closed descriptors ---------------------------------------------------------------------------------------------

try 0 '' $tiny --steps 4 --ranks 2 --save "$dir/good" --log-csv "$dir/good.csv" --save-model "$dir/good.bin" \
    --generate 99
for closed in "<&-" ">&-" "2>&-" "<&- >&-" ">&- 2>&-" "<&- >&- 2>&-"; do
    for backend in threads procs; do
        rm -rf "$dir/shut" "$dir/shut.csv" "$dir/shut.bin"
        eval 'timeout -k 5 $((limit * SLOW)) "$B/train_gpt" $tiny --steps 4 --ranks 2 --backend $backend --save "$dir/shut" \
            --save-every 1 --log-csv "$dir/shut.csv" --save-model "$dir/shut.bin" --generate 99 \
            </dev/null >"$dir/out" 2>"$dir/err" '"$closed"
        status=$?
        [ $status = 0 ] && cmp "$dir/good.bin" "$dir/shut.bin" 2>"$dir/err" &&
            cmp "$dir/good/step-4/model.safetensors" "$dir/shut/step-4/model.safetensors" 2>"$dir/err" &&
            cmp "$dir/good/step-4/optim.safetensors" "$dir/shut/step-4/optim.safetensors" 2>"$dir/err" &&
            cmp <(cut -d, -f1-4 "$dir/good.csv") <(cut -d, -f1-4 "$dir/shut.csv") 2>"$dir/err"
        report $? "$backend with $closed: status $status, wanted 0 and the files of a run with all descriptors"
    done
done

# ---- standard output that is full or closed ------------------------------------------------------------------------

if [ -c /dev/full ]; then
    for x in --help --list-refused --print-config "$tiny --steps 2" "$tiny --dry-run" \
        "$tiny --steps 2 --quiet --generate 9"; do
        timeout -k 5 $((limit * SLOW)) "$B/train_gpt" $x >/dev/full 2>"$dir/err" </dev/null
        status=$?
        [ $status = 1 ] && only_error "$dir/err" '^error: rank 0: standard output: No space left on device$'
        report $? "status $status: $x into a full device"
    done
else
    skipped=$((skipped + 1))
    echo "SKIP test_cli_io: there is no /dev/full: what is printed on a full disk"
fi
for backend in threads procs; do
    for save in "" "--save $dir/head.$backend" \
        "--save $dir/behind.$backend --save-background on --save-every 1 --keep 2"; do
        timeout -k 5 $((limit * SLOW)) "$B/train_gpt" $tiny --ranks 2 --steps 100000 --backend $backend $save \
            2>"$dir/err" </dev/null |
            grep -m 1 '^step' >"$dir/out"
        status=${PIPESTATUS[0]}
        folder=$(cut -d' ' -f2 <<<"$save")
        [ "$status" = 1 ] &&
            only_error "$dir/err" "^error: rank 0: standard output: Broken pipe${folder:+; --resume $folder continues the run}$"
        report $? "status $status: train_gpt $save --backend $backend | grep -m 1 '^step'"
        [ -n "$folder" ] || continue
        at=$(newest "$folder")
        [ "$at" -gt 0 ] && ! compgen -G "$folder/*.tmp" >/dev/null
        report $? "... $save has saved its last step: $(echo "$folder"/*)"
        try 0 '' $tiny --ranks 2 --steps 100000 --resume "$folder" --stop-at "$((at + 1))"
        grep -q "^resumed $folder/step-$at " "$dir/out"
        report $? "... and resumes from step $at"
    done
done

# ---- a limit of the size of files -----------------------------------------------------------------------------------

small() { # small KIB ARGS...: as try
    local kib=$1 want=$2 pattern=$3 status
    shift 3
    (ulimit -f "$kib"; timeout -k 5 $((limit * SLOW)) "$B/train_gpt" "$@" >"$dir/out" 2>"$dir/err" </dev/null)
    status=$?
    [ $status = "$want" ] && only_error "$dir/err" "$pattern"
    report $? "status $status, wanted $want and '$pattern': ulimit -f $kib; train_gpt $*"
}
large='File too large'
small 4 1 "^error: rank 0: --log-csv $dir/limit.csv: $large$" $tiny --steps 200 --quiet --log-csv "$dir/limit.csv"
small 4 1 "^error: rank 0: standard output: $large$" $tiny --steps 200
small 1 1 "^error: rank [0-9]*: dt_zero_export: $dir/limit.bin.*$large" $tiny --quiet --steps 1 \
    --save-model "$dir/limit.bin"
small 8 1 "^error: rank [0-9]*: dt_checkpoint_save: $dir/limit/.*$large" $tiny --quiet --steps 1 --save "$dir/limit"

# ---- a log that is not a regular file -------------------------------------------------------------------------------

rows() { cut -d, -f1 | tr '\n' ' '; }
one="$tiny --ranks 2 --steps 6"
try 0 '' $one --save "$dir/log" --log-csv "$dir/one.csv" --stop-at 3
try 0 '' $one --resume "$dir/log" --log-csv /dev/null
timeout -k 5 $((limit * SLOW)) "$B/train_gpt" $one --resume "$dir/log" --quiet --log-csv /dev/stdout 2>"$dir/err" </dev/null |
    rows >"$dir/out"
[ "$(cat "$dir/out")" = "step 4 5 6 " ]
report $? "a resumed log on a pipe: $(cat "$dir/out")"
echo mine >"$dir/mine"
timeout -k 5 $((limit * SLOW)) "$B/train_gpt" $one --resume "$dir/log" --quiet --log-csv /dev/stdout >>"$dir/mine" \
    2>"$dir/err" </dev/null
[ "$(rows <"$dir/mine")" = "mine step 4 5 6 " ]
report $? "a log on standard output is appended to the file that standard output is: $(rows <"$dir/mine")"
timeout -k 5 $((limit * SLOW)) "$B/train_gpt" $one --log-csv "$dir/both" >"$dir/both" 2>"$dir/err" </dev/null
[ "$(grep -c '^step *[0-9]/6 ' "$dir/both")" = 6 ] && [ "$(grep -c '^[1-6],' "$dir/both")" = 6 ] &&
    grep -q '^log ' "$dir/both"
report $? "a log in the file of standard output: neither overwrites the other"
for backend in threads procs; do
    rm -rf "$dir/again"
    DT_FAULT=exit:rank=1:seq=60 timeout -k 5 $((limit * SLOW)) "$B/train_gpt" $one --backend $backend --save "$dir/again" \
        --save-every 2 --max-restarts 2 --quiet --log-csv /dev/stdout 2>"$dir/err" </dev/null | rows >"$dir/out"
    [ $backend = threads ] || grep -q '^restart 1 of 2' "$dir/err"
    [ $? = 0 ] && grep -Eq '^step 1 .*6 $' "$dir/out" && [ "$(grep -o step "$dir/out" | wc -l)" = 1 ]
    report $? "$backend with a restart, and a log on a pipe: $(cat "$dir/out")"
done
mkfifo "$dir/fifo"
try 2 "log-csv $dir/fifo: a FIFO without a reader" $one --log-csv "$dir/fifo"
exec 9<>"$dir/fifo" # a reader, until it is closed
try 0 '' $one --log-csv "$dir/fifo"
timeout -k 5 $((limit * SLOW)) head -n 7 <&9 >"$dir/rows"
exec 9<&-
[ "$(rows <"$dir/rows")" = "step 1 2 3 4 5 6 " ]
report $? "a log into a FIFO with a reader: $(rows <"$dir/rows")"
timeout -k 5 $((limit * SLOW)) "$B/train_gpt" $tiny --steps 100000 --quiet --log-csv /dev/fd/7 7> >(head -n 2 >/dev/null) \
    2>"$dir/err" </dev/null
status=$?
[ $status = 1 ] && only_error "$dir/err" '^error: rank 0: --log-csv /dev/fd/7: Broken pipe$'
report $? "status $status: a log whose reader closes the pipe"

# ---- files of other kinds -------------------------------------------------------------------------------------------

mkdir "$dir/folder" "$dir/model" "$dir/data" "$dir/resume"
mkfifo "$dir/model/model.safetensors" "$dir/resume/manifest.json"
cp "$dir/text" "$dir/data"
kinds="fifo:FIFO folder:directory"
[ -c /dev/zero ] && ln -s /dev/zero "$dir/zero" && kinds="$kinds zero:character.device"
if command -v python3 >/dev/null && python3 -c 'import socket,sys
socket.socket(socket.AF_UNIX).bind(sys.argv[1])' "$dir/sock" 2>/dev/null; then kinds="$kinds sock:socket"
else skipped=$((skipped + 1)); echo "SKIP test_cli_io: no python3 that makes a socket: sockets as files"; fi
is_folder=" model data val resume save save-model offload-optim offload-params "
for kind in $kinds text:file; do
    path=$dir/${kind%:*} name=${kind#*:}
    for option in model config data val resume save save-model trace schedule-svg offload-optim log-csv token-file; do
        more="$tiny --steps 1 --pp 2 --zero 1"
        case "$name $option" in
        "character.device log-csv" | "FIFO log-csv") continue ;; # a terminal, /dev/null, and above
        "directory "*) [[ $is_folder != *" $option "* ]] || continue ;;
        "file "*) [[ " resume save save-model offload-optim " == *" $option "* ]] || continue ;;
        esac
        [ $option != data ] || more="--steps 1"
        [ $option != token-file ] || more="$tiny --backend tcp --ranks 1 --rank 0"
        try 2 "--$option:? $path: .*a $name" $more --$option "$path"
    done
done
try 2 "trace $dir/fifo: not a file but a FIFO" $tiny --trace "$dir/fifo"
try 2 "model.safetensors: " $tiny --model "$dir/model"
try 1 "manifest.json" $tiny --resume "$dir/resume"
[ -p "$dir/fifo" ] && [ -d "$dir/folder" ] && cmp -s "$dir/text" "$dir/data/text"
report $? "refused files are unchanged"

# ---- numbers --------------------------------------------------------------------------------------------------------

for x in 0x10 ' 1' '1 ' +4 -4 4.0 1e1 1e0 inf nan 1,0 $'4\n' ٤ 99999999999999999999; do
    try 2 '^error: --steps .*: not a whole number from 0' --print-config --steps "$x"
    try 2 '^error: --batch-ramp .*START:INCR:SAMPLES' --print-config --batch-ramp "$x:4:40"
    try 2 '^error: --batch-ramp .*START:INCR:SAMPLES' --print-config --batch-ramp "4:$x:40"
    try 2 '^error: --batch-ramp .*START:INCR:SAMPLES' --print-config --batch-ramp "4:4:$x"
    try 2 '^error: --experts .*whole number' --print-config --experts "$x"
    try 2 '^error: --recompute .*use --recompute full:' --print-config --recompute "full:$x"
    try 2 '^error: --partition ' --print-config --pp 2 --partition "3,$x"
    try 2 '^error: --partition ' --print-config --pp 2 --partition "$x,3"
done
for x in 0x1p-3 ' 1' '1 ' +.5 -.5 . e1 1e 1e+ 1.2.3 inf infinity nan 1e999 1e-999 0x.8 1f; do
    try 2 '^error: --lr .*: not a number from 0 to 1000' --print-config --lr "$x"
    try 2 '^error: --capacity ' --print-config --experts 2 --capacity "$x"
    try 2 '^error: --loss-scale ' --print-config --loss-scale "$x"
done
for x in 0x10M ' 1M' +1M 1.5G 1e3K 1KK 1k '1M '; do
    try 2 '^error: --mem-limit .*: not a whole number' --print-config --mem-limit "$x"
done
for x in 1 1. .5 0.5 1e-3 1E+2 0 007 5e-324; do try 0 '' --print-config --lr "$x"; done
for x in '"capacity": " 1.5", "experts": 2' '"experts": "0x4"' '"mem-limit": " 64M"' '"partition": "3, 5", "pp": 2' \
    '"batch-ramp": "4:4:0x9"'; do
    printf '{ %s }' "$x" >"$dir/config.json"
    try 2 "^error: ($dir/config.json:1:[0-9]*: .*)?--(capacity|experts|mem-limit|partition|batch-ramp) " \
        --config "$dir/config.json" --print-config
done
for x in 0x0 ' 0' +0 0.0; do
    DT_RANK=$x DT_WORLD_SIZE=1 try 2 'DT_RANK' $tiny
    DT_RANK=0 DT_WORLD_SIZE=${x/0/1} try 2 'DT_WORLD_SIZE' $tiny
done
for x in 4:1000000000000:100 1:1000000000000000:1 15:2:1000000000000000 1000000000000000:1:1; do
    try 2 '^error: --batch-ramp' $tiny --batch 16 --batch-ramp "$x"
done
try 0 '' $tiny --batch 8 --batch-ramp 1:1:1000000000000 --steps 1000000000000 --stop-at 2
try 0 '' $tiny --batch 8 --batch-ramp 1:1:7 --steps 1000000000000 --stop-at 1000000000000 --print-config

# ---- names that are not UTF-8 ---------------------------------------------------------------------------------------

byte=$dir/$'n\xe9\xff"\\\t\x9bx' # no UTF-8
mkdir "$byte"
cp "$dir/text" "$byte/text"
named=(--layers 1 --width 16 --heads 2 --seq 16 --batch 4 --ranks 2 --steps 4 --data "$byte/text" --val "$byte/text"
    --save "$byte/save" --log-csv "$byte/log.csv" --trace "$byte/trace.json" --offload-optim "$byte" --zero 1)
try 0 '' "${named[@]}" --stop-at 2 --save-model "$byte"
try 0 '' "${named[@]}" --resume "$byte/save"
[ "$(newest "$byte/save")" = 4 ] && [ "$(rows <"$byte/log.csv")" = "step 1 2 3 4 " ] && [ -s "$byte/trace.json" ]
report $? "a path that is not UTF-8: saved, and resumed from step 2"
"$B/train_gpt" "${named[@]}" --print-config >"$byte/config.json" 2>"$dir/err" &&
    "$B/train_gpt" --config "$byte/config.json" --print-config >"$dir/out" 2>>"$dir/err" &&
    cmp -s "$byte/config.json" "$dir/out" &&
    iconv -f utf-8 -t utf-8 "$dir/out" >/dev/null 2>"$dir/err" && ! LC_ALL=C grep -aqP "$obeyed" "$dir/out"
report $? "--config of its --print-config prints the same: $(grep -a '"save"' "$byte/config.json" | cat -v)"
rm -rf "$byte/save"
try 0 '' --config "$byte/config.json" --stop-at 1
[ "$(newest "$byte/save")" = 1 ]
report $? "--config of its --print-config uses the same folder"
try 0 '' --data "$dir/text" --vocab 256 --seq 12 --model "$byte/save/step-1" --steps 1

# ---- text with terminal control characters --------------------------------------------------------------------------

quiet_terminal() { # quiet_terminal TEXT: neither output has bytes that a terminal obeys; standard error is one line
    ! LC_ALL=C grep -aqP "$obeyed" "$dir/out" "$dir/err" && [ "$(grep -ac '' "$dir/err")" -le 1 ] &&
        iconv -f utf-8 -t utf-8 "$dir/out" "$dir/err" >/dev/null
    report $? "bytes that a terminal obeys: $1: $(cat -v "$dir/err" | head -n 2)"
}
evil=$'a\e[2Jb\rc\nerror: no\x7f\x9b31m\xc2\x9b5me\xcc\x81\u6f22\U1f600z\xff'
shown='a\\x1b\[2Jb\\x0dc\\x0aerror: no\\x7f\\x9b31m\\xc2\\x9b5m'$'e\xcc\x81\u6f22\U1f600''z\\xff'
cp "$dir/text" "$dir/$evil"
for option in data val model config resume token-file log-csv trace offload-optim partition batch-ramp recompute arch \
    steps mem-limit $'\e[2J'; do
    more=
    [ "$option" != token-file ] || more="--backend tcp --ranks 1 --rank 0"
    [[ " log-csv trace " != *" $option "* ]] || more=$tiny
    [ "$option" != partition ] || more="--pp 2"
    [ "$option" != data ] || more="--seq 16"
    try 2 '' $more --$option "no/$evil"
    [[ $option = $'\e'* ]] || grep -aEq "no/$shown" "$dir/err"
    report $? "control characters in --$option are printed as escapes"
    quiet_terminal "--$option"
done
try 0 '' $tiny --steps 2 --val "$dir/$evil" --log-csv "$dir/$evil.csv" --save "$dir/$evil.save" \
    --trace "$dir/$evil.json"
grep -aEq "^log     $dir/$shown.csv$" "$dir/out" && grep -aEq "^saved   $dir/$shown.save/step-2" "$dir/out"
report $? "the lines of a run print such names with escapes"
quiet_terminal "the lines of a run"
head -c 4000 "$dir/text" >"$dir/other"
try 1 "^error: rank 0: $dir/$shown.save/step-2: trained on data of" ${tiny/$dir\/text/$dir/other} --steps 9 \
    --resume "$dir/$evil.save"
quiet_terminal "a run that fails"
printf '{ "k\\u001b[2J\\r\\u009b": 1 }' >"$dir/config.json"
try 2 'k\\x1b\[2J\\x0d\\xc2\\x9b: unknown key' --config "$dir/config.json"
quiet_terminal "a key of a file"
try 0 '' $tiny --steps 2 --generate 4000 --quiet --save-model "$dir/generated.bin"
[ "$(stat -c %s "$dir/out")" = 4000 ]
report $? "a file receives the bytes of --generate: $(stat -c %s "$dir/out")"
LC_ALL=C grep -aqP "$obeyed" "$dir/out"
report $? "the generated bytes have terminal control characters"
if command -v script >/dev/null && script -qec true "$dir/typed" >/dev/null 2>&1 </dev/null; then
    script -qec "$B/train_gpt $tiny --steps 2 --generate 4000 --quiet" "$dir/typed" >/dev/null 2>"$dir/err" </dev/null
    sed -e '1{/^Script started/d}' -e '/^Script done/d' "$dir/typed" | tr -d '\r' >"$dir/out"
    : >"$dir/err"
    quiet_terminal "--generate on a terminal"
    [ "$(stat -c %s "$dir/out")" -gt 6000 ] && grep -q '\\x1b' "$dir/out"
    report $? "--generate on a terminal prints escapes: $(stat -c %s "$dir/out") bytes"
else
    skipped=$((skipped + 1))
    echo "SKIP test_cli_io: script is not installed or has no terminal: --generate on a terminal"
fi

# ---- checkpoints that were moved, and links that lead nowhere --------------------------------------------------------

try 0 '' $tiny --steps 6 --save "$dir/away" --save-every 2
mkdir "$dir/archive" && mv "$dir/away/step-6" "$dir/archive/"
ln -s ../nowhere/step-6 "$dir/away/step-6"
try 1 'away/step-6: it is a symbolic link .* leads nowhere: no older checkpoint is taken' $tiny --steps 8 \
    --save "$dir/away" --resume "$dir/away" --keep 1
[ -L "$dir/away/step-6" ] && [ -f "$dir/away/step-4/manifest.json" ]
report $? "a link to a missing folder stays, and so does the checkpoint before it"
ln -sfn ../archive/step-6 "$dir/away/step-6"
mv "$dir/archive/step-6/optim.safetensors" "$dir/archive/"
ln -s "$dir/nowhere" "$dir/archive/step-6/optim.safetensors"
try 1 'optim.safetensors: it is a symbolic link .* leads nowhere' $tiny --steps 8 --save "$dir/away" \
    --resume "$dir/away" --keep 1
mv "$dir/archive/optim.safetensors" "$dir/archive/step-6/optim.safetensors"
try 0 '' $tiny --steps 8 --save "$dir/away" --resume "$dir/away" --keep 1
[ "$(newest "$dir/away")" = 8 ] && [ ! -e "$dir/away/step-6" ] && [ -f "$dir/archive/step-6/manifest.json" ]
report $? "--keep 1 removes the link, not the folder that it points to"

# ---- a log file with other contents ---------------------------------------------------------------------------------

echo 'my own text' >"$dir/own.txt"
try 2 'log-csv .*own.txt: not a log with the columns' $tiny --steps 9 --resume "$dir/away" \
    --log-csv "$dir/own.txt"
[ "$(cat "$dir/own.txt")" = 'my own text' ]
report $? "--resume does not change a file that is not a log"

# ---- the readers that never read ------------------------------------------------------------------------------------

for pid in "${children[@]}"; do wait "$pid" 2>/dev/null; done
children=()
[ "$(cat "$dir/mute.status")" = 0 ] && [ "$(newest "$dir/muted")" = 8 ]
report $? "a run with a notice is not stopped by a reader of standard error that never reads"
[ "$(cat "$dir/silent.status")" = 1 ]
report $? "a run that fails ends although the reader of standard error never reads: status $(cat "$dir/silent.status")"
stalled threads "$no_reader$"
stalled procs "$no_reader$"
stalled saved "$no_reader; --resume $dir/stalled continues the run$"
at=$(newest "$dir/stalled")
[ "$at" -gt 0 ]
report $? "a run whose reader never reads saves its last step"
try 0 '' $tiny --ranks 2 --steps 100000 --resume "$dir/stalled" --stop-at "$((at + 1))"
stalled log "--log-csv $dir/log.fifo: the reader has read nothing for half of --timeout$"

finish
