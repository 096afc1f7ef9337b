"""Epochs over a Parquet data set through Ray Data: with the cache, without it, and from the local disk.

The storage is a real S3 server behind the emulated region; origin bytes and requests are the region's own counts. Every
epoch sums the labels of all rows and counts them, which each contender must get right. "Millrace, prefetch" is what a user
can do in two lines: the driver prefetches the files of each epoch, and Ray Data's tasks read them from the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import Case, Options, Prepared
from benchmarks.ray_epochs import LOCAL, add_contenders, behind_the_region

_WIDTH = 1024  # bytes of payload a row


def write_files(folder: Path, files: int, rows: int) -> int:
    """Write the data set: a label, and a payload that does not compress, as encoded images and audio do not."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random, total = np.random.default_rng(0), 0
    for number in range(files):
        labels = random.integers(0, 1000, rows)
        payload = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(_WIDTH), rows, [None, pa.py_buffer(random.bytes(rows * _WIDTH))]
        )
        table = pa.table({"label": labels, "payload": payload})
        pq.write_table(table, folder / f"part-{number:03}.parquet", row_group_size=rows // 4, use_dictionary=False)
        total += int(labels.sum())
    return total


def read_rows(path: str, filesystem: Any) -> list[int]:
    """One epoch: the number of rows and the sum of their labels."""
    import ray.data

    rows = labels = 0
    for batch in ray.data.read_parquet(path, filesystem=filesystem).iter_batches(batch_format="pyarrow"):
        rows += batch.num_rows
        labels += sum(batch.column("label").to_pylist())
    return [rows, labels]


@contextmanager
def prepare_parquet(
    options: Options, *, object_store_bytes: int, files: int | None = None, epochs: int | None = None
) -> Iterator[Prepared]:
    """The data set, local and behind the region: by default 12 files of 25 MB, for four epochs."""
    rows = 4_000 if options.quick else 24_000
    files = files or (4 if options.quick else 12)
    epochs = epochs or (2 if options.quick else 4)
    local = options.scratch / "train"
    local.mkdir()
    total = write_files(local, files, rows)
    size = sum(file.stat().st_size for file in local.iterdir())
    with behind_the_region(
        options,
        local,
        epochs=epochs,
        expected=[files * rows, total],
        object_store_bytes=object_store_bytes,
        note=f"{files} files, {size / 1e6:.0f} MB of Parquet that does not compress",
    ) as prepared:
        yield prepared


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    with prepare_parquet(options, object_store_bytes=1 << 30) as prepared:
        yield prepared


case = Case(name="epochs", title="Epochs over Parquet through Ray Data", prepare=prepare, baseline=LOCAL)
add_contenders(case, read_rows, prefetch=True)
