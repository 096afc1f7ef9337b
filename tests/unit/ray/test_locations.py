"""The URL and options of file systems that users pass to Ray."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs as pafs
import pytest

import millrace
from millrace.errors import UsageError
from millrace.filesystem import MillraceFileSystem
from millrace.origin import open_origin
from millrace.ray import location_of

KEYS = {"key": "name", "secret": "word", "endpoint_url": "http://127.0.0.1:9", "region": "eu-central-1"}
S3 = pafs.S3FileSystem(
    access_key="name", secret_key="word", endpoint_override="127.0.0.1:9", scheme="http", region="eu-central-1"
)


def s3_at(endpoint: str, scheme: str = "https") -> pafs.S3FileSystem:
    return pafs.S3FileSystem(anonymous=True, endpoint_override=endpoint, scheme=scheme, region="x")


def s3fs(**options: Any) -> pafs.FileSystem:
    client = {"region_name": "eu-central-1"}
    filesystem = fsspec.filesystem("s3", key="name", secret="word", client_kwargs=client, **options)
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))


@pytest.mark.parametrize(
    ("filesystem", "path", "url", "options"),
    [
        (pafs.LocalFileSystem(), "/data/run", "/data/run", {}),
        (pafs.SubTreeFileSystem("/data", pafs.LocalFileSystem()), "run", "/data/run", {}),
        (S3, "bucket/run", "s3://bucket/run", KEYS),
        (pafs.SubTreeFileSystem("bucket/deep", S3), "run", "s3://bucket/deep/run", KEYS),
        (pafs.S3FileSystem(anonymous=True, region="x"), "b/run", "s3://b/run", {"anon": True, "region": "x"}),
        (
            s3fs(endpoint_url="http://127.0.0.1:9", use_listings_cache=False),
            "b/run",
            "s3://b/run",
            {
                "key": "name",
                "secret": "word",
                "endpoint_url": "http://127.0.0.1:9",
                "client_kwargs": {"region_name": "eu-central-1"},
            },
        ),
        (
            pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("hf", endpoint="http://127.0.0.1:9", token=False))),
            "datasets/u/r/run",
            "hf://datasets/u/r/run",
            {"endpoint": "http://127.0.0.1:9", "token": False},
        ),
        (pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("file"))), "/data/run", "/data/run", {}),
    ],
)
def test_location_of_known_file_system_is_its_url_and_options(
    filesystem: pafs.FileSystem, path: str, url: str, options: dict[str, Any]
) -> None:
    for one in (filesystem, pickle.loads(pickle.dumps(filesystem))):
        assert location_of(one, path) == (url, options)
    if "://" in url:
        open_origin(url.partition("://")[0], options)  # every option is one that the origin takes
    assert location_of(filesystem, path, {"profile": "p"}) == (url, {"profile": "p"})


def test_location_of_millrace_file_system_is_its_url_and_options(
    make: Callable[..., MillraceFileSystem], tmp_path: Path
) -> None:
    assert location_of(make(), f"{tmp_path}/run") == (f"file://{tmp_path}/run", {})
    remote = millrace.filesystem("s3", target_options=KEYS, cache_dir=str(tmp_path / "cache"), min_free=0)
    wrapped = pafs.PyFileSystem(pafs.FSSpecHandler(remote))
    for one in (remote, pickle.loads(pickle.dumps(remote)), pafs.SubTreeFileSystem("bucket", remote), wrapped):
        path = "run" if isinstance(one, pafs.SubTreeFileSystem) else "bucket/run"
        assert location_of(one, path) == ("s3://bucket/run", KEYS)


def test_location_without_a_url_is_refused() -> None:
    memory = pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("memory")))
    for filesystem in (memory, pafs._MockFileSystem()):
        with pytest.raises(UsageError, match=r"millrace\.filesystem"):
            location_of(filesystem, "run")


@pytest.mark.parametrize(
    ("filesystem", "endpoint"),
    [
        (s3_at("http://127.0.0.1:9"), "http://127.0.0.1:9"),
        (s3_at("https://127.0.0.1:9", "http"), "https://127.0.0.1:9"),
        (s3_at("127.0.0.1:9", "http"), "http://127.0.0.1:9"),
        (s3_at("127.0.0.1:9"), "https://127.0.0.1:9"),
    ],
)
def test_location_of_a_pyarrow_endpoint_has_a_scheme(filesystem: pafs.S3FileSystem, endpoint: str) -> None:
    assert location_of(filesystem, "bucket/run")[1]["endpoint_url"] == endpoint


def test_location_of_an_environment_endpoint_keeps_its_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    filesystem, path = pafs.FileSystem.from_uri("s3://bucket/run?region=us-east-1")
    assert location_of(filesystem, path)[1]["endpoint_url"] == "http://127.0.0.1:9"
