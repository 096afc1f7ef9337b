"""Exports a checkpoint, bit for bit, to a file or directory that other programs read: `export_checkpoint`.

- `torch`: one file for `torch.load(weights_only=True)`, with the state dict nested as it was saved. Needs memory for all.
- `safetensors`: the tensors under their flat keys in one file, or in several with an index, which are streamed.
- `dcp`: a checkpoint in torch's own format, written tensor by tensor.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from millrace.checkpoint.format.inventory import select_keys
from millrace.checkpoint.format.manifest import WrappedEntry
from millrace.checkpoint.reading.contents import whole
from millrace.checkpoint.reading.opening import open_contents
from millrace.checkpoint.run.tiers import run_directory
from millrace.checkpoint.tools import WorkProgress
from millrace.checkpoint.tools.export_safetensors import names_of, write_safetensors
from millrace.checkpoint.tools.export_targets import DirectoryTarget, FileTarget
from millrace.errors import MissingDependencyError, UsageError

ExportFormat = Literal["torch", "safetensors", "dcp"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = ("torch", "safetensors", "dcp")
_FLOATS = ("float64", "float32", "float16", "bfloat16")


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
    rename: Sequence[str] = (),
    dtype: str | None = None,
    shard_bytes: int | None = None,
    overwrite: bool = False,
    target_options: Mapping[str, Any] | None = None,
    output_options: Mapping[str, Any] | None = None,
    threads: int | None = None,
    trusted_types: Sequence[type] = (),
    extension_registry: Any = None,
    progress: Callable[[WorkProgress], None] | None = None,
) -> ExportReport:
    """Export the checkpoint at `url` to `target`: a file, or for `dcp` a directory.

    Reads checkpoints of Millrace and of torch's own writer, and Hugging Face directories. `keys`: as in `select_keys`.

    For safetensors: `strip_prefix` selects the keys that begin with it, and removes it. `rename` changes names, as
    `PATTERN=REPLACEMENT` with a regular expression (`names_of`). `dtype` ("bfloat16") converts floating-point tensors; it
    needs torch. With `shard_bytes`, `target` is a directory: it gets files of at most that size (or one tensor each) and
    `model.safetensors.index.json`, which is written last. A model that is overwritten there is removed first.

    `target_options` are for the storage of the checkpoint, `output_options` for that of the target. The target
    becomes visible when all of it is durable. An existing one is an `ObjectExistsError` without `overwrite`.

    Raises errors of a load, `UsageError`, `UnsupportedObjectError` for values that the format cannot hold, and
    `MissingDependencyError`.
    """
    _check_arguments(to, strip_prefix, rename, dtype, shard_bytes)
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
        wrapped = [each for each in contents.wrapped.values() if not set(chosen).isdisjoint(each.part_keys)]
        parts = {key for each in wrapped for key in each.part_keys}
        chosen = [key for key in chosen if key not in parts]
    tensors = [key for key in chosen if key in contents.tensors]
    objects = [key for key in chosen if key in contents.blob_bytes]
    left_out: list[str] = []
    leaves = [key for each in wrapped for _, keys in each.parts for key in keys]
    counter = _Counter(sum(whole(contents.tensors[key]).nbytes for key in (*tensors, *leaves)), progress)
    if to == "safetensors":
        names = names_of(tensors, strip_prefix, rename)
        left_out = objects + [key for key in tensors if key not in names]
        tensors, objects = list(names), []
        if not tensors:
            raise UsageError(
                f"no tensor of {contents.url} " + (f"is below {strip_prefix!r}" if strip_prefix else "was selected"),
                next_step="'millrace checkpoints show' lists the keys",
            )
        counter = _Counter(sum(whole(contents.tensors[key]).nbytes for key in tensors), progress)
        kind = FileTarget if shard_bytes is None else DirectoryTarget
        if shard_bytes is not None and _is_same(url, place, target_options, output_options):
            raise UsageError(f"{contents.url} would be read and overwritten", next_step="choose another directory")
        model = kind(place, output_options, overwrite=overwrite)
        write_safetensors(contents, names, dtype, shard_bytes or 0, model, counter.add)
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


def _check_arguments(
    to: ExportFormat, strip_prefix: str, rename: Sequence[str], dtype: str | None, shard_bytes: int | None
) -> None:
    if to not in EXPORT_FORMATS:
        raise UsageError(f"{to!r} is not an export format", next_step=f"choose one of {', '.join(EXPORT_FORMATS)}")
    if to != "safetensors" and (strip_prefix or rename or dtype or shard_bytes):
        raise UsageError(
            "only an export to safetensors can strip a prefix, rename, convert or split", next_step="leave it out"
        )
    if dtype is not None and dtype not in _FLOATS:
        raise UsageError(f"dtype={dtype!r:.100}", next_step=f"choose one of {', '.join(_FLOATS)}")
    if shard_bytes is not None and (type(shard_bytes) is not int or shard_bytes < 1):
        raise UsageError(f"shard_bytes={shard_bytes!r:.100}", next_step="give a number of bytes, at least 1")


def _is_same(url: str, other: str, options: Mapping[str, Any] | None, other_options: Mapping[str, Any] | None) -> bool:
    """Whether two directories are one. A URL may have several spellings (`s3://`, `s3a://`)."""
    with contextlib.suppress(OSError):  # not both are local directories
        return os.path.samefile(url, other)
    return run_directory(url, options) == run_directory(other, other_options)


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
