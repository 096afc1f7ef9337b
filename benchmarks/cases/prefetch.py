"""One epoch over shuffled shards, read one after the other: with the order known ahead, and without.

Each shard is read in pieces of 256 KiB, and the reader works on each for a moment, as training does. The storage is a real
S3 server behind the emulated region, and the cache is empty.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.buckets import probe_of, through
from benchmarks.cases.load import fill_with_random
from benchmarks.harness import Case, Measure, Options, Prepared
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

_SHARD = 4 << 20
_PIECE = 256 << 10
_WORK_SECONDS = 0.02  # a shard; asleep, as a loop is that waits for its GPU


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    shards = 8 if options.quick else 64
    with S3Server(options.scratch / "s3") as s3, EmulatedRegion(s3.endpoint_url) as region:
        fill_with_random(s3, {"shards": (shards, _SHARD)})
        order = [f"data/shards/{number:05}" for number in range(shards)]
        random.Random(1).shuffle(order)
        yield Prepared(
            {"options": through(region, s3), "order": order},
            probe=probe_of(region),
            notes=(
                f"{shards} shards of 4 MiB in one fixed random order, {_WORK_SECONDS * 1e3:.0f} ms of work a shard",
                str(region.calibrate()),
            ),
        )


case = Case(
    name="prefetch", title="An epoch over shuffled shards", prepare=prepare, baseline="Millrace, order not known"
)


def _open(context: Mapping[str, Any]) -> Any:
    import millrace

    fs = millrace.filesystem(
        "s3", target_options=context["options"], cache_dir=str(Path(context["scratch"]) / "cache"), min_free=0
    )
    fs.find("data/shards")
    return fs


def _epoch(fs: Any, order: list[str]) -> int:
    checksum = 0
    for path in order:
        with fs.open_input_stream(path) as file:
            while data := file.read(_PIECE):
                checksum = zlib.crc32(data, checksum)
        time.sleep(_WORK_SECONDS)
    return checksum


@case.contender("Millrace, order not known")
def without(measure: Measure, context: Mapping[str, Any]) -> int:
    fs = _open(context)
    with measure("first epoch"):
        return _epoch(fs, context["order"])


@case.contender("Millrace, fs.prefetch")
def ahead(measure: Measure, context: Mapping[str, Any]) -> int:
    fs = _open(context)
    with measure("first epoch"), fs.prefetch(context["order"], window="64MiB"):
        return _epoch(fs, context["order"])


@case.contender("s3fs, no cache")
def s3fs(measure: Measure, context: Mapping[str, Any]) -> int:
    import s3fs

    fs = s3fs.S3FileSystem(**context["options"])
    checksum = 0
    with measure("first epoch"):
        for path in context["order"]:
            with fs.open(path) as file:
                while data := file.read(_PIECE):
                    checksum = zlib.crc32(data, checksum)
            time.sleep(_WORK_SECONDS)
    return checksum
