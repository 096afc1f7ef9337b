"""`millrace load`, `ls`, `pin`, `unpin`, `free`, `limit`, `resize` and `status`, over local files."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import click
import pytest

from millrace.cache.node import close_nodes
from millrace.cli import main
from millrace.cli.common import duration_text, table, time_text
from millrace.cli.load import progress_text
from millrace.figures import size_text
from millrace.filesystem.loading import LoadProgress
from millrace.store.index import Index


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
        return _content(captured.out) if "--json" in arguments else captured.out

    return run


def _content(text: str) -> Any:
    """A JSON document, without its schema version, which every object has."""
    document = json.loads(text)
    for each in document if isinstance(document, list) else [document]:
        assert each.pop("schema_version") == 1
    return document


def test_load_and_ls_of_local_files_report_the_cached_objects(millrace: Any, data: Path) -> None:
    text = millrace("load", data / "train")
    assert re.match(r"2 objects, 2\.00 MB, are in the cache: 2\.00 MB fetched in (\d+ ms|\d\.\d s|\d\d s) \(", text)
    assert text.endswith("0 B were cached before\n")
    assert millrace("load", data / "train" / "a.bin").startswith("1 object, 2.00 MB, is in the cache: 0 B fetched in ")
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


def test_load_verify_after_damage_to_index_records_fetches_the_objects_again(
    millrace: Any, data: Path, tmp_path: Path
) -> None:
    millrace("load", data)
    close_nodes()
    index = Index(tmp_path / "cache" / "millrace" / "local" / "index")
    with index._env.begin(write=True) as txn:
        handle = index._env.open_db(b"objects", txn=txn)
        for key, record in list(txn.cursor(handle)):
            txn.put(key, record[:8] + b"\x03" + record[9:], db=handle)  # the size
    index.close()
    found = millrace("load", data, "--verify", "--json")
    assert (found["done_objects"], found["fetched_bytes"]) == (3, 2_001_010)
    again = millrace("load", data, "--verify", "--json")
    assert (again["fetched_bytes"], again["bad_blocks"]) == (0, 0)
    assert millrace("status", "--json")["counters"]["corrupt_records"] == 3


def test_ls_of_uncached_url_and_resize_beyond_the_disk_print_a_remark(
    millrace: Any, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    millrace("load", data)
    for arguments in (["ls", f"{data}/nonsense"], ["ls", "gs://x/y"], ["ls", "-l", "gs://x/y"]):
        assert main(arguments) == 0
        assert capsys.readouterr().err == f"millrace: {arguments[-1]}: nothing is in the cache\n"
    assert main(["ls", "--json", "gs://x/y"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["resize", "900TB"]) == 0
    reported = capsys.readouterr()
    assert "of 900 TB" in reported.out
    assert "is on a disk of " in reported.err
    assert reported.err.count("\n") == 1
    assert main(["status"]) == 0
    assert ", the disk has room for " in capsys.readouterr().out
    assert main(["resize", "3GB"]) == 0
    assert capsys.readouterr().err == ""


def test_pin_of_a_prefix_keeps_its_objects_until_unpinned(millrace: Any, data: Path) -> None:
    millrace("load", data)
    assert millrace("pin", data / "train", "--json") == {"pinned": [f"file://{data}/train"], "origin": "file"}
    header, row, total = millrace("ls", "--long", data / "train/a.bin").splitlines()
    assert header.split() == ["size", "here", "pin", "last", "use", "url"]
    assert (row.split()[3], total.split(",")[0]) == ("pinned", "1 object")
    assert ", 1 object\n" in millrace("free", "--all", "--yes")
    assert millrace("free", data / "train") == "2 pinned objects stay: 'millrace unpin' them first\n"
    assert "a prefix above it has" in millrace("unpin", data / "train/a.bin", code=1)
    millrace("unpin", data)
    assert "has no pin of its own" in millrace("unpin", data, code=1)
    assert millrace("free", data, "--json") == {"objects": 2, "freed_bytes": 2_001_000, "pinned_objects": 0}
    assert millrace("free", data) == "nothing to free is in the cache\n"


def test_tables_with_wide_and_combining_characters_are_aligned() -> None:
    names = ["name", "数据", "📦", "e\u0301te\u0301"]
    expected = ["name  n", "数据  1", "📦    2", "e\u0301te\u0301   3"]
    assert table(("name", "n"), [(name, number) for name, number in zip(names[1:], "123", strict=True)]) == expected


def test_status_after_limit_and_resize_shows_quota_and_capacity(millrace: Any, data: Path) -> None:
    millrace("load", data)
    assert millrace("limit", data / "val", "--quota", "5000000", "--ttl", "5") == (
        f"file://{data}/val: quota 5000000 B, time to live 5 s\n"
    )
    assert millrace("limit", data / "val", "--none") == f"file://{data}/val: quota none, time to live none\n"
    assert millrace("limit", data / "train", "--quota", "10GB", "--ttl", "1d") == (
        f"file://{data}/train: quota 10GB, time to live 1d\n"
    )
    assert "2.00 MB of 3.00 GB" in millrace("resize", "3GB")
    text = millrace("status")
    assert "2.00 MB of 3.00 GB (0%, set by resize)" in text
    assert f"file://{data}/train: 2.00 MB of its quota of 10.0 GB, removed after 1 d without use" in text
    status = millrace("status", "--json")
    assert status["disks"][0]["resized"] is True
    assert [(rule["prefix"], rule["objects"]) for rule in status["rules"]] == [(f"{data}/train", 2)]
    assert status["hit_ratio"] == 0
    millrace("limit", data / "train", "--none")
    millrace("pin", data / "train")
    assert "2.00 MB of 1.00 MB, 1.00 MB over the limit" in millrace("resize", "1MB")  # pinned objects stay
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
        (["load", "s3://b/\udcff"], 1, "not a valid object name"),
        (["load", "/x", "--cache-dir", "/y\udcff"], 1, "is not a directory"),
        (["load", "s3://b/x", "/y"], 1, "the URLs belong to file and s3"),
        (["pin", "/x/*"], 1, "is a pattern"),
        (["pin", "s3://bkt/../x"], 1, "is not a valid object name"),
        (["pin", "s3://bkt//x"], 1, "is not a valid object name"),
        (["pin", "/x/a\nb"], 1, "is not a valid object name"),
        (["limit", f"s3://bkt/{'x' * 5000}", "--quota", "1GB"], 1, "is not a valid object name: use a shorter name"),
        (["load", "s3://b k t/x"], 1, "s3://b k t is not the name of a bucket: check the name"),
        (["debug", "bundle", "-o", ""], 2, "--output names no file"),
        (["node", "drain", "x"], 1, "address of a node: 'x' is not an address"),
        (["free"], 2, "free takes URLs, or --all"),
        (["free", "/x", "--all"], 2, "free takes URLs, or --all"),
        (["limit", "/x"], 2, "--none"),
        (["limit", "/x", "--quota", "much"], 1, "quota='much' is not a size"),
        (["limit", "/x", "--ttl", "long"], 1, "ttl='long' is not a time"),
        (["resize"], 2, "a size, or --default"),
        (["resize", "big"], 1, "size='big' is not a size"),
        (["ls"], 1, ": no cache"),
        (["free", "/x"], 1, ": no cache"),
        (["doctor", "--endpoint-url", "http://127.0.0.1:9"], 1, "--endpoint-url needs a URL"),
    ],
)
def test_command_with_invalid_input_prints_one_line(millrace: Any, arguments: list[str], code: int, words: str) -> None:
    text = millrace(*arguments, code=code)
    assert words in text
    assert text.count("\n") == 1


def test_free_of_everything_requires_confirmation(millrace: Any, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    millrace("load", data)
    assert "stdin is not a terminal" in millrace("free", "--all", code=2)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(click, "confirm", lambda *_, **__: False)
    assert millrace("free", "--all") == "nothing was removed\n"
    monkeypatch.setattr(click, "confirm", lambda *_, **__: True)
    assert "3 objects" in millrace("free", "--all")


def test_pin_with_damaged_rules_file_prints_an_error(millrace: Any, tmp_path: Path, data: Path) -> None:
    millrace("pin", data)
    (path,) = (tmp_path / "cache").rglob("rules.json")
    path.write_bytes(b"{")
    assert "rules.json cannot be read" in millrace("pin", data / "x", code=1)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (26_132, "26.1 kB"), (999_600, "1.00 MB"), (2.5e15, "2500 TB")],
)
def test_size_text_of_bytes_has_a_short_number_and_a_unit(nbytes: float, text: str) -> None:
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (125, "2:05"), (3725, "1:02:05"), (86400, "1 d"), (90000, "25:00:00")],
)
def test_time_text_of_seconds_is_seconds_clock_time_or_days(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.035, "35 ms"), (0.0999, "0.1 s"), (0.404, "0.4 s"), (9.94, "9.9 s"), (9.96, "10 s"), (125, "2:05")],
)
def test_duration_text_below_ten_seconds_has_a_digit_more(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_progress_text_during_listing_and_loading_is_one_line() -> None:
    state = LoadProgress(objects=40, nbytes=4_000_000_000, done_objects=10, done_bytes=10**9, bytes_per_second=1e8)
    assert progress_text(LoadProgress()) == "listing"
    assert progress_text(state) == "10 of 40+ objects, 1.00 GB of 4.00 GB+, 100 MB/s"
    state = LoadProgress(
        objects=40, nbytes=4 * 10**9, done_objects=10, done_bytes=10**9, bytes_per_second=1e8, listed=True
    )
    assert progress_text(state) == "25%, 10 of 40 objects, 1.00 GB of 4.00 GB, 100 MB/s, 30 s left"


def test_command_with_unusable_cache_fails(millrace: Any, tmp_path: Path, data: Path) -> None:
    millrace("load", data)
    locks = tmp_path / "cache" / "millrace" / "local" / "locks"
    close_nodes()
    os.link(locks, tmp_path / "other name")
    for command in (["status"], ["ls"], ["free", str(data)]):
        assert f"no cache directory can be used ({locks}" in millrace(*command, code=1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_command_with_cache_of_another_user_prints_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    assert main(["load", str(data)]) == 0
    for command in ("status", "doctor"):
        main([command])  # import everything before the change of user
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


_COMMANDS = (["pin"], ["unpin"], ["free"], ["limit", "--quota", "1GB"], ["load"], ["ls"])


@pytest.mark.parametrize("command", _COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("bucket/train", "'bucket/train' has no scheme: write s3://bucket/train, or ./bucket/train for a file"),
        ("train", "'train' has no scheme"),
        ("train/", "'train/' has no scheme"),
        ("", "a URL is empty"),
        ("s4://bucket/train", "no origin serves 's4'"),
        ("s3:/bucket/train", "did you mean s3://"),
        ("s3://", "names no object and no prefix"),
        ("file:///", "names no object and no prefix"),
        ("/", "names no object and no prefix"),
    ],
)
def test_command_with_url_that_names_nothing_is_refused(
    millrace: Any, data: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], url: str, words: str
) -> None:
    millrace("load", data)
    monkeypatch.chdir(data)  # where `train` exists
    text = millrace(*command, url, code=1)
    assert words in text
    assert text.count("\n") == 1
    assert millrace("status", "--json")["rules"] == []
    assert len(millrace("ls").splitlines()) == 3


@pytest.mark.parametrize("url", ["bucket/train", "", "s4://bucket/train", "s3://"])
def test_doctor_with_url_that_names_nothing_fails(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", url]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " origin " in line]
    assert line.startswith("failed")


def test_pin_with_any_spelling_of_a_path_prints_its_full_url(
    millrace: Any, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    millrace("load", data)
    monkeypatch.chdir(data)
    full = f"file://{data}/train"
    for url in ("./train", "./train/", "../data/train", data / "train", f"{full}/", f"FILE://{data}/train"):
        assert millrace("pin", url) == f"pinned {full}\n"
        assert [rule["url"] for rule in millrace("status", "--json")["rules"]] == [full]
        assert millrace("unpin", url, "--json") == {"unpinned": [full]}
    assert millrace("pin", "s3://bucket/train/", "S3://other") == "pinned s3://bucket/train\npinned s3://other\n"
    assert "has no pin of its own" in millrace("unpin", "s3://bucket/never", code=1)
    assert millrace("unpin", "S3://bucket/train", "s3://other") == "unpinned s3://bucket/train\nunpinned s3://other\n"


def test_unpin_with_one_url_without_pin_changes_nothing(millrace: Any, data: Path) -> None:
    millrace("pin", data / "train", data / "val")
    assert "nopin has no pin of its own" in millrace("unpin", data / "train", data / "nopin", data / "val", code=1)
    assert len(millrace("status", "--json")["rules"]) == 2


def test_unpin_of_a_prefix_and_its_child_removes_both(millrace: Any, data: Path) -> None:
    millrace("pin", data, data / "train")
    millrace("unpin", data, data / "train")
    assert millrace("status", "--json")["rules"] == []


def test_relative_url_in_a_deleted_directory_is_one_line(
    millrace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for arguments in (["load", "./x"], ["pin", "./x"], ["checkpoints", "ls", "."]):
        assert "the working directory does not exist any more" in millrace(*arguments, code=1)


def test_load_of_a_directory_above_the_cache_leaves_the_cache_out(millrace: Any, tmp_path: Path, data: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "mine").write_bytes(b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    for url in (tmp_path, tmp_path / "cache", tmp_path):
        millrace("load", url)
    assert not [line for line in millrace("ls").splitlines() if "cache/millrace" in line]
    assert millrace("ls", tmp_path / "cache") == f"file://{tmp_path}/cache/mine\n"
    millrace("free", "--all", "--yes")
    assert millrace("load", tmp_path / "link", "--json")["objects"] == 1


def test_free_of_cached_objects_is_not_counted_as_eviction(millrace: Any, data: Path) -> None:
    millrace("load", data)
    millrace("free", "--all", "--yes")
    counters = millrace("status", "--json")["counters"]
    assert (counters["evictions"], counters["evicted_bytes"]) == (0, 0)


def test_command_with_one_wrong_url_changes_nothing(millrace: Any, data: Path) -> None:
    millrace("load", data)
    for wrong in (f"{data}/*", "train"):
        millrace("pin", data / "train", wrong, code=1)
        assert millrace("status", "--json")["rules"] == []
    millrace("pin", data / "train", data / "val")
    for command in ("unpin", "free"):
        millrace(command, data / "train", f"{data}/*", code=1)
    assert len(millrace("status", "--json")["rules"]) == 2
    assert len(millrace("ls").splitlines()) == 3
