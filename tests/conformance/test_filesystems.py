"""The file system passes the conformance suite over local files and over a real S3 server, with every kind of cache."""

from pathlib import Path
from typing import Any

import pytest

import millrace
from millrace.filesystem import MillraceFileSystem
from millrace.testing.conformance import ODD_NAMES, FileSystemConformance


class TestLocalFiles(FileSystemConformance):
    @pytest.fixture
    def fs(self, tmp_path: Path) -> MillraceFileSystem:
        return millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0)

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        (tmp_path / "root").mkdir()
        return str(tmp_path / "root")


class TestS3(FileSystemConformance):
    unsupported_names = frozenset({"back\\slash"})  # SeaweedFS makes slashes of them

    @pytest.fixture
    def fs(self, s3_options: dict[str, Any]) -> MillraceFileSystem:
        return millrace.filesystem("s3", **s3_options)

    @pytest.fixture
    def root(self, bucket: str) -> str:
        return f"{bucket}/root"


_ALL_NAMES_BUT_ONE = frozenset(ODD_NAMES[:-1])  # the other kinds of cache see no names: one is enough


class TestWithoutMaps(TestLocalFiles):
    unsupported_names = _ALL_NAMES_BUT_ONE

    @pytest.fixture
    def fs(self, tmp_path: Path) -> MillraceFileSystem:
        return millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0, native=False)


class TestWithoutRoom(TestLocalFiles):
    """Nothing can be kept: every read is served from the origin, and right all the same."""

    unsupported_names = _ALL_NAMES_BUT_ONE

    @pytest.fixture
    def fs(self, tmp_path: Path) -> MillraceFileSystem:
        return millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0, capacity=0)


class TestAlwaysAsking(TestLocalFiles):
    unsupported_names = _ALL_NAMES_BUT_ONE

    @pytest.fixture
    def fs(self, tmp_path: Path) -> MillraceFileSystem:
        return millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0, consistency="always")


class TestTwoDisks(TestLocalFiles):
    unsupported_names = _ALL_NAMES_BUT_ONE

    @pytest.fixture
    def fs(self, tmp_path: Path) -> MillraceFileSystem:
        return millrace.filesystem("file", cache_dir=[str(tmp_path / "one"), str(tmp_path / "two")], min_free=0)
