"""Millrace in jobs of Ray: reads near the data, what the caches of all nodes did, checkpoints of Ray Train's workers.

Ray and torch are loaded on the first use of a name that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millrace.cluster.counters import cluster_counters
from millrace.cluster.locations import location_of
from millrace.cluster.near import homes, read_near

if TYPE_CHECKING:
    from millrace.cluster.train import checkpoint_reader, report, restore

__all__ = ["checkpoint_reader", "cluster_counters", "homes", "location_of", "read_near", "report", "restore"]

_LAZY = frozenset({"checkpoint_reader", "report", "restore"})


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from millrace.cluster import train
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("ray", "torch"):
            raise
        from millrace.errors import MissingDependencyError

        raise MissingDependencyError(
            f"{name} needs {missing}", next_step="pip install 'millrace[ray,torch]'"
        ) from error
    return getattr(train, name)
