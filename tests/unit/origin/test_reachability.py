"""Causes of unreachable endpoints: each is named at once; an endpoint that worked before is waited for."""

from __future__ import annotations

import contextlib
import errno
import http.server
import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.ports import reserved_port

from millrace.cli import main
from millrace.errors import MillraceError, ObjectNotFoundError, OriginUnavailableError
from millrace.origin import open_origin, reachability
from millrace.origin.limits import retrying
from millrace.origin.limits.retrying import patience_with
from millrace.origin.reachability import BRIEF_SECONDS, cause_of, probe

KEYS = {"key": "name", "secret": "word"}


class _NothingThere(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        return


class _Server(http.server.ThreadingHTTPServer):
    """Answers 404; over TLS where there is a context."""

    context: ssl.SSLContext | None = None

    def get_request(self) -> tuple[Any, Any]:
        accepted, address = super().get_request()
        if self.context is not None:
            accepted = self.context.wrap_socket(accepted, server_side=True)
        return accepted, address

    def handle_error(self, *_: Any) -> None:
        return


def started(port: int = 0, context: ssl.SSLContext | None = None) -> _Server:
    server = _Server(("127.0.0.1", port), _NothingThere)
    server.context = context
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture(autouse=True)
def _patient_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a server of this process may answer late; then it would be the time that is named."""
    monkeypatch.setattr(reachability, "_PROBE_SECONDS", 120.0)
    for function in (reachability.probe, reachability.diagnose):
        monkeypatch.setitem(function.__kwdefaults__, "seconds", 120.0)


@pytest.fixture(autouse=True)
def _no_earlier_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server here may have the port of one that has answered an earlier test, without TLS."""
    monkeypatch.setattr(reachability, "_responded", set())
    monkeypatch.setattr(reachability, "_found", {})


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *files, *names],
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="module")
def addresses(certificate: Path) -> Iterator[dict[str, str]]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    plain, encrypted = started(), started(context=context)
    with reserved_port() as refusing:
        yield {
            "refused": f"http://127.0.0.1:{refusing}",
            "unknown host": "http://no-such-host.invalid",
            "TLS to a plain port": f"https://127.0.0.1:{plain.server_port}",
            "no scheme": f"127.0.0.1:{plain.server_port}",
            "plain to a TLS port": f"http://127.0.0.1:{encrypted.server_port}",
            "certificate": f"https://localhost:{encrypted.server_port}",
        }
    for server in (plain, encrypted):
        server.shutdown()
        server.server_close()


NAMED = {
    "refused": "connection refused",
    "unknown host": "unknown host|cannot be looked up",
    "TLS to a plain port": "does not use TLS.*write http://",
    "no scheme": "does not use TLS.*write http://",
    "plain to a TLS port": "expects TLS.*write https://",
    "certificate": "is not trusted.*self-signed",
}


def origin_at(kind: str, address: str) -> tuple[Any, str]:
    if kind == "s3":
        return open_origin("s3", {**KEYS, "endpoint_url": address}), "bucket/key"
    if kind == "az":
        options = {"account_name": "acct", "account_key": "aHVzaA==", "account_host": address}
        return open_origin("az", options), "bucket/key"
    if kind == "gs":
        return open_origin("gs", {"token": "ya29.x", "endpoint_url": address}), "bucket/key"
    if kind == "hf":
        return open_origin("hf", {"token": "hf_x", "endpoint": address}), "datasets/u/r/key"
    scheme, _, host = address.partition("://")
    return open_origin(scheme), f"{host}/key"


@pytest.mark.parametrize("kind", ["s3", "az", "gs", "hf", "http"])
@pytest.mark.parametrize("case", NAMED)
def test_unreachable_endpoint_is_named_at_once(
    case: str, kind: str, addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachability, "BRIEF_SECONDS", 0.5)
    address = (
        addresses[case] if "://" in addresses[case] or kind not in ("hf", "http") else f"https://{addresses[case]}"
    )
    origin, key = origin_at(kind, address)
    with pytest.raises(MillraceError, match=NAMED[case]) as caught:
        origin.head(key)
    # Without a known cause it is tried 12 times, with pauses of up to 5 s.
    tries = re.search(r"tried (\d+) times", str(caught.value))
    assert tries is None or int(tries[1]) < 12


@pytest.mark.parametrize("case", ["unknown host", "TLS to a plain port", "plain to a TLS port", "certificate"])
@pytest.mark.parametrize(
    "action",
    [
        lambda origin: origin.head("bucket/key"),
        lambda origin: origin.read("bucket/key", 0, 5),
        lambda origin: origin.list_level("bucket"),
        lambda origin: list(origin.list_all("bucket")),
        lambda origin: origin.put("bucket/key", b"x"),
        lambda origin: origin.delete(["bucket/key"]),
    ],
    ids=["head", "read", "level", "all", "put", "delete"],
)
def test_cause_that_does_not_pass_is_tried_once(
    action: Callable[[Any], Any], case: str, addresses: dict[str, str]
) -> None:
    origin, _ = origin_at("s3", addresses[case])
    with pytest.raises(OriginUnavailableError, match=rf"{NAMED[case].partition('.*')[0]}.*tried once in"):
        action(origin)


def test_upload_to_an_unreachable_endpoint_names_the_cause(addresses: dict[str, str]) -> None:
    origin, _ = origin_at("s3", addresses["TLS to a plain port"])

    def upload() -> None:
        with origin.open_writer("bucket/large") as writer:
            for _ in range(40):
                writer.write(bytes(1 << 20))

    with pytest.raises(OriginUnavailableError, match="does not use TLS"):
        upload()


def test_endpoint_that_starts_within_the_short_wait_is_used(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "BRIEF_SECONDS", 120.0)
    servers: list[_Server] = []
    timer = threading.Timer(1.0, lambda: servers.append(started(port)))
    timer.start()
    with pytest.raises(ObjectNotFoundError):
        origin_at("http", f"http://127.0.0.1:{port}")[0].head(f"127.0.0.1:{port}/key")
    timer.join()
    servers[0].shutdown()
    servers[0].server_close()


@pytest.mark.slow
def test_endpoint_that_answered_before_is_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that restarts in the middle of a run refuses connections for longer than the brief patience."""
    monkeypatch.setattr(reachability, "BRIEF_SECONDS", 0.5)
    server = started(port)
    origin, key = origin_at("s3", f"http://127.0.0.1:{port}")
    with pytest.raises(ObjectNotFoundError):
        origin.head(key)
    server.shutdown()
    server.server_close()
    servers: list[_Server] = []
    timer = threading.Timer(2.0, lambda: servers.append(started(port)))
    timer.start()
    # Another origin, as in a process that starts meanwhile: the node remembers that the address is right.
    again = open_origin("s3", {**KEYS, "endpoint_url": f"http://127.0.0.1:{port}"})
    with pytest.raises(ObjectNotFoundError):
        again.head(key)
    timer.join()
    servers[0].shutdown()
    servers[0].server_close()


def test_error_after_the_usual_patience_names_the_last_cause(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "PATIENCE", retrying.Patience(seconds=60.0, tries=2))
    server = started(port)
    origin, key = origin_at("s3", f"http://127.0.0.1:{port}")
    with pytest.raises(ObjectNotFoundError):
        origin.head(key)
    server.shutdown()
    server.server_close()
    with pytest.raises(OriginUnavailableError, match=r"connection refused.*tried 2 times"):
        origin.head(key)


def test_error_of_a_reset_connection_names_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "PATIENCE", retrying.Patience(seconds=60.0, tries=2))
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            while True:
                try:
                    accepted, _ = listening.accept()
                except OSError:  # the test is over
                    return
                with accepted, contextlib.suppress(OSError):  # the client was faster
                    accepted.recv(1)

        threading.Thread(target=hang_up, daemon=True).start()
        origin, key = origin_at("s3", f"http://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(OriginUnavailableError, match=r"connection was reset.*tried 2 times"):
            origin.head(key)
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("case", NAMED)
def test_doctor_with_unreachable_endpoint_names_the_cause_and_next_step(
    case: str, addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "word")
    assert main(["doctor", "s3://bucket/key", "--endpoint-url", addresses[case]]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if line.split()[1] == "origin")
    cause = probe(addresses[case] if "://" in addresses[case] else f"https://{addresses[case]}")
    assert cause is not None
    assert cause.text in line
    assert cause.next_step in line


def test_proxy_that_cannot_be_reached_is_named(addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", addresses["refused"])
    monkeypatch.setenv("no_proxy", "")
    cause = probe("http://example.invalid")
    assert cause is not None
    assert cause.text.startswith("connection refused by the proxy 127.0.0.1:")


def _led_to(error: Exception, *causes: Exception) -> Exception:
    at: BaseException = error
    for cause in causes:
        at.__cause__ = cause
        at = cause
    return error


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), BRIEF_SECONDS),
        (socket.gaierror(socket.EAI_NONAME, "x"), 0.0),
        (socket.gaierror(socket.EAI_AGAIN, "x"), BRIEF_SECONDS),
        (OSError(errno.EHOSTUNREACH, "x"), BRIEF_SECONDS),
        (TimeoutError(), None),
        (_led_to(RuntimeError("a"), ValueError("b"), ConnectionRefusedError()), BRIEF_SECONDS),
        (RuntimeError("a", ConnectionRefusedError()), BRIEF_SECONDS),
    ],
)
def test_cause_follows_from_the_exception_chain(error: Exception, seconds: float | None) -> None:
    cause = cause_of(error, "host:1")
    assert cause is not None
    assert cause.seconds == seconds
    assert "host:1" in cause.text


@pytest.mark.parametrize(
    "error", [ConnectionResetError(), OSError(errno.ENOSPC, "x"), ValueError("Connection refused")]
)
def test_cause_of_another_failure_is_unknown(error: Exception) -> None:
    assert cause_of(error) is None


@pytest.mark.parametrize(
    ("brief", "responded_lately", "seconds"),
    [
        (None, False, 60.0),
        (0.0, False, 0.0),
        (2.0, False, 2.0),
        (0.0, True, 60.0),
        (2.0, True, 60.0),
        (99.0, False, 60.0),
    ],
)
def test_patience_depends_on_the_cause_and_on_earlier_answers(
    brief: float | None, responded_lately: bool, seconds: float
) -> None:
    error = OriginUnavailableError("x")
    error.brief_seconds = brief
    assert patience_with(error, 60.0, responded_lately=responded_lately) == seconds


class _Odd(http.server.BaseHTTPRequestHandler):
    """Responds by path: with a redirect to itself, without regard to a range, or that the clock is wrong."""

    def do_GET(self) -> None:
        kind = self.path.rpartition("/")[2]
        body = b"<Error><Code>RequestTimeTooSkewed</Code></Error>" if kind == "skewed" else b"page"
        self.send_response({"redirect": 307, "skewed": 403}.get(kind, 200))
        if kind == "redirect":
            self.send_header("Location", self.path)
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", "Sat, 01 Jan 2022 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        return


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("redirect", "redirects in a circle: check the endpoint"),
        ("page", r"ignores the range of a request \(tried 3 times.*check that the endpoint"),
        ("skewed", "clock of this machine is wrong: set the clock"),
    ],
)
def test_permanent_answer_is_named_and_not_requested_again(name: str, problem: str) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Odd)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        origin, _ = origin_at("s3", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(MillraceError, match=problem) as caught:
            origin.read(f"bucket/{name}", 0, 2)
        assert "tried 12 times" not in str(caught.value)
    finally:
        server.shutdown()
        server.server_close()


def test_token_file_that_is_missing_is_named_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/x")
    with pytest.raises(OriginUnavailableError, match=r"token file .* cannot be read: check the file") as caught:
        open_origin("s3", {"endpoint_url": "http://127.0.0.1:9"}).head("bucket/key")
    assert "tried 12 times" not in str(caught.value)


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_host_name_that_cannot_exist_is_named(host: str) -> None:
    cause = probe(f"http://{host}:1")
    assert cause is not None
    assert cause.text == f"{host}:1 is not a valid host name"
    assert cause.seconds == 0.0
