"""Parsed requests, for repeated requests that differ only in their range.

Parsing a head costs more than sending 64 KiB. Therefore a valid framed `GET` is kept under the bytes of its head without the
`Range` line. A later head with the same bytes is not parsed again.
"""

from __future__ import annotations

import re

from millrace.cluster.dataplane.wire import Get, Request

_MAX_KEPT = 4096

_LINE = b"\r\nRange: bytes="
_RANGE = re.compile(rb"(\d{1,18})-(\d{1,18})\r\n")

# Requests with one of these headers need more than blocks.
_SPECIAL = frozenset(("connection", "content-length", "expect"))


class RepeatedRequests:
    """Recent requests of all connections of a server. Thread-safe. Contains whole heads, including tokens."""

    def __init__(self, *, max_kept: int = _MAX_KEPT) -> None:
        self._known: dict[bytes, Get] = {}
        self._max_kept = max_kept

    def __len__(self) -> int:
        return len(self._known)

    def find(self, head: bytes) -> Get | None:
        """The parsed request for a head that was kept with another range; None if it must be parsed."""
        place = head.find(_LINE)
        if place < 0:
            return None
        match = _RANGE.match(head, place + len(_LINE))
        if match is None:
            return None
        get = self._known.get(head[:place] + head[match.end() - 2 :])
        if get is None:
            return None
        start, stop = int(match[1]), int(match[2]) + 1
        if stop <= start:
            return None
        return Get(get[0], (start, stop), get[2], get[3], get[4], get[5], get[6])

    def keep(self, head: bytes, request: Request, get: Get) -> None:
        """Keep a parsed request, if it is for a framed range and nothing else."""
        if _SPECIAL & request.headers.keys():
            return
        place = head.find(_LINE)
        match = None if place < 0 else _RANGE.match(head, place + len(_LINE))
        if match is None:
            return
        if len(self._known) >= self._max_kept:
            self._known = {}
        self._known[head[:place] + head[match.end() - 2 :]] = get
