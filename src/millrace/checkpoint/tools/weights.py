"""The tensors of a checkpoint as a plain dict, without a template: `load_weights`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from millrace.checkpoint.arguments import ReadThroughMode, path_text
from millrace.checkpoint.format.inventory import select_keys
from millrace.checkpoint.format.manifest import TensorEntry, WrappedEntry, is_convertible
from millrace.checkpoint.reading.contents import Box, Bytes, Contents, pieces, stream, whole
from millrace.checkpoint.reading.opening import open_contents
from millrace.checkpoint.state.tensors import copy_bits, torch_dtype
from millrace.checkpoint.tools import WorkProgress
from millrace.checkpoint.tools.export_torch import as_tensor, read_wrapper
from millrace.errors import ConfigurationError, UsageError
from millrace.origin import Readable


def load_weights(
    url: str | os.PathLike[str],
    keys: str | Sequence[str] = (),
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    target_options: Mapping[str, Any] | None = None,
    origin: Readable | None = None,
    read_through: ReadThroughMode = "auto",
    trusted_types: Sequence[type] = (),
    extension_registry: Any = None,
    threads: int | None = None,
    progress: Callable[[WorkProgress], None] | None = None,
) -> dict[str, Any]:
    """Load the tensors of a checkpoint, by flat key: `model.load_state_dict(load_weights(url), assign=True)`.

    Reads checkpoints of Millrace (verified), of torch's own writer, and Hugging Face directories. It needs no template and
    no process group. With `assign=True`, torch fills a module that was built on the meta device.

    - `keys`: one pattern or several: a key, a prefix before a dot (`model`), or as in file names (`model.*`). All tensors
      without one. Objects that are not tensors are left out.
    - `dtype`: converts floating-point tensors; others keep their type, as does `float4_e2m1fn_x2`. `device`: where the
      tensors are created.
    - `origin`: reads from this origin (a cache) instead; `url` is then the key in it.
    - `read_through`: reads data files through the cache of the cluster, as in `CheckpointManager`.
    - `trusted_types`: classes of wrapper tensors to accept in addition to those that torch trusts.
    - `extension_registry`: the stream extensions that the checkpoint was written with (encryption, for example).
    - `progress`: called with a `WorkProgress` during the load, in this thread.

    Memory beyond the tensors is at most that of two waves of 64 MiB, and of the largest tensor of torch's own writer. Raises
    `UsageError` when no tensor matches, and the errors of a load.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and is_convertible(str(dtype).removeprefix("torch."))):
        raise ConfigurationError(
            f"dtype={dtype!r:.100}",
            next_step="give a floating-point dtype of torch that is not packed, or leave it out",
        )
    place = _device(device)
    patterns = [keys] if isinstance(keys, str) else list(keys)
    contents = open_contents(
        path_text("url", url),
        target_options,
        threads=threads,
        trusted_types=trusted_types,
        extension_registry=extension_registry,
        keys=patterns,
        origin=origin,
        read_through=read_through,
    )
    wrapped, parts = _selected_wrappers(contents, patterns)
    chosen = select_keys([*contents.tensors, *contents.blob_bytes, *wrapped], patterns)
    plain = [key for key in chosen if key in contents.tensors and key not in parts]
    if not plain and not wrapped:
        raise UsageError(
            f"no tensor of {contents.url} was selected", next_step="'millrace checkpoints show' lists the keys"
        )
    plain.sort(key=contents.place)
    total = sum(whole(contents.tensors[key]).nbytes for key in (*plain, *parts) if key in contents.tensors)
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(WorkProgress(done_bytes=done, total_bytes=total))

    weights: dict[str, Any] = {}
    boxes = (box for key in plain for box in _boxes(contents, contents.tensors[key], dtype, place))
    for box, data in stream(contents, boxes, count=count):
        _place(weights, contents.tensors[box.key], box, data, dtype, place)
    for key, entry in wrapped.items():
        weights[key] = read_wrapper(contents, entry, trusted_types, count).to(place)
    return {key: weights[key] for key in chosen if key in weights}


def _device(device: torch.device | str) -> torch.device:
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"device={device!r:.100}", next_step="give a device of torch, such as 'cpu'"
        ) from error
    if place.type == "meta":
        raise ConfigurationError("device='meta' has no values", next_step="give a real device")
    return place


def _selected_wrappers(contents: Contents, patterns: Sequence[str]) -> tuple[dict[str, WrappedEntry], set[str]]:
    """The selected wrapper tensors by key, and the keys of the parts of all of them."""
    known = [*contents.wrapped, *contents.tensors, *contents.blob_bytes]
    selected = set(select_keys(known, patterns))
    wrapped = {
        key: each
        for key, each in contents.wrapped.items()
        if key in selected or not selected.isdisjoint(each.part_keys)
    }
    return wrapped, {part for each in contents.wrapped.values() for part in each.part_keys}


def _boxes(contents: Contents, entry: TensorEntry, dtype: torch.dtype | None, place: torch.device) -> Iterator[Box]:
    """What to read of a tensor: all of it into its own memory, or pieces of it that are converted or moved."""
    if _is_direct(entry, dtype, place):
        yield whole(entry)
    else:
        yield from pieces(contents, whole(entry))


def _is_direct(entry: TensorEntry, dtype: torch.dtype | None, place: torch.device) -> bool:
    return place.type == "cpu" and bool(_final(entry, dtype) == torch_dtype(entry.dtype))


def _final(entry: TensorEntry, dtype: torch.dtype | None) -> torch.dtype:
    stored: torch.dtype = torch_dtype(entry.dtype)
    return dtype if dtype is not None and is_convertible(entry.dtype) else stored


def _place(
    weights: dict[str, Any],
    entry: TensorEntry,
    box: Box,
    data: Bytes,
    dtype: torch.dtype | None,
    place: torch.device,
) -> None:
    """Put a piece that was read into its tensor."""
    values = as_tensor(box, data)
    if _is_direct(entry, dtype, place):
        weights[box.key] = values
        return
    target = weights.get(box.key)
    if target is None:
        target = weights[box.key] = torch.empty(entry.shape, dtype=_final(entry, dtype), device=place)
    part = tuple(slice(first, first + length) for first, length in zip(box.offsets, box.lengths, strict=True))
    copy_bits(values, target[part])
