"""Compressed, verified checkpoints for `torch.distributed.checkpoint`.

Torch is loaded on the first use of a name that needs it: the codec and the format can be used without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millrace.checkpoint.places.manifests import CheckpointSummary
from millrace.checkpoint.tools.describing import describe

if TYPE_CHECKING:
    from millrace.checkpoint.codec.extension import ZstdPlanes, extension_registry
    from millrace.checkpoint.loop.manager import CheckpointManager
    from millrace.checkpoint.loop.resuming import DataPosition, EpochPosition, RandomState
    from millrace.checkpoint.loop.sampling import ResumableSampler
    from millrace.checkpoint.loop.saving import PendingSave, SaveProgress, SaveResult
    from millrace.checkpoint.reading.load_planner import CheckpointLoadPlanner
    from millrace.checkpoint.reading.reader import CheckpointReader
    from millrace.checkpoint.run.retention import KeepAll, KeepBest, KeepEvery, KeepLast, KeepNewerThan
    from millrace.checkpoint.run.run_info import CheckpointInfo
    from millrace.checkpoint.state.stager import CheckpointStager
    from millrace.checkpoint.tools.diffing import diff_checkpoints
    from millrace.checkpoint.tools.exports import export_checkpoint
    from millrace.checkpoint.tools.verifying import verify_checkpoint
    from millrace.checkpoint.writing.save_planner import CheckpointSavePlanner
    from millrace.checkpoint.writing.save_stats import SaveStats
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
    "ZstdPlanes",
    "describe",
    "diff_checkpoints",
    "export_checkpoint",
    "extension_registry",
    "verify_checkpoint",
]

_LAZY = {
    "CheckpointInfo": "millrace.checkpoint.run.run_info",
    "CheckpointLoadPlanner": "millrace.checkpoint.reading.load_planner",
    "CheckpointManager": "millrace.checkpoint.loop.manager",
    "CheckpointReader": "millrace.checkpoint.reading.reader",
    "CheckpointSavePlanner": "millrace.checkpoint.writing.save_planner",
    "CheckpointStager": "millrace.checkpoint.state.stager",
    "CheckpointWriter": "millrace.checkpoint.writing.writer",
    "DataPosition": "millrace.checkpoint.loop.resuming",
    "EpochPosition": "millrace.checkpoint.loop.resuming",
    "KeepAll": "millrace.checkpoint.run.retention",
    "KeepBest": "millrace.checkpoint.run.retention",
    "KeepEvery": "millrace.checkpoint.run.retention",
    "KeepLast": "millrace.checkpoint.run.retention",
    "KeepNewerThan": "millrace.checkpoint.run.retention",
    "PendingSave": "millrace.checkpoint.loop.saving",
    "RandomState": "millrace.checkpoint.loop.resuming",
    "ResumableSampler": "millrace.checkpoint.loop.sampling",
    "SaveProgress": "millrace.checkpoint.loop.saving",
    "SaveResult": "millrace.checkpoint.loop.saving",
    "SaveStats": "millrace.checkpoint.writing.save_stats",
    "ZstdPlanes": "millrace.checkpoint.codec.extension",
    "diff_checkpoints": "millrace.checkpoint.tools.diffing",
    "export_checkpoint": "millrace.checkpoint.tools.exports",
    "extension_registry": "millrace.checkpoint.codec.extension",
    "verify_checkpoint": "millrace.checkpoint.tools.verifying",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        module = importlib.import_module(_LAZY[name])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        from millrace.errors import MissingDependencyError

        raise MissingDependencyError(f"{name} needs torch", next_step="pip install 'millrace[torch]'") from error
    return getattr(module, name)
