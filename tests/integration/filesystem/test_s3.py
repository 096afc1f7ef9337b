"""The file system over a real S3 server, with the libraries that users read through."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from tests.support.impatience import impatient

import millrace
from millrace.errors import DeniedError, ObjectChangedError, ObjectExistsError, OriginUnavailableError
from millrace.origin import open_origin
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server


def table(rows: int = 200_000) -> pa.Table:
    values = np.random.default_rng(1).random(rows)
    return pa.table({"a": np.arange(rows), "b": values, "c": [f"row {i % 97}" for i in range(rows)]})


def test_read_table_twice_reads_the_origin_once(fs: millrace.MillraceFileSystem, bucket: str) -> None:
    expected = table()
    with fs.open_output_stream(f"{bucket}/d/x.parquet") as out:
        pq.write_table(expected, out, row_group_size=20_000)
    assert pq.read_table(f"s3://{bucket}/d/x.parquet", filesystem=fs).equals(expected)
    size = fs.info(f"{bucket}/d/x.parquet")["size"]
    assert fs.cache_counters()["origin_bytes"] == size
    assert pq.read_table(f"s3://{bucket}/d/x.parquet", filesystem=fs, columns=["a"]).num_rows == expected.num_rows
    assert pads.dataset(f"{bucket}/d", filesystem=fs).to_table().equals(expected)
    assert isinstance(fs.open_input_file(f"{bucket}/d/x.parquet"), pa.BufferReader)
    assert fs.cache_counters()["origin_bytes"] == size


def test_pandas_reads_a_chained_url(
    fs: millrace.MillraceFileSystem, bucket: str, s3: S3Server, s3_options: dict[str, Any]
) -> None:
    frame = table(1000).to_pandas()
    fs.pipe_file(f"{bucket}/x.parquet", frame.to_parquet())
    storage_options = {
        "millrace": {"cache_dir": s3_options["cache_dir"], "min_free": 0},
        "s3": {"key": s3.key, "secret": s3.secret, "endpoint_url": s3.endpoint_url},
    }
    url = f"millrace::s3://{bucket}/x.parquet"
    pd.testing.assert_frame_equal(pd.read_parquet(url, storage_options=storage_options), frame)
    before = fs.cache_counters()["origin_bytes"]
    pd.testing.assert_frame_equal(pd.read_parquet(url, storage_options=storage_options), frame)
    assert fs.cache_counters()["origin_bytes"] == before


def test_s3_listing_returns_files_and_directories(fs: millrace.MillraceFileSystem, bucket: str) -> None:
    for name in ["a.bin", "d/b.bin", "d/e/c %41 #ä.bin", "dx/f.bin"]:
        fs.pipe_file(f"{bucket}/{name}", name.encode())
    assert fs.ls(bucket, detail=False) == [f"{bucket}/a.bin", f"{bucket}/d", f"{bucket}/dx"]
    assert fs.find(f"{bucket}/d") == [f"{bucket}/d/b.bin", f"{bucket}/d/e/c %41 #ä.bin"]
    assert fs.cat_file(f"s3://{bucket}/d/e/c %41 #ä.bin") == "d/e/c %41 #ä.bin".encode()
    infos = fs.get_file_info(pafs.FileSelector(f"{bucket}/d", recursive=True))
    assert sorted(info.path for info in infos) == sorted(
        [f"{bucket}/d/b.bin", f"{bucket}/d/e", f"{bucket}/d/e/c %41 #ä.bin"]
    )
    assert not fs.exists(f"{bucket}/nothing")


def test_large_upload_is_sent_in_parts(fs: millrace.MillraceFileSystem, bucket: str) -> None:
    data = os.urandom(35 << 20)
    with fs.open(f"{bucket}/big.bin", "wb") as file:
        for start in range(0, len(data), 3 << 20):
            file.write(data[start : start + (3 << 20)])
    assert fs.cat_file(f"{bucket}/big.bin") == data

    def write_half() -> None:
        with fs.open(f"{bucket}/half.bin", "wb") as file:
            file.write(data)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert not fs.exists(f"{bucket}/half.bin")


def test_overwrite_between_two_reads_is_never_mixed(fs: millrace.MillraceFileSystem, bucket: str, s3: S3Server) -> None:
    first, second = os.urandom(20 << 20), os.urandom(20 << 20)
    fs.pipe_file(f"{bucket}/x.bin", first)
    file = fs.open(f"{bucket}/x.bin")
    assert file.read(10) == first[:10]
    open_origin("s3", s3.target_options).put(f"{bucket}/x.bin", second)  # behind the cache's back
    file.seek(19 << 20)
    with pytest.raises(ObjectChangedError):
        file.read(10)
    file.close()


def test_conditional_put_and_read_refuse_existing_or_changed_objects(bucket: str, s3: S3Server) -> None:
    origin = open_origin("s3", s3.target_options)
    origin.put(f"{bucket}/once", b"1", if_absent=True)
    with pytest.raises(ObjectExistsError):
        origin.put(f"{bucket}/once", b"2", if_absent=True)
    info = origin.head(f"{bucket}/once")
    assert bytes(origin.read(f"{bucket}/once", 0, 1, version=info.version)) == b"1"
    with pytest.raises(ObjectChangedError):
        origin.read(f"{bucket}/once", 0, 1, version='"another"')
    origin.delete([f"{bucket}/once", f"{bucket}/never-was"])
    with pytest.raises(FileNotFoundError):
        origin.head(f"{bucket}/once")


def test_s3_errors_are_millrace_errors_with_next_steps(bucket: str, s3: S3Server, s3_options: dict[str, Any]) -> None:
    wrong = {**s3_options, "target_options": {**s3.target_options, "secret": "wrong"}}
    with pytest.raises(DeniedError, match="credentials"):
        millrace.filesystem("s3", **wrong).cat_file(f"{bucket}/x")
    with pytest.raises(FileNotFoundError, match=f"s3://{bucket}/missing"):
        millrace.filesystem("s3", **s3_options).cat_file(f"{bucket}/missing")


@pytest.mark.slow
def test_dead_server_raises_one_error_and_cached_bytes_stay_readable(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Any
) -> None:
    with S3Server(tmp_path_factory.mktemp("s3dead")) as server:
        server.create_bucket("bkt")
        options = {"target_options": server.target_options, "cache_dir": str(tmp_path / "cache"), "min_free": 0}
        fs = millrace.filesystem("s3", consistency="immutable", **options)
        fs.pipe_file("bkt/x", b"cached")
        fs.pipe_file("bkt/y", b"not cached")
        assert fs.cat_file("bkt/x") == b"cached"
    assert fs.cat_file("bkt/x") == b"cached"
    with impatient(), pytest.raises(OriginUnavailableError, match="cannot be reached"):
        fs.cat_file("bkt/y")


def test_folder_markers_are_directories(fs: millrace.MillraceFileSystem, bucket: str, s3: S3Server) -> None:
    fs.pipe_file(f"{bucket}/d/empty.bin", b"")
    fs.pipe_file(f"{bucket}/d/e/x.bin", b"x")
    reference = pafs.S3FileSystem(
        access_key=s3.key, secret_key=s3.secret, endpoint_override=s3.endpoint_url, allow_bucket_creation=False
    )
    reference.create_dir(f"{bucket}/d/e")  # an object of no bytes whose name ends in a slash
    for name in ["d", "d/e", "d/e/x.bin", "d/empty.bin", "nothing"]:
        ours, theirs = fs.get_file_info(f"{bucket}/{name}"), reference.get_file_info(f"{bucket}/{name}")
        assert ours.type == theirs.type, name
    selector = pafs.FileSelector(f"{bucket}/d", recursive=True)
    assert sorted((info.path, info.type) for info in fs.get_file_info(selector)) == sorted(
        (info.path, info.type) for info in reference.get_file_info(selector)
    )
    assert fs.find(f"{bucket}/d") == [f"{bucket}/d/e/x.bin", f"{bucket}/d/empty.bin"]


def test_upload_in_parts_whose_last_response_is_lost_raises_a_passing_error(
    s3_options: dict[str, Any], bucket: str, region: EmulatedRegion
) -> None:
    """Many stores refuse to publish it again. As a missing object, the upload of a save from a node would be given up."""
    s3_options["target_options"] = {**s3_options["target_options"], "endpoint_url": region.endpoint_url}
    fs = millrace.filesystem("s3", **s3_options)
    data = os.urandom(17 << 20)
    region.fail("reset", method="POST", path="*/x.bin*", skip=1, count=1)
    region.fail("status", method="POST", path="*/x.bin*", skip=1, count=1, status=404, code="NoSuchUpload")
    with pytest.raises(OriginUnavailableError, match="the response was lost"):
        fs.pipe_file(f"{bucket}/x.bin", data)
    assert region.fault_hits() == [1, 1]
    assert fs.cat_file(f"{bucket}/x.bin") == data
