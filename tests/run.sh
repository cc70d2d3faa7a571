#!/usr/bin/env bash
# run.sh - builds and runs all tests; the last line is the sum over all: "N passed, N failed, N skipped"
#
#   tests/run.sh             installs missing packages that the tests need, if possible, then runs all tests
#   tests/run.sh programs    only the tests of the sanitizer targets: the test programs, and test_sanitized.sh full
#   tests/run.sh NAME...     only these tests, for example test_zero test_headers.sh mutants
#
# DEPS=no installs nothing. B is the folder of the programs (build). LIMIT is the longest one test may take on an idle
# machine, in seconds. VENV is the virtual environment of the Python packages (PYTHON=... names a python that has them).
#
# A test is a program tests/*/test_*.c or .cc, a script tests/*/test_*.sh, or tests/mutants/run.sh. It prints a line that
# begins with FAIL or SKIP for each check that failed or could not run, and last "name: N passed, N failed, N skipped".
# A test that does not build, ends without that line, or ends with a status that contradicts its counts is a failure.
cd "$(dirname "$0")/.." || exit 1
B=${B:-build} LIMIT=${LIMIT:-600} MAKE=${MAKE:-make}
passed=0 failed=0 skipped=0
skips=()
CPUS=$(nproc 2>/dev/null || echo 2)
unset MAKELEVEL

# ---- what the tests need ------------------------------------------------------------------------------------------

# command or library : packages that provide it
needs="gcc:gcc g++:g++ clang:clang clang-format:clang-format patch:patch aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu,libc6-dev-arm64-cross
       qemu-aarch64:qemu-user libopenblas.so.0:libopenblas0 mpicc.openmpi:libopenmpi-dev,openmpi-bin mpicc.mpich:libmpich-dev,mpich
       slurmctld:slurm-wlm
       mkfs.ext4:e2fsprogs mkfs.xfs:xfsprogs mkfs.btrfs:btrfs-progs"

# Installs missing packages in the background, because downloads take a minute in which programs can compile; only
# missing compilers are waited for.
start_needs() {
    local need missing=()
    for need in $needs; do
        case $need in
        lib*) /sbin/ldconfig -p 2>/dev/null | grep -q "${need%%:*}" ;;
        *) command -v "${need%%:*}" >/dev/null ;;
        esac || missing+=(${need#*:})
    done
    missing=(${missing[*]//,/ })
    if [ ${#missing[@]} -eq 0 ]; then echo "deps: nothing to install"; return; fi
    if [ "$DEPS" = no ]; then echo "deps: DEPS=no, not installing ${missing[*]}"; return; fi
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "deps: cannot install ${missing[*]} (needs root and apt-get)"
        return
    fi
    echo "deps: installing ${missing[*]}"
    {
        apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -qy install --no-install-recommends "${missing[@]}" ||
            { echo "deps: apt-get failed; tests that need these packages are skipped"; tail -n 3 "$R/needs.log"; } >&3
    } 3>&1 >"$R/needs.log" 2>&1 </dev/null &
    installer=$!
    case " ${missing[*]} " in *" gcc "* | *" g++ "*) end_needs ;; esac
}

installer= # the process that installs packages
end_needs() { while kill -0 "$installer" 2>/dev/null; do sleep 0.2; done; } # waits until they are installed

VENV=${VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/dt-tests/venv} python=0

start_python() { # installs the Python packages in the background, in at most 10 minutes
    [ "$DEPS" != no ] && [ -z "$PYTHON" ] || return
    timeout -k 5 600 bash tests/support/venv.sh "$VENV" >"$R/venv.log" 2>&1 </dev/null &
    python=$!
}

end_python() { # sets PYTHON, and torchrun for test_launch.sh, or NO_TORCH, the reason why not
    local status
    [ $python != 0 ] || return
    wait $python
    status=$?
    python=0
    if [ $status = 0 ]; then
        export PYTHONPYCACHEPREFIX=$VENV/pycache PYTHONDONTWRITEBYTECODE= # compiled once, outside of this folder
        export PYTHON=$VENV/bin/python DT_TORCHRUN="${DT_TORCHRUN:-$VENV/bin/python -m torch.distributed.run}"
    else
        export NO_TORCH="installing PyTorch: $(tail -n 1 "$R/venv.log" | tr -d '\r' | cut -c1-200) (status $status)"
        echo "deps: $NO_TORCH"
    fi
}

# ---- one test -----------------------------------------------------------------------------------------------------

fail() { # fail NAME WHY [LOG]
    echo "FAIL $1: $2"
    [ -z "$3" ] || tail -n 15 "$3" | sed 's/^/    /'
    failed=$((failed + 1))
}

# With the address randomisation of some kernels the thread sanitizer cannot map its memory; turn it off.
launcher=
case $B in *tsan*) setarch -R true 2>/dev/null && launcher="setarch -R" ;; esac

R=$(mktemp -d)
trap 'rm -rf "$R"' EXIT

start() { # start NAME COMMAND...: leaves $R/NAME.log and $R/NAME.end, its status and seconds
    local name=$1 begin=$SECONDS limit=$LIMIT
    shift
    [ $name != sanitized ] || limit=3600
    . tests/support/slow.sh
    timeout -k 5 $((limit * SLOW)) $launcher "$@" >"$R/$name.log" 2>&1 </dev/null
    echo "$? $((SECONDS - begin))" >"$R/$name.end"
}

judge() { # judge NAME: counts the checks in the log that start wrote
    local name=$1 log=$R/$1.log status took sum
    read -r status took <"$R/$name.end"
    sum=$(tail -n 1 "$log")
    grep -E '^(FAIL|SKIP)' "$log"
    if [ $status = 124 ] || [ $status = 137 ]; then
        fail "$name" "not done after $LIMIT s" "$log"
    elif [[ $sum =~ ^[A-Za-z0-9_.]+:\ ([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]]; then
        passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2])) skipped=$((skipped + BASH_REMATCH[3]))
        echo "$sum  ($took s)"
        if [ "${BASH_REMATCH[2]}" = 0 ] && [ $status != 0 ]; then fail "$name" "no check failed, but status $status" "$log"; fi
        if [ "${BASH_REMATCH[2]}" != 0 ] && [ $status = 0 ]; then fail "$name" "checks failed, but status 0"; fi
        if [ "${BASH_REMATCH[1]}" = 0 ] && [ "${BASH_REMATCH[2]}" = 0 ] && [ "${BASH_REMATCH[3]}" = 0 ]; then
            fail "$name" "checked nothing"
        fi
        while read -r line; do skips+=("$name: $line"); done < <(grep '^SKIP' "$log")
    else
        fail "$name" "ended with status $status and without a summary" "$log"
    fi
}

run_one() { start "$@"; judge "$1"; }

# Each of these tests keeps one processor busy, and has no ranks that wait much: as many run at a time as there are
# processors, the longest first. (A mutant's test may wait, but it only has to fail.) Tests that need PyTorch come
# late, because it is installed meanwhile.
together="test_cuda_races test_cuda test_matrix_gpu test_parts.sh test_entry_points.sh \
          test_sanitized.sh test_cli.sh test_data.sh test_examples.sh test_memory test_kernels test_docs.sh test_tensor test_account test_gpt \
          test_seeds test_ops test_layers test_files test_file_safety test_placements test_cuda_blas test_cuda_shim test_schedule \
          test_plan test_plan.sh \
          test_onebit test_muon test_fuzz test_index.sh test_lora test_tokenizer test_tokenizer.sh test_launch.sh test_hf.sh \
          test_peft.sh mutants"
# These mostly wait: for timeouts, networks, disks and launchers. LANES of them at a time run beside compilers and the
# tests above, the longest first.
LANES=3
waiting="test_faults test_network.sh test_checkpoint_kills test_overlap test_nccl test_restart.sh test_rendezvous \
         test_bench.sh test_cli_io.sh test_config.sh test_power.sh test_attack"
# All other tests run alone: with many ranks that wait for each other, two tests at the same time take longer than one
# after another.

command_of() { # command_of NAME: sets command
    case $1 in
    mutants) command="env CLEAN=no MUTANT_TFLAGS=${SAMPLE:+-O0} bash tests/mutants/run.sh" ;;
    sanitized) command="bash tests/programs/test_sanitized.sh full" ;;
    *.sh) command="bash $(echo tests/*/"$1")" ;;
    *) command="$B/$1" ;;
    esac
}

buildable() { # buildable NAME: 0 for a script, and for a program that make can build
    case $1 in *.sh | mutants | sanitized) return 0 ;; esac
    $MAKE -s "$B/$1" >"$R/build.log" 2>&1 || { fail "$1" "does not build" "$R/build.log"; false; }
}

of() { # of LIST NAME...: sets chosen, the names of LIST that are wanted
    local name
    chosen=()
    for name in $1; do [[ " ${*:2} " != *" $name "* ]] || chosen+=("$name"); done
}

compile() { # compile NAME...: the programs among them; failures are reported later
    local name files=()
    for name; do case $name in *.sh | mutants | sanitized) ;; *) files+=("$B/$name") ;; esac; done
    [ ${#files[@]} = 0 ] || $MAKE -s -k -j"$CPUS" "${files[@]}" >/dev/null 2>&1
}

start_beside() { # start_beside JOBS NAME: starts the test once fewer than JOBS background jobs run
    local command
    while [ "$(jobs -rp | wc -l)" -ge "$1" ]; do wait -n; done
    command_of "$2"
    start "$2" $command &
}

run_all() { # run_all NAME...
    local name command beside
    of "$waiting" "$@"
    beside=()
    compile "${programs_of_scripts[@]}" "${chosen[@]}"
    for name in "${chosen[@]}"; do ! buildable "$name" || beside+=("$name"); done
    {
        for name in "${beside[@]}"; do
            case $name in test_bench.sh | test_power.sh) end_needs ;; esac
            start_beside $LANES "$name"
        done
        wait
    } &
    of "test_cuda_races test_cuda test_cuda_blas" "$@" # which take longest to compile, so they come first
    compile "${chosen[@]}" "$@"
    end_needs
    of "$together" "$@"
    for name in "${chosen[@]}"; do
        buildable "$name" || continue
        case $name in test_launch.sh | test_hf.sh | test_peft.sh | test_tokenizer.sh) end_python ;; esac
        start_beside $((CPUS + 1)) "$name" # 1: the lanes
        beside+=("$name")
    done
    wait
    for name in "${beside[@]}"; do judge "$name"; done
    for name; do
        [[ " $together $waiting " == *" $name "* ]] && continue
        buildable "$name" || continue
        command_of "$name"
        run_one "$name" $command
    done
}

# ---- all tests ----------------------------------------------------------------------------------------------------

programs=() scripts=()
for f in tests/*/test_*.c tests/*/test_*.cc; do
    [ -e "$f" ] && f=${f##*/} && programs+=("${f%.*}")
done
for f in tests/*/test_*.sh; do [ -e "$f" ] && scripts+=("${f##*/}"); done
[ -e tests/mutants/run.sh ] && scripts+=(mutants)

if [ "$1" = programs ]; then
    scripts=(sanitized)
elif [ "$1" = sanitized ]; then
    programs=() scripts=(sanitized)
elif [ $# -gt 0 ]; then
    wanted=" $* "
    keep=(); for p in "${programs[@]}"; do [[ $wanted == *" $p "* ]] && keep+=("$p"); done; programs=("${keep[@]}")
    keep=(); for p in "${scripts[@]}"; do [[ $wanted == *" $p "* ]] && keep+=("$p"); done; scripts=("${keep[@]}")
    [ $((${#programs[@]} + ${#scripts[@]})) -gt 0 ] || { echo "no such test: $*" >&2; exit 2; }
else
    start_needs
fi
programs_of_scripts=()
[ ${#scripts[@]} = 0 ] || [ "${scripts[*]}" = sanitized ] ||
    programs_of_scripts=(demo train_gpt train_ctr 20_click_model power net_rank bench_{gemm,attention,train,generate,comm,layouts})
case " ${scripts[*]} " in *" test_hf.sh "* | *" test_peft.sh "* | *" test_launch.sh "* | *" test_tokenizer.sh "*) start_python ;; esac

run_all "${programs[@]}" "${scripts[@]}"

[ ${#skips[@]} = 0 ] || { echo "skipped:"; printf '    %s\n' "${skips[@]}"; }
named=${#skips[@]}
[ "$named" -ge "$skipped" ] || fail run.sh "$skipped skips, but only $named reasons"
[ $((passed + failed)) -gt 0 ] || fail run.sh "no test ran"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
