"""Figures for people: amounts and lists as text, and the hit ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def size_text(nbytes: float) -> str:
    """An amount of bytes with three digits: `512 B`, `26.1 kB`, `1.20 GB`."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes /= 1000
        del units[0]
    digits = 0 if units[0] == "B" or nbytes >= 99.95 else 1 if nbytes >= 9.995 else 2
    return f"{nbytes:.{digits}f} {units[0]}"


def listed(names: Sequence[str], most: int) -> str:
    """The first `most` names, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def hit_ratio(counters: Mapping[str, int]) -> float | None:
    """The share of the bytes read on a machine that came from its own cache; None before the first read."""
    cached = counters.get("cache_bytes", 0)
    fetched = counters.get("origin_bytes", 0) + counters.get("peer_bytes", 0) - counters.get("relayed_bytes", 0)
    read = cached + max(0, fetched)
    return cached / read if read else None


def growth(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """The differences between two readings of counters. One that is lower than before was reset: it counts from zero."""
    grown = {name: value - before.get(name, 0) for name, value in now.items()}
    return {name: now[name] if difference < 0 else difference for name, difference in grown.items()}
