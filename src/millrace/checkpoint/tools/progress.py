"""How far a long piece of work on a checkpoint is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkProgress:
    """`done_bytes` of `total_bytes`, and how many `problems` were found so far."""

    done_bytes: int
    total_bytes: int
    problems: int = 0
