"""How long a request to an origin is tried."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Patience:
    """`seconds` of trouble (failing tries, pauses after them, a closed gate) after which no further try begins, and the most
    `tries` of a request that fails. What an origin refuses because it is busy counts by time alone.

    Waiting for a turn behind other requests is no trouble: a node that has much to read waits as long as it takes.
    """

    seconds: float = 60.0
    tries: int = 12


PATIENCE = Patience()
"""What holds for every request. A server that restarts is waited for 10 to 20 seconds; one that refuses connections for
about half a minute, or does not answer for a minute, is an error. Looked up at each request: a test can change it."""
