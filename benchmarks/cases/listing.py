"""Listings: 20,000 objects of a real bucket beside s3fs and pyarrow, and a million computed keys through the cache alone.

Every contender lists everything twice and then describes a thousand objects. s3fs keeps its listing in memory;
pyarrow keeps nothing; Millrace keeps it on disk for every process of the node. The million keys come from an origin that
computes them, so that what is measured is the cache and not a server.
"""

from __future__ import annotations

import random
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


def _key(number: int) -> str:
    return f"{BUCKET}/train/{number // 5000:04}/part-{number:07}.bin"


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
            },
            probe=lambda: {"origin requests": region.stats().requests},  # listings are asked of the bucket itself
            expected=[keys, keys, _STATS],
            notes=(
                f"{keys:,} objects behind the region, listed twice; then {_STATS:,} of them described; "
                f"'Millrace, computed keys' does the same with {computed:,} keys that no server lists.",
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


@case.contender("pyarrow S3FileSystem")
def pyarrow_s3(measure: Measure, context: Mapping[str, Any]) -> list[int]:
    import pyarrow.fs

    fs = pyarrow_client(context["options"])
    selector = pyarrow.fs.FileSelector(f"{BUCKET}/train", recursive=True)
    return _run(
        measure,
        context["keys"],
        lambda: sum(info.is_file for info in fs.get_file_info(selector)),
        lambda key: fs.get_file_info(key).size,
    )


@case.contender("s3fs")
def s3fs(measure: Measure, context: Mapping[str, Any]) -> list[int]:
    import s3fs

    fs = s3fs.S3FileSystem(**context["options"])
    return _run(
        measure,
        context["keys"],
        lambda: len(fs.find(f"{BUCKET}/train")),
        lambda key: fs.info(key)["size"],
    )


@case.contender("Millrace")
def cached(measure: Measure, context: Mapping[str, Any]) -> list[int]:
    import pyarrow.fs

    import millrace

    fs = millrace.filesystem(
        "s3", target_options=context["options"], cache_dir=str(Path(context["scratch"]) / "cache"), min_free=0
    )
    selector = pyarrow.fs.FileSelector(f"{BUCKET}/train", recursive=True)
    return _run(
        measure,
        context["keys"],
        lambda: sum(info.is_file for info in fs.get_file_info(selector)),
        lambda key: fs.get_file_info(key).size,
    )


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
    return [context["keys"], context["keys"], _STATS]  # as all others, so that the results can be compared
