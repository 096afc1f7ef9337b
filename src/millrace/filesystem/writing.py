"""The half of the file system that writes, copies and removes. Everything that it changes, the cache forgets."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from fsspec.core import get_compression, has_magic

from millrace.cache.failures import disk_errors
from millrace.errors import (
    ConfigurationError,
    IsDirectoryError,
    NotDirectoryError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    UsageError,
)
from millrace.filesystem.listing import ListingFileSystem, parents
from millrace.filesystem.paths import names_directory
from millrace.filesystem.uploads import CompressedUpload, UploadFile

_PIPE_BYTES = 16 << 20
_COPY_BYTES = 16 << 20
_DELETE_KEYS = 1000


class WritingFileSystem(ListingFileSystem):
    """Writes go straight to the origin; an object becomes visible when all of it is there."""

    _rooted: bool

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: dict[str, Any] | None = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """fsspec's. A write is published when the file is closed and not when an exception ended it, see `UploadFile`."""
        if compression is None or "b" not in mode or "r" in mode:
            return super().open(path, mode, block_size, cache_options, compression, **kwargs)
        from fsspec.compression import compr

        upload = super().open(path, mode, block_size, cache_options, **kwargs)
        name = get_compression(path, compression)
        return upload if name is None else CompressedUpload(upload, compr[name])

    def _open_for_writing(self, path: str, mode: str, *, autocommit: bool) -> UploadFile:
        if mode not in ("wb", "xb"):
            raise ConfigurationError(f"cannot open {path} with mode {mode!r}", next_step="use 'rb', 'wb' or 'xb'")
        if not autocommit:
            self._refuse_transaction()
        key = self.key_of(path)
        if mode == "xb" and self.exists(key):
            raise ObjectExistsError(f"{self.unstrip_protocol(key)} exists already", next_step="choose another name")
        return UploadFile(self._origin.open_writer(key), path=key, on_published=lambda: self._changed(key))

    @property
    def transaction(self) -> NoReturn:
        """Raises `UsageError`: what is written becomes visible file by file."""
        self._refuse_transaction()

    def start_transaction(self) -> NoReturn:
        """Raises `UsageError`: what is written becomes visible file by file."""
        self._refuse_transaction()

    def _refuse_transaction(self) -> NoReturn:
        raise UsageError(
            "a write cannot be held back until the end of a transaction",
            next_step="write without fs.transaction and without autocommit=False; each file is published at its close",
        )

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **_: Any) -> None:
        """Write one object: above 16 MiB in parts, except with `mode="create"`, which one conditional request has to do."""
        key = self.key_of(path)
        try:
            if mode != "create" and memoryview(value).nbytes > _PIPE_BYTES:
                with self._origin.open_writer(key) as writer:
                    writer.write(value)
            else:
                self._origin.put(key, value, if_absent=mode == "create")
        finally:
            self._changed(key)  # also when no answer came: it may have been written all the same

    def touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        if truncate or not self.exists(path):
            self.pipe_file(path, b"")

    # --- names with a slash at their end, as pyarrow takes them ---------------------------------------

    def require_file_name(self, path: str) -> None:
        """Raises where `path` ends in a slash: `NotDirectoryError`, `IsDirectoryError` or `ObjectNotFoundError`."""
        if not names_directory(path):
            return
        key = self.key_of(path)
        name = self.unstrip_protocol(key)
        if self.info(key)["type"] == "file":
            raise NotDirectoryError(f"{name} is a file, not a directory", next_step="leave out the slash at its end")
        raise IsDirectoryError(f"{name} is a directory", next_step="name a file in it")

    def require_new_file_name(self, path: str) -> None:
        """Raises `IsDirectoryError` where `path` ends in a slash, whether there is something of this name or not."""
        if names_directory(path):
            raise IsDirectoryError(
                f"{self.unstrip_protocol(self.key_of(path))}/ is a directory's name", next_step="leave out the slash"
            )

    # --- copying ----------------------------------------------------------------------------------

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Copy one object through this machine and its cache. A directory needs no copy: it exists by what lies in it."""
        source, target = self.key_of(path1), self.key_of(path2)
        if source == target or self.isdir(source):
            return
        with self.open(source) as file, self.open(target, "wb") as copy:
            while data := file.read(_COPY_BYTES):
                copy.write(data)

    # --- removing ---------------------------------------------------------------------------------

    def rm_file(self, path: str) -> None:
        key = self.key_of(path)
        if self.info(key)["type"] == "directory":  # object stores do not say whether there was something to remove
            raise IsDirectoryError(f"{self.unstrip_protocol(key)} is a directory", next_step="pass recursive=True")
        self._delete([key])

    def _rm(self, path: str) -> None:
        self.rm_file(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove objects, and with `recursive` everything below directories, as the origin has it now.

        `path` is one or a list of them; one with `*`, `?` or `[` is a pattern unless an object has just that name. Raises
        `ObjectNotFoundError`, and `IsDirectoryError` for a directory without `recursive`. A folder marker on AWS
        (an empty object whose name ends in a slash) is not removed: obstore cannot name it.
        """
        for item in [path] if isinstance(path, str | os.PathLike) else list(path):
            for key in self._named(item):
                if not recursive:
                    self.rm_file(key)
                elif maxdepth is None:
                    self.rm_tree(key)
                else:
                    self._delete(self.find(key, maxdepth=maxdepth))

    def rm_below(self, path: str) -> None:
        """Remove everything below a directory. Raises `ObjectNotFoundError` where there is none."""
        key = self.key_of(path)
        entry = self.info(key)
        if entry["type"] == "file":
            raise UsageError(f"{self.unstrip_protocol(key)} is no directory", next_step="name a directory")
        self._remove_below(key)

    def _named(self, path: Any) -> list[str]:
        key = self.key_of(path)
        if not has_magic(key) or self.exists(key):
            return [key]
        found: list[str] = self.glob(key)
        if not found:
            raise ObjectNotFoundError(f"nothing is called {self.unstrip_protocol(key)}", next_step="check the pattern")
        return found

    def rm_tree(self, path: str) -> None:
        """`rm(path, recursive=True)` of exactly this name."""
        key = self.key_of(path)
        if not key.strip("/"):
            raise UsageError("the root is not removed", next_step="name what to remove")
        if self._rooted and os.path.islink(key):
            self._delete([key])  # the link, not what it leads to
            return
        is_file = self.info(key)["type"] == "file"
        self._remove_below(key)
        if not self._rooted:
            self._delete([key] if "/" in key else [])  # an object of the directory's own name; a bucket stays
        elif is_file:
            self._delete([key])
        else:
            with disk_errors(key):
                os.rmdir(key)

    def _remove_below(self, key: str) -> None:
        if self._rooted:
            self._remove_below_local(key)
            return
        directories: set[str] = set()
        for page in self._origin.list_all(key):  # not what the cache remembers: nothing may stay behind
            self._delete([info.key.rstrip("/") for info in page])
            directories.update(name for info in page for name in parents(info.key, key))
        # Servers with real directories (SeaweedFS) keep empty ones; elsewhere this removes nothing.
        self._delete(sorted(directories, reverse=True))

    def _remove_below_local(self, key: str) -> None:
        if not os.path.isdir(key):
            return
        below = [os.path.join(base, name) for base, _, names in os.walk(key) for name in names]
        with disk_errors(key):
            for entry in list(os.scandir(key)):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
        self._forget(below)
        self._forget([f"{key}/"])

    def _delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _DELETE_KEYS):
            batch = keys[start : start + _DELETE_KEYS]
            try:
                self._origin.delete(batch)
            finally:
                self._forget(batch)

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Make a local directory. Those of an object store exist as soon as something lies in them: nothing to do."""
        self._make_directory(path, create_parents=create_parents, exist_ok=False)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a local directory. Those of an object store exist as soon as something lies in them: nothing to do."""
        self._make_directory(path, create_parents=True, exist_ok=exist_ok)

    def _make_directory(self, path: str, *, create_parents: bool, exist_ok: bool) -> None:
        if not self._rooted:
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
                    f"{os.path.dirname(key)} does not exist", next_step="make it first"
                ) from error
            raise
        self._forget([key])

    # --- inside -----------------------------------------------------------------------------------

    def _changed(self, key: str) -> None:
        self._forget([key])

    def _forget(self, keys: Iterable[str]) -> None:
        self.node.metadata.forget(self._origin, *keys)
