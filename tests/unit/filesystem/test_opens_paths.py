"""Paths of a file system: its own scheme in every spelling, never another's; as Ray, pyarrow and fsspec pass them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pyarrow.fs import FileType

import millrace
from millrace.errors import ObjectNotFoundError, UsageError
from millrace.filesystem import MillraceFileSystem

OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"endpoint_url": "http://127.0.0.1:9", "anon": True},
    "az": {"account_name": "account", "anon": True},
    "gs": {"token": "anon"},
}
SPELLINGS = [
    (
        "s3",
        "bucket/a b",
        ["s3://bucket/a b", "s3a://bucket/a b", "millrace://bucket/a b", "bucket/a b", "/bucket/a b/"],
    ),
    (
        "az",
        "c/p/q",
        [
            "az://c/p/q",
            "abfs://c/p/q",
            "abfss://c@account.dfs.core.windows.net/p/q",
            "c@account.dfs.core.windows.net/p/q",
        ],
    ),
    ("gs", "b/k", ["gs://b/k", "gcs://b/k", "millrace://b/k"]),
    ("hf", "datasets/u/r@refs%2Fpr%2F1/x", ["hf://datasets/u/r@refs%2Fpr%2F1/x", "datasets/u/r@refs%2Fpr%2F1/x"]),
    ("https", "host:8443/x/y.parquet", ["https://host:8443/x/y.parquet", "host:8443/x/y.parquet"]),
    ("https", "host/x?a=1&b=2", ["https://host/x?a=1&b=2"]),
    ("memory", "a/b", ["memory://a/b", "/a/b", "a/b", "memory:///a/b"]),
    ("ftp", "a/b", ["ftp://host/a/b", "/a/b", "a/b", "ftp:///a/b"]),
]


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def opened(protocol: str, cache: str) -> MillraceFileSystem:
    options = {"host": "host"} if protocol == "ftp" else OPTIONS.get(protocol)
    return millrace.filesystem(protocol, options, cache_dir=cache, min_free=0, members="none")


@pytest.mark.parametrize(("protocol", "key", "spellings"), SPELLINGS)
def test_all_spellings_of_a_path_are_one_key(protocol: str, key: str, spellings: list[str], cache: str) -> None:
    fs = opened(protocol, cache)
    assert [fs.key_of(path) for path in spellings] == [key] * len(spellings)
    assert [fs.normalize_path(path) for path in spellings] == [key] * len(spellings)
    assert fs.key_of(fs.unstrip_protocol(key)) == key
    assert [str(fs._strip_protocol(path)).strip("/") for path in spellings if "@account" not in path] == [key] * sum(
        "@account" not in path for path in spellings
    )


@pytest.mark.parametrize(
    ("protocol", "path"),
    [
        ("s3", "gs://bucket/key"),
        ("s3", "file:///etc/passwd"),
        ("gs", "s3://bucket/key"),
        ("file", "s3://bucket/key"),
        ("file", "memory://x"),
        ("https", "http://host/x"),
        ("memory", "s3://bucket/key"),
        ("az", "abfs://c@other.dfs.core.windows.net/p"),
        ("az", "c@other.dfs.core.windows.net/p"),
        ("ftp", "ftp://other/a/b"),
    ],
)
def test_path_of_another_storage_raises(protocol: str, path: str, cache: str) -> None:
    fs = opened(protocol, cache)
    for call in (fs.info, fs.exists, fs.ls, fs.cat_file, fs.open, fs.get_file_info, lambda path: fs.pipe(path, b"x")):
        with pytest.raises(UsageError):
            call(path)


def test_key_may_contain_any_characters_inside(cache: str, tmp_path: Path) -> None:
    assert opened("s3", cache).key_of("s3://bucket/a://b") == "bucket/a://b"
    assert opened("s3", cache).key_of("bucket/s3://b") == "bucket/s3://b"
    file = tmp_path / "a:b@c"
    file.write_bytes(b"x")
    assert opened("file", cache).cat_file(str(file)) == b"x"


@pytest.mark.parametrize(("protocol", "key", "spellings"), SPELLINGS)
def test_ray_finds_the_file_system_for_urls_of_its_scheme(
    protocol: str, key: str, spellings: list[str], cache: str
) -> None:
    pytest.importorskip("ray.data")
    from ray.data.datasource.path_util import _resolve_paths_and_filesystem as resolve

    fs = opened(protocol, cache)
    for path in spellings:
        if path.startswith(("millrace://", "host:")):  # Ray takes the port for a path, and the host for a scheme
            continue
        (resolved,), found = resolve([path], fs)
        assert getattr(found, "unwrap", lambda found=found: found)() is fs, path
        assert fs.key_of(resolved) == key, path


def test_fsspec_chains_an_url_of_its_memory(cache: str) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/chained/a.txt", b"first")
    options = {"cache_dir": cache, "min_free": 0, "members": "none"}
    try:
        with fsspec.open("millrace::memory://chained/a.txt", millrace=options) as file:
            assert file.read() == b"first"
        with fsspec.open("millrace::memory://chained/b.txt", "wb", millrace=options) as file:
            file.write(b"second")
        assert memory.cat("/chained/b.txt") == b"second"
        fs, path = fsspec.url_to_fs("millrace::memory://chained", millrace=options)
        assert [name.strip("/") for name in fs.ls(path, detail=False)] == ["chained/a.txt", "chained/b.txt"]
        frames = fsspec.open_files("millrace::memory://chained/*.txt", millrace=options)
        assert sorted(file.path.strip("/") for file in frames) == ["chained/a.txt", "chained/b.txt"]
    finally:
        memory.rm("/chained", recursive=True)


@pytest.mark.parametrize("name", ["a\0", "\0", "a\x01b", "\udcff"])
@pytest.mark.parametrize("protocol", ["file", "s3", "memory", "hf"])
def test_path_with_unusable_characters_is_not_found(protocol: str, name: str, cache: str) -> None:
    fs = opened(protocol, cache)
    path = f"/bucket/d/{name}"
    for read in (fs.cat_file, fs.info, fs.open, fs.load, fs.open_input_file):
        with pytest.raises(ObjectNotFoundError, match="is not a"):
            read(path)
    assert not fs.exists(path)
    if name.isascii():
        assert fs.get_file_info([path])[0].type == fs.get_file_info(path).type == FileType.NotFound
    else:
        for given in (path, [path]):
            with pytest.raises(ObjectNotFoundError, match=r"\\udcff is not a valid object name"):
                fs.get_file_info(given)


def test_path_objects_are_accepted_like_text(tmp_path: Path, cache: str) -> None:
    fs, path = opened("file", cache), tmp_path / "a"
    path.write_bytes(b"12")
    assert fs.load(path).done_objects == fs.load([path]).done_objects == 1
    for read in (fs.open, fs.open_input_file, fs.open_input_stream):
        with read(path) as file:
            assert file.read() == b"12"
    assert fs.get_file_info(path).size == fs.get_file_info([path])[0].size == 2
    fs.pin(path)
    assert [found.pinned for found in fs.cached(path)] == [True]
    fs.unpin([path])
    assert fs.free(path) == 2


@pytest.mark.parametrize("path", [None, 5, b"x", ["a", None]])
def test_other_values_as_path_are_usage_errors(path: Any, cache: str) -> None:
    fs = opened("file", cache)
    calls = [fs.load, fs.free, fs.pin]
    if not isinstance(path, list):
        calls += [fs.info, fs.cat_file, fs.open, fs.open_input_file]
    for call in calls:
        with pytest.raises(UsageError, match="is not a path"):
            call(path)


@pytest.mark.parametrize("given", ["cache", Path("cache"), ["cache", "other"]], ids=["text", "path", "list"])
def test_relative_cache_directory_is_the_same_one_in_a_process_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    fs = millrace.filesystem("file", cache_dir=given, min_free=0)
    pickled = pickle.dumps(fs)
    monkeypatch.chdir(tmp_path / "elsewhere")
    received = pickle.loads(pickled)
    assert received == fs
    assert repr(received) == repr(fs)
    assert str(tmp_path / "cache") in repr(received)


def test_cache_directory_below_the_home_directory_is_that_of_the_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "mine"))
    pickled = pickle.dumps(millrace.filesystem("file", cache_dir="~/cache", min_free=0))
    monkeypatch.setenv("HOME", str(tmp_path / "theirs"))
    assert str(tmp_path / "theirs" / "cache") in repr(pickle.loads(pickled))
