"""The metadata of torch's own writer: its data files, and a summary of the checkpoint.

The metadata is a pickle. Unpickling accepts only the classes that torch writes.
"""

from __future__ import annotations

import contextlib
import enum
import io
import pathlib
import pickle
import pickletools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.storage.manifests import STOCK_METADATA_NAME, CheckpointSummary
from millrace.errors import CorruptCheckpointError, MillraceError, UnsupportedObjectError

# The data files of torch's writer. Other files in the metadata must not be removed.
_FILE_NAME = re.compile(r"__\d+_\d+\.distcp", re.ASCII)


def _layout(name: Any) -> torch.layout:
    """The layout of this name. A pickle may call the returned object, so nothing else of torch is returned."""
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise UnsupportedObjectError(
            f"the metadata of the checkpoint names {name!s:.100} as a layout", next_step="load another checkpoint"
        )
    return found


_MEMORY_FORMATS = {member.name: member for member in metadata._MEM_FORMAT_ENCODING}


def _member(kind: Any, name: Any) -> metadata._MEM_FORMAT_ENCODING:
    """The memory format of this name. Python 3.11.0 to 3.11.3 store it as `getattr(kind, name)`. Returns nothing else."""
    if kind is not metadata._MEM_FORMAT_ENCODING or type(name) is not str or name not in _MEMORY_FORMATS:
        raise UnsupportedObjectError(
            f"the metadata of the checkpoint contains attribute {name!s:.100} of {kind!s:.100}, which torch does not write",
            next_step="load it with torch's own reader if you trust its source",
        )
    return _MEMORY_FORMATS[name]


_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (kind.__module__, kind.__qualname__): kind
        for kind in (
            metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.Metadata,
            metadata.MetadataIndex,
            metadata.StorageMeta,
            metadata.TensorProperties,
            metadata.TensorStorageMetadata,
            metadata._MEM_FORMAT_ENCODING,
            filesystem._StorageInfo,
            torch.Size,
        )
    },
    # Paths of all platforms and Python versions. Only their text matters.
    **{
        (module, name): pathlib.PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath")
    },
    ("torch.serialization", "_get_layout"): _layout,
    ("builtins", "getattr"): _member,
    ("__builtin__", "getattr"): _member,  # in protocol 2
    ("collections", "OrderedDict"): dict,
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _CLASSES.get((module, name))
        if known is not None:
            return known
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype | torch.memory_format):
            return value
        raise UnsupportedObjectError(
            f"the metadata of the checkpoint contains {module}.{name}, which torch does not write",
            next_step="load it with torch's own reader if you trust its source",
        )


@contextlib.contextmanager
def _unchanged_classes() -> Iterator[None]:
    """Undo changes of a pickle to attributes of the classes that it names, and raise `CorruptCheckpointError`.

    The same for the members of enumerations, which all of the process shares.
    """
    kinds = {kind for kind in _CLASSES.values() if isinstance(kind, type) and kind not in (dict, torch.Size)}
    members = [member for kind in kinds if issubclass(kind, enum.Enum) for member in kind]
    before = [(each, _attributes(each)) for each in (*kinds, *members)]
    changed = False
    try:
        yield
    finally:
        for each, known in before:  # the classes first: a changed one may not even return attributes of its members
            now = _attributes(each)
            for name, value in known.items():
                if name not in now or now[name] is not value:
                    setattr(each, name, value)
                    changed = True
            for name in now.keys() - known.keys():
                delattr(each, name)
                changed = True
    if changed:
        raise CorruptCheckpointError("the metadata of the checkpoint changes classes of torch")


def _attributes(each: Any) -> dict[str, Any]:
    """What can be set of a class or a member, those first on which the others depend."""
    names = ("__class__", "__bases__", "__name__", "__qualname__") if isinstance(each, type) else ("__class__",)
    return {**{name: getattr(each, name) for name in names}, **vars(each)}


def _check_memo(data: bytes) -> None:
    """Raise `CorruptCheckpointError` for an instruction that makes Python allocate much more than the size of `data`.

    The unpickler has a list with one place for each stored value, as long as the largest number that an instruction names.
    """
    for instruction, argument, _ in pickletools.genops(data):
        if instruction.name in ("LONG_BINPUT", "PUT") and isinstance(argument, int) and argument > len(data):
            raise CorruptCheckpointError("the metadata of the checkpoint stores a value under an impossible number")


def _check_members(read: Any) -> None:
    """Raise an exception if a part of the metadata that readers use is missing or has another type."""
    for value in read.state_dict_metadata.values():
        if isinstance(value, metadata.BytesStorageMetadata):
            continue
        shapes = [value.size]
        for chunk in value.chunks:
            shapes += (chunk.offsets, chunk.sizes)
        if not all(isinstance(each, tuple) and len(each) == len(value.size) for each in shapes):
            raise ValueError("a tensor has an impossible shape")
        if not isinstance(value.properties.dtype, torch.dtype):
            raise ValueError("a tensor has no element type")
    for index, info in read.storage_data.items():
        place = (index.fqn, info.relative_path, info.offset, info.length)
        if not all(isinstance(each, str | pathlib.PurePath | int) for each in place):
            raise ValueError("a location has values of other types")


def unpickle_metadata(data: bytes, url: str) -> Any:
    """Unpickle torch's `Metadata` without executing other code.

    Raises `CorruptCheckpointError`, or `UnsupportedObjectError` for metadata with foreign classes.
    """
    try:
        _check_memo(data)
        with _unchanged_classes():
            read = _MetadataUnpickler(io.BytesIO(data)).load()
        if isinstance(read, metadata.Metadata):
            _check_members(read)
    except MillraceError:
        raise
    except Exception as error:
        raise CorruptCheckpointError(
            f"{url}: the metadata cannot be read", next_step="load another checkpoint"
        ) from error
    if not isinstance(read, metadata.Metadata) or not isinstance(read.state_dict_metadata, dict):
        raise CorruptCheckpointError(f"{url}: the metadata has another type", next_step="load another checkpoint")
    return read


def stock_files(data: bytes, url: str) -> list[str]:
    """The data files of torch's metadata in its own directory. Raises as `unpickle_metadata`."""
    stored = unpickle_metadata(data, url).storage_data
    return sorted({info.relative_path for info in stored.values() if _FILE_NAME.fullmatch(str(info.relative_path))})


def summarize_stock(storage: CheckpointStorage) -> CheckpointSummary:
    """The summary of torch's metadata. Objects count with their stored length. Raises as `unpickle_metadata`."""
    file = storage.stat(STOCK_METADATA_NAME)
    read = unpickle_metadata(bytes(memoryview(storage.read(file, 0, file.size))), storage.url)
    tensors = [
        value for value in read.state_dict_metadata.values() if isinstance(value, metadata.TensorStorageMetadata)
    ]
    lengths = {index: int(info.length) for index, info in read.storage_data.items()}
    objects = [
        key for key, value in read.state_dict_metadata.items() if isinstance(value, metadata.BytesStorageMetadata)
    ]
    return CheckpointSummary(
        url=storage.url,
        raw_bytes=sum(value.size.numel() * value.properties.dtype.itemsize for value in tensors)
        + sum(lengths.get(metadata.MetadataIndex(key), 0) for key in objects),
        stored_bytes=sum(lengths.values()) + file.size,
        tensors=len(tensors),
        objects=len(objects),
        created=file.modified,
        format_version=0,
        user={},
    )
