"""Fixtures of the unit tests of file systems."""

from __future__ import annotations

from pathlib import Path

import pytest

import millrace


@pytest.fixture
def fs(tmp_path: Path) -> millrace.MillraceFileSystem:
    """Local files, which never change, with a cache of the test's own."""
    return millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0, consistency="immutable")
