"""Copies saves from this node's disk to other nodes' disks in the background, next to their upload. No torch.

Every rank copies its own files and then its part of the manifest. The first rank waits until all parts and files of the
checkpoint are on other nodes (or files of earlier ones in the store), publishes the manifest next to them, and deletes the
replicas that are obsolete. There are no collective calls: the files that exist are the state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from millrace.checkpoint.format.manifest import MANIFEST_NAME
from millrace.checkpoint.run.parts import PartRecord, join_parts, part_of
from millrace.checkpoint.run.parts import stored as joined
from millrace.checkpoint.run.peers import CopyEndedError, Peers, absent_files, is_too_slow, obsolete_replicas
from millrace.checkpoint.run.run_info import SIBLING, directory_of
from millrace.checkpoint.run.run_layout import Run, parse_name, part_name, rank_of_part
from millrace.checkpoint.run.timeline import Point, age_of
from millrace.checkpoint.storage.layered import missing_files
from millrace.checkpoint.storage.manifests import StoredManifest
from millrace.checkpoint.storage.peer_files import Peer, PeerStorage
from millrace.checkpoint.storage.replicating import publish_manifest
from millrace.errors import MillraceError, ObjectExistsError, PeerError
from millrace.events import Event, emit
from millrace.runtime.failures import reason_of

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_END_SECONDS, _STOP_SECONDS, _LOOK_SECONDS = 600.0, 15.0, 0.05


@dataclass(eq=False)
class _Copy:
    """The copy of one save. `is_waiting`: for the copy of an earlier save. `is_durable`: whether the store has the save.
    `is_complete`: whether other nodes have it; except on the first rank, whether they have this rank's part.
    """

    name: str
    files: Collection[str]
    stored: StoredManifest
    is_first_rank: bool
    is_waiting: bool
    is_durable: bool = False
    is_complete: bool = False
    is_ended: bool = False
    changed: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    @property
    def is_needed(self) -> bool:
        """Whether the copy is the only one of the save that may survive the loss of this node."""
        return not (self.is_durable or self.is_complete)

    def end(self) -> None:
        """Make the thread end."""
        self.is_ended = True
        self.changed.set()

    def check(self) -> None:
        """Raise `CopyEndedError` if the copy was ended."""
        if self.is_ended:
            raise CopyEndedError(f"the copy of {self.name} was ended", next_step="see the later saves")


class Replicator:
    """Copies one save at a time. For one thread, which never waits for a copy except in `close`.

    `local` and `origin` are the run on this node's disk and in the store. `check_claim` raises `RunTakenError`. Nothing here
    fails a save: a copy that fails is the event `checkpoint.replica.failed`, and a complete one is `checkpoint.replicated`.
    `close` ends within `end_seconds`.
    """

    def __init__(
        self,
        peers: Peers,
        *,
        local: Run,
        origin: Run,
        check_claim: Callable[[], None],
        end_seconds: float | None = None,
    ) -> None:
        self._peers, self._local, self._origin, self._check_claim = peers, local, origin, check_claim
        self._end_seconds = end_seconds or _END_SECONDS
        self._current: _Copy | None = None
        self._durable: set[str] = set()

    @property
    def may_begin(self) -> bool:
        """Whether the next save may be copied: unless one already waits for the copy of an earlier save, which is needed.

        Of several ranks the first one's decides for all, in its order, so that all copy the same saves.
        """
        current = self._running()
        return current is None or not (current.is_needed and current.is_waiting)

    def begin(self, name: str, files: Collection[str], stored: StoredManifest, *, is_first_rank: bool) -> None:
        """Copy a save, `files` of which are this rank's, in the background; `stored` is the manifest, or this rank's part.

        Ends the copy of an earlier save, or waits for it while it is needed.
        """
        earlier = self._running()
        copy = self._current = _Copy(name, files, stored, is_first_rank, is_waiting=earlier is not None)
        copy.thread = threading.Thread(
            target=self._run, args=(copy, earlier), name=f"millrace-replica-{name}", daemon=True
        )
        try:
            copy.thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter is about to end
            self._failed(copy, error)

    def uploaded(self, name: str) -> None:
        """Note that the store has a save."""
        self._durable.add(name)
        if self._current is not None and self._current.name == name:
            self._current.is_durable = True
            self._current.changed.set()

    def close(self) -> None:
        """End the copy in progress if the store has its save; otherwise wait for it."""
        current = self._running()
        if current is not None and current.thread is not None:
            until = time.monotonic() + self._end_seconds
            while current.is_needed and current.thread.is_alive() and time.monotonic() < until:
                current.thread.join(_LOOK_SECONDS)
            current.end()
            current.thread.join(_STOP_SECONDS)
        self._peers.close()

    # --- in the thread ------------------------------------------------------------------------------

    def _running(self) -> _Copy | None:
        current = self._current
        is_running = current is not None and current.thread is not None and current.thread.is_alive()
        return current if is_running else None

    def _run(self, copy: _Copy, earlier: _Copy | None) -> None:
        try:
            while earlier is not None and earlier.thread is not None and earlier.thread.is_alive():
                if copy.is_ended or not earlier.is_needed:
                    earlier.end()
                earlier.thread.join(_LOOK_SECONDS)
            copy.is_waiting = False
            copy.check()
            source = self._local.checkpoint(copy.name)
            self._peers.look()
            copy.check()
            is_part = PartRecord.of(copy.stored.manifest) is not None
            if (copy.files or is_part) and not self._peers.copy(
                source, copy.name, copy.files, stored=copy.stored, check=copy.check
            ):
                return
            if copy.is_first_rank:
                self._complete(copy, self._whole(copy))
            copy.is_complete = True
        except CopyEndedError:
            return
        except MillraceError as error:
            self._failed(copy, error)
        except Exception as error:  # noqa: BLE001 - a defect here must not end the training or its saves
            self._failed(copy, error)

    def _whole(self, copy: _Copy) -> StoredManifest:
        """The manifest of a save. Waits for the parts of the other ranks, which join their manifests as at the store."""
        own = copy.stored.manifest
        record = PartRecord.of(own)
        if record is None:
            return copy.stored
        parts = {record.rank: own}

        def absent() -> str:
            for rank in set(range(record.world)) - parts.keys():
                for peer in self._peers.responding():
                    file = peer.files.get((copy.name, part_name(rank, own.save_id)))
                    try:
                        place = PeerStorage(peer, copy.name)
                        found = file and part_of(place, file, own.save_id, (rank, record.world))
                    except MillraceError:
                        continue  # a later look, or another node
                    if found:
                        parts[rank] = found
                        break
                else:
                    return part_name(rank, own.save_id)
            return ""

        # The others have about as many bytes each. All copy at the same time.
        self._await(copy, absent, record.world * sum(file.size for file in own.files))
        manifest = join_parts(list(parts.values()))
        if manifest is None:
            raise AssertionError("all parts have arrived")
        return joined(manifest)

    def _await(self, copy: _Copy, absence: Callable[[], str], nbytes: int) -> None:
        """Wait until `absence` returns no file any more. Raises `PeerError` if that is too slow for `nbytes`."""
        began, pause = time.monotonic(), _FIRST_PAUSE
        while absent := absence():
            if is_too_slow(nbytes, time.monotonic() - began):
                raise PeerError(f"{copy.name}: {absent} and perhaps others did not arrive on another node in time")
            if copy.changed.wait(pause) and not copy.is_ended:
                time.sleep(pause)
            copy.check()
            pause = min(2 * pause, _LONGEST_PAUSE)
            self._peers.look()

    def _complete(self, copy: _Copy, stored: StoredManifest) -> None:
        """Wait for the files of the other ranks, publish the manifest, and delete obsolete replicas."""
        nbytes = sum(file.size for file in stored.manifest.files)
        self._await(copy, lambda: self._absent(copy.name, stored), nbytes)
        holders = [peer for peer in self._peers.responding() if copy.name in peer.directories()]
        # A save of an unchanged state has no files of its own.
        holders = holders or self._peers.targets()[: self._peers.count]
        done = [peer for peer in holders if self._publish(peer, copy, stored)]
        if not done:
            raise PeerError(f"{copy.name}: no other node has its manifest")
        text = f"{copy.name} on {', '.join(peer.member.address for peer in done)}"
        emit(Event(name="checkpoint.replicated", subject=self._origin.url, nbytes=nbytes, detail=text))
        copy.is_complete = True
        self._delete_parts(done, copy.name)
        try:
            while True:
                uploaded = copy.is_durable
                self._delete_obsolete(parse_name(copy.name))
                if uploaded:
                    return
                copy.changed.wait()
                copy.check()
                self._peers.look()
        except CopyEndedError:
            raise
        except MillraceError as error:
            emit(Event(name="run.prune.failed", subject=self._peers.name, detail=f"obsolete replicas: {error}"))

    def _absent(self, name: str, stored: StoredManifest) -> str:
        """A file of the checkpoint that is neither on another node nor, if an earlier checkpoint has it, in the store."""
        absent = absent_files(stored.manifest.files, name, self._peers.held())
        # During an outage of the store, files that are certainly stored there are not requested from it.
        known = self._durable - {name}
        absent = [file for file in absent if directory_of(file.name, name)[0] not in known]
        own = [file for file in absent if not file.name.startswith(SIBLING)]
        absent = own or missing_files(self._origin.checkpoint(name), absent)
        return absent[0].name if absent else ""

    def _publish(self, peer: Peer, copy: _Copy, stored: StoredManifest) -> bool:
        place = PeerStorage(peer, copy.name)
        try:
            try:
                publish_manifest(place, stored)
            except ObjectExistsError:
                # Left by an earlier life of the run, which saved the same step.
                self._check_claim()
                place.delete([MANIFEST_NAME])
                publish_manifest(place, stored)
        except MillraceError as error:
            emit(Event(name="checkpoint.replica.failed", subject=place.url, detail=str(error)))
            return False
        return True

    def _delete_parts(self, holders: Iterable[Peer], name: str) -> None:
        """Delete the parts of a checkpoint, whose manifest replaces them."""
        for peer in holders:
            parts = [file for directory, file in peer.files if directory == name and rank_of_part(file) is not None]
            if parts:
                try:
                    peer.delete(name, parts)
                except MillraceError as error:  # they are deleted with the replica
                    emit(Event(name="run.prune.failed", subject=peer.url, detail=f"parts of a save: {error}"))

    def _delete_obsolete(self, replicated: Point | None) -> None:
        """Delete replicas that are not needed any more, from all members. `replicated` has complete replicas."""
        found = {
            (peer, directory): point
            for peer in self._peers.responding()
            for directory in peer.directories()
            if (point := parse_name(directory)) is not None
        }
        if replicated is None or len(set(found.values())) < 2:
            return
        self._check_claim()
        complete = (Point(each.step, each.revision) for each in self._origin.scan() if each.complete)
        durable = max(complete, key=age_of, default=None)
        safe = replicated if durable is None else max(durable, replicated, key=age_of)
        obsolete = set(obsolete_replicas(found.values(), durable=durable, safe=safe))
        for (peer, directory), point in found.items():
            if point in obsolete and peer.failure is None:
                try:
                    peer.delete(directory)
                except PeerError as error:  # it is deleted after a later save
                    emit(Event(name="run.prune.failed", subject=peer.url, detail=f"obsolete replicas: {error}"))

    def _failed(self, copy: _Copy, error: Exception) -> None:
        detail = str(error) if isinstance(error, MillraceError) else reason_of(error)[:300]
        emit(Event(name="checkpoint.replica.failed", subject=f"{self._origin.url}/{copy.name}", detail=detail))
