"""The sources of credentials, their order, and the renewal.

No cloud's identity service is available here. A stand-in with the same interface replaces azure-identity's credentials.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.errors import ConfigurationError, DeniedError, MillraceError, OriginUnavailableError
from millrace.origin import open_origin
from millrace.origin.credentials import Found, Provider, find_credentials
from millrace.origin.object_store import ObjectStoreOrigin
from millrace.origin.obstore_library import obstore_library
from millrace.origin.options import azure_options, gcs_options
from millrace.origin.store_access import Clients
from millrace.runtime.forks import is_installed


def azure(given: dict[str, Any], environ: dict[str, str] | None = None) -> Found:
    return find_credentials("az", azure_options({"account_name": "acct", **given}, environ or {}), environ or {})


def google(given: dict[str, Any], environ: dict[str, str] | None = None) -> Found:
    return find_credentials("gs", gcs_options(given, environ or {}), environ or {})


class Credential:
    """Has the shape of azure-identity's credentials."""

    def __init__(self) -> None:
        self.scopes: list[str] = []

    def get_token(self, *scopes: str) -> SimpleNamespace:
        self.scopes += scopes
        return SimpleNamespace(token=f"token-{len(self.scopes)}", expires_on=time.time() + 60)


def test_azure_identity_credential_is_called_each_time() -> None:
    credential = Credential()
    provider = azure({"credential": credential}).provider
    assert provider is not None
    first, second = provider(), provider()
    assert (first["token"], second["token"]) == ("token-1", "token-2")
    assert set(credential.scopes) == {"https://storage.azure.com/.default"}
    assert 0 < first["expires_at"].timestamp() - time.time() <= 60


def _azure_failure(name: str, status: int = 0) -> Exception:
    errors = pytest.importorskip("azure.core.exceptions")
    response = SimpleNamespace(status_code=status, reason="", text=lambda: "", headers={}) if status else None
    error: Exception = getattr(errors, name)("hush", response=response) if status else getattr(errors, name)("hush")
    return error


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (lambda: _azure_failure("ServiceRequestError"), OriginUnavailableError),
        (lambda: _azure_failure("ServiceResponseTimeoutError"), OriginUnavailableError),
        (lambda: _azure_failure("HttpResponseError", 503), OriginUnavailableError),
        (lambda: _azure_failure("ClientAuthenticationError", 429), OriginUnavailableError),
        (lambda: ConnectionResetError("hush"), OriginUnavailableError),
        (lambda: _azure_failure("ClientAuthenticationError", 400), DeniedError),
        (lambda: _azure_failure("ClientAuthenticationError"), DeniedError),
        (lambda: ValueError("hush"), DeniedError),
    ],
)
def test_azure_failure_of_the_token_service_is_temporary(
    failure: Callable[[], Exception], kind: type[MillraceError]
) -> None:
    error = failure()

    def get_token(*scopes: str) -> Any:
        raise error

    provider = azure({"credential": SimpleNamespace(get_token=get_token)}).provider
    assert provider is not None
    with pytest.raises(kind) as caught:
        provider()
    assert type(caught.value) is kind
    assert "hush" not in str(caught.value)


def test_invalid_credential_object_raises() -> None:
    with pytest.raises(ConfigurationError, match="get_token"):
        azure({"credential": object()})


@pytest.mark.parametrize(
    ("variable", "kind"),
    [
        ("AZURE_FEDERATED_TOKEN_FILE", "workload_identity"),
        ("AZURE_MSI_ENDPOINT", "managed_identity"),
        ("AZURE_IDENTITY_ENDPOINT", "managed_identity"),
    ],
)
def test_azure_identity_of_a_pod_or_machine_is_configured_in_obstore(variable: str, kind: str) -> None:
    found = azure({"client_id": "me"}, {variable: "there"})
    assert (found.provider, found.config) == (None, {"credential_type": kind, "client_id": "me"})


def test_azure_without_credentials_raises_with_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.origin.credentials.azure.is_installed", lambda name: False)
    monkeypatch.setattr("millrace.origin.credentials.azure._METADATA_ADDRESS", ("127.0.0.1", 1))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DeniedError, match="az login"):
        azure({})


def test_az_login_is_used_without_azure_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("millrace.origin.credentials.azure.is_installed", lambda name: False)
    (tmp_path / "az").write_text("#!/bin/sh\n")
    (tmp_path / "az").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert azure({}).config == {"credential_type": "azure_cli"}


def test_google_without_google_auth_uses_credential_files_or_raises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("millrace.origin.credentials.gcs.is_installed", lambda name: False)
    monkeypatch.setattr("millrace.origin.credentials.gcs._METADATA_ADDRESS", ("127.0.0.1", 1))
    monkeypatch.setenv("HOME", str(tmp_path))
    account = {"type": "service_account", "client_email": "me"}
    file = tmp_path / "account.json"
    file.write_text(json.dumps(account))
    assert json.loads(google({"token": account}).config["service_account_key"]) == account
    for found in (google({"token": str(file)}), google({}, {"GOOGLE_APPLICATION_CREDENTIALS": str(file)})):
        assert found.config == {"application_credentials": str(file)}
    assert google({}, {"GOOGLE_SERVICE_ACCOUNT": str(file)}) == Found()
    with pytest.raises(DeniedError, match="gcloud auth"):
        google({})
    with pytest.raises(ConfigurationError, match="neither a file nor a way"):
        google({"token": str(tmp_path / "none.json")})


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("hush", "cannot be read"),
        ("[1]", "not a JSON object"),
        ('{"type": "external_account", "credential_source": {"executable": {"command": "hush"}}}', "neither"),
        ('{"type": "service_account", "private_key": "hush"}', "not a complete service_account"),
    ],
)
def test_unusable_credential_file_raises_without_its_content(content: str, match: str, tmp_path: Path) -> None:
    pytest.importorskip("google.auth")
    (tmp_path / "token.json").write_text(content)
    provider = google({"token": str(tmp_path / "token.json")}).provider
    assert provider is not None
    with pytest.raises(ConfigurationError, match=match) as caught:
        provider()
    assert "hush" not in str(caught.value)


class _Machine:
    """Has the shape of google-auth's credentials of a machine, whose metadata service has failed."""

    valid, expiry = False, None

    def __init__(self, token: str | None, error: Exception) -> None:
        self.token, self.error = token, error

    def refresh(self, request: Any) -> None:
        errors = pytest.importorskip("google.auth.exceptions")
        raise self.error from errors.TransportError("hush")


def test_google_failure_of_the_token_service_is_temporary() -> None:
    errors = pytest.importorskip("google.auth.exceptions")
    for token, error, kind in (
        ("earlier", errors.RefreshError("hush"), OriginUnavailableError),
        (None, errors.RefreshError("hush"), DeniedError),  # not on a machine of Google
        (None, errors.RefreshError("hush", retryable=True), OriginUnavailableError),
    ):
        provider = google({"token": _Machine(token, error)}).provider
        assert provider is not None
        with pytest.raises(kind) as caught:
            provider()
        assert type(caught.value) is kind
        assert "hush" not in str(caught.value)


def test_provider_renew_returns_whether_credentials_changed() -> None:
    kept = ["one"]
    looked_up = []

    def look_up() -> Any:
        looked_up.append(kept[0])
        secret = kept[0]
        return lambda: {"token": secret, "expires_at": time.time()}

    provider = Provider(look_up)
    assert looked_up == []
    assert (provider()["token"], provider()["token"]) == ("one", "one")
    assert looked_up == ["one"]
    assert not provider.renew()
    kept[0] = "two"
    assert provider()["token"] == "one"
    assert provider.renew()
    assert provider()["token"] == "two"


def test_provider_keeps_its_error_until_it_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    # A failure that takes no time is shared with no later request.
    monkeypatch.setattr("millrace.origin.credentials.provider.time", SimpleNamespace(monotonic=lambda: 1000.0))
    works = [False]

    def answer() -> dict[str, Any]:
        if not works[0]:
            raise DeniedError("no")
        return {"token": "t"}

    provider = Provider(lambda: answer)
    with pytest.raises(DeniedError):
        provider()
    assert isinstance(provider.error, DeniedError)
    works[0] = True
    assert provider() == {"token": "t"}
    assert provider.error is None


def test_slow_failure_of_credentials_is_shared_by_the_requests_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [1000.0], []

    def answer() -> dict[str, Any]:
        asked.append(now[0])
        now[0] += 120
        raise OriginUnavailableError("the token service does not respond")

    monkeypatch.setattr("millrace.origin.credentials.provider.time", SimpleNamespace(monotonic=lambda: now[0]))
    provider = Provider(lambda: answer)
    for _ in range(50):
        with pytest.raises(OriginUnavailableError, match="does not respond"):
            provider()
    assert len(asked) == 1
    now[0] += 5
    with pytest.raises(OriginUnavailableError):
        provider()
    assert len(asked) == 2


def test_credentials_are_used_until_they_expire_while_their_service_fails() -> None:
    """Libraries request them again minutes before their end."""
    now = datetime.now(UTC)
    for end, is_valid in ((now + timedelta(hours=1), True), (now - timedelta(hours=1), False)):
        answers: list[dict[str, Any]] = [{"token": "t", "expires_at": end}]

        def answer(answers: list[dict[str, Any]] = answers) -> dict[str, Any]:
            if not answers:
                raise OriginUnavailableError("the token service does not respond")
            return answers.pop()

        provider = Provider(lambda answer=answer: answer)
        provider()
        if is_valid:
            assert provider()["token"] == "t"
        else:
            with pytest.raises(OriginUnavailableError):
                provider()


def _clients(monkeypatch: pytest.MonkeyPatch, given: list[str], asked: Callable[[], None] = lambda: None) -> Clients:
    """Clients of S3 whose credentials are the last of `given` at the time when they are looked up; they send no request."""

    def look_up() -> Any:
        asked()
        key = given[-1]
        return lambda: {"access_key_id": key, "secret_access_key": "s", "token": None, "expires_at": None}

    provider = Provider(look_up)
    monkeypatch.setattr("millrace.origin.store_access.find_credentials", lambda *_: Found(provider=provider))
    return Clients("s3", {"endpoint_url": "http://127.0.0.1:1"})


def test_refused_threads_retry_with_credentials_renewed_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["first"]
    clients = _clients(monkeypatch, given)
    used = clients.get("bucket")
    given.append("second")
    all_refused = threading.Barrier(8)

    def go_on(_: int) -> bool:
        all_refused.wait(120)
        again = clients.renew(used)
        return again and clients.get("bucket") is not used

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(go_on, range(8))) == [True] * 8


def test_credentials_are_not_looked_up_again_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    given = ["first"]

    def asked() -> None:
        now[0] += 5
        given.append(f"of-{now[0]}")

    clients = _clients(monkeypatch, given, asked)
    monkeypatch.setattr("millrace.origin.store_access.time", SimpleNamespace(monotonic=lambda: now[0]))
    assert clients.renew(clients.get("bucket"))
    assert not clients.renew(clients.get("bucket"))
    now[0] += 2
    assert clients.renew(clients.get("bucket"))


def test_renewal_that_fails_for_now_is_not_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The retry of a request comes within a second, and so do those of other threads."""
    now, works = [1000.0], [True]
    given = ["first"]

    def asked() -> None:
        if not works[0]:
            raise OriginUnavailableError("the token service does not respond")

    clients = _clients(monkeypatch, given, asked)
    monkeypatch.setattr("millrace.origin.store_access.time", SimpleNamespace(monotonic=lambda: now[0]))
    used = clients.get("bucket")
    works[0] = False
    for _ in range(3):
        with pytest.raises(OriginUnavailableError, match="does not respond"):
            clients.renew(used)
    works[0] = True
    given.append("second")
    now[0] += 2
    assert clients.renew(used)


def test_half_a_pair_of_variables_is_an_error_that_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    with pytest.raises(DeniedError, match="AWS_ACCESS_KEY_ID is set without AWS_SECRET_ACCESS_KEY"):
        open_origin("s3", {"endpoint_url": "http://127.0.0.1:1"}).head("bucket/key")


def test_empty_profile_variable_is_named_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_PROFILE", "")
    with pytest.raises(
        ConfigurationError, match="there is no AWS profile '': correct 'profile' or AWS_PROFILE, or unset"
    ):
        open_origin("s3", {"endpoint_url": "http://127.0.0.1:1"}).head("bucket/key")


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"])
def test_variable_with_a_space_inside_a_credential_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(each, "two parts" if each == name else "value")
    with pytest.raises(ConfigurationError, match="contains a space") as caught:
        open_origin("s3", {"endpoint_url": "http://127.0.0.1:1"}).head("bucket/key")
    assert "two parts" not in str(caught.value)


def test_obstore_error_of_client_creation_is_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    origin = ObjectStoreOrigin("s3", {"endpoint_url": "http://127.0.0.1:1", "anon": True})

    def get(container: str, *, streams: bool = False) -> None:
        raise obstore_library().exceptions.GenericError("Generic S3 error: bad value 'hush'\n\nDebug source: hush")

    monkeypatch.setattr(origin._clients, "get", get)
    with pytest.raises(ConfigurationError, match="Generic S3 error") as caught:
        origin.head("bucket/key")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("has_library", [True, False])
def test_variable_with_missing_file_is_named_in_the_error(has_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.origin.credentials.gcs.is_installed", lambda name: has_library)
    with pytest.raises(ConfigurationError, match=r"GOOGLE_APPLICATION_CREDENTIALS names /nope/key\.json"):
        google({}, {"GOOGLE_APPLICATION_CREDENTIALS": "/nope/key.json"})


def test_warnings_of_credential_are_muted_and_other_logging_is_unchanged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("azure.identity._internal")

    def get_token(*scopes: str) -> Any:
        log.warning("no environment configuration")
        logging.getLogger("mine").warning("mine")
        raise RuntimeError("none")

    found = azure({"credential": SimpleNamespace(get_token=get_token)})
    assert found.provider is not None
    with pytest.raises(DeniedError):
        found.provider()
    log.warning("later")
    assert [record.getMessage() for record in caplog.records] == ["mine", "later"]


def test_module_without_its_package_is_reported_as_missing() -> None:
    assert not is_installed("millrace_none")
    assert not is_installed("millrace_none.part")
    assert is_installed("json")
