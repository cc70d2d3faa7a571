#!/usr/bin/env bash
# power.sh - checkpoints on a block device whose power is cut: tests/faults/power.c
#
#   tests/faults/power.sh           1,000 cuts, planted mistakes, ten campaigns that are themselves killed (make faults)
#   tests/faults/power.sh sample    16 cuts and one killed campaign: seconds (make test)
#   tests/faults/power.sh planted   only: after how many cuts each planted mistake in the headers is noticed
#
# CUTS and SEED change the campaign. It needs root, FUSE, loop devices, mkfs.ext4, and for the other file systems
# mkfs.xfs and mkfs.btrfs (Debian: e2fsprogs, xfsprogs, btrfs-progs); without them it is skipped. Whatever happens, no
# mount, no loop device and no process remains. Last line "power: N passed, N failed, N skipped".
cd "$(dirname "$0")/../.." || exit 1
B=${B:-build} MAKE=${MAKE:-make} mode=${1:-full} SEED=${SEED:-1}
passed=0 failed=0 skipped=0 pid=
D=$(mktemp -d "${TMPDIR:-/tmp}/power.XXXXXXXX")
name=${D##*/}

left() { # what a campaign left: loop devices over its disk, and processes that see its mounts
    grep -ls "$name" /sys/block/loop*/loop/backing_file /proc/[0-9]*/mountinfo 2>/dev/null
}
gone() { # waits until nothing is left; 1: something is
    local i
    for ((i = 0; i < 600; i++)); do
        [ -n "$(left)" ] || return 0
        sleep 0.1
    done
    return 1
}
finish() {
    [ -z "$pid" ] || kill -9 "$pid" 2>/dev/null
    gone || echo "power.sh: this stays: $(left | tr '\n' ' ')"
    rm -rf "$D"
}
trap finish EXIT
trap 'exit 1' INT TERM HUP

end() { echo "power: $passed passed, $failed failed, $skipped skipped"; [ "$failed" = 0 ]; exit; }
check() { # check TEXT CONDITION...
    local text=$1
    shift
    if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAIL $text"; fi
}
begin() { # begin PROGRAM ARGS...: in the background, in a new folder
    rm -rf "$D/run" && mkdir "$D/run" "$D/run/$name" || exit 1
    "$1" "$D/run/$name" "${@:2}" >"$D/log" 2>&1 </dev/null &
    pid=$!
}
ended() { # waits for it; what it says counts here
    local status
    wait "$pid"
    status=$? pid=
    if [[ $(tail -n 1 "$D/log") =~ ^power:\ ([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]]; then
        ran=("${BASH_REMATCH[@]:1}")
    else
        echo "it ended with status $status" >>"$D/log"
        ran=(0 1 0)
    fi
}
took() { passed=$((passed + ran[0])) failed=$((failed + ran[1])) skipped=$((skipped + ran[2])); }

# ---- the campaign -------------------------------------------------------------------------------------------------

if ! $MAKE -s "$B/power" >"$D/log" 2>&1; then
    cat "$D/log"
    check "power does not build" false
    end
fi
if [ "$mode" != planted ]; then
    [ "$mode" = sample ] && cuts=${CUTS:-16} || cuts=${CUTS:-1000}
    echo "$cuts cuts, seed $SEED"
    begin "$B/power" "$cuts" "$SEED"
    ended
    grep -v '^power: [0-9]* passed' "$D/log"
    took
    check "after the campaign this stays: $(left | tr '\n' ' ')" gone
    [ "${ran[0]}" != 0 ] || end
fi

# ---- a campaign that is killed --------------------------------------------------------------------------------------

attached() { grep -ls "$name" /sys/block/loop*/loop/backing_file >/dev/null 2>&1; }
killed() { # killed SIGNAL TIMES: somewhere in the first second after its disk is there
    local i n
    for ((n = 0; n < $2; n++)); do
        begin "$B/power" 100000 "$((SEED + n))"
        for ((i = 0; i < 600; i++)); do attached && break; sleep 0.1; done
        sleep "$((n % 4)).$((RANDOM % 10))"
        kill "-$1" "$pid"
        wait "$pid" 2>/dev/null
        pid=
        check "killed by $1: this stays: $(left | tr '\n' ' ')" gone
    done
}
[ "$mode" != sample ] || killed KILL 1
[ "$mode" != full ] || { killed KILL 5; killed TERM 5; }

# ---- planted mistakes -----------------------------------------------------------------------------------------------

# Not tested here: ckpt_folder_not_synced, ckpt_dir_not_synced and ckpt_old_removed_first. These file systems write a
# new name with the first sync of its file, and names in the order of their changes, so the mistakes do no harm on them.
# Other file systems may differ; test_checkpoint_faults notices these mistakes.
planted() { # planted MUTANT: in a copy of the project
    local m=$D/$1
    mkdir -p "$m/build" && cp ./dt_*.h Makefile "$m" && cp "$B/tests_kernels.o" "$m/build" && cp -r examples tests "$m"
    if ! (cd "$m" && patch -p1 -s -N --no-backup-if-mismatch) <"tests/mutants/$1.patch" >"$D/log" 2>&1 ||
        ! $MAKE -s -C "$m" B=build -o build/tests_kernels.o build/power >"$D/log" 2>&1; then
        tail -n 5 "$D/log"
        check "$1: it cannot be planted" false
        return
    fi
    begin "$m/build/power" 300 "$SEED" 1
    ended
    echo "planted: $1: $(sed -n 's/^FAIL [^ ]* //p' "$D/log" | head -n 1)"
    check "$1 is not noticed in 300 cuts" [ "${ran[1]}" != 0 ]
    rm -rf "$m"
}
if [ "$mode" != sample ]; then
    if command -v patch >/dev/null; then
        for mutant in ckpt_data_not_synced ckpt_manifest_not_synced ckpt_rename_not_synced; do planted $mutant; done
    else
        echo "SKIP power: planted mistakes: patch is not installed"
        skipped=$((skipped + 1))
    fi
fi
end
