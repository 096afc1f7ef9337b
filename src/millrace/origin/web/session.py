"""What one process has open and has learnt about web servers."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping

from millrace.errors import OriginUnavailableError
from millrace.origin.web.addresses import shown
from millrace.origin.web.connections import Connections
from millrace.origin.web.options import WebOptions
from millrace.origin.web.whole import WholeCopies

_REMEMBERED = 16_384


class SizeDiffersError(OriginUnavailableError):
    """An answer gives a version another size than it had before: `size` in bytes."""

    size = 0


class Session:
    """Connections, copies of objects without ranges, and memories. Thread-safe; for the process that made it (`pid`).

    `without_head` are servers that refuse HEAD; `netrc` has the login of each server; `routes` says where an address
    redirects, and until when (monotonic seconds) that is believed.
    """

    def __init__(self, options: WebOptions) -> None:
        self.pid = os.getpid()
        self.connections = Connections(
            verify=options.verify, silence_seconds=options.timeout_seconds, use_proxies=options.trusts_environment
        )
        self.whole = WholeCopies()
        self.without_head: set[str] = set()
        self.netrc: dict[str, Mapping[str, str]] = {}
        self.routes: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._sizes: OrderedDict[str, tuple[str, int]] = OrderedDict()

    def note_route(self, url: str, target: str, until: float) -> None:
        self.routes[url] = (target, until)
        while len(self.routes) > _REMEMBERED:
            self.routes.popitem(last=False)

    def note_size(self, url: str, version: str, size: int) -> None:
        """Remember what a description said."""
        self._sizes[url] = (version, size)
        while len(self._sizes) > _REMEMBERED:
            self._sizes.popitem(last=False)

    def check_size(self, url: str, version: str, size: int) -> None:
        """Raise `SizeDiffersError` where an answer gives a version another size than before, as a part of it would."""
        known_version, known_size = self._sizes.get(url, ("", 0))
        if known_version == version and known_size != size:
            error = SizeDiffersError(
                f"{shown(url)} has {size} bytes instead of {known_size} in the same version",
                next_step="read again; if it persists, a proxy in between truncates bodies",
            )
            error.size = size
            raise error
        self.note_size(url, version, size)
