"""Checkpoints of a Ray Train job in Millrace's format: `report` in place of `ray.train.report`, and `restore`.

Ray copies reported checkpoints. Here the workers write directly to the destination of that copy, in the experiment's
directory, and report it to Ray as uploaded. Ray counts, scores and removes it like any other.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray.train
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointUploadMode

from millrace.checkpoint.arguments import ReadThroughMode
from millrace.checkpoint.reading.reader import CheckpointReader
from millrace.checkpoint.run.manager import CheckpointManager
from millrace.checkpoint.run.ranks import Ranks
from millrace.checkpoint.run.restoring import restore_into
from millrace.checkpoint.run.run_layout import parse_name
from millrace.checkpoint.run.saving import PendingSave, SaveResult
from millrace.errors import UsageError
from millrace.ray.locations import location_of


def report(
    metrics: Mapping[str, Any],
    state: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    wait: bool = False,
    **options: Any,
) -> None:
    """Report to Ray Train, and save `state` as this report's checkpoint. Call it on all workers of a Ray Train job.

    `state` is a dict as for `CheckpointManager.save_async`, sharded or equal on all ranks; without it only the metrics are
    reported. It is copied into host memory and may be changed afterwards. Compression and upload run in the background
    (`wait=True`: before this returns), directly into the experiment's directory. The checkpoint is reported to Ray when it
    is durable. At most one save is in flight.

    - `step`: names the checkpoint; by default the previous step plus one.
    - `options`: those of `CheckpointManager` (`compression`, `thread_count`, `trusted_types`, `on_progress`, and
      `target_options` if those of Ray's file system are insufficient). The options of the first call hold.

    Every save is a full one: `CheckpointConfig(num_to_keep=...)` removes whole directories, without regard to deltas.

    Raises `UsageError` outside of a Ray Train worker, and the error of the previous save if it was not reported yet. A
    save that fails in the background fails the worker, as Ray's own uploads do.
    """
    context = _context()
    if state is None:
        ray.train.report(dict(metrics))
        return
    session = _session(context, options)
    step = session.next_step() if step is None else step
    figures = {
        name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)
    }
    pending = session.manager.save_async(step, state, figures)
    session.step = step
    if wait:
        checkpoint = session.checkpoint(pending)
        ray.train.report(dict(metrics), checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
        return
    ray.train.report(
        dict(metrics),
        # A placeholder until the checkpoint is saved.
        Checkpoint(session.directory, session.filesystem),
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=lambda _, __: session.checkpoint(pending),
        delete_local_checkpoint_after_upload=False,
    )


def restore(
    state: dict[str, Any],
    *,
    keys: str | Sequence[str] | None = None,
    target_options: Mapping[str, Any] | None = None,
    trusted_types: Sequence[type] = (),
    read_through: ReadThroughMode = "auto",
) -> int | None:
    """Load the newest reported checkpoint (`ray.train.get_checkpoint()`) into `state`; returns its step.

    Returns None for a new run, without changes. Call it on all workers, whose number may differ from that of the save.
    `keys` are patterns as for `CheckpointManager.restore`. `read_through` is as in `CheckpointManager`: by default each byte
    leaves an object store once for all nodes. Raises `UsageError` outside of a Ray Train worker, and the errors
    of `CheckpointManager.restore`.
    """
    context = _context()
    _check_ranks(context)
    ranks = Ranks()
    try:
        checkpoint = _newest(context, ranks)
        if checkpoint is None:
            return None
        patterns = [keys] if isinstance(keys, str) else keys
        reader = checkpoint_reader(
            checkpoint, target_options=target_options, trusted_types=trusted_types, read_through=read_through
        )
        restore_into(state, reader, ranks, keys=patterns)
    finally:
        ranks.close()
    return _step_of(checkpoint)


def checkpoint_reader(
    checkpoint: Checkpoint,
    *,
    target_options: Mapping[str, Any] | None = None,
    trusted_types: Sequence[type] = (),
    read_through: ReadThroughMode = "auto",
) -> CheckpointReader:
    """A reader for a checkpoint of Ray, such as `Result.checkpoint`, without copying it to this machine first.

    `target_options` replace those of Ray's file system. `read_through` is as in `CheckpointManager`. Raises `UsageError`
    for a file system of an unknown kind.
    """
    url, found = location_of(checkpoint.filesystem, checkpoint.path, target_options)
    return CheckpointReader(url, target_options=found, trusted_types=trusted_types, read_through=read_through)


# --- inside ---------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Session:
    """The state of a worker between its reports: its manager, and the location of Ray's experiment."""

    manager: CheckpointManager
    filesystem: Any
    directory: str
    # The process group of this attempt.
    group: Any
    step: int | None

    def next_step(self) -> int:
        return 1 if self.step is None else self.step + 1

    def checkpoint(self, pending: PendingSave) -> Checkpoint:
        """Wait for a save, and return it as a checkpoint of Ray. Raises the error of the save."""
        result = pending.result()
        if not isinstance(result, SaveResult):
            raise AssertionError("a save that waits is not skipped")
        return Checkpoint(posixpath.join(self.directory, posixpath.basename(result.url)), self.filesystem)


_current: _Session | None = None


def _session(context: Any, options: Mapping[str, Any]) -> _Session:
    """This worker's session, created at its first report with a state. A collective call."""
    global _current
    _check_ranks(context)
    storage = context.get_storage()
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if _current is not None and _current.directory == storage.experiment_fs_path and _current.group is group:
        return _current
    refused = sorted({"keep", "full_every", "on_busy", "base_memory", "rewind"} & options.keys())
    if refused:
        raise UsageError(
            f"report() does not accept {', '.join(refused)}: Ray Train removes checkpoints itself",
            next_step="use ray.train.CheckpointConfig, or a CheckpointManager of your own next to Ray Train's reports",
        )
    filesystem, directory = storage.storage_filesystem, storage.experiment_fs_path
    url, target_options = location_of(filesystem, directory, options.get("target_options"))
    newest = ray.train.get_checkpoint()
    _current = _Session(
        manager=CheckpointManager(url, full_every=1, rewind=True, **{**options, "target_options": target_options}),
        filesystem=filesystem,
        directory=directory,
        group=group,
        step=None if newest is None else _step_of(newest),
    )
    return _current


def _context() -> Any:
    try:
        context = ray.train.get_context()
        context.get_storage()
    except (RuntimeError, NotImplementedError, AttributeError, DeprecationWarning) as error:
        raise UsageError(
            "not in a Ray Train worker",
            next_step="call it in the training function of a trainer with num_workers >= 1, of Ray Train V2",
        ) from error
    return context


def _check_ranks(context: Any) -> None:
    if context.get_world_size() > 1 and not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            f"the {context.get_world_size()} workers have no process group, which a common checkpoint needs",
            next_step="use ray.train.torch.TorchTrainer, or call torch.distributed.init_process_group first",
        )


def _newest(context: Any, ranks: Ranks) -> Checkpoint | None:
    """The first worker's newest checkpoint. The others may not have registered that report yet."""
    own = ray.train.get_checkpoint()
    path = ranks.run_on_first(lambda: None if own is None else own.path)
    if path is None:
        return None
    if own is not None and own.path == path:
        return own
    return Checkpoint(path, context.get_storage().storage_filesystem)


def _step_of(checkpoint: Checkpoint) -> int:
    """The step in the name of a checkpoint; 0 for one that `report` did not write."""
    return (parse_name(posixpath.basename(checkpoint.path.rstrip("/"))) or (0, 0))[0]
