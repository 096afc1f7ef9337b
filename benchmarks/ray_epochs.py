"""What cases of epochs through Ray Data share: data behind the emulated region, file systems, the measured epochs."""

from __future__ import annotations

import os
import shutil
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import Case, Measure, Options, Prepared
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

BUCKET = "data"
LOCAL = "LocalFileSystem, same files"

_UPLOAD_THREADS = 16

Epoch = Callable[[str, Any], list[int]]
"""Reads everything below a path through a file system, and returns numbers that every contender must agree on."""


def upload(folder: Path, s3: S3Server) -> None:
    """Put every file of `folder` into the bucket, below `train/`."""
    # Straight to the server: the region's bandwidth is for the contenders.
    import obstore.store

    s3.create_bucket(BUCKET)
    store = obstore.store.S3Store(
        BUCKET,
        endpoint=s3.endpoint_url,
        access_key_id=s3.key,
        secret_access_key=s3.secret,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    with ThreadPoolExecutor(_UPLOAD_THREADS) as pool:
        for _ in pool.map(lambda file: store.put(f"train/{file.name}", file), sorted(folder.iterdir())):
            pass


@contextmanager
def behind_the_region(
    options: Options, local: Path, *, epochs: int, expected: list[int], object_store_bytes: int, note: str
) -> Iterator[Prepared]:
    """Upload what lies in `local`, put the region before it, and say what the contenders need to know."""
    with S3Server(options.scratch / "s3") as s3, EmulatedRegion(s3.endpoint_url) as region:
        upload(local, s3)

        def probe() -> dict[str, float]:
            seen = region.stats(prefix=f"/{BUCKET}/")
            return {"origin MB": seen.bytes_down / 1e6, "origin requests": seen.requests}

        yield Prepared(
            {
                "options": {**s3.target_options, "endpoint_url": region.endpoint_url},
                "local": str(local),
                "epochs": epochs,
                "object_store_bytes": object_store_bytes,
            },
            probe=probe,
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


def add_contenders(case: Case, epoch: Epoch) -> None:
    """The same epochs from the local disk, directly from S3 with two clients, and through the cache."""

    @case.contender(LOCAL)
    def local(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
        import pyarrow.fs

        return run_epochs(measure, context, context["local"], pyarrow.fs.LocalFileSystem(), epoch)

    @case.contender("pyarrow S3FileSystem")
    def pyarrow_s3(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
        import pyarrow.fs

        options = context["options"]
        filesystem = pyarrow.fs.S3FileSystem(
            access_key=options["key"],
            secret_key=options["secret"],
            endpoint_override=urllib.parse.urlsplit(options["endpoint_url"]).netloc,
            scheme="http",
            region="us-east-1",
        )
        return run_epochs(measure, context, f"{BUCKET}/train", filesystem, epoch)

    @case.contender("s3fs")
    def s3fs(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
        import s3fs

        filesystem = s3fs.S3FileSystem(**context["options"])
        return run_epochs(measure, context, f"s3://{BUCKET}/train", filesystem, epoch)

    @case.contender("Millrace")
    def cached(measure: Measure, context: Mapping[str, Any]) -> list[Any]:
        import millrace

        filesystem = millrace.filesystem(
            "s3", target_options=context["options"], cache_dir=str(Path(context["scratch"]) / "cache")
        )
        return run_epochs(measure, context, f"s3://{BUCKET}/train", filesystem, epoch)
