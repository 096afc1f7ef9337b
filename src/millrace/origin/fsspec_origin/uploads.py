"""Writes whole objects, and none that is half there, with libraries that publish in different ways.

- Storages with directories (files, sftp, smb, hdfs): under another name beside the target, then renamed.
- fsspec's memory: under another name, then copied, which there is one step.
- All others take an object in one request, or in parts that they join: they get it whole, from a file on this machine.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
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


def write(fs: Any, path: str, parts: Iterable[Buffer]) -> None:
    """Make or replace the object `path` of these bytes, at once. An exception from `parts` leaves everything as it was."""
    if _renames(fs) or isinstance(innermost(fs), MemoryFileSystem):
        _write_beside(fs, path, parts)
        return
    with tempfile.NamedTemporaryFile(prefix="millrace-upload-") as whole:
        for part in parts:
            whole.write(part)
        whole.flush()
        fs.put_file(whole.name, path)


def write_one(fs: Any, path: str, data: Buffer) -> None:
    """Make or replace an object of bytes that are here."""
    if _renames(fs):
        _write_beside(fs, path, (data,))
    else:
        fs.pipe_file(path, bytes(data))


def create(fs: Any, path: str, data: Buffer, url: str) -> None:
    """Make an object where there is none. Raises `ObjectExistsError`, and `UsageError` where the library cannot do this.

    In a storage with directories others may see the first part of it for a moment, and for good where the writer dies.
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
            f"the library behind {url} cannot write only where nothing is", next_step="use a storage that can"
        )

    parent = path.rpartition("/")[0]
    if parent and not fs.isdir(parent):
        _make_directory(fs, parent)
    try:
        with fs.open(path, "xb") as file:
            file.write(data)
    except FileExistsError:
        raise
    except OSError as error:
        if _is_sftp(inner) and fs.exists(path):  # its protocol has one word for every failure
            raise ObjectExistsError(f"{url} exists already", next_step="choose another name") from error
        raise


def _create_on_condition(fs: Any, path: str, data: Buffer, url: str) -> None:
    try:
        fs.pipe_file(path, bytes(data), mode="create")
    except OSError as error:
        fs.invalidate_cache()
        if error.errno == errno.EINVAL and fs.exists(path):  # what s3fs makes of a condition that does not hold
            raise ObjectExistsError(f"{url} exists already", next_step="choose another name") from error
        raise


def remove(fs: Any, path: str) -> None:
    """Remove one object, or a directory with nothing in it. What does not exist, or is not empty, is no error."""
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
        if not fs.ls(path):  # some libraries remove a directory with all that is in it
            with contextlib.suppress(FileNotFoundError):
                fs.rmdir(path)


def _write_beside(fs: Any, path: str, parts: Iterable[Buffer]) -> None:
    directory, separator, _ = path.rpartition("/")
    beside = f"{directory}{separator}{PART_PREFIX}{uuid.uuid4().hex}"

    try:
        with _opened(fs, beside, path) as file:
            for part in parts:
                file.write(part)
        if _renames(fs):
            _rename(fs, beside, path)
        else:
            fs.cp_file(beside, path)
            fs.rm_file(beside)
    except BaseException:
        with contextlib.suppress(Exception):  # the first failure is the one to tell
            fs.rm_file(beside)
        raise


@contextlib.contextmanager
def _opened(fs: Any, beside: str, path: str) -> Iterator[Any]:
    if fs.isdir(path):
        raise IsADirectoryError(path)
    parent = path.rpartition("/")[0]
    if _renames(fs) and parent and not fs.isdir(parent):  # some find out at the close only that there is none
        _make_directory(fs, parent)
    with fs.open(beside, "wb") as file:
        yield file


def _make_directory(fs: Any, path: str) -> None:
    """Make a directory and those above it. Another who makes the same ones is in the way once for each of them."""
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
    except FileExistsError:  # smb: one that is in the way is not replaced
        fs.rm_file(target)
        fs.mv(source, target)


def _renames(fs: Any) -> bool:
    """Whether moving is the library's own, and not a copy."""
    return type(innermost(fs)).mv is not AbstractFileSystem.mv


def _creates(fs: Any) -> bool:
    """Whether it is a client of an object store that can put an object on the condition that there is none."""
    return isinstance(fs, AsyncFileSystem) and "mode" in inspect.signature(type(fs)._pipe_file).parameters


def _inside(fs: Any, path: str) -> str:
    """What the innermost file system calls a path."""
    while fs is not innermost(fs):
        path, fs = fs._join(path), fs.fs
    return path


def _is_sftp(fs: Any) -> bool:
    return type(fs).__module__ in ("fsspec.implementations.sftp", "sshfs.spec")
