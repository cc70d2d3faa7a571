#!/usr/bin/env bash
# hostfile.sh - starts ranks on several machines by ssh - public domain or MIT, at your choice
#
#     examples/launch/hostfile.sh HOSTFILE COMMAND...
#     examples/launch/hostfile.sh hosts build/train_gpt --data input.txt --zero 1 --steps 200
#
# HOSTFILE has a line "10.0.0.5 slots=4" for each machine, a name or address or USER@one, without slots 1; '#' begins a
# comment.
# Ranks are numbered in its order. All machines have this folder under the same path, and ssh asks for no password.
# Each rank gets DT_RANK, DT_WORLD_SIZE, DT_LOCAL_RANK, DT_LOCAL_SIZE, DT_RENDEZVOUS (the first machine, port DT_PORT,
# unless it is set already) and DT_TOKEN. Other variables stay here: COMMAND may be `env DT_FAULT=... build/train_gpt`.
# The script ends with the first bad status, and then ends all other ranks.
# SSH=...: another command for ssh.
hosts=$1
shift
[ -r "$hosts" ] && [ $# -gt 0 ] || { echo "usage: hostfile.sh HOSTFILE COMMAND..." >&2; exit 2; }
export SSH=${SSH:-ssh}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' INT TERM

where=() slot=() slots=()       # of each rank: its machine, its place there, and how many ranks that has
while read -r host rest || [ -n "$host" ]; do    # the last line may have no end
    n=1
    [[ $rest =~ slots=([0-9]+) ]] && n=${BASH_REMATCH[1]}
    for ((s = 0; s < n; s++)); do where+=("$host") slot+=("$s") slots+=("$n"); done
done < <(sed 's/#.*//; /^[[:space:]]*$/d' "$hosts")
size=${#where[@]}
[ "$size" -gt 0 ] || { echo "hostfile.sh: $hosts names no machine" >&2; exit 2; }

# The token goes through ssh's standard input and not in its words, which everyone sees. That input stays open as long
# as this script lives: a rank whose input ends is ended, so that no machine is left with a rank that nobody waits for.
# A second later: it may be about to say what it has learned of the others.
token=${DT_TOKEN:-$(head -c 32 /dev/urandom | base64)}
quoted() { local word; for word; do printf " '%s'" "${word//\'/\'\\\'\'}"; done; }    # as any shell reads them
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
