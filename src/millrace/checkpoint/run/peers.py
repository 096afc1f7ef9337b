"""Replicas of a run's checkpoints on other nodes of the cluster: the nodes, their files, and copies to them. No torch.

The members come from the cluster's membership (`members`, the token and `tls` as in `millrace.filesystem`). Every node's
replicas are on the next members in a fixed order, so each member has those of about as many nodes as any other.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from millrace.checkpoint.format.manifest import MANIFEST_NAME, DataFile
from millrace.checkpoint.run.run_info import directory_of
from millrace.checkpoint.run.run_layout import Entry, Run, parse_name
from millrace.checkpoint.run.timeline import Point, age_of
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.storage.manifests import StoredManifest
from millrace.checkpoint.storage.peer_files import Peer, PeerStorage
from millrace.checkpoint.storage.replicating import copy_files, publish_manifest
from millrace.config import CacheOptions, resolve
from millrace.errors import (
    ConfigurationError,
    DamagedError,
    MillraceError,
    ObjectExistsError,
    PeerError,
    PeerSilentError,
    UsageError,
)
from millrace.events import Event, emit
from millrace.runtime.forks import importing
from millrace.runtime.pipeline import run_in_order

if TYPE_CHECKING:
    from millrace.cluster.dataplane.client import PeerClient
    from millrace.cluster.membership import NodeLink

_LOOK_THREADS = 32
_PATIENT_LOOKS = 3
_SLOWEST_BYTES_PER_SECOND = 10e6
_FIRST_SECONDS = 30.0
_SPARE_ATTEMPTS = 1  # with a further member, after a failure


# --- decisions, pure --------------------------------------------------------------------------------


def replica_order(run: str, me: str, members: Iterable[str]) -> list[str]:
    """The members in the order in which they get the replicas of the node `me`, which is left out. Pure.

    All nodes use one circle of the members, sorted by a hash of run and id, and each begins behind its own place. So every
    member is the first choice of exactly one other.
    """

    def place(member: str) -> tuple[int, str]:
        return xxhash.xxh3_64_intdigest(f"{run}\0{member}".encode()), member

    circle = sorted({*members} - {me}, key=place)
    behind = [member for member in circle if place(member) > place(me)]
    return behind + circle[: len(circle) - len(behind)]


def obsolete_replicas(replicas: Iterable[Point], *, durable: Point | None, safe: Point | None) -> list[Point]:
    """The replicas to delete. Pure. `durable`: the newest checkpoint in the store; `safe`: the newest that is there, or that
    has complete replicas.

    A replica is deleted when the store has it, or something newer, and a newer checkpoint is safe.
    """
    if durable is None or safe is None:
        return []
    return [each for each in replicas if age_of(each) <= age_of(durable) and age_of(each) < age_of(safe)]


def absent_files(files: Iterable[DataFile], name: str, held: Mapping[tuple[str, str], int]) -> list[DataFile]:
    """The data files of the checkpoint `name` that are not in `held` (sizes by directory and file name). Pure."""
    return [file for file in dict.fromkeys(files) if held.get(directory_of(file.name, name)) != file.size]


def is_too_slow(nbytes: int, seconds: float) -> bool:
    """Whether a copy of which `nbytes` have arrived after `seconds` is given up. Pure."""
    return seconds > _FIRST_SECONDS + nbytes / _SLOWEST_BYTES_PER_SECOND


# --- the cluster ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ClusterAccess:
    """How a process gets the members and the token of its cluster: from this machine's node (the directory in which it
    publishes them), or with `options`. Picklable, for the saver process; the pickle may contain the token.
    """

    node: Path | None = None
    options: CacheOptions | None = field(default=None, repr=False)

    @classmethod
    def find(cls) -> ClusterAccess:
        """Find the cluster of this process.

        Raises `ConfigurationError` without one, `MissingDependencyError`, `OriginUnavailableError` if it does not respond.
        """
        options = resolve({})
        link = _link_for(options)
        if link is None:
            raise ConfigurationError(
                f"replicas= needs a cluster, and members={options.members!r} names none here",
                next_step="run in a Ray job, or set MILLRACE_MEMBERS and MILLRACE_CLUSTER_TOKEN",
            )
        with importing():
            from millrace.cluster.folder import FolderViews

        return cls(node=link.views.directory) if isinstance(link.views, FolderViews) else cls(options=options)

    def link(self) -> NodeLink:
        """Open the link to the cluster. Raises as `find`."""
        if self.node is None:
            link = None if self.options is None else _link_for(self.options)
        else:
            with importing():
                from millrace.cluster.folder import LocalNode

            found = LocalNode.at(self.node)
            link = None if found is None else found.link()
        if link is None:
            raise ConfigurationError("the cluster of this process is gone", next_step="start its node again")
        return link


def _link_for(options: CacheOptions) -> NodeLink | None:
    with importing():
        from millrace.cluster.attach import link_for

    return link_for(options)


class CopyEndedError(UsageError):
    """A copy was ended, because it is not needed any more. Handled in `replicator.py`."""


class Peers:
    """The members of the cluster, with their replicas of the run `name` as of the last `look`. Thread-safe.

    The replicas of this node are on the first `count` members in its order.
    """

    def __init__(self, access: ClusterAccess, name: str, *, count: int) -> None:
        self.name, self.count = name, count
        self._access = access
        self._lock = threading.Lock()
        self._link: NodeLink | None = None
        self._client: PeerClient | None = None
        self._replaced: list[PeerClient] = []
        self._peers: dict[str, Peer] | None = None

    def look(self, *, patient: bool = False) -> Sequence[Peer]:
        """Request the lists of replicas of all members at the same time. Returns those that responded, this node first.

        Takes a deadline at most, and never raises. A member that does not respond is an event. `patient`: those that were
        silent get three requests, because one of them may be the only holder of the newest checkpoint.
        """
        try:
            link, client = self._open()
        except MillraceError as error:
            self._report(self.name, error)
            return ()
        members = sorted(link.views.view().members, key=lambda member: member.id != link.member_id)
        peers = {member.id: Peer(client, member, self.name) for member in members}
        not_seen = list(peers.values())
        for _ in range(_PATIENT_LOOKS if patient else 1):
            for _ in run_in_order(not_seen, Peer.look, min(_LOOK_THREADS, max(1, len(not_seen)))):
                pass
            not_seen = [peer for peer in not_seen if isinstance(peer.failure, PeerSilentError)]
        with self._lock:
            self._peers = peers
        for peer in peers.values():
            if peer.failure is not None:
                self._report(peer.url, peer.failure)
        return self.responding()

    def responding(self) -> Sequence[Peer]:
        """The members that responded to the last `look`."""
        with self._lock:
            peers = self._peers
        if peers is None:
            return self.look()
        return [peer for peer in peers.values() if peer.failure is None]

    def runs(self) -> list[Run]:
        """The replicas on each member that has any, as the run's directory there."""
        return [Run(PeerStorage(peer, ""), _PeerPlace(peer)) for peer in self.responding() if peer.files]

    def held(self) -> dict[tuple[str, str], int]:
        """The size of each file of the replicas on the working disks of all members, by directory and file name."""
        return {
            place: file.size
            for peer in self.responding()
            for place, file in peer.files.items()
            if place not in peer.endangered
        }

    def copy(
        self,
        source: CheckpointStorage,
        directory: str,
        files: Collection[str],
        *,
        stored: StoredManifest | None = None,
        with_manifest: bool = False,
        or_here: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Copy files of a checkpoint to this node's members, every chunk verified; returns the addresses that have them now.

        A member that fails, has no space or is too slow is an event, and one more member is tried. `check` is called now and
        then; its errors end the copy, as do errors of the source. `stored` describes the files: the manifest of the
        source, or one rank's part, which is published there, too. `with_manifest`: so is the manifest. `or_here` as in
        `targets`.
        """
        stored = stored or StoredManifest.read(source)
        is_part = stored.file.name != MANIFEST_NAME
        sizes = {file.name: file.size for file in stored.manifest.files if file.name in files}
        copied: list[str] = []
        failures = 0
        for peer in self.targets(or_here=or_here):
            if len(copied) == self.count or failures > _SPARE_ATTEMPTS:
                break
            began = time.monotonic()

            def progress(done: int, _: int, began: float = began, peer: Peer = peer) -> None:
                check()
                if is_too_slow(done, time.monotonic() - began):
                    raise PeerError(f"{peer.url}: too slow ({done} bytes in {time.monotonic() - began:.0f} s)")

            try:
                place = PeerStorage(peer, directory, sizes)
                copy_files(source, place, list(sizes), progress=progress, stored=stored)
                if is_part:
                    _publish_part(place, stored)
                elif with_manifest:
                    publish_manifest(place, stored)
            except (DamagedError, CopyEndedError):
                raise
            except MillraceError as error:
                failures += 1
                emit(Event(name="checkpoint.replica.failed", subject=place.url, detail=str(error)))
            else:
                copied.append(peer.member.address)
        if len(copied) + failures < self.count:
            text = f"{len(copied)} of {self.count} replicas: there are no more members that respond"
            emit(Event(name="checkpoint.replica.failed", subject=f"{self.name}/{directory}", detail=text))
        return copied

    def targets(self, *, or_here: bool = False) -> list[Peer]:
        """The members for this node's replicas, in order; of these the first `count` get them. Raises as `ClusterAccess`.

        `or_here`: where there is no other member, that of this machine.
        """
        link, _ = self._open()
        peers = {peer.member.id: peer for peer in self.responding()}
        ids = [name for name, peer in peers.items() if str(peer.member.state) != "leaving"]
        order = replica_order(self.name, link.member_id or socket.gethostname(), ids)
        return [peers[name] for name in (order or ids if or_here else order)]

    def close(self) -> None:
        """Close the connections. The next use opens others."""
        for client in (*self._replaced, *filter(None, (self._client,))):
            client.close()

    # --- inside -------------------------------------------------------------------------------------

    def _open(self) -> tuple[NodeLink, PeerClient]:
        with self._lock:
            before = link = self._link
            try:
                # This machine's node may have another id or token since it was started again.
                if link is None or self._access.node is not None:
                    link = self._access.link()
            except ConfigurationError:
                if link is None:
                    raise
            if self._client is None or before is None or (link.token, link.tls) != (before.token, before.tls):
                with importing():
                    from millrace.cluster.dataplane.client import PeerClient

                if self._client is not None:
                    self._replaced.append(self._client)  # other threads may use it
                    self._peers = None
                self._client = PeerClient(token=link.token, tls=link.tls)
            self._link = link
            return link, self._client

    @staticmethod
    def _report(subject: str, error: MillraceError) -> None:
        emit(Event(name="checkpoint.tier.unreachable", subject=subject, detail=str(error)))


class _PeerPlace:
    """The replicas of a run on one member, as the storage of a `Run`."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def walk(self, prefix: str) -> Iterator[Entry]:
        for (directory, _), file in sorted(self._peer.files.items()):
            if directory.startswith(prefix) and parse_name(directory) is not None:
                yield Entry(directory, file, file.modified)

    def open(self, directory: str) -> CheckpointStorage:
        return PeerStorage(self._peer, directory)

    def delete(self, directory: str, manifest: Sequence[str], files: Sequence[str]) -> None:
        self._peer.delete(directory, [*manifest, *files])


def _publish_part(place: PeerStorage, part: StoredManifest) -> None:
    try:
        place.publish(part.file.name, part.data, replace=False)
    except ObjectExistsError:
        # Left by an earlier life of the run, which saved the same step.
        place.delete([part.file.name])
        place.publish(part.file.name, part.data, replace=False)
