"""Uploads blocks in the background to their holders: to an owner without access to the origin, and to replicas.

Best effort: blocks that find no space in the queue, or whose holder does not respond, are dropped and fetched again when
they are needed.
"""

from __future__ import annotations

import threading
from collections import deque

from typing_extensions import Buffer

from millrace.cluster.breakers import Breakers
from millrace.cluster.dataplane.client import PeerClient
from millrace.cluster.dataplane.wire import ObjectDescription
from millrace.cluster.membership import Member
from millrace.errors import MillraceError, PeerSilentError
from millrace.events import Event, emit
from millrace.runtime import forks
from millrace.store.records import BLOCK_BYTES

QUEUE_BYTES = 64 << 20

_THREADS = 2
_IDLE_SECONDS = 5.0
_DEADLINE_SECONDS = 5.0
_PATIENCE_SECONDS = 0.2


class Handover:
    """The uploads in progress. Thread-safe; a forked child begins with none. Never raises."""

    def __init__(self, client: PeerClient, breakers: Breakers) -> None:
        self._client = client
        self._breakers = breakers
        self._begin()
        _after_fork.add(self)

    def _begin(self) -> None:
        self._lock = threading.RLock()  # entered instead of its condition, which an interrupt could leave locked
        self._change = threading.Condition(self._lock)
        self._queue: deque[tuple[Member, ObjectDescription, int, memoryview]] = deque()
        self._queued_bytes = 0
        self._threads = 0
        self._busy = 0
        self._closed = False

    def upload(self, member: Member, what: ObjectDescription, start: int, data: Buffer) -> None:
        """Upload the whole blocks within `data`, which begins at byte `start`, to a member.

        Returns at once, or after a moment if the queue is full: this slows down a reader that fetches faster than
        the holders store. `data` must not change afterwards.
        """
        view = memoryview(data).cast("B")
        first, stop = whole_blocks(start, start + len(view), what.size)
        if stop <= first or self._breakers.is_known_open(member.id):
            return
        with self._lock:
            room = self._change.wait_for(
                lambda: self._closed or not self._queued_bytes or self._queued_bytes + stop - first <= QUEUE_BYTES,
                _PATIENCE_SECONDS,
            )
            if not room or self._closed:
                return
            self._queue.append((member, what, first, view[first - start : stop - start]))
            self._queued_bytes += stop - first
            if self._threads - self._busy < len(self._queue) and self._threads < _THREADS:
                try:
                    threading.Thread(target=self._run, name="millrace-give", daemon=True).start()
                    self._threads += 1
                except RuntimeError:  # the interpreter is ending: the holder fetches the blocks itself
                    return
            self._change.notify_all()

    def settle(self, seconds: float) -> bool:
        """Wait until everything is uploaded; returns whether it is."""
        with self._lock:
            return self._change.wait_for(lambda: not self._queue and not self._busy, seconds)

    def close(self) -> None:
        """Stop uploads without waiting for those in progress."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._queued_bytes = 0
            self._change.notify_all()

    def _run(self) -> None:
        change = self._change
        try:
            self._work(change)
        except BaseException:  # a defect: otherwise no thread would take its place
            with change:
                self._threads -= 1
            raise

    def _work(self, change: threading.Condition) -> None:
        while True:
            with change:
                change.wait_for(lambda: self._queue or self._closed, _IDLE_SECONDS)
                if not self._queue:
                    self._threads -= 1  # under the same lock: `upload` counts the threads
                    return
                member, what, start, data = self._queue.popleft()
                self._busy += 1
            try:
                self._send(member, what, start, data)
            finally:
                with change:
                    self._busy -= 1
                    self._queued_bytes = max(0, self._queued_bytes - len(data))
                    change.notify_all()

    def _send(self, member: Member, what: ObjectDescription, start: int, data: memoryview) -> None:
        if self._breakers.is_open(member.id):
            return
        try:
            self._client.put(member, what, start, data, deadline=_DEADLINE_SECONDS)
            self._breakers.worked(member.id)
        except MillraceError as error:
            if isinstance(error, PeerSilentError):
                self._breakers.failed(member.id)
            emit(Event(name="peer.handover.failed", subject=member.address, nbytes=len(data), detail=str(error)))


def whole_blocks(start: int, stop: int, size: int) -> tuple[int, int]:
    """The range of the whole blocks within `[start, stop)` of an object of `size` bytes; may be empty."""
    first = -(-start // BLOCK_BYTES) * BLOCK_BYTES
    return first, stop if stop == size else stop // BLOCK_BYTES * BLOCK_BYTES


# The threads and uploads belong to the parent.
_after_fork = forks.objects_reset_in_child(Handover._begin)
