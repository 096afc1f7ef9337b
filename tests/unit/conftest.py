"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.maintenance import MANUAL_MAINTENANCE


@pytest.fixture
def no_maintenance(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run no maintenance in the background, so that results do not depend on the pace of its thread.

    Maintenance adds up uses, evicts, and seals segments that were idle for more than a second. `run_tasks` still runs it.
    """
    monkeypatch.setattr("millrace.runtime.maintenance._maintenance", MANUAL_MAINTENANCE)
    yield
    MANUAL_MAINTENANCE.forget()
