"""Origins over object stores pass the conformance suite: the tests' origin in memory, local files, and real servers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.azurite import AzuriteServer
from tests.support.gcs_server import GcsFront
from tests.support.origins import MemoryOrigin

from millrace.origin import Origin, open_origin
from millrace.testing.conformance import FromEnvironment, OriginConformance
from millrace.testing.s3 import S3Server

_BACKSLASHES = frozenset({"back\\slash", "in\\..\\decoy"})


class TestMemoryOrigin(OriginConformance):
    picklable = False

    @pytest.fixture
    def origin(self) -> Origin:
        return MemoryOrigin()

    @pytest.fixture
    def root(self) -> str:
        return "bucket/root"


class TestFileOrigin(OriginConformance):
    ordered = False  # as the operating system gives them

    @pytest.fixture
    def origin(self) -> Origin:
        return open_origin("file")

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path)


class TestS3Origin(OriginConformance):
    unsupported_names = _BACKSLASHES  # SeaweedFS makes slashes of them, and fails where that gives `..`

    @pytest.fixture
    def origin(self, s3: S3Server) -> Origin:
        self.secrets = [str(s3.target_options["secret"])]
        return open_origin("s3", s3.target_options)

    @pytest.fixture
    def root(self, bucket: str) -> str:
        return f"{bucket}/root"

    @pytest.fixture(params=["variables", "profile"])
    def environment_origin(
        self, s3: S3Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> FromEnvironment:
        options = s3.target_options
        key, secret = str(options["key"]), str(options["secret"])
        if request.param == "variables":
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        else:
            (tmp_path / "credentials").write_text(
                f"[team]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
            )
            monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
            monkeypatch.setenv("AWS_PROFILE", "team")
        return FromEnvironment(open_origin("s3", {"endpoint_url": options["endpoint_url"]}), [key, secret])


@pytest.mark.azurite
class TestAzureOrigin(OriginConformance):
    """Azurite: no identities, and the account is in the URL's path."""

    unsupported_names = _BACKSLASHES  # Azure makes slashes of them: refused

    @pytest.fixture
    def origin(self, azurite: AzuriteServer) -> Origin:
        self.secrets = [azurite.key]
        return open_origin("az", azurite.target_options)

    @pytest.fixture
    def root(self, container: str) -> str:
        return f"{container}/root"

    @pytest.fixture(params=["key", "signature", "connection string"])
    def environment_origin(
        self, azurite: AzuriteServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> FromEnvironment:
        signature = azurite.signature()
        where = {"account_name": azurite.account, "account_host": azurite.endpoint}
        if request.param == "key":
            monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", azurite.key)
        elif request.param == "signature":
            monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", signature)
        else:
            monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.connection_string)
            where = {}
        return FromEnvironment(open_origin("az", where), [azurite.key, signature])


@pytest.fixture(scope="module")
def gcs(s3: S3Server) -> Iterator[GcsFront]:
    with GcsFront(s3) as front:
        yield front


class TestGcsOrigin(OriginConformance):
    """Google's dialect in front of SeaweedFS: the limits are those of `tests.support.gcs_server`."""

    unsupported_names = _BACKSLASHES  # SeaweedFS makes slashes of them, and fails where that gives `..`

    @pytest.fixture
    def origin(self, gcs: GcsFront) -> Origin:
        token = gcs.token()
        self.secrets = [token]
        return open_origin("gs", {"endpoint_url": gcs.endpoint, "token": token})

    @pytest.fixture
    def root(self, bucket: str) -> str:
        return f"{bucket}/root"

    @pytest.fixture
    def environment_origin(
        self, gcs: GcsFront, service_account_key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> FromEnvironment:
        file = tmp_path / "account.json"
        file.write_text(json.dumps(gcs.service_account(service_account_key)))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
        return FromEnvironment(
            open_origin("gs", {"endpoint_url": gcs.endpoint}), [service_account_key.splitlines()[1], "ya29."]
        )
