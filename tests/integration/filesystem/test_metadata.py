"""How many requests metadata costs: counted in front of a real S3 server, with many processes at once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
from tests.support.listed_buckets import asked, fill, let_everything_expire

import millrace
from millrace.origin import open_origin, store_listing
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server


@pytest.fixture
def options(s3: S3Server, region: EmulatedRegion, s3_options: dict[str, Any]) -> dict[str, Any]:
    """A file system that sees the server through the region."""
    target = {**s3.target_options, "endpoint_url": region.endpoint_url}
    return {**s3_options, "target_options": target}


def selected(fs: millrace.MillraceFileSystem, selector: pafs.FileSelector) -> list[tuple[str, pafs.FileType, int]]:
    return [(info.path, info.type, info.size) for info in fs.get_file_info(selector)]


def test_flat_directory_of_two_pages_costs_two_listings(
    bucket: str, s3: S3Server, region: EmulatedRegion, options: dict[str, Any]
) -> None:
    """The requests of Ray's readers before an epoch, without Ray: the type of the path, its listing, and each file.

    The check for a folder costs a page of its content; the rest is requested after that page.
    """
    keys = [f"{bucket}/train/{number:04}.parquet" for number in range(1001)]
    fill(s3, dict.fromkeys(keys, b"x"))
    fs = millrace.filesystem("s3", consistency="1h", **options)

    def ask() -> None:
        assert fs.get_file_info(f"{bucket}/train").type == pafs.FileType.Directory
        assert len(selected(fs, pafs.FileSelector(f"{bucket}/train", recursive=False))) == len(keys)
        assert all(info.size == 1 for info in fs.get_file_info(keys))

    ask()
    assert asked(region) == {"LIST": 2, "HEAD": 1}
    let_everything_expire(fs)
    ask()
    assert asked(region) == {"LIST": 2}
    let_everything_expire(fs)
    fill(s3, {f"{bucket}/train/1000/below": b"x"})  # a folder behind the first page
    assert fs.get_file_info(f"{bucket}/train").type == pafs.FileType.Directory
    found = {path: kind for path, kind, _ in selected(fs, pafs.FileSelector(f"{bucket}/train", recursive=False))}
    assert (len(found), found[f"{bucket}/train/1000"]) == (len(keys) + 1, pafs.FileType.Directory)
    asked(region)  # for the tests that follow


_EPOCH = """
import random, sys
import millrace
fs = millrace.filesystem("s3", target_options=eval(sys.argv[1]), cache_dir=sys.argv[2], min_free=0, consistency="1h")
print("ready", flush=True)
keys = sys.stdin.read().split()
random.Random(int(sys.argv[3])).shuffle(keys)
assert all(fs.describe(key).size == 1 for key in keys)
"""


@pytest.mark.slow
def test_processes_request_each_page_once(
    bucket: str, s3: S3Server, region: EmulatedRegion, options: dict[str, Any]
) -> None:
    keys = [f"{bucket}/d/{number:04}" for number in range(2300)]
    fill(s3, dict.fromkeys(keys, b"x"))
    fs = millrace.filesystem("s3", consistency="1h", **options)
    assert fs.find(f"{bucket}/d") == keys
    assert asked(region) == {"LIST": 3}
    let_everything_expire(fs)
    command = [sys.executable, "-c", _EPOCH, repr(options["target_options"]), options["cache_dir"]]
    processes = [
        subprocess.Popen([*command, str(seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for seed in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    region.reshape(round_trip_seconds=0.05, bytes_per_second=None)  # long enough for all to need the same page
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(" ".join(keys))
        process.stdin.close()
    for process in processes:
        assert process.wait(300) == 0
        assert process.stdout is not None
        process.stdout.close()
    region.reshape(round_trip_seconds=0.0, bytes_per_second=None)
    assert asked(region) == {"LIST": 3}


def test_pyarrow_and_fsspec_request_one_expired_page(
    bucket: str, s3: S3Server, region: EmulatedRegion, options: dict[str, Any]
) -> None:
    keys = [f"{bucket}/d/{number % 3}/{number:03}" for number in range(50)]
    fill(s3, {**dict.fromkeys(keys, b"x"), f"{bucket}/d/_SUCCESS": b"", f"{bucket}/other/x": b"1"})
    fs = millrace.filesystem("s3", consistency="1h", **options)
    selector = pafs.FileSelector(f"{bucket}/d", recursive=True)
    first = selected(fs, selector)
    assert asked(region) == {"LIST": 1, "HEAD": 1}  # whether _SUCCESS is a file or a folder
    for _ in range(2):
        let_everything_expire(fs)
        for _ in range(2):
            assert fs.get_file_info(f"{bucket}/d").type == pafs.FileType.Directory
            assert fs.get_file_info(f"{bucket}/d/1").type == pafs.FileType.Directory
            assert fs.get_file_info(f"{bucket}/d/_SUCCESS").type == pafs.FileType.File
            assert selected(fs, selector) == first
            assert len(fs.ls(f"{bucket}/d")) == 4
            assert len(fs.find(f"{bucket}/d/2")) == 16
            for key in random.Random(1).sample(keys, 20):
                assert fs.info(key)["size"] == 1
        assert asked(region) == {"LIST": 1}
    fs.pipe_file(f"{bucket}/d/new", b"1")
    asked(region)
    assert fs.info(keys[0])["size"] == 1  # a write of another key does not make it stale
    assert asked(region) == {}
    assert len(selected(fs, selector)) == len(first) + 1
    assert asked(region) == {"LIST": 1}


_ODD = [
    "a",
    "b c",
    "c%41",
    "d#e",
    "f+g&h=i",
    "j?k",
    "ä",
    "日本",
    "z~",
    "l" * 200,
    "m/n",
    "m/o/p",
    "m-q",
    "m.r",
    "m0",
    "M",
]


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_listing_continues_after_any_key(
    kind: str, bucket: str, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = open_origin(kind, s3.target_options if kind == "s3" else None)
    root = f"{bucket}/d" if kind == "s3" else f"{tmp_path}/d"
    for name in [*_ODD, "../e"]:
        key = os.path.normpath(f"{root}/{name}")
        if kind == "file":
            os.makedirs(os.path.dirname(key), exist_ok=True)
        origin.put(key, b"x")

    def rest(after: str = "") -> list[str]:
        pages = list(origin.list_pages(root, after=after))
        assert [page.last for page in pages] == [False] * (len(pages) - 1) + [True]
        assert max(len(page.objects) for page in pages) <= store_listing.LIST_PAGE
        return [info.key for page in pages for info in page.objects]

    everything = rest()
    assert sorted(everything) == sorted(f"{root}/{name}" for name in _ODD)
    if kind == "file":
        assert everything == sorted(everything)
    for page in (1000, 5, 1):
        monkeypatch.setattr(store_listing, "LIST_PAGE", page)
        for number, key in enumerate(everything):
            assert rest(key) == everything[number + 1 :], key
    assert rest(f"{root}/") == everything
