"""Host memory of staged states: one mapping for all tensors of a state, reused by later saves.

The memory can be shared: a saver process with its descriptor reads the same pages. Private memory is a little faster.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch

from millrace.errors import StorageError
from millrace.runtime import forks

# From Linux's <asm-generic/mman-common.h>. Python's mmap does not define them.
_MADV_WIPEONFORK = 18
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_ALIGNMENT = 64

_map = ctypes.PyDLL(None).mmap
_map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_map.restype = ctypes.c_void_p


class Region(NamedTuple):
    """Shareable memory: `nbytes` from `address`, with a descriptor. `number` is unique in this process."""

    number: int
    address: int
    nbytes: int
    descriptor: int


# Every region in use. Saving threads read it while the training thread adds and removes regions. The methods of a dict are
# atomic, and a fork could copy a lock in its locked state.
_regions: dict[int, Region] = {}
_numbers = itertools.count()


def regions() -> tuple[Region, ...]:
    """The regions in use. A region exists as long as there is a reference to one of its tensors."""
    return tuple(_regions.values())


def aligned(nbytes: int) -> int:
    """The size of `nbytes` in an arena, with alignment."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Arena:
    """`nbytes` of memory, freed when there is no reference to the arena or one of its tensors.

    A forked process finds zeros in it. So a fork cannot keep the memory or change a state during its save, and the first
    staging after a data loader has forked its workers is not slower. Not thread-safe. Raises `StorageError` if the system
    refuses the memory.
    """

    def __init__(self, nbytes: int, *, pinned: bool, shared: bool = False) -> None:
        self.nbytes, self.pinned = nbytes, pinned
        self._number = next(_numbers)
        memory = _shared(nbytes, self._number) if shared and nbytes else None
        if memory is None:
            # Without shared memory, saves do not use a saver process.
            try:
                mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise StorageError(
                    f"{nbytes} bytes of host memory for the copy of a state cannot be allocated ({error.strerror})",
                    next_step="free memory, or raise its limit (ulimit -v, vm.overcommit_memory)",
                ) from error
            mapping.madvise(_MADV_WIPEONFORK)
            memory = _viewed(mapping)
        self._memory = memory
        if pinned:
            self._pin()

    def tensor(self, offset: int, dtype: Any, shape: Any) -> Any:
        """A contiguous tensor at `offset` with its own torch storage, so that its pickle contains only its own bytes."""
        return torch.frombuffer(self._memory, dtype=dtype, count=shape.numel(), offset=offset).view(shape)

    @property
    def region(self) -> Region | None:
        """The shareable memory. None for private memory."""
        return _regions.get(self._number)

    def _pin(self) -> None:
        """Pin the pages for the copy engine of a GPU. The tests do not cover it without a GPU."""
        # Not `pin_memory=True`: torch's allocator rounds up to a power of two and does not free memory.
        runtime = torch.cuda.cudart()
        address = self._memory.ctypes.data
        status = int(runtime.cudaHostRegister(address, self.nbytes, 0))
        if status != 0:
            raise StorageError(
                f"{self.nbytes} bytes of host memory cannot be pinned (CUDA error {status})",
                next_step="raise the limit of locked memory (ulimit -l), or stage with pin=False",
            )
        unpin = weakref.finalize(self._memory, runtime.cudaHostUnregister, address)
        # At exit the CUDA context may no longer exist, and the process frees the pages.
        unpin.atexit = False


def _viewed(mapping: mmap.mmap) -> Any:
    """An array over all of a mapping. Its finalizers run before the memory is unmapped. Those of the mapping run after that,
    when another thread may have mapped the address.
    """
    return np.frombuffer(mapping, dtype=np.uint8)


def _shared(nbytes: int, number: int) -> Any:
    """Memory with a descriptor, registered as a region until it is garbage. None if the system has no such memory."""
    if not hasattr(os, "memfd_create") or _is_overcommit_refused():
        return None
    try:
        descriptor = os.memfd_create("millrace-staged", os.MFD_CLOEXEC)
    except OSError:
        return None  # a kernel or a sandbox without it
    try:
        os.ftruncate(descriptor, nbytes)
        memory = _viewed(mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED))
    except OSError:
        os.close(descriptor)
        return None
    _regions[number] = Region(number, memory.ctypes.data, nbytes, descriptor)
    # At exit the process frees everything.
    weakref.finalize(memory, _free, number).atexit = False
    return memory


def _is_overcommit_refused() -> bool:
    """Whether the kernel refuses to overcommit memory.

    Then a missing page of shared memory kills the process with a signal. Private memory raises an error instead.
    """
    try:
        with open("/proc/sys/vm/overcommit_memory", encoding="ascii") as setting:
            return setting.read().strip() == "2"
    except OSError:
        return False


def _free(number: int) -> None:
    region = _regions.pop(number, None)
    if region is not None:
        # Free the pages now, even if another process still has the descriptor.
        os.ftruncate(region.descriptor, 0)
        os.close(region.descriptor)


def _drop_in_child() -> None:
    """Replace every region by private zero pages of the child, and close the descriptors."""
    for region in regions():
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        _map(region.address, region.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        os.close(region.descriptor)
    _regions.clear()


forks.reset_in_child(_drop_in_child)
