"""Hedging: how long to wait for a peer that is slower than usual before a second request goes to another holder.

Pure except for the stored paces of the peers.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from millrace.runtime import forks

SLOW_FACTOR = 4.0
LEAST_PATIENCE_SECONDS = 0.02
UNKNOWN_SECONDS = 0.05
"""The usual time of a peer without measurements."""

_NEWEST_SHARE = 0.2
_LOST_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace of a peer: its usual seconds to begin a response, and the number of lost races since `lost_since`."""

    usual: float = UNKNOWN_SECONDS
    lost: int = 0
    lost_since: float = 0.0

    @property
    def patience(self) -> float:
        """Seconds to wait for it before a second request."""
        return max(LEAST_PATIENCE_SECONDS, SLOW_FACTOR * self.usual)

    def answered(self, seconds: float) -> Pace:
        """The pace after a response that took `seconds` to begin."""
        return Pace(_towards(self.usual, seconds))

    def overtaken(self, seconds: float, now: float) -> Pace:
        """The pace after a race that another peer won."""
        return Pace(_towards(self.usual, seconds), self.lost + 1, self.lost_since if self.lost else now - seconds)

    def is_silent(self, now: float, deadline: float) -> bool:
        """Whether it lost several races and sent nothing for `deadline` seconds, which counts as a missed deadline."""
        return self.lost >= _LOST_IN_A_ROW and now - self.lost_since >= deadline


def _towards(usual: float, seconds: float) -> float:
    return usual + _NEWEST_SHARE * (seconds - usual)


class Paces:
    """The paces of all peers in one process. Thread-safe, and usable after a fork."""

    def __init__(self) -> None:
        self._paces: dict[str, Pace] = {}
        self._lock = threading.Lock()
        _after_fork.add(self)

    def patience(self, member_id: str) -> float:
        """Seconds to wait for a peer before a second request."""
        return self._paces.get(member_id, _UNKNOWN).patience

    def answered(self, member_id: str, seconds: float | None) -> None:
        """Record the seconds until a peer began its response; None if it had to fetch first."""
        with self._lock:
            pace = self._paces.get(member_id, _UNKNOWN)
            self._paces[member_id] = Pace(pace.usual) if seconds is None else pace.answered(seconds)

    def overtaken(self, member_id: str, seconds: float, now: float, deadline: float) -> bool:
        """Record a lost race after `seconds`; returns whether the peer counts as silent, and then starts a new count."""
        with self._lock:
            pace = self._paces.get(member_id, _UNKNOWN).overtaken(seconds, now)
            silent = pace.is_silent(now, deadline)
            self._paces[member_id] = Pace(pace.usual) if silent else pace
        return silent


_UNKNOWN = Pace()


def _new_lock(paces: Paces) -> None:
    paces._lock = threading.Lock()  # another thread of the parent may have held it


_after_fork = forks.objects_reset_in_child(_new_lock)
