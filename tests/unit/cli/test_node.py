"""`millrace node`: listening addresses, permitted origins, and errors before the start."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.cli import main
from millrace.cli.node import DEFAULT_PORT, _origin, _wait_until_left, listening_address
from millrace.cluster.membership import Member, MemberState, View
from millrace.config import resolve
from millrace.errors import ConfigurationError
from millrace.node.figures import differs_enough, usable_bytes
from millrace.node.moves import changes

TOKEN = "a-token-for-tests-only"
STATIC = "static://127.0.0.1:7001,192.0.2.1:7001"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MILLRACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MILLRACE_MIN_FREE", "0")

    def run(*arguments: str, code: int = 1) -> str:
        assert main(["node", *arguments]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        *logged, error = captured.err.splitlines()
        assert error.startswith("millrace: ")
        assert all(re.match(r"\d{4}-\d\d-\d\d [\d:,]+ WARNING ", line) for line in logged)  # by a node that had begun
        return error

    return run


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_node_run_without_token_is_refused_and_creates_nothing(refused: Any, tmp_path: Path) -> None:
    text = refused("run", "--members", STATIC)
    assert "cluster_token" in text
    assert "MILLRACE_CLUSTER_TOKEN" in text
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "is not a cluster"),
        (["--members", "none"], "is not a cluster"),
        (["--members", "zookeeper://x:1"], "is not known"),
        (["--members", "static://192.0.2.1:7001"], "none of the addresses"),
        (["--members", "static://127.0.0.1:7001,127.0.0.1:7002"], "several of the addresses"),
        (["--members", STATIC, "--listen", "127.0.0.1"], "is not an address"),
        (["--members", STATIC, "--listen", "0.0.0.0:7001"], "give one address of this machine"),
        (["--members", STATIC, "--listen", "127.0.0.1:1,127.0.0.1:2"], "give one address of this machine"),
        (["--members", STATIC, "--listen", "127.0.0.1:7003"], "not among the cluster's members"),
        (["--members", "etcd://me:hidden@127.0.0.1:2379"], "write host:port only"),
        (["--members", "static://me:hidden@127.0.0.1:2379"], "write host:port only"),
        (["--etcd-host", "me:hidden@127.0.0.1"], "write host:port only"),
        (["--members", STATIC, "--origin", "gopher://x"], "cannot be used: no origin serves"),
        (["--members", STATIC, "--replicas", "0"], "replicas"),
        (["--members", STATIC, "--capacity", "much"], "is not a size"),
        (["--members", STATIC, "--etcd-host", "h"], "exclude each other"),
        (["--members", STATIC, "--tls", "/nowhere"], "/nowhere"),
    ],
)
def test_node_run_with_invalid_arguments_is_refused(
    refused: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setenv("MILLRACE_CLUSTER_TOKEN", TOKEN)
    text = refused("run", *arguments)
    assert message in text
    assert "hidden" not in text


def test_node_run_on_port_in_use_is_refused(refused: Any, monkeypatch: pytest.MonkeyPatch, taken_port: int) -> None:
    monkeypatch.setenv("MILLRACE_CLUSTER_TOKEN", TOKEN)
    text = refused("run", "--members", f"static://127.0.0.1:{taken_port}")
    assert (
        f"cannot listen on 127.0.0.1:{taken_port}: Address already in use: stop the program that listens there" in text
    )


def test_node_run_without_reachable_etcd_is_refused(
    refused: Any, monkeypatch: pytest.MonkeyPatch, taken_port: int
) -> None:
    monkeypatch.setenv("MILLRACE_CLUSTER_TOKEN", TOKEN)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    text = refused("run", "--members", f"etcd://127.0.0.1:{free}", "--listen", "127.0.0.1:0")
    assert "port" in text or "address" in text
    text = refused("run", "--members", f"etcd://127.0.0.1:{free}", "--listen", f"127.0.0.1:{free}")
    assert "etcd" in text


def test_node_command_with_seconds_out_of_range_is_a_usage_error(refused: Any) -> None:
    assert "from 0 to 3600" in refused("run", "--drain-seconds", "-1", code=2)
    assert "from 0 to 3600" in refused("drain", "--seconds", "1e9", code=2)


def test_drain_without_a_reachable_node_is_refused(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no node runs on this machine" in refused("drain")
    assert "cluster_token: not set" in refused("drain", "127.0.0.1:9")
    monkeypatch.setenv("MILLRACE_CLUSTER_TOKEN", TOKEN)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    assert "and that the node runs" in refused("drain", f"127.0.0.1:{free}")
    assert "not one address" in refused("drain", "127.0.0.1:1,127.0.0.1:2")


def test_listening_address_of_each_membership_follows_its_options() -> None:
    static = resolve({"members": STATIC})
    assert listening_address(static, None) == ("127.0.0.1", 7001)
    assert listening_address(static, "127.0.0.1:8000") == ("127.0.0.1", 8000)
    assert listening_address(resolve({"etcd_host": "127.0.0.1"}), None) == ("127.0.0.1", DEFAULT_PORT)
    with pytest.raises(ConfigurationError, match=r"nowhere\.invalid: cannot be reached"):
        listening_address(resolve({"etcd_host": "nowhere.invalid"}), None)


def test_node_origin_of_service_url_is_accepted_and_of_local_files_is_refused() -> None:
    assert _origin("https://minio:9000").identity == "s3+https://minio:9000"
    assert _origin("s3://").identity.startswith("s3+aws:")
    account = _origin("abfs://container@account.dfs.core.windows.net")
    assert account.identity == "az+https://account.blob.core.windows.net"
    assert _origin("ftp://host:2121").identity == "fsspec-ftp+host=host+port=2121"
    assert _origin("https://").identity == "https"
    for local in ("file://", "local:///etc", "memory://", "dir://x", "nothing", "s3://bucket", "s3://bucket/key"):
        with pytest.raises(ConfigurationError, match="not a storage service"):
            _origin(local)  # a node serves no local file


def test_usable_bytes_of_a_disk_are_limited_by_capacity_and_free_space() -> None:
    assert usable_bytes(capacity=100, used=10, free=1000, min_free=0) == 100
    assert usable_bytes(capacity=100, used=10, free=50, min_free=20) == 40
    assert usable_bytes(capacity=100, used=10, free=5, min_free=20) == 10
    assert usable_bytes(capacity=0, used=0, free=0, min_free=0) == 0


def test_weight_change_of_at_most_ten_percent_is_not_reported() -> None:
    assert not differs_enough(100.0, 91.0)
    assert not differs_enough(100.0, 110.0)
    assert differs_enough(100.0, 89.0)
    assert differs_enough(1.0, 5e9)


def test_log_of_a_node_with_changing_members_names_those_that_join_and_leave() -> None:
    here, leaving, joining = MemberState.HERE, MemberState.LEAVING, MemberState.JOINING

    def view(**states: MemberState) -> View:
        return View.of(Member(id=name, address=f"h:{ord(name)}", state=state) for name, state in states.items())

    def names(old: View, new: View) -> tuple[str, str, str]:
        found = changes(old, new, "a")
        kinds = (found.came, found.leaving, found.lost)
        came, leaves, lost = ("".join(member.id for member in kind) for kind in kinds)
        return came, leaves, lost

    assert names(view(a=here, b=here), view(a=here, b=here, c=joining)) == ("", "", "")
    assert names(view(a=here, b=here, c=joining), view(a=here, b=here, c=here)) == ("c", "", "")
    assert names(view(a=here, b=here, c=here, d=leaving), view(a=leaving, b=leaving)) == ("", "b", "c")
    assert names(view(a=here, b=leaving), view(a=here, b=leaving)) == ("", "", "")
    assert names(View(()), view(a=here, b=leaving, c=here)) == ("c", "b", "")
    assert names(view(b=leaving, c=joining), view(a=here)) == ("", "", "")
    assert not changes(view(a=here), view(a=leaving), "a")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("b-leaving c-here", "b-leaving c-leaving", "b"),
        ("b-leaving c-here", "b-leaving", "b"),
        ("b-leaving c-here", "b-leaving c-here", ""),
        ("b-leaving", "b-leaving d-here", ""),
        ("b-leaving c-leaving", "b-leaving", ""),
        ("a-leaving c-here", "a-leaving c-leaving", ""),
    ],
)
def test_changes_without_an_owner_name_members_that_are_still_leaving(old: str, new: str, expected: str) -> None:
    def view(text: str) -> View:
        pairs = [each.split("-") for each in text.split()]
        return View.of(Member(id=name, address="h:1", state=MemberState(state)) for name, state in pairs)

    assert "".join(member.id for member in changes(view(old), view(new), "a").still_leaving) == expected


def test_drained_node_that_was_started_again_has_left() -> None:
    states = iter([{"state": "leaving", "seconds": 1e6, "waiting_for": []}, {"state": "joining", "seconds": 0.01}])
    assert _wait_until_left(lambda: next(states), time.monotonic() + 60)


def test_drain_with_an_empty_address_drains_no_node(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a script whose variable is not set."""
    monkeypatch.setenv("MILLRACE_CLUSTER_TOKEN", TOKEN)
    assert "is not an address" in refused("drain", "")
