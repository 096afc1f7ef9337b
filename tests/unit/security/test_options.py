"""A secret in any option of any storage is in no text that others read: `to_json`, `repr`, errors, events, logs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fsspec.spec import AbstractFileSystem
from tests.support.planted import Planted

import millrace
from millrace.errors import MillraceError
from millrace.filesystem import MillraceFileSystem
from millrace.origin import open_origin
from millrace.origin.hub.options import HUB_OPTIONS
from millrace.origin.limits import retrying
from millrace.origin.options.azure import AZURE_OPTIONS
from millrace.origin.options.gcs import GCS_OPTIONS
from millrace.origin.options.public import without_secrets
from millrace.origin.options.s3 import S3_CLIENT_KWARGS, S3_OPTIONS
from millrace.origin.web.options import CLIENT_KWARGS, WEB_OPTIONS

NOWHERE = "http://127.0.0.1:1"
MARK = "mArKeDsEcReT0123456789"


@pytest.fixture
def planted() -> Iterator[Planted]:
    planted = Planted()
    planted.known("the mark", MARK)
    with planted.watching():
        yield planted


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "PATIENCE", retrying.Patience(seconds=0.5, tries=2))


# By protocol: options with a secret in each place that can have one.
SECRETS: Mapping[str, list[dict[str, Any]]] = {
    "s3": [
        {"key": MARK, "secret": MARK, "token": MARK, "endpoint_url": NOWHERE},
        {"client_kwargs": {"aws_access_key_id": MARK, "aws_secret_access_key": MARK, "aws_session_token": MARK}},
        {"endpoint_url": f"http://user:{MARK}@127.0.0.1:1"},
        {"endpoint_url": f"{NOWHERE}?X-Amz-Signature={MARK}"},
    ],
    "az": [
        {"account_name": "acct", "account_key": f"{MARK}==", "account_host": NOWHERE},
        {"account_name": "acct", "sas_token": f"sv=1&sig={MARK}", "account_host": NOWHERE},
        {"account_name": "acct", "credential": f"sv=1&sig={MARK}", "account_host": NOWHERE},
        {"account_name": "acct", "tenant_id": "t", "client_id": "c", "client_secret": MARK, "account_host": NOWHERE},
        {"connection_string": f"AccountName=acct;AccountKey={MARK}==;BlobEndpoint={NOWHERE}"},
        {"connection_string": f"AccountName=acct;SharedAccessSignature=sig={MARK};BlobEndpoint={NOWHERE}"},
        {"account_name": "acct", "account_host": f"https://{MARK}@127.0.0.1:1"},
        {"account_name": "acct", "account_host": f"{NOWHERE}?sig={MARK}"},
    ],
    "gs": [
        {"token": f"ya29.{MARK}", "endpoint_url": NOWHERE},
        {"token": {"type": "service_account", "private_key": MARK, "client_email": "x"}, "endpoint_url": NOWHERE},
        {"endpoint_url": f"http://u:{MARK}@127.0.0.1:1"},
    ],
    "hf": [{"token": f"hf_{MARK}", "endpoint": NOWHERE}, {"endpoint": f"http://u:{MARK}@127.0.0.1:1"}],
    "http": [
        {"headers": {"Authorization": f"Bearer {MARK}"}},
        {"client_kwargs": {"headers": {"X-Key": MARK}, "cookies": {"session": MARK}, "auth": ("user", MARK)}},
        {"cookies": {"session": MARK}},
        {"auth": ("user", MARK)},
    ],
    "ftp": [
        {"host": "127.0.0.1", "port": 1, "username": "u", "password": MARK},
        {"host": "127.0.0.1", "port": 1, "acct": MARK, "encoding": MARK, "unknown_option": MARK},
    ],
    "reference": [
        {
            "fo": {"a": MARK},
            "remote_protocol": "s3",
            "remote_options": {"secret": MARK},
            "target_options": {"key": MARK},
        },
    ],
}
CASES = [(protocol, number) for protocol, each in SECRETS.items() for number in range(len(each))]


def act(fs: MillraceFileSystem, planted: Planted) -> None:
    for what in (fs.cat_file, fs.ls, fs.info, lambda path: fs.load([fs.unstrip_protocol(path)])):
        try:
            what("127.0.0.1:1/key" if "http" in fs.protocol else "datasets/u/bucket/key")
        except (MillraceError, FileNotFoundError) as error:
            planted.saw_error(f"an error of {fs!r}", error)


@pytest.mark.parametrize(("protocol", "number"), CASES)
def test_secret_in_an_option_shows_nowhere(
    protocol: str, number: int, planted: Planted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = SECRETS[protocol][number]
    caplog.set_level(logging.DEBUG)
    planted.saw("without secrets", json.dumps(without_secrets(options)))
    try:
        origin = open_origin(protocol, options)
        fs = millrace.filesystem(
            protocol,
            options,
            cache_dir=str(tmp_path / "cache"),
            min_free=0,
            cluster_token=MARK,
            tls={"cert": "c.pem", "key": f"/{MARK}/k.pem", "ca": "a.pem"},
            members="none",
        )
    except MillraceError as error:
        planted.saw_error("the error of an option", error)
    else:
        planted.saw_object("the origin", origin)
        planted.saw("the identity", origin.identity)
        planted.saw_object("the file system", fs)
        planted.saw("fsid", fs.fsid)
        planted.saw("JSON", fs.to_json(include_password=False))
        planted.saw("dict", repr(fs.to_dict(include_password=False)))
        act(fs, planted)
    planted.saw("the log", caplog.text)
    assert planted.leaks() == []


@pytest.mark.parametrize(
    ("known", "names", "harmless"),
    [
        (S3_OPTIONS, {}, {"anon", "endpoint_url", "profile", "region", "use_ssl"}),
        (S3_CLIENT_KWARGS, {}, {"endpoint_url", "region_name"}),
        (AZURE_OPTIONS, {}, {"account_host", "account_name", "anon", "client_id", "tenant_id"}),
        (GCS_OPTIONS, {}, {"anon", "endpoint_url", "project"}),
        (HUB_OPTIONS, {}, {"endpoint"}),
        (WEB_OPTIONS, {}, {"ssl", "timeout", "verify"}),
        (CLIENT_KWARGS, {}, {"timeout", "trust_env"}),
    ],
)
def test_serialized_options_are_only_the_known_harmless_ones(
    known: tuple[str, ...], names: dict[str, Any], harmless: set[str]
) -> None:
    values: dict[str, Any] = {"anon": True, "use_ssl": True, "ssl": True, "timeout": 5, "trust_env": True}
    given = {name: values.get(name, "text") for name in known}
    assert set(without_secrets(given)) == harmless


def test_url_with_a_login_or_a_signature_is_left_out() -> None:
    options = {"fo": f"https://host/x?sig={MARK}", "endpoint_url": f"https://u:{MARK}@host", "host": f"u:{MARK}@host"}
    assert without_secrets({**options, "target_options": options, "region": "x"}) == {"region": "x"}


@pytest.mark.parametrize("by_position", [False, True])
def test_json_without_secrets_makes_the_same_file_system_with_credentials_of_the_environment(
    by_position: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"key": MARK, "secret": MARK, "endpoint_url": NOWHERE, "client_kwargs": {"region_name": "eu-west-1"}}
    common: dict[str, Any] = {"cache_dir": str(tmp_path), "min_free": 0, "cluster_token": MARK}
    fs = (
        MillraceFileSystem("s3", options, **common)
        if by_position
        else MillraceFileSystem(target_protocol="s3", target_options=options, **common)
    )
    text = fs.to_json(include_password=False)
    assert MARK not in text
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "word")
    monkeypatch.setenv("MILLRACE_CLUSTER_TOKEN", f"{MARK}\n")
    again = AbstractFileSystem.from_json(text)
    assert isinstance(again, MillraceFileSystem)
    assert again.fsid == fs.fsid
    assert again.target_options == {"endpoint_url": NOWHERE, "client_kwargs": {"region_name": "eu-west-1"}}
    assert again._options == fs._options


@pytest.mark.parametrize("options", [None, {}, {"key": MARK, "secret": MARK, "token": None}])
def test_json_with_secrets_makes_an_equal_file_system(options: dict[str, Any] | None, tmp_path: Path) -> None:
    fs = millrace.filesystem("s3", options, cache_dir=str(tmp_path), min_free=0)
    again = AbstractFileSystem.from_json(fs.to_json())
    assert isinstance(again, MillraceFileSystem)
    assert again.fsid == fs.fsid
    assert again._options == fs._options
    assert {k: v for k, v in again.target_options.items() if v} == {k: v for k, v in (options or {}).items() if v}
