"""Writes complete objects with libraries that publish in different ways. An incomplete object never becomes visible.

- Storages with directories (files, sftp, smb, hdfs): under another name next to the target, then renamed.
- fsspec's memory: under another name, then copied, which is atomic there.
- All others accept an object in one request or in parts: they get it whole, from a local file.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.spec import AbstractFileSystem
from typing_extensions import Buffer

from millrace.errors import ObjectExistsError, UsageError
from millrace.origin.fsspec_origin.clients import innermost
from millrace.origin.fsspec_origin.naming import PART_PREFIX
from millrace.origin.fsspec_origin.translation import kind_of
from millrace.origin.upload import PART_BYTES


def write(fs: Any, path: str, parts: Iterable[Buffer]) -> None:
    """Create or replace the object `path` atomically. An exception from `parts` changes nothing."""
    if _renames(fs) or isinstance(innermost(fs), MemoryFileSystem):
        _write_next_to(fs, path, parts)
        return
    with tempfile.TemporaryFile() as whole:  # without a name in its directory, where a killed process would leave it
        for part in parts:
            whole.write(part)
        whole.flush()
        if type(innermost(fs)).put_file is AbstractFileSystem.put_file:
            whole.seek(0)
            _copy(fs, whole, path)
        else:
            fs.put_file(f"/proc/self/fd/{whole.fileno()}", path)


def _copy(fs: Any, whole: Any, path: str) -> None:
    """As fsspec's `put_file`, which closes the object after a failed write, too, and so publishes its first part."""
    fs.makedirs(fs._parent(path), exist_ok=True)
    file = fs.open(path, "wb")
    try:
        shutil.copyfileobj(whole, file, PART_BYTES)
    except BaseException:
        with contextlib.suppress(Exception):  # the first failure is the one to report
            file.closed = True  # otherwise the garbage collection would close it
            file.discard()
        raise
    file.close()


def write_one(fs: Any, path: str, data: Buffer) -> None:
    """Create or replace an object whose bytes are in memory."""
    if _renames(fs):
        _write_next_to(fs, path, (data,))
    else:
        fs.pipe_file(path, bytes(data))


def create(fs: Any, path: str, data: Buffer, url: str) -> None:
    """Create a new object. Raises `ObjectExistsError`, and `UsageError` if the library cannot do this.

    In a storage with directories other readers may see its first part for a moment, and permanently if the writer dies.
    """
    inner = innermost(fs)
    if isinstance(inner, MemoryFileSystem):
        name = inner._strip_protocol(_inside(fs, path))
        mine = MemoryFile(inner, name, bytes(data))
        if inner.store.setdefault(name, mine) is not mine:
            raise ObjectExistsError(f"{url} exists already", next_step="choose another name")
        return
    if _creates(inner):
        _create_on_condition(fs, path, data, url)
        return
    if not (isinstance(inner, LocalFileSystem) or _is_sftp(inner)):
        raise UsageError(
            f"the library behind {url} cannot create an object only if it is absent", next_step="use another storage"
        )

    parent = path.rpartition("/")[0]
    if parent and not fs.isdir(parent):
        _make_directory(fs, parent)
    try:
        file = fs.open(path, "xb")
    except FileExistsError:
        raise
    except OSError as error:
        if _is_sftp(inner) and fs.exists(path):  # its protocol has one code for every failure
            raise ObjectExistsError(f"{url} exists already", next_step="choose another name") from error
        raise
    try:
        with file:
            file.write(data)
    except BaseException:
        with contextlib.suppress(Exception):  # the first failure is the one to report
            fs.rm_file(path)
        raise


def _create_on_condition(fs: Any, path: str, data: Buffer, url: str) -> None:
    try:
        fs.pipe_file(path, bytes(data), mode="create")
    except OSError as error:
        fs.invalidate_cache()
        if error.errno == errno.EINVAL and fs.exists(path):  # s3fs' error for a failed condition
            raise ObjectExistsError(f"{url} exists already", next_step="choose another name") from error
        raise


def remove(fs: Any, path: str) -> None:
    """Remove one object or one empty directory. A missing object and a directory with content are not errors."""
    try:
        fs.rm_file(path)
    except FileNotFoundError:
        return
    except Exception:
        fs.invalidate_cache()
        if not fs.exists(path):
            return
        if not fs.isdir(path):
            raise
        if not fs.ls(path):  # some libraries remove a directory with its content
            with contextlib.suppress(FileNotFoundError):
                fs.rmdir(path)


def _write_next_to(fs: Any, path: str, parts: Iterable[Buffer]) -> None:
    directory, separator, _ = path.rpartition("/")
    temporary = f"{directory}{separator}{PART_PREFIX}{uuid.uuid4().hex}"

    try:
        with _opened(fs, temporary, path) as file:
            for part in parts:
                file.write(part)
        if _renames(fs):
            _rename(fs, temporary, path)
        else:
            fs.cp_file(temporary, path)
            fs.rm_file(temporary)
    except BaseException:
        with contextlib.suppress(Exception):  # the first failure is the one to report
            fs.rm_file(temporary)
        raise


@contextlib.contextmanager
def _opened(fs: Any, temporary: str, path: str) -> Iterator[Any]:
    if fs.isdir(path):
        raise IsADirectoryError(path)
    parent = path.rpartition("/")[0]
    if _renames(fs) and parent and not fs.isdir(parent):  # some libraries report a missing one only at the close
        _make_directory(fs, parent)
    with fs.open(temporary, "wb") as file:
        yield file


def _make_directory(fs: Any, path: str) -> None:
    """Create a directory and its parents. Retried, because another process may create the same ones."""
    for left in reversed(range(path.count("/") + 2)):
        try:
            fs.makedirs(path, exist_ok=True)
        except Exception:
            fs.invalidate_cache()
            if fs.isdir(path):
                return
            if not left:
                raise
        else:
            return


def _rename(fs: Any, source: str, target: str) -> None:
    try:
        fs.mv(source, target)
    except OSError as error:
        if not issubclass(kind_of(error), FileExistsError):
            raise
        # smb does not replace a file. The old one is removed last: the second step may fail, too.
        old = f"{source}-old"
        fs.mv(target, old)
        try:
            fs.mv(source, target)
        except BaseException:
            with contextlib.suppress(Exception):  # the first failure is the one to report
                fs.mv(old, target)
            raise
        with contextlib.suppress(Exception):  # the new one is complete
            fs.rm_file(old)


def _renames(fs: Any) -> bool:
    """Whether the library itself can rename; otherwise fsspec copies."""
    return type(innermost(fs)).mv is not AbstractFileSystem.mv


def _creates(fs: Any) -> bool:
    """Whether it is a client of an object store with conditional puts."""
    return isinstance(fs, AsyncFileSystem) and "mode" in inspect.signature(type(fs)._pipe_file).parameters


def _inside(fs: Any, path: str) -> str:
    """The path in the innermost file system."""
    while fs is not innermost(fs):
        path, fs = fs._join(path), fs.fs
    return path


def _is_sftp(fs: Any) -> bool:
    return type(fs).__module__ in ("fsspec.implementations.sftp", "sshfs.spec")
