"""What is owed to members that cannot be told at once. Over a stand-in for the cluster, whose answers the test times."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.errors import PeerSilentError
from millrace.members import Member
from millrace.peers import telling
from millrace.peers.telling import Telling
from millrace.testing.conformance.members import eventually


def test_a_write_while_an_earlier_one_is_told_late_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "_PAUSE_SECONDS", 0.01)
    member = Member(id="m", address="127.0.0.1:1")
    answers = threading.Event()
    is_away, is_asked, may_answer = threading.Event(), threading.Event(), threading.Event()
    told: list[Any] = []

    def call(_member: Member, _verb: str, _path: str, body: Any, *, deadline: float) -> None:
        if not answers.is_set():
            raise PeerSilentError("away", next_step="wait")
        is_asked.set()
        assert may_answer.wait(30)
        told.append(body)

    cluster: Any = SimpleNamespace(
        placement=lambda: SimpleNamespace(view=SimpleNamespace(members=[member])),
        may_ask=lambda _: not is_away.is_set(),
        client=SimpleNamespace(call=call),
        breakers=SimpleNamespace(failed=lambda _: None, worked=lambda _: None),
    )
    teller = Telling(cluster)
    assert teller.tell("origin", ["bucket/key"], []) == {"m"}
    answers.set()
    assert is_asked.wait(30)  # the first write is being told
    is_away.set()
    assert teller.tell("origin", ["bucket/key"], []) == {"m"}
    may_answer.set()
    eventually(lambda: len(told) == 1)
    is_away.clear()
    eventually(lambda: len(told) == 2)
    eventually(lambda: teller.owed() == 0)
