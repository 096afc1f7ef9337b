import ast
import inspect
import json
import logging
import math
import os
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any, Unpack, get_type_hints

import pytest

import millrace
from millrace import option_types
from millrace.config import (
    OPTION_NAMES,
    Amount,
    Tls,
    absolute_path,
    effective_options,
    load_file,
    parse_addresses,
    parse_amount,
    parse_consistency,
    parse_seconds,
    resolve,
)
from millrace.errors import ConfigurationError
from millrace.option_types import FileSystemOptions


@pytest.mark.parametrize("text", ["7GB", "64MiB", "1TiB", "1500MB", "123B", "0B", "80%", "12.5%"])
def test_amount_as_text_parses_to_the_same_amount(text: str) -> None:
    amount = parse_amount(text, option="capacity")
    assert amount.text() == text
    assert parse_amount(amount.text(), option="capacity") == amount


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("200GB", Amount(nbytes=200 * 10**9)),
        ("64 MiB", Amount(nbytes=64 << 20)),
        ("1.5kb", Amount(nbytes=1500)),
        ("80%", Amount(share=0.8)),
        (123, Amount(nbytes=123)),
        ("1230000", Amount(nbytes=1230000)),
    ],
)
def test_amount_with_a_valid_unit_is_parsed(text: str | int, amount: Amount) -> None:
    assert parse_amount(text, option="capacity") == amount


@pytest.mark.parametrize("text", ["", "many", "5 parsecs", "-1", "120%", -1, True, None])
def test_amount_that_is_invalid_names_the_option(text: Any) -> None:
    with pytest.raises(ConfigurationError, match="capacity="):
        parse_amount(text, option="capacity")


@pytest.mark.parametrize("text", ["10", " 1.5 ", "1048575"])
def test_amount_of_less_than_a_mebibyte_needs_a_unit(text: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"has no unit: write '{text.strip()}GB', or '{text.strip()}B' for bytes"
    ):
        parse_amount(text, option="capacity")
    assert parse_amount(f"{text}B", option="capacity") == Amount(nbytes=int(float(text)))
    assert parse_amount("1048576", option="capacity") == Amount(nbytes=1 << 20)
    assert parse_amount("0", option="capacity") == Amount(nbytes=0)


def test_number_in_the_file_needs_a_unit_too() -> None:
    with pytest.raises(ConfigurationError, match=r"capacity='10' has no unit"):
        resolve({}, environ={"HOME": "/home/me"}, file={"capacity": 10})
    options = resolve({"capacity": 10}, environ={"HOME": "/home/me"}, file={"capacity": 5, "min_free": 0})
    assert (options.capacity, options.min_free) == (Amount(nbytes=10), Amount(nbytes=0))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("immutable", math.inf), ("always", 0.0), ("60s", 60.0), ("5 min", 300.0), (2, 2.0), ("1h", 3600.0)],
)
def test_consistency_values_are_parsed(text: Any, seconds: float) -> None:
    assert parse_consistency(text) == seconds


@pytest.mark.parametrize("text", ["sometimes", "", "5 parsecs", -1])
def test_invalid_consistency_raises(text: Any) -> None:
    with pytest.raises(ConfigurationError, match="consistency"):
        parse_consistency(text)


def test_option_sources_are_ordered_argument_environment_file_default() -> None:
    file = {"capacity": "1GB", "min_free": "1GB", "consistency": "1s"}
    environ = {"MILLRACE_CAPACITY": "2GB", "MILLRACE_MIN_FREE": "2GB", "HOME": "/home/u"}
    options = resolve({"capacity": "3GB", "min_free": None}, environ=environ, file=file)
    assert options.capacity == Amount(nbytes=3 * 10**9)
    assert options.min_free == Amount(nbytes=2 * 10**9)
    assert options.max_age_seconds == 1
    assert options.native is True
    assert options.cache_dirs == (Path("/home/u/.cache/millrace"),)


def test_several_cache_directories_are_parsed() -> None:
    environ = {"MILLRACE_CACHE_DIR": "/a:/b"}
    assert resolve({}, environ=environ, file={}).cache_dirs == (Path("/a"), Path("/b"))
    assert resolve({"cache_dir": ["/c", "/d"]}, environ=environ, file={}).cache_dirs == (Path("/c"), Path("/d"))
    assert resolve({"cache_dir": "/with:colon"}, environ={}, file={}).cache_dirs == (Path("/with:colon"),)


def test_disk_named_twice_is_used_once(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    names = [tmp_path / "disk", f"{tmp_path}/link", f"{tmp_path}/./disk/", tmp_path / "other"]
    assert resolve({"cache_dir": names}, environ={}, file={}).cache_dirs == (tmp_path / "disk", tmp_path / "other")


def test_cache_directory_without_home_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for an unknown user id
    with pytest.raises(ConfigurationError, match="set 'cache_dir'"):
        resolve({}, environ={}, file={})
    assert resolve({"cache_dir": "/d"}, environ={}, file={}).cache_dirs == (Path("/d"),)


def test_unknown_configuration_option_raises_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'capacty': is 'capacity' meant\? known ones are.*capacity"):
        resolve({"capacty": "1GB"}, environ={}, file={})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"members": "everyone"}, "not known"),
        ({"members": "static://host"}, "'host' is not an address"),
        ({"members": "etcd://a:1,:2"}, "':2' is not an address"),
        ({"members": "etcd://a:1/"}, "names no cluster in etcd"),
        ({"members": "etcd://a:1/x/y"}, "names no cluster in etcd"),
        ({"members": "static://a:1/x"}, "'a:1/x' is not an address"),
        ({"etcd_host": "10.0.0.5", "etcd_port": "http"}, "'10.0.0.5:http' is not an address"),
        ({"etcd_host": "10.0.0.5", "members": "none"}, "the arguments have both etcd_host and members"),
        ({"members": "ETCD://h:1"}, "is not known: use 'auto'"),
        ({"cluster_token": ["0123456789abcdef"]}, "cluster_token cannot be used"),
        ({"native": "perhaps"}, "neither true nor false"),
        ({"cache_dir": ""}, "cache_dir is empty"),
        ({"cache_dir": 5}, "cache_dir=5 is not a directory"),
        ({"cache_dir": ["/d", 5]}, "cache_dir=5 is not a directory"),
        ({"cache_dir": {"a": 1}}, "is not a directory"),
        ({"cache_dir": "a\0b"}, "is not a directory"),
        ({"cache_dir": b"/d"}, "is not a directory"),
        ({"capacity": "9" * 400}, "is not a size"),
        ({"tls": True}, "tls is neither a folder nor a mapping"),
        ({"tls": {"cert": "a", "key": "b"}}, "tls is neither a folder nor a mapping"),
        ({"cluster_token": "geheim"}, "cluster_token cannot be used"),
        ({"replicas": 0}, "replicas=0 cannot be used"),
        ({"replicas": True}, "replicas=True cannot be used"),
    ],
)
def test_invalid_option_values_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve(arguments, environ={}, file={})


def test_secret_is_not_in_repr_or_errors() -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve({}, environ={"MILLRACE_CLUSTER_TOKEN": "geheim"}, file={})
    assert "geheim" not in repr(caught.value)


def test_configuration_file_is_found_read_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(ConfigurationError, match="cache_dir=5 is not a directory"):
        resolve({}, environ=environ)
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_file({"MILLRACE_CONFIG": str(tmp_path / "nowhere.toml")})


def test_members_option_is_parsed() -> None:
    def members(**arguments: Any) -> str:
        return resolve(arguments, environ={"HOME": "/home/me"}, file={}).members

    assert members() == "auto"
    assert members(etcd_host="10.0.0.5") == "etcd://10.0.0.5:2379"
    assert members(etcd_host="10.0.0.5", etcd_port=4001) == "etcd://10.0.0.5:4001"
    assert members(members="static://a:1,[::1]:2") == "static://a:1,[::1]:2"
    assert parse_addresses("a:1,[::1]:2", option="members") == (("a", 1), ("::1", 2))


@pytest.mark.parametrize(
    ("file", "environ", "arguments", "expected"),
    [
        ({"etcd_host": "h"}, {"MILLRACE_MEMBERS": "none"}, {}, ("none", "MILLRACE_MEMBERS")),
        ({"etcd_host": "h"}, {"MILLRACE_MEMBERS": "auto"}, {}, ("auto", "MILLRACE_MEMBERS")),
        ({"members": "static://a:1"}, {}, {"etcd_host": "127.0.0.1"}, ("etcd://127.0.0.1:2379", "argument")),
        ({"etcd_port": 4001}, {"MILLRACE_MEMBERS": "none"}, {"etcd_host": "h"}, ("etcd://h:4001", "argument")),
        ({}, {"MILLRACE_ETCD_HOST": "h"}, {"members": "ray"}, ("ray", "argument")),
        ({"members": "ray", "etcd_host": ""}, {}, {}, ("ray", "millrace.toml")),
    ],
)
def test_members_and_etcd_host_of_several_sources_use_the_strongest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: dict, environ: dict, arguments: dict, expected: tuple
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"{name} = {json.dumps(value)}" for name, value in file.items()]
    Path("millrace.toml").write_text("\n".join(lines))
    environ = {"HOME": str(tmp_path), **environ}
    assert resolve(arguments, environ=environ).members == expected[0]
    options = {each.name: each for each in effective_options(arguments, environ=environ)}
    assert (options["members"].value, options["members"].source) == expected
    if not expected[0].startswith("etcd"):
        assert not options["etcd_host"].value


def test_members_and_etcd_host_of_one_source_exclude_each_other() -> None:
    for source, environ, file in (
        ("environment", {"MILLRACE_ETCD_HOST": "h", "MILLRACE_MEMBERS": "none"}, {}),
        ("file", {}, {"etcd_host": "h", "members": "none"}),
    ):
        with pytest.raises(ConfigurationError, match=f"the {source} has both etcd_host and members"):
            resolve({}, environ={"HOME": "/h", **environ}, file=file)


def test_configuration_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large.toml").write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(ConfigurationError, match=r"large\.toml is larger than 1 MiB"):
        load_file({"MILLRACE_CONFIG": str(tmp_path / "large.toml")})


def test_relative_path_in_a_deleted_directory_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for use in (
        lambda: absolute_path("x"),
        lambda: resolve({"tls": "x"}, environ={"HOME": "/h"}, file={}),
        lambda: resolve({"cache_dir": "x"}, environ={"HOME": "/h"}, file={}),
    ):
        with pytest.raises(ConfigurationError):
            use()
    assert absolute_path("/a/../x") == "/x"


def test_token_and_tls_options_are_parsed() -> None:
    options = resolve(
        {"cluster_token": "0123456789abcdef", "tls": "/etc/tls", "replicas": "2"}, environ={"HOME": "/h"}, file={}
    )
    assert options.cluster_token == "0123456789abcdef"
    assert "0123456789abcdef" not in repr(options)
    assert options.tls == Tls(cert=Path("/etc/tls/cert.pem"), key=Path("/etc/tls/key.pem"), ca=Path("/etc/tls/ca.pem"))
    assert options.replicas == 2


def test_variable_that_is_unknown_is_logged_once_with_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
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
    (reported,) = caplog.messages
    assert "MILLRACE_CAPACTIY" in reported
    assert "MILLRACE_CAPACITY" in reported


HUGE = 10**5000  # Python neither parses nor prints as many digits


@pytest.mark.parametrize("option", ["capacity", "min_free", "consistency", "replicas", "max_requests", "timeout"])
@pytest.mark.parametrize("value", [HUGE, 10**4000, "9" * 5000, "9" * 400, f"{'9' * 30}TB"], ids=range(5))
def test_number_that_is_too_large_is_a_short_configuration_error(option: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve({option: value}, environ={}, file={})
    assert str(caught.value).startswith(f"{option}=")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", ["9" * 400, "9" * 30 + "d", 10**400, math.inf, math.nan])
def test_time_that_is_too_long_is_a_configuration_error(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="ttl="):
        parse_seconds(value, option="ttl")


@pytest.mark.parametrize("host", ["a..b", "a" * 64, ".a", "user:geheim@host"])
def test_host_that_cannot_be_looked_up_is_not_an_address(host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not an address|cannot be used") as caught:
        parse_addresses(f"{host}:1", option="--node")
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    "text", [f"capacity = {'9' * 5000}", f"capacity = {'[' * 5000}{']' * 5000}"], ids=["long", "deep"]
)
def test_file_that_the_toml_parser_cannot_take_is_a_configuration_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "millrace.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="correct the file"):
        resolve({}, environ={"MILLRACE_CONFIG": str(path), "HOME": str(tmp_path)})


def test_pipe_in_place_of_the_file_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("millrace.toml")
    # A read would return the bytes of this thread, rather than wait without end.
    writer = threading.Thread(target=Path("millrace.toml").write_text, args=("",))
    writer.start()
    try:
        with pytest.raises(ConfigurationError, match="is a pipe"):
            resolve({}, environ={"HOME": str(tmp_path)})
    finally:
        reader = os.open("millrace.toml", os.O_RDONLY | os.O_NONBLOCK)
        writer.join()
        os.close(reader)


# --- the declarations ---------------------------------------------------------------------------------------------------


def test_filesystem_declares_its_options_with_types() -> None:
    for function in (millrace.filesystem, millrace.MillraceFileSystem.__init__):
        assert get_type_hints(function)["options"] == Unpack[FileSystemOptions]
    assert set(get_type_hints(FileSystemOptions)) > set(OPTION_NAMES)


def test_every_declared_option_has_a_description_below_it() -> None:
    source = inspect.getsource(option_types)
    for declaration in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        fields = [node.target.id for node in declaration.body if isinstance(node, ast.AnnAssign)]  # type: ignore[union-attr]
        described = [
            field.target.id  # type: ignore[union-attr]
            for field, text in pairwise(declaration.body)
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        ]
        assert described == fields


def test_every_declared_option_is_accepted_and_reaches_the_cache(tmp_path: Path) -> None:
    values = {"cache_dir": str(tmp_path), "capacity": "1MB", "min_free": 0, "members": "none", "consistency": "1s",
              "native": False, "etcd_host": "", "etcd_port": 2379, "cluster_token": "12345678", "tls": str(tmp_path),
              "replicas": 2, "max_requests": 3, "request_rate": "5/s", "timeout": "9s"}  # fmt: skip
    assert set(values) == set(OPTION_NAMES)
    arguments: Any = values
    options = millrace.filesystem("file", skip_instance_cache=True, **arguments)._options
    assert (options.capacity, options.replicas, options.native) == (Amount(nbytes=10**6), 2, False)
    of_fsspec: Any = dict.fromkeys(set(FileSystemOptions.__annotations__) - set(OPTION_NAMES))
    millrace.filesystem("file", **of_fsspec, cache_dir=str(tmp_path))


def test_misspelt_option_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown option 'capactiy'.*'?capacity"):
        millrace.filesystem("file", capactiy="1GB")  # type: ignore[call-arg]
