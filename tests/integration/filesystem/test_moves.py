"""A move never loses a file, whatever the names of its source and target."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest

from millrace.errors import IsDirectoryError, ObjectChangedError, UsageError
from millrace.filesystem import MillraceFileSystem, filesystem, writing
from millrace.testing.s3 import S3Server

FILES = {"d/a": b"A", "d/b": b"B", "d/e/x": b"X", "d/e/y/z": b"Z"}
STAYS = FILES

# The move, and the files below the root afterwards; an exception where there is one.
MOVES: dict[str, tuple[Callable[[Any, str], object], Any]] = {
    "into its directory": (lambda fs, r: fs.mv(f"{r}/d/a", f"{r}/d"), STAYS),
    "into its directory with slash": (lambda fs, r: fs.mv(f"{r}/d/a", f"{r}/d/"), STAYS),
    "rename to its directory": (lambda fs, r: fs.rename(f"{r}/d/a", f"{r}/d"), STAYS),
    "list into its directory": (lambda fs, r: fs.mv([f"{r}/d/a", f"{r}/d/b"], f"{r}/d"), STAYS),
    "same name with scheme": (lambda fs, r: fs.mv(f"{r}/d/a", fs.unstrip_protocol(f"{r}/d/a")), STAYS),
    "directory into its parent": (lambda fs, r: fs.mv(f"{r}/d/e", f"{r}/d", recursive=True), STAYS),
    "directory onto itself": (lambda fs, r: fs.mv(f"{r}/d/e/", f"{r}/d/e", recursive=True), STAYS),
    "pattern into its directory": (lambda fs, r: fs.mv(f"{r}/d/*", f"{r}/d", recursive=True), STAYS),
    "files of a pattern into their directory": (lambda fs, r: fs.mv(f"{r}/d/*", f"{r}/d/"), STAYS),
    "directory into itself": (lambda fs, r: fs.mv(f"{r}/d/e", f"{r}/d/e/f", recursive=True), UsageError),
    "directory without recursive": (lambda fs, r: fs.mv(f"{r}/d/e", f"{r}/d/f"), IsDirectoryError),
    "file to another name": (
        lambda fs, r: fs.mv(f"{r}/d/a", f"{r}/d/c"),
        {"d/c": b"A", **{name: value for name, value in FILES.items() if name != "d/a"}},
    ),
    "file over another": (
        lambda fs, r: fs.mv(f"{r}/d/a", f"{r}/d/b"),
        {"d/b": b"A", "d/e/x": b"X", "d/e/y/z": b"Z"},
    ),
    "directory to another name": (
        lambda fs, r: fs.mv(f"{r}/d/e", f"{r}/d/ex", recursive=True),
        {"d/a": b"A", "d/b": b"B", "d/ex/x": b"X", "d/ex/y/z": b"Z"},
    ),
    "over a file that is moved later": (
        lambda fs, r: fs.mv([f"{r}/d/a", f"{r}/d/b"], [f"{r}/d/b", f"{r}/d/c"]),
        UsageError,
    ),
    "two files to one name": (lambda fs, r: fs.mv([f"{r}/d/a", f"{r}/d/e/x"], [f"{r}/d/c", f"{r}/d/c"]), UsageError),
    "one file twice": (
        lambda fs, r: fs.mv([f"{r}/d/a", f"{r}/d/a"], f"{r}/d/e/"),
        {"d/e/a": b"A", **{name: value for name, value in FILES.items() if name != "d/a"}},
    ),
}


@pytest.fixture(params=["file", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, str]:
    if request.param == "file":
        fs = filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0)
        place = str(tmp_path / "data")
    else:
        server: S3Server = request.getfixturevalue("s3")
        place = request.getfixturevalue("bucket")
        fs = filesystem("s3", server.target_options, cache_dir=str(tmp_path / "cache"), min_free=0)
    for name, value in FILES.items():
        fs.makedirs(f"{place}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{place}/{name}", value)
    return fs, place


@pytest.mark.parametrize("name", MOVES)
def test_move_keeps_every_byte(name: str, root: tuple[Any, str]) -> None:
    fs, place = root
    move, expected = MOVES[name]
    if isinstance(expected, type):
        with pytest.raises(expected):
            move(fs, place)
        expected = STAYS
    else:
        move(fs, place)
    fs.invalidate_cache()
    assert {path[len(place) + 1 :]: fs.cat_file(path) for path in fs.find(place)} == expected
    if name == "directory to another name":
        assert not fs.exists(f"{place}/d/e")


@pytest.mark.parametrize("target", ["d/./a", "d//a", "link/a"])
def test_move_of_local_file_onto_another_of_its_names_keeps_it(target: str, tmp_path: Path) -> None:
    fs = filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a").write_bytes(b"A")
    os.symlink(tmp_path / "d", tmp_path / "link")
    fs.mv(f"{tmp_path}/d/a", f"{tmp_path}/{target}")
    assert (tmp_path / "d" / "a").read_bytes() == b"A"


def test_move_of_local_files_and_directories_keeps_their_modes(tmp_path: Path) -> None:
    fs = filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0)
    modes = {"closed": 0o700, "closed/key": 0o600, "closed/run.sh": 0o755, "closed/shared": 0o775, "closed/full": 0o500}
    (tmp_path / "closed" / "shared").mkdir(parents=True)
    (tmp_path / "closed" / "full").mkdir()
    for name in ("key", "run.sh"):
        (tmp_path / "closed" / name).write_text(name)
    for name, mode in modes.items():
        (tmp_path / name).chmod(mode)
    fs.mv(str(tmp_path / "closed"), str(tmp_path / "moved"), recursive=True)
    fs.mv(str(tmp_path / "moved" / "key"), str(tmp_path / "moved" / "key2"))
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "moved").iterdir()}
    assert found == {"key2": 0o600, "run.sh": 0o755, "shared": 0o775, "full": 0o700}
    assert stat.S_IMODE((tmp_path / "moved").stat().st_mode) == 0o700


def test_move_of_local_directory_takes_empty_ones_along(tmp_path: Path) -> None:
    fs = filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0)
    (tmp_path / "d" / "empty").mkdir(parents=True)
    (tmp_path / "d" / "a").write_bytes(b"A")
    fs.mv(f"{tmp_path}/d", f"{tmp_path}/new", recursive=True)
    assert not (tmp_path / "d").exists()
    assert (tmp_path / "new" / "empty").is_dir()
    assert (tmp_path / "new" / "a").read_bytes() == b"A"


def test_move_of_object_that_another_client_has_replaced_keeps_the_new_version(
    s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    fs, other = (
        filesystem("s3", s3.target_options, cache_dir=str(tmp_path / name), min_free=0) for name in ("cache", "other")
    )
    fs.pipe_file(f"{bucket}/a", b"old")
    assert fs.cat_file(f"{bucket}/a") == b"old"
    other.pipe_file(f"{bucket}/a", b"newer")
    fs.mv(f"{bucket}/a", f"{bucket}/b")
    assert other.cat_file(f"{bucket}/b") == b"newer"
    assert not other.exists(f"{bucket}/a")


def test_file_that_is_overwritten_after_its_copy_stays(root: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    fs, place = root
    copy = type(fs)._copy

    def overwritten_later(self: Any, source: str, target: str) -> str:
        version = copy(self, source, target)
        if source.endswith("e/x"):
            self.origin.put(source, b"newer")
        if source.endswith("e/y/z"):
            self.origin.delete([source])
        return version

    monkeypatch.setattr(type(fs), "_copy", overwritten_later)
    with pytest.raises(ObjectChangedError, match="d/e/x changed after the copy"):
        fs.mv(f"{place}/d", f"{place}/new", recursive=True)
    fs.invalidate_cache()
    assert {path[len(place) + 1 :]: fs.cat_file(path) for path in fs.find(place)} == {
        "d/e/x": b"newer",
        **{f"new/{name[2:]}": value for name, value in FILES.items()},
    }


def test_links_to_files_are_moved_before_and_after_their_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_DELETE_KEYS", 1)
    fs = filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "b").write_bytes(b"B")
    for name in ("a", "c"):
        (tmp_path / "d" / name).symlink_to("b")
    fs.mv(str(tmp_path / "d"), str(tmp_path / "new"), recursive=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == dict.fromkeys("abc", b"B")
    assert not (tmp_path / "d").exists()
    (tmp_path / "link").symlink_to("new/b")
    fs.mv(str(tmp_path / "link"), str(tmp_path / "new" / "b"))
    assert (tmp_path / "new" / "b").read_bytes() == b"B"
    assert not (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("recursive", [False, True])
@pytest.mark.parametrize("listed", ["", "d", "d/a"])
def test_object_that_has_the_name_of_a_directory_is_copied_moved_and_removed_whatever_is_cached(
    listed: str, recursive: bool, s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    fs, other = (
        filesystem("s3", s3.target_options, cache_dir=str(tmp_path / name), min_free=0) for name in ("cache", "other")
    )

    def look() -> None:
        fs.invalidate_cache()
        if listed:
            fs.find(f"{bucket}/{listed}")

    fs.pipe({f"{bucket}/d/a": b"A", f"{bucket}/d/a/x": b"X"})
    look()
    fs.cp(f"{bucket}/d/a", f"{bucket}/copy", recursive=recursive)
    assert other.cat_file(f"{bucket}/copy") == b"A"
    look()
    fs.mv(f"{bucket}/d/a", f"{bucket}/moved", recursive=recursive)
    assert other.cat_file(f"{bucket}/moved") == b"A"
    assert other.cat_file(f"{bucket}/moved/x" if recursive else f"{bucket}/d/a/x") == b"X"
    fs.pipe({f"{bucket}/d/a": b"A", f"{bucket}/d/a/x": b"X"})
    look()
    fs.rm(f"{bucket}/d/a")
    assert other.find(f"{bucket}/d") == [f"{bucket}/d/a/x"]


NAMES = ["d/run[1]/x", "d/run[1]/y", "d/run1/x", "d/f[1]", "d/f1"]
# The call, and the files below the root that it adds, with the files whose bytes they have.
WILDCARDS: dict[str, tuple[Callable[[Any, str], object], dict[str, str]]] = {
    "file": (lambda fs, r: fs.mv(f"{r}/d/f[1]", f"{r}/new"), {"new": "d/f[1]"}),
    "file into a directory": (lambda fs, r: fs.mv(f"{r}/d/f[1]", f"{r}/d/run1"), {"d/run1/f[1]": "d/f[1]"}),
    "copied file": (lambda fs, r: fs.cp(f"{r}/d/f[1]", f"{r}/new"), {"new": "d/f[1]"}),
    "pyarrow's file": (lambda fs, r: pafs.FileSystem.move(fs, f"{r}/d/f[1]", f"{r}/new"), {"new": "d/f[1]"}),
    "directory": (
        lambda fs, r: fs.mv(f"{r}/d/run[1]", f"{r}/new", recursive=True),
        {"new/x": "d/run[1]/x", "new/y": "d/run[1]/y"},
    ),
    "directory into a directory": (
        lambda fs, r: fs.mv(f"{r}/d/run[1]", f"{r}/d/run1", recursive=True),
        {"d/run1/run[1]/x": "d/run[1]/x", "d/run1/run[1]/y": "d/run[1]/y"},
    ),
    "pyarrow's directory": (
        lambda fs, r: pafs.FileSystem.move(fs, f"{r}/d/run[1]", f"{r}/new"),
        {"new/x": "d/run[1]/x", "new/y": "d/run[1]/y"},
    ),
}


@pytest.mark.parametrize("name", WILDCARDS)
def test_move_of_name_with_wildcards_moves_exactly_this_name(name: str, bucket: str, fs: MillraceFileSystem) -> None:
    move, expected = WILDCARDS[name]
    fs.pipe({f"{bucket}/{each}": each.encode() for each in NAMES})
    move(fs, bucket)
    fs.invalidate_cache()
    found = {path[len(bucket) + 1 :]: fs.cat_file(path).decode() for path in fs.find(bucket)}
    moved = set(expected.values()) if name != "copied file" else set()
    assert found == {**{each: each for each in NAMES if each not in moved}, **expected}


def test_copy_of_directory_with_wildcards_without_recursive_copies_nothing(bucket: str, fs: MillraceFileSystem) -> None:
    fs.pipe({f"{bucket}/d/{name}/x": b"1" for name in ("run", "run[1]", "run1")})
    before = fs.find(bucket)
    for name in ("run", "run[1]"):
        fs.cp(f"{bucket}/d/{name}", f"{bucket}/new")
    fs.invalidate_cache()
    assert fs.find(bucket) == before


def test_move_of_missing_name_with_wildcards_moves_nothing(bucket: str, fs: MillraceFileSystem) -> None:
    fs.pipe(f"{bucket}/run1/x", b"1")
    with pytest.raises(FileNotFoundError):
        pafs.FileSystem.move(fs, f"{bucket}/run[1]", f"{bucket}/new")
    assert fs.find(bucket) == [f"{bucket}/run1/x"]


def test_move_of_directory_keeps_what_its_links_lead_to(tmp_path: Path) -> None:
    fs = filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0)
    for name in ("d", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_bytes(name.encode())
    os.symlink(tmp_path / "target", tmp_path / "d" / "link")
    fs.mv(f"{tmp_path}/d", f"{tmp_path}/new", recursive=True)
    assert (tmp_path / "target" / "a").read_bytes() == b"target"
    assert (tmp_path / "new" / "link" / "a").read_bytes() == b"target"
    assert (tmp_path / "new" / "a").read_bytes() == b"d"
    assert not (tmp_path / "d").exists()


def test_contents_of_a_link_are_not_removed(tmp_path: Path) -> None:
    fs = filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "keep").write_bytes(b"A")
    os.symlink(tmp_path / "target", tmp_path / "link")
    fs.delete_dir_contents(str(tmp_path / "link"))
    assert (tmp_path / "target" / "keep").read_bytes() == b"A"
