"""The limits' decisions over any events: the rate is kept, no request waits forever, the window keeps its bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.origin.limits.retry_after import parse_retry_after
from millrace.origin.limits.retrying import backoff
from millrace.origin.limits.slots import (
    BURST_SECONDS,
    FEW_REQUESTS,
    LONGEST_CLOSED_SECONDS,
    Window,
    after_busy,
    after_success,
    next_start,
    pause_of_gate,
)

# Examples are small; a busy machine makes them slow all the same.
patient = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])

DRAWS = st.floats(0, 1, exclude_max=True)
RATES = st.floats(0.01, 10_000)


@pytest.mark.slow
@patient
@given(rate=RATES, gaps=st.lists(st.floats(0, 5), min_size=1, max_size=80))
def test_rate_stays_within_limit_and_burst_in_any_interval(rate: float, gaps: list[float]) -> None:
    booked, now, starts = 0.0, 1000.0, []
    for gap in gaps:
        now += gap
        start, booked = next_start(booked, now, rate)
        assert start >= now
        if start > now:
            now = start  # it waits, and requests again
            start, booked = next_start(booked, now, rate)
            assert start == now
        starts.append(start)
    assert starts == sorted(starts)
    burst = max(1.0, BURST_SECONDS * rate)
    for first in range(len(starts)):
        for last in range(first, len(starts)):
            # Rounding of a clock that counts from the machine's start leaves a millionth of a request.
            assert last - first + 1 <= (starts[last] - starts[first]) * rate + burst + 1e-3


@patient
@given(rate=RATES, begun=st.integers(0, 50), waiters=st.integers(0, 50), junk=st.floats(0, 1e9))
def test_waiting_or_cancelled_request_delays_no_other(rate: float, begun: int, waiters: int, junk: float) -> None:
    booked = junk
    for _ in range(begun):
        start, following = next_start(booked, 1000.0, rate)
        booked = following if start <= 1000.0 else booked
    for _ in range(waiters):
        start, following = next_start(booked, 1000.0, rate)
        booked = following if start > 1000.0 else booked
    start, _ = next_start(booked, 1000.0, rate)
    assert start - 1000.0 <= 1.0 / rate + 1e-5


@patient
@given(most=st.integers(1, 48), answers=st.lists(st.booleans(), max_size=300))
def test_request_window_stays_in_its_bounds_and_recovers(most: int, answers: list[bool]) -> None:
    window = Window(1024.0, 0.0, most)
    for success in answers:
        before = window
        window = after_success(window) if success else after_busy(window)
        assert 1 <= window.requests <= most
        assert (window.requests >= before.requests) if success else (window.size <= max(2.0, before.size / 2))
        if not success:
            assert window.requests <= FEW_REQUESTS
    for _ in range(2 * most * most):
        if window.is_open:
            break
        window = after_success(window)
    assert window.requests == most


@patient
@given(closings=st.integers(0, 10**6), draw=DRAWS, asked=st.none() | st.floats(0, math.inf))
def test_gate_is_closed_for_the_requested_bounded_time(closings: int, draw: float, asked: float | None) -> None:
    pause = pause_of_gate(closings, asked, draw)
    assert 0 < pause <= LONGEST_CLOSED_SECONDS
    if asked is not None:
        assert pause >= min(asked, LONGEST_CLOSED_SECONDS)


@patient
@given(failures=st.integers(1, 10**6), draw=DRAWS)
def test_backoff_is_bounded_and_never_negative(failures: int, draw: float) -> None:
    assert 0 <= backoff(failures, draw) <= 5.0


@patient
@given(header=st.text() | st.from_regex(r"[0-9]{1,400}", fullmatch=True), now=st.floats(0, 1e11))
def test_any_header_is_parsed_or_ignored(header: str, now: float) -> None:
    seconds = parse_retry_after(header, now)
    assert seconds is None or seconds >= 0
