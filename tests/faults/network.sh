#!/usr/bin/env bash
# network.sh - ranks on two hosts: rendezvous and proofs across a network, unauthenticated clients, a cut link
#
#   tests/faults/network.sh
#
# The hosts are network namespaces with a pair of virtual interfaces between them, so it needs root, the command ip
# (Debian: iproute2) and a kernel that lets it make them; else it is skipped. Host A has ranks 0 and 1, host B the
# other ranks. Prints how long a job takes to form, alone and under each attack; a line for each check that failed; last
# "network: N passed, N failed, N skipped". In about 40 s.
cd "$(dirname "$0")/../.." || exit 1
. tests/support/slow.sh
B=${B:-build} MAKE=${MAKE:-make}
passed=0 failed=0
here=A$$ there=B$$ address=10.77.3.1 port=29517 place=10.77.3.1:29517
D=$(mktemp -d)
started=()

finish() { # whatever happened: no process, no namespace
    local pid
    for pid in "${started[@]}"; do kill -9 "$pid" 2>/dev/null; done
    ip netns del "$here" 2>/dev/null
    ip netns del "$there" 2>/dev/null
    rm -rf "$D"
}

skip() { echo "SKIP $1"; echo "network: 0 passed, 0 failed, 1 skipped"; exit 0; }
check() { # check TEXT CONDITION...: the words of a command
    local text=$1
    shift
    if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAIL $text"; fi
}
has() { grep -qE "$2" "$D/$1"; }
below() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a != "" && a < b) }'; }

[ "$(id -u)" = 0 ] || skip "network: hosts of namespaces need root"
command -v ip >/dev/null || skip "network: ip is not installed"
trap finish EXIT
trap 'exit 1' INT TERM HUP
ip netns add "$here" 2>"$D/why" && ip netns add "$there" 2>"$D/why" &&
    ip -n "$here" link add veth0 type veth peer name veth0 netns "$there" 2>"$D/why" &&
    ip -n "$here" addr add $address/24 dev veth0 && ip -n "$there" addr add 10.77.3.2/24 dev veth0 &&
    ip -n "$there" addr add 10.77.3.3/24 dev veth0 ||
    skip "network: no namespaces here: $(head -n 1 "$D/why")"
for host in "$here" "$there"; do ip -n "$host" link set lo up; ip -n "$host" link set veth0 up; done
if ! $MAKE -s "$B/net_rank" >"$D/build" 2>&1; then
    cat "$D/build"
    echo "FAIL net_rank does not build"
    echo "network: 0 passed, 1 failed, 0 skipped"
    exit 1
fi
cp "$B/net_rank" "$D/net_rank"
head -c 32 /dev/urandom | base64 >"$D/token"
head -c 32 /dev/urandom | base64 >"$D/other"
chmod 600 "$D/token" "$D/other"

on() { # on HOST OUT COMMAND...: in the background, its process is $! (each ends itself after a minute)
    local host=$1 out=$2
    shift 2
    ip netns exec "$host" "$@" >"$D/$out" 2>&1 </dev/null &
    started+=($!)
}
rank() { # rank R N TIMEOUT MODE [TOKEN FILE] [OUT]: rank R on its host
    local host=$here file=${5-token}
    [ "$1" -lt 2 ] && [ "$2" -gt 2 ] || [ "$1" = 0 ] || host=$there
    on "$host" "${6:-$1}" env ${file:+DT_TOKEN_FILE=$D/$file} "$D/net_rank" rank "$1" "$2" "${name:-$place}" "$3" "$4"
    last=$!
}
listening() { # until rank 0 does
    local i
    for ((i = 0; i < 100 * SLOW; i++)); do
        ip netns exec "$here" grep -q "$(printf ':%04X 00000000:0000 0A' $port)" /proc/net/tcp && return
        sleep 0.02
    done
}
formed() { sed -n 's/^formed //p' "$D/1" "$D/2" "$D/3" | sort -n | head -n 1; }     # since the last began
all_well() { local r; for r in 0 1 2 3; do has $r '^ended DT_OK' || return 1; done; }
four() { # four [COMMAND]: rank 0, the command, and then the other three; waits for all
    local pids=()
    rm -f "$D"/[0-3]
    rank 0 4 10 once; pids+=($last)
    listening
    [ $# = 0 ] || "$@"
    for r in 1 2 3; do rank $r 4 10 once; pids+=($last); done
    wait "${pids[@]}"
}

# ---- rendezvous, proofs -------------------------------------------------------------------------------------------

four
check "four ranks on two hosts: $(cat "$D"/[0-3])" all_well
check "rank 0 says what is still open: $(cat "$D/0")" has 0 "$place: the data of the ranks will be neither encrypted nor"
alone=$(formed)
echo "a job of 4 ranks on 2 hosts forms in $alone s"

# By name. Many hosts resolve their own name to a loopback address.
named() { # named HOST OUT ADDRESS RANK
    on "$1" "$2" sh -c "echo '$3 nodea' >$D/hosts.$4; mount --bind $D/hosts.$4 /etc/hosts && DT_TOKEN_FILE=$D/token exec \
        $D/net_rank rank $4 2 nodea:$port 5 once"
}
rm -f "$D"/[0-3]
named "$here" 0 127.0.1.1 0; first=$!
named "$there" 1 $address 1; wait $first $!
check "a name: $(cat "$D/0" "$D/1")" eval 'has 0 "^ended DT_OK" && has 1 "^ended DT_OK"'

rank 1 2 5 once ""; wait $last
check "without a token: $(cat "$D/1")" has 1 'dt: error: dt_run: the rendezvous .* there is no token. Make one: head -c 32'

wrong() { rank 3 4 10 once other wrong; wait $last; }
four wrong
check "a wrong token: $(cat "$D/wrong")" has wrong "rank 0 at $place refuses this rank: the token is not this job's"
check "the job continues after a wrong token: $(cat "$D"/[0-3])" all_well
check "rank 0 reports the wrong token once" [ "$(grep -c '^dt: rank 0 at .* rejects 10.77.3.2:[0-9]*: the token' "$D/0")" = 1 ]

replay() { on "$there" replay env DT_TOKEN="$(cat "$D/token")" "$D/net_rank" replay $place 3 4; wait $!; }
four replay
check "a client with the token is accepted: $(cat "$D/replay")" has replay '^first: welcome'
check "a replayed handshake: $(cat "$D/replay")" has replay "^again: the token is not this job's"
check "the job continues after a replay: $(cat "$D"/[0-3])" all_well

# ---- unauthenticated clients ----------------------------------------------------------------------------------------------------

names=("1,000 silent connections" "1,000 slow connections" "1,000 half and whole hellos" "a scanner" "1 MB of garbage")
crowd() { on "$there" attack "$D/net_rank" attack $place $kind 10.77.3.3; attacker=$!; sleep 0.7; }
for kind in 0 1 2 3 4; do
    four crowd
    kill -9 $attacker; wait $attacker 2>/dev/null
    echo "under ${names[kind]} it forms in $(formed) s"
    check "${names[kind]}: $(cat "$D"/[0-3])" all_well
    most=$(awk "BEGIN { print $alone + $SLOW }")
    check "${names[kind]}: the job forms after $(formed) s, not within $most s" below "$(formed)" "$most"
done 2>/dev/null

# ---- a cut link ---------------------------------------------------------------------------------------------------

cut_link() { # cut_link MODE TIMEOUT SIDE
    local pids=() r when text other
    rm -f "$D"/[0-3]
    for r in 0 1; do rank $r 2 $2 $1; pids+=($last); done
    for ((r = 0; r < 100 * SLOW; r++)); do has 0 '^formed' && has 1 '^formed' && break; sleep 0.05; done
    sleep 0.3
    ip -n "$3" link set veth0 down
    when=$(date +%s.%N)
    wait "${pids[@]}"
    ip -n "$3" link set veth0 up
    for r in 0 1; do
        other=$((1 - r))
        text=$(sed -n 's/^ended //p' "$D/$r")
        took=$(awk -v a="$(cut -d' ' -f2 <<<"$text")" -v b="$when" 'BEGIN { printf "%.2f", a - b }')
        check "a cut link ($1): rank $r: $text" grep -q "rank $other" <<<"${text#*: rank $r: }"
        echo "a cut link, $1, timeout $2 s: rank $r knows after $took s: ${text#*: }"
        if [ $1 = steps ]; then
            check "a cut link: rank $r knows it after $took s" below "$took" $(($2 + SLOW))
        else
            check "a cut link without traffic: rank $r waits: $text" below "$(cut -d' ' -f3 <<<"${text%%:*}")" $(awk "BEGIN { print 0.3 * $SLOW }")
        fi
    done
}
cut_link steps 2 "$here"
cut_link steps 3 "$there"
cut_link idle 2 "$there"

echo "network: $passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
