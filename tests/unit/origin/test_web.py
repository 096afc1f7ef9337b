"""The web origin against a server with the faults of real ones: refuse, stall, cut off, redirect, lack ranges."""

import contextlib
import errno
import fcntl
import itertools
import logging
import math
import os
import pickle
import shutil
import socket
import ssl
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.http_service import HttpService, Reply, Request
from tests.support.interrupts import interrupted_at
from tests.support.ports import reserved_port
from tests.support.waiting import in_other_thread
from tests.support.web_server import WebServer
from urllib3.util.ssltransport import SSLTransport

from millrace.errors import (
    ConfigurationError,
    DeniedError,
    DiskFullError,
    MillraceError,
    ObjectChangedError,
    ObjectNotFoundError,
    OriginBusyError,
    OriginUnavailableError,
    StorageError,
    UsageError,
)
from millrace.origin.web import WebOrigin, connections, whole

DATA = bytes(i * 7 % 256 for i in range(300_000))


@pytest.fixture
def server() -> Iterator[WebServer]:
    with WebServer() as server:
        server.put("/x.bin", DATA)
        yield server


@pytest.fixture
def origin() -> WebOrigin:
    # Nothing here is retried, and on a busy machine the server may be late.
    return WebOrigin("http", {"timeout": 120})


def _fork(work: Callable[[], bool]) -> bool:
    """Whether `work` came to its end in a forked child, and was true there."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if work() else 1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False


# --- descriptions ---------------------------------------------------------------------------------------


def test_server_that_refuses_head_gets_one_head(server: WebServer, origin: WebOrigin) -> None:
    server.head = False
    for _ in range(3):
        assert origin.head(f"{server.host}/x.bin").size == len(DATA)
    assert [request.method for request in server.requests] == ["HEAD", "GET", "GET", "GET"]
    assert all(request.headers["range"] == "bytes=0-0" for request in server.requests[1:])


def test_head_with_size_zero_is_checked_by_get(server: WebServer, origin: WebOrigin) -> None:
    server.service.interfere(
        lambda request, reply: replace(reply, headers={"Content-Length": "0"}) if request.method == "HEAD" else None
    )
    assert origin.head(f"{server.host}/x.bin").size == len(DATA)


def test_empty_web_object_is_described(server: WebServer, origin: WebOrigin) -> None:
    server.put("/empty", b"")
    for server.head in (True, False):
        for server.ranges in (True, False):
            assert WebOrigin("http").head(f"{server.host}/empty").size == 0


def test_directory_with_a_redirect_to_its_index_is_not_an_object(server: WebServer, origin: WebOrigin) -> None:
    server.put("/dir/a", b"1")
    for call in (lambda: origin.head(f"{server.host}/dir"), lambda: origin.read(f"{server.host}/dir", 0, 1)):
        with pytest.raises(ObjectNotFoundError):
            call()


def test_queries_are_part_of_the_key(origin: WebOrigin) -> None:
    with HttpService(lambda request: Reply(body=request.target.encode())) as service:
        for key in ("/get?file=a/b.bin&x=1", "/get?file=a/b.bin&x=2", "/?id=3"):
            info = origin.head(service.host + key)
            assert bytes(origin.read(info.key, 0, info.size, version=info.version)) == key.encode()


# --- versions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preconditions", [True, False])
@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("tags", ["strong", "weak", "none"])
def test_overwritten_object_is_never_read_as_the_old_version(tags: Any, ranges: bool, preconditions: bool) -> None:
    origin = WebOrigin("http")
    with WebServer(tags=tags, ranges=ranges, preconditions=preconditions) as server:
        server.put("/x.bin", DATA, modified=1_700_000_000)
        info = origin.head(f"{server.host}/x.bin")
        assert info.modified == 1_700_000_000
        server.put("/x.bin", DATA[::-1], modified=1_700_000_001)
        for start, stop in ((0, 10), (len(DATA) - 10, len(DATA)), (0, len(DATA))):
            with pytest.raises(ObjectChangedError):
                origin.read(info.key, start, stop, version=info.version)
        server.put("/x.bin", b"short", modified=1_700_000_002)
        with pytest.raises(ObjectChangedError):
            origin.read(info.key, 100, 200, version=info.version)


# --- bad days -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda reply: replace(reply, stop_after=500),
        lambda reply: replace(reply, stop_after=500, reset=True),
        lambda reply: replace(reply, stop_after=0, reset=True),
        lambda reply: replace(reply, body=reply.body[:-1]),
        lambda reply: replace(reply, body=reply.body + b"x"),
        lambda reply: replace(reply, headers={**reply.headers, "Content-Range": "bytes 0-999/300000"}),
        lambda reply: replace(reply, headers={**reply.headers, "Content-Range": "bytes 1000-1998/300000"}),
        lambda reply: replace(reply, headers={**reply.headers, "Content-Range": "nonsense"}),
        lambda reply: replace(reply, body=reply.body[:-1], chunked=True),
        lambda reply: replace(reply, body=reply.body + b"x", chunked=True),
        lambda reply: replace(reply, stop_after=500, chunked=True),
        lambda reply: replace(reply, status=500),
    ],
)
def test_wrong_range_is_an_error_and_the_next_read_succeeds(
    server: WebServer, origin: WebOrigin, change: Callable[[Reply], Reply]
) -> None:
    info = origin.head(f"{server.host}/x.bin")

    def damage(request: Request, reply: Reply) -> Reply:
        changed = change(replace(reply, headers={k: v for k, v in reply.headers.items() if k != "Content-Length"}))
        if changed.stop_after is not None and not changed.chunked:
            return replace(changed, headers={**changed.headers, "Content-Length": str(len(reply.body))})
        return changed

    server.service.interfere(damage, count=1)
    with pytest.raises(OriginUnavailableError):
        origin.read(info.key, 1000, 2000, version=info.version)
    assert bytes(origin.read(info.key, 1000, 2000, version=info.version)) == DATA[1000:2000]


@pytest.mark.parametrize("ranges", [True, False])
def test_truncated_body_that_claims_to_be_the_whole_is_an_error(ranges: bool) -> None:
    origin = WebOrigin("http")
    with WebServer(ranges=ranges) as server:
        server.put("/x.bin", DATA)
        info = origin.head(f"{server.host}/x.bin")

        def cut(request: Request, reply: Reply) -> Reply | None:
            if request.method == "HEAD":
                return None
            headers = {name: value for name, value in reply.headers.items() if not name.startswith("Content-")}
            return Reply(headers=headers, body=DATA[:1000])

        server.service.interfere(cut)
        for start, stop in ((0, 1000), (10, 20), (5000, 5010)):
            with pytest.raises(OriginUnavailableError):
                origin.read(info.key, start, stop, version=info.version)
        server.service.leave_alone()
        assert bytes(origin.read(info.key, 5000, 5010, version=info.version)) == DATA[5000:5010]


@pytest.mark.parametrize("ranges", [True, False])
def test_object_grown_under_same_tag_gets_new_description(ranges: bool) -> None:
    origin = WebOrigin("http")
    with WebServer(ranges=ranges) as server:
        server.service.interfere(lambda request, reply: replace(reply, headers={**reply.headers, "ETag": '"same"'}))
        server.put("/x.bin", DATA[:1000])
        old = origin.head(f"{server.host}/x.bin")
        assert bytes(origin.read(old.key, 10, 20)) == DATA[10:20]
        server.put("/x.bin", DATA[500:])
        if ranges:
            with pytest.raises(ObjectChangedError):
                origin.read(old.key, 10, 20, version=old.version)
        assert bytes(origin.read(old.key, 2000, 2010)) == DATA[2500:2510]
        server.put("/x.bin", DATA)
        assert bytes(origin.read(old.key, 2000, 2010)) == DATA[2000:2010]


def test_server_that_sends_slowly_is_unavailable(
    server: WebServer, origin: WebOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_BODY_SECONDS", 0.3)
    server.service.interfere(lambda request, reply: replace(reply, pause_seconds=0.05, pieces=1000), count=1)
    with pytest.raises(OriginUnavailableError, match="slowly"):
        origin.read(f"{server.host}/x.bin", 0, 2000)


def test_silent_server_is_unavailable(server: WebServer) -> None:
    origin = WebOrigin("http", {"timeout": 0.2})
    server.service.interfere(lambda request, reply: replace(reply, pause_seconds=30), count=1)
    with pytest.raises(OriginUnavailableError):
        origin.read(f"{server.host}/x.bin", 0, 1000)
    origin._sessions.get().connections._silence_seconds = 120  # the server may be late, but is not silent
    assert bytes(origin.read(f"{server.host}/x.bin", 0, 1000)) == DATA[:1000]


def test_body_of_a_refusal_is_not_waited_for(server: WebServer) -> None:
    """The server sends it when it ends, or after the 600 s for which it may be silent."""
    origin = WebOrigin("http", {"timeout": 600})
    server.service.interfere(
        lambda request, reply: Reply(status=404, body=b"x" * 1000, pause_seconds=600, pieces=2), count=1
    )
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(origin.read, f"{server.host}/x.bin", 0, 10)
        try:
            assert isinstance(reading.exception(timeout=300), ObjectNotFoundError)
        finally:
            server.service.close()  # else the pool would wait for the read


@pytest.mark.parametrize(("status", "header", "pause"), [(429, "3", 3.0), (503, "7", 7.0), (503, None, None)])
def test_busy_response_has_its_retry_after(
    server: WebServer, origin: WebOrigin, status: int, header: str | None, pause: float | None
) -> None:
    server.service.interfere(
        lambda request, reply: Reply(status=status, headers={"Retry-After": header} if header else {})
    )
    for call in (
        lambda: origin.head(f"{server.host}/x.bin"),
        lambda: origin.read(f"{server.host}/x.bin", 0, 1),
        lambda: origin.list_level(server.host),
    ):
        with pytest.raises(OriginBusyError) as caught:
            call()
        assert caught.value.retry_after == pause
    assert len(server.requests) == 3  # repeated only by the limiter of the node


def test_address_without_a_server_is_unavailable(origin: WebOrigin) -> None:
    with reserved_port() as port, pytest.raises(OriginUnavailableError) as caught:
        origin.head(f"127.0.0.1:{port}/x.bin?sig=planted")
    assert "planted" not in str(caught.value)


def test_invalid_address_in_an_error_has_no_query(origin: WebOrigin) -> None:
    with pytest.raises(MillraceError) as caught:
        origin.head("127.0.0.1:99999/x?sig=planted")
    assert "planted" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_body_compressed_against_the_request_is_refused(server: WebServer, origin: WebOrigin) -> None:
    server.put("/x.csv.gz", DATA)
    server.service.interfere(
        lambda request, reply: replace(reply, headers={**reply.headers, "Content-Encoding": "gzip"})
    )
    for call in (
        lambda: origin.head(f"{server.host}/x.bin"),
        lambda: origin.read(f"{server.host}/x.bin", 0, 10),
        lambda: origin.read(f"{server.host}/x.bin", 0, len(DATA)),
    ):
        with pytest.raises(UsageError):
            call()
    assert bytes(origin.read(f"{server.host}/x.csv.gz", 5, 10)) == DATA[5:10]
    assert all(request.headers["accept-encoding"] == "identity" for request in server.requests)


# --- servers without ranges -----------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [True, False])
def test_object_without_ranges_is_downloaded_once_for_all_threads(lengths: bool) -> None:
    origin = WebOrigin("http")
    with WebServer(ranges=False, lengths=lengths) as server:
        server.put("/x.bin", DATA)
        info = origin.head(f"{server.host}/x.bin")

        def read(number: int) -> bool:
            start = number * 2_000
            return (
                bytes(origin.read(info.key, start, start + 1_500, version=info.version)) == DATA[start : start + 1_500]
            )

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(read, range(100)))
        # Without lengths, HEAD and two GETs of its size came before.
        assert server.service.count("GET") == (1 if lengths else 2)
        with pytest.raises(UsageError):
            origin.read(info.key, len(DATA) - 1, len(DATA) + 1, version=info.version)


def test_idle_copy_is_dropped_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(whole.WholeCopies.__init__, "__defaults__", (0.1,))
    origin = WebOrigin("http")
    with WebServer(ranges=False) as server:
        server.put("/x.bin", DATA)
        info = origin.head(f"{server.host}/x.bin")
        for wanted in (1, 2):
            assert bytes(origin.read(info.key, 10, 20, version=info.version)) == DATA[10:20]
            assert server.service.count("GET") == wanted
            assert list(tmp_path.iterdir()) == []
            deadline = time.monotonic() + 120
            while _descriptors(tmp_path) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not _descriptors(tmp_path)


def test_copies_of_many_objects_take_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(whole, "_MOST_COPIES", 4)
    origin = WebOrigin("http")
    with WebServer(ranges=False, lengths=False) as server:
        for number in range(30):
            server.put(f"/{number}", DATA[number : number + 1000])
        for number in range(30):
            info = origin.head(f"{server.host}/{number}")
            read = origin.read(info.key, 10, 20, version=info.version)
            assert bytes(read) == DATA[number + 10 : number + 20]
            assert _descriptors(tmp_path) <= 5


def _descriptors(folder: Path) -> int:
    """The number of open files of this process in a folder."""
    links = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of the listing
            links.append(os.readlink(f"/proc/self/fd/{each}"))
    return sum(link.startswith(str(folder)) for link in links)


def test_copy_in_use_stays_readable_when_another_replaces_it(
    origin: WebOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "_MOST_COPIES", 1)
    with WebServer(ranges=False) as server:
        for number in range(8):
            server.put(f"/{number}", DATA[number:])
        with ThreadPoolExecutor(8) as pool:

            def read(number: int) -> bool:
                place = 1000 * (number % 10)
                return (
                    bytes(origin.read(f"{server.host}/{number % 8}", place, place + 9))
                    == (DATA[number % 8 :][place : place + 9])
                )

            assert all(pool.map(read, range(80)))


def test_slow_download_of_an_object_without_ranges_is_unavailable(
    origin: WebOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "_SLOW_SECONDS", 0.3)
    with WebServer(ranges=False) as server:
        server.put("/x.bin", DATA)
        server.service.interfere(lambda request, reply: replace(reply, pause_seconds=0.05, pieces=300), count=1)
        with pytest.raises(OriginUnavailableError, match="slowly"):
            origin.read(f"{server.host}/x.bin", 290_000, 290_100)
        monkeypatch.setattr(whole, "_SLOW_SECONDS", 120.0)
        assert bytes(origin.read(f"{server.host}/x.bin", 290_000, 290_100)) == DATA[290_000:290_100]


def test_copy_with_too_many_open_files_does_not_blame_the_directory(
    origin: WebOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is a mock: with the real one this whole process would run out of files."""

    def refuse(**_: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with WebServer(ranges=False) as server:
        server.put("/x.bin", DATA)
        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
        with pytest.raises(StorageError, match="open files") as caught:
            origin.read(f"{server.host}/x.bin", 10, 20)
    assert "TMPDIR" not in str(caught.value)


def test_copy_that_breaks_off_is_an_error_and_the_next_read_succeeds(origin: WebOrigin) -> None:
    with WebServer(ranges=False) as server:
        server.put("/x.bin", DATA)
        info = origin.head(f"{server.host}/x.bin")
        server.service.interfere(lambda request, reply: replace(reply, stop_after=250_000), count=1)
        with pytest.raises(OriginUnavailableError):
            origin.read(info.key, 299_000, 299_100, version=info.version)
        assert bytes(origin.read(info.key, 299_000, 299_100, version=info.version)) == DATA[299_000:299_100]


def test_copy_without_disk_space_is_an_error(origin: WebOrigin) -> None:
    with WebServer(ranges=False) as server:
        server.put("/x.bin", DATA)
        server.service.interfere(
            lambda request, reply: replace(reply, headers={**reply.headers, "Content-Length": str(10**15)})
        )
        info = origin.head(f"{server.host}/x.bin")
        with pytest.raises(DiskFullError, match="TMPDIR"):
            origin.read(info.key, 10, 20, version=info.version)


def test_forked_child_downloads_its_own_copy(origin: WebOrigin) -> None:
    with WebServer(ranges=False) as server:
        server.put("/x.bin", DATA)
        info = origin.head(f"{server.host}/x.bin")
        assert bytes(origin.read(info.key, 10, 20, version=info.version)) == DATA[10:20]
        assert _fork(lambda: bytes(origin.read(info.key, 30, 40, version=info.version)) == DATA[30:40])


# --- secrets, and where they go -------------------------------------------------------------------------


@pytest.mark.parametrize("location", ["http://{other}/x.bin", "/moved.bin"])
def test_login_is_sent_only_to_its_server(location: str) -> None:
    options = {
        "auth": ("user", "planted"),
        "cookies": {"session": "planted"},
        "headers": {"X-Api-Key": "planted", "User-Agent": "me"},
    }
    origin = WebOrigin("http", options)
    with WebServer(login=("user", "planted")) as server, WebServer() as other:
        for each, path in ((server, "/moved.bin"), (other, "/x.bin")):
            each.put(path, DATA)
        server.redirect("/a.bin", location.format(other=other.host))
        info = origin.head(f"{server.host}/a.bin")
        assert bytes(origin.read(info.key, 5, 10, version=info.version)) == DATA[5:10]
        for request in server.requests:
            assert request.headers["x-api-key"] == "planted"
            assert request.headers["cookie"] == "session=planted"
        for request in other.requests:
            assert "planted" not in str(request.headers)
            assert "authorization" not in request.headers
            assert request.headers["user-agent"] == "me"
        assert bool(other.requests) == location.startswith("http")


def test_wrong_login_is_denied_without_the_password(server: WebServer) -> None:
    server.login = ("user", "right")
    origin = WebOrigin("http", {"auth": ("user", "planted")})
    for call in (
        lambda: origin.head(f"{server.host}/x.bin"),
        lambda: origin.read(f"{server.host}/x.bin", 0, 1),
        lambda: list(origin.list_all(server.host)),
    ):
        with pytest.raises(DeniedError) as caught:
            call()
        assert "planted" not in repr(caught.value) + str(caught.value) + repr(origin)


def test_login_in_netrc_is_found_by_each_process(
    server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.login = ("user", "planted")
    path = tmp_path / "netrc"
    path.write_text("machine 127.0.0.1 login user password planted\n")
    path.chmod(0o600)
    monkeypatch.setenv("NETRC", str(path))
    origin = WebOrigin("http")
    assert origin.head(f"{server.host}/x.bin").size == len(DATA)
    assert b"planted" not in pickle.dumps(origin)
    with pytest.raises(DeniedError):
        WebOrigin("http", {"client_kwargs": {"trust_env": False}}).head(f"{server.host}/x.bin")
    path.write_text("machine 127.0.0.1 nonsense")
    with pytest.raises(DeniedError):
        WebOrigin("http").head(f"{server.host}/x.bin")


def test_debug_logs_contain_no_query_and_no_header(server: WebServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    origin = WebOrigin("http", {"headers": {"X-Key": "planted"}})
    origin.read(f"{server.host}/x.bin?signature=planted", 0, 1)
    assert "planted" not in caplog.text


def test_redirect_is_reused_for_many_ranges_until_its_target_changes(server: WebServer, origin: WebOrigin) -> None:
    server.put("/old.bin", DATA)
    server.put("/new.bin", DATA[::-1])
    server.redirect("/latest", "/old.bin")
    key = f"{server.host}/latest"
    old = origin.head(key)
    for start in range(0, 1000, 100):
        assert bytes(origin.read(key, start, start + 100, version=old.version)) == DATA[start : start + 100]
    assert server.service.count("GET", "/latest") == 1
    server.redirect("/latest", "/new.bin")
    assert bytes(origin.read(key, 0, 9, version=old.version)) == DATA[:9]  # still there, and the wanted version
    new = WebOrigin("http").head(key)
    assert bytes(origin.read(key, 0, 9, version=new.version)) == DATA[::-1][:9]
    server.delete("/new.bin")
    server.redirect("/latest", "/old.bin")
    assert bytes(origin.read(key, 0, 9, version=old.version)) == DATA[:9]


def test_mirror_that_is_gone_is_left_for_another(server: WebServer, origin: WebOrigin) -> None:
    """The server redirects each request to a mirror that works."""
    key = f"{server.host}/latest"
    with WebServer() as second:
        second.put("/x.bin", DATA)
        with WebServer() as first:
            first.put("/x.bin", DATA)
            server.redirect("/latest", f"{first.url}/x.bin")
            version = origin.head(key).version
            assert bytes(origin.read(key, 0, 9, version=version)) == DATA[:9]
        server.redirect("/latest", f"{second.url}/x.bin")
        with pytest.raises(OriginUnavailableError):
            origin.read(key, 9, 18, version=version)
        assert bytes(origin.read(key, 9, 18, version=version)) == DATA[9:18]


def test_head_with_circular_redirects_raises_usage_error(server: WebServer, origin: WebOrigin) -> None:
    server.redirect("/a", "/b")
    server.redirect("/b", "/a")
    with pytest.raises(UsageError):
        origin.head(f"{server.host}/a")


def test_proxies_of_the_environment_are_used(
    server: WebServer, origin: WebOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HttpService(lambda request: Reply(body=b"by proxy")) as proxy:
        monkeypatch.setenv("http_proxy", f"http://user:planted@{proxy.host}")
        assert bytes(origin.read("example.invalid/x", 0, 8)) == b"by proxy"
        assert proxy.requests[0].target == "http://example.invalid/x"
        assert proxy.requests[0].headers["proxy-authorization"].startswith("Basic ")
        with pytest.raises(OriginUnavailableError):
            WebOrigin("http", {"client_kwargs": {"trust_env": False}}).read("example.invalid/x", 0, 8)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert bytes(origin.read(f"{server.host}/x.bin", 0, 8)) == DATA[:8]


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A key and an untrusted certificate for 127.0.0.1, in one file."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path / "server.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


def test_certificates_are_checked_and_can_be_configured(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_CONNECT_SECONDS", 120.0)  # for the handshake, too
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with WebServer(tls=context) as server:
        server.put("/x.bin", DATA)
        with pytest.raises(ConfigurationError, match="verify"):
            WebOrigin("https").head(f"{server.host}/x.bin")
        origin = WebOrigin("https", {"verify": str(certificate)})
        assert bytes(origin.read(f"{server.host}/x.bin", 0, 9)) == DATA[:9]
        assert _fork(lambda: bytes(origin.read(f"{server.host}/x.bin", 9, 18)) == DATA[9:18])
        with pytest.warns(match="certificate"):
            assert bytes(WebOrigin("https", {"ssl": False}).read(f"{server.host}/x.bin", 0, 9)) == DATA[:9]
    with pytest.raises(ConfigurationError, match="verify"):
        WebOrigin("https", {"verify": str(certificate) + "-not"}).head("127.0.0.1:1/x")


def test_late_end_of_a_head_does_not_change_an_encrypted_body(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head arrives in the moment in which its connection is shut down, and its body is in the socket."""
    monkeypatch.setattr(connections, "_CONNECT_SECONDS", 120.0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    body = DATA[:60_000]

    def use(response: connections.Response) -> bytes:
        sock: Any = response._response.connection.sock  # type: ignore[union-attr]
        first = response.read(1)
        while left := sock.pending():  # to the end of the decrypted bytes
            first += response.read(left)
        waiting = bytearray(4)
        while int.from_bytes(waiting, "little") < 30_000:
            fcntl.ioctl(sock.fileno(), termios.FIONREAD, waiting)
        connections._heads[sock] = -math.inf
        connections._shut_down_late_heads()
        return first + response.read(len(body) - len(first))

    with WebServer(tls=context) as server, contextlib.suppress(OriginUnavailableError):
        server.put("/x.bin", body)
        sender = connections.Connections(verify=str(certificate), silence_seconds=120)
        assert sender.request("GET", f"{server.url}/x.bin", lambda _: {}, use) == body


def test_late_head_behind_an_encrypted_proxy_is_ended() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inner: Any = object.__new__(SSLTransport)  # TLS inside of TLS; only its socket matters
        inner.socket = ours
        connections._heads[inner] = -math.inf
        connections._shut_down_late_heads()
        theirs.settimeout(120)
        assert theirs.recv(1) == b""


# --- listings -------------------------------------------------------------------------------------------


def test_names_listed_in_an_index_are_readable_keys(server: WebServer, origin: WebOrigin) -> None:
    for name in ("a b", "ü", "100%", "hash#?", "sub dir/x"):
        server.put(f"/list/{name}", name.encode())
    infos = [info for page in origin.list_all(f"{server.host}/list") for info in page]
    assert [info.key.partition("/list/")[2] for info in infos] == ["100%25", "a b", "hash%23%3F", "sub dir/x", "ü"]
    read = {bytes(origin.read(info.key, 0, info.size, version=info.version)).decode() for info in infos}
    assert read == {"a b", "ü", "100%", "hash#?", "sub dir/x"}
    assert list(origin.list_level(f"{server.host}/list").prefixes) == [f"{server.host}/list/sub dir"]


def test_web_listing_after_a_key_continues_there(server: WebServer, origin: WebOrigin) -> None:
    names = ["a", "b/1", "b/2", "b-c", "c/d/e", "f"]
    for name in names:
        server.put(f"/list/{name}", b"x")
    root = f"{server.host}/list"
    keys = sorted(f"{root}/{name}" for name in names)
    for number, after in enumerate(keys):
        found = [info.key for page in origin.list_pages(root, after=after) for info in page.objects]
        assert found == keys[number + 1 :]


def test_broken_link_is_not_listed(server: WebServer, origin: WebOrigin) -> None:
    server.put("/list/a", b"1")
    server.put("/list/gone", b"1")
    server.service.interfere(lambda request, reply: Reply(status=404) if request.path == "/list/gone" else None)
    assert [info.key for info in origin.list_level(f"{server.host}/list").objects] == [f"{server.host}/list/a"]


def test_directory_without_an_index_page_cannot_be_listed(server: WebServer, origin: WebOrigin) -> None:
    server.put("/list/a", b"1")
    server.service.interfere(lambda request, reply: replace(reply, headers={"Content-Type": "application/json"}))
    with pytest.raises(UsageError, match="index"):
        origin.list_level(f"{server.host}/list")


def test_listing_of_a_directory_page_that_links_to_itself_raises_usage_error(origin: WebOrigin) -> None:
    page = Reply(headers={"Content-Type": "text/html"}, body=b'<a href="again/">again</a>')
    with HttpService(lambda request: page) as service, pytest.raises(UsageError, match="circle"):
        list(origin.list_all(service.host))


# --- processes ------------------------------------------------------------------------------------------


def test_request_in_forked_child_uses_its_own_connection(server: WebServer, origin: WebOrigin) -> None:
    assert bytes(origin.read(f"{server.host}/x.bin", 0, 9)) == DATA[:9]
    manager = next(iter(origin._sessions.get().connections._managers.values()))
    pool = manager.connection_from_url(f"http://{server.host}")
    assert pool.pool is not None

    def child() -> bool:
        good = bytes(origin.read(f"{server.host}/x.bin", 9, 18)) == DATA[9:18]
        pool.close()  # as the end of a process does
        return good

    assert _fork(child)
    assert bytes(origin.read(f"{server.host}/x.bin", 0, 9)) == DATA[:9]


def test_interrupt_at_any_moment_of_its_use_does_not_block_a_pool() -> None:
    pool = connections._HttpPool("127.0.0.1", 1)

    def use() -> None:
        pool._put_conn(pool._get_conn())

    for number in itertools.count():
        is_last = interrupted_at(number, use) is None
        in_other_thread(use)
        if is_last:
            break
    assert number > 10


def test_write_to_a_web_server_is_refused(origin: WebOrigin) -> None:
    for call in (
        lambda: origin.put("h/x", b""),
        lambda: origin.open_writer("h/x"),
        lambda: origin.delete(["h/x"]),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.next_step


def test_missing_temporary_directory_is_an_error(origin: WebOrigin, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tempfile.mkdtemp()
    shutil.rmtree(folder)
    monkeypatch.setenv("TMPDIR", folder)
    with WebServer(ranges=False) as server:
        server.put("/x.bin", DATA)
        with pytest.raises(MillraceError, match="TMPDIR"):
            origin.read(f"{server.host}/x.bin", 0, 9)
