"""Identifies a process, and checks with the kernel whether it still runs, without clocks. Linux only."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Literal

State = Literal["here", "alive", "dead", "elsewhere"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A unique process: `boot` is the id of the kernel's boot, `namespace` that of the pid namespace (one per container).
    `started` is the clock tick of its start, which distinguishes it from a later process with the same `pid`. `host` is for
    people.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: int


_represented: Process | None = None


def represent(process: Process) -> None:
    """Make `this_process` return another process from now on: a saver process acts for the training process, and ends
    with it.
    """
    global _represented
    _represented = process


def this_process() -> Process:
    """The current process, or the one that it represents."""
    if _represented is not None:
        return _represented
    return Process(
        host=socket.gethostname(),
        boot=_text("/proc/sys/kernel/random/boot_id"),
        namespace=_namespace(),
        pid=os.getpid(),
        started=_started(os.getpid()) or 0,
    )


def state_of(process: Process) -> State:
    """The state of `process` as seen from this process.

    "dead" is certain. "elsewhere" is a process of another host, of another container, or of this host before its last
    boot: its state is unknown.
    """
    here = this_process()
    if process == here:
        return "here"
    if not here.boot or (process.boot, process.namespace) != (here.boot, here.namespace):
        return "elsewhere"
    try:
        os.kill(process.pid, 0)
    except PermissionError:  # of another user
        pass
    except (ProcessLookupError, OverflowError, ValueError):
        return "dead"
    started = _started(process.pid)
    if started is None:
        # Hidden from this user, or it ended just now; then the next check returns "dead".
        return "alive"
    return "alive" if started == process.started else "dead"


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process."""
    return _text(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] in (["T"], ["t"])


def _started(pid: int) -> int | None:
    """The start of a running process in clock ticks since the boot; 0 for a zombie."""
    # The name, in parentheses, may contain any character.
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    state, threads, started = fields[0], int(fields[17]), int(fields[19])
    # A process whose first thread has ended looks the same while other threads run.
    return 0 if state in "ZX" and threads <= 1 else started


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
