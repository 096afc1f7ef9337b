"""One column of twenty of a cold Parquet file, in two sizes of row groups, against pyarrow's own client.

The storage is a real S3 server behind the emulated region. pyarrow's client requests exactly the ranges of the column, so
its origin MB are the bytes that a reader of this column needs. The last phase reads the whole file: each byte crosses the
region once in both phases together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.buckets import BUCKET, fill, probe_of, pyarrow_client, through
from benchmarks.harness import Case, Measure, Options, Prepared
from benchmarks.readers import COLUMNS, Reader, obstore_reader, pyarrow_reader, sum_of_one_column, write_columns
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

_FOLDER = f"{BUCKET}/wide"
_GROUP_ROWS = {"8 MB": 50_000, "40 MB": 250_000}


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    rows = 250_000 if options.quick else 1_000_000
    local = options.scratch / "wide"
    local.mkdir()
    for name, group_rows in _GROUP_ROWS.items():
        write_columns(local / f"{name.split()[0]}.parquet", rows, group_rows=group_rows)
    with S3Server(options.scratch / "s3") as s3, EmulatedRegion(s3.endpoint_url) as region:
        fill(s3, [(f"wide/{file.name}", file) for file in sorted(local.iterdir())])
        yield Prepared(
            {"options": through(region, s3)},
            probe=probe_of(region),
            notes=(
                f"One of {COLUMNS} columns of {rows} rows, 8 bytes each; row groups of {' and '.join(_GROUP_ROWS)}.",
                str(region.calibrate()),
            ),
        )


case = Case(name="columns", title="A cold column", prepare=prepare, baseline="pyarrow S3FileSystem")


def _run(measure: Measure, reader: Reader) -> list[Any]:
    reader.listed(_FOLDER)
    totals = []
    for name in _GROUP_ROWS:
        with measure(f"one column, row groups of {name}"):
            totals.append(sum_of_one_column(reader, f"{_FOLDER}/{name.split()[0]}.parquet"))
    with measure("then the whole file"):
        rows = reader.table(f"{_FOLDER}/8.parquet", None).num_rows
    return [totals, rows]


@case.contender("pyarrow S3FileSystem")
def pyarrow_s3(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
    return _run(measure, pyarrow_reader(pyarrow_client(context["options"])))


@case.contender("obstore, one GET a range")
def obstore_ranges(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
    return _run(measure, obstore_reader(context["options"]))


@case.contender("Millrace")
def cached(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
    import millrace

    filesystem = millrace.filesystem(
        "s3", target_options=context["options"], cache_dir=f"{context['scratch']}/cache", min_free=0
    )
    return _run(measure, pyarrow_reader(filesystem))
