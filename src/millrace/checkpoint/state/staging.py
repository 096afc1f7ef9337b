"""Copies a state dict so that the training may go on changing it: into host memory that is kept from save to save."""

from __future__ import annotations

import copy
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import Shard as OldShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from millrace.checkpoint.host.garbage import collection_paused
from millrace.checkpoint.host.memory import Memory
from millrace.checkpoint.state.arena import Arena, aligned
from millrace.checkpoint.state.copying import CopyJob, copy_memory, copy_tensors
from millrace.checkpoint.state.flattening import PLAIN_TENSORS
from millrace.checkpoint.state.tensors import dense, lacks_memory, plain_memory
from millrace.errors import ConfigurationError, MillraceError, UnsupportedObjectError, UsageError

# Values that nobody can change.
_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format}
)
# A buffer that so many stagings have gone without is one that nobody needs: where saves overlap and the previous
# state is kept for a delta, three alternate.
_STAGINGS_UNTIL_UNUSED = 3
# Below this a buffer that is too large is not worth a new one.
_SPARE_BYTES = 64 << 20


class StagedState:
    """A copy of a state that nobody changes until `release`.

    `state`: what was staged, as nested dicts, lists and tuples; tensors lie on the CPU, contiguous, without gradients.
    After `release` it is empty, and tensors taken from it before have any values.
    `nbytes`: of the tensors that were copied, each shared one counted once. `seconds`: how long the copy took.
    """

    def __init__(self, state: dict[str, Any], nbytes: int, seconds: float, give_back: Callable[[], None]) -> None:
        self.state, self.nbytes, self.seconds = state, nbytes, seconds
        self._give_back: deque[Callable[[], None]] = deque([give_back])

    def release(self) -> None:
        """Let a later staging overwrite the tensors of `state`. May be called again, and from any thread."""
        try:
            give_back = self._give_back.pop()
        except IndexError:
            return
        # What still refers to this object (an error's traceback, say) shall not keep the memory.
        self.state = {}
        give_back()


class StateStager:
    """Copies one state after the other. Each has a buffer of its own until its release; then another reuses that.

    `pin`: whether the buffers are pinned, which makes copies from a GPU faster; by default they are where a tensor
    lies on one. `shared`: whether an encoder process can read them. `stage` is for one thread at a time, `release` and
    `close` for any. Not to be used in a forked process.
    """

    def __init__(self, *, pin: bool | None = None, shared: bool = False) -> None:
        if pin and not torch.cuda.is_available():
            raise ConfigurationError("pin=True needs a CUDA device", next_step="leave pin away")
        self._pin, self._shared = pin, shared
        # No lock, which a fork could copy in its locked state: a deque's methods are atomic.
        self._free: deque[_Slot] = deque()
        self._stagings = 0
        self._closed = False

    def stage(self, state: Mapping[str, Any]) -> StagedState:
        """Copy `state`; when it returns, all may be changed. The `state_dict()` of each `Stateful` member is what is staged.

        What no checkpoint can hold (sparse tensors, say) is passed on, for the save to refuse it. Raises
        `UnsupportedObjectError`, naming the key, for an object that cannot be copied, and `UsageError` for a state that
        contains itself, and after `close`.
        """
        if self._closed:
            raise UsageError("the stager was closed", next_step="make another one")
        began = time.perf_counter()
        slot = self._take_slot()
        try:
            with torch.no_grad(), collection_paused():
                gathered = _Gathered(state)
                pinned = gathered.on_gpu() if self._pin is None else self._pin
                nbytes = _fill(gathered, slot, pinned=pinned)
        except BaseException:
            self._free.append(slot)
            raise
        return StagedState(gathered.state, nbytes, time.perf_counter() - began, lambda: self._put_back(slot))

    def close(self) -> None:
        """Give back all memory but that of states not yet released, which goes with them."""
        self._closed = True
        self._free.clear()

    def _take_slot(self) -> _Slot:
        self._stagings += 1
        free: list[_Slot] = []
        while self._free:
            free.append(self._free.popleft())
        # The last one used first: the others grow old when nobody needs them.
        free.sort(key=lambda slot: slot.used)
        slot = free.pop() if free else _Slot(shared=self._shared)
        self._free.extend(one for one in free if self._stagings - one.used <= _STAGINGS_UNTIL_UNUSED)
        slot.used = self._stagings
        return slot

    def _put_back(self, slot: _Slot) -> None:
        if not self._closed:
            self._free.append(slot)


# A tensor to copy, and where the copy belongs: `(holder, place, prefix, tensor)`, for `holder[place]`. As there may be tens
# of thousands, plain tuples, and the whole key only where it is needed.
_Leaf = tuple[Any, Any, str, Any]


class _Gathered:
    """The state's containers and objects, copied; its tensors as a list, in an order that is always the same."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.leaves: list[_Leaf] = []
        # What can only be made when its parts are copied, inner parts first.
        self.rest: list[Callable[[], None]] = []
        self.state: dict[str, Any] = {}
        try:
            for key, value in state.items():
                member = value.state_dict() if isinstance(value, Stateful) else value
                self._put(self.state, key, member, "")
        except RecursionError as error:
            raise UsageError(
                "the state dict is nested too deeply, or contains itself", next_step="make it flatter"
            ) from error

    def on_gpu(self) -> bool:
        """Whether some tensor lies on a GPU."""
        return torch.cuda.is_available() and any(tensor.is_cuda for *_, tensor in self.leaves)

    def _put(self, holder: Any, place: Any, value: Any, prefix: str) -> None:
        """Make `holder[place]` a copy of `value`, now or, where tensors are in it, later."""
        kind = type(value)
        if kind in _ATOMS:
            holder[place] = value
        elif kind in PLAIN_TENSORS:
            holder[place] = None  # so that a dict keeps its order
            self.leaves.append((holder, place, prefix, value))
        elif isinstance(value, Mapping):
            members: Any = OrderedDict() if isinstance(value, OrderedDict) else {}
            holder[place] = members
            within = f"{prefix}{place}."
            for key, member in value.items():
                self._put(members, key, member, within)
        elif kind is list or kind is tuple:
            self._put_sequence(holder, place, value, prefix)
        elif isinstance(value, torch.Tensor):
            self._put_tensor(holder, place, value, prefix)
        else:
            holder[place] = _copied(value, f"{prefix}{place}")

    def _put_sequence(self, holder: Any, place: Any, value: Any, prefix: str) -> None:
        members = list(value)
        holder[place] = members
        # There may be millions of plain numbers.
        if not _ATOMS.issuperset(map(type, members)):
            for number, member in enumerate(value):
                self._put(members, number, member, f"{prefix}{place}.")
        if type(value) is tuple:
            self.rest.append(lambda: _set(holder, place, tuple(members)))

    def _put_tensor(self, holder: Any, place: Any, value: Any, prefix: str) -> None:
        """Any other kind of tensor than the plain ones."""
        holder[place] = None
        if isinstance(value, DTensor):
            local: list[Any] = [None]
            self._put(local, 0, value.to_local(), f"{prefix}{place}.")
            # Not `from_local`, which would move the copy to the mesh's device.
            self.rest.append(lambda: _set(holder, place, DTensor(local[0], value._spec, requires_grad=False)))
        elif isinstance(value, ShardedTensor):
            shards = value.local_shards()
            copies: list[Any] = [None] * len(shards)
            for number, shard in enumerate(shards):
                self._put(copies, number, shard.tensor, f"{prefix}{place}.")
            self.rest.append(lambda: _set(holder, place, _with_shards(value, copies)))
        else:
            holder[place] = _copied(value.detach(), f"{prefix}{place}")


def _set(holder: Any, place: Any, value: Any) -> None:
    holder[place] = value


def _copied(value: Any, key: str) -> Any:
    try:
        try:
            return copy.deepcopy(value)
        except RuntimeError:
            # Some kinds of tensors can only be cloned.
            if isinstance(value, torch.Tensor):
                return value.clone()
            raise
    except (MillraceError, MemoryError, RecursionError):
        raise
    except Exception as error:
        # A copy raises whatever the object does.
        raise UnsupportedObjectError(
            f"{key!r} is an object that cannot be copied ({type(error).__name__}: {error!s:.200})",
            next_step="store tensors and plain values",
        ) from error


def _with_shards(value: Any, tensors: list[Any]) -> Any:
    """The same `ShardedTensor` with other tensors for the local shards."""
    properties = value.metadata().tensor_properties
    # Not by its constructors: they gather from all ranks, or insist on the device of the original.
    other = ShardedTensor.__new__(
        ShardedTensor,
        value.sharding_spec(),
        value.size(),
        dtype=properties.dtype,
        layout=properties.layout,
        pin_memory=False,
        requires_grad=False,
    )
    other.__dict__.update(value.__dict__)
    # The original's entry in torch's map is not the copy's to remove.
    other._init_rrefs = False
    other._local_shards = [
        OldShard(tensor, shard.metadata) for tensor, shard in zip(tensors, value.local_shards(), strict=True)
    ]
    return other


class _Slot:
    """A buffer, and the tensors in it: as long as the states are alike, the same ones are filled again and again."""

    def __init__(self, *, shared: bool) -> None:
        self.used, self._shared = 0, shared
        self._arena = Arena(0, pinned=False)
        self._tensors: list[Any] = []

    def fit(self, wanted: list[Any], *, pinned: bool) -> list[Any]:
        """A tensor for each of those, of its shape and dtype. All that this slot gave before is void."""
        room = sum(aligned(tensor.nbytes) for tensor in wanted)
        pinned = pinned and room > 0
        if room > self._arena.nbytes or pinned != self._arena.pinned or room + _SPARE_BYTES < self._arena.nbytes // 2:
            self._tensors = []
            # Before the new one, so that there are never both.
            self._arena = Arena(0, pinned=False)
            self._arena = Arena(room, pinned=pinned, shared=self._shared)
        held = self._tensors
        offset = same = 0
        for tensor, target in zip(wanted, held, strict=False):
            if tensor.shape != target.shape or tensor.dtype != target.dtype:
                break
            offset += aligned(target.nbytes)
            same += 1
        del held[same:]
        for tensor in wanted[same:]:
            held.append(self._arena.tensor(offset, tensor.dtype, tensor.shape))
            offset += aligned(tensor.nbytes)
        return held


def _fill(gathered: _Gathered, slot: _Slot, *, pinned: bool) -> int:
    """Copy the tensors, complete the state, and say how many bytes were copied."""
    wanted: list[Any] = []
    # Where one run of bytes in this process holds all the values of what is wanted; the key, where it does not.
    sources: list[Memory | str] = []
    # The same values under several names (tied weights) are one copy with several names.
    known: dict[Any, int] = {}
    places: list[tuple[Any, Any, int]] = []
    for holder, place, prefix, tensor in gathered.leaves:
        memory = None if tensor.is_nested or tensor.is_quantized else plain_memory(tensor)
        if memory is not None and memory.nbytes:
            name: Any = (memory.address, tensor.dtype, tensor.shape)
        elif not _has_values(tensor):
            holder[place] = _as_it_is(tensor, f"{prefix}{place}")
            continue
        else:
            bits = (tensor.is_conj(), tensor.is_neg(), tensor._is_zerotensor())
            name = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), bits)
        number = known.setdefault(name, len(wanted))
        if number == len(wanted):
            wanted.append(tensor)
            sources.append(memory or f"{prefix}{place}")
        places.append((holder, place, number))
    targets = slot.fit(wanted, pinned=pinned)
    plain: list[CopyJob] = []
    others: list[tuple[str, Any, Any]] = []
    nbytes = 0
    for tensor, source, target in zip(wanted, sources, targets, strict=True):
        if isinstance(source, str):
            nbytes += tensor.nbytes
            others.append((source, tensor, target))
        else:
            nbytes += source.nbytes
            # Asked anew: a tensor that was sent to another process lies in shared memory from then on.
            plain.append((target.data_ptr(), source.address, source.nbytes))
    copy_tensors(others)
    copy_memory(plain)
    for holder, place, number in places:
        holder[place] = targets[number]
    for complete in gathered.rest:
        complete()
    return nbytes


def _has_values(tensor: Any) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.numel() > 0
        and not lacks_memory(tensor)
    )


def _as_it_is(tensor: Any, key: str) -> Any:
    """A tensor without plain values: the save says what is wrong with it, if anything is."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return tensor.detach().clone()
    if tensor.is_meta:
        return tensor.detach()
    if tensor.numel():
        # Freed: whether it has its memory again while it is saved, nobody knows. This says so.
        dense(tensor, key)
    return torch.empty(tensor.shape, dtype=tensor.dtype)
