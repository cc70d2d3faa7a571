#!/usr/bin/env bash
# hostfile.sh - starts ranks on several machines by ssh - public domain or MIT, at your choice
#
#     examples/launch/hostfile.sh HOSTFILE COMMAND...
#     examples/launch/hostfile.sh hosts build/train_gpt --data input.txt --zero 1 --steps 200
#
# HOSTFILE has one line "HOST slots=N" per machine, for example "10.0.0.5 slots=4". HOST is a name, an address or
# USER@HOST; without slots the machine runs one rank; '#' begins a comment. Ranks are numbered in the order of the file.
# All machines need this folder under the same path, and ssh must not ask for a password.
# Each rank gets DT_RANK, DT_WORLD_SIZE, DT_LOCAL_RANK, DT_LOCAL_SIZE, DT_RENDEZVOUS (unless it is set already: the
# first machine and port DT_PORT) and DT_TOKEN. Other variables are not passed on; COMMAND may be
# `env DT_FAULT=... build/train_gpt`.
# When a rank fails, the script ends all other ranks and exits with that rank's status.
# SSH=...: a command to use instead of ssh.
hosts=$1
shift
[ -r "$hosts" ] && [ $# -gt 0 ] || { echo "usage: hostfile.sh HOSTFILE COMMAND..." >&2; exit 2; }
export SSH=${SSH:-ssh}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' INT TERM

where=() slot=() slots=()       # for each rank: its machine, its local rank, the number of ranks on that machine
while read -r host rest || [ -n "$host" ]; do    # the last line may lack a newline
    n=1
    [[ $rest =~ slots=([0-9]+) ]] && n=${BASH_REMATCH[1]}
    for ((s = 0; s < n; s++)); do where+=("$host") slot+=("$s") slots+=("$n"); done
done < <(sed 's/#.*//; /^[[:space:]]*$/d' "$hosts")
size=${#where[@]}
[ "$size" -gt 0 ] || { echo "hostfile.sh: $hosts names no machine" >&2; exit 2; }

# The token goes through ssh's standard input, because every user of a machine can see command lines. The input stays
# open while this script lives. When it closes, the remote side kills its rank, so that no machine keeps an orphaned
# rank. It waits one second first, because the rank may be about to print an error.
token=${DT_TOKEN:-$(head -c 32 /dev/urandom | base64)}
quoted() { local word; for word; do printf " '%s'" "${word//\'/\'\\\'\'}"; done; }    # quotes words for any POSIX shell
command=$(quoted "$@")
read -r -d '' rank_script <<'END'
read -r DT_TOKEN; export DT_TOKEN
exec 3<&0
"$@" </dev/null 3<&- & rank=$!
{ while read -r line; do :; done; sleep 1; kill $rank; sleep 5; kill -9 $rank; } <&3 >/dev/null 2>&1 & guard=$!
wait $rank; status=$?
kill $guard 2>/dev/null
exit $status
END

mkfifo "$tmp/ends"
exec 9<>"$tmp/ends"
for ((r = 0; r < size; r++)); do
    mkfifo -m 600 "$tmp/$r"
    set -- DT_RANK=$r DT_WORLD_SIZE=$size DT_LOCAL_RANK=${slot[r]} DT_LOCAL_SIZE=${slots[r]} \
        DT_RENDEZVOUS="${DT_RENDEZVOUS:-${where[0]#*@}:${DT_PORT:-29500}}"
    { $SSH "${where[r]}" "cd$(quoted "$PWD") && env$(quoted "$@") sh -c$(quoted "$rank_script") rank$command"
        echo "$r $?" >&9; } <"$tmp/$r" &
done
inputs=()
for ((r = 0; r < size; r++)); do
    exec {input}>"$tmp/$r"
    inputs+=("$input")
    echo "$token" >&"$input"
done

status=0
for ((ended = 0; ended < size && status == 0; ended++)); do read -r r status <&9; done
[ $status = 0 ] || echo "hostfile.sh: rank $r on ${where[r]} ended with status $status" >&2
for input in "${inputs[@]}"; do exec {input}>&-; done
wait
exit $status
