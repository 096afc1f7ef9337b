"""Compares two checkpoints of Millrace or of torch's own writer: added, removed and changed values, and the differences.

If both checkpoints have the same shards, chunks with equal checksums of their content (64 bits) count as equal and are not
read. The others are read in pieces, a few at a time, and compared bit by bit, which needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from millrace.checkpoint.format.inventory import ItemSpans, item_spans, select_keys
from millrace.checkpoint.reading.contents import (
    Box,
    Bytes,
    Contents,
    pieces,
    stream,
    whole,
)
from millrace.checkpoint.reading.opening import ManifestContents, open_contents
from millrace.checkpoint.tools import WorkProgress
from millrace.errors import MissingDependencyError

_TEXT_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """A tensor that is different in the two checkpoints.

    With another dtype or shape its values are not compared. Otherwise `changed` of `elements` differ in their bits.
    `max_abs` and `mean_abs` are of B - A, the mean over all elements; `relative_l2` is |B - A| / |A| in the Euclidean norm
    (None if A is zero). `not_finite` of the changed elements are infinite or NaN in A or B, and are left out of these three.
    All of them are None for elements that are not numbers (bool).
    """

    key: str
    dtype: tuple[str, str]
    shape: tuple[tuple[int, ...], tuple[int, ...]]
    elements: int
    changed: int | None = None
    max_abs: float | None = None
    mean_abs: float | None = None
    relative_l2: float | None = None
    not_finite: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectChange:
    """An object that is different; `before` and `after` are its shortened texts in A and B."""

    key: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """The differences of B to A. `equal` counts tensors and objects; `skipped_bytes` were equal by their checksums."""

    urls: tuple[str, str]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    tensors: tuple[TensorChange, ...]
    objects: tuple[ObjectChange, ...]
    equal: int
    compared_bytes: int
    skipped_bytes: int

    @property
    def same(self) -> bool:
        """Whether there is no difference."""
        return not (self.added or self.removed or self.tensors or self.objects)


def diff_checkpoints(
    a: str,
    b: str,
    *,
    keys: Sequence[str] = (),
    target_options: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None] = (None, None),
    threads: int | None = None,
    trusted_types: Sequence[type] = (),
    extension_registry: Any = None,
    progress: Callable[[WorkProgress], None] | None = None,
) -> DiffReport:
    """Compare the checkpoints at `a` and `b`, or only the values that `keys` select (`select_keys`).

    `target_options` are for `a` and `b`. Raises the errors of a load, and `MissingDependencyError` without torch.
    """
    one, other = (
        open_contents(
            url,
            options,
            threads=threads,
            trusted_types=trusted_types,
            extension_registry=extension_registry,
            keys=keys,
        )
        for url, options in zip((a, b), target_options, strict=True)
    )
    return _Diff(one, other, keys, trusted_types, progress).run()


class _Pair(NamedTuple):
    """The same box of a tensor in A and B. `equal`: whether their checksums are the same."""

    part: Box
    equal: bool


class _Diff:
    def __init__(
        self,
        a: Contents,
        b: Contents,
        patterns: Sequence[str],
        trusted_types: Sequence[type],
        progress: Callable[[WorkProgress], None] | None,
    ) -> None:
        self._a, self._b, self._trusted_types, self._progress = a, b, trusted_types, progress
        there = dict.fromkeys([*a.tensors, *a.blob_bytes, *b.tensors, *b.blob_bytes])
        self._keys = select_keys(there, patterns)
        self._checksums = _Checksums.of(a, b)
        self._done_bytes = self._read_bytes = self._total_bytes = 0

    def run(self) -> DiffReport:
        a, b = self._a, self._b
        in_a = [key for key in self._keys if key in a.tensors or key in a.blob_bytes]
        in_b = [key for key in self._keys if key in b.tensors or key in b.blob_bytes]
        both = [key for key in in_a if key in b.tensors and key in a.tensors]
        # A key that is a tensor on one side and an object on the other counts as removed and added.
        replaced = {key for key in in_a if (key in a.tensors) != (key in b.tensors) and key in set(in_b)}
        others = {
            key: TensorChange(
                key=key,
                dtype=(a.tensors[key].dtype, b.tensors[key].dtype),
                shape=(a.tensors[key].shape, b.tensors[key].shape),
                elements=math.prod(b.tensors[key].shape),
            )
            for key in both
            if (a.tensors[key].dtype, a.tensors[key].shape) != (b.tensors[key].dtype, b.tensors[key].shape)
        }
        pairs = {key: list(self._pairs(key)) for key in both if key not in others}
        skipped = {key for key, members in pairs.items() if all(pair.equal for pair in members)}
        compared = {key: members for key, members in pairs.items() if key not in skipped}
        self._total_bytes = sum(pair.part.nbytes for members in compared.values() for pair in members)
        changes = {**others, **{change.key: change for change in self._compare(compared)}}
        objects, equal_objects = self._objects([key for key in in_a if key in a.blob_bytes and key in b.blob_bytes])
        skipped_bytes = sum(pair.part.nbytes for members in pairs.values() for pair in members if pair.equal)
        return DiffReport(
            urls=(a.url, b.url),
            added=tuple(key for key in in_b if key not in set(in_a) or key in replaced),
            removed=tuple(key for key in in_a if key not in set(in_b) or key in replaced),
            tensors=tuple(changes[key] for key in both if key in changes),
            objects=tuple(objects),
            equal=len(both) - len(changes) + equal_objects,
            compared_bytes=self._total_bytes,
            skipped_bytes=skipped_bytes,
        )

    def _pairs(self, key: str) -> Iterator[_Pair]:
        """The pieces in which a tensor is compared."""
        a, b = self._a, self._b
        entry = a.tensors[key]
        if self._checksums is None or entry.shards != b.tensors[key].shards:
            whole_in_pieces = a if not a.in_pieces else b
            for piece in pieces(whole_in_pieces, whole(entry)):
                yield _Pair(piece, False)
            return
        for number, shard in enumerate(entry.shards):
            if 0 in shard.sizes:
                continue
            position = 0
            for piece in pieces(a, Box(key, entry.dtype, shard.offsets, shard.sizes)):
                yield _Pair(piece, self._checksums.equal(key, number, position, position + piece.nbytes))
                position += piece.nbytes

    def _compare(self, compared: Mapping[str, Sequence[_Pair]]) -> Iterator[TensorChange]:
        if not compared:
            return
        order = [pair for members in compared.values() for pair in members]
        other = [pair.part for pair in order if not pair.equal]
        self._read_bytes = self._total_bytes + sum(part.nbytes for part in other)
        left = iter(stream(self._a, (pair.part for pair in order), count=self._report))
        right = iter(stream(self._b, other, count=self._report))
        for key, members in compared.items():
            found = _differences().Difference(members[0].part.dtype)
            for pair in members:
                before: Bytes = next(left)[1]
                # Equal pieces are read once, because the norm of A includes them.
                found.add(before, before if pair.equal else next(right)[1])
            if found.changed:
                entry = self._a.tensors[key]
                yield TensorChange(
                    key=key,
                    dtype=(entry.dtype, entry.dtype),
                    shape=(entry.shape, entry.shape),
                    elements=found.elements,
                    changed=found.changed,
                    max_abs=found.max_abs,
                    mean_abs=found.mean_abs,
                    relative_l2=found.relative_l2,
                    not_finite=found.not_finite,
                )

    def _report(self, nbytes: int) -> None:
        """Report progress: the bytes read of A and of B, as a share of the compared bytes."""
        self._done_bytes += nbytes
        if self._progress is not None:
            done_bytes = self._total_bytes * self._done_bytes // max(1, self._read_bytes)
            self._progress(WorkProgress(done_bytes=done_bytes, total_bytes=self._total_bytes))

    def _objects(self, keys: Sequence[str]) -> tuple[list[ObjectChange], int]:
        changes = []
        for key, before, after in zip(keys, self._a.read_blobs(keys), self._b.read_blobs(keys), strict=True):
            if before != after and (change := self._object(key, before, after)) is not None:
                changes.append(change)
        return changes, len(keys) - len(changes)

    def _object(self, key: str, before: bytes, after: bytes) -> ObjectChange | None:
        """Compare two objects with different bytes, which may still have equal values."""
        differences = _differences()
        from millrace.checkpoint.state.tensors import check_blob

        one, other = (check_blob(data, key, self._trusted_types) for data in (before, after))
        if differences.same_objects(one, other):
            return None
        return ObjectChange(key=key, before=_text(one), after=_text(other))


def _text(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _TEXT_CHARACTERS else f"{text[: _TEXT_CHARACTERS - 3]}..."


def _differences() -> Any:
    """The module that needs torch. Torch takes a second to load, so it is imported on first use."""
    try:
        from millrace.checkpoint.tools import differences
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "a comparison of values needs torch", next_step="pip install 'millrace[torch]'"
        ) from error
    return differences


class _Checksums(NamedTuple):
    """Finds equal parts of two checkpoints of Millrace by their checksums."""

    a: ManifestContents
    b: ManifestContents
    spans_a: ItemSpans
    spans_b: ItemSpans

    @classmethod
    def of(cls, a: Contents, b: Contents) -> _Checksums | None:
        if not isinstance(a, ManifestContents) or not isinstance(b, ManifestContents):
            return None
        if not (a.has_checksums and b.has_checksums):
            return None
        return cls(a, b, item_spans(a.manifest), item_spans(b.manifest))

    def equal(self, key: str, shard: int, start: int, stop: int) -> bool:
        """Whether the bytes `[start, stop)` of a shard are the same on both sides by their checksums."""
        rows_a, begin_a = _rows(self.a, self.spans_a, self.a.item(key) + shard, start, stop)
        rows_b, begin_b = _rows(self.b, self.spans_b, self.b.item(key) + shard, start, stop)
        one, other = self.a.manifest.chunks, self.b.manifest.chunks
        return begin_a == begin_b and all(
            np.array_equal(one[name][rows_a], other[name][rows_b]) for name in ("raw_bytes", "raw_checksum")
        )


def _rows(contents: ManifestContents, spans: ItemSpans, number: int, start: int, stop: int) -> tuple[slice, int]:
    """The chunks with the bytes `[start, stop)` of an item, and the position of `start` in the first of them."""
    first, last = int(spans.first[number]), int(spans.stop[number])
    raw = contents.manifest.chunks["raw_bytes"][first:last].astype(np.int64)
    begin = int(contents.manifest.items["start"][number]) + start
    ends = np.cumsum(raw)
    low = int(np.searchsorted(ends, begin, side="right"))
    high = int(np.searchsorted(ends, begin + stop - start, side="left")) + 1
    return slice(first + low, first + high), begin - int(ends[low] - raw[low])
