"""Stores bytes received from another member, by the same code as a read that fetched them."""

from __future__ import annotations

from dataclasses import dataclass, field

from typing_extensions import Buffer

from millrace.cache.disk import Disk
from millrace.cache.eviction.copies import Keep
from millrace.cache.node import CacheNode
from millrace.cache.reading.fetching import Fetched, MakeSource
from millrace.cache.reading.reader import CachedReader, ObjectReader
from millrace.cache.reading.threads import CALLERS_THREAD
from millrace.cluster.dataplane.wire import ObjectDescription
from millrace.cluster.origins import NamedOrigin
from millrace.errors import PeerError, StorageError
from millrace.origin import ObjectInfo, Origin
from millrace.store.records import BLOCK_BYTES


def reader_for_peers(node: CacheNode, origin: Origin, what: ObjectDescription, source: MakeSource) -> ObjectReader:
    """A reader that serves other members. It fetches in the calling thread, from `source`."""
    info = ObjectInfo(key=what.key, size=what.size, version=what.version, modified=0.0)
    return node.open_reader(origin, info, threads=CALLERS_THREAD, source=source, for_peers=True)


class ReceivedObject:
    """One object that is copied to a disk, opened with its first bytes. For one thread; a context manager."""

    def __init__(self, node: CacheNode, disk: Disk, what: ObjectDescription) -> None:
        self._node = node
        self._disk = disk
        self._what = what
        self._received = ReceivedBytes()
        self._reader: CachedReader | None = None

    def __enter__(self) -> ReceivedObject:
        return self

    def __exit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.close()

    def missing(self, blocks: range) -> list[int]:
        """The `blocks` that are not cached; none if the disk fails."""
        try:
            entry = self._disk.store.index.get(self._what.object_id())
            if entry is None:
                return list(blocks)
            if entry.place:
                return []
            return self._disk.store.missing(entry, blocks) if entry.block_bytes == BLOCK_BYTES else []
        except StorageError as error:
            self._disk.report(error)
            return []

    def has_room(self, nbytes: int) -> bool:
        """Whether the disk can store `nbytes` more without evicting."""
        try:
            return self._disk.store.space.has_room(nbytes)
        except StorageError as error:
            self._disk.report(error)
            return False

    def keep(self, blocks: range, start: int, data: Buffer) -> bool:
        """Store the bytes of whole blocks, if the eviction policy admits them; returns whether they are cached now.

        Concurrent fetches of the same blocks by readers are safe.
        """
        reader = self._open()
        if reader is None:
            return False
        self._received.start, self._received.data = start, data
        try:
            missing = reader.missing(blocks)
            if missing:
                reader.fetch(missing)
            return not reader.missing(blocks)
        finally:
            self._received.data = b""

    def _open(self) -> CachedReader | None:
        if self._reader is None:
            origin = NamedOrigin(self._what.origin)
            reader = reader_for_peers(self._node, origin, self._what, lambda *_: self._received)
            if not isinstance(reader, CachedReader):
                return None
            self._reader = reader
        return self._reader


@dataclass(slots=True)
class ReceivedBytes:
    """A `Source` of the bytes received last."""

    start: int = 0
    data: Buffer = field(default=b"", repr=False)

    def read(self, start: int, stop: int) -> Fetched:
        view = memoryview(self.data).cast("B")[start - self.start : stop - self.start]
        if len(view) != stop - start or start < self.start:
            raise PeerError("these bytes were not received")
        return Fetched(view, Keep.OWNED)

    def fetches_through_peer(self, start: int) -> bool:
        return False
