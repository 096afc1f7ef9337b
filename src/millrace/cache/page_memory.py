"""Pages of listings that a process has unpacked, since it opens many of their objects. No I/O.

To find one key in a page in the index takes some five microseconds; in a dict, one. Unpacking a page of a thousand keys
takes as long as looking up some fifty of them, so a page is unpacked when about as many were looked up. What is remembered
is what the page said, until somebody on this node changes something (the number of `signals.py`), and as old as the page.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import repeat

from millrace.cache.pages import Page

_MOST_KEYS = 1 << 16
_MOST_PAGES = 4096
_LOOK_UPS = 32
_PAUSE_SECONDS = 60.0

Remembered = tuple[int, str, float, float]
"""Size in bytes, version, time of modification, and when the origin was asked."""


class PageMemory:
    """What unpacked pages say of keys, by space. Thread-safe without a lock: each step is one operation on a dict.

    Holds up to 65,536 keys (some 400 bytes each) and a page more. When it is full, nothing is added for a minute, so that a
    data set of more keys does not drive itself out; then it begins anew.
    """

    def __init__(
        self,
        *,
        most_keys: int = _MOST_KEYS,
        look_ups: int = _LOOK_UPS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_keys = most_keys
        self._look_ups = look_ups
        self._clock = clock
        self._begin(0)

    def __len__(self) -> int:
        return sum(len(known) for known in list(self._known.values()))

    def find(self, space: bytes, key: str, changes: int) -> Remembered | None:
        """What a page of a space said of a key, as long as the number of changes is what it was then."""
        if changes != self._changes:
            return None
        known = self._known.get(space)
        return None if known is None else known.get(key)

    def note(self, space: bytes, at: bytes, value: memoryview, changes: int) -> None:
        """A key was found in this page, which lies under `at` in the index: unpack it when that was often so.

        `changes` is the number from before the page was read, when nothing was just being changed.
        """
        if changes != self._changes:
            self._begin(changes)
        count = self._counts.get(at, 0) + 1
        if count < self._look_ups:
            if len(self._counts) >= _MOST_PAGES:
                self._counts.clear()
            self._counts[at] = count
        elif len(self) < self._most_keys:
            self._counts.pop(at, None)
            page = Page(value)
            if not page.incomplete:  # no object of it is struck out
                positions, sizes, versions, times = page.columns()
                known = self._known.setdefault(space, {})
                known.update(zip(positions, zip(sizes, versions, times, repeat(page.asked), strict=False), strict=True))
        elif self._clock() >= self._since + _PAUSE_SECONDS:
            self._begin(changes)

    def _begin(self, changes: int) -> None:
        # In this order: whoever finds the new number finds nothing of before.
        self._counts: dict[bytes, int] = {}
        self._known: dict[bytes, dict[str, Remembered]] = {}
        self._since = self._clock()
        self._changes = changes
