"""The file system passes the conformance suite over local files, a memory and a real S3 server, with every kind of cache."""

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import fsspec
import pytest

import millrace
from millrace.filesystem import MillraceFileSystem
from millrace.testing.conformance import FileSystemConformance

_FILES_ARE_SHORT = dict.fromkeys(
    ("a part of 256 bytes", "a part of 600 bytes"), "a name of a file has 255 bytes at most on Linux"
)


class TestLocalFiles(FileSystemConformance):
    unsupported_lengths = _FILES_ARE_SHORT | {
        "a part of 255 bytes": "a file is written aside, under a name that is two bytes longer; reading is tried below"
    }

    @pytest.fixture
    def fs(self, tmp_path: Path) -> MillraceFileSystem:
        return millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0)

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        (tmp_path / "root").mkdir()
        return str(tmp_path / "root")

    def test_name_of_255_bytes_is_read(self, fs: MillraceFileSystem, root: str) -> None:
        path = Path(root, "ü" * 127 + "z")
        path.write_bytes(b"long")
        for _ in range(2):  # requested, then cached
            assert fs.find(root) == [str(path)]
            with fs.open_input_file(str(path)) as file:
                assert file.read() == b"long"


class TestMemory(FileSystemConformance):
    """fsspec's memory, through its library: as any storage that only fsspec speaks to."""

    @pytest.fixture
    def fs(self, tmp_path: Path) -> MillraceFileSystem:
        return millrace.filesystem("memory", cache_dir=str(tmp_path / "cache"), min_free=0)

    @pytest.fixture
    def root(self) -> Iterator[str]:
        memory, name = fsspec.filesystem("memory"), f"conformance-{uuid4().hex}"
        yield f"{name}/root"
        if memory.exists(f"/{name}"):
            memory.rm(f"/{name}", recursive=True)


class TestDirectory(FileSystemConformance):
    """Files through fsspec's library for them, as `sftp` and `smb` show them."""

    test_odd_name_works_through_fsspec_and_pyarrow = None  # names are files', as above
    unsupported_lengths = _FILES_ARE_SHORT

    @pytest.fixture
    def fs(self, tmp_path: Path) -> MillraceFileSystem:
        (tmp_path / "shared").mkdir()
        options = {"path": str(tmp_path / "shared"), "target_protocol": "file"}
        return millrace.filesystem("dir", options, cache_dir=str(tmp_path / "cache"), min_free=0)

    @pytest.fixture
    def root(self) -> str:
        return "some/root"


class TestS3(FileSystemConformance):
    unsupported_names = frozenset({"back\\slash"})  # SeaweedFS makes slashes of them
    unsupported_lengths = MappingProxyType(
        {"a part of 256 bytes": "SeaweedFS refuses objects whose last part has more than 255 bytes"}
    )

    @pytest.fixture
    def fs(self, s3_options: dict[str, Any]) -> MillraceFileSystem:
        return millrace.filesystem("s3", **s3_options)

    @pytest.fixture
    def root(self, bucket: str) -> str:
        return f"{bucket}/root"


class TestWithoutMaps(TestLocalFiles):
    test_odd_name_works_through_fsspec_and_pyarrow = None  # names are the same in every kind of cache
    test_long_name_works_through_fsspec_and_pyarrow = None

    @pytest.fixture
    def fs(self, tmp_path: Path) -> MillraceFileSystem:
        return millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0, native=False)


class TestWithoutRoom(TestLocalFiles):
    """Nothing can be kept: every read is served from the origin, and right all the same."""

    test_odd_name_works_through_fsspec_and_pyarrow = None  # names are the same in every kind of cache
    test_long_name_works_through_fsspec_and_pyarrow = None

    @pytest.fixture
    def fs(self, tmp_path: Path) -> MillraceFileSystem:
        return millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0, capacity=0)


class TestAlwaysAsking(TestLocalFiles):
    test_odd_name_works_through_fsspec_and_pyarrow = None  # names are the same in every kind of cache
    test_long_name_works_through_fsspec_and_pyarrow = None

    @pytest.fixture
    def fs(self, tmp_path: Path) -> MillraceFileSystem:
        return millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0, consistency="always")


class TestTwoDisks(TestLocalFiles):
    test_odd_name_works_through_fsspec_and_pyarrow = None  # names are the same in every kind of cache
    test_long_name_works_through_fsspec_and_pyarrow = None

    @pytest.fixture
    def fs(self, tmp_path: Path) -> MillraceFileSystem:
        return millrace.filesystem("file", cache_dir=[str(tmp_path / "one"), str(tmp_path / "two")], min_free=0)
