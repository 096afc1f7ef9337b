"""`fs.prefetch` with torch's DataLoader over a real S3 server: each byte once for all readers."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import millrace
from millrace.filesystem.orders import PrefetchingSampler
from millrace.origin import open_origin
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler  # noqa: E402

SHARDS, SHARD_BYTES = 24, 1_500_000


class Files(Dataset[int]):
    """An unmodified data set: opens a file an item."""

    def __init__(self, fs: millrace.MillraceFileSystem, paths: list[str]) -> None:
        self.fs = fs
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        with self.fs.open(self.paths[index]) as file:
            return zlib.crc32(file.read())


class Shards(IterableDataset[int]):
    """A stream over shards; each worker reads its own share, and has it fetched ahead."""

    def __init__(self, fs: millrace.MillraceFileSystem, paths: list[str]) -> None:
        self.fs = fs
        self.paths = paths

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        mine = self.paths[worker.id :: worker.num_workers]
        with self.fs.prefetch(mine, window="4.2MB"):
            for path in mine:
                yield zlib.crc32(self.fs.cat_file(path))


@pytest.fixture(scope="module")
def region(s3: S3Server) -> Iterator[EmulatedRegion]:
    with EmulatedRegion(s3.endpoint_url) as region:
        yield region


@pytest.fixture(scope="module")
def shards(s3: S3Server) -> dict[str, int]:
    """The checksum of every shard, by its path."""
    s3.create_bucket("prefetch")
    origin = open_origin("s3", s3.target_options)

    def put(number: int) -> tuple[str, int]:
        data = os.urandom(SHARD_BYTES)
        origin.put(f"prefetch/train/{number:02}.bin", data)
        return f"prefetch/train/{number:02}.bin", zlib.crc32(data)

    with ThreadPoolExecutor(8) as pool:
        return dict(pool.map(put, range(SHARDS)))


@pytest.fixture
def fs(s3: S3Server, region: EmulatedRegion, s3_options: dict[str, Any]) -> millrace.MillraceFileSystem:
    target = {**s3.target_options, "endpoint_url": region.endpoint_url}
    fs = millrace.filesystem("s3", **{**s3_options, "target_options": target, "consistency": "immutable"})
    fs.find("prefetch/train")
    region.reset()
    return fs


def assert_whole_epoch(region: EmulatedRegion, shards: dict[str, int], seen: list[int]) -> None:
    assert sorted(seen) == sorted(shards.values())
    traffic = region.stats(prefix="/prefetch/train/").by_method
    assert traffic["GET"].bytes_down == SHARDS * SHARD_BYTES
    assert traffic["GET"].requests == SHARDS
    assert "HEAD" not in traffic


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.parametrize(
    ("start", "workers"), [("fork", 2), ("fork", 8), ("spawn", 2), pytest.param("spawn", 4, marks=pytest.mark.slow)]
)
def test_prefetch_sampler_with_any_kind_of_worker_reads_whole_epochs(
    fs: millrace.MillraceFileSystem, region: EmulatedRegion, shards: dict[str, int], start: str, workers: int
) -> None:
    dataset = Files(fs, list(shards))
    order = RandomSampler(dataset, generator=torch.Generator().manual_seed(3))
    sampler = PrefetchingSampler(order, fs, path_of=lambda index: dataset.paths[index], window="12MB")
    loader = DataLoader(dataset, sampler=sampler, batch_size=2, num_workers=workers, multiprocessing_context=start)
    seen = [int(value) for batch in loader for value in batch]
    assert_whole_epoch(region, shards, seen)
    if start == "spawn":  # starting the workers once more takes many seconds
        return
    before = region.stats().requests
    assert sorted(int(value) for batch in loader for value in batch) == sorted(seen)
    assert region.stats().requests == before  # another epoch sends no request


def test_iterable_data_set_prefetches_its_shards_in_each_worker(
    fs: millrace.MillraceFileSystem, region: EmulatedRegion, shards: dict[str, int]
) -> None:
    loader = DataLoader(Shards(fs, list(shards)), batch_size=None, num_workers=2)
    assert_whole_epoch(region, shards, [int(value) for value in loader])


def test_prefetch_window_holds_and_reads_send_no_request(
    fs: millrace.MillraceFileSystem, region: EmulatedRegion, shards: dict[str, int]
) -> None:
    window, opened = 6_000_000, 0
    with fs.prefetch(shards, window=window) as prefetch:
        assert prefetch.wait(120)
        for path in shards:
            ready = region.stats(prefix="/prefetch/train/")
            assert ready.bytes_down <= opened + window
            assert zlib.crc32(fs.cat_file(path)) == shards[path]
            opened += SHARD_BYTES
            assert prefetch.wait(120)
    assert_whole_epoch(region, shards, list(shards.values()))
