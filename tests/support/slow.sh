# slow.sh - sets SLOW, by how much other load slows this machine now (jitter.h). Limits on wall-clock time are multiplied
# by it. Source it from the project's folder.
slowdown=${B:-build}/slowdown
if ! [ "$slowdown" -nt tests/support/jitter.h ]; then
    mkdir -p "${slowdown%/*}"
    cc -O1 -I. tests/support/slowdown.c -o "$slowdown.$BASHPID" && mv "$slowdown.$BASHPID" "$slowdown"
fi
SLOW=$("$slowdown") || SLOW=1
