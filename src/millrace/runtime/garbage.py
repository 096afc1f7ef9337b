"""The memory management of the process: pauses of the garbage collector, and freed memory that glibc keeps."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from typing import TypeVar

from millrace.runtime import forks

Value = TypeVar("Value")

_libc = ctypes.CDLL(None)
_libc.malloc.argtypes, _libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
_libc.free.argtypes, _libc.free.restype = (ctypes.c_void_p,), None
_mallopt = getattr(_libc, "mallopt", None)

_M_ARENA_MAX = -8
_LEAST_ARENAS = 2
_KEPT_BYTES = 8 << 20  # several encoded chunks; glibc keeps up to twice as much

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


def _resume_in_child() -> None:
    """A forked process (such as a data loader's worker) does not have the threads that would end the pauses."""
    global _lock, _pauses
    _lock = threading.Lock()
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


forks.reset_in_child(_resume_in_child)


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pause cyclic garbage collection, of all threads, while many long-lived objects are created.

    Each of tens of thousands of tensors needs a few dozen objects. The collector visits all of them repeatedly, which takes
    longer than their creation. The block must be short and must not wait for storage. Thread-safe, may be nested; a disabled
    collector stays disabled.
    """
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()


def each_paused(values: Iterator[Value]) -> Iterator[Value]:
    """The same values, with garbage collection paused while each is created, but not while it is used."""
    while True:
        with collection_paused():
            try:
                value = next(values)
            except StopIteration:
                return
        yield value


def limit_arenas() -> None:
    """Limit glibc to one arena per core of the machine, and at least two. Call it before threads allocate memory.

    By default glibc makes up to eight per core, for the first threads that allocate, and each keeps some 20 MB of freed
    responses. The limit is that of the whole process. It has no effect without glibc, and none where glibc has fixed a limit
    before: for `MALLOC_ARENA_MAX`, or with more than eight arenas, as after `ray.init()` or work with many native threads.
    """
    if _mallopt is not None:
        _mallopt(_M_ARENA_MAX, max(_LEAST_ARENAS, os.cpu_count() or 1))


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks below 8 MiB, which it otherwise returns to the kernel, and receives zeroed page by page.

    glibc raises its limit by itself, up to 32 MiB, when a larger block than before is freed, as this function does; it takes
    10 us. It respects the limits that the environment sets (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`).
    """
    _libc.free(_libc.malloc(_KEPT_BYTES))
