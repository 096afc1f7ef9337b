"""Jitter must not draw from the random numbers of whoever uses the library."""

from __future__ import annotations

import random
from pathlib import Path

from millrace.errors import OriginBusyError, OriginUnavailableError
from millrace.origin.limits import LimitedOrigin, Limits
from millrace.testing.origins import MemoryOrigin


def test_the_users_random_numbers_stay_the_users(tmp_path: Path) -> None:
    """They may be seeded, and are saved for exact resumption: who else draws from them changes a training."""
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
