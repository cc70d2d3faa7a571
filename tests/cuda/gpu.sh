#!/usr/bin/env bash
# gpu.sh - on a machine with an NVIDIA GPU: builds, tests and measures everything that needs a GPU, and prints one table
#
#   tests/cuda/gpu.sh             within 10 minutes
#   tests/cuda/gpu.sh tests       without the benchmarks
#   tests/cuda/gpu.sh --help      this
#
# Needs make, g++ (C++17), nvcc and cuBLASLt of the CUDA toolkit, nccl.h and libnccl, and for the benchmarks python3
# (PYTHON=...); PyTorch and compute-sanitizer are used if installed. B is the folder of the programs (build-gpu).
# The last line is "N passed, N failed, N skipped".
cd "$(dirname "$0")/../.." || exit 1
case $#$1 in
0 | 1tests) ;;
1-h | 1--help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' tests/cuda/gpu.sh; exit 0 ;;
*) echo "gpu.sh: unknown argument ${1:+'$*'}: tests/cuda/gpu.sh [tests]" >&2; exit 2 ;;
esac
B=${B:-build-gpu} PYTHON=${PYTHON:-python3}
passed=0 failed=0 skipped=0
rows=()
W=$(mktemp -d)
trap 'rm -rf "$W"' EXIT
export CUDA_MODULE_LOADING=EAGER    # lazy loading of a kernel waits for the device, which may wait for another rank

row() { rows+=("$(printf '%-46s %s' "$1" "$2")"); echo "== $1: $2"; }
pass() { passed=$((passed + 1)); row "$1" "${2:-ok}"; }
fail() { failed=$((failed + 1)); row "$1" "FAILED: $2"; }
skip() { skipped=$((skipped + 1)); row "$1" "skipped: $2"; }
try() { # try NAME SECONDS COMMAND...: the command must succeed; its last line is the result
    local name=$1 limit=$2 begin=$SECONDS
    shift 2
    if timeout -k 5 "$limit" "$@" >"$W/log" 2>&1; then pass "$name" "$(tail -n 1 "$W/log") ($((SECONDS - begin)) s)"
    else
        fail "$name" "status $? after $((SECONDS - begin)) s"
        tail -n 8 "$W/log" | sed 's/^/    /'
    fi
}

stop() { # stop WHY: ends, because no other row would be valid
    echo "gpu.sh: $1"
    echo "$passed passed, $failed failed, $skipped skipped"
    exit 1
}

# ---- build --------------------------------------------------------------------------------------------------------

command -v nvidia-smi >/dev/null && name=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
[ -n "$name" ] || { echo "gpu.sh: nvidia-smi shows no GPU"; echo "0 passed, 0 failed, 1 skipped"; exit 0; }
ARCH=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
[ "$ARCH" != 90 ] || ARCH=90a   # wgmma is in code for sm_90a only
GPUS=$(nvidia-smi --query-gpu=index --format=csv,noheader | wc -l)
row machine "$GPUS x $name, sm_$ARCH, driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)"
M="make -s CUDA=1 NCCL=1 ARCH=$ARCH B=$B"
command -v "${NVCC:-nvcc}" >/dev/null ||
    { failed=1; stop 'nvcc is not in PATH: install the CUDA toolkit, or PATH=/usr/local/cuda/bin:$PATH'; }
try "build" 300 $M -j"$(nproc)" "$B/train_gpt" "$B/bench_gpu"
[ $failed = 0 ] || stop "the build failed, so nothing was tested"
G=$B/train_gpt
# Without a working driver train_gpt prints a notice, trains on the CPU and succeeds, which would test no GPU.
on_cpu() { cat "$@" 2>/dev/null | grep -m 1 'running on the CPU'; }
if timeout 60 $G --data README.md --layers 1 --width 64 --heads 2 --seq 32 --batch 2 --steps 1 --device cuda --quiet \
    >"$W/log" 2>&1 && ! on_cpu "$W/log" >/dev/null; then pass "a step on the GPU"
else
    fail "a step on the GPU" "$(on_cpu "$W/log" || tail -n 1 "$W/log")"
    stop "the GPU does not compute, so nothing else was tested"
fi
KERNEL_TESTS="test_cuda test_cuda_blas" # the same cases as on the CPU, in memory that both reach
$M -k -j"$(nproc)" $(printf "$B/%s_on_gpu " $KERNEL_TESTS) >/dev/null 2>&1

# ---- tests --------------------------------------------------------------------------------------------------------

for t in $KERNEL_TESTS; do
    if $M "$B/${t}_on_gpu" >"$W/$t.build" 2>&1; then try "kernels beside the CPU's: $t" 120 "$B/${t}_on_gpu"
    else fail "kernels beside the CPU's: $t" "does not build"; tail -n 5 "$W/$t.build"; fi
done

# Compares a layout's losses with those of one rank on the CPU, relative to 1e-5 (16 bits: one rank on this GPU, 1e-3).
data="--data README.md --layers 4 --width 128 --heads 4 --seq 64 --batch 8 --steps 5 --quiet"
losses() { cut -d, -f"$(head -n 1 "$1" | tr , '\n' | grep -n '^loss$' | cut -d: -f1)" "$1" | tail -n +2; }
near() { # near A B TOLERANCE
    ! on_cpu "$W/log" "$W"/rank? >/dev/null || return 1
    paste <(losses "$1") <(losses "$2") | awk -v t="$3" '{ d = $1 - $2; if (d < 0) d = -d; if (!($1 > 0) || d > t * $2) bad = 1 }
        END { exit bad || NR == 0 }'
}
$G $data --device cpu --log-csv "$W/cpu.csv" >/dev/null 2>&1 || fail "one rank on the CPU" "does not train"
layout() { # layout OPTIONS: rank threads that share the GPUs
    if timeout -k 5 60 $G $data --device cuda --log-csv "$W/gpu.csv" $1 >"$W/log" 2>&1 && near "$W/gpu.csv" "$W/cpu.csv" 1e-5
    then pass "threads, f32: $1"; else fail "threads, f32: $1" "$(tail -n 1 "$W/log")"; fi
}
for l in "--ranks 1" "--dp 2" "--dp 4 --zero 3" "--tp 2 --sp on" "--cp 2" "--cp 4 --cp-kind ulysses" "--pp 2 --accum 4" \
         "--dp 2 --tp 2 --pp 2 --zero 1 --accum 2" "--offload-optim cpu --dp 2 --zero 2"; do layout "$l"; done
for d in bf16 f16; do
    rm -f "$W/one.csv"
    timeout 60 $G $data --device cuda --dtype $d --log-csv "$W/one.csv" >/dev/null 2>&1
    if timeout 60 $G $data --device cuda --dtype $d --tp 2 --dp 2 --zero 2 --log-csv "$W/gpu.csv" >"$W/log" 2>&1 &&
        near "$W/gpu.csv" "$W/one.csv" 1e-3; then pass "threads, $d: tp 2, dp 2, zero 2"
    else fail "threads, $d: tp 2, dp 2, zero 2" "$(tail -n 1 "$W/log")"; fi
done

# The real NCCL, one process per rank. On one GPU each rank pretends to be a separate machine, which only tests NCCL.
nccl() { # nccl RANKS OPTIONS
    local n=$1 r pids=() bad=0 port=$((20000 + RANDOM % 9000)) one=
    shift
    for ((r = 0; r < n; r++)); do
        one="RANK=$r WORLD_SIZE=$n LOCAL_RANK=$r LOCAL_WORLD_SIZE=$n MASTER_ADDR=127.0.0.1 MASTER_PORT=$port"
        [ "$GPUS" -ge "$n" ] || one="$one NCCL_HOSTID=dt$r NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1
            NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MNNVL_ENABLE=0 NCCL_CUMEM_ENABLE=0
            NCCL_MAX_CTAS=4 NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_DEBUG=WARN"
        env $one timeout -k 5 100 $G $data --backend nccl --timeout 60 --log-csv "$W/gpu.csv" "$@" >"$W/rank$r" 2>&1 &
        pids+=($!)
    done
    for r in "${pids[@]}"; do wait "$r" || bad=1; done
    if [ $bad = 0 ] && near "$W/gpu.csv" "$W/cpu.csv" 1e-5; then pass "NCCL, $n processes: $*"
    else fail "NCCL, $n processes: $*" "$(cat "$W"/rank? | tail -n 1)"; fi
}
if ldconfig -p | grep -q libnccl.so.2; then
    nccl 2 --dp 2
    nccl 2 --dp 2 --zero 3
    nccl 2 --tp 2
    nccl 2 --pp 2 --accum 4
    nccl 4 --dp 2 --tp 2 --zero 2
else skip "NCCL" "libnccl.so.2 is not here"; fi

if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck synccheck initcheck; do # initcheck does not see what cuBLASLt's 16-bit kernels write
        d=$([ $tool = initcheck ] && echo f32 || echo bf16)
        try "compute-sanitizer $tool, $d" 100 compute-sanitizer --tool $tool --error-exitcode 9 --log-file "$W/$tool" \
            $G --data README.md --layers 1 --width 256 --heads 2 --seq 300 --batch 1 --steps 1 --device cuda \
            --dtype $d --quiet
    done
else skip "compute-sanitizer" "it is not installed"; fi

# ---- benchmarks ---------------------------------------------------------------------------------------------------

if [ "$1" != tests ]; then
    try "bench_gpu" 150 $B/bench_gpu
    sed -n 's/^summary,//p' "$W/log" | while IFS=, read -r n v; do echo "$n $v"; done >"$W/figures"
    # GPT-2 124M on random tokens, as in torch_gpu.py: mean of the last 20 steps, and PyTorch's best of three runs of 20.
    text=README.md
    $PYTHON - "$W/ids.bin" <<'END' && text=$W/ids.bin
import array, random, struct, sys
n = 1 << 20
with open(sys.argv[1], "wb") as f:
    f.write(struct.pack("<256i", 20240520, 1, n, *[0] * 253))
    array.array("H", [random.randrange(50257) for _ in range(n)]).tofile(f)
END
    for batch in 16 32; do
        rm -f "$W/gpt2.csv" # a run that fails must not be measured by the one before
        timeout 60 $G --device cuda --dtype bf16 --data "$text" --layers 12 --width 768 --heads 12 --seq 1024 \
            --vocab 50304 --batch $batch --steps 40 --log-csv "$W/gpt2.csv" --quiet >"$W/log" 2>&1 ||
            fail "GPT-2 124M, batch $batch" "$(tail -n 1 "$W/log")"
        col=$(head -n 1 "$W/gpt2.csv" 2>/dev/null | tr , '\n' | grep -n '^tokens_per_s$' | cut -d: -f1)
        [ -z "$col" ] || echo "gpt2_124m_b${batch}_tokens_per_s" \
            "$(tail -n 20 "$W/gpt2.csv" | cut -d, -f"$col" | awk '{ s += 1 / $1 } END { printf "%.0f", NR / s }')" \
            >>"$W/figures"
    done
    if $PYTHON -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        timeout 200 $PYTHON tests/bench/peers/torch_gpu.py --batch 16 32 2>"$W/log" | sed -n 's/^summary,//p' | tr , ' ' \
            >>"$W/figures"
    else skip "PyTorch" "it is not installed, or sees no GPU"; fi
    while read -r n v; do rows+=("$(printf '%-46s %s' "$n" "$v")"); done <"$W/figures"
fi

echo
printf '%s\n' "${rows[@]}"
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
