"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.maintenance import ASKED_MAINTENANCE


@pytest.fixture
def no_maintenance(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing runs twice a second: with it, results would depend on where its thread is at the moment.

    It adds up uses, evicts, and seals segments that were idle for more than a second. `run_tasks` still runs it.
    """
    monkeypatch.setattr("millrace.runtime.maintenance._maintenance", ASKED_MAINTENANCE)
    yield
    ASKED_MAINTENANCE.forget()
