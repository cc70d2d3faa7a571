#!/usr/bin/env bash
# test_network.sh - ranks on two hosts: tests/faults/network.sh, and of tests/faults/packets.sh a job of each kind
cd "$(dirname "$0")/../.." || exit 1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
tests/faults/network.sh >"$log"
tests/faults/packets.sh 0 15 >>"$log"
sum='^(network|packets): ([0-9]+) passed, ([0-9]+) failed, ([0-9]+) skipped$'
grep -vE "$sum" "$log"
sed -nE "s/$sum/\2 \3 \4/p" "$log" | awk '{ passed += $1; failed += $2; skipped += $3 }
    END { printf "test_network: %d passed, %d failed, %d skipped\n", passed, failed + 2 - NR, skipped; exit failed || NR < 2 }'
