"""A scan of much more than the cache holds: what it adds to the memory of the process that reads.

The origin computes its bytes from offsets, so that fifty gigabytes cost nothing to store or send. Every byte is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import Case, Measure, Options, Prepared

_THREADS = 4
_READ_BYTES = 1 << 20
_CAPACITY = 2_000_000_000


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    objects, size = (6, 500_000_000) if options.quick else (50, 1_000_000_000)
    yield Prepared(
        {"sizes": {f"scan/{number:02}": size for number in range(objects)}},
        expected=objects * size,
        notes=(
            f"{objects} objects of {size / 1e6:.0f} MB, read once by {_THREADS} threads in pieces of 1 MiB; "
            f"the cache holds {_CAPACITY / 1e9:.0f} GB.",
        ),
    )


case = Case(name="memory", title="A scan that is larger than the cache", prepare=prepare, rounds=1)


def _scan(measure: Measure, context: Mapping[str, Any], opened: Callable[[Any, str], Any]) -> int:
    """Read and compare everything; returns the number of bytes."""
    from millrace.testing.computed import ComputedOrigin

    origin = ComputedOrigin(context["sizes"])

    def read(key: str) -> int:
        position = 0
        with opened(origin, key) as file:
            while data := file.read(_READ_BYTES):
                if bytes(data) != bytes(origin.expected(key, position, position + len(data))):  # fast, unlike views
                    raise AssertionError(f"wrong bytes of {key} at {position}")
                position += len(data)
        return position

    with ThreadPoolExecutor(_THREADS) as pool, measure("scan") as figures:
        total = sum(pool.map(read, context["sizes"]))
        figures["GB"] = total / 1e9
        figures["origin GB"] = origin.bytes_read / 1e9
    return total


@case.contender("Millrace, 2 GB cache")
def millrace(measure: Measure, context: Mapping[str, Any]) -> int:
    from millrace.cache.node import cache_node
    from millrace.config import resolve
    from millrace.filesystem.files import CachedFile

    node = cache_node(
        resolve({"cache_dir": str(Path(context["scratch"]) / "cache"), "capacity": _CAPACITY, "min_free": 0})
    )

    def opened(origin: Any, key: str) -> Any:
        return CachedFile(node.open_reader(origin, origin.head(key)), path=key, sequential=True)

    return _scan(measure, context, opened)


class _Direct:
    """Reads the origin with nothing in between."""

    def __init__(self, origin: Any, key: str) -> None:
        self._origin, self._info, self._position = origin, origin.head(key), 0

    def __enter__(self) -> _Direct:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read(self, size: int) -> Any:
        start, self._position = self._position, min(self._position + size, self._info.size)
        return self._origin.read(self._info.key, start, self._position)


@case.contender("the origin, no cache")
def direct(measure: Measure, context: Mapping[str, Any]) -> int:
    return _scan(measure, context, _Direct)
