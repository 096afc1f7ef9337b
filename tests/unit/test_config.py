import logging
import math
from pathlib import Path
from typing import Any

import pytest

from millrace.config import Amount, Tls, load_file, parse_addresses, parse_amount, parse_consistency, resolve
from millrace.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("200GB", Amount(nbytes=200 * 10**9)),
        ("64 MiB", Amount(nbytes=64 << 20)),
        ("1.5kb", Amount(nbytes=1500)),
        ("80%", Amount(share=0.8)),
        (123, Amount(nbytes=123)),
        ("123", Amount(nbytes=123)),
    ],
)
def test_amounts(text: str | int, amount: Amount) -> None:
    assert parse_amount(text, option="capacity") == amount


@pytest.mark.parametrize("text", ["", "many", "5 parsecs", "-1", "120%", -1, True, None])
def test_bad_amounts_name_the_option(text: Any) -> None:
    with pytest.raises(ConfigurationError, match="capacity="):
        parse_amount(text, option="capacity")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("immutable", math.inf), ("always", 0.0), ("60s", 60.0), ("5 min", 300.0), (2, 2.0), ("1h", 3600.0)],
)
def test_consistency(text: Any, seconds: float) -> None:
    assert parse_consistency(text) == seconds


@pytest.mark.parametrize("text", ["sometimes", "", "5 parsecs", -1])
def test_bad_consistency(text: Any) -> None:
    with pytest.raises(ConfigurationError, match="consistency"):
        parse_consistency(text)


def test_order_is_argument_environment_file_default() -> None:
    file = {"capacity": "1GB", "min_free": "1GB", "consistency": "1s"}
    environ = {"MILLRACE_CAPACITY": "2GB", "MILLRACE_MIN_FREE": "2GB", "HOME": "/home/u"}
    options = resolve({"capacity": "3GB", "min_free": None}, environ=environ, file=file)
    assert options.capacity == Amount(nbytes=3 * 10**9)
    assert options.min_free == Amount(nbytes=2 * 10**9)
    assert options.max_age_seconds == 1
    assert options.native is True
    assert options.cache_dirs == (Path("/home/u/.cache/millrace"),)


def test_several_disks() -> None:
    environ = {"MILLRACE_CACHE_DIR": "/a:/b"}
    assert resolve({}, environ=environ, file={}).cache_dirs == (Path("/a"), Path("/b"))
    assert resolve({"cache_dir": ["/c", "/d"]}, environ=environ, file={}).cache_dirs == (Path("/c"), Path("/d"))
    assert resolve({"cache_dir": "/with:colon"}, environ={}, file={}).cache_dirs == (Path("/with:colon"),)


def test_a_disk_named_twice_is_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    names = [tmp_path / "disk", f"{tmp_path}/link", f"{tmp_path}/./disk/", tmp_path / "other"]
    assert resolve({"cache_dir": names}, environ={}, file={}).cache_dirs == (tmp_path / "disk", tmp_path / "other")


def test_without_a_home_the_cache_directory_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user id that nobody has
    with pytest.raises(ConfigurationError, match="set 'cache_dir'"):
        resolve({}, environ={}, file={})
    assert resolve({"cache_dir": "/d"}, environ={}, file={}).cache_dirs == (Path("/d"),)


def test_unknown_options_are_errors_that_list_the_known() -> None:
    with pytest.raises(ConfigurationError, match=r"capacty.*known ones are.*capacity"):
        resolve({"capacty": "1GB"}, environ={}, file={})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"members": "everyone"}, "not known"),
        ({"members": "static://host"}, "'host' is no address"),
        ({"members": "etcd://a:1,:2"}, "':2' is no address"),
        ({"members": "etcd://a:1/"}, "names no cluster in etcd"),
        ({"members": "etcd://a:1/x/y"}, "names no cluster in etcd"),
        ({"members": "static://a:1/x"}, "'a:1/x' is no address"),
        ({"etcd_host": "10.0.0.5", "etcd_port": "http"}, "'10.0.0.5:http' is no address"),
        ({"etcd_host": "10.0.0.5", "members": "none"}, "exclude each other"),
        ({"native": "perhaps"}, "neither true nor false"),
        ({"cache_dir": ""}, "cache_dir is empty"),
        ({"cache_dir": 5}, "cache_dir=5 is no directory"),
        ({"cache_dir": ["/d", 5]}, "cache_dir=5 is no directory"),
        ({"cache_dir": {"a": 1}}, "is no directory"),
        ({"cache_dir": "a\0b"}, "is no directory"),
        ({"cache_dir": b"/d"}, "is no directory"),
        ({"capacity": "9" * 400}, "is no size"),
        ({"tls": True}, "tls is neither a folder nor a mapping"),
        ({"tls": {"cert": "a", "key": "b"}}, "tls is neither a folder nor a mapping"),
        ({"cluster_token": "geheim"}, "cluster_token cannot be used"),
        ({"replicas": 0}, "replicas=0 cannot be used"),
        ({"replicas": True}, "replicas=True cannot be used"),
    ],
)
def test_values_that_cannot_be_used(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve(arguments, environ={}, file={})


def test_a_secret_is_not_told() -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve({}, environ={"MILLRACE_CLUSTER_TOKEN": "geheim"}, file={})
    assert "geheim" not in repr(caught.value)


def test_file_is_found_read_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"HOME": str(tmp_path)}
    assert load_file(environ) == {}
    (tmp_path / "millrace.toml").write_text('capacity = "5GB"\n')
    assert load_file(environ) == {"capacity": "5GB"}
    (tmp_path / "millrace.toml").write_text("capacty = 1\n")
    with pytest.raises(ConfigurationError, match="unknown option 'capacty'"):
        load_file(environ)
    (tmp_path / "millrace.toml").write_text("capacity = \n")
    with pytest.raises(ConfigurationError, match="correct the file"):
        load_file(environ)
    (tmp_path / "millrace.toml").write_bytes('cache_dir = "/möbel"\n'.encode("latin-1"))
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        load_file(environ)
    (tmp_path / "millrace.toml").write_text("cache_dir = 5\n")
    with pytest.raises(ConfigurationError, match="cache_dir=5 is no directory"):
        resolve({}, environ=environ)
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_file({"MILLRACE_CONFIG": str(tmp_path / "nowhere.toml")})


def test_how_a_cluster_is_found() -> None:
    def members(**arguments: Any) -> str:
        return resolve(arguments, environ={"HOME": "/home/me"}, file={}).members

    assert members() == "auto"
    assert members(etcd_host="10.0.0.5") == "etcd://10.0.0.5:2379"
    assert members(etcd_host="10.0.0.5", etcd_port=4001) == "etcd://10.0.0.5:4001"
    assert members(members="static://a:1,[::1]:2") == "static://a:1,[::1]:2"
    assert parse_addresses("a:1,[::1]:2", option="members") == (("a", 1), ("::1", 2))


def test_what_a_cluster_is_guarded_by() -> None:
    options = resolve(
        {"cluster_token": "0123456789abcdef", "tls": "/etc/tls", "replicas": "2"}, environ={"HOME": "/h"}, file={}
    )
    assert options.cluster_token == "0123456789abcdef"
    assert "0123456789abcdef" not in repr(options)
    assert options.tls == Tls(cert=Path("/etc/tls/cert.pem"), key=Path("/etc/tls/key.pem"), ca=Path("/etc/tls/ca.pem"))
    assert options.replicas == 2


def test_a_variable_that_means_nothing_is_told_once_with_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "millrace")
    known = {"MILLRACE_CAPACITY": "1GB", "MILLRACE_CONFIG": "", "MILLRACE_DEBUG": "1", "_MILLRACE_COMPLETE": "x"}
    pod = {
        "MILLRACE_SERVICE_HOST": "10.0.0.1",
        "MILLRACE_PORT": "tcp://10.0.0.1:7001",
        "MILLRACE_PORT_7001_TCP_ADDR": "10.0.0.1",
        "MILLRACE_NODES_SERVICE_PORT_DATA": "7001",
    }
    for _ in range(2):
        resolve({}, environ={"HOME": "/h", "MILLRACE_CAPACTIY": "1GB", **known, **pod}, file={})
    (told,) = caplog.messages
    assert "MILLRACE_CAPACTIY" in told
    assert "MILLRACE_CAPACITY" in told
