"""The replicas of one run on one other node, as storage of checkpoints: read and written over the data plane."""

from __future__ import annotations

import contextlib
import posixpath
import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
from typing_extensions import Buffer

from millrace.checkpoint.storage.base import StoredFile
from millrace.errors import (
    DiskFullError,
    ObjectExistsError,
    ObjectNotFoundError,
    PeerError,
    PeerRefusedError,
    PeerSilentError,
    UsageError,
)
from millrace.origin import ObjectWriter
from millrace.runtime.forks import importing

if TYPE_CHECKING:
    from millrace.cluster.dataplane.client import PeerClient
    from millrace.cluster.dataplane.wire import ReplicaName
    from millrace.cluster.membership import Member

LIST_SECONDS = 3.0
DATA_SECONDS = 10.0
"""Deadlines: of a listing, and of one request with data of up to `_REQUEST_BYTES`."""

_REQUEST_BYTES = 16 << 20
_ROUTE = "/v1/replicas"
_TOO_MANY = 503
_PAUSE_SECONDS = 0.05, 0.25

_ENDED = (ConnectionResetError, ssl.SSLEOFError, ssl.SSLZeroReturnError)

_T = TypeVar("_T")


@dataclass(eq=False)
class Peer:
    """One member, and the replicas of a run that it had at the last `look`. Thread-safe.

    After a member was silent once, every further request fails at once, until the next `look`.
    """

    client: PeerClient
    member: Member
    run: str
    files: Mapping[tuple[str, str], StoredFile] = field(default_factory=dict)
    """By directory and name of the file."""
    endangered: Set[tuple[str, str]] = frozenset()
    """Those of `files` that are only on a disk that failed."""
    failure: PeerError | None = None

    @property
    def url(self) -> str:
        """The run on this member, for messages."""
        return f"peer://{self.member.address}/{self.run}"

    def look(self) -> None:
        """List the replicas again. Without a response there are none, and `failure` is set."""
        try:
            self.client.require_version(self.member)
            path = f"{_ROUTE}/{self.run}"
            found = _retried_while_busy(
                lambda: self.client.call(self.member.address, "GET", path, deadline=LIST_SECONDS, working_seconds=0),
                LIST_SECONDS,
            )
            self.files = {
                (str(directory), str(name)): StoredFile(str(name), int(size), "", float(modified))
                for directory, name, size, modified in found["files"]
            }
            self.endangered = {(str(directory), str(name)) for directory, name in found.get("endangered", ())}
            self.failure = None
        except PeerError as error:
            self.files, self.failure = {}, error
        except (TypeError, ValueError, KeyError) as error:
            self.files = {}
            self.failure = PeerError(f"{self.member.address}: not a list of replicas ({error!r})")

    def directories(self) -> set[str]:
        """The checkpoints with any files there."""
        return {directory for directory, _ in self.files}

    def delete(self, directory: str, names: Sequence[str] | None = None) -> None:
        """Delete files of a checkpoint in this order, or all of them. Raises `PeerError`."""
        with self._responding():
            self.client.call(
                self.member.address,
                "DELETE",
                f"{_ROUTE}/{self.run}/{directory}",
                {"files": None if names is None else list(names)},
                deadline=DATA_SECONDS,
            )

    def reserve(self, directory: str, nbytes: int) -> None:
        """Reserve space for files of a checkpoint. Raises `DiskFullError` or `PeerError`."""
        with self._responding():
            body = {"nbytes": nbytes}
            self.client.call(
                self.member.address, "POST", f"{_ROUTE}/{self.run}/{directory}", body, deadline=DATA_SECONDS
            )

    def put(self, directory: str, name: str, start: int, size: int, data: Buffer) -> None:
        """Send the bytes of a file of `size` bytes from `start` on.

        Raises `ObjectExistsError`, `DiskFullError`, `PeerError`.
        """
        with importing():
            from millrace.cluster.dataplane.wire import ReplicaPut

        view = memoryview(data).cast("B")
        with self._responding():
            for offset in range(0, len(view), _REQUEST_BYTES):
                piece = view[offset : offset + _REQUEST_BYTES]
                begin = start + offset
                put = ReplicaPut(self._name(directory, name), begin, begin + len(piece), size)
                _retried_while_busy(partial(self.client.put_replica, self.member, put, piece, deadline=DATA_SECONDS))

    def read(self, directory: str, file: StoredFile, start: int, stop: int) -> Buffer:
        """The bytes `[start, stop)` of a file. Raises `ObjectNotFoundError` or `PeerError`."""
        view = np.empty(stop - start, dtype=np.uint8).data
        with self._responding():
            for offset in range(start, stop, _REQUEST_BYTES):
                span = (offset, min(offset + _REQUEST_BYTES, stop))
                name = self._name(directory, file.name)
                data = _retried_while_busy(
                    partial(self.client.read_replica, self.member, name, span, file.size, deadline=DATA_SECONDS)
                )
                if len(view) == len(data):
                    return data
                view[offset - start : span[1] - start] = data
        return view

    def _name(self, directory: str, name: str) -> ReplicaName:
        with importing():
            from millrace.cluster.dataplane.wire import ReplicaName

        return ReplicaName(self.run, directory, name)

    @contextlib.contextmanager
    def _responding(self) -> Iterator[None]:
        """Raises at once for a member that was silent, and translates refusals."""
        if self.failure is not None:
            raise self.failure
        try:
            yield
        except PeerSilentError as error:
            self.failure = error
            raise
        except PeerRefusedError as error:
            if error.status == 404:
                raise ObjectNotFoundError(error.message, next_step="read it from another place") from error
            if error.status == 409:
                raise ObjectExistsError(error.message, next_step="delete it there first") from error
            if error.status == 507:
                raise DiskFullError(error.message, next_step=error.next_step) from error
            raise


def _retried_while_busy(request: Callable[[], _T], seconds: float | None = None) -> _T:
    """Repeat a request while the member has too many connections: at a restore all ranks may send theirs at once.

    With TLS, the member closes such a connection without a response.
    """
    until = time.monotonic() + (seconds or DATA_SECONDS)
    while True:
        try:
            return request()
        except PeerError as error:
            is_turned_away = isinstance(error, PeerRefusedError) and error.status == _TOO_MANY
            is_turned_away |= isinstance(error.__cause__, _ENDED)
            if not is_turned_away or time.monotonic() >= until:
                raise
        time.sleep(random.uniform(*_PAUSE_SECONDS))


@dataclass(frozen=True, eq=False)
class PeerStorage:
    """The directory of one checkpoint on another node, a `CheckpointStorage`. Thread-safe.

    Files are described as of the last `Peer.look`. To write, `sizes` are the bytes of the files that will be written.
    """

    peer: Peer
    directory: str
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"{self.peer.url}/{self.directory}".rstrip("/")

    def prepare(self) -> None:
        known = {name for directory, name in self.peer.files if directory == self.directory}
        self.peer.reserve(self.directory, sum(size for name, size in self.sizes.items() if name not in known))

    def open_writer(self, name: str) -> ObjectWriter:
        return _PeerWriter(self.peer, self.directory, name, self.sizes[name])

    def publish(self, name: str, data: Buffer, *, replace: bool) -> None:
        if replace:
            raise UsageError(f"{self.url}: files of replicas are not replaced", next_step="delete the file first")
        self.peer.put(self.directory, name, 0, memoryview(data).nbytes, data)

    def stat(self, name: str) -> StoredFile:
        directory, file = self._place(name)
        found = self.peer.files.get((directory, file))
        if found is None:
            raise ObjectNotFoundError(f"{self.url}: no {name}", next_step="read it from another place")
        return StoredFile(name, found.size, found.version, found.modified)

    def read(self, file: StoredFile, start: int, stop: int) -> Buffer:
        if start == stop:
            return b""
        directory, name = self._place(file.name)
        return self.peer.read(directory, StoredFile(name, file.size, "", 0.0), start, stop)

    def names(self) -> Sequence[str]:
        return [file.name for file in self.files()]

    def files(self) -> Sequence[StoredFile]:
        return [file for (directory, _), file in sorted(self.peer.files.items()) if directory == self.directory]

    def delete(self, names: Sequence[str]) -> None:
        if names:
            self.peer.delete(self.directory, names)

    def _place(self, name: str) -> tuple[str, str]:
        directory, file = posixpath.split(posixpath.normpath(posixpath.join(self.directory, name)))
        return directory, file


class _PeerWriter:
    """Sends one file as a stream. Not thread-safe. The node deletes the part of a file that was not finished."""

    def __init__(self, peer: Peer, directory: str, name: str, size: int) -> None:
        self._peer, self._directory, self._name, self._size = peer, directory, name, size
        self._sent = 0

    def write(self, data: Buffer, /) -> int:
        nbytes = memoryview(data).nbytes
        self._peer.put(self._directory, self._name, self._sent, self._size, data)
        self._sent += nbytes
        return nbytes

    def close(self) -> None:
        if self._sent != self._size:
            raise UsageError(f"{self._name}: {self._sent} of {self._size} bytes were sent", next_step="copy it again")

    def abort(self) -> None:
        """The node deletes the part later."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is None:
            self.close()
