#!/usr/bin/env bash
# offload_cgroup.sh - --mem-limit with offload to disk, checked by a control group of the kernel
#
#   tests/bench/offload_cgroup.sh        B=build
#
# Trains a model whose state on each rank is more than ten times --mem-limit, with state, parameters and gradients in
# files, in a control group whose limit is RANKS x --mem-limit + ALLOWANCE. The group counts all pages of the ranks and
# of their files in the page cache. The allowance is for the program, the supervisor, stacks, libraries and page tables.
# First the model trains in a group without a limit, whose peak shows how much the page cache takes then. Last it trains
# without offload, which must exceed the limit. Needs root and the memory controller, v1 or v2. The script makes its own
# group and removes it. Ends with 77 if it cannot run.
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
B=${B:-$ROOT/build} RANKS=2 ALLOWANCE=$((24 << 20))
SETTINGS="--layers 128 --width 160 --heads 4 --seq 16 --batch 2 --micro-batch 1 --dp $RANKS --dtype bf16 --recompute full"
SETTINGS="$SETTINGS --zero 3 --steps 4 --backend procs"
skip() { echo "SKIP $1"; exit 77; }

[ -x "$B/train_gpt" ] || skip "$B/train_gpt is not built"
[ "$(id -u)" = 0 ] || skip "making a control group needs root"
if [ -f /sys/fs/cgroup/memory/memory.limit_in_bytes ]; then
    group=/sys/fs/cgroup/memory/dt_$$ limit=memory.limit_in_bytes peak=memory.max_usage_in_bytes
elif grep -qw memory /sys/fs/cgroup/cgroup.subtree_control 2>/dev/null; then
    group=/sys/fs/cgroup/dt_$$ limit=memory.max peak=memory.peak
else
    skip "no memory controller at /sys/fs/cgroup"
fi
dir=$(mktemp -d "${TMPDIR:-/var/tmp}/dt_offload.XXXXXX")
case $(stat -f -c %T "$dir") in tmpfs | ramfs) rmdir "$dir"; skip "$dir is in memory, not on a disk" ;; esac
trap 'rm -rf "$dir"; rmdir "$group"* 2>/dev/null' EXIT

needs() { "$B/train_gpt" $SETTINGS "$@" --dry-run | awk '/all at once +[0-9]+ +[0-9]+$/ { all = $5 }
    $1 == "params" || $1 == "grads" || $1 == "optim" { n += $2 } END { print n, all }'; }
inside() { # inside NAME ARGS...: in a group of its own
    local g=${group}_$1
    shift
    mkdir "$g" 2>/dev/null && echo "$bytes" >"$g/$limit" || skip "no control group can be made"
    [ ! -f "$g/memory.swap.max" ] || echo 0 >"$g/memory.swap.max"
    [ ! -f "$g/memory.swappiness" ] || echo 0 >"$g/memory.swappiness"
    [ -f "$g/$peak" ] || peak=memory.current
    (echo $BASHPID >"$g/cgroup.procs"; exec timeout 300 "$B/train_gpt" $SETTINGS "$@" >"$dir/out" 2>"$dir/err")
    status=$?
    used=$(cat "$g/$peak")
    rmdir "$g"
}

read -r state all < <(needs)
read -r _ small < <(needs --offload-optim "$dir" --offload-params "$dir")
small=$((small + (1 << 19))) # two windows, through which forked ranks exchange data that is not in shared memory
total=$((RANKS * small + ALLOWANCE))
echo "# a rank: state $state bytes, all $all; with offload --mem-limit $small; the group: $RANKS x that + $ALLOWANCE"
bytes=$((64 << 30))
inside free --offload-optim "$dir" --offload-params "$dir" --mem-limit "$small"
free=$used bytes=$total
inside disk --offload-optim "$dir" --offload-params "$dir" --mem-limit "$small"
failed=$status disk=$used
tail -n 1 "$dir/out" "$dir/err" | sed 's/^/#   /'
inside memory
[ "$status" != 0 ] || failed=1
echo "summary,state_of_a_rank_over_limit,$(awk "BEGIN{printf \"%.1f\", $state / $small}")"
echo "summary,group_peak_bytes_without_limit,$free"
echo "summary,group_limit_bytes,$total"
echo "summary,group_peak_bytes,$disk"
echo "summary,with_offload,$([ "$failed" = 0 ] && echo trained || echo failed)"
echo "summary,without_offload,$([ "$status" = 0 ] && echo trained || echo "ended by the limit")"
[ "$failed" = 0 ] && [ "$disk" -le "$total" ]
