#!/usr/bin/env bash
# test_ctr.sh - train_ctr: its command line, bad lines, layouts, snapshots, restarts, predictions, and what its models learn
cd "$(dirname "$0")/../.." || exit 1
. tests/support/report.sh
for p in train_ctr 20_click_model; do
    $MAKE -s "$B/$p" 2>"$dir/err" || { report 1 "$p does not build"; finish; }
done

run() { # run ARGS...: 0 if train_ctr ends with status 0; its output is in out and err
    timeout -k 5 $((60 * SLOW)) "$B/train_ctr" "$@" >"$dir/out" 2>"$dir/err" </dev/null
}
try() { # try STATUS PATTERN ARGS...: train_ctr must end with STATUS and one error line that matches PATTERN
    local want=$1 pattern=$2
    shift 2
    run "$@"
    [ $? = "$want" ] && { [ "$want" = 0 ] || only_error "$dir/err" "$pattern"; }
    report $? "status $want and '$pattern': train_ctr $(printf '%q ' "$@")"
}
column() { # column NAME CSV: the values of a column
    awk -F, -v name="$1" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == name) c = i } NR > 1 { print $c }' "$2"
}
close_to() { # close_to A B LIMIT: 0 if A and B, columns of numbers, differ by at most LIMIT, and there are numbers
    paste <(echo "$1") <(echo "$2") | awk -v limit="$3" '
        NF != 2 || !($1 + 0 == $1) { bad = 1 } { d = $1 - $2; if (d < 0) d = -d; if (!(d <= limit)) bad = 1; n++ }
        END { exit bad || !n }'
}

data=$dir/data.txt eval=$dir/eval.txt
"$B/20_click_model" write 6000 >"$data"
"$B/20_click_model" write 3000 1000000 >"$eval"
common=(--data "$data" --batch 96 --width 4 --hidden 8 --log-every 7)

# ---- the command line
try 2 'nearest is --data' --dat x
try 2 'unknown option --xyzzy-quux' --xyzzy-quux 1
try 2 "'text' is not an option" text
try 2 'data is missing' --model lr
try 2 'needs a value' --data
try 2 "rule x: the legal values are adagrad" --data "$data" --rule x
try 2 'width 0: not a whole number' --data "$data" --width 0
try 2 'lr nan' --data "$data" --lr nan
try 2 'lr inf' --data "$data" --lr inf
try 2 'hidden 8,,4' --data "$data" --hidden 8,,4
try 2 "hidden '': needs N" --data "$data" --hidden ""
for mode in ssp ssp:-1 ssp:1x geo: geo:0 geo:1e3 ssp:10000000000; do
    try 2 "mode $mode: " --data "$data" --mode $mode --ranks 2 --servers 1
done
try 2 'mode async needs --servers' --data "$data" --mode async
try 2 'servers 2 of --ranks 2: .* use --ranks 3' --data "$data" --ranks 2 --servers 2
try 2 'batch 512 does not divide evenly over 3 workers: use --batch 513' --data "$data" --ranks 3
try 2 'servers 3 of --ranks 2: .* use --ranks 4' --data "$data" --ranks 2 --servers 3
try 2 'rule ftrl with --mode geo' --data "$data" --mode geo:4 --ranks 2 --servers 1 --rule ftrl
try 2 'mode geo:4 keeps .* --epochs 0' --data "$data" --mode geo:4 --ranks 2 --servers 1 --save "$dir/geo" --max-restarts 1
try 2 'No such file' --data "$dir/none"
try 2 'none.here: No such file' --data "$dir/none
here"
try 2 'it was given before' --data "$data" --data "$data"
try 2 'is the file of --data' --data "$data" --log-csv "$data"
try 2 'log-csv .*: Is a directory' --data "$data" --log-csv "$dir"
try 2 'save .*: not a directory' --data "$data" --save "$data"
try 2 'resume .*: not a directory' --data "$data" --resume "$data"
try 2 'max-restarts 1 needs --save DIR' --data "$data" --max-restarts 1
try 2 'max-restarts 1 with --data -' --data - --max-restarts 1 --save "$dir/none"
try 2 'max-restarts 1 is for --backend threads and procs' --data "$data" --max-restarts 1 --save "$dir/none" --backend tcp \
    --rank 0 --ranks 2
[ "$(wc -l <"$data")" = 6000 ]
report $? "a run that is refused leaves the data as it is"
try 2 'read once' --data - --ranks 2
: >"$dir/empty"
try 2 'the file is empty' --data "$dir/empty"
mkdir -p "$dir/folder/below"
cp "$data" "$dir/folder/below"
try 1 'the folder has no files' --data "$dir/folder"
try 1 'there is no snapshot' "${common[@]}" --resume "$dir/folder"
try 1 'data /dev/null has no lines' --data /dev/null
try 1 'rank [0-9]*: /dev/null has no lines' --data "$data" --model lr --batch 96 --eval /dev/null
run --help && grep -q -- '--skip-bad' "$dir/out"
report $? "--help"

# ---- bad lines: each is named with file, line and column; with --skip-bad they are counted
bad() { # bad NAME PATTERN AWK: changes line 130 of the data by an awk program
    awk -F'\t' -v OFS='\t' "NR == 130 { $3 } { print }" "$data" >"$dir/bad.txt"
    try 1 "bad.txt:130: column $2" --data "$dir/bad.txt" --batch 96 --model lr
    run --data "$dir/bad.txt" --batch 96 --model lr --skip-bad && grep -q 'bad.txt: 1 bad line skipped' "$dir/err" &&
        grep -q 'samples 5999 ' "$dir/out"
    report $? "--skip-bad with $1"
}
bad 'a missing field' "39 .*is the last field" '$40 = ""; NF = 39'
bad 'an extra field' "41 .*too many" '$41 = "x"'
bad 'a long field' "17 .*more than 255 bytes" '$17 = sprintf("%0300d", 1)'
bad 'a bad number' "5 \(number\): '1x' is not a number" '$5 = "1x"'
bad 'an infinite number' "5 \(number\).*is not a number" '$5 = "1e999"'
bad 'a bad label' "1 \(label\): '2' is not 0 or 1" '$1 = 2'
bad 'an empty line' "1 .*is the last field" '$0 = ""'
awk -F'\t' -v OFS='\t' '{ $2 = NR % 3 ? "-12" : "1.5e2"; if (NR % 5) $9 = "" } { print $0 "\r" }' "$data" >"$dir/forms.txt"
try 0 '' --data "$dir/forms.txt" --batch 96 --model lr
cut -f 1-5 "$data" >"$dir/none.txt"
for ranks in 1 2; do
    try 1 'none.txt has no good lines' --data "$dir/none.txt" --batch 96 --model lr --skip-bad --ranks $ranks
    try 1 'none.txt has no good lines' --data "$data" --batch 96 --model lr --skip-bad --ranks $ranks --eval "$dir/none.txt"
done
# lines that end in CR LF, a last line without an end, and lines of 3 MB between the others: the same samples
whole=$(run --data "$data" --batch 96 --model lr --log-csv "$dir/log.csv" && column logloss "$dir/log.csv")
sed 's/$/\r/' "$data" >"$dir/same_crlf"
head -c -1 "$data" >"$dir/same_end"
head -c 3000000 /dev/zero | tr '\0' 'x' >"$dir/huge"
{ head -n 576 "$data"; cat "$dir/huge"; echo; tail -n +577 "$data"; cat "$dir/huge"; } >"$dir/same_huge" # 576: 6 batches
for name in crlf end; do
    run --data "$dir/same_$name" --batch 96 --model lr --log-csv "$dir/log.csv" && [ "$(column logloss "$dir/log.csv")" = "$whole" ]
    report $? "the losses of $name"
done
run --data "$dir/same_huge" --batch 96 --model lr --skip-bad --log-csv "$dir/log.csv" &&
    grep -q 'same_huge: 2 bad lines skipped' "$dir/err" && [ "$(column samples "$dir/log.csv" | tail -n 1)" = 6000 ]
report $? "lines of 3 MB are skipped"

# ---- layouts: with sync, losses have the same bits for any number of servers, and the same digits for any number of
# workers, whose gradients are summed in another order
for model in lr fm wide-deep deepfm; do
    for workers in 1 2 4; do
        for servers in 0 1 2; do
            backend=threads
            [ $workers$servers != 22 ] || backend=procs
            run "${common[@]}" --eval "$eval" --model $model --ranks $((workers + servers)) --servers $servers \
                --backend $backend --log-csv "$dir/$workers.$servers.csv"
            report $? "$model, $workers workers, $servers servers, $backend"
            [ "$(column logloss "$dir/$workers.$servers.csv")" = "$(column logloss "$dir/$workers.0.csv")" ] &&
                [ "$(column eval_logloss "$dir/$workers.$servers.csv")" = "$(column eval_logloss "$dir/$workers.0.csv")" ]
            report $? "$model, $workers workers: the losses with $servers servers are not those of owned mode"
        done
        close_to "$(column logloss "$dir/1.0.csv")" "$(column logloss "$dir/$workers.0.csv")" 1e-4
        report $? "$model: the losses of $workers workers are not those of one"
    done
done
[ "$(column step "$dir/1.0.csv" | tail -n 1)" = 63 ] && [ "$(column samples "$dir/1.0.csv" | tail -n 1)" = 6000 ]
report $? "6,000 samples are 62 steps of 96 and one of 48"

# ---- the columns keys and bytes: distinct keys of each worker's step, counted by awk, and two dense parameters. A row goes
# to a worker and a gradient comes back, both with their key: 2 (8 + 4 width) bytes, and less than 1 % of headers
counts() { # counts WORKERS TABLES NUMBERS: keys and bytes of the data; NUMBERS of a row of all sparse tables
    awk -F'\t' -v part=$((96 / $1)) -v workers="$1" -v tables="$2" -v numbers="$3" '
        function flush() { keys += tables * n; bytes += n * 2 * (8 * tables + 4 * numbers); n = 0; delete seen }
        (NR - 1) % part == 0 { flush(); pushes++ }
        { for (c = 15; c <= 40; c++) if (!((c, $c) in seen)) { seen[c, $c] = 1; n++ } }
        END { flush(); pulls = workers * int((NR + 95) / 96)
              print keys + 2 * pulls, bytes + (pulls + pushes) * (2 * 8 + 4 * 14) }' "$data"
}
for workers in 1 3; do
    for model in "lr 1 1" "fm 2 5"; do
        read -r keys bytes <<<"$(counts $workers ${model#* })"
        for servers in 0 1 2; do
            run "${common[@]}" --model ${model%% *} --ranks $((workers + servers)) --servers $servers --log-csv "$dir/log.csv"
            [ "$(column keys "$dir/log.csv" | tail -n 1)" = "$keys" ] &&
                awk -v a="$(column bytes "$dir/log.csv" | tail -n 1)" -v b="$bytes" 'BEGIN { exit !(a >= b && a < 1.01 * b) }'
            report $? "${model%% *}, $workers workers, $servers servers: $keys keys and $bytes bytes, not $(tail -n 1 "$dir/log.csv")"
        done
    done
done

# ---- a folder and standard input are the same data as one file
mkdir "$dir/parts"
head -n 2500 "$data" >"$dir/parts/a" && tail -n +2501 "$data" >"$dir/parts/b"
run "${common[@]}" --model fm --log-csv "$dir/file.csv"
run --data "$dir/parts" --batch 96 --width 4 --log-every 7 --model fm --log-csv "$dir/parts.csv"
"$B/train_ctr" --data - --batch 96 --width 4 --log-every 7 --model fm --log-csv "$dir/stdin.csv" <"$data" >"$dir/out" 2>"$dir/err"
for x in parts stdin; do
    [ "$(column logloss "$dir/file.csv")" = "$(column logloss "$dir/$x.csv")" ] && [ -s "$dir/$x.csv" ]
    report $? "$x: the losses of one file"
done

# ---- a resumed run has the bits of an undisturbed one, with other servers too
two=(--epochs 2 --model deepfm --eval "$eval")
run "${common[@]}" "${two[@]}" --ranks 3 --servers 1 --log-csv "$dir/whole.csv"
report $? "the undisturbed run"
run "${common[@]}" "${two[@]}" --ranks 3 --servers 1 --stop-at 70 --save "$dir/saved" --save-every 30
report $? "the first part of a run"
for servers in 1 2; do
    run "${common[@]}" "${two[@]}" --ranks $((2 + servers)) --servers $servers --resume "$dir/saved" \
        --log-csv "$dir/resumed.csv"
    report $? "--resume with $servers servers"
    [ "$(column logloss "$dir/whole.csv" | tail -n 5)" = "$(column logloss "$dir/resumed.csv" | tail -n 5)" ] &&
        [ "$(column eval_logloss "$dir/whole.csv" | tail -n 1)" = "$(column eval_logloss "$dir/resumed.csv" | tail -n 1)" ]
    report $? "--resume with $servers servers: the losses of the undisturbed run"
done
# what a snapshot fixes: another value is refused, and without a value the snapshot's is taken
for option in "width 5" "hidden 9" "batch 48" "rule adam" "seed 2" "model fm"; do
    try 2 "--$option: the snapshots of --resume .* have --${option% *} [a-z0-9-]*$" "${common[@]}" --model deepfm --resume "$dir/saved" \
        --ranks 2 --${option}
done
try 1 'stop-at 50 is before step 70' "${common[@]}" "${two[@]}" --resume "$dir/saved" --ranks 2 --stop-at 50
try 1 'data .* ends at step 63, before the snapshot.s step 70' "${common[@]}" --model deepfm --resume "$dir/saved" --ranks 2 \
    --save "$dir/short"
run --epochs 0 --resume "$dir/saved" --ranks 3 --batch 48 --predict "$eval" && mv "$dir/out" "$dir/taken"
report $? "--resume takes model, width and hidden layers from the snapshot; predictions may have another batch"
run --epochs 0 --resume "$dir/saved" --predict "$eval" --model deepfm --width 4 --hidden 8 && cmp -s "$dir/out" "$dir/taken"
report $? "... and predicts what a run with these options does"
run --epochs 0 --resume "$dir/saved" --save "$dir/copied" --predict "$eval" && cmp -s "$dir/saved/train_ctr.txt" "$dir/copied/train_ctr.txt" &&
    run --epochs 0 --resume "$dir/copied" --predict "$eval" && cmp -s "$dir/out" "$dir/taken"
report $? "a copy of a snapshot"
try 2 '--batch 48: the snapshots' --epochs 0 --resume "$dir/saved" --save "$dir/other" --batch 48 --predict "$eval"
try 2 'not a log of this version' --epochs 0 --resume "$dir/saved" --predict "$eval" --log-csv "$dir/saved/train_ctr.txt"

# ---- --max-restarts: a worker or a server is killed in the second epoch. The losses, the evaluations and the predictions are
# those of an undisturbed run, in every bit; columns that count since the restart, and rates, are left out
common_log() { cut -d, -f1-4,8- "$1"; }
restarts=("${common[@]}" "${two[@]}" --ranks 4 --servers 2 --backend procs --save-every 14 --predict "$eval")
run "${restarts[@]}" --save "$dir/calm" --log-csv "$dir/calm.csv" && mv "$dir/out" "$dir/calm.out"
report $? "a run with predictions"
for rank in 0 1 2 3; do
    DT_FAULT=kill:rank=$rank:seq=$((rank == 1 ? 3500 : 1000)) run "${restarts[@]}" --save "$dir/killed$rank" --log-csv "$dir/killed.csv" \
        --max-restarts 1
    [ $? = 0 ] && grep -q "^restart 1 of 1, after: rank $rank .*SIGKILL" "$dir/err" && [ "$(grep -c '^step *7 ' "$dir/err")" = 1 ]
    report $? "rank $rank is killed: one restart, from a snapshot"
    cmp -s "$dir/out" "$dir/calm.out" && cmp -s <(common_log "$dir/killed.csv") <(common_log "$dir/calm.csv")
    report $? "rank $rank is killed: the predictions and the log of an undisturbed run"
done
DT_FAULT=kill:rank=3:seq=1000 try 1 'rank 3 .*SIGKILL' "${restarts[@]}" --save "$dir/once"
try 1 'bad.txt:130' --data "$dir/bad.txt" --batch 96 --model lr --save "$dir/again" --max-restarts 3
! grep -q '^restart' "$dir/err"
report $? "a bad line would come again: no restart"

# ---- a trained model is not lost: --save is tried before the training and written before an evaluation, which may fail
run "${common[@]}" --model lr --save "$data/no"
[ $? = 1 ] && ! grep -q 'step ' "$dir/out"
report $? "--save of a folder that cannot be: fails before the first step"
run "${common[@]}" --model lr --save "$dir/kept" --eval "$dir/bad.txt"
[ $? = 1 ] && run --model lr --epochs 0 --resume "$dir/kept" --predict "$eval" && [ "$(sort -u "$dir/out" | wc -l)" -gt 100 ]
report $? "--eval of a bad file: the model is in the snapshot"
run "${common[@]}" --model lr --resume "$dir/kept" --save "$dir/copy" && compgen -G "$dir/copy/step-63" >/dev/null
report $? "--resume with no steps left: --save writes to another folder"

# ---- predictions: one probability for each line, nan for a bad line; the loss of their probabilities is eval_logloss
sed '7s/.*/bad/' "$eval" >"$dir/predict.txt"
run "${common[@]}" --model fm --eval "$eval" --predict "$dir/predict.txt" --skip-bad --ranks 3 --servers 1 --log-csv "$dir/log.csv"
report $? "--predict"
[ "$(wc -l <"$dir/out")" = 3000 ] && [ "$(sed -n 7p "$dir/out")" = nan ] && [ "$(grep -c nan "$dir/out")" = 1 ]
report $? "--predict prints 3,000 lines, of which line 7 is nan"
cut -f 2- "$eval" >"$dir/unlabelled.txt"
run "${common[@]}" --model fm --eval "$eval" --predict "$dir/unlabelled.txt" --ranks 2 --log-csv "$dir/log.csv"
loss=$(paste <(cut -f 1 "$eval") "$dir/out" | awk '{ s -= log($1 ? $2 : 1 - $2) } END { printf "%.9f", s / NR }')
close_to "$loss" "$(column eval_logloss "$dir/log.csv" | tail -n 1)" 1e-6
report $? "the loss of the printed probabilities, $loss, is eval_logloss"
auc=$(paste <(cut -f 1 "$eval") "$dir/out" | sort -g -k 2 | awk '$1 { p += n; c++ } !$1 { n++ } END { printf "%.9f", p / n / c }')
close_to "$auc" "$(column eval_auc "$dir/log.csv" | tail -n 1)" 1e-4
report $? "the AUC of the printed probabilities, $auc, is eval_auc"

"$B/train_ctr" "${common[@]}" --model lr --quiet --predict "$eval" >/dev/full 2>"$dir/err"
[ $? = 1 ] && only_error "$dir/err" 'standard output: No space left'
report $? "--predict to a full disk"

# ---- bounded staleness
run "${common[@]}" --model fm --ranks 4 --servers 1 --mode ssp:2 --log-csv "$dir/ssp.csv" &&
    [ "$(column staleness_max "$dir/ssp.csv" | sort -n | tail -n 1)" -le 2 ]
report $? "--mode ssp:2: no pull is more than 2 steps stale"
run "${common[@]}" --model fm --ranks 4 --servers 1 --mode async --eval "$eval" --log-csv "$dir/async.csv"
report $? "--mode async"

# ---- geo: a worker evaluates its replica; a snapshot has what the servers hold, which any number of workers evaluates alike
held() { # held ARGS...: prints the loss of a snapshot's rows
    run --epochs 0 --resume "$dir/geo" --eval "$eval" --log-csv "$dir/log.csv" "$@" && column eval_logloss "$dir/log.csv" | tail -n 1
}
for workers in 1 3; do
    rm -rf "$dir/geo"
    run "${common[@]}" --model fm --ranks $((workers + 1)) --servers 1 --mode geo:4 --eval "$eval" --save "$dir/geo" --log-csv "$dir/geo.csv"
    report $? "--mode geo:4 with $workers workers"
    loss=$(held --ranks 2 --servers 1)
    close_to "$loss" "$(held --ranks 4 --servers 2)" 1e-12
    report $? "the rows of the servers, evaluated by 1 and by 2 workers"
    close_to "$loss" "$(column eval_logloss "$dir/geo.csv" | tail -n 1)" $([ $workers = 1 ] && echo 0 || echo 0.1)
    report $? "the servers hold the replica of 1 worker, and about those of 3: $loss"
done
try 2 'mode geo:4 keeps optimizer state' "${common[@]}" --resume "$dir/geo" --ranks 2 --servers 1 --model fm
try 2 'mode sync: the snapshots .* have --mode geo:4' --epochs 0 --resume "$dir/geo" --eval "$eval" --mode sync
try 2 'mode geo:1: the snapshots .* have --mode sync' --epochs 0 --resume "$dir/saved" --eval "$eval" --mode geo:1

# ---- rules
for rule in "adagrad --lr 0.05" "adam --lr 0.01" "ftrl --lr 0.05" "sgd --lr 1"; do
    run "${common[@]}" --model deepfm --rule $rule --eval "$eval" --log-csv "$dir/rule.csv"
    [ $? = 0 ] && awk -v auc="$(column eval_auc "$dir/rule.csv" | tail -n 1)" 'BEGIN { exit !(auc > 0.6) }'
    report $? "--rule $rule"
done
finish
