"""A cache that may keep nothing: what comes through it costs no more than without it, in time and in bytes, or it should.

The storage is a real S3 server behind the emulated region. Every contender lists the folder first and opens the files of
the random reads before these are measured, which is not counted. Millrace's cache has no room at all, or is full of what is
pinned. No file is read by two phases, but for the random reads, all of which are at places of their own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.buckets import BUCKET, fill, probe_of, pyarrow_client, through
from benchmarks.harness import Case, Measure, Options, Prepared
from benchmarks.readers import COLUMNS, Reader, obstore_reader, pyarrow_reader, sum_of_one_column, write_columns
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

_STREAMS = 8
_RANDOM_FILES = 2
_READ_BYTES = 64 << 10
_THREADS = (1, 4, 16)
_PINNED_BYTES = 32 << 20
_PIECE_BYTES = 8 << 20  # divides all sizes
_LEFT_BYTES = 1 << 20  # less than a block
_FOLDER = f"{BUCKET}/train"
_PINNED = f"{BUCKET}/pinned/all.bin"


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    stream_bytes, large_bytes, rows, reads = (
        (8 << 20, 32 << 20, 80_000, 48) if options.quick else (64 << 20, 256 << 20, 800_000, 240)
    )
    local = options.scratch / "train"
    local.mkdir()
    source = random.Random(0)
    sizes = {f"stream-{number}.bin": stream_bytes for number in range(_STREAMS)}
    sizes |= {f"random-{number}.bin": large_bytes for number in range(_RANDOM_FILES)}
    for name, size in sizes.items():
        with open(local / name, "wb") as file:
            for _ in range(0, size, _PIECE_BYTES):  # no more at once than `randbytes` can
                file.write(source.randbytes(_PIECE_BYTES))
    write_columns(local / "wide.parquet", rows)
    wide = (local / "wide.parquet").stat().st_size
    with S3Server(options.scratch / "s3") as s3, EmulatedRegion(s3.endpoint_url) as region:
        fill(
            s3,
            [
                *((f"train/{file.name}", file) for file in sorted(local.iterdir())),
                (_PINNED.removeprefix(f"{BUCKET}/"), source.randbytes(_PINNED_BYTES)),
            ],
        )
        yield Prepared(
            {"options": through(region, s3), "large_bytes": large_bytes, "reads": reads},
            probe=probe_of(region),
            notes=(
                f"{_STREAMS} files of {stream_bytes >> 20} MiB read at once in pieces of 1 MiB, "
                f"{_STREAMS * stream_bytes / 1e6:.0f} MB; {reads} reads of 64 KiB at random places of {_RANDOM_FILES} "
                f"files of {large_bytes >> 20} MiB, {reads * _READ_BYTES / 1e6:.1f} MB, by 1, 4 and 16 threads; one column "
                f"of the {COLUMNS} of a Parquet table of {wide / 1e6:.0f} MB.",
                str(region.calibrate()),
            ),
        )


case = Case(
    name="full", title="A cache that may keep nothing", prepare=prepare, baseline="obstore, one GET a file or range"
)


def _run(measure: Measure, context: Mapping[str, Any], reader: Reader) -> list[Any]:
    reader.listed(_FOLDER)
    with ThreadPoolExecutor(_STREAMS) as pool, measure(f"scan, {_STREAMS} streams"):
        results: list[Any] = [list(pool.map(lambda number: _scan(reader, number), range(_STREAMS)))]
    for threads in _THREADS:
        results.append(_random_reads(measure, context, reader, threads))
    with measure(f"one Parquet column of {COLUMNS}"):
        results.append(sum_of_one_column(reader, f"{_FOLDER}/wide.parquet"))
    return results


def _scan(reader: Reader, number: int) -> str:
    import xxhash

    whole = xxhash.xxh3_64()
    for piece in reader.pieces(f"{_FOLDER}/stream-{number}.bin"):
        whole.update(piece)
    return whole.hexdigest()


def _random_reads(measure: Measure, context: Mapping[str, Any], reader: Reader, threads: int) -> int:
    """Each thread has a file of its own open, and reads its share of the places."""
    places = random.Random(threads)
    starts = [places.randrange(context["large_bytes"] - _READ_BYTES) for _ in range(context["reads"])]
    files = [reader.opened(f"{_FOLDER}/random-{number % _RANDOM_FILES}.bin") for number in range(threads)]

    def share(number: int) -> int:
        total = 0
        for start in starts[number::threads]:
            data = memoryview(files[number](start, _READ_BYTES))
            total += len(data) + int.from_bytes(data[:8], "big")
        return total

    with ThreadPoolExecutor(threads) as pool, measure(f"64 KiB reads, {threads} threads") as figures:
        total = sum(pool.map(share, range(threads)))
        figures["reads"] = context["reads"]
    return total


@case.contender("obstore, one GET a file or range")
def obstore_get(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
    return _run(measure, context, obstore_reader(context["options"]))


@case.contender("pyarrow S3FileSystem")
def pyarrow_s3(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
    return _run(measure, context, pyarrow_reader(pyarrow_client(context["options"])))


@case.contender("Millrace, capacity 0")
def no_room(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
    return _run(measure, context, pyarrow_reader(_filesystem(context, capacity=0)))


@case.contender("Millrace, full of pins")
def pinned(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
    filesystem = _filesystem(context, capacity=_PINNED_BYTES + _LEFT_BYTES)
    filesystem.pin(_PINNED)
    filesystem.load(_PINNED)
    return _run(measure, context, pyarrow_reader(filesystem))


def _filesystem(context: Mapping[str, Any], *, capacity: int) -> Any:
    import millrace

    return millrace.filesystem(
        "s3",
        target_options=context["options"],
        cache_dir=str(Path(context["scratch"]) / "cache"),
        capacity=capacity,
        min_free=0,
    )
