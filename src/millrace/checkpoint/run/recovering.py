"""Completes saves that a crash left on the nodes' disks: in parts of several ranks, or not at the origin.

Collective calls in the caller's thread, before a restore.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Collection
from dataclasses import dataclass

from millrace.checkpoint.format.manifest import Manifest
from millrace.checkpoint.run.parts import PartRecord, join_parts, stored
from millrace.checkpoint.run.ranks import Ranks
from millrace.checkpoint.run.run_layout import Run, parse_name, rank_of_part
from millrace.checkpoint.run.tiers import Tiers, pending_uploads
from millrace.checkpoint.run.timeline import age_of
from millrace.checkpoint.run.uploading import Uploader
from millrace.checkpoint.storage.manifests import StoredManifest, load_manifest
from millrace.checkpoint.storage.replicating import publish_manifest
from millrace.errors import (
    DamagedError,
    MillraceError,
    MissingError,
    ObjectExistsError,
    StorageError,
    UnsupportedFormatError,
)
from millrace.events import Event, emit


@dataclass(frozen=True)
class Recovery:
    """Completes the saves of a run after a crash. Every rank has one, and calls the same methods in the same order."""

    uploader: Uploader
    ranks: Ranks

    @property
    def _tiers(self) -> Tiers:
        return self.uploader.tiers

    @property
    def _local(self) -> Run:
        return self.uploader.local

    def join_left_parts(self) -> bool:
        """Complete, on the nodes' disks, saves that a crash left in parts there and on other nodes. Needs no origin.

        Returns whether any rank has parts. A collective call in the caller's thread. Raises errors of the disks.
        """
        gathered = self.ranks.gather(self.ranks.run_on_all(self._near_parts))
        known = self.ranks.run_on_first(lambda: self._joined(gathered))
        self._publish_on_all(known)
        return bool(known) or any(gathered)

    def recover(self) -> None:
        """Upload the saves that a crash left on the nodes' disks. A collective call in the caller's thread.

        Raises errors of the places.
        """
        self._publish_on_all(self._pending_on_nodes())
        names = self.ranks.run_on_all(lambda: self.uploader.copy_leftovers(""))
        self.ranks.run_on_first(lambda: self.uploader.publish(names))
        self.uploader.is_behind = False

    def _pending_on_nodes(self) -> list[tuple[str, StoredManifest]]:
        """The complete checkpoints of any node that the origin lacks. Of several of one name the last counts."""

        def pending() -> dict[str, StoredManifest]:
            uploads = pending_uploads(self._local, self._tiers.origin) if self.uploader.member.handles_node else ()
            names = [upload.name for upload in uploads if upload.manifest]
            return {name: StoredManifest.read(self._local.checkpoint(name)) for name in names}

        own = self.ranks.run_on_all(pending)
        created = self.ranks.gather({name: each.manifest.created for name, each in own.items()})
        # Several nodes may have a manifest. One of them sends it.
        senders = {
            name: max(range(self.ranks.count), key=lambda rank: created[rank].get(name, -math.inf))
            for name in itertools.chain(*created)
        }
        sent = [(name, each) for name, each in own.items() if senders[name] == self.ranks.rank]
        return list(itertools.chain(*self.ranks.gather(sent)))

    def _publish_on_all(self, known: Collection[tuple[str, StoredManifest]]) -> None:
        """Publish the manifests of checkpoints on all nodes' disks, next to the parts there.

        A part stays: the process that wrote it may still run, and then it uploads the part later.
        """

        def publish_all() -> None:
            for name, manifest in known:
                storage = self._local.checkpoint(name)
                try:
                    storage.prepare()
                    publish_manifest(storage, manifest)
                except ObjectExistsError as error:
                    emit(Event(name="checkpoint.tier.left", subject=storage.url, detail=str(error)))

        self.ranks.run_on_all(publish_all)

    def _near_parts(self) -> list[tuple[str, Manifest]]:
        """The parts on this node's disk, with the names of their checkpoints."""
        return _parts_in(self._local) if self.uploader.member.handles_node else []

    def _joined(self, gathered: Collection[list[tuple[str, Manifest]]]) -> list[tuple[str, StoredManifest]]:
        """The manifests of checkpoints of which all parts exist on the nodes' disks, or whose manifest another node has."""
        near = {(name, part.save_id) for parts in gathered for name, part in parts}
        by_save: dict[tuple[str, str], list[Manifest]] = {}
        for name, part in itertools.chain(*gathered, self._parts_elsewhere()):
            by_save.setdefault((name, part.save_id), []).append(part)
        found: list[tuple[str, StoredManifest]] = []
        incomplete: list[tuple[str, list[Manifest]]] = []
        for (name, save_id), parts in by_save.items():
            manifest = join_parts(parts)
            whole = self._manifest_elsewhere(name, save_id) if manifest is None else stored(manifest)
            if whole is None:
                incomplete.append((name, parts))
            elif manifest is not None or (name, save_id) in near:
                found.append((name, whole))
        if incomplete:
            newest = max((age_of(each) for each in self._tiers.complete()), default=(-1, -1))
            joined = max(
                (age_of(point) for name, _ in found if (point := parse_name(name)) is not None), default=newest
            )
            for name, parts in incomplete:
                point = parse_name(name)
                if point is not None and age_of(point) > max(newest, joined):
                    self._report_missing(name, parts)
        # Of several saves of one name the last counts. The first that is published stays.
        return sorted(found, key=lambda each: each[1].manifest.created, reverse=True)

    def _parts_elsewhere(self) -> list[tuple[str, Manifest]]:
        """The parts that other nodes have."""
        self._tiers.look()
        found: list[tuple[str, Manifest]] = []
        for run in () if self._tiers.peers is None else self._tiers.peers.runs():
            try:
                found += _parts_in(run)
            except MillraceError as error:
                emit(Event(name="checkpoint.tier.unreachable", subject=run.url, detail=str(error)))
        return found

    def _manifest_elsewhere(self, name: str, save_id: str) -> StoredManifest | None:
        """The manifest of a save on another node."""
        for run in () if self._tiers.peers is None else self._tiers.peers.runs():
            try:
                whole = StoredManifest.read(run.checkpoint(name))
            except MissingError:
                continue
            except MillraceError as error:
                emit(Event(name="checkpoint.tier.unreachable", subject=run.url_of(name), detail=str(error)))
            else:
                if whole.manifest.save_id == save_id:
                    return whole
        return None

    def _report_missing(self, name: str, parts: Collection[Manifest]) -> None:
        records = [record for part in parts if (record := PartRecord.of(part)) is not None]
        missing = {rank for record in records for rank in range(record.world)} - {record.rank for record in records}
        text = (
            f"{self._tiers.origin.url_of(name)} is on disks of several nodes, and the parts of these ranks are missing: "
            f"{', '.join(map(str, sorted(missing)))}; start with the same nodes to restore it"
        )
        emit(Event(name="checkpoint.tier.left", subject=self._local.url_of(name), detail=text))
        warnings.warn(text, RuntimeWarning, stacklevel=6)


def _parts_in(run: Run) -> list[tuple[str, Manifest]]:
    """The parts of checkpoints without a manifest in a place, by name. An unreadable one is an event."""
    parts: list[tuple[str, Manifest]] = []
    for found in run.scan():
        storage = run.checkpoint(found.name)
        for file in found.files:
            if not found.complete and rank_of_part(file.name) is not None:
                try:
                    parts.append((found.name, load_manifest(storage, file).manifest))
                except (DamagedError, MissingError, StorageError, UnsupportedFormatError) as error:
                    # It must not hide the parts of other saves.
                    emit(Event(name="checkpoint.tier.left", subject=storage.url, detail=f"{file.name}: {error}"))
    return parts
