"""Listings: 20,000 objects of a real bucket compared with s3fs and pyarrow, a million computed keys through the cache alone.

Every contender lists everything twice, describes a thousand objects, and then lists the names of one directory again and
again ("ls", which the computed keys skip). s3fs keeps its listing in memory;
pyarrow keeps nothing; Millrace keeps it on disk for every process of the node. The million keys come from an origin that
computes them, so that what is measured is the cache and not a server.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.buckets import BUCKET, fill, pyarrow_client, through
from benchmarks.harness import Case, Measure, Options, Prepared
from millrace.origin import ListingPage, ObjectInfo
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

_STATS = 1000
_DIRECTORY, _IN_DIRECTORY, _LISTINGS = f"{BUCKET}/train/0000", 5000, 20


def _key(number: int) -> str:
    return f"{BUCKET}/train/{number // _IN_DIRECTORY:04}/part-{number:07}.bin"


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    keys, computed = (2_000, 50_000) if options.quick else (20_000, 1_000_000)
    with S3Server(options.scratch / "s3") as s3, EmulatedRegion(s3.endpoint_url) as region:
        fill(s3, ((_key(number).removeprefix(f"{BUCKET}/"), b"x") for number in range(keys)))
        yield Prepared(
            {
                "options": through(region, s3),
                "keys": keys,
                "computed": computed,
                "names": min(keys, _IN_DIRECTORY),
            },
            probe=lambda: {"origin requests": region.stats().requests},  # listings are requested from the bucket itself
            expected=[keys, keys, _STATS, min(keys, _IN_DIRECTORY)],
            notes=(
                f"{keys:,} objects behind the region, listed twice; then {_STATS:,} of them described; "
                f"'Millrace, computed keys' does the same with {computed:,} keys that no server lists.",
                f"ls: {_LISTINGS} listings of the {min(keys, _IN_DIRECTORY):,} names of a directory that was listed before.",
                str(region.calibrate()),
            ),
        )


case = Case(name="listing", title="Listings and descriptions", prepare=prepare, baseline="pyarrow S3FileSystem")


def _run(measure: Measure, keys: int, list_all: Callable[[], int], describe: Callable[[str], int]) -> list[int]:
    """List everything twice and describe some; returns how much was found."""
    found = []
    for phase in ("first listing", "second listing"):
        with measure(phase) as figures:
            found.append(list_all())
            figures["keys"] = keys
    wanted = [_key(number) for number in random.Random(0).sample(range(keys), _STATS)]
    with measure("descriptions") as figures:
        found.append(sum(describe(key) for key in wanted))
        figures["objects"] = _STATS
    return found


def _ls(measure: Measure, context: Mapping[str, Any], list_names: Callable[[], list[str]]) -> int:
    """List one directory many times; returns how many of its names were found."""
    list_names()
    with measure("ls") as figures:
        began = time.perf_counter()
        for _ in range(_LISTINGS):
            names = list_names()
        figures["us per name"] = (time.perf_counter() - began) / (_LISTINGS * context["names"]) * 1e6
    return len(set(names) & {_key(number) for number in range(context["names"])})


@case.contender("pyarrow S3FileSystem")
def pyarrow_s3(measure: Measure, context: Mapping[str, Any]) -> list[int]:
    import pyarrow.fs

    fs = pyarrow_client(context["options"])
    selector = pyarrow.fs.FileSelector(f"{BUCKET}/train", recursive=True)
    found = _run(
        measure,
        context["keys"],
        lambda: sum(info.is_file for info in fs.get_file_info(selector)),
        lambda key: fs.get_file_info(key).size,
    )
    directory = pyarrow.fs.FileSelector(_DIRECTORY)
    return [*found, _ls(measure, context, lambda: [info.path for info in fs.get_file_info(directory)])]


@case.contender("s3fs")
def s3fs(measure: Measure, context: Mapping[str, Any]) -> list[int]:
    import s3fs

    fs = s3fs.S3FileSystem(**context["options"])
    found = _run(
        measure,
        context["keys"],
        lambda: len(fs.find(f"{BUCKET}/train")),
        lambda key: fs.info(key)["size"],
    )
    return [*found, _ls(measure, context, lambda: fs.ls(_DIRECTORY, detail=False))]


@case.contender("Millrace")
def cached(measure: Measure, context: Mapping[str, Any]) -> list[int]:
    import pyarrow.fs

    import millrace

    fs = millrace.filesystem(
        "s3", target_options=context["options"], cache_dir=str(Path(context["scratch"]) / "cache"), min_free=0
    )
    selector = pyarrow.fs.FileSelector(f"{BUCKET}/train", recursive=True)
    found = _run(
        measure,
        context["keys"],
        lambda: sum(info.is_file for info in fs.get_file_info(selector)),
        lambda key: fs.get_file_info(key).size,
    )
    return [*found, _ls(measure, context, lambda: fs.ls(_DIRECTORY, detail=False))]


class _ComputedOrigin:
    """Lists keys that it computes. Only what listing needs."""

    identity = "computed"
    head_is_local = False

    def __init__(self, keys: int) -> None:
        self._keys = keys

    def is_immutable(self, key: str) -> bool:
        return False

    def list_pages(self, prefix: str, *, after: str = "", settled: object = None) -> Iterator[ListingPage]:
        first = int(after[-11:-4]) + 1 if after.endswith(".bin") else 0
        for start in range(first, self._keys, 1000):
            numbers = range(start, min(start + 1000, self._keys))
            page = [ObjectInfo(_key(number), 1, f'"{number:032x}"', 1.7e9 + number) for number in numbers]
            yield ListingPage(page, start + 1000 >= self._keys)


@case.contender("Millrace, computed keys")
def computed(measure: Measure, context: Mapping[str, Any]) -> list[int]:
    import millrace

    fs = millrace.filesystem("file", cache_dir=str(Path(context["scratch"]) / "cache"), min_free=0)
    metadata, origin, keys = fs.node.metadata, _ComputedOrigin(context["computed"]), context["computed"]
    found = _run(
        measure,
        keys,
        lambda: sum(len(page) for page in metadata.list_all(origin, f"{BUCKET}/train")),
        lambda key: metadata.stat(origin, key).size,
    )
    if found != [keys, keys, _STATS]:
        raise RuntimeError(f"found {found}")
    return [
        context["keys"],
        context["keys"],
        _STATS,
        context["names"],
    ]  # as all others, so that the results can be compared
