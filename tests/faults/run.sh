#!/usr/bin/env bash
# run.sh - what "make faults" does: the full campaigns, one after another; last line "N passed, N failed, N skipped"
#
# test_faults, test_mismatch, test_attack, test_fuzz, test_checkpoint_faults, test_checkpoint_kills, test_ps_save and
# test_offload in full, the memory promises of 500 configurations, all cases (CASES=all) of the tests that run a part of them in
# make test, each other script in tests/faults, test_mpi.sh in full with each MPI, the compilers of test_headers.sh in
# full, and test_tokenizer.sh with 10 MB of text and all code points. B is the folder of the programs.
cd "$(dirname "$0")/../.." || exit 1
B=${B:-build}
export B
passed=0 failed=0 skipped=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT

campaign() { # campaign COMMAND...
    local begin=$SECONDS status sum
    echo "== $*"
    timeout -k 5 1800 "$@" 2>&1 </dev/null | tee "$log"
    status=${PIPESTATUS[0]}
    sum=$(tail -n 1 "$log")
    if [[ $sum =~ :\ ([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]]; then
        passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2])) skipped=$((skipped + BASH_REMATCH[3]))
        [ "${BASH_REMATCH[2]}" != 0 ] || [ "$status" = 0 ] || failed=$((failed + 1))
    else
        echo "FAIL $*: status $status, without a summary"
        failed=$((failed + 1))
    fi
    echo "== $((SECONDS - begin)) s"
}

campaign "$B/test_faults" full
campaign "$B/test_mismatch" full
campaign "$B/test_attack" full
campaign "$B/test_fuzz" full
campaign "$B/test_checkpoint_faults" full
campaign "$B/test_checkpoint_kills" full
campaign env CASES=all "$B/test_ps_save" full
campaign "$B/test_memory" 500
for test in test_cuda test_cuda_races test_matrix test_matrix_gpu test_comm test_comm_ops test_tcp; do
    campaign env CASES=all "$B/$test"
done
campaign "$B/test_offload" full
for script in tests/faults/*.sh; do
    [ "${script##*/}" = run.sh ] || campaign bash "$script"
done
campaign env ALL=yes CASES=all bash tests/comm/test_mpi.sh
campaign env FULL=yes bash tests/programs/test_headers.sh others examples
for script in index parts; do campaign env CASES=all bash "tests/programs/test_$script.sh"; done
venv=${VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/dt-tests/venv} # tests/run.sh installs it
[ -n "$PYTHON" ] || [ ! -e "$venv/ready" ] || export PYTHON=$venv/bin/python
campaign env MB=10 bash tests/programs/test_tokenizer.sh
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
