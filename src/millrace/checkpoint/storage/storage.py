"""The storage of one checkpoint: a local directory, or a prefix of an object store behind `millrace.origin`.

File names are relative to the checkpoint. `../sibling/name` is a file of a sibling checkpoint, for reading only. A file
becomes visible under its name only when it is complete and durable.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import posixpath
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from typing_extensions import Buffer

from millrace.checkpoint.arguments import ReadThroughMode, mapping, path_text, read_through_mode
from millrace.cluster.read_through import ReadThrough
from millrace.config import absolute_path
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
from millrace.runtime.pipeline import ThreadPool

# A file is written to the disk in blocks of this size. Larger ones are not faster.
BLOCK_BYTES = 4 << 20
# Blocks of a file in memory: one is filled while others wait for the disk.
_BLOCKS = 4
# Direct writes begin and end at multiples of this, in memory and in the file. Devices with larger sectors are rare.
_ALIGNMENT = 4096
# Where direct writes are impossible, the page cache is synced after this many bytes, so that the last fsync is short.
_SYNC_BYTES = 32 << 20
# Attempts of a conditional PUT without a response while the object is missing. The client retries each attempt as well.
_PUBLISH_ATTEMPTS = 3
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Errors of file systems without hard links: FAT, and some in user space.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK})
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_EXACT_VERSIONS = frozenset({"s3", "az", "gs", "hf"})
# Data files, whose names are unique to a save. Manifests and metadata are read from the storage.
_DATA_FILE = re.compile(r"(?:^|/)(?:data-[^/]*\.millrace|[^/]*\.(?:distcp|safetensors))$")
_BROKEN_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One version of one file. `version` is opaque and pins later reads. `size` in bytes.

    `modified` in Unix seconds, by the clock of the storage.
    """

    name: str
    size: int
    version: str
    modified: float


class CheckpointStorage(Protocol):
    """The directory of one checkpoint. Thread-safe. Raises only `millrace.errors`."""

    @property
    def url(self) -> str:
        """The URL or path of the directory, without secrets."""
        ...

    def prepare(self) -> None:
        """Create the directory if necessary."""
        ...

    def open_writer(self, name: str) -> ObjectWriter:
        """Write a new file as a stream. `close` makes it durable, then visible. `abort` leaves no file."""
        ...

    def publish(self, name: str, data: Buffer, *, replace: bool) -> None:
        """Make a small file durable and visible in one atomic step.

        Without `replace`, raises `ObjectExistsError` when the file exists with other bytes. Raises `OutcomeUnknownError`
        when the result of the request is unknown: the file may exist, or appear later.
        """
        ...

    def stat(self, name: str) -> StoredFile:
        """Describe a file. Raises `ObjectNotFoundError`."""
        ...

    def read(self, file: StoredFile, start: int, stop: int) -> Buffer:
        """Return the bytes `[start, stop)` of this version of the file."""
        ...

    def names(self) -> Sequence[str]:
        """The names of the files in the directory. Empty when it does not exist."""
        ...

    def files(self) -> Sequence[StoredFile]:
        """The files in the directory. Empty when it does not exist."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Remove files. Missing files are not an error."""
        ...


def has_file(storage: CheckpointStorage, name: str) -> bool:
    """Whether a file exists. Raises the errors of the storage."""
    try:
        storage.stat(name)
    except MissingError:
        return False
    return True


def _contains(storage: CheckpointStorage, name: str, data: Buffer) -> bool:
    """Whether the file `name` contains exactly `data`."""
    file = storage.stat(name)
    if file.size != memoryview(data).nbytes:
        return False
    return memoryview(storage.read(file, 0, file.size)).cast("B") == memoryview(data).cast("B")


def can_open_storage(location: str | os.PathLike[str]) -> bool:
    """Whether `open_storage` accepts this URL or path. Does not check whether it exists."""
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
    limits: Mapping[str, Any] | None = None,
    sync: bool = True,
    read_through: ReadThroughMode = "none",
) -> CheckpointStorage:
    """Open the directory of a checkpoint by URL or local path. Makes no request.

    `origin` replaces the storage, for reading only (through a cache, for example). `limits`: as in
    `millrace.origin.open_origin`. `sync`: whether local files are synced to disk before they become visible.
    `read_through`: whether data files are read through the cache of a cluster (`cached_reads`).
    """
    read_through_mode(read_through)
    url = path_text("the URL of a checkpoint", location)
    mapping("target_options", target_options)
    if not url:
        raise ConfigurationError(
            "the name of the checkpoint is empty", next_step="give a directory or scheme://bucket/path"
        )
    if "\0" in url:
        raise ConfigurationError(f"{url!r} has a NUL in it", next_step="check the name")
    if _BROKEN_URL.match(url):
        # `pathlib` removes a slash from a URL. As a local path it would be a directory in the working directory.
        raise ConfigurationError(f"{url!r} has one slash after its colon", next_step="give the URL as text, with two")
    scheme, key = split_url(url)
    if not key.strip("/"):
        raise ConfigurationError(f"{url!r} names no checkpoint", next_step="give a directory or scheme://bucket/path")
    if origin is not None:
        if read_through == "cluster":
            raise ConfigurationError("read_through='cluster' and an origin", next_step="give one of them")
        return ObjectStorage(url, origin, key)
    if service_of(scheme).rooted:
        if target_options:
            raise ConfigurationError("local files take no target_options", next_step="leave them out")
        if read_through == "cluster":
            raise ConfigurationError(
                f"{url}: local files are not read through the cluster", next_step="leave read_through out"
            )
        return LocalStorage(key, sync=sync)
    opened, key = origin_for_url(url, target_options, limits)
    if "/" not in key.strip("/"):
        raise ConfigurationError(f"{url!r} is a whole bucket", next_step="give scheme://bucket/path")
    return ObjectStorage(url, opened, key, cached_reads(opened, read_through))


def cached_reads(origin: Origin, mode: ReadThroughMode) -> ReadThrough | None:
    """Reads data files of one checkpoint through the cache of a cluster. None for the mode `"none"`.

    With `"auto"` it has an effect for object stores only: other storages have no exact versions.
    """
    if mode == "none" or (mode == "auto" and origin.identity.partition("+")[0] not in _EXACT_VERSIONS):
        return None
    return ReadThrough(origin, required=mode == "cluster")


# --- object store ---------------------------------------------------------------------------------


class ObjectStorage:
    """A prefix of an object store. Reading needs a `Readable`. Writing and listing need an `Origin`.

    `cached` reads data files, and drops those that are deleted.
    """

    def __init__(self, url: str, origin: Readable, prefix: str, cached: ReadThrough | None = None) -> None:
        self._url = url.rstrip("/")
        self._origin = origin
        self._prefix = prefix.rstrip("/")
        self._cached = cached

    @property
    def url(self) -> str:
        return self._url

    def prepare(self) -> None:
        self._whole()

    def open_writer(self, name: str) -> ObjectWriter:
        return self._whole().open_writer(self._key(name))

    def publish(self, name: str, data: Buffer, *, replace: bool) -> None:
        # The response to a PUT can get lost after the store has written the object. A retry of a conditional PUT is then
        # refused. So read the object back and compare it. `data` is unique to this save.
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
        key = self._key(file.name)
        if self._cached is not None and _DATA_FILE.search(key):
            return self._cached.read(ObjectInfo(key, file.size, file.version, file.modified), start, stop)
        return self._origin.read(key, start, stop, version=file.version)

    def names(self) -> Sequence[str]:
        return [file.name for file in self.files()]

    def files(self) -> Sequence[StoredFile]:
        objects = self._whole().list_level(self._prefix).objects
        return [self._describe(posixpath.basename(info.key), info) for info in objects]

    def delete(self, names: Sequence[str]) -> None:
        keys = [self._key(name) for name in names]
        self._whole().delete(keys)
        files = [key for key in keys if _DATA_FILE.search(key)]
        if self._cached is not None and files:
            self._cached.drop(files)

    def _holds(self, name: str, data: Buffer, lost: RetryableError | None = None) -> bool:
        """Whether the file `name` contains exactly `data`. `lost` is the error of a PUT without response."""
        try:
            return _contains(self, name, data)
        except (MissingError, ChangedError):
            return False
        except RetryableError as error:
            raise self._unknown(name, lost or error) from (lost or error)

    def _unknown(self, name: str, cause: RetryableError) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"{name}: unknown whether it was written ({cause.message})",
            next_step="check the file when the storage responds again, and save again",
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
            raise ConfigurationError(f"{self._origin.identity} can only be read", next_step="write without `origin=`")
        return self._origin


# --- local directory ------------------------------------------------------------------------------


class LocalStorage:
    """A directory of a local or mounted file system."""

    def __init__(self, path: str, *, sync: bool = True) -> None:
        self._path = absolute_path(path)
        self._sync = sync

    @property
    def url(self) -> str:
        return self._path

    def prepare(self) -> None:
        with _translated(self._path):
            new = list(_missing_directories(self._path))
            try:
                os.makedirs(self._path, exist_ok=True)
            except OSError as error:
                if error.errno in _DISK_FULL:
                    raise
                raise _not_created(self._path, error) from error
            if self._sync:
                # The checkpoint is durable only if the entries of its parent directories are.
                for directory in new:
                    _sync_directory(os.path.dirname(directory))

    def open_writer(self, name: str) -> LocalWriter:
        return LocalWriter(self._path, name, sync=self._sync)

    def publish(self, name: str, data: Buffer, *, replace: bool) -> None:
        writer = LocalWriter(self._path, name, sync=self._sync, replace=replace)
        try:
            with writer:
                writer.write(data)
        except StorageError as error:
            # A disk may fail after the rename, when others may have seen the file.
            if writer.was_renamed and self._may_contain(name, data):
                raise OutcomeUnknownError(
                    f"{self.url}: {name} may not survive a power failure ({error.message})",
                    next_step="check the disk, and save again",
                ) from error
            raise

    def _may_contain(self, name: str, data: Buffer) -> bool:
        try:
            return _contains(self, name, data)
        except MissingError:
            return False
        except MillraceError:
            return True

    def stat(self, name: str) -> StoredFile:
        path = self._file(name)
        with _translated(path):
            try:
                info = os.stat(path)
            except NotADirectoryError as error:  # a file in the place of the directory
                raise FileNotFoundError(path) from error
            if not os.path.isfile(path):
                raise FileNotFoundError(path)
            return _describe(name, info)

    def read(self, file: StoredFile, start: int, stop: int) -> Buffer:
        path = self._file(file.name)
        if start == stop:
            return b""
        with _translated(path), open(path, "rb", buffering=0) as stream:
            # Not a bytearray, which is first filled with zeros.
            view, position = np.empty(stop - start, dtype=np.uint8).data, 0
            while position < len(view):
                count = os.preadv(stream.fileno(), [view[position:]], start + position)
                if count == 0:
                    raise StorageError(f"{path} was truncated during the read", next_step="load again")
                position += count
            return view

    def names(self) -> Sequence[str]:
        return self._entries(_is_file)

    def files(self) -> Sequence[StoredFile]:
        return self._described(self.names())

    def directories(self) -> Sequence[StoredFile]:
        """The directories in this directory. Empty when it does not exist."""
        return self._described(self._entries(lambda entry: not _is_file(entry) and entry.is_dir()))

    def _entries(self, matches: Callable[[os.DirEntry[str]], bool]) -> Sequence[str]:
        with _translated(self._path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(entry.name for entry in os.scandir(self._path) if matches(entry))
        return []

    def _described(self, names: Sequence[str]) -> Sequence[StoredFile]:
        found = []
        for name in names:
            path = self._file(name)
            with contextlib.suppress(ObjectNotFoundError), _translated(path):  # removed since it was listed
                found.append(_describe(name, _stat(path)))
        return found

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            path = self._file(name)
            with _translated(path), contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def sync_names(self) -> None:
        """Sync the directory entries to disk. A missing directory is not an error."""
        with contextlib.suppress(ObjectNotFoundError), _translated(self._path):
            _sync_directory(self._path)

    def _file(self, name: str) -> str:
        return os.path.normpath(os.path.join(self._path, name))


def require_unchanged(storage: LocalStorage, file: StoredFile) -> None:
    """Raise `ChangedError` if another file, or none, has the name of `file` by now."""
    try:
        found = storage.stat(file.name)
    except MissingError:
        found = None
    # Not by the inode, which some mounted object stores change.
    if found is None or (found.size, found.modified) != (file.size, file.modified):
        raise ChangedError(f"{storage.url}/{file.name} was replaced during the read", next_step="load again")


class LocalWriter:
    """Writes a file under a temporary name. `close` syncs the file, renames it, and syncs the directory.

    Not thread-safe. An existing file is replaced with `replace`, else `ObjectExistsError` is raised.
    """

    def __init__(self, directory: str, name: str, *, sync: bool, replace: bool = True) -> None:
        self._directory = directory
        self._path = os.path.join(directory, name)
        self._temporary = os.path.join(directory, f".{name}.{uuid.uuid4().hex[:8]}.tmp")
        self._replace = replace
        self._finished = False
        self.was_renamed = False
        """Whether the file may have its name, whatever failed afterwards."""
        with _translated(self._path):
            try:
                self._file = open(self._temporary, "xb", buffering=0)  # noqa: SIM115 - closed by close or abort
            except FileNotFoundError as error:  # the directory was removed, or files cannot be created in it (/proc)
                raise ObjectNotFoundError(
                    f"{self._path} cannot be created ({error.strerror})",
                    next_step="check that its directory exists, and that files can be created there",
                ) from error
        self._disk = _DiskWriter(self._file.fileno()) if sync else None

    def write(self, data: Buffer, /) -> int:
        view = memoryview(data).cast("B")
        with _translated(self._path):
            if self._disk is not None:
                self._disk.write(view)
            else:
                self._write_to_page_cache(view)
        return len(view)

    def _write_to_page_cache(self, view: memoryview) -> None:
        position = 0
        while position < len(view):
            position += self._file.write(view[position:])

    @property
    def written(self) -> tuple[int, float] | None:
        """Bytes that are on the disk, and the seconds that it needed for them. None without `sync`."""
        return None if self._disk is None else self._disk.written

    def close(self) -> None:
        if self._finished:
            return
        try:
            with _translated(self._path):
                if self._disk is not None:
                    self._disk.finish()
                self._file.close()
                self.was_renamed = True
                if self._replace:
                    os.replace(self._temporary, self._path)
                else:
                    _move_new(self._temporary, self._path)
                if self._disk is not None:
                    _sync_directory(self._directory)
            self._finished = True
        finally:
            self.abort()

    def abort(self) -> None:
        if self._finished:
            return
        self._finished = True
        if self._disk is not None:
            self._disk.stop()
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


class _DiskWriter:
    """Writes a file from its beginning to the disk, in a thread, past the page cache (`O_DIRECT`).

    Through the page cache, the kernel copies each byte, which takes .3 CPU-s per GB, or 2.5 in a virtual machine whose host
    must first provide the pages, and other cached files are evicted. Not thread-safe.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.written = (0, 0.0)
        """Bytes on the disk, and the seconds of writing them."""
        self._pool = ThreadPool(self._write_block, 1)
        self._pending: deque[Any] = deque()
        self._block: Any = None
        self._filled = self._position = 0
        self._is_direct = False

    def write(self, view: memoryview) -> None:
        """Append bytes. Waits for the disk while all blocks are in use. Raises the error of an earlier block."""
        rest = np.frombuffer(view, dtype=np.uint8)
        while rest.size:
            if self._block is None:
                self._block, self._filled = self._free_block(), 0
            part = rest[: BLOCK_BYTES - self._filled]
            self._block[self._filled : self._filled + part.size] = part
            self._filled += part.size
            rest = rest[part.size :]
            if self._filled == BLOCK_BYTES:
                if self._position == 0:
                    self._is_direct = self._set_direct(True)
                self._submit(self._block)
                self._block, self._filled = None, 0

    def finish(self) -> None:
        """Write what is left, and sync the file."""
        # A file of less than one block is not written directly.
        aligned = self._filled - self._filled % _ALIGNMENT if self._position else 0
        if aligned:
            self._submit(self._block[:aligned])
        while self._pending:
            self._pending.popleft().result()
        if self._filled > aligned:
            self._set_direct(False)
            self._write_at(self._block[aligned : self._filled], self._position)
        os.fsync(self._descriptor)
        self.stop()

    def stop(self) -> None:
        """End the thread. Blocks that it has not begun are dropped. Idempotent."""
        while self._pending:
            self._pending.popleft().is_cancelled = True
        self._pool.close()
        self._block = None

    def _free_block(self) -> Any:
        if len(self._pending) == _BLOCKS - 1:
            return self._pending.popleft().result()
        memory = np.empty(BLOCK_BYTES + _ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + BLOCK_BYTES]

    def _submit(self, block: Any) -> None:
        self._pending.append(self._pool.submit((block, self._position)))
        self._position += block.size

    def _write_block(self, job: tuple[Any, int]) -> Any:
        block, position = job
        began = time.monotonic()
        try:
            self._write_at(block, position)
        except OSError as error:
            if not (self._is_direct and error.errno == errno.EINVAL):
                raise
            self._is_direct = not self._set_direct(False)  # the file system accepts the flag, but not the write
            self._write_at(block, position)
        if not self._is_direct and position % _SYNC_BYTES == 0:
            os.fdatasync(self._descriptor)
        self.written = (position + block.size, self.written[1] + time.monotonic() - began)
        return block

    def _write_at(self, data: Any, position: int) -> None:
        done = 0
        while done < data.size:
            done += os.pwrite(self._descriptor, data[done:], position + done)

    def _set_direct(self, value: bool) -> bool:
        """Turn direct writes on or off. Returns whether the file system allows it."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if value else flags & ~os.O_DIRECT)
        except OSError:
            return False
        return True


def _describe(name: str, info: os.stat_result) -> StoredFile:
    return StoredFile(name, info.st_size, f"{info.st_ino}-{info.st_mtime_ns}", info.st_mtime)


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return True  # for example a loop of links: reading it raises, listing the other files does not


def _stat(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except FileNotFoundError:
        raise
    except OSError:
        return os.lstat(path)  # as in `_is_file`


def _missing_directories(path: str) -> Iterator[str]:
    """The missing directories of an absolute path, the deepest first."""
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        yield path
        path = os.path.dirname(path)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _move_new(temporary: str, path: str) -> None:
    """Rename `temporary` to `path` in one atomic step. Raises `FileExistsError` when `path` exists."""
    try:
        # A plain rename would replace an existing file.
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_new(temporary, path)
        return
    os.unlink(temporary)


def _rename_new(temporary: str, path: str) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    source, target = os.fsencode(temporary), os.fsencode(path)
    if library.renameat2(_AT_FDCWD, source, _AT_FDCWD, target, _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


def _not_created(path: str, error: OSError) -> MillraceError:
    """The error for a directory that cannot be created. `FileExistsError`: it has the name of a file."""
    kind = DeniedError if isinstance(error, PermissionError) else StorageError
    reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
    return kind(
        f"the directory {path} cannot be created ({reason})",
        next_step="choose a directory in which this user can create files",
    )


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """Convert errors of the operating system to `millrace.errors`, with the path."""
    try:
        yield
    except MillraceError:
        raise
    except FileNotFoundError as error:
        raise ObjectNotFoundError(f"{path} does not exist", next_step="check the name") from error
    except FileExistsError as error:
        raise ObjectExistsError(f"{path} exists already", next_step="choose another name") from error
    except PermissionError as error:
        raise DeniedError(f"access to {path} was denied", next_step="check its owner and mode") from error
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise DiskFullError(
                f"no room to write {path}", next_step="free space, or raise the quota or file size limit"
            ) from error
        raise StorageError(f"{path} failed ({error.strerror})", next_step="check the path and the disk") from error
