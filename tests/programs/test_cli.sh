#!/usr/bin/env bash
# test_cli.sh - the command line of train_gpt: what it refuses, how it fails, what it writes
#
# Invalid input ends with exit status 2 and one line "error: ..." before any rank starts. A run that fails ends with
# exit status 1 and one line that names the rank. Both end within seconds, and each message is printed exactly once.
cd "$(dirname "$0")/../.." || exit 1
. tests/support/report.sh
needs_train_gpt
tiny="--layers 1 --width 16 --heads 2 --seq 16 --batch 4 --steps 3"
g=tests/golden

$MAKE -Bn 2>"$dir/err" | grep -q 'examples/train_gpt.c'
report $? "make without a target builds the programs"

: >"$dir/empty"
printf 'short' >"$dir/short"

# ---- unknown options and invalid values
try 2 'layers' --layer 3
try 2 'did you mean|nearest' --widht 64
try 2 'batch' --bacth=4
try 2 'steps' --steps many
try 2 'steps' --steps 3x
try 2 'steps' --steps -1
try 2 'steps' --steps
try 2 'lr' --lr nan
try 2 'lr' --lr -1
try 2 'dtype' --dtype f31
try 2 'tie' --tie maybe
try 2 'seed' --seed 99999999999999999999999
try 2 'text' text
try 2 'help lists them' -h
try 2 'unknown option --xyzzy-quux \(--help lists all\)$' --xyzzy-quux 3
try 2 'help takes no value' --help=1
try 2 'quiet takes no value' --quiet=on
try 2 'unknown option --no-quiet' --no-quiet
try 2 'data .*given before' --data "$dir/text" --data "$dir/text"

# ---- options that this build lacks are errors, except with their default values
for x in "--backend mpi" "--backend nccl" "--device cuda" "--report x"; do
    try 2 'is not available in this build' $x
done
try 2 'device is not available in this build with cuda: make CUDA=1 NCCL=1; the legal value is cpu$' --device cuda
try 2 'backend is not available in this build with nccl: make CUDA=1 NCCL=1; the legal values are' --backend nccl
try 2 'device cuda:1: the legal value is cpu; CUDA_VISIBLE_DEVICES chooses among GPUs$' --device cuda:1
try 0 '' $tiny --data "$dir/text" --tp 1 --pp 1 --sp off --dropout 0 --recompute none --quiet

# ---- sizes that do not fit
try 2 '4' --ranks 4 --dp 3
try 2 'heads' --width 30 --heads 4
try 2 'use --tp 2$' --tp 3
try 2 'kv-heads.* use --tp 2$' --tp 3 --heads 6 --width 48 --kv-heads 2
try 2 'ring over cp 3 .* use 126 or 129$' --cp 3
try 2 'zigzag over cp 4 splits a sequence into 8' --cp 4 --cp-kind zigzag --seq 36
try 2 'ulysses over cp 8' --cp 8 --cp-kind ulysses
try 2 'sp on .* use --seq 66$' --sp on --tp 2 --seq 65 --heads 4
try 2 'heads' --heads 6 --width 48 --kv-heads 4
try 2 'batch' --batch 10 --ranks 4
try 2 'batch' --batch 16 --micro-batch 3
try 2 'batch|accum' --batch 16 --micro-batch 4 --accum 2
try 2 'seq' --seq 0
try 2 'vocab' --vocab 100
try 2 'layers' --layers 0 --heads 0

try 2 'kv-heads 3 does not divide --heads 4; use --kv-heads 2' --kv-heads 3
try 2 'is odd; use --width 48' --arch llama --width 40 --heads 8
try 2 'dropout 1: not a number from 0 to 0.999' --dropout 1
try 2 'label-smoothing -0.1: not a number' --label-smoothing -0.1
try 2 'arch gpt3: the legal values are gpt2\|llama' --arch gpt3
try 2 'dtype fp32: the legal values are f32\|bf16\|f16\|f64' --dtype fp32
try 2 'peak-tflops' --peak-tflops -1
try 2 'eval-every 2 needs --val' --eval-every 2
truncate -s 214748365 "$dir/holes" # a sparse file, which takes no space on the disk
try 2 'shuffle on: .* has 214748364 sequences of --seq 1; at most 214748363 .*use --seq 2 or more' --data "$dir/holes" --seq 1 --shuffle on
try 2 'shuffle .*on\|off' --shuffle yes

# ---- sharding over the data-parallel ranks, and loss scales
try 2 'shard-group 3 does not divide the 4 ranks .*dp 2 x cp 2.*use --shard-group 2$' --dp 2 --cp 2 --zero 2 --shard-group 3
try 2 'shard-group 2 needs --zero 1, 2 or 3' --dp 2 --shard-group 2
try 2 'zero3-keep on needs --zero 3' --dp 2 --zero 2 --zero3-keep on
try 2 'zero 4: the legal values are 0\|1\|2\|3' --zero 4
for x in 0 -1 nan inf 1e999 many 2x ''; do try 2 'loss-scale' --loss-scale "$x"; done

# ---- recompute: a word, or full:K with groups of K layers
try 2 'recompute selectiv: .*none\|selective\|full\|full:K; use --recompute selective' --recompute selectiv
try 2 'recompute ful: .*use --recompute full$' --recompute ful
try 2 'recompute full:0: .*1 to the 6 --layers; use --recompute full:1' --layers 6 --recompute full:0
try 2 'use --recompute full:6' --layers 6 --recompute full:7
try 2 'use --recompute full:6' --layers 6 --recompute full:99999999999999999999999
try 2 'use --recompute full:2' --layers 6 --recompute full:2x
try 2 'use --recompute full$' --recompute full:
try 2 'use --recompute selective$' --recompute selective:2

# ---- stages of a pipeline, and experts
try 2 'chunks 2 divides a rank.s layers into stages; use --pp 2' --chunks 2
try 2 'chunks 2: schedule 1f1b gives each rank one stage; use --schedule interleaved' --pp 2 --chunks 2
try 2 'pp 5 x --chunks 1 are more stages than the 4 pieces of a model of 1 layers: .*use --pp 4' --pp 5 --layers 1
try 2 'pp 2 x --chunks 4 .*use --pp 1' --pp 2 --chunks 4 --layers 2 --schedule interleaved
try 2 'partition 3,4: 2 numbers with the sum 7; .* need 2 numbers with the sum 8' --pp 2 --partition 3,4
try 2 'partition 3,4,1: 3 numbers' --pp 2 --partition 3,4,1
for x in 3, ,3 3x5 -1,9 3,0,5 even,cost 99999999999999999999,1 ''; do try 2 'partition' --pp 3 --partition "$x"; done
try 0 '' --print-config --pp 3 --partition 0,8,0
try 2 'schedule gpipe: the legal values are naive\|afab\|1f1b\|interleaved\|zb' --pp 2 --schedule gpipe
try 2 'schedule-svg draws a pipeline' --schedule-svg x.svg
try 2 'schedule-svg no/such/dir/s.svg: No such file' $tiny --data "$dir/text" --pp 2 --schedule-svg no/such/dir/s.svg
try 2 'ep 3 does not divide --experts 4; use --ep 2' --experts 4 --ep 3 --batch 12
try 2 'ep 3 x expert_tp 1 does not divide dp 2 x cp 1 x tp 2 = 4; use ep 2 and expert_tp 1$' --experts 6 --ep 3 --expert-tp 1 --dp 2 --tp 2
try 2 'expert-tp 2 is for mixtures of experts; use --experts E$' --tp 2 --expert-tp 2
try 2 'expert-tp: each rank of --tp 2 dispatches a part of the 5 tokens of a rank \(--seq 5 .*; use --seq 6$' --experts 2 --tp 2 --expert-tp 1 --seq 5
for x in 0 -1 1.5 on ''; do try 2 'expert-tp' --experts 2 --expert-tp "$x"; done
try 2 'top-k 3 of --experts 2; use --top-k 2' --experts 2 --top-k 3
for x in 0 -4 4.5 many ''; do try 2 'experts' --experts "$x"; done
for x in 0 -1 nan dropful ''; do try 2 'capacity' --capacity "$x" --experts 2; done
try 2 'save-model: of MoE models only those of Mixtral' --experts 2 --save-model "$dir/none"
try 2 'save-model: of models with multi-token prediction only those of DeepSeek-V3' --arch llama --mtp 1 --save-model "$dir/none"
try 2 'save-model: of models with multi-token prediction' --arch llama --mtp 1 --lora 2 --save-model "$dir/none"
try 2 'save-model: of models with latent attention only .* needs the sigmoid route' --arch llama --mla 0:8:8:4:8 --experts 4 \
    --save-model "$dir/none"
try 2 'save-model: GPT-2.s files have one key head per query head' --kv-heads 1 --save-model "$dir/none"
try 2 'experts 2: the model in .* has dense; leave --experts out' --experts 2 --model tests/golden/hf_gpt2
try 2 '3 groups do not divide --experts 4; use 2:1$' --experts 4 --expert-groups 3:1
try 2 '1 groups of 2 experts have fewer than --top-k 4; use 4:2$' --experts 8 --top-k 4 --expert-groups 4:1
for x in 1:2 2 0:0 a:1 2:1:1 ''; do try 2 'expert-groups' --experts 4 --expert-groups "$x"; done
for x in 1:2 4:4:3:3:2 0:4:2:2:9 0:0:2:2:2 1:2:3:4:5:6; do try 2 "mla $x: five numbers" --arch llama --mla "$x"; done
try 2 'kv-heads 1 must be the 4 --heads' --arch llama --kv-heads 1 --mla 4:4:4:4:4
try 2 'mtp needs --arch llama' --mtp 1
try 2 'modules of latent attention .--mla. cannot have adapters' --arch llama --mla 6:4:4:2:3 --lora 2
try 2 'the file of --model says it; leave --mla out' --model tests/golden/hf_deepseek --mla 0:1:1:2:1

# ---- options that have no effect without another one
while read -r needs x; do
    try 2 "$(sed 's/ .*//' <<<"${x#--}") .* needs --$needs" $x --data "$dir/text"
done <<'END'
experts --top-k 1 --generate 12
experts --moe-ffn 64
experts --balance-loss 0.1
experts --router-bias 0.1
experts --capacity 1.5
tp --sp on
tp --tp-overlap 4
cp --cp-kind zigzag
pp --schedule zb
pp --partition 3,5
mtp --mtp-weight 0.5
generate --temperature 0.5
generate --sample-top-k 5
generate --top-p 0.5
optimizer --momentum 0.9
optimizer --adamw-lr-scale 0.5 --optimizer sgd
lora --lora-dropout 0.1
save --save-background on
END
try 2 'top-k 1 needs --experts E; --sample-top-k is for --generate$' --top-k 1
for x in "--pp 1 --schedule zb" "--cp 1 --cp-kind zigzag" "--experts dense --top-k 1" "--generate 0 --temperature 0.5" "--sp off" \
    "--temperature 0.80 --top-k 2 --schedule 1f1b" "--optimizer sgd --momentum 0.9" "--model $g/hf_mixtral --router-bias 0.1"; do
    try 0 '' --print-config $x
done
cp "$dir/out" "$dir/mixtral.json"
try 0 '' --print-config --config "$dir/mixtral.json" --top-k 2
try 0 '' $tiny --documents on --tokenizer $g/tokenizer/gpt2.json --data "$dir/text"
grep -q '^notice  --documents on: no document ends in the first' "$dir/out"
report $? "a text without the token that ends a document: a notice"
{ printf 'a<|endoftext|>b'; cat "$dir/text"; } >"$dir/ends"
try 0 '' $tiny --documents on --tokenizer $g/tokenizer/gpt2.json --data "$dir/ends"
! grep -q '^notice' "$dir/out"
report $? "a text with that token: no notice"

# ---- a batch that grows
try 2 'batch-ramp 4:4: not START:INCR:SAMPLES' --batch-ramp 4:4
try 2 'not START:INCR:SAMPLES' --batch-ramp 4:4:0
try 2 'not START:INCR:SAMPLES' --batch-ramp 4:-4:9
try 2 'not START:INCR:SAMPLES' --batch-ramp 4:4:9x
try 2 'not START:INCR:SAMPLES' --batch-ramp 99999999999999999999:4:9
try 2 'batch 16.* 20:4:9 to 16' --batch-ramp 20:4:9
try 2 'steps of 5 do not lead from 4 to 16; use 4:4:9' --batch-ramp 4:5:9
try 2 'batch 16, --micro-batch 1 and 4 replicas: .*batch of 6 .*multiple of 4, .*use 8:4:9' --batch-ramp 6:2:9 --dp 4
try 2 'batch of 4 is not a multiple of 8, .*use 8:8:9' --batch-ramp 4:4:9 --micro-batch 4 --dp 2
try 2 'batch of 4 is not a multiple of 8, .*use 8:8:9' --batch-ramp 4:4:9 --accum 2
try 0 '' --print-config --batch-ramp 8:8:9 --accum 2
try 0 '' --print-config --batch-ramp 8:4:9 --dp 2
grep -q '"micro-batch": 2' "$dir/out" && grep -q '"accum": 4' "$dir/out"
report $? "the default --micro-batch is the largest that divides all batches"

# ---- files
try 2 'no/such/file' --data no/such/file
try 2 'empty' --data "$dir/empty"
try 2 'short' --data "$dir/short"
try 2 'val' --data "$dir/text" --val no/such/val --eval-every 1
try 2 'log' $tiny --data "$dir/text" --log-csv no/such/dir/f.csv
try 2 'trace no/such/dir/t.json: No such file' $tiny --data "$dir/text" --trace no/such/dir/t.json
try 2 'trace .*: not a file but a directory' $tiny --data "$dir/text" --trace "$dir"
cp "$dir/text" "$dir/kept"
ln -s "$dir/kept" "$dir/link"
mkdir "$dir/texts" && ln "$dir/kept" "$dir/texts/hard"
try 2 'log-csv would overwrite .*link, which --data reads' $tiny --data "$dir/kept" --log-csv "$dir/link"
try 2 'log-csv would overwrite .*kept, which --data reads' $tiny --data "$dir/texts" --log-csv "$dir/kept"
try 2 'log-csv would overwrite .*hard, which --val reads' $tiny --data "$dir/text" --val "$dir/kept" --log-csv "$dir/texts/hard"
printf '{ "steps": 2 }' >"$dir/kept.json"
cp "$dir/kept.json" "$dir/kept.copy"
echo 0123456789abcdef >"$dir/token"
chmod 600 "$dir/token"
try 2 'trace would overwrite .*link, which --data reads' $tiny --data "$dir/kept" --trace "$dir/link"
try 2 'schedule-svg would overwrite .*kept, which --val reads' $tiny --data "$dir/text" --val "$dir/kept" \
    --layers 2 --ranks 2 --pp 2 --schedule-svg "$dir/kept"
try 2 'trace would overwrite .*kept.json, which --config reads' $tiny --data "$dir/text" --config "$dir/kept.json" \
    --trace "$dir/kept.json"
try 2 'log-csv would overwrite .*token, which --token-file reads' $tiny --data "$dir/text" --backend tcp --rank 0 \
    --ranks 2 --token-file "$dir/token" --log-csv "$dir/token"
try 2 'log-csv and --trace would both write' $tiny --data "$dir/text" --log-csv "$dir/both" --trace "$dir/both"
mkdir "$dir/own" && cp "$dir/kept.json" "$dir/own/config.json"
try 2 'save-model would overwrite .*, which --config reads' $tiny --data "$dir/text" --config "$dir/own/config.json" \
    --save-model "$dir/own"
cmp -s "$dir/text" "$dir/kept" && cmp -s "$dir/kept.json" "$dir/kept.copy" &&
    cmp -s "$dir/own/config.json" "$dir/kept.copy" && [ "$(cat "$dir/token")" = 0123456789abcdef ]
report $? "a refused run changes no file"

# ---- models from files: sizes come from the file, and options must agree with it
le() { printf '\\x%02x\\x%02x' $(($1 & 255)) $(($1 >> 8 & 255)); } # two bytes, as printf wants them
shard() { # shard FILE TOKEN...: llm.c's token shard, 16 bits a token
    local file=$1 t all
    shift
    all="$(le 20240520)$(le $((20240520 >> 16)))$(le 1)$(le 0)$(le $#)$(le 0)"
    { printf "$all"; head -c 1012 /dev/zero; for t; do printf "$(le "$t")"; done; } >"$file"
}
shard "$dir/shard" $(seq 0 60) $(seq 0 60)
shard "$dir/shard99" $(seq 0 60) 99 $(seq 0 60)
run="--batch 2 --steps 2"
try 0 '' --model $g/hf_gpt2 --data "$dir/shard" $run --generate 3 --log-csv "$dir/m.csv"
grep -q 'model   gpt2   2 layers   16 wide   4 heads' "$dir/out" && grep -q '122 tokens   5 sequences' "$dir/out" && \
    grep -Eq '^[0-9]+ [0-9]+ [0-9]+$' "$dir/out"
report $? "the printed settings are those of the file, and ids are generated"
try 0 '' --model $g/llmc_v3.bin --data "$dir/shard" $run --ranks 2 --zero 1
try 0 '' --model $g/hf_llama --data "$dir/shard" $run --dtype bf16 --seq 12 --arch llama --kv-heads 2
try 0 '' --model $g/hf_llama_bf16/model.safetensors --data "$dir/shard" $run --vocab 53 --seq 8 --steps 1 --batch 1
try 2 'width 64: the model in .* has 16; leave --width out' --model $g/hf_gpt2 --data "$dir/shard" --width 64
try 2 'arch llama: the model in .* has gpt2' --model $g/hf_gpt2 --data "$dir/shard" --arch llama
try 2 'tie off: the model in .* has on' --model $g/hf_gpt2 --data "$dir/shard" --tie off
try 2 'seq 25: .* 24 positions; use --seq 24 or less' --model $g/hf_gpt2 --data "$dir/shard" --seq 25
try 2 'model: .*no/such/model' --model no/such/model --data "$dir/shard"
try 2 'config.json' --model $g/files_pt.safetensors --data "$dir/shard"
try 2 'is text, whose bytes are tokens 0 to 255, but the model in .* has a vocabulary of 61' --model $g/hf_gpt2 --data "$dir/text"
try 2 'holds token 99, but the model in .* has a vocabulary of 61' --model $g/hf_gpt2 --data "$dir/shard99"
try 2 'val .*holds token 99' --vocab 61 --seq 16 --data "$dir/shard" --val "$dir/shard99"
try 2 'seq 122 .*use --seq 121 or less' --data "$dir/shard" --seq 122

# ---- a tokenizer: text becomes tokens, --vocab its size, and --generate prints text
t=$g/tokenizer
try 0 '' $tiny --data "$dir/text" --tokenizer $t/llama3.json --val "$dir/text" --generate 9
grep -aq 'vocab 334=' "$dir/out" && grep -aEq ' 1 file +3[0-9]{3} tokens' "$dir/out" && ! grep -aEq '^[0-9]+ [0-9]+ [0-9]+' "$dir/out"
report $? "text is encoded, and text is generated"
sed 's/|[^|]*ms |.*//' "$dir/out" | grep -a '^step' >"$dir/tokens.threads"
try 0 '' $tiny --data "$dir/text" --tokenizer $t/llama3.json --backend procs --ranks 2
[ -s "$dir/tokens.threads" ] && sed 's/|[^|]*ms |.*//' "$dir/out" | grep -a '^step' | cmp -s - "$dir/tokens.threads"
report $? "processes read the same tokens"
try 0 '' $tiny --data "$dir/text" --tokenizer $t/qwen.json --print-config
grep -q '"vocab": 335' "$dir/out" && grep -q '"tokenizer": ".*qwen.json"' "$dir/out"
report $? "--print-config has the tokenizer and its size"
try 0 '' $tiny --data "$dir/shard" --tokenizer $t/gpt2.json --generate 5
grep -q '122 tokens' "$dir/out"
report $? "token shards are not encoded again"
for x in "gpt2 0 0" "llama3 330 333"; do # the ids that begin and end a text
    rm -rf "$dir/ids"
    try 0 '' $tiny --data "$dir/text" --tokenizer "$t/${x%% *}.json" --save-model "$dir/ids"
    grep -o '"[be]os_token_id":[0-9a-z]*' "$dir/ids/config.json" | tr -dc '0-9\n' | xargs >"$dir/got"
    [ "${x#* }" = "$(cat "$dir/got")" ]
    report $? "config.json has the ids of ${x%% *}.json that begin and end a text: $(cat "$dir/got"), not ${x#* }"
    try 0 '' --data "$dir/text" --tokenizer "$t/${x%% *}.json" --model "$dir/ids" --steps 1 --batch 4 --save-model "$dir/ids_2"
    grep -o '"[be]os_token_id":[0-9a-z]*' "$dir/ids_2/config.json" | tr -dc '0-9\n' | xargs | cmp -s "$dir/got"
    report $? "and the model that is read from it, too"
done
try 2 'tokenizer .*llama3.json has 334 token ids, but --vocab is 300; use --vocab 334$' --data "$dir/text" --tokenizer $t/llama3.json --vocab 300
try 0 '' $tiny --data "$dir/text" --tokenizer $t/llama3.json --vocab 400 --generate 20 --quiet
try 2 'has 331 token ids, but the model in .* has a vocabulary of 61$' --model $g/hf_gpt2 --data "$dir/text" --tokenizer $t/gpt2.json
try 2 'tokenizer: .*vectors.json:1:1: an object is needed$' --data "$dir/text" --tokenizer $t/vectors.json
try 2 'tokenizer: .*none.json' --data "$dir/text" --tokenizer $t/none.json
try 2 'tokenizer: .*tokenizer/tokenizer.json: No such file' --data "$dir/text" --tokenizer $t
TMPDIR=$dir/none try 2 'data: .*dt-tokens-.*No such file' --data "$dir/text" --tokenizer $t/gpt2.json
cp $t/gpt2.json "$dir/t.json"
try 2 'would overwrite .*, which --tokenizer reads' $tiny --data "$dir/text" --tokenizer "$dir/t.json" --log-csv "$dir/t.json"
try 2 'would overwrite .*, which --data reads' $tiny --data "$dir/text" --tokenizer $t/gpt2.json --log-csv "$dir/text"
# a model's folder has its tokenizer, which is used unless another one is given
try 0 '' $tiny --data "$dir/text" --tokenizer $t/qwen.json --save-model "$dir/own"
cmp -s $t/qwen.json "$dir/own/tokenizer.json"
report $? "--save-model copies the tokenizer"
on="--model $dir/own --data $dir/text --batch 4 --seq 16 --steps 1"
for x in "" "--tokenizer $dir/own" "--tokenizer $dir/own/tokenizer.json" "--model $dir/own/model.safetensors"; do
    try 0 '' ${on/--model*own/${x:---model $dir/own}} $([[ $x != --tok* ]] || echo --model "$dir/own")
    grep -q "^tokens  $dir/own/tokenizer.json   335 ids   from the model's folder$" "$dir/out" && grep -Eq ' 1 file +3[0-9]{3} tokens' "$dir/out"
    report $? "the tokenizer in the model's folder, with '$x': $(grep -E '^(tokens|data)' "$dir/out")"
done
try 0 '' $on --tokenizer none
! grep -q '^tokens' "$dir/out" && grep -q ' 1 file   5000 bytes' "$dir/out"
report $? "--tokenizer none trains on bytes: $(grep ^data "$dir/out")"
try 0 '' $on --tokenizer $t/gpt2.json --save-model "$dir/own2"
grep -q "^tokens  $t/gpt2.json   331 ids of the 335 of the model; this is not the file in the model's folder$" "$dir/out" && cmp -s $t/gpt2.json "$dir/own2/tokenizer.json"
report $? "a tokenizer that is not the model's: $(grep ^tokens "$dir/out")"
try 2 'would overwrite .*tokenizer.json, which --data reads' $tiny --tokenizer $t/gpt2.json --data "$dir/own2/tokenizer.json" --save-model "$dir/own2"
try 0 '' $tiny --tokenizer "$dir/own2" --data "$dir/text" --save-model "$dir/own2"
try 2 'tokenizer.json has 335 token ids, but the model has a vocabulary of 331; use llm.c shards' --model "$dir/own2" --data "$dir/text" \
    $(cp $t/qwen.json "$dir/own2/tokenizer.json")
echo '{}' >"$dir/own/tokenizer.json"
try 2 'data .*text is text, and the tokenizer of --model .*own cannot encode it: .*tokenizer.json:1:1' $on
try 0 '' ${on/$dir\/text/$dir\/shard} --generate 3
: >"$dir/nothing"
try 2 'nothing: 0 tokens; at least 2 are needed' $tiny --data "$dir/nothing" --tokenizer $t/gpt2.json

mkdir "$dir/hf" && cp $g/hf_gpt2/*.json $g/hf_gpt2/*.safetensors "$dir/hf"
for out in "--log-csv $dir/hf/model.safetensors" "--log-csv $dir/hf/config.json" "--save-model $dir/hf"; do
    try 2 'would overwrite .*, which --model reads' --model "$dir/hf" --data "$dir/shard" $run $out
    try 2 'would overwrite .*, which --model reads' --model "$dir/hf/model.safetensors" --data "$dir/shard" $run $out
done
cmp -s $g/hf_gpt2/model.safetensors "$dir/hf/model.safetensors"
report $? "the file of --model is unchanged"
printf '\xff\xff\xff\xff' | dd of="$dir/hf/model.safetensors" bs=1 conv=notrunc \
    seek=$(($(stat -c %s "$dir/hf/model.safetensors") - 4)) 2>/dev/null
try 1 'rank 0: dt_linear_cross_entropy, .*: element 975 of its input 2, wte.weight \(61,16\), is NaN' --model "$dir/hf" --data "$dir/shard" $run
head -c 1200 "$dir/shard" >"$dir/torn"
try 2 'torn: a shard' --data "$dir/torn" --seq 8
head -c 20000 $g/hf_gpt2/model.safetensors >"$dir/torn.safetensors"
try 2 'torn.safetensors' --model "$dir/torn.safetensors" --data "$dir/shard"

# ---- runs that fail: every rank ends, and one line names the rank that failed first
try 1 'rank [0-9]+.*(NaN|nan|inf|finite)' $tiny --data "$dir/text" --optimizer sgd --lr 1e3 --clip 0 --ranks 4 --steps 50
try 1 'rank [0-9]+.*refused|memory|refused' --layers 1 --width 400000 --heads 1 --seq 16 --batch 2 --ranks 2 --steps 1 --data "$dir/text"

# ---- the output of a run
try 0 '' $tiny --data "$dir/text" --ranks 2 --zero 1 --log-csv "$dir/f.csv" --generate 20
grep -Eq '^step +3/3 \| loss [0-9.]+ \| norm [0-9.]+ \| lr [0-9.e+-]+ \| [0-9.]+ ms \| [0-9]+ tok/s \| comm [0-9]+% \| bubble 0% \| mem [0-9.]+ MiB \| eta [0-9:]+$' "$dir/out"
report $? "the step line has the documented form"
head -n 1 "$dir/f.csv" | tr ',' '\n' | sort >"$dir/have"
tr ',' '\n' <<<"step,loss,grad_norm,lr,ms,tokens_per_s,mem_params,mem_grads,mem_optim,mem_acts,mem_comm,mem_peak,bytes_dp,bytes_tp,bytes_cp,bytes_pp,bytes_ep" | sort >"$dir/want"
[ -z "$(comm -13 "$dir/have" "$dir/want")" ] && [ "$(wc -l <"$dir/f.csv")" = 4 ]
report $? "the CSV has every column and one row per step"
column() { awk -F, -v name="$1" 'NR==1{for(i=1;i<=NF;i++)if($i==name)c=i} NR==2{print $c}' "$2"; }
try 0 '' $tiny --data "$dir/text" --ranks 1 --log-csv "$dir/one.csv"
awk -v a="$(column loss "$dir/f.csv")" -v b="$(column loss "$dir/one.csv")" 'BEGIN{d=a-b;if(d<0)d=-d;exit !(b>4 && d<=1e-5*b)}'
report $? "2 ranks with ZeRO-1 have one rank's first loss: $(column loss "$dir/f.csv") and $(column loss "$dir/one.csv")"
awk -v a="$(column mem_optim "$dir/f.csv")" -v b="$(column mem_optim "$dir/one.csv")" 'BEGIN{exit !(a > 0 && a < 0.7 * b)}'
report $? "ZeRO-1 over 2 ranks halves the optimizer state, except for padding"
# ---- the memory account: S. Rajbhandari et al., arXiv:1910.02054, to the byte, with each bucket padded to N x 1,024
# elements. The buckets of this model: wte and wpe; the two halves of the layer; ln_f. V, G, O: bytes per element of
# value, gradient and Adam state (16-bit types have f32 gradients and an f32 master copy). Elements sent in a step with a
# micro-batches: 2 Psi at stages 0 and 1, (a + 1) Psi at stage 2, 3a Psi at stage 3, or (a + 1) Psi with --zero3-keep,
# all times (N-1)/N. A gradient has G bytes, a value V.
bad=0 n=0
for N in 1 2 3 4 8; do for stage in 0 1 2 3 4; do for d in "f32 4 4 8" "bf16 2 4 12" "f64 8 8 16"; do
    set -- $d
    a=1 keep=off s=$stage n=$((n + 1))
    [ $((n % 2)) = 0 ] && a=$((N == 8 ? 3 : 2))
    [ $stage = 4 ] && s=3 keep=on
    timeout $((60 * SLOW)) "$B/train_gpt" --layers 1 --width 16 --heads 2 --seq 16 --batch 24 --steps 2 --data "$dir/text" --quiet \
        --dtype $1 --ranks $N --zero $s --zero3-keep $keep --accum $a --log-csv "$dir/z.csv" >"$dir/err" 2>&1 || bad=1
    awk -F, -v N=$N -v s=$s -v keep=$keep -v a=$a -v V=$2 -v G=$3 -v O=$4 '
        function padded(e, p) { p = N * 1024; return int((e + p - 1) / p) * p }
        NR == 3 { E = padded(4352) + padded(1120) + padded(2160) + padded(32)
            sent = s == 0 ? 2 * G : s == 1 ? G + V : s == 2 || keep == "on" ? a * G + V : a * (G + 2 * V)
            good = $7 == V * E / (s > 2 ? N : 1) && $8 == G * E / (s > 1 ? N : 1) && $9 == O * E / (s > 0 ? N : 1) &&
                $13 == sent * E * (N - 1) / N
            if (!good) print "N " N " stage " s " keep " keep " a " a ": " $7, $8, $9, $13 " of E " E }
        END { exit !good }' "$dir/z.csv" || { bad=1; echo "  differs: $1"; }
done; done; done
report "$bad" "$n runs at 1, 2, 3, 4 and 8 ranks: mem_params, mem_grads, mem_optim and bytes_dp equal the formulas"
# Pipelines: a rank sends the output of its stage and the gradient of its input, b x T x C elements each, for every
# micro-batch. The two ranks of the tied embedding, which has a bucket of its own there, all-reduce its 4,096 gradients.
# Mixtures of experts over two ranks, where every token goes to both: half of the rows are sent, in dispatch and combine,
# forward and backward. The bucket of the experts has 2,128 elements a rank.
try 0 '' $tiny --data "$dir/text" --batch 12 --ranks 1 --log-csv "$dir/one.csv" --dtype f64
bad=0 n=0
for x in "2 1 1f1b" "3 1 afab" "2 2 interleaved" "4 1 zb" "2 1 naive"; do
    set -- $x
    n=$((n + 1))
    timeout $((60 * SLOW)) "$B/train_gpt" $tiny --data "$dir/text" --batch 12 --accum 4 --pp $1 --schedule $3 --chunks $2 --quiet \
        --dtype f64 --log-csv "$dir/p.csv" >"$dir/err" 2>&1 || bad=1
    paste -d, <(cut -d, -f1-24 "$dir/p.csv") "$dir/one.csv" | awk -F, -v p=$1 -v v=$2 '
        NR > 1 { S = 4 * 3 * 16 * 16 * 8; tied = 4096 * 8
            ends = v * S + (v - 1) * S + tied; inner = p > 2 ? 2 * v * S : 0
            d = $2 - $26; n = $3 - $27; if (d < 0) d = -d; if (n < 0) n = -n
            good = $16 == (ends > inner ? ends : inner) && d <= 1e-12 * $26 && n <= 1e-12 * $27
            if (!good) print "pp " p " x " v ": sends " $16 " and not " (ends > inner ? ends : inner) ", loss " $2 " " $26 }
        END { exit !good }' || bad=1
done
report "$bad" "$n pipelines have the losses and norms of one rank, and send the bytes of the formula"
try 0 '' $tiny --data "$dir/text" --batch 12 --ranks 1 --experts 2 --log-csv "$dir/one.csv" --dtype f64 --capacity 1.25
bad=0 n=0
for x in "1 0 1" "2 1 3" "2 2 1" "2 3 1"; do
    set -- $x
    n=$((n + 1))
    timeout $((60 * SLOW)) "$B/train_gpt" $tiny --data "$dir/text" --batch 12 --accum $3 --dp $1 --ep 2 --zero $2 --experts 2 --quiet \
        --capacity 1.25 --dtype f64 --log-csv "$dir/p.csv" >"$dir/err" 2>&1 || bad=1
    paste -d, <(cut -d, -f1-24 "$dir/p.csv") "$dir/one.csv" | awk -F, -v dp=$1 -v s=$2 '
        function padded(e, N, p) { p = N * 1024; return int((e + p - 1) / p) * p }
        function held(cut) { return cut ? D / (2 * dp) + X / dp : D + X }
        NR > 1 { D = padded(4352, 2 * dp) + padded(1120, 2 * dp) + 2 * padded(64, 2 * dp); X = padded(2128, dp)
            sent = 4 * 12 / (2 * dp) * 16 * 16 * 8
            d = $2 - $26; if (d < 0) d = -d
            good = $17 == sent && d <= 1e-12 * $26 && $24 == $48 && $7 == 8 * held(s > 2) && $8 == 8 * held(s > 1) && $9 == 16 * held(s)
            if (!good) print "dp " dp " stage " s ": " $17 " of " sent ", loss " $2 " " $26 ", dropped " $24 " " $48 ", " $7, $8, $9, D, X }
        END { exit !good }' || bad=1
done
report "$bad" "$n mixtures over ep have the losses and drops of one rank, and send and hold the bytes of the formulas"
# The parts of DeepSeek-V3, and the loss of its modules in a column of their own.
deep="$tiny --arch llama --layers 2 --data $dir/text --mla 6:4:4:2:3 --mtp 1 --experts 4 --route sigmoid --expert-groups 2:1
    --shared-experts 1 --moe-ffn 8 --first-dense 1 --gate-scale 2.5 --router-bias 0.01 --dtype f64"
try 0 '' $deep --log-csv "$dir/one.csv"
for x in "--tp 2 --pp 2 --micro-batch 2" "--ep 2 --cp 2 --zero 3" "--dp 2 --tp 2 --ep 2 --expert-tp 2 --zero 2"; do
    try 0 '' $deep $x --log-csv "$dir/p.csv"
    paste -d, "$dir/p.csv" "$dir/one.csv" | awk -F, 'function far(a, b) { return (a > b ? a - b : b - a) > 1e-12 * b }
        NR == 1 { ok = $28 == "mtp_loss" } NR > 1 { ok = ok && $28 > 1 && !far($2, $30) && !far($28, $56); n++ } END { exit !(ok && n == 3) }'
    report $? "latent attention, sigmoid routing and multi-token prediction with $x have the losses of one rank"
done
mixed="$tiny --data $dir/text --experts 4 --capacity 1 --router-bias 0.05 --steps 5 --dtype f64 --val $dir/text"
for x in "--eval-every 0" "--eval-every 1" "--eval-every 1 --dp 2 --ep 2" "--eval-every 1 --tp 2 --ep 2 --expert-tp 1"; do
    try 0 '' $mixed $x --log-csv "$dir/v.csv"
    [ "$x" = "--eval-every 0" ] && cp "$dir/v.csv" "$dir/one.csv"
    paste -d, <(cut -d, -f1-24 "$dir/v.csv") "$dir/one.csv" | awk -F, 'NR>1{d=$2-$26; if(d<0)d=-d; good+=(d<=1e-12*$26 && $24==$48)} END{exit good!=5}'
    report $? "a mixture with $x: validation does not change the routers' counts"
done
# Every rank has a part of the model if the experts are folded over dp.
folded="$tiny --data $dir/text --experts 4 --seed 3 --lr 0.02 --dtype f64 --batch 12 --steps 8 --quiet --generate 40"
try 0 '' $folded --ranks 1 --log-csv "$dir/one.csv"
cp "$dir/out" "$dir/said"
for x in "--dp 2 --expert-tp 2" "--tp 2 --cp 2 --ep 4 --expert-tp 1" "--dp 2 --tp 2 --pp 2 --ep 2 --expert-tp 2 --zero 3"; do
    try 0 '' $folded $x --log-csv "$dir/p.csv"
    cmp -s "$dir/out" "$dir/said" && paste -d, <(cut -d, -f1-3 "$dir/p.csv") "$dir/one.csv" | awk -F, '
        function far(a, b) { return (a > b ? a - b : b - a) > 1e-11 * b } NR > 1 { n += !far($2, $5) && !far($3, $6) } END { exit n != 8 }'
    report $? "a mixture with $x: the losses, norms and generated text of one rank"
done
try 0 '' $tiny --data "$dir/text" --batch 12 --pp 2 --tp 2 --schedule interleaved --partition cost --val "$dir/text" --generate 9 \
    --schedule-svg "$dir/s.svg"
grep -q '^stages  divided by the measured times' "$dir/out" && grep -q '^bubble  interleaved: .*of ideal, .*of total' "$dir/out" && \
    grep -q '<svg' "$dir/s.svg"
report $? "a pipeline with stages of equal cost prints its stages and its bubble, and draws its schedule"
cp "$dir/out" "$dir/z.txt"
try 0 '' $tiny --data "$dir/text" --batch 12 --ranks 1 --val "$dir/text" --generate 9
[ "$(sed -n '/^---$/,/^---$/p' "$dir/z.txt")" = "$(sed -n '/^---$/,/^---$/p' "$dir/out")" ]
report $? "a pipeline generates the same text as one rank"
try 0 '' $tiny --data "$dir/text" --ranks 4 --zero 3 --shard-group 2 --val "$dir/text" --generate 9 --log-csv "$dir/z.csv"
cp "$dir/out" "$dir/z.txt"
grep -q '   zero 3 in groups of 2$' "$dir/out"
report $? "the settings name the shard groups"
try 0 '' $tiny --data "$dir/text" --ranks 1 --val "$dir/text" --generate 9 --log-csv "$dir/one.csv"
[ "$(sed -n '/^---$/,/^---$/p' "$dir/z.txt")" = "$(sed -n '/^---$/,/^---$/p' "$dir/out")" ]
report $? "ZeRO-3 generates the same text as one rank"
paste -d, <(cut -d, -f18 "$dir/z.csv") <(cut -d, -f18 "$dir/one.csv") | awk -F, 'NR==4{d=$1-$2;if(d<0)d=-d;exit !($1>4&&d<=1e-5*$1)}'
report $? "ZeRO-3 has the validation loss of one rank, with 64 sequences over 4 ranks"
try 0 '' $tiny --data "$dir/text" --ranks 3 --batch 3 --zero 3 --val "$dir/text"
report $? "64 sequences over 3 ranks: one rank of ZeRO-3 has fewer"
# 16-bit gradients: half the traffic, losses within 0.1 %
try 0 '' $tiny --data "$dir/text" --dp 2 --dtype bf16 --log-csv "$dir/wide.csv"
try 0 '' $tiny --data "$dir/text" --dp 2 --dtype bf16 --grad-dtype bf16 --log-csv "$dir/narrow.csv"
paste -d, "$dir/wide.csv" "$dir/narrow.csv" | awk -F, 'NR > 1 { n = NF / 2; d = $2 / $(n + 2) - 1
    if (d < 0) d = -d; bad += d > 1e-3 || $13 != 2 * $(n + 13) || $13 == 0; differ += d > 0 } END { exit bad || !differ || NR < 3 }'
report $? "--grad-dtype bf16 sends half the bytes, and losses stay within 0.1 %: $(column loss "$dir/narrow.csv") and $(column loss "$dir/wide.csv")"
try 2 'grad-dtype bf16 is for parameters of this type, and --dtype is f32' $tiny --grad-dtype bf16
try 2 'grad-dtype bf16 is not for --optimizer muon' $tiny --dtype bf16 --grad-dtype bf16 --optimizer muon
try 2 'gradients of --dtype f64 are f64' $tiny --dtype f64 --grad-dtype f32
# A step whose gradients overflow is skipped; the dynamic loss scale is halved and the step repeated.
scale="$tiny --data $dir/text --dtype f16 --ranks 2 --zero 2"
try 0 '' $scale --loss-scale 1024 --log-csv "$dir/fixed.csv"
grep -q 'loss-scale 1024\*' "$dir/out" && ! grep -q skipped "$dir/err"
report $? "--loss-scale 1024 skips no step"
try 0 '' $scale --log-csv "$dir/dynamic.csv"
grep -q 'loss-scale dynamic=' "$dir/out"
report $? "f16 has a dynamic scale"
try 1 "not finite under a loss scale of 1e\+30, which is fixed" $scale --loss-scale 1e30 --log-csv "$dir/skips.csv"
[ "$(wc -l <"$dir/skips.csv")" = 1 ] && ! grep -q '^step' "$dir/out"
report $? "a skipped step has no row in the CSV and no line in the output"
WORLD_SIZE=4 timeout $((60 * SLOW)) "$B/train_gpt" $tiny --data "$dir/text" >"$dir/out" 2>"$dir/err"
[ $? = 2 ] && grep -q 'WORLD_SIZE=4' "$dir/err"
report $? "a launcher's ranks are refused, not ignored"
[ "$(sed -n '/^---$/,/^---$/p' <("$B/train_gpt" $tiny --data "$dir/text" --generate 5) | wc -c)" -ge 14 ]
report $? "--generate writes its bytes between two lines"
cut -d, -f1-3 "$dir/f.csv" >"$dir/first"
try 0 '' $tiny --data "$dir/text" --ranks 2 --zero 1 --log-csv "$dir/again.csv"
cut -d, -f1-3 "$dir/again.csv" | cmp -s - "$dir/first"
report $? "a second run has the same losses and norms to the last digit"
# 4 sequences are the full text, so the first loss of a saved model is the next loss of the run that saved it
head -c 65 "$dir/text" >"$dir/65"
for kind in "gpt2 --tie on" "gpt2 --tie off" "llama --kv-heads 1" "gpt2 --tie off --zero 3"; do
    small="--layers 2 --width 16 --heads 2 --seq 16 --batch 4 --lr-schedule constant --data $dir/65 --arch $kind"
    rm -rf "$dir/saved"
    try 0 '' --zero 1 $small --ranks 2 --steps 3 --save-model "$dir/saved"
    try 0 '' --zero 1 $small --ranks 2 --steps 4 --log-csv "$dir/four.csv"
    try 0 '' --model "$dir/saved" --data "$dir/65" --batch 4 --steps 1 --ranks 2 --zero 1 --log-csv "$dir/one.csv"
    [ "$(sed -n 2p "$dir/one.csv" | cut -d, -f2-3)" = "$(sed -n 5p "$dir/four.csv" | cut -d, -f2-3)" ]
    report $? "$kind: the model of --save-model continues with the next loss: $(sed -n 2p "$dir/one.csv" | cut -d, -f2-3)"
    grep -q '"eos_token_id":null' "$dir/saved/config.json"
    report $? "$kind: a vocabulary of bytes has no end-of-text token"
done
# mixtures: the model of --save-model has the validation loss of the run
head -c 900 "$dir/text" >"$dir/val"
common="--data $dir/text --val $dir/val --seq 16 --batch 4"
for kind in "mixtral --kv-heads 1" "deepseek_v3 --mla 6:8:8:4:8 --route sigmoid --shared-experts 1 --moe-ffn 8 --first-dense 1 \
    --expert-groups 2:1 --router-bias 0.01 --mtp 1"; do
    for layout in "--dp 2 --ep 2 --zero 1" "--tp 2 --pp 2 --micro-batch 2"; do
        moe="--layers 2 --width 16 --heads 2 --arch llama --experts 4 --lr 1e-2 --steps 3"
        rm -rf "$dir/moe"
        try 0 '' $moe ${kind#* } $layout --save-model "$dir/moe" --log-csv "$dir/moe.csv"
        grep -q "\"model_type\":\"${kind%% *}\"" "$dir/moe/config.json"
        report $? "the model is of the type ${kind%% *}: $(cat "$dir/moe/config.json")"
        try 0 '' --model "$dir/moe" --steps 1 --lr 0 $layout --log-csv "$dir/again.csv"
        [ -n "$(tail -n 1 "$dir/moe.csv" | cut -d, -f18)" ] &&
            [ "$(tail -n 1 "$dir/moe.csv" | cut -d, -f18)" = "$(tail -n 1 "$dir/again.csv" | cut -d, -f18)" ]
        report $? "${kind%% *} $layout: validation loss $(tail -n 1 "$dir/moe.csv" | cut -d, -f18), and of its file \
$(tail -n 1 "$dir/again.csv" | cut -d, -f18)"
    done
done
# what --model takes for no model: adapters, checkpoints that are none, PyTorch's files
try 0 '' $tiny --arch llama --lora 2 --save "$dir/lora" --save-model "$dir/adapter"
[ -f "$dir/lora/step-3/model.safetensors" ] && [ ! -e "$dir/lora/step-3/config.json" ]
report $? "a checkpoint of LoRA has no config.json"
try 2 'model: .*lora/step-3: a checkpoint of a LoRA run, not a model: continue it with --resume' --model "$dir/lora/step-3"
try 2 'model: .*adapter: an adapter of PEFT, not a model: give its base to --model' --model "$dir/adapter"
try 2 'model: .*adapter_model.safetensors: an adapter of PEFT' --model "$dir/adapter/adapter_model.safetensors"
try 0 '' $tiny --experts 2 --save "$dir/moe_steps"
try 2 'model: .*moe_steps/step-3: a checkpoint of a MoE model' --model "$dir/moe_steps/step-3"
mkdir "$dir/torch"
printf 'PK\3\4and the rest' >"$dir/torch/pytorch_model.bin"
try 2 'model: .*torch: the folder has only a PyTorch file, pytorch_model.bin; convert it to safetensors' --model "$dir/torch"
try 2 'pytorch_model.bin: a PyTorch file; convert it to safetensors' --model "$dir/torch/pytorch_model.bin"
printf '\200\2and the rest' >"$dir/torch/pytorch_model.bin"
try 2 'pytorch_model.bin: a PyTorch file; convert it to safetensors' --model "$dir/torch/pytorch_model.bin"
common=
try 2 'save-model .*' $tiny --data "$dir/text" --save-model "$dir/text"
try 2 'save-model no/such/dir/m' $tiny --data "$dir/text" --save-model no/such/dir/m
[ "$("$B/train_gpt" $tiny --data "$dir/text" --generate 20 --quiet | wc -c)" = 20 ]
report $? "--quiet --generate 20 prints 20 bytes"
more="--layers 4 --width 32 --seq 64 --heads 2 --batch 8 --steps 2"
for r in none selective full full:1 full:2 full:3; do
    try 0 '' $more --data "$dir/text" --ranks 2 --zero 1 --recompute $r --log-csv "$dir/$r.csv"
    grep -q -- "recompute $r\*" "$dir/out"
    report $? "the settings name --recompute $r"
    cut -d, -f1-3 "$dir/$r.csv" >"$dir/got"
    cut -d, -f1-3 "$dir/none.csv" | cmp -s - "$dir/got"
    report $? "--recompute $r: the losses and norms of --recompute none, to the last digit"
done
cut -d, -f1-3,7-17 "$dir/full.csv" >"$dir/got"
cut -d, -f1-3,7-17 "$dir/full:1.csv" | cmp -s - "$dir/got"
report $? "--recompute full equals full:1"
acts() { column mem_acts "$dir/$1.csv"; }
[ "$(acts full)" -lt "$(acts selective)" ] && [ "$(acts selective)" -lt "$(acts none)" ] && [ "$(acts full:2)" -lt "$(acts none)" ]
report $? "recomputation keeps less: none $(acts none), selective $(acts selective), full:2 $(acts full:2), full $(acts full)"
! grep -n dt__ examples/*.c examples/*.h >"$dir/err"
report $? "examples use public calls only"
for d in f32 bf16 f16 f64; do
    try 0 '' $tiny --data "$dir/text" --dtype $d --arch llama --dropout 0.1 --label-smoothing 0.1 --ranks 2 --zero 1 --log-csv "$dir/$d.csv"
    awk -v a="$(column loss "$dir/$d.csv")" -v b="$(column loss "$dir/f32.csv")" 'BEGIN{d=a-b;if(d<0)d=-d;exit !(b>4 && d<=1e-2*b)}'
    report $? "--dtype $d: the first loss is $(column loss "$dir/$d.csv"), f32's $(column loss "$dir/f32.csv")"
done
drop="$tiny --data $dir/text --dtype f64 --dropout 0.2"
try 0 '' $drop --ranks 1 --log-csv "$dir/one.csv"
try 0 '' $drop --ranks 4 --log-csv "$dir/f.csv"
awk -v a="$(column loss "$dir/f.csv")" -v b="$(column loss "$dir/one.csv")" 'BEGIN{d=a-b;if(d<0)d=-d;exit !(b>4 && d<=1e-12*b)}'
report $? "4 ranks drop the same values as one rank: $(column loss "$dir/f.csv") and $(column loss "$dir/one.csv")"
for x in "--ranks 1" "--dp 2" "--accum 2" "--pp 2 --accum 4"; do # adapters begin at 0, so masks count from step 2 on
    try 0 '' $tiny --data "$dir/text" --dtype f64 --lora 4 --lora-dropout 0.3 --lr 0.1 $x --log-csv "$dir/f.csv"
    [ "$x" != "--ranks 1" ] || cp "$dir/f.csv" "$dir/one.csv"
    paste -d, <(cut -d, -f2,3 "$dir/f.csv") <(cut -d, -f2,3 "$dir/one.csv") | awk -F, 'function far(a, b) { return (a > b ? a - b : b - a) > 1e-11 * b }
        NR > 1 { bad += far($1, $3) || far($2, $4) } END { exit bad || NR != 4 }'
    report $? "--lora-dropout drops the same values with $x: $(cut -d, -f2 "$dir/f.csv" | tr '\n' ' ')"
done

# ---- --shuffle: step n reads entries (n-1)B + k of the orders of epochs 0, 1, .., which are PyTorch's with seed, seed + 1, ..
# With a learning rate of 0 the model does not change, so its loss identifies a sequence. The orders are torch.randperm(7)
# with seeds 5 and 6.
head -c 113 "$dir/text" >"$dir/113"
named="$tiny --data $dir/113 --seed 5 --lr 0 --dtype f64 --steps 14"
losses() { tail -n +2 "$1" | cut -d, -f2; }
try 0 '' $named --batch 1 --log-csv "$dir/f.csv"
try 0 '' $named --batch 1 --shuffle on --log-csv "$dir/s.csv"
grep -q -- 'shuffle on\*' "$dir/out"
report $? "the settings name --shuffle on"
losses "$dir/f.csv" | head -n 7 >"$dir/names"
[ "$(sort -u "$dir/names" | wc -l)" = 7 ] && [ "$(losses "$dir/f.csv")" = "$(cat "$dir/names" "$dir/names")" ]
report $? "without --shuffle the 7 sequences come in the order of the file, twice"
for i in 1 0 4 2 6 5 3 2 4 5 3 0 6 1; do sed -n "$((i + 1))p" "$dir/names"; done >"$dir/want"
losses "$dir/s.csv" | cmp -s - "$dir/want"
report $? "with --shuffle on they come in PyTorch's orders of two epochs"
mixed="$tiny --data $dir/text --shuffle on --dtype f64 --steps 40 --batch 8" # 312 sequences: into the second epoch
for layout in "--dp 1" "--dp 1 --accum 4" "--dp 2" "--dp 2 --accum 2" "--dp 4" "--dp 4 --accum 2" "--dp 4 --zero 1"; do
    try 0 '' $mixed $layout --log-csv "$dir/s.csv"
    [ "$layout" = "--dp 1" ] && cp "$dir/s.csv" "$dir/one.csv"
    paste -d, <(losses "$dir/one.csv") <(losses "$dir/s.csv") | awk -F, '
        {d=$1-$2;if(d<0)d=-d;good+=($1>2&&d<=1e-12*$1)} END{exit good!=40||NR!=40}'
    report $? "--shuffle on with $layout: the losses of one rank"
done
# ---- --batch-ramp: after 0 1 2 3 5 7 10 sequences steps take 1 1 1 2 2 3 3; a step's loss is the mean of its sequences' losses
try 0 '' $named --steps 7 --batch 3 --batch-ramp 1:1:6 --log-csv "$dir/r.csv"
awk -F, 'NR==FNR{name[n++]=$1; next} FNR>1{b=$20; sum=0; for(i=0;i<b;i++)sum+=name[at++%7]; d=$2-sum/b; if(d<0)d=-d
    sizes=sizes b; good+=d<=1e-14*$2} END{exit good!=7||sizes!="1112233"}' "$dir/names" "$dir/r.csv"
report $? "with --batch-ramp a step takes the sequences after those of all earlier steps: $(cut -d, -f2,20 "$dir/r.csv" | tr '\n' ' ')"
try 0 '' $named --steps 7 --batch 3 --batch-ramp 1:1:6 --shuffle on --log-csv "$dir/r.csv"
losses "$dir/s.csv" >"$dir/shuffled"
awk -F, 'NR==FNR{name[n++]=$1; next} FNR>1{b=$20; sum=0; for(i=0;i<b;i++)sum+=name[at++]; d=$2-sum/b; if(d<0)d=-d
    good+=d<=1e-14*$2} END{exit good!=7}' <(for i in 1 0 4 2 6 5 3 2 4 5 3 0 6 1; do sed -n "$((i + 1))p" "$dir/names"; done) "$dir/r.csv"
report $? "with --batch-ramp and --shuffle on a step takes the next sequences of PyTorch's orders"
ramp="$tiny --data $dir/text --dtype f64 --steps 12 --batch 16 --batch-ramp 4:4:40"
for layout in "--dp 1" "--dp 1 --micro-batch 2" "--dp 2" "--dp 2 --micro-batch 1 --zero 1" "--dp 4" "--dp 4 --reduce tree" "--dp 2 --tp 2"; do
    try 0 '' $ramp $layout --log-csv "$dir/r.csv"
    [ "$layout" = "--dp 1" ] && cp "$dir/r.csv" "$dir/one.csv"
    [ "$(cut -d, -f20 "$dir/r.csv" | tr '\n' ' ')" = "batch 4 4 4 4 8 8 12 16 16 16 16 16 " ] && \
        paste -d, <(cut -d, -f2,3 "$dir/one.csv") <(cut -d, -f2,3 "$dir/r.csv") | awk -F, '
        NR>1{d=$1-$3;e=$2-$4;if(d<0)d=-d;if(e<0)e=-e;good+=($1>2&&d<=1e-12*$1&&e<=1e-11*$2)} END{exit good!=12}'
    report $? "--batch-ramp with $layout: the losses and norms of one rank, batches $(cut -d, -f20 "$dir/r.csv" | tr '\n' ' ')"
done
shard "$dir/later" $(seq 0 60) 99 $(seq 0 60) # 99 is in the 6th sequence of 12
try 0 '' --layers 1 --width 16 --heads 2 --vocab 61 --seq 12 --data "$dir/later" --steps 3 --batch 3 --batch-ramp 1:1:6
try 2 'holds token 99' --layers 1 --width 16 --heads 2 --vocab 61 --seq 12 --data "$dir/later" --steps 4 --batch 3 --batch-ramp 1:1:2
try 0 '' $tiny --data "$dir/text" --lr-schedule wsd --steps 10 --log-csv "$dir/w.csv"
[ "$(cut -d, -f4 "$dir/w.csv" | tail -n 3 | sed 's/\(......\).*/\1/' | tr '\n' ' ')" = "0.001 0.0003 0.0001 " ]
report $? "--lr-schedule wsd is constant, then decays: $(cut -d, -f4 "$dir/w.csv" | tr '\n' ' ')"
token="$tiny --data $dir/shard99 --vocab 61 --seq 12 --steps 1 --batch 1" # 99 is in the 6th sequence of 10, which --shuffle puts first
try 0 '' $token
try 2 'holds token 99, but --vocab is 61; use --vocab 100' $token --shuffle on
try 0 '' $tiny --data "$dir/text" --val "$dir/text" --eval-every 2 --peak-tflops 1e-3 --log-csv "$dir/v.csv"
grep -Eq 'tok/s \| mfu [0-9]+\.[0-9]% \| comm' "$dir/out" && [ "$(grep -c '^eval' "$dir/out")" = 2 ]
report $? "--peak-tflops shows the mfu, --eval-every 2 the validation loss after steps 2 and 3"
awk -F, 'NR==1{for(i=1;i<=NF;i++){if($i=="mfu")m=i;if($i=="val_loss")v=i}} NR>1{good+=($m>0)+(($v>0)==(NR>2))} END{exit good!=6}' "$dir/v.csv"
report $? "the CSV has the columns val_loss and mfu"
# ---- 1-bit Adam: invalid settings; a loss near Adam's with a fraction of the bytes
try 2 'complete optimizer state; use --zero 0, not 1$' --optimizer onebit-adam --zero 1 --ranks 2
try 2 'use --reduce fixed$' --optimizer onebit-adam --reduce tree --ranks 2
try 2 'freeze-steps 0' --optimizer onebit-adam --freeze-steps 0
try 2 'freeze-steps 3 needs --optimizer onebit-adam, not adamw' --freeze-steps 3
seq 20000 | awk '{ printf "%s ", $1 * $1 % 997 } END { print "" }' >"$dir/squares"
for x in adam onebit-adam; do
    try 0 '' --data "$dir/squares" --layers 1 --width 32 --heads 2 --seq 32 --ranks 4 --steps 120 --warmup 10 --lr 5e-3 \
        --optimizer $x --log-csv "$dir/$x.csv"
done
# the default is to freeze after a quarter of the steps: row 31 is the last with uncompressed gradients
paste -d, <(cut -d, -f2,13 "$dir/adam.csv") <(cut -d, -f2,13 "$dir/onebit-adam.csv") | awk -F, 'NR > 101 { a += $1; b += $3 }
    NR > 1 && (NR <= 31 ? $4 != $2 : 15 * $4 > $2 || $4 == 0) { bad++ }
    END { print b / a; exit !(NR == 121 && !bad && b < 1.03 * a && b > 0.97 * a) }' >"$dir/err"
report $? "1-bit Adam's loss is within 3% of Adam's, and it sends less than 1/15 of Adam's bytes"

# ---- Muon: every layout has the losses of one rank; AdamW has the embeddings, the head and the biases
try 2 'use --offload-optim none and --offload-params none$' --optimizer muon --offload-optim cpu
bad=0 n=0
for model in "" "--arch llama --experts 2 --heads 2 --tie off"; do
    try 0 '' $tiny $model --data "$dir/text" --batch 12 --ranks 1 --optimizer muon --lr 0.01 --steps 5 --dtype f64 --log-csv "$dir/one.csv" \
        --save "$dir/muon"
    grep -aq '"v.wte.weight"' "$dir"/muon/step-5/optim.safetensors && ! grep -aq '"v.h.0.attn.q.weight"' "$dir"/muon/step-5/optim.safetensors &&
        grep -aq '"m.h.0.attn.q.weight"' "$dir"/muon/step-5/optim.safetensors && grep -aq '"v.ln_f.weight"' "$dir"/muon/step-5/optim.safetensors
    report $? "--optimizer muon $model: AdamW has the embeddings and gains, Muon the matrices"
    rm -r "$dir/muon"
    for x in "--dp 2 --zero 1" "--dp 2 --zero 3" "--tp 2" "--pp 2" ${model:+"--ep 2 --zero 2" "--dp 2 --tp 2 --ep 2 --expert-tp 2 --zero 1"}; do
        n=$((n + 1))
        timeout $((60 * SLOW)) "$B/train_gpt" $tiny $model --data "$dir/text" --batch 12 $x --quiet --optimizer muon --lr 0.01 --steps 5 \
            --dtype f64 --log-csv "$dir/p.csv" >"$dir/err" 2>&1 || bad=1
        paste -d, <(cut -d, -f1-24 "$dir/p.csv") "$dir/one.csv" | awk -F, 'NR > 1 { rows++; d = $2 - $26; if (d < 0) d = -d
                if (d > 1e-11 * $26) { bad = 1; print "step " $1 ": loss " $2 " " $26 } }
            END { exit bad || rows != 5 }' || { bad=1; echo "  differs: $model $x"; }
    done
done
report "$bad" "$n layouts have the losses of one rank with --optimizer muon"

# ---- --steps 0 trains nothing: it validates, generates and writes the model, with --model or --resume and without --data
with="--layers 1 --width 16 --heads 2 --seq 16 --batch 4 --val $dir/text --generate 9"
shown() { sed -n 's/^eval *[0-9]*.[0-9]* | //p;/^---$/,/^---$/p' "$dir/out"; }
try 0 '' $with --data "$dir/text" --steps 3 --ema 0.5 --save-model "$dir/eval" --save "$dir/evalck"
shown >"$dir/want"
for x in "--model $dir/eval" "--model $dir/eval --dp 2 --zero 3" "--model $dir/eval --pp 2 --tp 2" "--resume $dir/evalck --ema 0.5" \
    "--model $dir/eval --data $dir/text"; do
    try 0 '' $with --steps 0 $x --save-model "$dir/eval2"
    shown | cmp -s - "$dir/want" && ! grep -q '^step' "$dir/out" && cmp -s "$dir/eval/model.safetensors" "$dir/eval2/model.safetensors"
    report $? "--steps 0 $x: the validation, text and weights of the run that trained: $(shown | head -n 1)"
done
try 0 '' --model $g/hf_gpt2 --steps 0 --generate 3
grep -Eq '^[0-9]+ [0-9]+ [0-9]+$' "$dir/out"
report $? "--steps 0 with a model of other tokens than bytes prints ids"
try 2 'steps 0 trains nothing: it needs --model or --resume' --steps 0 --generate 3
try 2 'steps 0 has nothing to do without --val, --generate or --save-model' --steps 0 --model $g/hf_gpt2
try 2 'save is for a run with steps' --steps 0 --model $g/hf_gpt2 --generate 3 --save "$dir/none"

# ---- the trace, read by Python's JSON parser
try 0 '' $tiny --layers 2 --data "$dir/text" --ranks 2 --zero 1 --recompute full --trace "$dir/t.json" --log-csv "$dir/t.csv"
grep -q "^trace   $dir/t.json" "$dir/out"
report $? "the run prints the path of its trace"
try 0 '' $tiny --layers 2 --data "$dir/text" --ranks 2 --zero 1 --recompute full --log-csv "$dir/u.csv"
cut -d, -f1-3,7,8,9,13 "$dir/u.csv" >"$dir/want"
cut -d, -f1-3,7,8,9,13 "$dir/t.csv" | cmp -s - "$dir/want"
report $? "the losses, norms, memory and bytes of a run with a trace are those of one without, to the last digit"
if command -v python3 >/dev/null; then
    python3 - "$dir/t.json" >"$dir/err" 2>&1 <<'END'
import json, sys
def number(text): raise ValueError(text)
doc = json.load(open(sys.argv[1], encoding="utf-8"), parse_constant=number)
tracks, names, arrows = {}, {}, {}
for e in doc["traceEvents"]:
    if e["ph"] == "X": tracks.setdefault((e["pid"], e["tid"]), []).append(e)
    if e["ph"] == "M" and e["name"] == "process_name": names[e["pid"]] = e["args"]["name"]
assert names == {0: "rank 0", 1: "rank 1"}, names
assert doc["otherData"]["lost"] == [0, 0]
for key, track in tracks.items():
    open_ends = []
    for e in sorted(track, key=lambda e: (e["ts"], -e["dur"])):
        begin, end = round(e["ts"] * 1000), round(e["ts"] * 1000) + round(e["dur"] * 1000)
        while open_ends and open_ends[-1] <= begin: open_ends.pop()
        assert not open_ends or end <= open_ends[-1], (key, e)
        open_ends.append(end)
for rank in 0, 1:
    compute = [e["name"] for e in tracks[rank, 0]]
    comm = [e["name"] for e in tracks[rank, 1]]
    for name, times in {"step 1": 1, "step 3": 1, "read data": 3, "optimizer": 3, "F 0 block 1": 3, "B 0": 3,
                        "F 0 block 2 again": 3}.items():
        assert compute.count(name) == times, (rank, name, compute.count(name))
    assert comm.count("all-gather dp") >= 3 and comm.count("reduce-scatter dp") >= 3, comm
    assert sum(e["args"]["bytes"] for e in tracks[rank, 1]) > 0
END
    report $? "the trace is JSON, nests, and shows steps, blocks and operations of both ranks"
else
    skipped=1
    echo "SKIP test_cli: python3 is not installed: the trace is not read by Python (test_trace reads it with dt's parser)"
fi
try 0 '' --help
grep -q -- '--log-csv' "$dir/out" && grep -q '^Not in this build: --report' "$dir/out" && ! grep -q '^  --report ' "$dir/out"
report $? "--help lists the options, and those of other builds in a few lines"
try 0 '' --print-config --width 64 --heads 2
grep -Eq '"width": *64' "$dir/out"
report $? "--print-config prints an option that was given"
# ---- layouts: the same losses, and a dry run that reports the memory and traffic of the real run
layout="--layers 2 --width 24 --heads 4 --kv-heads 2 --seq 24 --batch 4 --steps 3 --dtype f64 --dropout 0.2 --quiet"
bad=0
for x in "--ranks 1" "--tp 4" "--tp 2 --sp on" "--tp 2 --sp on --tp-overlap 3" "--cp 3" "--cp 2 --cp-kind zigzag" "--cp 2 --cp-kind allgather" \
    "--cp 2 --cp-kind ulysses" "--dp 2 --tp 2 --cp 2 --cp-kind zigzag --sp on --zero 1"; do
    timeout $((60 * SLOW)) "$B/train_gpt" $layout --val "$dir/text" --generate 8 $x --log-csv "$dir/layout.csv" \
        >"$dir/layout.txt" 2>&1 || bad=1
    cut -d, -f2,3,18 "$dir/layout.csv" | awk -F, 'NR > 1 { printf "%.11g %.11g %.11g\n", $1, $2, $3 }' >"$dir/figures"
    [ -f "$dir/one" ] || { cp "$dir/figures" "$dir/one"; cp "$dir/layout.txt" "$dir/one.txt"; }
    cmp -s "$dir/figures" "$dir/one" && cmp -s "$dir/layout.txt" "$dir/one.txt" || { bad=1; echo "  differs: $x"; }
done
report "$bad" "every layout has the losses, norms, validation losses and generated bytes of one rank"
for x in "--ranks 1" "--dp 2 --zero 3 --offload-optim $dir --offload-params $dir" \
    "--dp 2 --tp 2 --cp 2 --cp-kind zigzag --sp on --zero 1" "--tp 2 --tp-overlap 4 --sp on --cp 3" \
    "--tp 2 --cp 3"; do
    timeout $((60 * SLOW)) "$B/train_gpt" $layout $x --log-csv "$dir/layout.csv" >/dev/null 2>&1
    timeout $((60 * SLOW)) "$B/train_gpt" $layout $x --dry-run >"$dir/dry" 2>&1
    awk -F, 'NR == 2 || NR == 3 { for (i = 7; i <= 12; i++) if ($i > most[i]) most[i] = $i }
        NR == 3 { printf "  sends, bytes   dp %d  tp %d  cp %d  pp 0  ep 0\n  needs, bytes   params %d  grads %d", $13, $14, $15,
            most[7], most[8]; printf "  optim %d  acts %d  comm %d  all at once %d\n", most[9], most[10], most[11], most[12] }' \
        "$dir/layout.csv" \
        >"$dir/want"
    grep -E '^  (sends|needs)' "$dir/dry" | cmp -s - "$dir/want"
    report $? "--dry-run $x: $(grep -E '^  (sends|needs)' "$dir/dry" | tr '\n' ' '), the real run $(tr '\n' ' ' <"$dir/want")"
done
grep -q '^   5  1  2  1  4 5' "$dir/dry" || grep -q '^   5   0  2  1  4 5  *1 3 5' "$dir/dry"
report $? "--dry-run prints the groups of rank 5"
# ---- memory: the formula compared with the account, and a limit
formula() { awk '$1=="params"||$1=="grads"||$1=="optim"{n++; good+=($2==$4)} END{exit good!=3||n!=3}' "$1"; }
figure() { awk -v c="$1" -v f="$2" '$1==c{print $f; exit}' "$dir/dry"; }
needs="--layers 2 --width 40 --heads 4 --seq 32 --batch 24 --data $dir/text --steps 3"
for x in "--dp 1" "--dp 2 --zero 1" "--dp 3 --zero 1" "--dp 4 --zero 1 --dtype bf16" "--dp 8 --zero 1 --dtype f64" "--dp 4 --dtype f16" \
    "--dp 2 --tp 2 --cp 2 --zero 1" "--dp 2 --optimizer sgd" "--dp 2 --zero 1 --optimizer sgd --momentum 0.9 --dtype bf16" \
    "--dp 4 --zero 1 --reduce tree --accum 3" "--dp 2 --zero 1 --optimizer muon" "--dp 4 --zero 2 --offload-optim $dir" "--dp 2 --zero 3 --offload-params cpu" \
    "--dp 4 --zero 3 --dtype bf16 --offload-optim $dir --offload-params $dir" \
    "--dp 4 --zero 2 --dtype bf16 --grad-dtype bf16" "--dp 2 --dtype f16 --grad-dtype f16 --reduce tree --accum 2" \
    "--tp 4 --cp 2 --expert-tp 2 --experts 4 --zero 1"; do
    timeout $((60 * SLOW)) "$B/train_gpt" $needs $x --dry-run >"$dir/dry" 2>&1
    formula <(sed -n '/live at the end/,$p' "$dir/dry")
    report $? "--dry-run $x: params, grads and optim equal the formula: $(sed -n '/live at the end/,$p' "$dir/dry" | grep -E '^  (params|grads|optim)' | tr -s ' ' | tr '\n' ' ')"
done
timeout $((60 * SLOW)) "$B/train_gpt" $needs --dp 4 --zero 1 --dry-run | sed -n '/live at the end/,$p' >"$dir/dry"
P=$((288 * 40 + 2 * (12 * 40 * 40 + 13 * 40) + 2 * 40)) # wte and wpe (256 + 32) x 40, 2 layers, the last norm
[ "$(grep -o 'P = [0-9]*' "$dir/dry")" = "P = $P" ] && [ "$(figure optim 4)" -gt $((8 * P / 4)) ] && [ "$(figure optim 4)" -lt $((8 * P / 4 + 60000)) ]
report $? "the formula's parameters are $P, its optimizer state is a quarter of 8 P: $(grep -o 'P = [0-9]*' "$dir/dry"), $(figure optim 4)"
all=$(sed -n 's/^  all at once *[0-9]* *\([0-9]*\)$/\1/p' "$dir/dry")
try 0 '' $needs --dp 4 --zero 1 --mem-limit "$all"
[ ! -s "$dir/err" ] && [ "$(grep -c '^step' "$dir/out")" = 3 ] && [ "$(grep -cv '^step\|^average\|^dt \|^launch\|^model\|^batch\|^data\|^options\|^  \|^$' "$dir/out")" = 0 ]
report $? "a limit of exactly the $all bytes needed: the run prints nothing more than without"
echo kept >"$dir/kept.csv"
try 2 "mem-limit $((all - 1)): rank [0-3]: .*: [0-9]+ bytes of class [a-z]+ were refused; [0-9]+ bytes are in use of a limit of $((all - 1))" \
    $needs --dp 4 --zero 1 --mem-limit $((all - 1)) --log-csv "$dir/kept.csv"
[ ! -s "$dir/out" ] && [ "$(cat "$dir/kept.csv")" = kept ] && grep -q "These settings need $all bytes per rank" "$dir/err" && \
    [ "$(grep -cE '^  (params|grads|optim|acts|comm|host|temp|all at once) +[0-9]+ +[0-9]+$' "$dir/err")" = 8 ]
report $? "a limit of one byte less is refused before anything is written, with the table of classes"
try 2 '' $needs --dp 4 --mem-limit 1600K
cp "$dir/err" "$dir/advice"
n=0
sed -n 's/^  \([0-9]*\) bytes per rank with \(.*\)$/\1 \2/p' "$dir/advice" >"$dir/settings"
mkdir "$dir/offloaded"
while read -r bytes settings; do
    n=$((n + 1))
    settings=${settings//DIR/$dir\/offloaded}
    timeout $((60 * SLOW)) "$B/train_gpt" $needs --dp 4 $settings --mem-limit "$bytes" >/dev/null 2>"$dir/err"
    [ $? = 0 ] && [ "$bytes" -le $((1600 * 1024)) ]
    report $? "the advice $settings runs in its $bytes bytes"
    ! timeout $((60 * SLOW)) "$B/train_gpt" $needs --dp 4 $settings --mem-limit $((bytes - 1)) >/dev/null 2>&1
    report $? "the advice $settings does not run in one byte less"
done <"$dir/settings"
[ "$n" -ge 2 ] && [ "$n" -le 12 ] && head -n 1 "$dir/settings" | grep -q '^[0-9]* --zero [123] '
report $? "at least two other settings fit: $(tr '\n' ';' <"$dir/settings")"
try 2 'bytes of class params were refused' $needs --mem-limit 64K
grep -q 'none of the [0-9]* settings that were tried' "$dir/err" && grep -q 'The smallest setting that was tried needs [0-9]* bytes per rank, with --zero' "$dir/err"
report $? "if no setting fits, the smallest need that was tried is printed"
deep="--layers 8 --width 64 --heads 4 --seq 32 --batch 4 --data $dir/text --steps 2 --dp 4 --mem-limit 5600K"
try 2 'These settings need [0-9]* bytes per rank' $deep
grep -q '^  [0-9]* bytes per rank with --zero 3' "$dir/err"
report $? "--zero 0 needs more than the limit, and the advice has --zero 3: $(grep -m 1 'with --zero 3' "$dir/err")"
try 0 '' $deep --zero 3
mkdir "$dir/disk" # 2 + 4 + 12 bytes of each parameter, sharded over 2 ranks, in a tenth of that memory
deep="--layers 128 --width 96 --heads 4 --seq 16 --batch 2 --micro-batch 1 --dp 2 --dtype bf16 --recompute full --zero 3"
deep="$deep --data $dir/text --steps 2"
timeout $((60 * SLOW)) "$B/train_gpt" $deep --dry-run >"$dir/dry" 2>&1
state=$(awk '$1=="params"||$1=="grads"||$1=="optim"{n+=$2} END{print n}' "$dir/dry")
try 0 '' $deep --offload-optim "$dir/disk" --offload-params "$dir/disk" --mem-limit $((state / 10)) --log-csv "$dir/disk.csv"
timeout $((60 * SLOW)) "$B/train_gpt" $deep --log-csv "$dir/memory.csv" >/dev/null 2>&1
cut -d, -f1-3 "$dir/disk.csv" | cmp -s - <(cut -d, -f1-3 "$dir/memory.csv") && rmdir "$dir/disk"
report $? "a state of $state bytes a rank trains in a tenth of that, as in memory, and leaves nothing on the disk"
try 1 'rank [0-9]+: .* of a limit of' $needs --dp 4 --zero 1 --mem-limit "$all" --generate 2000
# ---- EMA of the weights and outlier steps
for x in "ema --ema 0.5 --dp 2 --zero 1" "ema3 --ema 0.5 --dp 2 --zero 3" "plain --dp 2"; do
    try 0 '' $tiny --data "$dir/text" --val "$dir/text" --save-model "$dir/of_${x%% *}" ${x#* }
    grep -o 'val loss [0-9.]*' "$dir/out" >"$dir/val_${x%% *}"
done
cmp -s "$dir/of_ema/model.safetensors" "$dir/of_ema3/model.safetensors" && cmp -s "$dir/val_ema" "$dir/val_ema3" &&
    ! cmp -s "$dir/of_ema/model.safetensors" "$dir/of_plain/model.safetensors" && ! cmp -s "$dir/val_ema" "$dir/val_plain"
report $? "--ema validates and exports the EMA, alike with --zero 1 and --zero 3"
try 0 '' ${tiny% *} 140 --data "$dir/text" --dp 2 --lr 0.1 --skip-norm-z 0.01
grep -Eq '^step +1[23][0-9]/140 .*[|] skipped: norm z-score [0-9.]+ .1 so far.$' "$dir/out"
report $? "--skip-norm-z says which steps it skipped"
try 0 '' --layers 1 --width 16 --heads 2 --seq 16 --batch 2 --data "$dir/text" --dtype f64 --experts 2 --top-k 1 --router-bias 0.01 --steps 140 \
    --skip-norm-z 1e-9 --save "$dir/outlier" --save-every 1
at=$(sed -n 's/^step *\([0-9]*\).* skipped: .*/\1/p' "$dir/out" | head -n 1)
cmp -s "$dir/outlier/step-$((at - 1))/model.safetensors" "$dir/outlier/step-$at/model.safetensors"
report $? "step $at, an outlier, changes neither the weights nor the router bias"
rm -r "$dir/outlier"
try 2 'ema 1:' --ema 1
try 0 '' --print-config --mem-limit 3M
grep -q '"mem-limit": 3145728' "$dir/out"
report $? "--mem-limit 3M is 3145728 bytes"
try 2 'mem-limit 3T: not a whole number' --mem-limit 3T
try 2 'mem-limit 3MB: not a whole number' --mem-limit 3MB
try 2 'mem-limit 0' --mem-limit 0
try 2 'mem-limit 99999999999G' --mem-limit 99999999999G
try 2 'one process' --dry-run --backend tcp --rank 0 --ranks 2
try 0 '' --list-refused
report $? "--list-refused"
missing=
for rule in 'onebit-adam: zero 0' 'offload-params needs zero 3' '--model without --experts' 'no dtype f64, not procs' \
    '--resume: the options of the saved run'; do
    grep -q -e "$rule" "$dir/out" || missing="$missing '$rule'"
done
[ -z "$missing" ]
report $? "--list-refused has the rules:$missing"

finish
