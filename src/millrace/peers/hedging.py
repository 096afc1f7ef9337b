"""When a peer is slower than it uses to be: how long to wait for it before somebody else is asked as well.

Pure but for the memory of what each peer took.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass

SLOW_FACTOR = 4.0
LEAST_PATIENCE_SECONDS = 0.02
UNKNOWN_SECONDS = 0.05
"""What a peer is taken to need that was never asked."""

_NEWEST_SHARE = 0.2
_LOST_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class Pace:
    """How a peer did of late: its usual seconds to begin an answer, and how many it did not answer since `lost_since`."""

    usual: float = UNKNOWN_SECONDS
    lost: int = 0
    lost_since: float = 0.0

    @property
    def patience(self) -> float:
        """How long to wait for it alone, in seconds."""
        return max(LEAST_PATIENCE_SECONDS, SLOW_FACTOR * self.usual)

    def answered(self, seconds: float) -> Pace:
        """The pace after an answer that took so long to begin."""
        return Pace(_towards(self.usual, seconds))

    def overtaken(self, seconds: float, now: float) -> Pace:
        """The pace after another answered first, and this peer was not waited for any longer."""
        return Pace(_towards(self.usual, seconds), self.lost + 1, self.lost_since if self.lost else now - seconds)

    def is_silent(self, now: float, deadline: float) -> bool:
        """Whether it was asked several times and has said nothing for `deadline` seconds: as good as a missed deadline."""
        return self.lost >= _LOST_IN_A_ROW and now - self.lost_since >= deadline


def _towards(usual: float, seconds: float) -> float:
    return usual + _NEWEST_SHARE * (seconds - usual)


class Paces:
    """The paces of all peers, as one process knows them. Thread-safe, and usable after a fork."""

    def __init__(self) -> None:
        self._paces: dict[str, Pace] = {}
        self._lock = threading.Lock()
        _after_fork.add(self)

    def patience(self, member_id: str) -> float:
        """How long to wait for a peer alone, in seconds."""
        return self._paces.get(member_id, _UNKNOWN).patience

    def answered(self, member_id: str, seconds: float | None) -> None:
        """A peer began its answer after so long; None where it had to fetch first, which says nothing of itself."""
        with self._lock:
            pace = self._paces.get(member_id, _UNKNOWN)
            self._paces[member_id] = Pace(pace.usual) if seconds is None else pace.answered(seconds)

    def overtaken(self, member_id: str, seconds: float, now: float, deadline: float) -> bool:
        """Another answered first after this one had so long; whether it is silent, which begins anew then."""
        with self._lock:
            pace = self._paces.get(member_id, _UNKNOWN).overtaken(seconds, now)
            silent = pace.is_silent(now, deadline)
            self._paces[member_id] = Pace(pace.usual) if silent else pace
        return silent


_UNKNOWN = Pace()

_after_fork: weakref.WeakSet[Paces] = weakref.WeakSet()


def _new_locks() -> None:
    # Another thread of the parent may have held one.
    for paces in _after_fork:
        paces._lock = threading.Lock()


os.register_at_fork(after_in_child=_new_locks)
