"""The same epochs as in `epochs`, with an object store of Ray that is much smaller than the data set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.cases.epochs import prepare_parquet, read_rows
from benchmarks.harness import Case, Options, Prepared
from benchmarks.ray_epochs import LOCAL, add_contenders

_OBJECT_STORE_BYTES = 80 << 20  # Ray refuses less than 75 MiB


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    with prepare_parquet(options, object_store_bytes=_OBJECT_STORE_BYTES) as prepared:
        yield prepared


case = Case(
    name="epochs_pressure",
    title="Epochs over Parquet through Ray Data, its object store under pressure",
    prepare=prepare,
    baseline=LOCAL,
)
add_contenders(case, read_rows)
