"""etcd's gateway as bytes, over real sockets: what it answers, and what something else at its place might."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random

import pytest

from millrace.errors import ConfigurationError, OriginUnavailableError
from millrace.members import Member, MemberState, View
from millrace.members.etcd import EtcdMembers
from millrace.members.etcd_gateway import EtcdDownError, EtcdGateway, EtcdRefusedError, LineDecoder, prefix_range
from millrace.testing.etcd import EtcdServer
from millrace.testing.process import free_ports

Answer = Callable[[bytes], int]


@pytest.fixture
def answer() -> Iterator[Answer]:
    """Listens on a port, and answers every connection with these bytes; gives the port."""
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
                    connection.recv(65536)
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)

        threading.Thread(target=run, daemon=True).start()
        return int(listening.getsockname()[1])

    yield serve
    for each in sockets:
        each.shutdown(socket.SHUT_RDWR)
        each.close()


def gateway(*ports: int) -> EtcdGateway:
    return EtcdGateway([("127.0.0.1", port) for port in ports], timeout_seconds=2.0)


def response(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


# --- bodies -------------------------------------------------------------------------------------------------


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize("seed", range(20))
def test_lines_come_out_of_chunks_however_they_are_cut(seed: int) -> None:
    random = Random(seed)
    lines = [bytes(random.choices(b"abc\r {}", k=random.randrange(1, 60))) + b"x" for _ in range(30)]
    text = b"\n".join(lines) + b"\n"
    cuts = sorted(random.sample(range(1, len(text)), 20))
    body = chunked(*(text[start:stop] for start, stop in pairwise([0, *cuts, len(text)])))
    decoder = LineDecoder(chunked=True)
    found: list[bytes] = []
    while body:
        size = random.randrange(1, 40)
        found += decoder.feed(body[:size])
        body = body[size:]
    assert found == lines
    assert decoder.finished


def test_a_body_of_known_length_ends_without_a_line_end() -> None:
    decoder = LineDecoder(length=9)
    assert decoder.feed(b'{"a"') == []
    assert decoder.feed(b": 1}\n") == [b'{"a": 1}']
    assert decoder.finished


@pytest.mark.parametrize("data", [b"zz\r\n", b"-5\r\nabc", b"1" * 2000])
def test_a_chunk_without_a_size_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of whatever kind, the caller says the rest
        LineDecoder(chunked=True).feed(data)


def test_a_body_that_is_cut_is_an_error() -> None:
    for decoder in (LineDecoder(chunked=True), LineDecoder(length=10)):
        decoder.feed(b"3\r\nabc")
        with pytest.raises(ValueError, match="closed"):
            decoder.end()


# --- answers ------------------------------------------------------------------------------------------------


def test_an_answer_is_read(answer: Answer) -> None:
    assert gateway(answer(response(b'{"a": 1}'))).call("/v3/x", {}) == {"a": 1}
    assert gateway(answer(b"HTTP/1.0 200 OK\r\n\r\n" + b'{"a": 1}')).call("/v3/x", {}) == {"a": 1}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n{}",
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
def test_what_cannot_be_used_is_down_and_the_next_is_asked(answer: Answer, data: bytes) -> None:
    bad = answer(data)
    with pytest.raises(EtcdDownError, match=f"127.0.0.1:{bad}"):
        gateway(bad).call("/v3/x", {})
    both = gateway(bad, answer(response(b'{"a": 1}')))
    assert both.call("/v3/x", {}) == {"a": 1}
    assert both.call("/v3/x", {}) == {"a": 1}
    assert both.requests == 3  # who answered is asked first


def test_all_that_are_down_are_named() -> None:
    down, silent = free_ports(1)[0], socket.create_server(("127.0.0.1", 0))
    with silent:
        ports = (down, int(silent.getsockname()[1]))
        asked = EtcdGateway([("127.0.0.1", port) for port in ports], timeout_seconds=0.2)
        with pytest.raises(EtcdDownError, match=r"refused.*timed out"):
            asked.call("/v3/x", {})
        assert asked.requests == 2


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (response(b'{"error": "no", "code": 3, "message": "user name is empty"}', "400 Bad Request"), 3),
        (response(b'{"error": "no", "code": 5, "message": "lease not found"}', "404 Not Found"), 5),
        (response(b"404 page not found", "404 Not Found"), 0),
        (response(b"<html>", "200 OK").replace(b"200", b"301"), 0),
    ],
)
def test_what_says_no_is_refused(answer: Answer, data: bytes, status: int) -> None:
    with pytest.raises(EtcdRefusedError) as error:
        gateway(answer(data)).call("/v3/x", {})
    assert error.value.status == status


def test_a_range_of_all_keys_below_a_prefix() -> None:
    assert prefix_range("/a/") == {"key": "L2Ev", "range_end": "L2Ew"}


# --- members ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["static://a:1", "etcd://", "etcd://a", "etcd://a:1,,b:2", "a:1"])
def test_what_names_no_etcd_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        EtcdMembers.parse(text)


def test_a_lease_that_etcd_does_not_give_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="lease"):
        EtcdMembers(["127.0.0.1:1"], lease_seconds=1)


def test_something_else_at_its_port_is_refused(answer: Answer) -> None:
    with pytest.raises(ConfigurationError, match="is not etcd"):
        EtcdMembers([f"127.0.0.1:{answer(response(b'hello', '404 Not Found'))}"])


def test_without_etcd_nobody_joins_and_nothing_is_known() -> None:
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
def test_clusters_in_one_etcd_do_not_see_each_other(etcd: EtcdServer) -> None:
    me = Member(id="a", address="a:1")
    first = EtcdMembers.parse(f"{etcd.members}/first")
    first.join(me)
    seen = {name: EtcdMembers.parse(f"{etcd.members}/{name}") for name in ("first", "firs", "first2", "default")}
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
def test_what_others_write_below_the_prefix_is_passed_over(etcd: EtcdServer) -> None:
    members = EtcdMembers([etcd.address], cluster="odd", lease_seconds=2)
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
        # A member of a later version, whose additions are not known.
        put(members, prefix + "good", json.dumps({**good.to_json(), "colour": "blue"}))
        for seen in (members, EtcdMembers([etcd.address], cluster="odd", lease_seconds=2)):
            changed = threading.Event()
            stop = seen.watch(lambda view, changed=changed: changed.set())  # type: ignore[misc]
            assert seen.view() == View.of([good]) or changed.wait(30)
            assert seen.view() == View.of([good])
            stop()
            seen.close()
    finally:
        members.close()


def put(members: EtcdMembers, key: str, value: str) -> None:
    from millrace.members.etcd_gateway import encode

    members.gateway.call("/v3/kv/put", {"key": encode(key), "value": encode(value)})
