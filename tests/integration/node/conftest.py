"""Fixtures of the tests of node processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server


@pytest.fixture
def region(s3: S3Server) -> Iterator[EmulatedRegion]:
    """The server `s3` without delay. For one test: requests in progress continue in it for a while."""
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None) as region:
        yield region
