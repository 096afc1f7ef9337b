"""Serves a node's blocks to other members: cached blocks, and blocks that the node fetches because it owns them.

Whole blocks are sent as stored, with the checksum from the index: one check by the receiver covers disk and wire. Parts of
blocks are verified at their first use, as local readers do, and get a checksum of their own. A missing block is fetched at
most once, by its owner in this node's view, however many requests wait for it (`runtime/locks.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import xxhash
from typing_extensions import Buffer

from millrace.cache.eviction.usage import Read
from millrace.cache.node import CacheNode
from millrace.cluster.cluster import Cluster
from millrace.cluster.dataplane import wire
from millrace.cluster.dataplane.responses import BrokenResponseError, Content, Exchange, Part, Refusal, Response
from millrace.cluster.dataplane.stored import StoredObject, StoredObjects
from millrace.cluster.dataplane.wire import Get, GetMode, ObjectDescription, Put, Span
from millrace.cluster.origins import Origins
from millrace.cluster.owning import OwnedBlocks
from millrace.errors import StorageError, WireError
from millrace.runtime.failures import LostDataError
from millrace.runtime.locks import BlockKey
from millrace.store.records import BLOCK_BYTES

_ATTEMPTS = 3  # a wrong block is fetched again, and may be evicted before it is read

_INSIDE_BYTES = 64 << 10
"""Up to this size a whole block is read and sent at once, one system call fewer than with `sendfile`."""


HOT_TIMES = 8
"""A block is hot when peers requested this many times its bytes within a minute."""

_HALF_MINUTE = 30.0
_MAX_COUNTED_BLOCKS = 1 << 15


class BlockService:
    """Responds to requests for blocks of a node's cache. Thread-safe; not usable after a fork.

    The placement of `cluster` determines the blocks that the node owns.
    """

    def __init__(self, node: CacheNode, cluster: Cluster, origins: Origins) -> None:
        self._node = node
        self._objects = StoredObjects(node)
        self._heat = Heat()
        self._owning = OwnedBlocks(node, self._objects, cluster, origins)

    def close(self) -> None:
        """Close descriptors and threads; fetches in progress end by themselves."""
        self._objects.close()
        self._owning.close()

    # --- requests -----------------------------------------------------------------------------------

    def get(self, get: Get, exchange: Exchange) -> Response:
        """The framed bytes of a range of an object. Raises `WireError` for a malformed request."""
        stored = self._objects.find(get.object_id)
        if stored is not None and not get.verify:
            quick = self._quick(get, stored)
            if quick is not None:
                return quick
        if stored is None:
            if not get.described:
                return Refusal(status=404, message="the object is not cached", code="missing")
            size = _described(get).size
        else:
            size = stored.entry.size
        start, stop = get.span
        if stop > size:
            fields = (("Content-Range", f"bytes */{size}"),)
            return Refusal(status=416, message=f"the object has {size} bytes", fields=fields)
        if stop - start > wire.MAX_FRAMED_BYTES:
            return Refusal(status=416, message=f"more than {wire.MAX_FRAMED_BYTES} bytes at a time")
        return self._framed(get, stored, size, exchange)

    def put(self, put: Put, exchange: Exchange) -> Response:
        """Store blocks that another member fetched, each verified before it is stored."""
        return self._owning.take_in(put, exchange)

    # --- framed -------------------------------------------------------------------------------------

    def _quick(self, get: Get, stored: StoredObject) -> Content | None:
        """The response for one piece of a cached block, the usual request. None if it needs `_framed`."""
        start, stop = get.span
        entry = stored.entry
        block = start // BLOCK_BYTES
        if stop > entry.size or stop > (block + 1) * BLOCK_BYTES:
            return None
        nbytes = stop - start
        whole = start % BLOCK_BYTES == 0 and (stop == entry.size or stop % BLOCK_BYTES == 0)
        key = block if whole else (start, stop)
        try:
            checksum = stored.known_sum(key) if whole or stored.is_verified(block) else None
            if checksum is not None and nbytes > _INSIDE_BYTES:
                part: Part | None = stored.part(start, stop) if stored.reaches(stop) else None
            elif checksum is None and (whole or not stored.is_verified(block) or stored.checksum(block) is None):
                return None  # also if the block was verified once, and dropped since
            else:
                part = data = stored.read(start, stop)
                if checksum is None and data is not None:
                    checksum = xxhash.xxh3_64_intdigest(data)
                    stored.add_sum(get.span, checksum)
        except StorageError:
            return None  # `_framed` raises the same error, and reports it
        if part is None or checksum is None:
            return None
        # The same counts as in `_count`. A call of it would make this response 5 % slower.
        hot = self._heat.count((get.object_id, block), nbytes, min(entry.size, BLOCK_BYTES))
        stored.disk.usage.note(Read(entry, nbytes, hit=True, kept=True, served=True))
        stored.disk.counters.add("served_requests")
        stored.disk.counters.add("served_bytes", nbytes)
        if get.mode is GetMode.FETCH:
            stored.disk.counters.add("served_cached_bytes", nbytes)
        head = wire.build_framed_head(get.span, entry.size, hot=hot)
        return Content(head, (part, wire.pack_sum(checksum)))

    def _framed(self, get: Get, stored: StoredObject | None, size: int, exchange: Exchange) -> Response:
        pieces = list(wire.pieces(*get.span))
        blocks = [start // BLOCK_BYTES for start, _ in pieces]
        partial = {start // BLOCK_BYTES for start, stop in pieces if not _is_whole(start, stop, size)}
        memory: dict[int, Buffer] = {}
        fresh: set[int] = set()
        for _ in range(_ATTEMPTS):
            missing = self._objects.missing(stored, blocks, partial, verify=get.verify, memory=memory)
            if not missing:
                break
            if get.mode is GetMode.CACHED:
                return Refusal(status=404, message="the blocks are not cached", code="missing")
            what = _described(get) if get.described else _named(stored)
            requested = {block: piece for block, piece in zip(blocks, pieces, strict=True) if block in missing}
            # Fetched only if this node is responsible.
            fetched = self._owning.fetch(what, requested, exchange, rank=get.rank, fetch_id=get.fetch_id)
            if isinstance(fetched, Refusal):
                return fetched
            memory.update(fetched)
            fresh.update(missing)
            stored = self._objects.find(get.object_id)
        else:
            return Refusal(status=503, message="the blocks are evicted before they can be sent", code="retryable")
        hot = self._count(get, stored, pieces, size, fresh)
        parts = self._framed_parts(stored, pieces, size, memory)
        return Content(
            head=wire.build_framed_head(get.span, size, hot=hot),
            # One piece is read now: an error in it can still be reported.
            parts=tuple(parts) if len(pieces) == 1 else parts,
        )

    def _framed_parts(
        self, stored: StoredObject | None, pieces: Iterable[Span], size: int, memory: dict[int, Buffer]
    ) -> Iterator[Part]:
        for start, stop in pieces:
            block = start // BLOCK_BYTES
            data: Buffer | None = memory.get(block)
            if data is not None:
                base = block * BLOCK_BYTES
                piece = memoryview(data).cast("B")  # of the whole block, or of the requested part
                if len(piece) != stop - start:
                    piece = piece[start - base : stop - base]
                yield piece
                yield wire.sum_of(piece)
                continue
            if stored is None:
                raise BrokenResponseError("an object was removed")
            checksum = stored.checksum(block) if _is_whole(start, stop, size) else None
            if checksum is not None and stop - start > _INSIDE_BYTES:
                yield stored.part(start, stop)
                yield wire.pack_sum(checksum)
                continue
            data = self._read(stored, start, stop, verify=checksum is None)
            yield data
            yield wire.sum_of(data) if checksum is None else wire.pack_sum(checksum)

    def _read(self, stored: StoredObject, start: int, stop: int, *, verify: bool) -> Buffer:
        """A piece of one verified block from its file. Raises `BrokenResponseError` if the file was truncated."""
        block = start // BLOCK_BYTES
        try:
            if verify and not stored.is_verified(block):
                whole = stored.verify(block)
                base = block * BLOCK_BYTES
                data: Buffer | None = None if whole is None else memoryview(whole)[start - base : stop - base]
            else:
                data = stored.read(start, stop)
        except LostDataError as error:
            self._objects.lost(stored, error)
            data = None
        except StorageError as error:
            stored.disk.report(error)
            data = None
        if data is None:
            self._objects.drop(stored.entry.object_id)
            raise BrokenResponseError("a block on the disk has changed")
        return data

    # --- counting -----------------------------------------------------------------------------------

    def _count(self, get: Get, stored: StoredObject | None, pieces: Sequence[Span], size: int, fresh: set[int]) -> bool:
        """Count a response, whose blocks in `fresh` were just fetched; returns whether any block is hot."""
        hot = False
        nbytes = used = 0
        for start, stop in pieces:
            block = start // BLOCK_BYTES
            nbytes += stop - start
            used += 0 if block in fresh else stop - start  # a fetch was already counted as a use
            hot |= self._heat.count((get.object_id, block), stop - start, min(size, BLOCK_BYTES))
        disk = self._node.disk_of(get.object_id) if stored is None else stored.disk
        if disk is not None:
            disk.counters.add("served_requests")
            disk.counters.add("served_bytes", nbytes)
        if stored is not None and used:
            stored.disk.usage.note(Read(stored.entry, used, hit=True, kept=True, served=True))
            if get.mode is GetMode.FETCH:
                stored.disk.counters.add("served_cached_bytes", used)
        return hot


def _is_whole(start: int, stop: int, size: int) -> bool:
    """Whether a piece is a whole block."""
    return start % BLOCK_BYTES == 0 and (stop % BLOCK_BYTES == 0 or stop == size)


def _described(get: Get) -> ObjectDescription:
    what = ObjectDescription.from_header(get.described)
    if what.object_id() != get.object_id:
        raise WireError("the object's id differs from that of its description")
    return what


def _named(stored: StoredObject | None) -> ObjectDescription:
    if stored is None:
        raise WireError("the object is not cached, and the request does not describe it", status=404)
    name = stored.entry.name
    return ObjectDescription(name.origin, name.key, name.version, stored.entry.size)


class Heat:
    """How many bytes of each block peers requested. Thread-safe without a lock: concurrent threads may lose a count.

    Counts are in two generations of half a minute each. When there are too many blocks, the older generation is dropped.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, max_blocks: int = _MAX_COUNTED_BLOCKS) -> None:
        self._clock = clock
        self._max_blocks = max_blocks
        self._young: dict[BlockKey, int] = {}
        self._old: dict[BlockKey, int] = {}
        self._since = clock()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def count(self, key: BlockKey, nbytes: int, block_bytes: int) -> bool:
        """Count a request for `nbytes` of a block of `block_bytes`; returns whether the block is hot."""
        young = self._young
        now = self._clock()
        if now - self._since >= _HALF_MINUTE or len(young) >= self._max_blocks:
            # After a pause of more than a minute both are too old.
            self._old = young if now - self._since < 2 * _HALF_MINUTE else {}
            self._young = young = {}
            self._since = now
        young[key] = total = young.get(key, 0) + nbytes
        return total + self._old.get(key, 0) > HOT_TIMES * block_bytes
