"""Descriptors of one folder: of all that a process has open, other tests' threads and connections open and close theirs."""

import contextlib
import os
from pathlib import Path


def open_below(folder: Path) -> list[str]:
    """The paths of this process's open descriptors in `folder`."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in names if name.startswith(f"{folder}/")]
