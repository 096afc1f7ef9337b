"""The memory of this process."""

from __future__ import annotations

import resource


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
