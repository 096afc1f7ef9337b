"""Seals: a file is believed as a whole when every block was verified from it and it was not touched since.

A seal is the inode and the change time of a file, taken before all of its blocks were read and found right. Whoever
completes an object seals it in the background, while its pages are still in memory. Before a process maps a file it compares
the seal; a file that was cut, flipped or replaced has another change time or inode, so its blocks are verified again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from millrace.cache.blocks import block_count
from millrace.cache.failures import LostDataError
from millrace.cache.maps import MapSlot
from millrace.cache.records import Entry
from millrace.cache.store import Store
from millrace.errors import StorageError
from millrace.events import Event, emit

INLINE_BYTES = 64 << 20
"""An object up to this size is sealed while its open waits; larger ones in the background, and read through blocks."""

_ATTEMPTS = 3
_THREADS = 2


def seal_holds(entry: Entry, status: os.stat_result) -> bool:
    """Whether a file is still as it was when its blocks were verified."""
    return entry.sealed and (entry.seal_inode, entry.seal_ctime_ns) == (status.st_ino, status.st_ctime_ns)


def slot_holds(entry: Entry, slot: MapSlot) -> bool:
    """Whether a file was mapped while it was as when its blocks were verified."""
    return (entry.seal_inode, entry.seal_ctime_ns) == (slot.inode, slot.ctime_ns)


class Sealer:
    """Verifies and seals the files of a store. Thread-safe; one file at a time in a process. Not usable after a fork.

    `report` hears of a disk that fails in the background.
    """

    def __init__(self, store: Store, *, report: Callable[[StorageError], None]) -> None:
        self._store = store
        self._report = report
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="millrace-seal")
        self._waiting: set[int] = set()
        self._running: dict[int, Future[Entry | None]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def sealed(self, entry: Entry) -> Entry | None:
        """The record of a complete object with its seal, which is made now where it is missing.

        None when that takes too long to wait for, and goes on in the background, or when blocks turned out wrong: read
        through blocks then. Raises `LostDataError` when the file is gone or cut, `StorageError` when the disk fails.
        """
        if entry.sealed:
            return entry
        if entry.size > INLINE_BYTES:
            self.start(entry)
            return None
        return self._seal_or_join(entry)

    def start(self, entry: Entry) -> None:
        """Seal a complete object in the background; errors are reported."""
        with self._lock:
            if self._closed or entry.generation in self._waiting or entry.generation in self._running:
                return
            self._waiting.add(entry.generation)
        try:
            self._pool.submit(self._seal_in_background, entry)
        except RuntimeError:  # the interpreter is ending; the next process seals it
            self._waiting.discard(entry.generation)

    def break_seal(self, entry: Entry) -> Entry:
        """Somebody touched a sealed file: note that it must be verified again; returns the record without the seal."""
        emit(Event(name="cache.file.changed", subject=self._store.path(entry), detail="its blocks are verified again"))
        self._store.index.unseal(entry)
        return entry._replace(seal_inode=0, seal_ctime_ns=0)

    def close(self) -> None:
        """End the seals under way; they are made by who opens the objects next."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    # --- inside -----------------------------------------------------------------------------------

    def _seal_in_background(self, entry: Entry) -> None:
        self._waiting.discard(entry.generation)
        if self._ending():
            return
        try:
            self._seal_or_join(entry)
        except LostDataError as error:
            emit(Event(name="cache.file.lost", subject=str(self._store.directory), detail=str(error)))
        except StorageError as error:
            self._report(error)

    def _seal_or_join(self, entry: Entry) -> Entry | None:
        with self._lock:
            future = self._running.get(entry.generation)
            if future is None:
                mine = self._running[entry.generation] = Future()
        if future is not None:
            return future.result()
        try:
            mine.set_result(self._seal(entry))
        except BaseException as error:  # noqa: BLE001 - whoever waits for the same file must hear of it
            mine.set_exception(error)
        finally:
            with self._lock:
                del self._running[entry.generation]
        return mine.result()

    def _seal(self, entry: Entry) -> Entry | None:
        descriptor = self._store.open_data(entry)
        try:
            for _ in range(_ATTEMPTS):
                before = os.fstat(descriptor)
                blocks = range(block_count(entry.size, entry.block_bytes))
                wrong = self._store.drop_wrong_blocks(entry, descriptor, blocks, stop=self._ending)
                if wrong is None or wrong:
                    return None
                sealed = entry._replace(seal_inode=before.st_ino, seal_ctime_ns=before.st_ctime_ns)
                if seal_holds(sealed, os.fstat(descriptor)):  # nobody wrote meanwhile
                    recorded = self._store.index.seal(entry, inode=before.st_ino, ctime_ns=before.st_ctime_ns)
                    return sealed if recorded else None
            return None
        finally:
            os.close(descriptor)

    def _ending(self) -> bool:
        return self._closed or not threading.main_thread().is_alive()
