"""`millrace load`, `ls`, `pin`, `unpin`, `free`, `limit`, `resize` and `status`, over local files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import pytest

from millrace.cache.node import close_nodes
from millrace.cli import main
from millrace.cli.common import time_text
from millrace.cli.load import progress_text
from millrace.figures import size_text
from millrace.filesystem.loading import LoadProgress


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, nbytes in {"train/a.bin": 2_000_000, "train/b.bin": 1000, "val/c.bin": 10}.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(nbytes))
    monkeypatch.setenv("MILLRACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MILLRACE_MIN_FREE", "0")
    return tmp_path / "data"


@pytest.fixture
def millrace(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object, code: int = 0) -> Any:
        actual = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert actual == code, captured.err
        if code:
            assert captured.out == ""
            assert captured.err.startswith("millrace: ")
            return captured.err
        return json.loads(captured.out) if "--json" in arguments else captured.out

    return run


def test_load_and_ls(millrace: Any, data: Path) -> None:
    text = millrace("load", data / "train")
    assert text.startswith("2 objects, 2.00 MB, are in the cache: 2.00 MB fetched in ")
    assert text.endswith("0 B were there\n")
    again = millrace("load", data, "--verify", "--json")
    assert (again["done_objects"], again["fetched_bytes"], again["bad_blocks"]) == (3, 10, 0)
    assert "every block was checked: none had to be" in millrace("load", data, "--verify")
    assert millrace("ls") == "".join(f"file://{data}/{name}\n" for name in ("train/a.bin", "train/b.bin", "val/c.bin"))
    assert millrace("ls", data / "val") == f"file://{data}/val/c.bin\n"
    assert millrace("ls", data / "v") == ""
    (row,) = millrace("ls", f"file://{data}/train/a.bin", "--json")
    assert (row["size"], row["cached_bytes"], row["complete"], row["pinned"]) == (2_000_000, 2_000_000, True, False)
    assert millrace("ls", data / "nothing", "--json") == []
    assert " 2.00 MB   all  -  " in millrace("ls", "-l")


def test_nothing_there_and_too_much_is_said(millrace: Any, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    millrace("load", data)
    for arguments in (["ls", f"{data}/nonsense"], ["ls", "gs://x/y"], ["ls", "-l", "gs://x/y"]):
        assert main(arguments) == 0
        assert capsys.readouterr().err == f"millrace: nothing of {arguments[-1]} is in the cache\n"
    assert main(["ls", "--json", "gs://x/y"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["resize", "900TB"]) == 0
    told = capsys.readouterr()
    assert "of 900 TB" in told.out
    assert "lies on a disk of " in told.err
    assert told.err.count("\n") == 1
    assert main(["resize", "3GB"]) == 0
    assert capsys.readouterr().err == ""


def test_pins(millrace: Any, data: Path) -> None:
    millrace("load", data)
    assert millrace("pin", data / "train", "--json") == {"pinned": [f"file://{data}/train"], "origin": "file"}
    assert "pinned" in millrace("ls", "--long", data / "train/a.bin")
    assert "1 objects" in millrace("free", "--all", "--yes")
    assert millrace("free", data / "train") == "2 pinned objects stay: 'millrace unpin' them first\n"
    assert "a prefix above it has" in millrace("unpin", data / "train/a.bin", code=1)
    millrace("unpin", data)
    assert "has no pin of its own" in millrace("unpin", data, code=1)
    assert millrace("free", data, "--json") == {"objects": 2, "freed_bytes": 2_001_000, "pinned_objects": 0}
    assert millrace("free", data) == "nothing of that is in the cache\n"


def test_limits_and_sizes_are_shown(millrace: Any, data: Path) -> None:
    millrace("load", data)
    assert millrace("limit", data / "train", "--quota", "10GB", "--ttl", "1d") == "quota 10GB, time to live 1d\n"
    assert "2.00 MB of 3.00 GB" in millrace("resize", "3GB")
    text = millrace("status")
    assert "2.00 MB of 3.00 GB (0%, set by resize)" in text
    assert f"file://{data}/train: 2.00 MB of its quota of 10.0 GB, gone after 1 d without use" in text
    status = millrace("status", "--json")
    assert status["disks"][0]["resized"] is True
    assert [(rule["prefix"], rule["objects"]) for rule in status["rules"]] == [(f"{data}/train", 2)]
    assert status["hit_ratio"] == 0
    millrace("limit", data / "train", "--none")
    millrace("pin", data / "train")
    assert "2.00 MB of 1.00 MB, 1.00 MB too much" in millrace("resize", "1MB")  # what is pinned stays
    millrace("unpin", data / "train")
    millrace("resize", "--default")
    status = millrace("status", "--json")
    assert (status["rules"], status["disks"][0]["resized"]) == ([], False)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["load"], 2, "URL"),
        (["load", "/nowhere"], 1, "/nowhere does not exist, neither as an object nor as a prefix: check the name"),
        (["load", "nope://x"], 1, "no origin serves 'nope'"),
        (["load", ""], 1, "a URL is empty"),
        (["pin", ""], 1, "a URL is empty"),
        (["load", "s3://b/\udcff"], 1, "no valid object name"),
        (["load", "/x", "--cache-dir", "/y\udcff"], 1, "is no directory"),
        (["load", "s3://b/x", "/y"], 1, "URLs of file and s3 together"),
        (["pin", "/x/*"], 1, "is a pattern"),
        (["free"], 2, "free takes URLs, or --all"),
        (["free", "/x", "--all"], 2, "free takes URLs, or --all"),
        (["limit", "/x"], 2, "--none"),
        (["limit", "/x", "--quota", "much"], 1, "quota='much' is no size"),
        (["limit", "/x", "--ttl", "long"], 1, "ttl='long' is no time"),
        (["resize"], 2, "a size, or --default"),
        (["resize", "big"], 1, "size='big' is no size"),
        (["ls"], 1, "no cache in "),
        (["free", "/x"], 1, "no cache in "),
    ],
)
def test_bad_input_is_one_line(millrace: Any, arguments: list[str], code: int, words: str) -> None:
    text = millrace(*arguments, code=code)
    assert words in text
    assert text.count("\n") == 1


def test_free_all_asks(millrace: Any, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    millrace("load", data)
    assert "nobody to ask" in millrace("free", "--all", code=2)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(click, "confirm", lambda *_, **__: False)
    assert millrace("free", "--all") == "nothing was dropped\n"
    monkeypatch.setattr(click, "confirm", lambda *_, **__: True)
    assert "3 objects" in millrace("free", "--all")


def test_a_damaged_rules_file_is_said(millrace: Any, tmp_path: Path, data: Path) -> None:
    millrace("pin", data)
    (path,) = (tmp_path / "cache").rglob("rules.json")
    path.write_bytes(b"{")
    assert "rules.json cannot be read" in millrace("pin", data / "x", code=1)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (26_132, "26.1 kB"), (999_600, "1.00 MB"), (2.5e15, "2500 TB")],
)
def test_sizes(nbytes: float, text: str) -> None:
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (125, "2:05"), (3725, "1:02:05"), (86400, "1 d"), (90000, "25:00:00")],
)
def test_times(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_progress_is_a_line() -> None:
    state = LoadProgress(objects=40, nbytes=4_000_000_000, done_objects=10, done_bytes=10**9, bytes_per_second=1e8)
    assert progress_text(LoadProgress()) == "looking up what to load"
    assert progress_text(state) == "10 of 40+ objects, 1.00 GB of 4.00 GB+, 100 MB/s"
    state = LoadProgress(
        objects=40, nbytes=4 * 10**9, done_objects=10, done_bytes=10**9, bytes_per_second=1e8, listed=True
    )
    assert progress_text(state) == "25%, 10 of 40 objects, 1.00 GB of 4.00 GB, 100 MB/s, 30 s left"


def test_a_cache_that_cannot_be_opened_is_no_empty_one(millrace: Any, tmp_path: Path, data: Path) -> None:
    millrace("load", data)
    locks = tmp_path / "cache" / "millrace" / "local" / "locks"
    close_nodes()
    locks.unlink()
    locks.mkdir()
    for command in (["status"], ["ls"], ["free", str(data)]):
        assert "no cache directory can be used" in millrace(*command, code=1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_cache_of_another_user_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    assert main(["load", str(data)]) == 0
    for command in ("status", "doctor"):
        main([command])  # imports what it needs while it may
    capsys.readouterr()
    close_nodes()
    tmp_path.chmod(0o700)
    os.seteuid(65534)
    try:
        codes = [main([command]) for command in ("status", "ls", "doctor")]
    finally:
        os.seteuid(0)
    captured = capsys.readouterr()
    assert codes == [1, 1, 1]
    assert captured.err.count("Permission denied: check the disk and its permissions\n") == 2
    assert captured.err.count("\n") == 2
    assert "failed  cache directory" in captured.out
