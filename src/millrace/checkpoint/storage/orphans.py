"""Orphans: data files of killed or failed saves. Finds them (a pure decision) and removes them. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from millrace.checkpoint.format.manifest import MANIFEST_NAME
from millrace.checkpoint.storage.manifests import read_manifest
from millrace.checkpoint.storage.storage import CheckpointStorage, StoredFile
from millrace.errors import MillraceError, MissingError
from millrace.events import Event, emit

ORPHAN_SECONDS = 24 * 3600.0
"""An orphan is removed when it is this much older than the newest manifest. A running save has files without a manifest,
too, and an object store dates a long upload by its begin. So a save must not take longer than this.
"""

# Final and temporary names of `open_writer` and `publish`, and of the files by which ranks save together. No other file is
# ever removed.
_LEFT_BEHIND = re.compile(
    r"(?:data|part)-[0-9a-z-]{1,100}\.millrace|failed-[0-9a-z-]{1,100}\.json"
    r"|\.(?:(?:(?:data|part)-[0-9a-z-]{1,100}|(?:rank-\d+\.)?manifest)\.millrace|failed-[0-9a-z-]{1,100}\.json)\.[0-9a-f]{8}\.tmp",
    re.ASCII,
)
_RANK_MANIFEST = re.compile(rf"rank-(\d+)\.{re.escape(MANIFEST_NAME)}", re.ASCII)


def is_left_behind(name: str) -> bool:
    """Whether a file of this name can be an orphan: only our writers use such names."""
    return _LEFT_BEHIND.fullmatch(name) is not None


def rank_of_manifest(name: str) -> int | None:
    """The rank of a manifest of a save without collectives. None for other names."""
    match = _RANK_MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


def find_orphans(files: Iterable[StoredFile], owned: Collection[str], published: float) -> list[str]:
    """Names of the files that no manifest owns and that are `ORPHAN_SECONDS` older than `published`.

    Both times are from the clock of the storage, so the clocks of clients do not matter.
    """
    return [
        file.name
        for file in files
        if is_left_behind(file.name) and file.name not in owned and file.modified < published - ORPHAN_SECONDS
    ]


def sweep(storage: CheckpointStorage, manifest_name: str) -> None:
    """Remove the orphans in the directory, after `manifest_name` was published.

    The checkpoint is already complete, so a failure is only an event. Safe during other saves: their files are too new.
    """
    try:
        files = storage.files()
        published = next((file.modified for file in files if file.name == manifest_name), None)
        if published is None or not find_orphans(files, (), published):
            return
        # Read all manifests only when there may be orphans. An unreadable manifest owns all files.
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
