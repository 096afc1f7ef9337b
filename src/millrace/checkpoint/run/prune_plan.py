"""The plan of one pruning: which checkpoints and files go, including the leftovers of crashed saves and prunings. Pure."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from millrace.checkpoint.format.manifest import MANIFEST_NAME
from millrace.checkpoint.run.retention import Policy, kept_names
from millrace.checkpoint.run.run_info import CheckpointInfo, paths_of
from millrace.checkpoint.run.run_layout import RunListing, parse_name
from millrace.checkpoint.run.timeline import newest_first, timeline
from millrace.checkpoint.storage.manifests import (
    ORPHAN_SECONDS,
    find_orphans,
    is_left_behind,
    old_before,
    rank_of_manifest,
)
from millrace.errors import MillraceError

IN_FLIGHT_SECONDS = 300.0
"""How long an object store may take to complete the requests of a process that died."""
NOTE_PREFIX = "pruning-"
"""Prefix of the files in which a pruning lists the files that it is about to delete."""

_NOTE = re.compile(rf"{NOTE_PREFIX}[0-9a-f]{{32}}\.json", re.ASCII)
# Temporary files of a process that was killed while it published a small file of the run.
_TORN = re.compile(rf"\.(?:writer-\d{{12}}|{NOTE_PREFIX}[0-9a-f]{{32}})\.json\.[0-9a-f]{{8}}\.tmp", re.ASCII)


# --- which checkpoints --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """Which checkpoints a pruning keeps and removes. `remove` is in the order in which the manifests go: abandoned ones
    first, then the newest first.

    `files_of_removed_to_delete` lists, by directory, the data files that only removed checkpoints name (never a manifest).
    `files_kept_for_others` lists those that stay, in directories without a manifest, for kept checkpoints that name them.
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
    independent: bool = True,
    damaged: Collection[str] = (),
) -> PrunePlan:
    """Decide which checkpoints go. `checkpoints` are all whose manifest can be read; incomplete ones are skipped.

    Kept in addition to those of the policy: the names in `protected`; the newest checkpoint and the one published last,
    each with the full save that its next delta may be made against; with `independent` the newest that shares no file
    with the newest one, so that damage to a single file cannot make all unreadable; and each one that names a path
    (`step-.../data-...`) in `spared`, which an unreadable checkpoint may need. Checkpoints whose names are in `damaged`
    are known to be unreadable: neither they nor those that share their files count as independent.
    """
    complete = sorted((info for info in checkpoints if info.complete), key=lambda info: (info.step, info.revision))
    chosen = kept_names(policy, complete, now=now) | bases_of_the_next_save(complete) | frozenset(protected)
    spared = frozenset(spared)
    paths = {info.name: paths_of(info) for info in complete}
    keep = frozenset(info.name for info in complete if info.name in chosen or paths[info.name] & spared)
    if independent:
        keep = _with_independent(complete, paths, keep, frozenset(damaged))
    # Abandoned ones go first: then a pruning that was killed leaves the same timeline, and the next makes the same plan.
    live = {info.name for info in timeline(complete)}
    removed = sorted((info for info in reversed(complete) if info.name not in keep), key=lambda info: info.name in live)
    needed = spared.union(*(paths[name] for name in keep))
    named: frozenset[str] = frozenset().union(*(paths[info.name] for info in removed))
    data = {path for path in named if not path.endswith(f"/{MANIFEST_NAME}") and parse_name(path.partition("/")[0])}
    return PrunePlan(
        keep=keep,
        remove=tuple(info.name for info in removed),
        files_of_removed_to_delete=by_directory(data - needed),
        files_kept_for_others=by_directory({path for path in data & needed if path.partition("/")[0] not in keep}),
    )


def bases_of_the_next_save(complete: Sequence[CheckpointInfo]) -> frozenset[str]:
    """The newest checkpoint, from which a run continues, and the possible bases of a save in flight."""
    if not complete:
        return frozenset()
    newest = [timeline(complete)[-1], max(complete, key=lambda info: (info.published, info.step, info.revision))]
    return frozenset(name for info in newest for name in (info.name, info.full) if name is not None)


def _with_independent(
    complete: Sequence[CheckpointInfo],
    paths: Mapping[str, frozenset[str]],
    keep: frozenset[str],
    damaged: frozenset[str],
) -> frozenset[str]:
    """`keep`, the newest intact checkpoint, and the newest one of those that share no file with it."""
    remaining = [info for info in complete if info.name not in damaged]
    while True:
        order = newest_first(remaining)
        apart = (info for info in order[1:] if not paths[info.name] & paths[order[0].name])
        found = keep.union(info.name for info in [*order[:1], *itertools.islice(apart, 1)])
        # Without those that go the timeline may be different. A second pruning must make the same decision as this one.
        kept = [info for info in remaining if info.name in found]
        if len(kept) == len(remaining):
            return found
        remaining = kept


def by_directory(paths: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Paths in the run's directory as sorted names by directory."""
    found: dict[str, list[str]] = {}
    for directory, _, file in (path.partition("/") for path in sorted(paths)):
        found.setdefault(directory, []).append(file)
    return {directory: tuple(files) for directory, files in found.items()}


# --- which files ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneWork:
    """The steps of a pruning, in this order: remove the manifests of `plan.remove`, then `delete` (names by directory), then
    `run_files` (finished notes, temporary files). Empty directories (`empty`) are removed as well.

    `leftovers` are those paths of `delete` that belong to no checkpoint.
    `unreadable` are checkpoints whose manifest cannot be read. They stay, with all files that they may need.
    """

    plan: PrunePlan
    delete: Mapping[str, tuple[str, ...]]
    leftovers: tuple[str, ...]
    empty: tuple[str, ...]
    run_files: tuple[str, ...]
    unreadable: tuple[str, ...]
    sizes: Mapping[str, int]

    @property
    def paths(self) -> tuple[str, ...]:
        """Every file to remove, except the run's own files; manifests first."""
        manifests = [f"{name}/{MANIFEST_NAME}" for name in self.plan.remove]
        return (*manifests, *(f"{directory}/{name}" for directory, names in self.delete.items() for name in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The plan of a pruning on disk: the data files that only removed checkpoints need, as paths in the run, and all
    directories from which files are removed.
    """

    paths: frozenset[str] = frozenset()
    directories: frozenset[str] = frozenset()

    def encode(self) -> bytes:
        content = {"delete": sorted(self.paths), "directories": sorted(self.directories)}
        return json.dumps(content, separators=(",", ":")).encode("ascii")

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Skips names that no pruning writes. Raises `ValueError` for other data than a note."""
        try:
            content = json.loads(data)
            split = [str(path).partition("/") for path in content["delete"]]
            directories = [str(directory) for directory in content["directories"]]
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError("not a note of a pruning") from error
        return cls(
            paths=frozenset("".join(each) for each in split if parse_name(each[0]) and is_left_behind(each[2])),
            directories=frozenset(each for each in directories if parse_name(each)),
        )


def note_of(work: PruneWork) -> Note:
    """The note to finish `work` with; an empty one if no checkpoint is removed."""
    if not work.plan.remove:
        return Note()
    data = {f"{directory}/{name}" for directory, names in work.delete.items() for name in names}
    directories = frozenset(work.plan.remove) | work.delete.keys()
    return Note(paths=frozenset(data - set(work.leftovers)), directories=directories)


def is_note(name: str) -> bool:
    """Whether a file of the run is the note of a pruning."""
    return _NOTE.fullmatch(name) is not None


def plan_work(
    listing: RunListing,
    described: Mapping[str, CheckpointInfo | MillraceError],
    policy: Policy,
    *,
    now: float,
    protected: Collection[str] = (),
    notes: Mapping[str, Note] | None = None,
    dead: Collection[str] = (),
    is_remote: bool = False,
    independent: bool = True,
    damaged: Collection[str] = (),
) -> PruneWork:
    """Plan a pruning from one listing of a run.

    `described` maps names to descriptions of the manifests, or to the errors of reading them. A complete checkpoint that is
    not in it changed since the listing, and stays. `notes` are those of earlier prunings, by file name. `dead` are the
    directories of saves whose writers have certainly died. `independent` and `damaged` as in `plan_pruning`.

    A file that no manifest names is removed at once if a note names it or its writer is dead (in an object store: if its
    directory did not change for five minutes). Otherwise it is removed when it is a day older than the newest manifest, by
    the storage's clock, and than `now`, by this machine's: a manifest from a clock that was ahead, or that was copied with
    such a time, must not make the files of a save in flight look old.
    """
    notes = notes or {}
    noted = frozenset[str]().union(*(note.paths for note in notes.values()))
    infos = {name: info for name, info in described.items() if isinstance(info, CheckpointInfo)}
    unreadable = tuple(name for name, info in described.items() if not isinstance(info, CheckpointInfo))
    sizes = {f"{found.name}/{file.name}": file.size for found in listing.checkpoints for file in found.files}
    spared = _spared(listing, infos, unreadable)
    plan = plan_pruning(
        list(infos.values()),
        policy,
        now=now,
        protected=protected,
        spared=spared,
        independent=independent,
        damaged=damaged,
    )
    owned = spared.union(*(paths_of(info) for info in infos.values()))
    before = _old_before(listing, now)
    leftovers = set(_leftovers(listing, owned, noted, frozenset(dead), is_remote, before))
    of_removed = {f"{place}/{name}" for place, names in plan.files_of_removed_to_delete.items() for name in names}
    going = (of_removed & sizes.keys()) | leftovers
    # Files that kept checkpoints name stay, also if an earlier pruning with another policy noted them.
    kept = frozenset[str]().union(*(paths_of(infos[name]) for name in plan.keep))
    finished = {name for name, note in notes.items() if not (note.paths & sizes.keys()) - going - kept}
    return PruneWork(
        plan=plan,
        delete=by_directory(going),
        leftovers=tuple(sorted(leftovers)),
        empty=tuple(_empty(listing, notes, dead, before)),
        run_files=tuple(_run_files(listing, finished, before)),
        unreadable=unreadable,
        sizes=sizes,
    )


def _old_before(listing: RunListing, now: float) -> float:
    """Files from before this time that belong to no checkpoint are old. Without a manifest none are."""
    published = max((found.manifest.modified for found in listing.checkpoints if found.manifest), default=-math.inf)
    return old_before(published, now)


def _spared(listing: RunListing, infos: Mapping[str, CheckpointInfo], unreadable: Collection[str]) -> frozenset[str]:
    """Files that a checkpoint with an unknown manifest may need. A manifest names only files that are older than it."""
    founds = {found.name: found for found in listing.checkpoints}
    manifests = [founds[name].manifest for name in unreadable]
    # One day of tolerance for clocks that jump, and for object stores that date an upload by its start or its end.
    until = max((manifest.modified + ORPHAN_SECONDS for manifest in manifests if manifest), default=None)
    return frozenset(
        f"{found.name}/{file.name}"
        for found in listing.checkpoints
        for file in found.files
        if (found.complete and found.name not in infos)
        or any(rank_of_manifest(each.name) is not None for each in found.files)
        or (until is not None and file.modified <= until and is_left_behind(file.name))
    )


def _leftovers(
    listing: RunListing,
    owned: frozenset[str],
    noted: frozenset[str],
    dead: frozenset[str],
    is_remote: bool,
    before: float,
) -> Iterator[str]:
    everything = [*listing.files, *(file for found in listing.checkpoints for file in found.files)]
    latest = max((file.modified for file in everything), default=0.0)
    for found in listing.checkpoints:
        unowned = [file for file in found.files if f"{found.name}/{file.name}" not in owned]
        old = set(find_orphans(unowned, (), before))
        is_quiet = not is_remote or max(file.modified for file in found.files) < latest - IN_FLIGHT_SECONDS
        is_dead = found.name in dead and not found.complete and is_quiet
        for file in unowned:
            path = f"{found.name}/{file.name}"
            if is_left_behind(file.name) and (path in noted or is_dead or file.name in old):
                yield path


def _empty(listing: RunListing, notes: Mapping[str, Note], dead: Collection[str], before: float) -> Iterator[str]:
    noted = frozenset[str]().union(*(note.directories for note in notes.values()))
    for directory in listing.empty:
        if directory.name in noted or directory.name in dead or directory.modified < before:
            yield directory.name


def _run_files(listing: RunListing, finished: Collection[str], before: float) -> Iterator[str]:
    for file in listing.files:
        if file.name in finished or (file.modified < before and _TORN.fullmatch(file.name)):
            yield file.name
