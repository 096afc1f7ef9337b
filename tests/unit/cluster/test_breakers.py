"""Breakers: the rules as a table; the shared file with several processes, and with damage."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.clocks import Clock

from millrace.cluster.breakers import Breakers, OpenBreaker, after_failure, before_request, valid
from millrace.events import Event

OPENED = OpenBreaker(retry_at=102.0, pause=2.0)
PROBING = OpenBreaker(retry_at=104.0, pause=2.0, probing=True)


@pytest.mark.parametrize(
    ("state", "now", "passed_over", "after"),
    [
        (None, 100.0, False, None),
        (OPENED, 100.0, True, OPENED),
        (OPENED, 101.9, True, OPENED),
        (OPENED, 102.0, False, PROBING),
        (PROBING, 103.9, True, PROBING),
        (PROBING, 104.0, False, OpenBreaker(106.0, 2.0, probing=True)),  # the process of the request was killed
        (OpenBreaker(115.0, 15.0), 115.0, False, OpenBreaker(130.0, 15.0, probing=True)),
    ],
)
def test_breaker_before_a_request_follows_its_rule(
    state: OpenBreaker | None, now: float, passed_over: bool, after: OpenBreaker | None
) -> None:
    assert before_request(state, now) == (passed_over, after)


@pytest.mark.parametrize(
    ("state", "after"),
    [
        (None, OpenBreaker(102.0, 2.0)),
        (OPENED, OPENED),  # a request that was sent before it opened
        (PROBING, OpenBreaker(104.0, 4.0)),
        (OpenBreaker(104.0, 4.0, probing=True), OpenBreaker(108.0, 8.0)),
        (OpenBreaker(104.0, 8.0, probing=True), OpenBreaker(115.0, 15.0)),
        (OpenBreaker(104.0, 15.0, probing=True), OpenBreaker(115.0, 15.0)),
    ],
)
def test_breaker_after_a_failure_follows_its_rule(state: OpenBreaker | None, after: OpenBreaker) -> None:
    assert after_failure(state, 100.0) == after


@pytest.mark.parametrize(
    ("state", "holds"),
    [
        (OpenBreaker(102.0, 2.0), True),
        (OpenBreaker(115.0, 15.0), True),
        (OpenBreaker(115.1, 15.0), False),  # from before a restart of the machine
        (OpenBreaker(-400.0, 2.0), True),
        (OpenBreaker(-501.0, 2.0), False),
        (OpenBreaker(102.0, 0.0), False),
        (OpenBreaker(102.0, float("nan")), False),
        (OpenBreaker(float("nan"), 2.0), False),
    ],
)
def test_breaker_with_an_old_state_is_closed(state: OpenBreaker, holds: bool) -> None:
    assert (valid(state, 100.0) is not None) is holds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "breakers"


@pytest.fixture
def open_(path: Path, clock: Clock) -> Callable[[], Breakers]:
    return lambda: Breakers(path, clock=clock)


@pytest.mark.parametrize("shared", [False, True])
def test_open_breaker_lets_one_request_through_at_a_time(
    path: Path, clock: Clock, shared: bool, events: list[Event]
) -> None:
    breakers = Breakers(path if shared else None, clock=clock)
    assert not breakers.is_open("a")
    breakers.worked("a")
    breakers.failed("a")
    breakers.failed("a")
    assert [breakers.is_open("a") for _ in range(3)] == [True] * 3
    assert not breakers.is_open("b")
    clock.now += 2
    assert [breakers.is_open("a") for _ in range(3)] == [False, True, True]
    breakers.failed("a")
    clock.now += 3.9
    assert breakers.is_open("a")
    clock.now += 0.1
    assert not breakers.is_open("a")
    breakers.worked("a")
    assert not breakers.is_open("a")
    assert not breakers.is_known_open("a")
    assert [(event.name, event.subject) for event in events] == [
        ("peer.breaker.opened", "a"),
        ("peer.breaker.closed", "a"),
    ]


def test_breaker_changed_by_another_process_is_reported_once(
    open_: Callable[[], Breakers], clock: Clock, events: list[Event]
) -> None:
    node, reader = open_(), open_()
    opened, closed = ("peer.breaker.opened", "a"), ("peer.breaker.closed", "a")
    for _ in range(2):
        reader.failed("a")
        for _ in range(2):
            node.report("a")
        assert [(event.name, event.subject) for event in events] == [opened, opened]
        reader.worked("a")
        for _ in range(2):
            node.report("a")
        assert [(event.name, event.subject) for event in events] == [opened, opened, closed, closed]
        events.clear()
    node.failed("a")
    node.report("a")
    reader.worked("a")
    node.failed("a")
    assert [event.name for event in events] == ["peer.breaker.opened", "peer.breaker.closed", "peer.breaker.opened"]


def test_breaker_of_peer_that_has_not_responded_at_the_start_is_reported_later(
    path: Path, clock: Clock, events: list[Event]
) -> None:
    breakers = Breakers(path, clock=clock, start_seconds=60)
    breakers.worked("b")
    breakers.failed("b")
    breakers.failed("a")
    clock.now += 59
    breakers.report("a")
    assert breakers.is_known_open("a")
    assert [(event.name, event.subject) for event in events] == [("peer.breaker.opened", "b")]
    clock.now += 1
    breakers.report("a")
    assert [event.subject for event in events] == ["b", "a"]


def test_breakers_of_two_processes_are_shared(open_: Callable[[], Breakers], clock: Clock) -> None:
    one, other = open_(), open_()
    one.failed("a")
    assert other.is_open("a")
    clock.now += 2
    assert [one.is_open("a"), other.is_open("a"), one.is_open("a")] == [False, True, True]
    other.worked("a")
    assert not one.is_open("a")


def test_open_breaker_of_many_processes_lets_one_request_through(
    open_: Callable[[], Breakers], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.cluster.breakers._LOCK_TRIES", 100_000)  # also for a process that is not scheduled
    breakers = open_()
    breakers.failed("a")
    clock.now += 2
    children = []
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            os._exit(sum(not breakers.is_open("a") for _ in range(50)))
        children.append(pid)
    assert sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children) == 1
    assert breakers.is_open("a")


def test_breakers_with_the_same_slot_stay_in_the_process(open_: Callable[[], Breakers], clock: Clock) -> None:
    names = [f"node-{number}" for number in range(3000)]
    breakers, other = open_(), open_()
    for name in names:
        breakers.failed(name)
    assert all(map(breakers.is_open, names))
    shared = [name for name in names if other.is_open(name)]
    assert 1500 < len(shared) < len(names)  # the others are private to this process
    for name in names:
        breakers.worked(name)
    assert not any(breakers.is_open(name) or other.is_open(name) for name in names)


def test_breaker_slots_of_old_states_are_reused(open_: Callable[[], Breakers], clock: Clock) -> None:
    breakers = open_()
    names = [f"old-{number}" for number in range(3000)]
    for name in names:
        breakers.failed(name)
    clock.now += 1000
    assert not any(map(breakers.is_known_open, names))
    for number in range(100):
        breakers.failed(f"new-{number}")
    assert sum(open_().is_open(f"new-{number}") for number in range(100)) > 90


def _cut(path: Path) -> None:
    os.truncate(path, 5000)


def _emptied(path: Path) -> None:
    os.truncate(path, 0)


def _scribbled(path: Path) -> None:
    path.write_bytes(random.Random(3).randbytes(path.stat().st_size))


def _one_bit_of_each_byte(path: Path) -> None:
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


@pytest.mark.parametrize("harm", [_cut, _emptied, _scribbled, _one_bit_of_each_byte])
def test_breakers_in_a_damaged_file_are_closed(
    open_: Callable[[], Breakers], path: Path, harm: Callable[[Path], None]
) -> None:
    breakers = open_()
    names = [f"node-{number}" for number in range(200)]
    for name in names:
        breakers.failed(name)
    harm(path)
    assert sum(map(breakers.is_open, names)) < len(names)
    for name in names:
        breakers.failed(name)
    assert all(map(breakers.is_open, names))
    assert sum(map(open_().is_open, names)) > 0.9 * len(names)  # those with the same slot are private


def test_breakers_without_a_usable_file_stay_in_the_process(tmp_path: Path, clock: Clock) -> None:
    breakers = Breakers(tmp_path / "missing" / "breakers", clock=clock)
    breakers.failed("a")
    assert breakers.is_open("a")


def test_breakers_on_a_full_disk_stay_in_the_process(clock: Clock) -> None:
    breakers = Breakers(Path("/dev/full"), clock=clock)
    breakers.failed("a")
    assert breakers.is_open("a")


@pytest.mark.parametrize("name", ["x" * 300, "ä\udc80"])
def test_breakers_accept_any_id(open_: Callable[[], Breakers], name: str) -> None:
    breakers = open_()
    breakers.failed(name)
    assert breakers.is_open(name)
    assert open_().is_open(name)
    breakers.worked(name)
    assert not breakers.is_open(name)
