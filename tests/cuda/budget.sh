#!/usr/bin/env bash
# budget.sh - dt_kernels.cu compiled for a GPU: no warning, and no kernel over its budget: 256 bytes of spilled
# registers, and 48 KiB of shared memory that its launch does not ask for
#
#   tests/cuda/budget.sh [-o OBJECT] ARCH...      75 80 90a 100; the object is that of the last
#
# Prints one line for each architecture, and exits with status 1 if any kernel is over budget. Needs nvcc, but no GPU;
# each architecture takes one to three minutes. Two blocks of 256 threads with at most 128 registers, or of 128 threads
# with 255, fit on a multiprocessor.
cd "$(dirname "$0")/../.." || exit 1
case ${1:--h} in
-h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' tests/cuda/budget.sh; exit $((2 * ($# == 0))) ;;
esac
object=/dev/null
if [ "$1" = -o ]; then object=$2; shift 2; fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
bad=0
for arch; do
    nvcc -O3 -arch="sm_$arch" -Xcompiler -Wall,-Wextra -Xptxas -v -c dt_kernels.cu -o "$object" >"$log" 2>&1 ||
        { tail -n 5 "$log"; exit 1; }
    warnings=$(grep -ciE 'warning|are serialized' "$log") # serialized: nvcc waits for every wgmma, reported as "info"
    [ "$warnings" = 0 ] || grep -iE 'warning|are serialized' "$log" | head -n 5
    awk -v arch="$arch" -v warnings="$warnings" '
        /Compiling entry function/ { split($0, part, "\047"); name = part[2]; n++ }
        /bytes spill stores/ { for (i = 1; i <= NF; i++) if ($i == "bytes" && $(i + 1) == "spill") spill += $(i - 1)
                               if (spill > most_spill) { most_spill = spill; worst = name }; all += spill; spill = 0 }
        /Used [0-9]+ registers/ { for (i = 1; i <= NF; i++) if ($i == "Used") r = $(i + 1)
                                  if (r > most) { most = r; widest = name }
                                  s = match($0, /[0-9]+ bytes smem/) ? substr($0, RSTART) + 0 : 0
                                  if (s > shared) shared = s }
        END { printf "sm_%s: %d kernels, %d warnings; registers %d (%s); spilled %d bytes%s; shared %d\n", arch,
                   n, warnings, most, widest, all, all ? " (" worst ")" : "", shared
              exit !(n > 0 && warnings == 0 && most_spill <= 256 && shared <= 48 * 1024) }' "$log" || bad=1
done
exit $bad
