"""Who saves into a run: small numbered files in its directory, of which the highest counts.

A claim is taken by making `writer-<number + 1>.json`, which succeeds for one process only: by a conditional PUT on an
object store, by a hard link on a file system. Whoever had the one before finds out at its next `check`. No clock matters.
On a network file system that caches directories (NFS: for up to a minute) both the look at who is there and `check` may be
late by as much. No torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self

from typing_extensions import Buffer

from millrace.checkpoint.places.storage import StoredFile
from millrace.checkpoint.run.processes import Process, state_of, this_process
from millrace.checkpoint.run.run_layout import Run, parse_name
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

_PREFIX = "writer-"
_NAME = re.compile(r"writer-(\d{12})\.json", re.ASCII)
_MAX_CLAIM_BYTES = 1 << 20
_POLL_SECONDS = 0.5
# Tries to read a claim that its owner rewrites at that moment.
_READ_ATTEMPTS = 5
# Claims of others that are seen to come and go, one after the other, before this is given up.
_MAX_TURNS = 100
# Saves of dead writers that are remembered; older ones are found by their age.
_MAX_LEFT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRecord:
    """What a claim says: who has it, since when (for people), and what it is saving.

    `left` are directories in which earlier writers, dead beyond doubt, did not finish a save.
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
        """Raises `ValueError` for what is no claim."""
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
            raise ValueError("this is no claim") from error


class _Newest(NamedTuple):
    """The highest claim of a run: its number and file, and what it says (None: it cannot be read)."""

    number: int
    file: StoredFile
    record: ClaimRecord | None


class Claim:
    """The right to save into a run, until somebody else takes it. Thread-safe; of one process, not of its forks."""

    def __init__(self, run: Run, number: int, record: ClaimRecord, version: str) -> None:
        self._run, self._number = run, number
        self._record, self._version = record, version
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Claim({self._run.url!r}, number={self._number})"

    @property
    def number(self) -> int:
        """One more than that of the claim before."""
        return self._number

    @classmethod
    def take(cls, run: Run, *, wait_seconds: float = 10.0) -> Claim:
        """Become the one that saves into `run`.

        The run is taken over at once from a process that is dead, from this one, and from one of which nothing is known
        here (of another host). One that runs on this host is waited for, and then it is a `RunTakenError`. Of several that
        try at the same time one wins.
        """
        deadline = time.monotonic() + wait_seconds
        run.storage.prepare()
        turns = 0
        while True:
            newest = _newest(run)
            if newest is not None and _is_held_beside_us(newest.record):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise _taken(run, newest.record, "end that process, or save into another directory")
                time.sleep(min(_POLL_SECONDS, remaining))
                continue
            claim = cls._follow(run, newest)
            if claim is not None:
                return claim
            turns += 1
            if turns == _MAX_TURNS:
                raise _taken(
                    run, newest.record if newest else None, "see which processes save there, and end all but one"
                )

    @classmethod
    def _follow(cls, run: Run, before: _Newest | None) -> Claim | None:
        """Make the next claim; None when another process was first."""
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
            # Numbers of superseded claims become free, and whoever was slow may get one of these.
            run.storage.delete([_name(number)])
            return None
        claim = cls(run, number, record, file.version)
        claim._remove_older(claims)
        return claim

    def check(self) -> None:
        """Raise `RunTakenError` when another claim was made since; one listing."""
        with self._lock:
            self._check()

    def announce(self, directories: Collection[str]) -> None:
        """Say which checkpoints are being saved, instead of what was said before.

        Should this process die, a pruning need not wait a day to remove what it leaves in them. Raises as `check`.
        """
        with self._lock:
            self._check()
            left = tuple(each for each in self._record.left if each not in directories)
            self._rewrite(replace(self._record, saving=tuple(directories), left=left))

    def release(self) -> None:
        """Let the next one take the run at once. No error when it was taken already; a storage that fails is an event."""
        try:
            with self._lock:
                self._check()
                self._rewrite(replace(self._record, released=True, saving=()))
        except RunTakenError:
            return
        except MillraceError as error:
            emit(Event(name="checkpoint.claim.release.failed", subject=self._run.url, detail=str(error)))

    # --- inside -----------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise UsageError(
                f"the claim on {self._run.url} is of the process before the fork", next_step="take another in this one"
            )
        claims = _claims(self._run)
        newest = max(claims, default=0)
        if newest == self._number:
            if claims[newest].version == self._version:
                return
            record = _read(self._run, claims[newest])
            if record is not None and record.token == self._record.token:
                self._version = claims[newest].version  # copied or touched
                return
        other = _read(self._run, claims[newest]) if newest > self._number else None
        raise _taken(
            self._run, other, "stop saving in this process, or open the run anew if the other one is the mistake"
        )

    def _rewrite(self, record: ClaimRecord) -> None:
        self._run.storage.publish(_name(self._number), record.encode(), replace=True)
        self._record = record
        with contextlib.suppress(MissingError):  # superseded and removed this moment; the next check tells
            self._version = self._run.storage.stat(_name(self._number)).version

    def _remove_older(self, claims: Collection[int]) -> None:
        try:
            self._run.storage.delete([_name(number) for number in claims if number < self._number])
        except MillraceError as error:
            emit(Event(name="checkpoint.claim.clean.failed", subject=self._run.url, detail=str(error)))


def dead_saves(run: Run) -> frozenset[str]:
    """Directories in which a writer that is dead beyond doubt was saving when it died, and nobody saves since."""
    newest = _newest(run)
    if newest is None or newest.record is None:
        return frozenset()
    record = newest.record
    return frozenset(_left_by(record)) - (frozenset() if _is_dead(record) else frozenset(record.saving))


def _left_by(record: ClaimRecord) -> tuple[str, ...]:
    """What is known to lie about unfinished, should `record` be the last claim."""
    return tuple(dict.fromkeys((*record.left, *record.saving))) if _is_dead(record) else record.left


def _is_dead(record: ClaimRecord) -> bool:
    return state_of(record.process) == "dead"


def _is_held_beside_us(record: ClaimRecord | None) -> bool:
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
    """What a claim says now; None when it was removed, or is no claim."""
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
        # On a file system another version of it may have been read, cut off.
        with contextlib.suppress(ValueError):
            return ClaimRecord.decode(data)
    return None


def _plain(value: Any) -> Any:
    if type(value) not in (str, int):
        raise ValueError("a claim has text and numbers only")
    return value


def _directories(found: Any) -> tuple[str, ...]:
    return tuple(each for each in found if isinstance(each, str) and parse_name(each) is not None)


def _taken(run: Run, record: ClaimRecord | None, next_step: str) -> RunTakenError:
    if record is None:
        return RunTakenError(f"another process has taken the run at {run.url}", next_step=next_step)
    since = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return RunTakenError(
        f"another process saves into {run.url} (pid {record.process.pid} on {record.process.host}, since {since})",
        next_step=next_step,
    )
