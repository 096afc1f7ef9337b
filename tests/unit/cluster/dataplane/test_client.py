"""The client of the data plane, against a server that simulates failures of a peer."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.clocks import Clock
from tests.support.scripted_peer import DATA, SIZE, TOKEN, WHAT, Handle, Peer, Visit, framed, head_of, honest, silent
from tests.support.waiting import wait_until

from millrace.cluster.dataplane import connections
from millrace.cluster.dataplane.client import PeerClient
from millrace.cluster.dataplane.wire import (
    PROCESSING,
    SUM_BYTES,
    GetMode,
    ObjectDescription,
    build_framed_head,
    build_response,
    error_body,
    pieces,
    sum_of,
)
from millrace.config import Tls
from millrace.errors import (
    ConfigurationError,
    ObjectChangedError,
    ObjectNotFoundError,
    PeerError,
    PeerRefusedError,
    PeerSilentError,
)
from millrace.events import Event
from millrace.store.records import BLOCK_BYTES

SHORT = 0.4  # seconds; only for peers that are meant to be silent


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def make(handle: Handle, context: ssl.SSLContext | None = None) -> Peer:
        made.append(Peer(handle, context))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def client() -> Iterator[PeerClient]:
    made = PeerClient(token=TOKEN)
    yield made
    made.close()


def read(client: PeerClient, peer: Peer, start: int = 10, stop: int = BLOCK_BYTES + 10, **options: object) -> bytes:
    options = {"deadline": 60.0, **options}  # a busy machine may delay a peer that responds
    return bytes(client.read(peer.member(), WHAT, (start, stop), mode=GetMode.FETCH, **options).data)  # type: ignore[arg-type]


def idle_connections(client: PeerClient) -> int:
    return sum(map(len, client._pool._idle.values()))


# --- what works -----------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [(0, 1), (5, 100), (10, BLOCK_BYTES + 10), (0, SIZE), (SIZE - 1, SIZE)])
def test_client_read_of_a_range_returns_its_bytes(
    client: PeerClient, peer: Callable[..., Peer], span: tuple[int, int]
) -> None:
    assert read(client, peer(honest), *span) == DATA[slice(*span)]


def test_connection_after_a_response_is_reused(client: PeerClient, peer: Callable[..., Peer]) -> None:
    one = peer(honest)
    for start in range(20):
        assert read(client, one, start, start + 1000) == DATA[start : start + 1000]
    assert len(one.visits) == 1
    assert one.requests == 20
    assert idle_connections(client) == 1


def test_read_of_several_blocks_is_one_request(client: PeerClient, peer: Callable[..., Peer]) -> None:
    one = peer(honest)
    got = client.read(one.member(), WHAT, (BLOCK_BYTES - 3, BLOCK_BYTES + 7), mode=GetMode.CACHED, deadline=60.0)
    assert got.data == DATA[BLOCK_BYTES - 3 : BLOCK_BYTES + 7]
    assert one.requests == 1


def test_request_contains_its_headers(client: PeerClient, peer: Callable[..., Peer]) -> None:
    seen: list[str] = []

    def handle(visit: Visit) -> None:
        while request := visit.request():
            seen.append(request)
            body = framed(request)
            visit.send(head_of(body, ("Millrace-Hot", "1")), body)

    one = peer(handle)
    got = client.read(one.member(), WHAT, (0, 5), mode=GetMode.FETCH, rank=2, deadline=60.0)
    assert got.hot
    for line in ("Millrace-Rank: 2", "Millrace-Ask: fetch"):
        assert f"\r\n{line}\r\n" in seen[0]
    assert f"Authorization: Bearer {TOKEN}" in seen[0]
    assert WHAT.to_header() in seen[0]


def test_peer_that_sends_interim_responses_is_waited_for(
    client: PeerClient, peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(connections, "_CHECKS", 600)  # it looks at the clock every tenth of a second

    def handle(visit: Visit) -> None:
        body = framed(visit.request())
        for _ in range(10):
            clock.now += 40.0  # all of it is longer than the deadline
            time.sleep(0.15)
            visit.send(PROCESSING)
            (connection,) = client._pool._open
            wait_until(lambda connection=connection: connection._last_head == clock.now)  # type: ignore[misc]
        visit.send(head_of(body), body)
        visit.wait_for_end()

    assert read(client, peer(handle), 0, 9, deadline=60.0) == DATA[:9]


def test_connections_of_many_threads_are_separate(client: PeerClient, peer: Callable[..., Peer]) -> None:
    one, failed = peer(honest), []

    def run(number: int) -> None:
        for start in range(0, 200, 10):
            if read(client, one, start + number, BLOCK_BYTES + start) != DATA[start + number : BLOCK_BYTES + start]:
                failed.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(one.visits) <= 6


def test_connections_above_the_limit_are_closed(client: PeerClient, peer: Callable[..., Peer]) -> None:
    all_connected = threading.Barrier(40)

    def handle(visit: Visit) -> None:
        body = framed(visit.request())
        all_connected.wait(60)
        visit.send(head_of(body), body)
        honest(visit)

    one = peer(handle)
    with ThreadPoolExecutor(40) as threads:
        readings = list(threads.map(lambda _: read(client, one, 0, 100), range(40)))
    assert readings == [DATA[:100]] * 40
    assert len(one.visits) == 40
    assert idle_connections(client) == 32


def test_connections_to_removed_peer_are_closed(client: PeerClient, peer: Callable[..., Peer]) -> None:
    """A restarted node may have another address: connections to the old one are closed."""
    for _ in range(3):
        read(client, peer(honest))
    assert idle_connections(client) == 3
    for kept in client._pool._idle.values():
        for each in kept:
            each.idle_since -= 100
    client._pool._next_sweep = 0.0
    read(client, peer(honest))
    assert idle_connections(client) == 1
    assert len(client._pool._idle) == 1


@pytest.mark.parametrize(("start", "size"), [(0, SIZE), (10, SIZE + 1)], ids=["range", "object"])
def test_response_to_another_request_is_refused(
    client: PeerClient, peer: Callable[..., Peer], start: int, size: int
) -> None:
    """It has the requested length and right checksums."""

    def handle(visit: Visit) -> None:
        visit.request()
        data = DATA[start : start + 100]
        visit.send(build_framed_head((start, start + 100), size), data + sum_of(data))

    with pytest.raises(PeerError, match="a wrong range"):
        read(client, peer(handle), 10, 110)
    assert idle_connections(client) == 0


# --- connections that end -------------------------------------------------------------------------


def once(visit: Visit) -> None:
    body = framed(visit.request())
    visit.send(head_of(body), body)


def test_connection_closed_while_idle_is_replaced(client: PeerClient, peer: Callable[..., Peer]) -> None:
    one = peer(once)
    for _ in range(3):
        assert read(client, one) == DATA[10 : BLOCK_BYTES + 10]
    assert len(one.visits) == 3


def test_connection_closed_during_reuse_is_replaced_once(client: PeerClient, peer: Callable[..., Peer]) -> None:
    def handle(visit: Visit) -> None:
        body = framed(visit.request())
        visit.send(head_of(body), body)
        visit.request()  # it receives the next request without a response

    one = peer(handle)
    for _ in range(3):
        assert read(client, one) == DATA[10 : BLOCK_BYTES + 10]
    assert len(one.visits) == 3
    assert one.requests == 5


def test_connection_closed_when_new_is_not_replaced(client: PeerClient, peer: Callable[..., Peer]) -> None:
    one = peer(lambda visit: visit.request() and None)
    with pytest.raises(PeerSilentError):
        read(client, one)
    assert one.requests == 1


def test_connection_closed_inside_a_response_is_not_replaced(client: PeerClient, peer: Callable[..., Peer]) -> None:
    def handle(visit: Visit) -> None:
        body = framed(visit.request())
        visit.send(head_of(body), body)
        visit.request()
        visit.send(head_of(body), body[:1000])

    one = peer(handle)
    read(client, one)
    with pytest.raises(PeerSilentError):
        read(client, one)
    assert len(one.visits) == 1


# --- peers on bad days ----------------------------------------------------------------------------


def _reset(visit: Visit) -> None:
    visit.request()
    visit.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def _half(visit: Visit) -> None:
    body = framed(visit.request())
    visit.send(head_of(body), body[: len(body) // 2])


def _half_then_silent(visit: Visit) -> None:
    _half(visit)
    visit.wait_for_end()


def _dripping_body(visit: Visit) -> None:
    body = framed(visit.request())
    visit.send(head_of(body))
    for byte in body:
        visit.send(bytes([byte]))
        time.sleep(SHORT / 10)


def _dripping_head(visit: Visit) -> None:
    visit.request()
    visit.send(b"HTTP/1.1 206 Partial Content\r\nX: ")
    while True:
        visit.send(b"x")
        time.sleep(SHORT / 10)


def _endless_head(visit: Visit) -> None:
    visit.request()
    visit.send(b"HTTP/1.1 206 Partial Content\r\n")
    while True:
        visit.send(b"X-Y: z\r\n" * 1000)


def _garbage(visit: Visit) -> None:
    visit.request()
    visit.send(b"\0\1\2 no HTTP at all\r\n\r\n")
    visit.wait_for_end()


def _other_length(visit: Visit) -> None:
    body = framed(visit.request()) + b"x"
    visit.send(head_of(body), body)
    visit.wait_for_end()


def _no_length(visit: Visit) -> None:
    body = framed(visit.request())
    visit.send(build_response(206), body)
    visit.wait_for_end()


def _wrong_sums(visit: Visit) -> None:
    while request := visit.request():
        body = framed(request, wrong=True)
        visit.send(head_of(body), body)


@pytest.mark.parametrize(
    ("handle", "error"),
    [
        (silent, PeerSilentError),
        (_reset, PeerSilentError),
        (_half, PeerSilentError),
        (_half_then_silent, PeerSilentError),
        (_dripping_body, PeerSilentError),
        (_dripping_head, PeerSilentError),
        (_endless_head, PeerError),
        (_garbage, PeerError),
        (_other_length, PeerError),
        (_no_length, PeerError),
        (_wrong_sums, PeerError),
    ],
)
def test_peer_failure_raises_and_closes_the_connection(
    client: PeerClient, peer: Callable[..., Peer], handle: Handle, error: type[PeerError]
) -> None:
    with pytest.raises(error) as caught:
        read(client, peer(handle), deadline=SHORT)
    assert TOKEN not in str(caught.value) + repr(caught.value)
    assert idle_connections(client) == 0


def test_peer_without_a_listener_is_silent(client: PeerClient, peer: Callable[..., Peer]) -> None:
    one = peer(honest)
    one.close()
    with pytest.raises(PeerSilentError):
        read(client, one)


def test_wrong_bytes_are_requested_once_more(
    client: PeerClient, peer: Callable[..., Peer], events: list[Event]
) -> None:
    requests: list[str] = []

    def handle(visit: Visit) -> None:
        while request := visit.request():
            requests.append(request)
            body = framed(request, wrong="Millrace-Verify" not in request)
            visit.send(head_of(body), body)

    member = peer(handle)
    assert read(client, member) == DATA[10 : BLOCK_BYTES + 10]
    assert len(requests) == 2
    assert [(event.name, event.subject, event.nbytes) for event in events] == [
        ("peer.corrupt", member.address, BLOCK_BYTES - 10),
    ]


def test_wrong_bytes_twice_raise(client: PeerClient, peer: Callable[..., Peer], events: list[Event]) -> None:
    one = peer(_wrong_sums)
    with pytest.raises(PeerError, match="wrong bytes"):
        read(client, one)
    assert one.requests == 2
    assert [event.name for event in events] == ["peer.corrupt"] * 2


def _mutated(answer: bytes, source: random.Random) -> bytes:
    """An answer with something wrong somewhere, mostly in its head."""
    broken = bytearray(answer)
    for _ in range(source.randint(1, 3)):
        place = source.randrange(min(len(broken), 200) if source.random() < 0.8 else len(broken))
        match source.randrange(5):
            case 0:
                broken[place] = source.randrange(256)
            case 1:
                del broken[place : place + source.randint(1, 9)]
            case 2:
                broken[place:place] = source.randbytes(source.randint(1, 9))
            case 3:
                del broken[place + 1 :]
            case 4:
                broken[place:place] = broken[: source.randint(1, 200)]
    return bytes(broken)


def test_random_responses_return_the_right_bytes_or_raise(client: PeerClient, peer: Callable[..., Peer]) -> None:
    source, outcomes = random.Random(11), []

    def handle(visit: Visit) -> None:
        body = framed(visit.request())
        visit.send(_mutated(build_framed_head((0, 3000), SIZE) + body, source))

    one = peer(handle)
    for _ in range(400):
        try:
            outcomes.append(read(client, one, 0, 3000) == DATA[:3000])
        except (PeerError, ObjectChangedError, ObjectNotFoundError) as error:
            outcomes.append(type(error).__name__)
    assert False not in outcomes
    assert len(set(outcomes)) >= 3  # some mutations change nothing that matters


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, PeerRefusedError),
        (404, PeerRefusedError),
        (409, ObjectChangedError),
        (410, ObjectNotFoundError),
        (421, PeerRefusedError),
        (424, PeerRefusedError),
        (503, PeerRefusedError),
    ],
)
def test_refusal_raises_its_status(
    client: PeerClient, peer: Callable[..., Peer], status: int, error: type[Exception]
) -> None:
    def handle(visit: Visit) -> None:
        while visit.request():
            body = error_body("not today", "some-code")
            fields = [("Millrace-Lease", "1")] if status == 424 else []
            visit.send(build_response(status, fields, length=len(body)), body)

    one = peer(handle)
    for _ in range(2):
        with pytest.raises(error) as caught:
            read(client, one)
        if isinstance(caught.value, PeerRefusedError):
            assert (caught.value.status, caught.value.reason) == (status, "some-code")
            assert caught.value.has_lease == (status == 424)
            assert "not today" in str(caught.value)
    assert len(one.visits) == 1  # a refusal is an answer: the connection is good


def test_read_from_a_peer_of_another_wire_version_is_refused(client: PeerClient, peer: Callable[..., Peer]) -> None:
    one = peer(honest)
    with pytest.raises(PeerRefusedError, match="wire version 3"):
        client.read(one.member(3), WHAT, (0, 1), mode=GetMode.CACHED)
    assert not one.visits


# --- other requests -------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "kept"), [(204, True), (507, False)])
def test_put_sends_whole_blocks(client: PeerClient, peer: Callable[..., Peer], status: int, kept: bool) -> None:
    given: list[bytes] = []

    def handle(visit: Visit) -> None:
        request = visit.request()
        length = int(re.search(r"Content-Length: (\d+)", request)[1])  # type: ignore[index]
        body = b""
        while len(body) < length:
            body += visit.connection.recv(1 << 20)
        given.append(body)
        visit.send(build_response(status, length=None if status == 204 else 0))
        visit.wait_for_end()

    assert client.put(peer(handle).member(), WHAT, 2 * BLOCK_BYTES, DATA[2 * BLOCK_BYTES :], deadline=60.0) is kept
    assert given == [
        b"".join(DATA[first:end] + sum_of(DATA[first:end]) for first, end in pieces(2 * BLOCK_BYTES, SIZE))
    ]


def test_command_returns_its_result(client: PeerClient, peer: Callable[..., Peer]) -> None:
    seen: list[str] = []

    def handle(visit: Visit) -> None:
        while request := visit.request():
            seen.append(request)
            if "POST" in request:
                visit.connection.recv(7)
            body = error_body("no such load", "usage") if "absent" in request else b'{"a": [1]}'
            visit.send(build_response(400 if "absent" in request else 200, length=len(body)), body)

    one = peer(handle)
    assert client.call(one.address, "GET", "/v1/status", query={"after": "x y"}, deadline=60.0) == {"a": [1]}
    assert client.call(one.address, "POST", "/v1/load", {"a": 1}, deadline=60.0) == {"a": [1]}
    with pytest.raises(PeerRefusedError, match="no such load") as caught:
        client.call(one.address, "GET", "/v1/absent", deadline=60.0)
    assert (caught.value.status, caught.value.reason) == (400, "usage")
    assert "GET /v1/status?after=x+y HTTP/1.1" in seen[0]


@pytest.mark.parametrize("body", [b"no JSON", b"{"])
def test_command_with_a_malformed_response_raises(client: PeerClient, peer: Callable[..., Peer], body: bytes) -> None:
    one = peer(lambda visit: visit.request() and visit.send(build_response(200, length=len(body)), body))
    with pytest.raises(PeerError, match="not JSON"):
        client.call(one.address, "GET", "/v1/status", deadline=60.0)


def test_response_with_a_too_large_body_is_refused(client: PeerClient, peer: Callable[..., Peer]) -> None:
    one = peer(lambda visit: visit.request() and visit.send(build_response(200, length=1 << 40)))
    with pytest.raises(PeerError, match="more than"):
        client.call(one.address, "GET", "/v1/status", deadline=60.0)


# --- processes and security -----------------------------------------------------------------------


def test_client_in_forked_child_opens_new_connections(client: PeerClient, peer: Callable[..., Peer]) -> None:
    one = peer(honest)
    read(client, one)
    pid = os.fork()
    if pid == 0:
        good = read(client, one) == DATA[10 : BLOCK_BYTES + 10] and idle_connections(client) == 1
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert read(client, one) == DATA[10 : BLOCK_BYTES + 10]
    assert [visit.requests for visit in one.visits] == [2, 1]


def test_client_close_ends_requests_in_progress(client: PeerClient, peer: Callable[..., Peer]) -> None:
    one = peer(silent)
    threading.Timer(0.05, client.close).start()
    with pytest.raises(PeerSilentError):
        client.read(one.member(), WHAT, (0, 1), mode=GetMode.CACHED, deadline=60)


def test_client_never_shows_its_token(client: PeerClient, peer: Callable[..., Peer]) -> None:
    found = client.read(peer(honest).member(), WHAT, (0, 1), mode=GetMode.CACHED, deadline=60.0)
    assert TOKEN not in f"{client!r} {client!s} {found!r}"


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tls]:
    """Makes the files of a member, signed by the authority that is named."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = tmp_path_factory.mktemp("tls")
    authorities: dict[str, tuple[ec.EllipticCurvePrivateKey, x509.Name, Path]] = {}

    def signed(
        name: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Name, by: ec.EllipticCurvePrivateKey, ca: bool
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .sign(by, hashes.SHA256())
            .public_bytes(serialization.Encoding.PEM)
        )

    def make(authority: str) -> Tls:
        if authority not in authorities:
            key = ec.generate_private_key(ec.SECP256R1())
            name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, authority)])
            path = folder / f"{authority}.ca.pem"
            path.write_bytes(signed(authority, key, name, key, ca=True))
            authorities[authority] = (key, name, path)
        ca_key, issuer, ca = authorities[authority]
        key = ec.generate_private_key(ec.SECP256R1())
        tls = Tls(cert=folder / f"{authority}.cert.pem", key=folder / f"{authority}.key.pem", ca=ca)
        tls.cert.write_bytes(signed("a member", key, issuer, ca_key, ca=False))
        tls.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return tls

    return make


def _server_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    return context


def test_requests_over_tls_return_the_data_over_one_connection(
    peer: Callable[..., Peer], certificates: Callable[[str], Tls]
) -> None:
    tls = certificates("ours")
    one = peer(honest, _server_context(tls))
    client = PeerClient(token=TOKEN, tls=tls)
    for span in [(0, SIZE), (1, 9), (10, BLOCK_BYTES + 10)]:
        assert read(client, one, *span) == DATA[slice(*span)]
    assert len(one.visits) == 1
    client.close()


@pytest.mark.parametrize("handle", [silent, _half_then_silent, _half, _dripping_body])
def test_tls_with_failures_raises(
    peer: Callable[..., Peer], certificates: Callable[[str], Tls], handle: Handle
) -> None:
    tls = certificates("ours")
    client = PeerClient(token=TOKEN, tls=tls)
    with pytest.raises(PeerSilentError):
        read(client, peer(handle, _server_context(tls)), deadline=SHORT)
    client.close()


def test_tls_request_to_a_peer_that_pauses_within_the_deadline_succeeds(
    peer: Callable[..., Peer], certificates: Callable[[str], Tls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_CHECKS", 120)  # half a second each: the pause is longer
    what = ObjectDescription("memory", "bucket/large", "v1", 8 * BLOCK_BYTES)  # more than the kernel buffers
    data = bytes(what.size)

    def store(visit: Visit) -> None:
        visit.request()
        time.sleep(0.6)
        left = len(data) + 8 * SUM_BYTES
        while left:
            left -= len(visit.connection.recv(min(left, 1 << 20)))
        visit.send(build_response(204, length=None))

    tls = certificates("ours")
    client = PeerClient(token=TOKEN, tls=tls)
    assert client.put(peer(store, _server_context(tls)).member(), what, 0, data, deadline=60.0)
    client.close()


def test_tls_response_that_arrived_while_this_process_was_stopped_is_read(
    peer: Callable[..., Peer], certificates: Callable[[str], Tls], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS returns 16 KiB at a time. The peer sent everything in time; otherwise the breaker of a healthy node would open."""
    clock, receive = Clock(), connections.Connection._receive
    received = iter(range(1000))

    def stopped_once(connection: connections.Connection, buffers: list[memoryview], until: float) -> int:
        count = receive(connection, buffers, until)
        if next(received) == 1:  # the first part of the body after the head
            wait_until(connection._has_arrived)
            clock.now += 100.0
        return count

    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(connections.Connection, "_receive", stopped_once)
    tls = certificates("ours")
    client = PeerClient(token=TOKEN, tls=tls)
    assert read(client, peer(honest, _server_context(tls)), 0, SIZE) == DATA
    client.close()


def test_tls_connection_that_is_dropped_receives_no_encrypted_bytes(
    peer: Callable[..., Peer], certificates: Callable[[str], Tls]
) -> None:
    tls = certificates("ours")
    context = connections.tls_context(tls, ssl.PROTOCOL_TLS_CLIENT)
    connection = connections.Connection(peer(honest, _server_context(tls)).address, context, 60.0)
    connection.send([b"GET / HTTP/1.1\r\nRange: bytes=0-%d\r\n\r\n" % (SIZE - 1)], 60.0)
    connection.receive_head()
    wait_until(connection._has_arrived)
    connection.drop()  # by another thread, while this one receives
    received = bytearray(BLOCK_BYTES)
    with contextlib.suppress(PeerSilentError):
        connection.receive_into([memoryview(received)])
    connection.close()
    assert all(got in (0, sent) for got, sent in zip(received, DATA, strict=False))


def test_tls_with_a_foreign_certificate_is_refused(
    peer: Callable[..., Peer], certificates: Callable[[str], Tls]
) -> None:
    ours, theirs = certificates("ours"), certificates("theirs")
    stranger = peer(honest, _server_context(theirs))
    client = PeerClient(token=TOKEN, tls=ours)
    with pytest.raises(PeerSilentError, match="TLS"):
        read(client, stranger)
    assert stranger.requests == 0  # so it never saw the token
    plain = PeerClient(token=TOKEN)
    with pytest.raises(PeerError):
        read(plain, peer(honest, _server_context(ours)), deadline=SHORT)
    client.close()
    plain.close()


def test_tls_without_its_files_is_refused(tmp_path: Path) -> None:
    missing = Tls(cert=tmp_path / "cert.pem", key=tmp_path / "key.pem", ca=tmp_path / "ca.pem")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        PeerClient(token=TOKEN, tls=missing)
