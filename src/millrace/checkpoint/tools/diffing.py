"""Compares two checkpoints, whoever wrote them: which values came, went or changed, and by how much.

Chunks with equal checksums of what they hold (64 bits) count as equal where both checkpoints have the same shards, and
are not read. What differs is read piece by piece, a few at a time, and compared bit by bit; torch is needed for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from millrace.checkpoint.format.inventory import ItemSpans, item_spans, select_keys
from millrace.checkpoint.reading.contents import (
    Bytes,
    Contents,
    ManifestContents,
    Part,
    open_contents,
    pieces,
    stream,
    whole,
)
from millrace.checkpoint.tools.progress import WorkProgress
from millrace.errors import MissingDependencyError

_TEXT_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """A tensor that both checkpoints have and that is not the same.

    With another dtype or shape its values are not compared. Else `changed` of `elements` differ in their bits. `max_abs`
    and `mean_abs` are of B - A, the mean over all elements; `relative_l2` is |B - A| / |A| in the Euclidean norm (None
    where A is zero). `not_finite` of the changed elements are infinite or no number in A or B, and are left out of the
    three. All of them are None for elements that are no numbers (bool).
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
    """An object that is not the same; `before` and `after` are what it was and is, cut short, where it is a plain value."""

    key: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """What B has otherwise than A. `equal` counts tensors and objects; `skipped_bytes` were equal by their checksums."""

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
    """Compare the checkpoints at `a` and `b`, or what `keys` name of them (`select_keys`).

    `target_options` are for the one and the other. Raises as a load does, and `MissingDependencyError` without torch.
    """
    one, other = (
        open_contents(url, options, threads=threads, trusted_types=trusted_types, extension_registry=extension_registry)
        for url, options in zip((a, b), target_options, strict=True)
    )
    return _Diff(one, other, keys, trusted_types, progress).run()


class _Pair(NamedTuple):
    """The same box of a tensor in A and B. `equal` says that their checksums are the same."""

    part: Part
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
        self._done_bytes = self._total_bytes = 0

    def run(self) -> DiffReport:
        a, b = self._a, self._b
        in_a = [key for key in self._keys if key in a.tensors or key in a.blob_bytes]
        in_b = [key for key in self._keys if key in b.tensors or key in b.blob_bytes]
        both = [key for key in in_a if key in b.tensors and key in a.tensors]
        # A tensor on one side and an object on the other is a value less and a value more.
        turned = {key for key in in_a if (key in a.tensors) != (key in b.tensors) and key in set(in_b)}
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
            added=tuple(key for key in in_b if key not in set(in_a) or key in turned),
            removed=tuple(key for key in in_a if key not in set(in_b) or key in turned),
            tensors=tuple(changes[key] for key in both if key in changes),
            objects=tuple(objects),
            equal=len(both) - len(changes) + equal_objects,
            compared_bytes=self._total_bytes,
            skipped_bytes=skipped_bytes,
        )

    def _pairs(self, key: str) -> Iterator[_Pair]:
        """The pieces of a tensor, by which it is compared."""
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
            for piece in pieces(a, Part(key, entry.dtype, shard.offsets, shard.sizes)):
                yield _Pair(piece, self._checksums.equal(key, number, position, position + piece.nbytes))
                position += piece.nbytes

    def _compare(self, compared: Mapping[str, Sequence[_Pair]]) -> Iterator[TensorChange]:
        if not compared:
            return
        order = [pair for members in compared.values() for pair in members]
        left = iter(stream(self._a, (pair.part for pair in order)))
        right = iter(stream(self._b, (pair.part for pair in order if not pair.equal)))
        for key, members in compared.items():
            found = _differences().Difference(members[0].part.dtype)
            for pair in members:
                before: Bytes = next(left)[1]
                # What is equal is read once: the norm of A is of all of it.
                found.add(before, before if pair.equal else next(right)[1])
                self._tell(pair.part.nbytes)
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

    def _tell(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self._progress is not None:
            self._progress(WorkProgress(done_bytes=self._done_bytes, total_bytes=self._total_bytes))

    def _objects(self, keys: Sequence[str]) -> tuple[list[ObjectChange], int]:
        changes = []
        for key, before, after in zip(keys, self._a.read_blobs(keys), self._b.read_blobs(keys), strict=True):
            if before != after and (change := self._object(key, before, after)) is not None:
                changes.append(change)
        return changes, len(keys) - len(changes)

    def _object(self, key: str, before: bytes, after: bytes) -> ObjectChange | None:
        """Compare what was stored in different ways: equal values may have been."""
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
    """The module that needs torch, which takes a second to load."""
    try:
        from millrace.checkpoint.tools import differences
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "a comparison of values needs torch", next_step="pip install 'millrace[torch]'"
        ) from error
    return differences


class _Checksums(NamedTuple):
    """Tells by checksums where two checkpoints of ours hold the same."""

    a: ManifestContents
    b: ManifestContents
    spans_a: ItemSpans
    spans_b: ItemSpans

    @classmethod
    def of(cls, a: Contents, b: Contents) -> _Checksums | None:
        if not isinstance(a, ManifestContents) or not isinstance(b, ManifestContents):
            return None
        return cls(a, b, item_spans(a.manifest), item_spans(b.manifest))

    def equal(self, key: str, shard: int, start: int, stop: int) -> bool:
        """Whether the bytes `[start, stop)` of a shard are certainly the same on both sides."""
        rows_a, begin_a = _rows(self.a, self.spans_a, self.a.item(key) + shard, start, stop)
        rows_b, begin_b = _rows(self.b, self.spans_b, self.b.item(key) + shard, start, stop)
        one, other = self.a.manifest.chunks, self.b.manifest.chunks
        return begin_a == begin_b and all(
            np.array_equal(one[name][rows_a], other[name][rows_b]) for name in ("raw_bytes", "raw_checksum")
        )


def _rows(contents: ManifestContents, spans: ItemSpans, number: int, start: int, stop: int) -> tuple[slice, int]:
    """The chunks that hold some bytes of an item, and where in the first of them these begin."""
    first, last = int(spans.first[number]), int(spans.stop[number])
    raw = contents.manifest.chunks["raw_bytes"][first:last].astype(np.int64)
    begin = int(contents.manifest.items["start"][number]) + start
    ends = np.cumsum(raw)
    low = int(np.searchsorted(ends, begin, side="right"))
    high = int(np.searchsorted(ends, begin + stop - start, side="left")) + 1
    return slice(first + low, first + high), begin - int(ends[low] - raw[low])
