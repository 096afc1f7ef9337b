"""Short limits for the requests to an origin, in blocks that expect a failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest

from millrace.origin import store_access
from millrace.origin.limits import retrying
from millrace.origin.limits.retrying import Patience


@contextmanager
def impatient(*, is_silent: bool = True) -> Iterator[None]:
    """The clients' own limits, made short enough to wait for.

    Without `is_silent` these are the numbers of tries only: an answer may come as late as usual.

    Operations that must succeed stay outside the block: a busy machine may need the usual limits.
    """
    with pytest.MonkeyPatch.context() as patched:
        if is_silent:
            for name, seconds in {"connect_timeout": 1, "timeout": 4, "read_timeout": 1}.items():
                patched.setitem(store_access.CLIENT, name, timedelta(seconds=seconds))
        patched.setitem(store_access.RETRY, "max_retries", 2)
        patched.setitem(store_access.RETRY, "retry_timeout", timedelta(seconds=4))
        patched.setattr(retrying, "PATIENCE", Patience(seconds=4, tries=3))
        yield
