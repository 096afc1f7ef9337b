"""Requests that were read before, but for their range: a client asks the same way again and again.

To take a head apart costs more than to send 64 KiB. So what a framed `GET` said is kept under its own bytes without the line
of its range, after it was found right by `wire.parse_request` and `wire.parse_get`; the next one that is the same, byte for
byte, says the same.
"""

from __future__ import annotations

import re

from millrace.peers.wire import ByteRange, Get, Request

_MAX_KEPT = 4096

_LINE = b"\r\nRange: bytes="
_RANGE = re.compile(rb"(\d{1,18})-(\d{1,18})\r\n")

# A request with one of these needs more than its blocks.
_SPECIAL = frozenset(("connection", "content-length", "expect"))


class RepeatedRequests:
    """Recent requests of all connections of a server. Thread-safe. Holds whole heads, tokens included."""

    def __init__(self, *, max_kept: int = _MAX_KEPT) -> None:
        self._known: dict[bytes, Get] = {}
        self._max_kept = max_kept

    def __len__(self) -> int:
        return len(self._known)

    def find(self, head: bytes) -> Get | None:
        """What a request says that was kept with another range; None: read it."""
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
        return Get(get[0], (ByteRange(start, stop, 0),), get[2], get[3], get[4], get[5], get[6], get[7])

    def keep(self, head: bytes, request: Request, get: Get) -> None:
        """Keep what a request said, if it is one for one framed range and nothing else."""
        if not get.wire or len(get.ranges) != 1 or _SPECIAL & request.headers.keys():
            return
        place = head.find(_LINE)
        match = None if place < 0 else _RANGE.match(head, place + len(_LINE))
        if match is None:
            return
        if len(self._known) >= self._max_kept:
            self._known = {}
        self._known[head[:place] + head[match.end() - 2 :]] = get
