#!/usr/bin/env bash
# test_ctr.sh - train_ctr: its command line, bad lines, layouts, snapshots, predictions, and what its models learn
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
try 2 'hidden 8,,4' --data "$data" --hidden 8,,4
try 2 'mode ssp' --data "$data" --mode ssp --ranks 2 --servers 1
try 2 'mode async needs --servers' --data "$data" --mode async
try 2 'servers 2 of --ranks 2: .* use --ranks 3' --data "$data" --ranks 2 --servers 2
try 2 'batch 512 does not divide evenly over 3 workers: use --batch 513' --data "$data" --ranks 3
try 2 'No such file' --data "$dir/none"
try 2 'read once' --data - --ranks 2
: >"$dir/empty"
try 2 'the file is empty' --data "$dir/empty"
mkdir "$dir/folder"
try 1 'the folder has no files' --data "$dir/folder"
try 1 'there is no snapshot' "${common[@]}" --resume "$dir/folder"
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
try 1 'width' --data "$data" --batch 96 --width 5 --hidden 8 --model deepfm --resume "$dir/saved"

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

# ---- bounded staleness
run "${common[@]}" --model fm --ranks 4 --servers 1 --mode ssp:2 --log-csv "$dir/ssp.csv" &&
    [ "$(column staleness_max "$dir/ssp.csv" | sort -n | tail -n 1)" -le 2 ]
report $? "--mode ssp:2: no pull is more than 2 steps stale"
run "${common[@]}" --model fm --ranks 4 --servers 1 --mode async --eval "$eval" --log-csv "$dir/async.csv"
report $? "--mode async"

# ---- rules
for rule in "adagrad --lr 0.05" "adam --lr 0.01" "ftrl --lr 0.05" "sgd --lr 1"; do
    run "${common[@]}" --model deepfm --rule $rule --eval "$eval" --log-csv "$dir/rule.csv"
    [ $? = 0 ] && awk -v auc="$(column eval_auc "$dir/rule.csv" | tail -n 1)" 'BEGIN { exit !(auc > 0.6) }'
    report $? "--rule $rule"
done
finish
