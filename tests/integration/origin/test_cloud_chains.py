"""Azure and Google through the whole file system: URLs, chains, and the same bytes as other libraries see."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.azurite import AzuriteServer
from tests.support.gcs_server import GcsFront

import millrace
from millrace.testing.s3 import S3Server

TABLE = pa.table({"number": list(range(10_000))})


def write_and_read(protocol: str, alias: str, options: dict[str, Any], place: str, cache: dict[str, Any]) -> None:
    """A table in, and out again by every way of naming it; one file moved, one large one streamed, all removed."""
    fs = millrace.filesystem(protocol, target_options=options, **cache)
    pq.write_table(TABLE, f"{place}/set/one.parquet", filesystem=fs)
    for path in (f"{place}/set/one.parquet", f"{protocol}://{place}/set", f"{alias}://{place}/set/one.parquet"):
        assert pq.read_table(path, filesystem=fs).equals(TABLE)
    with fs.open(f"{place}/large", "wb") as file:
        for number in range(20):
            file.write(bytes([number]) * 1_000_000)
    fs.mv(f"{place}/large", f"{place}/moved")
    copy = pickle.loads(pickle.dumps(fs))
    assert copy.cat_file(f"{place}/moved", 17_999_999, 18_000_001) == bytes([17, 18])
    chained = fsspec.open(f"millrace::{alias}://{place}/moved", **{alias: options, "millrace": cache})
    with chained as file:
        assert file.read(1_000_001) == bytes(1_000_000) + b"\x01"
    assert fs.find(place) == [f"{place}/moved", f"{place}/set/one.parquet"]
    fs.rm(place, recursive=True)
    assert fs.find(place) == []


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, Any]:
    return {"cache_dir": str(tmp_path / "cache"), "min_free": 0}


@pytest.mark.azurite
def test_azure_object_written_through_a_chain_is_read_back(
    azurite: AzuriteServer, container: str, cache: dict[str, Any]
) -> None:
    write_and_read("az", "abfs", {"connection_string": azurite.connection_string}, f"{container}/root", cache)


def test_google_object_written_through_a_chain_is_read_back(s3: S3Server, bucket: str, cache: dict[str, Any]) -> None:
    with GcsFront(s3) as front:
        write_and_read("gs", "gcs", {"endpoint_url": front.endpoint, "token": front.token()}, f"{bucket}/root", cache)


@pytest.mark.azurite
@pytest.mark.parametrize("kind", ["key", "signature"])
def test_adlfs_with_the_same_options_lists_and_reads_the_same_objects(
    azurite: AzuriteServer, container: str, cache: dict[str, Any], kind: str
) -> None:
    adlfs = pytest.importorskip("adlfs")
    text = azurite.connection_string
    if kind == "signature":
        text = (
            f"BlobEndpoint={azurite.endpoint};AccountName={azurite.account};SharedAccessSignature={azurite.signature()}"
        )
    options = {"connection_string": text}
    ours = millrace.filesystem("az", target_options=options, **cache)
    ours.pipe(f"{container}/dir/a name", b"ours")
    theirs = adlfs.AzureBlobFileSystem(**options, skip_instance_cache=True)
    assert theirs.cat_file(f"{container}/dir/a name") == b"ours"
    theirs.pipe_file(f"{container}/dir/%41 #?ü", b"theirs")
    assert ours.cat_file(f"{container}/dir/%41 #?ü") == b"theirs"
    assert sorted(ours.find(container)) == sorted(theirs.find(container))
