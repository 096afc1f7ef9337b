"""The first pass: streams and Parquet tables through the emulated region, with nothing cached, against direct clients.

The storage is a real S3 server behind the emulated region, whose bandwidth all streams share. Every contender lists the
folder first, as loaders of data do, which is not counted. Each file is read once and hashed as it comes. Of the last table
one column is read: what a cache fetches more than that is in its origin MB.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from benchmarks.buckets import BUCKET, fill, probe_of, pyarrow_client, through
from benchmarks.cases.epochs import write_files
from benchmarks.harness import Case, Measure, Options, Prepared
from benchmarks.readers import (
    COLUMNS,
    Reader,
    fsspec_reader,
    obstore_reader,
    pyarrow_reader,
    sum_of_one_column,
    write_columns,
)
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

_STREAMS = 8
_FOLDER = f"{BUCKET}/train"


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    import numpy as np

    nbytes, rows, wide_rows = (16 << 20, 4_000, 80_000) if options.quick else (64 << 20, 60_000, 800_000)
    local = options.scratch / "train"
    local.mkdir()
    random = np.random.default_rng(0)
    for number in range(1 + _STREAMS):
        (local / f"stream-{number}.bin").write_bytes(random.bytes(nbytes))
    write_files(local, 1, rows)
    write_columns(local / "wide.parquet", wide_rows)
    wide = (local / "wide.parquet").stat().st_size
    with S3Server(options.scratch / "s3") as s3, EmulatedRegion(s3.endpoint_url) as region:
        fill(s3, [(f"train/{file.name}", file) for file in sorted(local.iterdir())])
        yield Prepared(
            {"options": through(region, s3)},
            probe=probe_of(region),
            notes=(
                f"Files of {nbytes >> 20} MiB read in pieces of 1 MiB, one and then {_STREAMS} at once; a Parquet table of "
                f"{rows} rows of a label and 1 KiB; one column of the {COLUMNS} of a table of {wide / 1e6:.0f} MB.",
                str(region.calibrate()),
            ),
        )


case = Case(name="cold", title="The first pass through the region", prepare=prepare, baseline="obstore, one GET a file")


def _run(measure: Measure, reader: Reader) -> list[Any]:
    import xxhash

    def digest(number: int) -> str:
        whole = xxhash.xxh3_64()
        for piece in reader.pieces(f"{_FOLDER}/stream-{number}.bin"):
            whole.update(piece)
        return whole.hexdigest()

    reader.listed(_FOLDER)
    with measure("one stream"):
        digests = [digest(0)]
    with ThreadPoolExecutor(_STREAMS) as pool, measure(f"{_STREAMS} streams"):
        digests += pool.map(digest, range(1, 1 + _STREAMS))
    with measure("Parquet table"):
        rows = reader.table(f"{_FOLDER}/part-000.parquet", None).num_rows
    with measure(f"one Parquet column of {COLUMNS}"):
        total = sum_of_one_column(reader, f"{_FOLDER}/wide.parquet")
    return [digests, rows, total]


@case.contender("obstore, one GET a file")
def obstore_get(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
    return _run(measure, obstore_reader(context["options"]))


@case.contender("pyarrow S3FileSystem")
def pyarrow_s3(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
    return _run(measure, pyarrow_reader(pyarrow_client(context["options"])))


@case.contender("s3fs")
def s3fs(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
    import s3fs

    return _run(measure, fsspec_reader(s3fs.S3FileSystem(**context["options"])))


@case.contender("fsspec filecache over s3fs")
def filecache(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
    return _run(measure, fsspec_reader(_fsspec_cache(context, "filecache")))


@case.contender("fsspec blockcache over s3fs")
def blockcache(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
    # It keeps its records without a lock: threads that close files at once break it.
    return _run(measure, fsspec_reader(_fsspec_cache(context, "blockcache"), in_turn=threading.Lock()))


def _fsspec_cache(context: Mapping[str, Any], protocol: str) -> Any:
    import fsspec

    return fsspec.filesystem(
        protocol,
        target_protocol="s3",
        target_options=dict(context["options"]),
        cache_storage=f"{context['scratch']}/cache",
    )


@case.contender("Millrace")
def cached(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
    import millrace

    filesystem = millrace.filesystem("s3", target_options=context["options"], cache_dir=f"{context['scratch']}/cache")
    return _run(measure, pyarrow_reader(filesystem))
