"""Read-ahead of Parquet columns: the same columns of the next row groups, by the footer, which is cached by then.

pyarrow reads a file object with one thread at a time, so each row group of a column would cost a round trip to the origin.
Its own S3 client reads several at the same time. So after a read of some columns of a row group, `ColumnAhead` returns their
ranges in the next ones: up to 4 MiB at first, and more with every row group that the reader continues to. A reader that does
not begin with the first row group may need only that one: its read-ahead begins with its second row group.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from typing_extensions import Buffer

_MAGIC = b"PAR1"
_END_BYTES = 8  # the length of the footer, and the magic
_FIRST_BYTES = 4 << 20
_MOST_BYTES = 64 << 20
_MOST_FOOTER_BYTES = 16 << 20  # parsing more takes longer than the read-ahead saves
_ATTEMPTS = 4  # reads of an object whose footer is not cached

Span = tuple[int, int]


class ColumnAhead:
    """The read-ahead of one reader of an object of `size` bytes. Not thread-safe.

    `cached` returns the bytes `[start, stop)` of the object, or None if they are not cached.
    """

    def __init__(self, size: int, cached: Callable[[int, int], Buffer | None]) -> None:
        self._size = size
        self._cached = cached
        self._attempts = _ATTEMPTS
        self._layout: _Layout | None = None
        self._group = -2
        self._columns: set[int] = set()
        self._until: dict[int, int] = {}
        self._window_bytes = 0

    def after(self, start: int, stop: int) -> list[Span]:
        """The ascending byte ranges to fetch ahead of a read of `[start, stop)`; usually none."""
        layout = self._layout
        if layout is None:
            layout = self._layout = self._parsed()
        if layout is None:
            return []
        group = layout.group_of(start)
        if group < 0:
            return []
        touched = {column for column, chunk in enumerate(layout.chunks(group)) if chunk[0] < stop and start < chunk[1]}
        reached = max((self._until.get(column, 0) for column in touched), default=0)
        if group == self._group + 1 or self._group < group < reached:
            self._window_bytes = min(max(2 * self._window_bytes, _FIRST_BYTES), _MOST_BYTES)
        elif group != self._group and group >= reached:
            self._window_bytes = 0 if group else _FIRST_BYTES
            self._columns = set()
            self._until = {}
        self._group = max(group, self._group) if group < reached else group
        self._columns |= touched
        return self._ahead(layout, group)

    def _ahead(self, layout: _Layout, group: int) -> list[Span]:
        nbytes = sum(stop - start for start, stop in (layout.chunks(group)[column] for column in self._columns))
        if not self._window_bytes or not nbytes:
            return []
        depth = max(self._window_bytes // nbytes, self._window_bytes > _FIRST_BYTES)
        last = min(group + 1 + depth, layout.groups)
        spans = []
        for column in self._columns:
            first = max(group + 1, self._until.get(column, 0))
            for each in range(first, last):
                spans += layout.chunks(each)[column : column + 1]  # a damaged footer may have fewer columns here
            self._until[column] = max(first, last)
        # A footer may describe other files, or be damaged.
        return sorted((start, stop) for start, stop in spans if 0 <= start < stop <= self._size)

    def _parsed(self) -> _Layout | None:
        parquet = sys.modules.get("pyarrow.parquet")  # other readers would have to wait for its import
        if not self._attempts or parquet is None:
            return None
        self._attempts -= 1
        end = self._cached(self._size - _END_BYTES, self._size) if self._size > _END_BYTES else b""
        if end is None:
            return None
        end = bytes(end)
        nbytes = int.from_bytes(end[: -len(_MAGIC)], "little")
        stop = self._size - _END_BYTES
        is_parquet = end.endswith(_MAGIC) and 0 < nbytes <= min(stop, _MOST_FOOTER_BYTES)
        footer = self._cached(stop - nbytes, stop) if is_parquet else None
        if footer is None:
            self._attempts = self._attempts if is_parquet else 0
            return None
        self._attempts = 0
        try:
            metadata = parquet.read_metadata(pa.BufferReader(b"".join((_MAGIC, footer, end))))
            # A signature follows the metadata of a file with encrypted columns. pyarrow ends the process at a
            # read of such a column without its key.
            return _Layout(metadata) if metadata.serialized_size == nbytes else None
        except (pa.ArrowException, OSError, ValueError, LookupError):
            return None  # encrypted, or not Parquet: its reader reports that


class _Layout:
    """Where the columns of each row group are."""

    def __init__(self, metadata: Any) -> None:
        self._metadata = metadata
        self.groups: int = metadata.num_row_groups
        self._chunks: dict[int, list[Span]] = {}
        self._starts = [self._start(group) for group in range(self.groups if metadata.num_columns else 0)]
        if self._starts != sorted(self._starts):
            self._starts = []

    def group_of(self, offset: int) -> int:
        """The row group of a byte; -1 if unknown."""
        return bisect.bisect_right(self._starts, offset) - 1

    def _start(self, group: int) -> int:
        return _chunk(self._metadata.row_group(group).column(0))[0]

    def chunks(self, group: int) -> list[Span]:
        """The byte range of each column of a row group."""
        found = self._chunks.get(group)
        if found is None:
            row_group = self._metadata.row_group(group)
            found = [_chunk(row_group.column(column)) for column in range(row_group.num_columns)]
            self._chunks[group] = found
        return found


def _chunk(column: Any) -> Span:
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
        start = column.dictionary_page_offset
    return start, start + column.total_compressed_size
