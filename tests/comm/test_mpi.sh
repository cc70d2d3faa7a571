#!/usr/bin/env bash
# test_mpi.sh - the MPI backend with each MPI that is installed: mpi_ranks.c, mpi_mismatch.c, mpi_ps.c and train_gpt under
# mpirun
#
# Open MPI and MPICH may be installed side by side, as mpicc.openmpi and mpicc.mpich; else there is one mpicc. Ranks
# outnumber the cores here. mpi_ranks is built with DT__MPI_MAX_BYTES=5000, so that messages which are too long for MPI's
# int count need not be gigabytes, and with DT__RAIL_BYTES=5000, so that a sum of 20 KB uses rails. MPIS="mpich": only
# that MPI. Each MPI runs a part of the tests, with ALL=yes all of them (make faults). For the mutants
# `test_mpi.sh ranks` and `test_mpi.sh mismatches`: the first installed MPI, only that program, up to the first
# failure; status 77 without MPI.
cd "$(dirname "$0")/../.." || exit 1
. tests/support/slow.sh
MAKE=${MAKE:-make} kernels=${B:-build}/tests_kernels.o # which do not depend on MPI
$MAKE -s "$kernels" || { echo "FAIL the kernels do not build"; echo "test_mpi: 0 passed, 1 failed, 0 skipped"; exit 1; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 TFLAGS="${TFLAGS:--O0 -g -Wall -Wextra} -DDT__MPI_MAX_BYTES=5000 -DDT__RAIL_BYTES=5000"
export CFLAGS="${MPI_CFLAGS:--O0 -Wall -Wextra}"
export OMPI_MCA_btl_vader_single_copy_mechanism=none    # as in most containers: 4 KiB then need their sender's help
LONGEST=120
programs="mpi_ranks mpi_mismatch mpi_ps train_gpt"
case $1 in
ranks) programs=mpi_ranks FULL=no LONGEST=30 ;;
mismatches) programs=mpi_mismatch FULL=no ;;
esac
passed=0 failed=0 skipped=0
D=$(mktemp -d)
trap 'rm -rf "$D"' EXIT

report() { # report OK? TEXT
    if [ "$1" = 0 ]; then passed=$((passed + 1)); return; fi
    failed=$((failed + 1))
    echo "FAIL $mpi: $2"
    { grep -m 6 FAIL "$D/out" || head -n 6 "$D/out"; } | sed 's/^/    /'
    [ "$FULL" != no ] || { echo "$passed $failed"; exit 1; }
}

run() { # run N PROGRAM...: under mpirun; the output is in $D/out
    local n=$1 more=
    shift
    "$mpirun" --version 2>/dev/null | grep -qi 'open' && more=--oversubscribe
    timeout -k 5 $((LONGEST * SLOW)) "$mpirun" $more -np "$n" "$@" >"$D/out" 2>&1 </dev/null
}

# Survivors name the dead rank in one line of dt's log, unless MPICH's launcher ends all ranks before.
killed_is_named() {
    [ $mpi = mpich ] || [ "$(grep -c '^dt: error: rank 3 (process [0-9]* on .*) is gone: its connection was lost$' "$D/out")" = 1 ]
}

# Open MPI ends all survivors when a rank dies, unless it is told to let them continue.
a_late_death_ends_the_wait() {
    "$mpirun" --version 2>/dev/null | grep -qi 'open' || return
    local begin=$SECONDS
    export NODE_RANKS=1
    timeout -k 5 $((LONGEST * SLOW)) "$mpirun" --oversubscribe --enable-recovery -np 4 "$D/$mpi/mpi_ranks" killed_late >"$D/out" 2>&1 </dev/null
    [ "$(grep -c 'DT_ERR_PEER after [0-9]* s: rank 3 .* is gone: its connection was lost$' "$D/out")" = 3 ] && [ $((SECONDS - begin)) -lt $((60 * SLOW)) ]
    report $? "a rank dies when the others have ended: they stop waiting for it after $((SECONDS - begin)) s"
}

# NODE_RANKS: 1: all data goes over MPI; 0: collectives use the machine's memory; 2: as if every two ranks had their
# own machine, so that sums send as little as possible between machines. With 5 ranks the last machine has one.
ranks() {
    local n begin status
    for n in $worlds; do
        n=${n/-/ }
        export NODE_RANKS=${n#* }
        n=${n% *}
        "$D/$mpi/mpi_ranks" threads $n >"$D/threads"
        run $n "$D/$mpi/mpi_ranks" cases $n && ! grep -q FAIL "$D/out"
        report $? "$n ranks, NODE_RANKS $NODE_RANKS: the cases of comm_cases.h"
        grep -qxF "$(grep results "$D/threads")" "$D/out"
        report $? "$n ranks, NODE_RANKS $NODE_RANKS: the bits of threads, $(cat "$D/threads")"
        [ $n != 6 ] || continue
        run $n "$D/$mpi/mpi_ranks" failures && ! grep -q FAIL "$D/out"
        report $? "$n ranks, NODE_RANKS $NODE_RANKS: failures"
    done
    for n in $ends; do
        n=${n/-/ }
        begin=$SECONDS
        export NODE_RANKS=${n#* }
        run 4 "$D/$mpi/mpi_ranks" ${n% *}
        status=$?
        [ $status != 0 ] && [ $status != 124 ] && [ $((SECONDS - begin)) -lt $((30 * SLOW)) ] &&
            case ${n% *} in
            killed) killed_is_named ;;
            *) grep -q 'DT_ERR_TIMEOUT after [0-9]* s: rank [012]: timeout 1.0 s in' "$D/out" ;;
            esac
        report $? "a rank ${n% *}, NODE_RANKS $NODE_RANKS: status $status after $((SECONDS - begin)) s"
    done
    a_late_death_ends_the_wait
}

# Ranks that make different calls; NODE_RANKS as above.
mismatches() {
    local n
    for n in $nodes; do
        export NODE_RANKS=$n
        run 4 "$D/$mpi/mpi_mismatch" && ! grep -q FAIL "$D/out"
        report $? "the cases of mismatch_cases.h, NODE_RANKS $n: $(grep 'checks failed' "$D/out")"
        grep '^mpi, NODE_RANKS' "$D/out" | sed "s/^mpi/$mpi/"
    done
}

# A parameter server trains, saves, loads and goes on.
servers() {
    "$D/$mpi/mpi_ps" "$D/threads.ps" threads >"$D/threads"
    run 4 "$D/$mpi/mpi_ps" "$D/mpi.ps" && [ -s "$D/threads" ] && grep -qxF "$(cat "$D/threads")" "$D/out"
    report $? "a parameter server: the bits of threads, $(cat "$D/threads")"
}

kill_one() { # kill_one VICTIM: of 4 ranks of train_gpt, in the middle of its steps; the status of mpirun
    local i
    (
        export D gpt
        run 4 bash -c 'echo $$ >"$D/pid.${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"; exec "$gpt" "$@"' - --backend mpi $job --steps 1000000
    ) &
    for ((i = 0; i < 300 * SLOW; i++)); do grep -q '^step *[0-9]' "$D/out" 2>/dev/null && break; sleep 0.1; done
    sleep 0.2
    kill -9 "$(cat "$D/pid.$1")"
    wait $!
}

train() {
    local gpt=$D/$mpi/train_gpt zero job="--layers 1 --width 32 --heads 2 --seq 32 --batch 8 --steps 6 --data README.md"
    for zero in 0 1; do
        "$gpt" $job --zero $zero --ranks 4 --quiet --log-csv "$D/threads.csv" >"$D/out" 2>&1
        run 4 "$gpt" $([ $zero = 0 ] || echo --backend mpi) $job --zero $zero --log-csv "$D/mpi.csv"
        report $? "train_gpt --zero $zero"
        [ "$(grep -c '^step' "$D/out")" = 6 ] && [ "$(grep -c '^dt .*cpu mpi   4 ranks' "$D/out")" = 1 ] &&
            [ "$(grep -c '^launch  rank 0 of 4 by MPI, started by ' "$D/out")" = 1 ]
        report $? "train_gpt: only rank 0 prints, and names the launcher"
        # loss, norm, learning rate, and the bytes of each axis
        cut -d, -f1-4,13-17 "$D/threads.csv" >"$D/want"
        [ "$(wc -l <"$D/want")" = 7 ] && cut -d, -f1-4,13-17 "$D/mpi.csv" | diff - "$D/want" >"$D/out"
        report $? "train_gpt --zero $zero: the digits of 4 threads"
    done
    for victim in 2 0; do
        begin=$SECONDS
        rm -f "$D"/out; kill_one $victim
        status=$?
        [ $status != 0 ] && [ $((SECONDS - begin)) -lt $((30 * SLOW)) ] && { [ $mpi = mpich ] ||
            [ "$(grep 'error: ' "$D/out")" = "error: rank $victim (process $(cat "$D/pid.$victim") on $(hostname)) is gone: its connection was lost" ]; }
        report $? "train_gpt: rank $victim of 4 is killed: status $status after $((SECONDS - begin)) s"
    done
    run 2 "$gpt" --backend mpi $job --ranks 3
    [ $? != 0 ] && grep -q 'error: --ranks 3: MPI started 2 processes' "$D/out"
    report $? "train_gpt refuses a number of ranks that is not the launcher's"
    for other in openmpi mpich; do     # whose ranks each believe to be alone
        [ $mpi != $other ] && [ $mpi != default ] && command -v mpirun.$other >/dev/null || continue
        mpirun=mpirun.$other run 2 "$gpt" $job
        [ $? != 0 ] && grep -q 'error: MPI started 1 process, but .* is the program built with another MPI?' "$D/out"
        report $? "train_gpt refuses to be started by $other"
        mpirun=mpirun.$other run 2 "$gpt" --backend tcp $job --quiet
        report $? "... but over tcp"
    done
    run 2 "$gpt" --backend mpi $job --lr 1e3 --optimizer sgd --clip 0 --steps 50 --quiet
    [ $? != 0 ] && [ "$(grep -c 'error: ' "$D/out")" = 1 ] && grep -Eq 'error: rank [01]: .*(NaN|finite|inf)' "$D/out"
    report $? "train_gpt: a run that fails, one line"
}

all_tests() { # with $mpi, $mpicc and $mpirun; the last line is "PASSED FAILED"
    mkdir "$D/$mpi"
    cp "$kernels" "$D/$mpi/tests_kernels.o"
    MAKEFLAGS= $MAKE -s -k -j"$(nproc)" MPI=1 MPICC=$mpicc B="$D/$mpi" -o "$D/$mpi/tests_kernels.o" \
        OBJECTS="$D/$mpi/implementation.o $D/$mpi/tests_kernels.o" $(printf "$D/$mpi/%s " $programs) >"$D/out" 2>&1
    [ ! -s "$D/out" ] && [ $(ls $(printf "$D/$mpi/%s " $programs) 2>/dev/null | wc -w) = $(wc -w <<<"$programs") ]
    report $? "$programs: built without a warning"
    [ -x "$D/$mpi/mpi_ranks" ] && ranks
    [ -x "$D/$mpi/mpi_mismatch" ] && mismatches
    [ -x "$D/$mpi/mpi_ps" ] && servers
    [ -x "$D/$mpi/train_gpt" ] && train
    echo "$passed $failed"
}

# Each MPI's ranks wait much, so all MPIs are tested at the same time.
worlds="4-2 5-2 3-1 3-0 2-1 6-2 6-3" ends="timeout-1 timeout-0 timeout-2 killed-1 killed-2" nodes="1 0 2"
[ "$ALL" = yes ] || [ "$FULL" = no ] || worlds="5-2 3-1 3-0 6-3" ends="timeout-1 timeout-0 killed-1 killed-2" nodes="1 0"
found=no
for mpi in ${MPIS:-openmpi mpich default}; do
    mpicc=mpicc.$mpi mpirun=mpirun.$mpi
    if [ $mpi = default ]; then
        [ $found = no ] || continue
        mpicc=mpicc mpirun=mpirun
    fi
    if ! command -v $mpicc >/dev/null || ! command -v $mpirun >/dev/null; then
        [ $mpi = default ] || { echo "SKIP $mpi: $mpicc or $mpirun is not installed"; skipped=$((skipped + 1)); }
        continue
    fi
    found=yes
    mkdir "$D/of.$mpi"
    (
        D=$D/of.$mpi
        all_tests >"$D/said"
    ) &
    [ "$FULL" != no ] || break      # one MPI is enough for a mutant
    [ "$ALL" = yes ] || worlds="4-2" ends="timeout-2 killed-2" nodes=2
done
[ $found = yes ] || [ "$FULL" != no ] || exit 77
wait
for said in "$D"/of.*/said; do
    [ -e "$said" ] || continue
    sed '$d' "$said"
    read -r p f <<<"$(tail -n 1 "$said")"
    passed=$((passed + p)) failed=$((failed + f))
done
echo "test_mpi: $passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
