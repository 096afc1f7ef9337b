"""Many ranges of many objects at once, as fsspec's `cat_ranges` and `cat` ask for them.

What is here is copied out of the maps. Of everything else each object is opened once, all blocks of all its ranges are
asked for before the first is waited for, neighbours with one request, and several objects are read at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from millrace.cache.blocks import RUN_BLOCKS, blocks_of, coalesce
from millrace.cache.reader import ObjectReader

_OBJECTS_AT_A_TIME = 16

Range = tuple[int | None, int | None]
"""First byte and the one after the last, as in a slice: None for the ends, negative from the end."""

ReadRanges = Callable[[str, Sequence[Range]], list[bytes]]


def position(value: int | None, size: int, *, default: int) -> int:
    """One end of a `Range` in an object of `size` bytes."""
    if value is None:
        return default
    return max(0, size + value) if value < 0 else min(value, size)


def bounds(wanted: Range, size: int) -> tuple[int, int]:
    """The bytes `[start, stop)` that a `Range` means in an object of `size` bytes."""
    start = position(wanted[0], size, default=0)
    return start, max(start, position(wanted[1], size, default=size))


def read_ranges(reader: ObjectReader, ranges: Sequence[Range]) -> list[bytes]:
    """The bytes of each range of one object; what is missing is fetched all at once."""
    spans = [bounds(wanted, reader.size) for wanted in ranges]
    if len(spans) > 1:
        blocks = {block for start, stop in spans for block in blocks_of(start, stop, reader.block_bytes)}
        for run in coalesce(blocks, RUN_BLOCKS):
            reader.prefetch(run)
    return [bytes(reader.read(start, stop)) for start, stop in spans]


def read_batch(paths: Sequence[str], ranges: Sequence[Range], read: ReadRanges) -> list[bytes | Exception]:
    """`read(path, its ranges)` for every different path, several at a time; answers in the order of `paths`.

    An exception stands for every range of the object that it came from.
    """
    places: dict[str, list[int]] = {}
    for place, path in enumerate(paths):
        places.setdefault(path, []).append(place)
    answers: list[bytes | Exception] = [b""] * len(paths)

    def one(path: str) -> None:
        mine = places[path]
        try:
            for place, data in zip(mine, read(path, [ranges[place] for place in mine]), strict=True):
                answers[place] = data
        except Exception as error:  # noqa: BLE001 - handed to the caller, who decides
            for place in mine:
                answers[place] = error

    if len(places) == 1:
        one(paths[0])
    elif places:
        with ThreadPoolExecutor(min(len(places), _OBJECTS_AT_A_TIME), thread_name_prefix="millrace-batch") as pool:
            list(pool.map(one, places))
    return answers


def as_list(value: int | Sequence[int | None] | None, count: int) -> list[int | None]:
    """fsspec's way to write one bound for all, or one for each. Raises `ValueError` for another number of them."""
    values = [value] * count if value is None or isinstance(value, int) else list(value)
    if len(values) != count:
        raise ValueError(f"{len(values)} bounds for {count} paths")
    return values
