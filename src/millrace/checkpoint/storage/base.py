"""The protocol of the storage of one checkpoint, and functions for every storage. `storage.py` opens one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import Buffer

from millrace.errors import MissingError
from millrace.origin import ObjectWriter


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


def contains(storage: CheckpointStorage, name: str, data: Buffer) -> bool:
    """Whether the file `name` contains exactly `data`."""
    file = storage.stat(name)
    if file.size != memoryview(data).nbytes:
        return False
    return memoryview(storage.read(file, 0, file.size)).cast("B") == memoryview(data).cast("B")
