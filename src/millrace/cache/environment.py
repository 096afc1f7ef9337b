"""Opening LMDB for this process: its traps, and its errors in our own.

Traps handled here: one environment a process (py-lmdb refuses a second); a reader slot a transaction, so the table is
large; slots of killed readers are cleared on open; after a fork the child must open anew (`node.py` sees to it), but must
neither close what it inherited (that waits for threads that do not exist in the child) nor open the same path (py-lmdb
believes it open). It opens a hard link instead: LMDB's locks belong to the file, not to its name. py-lmdb 3 sees through
the link, hence the upper bound on its version. And LMDB tells who is alive by POSIX locks on its lock file, all of which a
process loses as soon as it closes *any* descriptor of that file: the next process would take the index for unused, and
begin the table of readers and the writers' lock anew. So nothing here opens that file once LMDB has.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from millrace.cache.failures import FAILING_ERRNOS, FailingDiskError
from millrace.errors import DiskFullError, StorageError
from millrace.private_files import opener, require_file

DATA_NAME = "index.mdb"
_MAP_BYTES = 64 << 30  # address space, not disk
_LEAST_MAP_BYTES = 1 << 30  # where a process may not have so much: enough for a few million objects
_MAX_READERS = 8192
_LOCK_FILE_BYTES = 64 * _MAX_READERS + 4096  # a cache line a reader, and a head


class DamagedIndexError(StorageError):
    """The index cannot be read; what it said is lost. Handled inside the cache."""

    code = "damaged-index"


def translated(error: lmdb.Error, path: str) -> StorageError:
    """LMDB's error as one of ours."""
    if isinstance(error, lmdb.MemoryError):
        return StorageError(
            f"cache index {path}: {error}", next_step="give the process more address space ('ulimit -v'): 2 GiB will do"
        )
    # LMDB tells a full disk while it writes as a plain system error.
    if isinstance(error, lmdb.DiskError) or os.strerror(errno.ENOSPC) in str(error):
        return DiskFullError(f"cache index {path}: {error}", next_step="free disk space")
    # After a write that failed half-way LMDB refuses everything more: it panics.
    if isinstance(error, lmdb.PanicError) or any(os.strerror(number) in str(error) for number in FAILING_ERRNOS):
        return FailingDiskError(f"cache index {path}: {error}", next_step="check the disk")
    if isinstance(error, (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError, lmdb.VersionMismatchError)):
        return DamagedIndexError(
            f"cache index {path}: {error}", next_step="close what uses the cache; the next start builds the index anew"
        )
    return StorageError(f"cache index {path}: {error}", next_step="check the disk and its permissions")


def _open(path: str, tables: int, map_bytes: int) -> lmdb.Environment:
    """Map as much as `map_bytes`, or half as often as it takes: 'ulimit -v' may leave a process less address space."""
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
    """Turn LMDB's errors on the index at `path` into ours."""
    try:
        yield
    except lmdb.Error as error:
        raise translated(error, path) from error


_fork_depth = 0


def _count_forks() -> None:
    global _fork_depth
    _fork_depth += 1


os.register_at_fork(after_in_child=_count_forks)


def _path_for_this_process(directory: Path) -> str:
    """The name under which this process opens the index: a hard link of its own for every level of forking."""
    path = directory / DATA_NAME
    if _fork_depth == 0:
        return str(path)
    alias = directory / f"fork{_fork_depth}-{DATA_NAME}"
    for suffix in ("", "-lock"):
        if not os.path.exists(f"{path}{suffix}"):  # the first to come makes the file; LMDB fills an empty one in
            os.close(opener(f"{path}{suffix}", os.O_RDWR | os.O_CREAT))
        with contextlib.suppress(FileExistsError):
            os.link(f"{path}{suffix}", f"{alias}{suffix}")
    return str(alias)


def _allocate_lock_file(path: str) -> None:
    """Give LMDB's lock file all of its space: it is written through a map, and a hole on a full disk kills the process.

    LMDB takes a file that is longer than it wants as it is. One that has its space already may be in use, and is not opened.
    """
    try:
        there = os.stat(path)
        if there.st_size >= _LOCK_FILE_BYTES and there.st_blocks * 512 >= there.st_size:
            return
    except FileNotFoundError:
        pass
    descriptor = opener(path, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(descriptor, 0, _LOCK_FILE_BYTES)
    finally:
        os.close(descriptor)


def open_environment(directory: Path, *, tables: int) -> tuple[lmdb.Environment, str]:
    """Open the index in `directory` and return it with the path that its errors name.

    Opened without sync: killing a process loses nothing (the pages are the kernel's), and after a crash of the machine the
    index is not believed (see `rebuild.py`), so a write costs microseconds instead of a disk flush. Raises
    `DamagedIndexError` when the files are no index, or shorter than they were.
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
            raise DamagedIndexError(f"cache index {path} was cut", next_step="remove the cache directory")
        environment.reader_check()
    return environment, path
