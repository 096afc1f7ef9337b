"""Local files that cannot be: told as what they are, and never waited for."""

from __future__ import annotations

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
from millrace.origin.fsspec_origin.library import class_of


@pytest.mark.parametrize(
    ("name", "error"), [("folder", IsDirectoryError), ("file/below", UsageError), ("file/far/below", UsageError)]
)
def test_a_place_where_no_file_can_be(name: str, error: type[MillraceError], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"1")
    origin = open_origin("file")
    with pytest.raises(error):
        origin.put(str(tmp_path / name), b"2")
    with pytest.raises(error):
        origin.open_writer(str(tmp_path / name))
    assert (tmp_path / "file").read_bytes() == b"1"


def test_a_file_system_that_takes_no_files_is_an_error_at_once() -> None:
    with pytest.raises(DeniedError, match="/proc"):
        open_origin("file").put("/proc/millrace", b"1")


def test_new_folders_are_made_on_the_way(tmp_path: Path) -> None:
    open_origin("file").put(str(tmp_path / "a" / "b" / "c"), b"1")
    assert (tmp_path / "a" / "b" / "c").read_bytes() == b"1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_local_directory_is_no_object(tmp_path: Path) -> None:
    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), members="none")
    (tmp_path / "folder").mkdir()
    for call in (fs.cat_file, fs.open):
        with pytest.raises(IsDirectoryError):
            call(str(tmp_path / "folder"))
    with pytest.raises(ObjectNotFoundError):
        fs.open(str(tmp_path / "none"))
    assert fs.isdir(str(tmp_path / "folder"))


@pytest.mark.parametrize("scheme", ["smb", "dropbox"])
def test_a_missing_library_of_fsspec_is_named_as_pip_has_it(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"{name}: install it")

    monkeypatch.setattr("millrace.origin.fsspec_origin.library.get_filesystem_class", missing)
    with pytest.raises(MissingDependencyError, match="pip install"):
        class_of(scheme)
