"""The two exports that need torch: one file of `torch.save`, and a checkpoint of torch's own writer."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import random
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.planner import WriteItemType

from millrace.checkpoint.places.manifests import STOCK_METADATA_NAME, read_stock_metadata
from millrace.checkpoint.places.stock_metadata import stock_files
from millrace.checkpoint.places.storage import CheckpointStorage
from millrace.checkpoint.reading.contents import Bytes, Contents, Part, stream, whole
from millrace.checkpoint.state.tensors import check_blob, torch_dtype
from millrace.checkpoint.tools.export_targets import DirectoryTarget, FileStream, FileTarget
from millrace.checkpoint.writing.packing import discard
from millrace.errors import CorruptCheckpointError, MillraceError, MissingError

# In one list of a state dict.
_MAX_LIST_MEMBERS = 1 << 24
# Torch's writer holds all tensors of a file until that is complete.
_FILE_BYTES = 128 << 20


def write_torch(
    contents: Contents,
    keys: Sequence[str],
    objects: Sequence[str],
    target: FileTarget,
    trusted_types: Sequence[type],
    count: Callable[[int], None],
) -> None:
    """Write one file for `torch.load(weights_only=True)`. Raises `UnsupportedObjectError` for an object that it refuses."""
    target.check()
    values: dict[str, Any] = {}
    for part, data in stream(contents, (whole(contents.tensors[key]) for key in keys)):
        values[part.key] = as_tensor(part, data)
        count(data.size)
    for key, blob in zip(objects, contents.read_blobs(objects), strict=True):
        values[key] = check_blob(blob, key, trusted_types)
    with target.open() as file:
        torch.save(nested(values, contents.planner_data), file)


def as_tensor(part: Part, data: Bytes) -> Any:
    """The values of a part as a tensor over the same memory."""
    if not data.size:  # numpy gives such an array strides that torch's view does not take
        return torch.empty(part.lengths, dtype=torch_dtype(part.dtype))
    return torch.from_numpy(data).view(torch_dtype(part.dtype)).reshape(part.lengths)


def nested(values: Mapping[str, Any], planner_data: Any) -> dict[str, Any]:
    """A flat state dict as it was before the save planner made it flat, by the path that the planner kept for each key.

    Values without a path stay under their flat keys. A list of which only some members are there has None in place of
    the others. Raises `CorruptCheckpointError` for paths that contradict each other.
    """
    paths = planner_data if isinstance(planner_data, dict) else {}
    # In the order in which they were saved, as far as that is known.
    order = {key: number for number, key in enumerate(paths)}
    state: dict[str, Any] = {}
    for key in sorted(values, key=lambda key: order.get(key, len(order))):
        path = paths.get(key)
        if isinstance(path, tuple) and path and all(type(part) in (str, int) for part in path):
            _place(state, path, values[key], key)
        else:
            _put(state, key, values[key], key)
    return state


def _place(state: Any, path: tuple[str | int, ...], value: Any, key: str) -> None:
    container = state
    for part, following in itertools.pairwise(path):
        inner = _get(container, part, key)
        if inner is None:
            inner = [] if type(following) is int else {}
            _put(container, part, inner, key)
        container = inner
    _put(container, path[-1], value, key)


def _get(container: Any, part: str | int, key: str) -> Any:
    if type(container) is dict:
        return container.get(part)
    if type(container) is list and type(part) is int:
        return container[part] if 0 <= part < len(container) else None
    raise _contradiction(key)


def _put(container: Any, part: str | int, value: Any, key: str) -> None:
    if _get(container, part, key) is not None:
        raise _contradiction(key)
    if type(container) is list:
        if not (type(part) is int and 0 <= part < _MAX_LIST_MEMBERS):
            raise _contradiction(key)
        container.extend([None] * (part + 1 - len(container)))
    container[part] = value


def _contradiction(key: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"the checkpoint's planner data has no place for {key!r}", next_step="export to safetensors, which is flat"
    )


# --- a checkpoint of torch's own --------------------------------------------------------------------------


def write_dcp(
    contents: Contents,
    keys: Sequence[str],
    objects: Sequence[str],
    target: DirectoryTarget,
    count: Callable[[int], None],
) -> None:
    """Write what `FileSystemReader` reads. Its `.metadata` comes last and in one step, and makes it a checkpoint.

    What was there before, as far as its metadata names it, is removed after that.
    """
    target.prepare()
    storage = target.storage
    previous = read_stock_metadata(storage)
    files = _Files(storage)
    try:
        _save(contents, keys, objects, files, count)
    except BaseException:
        discard(storage, files.written)
        raise
    if previous is not None:
        # Not readable any more, or not of torch's: then what it names is not known, and stays.
        with contextlib.suppress(MillraceError):
            discard(storage, [name for name in stock_files(previous, storage.url) if name not in files.written])


def _save(
    contents: Contents, keys: Sequence[str], objects: Sequence[str], files: _Files, count: Callable[[int], None]
) -> None:
    described: dict[str, Any] = {
        key: torch.empty(contents.tensors[key].shape, dtype=torch_dtype(contents.tensors[key].dtype), device="meta")
        for key in keys
    }
    described.update(dict.fromkeys(objects))
    writer = _Writer(contents.url)
    writer.fs = files
    planner = _StreamingPlanner(contents, keys, count)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            save(described, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as failed:
        # There is one rank, and torch wraps whatever it raises, an interrupt included.
        raise next(iter(failed.failures.values()))[0] from failed
    finally:
        planner.close()


class _StreamingPlanner(DefaultSavePlanner):  # type: ignore[misc]
    """Plans by tensors without values, which are read when the writer comes to them."""

    def __init__(self, contents: Contents, keys: Sequence[str], count: Callable[[int], None]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._contents, self._count = contents, count
        self._keys = keys
        self._values: Iterator[tuple[Part, Bytes]] | None = None
        self._early: dict[str, Any] = {}

    def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Any]:
        plans, metadata = super().create_global_plan(all_plans)
        paths = self._contents.planner_data
        if isinstance(paths, dict):
            paths = {key: path for key, path in paths.items() if key in metadata.state_dict_metadata}
        return plans, dataclasses.replace(metadata, planner_data=paths)

    def finish_plan(self, new_plan: Any) -> Any:
        plan = super().finish_plan(new_plan)
        order = [item.index.fqn for item in plan.items if item.type != WriteItemType.BYTE_IO]
        self._values = iter(stream(self._contents, (whole(self._contents.tensors[key]) for key in order)))
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        key = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._contents.read_blobs([key])[0])
        while key not in self._early and self._values is not None:
            part, data = next(self._values)
            self._early[part.key] = as_tensor(part, data)
            self._count(data.size)
        return self._early.pop(key)

    def close(self) -> None:
        """End what reads ahead."""
        self._early.clear()
        if isinstance(self._values, Generator):
            self._values.close()


class _Writer(FileSystemWriter):  # type: ignore[misc]
    """Torch's writer; its data files have names that no earlier export has used."""

    def __init__(self, path: str) -> None:
        # One thread: values come in the order of the plan. Syncing is the storage's affair.
        super().__init__(path, sync_files=False, thread_count=1)
        self._number = random.SystemRandom().randrange(10**9, 10**10)

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans  # where it goes is decided in `write_data`

    def write_data(self, plan: Any, planner: Any) -> Any:
        written: list[Any] = []
        for number, items in enumerate(_files_of(plan.items), self._number):
            part = dataclasses.replace(plan, items=items, storage_data=_StoragePrefix(f"__{number}_"))
            written += super().write_data(part, planner).wait()
        future: Any = torch.futures.Future()
        future.set_result(written)
        return future


def _files_of(items: Sequence[Any]) -> Iterator[list[Any]]:
    """The items in groups of about `_FILE_BYTES`; one group at least."""
    group: list[Any] = []
    nbytes = 0
    for item in items:
        if group and nbytes + (item.tensor_storage_size() or 0) > _FILE_BYTES:
            yield group
            group, nbytes = [], 0
        group.append(item)
        nbytes += item.tensor_storage_size() or 0
    yield group


class _Files(FileSystem):  # type: ignore[misc]
    """The few file operations that torch's writer makes, over a `CheckpointStorage`. `written` are the data files."""

    def __init__(self, storage: CheckpointStorage) -> None:
        self._storage = storage
        self.written: list[str] = []
        self._metadata: io.BytesIO | None = None

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        name = str(path)
        if name.startswith(STOCK_METADATA_NAME):
            self._metadata = io.BytesIO()
            yield self._metadata
            return
        self.written.append(name)
        with FileStream(self._storage.open_writer(name)) as stream:
            yield stream

    def concat_path(self, path: Any, suffix: str) -> str:
        return suffix

    def init_path(self, path: Any) -> Any:
        return path

    def mkdir(self, path: Any) -> None:
        """The directory is there."""

    def exists(self, path: Any) -> bool:
        return False  # what lies there is replaced by `rename`, in one step

    def rename(self, path: Any, new_path: Any) -> None:
        if self._metadata is None:
            raise MissingError(f"torch's writer renames {path}, which it has not written")
        self._storage.publish(str(new_path), self._metadata.getvalue(), replace=True)
