"""Restores: which checkpoint of a run is loaded, and how it gets into a training state.

Unlike `dcp.load` this also loads values that a new object lacks. An optimizer before its first step has no moments. A
template made of its `state_dict` would not load those of the checkpoint, without any error, and training would continue from
zeros. Here the members of a `Stateful` that only the checkpoint has are loaded, too, and passed to its `load_state_dict`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from millrace.checkpoint.format.inventory import is_named
from millrace.checkpoint.reading.load_planner import CheckpointLoadPlanner
from millrace.checkpoint.reading.reader import CheckpointReader
from millrace.checkpoint.run.driving import load
from millrace.checkpoint.run.ranks import Ranks
from millrace.checkpoint.run.resuming import OptionalKeys
from millrace.checkpoint.run.tiers import Placed, Tiers
from millrace.checkpoint.run.timeline import newest_first, timeline
from millrace.checkpoint.state.flattening import PLAIN_TENSORS, flatten, refuse_nested_objects, state_dict_of
from millrace.checkpoint.state.tensors import WrapperMetadata
from millrace.checkpoint.state.wrappers import WrapperSlot
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.storage.layered import LayeredStorage
from millrace.checkpoint.storage.manifests import StoredManifest
from millrace.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DamagedError,
    DiskFullError,
    MillraceError,
    MissingError,
    MissingKeyError,
    StateMismatchError,
    StorageError,
    UsageError,
)
from millrace.events import Event, emit
from millrace.figures import listed, size_text

_NAMED = 3
# How often a restore lists the candidates again because the one that it read was removed.
_LOOKS = 5
_MAX_LIST_INDEX = 1 << 20


# --- which checkpoint -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Restorer:
    """Chooses a checkpoint of a run and loads it. Every rank has one; all methods except `candidates` are collective.

    `damaged` receives the names of checkpoints that could not be restored. `handles_node`: whether this rank copies files of
    its node's disk to other nodes, as one rank of each node does.
    """

    tiers: Tiers
    ranks: Ranks
    reader_options: Mapping[str, Any]
    damaged: set[str]
    handles_node: bool

    def candidates(self, step: int | None) -> list[Placed]:
        """Complete checkpoints in the order in which a restore tries them. Raises `CheckpointNotFoundError` for none."""
        complete, url = self.tiers.complete(patient=True), self.tiers.origin.url
        found = [each for each in newest_first(complete) if step is None or each.step == step]
        if not found and step is None:
            raise CheckpointNotFoundError(f"no complete checkpoint in {url}", next_step="save one first")
        if not found:
            last = ", ".join(str(each.step) for each in timeline(complete)[-5:])
            raise CheckpointNotFoundError(
                f"no complete checkpoint of step {step} in {url}",
                next_step=f"the last steps there: {last}" if last else "there is none of any step",
            )
        return found

    def choose(self, step: int | None) -> list[tuple[str, int]]:
        """Names and steps of the `candidates` on every rank; an empty list for an empty run where no step is given."""

        def names() -> list[tuple[str, int]]:
            try:
                return [(each.name, each.step) for each in self.candidates(step)]
            except CheckpointNotFoundError:
                if step is not None:
                    raise
                return []

        return self.ranks.run_on_first(names)

    @property
    def may_be_split(self) -> bool:
        """Whether a checkpoint that is not at the origin may be in parts on several nodes."""
        return self.tiers.peers is not None or (self.tiers.local is not None and self.ranks.count > 1)

    def make_reachable(self, step: int | None) -> bool:
        """Whether every rank can read all files of the first candidate. Where the nodes have replicas, files that only one
        of them has are copied to others for that.
        """
        if self.tiers.peers is None:
            return False
        try:
            for name, _ in self.choose(step)[:1]:
                if self.ranks.run_on_first(functools.partial(self.tiers.is_at_origin, name)):
                    return True
                stored = self.ranks.run_on_first(functools.partial(self.tiers.manifest, name))
                if not self._missing(name, stored.manifest.save_id):
                    return True
                self.ranks.run_on_all(functools.partial(self._share, name, stored))
                return not self._missing(name, stored.manifest.save_id)
        except MillraceError:  # the same on every rank; the restore reports it
            pass
        return False

    def _share(self, name: str, stored: StoredManifest) -> None:
        if self.handles_node:
            self.tiers.share(name, stored)

    def _missing(self, name: str, save_id: str) -> list[str]:
        """Files of a checkpoint that any rank cannot read."""

        def missing() -> list[str]:
            self.tiers.look()
            files = self.tiers.missing_files(name, save_id)
            if files and self.tiers.peers is not None:
                self.tiers.look(patient=True)
                files = self.tiers.missing_files(name, save_id)
            return files

        lists = self.ranks.gather(self.ranks.run_on_all(missing))
        return sorted({file for each in lists for file in each})

    def restore(
        self,
        state: dict[str, Any],
        candidates: Sequence[tuple[str, int]],
        keys: Sequence[str] | None,
        *,
        fallback: bool,
        one_step: bool,
    ) -> int | None:
        """Load the first of the `candidates` that can be loaded; returns its step, or None if there are none.

        A damaged checkpoint, or one that a local disk cannot read, is skipped with a warning if `fallback` is set, and one
        that was removed meanwhile in any case, but not with `one_step`, where the caller chose a step. After a removal the
        candidates are listed again: a running job removes a checkpoint because it has saved newer ones. Raises as
        `restore_into`.
        """
        tried: set[str] = set()
        left, looks = list(candidates), 0
        while left:
            name, step = left.pop(0)
            tried.add(name)
            try:
                self._load(name, state, keys)
                return step
            except DiskFullError:
                raise
            except (DamagedError, MissingError, StorageError) as error:
                gone = isinstance(error, CheckpointNotFoundError) or self.ranks.run_on_first(
                    functools.partial(self._is_gone, name)
                )
                if one_step:
                    raise
                if not (fallback or gone):
                    next_step = "restore(state, fallback=True) takes the one before it"
                    raise type(error)(error.message, next_step=next_step) from error
                self.damaged.add(name)
                url = self.tiers.origin.url
                if gone and looks < _LOOKS:
                    looks += 1
                    left = [each for each in self.choose(None) if each[0] not in tried]
                following = f"; trying step {left[0][1]}" if left else ""
                self._warn(f"{name} of {url} cannot be restored ({error.message}){following}")
                if not left:
                    raise
        return None

    def _load(self, name: str, state: dict[str, Any], keys: Sequence[str] | None) -> None:
        url = self.tiers.origin.url
        saved = self.ranks.run_on_first(lambda: self.tiers.manifest(name).manifest.save_id)
        if self.may_be_split and not self.ranks.run_on_first(lambda: self.tiers.is_at_origin(name)):
            files = self._missing(name, saved)
            if files:
                raise CheckpointNotFoundError(
                    f"{name} of {url} is on disks of several nodes, and some of them are missing: {files[0]} was not found",
                    next_step="restore another step, or start with the same nodes",
                )
        storage = self.tiers.checkpoint(name, save_id=saved)
        reader = _RunReader(self.tiers.origin.url_of(name), storage, **self.reader_options)
        restore_into(state, reader, self.ranks, keys=keys)
        if self.ranks.is_first:
            emit(Event(name="run.restored", subject=url, detail=f"{name}{self._sources(storage)}"))

    def _sources(self, storage: CheckpointStorage) -> str:
        """How much the first rank read from where, for people."""
        if not isinstance(storage, LayeredStorage):
            return ""
        read = {"this node's disk": 0, "other nodes": 0, "the store": 0}
        for number, (place, nbytes) in enumerate(zip(storage.urls, storage.read_bytes, strict=True)):
            near = self.tiers.local is not None and number == 0
            kind = "this node's disk" if near else "the store" if place == storage.url else "other nodes"
            read[kind] += nbytes
        return "; rank 0 read " + ", ".join(
            f"{size_text(nbytes)} from {kind}" for kind, nbytes in read.items() if nbytes
        )

    def _is_gone(self, name: str) -> bool:
        return all(each.name != name for each in self.tiers.complete())

    def _warn(self, text: str) -> None:
        emit(Event(name="run.restore.fallback", subject=self.tiers.origin.url, detail=text))
        # A filter may make errors of warnings. Then every rank raises it, and none waits for another.
        self.ranks.run_on_first(lambda: warnings.warn(text, RuntimeWarning, stacklevel=6))


class _RunReader(CheckpointReader):
    """A reader of a checkpoint whose files may be in several places."""

    def __init__(self, url: str, storage: CheckpointStorage, **options: Any) -> None:
        super().__init__(url, **options)
        self._storage_of_run = storage

    def _storage(self) -> CheckpointStorage:
        return self._storage_of_run


# --- into a state ---------------------------------------------------------------------------------


def restore_into(
    state: dict[str, Any],
    reader: CheckpointReader,
    ranks: Ranks,
    *,
    keys: Sequence[str] | None = None,
    partial_modules: bool = False,
) -> None:
    """Load into `state`: tensors in place; plain values are replaced; objects get theirs through `load_state_dict`.

    `keys` are patterns of flattened keys (`is_named`). Values that match none of them stay unchanged. Without `keys` the
    checkpoint and the members of `state` must have the same keys. With `partial_modules` a module may have a part of the
    keys of the saved one; otherwise its `load_state_dict` gets all of them. Every rank calls this. Raises `MissingKeyError`,
    `StateMismatchError`, `UsageError` for patterns that match nothing, and the errors of the reader. After an error while
    values are read, the state is a mix of old and new values.
    """
    # An object may fail on one rank only, and the other ranks must not wait for it.
    plain = ranks.run_on_all(
        lambda: {key: state_dict_of(key, value) if _is_stateful(value) else value for key, value in state.items()}
    )
    planner = _RunLoadPlanner(state, keys, partial_modules=partial_modules)
    load(plain, reader, planner, ranks)
    for container, key, slot in planner.slots:
        container[key] = slot.value
    ranks.run_on_all(lambda: _assign(plain, state, planner.touched))


def _assign(plain: Mapping[str, Any], state: dict[str, Any], touched: Collection[str]) -> None:
    """Pass the loaded values to the members of `state`."""
    for name, value in state.items():
        if name not in touched:
            continue
        if not _is_stateful(value):
            state[name] = plain[name]
            continue
        tensors = (each for each in flatten({name: plain[name]})[0].values() if type(each) in PLAIN_TENSORS)
        # Torch refuses to change a module that was built in inference mode outside of this mode.
        is_inference = any(map(torch.is_inference, tensors))
        try:
            with torch.inference_mode() if is_inference else contextlib.nullcontext():
                value.load_state_dict(plain[name])
        except MillraceError:
            raise
        except Exception as error:
            # A class may raise anything.
            raise StateMismatchError(
                f"{name!r} does not accept its values in the checkpoint ({type(error).__name__}: {error!s:.300})",
                next_step="build it with the settings with which it was saved, or choose others with keys=",
            ) from error


def _is_stateful(value: Any) -> bool:
    return isinstance(value, Stateful) and not isinstance(value, torch.Tensor)


class _RunLoadPlanner(CheckpointLoadPlanner):
    """Completes the templates of objects, and leaves out keys that are not selected. `touched` are the loaded members."""

    way_out = "name the keys as they were saved, or choose with keys= those that the checkpoint has"

    def __init__(
        self, members: Mapping[str, Any], patterns: Sequence[str] | None, *, partial_modules: bool = False
    ) -> None:
        super().__init__()
        self._members, self._patterns, self._partial_modules = members, patterns, partial_modules
        self.touched: set[str] = set()
        # Where the wrapper tensors that the reader builds are stored.
        self.slots: list[tuple[Any, Any, WrapperSlot]] = []

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        described: Mapping[str, Any] = metadata.state_dict_metadata
        saved = self._by_member(described, _paths_of(metadata))
        for name, value in self._members.items():
            if isinstance(value, torch.optim.Optimizer):
                self._drop_later_state(state_dict[name], f"{name}.state.", saved.get(str(name), ()))
        present, _ = flatten(state_dict)
        refuse_nested_objects(present)
        for name, value in self._members.items():
            absent = [key for key in saved.get(str(name), ()) if key not in present and self._wants(key)]
            is_partial = isinstance(value, OptionalKeys) or (
                self._partial_modules and isinstance(value, torch.nn.Module)
            )
            if absent and _is_stateful(value) and not is_partial:
                self.slots += _complete(state_dict[name], name, value, absent, metadata)
            elif absent and isinstance(value, Mapping | list) and self._patterns is None:
                keys = listed([repr(key) for key in absent], _NAMED)
                raise MissingKeyError(
                    f"the checkpoint has {len(absent)} keys below {name!r} that the state does not have: {keys}",
                    next_step="give the object itself (which has a load_state_dict), or keys='*' for the state's own keys",
                )
        super().set_up_planner(state_dict, metadata, is_coordinator)
        wanted = {
            key: value
            for key, value in self.state_dict.items()
            if self._wants(key) and (key in described or not self._may_lack(key))
        }
        if not self.state_dict and self._patterns is not None:
            raise UsageError(
                f"the state has no values, so keys={self._patterns!r} loads nothing",
                next_step="give the tensors or the object to load into, as {'model': model}",
            )
        unmatched = [one for one in self._patterns or () if not any(is_named(key, one) for key in self.state_dict)]
        if unmatched or (not wanted and self._patterns is not None):
            raise UsageError(
                f"no key of the state matches {', '.join(map(repr, unmatched)) or 'keys=' + repr(self._patterns)}",
                next_step=f"its keys are like {listed([repr(key) for key in self.state_dict], _NAMED)}",
            )
        self.state_dict = wanted
        touched = {self.mappings[key][0] for key in wanted}
        self.touched = {name for name in self._members if str(name) in touched}

    def _by_member(self, keys: Iterable[str], paths: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
        """The checkpoint's keys by the member of the state that they belong to."""
        names = set(map(str, self._members))
        found: dict[str, list[str]] = {}
        for key in keys:
            dots = [place for place, letter in enumerate(key) if letter == "."]
            name = next((key[:end] for end in (len(key), *reversed(dots)) if key[:end] in names), None)
            # `model.ema` may have been a member of its own. Then it does not belong to `model`.
            if name is not None and not str(paths.get(key, (name,))[0]).startswith(f"{name}."):
                found.setdefault(name, []).append(key)
        return found

    def _drop_later_state(self, template: dict[str, Any], prefix: str, saved: Sequence[str]) -> None:
        """Remove an optimizer's state of parameters that had no state yet when the checkpoint was saved."""
        known = {key.removeprefix(prefix).partition(".")[0] for key in saved if key.startswith(prefix)}
        # A container of optimizers may have keys of its own.
        for number in list(template.get("state", ())) if saved else ():
            keys = flatten({f"{prefix}{number}": template["state"][number]})[0]
            if str(number) not in known and all(map(self._wants, keys)):
                del template["state"][number]

    def _adapt_to_torch_2_3(self, described: Mapping[str, Any]) -> None:
        pass  # a run has only Millrace's checkpoints, and keys that are not selected must stay out

    def _wants(self, key: str) -> bool:
        return self._patterns is None or any(is_named(key, pattern) for pattern in self._patterns)

    def _may_lack(self, key: str) -> bool:
        return any(isinstance(value, OptionalKeys) and _is_below(key, name) for name, value in self._members.items())


def _paths_of(metadata: Any) -> Mapping[str, Sequence[Any]]:
    """The paths of the checkpoint's keys in the saved state. Raises `CorruptCheckpointError` for other planner data."""
    paths = metadata.planner_data or {}
    if isinstance(paths, dict) and all(path and isinstance(path, tuple) for path in paths.values()):
        return paths
    raise CorruptCheckpointError(
        "the planner data of the checkpoint has an invalid path", next_step="restore another checkpoint"
    )


def _is_below(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _complete(
    template: dict[str, Any], name: str, value: Any, absent: Sequence[str], metadata: Any
) -> Iterator[tuple[Any, Any, WrapperSlot]]:
    """Add the keys that only the checkpoint has to an object's `state_dict`, as empty values for the reader to fill.

    Yields each container and key into which a wrapper tensor is put after it was read. Raises `StateMismatchError` where the
    object has a list or a value in place of the container in the checkpoint.
    """
    paths = _paths_of(metadata)
    for key in absent:
        described = metadata.state_dict_metadata[key]
        if isinstance(described, BytesStorageMetadata):
            empty: Any = None
        elif len(described.chunks) > 1:
            raise UsageError(
                f"{key!r} was saved in {len(described.chunks)} shards, and {name!r} does not have any of them yet",
                next_step="make a sharded optimizer's state with torch.distributed.checkpoint.state_dict.get_state_dict",
            )
        elif isinstance(described, WrapperMetadata):
            empty = WrapperSlot(described.size)
        else:
            empty = torch.empty(described.size, dtype=described.properties.dtype)
        path = list(paths.get(key, key.split(".")))[1:]
        try:
            place = _put(template, path, empty, numbered=isinstance(value, torch.optim.Optimizer))
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            mismatch = StateMismatchError(
                f"{key!r} of the checkpoint has no place in {name!r}, which has values of other kinds there",
                next_step="build it with the settings with which it was saved, or choose others with keys=",
            )
            mismatch.keys = (key,)
            raise mismatch from error
        if isinstance(empty, WrapperSlot):
            yield *place, empty


def _put(container: Any, path: list[Any], value: Any, *, numbered: bool) -> tuple[Any, Any]:
    """Set a value deep in mappings and lists, which are created where missing; returns its container and its key there.

    `numbered`: an optimizer's state has numbers as keys. Keys are text in a checkpoint. One becomes a number where the
    other keys of its mapping are numbers (`MultiStepLR.milestones`), and in the state dict of an optimizer that an object
    has among its own values.
    """
    parameters: Collection[str] = ()
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(container, list):
            if int(part) > _MAX_LIST_INDEX:
                raise IndexError(f"the index {part} is impossibly large")
            while len(container) <= int(part):
                container.append({} if not last else None)
            if last:
                container[int(part)] = value
                return container, int(part)
            container = container[int(part)]
            continue
        by_number = (numbered and depth == 1 and path[0] == "state") or type(next(iter(container), None)) is int
        key = int(part) if (by_number and str(part).isdigit()) or part in parameters else part
        if last:
            container[key] = value
            return container, key
        parameters = _numbers_of_parameters(container) if part == "state" else ()
        container = container.setdefault(key, [] if isinstance(path[depth + 1], int) else {})
    return container, None


def _numbers_of_parameters(optimizer: Mapping[Any, Any]) -> Collection[str]:
    """The numbers of the parameters in an optimizer's state dict, as text; empty for another mapping."""
    groups = optimizer.get("param_groups")
    lists = [group.get("params") for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []
    return {str(number) for each in lists if isinstance(each, list) for number in each if type(number) is int}
