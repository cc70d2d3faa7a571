#!/usr/bin/env bash
# test_entry_points.sh - every public function with invalid arguments returns a status and never crashes
#
#   tests/programs/test_entry_points.sh          all of them
#   tests/programs/test_entry_points.sh NAME...  these, with every pick of arguments that fails
#
# The functions and the types of their arguments are read from the DT_API declarations of the four headers, so new
# functions are included. Each is called under the address and undefined-behaviour sanitizers with all-zero arguments;
# with a valid handle (context, group, tensor, ...) and the rest zero; with numbers at their extremes, all and one at a
# time, and NaN and infinity; with NULL and empty texts, and buffers of 0 and 1 bytes between guards; and with mixtures of
# these, on one rank and on two. See entry_points.h.
#
# Called only with some arguments:
#   dt_ctx_attach                   it keeps a struct of the layer above: NULL only
#   dt_free, dt_unpin               p is from dt_alloc or dt_pin: NULL only
#   dt_listen, dt_unlisten          the struct must outlive its use: NULL only
#   dt_record, dt_record_saved, ... callbacks are NULL, as an op without a backward has them
#   kernels of a table              called by ops, which have checked their arguments; tests/fuzz has them
cd "$(dirname "$0")/../.." || exit 1
CC=${CC:-cc} B=${B:-build} MAKE=${MAKE:-make}
ROOT=$PWD
D=$(mktemp -d)
trap 'rm -rf "$D"' EXIT
stop() { echo "$1"; echo "test_entry_points: 0 passed, $2 failed, $3 skipped"; exit "$2"; }
headers="dt_tensor.h dt_comm.h dt_parallel.h dt_zero.h"

# A header's public part without comments, one line for each declaration or struct.
declarations() { # declarations HEADER
    sed -e '/^#if defined(DT_IMPLEMENTATION) && !defined(DT_[A-Z]*_IMPL)/,$d' "$1"
}
for h in $headers; do
    declarations "$h"
done | sed -e 's://.*$::' -e '/^ *#/d' | tr '\n' ' ' |
    sed -e 's:/\*:\x01:g' -e 's:\*/:\x02:g' -e 's:\x01[^\x02]*\x02: :g' | tr -s ' ' >"$D/text"
grep -o 'DT_API [^;{]*[;{]' "$D/text" | sed -e 's/ DT_PRINTF([^)]*)//' -e 's/ *[;{]$//' | sort -u >"$D/functions"
grep -o 'typedef struct \(__attribute__(([^)]*)) \)\?dt_[a-z_0-9]* *{[^}]*} *dt_[a-z_0-9]* *;' "$D/text" >"$D/structs"
grep -o 'typedef enum dt_[a-z_0-9]* *{[^}]*}' "$D/text" | sed -e 's/typedef enum //' -e 's/ *{.*//' >"$D/enums"

{
    cat <<'END'
#define DT_IMPLEMENTATION
#define DT__TENSOR_TABLE
#include "dt_zero.h"
#include <fcntl.h>
#include "tests/programs/entry_points.h"
END
    awk -v enums="$(tr '\n' ' ' <"$D/enums")" '
    function trim(s) { gsub(/^ +| +$/, "", s); return s }
    function complain(s) { print "cannot parse: " s >"/dev/stderr"; bad = 1 }
    function is_number(t) { return t in number }
    # Cuts at top-level commas.
    function cut(s, out,    n, i, c, deep, word) {
        n = 0; deep = 0; word = ""
        for (i = 1; i <= length(s); i++) {
            c = substr(s, i, 1)
            if (c == "(") deep++
            if (c == ")") deep--
            if (c == "," && deep == 0) { out[++n] = trim(word); word = ""; continue }
            word = word c
        }
        if (trim(word) != "") out[++n] = trim(word)
        return n
    }
    BEGIN {
        n = split("char int unsigned int8_t uint8_t int32_t uint32_t int64_t uint64_t size_t uintptr_t double float " \
                  enums, all, " ")
        for (i = 1; i <= n; i++) number[all[i]] = 1
        n = split("dt_ctx dt_comm dt_tensor dt_node dt_zero dt_table dt_weights dt_io dt_json dt_work dt_team dt_checkpoint " \
                  "dt_cp dt_routing dt_schedule dt_sampler dt_text", all, " ")
        for (i = 1; i <= n; i++) handle[all[i]] = 1
        n = split("dt_ctx_free dt_comm_detach dt_team_free dt_ctx_attach dt_comm_attach dt_checkpoint_close " \
                  "dt_zero_free dt_table_free dt_json_free dt_text_close dt_weights_close dt_dry_begin", all, " ")
        for (i = 1; i <= n; i++) consumes[all[i]] = 1
        n = split("dt_ctx_attach dt_free dt_unpin dt_listen dt_unlisten", all, " ")
        for (i = 1; i <= n; i++) owns[all[i]] = 1
    }
    # A struct: writes a function that sets its numbers, also in nested structs. Pointers stay NULL.
    FILENAME ~ /structs$/ {
        body = $0; sub(/^[^{]*\{/, "", body); sub(/\}[^}]*$/, "", body)
        name = $0; sub(/^.*\} */, "", name); sub(/ *;.*$/, "", name)
        known[name] = 1; counts[name] = 0
        printf "static void fill_%s(%s *s, pick *p) {\n    (void)s; (void)p;\n", name, name
        fields = split(body, field, ";")
        for (f = 1; f <= fields; f++) {
            decl = trim(field[f])
            if (decl == "" || decl ~ /\(/) continue
            sub(/^const /, "", decl); sub(/^struct /, "", decl)
            type = decl; sub(/[ *].*$/, "", type)
            sub(/^[a-z_0-9]+ */, "", decl)
            parts = split(decl, part, ",")
            for (i = 1; i <= parts; i++) {
                x = trim(part[i])
                if (x ~ /^\*/ || x ~ /^const/) continue
                at = x; gsub(/\[[^]]*\]/, "[0]", at)
                if (is_number(type)) {
                    printf "    s->%s = (__typeof__(s->%s))NUMBER(p, s->%s);\n", at, at, at
                    counts[name]++
                } else if (type in known) { printf "    fill_%s(&s->%s, p);\n", type, at; counts[name] += counts[type] }
            }
        }
        print "}"
        next
    }
    {
        line = $0; sub(/^DT_API /, "", line)
        open = match(line, /dt_[a-z_0-9]+\(/)
        if (!open) { complain($0); next }
        name = substr(line, RSTART, RLENGTH - 1)
        args = substr(line, RSTART + RLENGTH); sub(/\)$/, "", args)
        if (args == "void") args = ""
        n = cut(args, arg); numbers = 0; list = ""
        printf "static void call_%s(pick *p) {\n    (void)p;\n", name
        for (i = 1; i <= n; i++) {
            a = arg[i]
            if (a == "...") continue
            if (a ~ /\(\*/) { list = list (i > 1 ? ", " : "") "NULL"; continue }
            word = a; sub(/\[[0-9]*\]$/, "", word); sub(/^.*[ *]/, "", word)
            type = a; array = sub(/\[[0-9]*\]$/, "", type); type = trim(substr(type, 1, length(type) - length(word)))
            if (array) type = type " *"
            base = type; gsub(/const |\*/, "", base); base = trim(base)
            stars = gsub(/\*/, "*", type)
            list = list (i > 1 ? ", " : "") (skip ? "" : "a" i)
            if (skip_size == i) { skip_size = 0; numbers_here = 0; continue }
            if (stars == 1 && base == "char" && type !~ /const/ && arg[i + 1] ~ /^size_t/) {
                printf "    size_t a%d; char *a%d = text_buffer(p, &a%d);\n", i + 1, i, i + 1
                skip_size = i + 1
            } else if (stars == 1 && base == "char" && type ~ /const/ && arg[i + 1] !~ /^size_t/)
                printf "    const char *a%d = words(p, %d);\n", i, word ~ /path|dir|from/
            else if (stars == 1 && base in handle)
                printf "    %s a%d = (%s)handle(p, %d, \"%s\", \"%s\");\n", type, i, type, i - 1, base, word
            else if (stars > 0)
                printf "    %s a%d = (%s)data(p);\n", type, i, type
            else if (is_number(base)) {
                printf "    %s a%d = 0; a%d = (%s)NUMBER(p, a%d);\n", type, i, i, type, i; numbers++
            } else if (base in known) {
                printf "    %s a%d; memset(&a%d, 0, sizeof a%d); fill_%s(&a%d, p);\n", type, i, i, i, base, i
                numbers += counts[base]
            } else if (base ~ /_fn$/) printf "    %s a%d = NULL;\n", type, i
            else complain($0 " (argument " a ")")
        }
        printf "    (void)(%s)(%s);\n}\n", name, list
        table = table sprintf("    { \"%s\", call_%s, %d, %d, %d },\n", name, name, numbers, name in consumes,
                              name in owns)
        functions++
    }
    END {
        printf "static const entry entries[] = {\n%s};\nstatic const int entry_count = %d;\n", table, functions
        exit bad
    }' "$D/structs" "$D/functions"
} >"$D/entry_points.c" 2>"$D/parse" || stop "FAIL $(cat "$D/parse")" 1 0

# Every DT_API function of the headers must be among them.
for h in $headers; do
    declarations "$h" | grep '^DT_API' | grep -o '\bdt_[a-z_0-9]*(' | sed 's/($//'
done | sort -u >"$D/declared"
sed -n 's/^    { "\(dt_[a-z_0-9]*\)".*/\1/p' "$D/entry_points.c" | sort -u >"$D/called"
missing=$(comm -23 "$D/declared" "$D/called")
[ -z "$missing" ] || stop "FAIL declared but not called: $(echo $missing)" 1 0

flags="-std=gnu11 -O0 -g1 -w -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
echo 'int main(void) { return 0; }' | $CC $flags -x c - -o "$D/try" 2>/dev/null && "$D/try" 2>/dev/null ||
    stop "SKIP the compiler has no address and undefined-behaviour sanitizers" 0 1
$MAKE -s "$B/tests_kernels.o" >"$D/log" 2>&1 &&
    $CC $flags -I. "$D/entry_points.c" "$B/tests_kernels.o" -o "$D/entry_points" -lm -lpthread >"$D/log" 2>&1 ||
    stop "FAIL the calls do not build: $(grep -m 1 error "$D/log")" 1 0

mkdir "$D/run"
head -c 4096 README.md >"$D/run/text"
echo "text for a path" >"$D/run/x"
cd "$D/run" || exit 1
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=512:quarantine_size_mb=8
export UBSAN_OPTIONS=print_stacktrace=1
"$D/entry_points" "$@" >"$D/said" 2>&1
status=$?
cd "$ROOT" || exit 1
grep -v '^entry_points:' "$D/said"
read -r passed failed <<<"$(sed -n 's/^entry_points: \([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$D/said")"
[ -n "$passed" ] || stop "FAIL the calls end with status $status" 1 0
echo "test_entry_points: $passed passed, $failed failed, 0 skipped"
[ "$failed" = 0 ]
