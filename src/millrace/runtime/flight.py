"""Single flight: of several threads that request a block at the same time, one fetches it, and all receive the result.

Between the processes of a node, named locks do the same (`locks.py`). A process that finds a lock held waits for the block
to appear in the store. A holder that is stopped is waited for `SILENCE_SECONDS`; then the block is fetched a second time,
which costs one request and has no other effect.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from typing_extensions import Buffer

from millrace.events import fetch_id

BlockKey = tuple[bytes, int]
"""An object id and a block number."""


class Flight(Future[Buffer]):
    """The fetch of a block. Its result is the bytes of the block. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._on_promote: Callable[[], None] | None = None
        self._promoted = False
        self.fetch_id = ""
        """The id of the fetch that it is a part of, see `events.fetch_id`."""

    def on_promote(self, promote: Callable[[], None]) -> None:
        """Call `promote`, once or twice, when a caller waits for the block; at once if one waits already."""
        self._on_promote = promote
        if self._promoted:
            promote()

    def promote(self) -> None:
        """Note that a caller waits for the block, which was requested as read-ahead."""
        # Written before the other is read, as in `on_promote`: one of the two sees both.
        self._promoted = True
        if self._on_promote is not None:
            self._on_promote()


class Flights:
    """The fetches in progress in this process. Thread-safe."""

    def __init__(self) -> None:
        self._futures: dict[BlockKey, Flight] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._futures

    def join(self, object_id: bytes, blocks: Iterable[int]) -> tuple[dict[int, Flight], dict[int, Flight]]:
        """Split `blocks` into those that the caller must fetch and those that are in flight already.

        The caller must end every flight of the first kind, by `complete` or `fail`.
        """
        mine: dict[int, Flight] = {}
        theirs: dict[int, Flight] = {}
        with self._lock:
            for block in blocks:
                future = self._futures.get((object_id, block))
                if future is None:
                    self._futures[object_id, block] = mine[block] = Flight()
                else:
                    theirs[block] = future
        return mine, theirs

    def complete(self, key: BlockKey, future: Future[Buffer], data: Buffer) -> None:
        """Pass a fetched block to all that wait for it."""
        self._remove(key, future)
        if not future.done():  # it has failed already when the thread that started it was interrupted
            future.set_result(data)

    def fail(self, key: BlockKey, future: Future[Buffer], error: BaseException) -> None:
        """Raise `error` in all that wait for a block, unless it is complete."""
        self._remove(key, future)
        if not future.done():
            future.set_exception(error)

    def _remove(self, key: BlockKey, future: Future[Buffer]) -> None:
        # Only this flight: after it has ended, another one for the same block may be in progress.
        with self._lock:
            if self._futures.get(key) is future:
                del self._futures[key]


# --- the fetch that an event belongs to -----------------------------------------------------------

_fetches = itertools.count(1)


def new_fetch_id() -> str:
    """An id that no other fetch on this machine has at this time."""
    return f"{os.getpid():x}-{next(_fetches):x}"


@contextmanager
def in_fetch(identifier: str) -> Iterator[None]:
    """Make the events and log lines of this thread part of a fetch while the block runs."""
    token = fetch_id.set(identifier)
    try:
        yield
    finally:
        fetch_id.reset(token)
