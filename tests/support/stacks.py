"""Where a forked child hangs: its stacks in Python, and what its threads wait for in the kernel."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path


def new_stacks() -> int:
    """The file for the stacks of a child. Create it before the fork; the child calls `write_stacks_on_signal` first."""
    return os.memfd_create("stacks")


def write_stacks_on_signal(stacks: int) -> None:
    """In the child: write the stacks of all threads to the file at SIGUSR1."""
    # Not `dump_traceback_later`: it waits without end for a thread that only the parent has.
    faulthandler.register(signal.SIGUSR1, file=stacks)


def stacks_of(pid: int, stacks: int) -> str:
    """Where the threads of a child wait. The first lines are of the kernel; none are of Python before it could register."""
    os.kill(pid, signal.SIGUSR1)
    time.sleep(1)
    waits = [f"{each.parent.name} {each.read_text()}" for each in Path(f"/proc/{pid}/task").glob("*/wchan")]
    return "\n".join([*waits, os.pread(stacks, 1 << 20, 0).decode()])
