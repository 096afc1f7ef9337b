"""Local files that cannot exist: an error at once, never a wait."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import millrace
from millrace.errors import (
    DeniedError,
    IsDirectoryError,
    MillraceError,
    MissingDependencyError,
    ObjectNotFoundError,
    UsageError,
)
from millrace.origin import open_origin
from millrace.origin.fsspec_origin.clients import class_of


@pytest.mark.parametrize(
    ("name", "error"), [("folder", IsDirectoryError), ("file/below", UsageError), ("file/far/below", UsageError)]
)
def test_write_to_a_path_that_cannot_be_a_file_raises(name: str, error: type[MillraceError], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"1")
    origin = open_origin("file")
    with pytest.raises(error):
        origin.put(str(tmp_path / name), b"2")
    with pytest.raises(error):
        origin.open_writer(str(tmp_path / name))
    assert (tmp_path / "file").read_bytes() == b"1"


def test_file_system_with_directories_only_raises_at_once() -> None:
    with pytest.raises(DeniedError, match="/proc"):
        open_origin("file").put("/proc/millrace", b"1")


def test_new_folders_are_made_on_the_way(tmp_path: Path) -> None:
    open_origin("file").put(str(tmp_path / "a" / "b" / "c"), b"1")
    assert (tmp_path / "a" / "b" / "c").read_bytes() == b"1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_local_directory_is_not_an_object(tmp_path: Path) -> None:
    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), members="none")
    (tmp_path / "folder").mkdir()
    for call in (fs.cat_file, fs.open):
        with pytest.raises(IsDirectoryError):
            call(str(tmp_path / "folder"))
    with pytest.raises(ObjectNotFoundError):
        fs.open(str(tmp_path / "none"))
    assert fs.isdir(str(tmp_path / "folder"))


_READS_A_PIPE = """
import sys, millrace
fs = millrace.filesystem("file", cache_dir=sys.argv[1], members="none")
for call in (fs.cat_file, fs.info, fs.open, fs.open_input_file):
    try:
        call(sys.argv[2])
    except millrace.errors.UsageError as error:
        print(error)
"""


def test_pipe_without_a_writer_is_an_error_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, "-c", _READS_A_PIPE, str(tmp_path / "cache"), str(tmp_path / "pipe")]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=300, check=True
    )  # could not be interrupted
    assert done.stdout.count(f"file://{tmp_path}/pipe is not a regular file") == 4


def test_pipe_is_not_replaced_by_a_write_and_not_uploaded(tmp_path: Path) -> None:
    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), members="none")
    pipe = tmp_path / "d" / "pipe"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    fs.pipe(str(tmp_path / "x"), b"1")
    writes: list[Callable[[], object]] = [
        lambda: fs.pipe(str(pipe), b"1"),
        lambda: fs.open(str(pipe), "wb"),
        lambda: fs.cp(str(tmp_path / "x"), str(pipe)),
        lambda: fs.mv(str(tmp_path / "x"), str(pipe)),
        lambda: fs.put(str(pipe.parent), str(tmp_path / "new"), recursive=True),  # would wait for a writer
    ]
    for write in writes:
        with pytest.raises(UsageError, match="pipe is not a regular file"):
            write()
    assert pipe.is_fifo()
    assert (tmp_path / "x").read_bytes() == b"1"
    assert not (tmp_path / "new" / "pipe").exists()


@pytest.mark.parametrize("scheme", ["smb", "dropbox"])
def test_missing_fsspec_library_is_named_by_its_package(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"{name}: install it")

    monkeypatch.setattr("millrace.origin.fsspec_origin.clients.get_filesystem_class", missing)
    with pytest.raises(MissingDependencyError, match="pip install"):
        class_of(scheme)
