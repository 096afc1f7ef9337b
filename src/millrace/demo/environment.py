"""Variables of the environment for as long as a run lasts, which the processes that it starts inherit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def defaults(environment: Mapping[str, str]) -> Iterator[None]:
    """Variables of the environment, where they are not set, until the block ends: the process's next run has its own."""
    added = [name for name in environment if name not in os.environ]
    os.environ.update({name: environment[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
