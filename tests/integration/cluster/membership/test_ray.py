"""Members that find each other through Ray's control plane, and the actor of each Ray node, on a real Ray."""

from __future__ import annotations

import os
import pickle
import signal
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.raylets import Raylets, on, raylets
from tests.support.waiting import wait_until

from millrace.cluster.membership import Member, Membership, MemberState, View
from millrace.cluster.membership.ray_actor import GIVE_UP_SECONDS, find_origin, introduce, token_of
from millrace.cluster.membership.ray_control import ControlPlane
from millrace.cluster.membership.ray_members import RayMembers
from millrace.config import CacheOptions, resolve
from millrace.errors import ConfigurationError, OriginUnavailableError
from millrace.origin import open_origin
from millrace.testing.conformance import LivingMembershipConformance

ray = pytest.importorskip("ray")

from millrace.cluster.membership.ray import find_node  # noqa: E402 - needs Ray

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets(1) as started:
        yield started


@pytest.fixture
def control(cluster: Raylets) -> ControlPlane:
    return ControlPlane(ray.get_runtime_context().gcs_address)


@pytest.fixture
def name() -> str:
    """The name of a cluster without other members."""
    return uuid.uuid4().hex


@pytest.fixture
def members(
    cluster: Raylets, control: ControlPlane, name: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., RayMembers]]:
    # On a busy machine a thread may pause for seconds, and the beats of these members are short.
    monkeypatch.setattr("millrace.cluster.membership.ray_records._LEASE_MARGIN_SECONDS", 10.0)
    opened = []

    def make(**changes: Any) -> RayMembers:
        arguments = {"cluster": name, "ray_node": cluster.head, "seconds": 0.1, **changes}
        opened.append(RayMembers(control, **arguments))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def _member(name: str, **changes: Any) -> Member:
    return Member(**{"id": name, "address": f"127.0.0.1:{1000 + len(name)}", **changes})


def _ids(view: View) -> list[str]:
    return [member.id for member in view.members]


class _Views:
    def __init__(self, membership: RayMembers) -> None:
        self.seen: list[View] = []
        self.end = membership.watch(self.seen.append)


class TestRayMembers(LivingMembershipConformance):
    @pytest.fixture
    def connect(self, members: Callable[..., RayMembers]) -> Callable[[], RayMembers]:
        return members


def test_members_of_other_clusters_are_separate(members: Callable[..., RayMembers]) -> None:
    members().join(_member("a"))
    assert _ids(members(cluster="another").view()) == []
    assert _ids(members().view()) == ["a"]


def test_record_of_a_dead_ray_node_is_removed(
    members: Callable[..., RayMembers], control: ControlPlane, name: str
) -> None:
    members(ray_node="0" * 56).join(_member("a"))
    assert _ids(members().view()) == []
    wait_until(lambda: control.scan(f"{name}/member/") == {}, "its record is removed")


def test_members_without_the_control_plane_keep_the_last_view(
    cluster: Raylets, members: Callable[..., RayMembers], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = members(), members()
    first.join(_member("a"))
    wait_until(lambda: _ids(second.view()) == ["a"], "it is seen")
    views = _Views(second)
    with cluster.silent_control_plane():
        wait_until(lambda: caplog.text.count("does not respond") >= 2, "both have noticed")
        with pytest.raises(OriginUnavailableError, match="does not respond"):
            second.join(_member("b"))
        assert _ids(second.view()) == ["a"]
    wait_until(lambda: caplog.text.count("responds again") == 2, "both continue")
    # Requests sent during the outage may be executed after it: "b" can be a member for a while.
    assert all("a" in _ids(view) for view in [second.view(), *views.seen])


def test_token_is_shared_and_access_to_origins_is_the_newest(control: ControlPlane, name: str) -> None:
    options = resolve({"cache_dir": "/nowhere"})
    tokens = {token_of(control, name, options) for _ in range(3)}
    assert len(tokens) == 1
    assert len(tokens.pop()) > 30
    assert token_of(control, name, resolve({"cluster_token": "a-token-of-ones-own"})) == "a-token-of-ones-own"

    old, new = (
        open_origin("s3", {"key": "k", "secret": secret, "endpoint_url": "http://127.0.0.1:1"}) for secret in ("1", "2")
    )
    assert find_origin(control, name, old.identity) is None
    for origin in (old, new):
        introduce(control, name, origin)
        found = find_origin(control, name, origin.identity)
        assert found is not None
        assert pickle.dumps(found) == pickle.dumps(origin)
    for local in (open_origin("file"), open_origin("memory")):
        introduce(control, name, local)
        assert find_origin(control, name, local.identity) is None
    unpicklable = open_origin("ftp", {"host": "h", "call": lambda: None})
    introduce(control, name, unpicklable)
    assert find_origin(control, name, unpicklable.identity) is None


# --- the actor, with a node that is a member and nothing else -----------------------------------------


@dataclass
class _Node:
    directory: Path
    member_id: str
    membership: Membership
    options: CacheOptions

    def drain(self, seconds: float) -> None:
        self.membership.join(_member(self.member_id, state=MemberState.LEAVING))
        if seconds == GIVE_UP_SECONDS:
            self.membership.leave()


def start_node(
    options: CacheOptions, *, host: str, membership: Membership, tag: str, find_origin: Callable[[str], Any]
) -> _Node:
    """A `StartNode`."""
    directory = options.cache_dirs[0] / tag
    directory.mkdir(parents=True, exist_ok=True)
    if (options.cache_dirs[0] / "broken").exists():
        raise ConfigurationError("this cache is broken", next_step="mend it")
    (directory / "pid").write_text(str(os.getpid()))
    (directory / "token").write_text(str(options.cluster_token))
    membership.join(Member(id=tag, address=f"{host}:1"))
    return _Node(directory=directory, member_id=tag, membership=membership, options=options)


def _find(options: CacheOptions, idle_seconds: float = 600.0) -> tuple[str, Path]:
    record = find_node(options, start=start_node, idle_seconds=idle_seconds)
    assert record is not None
    return record.member_id, record.directory


def _pid(directory: Path) -> int:
    return int((directory / "pid").read_text() or 0)


def test_actor_is_one_per_ray_node_and_restarted(cluster: Raylets, tmp_path: Path) -> None:
    from millrace.cluster.membership.ray_records import cluster_name

    options = resolve({"cache_dir": str(tmp_path)})
    other = cluster.add()
    mine, directory = _find(options)
    theirs, its_directory = on(other, _find, options)
    assert (mine, theirs) == (cluster.head, other)
    assert on(other, _find, options) == (theirs, its_directory)
    assert (directory / "token").read_text() == (its_directory / "token").read_text()

    watcher = RayMembers(
        ControlPlane(ray.get_runtime_context().gcs_address),
        cluster=cluster_name(options, None),
        ray_node=cluster.head,
        seconds=0.2,
    )
    try:
        views = _Views(watcher)
        assert _ids(watcher.view()) == sorted([mine, theirs])
        before = _pid(directory)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: _pid(directory) != before, "the actor is back")
        wait_until(lambda: _ids(watcher.view()) == sorted([mine, theirs]), "so is the member")
        cluster.kill(other)
        wait_until(lambda: _ids(watcher.view()) == [mine], "the dead Ray node's member is dropped")
        views.end()
    finally:
        watcher.close()
    wait_until(lambda: ray.cluster_resources()["CPU"] == ray.available_resources().get("CPU"), "nothing is reserved")


def test_node_that_cannot_start_raises_and_is_tried_again(cluster: Raylets, tmp_path: Path) -> None:
    options = resolve({"cache_dir": str(tmp_path)})
    (tmp_path / "broken").touch()
    with pytest.raises(ConfigurationError, match=r"this cache is broken: mend it$") as caught:
        _find(options)
    assert type(caught.value) is ConfigurationError
    (tmp_path / "broken").unlink()
    assert _find(options)[0] == cluster.head


def test_node_of_a_draining_ray_node_leaves_as_planned(
    cluster: Raylets, members: Callable[..., RayMembers], control: ControlPlane, tmp_path: Path
) -> None:
    from millrace.cluster.membership.ray_records import cluster_name

    options = resolve({"cache_dir": str(tmp_path)})
    other = cluster.add()
    on(other, _find, options)
    watcher = members(cluster=cluster_name(options, None))
    assert [member.state for member in watcher.view().members] == [MemberState.HERE]
    cluster.drain(other, seconds=60)
    wait_until(
        lambda: [member.state for member in watcher.view().members] == [MemberState.LEAVING], "it leaves as planned"
    )
    cluster.kill(other)


def test_actor_of_an_idle_autoscaled_node_ends(
    cluster: Raylets, members: Callable[..., RayMembers], control: ControlPlane, tmp_path: Path
) -> None:
    from millrace.cluster.membership.ray_records import cluster_name

    options = resolve({"cache_dir": str(tmp_path)})
    other = cluster.add(kind="worker")
    on(other, _find, options, 2.0)  # a task without resources, so that nothing else runs there afterwards
    _find(options, 2.0)
    watcher = members(cluster=cluster_name(options, None))
    wait_until(lambda: _ids(watcher.view()) == [cluster.head], "it has left, and that of the head stays")
    wait_until(lambda: cluster.is_idle(other), "to the autoscaler it is idle")
    assert on(other, _find, options)[0] == other  # until it is needed again
    wait_until(lambda: _ids(watcher.view()) == sorted([cluster.head, other]), "it is back")
    cluster.kill(other)
