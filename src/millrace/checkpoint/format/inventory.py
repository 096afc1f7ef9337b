"""The inventory of a manifest: size and location of each tensor and object. Selects keys by patterns. Pure; no torch, no
I/O.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from millrace.checkpoint.format.manifest import Manifest
from millrace.checkpoint.format.tables import NO_BASE
from millrace.errors import UsageError

_RANK = re.compile(r"data-[0-9a-f]+-(\d+)-\d+\.millrace|__(\d{1,8})_\d+\.distcp", re.ASCII)
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValue:
    """A tensor, or an object (without `dtype`). Sizes in bytes.

    `stored_bytes` is its share of its chunks, without their bases. The three counts are of its chunks: stored whole,
    stored as a delta, and references to chunks of an earlier checkpoint. `files` are names as in the manifest: files of
    other checkpoints begin with `../`.
    """

    key: str
    dtype: str | None
    shape: tuple[int, ...]
    shards: int
    raw_bytes: int
    stored_bytes: int
    files: tuple[str, ...]
    chunks_full: int = 0
    chunks_delta: int = 0
    chunks_referenced: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that wrote it, by the names of its files."""
        return tuple(sorted({rank for name in self.files if (rank := rank_of(name)) is not None}))


class ItemSpans(NamedTuple):
    """The locations of the items of a manifest: rows `[first, stop)` of the chunk table, and bytes `[begin, end)` in the
    concatenation of all decoded chunks. Both are empty for an item without bytes.
    """

    first: np.ndarray[Any, Any]
    stop: np.ndarray[Any, Any]
    begin: np.ndarray[Any, Any]
    end: np.ndarray[Any, Any]


def item_spans(manifest: Manifest) -> ItemSpans:
    """The location of every item, in the order of `manifest.items`."""
    items, raw = manifest.items, manifest.chunks["raw_bytes"].astype(np.int64)
    nbytes = items["nbytes"].astype(np.int64)
    used = nbytes > 0
    row_ends = np.cumsum(raw)
    first = np.where(used, items["chunk"].astype(np.int64), 0)
    begin = np.zeros(len(items), dtype=np.int64)
    begin[used] = row_ends[first[used]] - raw[first[used]] + items["start"][used]
    stop = np.where(used, np.searchsorted(row_ends, begin + nbytes) + 1, 0)
    return ItemSpans(first, stop, begin, begin + nbytes)


def item_keys(manifest: Manifest) -> list[str]:
    """The key of every item. A tensor has one item per shard."""
    return [entry.key for entry in manifest.tensors for _ in entry.shards] + list(manifest.blobs)


def inventory(manifest: Manifest) -> list[StoredValue]:
    """Every tensor in the order of the manifest, then every object."""
    chunks, spans = manifest.chunks, item_spans(manifest)
    names = [file.name for file in manifest.files]
    elsewhere = np.array([name.startswith("../") for name in names], dtype=bool)
    referenced = elsewhere[chunks["file"]] if len(chunks) else np.zeros(0, dtype=bool)
    delta = ~referenced & (chunks["base"] != NO_BASE)
    # A value has a share of each of its chunks, proportional to its length.
    line = np.concatenate([[0], np.cumsum(chunks["raw_bytes"], dtype=np.int64)])
    stored = np.concatenate([[0], np.cumsum(chunks["stored_bytes"], dtype=np.int64)])
    shares = np.interp(spans.end, line, stored) - np.interp(spans.begin, line, stored)

    def value(key: str, dtype: str | None, shape: tuple[int, ...], numbers: range) -> StoredValue:
        rows = np.concatenate([np.arange(spans.first[number], spans.stop[number]) for number in numbers] or [_NO_ROWS])
        return StoredValue(
            key=key,
            dtype=dtype,
            shape=shape,
            shards=len(numbers),
            raw_bytes=int(manifest.items["nbytes"][numbers.start : numbers.stop].sum()),
            stored_bytes=round(float(shares[numbers.start : numbers.stop].sum())),
            files=tuple(names[file] for file in np.unique(chunks["file"][rows]).tolist()),
            chunks_full=len(rows) - int(delta[rows].sum()) - int(referenced[rows].sum()),
            chunks_delta=int(delta[rows].sum()),
            chunks_referenced=int(referenced[rows].sum()),
        )

    found, number = [], 0
    for entry in manifest.tensors:
        found.append(value(entry.key, entry.dtype, entry.shape, range(number, number + len(entry.shards))))
        number += len(entry.shards)
    found += [value(key, None, (), range(at, at + 1)) for at, key in enumerate(manifest.blobs, number)]
    return found


_NO_ROWS = np.empty(0, dtype=np.int64)


def rank_of(name: str) -> int | None:
    """The rank that wrote a data file, by its name. None for other files (exports, for example)."""
    found = _RANK.search(name)
    return None if found is None else int(found[1] or found[2])


# --- keys ---------------------------------------------------------------------------------------------


def natural_order(key: str) -> tuple[Any, ...]:
    """Sorts `layers.2` before `layers.10`."""
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in _DIGITS.split(key))


def is_named(key: str, pattern: str) -> bool:
    """Whether a pattern selects a key: by equality, as a prefix before a dot, or as a pattern of file names."""
    return key == pattern or key.startswith(f"{pattern}.") or fnmatch.fnmatchcase(key, pattern)


def select_keys(keys: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The keys that match a pattern, in their order. All keys without a pattern.

    A pattern is a key, a prefix before a dot (`model` for `model.layers.0.weight`), or contains `*`, `?` or `[...]` as in
    file names, where `*` also matches dots. Raises `UsageError` for a pattern that matches no key.
    """
    known = list(keys)
    if not patterns:
        return known
    chosen: set[str] = set()
    for pattern in patterns:
        found = [key for key in known if is_named(key, pattern)]
        if not found:
            some = ", ".join(repr(key) for key in known[:3])
            raise UsageError(
                f"no key of the checkpoint matches {pattern!r}",
                next_step=f"'millrace checkpoints show' lists the keys ({some}, ...)" if some else "it is empty",
            )
        chosen.update(found)
    return [key for key in known if key in chosen]
