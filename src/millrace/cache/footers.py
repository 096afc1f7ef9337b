"""The ends of Parquet files that a full disk did not store, kept in the index.

Every reader of a Parquet file begins with its footer, in every epoch and in every process. When the cache is full
and a file was not admitted, that would be one request per file and epoch before the first row. So the last 64 KiB, or the
whole footer if it is longer, stay in the index: for large objects only, since one request reads a small object whole.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable

import xxhash
from typing_extensions import Buffer

from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.store.index import Index

TAIL_BYTES = 64 << 10
"""The length of Arrow's first read, which usually contains the footer."""
MOST_TAIL_BYTES = 1 << 20
"""A longer footer is not kept."""
MOST_BYTES = 256 << 20
"""All ends together take at most this much of a disk, and at most 1/64 of its capacity."""

_IDLE_SECONDS = 6 * 3600.0
_NOTED_SECONDS = 3600.0  # precision of the last use, so that few uses cost a write
_SAMPLE = 8

_MAGIC = (b"PAR1", b"PARE")
_RECORD = struct.Struct("<dQQ")
_FOOTER_LENGTH = struct.Struct("<I")


def parquet_tail(data: Buffer, offset: int) -> tuple[int, bytes] | None:
    """The part to keep of `data`, which is the end of an object from `offset` on, with its own offset.

    None if it is not the end of a Parquet file, or does not contain the whole footer.
    """
    view = memoryview(data).cast("B")
    if len(view) < 8 or bytes(view[-4:]) not in _MAGIC:
        return None
    needed = _FOOTER_LENGTH.unpack(view[-8:-4])[0] + 8
    if needed > min(len(view), MOST_TAIL_BYTES):
        return None
    kept = min(len(view), max(needed, TAIL_BYTES))
    return offset + len(view) - kept, bytes(view[-kept:])


class Footers:
    """The stored ends of a store's objects. Thread- and process-safe. After a disk error it stores and returns nothing.

    When `MOST_BYTES` are reached, a new end replaces one that was not read for six hours, if a sample of eight
    finds one; else the new end is not stored: for a data set that is read repeatedly no exchange would help.
    """

    def __init__(
        self,
        index: Index,
        *,
        capacity_bytes: Callable[[], int],
        may_grow: Callable[[int], bool],
        report: Callable[[StorageError], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._index = index
        self._capacity_bytes = capacity_bytes
        self._may_grow = may_grow
        self._report = report
        self._clock = clock

    def get(self, object_id: bytes) -> tuple[int, bytes] | None:
        """The stored end of an object and its offset, verified; None without one."""
        try:
            value = self._index.tail(object_id)
            if value is None:
                return None
            used, checksum, offset = _RECORD.unpack_from(value)
            data = value[_RECORD.size :]
            if xxhash.xxh3_64_intdigest(data) != checksum:
                self._index.drop_tail(object_id)
                emit(Event(name="cache.block.corrupt", subject="index", nbytes=len(data), detail="a Parquet footer"))
                return None
            if self._clock() - used > _NOTED_SECONDS:
                self._index.put_tail(object_id, _RECORD.pack(self._clock(), checksum, offset) + data)
        except StorageError as error:
            self._report(error)
            return None
        return offset, data

    def read(self, object_id: bytes, start: int, stop: int) -> bytes | None:
        """The bytes `[start, stop)` of an object if its stored end contains all of them."""
        found = self.get(object_id)
        if found is None or start < found[0]:
            return None
        return found[1][start - found[0] : stop - found[0]]

    def put(self, object_id: bytes, offset: int, data: Buffer) -> bool:
        """Keep the Parquet footer in `data`, the end of an object from `offset` on. Returns whether anything was kept."""
        tail = parquet_tail(data, offset)
        if tail is None:
            return False
        value = _RECORD.pack(self._clock(), xxhash.xxh3_64_intdigest(tail[1]), tail[0]) + tail[1]
        try:
            there = self._index.tail(object_id)
            if there is not None and _RECORD.unpack_from(there)[2] <= tail[0]:
                return True
            if not self._make_room(len(value)):
                return False
            self._index.put_tail(object_id, value)
        except StorageError as error:
            self._report(error)
            return False
        return True

    def drop(self, object_id: bytes) -> None:
        """Remove the end of an object."""
        self._index.drop_tail(object_id)

    def _make_room(self, nbytes: int) -> bool:
        most = min(MOST_BYTES, self._capacity_bytes() // 64)
        for _ in range(_SAMPLE):
            if self._index.tail_bytes() + nbytes <= most:
                return self._may_grow(nbytes)
            sample = [self._index.tail_after(os.urandom(16)) for _ in range(_SAMPLE)]
            residents = [(_RECORD.unpack_from(value)[0], name) for name, value in filter(None, sample)]
            if not residents or self._clock() - min(residents)[0] < _IDLE_SECONDS:
                return False
            self._index.drop_tail(min(residents)[1])
        return False
