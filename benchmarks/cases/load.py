"""A data set into an empty cache with `fs.load`, compared with the fastest direct client that stores nothing.

The storage is a real S3 server behind the emulated region. The direct client is obstore in threads, with requests as large
and as many as ours; once into memory, and once into files, which is what a cache cannot avoid.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.buckets import BUCKET, fill, obstore_client, probe_of, through
from benchmarks.harness import Case, Measure, Options, Prepared
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

_PIECE = 8 << 20
_THREADS = 32


def fill_with_random(s3: S3Server, folder_sizes: Mapping[str, tuple[int, int]]) -> None:
    """Fill folders with so many random objects of so many bytes each."""
    fill(
        s3,
        (
            (f"{folder}/{number:05}", os.urandom(nbytes))
            for folder, (objects, nbytes) in folder_sizes.items()
            for number in range(objects)
        ),
    )


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    large, small = (2, 100) if options.quick else (16, 2000)
    with S3Server(options.scratch / "s3") as s3, EmulatedRegion(s3.endpoint_url) as region:
        fill_with_random(s3, {"large": (large, 24 << 20), "small": (small, 26_000)})
        yield Prepared(
            {"options": through(region, s3)},
            probe=probe_of(region),
            expected=[[large, large * (24 << 20)], [small, small * 26_000]],
            notes=(
                f"{large} objects of 24 MiB, and {small} of 26 kB; each phase lists, then gets all",
                str(region.calibrate()),
            ),
        )


case = Case(
    name="load", title="A data set into an empty cache", prepare=prepare, baseline="obstore in threads, into memory"
)


def _directly(context: Mapping[str, Any], folder: str, keep: Callable[[str, int, Any], None]) -> list[int]:
    store = obstore_client(context["options"])
    sizes = {meta["path"]: meta["size"] for page in store.list(folder) for meta in page}

    def get(piece: tuple[str, int, int]) -> int:
        path, start, stop = piece
        data = store.get_range(path, start=start, end=stop)
        keep(path, start, data)
        return len(data)

    pieces = [
        (path, start, min(start + _PIECE, size)) for path, size in sizes.items() for start in range(0, size, _PIECE)
    ]
    with ThreadPoolExecutor(_THREADS) as pool:
        return [len(sizes), sum(pool.map(get, pieces))]


@case.contender("obstore in threads, into memory")
def memory(measure: Measure, context: Mapping[str, Any]) -> list[list[int]]:
    results = []
    for folder in ("large", "small"):
        with measure(f"{folder} objects"):
            results.append(_directly(context, folder, lambda *_: None))
    return results


@case.contender("obstore in threads, into files")
def files(measure: Measure, context: Mapping[str, Any]) -> list[list[int]]:
    scratch = Path(context["scratch"])

    def keep(path: str, start: int, data: Any) -> None:
        descriptor = os.open(scratch / path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(descriptor, data, start)
        os.close(descriptor)

    results = []
    for folder in ("large", "small"):
        (scratch / folder).mkdir()
        with measure(f"{folder} objects"):
            results.append(_directly(context, folder, keep))
    return results


@case.contender("Millrace, fs.load")
def cached(measure: Measure, context: Mapping[str, Any]) -> list[list[int]]:
    import millrace

    fs = millrace.filesystem(
        "s3", target_options=context["options"], cache_dir=str(Path(context["scratch"]) / "cache"), min_free=0
    )
    results = []
    for folder in ("large", "small"):
        with measure(f"{folder} objects"):
            done = fs.load(f"s3://{BUCKET}/{folder}")
        results.append([done.done_objects, done.done_bytes])
    return results
