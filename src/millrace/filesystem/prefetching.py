"""`fs.prefetch`: fetch ahead of a reader whose coming order is known, within a bounded window.

Read-ahead knows one file; who shuffles an epoch's shards knows the next thousand. A `Prefetch` walks through that order,
brings the next files into the cache, and never holds more than its window between itself and the reader.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

from millrace.cache.blocks import BLOCK_BYTES
from millrace.cache.filling import FetchedPiece, Fill
from millrace.config import parse_amount
from millrace.errors import MillraceError, UsageError
from millrace.events import Event, emit
from millrace.filesystem import opens
from millrace.origin import ObjectInfo

if TYPE_CHECKING:
    from millrace.filesystem.listing import ListingFileSystem

_FETCHES = 16  # requests at a time: as many as a node reads ahead with
_LOOKUPS = 8
_LOOKED_UP_AHEAD = 64  # paths whose sizes are asked for beyond the window, where listings have not told them
_STEPS_AHEAD = 100_000  # paths; what bounds a window of empty or repeated files
_REMEMBERED = 100_000  # paths
_GRACE_SECONDS = 1.0

OnError = Callable[[str, Exception], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchProgress:
    """How far a prefetch has come.

    `reached` paths were looked at, `opened` of them the reader has opened or passed. `ahead_bytes` lie between the two, here
    or on their way. `fetched_bytes` came from the origin; `unkept_bytes` of them found no room in the cache. `failed` paths
    could not be fetched, and are left to the reader. `ended`: nothing is left to fetch.
    """

    reached: int = 0
    opened: int = 0
    ahead_bytes: int = 0
    fetched_bytes: int = 0
    unkept_bytes: int = 0
    failed: int = 0
    ended: bool = False


class Prefetch:
    """Fetches `paths` in their order, at most `window` bytes ahead of the reader, in threads of its own.

    The reader is whoever opens the paths through any Millrace file system in this process (with `follow_opens`); opening one
    counts all before it as passed. A reader in another process is followed by `advance(path)`. `paths` may be any iterable,
    also an endless one: it is consumed in a thread, as far as the window reaches. What is in the cache already counts to
    the window, and is not fetched again. A path that cannot be fetched is left to the reader; `on_error(path, error)` hears
    of it, in one of the threads, and must not raise. A full cache is not filled further.

    A context manager; `close` gives up what was not begun. Thread-safe. In a forked child it does nothing. It ends by itself
    after the last path.
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
                f"window={window!r} is too small, or no number of bytes",
                next_step=f"give at least a block, {BLOCK_BYTES >> 20}MiB",
            )
        if isinstance(paths, str):
            raise UsageError("paths is one path", next_step="give the list of paths in the order of reading")
        self._fs = fs
        self._origin = fs._origin
        self._node = fs.node
        self._paths = iter(paths)
        self._window = amount.nbytes
        self._on_error = on_error
        self._pid = os.getpid()
        self._change = threading.Condition()
        self._steps: deque[_Step] = deque()  # reached, and not passed by the reader
        self._by_key: dict[str, deque[_Step]] = {}
        self._passed: OrderedDict[str, int] = OrderedDict()  # where each path was passed last
        self._early: set[str] = set()  # opened before they were reached
        self._coming: Counter[str] = Counter()  # the next ones, looked up already
        self._closed = False
        self._full = False
        self._stuck = False  # the walker waits for the reader, and nothing is on its way
        self._reached = self._opened = self._failed = 0
        self._ahead_bytes = self._fetched_bytes = self._unkept_bytes = 0
        self._pending = 0
        self._walked = False
        self._fetches = ThreadPoolExecutor(_FETCHES, thread_name_prefix="millrace-prefetch")
        self._lookups = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="millrace-prefetch-stat")
        self._walker = threading.Thread(target=self._walk, name="millrace-prefetch-order", daemon=True)
        if follow_opens:
            opens.listen(self._heard)
        self._walker.start()

    # --- for the user -----------------------------------------------------------------------------

    @property
    def progress(self) -> PrefetchProgress:
        """How far it has come."""
        if self._pid != os.getpid():
            return PrefetchProgress(ended=True)
        with self._change:
            return PrefetchProgress(
                reached=self._reached,
                opened=self._opened,
                ahead_bytes=self._ahead_bytes,
                fetched_bytes=self._fetched_bytes,
                unkept_bytes=self._unkept_bytes,
                failed=self._failed,
                ended=self._ended(),
            )

    def advance(self, path: str) -> None:
        """The reader, wherever it is, has come to `path`: go on as if it had been opened here."""
        if self._pid == os.getpid():
            self._pass(self._fs.key_of(path))

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing more can be fetched before the reader goes on, or at all; False when the time is over."""
        if self._pid != os.getpid():
            return True
        with self._change:
            return self._change.wait_for(lambda: self._closed or self._stuck or self._ended(), timeout_seconds)

    def close(self) -> None:
        """Fetch nothing more. Requests under way come to their end in the background. Idempotent."""
        if self._pid != os.getpid():
            return
        with self._change:
            self._closed = True
            self._change.notify_all()
        opens.unlisten(self._heard)
        self._lookups.shutdown(wait=False, cancel_futures=True)
        self._fetches.shutdown(wait=False, cancel_futures=True)
        if threading.current_thread() is not self._walker:
            self._walker.join(_GRACE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the reader's side ------------------------------------------------------------------------

    def _heard(self, origin_identity: str, key: str) -> None:
        if origin_identity == self._origin.identity:
            self._pass(key)

    def _pass(self, key: str) -> None:
        with self._change:
            steps = self._by_key.get(key)
            if steps:
                if not self._opened_again(steps[0]):
                    self._release_through(steps[0])
                    self._change.notify_all()
            elif not self._walked and key not in self._passed and len(self._early) < _REMEMBERED:
                self._early.add(key)
                if key in self._coming and self._steps:  # the reader has left out all that was reached
                    self._release_through(self._steps[-1])
                    self._change.notify_all()
        if self._walked:
            self._end_if_done()

    def _opened_again(self, step: _Step) -> bool:
        """Whether an open of the path of `step` rather belongs to the last time that it came up. Under the lock.

        Who reads a Parquet file opens it more than once, and an order of several epochs has every path several times: the
        nearer of the two places is meant.
        """
        last = self._passed.get(step.key)
        return last is not None and self._opened - last <= step.number - self._opened

    def _release_through(self, step: _Step) -> None:
        """Count everything up to `step` as passed. Under the lock."""
        self._stuck = False
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

    # --- the thread that walks through the order --------------------------------------------------

    def _walk(self) -> None:
        try:
            for path, answer in self._looked_up():
                try:
                    info = answer.result()
                except CancelledError:
                    break
                except MillraceError as error:
                    self._tell(path, error)
                    continue
                if not self._take(path, info):
                    break
        except Exception as error:  # noqa: BLE001 - the caller's iterator may raise anything, and has no other way out
            self._tell("", error)
        finally:
            with self._change:
                self._walked = True
                self._early.clear()
                self._change.notify_all()
            self._lookups.shutdown(wait=False)
            self._end_if_done()

    def _looked_up(self) -> Iterator[tuple[str, Future[ObjectInfo]]]:
        """The paths with what they name, asked for a few ahead."""
        asked: deque[tuple[str, Future[ObjectInfo]]] = deque()
        more = True
        while more or asked:
            while more and len(asked) < _LOOKED_UP_AHEAD:
                path = next(self._paths, None)
                more = path is not None
                if path is not None:
                    try:
                        asked.append((path, self._lookups.submit(self._fs.describe, path)))
                    except RuntimeError:  # closed meanwhile, or the interpreter is ending
                        return
                    with self._change:
                        self._coming[self._fs.key_of(path)] += 1
            if asked:
                yield asked.popleft()

    def _take(self, path: str, info: ObjectInfo) -> bool:
        """Fetch one object of the order as the window opens; False when all is over."""
        step = self._reach(info)
        if step.passed:
            return True
        try:
            fill = Fill(self._node, self._origin, info)
        except MillraceError as error:
            self._tell(path, error)
            return True
        job = _Job(step, fill, path)
        try:
            if not self._make_way(step, info.size - sum(map(fill.nbytes, fill.pieces)), pending=False):
                return not self._closed
            for piece in fill.pieces:
                nbytes = fill.nbytes(piece)
                if self._full and not fill.has_room(nbytes):
                    return True
                if not self._make_way(step, nbytes, pending=True):
                    return not self._closed
                job.pieces_left += 1
                try:
                    future = self._fetches.submit(self._fetch, fill, piece)
                except RuntimeError:  # as above
                    self._landed(job, nbytes, None)
                    return False
                future.add_done_callback(partial(self._landed, job, nbytes))
        finally:
            self._landed(job, 0, None)
        return True

    def _reach(self, info: ObjectInfo) -> _Step:
        with self._change:
            self._change.wait_for(lambda: self._closed or len(self._steps) < _STEPS_AHEAD)
            step = _Step(self._reached, info.key)
            self._coming -= Counter([info.key])
            self._reached += 1
            self._steps.append(step)
            self._by_key.setdefault(info.key, deque()).append(step)
            if info.key in self._early:
                self._early.remove(info.key)
                self._release_through(step)
            return step

    def _make_way(self, step: _Step, nbytes: int, *, pending: bool) -> bool:
        """Wait until `nbytes` more fit into the window, and take them; False when they are not wanted any more."""

        def fits() -> bool:
            # What is larger than the window and here already is let in alone.
            return self._ahead_bytes + nbytes <= self._window or (not pending and not self._ahead_bytes)

        with self._change:
            while not (self._closed or step.passed or fits()):
                self._stuck = not self._pending
                self._change.notify_all()
                self._change.wait()
            self._stuck = False
            if self._closed or step.passed:
                return False
            self._ahead_bytes += nbytes
            if pending:
                self._pending += 1
            else:
                step.charged += nbytes
            return True

    # --- the threads that fetch -------------------------------------------------------------------

    def _fetch(self, fill: Fill, piece: range) -> FetchedPiece | None:
        # The interpreter waits for its pools at its end; nobody will read any more.
        return None if self._closed or not threading.main_thread().is_alive() else fill.fetch(piece)

    def _landed(self, job: _Job, nbytes: int, future: Future[FetchedPiece | None] | None) -> None:
        """A piece of `nbytes` is through, well or not; with 0 bytes: the walker is through with the object."""
        done: FetchedPiece | None = None
        error: BaseException | None = None
        if future is not None and not future.cancelled():
            error = future.exception()
            done = future.result() if error is None else None
        with self._change:
            if done is not None:
                self._fetched_bytes += done.fetched_bytes
                self._unkept_bytes += 0 if done.kept else done.fetched_bytes
                self._full = self._full or not done.kept
            if nbytes:
                self._pending -= 1
                if done is None or job.step.passed:
                    self._ahead_bytes -= nbytes
                else:
                    job.step.charged += nbytes
            job.pieces_left -= 1
            last = not job.pieces_left
            first_error = error is not None and not job.failed
            job.failed = job.failed or error is not None
            self._change.notify_all()
        if last:
            job.fill.close()
        if first_error and isinstance(error, Exception):
            self._tell(job.path, error)
        if last:
            self._end_if_done()

    def _tell(self, path: str, error: Exception) -> None:
        with self._change:
            self._failed += 1
        emit(Event(name="prefetch.failed", subject=path, detail=str(error)))
        if self._on_error is not None:
            self._on_error(path, error)

    def _ended(self) -> bool:
        return self._closed or (self._walked and not self._pending)

    def _end_if_done(self) -> None:
        with self._change:
            if self._closed:  # `close` sees to the rest; its shutdown may be what calls this
                return
            ended, passed = self._ended(), not self._steps
        if ended:
            self._fetches.shutdown(wait=False)
            if passed:
                opens.unlisten(self._heard)


class _Step:
    """A place in the order that the walker has reached. Its fields change under the lock of its prefetch."""

    __slots__ = ("charged", "key", "number", "passed")

    def __init__(self, number: int, key: str) -> None:
        self.number = number
        self.key = key
        self.charged = 0
        self.passed = False


class _Job:
    """An object that is being fetched. The walker holds one of its pieces until it has handed out all others."""

    __slots__ = ("failed", "fill", "path", "pieces_left", "step")

    def __init__(self, step: _Step, fill: Fill, path: str) -> None:
        self.step = step
        self.fill = fill
        self.path = path
        self.pieces_left = 1
        self.failed = False
