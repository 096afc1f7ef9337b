"""Host memory that a staged state lies in: one mapping for all of its tensors, kept from save to save, touched once.

It may be shared: a helper process that is given its descriptor reads the same pages. Private memory is a little faster.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import weakref
from typing import Any, NamedTuple

import torch

from millrace.errors import StorageError

# Of Linux's <asm-generic/mman-common.h>; Python's mmap does not name them.
_MADV_WIPEONFORK = 18
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_ALIGNMENT = 64

_map = ctypes.PyDLL(None).mmap
_map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_map.restype = ctypes.c_void_p


class Region(NamedTuple):
    """Memory that can be shared: `nbytes` from `address` on, behind a descriptor. `number` is never given twice."""

    number: int
    address: int
    nbytes: int
    descriptor: int


# Every region in use. Looked at by the threads that save while the loop's thread adds and removes: a dict's methods are
# atomic, and a lock could be forked in its locked state.
_regions: dict[int, Region] = {}
_numbers = itertools.count()


def regions() -> tuple[Region, ...]:
    """Those that hold somebody's tensors now. A region stays as long as one of its tensors is referred to."""
    return tuple(_regions.values())


def aligned(nbytes: int) -> int:
    """How much room so many bytes take in an arena."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Arena:
    """`nbytes` of memory, given back to the system when neither the arena nor a tensor in it is referred to any more.

    A forked process finds zeros in it: it can neither hold the memory nor change what is being saved, and the first staging
    after a data loader has forked its workers is as fast as any. Not thread-safe.
    """

    def __init__(self, nbytes: int, *, pinned: bool, shared: bool = False) -> None:
        self.nbytes, self.pinned = nbytes, pinned
        self._number = next(_numbers)
        memory = _shared(nbytes, self._number) if shared and nbytes else None
        if memory is None:
            # Whoever cannot have shared memory saves without a helper process.
            memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(_MADV_WIPEONFORK)
        self._memory = memory
        if pinned:
            self._pin()

    def tensor(self, offset: int, dtype: Any, shape: Any) -> Any:
        """A contiguous tensor at `offset` with a storage of its own, so that pickling it takes no more than its bytes."""
        return torch.frombuffer(self._memory, dtype=dtype, count=shape.numel(), offset=offset).view(shape)

    @property
    def region(self) -> Region | None:
        """What to share of it; None where it is private."""
        return _regions.get(self._number)

    def view(self) -> memoryview:
        """All of it, writable."""
        return memoryview(self._memory)

    def _pin(self) -> None:
        """Fix the pages for a GPU's copy engine. Not run by the tests here, which have no GPU."""
        # Registering instead of `pin_memory=True`: torch's allocator rounds up to a power of two and gives nothing back.
        runtime = torch.cuda.cudart()
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        status = int(runtime.cudaHostRegister(address, self.nbytes, 0))
        if status != 0:
            raise StorageError(
                f"{self.nbytes} bytes of host memory cannot be pinned (CUDA error {status})",
                next_step="raise the limit of locked memory (ulimit -l), or stage with pin=False",
            )
        unpin = weakref.finalize(self._memory, runtime.cudaHostUnregister, address)
        # At exit the CUDA context may be gone already, and the pages go with the process.
        unpin.atexit = False


def _shared(nbytes: int, number: int) -> mmap.mmap | None:
    """Memory behind a descriptor, among the regions until it is not referred to any more; None where there is none."""
    if not hasattr(os, "memfd_create") or _is_overcommit_refused():
        return None
    try:
        descriptor = os.memfd_create("millrace-staged", os.MFD_CLOEXEC)
    except OSError:
        return None  # a kernel or a sandbox without it
    try:
        os.ftruncate(descriptor, nbytes)
        memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)
    except OSError:
        os.close(descriptor)
        return None
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    _regions[number] = Region(number, address, nbytes, descriptor)
    # At exit all goes with the process.
    weakref.finalize(memory, _give_back, number).atexit = False
    return memory


def _is_overcommit_refused() -> bool:
    """Whether the kernel promises no memory that it may not have: then a page of shared memory that is lacking is a signal
    that ends the process, where private memory is an error.
    """
    try:
        with open("/proc/sys/vm/overcommit_memory", encoding="ascii") as setting:
            return setting.read().strip() == "2"
    except OSError:
        return False


def _give_back(number: int) -> None:
    region = _regions.pop(number, None)
    if region is not None:
        # The pages go now, whoever else may still have the descriptor.
        os.ftruncate(region.descriptor, 0)
        os.close(region.descriptor)


def _let_go_in_child() -> None:
    """Put zeros of the child's own in the place of every region, and forget the descriptors."""
    for region in regions():
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        _map(region.address, region.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        os.close(region.descriptor)
    _regions.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
