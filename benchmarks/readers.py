"""How each client reads the objects of the bucket: whole ones in pieces, Parquet, and small reads at any place."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.buckets import BUCKET, obstore_client

PIECE_BYTES = 1 << 20

COLUMNS = 20
ONE_COLUMN = "c3"

ReadAt = Callable[[int, int], Any]
"""Gives so many bytes (the second number) from a place (the first) of the file that was opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One client, as a case uses it. Paths are `bucket/key`.

    `table` reads a Parquet file, all of it or the columns that are named. `opened` may be used by one thread at a time.
    """

    listed: Callable[[str], object]
    pieces: Callable[[str], Iterable[Any]]
    table: Callable[[str, Sequence[str] | None], Any]
    opened: Callable[[str], ReadAt]


def _import_all() -> None:
    """What the first table would import: no client is to pay for it within a phase."""
    import pyarrow.dataset  # noqa: F401


def write_columns(file: Path, rows: int, *, group_rows: int | None = None) -> None:
    """A Parquet file of many columns of numbers, in eight row groups or of `group_rows` each: what a job has of which it
    reads a few.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    table = pa.table({f"c{number}": random.integers(0, 1 << 40, rows) for number in range(COLUMNS)})
    pq.write_table(table, file, row_group_size=group_rows or rows // 8, use_dictionary=False, compression="none")


def sum_of_one_column(reader: Reader, path: str) -> int:
    """Read one column of what `write_columns` wrote."""
    import pyarrow.compute as pc

    total: int = pc.sum(reader.table(path, [ONE_COLUMN]).column(ONE_COLUMN)).as_py()
    return total


class _Ranges(io.RawIOBase):
    """An object as a file that asks for each range that is read of it, and for nothing else."""

    def __init__(self, store: Any, key: str) -> None:
        super().__init__()
        self._store, self._key, self._position = store, key, 0
        self._size: int = store.head(key)["size"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        start = self._position
        self._position = self._size if size < 0 else min(start + size, self._size)
        return bytes(self._store.get_range(self._key, start=start, end=self._position))


def obstore_reader(options: Mapping[str, Any]) -> Reader:
    """obstore by hand: one GET for a file, or for a range where only that is wanted."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    _import_all()
    store = obstore_client(options)

    def key_of(path: str) -> str:
        return path.removeprefix(f"{BUCKET}/")

    def whole(path: str) -> Any:
        return store.get(key_of(path)).bytes()

    def table(path: str, columns: Sequence[str] | None) -> Any:
        if columns is None:
            return pq.read_table(pa.BufferReader(pa.py_buffer(whole(path))))
        return pq.read_table(_Ranges(store, key_of(path)), columns=columns)

    return Reader(
        listed=lambda folder: store.list(key_of(folder)).collect(),
        pieces=lambda path: [whole(path)],
        table=table,
        opened=lambda path: lambda place, size: store.get_range(key_of(path), start=place, length=size),
    )


def pyarrow_reader(filesystem: Any) -> Reader:
    """A file system of pyarrow, ours too."""
    import pyarrow.fs
    import pyarrow.parquet as pq

    _import_all()

    def pieces(path: str) -> Iterable[Any]:
        with filesystem.open_input_stream(path) as stream:
            while (piece := stream.read_buffer(PIECE_BYTES)).size:
                yield piece

    def opened(path: str) -> ReadAt:
        file = filesystem.open_input_file(path)
        return lambda place, size: file.read_at(size, place)

    return Reader(
        listed=lambda folder: filesystem.get_file_info(pyarrow.fs.FileSelector(folder)),
        pieces=pieces,
        table=lambda path, columns: pq.read_table(path, columns=columns, filesystem=filesystem),
        opened=opened,
    )


def fsspec_reader(filesystem: Any, *, in_turn: AbstractContextManager[Any] | None = None) -> Reader:
    """A file system of fsspec. `in_turn` is a lock for its opens and closes, where these must not happen at once."""
    import pyarrow.parquet as pq

    _import_all()

    turn = in_turn or nullcontext()

    def pieces(path: str) -> Iterable[Any]:
        with turn:
            file = filesystem.open(path, "rb")
        try:
            while piece := file.read(PIECE_BYTES):
                yield piece
        finally:
            with turn:
                file.close()

    def opened(path: str) -> ReadAt:
        with turn:
            file = filesystem.open(path, "rb")

        def read_at(place: int, size: int) -> Any:
            file.seek(place)
            return file.read(size)

        return read_at

    return Reader(
        listed=lambda folder: filesystem.ls(folder, detail=True),
        pieces=pieces,
        table=lambda path, columns: pq.read_table(path, columns=columns, filesystem=filesystem),
        opened=opened,
    )
