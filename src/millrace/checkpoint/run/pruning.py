"""Removes the checkpoints of a run that its policy does not keep, and the leftovers of crashed saves and prunings. No torch.

`retention.py` and `prune_plan.py` choose the files to remove. This module removes them. Manifests go first, and a data file
only when no remaining manifest names it. So at any moment, and after any crash, a checkpoint that has its manifest is
complete. A note in the run's directory lists the files before they are deleted, so that the next pruning can finish the work
of a process that was killed.
"""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from millrace.checkpoint.format.manifest import MANIFEST_NAME
from millrace.checkpoint.run.claims import dead_saves
from millrace.checkpoint.run.prune_plan import NOTE_PREFIX, Note, PruneWork, is_note, note_of, plan_work
from millrace.checkpoint.run.retention import (
    KeepAll,
    KeepLast,
    Policy,
    as_policy,
    policy_warnings,
    refuse_what_matches_nothing,
)
from millrace.checkpoint.run.run_layout import ListedCheckpoint, Run, RunListing, parse_name, rank_of_part
from millrace.checkpoint.run.tiers import pending_uploads
from millrace.checkpoint.storage.base import StoredFile, has_file
from millrace.errors import ChangedError, DeniedError, DiskFullError, MillraceError, MissingError, UsageError
from millrace.events import Event, emit

_ATTEMPTS = 3
# More checkpoints than this are not locked one by one: the credentials do not allow deletions.
_MOST_DENIED = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What a pruning removed, or would remove (`dry_run`). Checkpoints are named, and sorted by step and revision.

    `freed_bytes` is the size of the `deleted_files`. `leftovers` are those of them, as paths in the run, that belonged to no
    checkpoint. `kept_for_others` lists, by directory, files of removed checkpoints that a kept one needs. `unreadable` are
    checkpoints whose manifest is damaged or of a newer version: they stay, and so do all files that they may need.
    """

    url: str
    dry_run: bool
    removed: tuple[str, ...]
    kept: tuple[str, ...]
    freed_bytes: int
    deleted_files: int
    leftovers: tuple[str, ...] = ()
    kept_for_others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()


def prune(
    run: Run,
    policy: Policy | int | str | None,
    *,
    dry_run: bool = False,
    protected: Collection[str] = (),
    progress: Callable[[int, int], None] | None = None,
    independent: bool = True,
    damaged: Collection[str] = (),
    strict: bool = False,
) -> PruneReport:
    """Remove the checkpoints that `policy` does not keep. The newest, the files of kept ones and other files always stay.

    `protected` are names of checkpoints that stay in any case. `independent` keeps one that shares no file with the
    newest, and `damaged` are names of checkpoints that do not count as such (see `plan_pruning`). `strict` raises
    `UsageError` where a part of the policy selects by a metric or step that no checkpoint of the run has. `progress` is
    called with the number of deleted files and the number of files to delete.

    Safe while others save and prune. A reader of a checkpoint that is removed gets an error that names the reason. If the
    process is killed, every checkpoint that has a manifest is complete, and the next pruning finishes the work. Raises
    errors of the storage, and `ChangedError` when others keep replacing the checkpoints to remove. `DeniedError` is raised
    after everything else was removed: a checkpoint whose manifest must not be deleted (a locked milestone) stays whole.
    """
    kept_by = as_policy(policy)
    removed: list[str] = []
    deleted: dict[str, int] = {}
    denied: dict[str, DeniedError] = {}
    leftovers: list[str] = []
    for _ in range(_ATTEMPTS):
        listing = run.look()
        described = run.describe_all(found for found in listing.checkpoints if found.complete)
        if strict:
            refuse_what_matches_nothing(run.url, kept_by, described.values())
        work = plan_work(
            listing,
            described,
            kept_by,
            now=time.time(),
            protected={*protected, *denied},
            notes={file.name: _read_note(run, file) for file in listing.files if is_note(file.name)},
            dead=_dead(run, listing),
            is_remote=run.is_remote,
            independent=independent,
            damaged=damaged,
        )
        finished = True
        if dry_run:
            deleted = {path: work.sizes[path] for path in work.paths}
            removed, leftovers = list(work.plan.remove), list(work.leftovers)
        else:
            before = dict(deleted)
            finished = _carry_out(run, listing, work, deleted, denied, progress)
            removed += [name for name in work.plan.remove if f"{name}/{MANIFEST_NAME}" in deleted]
            leftovers += [path for path in work.leftovers if path in deleted]
            _report(run, work, {path: size for path, size in deleted.items() if path not in before})
        if finished:
            for error in denied.values():
                raise error
            return PruneReport(
                url=run.url,
                dry_run=dry_run,
                removed=_in_order(removed),
                kept=_in_order(work.plan.keep),
                freed_bytes=sum(deleted.values()),
                deleted_files=len(deleted),
                leftovers=tuple(leftovers),
                kept_for_others=work.plan.files_kept_for_others,
                unreadable=work.unreadable,
            )
    raise ChangedError(
        f"checkpoints of {run.url} are replaced while they are pruned",
        next_step="end the other job that saves there, and prune again",
    )


@dataclass(kw_only=True)
class Retention:
    """The retention of one manager: its policy for the run, and `local_keep` for this node's disk. For the first rank.

    `damaged` are names of checkpoints that other parts of the manager found to be damaged.
    """

    run: Run
    policy: Policy
    local_keep: int
    independent: bool
    damaged: set[str]
    is_tidy: bool = False
    """Whether no failed save can have left files since the last pruning."""
    _warned: set[str] = field(default_factory=set)

    def prune(
        self,
        policy: Policy,
        *,
        dry_run: bool = False,
        strict: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> PruneReport:
        """Prune the run. As the function `prune`."""
        return prune(
            self.run,
            policy,
            dry_run=dry_run,
            independent=self.independent,
            damaged=self.damaged,
            strict=strict,
            progress=progress,
        )

    def prune_after_save(self) -> None:
        """Prune the run by the manager's policy. A failure is an event: the next save prunes again."""
        try:
            # A policy that keeps everything can only remove leftovers of dead saves, and one look for them is enough.
            if not isinstance(self.policy, KeepAll) or not (self.is_tidy or _is_tidy(self.run.look())):
                self.prune(self.policy)
            self.is_tidy = True
        except MillraceError as error:
            self._report_failure(self.run, error)

    def make_room(self, place: Run) -> int:
        """Prune the run or the copies on this node's disk because a disk is full. Never raises.

        Returns the number of removed files, also of a pruning that raised after it had removed them.
        """
        removed = 0

        def count(done: int, _: int) -> None:
            nonlocal removed
            removed = done

        try:
            if place is self.run:
                self.prune(self.policy, progress=count)
            else:
                waiting = {upload.name for upload in pending_uploads(place, self.run)}
                prune(place, KeepLast(self.local_keep), protected=waiting, independent=False, progress=count)
        except MillraceError as error:
            self._report_failure(place, error)
        return removed

    def warn_of_mistakes(self, step: int, metrics: Mapping[str, float], last_save: tuple[int, float] | None) -> None:
        """Warn, once of each, where the policy may keep nothing because of a metric or a step that does not match.

        `last_save` is the step of the manager's last save, and its time by the monotonic clock.
        """
        previous, at = last_save or (None, None)
        apart = None if at is None else time.monotonic() - at
        found = policy_warnings(self.policy, step, metrics, previous=previous, apart_seconds=apart)
        for problem in found.keys() - self._warned:
            self._warned.add(problem)
            text = f"{self.run.url}: {found[problem]}"
            emit(Event(name="run.policy.matches_nothing", subject=self.run.url, detail=text))
            warnings.warn(text, RuntimeWarning, stacklevel=6)

    def _report_failure(self, place: Run, error: MillraceError) -> None:
        text = str(error)
        if isinstance(error, UsageError):  # of the policy, which fails in the same way after every save
            if text in self._warned:
                return
            self._warned.add(text)
        emit(Event(name="run.prune.failed", subject=place.url, detail=text))


def _is_tidy(listing: RunListing) -> bool:
    """Whether no save left anything unfinished."""
    return not listing.empty and all(found.complete for found in listing.checkpoints)


def _dead(run: Run, listing: RunListing) -> Collection[str]:
    """The directories of unfinished saves whose writers have certainly died.

    Called after the listing, because a process announces a save before it writes. A save that was unfinished in the listing
    may have become complete just before its process ended, so its manifest is looked up again.
    """
    unfinished = {found.name for found in listing.checkpoints if not found.complete}
    dead = dead_saves(run)
    return [name for name in dead if name not in unfinished or not has_file(run.checkpoint(name), MANIFEST_NAME)]


def _carry_out(
    run: Run,
    listing: RunListing,
    work: PruneWork,
    deleted: dict[str, int],
    denied: dict[str, DeniedError],
    progress: Callable[[int, int], None] | None,
) -> bool:
    """Do the work, and add the deleted files to `deleted`, and directories with files that must not be deleted to `denied`.

    Returns False when a manifest was replaced meanwhile, or must not be deleted. Then the plan must be made again, and the
    data is still there.
    """
    total = len(deleted) + len(work.paths)

    def done(directory: str, names: Collection[str]) -> None:
        deleted.update((f"{directory}/{name}", work.sizes[f"{directory}/{name}"]) for name in names)
        if progress is not None:
            progress(len(deleted), total)

    note = _write_note(run, work)
    founds = {found.name: found for found in listing.checkpoints}
    for name in work.plan.remove:
        is_there = _is_as_listed(run, founds[name])
        if is_there is False:
            return False
        if is_there:
            try:
                # Without the manifest, a restore would join parts that a crash or a restore has left next to it.
                run.remove(name, [file.name for file in founds[name].files if rank_of_part(file.name) is not None])
                run.remove(name, [MANIFEST_NAME])
            except DeniedError as error:
                denied[name] = error
                if len(denied) > _MOST_DENIED:
                    raise
            else:
                done(name, [MANIFEST_NAME])
    if not denied.keys().isdisjoint(work.plan.remove):
        return False
    for directory, names in work.delete.items():
        try:
            run.remove(directory, names)
        except DeniedError as error:  # as any leftover, they are tried again when they are old
            denied[directory] = error
        else:
            done(directory, names)
    for directory in work.empty:
        run.remove(directory, [])
    run.storage.delete([*work.run_files, *note])
    return True


def _is_as_listed(run: Run, found: ListedCheckpoint) -> bool | None:
    """Whether a checkpoint's manifest is the one that was listed; None when it is gone."""
    try:
        manifest = run.checkpoint(found.name).stat(MANIFEST_NAME)
    except MissingError:
        return None
    return found.manifest is not None and manifest.version == found.manifest.version


# --- notes ----------------------------------------------------------------------------------------


def _write_note(run: Run, work: PruneWork) -> list[str]:
    """List the files to delete in a note; returns the names of the notes written."""
    note = note_of(work)
    if note == Note():
        return []
    name = f"{NOTE_PREFIX}{uuid.uuid4().hex}.json"
    try:
        run.storage.publish(name, note.encode(), replace=False)
    except DiskFullError as error:
        # The pruning is needed to free space. If it is killed now, the data files are removed a day later.
        emit(Event(name="checkpoint.prune.note.failed", subject=run.url, detail=str(error)))
        return []
    return [name]


def _read_note(run: Run, file: StoredFile) -> Note:
    """A note; an empty one if it was removed meanwhile or cannot be read."""
    try:
        return Note.decode(bytes(memoryview(run.storage.read(file, 0, file.size))))
    except (MissingError, ChangedError):
        return Note()
    except ValueError:
        emit(Event(name="checkpoint.prune.note.unreadable", subject=f"{run.url}/{file.name}"))
        return Note()


def _report(run: Run, work: PruneWork, deleted: Mapping[str, int]) -> None:
    for name in work.unreadable:
        emit(Event(name="checkpoint.prune.unreadable", subject=run.url_of(name)))
    if deleted:
        detail = ", ".join(name for name in work.plan.remove if f"{name}/{MANIFEST_NAME}" in deleted) or "leftovers"
        emit(Event(name="checkpoint.pruned", subject=run.url, nbytes=sum(deleted.values()), detail=detail))


def _in_order(names: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: parse_name(name) or (0, 0)))
