"""The threads of a membership and a node in Ray continue after any failure of the control plane."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.cluster.membership import Member, ray_actor, ray_members
from millrace.cluster.membership.ray_actor import NodeActor
from millrace.cluster.membership.ray_members import RayMembers
from millrace.cluster.membership.ray_records import MemberRecord
from millrace.config import resolve
from millrace.errors import OriginUnavailableError
from millrace.testing.conformance.members import eventually


class Control:
    """A control plane in memory, which fails with unexpected errors while `broken`."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.broken = False
        self.failures = 0

    def _fail(self) -> None:
        if self.broken:
            self.failures += 1
            raise KeyError("no such status")

    def put(self, key: str, value: bytes) -> None:
        self._fail()
        self.kept[key] = value

    def get(self, key: str) -> bytes | None:
        self._fail()
        return self.kept.get(key)

    def scan(self, prefix: str) -> dict[str, bytes]:
        self._fail()
        return {key: value for key, value in self.kept.items() if key.startswith(prefix)}

    def delete(self, key: str) -> None:
        self.kept.pop(key, None)

    def living_nodes(self) -> set[str]:
        return {"r1"}


def test_members_after_an_unexpected_error_still_beat(caplog: pytest.LogCaptureFixture) -> None:
    control = Control()
    members = RayMembers(control, cluster="c", ray_node="r1", seconds=0.05)  # type: ignore[arg-type]
    try:
        members.join(Member(id="a", address="127.0.0.1:1"))
        control.broken = True
        eventually(lambda: control.failures > 2)
        assert members.view().member("a") is not None
        before = dict(control.kept)
        control.broken = False
        eventually(lambda: control.kept != before)
    finally:
        members.close()
    assert len([record for record in caplog.records if record.exc_info and record.name == "millrace.cluster"]) == 1


def test_member_without_beats_for_a_lease_counts_an_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    control, ahead = Control(), 0.0
    real = time.monotonic
    monkeypatch.setattr(ray_members.time, "monotonic", lambda: real() + ahead)
    members = RayMembers(control, cluster="c", ray_node="r1", seconds=600.0)  # type: ignore[arg-type]
    try:
        members.join(Member(id="a", address="127.0.0.1:1"))
        before = members.absences()
        ahead = 4 * 600.0
        members._beat()
        assert members.absences() == before
        ahead += 6 * 600.0
        control.broken = True
        for _ in range(3):  # an outage is one absence, however often it is tried
            with pytest.raises(KeyError):
                members._write(Member(id="a", address="127.0.0.1:1"))
            assert members.absences() == before + 1
        control.broken = False
        members._beat()
        assert members.absences() == before + 2
        assert members.view().member("a") is not None
    finally:
        members.close()


def test_record_of_a_member_that_began_again_meanwhile_is_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control()
    old = MemberRecord(member=Member(id="a", address="127.0.0.1:1"), ray_node="r0", beat="1", every=600.0)
    new = replace(old, ray_node="r1")
    control.put("c/member/a", old.to_bytes())

    def living_nodes() -> set[str]:
        control.put("c/member/a", new.to_bytes())  # this process was stopped for a moment
        return {"r1"}

    monkeypatch.setattr(control, "living_nodes", living_nodes)
    members = RayMembers(control, cluster="c", ray_node="r1", seconds=600.0)  # type: ignore[arg-type]
    try:
        assert control.get("c/member/a") == new.to_bytes()
        members._read()
        assert members.view().member("a") == new.member
    finally:
        members.close()


class RayNodes:
    """The state of Ray's nodes; the first request fails with an unexpected error."""

    def __init__(self, *, failing_writes: int = 0) -> None:
        self.asked = 0
        self.records: dict[str, bytes] = {}
        self._failing_writes = failing_writes

    def get(self, key: str) -> bytes:
        return b"a token"

    def put(self, key: str, value: bytes) -> None:
        if self._failing_writes:
            self._failing_writes -= 1
            raise OriginUnavailableError("not now")
        self.records[key] = value

    def seconds_to_drain(self, node_id: str) -> float | None:
        self.asked += 1
        if self.asked == 1:
            raise KeyError("no such field")
        return 30.0

    def is_spare(self, node_id: str) -> bool:
        raise ImportError("no such message in this Ray")


def new_actor(monkeypatch: pytest.MonkeyPatch, control: RayNodes, node: Running, idle_seconds: float) -> NodeActor:
    """An actor on the Ray node "r1" whose node is `node`."""
    runtime = SimpleNamespace(get_node_id=lambda: "r1", gcs_address="gcs")
    monkeypatch.setattr("ray.get_runtime_context", lambda: runtime)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "h")
    monkeypatch.setattr(ray_actor, "ControlPlane", lambda _: control)
    monkeypatch.setattr(ray_actor, "RayMembers", lambda *_, **__: None)
    monkeypatch.setattr(ray_actor, "_LOOK_SECONDS", 0.01)
    options = resolve({"members": "none"}, environ={}, file={})
    return NodeActor("n", lambda *_, **__: node, options, "c", idle_seconds)


class Running:
    """A node that can be drained."""

    directory = Path("/node")
    member_id = "m1"

    def __init__(self) -> None:
        self.drained: list[float] = []

    def samples(self) -> list[Any]:
        return []

    def drain(self, seconds: float) -> None:
        self.drained.append(seconds)


def test_actor_with_other_errors_of_ray_still_leaves_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Running()
    new_actor(monkeypatch, RayNodes(), node, idle_seconds=120.0)
    eventually(lambda: node.drained == [25.0])


class _SpareNode(RayNodes):
    def seconds_to_drain(self, node_id: str) -> float | None:
        return None

    def is_spare(self, node_id: str) -> bool:
        return True


def test_actor_of_an_idle_node_that_ray_cannot_end_at_once_ends_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an autoscaler never removes the Ray node."""
    tries: list[str] = []

    def end(_: NodeActor) -> None:
        tries.append("end")
        if len(tries) < 3:
            raise ValueError("Failed to look up the actor")

    monkeypatch.setattr(NodeActor, "_end", end)
    node = Running()
    new_actor(monkeypatch, _SpareNode(), node, idle_seconds=0.0)
    eventually(lambda: len(tries) == 3)
    assert len(node.drained) == 1


def test_actor_whose_record_cannot_be_written_writes_it_later_and_leaves_as_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    control, node = RayNodes(failing_writes=2), Running()  # the first is that of the constructor
    actor = new_actor(monkeypatch, control, node, idle_seconds=120.0)
    with pytest.raises(OriginUnavailableError):
        actor.record()
    record = actor.record()
    assert control.records == {"c/node/n": record}
    eventually(lambda: node.drained == [25.0])
