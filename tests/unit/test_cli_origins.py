"""Commands over storages of every kind: what they load, list and say of it, and which address they ask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.cache.catalog import url_of
from millrace.cli import main
from millrace.errors import ConfigurationError, ObjectNotFoundError
from millrace.filesystem import filesystem
from millrace.origin import open_origin
from millrace.origin.translation import translate
from millrace.testing.hub import HubServer
from millrace.testing.web import WebServer


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MILLRACE_MIN_FREE", "0")


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.commit("datasets", "user/set", {"a/x.bin": os.urandom(100_000), "a/y.bin": b"1" * 50})
        yield server


@pytest.fixture
def millrace(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str, code: int = 0) -> str:
        actual = main(list(arguments))
        captured = capsys.readouterr()
        assert actual == code, captured.err
        return captured.err if code and not captured.out else captured.out

    return run


def test_a_data_set_of_the_hub(millrace: Any, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    root = "hf://datasets/user/set/a"
    assert millrace("load", root, "--endpoint-url", hub.url).startswith("2 objects, 100 kB, are in the cache: 100 kB")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    assert ": 0 B fetched" in millrace("load", root)
    assert millrace("ls", "hf://datasets/user/set") == f"{root}/x.bin\n{root}/y.bin\n"
    assert millrace("pin", root) == "pinned\n"
    assert f"{root}: 2 objects and folders" in millrace("doctor", root)


def test_a_web_server(millrace: Any) -> None:
    with WebServer() as web:
        web.put("/d/x.bin", b"z" * 1000)
        assert millrace("load", f"{web.url}/d/").startswith("1 objects, 1.00 kB")
        assert millrace("ls", f"{web.url}/d") == f"{web.url}/d/x.bin\n"
        assert "1 objects and folders" in millrace("doctor", f"{web.url}/d/")
        assert "has no endpoint" in millrace("load", f"{web.url}/d/", "--endpoint-url", "http://127.0.0.1:9", code=1)


@pytest.mark.parametrize(
    "command",
    [["load"], ["doctor"], ["checkpoints", "ls"], ["unpin"], ["pin", "--endpoint-url", "http://127.0.0.1:9"]],
    ids=" ".join,
)
def test_no_command_shows_the_query_of_a_web_address(millrace: Any, command: list[str]) -> None:
    with WebServer() as web:
        web.put("/there", b"z")
        millrace("load", f"{web.url}/there")  # some commands want a cache
        told = millrace(*command, f"{web.url}/n?sig=SEKRET", code=1)
    assert "SEKRET" not in told


def test_the_query_of_a_web_address_is_no_pattern(millrace: Any) -> None:
    with WebServer() as web:
        web.put("/x.bin", b"z" * 1000)
        url = f"{web.url}/x.bin?version=3"
        assert millrace("load", url).startswith("1 objects")
        assert millrace("pin", url) == "pinned\n"
        assert millrace("ls", url) == f"{url}\n"
        assert millrace("unpin", url) == "unpinned\n"
        assert "quota" in millrace("limit", url, "--quota", "1GB")
        assert "1 objects" in millrace("free", url)
        assert "is a pattern" in millrace("pin", f"{web.url}/*.bin", code=1)


def test_the_doctor_looks_for_the_object_itself(millrace: Any) -> None:
    with WebServer() as web:
        web.put("/x.bin", b"z" * 1000)
        assert "an object of 1000 bytes" in millrace("doctor", f"{web.url}/x.bin")
        millrace("doctor", f"{web.url}/missing.bin", code=1)


def test_a_whole_storage_is_not_pinned(millrace: Any) -> None:
    assert "names no object" in millrace("pin", "s3://", code=1)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("millrace::s3://bucket/x", "leave 'millrace::' out"),
        ("s3:/bucket/x", "did you mean s3://"),
        ("S3://bucket/x", "in lower case"),
        ("s3://bucket:80/x", "has a ':' in it"),
    ],
)
def test_a_url_that_is_nearly_right_is_explained(millrace: Any, url: str, told: str) -> None:
    said = millrace("load", url, code=1)
    assert told in said
    assert "password" not in said


@pytest.mark.parametrize("command", [[], ["node"], ["checkpoints"]], ids=str)
def test_a_group_alone_prints_its_help(millrace: Any, command: list[str]) -> None:
    assert "\nCommands:\n" in millrace(*command, code=2)


def test_what_is_a_bucket_elsewhere_is_a_container_on_azure() -> None:
    origin = open_origin("az", {"account_name": "a", "anon": True})
    with pytest.raises(ConfigurationError, match="without a container"):
        origin.head("")
    error = translate(PermissionError("no"), "az://c/x", origin.identity)
    assert error is not None
    assert "container" in error.next_step


def test_an_address_where_nobody_listens_is_told_at_once(millrace: Any) -> None:
    told = millrace("doctor", "gs://bucket/x", "--endpoint-url", "http://127.0.0.1:9", code=1)
    assert "http://127.0.0.1:9 cannot be reached" in told


def test_an_account_that_is_not_named_is_asked_for(millrace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    assert "no Azure account is named" in millrace("load", "az://container/x", code=1)
    assert "together" in millrace("load", "az://container/x", "gs://bucket/x", code=1)


@pytest.mark.parametrize("protocol", ["memory", "ftp", "dir", "https", "hf", "gs"])
def test_what_is_cached_has_a_url_that_names_it(protocol: str, tmp_path: Path) -> None:
    options = {"ftp": {"host": "h"}, "dir": {"path": str(tmp_path), "target_protocol": "file"}}.get(protocol)
    fs = filesystem(protocol, options)
    assert fs.key_of(url_of(fs.origin_identity, "host/a/b")) == "host/a/b"


def test_no_read_of_a_missing_web_address_shows_its_query(tmp_path: Path) -> None:
    fs = filesystem("http")
    with WebServer() as web:
        url = f"{web.url}/n?sig=SEKRET*"
        for read in (fs.info, fs.ls, fs.cat, fs.expand_path, lambda url: fs.get(url, str(tmp_path / "copy"))):
            with pytest.raises(ObjectNotFoundError) as caught:
                read(url)
            assert "SEKRET" not in f"{caught.value}{caught.value!r}"


@pytest.mark.parametrize("endpoint", ["http://no-such-host.invalid:9", "no-such-host.invalid", "http://h:port"])
@pytest.mark.parametrize("command", [["load", "s3://b/x"], ["checkpoints", "ls", "s3://b/runs"]])
def test_an_endpoint_whose_name_nobody_has_is_not_asked(
    millrace: Any, monkeypatch: pytest.MonkeyPatch, command: list[str], endpoint: str
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    text = millrace(*command, "--endpoint-url", endpoint, code=1)
    assert f"no server has the name in --endpoint-url {endpoint} (" in text
    assert text.count("\n") == 1
