"""Origins over fsspec's libraries pass the conformance suite: its memory, a directory of files, and an object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from millrace.origin import Origin, open_origin
from millrace.testing.conformance import OriginConformance
from millrace.testing.s3 import S3Server


class TestMemory(OriginConformance):
    """A copy in another process has another, empty memory; a forked child has what its parent had."""

    picklable = False

    @pytest.fixture
    def origin(self) -> Origin:
        return open_origin("memory")

    @pytest.fixture
    def root(self) -> Iterator[str]:
        name = f"bucket-{uuid4().hex}"
        yield f"{name}/root"
        memory = fsspec.filesystem("memory")
        for path in [path for path in memory.store if path.startswith(f"/{name}/")]:
            del memory.store[path]


class TestDirectory(OriginConformance):
    """Files through fsspec's own library for them, as `sftp` and `smb` show them: real directories, and renaming."""

    @pytest.fixture
    def origin(self, tmp_path: Path) -> Origin:
        (tmp_path / "shared").mkdir()
        return open_origin("dir", {"path": str(tmp_path / "shared"), "target_protocol": "file"})

    @pytest.fixture
    def root(self) -> str:
        return "some/root"


class TestObjectStore(OriginConformance):
    """s3fs, as an example of an object store's own library on fsspec's event loop, over a real S3 server."""

    largest_listing = 1_020
    unsupported_names = frozenset({"back\\slash"})  # SeaweedFS makes slashes of them
    test_hostile_name_is_an_error_or_a_separate_object = None  # tested above without a server

    @pytest.fixture
    def origin(self, s3: S3Server, bucket: str) -> Origin:
        options = {"path": bucket, "target_protocol": "s3", "target_options": s3.target_options}
        return open_origin("dir", options)

    @pytest.fixture
    def root(self) -> str:
        return "some/root"
