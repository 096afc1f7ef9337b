"""Staging: copies a state dict to host memory, so that training can continue. The memory is reused by later saves.

`StateStager` serves `CheckpointManager`, `CheckpointStager` serves torch's `dcp.async_save`.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import Shard as OldShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from millrace.checkpoint.state.arena import Arena, Region, aligned
from millrace.checkpoint.state.copying import CopyJob, copy_memory, copy_tensors
from millrace.checkpoint.state.flattening import PLAIN_TENSORS, nested_object, nested_too_deeply, state_dict_of
from millrace.checkpoint.state.tensors import dense, lacks_memory, plain_memory
from millrace.checkpoint.state.wrappers import is_wrapper, take_apart
from millrace.errors import ConfigurationError, MillraceError, UnsupportedObjectError, UsageError
from millrace.runtime.memory import Memory
from millrace.runtime.pipeline import collection_paused

# Immutable values.
_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format}
)
# Types of keys that are equal only if a checkpoint has the same text of them. Not so 1, 1.0 and True, and the members of an
# `Enum` of texts: the text of any other key is compared, too.
_ORDINARY_KEYS = frozenset({str, int})
# A buffer is released after this many stagings without use. Three buffers alternate when saves overlap and the previous
# state is kept for a delta.
_STAGINGS_UNTIL_UNUSED = 3
# A buffer that is too large by less than this is kept.
_SPARE_BYTES = 64 << 20


class StagedState:
    """A copy of a state, unchanged until `release`.

    `state`: nested dicts, lists and tuples. Its tensors are on the CPU, contiguous, without gradients. After `release` it is
    empty, and its tensors have undefined values. `nbytes`: size of the copied tensors, each shared tensor counted once.
    `seconds`: duration of the copy. `structure`: equal for two states if they differ only in the values of their tensors
    and in plain values, and if all tensors are at the same offsets. `region`: the shared memory of the tensors, if any.
    """

    def __init__(
        self,
        state: dict[str, Any],
        nbytes: int,
        seconds: float,
        give_back: Callable[[], None],
        *,
        structure: Structure,
        region: Region | None,
    ) -> None:
        self.state, self.nbytes, self.seconds = state, nbytes, seconds
        self.structure, self.region = structure, region
        # This rank's items, if the ranks have planned the save together.
        self.plan: Any = None
        self._give_back: deque[Callable[[], None]] = deque([give_back])

    def release(self) -> None:
        """Allow a later staging to overwrite the tensors of `state`. Idempotent. Any thread may call it."""
        try:
            give_back = self._give_back.pop()
        except IndexError:
            return
        # Drop the references: an object that refers to this one (a traceback, for example) must not keep the memory.
        self.state, self.plan = {}, None
        give_back()


class StateStager:
    """Copies states into reusable buffers. A state has its own buffer until its release.

    `pin`: whether the buffers are pinned, which makes copies from a GPU faster. Default: pinned when a tensor is on a GPU.
    `shared`: whether a saver process can read the buffers. One thread at a time may call `stage`. Any thread may call
    `release` and `close`. Do not use a stager in a forked process.
    """

    def __init__(self, *, pin: bool | None = None, shared: bool = False) -> None:
        if pin and not torch.cuda.is_available():
            raise ConfigurationError("pin=True needs a CUDA device", next_step="omit pin")
        self._pin, self._shared = pin, shared
        # The methods of a deque are atomic. A lock could be copied in its locked state by a fork.
        self._free: deque[_Slot] = deque()
        self._stagings = 0
        self._closed = False

    def stage(self, state: Mapping[str, Any]) -> StagedState:
        """Copy `state`. After the return the caller may change it. `Stateful` members are replaced by their `state_dict()`.

        Unsupported values (sparse tensors, for example) are passed on, and the save refuses them. Raises
        `UnsupportedObjectError`, naming the key, for an object that cannot be copied. Raises `UsageError` for a state that
        contains itself, and after `close`.
        """
        if self._closed:
            raise UsageError("the stager is closed", next_step="create another one")
        began = time.perf_counter()
        slot = self._take_slot()
        try:
            with torch.no_grad(), collection_paused():
                gathered = _Gathered(state)
                pinned = gathered.on_gpu() if self._pin is None else self._pin
                nbytes, structure = _fill(gathered, slot, pinned=pinned)
        except BaseException:
            self._free.append(slot)
            raise
        return StagedState(
            gathered.state,
            nbytes,
            time.perf_counter() - began,
            lambda: self._put_back(slot),
            structure=structure,
            region=slot.region,
        )

    def close(self) -> None:
        """Free all memory. The memory of staged states is freed at their release."""
        self._closed = True
        self._free.clear()

    def _take_slot(self) -> _Slot:
        self._stagings += 1
        free: list[_Slot] = []
        while self._free:
            free.append(self._free.popleft())
        # Take the most recently used buffer first, so that unneeded ones become old.
        free.sort(key=lambda slot: slot.used)
        slot = free.pop() if free else _Slot(shared=self._shared)
        self._free.extend(one for one in free if self._stagings - one.used <= _STAGINGS_UNTIL_UNUSED)
        slot.used = self._stagings
        return slot

    def _put_back(self, slot: _Slot) -> None:
        if not self._closed:
            self._free.append(slot)


class Structure(NamedTuple):
    """What a save plan depends on, apart from the values.

    `places`: the containers and the places in them, in the order of a traversal. `tensors`: element type and shape of each
    copied tensor, in the order of the memory. `numbers`: which of them each place has, if some share one. `pinned`: whether
    the memory is pinned.
    """

    places: list[Any]
    tensors: list[Any]
    numbers: list[int] | None
    pinned: bool


class _Never:
    """Equal to nothing: a save with such a value is always planned again."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class _Same:
    """A foreign description (a sharding, a wrapper) whose `==` may raise, or return something else than a bool."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        try:
            return isinstance(other, _Same) and (self.value == other.value) is True
        except Exception:  # noqa: BLE001 - then the save is planned again
            return False

    __hash__ = None  # type: ignore[assignment]


# Not texts, which could be keys of the state.
_VALUE, _END = object(), object()

# A tensor to copy to `holder[place]`: `(holder, place, prefix, tensor)`. There may be tens of thousands, so these are
# plain tuples, and the whole key is built only when needed.
_Leaf = tuple[Any, Any, str, Any]


class _Gathered:
    """The copied containers and objects of a state, and its tensors as a list in a stable order."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.leaves: list[_Leaf] = []
        # As `Structure.places`.
        self.places: list[Any] = []
        # Completes values whose parts must be copied first, inner parts first.
        self.rest: list[Callable[[], None]] = []
        self.state: dict[str, Any] = {}
        try:
            for key, value in state.items():
                member = state_dict_of(key, value) if isinstance(value, Stateful) else value
                self._put(self.state, key, member, "")
        except RecursionError as error:
            raise nested_too_deeply() from error

    def on_gpu(self) -> bool:
        """Whether a tensor is on a GPU."""
        return torch.cuda.is_available() and any(tensor.is_cuda for *_, tensor in self.leaves)

    def _put(self, holder: Any, place: Any, value: Any, prefix: str) -> None:
        """Set `holder[place]` to a copy of `value`: now, or later if the value contains tensors."""
        kind = type(value)
        self.places.append(place if type(place) in _ORDINARY_KEYS else (type(place), str(place), place))
        if kind in _ATOMS:
            holder[place] = value
            self.places.append(_VALUE)
        elif kind in PLAIN_TENSORS:
            holder[place] = None  # so that a dict keeps its order
            self.leaves.append((holder, place, prefix, value))
        elif isinstance(value, Mapping):
            members: Any = OrderedDict() if isinstance(value, OrderedDict) else {}
            holder[place] = members
            within = f"{prefix}{place}."
            self.places.append(dict)
            for key, member in value.items():
                self._put(members, key, member, within)
            self.places.append(_END)
        elif kind is list or kind is tuple:
            self._put_sequence(holder, place, value, prefix)
        elif isinstance(value, torch.Tensor):
            self._put_tensor(holder, place, value, prefix)
        elif isinstance(value, Stateful):
            raise nested_object(f"{prefix}{place}", value)
        else:
            holder[place] = _copied(value, f"{prefix}{place}")
            # A list of another class may contain tensors, each of which is saved by itself.
            self.places.append(_Never() if isinstance(value, list) else _VALUE)

    def _put_sequence(self, holder: Any, place: Any, value: Any, prefix: str) -> None:
        members = list(value)
        holder[place] = members
        # There may be millions of plain numbers.
        if not _ATOMS.issuperset(map(type, members)):
            self.places.append(type(value))
            for number, member in enumerate(value):
                self._put(members, number, member, f"{prefix}{place}.")
            self.places.append(_END)
        else:
            self.places.append(_VALUE)
        if type(value) is tuple:
            self.rest.append(lambda: _set(holder, place, tuple(members)))

    def _put_tensor(self, holder: Any, place: Any, value: Any, prefix: str) -> None:
        """A tensor of another type than the plain ones."""
        holder[place] = None
        key = f"{prefix}{place}"
        if is_lazy(value):
            holder[place] = value  # it has no values, and the save refuses it
            self.places.append(_Never())
        elif isinstance(value, AsyncCollectiveTensor):
            self._put(holder, place, value.trigger_wait(), prefix)
        elif is_wrapper(value):
            self._put_wrapper(holder, place, value, key)
        elif isinstance(value, DTensor):
            local: list[Any] = [None]
            self.places.append(_Same(value._spec))
            self._put(local, 0, value.to_local(), f"{prefix}{place}.")
            # Not `from_local`, which would move the copy to the mesh's device.
            self.rest.append(lambda: _set(holder, place, DTensor(local[0], value._spec, requires_grad=False)))
        elif isinstance(value, ShardedTensor):
            shards = value.local_shards()
            copies: list[Any] = [None] * len(shards)
            self.places.append(_Never())
            for number, shard in enumerate(shards):
                self._put(copies, number, shard.tensor, f"{prefix}{place}.")
            self.rest.append(lambda: _set(holder, place, _with_shards(value, copies)))
        else:
            holder[place] = _copied(value, key)
            self.places.append(_Never())

    def _put_wrapper(self, holder: Any, place: Any, value: Any, key: str) -> None:
        """A wrapper of the same class around copies of the plain tensors in `value`."""
        wrapper, tensors = take_apart(value, key)
        wrapper = replace(wrapper, context=_copied(wrapper.context, key))
        copies: dict[str, Any] = {}
        self.places.append(_Same(wrapper))
        for name, tensor in tensors.items():
            if tensor.layout is torch.strided and tensor.is_contiguous():
                self._put(copies, name, tensor, "")
            else:
                self.places.append(_Never())
                # Keep the strides with which the wrapper was built.
                copies[name] = _copied(tensor, name).detach().cpu()
        self.rest.append(lambda: _set(holder, place, wrapper.build(copies, key)))


def _set(holder: Any, place: Any, value: Any) -> None:
    holder[place] = value


def _copied(value: Any, key: str) -> Any:
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach()
        try:
            return copy.deepcopy(value)
        except RuntimeError:
            # Some tensors support only `clone`.
            if isinstance(value, torch.Tensor):
                return value.clone()
            raise
    except (MillraceError, MemoryError, RecursionError):
        raise
    except Exception as error:
        # The object may raise any exception.
        raise UnsupportedObjectError(
            f"{key!r} is an object that cannot be copied ({type(error).__name__}: {error!s:.200})",
            next_step="store tensors and plain values",
        ) from error


def _with_shards(value: Any, tensors: list[Any]) -> Any:
    """The same `ShardedTensor` with other tensors as local shards."""
    properties = value.metadata().tensor_properties
    # Its constructors gather from all ranks, or require the device of the original.
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
    # The copy must not remove the entry of the original in torch's map.
    other._init_rrefs = False
    other._local_shards = [
        OldShard(tensor, shard.metadata) for tensor, shard in zip(tensors, value.local_shards(), strict=True)
    ]
    return other


class _Slot:
    """A buffer and its tensors. States with the same tensors fill the same ones again."""

    def __init__(self, *, shared: bool) -> None:
        self.used, self._shared = 0, shared
        self._arena = Arena(0, pinned=False)
        self._tensors: list[Any] = []
        self.kinds: list[Any] = []
        """Element type and shape of each tensor. Replaced, never changed."""

    @property
    def region(self) -> Region | None:
        """The shared memory of the tensors; None for private memory, and without tensors."""
        return self._arena.region

    def fit(self, wanted: list[Any], *, pinned: bool) -> list[Any]:
        """A tensor with the shape and dtype of each wanted one. Overwrites all tensors that this slot returned before."""
        room = sum(aligned(tensor.nbytes) for tensor in wanted)
        pinned = pinned and room > 0
        if room > self._arena.nbytes or pinned != self._arena.pinned or room + _SPARE_BYTES < self._arena.nbytes // 2:
            self._tensors = []
            # Free the old arena before allocating the new one.
            self._arena = Arena(0, pinned=False)
            self._arena = Arena(room, pinned=pinned, shared=self._shared)
        held = self._tensors
        offset = same = 0
        for tensor, target in zip(wanted, held, strict=False):
            if tensor.shape != target.shape or tensor.dtype != target.dtype:
                break
            offset += aligned(target.nbytes)
            same += 1
        if same < max(len(held), len(wanted)):
            del held[same:]
            for tensor in wanted[same:]:
                held.append(self._arena.tensor(offset, tensor.dtype, tensor.shape))
                offset += aligned(tensor.nbytes)
            self.kinds = [(tensor.dtype, tensor.shape) for tensor in held]
        return held


def _fill(gathered: _Gathered, slot: _Slot, *, pinned: bool) -> tuple[int, Structure]:
    """Copy the tensors and complete the state. Returns the number of copied bytes, and the structure of the state."""
    wanted: list[Any] = []
    # The memory of each tensor that is one run of bytes in this process. The key of any other tensor.
    sources: list[Memory | str] = []
    # Tensors that share their values (tied weights) share one copy.
    known: dict[Any, int] = {}
    places: list[tuple[Any, Any, int]] = []
    for position, (holder, place, prefix, tensor) in enumerate(gathered.leaves):
        memory = None if tensor.is_nested or tensor.is_quantized else plain_memory(tensor)
        if memory is not None and memory.nbytes:
            name: Any = (memory.address, tensor.dtype, tensor.shape)
        elif not _has_values(tensor):
            holder[place] = _as_it_is(tensor, f"{prefix}{place}")
            is_empty = type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided and not tensor.is_meta
            is_empty = is_empty and not tensor.is_nested and not tensor.is_quantized
            gathered.places.append((position, tensor.dtype, tensor.shape) if is_empty else _Never())
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
            # Read `data_ptr` again: sending a tensor to another process moves it to shared memory.
            plain.append((target.data_ptr(), source.address, source.nbytes))
    copy_tensors(others)
    copy_memory(plain)
    for holder, place, number in places:
        holder[place] = targets[number]
    for complete in gathered.rest:
        complete()
    is_shared = len(wanted) < len(places)
    numbers = [number for *_, number in places] if is_shared else None
    return nbytes, Structure(gathered.places, slot.kinds, numbers, pinned and nbytes > 0)


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
    """A tensor without plain values, for the save to refuse it if necessary."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return tensor.detach().clone()
    if tensor.is_meta:
        return tensor.detach()
    if tensor.numel():
        # Its memory was freed: raise the error now.
        dense(tensor, key)
    return torch.empty(tensor.shape, dtype=tensor.dtype)


# --- for torch's own asynchronous saves -------------------------------------------------------------------


class CheckpointStager(AsyncStager):  # type: ignore[misc]
    """Copies the state for `dcp.async_save(state, storage_writer=CheckpointWriter(url), async_stager=CheckpointStager())`.

    Works with every storage writer. Use one object for all saves of a run: it reuses its host memory, so that each save
    except the first blocks the training loop only for one copy of the state. A state is never overwritten during its save.
    Concurrent saves have one buffer each. `pin`: whether buffers are pinned. Default: pinned when a tensor is on a GPU.
    Torch's thread and process checkpointers both work. The latter moves every tensor into shared memory, which the next
    copy reuses.

    `close` frees the memory. For one thread at a time. Raises `UnsupportedObjectError`, naming the key, for a value that
    cannot be copied. The writer refuses other unsupported values.
    """

    # Torch must not wait for the copy after it has begun the save: the copy is already complete.
    _synchronize_after_execute = False

    def __init__(self, *, pin: bool | None = None) -> None:
        self._stager = StateStager(pin=pin)

    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of the state, complete on return. Its memory is reused when the returned dict is garbage."""
        staged = self._stager.stage(state_dict)
        state = _Staged(staged.state)
        # Torch does not notify a stager of the end of a save, but refers to the dict until then.
        weakref.finalize(state, staged.release).atexit = False
        return state

    def synchronize_staging(self) -> None:
        """Does nothing: the copy is already complete."""

    def close(self) -> None:
        """Free all memory. The memory of a running save is freed at its end."""
        self._stager.close()


class _Staged(dict[str, Any]):
    """A dict with weak references. It unpickles as a plain dict."""

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
