#!/usr/bin/env bash
# test_power.sh - checkpoints on a block device whose power is cut: a sample of tests/faults/power.sh
cd "$(dirname "$0")/../.." || exit 1
tests/faults/power.sh sample | sed 's/^power: \([0-9]* passed\)/test_power: \1/'
exit "${PIPESTATUS[0]}"
