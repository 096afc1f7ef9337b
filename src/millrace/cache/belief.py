"""For how long what an origin said is believed."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Belief:
    """What was said may be `max_age` seconds old: 0 believes nothing, `inf` everything. False when it believes nothing."""

    max_age: float

    def __bool__(self) -> bool:
        return self.max_age > 0

    def oldest(self, now: float) -> float:
        """The earliest time at which what is believed now was asked."""
        return now - self.max_age

    def newest(self, now: float) -> float:
        """The latest such time.

        What was asked in the future was asked before the clock was put back: nobody knows how long ago.
        """
        return math.inf if self.max_age == math.inf else now

    def holds(self, asked: float, now: float) -> bool:
        """Whether what was asked at a time is believed now."""
        return self.max_age > 0 and self.oldest(now) <= asked <= self.newest(now)

    def until(self, asked: float) -> float:
        """When what was asked at a time ceases to be believed."""
        return asked + self.max_age


FOR_EVER = Belief(math.inf)
"""Of what cannot change: a file of a commit."""
