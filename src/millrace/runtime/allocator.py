"""Settings of glibc's allocator, which hold for the whole process. Without glibc they have no effect."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None)
_libc.malloc.argtypes, _libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
_libc.free.argtypes, _libc.free.restype = (ctypes.c_void_p,), None
_mallopt = getattr(_libc, "mallopt", None)

_M_ARENA_MAX = -8
_LEAST_ARENAS = 2
_KEPT_BYTES = 31 << 20  # glibc does not raise its limit for blocks of 32 MiB and more


def limit_arenas() -> None:
    """Limit glibc to one arena per core of the machine, and at least two. Call it before threads allocate memory.

    By default glibc makes up to eight per core, for the first threads that allocate, and each keeps some 20 MB of freed
    responses. It has no effect where glibc has fixed a limit before: for `MALLOC_ARENA_MAX`, or with more than eight
    arenas, as after `ray.init()` or work with many native threads.
    """
    if _mallopt is not None:
        _mallopt(_M_ARENA_MAX, max(_LEAST_ARENAS, os.cpu_count() or 1))


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks below 32 MiB, which it otherwise returns to the kernel, and receives zeroed page by page.

    glibc raises its limit by itself when a larger block than before is freed, as this function does; it takes 10 us. It
    respects the limits that the environment sets (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`).
    """
    _libc.free(_libc.malloc(_KEPT_BYTES))
