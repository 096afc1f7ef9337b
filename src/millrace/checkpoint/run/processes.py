"""Which process something is of, and whether that one still runs: told by the kernel, not by clocks. Linux only."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Literal

State = Literal["here", "alive", "dead", "elsewhere"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process, ever: `boot` names a run of a kernel, `namespace` a table of pids in it (each container has its own),
    `started` the clock tick at which it began, by which it is told from a later one of the same `pid`. `host` is for people.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: int


def this_process() -> Process:
    """The process that asks."""
    return Process(
        host=socket.gethostname(),
        boot=_text("/proc/sys/kernel/random/boot_id"),
        namespace=_namespace(),
        pid=os.getpid(),
        started=_started(os.getpid()) or 0,
    )


def state_of(process: Process) -> State:
    """What can be said of `process` from here.

    "dead" is beyond doubt. "elsewhere" is a process of another host, of another container on this one, or of this host
    before it was started again: nothing is known of it.
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
        # Hidden from this user, or gone this moment, which the next look will tell.
        return "alive"
    return "alive" if started == process.started else "dead"


def _started(pid: int) -> int | None:
    """When a running process began, in clock ticks since the boot; 0 when it has ended and only waits to be reaped."""
    # The name, in parentheses, may hold anything.
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    state, threads, started = fields[0], int(fields[17]), int(fields[19])
    # A first thread that has ended looks the same while others still run.
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
