#!/usr/bin/env bash
# Makes this machine's NVMe instance store usable as Millrace's cache, and prints the value of MILLRACE_CACHE_DIR: one
# directory a disk, with colons between them. Everything else goes to stderr.
#
#   sudo bash mount-cache.sh [DIRECTORY [OWNER]]    default: /mnt/millrace, of the user that called sudo
#
# May run any number of times. A disk that it has formatted before is mounted again with its content; a disk that another
# program has formatted, partitioned or mounted is left as it is (where it is mounted, a directory on it is used); a machine
# without such disks gets a directory on its root disk.
set -euo pipefail

base=${1:-/mnt/millrace}
owner=${2:-${SUDO_USER:-$(id -un)}}
label=millrace

note() { echo "mount-cache: $*" >&2; }

# A directory that the owner can write to, as one of the result. Several disks may be mounted as one file system.
found=()
use() {
  mkdir -p "$1"
  chown "$owner" "$1"
  [[ " ${found[*]} " == *" $1 "* ]] || found+=("$1")
}

# EBS volumes are NVMe devices, too; only the model distinguishes them.
instance_disks() {
  lsblk --nodeps --noheadings --paths --pairs --output NAME,MODEL |
    sed -n 's/^NAME="\([^"]*\)" MODEL="Amazon EC2 NVMe Instance Storage *"$/\1/p'
}

# Where the disk, or something on it (a partition, a logical volume), is mounted.
mounted_at() { lsblk --noheadings --list --output MOUNTPOINT "$1" | grep -m 1 '^/' || true; }

# Whether anything is on the disk: a file system, a partition table, a member of a RAID or of a volume group.
is_used() { [[ -n $(blkid --probe "$1" 2>/dev/null) ]] || (($(lsblk --noheadings --list "$1" | wc -l) > 1)); }

is_ours() { [[ $(blkid --probe --match-tag LABEL --output value "$1" 2>/dev/null) == "$label" ]]; }

mapfile -t disks < <(instance_disks)
number=0
for disk in "${disks[@]}"; do
  place=$(mounted_at "$disk")
  if [[ $place == "$base"/* ]]; then
    use "$place/cache"
    continue
  elif [[ -n $place ]]; then
    note "$disk is mounted at $place: using $place/millrace"
    use "$place/millrace"
    continue
  fi
  if ! is_ours "$disk"; then
    if is_used "$disk"; then
      note "$disk holds data of another program: left as it is"
      continue
    fi
    note "formatting $disk"
    # lazy: a disk of terabytes would take minutes. No blocks kept for root: they would be the cache's.
    mkfs.ext4 -q -F -L "$label" -m 0 -E lazy_itable_init=1,lazy_journal_init=1,nodiscard "$disk" >&2 || continue
  fi
  while mountpoint --quiet "$base/$number"; do number=$((number + 1)); done
  place=$base/$number
  mkdir -p "$place"
  # noatime: every read of a cached file would be a write.
  mount -o noatime "$disk" "$place" || continue
  note "$disk is at $place"
  use "$place/cache"
done

if ((${#found[@]} == 0)); then
  note "no NVMe instance store that can be used: the cache is $base/root/cache on the root disk"
  use "$base/root/cache"
fi
IFS=:
echo "${found[*]}"
