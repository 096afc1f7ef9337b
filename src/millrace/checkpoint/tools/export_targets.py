"""Where an export goes: a file, or a directory with a last file that makes it complete. Nothing half-written is visible."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from typing_extensions import Buffer

from millrace.checkpoint.format.manifest import MANIFEST_NAME
from millrace.checkpoint.places.storage import CheckpointStorage, LocalStorage, LocalWriter, open_storage
from millrace.errors import ConfigurationError, IsDirectoryError, MissingError, ObjectExistsError
from millrace.origin import ObjectWriter, origin_for_url, service_of, split_url

_BUFFER_BYTES = 4 << 20


class FileTarget:
    """One file, on a local disk or in an object store."""

    def __init__(self, location: str, options: Mapping[str, Any] | None, *, overwrite: bool) -> None:
        """Makes no request. Raises `ConfigurationError` for what names no file."""
        self._location, self._options, self._overwrite = location, options, overwrite
        self._scheme, self._key = split_url(location)
        if not self._key.strip("/") or self._key.endswith("/"):
            raise ConfigurationError(
                f"{location!r} names no file", next_step="name the file to write, with its directory"
            )
        if self._local and options:
            raise ConfigurationError("local files take no options", next_step="leave output_options out")
        if not self._local and "/" not in self._key.strip("/"):
            raise ConfigurationError(f"{location!r} is a whole bucket", next_step="give scheme://bucket/name")

    @property
    def _local(self) -> bool:
        return service_of(self._scheme).rooted

    def check(self) -> None:
        """Find out before the work begins what would be found out after it. Raises `ObjectExistsError`."""
        if self._local and os.path.isdir(self._key):
            raise IsDirectoryError(f"{self._location} is a directory", next_step="name a file in it")
        if not self._overwrite and self._exists():
            raise ObjectExistsError(
                f"{self._location} exists already", next_step="choose another name, or overwrite it"
            )

    def open(self) -> FileStream:
        """Begin to write. Leaving the block normally makes the file durable, then visible; an exception leaves nothing."""
        self.check()
        writer: ObjectWriter
        if self._local:
            directory, name = os.path.split(os.path.abspath(self._key))
            LocalStorage(directory).prepare()
            writer = LocalWriter(directory, name, sync=True, replace=self._overwrite)
        else:
            origin, key = origin_for_url(self._location, self._options)
            writer = origin.open_writer(key)
        return FileStream(writer)

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
    def __init__(self, writer: ObjectWriter) -> None:
        self._writer, self._position = writer, 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Buffer, /) -> int:
        nbytes = self._writer.write(data)
        self._position += nbytes
        return nbytes


class FileStream(AbstractContextManager["FileStream"]):
    """A buffered stream as `torch.save` wants it, over an `ObjectWriter` that the end of the block publishes or aborts."""

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer
        self._buffer = io.BufferedWriter(_Raw(writer), _BUFFER_BYTES)

    def write(self, data: Buffer) -> int:
        return self._buffer.write(data)

    def flush(self) -> None:
        self._buffer.flush()

    def close(self) -> None:
        """Nothing: the end of the block says whether the file is published or aborted."""

    def tell(self) -> int:
        return self._buffer.tell()

    def seekable(self) -> bool:
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if exc_type is None:
                self._buffer.flush()
                self._writer.close()
        finally:
            self._writer.abort()


class DirectoryTarget:
    """A directory for a checkpoint of torch's own."""

    def __init__(self, location: str, options: Mapping[str, Any] | None, *, overwrite: bool) -> None:
        self.storage: CheckpointStorage = open_storage(location, options)
        self._overwrite = overwrite

    def prepare(self) -> None:
        """Raises `ObjectExistsError` where something lies there; a checkpoint of ours is not overwritten in any case."""
        names = self.storage.names()
        if any(name.endswith(MANIFEST_NAME) for name in names):
            raise ObjectExistsError(
                f"a checkpoint of Millrace lies at {self.storage.url}", next_step="choose another directory"
            )
        if names and not self._overwrite:
            raise ObjectExistsError(
                f"{self.storage.url} is not empty", next_step="choose another directory, or overwrite it"
            )
        self.storage.prepare()
