"""What is free on the disk of a store, beyond what must be: `min_free`, and headroom while another program writes."""

from __future__ import annotations

import time
from collections import deque

from millrace.cache.headroom import REMEMBERED_SECONDS, Look, headroom, until_next_look
from millrace.cache.store import Store

_UNSEEN_SECONDS = 2.0  # until other processes let go of a removed file, see `Disk.tidy`


class FreeSpace:
    """Remembers what the disk looked like and what was removed from it. `look` by one thread, `removed` by one evictor."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._looks: deque[Look] = deque()
        self._evicted = 0  # bytes, by this process, so far
        self._came_free = 0  # of these
        self._unseen: list[tuple[float, int]] = []
        self.headroom = 0
        """How many bytes beyond `min_free` are to be free, as the last look found."""

    def look(self) -> float | None:
        """See how free the disk is, and how much headroom that asks for.

        Gives in how many seconds to look again, None: with the next tick.
        """
        free, min_free = self._store.free_bytes(), self._store.min_free_bytes()
        now, kept = time.monotonic(), self._store.index.used_bytes()
        while self._looks and self._looks[0].at < now - REMEMBERED_SECONDS:
            self._looks.popleft()
        self._looks.append(Look(now, free - self._came_free, kept + self._evicted))
        looks = list(self._looks)
        self.headroom = headroom(looks, min_free_bytes=min_free)
        return until_next_look(looks, free_bytes=free, min_free_bytes=min_free)

    def too_little(self) -> int:
        """How many bytes have to go for `min_free`: what went a moment ago may still be held by maps of other processes."""
        now = time.monotonic()
        self._unseen = [(until, nbytes) for until, nbytes in self._unseen if until > now]
        return self._store.min_free_bytes() - self._store.free_bytes() - sum(nbytes for _, nbytes in self._unseen)

    def short_of_headroom(self, nbytes: int) -> int:
        """How many bytes have to go before `nbytes` more leave the headroom, where there is to be any."""
        return self.too_little() + self.headroom + nbytes if self.headroom else 0

    def removed(self, nbytes: int, came_free: int) -> None:
        """Note that `nbytes` were removed, and how many bytes were free after it that were not before."""
        self._evicted += nbytes
        # Others write at the same time: all came free, or nothing.
        if came_free >= nbytes // 2:
            self._came_free += nbytes
        else:
            self._unseen.append((time.monotonic() + _UNSEEN_SECONDS, nbytes))
