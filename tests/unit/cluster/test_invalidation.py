"""Pending invalidations of unreachable members, over a stand-in for the cluster whose responses the test times."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.planes import Plane
from tests.support.seen_events import seen_events
from tests.support.waiting import in_other_thread
from tests.support.wire_client import TOKEN

from millrace.cluster import invalidation
from millrace.cluster.dataplane import client
from millrace.cluster.dataplane.client import PeerClient
from millrace.cluster.invalidation import FORGET, Invalidations
from millrace.cluster.membership import Member, View
from millrace.cluster.placement import Placement
from millrace.errors import PeerSilentError
from millrace.testing.conformance.members import eventually


def cluster_of(member: Member, client: Any, *, is_available: Callable[[object], bool]) -> Any:
    """The parts of a `Cluster` of one member that invalidations use."""
    return SimpleNamespace(
        placement=lambda: Placement(View.of([member])),
        is_available=is_available,
        client=client,
        link=SimpleNamespace(member_id=None),
        breakers=SimpleNamespace(failed=lambda _: None, worked=lambda _: None),
    )


def test_invalidation_during_a_late_one_is_sent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invalidation, "_PAUSE_SECONDS", 0.01)
    member = Member(id="m", address="127.0.0.1:1")
    answers = threading.Event()
    is_away, is_asked, may_answer = threading.Event(), threading.Event(), threading.Event()
    reported: list[Any] = []

    def call(_address: str, _verb: str, _path: str, body: Any, *, deadline: float, working_seconds: float) -> None:
        if not answers.is_set():
            raise PeerSilentError("away", next_step="wait")
        is_asked.set()
        assert may_answer.wait(120)
        reported.append(body)

    cluster = cluster_of(member, SimpleNamespace(call=call), is_available=lambda _: not is_away.is_set())
    invalidations = Invalidations(cluster)
    assert invalidations.send("origin", ["bucket/key"], lambda _: []) == {"m"}
    answers.set()
    assert is_asked.wait(120)  # the first invalidation is being sent
    is_away.set()
    assert invalidations.send("origin", ["bucket/key"], lambda _: []) == {"m"}
    may_answer.set()
    eventually(lambda: len(reported) == 1)
    is_away.clear()
    eventually(lambda: len(reported) == 2)
    eventually(lambda: not invalidations._pending)


def test_invalidation_of_a_node_whose_disk_hangs_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node reports that it works, for as long as the disk hangs."""
    monkeypatch.setattr(client, "WORKING_SECONDS", math.inf)
    monkeypatch.setattr(invalidation, "_WORKING_SECONDS", 1.0)
    responds = threading.Event()
    with seen_events() as seen, Plane(tmp_path) as plane:
        plane.server.route("POST", FORGET, lambda _: responds.wait(300))
        member = Member(id="m", address=plane.address)
        cluster = cluster_of(member, PeerClient(token=TOKEN), is_available=lambda _: not responds.is_set())
        try:
            invalidations = Invalidations(cluster)
            assert in_other_thread(lambda: invalidations.send("origin", ["bucket/key"])) == {"m"}
        finally:
            responds.set()
            cluster.client.close()
    assert [(event.name, event.subject) for event in seen][:1] == [("peer.failed", member.address)]
