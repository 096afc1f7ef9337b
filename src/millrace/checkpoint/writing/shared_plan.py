"""A save plan for another process that maps the memory of the staged state: `SharedPlan`. Its tensors are offsets there.

The training process plans (`state_plan.py`), because plans need the classes of the state's values. The saver process needs
none of them, and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from typing_extensions import Buffer

from millrace.checkpoint.codec.chunks import OPAQUE, Kind
from millrace.checkpoint.format.manifest import DataFile
from millrace.checkpoint.format.tables import PACK_BELOW_BYTES, Table
from millrace.checkpoint.writing.assembly import Described
from millrace.checkpoint.writing.bases import ItemKey, MemoryBase, Place, Readable
from millrace.checkpoint.writing.packing import BytesSource, ItemSource, WrapperParts
from millrace.checkpoint.writing.rank_writer import RankWriter
from millrace.runtime.memory import Memory
from millrace.runtime.pipeline import collection_paused

# More bytes outside of the shared memory than this are not passed on as a part of a base.
_MAX_BASE_BYTES = 16 << 20


class SharedItem(NamedTuple):
    """The bytes of one source: at an offset of the shared memory, or these, or (None) the next object of the save."""

    key: ItemKey
    kind: Kind
    nbytes: int
    where: int | bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlan:
    """The plan of all saves of one structure: the keys of its items, their sources, the sources of wrapper tensors by the
    number of the item, and the contents of the checkpoint. The bytes of objects come with each save.
    """

    keys: list[ItemKey]
    items: list[SharedItem]
    wrapped: dict[int, WrapperParts]
    described: Described

    @property
    def has_values(self) -> bool:
        """Whether the plan contains the bytes of a tensor, so that it is of no use for the next save."""
        return any(item.where and isinstance(item.where, bytes) and item.key[1] is not None for item in self.items)


# --- in the saver process -------------------------------------------------------------------------


class SharedSource:
    """Bytes in shared memory, or a tensor's bytes from elsewhere. They are not changed while it is in use."""

    # There may be tens of thousands of them.
    __slots__ = ("_memory", "key", "kind", "nbytes")

    key: ItemKey
    kind: Kind
    nbytes: int

    def __init__(self, key: ItemKey, kind: Kind, memory: Memory) -> None:
        self.key, self.kind, self.nbytes, self._memory = key, kind, memory.nbytes, memory

    def read(self, start: int, stop: int) -> Buffer:
        if stop - start < PACK_BELOW_BYTES and stop - start == self.nbytes:
            return self._memory.tobytes()
        return self._memory.array()[start:stop].data

    def memory(self) -> Memory | None:
        return self._memory


def save_shared(
    plan: SharedPlan,
    objects: Iterable[bytes],
    address: int,
    owner: Any,
    writer: RankWriter,
    count: Callable[[int], None],
) -> None:
    """Save a state whose memory begins at `address`, which `owner` keeps alive. `objects` are its objects, in order.

    `count` is called with the bytes of each source when its write begins.
    """
    kept: dict[ItemKey, ItemSource] = {}

    def sources() -> Iterator[ItemSource]:
        blobs = iter(objects)
        for item in plan.items:
            source = (
                BytesSource(item.key, item.kind, next(blobs)) if item.where is None else _source(item, address, owner)
            )
            kept[source.key] = source
            count(source.nbytes)
            yield source

    try:
        writer.begin()
        places = writer.write_sources(len(plan.keys), sources(), kept, plan.wrapped)
        writer.finish_save(plan.described, list(zip(plan.keys, places, strict=True)))
    except BaseException as error:
        writer.abandon(error)
        raise


def _source(item: SharedItem, address: int, owner: Any) -> ItemSource:
    if isinstance(item.where, int):
        return SharedSource(item.key, item.kind, Memory(address + item.where, item.nbytes, owner))
    return BytesSource(item.key, item.kind, item.where or b"")


# --- bases in both processes ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBase:
    """A `MemoryBase` for another process that maps the same memory."""

    directory: str
    files: tuple[DataFile, ...]
    chunks: Table
    transforms: tuple[str, ...]
    places: dict[ItemKey, Place]
    items: list[SharedItem]
    sparse: bool

    @classmethod
    def of(cls, base: MemoryBase, start: int, nbytes: int) -> SharedBase | None:
        """Describe a base whose tensors are in the `nbytes` from the address `start`; None if much of it is elsewhere."""
        items: list[SharedItem] = []
        left = _MAX_BASE_BYTES
        for key, source in base.sources.items():
            memory = source.memory()
            where = -1 if memory is None else memory.address - start
            if memory is not None and where >= 0 and where + memory.nbytes <= nbytes:
                items.append(SharedItem(key, OPAQUE, memory.nbytes, where))
                continue
            size = base.places[key].nbytes
            left -= size
            if left < 0:
                return None
            items.append(SharedItem(key, OPAQUE, size, bytes(memoryview(source.read(0, size)))))
        return cls(
            directory=base.directory,
            files=base.files,
            chunks=base.chunks,
            transforms=base.transforms,
            places=dict(base.places),
            items=items,
            sparse=base.sparse,
        )

    def base(self, address: int, owner: Any) -> MemoryBase:
        """The base in this process, where its memory begins at `address` and is kept alive by `owner`."""
        with collection_paused():
            sources: dict[ItemKey, Readable] = {item.key: _source(item, address, owner) for item in self.items}
        return MemoryBase(
            self.directory, self.files, self.chunks, self.transforms, self.places, sources, sparse=self.sparse
        )
