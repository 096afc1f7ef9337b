#!/usr/bin/env bash
# Runs every test and says how many were not run for want of root. Arguments go to pytest. `make test` calls it.
set -uo pipefail
cd "$(dirname "$0")/.."

# Tests and the servers that they start leave nothing behind. Not in the clone: Unix sockets of Ray lie below it, and their
# paths must be short.
scratch=$(mktemp -d "${TMPDIR:-/tmp}/millrace-test.XXXXXX") || exit 1
trap 'rm -rf "$scratch"' EXIT
export TMPDIR=$scratch RAY_TMPDIR=$scratch

.venv/bin/python -m pytest "$@" 2>&1 | tee "$scratch/output"
status=${PIPESTATUS[0]}

counts=$(grep -E '^=*.*(passed|failed|error|no tests ran).* in [0-9]' "$scratch/output" | tail -n 1 | tr -d '=')
for_root=$(sed -n 's/^SKIPPED \[\([0-9]*\)\].*needs root$/\1/p' "$scratch/output" | awk '{ n += $1 } END { print n + 0 }')
echo "tests:${counts:- no summary}; not run because they need root: $for_root"
if ((EUID == 0 && for_root > 0)); then
  echo "test: root must run all tests, and $for_root were skipped for want of root" >&2
  ((status)) || status=1
fi
exit "$status"
