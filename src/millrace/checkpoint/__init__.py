"""Compressed, verified checkpoints for `torch.distributed.checkpoint`.

Torch is imported on the first use of a name that needs it. The codec and the format work without torch.

Key terms:
- chunk: about 1 MiB of tensor data, compressed on its own.
- manifest: the description of a checkpoint, written last; a checkpoint exists when its manifest exists.
- delta: a checkpoint whose chunks refer to an earlier one; the chain back to a full checkpoint is bounded.
- run: the checkpoints of one training run, in one directory.

Packages: `codec`, `format` (manifest, layout), `state` (tensors, copies), `storage` (local disk, object stores, tiers),
`writing`, `reading`, `run` (manager, retention), `tools` (verify, export, diff), `integrations` (other training libraries).

Start reading in `run/manager.py`, `writing/writer.py` and `reading/reader.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millrace.checkpoint.storage.manifests import CheckpointSummary
from millrace.checkpoint.tools import describe

if TYPE_CHECKING:
    from millrace.checkpoint.codec.extension import ZstdPlanes, extension_registry
    from millrace.checkpoint.reading.load_planner import CheckpointLoadPlanner
    from millrace.checkpoint.reading.reader import CheckpointReader
    from millrace.checkpoint.run.manager import CheckpointManager
    from millrace.checkpoint.run.publishing import WeightFollower, WeightPublisher
    from millrace.checkpoint.run.resuming import DataPosition, EpochPosition, RandomState
    from millrace.checkpoint.run.retention import KeepAll, KeepBest, KeepEvery, KeepLast, KeepNewerThan
    from millrace.checkpoint.run.run_info import CheckpointInfo
    from millrace.checkpoint.run.sampling import ResumableSampler
    from millrace.checkpoint.run.saving import PendingSave, SaveProgress, SaveResult
    from millrace.checkpoint.state.staging import CheckpointStager
    from millrace.checkpoint.tools.diffing import diff_checkpoints
    from millrace.checkpoint.tools.exports import export_checkpoint
    from millrace.checkpoint.tools.verifying import verify_checkpoint
    from millrace.checkpoint.tools.weights import load_weights
    from millrace.checkpoint.writing.packing import SaveStats
    from millrace.checkpoint.writing.save_planner import CheckpointSavePlanner
    from millrace.checkpoint.writing.writer import CheckpointWriter

__all__ = [
    "CheckpointInfo",
    "CheckpointLoadPlanner",
    "CheckpointManager",
    "CheckpointReader",
    "CheckpointSavePlanner",
    "CheckpointStager",
    "CheckpointSummary",
    "CheckpointWriter",
    "DataPosition",
    "EpochPosition",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepNewerThan",
    "PendingSave",
    "RandomState",
    "ResumableSampler",
    "SaveProgress",
    "SaveResult",
    "SaveStats",
    "WeightFollower",
    "WeightPublisher",
    "ZstdPlanes",
    "describe",
    "diff_checkpoints",
    "export_checkpoint",
    "extension_registry",
    "load_weights",
    "verify_checkpoint",
]

# The modules of names that are imported on first use.
_LAZY = {
    "CheckpointInfo": "run.run_info",
    "CheckpointLoadPlanner": "reading.load_planner",
    "CheckpointManager": "run.manager",
    "CheckpointReader": "reading.reader",
    "CheckpointSavePlanner": "writing.save_planner",
    "CheckpointStager": "state.staging",
    "CheckpointWriter": "writing.writer",
    "DataPosition": "run.resuming",
    "EpochPosition": "run.resuming",
    "KeepAll": "run.retention",
    "KeepBest": "run.retention",
    "KeepEvery": "run.retention",
    "KeepLast": "run.retention",
    "KeepNewerThan": "run.retention",
    "PendingSave": "run.saving",
    "RandomState": "run.resuming",
    "ResumableSampler": "run.sampling",
    "SaveProgress": "run.saving",
    "SaveResult": "run.saving",
    "SaveStats": "writing.packing",
    "WeightFollower": "run.publishing",
    "WeightPublisher": "run.publishing",
    "ZstdPlanes": "codec.extension",
    "diff_checkpoints": "tools.diffing",
    "export_checkpoint": "tools.exports",
    "extension_registry": "codec.extension",
    "load_weights": "tools.weights",
    "verify_checkpoint": "tools.verifying",
}

OLDEST_TORCH = "2.8"
"""The lower bound of the extra `torch`."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        module = importlib.import_module(f"{__name__}.{_LAZY[name]}")
    except ImportError as error:  # an older torch lacks modules or names
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        from millrace.errors import MissingDependencyError

        raise MissingDependencyError(
            f"{name} needs torch {OLDEST_TORCH} or newer", next_step="pip install 'millrace[torch]'"
        ) from error
    return getattr(module, name)
