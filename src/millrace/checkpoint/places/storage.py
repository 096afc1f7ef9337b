"""Where a checkpoint's files go: a local directory, or a prefix of an object store behind `millrace.origin`.

Names are relative to the checkpoint; `../sibling/name` reaches into a checkpoint beside it, for reading only. A file
becomes visible under its name only when all of it is durable.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from typing_extensions import Buffer

from millrace.checkpoint.places.exclusive import move_new
from millrace.errors import (
    ChangedError,
    ConfigurationError,
    DeniedError,
    DiskFullError,
    MillraceError,
    MissingError,
    ObjectExistsError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    RetryableError,
    StorageError,
)
from millrace.origin import ObjectInfo, ObjectWriter, Origin, Readable, origin_for_url, service_of, split_url

# Writing back begins after this much, so that the disk works while the codec does and the last fsync is short.
_WRITEBACK_BYTES = 32 << 20
# Tries of a conditional PUT whose answer got lost while the object is not there either; each retries inside, too.
_PUBLISH_ATTEMPTS = 3
_BROKEN_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One version of one file. `version` is opaque and pins later reads; `size` in bytes; `modified` in Unix seconds,
    by the storage's clock.
    """

    name: str
    size: int
    version: str
    modified: float


class CheckpointStorage(Protocol):
    """One checkpoint's directory. Thread-safe. Raises only `millrace.errors`."""

    @property
    def url(self) -> str:
        """Names the directory for people, without secrets."""
        ...

    def prepare(self) -> None:
        """Make the directory ready for writing."""
        ...

    def open_writer(self, name: str) -> ObjectWriter:
        """Stream out a new file. Closing makes it durable, then visible; aborting leaves nothing."""
        ...

    def publish(self, name: str, data: Buffer, *, replace: bool) -> None:
        """Make a small file durable and visible in one atomic step.

        Without `replace`, raises `ObjectExistsError` when the name is taken by other bytes than these. Raises
        `OutcomeUnknownError` when nobody can tell whether the file is there, or still will be.
        """
        ...

    def stat(self, name: str) -> StoredFile:
        """Describe a file. Raises `ObjectNotFoundError`."""
        ...

    def read(self, file: StoredFile, start: int, stop: int) -> Buffer:
        """Return the bytes `[start, stop)` of this version of the file."""
        ...

    def names(self) -> Sequence[str]:
        """The files in the directory; empty when it does not exist."""
        ...

    def files(self) -> Sequence[StoredFile]:
        """The same, described."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Remove files. A name that does not exist is no error."""
        ...


def can_open_storage(location: str | os.PathLike[str]) -> bool:
    """Whether `open_storage` knows what the name means; says nothing of what is there."""
    try:
        open_storage(location)
    except MillraceError:
        return False
    return True


def open_storage(
    location: str | os.PathLike[str],
    target_options: Mapping[str, Any] | None = None,
    *,
    origin: Readable | None = None,
    sync: bool = True,
) -> CheckpointStorage:
    """Open the directory that a URL or local path names. No request is made.

    `origin` replaces the storage that is read from (a cache, say) and makes the result read-only in practice. `sync`:
    whether local files are forced to the disk before they become visible.
    """
    url = os.fspath(location)
    if not url:
        raise ConfigurationError(
            "the name of the checkpoint is empty", next_step="give a directory or scheme://bucket/path"
        )
    if "\0" in url:
        raise ConfigurationError(f"{url!r} has a NUL in it", next_step="check the name")
    if _BROKEN_URL.match(url):
        # What pathlib makes of a URL; as a local path it would be a directory beside the program.
        raise ConfigurationError(f"{url!r} has one slash after its colon", next_step="give the URL as text, with two")
    scheme, key = split_url(url)
    if not key.strip("/"):
        raise ConfigurationError(f"{url!r} names no checkpoint", next_step="give a directory or scheme://bucket/path")
    if origin is not None:
        return ObjectStorage(url, origin, key)
    if service_of(scheme).rooted:
        if target_options:
            raise ConfigurationError("local files take no target_options", next_step="leave them out")
        return LocalStorage(key, sync=sync)
    opened, key = origin_for_url(url, target_options)
    if "/" not in key.strip("/"):
        raise ConfigurationError(f"{url!r} is a whole bucket", next_step="give scheme://bucket/path")
    return ObjectStorage(url, opened, key)


# --- object store ---------------------------------------------------------------------------------


class ObjectStorage:
    """A prefix of an object store. Writing and listing need an `Origin`; reading alone needs only a `Readable`."""

    def __init__(self, url: str, origin: Readable, prefix: str) -> None:
        self._url = url.rstrip("/")
        self._origin = origin
        self._prefix = prefix.rstrip("/")

    @property
    def url(self) -> str:
        return self._url

    def prepare(self) -> None:
        self._whole()

    def open_writer(self, name: str) -> ObjectWriter:
        return self._whole().open_writer(self._key(name))

    def publish(self, name: str, data: Buffer, *, replace: bool) -> None:
        # The answer to a PUT can get lost after the store has done its work, and a retry of a conditional PUT then finds
        # the object that the first try made. Only what is there tells; the data must be unlike anybody else's.
        for attempt in range(1, _PUBLISH_ATTEMPTS + 1):
            try:
                self._whole().put(self._key(name), data, if_absent=not replace)
                return
            except ObjectExistsError:
                if self._holds(name, data):
                    return
                raise
            except RetryableError as error:
                if self._holds(name, data, lost=error):
                    return
                if replace or attempt == _PUBLISH_ATTEMPTS:
                    raise self._unknown(name, error) from error

    def stat(self, name: str) -> StoredFile:
        return self._describe(name, self._origin.head(self._key(name)))

    def read(self, file: StoredFile, start: int, stop: int) -> Buffer:
        return self._origin.read(self._key(file.name), start, stop, version=file.version)

    def names(self) -> Sequence[str]:
        return [file.name for file in self.files()]

    def files(self) -> Sequence[StoredFile]:
        objects = self._whole().list_level(self._prefix).objects
        return [self._describe(posixpath.basename(info.key), info) for info in objects]

    def delete(self, names: Sequence[str]) -> None:
        self._whole().delete([self._key(name) for name in names])

    def _holds(self, name: str, data: Buffer, lost: RetryableError | None = None) -> bool:
        """Whether exactly `data` lies under `name`. `lost` is the error of the PUT whose answer is missing."""
        try:
            file = self.stat(name)
            if file.size != memoryview(data).nbytes:
                return False
            return memoryview(self.read(file, 0, file.size)).cast("B") == memoryview(data).cast("B")
        except (MissingError, ChangedError):
            return False
        except RetryableError as error:
            raise self._unknown(name, lost or error) from (lost or error)

    def _unknown(self, name: str, cause: RetryableError) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"nobody can tell whether {name} was written ({cause.message})",
            next_step="see what is there when the storage answers again, and save again",
        )

    @staticmethod
    def _describe(name: str, info: ObjectInfo) -> StoredFile:
        return StoredFile(name, info.size, info.version, info.modified)

    def _key(self, name: str) -> str:
        if name.startswith("../"):
            return posixpath.join(posixpath.dirname(self._prefix), name[3:])
        return f"{self._prefix}/{name}"

    def _whole(self) -> Origin:
        if not isinstance(self._origin, Origin):
            raise ConfigurationError(
                f"{self._origin.identity} can only be read from", next_step="write without `origin=`"
            )
        return self._origin


# --- local directory ------------------------------------------------------------------------------


class LocalStorage:
    """A directory of a local or mounted file system."""

    def __init__(self, path: str, *, sync: bool = True) -> None:
        self._path = os.path.abspath(os.path.expanduser(path))
        self._sync = sync

    @property
    def url(self) -> str:
        return self._path

    def prepare(self) -> None:
        with _translated(self._path):
            new = list(_missing_directories(self._path))
            os.makedirs(self._path, exist_ok=True)
            if self._sync:
                # A checkpoint is as durable as the names of the directories that lead to it.
                for directory in new:
                    _sync_directory(os.path.dirname(directory))

    def open_writer(self, name: str) -> LocalWriter:
        return LocalWriter(self._path, name, sync=self._sync)

    def publish(self, name: str, data: Buffer, *, replace: bool) -> None:
        with LocalWriter(self._path, name, sync=self._sync, replace=replace) as writer:
            writer.write(data)

    def stat(self, name: str) -> StoredFile:
        path = self._file(name)
        with _translated(path):
            info = os.stat(path)
            if not os.path.isfile(path):
                raise FileNotFoundError(path)
            return _describe(name, info)

    def read(self, file: StoredFile, start: int, stop: int) -> Buffer:
        path = self._file(file.name)
        if start == stop:
            return b""
        with _translated(path), open(path, "rb", buffering=0) as stream:
            # A bytearray would be filled with zeros first.
            view, position = np.empty(stop - start, dtype=np.uint8).data, 0
            while position < len(view):
                count = os.preadv(stream.fileno(), [view[position:]], start + position)
                if count == 0:
                    raise StorageError(f"{path} is shorter than it was", next_step="load again")
                position += count
            return view

    def names(self) -> Sequence[str]:
        with _translated(self._path):
            try:
                return sorted(entry.name for entry in os.scandir(self._path) if entry.is_file())
            except (FileNotFoundError, NotADirectoryError):
                return []

    def files(self) -> Sequence[StoredFile]:
        found = []
        for name in self.names():
            with contextlib.suppress(ObjectNotFoundError):  # removed since it was listed
                found.append(self.stat(name))
        return found

    def directories(self) -> Sequence[StoredFile]:
        """The directories in this one, described; empty when it does not exist."""
        with _translated(self._path):
            try:
                names = sorted(entry.name for entry in os.scandir(self._path) if entry.is_dir())
            except (FileNotFoundError, NotADirectoryError):
                return []
        found = []
        for name in names:
            path = self._file(name)
            with contextlib.suppress(ObjectNotFoundError), _translated(path):  # removed since it was listed
                found.append(_describe(name, os.stat(path)))
        return found

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            path = self._file(name)
            with _translated(path), contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def sync_names(self) -> None:
        """Force to the disk which files there are. A directory that is gone is no error."""
        with contextlib.suppress(ObjectNotFoundError), _translated(self._path):
            _sync_directory(self._path)

    def _file(self, name: str) -> str:
        return os.path.normpath(os.path.join(self._path, name))


class LocalWriter:
    """Writes a file under a temporary name; `close` syncs it, gives it its name, and syncs the directory.

    Not thread-safe. With `replace` an existing file of that name is replaced, else `ObjectExistsError` is raised.
    """

    def __init__(self, directory: str, name: str, *, sync: bool, replace: bool = True) -> None:
        self._directory = directory
        self._path = os.path.join(directory, name)
        self._temporary = os.path.join(directory, f".{name}.{uuid.uuid4().hex[:8]}.tmp")
        self._replace = replace
        self._finished = False
        with _translated(self._path):
            self._file = open(self._temporary, "xb", buffering=0)  # noqa: SIM115 - closed by close or abort
        self._writeback = _Writeback(self._file.fileno()) if sync else None

    def write(self, data: Buffer, /) -> int:
        view = memoryview(data).cast("B")
        with _translated(self._path):
            position = 0
            while position < len(view):
                position += self._file.write(view[position:])
            if self._writeback is not None:
                self._writeback.add(len(view))
        return len(view)

    @property
    def flushed(self) -> tuple[int, float] | None:
        """Bytes that the disk has taken while the file grew, and the seconds that it was busy; None without `sync`."""
        return None if self._writeback is None else self._writeback.flushed

    def close(self) -> None:
        if self._finished:
            return
        try:
            with _translated(self._path):
                if self._writeback is not None:
                    self._writeback.stop()
                    os.fsync(self._file.fileno())
                self._file.close()
                if self._replace:
                    os.replace(self._temporary, self._path)
                else:
                    move_new(self._temporary, self._path)
                if self._writeback is not None:
                    _sync_directory(self._directory)
            self._finished = True
        finally:
            self.abort()

    def abort(self) -> None:
        if self._finished:
            return
        self._finished = True
        with contextlib.suppress(OSError):
            if self._writeback is not None:
                self._writeback.stop()
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc_type is None:
            self.close()
        else:
            self.abort()


class _Writeback:
    """Flushes a growing file from a thread of its own, every so many bytes, and remembers the first error.

    The kernel reports a failed write-back once: an error seen here would be missing from the last fsync.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.flushed = (0, 0.0)
        self._total_bytes = self._pending_bytes = 0
        self._wake = threading.Semaphore(0)
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def add(self, nbytes: int) -> None:
        """Count written bytes. Raises the error of an earlier flush."""
        if self._error is not None:
            raise self._error
        self._total_bytes += nbytes
        self._pending_bytes += nbytes
        if self._pending_bytes >= _WRITEBACK_BYTES:
            self._pending_bytes = 0
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="millrace-writeback", daemon=True)
                self._thread.start()
            self._wake.release()

    def stop(self) -> None:
        """End the thread. Raises the error of an earlier flush. Idempotent."""
        self._stopping = True
        if self._thread is not None:
            self._wake.release()
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            if self._stopping:
                return
            total_bytes, began = self._total_bytes, time.monotonic()
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                self._error = error
                return
            self.flushed = (total_bytes, self.flushed[1] + time.monotonic() - began)


def _describe(name: str, info: os.stat_result) -> StoredFile:
    return StoredFile(name, info.st_size, f"{info.st_ino}-{info.st_mtime_ns}", info.st_mtime)


def _missing_directories(path: str) -> Iterator[str]:
    """Of an absolute path, the directories that are not there, the deepest first."""
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        yield path
        path = os.path.dirname(path)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """Turn the operating system's errors into ours, naming the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectNotFoundError(f"{path} does not exist", next_step="check the name") from error
    except FileExistsError as error:
        raise ObjectExistsError(f"{path} exists already", next_step="choose another name") from error
    except PermissionError as error:
        raise DeniedError(f"access to {path} was denied", next_step="check its owner and mode") from error
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskFullError(
                f"no room to write {path}", next_step="free space, or raise the quota or file size limit"
            ) from error
        raise StorageError(f"{path} failed ({error.strerror})", next_step="check the path and the disk") from error
