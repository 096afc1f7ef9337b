"""etcd's gateway over real sockets: its responses, and those of other servers."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random

import pytest
from tests.support.etcd import EtcdServer

from millrace.cluster.membership import Member, MemberState, View
from millrace.cluster.membership.etcd import EtcdMembers
from millrace.cluster.membership.etcd_gateway import (
    EtcdDownError,
    EtcdGateway,
    EtcdRefusedError,
    prefix_range,
)
from millrace.errors import ConfigurationError, OriginUnavailableError
from millrace.testing.conformance.members import wait_for
from millrace.testing.process import free_ports

Answer = Callable[[bytes], int]


@pytest.fixture
def answer() -> Iterator[Answer]:
    """Listens on a port and sends these bytes to every connection; returns the port."""
    sockets: list[socket.socket] = []

    def serve(data: bytes) -> int:
        listening = socket.create_server(("127.0.0.1", 0))
        sockets.append(listening)

        def run() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    read_request(connection)
                    with contextlib.suppress(OSError):  # the client closed without reading all
                        connection.sendall(data)
                        connection.shutdown(socket.SHUT_WR)

        threading.Thread(target=run, daemon=True).start()
        return int(listening.getsockname()[1])

    yield serve
    for each in sockets:
        each.shutdown(socket.SHUT_RDWR)
        each.close()


def read_request(connection: socket.socket) -> None:
    """Read a request to its end: closing a connection with unread bytes resets it."""
    received = b""
    while (end := received.find(b"\r\n\r\n")) < 0 or len(received) < end + 4 + length_of(received[:end]):
        data = connection.recv(65536)
        if not data:
            return
        received += data


def length_of(head: bytes) -> int:
    lines = head.decode("ascii").lower().split("\r\n")
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length:"))


def gateway(*ports: int) -> EtcdGateway:
    return EtcdGateway([("127.0.0.1", port) for port in ports], timeout_seconds=60.0)


def response(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


# --- bodies -------------------------------------------------------------------------------------------------


def chunked(*pieces: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize("seed", range(20))
def test_stream_of_chunks_cut_anywhere_returns_every_line(answer: Answer, seed: int) -> None:
    random = Random(seed)
    lines = [json.dumps({"a": "b" * random.randrange(1, 60)}).encode() for _ in range(30)]
    text = b"\n".join(lines) + b"\n"
    cuts = sorted(random.sample(range(1, len(text)), 20))
    body = chunked(*(text[start:stop] for start, stop in pairwise([0, *cuts, len(text)])))
    with gateway(answer(body)).stream("/v3/x", {}) as stream:
        assert [stream.next(60.0) for _ in lines] == [json.loads(line) for line in lines]
        with pytest.raises(EtcdDownError, match="closed"):
            stream.next(60.0)


@pytest.mark.parametrize("text", ['{"a": 1}', '{"a": 1}\n', '\n{"a": 1}\n\n'])
def test_body_of_known_length_needs_no_line_end(answer: Answer, text: str) -> None:
    assert gateway(answer(response(text.encode()))).call("/v3/x", {}) == {"a": 1}


@pytest.mark.parametrize("chunk", [b"zz\r\n", b"-5\r\nabc", b"1" * 2000, b"3\r\nabc"])
def test_stream_with_a_broken_chunk_is_down(answer: Answer, chunk: bytes) -> None:
    down = gateway(answer(chunked()[: -len(b"0\r\n\r\n")] + chunk))
    with pytest.raises(EtcdDownError):
        down.call("/v3/x", {})


def test_stream_after_a_silence_returns_none(answer: Answer) -> None:
    listening = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = listening.accept()
        with connection:
            read_request(connection)
            connection.sendall(chunked(b'{"a": 1}\n')[: -len(b"0\r\n\r\n")])
            connection.recv(1)  # until the other side closes

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    with listening, gateway(int(listening.getsockname()[1])).stream("/v3/x", {}) as stream:
        assert stream.next(60.0) == {"a": 1}
        assert stream.next(0.05) is None
    thread.join(120)
    assert not thread.is_alive()


# --- answers ------------------------------------------------------------------------------------------------


def test_call_returns_the_response(answer: Answer) -> None:
    assert gateway(answer(response(b'{"a": 1}'))).call("/v3/x", {}) == {"a": 1}
    assert gateway(answer(b"HTTP/1.0 200 OK\r\n\r\n" + b'{"a": 1}')).call("/v3/x", {}) == {"a": 1}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n{",
        b"x" * 100_000,
        response(b"no JSON"),
        response(b"[1]"),
        response(b""),
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        response(b"<html>", "502 Bad Gateway"),
        response(b'{"code": 14, "message": "etcdserver: no leader"}', "503 Service Unavailable"),
        response(b'{"error": {"grpc_code": 14, "message": "lost"}}\n'),
        response(b'{"error": "x"}\n'),
    ],
)
def test_call_after_an_unusable_response_uses_the_next_endpoint(answer: Answer, data: bytes) -> None:
    bad = answer(data)
    with pytest.raises(EtcdDownError, match=f"127.0.0.1:{bad}"):
        gateway(bad).call("/v3/x", {})
    both = gateway(bad, answer(response(b'{"a": 1}')))
    assert both.call("/v3/x", {}) == {"a": 1}
    assert both.call("/v3/x", {}) == {"a": 1}
    assert both.requests == 3  # the endpoint that responded last is first


def test_call_without_a_working_endpoint_names_all() -> None:
    down, silent = free_ports(1)[0], socket.create_server(("127.0.0.1", 0))
    with silent:
        ports = (down, int(silent.getsockname()[1]))
        tried = EtcdGateway([("127.0.0.1", port) for port in ports], timeout_seconds=0.2)
        with pytest.raises(EtcdDownError, match=r"refused.*timed out"):
            tried.call("/v3/x", {})
        assert tried.requests == 2


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (response(b'{"error": "no", "code": 3, "message": "user name is empty"}', "400 Bad Request"), 3),
        (response(b'{"error": "no", "code": 5, "message": "lease not found"}', "404 Not Found"), 5),
        (response(b"404 page not found", "404 Not Found"), 0),
        (response(b"<html>", "200 OK").replace(b"200", b"301"), 0),
    ],
)
def test_call_refused_by_etcd_raises_its_status(answer: Answer, data: bytes, status: int) -> None:
    with pytest.raises(EtcdRefusedError) as error:
        gateway(answer(data)).call("/v3/x", {})
    assert error.value.status == status


def test_prefix_range_contains_all_keys_below_it() -> None:
    assert prefix_range("/a/") == {"key": "L2Ev", "range_end": "L2Ew"}


# --- members ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["static://a:1", "etcd://", "etcd://a", "etcd://a:1,,b:2", "a:1"])
def test_members_of_a_malformed_option_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        EtcdMembers.parse(text)


def test_members_with_a_lease_below_two_seconds_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="lease"):
        EtcdMembers(["127.0.0.1:1"], lease_seconds=1)


def test_members_with_another_server_at_the_port_are_refused(answer: Answer) -> None:
    with pytest.raises(ConfigurationError, match="is not etcd"):
        EtcdMembers([f"127.0.0.1:{answer(response(b'hello', '404 Not Found'))}"])


def test_members_without_etcd_are_empty_and_join_raises() -> None:
    (port,) = free_ports(1)
    members = EtcdMembers([f"127.0.0.1:{port}"])
    try:
        assert members.view() == View(())
        with pytest.raises(OriginUnavailableError):
            members.join(Member(id="a", address="a:1"))
        members.leave()
    finally:
        members.close()


@pytest.mark.etcd
def test_members_of_clusters_in_one_etcd_are_separate(etcd: EtcdServer) -> None:
    me = Member(id="a", address="a:1")
    first = EtcdMembers.parse(f"{etcd.members}/first")
    first.join(me)
    seen = {name: EtcdMembers.parse(f"{etcd.members}/{name}") for name in ("first", "firs", "first2", "default")}
    wait_for(seen["first"], me)
    assert {name: each.view() == View.of([me]) for name, each in seen.items()} == {
        "first": True,
        "firs": False,
        "first2": False,
        "default": False,
    }
    first.leave()
    for each in (first, *seen.values()):
        each.close()


@pytest.mark.etcd
def test_members_ignore_other_values_below_their_prefix(etcd: EtcdServer) -> None:
    members = EtcdMembers([etcd.address], cluster="odd")
    prefix = "/millrace/odd/members/"
    good = Member(id="good", address="a:1", state=MemberState.JOINING)
    try:
        for key, value in [
            ("text", "no JSON"),
            ("list", "[]"),
            ("object", "{}"),
            ("other", json.dumps(good.to_json())),
            ("", json.dumps(good.to_json())),
        ]:
            put(members, prefix + key, value)
        # Unknown names are ignored.
        put(members, prefix + "good", json.dumps({**good.to_json(), "colour": "blue"}))
        for seen in (members, EtcdMembers([etcd.address], cluster="odd")):
            changed = threading.Event()
            stop = seen.watch(lambda view, changed=changed: changed.set())  # type: ignore[misc]
            assert seen.view() == View.of([good]) or changed.wait(120)
            assert seen.view() == View.of([good])
            stop()
            seen.close()
    finally:
        members.close()


def put(members: EtcdMembers, key: str, value: str) -> None:
    from millrace.cluster.membership.etcd_gateway import encode

    members.gateway.call("/v3/kv/put", {"key": encode(key), "value": encode(value)})
