"""The same epochs as in `epochs`, with ten times the data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.cases.epochs import prepare_parquet, read_rows
from benchmarks.harness import Case, Options, Prepared
from benchmarks.ray_epochs import LOCAL, add_contenders


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    with prepare_parquet(options, object_store_bytes=4 << 30, files=4 if options.quick else 120, epochs=2) as prepared:
        yield prepared


case = Case(name="epochs_large", title="Epochs over 3 GB of Parquet through Ray Data", prepare=prepare, baseline=LOCAL)
add_contenders(case, read_rows)
