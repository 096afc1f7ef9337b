"""All that one pass of a pruning is to do: the plan for the checkpoints, and what crashed saves and prunings left. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from millrace.checkpoint.format.manifest import MANIFEST_NAME
from millrace.checkpoint.places.orphans import ORPHAN_SECONDS, find_orphans, is_left_behind, rank_of_manifest
from millrace.checkpoint.run.retention import Policy, PrunePlan, by_directory, plan_pruning
from millrace.checkpoint.run.run_info import CheckpointInfo, paths_of
from millrace.checkpoint.run.run_layout import RunListing, parse_name
from millrace.errors import MillraceError

IN_FLIGHT_SECONDS = 300.0
"""How long an object store may take with what a process has sent before it died."""
NOTE_PREFIX = "pruning-"
"""How the names of the files begin in which a pruning notes what it is about to delete."""

_NOTE = re.compile(rf"{NOTE_PREFIX}[0-9a-f]{{32}}\.json", re.ASCII)
# What a killed process leaves that was publishing a small file of the run.
_TORN = re.compile(rf"\.(?:writer-\d{{12}}|{NOTE_PREFIX}[0-9a-f]{{32}})\.json\.[0-9a-f]{{8}}\.tmp", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneWork:
    """What is to be done, in this order: the manifests of `plan.remove` go, then `delete` (names by directory), then
    `run_files` (notes that are done with, torn files). Directories in `empty` have nothing in them and go as well.

    `leftovers` are those paths of `delete` that are of no checkpoint; `freed_bytes` is the size of all that goes.
    `unreadable` are checkpoints whose manifest cannot be read, which are left alone with all that they may name.
    """

    plan: PrunePlan
    delete: Mapping[str, tuple[str, ...]]
    leftovers: tuple[str, ...]
    empty: tuple[str, ...]
    run_files: tuple[str, ...]
    unreadable: tuple[str, ...]
    sizes: Mapping[str, int]

    @property
    def freed_bytes(self) -> int:
        return sum(self.sizes[path] for path in self.paths)

    @property
    def paths(self) -> tuple[str, ...]:
        """Everything that goes, but for files of the run itself; manifests first."""
        manifests = [f"{name}/{MANIFEST_NAME}" for name in self.plan.remove]
        return (*manifests, *(f"{directory}/{name}" for directory, names in self.delete.items() for name in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a pruning was about to do: the data files that nobody needs without the checkpoints that go, as paths in the
    run, and all directories from which something goes.
    """

    paths: frozenset[str] = frozenset()
    directories: frozenset[str] = frozenset()

    def encode(self) -> bytes:
        content = {"delete": sorted(self.paths), "directories": sorted(self.directories)}
        return json.dumps(content, separators=(",", ":")).encode("ascii")

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Names that no pruning writes are passed over. Raises `ValueError` for what is no note."""
        try:
            content = json.loads(data)
            split = [str(path).partition("/") for path in content["delete"]]
            directories = [str(directory) for directory in content["directories"]]
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError("this is no note") from error
        return cls(
            paths=frozenset("".join(each) for each in split if parse_name(each[0]) and is_left_behind(each[2])),
            directories=frozenset(each for each in directories if parse_name(each)),
        )


def note_of(work: PruneWork) -> Note:
    """What must be known to finish `work`; nothing when no checkpoint goes."""
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
) -> PruneWork:
    """Decide on one listing of a run.

    `described` has, by name, what the manifests say or why they cannot be read; a complete checkpoint that is missing
    there changed since the listing, and is left alone. `notes` are those of earlier prunings, by the names of their
    files; `dead` the directories in which writers that are dead beyond doubt were saving.

    A file that no manifest names goes at once when a note names it or it is of a dead writer (in an object store: when
    nothing happened there for five minutes), and else when it is a day older than the newest manifest. All ages are
    told by the storage's own clock.
    """
    notes = notes or {}
    noted = frozenset[str]().union(*(note.paths for note in notes.values()))
    infos = {name: info for name, info in described.items() if isinstance(info, CheckpointInfo)}
    unreadable = tuple(name for name, info in described.items() if not isinstance(info, CheckpointInfo))
    sizes = {f"{found.name}/{file.name}": file.size for found in listing.checkpoints for file in found.files}
    spared = _spared(listing, infos, unreadable)
    plan = plan_pruning(list(infos.values()), policy, now=now, protected=protected, spared=spared)
    owned = spared.union(*(paths_of(info) for info in infos.values()))
    leftovers = set(_leftovers(listing, owned, noted, frozenset(dead), is_remote))
    of_removed = {f"{place}/{name}" for place, names in plan.files_of_removed_to_delete.items() for name in names}
    going = (of_removed & sizes.keys()) | leftovers
    # What kept checkpoints name is theirs again, should another policy once have wanted it to go.
    kept = frozenset[str]().union(*(paths_of(infos[name]) for name in plan.keep))
    finished = {name for name, note in notes.items() if not (note.paths & sizes.keys()) - going - kept}
    return PruneWork(
        plan=plan,
        delete=by_directory(going),
        leftovers=tuple(sorted(leftovers)),
        empty=tuple(_empty(listing, notes)),
        run_files=tuple(_run_files(listing, finished)),
        unreadable=unreadable,
        sizes=sizes,
    )


def _published(listing: RunListing) -> float | None:
    """When the newest manifest was written."""
    return max((found.manifest.modified for found in listing.checkpoints if found.manifest), default=None)


def _spared(listing: RunListing, infos: Mapping[str, CheckpointInfo], unreadable: Collection[str]) -> frozenset[str]:
    """What may be of a checkpoint of which nothing is known: a manifest names files that were there before it."""
    founds = {found.name: found for found in listing.checkpoints}
    manifests = [founds[name].manifest for name in unreadable]
    # A day for clocks that jump, and for object stores that date an upload by its beginning or its end.
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
    listing: RunListing, owned: frozenset[str], noted: frozenset[str], dead: frozenset[str], is_remote: bool
) -> Iterator[str]:
    published = _published(listing)
    everything = [*listing.files, *(file for found in listing.checkpoints for file in found.files)]
    latest = max((file.modified for file in everything), default=0.0)
    for found in listing.checkpoints:
        unowned = [file for file in found.files if f"{found.name}/{file.name}" not in owned]
        old = set(find_orphans(unowned, (), published)) if published is not None else set()
        is_quiet = not is_remote or max(file.modified for file in found.files) < latest - IN_FLIGHT_SECONDS
        is_dead = found.name in dead and not found.complete and is_quiet
        for file in unowned:
            path = f"{found.name}/{file.name}"
            if is_left_behind(file.name) and (path in noted or is_dead or file.name in old):
                yield path


def _empty(listing: RunListing, notes: Mapping[str, Note]) -> Iterator[str]:
    published = _published(listing)
    noted = frozenset[str]().union(*(note.directories for note in notes.values()))
    for directory in listing.empty:
        is_old = published is not None and directory.modified < published - ORPHAN_SECONDS
        if directory.name in noted or is_old:
            yield directory.name


def _run_files(listing: RunListing, finished: Collection[str]) -> Iterator[str]:
    published = _published(listing)
    for file in listing.files:
        is_old = published is not None and file.modified < published - ORPHAN_SECONDS
        if file.name in finished or (is_old and _TORN.fullmatch(file.name)):
            yield file.name
