"""The options of s3fs, adlfs and gcsfs as tables: their translation, and the errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from millrace.errors import ConfigurationError
from millrace.origin import open_origin
from millrace.origin.options import StoreOptions, azure_options, gcs_options, s3_options

Translate = Callable[[Mapping[str, Any], Mapping[str, str]], StoreOptions]

KEY = "aHVzaA=="
CONNECTION = f"DefaultEndpointsProtocol=https;AccountName=acct;AccountKey={KEY};EndpointSuffix=core.windows.net"
HOST = "https://acct.blob.core.windows.net"
EMULATOR = "http://127.0.0.1:10000/devstoreaccount1"


@pytest.mark.parametrize(
    ("given", "environ", "endpoint", "fixed"),
    [
        ({"account_name": "acct", "account_key": KEY}, {}, HOST, {"access_key": KEY}),
        ({"account_name": "acct", "sas_token": "?sig=1"}, {}, HOST, {"sas_token": "sig=1"}),
        ({"account_name": "acct", "credential": "sig=1"}, {}, HOST, {"sas_token": "sig=1"}),
        ({"connection_string": CONNECTION}, {}, HOST, {"access_key": KEY}),
        ({}, {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION}, HOST, {"access_key": KEY}),
        ({"account_name": "acct"}, {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION}, HOST, {"access_key": KEY}),
        (
            {"account_name": "other"},
            {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION},
            "https://other.blob.core.windows.net",
            None,
        ),
        (
            {"connection_string": "AccountName=a;BlobEndpoint=http://h:1/a/;SharedAccessSignature=sig=1"},
            {},
            "http://h:1/a",
            {"sas_token": "sig=1"},
        ),
        ({"connection_string": "UseDevelopmentStorage=true"}, {}, EMULATOR, None),
        ({"account_name": "acct", "account_host": "h.example"}, {}, "https://h.example", None),
        ({}, {"AZURE_STORAGE_ACCOUNT_NAME": "acct", "AZURE_STORAGE_ACCOUNT_KEY": KEY}, HOST, {"access_key": KEY}),
        (
            {"account_name": "acct"},
            {"AZURE_STORAGE_ACCOUNT_NAME": "acct", "AZURE_STORAGE_SAS_TOKEN": "sig=1"},
            HOST,
            {"sas_token": "sig=1"},
        ),
        # The secrets of another account are not sent to this one.
        (
            {"account_name": "other"},
            {"AZURE_STORAGE_ACCOUNT_NAME": "acct", "AZURE_STORAGE_SAS_TOKEN": "sig=1"},
            "https://other.blob.core.windows.net",
            None,
        ),
        # Explicit options have priority over the environment.
        (
            {"account_name": "acct", "account_key": KEY},
            {"AZURE_STORAGE_SAS_TOKEN": "sig=1"},
            HOST,
            {"access_key": KEY},
        ),
        ({"account_name": "acct", "anon": True}, {"AZURE_STORAGE_ACCOUNT_KEY": KEY}, HOST, None),
        ({"account_name": "acct", "account_key": KEY, "tenant_id": None}, {}, HOST, {"access_key": KEY}),
    ],
)
def test_azure_options_are_translated(
    given: dict[str, Any], environ: dict[str, str], endpoint: str, fixed: dict[str, Any] | None
) -> None:
    options = azure_options(given, environ)
    assert options.endpoint == endpoint
    if given.get("connection_string") != "UseDevelopmentStorage=true":
        assert options.fixed == (fixed and {**fixed, "expires_at": None})
    assert options.config.get("skip_signature", False) == bool(given.get("anon"))
    assert options.signs_itself == bool(given.get("anon"))


@pytest.mark.parametrize("where", ["options", "AZURE_STORAGE_", "AZURE_"])
def test_azure_application_with_secret_is_accepted(where: str) -> None:
    reported = {"tenant_id": "t", "client_id": "c", "client_secret": "hush"}
    environ: dict[str, str] = (
        {} if where == "options" else {f"{where}{name.upper()}": value for name, value in reported.items()}
    )
    options = azure_options({"account_name": "acct", **(reported if where == "options" else {})}, environ)
    assert {name: options.config[name] for name in reported} == reported
    assert (options.config["credential_type"], options.signs_itself) == ("client_secret", True)
    assert "hush" not in repr(options)


GOOGLE = "https://storage.googleapis.com"


@pytest.mark.parametrize(
    ("given", "environ", "endpoint", "fixed", "unsigned", "hints"),
    [
        ({}, {}, GOOGLE, None, False, {}),
        ({"project": "p", "token": "google_default"}, {}, GOOGLE, None, False, {"token": "google_default"}),
        ({"token": "cloud"}, {}, GOOGLE, None, False, {"token": "cloud"}),
        ({"token": "anon"}, {}, GOOGLE, None, True, {}),
        ({"anon": True}, {}, GOOGLE, None, True, {}),
        ({"token": "ya29.x/y"}, {}, GOOGLE, "ya29.x/y", False, {}),
        ({"token": "~/key.json"}, {}, GOOGLE, None, False, {"token": "~/key.json"}),
        ({"token": {"type": "service_account"}}, {}, GOOGLE, None, False, {"token": {"type": "service_account"}}),
        ({"token": "anon", "endpoint_url": "http://h:1/"}, {}, "http://h:1", "anonymous", False, {}),
        ({}, {"STORAGE_EMULATOR_HOST": "h:1"}, "http://h:1", "anonymous", False, {}),
        ({"endpoint_url": "h"}, {"STORAGE_EMULATOR_HOST": "h:1"}, "https://h", None, False, {}),
    ],
)
def test_google_options_are_translated(
    given: dict[str, Any],
    environ: dict[str, str],
    endpoint: str,
    fixed: str | None,
    unsigned: bool,
    hints: dict[str, Any],
) -> None:
    options = gcs_options(given, environ)
    assert options.endpoint == endpoint
    assert options.fixed == (fixed and {"token": fixed, "expires_at": None})
    assert (options.config.get("skip_signature", False), options.signs_itself) == (unsigned, unsigned)
    assert options.may_write is not unsigned
    assert options.hints == hints


@pytest.mark.parametrize(
    ("given", "environ", "endpoint"),
    [
        ({}, {}, "aws:us-east-1"),
        ({"region": "eu-west-1"}, {"AWS_REGION": "eu-west-2"}, "aws:eu-west-1"),
        ({}, {"AWS_DEFAULT_REGION": "eu-west-2"}, "aws:eu-west-2"),
        ({"endpoint_url": "http://h:1/"}, {"AWS_ENDPOINT_URL": "http://other"}, "http://h:1"),
        ({"endpoint_url": "h:1", "use_ssl": False}, {}, "http://h:1"),
        ({"client_kwargs": {"endpoint_url": "https://h"}}, {}, "https://h"),
        ({}, {"AWS_ENDPOINT_URL": "http://two", "AWS_ENDPOINT_URL_S3": "http://one"}, "http://one"),
        ({}, {"AWS_ENDPOINT": "http://obstore"}, "http://obstore"),  # obstore itself would go there
    ],
)
def test_s3_endpoints_are_translated(given: dict[str, Any], environ: dict[str, str], endpoint: str) -> None:
    options = s3_options(given, environ)
    assert options.endpoint == endpoint
    assert bool(options.client_options.get("allow_http")) == endpoint.startswith("http://")


ACCOUNT = {"account_name": "acct"}


@pytest.mark.parametrize(
    ("translate", "given", "match"),
    [
        (azure_options, {"acount_key": KEY}, r"'acount_key'.*known ones are.*account_key"),
        (azure_options, {}, "no Azure account"),
        (azure_options, {**ACCOUNT, "connection_string": CONNECTION}, "exclude"),
        (azure_options, {"connection_string": "hush"}, "cannot be read"),
        (azure_options, {**ACCOUNT, "client_secret": "hush"}, "needs 'tenant_id', 'client_id'"),
        (azure_options, {**ACCOUNT, "account_host": "https://me:hush@h"}, "password in it"),
        (azure_options, {**ACCOUNT, "account_host": "https://h?sig=hush"}, "query in it"),
        (azure_options, {"connection_string": "AccountName=a;BlobEndpoint=https://me:hush@h"}, "password in it"),
        (gcs_options, {"tokn": "hush"}, "'tokn'.*known ones are.*token"),
        (gcs_options, {"token": "browser"}, "gcloud auth"),
        (gcs_options, {"token": "ya29.hush", "anon": True}, "exclude"),
        (gcs_options, {"endpoint_url": "https://me:hush@h"}, "password in it"),
        (gcs_options, {"endpoint_url": "ftp://h"}, "not a URL"),
        (s3_options, {"sercet": "hush"}, "'sercet'.*known ones are.*secret"),
        (s3_options, {"key": "hush"}, "belong together"),
        (s3_options, {"client_kwargs": {"verfy": False}}, "'verfy'"),
        (s3_options, {"anon": "false"}, "'anon' is neither True nor False"),
        (s3_options, {"use_ssl": "no"}, "'use_ssl' is neither True nor False"),
        (azure_options, {**ACCOUNT, "anon": "false"}, "'anon' is neither True nor False"),
        (gcs_options, {"anon": "no"}, "'anon' is neither True nor False"),
        (s3_options, {"client_kwargs": "hush"}, "'client_kwargs' is not a dict"),
        (s3_options, {"client_kwargs": {"region_name": 5}}, "'region_name' is not a text"),
        (s3_options, {"endpoint_url": 5}, "'endpoint_url' is not a text"),
        (s3_options, {"region": 5}, "'region' is not a text"),
        (s3_options, {"key": 5, "secret": b"hush"}, "'key' is not a text"),
        (s3_options, {"key": "k", "secret": "hush", "token": 5}, "'token' is not a text"),
        (gcs_options, {"token": 5}, "'token' is neither"),
        (gcs_options, {"endpoint_url": 5}, "'endpoint_url' is not a text"),
        (azure_options, {**ACCOUNT, "account_key": 5}, "'account_key' is not a text"),
        (azure_options, {**ACCOUNT, "account_key": "hush!"}, "'account_key'. is not base64"),
        (azure_options, {"connection_string": 5}, "'connection_string' is not a text"),
    ],
)
def test_contradictory_options_raise_without_secrets(translate: Translate, given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match) as caught:
        translate(given, {})
    assert caught.value.next_step
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "given"),
    [
        ("s3", {"key": "hushkey", "secret": "hushsecret", "token": "hushtoken"}),
        ("az", {**ACCOUNT, "account_key": "aHVzaA=="}),
        ("az", {**ACCOUNT, "tenant_id": "t", "client_id": "c", "client_secret": "hush"}),
        ("gs", {"token": "ya29.hush"}),
    ],
)
def test_origin_and_its_identity_contain_no_secret(scheme: str, given: dict[str, Any]) -> None:
    origin = open_origin(scheme, given)
    other = open_origin(scheme, {**ACCOUNT, "anon": True} if scheme == "az" else {"anon": True})
    assert origin.identity == other.identity
    shown = f"{origin!r} {origin} {origin.identity}"
    assert [value for value in given.values() if len(value) > 4 and value in shown] == []


@pytest.mark.parametrize("scheme", ["s3", "http", "memory", "file"])
def test_target_options_of_wrong_type_raise(scheme: str) -> None:
    wrong: Any = "hush"
    with pytest.raises(ConfigurationError, match="'target_options' is not a dict"):
        open_origin(scheme, wrong)


@pytest.mark.parametrize("scheme", ["s3", "az", "gs", "http", "hf"])
def test_unknown_option_of_none_is_ignored(scheme: str) -> None:
    """Programs pass every option that they have."""
    given = {"account_name": "acct"} if scheme == "az" else {}
    assert open_origin(scheme, {**given, "misspelt": None}).identity == open_origin(scheme, given).identity
    with pytest.raises(ConfigurationError, match="misspelt"):
        assert open_origin(scheme, {**given, "misspelt": "x"}).identity
