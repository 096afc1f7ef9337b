"""The writing methods of the file system: write, copy, remove. They drop the cached metadata of changed objects."""

from __future__ import annotations

import codecs
import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.core import get_compression, has_magic
from fsspec.utils import other_paths

from millrace.errors import (
    IsDirectoryError,
    NotDirectoryError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    StorageError,
    UsageError,
)
from millrace.figures import listed
from millrace.filesystem.listing import ListingFileSystem, parents
from millrace.filesystem.opens import names_directory
from millrace.filesystem.uploads import CompressedUpload, UploadFile
from millrace.origin.keys import check_readable
from millrace.origin.side_by_side import at_late_end, side_by_side
from millrace.runtime.failures import disk_errors
from millrace.runtime.forks import importing

_PIPE_BYTES = 16 << 20
_COPY_BYTES = 16 << 20
_DELETE_KEYS = 1000
_THREADS = 8
_BYTE_ORDER_MARKS = {"utf-16": codecs.BOM_UTF16, "utf-32": codecs.BOM_UTF32}


_planned_copies: ContextVar[list[tuple[str, str]] | None] = ContextVar("planned_copies", default=None)
"""Set while `mv` plans: `cp_file` then only appends the keys of its source and target."""


class WritingFileSystem(ListingFileSystem):
    """Writes go directly to the origin; an object becomes visible when it is complete."""

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: dict[str, Any] | None = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """fsspec's. A write is published at the close of the file, but not after an exception, see `UploadFile`."""
        if names_directory(path):
            (self.require_file_name if "r" in mode else self.require_new_file_name)(path)
        if "b" not in mode and "r" not in mode:
            text = super().open(path, mode, block_size, cache_options, compression, **kwargs)
            # `TextIOWrapper` writes it to files that can seek only.
            text.buffer.write(_BYTE_ORDER_MARKS.get(codecs.lookup(text.encoding).name, b""))
            return text
        if compression is None or "r" in mode:
            return super().open(path, mode, block_size, cache_options, compression, **kwargs)
        with importing():
            from fsspec.compression import compr

        upload = super().open(path, mode, block_size, cache_options, **kwargs)
        name = get_compression(path, compression)
        return upload if name is None else CompressedUpload(upload, compr[name])

    def _open_for_writing(self, path: str, mode: str, *, autocommit: bool) -> UploadFile:
        if mode not in ("wb", "xb"):
            raise UsageError(
                f"{self.unstrip_protocol(path)} cannot be opened with mode {mode!r}", next_step="use 'rb', 'wb' or 'xb'"
            )
        if not autocommit:
            self._refuse_transaction()
        key = self.key_of(path)
        if mode == "xb" and self.exists(key):
            raise ObjectExistsError(f"{self.unstrip_protocol(key)} exists already", next_step="choose another name")
        return UploadFile(self._origin.open_writer(key), path=key, on_published=lambda: self._changed(key))

    @property
    def transaction(self) -> NoReturn:
        """Raises `UsageError`: each file becomes visible at its close."""
        self._refuse_transaction()

    def start_transaction(self) -> NoReturn:
        """Raises `UsageError`: each file becomes visible at its close."""
        self._refuse_transaction()

    def _refuse_transaction(self) -> NoReturn:
        raise UsageError(
            "transactions are not supported: a write cannot wait for the end of one",
            next_step="write without fs.transaction and without autocommit=False; each file is published at its close",
        )

    def pipe(self, path: Any, value: Any = None, **kwargs: Any) -> None:
        """fsspec's, but a path that ends in a slash raises `IsDirectoryError`; fsspec removes the slash."""
        for name in [path] if isinstance(path, str) else list(path):
            self.require_new_file_name(name)
        super().pipe(path, value, **kwargs)

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **_: Any) -> None:
        """Write one object: above 16 MiB in parts, except with `mode="create"`, which needs one conditional request.

        Raises `IsDirectoryError` for a path with a slash at its end, and `UsageError` for another mode.
        """
        if mode not in ("create", "overwrite"):
            raise UsageError(
                f"{self.unstrip_protocol(path)} cannot be written with mode {mode!r}",
                next_step="use 'overwrite' or 'create'",
            )
        self.require_new_file_name(path)
        key = self.key_of(path)
        with self._changing(key):
            if mode != "create" and memoryview(value).nbytes > _PIPE_BYTES:
                with self._origin.open_writer(key) as writer:
                    writer.write(value)
            else:
                self._origin.put(key, value, if_absent=mode == "create")

    def put_file(
        self, lpath: Any, rpath: str, callback: Any = DEFAULT_CALLBACK, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        """fsspec's, which waits without end for the rest of a local file that becomes shorter while it is read.

        Raises `ObjectChangedError` for such a file, and publishes nothing; `UsageError` for a pipe or device.
        """
        if os.path.isdir(lpath):
            self.makedirs(rpath, exist_ok=True)
            return
        check_readable(os.path.abspath(lpath))
        if mode == "create" and self.exists(rpath):
            raise ObjectExistsError(f"{self.unstrip_protocol(rpath)} exists already", next_step="choose another name")
        with open(lpath, "rb") as file, self.open(rpath, "wb", **kwargs) as upload:
            left = file.seek(0, os.SEEK_END)
            file.seek(0)
            callback.set_size(left)
            while left:
                data = file.read(min(left, _COPY_BYTES))
                if not data:
                    raise ObjectChangedError(f"{lpath} became shorter while it was read", next_step="put it again")
                upload.write(data)
                left -= len(data)
                callback.relative_update(len(data))

    def touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        """Write an empty object; without `truncate` only if there is none.

        Of a storage without conditional requests, an object that another process writes at the same moment may be lost.
        """
        if truncate:
            self.pipe_file(path, b"")
        elif not self.exists(path):
            try:
                self.pipe_file(path, b"", mode="create")
            except (ObjectExistsError, OutcomeUnknownError):
                if not self.exists(path):
                    raise
            except UsageError:  # the storage has no conditional requests
                self.pipe_file(path, b"")

    # --- names that end in a slash: directories -------------------------------------------------------

    def require_file_name(self, path: str) -> None:
        """Raises `NotDirectoryError`, `IsDirectoryError` or `ObjectNotFoundError` if `path` ends in a slash."""
        if not names_directory(path):
            return
        self.info(path)
        raise self.is_directory_error(path)

    def is_directory_error(self, path: str) -> IsDirectoryError:
        """The error for a directory where a file is needed."""
        name = self.unstrip_protocol(self.key_of(path))
        return IsDirectoryError(f"{name} is a directory", next_step="name a file in it")

    def require_new_file_name(self, path: str) -> None:
        """Raises `IsDirectoryError` if `path` ends in a slash, whether the directory exists or not."""
        if names_directory(path):
            raise IsDirectoryError(
                f"{self.unstrip_protocol(self.key_of(path))}/ is the name of a directory", next_step="omit the slash"
            )

    # --- copying ----------------------------------------------------------------------------------

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Copy one object through this machine and its cache. A directory is not copied: it exists through its files."""
        source, target = self.key_of(path1), self.key_of(path2)
        planned = _planned_copies.get()
        if planned is not None:
            planned.append((source, target))
            return
        if source == target or self._is_only_directory(source):
            return
        self.require_new_file_name(path2)
        self._copy(source, target)

    def copy(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        on_error: str | None = None,
        **kwargs: Any,
    ) -> None:
        """fsspec's; an existing object or directory with `*`, `?` or `[` in its name gets the same target as any other.

        Without `recursive`, an object is copied also where a directory has the same name, and a directory is not.
        """
        if isinstance(path1, str) and not recursive and self._is_only_directory(self.key_of(path1)):
            return
        if isinstance(path1, str) and isinstance(path2, str) and has_magic(path1) and self.exists(path1):
            found = self.expand_path(path1, recursive=recursive, maxdepth=maxdepth)
            into = (names_directory(path2) or self.isdir(path2)) and not names_directory(path1)
            path1, path2 = found, other_paths(found, self.key_of(path2), exists=into)
        super().copy(path1, path2, recursive=recursive, maxdepth=maxdepth, on_error=on_error, **kwargs)

    def _copy(self, source: str, target: str) -> str:
        """Copy one object; returns its version, or an older one if it was overwritten at the same moment."""
        try:
            return self._copy_version(source, target)
        except ObjectChangedError:  # since its metadata was cached; nothing was published
            self._changed(source)
            return self._copy_version(source, target)

    def _copy_version(self, source: str, target: str) -> str:
        version = self.checksum(source)
        with self.open(source) as file, self.open(target, "wb") as copy:
            while data := file.read(_COPY_BYTES):
                copy.write(data)
        return version

    def _is_only_directory(self, key: str) -> bool:
        """Whether `key` is a directory. In an object store an object may have the same name; an empty one is its marker."""
        if not self.isdir(key):
            return False
        try:
            return self.is_rooted or not self.describe(key).size
        except ObjectNotFoundError:
            return True

    # --- moving -----------------------------------------------------------------------------------

    def mv(self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Copy files as `copy` does, and then remove those that were copied. A file onto itself stays as it is.

        Raises `IsDirectoryError` for a directory without `recursive`, and `UsageError` for a directory into itself and for
        two files with one target. Files that were overwritten after they were copied stay: then it raises
        `ObjectChangedError` at the end. Local files and directories keep their modes.
        """
        if isinstance(path1, str) and not recursive and self._is_only_directory(self.key_of(path1)):
            raise IsDirectoryError(f"{self.unstrip_protocol(path1)} is a directory", next_step="pass recursive=True")
        planned: list[tuple[str, str]] = []
        token = _planned_copies.set(planned)
        try:
            self.copy(path1, path2, recursive=recursive, maxdepth=maxdepth, on_error="raise")
        finally:
            _planned_copies.reset(token)
        moves = [pair for pair in dict.fromkeys(planned) if self._identity(pair[0]) != self._identity(pair[1])]
        directories = {source for source, _ in moves if self._is_only_directory(source)}
        links = sorted(key for key in directories if self.is_rooted and os.path.islink(key))
        behind = tuple(f"{link}/" for link in links)
        sources = {self._identity(source) for source, _ in moves}
        targets: set[str] = set()
        for source, target in moves:
            if source in directories and self._identity(target).startswith(f"{self._identity(source)}/"):
                raise UsageError(
                    f"{self.unstrip_protocol(source)} cannot be moved into itself", next_step="choose another target"
                )
            if source not in directories and self._identity(target) in sources:
                raise UsageError(
                    f"{self.unstrip_protocol(target)} would be overwritten before it is moved",
                    next_step="move it first, in a call of its own",
                )
            if source not in directories and self._identity(target) in targets:
                raise UsageError(
                    f"{self.unstrip_protocol(target)} would be the target of two files",
                    next_step="move them one by one",
                )
            targets.add(self._identity(target))
        files = [source for source, _ in moves if source not in directories]
        for start in range(0, len(files), _DELETE_KEYS):
            # A newer version than the cached one would be removed and not copied.
            self._changed(*files[start : start + _DELETE_KEYS])
        versions: dict[str, str] = {}
        for source, target in moves:
            mode = _mode_of(source) if self.is_rooted else None  # it may be closed to other users
            if source not in directories:
                versions[source] = self._copy(source, target)
            elif self.is_rooted and not os.path.isdir(target):
                self.makedirs(target, exist_ok=True)
            else:
                continue
            if mode is not None and mode != _mode_of(target):
                with disk_errors(target):
                    os.chmod(target, mode)
        # Of a link only the link is removed, not its target. Nothing is lost if that has changed or was moved, too.
        links += [key for key in versions if self.is_rooted and os.path.islink(key)]
        copied = versions.keys() - links
        self._remove_copied({key: versions[key] for key in sorted(copied) if not key.startswith(behind)})
        self._delete([key for key in links if not key.startswith(behind)])
        self._remove_empty(sorted((key for key in directories if not key.startswith(behind)), reverse=True))

    def _remove_copied(self, versions: Mapping[str, str]) -> None:
        """Remove objects that still have these versions. Raises `ObjectChangedError` at the end if others do not."""
        keys = list(versions)
        kept: list[str] = []
        for start in range(0, len(keys), _DELETE_KEYS):
            batch = keys[start : start + _DELETE_KEYS]
            self._changed(*batch)
            now = dict(zip(batch, side_by_side(self._version_now, batch, _THREADS, "millrace-move"), strict=True))
            kept += [key for key in batch if now[key] not in ("", versions[key])]
            self._delete([key for key in batch if now[key] == versions[key]])
        if kept:
            raise ObjectChangedError(
                f"{listed([self.unstrip_protocol(key) for key in kept], 3)} changed after the copy, and stayed",
                next_step="move it again",
            )

    def _version_now(self, key: str) -> str:
        """The version of an object; empty if it does not exist."""
        try:
            return self.checksum(key)
        except ObjectNotFoundError:
            return ""

    def _identity(self, key: str) -> str:
        """What two names of one file have in common: for local files, the name in the real directory."""
        if not self.is_rooted:
            return key
        directory, name = os.path.split(os.path.normpath(key))
        return os.path.join(os.path.realpath(directory), name)

    def _remove_empty(self, directories: Sequence[str]) -> None:
        """Remove directories that are empty, the deepest first. Object stores have them only by their objects."""
        for key in directories:
            if self.is_rooted:
                with contextlib.suppress(OSError):  # not empty: a file was added meanwhile
                    os.rmdir(key)
                self._changed(f"{key}/")
            elif all(info.key.endswith("/") for page in self._origin.list_all(key) for info in page):
                self._delete([key] if "/" in key else [])  # a server with real directories keeps them

    # --- removing ---------------------------------------------------------------------------------

    def rm_file(self, path: str) -> None:
        key = self.key_of(path)
        # Object stores do not report a missing object.
        if self.info(key)["type"] == "directory" and self._is_only_directory(key):
            raise IsDirectoryError(f"{self.unstrip_protocol(key)} is a directory", next_step="pass recursive=True")
        self._delete([key])

    def _rm(self, path: str) -> None:
        self.rm_file(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove objects, and with `recursive` everything below directories, by a fresh listing of the origin.

        `path` is one path or a list; a path with `*`, `?` or `[` is a pattern unless an object has exactly that name. Raises
        `ObjectNotFoundError`, and `IsDirectoryError` for a directory without `recursive`. A folder marker on AWS
        (an empty object whose name ends in a slash) is not removed: obstore cannot address it.
        """
        items = [path] if isinstance(path, str | os.PathLike) else list(path)
        named = dict.fromkeys(key for item in items for key in self._named(item))  # before a removal: patterns overlap
        for key in named:
            if not recursive:
                self.rm_file(key)
            elif maxdepth is not None:
                self._delete(self.find(key, maxdepth=maxdepth))
            elif named.keys().isdisjoint(parents(key, "")):  # else it is removed with its directory
                self.rm_tree(key)

    def rm_below(self, path: str) -> None:
        """Remove everything below a directory. Raises `ObjectNotFoundError` if it does not exist.

        Nothing below a symbolic link is removed, as in pyarrow's local file system.
        """
        key = self.key_of(path)
        if not key.strip("/"):
            raise UsageError("the root cannot be emptied", next_step="name a directory")
        if self.is_rooted and os.path.islink(key):
            return
        entry = self.info(key)
        if entry["type"] == "file":
            raise NotDirectoryError(f"{self.unstrip_protocol(key)} is not a directory", next_step="name a directory")
        self._remove_below(key)

    def _named(self, path: Any) -> list[str]:
        key = self.key_of(path)
        if not has_magic(key) or self.exists(key):
            if names_directory(path):
                self.info(path)  # raises NotDirectoryError for a file
            return [key]
        found: list[str] = self.glob(key)
        if not found:
            raise ObjectNotFoundError(f"{self.unstrip_protocol(key)}: no match", next_step="check the pattern")
        return found

    def rm_tree(self, path: str) -> None:
        """`rm(path, recursive=True)` of exactly this name."""
        key = self.key_of(path)
        if not key.strip("/"):
            raise UsageError("the root cannot be removed", next_step="name a directory or an object")
        if self.is_rooted and _is_current_directory(key):  # an empty path is one of its names
            raise UsageError(f"file://{key} is the current directory", next_step="name a directory or a file in it")
        if self.is_rooted and os.path.islink(key):
            self._delete([key])  # the link, not its target
            return
        is_file = self.info(key)["type"] == "file"
        self._remove_below(key)
        if not self.is_rooted:
            self._delete([key] if "/" in key else [])  # an object with the name of the directory; a bucket stays
        elif is_file:
            self._delete([key])
        else:
            with self._changing(f"{key}/"), disk_errors(key):
                os.rmdir(key)

    def _remove_below(self, key: str) -> None:
        if self.is_rooted:
            self._remove_below_local(key)
            return
        directories: set[str] = set()
        for page in self._origin.list_all(key):  # not from cached metadata: no object may remain
            self._delete([info.key.rstrip("/") for info in page])
            directories.update(name for info in page for name in parents(info.key, key))
        # Servers with real directories (SeaweedFS) keep empty ones; elsewhere this removes nothing.
        self._delete(sorted(directories, reverse=True))

    def _remove_below_local(self, key: str) -> None:
        if not os.path.isdir(key):
            return
        below = [
            os.path.join(base, name)
            for base, directories, files in os.walk(key)
            for name in (*files, *(f"{name}/" for name in directories))
        ]
        with self._changing(*below, f"{key}/"), disk_errors(key):
            for entry in list(os.scandir(key)):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)

    def _delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _DELETE_KEYS):
            batch = keys[start : start + _DELETE_KEYS]
            with self._changing(*batch):
                self._origin.delete(batch)

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Create a local directory. Does nothing for object stores, where a directory exists through its objects."""
        self._make_directory(path, create_parents=create_parents, exist_ok=False)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a local directory. Does nothing for object stores, where a directory exists through its objects."""
        self._make_directory(path, create_parents=True, exist_ok=exist_ok)

    def _make_directory(self, path: str, *, create_parents: bool, exist_ok: bool) -> None:
        if not self.is_rooted:
            return
        key = self.key_of(path)
        try:
            with disk_errors(key):
                if create_parents:
                    os.makedirs(key, exist_ok=exist_ok)
                else:
                    os.mkdir(key)
        except StorageError as error:
            if isinstance(error.__cause__, FileExistsError):
                raise ObjectExistsError(f"{key} exists already", next_step="choose another name") from error
            if isinstance(error.__cause__, FileNotFoundError):
                raise ObjectNotFoundError(
                    f"{os.path.dirname(key)} does not exist", next_step="create it first"
                ) from error
            raise
        self._changed(key)

    def rmdir(self, path: str) -> None:
        """Remove an empty local directory. Does nothing for object stores, where a directory exists through its objects."""
        if not self.is_rooted:
            return
        key = self.key_of(path)
        if not os.path.isdir(key):
            self.info(path)  # raises for a missing one
            raise NotDirectoryError(f"{self.unstrip_protocol(key)} is not a directory", next_step="remove it with rm")
        with self._changing(f"{key}/"), disk_errors(key):
            os.rmdir(key)

    # --- inside -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _changing(self, *keys: str) -> Iterator[None]:
        """Drop the cached metadata of `keys` after a `with` block that changes them.

        Also after an error, because the objects may have changed. A request that an interrupt leaves in the background
        changes them later: then the metadata is dropped once more.
        """
        try:
            with at_late_end(lambda: self._changed(*keys)):
                yield
        finally:
            self._changed(*keys)

    def _changed(self, *keys: str) -> None:
        """Drop the cached metadata of `keys`."""
        self.node.metadata.invalidate(self._origin, *keys)


def _mode_of(path: str) -> int | None:
    """The mode of a local file; of a directory the mode of its copy, which its owner must fill. None if it is missing."""
    try:
        found = os.stat(path).st_mode
    except OSError:
        return None
    return stat.S_IMODE(found) | (stat.S_IRWXU if stat.S_ISDIR(found) else 0)


def _is_current_directory(path: str) -> bool:
    """Whether `path` is the directory in which this process runs."""
    try:
        return os.path.samefile(path, os.curdir)
    except OSError:  # one of them does not exist
        return False
