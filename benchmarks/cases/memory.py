"""A scan of much more than the cache holds: what it adds to the memory of the process that reads.

The origin computes its bytes from offsets, so that fifty gigabytes cost nothing to store. Every byte is compared. The file
system, as users have it, takes the origin for a library of fsspec: each answer is new memory, as of any storage. The reader
alone gets views of one pattern in the place of answers, so its figure is that of the cache without what it fetches.

Over S3 a server in another process computes the same bytes. obstore streams each object with one request and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.buckets import BUCKET, obstore_client
from benchmarks.harness import Case, Measure, Options, Prepared
from benchmarks.memory_s3 import MemoryS3

_THREADS = 4
_READ_BYTES = 1 << 20
_CAPACITY = 2_000_000_000


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    objects, over_s3, size = (6, 6, 500_000_000) if options.quick else (50, 10, 1_000_000_000)
    sizes = {f"scan/{number:02}": size for number in range(objects)}
    s3_sizes = {key: sizes[key] for key in sorted(sizes)[:over_s3]}
    with MemoryS3(options.scratch / "s3.log", computed={f"/{BUCKET}/{key}": size for key in s3_sizes}) as s3:
        yield Prepared(
            {
                "sizes": sizes,
                "S3 sizes": s3_sizes,
                "options": {"key": "any", "secret": "any", "endpoint_url": s3.endpoint_url},
            },
            expected=0,
            notes=(
                f"{objects} objects of {size / 1e6:.0f} MB, over S3 {over_s3}, read once by {_THREADS} threads in pieces of "
                f"1 MiB; the cache holds {_CAPACITY / 1e9:.0f} GB.",
                "The server of S3 is another process on the same machine; its CPU time is not counted.",
            ),
        )


case = Case(name="memory", title="A scan that is larger than the cache", prepare=prepare, rounds=1)


def _scan(measure: Measure, sizes: Mapping[str, int], origin: Any, opened: Callable[[Any, str], Any]) -> int:
    """Read and compare everything; returns how many bytes are missing."""

    def read(key: str) -> int:
        position = 0
        with opened(origin, key) as file:
            while data := file.read(_READ_BYTES):
                if bytes(data) != bytes(origin.expected(key, position, position + len(data))):  # fast, unlike views
                    raise AssertionError(f"wrong bytes of {key} at {position}")
                position += len(data)
        return position

    with ThreadPoolExecutor(_THREADS) as pool, measure("scan") as figures:
        total = sum(pool.map(read, sizes))
        figures["raw GB"] = figures["GB"] = total / 1e9
        if origin.bytes_read:  # a server of S3 has an origin of its own
            figures["origin GB"] = origin.bytes_read / 1e9
    return sum(sizes.values()) - total


def _origin(sizes: Mapping[str, int]) -> Any:
    from tests.support.computed import ComputedOrigin

    return ComputedOrigin(sizes)


def _options(context: Mapping[str, Any]) -> dict[str, Any]:
    return {"cache_dir": str(Path(context["scratch"]) / "cache"), "capacity": _CAPACITY, "min_free": 0}


@case.contender("Millrace, 2 GB cache")
def cached(measure: Measure, context: Mapping[str, Any]) -> int:
    import millrace
    from benchmarks.computed_files import PROTOCOL, serve

    origin = _origin(context["sizes"])
    serve(origin)
    filesystem = millrace.filesystem(PROTOCOL, **_options(context))
    filesystem.find("scan")  # as loaders of data list it first
    return _scan(measure, context["sizes"], origin, lambda _, key: filesystem.open_input_stream(key))


@case.contender("Millrace's reader alone, 2 GB cache")
def reader(measure: Measure, context: Mapping[str, Any]) -> int:
    from millrace.cache.node import cache_node
    from millrace.config import resolve
    from millrace.filesystem.files import CachedFile

    node = cache_node(resolve(_options(context)))

    def opened(origin: Any, key: str) -> Any:
        return CachedFile(node.open_reader(origin, origin.head(key)), path=key, sequential=True)

    return _scan(measure, context["sizes"], _origin(context["sizes"]), opened)


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
    return _scan(measure, context["sizes"], _origin(context["sizes"]), _Direct)


@case.contender("Millrace over S3, 2 GB cache")
def cached_s3(measure: Measure, context: Mapping[str, Any]) -> int:
    import millrace

    sizes = context["S3 sizes"]
    filesystem = millrace.filesystem("s3", target_options=context["options"], **_options(context))
    filesystem.find(f"{BUCKET}/scan")
    return _scan(measure, sizes, _origin(sizes), lambda _, key: filesystem.open_input_stream(f"{BUCKET}/{key}"))


class _Stream:
    """One GET of obstore, read piece by piece."""

    def __init__(self, store: Any, key: str) -> None:
        self._pieces = iter(store.get(key).stream(min_chunk_size=_READ_BYTES))

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read(self, _: int) -> Any:
        return next(self._pieces, b"")


@case.contender("obstore over S3")
def obstore_s3(measure: Measure, context: Mapping[str, Any]) -> int:
    sizes, store = context["S3 sizes"], obstore_client(context["options"])
    return _scan(measure, sizes, _origin(sizes), lambda _, key: _Stream(store, key))
