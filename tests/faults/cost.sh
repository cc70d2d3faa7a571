#!/usr/bin/env bash
# cost.sh - the cost per operation of records and checks: alternates test_mismatch with them and without them
#
# At most LIMIT_NS (150) for a small all-reduce and a barrier of 2 ranks, threads and procs, each on a core of its own.
# The fastest of all rounds counts. If dt_comm.h has no DT_NO_CHECKS there is no baseline.
cd "$(dirname "$0")/../.." || exit 1
LIMIT_NS=${LIMIT_NS:-150} ROUNDS=${ROUNDS:-7} CC=${CC:-cc}
if ! grep -q DT_NO_CHECKS dt_comm.h; then
    echo "SKIP cost: this version has no DT_NO_CHECKS"
    echo "cost: 0 passed, 0 failed, 1 skipped"
    exit 0
fi
if [ "$(nproc)" -lt 2 ]; then
    echo "SKIP cost: two ranks need two cores"
    echo "cost: 0 passed, 0 failed, 1 skipped"
    exit 0
fi
D=$(mktemp -d)
trap 'rm -rf "$D"' EXIT
$CC -O3 -I. tests/comm/test_mismatch.c -o "$D/with" -lm -lpthread &
$CC -O3 -I. -DDT_NO_CHECKS tests/comm/test_mismatch.c -o "$D/without" -lm -lpthread || exit 1
wait $! || exit 1
for ((i = 0; i < ROUNDS; i++)); do
    "$D/with" cost >>"$D/with.log" && "$D/without" cost >>"$D/without.log" || exit 1
done
passed=0 failed=0
for what in threads:3 threads:6 procs:3 procs:6; do # the column of the all-reduce, of the barrier
    least() { awk -v b="${what%:*}:" -v c="${what#*:}" '$1 == b && (!n || $c < n) { n = $c } END { print n }' "$1"; }
    with=$(least "$D/with.log") without=$(least "$D/without.log")
    name="${what%:*}, $([ "${what#*:}" = 3 ] && echo all-reduce || echo barrier)"
    echo "$name: $with ns, without checks $without ns"
    if awk -v a="$with" -v b="$without" -v most="$LIMIT_NS" 'BEGIN { exit !(a - b <= most) }'; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $name: more than $LIMIT_NS ns"
    fi
done
echo "cost: $passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
