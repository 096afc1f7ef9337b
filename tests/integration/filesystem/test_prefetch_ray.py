"""`fs.prefetch` with Ray Data over a real S3 server: each byte once, in the predicted order."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tests.support.ray_sessions import start_ray

import millrace
from millrace.filesystem.orders import following, ray_file_order, without_repeats
from millrace.filesystem.prefetching import Prefetch
from millrace.origin import open_origin
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

_PARQUET_FILES, _IMAGES = 10, 60


@pytest.fixture(scope="module")
def data() -> Iterator[Any]:
    """`ray.data`, which gives rows in the order of its read tasks."""
    ray = pytest.importorskip("ray")
    data = pytest.importorskip("ray.data")
    start_ray(num_cpus=2, _node_ip_address="127.0.0.1")
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    preserved, context.execution_options.preserve_order = context.execution_options.preserve_order, True
    yield data
    context.execution_options.preserve_order = preserved
    ray.shutdown()


def parquet_file(number: int) -> bytes:
    """Of two blocks of the cache: the footer and the first columns come in different ones."""
    out = io.BytesIO()
    noise = np.random.default_rng(number).integers(0, 1 << 62, (5, 125_000))
    pq.write_table(pa.table({f"c{column}": noise[column] for column in range(5)}), out, compression="none")
    return out.getvalue()


def image_file(number: int) -> bytes:
    out = io.BytesIO()
    noise = np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(out, "PNG")
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("kind", "reseed"), [("parquet", True), ("images", False)])
def test_ray_data_reads_in_the_predicted_order_and_each_byte_once(
    data: Any,
    s3: S3Server,
    bucket: str,
    s3_options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    reseed: bool,
) -> None:
    """Files are shuffled again in each epoch, or in the same order; `following` has them fetched ahead of Ray's tasks."""
    make, count, suffix = (
        (parquet_file, _PARQUET_FILES, "parquet") if kind == "parquet" else (image_file, _IMAGES, "png")
    )
    files = {f"{bucket}/{kind}/{number:03}.{suffix}": make(number) for number in range(count)}
    origin = open_origin("s3", s3.target_options)
    for key, content in files.items():
        origin.put(key, content)
    with EmulatedRegion(s3.endpoint_url) as region:
        target = {**s3.target_options, "endpoint_url": region.endpoint_url}
        fs = millrace.filesystem("s3", **{**s3_options, "target_options": target, "consistency": "immutable"})
        paths = sorted(fs.find(f"{bucket}/{kind}"))
        begun: list[Prefetch] = []  # what `following` has begun

        def prefetch(*arguments: Any, **options: Any) -> Prefetch:
            begun.append(Prefetch(fs, *arguments, **options))
            return begun[-1]

        monkeypatch.setattr(fs, "prefetch", prefetch)
        shuffle = data.FileShuffleConfig(seed=7, reseed_after_execution=reseed)
        read = data.read_parquet if kind == "parquet" else data.read_images
        dataset = read(paths, filesystem=fs, shuffle=shuffle, include_paths=True)
        orders = []
        for execution in range(2):
            order = ray_file_order(paths, seed=7, execution=execution, reseed_after_execution=reseed)
            batches = dataset.iter_batches(batch_size=None)
            seen = [
                fs.key_of(str(path))
                for batch in following(batches, order, fs, path_of=lambda batch: batch["path"][-1], window="24MB")
                for path in batch["path"]
            ]
            assert list(without_repeats(seen)) == order
            assert len(seen) == (count if kind == "images" else count * 125_000)
            orders.append(order)
            got = region.stats(prefix=f"/{bucket}/{kind}/").by_method
            assert got["GET"].bytes_down == sum(map(len, files.values()))
            assert "HEAD" not in got
        # Ray starts processes before it reads: by then the driver has fetched.
        assert begun[0].progress.fetched_bytes > 0
        assert begun[1].progress.fetched_bytes == 0
        assert all(each.progress.opened > 0 and each.progress.failed == 0 for each in begun)
        assert (orders[0] != orders[1]) is reseed
        assert paths not in orders
