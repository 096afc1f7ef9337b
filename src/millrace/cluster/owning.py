"""The owner's side of a read: fetches the node's blocks once for all readers, and stores blocks that readers upload.

An owner without access to an origin grants one reader an upload lease for the blocks, while the other readers wait for them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from typing_extensions import Buffer

from millrace.cache.counters import Counters
from millrace.cache.node import CacheNode
from millrace.cache.reading.fetching import Fetched, Source
from millrace.cache.reading.reader import CachedReader, ObjectReader
from millrace.cluster.cluster import Cluster
from millrace.cluster.dataplane import wire
from millrace.cluster.dataplane.responses import Done, Exchange, Refusal, Response
from millrace.cluster.dataplane.stored import StoredObjects
from millrace.cluster.dataplane.wire import ObjectDescription, Put, Span
from millrace.cluster.origins import NamedOrigin, Origins
from millrace.cluster.placement import stripe_of
from millrace.cluster.receiving import ReceivedBytes, reader_for_peers
from millrace.errors import (
    ChangedError,
    DeniedError,
    MillraceError,
    MissingError,
    RetryableError,
    StorageError,
    UsageError,
    WireError,
)
from millrace.events import Event, emit
from millrace.origin import ObjectInfo, Origin
from millrace.runtime.locks import BlockKey, in_fetch, new_fetch_id
from millrace.store.records import BLOCK_BYTES, RUN_BLOCKS, coalesce, span_of

_log = logging.getLogger("millrace.cluster")

_FETCH_THREADS = 48
_FETCHED_BYTES = 512 << 20
"""The most bytes of fetches in progress, over all requests; further ones wait."""

_WAIT_SECONDS = 0.3
_WAIT_FOR_OTHERS_SECONDS = 5.0
_DENIED_SECONDS = 30.0
_MAX_DENIED = 1000
_PUT_ORDER = 3
_LEASE_SECONDS = 5.0
_MAX_LEASES = 1 << 15

_NOT_MINE = Refusal(status=421, message="another node owns these blocks")


class OwnedBlocks:
    """Fetches the blocks that a node owns in its own view, and stores uploads. Thread-safe; not usable after a fork."""

    def __init__(self, node: CacheNode, objects: StoredObjects, cluster: Cluster, origins: Origins) -> None:
        self._node = node
        self._objects = objects
        self._cluster = cluster
        self._member_id = cluster.link.member_id
        self._origins = origins
        self._leases = UploadLeases()
        self._budget = _Budget(_FETCHED_BYTES)
        self._denied: dict[tuple[str, str], float] = {}
        self._pool = ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="millrace-serve")
        # Of its own: all threads of the other one may wait for the origin. An upload waits only for a reader of its block.
        self._keeping = ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="millrace-keep")

    def close(self) -> None:
        """Close the threads; fetches in progress end by themselves."""
        for pool in (self._pool, self._keeping):
            pool.shutdown(wait=False, cancel_futures=True)

    def fetch(
        self, what: ObjectDescription, missing: Mapping[int, Span], exchange: Exchange, *, rank: int, fetch_id: str
    ) -> dict[int, Buffer] | Refusal:
        """Fetch missing blocks, each for the requested part of it, if this node is among the first `rank` + 1 owners.

        Returns the blocks that were not stored, and the requested bytes of those of which only a part is requested.
        The requests to the origin are part of the reader's fetch `fetch_id`; empty: of a new one.
        """
        placement = self._cluster.placement()
        for stripe in {stripe_of(block * BLOCK_BYTES, what.size) for block in missing}:
            order = placement.order(what.object_id(), stripe)[: rank + 1]
            if all(member.id != self._member_id for member in order):
                return _NOT_MINE
        exchange.processing()
        nbytes = sum(stop - start for start, stop in missing.values())
        while not self._budget.reserve(nbytes, _WAIT_SECONDS):
            exchange.processing()
        try:
            return self._fetch_within(what, missing, exchange, fetch_id or new_fetch_id())
        finally:
            self._budget.release(nbytes)

    def take_in(self, put: Put, exchange: Exchange) -> Response:
        """Store blocks that a reader uploads, each verified before it is stored."""
        what = put.what
        members = self._cluster.placement().order(what.object_id(), stripe_of(put.start, what.size))
        if all(member.id != self._member_id for member in members[: max(_PUT_ORDER, self._cluster.link.replicas)]):
            return _NOT_MINE
        received = ReceivedBytes()
        origin = self._origins.find(what.origin) or NamedOrigin(what.origin)
        reader = reader_for_peers(self._node, origin, what, lambda *_: received)
        keeping: list[Future[bool]] = []  # the last one
        try:
            if not isinstance(reader, CachedReader):
                return Refusal(status=507, message="no disk can be used", code="storage")
            kept = True
            for start, stop in wire.pieces(put.start, put.stop):
                received.data, received.start = exchange.read_body(stop - start), start
                if exchange.read_body(wire.SUM_BYTES) != wire.sum_of(received.data):
                    raise WireError("an uploaded block has a wrong checksum")
                block = start // BLOCK_BYTES
                if kept:  # it waits for a reader of this machine that fetches the same block
                    keeping = [self._keeping.submit(self._keep, reader, block)]
                    self._await(keeping, exchange)
                    kept = keeping[0].result()
                self._leases.end(what.object_id(), block)
        finally:
            _close_after(reader, keeping)
        return Done() if kept else Refusal(status=507, message="no space for the blocks", code="disk-full")

    @staticmethod
    def _keep(reader: CachedReader, block: int) -> bool:
        """Store the received block; returns whether it is cached now."""
        for _ in range(2):
            if not reader.missing([block]):
                break
            try:
                reader.fetch([block])
            except MillraceError as error:  # of a concurrent fetch from the origin
                _log.debug("an uploaded block is stored although a fetch of it failed: %s", error)
        return not reader.missing([block])

    def _fetch_within(
        self, what: ObjectDescription, missing: Mapping[int, Span], exchange: Exchange, fetch_id: str
    ) -> dict[int, Buffer] | Refusal:
        origin = self._origins.find(what.origin)
        bucket = (what.origin, what.key.partition("/")[0])
        if origin is None or time.monotonic() < self._denied.get(bucket, 0.0):
            return self._await_upload(what, list(missing), exchange)
        reader = reader_for_peers(self._node, origin, what, self._relay)
        futures: list[Future[dict[int, Buffer]]] = []
        try:
            whole = {block for block, span in missing.items() if span == _span(block, what.size)}
            for run in coalesce(whole, RUN_BLOCKS):
                futures.append(self._pool.submit(in_fetch, fetch_id, partial(_fetch, reader, list(run))))
            for block in missing.keys() - whole:
                read = partial(_read_part, reader, block, missing[block])
                futures.append(self._pool.submit(in_fetch, fetch_id, read))
            self._await(futures, exchange)
            return {block: data for future in futures for block, data in future.result().items()}
        except DeniedError as error:
            emit(Event(name="peer.origin.denied", subject=what.origin, detail=str(error)))
            self._origins.drop(what.origin)
            if len(self._denied) >= _MAX_DENIED:
                self._denied.clear()
            self._denied[bucket] = time.monotonic() + _DENIED_SECONDS
            return self._await_upload(what, list(missing), exchange)
        except MillraceError as error:
            return _refusal_of(error)
        finally:
            _close_after(reader, futures)

    @staticmethod
    def _await(futures: Sequence[Future[Any]], exchange: Exchange) -> None:
        """Wait for all fetches while sending interim responses. Raises the first error."""
        while True:
            done, pending = wait(futures, _WAIT_SECONDS, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            if not pending:
                return
            exchange.processing()

    def _await_upload(
        self, what: ObjectDescription, missing: Sequence[int], exchange: Exchange
    ) -> dict[int, Buffer] | Refusal:
        """Without access to the origin: the first reader gets the upload lease; others wait for its blocks for a moment."""
        refusal = Refusal(status=424, message=f"this node has no access to {what.origin}", code="denied")
        until = time.monotonic() + _WAIT_FOR_OTHERS_SECONDS
        while True:
            stored = self._objects.find(what.object_id())
            left = self._objects.missing(stored, missing, set(), verify=False, memory={})
            if not left:
                return {}
            if self._leases.take(what.object_id(), left):
                return refusal._replace(fields=(("Millrace-Lease", "1"),))
            remaining = until - time.monotonic()
            if remaining <= 0:
                return refusal
            self._leases.wait(min(_WAIT_SECONDS, remaining))
            exchange.processing()

    def _relay(self, origin: Origin, info: ObjectInfo, counters: Counters | None) -> Source:
        return _RelaySource(self._node.source(origin, info, counters), counters)


@dataclass(frozen=True, slots=True)
class _RelaySource:
    """The node's `Source` for reads of other nodes. Counts their bytes, which the readers count, too."""

    inner: Source
    counters: Counters | None

    def read(self, start: int, stop: int) -> Fetched:
        found = self.inner.read(start, stop)
        if self.counters is not None:
            self.counters.add("relayed_bytes", stop - start)
        return found

    def fetches_through_peer(self, start: int) -> bool:
        return self.inner.fetches_through_peer(start)


class UploadLeases:
    """Which blocks of origins without access a reader is uploading, while other readers wait. Thread-safe."""

    def __init__(self, *, seconds: float = _LEASE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: dict[BlockKey, float] = {}
        self._lock = threading.RLock()  # entered instead of its condition, which an interrupt could leave locked
        self._changed = threading.Condition(self._lock)

    def take(self, object_id: bytes, blocks: Iterable[int]) -> bool:
        """Whether the caller gets the lease to upload these blocks; False while another caller has one for any of them."""
        keys = [(object_id, block) for block in blocks]
        now = self._clock()
        with self._lock:
            if any(self._until.get(key, 0.0) > now for key in keys):
                return False
            if len(self._until) >= _MAX_LEASES:
                self._until = {key: until for key, until in self._until.items() if until > now}
            for key in keys:
                self._until[key] = now + self._seconds
            return True

    def end(self, object_id: bytes, block: int) -> None:
        """End the lease of a block that was uploaded."""
        with self._lock:
            self._until.pop((object_id, block), None)
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until any lease ends, `seconds` at most."""
        with self._lock:
            self._changed.wait(seconds)


class _Budget:
    """A limit of bytes in flight. Thread-safe. A request above the limit is granted while it is the only one."""

    def __init__(self, nbytes: int) -> None:
        self._all = nbytes
        self._left = nbytes
        self._lock = threading.RLock()  # entered instead of its condition, which an interrupt could leave locked
        self._changed = threading.Condition(self._lock)

    def reserve(self, nbytes: int, seconds: float) -> bool:
        """Reserve bytes, waiting at most `seconds`; returns whether it succeeded."""
        with self._lock:
            enough = self._changed.wait_for(lambda: self._left >= min(nbytes, self._all), seconds)
            self._left -= nbytes if enough else 0
            return enough

    def release(self, nbytes: int) -> None:
        with self._lock:
            self._left += nbytes
            self._changed.notify_all()


def _fetch(reader: ObjectReader, blocks: list[int]) -> dict[int, Buffer]:
    """Fetch missing blocks; returns those that are not on the disk afterwards."""
    if isinstance(reader, CachedReader):
        fetched = reader.fetch(blocks)
        return {block: fetched[block] for block in reader.missing(blocks)}
    return {block: reader.read(*_span(block, reader.size)) for block in blocks}


def _read_part(reader: ObjectReader, block: int, span: Span) -> dict[int, Buffer]:
    """The bytes of a part of a block, which is fetched if it is missing."""
    return {block: reader.read(*span)}


def _close_after(reader: ObjectReader, futures: Sequence[Future[Any]]) -> None:
    """Cancel the fetches that have not begun, and close their reader after those in progress, without waiting for them.

    If it were closed before, a fetch could use the descriptor of another file.
    """
    left, lock = len(futures), threading.Lock()

    def ended(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = not left
        if is_last:
            reader.close()

    if not futures:
        reader.close()
    for future in futures:
        future.cancel()
        future.add_done_callback(ended)


def _span(block: int, size: int) -> Span:
    return span_of(block, block + 1, size, BLOCK_BYTES)


def _refusal_of(error: MillraceError) -> Refusal:
    """The refusal after a failed fetch."""
    if isinstance(error, ChangedError | UsageError):  # a range past the end: the object is shorter now
        status = 409
    elif isinstance(error, MissingError):
        status = 410
    elif isinstance(error, StorageError):
        status = 503
    elif isinstance(error, RetryableError):
        status = 502
    else:
        _log.warning("fetch for another node failed: %s", error)
        status = 502
    return Refusal(status=status, message=str(error), code=error.code)
