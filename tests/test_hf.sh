#!/usr/bin/env bash
# test_hf.sh - what gpt_save writes, loaded by Hugging Face's transformers: the logits are those of gpt.h
#
# PYTHON is the program to use [python3]; without transformers and torch there the test is skipped.
cd "$(dirname "$0")/.." || exit 1
B=${B:-build} MAKE=${MAKE:-make} PYTHON=${PYTHON:-python3}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
if ! "$PYTHON" -c 'import torch, transformers, numpy' >/dev/null 2>&1; then
    echo "SKIP test_hf: $PYTHON has no transformers and torch (PYTHON=... names another)"
    echo "test_hf: 0 passed, 0 failed, 1 skipped"
    exit 0
fi
$MAKE -s "$B/test_gpt" && "$B/test_gpt" --save "$dir" && \
    PYTHONDONTWRITEBYTECODE=1 "$PYTHON" tests/golden/make_hf.py --check "$dir" >"$dir/said" 2>"$dir/err"
grep -E '^(ok|WRONG)' "$dir/said" 2>/dev/null | sed 's/^WRONG/FAIL/'
: >>"$dir/said"
passed=$(grep -c '^ok' "$dir/said") failed=$(grep -c '^WRONG' "$dir/said")
if [ $((passed + failed)) != 4 ]; then
    echo "FAIL test_hf: $passed of 4 models were loaded"
    tail -n 3 "$dir/err"
    failed=$((failed + 1))
fi
echo "test_hf: $passed passed, $failed failed, 0 skipped"
[ "$failed" = 0 ]
