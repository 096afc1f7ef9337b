"""In which order a run's checkpoints were made, told from their names alone. Pure.

A run that was restored to an earlier step saves steps again that it has saved before, and what was saved beyond that step
is of a future that was given up. Such saves are of the next *revision*: `step-000000000200-r1` follows
`step-000000000150` and takes the place of `step-000000000200`. So the newest checkpoint is the one with the highest
revision, and the highest step in it; no clock takes part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class Named(Protocol):
    """Something with the step and the revision of a checkpoint's name."""

    @property
    def step(self) -> int: ...

    @property
    def revision(self) -> int: ...


Item = TypeVar("Item", bound=Named)


def timeline(checkpoints: Iterable[Item]) -> list[Item]:
    """Those that lead to the newest one, oldest first: of each revision the steps below the first one of any later."""
    kept: list[Item] = []
    limit: int | None = None
    for revision, members in sorted(_by_revision(checkpoints).items(), reverse=True):
        del revision
        kept += [each for each in reversed(members) if limit is None or each.step < limit]
        limit = members[0].step if limit is None else min(limit, members[0].step)
    return kept[::-1]


def newest_first(checkpoints: Iterable[Item]) -> list[Item]:
    """All of them in the order in which a restore tries them: the timeline backwards, then what was given up."""
    everything = list(checkpoints)
    live = timeline(everything)
    kept = {(each.step, each.revision) for each in live}
    rest = [each for each in everything if (each.step, each.revision) not in kept]
    return live[::-1] + sorted(rest, key=lambda each: (each.revision, each.step), reverse=True)


def next_revision(step: int, checkpoints: Iterable[Named]) -> int:
    """The revision under which `step` is saved, after these complete checkpoints."""
    everything = list(checkpoints)
    if not everything:
        return 0
    revision = max(each.revision for each in everything)
    last = max(each.step for each in everything if each.revision == revision)
    return revision if step > last else revision + 1


def _by_revision(checkpoints: Iterable[Item]) -> dict[int, Sequence[Item]]:
    found: dict[int, list[Item]] = {}
    for each in sorted(checkpoints, key=lambda each: each.step):
        found.setdefault(each.revision, []).append(each)
    return dict(found.items())
