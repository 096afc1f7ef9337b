"""Every origin passes the conformance suite: the one in memory that tests use, local files, and a real S3 server."""

from pathlib import Path

import pytest

from millrace.origin import Origin, open_origin
from millrace.testing.conformance import OriginConformance
from millrace.testing.origins import MemoryOrigin
from millrace.testing.s3 import S3Server


class TestMemoryOrigin(OriginConformance):
    picklable = False

    @pytest.fixture
    def origin(self) -> Origin:
        return MemoryOrigin()

    @pytest.fixture
    def root(self) -> str:
        return "bucket/root"


class TestFileOrigin(OriginConformance):
    ordered = False  # as the operating system gives them

    @pytest.fixture
    def origin(self) -> Origin:
        return open_origin("file")

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path)


class TestS3Origin(OriginConformance):
    unsupported_names = frozenset({"back\\slash"})  # SeaweedFS makes slashes of them

    @pytest.fixture
    def origin(self, s3: S3Server) -> Origin:
        return open_origin("s3", s3.target_options)

    @pytest.fixture
    def root(self, bucket: str) -> str:
        return f"{bucket}/root"
