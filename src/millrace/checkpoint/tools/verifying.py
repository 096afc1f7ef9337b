"""Checks every stored byte of a checkpoint, and reports damage and the tensors that it affects. No torch.

Each stored chunk is read once: a chunk and its deltas are checked together. The check continues after a problem. Torch's
own checkpoints have no checksums and cannot be checked.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import Buffer

from millrace.checkpoint.codec.chunks import MAX_CHUNK_OVERHEAD_BYTES, Kind, as_bytes, checksum
from millrace.checkpoint.codec.registry import ChunkCodec
from millrace.checkpoint.format.inventory import item_keys, item_spans
from millrace.checkpoint.format.manifest import Manifest
from millrace.checkpoint.format.tables import MAX_BASES, NO_BASE, Table, read_ranges
from millrace.checkpoint.format.transforms import Transforms, transforms_for
from millrace.checkpoint.storage.base import CheckpointStorage, StoredFile
from millrace.checkpoint.storage.manifests import manifest_name, rank_of_manifest, read_newest, read_stock_metadata
from millrace.checkpoint.storage.storage import open_storage
from millrace.checkpoint.tools import WorkProgress
from millrace.errors import (
    ChangedError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    DamagedError,
    MissingError,
    StorageError,
    UnsupportedFormatError,
    UsageError,
)
from millrace.runtime.pipeline import default_threads, run_in_order

_BATCH_BYTES = 8 << 20
# Chains are spread over several files, and a group should read a large enough range from each.
_CHAINS_BATCH_BYTES = 32 << 20
_GAP_BYTES = 256 << 10
# Chains of more bytes, which no writer creates, are checked chunk by chunk, with repeated reads.
_CHAIN_BYTES = 128 << 20
# Errors of a storage for missing or damaged bytes. That it does not respond is not damage.
_BAD = (MissingError, ChangedError, StorageError, DamagedError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A damaged chunk (its row in the manifest's table), or a damaged file.

    `keys` are the tensors and objects that cannot be read, including those whose chunks are deltas to this one.
    """

    file: str
    chunk: int | None
    problem: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The figures of a check: `chunks` of `stored_bytes` in `files`, in `seconds`.

    `decoded` is False for chunks with stream extensions that are not registered here (encryption): then only the stored
    bytes were checked against their checksums, not the decoded ones.
    """

    url: str
    files: int
    chunks: int
    stored_bytes: int
    damages: tuple[Damage, ...]
    decoded: bool
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether there is no damage."""
        return not self.damages

    @property
    def damaged_keys(self) -> tuple[str, ...]:
        """All tensors and objects that cannot be read, each once."""
        return tuple(dict.fromkeys(key for damage in self.damages for key in damage.keys))


def verify_checkpoint(
    url: str,
    target_options: Mapping[str, Any] | None = None,
    *,
    threads: int | None = None,
    progress: Callable[[WorkProgress], None] | None = None,
    extension_registry: Any = None,
) -> VerifyReport:
    """Read and check all of the checkpoint at `url`, which must be in Millrace's format.

    `progress` is called in this thread from time to time. Memory: 10 MiB per thread, 40 MiB with deltas. The report
    contains all damage, including that of manifests. Raises `CheckpointNotFoundError`, `UnsupportedFormatError`,
    `UsageError` for a checkpoint of torch's own writer, and errors of a storage that denies access (`DeniedError`) or does
    not respond (`RetryableError`). A checkpoint that is removed or saved again meanwhile is not damaged: then
    `CheckpointNotFoundError` or `ChangedError` is raised.
    """
    if threads is not None and threads < 1:
        raise ConfigurationError(f"threads={threads}", next_step="give a positive number")
    began = time.monotonic()
    storage = open_storage(url, target_options)
    manifests, damages = _manifests(storage)
    checks = [_Check(storage, manifest, threads or default_threads(), extension_registry) for manifest in manifests]
    total = sum(check.total_bytes for check in checks)
    done = 0
    for check in checks:
        for nbytes in check.run():
            done += nbytes
            if progress is not None:
                found = len(damages) + sum(len(each.problems) for each in checks)
                progress(WorkProgress(done_bytes=done, total_bytes=total, problems=found))
        damages += check.damages()
    if damages:
        _require_unchanged(storage, manifests)
    return VerifyReport(
        url=storage.url,
        files=sum(len(manifest.files) for manifest in manifests),
        chunks=sum(len(manifest.chunks) for manifest in manifests),
        stored_bytes=sum(check.done_bytes for check in checks),
        damages=tuple(damages),
        decoded=all(check.decodes for check in checks),
        seconds=time.monotonic() - began,
    )


def _manifests(storage: CheckpointStorage) -> tuple[list[Manifest], list[Damage]]:
    """The checkpoint's manifest, or those of all ranks of a save without collectives, and the damaged ones among them."""
    found: list[Manifest] = []
    damages: list[Damage] = []

    def read(rank: int | None) -> None:
        try:
            found.append(read_newest(storage, rank).manifest)
        except (CorruptCheckpointError, StorageError) as error:
            damages.append(Damage(file=manifest_name(rank), chunk=None, problem=error.message, keys=()))

    try:
        read(None)
    except CheckpointNotFoundError:
        if read_stock_metadata(storage) is not None:
            raise UsageError(
                f"torch's own writer saved {storage.url}, without checksums to check",
                next_step="save with CheckpointWriter, or load it to check that it can be read",
            ) from None
        ranks = sorted(rank for name in storage.names() if (rank := rank_of_manifest(name)) is not None)
        if not ranks:
            raise
        for rank in ranks:
            read(rank)
    return found, damages


def _require_unchanged(storage: CheckpointStorage, manifests: Sequence[Manifest]) -> None:
    """Raise `CheckpointNotFoundError` or `ChangedError` if `manifests` were removed or replaced after they were read."""
    try:
        now, _ = _manifests(storage)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{storage.url} was removed while it was checked", next_step="check another checkpoint"
        ) from error
    if not {each.save_id for each in now} <= {each.save_id for each in manifests}:
        raise ChangedError(f"{storage.url} was saved again while it was checked", next_step="check it again")


# --- groups of chunks (pure) ------------------------------------------------------------------------------


def batches(chunks: Table, limit_bytes: int = _BATCH_BYTES) -> Iterator[np.ndarray[Any, Any]]:
    """Rows of a chunk table in groups of about `limit_bytes` stored bytes, in the order of their places.

    A chunk and all its direct and indirect deltas are in one group, bases first.
    """
    count = len(chunks)
    if not count:
        return
    rows = np.arange(count)
    root = np.where(chunks["base"] == NO_BASE, rows, chunks["base"].astype(np.int64))
    while (further := root[root]).tolist() != root.tolist():
        root = further
    order = np.lexsort((rows, root, chunks["offset"][root], chunks["file"][root]))
    starts = np.flatnonzero(np.concatenate([[True], np.diff(root[order]) != 0]))
    sizes = np.add.reduceat(chunks["stored_bytes"][order].astype(np.int64), starts)
    begin, held = 0, 0
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        if held and held + size > limit_bytes:
            yield order[begin:start]
            begin, held = start, 0
        held += size
    yield order[begin:]


# --- one manifest -----------------------------------------------------------------------------------------


class _Check:
    """Checks all files and chunks of one manifest. `problems` maps rows to descriptions of their damage."""

    def __init__(self, storage: CheckpointStorage, manifest: Manifest, threads: int, registry: Any) -> None:
        self._storage, self._manifest, self._threads = storage, manifest, threads
        self._transforms = _transforms(manifest.transforms, registry)
        self.decodes = self._transforms is not None
        self._files: dict[int, StoredFile] = {}
        self._codec = ChunkCodec()
        self._file_problems: dict[int, str] = {}
        self.problems: dict[int, str] = {}
        self.total_bytes = int(manifest.chunks["stored_bytes"].sum())
        self.done_bytes = 0

    def run(self) -> Iterator[int]:
        """Check everything; yields the bytes of each part that is done."""
        for number, (file, problem) in enumerate(run_in_order(self._manifest.files, self._find, self._threads)):
            if file is not None:
                self._files[number] = file
            else:
                self._file_problems[number] = problem
        chains = bool((self._manifest.chunks["base"] != NO_BASE).any())
        groups = batches(self._manifest.chunks, _CHAINS_BATCH_BYTES if chains else _BATCH_BYTES)
        for rows, found in run_in_order(groups, self._check, self._threads):
            self.problems.update(found)
            nbytes = int(self._manifest.chunks["stored_bytes"][rows].sum())
            self.done_bytes += nbytes
            yield nbytes

    def damages(self) -> list[Damage]:
        """All damage, with the keys that cannot be read."""
        names = [file.name for file in self._manifest.files]
        column = self._manifest.chunks["file"]
        found = [
            Damage(file=names[number], chunk=None, problem=problem, keys=self._keys(np.flatnonzero(column == number)))
            for number, problem in sorted(self._file_problems.items())
        ]
        return found + [
            Damage(file=names[int(column[row])], chunk=row, problem=problem, keys=self._keys(np.array([row])))
            for row, problem in sorted(self.problems.items())
        ]

    def _find(self, listed: Any) -> tuple[StoredFile | None, str]:
        try:
            file = self._storage.stat(listed.name)
        except MissingError:
            return None, "is missing"
        except StorageError as error:
            return None, error.message
        if file.size != listed.size:
            return None, f"has {file.size} bytes instead of {listed.size}"
        return file, ""

    def _check(self, rows: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], dict[int, str]]:
        """Check the chunks of `rows`, in which bases come first."""
        found: dict[int, str] = {}
        chunks = self._manifest.chunks
        wanted = rows[[int(number) in self._files for number in chunks["file"][rows]]]
        if int(chunks["stored_bytes"][rows].sum()) > _CHAIN_BYTES and (chunks["base"][rows] != NO_BASE).any():
            for row in wanted.tolist():
                self._check_alone(row, found)
            return rows, found
        stored = self._read(wanted, found)
        # A decoded base is kept until the last of its deltas is done.
        needed = Counter(chunks["base"][rows].tolist())
        decoded: dict[int, np.ndarray[Any, Any]] = {}
        depths: dict[int, int] = {}
        for row in rows.tolist():
            base = int(chunks["base"][row])
            depths[row] = depths.get(base, -1) + 1
            if depths[row] > MAX_BASES:
                found.setdefault(row, f"ends a chain of more than {MAX_BASES} deltas")
            if row in stored:
                raw = self._decode(row, stored.pop(row), decoded.get(base), found)
                if raw is not None and needed[row]:
                    decoded[row] = raw
            needed[base] -= 1
            if not needed[base]:
                decoded.pop(base, None)
        return rows, found

    def _check_alone(self, row: int, found: dict[int, str]) -> None:
        """Check one chunk, with its bases."""
        chain = [row]
        while (base := int(self._manifest.chunks["base"][chain[-1]])) != NO_BASE:
            chain.append(base)
        raw: np.ndarray[Any, Any] | None = None
        for member in reversed(chain):
            if int(self._manifest.chunks["file"][member]) not in self._files:
                raw = None
                continue
            problems: dict[int, str] = {}
            stored = self._read(np.array([member]), problems)
            raw = self._decode(member, stored[member], raw, problems) if member in stored else None
            if member == row:
                found.update(problems)

    def _read(self, rows: np.ndarray[Any, Any], found: dict[int, str]) -> dict[int, memoryview]:
        """The stored bytes of chunks. After an error in a range its chunks are read one by one to find the damaged ones."""
        chunks = self._manifest.chunks
        ranges = read_ranges(chunks, rows, _GAP_BYTES, _BATCH_BYTES)
        stored: dict[int, memoryview] = {}
        while ranges:
            wanted = ranges.pop()
            try:
                data = as_bytes(self._storage.read(self._files[wanted.file], wanted.start, wanted.stop)).data
            except _BAD as error:
                if len(wanted.rows) == 1:
                    found[wanted.rows[0]] = error.message
                else:
                    ranges += [each for row in wanted.rows for each in read_ranges(chunks, np.array([row]), 0, 0)]
                continue
            for row in wanted.rows:
                start = int(chunks["offset"][row]) - wanted.start
                stored[row] = data[start : start + int(chunks["stored_bytes"][row])]
        return stored

    def _decode(
        self, row: int, stored: Buffer, base: np.ndarray[Any, Any] | None, found: dict[int, str]
    ) -> np.ndarray[Any, Any] | None:
        """The decoded bytes of a chunk; None if it cannot be decoded."""
        chunks = self._manifest.chunks
        if checksum(stored) != int(chunks["stored_checksum"][row]):
            found[row] = "does not match its checksum"
            return None
        if self._transforms is None or (int(chunks["base"][row]) != NO_BASE and base is None):
            return None
        raw = np.empty(int(chunks["raw_bytes"][row]), dtype=np.uint8)
        try:
            plain = self._transforms.undo(stored, raw.size + MAX_CHUNK_OVERHEAD_BYTES)
            kind = Kind.from_code(int(chunks["kind"][row]))
            self._codec.decode(plain, kind, raw.data, None if base is None else base.data)
        except CorruptCheckpointError as error:
            found[row] = error.message
            return None
        if checksum(raw.data) != int(chunks["raw_checksum"][row]):
            found[row] = "decodes to other bytes than were saved"
            return None
        return raw

    def _keys(self, rows: np.ndarray[Any, Any]) -> tuple[str, ...]:
        """The tensors and objects that need one of `rows`, directly or as the base of a delta."""
        base = self._manifest.chunks["base"]
        bad = np.zeros(len(base), dtype=np.int64)
        bad[rows] = 1
        for row in np.flatnonzero(base != NO_BASE).tolist():
            bad[row] |= bad[base[row]]
        spans = item_spans(self._manifest)
        before = np.concatenate([[0], np.cumsum(bad)])
        touched = np.flatnonzero(before[spans.stop] > before[spans.first]).tolist()
        keys = item_keys(self._manifest)
        return tuple(dict.fromkeys(keys[number] for number in touched))


def _transforms(descriptors: Sequence[str], registry: Any) -> Transforms | None:
    """The stream extensions of the chunks; None if one is not registered."""
    if not descriptors:
        return Transforms()
    try:
        if registry is None:
            from millrace.checkpoint.codec.extension import extension_registry

            registry = extension_registry()
        return transforms_for(descriptors, registry)
    except (UnsupportedFormatError, ImportError):
        return None
