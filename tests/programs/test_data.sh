#!/usr/bin/env bash
# test_data.sh - the data of train_gpt: mixtures, documents, instruction data, epochs, the token cache, generated text
#
# With --lr 0 the loss of a step is the loss of its sequences under the initial weights, so losses show which tokens a
# step reads and which of them count.
cd "$(dirname "$0")/../.." || exit 1
. tests/support/report.sh
needs_train_gpt
tiny="--layers 1 --width 16 --heads 2 --seq 16 --batch 4 --steps 3"
model="--layers 2 --width 32 --heads 4 --dtype f64 --quiet"
g=tests/golden/tokenizer

column() { awk -F, -v name="$1" 'NR==1{for(i=1;i<=NF;i++)if($i==name)c=i} NR>1{print $c}' "$2"; }
log() { # log FILE ARGS...: runs train_gpt and writes its log to FILE
    local file=$1
    shift
    timeout $((60 * SLOW)) "$B/train_gpt" $model "$@" --log-csv "$file" >"$dir/out" 2>"$dir/err" </dev/null ||
        report 1 "train_gpt $model $*: status $?"
}
near() { # near TOLERANCE TEXT A B: the numbers in the files A and B, of which there are as many, are equal
    paste "$3" "$4" | awk -v t="$1" 'NF != 2 { bad = 1 } { d = $1 - $2; if (d < 0) d = -d; if (!(d <= t * $2)) bad = 1 }
        END { exit bad || NR == 0 }'
    report $? "$2: $(head -n 2 "$3" | tr '\n' ' ')and $(head -n 2 "$4" | tr '\n' ' ')"
}

# ---- mixtures: after each sequence every source has its share of them, rounded up or down, in its own order
head -c 700 README.md >"$dir/a"
head -c 400 Makefile >"$dir/b"
head -c 300 LICENSE >"$dir/c"
one="--lr 0 --seq 16 --batch 1"
for x in a b c; do log "$dir/$x.csv" $one --data "$dir/$x" --steps 60; column loss "$dir/$x.csv" >"$dir/$x.loss"; done
for mix in 0.7,0.3 1,1 0.5,0.3,0.2 7,2,1 1,0.001,1.5; do
    files=$dir/a,$dir/b
    [[ $mix = *,*,* ]] && files=$files,$dir/c
    log "$dir/m.csv" $one --data "$files" --data-mix $mix --steps 60
    paste -d, <(column loss "$dir/m.csv") <(column epochs "$dir/m.csv") | awk -F, -v mix=$mix -v dir="$dir" '
        BEGIN { n = split(mix, w, ","); for (i = 1; i <= n; i++) sum += w[i]
            split("43 24 18", S, " "); split("a b c", name, " ") # sequences of each file
            for (i = 1; i <= n; i++) while ((getline x <(dir "/" name[i] ".loss")) > 0) loss[i, ++have[i]] = x }
        { split($2, e, ";"); which = 0
            for (i = 1; i <= n; i++) { c = int(e[i] * S[i] + 0.5); d = c - NR * w[i] / sum
                if (d >= 1 || d <= -1) bad = 1
                if (c > had[i]) { which = i; had[i] = c } }
            if (!which || $1 != loss[which, had[which]]) bad = 1 }
        END { exit bad || NR != 60 }'
    report $? "--data-mix $mix: each prefix has its share of each file, in the order of the file"
done
log "$dir/m.csv" $one --data "$dir/a" --shuffle on --steps 86 # two epochs
column loss "$dir/m.csv" | head -n 43 >"$dir/have"
column loss "$dir/m.csv" | tail -n 43 >"$dir/want"
! cmp -s "$dir/have" "$dir/want" && cmp -s <(sort "$dir/have") <(sort "$dir/want")
report $? "each epoch has all sequences, in another order"
log "$dir/m.csv" --seq 16 --batch 6 --data "$dir/a,$dir/b,$dir/c" --data-mix 0.5,0.3,0.2 --shuffle on --steps 9
column loss "$dir/m.csv" >"$dir/want"
for x in "--dp 2" "--tp 2 --pp 2 --accum 3" "--dp 3 --cp 2 --zero 3"; do
    log "$dir/n.csv" --seq 16 --batch 6 --data "$dir/a,$dir/b,$dir/c" --data-mix 5,3,2 --shuffle on --steps 9 $x
    column loss "$dir/n.csv" >"$dir/have"
    near 1e-12 "a shuffled mixture with $x" "$dir/have" "$dir/want"
done
run="$model --seq 16 --batch 6 --data $dir/a,$dir/b --data-mix 2,1 --shuffle on --steps 9"
try 0 '' $run --stop-at 4 --save "$dir/ckpt" --log-csv "$dir/r.csv"
try 0 '' $run --resume "$dir/ckpt" --log-csv "$dir/r.csv"
try 0 '' $run --log-csv "$dir/n.csv"
cmp -s <(cut -d, -f1-4 "$dir/r.csv") <(cut -d, -f1-4 "$dir/n.csv")
report $? "a resumed mixture has every bit"
try 2 'data-mix was 2,1, and is 1,1 now: that would be a different' $run --data-mix 1,1 --resume "$dir/ckpt"
# other data, other tokens: refused by name, while data that have grown are the same data
head -c 700 Makefile >"$dir/z"
try 2 'source 1 of --data, .*/z, begins with other data than in the saved run: give the same files' ${run/$dir\/a/$dir/z} --resume "$dir/ckpt"
try 2 'source 1 of --data, .*/b, had 700 tokens, and has 400 now: give the same files in the same order' \
    ${run/$dir\/a,$dir\/b/$dir/b,$dir/a} --resume "$dir/ckpt"
run2="$model --seq 16 --batch 4 --steps 4 --data $dir/a"
try 0 '' $run2 --tokenizer $g/qwen.json --stop-at 2 --save "$dir/tok"
cp $g/qwen.json "$dir/same.json"
try 0 '' $run2 --tokenizer "$dir/same.json" --resume "$dir/tok"
try 2 'the saved run had --tokenizer .*qwen.json, and this run has another one, --tokenizer .*gpt2.json: use the saved run.s' \
    $run2 --vocab 335 --tokenizer $g/gpt2.json --resume "$dir/tok"
try 2 'the saved run had --tokenizer .*qwen.json, and this run has none' $run2 --vocab 335 --resume "$dir/tok"
try 2 'vocab was 335, and is 256 now: .*; it had --tokenizer .*qwen.json' $run2 --resume "$dir/tok"
cp "$dir/a" "$dir/a1" && head -c 900 README.md >"$dir/a"
try 0 '' $run2 --tokenizer $g/qwen.json --resume "$dir/tok"
{ echo X; cat "$dir/a1"; } >"$dir/a"
try 2 'source 1 of --data, .*/a, begins with other data' $run2 --tokenizer $g/qwen.json --resume "$dir/tok"
mv "$dir/a1" "$dir/a"
try 2 'documents was off, and is on now' $run --documents on --resume "$dir/ckpt"
try 2 'data-mix 1,2,3 has 3 weights; separate as many' --data "$dir/a,$dir/b" --data-mix 1,2,3
try 2 'data-mix 1,2 has 2 weights' --data "$dir/a,$dir/b,$dir/c" --data-mix 1,2
try 2 'data-mix 1,2 needs --data' --data-mix 1,2
try 2 'sum of 2000001; at most 1000000 is allowed: round them' --data "$dir/a,$dir/b" --data-mix 2,0.000001
for x in 1, ,1 1:2 1,-1 1,0 1,x 1,1e10 0.00000001,1 ''; do try 2 'data-mix' --data "$dir/a,$dir/b" --data-mix "$x"; done
try 2 'nothere: No such file' --data "$dir/a,$dir/nothere" --data-mix 1,2
try 2 'a,.*/b: No such file or directory; a list of files needs --data-mix W,W' --data "$dir/a,$dir/b"
try 2 'model.safetensors has weights, not text: --model reads them' --data tests/golden/hf_gpt2
try 2 'would overwrite .*/b, which --data reads' $run --log-csv "$dir/b"

# ---- epochs
try 0 '' $model --seq 16 --batch 4 --data "$dir/a,$dir/b" --data-mix 1,1 --epochs 2 --print-config
grep -q '"steps": 34,' "$dir/out" # 2 x (43 + 24) sequences
report $? "--epochs 2 of 67 sequences in batches of 4 are 34 steps"
cp "$dir/out" "$dir/e.json"
try 0 '' --config "$dir/e.json" --print-config
cmp -s "$dir/out" "$dir/e.json"
report $? "what --print-config prints with --epochs is a --config"
try 0 '' $tiny --seq 16 --batch 4 --data "$dir/b" --epochs 1.5 --steps 9
[ "$(grep -c '^Epoch 1 Step' "$dir/out")" = 6 ] && [ "$(grep -c '^Epoch 2 Step  *[789]/9 ' "$dir/out")" = 3 ]
report $? "the step lines have the epoch"
try 2 'epochs 1 is 6 steps, but --steps is 3' $tiny --data "$dir/b" --epochs 1
try 0 '' $model --seq 16 --batch 8 --batch-ramp 4:4:12 --data "$dir/b" --epochs 1 --print-config
grep -q '"steps": 5,' "$dir/out" # 4 + 4 + 4 + 8 + 8 are the first that are at least 24
report $? "--epochs follows --batch-ramp"

# ---- documents: packed into one sequence, each has the loss that it has alone
printf 'the first document\n\n' >"$dir/d1"
printf 'a second\n\n' >"$dir/d2"
printf 'and here is the third one of them\n\n' >"$dir/d3"
cat "$dir"/d1 "$dir"/d2 "$dir"/d3 "$dir"/d1 >"$dir/packed"
sum=0 labels=0
for x in d1 d2 d3 d1; do
    n=$(stat -c %s "$dir/$x")
    log "$dir/d.csv" --lr 0 --batch 1 --steps 1 --data "$dir/$x" --seq $((n - 1))
    sum=$(awk -v s=$sum -v l="$(column loss "$dir/d.csv")" -v n=$((n - 1)) 'BEGIN { printf "%.17g", s + l * n }')
    labels=$((labels + n - 1))
done
awk -v s=$sum -v n=$labels 'BEGIN { printf "%.17g\n", s / n }' >"$dir/want"
n=$(($(stat -c %s "$dir/packed") - 1))
log "$dir/p.csv" --lr 0 --batch 1 --steps 1 --data "$dir/packed" --val "$dir/packed" --seq $n --documents on
column loss "$dir/p.csv" >"$dir/have"
near 1e-12 "packed documents have the loss that they have alone" "$dir/have" "$dir/want"
column val_loss "$dir/p.csv" >"$dir/have"
near 1e-12 "and so in validation" "$dir/have" "$dir/want"
docs="--seq 32 --batch 8 --steps 3 --data README.md --val Makefile --eval-every 1 --documents on --document-end e"
log "$dir/p.csv" $docs
for c in loss grad_norm val_loss val_bits_per_byte; do column $c "$dir/p.csv"; done >"$dir/want"
for x in "--dp 2" "--tp 2 --sp on --cp 2" "--cp 4 --cp-kind zigzag" "--cp 2 --cp-kind allgather --zero 3" "--cp 2 --cp-kind ulysses" \
    "--pp 2 --cp 2 --tp 2 --schedule zb --zero 1" "--cp 2 --cp-kind zigzag --recompute full --accum 2"; do
    log "$dir/q.csv" $docs $x
    for c in loss grad_norm val_loss val_bits_per_byte; do column $c "$dir/q.csv"; done >"$dir/have"
    near 1e-12 "documents with $x" "$dir/have" "$dir/want"
done
try 2 'document-end x needs --documents on' --data "$dir/a" --document-end x
try 2 'has no such token' --data "$dir/a" --documents on --document-end '<|none|>' --tokenizer $g/gpt2.json
try 2 'document-end a.q: the escapes are' --data "$dir/a" --documents on --document-end 'a\q'
printf 'x\nx\nx\nx\nx\nx\nx\nx\nx\n' >"$dir/ends"
try 1 'rank 0: step 1: no token of its sequences has a label' $tiny --seq 1 --data "$dir/ends" --documents on --document-end x --batch 1
try 0 '' $tiny --data "$dir/a" --documents on --tokenizer $g/qwen.json

# ---- instruction data: the loss of the answer's tokens only, with the token that ends it
printf '{"prompt": "What is 2 + 2?\\n", "answer": "It is 4."}\n' >"$dir/i.jsonl"
printf 'What is 2 + 2?\n' >"$dir/i.prompt"
printf 'What is 2 + 2?\nIt is 4.\n' >"$dir/i.all"
cp "$dir/i.all" "$dir/i.full"
log "$dir/i.csv" --lr 0 --batch 1 --steps 2 --data "$dir/i.jsonl" --val "$dir/i.jsonl" --seq 40
log "$dir/p.csv" --lr 0 --batch 1 --steps 1 --data "$dir/i.prompt" --seq 14
prompt_loss=$(column loss "$dir/p.csv")
log "$dir/q.csv" --lr 0 --batch 1 --steps 1 --data "$dir/i.all" --seq 23
awk -v p="$prompt_loss" -v a="$(column loss "$dir/q.csv")" \
    'BEGIN { for (i = 0; i < 3; i++) printf "%.17g\n", (23 * a - 14 * p) / 9 }' >"$dir/want"
{ column loss "$dir/i.csv"; column val_loss "$dir/i.csv" | tail -n 1; } >"$dir/have"
near 1e-12 "an example has the loss of its answer" "$dir/have" "$dir/want"
column val_bits_per_byte "$dir/i.csv" | tail -n 1 >"$dir/have"
awk 'NR == 1 { printf "%.17g\n", $1 / log(2) }' "$dir/want" >"$dir/want1"
near 1e-12 "the bits per byte of an answer, whose tokens are bytes" "$dir/have" "$dir/want1"
# messages in ChatML; an example that is longer than T is cut off
printf '\n{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "?"}]}\n \n' >"$dir/m.jsonl"
printf '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n' >"$dir/i.prompt"
printf '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>' >"$dir/i.all"
p=$(stat -c %s "$dir/i.prompt") n=$(stat -c %s "$dir/i.all")
log "$dir/p.csv" --lr 0 --batch 1 --steps 1 --data "$dir/i.prompt" --seq $((p - 1))
log "$dir/q.csv" --lr 0 --batch 1 --steps 1 --data "$dir/i.all" --seq $((n - 1))
awk -v p="$(column loss "$dir/p.csv")" -v a="$(column loss "$dir/q.csv")" -v n=$n -v k=$p \
    'BEGIN { printf "%.17g\n", ((n - 1) * a - (k - 1) * p) / (n - k) }' >"$dir/want"
for T in 100 $((n + 5)); do
    log "$dir/i.csv" --lr 0 --batch 1 --steps 1 --data "$dir/m.jsonl" --seq $T
    column loss "$dir/i.csv" >"$dir/have"
    near 1e-12 "the assistant's message, with --seq $T" "$dir/have" "$dir/want"
done
head -c 21 "$dir/i.full" >"$dir/i.cut"
log "$dir/i.csv" --lr 0 --batch 1 --steps 1 --data "$dir/i.jsonl" --seq 20
log "$dir/q.csv" --lr 0 --batch 1 --steps 1 --data "$dir/i.cut" --seq 20
awk -v p="$prompt_loss" -v a="$(column loss "$dir/q.csv")" 'BEGIN { printf "%.17g\n", (20 * a - 14 * p) / 6 }' >"$dir/want"
column loss "$dir/i.csv" >"$dir/have"
near 1e-12 "an example that is cut off" "$dir/have" "$dir/want"
for i in 1 2 3 4 5 6 7 8; do printf '{"prompt": "%d times two is", "answer": " %d"}\n' $i $((2 * i)); done >"$dir/x.jsonl"
mix="--seq 24 --batch 8 --steps 3 --data $dir/x.jsonl,$dir/a --data-mix 3,1 --tokenizer $g/llama3.json --val $dir/x.jsonl"
log "$dir/p.csv" $mix --documents on
for c in loss grad_norm val_loss; do column $c "$dir/p.csv"; done | grep . >"$dir/want"
for x in "--dp 2 --tp 2" "--cp 2 --cp-kind zigzag --pp 2"; do
    log "$dir/q.csv" $mix --documents on $x
    for c in loss grad_norm val_loss; do column $c "$dir/q.csv"; done | grep . >"$dir/have"
    near 1e-12 "instructions and text with $x" "$dir/have" "$dir/want"
done
# a resumed run with longer sequences continues at the next example, because an example is one sequence
more="--arch llama --lr 0 --batch 2 --steps 4"
log "$dir/p.csv" $more --seq 48 --data "$dir/x.jsonl"
try 0 '' $model $more --seq 24 --data "$dir/x.jsonl" --stop-at 2 --save "$dir/short"
log "$dir/longer.csv" $more --seq 48 --data "$dir/x.jsonl" --resume "$dir/short"
column loss "$dir/longer.csv" >"$dir/have"
column loss "$dir/p.csv" | tail -n 2 >"$dir/want"
near 1e-12 "a run of instruction data that is resumed with longer sequences" "$dir/have" "$dir/want"
try 0 '' $model $more --seq 24 --data "$dir/x.jsonl,$dir/a" --data-mix 1,1 --stop-at 2 --save "$dir/shortmix"
try 0 '' $model $more --seq 24 --data "$dir/x.jsonl,$dir/a" --data-mix 1,1 --resume "$dir/shortmix"
try 1 'seq was 24, and is 48 now: this mixture has text' $model $more --seq 48 --data "$dir/x.jsonl,$dir/a" --data-mix 1,1 --resume "$dir/shortmix"
bad() { printf "$1" >"$dir/bad.jsonl"; try 2 "$2" $tiny --data "$dir/bad.jsonl"; }
good='{"prompt": "a", "answer": "b"}\n'
bad "$good{\"prompt\": \"a\", \"answer\": }\n" 'bad.jsonl line 2:1:27: a value is needed$'
bad "$good$good{\"prompt\": \"a\"}\n" 'bad.jsonl line 3:1:1: an example is'
bad "$good\n{\"prompt\": \"a\", \"answer\": 3}\n" 'bad.jsonl line 3:1:1: an example is'
bad "$good{\"messages\": [{\"role\": \"user\"}]}\n" 'bad.jsonl line 2:1:1: an example is'
bad "$good[1]\n" 'bad.jsonl line 2:1:1: an example is'
bad "$good{\"prompt\": \"a\\xff\", \"answer\": \"b\"}\n" 'bad.jsonl line 2:1:[0-9]+: this is not UTF-8'
bad "$good{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n" 'bad.jsonl line 2: no message has the role "assistant", so that nothing has a label'
bad "$good{\"messages\": []}\n" 'bad.jsonl line 2: "messages" is empty$'
long='{"prompt": "a prompt of more than 16 bytes", "answer": "b"}\n'
bad "$long$long" 'bad.jsonl: the answers of all examples begin after the first 16 tokens; use a longer --seq'
# an example whose answer begins after --seq is left out, and counted; so it is when the cache is read
printf "$good$good$good$good$good$good" >"$dir/bad.jsonl"
log "$dir/p.csv" --seq 16 --batch 4 --steps 3 --data "$dir/bad.jsonl"
printf "$good\n$good$long$good$good$long$good$good" >"$dir/bad.jsonl"
for x in "" "--token-cache $dir/skips" "--token-cache $dir/skips"; do
    try 0 '' $tiny --data "$dir/bad.jsonl" $x
    grep -q "^notice  2 examples are skipped, because the answer begins after --seq 16 tokens; the first is $dir/bad.jsonl line 4$" "$dir/out" &&
        grep -q '   6 examples   0 cut off' "$dir/out"
    report $? "$x: a notice of the examples that are left out: $(grep '^notice' "$dir/out")"
done
log "$dir/q.csv" --seq 16 --batch 4 --steps 3 --data "$dir/bad.jsonl"
cmp -s <(cut -d, -f1-3 "$dir/p.csv") <(cut -d, -f1-3 "$dir/q.csv")
report $? "the other examples are trained on as they are without them"
bad '\n' 'bad.jsonl: 0 examples; at least 1 are needed'
mkdir "$dir/both" && cp "$dir/a" "$dir/i.jsonl" "$dir/both"
try 2 '1 of 2 files are .jsonl; instruction data and text need --data-mix' $tiny --data "$dir/both"
try 0 '' $tiny --seq 20 --data "$dir/i.jsonl"
grep -q '1 examples   1 cut off after --seq 20$' "$dir/out"
report $? "the settings have the number of examples that are cut off"

# ---- reading ahead: every read of a step but the first was announced in the step before it
cat >"$dir/io.c" <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static void note(char what, int fd, off_t at, size_t n) {
    char link[64], name[200];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, name, sizeof name - 1);
    if (length < 0 || n <= 12) return; /* a header */
    name[length] = 0;
    dprintf(198, "%c %s %ld %ld\n", what, strrchr(name, '/') + 1, (long)at, (long)(at + n));
}
int posix_fadvise(int fd, off_t at, off_t n, int advice) {
    if (advice == POSIX_FADV_WILLNEED) note('A', fd, at, (size_t)n);
    return 0;
}
ssize_t pread(int fd, void *out, size_t n, off_t at) {
    static ssize_t (*next)(int, void *, size_t, off_t);
    if (!next) next = (ssize_t(*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    note('R', fd, at, n);
    return next(fd, out, n, at);
}
END
cc -shared -fPIC -o "$dir/io.so" "$dir/io.c" -ldl >"$dir/err" 2>&1
report $? "the library that notes reads compiles"
mkdir "$dir/parts" && split -b 100 "$dir/a" "$dir/parts/"
ahead="--seq 16 --batch 4 --steps 9 --shuffle on --data $dir/parts,$dir/b --data-mix 2,1"
log "$dir/p.csv" $ahead
LD_PRELOAD=$dir/io.so log "$dir/q.csv" $ahead --read-ahead on 198>"$dir/reads"
cmp -s <(cut -d, -f1-3 "$dir/p.csv") <(cut -d, -f1-3 "$dir/q.csv")
report $? "--read-ahead on changes no result"
awk '$1 == "A" { told[$2, $3, $4] = 1; n++ } $1 == "R" && !told[$2, $3, $4] { if (n) missing++; else first++ }
    END { exit missing || !first || n < 30 }' "$dir/reads"
report $? "--read-ahead announces every read: $(head -n 3 "$dir/reads" | tr '\n' ' ')"

# ---- bits per byte: the loss of all labels in bits, divided by the bytes of their text
head -c 3000 README.md | tr -d '\n' >"$dir/v"
for t in gpt2 qwen; do
    try 0 '' $tiny --data "$dir/v" --tokenizer $g/$t.json
    N=$(sed -n 's/^data .* \([0-9]*\) tokens .*/\1/p' "$dir/out")
    log "$dir/v.csv" --seq $((N - 1)) --batch 1 --steps 1 --data "$dir/v" --val "$dir/v" --tokenizer $g/$t.json
    # one sequence: its labels are all tokens but the first, "#"
    awk -v l="$(column val_loss "$dir/v.csv")" -v n=$((N - 1)) -v b=$(($(stat -c %s "$dir/v") - 1)) \
        'BEGIN { printf "%.17g\n%.17g\n", l * n / (log(2) * b), exp(l) }' >"$dir/want"
    { column val_bits_per_byte "$dir/v.csv"; column val_perplexity "$dir/v.csv"; } >"$dir/have"
    near 1e-12 "bits per byte and perplexity with $t.json" "$dir/have" "$dir/want"
done
log "$dir/v.csv" --seq 16 --batch 1 --steps 1 --data "$dir/a" --val "$dir/a"
awk -v l="$(column val_loss "$dir/v.csv")" 'BEGIN { printf "%.17g\n", l / log(2) }' >"$dir/want"
column val_bits_per_byte "$dir/v.csv" >"$dir/have"
near 1e-12 "bits per byte of bytes" "$dir/have" "$dir/want"

# ---- the token cache: a later run reads it; a changed text or a damaged shard is encoded again
mkdir "$dir/cache"
cp "$dir/a" "$dir/text1"
cached="$tiny --data $dir/text1 --tokenizer $g/qwen.json --token-cache $dir/cache --log-csv $dir/k.csv"
uses() { # uses TEXT WHAT: a run says TEXT of the cache, and its losses are those without one
    try 0 '' $cached
    grep -q "tokens $1\$" "$dir/out" && cmp -s <(cut -d, -f1-3 "$dir/k.csv") "$dir/first"
    report $? "$2: $(grep '^data' "$dir/out")"
}
try 0 '' $tiny --data "$dir/text1" --tokenizer $g/qwen.json --log-csv "$dir/k.csv"
cut -d, -f1-3 "$dir/k.csv" >"$dir/first"
uses 'to the cache' "the first run writes the cache"
uses 'from the cache' "the second run reads the cache"
[ "$(ls "$dir/cache" | wc -l)" = 1 ]
report $? "the cache has one shard and nothing else: $(ls "$dir/cache")"
shard=$(echo "$dir"/cache/*.tokens)
printf '\1' | dd of="$shard" bs=1 seek=1100 conv=notrunc 2>/dev/null
uses 'to the cache, whose shard was damaged or stale' "a flipped byte is found"
truncate -s -4 "$shard"
uses 'to the cache, whose shard was damaged or stale' "a torn shard is found"
uses 'from the cache' "the shard is whole again"
: >"$shard"
uses 'to the cache, whose shard was damaged or stale' "an empty shard is found"
touch -d '2001-01-01' "$dir/text1"
uses 'to the cache' "a text with another time is encoded again"
printf 'Another text' | dd of="$dir/text1" conv=notrunc 2>/dev/null
try 0 '' $cached
! cmp -s <(cut -d, -f1-3 "$dir/k.csv") "$dir/first" && grep -q 'tokens to the cache$' "$dir/out"
report $? "a changed text has other tokens"
try 2 'token-cache .*: not a directory but a file' --data "$dir/a" --tokenizer $g/qwen.json --token-cache "$dir/a"
try 2 'token-cache no/such/dir: No such file' --data "$dir/a" --tokenizer $g/qwen.json --token-cache no/such/dir
# two processes at the same time: one encodes, the other waits and reads
rm -f "$dir"/cache/*
port=$((20000 + RANDOM % 20000))
for r in 0 1; do
    timeout $((60 * SLOW)) "$B/train_gpt" $tiny --data "$dir/a" --tokenizer $g/qwen.json --token-cache "$dir/cache" --ranks 2 --rank $r \
        --backend tcp --rendezvous 127.0.0.1:$port >"$dir/out$r" 2>"$dir/err$r" </dev/null &
    waits[r]=$!
done
wait ${waits[0]} && wait ${waits[1]} && [ "$(ls "$dir/cache" | wc -l)" = 1 ]
report $? "two processes share a cache"
# a process that holds the folder's lock for too long
flock "$dir/cache" sleep 5 &
sleep 0.5
try 2 'another process has been encoding into this folder for 1 s' --data "$dir/a" --tokenizer $g/qwen.json --token-cache "$dir/cache" --timeout 1
wait $!

# ---- generated text: the same in every layout, greedy with temperature 0, ended by --stop
train="$model --seq 16 --batch 8 --steps 60 --lr 1e-2 --data README.md --generate 40"
text() { timeout $((60 * SLOW)) "$B/train_gpt" $train "$@" 2>"$dir/err" </dev/null; }
text --prompt 'The ' --temperature 0.7 --sample-top-k 12 --top-p 0.9 >"$dir/want"
[ "$(stat -c %s "$dir/want")" = 40 ]
report $? "--generate 40 are 40 bytes"
for x in "--tp 2" "--pp 2 --dp 2" "--dp 2 --zero 3" "--cp 2"; do
    text --prompt 'The ' --temperature 0.7 --sample-top-k 12 --top-p 0.9 $x >"$dir/have"
    cmp -s "$dir/have" "$dir/want"
    report $? "the same text with $x"
done
text --prompt 'The ' --temperature 0 >"$dir/greedy"
for x in "--sample-top-k 1" "--top-p 1e-6" "--temperature 0 --seed 1"; do
    text --prompt 'The ' $x >"$dir/have"
    cmp -s "$dir/have" "$dir/greedy"
    report $? "$x is greedy"
done
! cmp -s "$dir/greedy" "$dir/want"
report $? "sampling is not greedy"
want=$(cat "$dir/want") # a text of two bytes that is not at the start, and one that comes later
two=${want:17:2}
before=${want%%"$two"*}
text --prompt 'The ' --temperature 0.7 --sample-top-k 12 --top-p 0.9 --stop "nowhere in it,$(sed 's/[\\,]/\\&/g' <<<"$two")" >"$dir/have"
[ "$(cat "$dir/have"; echo x)" = "${before}x" ]
report $? "--stop ends the text before '$two': $(cat "$dir/have")"
# the text is written as it is sampled, in whole characters
cat >"$dir/write.c" <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>
ssize_t write(int fd, const void *data, size_t n) {
    static ssize_t (*next)(int, const void *, size_t);
    if (!next) next = (ssize_t(*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    static unsigned char last;
    const unsigned char *text = data;
    if (fd == 1 && n) { /* the first bytes of Greek letters are 0xCE and 0xCF */
        dprintf(198, "%s\n", (last & 0xFE) == 0xCE && (text[0] & 0xC0) == 0x80 ? "split" : "whole");
        last = text[n - 1];
    }
    return next(fd, data, n);
}
END
cc -shared -fPIC -o "$dir/write.so" "$dir/write.c" -ldl >"$dir/err" 2>&1
report $? "the library that notes writes compiles"
for i in 1 2 3 4 5 6 7 8 9 10 11 12; do printf 'αλφα βητα γαμμα δελτα '; done >"$dir/greek"
LD_PRELOAD=$dir/write.so timeout $((60 * SLOW)) "$B/train_gpt" $model --data "$dir/greek" --seq 16 --batch 8 --steps 60 --lr 1e-2 \
    --generate 60 >"$dir/out" 2>"$dir/err" 198>"$dir/writes"
[ "$(grep -c whole "$dir/writes")" -gt 20 ] && ! grep -q split "$dir/writes" && [ "$(tr -d '\0-\177' <"$dir/out" | wc -c)" -gt 30 ]
report $? "text is printed while it is sampled, in whole characters: $(sort "$dir/writes" | uniq -c | tr '\n' ' ')"
try 2 'prompt x needs --generate' --data "$dir/a" --prompt x
try 2 'stop x needs --generate' --data "$dir/a" --stop x
try 2 'stop a.x: the escapes are' --data "$dir/a" --generate 3 --stop 'a\x'
try 2 'stop a,: an empty text|stop .*empty' --data "$dir/a" --generate 3 --stop ,a
try 2 'top-p 0: not a number from 1e-09 to 1' --data "$dir/a" --generate 3 --top-p 0
try 2 'temperature -1: not a number' --data "$dir/a" --generate 3 --temperature -1
try 0 '' $tiny --data "$dir/a" --tokenizer $g/llama3.json --generate 20 --prompt 'The ' --stop 'zzzz,\n' --quiet

finish
