#!/usr/bin/env bash
# restart.sh - 200 killed ranks and 80 SIGTERM: tests/programs/test_restart.sh in full
exec bash "$(dirname "$0")/../programs/test_restart.sh" full
