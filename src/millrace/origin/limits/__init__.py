"""Limits and retries the requests of a node to an origin. `LimitedOrigin` (`base.py`) imports it with the first request.

Key terms:
- slot: one request in flight; all processes of a node share the slots of an origin.
- gate: closed for the whole node while the origin requests a pause (429, 503).
- retry: one operation is retried until it succeeds or the patience ends.

Start reading in `retrying.py`, then `slots.py`.
"""
