"""Hostile input: parsing raises `WireError` at worst, and a server continues, reveals nothing and leaks nothing."""

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.planes import Plane
from tests.support.wire_client import TOKEN, connect

from millrace.cluster.dataplane import wire
from millrace.cluster.dataplane.conversation import RepeatedRequests
from millrace.cluster.dataplane.wire import GetMode, ObjectDescription
from millrace.errors import WireError
from millrace.store.records import BLOCK_BYTES

texts = st.text(st.characters(codec=None), max_size=50)
sizes = st.integers(0, 10**15)
described = st.builds(ObjectDescription, texts, texts, texts, sizes)
fetch_ids = st.text("0123456789abcdef-", max_size=40)
tokens = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)


@st.composite
def spans(draw: st.DrawFn) -> tuple[int, int]:
    start = draw(st.integers(0, 10**15))
    return start, start + draw(st.integers(1, 10**10))


# --- bytes to values and back -------------------------------------------------------------------------


@given(st.binary(max_size=2000))
def test_parser_of_any_bytes_returns_or_raises_wire_error(data: bytes) -> None:
    for parse in (wire.parse_request, wire.parse_response_head, wire.head_bytes):
        with contextlib.suppress(WireError):
            parse(data)
    with contextlib.suppress(WireError):
        wire.parse_request(b"GET / HTTP/1.1\r\n" + data + b"\r\n\r\n")
    wire.error_message(data)


@given(st.text(max_size=300))
def test_parser_of_any_text_returns_or_raises_wire_error(text: str) -> None:
    for parse in (wire.parse_range, wire.parse_object_path, ObjectDescription.from_header):
        with contextlib.suppress(WireError):
            parse(text)
    with contextlib.suppress(WireError):
        wire.parse_number(text, "a number")
    with contextlib.suppress(WireError):
        wire.parse_get(wire.Request("GET", text, text, {"range": text, "millrace-wire": text, "millrace-ask": text}))
    with contextlib.suppress(WireError):
        wire.parse_put(wire.Request("PUT", text, "", {"content-range": text, "millrace-object": text}))


@given(described, spans(), tokens, st.sampled_from(GetMode), st.integers(0, 99), st.booleans(), fetch_ids)
def test_get_round_trip_is_equal(
    what: ObjectDescription, span: tuple[int, int], token: str, mode: GetMode, rank: int, verify: bool, fetch_id: str
) -> None:
    head = wire.build_get(what, span, host="h:1", token=token, mode=mode, rank=rank, verify=verify, fetch_id=fetch_id)
    assert wire.head_bytes(head + b"more") == len(head)
    request = wire.parse_request(head)
    get = wire.parse_get(request)
    assert request.headers["authorization"] == f"Bearer {token}"
    assert (get.object_id, get.mode, get.rank, get.verify) == (what.object_id(), mode, rank, verify)
    assert get.span == span
    assert get.fetch_id == fetch_id
    if mode is GetMode.FETCH:
        assert ObjectDescription.from_header(get.described) == what


@given(described, st.integers(0, 200), tokens)
def test_put_round_trip_is_equal(what: ObjectDescription, block: int, token: str) -> None:
    start, stop = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, what.size)
    if start < stop:
        put = wire.parse_put(wire.parse_request(wire.build_put(what, start, stop, host="h", token=token)))
        assert put == wire.Put(what, start, stop)


@given(st.integers(0, 10**9), st.integers(1, 10**7))
def test_framed_bytes_is_the_length_of_the_pieces(start: int, nbytes: int) -> None:
    span = start, start + nbytes
    pieces = list(wire.pieces(*span))
    assert wire.framed_bytes(span) == sum(stop - start + wire.SUM_BYTES for start, stop in pieces)
    assert all(start // BLOCK_BYTES == (stop - 1) // BLOCK_BYTES for start, stop in pieces)
    assert wire.parse_response_head(wire.build_framed_head(span, 10**12)).length == wire.framed_bytes(span)


@given(described, spans(), spans(), fetch_ids, fetch_ids, st.data())
def test_repeated_request_equals_the_parsed_one(
    what: ObjectDescription,
    first: tuple[int, int],
    second: tuple[int, int],
    first_fetch: str,
    second_fetch: str,
    data: st.DataObject,
) -> None:
    """Also with changed bytes: then it is not found, or equals the parsed request."""
    repeated = RepeatedRequests()
    head = wire.build_get(what, first, host="h", token="a-token", rank=1, fetch_id=first_fetch)
    request = wire.parse_request(head)
    repeated.keep(head, request, wire.parse_get(request))
    again = wire.build_get(what, second, host="h", token="a-token", rank=1, fetch_id=second_fetch)
    assert repeated.find(again) == wire.parse_get(wire.parse_request(again))
    place = data.draw(st.integers(0, len(again) - 1))
    changed = again[:place] + data.draw(st.binary(max_size=3)) + again[place + 1 :]
    found = repeated.find(changed)
    if found is not None:
        assert found == wire.parse_get(wire.parse_request(changed))


@pytest.mark.parametrize("value", ["A-1", "a b", "1" * 41, "a\u00e91", "-\t-"])
def test_fetch_of_another_form_is_ignored(value: str) -> None:
    what = ObjectDescription("s3://b", "k", "v1", 10)
    head = wire.build_get(what, (0, 5), host="h", token="a-token", fetch_id="ab-1")
    head = head.replace(b"ab-1", value.encode("latin-1"))
    assert wire.parse_get(wire.parse_request(head)).fetch_id == ""
    repeated = RepeatedRequests()
    repeated.keep(head, wire.parse_request(head), wire.parse_get(wire.parse_request(head)))
    assert repeated.find(head) is None


# --- a server -----------------------------------------------------------------------------------------

SECRET = b"the content of a file outside all requests"


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    directory = tmp_path
    (directory / "secret").write_bytes(SECRET)
    with Plane(directory / "cache") as plane:
        plane.server.head_seconds = plane.server.idle_seconds = 120  # however slow the clients of these tests are
        plane.put("b/x", random.Random(0).randbytes(BLOCK_BYTES + 1000))
        plane.fill("b/x")
        before = open_sockets()
        yield plane
        is_well(plane)
        assert open_sockets() <= before


def open_sockets() -> int:
    """How many sockets this process has."""
    return sum(_target(name).startswith("socket:") for name in os.listdir("/proc/self/fd"))


def is_well(plane: Plane) -> None:
    """Right bytes are served, and no additional threads run."""
    what = plane.describe("b/x")
    content = plane.origin._objects["b/x"][0]
    with plane.client() as client:
        assert client.get(what, (5, BLOCK_BYTES + 7))[1] == content[5 : BLOCK_BYTES + 7]
    until = time.monotonic() + 120
    while (left := plane.server.connections) or any(each.name == "millrace-peer" for each in threading.enumerate()):
        assert time.monotonic() < until, f"{left} connections are left, or their threads"
        time.sleep(0.01)


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""


def answers(plane: Plane, data: bytes) -> bytes:
    """The complete response to `data`."""
    received = b""
    with contextlib.suppress(ConnectionError), connect(plane.address) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        while found := connection.recv(1 << 16):
            received += found
    return received


def statuses(received: bytes) -> list[int]:
    """The statuses in a response that begins with one."""
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


def mutated(source: random.Random, head: bytes) -> bytes:
    """A request with something wrong in it, or nearly."""
    pieces = [
        b"\r\n",
        b"\n",
        b"\r",
        b"\x00",
        b": ",
        b" ",
        b"\t",
        b"\xff",
        b"9" * 30,
        b"-",
        b",",
        b"../",
        b"%2e%2e/",
        b"%00",
    ]
    pieces += [b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"Range: bytes=0-5\r\n", b"HTTP/1.1"]
    pieces += [
        b"Millrace-Wire: 2\r\n",
        b"Authorization: Bearer x\r\n",
        b"\r\n\r\n",
        b"bytes=0-" + b"9" * 18,
        b"A" * 9000,
    ]
    data = bytearray(head)
    for _ in range(source.randint(1, 4)):
        place = source.randrange(len(data) + 1)
        kind = source.randrange(4)
        if kind == 0:
            data[place:place] = source.choice(pieces)
        elif kind == 1:
            del data[place : place + source.randint(1, 20)]
        elif kind == 2 and place < len(data):
            data[place] = source.randrange(256)
        else:
            data[place : place + source.randint(1, 5)] = source.choice(pieces)
    return bytes(data)


@pytest.mark.parametrize("seed", range(4))
def test_server_survives_thousands_of_malformed_requests(plane: Plane, seed: int) -> None:
    source = random.Random(seed)
    what = plane.describe("b/x")
    heads = [
        wire.build_get(what, (0, 100), host="h", token=TOKEN),
        wire.build_get(what, (200, 300), host="h", token=TOKEN, mode=GetMode.CACHED),
        wire.build_put(what, 0, BLOCK_BYTES, host="h", token=TOKEN),
        wire.build_command("POST", "/v1/load", host="h", token=TOKEN, body=b"{}") + b"{}",
        wire.build_command("GET", "/v1/view", host="h", token=TOKEN),
        b"GET /../../secret HTTP/1.1\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n\r\n",
    ]
    for _ in range(500):
        received = answers(plane, mutated(source, source.choice(heads)))
        assert received == b"" or received.startswith(b"HTTP/1.1 ")
        assert SECRET not in received


@pytest.mark.parametrize("seed", range(2))
def test_requests_without_the_token_receive_nothing(plane: Plane, seed: int) -> None:
    source = random.Random(seed)
    what = plane.describe("b/x")
    content = plane.origin._objects["b/x"][0]
    head = wire.build_get(what, (0, 100), host="h", token="not-the-token")
    for _ in range(300):
        received = answers(plane, mutated(source, head))
        assert content[:20] not in received
        assert set(statuses(received)) <= {400, 401, 431, 501, 505}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/objects/../../../secret",
        "/v1/objects/%2e%2e%2f%2e%2e%2fsecret",
        "/secret",
        "//secret",
        "/v1/objects//secret",
        "/v1/objects/" + "0" * 31 + "/",
        "/v1/objects/" + "0" * 33,
        "/v1/view/../../secret",
        "/v1/objects/\\..\\secret",
    ],
)
def test_request_paths_never_become_files(plane: Plane, path: str) -> None:
    for method in ("GET", "HEAD", "PUT", "POST"):
        with plane.client() as client:
            head, body = client.plain(method, path)
            assert head.status in (400, 404, 405)
            assert SECRET not in body


def test_ranges_out_of_bounds_are_refused(plane: Plane) -> None:
    what = plane.describe("b/x")
    path = wire.OBJECTS_PATH + what.object_id().hex()
    big = 10**17
    for text, status in [
        (f"bytes={big}-", 400),
        (f"bytes={big}-{big + 5}", 416),
        (f"bytes=0-{big}", 416),
        (f"bytes=0-{'9' * 19}", 400),
        ("bytes=-0", 400),
        ("bytes=5-3", 400),
        ("bytes=--5", 400),
        ("bytes=0-1,4-5", 400),
    ]:
        with plane.client() as client:
            assert client.plain("GET", path, Range=text, Millrace_Wire="1")[0].status == status, text
    with plane.client() as client:
        assert client.plain("GET", path, Range="bytes=0-1")[0].status == 400  # no wire version


def test_request_inside_a_body_is_not_executed(plane: Plane) -> None:
    what = plane.describe("b/x")
    inner = wire.build_get(what, (0, 10), host="h", token=TOKEN)
    start = f"POST /v1/x HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    for lines in (
        b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 0\r\nContent-Length: 5\r\n",
        b"Content-Length: 0\r\ncontent-length : 5\r\n",
        b"Content-Length: +0\r\n",
        b"Content-Length: 0x0\r\n",
        b"Content-Length:\r\n 0\r\n",
        b"X: y\nContent-Length: 5\r\n",
    ):
        received = answers(plane, start + lines + b"\r\n" + inner)
        assert len(statuses(received)) == 1, lines
        assert statuses(received)[0] in (400, 501), lines
    # Bytes after the announced length are the next request, which needs a token of its own.
    received = answers(plane, start + b"Content-Length: 2\r\n\r\n{}" + inner.replace(TOKEN.encode(), b"stolen-request"))
    assert statuses(received) == [404]


def test_connections_closed_early_do_not_harm_the_server(plane: Plane) -> None:
    what = plane.describe("b/x")
    get = wire.build_get(what, (0, BLOCK_BYTES), host="h", token=TOKEN)
    put = wire.build_put(what, 0, BLOCK_BYTES, host="h", token=TOKEN) + bytes(100_000)
    for request in (get, get[:50], put, b"", b"\r\n"):
        for end in ("close", "half", "reset"):
            connection = connect(plane.address)
            with connection, contextlib.suppress(OSError):
                connection.sendall(request)
                if end == "half":
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1 << 16)
                elif end == "reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


@contextlib.contextmanager
def slow_connections(plane: Plane) -> Iterator[list[socket.socket]]:
    """Fifty connections that have sent the first five bytes of a request."""
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(plane.address)) for _ in range(50)]
        request = wire.build_get(plane.describe("b/x"), (0, 10), host="h", token=TOKEN)
        for number in range(5):
            for connection in slow:
                with contextlib.suppress(OSError):
                    connection.sendall(request[number : number + 1])
            time.sleep(0.01)
        yield slow


def test_slow_connections_do_not_block_others(plane: Plane) -> None:
    with slow_connections(plane), plane.client() as client:
        assert client.get(plane.describe("b/x"), (0, 10))[0].status == 206


def test_slow_connections_are_dropped(plane: Plane) -> None:
    plane.server.head_seconds = 1  # until the last of them has ended: a busy server accepts it late
    with slow_connections(plane) as slow:
        for connection in slow:
            with contextlib.suppress(ConnectionError):
                # On a busy machine some were turned away before that.
                assert connection.recv(1 << 16).partition(b" ")[2][:3] in (b"", b"503")
    plane.server.head_seconds = 120


@pytest.mark.parametrize("first", [1, 2, 3, 4, 5, 20])
def test_head_in_two_parts_is_parsed(plane: Plane, first: int) -> None:
    request = wire.build_get(plane.describe("b/x"), (0, 10), host="h", token=TOKEN)
    with connect(plane.address) as connection:
        connection.sendall(request[:first])
        time.sleep(0.05)  # the server has read it: TCP_NODELAY, and nothing else to do
        connection.sendall(request[first:])
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 206 ")


def test_missing_bodies_time_out(plane: Plane) -> None:
    what = ObjectDescription("memory", "b/huge", "v", 10**15)
    for head in (
        wire.build_put(what, 0, wire.MAX_FRAMED_BYTES, host="h", token=TOKEN),
        wire.build_command("POST", "/v1/x", host="h", token=TOKEN, body=b"x" * wire.MAX_BODY_BYTES),
    ):
        with connect(plane.address) as connection:
            connection.sendall(head)
    assert plane.node.open_disks[0].store.index.used_bytes() < 2 * BLOCK_BYTES


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.binary(max_size=300))
def test_any_request_bytes_after_the_token_are_safe(plane: Plane, data: bytes) -> None:
    received = answers(plane, b"GET /v1/objects/ HTTP/1.1\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n" + data)
    assert received == b"" or received.startswith(b"HTTP/1.1 ")


def test_foreign_http_client_is_served(plane: Plane) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(500),  # TLS to a server without
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT 127.0.0.1:22 HTTP/1.1\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"*1\r\n$4\r\nPING\r\n",
        b"\x00" * 20_000,
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"\r\n" * 5000,
    ):
        received = answers(plane, data)
        assert set(statuses(received)) <= {400, 401, 431, 501, 505}
