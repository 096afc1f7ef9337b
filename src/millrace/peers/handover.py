"""Gives blocks in the background to the members that are to hold them: what an owner without access could not fetch itself,
and the replicas of what an owner fetched.

Best effort: what finds no room in the queue, or no answer, is not given, and is fetched again by whoever needs it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque

from typing_extensions import Buffer

from millrace.cache.blocks import BLOCK_BYTES
from millrace.errors import MillraceError, PeerSilentError
from millrace.events import Event, emit
from millrace.members import Member
from millrace.peers.breakers import Breakers
from millrace.peers.client import PeerClient
from millrace.peers.wire import ObjectDescription

QUEUE_BYTES = 64 << 20

_THREADS = 2
_IDLE_SECONDS = 5.0
_DEADLINE_SECONDS = 5.0
_PATIENCE_SECONDS = 0.2


class Handover:
    """The blocks on their way to others. Thread-safe; a forked child begins with none. Never raises."""

    def __init__(self, client: PeerClient, breakers: Breakers) -> None:
        self._client = client
        self._breakers = breakers
        self._begin()
        _after_fork.add(self)

    def _begin(self) -> None:
        self._change = threading.Condition()
        self._queue: deque[tuple[Member, ObjectDescription, int, memoryview]] = deque()
        self._queued_bytes = 0
        self._threads = 0
        self._busy = 0
        self._closed = False

    def give(self, member: Member, what: ObjectDescription, start: int, data: Buffer) -> None:
        """Have the whole blocks within `data`, which begins at byte `start`, brought to a member.

        Returns at once, or where the queue is full after a moment: who fetches faster than others can take is slowed down.
        `data` must not change afterwards.
        """
        view = memoryview(data).cast("B")
        first, stop = whole_blocks(start, start + len(view), what.size)
        if stop <= first or self._breakers.is_known_open(member.id):
            return
        with self._change:
            room = self._change.wait_for(lambda: self._closed or self._has_room(stop - first), _PATIENCE_SECONDS)
            if not room or self._closed:
                return
            self._queue.append((member, what, first, view[first - start : stop - start]))
            self._queued_bytes += stop - first
            if self._threads - self._busy < len(self._queue) and self._threads < _THREADS:
                try:
                    threading.Thread(target=self._run, name="millrace-give", daemon=True).start()
                    self._threads += 1
                except RuntimeError:  # the interpreter is ending: others will fetch it
                    return
            self._change.notify_all()

    def settle(self, seconds: float) -> bool:
        """Wait until everything was given; whether it was."""
        with self._change:
            return self._change.wait_for(lambda: not self._queue and not self._busy, seconds)

    def close(self) -> None:
        """Give nothing any more; what is on its way is not waited for."""
        with self._change:
            self._closed = True
            self._queue.clear()
            self._queued_bytes = 0
            self._change.notify_all()

    def _run(self) -> None:
        change = self._change
        while True:
            with change:
                change.wait_for(self._has_work, _IDLE_SECONDS)
                if not self._queue:
                    self._threads -= 1
                    return
                member, what, start, data = self._queue.popleft()
                self._busy += 1
            try:
                self._bring(member, what, start, data)
            finally:
                with change:
                    self._busy -= 1
                    self._queued_bytes = max(0, self._queued_bytes - len(data))
                    change.notify_all()

    def _has_room(self, nbytes: int) -> bool:
        return not self._queued_bytes or self._queued_bytes + nbytes <= QUEUE_BYTES

    def _has_work(self) -> bool:
        return bool(self._queue) or self._closed

    def _bring(self, member: Member, what: ObjectDescription, start: int, data: memoryview) -> None:
        if self._breakers.is_open(member.id):
            return
        try:
            self._client.put(member, what, start, data, deadline=_DEADLINE_SECONDS)
            self._breakers.worked(member.id)
        except MillraceError as error:
            if isinstance(error, PeerSilentError):
                self._breakers.failed(member.id)
            emit(Event(name="peer.handover.failed", subject=member.id, nbytes=len(data), detail=str(error)))


def whole_blocks(start: int, stop: int, size: int) -> tuple[int, int]:
    """The range of the blocks that lie wholly within `[start, stop)` of an object of `size` bytes; may be empty."""
    first = -(-start // BLOCK_BYTES) * BLOCK_BYTES
    return first, stop if stop == size else stop // BLOCK_BYTES * BLOCK_BYTES


def widened(start: int, stop: int, size: int) -> tuple[int, int]:
    """The range of all blocks that `[start, stop)` touches in an object of `size` bytes."""
    return start // BLOCK_BYTES * BLOCK_BYTES, min(size, -(-stop // BLOCK_BYTES) * BLOCK_BYTES)


_after_fork: weakref.WeakSet[Handover] = weakref.WeakSet()


def _begin_anew() -> None:
    # What is on its way is the parent's, and so are the threads.
    for handover in _after_fork:
        handover._begin()


os.register_at_fork(after_in_child=_begin_anew)
