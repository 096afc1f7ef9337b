"""Staging for torch's own asynchronous saves: `CheckpointStager`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.staging import AsyncStager

from millrace.checkpoint.state.staging import StateStager


class CheckpointStager(AsyncStager):  # type: ignore[misc]
    """Copies the state for `dcp.async_save(state, storage_writer=CheckpointWriter(url), async_stager=CheckpointStager())`.

    Works with every storage writer. Keep one object for all saves of a run: it reuses its host memory, which makes every
    save but the first cost the training loop one copy of the state and no more. A state that is still being saved is
    never overwritten; several in flight take a buffer each. `pin` is as for a GPU's copies: by default buffers are pinned
    where a tensor lies on one. Torch's thread and process checkpointers both work; the latter moves every tensor
    into shared memory, where the next copy then goes.

    `close` gives the memory back. For one thread at a time. Raises `UnsupportedObjectError`, naming the key, for what
    cannot be copied; what no checkpoint can hold besides is for the writer to refuse.
    """

    # Torch asks whether to wait after it has begun the save: the copy is complete before.
    _synchronize_after_execute = False

    def __init__(self, *, pin: bool | None = None) -> None:
        self._stager = StateStager(pin=pin)

    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of the state, complete on return. Its memory is used again when nobody refers to the dict any more."""
        staged = self._stager.stage(state_dict)
        state = _Staged(staged.state)
        # Torch tells a stager nothing about the end of a save, but what saves refers to the dict until then.
        weakref.finalize(state, staged.release).atexit = False
        return state

    def synchronize_staging(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Give back all memory that no save needs any more; the rest goes when its save ends."""
        self._stager.close()


class _Staged(dict[str, Any]):
    """A dict that can be referred to weakly; a plain one in another process."""

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
