"""Reads the chunks that a set of requests needs: few ranged reads, every chunk verified and decoded once. No torch."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import Buffer

from millrace.checkpoint.codec.planes import Kind, PlaneCodec, as_bytes, checksum
from millrace.checkpoint.format.chains import ReadGroup, chain, plan_reads
from millrace.checkpoint.format.manifest import MAX_CHUNK_OVERHEAD_BYTES, Manifest
from millrace.checkpoint.format.slices import ReadRange, Runs, scatter_chunk
from millrace.checkpoint.format.transforms import Transforms
from millrace.checkpoint.host.garbage import collection_paused
from millrace.checkpoint.host.memory import Memory
from millrace.checkpoint.host.pipeline import run_in_order
from millrace.checkpoint.places.storage import CheckpointStorage, StoredFile
from millrace.errors import CorruptCheckpointError, MissingError

# Reading across a gap costs its bytes; a request costs a round trip. At 15 ms and 200 MB/s they cost the same at 3 MB,
# but a local disk has next to no round trip.
_GAP_BYTES = 256 << 10
_RANGE_BYTES = 8 << 20
# Of a group of chunks with all that they build on, which lies in several files.
_GROUP_BYTES = 32 << 20
# The ranges of a group are asked for at once: one after the other each would wait for its own round trip.
_RANGES_AT_ONCE = 8


class Request(NamedTuple):
    """Wanted: the bytes `runs` of item number `item`, in order, in all of `out` (an array is of uint8, and writable)."""

    item: int
    runs: Runs
    out: np.ndarray[Any, Any] | Memory


class _Use(NamedTuple):
    """A request's share in a chunk, which begins at byte `begin` of the request's item (negative in a pack)."""

    request: Request
    begin: int


def _array(out: np.ndarray[Any, Any] | Memory) -> np.ndarray[Any, Any]:
    return out.array() if isinstance(out, Memory) else out


# Without slots: those would be shared by all threads.
@dataclass
class _Local(threading.local):
    codec: PlaneCodec = field(default_factory=PlaneCodec)
    buffers: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    def scratch(self, name: str, nbytes: int) -> np.ndarray[Any, Any]:
        """Memory that is kept between calls, so that its pages are mapped once."""
        held = self.buffers.get(name)
        if held is None or held.size < nbytes:
            held = self.buffers[name] = np.empty(nbytes, dtype=np.uint8)
        return held[:nbytes]


class ChunkFetcher:
    """Fetches from one checkpoint. Thread-safe."""

    def __init__(
        self, storage: CheckpointStorage, manifest: Manifest, threads: int, transforms: Transforms | None = None
    ) -> None:
        self._storage = storage
        self._transforms = transforms or Transforms()
        self._manifest = manifest
        self._threads = threads
        self._row_ends = np.cumsum(manifest.chunks["raw_bytes"], dtype=np.int64)
        self._files: dict[int, StoredFile] = {}
        # One for each file: several threads begin with it at once, and one request is enough.
        self._locks = [threading.Lock() for _ in manifest.files]
        self._local = _Local()

    def fetch(self, requests: Sequence[Request]) -> None:
        """Fill every request's `out`. Raises `CorruptCheckpointError`, or what the storage raises."""
        with collection_paused():
            uses = self._uses(requests)
        rows = np.fromiter(uses, dtype=np.int64, count=len(uses))

        def read(group: ReadGroup) -> None:
            stored = self._read_group(group)
            for row in group.rows:
                self._deliver(row, stored, uses[row])

        for _ in run_in_order(self._plan(rows), read, self._threads):
            pass

    def read_chunk(self, row: int) -> memoryview:
        """One chunk, decoded into memory of its own. Raises as `fetch`."""
        (group,) = self._plan(np.array([row], dtype=np.int64))
        out = np.empty(int(self._manifest.chunks["raw_bytes"][row]), dtype=np.uint8)
        self._decode(row, self._read_group(group), out)
        return out.data

    def _plan(self, rows: np.ndarray[Any, Any]) -> list[ReadGroup]:
        try:
            return plan_reads(
                self._manifest.chunks,
                rows,
                gap_bytes=_GAP_BYTES,
                limit_bytes=_RANGE_BYTES,
                group_bytes=_GROUP_BYTES,
            )
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(
                f"{self._storage.url}: {error.message}", next_step="load another checkpoint"
            ) from error

    def _read_group(self, group: ReadGroup) -> dict[int, memoryview]:
        """The stored bytes of every row of a group and of all that they build on."""
        stored: dict[int, memoryview] = {}
        chunks = self._manifest.chunks
        threads = min(len(group.ranges), _RANGES_AT_ONCE)
        answers = run_in_order(group.ranges, self._read, threads) if threads > 1 else map(self._read, group.ranges)
        for wanted, answer in zip(group.ranges, answers, strict=True):
            data = as_bytes(answer).data
            for row in wanted.rows:
                start = int(chunks["offset"][row]) - wanted.start
                stored[row] = data[start : start + int(chunks["stored_bytes"][row])]
        return stored

    def _uses(self, requests: Sequence[Request]) -> dict[int, list[_Use]]:
        """Which rows are needed, and by whom. Requests may be many and small, so what can be is done for all at once."""
        items, raw = self._manifest.items, self._manifest.chunks["raw_bytes"]
        numbers = np.fromiter((request.item for request in requests), dtype=np.int64)
        first = items["chunk"][numbers].astype(np.int64)
        # Where each item begins and which bytes are wanted of it, in the bytes of all chunks laid end to end.
        origins = self._row_ends[first] - raw[first] + items["start"][numbers]
        begin = origins + np.fromiter((request.runs.first for request in requests), dtype=np.int64)
        end = origins + np.fromiter((request.runs.end for request in requests), dtype=np.int64)
        lows = np.searchsorted(self._row_ends, begin, side="right")
        highs = np.searchsorted(self._row_ends, end, side="left") + 1
        starts = self._row_ends[lows] - raw[lows] - origins
        uses: dict[int, list[_Use]] = {}
        for request, low, high, start in zip(requests, lows.tolist(), highs.tolist(), starts.tolist(), strict=True):
            if high == low + 1:
                uses.setdefault(low, []).append(_Use(request, start))
                continue
            for row in range(low, high):
                stop = start + int(raw[row])
                some, beyond = request.runs.overlapping(start, stop) if request.runs.outer else (0, 1)
                if some < beyond:
                    uses.setdefault(row, []).append(_Use(request, start))
                start = stop
        return uses

    def _deliver(self, row: int, stored: Mapping[int, Buffer], uses: Sequence[_Use]) -> None:
        """Decode a chunk and hand its bytes to everyone who wants some; straight into place when one wants all."""
        raw_bytes = int(self._manifest.chunks["raw_bytes"][row])
        if len(uses) == 1:
            runs, begin = uses[0].request.runs, uses[0].begin
            if runs.count == 1 and runs.first <= begin and begin + raw_bytes <= runs.first + runs.nbytes:
                target = begin - runs.first
                self._decode(row, stored, _array(uses[0].request.out)[target : target + raw_bytes])
                return
        decoded = self._local.scratch("decoded", raw_bytes)
        self._decode(row, stored, decoded)
        address = decoded.ctypes.data
        for (_, runs, out), begin in uses:
            start = runs.first - begin
            if runs.outer or start < 0 or start + runs.nbytes > raw_bytes:
                scatter_chunk(runs, decoded, begin, _array(out))
            elif isinstance(out, Memory):
                out.fill(address + start, runs.nbytes)
            else:
                out[:] = decoded[start : start + runs.nbytes]

    def _decode(self, row: int, stored: Mapping[int, Buffer], out: np.ndarray[Any, Any]) -> None:
        """Decode a chunk into `out`, from its root on. `stored` has all that it builds on."""
        base: memoryview | None = None
        for depth, member in enumerate(chain(self._manifest.chunks, row)):
            # Two buffers in turn: a delta cannot be decoded into its base.
            target = out if member == row else self._local.scratch(f"base {depth % 2}", out.size)
            self._decode_one(member, stored[member], target, base)
            base = target.data

    def _decode_one(self, row: int, stored: Buffer, out: np.ndarray[Any, Any], base: memoryview | None) -> None:
        chunks = self._manifest.chunks
        where = self._where(row)
        if checksum(stored) != int(chunks["stored_checksum"][row]):
            raise CorruptCheckpointError(
                f"{where} does not match its checksum", next_step="load another checkpoint, or restore this one"
            )
        try:
            stored = self._transforms.undo(stored, out.size + MAX_CHUNK_OVERHEAD_BYTES)
            self._local.codec.decode(stored, Kind.from_code(int(chunks["kind"][row])), out.data, base)
        except CorruptCheckpointError as error:
            next_step = error.next_step or "load another checkpoint"
            raise CorruptCheckpointError(f"{where}: {error.message}", next_step=next_step) from error
        # A second checksum, of what was saved: the first cannot see a codec that decodes wrongly.
        if checksum(out.data) != int(chunks["raw_checksum"][row]):
            raise CorruptCheckpointError(
                f"{where} decodes to other bytes than were saved", next_step="load another checkpoint"
            )

    def _where(self, row: int) -> str:
        name = self._manifest.files[int(self._manifest.chunks["file"][row])].name
        return f"chunk {row} of {self._storage.url} (in {name})"

    def _read(self, wanted: ReadRange) -> Buffer:
        return self._storage.read(self._file(wanted.file), wanted.start, wanted.stop)

    def _file(self, number: int) -> StoredFile:
        """The file, pinned to the version that was first seen. Data files are never rewritten, only removed."""
        with self._locks[number]:
            known = self._files.get(number)
            if known is None:
                known = self._files[number] = self._described(number)
            return known

    def _described(self, number: int) -> StoredFile:
        listed = self._manifest.files[number]
        try:
            file = self._storage.stat(listed.name)
        except MissingError as error:
            raise CorruptCheckpointError(
                f"{self._storage.url} has lost its data file {listed.name}",
                next_step="load again if it was being overwritten, else load another checkpoint",
            ) from error
        if file.size != listed.size:
            raise CorruptCheckpointError(
                f"{listed.name} of {self._storage.url} has {file.size} bytes instead of {listed.size}",
                next_step="load another checkpoint, or restore this one from a copy",
            )
        return file
