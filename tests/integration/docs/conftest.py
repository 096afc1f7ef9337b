"""What a reader of the documentation has."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyarrow import fs
from tests.support.doc_page_runs import ROOT

from millrace.testing.s3 import S3Server


@pytest.fixture
def reader(s3: S3Server, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a reader with a clone of Millrace and a bucket of data, named `bucket`."""
    s3.create_bucket("bucket")
    storage = fs.S3FileSystem(
        access_key=s3.key, secret_key=s3.secret, endpoint_override=s3.endpoint_url, region="us-east-1"
    )
    for name in ("train/part-0", "train/part-1", "train/part-2", "val/part-0", "scratch/part-0", "old/part-0"):
        values = np.random.default_rng(len(name)).standard_normal(50_000)
        pq.write_table(pa.table({"a": np.arange(50_000), "b": values}), f"bucket/{name}.parquet", filesystem=storage)
    for number in range(4):
        image = io.BytesIO()
        Image.new("RGB", (32, 32), (60 * number, 0, 0)).save(image, "png")
        with storage.open_output_stream(f"bucket/images/{number}.png") as file:
            file.write(image.getvalue())
    for folder in ("examples", "deploy"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "home").mkdir()
    yield {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        "AWS_ENDPOINT_URL": s3.endpoint_url,
        "AWS_ACCESS_KEY_ID": s3.key,
        "AWS_SECRET_ACCESS_KEY": s3.secret,
        "AWS_REGION": "us-east-1",
        "MILLRACE_MIN_FREE": "0",  # the disk of the machine may be nearly full
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # when Ray registers a checkpoint; two seconds by default
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    storage.delete_dir_contents("bucket")
