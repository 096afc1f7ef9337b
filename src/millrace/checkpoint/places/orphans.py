"""Files that killed or failed saves left behind: which they are (a pure decision), and removing them. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from millrace.checkpoint.format.manifest import MANIFEST_NAME
from millrace.checkpoint.places.manifests import read_manifest
from millrace.checkpoint.places.storage import CheckpointStorage, StoredFile
from millrace.errors import MillraceError, MissingError
from millrace.events import Event, emit

ORPHAN_SECONDS = 24 * 3600.0
"""How much older than the newest manifest a file without owner must be before it is removed. A save in progress has such
files, too, and an object store dates a long upload by its beginning: no save may take longer than this.
"""

# What `open_writer` and `publish` leave, under their final name or a temporary one. Nothing else is ever removed.
_LEFT_BEHIND = re.compile(
    r"data-[0-9a-z-]{1,100}\.millrace|\.(?:data-[0-9a-z-]{1,100}|(?:rank-\d+\.)?manifest)\.millrace\.[0-9a-f]{8}\.tmp",
    re.ASCII,
)
_RANK_MANIFEST = re.compile(rf"rank-(\d+)\.{re.escape(MANIFEST_NAME)}", re.ASCII)


def is_left_behind(name: str) -> bool:
    """Whether only our writers make files of this name, and nobody misses one that no manifest names."""
    return _LEFT_BEHIND.fullmatch(name) is not None


def rank_of_manifest(name: str) -> int | None:
    """The rank whose manifest, of a save without collectives, has this name."""
    match = _RANK_MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


def find_orphans(files: Iterable[StoredFile], owned: Collection[str], published: float) -> list[str]:
    """Names of the files that no manifest owns and that are `ORPHAN_SECONDS` older than `published`.

    Both times are of the storage's own clock, so that no clock of a client matters.
    """
    return [
        file.name
        for file in files
        if is_left_behind(file.name) and file.name not in owned and file.modified < published - ORPHAN_SECONDS
    ]


def sweep(storage: CheckpointStorage, manifest_name: str) -> None:
    """Remove what earlier saves left in the directory, after `manifest_name` was published there.

    The checkpoint is complete before this begins, so a failure is an event and nothing more. Safe beside other savers:
    what they have not published yet is too young.
    """
    try:
        files = storage.files()
        published = next((file.modified for file in files if file.name == manifest_name), None)
        if published is None or not find_orphans(files, (), published):
            return
        # Only now, when there is something to decide, are all manifests read. One that cannot be read owns everything.
        orphans = find_orphans(files, _owned_files(storage, files), published)
        if orphans:
            storage.delete(orphans)
            emit(Event(name="checkpoint.orphans.removed", subject=storage.url, detail=", ".join(orphans)))
    except MillraceError as error:
        emit(Event(name="checkpoint.sweep.failed", subject=storage.url, detail=str(error)))


def _owned_files(storage: CheckpointStorage, files: Iterable[StoredFile]) -> set[str]:
    owned: set[str] = set()
    for name in (file.name for file in files):
        rank = rank_of_manifest(name)
        if rank is None and name != MANIFEST_NAME:
            continue
        try:
            manifest = read_manifest(storage, rank).manifest
        except MissingError:
            continue
        owned.update(file.name for file in manifest.files)
    return owned
