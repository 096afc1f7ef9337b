"""Lightning's checkpoints in Millrace's format: `MillraceCheckpointIO`."""

from __future__ import annotations

import copy
import io
import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO

from millrace.checkpoint.arguments import path_text
from millrace.checkpoint.codec.registry import Compression
from millrace.checkpoint.format.manifest import MANIFEST_NAME
from millrace.checkpoint.run.driving import plan_save, save
from millrace.checkpoint.storage.storage import open_storage
from millrace.checkpoint.tools.weights import load_weights
from millrace.checkpoint.writing.writer import CheckpointWriter
from millrace.errors import UnsupportedFormatError

_REST = "lightning.rest"
"""The key of everything that is not a plain tensor, in the format of `torch.save`."""
_TENSOR = "millrace.tensor"
"""In it, a dict with this one key stands for a tensor, whose key is the value. A dict of a user like that is wrapped."""


class MillraceCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """A plugin that saves Lightning's checkpoints compressed and verified: `Trainer(plugins=[MillraceCheckpointIO()])`.

    `ModelCheckpoint` decides when and where, and which checkpoints are removed; `fit(ckpt_path=...)` resumes. Each
    checkpoint is a full one, in a directory of its own at the path or URL that Lightning passes, and becomes visible when it
    is complete. The model's tensors have the keys `state_dict.<name>`, so `load_weights(path, "state_dict")` reads them.

    - `compression`, `thread_count`, `target_options`: as in `CheckpointWriter`. `storage_options` of a call replaces
      `target_options`.

    A save returns when the checkpoint is durable. `AsyncCheckpointIO(MillraceCheckpointIO())` copies the tensors and saves
    in a thread. For strategies that save through a plugin (one device, DDP): `FSDPStrategy` and `ModelParallelStrategy`
    refuse plugins. Picklable; for one thread.
    """

    def __init__(
        self,
        *,
        compression: Compression = "typed",
        thread_count: int | None = None,
        target_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._writer_options = {"compression": compression, "thread_count": thread_count}
        self._target_options = target_options
        self._writer("unused")  # raises for bad options now, not at the first save

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Save Lightning's nested dict. An existing checkpoint at `path` is replaced in one step. Called on one rank.

        A symbolic link at `path` is removed first (`save_last="link"`). The checkpoint that it names stays unchanged. A file
        of Lightning's own plugin is removed when the checkpoint is complete.
        """
        _remove_link(path)
        tensors: dict[str, Any] = {}
        rest = io.BytesIO()
        torch.save(_take_tensors(checkpoint, "", tensors), rest)
        tensors[_REST] = torch.frombuffer(bytearray(rest.getbuffer()), dtype=torch.uint8)
        target = f"{os.fspath(path)}.new" if os.path.isfile(path) else path
        save(plan_save(tensors), self._writer(target, storage_options))
        if target != path:
            replaced = f"{os.fspath(path)}.replaced"
            os.rename(path, replaced)
            os.rename(target, path)
            os.remove(replaced)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The saved dict, bit for bit. `map_location`: a device; other values of it leave the tensors on the CPU.

        A file is loaded by Lightning's own plugin, so that a run continues from its checkpoints.

        `weights_only` is that of `torch.load` for everything that is not a plain tensor, such as hyperparameters. Raises
        `CheckpointNotFoundError`, `CorruptCheckpointError`, and `UnsupportedFormatError` for a checkpoint of another writer.
        """
        if os.path.isfile(path):
            loaded_by_lightning: dict[str, Any] = TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
            return loaded_by_lightning
        device = map_location if isinstance(map_location, str | torch.device) else "cpu"
        tensors = load_weights(path, target_options=self._target_options, device=device)
        if _REST not in tensors:
            raise UnsupportedFormatError(
                f"{path_text('path', path)} was not saved by Lightning", next_step="load it with load_weights"
            )
        rest = io.BytesIO(tensors.pop(_REST).cpu().numpy().tobytes())
        loaded = torch.load(rest, map_location=map_location, weights_only=weights_only)
        checkpoint: dict[str, Any] = _put_tensors(loaded, tensors)
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, its manifest first, so that an interrupted removal leaves no damaged one.

        Of a symbolic link only the link is removed.
        """
        if _remove_link(path):
            return
        if os.path.isfile(path):  # of another plugin
            os.remove(path)
            return
        storage = open_storage(path, self._target_options)
        names = [name for name in storage.names() if name != MANIFEST_NAME]
        storage.delete([MANIFEST_NAME])
        storage.delete(names)
        if os.path.isdir(path):
            os.rmdir(path)

    def _writer(
        self, path: str | os.PathLike[str], target_options: Mapping[str, Any] | None = None
    ) -> CheckpointWriter:
        options: dict[str, Any] = {"target_options": target_options or self._target_options, **self._writer_options}
        return CheckpointWriter(path, **options)


def _remove_link(path: str | os.PathLike[str]) -> bool:
    """Remove a symbolic link at `path`. Returns whether there was one."""
    is_link = os.path.islink(path)
    if is_link:
        os.remove(path)
    return is_link


def _take_tensors(value: Any, path: str, tensors: dict[str, Any]) -> Any:
    """A copy of nested containers with each plain tensor replaced by the key under which it is added to `tensors`."""
    if (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not (value.requires_grad or value.is_quantized)
    ):
        while path in tensors or path == _REST:  # keys may contain dots
            path += "_"
        tensors[path] = value
        return {_TENSOR: path}
    if type(value) in (dict, OrderedDict):
        taken = copy.copy(value)  # with the versions of the modules, an attribute
        for key, member in value.items():
            taken[key] = _take_tensors(member, f"{path}.{key}" if path else str(key), tensors)
        return {_TENSOR: taken} if taken.keys() == {_TENSOR} else taken
    if type(value) in (list, tuple):
        return type(value)(_take_tensors(member, f"{path}.{index}", tensors) for index, member in enumerate(value))
    return value


def _put_tensors(value: Any, tensors: Mapping[str, Any]) -> Any:
    if type(value) in (dict, OrderedDict):
        if value.keys() == {_TENSOR}:
            if isinstance(value[_TENSOR], str):
                return tensors[value[_TENSOR]]
            value = value[_TENSOR]
        for key, member in value.items():
            value[key] = _put_tensors(member, tensors)
    elif type(value) in (list, tuple):
        return type(value)(_put_tensors(member, tensors) for member in value)
    return value
