"""Reads many ranges of many objects at once, for fsspec's `cat_ranges` and `cat`.

Each object is opened once. All of its ranges are requested before the first wait, neighbours with one request, and
several objects are read at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from millrace.cache.reading.reader import ObjectReader

_OBJECTS_AT_A_TIME = 16

Range = tuple[int | None, int | None]
"""Start and stop as in a slice: None for the ends, negative from the end."""

ReadRanges = Callable[[str, Sequence[Range]], list[bytes]]


def position(value: int | None, size: int, *, default: int) -> int:
    """One end of a `Range` in an object of `size` bytes."""
    if value is None:
        return default
    return max(0, size + value) if value < 0 else min(value, size)


def bounds(wanted: Range, size: int) -> tuple[int, int]:
    """The bytes `[start, stop)` of a `Range` in an object of `size` bytes."""
    start = position(wanted[0], size, default=0)
    return start, max(start, position(wanted[1], size, default=size))


def read_ranges(reader: ObjectReader, ranges: Sequence[Range]) -> list[bytes]:
    """The bytes of each range of one object. Missing blocks are fetched at once."""
    spans = [bounds(wanted, reader.size) for wanted in ranges]
    if len(spans) > 1:
        reader.prefetch_ranges(sorted(span for span in spans if span[0] < span[1]), wait=True)
    return [bytes(reader.read(start, stop)) for start, stop in spans]


def read_batch(paths: Sequence[str], ranges: Sequence[Range], read: ReadRanges) -> list[bytes | Exception]:
    """Call `read(path, its ranges)` for every different path, several at a time; results in the order of `paths`.

    If it raises, the exception is the result of every range of that object.
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
        except Exception as error:  # noqa: BLE001 - returned to the caller, which decides
            for place in mine:
                answers[place] = error

    if len(places) == 1:
        one(paths[0])
    elif places:
        with ThreadPoolExecutor(min(len(places), _OBJECTS_AT_A_TIME), thread_name_prefix="millrace-batch") as pool:
            list(pool.map(one, places))
    return answers


def as_list(value: int | Sequence[int | None] | None, count: int) -> list[int | None]:
    """fsspec's bounds, one for all or one for each, as a list. Raises `ValueError` for another number of them."""
    values = [value] * count if value is None or isinstance(value, int) else list(value)
    if len(values) != count:
        raise ValueError(f"{len(values)} bounds for {count} paths")
    return values
