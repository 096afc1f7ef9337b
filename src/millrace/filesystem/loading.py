"""`fs.load`: bring objects into this node's cache before they are read.

Cached blocks are skipped, so an interrupted load resumes when it is called again. Many objects are fetched at the same time,
and several pieces of each, with one request per piece. In a cluster every node loads its share in this way, see
`cluster_loading.py`.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

from fsspec.utils import glob_translate

from millrace.cache.filling import FetchedPiece, Fill
from millrace.cache.node import store_directory
from millrace.errors import DiskFullError, MillraceError, ObjectChangedError, ObjectNotFoundError
from millrace.figures import size_text
from millrace.filesystem.opens import is_pattern
from millrace.filesystem.scheduling import FetchScheduler, ObjectFetch
from millrace.origin import ObjectInfo
from millrace.origin.side_by_side import side_by_side

if TYPE_CHECKING:
    from millrace.filesystem.listing import ListingFileSystem

THREADS = 32
"""Concurrent requests. With pieces of 8 MiB they hold up to 256 MiB of memory."""

_LOOKUPS = 16
_REPORT_SECONDS = 0.5
_RATE_SECONDS = 5.0
_WILDCARD = re.compile(r"[*?[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """The progress of a load, in objects and bytes.

    `objects` and `nbytes` were requested, as far as they are listed (`listed`: completely). `done_objects` are completely
    cached; `done_bytes` are cached, of which `fetched_bytes` came from the origin during this load. `bad_blocks` failed
    verification and were fetched again. `missing_objects` were deleted at the origin after they were listed. `left_objects`
    did not fit. `bytes_per_second` is the rate from the origin during the last seconds. `nodes` take part.
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
        """The estimated remaining time; None while it is unknown."""
        left = self.nbytes - self.done_bytes
        if not self.listed or (left and not self.bytes_per_second):
            return None
        return left / self.bytes_per_second if left else 0.0


class Rate:
    """The rate at which a total grows, averaged over the last five seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def after(self, total: int) -> float:
        """Record the present total; returns the increase per second."""
        now = time.monotonic()
        self._samples.append((now, total))
        while len(self._samples) > 2 and now - self._samples[0][0] > _RATE_SECONDS:
            self._samples.popleft()
        then, before = self._samples[0]
        return max(0.0, (total - before) / (now - then)) if now > then else 0.0


Spans = Sequence[tuple[int, int]]
"""Byte ranges of an object, in order."""

Share = Callable[[ObjectInfo], Spans]
"""Returns the spans of an object to load on this node, in whole blocks; none if the list is empty.

An empty object has the span (0, 0). An object is counted by the node that loads its first byte.
"""


def everything(info: ObjectInfo) -> Spans:
    """The `Share` of a node that loads alone."""
    return ((0, info.size),)


def select(fs: ListingFileSystem, url: str) -> Iterator[ObjectInfo]:
    """Every object that `url` names, in the order of the listing.

    `url` is an object; or a prefix, which means everything below it as a directory (with a slash at the end it is never an
    object); or a pattern with `*`, `?`, `[...]` inside a name and `**` across several. Raises `ObjectNotFoundError` at once
    if nothing matches. Listings are read page by page, so a selection of any length needs little memory.
    """
    key = fs.key_of(url)
    if not url.endswith("/"):
        try:
            return iter([fs.describe(key)])
        except ObjectNotFoundError:
            pass  # a prefix or a pattern
    has_wildcards = is_pattern(key, fs.origin.identity)
    found = _matching(fs, key) if has_wildcards else _below(fs, key)
    first = next(found, None)
    if first is None:
        problem = "matches nothing" if has_wildcards else "does not exist, neither as an object nor as a prefix"
        raise ObjectNotFoundError(f"{fs.unstrip_protocol(key)} {problem}", next_step="check the name and the endpoint")
    return chain([first], found)


def _below(fs: ListingFileSystem, key: str) -> Iterator[ObjectInfo]:
    found = (info for page in fs.list_all(key) for info in page if not info.key.endswith("/"))
    if fs.origin.identity != "file":
        return found
    own = tuple(os.path.join(store_directory(path, ""), "") for path in fs.node.options.cache_dirs)

    @lru_cache(16)
    def is_of_cache(folder: str) -> bool:
        return os.path.join(os.path.realpath(folder), "").startswith(own)

    # A load of a directory above the cache must not copy the cache into itself.
    return (info for info in found if not is_of_cache(os.path.dirname(info.key)))


def _matching(fs: ListingFileSystem, pattern: str) -> Iterator[ObjectInfo]:
    matches = re.compile(glob_translate(pattern)).match
    return (info for info in _below(fs, pattern_root(pattern)) if matches(info.key))


def pattern_root(pattern: str) -> str:
    """The directory that contains everything that a pattern can match."""
    wildcard = _WILDCARD.search(pattern)
    return pattern[: wildcard.start() if wildcard else None].rpartition("/")[0]


def load(
    fs: ListingFileSystem,
    urls: str | Iterable[str],
    *,
    progress: Callable[[LoadProgress], None] | None = None,
    verify: bool = False,
    share: Share = everything,
) -> LoadProgress:
    """Load everything that `urls` name into the cache of this node; returns when it is cached. See `CacheManagement.load`.

    With `share`, only the spans that it returns. `progress` may end the load by raising.
    """
    chosen = [urls] if isinstance(urls, str) else list(urls)
    return _Load(fs, chosen, verify=verify, progress=progress or (lambda _: None), share=share).run()


class _LoadedObject(ObjectFetch):
    """An object of a load. The attributes change under the lock of the scheduler."""

    def __init__(self, fill: Fill, *, spans: Spans, is_retry: bool, full: set[str]) -> None:
        super().__init__(fill)
        self.spans = spans
        self.nbytes = _nbytes(spans)
        self.is_retry = is_retry
        self.done_bytes = 0
        self.replaced: BaseException | None = None
        self._full = full

    def is_wanted(self) -> bool:
        return self.replaced is None and self.fill.directory not in self._full


class _Load:
    """One call of `load`. The scheduler lists and fetches in its threads; the caller's thread waits and reports."""

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
        self._urls = urls
        self._verify = verify
        self._report = progress
        self._share = share
        self._scheduler = FetchScheduler[_LoadedObject](
            "millrace-load",
            threads=THREADS,
            feed=self._list,
            on_piece=self._count_piece,
            on_object=self._end_object,
            on_error=self._fail,
        )
        self._lock, self._changed = self._scheduler.lock, self._scheduler.changed
        self._error: Exception | None = None
        self._first_missing = ""
        self._full: set[str] = set()  # directories of full disks
        self._listed = False
        self._counts: Counter[str] = Counter()  # the other numbers of `LoadProgress`, by name
        self._started = time.monotonic()
        self._rate = Rate()

    def run(self) -> LoadProgress:
        scheduler = self._scheduler
        try:
            scheduler.start()
            while not self._wait():
                self._report(self._progress())
        finally:
            scheduler.close(wait_for_tasks=True)
            state = self._progress()
            self._report(state)
        if isinstance(self._error, MillraceError):
            raise with_progress(self._error, state) from self._error
        if self._error is not None:
            raise self._error
        return complete(state, first_missing=self._first_missing)

    def _wait(self) -> bool:
        """Wait until the next report; returns whether the load has ended."""
        with self._lock:
            return self._changed.wait_for(lambda: self._scheduler.has_ended, _REPORT_SECONDS)

    def _progress(self) -> LoadProgress:
        with self._lock:
            state = LoadProgress(listed=self._listed, seconds=time.monotonic() - self._started, **self._counts)
        return replace(state, bytes_per_second=self._rate.after(state.fetched_bytes))

    # --- listing ------------------------------------------------------------------------------------

    def _list(self) -> None:
        scheduler = self._scheduler
        for info in self._selected():
            with self._lock:
                self._changed.wait_for(lambda: scheduler.is_closed or scheduler.has_room)
                if scheduler.is_closed:
                    return
                if spans := self._share(info):
                    scheduler.add(self._begin, info)
                    self._add(objects=_counts(spans), nbytes=_nbytes(spans))
        with self._lock:
            self._listed = True

    def _selected(self) -> Iterator[ObjectInfo]:
        """Everything to load, each object once."""
        # All of them before anything is fetched: a missing name is an error at once.
        selections = side_by_side(self._select, self._urls, _LOOKUPS, "millrace-load-look")
        seen: set[bytes] = set()
        for info in chain.from_iterable(selections):
            if len(selections) > 1:  # two of them may name the same object
                # 16 bytes instead of a key of up to 1,024, for each of a million objects; no two keys share them.
                name = hashlib.blake2b(info.key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
                if name in seen:
                    continue
                seen.add(name)
            yield info

    def _select(self, url: str) -> Iterator[ObjectInfo]:
        return iter(()) if self._scheduler.is_closed else select(self._fs, url)

    # --- fetching -----------------------------------------------------------------------------------

    def _begin(self, info: ObjectInfo, spans: Spans | None = None, *, is_retry: bool = False) -> None:
        scheduler = self._scheduler
        if scheduler.is_closed:
            return
        spans = spans or self._share(info)
        fill = Fill(self._fs.node, self._fs.origin, info, verify=self._verify, spans=spans)
        loaded = _LoadedObject(fill, spans=spans, is_retry=is_retry, full=self._full)
        try:
            with self._lock:
                self._count(loaded, loaded.nbytes - sum(map(fill.nbytes, fill.pieces)))
                for piece in reversed(fill.pieces[1:]):
                    scheduler.fetch(loaded, piece, first=True)  # finish this object before the next
            if fill.pieces:
                scheduler.fetch_now(loaded, fill.pieces[0])
        finally:
            scheduler.seal(loaded)

    def _count_piece(
        self, loaded: _LoadedObject, piece: range, result: FetchedPiece | None, error: BaseException | None
    ) -> None:
        if isinstance(error, ObjectChangedError | ObjectNotFoundError):
            loaded.replaced = error
        elif error is not None:
            self._fail(error)
        if result is None:
            return
        # If another process has freed the object in the meantime, only this object is left out.
        has_room = result.kept or loaded.fill.has_room(loaded.fill.nbytes(piece))
        with self._lock:
            self._add(fetched_bytes=result.fetched_bytes, bad_blocks=result.bad_blocks)
            if result.kept:
                self._count(loaded, loaded.fill.nbytes(piece))
            elif not has_room:
                self._full.add(loaded.fill.directory)

    def _end_object(self, loaded: _LoadedObject) -> None:
        if loaded.replaced is not None:
            if not self._scheduler.is_closed:
                self._load_again(loaded)
            return
        with self._lock:
            if loaded.done_bytes == loaded.nbytes:
                self._add(done_objects=_counts(loaded.spans))
            elif not self._scheduler.is_closed:
                self._add(left_objects=1)

    def _load_again(self, loaded: _LoadedObject) -> None:
        """Load the new version of an object, once. The counts of the old version are taken back."""
        info = loaded.fill.info
        self._fs.invalidate_cache(info.key)
        try:
            now = None if loaded.is_retry else self._fs.describe(info.key)
        except ObjectNotFoundError:
            now = None
        # The new version may belong to another node, which has not listed it: the node that noticed the change loads it.
        spans = (self._share(now) or everything(now)) if now else ()
        with self._lock:
            objects = _counts(spans) - _counts(loaded.spans) if now else 0
            self._add(objects=objects, nbytes=_nbytes(spans) - loaded.nbytes)
            self._count(loaded, -loaded.done_bytes)
            if now is None:
                self._add(missing_objects=1)
                self._first_missing = self._first_missing or self._fs.unstrip_protocol(info.key)
        if now is not None:
            self._begin(now, spans, is_retry=True)

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, Exception):  # the caller must not end as if it had been interrupted itself
            defect = MillraceError(f"a defect: {type(error).__name__}: {error}", next_step="please report it")
            defect.__cause__ = error
            error = defect
        with self._lock:
            self._error = self._error or error
        self._scheduler.stop()

    def _count(self, loaded: _LoadedObject, nbytes: int) -> None:
        loaded.done_bytes += nbytes
        self._add(done_bytes=nbytes)

    def _add(self, **amounts: int) -> None:
        """Add to numbers of the progress. Call with the lock held."""
        for name, amount in amounts.items():
            self._counts[name] += amount


def _counts(spans: Spans) -> int:
    """1 if an object with these spans is counted on this node, else 0."""
    return int(bool(spans) and spans[0][0] == 0)


def _nbytes(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)


def complete(state: LoadProgress, *, first_missing: str) -> LoadProgress:
    """Returns the state of a load that has ended. Raises if not everything is in the cache."""
    if state.left_objects:
        raise DiskFullError(
            f"the cache or a quota in it is full: {state.done_objects} of {state.objects} objects, "
            f"{size_text(state.done_bytes)} of {size_text(state.nbytes)}, were loaded",
            next_step="enlarge it with 'millrace resize' or 'millrace limit', free something with 'millrace free', "
            "or load less",
        )
    if state.missing_objects:
        raise ObjectNotFoundError(
            f"{state.missing_objects} of {state.objects} objects were deleted after they were listed, the first is "
            f"{first_missing}; the others are in the cache",
            next_step="load the objects that you need again",
        )
    return state


def with_progress(error: MillraceError, state: LoadProgress) -> MillraceError:
    """The error that ended a load, with the progress of the load in its message."""
    if not state.objects:
        return type(error)(error.message, next_step=error.next_step)
    total = f"{state.objects}{'' if state.listed else ' or more'}"
    return type(error)(
        f"{error.message}; {state.done_objects} of {total} objects are in the cache",
        next_step=f"{error.next_step or 'correct the cause'}, then load again to continue with the rest",
    )
