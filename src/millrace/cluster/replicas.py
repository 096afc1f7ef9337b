"""Stores replicas of other nodes' checkpoints on this node's disks, and serves them.

A replica is the files of one node's ranks of one checkpoint, in `replicas/RUN/CHECKPOINT/` next to the store. A file is
visible when all of it has arrived, each piece verified. Its sender verifies the chunks inside against the manifest, and so
does a restore.

Replicas count as used bytes of the store, so the capacity and `min_free` hold for both together. They take at most
`REPLICA_SHARE` of the capacity of a disk. Cached data, except for pins, is evicted for them; they are never evicted. Their
job deletes them. The rest of a job that does not return is deleted after `IDLE_SECONDS`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from millrace.cache.disk import Disk
from millrace.cache.node import CacheNode
from millrace.cluster.dataplane import wire
from millrace.cluster.dataplane.responses import (
    BrokenResponseError,
    Content,
    Done,
    Exchange,
    OpenFile,
    Part,
    Refusal,
    Response,
)
from millrace.cluster.dataplane.server import Call, PlaneServer
from millrace.cluster.dataplane.wire import ReplicaName, ReplicaPut, Span, parse_replica_name
from millrace.errors import DiskFullError, ObjectNotFoundError, StorageError, UsageError, WireError
from millrace.events import Event, emit
from millrace.runtime.failures import disk_errors
from millrace.runtime.maintenance import register_periodic, unregister
from millrace.runtime.private_files import make_folder, opener
from millrace.store.setup import REPLICAS_NAME

REPLICA_SHARE = 0.25
"""The share of a disk's capacity that replicas may take."""

IDLE_SECONDS = 7 * 86400.0
"""The replicas of a run that was not written to for this long are deleted."""

PART_SECONDS = 600.0
"""An incomplete file that did not grow for this long is deleted, and an unused reservation ends."""

ROUTE = "/v1/replicas"
_PART_SUFFIX = ".part"
_MAX_NAMES = 100_000


class _Stored(NamedTuple):
    """A file of a replica, or a part of one (`is_part`). `modified` in Unix seconds."""

    name: ReplicaName
    nbytes: int
    modified: float
    is_part: bool


@dataclass(slots=True)
class _Reservation:
    """Space for files of one checkpoint that have not arrived. `until`: when it ends (`time.monotonic`)."""

    nbytes: int
    until: float


@dataclass(slots=True)
class _Place:
    """The replicas on one disk. The lock of `ReplicaFiles` protects it."""

    disk: Disk
    root: Path
    nbytes: int = 0
    reserved: dict[ReplicaName, _Reservation] = field(default_factory=dict)

    def left(self) -> int:
        """The bytes that further replicas may take."""
        reserved_bytes = sum(each.nbytes for each in self.reserved.values())
        return int(REPLICA_SHARE * self.disk.store.space.capacity_bytes()) - self.nbytes - reserved_bytes

    def directory(self, name: ReplicaName) -> Path:
        return self.root / name.run / name.checkpoint

    def count(self, nbytes: int) -> None:
        """Add `nbytes` to the bytes of the replicas, for all processes."""
        self.nbytes = max(0, self.nbytes + nbytes)
        self.disk.store.index.set_replica_bytes(self.nbytes)


class ReplicaFiles:
    """The replicas on the disks of a node. Thread-safe; one object for each node, in its node process.

    `wall_clock` returns Unix seconds.
    """

    def __init__(self, node: CacheNode, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._lock = threading.RLock()
        self._wall_clock = wall_clock
        self._places = [_Place(disk, disk.store.directory / REPLICAS_NAME) for disk in node.open_disks]
        for place in self._places:
            with contextlib.suppress(StorageError), self._reporting(place):
                place.nbytes = sum(stored.nbytes for stored in _walk(place.root))
                place.count(0)
                self._sweep(place)

    def add_routes(self, server: PlaneServer) -> None:
        """Serve the replicas at `server`, and delete leftovers of jobs that do not return, until `close`."""
        server.replicas = self
        register_periodic(self.tidy)
        server.route("GET", ROUTE, self.files)
        server.route("POST", ROUTE, self.reserve)
        server.route("DELETE", ROUTE, self.delete)

    def close(self) -> None:
        """Release the reservations."""
        unregister(self.tidy)
        with self._lock:
            for place in self._places:
                for name in list(place.reserved):
                    self._release(place, name)

    def tidy(self) -> float:
        """Delete leftovers of jobs that do not return. Returns the seconds until the next call."""
        with self._lock:
            for place in self._open_places():
                with contextlib.suppress(StorageError), self._reporting(place):
                    self._sweep(place)
        return PART_SECONDS

    @property
    def nbytes(self) -> int:
        """The bytes of all replicas."""
        return sum(place.nbytes for place in self._places)

    # --- commands -----------------------------------------------------------------------------------

    def files(self, call: Call) -> Any:
        """The complete files of a run's replicas: `[checkpoint, file, bytes, modified]` each.

        `endangered` are those that are only on a disk that failed, as `[checkpoint, file]`: they may be readable.
        """
        run = parse_replica_name(call.path_rest, 1)
        rows = {}
        endangered: set[ReplicaName] = set()
        for place in reversed(self._readable_places()):
            with contextlib.suppress(StorageError), self._reporting(place):
                for stored in _walk(place.root, run.run):
                    if not stored.is_part:
                        rows[stored.name] = [stored.name.checkpoint, stored.name.file, stored.nbytes, stored.modified]
                        (endangered.add if place.disk.failed else endangered.discard)(stored.name)
        return {"files": list(rows.values()), "endangered": [[name.checkpoint, name.file] for name in endangered]}

    def reserve(self, call: Call) -> Any:
        """Reserve space for files of a checkpoint that follow. Raises `DiskFullError`."""
        name = parse_replica_name(call.path_rest, 2)
        nbytes = call.body.get("nbytes") if isinstance(call.body, Mapping) else None
        if type(nbytes) is not int or nbytes < 0:
            raise UsageError("a reservation needs 'nbytes'", next_step="use the same version on all nodes")
        with self._lock:
            place = self._place_for(name)
            self._release(place, name)
            self._sweep(place)
            self._take(place, name, nbytes)
        return {}

    def delete(self, call: Call) -> Any:
        """Delete the named files of a checkpoint in this order, or all of its files. Missing files are not an error."""
        name = parse_replica_name(call.path_rest, 2)
        files = call.body.get("files") if isinstance(call.body, Mapping) else None
        if files is not None and not (isinstance(files, list) and len(files) <= _MAX_NAMES):
            raise UsageError("the files to delete are not a list", next_step="use the same version on all nodes")
        wanted = None if files is None else [parse_replica_name(f"{call.path_rest}/{file}", 3) for file in files]
        with self._lock:
            for place in self._readable_places():
                # On a disk that failed as far as that is possible: its files are listed, too.
                errors = (StorageError,) if place.disk.failed else ()
                with contextlib.suppress(*errors), self._reporting(place):
                    self._delete(place, name, wanted)
        return {}

    # --- bytes ----------------------------------------------------------------------------------------

    def get(self, name: ReplicaName, span: Span) -> Response:
        """The framed bytes of a range of a file."""
        for place in self._readable_places():
            path = place.directory(name) / name.file
            try:
                file = OpenFile(opener(str(path), os.O_RDONLY))
            except OSError:
                continue
            size = os.fstat(file.descriptor).st_size
            if span[1] > size or span[1] - span[0] > wire.MAX_FRAMED_BYTES:
                return Refusal(status=416, message=f"the file has {size} bytes")
            return Content(wire.build_framed_head(span, size), self._read(place, file, span))
        raise ObjectNotFoundError(f"no replica of {'/'.join(name)}", next_step="read it from another place")

    def put(self, put: ReplicaPut, exchange: Exchange) -> Response:
        """Write the bytes `[put.start, put.stop)` of a file. With its last byte the file becomes visible.

        A repeated request has the same result. A file that exists is never replaced: other bytes are refused. Names of files
        are unique to a save, except for that of the manifest.
        """
        with self._lock:
            place = self._place_for(put.name)
            directory = place.directory(put.name)
            is_whole = (put.start, put.stop) == (0, put.size)
            # Only one request may write to it, or all of them write the same.
            part = directory / f".{put.name.file}{f'.{uuid.uuid4().hex[:8]}' if is_whole else ''}{_PART_SUFFIX}"
            if put.start == 0:
                with disk_errors(directory):
                    make_folder(directory)
            if (lacking := put.stop - put.start - self._reserved(place, put.name)) > 0:
                self._take(place, put.name, lacking)
        try:
            for start, stop in wire.pieces(put.start, put.stop):
                data = exchange.read_body(stop - start)
                if exchange.read_body(wire.SUM_BYTES) != wire.sum_of(data):
                    raise WireError("a piece of a replica has a wrong checksum")
                with self._lock, self._reporting(place):
                    if is_whole or not (path := part.with_name(put.name.file)).exists():
                        self._write(place, put.name, part, start, data)
                    elif _bytes_of(path, start, stop) != data:
                        raise WireError(f"{path.name} exists with other bytes", status=409)
            if put.stop == put.size:
                with self._lock, self._reporting(place):
                    return self._publish(place, put, part)
        except BaseException:
            if is_whole:
                with self._lock:
                    _unlink(place, part)
            raise
        return Done()

    def _read(self, place: _Place, file: OpenFile, span: Span) -> Iterator[Part]:
        """The pieces of a framed body. An unreadable one has a wrong checksum: its receiver reads only that elsewhere."""
        for start, stop in wire.pieces(*span):
            try:
                with self._reporting(place):
                    data = os.pread(file.descriptor, stop - start, start)
            except StorageError:
                yield bytes(stop - start)
                yield wire.sum_of(b"unreadable")
                continue
            if len(data) != stop - start:
                raise BrokenResponseError("a file was truncated")
            yield data
            yield wire.sum_of(data)

    # --- inside, under the lock -----------------------------------------------------------------------

    def _write(self, place: _Place, name: ReplicaName, part: Path, start: int, data: bytearray) -> None:
        if start > _size(part):
            raise WireError(f"{name.file} does not continue here", status=409)
        descriptor = opener(str(part), os.O_WRONLY | (os.O_CREAT if start == 0 else 0))
        try:
            before, written = os.fstat(descriptor).st_size, 0
            with memoryview(data) as view:
                while written < len(view):
                    written += os.pwrite(descriptor, view[written:], start + written)
            grown = max(0, os.fstat(descriptor).st_size - before)
        finally:
            os.close(descriptor)
        place.count(grown)
        self._release(place, name, len(data))

    def _publish(self, place: _Place, put: ReplicaPut, part: Path) -> Response:
        path = part.with_name(put.name.file)
        if path.exists():
            is_whole = (put.start, put.stop) == (0, put.size)
            same = path.read_bytes() == part.read_bytes() if is_whole else _size(path) == put.size
            _unlink(place, part)
            return Done() if same else Refusal(status=409, message=f"{path.name} exists with other bytes")
        if _size(part) != put.size:
            return Refusal(status=409, message=f"{path.name} has another size")
        os.rename(part, path)
        return Done()

    def _place_for(self, name: ReplicaName) -> _Place:
        """The place that has files of this checkpoint, else the one with the most space. Raises `StorageError`."""
        places = self._open_places()
        if not places:
            raise StorageError("no disk of this node can store replicas", next_step="see 'millrace doctor' there")
        return next((place for place in places if place.directory(name).is_dir()), max(places, key=_Place.left))

    def _open_places(self) -> Sequence[_Place]:
        return [place for place in self._places if not place.disk.failed]

    def _readable_places(self) -> Sequence[_Place]:
        """The open ones first; then those of disks that failed, or whose index did: most of their files can be read."""
        return sorted(self._places, key=lambda place: place.disk.failed)

    def _take(self, place: _Place, name: ReplicaName, nbytes: int) -> None:
        """Reserve space for a checkpoint, for which cached data may be evicted. Raises `DiskFullError`."""
        directory = place.directory(name)
        if nbytes > place.left():
            raise DiskFullError(
                f"{directory}: no space for {nbytes} bytes ({place.nbytes} bytes of replicas, at most a quarter of the "
                "capacity)",
                next_step="raise 'capacity' of this node",
            )
        if not place.disk.evictor.reserve_without_candidate(nbytes):
            raise DiskFullError(
                f"{directory}: no space for {nbytes} bytes above 'min_free' and pinned data",
                next_step="free space on this disk",
            )
        known = ReplicaName(name.run, name.checkpoint)
        reserved = place.reserved.setdefault(known, _Reservation(0, 0.0))
        reserved.nbytes += nbytes
        reserved.until = time.monotonic() + PART_SECONDS

    def _reserved(self, place: _Place, name: ReplicaName) -> int:
        found = place.reserved.get(ReplicaName(name.run, name.checkpoint))
        return 0 if found is None else found.nbytes

    def _release(self, place: _Place, name: ReplicaName, nbytes: int | None = None) -> None:
        """Release reserved bytes of a checkpoint, by default all of them."""
        known = ReplicaName(name.run, name.checkpoint)
        found = place.reserved.get(known)
        if found is None:
            return
        nbytes = found.nbytes if nbytes is None else min(nbytes, found.nbytes)
        found.nbytes -= nbytes
        found.until = time.monotonic() + PART_SECONDS
        if not found.nbytes:
            del place.reserved[known]
        place.disk.store.space.release(nbytes)

    def _delete(self, place: _Place, name: ReplicaName, wanted: Sequence[ReplicaName] | None) -> None:
        directory = place.directory(name)
        paths = sorted(_paths(directory)) if wanted is None else [directory / each.file for each in wanted]
        for path in paths:
            _unlink(place, path)
        if wanted is None or not any(not path.name.startswith(".") for path in _paths(directory)):
            for path in _paths(directory):
                _unlink(place, path)
            self._release(place, name)
            for empty in (directory, directory.parent):
                with contextlib.suppress(OSError):  # not empty
                    os.rmdir(empty)

    def _sweep(self, place: _Place) -> None:
        """Delete leftovers of jobs that do not return, and count again."""
        now = self._wall_clock()
        newest: dict[str, float] = {}
        for stored in list(_walk(place.root)):
            newest[stored.name.run] = max(stored.modified, newest.get(stored.name.run, 0.0))
            if stored.is_part and stored.modified < now - PART_SECONDS:
                _unlink(place, place.directory(stored.name) / stored.name.file)
        for run, modified in newest.items():
            if modified < now - IDLE_SECONDS:
                shutil.rmtree(place.root / run, ignore_errors=True)
                emit(Event(name="cluster.replicas.expired", subject=str(place.root / run)))
        for name, reserved in list(place.reserved.items()):
            if reserved.until < time.monotonic():
                self._release(place, name)
        place.count(sum(stored.nbytes for stored in _walk(place.root)) - place.nbytes)

    @contextlib.contextmanager
    def _reporting(self, place: _Place) -> Iterator[None]:
        """Report an error of a disk, and raise it as `StorageError`."""
        try:
            with disk_errors(place.root):
                yield
        except StorageError as error:
            place.disk.report(error)
            raise


def _unlink(place: _Place, path: Path) -> None:
    """Remove a file or part, if it exists."""
    nbytes = _size(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
        place.count(-nbytes)


def _size(path: Path) -> int:
    """The size of a file; 0 for a missing one."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _bytes_of(path: Path, start: int, stop: int) -> bytes:
    with open(path, "rb", opener=opener) as file:
        return os.pread(file.fileno(), stop - start, start)


def _paths(directory: Path) -> Sequence[Path]:
    try:
        return [directory / name for name in os.listdir(directory)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _walk(root: Path, run: str = "") -> Iterator[_Stored]:
    """Every file below `root`, or of one run. Files that are removed meanwhile are left out."""
    for run_path in [root / run] if run else _paths(root):
        for directory in _paths(run_path):
            for path in _paths(directory):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(path)
                    name = ReplicaName(run_path.name, directory.name, path.name)
                    yield _Stored(name, status.st_size, status.st_mtime, path.name.startswith("."))
