"""Copies a state into existing memory, with several threads for large tensors."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from millrace.checkpoint.state.tensors import as_integers, dense

# Keeps the interpreter lock: for tens of thousands of small tensors, half a microsecond each.
_copy_at_once = ctypes.PyDLL(None).memmove
# Releases the interpreter lock, which pays off from some hundred KiB.
_copy = ctypes.CDLL(None).memmove
for _function in (_copy_at_once, _copy):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _function.restype = None

_LARGE_BYTES = 256 << 10
_PIECE_BYTES = 8 << 20
# Starting a thread takes about 100 us, as long as copying this many bytes.
_BYTES_FOR_A_THREAD = 4 << 20
# Two cores saturate the memory bus of a small machine, four nearly that of a socket.
_MAX_THREADS = 4


CopyJob = tuple[int, int, int]
"""Target address, source address, number of bytes."""


def copy_memory(jobs: Iterable[CopyJob]) -> None:
    """Carry out all jobs in the memory of this process. The caller keeps the memory alive.

    No thread writes after the return, not even after an interrupt.
    """
    pieces: deque[CopyJob] = deque()
    total = 0
    for target, source, nbytes in jobs:
        if nbytes < _LARGE_BYTES:
            _copy_at_once(target, source, nbytes)
            continue
        total += nbytes
        pieces.extend(
            (target + at, source + at, min(_PIECE_BYTES, nbytes - at)) for at in range(0, nbytes, _PIECE_BYTES)
        )
    helpers = [
        threading.Thread(target=_copy_pieces, args=(pieces,), name="millrace-staging", daemon=True)
        for _ in range(min(_MAX_THREADS, len(os.sched_getaffinity(0)), 1 + total // _BYTES_FOR_A_THREAD) - 1)
    ]
    started: list[threading.Thread] = []
    try:
        for helper in helpers:
            helper.start()
            started.append(helper)
        _copy_pieces(pieces)
    finally:
        pieces.clear()
        for helper in started:
            helper.join()


def _copy_pieces(pieces: deque[CopyJob]) -> None:
    while True:
        try:
            target, source, nbytes = pieces.popleft()
        except IndexError:
            return
        _copy(target, source, nbytes)


def copy_tensors(pairs: Iterable[tuple[str, Any, Any]]) -> None:
    """Copy each `(key, source, target)` with torch, from any device and layout. Returns when all copies are complete."""
    by_device: dict[Any, list[tuple[str, Any, Any]]] = {}
    for pair in pairs:
        by_device.setdefault(pair[1].device, []).append(pair)
    for device, members in by_device.items():
        if device.type == "cuda":
            _copy_from_gpu(device, members)
        else:
            _copy_values(members)


def _copy_values(members: Iterable[tuple[str, Any, Any]], *, non_blocking: bool = False) -> None:
    for key, source, target in members:
        # As integers: torch cannot copy every dtype, and the bits of NaN values must not change.
        as_integers(target).copy_(as_integers(dense(source, key)), non_blocking=non_blocking)


def _copy_from_gpu(device: Any, members: Iterable[tuple[str, Any, Any]]) -> None:
    """Copy on a separate stream, after all queued work of the training loop. The tests do not cover it without a GPU."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        _copy_values(members, non_blocking=True)
    stream.synchronize()
