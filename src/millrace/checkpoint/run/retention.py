"""Which checkpoints of a run stay: policies as small values, and what follows from them for every file. Pure.

A policy maps descriptions of a run's complete checkpoints to the names of those it keeps; `a | b` keeps what either keeps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, runtime_checkable
from urllib.parse import quote, unquote

from millrace.checkpoint.format.manifest import MANIFEST_NAME
from millrace.checkpoint.run.run_info import CheckpointInfo, paths_of
from millrace.checkpoint.run.run_layout import parse_name
from millrace.checkpoint.run.timeline import timeline
from millrace.errors import ConfigurationError

_UNITS = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}
_AGE = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)([wdhms])", re.ASCII)
# Beside letters and digits, what stays as it is in a metric's name when a policy is written as text.
_PLAIN = "/ ()[]<>@#&+*^~!?'|-_."
_KNOWN = "last=N, every=STEPS, best=METRIC[:min|max][:N], newer=AGE (90s, 12h, 7d, 2w) or all"


@runtime_checkable
class Policy(Protocol):
    """Decides which checkpoints stay. Pure: the same descriptions and `now` give the same answer."""

    def keep(self, checkpoints: Sequence[CheckpointInfo], *, now: float) -> frozenset[str]:
        """Names of those that stay, of the run's complete checkpoints by step and revision. `now` is in Unix seconds."""
        ...


class _Composable:
    """Lets policies be joined by `|`."""

    __slots__ = ()

    def __or__(self, other: Policy) -> AnyOf:
        joined: AnyOf = _join(self, other)
        return joined

    def __ror__(self, other: Policy) -> AnyOf:
        joined: AnyOf = _join(other, self)
        return joined


def _join(*policies: object) -> Any:
    members: list[Policy] = []
    for policy in policies:
        if not isinstance(policy, Policy):
            return NotImplemented
        members += policy.policies if isinstance(policy, AnyOf) else [policy]
    return AnyOf(tuple(members))


@dataclass(frozen=True, slots=True)
class KeepLast(_Composable):
    """Keeps the newest `n`: of the steps that lead to the newest one, not of a future that a restore gave up."""

    n: int

    def __post_init__(self) -> None:
        _positive("last", self.n)

    def __str__(self) -> str:
        return f"last={self.n}"

    def keep(self, checkpoints: Sequence[CheckpointInfo], *, now: float) -> frozenset[str]:
        return frozenset(info.name for info in timeline(checkpoints)[-self.n :])


@dataclass(frozen=True, slots=True)
class KeepEvery(_Composable):
    """Keeps the checkpoints whose step is a multiple of `steps`. A save at another step is none of them."""

    steps: int

    def __post_init__(self) -> None:
        _positive("every", self.steps)

    def __str__(self) -> str:
        return f"every={self.steps}"

    def keep(self, checkpoints: Sequence[CheckpointInfo], *, now: float) -> frozenset[str]:
        return frozenset(info.name for info in _current(checkpoints) if info.step % self.steps == 0)


@dataclass(frozen=True, slots=True)
class KeepBest(_Composable):
    """Keeps the `n` with the lowest (`mode="min"`) or highest value of a metric; of equals the newest.

    A checkpoint without the metric, or with one that is no number, is none of them.
    """

    metric: str
    n: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _positive("best", self.n)
        if not self.metric or self.mode not in ("min", "max"):
            raise ConfigurationError(
                f"KeepBest({self.metric!r}, mode={self.mode!r}) says nothing",
                next_step="give a metric's name, and mode='min' or mode='max'",
            )

    def __str__(self) -> str:
        return f"best={quote(self.metric, safe=_PLAIN)}:{self.mode}:{self.n}"

    def keep(self, checkpoints: Sequence[CheckpointInfo], *, now: float) -> frozenset[str]:
        sign = 1 if self.mode == "min" else -1
        known = [info for info in _current(checkpoints) if not math.isnan(info.metrics.get(self.metric, math.nan))]
        known.sort(key=lambda info: (sign * info.metrics[self.metric], -info.revision, -info.step))
        return frozenset(info.name for info in known[: self.n])


@dataclass(frozen=True, slots=True)
class KeepNewerThan(_Composable):
    """Keeps what was saved in the last `seconds` (a number or a `timedelta`), by the clocks of the writers."""

    seconds: float | timedelta

    def __post_init__(self) -> None:
        seconds = self.seconds.total_seconds() if isinstance(self.seconds, timedelta) else self.seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise ConfigurationError(
                f"newer={self.seconds!r} is no age", next_step="give a positive number of seconds, or a timedelta"
            )
        object.__setattr__(self, "seconds", float(seconds))

    def __str__(self) -> str:
        seconds = self._seconds
        for unit, length in _UNITS.items():
            if seconds % length == 0:
                return f"newer={int(seconds // length)}{unit}"
        return f"newer={seconds!r}s"

    def keep(self, checkpoints: Sequence[CheckpointInfo], *, now: float) -> frozenset[str]:
        return frozenset(info.name for info in _current(checkpoints) if info.created > now - self._seconds)

    @property
    def _seconds(self) -> float:
        return self.seconds.total_seconds() if isinstance(self.seconds, timedelta) else self.seconds


@dataclass(frozen=True, slots=True)
class KeepAll(_Composable):
    """Keeps every complete checkpoint, also one whose step was saved again."""

    def __str__(self) -> str:
        return "all"

    def keep(self, checkpoints: Sequence[CheckpointInfo], *, now: float) -> frozenset[str]:
        return frozenset(info.name for info in checkpoints)


@dataclass(frozen=True, slots=True)
class AnyOf(_Composable):
    """Keeps what any of its policies keeps. Made by `a | b`."""

    policies: tuple[Policy, ...]

    def __post_init__(self) -> None:
        if not self.policies:
            raise ConfigurationError("a policy of no policies", next_step="give at least one, or KeepAll()")

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))

    def __str__(self) -> str:
        return ",".join(map(str, self.policies))

    def keep(self, checkpoints: Sequence[CheckpointInfo], *, now: float) -> frozenset[str]:
        return frozenset().union(*(policy.keep(checkpoints, now=now) for policy in self.policies))


def _positive(what: str, number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigurationError(f"{what}={number!r} keeps nothing", next_step="give a whole number from 1 on")


def _current(checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    return [info for info in checkpoints if not info.superseded]


# --- policies as text -----------------------------------------------------------------------------


def parse_policy(text: str) -> Policy:
    """Read `last=5,every=1000,best=loss:min:2,newer=7d`, or `all`: what any part keeps is kept. `str(policy)` is read back.

    In a metric's name `%2C` stands for a comma, and so on. Raises `ConfigurationError`.
    """
    parts = [_parse_part(part.strip()) for part in text.split(",")]
    return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))


def as_policy(keep: int | str | Policy | None) -> Policy:
    """A policy from what callers write: a number of newest checkpoints, text for `parse_policy`, None for all."""
    if keep is None:
        return KeepAll()
    if isinstance(keep, int):
        return KeepLast(keep)
    if isinstance(keep, str):
        return parse_policy(keep)
    if isinstance(keep, Policy):
        return keep
    raise ConfigurationError(
        f"{keep!r:.100} says not what to keep", next_step="give a number, a policy such as KeepLast(5), or text"
    )


def _parse_part(text: str) -> Policy:
    kind, _, value = text.partition("=")
    parsers: Mapping[str, Callable[[str], Policy]] = {
        "last": lambda value: KeepLast(int(value)),
        "every": lambda value: KeepEvery(int(value)),
        "best": _parse_best,
        "newer": _parse_newer,
    }
    if text == "all":
        return KeepAll()
    if kind not in parsers or not value:
        raise ConfigurationError(f"{text!r:.100} is no retention policy", next_step=f"write {_KNOWN}")
    try:
        return parsers[kind](value)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"{text!r:.100} is no retention policy", next_step=f"write {_KNOWN}") from error


def _parse_best(value: str) -> Policy:
    metric, *rest = value.split(":")
    mode = rest.pop(0) if rest and not rest[0].isdigit() else "min"
    n = int(rest.pop(0)) if rest else 1
    if rest or mode not in ("min", "max"):
        raise ValueError(value)
    return KeepBest(unquote(metric), n, "min" if mode == "min" else "max")


def _parse_newer(value: str) -> Policy:
    match = _AGE.fullmatch(value)
    if match is None:
        raise ValueError(value)
    return KeepNewerThan(float(match[1]) * _UNITS[match[2]])


# --- what follows ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What a pruning is to do. `remove` is in the order in which the manifests go: the newest first.

    `files_of_removed_to_delete` has, by the directory in which they lie, the data files that only removed checkpoints
    name (never a manifest); `files_kept_for_others` likewise those that stay without a manifest beside them, since a kept
    checkpoint names them, too.
    """

    keep: frozenset[str]
    remove: tuple[str, ...]
    files_of_removed_to_delete: Mapping[str, tuple[str, ...]]
    files_kept_for_others: Mapping[str, tuple[str, ...]]


def plan_pruning(
    checkpoints: Sequence[CheckpointInfo],
    policy: Policy,
    *,
    now: float,
    protected: Collection[str] = (),
    spared: Collection[str] = (),
) -> PrunePlan:
    """Decide what goes. `checkpoints` are all that have a manifest which can be read; incomplete ones are passed over.

    Kept besides what the policy keeps: the names in `protected`; the newest checkpoint and the one published last, each
    with the full save that its next delta may be made against; and whoever names a path (`step-.../data-...`) in
    `spared`, which somebody may need of whom nothing is known.
    """
    complete = sorted((info for info in checkpoints if info.complete), key=lambda info: (info.step, info.revision))
    chosen = policy.keep(complete, now=now) | _bases_of_the_next_save(complete) | frozenset(protected)
    spared = frozenset(spared)
    paths = {info.name: paths_of(info) for info in complete}
    keep = frozenset(info.name for info in complete if info.name in chosen or paths[info.name] & spared)
    removed = [info for info in reversed(complete) if info.name not in keep]
    needed = spared.union(*(paths[name] for name in keep))
    named: frozenset[str] = frozenset().union(*(paths[info.name] for info in removed))
    data = {path for path in named if not path.endswith(f"/{MANIFEST_NAME}") and parse_name(path.partition("/")[0])}
    return PrunePlan(
        keep=keep,
        remove=tuple(info.name for info in removed),
        files_of_removed_to_delete=by_directory(data - needed),
        files_kept_for_others=by_directory({path for path in data & needed if path.partition("/")[0] not in keep}),
    )


def _bases_of_the_next_save(complete: Sequence[CheckpointInfo]) -> frozenset[str]:
    """The newest checkpoint, which a run goes on from, and what a save in flight may be made against."""
    if not complete:
        return frozenset()
    newest = [timeline(complete)[-1], max(complete, key=lambda info: (info.published, info.step, info.revision))]
    return frozenset(name for info in newest for name in (info.name, info.full) if name is not None)


def by_directory(paths: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Paths in the run's directory as names by directory, all in order."""
    found: dict[str, list[str]] = {}
    for directory, _, file in (path.partition("/") for path in sorted(paths)):
        found.setdefault(directory, []).append(file)
    return {directory: tuple(files) for directory, files in found.items()}
