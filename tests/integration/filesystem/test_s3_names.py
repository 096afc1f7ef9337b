"""Buckets, prefixes and folders of a real S3 server: existing ones, missing ones, and removals."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest

import millrace
from millrace.errors import ConfigurationError, MissingError, ObjectChangedError, UsageError
from millrace.origin import open_origin, store_listing
from millrace.testing.s3 import S3Server


@pytest.fixture
def reference(s3: S3Server) -> pafs.S3FileSystem:
    return pafs.S3FileSystem(
        access_key=s3.key, secret_key=s3.secret, endpoint_override=s3.endpoint_url, allow_bucket_creation=False
    )


def test_empty_bucket_is_a_directory(fs: millrace.MillraceFileSystem, bucket: str) -> None:
    assert fs.info(bucket)["type"] == "directory"
    assert fs.isdir(bucket)
    assert fs.exists(bucket)
    assert fs.ls(bucket) == []
    assert fs.find(bucket) == []
    assert fs.get_file_info(bucket).type == pafs.FileType.Directory
    assert fs.get_file_info(pafs.FileSelector(bucket)) == []
    with pytest.raises(IsADirectoryError):
        fs.open(bucket)
    fs.pipe_file(f"{bucket}/x", b"1")
    assert fs.ls(bucket, detail=False) == [f"{bucket}/x"]


@pytest.mark.parametrize("path", ["no-such-bucket", "no-such-bucket/p", "s3://no-such-bucket/p/q"])
def test_missing_bucket_is_not_found(path: str, fs: millrace.MillraceFileSystem) -> None:
    for ask in (fs.ls, fs.info, fs.find, fs.describe, fs.cat_file, fs.rm):
        with pytest.raises(MissingError) as caught:
            ask(path)
        assert "<" not in str(caught.value)
    with pytest.raises(MissingError):
        fs.find(path, maxdepth=1)
    assert not fs.exists(path)
    assert not fs.isdir(path)
    assert fs.get_file_info(path).type == pafs.FileType.NotFound
    assert fs.get_file_info(pafs.FileSelector(path, allow_not_found=True)) == []
    with pytest.raises(FileNotFoundError):
        fs.get_file_info(pafs.FileSelector(path, recursive=True))


def test_root_is_a_directory_without_listed_buckets(fs: millrace.MillraceFileSystem) -> None:
    assert fs.isdir("")
    for ask in (fs.ls, fs.find):
        with pytest.raises(ConfigurationError, match="without a bucket"):
            ask("")
    with pytest.raises(UsageError):
        fs.rm("s3://", recursive=True)


def test_empty_folders_are_directories(
    fs: millrace.MillraceFileSystem, bucket: str, reference: pafs.S3FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("p/q", "p/r/s", "z"):
        reference.create_dir(f"{bucket}/{name}")
    for name in ("p/empty", "p/r/full", "y"):
        fs.pipe_file(f"{bucket}/{name}", b"" if "empty" in name else b"1")
    for page in (1000, 2, 1):  # a marker may be the last of its page
        monkeypatch.setattr(store_listing, "LIST_PAGE", page)
        for base in (bucket, f"{bucket}/p", f"{bucket}/p/q", f"{bucket}/z"):
            for recursive in (True, False):
                selector = pafs.FileSelector(base, recursive=recursive)
                assert sorted((info.path, info.type) for info in fs.get_file_info(selector)) == sorted(
                    (info.path, info.type) for info in reference.get_file_info(selector)
                ), (base, recursive)
        fs.invalidate_cache(f"{bucket}/p/q")
    for name in ("p", "p/q", "p/r/s", "z", "p/empty", "y", "p/none"):
        assert fs.get_file_info(f"{bucket}/{name}").type == reference.get_file_info(f"{bucket}/{name}").type, name
    files = [f"{bucket}/p/empty", f"{bucket}/p/r/full", f"{bucket}/y"]
    assert fs.find(bucket) == files
    assert fs.ls(f"{bucket}/p/q") == []
    assert fs.cat_file(f"{bucket}/p/empty") == b""
    directories = [f"{bucket}/p", f"{bucket}/p/q", f"{bucket}/p/r", f"{bucket}/p/r/s", f"{bucket}/z"]
    assert fs.find(bucket, withdirs=True) == sorted([bucket, *files, *directories])


def test_recursive_removal_removes_unlisted_objects_too(
    fs: millrace.MillraceFileSystem, bucket: str, s3: S3Server, reference: pafs.S3FileSystem
) -> None:
    origin = open_origin("s3", s3.target_options)
    for door in ("rm", "delete_dir", "delete_dir_contents"):
        fs.pipe({f"{bucket}/t/{i % 7}/{i}": b"1" for i in range(50)})
        reference.create_dir(f"{bucket}/t/marked")
        fs.pipe_file(f"{bucket}/tx", b"1")
        assert len(fs.find(f"{bucket}/t")) == 50
        origin.put(f"{bucket}/t/late", b"not in the listing that is remembered")
        with pytest.raises(IsADirectoryError):
            fs.rm(f"{bucket}/t")
        if door == "rm":
            fs.rm(f"{bucket}/t", recursive=True)
        else:
            getattr(fs, door)(f"{bucket}/t")
        assert [info.key for page in origin.list_all(bucket) for info in page if info.size] == [f"{bucket}/tx"]
        assert not fs.exists(f"{bucket}/t/0/0")
        assert fs.find(f"{bucket}/t") == []
    with pytest.raises(FileNotFoundError):
        fs.rm(f"{bucket}/none", recursive=True)


def test_large_pipe_is_uploaded_in_parts(
    fs: millrace.MillraceFileSystem, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom((16 << 20) + 1)
    whole: list[int] = []
    put = fs._origin.put
    monkeypatch.setattr(
        fs._origin, "put", lambda key, value, **options: (whole.append(len(value)), put(key, value, **options))[1]
    )
    fs.pipe_file(f"{bucket}/x", data)
    assert whole == []
    assert fs.cat_file(f"{bucket}/x") == data
    with pytest.raises(FileExistsError):
        fs.pipe_file(f"{bucket}/x", data, mode="create")


def test_copied_and_moved_objects_have_their_new_names(fs: millrace.MillraceFileSystem, bucket: str) -> None:
    fs.pipe({f"{bucket}/a/x": b"1", f"{bucket}/a/b/y": b"2"})
    fs.mv(f"{bucket}/a", f"{bucket}/c", recursive=True)
    assert fs.find(bucket) == [f"{bucket}/c/b/y", f"{bucket}/c/x"]
    fs.cp_file(f"{bucket}/c/x", f"{bucket}/d")
    assert fs.cat_file(f"{bucket}/d") == b"1"


def test_own_overwrite_is_visible_with_immutable(
    bucket: str, s3: S3Server, s3_options: dict[str, Any], tmp_path: Path
) -> None:
    fs = millrace.filesystem("s3", consistency="immutable", **s3_options)
    origin = open_origin("s3", s3.target_options)
    for name, size in (("small", 10), ("big", 20 << 20)):
        fs.pipe_file(f"{bucket}/{name}", b"a" * size)
        fs.info(f"{bucket}/{name}")
        origin.put(f"{bucket}/{name}", b"b" * size)
    assert fs.cat_file(f"{bucket}/small") == b"b" * 10
    origin.put(f"{bucket}/small", b"c")
    fs.node.discard(fs._origin, fs.describe(f"{bucket}/small"))
    with fs.open_input_file(f"{bucket}/small") as file:
        assert file.read() == b"c"
    with fs.open(f"{bucket}/big") as file, pytest.raises(ObjectChangedError):
        file.read(1)
    with fs.open(f"{bucket}/big") as file:
        assert file.read(1) == b"b"


def test_listing_with_unusable_name_raises(fs: millrace.MillraceFileSystem, bucket: str, s3: S3Server) -> None:
    session = pytest.importorskip("botocore.session").get_session()
    client = session.create_client(
        "s3",
        endpoint_url=s3.endpoint_url,
        aws_access_key_id=s3.key,
        aws_secret_access_key=s3.secret,
        region_name="us-east-1",
    )
    for name in ("d/good", "d/e/bad\tname", "z/good"):
        client.put_object(Bucket=bucket, Key=name, Body=b"1")
    client.close()
    for ask in (
        lambda: fs.find(bucket),
        lambda: fs.ls(f"{bucket}/d/e"),
        lambda: fs.exists(f"{bucket}/d/e"),
        lambda: fs.get_file_info(pafs.FileSelector(f"{bucket}/d", recursive=True, allow_not_found=True)),
    ):
        with pytest.raises(UsageError, match="contains an object whose name cannot be used") as caught:
            ask()
        assert "bad" in str(caught.value)
    assert fs.find(f"{bucket}/z") == [f"{bucket}/z/good"]
    assert fs.cat_file(f"{bucket}/d/good") == b"1"
    assert not fs.exists(f"{bucket}/d/e/no\tsuch")
