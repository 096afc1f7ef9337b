"""The data plane and strangers: a request without a token gets the same 401 for everything; invalid certificates.

Malformed requests of strangers are in tests/property/cluster/test_hostile.py and in
tests/unit/cluster/dataplane/test_server.py.
"""

from __future__ import annotations

import datetime
import itertools
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.support.planes import Plane
from tests.support.wire_client import TOKEN, WireClient, connect

from millrace.cluster.dataplane import wire
from millrace.cluster.dataplane.client import PeerClient
from millrace.cluster.dataplane.wire import GetMode, ObjectDescription
from millrace.cluster.membership import Member
from millrace.config import Tls
from millrace.errors import PeerError, PeerRefusedError, PeerSilentError
from millrace.store.records import BLOCK_BYTES

REFUSED = b"HTTP/1.1 401 Unauthorized\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
DATA = os.urandom(BLOCK_BYTES + 1000)

_PATIENT_SECONDS = 120.0
"""On a busy machine both ends may be late."""


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    with Plane(tmp_path / "cache", server={"head_seconds": _PATIENT_SECONDS}) as plane:
        plane.server.route("GET", "/v1/status", lambda _: {"member": "me"})
        plane.server.route("POST", "/v1/forget", lambda _: None)
        plane.put("b/x", DATA)
        plane.fill("b/x")
        yield plane


def answer(address: str, request: bytes) -> bytes:
    """All bytes that a server returns for some bytes, until it ends the connection."""
    received = b""
    with connect(address) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        while data := connection.recv(1 << 16):
            received += data
    return received


def questions(what: ObjectDescription, token: str) -> list[bytes]:
    """Every request of a member, for an existing and a missing object."""
    nothing = ObjectDescription(what.origin, "b/nothing", "v1", 10)
    found = [
        wire.build_get(each, (0, 5), host="h", token=token, mode=mode)
        for each in (what, nothing)
        for mode in (GetMode.FETCH, GetMode.CACHED)
    ]
    for each in (what, nothing):
        found.append(wire.build_put(each, 0, 5, host="h", token=token) + b"12345" + bytes(8))
    for method, path in (
        ("GET", "/v1/status"),
        ("POST", "/v1/forget"),
        ("GET", "/v1/nothing"),
        ("DELETE", "/v1/status"),
    ):
        found.append(wire.build_command(method, path, host="h", token=token))
    return found


def test_request_without_token_gets_the_same_bytes_for_any_object(plane: Plane) -> None:
    """The same bytes for a cached object, an uncached one, and a command of any name, also after requests of members."""
    what = plane.describe("b/x")
    with plane.client() as member:
        assert (
            member.get(what, (0, 5))[0].status == 206
        )  # the server now has this request in its cache of parsed requests
    for token in ("token-of-another-cluster", TOKEN[:-1], TOKEN + TOKEN, TOKEN.upper(), "x"):
        assert {answer(plane.address, request) for request in questions(what, token)} == {REFUSED}


NEARLY = [
    f"Authorization: bearer {TOKEN}",
    f"Authorization: Bearer  {TOKEN}",
    f"Authorization: Bearer\t{TOKEN}",
    f"Authorization: Bearer {TOKEN},{TOKEN}",
    f"Authorization: Bearer {TOKEN}\x00",
    f'Authorization: Bearer "{TOKEN}"',
    "Authorization: Bearer ",
    "Authorization: Bearer",
    f"X-Authorization: Bearer {TOKEN}",
    f"Proxy-Authorization: Bearer {TOKEN}",
    f"Cookie: token={TOKEN}",
    f"Authorization: Bearer wrong\r\nAuthorization: Bearer {TOKEN}",
    f"Authorization: Bearer {TOKEN}\r\nAuthorization: Bearer wrong",
    f"Authorization : Bearer {TOKEN}",
    f"Authorization: Bearer\r\n {TOKEN}",
    f"Authorization: Bearer {'x' * 7000}",
    f"X: y\nAuthorization: Bearer {TOKEN}",
    "Authorization: Bearer \xff\xfe",
]


def test_token_with_small_change_is_refused(plane: Plane) -> None:
    path = wire.OBJECTS_PATH + plane.describe("b/x").object_id().hex()
    for lines, target in itertools.product(NEARLY, (path, f"{path}?token={TOKEN}", "/v1/status")):
        received = answer(plane.address, f"GET {target} HTTP/1.1\r\nHost: h\r\n{lines}\r\n\r\n".encode("latin-1"))
        assert received.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 400 ")), received[:100]
        assert received.endswith(b"Content-Length: 0\r\n\r\n")  # not a word of why


def test_token_of_one_request_does_not_authorize_the_next(plane: Plane) -> None:
    what = plane.describe("b/x")
    path = wire.OBJECTS_PATH + what.object_id().hex()
    with plane.client() as client:
        assert client.get(what, (0, 5))[0].status == 206
        client.socket.sendall(f"GET {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        received = b""
        while data := client.socket.recv(1 << 16):
            received += data
    assert received == REFUSED


def test_client_with_wrong_token_raises_peer_refused(plane: Plane) -> None:
    client = PeerClient(token="token-of-another-cluster")
    member = Member(id="me", address=plane.address)
    with pytest.raises(PeerRefusedError) as caught:
        client.read(member, plane.describe("b/x"), (0, 5), mode=GetMode.FETCH, deadline=_PATIENT_SECONDS)
    assert caught.value.status == 401
    assert "token-of-another-cluster" not in f"{caught.value}{caught.value!r}{caught.value.__cause__!r}"
    client.close()


# --- names of objects ---------------------------------------------------------------------------------

HOSTILE_KEYS = [
    "../../../../etc/passwd",
    "/etc/passwd",
    "file:///etc/passwd",
    "b/..",
    "b/./x",
    "b//x",
    "b/x\0",
    "b/x\n",
    "b/x\r\nAuthorization: Bearer x",
    "b/\x1b[2J",
    "b/" + "k" * 1024,
    "b/" + "é" * 1024,
    "b/\u202ex",
    "b/\ud800",
    "b/x%00",
    "b/%2e%2e/x",
    "b\\x",
    "",
    "index.mdb",
]


def test_request_returns_only_the_named_object(plane: Plane, tmp_path: Path) -> None:
    """Each hostile name is an object of the origin's own; a peer reads that one, byte for byte, through memory and disk."""
    contents = {key: os.urandom(2000) for key in HOSTILE_KEYS}
    for key, data in contents.items():
        plane.origin.put(key, data)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    for _ in range(2):
        for key, data in contents.items():
            with plane.client() as client:
                head, body = client.get(plane.describe(key), (0, 2000))
                assert (head.status, body) == (206, data), key
    files = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert all(path.is_relative_to(tmp_path / "cache" / "millrace" / "local") for path in files)
    assert all(path.name.isprintable() and path.name.isascii() for path in files)


def test_request_for_missing_name_is_not_found(plane: Plane) -> None:
    for key in HOSTILE_KEYS:
        with plane.client() as client:
            head, body = client.get(ObjectDescription(plane.origin.identity, key, "v1", 2000), (0, 2000))
        assert head.status in (404, 410), key
        assert b"root:" not in body


def test_peer_request_for_unregistered_origin_is_refused(plane: Plane) -> None:
    """Else a client with the token could read this machine's files, or send requests to addresses that only it reaches."""
    for identity in ("file", "file://", "memory2", "s3+http://169.254.169.254", "https+internal", ""):
        with plane.client() as client:
            head, body = client.get(ObjectDescription(identity, "/etc/passwd", "v1", 100), (0, 100))
        assert head.status == 424, identity
        assert b"root:" not in body


# --- TLS ----------------------------------------------------------------------------------------------


class Authority:
    """Signs certificates into a folder. `days` is from when to when, counted from now."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self._signed(self._subject, self._key, (-2, 2), None))

    def member(self, name: str, *, days: tuple[int, int] = (-1, 1), host: str = "node") -> Tls:
        """A certificate of this authority, and trust in those of the same one."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        stem = self._folder / f"{self._name}-{name}"
        tls = Tls(cert=stem.with_suffix(".cert"), key=stem.with_suffix(".key"), ca=self.path)
        tls.cert.write_bytes(self._signed(subject, key, days, host))
        no_password = serialization.NoEncryption()
        tls.key.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, no_password)
        )
        return tls

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: tuple[int, int], host: str | None
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + datetime.timedelta(days=days[0]))
            .not_valid_after(now + datetime.timedelta(days=days[1]))
            .add_extension(x509.BasicConstraints(ca=host is None, path_length=None), critical=True)
        )
        if host is not None:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "theirs")


def read_over(server: Tls | None, client: Tls | None, tmp_path: Path, *, seconds: float = 2.0) -> bytes:
    """What a client with one certificate gets from a node with another, through both of our ends."""
    options = {"head_seconds": seconds, "tls": server}
    with Plane(tmp_path / "cache", server=options) as plane:
        what = plane.put("b/x", b"the content")
        peer = PeerClient(token=TOKEN, tls=client)
        try:
            me = Member(id="me", address=plane.address)
            found = peer.read(me, what, (0, 11), mode=GetMode.FETCH, deadline=max(5.0, seconds))
            assert plane.counters()["served_requests"] == 1
            return bytes(found.data)
        except PeerError:
            assert plane.counters()["served_requests"] == 0
            raise
        finally:
            peer.close()


def test_members_with_certificates_of_one_authority_connect(ours: Authority, tmp_path: Path) -> None:
    """On any host: addresses of nodes change, so a certificate is valid for a member, not for a host."""
    server, client = ours.member("a", host="elsewhere.example"), ours.member("b")
    assert read_over(server, client, tmp_path, seconds=_PATIENT_SECONDS) == b"the content"


@pytest.mark.parametrize(
    "case",
    ["foreign client", "foreign server", "expired client", "expired server", "not yet valid client", "no client"],
)
def test_connection_with_invalid_certificate_fails(
    case: str, ours: Authority, theirs: Authority, tmp_path: Path
) -> None:
    server, client = ours.member("server"), ours.member("client")
    match case:
        case "foreign client":
            other = theirs.member("client")
            client = Tls(cert=other.cert, key=other.key, ca=ours.path)
        case "foreign server":
            other = theirs.member("server")
            server = Tls(cert=other.cert, key=other.key, ca=ours.path)
        case "expired client":
            client = ours.member("client", days=(-2, -1))
        case "expired server":
            server = ours.member("server", days=(-2, -1))
        case "not yet valid client":
            client = ours.member("client", days=(1, 2))
        case "no client":
            with pytest.raises(PeerError):
                read_over(server, None, tmp_path)
            return
    with pytest.raises(PeerSilentError):
        read_over(server, client, tmp_path)


def test_tls_and_plain_nodes_do_not_connect(ours: Authority, tmp_path: Path) -> None:
    """Nor is the token sent to it in the clear."""
    with pytest.raises(PeerSilentError):
        read_over(None, ours.member("client"), tmp_path)


@pytest.mark.parametrize("speaks_tls", [True, False])
def test_token_is_not_sent_to_peer_without_certificate(speaks_tls: bool, ours: Authority, theirs: Authority) -> None:
    received = bytearray()
    listener = socket.create_server(("127.0.0.1", 0))
    foreign = theirs.member("impostor")

    def listen() -> None:
        accepted, _ = listener.accept()
        accepted.settimeout(10)
        try:
            if speaks_tls:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(foreign.cert, foreign.key)
                accepted = context.wrap_socket(accepted, server_side=True)
            while data := accepted.recv(1 << 16):
                received.extend(data)
        except OSError:
            pass  # the client has broken off, as it should
        finally:
            accepted.close()

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    client = PeerClient(token=TOKEN, tls=ours.member("client"))
    member = Member(id="impostor", address=f"127.0.0.1:{listener.getsockname()[1]}")
    with pytest.raises(PeerSilentError):
        client.read(member, ObjectDescription("memory", "b/x", "v1", 10), (0, 5), mode=GetMode.FETCH, deadline=2)
    client.close()
    thread.join(120)
    listener.close()
    assert not thread.is_alive()
    assert TOKEN.encode() not in received
    assert b"Authorization" not in received


def test_old_tls_version_is_refused(ours: Authority, tmp_path: Path) -> None:
    client = ours.member("client")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(ours.path)
    context.load_cert_chain(client.cert, client.key)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with Plane(tmp_path / "cache", server={"tls": ours.member("server"), "head_seconds": _PATIENT_SECONDS}) as plane:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with WireClient(plane.address, context=context) as today:
            assert today.plain("GET", "/v1/nothing")[0].status == 404
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(OSError), WireClient(plane.address, context=context):  # noqa: PT011 - a reset or an alert
            pass
