"""What a node gives to others out of its cache: blocks that are here, and what it fetches because it owns them.

Whole blocks go out as they lie on the disk, with the checksum that the index has: who receives them checks disk and wire in
one. Parts of blocks are verified here at their first use, as local readers do it, and get a checksum of their own. A block
that is not here is fetched at most once however many ask for it (`cache/flight.py`), by whoever owns it in this node's view.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import xxhash
from typing_extensions import Buffer

from millrace.cache.blocks import BLOCK_BYTES, RUN_BLOCKS, blocks_of
from millrace.cache.counters import Counters
from millrace.cache.failures import LostDataError
from millrace.cache.node import CacheNode
from millrace.cache.source import MakeSource
from millrace.errors import StorageError, WireError
from millrace.members import ViewSource
from millrace.peers import wire
from millrace.peers.answers import Answer, BrokenAnswerError, Content, Done, Exchange, Part, Refusal
from millrace.peers.demand import Heat
from millrace.peers.origins import Origins
from millrace.peers.owning import OwnedBlocks
from millrace.peers.stored import StoredObject, StoredObjects
from millrace.peers.wire import Ask, Get, ObjectDescription, Put, Span

_AHEAD_RUNS = 4  # of a plain answer, which are fetched at a time
_ATTEMPTS = 3  # a block that turns out wrong is fetched again, and that may be evicted before it is read

_HOT = "Millrace-Hot: 1\r\n"

_INSIDE_BYTES = 64 << 10
"""Up to this size a whole block is read and sent in one go: a system call less than `sendfile` takes."""


class BlockService:
    """Answers requests for blocks of a node's cache. Thread-safe; not usable after a fork.

    `member_id` is this node's in the views of `views`; it fetches what it owns there. `former_source` is where it gets that
    from in place of the node's own source.
    """

    def __init__(
        self,
        node: CacheNode,
        *,
        views: ViewSource,
        member_id: str,
        replicas: int,
        origins: Origins,
        former_source: MakeSource | None = None,
    ) -> None:
        self._node = node
        self._objects = StoredObjects(node)
        self._heat = Heat()
        self._owning = OwnedBlocks(
            node,
            self._objects,
            views=views,
            member_id=member_id,
            replicas=replicas,
            origins=origins,
            source=former_source,
        )

    def close(self) -> None:
        """Let go of descriptors and threads; fetches under way end by themselves."""
        self._objects.close()
        self._owning.close()

    # --- requests -----------------------------------------------------------------------------------

    def get(self, get: Get, exchange: Exchange) -> Answer:
        """Bytes of an object, framed or plain. Raises `WireError` for what cannot be asked for."""
        stored = self._objects.find(get.object_id)
        if stored is not None and get.wire and len(get.ranges) == 1 and not get.verify:
            quick = self._quick(get, stored)
            if quick is not None:
                return quick
        if stored is None:
            if not get.described:
                return Refusal(status=404, message="the object is not here", code="missing")
            size = self._described(get).size
        else:
            size = stored.entry.size
        spans = _spans(get, size)
        if isinstance(spans, Refusal):
            return spans
        if get.wire:
            return self._framed(get, stored, size, spans, exchange)
        return self._plain(get, stored, size, spans[0], exchange)

    def head(self, get: Get) -> Answer:
        """The size of an object, and which of its blocks are here, in the range asked for if there is one."""
        stored = self._objects.find(get.object_id)
        if stored is None:
            return Refusal(status=404)
        size = stored.entry.size
        start, stop = get.ranges[0].of(size) if get.ranges else (0, size)
        try:
            here = stored.here(blocks_of(start, stop, BLOCK_BYTES))
        except StorageError as error:
            stored.disk.report(error)
            here = []
        if not here and size:
            return Refusal(status=404)
        etag = f'"{get.object_id.hex()}"'
        fields = (("Millrace-Blocks", wire.format_blocks(here)), ("ETag", etag), ("Accept-Ranges", "bytes"))
        return Done(status=200, fields=fields, length=size)

    def put(self, put: Put, exchange: Exchange) -> Answer:
        """Keep blocks that somebody else has fetched, each verified before it is kept."""
        return self._owning.take_in(put, exchange)

    # --- framed -------------------------------------------------------------------------------------

    def _quick(self, get: Get, stored: StoredObject) -> Content | None:
        """One piece of a block that is here, and right as far as is known: nearly every request. None: the long way."""
        start, stop, _ = get.ranges[0]
        entry = stored.entry
        block = start // BLOCK_BYTES
        if stop is None or stop > entry.size or stop > (block + 1) * BLOCK_BYTES:
            return None
        nbytes = stop - start
        whole = start % BLOCK_BYTES == 0 and (stop == entry.size or stop % BLOCK_BYTES == 0)
        key = block if whole else (start, stop)
        try:
            checksum = stored.known_sum(key) if whole or stored.is_verified(block) else None
            if checksum is None:
                if whole or not stored.is_verified(block):
                    return None
                data = stored.read(start, stop)
                if data is None:
                    return None
                checksum = xxhash.xxh3_64_intdigest(data)
                stored.learn_sum((start, stop), checksum)
                part: Part = data
            elif nbytes > _INSIDE_BYTES:
                if not stored.reaches(stop):
                    return None
                part = stored.part(start, stop)
            else:
                data = stored.read(start, stop)
                if data is None:
                    return None
                part = data
        except StorageError:
            return None  # the long way meets the same error, and tells of it
        hot = self._heat.asked((get.object_id, block), nbytes, min(entry.size, BLOCK_BYTES))
        stored.disk.usage.hit(entry, nbytes)
        stored.disk.counters.add("served_requests")
        stored.disk.counters.add("served_bytes", nbytes)
        head = (
            f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {start}-{stop - 1}/{entry.size}\r\n"
            f"Millrace-Wire: {get.wire}\r\n{_HOT if hot else ''}Content-Length: {nbytes + wire.SUM_BYTES}\r\n\r\n"
        )
        return Content(head.encode("ascii"), (part, checksum.to_bytes(wire.SUM_BYTES, "little")))

    def _framed(
        self, get: Get, stored: StoredObject | None, size: int, spans: Sequence[Span], exchange: Exchange
    ) -> Answer:
        pieces = [piece for start, stop in spans for piece in wire.pieces(start, stop)]
        blocks = sorted({start // BLOCK_BYTES for start, _ in pieces})
        partial = {start // BLOCK_BYTES for start, stop in pieces if not _is_whole(start, stop, size)}
        memory: dict[int, Buffer] = {}
        fresh: set[int] = set()
        for _ in range(_ATTEMPTS):
            missing = self._objects.missing(stored, blocks, partial, verify=get.verify, memory=memory)
            if not missing:
                break
            fetched = self._fetch(get, stored, missing, exchange)
            if isinstance(fetched, Refusal):
                return fetched
            memory.update(fetched)
            fresh.update(missing)
            stored = self._objects.find(get.object_id)
        else:
            return Refusal(status=503, message="the blocks do not stay here long enough to be sent", code="retryable")
        hot = self._count(get.object_id, stored, pieces, size, fresh)
        parts = self._framed_parts(stored, pieces, size, memory)
        return Content(
            head=wire.build_framed_head(spans, size, wire=get.wire, hot=hot),
            # One piece is taken apart now: what is found wrong in it can still be told.
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
                piece = memoryview(data)[start - base : stop - base]
                yield piece
                yield wire.sum_of(piece)
                continue
            if stored is None:
                raise BrokenAnswerError("an object went away")
            checksum = stored.checksum(block) if _is_whole(start, stop, size) else None
            if checksum is not None and stop - start > _INSIDE_BYTES:
                yield stored.part(start, stop)
                yield wire.pack_sum(checksum)
                continue
            data = self._read(stored, start, stop, verify=checksum is None)
            yield data
            yield wire.sum_of(data) if checksum is None else wire.pack_sum(checksum)

    def _read(self, stored: StoredObject, start: int, stop: int, *, verify: bool) -> Buffer:
        """A piece of one block out of its file, which was verified before; raises `BrokenAnswerError` when it is cut."""
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
            raise BrokenAnswerError("a block on the disk is not what it was")
        return data

    # --- plain --------------------------------------------------------------------------------------

    def _plain(self, get: Get, stored: StoredObject | None, size: int, span: Span, exchange: Exchange) -> Answer:
        parts = self._plain_parts(get, stored, size, span, exchange)
        fields = [("ETag", f'"{get.object_id.hex()}"'), ("Accept-Ranges", "bytes")]
        status = 200
        if len(get.ranges) == 1:
            status = 206
            fields.append(("Content-Range", f"bytes {span[0]}-{span[1] - 1}/{size}"))
        fields.append(("Content-Type", "application/octet-stream"))
        head = wire.build_response(status, fields, length=span[1] - span[0])
        try:
            first = next(parts, None)  # what is refused is refused before anything is said
        except _RefusedError as refused:
            return refused.refusal
        return Content(head=head, parts=() if first is None else _chained(first, parts))

    def _plain_parts(
        self, get: Get, stored: StoredObject | None, size: int, span: Span, exchange: Exchange
    ) -> Iterator[Part]:
        """The range block by block, each verified; what is missing is fetched a few runs at a time."""
        blocks = blocks_of(*span, BLOCK_BYTES)
        first, window = blocks.start, RUN_BLOCKS  # who waits for the first byte waits for one request to the origin
        while first < blocks.stop:
            group = range(first, min(first + window, blocks.stop))
            memory: dict[int, Buffer] = {}
            fresh: set[int] = set()
            for _ in range(_ATTEMPTS):
                missing = self._objects.missing(stored, group, set(group), verify=get.verify, memory=memory)
                if not missing:
                    break
                fetched = self._fetch(get, stored, missing, exchange)
                if isinstance(fetched, Refusal):
                    raise _RefusedError(fetched)
                memory.update(fetched)
                fresh.update(missing)
                stored = self._objects.find(get.object_id)
            else:
                raise _RefusedError(Refusal(status=503, message="the blocks do not stay here", code="retryable"))
            start, stop = max(span[0], first * BLOCK_BYTES), min(span[1], group.stop * BLOCK_BYTES)
            pieces = list(wire.pieces(start, stop))
            self._count(get.object_id, stored, pieces, size, fresh)
            for begin, end in pieces:
                data = memory.get(begin // BLOCK_BYTES)
                base = begin // BLOCK_BYTES * BLOCK_BYTES
                if data is not None:
                    yield memoryview(data)[begin - base : end - base]
                elif stored is not None and stored.is_verified(begin // BLOCK_BYTES):
                    yield stored.part(begin, end)
                elif stored is not None:
                    yield self._read(stored, begin, end, verify=True)
                else:
                    raise BrokenAnswerError("an object went away")
            first, window = group.stop, RUN_BLOCKS * _AHEAD_RUNS

    # --- what is here -------------------------------------------------------------------------------

    def _count(
        self, object_id: bytes, stored: StoredObject | None, pieces: Sequence[Span], size: int, fresh: set[int]
    ) -> bool:
        """Count what is about to be served, of which the blocks in `fresh` were just fetched; gives whether any is hot."""
        hot = False
        nbytes = used = 0
        for start, stop in pieces:
            block = start // BLOCK_BYTES
            nbytes += stop - start
            used += 0 if block in fresh else stop - start  # a fetch was noted as a use already
            hot |= self._heat.asked((object_id, block), stop - start, min(size, BLOCK_BYTES))
        counters: Counters | None
        if stored is not None:
            counters = stored.disk.counters
            if used:
                stored.disk.usage.hit(stored.entry, used)
        else:
            disk = self._node.disk_of(object_id)
            counters = None if disk is None else disk.counters
        if counters is not None:
            counters.add("served_requests")
            counters.add("served_bytes", nbytes)
        return hot

    # --- fetching -----------------------------------------------------------------------------------

    def _fetch(
        self, get: Get, stored: StoredObject | None, missing: Sequence[int], exchange: Exchange
    ) -> dict[int, Buffer] | Refusal:
        """Bring missing blocks here, if that is this node's to do; gives those that could not be kept."""
        if get.ask is Ask.CACHED:
            return Refusal(status=404, message="the blocks are not here", code="missing")
        what = self._described(get) if get.described else _named(stored)
        return self._owning.fetch(what, missing, exchange, rank=get.rank)

    def _described(self, get: Get) -> ObjectDescription:
        what = ObjectDescription.from_header(get.described)
        if what.object_id() != get.object_id:
            raise WireError("the object's id is not that of its description")
        return what


class _RefusedError(Exception):
    """Carries a refusal out of the making of a body; after its first part, it breaks the body off."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def _is_whole(start: int, stop: int, size: int) -> bool:
    """Whether a piece is all of its block."""
    return start % BLOCK_BYTES == 0 and (stop % BLOCK_BYTES == 0 or stop == size)


def _spans(get: Get, size: int) -> list[Span] | Refusal:
    """The ranges asked for in an object of `size` bytes. Of a plain request several ranges are answered with the whole."""
    outside = Refusal(
        status=416, message=f"the object has {size} bytes", fields=(("Content-Range", f"bytes */{size}"),)
    )
    if not get.wire:
        if len(get.ranges) != 1:
            return [(0, size)]
        span = get.ranges[0].of(size)
        return [span] if span[0] < span[1] else outside
    spans: list[Span] = []
    for each in get.ranges:
        if each.suffix or each.stop is None or each.stop > size:
            return outside
        spans.append((each.start, each.stop))
    if sum(stop - start for start, stop in spans) > wire.MAX_FRAMED_BYTES:
        return Refusal(status=416, message=f"more than {wire.MAX_FRAMED_BYTES} bytes at a time")
    return spans


def _named(stored: StoredObject | None) -> ObjectDescription:
    if stored is None:
        raise WireError("the object is not here, and Millrace-Object does not say what it is", status=404)
    name = stored.entry.name
    return ObjectDescription(name.origin, name.key, name.version, stored.entry.size)


def _chained(first: Part, rest: Iterator[Part]) -> Iterator[Part]:
    yield first
    try:
        yield from rest
    except _RefusedError as refused:
        raise BrokenAnswerError(str(refused)) from refused
