"""Jitter must not draw from the random numbers of the user."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.origins import MemoryOrigin

from millrace.errors import OriginBusyError, OriginUnavailableError
from millrace.origin.base import LimitedOrigin, Limits


def test_jitter_of_retries_leaves_the_users_random_state(tmp_path: Path) -> None:
    """They may be seeded, and are saved for exact resumption: other draws would change a training."""
    errors = [
        OriginBusyError("b/k: slow down", next_step="wait"),
        OriginUnavailableError("b/k: connection reset", next_step="check the network"),
    ]

    def fail(*_: object) -> None:
        if errors:
            raise errors.pop()

    inner = MemoryOrigin(identity="failing", before_read=fail)
    inner.put("b/k", b"0123456789")
    origin = LimitedOrigin(inner, Limits.of("s3", {"cache_dir": str(tmp_path)}))
    before = random.getstate()
    assert bytes(origin.read("b/k", 2, 5)) == b"234"
    assert errors == []
    assert random.getstate() == before
