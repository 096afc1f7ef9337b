#!/usr/bin/env bash
# Runs every test and prints how many were not run because root, etcd or Azurite is missing. Arguments go to pytest.
# `make test` and `make test-all` call it, after they have installed what the tests need.
set -uo pipefail
cd "$(dirname "$0")/.."

# Tests and the servers that they start leave nothing behind. Not in the clone: Unix sockets of Ray lie below it, and their
# paths must be short.
scratch=$(mktemp -d "${TMPDIR:-/tmp}/millrace-test.XXXXXX") || exit 1
# etcd waits for the disk at each write, and its clients do not wait long: its data is in memory where there is room.
free_memory=$(df --output=avail /dev/shm 2>/dev/null | tail -n 1)
if ((${free_memory:-0} > 2000000)); then
  TEST_MEMORY_DIR=$(mktemp -d /dev/shm/millrace-test.XXXXXX) && export TEST_MEMORY_DIR
fi
trap 'rm -rf "$scratch" "${TEST_MEMORY_DIR-}"' EXIT
mkdir "$scratch/home"
export TMPDIR=$scratch RAY_TMPDIR=$scratch HOME=$scratch/home
# The tests start thousands of processes. Each would compile Millrace again where the environment has this variable.
unset PYTHONDONTWRITEBYTECODE
# Ray gives its workers a low priority. Beside two other workers of pytest they would hardly run.
export RAY_worker_niceness=0
# Ray Data starts 32 processes for the footers of even one Parquet file, each for 1.5 s of CPU time; most are killed while they start.
export RAY_DATA_PARQUET_FOOTER_NUM_ACTORS=1
# Neither a process of Ray Train for each group of workers that waits for drained nodes, nor one of Ray Data for usage reports.
export RAY_TRAIN_ENABLE_PREEMPTION_WATCHER=0 RAY_USAGE_STATS_ENABLED=0
# Ray ends processes that are idle for a second, and starts others, which import all modules again.
export RAY_idle_worker_killing_time_threshold_ms=60000

# Four files at a time, in the order of tests/conftest.py: most of what those do is wait, for leases, deadlines and
# processes that start, so that two cores have room for two more.
# The limit is far above what it takes; pyproject.toml limits each test.
timeout --foreground --kill-after=30 4500 .venv/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations 40 --durations-min 5 "$@" 2>&1 | tee "$scratch/output"
status=${PIPESTATUS[0]}

counts=$(grep -E '^=*.*(passed|failed|error|no tests ran).* in [0-9]' "$scratch/output" | tail -n 1 | tr -d '=')
skipped_for() {
  sed -n "s/^SKIPPED \[\([0-9]*\)\].*needs $1\$/\1/p" "$scratch/output" | awk '{ n += $1 } END { print n + 0 }'
}
for_root=$(skipped_for root)
for_ssh=$(skipped_for "sshd, ssh and rsync")
for_azurite=$(skipped_for Azurite)
echo "tests:${counts:- no summary}; not run because they need root: $for_root, because they need etcd: $(skipped_for etcd), \
because they need SSH: $for_ssh, because they need Azurite: $for_azurite, because they need Prometheus: \
$(skipped_for Prometheus), because they need Chromium: $(skipped_for Chromium)"
if ((EUID == 0 && for_root + for_ssh + for_azurite > 0)); then
  echo "test: root must run all tests, and $for_root were skipped for want of root, $for_ssh for want of SSH, \
$for_azurite for want of Azurite" >&2
  ((status)) || status=1
fi
exit "$status"
