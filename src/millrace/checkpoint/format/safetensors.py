"""The safetensors format: the header of a file, and the index of a model in several files. Pure.

A file is the length of its header (8 bytes, little-endian), the header (JSON), and the tensors, at byte offsets from the
end of the header. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from millrace.checkpoint.format.manifest import DTYPES
from millrace.errors import CorruptCheckpointError, UnsupportedObjectError
from millrace.figures import listed

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
LENGTH_BYTES = 8
# Readers of safetensors reject longer headers.
MAX_HEADER_BYTES = 100_000_000

_NAMES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class NewTensor(NamedTuple):
    """A tensor to write: its name in the file, element type and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][0]


class FileTensor(NamedTuple):
    """A tensor of a file. Its values are the bytes `[start, stop)`. `dtype` is None for a type that is not supported."""

    name: str
    dtype: str | None
    stored_dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def pack_header(tensors: Sequence[NewTensor]) -> bytes:
    """The start of a file with these tensors, one after the other.

    Raises `UnsupportedObjectError` for element types and names that the format does not have.
    """
    unknown = [f"{each.name!r} ({each.dtype})" for each in tensors if each.dtype not in _NAMES]
    if unknown:
        raise UnsupportedObjectError(
            f"safetensors cannot hold {listed(unknown, 3)}",
            next_step="leave them out by naming the others, or export to torch",
        )
    # Transformers requires the format "pt".
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for each in tensors:
        if each.name in header:
            raise UnsupportedObjectError(
                f"safetensors cannot hold a second {each.name!r}", next_step="choose other keys, or another prefix"
            )
        try:
            each.name.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedObjectError(
                f"safetensors cannot hold the key {each.name!r}, which is not valid Unicode",
                next_step="leave it out by naming the others, or export to torch",
            ) from error
        header[each.name] = {
            "dtype": _NAMES[each.dtype],
            "shape": each.shape,
            "data_offsets": [position, position + each.nbytes],
        }
        position += each.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UnsupportedObjectError("safetensors cannot hold so many keys", next_step="name fewer keys")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_bytes(head: bytes, file_bytes: int) -> int:
    """The bytes before the first tensor, from the first bytes of a file of `file_bytes`.

    Raises `CorruptCheckpointError`.
    """
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if len(head) < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise CorruptCheckpointError("not a safetensors file")
    return LENGTH_BYTES + length


def parse_header(head: bytes, file_bytes: int) -> list[FileTensor]:
    """The tensors of a file of `file_bytes` bytes, from its first `header_bytes`. Raises `CorruptCheckpointError`."""
    try:
        header = json.loads(head[LENGTH_BYTES:], object_pairs_hook=_unique)
        found = [
            _tensor(name, value, len(head), file_bytes) for name, value in header.items() if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError("its header is damaged") from error
    # The tensors of a small file could otherwise take any amount of memory.
    by_place = sorted((each for each in found if each.start < each.stop), key=lambda each: each.start)
    for before, after in itertools.pairwise(by_place):
        if after.start < before.stop:
            raise CorruptCheckpointError(f"the values of {before.name!r:.100} and {after.name!r:.100} overlap")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name twice")
    return made


def _tensor(name: str, value: Mapping[str, Any], first: int, file_bytes: int) -> FileTensor:
    shape, (start, stop) = tuple(value["shape"]), value["data_offsets"]
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in (*shape, start, stop)):
        raise ValueError(f"{name!r} has impossible numbers")
    stored = value["dtype"]
    dtype = _DTYPES.get(stored)
    if dtype is not None and stop - start != math.prod(shape) * DTYPES[dtype][0]:
        raise ValueError(f"{name!r} has another length than its shape")
    if start > stop or first + stop > file_bytes:
        raise CorruptCheckpointError(f"it is cut: the values of {name!r} are not in it")
    return FileTensor(name, dtype, str(stored), shape, first + start, first + stop)


def pack_index(files: Mapping[str, Sequence[NewTensor]]) -> bytes:
    """The index of a model in several files, as transformers reads it."""
    total = sum(each.nbytes for tensors in files.values() for each in tensors)
    names = {each.name: file for file, tensors in files.items() for each in tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2).encode() + b"\n"


def parse_index(data: bytes) -> dict[str, str]:
    """The file of each tensor, from an index. Raises `CorruptCheckpointError`."""
    try:
        names = json.loads(data)["weight_map"]
        if not names or not all(type(part) is str for pair in names.items() for part in pair):
            raise ValueError("not a map of names")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError("it is not an index of safetensors files") from error
    for name in names.values():
        if "/" in name or name in ("", ".", "..") or "\0" in name or any("\ud800" <= each <= "\udfff" for each in name):
            raise CorruptCheckpointError(f"it contains the file name {name!r:.100}")
    return dict(names)


def split_files(tensors: Sequence[NewTensor], limit_bytes: int) -> dict[str, list[NewTensor]]:
    """The tensors of each file, none above `limit_bytes` unless it has one tensor only. Names are those of transformers."""
    groups: list[list[NewTensor]] = []
    nbytes = 0
    for each in tensors:
        if not groups or nbytes + each.nbytes > limit_bytes:
            groups.append([])
            nbytes = 0
        groups[-1].append(each)
        nbytes += each.nbytes
    if len(groups) == 1:
        return {SINGLE_NAME: groups[0]}
    return {f"model-{number:05}-of-{len(groups):05}.safetensors": group for number, group in enumerate(groups, 1)}
