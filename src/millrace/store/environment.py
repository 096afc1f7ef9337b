"""Opens LMDB for this process, and translates its errors.

LMDB has these limits:
- One environment per process: py-lmdb refuses a second one.
- One reader slot per transaction, so the table is large. Slots of killed readers are cleared on open.
- After a fork the child must open the index again (`node.py` does). It must not close the inherited environment, which would
  wait for threads that do not exist in the child. It must not open the same path, which py-lmdb refuses, so it opens a hard
  link: LMDB's locks belong to the file, not to its name. py-lmdb 3 resolves the link, hence the upper bound on its version.
- LMDB detects processes by POSIX locks on its lock file, at the offset of the process number. If two processes in different
  PID namespaces (containers) have the same number, only one can read; the other gets EAGAIN.
- A process loses these locks when it closes *any* descriptor of that file; the next process would then reset the table of
  readers and the writers' lock. So this module never opens that file after LMDB has.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from millrace.errors import DiskFullError, StorageError
from millrace.runtime import forks
from millrace.runtime.failures import FAILING_ERRNOS, FailingDiskError
from millrace.runtime.private_files import opener, require_file

DATA_NAME = "index.mdb"
DAMAGED_NAME = "damaged"
"""If a file of this name is next to an index, the next process rebuilds the index."""

INDEX_ERRORS = (lmdb.Error, struct.error, UnicodeDecodeError)
"""The errors of reading a damaged index."""

# These do not mean that the file is damaged.
_HARMLESS = (
    lmdb.MapFullError,
    lmdb.ReadersFullError,
    lmdb.TlsFullError,
    lmdb.TxnFullError,
    lmdb.DbsFullError,
    lmdb.MapResizedError,
    lmdb.LockError,
    lmdb.ReadonlyError,
)
_MAP_BYTES = 64 << 30  # address space, not disk
_LEAST_MAP_BYTES = 1 << 30  # if the process may not have that much: enough for a few million objects
_MAX_READERS = 8192
_LOCK_FILE_BYTES = 64 * _MAX_READERS + 4096  # a cache line per reader, and a header


class DamagedIndexError(StorageError):
    """The index cannot be read, and its records are lost. Handled inside the cache."""

    code = "damaged-index"


def translated(error: Exception, path: str) -> StorageError:
    """The Millrace error for one of `INDEX_ERRORS`."""
    if isinstance(error, lmdb.MemoryError):
        return StorageError(
            f"cache index {path}: {error}",
            next_step="give the process more address space ('ulimit -v'): 2 GiB is enough",
        )
    if os.strerror(errno.EAGAIN) in str(error):
        return StorageError(
            f"cache index {path}: a process of another container has the same number as this one ({os.getpid()})",
            next_step="run containers that share a cache directory in one PID namespace (Kubernetes: 'hostPID: true')",
        )
    # LMDB reports a full disk while it writes as a plain system error.
    if isinstance(error, lmdb.DiskError) or os.strerror(errno.ENOSPC) in str(error):
        return DiskFullError(f"cache index {path}: {error}", next_step="free disk space")
    # After a write that failed half-way, LMDB refuses every further call ("panic").
    if isinstance(error, lmdb.PanicError) or any(os.strerror(number) in str(error) for number in FAILING_ERRNOS):
        return FailingDiskError(f"cache index {path}: {error}", next_step="check the disk")
    # A plain `lmdb.Error` is a system error, unless it names one of LMDB's own.
    if isinstance(error, _HARMLESS) or (type(error) is lmdb.Error and "MDB_" not in str(error)):
        return StorageError(f"cache index {path}: {error}", next_step="check the disk and its permissions")
    return DamagedIndexError(
        f"cache index {path}: {error}", next_step="restart the processes that use the cache: the index is then rebuilt"
    )


def _open(path: str, tables: int, map_bytes: int) -> lmdb.Environment:
    """Map `map_bytes`, halved until it succeeds: 'ulimit -v' may leave a process less address space."""
    try:
        return lmdb.open(
            path,
            subdir=False,
            map_size=map_bytes,
            max_dbs=tables,
            max_readers=_MAX_READERS,
            sync=False,
            metasync=False,
            readahead=False,
            mode=0o600,
        )
    except lmdb.MemoryError:
        if map_bytes <= _LEAST_MAP_BYTES:
            raise
        return _open(path, tables, map_bytes // 2)


@contextmanager
def index_errors(path: str) -> Iterator[None]:
    """Translate LMDB's errors on the index at `path`."""
    try:
        yield
    except INDEX_ERRORS as error:
        raise translated(error, path) from error


def _path_for_this_process(directory: Path) -> str:
    """The path at which this process opens the index: a separate hard link for every level of forking."""
    path = directory / DATA_NAME
    if forks.depth() == 0:
        return str(path)
    alias = directory / f"fork{forks.depth()}-{DATA_NAME}"
    for suffix in ("", "-lock"):
        if not os.path.exists(f"{path}{suffix}"):  # the first process creates the file; LMDB initializes an empty one
            os.close(opener(f"{path}{suffix}", os.O_RDWR | os.O_CREAT))
        # In a copy of a store the link is a separate file: an index that no other process writes.
        if os.path.exists(f"{alias}{suffix}") and not os.path.samefile(f"{path}{suffix}", f"{alias}{suffix}"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{alias}{suffix}")
        with contextlib.suppress(FileExistsError):
            os.link(f"{path}{suffix}", f"{alias}{suffix}")
    return str(alias)


def _allocate_lock_file(path: str) -> None:
    """Allocate LMDB's lock file: it is written through a map, and a write to a hole on a full disk kills the process.

    LMDB accepts a longer file. An allocated one may be in use, and is not opened.
    """
    try:
        status = os.stat(path)
        if status.st_size >= _LOCK_FILE_BYTES and status.st_blocks * 512 >= status.st_size:
            return
    except FileNotFoundError:
        pass
    descriptor = opener(path, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(descriptor, 0, _LOCK_FILE_BYTES)
    finally:
        os.close(descriptor)


def open_environment(directory: Path, *, tables: int) -> tuple[lmdb.Environment, str]:
    """Open the index in `directory`. Returns it with the path that its errors name.

    Opened without sync: a killed process loses nothing (the kernel has the pages), and after a crash of the machine the
    index is rebuilt (`rebuild.py`), so a write takes microseconds instead of a disk flush. Raises `DamagedIndexError` when
    the files are not an index, or were cut.
    """
    path = _path_for_this_process(directory)
    for name in (path, f"{path}-lock"):  # LMDB follows links
        require_file(Path(name))
    _allocate_lock_file(f"{path}-lock")
    with index_errors(path):
        environment = _open(path, tables, _MAP_BYTES)
        # Reading past the end of a file that was cut would kill the process.
        needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
        if os.stat(path).st_size < needed:
            environment.close()
            raise DamagedIndexError(
                f"cache index {path}: was cut", next_step="restart the processes that use the cache"
            )
        environment.reader_check()
    return environment, path
