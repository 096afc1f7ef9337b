"""Ray Data over the file system, on a real local Ray: rows, requests for metadata, and reads ahead."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tests.support.azurite import AzuriteServer
from tests.support.hub_server import HubServer
from tests.support.listed_buckets import asked, fill, let_everything_expire
from tests.support.ray_sessions import start_ray
from tests.support.waiting import wait_until
from tests.support.web_server import WebServer

import millrace
from millrace.cache.reading.fetching import DirectSource
from millrace.cluster.membership.ray_actor import find_origin
from millrace.cluster.membership.ray_control import ControlPlane
from millrace.cluster.membership.ray_records import cluster_name
from millrace.cluster.node_starter import node_starter, set_node_starter
from millrace.config import resolve
from millrace.filesystem.orders import following, ray_file_order, without_repeats
from millrace.filesystem.prefetching import Prefetch
from millrace.origin import open_origin
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

_LISTED = 1010
_PARQUET_FILES, _IMAGES = 10, 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray.data

    start_ray(num_cpus=2, _node_ip_address="127.0.0.1")
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


# --- reads ahead, before the others: Ray starts its processes for them, which the tests expect ------


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


@pytest.fixture
def ordered(cluster: None) -> Iterator[None]:
    """Ray Data gives rows in the order of its read tasks."""
    options = ray.data.DataContext.get_current().execution_options
    options.preserve_order, preserved = True, options.preserve_order
    yield
    options.preserve_order = preserved


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "reseed"), [("parquet", True), ("images", False)])
def test_ray_data_reads_in_the_predicted_order_and_each_byte_once(
    ordered: None,
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
        shuffle = ray.data.FileShuffleConfig(seed=7, reseed_after_execution=reseed)
        read = ray.data.read_parquet if kind == "parquet" else ray.data.read_images
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


# --- rows -----------------------------------------------------------------------------------------


def total(dataset: Any) -> int:
    """The sum of column `a`. `Dataset.sum` would start processes that aggregate."""
    return sum(int(batch["a"].sum()) for batch in dataset.iter_batches(batch_format="numpy", batch_size=None))


def test_read_parquet_reads_the_origin_in_the_first_epoch_only(
    cluster: None, bucket: str, s3_options: dict[str, Any]
) -> None:
    fs = millrace.filesystem("s3", consistency="immutable", **s3_options)
    for number in range(4):
        with fs.open_output_stream(f"{bucket}/train/{number}.parquet") as out:
            values = np.arange(50_000) + number * 50_000
            pq.write_table(pa.table({"a": values, "b": values * 0.5}), out, row_group_size=10_000)
    origin_bytes = []
    for _ in range(3):
        dataset = ray.data.read_parquet(f"s3://{bucket}/train", filesystem=fs)
        assert total(dataset) == sum(range(200_000))
        origin_bytes.append(fs.cache_counters()["origin_bytes"])
    size = sum(fs.info(f"{bucket}/train/{number}.parquet")["size"] for number in range(4))
    assert origin_bytes == [size] * 3


def _starter_waiting_for(path: Path) -> Any:
    """A function that starts a node once a file exists. Pickled by value, because the actor cannot import this module."""
    start = node_starter()

    def start_later(*arguments: Any, **options: Any) -> Any:
        while not path.exists():
            time.sleep(0.05)
        return start(*arguments, **options)

    return start_later


def test_reads_on_the_only_ray_node_do_not_wait_for_its_actor(
    cluster: None, bucket: str, s3_options: dict[str, Any], tmp_path: Path
) -> None:
    keys = [f"{bucket}/{name}" for name in ("before", "after")]
    writer = millrace.filesystem("s3", **{**s3_options, "members": "none", "cache_dir": str(tmp_path / "writer")})
    for key in keys:
        writer.pipe_file(key, key.encode() * 100)
    start, may_start = node_starter(), tmp_path / "may-start"
    set_node_starter(_starter_waiting_for(may_start))
    try:
        fs = millrace.filesystem("s3", consistency="immutable", **s3_options)
        assert fs.cat_file(keys[0]) == keys[0].encode() * 100
        second = millrace.filesystem("http", cache_dir=s3_options["cache_dir"], min_free=0, consistency="immutable")
        assert second.node is fs.node
        assert fs.node.source is DirectSource
        may_start.touch()
        wait_until(lambda: fs.node.source is not DirectSource, "the file system reads through the node")
    finally:
        set_node_starter(start)
    assert [fs.cat_file(key) for key in keys] == [key.encode() * 100 for key in keys]
    assert fs.cache_counters()["origin_bytes"] == sum(len(key) * 100 for key in keys)

    # The node has access to the origins of both.
    control = ControlPlane(ray.get_runtime_context().gcs_address)
    name = cluster_name(fs._options, resolve({}).cache_dirs)
    wait_until(lambda: find_origin(control, name, second.origin_identity) is not None, "the second origin is known")
    assert find_origin(control, name, fs.origin_identity) is not None


def test_read_images_returns_all_images(cluster: None, bucket: str, s3_options: dict[str, Any]) -> None:
    fs = millrace.filesystem("s3", consistency="immutable", **s3_options)
    for number in range(12):
        out = io.BytesIO()
        Image.new("RGB", (16, 16), (number * 10, 0, 0)).save(out, "PNG")
        fs.pipe_file(f"{bucket}/images/{number:02}.png", out.getvalue())
    for _ in range(2):
        dataset = ray.data.read_images(f"s3://{bucket}/images", filesystem=fs)
        reds = sorted(int(row["image"][0, 0, 0]) for row in dataset.iter_rows())
        assert reds == [number * 10 for number in range(12)]
        origin_requests = fs.cache_counters()["origin_requests"]
    assert origin_requests == 12


@pytest.mark.azurite
def test_read_parquet_of_azure_returns_all_rows(
    cluster: None, azurite: AzuriteServer, container: str, tmp_path: Path
) -> None:
    fs = millrace.filesystem("az", azurite.target_options, cache_dir=str(tmp_path / "cache"), min_free=0)
    with fs.open_output_stream(f"{container}/train/x.parquet") as out:
        pq.write_table(pa.table({"a": range(1000)}), out)
    for url in (f"az://{container}/train", f"abfs://{container}/train/x.parquet"):
        assert total(ray.data.read_parquet(url, filesystem=fs)) == sum(range(1000))
    ray.data.range(10).write_parquet(f"az://{container}/written", filesystem=fs)
    assert ray.data.read_parquet(f"az://{container}/written", filesystem=fs).count() == 10


def test_read_parquet_of_the_hub_and_of_a_web_server_returns_all_rows(cluster: None, tmp_path: Path) -> None:
    out = io.BytesIO()
    pq.write_table(pa.table({"a": range(1000)}), out)
    cache = {"cache_dir": str(tmp_path / "cache"), "min_free": 0}
    with HubServer() as hub, WebServer() as web:
        hub.commit("datasets", "user/set", {"train/x.parquet": out.getvalue()})
        fs = millrace.filesystem("hf", {"endpoint": hub.url}, **cache)
        assert total(ray.data.read_parquet("hf://datasets/user/set/train", filesystem=fs)) == sum(range(1000))
        web.put("/x.parquet", out.getvalue())
        fs = millrace.filesystem("http", **cache)
        assert total(ray.data.read_parquet(f"{web.url}/x.parquet", filesystem=fs)) == sum(range(1000))


# --- requests for metadata ------------------------------------------------------------------------


def image(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), (number % 256, number // 256, 0)).save(out, "PNG")
    return out.getvalue()


@pytest.mark.slow
def test_epochs_of_ray_data_need_one_listing_per_page(
    cluster: None, bucket: str, s3: S3Server, region: EmulatedRegion, s3_options: dict[str, Any]
) -> None:
    """1,010 images in folders, so two pages of a listing; of Parquet six files, one page.

    Ray takes half a minute for an epoch of a thousand tables. The requests for more than a page of those are in
    `test_flat_directory_of_two_pages_costs_two_listings` of `test_metadata.py`.
    """
    files = {f"{bucket}/images/{number % 7}/{number:04}.png": image(number) for number in range(_LISTED)}
    for number in range(6):
        out = io.BytesIO()
        pq.write_table(pa.table({"a": np.arange(1000) + 1000 * number}), out, row_group_size=250)
        files[f"{bucket}/train/{number}.parquet"] = out.getvalue()
    fill(s3, files)
    options = {**s3_options, "target_options": {**s3.target_options, "endpoint_url": region.endpoint_url}}

    def images(fs: millrace.MillraceFileSystem) -> None:
        rows = ray.data.read_images(f"s3://{bucket}/images", filesystem=fs).iter_rows()
        values = sorted(int(row["image"][0, 0, 0]) + 256 * int(row["image"][0, 0, 1]) for row in rows)
        assert values == list(range(_LISTED))

    def parquet(fs: millrace.MillraceFileSystem) -> None:
        batches = ray.data.read_parquet(f"s3://{bucket}/train", filesystem=fs).iter_batches()
        assert sum(int(batch["a"].sum()) for batch in batches) == sum(range(6000))

    fs = millrace.filesystem("s3", consistency="1h", **options)
    for epoch, lists in ((parquet, 1), (images, 2)):
        asked(region)
        epoch(fs)
        assert asked(region)["LIST"] == lists
        let_everything_expire(fs)
        epoch(fs)
        assert asked(region) == {"LIST": lists}
        let_everything_expire(fs)
        epoch(millrace.filesystem("s3", consistency="immutable", **options))
        assert asked(region) == {}
