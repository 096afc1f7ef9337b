"""Targets of exports: a file, or a directory whose last file makes it complete. Incomplete exports are never visible."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import os
import stat
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from typing_extensions import Buffer

from millrace.checkpoint.format.manifest import MANIFEST_NAME
from millrace.checkpoint.run.run_layout import open_run
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.storage.manifests import is_left_behind
from millrace.checkpoint.storage.storage import LocalStorage, LocalWriter
from millrace.config import absolute_path
from millrace.errors import ConfigurationError, IsDirectoryError, MissingError, ObjectExistsError, UsageError
from millrace.origin import ObjectWriter, origin_for_url, service_of, split_url

_BUFFER_BYTES = 4 << 20


class FileTarget:
    """One file, on a local disk or in an object store."""

    def __init__(self, location: str, options: Mapping[str, Any] | None, *, overwrite: bool) -> None:
        """Makes no request. Raises `ConfigurationError` for a location that is not a file, or a file of a checkpoint."""
        self._location, self._options, self._overwrite = location, options, overwrite
        self._scheme, self._key = split_url(location)
        if not self._key.strip("/") or self._key.endswith("/"):
            raise ConfigurationError(
                f"{location!r} does not name a file", next_step="give the file to write, with its directory"
            )
        if self._local and options:
            raise ConfigurationError("local files take no options", next_step="leave output_options out")
        if not self._local and "/" not in self._key.strip("/"):
            raise ConfigurationError(f"{location!r} is a whole bucket", next_step="give scheme://bucket/name")
        if self._local:
            self._key = absolute_path(self._key)
        name = self._key.rpartition("/")[2]
        if name.endswith(MANIFEST_NAME) or is_left_behind(name):
            raise ConfigurationError(
                f"{location} has the name of a checkpoint's own file", next_step="choose another name"
            )

    @property
    def _local(self) -> bool:
        return service_of(self._scheme).rooted

    def check(self) -> None:
        """Check before the work begins whether the target can be written.

        Raises `ObjectExistsError`, `IsDirectoryError`, and `UsageError` for a device, a pipe or a symbolic link: the
        export would replace it by a file.
        """
        if self._local and os.path.isdir(self._key):
            raise IsDirectoryError(f"{self._location} is a directory", next_step="name a file in it")
        if self._local and os.path.lexists(self._key) and not stat.S_ISREG(os.lstat(self._key).st_mode):
            kind = "a symbolic link" if os.path.islink(self._key) else "a device or a pipe"
            raise UsageError(f"{self._location} is {kind}, not a file", next_step="choose another name")
        if not self._overwrite and self._exists():
            raise ObjectExistsError(
                f"{self._location} exists already", next_step="choose another name, or overwrite it"
            )

    def open(self, count: Callable[[int], None] | None = None) -> FileStream:
        """Begin to write; `count` is called with the number of bytes of each write.

        Leaving the block normally makes the file durable, then visible. After an exception there is no file.
        """
        self.check()
        writer: ObjectWriter
        if self._local:
            directory, name = os.path.split(self._key)
            LocalStorage(directory).prepare()
            writer = LocalWriter(directory, name, sync=True, replace=self._overwrite)
        else:
            origin, key = origin_for_url(self._location, self._options)
            writer = origin.open_writer(key)
        return FileStream(writer, count)

    def _exists(self) -> bool:
        if self._local:
            return os.path.lexists(self._key)
        try:
            origin, key = origin_for_url(self._location, self._options)
            origin.head(key)
        except MissingError:
            return False
        return True


class _Raw(io.RawIOBase):
    def __init__(self, writer: ObjectWriter, count: Callable[[int], None] | None) -> None:
        self._writer, self._count, self._position = writer, count, 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Buffer, /) -> int:
        nbytes = self._writer.write(data)
        self._position += nbytes
        if self._count is not None:
            self._count(nbytes)
        return nbytes


class FileStream(io.BufferedWriter):
    """A buffered stream for `torch.save`, over an `ObjectWriter` that the end of the block publishes or aborts."""

    def __init__(self, writer: ObjectWriter, count: Callable[[int], None] | None = None) -> None:
        super().__init__(_Raw(writer, count), _BUFFER_BYTES)
        self._writer = writer

    def close(self) -> None:
        """Does nothing: the end of the block publishes or aborts the file."""

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if exc_type is None:
                self.flush()
                self._writer.close()
        finally:
            self._writer.abort()


class DirectoryTarget:
    """A directory for a checkpoint in torch's own format, or for a model in several files."""

    def __init__(self, location: str, options: Mapping[str, Any] | None, *, overwrite: bool) -> None:
        self._run = open_run(location, options)
        self.storage: CheckpointStorage = self._run.storage
        self.overwrite = overwrite
        self._is_new = False

    def prepare(self, *, others_allowed: bool = False) -> None:
        """Create the directory. Raises `ObjectExistsError` if it is not empty, unless other files are allowed in it.

        Never overwrites a checkpoint or a run of Millrace: a checkpoint in the directory of a run would hide the run.
        """
        names = self.storage.names()
        if any(name.endswith(MANIFEST_NAME) for name in names):
            raise ObjectExistsError(
                f"{self.storage.url} has a checkpoint of Millrace", next_step="choose another directory"
            )
        if fnmatch.filter(names, "writer-*.json") or self._has_checkpoints():
            raise ObjectExistsError(f"{self.storage.url} is a run of Millrace", next_step="choose another directory")
        if names and not (self.overwrite or others_allowed):
            raise ObjectExistsError(
                f"{self.storage.url} is not empty", next_step="choose another directory, or overwrite it"
            )
        self._is_new = isinstance(self.storage, LocalStorage) and not os.path.lexists(self.storage.url)
        self.storage.prepare()

    def remove_if_new(self) -> None:
        """Remove the directory, after an export that failed, if `prepare` created it and it is empty."""
        if self._is_new:
            with contextlib.suppress(OSError):
                os.rmdir(self.storage.url)

    def _has_checkpoints(self) -> bool:
        with contextlib.suppress(MissingError):
            found = self._run.look()
            return bool(found.checkpoints or found.empty)
        return False
