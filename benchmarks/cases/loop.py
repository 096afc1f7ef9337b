"""Epochs over twice the cache through the real store: hits compared with the optimum, and the cost of decisions.

The origin computes its bytes, so that only the cache's own work is measured. No bytes are held in memory beside the store.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.harness import Case, Measure, Options, Prepared

_LARGE, _SMALL = 16 << 20, 64 << 10
_PROBE_BYTES = 4096  # of each object at both ends, which are checked


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    capacity = (128 << 20) if options.quick else (1 << 30)
    epochs = 2 if options.quick else 3
    yield Prepared(
        {"capacity": capacity, "epochs": epochs},
        notes=(
            f"A cache of {capacity >> 20} MiB; each data set has twice as much, half of it in objects of {_LARGE >> 20} MiB "
            f"and half in such of {_SMALL >> 10} KiB; one thread; the first epoch fills the cache.",
            "'Optimum' is capacity / data set, which no policy exceeds in a loop; CPU a GB that was read, hits and misses.",
        ),
    )


case = Case(name="loop", title="A loop over twice the cache", prepare=prepare, baseline="the origin, without a cache")

ReadObject = Callable[[str, int], Any]


def _sizes(capacity: int, name: str) -> dict[str, int]:
    return {f"data/{name}/{number:05}-large": _LARGE for number in range(capacity // _LARGE)} | {
        f"data/{name}/{number:05}-small": _SMALL for number in range(capacity // _SMALL)
    }


def _loops(measure: Measure, context: Mapping[str, Any], make: Callable[[Any], ReadObject]) -> int:
    from tests.support.computed import ComputedOrigin

    capacity, epochs = context["capacity"], context["epochs"]
    old, new = _sizes(capacity, "old"), _sizes(capacity, "new")
    origin = ComputedOrigin(old | new)
    read = make(origin)
    seen = 0

    def epoch(sizes: dict[str, int], seed: int | None = None) -> None:
        nonlocal seen
        keys = sorted(sizes)
        if seed is not None:
            random.Random(seed).shuffle(keys)
        for key in keys:
            data = memoryview(read(key, sizes[key])).cast("B")
            seen += zlib.crc32(data[:_PROBE_BYTES]) + zlib.crc32(data[-_PROBE_BYTES:])

    def phase(name: str, rounds: list[Callable[[], None]]) -> None:
        with measure(name) as figures:
            before = origin.bytes_read
            for one in rounds:
                one()
            nbytes = len(rounds) * 2 * capacity
            ratio = 1 - (origin.bytes_read - before) / nbytes
            figures["hit ratio"] = ratio
            figures["of the optimum"] = ratio / 0.5
            figures["GB"] = nbytes / 1e9

    phase("first epoch", [lambda: epoch(old)])
    phase("epochs in order", [lambda: epoch(old)] * epochs)
    phase("epochs shuffled", [lambda seed=seed: epoch(old, seed) for seed in range(epochs)])
    phase("first epoch of a new data set", [lambda: epoch(new)])
    phase("epochs of the new data set", [lambda: epoch(new)] * epochs)
    return seen


def _cached(context: Mapping[str, Any], *, evicts: bool) -> Callable[[Any], ReadObject]:
    from millrace.cache.disk import HeldBlocks
    from millrace.cache.node import cache_node
    from millrace.config import resolve

    node = cache_node(
        resolve(
            {"cache_dir": f"{context['scratch']}/cache", "capacity": context["capacity"], "min_free": 0},
            environ={},
            file={},
        )
    )
    disk = node.open_disks[0]
    disk.held = HeldBlocks(0)
    if not evicts:
        disk.evictor.reserve = lambda nbytes, candidate: disk.store.space.reserve(nbytes)  # type: ignore[method-assign]

    def make(origin: Any) -> ReadObject:
        def read(key: str, size: int) -> Any:
            info = origin.head(key)
            found = node.find_native(origin, info)
            if found is not None:
                return found.buffer
            reader = node.open_reader(origin, info)
            try:
                return reader.read(0, size)
            finally:
                reader.close()

        return read

    return make


@case.contender("the origin, without a cache")
def direct(measure: Measure, context: Mapping[str, Any]) -> int:
    return _loops(measure, context, lambda origin: lambda key, size: bytes(origin.read(key, 0, size)))


@case.contender("Millrace that never evicts")
def keeping(measure: Measure, context: Mapping[str, Any]) -> int:
    return _loops(measure, context, _cached(context, evicts=False))


@case.contender("Millrace")
def evicting(measure: Measure, context: Mapping[str, Any]) -> int:
    return _loops(measure, context, _cached(context, evicts=True))
