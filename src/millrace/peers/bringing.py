"""Keeps bytes that were received from another member, on the way that any read takes which found something to keep."""

from __future__ import annotations

from dataclasses import dataclass, field

from typing_extensions import Buffer

from millrace.cache.blocks import BLOCK_BYTES
from millrace.cache.disk import Disk
from millrace.cache.node import CacheNode
from millrace.cache.reader import BlockReader
from millrace.cache.small import SmallReader
from millrace.cache.source import Fetched, Keep
from millrace.cache.threads import CALLERS_THREAD
from millrace.errors import PeerError, StorageError
from millrace.origin import ObjectInfo
from millrace.peers.origins import NamedOrigin
from millrace.peers.wire import ObjectDescription


class Bringing:
    """One object on its way to a disk, opened when the first bytes come. For one thread; a context manager."""

    def __init__(self, node: CacheNode, disk: Disk, what: ObjectDescription) -> None:
        self._node = node
        self._disk = disk
        self._what = what
        self._brought = Brought()
        self._reader: BlockReader | SmallReader | None = None

    def __enter__(self) -> Bringing:
        return self

    def __exit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.close()

    def missing(self, blocks: range) -> list[int]:
        """Those of `blocks` that are not here; none when the disk cannot tell."""
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
        """Whether the disk would keep so much more without anything going for it."""
        try:
            return self._disk.store.has_room(nbytes)
        except StorageError as error:
            self._disk.report(error)
            return False

    def keep(self, blocks: range, start: int, data: Buffer) -> bool:
        """Keep the bytes of whole blocks, where the policy lets them in; whether they are here now.

        It goes the way of any read that found something to keep. So one fetch by a reader at the same time does no harm.
        """
        reader = self._open()
        if reader is None:
            return False
        self._brought.start, self._brought.data = start, data
        try:
            missing = reader.missing(blocks)
            if missing:
                reader.fetch(missing)
            return not reader.missing(blocks)
        finally:
            self._brought.data = b""

    def _open(self) -> BlockReader | SmallReader | None:
        if self._reader is None:
            what = self._what
            info = ObjectInfo(key=what.key, size=what.size, version=what.version, modified=0.0)
            reader = self._node.open_reader(
                NamedOrigin(what.origin), info, threads=CALLERS_THREAD, source=lambda *_: self._brought
            )
            if not isinstance(reader, BlockReader | SmallReader):
                return None
            self._reader = reader
        return self._reader


@dataclass(slots=True)
class Brought:
    """A `Source` of the bytes that were just received."""

    start: int = 0
    data: Buffer = field(default=b"", repr=False)

    def read(self, start: int, stop: int) -> Fetched:
        view = memoryview(self.data).cast("B")[start - self.start : stop - self.start]
        if len(view) != stop - start or start < self.start:
            raise PeerError("these bytes were not brought")
        return Fetched(view, Keep.OWNED)

    def asks_to_fetch(self, start: int) -> bool:
        return False
