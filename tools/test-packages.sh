#!/usr/bin/env bash
# Gets the Debian packages that tests need and this machine does not have: tools/test-packages.sh
# Without one of them, the tests that need it are skipped, which the last line of `make test` reports.
set -uo pipefail
cd "$(dirname "$0")/.."

needs=(etcd:etcd-server prometheus:prometheus chromium-headless-shell:chromium-headless-shell chromium-headless-shell:fonts-dejavu-core)
# Root's tests make machines of namespaces, with links between them that are cut, and logins by SSH.
((EUID)) || needs+=(ip:iproute2 sshd:openssh-server ssh:openssh-client ssh-keygen:openssh-client rsync:rsync)
missing=()
for need in "${needs[@]}"; do
  command -v "${need%:*}" >/dev/null || missing+=("${need#*:}")
done
((${#missing[@]} == 0)) || tools/debian-packages.sh "${missing[@]}" >/dev/null ||
  echo "test: not all of these could be downloaded: ${missing[*]}" >&2
