"""How closely to look at a disk that another program fills, and how much to keep free beyond `min_free` meanwhile.

Pure: `evictor.py` looks and acts. What comes between two looks cannot be seen before it is there, so whatever came lately is
expected to come again: that much is freed in advance. A first burst out of nothing is seen after a close look at most, when
the disk was near `min_free`, and after a tick at most, when it was not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.cache.housekeeping import TICK_SECONDS

CLOSE_LOOK_SECONDS = 0.05
REMEMBERED_SECONDS = 2.0
"""How long a look says something about what is to come."""

_AVERAGED_SECONDS = 0.2  # a block of our own is on the disk a moment before the index says so
_SAFETY = 2  # a look may be late, and removing takes time


@dataclass(frozen=True, slots=True)
class Look:
    """What a disk looked like at one moment, as if nothing had been evicted: `left_bytes` free, `kept_bytes` in the store.

    `at` is in seconds of any clock that only goes on.
    """

    at: float
    left_bytes: int
    kept_bytes: int


def headroom(looks: Sequence[Look], *, min_free_bytes: int) -> int:
    """How many bytes beyond `min_free_bytes` to keep free: twice what others wrote between two close looks, when they wrote
    most. Never more than `min_free_bytes`. `looks` are in the order of time.
    """
    return min(int(_SAFETY * CLOSE_LOOK_SECONDS * _fastest(looks)), min_free_bytes)


def until_next_look(looks: Sequence[Look], *, free_bytes: int, min_free_bytes: int) -> float | None:
    """In how many seconds to look again; None: with the next tick.

    Closely from twice `min_free_bytes` on, or sooner, where others write so fast that two ticks might take them below.
    """
    may_come = _SAFETY * TICK_SECONDS * _fastest(looks)
    near = free_bytes < max(2 * min_free_bytes, min_free_bytes + may_come)
    return CLOSE_LOOK_SECONDS if near else None


def _fastest(looks: Sequence[Look]) -> float:
    """The most bytes a second that others wrote."""
    fastest = 0.0
    earlier = 0
    for look in looks[1:]:
        while looks[earlier + 1].at <= look.at - _AVERAGED_SECONDS:
            earlier += 1
        before = looks[earlier]
        fallen = before.left_bytes - look.left_bytes
        ours = max(0, look.kept_bytes - before.kept_bytes)
        fastest = max(fastest, (fallen - ours) / max(look.at - before.at, _AVERAGED_SECONDS))
    return fastest
