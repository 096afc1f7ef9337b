"""Updates of tensors that already have the values of an earlier checkpoint: `UpdatingReader`.

An update reads only the bytes that the tensors lack. The content of a chunk is identified by its checksum. A chunk whose
bytes in the tensors match the manifest is not read. Where they match a base of the chunk, only the deltas after that base
are read.

An update is staged: everything is read, decoded and verified before the first tensor changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from millrace.checkpoint.codec.chunks import checksum
from millrace.checkpoint.format.manifest import Manifest
from millrace.checkpoint.format.tables import NO_BASE, Table, chain
from millrace.checkpoint.format.transforms import Transforms, transforms_for
from millrace.checkpoint.reading.load_planner import CheckpointLoadPlanner
from millrace.checkpoint.reading.loads import BlobLoad, Load, planned_loads
from millrace.checkpoint.reading.reader import CheckpointReader
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.storage.fetching import ChunkFetcher, ChunkUse, copy_chunk
from millrace.runtime.pipeline import run_in_order

# Host memory for tensors that are converted or moved to a device, at one time.
_WAVE_BYTES = 128 << 20

Bytes = np.ndarray[Any, Any]


class Content(NamedTuple):
    """The identity of a decoded chunk: element kind, length in bytes, and checksum."""

    kind: int
    nbytes: int
    checksum: int


KeptChunks = Mapping[Content, Bytes]
"""Decoded chunks of the last update that no tensor holds bit for bit: parts of chunks, other dtypes, other devices."""


class _KnownBytes(NamedTuple):
    """Known bytes for a chunk of the new checkpoint: those of `member` of its chain. `above` is the next member, which is a
    delta to it, or None if the known bytes are the chunk itself. `is_in_place`: the bytes are in the target.
    """

    above: int | None
    known: Bytes
    is_in_place: bool


@dataclass(frozen=True, kw_only=True)
class StagedUpdate:
    """An update whose bytes have all been read and verified. `apply` changes the tensors, once.

    `contents` are the chunks to copy, by row, and `kept` those for the next update.
    """

    loads: list[Load]
    fetcher: ChunkFetcher
    contents: dict[int, Bytes]
    kept: KeptChunks
    trusted_types: Sequence[type]

    def apply(self) -> None:
        """Copy the staged bytes into the tensors, and pass the values to the planner."""
        self.loads.reverse()
        while self.loads:
            # Memory of a load is used from now on, and freed with it.
            wave, staged = [self.loads.pop()], 0
            while self.loads and (staged := staged + wave[-1].staging_bytes) < _WAVE_BYTES:
                wave.append(self.loads.pop())
            self._fill(wave)
            for load in wave:
                load.commit(self.trusted_types)
        self.contents.clear()

    def check(self) -> None:
        """Raise the error, if any, with which `apply` would fail."""
        self._fill([load for load in self.loads if isinstance(load, BlobLoad)])
        for load in self.loads:
            load.check(self.trusted_types)

    def _fill(self, loads: Sequence[Load]) -> None:
        for row, uses in self.fetcher.uses([load.request for load in loads if load.request is not None]).items():
            if row in self.contents:
                copy_chunk(self.contents[row], uses)


def stage_update(
    items: Sequence[Any],
    planner: Any,
    storage: CheckpointStorage,
    manifest: Manifest,
    transforms: Transforms,
    kept: KeptChunks,
    *,
    threads: int,
    trusted_types: Sequence[type],
) -> StagedUpdate:
    """Read and verify the bytes that the targets of a load plan lack. Changes no target.

    The targets must not change before `apply` returns. Needs memory for the decoded chunks that are read. Raises as
    `load_items`.
    """
    fetcher = ChunkFetcher(storage, manifest, threads, transforms)
    loads = [load for wave in planned_loads(items, planner, manifest, fetcher, trusted_types) for load in wave]
    uses = fetcher.uses([load.request for load in loads if load.request is not None])
    in_place = {id(load.request) for load in loads if load.is_in_place}

    def place(row: int) -> Bytes | None:
        """The target's memory for a whole chunk; None if no target has all of it."""
        users: list[ChunkUse] = uses[row]
        if len(users) == 1 and id(users[0].request) in in_place:
            return users[0].place(int(manifest.chunks["raw_bytes"][row]))
        return None

    contents: dict[int, Bytes] = {}
    missing: list[int] = []
    bases: dict[int, Bytes] = {}
    rows = list(uses)
    found = run_in_order(rows, lambda row: _find(manifest.chunks, row, place(row), kept), threads)
    for row, known in zip(rows, found, strict=True):
        if known is None or known.above is not None:
            missing.append(row)
            if known is not None and known.above is not None:
                bases[known.above] = known.known
        elif not known.is_in_place:
            contents[row] = known.known
    contents.update(ChunkFetcher(storage, _cut(manifest, bases), threads, transforms, bases).read_chunks(missing))
    update = StagedUpdate(
        loads=loads,
        fetcher=fetcher,
        contents=contents,
        kept={_content(manifest.chunks, row): data for row, data in contents.items() if place(row) is None},
        trusted_types=trusted_types,
    )
    update.check()
    return update


def _content(chunks: Table, row: int) -> Content:
    return Content(int(chunks["kind"][row]), int(chunks["raw_bytes"][row]), int(chunks["raw_checksum"][row]))


def _find(chunks: Table, row: int, place: Bytes | None, kept: KeptChunks) -> _KnownBytes | None:
    """The known bytes that save the most reading for a chunk: its own, or those of its nearest base."""
    held = None if place is None else checksum(place.data)
    above: int | None = None
    for member in reversed(chain(chunks, row)):
        content = _content(chunks, member)
        if place is not None and held == content.checksum:
            return _KnownBytes(above, place, is_in_place=True)
        if content in kept:
            return _KnownBytes(above, kept[content], is_in_place=False)
        above = member
    return None


def _cut(manifest: Manifest, known: Mapping[int, Bytes]) -> Manifest:
    """The manifest with chains that begin after the known bases."""
    base = manifest.chunks["base"].copy()
    base[list(known)] = NO_BASE
    return replace(manifest, chunks=manifest.chunks.replaced(base=base))


class UpdatingReader(CheckpointReader):
    """A `CheckpointReader` that reads only the missing bytes, and changes the state only if everything was read.

    `kept` are the chunks that the last update kept. `agree` is called on every rank with the failure of its reading or None,
    and raises if any rank failed: then no rank changes its state. `update` is the result.
    """

    def __init__(
        self, path: str, *, kept: KeptChunks, agree: Callable[[Exception | None], None], **options: Any
    ) -> None:
        super().__init__(path, **options)
        self._kept, self._agree = kept, agree
        self.update: StagedUpdate | None = None

    def read_data(self, plan: Any, planner: Any) -> Any:
        if self._loaded is None or self._safetensors is not None:
            return super().read_data(plan, planner)
        manifest, failure = self._loaded, None
        try:
            if isinstance(planner, CheckpointLoadPlanner):
                planner.check_objects(plan.items)
            self.update = stage_update(
                plan.items,
                planner,
                self._storage(),
                manifest,
                transforms_for(manifest.transforms, self._extension_registry),
                self._kept,
                threads=self._threads,
                trusted_types=self._trusted_types,
            )
        except Exception as error:  # noqa: BLE001 - whatever a planner or a tensor subclass raises
            failure = error
        self._agree(failure)
        if self.update is not None:
            self.update.apply()
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future
