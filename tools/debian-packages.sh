#!/usr/bin/env bash
# Gets Debian packages that tests need: tools/debian-packages.sh NAME...
#
# Prints the folder below which their files lie: / where they are installed, else a folder of the clone, into which they and
# what they depend on are downloaded and unpacked, for root as well: no service is started, nothing outside is changed. Add
# its usr/bin and usr/sbin to PATH, and its usr/lib/*-linux-gnu to LD_LIBRARY_PATH. Package sources are those of the machine.
set -euo pipefail
cd "$(dirname "$0")/.."

(($#)) || { echo "usage: tools/debian-packages.sh NAME..." >&2; exit 2; }

installed() {
  [[ $(dpkg-query -W -f '${db:Status-Status}\n' "$@" 2>/dev/null | grep -c -x installed) == $# ]]
}
if installed "$@"; then
  echo /
  exit 0
fi

options=(-qq)
# Whatever goes wrong is one line, with apt's own words in it.
quietly() {
  local output
  if ! output=$("$@" 2>&1); then
    echo "debian-packages: $1 failed: $(grep -v '^ *$' <<<"$output" | tail -n 1)" >&2
    exit 1
  fi
}

root=$PWD/.deps/debian
mkdir -p "$root"
exec 7>.deps/debian.lock
flock 7 # two at once, as of `make test`: the second waits, since they use the same folders
if [[ -f $root/.names ]] && ! grep -v -x -F -f "$root/.names" <(printf '%s\n' "$@") >/dev/null; then
  echo "$root"
  exit 0
fi
state=$PWD/.deps/apt
trap 'rm -rf "$state"' EXIT
mkdir -p "$state/lists/partial" "$state/archives/partial"
options+=(
  -o "Dir::State::lists=$state/lists" -o "Dir::Cache=$state" -o "Dir::Cache::archives=$state/archives"
  -o Debug::NoLocking=true -o "APT::Sandbox::User=$(id -un)" # Debian's user for downloads may not enter the clone
)
quietly apt-get "${options[@]}" update
wanted=$(apt-get "${options[@]}" -q --simulate --no-install-recommends install "$@" 2>/dev/null | awk '$1 == "Inst" { print $2 }') || {
  echo "debian-packages: no such package, or not for this Debian: $*" >&2
  exit 1
}
cd "$state/archives"
# shellcheck disable=SC2086 # one word a package
quietly apt-get "${options[@]}" download $wanted
for archive in *.deb; do
  quietly dpkg-deb -x "$archive" "$root"
done
printf '%s\n' "$@" >>"$root/.names"
echo "$root"
