"""How much host memory may be kept for longer than a save takes."""

from __future__ import annotations

from pathlib import Path

_SHARE = 0.5
_NEVER_MORE = 1 << 62


def base_budget(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Half of the bytes that are free now, on the machine and in this process's control group; 0 where nobody says."""
    free = _available(proc / "meminfo")
    return int(_SHARE * min(free, _left_in_group(proc / "self" / "cgroup", groups)))


def _available(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return 0
    return 0


def _left_in_group(membership: Path, groups: Path) -> int:
    """By the tightest of the groups that this process is in (version 2); a group without a limit says nothing."""
    try:
        name = next(line[3:].strip() for line in membership.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return _NEVER_MORE
    left = _NEVER_MORE
    directory = groups / name.strip("/")
    for group in (directory, *directory.parents):
        try:
            limit = (group / "memory.max").read_text().strip()
            if limit != "max":
                left = min(left, max(0, int(limit) - int((group / "memory.current").read_text())))
        except (OSError, ValueError):
            pass  # the root has neither file, nor do machines with groups of version 1
        if group == groups:
            break
    return left
