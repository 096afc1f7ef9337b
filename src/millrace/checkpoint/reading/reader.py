"""The reading side of `torch.distributed.checkpoint`: `CheckpointReader`.

Torch calls, on every rank: `reset` (only with a checkpoint id), `read_metadata`, `set_up_storage_reader`,
`prepare_local_plan`; `prepare_global_plan` on the coordinator; `read_data`. When `read_metadata()` fails torch calls it
again with the rank, for a save made without collectives.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader

from millrace.checkpoint.codec.extension import extension_registry
from millrace.checkpoint.format.manifest import DTYPES, Shard
from millrace.checkpoint.format.slices import Runs, box_runs, split_box
from millrace.checkpoint.format.transforms import transforms_for
from millrace.checkpoint.host.garbage import collection_paused, each_paused
from millrace.checkpoint.host.pipeline import default_threads
from millrace.checkpoint.places.fetching import ChunkFetcher, Request
from millrace.checkpoint.places.manifests import (
    CheckpointSummary,
    LoadedManifest,
    read_newest,
    read_stock_metadata,
    summarize,
)
from millrace.checkpoint.places.stock_metadata import summarize_stock
from millrace.checkpoint.places.storage import CheckpointStorage, can_open_storage, open_storage
from millrace.checkpoint.reading.stock import StockReader
from millrace.checkpoint.state.tensors import (
    bytes_of,
    check_blob,
    copy_bits,
    lacks_memory,
    metadata_of,
    plain_memory,
    torch_dtype,
)
from millrace.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    MillraceError,
    StateMismatchError,
    UsageError,
)
from millrace.origin import Readable

# What cannot be decoded in place (on a device, not contiguous, of another dtype) goes through host memory in waves of this;
# no tensor needs more of it, however large it is.
_STAGING_BYTES = 128 << 20


class CheckpointReader(StorageReader):  # type: ignore[misc]
    """Reads a checkpoint from a URL or local path: `dcp.load(state, storage_reader=CheckpointReader(url))`.

    Reads what `CheckpointWriter` wrote, where every byte is verified and damage is a `CorruptCheckpointError`; and what
    torch's own writer wrote, which has no checksums. `_extension_registry` is as in `FileSystemReader`; without one
    torch's `ZStandard` and our `ZstdPlanes` are known.

    - `target_options`: for the storage, as s3fs takes them.
    - `origin`: read through this instead (a cache); `path` then names the key in it.
    - `trusted_types`: classes that stored objects may have beside those that torch trusts.
    - `thread_count`: threads that read and decompress; by default one a core, up to eight.

    One object serves one load at a time, and any number in a row. It pickles, `target_options` included.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        target_options: Mapping[str, Any] | None = None,
        origin: Readable | None = None,
        trusted_types: Sequence[type] = (),
        thread_count: int | None = None,
    ) -> None:
        if thread_count is not None and thread_count < 1:
            raise ConfigurationError(f"thread_count={thread_count}", next_step="give a positive number")
        self._path = os.fspath(path)
        # As with torch's reader, what comes with the library needs no registering.
        self._extension_registry = extension_registry() if _extension_registry is None else _extension_registry
        self._target_options = dict(target_options or {})
        self._origin = origin
        self._trusted_types = tuple(trusted_types)
        self._threads = thread_count or default_threads()
        self.reset()

    def __repr__(self) -> str:
        return f"CheckpointReader({self._path!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_loaded": None, "_stock": None, "_failure": None}

    @property
    def checkpoint_id(self) -> str:
        """The URL or path that is read from."""
        return self._path

    @property
    def load_id(self) -> str:
        """Names the load that is under way, or else the last one."""
        return self._load_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this reader can read from a place of this name."""
        return can_open_storage(checkpoint_id)

    def summary(self) -> CheckpointSummary:
        """What the checkpoint holds, in short. Raises as `describe`."""
        try:
            return summarize(self._storage(), read_newest(self._storage()))
        except CheckpointNotFoundError:
            if read_stock_metadata(self._storage()) is None:
                raise
            return summarize_stock(self._storage())

    # --- the calls of a load, in order ------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget what was read, and go to another place when `checkpoint_id` is given."""
        if checkpoint_id:
            self._path = os.fspath(checkpoint_id)
        self._load_id = uuid.uuid4().hex
        self._opened: CheckpointStorage | None = None
        self._loaded: LoadedManifest | None = None
        self._stock: StockReader | None = None
        self._failure: MillraceError | None = None

    # Torch asks for one rank's metadata only where a parameter is called `kwargs`.
    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """The metadata of the checkpoint, or of one `rank` of a save without collectives.

        Raises `CheckpointNotFoundError`, `CorruptCheckpointError` or `UnsupportedFormatError`. When both calls of
        torch fail the second returns an object that raises the error that says more on use: torch would replace an
        exception by one that only quotes it.
        """
        rank: int | None = kwargs.get("rank")
        try:
            metadata = self._read_metadata(rank)
        except MillraceError as error:
            if rank is None or self._failure is None:
                self._failure = error
                raise
            return _Unreadable(self._failure if isinstance(error, CheckpointNotFoundError) else error)
        if self._stock is not None or self._loaded is None:
            saved = metadata.storage_meta.save_id
        else:
            saved = self._loaded.manifest.save_id
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=saved, load_id=self._load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if isinstance(metadata, _Unreadable):
            metadata.fail()
        if self._stock is not None:
            self._stock.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def read_data(self, plan: Any, planner: Any) -> Any:
        if self._stock is not None:
            return self._stock.read_data(plan, planner)
        if self._loaded is None:
            raise UsageError("read_data before read_metadata", next_step="use torch.distributed.checkpoint.load")
        with collection_paused():
            index = _ItemIndex(self._loaded)
        transforms = transforms_for(self._loaded.manifest.transforms, self._extension_registry)
        fetcher = ChunkFetcher(self._storage(), self._loaded.manifest, self._threads, transforms)
        for wave in each_paused(_waves(plan.items, planner, index)):
            fetcher.fetch([load.request for load in wave if load.request is not None])
            for load in wave:
                load.commit(self._trusted_types)
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future

    # --- inside -----------------------------------------------------------------------------------

    def _storage(self) -> CheckpointStorage:
        if self._opened is None:
            self._opened = open_storage(self._path, self._target_options, origin=self._origin)
        return self._opened

    def _read_metadata(self, rank: int | None) -> Any:
        storage = self._storage()
        self._stock = None
        try:
            self._loaded = read_newest(storage, rank)
        except CheckpointNotFoundError as missing:
            stock = StockReader(storage, self._extension_registry, self._trusted_types)
            try:
                metadata = stock.read_metadata(rank=rank)
            except CheckpointNotFoundError:
                raise missing from missing.__cause__
            self._stock = stock
            return metadata
        with collection_paused():
            return metadata_of(self._loaded.manifest)


class _Unreadable:
    """Stands for metadata that could not be read: raises why, whatever is asked of it."""

    def __init__(self, failure: MillraceError) -> None:
        self.__dict__["_failure"] = failure

    def fail(self) -> None:
        raise self.__dict__["_failure"]

    def __getattr__(self, name: str) -> Any:
        raise self.__dict__["_failure"]

    def __setattr__(self, name: str, value: Any) -> None:
        raise self.__dict__["_failure"]


class _ItemIndex:
    """Finds the item of a shard or blob by its key and offsets."""

    def __init__(self, loaded: LoadedManifest) -> None:
        self.manifest = loaded.manifest
        # By plain tuples: an index computes its hash anew, in Python, whenever it is looked up.
        self._numbers: dict[tuple[str, Any], tuple[int, Shard | None, str]] = {}
        self._dtypes: dict[str, Any] = {}
        number = 0
        for key, dtype, _, shards, _ in self.manifest.tensors:
            for shard in shards:
                self._numbers[key, shard.offsets] = (number, shard, dtype)
                number += 1
        for key in self.manifest.blobs:
            self._numbers[key, None] = (number, None, "uint8")
            number += 1

    def dtype(self, name: str) -> Any:
        known = self._dtypes.get(name)
        return known if known is not None else self._dtypes.setdefault(name, torch_dtype(name))

    def find(self, index: Any) -> tuple[int, Shard | None, str]:
        try:
            return self._numbers[index.fqn, index.offset]
        except KeyError as error:
            raise UsageError(
                f"the load plan asks for {index.fqn!r} at {index.offset}, which the checkpoint does not have",
                next_step="check the load planner",
            ) from error


class _Load(Protocol):
    """A part of a plan that is read at once. `staging_bytes` of host memory are held until `commit`."""

    @property
    def request(self) -> Request | None: ...

    @property
    def staging_bytes(self) -> int: ...

    def commit(self, trusted_types: Sequence[type]) -> None:
        """Give the planner what was read."""
        ...


class _BlobLoad:
    """An object."""

    def __init__(self, item: Any, planner: Any, index: _ItemIndex) -> None:
        self._item, self._planner = item, planner
        number, _, _ = index.find(item.storage_index)
        self.staging_bytes = int(index.manifest.items["nbytes"][number])
        self._data = np.empty(self.staging_bytes, dtype=np.uint8)
        runs = Runs(0, self.staging_bytes, (), ())
        self.request = Request(number, runs, self._data) if self.staging_bytes else None

    def commit(self, trusted_types: Sequence[type]) -> None:
        data = self._data.tobytes()
        # The stock planner unpickles without restrictions: only what the safe loader accepts gets that far.
        check_blob(data, self._item.storage_index.fqn, trusted_types)
        self._planner.load_bytes(self._item, io.BytesIO(data))


class _DirectLoad(NamedTuple):
    """A tensor whose bytes go straight into its memory. There may be tens of thousands."""

    item: Any
    planner: Any
    tensor: Any
    request: Request | None
    staging_bytes: int = 0

    def commit(self, trusted_types: Sequence[type]) -> None:
        self.planner.commit_tensor(self.item, self.tensor)


class _StagedLoad:
    """A piece of a tensor, whose bytes go into `staged`, which `commit` copies to `piece`; `tensor` with the last one."""

    def __init__(self, item: Any, planner: Any, tensor: Any, piece: Any, staged: Any, request: Request | None) -> None:
        self._item, self._planner, self._tensor = item, planner, tensor
        self._piece, self._staged = piece, staged
        self.request = request
        self.staging_bytes = staged.numel() * staged.element_size()

    def commit(self, trusted_types: Sequence[type]) -> None:
        try:
            copy_bits(self._staged, self._piece)
        except RuntimeError as error:
            raise StateMismatchError(
                f"{self._item.dest_index.fqn!r} cannot be copied into ({error!s:.200})",
                next_step="load into a dense tensor whose elements lie apart",
            ) from error
        if self._tensor is not None:
            self._planner.commit_tensor(self._item, self._tensor)


def _tensor_loads(item: Any, planner: Any, index: _ItemIndex) -> Iterable[_Load]:
    number, shard, dtype_name = index.find(item.storage_index)
    if shard is None:
        raise UsageError(
            f"{item.storage_index.fqn!r} is an object in the checkpoint", next_step="load it into an object"
        )
    itemsize, _ = DTYPES[dtype_name]
    dtype = index.dtype(dtype_name)
    tensor, lengths = planner.resolve_tensor(item), tuple(item.lengths)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.shape != lengths:
        raise UsageError(
            f"{item.dest_index.fqn!r} has shape {tuple(tensor.shape)} where the plan says {lengths}",
            next_step="check the load planner",
        )
    memory = plain_memory(tensor) if tensor.dtype == dtype else None
    if memory is not None:
        runs = box_runs(shard.sizes, item.storage_offsets, lengths, itemsize)
        return (_DirectLoad(item, planner, tensor, None if runs is None else Request(number, runs, memory)),)
    if tensor.layout is not torch.strided:
        raise StateMismatchError(
            f"{item.dest_index.fqn!r} is a {tensor.layout} tensor, into which nothing can be loaded",
            next_step="load into a dense tensor",
        )
    if lacks_memory(tensor):
        raise StateMismatchError(
            f"the memory of {item.dest_index.fqn!r} was freed or shrunk",
            next_step="load into a tensor that has its memory",
        )
    return _staged_loads(item, planner, tensor, number, shard.sizes, dtype)


def _staged_loads(
    item: Any, planner: Any, tensor: Any, number: int, sizes: Sequence[int], dtype: Any
) -> Iterator[_Load]:
    pieces = list(split_box(item.lengths, dtype.itemsize, _STAGING_BYTES))
    for position, (offsets, lengths) in enumerate(pieces):
        staged = torch.empty(lengths, dtype=dtype)
        begin = [first + more for first, more in zip(item.storage_offsets, offsets, strict=True)]
        runs = box_runs(sizes, begin, lengths, dtype.itemsize)
        request = None if runs is None else Request(number, runs, bytes_of(staged).numpy())
        piece = tensor[tuple(slice(first, first + length) for first, length in zip(offsets, lengths, strict=True))]
        last = position == len(pieces) - 1
        yield _StagedLoad(item, planner, tensor if last else None, piece, staged, request)


def _waves(items: Sequence[Any], planner: Any, index: _ItemIndex) -> Iterator[list[_Load]]:
    """The loads of a plan, in groups that need a bounded amount of staging memory (or are a single object)."""
    wave: list[_Load] = []
    staged = 0
    for item in items:
        blob = item.type == LoadItemType.BYTE_IO
        for load in (_BlobLoad(item, planner, index),) if blob else _tensor_loads(item, planner, index):
            wave.append(load)
            staged += load.staging_bytes
            if staged >= _STAGING_BYTES:
                yield wave
                wave, staged = [], 0
    if wave:
        yield wave
