"""The arithmetic of the harness, pure: medians, spreads, ratios round by round, the order of the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of one figure over all rounds, and its extremes: with few rounds, more honest than a deviation."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError for no values."""
        if not values:
            raise ValueError("no values to take the median of")
        return cls(median(values), min(values), max(values))


def paired_ratio(values: Sequence[float], baseline: Sequence[float]) -> Spread | None:
    """`values[i] / baseline[i]`, round by round, then the median: what disturbs a whole round cancels out.

    None when there is nothing to compare, or a baseline of zero.
    """
    pairs = list(zip(values, baseline, strict=True))
    if not pairs or any(below == 0 for _, below in pairs):
        return None
    return Spread.of([above / below for above, below in pairs])


def round_order(names: Sequence[str], number: int) -> list[str]:
    """The contenders in the order of round `number`: each round begins one further, so none is always first."""
    start = number % len(names) if names else 0
    return [*names[start:], *names[:start]]


def short(value: float) -> str:
    """A figure with about three significant digits, without an exponent."""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    size = abs(value)
    return (
        f"{value:.0f}"
        if size >= 100
        else f"{value:.1f}"
        if size >= 10
        else f"{value:.2f}"
        if size >= 1
        else f"{value:.3f}"
    )


def with_spread(spread: Spread) -> str:
    """`median (low-high)`, or the median alone when they are the same."""
    middle, low, high = short(spread.median), short(spread.low), short(spread.high)
    return middle if low == high else f"{middle} ({low}–{high})"
