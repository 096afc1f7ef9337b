"""Locks of directories between the processes of a machine."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.config import SILENCE_SECONDS
from millrace.runtime.locks import GRACE_SECONDS, Activity, StoppedHolderError

_FLOCK_PAUSES = (0.001, 0.02)  # first and longest pause between two attempts


@contextmanager
def locked_directory(directory: Path, kind: int) -> Iterator[int]:
    """Hold a lock (`LOCK_SH`, `LOCK_EX`) on a directory for a `with` block; yields its descriptor.

    Waits as long as files appear or disappear in the directory, or a holder runs, and then for `SILENCE_SECONDS`. Raises
    `StoppedHolderError` after that, and `OSError`.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        pause, longest = _FLOCK_PAUSES
        changed, deadline, activity = -1, 0.0, Activity()
        while True:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now, last = time.monotonic(), changed
                changed = os.fstat(descriptor).st_mtime_ns
                if changed != last:
                    deadline = now + SILENCE_SECONDS
                elif now >= deadline:
                    if activity.any_holder_continues(descriptor):
                        deadline = now + GRACE_SECONDS
                        time.sleep(pause)
                        continue
                    raise StoppedHolderError(f"the process that has the lock of {directory}") from None
            time.sleep(pause)
            pause = min(2 * pause, longest)
        try:
            yield descriptor
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor open, too
    finally:
        os.close(descriptor)
