"""The file system over web servers: reads of pyarrow, pandas and fsspec, their requests, and refusals."""

import io
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.web_server import WebServer

import millrace
from millrace.errors import MillraceError, ObjectChangedError, UsageError
from millrace.filesystem import MillraceFileSystem
from millrace.origin.web import WebOrigin

TABLE = pa.table({"number": list(range(20_000)), "text": [f"row {n}" for n in range(20_000)]})


def _parquet() -> bytes:
    file = io.BytesIO()
    pq.write_table(TABLE, file, row_group_size=2_000)
    return file.getvalue()


@pytest.fixture(params=[True, False], ids=["ranges", "no ranges"])
def server(request: pytest.FixtureRequest) -> Iterator[WebServer]:
    with WebServer(ranges=request.param) as server:
        server.put("/data/0.parquet", _parquet())
        server.put("/data/sub/1.parquet", _parquet())
        yield server


@pytest.fixture
def open_fs(tmp_path: Path) -> Callable[..., MillraceFileSystem]:
    def build(**options: Any) -> MillraceFileSystem:
        return millrace.filesystem("http", cache_dir=str(tmp_path / "cache"), min_free=0, **options)

    return build


def test_tables_are_read_once_from_the_server(
    server: WebServer, open_fs: Callable[..., MillraceFileSystem], tmp_path: Path
) -> None:
    fs = open_fs()
    path = f"{server.url}/data/0.parquet"
    assert pq.read_table(path, filesystem=fs).equals(TABLE)
    assert pq.read_table(f"{server.host}/data", filesystem=fs).num_rows == 2 * TABLE.num_rows
    bodies = server.service.count("GET", ".parquet")
    assert len(pd.read_parquet(path, filesystem=fs)) == TABLE.num_rows
    with fsspec.open(f"millrace::{path}", millrace={"cache_dir": str(tmp_path / "cache"), "min_free": 0}) as file:
        assert file.read() == _parquet()
    assert server.service.count("GET", ".parquet") == bodies


def test_web_listing_and_find_return_the_links(server: WebServer, open_fs: Callable[..., MillraceFileSystem]) -> None:
    fs, root = open_fs(), f"{server.host}/data"
    assert fs.ls(server.url + "/data", detail=False) == [f"{root}/0.parquet", f"{root}/sub"]
    assert fs.find(root) == [f"{root}/0.parquet", f"{root}/sub/1.parquet"]
    assert fs.glob(f"{root}/**/*.parquet") == [f"{root}/0.parquet", f"{root}/sub/1.parquet"]
    assert fs.isdir(root)
    assert not fs.exists(f"{root}/none")


def test_address_with_query_is_not_a_pattern(server: WebServer, open_fs: Callable[..., MillraceFileSystem]) -> None:
    fs, address = open_fs(), f"{server.url}/data/0.parquet?version=1*&name=a/b"
    assert fs.cat(address) == _parquet()
    assert fs.cat_file(address, 0, 4) == b"PAR1"
    with pytest.raises(FileNotFoundError):
        fs.cat(f"{server.url}/data/none?version=1")


def test_other_scheme_and_writes_are_refused(server: WebServer, open_fs: Callable[..., MillraceFileSystem]) -> None:
    fs = open_fs()
    for call in (
        lambda: fs.cat(f"https://{server.host}/data/0.parquet"),
        lambda: fs.pipe(f"{server.url}/new", b"x"),
        lambda: fs.rm(f"{server.url}/data/0.parquet"),
        lambda: fs.open(f"{server.url}/new", "wb"),
    ):
        with pytest.raises(UsageError):
            call()


def test_wrong_responses_are_not_cached(server: WebServer, open_fs: Callable[..., MillraceFileSystem]) -> None:
    """Bodies that are cut off, and answers of the wrong range: read again until right, or an error; never kept."""
    wanted, kinds = _parquet(), ["cut", "range", "busy", "broken"]

    def damage(request: Any, reply: Any) -> Any:
        if request.method != "GET" or reply.status not in (200, 206) or not kinds:
            return None
        kind = kinds.pop()
        if kind == "cut":
            return replace(reply, stop_after=100, headers={**reply.headers, "Content-Length": str(len(reply.body))})
        if kind == "range" and reply.status == 206:
            return replace(reply, headers={**reply.headers, "Content-Range": "bytes 7-8/9"})
        return replace(reply, status=503 if kind == "busy" else 500)

    server.service.interfere(damage)
    assert open_fs().cat(f"{server.url}/data/0.parquet") == wanted
    assert kinds == []
    server.service.leave_alone()
    assert open_fs(consistency="always").cat(f"{server.url}/data/0.parquet") == wanted


@pytest.mark.parametrize("tags", ["strong", "none"])
@pytest.mark.parametrize("preconditions", [True, False])
def test_constantly_overwritten_web_object_is_never_mixed(tags: Any, preconditions: bool) -> None:
    """Every 64 bytes of an object contain its version; sizes differ, since dates have only seconds."""
    stop, origin = threading.Event(), WebOrigin("http")

    def content(number: int) -> bytes:
        return b"%064d" % number * (5_000 + number)

    with WebServer(tags=tags, preconditions=preconditions) as server:
        server.put("/x", content(0))

        def overwrite() -> None:
            number = 0
            while not stop.wait(0.002):
                number = (number + 1) % 500
                server.put("/x", content(number))

        writer = threading.Thread(target=overwrite)
        writer.start()
        try:
            whole = changed = 0
            while whole + changed < 100 or not changed:  # the writer may begin late
                info = origin.head(f"{server.host}/x")
                cuts = [*range(0, info.size, info.size // 5), info.size]
                try:
                    parts = [origin.read(info.key, *cut, version=info.version) for cut in pairwise(cuts)]
                except ObjectChangedError:
                    changed += 1
                else:
                    whole += 1
                    data = b"".join(bytes(part) for part in parts)
                    assert data == content(int(data[:64]))
                    assert len(data) == info.size
        finally:
            stop.set()
            writer.join()


def test_secrets_in_options_are_in_no_error(server: WebServer, open_fs: Callable[..., MillraceFileSystem]) -> None:
    server.login = ("user", "right")
    fs = open_fs(target_options={"auth": ("user", "planted")})
    with pytest.raises(MillraceError) as caught:
        fs.cat(f"{server.url}/data/0.parquet?token=planted")
    assert "user" not in repr(fs)
    assert "planted" not in repr(fs) + str(caught.value)
