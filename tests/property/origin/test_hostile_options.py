"""Options, variables and credentials with characters that no request can carry, for every kind of origin and operation.

Each case ends in time, with success or with an error of ours that does not repeat the value. A Kubernetes secret with a
newline at its end works as the secret itself.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import millrace
from millrace.errors import ConfigurationError, MillraceError
from millrace.filesystem import MillraceFileSystem
from millrace.origin import open_origin
from millrace.origin.limits import retrying
from millrace.testing.s3 import S3Server

DEADLINE_SECONDS = 60.0

SPOILED: Mapping[str, Callable[[str], str]] = {
    "newline after": lambda value: f"{value}\n",
    "white space around": lambda value: f" \t{value}\r\n",
    "newline inside": lambda value: f"{value[:2]}\n{value[2:]}",
    "carriage return inside": lambda value: f"{value[:2]}\r{value[2:]}",
    "space inside": lambda value: f"{value[:2]} {value[2:]}",
    "null": lambda value: f"{value[:2]}\0{value[2:]}",
    "escape": lambda value: f"{value[:2]}\x1b[0m{value[2:]}",
    "not ASCII": lambda value: f"{value[:2]}ü–{value[2:]}",
    "not Unicode": lambda value: f"{value[:2]}\udcff{value[2:]}",
    "port 99999": lambda value: f"http://127.0.0.1:99999/{value[:2]}",
    "port -1": lambda value: "http://127.0.0.1:-1",
    "brackets": lambda value: f"http://[{value[:2]}",
    "backslash and quotes": lambda value: f'\\"{value}<>',
}
STRIPPED = ("newline after", "white space around")
# Values that are right in some option, or that a server has to judge.
JUDGED_BY_SERVERS = ("port 99999", "port -1", "brackets", "backslash and quotes")

OPERATIONS: Mapping[str, Callable[[MillraceFileSystem, str], Any]] = {
    "open": lambda fs, path: fs.open(path).close(),
    "read": lambda fs, path: fs.cat_file(path),
    "list": lambda fs, path: fs.ls(path.rpartition("/")[0]),
    "load": lambda fs, path: fs.load([fs.unstrip_protocol(path)]),
    "write": lambda fs, path: fs.pipe_file(f"{path}-written", b"new"),
}
KEY = "aHVzaGh1c2g="
CONNECTION = f"AccountName=acct;AccountKey={KEY};BlobEndpoint="


def given(server: S3Server, kind: str) -> dict[str, str]:
    """Options of each kind that can be used; all but the first meet a server that speaks another protocol."""
    endpoint = server.endpoint_url
    host, _, port = endpoint.removeprefix("http://").partition(":")
    options: dict[str, dict[str, str]] = {
        "s3": {"key": server.key, "secret": server.secret, "region": "us-east-1", "endpoint_url": endpoint},
        "s3 with a token": {"key": "name", "secret": "word", "token": "session", "endpoint_url": endpoint},
        "az": {"account_name": "acct", "account_key": KEY, "account_host": endpoint},
        "az by signature": {"account_name": "acct", "sas_token": "sv=1&sig=2", "account_host": endpoint},
        "az by text": {"connection_string": CONNECTION + endpoint},
        "gs": {"token": "ya29.token", "endpoint_url": endpoint},
        "hf": {"token": "hf_token", "endpoint": endpoint},
        "ftp": {"host": host, "username": "name", "password": "word", "port": port},
    }
    return options[kind]


CASES = [
    (kind, option)
    for kind, names in {
        "s3": ("key", "secret", "region", "endpoint_url"),
        "s3 with a token": ("token",),
        "az": ("account_name", "account_key", "account_host"),
        "az by signature": ("sas_token",),
        "az by text": ("connection_string",),
        "gs": ("token", "endpoint_url"),
        "hf": ("token", "endpoint"),
        "ftp": ("host", "username", "password"),
    }.items()
    for option in names
]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails by the wrong protocol would be tried for a minute."""
    monkeypatch.setattr(retrying, "PATIENCE", retrying.Patience(seconds=2.0, tries=2))


def ended(action: Callable[[], Any]) -> BaseException | None:
    """What `action` raised, if anything; fails where it does not end in time."""
    outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            outcome.put(error)
        else:
            outcome.put(None)

    threading.Thread(target=run, daemon=True).start()
    return outcome.get(timeout=DEADLINE_SECONDS)


def path_of(kind: str, bucket: str) -> str:
    return f"datasets/{bucket}/data/object" if kind == "hf" else f"{bucket}/object"


def check(error: BaseException | None, secret: str, how: str, what: str) -> None:
    assert error is None or isinstance(error, MillraceError), f"{what}: {error!r}"
    if error is not None and "://" not in secret and len(secret) > 3:
        assert secret not in str(error), what
    if how not in (*STRIPPED, *JUDGED_BY_SERVERS) and error is None:
        raise AssertionError(f"{what} was accepted")


def test_hostile_option_combinations_are_at_least_500() -> None:
    assert len(CASES) * len(SPOILED) * len(OPERATIONS) >= 500


@pytest.mark.parametrize(("kind", "option"), CASES)
def test_option_with_unusable_characters_ends_every_operation(
    kind: str, option: str, s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    open_origin("s3", s3.target_options).put(f"{bucket}/object", b"bytes")
    options, path = given(s3, kind), path_of(kind, bucket)
    for number, (how, operation) in enumerate(itertools.product(SPOILED, OPERATIONS)):
        spoiled = SPOILED[how](options[option])
        what = f"{operation} with {option} of {kind}: {how}"

        def act(spoiled: str = spoiled, operation: str = operation, number: int = number) -> None:
            fs = millrace.filesystem(
                kind.partition(" ")[0],
                target_options={**options, option: spoiled},
                cache_dir=str(tmp_path / str(number)),
                min_free=0,
                members="none",
            )
            OPERATIONS[operation](fs, path)

        error = ended(act)
        check(error, spoiled, how, what)
        if kind == "s3" and how in STRIPPED:
            assert error is None, f"{what}: {error}"
        if kind != "ftp" and how not in (*STRIPPED, *JUDGED_BY_SERVERS):
            assert isinstance(error, ConfigurationError), f"{what}: {error!r}"
            assert option in str(error) or "connection string" in str(error) or "token" in str(error), str(error)


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL"])
def test_variable_with_unusable_characters_ends_every_operation(
    name: str, s3: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_origin("s3", s3.target_options).put(f"{bucket}/object", b"bytes")
    values = {
        "AWS_ACCESS_KEY_ID": s3.key,
        "AWS_SECRET_ACCESS_KEY": s3.secret,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3.endpoint_url,
    }
    for each, value in values.items():
        monkeypatch.setenv(each, value)
    for number, (how, operation) in enumerate(itertools.product(SPOILED, OPERATIONS)):
        if how == "null":  # no variable can have one
            continue
        spoiled = SPOILED[how](values[name])
        monkeypatch.setenv(name, spoiled)

        def act(operation: str = operation, number: int = number) -> None:
            fs = millrace.filesystem("s3", cache_dir=str(tmp_path / str(number)), min_free=0, members="none")
            OPERATIONS[operation](fs, f"{bucket}/object")

        error, what = ended(act), f"{operation} with {name}: {how}"
        assert error is None or isinstance(error, MillraceError), f"{what}: {error!r}"
        if how in STRIPPED:
            assert error is None, f"{what}: {error}"
        elif how not in JUDGED_BY_SERVERS and "space" not in how:
            assert isinstance(error, ConfigurationError), f"{what}: {error!r}"


@pytest.mark.parametrize("how", ["newline after", "newline inside", "not ASCII"])
@pytest.mark.parametrize("option", ["aws_access_key_id", "aws_secret_access_key"])
def test_program_of_a_profile_with_unusable_characters_ends_every_operation(
    option: str, how: str, s3: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials come from a program that botocore runs, as they do again when they are renewed."""
    open_origin("s3", s3.target_options).put(f"{bucket}/object", b"bytes")
    names = {"aws_access_key_id": "AccessKeyId", "aws_secret_access_key": "SecretAccessKey"}
    answer = {"Version": 1, "AccessKeyId": s3.key, "SecretAccessKey": s3.secret}
    answer[names[option]] = SPOILED[how](str(answer[names[option]]))
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {tmp_path}/answer.json\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for number, operation in enumerate(OPERATIONS):

        def act(operation: str = operation, number: int = number) -> None:
            fs = millrace.filesystem(
                "s3",
                target_options={"endpoint_url": s3.endpoint_url},
                cache_dir=str(tmp_path / str(number)),
                min_free=0,
                members="none",
            )
            OPERATIONS[operation](fs, f"{bucket}/object")

        error = ended(act)
        if how in STRIPPED:
            assert error is None, f"{operation}: {error}"
        else:
            assert isinstance(error, ConfigurationError), f"{operation}: {error!r}"
            assert "access_key" in str(error)
