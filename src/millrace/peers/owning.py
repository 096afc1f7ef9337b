"""What a node does because it owns blocks: fetches them, once for all who ask, and keeps what others bring.

Who has no access to an origin lets one of the askers bring the blocks, and has the others wait for that (`demand.Leases`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from typing_extensions import Buffer

from millrace.cache.blocks import BLOCK_BYTES, RUN_BLOCKS, coalesce, span_of
from millrace.cache.node import CacheNode
from millrace.cache.reader import BlockReader, ObjectReader
from millrace.cache.small import SmallReader
from millrace.cache.source import MakeSource
from millrace.cache.threads import CALLERS_THREAD
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
from millrace.members import ViewSource
from millrace.origin import ObjectInfo, Origin
from millrace.peers import wire
from millrace.peers.answers import Answer, Done, Exchange, Refusal
from millrace.peers.bringing import Brought
from millrace.peers.demand import Leases
from millrace.peers.origins import NamedOrigin, Origins
from millrace.peers.placement import Placement, stripe_of
from millrace.peers.stored import StoredObjects
from millrace.peers.wire import ObjectDescription, Put, Span

_log = logging.getLogger("millrace")

_FETCH_THREADS = 48
_FETCHED_BYTES = 512 << 20
"""What may be in memory of fetches under way, over all askers; who comes then waits."""

_WAIT_SECONDS = 0.3
_WAIT_FOR_OTHERS_SECONDS = 5.0
_DENIED_SECONDS = 30.0
_MAX_DENIED = 1000
_PUT_ORDER = 3


class OwnedBlocks:
    """Fetches what a node owns by its own view, and takes in what is brought. Thread-safe; not usable after a fork.

    `source` is where it fetches from in place of the node's own source.
    """

    def __init__(
        self,
        node: CacheNode,
        objects: StoredObjects,
        *,
        views: ViewSource,
        member_id: str,
        replicas: int,
        origins: Origins,
        source: MakeSource | None,
    ) -> None:
        self._node = node
        self._objects = objects
        self._views = views
        self._member_id = member_id
        self._replicas = replicas
        self._origins = origins
        self._source = source
        self._leases = Leases()
        self._budget = _Budget(_FETCHED_BYTES)
        self._denied: dict[tuple[str, str], float] = {}
        self._pool = ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="millrace-serve")
        self._placement = Placement(views.view(), replicas=replicas)

    def close(self) -> None:
        """Let go of the threads; fetches under way end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def fetch(
        self, what: ObjectDescription, missing: Sequence[int], exchange: Exchange, *, rank: int
    ) -> dict[int, Buffer] | Refusal:
        """Bring missing blocks here, if this node is among the first `rank` + 1 owners; gives those that were not kept."""
        placed = self._placed()
        for stripe in {stripe_of(block * BLOCK_BYTES, what.size) for block in missing}:
            order = placed.order(what.object_id(), stripe)[: rank + 1]
            if all(member.id != self._member_id for member in order):
                return self._not_mine()
        exchange.processing()
        nbytes = sum(stop - start for start, stop in (_span(block, what.size) for block in missing))
        while not self._budget.take(nbytes, _WAIT_SECONDS):
            exchange.processing()
        try:
            return self._fetch_within(what, missing, exchange)
        finally:
            self._budget.give_back(nbytes)

    def take_in(self, put: Put, exchange: Exchange) -> Answer:
        """Keep blocks that somebody else has fetched, each verified before it is kept."""
        what = put.what
        members = self._placed().order(what.object_id(), stripe_of(put.start, what.size))
        if all(member.id != self._member_id for member in members[: max(_PUT_ORDER, self._replicas)]):
            return self._not_mine()
        brought = Brought()
        reader = self._open_reader(
            self._origins.find(what.origin) or NamedOrigin(what.origin), what, lambda *_: brought
        )
        try:
            if not isinstance(reader, BlockReader | SmallReader):
                return Refusal(status=507, message="no disk can be used", code="storage")
            kept = True
            for start, stop in wire.pieces(put.start, put.stop):
                brought.data, brought.start = exchange.read_body(stop - start), start
                if exchange.read_body(wire.SUM_BYTES) != wire.sum_of(brought.data):
                    raise WireError("a block that was brought is not what was sent")
                block = start // BLOCK_BYTES
                kept = kept and self._keep(reader, block)
                self._leases.end(what.object_id(), block)
        finally:
            reader.close()
        return Done(status=204) if kept else Refusal(status=507, message="no room for the blocks", code="disk-full")

    @staticmethod
    def _keep(reader: BlockReader | SmallReader, block: int) -> bool:
        """Keep the block that was brought; whether it is here now."""
        for _ in range(2):
            if not reader.missing([block]):
                break
            try:
                reader.fetch([block])
            except MillraceError as error:  # of a fetch from the origin that was under way when this one came
                _log.debug("a block is kept although its fetch failed: %s", error)
        return not reader.missing([block])

    def _fetch_within(
        self, what: ObjectDescription, missing: Sequence[int], exchange: Exchange
    ) -> dict[int, Buffer] | Refusal:
        origin = self._origins.find(what.origin)
        bucket = (what.origin, what.key.partition("/")[0])
        if origin is None or time.monotonic() < self._denied.get(bucket, 0.0):
            return self._await_from_others(what, missing, exchange)
        reader = self._open_reader(origin, what, self._source)
        futures: list[Future[dict[int, Buffer]]] = []
        try:
            for run in coalesce(missing, RUN_BLOCKS):
                futures.append(self._pool.submit(_bring, reader, list(run)))
            self._await(futures, exchange)
            return {block: data for future in futures for block, data in future.result().items()}
        except DeniedError as error:
            emit(Event(name="peer.origin.denied", subject=what.origin, detail=str(error)))
            self._origins.forget(what.origin)
            if len(self._denied) >= _MAX_DENIED:
                self._denied.clear()
            self._denied[bucket] = time.monotonic() + _DENIED_SECONDS
            return self._await_from_others(what, missing, exchange)
        except MillraceError as error:
            return _refusal_of(error)
        finally:
            _close_after(reader, futures)

    @staticmethod
    def _await(futures: Sequence[Future[dict[int, Buffer]]], exchange: Exchange) -> None:
        """Wait until all are there, and say meanwhile that this takes a while. Raises what the first that fails does."""
        while True:
            done, pending = wait(futures, _WAIT_SECONDS, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            if not pending:
                return
            exchange.processing()

    def _await_from_others(
        self, what: ObjectDescription, missing: Sequence[int], exchange: Exchange
    ) -> dict[int, Buffer] | Refusal:
        """Without access to the origin: the first asker is to bring the blocks; others wait for them for a moment."""
        refusal = Refusal(status=424, message=f"this node has no access to {what.origin}", code="denied")
        until = time.monotonic() + _WAIT_FOR_OTHERS_SECONDS
        while True:
            stored = self._objects.find(what.object_id())
            left = self._objects.missing(stored, missing, set(), verify=False, memory={})
            if not left:
                return {}
            if self._leases.take(what.object_id(), left):
                return Refusal(
                    status=refusal.status,
                    message=refusal.message,
                    code=refusal.code,
                    fields=(("Millrace-Lease", "1"),),
                )
            remaining = until - time.monotonic()
            if remaining <= 0:
                return refusal
            self._leases.wait(min(_WAIT_SECONDS, remaining))
            exchange.processing()

    def _open_reader(self, origin: Origin, what: ObjectDescription, source: MakeSource | None) -> ObjectReader:
        info = ObjectInfo(key=what.key, size=what.size, version=what.version, modified=0.0)
        return self._node.open_reader(origin, info, threads=CALLERS_THREAD, source=source)

    # --- who owns -----------------------------------------------------------------------------------

    def _placed(self) -> Placement:
        placement, view = self._placement, self._views.view()
        if view.version != placement.view.version:
            placement = self._placement = Placement(view, replicas=self._replicas)
        return placement

    def _not_mine(self) -> Refusal:
        version = self._placement.view.version
        return Refusal(status=421, message="another node owns this", fields=(("Millrace-View", version),))


class _Budget:
    """Bytes that may be on their way at a time. Thread-safe. Who asks for more than all gets it when nobody else has any."""

    def __init__(self, nbytes: int) -> None:
        self._all = nbytes
        self._left = nbytes
        self._changed = threading.Condition()

    def take(self, nbytes: int, seconds: float) -> bool:
        """Take some, waiting `seconds` for it; gives whether there were enough."""
        with self._changed:
            enough = self._changed.wait_for(lambda: self._left >= min(nbytes, self._all), seconds)
            self._left -= nbytes if enough else 0
            return enough

    def give_back(self, nbytes: int) -> None:
        with self._changed:
            self._left += nbytes
            self._changed.notify_all()


def _bring(reader: ObjectReader, blocks: list[int]) -> dict[int, Buffer]:
    """Fetch missing blocks; gives those that are not on the disk afterwards."""
    if isinstance(reader, BlockReader | SmallReader):
        fetched = reader.fetch(blocks)
        return {block: fetched[block] for block in reader.missing(blocks)}
    return {block: reader.read(*_span(block, reader.size)) for block in blocks}


def _close_after(reader: ObjectReader, futures: Sequence[Future[dict[int, Buffer]]]) -> None:
    """Begin none of the fetches any more, and close their reader after those under way: nobody waits for them.

    Closed before, its descriptor could be another file's when one of them takes it.
    """
    left, lock = len(futures), threading.Lock()

    def ended(_: Future[dict[int, Buffer]]) -> None:
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
    """What an asker hears of a fetch that failed."""
    if isinstance(error, ChangedError | UsageError):  # a range past the end: the object is shorter by now
        status = 409
    elif isinstance(error, MissingError):
        status = 410
    elif isinstance(error, StorageError):
        status = 503
    elif isinstance(error, RetryableError):
        status = 502
    else:
        _log.warning("a fetch for another node failed: %s", error)
        status = 502
    return Refusal(status=status, message=str(error), code=error.code)
