"""Removes checkpoints of a run that no policy keeps, and what crashed saves and prunings left. What goes is decided in
`retention.py` and `prune_plan.py`; this carries it out. No torch.

The manifests go first, and data files only when no manifest is left that names them: at any moment, and after any crash,
a checkpoint that has its manifest is whole. What is about to be deleted is noted in the run's directory before, so that
the next pruning finishes the work of one that was killed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from millrace.checkpoint.format.manifest import MANIFEST_NAME
from millrace.checkpoint.places.storage import StoredFile
from millrace.checkpoint.run.claims import dead_saves
from millrace.checkpoint.run.prune_plan import NOTE_PREFIX, Note, PruneWork, is_note, note_of, plan_work
from millrace.checkpoint.run.retention import Policy, as_policy
from millrace.checkpoint.run.run_layout import Found, Run, RunListing, parse_name
from millrace.errors import ChangedError, DiskFullError, MissingError
from millrace.events import Event, emit

_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What a pruning did, or would do (`dry_run`). Names are those of checkpoints, by step and revision.

    `freed_bytes` is the size of the `deleted_files`; `leftovers` are those of them, as paths in the run, that were of no
    checkpoint. `kept_for_others` has, by directory, files of removed checkpoints that a kept one needs. `unreadable`
    are checkpoints whose manifest is damaged or of a newer version: they are left alone, and so is what they may need.
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
) -> PruneReport:
    """Remove what `policy` does not keep. Never the newest checkpoint or what a kept one needs, nor foreign files.

    `protected` are names of checkpoints that stay in any case. `progress` is called with the number of files that are
    deleted and of those that are to be. Safe beside savers and other prunings; a reader of a checkpoint that goes gets an
    error that says so. Killed at any moment, it leaves every checkpoint that has a manifest whole, and the next one
    finishes. Raises what the storage raises, and `ChangedError` when others keep replacing what is to go.
    """
    kept_by = as_policy(policy)
    removed: list[str] = []
    deleted: dict[str, int] = {}
    leftovers: list[str] = []
    for _ in range(_ATTEMPTS):
        listing = run.look()
        work = _decide(run, listing, kept_by, protected)
        finished = True
        if dry_run:
            deleted = {path: work.sizes[path] for path in work.paths}
            removed, leftovers = list(work.plan.remove), list(work.leftovers)
        else:
            before = len(deleted)
            finished = _carry_out(run, listing, work, deleted, progress)
            removed += [name for name in work.plan.remove if f"{name}/{MANIFEST_NAME}" in deleted]
            leftovers += [path for path in work.leftovers if path in deleted]
            _tell(run, work, len(deleted) - before)
        if finished:
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
        f"checkpoints of {run.url} are replaced while they are pruned", next_step="see who saves there, and prune again"
    )


def _decide(run: Run, listing: RunListing, policy: Policy, protected: Collection[str]) -> PruneWork:
    return plan_work(
        listing,
        run.describe_all(found for found in listing.checkpoints if found.complete),
        policy,
        now=time.time(),
        protected=protected,
        notes={file.name: _read_note(run, file) for file in listing.files if is_note(file.name)},
        # After the listing: who begins to save in such a directory says so first, and its files are not listed yet.
        dead=dead_saves(run),
        is_remote=run.is_remote,
    )


def _carry_out(
    run: Run,
    listing: RunListing,
    work: PruneWork,
    deleted: dict[str, int],
    progress: Callable[[int, int], None] | None,
) -> bool:
    """Do the work, adding what was deleted to `deleted`. False when a manifest is another one by now: then it must be
    decided again, and the data is still there.
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
            run.remove(name, [MANIFEST_NAME])
            done(name, [MANIFEST_NAME])
    for directory, names in work.delete.items():
        run.remove(directory, names)
        done(directory, names)
    for directory in work.empty:
        run.remove(directory, [])
    run.storage.delete([*work.run_files, *note])
    return True


def _is_as_listed(run: Run, found: Found) -> bool | None:
    """Whether a checkpoint's manifest is the one that was listed; None when it is gone."""
    try:
        manifest = run.checkpoint(found.name).stat(MANIFEST_NAME)
    except MissingError:
        return None
    return found.manifest is not None and manifest.version == found.manifest.version


# --- notes ----------------------------------------------------------------------------------------


def _write_note(run: Run, work: PruneWork) -> list[str]:
    """Note what is about to go; gives the names of the notes written."""
    note = note_of(work)
    if note == Note():
        return []
    name = f"{NOTE_PREFIX}{uuid.uuid4().hex}.json"
    try:
        run.storage.publish(name, note.encode(), replace=False)
    except DiskFullError as error:
        # Making room is what this is for. Killed now, the data files would go in a day.
        emit(Event(name="checkpoint.prune.note.failed", subject=run.url, detail=str(error)))
        return []
    return [name]


def _read_note(run: Run, file: StoredFile) -> Note:
    """A note. One that was removed meanwhile, or says nothing, is empty."""
    try:
        return Note.decode(bytes(memoryview(run.storage.read(file, 0, file.size))))
    except (MissingError, ChangedError):
        return Note()
    except ValueError as error:
        emit(Event(name="checkpoint.prune.note.unreadable", subject=f"{run.url}/{file.name}", detail=str(error)))
        return Note()


def _tell(run: Run, work: PruneWork, files: int) -> None:
    for name in work.unreadable:
        emit(Event(name="checkpoint.prune.unreadable", subject=run.url_of(name), detail="left alone"))
    if files:
        detail = ", ".join(work.plan.remove) or "leftovers"
        emit(Event(name="checkpoint.pruned", subject=run.url, nbytes=work.freed_bytes, detail=detail))


def _in_order(names: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: parse_name(name) or (0, 0)))
