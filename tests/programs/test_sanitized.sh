#!/usr/bin/env bash
# test_sanitized.sh - train_gpt under a sanitizer: axes, backends, options, failures
#
#   tests/programs/test_sanitized.sh        a sample of 34 jobs under ASan and UBSan. It is built here without
#                                  optimisation; it links the tests' kernels, which are not sanitized
#   tests/programs/test_sanitized.sh full   all jobs, and demo and the ladder, with the sanitizer of folder B:
#                                  make asan T=sanitized, or ubsan, or tsan
#
# A job fails if one of its processes writes a sanitizer report, or if its exit status is not the expected one.
# A process with a report ends with status 99, which train_gpt never has. Reports go to a file if possible, because
# the last output of a rank on standard error may be lost. Ranks that are processes end by _exit, which skips the
# leak check; ranks that are threads are checked for leaks. Demo and the ladder have kernels without a sanitizer,
# because their arithmetic would take minutes. Last, mistakes planted in a copy of train_gpt.c must be reported.
# KEEP=FILE: appends full reports to FILE. PARTS="mpi ladder": only these parts.
cd "$(dirname "$0")/../.." || exit 1
. tests/support/slow.sh
B=${B:-build} MAKE=${MAKE:-make} full=${1:-}
passed=0 failed=0 skipped=0
D=$(mktemp -d)
pids=()
clean_up() {
    [ ${#pids[@]} = 0 ] || { kill -9 "${pids[@]}"; wait "${pids[@]}"; } 2>/dev/null
    rm -rf "$D"
}
trap clean_up EXIT
trap 'exit 1' INT TERM
# Variables of a launcher in this environment would make each job one of its ranks.
launchers='^(DT_|RANK$|LOCAL_|WORLD_SIZE$|MASTER_|SLURM_|OMPI_|PMI|MPI_)'
for v in $(compgen -e | grep -E "$launchers"); do unset "$v"; done

skip() { echo "SKIP $1"; skipped=$((skipped + 1)); }
finish() {
    echo "test_sanitized: $passed passed, $failed failed, $skipped skipped"
    [ $failed = 0 ]
    exit
}
cannot() { echo "FAIL $1"; failed=$((failed + 1)); head -n 8 "$D/log" | sed 's/^/    /'; finish; }

# ---- programs -------------------------------------------------------------------------------------------------------

words=()    # variables for make, besides those that the Makefile's target has passed on
if [ -z "$full" ]; then
    flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
    echo 'int main(void) { return 0; }' >"$D/program.c"
    if ! ${CC:-cc} $flags "$D/program.c" -o "$D/program" 2>/dev/null || ! "$D/program"; then
        skip "test_sanitized: ${CC:-cc} has no libasan or libubsan, or they do not run here"
        finish
    fi
    words=(CFLAGS="-O0 -g1 -Wall -Wextra $flags" CUDA= MPI= OMP= BLAS=)
fi
kernels=$B/tests_kernels.o own=$B/sanitized
implementation=$own/implementation.o
[ -z "$full" ] || implementation=$B/implementation.o    # which the ladder has, too
$MAKE -s -j2 "$kernels" ${full:+"$implementation"} >"$D/log" 2>&1 ||
    cannot "the implementation does not build"
build() { # build FOLDER IMPLEMENTATION WORDS...: train_gpt with the tests' kernels; no warning
    local to=$1 object=$2
    shift 2
    $MAKE -s "${words[@]}" "$@" B="$to" OBJECTS="$object $kernels" "$to/train_gpt" >"$D/log" 2>&1 &&
        [ ! -s "$D/log" ]
}
build "$own" "$implementation" || cannot "train_gpt does not build"
gpt=$own/train_gpt
finds= # o: overflows; b, l: bounds and leaks; r: races
for kind in ubsan_handle:o asan_init:bl tsan_init:r; do
    ! nm "$gpt" | grep -q "__${kind%:*}" || finds=$finds${kind#*:}
done
echo "finds ${finds:-nothing}" >"$D/log"
[ "$finds" ] || cannot "$gpt is not built with a sanitizer: make asan T=sanitized"

backends="threads procs tcp"
if [ "$full" ] && command -v mpicc >/dev/null && command -v mpirun >/dev/null; then
    build "$own/mpi" "$own/mpi/implementation.o" MPI=1 ||
        cannot "train_gpt with MPI does not build"
    backends="$backends mpi"
elif [ "$full" ]; then
    skip "test_sanitized: mpicc or mpirun is not installed: no ranks of MPI"
fi

# ---- a job ----------------------------------------------------------------------------------------------------------

log="exitcode=99:log_path=$D/report"
export UBSAN_OPTIONS="$log:print_stacktrace=1" TSAN_OPTIONS="$log"
export ASAN_OPTIONS="$log:strict_string_checks=1:detect_stack_use_after_return=1"

# Open MPI and its plugins leak memory at MPI_Finalize, and are not compiled for TSan, which sees their memory accesses
# but not their synchronisation: only frames inside them are suppressed. Leak reports need full stacks, because plugins
# are compiled without frame pointers.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_btl_vader_single_copy_mechanism=none
mpirun=mpirun
! mpirun --version 2>/dev/null | grep -qi 'open' ||
    mpirun="mpirun --oversubscribe --mca btl self,vader"
parts="libmpi libopen-pal libopen-rte libpmix libevent libhwloc openmpi3/mca_ pmix2/mca_"
printf 'leak:%s\n' $parts MPI_Init >"$D/leaks"
for kind in race deadlock mutex thread; do printf "$kind:%s\n" $parts; done >"$D/races"
mpi_env=(env LSAN_OPTIONS="suppressions=$D/leaks:print_suppressions=0"
    ASAN_OPTIONS="$ASAN_OPTIONS:fast_unwind_on_malloc=0"
    TSAN_OPTIONS="$TSAN_OPTIONS:suppressions=$D/races:ignore_noninstrumented_modules=1")

reported() { # 0 if a process of this job wrote a report; UBSan with ASan writes to standard error
    grep -qsE 'runtime error: |Sanitizer' "$D"/report.* "$D"/out* "$D"/err*
}
report() { # report STATUS TEXT: fails if STATUS is not 0, and if there is a sanitizer report
    local ok=$1
    if reported; then
        ok=1
        [ -z "$KEEP" ] || { echo "== $2"; cat "$D"/report.* "$D"/err*; } >>"$KEEP" 2>/dev/null
    fi
    if [ "$ok" = 0 ]; then passed=$((passed + 1)); return; fi
    failed=$((failed + 1))
    echo "FAIL $2"
    {
        grep -hE 'Sanitizer|runtime error|^ *#[0-5] ' "$D"/report.* | head -n 12
        head -qn 4 "$D"/err*
    } 2>/dev/null | sed 's/^/    /'
    rm -f "$D"/report.*
}

free_port() { # sets port to a free port, each time another one
    while :; do
        port=$((10000 + RANDOM % 10000))
        (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || return
    done
}

begin() { # begin BACKEND RANKS ARGS...: starts a job in the background; sets pids, with tcp one for each rank
    local backend=$1 ranks=$2 r
    shift 2
    rm -f "$D"/out* "$D"/err*
    pids=()
    case $backend in
    tcp)
        free_port
        for ((r = 0; r < ranks; r++)); do
            "$gpt" --backend tcp --rank $r --ranks $ranks --rendezvous 127.0.0.1:$port "$@" \
                >"$D/out$r" 2>"$D/err$r" </dev/null &
            pids+=($!)
        done
        ;;
    mpi)
        "${mpi_env[@]}" $mpirun -np $ranks "$own/mpi/train_gpt" --backend mpi "$@" \
            >"$D/out0" 2>"$D/err0" </dev/null &
        pids=($!)
        ;;
    *)
        "$gpt" --backend $backend --ranks $ranks "$@" >"$D/out0" 2>"$D/err0" </dev/null &
        pids=($!)
        ;;
    esac
}

gone() { ! kill -0 "$1" 2>/dev/null; }
until_in() { # until_in SECONDS COMMAND...: waits until COMMAND succeeds; 1 after SECONDS
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ $SECONDS -le $end ] || return 1
        sleep 0.02
    done
}

# Waits for all of pids. Sets status to that of the first, or to another one's if that is 0. LIMIT_S ends jobs that hang.
LIMIT_S=$((300 * SLOW))
end() {
    local p s
    for p in "${pids[@]}"; do
        [ $p = ${pids[0]} ] || case $DT_FAULT in stop:* | spin:*) kill -9 $p ;; esac
        until_in $LIMIT_S gone $p || kill -9 $p
        wait $p
        s=$?
        [ $p = ${pids[0]} ] && status=$s || { [ $status != 0 ] || status=$s; }
    done 2>/dev/null
    pids=()
}

head -c 3000 README.md >"$D/text"
tiny="--layers 2 --width 16 --heads 2 --seq 16 --batch 4 --steps 3 --timeout 60 --data $D/text"

try() { # try STATUS BACKEND RANKS ARGS...: STATUS may be several: "0 1"
    local want=$1 fault=${DT_FAULT:+DT_FAULT=$DT_FAULT }
    shift
    begin "$1" "$2" $tiny "${@:3}"
    end
    [[ " $want " == *" $status "* ]]
    report $? "status $status, wanted $want: $fault$*"
}

alone() { # alone STATUS ARGS...: without a backend and without the options of tiny
    local want=$1
    shift
    rm -f "$D"/out* "$D"/err*
    "$gpt" "$@" >"$D/out0" 2>"$D/err0" </dev/null
    status=$?
    [ $status = $want ]
    report $? "status $status, wanted $want: $*"
}

stepped() { grep -qs '^step *2/' "$D/out0" || gone ${pids[0]}; }
signalled() { # signalled STATUS SIGNAL BACKEND ARGS...: in the middle of its steps
    local want=$1 signal=$2
    shift 2
    begin "$1" 2 $tiny "${@:2}"
    until_in $LIMIT_S stepped
    kill -$signal ${pids[0]} 2>/dev/null
    end
    [ $status = $want ]
    report $? "status $status, wanted $want: kill -$signal of $*"
}

# ---- what is run ----------------------------------------------------------------------------------------------------

layouts() { # layouts BACKEND <TABLE: ranks and arguments
    local ranks args
    while read -r ranks args; do try 0 $1 $ranks ${args//DIR/$D}; done
}

all_layouts() {
    layouts $1 <<'END'
1 --dropout 0.1 --dtype f64
2 --zero 0 --label-smoothing 0.1 --weight-decay 0.1 --lr-schedule wsd --warmup 1
2 --zero 0 --overlap off --link-latency 0.5 --link-bandwidth 100
2 --zero 1 --dtype bf16 --arch llama
2 --zero 2 --accum 2 --batch-ramp 4:4:8 --batch 8 --steps 4 --shuffle on
2 --zero 3 --layers 3 --optimizer sgd --momentum 0.9
2 --zero 3 --zero3-keep on --recompute full:2
4 --zero 2 --shard-group 2
4 --zero 3 --shard-group 2 --dtype f16
2 --zero 0 --reduce tree --accum 2
2 --zero 1 --offload-optim cpu
2 --zero 2 --offload-optim DIR --accum 2
2 --zero 3 --offload-optim DIR --offload-params DIR
2 --zero 3 --offload-params cpu --dtype f16
2 --optimizer onebit-adam --freeze-steps 1
2 --tp 2 --recompute selective --dropout 0.1
4 --tp 4 --sp on --heads 4 --kv-heads 2 --arch llama
2 --tp 2 --sp on --dtype f16 --loss-scale 128
2 --cp 2 --cp-kind ring --dtype bf16
2 --cp 2 --cp-kind zigzag --recompute full
2 --cp 2 --cp-kind allgather
2 --cp 2 --cp-kind ulysses
2 --pp 2 --schedule naive --micro-batch 1
2 --pp 2 --schedule afab --micro-batch 1 --schedule-svg DIR/s.svg
2 --pp 2 --schedule 1f1b --micro-batch 1 --tie off --partition cost
2 --pp 2 --schedule interleaved --micro-batch 1 --dtype bf16
2 --pp 2 --schedule zb --micro-batch 1 --recompute full --trace DIR/t.json
2 --ep 2 --experts 4 --moe-every 2
2 --ep 2 --experts 2 --top-k 1 --capacity 1.1 --shared-experts 1 --router-bias 0.1 --zero 2
2 --ep 2 --experts 2 --moe-every 2 --z-loss 0.01 --zero 3
4 --dp 2 --tp 2 --zero 1
8 --dp 2 --tp 2 --pp 2 --zero 3 --micro-batch 1 --sp on
END
}

files() { # files BACKEND: what a training writes, and another reads
    local out="--log-csv $D/log.csv --trace $D/t.json --val $D/text --eval-every 2 --generate 8"
    rm -rf "$D/ckpt" "$D/model" "$D/model.bin"
    try 0 $1 2 --zero 1 --stop-at 2 --save "$D/ckpt" --save-every 1 --save-background on --keep 1 \
        --peak-tflops 0.001 $out
    try 0 $1 2 --zero 3 --save "$D/ckpt" --resume "$D/ckpt" --log-csv "$D/log.csv" \
        --save-model "$D/model"
    try 2 $1 2 --zero 1 --save "$D/ckpt" --timeout 5    # over tcp rank 1 waits for a rank that does not exist
    try 0 $1 2 --model "$D/model" --tp 2 --save-model "$D/model.bin" --quiet
    try 0 $1 2 --model "$D/model.bin" --pp 2 --micro-batch 2 --quiet --generate 4
    printf x | dd of="$D/ckpt/step-3/optim.safetensors" bs=1 seek=2000 conv=notrunc 2>/dev/null
    try 1 $1 2 --resume "$D/ckpt/step-3"
    try "1 2" $1 2 --log-csv /dev/full --timeout 5
}

faults() { # faults BACKEND: of ranks that are processes
    local f
    for f in kill exit drop; do DT_FAULT=$f:rank=1:seq=20 try 1 $1 2 --zero 1; done
    DT_FAULT=delay:rank=1:seq=20:s=0.1 try 0 $1 2 --zero 1
    for f in flip nan; do
        DT_FAULT=$f:rank=1:seq=20 try "0 1" $1 2 --zero 1
        DT_FAULT=$f:rank=1:seq=26 try "0 1" $1 2 --zero 1
    done
    DT_FAULT=stop:rank=1:seq=20 try 1 $1 2 --zero 1 --timeout 2
    [ $1 != procs ] || DT_FAULT=spin:rank=1:seq=20 try 1 $1 2 --zero 1 --timeout 2
}

diverges="--optimizer sgd --lr 1e3 --clip 0 --steps 50"

failures() { # failures BACKEND
    local f
    try 1 $1 2 $diverges
    try 2 $1 2 --zero 1 --mem-limit 64K
    case $1 in
    mpi) # mpirun ends with a status of its own: what ends a rank is the others' part
        for f in drop nan; do DT_FAULT=$f:rank=1:seq=20 try 1 mpi 2 --zero 1; done
        return
        ;;
    threads)
        for f in drop flip nan; do DT_FAULT=$f:rank=1:seq=20 try "0 1" threads 2 --zero 1; done
        ;;
    *) faults $1 ;;
    esac
    rm -rf "$D/ckpt"
    signalled 143 TERM $1 --steps 100000 --save "$D/ckpt"
    rm -rf "$D/ckpt"
    signalled 143 TERM $1 --steps 100000 --save "$D/ckpt" --save-every 1 --keep 2 --zero 2 \
        --save-background on
    signalled 0 USR1 $1 --steps 40
}

restarts() {
    rm -rf "$D/ckpt"
    DT_FAULT=kill:rank=1:seq=40 try 0 procs 2 --zero 1 --steps 5 --save "$D/ckpt" --save-every 1 \
        --max-restarts 2
    rm -rf "$D/ckpt"
    DT_FAULT=kill:rank=1:seq=60 try 0 procs 4 --reduce tree --micro-batch 1 --steps 5 \
        --save "$D/ckpt" --save-every 1 --max-restarts 2 --min-ranks 2
}

tokens() { # tokens N: a shard of llm.c, of the ids below N, twice
    local t ids=
    for t in $(seq 0 $(($1 - 1))); do printf -v ids '%s\\x%02x\\0' "$ids" $t; done
    {
        printf '\x88\xd8\x34\x01\x01\0\0\0'"\\x$(printf %02x $((2 * $1)))"'\0\0\0'
        head -c 1012 /dev/zero
        printf "$ids$ids"
    } >"$D/tokens.bin"
}

one_rank() { # runs that end before any rank starts, and files of other programs
    local want x
    printf '{ "train_batch_size": 4, "optimizer": { "type": "Adam", "params": { "lr": 1e-3 } } }' \
        >"$D/config.json"
    printf '{ "train_batch_size": 4,\n "layers": tru }' >"$D/wrong.json"
    tokens 61
    while read -r want x; do alone $want ${x//DIR/$D}; done <<'END'
0 --help
0 --list-refused
0 --print-config --config DIR/config.json
2 --print-config --config DIR/wrong.json
0 --dry-run --layers 3 --dp 2 --tp 2 --cp 2 --pp 2 --batch 8 --micro-batch 1 --zero 3 --ranks 16
0 --dry-run --experts 4 --ep 2 --zero 2 --offload-optim cpu --ranks 2
2 --widht 3
2 --tp 3 --ranks 3
2 --batch-ramp 4:4
2 --experts 4 --ep 3 --batch 12 --ranks 3
2 --model DIR/text
2 --resume DIR/nowhere
2 --backend tcp --rank 0
0 --model tests/golden/hf_gpt2 --batch 2 --steps 1 --seq 8 --data DIR/tokens.bin --generate 4
0 --model tests/golden/hf_llama_bf16 --batch 1 --steps 1 --seq 8 --data DIR/tokens.bin
0 --model tests/golden/llmc_v3.bin --batch 2 --steps 1 --seq 8 --data DIR/tokens.bin
0 --tokenizer tests/golden/tokenizer/qwen.json --layers 1 --width 16 --heads 2 --batch 2 --steps 1 --seq 8 --data README.md --generate 9
END
}

# The ladder and the demonstration, which check their own results.
ladder() {
    local f names=()
    for f in examples/*.c; do
        f=${f##*/}
        [ $f = train_gpt.c ] || names+=("$B/${f%.c}")
    done
    $MAKE -s -j2 "${names[@]}" >"$D/log" 2>&1 && [ ! -s "$D/log" ] || cannot "the ladder does not build"
    for f in "${names[@]}"; do
        rm -f "$D"/out* "$D"/err*
        set --
        [ ${f##*/} != 04_memory ] || set -- --width 300
        timeout -s KILL $((1800 * SLOW)) "$f" "$@" >"$D/out0" 2>"$D/err0" </dev/null
        report $? "${f##*/}"
    done
}

# Mistakes in a copy of train_gpt.c. Each job makes one of them, and a sanitizer must report it.
planted() {
    local plant='switch (getenv("PLANT") ? *getenv("PLANT") : 0) { volatile int n; char *volatile at;'
    plant="$plant case 'o': n = 0x7fffffff; n = n + 1; break;"                      # overflow
    plant="$plant case 'b': n = 3, at = (char *)malloc(3), at[n] = 1, free((void *)at); break;"
    plant="$plant case 'l': at = (char *)malloc(3), at[0] = 1, at = NULL; break;"
    plant="$plant case 'r': j->tokens += 1; break; }"                               # by all ranks
    local p=$D/planted gpt=$D/planted/b/train_gpt backend kind
    mkdir "$p" && cp -r Makefile dt_*.h dt_kernels.cu examples tests "$p"
    sed -i "/^static dt_status rank_main/,/^}/s|^ *job \*j = (job \*)user;|& $plant|" \
        "$p/examples/train_gpt.c"
    ! cmp -s examples/train_gpt.c "$p/examples/train_gpt.c" >"$D/log" 2>&1 ||
        cannot "the mistakes find no place in train_gpt.c"
    $MAKE -s -C "$p" "${words[@]}" B=b \
        OBJECTS="$(realpath "$implementation" "$kernels" | tr '\n' ' ')" b/train_gpt >"$D/log" 2>&1 ||
        cannot "train_gpt with planted mistakes does not build"
    for backend in threads procs; do
        for kind in $(sed 's/./& /g' <<<"$finds"); do
            [ $backend = threads ] || case $kind in l | r) continue ;; esac     # no shared memory, no leak check
            PLANT=$kind begin $backend 2 $tiny
            end
            reported && [ $status != 0 ]
            status=$?
            rm -f "$D"/report.* "$D"/out* "$D"/err*
            report $status "a planted mistake, $kind over $backend, is not reported"
        done
    done
}

begun=$SECONDS
if [ -z "$full" ]; then
    layouts threads <<<"4 --tp 2 --sp on --zero 3 --offload-optim DIR --offload-params DIR"
    layouts threads <<<"4 --dp 2 --zero 3 --shard-group 1 --recompute full --pp 2 --micro-batch 1"
    layouts threads <<<"2 --pp 2 --schedule zb --micro-batch 1 --dtype bf16 --trace $D/t.json"
    layouts procs <<<"2 --ep 2 --experts 4 --zero 2 --capacity 1.1"
    layouts tcp <<<"2 --cp 2 --cp-kind zigzag --arch llama"
    layouts threads <<<"2 --optimizer onebit-adam --freeze-steps 1"
    files threads
    one_rank
    DT_FAULT=kill:rank=1:seq=20 try 1 procs 2 --zero 1
    signalled 143 TERM tcp --steps 100000 --save "$D/ckpt2" --save-background on
else
    for part in ${PARTS:-$backends restarts one_rank ladder}; do
        case $part in
        threads | procs | tcp | mpi)
            all_layouts $part
            files $part
            failures $part
            ;;
        *) $part ;;
        esac
        echo "$part: until $((SECONDS - begun)) s"
    done
fi
planted
echo "$((passed + failed)) jobs in $((SECONDS - begun)) s"
finish
