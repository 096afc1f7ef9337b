"""What cases of epochs through Ray Data share: data behind the emulated region, file systems, the measured epochs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.buckets import BUCKET, fill, probe_of, pyarrow_client, through
from benchmarks.harness import Case, Measure, Options, Prepared
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

LOCAL = "LocalFileSystem, same files"

Epoch = Callable[[str, Any], list[int]]
"""Reads everything below a path through a file system, and returns numbers that every contender must agree on."""


@contextmanager
def behind_the_region(
    options: Options, local: Path, *, epochs: int, expected: list[int], object_store_bytes: int, note: str
) -> Iterator[Prepared]:
    """Upload the files in `local`, start the region in front of the server, and yield the facts for the contenders."""
    with S3Server(options.scratch / "s3") as s3, EmulatedRegion(s3.endpoint_url) as region:
        fill(s3, [(f"train/{file.name}", file) for file in sorted(local.iterdir())])
        yield Prepared(
            {
                "options": through(region, s3),
                "local": str(local),
                "epochs": epochs,
                "object_store_bytes": object_store_bytes,
            },
            probe=probe_of(region),
            expected=[expected] * epochs,
            notes=(
                f"{note}; {epochs} epochs; Ray's object store has {object_store_bytes / 1e6:.0f} MB. "
                "CPU and memory are those of the whole of Ray, without the S3 server and the region; local files are "
                "in the page cache.",
                str(region.calibrate()),
            ),
        )


def run_epochs(measure: Measure, context: Mapping[str, Any], path: str, filesystem: Any, epoch: Epoch) -> list[Any]:
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
        object_store_memory=context["object_store_bytes"],
        _temp_dir=temporary,
        _node_ip_address="127.0.0.1",
    )
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        ray.data.range(100).count()  # starts the workers, which is Ray's time
        results = []
        with measure("first epoch"):
            results.append(epoch(path, filesystem))
        later = context["epochs"] - 1
        with measure("later epochs") as figures:
            results += [epoch(path, filesystem) for _ in range(later)]
            figures["epochs"] = later
    finally:
        ray.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)  # what Ray's last processes still hold goes with them
    return results


def add_contenders(case: Case, epoch: Epoch, *, prefetch: bool = False) -> None:
    """The same epochs from the local disk, directly from S3 with two clients, and through the cache.

    With `prefetch` also through a cache whose driver prefetches each epoch's files.
    """

    @case.contender(LOCAL)
    def local(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
        import pyarrow.fs

        return run_epochs(measure, context, context["local"], pyarrow.fs.LocalFileSystem(), epoch)

    @case.contender("pyarrow S3FileSystem")
    def pyarrow_s3(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
        return run_epochs(measure, context, f"{BUCKET}/train", pyarrow_client(context["options"]), epoch)

    @case.contender("s3fs")
    def s3fs(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
        import s3fs

        filesystem = s3fs.S3FileSystem(**context["options"])
        return run_epochs(measure, context, f"s3://{BUCKET}/train", filesystem, epoch)

    @case.contender("Millrace")
    def cached(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
        return run_epochs(measure, context, f"s3://{BUCKET}/train", _cached(context), epoch)

    if not prefetch:
        return

    def prefetched(path: str, filesystem: Any) -> list[int]:
        with filesystem.prefetch(sorted(filesystem.find(path)), window="1GB"):  # more than the data set has
            return epoch(path, filesystem)

    @case.contender("Millrace, prefetch")
    def ahead(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
        return run_epochs(measure, context, f"s3://{BUCKET}/train", _cached(context), prefetched)


def _cached(context: Mapping[str, Any]) -> Any:
    import millrace

    return millrace.filesystem(
        "s3", target_options=context["options"], cache_dir=str(Path(context["scratch"]) / "cache")
    )
