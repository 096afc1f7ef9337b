"""The parts of a save by several ranks, which meet in the storage and not in collective calls.

Each rank writes its data files and then its part, `part-RANK-SAVE.millrace`: a manifest of its own items. The first rank
waits for all parts, joins them, and publishes the manifest. The others wait for the manifest. A rank that fails publishes
`failed-RANK-SAVE.json`. The first rank fails then, too, and the others fail when the first one has. All files are in the
directory of the checkpoint, which a pruning removes if the save fails. `SAVE` is the id of the save: a rank of a job that
has lost the run cannot replace files of the job that took it. No torch.
"""

from __future__ import annotations

import builtins
import json
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from millrace import errors
from millrace.checkpoint.format.manifest import MANIFEST_NAME, Manifest, encode_manifest
from millrace.checkpoint.run.run_layout import part_name
from millrace.checkpoint.run.save_values import Member
from millrace.checkpoint.storage.base import CheckpointStorage, StoredFile
from millrace.checkpoint.storage.layered import missing_files
from millrace.checkpoint.storage.manifests import StoredManifest, load_manifest
from millrace.checkpoint.storage.replicating import publish_checked, publish_manifest
from millrace.checkpoint.writing.assembly import join_manifests
from millrace.checkpoint.writing.packing import discard
from millrace.errors import (
    BaseGoneError,
    MillraceError,
    MissingError,
    ObjectExistsError,
    OutcomeUnknownError,
    RetryableError,
    UsageError,
)
from millrace.events import Event, emit

DEFAULT_LIMIT_SECONDS = 1800.0
"""The time for which a rank waits for the others if the manager has no `timeout`."""
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.02, 1.0
_MAX_NOTICE_BYTES, _MAX_TEXT = 64 << 10, 2000


class SaveFailedElsewhere(Exception):  # noqa: N818 - a wrapper: its cause is raised to the user
    """This save has ended with the error `error` of another rank, so that this rank's files can be removed."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _notice_name(rank: int, save_id: str) -> str:
    return f"failed-{rank}-{save_id}.json"


class PartRecord(NamedTuple):
    """The record `part` in the user metadata of a part: its rank, the number of ranks, how many chunks it stores whole, as
    deltas and as references, and damaged checkpoints, for which it was written in full.
    """

    rank: int
    world: int
    chunks: tuple[int, int, int]
    damaged: tuple[str, ...]

    @classmethod
    def of(cls, part: Manifest) -> PartRecord | None:
        """None for a manifest that is not a part."""
        try:
            rank, world, chunks, damaged = part.user["part"]
            full, delta, referenced = map(int, chunks)
            return cls(int(rank), int(world), (full, delta, referenced), tuple(map(str, damaged)))
        except (KeyError, TypeError, ValueError):
            return None


def join_parts(parts: Collection[Manifest]) -> Manifest | None:
    """The manifest of a checkpoint from its parts in any order; None if one is missing. Raises as `join_manifests`."""
    records = {record.rank: (record, part) for part in parts if (record := PartRecord.of(part)) is not None}
    count = next(iter(records.values()))[0].world if records else 0
    if not count or records.keys() != set(range(count)):
        return None
    ordered = [records[rank] for rank in range(count)]
    user = {name: value for name, value in ordered[0][1].user.items() if name != "part"}
    if isinstance(user.get("run"), dict):
        sums = [sum(numbers) for numbers in zip(*(record.chunks for record, _ in ordered), strict=True)]
        user["run"] = {**user["run"], "chunks": sums}
    return join_manifests([part for _, part in ordered], user)


def stored(manifest: Manifest) -> StoredManifest:
    """A joined manifest, which is not in a storage yet."""
    data = encode_manifest(manifest)
    return StoredManifest(StoredFile(MANIFEST_NAME, len(data), "", manifest.created), data, manifest)


def complete(
    storage: CheckpointStorage,
    member: Member,
    save_id: str,
    limit: float,
    *,
    check: Callable[[], None],
    before: Callable[[], None],
    note: Callable[[Sequence[PartRecord]], None],
) -> StoredManifest:
    """Wait until the save `save_id` is complete, and return its manifest. This rank's part is in `storage` already.

    When all parts have arrived, the first rank calls `note` with their records, then `before`, and `check` just before it
    publishes the manifest. Raises `SaveFailedElsewhere` when another rank has failed, on the other ranks when the first one
    has. After `limit` seconds raises `RetryableError` on the first rank, and after twice that time `OutcomeUnknownError` on
    the others, also when the storage does not respond to them. Raises errors of the storage.
    """
    if not member.is_first:
        # The first rank may write its part last. Then it waits for the others.
        return _wait_for_manifest(storage, save_id, 2 * limit)
    parts = _wait_for_parts(storage, member, save_id, limit)
    manifest = join_parts(parts)
    if manifest is None:
        raise AssertionError("all parts have arrived")
    whole = stored(manifest)
    note([record for part in parts if (record := PartRecord.of(part)) is not None])
    before()
    require_files(storage, manifest)
    publish_checked(storage, manifest, lambda: publish_manifest(storage, whole), check)
    discard(storage, [part_name(rank, save_id) for rank in range(member.count)])
    return whole


def require_files(storage: CheckpointStorage, manifest: Manifest) -> None:
    """Raise `BaseGoneError` if a data file of a joined manifest is missing: an earlier save may have failed since."""
    missing = missing_files(storage, manifest.files)
    if missing:
        raise BaseGoneError(
            f"{storage.url}: the data file {missing[0].name} is missing",
            next_step="save again; the next save is a full one",
        )


def _wait_for_parts(storage: CheckpointStorage, member: Member, save_id: str, limit: float) -> list[Manifest]:
    parts: dict[int, Manifest] = {}

    def look(files: dict[str, StoredFile]) -> bool:
        for rank in set(range(member.count)) - parts.keys():
            file = files.get(part_name(rank, save_id))
            part = None if file is None else part_of(storage, file, save_id, (rank, member.count))
            if part is not None:
                parts[rank] = part
        if len(parts) == member.count:
            return True
        for rank in range(1, member.count):
            error = _failure(storage, files.get(_notice_name(rank, save_id)), save_id)
            if error is not None:
                raise SaveFailedElsewhere(error)
        return False

    if not _poll(storage, look, limit):
        missing = ", ".join(str(rank) for rank in range(member.count) if rank not in parts)
        raise RetryableError(
            f"{storage.url}: the parts of these ranks did not arrive within {limit:.0f} s: {missing}",
            next_step="see the logs of those ranks; with a longer timeout= slower ranks are waited for",
        )
    return [parts[rank] for rank in range(member.count)]


def _wait_for_manifest(storage: CheckpointStorage, save_id: str, limit: float) -> StoredManifest:
    found: list[StoredManifest] = []

    def look(files: dict[str, StoredFile]) -> bool:
        if MANIFEST_NAME in files:
            found.append(StoredManifest.read(storage))
            return True
        error = _failure(storage, files.get(_notice_name(0, save_id)), save_id)
        if error is not None:
            raise SaveFailedElsewhere(error)
        return False

    try:
        is_over = _poll(storage, look, limit)
    except RetryableError as error:
        raise OutcomeUnknownError(
            f"{storage.url}: unknown whether rank 0 published the manifest ({error.message})",
            next_step="see the steps of the run when the storage responds again, and save again",
        ) from error
    if not is_over:
        raise OutcomeUnknownError(
            f"{storage.url}: rank 0 did not publish the manifest within {limit:.0f} s",
            next_step="see the log of rank 0; with a longer timeout= slower ranks are waited for",
        )
    if found[0].manifest.save_id != save_id:
        raise ObjectExistsError(
            f"{storage.url}: contains another save",
            next_step="let one job save into a run, and give others another URL",
        )
    return found[0]


def _poll(storage: CheckpointStorage, look: Callable[[dict[str, StoredFile]], bool], limit: float) -> bool:
    """Look at the files in the directory again and again. Returns False after `limit` seconds."""
    deadline, pause = time.monotonic() + limit, _FIRST_PAUSE_SECONDS
    while not look({file.name: file for file in storage.files()}):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(1.5 * pause, _MAX_PAUSE_SECONDS)
    return True


def part_of(storage: CheckpointStorage, file: StoredFile, save_id: str, position: tuple[int, int]) -> Manifest | None:
    """A part of this save; None for one of another save."""
    try:
        part = load_manifest(storage, file).manifest
    except MissingError:
        return None
    record = PartRecord.of(part)
    return None if part.save_id != save_id or record is None or record[:2] != position else part


# --- failures -------------------------------------------------------------------------------------


def publish_failure(storage: CheckpointStorage, rank: int, save_id: str, error: BaseException) -> None:
    """Notify the other ranks that this one has failed. An error of the storage is an event: they wait for the time limit."""
    if _is_complete(storage):
        return
    message, next_step = (error.message, error.next_step) if isinstance(error, MillraceError) else (str(error), "")
    notice = {
        "save": save_id,
        "type": type(error).__name__,
        "message": message[:_MAX_TEXT],
        "next_step": next_step[:_MAX_TEXT],
    }
    try:
        storage.prepare()
        storage.publish(_notice_name(rank, save_id), json.dumps(notice).encode("ascii"), replace=True)
    except MillraceError as failure:
        emit(Event(name="run.notice.failed", subject=storage.url, detail=str(failure)))


def _is_complete(storage: CheckpointStorage) -> bool:
    try:
        return MANIFEST_NAME in storage.names()
    except MillraceError:
        return False


def _failure(storage: CheckpointStorage, file: StoredFile | None, save_id: str) -> Exception | None:
    """The error in a notice of this save; None without one."""
    if file is None:
        return None
    try:
        notice = json.loads(bytes(memoryview(storage.read(file, 0, min(file.size, _MAX_NOTICE_BYTES)))))
        if notice["save"] != save_id:
            return None
        name, message, next_step = str(notice["type"]), str(notice["message"]), str(notice["next_step"])
    except (MissingError, ValueError, KeyError, TypeError):
        return None
    found = getattr(errors, name, None)
    if isinstance(found, type) and issubclass(found, MillraceError):
        return found(message, next_step=next_step)
    found = getattr(builtins, name, None)
    if (
        isinstance(found, type)
        and issubclass(found, Exception)
        and not issubclass(found, UnicodeError | BaseExceptionGroup)
    ):
        return found(message)
    return UsageError(f"a rank failed ({name}: {message:.300})", next_step="see its log")
