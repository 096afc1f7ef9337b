"""Machines and pods without any key: S3 by instance metadata, by container credentials and by a web identity; Azure by
a managed and by a workload identity.

The services of the clouds are not available here. `tests/support/identities.py` replaces them, and puts a gate
with AWS's sessions in front of a real S3 server. Azurite accepts any unexpired token, over TLS only. The libraries find
them by their own variables: `AWS_EC2_METADATA_SERVICE_ENDPOINT` (botocore), `AWS_ENDPOINT_URL_STS`,
`AWS_CONTAINER_CREDENTIALS_FULL_URI`, `AZURE_MSI_ENDPOINT` (obstore), `IDENTITY_ENDPOINT` (azure-identity) and
`AZURE_AUTHORITY_HOST`. No variable changes the address 169.254.170.2 of `AWS_CONTAINER_CREDENTIALS_RELATIVE_URI` (ECS), or
the address 169.254.169.254 of Millrace's own metadata requests. These two are not tested.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.azurite import AzuriteServer
from tests.support.http_service import Reply
from tests.support.identities import (
    ContainerCredentials,
    FederatedTokens,
    InstanceMetadata,
    ManagedIdentity,
    SessionGate,
    Stand,
    TokenService,
    certificate,
    tls_context,
)

import millrace
from millrace.errors import DeniedError, MillraceError, MissingDependencyError, OriginUnavailableError
from millrace.filesystem import MillraceFileSystem
from millrace.origin import open_origin
from millrace.origin.object_store import ObjectStoreOrigin
from millrace.testing.s3 import S3Server

_OBJECTS = {f"object-{number}": os.urandom(1000) for number in range(6)}

_SOON = 120.0
"""Seconds: near enough for obstore to ask again, and far enough for a busy machine to use what it has."""

_ASKED_AGAIN_SECONDS = 0.2
"""obstore asks for what is near its end no more often than each tenth of a second."""


@dataclass
class Place:
    """A bucket with objects behind a gate, and a process's environment that has no key for it."""

    gate: SessionGate
    bucket: str
    directory: Path
    monkeypatch: pytest.MonkeyPatch
    secrets: list[str] = field(default_factory=list)
    """Secrets that must not be shown, in addition to those of the sessions."""

    def fs(self) -> MillraceFileSystem:
        """Another file system each time, with nothing in the cache."""
        cache = self.directory / f"cache-{len(list(self.directory.glob('cache-*')))}"
        cache.mkdir()
        return millrace.filesystem(
            "s3", target_options={"endpoint_url": self.gate.url}, cache_dir=str(cache), min_free=0
        )

    def setenv(self, **variables: str) -> None:
        for name, value in variables.items():
            self.monkeypatch.setenv(name, value)

    def token_file(self, content: str) -> str:
        self.secrets.append(content)
        path = self.directory / "token"
        path.write_text(content)
        return str(path)

    def assert_clear(self, error: MillraceError) -> None:
        """One line, with a next step, and without a secret."""
        assert error.next_step
        assert "\n" not in str(error)
        reported = self.secrets + [text for each in self.gate.sessions for text in (each.secret, each.token)]
        assert reported
        assert not [secret for secret in reported if secret in f"{error} {error!r} {error.args}"]


@pytest.fixture(scope="module")
def objects(s3: S3Server) -> str:
    """The bucket with the objects, which all tests only read."""
    s3.create_bucket("identity")
    origin = open_origin("s3", s3.target_options)
    for name, data in _OBJECTS.items():
        origin.put(f"identity/{name}", data)
    return "identity"


@pytest.fixture
def place(s3: S3Server, objects: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("HOME", str(tmp_path))  # no files of the user's
    with SessionGate(s3) as gate:
        yield Place(gate, objects, tmp_path, monkeypatch)


def _instance(place: Place) -> Stand:
    stand = InstanceMetadata(place.gate)
    # By default botocore asks once, and waits for a second: not enough on a busy machine.
    place.setenv(AWS_EC2_METADATA_SERVICE_ENDPOINT=stand.url, AWS_METADATA_SERVICE_TIMEOUT="120")
    return stand


def _pod(place: Place) -> Stand:
    stand = ContainerCredentials(place.gate, "the-token-of-the-pod")
    place.setenv(
        AWS_CONTAINER_CREDENTIALS_FULL_URI=f"{stand.url}/v1/credentials",
        AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE=place.token_file("the-token-of-the-pod"),
    )
    return stand


def _pod_with_the_token_itself(place: Place) -> Stand:
    """As a task of ECS outside of AWS. obstore alone would request the metadata of EC2."""
    stand = ContainerCredentials(place.gate, "the-token-of-the-task")
    place.monkeypatch.setattr("botocore.utils.ContainerMetadataFetcher.TIMEOUT_SECONDS", 120)
    place.secrets.append("the-token-of-the-task")
    place.setenv(
        AWS_CONTAINER_CREDENTIALS_FULL_URI=f"{stand.url}/v1/credentials",
        AWS_CONTAINER_AUTHORIZATION_TOKEN="the-token-of-the-task",
    )
    return stand


def _web_identity(place: Place) -> Stand:
    files = certificate(place.directory)
    stand = TokenService(place.gate, "the-token-of-the-service-account", tls=tls_context(files))
    place.setenv(
        SSL_CERT_FILE=str(files[0]),
        AWS_ENDPOINT_URL_STS=stand.url,
        AWS_ROLE_ARN="arn:aws:iam::1:role/reader",
        AWS_WEB_IDENTITY_TOKEN_FILE=place.token_file("the-token-of-the-service-account"),
    )
    return stand


def _web_identity_of_a_profile(place: Place) -> Stand:
    """In the user's file, so that botocore sends the requests."""
    files = certificate(place.directory)
    stand = TokenService(place.gate, "the-token-of-the-service-account", tls=tls_context(files))
    config = place.directory / "config"
    config.write_text(
        "[default]\nrole_arn = arn:aws:iam::1:role/reader\nregion = us-east-1\n"
        f"web_identity_token_file = {place.token_file('the-token-of-the-service-account')}\n"
    )
    place.setenv(AWS_CA_BUNDLE=str(files[0]), AWS_ENDPOINT_URL_STS=stand.url, AWS_CONFIG_FILE=str(config))
    return stand


_every = pytest.mark.parametrize(
    "identity", [_instance, _pod, _pod_with_the_token_itself, _web_identity, _web_identity_of_a_profile]
)


@_every
def test_machine_identity_is_requested_once(identity: Callable[[Place], Stand], place: Place) -> None:
    with identity(place) as stand:
        fs = place.fs()
        with ThreadPoolExecutor(4) as pool:
            read = list(pool.map(lambda name: fs.cat_file(f"{place.bucket}/{name}"), _OBJECTS))
        assert read == list(_OBJECTS.values())
        assert sorted(fs.ls(place.bucket, detail=False)) == sorted(f"{place.bucket}/{name}" for name in _OBJECTS)
        assert stand.given == 1


@pytest.mark.slow
@_every
def test_sessions_that_end_are_renewed_while_objects_are_read(identity: Callable[[Place], Stand], place: Place) -> None:
    """They are refused from then on, and were to end soon. Of EC2, botocore would use expired ones for 12 minutes more."""
    place.gate.seconds = _SOON
    with identity(place) as stand:
        fs, first, second = place.fs(), *list(_OBJECTS)[:2]
        assert fs.cat_file(f"{place.bucket}/{first}") == _OBJECTS[first]
        asked = stand.given
        place.gate.revoke_all()
        time.sleep(_ASKED_AGAIN_SECONDS)
        assert fs.cat_file(f"{place.bucket}/{second}") == _OBJECTS[second]
        assert stand.given > asked


def assert_refused(place: Place, stand: Stand, status: int, fs: MillraceFileSystem) -> None:
    """From now on the stand-in returns a secret, which must not be in the error."""
    body = f"<Error><Code>No</Code><Message>{place.gate.sessions[0].secret}</Message></Error>".encode()
    stand.refusal = Reply(status=status, body=body)
    with pytest.raises(DeniedError) as caught:
        fs.cat_file(f"{place.bucket}/object-1")
    place.assert_clear(caught.value)


@pytest.mark.parametrize("status", [401, 404])
@pytest.mark.parametrize("identity", [_instance, _pod, _web_identity, _web_identity_of_a_profile])
def test_refused_identity_raises_denied(identity: Callable[[Place], Stand], place: Place, status: int) -> None:
    """At first, and when a session is to be renewed."""
    with identity(place) as stand:
        place.gate.open()
        assert_refused(place, stand, status, place.fs())


@pytest.mark.parametrize("identity", [_instance, _pod, _web_identity, _web_identity_of_a_profile])
def test_refused_renewal_raises_denied(identity: Callable[[Place], Stand], place: Place) -> None:
    """The session ends soon, so that the next read requests another."""
    place.gate.seconds = _SOON
    with identity(place) as stand:
        fs = place.fs()
        fs.cat_file(f"{place.bucket}/object-0")
        place.gate.revoke_all()
        time.sleep(_ASKED_AGAIN_SECONDS)
        assert_refused(place, stand, 403, fs)


@pytest.mark.parametrize("identity", [_instance, _pod_with_the_token_itself])
def test_sessions_that_were_revoked_are_replaced(identity: Callable[[Place], Stand], place: Place) -> None:
    """With identities that botocore requests. obstore keeps credentials until they nearly expire."""
    with identity(place) as stand:
        fs = place.fs()
        fs.cat_file(f"{place.bucket}/object-0")
        place.gate.revoke_all()
        assert fs.cat_file(f"{place.bucket}/object-1") == _OBJECTS["object-1"]
        assert stand.given == 2


@pytest.mark.parametrize("identity", [_pod, _web_identity])
def test_replaced_token_file_is_read_again(identity: Callable[[Place], Stand], place: Place) -> None:
    """As the kubelet does, long before its end."""
    place.gate.seconds = _SOON
    with identity(place) as stand:
        assert isinstance(stand, ContainerCredentials | TokenService)
        fs = place.fs()
        fs.cat_file(f"{place.bucket}/object-0")
        stand.token = "the-next-token"
        place.token_file("the-next-token")
        place.gate.revoke_all()
        time.sleep(_ASKED_AGAIN_SECONDS)
        assert fs.cat_file(f"{place.bucket}/object-1") == _OBJECTS["object-1"]


@pytest.mark.slow
@pytest.mark.parametrize("identity", [_pod, _web_identity])
def test_busy_identity_service_is_retried(identity: Callable[[Place], Stand], place: Place) -> None:
    with identity(place) as stand:
        times = iter([503, 500, 429])

        def busy(request: object, reply: Reply) -> Reply | None:
            return Reply(status=status) if (status := next(times, None)) else None

        stand.service.interfere(busy)
        assert place.fs().cat_file(f"{place.bucket}/object-0") == _OBJECTS["object-0"]
        assert len(stand.service.requests) == 4


@pytest.mark.parametrize("identity", [_web_identity, _web_identity_of_a_profile])
def test_missing_token_file_is_not_reported_as_missing_object(identity: Callable[[Place], Stand], place: Place) -> None:
    with identity(place):
        (place.directory / "token").unlink()
        origin = ObjectStoreOrigin("s3", {"endpoint_url": place.gate.url})
        with pytest.raises((DeniedError, OriginUnavailableError)) as caught:
            origin.head(f"{place.bucket}/object-0")
        place.gate.open()
        place.assert_clear(caught.value)


def test_incomplete_web_identity_raises(place: Place) -> None:
    place.setenv(AWS_WEB_IDENTITY_TOKEN_FILE=place.token_file("the-token"))
    with pytest.raises(DeniedError, match="AWS_ROLE_ARN"):
        place.fs().cat_file(f"{place.bucket}/object-0")


def test_container_token_without_botocore_raises_with_the_package(place: Place) -> None:
    place.monkeypatch.setattr("millrace.origin.credentials.s3.is_installed", lambda name: False)
    with _pod_with_the_token_itself(place), pytest.raises(MissingDependencyError) as caught:
        place.fs().cat_file(f"{place.bucket}/object-0")
    place.assert_clear(caught.value)


def test_invalid_identity_response_shows_no_secret(place: Place) -> None:
    """A service other than the variable names. Without the limits, which would retry for a minute."""
    with _web_identity(place) as stand:
        content = json.dumps(place.gate.open().content)
        stand.refusal = Reply(body=content.encode())
        origin = ObjectStoreOrigin("s3", {"endpoint_url": place.gate.url})
        with pytest.raises(OriginUnavailableError) as caught:
            origin.head(f"{place.bucket}/object-0")
        place.assert_clear(caught.value)


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def tls_azurite(trusted: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzuriteServer]:
    with AzuriteServer(tmp_path_factory.mktemp("azurite-tls"), tls=trusted) as server:
        server.create_container("data")
        yield server


AzureStand = ManagedIdentity | FederatedTokens
AzureIdentity = Callable[[AzuriteServer, tuple[Path, Path], pytest.MonkeyPatch, Path], AzureStand]


def _machine(
    server: AzuriteServer, trusted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, directory: Path
) -> AzureStand:
    stand = ManagedIdentity(server)
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", f"{stand.url}/metadata/identity/oauth2/token")
    return stand


def _app(
    server: AzuriteServer, trusted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, directory: Path
) -> AzureStand:
    pytest.importorskip("azure.identity")
    stand = ManagedIdentity(server, "the-secret-of-the-app")
    monkeypatch.setenv("IDENTITY_ENDPOINT", f"{stand.url}/msi/token")
    monkeypatch.setenv("IDENTITY_HEADER", "the-secret-of-the-app")
    return stand


def _workload(
    server: AzuriteServer, trusted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, directory: Path
) -> AzureStand:
    stand = FederatedTokens(server, "the-token-of-the-pod", tls=tls_context(trusted))
    (directory / "token").write_text("the-token-of-the-pod")
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(directory / "token"))
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", stand.url)
    monkeypatch.setenv("AZURE_TENANT_ID", "the-tenant")
    monkeypatch.setenv("AZURE_CLIENT_ID", "the-client")
    return stand


@pytest.mark.slow
@pytest.mark.azurite
@pytest.mark.parametrize("identity", [_machine, _app, _workload])
def test_azure_identity_reads_renews_and_reports_a_refusal(
    identity: AzureIdentity,
    tls_azurite: AzuriteServer,
    trusted: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted[0]))
    where = {"account_name": tls_azurite.account, "account_host": tls_azurite.endpoint}
    with identity(tls_azurite, trusted, monkeypatch, tmp_path) as stand:
        stand.seconds = _SOON
        fs, fresh = (
            millrace.filesystem("az", target_options=where, cache_dir=str(tmp_path / name), min_free=0)
            for name in ("cache", "other")
        )
        fs.pipe({f"data/{number}": b"%d" % number for number in range(3)})
        assert fs.cat_file("data/0") == b"0"
        asked = stand.given
        assert asked > 0
        time.sleep(_ASKED_AGAIN_SECONDS)
        assert fs.cat_file("data/1") == b"1"
        assert stand.given > asked
        stand.refusal = Reply(status=401, body=f'{{"error": "no", "error_description": "{stand.tokens[0]}"}}'.encode())
        with pytest.raises(DeniedError) as caught:
            fresh.cat_file("data/2")
        assert caught.value.next_step
        reported = f"{caught.value} {caught.value!r}"
        assert "\n" not in reported
        secrets = ["the-secret-of-the-app", "the-token-of-the-pod", *stand.tokens]
        assert not [secret for secret in secrets if secret in reported]
