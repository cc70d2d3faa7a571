#!/usr/bin/env bash
# test_config.sh - train_gpt --config: its own keys and DeepSpeed's, their precedence, and invalid files
#
# A file means the same as options: --print-config prints the same for both. The three DeepSpeed files are printed in
# tutorials; one is complete there, two are completed here ("..." and commas before a bracket are not JSON).
cd "$(dirname "$0")/../.." || exit 1
. tests/support/report.sh
needs_train_gpt
tiny="--layers 1 --width 16 --heads 2 --seq 16 --data $dir/text"

same() { # same JSON "ARGS" ARGS...: the file with the options of "ARGS" means the same as the options ARGS...
    local beside=$2
    printf '%s\n' "$1" >"$dir/config.json"
    shift 2
    timeout $((60 * SLOW)) "$B/train_gpt" $tiny --config "$dir/config.json" $beside --print-config >"$dir/got" 2>"$dir/err" &&
        timeout $((60 * SLOW)) "$B/train_gpt" $tiny "$@" --print-config >"$dir/want" 2>>"$dir/err" && cmp "$dir/got" "$dir/want" >>"$dir/err" 2>&1
    report $? "$(tr -s ' \n' ' ' <"$dir/config.json") $beside: differs from $*"
}

refused() { # refused LINE:COLUMN PATTERN JSON
    printf '%s\n' "$3" >"$dir/config.json"
    timeout $((60 * SLOW)) "$B/train_gpt" $tiny --config "$dir/config.json" --print-config >"$dir/out" 2>"$dir/err"
    [ $? = 2 ] && [ "$(grep -c 'error: ' "$dir/err")" = 1 ] && grep -Eq -- "^error: (--config: )?$dir/config.json:$1: $2" "$dir/err"
    report $? "refused at $1 with '$2': $3"
}

# ---- DeepSpeed's keys ---------------------------------------------------------------------------------------------

stage3='{
  "train_batch_size": 16,
  "fp16": { "enabled": true },
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": { "device": "cpu" },
    "offload_param": { "device": "cpu" }
  },
  "gradient_accumulation_steps": 4,
  "gradient_checkpointing": true
}'
onebit='{
    "optimizer": {
        "type": "OneBitAdam",
        "params": {
            "lr": 0.001, "betas": [ 0.8, 0.999 ], "eps": 1e-8, "weight_decay": 3e-7,
            "freeze_step": 400, "cuda_aware": false, "comm_backend_name": "nccl"
        }
    }
}'
adamw='{
    "zero_optimization": { "stage": 3 },
    "fp16": { "enabled": true },
    "optimizer": {
        "type": "AdamW",
        "params": { "lr": 0.001, "betas": [ 0.8, 0.999 ], "eps": 1e-8, "weight_decay": 3e-7 }
    }
}'
adam_args="--lr 0.001 --beta1 0.8 --beta2 0.999 --eps 1e-8 --weight-decay 3e-7"
stage3_args="--batch 16 --accum 4 --dtype f16 --zero 3 --offload-optim cpu --offload-params cpu --recompute full"
same "$stage3" "--ranks 2" --ranks 2 $stage3_args
same "$onebit" "--steps 500" --steps 500 --optimizer onebit-adam $adam_args --freeze-steps 400
same "$adamw" "--ranks 2" --ranks 2 --zero 3 --dtype f16 --optimizer adamw $adam_args

losses() { # losses NAME ARGS...: of 3 steps
    local name=$1
    shift
    timeout $((60 * SLOW)) "$B/train_gpt" $tiny --ranks 2 "$@" --log-csv "$dir/$name.csv" >"$dir/$name.out" 2>"$dir/err" &&
        [ "$(wc -l <"$dir/$name.csv")" = 4 ] && cut -d, -f1-4 "$dir/$name.csv" >"$dir/$name.losses"
}
for name in stage3 onebit adamw; do
    printf '%s\n' "${!name}" >"$dir/$name.json"
    case $name in
    stage3) args="$stage3_args --steps 3" ;;
    onebit) args="--optimizer onebit-adam $adam_args --freeze-steps 400 --steps 500 --stop-at 3" ;;
    adamw) args="--zero 3 --dtype f16 $adam_args --steps 3" ;;
    esac
    losses file --config "$dir/$name.json" $(grep -o -- '--steps.*' <<<"$args") && losses options $args &&
        cmp -s "$dir/file.losses" "$dir/options.losses"
    report $? "$name: the file has the losses, norms and rates of its options"
done
printf '%s\n' "$onebit" >"$dir/onebit.json"
losses file --config "$dir/onebit.json" --steps 500 --stop-at 3
grep -q "^config  $dir/onebit.json   ignored keys: optimizer.params.comm_backend_name optimizer.params.cuda_aware$" "$dir/file.out"
report $? "ignored keys are printed"

same '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "gradient_clipping": 0.5}' "--ranks 2" \
    --ranks 2 --micro-batch 2 --accum 3 --clip 0.5
same '{"bf16": {"enabled": true}, "fp16": {"enabled": false}, "zero_optimization": {"stage": 1, "overlap_comm": false,
       "reduce_bucket_size": 5e8}}' "" --dtype bf16 --zero 1 --overlap off
same '{"fp16": {"enabled": true, "loss_scale": 0, "hysteresis": 2}}' "" --dtype f16 --loss-scale dynamic \
    --loss-scale-hysteresis 2
same '{"fp16": {"enabled": true, "initial_scale_power": 12, "loss_scale_window": 500, "min_loss_scale": 4}}' "" --dtype f16 \
    --loss-scale-init 4096 --loss-scale-window 500 --loss-scale-min 4
same '{"fp16": {"enabled": false, "initial_scale_power": 12, "hysteresis": 3}}' ""
same '{"pipeline": {"stages": 2, "partition": "uniform", "activation_checkpoint_interval": 1, "seed_layers": true}}' "" \
    --pp 2 --partition even --recompute full:1
same '{"pipeline": {"stages": "auto", "partition": "best", "activation_checkpoint_interval": 0}}' "--pp 2" --pp 2 --partition cost
same '{"train_batch_size": "auto", "gradient_clipping": "auto", "fp16": {"enabled": "auto", "loss_scale": 0},
       "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}}' \
    "--batch 8 --lr 0.5" --batch 8 --lr 0.5 --zero 2 --optimizer adamw
same '{"fp16": {"enabled": true, "loss_scale": 128}}' "" --dtype f16 --loss-scale 128
same '{"fp16": {"enabled": false, "loss_scale": 128}}' ""
same "{\"zero_optimization\": {\"stage\": 3, \"offload_optimizer\": {\"device\": \"nvme\", \"nvme_path\": \"$dir\"},
       \"offload_param\": {\"device\": \"none\"}}}" "" --zero 3 --offload-optim "$dir"
same '{"optimizer": {"type": "Adam", "params": {"lr": 0.01}}}' "" --lr 0.01 --optimizer adamw
same '{"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}}' "" --optimizer adam
same '{"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}' "" --optimizer sgd --lr 0.1 --momentum 0.9
same '{"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 7, "warmup_type": "linear"}}}' \
    "" --lr-schedule constant --lr 0.01 --warmup 7
same '{"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 90, "warmup_num_steps": 7}}}' "" \
    --lr-schedule linear --lr-steps 90 --warmup 7 --min-lr-ratio 0
same '{"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 90, "cos_min_ratio": 0.01}}}' "" \
    --lr-schedule cosine --lr-steps 90 --min-lr-ratio 0.01
for lr in 0.01 0.02; do # the scheduler's rate counts, whatever the order
    same "{\"optimizer\": {\"params\": {\"lr\": $lr}}, \"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_max_lr\": 1e-2, \"warmup_min_lr\": 0}}}" \
        "" --lr-schedule constant --lr 0.01
    same "{\"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_max_lr\": 1e-2}}, \"optimizer\": {\"params\": {\"lr\": $lr}}}" \
        "" --lr-schedule constant --lr 0.01
done
same '{"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}, "optimizer": {"params": {"lr": 0.03}}}' "" \
    --lr-schedule constant --lr 0.03
same '{"gradient_checkpointing": false, "steps_per_print": 10}' ""

# ---- its own keys -------------------------------------------------------------------------------------------------

same '{"batch": 32, "lr": 1e-2, "tie": false, "mem-limit": "64M", "capacity": 1.25, "experts": 4, "quiet": true, "rank": null}' \
    "" --batch 32 --lr 0.01 --no-tie --mem-limit 64M --capacity 1.25 --experts 4 --quiet
same '{"zero": 2, "dtype": "bf16", "optimizer": "sgd", "train_batch_size": 8}' "--lr 0.5" --zero 2 --dtype bf16 \
    --optimizer sgd --batch 8 --lr 0.5
same '{"lr": 0.1, "batch": 8}' "--lr 0.2" --lr 0.2 --batch 8
same '{}' ""
printf '{"data": "%s"}' "$dir/none" >"$dir/config.json"
"$B/train_gpt" $tiny --config "$dir/config.json" --print-config 2>"$dir/err" | grep -q "\"data\": \"$dir/text\""
report $? "the command line overrides the file"
"$B/train_gpt" --print-config $tiny --ranks 4 --tp 2 --batch 24 --lr 3e-4 --warmup 5 --dtype bf16 --zero 1 >"$dir/printed" 2>"$dir/err"
"$B/train_gpt" --config="$dir/printed" --print-config 2>>"$dir/err" | cmp -s - "$dir/printed"
report $? "--config reads the output of --print-config"

# ---- what the printed settings say

settings() { # settings JSON ARGS: the printed settings of a run, in $dir/out
    printf '%s' "$1" >"$dir/config.json"
    shift
    "$B/train_gpt" $tiny --config "$dir/config.json" "$@" --dry-run >"$dir/out" 2>"$dir/err"
}
settings '{"lr": 3e-4, "warmup": 1}' --beta1 0.8
grep -q ' lr 0.0003+' "$dir/out" && grep -q 'warmup 1+' "$dir/out" && grep -q 'beta1 0.8\*' "$dir/out" &&
    grep -Eq 'beta2 0.95( |$)' "$dir/out" && grep -q 'options \* given, + by --config, \$ by the environment' "$dir/out"
report $? "the settings say which of flag, file and default set a value, and 3e-4 is 0.0003"
settings '{"optimizer": {"params": {"lr": 0.5}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}}}'
grep -q "config.json   the scheduler's warmup_max_lr 0.01 counts, not the optimizer's lr 0.5   warmup: linear (DeepSpeed's default is log)$" "$dir/out"
report $? "the settings say which learning rate counts, and the form of the warmup: $(grep ^config "$dir/out")"
settings '{"optimizer": {"params": {"lr": 0.01}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_type": "linear"}}}'
grep -q "config.json$" "$dir/out"
report $? "equal rates and a linear warmup need no note"
offload="\"nvme_path\": \"$dir\"}, \"stage\": 1}, \"steps_per_print\": 10}"
settings "{\"zero_optimization\": {\"offload_optimizer\": {\"device\": \"nvme\", $offload"
grep -q 'ignored keys: steps_per_print$' "$dir/out"
report $? "steps_per_print is ignored"
settings '{"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "wandb": {}}'
grep -q 'config.json   auto keys, left as they are: bf16.enabled train_batch_size   ignored keys: wandb$' "$dir/out"
report $? "auto keys are printed"
settings "{\"zero_optimization\": {\"offload_optimizer\": {\"device\": \"nvme\", $offload"
grep -q 'ignored keys: steps_per_print$' "$dir/out"
report $? "nvme_path is not ignored with device nvme"
settings "{\"zero_optimization\": {\"offload_optimizer\": {\"device\": \"cpu\", $offload"
grep -q 'ignored keys: steps_per_print zero_optimization.offload_optimizer.nvme_path$' "$dir/out"
report $? "nvme_path is ignored with device cpu"

# ---- invalid files ------------------------------------------------------------------------------------------------

refused 1:21 'train_batchsize: unknown key; the nearest is train_batch_size$' '{"train_batchsize": 16}'
refused 1:32 'zero_optimization.stge: unknown key; the nearest is zero_optimization.stage$' '{"zero_optimization": {"stge": 3}}'
refused 2:25 'completely_different: unknown key$' '{
"completely_different": 1}'
refused 1:33 'zero_optimization.stage: --zero 4: the legal values' '{"zero_optimization": {"stage": 4}}'
refused 1:23 'zero_optimization: an object is needed' '{"zero_optimization": 3}'
refused 1:52 'zero_optimization.offload_param.device: "nvme" needs nvme_path' '{"zero_optimization": {"offload_param": {"device": "nvme"}}}'
refused 1:52 'zero_optimization.offload_param.device: "disk": the legal values are none\|cpu\|nvme' '{"zero_optimization": {"offload_param": {"device": "disk"}}}'
refused 1:24 'optimizer.type: "Lamb": the legal values are Adam\|AdamW\|SGD\|OneBitAdam' '{"optimizer": {"type": "Lamb"}}'
refused 1:36 'optimizer.params.betas: two numbers' '{"optimizer": {"params": {"betas": [0.9]}}}'
refused 1:37 'optimizer.params.betas: a number is needed' '{"optimizer": {"params": {"betas": ["a", 0.9]}}}'
refused 1:66 'scheduler.params.warmup_type: "log": the warmup of this program is linear; use "linear"$' \
    '{"scheduler": {"type": "WarmupLR", "params": {"warmup_type":     "log"}}}'
refused 1:65 'scheduler.params.warmup_min_lr: only 0 is possible: the warmup begins at lr / warmup_num_steps$' \
    '{"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr":  1e-5}}}'
refused 1:73 'scheduler.params.warmup_min_ratio: only 0 is possible' \
    '{"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_min_ratio": 0.1}}}'
refused 1:28 'pipeline.partition: "parameters": the legal values are best\|uniform' '{"pipeline": {"partition": "parameters"}}'
refused 1:24 'pipeline.stage: unknown key; the nearest is pipeline.stages' '{"pipeline": {"stage": 2}}'
refused 1:8 'lr: a number is needed' '{"lr": "auto"}'
refused 1:44 'optimizer.params.lr: --lr is given twice' '{"lr": 0.1, "optimizer": {"params": {"lr": 0.2}}}'
refused 1:48 'fp16.enabled: --dtype is given twice' '{"bf16": {"enabled": true}, "fp16": {"enabled":true}}'
refused 1:28 'gradient_checkpointing: true or false' '{"gradient_checkpointing": "yes"}'
refused 1:8 'lr: a number is needed' '{"lr": "x"}'
refused 1:8 'lr: --lr -1: not a number from 0' '{"lr": -1}'
refused 1:11 'steps: --steps 1.5: not a whole number' '{"steps": 1.5}'
refused 1:11 'batch: --batch 1e\+30: not' '{"batch": 1e30}'
refused 1:11 'quiet: true or false' '{"quiet": 1}'
refused 1:11 'dtype: a text is needed' '{"dtype": true}'
refused 1:10 'data: a text is needed' '{"data": ["a", "b"]}'
refused 1:12 'config: a file cannot name another' '{"config": "x"}'
refused 1:12 'report: --report is not available' '{"report": "x"}'
refused 1:1 'the file: an object is needed' '[1]'
refused 1:13 'a key in quotes is needed' '{"steps": 5,}'
refused 1:15 "'a' is there twice" '{"a": 1, "a": 2}'
refused 1:1 '' '...'
refused 2:1 'a value is needed' ''
refused 1:15 'aio: a NUL in a key$' '{"aio\u0000": 1}'
refused 1:15 'lr: a NUL in a key$' '{"lr\u0000x": 0.5}'
refused 1:30 'optimizer.type: a NUL in a key$' '{"optimizer": {"type\u0000": "SGD"}}'
refused 1:24 'optimizer.type: a NUL in a text$' '{"optimizer": {"type": "SGD\u0000x"}}'
a50=$(printf '%050d' 0 | tr 0 a)
refused 1:56 "$a50: unknown key$" "{\"$a50\": 1}"
refused 1:57 "$a50\\.\\.: unknown key: it has 51 bytes, the longest 50$" "{\"${a50}b\": 1}"
refused 1:56 "${a50%a}\\.\\.: unknown key: it has 51 bytes" "{\"${a50%a}é\": 1}"
refused 1:115 "fp16.$a50\\.\\.: unknown key: it has 100 bytes" "{\"fp16\": {\"$a50$a50\": 1}}"
refused 1:29 'zero_optimization.stage: unknown key: nest objects' '{"zero_optimization.stage": 3}'
refused 1:18 'long\\x1ber: unknown key$' '{"long\u001ber": 1}'
refused 1:11 'dtype: --dtype f\\x0a3\\x7f2: the legal' '{"dtype": "f\n3\u007f2"}'
refused 1:10 'data: a text of 4097 bytes; at most 4096 are allowed$' "{\"data\": \"$(printf '%04097d' 0)\"}"
refused 1:8 'lr: a number is needed$' '{"lr": {"peak": 1}}'
"$B/train_gpt" $tiny --config "$dir/nowhere" >"$dir/out" 2>"$dir/err"
[ $? = 2 ] && grep -q "^error: --config: $dir/nowhere: No such file" "$dir/err"
report $? "a missing file is an error"
head -c 2000000 /dev/zero | tr '\0' ' ' >"$dir/config.json"
"$B/train_gpt" $tiny --config "$dir/config.json" >"$dir/out" 2>"$dir/err"
[ $? = 2 ] && grep -q "^error: --config: $dir/config.json" "$dir/err"
report $? "a file that is too large is an error"

finish
