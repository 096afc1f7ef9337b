"""Reads the chunks for a set of requests: few ranged reads, each chunk verified and decoded once. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import Buffer

from millrace.checkpoint.codec.chunks import MAX_CHUNK_OVERHEAD_BYTES, Kind, as_bytes, checksum
from millrace.checkpoint.codec.registry import ChunkCodec
from millrace.checkpoint.format.manifest import Manifest
from millrace.checkpoint.format.slices import ReadRange, Runs, scatter_chunk
from millrace.checkpoint.format.tables import ReadGroup, chain, plan_reads
from millrace.checkpoint.format.transforms import Transforms
from millrace.checkpoint.storage.base import CheckpointStorage, StoredFile
from millrace.checkpoint.storage.manifests import stat_data_file
from millrace.errors import CorruptCheckpointError
from millrace.runtime.memory import Memory
from millrace.runtime.pipeline import collection_paused, run_in_order

# Reading across a gap costs its bytes, another request costs a round trip. At 15 ms and 200 MB/s these are equal at 3 MB,
# but a local disk has hardly any round trip.
_GAP_BYTES = 256 << 10
_RANGE_BYTES = 8 << 20
# Size of a group of chunks with their bases, in several files.
_GROUP_BYTES = 32 << 20
# The ranges of a group are requested concurrently, so that they share one round trip.
_RANGES_AT_ONCE = 8


class ItemRequest(NamedTuple):
    """A request for the bytes `runs` of item number `item`, in order, in all of `out` (writable; an array is of uint8)."""

    item: int
    runs: Runs
    out: np.ndarray[Any, Any] | Memory


def whole_item(item: int, out: np.ndarray[Any, Any]) -> ItemRequest:
    """A request for all bytes of an item, of which `out` has the length."""
    return ItemRequest(item, Runs(0, out.size, (), ()), out)


class ChunkUse(NamedTuple):
    """The use of a chunk by a request. The chunk begins at byte `begin` of the item (negative in a pack)."""

    request: ItemRequest
    begin: int

    def place(self, raw_bytes: int) -> np.ndarray[Any, Any] | None:
        """The memory of the request for all of the chunk; None if the request needs only a part of it."""
        runs = self.request.runs
        if runs.count == 1 and runs.first <= self.begin and self.begin + raw_bytes <= runs.first + runs.nbytes:
            target = self.begin - runs.first
            return _array(self.request.out)[target : target + raw_bytes]
        return None

    def copy(self, decoded: np.ndarray[Any, Any], address: int) -> None:
        """Copy the bytes of the chunk that the request needs. `decoded` is at `address`."""
        runs, out = self.request.runs, self.request.out
        start = runs.first - self.begin
        if runs.outer or start < 0 or start + runs.nbytes > decoded.size:
            scatter_chunk(runs, decoded, self.begin, _array(out))
        elif isinstance(out, Memory):
            out.fill(address + start, runs.nbytes)
        else:
            out[:] = decoded[start : start + runs.nbytes]


def copy_chunk(decoded: np.ndarray[Any, Any], uses: Sequence[ChunkUse]) -> None:
    """Copy a decoded chunk to all that need a part of it."""
    address = decoded.ctypes.data  # once: this takes longer than a small copy
    for use in uses:
        use.copy(decoded, address)


def _array(out: np.ndarray[Any, Any] | Memory) -> np.ndarray[Any, Any]:
    return out.array() if isinstance(out, Memory) else out


# Without slots, which all threads would share.
@dataclass
class _Local(threading.local):
    buffers: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    def scratch(self, name: str, nbytes: int) -> np.ndarray[Any, Any]:
        """Scratch memory that is kept between calls, so that its pages are mapped once."""
        held = self.buffers.get(name)
        if held is None or held.size < nbytes:
            held = self.buffers[name] = np.empty(nbytes, dtype=np.uint8)
        return held[:nbytes]


class ChunkFetcher:
    """Fetches from one checkpoint. Thread-safe.

    `bases`: decoded bases of deltas by the delta's row, for rows that `manifest` lists without a base.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        manifest: Manifest,
        threads: int,
        transforms: Transforms | None = None,
        bases: Mapping[int, np.ndarray[Any, Any]] = MappingProxyType({}),
    ) -> None:
        self._bases = bases
        self._storage = storage
        self._transforms = transforms or Transforms()
        self._manifest = manifest
        self._threads = threads
        self._row_ends = np.cumsum(manifest.chunks["raw_bytes"], dtype=np.int64)
        self._files: dict[int, StoredFile] = {}
        # One lock per file: several threads may start with the same file, but only one describes it.
        self._locks = [threading.Lock() for _ in manifest.files]
        self._codec = ChunkCodec()
        self._local = _Local()

    def fetch(self, requests: Sequence[ItemRequest]) -> None:
        """Fill `out` of every request. Raises `CorruptCheckpointError` and the errors of the storage."""
        uses = self.uses(requests)

        def read(group: ReadGroup) -> None:
            stored = self._read_group(group)
            for row in group.rows:
                self._deliver(row, stored, uses[row])

        self._read_groups(list(uses), read)

    def read_chunks(self, rows: Sequence[int]) -> dict[int, np.ndarray[Any, Any]]:
        """Chunks, each decoded into new memory. Raises as `fetch`."""
        raw = self._manifest.chunks["raw_bytes"]
        found = {row: np.empty(int(raw[row]), dtype=np.uint8) for row in rows}

        def read(group: ReadGroup) -> None:
            stored = self._read_group(group)
            for row in group.rows:
                self._decode(row, stored, found[row])

        self._read_groups(list(found), read)
        return found

    def _read_groups(self, rows: Sequence[int], read: Callable[[ReadGroup], None]) -> None:
        for _ in run_in_order(self._plan(np.array(rows, dtype=np.int64)), read, self._threads):
            pass

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
        """The stored bytes of all rows of a group, and of their bases."""
        stored: dict[int, memoryview] = {}
        chunks = self._manifest.chunks
        threads = min(len(group.ranges), _RANGES_AT_ONCE)
        reads = run_in_order(group.ranges, self._read, threads) if threads > 1 else map(self._read, group.ranges)
        for wanted, content in zip(group.ranges, reads, strict=True):
            data = as_bytes(content).data
            for row in wanted.rows:
                start = int(chunks["offset"][row]) - wanted.start
                stored[row] = data[start : start + int(chunks["stored_bytes"][row])]
        return stored

    def uses(self, requests: Sequence[ItemRequest]) -> dict[int, list[ChunkUse]]:
        """The uses of each needed row. Vectorised over the requests, which may be many and small."""
        with collection_paused():
            return self._uses(requests)

    def _uses(self, requests: Sequence[ItemRequest]) -> dict[int, list[ChunkUse]]:
        items, raw = self._manifest.items, self._manifest.chunks["raw_bytes"]
        numbers = np.fromiter((request.item for request in requests), dtype=np.int64)
        first = items["chunk"][numbers].astype(np.int64)
        # Begin of each item, and its requested bytes, as offsets in the concatenation of all decoded chunks.
        origins = self._row_ends[first] - raw[first] + items["start"][numbers]
        begin = origins + np.fromiter((request.runs.first for request in requests), dtype=np.int64)
        end = origins + np.fromiter((request.runs.end for request in requests), dtype=np.int64)
        lows = np.searchsorted(self._row_ends, begin, side="right")
        highs = np.searchsorted(self._row_ends, end, side="left") + 1
        starts = self._row_ends[lows] - raw[lows] - origins
        uses: dict[int, list[ChunkUse]] = {}
        for request, low, high, start in zip(requests, lows.tolist(), highs.tolist(), starts.tolist(), strict=True):
            if high == low + 1:
                uses.setdefault(low, []).append(ChunkUse(request, start))
                continue
            for row in range(low, high):
                stop = start + int(raw[row])
                some, beyond = request.runs.overlapping(start, stop) if request.runs.outer else (0, 1)
                if some < beyond:
                    uses.setdefault(row, []).append(ChunkUse(request, start))
                start = stop
        return uses

    def _deliver(self, row: int, stored: Mapping[int, Buffer], uses: Sequence[ChunkUse]) -> None:
        """Decode a chunk and copy its bytes to all requests. Decode in place if one request needs the whole chunk."""
        raw_bytes = int(self._manifest.chunks["raw_bytes"][row])
        place = uses[0].place(raw_bytes) if len(uses) == 1 else None
        if place is not None:
            self._decode(row, stored, place)
            return
        decoded = self._local.scratch("decoded", raw_bytes)
        self._decode(row, stored, decoded)
        copy_chunk(decoded, uses)

    def _decode(self, row: int, stored: Mapping[int, Buffer], out: np.ndarray[Any, Any]) -> None:
        """Decode a chunk into `out`, starting with the root of its chain. `stored` contains all its bases."""
        members = chain(self._manifest.chunks, row)
        held = self._bases.get(members[0])
        base = None if held is None else held.data
        for depth, member in enumerate(members):
            # Alternate between two buffers: a delta cannot be decoded into its base.
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
            self._codec.decode(stored, Kind.from_code(int(chunks["kind"][row])), out.data, base)
        except CorruptCheckpointError as error:
            next_step = error.next_step or "load another checkpoint"
            raise CorruptCheckpointError(f"{where}: {error.message}", next_step=next_step) from error
        # The second checksum, of the saved bytes, detects wrong decoding, which the first one cannot.
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
        """The file, pinned to its first version. Data files are never rewritten, only removed."""
        with self._locks[number]:
            known = self._files.get(number)
            if known is None:
                known = self._files[number] = stat_data_file(self._storage, self._manifest.files[number])
            return known
