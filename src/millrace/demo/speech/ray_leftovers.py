"""A watcher beside a private Ray cluster: when its owner is killed with `kill -9`, it removes what Ray leaves behind.

Ray's own processes die with their driver, except its agents, which take half a minute, and its folder, which stays. The
watcher runs this file as a program; it knows only the standard library. Linux only, like Ray's own fate sharing here.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PATIENCE_SECONDS = 15.0


@contextmanager
def cleared(scratch: str) -> Iterator[None]:
    """While the block runs, a watcher sees to it that the Ray processes over `scratch` and the folder end with this process.

    At the regular end of the block it does nothing: the caller has cleaned up by then.
    """
    # A session of its own: Ctrl-C is meant for the owner, and the watcher has to outlive it.
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, scratch],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        watcher.communicate(b"done")  # which ignores that the watcher may have been killed


def processes_of(scratch: str) -> list[int]:
    """This user's Ray processes with files in the folder: some rename themselves, but all have a log open."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # it ended meanwhile, or is another user's
                own_ray = entry.stat().st_uid == os.geteuid() and b"ray" in (entry / "cmdline").read_bytes()
                if own_ray and any(scratch in target for target in _open_files(entry)):
                    found.append(int(entry.name))
    return found


def _open_files(process: Path) -> Iterator[str]:
    for descriptor in (process / "fd").iterdir():
        with suppress(FileNotFoundError):
            yield os.readlink(descriptor)


def end_processes_of(scratch: str) -> None:
    """Kill this user's Ray processes with files in the folder, until there are none, for 15 seconds at most."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    quiet = 0
    # Twice quiet: the raylet may have been starting one when it was killed.
    while quiet < 2 and time.monotonic() < deadline:
        pids = processes_of(scratch)
        quiet = 0 if pids else quiet + 1
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)


def main(scratch: str) -> None:
    """Wait for the owner's end; then, unless it said that all is done, end the processes and remove the folder."""
    if sys.stdin.buffer.read() == b"done":
        return
    end_processes_of(scratch)
    for _ in range(10):
        # Workers notice the raylet's end within a second or two, and may write a last line of log until then.
        shutil.rmtree(scratch, ignore_errors=True)
        if not os.path.exists(scratch):
            return
        time.sleep(1)


if __name__ == "__main__":
    main(sys.argv[1])
