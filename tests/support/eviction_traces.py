"""Traces of accesses to a cache, for the test bench of eviction: epochs, skewed access, and mixtures.

A trace is a value; the same arguments make the same one. `units` scales it: it is the number of units of 64 MiB that the
cache holds (or the like, where sizes differ).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

UNITS = 500
"""The default capacity of the cache of a trace, in units of 64 MiB."""

_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Accesses to whole units, by number. `nbytes` and `groups` are indexed by the unit's number.

    Hits count from `measured_from` on: earlier accesses fill the cache.
    """

    name: str
    accesses: Sequence[int]
    nbytes: Sequence[int]
    groups: Sequence[int]
    capacity_bytes: int
    measured_from: int


def _trace(
    name: str,
    accesses: Sequence[int],
    *,
    measured_from: int,
    units: int,
    nbytes: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
    capacity_bytes: int = 0,
) -> Trace:
    """By default, units of one size and one group, and space for `units` of them."""
    count = max(accesses) + 1
    return Trace(
        name=name,
        accesses=accesses,
        nbytes=nbytes or [_NBYTES] * count,
        groups=groups or [0] * count,
        capacity_bytes=capacity_bytes or units * _NBYTES,
        measured_from=measured_from,
    )


def _epochs(units: Sequence[int], count: int, shuffled: bool, generator: random.Random) -> list[int]:
    accesses: list[int] = []
    order = list(units)
    for _ in range(count):
        if shuffled:
            generator.shuffle(order)
        accesses += order
    return accesses


def _zipf(count: int, alpha: float, length: int, generator: random.Random) -> list[int]:
    """Ranks from 0 on, with a probability that falls as 1 / (rank + 1) ** alpha."""
    cumulated = list(accumulate(1 / (rank + 1) ** alpha for rank in range(count)))
    return generator.choices(range(count), cum_weights=cumulated, k=length)


def epochs(
    ratio: float, *, shuffled: bool = False, count: int = 6, units: int = UNITS, lone: bool = False, seed: int = 1
) -> Trace:
    """Epochs over a data set `ratio` times the cache, measured from the second on. `lone`: every unit its own group."""
    size = int(ratio * units)
    accesses = _epochs(range(size), count, shuffled, random.Random(seed))
    name = f"{'shuffled ' if shuffled else ''}loop {ratio:g}x{', lone objects' if lone else ''}"
    return _trace(name, accesses, measured_from=size, units=units, groups=range(size) if lone else None)


def mixed_epochs(ratio: float, *, count: int = 6, units: int = UNITS, seed: int = 1) -> Trace:
    """The same, shuffled, over sizes from 26 KB to 1 GB, evenly by their logarithm. Large ones hold most of the bytes."""
    generator = random.Random(seed)
    size = int(ratio * units)
    nbytes = [int(26_000 * (1e9 / 26_000) ** generator.random()) for _ in range(size)]
    return _trace(
        f"shuffled loop {ratio:g}x, mixed sizes",
        _epochs(range(size), count, True, generator),
        measured_from=size,
        units=units,
        nbytes=nbytes,
        capacity_bytes=int(sum(nbytes) / ratio),
    )


def zipf(alpha: float, *, mixed: bool = False, units: int = UNITS, seed: int = 1) -> Trace:
    """Skewed access to ten times the cache; each unit keeps its popularity. `mixed`: sizes from 26 KB to 1 GB."""
    generator = random.Random(seed)
    count = 10 * units
    names = list(range(count))
    generator.shuffle(names)
    accesses = [names[rank] for rank in _zipf(count, alpha, 80 * units, generator)]
    nbytes = [int(26_000 * (1e9 / 26_000) ** generator.random()) for _ in range(count)] if mixed else None
    return _trace(
        f"Zipf {alpha:g}{', mixed sizes' if mixed else ''}",
        accesses,
        measured_from=20 * units,
        units=units,
        nbytes=nbytes,
        capacity_bytes=sum(nbytes) // 10 if nbytes else 0,
    )


def drifting_zipf(alpha: float, *, lifetime: float, units: int = UNITS, seed: int = 1) -> Trace:
    """Zipf whose ranks move on by one so often that a unit is among the first tenth for `lifetime` capacities of traffic."""
    generator = random.Random(seed)
    count = 10 * units
    ranks = _zipf(count, alpha, 80 * units, generator)
    accesses = [(rank + int(number / lifetime)) % count for number, rank in enumerate(ranks)]
    return _trace(f"drifting Zipf {alpha:g}, {lifetime:g}", accesses, measured_from=20 * units, units=units)


def scan_over_hot_set(*, units: int = UNITS, seed: int = 1) -> Trace:
    """Zipf over half a cache, interleaved with one pass over ten times the cache."""
    generator = random.Random(seed)
    hot = _zipf(units // 2, 0.8, 15 * units, generator)
    size = 10 * units
    scan = range(units // 2, units // 2 + size)
    both = [unit for pair in zip(hot[-size:], scan, strict=True) for unit in pair]
    groups = [0] * (units // 2) + [1] * size
    return _trace("scan over a hot set", hot[:-size] + both, measured_from=len(hot) - size, units=units, groups=groups)


def new_data_set(ratio: float = 2, *, units: int = UNITS, seed: int = 1) -> Trace:
    """Four shuffled epochs over one data set, then over another, measured from the second epoch of that one on."""
    generator = random.Random(seed)
    size = int(ratio * units)
    old, new = range(size), range(size, 2 * size)
    accesses = _epochs(old, 4, True, generator) + _epochs(new, 4, True, generator)
    groups = [0] * size + [1] * size
    return _trace(f"new data set {ratio:g}x", accesses, measured_from=5 * size, units=units, groups=groups)


def new_subset(*, units: int = UNITS, seed: int = 1) -> Trace:
    """Four epochs over one half of a data set, six over the other; both as large as the cache. Measured over the last."""
    generator = random.Random(seed)
    accesses = _epochs(range(units), 4, True, generator) + _epochs(range(units, 2 * units), 6, True, generator)
    return _trace("new half of a data set", accesses, measured_from=9 * units, units=units)


def training_and_validation(*, units: int = UNITS, seed: int = 1) -> Trace:
    """Twice the cache, then half of it, in turns. Measured from the third turn on."""
    generator = random.Random(seed)
    train, validation = range(2 * units), range(2 * units, 2 * units + units // 2)
    accesses: list[int] = []
    for _ in range(6):
        accesses += _epochs(train, 1, True, generator) + list(validation)
    groups = [0] * len(train) + [1] * len(validation)
    return _trace("training and validation", accesses, measured_from=len(accesses) // 3, units=units, groups=groups)


def two_jobs(*, lag: float = 0.5, units: int = UNITS, seed: int = 1) -> Trace:
    """Two jobs read the same data set, twice the cache, in the same order, the second `lag` caches behind the first."""
    size = 2 * units
    one = _epochs(range(size), 6, False, random.Random(seed))
    behind = int(lag * units)
    pairs = zip(one[behind:], one, strict=False)
    accesses = one[:behind] + [unit for pair in pairs for unit in pair]
    return _trace(f"two jobs, {lag:g} apart", accesses, measured_from=2 * size, units=units)


def all_traces(*, units: int = UNITS) -> tuple[Trace, ...]:
    """Every kind of trace once or more: those of the design page's table."""
    return (
        *(epochs(ratio, shuffled=shuffled, units=units) for ratio in (1.25, 2, 4) for shuffled in (False, True)),
        epochs(2, lone=True, units=units),
        epochs(10, shuffled=True, count=4, units=units),
        mixed_epochs(2, units=units),
        *(zipf(alpha, units=units) for alpha in (0.8, 1.1)),
        zipf(0.8, mixed=True, units=units),
        *(drifting_zipf(1.1, lifetime=lifetime, units=units) for lifetime in (3, 10, 30)),
        drifting_zipf(0.8, lifetime=10, units=units),
        scan_over_hot_set(units=units),
        new_data_set(units=units),
        new_subset(units=units),
        training_and_validation(units=units),
        *(two_jobs(lag=lag, units=units) for lag in (0.25, 0.5, 1)),
    )
