"""Requests and responses as bytes: round trips are equal, and malformed ones are refused with their status."""

import os
import signal
import threading
from unittest import mock

import pytest

from millrace.cluster.dataplane import wire
from millrace.cluster.dataplane.wire import GetMode, ObjectDescription
from millrace.errors import WireError
from millrace.store.records import BLOCK_BYTES, object_id

WHAT = ObjectDescription("s3+http://127.0.0.1:9", "bucket/a key ü", '"etag"', 10 * BLOCK_BYTES + 7)
ID = WHAT.object_id().hex()


def request(*lines: str, first: str = f"GET /v1/objects/{ID} HTTP/1.1") -> bytes:
    return ("\r\n".join([first, *lines]) + "\r\n\r\n").encode("latin-1")


def test_framed_request_round_trip_is_equal() -> None:
    head = wire.build_get(WHAT, (5, 9), host="h:1", token="secret", rank=3, verify=True)
    parsed = wire.parse_request(head)
    assert (parsed.method, parsed.path, parsed.query) == ("GET", f"/v1/objects/{ID}", "")
    assert parsed.headers["authorization"] == "Bearer secret"
    get = wire.parse_get(parsed)
    assert get.object_id == WHAT.object_id() == object_id(WHAT.origin, WHAT.key, WHAT.version, WHAT.size)
    assert get.span == (5, 9)
    assert (get.mode, get.rank, get.verify) == (GetMode.FETCH, 3, True)
    assert ObjectDescription.from_header(get.described) == WHAT
    assert wire.head_bytes(head) == len(head)


@pytest.mark.parametrize(("module", "name"), [(wire.json, "dumps"), (wire.records, "object_id")])
def test_description_in_a_child_forked_while_another_is_encoded_is_encoded(module: object, name: str) -> None:
    begun, go_on = threading.Event(), threading.Event()
    encode = getattr(module, name)

    def wait_in_thread(*arguments: object, **options: object) -> object:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            go_on.wait()
        return encode(*arguments, **options)

    def headers() -> tuple[bytes, str]:
        what = ObjectDescription(WHAT.origin, WHAT.key, WHAT.version, WHAT.size)
        return what.object_id(), what.to_header()

    with mock.patch.object(module, name, wait_in_thread):
        thread = threading.Thread(target=headers)
        thread.start()
        begun.wait()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(120)  # ends a child that waits for a lock
                status = int(headers() != (WHAT.object_id(), WHAT.to_header()))
            finally:
                os._exit(status)
        go_on.set()
        thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_request_for_cached_blocks_has_no_description() -> None:
    get = wire.parse_get(wire.parse_request(wire.build_get(WHAT, (0, 5), host="h", token="t", mode=GetMode.CACHED)))
    assert (get.mode, get.described, get.rank, get.verify) == (GetMode.CACHED, "", 0, False)


def test_put_round_trip_is_equal() -> None:
    start, stop = 9 * BLOCK_BYTES, WHAT.size
    head = wire.build_put(WHAT, start, stop, host="h", token="t")
    put = wire.parse_put(wire.parse_request(head))
    assert put == wire.Put(WHAT, start, stop)


def test_command_round_trip_with_any_name_is_equal() -> None:
    head = wire.build_command("POST", "/v1/x/a b:ü", host="h", token="t", query={"after": "&=ü"}, body=b"{}")
    parsed = wire.parse_request(head)
    assert (parsed.path, parsed.query) == ("/v1/x/a%20b%3A%C3%BC", "after=%26%3D%C3%BC")
    assert parsed.headers["content-length"] == "2"


def test_response_round_trip_is_equal() -> None:
    head = wire.parse_response_head(wire.build_framed_head((0, 10), 20, hot=True))
    assert (head.status, head.length, head.is_hot, head.is_interim) == (206, 18, True, False)
    assert head.headers["content-range"] == "bytes 0-9/20"
    assert wire.parse_response_head(wire.PROCESSING).is_interim
    assert wire.parse_response_head(wire.build_response(424, [("Millrace-Lease", "1")], length=0)).has_lease
    assert wire.parse_response_head(wire.build_response(204)).length == 0
    with pytest.raises(WireError):
        _ = wire.parse_response_head(wire.build_response(200)).length


def test_pieces_end_at_the_boundaries_of_blocks() -> None:
    b = BLOCK_BYTES
    assert list(wire.pieces(0, 0)) == []
    assert list(wire.pieces(5, b)) == [(5, b)]
    assert list(wire.pieces(b - 1, 2 * b + 1)) == [(b - 1, b), (b, 2 * b), (2 * b, 2 * b + 1)]
    for span in ((0, 1), (b - 1, 2 * b + 1), (b, 2 * b)):
        pieces = list(wire.pieces(*span))
        assert wire.framed_bytes(span) == sum(stop - start + wire.SUM_BYTES for start, stop in pieces)


def test_range_header_with_an_inclusive_end_is_parsed_as_half_open() -> None:
    assert wire.parse_range("bytes=0-0") == (0, 1)
    assert wire.parse_range("bytes=4-9") == (4, 10)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "bytes",
        "bytes=",
        "bytes=-",
        "bytes=a-b",
        "bytes=5-2",
        "bytes=--5",
        "bytes=0-" + "9" * 19,
        "rows=1-2",
        "bytes=-0",
        "bytes=5-",
        "bytes=-5",
        "bytes=1-2,",
        "bytes=١-٢",
        "bytes=1 -2",
        "bytes=1-2,4-9",
        "bytes=+1-2",
    ],
)
def test_range_that_is_malformed_is_refused(value: str) -> None:
    with pytest.raises(WireError):
        wire.parse_range(value)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (request(first="GET /v1/objects/x"), 400),
        (request(first="get / HTTP/1.1"), 400),
        (request(first="GET  / HTTP/1.1"), 400),
        (request(first="GET http://other/ HTTP/1.1"), 400),
        (request(first="GET /\x00 HTTP/1.1"), 400),
        (request(first="GET / HTTP/1.0"), 505),
        (request(first="GET / HTTP/2"), 505),
        (request("Transfer-Encoding: chunked"), 501),
        (request("Transfer-Encoding : chunked"), 400),
        (request("Content-Length: 1", "Content-Length: 2"), 400),
        (request("content-length: 1", "CONTENT-LENGTH: 1"), 400),
        (request("Millrace-Rank: 1", "Millrace-Rank: 2"), 400),
        (request("Host: a", " folded"), 400),
        (request("Host: a\nX: b"), 400),
        (request("Host: a\rX: b"), 400),
        (request("Host: a\x00"), 400),
        (request(": a"), 400),
        (request("no colon"), 400),
        (request(*(f"X-{number}: 1" for number in range(33))), 431),
    ],
)
def test_malformed_requests_are_refused(head: bytes, status: int) -> None:
    with pytest.raises(WireError) as caught:
        wire.parse_request(head)
    assert caught.value.status == status


def test_head_above_the_limit_is_refused() -> None:
    assert wire.head_bytes(b"GET / HTTP/1.1\r\n") == 0
    assert wire.head_bytes(b"a" * (wire.MAX_HEAD_BYTES - 1)) == 0
    with pytest.raises(WireError) as caught:
        wire.head_bytes(b"a" * wire.MAX_HEAD_BYTES)
    assert caught.value.status == 431


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (("Millrace-Wire: 1",), 400),
        (("Range: bytes=0-1",), 400),
        (("Millrace-Wire: 2", "Range: bytes=0-1"), 400),
        (("Millrace-Wire: one", "Range: bytes=0-1"), 400),
        (("Millrace-Wire: -1", "Range: bytes=0-1"), 400),
        (("Millrace-Wire: 1", "Range: bytes=0-1", "Millrace-Ask: steal"), 400),
        (("Millrace-Wire: 1", "Range: bytes=0-1", "Millrace-Rank: 99999999999999999999"), 400),
    ],
)
def test_get_that_is_malformed_is_refused(lines: tuple[str, ...], status: int) -> None:
    with pytest.raises(WireError) as caught:
        wire.parse_get(wire.parse_request(request(*lines)))
    assert caught.value.status == status


@pytest.mark.parametrize(
    "path", ["/v1/objects/", f"/v1/objects/{ID}/", f"/v1/objects/{ID.upper()}", "/v1/objects/../x"]
)
def test_object_path_that_is_malformed_is_refused(path: str) -> None:
    with pytest.raises(WireError) as caught:
        wire.parse_object_path(path)
    assert caught.value.status == 404


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"Content-Range": "bytes 0-4194303/7"}, 400),
        ({"Content-Range": "bytes 1-4194303/41943047"}, 400),
        ({"Content-Range": "bytes 0-4194302/41943047"}, 400),
        ({"Content-Range": f"bytes 0-{WHAT.size}/{WHAT.size}"}, 400),
        ({"Content-Range": ""}, 400),
        ({"Content-Length": "4194304"}, 400),
        ({"Content-Length": ""}, 411),
        ({"Millrace-Object": "e30="}, 400),
        ({"Millrace-Object": ObjectDescription("a", "b", "c", WHAT.size).to_header()}, 400),
    ],
)
def test_put_that_is_malformed_is_refused(wrong: dict[str, str], status: int) -> None:
    parsed = wire.parse_request(wire.build_put(WHAT, 0, BLOCK_BYTES, host="h", token="t"))
    headers = {**parsed.headers, **{name.lower(): value for name, value in wrong.items()}}
    with pytest.raises(WireError) as caught:
        wire.parse_put(parsed._replace(headers=headers))
    assert caught.value.status == status


def test_put_above_64_mib_is_refused() -> None:
    what = ObjectDescription("a", "b", "c", 1 << 30)
    with pytest.raises(WireError) as caught:
        wire.parse_put(wire.parse_request(wire.build_put(what, 0, 1 << 30, host="h", token="t")))
    assert caught.value.status == 413


@pytest.mark.parametrize("value", ["", "!", "e30=", "W10=", "bnVsbA==", "eyJvcmlnaW4iOiAxfQ==", "W1tbW1tb" * 500])
def test_description_that_is_malformed_is_refused(value: str) -> None:
    with pytest.raises(WireError):
        ObjectDescription.from_header(value)


def test_description_with_unknown_names_is_accepted() -> None:
    import base64
    import json

    fields = {"origin": "o", "key": "k", "version": "v", "size": 3, "colour": "red"}
    header = base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()
    assert ObjectDescription.from_header(header) == ObjectDescription("o", "k", "v", 3)


def test_header_values_with_line_ends_are_refused() -> None:
    with pytest.raises(WireError):
        wire.build_get(WHAT, (0, 1), host="h", token="t\r\nX: y")
    with pytest.raises(WireError):
        wire.build_get(WHAT, (0, 1), host="h\n", token="t")
    with pytest.raises(WireError):
        wire.build_get(WHAT, (5, 5), host="h", token="t")
    long = ObjectDescription("o", "k" * 9000, "v", 1)
    with pytest.raises(WireError):
        wire.build_get(long, (0, 1), host="h", token="t")


def test_error_body_round_trip_is_equal() -> None:
    assert wire.error_message(wire.error_body("a message", "a-code")) == ("a message", "a-code")
    for body in (b"", b"{}", b"[]", b"1", b"\xff", b"[" * 5000):
        assert wire.error_message(body) == ("", "")
