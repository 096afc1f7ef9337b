"""What users of fsspec and of pyarrow expect of a file system, as tests, over any origin and any store."""

from __future__ import annotations

import io
import pickle
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from millrace.errors import MillraceError, UsageError
from millrace.filesystem import MillraceFileSystem
from millrace.testing.conformance.origin import ODD_NAMES

_MB = 1 << 20


def _bytes(size: int, seed: int = 0) -> bytes:
    """Bytes in which no sequence repeats, so that a wrong offset is detected."""
    words = np.arange(size // 4 + 1, dtype=np.uint32) * np.uint32(2_654_435_761) + np.uint32(seed)
    return words.astype(">u4").tobytes()[:size]


def _key_of_1024_bytes(root: str) -> str:
    base = len(root.partition("/")[2].encode()) + 1  # the part before it is a bucket, or empty
    parts = "/".join(["k" * 99] * 11)
    return f"{root}/{parts[: 1024 - base].rstrip('/'):k<{1024 - base}}"


LONG_NAMES: dict[str, Callable[[str], str]] = {
    "a part of 255 bytes": lambda root: f"{root}/long/{'ü' * 127}z",
    "a part of 256 bytes": lambda root: f"{root}/long/{'z' * 256}",
    "a part of 600 bytes": lambda root: f"{root}/{'漢' * 200}/z",
    "a key of 1,024 bytes": _key_of_1024_bytes,
}
"""Long paths below a root, by kind."""

_POSITIONS: dict[str, Callable[[Any, int], Any]] = {
    "the end": lambda file, size: (file.seek(size), file.tell(), file.read()),
    "past the end": lambda file, size: (
        file.seek(size + 9),
        file.tell(),
        file.read_buffer(5).to_pybytes(),
        file.tell(),
    ),
    "far past the end": lambda file, size: (file.seek(1 << 40), file.tell(), file.read_at(3, 1)),
    "past the end, relative": lambda file, size: (file.seek(3), file.seek(size, 1), file.tell(), file.read1(4)),
    "past the end, from the end": lambda file, size: (file.seek(2, 2), file.readinto(bytearray(3)), file.tell()),
    "past the end and back": lambda file, size: (file.seek(size + 9), file.seek(-10, 1), file.read(5), file.tell()),
    "past the end and to the begin": lambda file, size: (file.seek(size + 9), file.seek(1), file.read(2), file.tell()),
    "negative": lambda file, size: file.seek(-1),
    "negative, relative": lambda file, size: file.seek(-1, 1),
    "negative, from the end": lambda file, size: file.seek(-size - 1, 2),
    "no such whence": lambda file, size: file.seek(1, 7),
    "read at the end": lambda file, size: file.read_at(3, size),
    "read over the end": lambda file, size: file.read_at(30, size - 2),
    "read past the end": lambda file, size: file.read_at(3, size + 100),
    "read at a negative": lambda file, size: file.read_at(3, -1),
    "read_at keeps the position": lambda file, size: (file.read(2), file.read_at(3, 5), file.tell()),
    "a stream past the end": lambda file, size: file.get_stream(size + 9, 3).read(),
    "lines": lambda file, size: file.readline(),
    "a list of lines": lambda file, size: file.readlines(1),
    "seek in a closed file": lambda file, size: (file.close(), file.seek(1)),
    "tell of a closed file": lambda file, size: (file.close(), file.tell()),
    "read_at of a closed file": lambda file, size: (file.close(), file.read_at(1, 1)),
    "read_at past the end of a closed file": lambda file, size: (file.close(), file.read_at(1, size + 1)),
}
"""Calls on an open file of that size. Excludes `read()` past the end, at which pyarrow's own file fails."""


_CALLS_OF_A_FILE: dict[str, Callable[[MillraceFileSystem, str], Any]] = {
    "open": lambda fs, path: fs.open(path),
    "open text": lambda fs, path: fs.open(path, "r"),
    "open compressed": lambda fs, path: fs.open(path, compression="gzip"),
    "cat_file": lambda fs, path: fs.cat_file(path),
    "a range": lambda fs, path: fs.cat_file(path, 1, 2),
    "cat": lambda fs, path: fs.cat(path),
    "head": lambda fs, path: fs.head(path),
    "info": lambda fs, path: fs.info(path),
    "size": lambda fs, path: fs.size(path),
    "modified": lambda fs, path: fs.modified(path),
    "ls": lambda fs, path: fs.ls(path),
    "rm": lambda fs, path: fs.rm(path),
    "open_input_file": lambda fs, path: fs.open_input_file(path),
    "open_input_stream": lambda fs, path: fs.open_input_stream(path),
    "delete_file": lambda fs, path: fs.delete_file(path),
}
"""Calls with the path of a file, which raise for an invalid path."""

_WRITES: dict[str, Callable[[MillraceFileSystem, str], Any]] = {
    "open": lambda fs, path: fs.open(path, "wb"),
    "open text": lambda fs, path: fs.open(path, "w"),
    "open new": lambda fs, path: fs.open(path, "xb"),
    "pipe_file": lambda fs, path: fs.pipe_file(path, b"new"),
    "pipe": lambda fs, path: fs.pipe(path, b"new"),
    "pipe several": lambda fs, path: fs.pipe({path: b"new"}),
    "write_text": lambda fs, path: fs.write_text(path, "new"),
    "touch": lambda fs, path: fs.touch(path),
}
"""Calls that write one file, which raise for a path that can only name a directory."""


def _outcome(call: Callable[[Any, int], Any], file: Any, size: int) -> Any:
    """The result of a call, or the class of its error."""
    with file:
        try:
            return call(file, size)
        except io.UnsupportedOperation:
            return io.UnsupportedOperation
        except (OSError, ValueError) as error:
            return OSError if isinstance(error, OSError) else ValueError


class FileSystemConformance:
    """Subclass it with the fixtures `fs` (a fresh file system and cache) and `root` (an empty directory)."""

    unsupported_names: frozenset[str] = frozenset()
    """Those of `ODD_NAMES` that the storage does not support."""

    unsupported_lengths: Mapping[str, str] = {}
    """Those of `LONG_NAMES` that the storage does not support, with the reason."""

    @pytest.fixture
    def fs(self) -> MillraceFileSystem:
        raise NotImplementedError("give an `fs` fixture")

    @pytest.fixture
    def root(self) -> str:
        raise NotImplementedError("give a `root` fixture")

    @pytest.fixture
    def tree(self, fs: MillraceFileSystem, root: str) -> dict[str, bytes]:
        """Some files at several depths, by path."""
        files = {
            f"{root}/{name}": _bytes(size, seed)
            for seed, (name, size) in enumerate(
                [("a.bin", 10), ("b/c.bin", 70_000), ("b/d/e.bin", 2 * _MB), ("b.txt", 5), ("f/g", 9 * _MB + 3)]
            )
        }
        for path, data in files.items():
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            fs.pipe_file(path, data)
        return files

    # --- pyarrow: listings and infos -------------------------------------------------------------

    def test_file_info_of_each_kind_returns_type_and_size(
        self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes]
    ) -> None:
        file, directory, missing = fs.get_file_info([f"{root}/b/c.bin", f"{root}/b", f"{root}/none"])
        assert (file.type, file.size, file.base_name, file.extension) == (
            pafs.FileType.File,
            70_000,
            "c.bin",
            "bin",
        )
        assert datetime.now(UTC) - timedelta(hours=1) < file.mtime < datetime.now(UTC) + timedelta(hours=1)
        assert directory.type == pafs.FileType.Directory
        assert directory.size is None
        assert missing.type == pafs.FileType.NotFound

    def test_directory_path_with_trailing_slash_is_the_same(
        self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes]
    ) -> None:
        assert fs.get_file_info(f"{root}/b/").type == pafs.FileType.Directory
        assert fs.ls(f"{root}/b/", detail=False) == fs.ls(f"{root}/b", detail=False)
        with_slash = fs.get_file_info(pafs.FileSelector(f"{root}/b/", recursive=True))
        assert sorted(info.path for info in with_slash) == [f"{root}/b/c.bin", f"{root}/b/d", f"{root}/b/d/e.bin"]

    @pytest.mark.parametrize("state", ["cold", "warm"])
    def test_file_path_with_trailing_slash_raises(
        self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes], state: str
    ) -> None:
        for name in ("a.bin", "f/g"):
            path = f"{root}/{name}"
            if state == "warm":
                for _ in range(2):
                    with fs.open(path) as file:
                        assert file.read() == tree[path]
            assert fs.get_file_info(f"{path}/").type == pafs.FileType.NotFound
            assert (fs.exists(f"{path}/"), fs.isfile(f"{path}/"), fs.isdir(f"{path}/")) == (False, False, False)
            assert fs.find(f"{path}/") == []
            for call in _CALLS_OF_A_FILE.values():
                with pytest.raises(NotADirectoryError):
                    call(fs, f"{path}/")
            with pytest.raises(NotADirectoryError):
                fs.open_input_stream(f"{path}/", compression="gzip")
            with pytest.raises(NotADirectoryError):
                fs.copy_file(f"{path}/", f"{root}/new")
            with pytest.raises(NotADirectoryError):
                fs.get_file_info(pafs.FileSelector(f"{path}/"))
            assert fs.cat_file(path) == tree[path]
        for what in ("open", "open text", "cat_file", "open_input_file", "open_input_stream", "delete_file", "rm"):
            with pytest.raises(IsADirectoryError):
                _CALLS_OF_A_FILE[what](fs, f"{root}/b/")
        for call in _CALLS_OF_A_FILE.values():
            with pytest.raises(FileNotFoundError):
                call(fs, f"{root}/none/")
        for name in ("new", "a.bin", "b"):
            for write in _WRITES.values():
                with pytest.raises(IsADirectoryError):
                    write(fs, f"{root}/{name}/")
            with pytest.raises(IsADirectoryError):
                fs.open_output_stream(f"{root}/{name}/")
            with pytest.raises(IsADirectoryError):
                fs.copy_file(f"{root}/a.bin", f"{root}/{name}/")
        assert fs.find(root) == sorted(tree)
        assert fs.cat_file(f"{root}/a.bin") == tree[f"{root}/a.bin"]

    @pytest.mark.parametrize(
        ("recursive", "expected"),
        [
            (False, ["a.bin", "b", "b.txt", "f"]),
            (True, ["a.bin", "b", "b.txt", "b/c.bin", "b/d", "b/d/e.bin", "f", "f/g"]),
        ],
    )
    def test_selectors_return_the_selected_files(
        self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes], recursive: bool, expected: list[str]
    ) -> None:
        for _ in range(2):  # requested, then cached
            infos = fs.get_file_info(pafs.FileSelector(root, recursive=recursive))
            assert sorted(info.path for info in infos) == [f"{root}/{name}" for name in expected]
            for info in infos:
                if info.path in tree:
                    assert (info.type, info.size) == (pafs.FileType.File, len(tree[info.path]))
                else:
                    assert info.type == pafs.FileType.Directory

    def test_selector_of_missing_directory_raises_or_is_empty(
        self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes]
    ) -> None:
        with pytest.raises(FileNotFoundError):
            fs.get_file_info(pafs.FileSelector(f"{root}/none"))
        assert fs.get_file_info(pafs.FileSelector(f"{root}/none", allow_not_found=True)) == []
        with pytest.raises(OSError, match=r"a\.bin"):
            fs.get_file_info(pafs.FileSelector(f"{root}/a.bin"))

    def test_recursive_selector_includes_empty_directories(
        self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes]
    ) -> None:
        """In storage that has them: in many, a directory exists only through its objects."""
        empty = f"{root}/b/empty/inner"
        fs.makedirs(empty, exist_ok=True)
        if not fs.isdir(empty):
            empty = f"{root}/b/d"
        for base in (root, f"{root}/b"):
            found = fs.get_file_info(pafs.FileSelector(base, recursive=True))
            directories = [info.path for info in found if info.type == pafs.FileType.Directory]
            assert directories.count(empty) == 1
            assert empty.rpartition("/")[0] in [*directories, base]
            assert empty in fs.find(base, withdirs=True)
            assert sorted(info.path for info in found if info.type == pafs.FileType.File) == fs.find(base)

    def test_directory_opened_as_file_raises(self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes]) -> None:
        for what in ("open", "open text", "cat_file", "cat", "open_input_file", "open_input_stream", "delete_file"):
            with pytest.raises(IsADirectoryError) as caught:
                _CALLS_OF_A_FILE[what](fs, f"{root}/b")
            assert isinstance(caught.value, MillraceError)
        with pytest.raises(IsADirectoryError):
            fs.copy_file(f"{root}/b", f"{root}/copy")
        assert [isinstance(error, IsADirectoryError) for error in fs.cat_ranges([f"{root}/b"], 0, 1)] == [True]
        assert fs.find(root) == sorted(tree)

    def test_path_below_a_file_is_not_found(self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes]) -> None:
        path = f"{root}/a.bin/below"
        assert (fs.exists(path), fs.isfile(path), fs.isdir(path)) == (False, False, False)
        assert fs.get_file_info(path).type == pafs.FileType.NotFound
        assert fs.find(path) == []
        for what in ("open", "cat_file", "info", "open_input_file"):
            with pytest.raises((FileNotFoundError, NotADirectoryError)) as caught:
                _CALLS_OF_A_FILE[what](fs, path)
            assert isinstance(caught.value, MillraceError)

    @pytest.mark.parametrize("mode", ["ab", "a", "r+b", "rb+", "w+", "", "b", "q", "rw", "U"])
    def test_open_with_unsupported_mode_raises(
        self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes], mode: str
    ) -> None:
        with pytest.raises(UsageError, match="mode"):
            fs.open(f"{root}/a.bin", mode)
        assert fs.cat_file(f"{root}/a.bin") == tree[f"{root}/a.bin"]

    def test_exclusive_creation_of_existing_file_raises(
        self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes]
    ) -> None:
        for mode, data in (("xb", b"new"), ("x", "new")):
            with pytest.raises(FileExistsError):
                fs.open(f"{root}/a.bin", mode)
            with fs.open(f"{root}/{mode}", mode) as file:
                file.write(data)
            assert fs.cat_file(f"{root}/{mode}") == b"new"

    # --- pyarrow: reading -------------------------------------------------------------------------

    def test_streams_and_random_files_return_the_bytes(self, fs: MillraceFileSystem, tree: dict[str, bytes]) -> None:
        for path, data in tree.items():
            for _ in range(2):  # fetched, and from the cache
                with fs.open_input_stream(path) as stream:
                    assert stream.readable()
                    assert stream.read(3) + stream.read() == data
                    assert stream.read() == b""
                with fs.open_input_file(path) as file:
                    assert file.size() == len(data)
                    assert file.seekable()
                    middle = len(data) // 2
                    assert file.seek(middle) == middle
                    assert file.tell() == middle
                    assert file.read(7) == data[middle : middle + 7]
                    assert file.read_at(5, middle) == data[middle : middle + 5]
                    file.seek(-2, 2)
                    assert file.read(10) == data[-2:]
                    file.seek(0)
                    assert file.read_buffer(len(data)).to_pybytes() == data
                assert file.closed

    def test_reads_past_the_end_are_short(self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes]) -> None:
        with fs.open_input_file(f"{root}/a.bin") as file:
            assert file.read_at(100, 5) == tree[f"{root}/a.bin"][5:]
            file.seek(10)
            assert file.read(1) == b""

    @pytest.mark.parametrize("open_with", ["open_input_file", "open_input_stream"])
    @pytest.mark.parametrize("name", ["a.bin", "f/g"])
    @pytest.mark.parametrize("state", ["cold", "warm"])
    def test_positions_are_equal_to_those_of_a_local_file(
        self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes], state: str, name: str, open_with: str
    ) -> None:
        path, data = f"{root}/{name}", tree[f"{root}/{name}"]
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "same").write_bytes(data)
            expected = {
                what: _outcome(call, pafs.LocalFileSystem().open_input_file(f"{directory}/same"), len(data))
                for what, call in _POSITIONS.items()
            }
        found = {}
        for what, call in _POSITIONS.items():
            if state == "cold":
                fs.free([path])
            else:
                assert fs.cat_file(path) == data
                getattr(fs, open_with)(path).close()
            found[what] = _outcome(call, getattr(fs, open_with)(path), len(data))
        different = {what: (found[what], expected[what]) for what in found if found[what] != expected[what]}
        assert not different, different

    @pytest.mark.parametrize("state", ["cold", "warm"])
    def test_read_all_past_the_end_returns_no_bytes(
        self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes], state: str
    ) -> None:
        """pyarrow's own files raise a `SystemError` here."""
        fs.pipe_file(f"{root}/empty", b"")
        for path, data in {**tree, f"{root}/empty": b""}.items():
            if state == "warm":
                assert fs.cat_file(path) == data
                fs.open_input_file(path).close()
            for read in ("read", "readall"):
                with fs.open_input_file(path) as file:
                    file.seek(len(data) + 9)
                    assert getattr(file, read)() == b""
                    assert file.tell() == len(data) + 9
                    file.seek(0)
                    assert file.read() == data
            with fs.open(path) as python_file:
                python_file.seek(len(data) + 9)
                assert python_file.read() == b""

    @pytest.mark.parametrize("open_with", ["open_input_stream", "open_input_file", "open", "cat_file", "info", "size"])
    def test_open_of_missing_file_raises(self, fs: MillraceFileSystem, root: str, open_with: str) -> None:
        with pytest.raises(FileNotFoundError, match="none"):
            getattr(fs, open_with)(f"{root}/none")

    def test_closed_file_raises(self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes]) -> None:
        file = fs.open_input_file(f"{root}/f/g")
        file.close()
        with pytest.raises(ValueError, match="closed"):
            file.read(1)

    def test_parquet_file_reads_as_table_and_dataset(self, fs: MillraceFileSystem, root: str) -> None:
        table = pa.table({"n": range(50_000), "text": [f"row {n}" for n in range(50_000)]})
        fs.makedirs(f"{root}/table", exist_ok=True)
        for part in range(3):
            pq.write_table(
                table.slice(part * 10_000, 10_000), f"{root}/table/{part}.parquet", filesystem=fs, row_group_size=2_000
            )
        for _ in range(2):
            assert pq.read_table(f"{root}/table", filesystem=fs).equals(table.slice(0, 30_000))
            dataset = pads.dataset(f"{root}/table", filesystem=fs)
            assert dataset.to_table(columns=["n"], filter=pads.field("n") >= 29_990)["n"].to_pylist() == list(
                range(29_990, 30_000)
            )

    def test_one_file_is_read_by_many_threads(self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes]) -> None:
        path = f"{root}/f/g"
        data = tree[path]
        file = fs.open_input_file(path)

        def read(number: int) -> bool:
            start = number * 104_729 % len(data)
            return bytes(file.read_at(65_536, start)) == data[start : start + 65_536]

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(read, range(300)))
        file.close()

    # --- pyarrow: changing ------------------------------------------------------------------------

    def test_output_streams_publish_when_closed(self, fs: MillraceFileSystem, root: str) -> None:
        with fs.open_output_stream(f"{root}/out") as stream:
            stream.write(b"one ")
            stream.write(pa.py_buffer(b"two"))
        assert fs.cat_file(f"{root}/out") == b"one two"
        with pytest.raises((OSError, NotImplementedError, ValueError)):
            fs.open_append_stream(f"{root}/out")

    def test_copy_move_and_delete_of_files_change_the_listing(
        self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes]
    ) -> None:
        fs.copy_file(f"{root}/a.bin", f"{root}/copy.bin")
        assert fs.cat_file(f"{root}/copy.bin") == tree[f"{root}/a.bin"]
        fs.mv(f"{root}/copy.bin", f"{root}/moved.bin")
        assert not fs.exists(f"{root}/copy.bin")
        assert fs.cat_file(f"{root}/moved.bin") == tree[f"{root}/a.bin"]
        fs.delete_file(f"{root}/moved.bin")
        assert fs.get_file_info(f"{root}/moved.bin").type == pafs.FileType.NotFound
        with pytest.raises(FileNotFoundError):
            fs.delete_file(f"{root}/moved.bin")

    def test_delete_of_directory_removes_its_contents(
        self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes]
    ) -> None:
        fs.delete_dir(f"{root}/b")
        remaining = sorted(path for path in tree if not path.startswith(f"{root}/b/"))
        assert fs.find(root) == remaining
        fs.delete_dir_contents(root)
        assert fs.find(root) == []

    # --- fsspec -----------------------------------------------------------------------------------

    def test_file_object_reads_seeks_and_tells(self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes]) -> None:
        for path, data in tree.items():
            with fs.open(path) as file:
                assert (file.readable(), file.seekable(), file.writable()) == (True, True, False)
                assert file.read(4) == data[:4]
                assert file.seek(-3, io.SEEK_END) == len(data) - 3
                assert file.read() == data[-3:]
                file.seek(1)
                target = bytearray(6)
                count = file.readinto(target)
                assert count == min(6, len(data) - 1)
                assert bytes(target[: len(data) - 1]) == data[1:7]

    def test_text_file_reads_by_line(self, fs: MillraceFileSystem, root: str) -> None:
        fs.pipe_file(f"{root}/lines.txt", "äöü\nzwei\nlast".encode())
        with fs.open(f"{root}/lines.txt", "r", encoding="utf-8") as file:
            assert list(file) == ["äöü\n", "zwei\n", "last"]
        assert fs.read_text(f"{root}/lines.txt") == "äöü\nzwei\nlast"
        assert fs.head(f"{root}/lines.txt", 4) == "äö".encode()
        assert fs.tail(f"{root}/lines.txt", 4) == b"last"

    def test_cat_of_paths_and_ranges_returns_the_bytes(
        self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes]
    ) -> None:
        path = f"{root}/f/g"
        data = tree[path]
        assert fs.cat_file(path, 5, 4_500_000) == data[5:4_500_000]
        assert fs.cat_file(path, -7) == data[-7:]
        assert fs.cat_file(path, -7, -2) == data[-7:-2]
        assert fs.cat([path, f"{root}/a.bin"]) == {path: data, f"{root}/a.bin": tree[f"{root}/a.bin"]}
        paths = [path, f"{root}/a.bin", path, f"{root}/b/d/e.bin"]
        starts, ends = [0, 2, 8 * _MB, 1000], [10, 8, 9 * _MB, 2 * _MB]
        assert [bytes(piece) for piece in fs.cat_ranges(paths, starts, ends)] == [
            tree[name][start:end] for name, start, end in zip(paths, starts, ends, strict=True)
        ]

    def test_find_walk_glob_and_du_return_the_tree(
        self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes]
    ) -> None:
        assert fs.find(root) == sorted(tree)
        assert fs.find(root, maxdepth=1) == [f"{root}/a.bin", f"{root}/b.txt"]
        assert fs.glob(f"{root}/**/*.bin") == sorted(path for path in tree if path.endswith(".bin"))
        assert fs.glob(f"{root}/?.txt") == [f"{root}/b.txt"]
        assert fs.du(root) == sum(map(len, tree.values()))
        walked = {path: (sorted(directories), sorted(files)) for path, directories, files in fs.walk(root)}
        assert walked[root.rstrip("/")] == (["b", "f"], ["a.bin", "b.txt"])
        assert walked[f"{root}/b"] == (["d"], ["c.bin"])

    def test_info_has_the_fields_of_fsspec(self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes]) -> None:
        info = fs.info(f"{root}/b/c.bin")
        assert (info["name"], info["size"], info["type"]) == (f"{root}/b/c.bin", 70_000, "file")
        assert fs.info(f"{root}/b")["type"] == "directory"
        assert fs.isfile(f"{root}/b/c.bin")
        assert fs.isdir(f"{root}/b")
        assert not fs.exists(f"{root}/b/none")
        assert fs.size(f"{root}/b/c.bin") == 70_000
        assert fs.sizes([f"{root}/a.bin", f"{root}/b.txt"]) == [10, 5]

    # --- names ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_odd_name_works_through_fsspec_and_pyarrow(self, fs: MillraceFileSystem, root: str, name: str) -> None:
        if name in self.unsupported_names:
            pytest.skip("the storage has no such names")
        path = f"{root}/odd {name}/{name}"
        fs.makedirs(f"{root}/odd {name}", exist_ok=True)
        with fs.open(path, "wb") as file:
            file.write(name.encode())
        assert fs.find(root) == [path]
        assert fs.info(path)["name"] == path
        assert fs.get_file_info(path).size == len(name.encode())
        with fs.open_input_stream(path, compression=None) as stream:
            assert stream.read() == name.encode()
        with fs.open_input_file(path) as random:
            assert random.read() == name.encode()
        (selected,) = [
            info
            for info in fs.get_file_info(pafs.FileSelector(root, recursive=True))
            if info.type == pafs.FileType.File
        ]
        assert selected.path == path
        fs.rm(f"{root}/odd {name}", recursive=True)
        assert not fs.exists(path)

    @pytest.mark.parametrize("kind", LONG_NAMES)
    def test_long_name_works_through_fsspec_and_pyarrow(self, fs: MillraceFileSystem, root: str, kind: str) -> None:
        if kind in self.unsupported_lengths:
            pytest.skip(self.unsupported_lengths[kind])
        path = LONG_NAMES[kind](root)
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        with fs.open_output_stream(path) as stream:
            stream.write(b"long")
        for _ in range(2):  # requested, then cached
            assert fs.find(root) == [path]
            assert fs.get_file_info(path).size == 4
            with fs.open_input_file(path) as file:
                assert file.read() == b"long"
            assert fs.cat_file(path) == b"long"
        fs.delete_file(path)
        assert not fs.exists(path)

    # --- versions ---------------------------------------------------------------------------------

    def test_write_is_visible_to_the_next_read(self, fs: MillraceFileSystem, root: str) -> None:
        path = f"{root}/changing"
        for size in (10, 3 * _MB, 10, 5 * _MB, 0, 1):
            data = _bytes(size, seed=size)
            fs.pipe_file(path, data)
            assert fs.cat_file(path) == data
            with fs.open_input_file(path) as file:
                assert file.read() == data
            assert fs.info(path)["size"] == size

    def test_open_file_after_overwrite_keeps_its_version_or_raises(self, fs: MillraceFileSystem, root: str) -> None:
        path = f"{root}/overwritten"
        old, new = _bytes(9 * _MB, 1), _bytes(9 * _MB, 2)
        fs.pipe_file(path, old)
        with fs.open_input_file(path) as file:
            assert file.read_at(1000, 0) == old[:1000]
            fs.pipe_file(path, new)
            try:
                rest = file.read_at(9 * _MB, 0)
            except OSError as error:
                assert "overwritten" in str(error) or "changed" in str(error)  # noqa: PT017 - either is right
            else:
                assert rest == old
        with fs.open_input_file(path) as file:
            assert file.read() == new

    def test_removed_file_is_also_removed_from_the_cache(self, fs: MillraceFileSystem, root: str) -> None:
        fs.pipe_file(f"{root}/gone", b"x" * 5_000_000)
        assert len(fs.cat_file(f"{root}/gone")) == 5_000_000
        fs.rm(f"{root}/gone")
        with pytest.raises(FileNotFoundError):
            fs.cat_file(f"{root}/gone")
        with pytest.raises(FileNotFoundError):
            fs.open_input_file(f"{root}/gone")

    # --- the object itself ------------------------------------------------------------------------

    def test_unpickled_file_system_is_equal_and_reads_the_same_bytes(
        self, fs: MillraceFileSystem, root: str, tree: dict[str, bytes]
    ) -> None:
        copy = pickle.loads(pickle.dumps(fs))
        assert copy == fs
        assert hash(copy) == hash(fs)
        assert copy.equals(fs)
        assert not fs.equals(pafs.LocalFileSystem())
        for other in (None, "s3", 1):
            assert fs != other
            with pytest.raises(TypeError):
                fs.equals(other)
        assert copy.cat_file(f"{root}/a.bin") == tree[f"{root}/a.bin"]
