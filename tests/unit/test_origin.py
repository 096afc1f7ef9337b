"""The origin's options, credentials, versions and markers."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from tests.support.http_service import HttpService, Reply, Request

from millrace.errors import (
    ConfigurationError,
    DeniedError,
    MillraceError,
    MissingDependencyError,
    ObjectChangedError,
    OriginBusyError,
    OriginUnavailableError,
    UsageError,
)
from millrace.origin import ObjectInfo, open_origin
from millrace.origin.credentials import Provider, find_credentials
from millrace.origin.options import StoreOptions, s3_options
from millrace.origin.store_listing import without_folder_markers


def info(key: str, size: int = 0) -> ObjectInfo:
    return ObjectInfo(key, size, "v", 0.0)


@pytest.mark.parametrize(
    ("listed", "left"),
    [
        ([], []),
        ([("p", 0)], ["p"]),  # empty or a marker: a request is needed
        ([("p", 0), ("p/q", 1)], ["p/q"]),
        ([("p", 1), ("p/q", 1)], ["p", "p/q"]),
        ([("p", 0), ("p/q", 0), ("p/q/r", 0)], ["p/q/r"]),
        ([("p", 0), ("p-x", 1)], ["p", "p-x"]),
    ],
)
def test_folder_markers_above_other_objects_are_omitted(listed: list[tuple[str, int]], left: list[str]) -> None:
    assert [item.key for item in without_folder_markers([info(*row) for row in listed])] == left


@pytest.mark.parametrize("where", ["argument", "client_kwargs", "environment"])
def test_password_in_endpoint_is_refused_and_not_shown(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "https://user:hush@host:9000"
    options: dict[str, object] = {}
    if where == "argument":
        options["endpoint_url"] = url
    elif where == "client_kwargs":
        options["client_kwargs"] = {"endpoint_url": url}
    else:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    with pytest.raises(ConfigurationError, match="endpoint_url") as caught:
        open_origin("s3", options)
    assert "hush" not in str(caught.value)


def provider_of(options: StoreOptions, environ: dict[str, str]) -> Provider | None:
    return find_credentials("s3", options, environ).provider


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id=AK\naws_secret_access_key=SK\n[team]\naws_access_key_id=TK\naws_secret_access_key=TS\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.usefixtures("aws")
def test_credentials_of_profiles_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("botocore")
    default = provider_of(s3_options({}, {}), {})
    assert default is not None
    assert default()["access_key_id"] == "AK"
    team = provider_of(s3_options({"profile": "team"}, {}), {"AWS_ACCESS_KEY_ID": "other"})
    assert team is not None
    assert team()["secret_access_key"] == "TS"
    named = provider_of(s3_options({}, {}), {"AWS_PROFILE": "team"})
    assert named is not None
    assert named()["access_key_id"] == "TK"
    given = provider_of(s3_options({"key": "a", "secret": "b"}, {}), {"AWS_SESSION_TOKEN": "another's"})
    assert given is not None
    assert given() == {"access_key_id": "a", "secret_access_key": "b", "token": None, "expires_at": None}
    assert provider_of(s3_options({"anon": True}, {}), {}) is None
    assert provider_of(s3_options({}, {}), {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}) is None
    nobody = provider_of(s3_options({"profile": "nobody"}, {}), {})
    assert nobody is not None
    with pytest.raises(ConfigurationError, match="'nobody'"):
        nobody()
    with pytest.raises(ConfigurationError, match="exclude"):
        s3_options({"profile": "team", "key": "a", "secret": "b"}, {})
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(DeniedError, match="no credentials"):
        open_origin("s3").head("bucket/key")


def test_s3_without_botocore_finds_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("millrace.origin.credentials.s3._METADATA_ADDRESS", ("127.0.0.1", 1))
    with pytest.raises(DeniedError, match="no credentials"):
        provider_of(s3_options({}, {}), {})
    with pytest.raises(MissingDependencyError, match=r"millrace\[s3\]"):
        provider_of(s3_options({"profile": "team"}, {}), {})


class _Server(BaseHTTPRequestHandler):
    """An S3 that returns weak ETags, or none. A weak ETag never matches."""

    body: ClassVar[bytes] = b"0123456789"
    etag: ClassVar[str | None] = None

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if "If-Match" in self.headers:
            self.send_response(412)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body, total = type(self).body, len(type(self).body)
        wanted = self.headers.get("Range")
        if wanted:
            first, last = (int(part) for part in wanted.removeprefix("bytes=").split("-"))
            body = body[first : last + 1]
            self.send_response(206 if body else 416)
            self.send_header("Content-Range", f"bytes {first}-{min(last, total - 1)}/{total}")
        else:
            self.send_response(200)
        if self.etag:
            self.send_header("ETag", self.etag)
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        if not body and wanted:
            body = b"<Error><Code>InvalidRange</Code></Error>"
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def weak(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(_Server, "body", b"0123456789")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("etag", ['W/"1"', None])
def test_version_without_precondition_is_compared_afterwards(
    etag: str | None, weak: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Server, "etag", etag)
    origin = open_origin("s3", {"anon": True, "endpoint_url": weak})
    found = origin.head("b/k")
    assert bytes(origin.read("b/k", 2, 5, version=found.version)) == b"234"
    monkeypatch.setattr(_Server, "body", b"another")
    monkeypatch.setattr(_Server, "etag", 'W/"2"' if etag else None)
    for start, stop in ((2, 5), (2, 10), (8, 10)):
        with pytest.raises(ObjectChangedError):
            origin.read("b/k", start, stop, version=found.version)


def test_object_store_range_past_the_end_raises_usage_error(
    weak: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    for origin, key in (
        (open_origin("s3", {"anon": True, "endpoint_url": weak}), "b/k"),
        (open_origin("file"), f"{tmp_path}/x"),
    ):
        for start, stop in ((5, 11), (10, 12), (20, 30)):
            with pytest.raises(UsageError, match="past the 10 bytes"):
                origin.read(key, start, stop)


@pytest.mark.parametrize(
    ("code", "expected", "match"),
    [("AccessDenied", DeniedError, "s3://b/d/x2 was denied"), ("SlowDown", OriginBusyError, "requests a lower rate")],
)
def test_removal_of_several_objects_raises_the_error_of_the_one_that_stays(
    code: str, expected: type[MillraceError], match: str
) -> None:
    """AWS responds with the status 200, and an error for each object that stays."""
    rows = f"<Deleted><Key>d/x1</Key></Deleted><Error><Key>d/x2</Key><Code>{code}</Code><Message>no</Message></Error>"

    def answer(request: Request) -> Reply:
        return Reply(body=f"<DeleteResult>{rows}</DeleteResult>".encode())

    with HttpService(answer) as server:
        options = {"endpoint_url": server.url, "key": "k", "secret": "s"}
        origin = open_origin("s3", options, {"timeout": "1s"})
        with pytest.raises(expected, match=match):
            origin.delete(["b/d/x1", "b/d/x2"])
    if expected is DeniedError:
        assert server.count("POST") == 1


def test_listing_whose_server_repeats_a_page_ends() -> None:
    """As behind a proxy that ignores the continuation token, so that each page is followed by another."""
    rows = "".join(
        f"<Contents><Key>k{number:04}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f'<ETag>"1"</ETag><Size>1</Size></Contents>'
        for number in range(1000)
    )
    page = (
        "<ListBucketResult><Name>b</Name><KeyCount>1000</KeyCount><IsTruncated>true</IsTruncated>"
        f"<NextContinuationToken>more</NextContinuationToken>{rows}</ListBucketResult>"
    ).encode()

    def answer(request: Request) -> Reply:
        return Reply(body=page) if len(server.requests) < 10 else Reply(status=500)

    with HttpService(answer) as server:
        origin = open_origin("s3", {"endpoint_url": server.url, "key": "k", "secret": "s"})
        with pytest.raises(OriginUnavailableError, match="repeats the page that ends with b/k0999"):
            for _ in origin.list_all("b"):
                pass
