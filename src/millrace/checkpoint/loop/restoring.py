"""Loads a checkpoint of a run into a training state: all of it or what patterns choose, objects with `state_dict` included.

The difference to `dcp.load` is in what a fresh object lacks. An optimizer that has not made a step yet has no moments, so a
template made of its `state_dict` would leave those of the checkpoint unread, without a word, and training would go on from
zeros. Here the members of a `Stateful` that only the checkpoint has are read, too, and given to its `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from millrace.checkpoint.format.inventory import is_named
from millrace.checkpoint.loop.driving import load
from millrace.checkpoint.loop.ranks import Ranks
from millrace.checkpoint.loop.resuming import OptionalKeys
from millrace.checkpoint.reading.load_planner import CheckpointLoadPlanner
from millrace.checkpoint.reading.reader import CheckpointReader
from millrace.checkpoint.state.flattening import flatten
from millrace.errors import MillraceError, MissingKeyError, StateMismatchError, UsageError

_NAMED = 3


def restore_into(
    state: dict[str, Any], reader: CheckpointReader, ranks: Ranks, *, keys: Sequence[str] | None = None
) -> None:
    """Load into `state`: tensors in place, other plain values replaced, objects with `load_state_dict` by that.

    `keys` are patterns of flattened keys (`is_named`); what none names stays as it is. Without them everything below the
    members of `state` has to be in the checkpoint, and the other way round. Every rank calls this. Raises `MissingKeyError`,
    `StateMismatchError`, `UsageError` for patterns that match nothing, and what the reader raises; a state for which that
    happens while values are read is neither the old nor the new one.
    """
    # Objects may fail on one rank alone, and the others must not wait for it.
    plain = ranks.together(
        lambda: {key: value.state_dict() if _is_stateful(value) else value for key, value in state.items()}
    )
    planner = _RunLoadPlanner(state, keys)
    load(plain, reader, planner, ranks)
    ranks.together(lambda: _hand_over(plain, state, planner.touched))


def _hand_over(plain: Mapping[str, Any], state: dict[str, Any], touched: Collection[str]) -> None:
    """Give the members of `state` what was read for them."""
    for name, value in state.items():
        if name not in touched:
            continue
        if not _is_stateful(value):
            state[name] = plain[name]
            continue
        try:
            value.load_state_dict(plain[name])
        except MillraceError:
            raise
        except (RuntimeError, ValueError, KeyError) as error:
            raise StateMismatchError(
                f"{name!r} refuses what the checkpoint has for it ({error!s:.300})",
                next_step="build it with the settings with which it was saved, or choose others with keys=",
            ) from error


def _is_stateful(value: Any) -> bool:
    return isinstance(value, Stateful) and not isinstance(value, torch.Tensor)


class _RunLoadPlanner(CheckpointLoadPlanner):
    """Completes the templates of objects, and leaves out what is not wanted. `touched` are the members that are loaded."""

    way_out = "name the keys as they were saved, or choose with keys= those that the checkpoint has"

    def __init__(self, members: Mapping[str, Any], patterns: Sequence[str] | None) -> None:
        super().__init__()
        self._members, self._patterns = members, patterns
        self.touched: set[str] = set()

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        described: Mapping[str, Any] = metadata.state_dict_metadata
        saved = self._by_member(described, metadata.planner_data or {})
        for name, value in self._members.items():
            if isinstance(value, torch.optim.Optimizer):
                self._forget_later_state(state_dict[name], f"{name}.state.", saved.get(str(name), ()))
        here, _ = flatten(state_dict)
        for name, value in self._members.items():
            absent = [key for key in saved.get(str(name), ()) if key not in here and self._wants(key)]
            if absent and _is_stateful(value) and not isinstance(value, OptionalKeys):
                _complete(state_dict[name], name, value, absent, metadata)
            elif absent and isinstance(value, Mapping) and self._patterns is None:
                raise MissingKeyError(
                    f"the checkpoint has {len(absent)} keys below {name!r} that the state lacks: {_some(absent)}",
                    next_step="give the object itself (which has a load_state_dict), or keys='*' to load what the state has",
                )
        super().set_up_planner(state_dict, metadata, is_coordinator)
        wanted = {
            key: value
            for key, value in self.state_dict.items()
            if self._wants(key) and (key in described or not self._may_lack(key))
        }
        unmatched = [one for one in self._patterns or () if not any(is_named(key, one) for key in self.state_dict)]
        if unmatched or (not wanted and self._patterns is not None):
            raise UsageError(
                f"no key of the state matches {', '.join(map(repr, unmatched)) or 'keys=' + repr(self._patterns)}",
                next_step=f"its keys are like {_some(list(self.state_dict))}",
            )
        self.state_dict = wanted
        touched = {self.mappings[key][0] for key in wanted}
        self.touched = {name for name in self._members if str(name) in touched}

    def _by_member(self, keys: Iterable[str], paths: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
        """What the checkpoint has for each member of the state."""
        names = set(map(str, self._members))
        found: dict[str, list[str]] = {}
        for key in keys:
            dots = [place for place, letter in enumerate(key) if letter == "."]
            name = next((key[:end] for end in (len(key), *reversed(dots)) if key[:end] in names), None)
            # `model.ema` may have been a member of its own, and is nothing of `model` then.
            if name is not None and not str(paths.get(key, (name,))[0]).startswith(f"{name}."):
                found.setdefault(name, []).append(key)
        return found

    def _forget_later_state(self, template: dict[str, Any], prefix: str, saved: Sequence[str]) -> None:
        """Take out what an optimizer has for parameters for which it had nothing yet when it was saved."""
        known = {key.removeprefix(prefix).partition(".")[0] for key in saved if key.startswith(prefix)}
        for number in list(template["state"]) if saved else ():
            keys = flatten({f"{prefix}{number}": template["state"][number]})[0]
            if str(number) not in known and all(map(self._wants, keys)):
                del template["state"][number]

    def _adapt_to_torch_2_3(self, described: Mapping[str, Any]) -> None:
        pass  # a run is of our own saves, and what is not wanted must not come back

    def _wants(self, key: str) -> bool:
        return self._patterns is None or any(is_named(key, pattern) for pattern in self._patterns)

    def _may_lack(self, key: str) -> bool:
        return any(isinstance(value, OptionalKeys) and _is_below(key, name) for name, value in self._members.items())


def _is_below(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _complete(template: dict[str, Any], name: str, value: Any, absent: Sequence[str], metadata: Any) -> None:
    """Add what only the checkpoint has to an object's `state_dict`, for the reader to fill."""
    paths: Mapping[str, Sequence[Any]] = metadata.planner_data or {}
    for key in absent:
        described = metadata.state_dict_metadata[key]
        if isinstance(described, BytesStorageMetadata):
            empty: Any = None
        elif len(described.chunks) > 1:
            raise UsageError(
                f"{key!r} was saved in {len(described.chunks)} shards, and {name!r} has none of them yet",
                next_step="make a sharded optimizer's state with torch.distributed.checkpoint.state_dict.get_state_dict",
            )
        else:
            empty = torch.empty(described.size, dtype=described.properties.dtype)
        _put(
            template, list(paths.get(key, key.split(".")))[1:], empty, numbered=isinstance(value, torch.optim.Optimizer)
        )


def _put(container: Any, path: list[Any], value: Any, *, numbered: bool) -> None:
    """Set a value deep in mappings and lists that are made on the way. `numbered`: an optimizer's state is by number.

    Keys are text in a checkpoint. Beside others that are numbers (`MultiStepLR.milestones`) one is a number, too.
    """
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(container, list):
            while len(container) <= int(part):
                container.append({} if not last else None)
            if last:
                container[int(part)] = value
            container = container[int(part)]
            continue
        by_number = (numbered and depth == 1 and path[0] == "state") or type(next(iter(container), None)) is int
        key = int(part) if by_number and str(part).isdigit() else part
        if last:
            container[key] = value
            return
        container = container.setdefault(key, [] if isinstance(path[depth + 1], int) else {})


def _some(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return ", ".join(map(repr, keys[:_NAMED])) + more
