"""Epochs over a Parquet data set through Ray Data: with the cache, without it, and from the local disk.

The storage is a real S3 server behind the emulated region; origin bytes and requests are the region's own counts. Every
epoch sums the labels of all rows and counts them, which each contender must get right.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import Case, Measure, Options, Prepared
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

_BUCKET = "data"
_WIDTH = 1024  # bytes of payload a row


def _write_files(folder: Path, files: int, rows: int) -> int:
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


def _upload(folder: Path, s3: S3Server) -> None:
    # Straight to the server: the region's bandwidth is for the contenders.
    import obstore.store

    s3.create_bucket(_BUCKET)
    store = obstore.store.S3Store(
        _BUCKET,
        endpoint=s3.endpoint_url,
        access_key_id=s3.key,
        secret_access_key=s3.secret,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    for file in sorted(folder.iterdir()):
        store.put(f"train/{file.name}", file)


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    files, rows, epochs = (4, 4_000, 2) if options.quick else (12, 24_000, 4)
    local = options.scratch / "train"
    local.mkdir()
    total = _write_files(local, files, rows)
    size = sum(file.stat().st_size for file in local.iterdir())
    with S3Server(options.scratch / "s3") as s3, EmulatedRegion(s3.endpoint_url) as region:
        _upload(local, s3)

        def probe() -> dict[str, float]:
            seen = region.stats(prefix=f"/{_BUCKET}/")
            return {"origin MB": seen.bytes_down / 1e6, "origin requests": seen.requests}

        yield Prepared(
            {
                "options": {**s3.target_options, "endpoint_url": region.endpoint_url},
                "local": str(local),
                "epochs": epochs,
            },
            probe=probe,
            expected=[[files * rows, total]] * epochs,
            notes=(
                f"{files} files, {size / 1e6:.0f} MB of Parquet that does not compress; {epochs} epochs; "
                "CPU and memory are those of the whole of Ray, without the S3 server and the region; local files are "
                "in the page cache.",
                str(region.calibrate()),
            ),
        )


case = Case(
    name="epochs",
    title="Epochs over Parquet through Ray Data",
    prepare=prepare,
    baseline="LocalFileSystem, same files",
)


def _epochs(measure: Measure, context: Mapping[str, Any], path: str, filesystem: Any) -> list[list[int]]:
    """Read everything once in each epoch; the first one and all later ones are a phase each."""
    import ray
    import ray.data

    # A short path: Ray's Unix sockets lie below it.
    temporary = tempfile.mkdtemp(prefix="millrace-ray-")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=1 << 30,
        _temp_dir=temporary,
        _node_ip_address="127.0.0.1",
    )
    try:
        data_context = ray.data.DataContext.get_current()
        data_context.enable_progress_bars = False
        ray.data.range(100).count()  # starts the workers, which is Ray's time

        def epoch() -> list[int]:
            rows = labels = 0
            for batch in ray.data.read_parquet(path, filesystem=filesystem).iter_batches(batch_format="pyarrow"):
                rows += batch.num_rows
                labels += sum(batch.column("label").to_pylist())
            return [rows, labels]

        results = []
        with measure("first epoch"):
            results.append(epoch())
        later = context["epochs"] - 1
        with measure("later epochs") as figures:
            results += [epoch() for _ in range(later)]
            figures["epochs"] = later
    finally:
        ray.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)  # what Ray's last processes still hold goes with them
    return results


@case.contender("LocalFileSystem, same files")
def local(measure: Measure, context: Mapping[str, Any]) -> list[list[int]]:
    import pyarrow.fs

    return _epochs(measure, context, context["local"], pyarrow.fs.LocalFileSystem())


@case.contender("pyarrow S3FileSystem")
def pyarrow_s3(measure: Measure, context: Mapping[str, Any]) -> list[list[int]]:
    import pyarrow.fs

    options = context["options"]
    filesystem = pyarrow.fs.S3FileSystem(
        access_key=options["key"],
        secret_key=options["secret"],
        endpoint_override=urllib.parse.urlsplit(options["endpoint_url"]).netloc,
        scheme="http",
        region="us-east-1",
    )
    return _epochs(measure, context, f"{_BUCKET}/train", filesystem)


@case.contender("s3fs")
def s3fs(measure: Measure, context: Mapping[str, Any]) -> list[list[int]]:
    import s3fs

    return _epochs(measure, context, f"s3://{_BUCKET}/train", s3fs.S3FileSystem(**context["options"]))


@case.contender("Millrace")
def cached(measure: Measure, context: Mapping[str, Any]) -> list[list[int]]:
    import millrace

    filesystem = millrace.filesystem(
        "s3", target_options=context["options"], cache_dir=str(Path(context["scratch"]) / "cache")
    )
    return _epochs(measure, context, f"s3://{_BUCKET}/train", filesystem)
