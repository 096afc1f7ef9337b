"""The threads of a membership and a node in Ray continue after any failure of the control plane."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.cluster.membership import Member, ray_actor, ray_members
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

    def __init__(self) -> None:
        self.asked = 0

    def seconds_to_drain(self, node_id: str) -> float | None:
        self.asked += 1
        if self.asked == 1:
            raise KeyError("no such field")
        return 30.0

    def is_spare(self, node_id: str) -> bool:
        raise ImportError("no such message in this Ray")


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
    monkeypatch.setattr(ray_actor, "_LOOK_SECONDS", 0.01)
    actor = ray_actor.NodeActor.__new__(ray_actor.NodeActor)
    actor._ray_node, actor._idle_seconds = "r1", 120.0
    node = Running()
    actor._follow_ray(RayNodes(), node)  # type: ignore[arg-type]
    assert node.drained == [25.0]


class _SpareNode(RayNodes):
    def seconds_to_drain(self, node_id: str) -> float | None:
        return None

    def is_spare(self, node_id: str) -> bool:
        return True


def test_actor_of_an_idle_node_that_ray_cannot_end_at_once_ends_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an autoscaler never removes the Ray node."""
    monkeypatch.setattr(ray_actor, "_LOOK_SECONDS", 0.01)
    actor = ray_actor.NodeActor.__new__(ray_actor.NodeActor)
    actor._ray_node, actor._idle_seconds = "r1", 0.0
    tries: list[str] = []

    def end() -> None:
        tries.append("end")
        if len(tries) < 3:
            raise ValueError("Failed to look up the actor")

    monkeypatch.setattr(actor, "_end", end)
    node = Running()
    actor._follow_ray(_SpareNode(), node)  # type: ignore[arg-type]
    assert len(node.drained) == 1
    assert len(tries) == 3


class _ControlPlane(RayNodes):
    """Fails the first time that a record is written."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.records: dict[str, bytes] = {}
        self._is_down = True

    def get(self, key: str) -> bytes:
        return b"a token"

    def put(self, key: str, value: bytes) -> None:
        if self._is_down:
            self._is_down = False
            raise OriginUnavailableError("not now")
        self.records[key] = value


def test_actor_whose_record_cannot_be_written_writes_it_later_and_leaves_as_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_actor, "_LOOK_SECONDS", 0.01)
    control, node = _ControlPlane("gcs"), Running()
    monkeypatch.setattr(ray_actor, "ControlPlane", lambda _: control)
    monkeypatch.setattr(ray_actor, "RayMembers", lambda *_, **__: None)
    actor = ray_actor.NodeActor.__new__(ray_actor.NodeActor)
    vars(actor).update(_name="n", _cluster="c", _ray_node="r1", _host="h", _address="gcs", _idle_seconds=120.0)
    vars(actor).update(_node=None, _unrecorded_in=None, _starting=threading.Lock())
    vars(actor).update(_options=resolve({"members": "none"}, environ={}, file={}), _start=lambda *_, **__: node)
    with pytest.raises(OriginUnavailableError):
        actor.record()
    record = actor.record()
    assert control.records == {"c/node/n": record}
    eventually(lambda: node.drained == [25.0])
