"""Planted secrets: no text, error or pickle of an origin or a file system shows any of them.

The origins use a server that refuses every request. For nodes, commands and checkpoints
see test_secrets.py.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.support.azurite import AzuriteServer
from tests.support.http_service import Reply
from tests.support.hub_server import HubServer
from tests.support.planted import Planted, RefusingServer
from tests.support.web_server import WebServer

import millrace
from millrace.cache.node import close_nodes
from millrace.cluster.attach import close_all
from millrace.config import resolve
from millrace.errors import ConfigurationError, MillraceError
from millrace.origin import Origin, open_origin
from millrace.origin.limits.retrying import Patience

STATUSES = (403, 400, None)
"""The status that the server returns; None: no server at that address."""

IN_URLS = ("sas_token", "with a signature", "in its URLs", "s3 key", "hub token of the")
"""Names of cases that are tried with every answer, because errors repeat URLs; for the others one is enough."""


@dataclass(frozen=True)
class Case:
    """One way to give secrets to the origin of a scheme.

    `options` and `environment` contain the planted secrets and the server's URL; `key` is the object to read; `sent` means
    that the server gets the secret itself, which shows that it was used. Without `asks` no request is sent: it would
    go to Google. `others_log`: a library behind fsspec logs its URLs at DEBUG, not under Millrace's control.
    """

    scheme: str
    key: str
    options: Callable[[Planted, str], dict[str, Any]]
    environment: Callable[[Planted, str, Path], dict[str, str]] = field(default=lambda *_: {})
    sent: bool = False
    asks: bool = True
    others_log: bool = False


def aws_files(planted: Planted, url: str, folder: Path) -> dict[str, str]:
    (folder / "credentials").write_text(
        f"[team]\naws_access_key_id = {planted.secret('profile key id')}\n"
        f"aws_secret_access_key = {planted.secret('profile secret')}\n"
        f"aws_session_token = {planted.secret('profile session token')}\n"
    )
    return {
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "credentials"),
        "AWS_CONFIG_FILE": str(folder / "none"),
        "AWS_ENDPOINT_URL": url,
    }


def aws_process(planted: Planted, url: str, folder: Path) -> dict[str, str]:
    answer = (
        f'{{"Version": 1, "AccessKeyId": "{planted.secret("process key id")}", '
        f'"SecretAccessKey": "{planted.secret("process secret")}", "SessionToken": "{planted.secret("process token")}"}}'
    )
    (folder / "answer.json").write_text(answer)
    (folder / "config").write_text(f"[profile team]\ncredential_process = cat {folder / 'answer.json'}\n")
    return {
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
        "AWS_CONFIG_FILE": str(folder / "config"),
        "AWS_ENDPOINT_URL": url,
    }


def signature(planted: Planted) -> str:
    """A shared access signature of Azure."""
    return f"sv=2024-11-04&ss=b&srt=sco&sp=rwl&sig={planted.secret('signature')}%3D"


def connection_string(planted: Planted, url: str) -> str:
    key = planted.secret("key of the connection string", base64_key=True)
    return f"DefaultEndpointsProtocol=http;AccountName=account;AccountKey={key};BlobEndpoint={url}/account"


def google_user(planted: Planted, url: str) -> dict[str, str]:
    """What `gcloud auth application-default login` leaves."""
    return {
        "type": "authorized_user",
        "client_id": "a-client",
        "client_secret": planted.secret("client secret"),
        "refresh_token": planted.secret("refresh token"),
        "token_uri": f"{url}/token",
    }


def google_service(planted: Planted, url: str) -> dict[str, str]:
    """The key of a service account."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    for number, line in enumerate(pem.splitlines()[1:-1]):
        planted.known(f"line {number} of the private key", line)
    return {
        "type": "service_account",
        "client_email": "somebody@example.iam.gserviceaccount.com",
        "private_key_id": "a-key",
        "private_key": pem,
        "token_uri": f"{url}/token",
    }


def google_file(planted: Planted, url: str, folder: Path) -> dict[str, str]:
    (folder / "google.json").write_text(json.dumps(google_user(planted, url)))
    return {"GOOGLE_APPLICATION_CREDENTIALS": str(folder / "google.json")}


def netrc(planted: Planted, url: str, folder: Path) -> dict[str, str]:
    path = folder / "netrc"
    path.write_text(f"machine 127.0.0.1 login user password {planted.secret('password')}\n")
    path.chmod(0o600)
    return {"NETRC": str(path)}


def hub_login(planted: Planted, url: str, folder: Path) -> dict[str, str]:
    (folder / "token").write_text(planted.secret("token", prefix="hf_"))
    return {"HF_TOKEN_PATH": str(folder / "token"), "HF_HOME": str(folder)}


CASES = {
    "s3 key, secret and token": Case(
        "s3",
        "bucket/key",
        lambda planted, url: {
            "key": planted.secret("key"),
            "secret": planted.secret("secret"),
            "token": planted.secret("token"),
            "endpoint_url": url,
        },
        sent=True,
    ),
    "s3 client_kwargs": Case(
        "s3",
        "bucket/key",
        lambda planted, url: {
            "client_kwargs": {
                "aws_access_key_id": planted.secret("key"),
                "aws_secret_access_key": planted.secret("secret"),
                "aws_session_token": planted.secret("token"),
                "endpoint_url": url,
            }
        },
        sent=True,
    ),
    "s3 environment": Case(
        "s3",
        "bucket/key",
        lambda planted, url: {"endpoint_url": url},
        lambda planted, url, folder: {
            "AWS_ACCESS_KEY_ID": planted.secret("key of the environment"),
            "AWS_SECRET_ACCESS_KEY": planted.secret("secret of the environment"),
            "AWS_SESSION_TOKEN": planted.secret("token of the environment"),
        },
        sent=True,
    ),
    "s3 profile": Case("s3", "bucket/key", lambda planted, url: {"profile": "team"}, aws_files, sent=True),
    "s3 credential_process": Case("s3", "bucket/key", lambda planted, url: {"profile": "team"}, aws_process, sent=True),
    "azure account_key": Case(
        "az",
        "container/key",
        lambda planted, url: {
            "account_name": "account",
            "account_key": planted.secret("account_key", base64_key=True),
            "account_host": url,
        },
    ),
    "azure sas_token": Case(
        "az",
        "container/key",
        lambda planted, url: {"account_name": "account", "sas_token": signature(planted), "account_host": url},
        sent=True,
    ),
    "azure connection_string": Case(
        "abfs",
        "container/key",
        lambda planted, url: {"connection_string": connection_string(planted, url)},
    ),
    "azure connection_string with a signature": Case(
        "az",
        "container/key",
        lambda planted, url: {
            "connection_string": f"BlobEndpoint={url}/account;AccountName=account;SharedAccessSignature={signature(planted)}"
        },
        sent=True,
    ),
    "azure key of the environment": Case(
        "az",
        "container/key",
        lambda planted, url: {"account_name": "account", "account_host": url},
        lambda planted, url, folder: {"AZURE_STORAGE_ACCOUNT_KEY": planted.secret("account key", base64_key=True)},
    ),
    "azure signature of the environment": Case(
        "az",
        "container/key",
        lambda planted, url: {"account_name": "account", "account_host": url},
        lambda planted, url, folder: {"AZURE_STORAGE_SAS_TOKEN": signature(planted)},
        sent=True,
    ),
    "azure connection string of the environment": Case(
        "az",
        "container/key",
        lambda planted, url: {},
        lambda planted, url, folder: {"AZURE_STORAGE_CONNECTION_STRING": connection_string(planted, url)},
    ),
    "google bearer token": Case(
        "gs",
        "bucket/key",
        lambda planted, url: {"token": planted.secret("token", prefix="ya29."), "endpoint_url": url},
        sent=True,
    ),
    "google refresh token": Case(
        "gs",
        "bucket/key",
        lambda planted, url: {"token": google_user(planted, url), "endpoint_url": url},
        asks=False,
    ),
    "google service account": Case(
        "gs",
        "bucket/key",
        lambda planted, url: {"token": google_service(planted, url), "endpoint_url": url},
    ),
    "google file of the environment": Case(
        "gs", "bucket/key", lambda planted, url: {"endpoint_url": url}, google_file, asks=False
    ),
    "http headers, auth and cookies": Case(
        "http",
        "HOST/folder/file",
        lambda planted, url: {
            "headers": {"X-Api-Key": planted.secret("header")},
            "client_kwargs": {
                "auth": ("user", planted.secret("password")),
                "headers": {"X-Other": planted.secret("header of client_kwargs")},
                "cookies": {"session": planted.secret("cookie")},
            },
        },
        sent=True,
    ),
    "http Authorization": Case(
        "http",
        "HOST/folder/file",
        lambda planted, url: {"headers": {"Authorization": f"Bearer {planted.secret('bearer token')}"}},
        sent=True,
    ),
    "http netrc": Case("http", "HOST/folder/file", lambda planted, url: {"client_kwargs": {"trust_env": True}}, netrc),
    "hub token": Case(
        "hf",
        "datasets/owner/name/file",
        lambda planted, url: {"token": planted.secret("token", prefix="hf_"), "endpoint": url},
        sent=True,
    ),
    "hub token of the environment": Case(
        "hf",
        "datasets/owner/name/file",
        lambda planted, url: {"endpoint": url},
        lambda planted, url, folder: {"HF_TOKEN": planted.secret("token", prefix="hf_")},
        sent=True,
    ),
    "hub token of a login": Case("hf", "datasets/owner/name/file", lambda planted, url: {"endpoint": url}, hub_login),
    "fsspec, a library that has the secret in its URLs": Case(
        "webhdfs",
        "folder/file",
        lambda planted, url: {
            "host": "127.0.0.1",
            "port": int(url.rpartition(":")[2]),
            "token": planted.secret("token"),
        },
        sent=True,
        others_log=True,
    ),
    "fsspec, a library that has the secret in a header": Case(
        "jupyter",
        "folder/file",
        lambda planted, url: {"url": url, "tok": planted.secret("tok")},
        sent=True,
    ),
    "fsspec, a library that logs in": Case(
        "ftp",
        "folder/file",
        lambda planted, url: {
            "host": "127.0.0.1",
            "port": 1,
            "username": "user",
            "password": planted.secret("password"),
        },
    ),
}


@pytest.fixture
def planted() -> Iterator[Planted]:
    planted = Planted()
    with planted.watching():
        yield planted


@pytest.fixture
def server(status: int | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[RefusingServer]:
    monkeypatch.setattr("millrace.origin.limits.retrying.PATIENCE", Patience(seconds=0.05, tries=1))
    with RefusingServer(status or 500) as server:
        if status is None:
            server.close()
        yield server


def operations(origin: Origin, key: str, *, streams: bool) -> Mapping[str, Callable[[], object]]:
    """Every operation of an origin."""

    def write() -> None:
        with origin.open_writer(key) as writer:
            writer.write(b"x")

    found: dict[str, Callable[[], object]] = {
        "head": lambda: origin.head(key),
        "read": lambda: origin.read(key, 0, 10),
        "read a version": lambda: origin.read(key, 0, 10, version="v"),
        "list_level": lambda: origin.list_level(key.rpartition("/")[0]),
        "list_all": lambda: list(origin.list_all(key.rpartition("/")[0])),
        "put": lambda: origin.put(key, b"x"),
        "put if absent": lambda: origin.put(key, b"x", if_absent=True),
        "delete": lambda: origin.delete([key]),
    }
    return found | {"open_writer": write} if streams else found


@pytest.mark.parametrize(
    ("name", "status"),
    [
        (name, status)
        for name in CASES
        for status in (STATUSES if any(part in name for part in IN_URLS) else STATUSES[:1])
    ],
)
def test_origin_with_secret_never_shows_it(
    name: str, planted: Planted, server: RefusingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    home = tmp_path / "home"
    home.mkdir()
    for variable, value in case.environment(planted, server.url, home).items():
        monkeypatch.setenv(variable, value)
    options = case.options(planted, server.url)
    explicit = {each for each, value in planted.secrets.items() if value in repr(options)}
    key = case.key.replace("HOST", server.url.partition("//")[2])
    origin = open_origin(case.scheme, options)
    planted.saw_object("the origin", origin)
    planted.saw("the identity", origin.identity)
    failed = 0
    for what, operation in operations(origin, key, streams=server.is_open).items() if case.asks else ():
        try:
            operation()
        except MillraceError as error:
            failed += 1
            planted.saw_error(f"the error of {what}", error)
            planted.saw(f"the pickled error of {what}", pickle.dumps(error))
    assert failed >= 3 or not case.asks
    if case.sent and server.is_open:
        assert any(planted.is_in(b"\n".join(server.requests), each) for each in planted.secrets)

    fs = millrace.filesystem(case.scheme, options, cache_dir=str(tmp_path / "cache"), min_free=0)
    planted.saw_object("the file system", fs)
    for each in (fs.origin, fs.node, fs._options, fs.fsid, fs.protocol, fs.handler):
        planted.saw_object(f"a part of the file system ({type(each).__name__})", each)
    calls: dict[str, Callable[[], object]] = {
        "open": lambda: fs.open(key).read(),
        "ls": lambda: fs.ls(key.rpartition("/")[0]),
        "open_input_file": lambda: fs.open_input_file(key).read(),
        "pipe": lambda: fs.pipe_file(key, b"x"),
    }
    for what, call in calls.items() if case.asks else ():
        try:
            call()
        except (MillraceError, OSError) as error:
            planted.saw_error(f"the error of fs.{what}", error)

    for what, data in (("origin", pickle.dumps(origin)), ("file system", pickle.dumps(fs))):
        for each in planted.secrets:
            assert planted.is_in(data, each) == (each in explicit), f"{each} in the pickle of the {what}"
    assert planted.saw_files("the cache", tmp_path / "cache") > 3
    leaks = [
        leak for leak in planted.leaks() if not (case.others_log and " in log of " in leak and "millrace" not in leak)
    ]
    assert leaks == []


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("s3", {"key": "SECRET"}),
        ("s3", {"secret": "SECRET"}),
        ("s3", {"key": "SECRET", "secret": "SECRET", "profile": "x"}),
        ("s3", {"secert": "SECRET"}),
        ("s3", {"client_kwargs": {"aws_secret": "SECRET"}}),
        ("s3", {"key": "SECRET", "secret": "SECRET", "endpoint_url": "http://user:SECRET@host"}),
        ("s3", {"key": "SECRET", "secret": "SECRET", "endpoint_url": "http://SECRET@host:99999999"}),
        ("s3", {"key": ["SECRET"], "secret": {"a": "SECRET"}}),
        ("file", {"password": "SECRET"}),
    ],
)
def test_wrong_option_is_named_without_its_value(
    scheme: str, options: dict[str, Any], planted: Planted, tmp_path: Path
) -> None:
    def fill(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("SECRET", secret)
        if isinstance(value, list):
            return [fill(each) for each in value]
        return {name: fill(each) for name, each in value.items()} if isinstance(value, dict) else value

    secret = planted.secret("an option")
    try:
        fs = millrace.filesystem(scheme, fill(options), cache_dir=str(tmp_path), min_free=0)
        planted.saw_object("the file system", fs)
        fs.info("bucket/key")
    except (MillraceError, OSError, TypeError) as error:
        planted.saw_error("the error", error)
    else:
        pytest.fail("it was taken")
    assert planted.leaks() == []


def test_cluster_token_is_not_shown(planted: Planted, tmp_path: Path) -> None:
    token = planted.secret("cluster_token")
    options = resolve({"cluster_token": token, "cache_dir": str(tmp_path), "members": "static://127.0.0.1:1"})
    planted.saw_object("the options", options)
    for wrong in (f"{token} with a space", f"{token}\n{token}", f"ü{token}"):
        with pytest.raises(ConfigurationError) as caught:
            resolve({"cluster_token": wrong})
        planted.saw_error("the error", caught.value)
    for members in (f"static://user:{token}@host:1", f"etcd://{token}@host:1"):
        with pytest.raises(ConfigurationError) as caught:
            resolve({"members": members})
        planted.saw_error("the error", caught.value)
    assert planted.leaks() == []


def test_token_of_environment_or_file_is_not_pickled(
    planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable, given, file = (planted.secret(name) for name in ("of the environment", "as an argument", "of the file"))
    (tmp_path / "millrace.toml").write_text(f'cluster_token = "{file}"\n')
    monkeypatch.setenv("MILLRACE_CONFIG", str(tmp_path / "millrace.toml"))
    of_file = millrace.filesystem("file", cache_dir=str(tmp_path / "a"), members="none")
    monkeypatch.setenv("MILLRACE_CLUSTER_TOKEN", variable)
    of_environment = millrace.filesystem("file", cache_dir=str(tmp_path / "b"), members="none")
    of_argument = millrace.filesystem("file", cache_dir=str(tmp_path / "c"), members="none", cluster_token=given)
    assert of_file._options.cluster_token == file
    assert of_environment._options.cluster_token == variable
    for fs in (of_file, of_environment):
        planted.saw("the pickle of a file system", pickle.dumps(fs))
    assert planted.is_in(pickle.dumps(of_argument), "as an argument")
    for fs in (of_file, of_environment, of_argument):
        planted.saw_object("the file system", fs)
        planted.saw_object("its options", fs._options)
        with contextlib.suppress(MillraceError):
            fs.info(str(tmp_path / "nothing"))
    assert planted.leaks() == []


def test_secret_search_finds_every_encoding() -> None:
    """A search that never finds anything would pass for every product."""
    planted = Planted()
    secret = planted.secret("the secret")
    basic = base64.b64encode(f"user:{secret}".encode())
    texts: tuple[str | bytes, ...] = (secret, f"https://h/?sig={secret}%3D", pickle.dumps({"a": secret}), basic)
    for number, text in enumerate(texts):
        planted.saw(f"place {number}", text)
    planted.saw("elsewhere", "nothing of interest")
    try:
        raise ValueError(secret)
    except ValueError as error:
        planted.saw_error("an error", error)
    places = ("an error", "place 0", "place 1", "place 2", "place 3")
    assert planted.leaks() == [f"the secret in {where}" for where in places]


# --- where all goes well ------------------------------------------------------------------------------

LARGE = os.urandom(6 << 20)


def used(planted: Planted, fs: millrace.MillraceFileSystem, folder: str, cache_dir: Path, *, writes: bool) -> None:
    """Read, list and write through a file system, by both of its faces; note everything that it shows and leaves behind."""
    names = ("small.txt", "large.bin")
    for _ in range(2):
        assert [len(fs.cat_file(f"{folder}/{name}")) for name in names] == [5, len(LARGE)]
        assert fs.open_input_file(f"{folder}/large.bin").read() == LARGE
        planted.saw("info", repr(fs.info(f"{folder}/large.bin")))
        planted.saw("a listing", repr(fs.ls(folder)))
    if writes:
        fs.pipe_file(f"{folder}/written", b"written")
        with fs.open_output_stream(f"{folder}/streamed") as stream:
            stream.write(b"streamed")
        assert fs.cat_file(f"{folder}/streamed") == b"streamed"
        fs.rm_file(f"{folder}/written")
    with pytest.raises(FileNotFoundError) as caught:
        fs.cat_file(f"{folder}/nothing")
    planted.saw_error("the error for what is missing", caught.value)
    planted.saw_object("the file system", fs)
    close_all()
    close_nodes()
    assert planted.saw_files("the cache", cache_dir) > 5
    # Also what belongs to the limits on requests, whatever this process's umask is.
    assert [path for path in cache_dir.rglob("*") if path.lstat().st_mode & 0o077] == []


@pytest.mark.azurite
@pytest.mark.parametrize("given", ["key", "signature", "connection string"])
def test_azure_reads_and_writes_store_no_secret(
    given: str, planted: Planted, azurite: AzuriteServer, container: str, tmp_path: Path
) -> None:
    planted.known("the key of the account", azurite.key)
    options: dict[str, Any] = azurite.target_options
    if given == "signature":
        signed = azurite.signature()
        planted.known("the signature", dict(parse_qsl(signed.lstrip("?")))["sig"])
        options = {**{name: value for name, value in options.items() if name != "account_key"}, "sas_token": signed}
    elif given == "connection string":
        options = {"connection_string": azurite.connection_string}
    origin = open_origin("az", azurite.target_options)
    origin.put(f"{container}/d/small.txt", b"small")
    origin.put(f"{container}/d/large.bin", LARGE)
    fs = millrace.filesystem("az", options, cache_dir=str(tmp_path / "cache"), min_free=0)
    # Azurite does not remove what a signature is to remove.
    used(planted, fs, f"{container}/d", tmp_path / "cache", writes=given != "signature")
    assert planted.leaks() == []


def test_web_login_is_sent_only_to_its_server(planted: Planted, tmp_path: Path) -> None:
    """The server redirects to another one, at a signed address, like stores of large files."""
    password = planted.secret("password")
    signature = planted.secret("signature of the redirect")
    with WebServer(login=("user", password)) as server, WebServer() as other:
        server.put("/d/small.txt", b"small")
        server.put("/d/large.bin", b"")  # for the index page
        server.redirect("/d/large.bin", f"{other.url}/large.bin?Signature={signature}")
        other.put("/large.bin", LARGE)
        options = {"client_kwargs": {"auth": ("user", password)}}
        fs = millrace.filesystem("http", options, cache_dir=str(tmp_path / "cache"), min_free=0)
        used(planted, fs, f"{server.host}/d", tmp_path / "cache", writes=False)
        assert other.requests
        for request in other.requests:
            assert not planted.is_in(repr(request.headers).encode(), "password")
        assert any(planted.is_in(repr(request.headers).encode(), "password") for request in server.requests)
        other.service.interfere(lambda request, reply: Reply(status=400))
        planted_origin = open_origin("http", options)
        with pytest.raises(MillraceError) as caught:
            planted_origin.read(f"{server.host}/d/large.bin", 0, 10)
        planted.saw_error("the error of the other server", caught.value)
    assert planted.leaks() == []


def test_failed_prefetch_of_a_signed_url_logs_no_signature(
    planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an event nor a log line shows the query of the address, with or without its scheme."""
    monkeypatch.setattr("millrace.origin.limits.retrying.PATIENCE", Patience(seconds=0.05, tries=1))
    address = f"large.bin?X-Amz-Signature={planted.secret('signature')}"
    failed: list[str] = []
    with WebServer() as server:
        fs = millrace.filesystem("http", cache_dir=str(tmp_path / "cache"), min_free=0)
        server.service.interfere(lambda request, reply: Reply(status=500))
        with fs.prefetch([f"{server.url}/{address}"], on_error=lambda path, error: failed.append(path)) as prefetch:
            prefetch.wait(120)
        with pytest.raises(MillraceError):
            open_origin("http").read(f"{server.host}/{address}", 0, 10)
    assert len(failed) == 1
    assert {"event prefetch.failed", "event origin.request.failed"} <= planted.places()
    assert planted.leaks() == []


def test_hub_reads_store_no_secret(planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = planted.secret("token", prefix="hf_")
    with HubServer(tokens=[token]) as hub:
        hub.commit("datasets", "owner/name", {"small.txt": b"small", "large.bin": LARGE})
        hub.repository("datasets", "owner/name").private = True
        options = {"endpoint": hub.url, "token": token}
        fs = millrace.filesystem("hf", options, cache_dir=str(tmp_path / "cache"), min_free=0)
        used(planted, fs, "datasets/owner/name", tmp_path / "cache", writes=False)
        assert hub.cdn.requests
        for number, request in enumerate(hub.cdn.requests):
            planted.known(
                f"the signature of address {number}", dict(parse_qsl(urlsplit(request.target).query))["Signature"]
            )
            assert not planted.is_in(repr(request).encode(), "token")
        assert planted.leaks() == []
