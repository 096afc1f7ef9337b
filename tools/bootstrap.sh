#!/usr/bin/env bash
# Makes .venv from pyproject.toml and constraints.txt; does nothing when it is up to date. `make` calls it.
#
# Needs Python 3.11 or newer and nothing else of it: Debian's python3 comes without ensurepip, pip and venv's pip. pip's
# configuration (files and PIP_* variables) is the user's. To keep a CUDA build of torch out, configure an index or a
# folder that has the CPU build. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

pip_version=26.3
needed_mib=3000

fail() {
  echo "bootstrap: $*" >&2
  exit 1
}

# --- which Python, and whether there is anything to do ---

python=${PYTHON:-}
if [[ -z $python ]]; then
  for candidate in python3.11 python3 python3.12 python3.13; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
fi
[[ -n $python ]] || fail "no Python 3.11 or newer found: install python3, or name one with PYTHON=/path/to/python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  fail "$python is not Python 3.11 or newer: name another with PYTHON=/path/to/python"

stamp=.venv/.installed
wanted=$(
  cat pyproject.toml constraints.txt tools/bootstrap.sh
  "$python" -c 'import sys; print(sys.version)'
  pwd # a virtual environment cannot be moved
)
wanted=$(sha256sum <<<"$wanted")
up_to_date() { [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; }
if up_to_date; then exit 0; fi

mkdir -p .deps 2>/dev/null || fail "cannot write to $PWD: make the clone writable"
exec 9>.deps/lock
flock 9 # two `make` at once: the second waits, and finds the work done
if up_to_date; then exit 0; fi

free_mib=$(($(df -Pk . | awk 'NR == 2 { print $4 }') / 1024))
if [[ ! -x .venv/bin/python ]] && ((free_mib < needed_mib)); then
  fail "only $free_mib MiB free in $PWD, about $needed_mib MiB are needed: free some, or clone elsewhere"
fi

# --- nothing of this outlives it, in or outside of the clone ---

export TMPDIR="$PWD/.deps/tmp"
rm -rf "$TMPDIR"
mkdir -p "$TMPDIR"
trap 'rm -rf "$TMPDIR"' EXIT
# pip would keep a copy of everything in the user's home, unless the user has set PIP_CACHE_DIR.
if [[ -z ${PIP_CACHE_DIR:-} ]]; then export PIP_NO_CACHE_DIR=1; fi
log=.deps/bootstrap.log
: >"$log"

diagnose() {
  if grep -q -i -e 'no space left' -e 'disk quota' "$log"; then
    fail "no disk space left while installing: about $needed_mib MiB are needed (log: $log)"
  elif grep -q -i -e 'connection' -e 'name resolution' -e 'timed out' -e 'unreachable' -e 'could not resolve' "$log"; then
    fail "the package index does not answer: check the network and pip's configuration (log: $log)"
  fi
  fail "$1: $(grep -v '^ *$' "$log" | tail -n 1) (log: $log)"
}

# --- a virtual environment with pip in it ---

# A pip that the environment's own Python can run: its own, else one inside a wheel from Debian.
pip_command=()
find_pip() {
  if .venv/bin/python -c 'import pip' 2>/dev/null; then
    pip_command=(.venv/bin/python -m pip)
    return
  fi
  if .venv/bin/python -m ensurepip >>"$log" 2>&1; then
    pip_command=(.venv/bin/python -m pip)
    return
  fi
  local root wheel
  command -v apt-get >/dev/null || fail "this Python has neither pip nor ensurepip: install its venv package"
  root=$(tools/debian-packages.sh python3-pip-whl 2>>"$log") || diagnose "cannot get pip from Debian"
  wheel=$(find "$root/usr/share/python-wheels" -name 'pip-*.whl' | head -n 1)
  [[ -n $wheel ]] || fail "Debian's package python3-pip-whl has no pip in it: install python3-venv"
  pip_command=(.venv/bin/python "$wheel/pip")
}

# After a change of the Python the old one may not even start.
if [[ -d .venv ]] && ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  rm -rf .venv
fi
if [[ ! -d .venv ]]; then
  "$python" -m venv --without-pip .venv >>"$log" 2>&1 || diagnose "cannot make .venv"
fi
rm -f "$stamp"
find_pip
echo "bootstrap: installing into .venv, a few minutes the first time (log: $log)"
"${pip_command[@]}" install --quiet "pip==$pip_version" >>"$log" 2>&1 || diagnose "cannot install pip"
# pip would compile everything on one core.
.venv/bin/python -m pip install --no-compile --constraint constraints.txt --editable '.[dev]' >>"$log" 2>&1 ||
  diagnose "cannot install the packages"
# torchtitan 0.3.0 requires an older datasets, and with it an older fsspec than the tests use. Its checkpointer needs neither.
.venv/bin/python -m pip install --no-compile --constraint constraints.txt --no-deps torchtitan spmd_types torchdata >>"$log" 2>&1 ||
  diagnose "cannot install torchtitan"
# Some packages contain files for other versions of Python, which cannot be compiled.
.venv/bin/python -m compileall -q -j 0 "$PWD/.venv/lib" >>"$log" 2>&1 || true
echo "$wanted" >"$stamp"
