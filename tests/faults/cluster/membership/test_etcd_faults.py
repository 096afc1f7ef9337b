"""etcd is killed, wiped, silent, disconnected: views stay, members return, no thread dies, and requests are bounded."""

import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import pytest
from tests.support.etcd import EtcdServer

from millrace.cluster.membership import Member, MemberState, View
from millrace.cluster.membership.etcd import EtcdMembers
from millrace.cluster.membership.etcd_gateway import EtcdDownError, encode, prefix_range
from millrace.testing.conformance.members import eventually, wait_for
from millrace.testing.process import free_ports

pytestmark = pytest.mark.etcd

LEASE = 4.0
LONG_LEASE = 12.0
"""Where no member may be removed, although a busy machine may run none of its threads for some seconds."""
A = Member(id="a", address="127.0.0.1:1", weight=1e9)
B = Member(id="b", address="127.0.0.1:2", weight=2e9)
BOTH = View.of([A, B])

Connect = Callable[..., EtcdMembers]
_clusters = count()


@pytest.fixture
def connect() -> Iterator[Connect]:
    opened: list[EtcdMembers] = []
    cluster = f"faults-{next(_clusters)}"

    def make(address: str, *more: str, lease: float = LEASE) -> EtcdMembers:
        opened.append(EtcdMembers([address, *more], cluster=cluster, lease_seconds=lease))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


class Views:
    """Every view of a membership, from its first on, and whether one of them lacked a member."""

    def __init__(self, members: EtcdMembers) -> None:
        self.seen = [members.view()]
        members.watch(self.seen.append)

    def always_had(self, *ids: str) -> bool:
        return all(view.member(member_id) is not None for view in self.seen for member_id in ids)


def two_and_a_client(
    connect: Connect, *addresses: str, lease: float = LEASE
) -> tuple[EtcdMembers, EtcdMembers, EtcdMembers]:
    a, b, client = (connect(*addresses, lease=lease) for _ in range(3))
    a.join(A)
    b.join(B)
    for each in (a, b, client):
        wait_for(each, A, B)
    return a, b, client


def threads_of(*memberships: EtcdMembers) -> list[threading.Thread]:
    threads = [thread for each in memberships for thread in (each._watcher, each._registration.thread)]
    return [thread for thread in threads if thread is not None]


def all_have_both(*memberships: EtcdMembers) -> bool:
    """Whether etcd itself has both members: views alone may only remember them."""
    return all(
        each._roster.is_listed("a") and each._roster.is_listed("b") and not each._in_outage for each in memberships
    )


@pytest.mark.slow
def test_restart_of_etcd_with_its_data_changes_no_view(own_etcd: EtcdServer, connect: Connect) -> None:
    everybody = two_and_a_client(connect, own_etcd.address, lease=LONG_LEASE)
    views = [Views(each) for each in everybody]
    threads = threads_of(*everybody)
    for _ in range(2):
        own_etcd.kill()
        own_etcd.start()
        eventually(lambda: all_have_both(*everybody))
    assert [each.view() for each in everybody] == [BOTH] * 3
    assert all(view.seen == [BOTH] for view in views)
    assert len(threads) == 5
    assert all(thread.is_alive() for thread in threads)
    # They still receive changes at once, and not only with the next read of all members.
    everybody[0].join(Member(id="a", address="127.0.0.1:1", state=MemberState.LEAVING))
    eventually(lambda: everybody[2].view().member("a") != A)
    everybody[0].leave()
    wait_for(everybody[2], B)


@pytest.mark.slow
def test_wiped_etcd_is_filled_again(own_etcd: EtcdServer, connect: Connect) -> None:
    everybody = two_and_a_client(connect, own_etcd.address, lease=LONG_LEASE)
    views = [Views(each) for each in everybody]
    own_etcd.kill()
    own_etcd.wipe()
    own_etcd.start()
    eventually(lambda: all_have_both(*everybody))
    assert all(view.always_had("a", "b") for view in views)
    late = connect(own_etcd.address, lease=LONG_LEASE)
    wait_for(late, A, B)
    # The new leases are renewed as the old ones were.
    leases = [each._registration._lease for each in everybody[:2]]
    time.sleep(1.5 * LONG_LEASE)
    assert late.view() == BOTH
    assert [each._registration._lease for each in everybody[:2]] == leases


@pytest.mark.slow
def test_member_that_died_with_a_wiped_etcd_is_removed(own_etcd: EtcdServer, connect: Connect) -> None:
    a, b, client = two_and_a_client(connect, own_etcd.address)
    own_etcd.kill()
    own_etcd.wipe()
    b.close()
    own_etcd.start()
    wait_for(client, A)
    wait_for(a, A)


@pytest.mark.slow
def test_views_without_etcd_stay(own_etcd: EtcdServer, connect: Connect) -> None:
    everybody = two_and_a_client(connect, own_etcd.address)
    views = [Views(each) for each in everybody]
    own_etcd.kill()
    before, began = [each.gateway.requests for each in everybody], time.monotonic()
    time.sleep(1.5 * LEASE)
    assert [view.seen for view in views] == [[BOTH]] * 3
    # A few a second while it is down, and no more.
    most = 5 * (time.monotonic() - began)
    assert all(1 <= each.gateway.requests - old <= most for each, old in zip(everybody, before, strict=True))
    # Changes during the outage are published afterwards.
    changed = Member(id="a", address="127.0.0.1:9", weight=3e9)
    everybody[0].join(changed)
    own_etcd.start()
    for each in everybody:
        wait_for(each, changed, B)


@pytest.mark.slow
def test_silence_of_etcd_beyond_the_lease_removes_no_member(own_etcd: EtcdServer, connect: Connect) -> None:
    everybody = two_and_a_client(connect, own_etcd.address, lease=LONG_LEASE)
    views = [Views(each) for each in everybody]
    threads = threads_of(*everybody)
    own_etcd.pause()
    time.sleep(1.5 * LONG_LEASE)
    own_etcd.go_on()
    eventually(lambda: all_have_both(*everybody))
    time.sleep(LONG_LEASE)
    assert [each.view() for each in everybody] == [BOTH] * 3
    assert all(view.always_had("a", "b") for view in views)
    assert all(thread.is_alive() for thread in threads)


@pytest.mark.slow
def test_member_that_was_disconnected_returns(etcd: EtcdServer, connect: Connect) -> None:
    with Forward(etcd.address) as forward:
        cut, b, client = connect(forward.address), connect(etcd.address), connect(etcd.address)
        cut.join(A)
        b.join(B)
        wait_for(client, A, B)
        wait_for(cut, A, B)
        forward.cut()
        wait_for(client, B)  # etcd itself works, so its removal takes effect
        assert cut.view() == BOTH
        forward.mend()
        wait_for(client, A, B)
        wait_for(cut, A, B)


@pytest.mark.slow
def test_member_whose_lease_expired_counts_an_absence_that_its_own_view_never_shows(
    etcd: EtcdServer, connect: Connect
) -> None:
    with Forward(etcd.address) as forward:
        cut, client = connect(forward.address), connect(etcd.address)
        cut.join(A)
        wait_for(client, A)
        wait_for(cut, A)
        views, before = Views(cut), cut.absences()
        client.join(B)  # the last member would stay
        wait_for(client, A, B)
        time.sleep(1.5 * LEASE)
        assert cut.absences() == before
        forward.cut()
        wait_for(client, B)
        forward.mend()
        wait_for(client, A, B)
        assert cut.absences() > before
        assert views.always_had("a")


@pytest.mark.slow
def test_silent_connections_are_replaced(etcd: EtcdServer, connect: Connect) -> None:
    """The connection is neither reset nor closed, as with a pulled cable."""
    with Forward(etcd.address) as forward:
        cut, b = connect(forward.address), connect(etcd.address)
        cut.join(A)
        b.join(B)
        wait_for(cut, A, B)
        forward.freeze()
        wait_for(b, B)
        b.join(Member(id="b", address="127.0.0.1:2", weight=7.0))
        forward.mend()
        wait_for(cut, A, Member(id="b", address="127.0.0.1:2", weight=7.0))
        wait_for(b, A, Member(id="b", address="127.0.0.1:2", weight=7.0))


@pytest.mark.slow
def test_dead_endpoint_is_replaced_by_another(etcd: EtcdServer, connect: Connect) -> None:
    (nobody,) = free_ports(1)
    with Forward(etcd.address) as forward:
        everybody = two_and_a_client(connect, f"127.0.0.1:{nobody}", forward.address, etcd.address)
        forward.freeze()
        everybody[0].join(Member(id="a", address="127.0.0.1:1", weight=5.0))
        for each in everybody:
            wait_for(each, Member(id="a", address="127.0.0.1:1", weight=5.0), B)
        eventually(lambda: all_have_both(*everybody))


def test_revoked_lease_is_granted_again(etcd: EtcdServer, connect: Connect) -> None:
    a, b, client = two_and_a_client(connect, etcd.address)
    lease = a._registration._lease
    client.gateway.call("/v3/lease/revoke", {"ID": lease})
    eventually(lambda: a._registration._lease not in (lease, None))
    for each in (a, b, client):
        wait_for(each, A, B)


def test_removed_key_is_written_again(etcd: EtcdServer, connect: Connect) -> None:
    from millrace.cluster.membership.etcd_gateway import prefix_range

    a, b, client = two_and_a_client(connect, etcd.address)
    client.gateway.call("/v3/kv/deleterange", prefix_range(client._prefix))
    eventually(lambda: all_have_both(a, b, client))


def test_compaction_of_watched_revisions_is_handled(etcd: EtcdServer, connect: Connect) -> None:
    with Forward(etcd.address) as forward:
        a, cut = connect(etcd.address), connect(forward.address)
        a.join(A)
        wait_for(cut, A)
        forward.cut()
        for weight in range(2, 20):
            a.join(Member(id="a", address="127.0.0.1:1", weight=float(weight)))
        a.gateway.call("/v3/kv/compaction", {"revision": str(a._registration._published_at)})
        forward.mend()
        wait_for(cut, Member(id="a", address="127.0.0.1:1", weight=19.0))
    # A watch of compacted revisions: etcd cancels it, and everything is read again.
    with a.gateway.stream("/v3/watch", {"create_request": {"key": "YQ==", "start_revision": "1"}}) as stream:
        answers = [stream.next(120), stream.next(120)]
    assert any(answer is not None and answer["result"].get("canceled") for answer in answers)


@pytest.mark.slow
def test_member_changes_whose_events_were_lost_are_found_by_the_next_read(etcd: EtcdServer, connect: Connect) -> None:
    a, b, client = two_and_a_client(connect, etcd.address)
    # As if the events had been lost on the way.
    for forget in (
        lambda: client._roster.replace({"a": A}, 0.0),
        lambda: client._roster.put(Member(id="a", address="127.0.0.1:1", weight=9.0)),
    ):
        with client._lock:
            forget()
            client._revision = 1
        eventually(lambda: client._revision > 1)
        wait_for(client, A, B)
    with client._lock:
        client._roster.put(Member(id="z", address="127.0.0.1:3"))
        client._keys += 1
    eventually(lambda: not client._roster.is_listed("z"))
    requests, started = client.gateway.requests, time.monotonic()
    time.sleep(1.5 * LEASE)
    leases = (time.monotonic() - started) / LEASE  # on a busy machine, more
    assert client.gateway.requests - requests <= 4 * leases + 1  # then it sends the small check only
    assert [each.view() for each in (a, b)] == [BOTH] * 2


@pytest.mark.slow
def test_busy_etcd_and_quiet_cluster_need_few_requests(etcd: EtcdServer, connect: Connect) -> None:
    everybody = two_and_a_client(connect, etcd.address)
    before, started = [each.gateway.requests for each in everybody], time.monotonic()
    written = asked = 0
    while written < 200:  # others use the same etcd
        asked += 1
        try:
            everybody[2].gateway.call("/v3/kv/put", {"key": "b3RoZXI=", "value": "eA=="})
        except EtcdDownError:  # the disk that it flushes to is busy with other tests
            assert asked < 220
        else:
            written += 1
    time.sleep(LEASE)
    spent = [each.gateway.requests - old for each, old in zip(everybody, before, strict=True)]
    leases = (time.monotonic() - started) / LEASE
    assert spent[0] <= 6 * leases + 6
    assert spent[1] <= 6 * leases + 6
    assert spent[2] - asked <= 4 * leases + 4


@pytest.mark.slow
def test_leave_without_etcd_returns(own_etcd: EtcdServer, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    a, _, client = two_and_a_client(connect, own_etcd.address)
    own_etcd.kill()
    with caplog.at_level(logging.WARNING, "millrace"):
        a.leave()
    assert "its lease expires" in caplog.text
    own_etcd.start()
    wait_for(client, B)


def test_leave_after_a_short_outage_is_seen_as_one(etcd: EtcdServer, connect: Connect) -> None:
    """Otherwise the last member would stay for a lease."""
    with Forward(etcd.address) as forward:
        a, client = connect(forward.address, lease=120.0), connect(etcd.address, lease=120.0)
        a.join(A)
        wait_for(client, A)
        forward.cut()
        a.join(replace(A, state=MemberState.LEAVING))
        with a._registration._requesting:  # it does not publish this later
            forward.mend()
            a.leave()
        eventually(lambda: client.view() == View(()), seconds=60.0)


MEMBER = """
import sys, time
from millrace.cluster.membership import Member
from millrace.cluster.membership.etcd import EtcdMembers
from millrace.cluster.membership.etcd_gateway import encode
members = EtcdMembers([sys.argv[1]], cluster=sys.argv[2], lease_seconds=float(sys.argv[3]))
members.join(Member(id="dying", address="127.0.0.1:3"))
print("joined", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_killed_process_is_removed_after_its_lease(etcd: EtcdServer, connect: Connect) -> None:
    client = connect(etcd.address)
    client.join(A)
    cluster = client._prefix.split("/")[2]
    process = subprocess.Popen(
        [sys.executable, "-c", MEMBER, etcd.address, cluster, str(LEASE)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "joined\n"
        wait_for(client, A, Member(id="dying", address="127.0.0.1:3"))
    finally:
        process.kill()
        process.communicate()
    wait_for(client, A)


class Forward:
    """A port before another, whose connections can be cut, or fall silent."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._state = "open"

    def __enter__(self) -> "Forward":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def cut(self) -> None:
        """End all connections, and refuse new ones."""
        with self._lock:
            self._state = "cut"
            self._end_all()

    def freeze(self) -> None:
        """Pass nothing on any more; new connections are taken, and as silent."""
        with self._lock:
            self._state = "frozen"

    def mend(self) -> None:
        """As at first; the connections from before are lost."""
        with self._lock:
            self._state = "open"
            self._end_all()

    def _end_all(self) -> None:
        for pair in self._pairs:
            for one in pair:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        self._pairs = []

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            with self._lock:
                if self._state == "cut":
                    client.close()
                    continue
                server = socket.create_connection(self._target)
                self._pairs.append((client, server))
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError), source:
            while data := source.recv(65536):
                if self._state == "frozen":
                    continue  # lost, as is all after it
                sink.sendall(data)
            if self._state == "open":
                sink.shutdown(socket.SHUT_RDWR)


def test_members_with_malformed_values_below_the_prefix_are_followed(etcd: EtcdServer, connect: Connect) -> None:
    client, a, b = (connect(etcd.address) for _ in range(3))
    values = [
        b"no json",
        b"[" * 100_000,
        b'{"id": "%s", "address": "x:1", "weight": 1, "state": "here", "wire": Infinity}',
        b'{"id": "%s", "address": "x:1", "weight": 1' + b"0" * 400 + b', "state": "here", "wire": 1}',
        b"\xff",
    ]
    for number, value in enumerate(values):
        name = f"odd-{number}"
        text = value.replace(b"%s", name.encode())
        a.gateway.call("/v3/kv/put", {"key": encode(f"{a._prefix}{name}"), "value": encode(text)})
    a.join(A)
    b.join(B)
    wait_for(client, A, B)
    late = connect(etcd.address)
    wait_for(late, A, B)


def test_member_of_an_etcd_that_is_full_leaves_at_once(own_etcd: EtcdServer, connect: Connect) -> None:
    a, client = connect(own_etcd.address), connect(own_etcd.address)
    a.join(A)
    wait_for(client, A)
    a.gateway.call("/v3/maintenance/alarm", {"action": "ACTIVATE", "alarm": "NOSPACE"})
    with pytest.raises(EtcdDownError, match="space"):
        client.gateway.call("/v3/kv/put", {"key": encode("key"), "value": encode("value")})
    a.leave()
    assert not client.gateway.call("/v3/kv/range", prefix_range(client._prefix)).get("kvs")
