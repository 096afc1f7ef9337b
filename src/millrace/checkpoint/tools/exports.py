"""Exports a checkpoint, bit for bit, to a file or directory that other programs read: `export_checkpoint`.

- `torch`: one file for `torch.load(weights_only=True)`, with the state dict nested as it was saved. Needs memory for all.
- `safetensors`: the tensors under their flat keys in one file, which is streamed.
- `dcp`: a checkpoint in torch's own format, written tensor by tensor.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from millrace.checkpoint.format.inventory import select_keys
from millrace.checkpoint.format.manifest import DTYPES, WrappedEntry
from millrace.checkpoint.reading.contents import Box, Contents, pieces, stream, whole
from millrace.checkpoint.reading.opening import open_contents
from millrace.checkpoint.tools import WorkProgress
from millrace.checkpoint.tools.export_targets import DirectoryTarget, FileTarget
from millrace.errors import MissingDependencyError, UnsupportedObjectError, UsageError

ExportFormat = Literal["torch", "safetensors", "dcp"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = ("torch", "safetensors", "dcp")

_SAFETENSORS_DTYPES = {
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
# Readers of safetensors reject longer headers.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """The figures of an export to `target`: numbers of `tensors` and `objects`, `raw_bytes` of values, and `seconds`.

    `left_out` are selected keys that the format cannot hold (objects, for safetensors).
    """

    url: str
    target: str
    to: ExportFormat
    tensors: int
    objects: int
    raw_bytes: int
    left_out: tuple[str, ...]
    seconds: float


def export_checkpoint(
    url: str,
    target: str | os.PathLike[str],
    to: ExportFormat,
    *,
    keys: Sequence[str] = (),
    strip_prefix: str = "",
    overwrite: bool = False,
    target_options: Mapping[str, Any] | None = None,
    output_options: Mapping[str, Any] | None = None,
    threads: int | None = None,
    trusted_types: Sequence[type] = (),
    extension_registry: Any = None,
    progress: Callable[[WorkProgress], None] | None = None,
) -> ExportReport:
    """Export the checkpoint at `url`, of Millrace or of torch's own writer, to `target`: a file, or for `dcp` a directory.

    `keys` are patterns (`select_keys`). `strip_prefix`, for safetensors, selects the keys that begin with it, and removes
    it. `target_options` are for the storage of the checkpoint, `output_options` for that of the target. The target
    becomes visible when all of it is durable. An existing one is an `ObjectExistsError` without `overwrite`.

    Raises errors of a load, `UsageError`, `UnsupportedObjectError` for values that the format cannot hold, and
    `MissingDependencyError`.
    """
    if to not in EXPORT_FORMATS:
        raise UsageError(f"{to!r} is not an export format", next_step=f"choose one of {', '.join(EXPORT_FORMATS)}")
    if strip_prefix and to != "safetensors":
        raise UsageError("a prefix can only be stripped for safetensors", next_step="leave it out")
    began = time.monotonic()
    place = os.fspath(target)
    contents = open_contents(
        url,
        target_options,
        threads=threads,
        trusted_types=trusted_types,
        extension_registry=extension_registry,
        keys=keys,
    )
    chosen = select_keys([*contents.tensors, *contents.blob_bytes], keys)
    wrapped: list[WrappedEntry] = []
    if to != "safetensors":
        # A wrapper tensor is exported as one value. Only safetensors has its plain tensors instead.
        wrapped = [each for each in contents.wrapped.values() if not set(chosen).isdisjoint(_keys_of(each))]
        parts = {key for each in wrapped for key in _keys_of(each)}
        chosen = [key for key in chosen if key not in parts]
    tensors = [key for key in chosen if key in contents.tensors]
    objects = [key for key in chosen if key in contents.blob_bytes]
    left_out: list[str] = []
    leaves = [key for each in wrapped for _, keys in each.parts for key in keys]
    counter = _Counter(sum(whole(contents.tensors[key]).nbytes for key in (*tensors, *leaves)), progress)
    if to == "safetensors":
        left_out = objects + [key for key in tensors if not key.startswith(strip_prefix)]
        tensors, objects = [key for key in tensors if key.startswith(strip_prefix)], []
        counter = _Counter(sum(whole(contents.tensors[key]).nbytes for key in tensors), progress)
        _write_safetensors(
            contents, tensors, strip_prefix, FileTarget(place, output_options, overwrite=overwrite), counter
        )
    else:
        try:
            from millrace.checkpoint.tools.export_torch import write_dcp, write_torch
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                f"an export to {to} needs torch", next_step="pip install 'millrace[torch]'"
            ) from error
        if to == "torch":
            file = FileTarget(place, output_options, overwrite=overwrite)
            write_torch(contents, tensors, objects, wrapped, file, trusted_types, counter.add)
        else:
            directory = DirectoryTarget(place, output_options, overwrite=overwrite)
            write_dcp(contents, tensors, objects, wrapped, directory, trusted_types, counter.add)
    return ExportReport(
        url=contents.url,
        target=place,
        to=to,
        tensors=len(tensors) + len(wrapped),
        objects=len(objects),
        raw_bytes=counter.total_bytes,
        left_out=tuple(left_out),
        seconds=time.monotonic() - began,
    )


def _keys_of(wrapped: WrappedEntry) -> list[str]:
    return [key for recipe, leaves in wrapped.parts for key in (recipe, *leaves)]


class _Counter:
    """Reports the progress of an export. Every byte counts twice: when it is read, and when it is written."""

    def __init__(self, total_bytes: int, progress: Callable[[WorkProgress], None] | None) -> None:
        self.total_bytes = total_bytes
        self._done_bytes, self._progress = 0, progress

    def add(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self._progress is not None:
            # Files contain more bytes than the values.
            done_bytes = min(self._done_bytes // 2, self.total_bytes)
            self._progress(WorkProgress(done_bytes=done_bytes, total_bytes=self.total_bytes))


# --- safetensors ------------------------------------------------------------------------------------------


def safetensors_header(parts: Sequence[tuple[str, Box]]) -> bytes:
    """The header of a safetensors file with `parts` under these names, one after the other. Pure.

    Raises `UnsupportedObjectError` for element types that the format does not have.
    """
    unknown = [f"{name!r} ({part.dtype})" for name, part in parts if part.dtype not in _SAFETENSORS_DTYPES]
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise UnsupportedObjectError(
            f"safetensors cannot hold {', '.join(unknown[:3])}{more}",
            next_step="leave them out by naming the others, or export to torch",
        )
    # Transformers requires the format "pt".
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, part in parts:
        if name in header:
            raise UnsupportedObjectError(
                f"safetensors cannot hold a second {name!r}", next_step="choose other keys, or another prefix"
            )
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedObjectError(
                f"safetensors cannot hold the key {name!r}, which is not valid Unicode",
                next_step="leave it out by naming the others, or export to torch",
            ) from error
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[part.dtype],
            "shape": part.lengths,
            "data_offsets": [position, position + part.nbytes],
        }
        position += part.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise UnsupportedObjectError("safetensors cannot hold so many keys", next_step="name fewer keys")
    return len(text).to_bytes(8, "little") + text


def _write_safetensors(
    contents: Contents, keys: Sequence[str], prefix: str, target: FileTarget, counter: _Counter
) -> None:
    if not keys:
        raise UsageError(
            f"no tensor of {contents.url} " + (f"is below {prefix!r}" if prefix else "was selected"),
            next_step="'millrace checkpoints show' lists the keys",
        )
    # Tensors with the widest elements first, so that each is aligned; then in the order of the checkpoint.
    ordered = sorted(keys, key=lambda key: (-DTYPES[contents.tensors[key].dtype][0], contents.place(key)))
    wholes = [whole(contents.tensors[key]) for key in ordered]
    header = safetensors_header([(part.key[len(prefix) :], part) for part in wholes])
    with target.open(counter.add) as file:
        file.write(header)
        for _, data in stream(
            contents, (piece for part in wholes for piece in pieces(contents, part)), count=counter.add
        ):
            file.write(data.data)
