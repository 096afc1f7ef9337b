"""Compressed, verified checkpoints for `torch.distributed.checkpoint`.

Torch is loaded on the first use of a name that needs it: the codec and the format can be used without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millrace.checkpoint.describing import describe
from millrace.checkpoint.manifests import CheckpointSummary

if TYPE_CHECKING:
    from millrace.checkpoint.extension import ZstdPlanes, extension_registry
    from millrace.checkpoint.load_planner import CheckpointLoadPlanner
    from millrace.checkpoint.reader import CheckpointReader
    from millrace.checkpoint.save_planner import CheckpointSavePlanner
    from millrace.checkpoint.writer import CheckpointWriter, SaveStats

__all__ = [
    "CheckpointLoadPlanner",
    "CheckpointReader",
    "CheckpointSavePlanner",
    "CheckpointSummary",
    "CheckpointWriter",
    "SaveStats",
    "ZstdPlanes",
    "describe",
    "extension_registry",
]

_LAZY = {
    "CheckpointLoadPlanner": "millrace.checkpoint.load_planner",
    "CheckpointReader": "millrace.checkpoint.reader",
    "CheckpointSavePlanner": "millrace.checkpoint.save_planner",
    "CheckpointWriter": "millrace.checkpoint.writer",
    "SaveStats": "millrace.checkpoint.writer",
    "ZstdPlanes": "millrace.checkpoint.extension",
    "extension_registry": "millrace.checkpoint.extension",
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
