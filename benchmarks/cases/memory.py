"""A scan of much more than the cache holds: what it adds to the memory of the process that reads.

The origin computes its bytes from offsets, so that fifty gigabytes cost nothing to store. Every byte is compared. The file
system, as users have it, takes the origin for a library of fsspec: each answer is new memory, as of any storage. The reader
alone gets views of one pattern in the place of answers, so its figure is that of the cache without what it fetches.
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


def _scan(measure: Measure, context: Mapping[str, Any], origin: Any, opened: Callable[[Any, str], Any]) -> int:
    """Read and compare everything; returns the number of bytes."""

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


def _origin(context: Mapping[str, Any]) -> Any:
    from millrace.testing.computed import ComputedOrigin

    return ComputedOrigin(context["sizes"])


def _options(context: Mapping[str, Any]) -> dict[str, Any]:
    return {"cache_dir": str(Path(context["scratch"]) / "cache"), "capacity": _CAPACITY, "min_free": 0}


@case.contender("Millrace, 2 GB cache")
def cached(measure: Measure, context: Mapping[str, Any]) -> int:
    import millrace
    from benchmarks.computed_files import PROTOCOL, serve

    origin = _origin(context)
    serve(origin)
    filesystem = millrace.filesystem(PROTOCOL, **_options(context))
    filesystem.find("scan")  # as loaders of data list it first
    return _scan(measure, context, origin, lambda _, key: filesystem.open_input_stream(key))


@case.contender("Millrace's reader alone, 2 GB cache")
def reader(measure: Measure, context: Mapping[str, Any]) -> int:
    from millrace.cache.node import cache_node
    from millrace.config import resolve
    from millrace.filesystem.files import CachedFile

    node = cache_node(resolve(_options(context)))

    def opened(origin: Any, key: str) -> Any:
        return CachedFile(node.open_reader(origin, origin.head(key)), path=key, sequential=True)

    return _scan(measure, context, _origin(context), opened)


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
    return _scan(measure, context, _origin(context), _Direct)
