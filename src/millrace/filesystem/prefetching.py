"""`fs.prefetch`: fetch ahead of a reader whose order is known, within a bounded window.

Read-ahead covers one file. A shuffled epoch has a known order of thousands of files: a `Prefetch` walks through that order,
brings the next files into the cache, and keeps at most its window between itself and the reader.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from millrace.cache.filling import PIECE_BLOCKS, FetchedPiece, Fill
from millrace.config import parse_amount
from millrace.errors import MillraceError, UsageError, shown_key
from millrace.events import Event, emit
from millrace.filesystem.opens import open_hooks
from millrace.filesystem.scheduling import FetchScheduler, ObjectFetch
from millrace.origin import ObjectInfo
from millrace.runtime import forks
from millrace.runtime.failures import reason_of
from millrace.store.records import BLOCK_BYTES

if TYPE_CHECKING:
    from millrace.filesystem.listing import ListingFileSystem

_log = logging.getLogger("millrace.filesystem")

_FETCHES = 16  # concurrent requests: as many as the read-ahead of a node
_LOOKUPS = 8
_LOOKED_UP_AHEAD = 64  # paths beyond the window whose sizes are requested, if no listing has returned them
_STEPS_AHEAD = 100_000  # paths; bounds a window of empty or repeated files
_REMEMBERED = 100_000  # paths

OnError = Callable[[str, Exception], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchProgress:
    """The progress of a prefetch.

    `reached` paths were looked up; the reader has opened or passed `opened` of them. `ahead_bytes` are between the two,
    cached or in flight. `fetched_bytes` came from the origin; the cache had no room for `unkept_bytes` of them. `failed`
    paths could not be fetched and are left to the reader. `ended`: nothing is left to fetch.
    """

    reached: int = 0
    opened: int = 0
    ahead_bytes: int = 0
    fetched_bytes: int = 0
    unkept_bytes: int = 0
    failed: int = 0
    ended: bool = False


class _Step:
    """A place in the order that the prefetch has reached. The attributes change under the lock of the prefetch."""

    __slots__ = ("charged", "key", "number", "passed")

    def __init__(self, number: int, key: str) -> None:
        self.number = number
        self.key = key
        self.charged = 0
        self.passed = False


class _PrefetchedObject(ObjectFetch):
    """An object of a prefetch. The attributes change under the lock of the prefetch."""

    def __init__(self, fill: Fill, step: _Step, path: str) -> None:
        super().__init__(fill)
        self.step = step
        self.path = path
        self.failed = False


class Prefetch:
    """Fetches `paths` in their order, at most `window` bytes ahead of the reader, in its own threads.

    With `follow_opens`, the reader is any Millrace file system of this process: when it opens a path, that path and all
    before it count as passed. A reader in another process is followed with `advance(path)`. `paths` may be any iterable,
    also an infinite one; a thread consumes it as far as the window reaches. Bytes that are cached already count to the
    window and are not fetched again. A path that cannot be fetched is left to the reader; `on_error(path, error)` is called
    in one of the threads, with an empty path for an error of `paths` itself, which ends the prefetch. A full cache is not
    filled further.

    A context manager; `close` discards the queued fetches. Thread-safe. In a forked child it does nothing. It ends by itself
    after the last path. Raises `UsageError` or `ConfigurationError` for a wrong window.
    """

    def __init__(
        self,
        fs: ListingFileSystem,
        paths: Iterable[str],
        *,
        window: int | str,
        follow_opens: bool = True,
        on_error: OnError | None = None,
    ) -> None:
        amount = parse_amount(window, option="window")
        if amount.nbytes is None or amount.nbytes < BLOCK_BYTES:
            raise UsageError(
                f"window={window!r} is not a number of bytes, or is too small",
                next_step=f"give at least one block, {BLOCK_BYTES >> 20}MiB",
            )
        if isinstance(paths, str | bytes | os.PathLike):
            raise UsageError("paths is one path", next_step="give the list of paths in the order of reading")
        self._fs = fs
        self._origin = fs.origin
        self._paths = iter(paths)
        self._window = amount.nbytes
        self._on_error = on_error
        self._owner = forks.Owner()
        self._scheduler = FetchScheduler[_PrefetchedObject](
            "millrace-prefetch",
            threads=_FETCHES,
            feed=self._walk,
            daemon_feed=True,  # the caller's iterator may block without end
            on_piece=self._count_piece,
            on_object=lambda _: None,
            on_error=self._defect,
            on_idle=self._unfollow_if_ended,
        )
        self._lock, self._changed = self._scheduler.lock, self._scheduler.changed
        self._steps: deque[_Step] = deque()  # reached, and not passed by the reader
        self._by_key: dict[str, deque[_Step]] = {}
        self._passed: OrderedDict[str, int] = OrderedDict()  # where each path was passed last
        self._early: set[str] = set()  # opened before they were reached
        self._coming: Counter[str] = Counter()  # looked up, and not reached
        self._full = False
        self._is_held = False  # the window is full: only the reader can open it
        self._reached = self._opened = self._failed = 0
        self._ahead_bytes = self._fetched_bytes = self._unkept_bytes = 0
        self._lookups = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="millrace-prefetch-stat")
        self._unfollow: Callable[[], None] = lambda: None
        try:
            if follow_opens:
                self._unfollow = open_hooks.add(self._on_open)
            self._scheduler.start()
        except BaseException:  # without a thread, or after an interrupt, every open would still be reported to it
            self.close()
            raise

    # --- for the user -------------------------------------------------------------------------------

    @property
    def progress(self) -> PrefetchProgress:
        """The present progress."""
        if not self._owner.is_this_process:
            return PrefetchProgress(ended=True)
        with self._lock:
            return PrefetchProgress(
                reached=self._reached,
                opened=self._opened,
                ahead_bytes=self._ahead_bytes,
                fetched_bytes=self._fetched_bytes,
                unkept_bytes=self._unkept_bytes,
                failed=self._failed,
                ended=self._scheduler.has_ended,
            )

    def advance(self, path: str) -> None:
        """Move the window to `path`, as if it had been opened in this process. For a reader in another process."""
        if self._owner.is_this_process:
            self._pass(self._fs.key_of(path))

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing more can be fetched, at all or before the reader continues; False after the timeout."""
        if not self._owner.is_this_process:
            return True
        scheduler = self._scheduler
        with self._lock:
            return self._changed.wait_for(
                lambda: scheduler.has_ended or (self._is_held and not scheduler.is_busy), timeout_seconds
            )

    def close(self) -> None:
        """Fetch nothing more. Requests in progress end in the background. Idempotent."""
        if not self._owner.is_this_process:
            return
        self._unfollow()
        self._scheduler.stop()
        self._lookups.shutdown(wait=False, cancel_futures=True)
        self._scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the reader ---------------------------------------------------------------------------------

    def _on_open(self, origin_identity: str, key: str) -> None:
        if origin_identity == self._origin.identity:
            self._pass(key)

    def _pass(self, key: str) -> None:
        with self._lock:
            is_fed = self._scheduler.is_fed
            steps = self._by_key.get(key)
            if steps:
                if not self._opened_again(steps[0]):
                    self._release_through(steps[0])
            elif not is_fed and key not in self._passed and len(self._early) < _REMEMBERED:
                self._early.add(key)
                if key in self._coming and self._steps:  # the reader has skipped everything that was reached
                    self._release_through(self._steps[-1])
        if is_fed:
            self._unfollow_if_ended()

    def _opened_again(self, step: _Step) -> bool:
        """Whether an open of the path of `step` belongs to the previous occurrence of the path. Call with the lock held.

        A Parquet reader opens a file more than once, and an order of several epochs contains every path several times: the
        nearer of the two occurrences is chosen.
        """
        last = self._passed.get(step.key)
        return last is not None and self._opened - last <= step.number - self._opened

    def _release_through(self, step: _Step) -> None:
        """Count everything up to `step` as passed. Call with the lock held."""
        self._is_held = False
        while self._steps and self._steps[0].number <= step.number:
            passed = self._steps.popleft()
            same = self._by_key[passed.key]
            same.popleft()
            if not same:
                del self._by_key[passed.key]
            passed.passed = True
            self._passed[passed.key] = passed.number
            self._passed.move_to_end(passed.key)
            if len(self._passed) > _REMEMBERED:
                self._passed.popitem(last=False)
            self._ahead_bytes -= passed.charged
            self._opened += 1
        self._changed.notify_all()

    def _unfollow_if_ended(self) -> None:
        with self._lock:
            ended = self._scheduler.has_ended and not self._steps
        if ended:
            self._unfollow()

    # --- the thread that walks through the order ----------------------------------------------------

    def _walk(self) -> None:
        try:
            for path, response in self._looked_up():
                try:
                    info = response.result()
                except CancelledError:
                    break
                except MillraceError as error:
                    self._report(path, error)
                    continue
                if not self._take(path, info):
                    break
        finally:
            with self._lock:
                self._early.clear()
            self._lookups.shutdown(wait=False)

    def _looked_up(self) -> Iterator[tuple[str, Future[ObjectInfo]]]:
        """The paths and their lookups, which run a few paths ahead."""
        lookups: deque[tuple[str, Future[ObjectInfo]]] = deque()
        more = True
        while more or lookups:
            while more and len(lookups) < _LOOKED_UP_AHEAD:
                try:
                    path = next(self._paths)
                except StopIteration:
                    more = False
                    break
                try:
                    key = self._fs.key_of(path)
                except MillraceError as error:
                    self._report(path, error)
                    if self._scheduler.is_closed:
                        return
                    continue
                try:
                    lookups.append((path, self._lookups.submit(self._fs.describe, path)))
                except RuntimeError:  # closed in the meantime, or the interpreter is ending
                    return
                with self._lock:
                    self._coming[key] += 1
            if lookups:
                yield lookups.popleft()

    def _take(self, path: str, info: ObjectInfo) -> bool:
        """Fetch one object of the order as the window moves; returns False when the prefetch is closed."""
        step = self._reach(info)
        if step.passed:
            return True
        try:
            # A piece that is larger than the window would never be fetched.
            piece_blocks = min(PIECE_BLOCKS, self._window // BLOCK_BYTES)
            fill = Fill(self._fs.node, self._origin, info, piece_blocks=piece_blocks)
        except MillraceError as error:
            self._report(path, error)
            return True
        fetch = _PrefetchedObject(fill, step, path)
        try:
            cached_bytes = info.size - sum(map(fill.nbytes, fill.pieces))
            if self._wait_for_window(step, cached_bytes, cached=True):
                for piece in fill.pieces:
                    nbytes = fill.nbytes(piece)
                    if self._full and not fill.has_room(nbytes):
                        break
                    if not self._wait_for_window(step, nbytes, cached=False):
                        break
                    self._scheduler.fetch(fetch, piece)
        finally:
            self._scheduler.seal(fetch)
        return not self._scheduler.is_closed

    def _reach(self, info: ObjectInfo) -> _Step:
        with self._lock:
            self._hold_until(lambda: self._scheduler.is_closed or len(self._steps) < _STEPS_AHEAD)
            step = _Step(self._reached, info.key)
            self._coming -= Counter([info.key])
            self._reached += 1
            self._steps.append(step)
            self._by_key.setdefault(info.key, deque()).append(step)
            if info.key in self._early:
                self._early.remove(info.key)
                self._release_through(step)
            return step

    def _wait_for_window(self, step: _Step, nbytes: int, *, cached: bool) -> bool:
        """Wait until `nbytes` more fit into the window, and reserve them; returns False if they are not needed any more."""

        def fits() -> bool:
            # A cached object that is larger than the window is admitted when the window is empty.
            return self._ahead_bytes + nbytes <= self._window or (cached and not self._ahead_bytes)

        with self._lock:
            self._hold_until(lambda: self._scheduler.is_closed or step.passed or fits())
            if self._scheduler.is_closed or step.passed:
                return False
            self._ahead_bytes += nbytes
            step.charged += nbytes if cached else 0
            return True

    def _hold_until(self, may_continue: Callable[[], bool]) -> None:
        """Wait for the reader. Call with the lock held."""
        while not may_continue():
            self._is_held = True
            self._changed.notify_all()
            self._changed.wait()
        self._is_held = False

    # --- the threads that fetch ---------------------------------------------------------------------

    def _count_piece(
        self, fetch: _PrefetchedObject, piece: range, result: FetchedPiece | None, error: BaseException | None
    ) -> None:
        nbytes = fetch.fill.nbytes(piece)
        with self._lock:
            if result is not None:
                self._fetched_bytes += result.fetched_bytes
                self._unkept_bytes += 0 if result.kept else result.fetched_bytes
                self._full = self._full or not result.kept
            if result is None or fetch.step.passed:
                self._ahead_bytes -= nbytes
            else:
                fetch.step.charged += nbytes
            is_first_error = error is not None and not fetch.failed
            fetch.failed = fetch.failed or error is not None
            self._changed.notify_all()
        if is_first_error and isinstance(error, Exception):
            self._report(fetch.path, error)

    def _report(self, path: str, error: Exception) -> None:
        with self._lock:
            self._failed += 1
        shown = shown_key(str(path))  # which may be of any type
        emit(Event(name="prefetch.failed", subject=shown, detail=reason_of(error)))
        if self._on_error is not None:
            try:
                self._on_error(path, error)
            except BaseException:  # noqa: BLE001 - an error of the caller, of any kind, must not end the prefetch
                _log.exception("on_error of a prefetch failed on %s", shown)

    def _defect(self, error: BaseException) -> None:
        # The caller's iterator may raise anything, and there is no other way to report it.
        if not isinstance(error, Exception):  # must not end the caller
            ended = UsageError(f"the paths of a prefetch raised {error!r}", next_step="end them with StopIteration")
            ended.__cause__ = error
            error = ended
        if threading.main_thread().is_alive():
            self._report("", error)
