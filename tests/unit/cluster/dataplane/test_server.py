"""The server of the data plane: tokens, limits, commands, TLS, and third-party clients, over real sockets."""

import contextlib
import datetime
import ipaddress
import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.support.planes import Plane
from tests.support.waiting import wait_until
from tests.support.wire_client import TOKEN, WireClient, connect

from millrace.cluster.dataplane import transport, wire
from millrace.cluster.dataplane.client import PeerClient
from millrace.cluster.dataplane.responses import Content, Done, Exchange, Refusal, Response
from millrace.cluster.dataplane.server import Call, PlaneServer
from millrace.cluster.membership import Member
from millrace.config import Tls
from millrace.errors import (
    ConfigurationError,
    DeniedError,
    MillraceError,
    ObjectChangedError,
    ObjectNotFoundError,
    OriginUnavailableError,
    PeerRefusedError,
    StorageError,
    UsageError,
    WireError,
)
from millrace.store.records import BLOCK_BYTES

LARGE = BLOCK_BYTES * 2 + 12345


class NoBlocks:
    """An empty service, for tests of the server alone."""

    def get(self, get: wire.Get, exchange: Exchange) -> Response:
        return Refusal(status=404, message="nothing is here", code="missing")

    def put(self, put: wire.Put, exchange: Exchange) -> Response:
        return Done()

    def close(self) -> None:
        pass


class ManyBytes(NoBlocks):
    """Gives more than fits into any buffer of a socket."""

    nbytes = 64 << 20

    def get(self, get: wire.Get, exchange: Exchange) -> Response:
        head = wire.build_response(200, length=self.nbytes)
        return Content(head=head, parts=(bytes(1 << 20) for _ in range(self.nbytes >> 20)))


@contextlib.contextmanager
def serving(service: Any = None, **options: Any) -> Iterator[PlaneServer]:
    server = PlaneServer(service or NoBlocks(), host="127.0.0.1", token=TOKEN, **options)
    server.start()
    try:
        yield server
    finally:
        server.close()


def ask(address: str, request: bytes) -> bytes:
    """The response of a server to `data`, until it closes the connection."""
    with connect(address) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
        return answer


# --- authorization ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Authorization: Bearer wrong-token\r\n",
        f"Authorization: {TOKEN}\r\n",
        f"Authorization: Basic {TOKEN}\r\n",
        f"Authorization: Bearer {TOKEN}x\r\n",
        f"Authorization: Bearer {TOKEN[:-1]}\r\n",
        "Authorization: ü\r\n",
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "POST", "DELETE"])
def test_request_without_the_token_gets_401_only(tmp_path: Path, authorization: str, method: str) -> None:
    with Plane(tmp_path) as plane:
        what = plane.put("b/x", os.urandom(1000))
        plane.fill("b/x")
        for path in (wire.OBJECTS_PATH + what.object_id().hex(), "/v1/view", "/nothing", "/../../etc/passwd"):
            answer = ask(plane.address, f"{method} {path} HTTP/1.1\r\nHost: x\r\n{authorization}\r\n".encode("latin-1"))
            assert answer == b"HTTP/1.1 401 Unauthorized\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        assert plane.counters()["served_requests"] == 0


def test_token_is_required_with_every_request() -> None:
    with serving() as server, WireClient(server.address) as client:
        assert client.plain("GET", "/v1/nothing")[0].status == 404
        client.token = "another-token"
        assert client.plain("GET", "/v1/nothing")[0].status == 401
        assert client.socket.recv(1) == b""


def test_token_is_compared_for_repeated_requests(tmp_path: Path) -> None:
    with Plane(tmp_path) as plane, plane.client() as client:
        what = plane.put("b/x", os.urandom(1000))
        for _ in range(3):
            assert client.get(what, (0, 10))[0].status == 206
        assert len(plane.server.repeated) == 1
        known = wire.build_get(what, (0, 10), host=plane.address, token=TOKEN)
        for token in ("", "x", TOKEN[:-1], TOKEN + "x", "Z" * len(TOKEN)):
            received = ask(plane.address, known.replace(TOKEN.encode(), token.encode()))
            assert received.startswith(b"HTTP/1.1 401 ")
        assert len(plane.server.repeated) == 1


# --- commands -----------------------------------------------------------------------------------------


def test_command_receives_its_body_and_returns_json() -> None:
    calls: list[Call] = []

    def handle(call: Call) -> Any:
        calls.append(call)
        return {"done": [1, "ü", None]}

    with serving() as server, connect(server.address) as connection:
        server.route("POST", "/v1/load", handle)
        server.route("GET", "/v1/load/special", lambda call: call.path_rest)
        body = json.dumps({"a": "ü"}).encode()
        head = wire.build_command(
            "POST", "/v1/load/a b/c", host="h", token=TOKEN, query={"after": "x=&y", "e": ""}, body=body
        )
        connection.sendall(head + body)
        answer = connection.recv(1 << 16)
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"done": [1, "ü", None]}
        assert calls == [Call(path_rest="a b/c", query={"after": "x=&y", "e": ""}, body={"a": "ü"})]
        with WireClient(server.address) as client:
            assert client.plain("GET", "/v1/load/special/x")[1] == b'"x"'
            assert client.plain("GET", "/v1/load/other")[0].status == 405
            assert client.plain("GET", "/v1/loads")[0].status == 404
            assert client.plain("HEAD", "/v1/load/special/x")[0].headers["content-length"] == "3"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("u"), 400),
        (DeniedError("d"), 403),
        (ObjectNotFoundError("n"), 404),
        (ObjectChangedError("c"), 409),
        (OriginUnavailableError("o"), 502),
        (StorageError("s"), 507),
        (MillraceError("m"), 500),
        (ZeroDivisionError("z"), 500),
        (OSError("os"), 500),
    ],
)
@pytest.mark.parametrize("patient", [True, False])
def test_command_error_is_returned(error: Exception, status: int, patient: bool) -> None:
    def handle(_: Call) -> Any:
        raise error

    with serving() as server, WireClient(server.address) as client:
        server.route("GET", "/v1/x", handle)
        for _ in range(2):  # the connection continues
            head, body = client.plain("GET", "/v1/x", **({"Millrace_Wire": "1"} if patient else {}))
            assert head.status == status
            message, code = wire.error_message(body)
            assert code == (error.code if isinstance(error, MillraceError) else "error")
            assert str(error) in message


def test_command_that_takes_long_sends_interim_responses() -> None:
    go_on = threading.Event()
    with serving() as server, WireClient(server.address) as client:
        server.route("GET", "/v1/slow", lambda _: go_on.wait(120))
        client.socket.sendall(wire.build_command("GET", "/v1/slow", host="h", token=TOKEN))
        assert client.receive(2 * len(wire.PROCESSING)) == wire.PROCESSING * 2
        go_on.set()
        assert client.answer()[1] == b"true"


@pytest.mark.parametrize(
    ("lines", "body", "status"),
    [
        (["POST /v1/x HTTP/1.1", "Content-Length: 3"], b"{]}", 400),
        (["POST /v1/x HTTP/1.1", "Content-Length: 2000000"], b"", 413),
        (["POST /v1/x HTTP/1.1", "Content-Length: -1"], b"", 400),
        (["POST /v1/x HTTP/1.1", "Content-Length: 1" + "0" * 30], b"", 400),
        (["POST /v1/x HTTP/1.1", "Transfer-Encoding: chunked"], b"0\r\n\r\n", 501),
        (["POST /v1/x HTTP/1.1", "Expect: 100-continue"], b"", 417),
        (["GET /v1/x HTTP/1.1", "Content-Length: 1"], b"x", 400),
        (["GET /v1/x?a=%zz&&& HTTP/1.1"], b"", 400),
        (["GET /v1/x?" + "&".join(f"a{n}=1" for n in range(100)) + " HTTP/1.1"], b"", 400),
        (["DELETE /v1/objects/" + "0" * 32 + " HTTP/1.1"], b"", 405),
        (["GET /v1/objects/../../etc/passwd HTTP/1.1"], b"", 404),
        (["PUT /v1/objects/" + "0" * 32 + " HTTP/1.1", "Content-Length: 5"], b"12345", 400),
    ],
)
def test_request_that_is_malformed_is_refused(lines: list[str], body: bytes, status: int) -> None:
    with serving() as server:
        server.route("POST", "/v1/x", lambda call: call.body)
        server.route("GET", "/v1/x", lambda call: call.body)
        head = "\r\n".join([*lines, f"Authorization: Bearer {TOKEN}", "", ""]).encode()
        assert int(ask(server.address, head + body).split()[1]) == status


# --- limits -------------------------------------------------------------------------------------------


def test_client_without_reads_is_disconnected() -> None:
    with serving(ManyBytes(), send_seconds=0.2) as server, WireClient(server.address) as client:
        client.socket.sendall(wire.build_get(wire.ObjectDescription("o", "k", "v", 9), (0, 9), host="x", token=TOKEN))
        assert client.socket.recv(100, socket.MSG_PEEK)
        wait_until(lambda: not server.connections)
        with pytest.raises(ConnectionError):
            client.answer()


def test_client_that_reads_slowly_receives_everything() -> None:
    with serving(ManyBytes(), send_seconds=120) as server, WireClient(server.address) as client:
        client.socket.sendall(wire.build_get(wire.ObjectDescription("o", "k", "v", 9), (0, 9), host="x", token=TOKEN))
        time.sleep(0.3)  # meanwhile the server waits for room
        assert len(client.answer()[1]) == ManyBytes.nbytes


def test_client_without_requests_is_disconnected() -> None:
    with serving(head_seconds=0.5, idle_seconds=0.5) as server:
        with connect(server.address) as silent:
            assert silent.recv(1) == b""
        server.head_seconds = 120.0  # for a client that has not sent its first request yet
        with WireClient(server.address) as client:
            assert client.plain("GET", "/v1/x")[0].status == 404
            assert client.socket.recv(1) == b""
        wait_until(lambda: not server.connections)


def test_client_that_sends_a_head_slowly_is_disconnected() -> None:
    with serving(head_seconds=0.3) as server, connect(server.address) as slow:
        wait_until(lambda: server.connections == 1)
        with contextlib.suppress(OSError):
            for _ in range(3000):
                slow.sendall(b"a")
                time.sleep(0.02)
                assert server.connections <= 1
                if not server.connections:
                    break
        assert not server.connections


def test_pipelined_requests_are_answered_in_order() -> None:
    with serving() as server, WireClient(server.address) as client:
        server.route("GET", "/v1/n", lambda call: call.path_rest)
        requests = [wire.build_command("GET", f"/v1/n/{n}", host="h", token=TOKEN) for n in range(20)]
        client.socket.sendall(b"".join(requests))
        assert [client.answer()[1] for _ in range(20)] == [f'"{n}"'.encode() for n in range(20)]


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("this user may not open 4,096 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_above_the_limit_are_refused(many_descriptors: None) -> None:
    before = threading.active_count()
    # On a busy machine, none of the connections may end before the last one has begun.
    with serving(head_seconds=600.0, idle_seconds=600.0) as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(WireClient(server.address)) for _ in range(512)]
        assert all(client.plain("GET", "/v1/x")[0].status == 404 for client in clients)
        wait_until(lambda: all(connection.is_spare for connection in server._connections))
        for connection in server._connections:
            connection.since += 1000  # however long it takes, none is idle for a second
        for _ in range(88):
            with WireClient(server.address) as late:
                head, body = late.answer()  # before any request
                assert (head.status, body) == (503, b"")
        assert server.connections == 512
        clients[0].socket.close()
        wait_until(lambda: server.connections == 511)
        with WireClient(server.address) as next_one:
            assert next_one.plain("GET", "/v1/x")[0].status == 404
    wait_until(lambda: threading.active_count() <= before)


@pytest.fixture
def enough_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a connection in favour of another one is waited for, however busy the machine is."""
    monkeypatch.setattr("millrace.cluster.dataplane.server._ROOM_SECONDS", 120.0)


def test_connections_without_a_token_do_not_block_members(enough_room: None) -> None:
    with serving(max_connections=4) as server, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connect(server.address)) for _ in range(4)]
        wait_until(lambda: server.connections == 4)
        for connection in server._connections:
            connection.since -= 2  # so long ago that they came
        with WireClient(server.address) as member:
            assert member.plain("GET", "/v1/x")[0].status == 404
        assert any(stranger.recv(1) == b"" for stranger in strangers[:4] if _ended(stranger))


def test_connections_of_idle_members_do_not_block_others(enough_room: None) -> None:
    """A large cluster has more idle connections to a node than it can have."""
    with serving(max_connections=4) as server, contextlib.ExitStack() as stack:
        idle = [PeerClient(token=TOKEN) for _ in range(4)]
        for client in idle:
            stack.callback(client.close)
            with pytest.raises(PeerRefusedError):
                client.call(server.address, "GET", "/v1/x", deadline=60.0)
        assert server.connections == 4
        wait_until(lambda: all(connection.is_spare for connection in server._connections))
        for connection in server._connections:
            connection.since += 1000  # however long this takes, none is idle for a second
        with WireClient(server.address) as another:
            assert another.answer()[0].status == 503
        for connection in server._connections:
            connection.since -= 1002
        with WireClient(server.address) as another:
            assert another.plain("GET", "/v1/x")[0].status == 404
            for client in idle:  # also the one that was ended
                for connection in server._connections:
                    connection.since -= 2
                with pytest.raises(PeerRefusedError):
                    client.call(server.address, "GET", "/v1/x", deadline=60.0)


class RefusesUploads(NoBlocks):
    """Does not read the bodies."""

    def put(self, put: wire.Put, exchange: Exchange) -> Response:
        return Refusal(status=421, message="not an owner", code="not-mine")


def test_refusal_of_a_long_upload_arrives() -> None:
    """A client for which the connection ends instead takes the node for a dead one."""
    data = bytes(wire.MAX_FRAMED_BYTES)
    what = wire.ObjectDescription("s3", "bucket/key", "version", len(data))
    with serving(RefusesUploads()) as server, contextlib.closing(PeerClient(token=TOKEN)) as client:
        for _ in range(2):
            with pytest.raises(PeerRefusedError) as caught:
                client.put(Member(id="other", address=server.address), what, 0, data, deadline=60.0)
            assert caught.value.status == 421


@pytest.mark.parametrize("with_tls", [False, True])
def test_refusal_of_an_upload_that_takes_longer_than_the_server_waits_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_tls: bool
) -> None:
    """The client's connection is reset while it sends. It has received the response before."""
    monkeypatch.setattr(transport, "_LINGER_SECONDS", 0.0)
    tls = make_certificates(tmp_path, "member")[0] if with_tls else None
    data = bytes(wire.MAX_FRAMED_BYTES)
    what = wire.ObjectDescription("s3", "bucket/key", "version", len(data))
    with (
        serving(RefusesUploads(), tls=tls) as server,
        contextlib.closing(PeerClient(token=TOKEN, tls=tls)) as client,
    ):
        for _ in range(3):
            with pytest.raises(PeerRefusedError) as caught:
                client.put(Member(id="other", address=server.address), what, 0, data, deadline=60.0)
            assert caught.value.status == 421


def _ended(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except TimeoutError:
        return False


def test_server_close_releases_everything() -> None:
    before = set(os.listdir("/proc/self/fd"))
    threads = set(threading.enumerate())
    go_on = threading.Event()
    with serving(ManyBytes()) as server, WireClient(server.address) as idle, WireClient(server.address) as busy:
        server.route("GET", "/v1/slow", lambda _: go_on.wait(120))
        assert idle.plain("GET", "/v1/x")[0].status == 404
        busy.socket.sendall(wire.build_get(wire.ObjectDescription("o", "k", "v", 9), (0, 9), host="x", token=TOKEN))
        assert busy.socket.recv(10)
        with WireClient(server.address) as waiting:
            waiting.socket.sendall(wire.build_command("GET", "/v1/slow", host="h", token=TOKEN))
            assert waiting.receive(len(wire.PROCESSING)) == wire.PROCESSING
            server.close()
            server.close()
        assert idle.socket.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            connect(server.address, timeout=300)
    go_on.set()
    wait_until(lambda: set(threading.enumerate()) <= threads)
    wait_until(lambda: set(os.listdir("/proc/self/fd")) <= before)


def test_server_close_waits_for_requests_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.cluster.dataplane.server._CLOSE_SECONDS", 120.0)
    began, go_on = threading.Event(), threading.Event()

    def handle(_: Call) -> str:
        began.set()
        go_on.wait(120)
        return "done"

    with serving() as server, WireClient(server.address) as client:
        server.route("GET", "/v1/slow", handle)
        client.socket.sendall(f"GET /v1/slow HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        began.wait(120)
        with ThreadPoolExecutor(1) as pool:
            closed = pool.submit(server.close)
            wait_until(server.ended.is_set)
            go_on.set()
            assert client.answer()[1] == b'"done"'
            closed.result()


def test_server_in_a_forked_child_releases_the_address() -> None:
    program = """
import os, socket, sys
from millrace.cluster.dataplane.server import PlaneServer
class Nothing:
    def close(self): pass
server = PlaneServer(Nothing(), host="127.0.0.1", token="x" * 8)
server.start()
host, port = server.address.split(":")
held = socket.create_connection((host, int(port)))
while not server.connections:  # one that is not accepted yet would be reset
    pass
read, write = os.pipe()
child = os.fork()
if not child:
    os.read(read, 1)
    os._exit(0)
server.close()
held.settimeout(20)
assert held.recv(1) == b"", "the child holds the connection"
again = PlaneServer(Nothing(), host="127.0.0.1", port=int(port), token="x" * 8)
again.close()
os.write(write, b"x")
os.waitpid(child, 0)
"""
    subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", program], check=True, timeout=300)


@pytest.mark.parametrize("lock", [lambda server: server._lock, lambda server: server.ended._cond])
def test_server_in_a_child_forked_while_a_thread_has_its_lock_is_closed(lock: Callable[[PlaneServer], Any]) -> None:
    with serving() as server:
        with lock(server):
            child = os.fork()
            if child == 0:
                try:
                    server.close()
                finally:
                    os._exit(0 if server.ended.is_set() else 1)
        deadline = time.monotonic() + 120
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended == (child, 0)


def test_server_on_an_unusable_address_raises() -> None:
    with serving() as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match="cannot listen"):
            PlaneServer(NoBlocks(), host="127.0.0.1", port=port, token=TOKEN)
    again = PlaneServer(NoBlocks(), host="127.0.0.1", port=port, token=TOKEN)  # at once after it was closed
    again.close()
    with pytest.raises(ConfigurationError):
        PlaneServer(NoBlocks(), host="192.0.2.1", token=TOKEN)


def test_server_listens_on_its_address_only() -> None:
    with serving() as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=300)


# --- other people's clients ---------------------------------------------------------------------------


# --- TLS ----------------------------------------------------------------------------------------------


def _key_usage(is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        encipher_only=False,
        decipher_only=False,
    )


def make_certificates(directory: Path, name: str, ca: Any = None) -> tuple[Tls, Any]:
    """A certificate for 127.0.0.1, signed by `ca`, or by a new authority."""
    directory.mkdir(exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)

    def certificate(subject: str, key: Any, issuer: Any, issuer_key: Any, is_ca: bool) -> x509.Certificate:
        named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(named)
            .issuer_name(issuer or named)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
            )
            # Required since Python 3.13 by `ssl.create_default_context`.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
            .add_extension(_key_usage(is_ca), critical=True)
        )
        return builder.sign(issuer_key, hashes.SHA256())

    if ca is None:
        ca_key = ec.generate_private_key(ec.SECP256R1())
        ca = (certificate(f"{name} CA", ca_key, None, ca_key, True), ca_key)
    key = ec.generate_private_key(ec.SECP256R1())
    own = certificate(name, key, ca[0].subject, ca[1], False)
    pem = serialization.Encoding.PEM
    files = {
        "cert": own.public_bytes(pem),
        "key": key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        "ca": ca[0].public_bytes(pem),
    }
    for kind, data in files.items():
        (directory / f"{name}-{kind}.pem").write_bytes(data)
    return Tls(**{kind: directory / f"{name}-{kind}.pem" for kind in files}), ca


def client_context(ca: Path, own: Tls | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca))
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return context


def test_tls_requires_certificates_of_both_sides(tmp_path: Path) -> None:
    mine, ca = make_certificates(tmp_path / "pem", "server")
    member, _ = make_certificates(tmp_path / "pem", "member", ca)
    foreign, _ = make_certificates(tmp_path / "pem", "foreign")
    data = os.urandom(LARGE)
    with Plane(tmp_path / "cache", server={"tls": mine}) as plane:
        what = plane.put("b/x", data)
        with WireClient(plane.address, context=client_context(mine.ca, member)) as client:
            for _ in range(2):
                assert client.get(what, (0, LARGE))[1] == data
                assert client.get(what, (5, 900))[1] == data[5:900]
            client.token = "wrong"
            assert client.get(what, (0, 5))[0].status == 401
        for own in (None, foreign):
            with (
                pytest.raises((ssl.SSLError, OSError)),
                WireClient(plane.address, context=client_context(mine.ca, own)) as client,
            ):
                client.get(what, (0, 5))
        with WireClient(plane.address) as unencrypted, pytest.raises((ConnectionError, WireError)):
            unencrypted.get(what, (0, 5))
        plane.server.head_seconds = 0.5
        with connect(plane.address) as silent:  # no handshake
            assert silent.recv(1) == b""
        wait_until(lambda: plane.server.connections == 0)


def test_tls_with_invalid_certificates_raises(tmp_path: Path) -> None:
    mine, _ = make_certificates(tmp_path, "a")
    mine.key.write_text("no key")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        PlaneServer(NoBlocks(), host="127.0.0.1", token=TOKEN, tls=mine)


def test_tls_connections_without_a_handshake_do_not_block_members(tmp_path: Path, enough_room: None) -> None:
    mine, ca = make_certificates(tmp_path, "server")
    member, _ = make_certificates(tmp_path, "member", ca)
    with serving(max_connections=4, tls=mine, head_seconds=60) as server, contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(connect(server.address))
        wait_until(lambda: server.connections == 4)
        for connection in server._connections:
            connection.since -= 2
        with WireClient(server.address, context=client_context(mine.ca, member)) as client:
            assert client.plain("GET", "/v1/x")[0].status == 404


class Vanishing(NoBlocks):
    """Fails in the middle of a body."""

    def get(self, get: wire.Get, exchange: Exchange) -> Response:
        def parts() -> Iterator[bytes]:
            yield bytes(1 << 20)
            raise WireError("the object is not cached, and its description is missing", status=404)

        return Content(head=wire.build_response(200, length=2 << 20), parts=parts())


def test_refusal_inside_a_body_closes_the_connection() -> None:
    with serving(Vanishing()) as server, connect(server.address) as connection:
        what = wire.ObjectDescription("o", "k", "v", 4 << 20)
        connection.sendall(wire.build_get(what, (0, 2 << 20), host="x", token=TOKEN))
        received = b""
        while data := connection.recv(1 << 20):
            received += data
    assert received.endswith(bytes(1000))
    assert len(received) < 2 << 20


class Failing(NoBlocks):
    """Its disk fails at every request."""

    def get(self, get: wire.Get, exchange: Exchange) -> Response:
        raise StorageError("the disk fails")


def test_store_error_ends_the_request_and_not_the_connection() -> None:
    with serving(Failing()) as server, WireClient(server.address) as client:
        path = wire.OBJECTS_PATH + "0" * 32
        for _ in range(2):  # the second request is found among the repeated ones
            assert client.plain("GET", path, Millrace_Wire="1", Range="bytes=0-9")[0].status == 507
