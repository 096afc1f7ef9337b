"""torchtitan's checkpointer interface over a `CheckpointManager`: `MillraceCheckpointer`. For torchtitan 0.3.0.

torchtitan builds its checkpointer from a config: `config.checkpoint = MillraceCheckpointer.Config(enable=True, ...)`. This
one keeps the policies of torchtitan's own checkpointer, and replaces the reads and writes of checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
import torch.distributed.checkpoint as dcp
import tyro
from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager

from millrace.checkpoint.reading.reader import CheckpointReader
from millrace.checkpoint.run.manager import CheckpointManager as RunManager


class MillraceCheckpointer(CheckpointManager):  # type: ignore[misc]
    """Saves into a run at `folder`: a URL, or a directory below the dump folder. All ranks save and load.

    The options of torchtitan's `CheckpointManager.Config` keep their meaning, with these differences:

    - `async_mode`: `"async"` is the default. Both asynchronous modes are `CheckpointManager.save_async` of Millrace;
      `"disabled"` waits until the checkpoint is durable. The last save of a training always waits.
    - `keep_latest_k`: `keep=` of the run. A checkpoint that a delta needs stays, too.
    - `initial_load_path`: a checkpoint of Millrace or of torchtitan's own checkpointer, at any URL.
    - `run_options`: other options of Millrace's `CheckpointManager`, such as `{"local": "/mnt/nvme/run"}`.

    Hugging Face safetensors (`initial_load_in_hf`, `last_save_in_hf`) are read and written by torchtitan itself.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The config of a `MillraceCheckpointer`."""

        async_mode: str = "async"
        run_options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)

    def __init__(self, config: Config, **collaborators: Any) -> None:
        # Millrace removes old checkpoints, and needs no process group and no thread of torchtitan's.
        unused: dict[str, Any] = {"keep_latest_k": 0, "async_mode": "disabled"}
        super().__init__(replace(config, **unused), **collaborators)
        if not self.enable:
            return
        self.async_mode = AsyncMode(config.async_mode)
        self.target_options = config.run_options.get("target_options")
        keep = {"keep": config.keep_latest_k} if config.keep_latest_k else {}
        self.run = RunManager(self.folder, **keep, **config.run_options)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        self.maybe_wait_for_saving()
        if last_step:
            self._save_last_step(curr_step)
        else:
            self.dcp_save(self._flattened_model_states_sd(), self._create_checkpoint_id(curr_step), self.async_mode)
        return True

    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: AsyncMode, *arguments: Any, **options: Any
    ) -> None:
        """Save a state as the step of `checkpoint_id`. With `to_hf=True` torchtitan writes safetensors."""
        if options.get("to_hf"):
            super().dcp_save(state_dict, checkpoint_id, async_mode, *arguments, **options)
            return
        step = int(checkpoint_id.rpartition("step-")[2])
        if async_mode == AsyncMode.DISABLED:
            self.run.save(step, state_dict)
        else:
            pending: Any = self.run.save_async(step, state_dict)
            self.save_future = pending

    def _wait_for_saving(self) -> None:
        self.save_future.result()
        self.save_future = None

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _load(self, step: int = -1) -> bool:
        """Load a step of the run, by default the newest. An empty run starts from `initial_load_path`, if there is one."""
        found = self.run.latest() if step == -1 else step
        if found is None:
            return self._load_initial()
        states = self._states_to_load(model_only=found == 0)
        self.run.restore(states, step=found)
        self.states[MODEL].load_state_dict(states)
        return True

    def _load_initial(self) -> bool:
        if self.initial_load_in_hf:
            path = self.initial_load_path or self.sd_adapter.hf_assets_path
            states = self._states_to_load(model_only=True)
            self.dcp_load(states, path, from_hf=True, from_quantized=self.initial_load_in_hf_quantized)
        elif self.initial_load_path:
            states = self._states_to_load(self.initial_load_model_only)
            dcp.load(
                states, storage_reader=CheckpointReader(self.initial_load_path, target_options=self.target_options)
            )
            self.states[MODEL].load_state_dict(states)
        else:
            return False
        return True

    def _close(self) -> None:
        super()._close()
        if hasattr(self, "run"):
            self.run.close()
