"""Paths have the meaning of fsspec's and pyarrow's own file systems: the same calls on both, over local files and S3."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

import millrace
from millrace.errors import ConfigurationError, MillraceError, ObjectNotFoundError, UsageError
from millrace.testing.s3 import S3Server

FILES = {"a": b"A", "d/x": b"X", "d/e/y": b"YY", "empty": b"", "sp ace/%20 %2F ü": b"odd"}
KINDS = {
    "file": "a",
    "empty file": "empty",
    "file in a directory": "d/x",
    "odd name": "sp ace/%20 %2F ü",
    "file/": "a/",
    "file//": "a//",
    "empty file/": "empty/",
    "directory": "d",
    "directory/": "d/",
    "missing": "none",
    "missing/": "none/",
    "below a file": "a/below",
    "root": "",
}
"""Names below a root, by what they are."""

LOCAL_KINDS = {"double slash": "d//x", "dot": "./a", "dots": "d/../a", "dot inside": "d/./x"}
"""Names that only a local file system resolves."""


def _select(fs: Any, path: str, *, recursive: bool) -> list[tuple[str, str]]:
    return sorted(
        (info.path, info.type.name) for info in fs.get_file_info(pafs.FileSelector(path, recursive=recursive))
    )


def _read(file: Any) -> bytes:
    with file:
        return bytes(file.read())


FSSPEC: dict[str, Callable[[Any, str], Any]] = {
    "open": lambda fs, path: _read(fs.open(path)),
    "cat_file": lambda fs, path: fs.cat_file(path),
    "info": lambda fs, path: fs.info(path)["type"],
    "exists": lambda fs, path: fs.exists(path),
    "isfile": lambda fs, path: fs.isfile(path),
    "isdir": lambda fs, path: fs.isdir(path),
    "find": lambda fs, path: fs.find(path),
}
PYARROW: dict[str, Callable[[Any, str], Any]] = {
    "open_input_file": lambda fs, path: _read(fs.open_input_file(path)),
    "open_input_stream": lambda fs, path: _read(fs.open_input_stream(path)),
    "get_file_info": lambda fs, path: fs.get_file_info(path).type.name,
    "selector": lambda fs, path: _select(fs, path, recursive=False),
    "recursive selector": lambda fs, path: _select(fs, path, recursive=True),
}

# Where Millrace differs from the reference, and why.
_STRICT = "a slash at the end names a directory in all calls, as in pyarrow; fsspec takes it off in most"
_DIRECTORY = "all calls raise that a directory is not a file"
_LISTED = "pyarrow's S3FileSystem calls a file that is listed missing, its LocalFileSystem not a directory"
_SLASH = {"open": NotADirectoryError, "info": NotADirectoryError, "exists": False, "isfile": False, "find": []}
DIFFERENT: dict[tuple[str, str, str], tuple[Any, str]] = {
    (store, kind, call): (outcome, _STRICT)
    for store in ("file", "s3")
    for kind in ("file/", "file//", "empty file/")
    for call, outcome in {**_SLASH, "cat_file": NotADirectoryError}.items()
}
DIFFERENT |= {("s3", kind, "get_file_info"): ("NotFound", _STRICT) for kind in ("file/", "file//", "empty file/")}
DIFFERENT |= {
    ("s3", kind, call): (IsADirectoryError, _DIRECTORY)
    for kind, calls in {
        "directory": ("open", "cat_file", "open_input_file", "open_input_stream"),
        "directory/": ("open", "cat_file"),
        "root": ("open", "cat_file"),
    }.items()
    for call in calls
}
DIFFERENT |= {
    ("s3", kind, call): (NotADirectoryError, _LISTED)
    for kind in ("file", "empty file", "file in a directory", "odd name", "file/", "file//", "empty file/")
    for call in ("selector", "recursive selector")
}


def _outcome(call: Callable[[Any, str], Any], fs: Any, path: str) -> Any:
    """What a call returns, with normal paths, or the class of builtin error that callers catch."""
    try:
        found = call(fs, path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        return next(
            kind for kind in (FileNotFoundError, NotADirectoryError, IsADirectoryError) if isinstance(error, kind)
        )
    except MillraceError:
        raise  # none of ours is as vague as what follows
    except Exception:  # noqa: BLE001 - those of botocore have no common base with the others
        return OSError
    if isinstance(found, list):
        return [
            os.path.normpath(each) if isinstance(each, str) else (os.path.normpath(each[0]), each[1]) for each in found
        ]
    return found


def _is_same(ours: Any, reference: Any) -> bool:
    """Whether outcomes are the same; an error may contain more than the reference's."""
    if isinstance(reference, type) and isinstance(ours, type):
        return issubclass(ours, reference)
    return bool(ours == reference)


@dataclass
class Sides:
    """The same files behind Millrace and behind the reference."""

    store: str
    root: str
    ours: Callable[[], millrace.MillraceFileSystem]
    fsspec: Any
    pyarrow: Any


@pytest.fixture(params=["file", "s3"])
def sides(request: pytest.FixtureRequest, tmp_path: Path) -> Sides:
    made = iter(range(1000))
    common = {"min_free": 0, "members": "none", "skip_instance_cache": True}
    if request.param == "file":
        root = tmp_path / "root"
        for name, data in FILES.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
        (root / "d/nothing/in").mkdir(parents=True)
        return Sides(
            "file",
            str(root),
            lambda: millrace.filesystem("file", cache_dir=str(tmp_path / f"cache{next(made)}"), **common),
            fsspec.filesystem("file", skip_instance_cache=True),
            pafs.LocalFileSystem(),
        )
    server: S3Server = request.getfixturevalue("s3")
    bucket: str = request.getfixturevalue("bucket")
    options = {"key": server.key, "secret": server.secret, "endpoint_url": server.endpoint_url}
    reference = pafs.S3FileSystem(
        access_key=server.key, secret_key=server.secret, endpoint_override=server.endpoint_url
    )
    for name, data in FILES.items():
        with reference.open_output_stream(f"{bucket}/{name}") as stream:
            stream.write(data)
    return Sides(
        "s3",
        bucket,
        lambda: millrace.filesystem("s3", options, cache_dir=str(tmp_path / f"cache{next(made)}"), **common),
        fsspec.filesystem("s3", **options, skip_instance_cache=True),
        reference,
    )


@pytest.mark.slow
@pytest.mark.parametrize("state", ["cold", "warm"])
def test_paths_are_interpreted_like_fsspec_and_pyarrow(sides: Sides, state: str) -> None:
    wrong, never = [], []
    warm = sides.ours()
    if state == "warm":
        for name, data in FILES.items():
            assert warm.cat_file(f"{sides.root}/{name}") == data
    for kind, name in {**KINDS, **(LOCAL_KINDS if sides.store == "file" else {})}.items():
        path = f"{sides.root}/{name}"
        for reference, calls in ((sides.fsspec, FSSPEC), (sides.pyarrow, PYARROW)):
            for what, call in calls.items():
                ours = _outcome(call, warm if state == "warm" else sides.ours(), path)
                theirs = _outcome(call, reference, path)
                expected, why = DIFFERENT.get((sides.store, kind, what), (theirs, ""))
                if not _is_same(ours, expected):
                    wrong.append((kind, what, ours, expected))
                if why and ours == theirs:
                    never.append((kind, what, why))
    assert not wrong
    assert not never  # a difference that does not exist


def test_relative_local_path_stays_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, reference = millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0), pafs.LocalFileSystem()
    (tmp_path / "foo/sub").mkdir(parents=True)
    (tmp_path / "foo/sub/part.parquet").touch()
    monkeypatch.chdir(tmp_path)
    for path in ("foo", "./foo", "foo/", "a/../b", "/x//y", "", "/", ".", "..", "/foo/", "a b%20ü", "//foo"):
        assert fs.normalize_path(path) == reference.normalize_path(path)
    assert fs.normalize_path("file:///foo/bar") == "/foo/bar"
    for base in ("foo", "./foo", "foo/", "foo/../foo", f"{tmp_path}/foo"):
        assert _select(fs, base, recursive=True) == _select(reference, base, recursive=True)
    for path in ("foo", "foo/sub/part.parquet", "none", ""):
        assert _outcome(PYARROW["get_file_info"], fs, path) == _outcome(PYARROW["get_file_info"], reference, path)
    with pytest.raises(FileNotFoundError):
        _select(fs, "", recursive=False)
    assert fs.get_file_info(pafs.FileSelector("", allow_not_found=True)) == []


def test_data_set_at_relative_path_is_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0)
    monkeypatch.chdir(tmp_path)
    table = pa.table({"k": ["a", "b", "b"], "n": [1, 2, 3]})
    pads.write_dataset(table, "out", format="parquet", partitioning=["k"], partitioning_flavor="hive", filesystem=fs)
    found = pads.dataset("out", filesystem=fs, partitioning="hive")
    assert found.to_table().sort_by("n").select(["k", "n"]).to_pylist() == table.to_pylist()
    same = pads.dataset("out", filesystem=pafs.LocalFileSystem(), partitioning="hive")
    assert sorted(found.files) == sorted(same.files)


def test_current_directory_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0)
    (tmp_path / "here").mkdir()
    (tmp_path / "here/keep").touch()
    (tmp_path / "link").symlink_to("here")
    monkeypatch.chdir(tmp_path / "here")
    for path in ("", ".", "./", "file://", str(tmp_path / "here")):
        with pytest.raises(UsageError, match="current directory"):
            fs.rm(path, recursive=True)
        with pytest.raises(UsageError):
            fs.delete_dir(path)
    with pytest.raises(UsageError):
        fs.delete_dir_contents("")
    assert os.listdir() == ["keep"]
    fs.delete_dir_contents(".")
    assert os.listdir() == []


def test_copy_is_created_under_the_given_name(sides: Sides) -> None:
    fs, root = sides.ours(), sides.root
    if sides.store == "file":
        for copy in (fs.copy_file, sides.pyarrow.copy_file):
            with pytest.raises(IsADirectoryError):
                copy(f"{root}/a", f"{root}/d")
    else:
        fs.copy_file(f"{root}/a", f"{root}/d")  # an object next to the prefix
        assert fs.cat_file(f"{root}/d") == b"A"
    assert not fs.exists(f"{root}/d/a")


def test_writing_to_a_bucket_does_not_create_it(s3_options: dict[str, Any], bucket: str, s3: S3Server) -> None:
    fs = millrace.filesystem("s3", **s3_options)
    for name in (bucket, f"{bucket}-new"):
        for write in (
            lambda name: fs.pipe_file(name, b"x"),
            lambda name: fs.pipe_file(name, b"x", mode="create"),
            lambda name: fs.open(name, "wb"),
            fs.touch,
            fs.open_output_stream,
            lambda name: fs.cp_file(f"{bucket}/none", name),
        ):
            with pytest.raises((IsADirectoryError, FileNotFoundError)) as caught:
                write(name)
            assert isinstance(caught.value, MillraceError)
    assert fs.isdir(bucket)
    assert not fs.exists(f"{bucket}-new")


@pytest.mark.parametrize("path", ["", "/", "s3://", "*", "**", "*/x", "b*/x", "s3://*"])
def test_buckets_are_not_listed_and_the_error_explains_it(path: str, s3_options: dict[str, Any]) -> None:
    fs = millrace.filesystem("s3", **s3_options)
    for ask in (fs.ls, fs.find, lambda path: list(fs.walk(path, on_error="raise")), fs.glob):
        if ask == fs.glob and path in ("", "/", "s3://"):
            assert fs.glob(path) == [""]  # as s3fs: the root itself
            continue
        with pytest.raises((ConfigurationError, ObjectNotFoundError), match="buckets cannot be listed"):
            ask(path)


def test_scheme_in_upper_case_is_the_same(sides: Sides) -> None:
    fs = sides.ours()
    for scheme in (sides.store, sides.store.upper(), "Millrace"):
        url = f"{scheme}://{sides.root}/d/x"
        assert fs.cat_file(url) == b"X"
        assert fs.normalize_path(url) == f"{sides.root}/d/x"
        assert fs.get_file_info(url).size == 1
    with pytest.raises(UsageError, match=r"millrace\.filesystem\('gs'"):
        fs.cat_file("GS://bucket/x")


@pytest.mark.parametrize("name", ["d//x", "/a", "./a", "d/./x", "d/../a", "..", "."])
def test_name_with_empty_part_or_dots_is_not_another_object(name: str, s3_options: dict[str, Any], bucket: str) -> None:
    fs = millrace.filesystem("s3", **s3_options)
    fs.pipe({f"{bucket}/a": b"A", f"{bucket}/d/x": b"X"})
    path = f"{bucket}/{name}"
    assert not fs.exists(path)
    for call in (fs.cat_file, fs.open_input_file, lambda path: fs.pipe_file(path, b"new"), fs.rm):
        with pytest.raises(ObjectNotFoundError):
            call(path)
    assert fs.cat([f"{bucket}/a", f"{bucket}/d/x"]) == {f"{bucket}/a": b"A", f"{bucket}/d/x": b"X"}


# --- hive partitions of a missing value ---------------------------------------------------------------

_FRAMES = {
    "text": pd.DataFrame({"k": ["a", None, "b", None], "n": [1, 2, 3, 4]}),
    "numbers": pd.DataFrame({"k": pd.array([1, None, 2, None], dtype="Int64"), "n": [1, 2, 3, 4]}),
}
_WRITERS: dict[str, Callable[[pd.DataFrame, str, Any], Any]] = {
    "pandas": lambda frame, path, fs: frame.to_parquet(path, partition_cols=["k"], filesystem=fs),
    "write_to_dataset": lambda frame, path, fs: pq.write_to_dataset(
        pa.Table.from_pandas(frame), path, partition_cols=["k"], filesystem=fs
    ),
    "write_dataset": lambda frame, path, fs: pads.write_dataset(
        pa.Table.from_pandas(frame),
        path,
        format="parquet",
        partitioning=["k"],
        partitioning_flavor="hive",
        filesystem=fs,
    ),
}
_READERS: dict[str, Callable[[str, Any], pa.Table]] = {
    "pandas": lambda path, fs: pa.Table.from_pandas(pd.read_parquet(path, filesystem=fs)),
    "pandas, types found": lambda path, fs: pa.Table.from_pandas(
        pd.read_parquet(path, filesystem=fs, partitioning=pads.partitioning(flavor="hive"))
    ),
    "read_table": lambda path, fs: pq.read_table(path, filesystem=fs),
    "dataset": lambda path, fs: pads.dataset(path, filesystem=fs, partitioning="hive").to_table(),
}


def _rows(read: Callable[[str, Any], pa.Table], path: str, fs: Any) -> Any:
    """The rows that are read, or how it fails."""
    try:
        return sorted(read(path, fs).select(["k", "n"]).to_pylist(), key=lambda row: int(row["n"]))
    except (pa.ArrowInvalid, NotImplementedError) as error:
        return type(error), str(error)


@pytest.mark.slow
@pytest.mark.parametrize("frame", _FRAMES)
def test_hive_partition_of_missing_value_works_like_pyarrow(sides: Sides, frame: str) -> None:
    """pandas 3 reads such a data set of pyarrow 26 only with `partitioning=`, through any file system or none."""
    for written, write in _WRITERS.items():
        paths = {}
        for who, fs in (("ours", sides.ours()), ("reference", sides.pyarrow)):
            paths[who] = f"{sides.root}/{written} {who}"
            if sides.store == "file":
                os.mkdir(paths[who])
            write(_FRAMES[frame], paths[who], fs)
            found = fs.get_file_info(pafs.FileSelector(paths[who]))
            names = sorted(info.base_name for info in found if info.type == pafs.FileType.Directory)
            assert "k=__HIVE_DEFAULT_PARTITION__" in names
            assert len(names) == 3
        for path in paths.values():
            for read in _READERS.values():
                for end in ("", "/"):
                    assert _rows(read, path + end, sides.ours()) == _rows(read, path, sides.pyarrow)
            complete = _rows(_READERS["pandas, types found"], path, sides.ours())
            assert [(row["k"], row["n"]) for row in complete][1] == (None, 2)
