"""Fetched bytes are freed after the read, without waiting for the garbage collection."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.computed import ComputedOrigin
from typing_extensions import Buffer

from millrace.cache.node import CacheNode
from millrace.config import resolve
from millrace.filesystem.files import CachedFile
from millrace.store.records import BLOCK_BYTES

_BLOCKS = 8


class Copying(ComputedOrigin):
    """Like storage over a network, each answer is new memory; the test observes which of them are still alive."""

    def __init__(self) -> None:
        super().__init__({"k": _BLOCKS * BLOCK_BYTES})
        self._answers: list[weakref.ref[np.ndarray]] = []

    @property
    def alive(self) -> int:
        return sum(answer() is not None for answer in self._answers)

    def read(self, key: str, start: int, stop: int, *, version: str | None = None) -> Buffer:
        answer = np.array(memoryview(super().read(key, start, stop, version=version)))
        self._answers.append(weakref.ref(answer))
        return answer.data


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("capacity", [0, 1 << 30])
@pytest.mark.parametrize("sequential", [False, True])
def test_fetched_bytes_are_not_kept_in_memory(tmp_path: Path, capacity: int, sequential: bool) -> None:
    node = CacheNode(resolve({"cache_dir": str(tmp_path), "capacity": capacity, "min_free": 0}))
    origin: Any = Copying()
    try:
        with CachedFile(node.open_reader(origin, origin.head("k")), path="k", sequential=sequential) as file:
            while file.read(1 << 20):
                pass
        assert origin.bytes_read == _BLOCKS * BLOCK_BYTES
        deadline = time.monotonic() + 120
        while origin.alive and time.monotonic() < deadline:  # the thread that fetched the last one is ending
            time.sleep(0.01)
        assert not origin.alive
    finally:
        node.close()
