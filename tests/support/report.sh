# report.sh - shared by the shell tests: counts checks, runs train_gpt, prints the last line. Source it from the project's
# folder. It makes an empty folder $dir, in which the files out and err are the output of the last run.
B=${B:-build} MAKE=${MAKE:-make}
passed=0 failed=0 skipped=0
dir=$(mktemp -d)
children=() # processes to kill when the script ends
clean_up() {
    [ ${#children[@]} = 0 ] || { kill -9 "${children[@]}"; wait "${children[@]}"; } 2>/dev/null
    rm -rf "$dir"
}
trap clean_up EXIT
trap 'exit 1' INT TERM
. tests/support/slow.sh

report() { # report STATUS TEXT: one check, which passes if STATUS is 0
    if [ "$1" = 0 ]; then passed=$((passed + 1)); return; fi
    failed=$((failed + 1))
    echo "FAIL $2"
    for f in "$dir"/err*; do [ ! -f "$f" ] || cat "$f"; done 2>/dev/null | head -n 6 | cat -v | sed 's/^/    /'
}

skip() { echo "SKIP $1"; skipped=$((skipped + 1)); }

only_error() { # only_error FILE PATTERN: 0 if FILE has exactly one line "error: ...", which matches PATTERN
    [ "$(grep -ac '^error: ' "$1")" = 1 ] && grep -aEq -- "$2" "$1"
}

# try STATUS PATTERN ARGS...: train_gpt must end with STATUS and, unless STATUS is 0, with one error line that matches
# PATTERN. $common: further arguments; $limit: time limit in seconds on an
# idle machine.
try() {
    local want=$1 pattern=$2 status
    shift 2
    timeout -k 5 $((${limit:-60} * SLOW)) "$B/train_gpt" $common "$@" >"$dir/out" 2>"$dir/err" </dev/null
    status=$?
    [ $status = "$want" ] && { [ "$want" = 0 ] || only_error "$dir/err" "$pattern"; }
    report $? "status $status, wanted $want and '$pattern': train_gpt $common $(printf '%q ' "$@")"
}

finish() { # finish: prints the last line and ends the script
    echo "$script: $passed passed, $failed failed, $skipped skipped"
    [ $failed = 0 ]
    exit
}

script=$(basename "$0" .sh)

needs_train_gpt() { # builds train_gpt and makes $dir/text, a small text to train on
    $MAKE -s "$B/train_gpt" 2>"$dir/err"
    [ $? = 0 ] || { report 1 "train_gpt does not build"; finish; }
    head -c 5000 README.md >"$dir/text"
}
