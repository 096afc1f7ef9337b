"""Passwords in URLs, and names of objects that would do something to a terminal or a log."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import fsspec
import pytest

import millrace
from millrace.errors import MissingError, ObjectNotFoundError, UsageError
from millrace.origin import origin_for_url, split_url
from millrace.origin.schemes import refuse_password


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:hush@bucket/key",
        "s3a://user:hush@bucket/key",
        "s3://AKID:hu/sh@bucket/key",
        "gs://user:hush@bucket/key",
        "az://user:hush@container/key",
        "az://user:hu/sh@container/key",
        "abfss://user:hush@account.dfs.core.windows.net/key",
        "http://user:hush@host/file",
        "https://user:hush@host:8443/file?a=b",
        "hf://user:hush@datasets/owner/name/file",
        "sftp://user:hush@host/file",
        "ftp://user:hush@host/file",
        "webhdfs://user:hush@host:50070/file",
    ],
)
def test_password_in_url_is_refused_and_not_shown(url: str) -> None:
    scheme, _, key = url.partition("://")
    for call in (lambda: split_url(url), lambda: origin_for_url(url), lambda: refuse_password(scheme, key)):
        with pytest.raises(UsageError) as caught:
            call()
        assert "hu" not in str(caught.value).replace("hub", "")
        assert "user:" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/user:name@host/key",
        "s3://arn:aws:s3:eu-central-1:123456789012:accesspoint/mine/key",
        "abfs://container@account.dfs.core.windows.net/key:1",
        "abfs://container@localhost:10000/key",
        "hf://datasets/owner/name@main/a:b@c",
        "hf://gpt2@main/config.json",
        "file:///data/user:name@host/key",
        "/data/user:name@host/key",
        "sftp://user@host/file",
        "memory://a:b/c@d",
    ],
)
def test_other_colons_and_at_signs_are_part_of_names(url: str) -> None:
    split_url(url)


@pytest.mark.parametrize("path", ["s3://user:hush@bucket/key", "user:hush@bucket/key", "/user:hush@bucket/key"])
def test_file_system_refuses_password_with_and_without_scheme(path: str, tmp_path: Path) -> None:
    """Ray removes the scheme before its calls."""
    fs = millrace.filesystem(
        "s3", cache_dir=str(tmp_path), target_options={"anon": True, "endpoint_url": "http://127.0.0.1:9"}
    )
    for call in (fs.open, fs.info, fs.cat_file, fs.ls, fs.open_input_file, lambda name: fs.pipe_file(name, b"")):
        with pytest.raises(UsageError, match="user name and a password") as caught:
            call(path)
        assert "hush" not in f"{caught.value}{caught.value!r}{caught.value.__cause__!r}{caught.value.__context__!r}"


def test_chained_url_with_password_is_refused(tmp_path: Path) -> None:
    url = "millrace::s3://user:hush@bucket/key"
    with pytest.raises(UsageError, match="user name and a password") as caught:
        fsspec.open(url, millrace={"cache_dir": str(tmp_path)}, s3={"anon": True}).open()
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["\x1b]0;owned\x07", "\x1b[2J", "a\rb", "a\u202egpj.exe", "a\x9bb", "\ud800", "a\u200bb", "\x00"]
)
def test_message_with_control_characters_escapes_them(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Users with write access to a bucket choose names that others read in their logs."""
    error = ObjectNotFoundError(f"s3://bucket/{name} does not exist", next_step="check the name")
    for shown in (str(error), str(pickle.loads(pickle.dumps(error)))):
        assert shown.isprintable()
        assert "bucket" in shown
    logging.getLogger("millrace").warning("%s", error)
    assert "\x1b" not in caplog.text


def test_printable_name_is_shown_unchanged() -> None:
    assert str(MissingError("s3://b/é 本 ü😀\\x", next_step="look")) == "s3://b/é 本 ü😀\\x: look"


def test_different_names_are_shown_differently() -> None:
    texts = {str(ObjectNotFoundError(f"s3://b/{name}")) for name in ("a\x1bb", "ab", "a\u202eb", "a\x9bb")}
    assert len(texts) == 4
