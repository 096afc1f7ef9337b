"""The effort of the codec: the decision as a table, and the schedule that measures its inputs."""

from __future__ import annotations

import itertools

import pytest

from millrace.checkpoint.codec.chunks import Effort
from millrace.checkpoint.codec.registry import Adaptive, Steady, schedule_for, typed_share
from millrace.errors import ConfigurationError

MB, GB = 10**6, 10**9


@pytest.mark.parametrize(
    ("sink", "typed", "raw", "ratio", "share"),
    [
        (0.2 * GB, 1.7 * GB, 8 * GB, 0.8, 1.0),  # a network: the codec always keeps up
        (1.36 * GB, 1.7 * GB, 8 * GB, 0.8, 1.0),  # in balance with everything compressed
        (2 * GB, 1.7 * GB, 8 * GB, 0.8, 0.666),
        (4 * GB, 1.7 * GB, 8 * GB, 0.8, 0.244),
        (8 * GB, 1.7 * GB, 8 * GB, 0.8, 0.0),  # as fast as splitting alone
        (50 * GB, 1.7 * GB, 8 * GB, 0.8, 0.0),
        (4 * GB, 1.7 * GB, 8 * GB, 1.0, 0.270),  # in balance, although nothing shrinks
        (4 * GB, 1.7 * GB, 8 * GB, 0.4, 0.204),  # the smaller it gets, the less the storage is the limit
        (4 * GB, 9 * GB, 8 * GB, 0.8, 1.0),  # compressing is even faster: constants
    ],
)
def test_typed_share_with_slow_or_fast_storage_balances_codec_and_storage(sink, typed, raw, ratio, share):
    chosen = typed_share(sink=sink, typed=typed, raw=raw, ratio=ratio)
    assert chosen == pytest.approx(share, abs=0.001)

    def seconds(part):
        return max(part / typed + (1 - part) / raw, (1 - part + part * ratio) / sink)

    assert seconds(chosen) <= min(seconds(step / 100) for step in range(101)) * 1.001


def feed(schedule, chunks, *, sink, typed=0.85 * GB, raw=4.5 * GB, ratio=0.8):
    """Encode and store `chunks` of 1 MB as such a machine would; returns the efforts."""
    efforts, total, busy = [], 0, 0.0
    for _ in range(chunks):
        effort = schedule.next()
        stored = int(MB * ratio) if effort == Effort.TYPED else MB
        schedule.encoded(effort, MB, stored, MB / (typed if effort == Effort.TYPED else raw))
        total += stored
        busy += stored / sink
        schedule.stored(total, busy)
        efforts.append(effort)
    return efforts


def typed_part(efforts):
    return sum(effort == Effort.TYPED for effort in efforts) / len(efforts)


def test_effort_with_slow_storage_is_typed_for_every_chunk():
    assert set(feed(Adaptive(threads=2), 400, sink=200 * MB)) == {Effort.TYPED}


def test_effort_with_fast_storage_falls_to_raw_and_still_samples_typed():
    efforts = feed(Adaptive(threads=2), 400, sink=50 * GB)
    assert set(efforts[:80]) == {Effort.TYPED}
    assert typed_part(efforts[120:]) == pytest.approx(1 / 32, abs=0.01)


def test_effort_during_buffered_writes_stays_typed():
    schedule = Adaptive(threads=2)
    total, busy = 0, 0.0
    for number in range(300):
        assert schedule.next() == Effort.TYPED
        schedule.encoded(Effort.TYPED, MB, MB * 8 // 10, MB / (0.85 * GB))
        total += MB * 8 // 10
        busy += 0.0 if number < 50 else 0.8 * MB / (200 * MB)
        schedule.stored(total, busy)


def test_typed_share_of_many_chunks_is_spread_evenly():
    efforts = feed(Adaptive(threads=1), 700, sink=2 * GB)[150:]
    expected = typed_share(sink=2 * GB, typed=0.85 * GB, raw=4.5 * GB, ratio=0.8)
    assert 0.2 < expected < 0.8
    assert typed_part(efforts) == pytest.approx(expected, abs=0.02)
    runs = [len(list(group)) for _, group in itertools.groupby(efforts)]
    assert max(runs) <= 1 / min(expected, 1 - expected) + 1


def test_effort_with_changing_storage_follows_its_speed():
    schedule = Adaptive(threads=2)
    assert typed_part(feed(schedule, 300, sink=50 * GB)[150:]) < 0.05
    slow = feed(schedule, 300, sink=100 * MB)  # another file: its count starts at zero
    assert typed_part(slow[200:]) == 1.0
    assert typed_part(feed(schedule, 1500, sink=50 * GB)[1000:]) < 0.2


def test_schedule_for_a_known_name_has_its_effort_and_for_an_unknown_name_is_refused():
    assert isinstance(schedule_for("adaptive", 2), Adaptive)
    for name, effort in {"typed": Effort.TYPED, "max": Effort.MAX, "none": Effort.RAW}.items():
        schedule = schedule_for(name, 2)
        assert isinstance(schedule, Steady)
        assert schedule.next() == effort
    with pytest.raises(ConfigurationError, match="zip") as caught:
        schedule_for("zip", 2)
    assert all(name in caught.value.next_step for name in ("typed", "max", "none", "adaptive"))
