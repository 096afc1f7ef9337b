"""Scanning cached Parquet: pre-buffered as `pq.read_table` and datasets do, and buffered as Ray Data does.

The origin is a real S3 server; everything is read once beforehand. Scans run on one thread, so that CPU time compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.buckets import BUCKET, fill
from benchmarks.harness import Case, Measure, Options, Prepared
from millrace.testing.s3 import S3Server

_RAY_BUFFER_BYTES = 8 << 20  # what Ray Data sets for its fragments


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    files, rows = (2, 20_000) if options.quick else (8, 160_000)
    local = options.scratch / "train"
    local.mkdir()
    for number in range(files):
        _write(local / f"part-{number}.parquet", rows, seed=number)
    size = sum(file.stat().st_size for file in local.iterdir())
    with S3Server(options.scratch / "s3") as s3:
        fill(s3, [(file.name, file) for file in sorted(local.iterdir())])
        yield Prepared(
            {
                "options": s3.target_options,
                "local": str(local),
                "files": files,
                "scans": 1 if options.quick else 8,
            },
            expected=files * rows,
            notes=(
                f"{files} files, {size / 1e6:.0f} MB, 8 row groups each; a label, a number and 256 bytes a row; one thread.",
            ),
        )


def _write(path: Path, rows: int, *, seed: int) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = np.random.default_rng(seed)
    payload = pa.FixedSizeBinaryArray.from_buffers(pa.binary(256), rows, [None, pa.py_buffer(source.bytes(rows * 256))])
    table = pa.table({"label": source.integers(0, 1000, rows), "x": source.normal(size=rows), "payload": payload})
    pq.write_table(table, path, row_group_size=rows // 8, use_dictionary=False)


case = Case(name="scans", title="Scanning cached Parquet", prepare=prepare, baseline="LocalFileSystem")


def _run(measure: Measure, context: Mapping[str, Any], base: str, filesystem: Any) -> int:
    import pyarrow.dataset as pads
    import pyarrow.parquet as pq

    paths = [f"{base}/part-{number}.parquet" for number in range(context["files"])]
    buffered = pads.ParquetFragmentScanOptions(use_buffered_stream=True, buffer_size=_RAY_BUFFER_BYTES)
    seen = []

    def read_table() -> None:
        seen.append(sum(pq.read_table(path, filesystem=filesystem, use_threads=False).num_rows for path in paths))

    def scan(options: Any = None) -> None:
        data = pads.dataset(paths, filesystem=filesystem, format="parquet")
        rows = 0
        for fragment in data.get_fragments():
            for batch in fragment.to_batches(use_threads=False, fragment_scan_options=options):
                rows += batch.num_rows
        seen.append(rows)

    def one_column() -> None:
        seen.append(
            sum(pq.read_table(path, filesystem=filesystem, use_threads=False, columns=["x"]).num_rows for path in paths)
        )

    ways = {
        "read_table": read_table,
        "data set, pre-buffered": scan,
        "data set, buffered as by Ray": lambda: scan(buffered),
        "read_table, one column": one_column,
    }
    for way in ways.values():
        way()
    for name, way in ways.items():
        with measure(name) as figures:
            for _ in range(context["scans"]):
                way()
            figures["scans"] = context["scans"]
    (rows,) = set(seen)
    return rows


@case.contender("LocalFileSystem")
def local(measure: Measure, context: Mapping[str, Any]) -> int:
    import pyarrow.fs

    return _run(measure, context, context["local"], pyarrow.fs.LocalFileSystem())


@case.contender("Millrace")
def cached(measure: Measure, context: Mapping[str, Any]) -> int:
    import millrace

    fs = millrace.filesystem("s3", target_options=context["options"], cache_dir=f"{context['scratch']}/cache")
    return _run(measure, context, BUCKET, fs)
