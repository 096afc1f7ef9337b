"""`fs.load`: bring objects into this node's cache before anybody reads them.

What is here already is skipped, which is all that resuming takes: the cache itself remembers. Many objects are loaded at
once, and several pieces of one, each with a request of its own. In a cluster every node does this with its share of what is
asked for (`load_jobs.py`).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from millrace.cache.filling import Fill
from millrace.errors import (
    DiskFullError,
    MillraceError,
    ObjectChangedError,
    ObjectNotFoundError,
)
from millrace.figures import size_text
from millrace.filesystem.selection import select
from millrace.origin import ObjectInfo

if TYPE_CHECKING:
    from millrace.filesystem.listing import ListingFileSystem

THREADS = 32
"""Requests at a time. With pieces of 8 MiB they hold up to 256 MiB of memory."""

_LOOKUPS = 16
_LISTED_AHEAD = 100_000  # objects: what bounds the memory of a listing
_REPORT_SECONDS = 0.5
_GRACE_SECONDS = 1.0  # for requests under way, when somebody interrupts
_RATE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """How far a load has come, in objects and bytes.

    `objects` and `nbytes` are what was asked for, as far as it is listed (`listed`: to the end). `done_objects` are wholly
    here; `done_bytes` are here, of which `fetched_bytes` came from the origin just now. `bad_blocks` failed their check and
    were fetched again. `missing_objects` were gone from the origin when their turn came. `left_objects` did not fit.
    `bytes_per_second` is the speed of the last seconds, in bytes from the origin. `nodes` take part.
    """

    objects: int = 0
    nbytes: int = 0
    listed: bool = False
    done_objects: int = 0
    done_bytes: int = 0
    fetched_bytes: int = 0
    bad_blocks: int = 0
    missing_objects: int = 0
    left_objects: int = 0
    seconds: float = 0.0
    bytes_per_second: float = 0.0
    nodes: int = 1

    @property
    def seconds_left(self) -> float | None:
        """How long it still takes at this speed; None while that cannot be told."""
        left = self.nbytes - self.done_bytes
        if not self.listed or (left and not self.bytes_per_second):
            return None
        return left / self.bytes_per_second if left else 0.0


Spans = Sequence[tuple[int, int]]
"""Byte ranges of an object, in order."""

Share = Callable[[ObjectInfo], Spans]
"""Gives what of an object is to be loaded here, in whole blocks; nothing of it where that is empty.

An empty object has the span (0, 0). An object counts where its first byte is loaded.
"""


def everything(info: ObjectInfo) -> Spans:
    """The `Share` of a node alone."""
    return ((0, info.size),)


def load(
    fs: ListingFileSystem,
    urls: str | Iterable[str],
    *,
    progress: Callable[[LoadProgress], None] | None = None,
    verify: bool = False,
    share: Share = everything,
) -> LoadProgress:
    """Bring everything that `urls` name into the cache of this node; returns when it is here. See `CacheManagement.load`.

    With `share`, only what it gives. `progress` may end the load by raising.
    """
    chosen = [urls] if isinstance(urls, str) else list(urls)
    return _Load(fs, chosen, verify=verify, progress=progress or (lambda _: None), share=share).run()


class _Load:
    """One call of `load`: a thread that lists, threads that fetch, and the caller's, which waits and reports."""

    def __init__(
        self,
        fs: ListingFileSystem,
        urls: list[str],
        *,
        verify: bool,
        progress: Callable[[LoadProgress], None],
        share: Share,
    ) -> None:
        self._fs = fs
        self._node = fs.node
        self._urls = urls
        self._verify = verify
        self._report = progress
        self._share = share
        self._change = threading.Condition()
        self._objects: deque[ObjectInfo] = deque()
        self._pieces: deque[tuple[_Job, range]] = deque()
        self._working = 0
        self._stopping = False
        self._error: Exception | None = None
        self._first_missing = ""
        self._full: set[str] = set()  # directories of disks that take no more
        self._listed = False
        self._counts: Counter[str] = Counter()  # the other numbers of `LoadProgress`, by name
        self._started = time.monotonic()
        self._samples: deque[tuple[float, int]] = deque([(self._started, 0)])

    def run(self) -> LoadProgress:
        # Not daemons: at the interpreter's end they would be cut off inside a library.
        threads = [threading.Thread(target=self._list, name="millrace-load-list")]
        threads += [threading.Thread(target=self._work, name=f"millrace-load-{number}") for number in range(THREADS)]
        try:
            for thread in threads:
                thread.start()
            while not self._finished():
                self._report(self._progress())
            for thread in threads:
                thread.join()
        finally:
            with self._change:
                self._stopping = True
                self._change.notify_all()
            deadline = time.monotonic() + _GRACE_SECONDS
            for thread in threads:
                if thread.ident is not None:
                    thread.join(max(0.0, deadline - time.monotonic()))
            state = self._progress()
            self._report(state)
        if isinstance(self._error, MillraceError):
            raise with_progress(self._error, state) from self._error
        if self._error is not None:
            raise self._error
        return complete(state, first_missing=self._first_missing)

    def _finished(self) -> bool:
        """Wait a moment; whether nothing is left to do."""
        with self._change:
            return self._change.wait_for(lambda: self._stopping or self._idle(), _REPORT_SECONDS)

    def _idle(self) -> bool:
        return self._listed and not (self._objects or self._pieces or self._working)

    def _progress(self) -> LoadProgress:
        now = time.monotonic()
        with self._change:
            state = LoadProgress(listed=self._listed, seconds=now - self._started, **self._counts)
        self._samples.append((now, state.fetched_bytes))
        while len(self._samples) > 2 and now - self._samples[0][0] > _RATE_SECONDS:
            self._samples.popleft()
        (then, before), (now, after) = self._samples[0], self._samples[-1]
        return replace(state, bytes_per_second=(after - before) / (now - then) if now > then else 0.0)

    # --- the listing thread -----------------------------------------------------------------------

    def _list(self) -> None:
        try:
            for info in self._selected():
                with self._change:
                    self._change.wait_for(lambda: self._stopping or len(self._objects) < _LISTED_AHEAD)
                    if self._stopping:
                        return
                    if spans := self._share(info):
                        self._objects.append(info)
                        self._add(objects=_counts(spans), nbytes=_nbytes(spans))
                        self._change.notify()
            with self._change:
                self._listed = True
        except Exception as error:  # noqa: BLE001 - as below
            self._fail(error)
        finally:
            with self._change:
                self._change.notify_all()

    def _selected(self) -> Iterator[ObjectInfo]:
        """Everything to load, each object once."""
        with ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="millrace-load-look") as pool:
            # Wholly, before anything is fetched: what is missing is an error at once.
            selections = list(pool.map(self._select, self._urls))
        seen: set[bytes] = set()
        for info in chain.from_iterable(selections):
            if len(selections) > 1:  # two of them may name the same object
                # 16 bytes instead of a key of up to 1,024, of a million objects; no two keys share them.
                name = hashlib.blake2b(info.key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
                if name in seen:
                    continue
                seen.add(name)
            yield info

    def _select(self, url: str) -> Iterator[ObjectInfo]:
        return iter(()) if self._stopping else select(self._fs, url)

    # --- the working threads ----------------------------------------------------------------------

    def _work(self) -> None:
        while (step := self._next()) is not None:
            try:
                step()
            except Exception as error:  # noqa: BLE001 - of whatever kind, the caller raises it
                self._fail(error)
            finally:
                with self._change:
                    self._working -= 1
                    if self._stopping or self._idle():
                        self._change.notify_all()

    def _next(self) -> Callable[[], None] | None:
        """What to do next; None when nothing is left. What was begun comes first."""
        with self._change:
            self._change.wait_for(lambda: self._stopping or self._pieces or self._objects or self._idle())
            if self._stopping or not (self._pieces or self._objects):
                return None
            self._working += 1
            if self._pieces:
                return partial(self._fetch, *self._pieces.popleft())
            if len(self._objects) == _LISTED_AHEAD:
                self._change.notify_all()  # the listing waits
            return partial(self._begin, self._objects.popleft())

    def _begin(self, info: ObjectInfo, spans: Spans | None = None, *, is_retry: bool = False) -> None:
        spans = spans or self._share(info)
        job = _Job(
            Fill(self._node, self._fs._origin, info, verify=self._verify, spans=spans), spans=spans, is_retry=is_retry
        )
        first, *others = job.fill.pieces or [range(0)]
        with self._change:
            self._count(job, job.nbytes - sum(map(job.fill.nbytes, job.fill.pieces)))
            self._pieces.extend((job, piece) for piece in others)
            self._change.notify(len(others))
        self._fetch(job, first)

    def _fetch(self, job: _Job, piece: range) -> None:
        try:
            if not (job.replaced or job.fill.directory in self._full or not piece):
                self._fetch_piece(job, piece)
        except (ObjectChangedError, ObjectNotFoundError) as error:
            job.replaced = error
        finally:
            with self._change:
                job.pieces_left -= 1
                ended = job.pieces_left <= 0
        if ended:
            job.fill.close()
            self._end(job)

    def _fetch_piece(self, job: _Job, piece: range) -> None:
        done = job.fill.fetch(piece)
        # Somebody may also have freed the object meanwhile: then only this one is left out.
        has_room = done.kept or job.fill.has_room(job.fill.nbytes(piece))
        with self._change:
            self._add(fetched_bytes=done.fetched_bytes, bad_blocks=done.bad_blocks)
            if done.kept:
                self._count(job, job.fill.nbytes(piece))
            elif not has_room:
                self._full.add(job.fill.directory)

    def _end(self, job: _Job) -> None:
        info = job.fill.info
        if job.replaced is None:
            with self._change:
                if job.done_bytes == job.nbytes:
                    self._add(done_objects=_counts(job.spans))
                else:
                    self._add(left_objects=1)
            return
        # Another version has come, or none is left: what was counted for the old one does not count.
        self._fs.invalidate_cache(info.key)
        try:
            now = None if job.is_retry else self._fs.describe(info.key)
        except ObjectNotFoundError:
            now = None
        # As another version it may be another node's, who does not know of it: it is loaded where it was noticed.
        spans = (self._share(now) or everything(now)) if now else ()
        with self._change:
            self._add(objects=_counts(spans) - _counts(job.spans) if now else 0, nbytes=_nbytes(spans) - job.nbytes)
            self._count(job, -job.done_bytes)
            if now is None:
                self._add(missing_objects=1)
                self._first_missing = self._first_missing or self._fs.unstrip_protocol(info.key)
        if now is not None:
            self._begin(now, spans, is_retry=True)

    def _fail(self, error: Exception) -> None:
        with self._change:
            self._error = self._error or error
            self._stopping = True
            self._change.notify_all()

    def _count(self, job: _Job, nbytes: int) -> None:
        job.done_bytes += nbytes
        self._add(done_bytes=nbytes)

    def _add(self, **amounts: int) -> None:
        """Add to numbers of the progress. Under the lock."""
        for name, amount in amounts.items():
            self._counts[name] += amount


class _Job:
    """An object under way. Its fields change under the lock of its load."""

    def __init__(self, fill: Fill, *, spans: Spans, is_retry: bool) -> None:
        self.fill = fill
        self.spans = spans
        self.nbytes = _nbytes(spans)
        self.is_retry = is_retry
        self.pieces_left = len(fill.pieces)
        self.done_bytes = 0
        self.replaced: MillraceError | None = None


def _counts(spans: Spans) -> int:
    """1 where an object with these spans is counted."""
    return int(bool(spans) and spans[0][0] == 0)


def _nbytes(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)


def complete(state: LoadProgress, *, first_missing: str) -> LoadProgress:
    """The state of a load that has come to its end. Raises where not everything is in the cache."""
    if state.left_objects:
        raise DiskFullError(
            f"the cache is full: {state.done_objects} of {state.objects} objects, {size_text(state.done_bytes)} of "
            f"{size_text(state.nbytes)}, are in it",
            next_step="enlarge it with 'millrace resize', free something with 'millrace free', or load less",
        )
    if state.missing_objects:
        raise ObjectNotFoundError(
            f"{state.missing_objects} of {state.objects} objects have gone since they were listed, the first is "
            f"{first_missing}; the others are in the cache",
            next_step="load again what you need",
        )
    return state


def with_progress(error: MillraceError, state: LoadProgress) -> MillraceError:
    """The error that ended a load, saying what was achieved until then."""
    if not state.objects:
        return type(error)(error.message, next_step=error.next_step)
    total = f"{state.objects}{'' if state.listed else ' or more'}"
    return type(error)(
        f"{error.message}; {state.done_objects} of {total} objects are in the cache",
        next_step=f"{error.next_step or 'see to it'}, then load again to go on with the rest",
    )
