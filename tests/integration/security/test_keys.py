"""Hostile names of objects over a real S3 server, and on the command line: an error or the object itself, never another."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import millrace
from millrace.cli import main
from millrace.errors import MillraceError, ObjectNotFoundError, UsageError
from millrace.origin import open_origin
from millrace.testing.s3 import S3Server

TAKEN = [
    " ",
    "a b",
    "a%2Fb",
    "a%2f..%2fx",
    "%2e%2e/x",
    "%00",
    "é",
    "e\u0301",
    "ﬀ",
    "a?b",
    "a#b",
    "a+b",
    "a&b=c",
    "[a]",
    "a:b@c",
    "~x",
    "'\"<>;|`$(x)",
    "\u202egpj.exe",
    "\u2028x",
    "\U0001f600",
    "...",
    "..a",
    "a..",
    "FORMAT",
    "index/index.mdb",
    "local.node/node.json",
    "/".join(["k" * 200] * 4),
]
"""Odd, and objects like any other."""

REFUSED = [
    "..",
    "../x",
    "a/../x",
    "a/..",
    ".",
    "./x",
    "a/./x",
    "a//x",
    "a\x00b",
    "a\nb",
    "a\rb",
    "a\x1b[2Jb",
    "a\x7fb",
    "\ud800",
    "/".join(["k" * 200] * 6),
    "é" * 600,
]
"""No names of objects; `..` above all: a proxy or a server that resolves it would answer with another object."""


def test_odd_name_names_a_separate_object(fs: millrace.MillraceFileSystem, s3: S3Server, bucket: str) -> None:
    contents = {f"{bucket}/t/{name}": os.urandom(50) for name in TAKEN}
    for path, data in contents.items():
        fs.pipe_file(path, data)
    for _ in range(2):  # fetched, and then from the disk
        for path, data in contents.items():
            assert fs.cat_file(path) == data, path
            assert fs.cat_file(f"s3://{path}") == data
            assert fs.info(path)["name"] == path
    assert set(fs.find(f"{bucket}/t")) == set(contents)
    origin = open_origin("s3", s3.target_options)
    for path, data in contents.items():  # and not only by our own lights
        assert bytes(origin.read(path, 0, 50)) == data


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_name_is_refused_without_a_request(name: str, fs: millrace.MillraceFileSystem, bucket: str) -> None:
    fs.pipe_file(f"{bucket}/x", b"precious")
    fs.pipe_file(f"{bucket}/t/x", b"precious, too")
    calls: list[Callable[[str], object]] = [
        fs.cat_file,
        fs.open,
        fs.open_input_file,
        lambda path: fs.pipe_file(path, b"other"),
        lambda path: fs.open(path, "wb").close(),
        lambda path: fs.cp_file(f"{bucket}/x", path),
        lambda path: fs.mv(f"{bucket}/x", path),
        fs.rm_file,
    ]
    for call in calls:
        with pytest.raises((ObjectNotFoundError, UsageError)) as caught:
            call(f"{bucket}/t/{name}")
        assert str(caught.value).isprintable()
    assert not fs.exists(f"{bucket}/t/{name}")
    assert {path: fs.cat_file(path) for path in fs.find(bucket)} == {
        f"{bucket}/x": b"precious",
        f"{bucket}/t/x": b"precious, too",
    }


def test_dots_do_not_lead_out_of_a_bucket(fs: millrace.MillraceFileSystem, s3: S3Server, bucket: str) -> None:
    other = f"{bucket[:50]}-other"
    s3.create_bucket(other)
    fs.pipe_file(f"{other}/secret", b"of another")
    for path in (
        f"{bucket}/../{other}/secret",
        f"{bucket}/a/../../{other}/secret",
        f"../{other}/secret",
        f"{bucket}/%2e%2e/{other}/secret",
    ):
        with pytest.raises(MillraceError):
            fs.cat_file(path)


# --- the command line ---------------------------------------------------------------------------------


NAMES = ["../x", "a\x1b[2Jb", "\x1b]0;owned\x07", "a\nb", "\udcff", "k" * 5000, "\u202ex", "a\u0085b"]


@pytest.mark.parametrize("command", ["load", "ls", "pin", "free", "limit"])
def test_command_with_any_name_does_not_crash(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_CACHE_DIR", str(tmp_path / "cache"))
    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0)
    (tmp_path / "x").write_bytes(b"x")
    fs.cat_file(str(tmp_path / "x"))
    more = ["--quota", "1GB"] if command == "limit" else []
    assert {main([command, f"{tmp_path}/data/{name}", *more]) for name in NAMES} <= {0, 1}
    assert main(["status"]) == 0  # which lists pins and limits
    shown = capsys.readouterr()
    assert "unexpected" not in shown.err  # what MILLRACE_DEBUG would explain: a defect
    for text in (shown.out, shown.err):
        assert "".join(text.split("\n")).isprintable()


def test_listing_of_control_characters_escapes_them(
    fs: millrace.MillraceFileSystem,
    bucket: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Writers of a bucket choose the names that others list."""
    for name in ("a\u202eb", "\u2066x", "plain"):
        fs.pipe_file(f"{bucket}/{name}", b"x")
        assert fs.cat_file(f"{bucket}/{name}") == b"x"
    for arguments in (["ls"], ["ls", "--long"]):
        assert main([*arguments, "--cache-dir", str(tmp_path / "cache")]) == 0
        shown = capsys.readouterr().out
        assert "".join(shown.split("\n")).isprintable()
        assert f"s3://{bucket}/a\\u202eb" in shown
        assert f"s3://{bucket}/plain" in shown
