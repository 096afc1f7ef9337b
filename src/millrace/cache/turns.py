"""One at a time on a node: whoever asks the origin for something that others are about to ask for too.

A lock in the process, then a byte-range lock between processes (see `flight.py`), which the kernel frees when its holder
dies. Who gets the turn looks again whether somebody before him has done the work.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from millrace.cache.flight import PATIENCE_SECONDS, ProcessLocks

_POLL_SECONDS = (0.001, 0.05)  # first and longest pause while another process has the turn


class Turns:
    """Turns by name, over the threads of this process and the processes of the node. Thread-safe."""

    def __init__(self, locks: ProcessLocks) -> None:
        self._locks = locks
        self._lock = threading.Lock()
        self._waiting: dict[bytes, tuple[threading.Lock, int]] = {}

    @contextmanager
    def take(self, name: bytes) -> Iterator[None]:
        """Hold the turn of `name` for a `with` block.

        A holder in another process that is alive but silent is overtaken after `PATIENCE_SECONDS`: two may ask then.
        """
        with self._lock:
            mine, count = self._waiting.get(name, (threading.Lock(), 0))
            self._waiting[name] = (mine, count + 1)
        try:
            with mine, self._between_processes((hashlib.blake2b(name, digest_size=16).digest(), 0)):
                yield
        finally:
            with self._lock:
                mine, count = self._waiting[name]
                if count == 1:
                    del self._waiting[name]
                else:
                    self._waiting[name] = (mine, count - 1)

    @contextmanager
    def _between_processes(self, key: tuple[bytes, int]) -> Iterator[None]:
        pause, longest = _POLL_SECONDS
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (held := self._locks.try_acquire(key)) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(pause * 2, longest)
        try:
            yield
        finally:
            if held:
                self._locks.release(key)
