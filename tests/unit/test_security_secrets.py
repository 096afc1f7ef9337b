"""Planted secrets: what an origin or a file system says of itself, of its errors and in its pickles tells none of them.

The origins ask a server that refuses everything. For nodes, commands and checkpoints there is a file of the same name in
tests/integration.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.planted import Planted, RefusingServer

import millrace
from millrace.config import resolve
from millrace.errors import ConfigurationError, MillraceError
from millrace.origin import Origin, open_origin

STATUSES = (400, 403, 404)


@dataclass(frozen=True)
class Case:
    """One way to give secrets to the origin of a scheme.

    `options` and `environment` make them, of the planted secrets and the server's URL; `key` is what is read; `sent` says
    that the server sees a secret as it is, which shows that it was used at all.
    """

    scheme: str
    key: str
    options: Callable[[Planted, str], dict[str, Any]]
    environment: Callable[[Planted, str, Path], dict[str, str]] = field(default=lambda *_: {})
    sent: bool = False


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
}


@pytest.fixture
def planted() -> Iterator[Planted]:
    planted = Planted()
    with planted.watching():
        yield planted


@pytest.fixture(params=STATUSES)
def server(request: pytest.FixtureRequest) -> Iterator[RefusingServer]:
    with RefusingServer(request.param) as server:
        yield server


def operations(origin: Origin, key: str) -> Mapping[str, Callable[[], object]]:
    """Everything that an origin can be asked."""

    def write() -> None:
        with origin.open_writer(key) as writer:
            writer.write(b"x")

    return {
        "head": lambda: origin.head(key),
        "read": lambda: origin.read(key, 0, 10),
        "read a version": lambda: origin.read(key, 0, 10, version="v"),
        "list_level": lambda: origin.list_level(key.rpartition("/")[0]),
        "list_all": lambda: list(origin.list_all(key.rpartition("/")[0])),
        "put": lambda: origin.put(key, b"x"),
        "put if absent": lambda: origin.put(key, b"x", if_absent=True),
        "open_writer": write,
        "delete": lambda: origin.delete([key]),
    }


@pytest.mark.parametrize("name", CASES)
def test_no_secret_is_told(
    name: str, planted: Planted, server: RefusingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    home = tmp_path / "home"
    home.mkdir()
    for variable, value in case.environment(planted, server.url, home).items():
        monkeypatch.setenv(variable, value)
    options = case.options(planted, server.url)
    explicit = {each for each, value in planted.secrets.items() if value in repr(options)}
    origin = open_origin(case.scheme, options)
    planted.saw_object("the origin", origin)
    planted.saw("the identity", origin.identity)
    failed = 0
    for what, operation in operations(origin, case.key).items():
        try:
            operation()
        except MillraceError as error:
            failed += 1
            planted.saw_error(f"the error of {what}", error)
            planted.saw(f"the pickled error of {what}", pickle.dumps(error))
    assert failed >= 5
    if case.sent:
        assert any(planted.is_in(b"\n".join(server.requests), each) for each in planted.secrets)

    fs = millrace.filesystem(case.scheme, options, cache_dir=str(tmp_path / "cache"), min_free=0)
    planted.saw_object("the file system", fs)
    for each in (fs.origin, fs.node, fs._options, fs.fsid, fs.protocol, fs.handler):
        planted.saw_object(f"a part of the file system ({type(each).__name__})", each)
    calls: dict[str, Callable[[], object]] = {
        "open": lambda: fs.open(case.key).read(),
        "ls": lambda: fs.ls(case.key.rpartition("/")[0]),
        "open_input_file": lambda: fs.open_input_file(case.key).read(),
        "pipe": lambda: fs.pipe_file(case.key, b"x"),
    }
    for what, call in calls.items():
        try:
            call()
        except (MillraceError, OSError) as error:
            planted.saw_error(f"the error of fs.{what}", error)

    for what, data in (("origin", pickle.dumps(origin)), ("file system", pickle.dumps(fs))):
        for each in planted.secrets:
            assert planted.is_in(data, each) == (each in explicit), f"{each} in the pickle of the {what}"
    assert planted.saw_files("the cache", tmp_path / "cache") > 3
    assert planted.leaks() == []


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
def test_a_wrong_option_is_named_without_its_value(
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


def test_the_token_of_the_cluster_is_not_told(planted: Planted, tmp_path: Path) -> None:
    token = planted.secret("cluster_token")
    options = resolve({"cluster_token": token, "cache_dir": str(tmp_path), "members": "static://127.0.0.1:1"})
    planted.saw_object("the options", options)
    for wrong in (f"{token} with a space", f"{token}\n", f"ü{token}"):
        with pytest.raises(ConfigurationError) as caught:
            resolve({"cluster_token": wrong})
        planted.saw_error("the error", caught.value)
    for members in (f"static://user:{token}@host:1", f"etcd://{token}@host:1"):
        with pytest.raises(ConfigurationError) as caught:
            resolve({"members": members})
        planted.saw_error("the error", caught.value)
    assert planted.leaks() == []


def test_the_token_of_the_environment_and_the_file_is_not_pickled(
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


def test_the_search_finds_what_is_told() -> None:
    """A search that finds nothing would pass for a product that tells nothing."""
    planted = Planted()
    secret = planted.secret("the secret")
    basic = base64.b64encode(f"user:{secret}".encode())
    for number, text in enumerate((secret, f"https://h/?sig={secret}%3D", pickle.dumps({"a": secret}), basic)):
        planted.saw(f"place {number}", text)
    planted.saw("elsewhere", "nothing of interest")
    try:
        raise ValueError(secret)
    except ValueError as error:
        planted.saw_error("an error", error)
    places = ("an error", "place 0", "place 1", "place 2", "place 3")
    assert planted.leaks() == [f"the secret in {where}" for where in places]
