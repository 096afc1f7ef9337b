"""`millrace config show`, `plan` and `debug bundle`."""

from __future__ import annotations

import errno
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from millrace.cli import main
from millrace.cli.debug import environment_of, hidden, secrets_of
from millrace.config import OPTION_NAMES, effective_options

SECRETS = {
    "MILLRACE_CLUSTER_TOKEN": "the-token-of-the-cluster",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG",
    "AZURE_STORAGE_CONNECTION_STRING": 'AccountKey="quoted"==',
    "HF_TOKEN": "hf_abcdefgh",
}


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("MILLRACE_")]:
        monkeypatch.delenv(name)
    file = tmp_path / "millrace.toml"
    file.write_text('capacity = "1GB"\nmin_free = "2%"\ncluster_token = "another-token"\n')
    monkeypatch.setenv("MILLRACE_CONFIG", str(file))
    monkeypatch.setenv("MILLRACE_CACHE_DIR", f"{tmp_path}/a:{tmp_path}/b")
    monkeypatch.setenv("MILLRACE_CAPACITY", "3GB")
    return file


def test_effective_options_from_each_source_name_it(configured: Path, tmp_path: Path) -> None:
    found = {each.name: (each.value, each.source) for each in effective_options({"replicas": 2, "native": None})}
    assert list(found) == list(OPTION_NAMES)
    assert found["cache_dir"] == ([f"{tmp_path}/a", f"{tmp_path}/b"], "MILLRACE_CACHE_DIR")
    assert found["capacity"] == ("3GB", "MILLRACE_CAPACITY")
    assert found["min_free"] == ("2%", str(configured))
    assert found["cluster_token"] == ("set", str(configured))
    assert found["replicas"] == (2, "argument")
    assert found["native"] == (True, "default")
    assert found["timeout"] == (None, "default")


def test_effective_members_with_etcd_host_name_its_etcd(configured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_ETCD_HOST", "10.0.0.5")
    found = {each.name: (each.value, each.source) for each in effective_options()}
    assert found["members"] == ("etcd://10.0.0.5:2379", "MILLRACE_ETCD_HOST")


@pytest.mark.parametrize(("text", "value"), [("0", False), ("yes", True), (" ", False), ("maybe", None)])
def test_config_show_of_public_metrics_is_a_boolean(
    capsys: pytest.CaptureFixture[str], configured: Path, monkeypatch: pytest.MonkeyPatch, text: str, value: bool | None
) -> None:
    monkeypatch.setenv("MILLRACE_PUBLIC_METRICS", text)
    assert main(["config", "show", "--json"]) == (1 if value is None else 0)
    captured = capsys.readouterr()
    if value is None:
        assert captured.err.startswith("millrace: MILLRACE_PUBLIC_METRICS is neither true nor false")
        return
    rows = {row["name"]: row["value"] for row in json.loads(captured.out)["variables"]}
    assert rows["MILLRACE_PUBLIC_METRICS"] is value


def test_config_show_prints_values_and_sources(
    capsys: pytest.CaptureFixture[str], configured: Path, tmp_path: Path
) -> None:
    assert main(["config", "show"]) == 0
    text = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert rows["capacity"] == ["3GB", "MILLRACE_CAPACITY"]
    assert rows["min_free"] == ["2%", str(configured)]
    assert rows["native"] == ["true", "default"]
    assert rows["timeout"] == ["-", "default"]
    assert "another-token" not in text
    assert main(["config", "show", "--json", "--cache-dir", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert document["options"][0] == {"name": "cache_dir", "value": [str(tmp_path)], "source": "argument"}


def test_config_show_lists_the_variables_that_are_not_options(
    capsys: pytest.CaptureFixture[str], configured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_JOB_ID", raising=False)
    monkeypatch.setenv("MILLRACE_PRICE_PER_GB", "0.02")
    assert main(["config", "show", "--json"]) == 0
    found = {each["name"]: (each["value"], each["source"]) for each in json.loads(capsys.readouterr().out)["variables"]}
    assert found == {
        "MILLRACE_CONFIG": (str(configured), "MILLRACE_CONFIG"),
        "MILLRACE_DEBUG": (False, "default"),
        "MILLRACE_JOB": (None, "default"),
        "MILLRACE_PRICE_PER_1000_REQUESTS": (0.0004, "default"),
        "MILLRACE_PRICE_PER_GB": (0.02, "MILLRACE_PRICE_PER_GB"),
        "MILLRACE_PUBLIC_METRICS": (False, "default"),
    }
    monkeypatch.setenv("MILLRACE_JOB", "nightly")
    assert main(["config", "show"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["MILLRACE_JOB", "nightly", "MILLRACE_JOB"] in rows


def test_config_show_without_millrace_config_prints_the_file_that_is_used(
    capsys: pytest.CaptureFixture[str], configured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MILLRACE_CONFIG")
    monkeypatch.setenv("MILLRACE_DEBUG", "1")
    monkeypatch.chdir(configured.parent)
    assert main(["config", "show"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["MILLRACE_CONFIG", "millrace.toml", "default"] in rows
    assert ["MILLRACE_DEBUG", "true", "MILLRACE_DEBUG"] in rows


def test_config_show_of_an_unusable_value_is_an_error(
    capsys: pytest.CaptureFixture[str], configured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_REPLICAS", "many")
    assert main(["config", "show"]) == 1
    assert "replicas='many'" in capsys.readouterr().err


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        files = {entry.name: archive.extractfile(entry) for entry in archive}
        return {name.rpartition("/")[2]: file.read().decode() for name, file in files.items() if file is not None}


def test_debug_bundle_of_a_used_cache_has_all_parts_and_no_secret(
    capsys: pytest.CaptureFixture[str], configured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HTTPS_PROXY", "http://user:password@proxy:3128")
    monkeypatch.setenv("MILLRACE_UNKNOWN", f"uses {SECRETS['HF_TOKEN']} and https://host/key?signature=abc")
    path = tmp_path / "bundle.tar.gz"
    assert main(["debug", "bundle", "--output", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(path)
    assert path.stat().st_mode & 0o777 == 0o600
    parts = contents(path)
    names = ["about.json", "checks.json", "environment.json", "nodes.json", "options.json", "status.json"]
    assert sorted(parts) == names
    documents: dict[str, Any] = {name: json.loads(text) for name, text in parts.items()}
    assert documents["about.json"]["packages"]["pyarrow"]
    assert {"name": "cluster_token", "value": "set", "source": "MILLRACE_CLUSTER_TOKEN"} in documents["options.json"]
    assert documents["environment.json"]["AWS_SECRET_ACCESS_KEY"] == "***"
    assert documents["environment.json"]["HTTPS_PROXY"] == "http://***@proxy:3128"
    assert "no cache" in documents["status.json"]["error"]  # a part that fails contains the reason
    everything = "".join(parts.values())
    for secret in (*SECRETS.values(), "another-token", "password", "signature=abc"):
        assert secret not in everything
        assert json.dumps(secret)[1:-1] not in everything


def test_debug_bundle_hides_the_query_of_a_pinned_web_address(
    capsys: pytest.CaptureFixture[str], configured: Path, tmp_path: Path
) -> None:
    path = tmp_path / "bundle.tar.gz"
    for url in ("https://host/key?signature=abc", "s3://bucket/train"):
        main(["limit", url, "--quota", "1GB"])
    assert main(["debug", "bundle", "--output", str(path)]) == 0
    assert "signature" not in "".join(contents(path).values())
    rules = json.loads(contents(path)["status.json"])["rules"]
    assert [(rule["url"], rule["prefix"]) for rule in rules] == [
        ("https://host/key?...", "host/key?..."),
        ("s3://bucket/train", "bucket/train"),
    ]


@pytest.mark.parametrize("place", ["variable", "file"])
def test_debug_bundle_with_an_unusable_option_has_the_error_and_the_checks_of_the_machine(
    configured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    members = "static://user:hunter22222@10.0.0.5:1"
    if place == "variable":
        monkeypatch.setenv("MILLRACE_MEMBERS", members)
    else:
        monkeypatch.delenv("MILLRACE_CACHE_DIR")
        configured.write_text(f'members = "{members}"\ncache_dir = "{tmp_path}/b"\n')
    path = tmp_path / "bundle.tar.gz"
    assert main(["debug", "bundle", "--output", str(path)]) == 0
    parts = contents(path)
    checks = {check["name"]: check for check in json.loads(parts["checks.json"])}
    assert checks["configuration"]["state"] == "failed"
    assert "members has a user or a password" in checks["configuration"]["detail"]
    assert {"python", "lmdb", "boot id"} <= set(checks)
    assert checks["room"]["detail"].startswith(f"{tmp_path}/b: ")
    assert "hunter22222" not in "".join(parts.values())


def test_debug_bundle_on_a_full_disk_leaves_no_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "addfile", no_room)
    assert main(["debug", "bundle", "--output", str(tmp_path / "file")]) == 1
    assert "file: No space left on device" in capsys.readouterr().err
    assert not (tmp_path / "file").exists()


def test_debug_bundle_to_an_existing_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert main(["debug", "bundle", "--output", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err.startswith(f"millrace: {tmp_path}/file: File exists: choose another file")
    assert (tmp_path / "file").read_text() == "mine"


def test_secrets_shorter_than_eight_characters_are_hidden_by_the_name_of_their_variable_only() -> None:
    environ = {"TOKENIZERS_PARALLELISM": "false", "AWS_SESSION_TOKEN": "false", "RAY_X": "y"}
    assert secrets_of(environ) == set()
    assert environment_of(environ) == {"AWS_SESSION_TOKEN": "***", "RAY_X": "y"}
    assert hidden({"longsecret"})({"a": ["x longsecret y", 1, None, True]}) == {"a": ["x *** y", 1, None, True]}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("user:pass1234@proxy:3128", "***@proxy:3128"),
        ("http://user:p@ss@proxy", "http://***@proxy"),
        ("socks5h://user:pa/ss@proxy:1080", "socks5h://***@proxy:1080"),
        ("proxy:3128", "proxy:3128"),
        ("localhost,10.0.0.0/8", "localhost,10.0.0.0/8"),
    ],
)
def test_address_with_login_is_shown_without_it(value: str, shown: str) -> None:
    for name in ("https_proxy", "MILLRACE_ETCD_HOST", "AWS_ENDPOINT_URL"):
        assert environment_of({name: value}) == {name: shown}
    assert hidden(set())(shown) == shown


def test_login_of_a_proxy_is_hidden_in_every_part() -> None:
    hide = hidden(secrets_of({"HTTPS_PROXY": "user:pass/1234@proxy:3128"}))
    assert hide("cannot use user:pass/1234@proxy, password pass/1234") == "cannot use ***@proxy, password ***"


@pytest.mark.parametrize("name", ["RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK", "MILLRACE_DB_PWD"])
def test_variable_with_a_name_like_a_secret_is_hidden(name: str) -> None:
    assert environment_of({name: "hunter2"}) == {name: "***"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:p@ss@proxy/x failed", "http://***@proxy/x failed"),
        ("http://user:pa/ss@proxy", "http://***@proxy"),
        ("etcd://me:p@ss@host:2379", "etcd://***@host:2379"),
        ("hf://org/name@revision/file", "hf://org/name@revision/file"),
    ],
)
def test_url_with_a_user_is_shown_without_it(text: str, shown: str) -> None:
    assert hidden(set())(text) == shown


def test_plan_prints_figures_with_and_without_cache_as_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "plan",
        "--data",
        "10TB",
        "--nodes",
        "10",
        "--disk",
        "500GB",
        "--epochs",
        "5",
        "--origin-rate",
        "1GB/s",
    ]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cache: 5.00 TB on 10 nodes hold 50.0% of 10.0 TB"
    assert lines[1] == "first epoch: 16:40, limited by the origin"
    assert " ".join(lines[5].split()) == "hit ratio 40.0% 0.0%"
    assert lines[-1].startswith("cost, in the currency of your prices  ")
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema_version"], document["total"]["origin_bytes"]) == (1, 30 * 10**12)
    assert document["uncached"]["cost"]["total"] > document["total"]["cost"]["total"]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--data", "many", "size such as"),
        ("--data", "50%", "size such as"),
        ("--origin-rate", "fast", "rate such as"),
        ("--origin-rate", "0", "not above zero"),
        ("--nodes", "9" * 400, "is not in the range"),
        ("--epochs", "9" * 400, "is not in the range"),
    ],
)
def test_plan_with_invalid_size_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], option: str, value: str, words: str
) -> None:
    given = {"--data": "1TB", "--disk": "1TB", option: value}
    assert main(["plan", *(text for pair in given.items() for text in pair)]) == 2
    assert words in capsys.readouterr().err
