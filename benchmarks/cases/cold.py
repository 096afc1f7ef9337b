"""The first pass: streams and a Parquet table through the emulated region, with nothing cached, against direct clients.

The storage is a real S3 server behind the emulated region, whose bandwidth all streams share. Every contender lists the
folder first, as loaders of data do, which is not counted. Each file is read once and hashed as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from benchmarks.buckets import BUCKET, fill, obstore_client, probe_of, pyarrow_client, through
from benchmarks.cases.epochs import write_files
from benchmarks.harness import Case, Measure, Options, Prepared
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

_STREAMS = 8
_PIECE_BYTES = 1 << 20
_FOLDER = f"{BUCKET}/train"

Pieces = Iterable[Any]


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    import numpy as np

    nbytes, rows = (16 << 20, 4_000) if options.quick else (64 << 20, 60_000)
    local = options.scratch / "train"
    local.mkdir()
    random = np.random.default_rng(0)
    for number in range(1 + _STREAMS):
        (local / f"stream-{number}.bin").write_bytes(random.bytes(nbytes))
    write_files(local, 1, rows)
    with S3Server(options.scratch / "s3") as s3, EmulatedRegion(s3.endpoint_url) as region:
        fill(s3, [(f"train/{file.name}", file) for file in sorted(local.iterdir())])
        yield Prepared(
            {"options": through(region, s3)},
            probe=probe_of(region),
            notes=(
                f"Files of {nbytes >> 20} MiB read in pieces of 1 MiB, one and then {_STREAMS} at once; a Parquet table of "
                f"{rows} rows of a label and 1 KiB.",
                str(region.calibrate()),
            ),
        )


case = Case(name="cold", title="The first pass through the region", prepare=prepare, baseline="obstore, one GET a file")


def _run(
    measure: Measure, *, listed: Callable[[], object], pieces: Callable[[str], Pieces], table: Callable[[str], int]
) -> list[Any]:
    import xxhash

    def digest(number: int) -> str:
        whole = xxhash.xxh3_64()
        for piece in pieces(f"{_FOLDER}/stream-{number}.bin"):
            whole.update(piece)
        return whole.hexdigest()

    listed()
    with measure("one stream"):
        digests = [digest(0)]
    with ThreadPoolExecutor(_STREAMS) as pool, measure(f"{_STREAMS} streams"):
        digests += pool.map(digest, range(1, 1 + _STREAMS))
    with measure("Parquet table"):
        rows = table(f"{_FOLDER}/part-000.parquet")
    return [digests, rows]


def _run_pyarrow(measure: Measure, filesystem: Any) -> list[Any]:
    import pyarrow.fs
    import pyarrow.parquet as pq

    def pieces(path: str) -> Pieces:
        with filesystem.open_input_stream(path) as stream:
            while (piece := stream.read_buffer(_PIECE_BYTES)).size:
                yield piece

    return _run(
        measure,
        listed=lambda: filesystem.get_file_info(pyarrow.fs.FileSelector(_FOLDER)),
        pieces=pieces,
        table=lambda path: pq.read_table(path, filesystem=filesystem).num_rows,
    )


@case.contender("obstore, one GET a file")
def obstore_get(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    store = obstore_client(context["options"])

    def whole(path: str) -> Any:
        return store.get(path.removeprefix(f"{BUCKET}/")).bytes()

    return _run(
        measure,
        listed=lambda: store.list("train").collect(),
        pieces=lambda path: [whole(path)],
        table=lambda path: pq.read_table(pa.BufferReader(pa.py_buffer(whole(path)))).num_rows,
    )


@case.contender("pyarrow S3FileSystem")
def pyarrow_s3(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
    return _run_pyarrow(measure, pyarrow_client(context["options"]))


@case.contender("s3fs")
def s3fs(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
    import pyarrow.parquet as pq
    import s3fs

    filesystem = s3fs.S3FileSystem(**context["options"])

    def pieces(path: str) -> Pieces:
        with filesystem.open(path, "rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece

    return _run(
        measure,
        listed=lambda: filesystem.ls(_FOLDER, detail=True),
        pieces=pieces,
        table=lambda path: pq.read_table(path, filesystem=filesystem).num_rows,
    )


@case.contender("Millrace")
def cached(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
    import millrace

    filesystem = millrace.filesystem("s3", target_options=context["options"], cache_dir=f"{context['scratch']}/cache")
    return _run_pyarrow(measure, filesystem)
