#!/usr/bin/env bash
# test_network.sh - ranks on two hosts: tests/faults/network.sh
cd "$(dirname "$0")/.." || exit 1
tests/faults/network.sh | sed 's/^network: \([0-9]* passed\)/test_network: \1/'
exit "${PIPESTATUS[0]}"
