"""Credentials that expire or are replaced while a job runs: they are looked up again, or the error names the cause."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.support.azurite import AzuriteServer
from tests.support.gcs_server import GcsFront
from tests.support.identities import certificate
from tests.support.ports import reserved_port

from millrace.errors import DeniedError, OriginUnavailableError
from millrace.origin import Origin, open_origin
from millrace.origin.object_store import ObjectStoreOrigin
from millrace.testing.s3 import S3Server

_PROGRAM = """
import datetime, json, sys
log, keys, seconds = sys.argv[1:]
with open(log, "a") as file:
    file.write("asked\\n")
end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=float(seconds))
print(json.dumps({"Version": 1, "Expiration": end.isoformat(), **json.load(open(keys))}))
"""


class Profile:
    """A profile of the AWS CLI whose credentials a program gives, with an end some seconds later."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, *, seconds: float) -> None:
        self._log, self._keys = directory / "asked.log", directory / "keys.json"
        program, config = directory / "program.py", directory / "config"
        program.write_text(_PROGRAM)
        command = f"{sys.executable} {program} {self._log} {self._keys} {seconds}"
        config.write_text(f"[profile team]\ncredential_process = {command}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(directory / "none"))

    def set(self, key: str, secret: str) -> None:
        self._keys.write_text(json.dumps({"AccessKeyId": key, "SecretAccessKey": secret}))

    def times_asked(self) -> int:
        return len(self._log.read_text().splitlines())


_SOON = 120.0
"""Seconds: near enough for all libraries to ask again, and far enough for a busy machine to use what it has."""

_ASKED_AGAIN_SECONDS = 0.2
"""obstore asks for what is near its end no more often than each tenth of a second."""


def test_profile_credentials_near_their_end_are_requested_again(
    s3: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = Profile(tmp_path, monkeypatch, seconds=_SOON)
    profile.set(s3.key, s3.secret)
    origin = open_origin("s3", {"profile": "team", "endpoint_url": s3.endpoint_url})
    origin.put(f"{bucket}/object", b"data")
    before = profile.times_asked()
    time.sleep(_ASKED_AGAIN_SECONDS)
    assert bytes(origin.read(f"{bucket}/object", 0, 4)) == b"data"
    assert profile.times_asked() > before


@pytest.mark.slow
def test_replaced_keys_are_looked_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = Profile(tmp_path, monkeypatch, seconds=3600)
    with reserved_port() as port:
        with S3Server(tmp_path / "s3", port=port) as first:
            first.create_bucket("data")
            profile.set(first.key, first.secret)
            origin = open_origin("s3", {"profile": "team", "endpoint_url": first.endpoint_url})
            origin.put("data/dir/object", b"data")
            version = origin.head("data/dir/object").version
        with S3Server(tmp_path / "s3", port=port) as second:  # the same data, other keys
            with pytest.raises(DeniedError):
                origin.head("data/dir/object")
            profile.set(second.key, second.secret)
            time.sleep(1.1)  # they are not looked for more than once a second
            assert bytes(origin.read("data/dir/object", 0, 4, version=version)) == b"data"
            assert [info.key for page in origin.list_all("data") for info in page] == ["data/dir/object"]
            with origin.open_writer("data/other") as writer:
                writer.write(b"more")
            assert origin.head("data/other").size == 4


_PROGRAM_OF_SESSIONS = """
import json, sys
log, key, secret = sys.argv[1:]
with open(log, "a+") as file:
    file.write("asked\\n")
    file.seek(0)
    number = len(file.readlines())
if number < 12:
    key = f"session-{number}"
print(json.dumps({"Version": 1, "AccessKeyId": key, "SecretAccessKey": secret}))
"""


def test_denied_listing_with_ever_new_keys_ends(
    s3: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twelfth keys would be accepted, so that endless renewal is detected without a wait."""
    program, log = tmp_path / "sessions.py", tmp_path / "asked.log"
    program.write_text(_PROGRAM_OF_SESSIONS)
    command = f"{sys.executable} {program} {log} {s3.key} {s3.secret}"
    (tmp_path / "config").write_text(f"[profile team]\ncredential_process = {command}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(
        "millrace.origin.store_access._RENEW_SECONDS", 0.0
    )  # as for a program that takes longer than that
    origin = open_origin("s3", {"profile": "team", "endpoint_url": s3.endpoint_url})
    with pytest.raises(DeniedError):
        list(origin.list_all(bucket))
    assert len(log.read_text().splitlines()) == 2


class _Sts(BaseHTTPRequestHandler):
    """Answers `AssumeRole` with the credentials in `given`, which end soon: AWS's service cannot be had here."""

    given: ClassVar[tuple[str, str]]
    asked: ClassVar[list[str]]

    def do_POST(self) -> None:
        self.asked.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        end = (datetime.now(UTC) + timedelta(seconds=_SOON)).isoformat()
        key, secret = self.given
        body = (
            "<AssumeRoleResponse><AssumeRoleResult><Credentials>"
            f"<AccessKeyId>{key}</AccessKeyId><SecretAccessKey>{secret}</SecretAccessKey>"
            f"<SessionToken></SessionToken><Expiration>{end}</Expiration>"
            "</Credentials></AssumeRoleResult></AssumeRoleResponse>"
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def a_team_with_a_role(handler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A profile `team` whose role is requested at a service that answers by `handler`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    (tmp_path / "config").write_text(
        "[profile base]\naws_access_key_id = BASE\naws_secret_access_key = hush\n"
        "[profile team]\nrole_arn = arn:aws:iam::1:role/reader\nsource_profile = base\nregion = us-east-1\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{server.server_port}")
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_profile_role_is_assumed_and_renewed(
    s3: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler: Any = type("_Handler", (_Sts,), {"given": (s3.key, s3.secret), "asked": []})
    with a_team_with_a_role(handler, tmp_path, monkeypatch):
        origin = open_origin("s3", {"profile": "team", "endpoint_url": s3.endpoint_url})
        origin.put(f"{bucket}/object", b"data")
        before = len(handler.asked)
        time.sleep(_ASKED_AGAIN_SECONDS)
        assert bytes(origin.read(f"{bucket}/object", 0, 4)) == b"data"
        assert len(handler.asked) > before
        assert all("role%2Freader" in body for body in handler.asked)


class _StsThatRefuses(_Sts):
    """Like AWS if the role does not trust the caller; the message contains a secret that must not be shown."""

    def do_POST(self) -> None:
        self.asked.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        body = b"<ErrorResponse><Error><Code>AccessDenied</Code><Message>hush</Message></Error></ErrorResponse>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_refused_role_raises_denied(s3: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler: Any = type("_Handler", (_StsThatRefuses,), {"asked": []})
    with a_team_with_a_role(handler, tmp_path, monkeypatch):
        with pytest.raises(DeniedError) as caught:
            open_origin("s3", {"profile": "team", "endpoint_url": s3.endpoint_url}).head(f"{bucket}/object")
        assert caught.value.next_step
        assert "hush" not in f"{caught.value!r} {caught.value}"
        assert handler.asked


class _StsThatThrottles(_Sts):
    """Like AWS under load: with the status 400."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b"<ErrorResponse><Error><Code>Throttling</Code><Message>Rate exceeded</Message></Error></ErrorResponse>"
        self.send_response(400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_throttled_role_is_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with a_team_with_a_role(_StsThatThrottles, tmp_path, monkeypatch):
        origin = ObjectStoreOrigin("s3", {"profile": "team", "endpoint_url": "http://127.0.0.1:1"})
        with pytest.raises(OriginUnavailableError, match="credentials does not respond"):
            origin.head("bucket/object")


@pytest.fixture
def gcs(s3: S3Server) -> Iterator[GcsFront]:
    with GcsFront(s3, token_seconds=_SOON) as front:
        yield front


def _with_service_account(gcs: GcsFront, key: str) -> Origin:
    return open_origin("gs", {"endpoint_url": gcs.endpoint, "token": gcs.service_account(key)})


def test_tokens_of_a_service_account_are_renewed(gcs: GcsFront, bucket: str, service_account_key: str) -> None:
    origin = _with_service_account(gcs, service_account_key)
    origin.put(f"{bucket}/object", b"data")
    given = gcs.tokens_given
    time.sleep(_ASKED_AGAIN_SECONDS)
    assert bytes(origin.read(f"{bucket}/object", 0, 4)) == b"data"
    assert gcs.tokens_given > given


def test_revoked_tokens_are_requested_again(gcs: GcsFront, bucket: str, service_account_key: str) -> None:
    gcs.token_seconds = 3600
    origin = _with_service_account(gcs, service_account_key)
    origin.put(f"{bucket}/object", b"data")
    gcs.end_all_tokens()
    assert bytes(origin.read(f"{bucket}/object", 0, 4)) == b"data"
    gcs.end_all_tokens()
    time.sleep(1.1)  # they are not looked for more than once a second
    assert origin.list_level(bucket).objects


def test_service_account_is_pickled_with_its_origin(gcs: GcsFront, bucket: str, service_account_key: str) -> None:
    origin = _with_service_account(gcs, service_account_key)
    origin.put(f"{bucket}/object", b"data")
    copy = pickle.loads(pickle.dumps(origin))
    assert bytes(copy.read(f"{bucket}/object", 0, 4)) == b"data"


def test_expired_explicit_token_raises(gcs: GcsFront, bucket: str) -> None:
    token = gcs.token()
    origin = open_origin("gs", {"endpoint_url": gcs.endpoint, "token": token})
    origin.put(f"{bucket}/object", b"data")
    gcs.end_all_tokens()
    with pytest.raises(DeniedError) as caught:
        origin.read(f"{bucket}/object", 0, 4)
    assert caught.value.next_step
    assert token not in f"{caught.value!r} {caught.value}"


@pytest.mark.slow
@pytest.mark.azurite
def test_shared_access_signature_works_until_it_expires(azurite: AzuriteServer, container: str) -> None:
    where = {"account_name": azurite.account, "account_host": azurite.endpoint}
    origin = open_origin("az", {**where, "sas_token": f"?{azurite.signature()}"})
    origin.put(f"{container}/object", b"data")
    assert bytes(origin.read(f"{container}/object", 0, 4)) == b"data"
    assert [info.key for page in origin.list_all(container) for info in page] == [f"{container}/object"]
    signature = azurite.signature(seconds=1)  # in whole seconds
    expired = open_origin("az", {**where, "sas_token": f"?{signature}"})
    time.sleep(1.2)
    with pytest.raises(DeniedError) as caught:
        expired.read(f"{container}/object", 0, 4)
    assert signature.rpartition("sig=")[2] not in f"{caught.value!r} {caught.value}"
    assert bytes(origin.read(f"{container}/object", 0, 4)) == b"data"


@pytest.mark.azurite
def test_public_container_needs_no_credentials(azurite: AzuriteServer, container: str) -> None:
    azurite.create_container(f"{container}-open", public=True)
    for name in (container, f"{container}-open"):
        open_origin("az", azurite.target_options).put(f"{name}/object", b"data")
    anonymous = open_origin("az", {"account_name": azurite.account, "account_host": azurite.endpoint, "anon": True})
    assert bytes(anonymous.read(f"{container}-open/object", 0, 4)) == b"data"
    for call in (lambda: anonymous.head(f"{container}/object"), lambda: anonymous.put(f"{container}-open/x", b"")):
        with pytest.raises(DeniedError):
            call()


_READ_WITH_TOKENS = """
import sys, time
from types import SimpleNamespace
from millrace.errors import DeniedError
from millrace.origin import open_origin

account, endpoint, *tokens = sys.argv[1:]

class Credential:
    # As azure-identity's: gives the next token a moment after the first has ended.
    def __init__(self):
        self.given = 0

    def get_token(self, *scopes):
        token, seconds = tokens[min(self.given, len(tokens) - 1)].split("@")
        self.given += 1
        return SimpleNamespace(token=token, expires_on=float(seconds))

credential = Credential()
origin = open_origin("az", {"account_name": account, "account_host": endpoint, "credential": credential})
try:
    origin.put("data/object", b"data")
    while time.time() < float(tokens[0].split("@")[1]) + 1.5:
        time.sleep(0.1)
    print(bytes(origin.read("data/object", 0, 4)).decode(), credential.given > 1)
except DeniedError:
    print("denied")
"""


@pytest.mark.slow
@pytest.mark.azurite
def test_tokens_of_an_azure_identity_are_renewed(tmp_path: Path) -> None:
    """The server checks when a token expires. A stand-in issues it, since no identity service is available here."""
    files = certificate(tmp_path)
    with AzuriteServer(tmp_path / "azurite", tls=files) as server:
        server.create_container("data")
        short, long = (f"{server.token(seconds=seconds)}@{time.time() + seconds}" for seconds in (4, 600))

        def read(tokens: Sequence[str]) -> str:
            done = subprocess.run(
                [sys.executable, "-c", _READ_WITH_TOKENS, server.account, server.endpoint, *tokens],
                env={**os.environ, "SSL_CERT_FILE": str(files[0])},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(read, [(short, long), (short,)])) == ["data True", "denied"]
