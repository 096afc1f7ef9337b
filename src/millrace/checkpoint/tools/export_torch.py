"""The two exports that need torch: one file of `torch.save`, and a checkpoint in torch's own format."""

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

from millrace.checkpoint.format.manifest import WrappedEntry
from millrace.checkpoint.reading.contents import Box, Bytes, Contents, stream, whole
from millrace.checkpoint.state.tensors import check_blob, copy_bits, torch_dtype
from millrace.checkpoint.state.wrappers import decode_recipe, empty_leaf
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.storage.manifests import STOCK_METADATA_NAME, read_stock_metadata
from millrace.checkpoint.storage.stock_metadata import stock_files
from millrace.checkpoint.tools.export_targets import DirectoryTarget, FileStream, FileTarget
from millrace.checkpoint.writing.packing import discard
from millrace.errors import CorruptCheckpointError, MillraceError, MissingError, UnsupportedObjectError

# Maximum length of a list in a state dict.
_MAX_LIST_MEMBERS = 1 << 24
# Torch's writer keeps all tensors of a file in memory until the file is complete.
_FILE_BYTES = 128 << 20


def write_torch(
    contents: Contents,
    keys: Sequence[str],
    objects: Sequence[str],
    wrapped: Sequence[WrappedEntry],
    target: FileTarget,
    trusted_types: Sequence[type],
    count: Callable[[int], None],
) -> None:
    """Write one file for `torch.load(weights_only=True)`. Raises `UnsupportedObjectError` for objects that it cannot load.

    To load `wrapped` tensors, the reader of the file has to allow their classes.
    """
    target.check()
    values: dict[str, Any] = {}
    for part, data in stream(contents, (whole(contents.tensors[key]) for key in keys), count=count):
        values[part.key] = as_tensor(part, data)
    for key, blob in zip(objects, contents.read_blobs(objects), strict=True):
        values[key] = check_blob(blob, key, trusted_types)
    for each in wrapped:
        values[each.tensor.key] = read_wrapper(contents, each, trusted_types, count)
    with target.open(count) as file:
        try:
            torch.save(nested(values, contents.planner_data), file)
        except RuntimeError as error:
            # An interrupt or a failed write ends torch's zip writer, which then raises an error of its own.
            if isinstance(error.__context__, KeyboardInterrupt | MillraceError):
                raise error.__context__ from None
            raise


def as_tensor(part: Box, data: Bytes) -> Any:
    """The values of a part as a tensor over the same memory."""
    if not data.size:  # such an array has strides in numpy that torch's view refuses
        return torch.empty(part.lengths, dtype=torch_dtype(part.dtype))
    return torch.from_numpy(data).view(torch_dtype(part.dtype)).reshape(part.lengths)


def read_wrapper(
    contents: Contents, entry: WrappedEntry, trusted_types: Sequence[type], count: Callable[[int], None]
) -> Any:
    """Read a wrapper tensor. Raises `UnsupportedObjectError` if its class is not trusted, or it has several shards."""
    key = entry.tensor.key
    if len(entry.parts) > 1:
        raise UnsupportedObjectError(
            f"{key!r} is a wrapper tensor in {len(entry.parts)} shards, which cannot be exported",
            next_step="leave it out, or load it and save it in one piece",
        )
    ((recipe, keys),) = entry.parts
    wrapper = decode_recipe(contents.read_blobs([recipe])[0], key, trusted_types, ())
    leaves, tensors = wrapper.leaves(recipe), {}
    if leaves.keys() != set(keys):
        raise CorruptCheckpointError(f"the recipe of {key!r} has other parts than the manifest")
    for part, data in stream(contents, (whole(contents.tensors[each]) for each in keys), count=count):
        tensors[part.key] = empty_leaf(part.lengths, torch_dtype(part.dtype), leaves[part.key])
        copy_bits(as_tensor(part, data), tensors[part.key])
    return wrapper.build(tensors, recipe)


def nested(values: Mapping[str, Any], planner_data: Any) -> dict[str, Any]:
    """The nested form of a flat state dict, by the path that the save planner stored for each key.

    Keys are text, except the parameter numbers of an optimizer's state. Values without a path stay under their flat keys.
    In a list, missing members are None. Raises `CorruptCheckpointError` for paths that contradict each other.
    """
    paths = planner_data if isinstance(planner_data, dict) else {}
    # Keys with a path are in the order in which they were saved.
    order = {key: number for number, key in enumerate(paths)}
    state: dict[str, Any] = {}
    for key in sorted(values, key=lambda key: order.get(key, len(order))):
        path = paths.get(key)
        if isinstance(path, tuple) and path and all(type(part) in (str, int) for part in path):
            _place(state, path, values[key], key)
        else:
            _put(state, key, values[key], key)
    _number_parameters(state)
    return state


def _number_parameters(container: Any) -> None:
    """Make the keys of each optimizer's state numbers again.

    Keys are text in a checkpoint. The lists of parameters in the optimizer's groups have the numbers.
    """
    if type(container) is list:
        for member in container:
            _number_parameters(member)
    if type(container) is not dict:
        return
    for member in container.values():
        _number_parameters(member)
    state, groups = container.get("state"), container.get("param_groups")
    if type(state) is dict and type(groups) is list:
        parameters = [group.get("params") for group in groups if type(group) is dict]
        listed = [number for each in parameters if type(each) is list for number in each]
        numbers = {str(number): number for number in listed if type(number) is int}
        container["state"] = {numbers.get(key, key): value for key, value in state.items()}


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


# --- a checkpoint in torch's own format -------------------------------------------------------------------


def write_dcp(
    contents: Contents,
    keys: Sequence[str],
    objects: Sequence[str],
    wrapped: Sequence[WrappedEntry],
    target: DirectoryTarget,
    trusted_types: Sequence[type],
    count: Callable[[int], None],
) -> None:
    """Write a checkpoint for `FileSystemReader`. Its `.metadata` is written last, atomically, and makes it complete.

    After that, the files that the metadata of an earlier checkpoint names are removed.
    """
    target.prepare()
    storage = target.storage
    previous = read_stock_metadata(storage)
    files = _Files(storage, count)
    try:
        _save(contents, keys, objects, wrapped, files, trusted_types, count)
    except BaseException:
        if not files.may_be_complete():
            discard(storage, files.written)
            target.remove_if_new()
        raise
    if previous is not None:
        # The files of metadata that cannot be read are not known, and stay.
        with contextlib.suppress(MillraceError):
            discard(storage, [name for name in stock_files(previous, storage.url) if name not in files.written])


def _save(
    contents: Contents,
    keys: Sequence[str],
    objects: Sequence[str],
    wrapped: Sequence[WrappedEntry],
    files: _Files,
    trusted_types: Sequence[type],
    count: Callable[[int], None],
) -> None:
    entries = [*(contents.tensors[key] for key in keys), *(each.tensor for each in wrapped)]
    described: dict[str, Any] = {
        entry.key: torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="meta") for entry in entries
    }
    described.update(dict.fromkeys(objects))
    writer = _Writer(contents.url)
    writer.fs = files
    planner = _StreamingPlanner(contents, {each.tensor.key: each for each in wrapped}, trusted_types, count)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            save(described, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as failed:
        # There is one rank, and torch wraps each of its errors, including an interrupt.
        raise next(iter(failed.failures.values()))[0] from failed
    finally:
        planner.close()


class _StreamingPlanner(DefaultSavePlanner):  # type: ignore[misc]
    """Plans with tensors without values. The values are read when the writer needs them."""

    def __init__(
        self,
        contents: Contents,
        wrapped: Mapping[str, WrappedEntry],
        trusted_types: Sequence[type],
        count: Callable[[int], None],
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._contents, self._count = contents, count
        self._wrapped, self._trusted_types = wrapped, trusted_types
        self._values: Iterator[tuple[Box, Bytes]] | None = None
        self._early: dict[str, Any] = {}

    def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Any]:
        plans, metadata = super().create_global_plan(all_plans)
        paths = self._contents.planner_data
        if isinstance(paths, dict):
            paths = {key: path for key, path in paths.items() if key in metadata.state_dict_metadata}
        return plans, dataclasses.replace(metadata, planner_data=paths)

    def finish_plan(self, new_plan: Any) -> Any:
        plan = super().finish_plan(new_plan)
        names = (item.index.fqn for item in plan.items if item.type != WriteItemType.BYTE_IO)
        order = [name for name in names if name not in self._wrapped]
        parts = (whole(self._contents.tensors[key]) for key in order)
        self._values = iter(stream(self._contents, parts, count=self._count))
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        key = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._contents.read_blobs([key])[0])
        if key in self._wrapped:
            return read_wrapper(self._contents, self._wrapped[key], self._trusted_types, self._count)
        while key not in self._early and self._values is not None:
            part, data = next(self._values)
            self._early[part.key] = as_tensor(part, data)
        return self._early.pop(key)

    def close(self) -> None:
        """Stop reading ahead."""
        self._early.clear()
        if isinstance(self._values, Generator):
            self._values.close()


class _Writer(FileSystemWriter):  # type: ignore[misc]
    """Torch's writer, with names of data files that no earlier export has used."""

    def __init__(self, path: str) -> None:
        # One thread, so that values are written in the order of the plan. The storage syncs files.
        super().__init__(path, sync_files=False, thread_count=1)
        self._number = random.SystemRandom().randrange(10**9, 10**10)

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans  # `write_data` chooses the files

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
    """The file operations of torch's writer over a `CheckpointStorage`. `written` are the data files."""

    def __init__(self, storage: CheckpointStorage, count: Callable[[int], None]) -> None:
        self._storage, self._count = storage, count
        self.written: list[str] = []
        self._metadata: io.BytesIO | None = None
        self._is_renamed = False

    def may_be_complete(self) -> bool:
        """Whether the metadata may be visible: a disk may fail after the rename, and a response of a store may be lost."""
        if not self._is_renamed or self._metadata is None:
            return False
        try:
            return read_stock_metadata(self._storage) == self._metadata.getvalue()
        except MillraceError:
            return True

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        name = str(path)
        if name.startswith(STOCK_METADATA_NAME):
            self._metadata = io.BytesIO()
            yield self._metadata
            return
        self.written.append(name)
        with FileStream(self._storage.open_writer(name), self._count) as stream:
            yield stream

    def concat_path(self, path: Any, suffix: str) -> str:
        return suffix

    def init_path(self, path: Any) -> Any:
        return path

    def mkdir(self, path: Any) -> None:
        """The directory exists already."""

    def exists(self, path: Any) -> bool:
        return False  # `rename` replaces an existing file atomically

    def rename(self, path: Any, new_path: Any) -> None:
        if self._metadata is None:
            raise MissingError(f"torch's writer renames {path}, which it has not written")
        self._is_renamed = True
        self._storage.publish(str(new_path), self._metadata.getvalue(), replace=True)
