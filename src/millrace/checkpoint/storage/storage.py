"""Opens the storage of one checkpoint, and stores checkpoints in local directories: `LocalStorage`, `LocalWriter`.

File names are relative to the checkpoint. `../sibling/name` is a file of a sibling checkpoint, for reading only. A file
becomes visible under its name only when it is complete and durable.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import fcntl
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from types import TracebackType
from typing import Any, Self

import numpy as np
from typing_extensions import Buffer

from millrace.checkpoint.arguments import ReadThroughMode, mapping, path_text, read_through_mode
from millrace.checkpoint.storage.base import CheckpointStorage, StoredFile, contains
from millrace.checkpoint.storage.object_storage import ObjectStorage, cached_reads
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
    StorageError,
    UsageError,
)
from millrace.origin import Readable, origin_for_url, service_of, split_url
from millrace.runtime.pipeline import Call, ThreadPool

# A file is written to the disk in blocks of this size. Larger ones are not faster.
BLOCK_BYTES = 4 << 20
# The blocks of a file: while one is filled, the others wait or are written. Without blocks, the syncs that may wait.
_MOST_PENDING = 3
# Direct writes begin and end at multiples of this, in memory and in the file. Devices with larger sectors are rare.
_ALIGNMENT = 4096
# The page cache is synced after this many bytes, so that the disk works meanwhile and the last fsync is short.
_SYNC_BYTES = 32 << 20
Block = np.ndarray[Any, np.dtype[np.uint8]]
_NO_BLOCK: Block = np.empty(0, dtype=np.uint8)  # for a sync alone
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Errors of file systems without hard links: FAT, and some in user space.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK})
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_BROKEN_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


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
            return contains(self, name, data)
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

    Not thread-safe. An existing file is replaced with `replace`, else `ObjectExistsError` is raised. A forked child cannot
    use its parent's writer: each call raises `UsageError`, and `abort` leaves the file to the parent.
    """

    def __init__(self, directory: str, name: str, *, sync: bool, replace: bool = True) -> None:
        self._directory = directory
        self._path = os.path.join(directory, name)
        self._temporary = os.path.join(directory, f".{name}.{uuid.uuid4().hex[:8]}.tmp")
        self._replace = replace
        self._process = os.getpid()
        self._finished = False
        self._failure: BaseException | None = None
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
            self._disk = _DiskWriter(self._file) if sync else None

    def write(self, data: Buffer, /) -> int:
        """Append bytes. After an error or an interrupt the file is removed, and every further call raises the same again."""
        if self._failure is not None:  # a caller may continue, as `torch.save` does to end its archive
            raise self._failure
        self._require_owner()
        if self._finished:
            raise UsageError(f"the writer of {self._path} is closed", next_step="open another one")
        view = memoryview(data).cast("B")
        try:
            with _translated(self._path):
                if self._disk is not None:
                    self._disk.write(view)
                else:
                    self._write_to_page_cache(view)
        except BaseException as error:  # some bytes may be missing
            self._fail(error)
            raise
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
        if self._failure is not None:
            raise self._failure
        self._require_owner()
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
        except BaseException as error:
            self._fail(error)
            raise

    def _require_owner(self) -> None:
        if os.getpid() != self._process:  # it would wait for the parent's thread, or write into the parent's file
            raise UsageError(
                f"the writer of {self._path} was opened before a fork", next_step="open it in the process that writes"
            )

    def _fail(self, error: BaseException) -> None:
        self._failure = copy.copy(error)  # without its traceback, which refers to this writer and to the caller's data
        self.abort()

    def abort(self) -> None:
        if os.getpid() != self._process or (self._finished and self._file.closed):
            return
        self._finished = True
        try:
            if self._disk is not None:
                self._disk.stop()
            with contextlib.suppress(OSError):
                self._file.close()
        finally:  # also if an interrupt ends the wait for the thread, which may use the open file until the next call
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if exc_type is None:
                self.close()
        finally:  # again if an interrupt ended the one of `close`
            self.abort()


class _DiskWriter:
    """Writes a file from its beginning to the disk, in a thread, while the caller produces the next bytes. Not thread-safe.

    On a block device blocks are written past the page cache (`O_DIRECT`). Through it, the kernel copies each byte, which
    takes .3 CPU-s per GB, or 2.5 in a virtual machine whose host must first provide the pages, and evicts other files. Other
    file systems, such as NFS, write through the page cache, which is synced at intervals.
    """

    def __init__(self, file: FileIO) -> None:
        # Not its descriptor, which could be that of another file once this one is closed.
        self._file = file
        self.written = (0, 0.0)
        """Bytes on the disk, and the seconds in which the disk wrote them."""
        self._pool = ThreadPool(self._work, 1)
        self._pending: deque[Call[tuple[Block, int], Block]] = deque()
        # File systems without a device of their own have the major number 0.
        self._in_blocks = os.major(os.fstat(file.fileno()).st_dev) != 0
        self._is_direct = False
        self._block = _NO_BLOCK
        self._filled = self._position = self._synced = 0

    def write(self, view: memoryview) -> None:
        """Append bytes. Waits for the disk if it is far behind. Raises the error of earlier bytes."""
        rest = np.frombuffer(view, dtype=np.uint8)
        if not self._in_blocks:
            self._write_at(rest, self._position)
            self._position += rest.size
            if self._position - self._synced >= _SYNC_BYTES:
                self._submit(_NO_BLOCK)
                self._synced = self._position
            return
        while rest.size:
            if not self._block.size:
                self._block, self._filled = self._free_block(), 0
            part = rest[: BLOCK_BYTES - self._filled]
            self._block[self._filled : self._filled + part.size] = part
            self._filled += part.size
            rest = rest[part.size :]
            if self._filled == BLOCK_BYTES:
                if self._position == 0:
                    self._set_direct(True)
                self._position += BLOCK_BYTES
                self._submit(self._block)
                self._block, self._filled = _NO_BLOCK, 0

    def finish(self) -> None:
        """Write what is left, and sync the file."""
        # A file of less than one block is not written directly.
        aligned = self._filled - self._filled % _ALIGNMENT if self._position else 0
        if aligned:
            self._position += aligned
            self._submit(self._block[:aligned])
        while self._pending:
            self._pending.popleft().result()
        if self._filled > aligned:
            self._set_direct(False)
            self._write_at(self._block[aligned : self._filled], self._position)
        os.fsync(self._file.fileno())
        self.stop()

    def stop(self) -> None:
        """End the thread. Work that it has not begun is dropped. Idempotent."""
        calls = list(self._pending)
        self._pending.clear()
        for call in calls:
            call.is_cancelled = True
        self._pool.close()
        for call in calls:
            call.forget()
        self._block = _NO_BLOCK

    def _free_block(self) -> Block:
        if len(self._pending) == _MOST_PENDING:
            return self._pending.popleft().result()
        memory = np.empty(BLOCK_BYTES + _ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + BLOCK_BYTES]

    def _submit(self, block: Block) -> None:
        if len(self._pending) == _MOST_PENDING:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit((block, self._position)))

    def _work(self, job: tuple[Block, int]) -> Block:
        """Write the block that ends at a position of the file. Returns the block, which can be filled again."""
        block, stop = job
        began = time.monotonic()
        self._write_block(block, stop - block.size)
        if not self._is_direct:
            if stop - self.written[0] < _SYNC_BYTES:
                return block
            began = time.monotonic()  # copying to the page cache is not the work of the disk
            os.fdatasync(self._file.fileno())
        self.written = (stop, self.written[1] + time.monotonic() - began)
        return block

    def _write_block(self, block: Block, position: int) -> None:
        try:
            self._write_at(block, position)
        except OSError as error:
            # Some file systems accept the flag, but not the write.
            if error.errno != errno.EINVAL:
                raise
            self._set_direct(False)
            self._write_at(block, position)

    def _write_at(self, data: Block, position: int) -> None:
        done = 0
        while done < data.size:
            done += os.pwrite(self._file.fileno(), data.data[done:], position + done)

    def _set_direct(self, value: bool) -> None:
        """Turn direct writes on, if the file system supports them, or off."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT if value else flags & ~os.O_DIRECT)
            self._is_direct = value


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
