"""Servers without ranges: an object is read whole, once, into a temporary file, and its ranges are served from there.

The file has no name, so nothing is left of it after a crash. It lies in TMPDIR or else /var/tmp, takes as much room as
the object, and goes when nobody has read of it for a minute. It is this process's own.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import IO
from urllib.parse import urlsplit

from millrace.errors import DiskFullError, MillraceError, OriginUnavailableError, StorageError
from millrace.origin.web.addresses import shown
from millrace.origin.web.answers import content_length, modified_of, version_of
from millrace.origin.web.connections import Answer

IDLE_SECONDS = 60.0
_RESERVE_BYTES = 64 << 20
_CHECK_BYTES = 64 << 20
_REMEMBERED_URLS = 4096


class WholeCopy:
    """One version of one object, arriving or all here. A thread of its own writes it, and ends with it. Thread-safe."""

    def __init__(self, answer: Answer, forget: Callable[[WholeCopy], None], idle_seconds: float) -> None:
        self.url = answer.url
        self._answer, self._forget, self._idle_seconds = answer, forget, idle_seconds
        self._announced = content_length(answer.headers)
        self._changed = threading.Condition()
        self._ready, self._complete = 0, False
        self._error: MillraceError | None = None
        self._readers, self._used = 0, time.monotonic()
        self._file: IO[bytes] = _temporary_file(self.url, self._announced)

    def start(self) -> None:
        """Begin to fetch, in the background."""
        threading.Thread(target=self._run, name="millrace-whole-copy", daemon=True).start()

    def size(self) -> int:
        """The object's size in bytes: waits for its end where the server did not announce it."""
        if self._announced is not None:
            return self._announced
        with self._wait_for(lambda: False):
            return self._ready

    def version(self) -> str:
        """The object's version; may wait as `size` does."""
        return version_of(self._answer.headers, self.size())

    def modified(self) -> float:
        return modified_of(self._answer.headers)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes `[start, stop)`, which lie inside the object; waits until they are here. Raises what stopped it."""
        with self._wait_for(lambda: self._ready >= stop):
            data = os.pread(self._file.fileno(), stop - start, start)
        if len(data) != stop - start:
            raise StorageError(f"a temporary copy of {shown(self.url)} cannot be read", next_step="check TMPDIR")
        return data

    @contextlib.contextmanager
    def _wait_for(self, ready: Callable[[], bool]) -> Iterator[None]:
        """Wait until `ready()` or all is here, and keep the file open inside the block."""
        with self._changed:
            self._readers += 1
            try:
                while not (ready() or self._complete or self._error):
                    self._changed.wait(1.0)
                if self._error is not None:
                    raise copy.copy(self._error)  # each thread its own: a traceback belongs to one
            except BaseException:
                self._leave()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._leave()

    def _leave(self) -> None:
        self._readers -= 1
        self._used = time.monotonic()
        self._changed.notify_all()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._answer:
                self._fetch()
            with self._changed:
                self._complete = True
                self._changed.notify_all()
        except MillraceError as error:
            self._fail(error)
        except OSError as error:
            kind = DiskFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
            self._fail(
                kind(f"no room for a copy of {shown(self.url)}", next_step="set TMPDIR to a disk with more room")
            )
        self._linger()
        with self._file:
            pass

    def _fetch(self) -> None:
        unchecked = 0
        for part in self._answer.stream():
            unchecked += len(part)
            if unchecked > _CHECK_BYTES and self._announced is None:
                _check_room(self._file.fileno(), self.url, _CHECK_BYTES)
                unchecked = 0
            self._file.write(part)
            self._file.flush()
            with self._changed:
                self._ready += len(part)
                self._changed.notify_all()
                if self._idle():
                    raise OriginUnavailableError(f"nobody reads {shown(self.url)} any more")
        if self._announced is not None and self._ready != self._announced:
            raise OriginUnavailableError(
                f"{shown(self.url)} ended after {self._ready} of {self._announced} bytes", next_step="read again"
            )

    def _fail(self, error: MillraceError) -> None:
        self._forget(self)  # first: who comes now begins anew
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _idle(self) -> bool:
        return not self._readers and time.monotonic() - self._used >= self._idle_seconds

    def _linger(self) -> None:
        """Wait until nobody reads any more, and be forgotten."""
        while True:
            with self._changed:
                while not self._idle() and not (self._error and not self._readers):
                    self._changed.wait(max(0.05, self._used + self._idle_seconds - time.monotonic()))
            self._forget(self)
            with self._changed:  # somebody may have come in between
                if not self._readers:
                    self._error = self._error or OriginUnavailableError(f"the copy of {shown(self.url)} is gone")
                    return


class WholeCopies:
    """The copies of one process, by URL, and which servers need them. Thread-safe."""

    def __init__(self, idle_seconds: float = IDLE_SECONDS) -> None:
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._copies: dict[str, WholeCopy] = {}
        self._turns: dict[str, tuple[threading.Lock, list[None]]] = {}
        self._with_ranges: set[str] = set()
        self._without_ranges: OrderedDict[str, None] = OrderedDict()

    def find(self, url: str, version: str | None) -> WholeCopy | None:
        """The copy of this version, None where there is none; may wait for its end to know its version."""
        with self._lock:
            found = self._copies.get(url)
        try:
            return found if found is not None and version is not None and found.version() == version else None
        except MillraceError:  # it failed: as if there were none, and whoever reads sees for himself
            return None

    def adopt(self, url: str, answer: Answer) -> WholeCopy:
        """A copy of what `answer` brings, which is its own from now on: a new one, or the one that is being made already."""
        try:
            made = WholeCopy(answer, lambda it: self.drop(url, it), self._idle_seconds)
        except BaseException:
            answer.close()
            raise
        with self._lock:
            self._copies[url] = made
            self._without_ranges[url] = None
            while len(self._without_ranges) > _REMEMBERED_URLS:
                self._without_ranges.popitem(last=False)
        made.start()
        return made

    def drop(self, url: str, it: WholeCopy) -> None:
        """Give a copy to no new reader; it goes when its readers have."""
        with self._lock:
            if self._copies.get(url) is it:
                del self._copies[url]

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
        file = tempfile.TemporaryFile(prefix="millrace-", dir=folder)  # noqa: SIM115 - closed by the copy's thread
    except OSError as error:
        raise StorageError(
            f"no temporary file for a copy of {shown(url)}", next_step="set TMPDIR to a directory that can be written"
        ) from error
    try:
        _check_room(file.fileno(), url, size or 0)
    except BaseException:
        file.close()
        raise
    return file


def _check_room(descriptor: int, url: str, wanted_bytes: int) -> None:
    room = os.fstatvfs(descriptor)
    if room.f_bavail * room.f_frsize < wanted_bytes + _RESERVE_BYTES:
        raise DiskFullError(
            f"no room for a copy of {shown(url)}, whose server has no ranges",
            next_step="set TMPDIR to a disk with more room",
        )
