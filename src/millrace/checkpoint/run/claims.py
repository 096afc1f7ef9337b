"""Claims: the process that may save into a run, recorded in small numbered files of which the highest counts.

A claim is taken by creating `writer-<number + 1>.json`, which succeeds for one process only: by a conditional PUT on an
object store, by a hard link on a file system. The previous owner finds out at its next `check`. Clocks are not used. On a
network file system that caches directories (NFS: for up to a minute), both taking a claim and `check` may see an old state
for that long. No torch.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import uuid
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self

from typing_extensions import Buffer

from millrace.checkpoint.run.processes import Process, state_of, this_process
from millrace.checkpoint.run.run_layout import Run, parse_name
from millrace.checkpoint.storage.base import StoredFile
from millrace.errors import (
    ChangedError,
    MillraceError,
    MissingError,
    ObjectExistsError,
    RunTakenError,
    StorageError,
    UsageError,
)
from millrace.events import Event, emit
from millrace.runtime import forks

_PREFIX = "writer-"
_NAME = re.compile(r"writer-(\d{12})\.json", re.ASCII)
_MAX_CLAIM_BYTES = 1 << 20
_POLL_SECONDS = 0.5
# Attempts to read a claim that its owner rewrites at the same time.
_READ_ATTEMPTS = 5
# Attempts to take a claim while other processes take it, one after the other.
_MAX_TAKE_ATTEMPTS = 100
# Saves of dead writers that a claim lists; older ones are found by their age.
_MAX_LEFT = 32


def is_claim(name: str) -> bool:
    """Whether a file of a run is a claim. A run has at least one from its first save on."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRecord:
    """The content of a claim: its process, the time (for people), and the checkpoints that are being saved.

    `left` are directories of unfinished saves by earlier writers that have certainly died.
    """

    process: Process
    token: str
    created: float
    saving: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    released: bool = False

    def encode(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode("ascii")

    @classmethod
    def decode(cls, data: Buffer) -> Self:
        """Raises `ValueError` for other data than a claim."""
        try:
            found = json.loads(bytes(memoryview(data)))
            process = found["process"]
            return cls(
                process=Process(**{field.name: _plain(process[field.name]) for field in fields(Process)}),
                token=str(found["token"]),
                created=float(found["created"]),
                saving=_directories(found["saving"]),
                left=_directories(found["left"]),
                released=found["released"] is True,
            )
        except (KeyError, TypeError, RecursionError, OverflowError) as error:
            raise ValueError("not a claim") from error


class ClaimState(NamedTuple):
    """A claim for another process that represents the same one (`processes.represent`)."""

    number: int
    record: ClaimRecord
    version: str


class _Newest(NamedTuple):
    """The highest claim of a run: its number, its file, and its record (None if it cannot be read)."""

    number: int
    file: StoredFile
    record: ClaimRecord | None


class Claim:
    """The right to save into a run, until another process takes it. Thread-safe; not valid in forked children."""

    def __init__(self, run: Run, number: int, record: ClaimRecord, version: str) -> None:
        self._run, self._number = run, number
        self._record, self._version = record, version
        self._owner = forks.Owner()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Claim({self._run.url!r}, number={self._number})"

    @property
    def number(self) -> int:
        """One more than the number of the previous claim."""
        return self._number

    @property
    def state(self) -> ClaimState:
        """What `resume` needs in another process."""
        return ClaimState(self._number, self._record, self._version)

    @classmethod
    def resume(cls, run: Run, state: ClaimState) -> Claim:
        """Continue with a claim of another process. Makes no request; the next `check` verifies the claim."""
        return cls(run, *state)

    @classmethod
    def take(cls, run: Run, *, wait_seconds: float = 10.0) -> Claim:
        """Take the right to save into `run`.

        A dead process, this one, and a process of another host, whose state is unknown, lose the run at once. For another
        running process of this host the call waits `wait_seconds`, and then raises `RunTakenError`. If several processes
        try at the same time, one succeeds.
        """
        deadline = time.monotonic() + wait_seconds
        run.storage.prepare()
        attempts = 0
        while True:
            newest = _newest(run)
            if newest is not None and _is_held_on_this_host(newest.record):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise _taken(run, newest.record, "end that process, or save into another directory")
                time.sleep(min(_POLL_SECONDS, remaining))
                continue
            claim = cls._follow(run, newest)
            if claim is not None:
                return claim
            attempts += 1
            if attempts == _MAX_TAKE_ATTEMPTS:
                _refuse_other_than_file(run, newest.number + 1 if newest else 1)
                raise _taken(
                    run, newest.record if newest else None, "see which processes save there, and end all but one"
                )

    @classmethod
    def _follow(cls, run: Run, before: _Newest | None) -> Claim | None:
        """Create the next claim; None if another process was first."""
        number = before.number + 1 if before else 1
        record = ClaimRecord(
            process=this_process(),
            token=uuid.uuid4().hex,
            created=time.time(),
            left=_left_by(before.record)[-_MAX_LEFT:] if before and before.record else (),
        )
        try:
            run.storage.publish(_name(number), record.encode(), replace=False)
            file = run.storage.stat(_name(number))
        except (ObjectExistsError, MissingError):
            return None
        claims = _claims(run)
        if max(claims, default=0) != number or claims[number].version != file.version:
            # Numbers of superseded claims become free, and a slow process may get one of them.
            run.storage.delete([_name(number)])
            return None
        claim = cls(run, number, record, file.version)
        claim._remove_older(claims)
        return claim

    def check(self) -> None:
        """Raise `RunTakenError` if another process has taken the run; one listing."""
        with self._locked():
            self._check()

    def announce(self, directories: Collection[str]) -> None:
        """Record the checkpoints that are being saved, in place of those recorded before.

        If this process dies, a pruning can remove their files without waiting a day. Raises as `check`.
        """
        with self._locked():
            self._check()
            left = tuple(each for each in self._record.left if each not in directories)
            self._rewrite(replace(self._record, saving=tuple(directories), left=left))

    def abandon_saves(self) -> None:
        """List the announced saves as those of a dead writer, from the next `announce` on. Raises as `check`."""
        with self._locked():
            self._check()
            stored = _claims(self._run).get(self._number)
            record = None if stored is None else _read(self._run, stored)
            if record is not None and record.token == self._record.token:
                left = tuple(dict.fromkeys((*record.left, *record.saving)))
                self._record = replace(record, left=left[-_MAX_LEFT:], saving=())

    def release(self) -> None:
        """Release the run, also if another process has taken it already. An error of the storage is an event."""
        try:
            with self._locked():
                self._check()
                self._rewrite(replace(self._record, released=True, saving=()))
        except RunTakenError:
            return
        except MillraceError as error:
            emit(Event(name="checkpoint.claim.release.failed", subject=self._run.url, detail=str(error)))

    # --- inside -----------------------------------------------------------------------------------

    def _locked(self) -> threading.Lock:
        """The lock, but not in a forked child, where a thread of the parent may hold it without end."""
        if not self._owner.is_this_process:
            raise UsageError(
                f"the claim on {self._run.url} belongs to the process before the fork",
                next_step="take a claim in this one",
            )
        return self._lock

    def _check(self) -> None:
        claims = _claims(self._run)
        newest = max(claims, default=0)
        if newest == self._number and claims[newest].version == self._version:
            return
        record = _read(self._run, claims[newest]) if newest >= self._number else None
        if newest == self._number and record is not None and record.token == self._record.token:
            self._version = claims[newest].version  # copied or touched
            return
        if newest < self._number or (newest == self._number and record is None):
            raise RunTakenError(
                f"{self._run.url}/{_name(self._number)}, the claim of this process, was removed or replaced",
                next_step="check the directory of the run, and open the run again to save into it",
            )
        raise _taken(
            self._run, record, "stop saving in this process, or open the run again if the other one is the mistake"
        )

    def _rewrite(self, record: ClaimRecord) -> None:
        self._run.storage.publish(_name(self._number), record.encode(), replace=True)
        self._record = record
        with contextlib.suppress(MissingError):  # superseded and removed just now; the next check raises
            self._version = self._run.storage.stat(_name(self._number)).version

    def _remove_older(self, claims: Collection[int]) -> None:
        try:
            self._run.storage.delete([_name(number) for number in claims if number < self._number])
        except MillraceError as error:
            emit(Event(name="checkpoint.claim.clean.failed", subject=self._run.url, detail=str(error)))


def dead_saves(run: Run) -> frozenset[str]:
    """Directories of unfinished saves whose writers have certainly died, and that no process writes to now."""
    newest = _newest(run)
    if newest is None or newest.record is None:
        return frozenset()
    record = newest.record
    return frozenset(_left_by(record)) - (frozenset() if _is_dead(record) else frozenset(record.saving))


def _left_by(record: ClaimRecord) -> tuple[str, ...]:
    """Directories of unfinished saves at the time of the next claim after `record`."""
    return tuple(dict.fromkeys((*record.left, *record.saving))) if _is_dead(record) else record.left


def _is_dead(record: ClaimRecord) -> bool:
    return state_of(record.process) == "dead"


def _is_held_on_this_host(record: ClaimRecord | None) -> bool:
    return record is not None and not record.released and state_of(record.process) == "alive"


def _name(number: int) -> str:
    return f"{_PREFIX}{number:012d}.json"


def _claims(run: Run) -> dict[int, StoredFile]:
    matches = ((_NAME.fullmatch(file.name), file) for file in run.files(_PREFIX))
    return {int(match[1]): file for match, file in matches if match is not None}


def _newest(run: Run) -> _Newest | None:
    claims = _claims(run)
    if not claims:
        return None
    number = max(claims)
    return _Newest(number, claims[number], _read(run, claims[number]))


def _read(run: Run, file: StoredFile) -> ClaimRecord | None:
    """The current record of a claim; None if it was removed or is not valid."""
    for attempt in range(1, _READ_ATTEMPTS + 1):
        try:
            now = run.storage.stat(file.name)
            data = run.storage.read(now, 0, min(now.size, _MAX_CLAIM_BYTES))
        except MissingError:
            return None
        except (ChangedError, StorageError):
            if attempt == _READ_ATTEMPTS:
                raise
            continue
        # On a file system a part of another version may have been read.
        with contextlib.suppress(ValueError):
            return ClaimRecord.decode(data)
    return None


def _refuse_other_than_file(run: Run, number: int) -> None:
    """Raise `StorageError` if the name of claim `number`, which exists, is not that of a file."""
    if max(_claims(run), default=0) >= number:
        return
    try:
        run.storage.stat(_name(number))
    except MissingError as error:
        raise StorageError(
            f"{run.url}/{_name(number)} is not a file, so no process can claim the run",
            next_step="remove it, and save again",
        ) from error


def _plain(value: Any) -> Any:
    if type(value) not in (str, int):
        raise ValueError("a claim contains only text and numbers")
    return value


def _directories(found: Any) -> tuple[str, ...]:
    return tuple(each for each in found if isinstance(each, str) and parse_name(each) is not None)


def _taken(run: Run, record: ClaimRecord | None, next_step: str) -> RunTakenError:
    if record is not None and record.process == this_process():
        next_step = "use one manager for a run, and close it before another one is made"
    if record is None:
        return RunTakenError(f"another process has taken the run at {run.url}", next_step=next_step)
    which = "another manager in this process" if record.process == this_process() else "another process"
    since = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return RunTakenError(
        f"{which} saves into {run.url} (pid {record.process.pid} on {record.process.host}, since {since})",
        next_step=next_step,
    )
