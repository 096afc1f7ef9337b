"""What a manifest says about each tensor and object: where its bytes lie, and how many they are. Pure; no torch, no I/O."""

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
    """A tensor, or (without `dtype`) an object. Sizes in bytes.

    `stored_bytes` is its share in the chunks that hold it, without the chunks that those are deltas to. The three counts
    are of its chunks: stored whole, stored as a delta, and chunks of an earlier checkpoint that are used as they are.
    `files` are named as in the manifest, so those of other checkpoints begin with `../`.
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
        """The ranks that wrote it, as far as the names of its files say so."""
        return tuple(sorted({rank for name in self.files if (rank := rank_of(name)) is not None}))


class ItemSpans(NamedTuple):
    """Where the items of a manifest lie: rows `[first, stop)` of the chunk table, and bytes `[begin, end)` of all chunks
    laid end to end, as they were before the codec. Of an item without bytes both are empty.
    """

    first: np.ndarray[Any, Any]
    stop: np.ndarray[Any, Any]
    begin: np.ndarray[Any, Any]
    end: np.ndarray[Any, Any]


def item_spans(manifest: Manifest) -> ItemSpans:
    """Find every item, in the order of `manifest.items`."""
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
    """The key of every item: a tensor's as often as it has shards."""
    return [entry.key for entry in manifest.tensors for _ in entry.shards] + list(manifest.blobs)


def inventory(manifest: Manifest) -> list[StoredValue]:
    """Every tensor in the manifest's order, then every object."""
    chunks, spans = manifest.chunks, item_spans(manifest)
    names = [file.name for file in manifest.files]
    elsewhere = np.array([name.startswith("../") for name in names], dtype=bool)
    referenced = elsewhere[chunks["file"]] if len(chunks) else np.zeros(0, dtype=bool)
    delta = ~referenced & (chunks["base"] != NO_BASE)
    # Within a chunk every value has its share by length.
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
    """The rank that wrote a data file, by its name; None for one that no rank wrote (an export)."""
    found = _RANK.search(name)
    return None if found is None else int(found[1] or found[2])


# --- keys ---------------------------------------------------------------------------------------------


def natural_order(key: str) -> tuple[Any, ...]:
    """Sorts `layers.2` before `layers.10`."""
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in _DIGITS.split(key))


def is_named(key: str, pattern: str) -> bool:
    """Whether a pattern names a key: it is the key, what the key begins with before a dot, or matches as file names do."""
    return key == pattern or key.startswith(f"{pattern}.") or fnmatch.fnmatchcase(key, pattern)


def select_keys(keys: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The keys that some pattern names, in their order; all of them without a pattern.

    A pattern is a key, what keys begin with before a dot (`model` for `model.layers.0.weight`), or has `*`, `?` or
    `[...]` in it as file names do, where `*` goes over dots, too. Raises `UsageError` for one that names nothing.
    """
    there = list(keys)
    if not patterns:
        return there
    chosen: set[str] = set()
    for pattern in patterns:
        found = [key for key in there if is_named(key, pattern)]
        if not found:
            some = ", ".join(repr(key) for key in there[:3])
            raise UsageError(
                f"nothing in the checkpoint has a key like {pattern!r}",
                next_step=f"'millrace checkpoints show' lists the keys ({some}, ...)" if some else "it is empty",
            )
        chosen.update(found)
    return [key for key in there if key in chosen]
