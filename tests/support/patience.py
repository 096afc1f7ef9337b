"""Long limits for the silence of peers, where all of them respond: a busy machine must not look like a silent peer.

The others skip a node that was not scheduled for two seconds. The results stay right, but a byte may leave the origin twice,
a copy may stay where it was, and a node may miss an invalidation for a while.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

SECONDS = 60.0

LIMITS = (
    "millrace.cluster.handover._DEADLINE_SECONDS",
    "millrace.cluster.invalidation.SILENCE_SECONDS",
    "millrace.cluster.listings.SILENCE_SECONDS",
    "millrace.cluster.moving._PAGE_SECONDS",
    "millrace.cluster.moving._READ_SECONDS",
    "millrace.cluster.source.SILENCE_SECONDS",
    "millrace.filesystem.cluster_access._DEADLINE_SECONDS",
    "millrace.filesystem.cluster_loading._DEADLINE_SECONDS",
    "millrace.node.drain._REQUEST_SECONDS",
    "millrace.node.moves._DEADLINE_SECONDS",
    "millrace.runtime.locks.SILENCE_SECONDS",
)

CODE = "\n".join(
    ["import importlib"]
    + [
        f"_limit = importlib.import_module({module!r}); assert _limit.{name}; _limit.{name} = {SECONDS}"
        for module, _, name in (limit.rpartition(".") for limit in LIMITS)
    ]
    + [""]
)
"""Goes before the program of a process that is to be patient."""


@contextmanager
def patient() -> Iterator[None]:
    """Make this process patient. A peer that was killed still refuses at once; a suspended one costs a minute."""
    with ExitStack() as stack:
        for limit in LIMITS:
            stack.enter_context(patch(limit, SECONDS))
        yield
