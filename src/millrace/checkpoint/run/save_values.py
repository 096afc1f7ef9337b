"""Values that the parts of a save exchange, in one process or between the training process and the saver."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from millrace.checkpoint.run.claims import ClaimState
from millrace.checkpoint.run.saving import SaveResult
from millrace.checkpoint.run.timeline import Point
from millrace.checkpoint.writing.bases import MemoryBase
from millrace.checkpoint.writing.delta import SaveRecord
from millrace.errors import UsageError


@dataclass(frozen=True, slots=True)
class Member:
    """The position of a rank among all. `handles_node`: whether it is the lowest rank with this node's directory."""

    rank: int = 0
    count: int = 1
    handles_node: bool = True

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides for all."""
        return self.rank == 0


@dataclass(frozen=True, kw_only=True)
class SaveOrder:
    """The first rank's decision for all: the directory, the base of the save (None: a full save), the id of the save, and
    whether a near save is copied to other nodes, where the manager has `replicas`. `after` is the checkpoint that the save
    follows (None: the first of the run), and `after_file` a data file of it, where this manager saved it (else "").
    """

    name: str
    base: str | None
    is_anchor: bool
    full: str
    save_id: str
    after: str | None = None
    after_file: str = ""
    is_copied: bool = True


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """One save: its step, the user's figures and values, and how long the training waited for an earlier save.

    `order` is None for a single rank, which decides in the save.
    """

    step: int
    metrics: Mapping[str, float]
    user: Mapping[str, Any]
    waited_seconds: float
    order: SaveOrder | None = None


@dataclass(frozen=True, kw_only=True)
class Written:
    """A save that is durable where it was written: its name and id, this rank's data files, its result, whether only the
    near place has it, and `is_copied` of its order. Of a near save by several ranks only this rank's part is durable, which
    its result describes.
    """

    name: str
    save_id: str
    own_files: tuple[str, ...]
    is_near: bool
    is_copied: bool
    result: SaveResult


class Staged(Protocol):
    """A copy of a state that is not changed until its release: a `StagedState`, or its view in the saver process."""

    @property
    def nbytes(self) -> int: ...

    @property
    def seconds(self) -> float:
        """The duration of the copy."""
        ...

    def release(self) -> None: ...


class LastSave(NamedTuple):
    """This rank's part of the last save, as the base of the next one."""

    base: MemoryBase
    staged: Staged


@dataclass(kw_only=True)
class RunState:
    """The state of a `RunSaver`, from which another one continues. Picklable.

    `complete`: the complete checkpoints; None before the first listing. `taken`: all used steps and revisions. `history`:
    every save since the last full one, on the first rank. `may_go_back`: whether the next save may be of any step, after a
    restore. `versions`: those of the run's data files in an object store, by path. `newest_own`: the checkpoint that this
    manager saved last. `attempted`: the step of a save that may have been published by a saver that died. `is_abandoned`:
    whether the saves that the claim announces will not be finished. `given_up`: near saves that never reach the run's URL.
    """

    claim: ClaimState | None = None
    complete: list[Point] | None = None
    taken: set[tuple[int, int]] = field(default_factory=set)
    history: list[SaveRecord] = field(default_factory=list)
    is_history_known: bool = False
    newest_own: Point | None = None
    attempted: int | None = None
    is_next_full: bool = False
    may_go_back: bool = False
    is_abandoned: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)


def picklable(error: Exception) -> Exception:
    """`error`, or a `UsageError` with its text where it cannot be pickled: the other ranks wait for it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its class raises
        return UsageError(f"a rank failed ({type(error).__name__}: {error!s:.300})", next_step="see its log")
    return error
