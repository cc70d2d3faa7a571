#!/usr/bin/env bash
# test_plan.sh - train_gpt --plan-rows: predictions of the layouts in a CSV file, its forms, and what is wrong with it
cd "$(dirname "$0")/../.." || exit 1
. tests/support/report.sh
needs_train_gpt
in=$dir/in.csv out=$dir/out.csv
head='model,nodes,mbs,gradacc,gbs,dp,pp,tp,zero'

plan() { # plan ARGS...: runs --plan-rows; its status, its error lines in err
    timeout -k 5 $((60 * SLOW)) "$B/train_gpt" --plan-rows "$in" --plan-csv "$out" "$@" >"$dir/stdout" 2>"$dir/err" </dev/null
}
bad() { # bad PATTERN LINES...: a file of these lines is refused with one error that matches, and nothing is written
    local pattern=$1
    shift
    printf '%b' "$@" >"$in"
    rm -f "$out"
    plan
    [ $? = 2 ] && only_error "$dir/err" "$pattern" && [ ! -e "$out" ]
    report $? "refused with '$pattern': $(printf '%q ' "$@")"
}
same() { # same WHAT LINES...: the output is these lines, byte for byte
    local what=$1
    shift
    plan && printf '%b' "$@" | cmp -s - "$out" && [ ! -s "$dir/stdout" ]
    report $? "$what"
}

# ---- the published rows: every line stays, three fields more
cp tests/plan/nanotron_h100.csv "$in"
plan --profile h100-nanotron && cut -d, -f1-13 "$out" | cmp -s - "$in" && awk -F, '
    NF != 16 { bad = 1 }
    NR == 1 { if ($14 != "pred_tok_s_gpu" || $15 != "pred_gpu_mem" || $16 != "pred_note") bad = 1; next }
    !($14 > 0 && $15 > 0) { bad = 1 }
    $2 * 8 == $6 * $7 * $8 && $6 * $3 * $4 == $5 && $16 ~ /gbs|GPUs/ { bad = 1 }
    ($15 > 72.05) != ($16 ~ /does not fit: [0-9.]+ of 72.0 GiB/) { bad = 1 }
    END { exit bad || NR != 1621 }' "$out"
report $? "the published rows"
# the median error of rows that the fit has seen, without a pipeline: 5.9 % of speed; of memory 4.8 %
errors() { # errors MEASURED PREDICTED CONDITION MOST: 0 if the median error of these columns is at most MOST
    awk -F, "NR > 1 && \$$1 > 0 && $3 { e = \$$2 / \$$1 - 1; print e < 0 ? -e : e }" "$out" | sort -g |
        awk -v most="$4" '{ e[NR] = $1 } END { exit !(NR > 200 && e[int((NR + 1) / 2)] <= most) }'
}
errors 11 14 '$7 == 1' 0.065
report $? "speed without a pipeline: median error at most 6.5 %"
errors 12 15 1 0.05
report $? "memory: median error at most 5 %"
plan --profile a100-megatron && cp "$out" "$dir/a100" && plan && ! cmp -s "$out" "$dir/a100"
report $? "another profile predicts otherwise"

# ---- forms of CSV
row='8B,1,1,16,256,2,1,4,1'
printf '%s\n%s\n' $head "8B,1,1,128,256,2,1,4,1" >"$in"
plan && pred=$(sed -n '2s/.*,1,4,1,//p' "$out") && [[ $pred =~ ^[0-9.]+,[0-9.]+,$ ]]
report $? "columns of measurements may be absent"
printf '%s\r\n%s\r\n' $head "8B,1,1,128,256,2,1,4,1" >"$in"
same "CRLF stays" "$head,pred_tok_s_gpu,pred_gpu_mem,pred_note\r\n8B,1,1,128,256,2,1,4,1,$pred\r\n"
printf '\xef\xbb\xbf%s\n\n"8B",1,1,128.0,256,2,1,"4",1' $head >"$in"
same "quotes, a byte order mark, 128.0, an empty line, no end of the last line" \
    "$head,pred_tok_s_gpu,pred_gpu_mem,pred_note\n\"8B\",1,1,128.0,256,2,1,\"4\",1,$pred\n"
printf 'zero,why,%s\n1,"a ""b"", c\nd",8B,1,1,128,256,2,1,4\n' "${head%,zero}" >"$in"
same "any order of columns; a field with commas, quotes and a line end" \
    "zero,why,${head%,zero},pred_tok_s_gpu,pred_gpu_mem,pred_note\n1,\"a \"\"b\"\", c\nd\",8B,1,1,128,256,2,1,4,$pred\n"
printf '%s\n' "$head" >"$in"
same "no rows" "$head,pred_tok_s_gpu,pred_gpu_mem,pred_note\n"
cp "$in" "$dir/self" && "$B/train_gpt" --plan-rows "$dir/self" --plan-csv "$dir/self" && grep -q pred_note "$dir/self"
report $? "the file may be written over"

# ---- rows that cannot run say so, with their prediction
note() { # note PATTERN ROW
    printf '%s\n%s\n' $head "$2" >"$in"
    plan && [[ $(tail -n 1 "$out") =~ ^$2,[0-9.]+,[0-9.e+]+,($1)$ ]]
    report $? "note '$1': $2"
}
note 'dp x mbs x gradacc is 32 and not gbs 256' $row
note 'dp x tp x pp is 8 and not the 16 GPUs of 2 nodes' 8B,2,1,128,256,2,1,4,1
note 'tp 64 does not divide 32 heads' 8B,16,1,128,256,2,1,64,1
note '4 of 16 stages have no layer' 1B,2,1,256,256,1,16,1,0
note 'does not fit: [0-9.]+ of 72.0 GiB' 80B,1,1,256,256,1,1,8,0
note 'dp x mbs x gradacc is 1 and not gbs 2; does not fit: .*' 80B,1,1,1,2,1,1,8,0
printf '%s\n8B,256,1,256,256,1,2048,1,0\n' $head >"$in"
same "more stages than the planner knows" \
    "$head,pred_tok_s_gpu,pred_gpu_mem,pred_note\n8B,256,1,256,256,1,2048,1,0,,,no prediction for pp 2048\n"

# ---- wrong files: one error with the line and the column
ok=8B,1,1,128,256,2,1,4,1
bad 'in.csv:1: the file is empty' ''
bad 'in.csv:1: column zero: is missing$' 'model,nodes,mbs,gradacc,gbs,dp,pp,tp\n'
bad 'in.csv:1: column dp: occurs twice$' "$head,dp\n"
bad 'in.csv:1: column pred_note: the file has predictions already$' "$head,pred_note\n"
bad 'in.csv:3: column model: "13B" is unknown; known models are 1B, 3B, 8B and 80B$' "$head\n$ok\n13B,1,1,128,256,2,1,4,1\n"
bad 'in.csv:2: column mbs: "x" is no whole number from 1 to 1000000$' "$head\n8B,1,x,128,256,2,1,4,1\n"
bad 'in.csv:2: column tp: "" is no whole' "$head\n8B,1,1,128,256,2,1,,1\n"
bad 'in.csv:2: column dp: "0" is no whole' "$head\n8B,1,1,128,256,0,1,4,1\n"
bad 'in.csv:2: column dp: "-2" is no whole' "$head\n8B,1,1,128,256,-2,1,4,1\n"
bad 'in.csv:2: column pp: "1.5" is no whole' "$head\n8B,1,1,128,256,2,1.5,4,1\n"
bad 'in.csv:2: column gbs: "99999999999999999999" is no whole' "$head\n8B,1,1,128,99999999999999999999,2,1,4,1\n"
bad 'in.csv:2: column gbs: "1e999" is no whole' "$head\n8B,1,1,128,1e999,2,1,4,1\n"
bad 'in.csv:2: column zero: 4 is no ZeRO stage from 0 to 3$' "$head\n8B,1,1,128,256,2,1,4,4\n"
bad 'in.csv:3: 8 fields, but the header has 9$' "$head\n$ok\n8B,1,1,128,256,2,1,4\n"
bad 'in.csv:2: 10 fields, but the header has 9$' "$head\n$ok,\n"
bad 'in.csv:2: field 1: a quote is not closed$' "$head\n\"8B,1,1,128,256,2,1,4,1\n"
bad 'in.csv:2: field 1: text after the closing quote$' "$head\n\"8B\"x,1,1,128,256,2,1,4,1\n"
bad 'in.csv:2: field 1: a quote inside the text$' "$head\n8\"B,1,1,128,256,2,1,4,1\n"
bad 'in.csv:5: column model' "$head,why\n$ok,\"two\nlines\"\n\n\"9\nB\",1,1,128,256,2,1,4,1,\n"
bad 'in.csv:2: a carriage return inside the line$' "$head\n8B,1,1,128,256,2,1,4,1\r8B\n"
bad 'in.csv: byte 3 is 0$' 'mod\0el\n'
bad 'more than 256 columns$' "$(printf 'x,%.0s' {1..300})\n"

# ---- the command line
printf '%s\n%s\n' $head $ok >"$in"
try 2 'plan-rows needs --plan-csv FILE$' --plan-rows "$in"
try 2 'plan-csv needs --plan-rows FILE$' --plan-csv "$out"
try 2 'profile needs --plan-rows FILE$' --profile a100-megatron
try 2 'profile h200: the legal values are h100-nanotron\|a100-megatron$' --plan-rows "$in" --plan-csv "$out" --profile h200
try 2 'steps has no effect with --plan-rows' --plan-rows "$in" --plan-csv "$out" --steps 3
try 2 'nosuch: No such file' --plan-rows "$dir/nosuch" --plan-csv "$out"
try 2 'Is a directory' --plan-rows "$dir" --plan-csv "$out"
try 1 'nosuch/out: No such file' --plan-rows "$in" --plan-csv "$dir/nosuch/out"
if [ -e /dev/full ]; then try 1 '/dev/full: No space left' --plan-rows "$in" --plan-csv /dev/full; fi

# ---- --plan: the search, its file, clusters
model='--arch llama --layers 8 --width 512 --heads 8 --kv-heads 4 --ffn 1408 --seq 512 --vocab 32000 --dtype bf16 --tie off'
"$B/train_gpt" --plan --cluster h100:2x4 $model --batch 32 --tokens 1B --top 5 --plan-json "$dir/plan.json" >"$dir/plan"
report $? "a plan"
[ "$(grep -c '^ *[1-5]  *[0-9]' "$dir/plan")" = 5 ] && grep -q '^row 1 as options: --dp' "$dir/plan" &&
    grep -q '^3. speed ' "$dir/plan" && ! grep -qw nan "$dir/plan"
report $? "five rows, and what limits the first"
for key in dp tp cp pp ep zero recompute schedule chunks micro_batch accum sp gib seconds_per_step tokens_per_s_gpu mfu \
    bubble gpu_hours limited_by; do
    [ "$(grep -o "\"$key\"" "$dir/plan.json" | wc -l)" -ge 5 ]
    report $? "the plan's file has $key in each row"
done
grep -q '"refused"' "$dir/plan.json"
report $? "the plan's file has the layouts that do not fit"
# every row runs, and needs what the plan says: host memory left out
options=$(sed -n 's/^row 1 as options: //p' "$dir/plan") && "$B/train_gpt" --dry-run $model --batch 32 $options >"$dir/dry" &&
    gib=$(awk '/^ *1  *[0-9]/ { for (i = 1; i <= NF; i++) if ($i ~ /^[0-9]+\.[0-9]$/) { print $i; exit } }' "$dir/plan") &&
    awk -v gib="$gib" '$1 == "host" { host = $2 } $1 == "all" { all = $5 } END { d = (all - host) / 1073741824 - gib
        exit !(d > -0.06 && d < 0.06) }' "$dir/dry"
report $? "the first row needs the bytes of its dry run: ${gib:-?} GiB"
"$B/train_gpt" --plan --cluster h100:1x8 $model --batch 32 --tp 2 --zero 2 --recompute full --top 3 >"$dir/plan" &&
    awk '/^ *[1-3]  *[0-9]/ { n++; if ($3 != 2 || $7 != 2 || $8 != "full") bad = 1 } END { exit bad || n != 3 }' "$dir/plan"
report $? "options fix the layout"
"$B/train_gpt" --plan --cluster h100:1x1 $model --batch 8 --top 2 >"$dir/plan" && grep -q '1 nodes x 1 GPUs' "$dir/plan"
report $? "one GPU"
"$B/train_gpt" --plan --cluster h100:1x2 --arch llama --layers 128 --width 16384 --heads 128 --seq 2048 --dtype bf16 --batch 4 >"$dir/plan" &&
    grep -q 'no layout fits' "$dir/plan" && grep -q '[0-9.]* GiB too much' "$dir/plan"
report $? "a model that fits nowhere: by how much"
cluster() { # cluster PATTERN JSON: the cluster file is refused with one error that matches
    printf '%s' "$2" >"$dir/c.json"
    "$B/train_gpt" --plan --cluster "$dir/c.json" $model --batch 32 >"$dir/stdout" 2>"$dir/err"
    [ $? = 2 ] && only_error "$dir/err" "$1" && [ ! -s "$dir/stdout" ]
    report $? "cluster refused with '$1': $2"
}
printf '{"profile": "a100", "nodes": 1, "gpus": 4, "memory_gib": 40, "price": 2.5}' >"$dir/c.json"
"$B/train_gpt" --plan --cluster "$dir/c.json" $model --batch 32 --tokens 1B --top 1 >"$dir/plan" &&
    grep -q '1 nodes x 4 GPUs, profile a100-megatron, 40.0 GiB' "$dir/plan" && grep -q 'cost ' "$dir/plan"
report $? "a cluster's file"
cluster 'c.json:1:.*nodes.*above 0' '{"profile": "h100", "nodes": 0, "gpus": 8}'
cluster 'nodes.*above 0' '{"profile": "h100", "nodes": -1, "gpus": 8}'
cluster 'whole number' '{"profile": "h100", "nodes": 1.5, "gpus": 8}'
cluster 'key gpus is missing' '{"profile": "h100", "nodes": 1}'
cluster 'key profile is missing' '{"nodes": 1, "gpus": 8}'
cluster 'unknown key' '{"profile": "h100", "nodes": 1, "gpus": 8, "gpu": 1}'
cluster "no profile 'h200'" '{"profile": "h200", "nodes": 1, "gpus": 8}'
cluster 'object is needed' '[1]'
cluster 'c.json:1' '{"profile": "h100"'
try 2 "no profile 'b200'" --plan --cluster b200:1x8
try 2 'is not KIND:NODESxGPUS' --plan --cluster h100:1
try 2 'is not KIND:NODESxGPUS' --plan --cluster h100:1x8x2
try 2 '0 nodes of 8 GPUs' --plan --cluster h100:0x8
try 2 'nodes of .* GPUs' --plan --cluster h100:9999999x9999999
try 2 'nosuch.json: No such file' --plan --cluster "$dir/nosuch.json"
head -c 70000 /dev/zero | tr '\0' ' ' >"$dir/c.json"
try 2 'more than 64 KiB' --plan --cluster "$dir/c.json"
try 2 'needs --cluster' --plan
# no layout that this program refuses is proposed, and the reason is said
try 2 'refuses the fastest layouts.*--vocab 100' --plan --cluster h100:1x2 $model --vocab 100 --batch 4
mkdir "$dir/empty" && here=$PWD && (cd "$dir/empty" && "$here/$B/train_gpt" --plan --cluster h100:1x2 $model --batch 4 --top 1 >"$dir/plan") &&
    grep -q '^row 1 as options' "$dir/plan"
report $? "a plan needs no data"
try 2 'not a number of tokens' --plan --cluster h100:1x8 --tokens many
try 2 'no layout of 7 GPUs' --plan --cluster h100:1x7 --batch 16 --tp 2
try 2 'cluster needs --plan' --cluster h100:1x8
try 1 'nosuch' --plan --cluster h100:1x1 $model --batch 1 --top 1 --plan-json "$dir/nosuch/plan.json"
finish
