"""Rates and hit ratios from counters. Pure functions; the counters are those of `millrace.cache.counters`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from millrace.figures import growth, hit_ratio, size_text

RATES = {
    "cache_bytes": "from the cache",
    "peer_bytes": "from other nodes",
    "origin_bytes": "from the origin",
    "served_bytes": "to other nodes",
    "moved_bytes": "moved between nodes",
}
"""The counters of bytes that are shown as rates, in this order, with their names for people."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The growth of counters per second. `hit_ratio` is None if nothing was read."""

    per_second: Mapping[str, float]
    hit_ratio: float | None


def rates(before: Mapping[str, int], now: Mapping[str, int], seconds: float) -> Rates:
    """The rates between two readings of counters that are `seconds` apart.

    A counter that is lower than before was reset with its cache: it counts from zero.
    """
    return _per_second(growth(before, now), seconds)


def rates_of_all(
    before: Mapping[str, Mapping[str, int]], now: Mapping[str, Mapping[str, int]], seconds: float
) -> Rates:
    """The rates of all nodes together. A node that is missing in one of the readings does not count."""
    total: Counter[str] = Counter()
    for node in set(before) & set(now):
        total.update(growth(before[node], now[node]))
    return _per_second(total, seconds)


def _per_second(grown: Mapping[str, int], seconds: float) -> Rates:
    return Rates(
        per_second={name: difference / seconds if seconds > 0 else 0.0 for name, difference in grown.items()},
        hit_ratio=hit_ratio(grown),
    )


def ratio_text(ratio: float | None) -> str:
    """`97.3%`, or `-`."""
    return "-" if ratio is None else f"{100 * ratio:.1f}%"


def rate_lines(now: Rates) -> list[str]:
    """The rates that are not zero, one line each, and first the hit ratio."""
    lines = [] if now.hit_ratio is None else [f"{'hit ratio now':20s} {ratio_text(now.hit_ratio):>10s}"]
    for name, text in RATES.items():
        if now.per_second.get(name):
            lines.append(f"{text:20s} {size_text(now.per_second[name]):>8s}/s")
    return lines or ["no reads now"]


def total_lines(counters: Mapping[str, int]) -> list[str]:
    """The counters that are not zero, one line each."""
    return [f"{name.replace('_', ' '):20s} {value:>20,}" for name, value in counters.items() if value]
