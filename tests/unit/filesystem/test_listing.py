"""Describing, listing and reading, as fsspec defines them."""

import os
from pathlib import Path

import fsspec
import pyarrow.fs as pafs
import pytest

import millrace
from millrace.cache.metadata.page_map import PageMap
from millrace.errors import ObjectChangedError, ObjectNotFoundError, OriginUnavailableError, StorageError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "d" / "s" / "t").mkdir(parents=True)
    for name in ("x", "s/y", "s/t/z"):
        (tmp_path / "d" / name).write_bytes(name.encode())
    return tmp_path / "d"


def test_stat_and_describe_of_a_file_and_a_folder_equal_fsspec(fs: millrace.MillraceFileSystem, data: Path) -> None:
    assert fs.stat(f"{data}/x")["size"] == 1
    assert fs.stat(f"{data}/s")["type"] == "directory"
    assert fs.describe(f"{data}/x").size == 1


@pytest.mark.parametrize("maxdepth", [None, 1, 2])
@pytest.mark.parametrize("withdirs", [False, True])
def test_find_and_glob_equal_fsspec(
    maxdepth: int | None, withdirs: bool, fs: millrace.MillraceFileSystem, data: Path
) -> None:
    local = fsspec.filesystem("file")
    for path in (f"{data}", f"{data}/s", f"{data}/x", f"{data}/none"):
        ours = fs.find(path, maxdepth=maxdepth, withdirs=withdirs, detail=True)
        theirs = local.find(path, maxdepth=maxdepth, withdirs=withdirs, detail=True)
        assert list(ours) == list(theirs)
        assert fs.find(path, maxdepth=maxdepth, withdirs=withdirs) == list(theirs)
    for pattern in ("/*", "/**", "/s/*", "/*/y"):
        assert fs.glob(f"{data}{pattern}") == local.glob(f"{data}{pattern}")


def test_find_requests_one_listing(
    fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    list_pages = fs._origin.list_pages
    monkeypatch.setattr(
        fs._origin, "list_pages", lambda key, **options: (asked.append(key), list_pages(key, **options))[1]
    )
    assert len(fs.find(str(data))) == 3
    assert asked == [str(data)]


def test_relative_local_paths_are_below_the_current_directory(
    fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data)
    local = fsspec.filesystem("file")
    assert fs.cat_file("s/y") == b"s/y"
    assert fs.cat_file("./s/../x") == b"x"
    assert fs.ls("", detail=False) == sorted(local.ls("", detail=False))
    assert fs.glob("s/*") == local.glob("s/*")
    assert fs.find("s") == local.find("s")
    fs.pipe_file("new", b"1")
    assert (data / "new").read_bytes() == b"1"
    with fs.open_input_file("x") as file:
        assert file.read() == b"x"
    assert fs.get_file_info("s").type == pafs.FileType.Directory
    monkeypatch.setenv("HOME", str(data))
    assert fs.cat_file("~/x") == b"x"


def test_invalidate_cache_drops_metadata(fs: millrace.MillraceFileSystem, data: Path) -> None:
    assert len(fs.ls(f"{data}/s")) == 2
    assert fs.cat_file(f"{data}/x") == b"x"
    (data / "s" / "new").write_bytes(b"1")
    (data / "x").write_bytes(b"changed")
    assert len(fs.ls(f"{data}/s")) == 2
    assert len(fs.ls(f"{data}/s", refresh=True)) == 3
    assert fs.info(f"{data}/x")["size"] == 1
    fs.invalidate_cache(f"{data}/x")
    assert fs.info(f"{data}/x")["size"] == 7
    (data / "x").write_bytes(b"again")
    assert fs.info(f"{data}/x")["size"] == 7
    fs.invalidate_cache()
    assert fs.info(f"{data}/x")["size"] == 5


def test_empty_local_directory_is_a_directory(fs: millrace.MillraceFileSystem, data: Path) -> None:
    (data / "empty").mkdir()
    assert fs.isdir(f"{data}/empty")
    assert fs.ls(f"{data}/empty") == []


def test_lines_are_read_from_a_buffer(fs: millrace.MillraceFileSystem, data: Path) -> None:
    (data / "lines").write_bytes(b"".join(b"line %d\n" % i for i in range(10_000)))
    with fs.open(f"{data}/lines") as file:
        assert file.peek(1)
        assert file.size == (data / "lines").stat().st_size
        assert sum(1 for _ in file) == 10_000
    with fs.open(f"{data}/lines", "r") as text:
        assert text.readline() == "line 0\n"


def test_overwritten_object_is_fetched_again(fs: millrace.MillraceFileSystem, data: Path) -> None:
    path = data / "x"
    assert fs.info(str(path))["size"] == 1
    path.write_bytes(b"whole and new")
    assert fs.cat_file(str(path)) == b"whole and new"  # nothing had been handed out
    path.write_bytes(b"once more")
    fs.node.metadata.stat(fs._origin, str(path))
    with fs.open_input_file(str(path)) as native:
        assert native.read() in (b"once more", b"whole and new")


def test_overwritten_object_is_read_when_the_index_cannot_be_written(
    fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = data / "x"
    path.write_bytes(os.urandom(9 << 20))
    file = fs.open(str(path))
    file.read(10)

    def fail(*_: object) -> None:
        raise StorageError("the index is read-only")

    monkeypatch.setattr(PageMap, "change", fail)
    path.write_bytes(b"whole and new")
    file.seek(8 << 20)
    with pytest.raises(ObjectChangedError):
        file.read(10)
    file.close()
    assert fs.cat_file(str(path), start=6) == b"and new"
    assert fs.cat_ranges([str(path)], [0], [5]) == [b"whole"]


def test_changed_object_is_requested_again_by_the_next_open(fs: millrace.MillraceFileSystem, data: Path) -> None:
    path = data / "big"
    path.write_bytes(os.urandom(9 << 20))
    file = fs.open(str(path))
    file.read(10)
    path.write_bytes(b"new")
    file.seek(8 << 20)
    with pytest.raises(ObjectChangedError):
        file.read(10)
    file.close()
    with fs.open(str(path)) as again:
        assert again.read() == b"new"


def test_wildcard_in_name_matches_literally(fs: millrace.MillraceFileSystem, data: Path, tmp_path: Path) -> None:
    (data / "s" / "y[1]*.bin").write_bytes(b"itself")
    (data / "s" / "y1.bin").write_bytes(b"another")
    name = f"{data}/s/y[1]*.bin"
    assert fs.cat(name) == b"itself"
    fs.get(name, str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == b"itself"
    fs.get(name, f"{tmp_path}/into/")
    assert (tmp_path / "into" / "y[1]*.bin").read_bytes() == b"itself"
    assert fs.cat(f"{data}/s/y1*") == {f"{data}/s/y1.bin": b"another"}


@pytest.mark.parametrize("name", ["none", "none*", "none[1]"])
@pytest.mark.parametrize("recursive", [False, True])
def test_missing_path_raises_object_not_found(
    name: str, recursive: bool, fs: millrace.MillraceFileSystem, data: Path, tmp_path: Path
) -> None:
    for read in (fs.cat, lambda path, recursive: fs.get(path, str(tmp_path / "copy"), recursive=recursive)):
        with pytest.raises(ObjectNotFoundError, match=r"file://.*none") as caught:
            read(f"{data}/{name}", recursive=recursive)
        assert caught.value.next_step


@pytest.mark.parametrize("target", ["self", "."])
def test_directory_with_a_link_to_itself_is_named_as_containing_it(
    target: str, tmp_path: Path, fs: millrace.MillraceFileSystem
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "keep").write_bytes(b"a")
    os.symlink(target, tmp_path / "d" / "self")
    for call in (fs.ls, fs.find, lambda path: list(fs.walk(path))):
        with pytest.raises(OriginUnavailableError, match="contains a link that leads to itself"):
            call(str(tmp_path / "d"))
    assert fs.cat_file(str(tmp_path / "d" / "keep")) == b"a"
