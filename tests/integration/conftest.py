"""Servers that the integration tests share: real ones, started here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.testing.s3 import S3Server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One S3 server for all integration tests; every test uses a bucket of its own."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh bucket, named after the test's own directory."""
    name = "t-" + "".join(c if c.isalnum() else "-" for c in tmp_path.name.lower()).strip("-")[:50]
    s3.create_bucket(name)
    return name


@pytest.fixture
def s3_options(s3: S3Server, tmp_path: Path) -> dict[str, Any]:
    """Arguments of `millrace.filesystem("s3", ...)` for a cache of the test's own."""
    return {"target_options": s3.target_options, "cache_dir": str(tmp_path / "cache"), "min_free": 0}
