"""Replicas on a node's disks: verified on arrival, inside its limits, for members only, and deleted in time."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.integration.security.test_plane import Authority
from tests.support.planes import Plane
from tests.support.seen_events import seen_events
from tests.support.waiting import wait_until
from tests.support.wire_client import TOKEN, WireClient

from millrace.checkpoint.run.peers import ClusterAccess, Peers
from millrace.checkpoint.storage import peer_files
from millrace.checkpoint.storage.peer_files import Peer, PeerStorage
from millrace.cluster import replicas as replicas_module
from millrace.cluster.dataplane import wire
from millrace.cluster.dataplane.client import PeerClient
from millrace.cluster.dataplane.connections import tls_context
from millrace.cluster.dataplane.server import Call
from millrace.cluster.dataplane.wire import ReplicaName, ReplicaPut
from millrace.cluster.membership import Member
from millrace.cluster.replicas import IDLE_SECONDS, PART_SECONDS, REPLICA_SHARE, ROUTE, ReplicaFiles
from millrace.config import resolve
from millrace.errors import (
    DiskFullError,
    ObjectExistsError,
    PeerError,
    PeerRefusedError,
    PeerSilentError,
    WireError,
)
from millrace.runtime import maintenance
from millrace.runtime.failures import FailingDiskError

RUN, STEP = "run-0123456789abcdef", "step-000000000007"
NAME = ReplicaName(RUN, STEP, "data-0.millrace")
MIB = 1 << 20


class Node:
    """A node that stores replicas, and a client of it."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.plane = Plane(directory, **options)
        self.ahead_seconds = 0.0
        self.replicas = ReplicaFiles(self.plane.node, wall_clock=lambda: time.time() + self.ahead_seconds)
        self.replicas.add_routes(self.plane.server)
        self.client = PeerClient(token=TOKEN)
        self.member = Member(id="me", address=self.plane.address)
        self.disk = self.plane.node.open_disks[0]
        self.root = self.disk.store.directory / "replicas"

    def put(self, name: ReplicaName, start: int, data: bytes, size: int) -> None:
        put = ReplicaPut(name, start, start + len(data), size)
        self.client.put_replica(self.member, put, data, deadline=60.0)

    def read(self, name: ReplicaName, start: int, stop: int, size: int) -> bytes:
        return bytes(self.client.read_replica(self.member, name, (start, stop), size, deadline=60.0))

    def call(self, method: str, path: str, body: Any = None) -> Any:
        return self.client.call(self.member.address, method, f"{ROUTE}/{path}", body, deadline=60.0)

    def listed(self) -> dict[tuple[str, str], int]:
        return {(row[0], row[1]): row[2] for row in self.call("GET", RUN)["files"]}

    def used(self) -> int:
        return self.disk.store.index.used_bytes()


def access_to(node: Node) -> ClusterAccess:
    """The cluster of this one node."""
    options = {"members": f"static://{node.plane.address}", "cluster_token": TOKEN}
    return ClusterAccess(options=resolve(options, environ={}, file={}))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path, capacity="400MB")
    with node.plane:
        yield node
        node.replicas.close()
    node.client.close()


def test_file_in_pieces_is_visible_when_all_of_it_has_arrived(node: Node) -> None:
    data = os.urandom(9 * MIB + 5)
    node.put(NAME, 0, data[: 5 * MIB], len(data))
    assert node.listed() == {}
    with pytest.raises(PeerRefusedError):
        node.read(NAME, 0, 10, len(data))
    node.put(NAME, 5 * MIB, data[5 * MIB :], len(data))
    assert node.listed() == {(STEP, NAME.file): len(data)}
    assert node.read(NAME, 0, len(data), len(data)) == data
    assert node.read(NAME, 4 * MIB - 7, 4 * MIB + 9, len(data)) == data[4 * MIB - 7 : 4 * MIB + 9]
    assert node.used() == len(data)
    assert [path.stat().st_mode & 0o777 for path in node.root.rglob("data*")] == [0o600]


def test_file_on_a_failed_disk_is_listed_and_does_not_count_as_held(tmp_path: Path) -> None:
    node = Node(tmp_path, capacity="400MB", cache_dir=[str(tmp_path / "first"), str(tmp_path / "second")])
    with node.plane, closing(node.client), closing(node.replicas):
        node.put(NAME, 0, b"data", 4)
        with closing(Peers(access_to(node), RUN, count=1)) as peers:
            place = (STEP, NAME.file)
            peers.look()
            assert peers.held() == {place: 4}
            [holder] = [disk for disk in node.plane.node.open_disks if list(disk.store.directory.rglob(NAME.file))]
            holder.report(FailingDiskError("a disk: failed", next_step="replace it"))
            [peer] = peers.look()
            assert list(peer.files) == [place]
            assert peers.held() == {}
            node.put(NAME, 0, b"data", 4)  # now on the other disk, too
            peers.look()
            assert peers.held() == {place: 4}


def test_repeated_request_has_the_same_result(node: Node) -> None:
    data = os.urandom(3 * MIB)
    for start in (0, 0, MIB, MIB, 2 * MIB, 2 * MIB):
        node.put(NAME, start, data[start : start + MIB], len(data))
    assert node.read(NAME, 0, len(data), len(data)) == data
    assert node.used() == len(data)
    assert list(node.root.rglob(".*")) == []


def test_file_with_a_gap_is_refused(node: Node) -> None:
    node.put(NAME, 0, b"x" * MIB, 3 * MIB)
    with pytest.raises(PeerRefusedError) as caught:
        node.put(NAME, 2 * MIB, b"x" * MIB, 3 * MIB)
    assert caught.value.status == 409
    assert node.listed() == {}


def test_manifest_is_never_replaced_by_another_one(node: Node) -> None:
    name = NAME._replace(file="manifest.millrace")
    node.put(name, 0, b"first", 5)
    node.put(name, 0, b"first", 5)
    with pytest.raises(PeerRefusedError) as caught:
        node.put(name, 0, b"other", 5)
    assert caught.value.status == 409
    assert node.read(name, 0, 5, 5) == b"first"


def test_manifest_in_several_requests_is_never_taken_for_another_one(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that died may have left a manifest of the same step and size, whose files are not complete."""
    monkeypatch.setattr(peer_files, "_REQUEST_BYTES", 4)
    place = PeerStorage(Peer(node.client, node.member, RUN), STEP)
    name = NAME._replace(file="manifest.millrace")
    for _ in range(2):
        place.publish(name.file, b"of a dead job", replace=False)
    with pytest.raises(ObjectExistsError):
        place.publish(name.file, b"of this  job!", replace=False)
    assert node.read(name, 0, 13, 13) == b"of a dead job"


def test_damaged_piece_is_not_stored(node: Node) -> None:
    head = wire.build_replica_put(ReplicaPut(NAME, 0, 4, 4), host="x", token=TOKEN)
    with WireClient(node.plane.address) as client:
        client.socket.sendall(head + b"good" + wire.sum_of(b"Good"))
        answer, _ = client.answer()
    assert answer.status == 400
    assert node.listed() == {}
    assert list(node.root.rglob("*data*")) == []


def test_damaged_piece_of_a_replica_is_not_read(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.put(NAME, 0, b"good", 4)
    monkeypatch.setattr(wire, "sum_of", lambda data: b"12345678")
    with pytest.raises(PeerError, match="wrong bytes"):
        node.read(NAME, 0, 4, 4)


def test_unreadable_range_of_a_replica_leaves_the_rest_of_its_node_readable(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one bad sector of a file that the store has, too, would cost the files that only this node has."""
    other = NAME._replace(file="data-1.millrace")
    for name in (NAME, other):
        node.put(name, 0, name.file.encode(), len(name.file))
    bad = os.stat(node.root / RUN / STEP / NAME.file)
    pread = os.pread

    def read(descriptor: int, nbytes: int, offset: int) -> bytes:
        if os.path.samestat(os.fstat(descriptor), bad):
            raise OSError(errno.EIO, "Input/output error")
        return pread(descriptor, nbytes, offset)

    monkeypatch.setattr(os, "pread", read)
    peer = Peer(node.client, node.member, RUN)
    peer.look()
    place = PeerStorage(peer, STEP)
    with seen_events() as seen, pytest.raises(PeerError, match="wrong bytes"):
        place.read(place.stat(NAME.file), 0, 4)
    assert "cache.disk.left_out" in [event.name for event in seen]
    assert bytes(place.read(place.stat(other.file), 0, len(other.file))) == other.file.encode()
    peer.look()
    assert {name for _, name in peer.files} == {NAME.file, other.file}


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "TLS"])
def test_list_of_replicas_of_a_node_with_too_many_connections_is_requested_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_tls: bool
) -> None:
    """All ranks request it at once. A rank without it cannot restore the newest save."""
    monkeypatch.setattr(peer_files, "LIST_SECONDS", 60.0)
    tls = Authority(tmp_path, "ours").member("node") if with_tls else None
    node = Node(tmp_path / "cache", server={"max_connections": 1, "tls": tls})
    context = None if tls is None else tls_context(tls, ssl.PROTOCOL_TLS_CLIENT)
    turned_away, turn_away = threading.Event(), node.plane.server._turn_away

    def note(accepted: socket.socket) -> None:
        turn_away(accepted)
        turned_away.set()

    monkeypatch.setattr(node.plane.server, "_turn_away", note)
    with node.plane, closing(node.replicas), closing(PeerClient(token=TOKEN, tls=tls)) as client:
        peer = Peer(client, node.member, RUN)
        with WireClient(node.plane.address, context=context) as other:
            head = wire.build_replica_put(ReplicaPut(NAME, 0, 4, 4), host="x", token=TOKEN)
            other.socket.sendall(head)  # the body does not follow
            wait_until(lambda: any(not each.is_spare for each in node.plane.server._connections))
            look = threading.Thread(target=peer.look)
            look.start()
            assert turned_away.wait(120)
        look.join(120)
        assert peer.failure is None


def test_list_of_replicas_of_a_node_whose_disk_hangs_ends_at_the_deadline(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node reports that it works, for as long as the disk hangs."""
    goes_on = threading.Event()
    walk = replicas_module._walk

    def hanging(*arguments: Any) -> Any:
        goes_on.wait(30)
        return walk(*arguments)

    monkeypatch.setattr(peer_files, "LIST_SECONDS", 1.0)
    monkeypatch.setattr(replicas_module, "_walk", hanging)
    peer = Peer(node.client, node.member, RUN)
    peer.look()
    goes_on.set()
    assert isinstance(peer.failure, PeerSilentError)


def test_patient_look_finds_the_replicas_of_a_node_that_was_silent_at_first(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a restore, while the other nodes of the job are busy."""
    node.put(NAME, 0, b"data", 4)
    goes_on = threading.Event()
    walk, look = replicas_module._walk, Peer.look
    looks = itertools.count(1)

    def hanging(*arguments: Any) -> Any:
        if peer_files.LIST_SECONDS < 1:
            goes_on.wait(30)
        return walk(*arguments)

    def with_time_at_the_fourth(peer: Peer) -> None:
        monkeypatch.setattr(peer_files, "LIST_SECONDS", 30.0 if next(looks) == 4 else 0.3)
        look(peer)

    monkeypatch.setattr(replicas_module, "_walk", hanging)
    monkeypatch.setattr(Peer, "look", with_time_at_the_fourth)
    with closing(Peers(access_to(node), RUN, count=1)) as peers:
        assert peers.look() == []
        assert peers.look(patient=True) != []
        assert peers.held() == {(STEP, NAME.file): 4}
        goes_on.set()


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_client_without_the_token_is_refused(node: Node, method: str) -> None:
    node.put(NAME, 0, b"secret", 6)
    with WireClient(node.plane.address, token="another-token-of-tests") as client:
        answer, body = client.plain(method, NAME.path, Range="bytes=0-5", Millrace_Wire="1")
        assert (answer.status, body) == (401, b"")
    stranger = PeerClient(token="another-token-of-tests")
    for verb, path, body in (
        ("GET", RUN, None),
        ("DELETE", f"{RUN}/{STEP}", {}),
        ("POST", f"{RUN}/{STEP}", {"nbytes": 1}),
    ):
        with pytest.raises(PeerRefusedError) as caught:
            stranger.call(node.member.address, verb, f"{ROUTE}/{path}", body)
        assert caught.value.status == 401
    stranger.close()
    assert node.listed() == {(STEP, NAME.file): 6}


@pytest.mark.parametrize(
    "path",
    [
        f"{RUN}/{STEP}/..",
        f"{RUN}/{STEP}/.hidden",
        f"{RUN}/{STEP}/a%2Fb",
        f"{RUN}/{STEP}/a/b",
        f"{RUN}/{STEP}/",
        f"{RUN}/step-7/data",
        f"../{STEP}/data",
        f"{RUN}/{STEP}",
        f"{RUN}/{STEP}/{'x' * 300}",
    ],
)
def test_name_that_is_not_that_of_a_replica_is_refused(node: Node, path: str) -> None:
    with pytest.raises(WireError):
        wire.parse_replica_name(path, 3)
    with WireClient(node.plane.address) as client:
        answer, _ = client.plain("GET", wire.REPLICA_FILES_PATH + path, Range="bytes=0-5", Millrace_Wire="1")
        assert answer.status in (400, 404)


def test_deleted_files_free_their_bytes(node: Node) -> None:
    other = NAME._replace(checkpoint="step-000000000008")
    for name in (NAME, NAME._replace(file="manifest.millrace"), other):
        node.put(name, 0, b"x" * 1000, 1000)
    node.call("DELETE", f"{RUN}/{STEP}", {"files": ["manifest.millrace", "missing"]})
    assert sorted(node.listed()) == [(STEP, NAME.file), (other.checkpoint, NAME.file)]
    node.call("DELETE", f"{RUN}/{STEP}", {})
    assert node.used() == 1000
    node.call("DELETE", f"{RUN}/{other.checkpoint}", {"files": [NAME.file]})
    assert (node.listed(), node.used(), list(node.root.iterdir())) == ({}, 0, [])


def test_replicas_take_at_most_their_share_of_the_capacity(node: Node) -> None:
    share = int(REPLICA_SHARE * 400e6)
    with pytest.raises(PeerRefusedError) as caught:
        node.call("POST", f"{RUN}/{STEP}", {"nbytes": share + 1})
    assert caught.value.status == 507
    assert "a quarter of the capacity" in str(caught.value)
    node.call("POST", f"{RUN}/{STEP}", {"nbytes": share - MIB})
    with pytest.raises(PeerRefusedError):
        node.put(NAME._replace(checkpoint="step-000000000008"), 0, b"x" * (2 * MIB), 2 * MIB)
    node.call("POST", f"{RUN}/{STEP}", {"nbytes": 0})
    node.put(NAME._replace(checkpoint="step-000000000008"), 0, b"x" * (2 * MIB), 2 * MIB)


def test_replica_evicts_cached_data_and_stays_inside_the_capacity(tmp_path: Path) -> None:
    node = Node(tmp_path, capacity="40MB")
    with node.plane, closing(node.replicas):
        for number in range(9):
            node.plane.origin.put(f"b/{number}", os.urandom(4 << 20))
            node.plane.fill(f"b/{number}")
        assert node.used() > 32e6
        data = os.urandom(9 << 20)
        node.call("POST", f"{RUN}/{STEP}", {"nbytes": len(data)})
        for start in range(0, len(data), MIB):
            node.put(NAME, start, data[start : start + MIB], len(data))
            assert node.used() <= 40e6
        assert node.read(NAME, 0, len(data), len(data)) == data
        assert node.plane.node.counters()["evictions"] > 0
        # Further data is cached in what the replica leaves, and never in place of it.
        for number in range(9):
            node.plane.fill(f"b/{number}")
            assert node.used() <= 40e6
        assert node.read(NAME, 0, len(data), len(data)) == data
    node.client.close()


def test_replica_leaves_min_free(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    node = Node(tmp_path, capacity="80%", min_free=str(free - (64 << 20)))
    with node.plane, closing(node.replicas):
        with pytest.raises(PeerRefusedError) as caught:
            node.call("POST", f"{RUN}/{STEP}", {"nbytes": 4 << 30})
        assert caught.value.status == 507
        assert "min_free" in str(caught.value)
    node.client.close()


def test_restarted_node_has_its_replicas_and_counts_them(node: Node) -> None:
    node.put(NAME, 0, b"x" * 1000, 1000)
    node.disk.store.index.set_replica_bytes(0)  # a rebuilt index has no number
    again = ReplicaFiles(node.plane.node)
    assert (again.nbytes, node.used()) == (1000, 1000)


def test_rest_of_a_job_that_does_not_return_is_deleted(node: Node) -> None:
    node.put(NAME, 0, b"x" * 1000, 1000)
    node.put(NAME._replace(file="data-1.millrace"), 0, b"x" * 1000, 2000)
    ReplicaFiles(node.plane.node, wall_clock=lambda: time.time() + PART_SECONDS + 60)
    assert [path.name for path in node.root.rglob("*data*")] == [NAME.file]
    ReplicaFiles(node.plane.node, wall_clock=lambda: time.time() + IDLE_SECONDS - 60)
    assert node.listed() == {(STEP, NAME.file): 1000}
    with seen_events() as seen:
        later = ReplicaFiles(node.plane.node, wall_clock=lambda: time.time() + IDLE_SECONDS + 60)
    assert [event.name for event in seen] == ["cluster.replicas.expired"]
    assert (later.nbytes, node.used(), node.listed()) == (0, 0, {})


def test_rest_of_a_job_that_does_not_return_is_deleted_by_a_running_node(node: Node) -> None:
    node.put(NAME, 0, b"x" * 1000, 1000)
    maintenance.run_tasks()
    assert node.used() == 1000
    node.ahead_seconds = IDLE_SECONDS + 60
    maintenance.run_tasks()
    assert (node.replicas.nbytes, node.used(), node.listed()) == (0, 0, {})


def test_reservation_is_released_with_the_replica(node: Node) -> None:
    call = Call(path_rest=f"{RUN}/{STEP}", query={}, body={"nbytes": 90_000_000})
    node.replicas.reserve(call)
    node.replicas.reserve(call)  # not added up
    with pytest.raises(DiskFullError):
        node.replicas.reserve(Call(path_rest=f"{RUN}/step-000000000008", query={}, body={"nbytes": 90_000_000}))
    node.put(NAME, 0, b"x" * MIB, MIB)
    node.replicas.delete(Call(path_rest=f"{RUN}/{STEP}", query={}, body={}))
    node.replicas.reserve(Call(path_rest=f"{RUN}/step-000000000008", query={}, body={"nbytes": 90_000_000}))


@pytest.mark.parametrize("body", [None, {}, {"nbytes": -1}, {"nbytes": True}, {"nbytes": "1"}, [1]])
def test_malformed_reservation_is_refused(node: Node, body: Any) -> None:
    with pytest.raises(PeerRefusedError) as caught:
        node.call("POST", f"{RUN}/{STEP}", body)
    assert caught.value.status == 400
