"""Limits and retries the requests of a node to an origin. Works around any `Origin`.

Key terms:
- slot: one request in flight; all processes of a node share the slots of an origin.
- gate: closed for the whole node while the origin requests a pause (429, 503).
- retry: one operation is retried until it succeeds or the patience ends.

Start reading in `limited.py`, then `retrying.py`, `slots.py` and `node_state.py`.
"""

from millrace.origin.limits.limited import LimitedOrigin, Limits, limited, requests_in_flight

__all__ = ["LimitedOrigin", "Limits", "limited", "requests_in_flight"]
