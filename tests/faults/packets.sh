#!/usr/bin/env bash
# packets.sh - 100 jobs over a network with loss, delay, duplication, corruption, partitions: packets.c
#
#   tests/faults/packets.sh                 all jobs
#   tests/faults/packets.sh FIRST COUNT     COUNT jobs from FIRST on
#   PACKETS_SHOW=1 build/packets N 1        job N again, with its ranks' output
#
# Last line "packets: N passed, N failed, N skipped". In about 40 s on two cores.
cd "$(dirname "$0")/../.." || exit 1
B=${B:-build} MAKE=${MAKE:-make}
if ! $MAKE -s "$B/packets"; then
    echo "FAIL packets does not build"
    echo "packets: 0 passed, 1 failed, 0 skipped"
    exit 1
fi
exec "$B/packets" "$@"
