"""Servers without ranges: an object is read whole, once, into a temporary file, and its ranges are served from there.

The file has no name, so nothing is left of it after a crash. It lies in TMPDIR or else /var/tmp, takes as much room as
the object, and goes when nobody has read of it for a minute. It is this process's own.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import math
import os
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import IO, Self
from urllib.parse import urlsplit

from millrace.errors import DiskFullError, MillraceError, OriginUnavailableError, StorageError
from millrace.origin.web.addresses import shown
from millrace.origin.web.answers import content_length, modified_of, version_of
from millrace.origin.web.connections import Answer

IDLE_SECONDS = 60.0
_RESERVE_BYTES = 64 << 20
_CHECK_BYTES = 64 << 20
_REMEMBERED_URLS = 4096
_MOST_COPIES = 64  # that nobody uses: each has a descriptor
# As slow as this an object is not fetched: one that reads it would wait for ever.
_SLOW_SECONDS, _LEAST_BYTES = 60.0, 1 << 20


class WholeCopy:
    """One version of one object, arriving or all here. Thread-safe.

    A thread of its own writes it, and ends with the body. Whoever uses it holds it: it is made and found held, and let go by
    leaving a `with` block. The file is closed when the copy is given up and nobody holds it.
    """

    def __init__(self, answer: Answer, forget: Callable[[WholeCopy], None]) -> None:
        self.url = answer.url
        self._answer, self._forget = answer, forget
        self._announced = content_length(answer.headers)
        self._changed = threading.Condition()
        self._ready, self._complete, self._ended = 0, False, False
        self._error: MillraceError | None = None
        self._holders, self._used, self._given_up = 1, time.monotonic(), False
        self._file: IO[bytes] = _temporary_file(self.url, self._announced)
        weakref.finalize(self, self._file.close).atexit = False  # what a forked child has of its parent

    def start(self) -> None:
        """Begin to fetch, in the background."""
        threading.Thread(target=self._run, name="millrace-whole-copy", daemon=True).start()

    def hold(self) -> None:
        """Keep it, until one more `with` block is left."""
        with self._changed:
            self._holders += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._holders -= 1
            self._used = time.monotonic()
            self._close_if_unused()

    def idle_seconds(self) -> float:
        """For how long nobody has held it; negative while somebody does."""
        with self._changed:
            return -1.0 if self._holders else time.monotonic() - self._used

    def give_up(self) -> None:
        """Nobody else will come: it goes when those who hold it have gone. Idempotent."""
        with self._changed:
            self._given_up = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._given_up and self._ended and not self._holders:
            self._file.close()

    def size(self) -> int:
        """The object's size in bytes: waits for its end where the server did not announce it."""
        if self._announced is not None:
            return self._announced
        self._wait(lambda: False)
        return self._ready

    def version(self) -> str:
        """The object's version; may wait as `size` does."""
        return version_of(self._answer.headers, self.size())

    def modified(self) -> float:
        return modified_of(self._answer.headers)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes `[start, stop)`, which lie inside the object; waits until they are here. Raises what stopped it."""
        self._wait(lambda: self._ready >= stop)
        data = os.pread(self._file.fileno(), stop - start, start)
        if len(data) != stop - start:
            raise StorageError(f"a temporary copy of {shown(self.url)} cannot be read", next_step="check TMPDIR")
        return data

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()` or all is here."""
        with self._changed:
            while not (ready() or self._complete or self._error):
                self._changed.wait(1.0)
            if self._error is not None:
                raise copy.copy(self._error)  # each thread its own: a traceback belongs to one

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        error: MillraceError | None = None
        try:
            with self._answer:
                self._fetch()
        except MillraceError as failure:
            error = failure
        except OSError as failure:
            error = _cannot_be_kept(failure, self.url)
        if error is not None:
            self._forget(self)  # first: who comes now begins anew
        with self._changed:
            self._error, self._complete, self._ended = error, error is None, True
            self._changed.notify_all()
            self._close_if_unused()

    def _fetch(self) -> None:
        unchecked, began, came = 0, time.monotonic(), 0
        for part in self._answer.stream():
            unchecked += len(part)
            if unchecked > _CHECK_BYTES and self._announced is None:
                _check_room(self._file.fileno(), self.url, _CHECK_BYTES)
                unchecked = 0
            _write(self._file, part)
            with self._changed:
                self._ready += len(part)
                self._changed.notify_all()
                if self._given_up and not self._holders:
                    raise OriginUnavailableError(f"nobody reads {shown(self.url)} any more")
            came += len(part)
            if time.monotonic() - began > _SLOW_SECONDS:
                if came < _LEAST_BYTES:
                    raise OriginUnavailableError(f"{shown(self.url)} is sent too slowly", next_step="try again later")
                began, came = time.monotonic(), 0
        if self._announced is not None and self._ready != self._announced:
            raise OriginUnavailableError(
                f"{shown(self.url)} ended after {self._ready} of {self._announced} bytes", next_step="read again"
            )


class WholeCopies:
    """The copies of one process, by URL, and which servers need them. Thread-safe.

    One thread, which is there while there are copies, gives up those that nobody has used for `idle_seconds`; so do new ones
    those that were used longest ago, when there are too many.
    """

    def __init__(self, idle_seconds: float = IDLE_SECONDS) -> None:
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._copies: OrderedDict[str, WholeCopy] = OrderedDict()
        self._is_tidied = False
        self._turns: dict[str, tuple[threading.Lock, list[None]]] = {}
        self._with_ranges: set[str] = set()
        self._without_ranges: OrderedDict[str, None] = OrderedDict()

    def find(self, url: str, version: str | None) -> WholeCopy | None:
        """The copy of this version, held; None where there is none. May wait for its end to know its version."""
        with self._lock:
            found = self._copies.get(url) if version is not None else None
            if found is None:
                return None
            found.hold()
            self._copies.move_to_end(url)
        with contextlib.ExitStack() as held:
            held.push(found)
            try:
                if found.version() != version:
                    return None
            except MillraceError:  # it failed: as if there were none, and whoever reads sees for himself
                return None
            held.pop_all()
        return found

    def adopt(self, url: str, answer: Answer) -> WholeCopy:
        """A new copy, held, of what `answer` brings, which is its own from now on. It takes the place of an older one."""
        try:
            made = WholeCopy(answer, lambda it: self.drop(url, it))
        except BaseException:
            answer.close()
            raise
        with self._lock:
            replaced = self._copies.pop(url, None)
            self._copies[url] = made
            self._without_ranges[url] = None
            while len(self._without_ranges) > _REMEMBERED_URLS:
                self._without_ranges.popitem(last=False)
            unused = self._take_unused(math.inf, len(self._copies) - _MOST_COPIES)
            tidy, self._is_tidied = not self._is_tidied, True
        for each in (replaced, *unused):
            if each is not None:
                each.give_up()
        made.start()
        if tidy:
            threading.Thread(target=self._tidy, name="millrace-whole-copies", daemon=True).start()
        return made

    def drop(self, url: str, it: WholeCopy) -> None:
        """Give a copy to no new reader; it goes when its readers have."""
        with self._lock:
            if self._copies.get(url) is it:
                del self._copies[url]
        it.give_up()

    def _take_unused(self, idle_seconds: float, count: int = 0) -> list[WholeCopy]:
        """Take out the copies unused for `idle_seconds`, and others that nobody holds, oldest first, until it is `count`."""
        taken: list[WholeCopy] = []
        for url, each in list(self._copies.items()):
            idle = each.idle_seconds()
            if idle >= idle_seconds or (idle >= 0 and len(taken) < count):
                taken.append(self._copies.pop(url))
        return taken

    def _tidy(self) -> None:
        is_done = False
        while not is_done:
            with self._lock:
                unused = self._take_unused(self._idle_seconds)
                longest = max((each.idle_seconds() for each in self._copies.values()), default=0.0)
                is_done = not self._copies
                self._is_tidied = not is_done
            for each in unused:
                each.give_up()
            if not is_done:
                time.sleep(max(0.05, self._idle_seconds - max(0.0, longest)))

    def has_ranges(self, url: str) -> None:
        """Note that the server of `url` answers with ranges."""
        if (server := urlsplit(url).netloc) not in self._with_ranges:
            with self._lock:
                self._with_ranges.add(server)

    @contextlib.contextmanager
    def turn(self, url: str) -> Iterator[None]:
        """One thread at a time for an object that may have to be read whole; no waiting where ranges are known to work."""
        if urlsplit(url).netloc in self._with_ranges and url not in self._without_ranges:
            yield
            return
        with self._lock:
            lock, waiting = self._turns.setdefault(url, (threading.Lock(), []))
            waiting.append(None)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                waiting.pop()
                if not waiting:
                    self._turns.pop(url, None)


def _temporary_file(url: str, size: int | None) -> IO[bytes]:
    folder = os.environ.get("TMPDIR") or ("/var/tmp" if os.access("/var/tmp", os.W_OK) else None)
    try:
        # Without a buffer: a forked child would write its own once more.
        file: IO[bytes] = tempfile.TemporaryFile(prefix="millrace-", dir=folder, buffering=0)  # noqa: SIM115 - the copy's
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise StorageError(
                f"too many open files for a copy of {shown(url)}",
                next_step="raise the limit (ulimit -n)",
            ) from error
        raise StorageError(
            f"no temporary file for a copy of {shown(url)}", next_step="set TMPDIR to a directory that can be written"
        ) from error
    try:
        _check_room(file.fileno(), url, size or 0)
    except BaseException:
        file.close()
        raise
    return file


def _write(file: IO[bytes], data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _cannot_be_kept(error: OSError, url: str) -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(f"no room for a copy of {shown(url)}", next_step="set TMPDIR to a disk with more room")
    return StorageError(
        f"a temporary copy of {shown(url)} cannot be written ({error.strerror})", next_step="set TMPDIR to another disk"
    )


def _check_room(descriptor: int, url: str, wanted_bytes: int) -> None:
    room = os.fstatvfs(descriptor)
    if room.f_bavail * room.f_frsize < wanted_bytes + _RESERVE_BYTES:
        raise DiskFullError(
            f"no room for a copy of {shown(url)}, whose server has no ranges",
            next_step="set TMPDIR to a disk with more room",
        )
