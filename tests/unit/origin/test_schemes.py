"""The origin of each scheme, and the options in a URL."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from millrace.errors import ConfigurationError, MissingDependencyError, UsageError
from millrace.origin import SCHEMES, Origin, open_origin, options_for, origin_for_url, service_of
from millrace.origin.addresses import locate, require_same_place

ACCOUNT = {"account_name": "account"}


@pytest.mark.parametrize("scheme", [*SCHEMES, "memory", "ftp"])
def test_open_origin_of_each_scheme_sends_no_request(scheme: str) -> None:
    options: dict[str, Any] = {"az": ACCOUNT, "fsspec": {"host": "nowhere.invalid"}}
    kind = SCHEMES.get(scheme, scheme)
    origin = open_origin(scheme, options["fsspec"] if kind == "ftp" else options.get(kind))
    assert isinstance(origin, Origin)
    assert origin.identity.partition("+")[0].removeprefix("fsspec-") == kind
    assert origin.head_is_local == (kind in ("file", "memory"))
    assert not origin.is_immutable("bucket/key")


@pytest.mark.parametrize(
    ("scheme", "aliases"), [("s3a", {"s3", "s3a"}), ("abfss", {"az", "abfs", "abfss"}), ("ssh", {"sftp", "ssh"})]
)
def test_scheme_aliases_name_one_service(scheme: str, aliases: set[str]) -> None:
    assert set(service_of(scheme).aliases) == aliases
    assert {service_of(alias) for alias in aliases} == {service_of(scheme)}


@pytest.mark.parametrize("scheme", ["nope", "", "millrace", "simplecache", "filecache", "blockcache", "cached"])
def test_unknown_scheme_or_cache_is_an_error(scheme: str) -> None:
    with pytest.raises(ConfigurationError, match="no origin serves"):
        open_origin(scheme)


@pytest.mark.parametrize(("text", "shown"), [("s3://bucket?secret", "s3://..."), ("s3:", "s3:"), (" s3", " s3")])
def test_scheme_with_more_than_its_name_is_an_error_with_the_name(text: str, shown: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        open_origin(text)
    assert str(raised.value) == f"{shown!r} is not a scheme: write 's3'"


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.registry import known_implementations

    entry = {"class": "no_such_library_here.FileSystem", "err": "Install no-such-library to use it"}
    monkeypatch.setitem(known_implementations, "absent-example", entry)
    with pytest.raises(MissingDependencyError, match="Install no-such-library"):
        open_origin("absent-example")


@pytest.fixture
def registered() -> Iterator[str]:
    class Own(MemoryFileSystem):  # type: ignore[misc]
        protocol = "own-example"

    fsspec.register_implementation("own-example", Own)
    yield "own-example"
    importlib.import_module("fsspec.registry")._registry.pop("own-example")


def test_registered_fsspec_protocol_is_served(registered: str) -> None:
    origin = open_origin(registered)
    origin.put("some/key", b"data")
    assert bytes(origin.read("some/key", 0, 4)) == b"data"
    origin.delete(["some/key"])


@pytest.mark.parametrize(
    ("url", "key", "options"),
    [
        ("s3://bucket/a@b/c", "bucket/a@b/c", {}),
        ("hf://datasets/u/r@main/x", "datasets/u/r@main/x", {}),
        ("https://host/x?a=1", "host/x?a=1", {}),
        ("abfs://c/p", "c/p", {}),
        ("abfss://c@account.dfs.core.windows.net/p/q", "c/p/q", ACCOUNT),
        ("az://c@account.blob.core.windows.net", "c", ACCOUNT),
        ("memory://a/b", "a/b", {}),
        ("ftp://host:2121/a/b", "a/b", {"host": "host", "port": 2121}),
    ],
)
def test_url_contains_the_key_and_sometimes_the_storage(url: str, key: str, options: dict[str, Any]) -> None:
    scheme, _, rest = url.partition("://")
    assert locate(scheme, rest) == (key, options)


def test_options_that_contradict_the_url_raise() -> None:
    url = "abfs://c@account.dfs.core.windows.net/p"
    for options in (None, ACCOUNT, {"account_key": "a2V5"}):
        origin, key = origin_for_url(url, options)
        assert (origin.identity, key) == ("az+https://account.blob.core.windows.net", "c/p")
    with pytest.raises(UsageError, match="another storage"):
        origin_for_url(url, {"account_name": "other"})
    with pytest.raises(UsageError, match="another storage"):
        origin_for_url("ftp://host/x", {"host": "other"})
    emulator = "az+http://127.0.0.1:10000/account"
    require_same_place(ACCOUNT, {}, emulator)
    with pytest.raises(UsageError):
        require_same_place({"account_name": "account2"}, {}, emulator)


def test_endpoint_of_a_command_uses_the_option_of_each_scheme() -> None:
    assert options_for("s3://b/k") is None
    assert options_for("s3a://b/k", "http://h") == {"endpoint_url": "http://h"}
    assert options_for("gcs://b/k", "http://h") == {"endpoint_url": "http://h"}
    assert options_for("hf://u/r", "http://h") == {"endpoint": "http://h"}
    assert options_for("abfs://c@account.dfs.core.windows.net/p", "http://h") == {**ACCOUNT, "account_host": "http://h"}
    assert options_for("file:///x", "http://h") is options_for("/x", "http://h") is None
    with pytest.raises(UsageError, match="no endpoint"):
        options_for("https://host/x", "http://h")
