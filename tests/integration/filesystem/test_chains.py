"""URLs that fsspec chains, `millrace::SCHEME://...`, and pandas, pyarrow and Ray's readers over storages of every kind."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from tests.support.azurite import AzuriteServer
from tests.support.hub_server import HubServer
from tests.support.web_server import WebServer

import millrace
from millrace.errors import UsageError

TABLE = pa.table({"a": list(range(1000)), "b": [f"row {number}" for number in range(1000)]})


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(TABLE, sink)
    return sink.getvalue()


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, Any]:
    return {"cache_dir": str(tmp_path / "cache"), "min_free": 0, "members": "none"}


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer() as server:
        server.put("/data/x.parquet", parquet())
        yield server


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.commit("datasets", "user/set", {"data/x.parquet": parquet()})
        yield server


def test_web_file_is_read_through_fsspec_pandas_and_pyarrow(web: WebServer, cache: dict[str, Any]) -> None:
    chained = f"millrace::{web.url}/data/x.parquet"
    with fsspec.open(chained, millrace=cache) as file:
        assert pq.read_table(file).equals(TABLE)
    frame = pd.read_parquet(chained, storage_options={"millrace": cache})
    pd.testing.assert_frame_equal(frame, TABLE.to_pandas())
    fs = millrace.filesystem("http", **cache)
    asked = len(web.requests)
    assert pq.read_table(f"{web.url}/data/x.parquet", filesystem=fs).equals(TABLE)
    assert len(web.requests) == asked  # it is here by now
    with pytest.raises(UsageError, match="read only"):
        fs.pipe(f"{web.url}/data/y", b"x")


def test_hub_data_set_is_read_through_fsspec_pandas_and_pyarrow(hub: HubServer, cache: dict[str, Any]) -> None:
    options = {"endpoint": hub.url}
    chained = "millrace::hf://datasets/user/set/data/x.parquet"
    with fsspec.open(chained, millrace=cache, hf=options) as file:
        assert pq.read_table(file).equals(TABLE)
    frame = pd.read_parquet(chained, storage_options={"millrace": cache, "hf": options})
    pd.testing.assert_frame_equal(frame, TABLE.to_pandas())
    fs = millrace.filesystem("hf", options, **cache)
    assert pads.dataset("hf://datasets/user/set/data", filesystem=fs).to_table().equals(TABLE)


def test_hub_commit_is_never_requested_again(hub: HubServer, cache: dict[str, Any]) -> None:
    commit = hub.commit("datasets", "user/set", {"data/y.parquet": parquet()})
    root = f"hf://datasets/user/set@{commit}/data"

    def read() -> int:
        """The requests of a new reader that uses no cached metadata that can change."""
        before = len(hub.service.requests) + len(hub.cdn.requests)
        fs = millrace.filesystem("hf", {"endpoint": hub.url}, consistency="always", skip_instance_cache=True, **cache)
        assert [name.rpartition("/")[2] for name in fs.ls(root, detail=False)] == ["x.parquet", "y.parquet"]
        for name in ("x.parquet", "y.parquet"):
            assert pq.read_table(f"{root}/{name}", filesystem=fs).equals(TABLE)
        return len(hub.service.requests) + len(hub.cdn.requests) - before

    assert read() > 0
    assert [read() for _ in range(2)] == [0, 0]


@pytest.mark.azurite
def test_azure_file_is_read_through_pandas_and_pyarrow(
    azurite: AzuriteServer, container: str, cache: dict[str, Any]
) -> None:
    fs = millrace.filesystem("az", azurite.target_options, **cache)
    with fs.open_output_stream(f"az://{container}/data/x.parquet") as out:
        pq.write_table(TABLE, out)
    for url in (f"az://{container}/data/x.parquet", f"abfs://{container}/data/x.parquet"):
        assert pq.read_table(url, filesystem=fs).equals(TABLE)
    options = {"target_protocol": "az", "target_options": azurite.target_options, **cache}
    frame = pd.read_parquet(f"millrace://{container}/data/x.parquet", storage_options=options)
    pd.testing.assert_frame_equal(frame, TABLE.to_pandas())
    fs.mv(f"{container}/data/x.parquet", f"{container}/data/y.parquet")
    assert fs.find(f"abfs://{container}") == [f"{container}/data/y.parquet"]
