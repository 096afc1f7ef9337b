"""When a write is published, when it is not, and the effects of removals, copies and moves."""

import errno
import gc
import gzip
import itertools
import logging
import lzma
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from tests.support.forked import in_child
from tests.support.interrupts import interrupted_at

import millrace
from millrace.cache.metadata.page_map import PageMap
from millrace.errors import (
    DeniedError,
    DiskFullError,
    IsDirectoryError,
    ObjectChangedError,
    ObjectExistsError,
    OriginUnavailableError,
    StorageError,
    UsageError,
)
from millrace.filesystem import writing
from millrace.filesystem.uploads import UploadFile
from millrace.origin import upload


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "d").mkdir()
    return tmp_path / "d"


class StopError(Exception):
    pass


def chained(fs: millrace.MillraceFileSystem, path: str, mode: str, **options: Any) -> Any:
    cache_dir = str(fs.node.options.cache_dirs[0])
    return fsspec.open(f"millrace::file://{path}", mode, millrace={"cache_dir": cache_dir, "min_free": 0}, **options)


DOORS: dict[str, Callable[[millrace.MillraceFileSystem, str], Any]] = {
    "binary": lambda fs, path: fs.open(path, "wb"),
    "text": lambda fs, path: fs.open(path, "w"),
    "gzip": lambda fs, path: fs.open(path, "wb", compression="gzip"),
    "gzip text": lambda fs, path: fs.open(path, "wt", compression="gzip"),
    "xz": lambda fs, path: fs.open(path, "wb", compression="xz"),
    "pyarrow": lambda fs, path: fs.open_output_stream(path),
    "pyarrow gzip": lambda fs, path: fs.open_output_stream(path, compression="gzip"),
    "fsspec.open": lambda fs, path: chained(fs, path, "wb"),
    "fsspec.open text": lambda fs, path: chained(fs, path, "w"),
    "fsspec.open gzip": lambda fs, path: chained(fs, path, "wb", compression="gzip"),
}


def fill(file: Any, door: str) -> None:
    file.write("x" * 100_000 if "text" in door else b"x" * 100_000)


@pytest.mark.parametrize("door", DOORS)
def test_write_is_published_at_the_end_of_its_block(door: str, fs: millrace.MillraceFileSystem, data: Path) -> None:
    path = f"{data}/x.bin"
    try:
        raise StopError
    except StopError:  # an exception that was handled before does not concern the write
        with DOORS[door](fs, path) as file:
            fill(file, door)
    assert len((data / "x.bin").read_bytes()) > 0
    if "gzip" in door:
        assert gzip.decompress((data / "x.bin").read_bytes()) == b"x" * 100_000


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "UTF_32", "utf-16-le"])
def test_text_is_written_with_the_byte_order_mark_of_its_encoding(
    encoding: str, compression: str | None, fs: millrace.MillraceFileSystem, data: Path
) -> None:
    with fs.open(f"{data}/x", "wt", encoding=encoding, compression=compression) as file:
        file.write("a\n")
        file.write("\u00e9")
    written = (data / "x").read_bytes()
    assert (written if compression is None else gzip.decompress(written)) == "a\n\u00e9".encode(encoding)
    with fs.open(f"{data}/x", "rt", encoding=encoding, compression=compression) as file:
        assert file.read() == "a\n\u00e9"


@pytest.mark.parametrize("door", DOORS)
def test_write_with_exception_in_the_block_publishes_nothing(
    door: str, fs: millrace.MillraceFileSystem, data: Path
) -> None:
    def write_half() -> None:
        with DOORS[door](fs, f"{data}/x.bin") as file:
            fill(file, door)
            raise StopError

    with pytest.raises(StopError):
        write_half()
    gc.collect()
    assert list(data.iterdir()) == []


@pytest.mark.parametrize("door", DOORS)
def test_write_that_fails_raises_its_own_error_at_the_end_of_the_block(
    door: str, fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: upload.ObjectUpload, part: bytes | None) -> None:
        raise OriginUnavailableError("the storage failed")

    monkeypatch.setattr(upload, "PART_BYTES", 50)  # more than the head of a compressed stream
    monkeypatch.setattr(upload.ObjectUpload, "_send", fail)

    def write() -> None:
        with DOORS[door](fs, f"{data}/x") as file:
            fill(file, door)
            file.flush()

    with pytest.raises(OriginUnavailableError, match="the storage failed"):
        write()
    assert list(data.iterdir()) == []


def test_write_without_permission_is_denied(fs: millrace.MillraceFileSystem) -> None:
    with pytest.raises(DeniedError, match="access to file:///sys/x was denied: check the owner"):  # also for root
        fs.pipe_file("/sys/x", b"1")


@pytest.mark.root
def test_write_to_a_full_disk_keeps_the_file_and_names_the_cause(
    fs: millrace.MillraceFileSystem, small_disk: Path, data: Path
) -> None:
    (small_disk / "x").write_bytes(b"kept")
    (data / "y").write_bytes(bytes(12_000_000))
    for write in (
        lambda: fs.pipe(f"{small_disk}/x", bytes(12_000_000)),
        lambda: fs.pipe(f"{small_disk}/x", bytes(36_000_000)),
        lambda: fs.mv(f"{data}/y", f"{small_disk}/x"),
    ):
        with pytest.raises(DiskFullError, match="x: no space left on the disk"):
            write()
    assert (small_disk / "x").read_bytes() == b"kept"
    assert os.listdir(small_disk) == ["x"]
    assert (data / "y").exists()


def test_failed_parquet_writer_publishes_nothing(fs: millrace.MillraceFileSystem, data: Path) -> None:
    table = pa.table({"a": [1, 2, 3]})
    with pq.ParquetWriter(f"{data}/whole.parquet", table.schema, filesystem=fs) as writer:
        writer.write_table(table)

    def write_half() -> None:
        with pq.ParquetWriter(f"{data}/half.parquet", table.schema, filesystem=fs) as writer:
            writer.write_table(table)
            raise StopError

    with pytest.raises(StopError):
        write_half()
    assert [path.name for path in data.iterdir()] == ["whole.parquet"]


@pytest.mark.parametrize("door", ["binary", "text", "gzip", "gzip text", "pyarrow"])
def test_unclosed_write_is_discarded_with_a_warning(
    door: str, fs: millrace.MillraceFileSystem, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "millrace")

    def forget_to_close() -> None:
        file = DOORS[door](fs, f"{data}/x.bin")
        file.write("x" * 3_000_000 if "text" in door else b"x" * 3_000_000)
        del file
        gc.collect()

    with pytest.warns(ResourceWarning, match=r"x\.bin was not written"):
        forget_to_close()
    assert "was not written: its file was never closed" in caplog.text
    assert list(data.iterdir()) == []


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_parquet_file_whose_writer_is_interrupted_at_any_write_is_not_published(
    fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = UploadFile.write, itertools.count()

    def interrupted_write(file: UploadFile, part: bytes) -> int:
        if next(calls) == number:
            raise KeyboardInterrupt
        return write(file, part)

    monkeypatch.setattr(UploadFile, "write", interrupted_write)
    for number in itertools.count():
        calls = itertools.count()
        try:
            pq.write_table(pa.table({"a": range(100)}), f"{data}/x.parquet", filesystem=fs)
            break
        except KeyboardInterrupt:
            pass
        gc.collect()  # pyarrow's writer closes the file in its destructor
        assert list(data.iterdir()) == [], number
    assert number > 4
    assert fs.exists(f"{data}/x.parquet")


def test_parquet_writer_that_is_never_closed_publishes_nothing(
    fs: millrace.MillraceFileSystem, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def forget_to_close() -> None:
        table = pa.table({"a": range(100)})
        writer = pq.ParquetWriter(f"{data}/x.parquet", table.schema, filesystem=fs)
        writer.write_table(table)

    with pytest.warns(ResourceWarning, match=r"x\.parquet was not written"):
        forget_to_close()
    assert "was not written: its file was never closed" in caplog.text
    assert list(data.iterdir()) == []


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_file_that_the_destructor_of_its_owner_closes_is_not_published(
    compression: str | None, fs: millrace.MillraceFileSystem, data: Path
) -> None:
    class Owner:
        def __init__(self) -> None:
            self.file = fs.open(f"{data}/x", "wb", compression=compression)
            self.file.write(bytes(1000))

        def close(self) -> None:
            self.file.close()

        def __del__(self) -> None:
            self.close()

    with pytest.warns(ResourceWarning, match="x was not written"):
        Owner()
    assert list(data.iterdir()) == []


def test_close_inside_except_block_logs_a_warning(
    fs: millrace.MillraceFileSystem, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = fs.open(f"{data}/x.bin", "wb")
    try:
        file.write(b"half")
        raise StopError
    except StopError:
        file.close()
    assert "closed while StopError was being handled" in caplog.text
    assert list(data.iterdir()) == []


def test_exclusive_creation_succeeds_once(fs: millrace.MillraceFileSystem, data: Path) -> None:
    with fs.open(f"{data}/x", "xb") as file:
        file.write(b"1")
    with pytest.raises(FileExistsError):
        fs.open(f"{data}/x", "xb")
    with pytest.raises(ObjectExistsError):
        fs.pipe_file(f"{data}/x", b"2", mode="create")
    assert (data / "x").read_bytes() == b"1"


def test_pipe_with_another_mode_is_refused(fs: millrace.MillraceFileSystem, data: Path) -> None:
    fs.pipe_file(f"{data}/x", b"1")
    with pytest.raises(UsageError, match="'append'"):
        fs.pipe_file(f"{data}/x", b"2", mode="append")
    assert fs.cat_file(f"{data}/x") == b"1"


def test_empty_array_of_any_shape_is_written(fs: millrace.MillraceFileSystem, data: Path) -> None:
    fs.pipe_file(f"{data}/x", np.zeros((0, 3)))
    assert fs.cat_file(f"{data}/x") == b""
    with fs.open(f"{data}/y", "wb") as file:
        assert file.write(np.zeros((3, 0))) == 0
        assert file.write(np.ones(2)) == 16
    assert fs.cat_file(f"{data}/y") == np.ones(2).tobytes()


def test_transaction_is_refused_before_any_write(fs: millrace.MillraceFileSystem, data: Path) -> None:
    with pytest.raises(UsageError, match="transaction"):
        fs.open(f"{data}/x", "wb", autocommit=False)
    with pytest.raises(UsageError, match="transaction"), fs.transaction:
        pass
    with pytest.raises(UsageError, match="transaction"):
        fs.start_transaction()
    assert list(data.iterdir()) == []


def test_copied_and_moved_files_have_the_same_bytes(fs: millrace.MillraceFileSystem, data: Path) -> None:
    fs.pipe({f"{data}/a/x": b"1", f"{data}/a/b/y": b"2"})
    fs.cp_file(f"{data}/a/x", f"{data}/copy")
    assert fs.cat_file(f"{data}/copy") == b"1"
    fs.mv(f"{data}/copy", f"{data}/moved")
    assert not fs.exists(f"{data}/copy")
    assert fs.cat_file(f"{data}/moved") == b"1"
    fs.cp(f"{data}/a", f"{data}/c", recursive=True)
    assert fs.find(f"{data}/c") == [f"{data}/c/b/y", f"{data}/c/x"]
    pafs.FileSystem.copy_file(fs, f"{data}/moved", f"{data}/again")
    assert (data / "again").read_bytes() == b"1"


def test_recursive_removal_removes_unlisted_files_and_follows_no_link(
    fs: millrace.MillraceFileSystem, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_bytes(b"kept")
    for door in ("rm", "delete_dir", "delete_dir_contents"):
        fs.pipe({f"{data}/t/x": b"1", f"{data}/t/s/y": b"2", f"{data}/tx": b"3"})
        (data / "t" / "link").symlink_to(tmp_path / "elsewhere")
        (data / "t" / "empty").mkdir()
        assert fs.cat_file(f"{data}/t/s/y") == b"2"
        assert len(fs.ls(f"{data}/t")) > 0
        (data / "t" / "late").write_bytes(b"not in the listing that is remembered")
        with pytest.raises(IsADirectoryError):
            fs.rm(f"{data}/t")
        if door == "rm":
            fs.rm(f"{data}/t", recursive=True)
        else:
            getattr(fs, door)(f"{data}/t")
        assert not fs.exists(f"{data}/t/s/y")
        assert (data / "t").exists() == (door == "delete_dir_contents")
        assert fs.find(f"{data}/t") == []
        assert (data / "tx").exists()
    assert (tmp_path / "elsewhere" / "kept").exists()
    with pytest.raises(FileNotFoundError):
        fs.rm(f"{data}/nothing", recursive=True)
    with pytest.raises(FileNotFoundError):
        fs.delete_dir(f"{data}/nothing")
    fs.delete_dir_contents(f"{data}/nothing", missing_dir_ok=True)
    with pytest.raises(NotADirectoryError):
        fs.delete_dir(f"{data}/tx")
    with pytest.raises(IsDirectoryError):
        fs.delete_file(f"{data}/t")
    fs.rm([f"{data}/t*x"])
    assert not (data / "tx").exists()


@pytest.mark.parametrize("names", ["t/**", ["t/s", "t/s/y", "t/x"], ["t/x", "t/*", "t/x"]], ids=str)
def test_recursive_removal_of_names_below_each_other_removes_all(
    names: str | list[str], fs: millrace.MillraceFileSystem, data: Path
) -> None:
    fs.pipe({f"{data}/t/s/y": b"1", f"{data}/t/x": b"2", f"{data}/tx": b"3"})
    fs.rm([f"{data}/{name}" for name in ([names] if isinstance(names, str) else names)], recursive=True)
    assert fs.find(str(data)) == [f"{data}/tx"]


def test_write_is_seen_by_file_system_with_directories_in_another_order(data: Path, tmp_path: Path) -> None:
    directories = [str(tmp_path / "one"), str(tmp_path / "two")]
    options: dict[str, Any] = {"consistency": "immutable", "min_free": 0}
    reader = millrace.filesystem("file", cache_dir=directories, **options)
    writer = millrace.filesystem("file", cache_dir=directories[::-1], **options)
    for content in (b"1", b"22"):
        writer.pipe(f"{data}/x", content)
        assert (reader.cat(f"{data}/x"), reader.du(f"{data}/x")) == (content, len(content))


def test_rmdir_removes_only_an_empty_directory(fs: millrace.MillraceFileSystem, data: Path) -> None:
    fs.mkdir(f"{data}/empty")
    fs.pipe(f"{data}/t/x", b"1")
    assert len(fs.ls(str(data))) == 2
    fs.rmdir(f"{data}/empty")
    assert fs.ls(str(data), detail=False) == [f"{data}/t"]
    with pytest.raises(StorageError, match="not empty"):
        fs.rmdir(f"{data}/t")
    with pytest.raises(NotADirectoryError):
        fs.rmdir(f"{data}/t/x")
    with pytest.raises(FileNotFoundError):
        fs.rmdir(f"{data}/empty")


def test_listed_directory_is_missing_after_its_removal(fs: millrace.MillraceFileSystem, data: Path) -> None:
    for remove in (
        lambda: fs.rm(f"{data}/t", recursive=True),
        lambda: fs.mv(f"{data}/t", f"{data}/moved", recursive=True),
    ):
        (data / "t" / "empty").mkdir(parents=True)
        fs.pipe(f"{data}/t/s/y", b"1")
        assert len(fs.ls(f"{data}/t")) == 2
        assert f"{data}/t/empty" in fs.find(f"{data}/t", withdirs=True)
        remove()
        assert not any(fs.exists(f"{data}/{name}") for name in ("t", "t/empty", "t/s", "t/s/y"))
        assert fs.find(f"{data}/t", withdirs=True) == []


def test_removal_that_fails_invalidates_the_metadata_of_what_it_removed(
    fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs.pipe({f"{data}/t/x": b"1", f"{data}/t/s/y": b"2"})
    assert len(fs.find(f"{data}/t")) == 2

    def remove_and_fail(path: str) -> None:
        os.unlink(f"{path}/y")
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(shutil, "rmtree", remove_and_fail)
    with pytest.raises(StorageError):
        fs.rm(f"{data}/t", recursive=True)
    assert fs.find(f"{data}/t") == [f"{data}/{name}" for name in ("t/x",) if (data / name).exists()]


def test_directory_that_is_listed_during_its_removal_is_missing_afterwards(
    fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs.pipe(f"{data}/t/x", b"1")
    rmdir = os.rmdir

    def remove_late(path: str) -> None:
        fs.ls(str(data))
        rmdir(path)

    monkeypatch.setattr(os, "rmdir", remove_late)
    fs.rm(f"{data}/t", recursive=True)
    assert f"{data}/t" not in fs.ls(str(data), detail=False)


@pytest.mark.parametrize("path", ["file:///", "/.", "/{}/..", "file://", ""])
def test_contents_of_the_root_and_of_an_empty_path_are_never_removed(
    path: str, fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data / "kept").write_bytes(b"1")
    monkeypatch.chdir(data)
    removed: list[str] = []
    monkeypatch.setattr(type(fs), "_remove_below", lambda _, key: removed.append(key))
    with pytest.raises(UsageError):
        fs.delete_dir_contents(path.format(data.parts[1]), missing_dir_ok=True)
    assert removed == []


@pytest.mark.parametrize("name", ["a", "hard", "soft", "./a"])
def test_get_of_local_file_onto_itself_keeps_it(name: str, fs: millrace.MillraceFileSystem, data: Path) -> None:
    (data / "a").write_bytes(b"kept")
    os.link(data / "a", data / "hard")
    os.symlink(data / "a", data / "soft")
    fs.get(f"{data}/a", f"{data}/{name}")
    assert (data / "a").read_bytes() == b"kept"


def test_put_of_file_that_becomes_shorter_raises_and_publishes_nothing(
    fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data / "a").write_bytes(bytes(100_000))

    def write_and_cut(file: UploadFile, data_: bytes) -> int:
        os.truncate(data / "a", 20_000)
        return write(file, data_)

    write = UploadFile.write
    monkeypatch.setattr(UploadFile, "write", write_and_cut)
    monkeypatch.setattr(writing, "_COPY_BYTES", 10_000)
    with pytest.raises(ObjectChangedError, match="became shorter"):
        fs.put(f"{data}/a", f"{data}/b")
    assert not (data / "b").exists()


def test_exists_is_false_only_for_missing_objects(
    fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(key: str) -> None:
        raise DeniedError(f"access to {key} was denied")

    monkeypatch.setattr(fs._origin, "head", refuse)
    monkeypatch.setattr(fs._origin, "list_level", refuse)
    for ask in (fs.exists, fs.isfile, fs.isdir, lambda path: list(fs.walk(path)), lambda path: fs.glob(path + "/*")):
        with pytest.raises(DeniedError):
            ask(f"{data}/x")


def test_write_creates_local_directories(fs: millrace.MillraceFileSystem, data: Path) -> None:
    fs.makedirs(f"{data}/a/b")
    assert fs.isdir(f"{data}/a/b")
    with pytest.raises(FileExistsError):
        fs.mkdir(f"{data}/a")
    with pytest.raises(FileNotFoundError):
        fs.mkdir(f"{data}/c/d", create_parents=False)
    fs.create_dir(f"{data}/a")
    fs.create_dir(f"{data}/c/d", recursive=True)
    assert (data / "c" / "d").is_dir()


def test_write_with_lost_answer_invalidates_metadata(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "own"), min_free=0, consistency="immutable")
    path = str(data / "lost")
    fs.pipe_file(path, b"old")
    assert fs.cat_file(path) == b"old"
    origin = type(fs._origin)
    real = origin.put

    def unanswered(self: Any, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        raise OriginUnavailableError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(origin, "put", unanswered)
        with pytest.raises(OriginUnavailableError):
            fs.pipe_file(path, b"newer")
    assert fs.cat_file(path) == b"newer"


@pytest.mark.filterwarnings("error")  # also of an exception in `__del__`
def test_file_whose_open_is_interrupted_at_any_moment_leaves_nothing(
    fs: millrace.MillraceFileSystem, data: Path
) -> None:
    for number in itertools.count():
        writer = fs._origin.open_writer(f"{data}/x.bin")
        opened: list[UploadFile] = []
        interrupt = interrupted_at(
            number, lambda w=writer, o=opened: o.append(UploadFile(w, path="x", on_published=lambda: None))
        )
        if interrupt is None:
            break
        interrupt.__traceback__ = None  # it refers to the file
        opened.clear()
    opened.clear()
    del writer
    gc.collect()
    assert number > 2
    assert not list(data.iterdir())


@pytest.mark.parametrize(
    "door", [door for door in DOORS if not door.startswith("fsspec.open")]
)  # those open in the block
def test_forked_process_cannot_publish_a_file_that_was_open(
    door: str, fs: millrace.MillraceFileSystem, data: Path
) -> None:
    file = DOORS[door](fs, f"{data}/x.bin")
    fill(file, door)

    def child() -> str:
        nonlocal file
        try:
            file.close()
        except UsageError as error:
            return str(error)
        finally:
            del file
            gc.collect()
        return "closed"

    assert "was opened for writing before this process was forked" in in_child(child)
    assert not (data / "x.bin").exists()
    fill(file, door)
    file.close()
    found = (data / "x.bin").read_bytes()
    if "gzip" in door:
        found = gzip.decompress(found)
    assert found == b"x" * 200_000 if "xz" not in door else lzma.decompress(found) == b"x" * 200_000


def test_end_of_an_inherited_file_in_a_forked_process_has_no_effect(
    fs: millrace.MillraceFileSystem, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = fs.open(f"{data}/x.bin", "wb")
    file.write(b"x" * 100)

    def child() -> str:
        nonlocal file
        with warnings.catch_warnings(record=True) as found:
            del file
            gc.collect()
        return f"{len(found)} warnings, {len(caplog.records)} lines"

    assert in_child(child) == "0 warnings, 0 lines"
    file.close()
    assert (data / "x.bin").read_bytes() == b"x" * 100


def test_touch_without_truncation_next_to_a_write_keeps_the_object(
    fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists, path = fs.exists, data / "x"

    def exists_before_a_write(key: str) -> bool:
        found = exists(key)
        path.write_bytes(b"written")
        return found

    monkeypatch.setattr(fs, "exists", exists_before_a_write)
    fs.touch(str(path), truncate=False)
    assert path.read_bytes() == b"written"


def test_touch_without_conditional_requests_creates_an_empty_object(
    fs: millrace.MillraceFileSystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, path = fs._origin.put, data / "x"

    def put_without_conditions(key: str, value: bytes, *, if_absent: bool = False) -> None:
        if if_absent:
            raise UsageError("there are no conditional requests", next_step="use another storage")
        put(key, value)

    monkeypatch.setattr(fs._origin, "put", put_without_conditions)
    fs.touch(str(path), truncate=False)
    assert path.read_bytes() == b""


def test_failed_change_of_the_index_ends_the_metadata_of_all_file_systems_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")

    def reading(consistency: str) -> millrace.MillraceFileSystem:
        return millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0, consistency=consistency)

    def fail(*_: object) -> None:
        raise StorageError("a process is stopped", next_step="continue it")

    writer, other = reading("1h"), reading("immutable")
    assert writer.node is not other.node
    for fs in (writer, writer, other):
        assert fs.open_input_file(str(path)).read() == b"old"  # the second time from the cache
    with monkeypatch.context() as patched:
        patched.setattr(PageMap, "change", fail)
        with pytest.raises(StorageError):
            writer.pipe_file(path, b"new")
    for fs in (reading("2h"), other, writer):
        assert fs.open_input_file(str(path)).read() == b"new"
