"""Retention policies: which checkpoints of a run stay. Pure.

A policy maps descriptions of a run's complete checkpoints to the names of those that it keeps. `a | b` keeps all that
either of them keeps.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable
from urllib.parse import quote, unquote

from millrace.checkpoint.run.run_info import CheckpointInfo
from millrace.checkpoint.run.timeline import age_of
from millrace.config import shown
from millrace.errors import ConfigurationError, UsageError
from millrace.figures import listed

_UNITS = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}
_AGE = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)([wdhms])", re.ASCII)
# Characters besides letters and digits that are not escaped in a metric's name when a policy is written as text.
_PLAIN = "/ ()[]<>@#&+*^~!?'|-_."
_NAMED = 5
_KNOWN = "N, last=N, every=STEPS, best=METRIC[:min|max][:N], newer=AGE (90s, 12h, 7d, 2w) or all"


@runtime_checkable
class Policy(Protocol):
    """Decides which checkpoints stay. Pure: the same descriptions and `now` give the same result."""

    def keep(self, checkpoints: Sequence[CheckpointInfo], *, now: float) -> frozenset[str]:
        """Names of the complete checkpoints to keep. `checkpoints` are by step and revision; `now` is in Unix seconds."""
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
        if not _is_policy(policy):
            return NotImplemented
        members += policy.policies if isinstance(policy, AnyOf) else [policy]
    return AnyOf(tuple(members))


@dataclass(frozen=True, slots=True)
class KeepLast(_Composable):
    """Keeps the `n` checkpoints that were saved last, whatever their steps."""

    n: int

    def __post_init__(self) -> None:
        _positive("last", self.n)

    def __str__(self) -> str:
        return f"last={self.n}"

    def keep(self, checkpoints: Sequence[CheckpointInfo], *, now: float) -> frozenset[str]:
        return frozenset(info.name for info in sorted(checkpoints, key=age_of)[-self.n :])


@dataclass(frozen=True, slots=True)
class KeepEvery(_Composable):
    """Keeps the checkpoints whose step is a multiple of `steps`, and no others."""

    steps: int

    def __post_init__(self) -> None:
        _positive("every", self.steps)

    def __str__(self) -> str:
        return f"every={self.steps}"

    def keep(self, checkpoints: Sequence[CheckpointInfo], *, now: float) -> frozenset[str]:
        return frozenset(info.name for info in _current(checkpoints) if info.step % self.steps == 0)


@dataclass(frozen=True, slots=True)
class KeepBest(_Composable):
    """Keeps the `n` with the lowest (`mode="min"`) or highest value of a metric; of equal ones the newest.

    A checkpoint without the metric, or with a NaN, does not count. While no checkpoint has it, the last `n` are kept.
    """

    metric: str
    n: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _positive("best", self.n)
        if not isinstance(self.metric, str) or not self.metric or self.mode not in ("min", "max"):
            raise ConfigurationError(
                f"KeepBest({self.metric!r}, mode={self.mode!r}) is not valid",
                next_step="give a metric's name, and mode='min' or mode='max'",
            )

    def __str__(self) -> str:
        return f"best={quote(self.metric, safe=_PLAIN, errors='surrogatepass')}:{self.mode}:{self.n}"

    def keep(self, checkpoints: Sequence[CheckpointInfo], *, now: float) -> frozenset[str]:
        sign = 1 if self.mode == "min" else -1
        known = [info for info in _current(checkpoints) if self.counts(info.metrics)]
        if not known:
            return KeepLast(self.n).keep(checkpoints, now=now)
        known.sort(key=lambda info: (sign * info.metrics[self.metric], -info.revision, -info.step))
        return frozenset(info.name for info in known[: self.n])

    def counts(self, metrics: Mapping[str, float]) -> bool:
        """Whether these metrics of a checkpoint include this one as a number."""
        return not math.isnan(metrics.get(self.metric, math.nan))


@dataclass(frozen=True, slots=True)
class KeepNewerThan(_Composable):
    """Keeps the checkpoints saved in the last `seconds` (a number or a `timedelta`), by the writers' clocks."""

    seconds: float | timedelta

    def __post_init__(self) -> None:
        seconds = self.seconds.total_seconds() if isinstance(self.seconds, timedelta) else self.seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= sys.float_info.max:
            raise ConfigurationError(
                f"newer={shown(self.seconds)} is not an age",
                next_step="give a positive number of seconds, or a timedelta",
            )
        object.__setattr__(self, "seconds", float(seconds))

    def __str__(self) -> str:
        seconds = self.age_seconds
        for unit, length in _UNITS.items():
            if seconds % length == 0:
                return f"newer={int(seconds // length)}{unit}"
        return f"newer={seconds!r}s"

    def keep(self, checkpoints: Sequence[CheckpointInfo], *, now: float) -> frozenset[str]:
        return frozenset(info.name for info in _current(checkpoints) if info.created > now - self.age_seconds)

    @property
    def age_seconds(self) -> float:
        return self.seconds.total_seconds() if isinstance(self.seconds, timedelta) else self.seconds


@dataclass(frozen=True, slots=True)
class KeepAll(_Composable):
    """Keeps every complete checkpoint, including those whose step was saved again."""

    def __str__(self) -> str:
        return "all"

    def keep(self, checkpoints: Sequence[CheckpointInfo], *, now: float) -> frozenset[str]:
        return frozenset(info.name for info in checkpoints)


@dataclass(frozen=True, slots=True)
class AnyOf(_Composable):
    """Keeps all that any of its policies keeps. Created by `a | b`."""

    policies: tuple[Policy, ...]

    def __post_init__(self) -> None:
        if not self.policies:
            raise ConfigurationError("a policy of no policies", next_step="give at least one, or KeepAll()")

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))

    def __str__(self) -> str:
        return ",".join(map(str, self.policies))

    def keep(self, checkpoints: Sequence[CheckpointInfo], *, now: float) -> frozenset[str]:
        return frozenset().union(*(kept_names(policy, checkpoints, now=now) for policy in self.policies))


def kept_names(policy: Policy, checkpoints: Sequence[CheckpointInfo], *, now: float) -> frozenset[str]:
    """The names that `policy` keeps. Raises `UsageError` if it fails, or returns anything but names: it may be a user's."""
    try:
        kept: Any = policy.keep(checkpoints, now=now)
        names = frozenset((kept,) if isinstance(kept, str) else kept)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the retention policy {type(policy).__name__} failed ({type(error).__name__}: {error!s:.200})",
            next_step="correct its keep(); nothing was removed",
        ) from error
    if isinstance(kept, str) or not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"the retention policy {type(policy).__name__} returned other values than names",
            next_step="return the `name` of each checkpoint to keep, as a set; nothing was removed",
        )
    return names


def _is_policy(found: object) -> TypeGuard[Policy]:
    return isinstance(found, Policy) and not isinstance(found, type)  # a class has a `keep`, too


def _positive(what: str, number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigurationError(f"{what}={shown(number)} keeps nothing", next_step="give a whole number from 1 on")
    if number > sys.maxsize:
        raise ConfigurationError(f"{what}= is too large", next_step=f"give a whole number from 1 to {sys.maxsize}")


def _current(checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    return [info for info in checkpoints if not info.superseded]


# --- policies as text -----------------------------------------------------------------------------


def parse_policy(text: str) -> Policy:
    """Parse `last=5,every=1000,best=loss:min:2,newer=7d` or `all`, of which any part keeps checkpoints; inverse of `str`.

    A number alone is short for `last=`. In a metric's name `%2C` stands for a comma, and so on. Raises `ConfigurationError`.
    """
    parts = [_parse_part(part.strip()) for part in text.split(",")]
    return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))


def as_policy(keep: int | str | Policy | None) -> Policy:
    """A policy from an argument: a number of newest checkpoints, text for `parse_policy`, None for all."""
    if keep is None:
        return KeepAll()
    if isinstance(keep, int):
        return KeepLast(keep)
    if isinstance(keep, str):
        return parse_policy(keep)
    if _is_policy(keep):
        return keep
    raise ConfigurationError(
        f"{shown(keep)} is not a retention policy", next_step="give a number, a policy such as KeepLast(5), or text"
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
    if text.isascii() and text.isdigit():
        kind, value = "last", text
    if kind not in parsers or not value:
        raise ConfigurationError(f"{text!r:.100} is not a retention policy", next_step=f"write {_KNOWN}")
    try:
        return parsers[kind](value)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"{text!r:.100} is not a retention policy", next_step=f"write {_KNOWN}") from error


def _parse_best(value: str) -> Policy:
    metric, *rest = value.split(":")
    mode = rest.pop(0) if rest and not rest[0].isdigit() else "min"
    n = int(rest.pop(0)) if rest else 1
    if rest or mode not in ("min", "max"):
        raise ValueError(value)
    return KeepBest(unquote(metric, errors="surrogatepass"), n, "min" if mode == "min" else "max")


def _parse_newer(value: str) -> Policy:
    match = _AGE.fullmatch(value)
    if match is None:
        raise ValueError(value)
    return KeepNewerThan(float(match[1]) * _UNITS[match[2]])


# --- policies that match nothing ------------------------------------------------------------------


def refuse_what_matches_nothing(url: str, policy: Policy, checkpoints: Iterable[object]) -> None:
    """Raise `UsageError` if a part of `policy` selects by a metric or a step that none of the checkpoints has.

    Values other than `CheckpointInfo` (errors) in `checkpoints` are skipped. An empty run is accepted.
    """
    complete = [info for info in checkpoints if isinstance(info, CheckpointInfo) and info.complete]
    for part in _parts(policy) if complete else ():
        if isinstance(part, KeepBest) and not any(part.counts(info.metrics) for info in complete):
            names = {name: None for info in complete for name in info.metrics}
            raise UsageError(
                f"{str(part)!r}: no checkpoint of {url} has the metric {part.metric!r} ({_present(list(names))})",
                next_step="correct the metric's name, or keep by last=N",
            )
        if isinstance(part, KeepEvery) and not any(info.step % part.steps == 0 for info in complete):
            steps = ", ".join(str(info.step) for info in complete[-_NAMED:])
            raise UsageError(
                f"{str(part)!r}: {part.steps} divides no step of {url} (the last ones: {steps})",
                next_step="give a number that divides the steps, or keep by last=N",
            )


def policy_warnings(
    policy: Policy, step: int, metrics: Mapping[str, float], *, previous: int | None, apart_seconds: float | None
) -> dict[str, str]:
    """Warnings about parts of `policy` that may keep nothing of a run whose next save is of `step` with `metrics`.

    The keys identify the mistakes, so that each is reported once. `previous` is the step of the manager's last save,
    `apart_seconds` before.
    """
    found: dict[str, str] = {}
    parts = _parts(policy)
    for part in parts:
        if isinstance(part, KeepBest) and not part.counts(metrics):
            problem = "is NaN" if part.metric in metrics else "is missing"
            found[f"metric {part.metric}"] = (
                f"the metric {part.metric!r} of step {step} {problem} ({_present(list(metrics))}), and {str(part)!r} chooses"
                f" by it; correct the name in keep= or metrics=, as while no checkpoint has it the last {part.n} are kept,"
                " and after that none without it except the newest"
            )
        if isinstance(part, KeepEvery) and step % part.steps and previous is not None:
            multiple = step - step % part.steps
            if previous < multiple:
                found[str(part)] = (
                    f"{str(part)!r} keeps neither step {previous} nor step {step}, since {part.steps} divides neither;"
                    f" save at multiples of {part.steps} such as {multiple}, or keep by last=N"
                )
        if isinstance(part, KeepNewerThan) and len(parts) == 1 and (apart_seconds or 0.0) >= part.age_seconds:
            found[str(part)] = (
                f"{str(part)!r} keeps the newest checkpoint alone, since saves are {apart_seconds:.0f} s apart;"
                " give a longer age, or add last=N"
            )
    return found


def _parts(policy: Policy) -> Sequence[Policy]:
    return policy.policies if isinstance(policy, AnyOf) else (policy,)


def _present(names: Sequence[str]) -> str:
    """The names of the metrics, or the first few of them."""
    if not names:
        return "there are no metrics"
    return f"there are {listed([repr(name) for name in names], _NAMED)}"
