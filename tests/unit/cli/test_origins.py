"""Commands with storages of every kind: loads, lists, messages, and the requested address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.hub_server import HubServer
from tests.support.web_server import WebServer

from millrace.cache.eviction.usage import url_of
from millrace.cli import common, main
from millrace.errors import ConfigurationError, ObjectNotFoundError
from millrace.filesystem import filesystem
from millrace.origin import open_origin
from millrace.origin.translation import translate


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


def test_commands_with_hub_data_set_load_list_and_pin_it(
    millrace: Any, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = "hf://datasets/user/set/a"
    assert millrace("load", root, "--endpoint-url", hub.url).startswith("2 objects, 100 kB, are in the cache: 100 kB")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    assert ": 0 B fetched" in millrace("load", root)
    assert millrace("ls", "hf://datasets/user/set") == f"{root}/x.bin\n{root}/y.bin\n"
    assert millrace("pin", root) == f"pinned {root}\n"
    assert f"{root}: objects and folders directly below: 2" in millrace("doctor", root)


def test_commands_with_web_server_load_list_and_check_it(millrace: Any) -> None:
    with WebServer() as web:
        web.put("/d/x.bin", b"z" * 1000)
        assert millrace("load", f"{web.url}/d/").startswith("1 object, 1.00 kB")
        assert millrace("ls", f"{web.url}/d") == f"{web.url}/d/x.bin\n"
        assert "objects and folders directly below: 1" in millrace("doctor", f"{web.url}/d/")
        assert "has no endpoint" in millrace("load", f"{web.url}/d/", "--endpoint-url", "http://127.0.0.1:9", code=1)


@pytest.mark.parametrize(
    "command",
    [["load"], ["doctor"], ["checkpoints", "ls"], ["unpin"], ["pin", "--endpoint-url", "http://127.0.0.1:9"]],
    ids=" ".join,
)
def test_command_with_missing_web_address_hides_its_query(millrace: Any, command: list[str]) -> None:
    with WebServer() as web:
        web.put("/there", b"z")
        millrace("load", f"{web.url}/there")  # some commands need a cache
        output = millrace(*command, f"{web.url}/n?sig=SEKRET", code=1)
    assert "SEKRET" not in output


def test_command_with_query_in_web_address_does_not_treat_it_as_a_pattern(millrace: Any) -> None:
    with WebServer() as web:
        web.put("/x.bin", b"z" * 1000)
        url = f"{web.url}/x.bin?version=3"
        assert millrace("load", url).startswith("1 object,")
        shown = f"{web.url}/x.bin?..."
        assert millrace("pin", url) == f"pinned {shown}\n"
        assert millrace("ls", url) == f"{url}\n"
        assert millrace("unpin", url) == f"unpinned {shown}\n"
        assert "quota" in millrace("limit", url, "--quota", "1GB")
        assert ", 1 object\n" in millrace("free", url)
        assert "is a pattern" in millrace("pin", f"{web.url}/*.bin", code=1)


def test_doctor_with_object_url_checks_that_object(millrace: Any) -> None:
    with WebServer() as web:
        web.put("/x.bin", b"z" * 1000)
        assert "an object of 1000 bytes" in millrace("doctor", f"{web.url}/x.bin")
        millrace("doctor", f"{web.url}/missing.bin", code=1)


def test_pin_of_a_whole_storage_is_refused(millrace: Any) -> None:
    assert "names no object" in millrace("pin", "s3://", code=1)


@pytest.mark.parametrize(
    ("url", "correction"),
    [
        ("millrace::s3://bucket/x", "leave 'millrace::' out"),
        ("s3:/bucket/x", "did you mean s3://"),
        ("S3:/bucket/x", "did you mean S3://"),
        ("bucket/x", "write s3://bucket/x, or ./bucket/x"),
        ("s3://bucket:80/x", "has a ':' in it"),
    ],
)
def test_load_of_misspelt_url_prints_the_correction(millrace: Any, url: str, correction: str) -> None:
    output = millrace("load", url, code=1)
    assert correction in output
    assert "password" not in output


@pytest.mark.parametrize(
    ("command", "heading"), [([], "Checkpoints:"), (["node"], "Commands:"), (["checkpoints"], "Commands:")], ids=str
)
def test_command_group_without_command_prints_its_help(millrace: Any, command: list[str], heading: str) -> None:
    assert f"\n{heading}\n" in millrace(*command, code=2)


def test_error_of_azure_names_a_container_instead_of_a_bucket() -> None:
    origin = open_origin("az", {"account_name": "a", "anon": True})
    with pytest.raises(ConfigurationError, match="without a container"):
        origin.head("")
    error = translate(PermissionError("no"), "az://c/x", origin.identity)
    assert error is not None
    assert "container" in error.next_step


def test_doctor_with_unreachable_endpoint_names_it(millrace: Any) -> None:
    output = millrace("doctor", "gs://bucket/x", "--endpoint-url", "http://127.0.0.1:9", code=1)
    assert "http://127.0.0.1:9 cannot be reached" in output


def test_load_from_azure_without_account_is_refused(millrace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    assert "no Azure account is named" in millrace("load", "az://container/x", code=1)
    assert "the URLs belong to" in millrace("load", "az://container/x", "gs://bucket/x", code=1)


@pytest.mark.parametrize("protocol", ["memory", "ftp", "dir", "https", "hf", "gs"])
def test_url_of_a_cached_key_is_parsed_to_the_same_key(protocol: str, tmp_path: Path) -> None:
    options = {"ftp": {"host": "h"}, "dir": {"path": str(tmp_path), "target_protocol": "file"}}.get(protocol)
    fs = filesystem(protocol, options)
    assert fs.key_of(url_of(fs.origin_identity, "host/a/b")) == "host/a/b"


def test_read_of_missing_web_address_hides_its_query(tmp_path: Path) -> None:
    fs = filesystem("http")
    with WebServer() as web:
        url = f"{web.url}/n?sig=SEKRET*"
        for read in (fs.info, fs.ls, fs.cat, fs.expand_path, lambda url: fs.get(url, str(tmp_path / "copy"))):
            with pytest.raises(ObjectNotFoundError) as caught:
                read(url)
            assert "SEKRET" not in f"{caught.value}{caught.value!r}"


@pytest.mark.parametrize(
    ("endpoint", "problem"),
    [
        ("http://no-such-host.invalid:9", "the host name has no address ("),
        ("no-such-host.invalid", "the host name has no address ("),
        ("http://h:port", "not a web address (Port could not be cast to integer value as 'port'): correct"),
        ("http://h:99999", "not a web address (Port out of range 0-65535): correct"),
        ("http:/h:9", "not a web address: write http://host:port or https://host"),
        ("s3://bucket", "not a web address: write http://host:port or https://host"),
    ],
)
@pytest.mark.parametrize("command", [["load", "s3://b/x"], ["checkpoints", "ls", "s3://b/runs"]])
def test_command_with_unusable_endpoint_prints_one_line(
    millrace: Any, monkeypatch: pytest.MonkeyPatch, command: list[str], endpoint: str, problem: str
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    text = millrace(*command, "--endpoint-url", endpoint, code=1)
    assert f"--endpoint-url {endpoint}: {problem}" in text
    assert text.count("\n") == 1


def test_command_with_repeated_request_reports_it_once(
    millrace: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "_LINE_SECONDS", 0.0)
    with WebServer() as web:
        web.put("/d/x.bin", b"z" * 1000)
        for options, notes in ([], 1), (["--quiet"], 0):
            web.service.interfere(lambda request, reply: replace(reply, status=500), count=2)
            assert main([*options, "load", f"{web.url}/d/x.bin", "--verify"]) == 0
            err = capsys.readouterr().err
            assert err.count("/d/x.bin: a request failed, and is repeated for a while") == notes
            millrace("free", "--all", "--yes")


def test_ls_of_an_uncached_address_hides_its_query(millrace: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with WebServer() as web:
        web.put("/there", b"z")
        millrace("load", f"{web.url}/there?sig=SEKRET")
        assert main(["ls", f"{web.url}/n?sig=SEKRET"]) == 0
        shown = capsys.readouterr().err
    assert "nothing is in the cache" in shown
    assert "SEKRET" not in shown


@pytest.mark.parametrize("stream", ["stderr", "stdin"])
def test_command_with_closed_standard_stream_ends_without_a_defect(
    stream: str, tmp_path: Path, millrace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(b"x")
    millrace("load", f"{tmp_path}/x")
    monkeypatch.setattr(f"sys.{stream}", None)
    if stream == "stderr":
        assert main(["load", f"{tmp_path}/x"]) == 0
    else:
        assert main(["free", "--all"]) == 2
