"""What a node keeps for the status page: samples of its throughput, and its recent events."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from millrace.events import Event, emit
from millrace.node.history import MOST_EVENTS, MOST_SAMPLES, SAMPLE_SECONDS, History, RecentEvents, tiers


def history_of(*readings: dict[str, int], seconds: float = 2.0) -> History:
    """A history with a sample of each of these counters."""
    left = iter(readings)
    times = count(step=seconds)
    history = History(lambda: next(left), lambda: float(next(times)))
    for _ in readings:
        assert history.sample() == SAMPLE_SECONDS
    return history


def test_tiers_divide_cached_bytes_into_mapped_and_read_ones() -> None:
    counters = {"cache_bytes": 10, "mapped_bytes": 4, "peer_bytes": 3, "origin_bytes": 2}
    assert tiers(counters) == {"mapped": 4, "disk": 6, "peer": 3, "origin": 2, "relayed": 0}
    assert tiers({"cache_bytes": 3, "mapped_bytes": 4})["disk"] == 0


def test_history_of_fewer_than_two_samples_is_empty() -> None:
    empty = {"mapped": [], "disk": [], "peer": [], "origin": [], "relayed": []}
    assert history_of().rates() == history_of({"origin_bytes": 5}).rates() == empty


def test_history_is_growth_per_second() -> None:
    rates = history_of({"origin_bytes": 100}, {"origin_bytes": 120}, {"origin_bytes": 120, "peer_bytes": 7}).rates()
    assert (rates["origin"], rates["peer"]) == ([10, 0], [0, 4])


def test_counters_that_were_reset_count_from_zero() -> None:
    assert history_of({"origin_bytes": 100}, {"origin_bytes": 40}).rates()["origin"] == [20]


def test_samples_at_one_moment_are_no_rate() -> None:
    assert history_of({}, {"origin_bytes": 40}, seconds=0.0).rates()["origin"] == [0]


def test_history_keeps_ten_minutes() -> None:
    readings = [{"origin_bytes": 2 * number * number} for number in range(MOST_SAMPLES + 50)]
    rates = history_of(*readings).rates()["origin"]
    assert len(rates) == 300
    assert rates[-1] == 2 * (MOST_SAMPLES + 49) - 1


@pytest.fixture
def recent() -> Iterator[RecentEvents]:
    times = count(1.0)
    recent = RecentEvents(lambda: next(times))
    yield recent
    recent.close()


def test_recent_events_are_in_plain_words_and_the_newest_first(recent: RecentEvents) -> None:
    emit(Event(name="cluster.member.lost", subject="a:1", detail="x\ny"))
    emit(Event(name="cluster.joined", subject="b:1"))
    joined, lost = recent.newest_first()
    assert joined == {
        "time": 2.0,
        "name": "cluster.joined",
        "is_warning": False,
        "subject": "b:1",
        "text": "this node has joined the cluster",
        "detail": "",
        "count": 1,
    }
    assert (lost["text"], lost["is_warning"], lost["detail"]) == ("a node was lost", True, "x\\ny")


def test_repeated_event_is_one_entry_with_its_last_time(recent: RecentEvents) -> None:
    for subject in ("a", "b", "a", "a"):
        emit(Event(name="peer.failed", subject=subject))
    assert [(event["subject"], event["time"], event["count"]) for event in recent.newest_first()] == [
        ("a", 4.0, 3),
        ("b", 2.0, 1),
    ]


def test_events_at_debug_and_undeclared_ones_are_left_out(recent: RecentEvents) -> None:
    emit(Event(name="cache.evicted", subject="a"))
    emit(Event(name="an.event.of.another.program", subject="a"))
    assert recent.newest_first() == []


def test_recent_events_are_limited_and_drop_the_oldest(recent: RecentEvents) -> None:
    for number in range(MOST_EVENTS + 1):
        emit(Event(name="peer.failed", subject=str(number)))
    kept = recent.newest_first()
    assert (len(kept), kept[0]["subject"], kept[-1]["subject"]) == (MOST_EVENTS, str(MOST_EVENTS), "1")


def test_recent_events_contain_no_query_of_a_web_address(recent: RecentEvents) -> None:
    emit(
        Event(
            name="origin.request.failed", subject="https://h/x?signature=1", detail="GET https://h/x?signature=1 failed"
        )
    )
    assert "signature" not in str(recent.newest_first())
