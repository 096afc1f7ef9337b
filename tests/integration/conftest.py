"""Fixtures of the integration tests."""

from __future__ import annotations

from typing import Any

import pytest

import millrace
from millrace.origin import Origin, open_origin
from millrace.testing.s3 import S3Server


@pytest.fixture
def fs(s3_options: dict[str, Any]) -> millrace.MillraceFileSystem:
    """A file system over the server `s3`, with a cache of the test's own."""
    return millrace.filesystem("s3", **s3_options)


@pytest.fixture
def origin(s3: S3Server) -> Origin:
    """The server `s3` without the cache and without the emulated region."""
    return open_origin("s3", s3.target_options)
