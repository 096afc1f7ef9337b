"""fsspec's own abstract suites, over local files, a real S3 server, and a library of fsspec."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import fsspec.tests.abstract as abstract
import pytest

import millrace
from millrace.filesystem import MillraceFileSystem


class _Local(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self, tmp_path: Path) -> MillraceFileSystem:
        return millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0)

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> str:
        (tmp_path / "remote").mkdir()
        return str(tmp_path / "remote")


class _S3(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self, s3_options: dict[str, Any]) -> MillraceFileSystem:
        return millrace.filesystem("s3", **s3_options)

    @pytest.fixture
    def fs_path(self, bucket: str) -> str:
        return bucket

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False


class _Memory(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self, tmp_path: Path) -> MillraceFileSystem:
        return millrace.filesystem("memory", cache_dir=str(tmp_path / "cache"), min_free=0)

    @pytest.fixture
    def fs_path(self) -> Iterator[str]:
        memory, name = fsspec.filesystem("memory"), f"abstract-{uuid4().hex}"
        yield name
        if memory.exists(f"/{name}"):
            memory.rm(f"/{name}", recursive=True)

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False


class TestLocalOpen(_Local, abstract.AbstractOpenTests): ...


class TestLocalPipe(_Local, abstract.AbstractPipeTests): ...


class TestLocalGet(_Local, abstract.AbstractGetTests): ...


class TestLocalPut(_Local, abstract.AbstractPutTests): ...


class TestLocalCopy(_Local, abstract.AbstractCopyTests): ...


class TestS3Open(_S3, abstract.AbstractOpenTests): ...


class TestS3Pipe(_S3, abstract.AbstractPipeTests): ...


class TestS3Get(_S3, abstract.AbstractGetTests): ...


class TestS3Put(_S3, abstract.AbstractPutTests): ...


class TestS3Copy(_S3, abstract.AbstractCopyTests): ...


class TestMemoryOpen(_Memory, abstract.AbstractOpenTests): ...


class TestMemoryPipe(_Memory, abstract.AbstractPipeTests): ...


class TestMemoryGet(_Memory, abstract.AbstractGetTests): ...


class TestMemoryPut(_Memory, abstract.AbstractPutTests): ...


class TestMemoryCopy(_Memory, abstract.AbstractCopyTests): ...
