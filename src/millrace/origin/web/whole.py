"""Servers without ranges: an object is downloaded whole, once, into a temporary file, which serves its ranges.

The file has no name, so it does not survive a crash. It is in TMPDIR or else /var/tmp, is private to the process, and is
closed after a minute without reads.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from urllib.parse import urlsplit

from millrace.errors import DiskFullError, MillraceError, OriginUnavailableError, StorageError
from millrace.origin.web.addresses import shown
from millrace.origin.web.connections import Response
from millrace.origin.web.responses import content_length, modified_of, version_of
from millrace.runtime.maintenance import register_periodic

IDLE_SECONDS = 60.0
_RESERVE_BYTES = 64 << 20
_CHECK_BYTES = 64 << 20
_REMEMBERED_URLS = 4096
_MOST_COPIES = 64  # each has a descriptor
_DOWNLOAD_LOCKS = 1024  # two URLs with the same lock are downloaded one after the other
# A slower download is an error.
_SLOW_SECONDS, _LEAST_BYTES = 60.0, 1 << 20


class WholeCopy:
    """One version of one object, complete. Immutable, thread-safe. The file is closed with the last reference."""

    def __init__(self, url: str, response: Response) -> None:
        """Download the body. Raises `OriginUnavailableError`, and `StorageError` for a problem of the temporary file."""
        self._url = url
        self._descriptor = _temporary_file(url, content_length(response) or 0)
        # Not at the exit: a forked child has a copy of its parent's descriptors.
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        try:
            self.size = _download(url, response, self._descriptor)
        except MillraceError:  # many of them are `OSError`s, too
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_room(url) from error
            raise StorageError(
                f"a temporary copy of {shown(url)} cannot be written ({error.strerror})",
                next_step="set TMPDIR to another disk",
            ) from error
        self.version = version_of(response.headers, self.size)
        self.modified = modified_of(response.headers)
        self.used = time.monotonic()

    def read(self, start: int, stop: int) -> bytes:
        """The bytes `[start, stop)`, a range inside the object."""
        data = os.pread(self._descriptor, stop - start, start)
        if len(data) != stop - start:
            raise StorageError(f"a temporary copy of {shown(self._url)} cannot be read", next_step="check TMPDIR")
        return data


class WholeCopies:
    """The copies of one process, by URL, and the servers that need them. Thread-safe.

    Drops copies that were not used for `idle_seconds`, and the least recently used ones when there are too many.
    """

    def __init__(self, idle_seconds: float = IDLE_SECONDS) -> None:
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._copies: OrderedDict[str, WholeCopy] = OrderedDict()
        self._downloads = tuple(threading.Lock() for _ in range(_DOWNLOAD_LOCKS))
        self._with_ranges: set[str] = set()
        self._without_ranges: OrderedDict[str, None] = OrderedDict()

    def find(self, url: str, version: str | None) -> WholeCopy | None:
        """The copy of this version, if any."""
        with self._lock:
            found = self._copies.get(url)
            if found is None or found.version != version:
                return None
            found.used = time.monotonic()
            self._copies.move_to_end(url)
            return found

    def download(self, url: str, response: Response) -> WholeCopy:
        """Download the object of a response; replaces an older copy. Raises the errors of `WholeCopy`."""
        with self._lock:
            self._without_ranges[url] = None
            while len(self._without_ranges) > _REMEMBERED_URLS:
                self._without_ranges.popitem(last=False)
        made = WholeCopy(url, response)
        with self._lock:
            self._copies.pop(url, None)
            self._copies[url] = made
            while len(self._copies) > _MOST_COPIES:
                self._copies.popitem(last=False)
        register_periodic(self._expire)
        return made

    def drop(self, url: str) -> None:
        """Drop a copy. Present readers keep it."""
        with self._lock:
            self._copies.pop(url, None)

    def _expire(self) -> float | bool:
        """The periodic task that drops idle copies, for as long as there are any."""
        with self._lock:
            oldest = time.monotonic() - self._idle_seconds
            for url in [url for url, each in self._copies.items() if each.used < oldest]:
                del self._copies[url]
            return bool(self._copies) and self._idle_seconds / 4

    def has_ranges(self, url: str) -> None:
        """Record that the server of `url` supports ranges."""
        if (server := urlsplit(url).netloc) not in self._with_ranges:
            with self._lock:
                self._with_ranges.add(server)

    def one_at_a_time(self, url: str) -> AbstractContextManager[object]:
        """One thread at a time for an object that may need a download; no wait if the server supports ranges.

        It is a plain lock: an interrupt (Ctrl-C) in a context manager written in Python could leave it held.
        """
        if urlsplit(url).netloc in self._with_ranges and url not in self._without_ranges:
            return nullcontext()
        return self._downloads[hash(url) % _DOWNLOAD_LOCKS]


def _download(url: str, response: Response, descriptor: int) -> int:
    """Write the body to a file; returns its size. Raises `OriginUnavailableError` for an incomplete or slow body."""
    announced, written, checked = content_length(response), 0, 0
    began, before = time.monotonic(), 0
    for part in response.stream():
        if announced is None and written - checked > _CHECK_BYTES:
            _check_room(descriptor, url, _CHECK_BYTES)
            checked = written
        left = memoryview(part)
        while left:
            left = left[os.write(descriptor, left) :]
        written += len(part)
        if time.monotonic() - began > _SLOW_SECONDS:
            if written - before < _LEAST_BYTES:
                raise OriginUnavailableError(f"{shown(url)} is sent too slowly", next_step="try again later")
            began, before = time.monotonic(), written
    if announced is not None and written != announced:
        raise OriginUnavailableError(f"{shown(url)} ended after {written} of {announced} bytes", next_step="read again")
    return written


def _temporary_file(url: str, size: int) -> int:
    folder = os.environ.get("TMPDIR") or ("/var/tmp" if os.access("/var/tmp", os.W_OK) else None)
    try:
        with tempfile.TemporaryFile(prefix="millrace-", dir=folder, buffering=0) as file:
            _check_room(file.fileno(), url, size)
            return os.dup(file.fileno())
    except MillraceError:
        raise
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise StorageError(
                f"too many open files for a copy of {shown(url)}", next_step="raise the limit (ulimit -n)"
            ) from error
        raise StorageError(
            f"no temporary file for a copy of {shown(url)}", next_step="set TMPDIR to a directory that can be written"
        ) from error


def _check_room(descriptor: int, url: str, wanted_bytes: int) -> None:
    room = os.fstatvfs(descriptor)
    if room.f_bavail * room.f_frsize < wanted_bytes + _RESERVE_BYTES:
        raise _no_room(url)


def _no_room(url: str) -> DiskFullError:
    return DiskFullError(
        f"no room for a copy of {shown(url)}, whose server has no ranges",
        next_step="set TMPDIR to a disk with more room",
    )
