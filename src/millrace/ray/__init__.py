"""Helpers for Ray users: reads near the data, counters of all nodes, checkpoints of Ray Train's workers.

Ray and torch are loaded on the first use of a name that needs them.

Key terms:
- near read: a read task that Ray schedules on the node that has the data cached.
- home: the node that a file's blocks are cached on.

Start reading in `near.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millrace.ray.counters import cluster_counters
from millrace.ray.locations import location_of
from millrace.ray.near import homes, read_near

if TYPE_CHECKING:
    from millrace.ray.train import checkpoint_reader, report, restore

__all__ = ["checkpoint_reader", "cluster_counters", "homes", "location_of", "read_near", "report", "restore"]

_LAZY = frozenset({"checkpoint_reader", "report", "restore"})


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from millrace.ray import train
    except ImportError as error:  # an older torch lacks modules or names
        missing = (error.name or "").partition(".")[0]
        if missing not in ("ray", "torch"):
            raise
        from millrace.checkpoint import OLDEST_TORCH
        from millrace.errors import MissingDependencyError

        needed = f"torch {OLDEST_TORCH} or newer" if missing == "torch" else missing
        raise MissingDependencyError(f"{name} needs {needed}", next_step="pip install 'millrace[ray,torch]'") from error
    return getattr(train, name)
