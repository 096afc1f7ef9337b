"""The emulated region: responses are intact, delayed, paced and counted, and broken only on demand."""

from __future__ import annotations

import http.client
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore.store
import pytest

from millrace import errors
from millrace.testing.region import EmulatedRegion, Fault, calibrate
from millrace.testing.s3 import S3Server

MIB = 1 << 20
PAYLOAD = os.urandom(3 * MIB + 17)


class Upstream(http.server.BaseHTTPRequestHandler):
    """Answers in every way that a server may answer: with a length, in chunks, without a body, early, until the end."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        what = urllib.parse.urlsplit(self.path).path
        if what.startswith("/chunked"):
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(PAYLOAD), 300_000):
                part = PAYLOAD[start : start + 300_000]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")
        elif what == "/until-close":
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(PAYLOAD)
            self.close_connection = True
        elif what in ("/204", "/304"):
            self.send_response(int(what[1:]))
            self.end_headers()
        elif what == "/ranged":
            self.send_response(206)
            self.send_header("Content-Range", f"bytes 100-{100 + MIB - 1}/{len(PAYLOAD)}")
            self.send_header("ETag", '"one"')
            self.send_header("Content-Length", str(MIB))
            self.end_headers()
            self.wfile.write(PAYLOAD[100 : 100 + MIB])
        elif what == "/host":
            self.answer(self.headers["Host"].encode())
        else:
            self.answer(PAYLOAD)

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(PAYLOAD)))
        self.end_headers()

    def do_PUT(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b"intact" if body == PAYLOAD else b"damaged")

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class UpstreamServer(http.server.ThreadingHTTPServer):
    request_queue_size = 512  # with the default of 5, many connections at once wait for the kernel's retries


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    with UpstreamServer(("127.0.0.1", 0), Upstream) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def region(upstream: str) -> Iterator[EmulatedRegion]:
    with EmulatedRegion(upstream, round_trip_seconds=0.0, bytes_per_second=None) as running:
        yield running


@pytest.fixture
def connection(region: EmulatedRegion) -> Iterator[http.client.HTTPConnection]:
    port = urllib.parse.urlsplit(region.endpoint_url).port
    opened = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    yield opened
    opened.close()


def get(connection: http.client.HTTPConnection, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection.request(method, path)
    response = connection.getresponse()
    return response.status, response.read()


def test_region_relays_each_kind_of_response_on_one_connection(connection: http.client.HTTPConnection) -> None:
    for path, expected in [
        ("/plain", (200, PAYLOAD)),
        ("/chunked", (200, PAYLOAD)),
        ("/204", (204, b"")),
        ("/304", (304, b"")),
        ("/plain?again", (200, PAYLOAD)),
    ]:
        assert get(connection, path) == expected
    assert get(connection, "/plain", "HEAD") == (200, b"")
    socket_before = connection.sock
    assert get(connection, "/plain") == (200, PAYLOAD)
    assert connection.sock is socket_before, "the connection is kept alive"
    assert get(connection, "/until-close") == (200, PAYLOAD)


def test_region_keeps_the_host_header_of_the_client(
    region: EmulatedRegion, connection: http.client.HTTPConnection
) -> None:
    assert get(connection, "/host")[1].decode() == urllib.parse.urlsplit(region.endpoint_url).netloc


def test_upload_with_a_length_or_in_chunks_arrives_intact(
    region: EmulatedRegion, connection: http.client.HTTPConnection
) -> None:
    connection.request("PUT", "/sized", body=PAYLOAD)
    assert connection.getresponse().read() == b"intact"
    parts = [PAYLOAD[start : start + 500_000] for start in range(0, len(PAYLOAD), 500_000)]
    connection.request("PUT", "/chunked", body=iter(parts), encode_chunked=True)
    assert connection.getresponse().read() == b"intact"
    connection.request("PUT", "/asks-first", body=b"", headers={"Expect": "100-continue", "Content-Length": "0"})
    assert connection.getresponse().read() == b"damaged"
    assert region.stats().by_method["PUT"].bytes_up == 2 * len(PAYLOAD)


def test_region_counts_by_prefix_and_method(region: EmulatedRegion, connection: http.client.HTTPConnection) -> None:
    get(connection, "/data/one")
    get(connection, "/data/two%20words")
    get(connection, "/other")
    get(connection, "/data/one", "HEAD")
    stats = region.stats(prefix="/data/")
    assert (stats.requests, stats.bytes_down) == (3, 2 * len(PAYLOAD))
    assert stats.by_method["HEAD"].requests == 1
    assert stats.by_method["HEAD"].bytes_down == 0
    assert region.stats(prefix="/data/two words").requests == 1
    assert region.stats().requests == 4
    region.reset()
    assert region.stats().requests == 0


@pytest.mark.slow
def test_region_adds_the_round_trip_without_serialising(
    region: EmulatedRegion, connection: http.client.HTTPConnection
) -> None:
    region.reshape(round_trip_seconds=1.0, bytes_per_second=None)
    get(connection, "/204")
    started = time.monotonic()
    get(connection, "/204")
    assert time.monotonic() - started >= 1.0

    def one(_: int) -> int:
        another = http.client.HTTPConnection(connection.host, connection.port, timeout=300)
        try:
            return get(another, "/204")[0]
        finally:
            another.close()

    started = time.monotonic()
    with ThreadPoolExecutor(128) as pool:
        assert list(pool.map(one, range(128))) == [204] * 128
    assert time.monotonic() - started < 128 / 2  # one after the other they would take 128 s


def test_region_shares_its_bandwidth(region: EmulatedRegion, connection: http.client.HTTPConnection) -> None:
    region.reshape(round_trip_seconds=0.0, bytes_per_second=20e6)
    started = time.monotonic()

    def one(_: int) -> bytes:
        another = http.client.HTTPConnection(connection.host, connection.port, timeout=300)
        try:
            return get(another, "/plain")[1]
        finally:
            another.close()

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(one, range(4))) == {PAYLOAD}
    # Never faster than the limit; slower only as far as a loaded machine makes everything slower.
    assert time.monotonic() - started >= 0.9 * 4 * len(PAYLOAD) / 20e6


def test_region_faults_hit_matching_requests_as_often_as_set(
    region: EmulatedRegion, connection: http.client.HTTPConnection
) -> None:
    region.fail("status", status=503, method="GET", path="/train/*", count=2, skip=1)
    statuses = [get(connection, "/train/x")[0] for _ in range(4)]
    assert statuses == [200, 503, 503, 200]
    assert get(connection, "/train/x", "HEAD")[0] == 200
    assert region.fault_hits() == [2]
    connection.close()

    region.clear_faults()
    region.fail("status", status=500, method="PUT")
    connection.request("PUT", "/sized", body=PAYLOAD)
    assert connection.getresponse().status == 500


def test_region_breaks_bodies_as_set(region: EmulatedRegion, connection: http.client.HTTPConnection) -> None:
    region.fail("corrupt", after_bytes=MIB)
    body = get(connection, "/plain")[1]
    assert [index for index in (MIB - 1, MIB, MIB + 1) if body[index] != PAYLOAD[index]] == [MIB]
    assert len(body) == len(PAYLOAD)

    region.fail("truncate", after_bytes=MIB)
    with pytest.raises(http.client.IncompleteRead) as caught:
        get(connection, "/plain")
    assert caught.value.partial == PAYLOAD[:MIB]
    connection.close()

    region.fail("reset", after_bytes=1000)
    with pytest.raises(ConnectionResetError):
        get(connection, "/plain")
    connection.close()

    region.fail("reset")
    with pytest.raises(ConnectionResetError):
        get(connection, "/plain")
    connection.close()

    region.fail("stall", after_bytes=10, seconds=0.3)
    started = time.monotonic()
    assert get(connection, "/plain")[1] == PAYLOAD
    assert time.monotonic() - started >= 0.3
    assert region.fault_hits() == [1, 1, 1, 1, 1]


def test_region_faults_change_the_response_as_documented(
    region: EmulatedRegion, connection: http.client.HTTPConnection
) -> None:
    def ask() -> tuple[int, dict[str, str], bytes]:
        connection.request("GET", "/ranged")
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        headers.pop("date", None)  # that of the next response may be a second later
        return response.status, headers, response.read()

    status, headers, body = ask()
    assert (status, headers["etag"], body) == (206, '"one"', PAYLOAD[100 : 100 + MIB])
    region.fail("shorten", after_bytes=1000)
    assert ask() == (206, {**headers, "content-length": "1000"}, body[:1000])
    region.fail("range")
    assert ask() == (206, {**headers, "content-range": f"bytes 101-{100 + MIB}/{len(PAYLOAD)}"}, body)
    region.fail("whole")
    without = {name: value for name, value in headers.items() if name != "content-range"}
    assert ask() == (200, without, body)
    region.fail("version")
    status, changed, same = ask()
    assert (status, same) == (206, body)
    assert changed["etag"] != headers["etag"]
    region.fail("status", status=429, retry_after=3, code="SlowDown")
    status, headers, body = ask()
    assert (status, headers["retry-after"], b"<Code>SlowDown</Code>" in body) == (429, "3", True)
    assert region.fault_hits() == [1] * 5
    assert ask()[0] == 206


def test_region_storm_hits_requests_above_the_limit(region: EmulatedRegion) -> None:
    region.reshape(round_trip_seconds=0.2, bytes_per_second=None)

    def ask(_: int) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", urllib.parse.urlsplit(region.endpoint_url).port or 0)
        try:
            return get(connection, "/204")[0]
        finally:
            connection.close()

    with ThreadPoolExecutor(12) as pool:
        region.fail("status", above_in_flight=4, count=None)
        statuses = list(pool.map(ask, range(12)))
        assert statuses.count(503) == region.fault_hits()[0]
        assert statuses.count(204) >= 4
        most = region.stats().most_in_flight
        assert 1 < most <= 12
        assert statuses.count(503) > 0 or most <= 4
        region.reset()
        assert [ask(number) for number in range(3)] == [204] * 3  # one after the other
        assert region.stats().most_in_flight == 1
        region.clear_faults()
        region.reshape(round_trip_seconds=0.0, bytes_per_second=None)
        region.fail("status", status=429, above_rate=0.5, count=None)
        assert set(pool.map(ask, range(12))) == {204, 429}


def test_region_of_missing_server_resets_the_connection() -> None:
    with EmulatedRegion("http://127.0.0.1:1", round_trip_seconds=0.0) as region:
        connection = http.client.HTTPConnection("127.0.0.1", urllib.parse.urlsplit(region.endpoint_url).port or 0)
        with pytest.raises((ConnectionResetError, http.client.RemoteDisconnected)):
            get(connection, "/")
        connection.close()


def test_invalid_settings_are_refused(region: EmulatedRegion) -> None:
    with pytest.raises(errors.ConfigurationError, match="not a plain HTTP"):
        EmulatedRegion("https://example.org")
    with pytest.raises(errors.ConfigurationError, match="bandwidth above 0"):
        EmulatedRegion("http://127.0.0.1:1", bytes_per_second=0)
    with pytest.raises(errors.ConfigurationError, match="unknown fault"):
        region.fail("explode")  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigurationError, match="cannot be -1"):
        Fault(kind="reset", after_bytes=-1)
    with pytest.raises(errors.ConfigurationError, match="cannot be 0"):
        Fault(kind="status", above_rate=0)
    stopped = EmulatedRegion("http://127.0.0.1:1")
    with pytest.raises(errors.UsageError, match="not running"):
        stopped.stats()


def test_region_ends_with_its_owner(upstream: str) -> None:
    program = (
        "import sys, time; from millrace.testing.region import EmulatedRegion\n"
        "region = EmulatedRegion(sys.argv[1]).start(); print(region.pid, flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", program, upstream], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


def test_killed_region_proxy_is_named(upstream: str) -> None:
    with EmulatedRegion(upstream) as region:
        os.kill(region.pid, signal.SIGKILL)
        with pytest.raises(errors.OriginUnavailableError, match="proxy has ended"):
            region.stats()


def test_calibration_of_a_region_reports_its_round_trip_and_bandwidth() -> None:
    figures = calibrate(round_trip_seconds=0.005, bytes_per_second=100e6, connections=2, seconds=0.2)
    assert figures.round_trip_seconds >= 0.005
    assert 0 < figures.bytes_per_second <= 115e6
    assert "round trip" in str(figures)


@pytest.mark.slow
def test_signed_requests_pass_through_to_the_real_server(tmp_path: Path) -> None:
    with S3Server(tmp_path) as s3, EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.001) as region:
        s3.create_bucket("bucket")
        store = obstore.store.S3Store(
            "bucket",
            endpoint=region.endpoint_url,
            access_key_id=s3.key,
            secret_access_key=s3.secret,
            region="us-east-1",
            client_options={"allow_http": True},
        )
        store.put("x/y", PAYLOAD)
        assert bytes(store.get("x/y").bytes()) == PAYLOAD
        assert [item["path"] for page in store.list("x") for item in page] == ["x/y"]
        assert region.stats(prefix="/bucket/x/").bytes_up == len(PAYLOAD)
        assert region.stats(prefix="/bucket/x/").bytes_down == len(PAYLOAD)
