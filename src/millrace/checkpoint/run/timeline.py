"""The order in which a run's checkpoints were saved, from the steps and revisions in their names. Pure.

A run that was restored to an earlier step saves some steps again. The checkpoints beyond that step are abandoned. The new
saves have the next *revision*: `step-000000000200-r1` follows `step-000000000150` and replaces `step-000000000200`. So the
newest checkpoint has the highest step of the highest revision. Clocks are not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar


class Named(Protocol):
    """Something with the step and the revision of a checkpoint's name."""

    @property
    def step(self) -> int: ...

    @property
    def revision(self) -> int: ...


class Point(NamedTuple):
    """A checkpoint by the two numbers in its name."""

    step: int
    revision: int


Item = TypeVar("Item", bound=Named)


def age_of(checkpoint: Named) -> tuple[int, int]:
    """Sort key for the order in which checkpoints were saved."""
    return checkpoint.revision, checkpoint.step


def timeline(checkpoints: Iterable[Item]) -> list[Item]:
    """The checkpoints that led to the newest one, oldest first: of each revision the steps below the first of any later."""
    kept: list[Item] = []
    limit: int | None = None
    for _, members in sorted(_by_revision(checkpoints).items(), reverse=True):
        kept += [each for each in reversed(members) if limit is None or each.step < limit]
        limit = members[0].step if limit is None else min(limit, members[0].step)
    return kept[::-1]


def newest_first(checkpoints: Iterable[Item]) -> list[Item]:
    """All checkpoints in the order in which a restore tries them: the timeline backwards, then abandoned ones."""
    everything = list(checkpoints)
    live = timeline(everything)
    kept = {(each.step, each.revision) for each in live}
    rest = [each for each in everything if (each.step, each.revision) not in kept]
    return live[::-1] + sorted(rest, key=age_of, reverse=True)


def last_revisions(checkpoints: Iterable[Named]) -> dict[int, int]:
    """The highest revision of each step, which supersedes the others."""
    last: dict[int, int] = {}
    for each in checkpoints:
        last[each.step] = max(each.revision, last.get(each.step, 0))
    return last


def next_revision(step: int, checkpoints: Iterable[Named]) -> int:
    """The revision for a save of `step` after these complete checkpoints."""
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
