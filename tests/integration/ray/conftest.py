"""Fixtures of the tests with Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server


@pytest.fixture
def region(s3: S3Server) -> Iterator[EmulatedRegion]:
    """The server `s3` at a distance of 1 ms, over a link of limited speed."""
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.001) as region:
        yield region
