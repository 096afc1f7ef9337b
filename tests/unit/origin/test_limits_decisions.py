"""The decisions of the limits: tables, without clocks, files or chance."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from millrace.config import resolve_limits
from millrace.errors import (
    ConfigurationError,
    DeniedError,
    MillraceError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    OriginBusyError,
    OriginUnavailableError,
    OutcomeUnknownError,
    UsageError,
)
from millrace.origin.limits.retry_after import parse_retry_after
from millrace.origin.limits.retrying import PATIENCE, Verdict, backoff, is_unsure, patience_within, verdict_on
from millrace.origin.limits.slots import (
    FEW_REQUESTS,
    LONGEST_CLOSED_SECONDS,
    Window,
    after_busy,
    after_success,
    next_start,
    pause_of_gate,
)
from millrace.origin.protocol import request_seconds

REFUSED = OriginUnavailableError("400")
REFUSED.is_final = True
HALF_PAST_SEVEN = 784_884_600.0  # Tue, 15 Nov 1994 07:30:00 GMT


@pytest.mark.parametrize(
    ("booked_until", "now", "per_second", "start", "booked"),
    [
        (0.0, 100.0, 10.0, 100.0, 100.1),  # idle for long: now, and the pause is not saved up
        (100.1, 100.0, 10.0, 100.1, 100.1),  # one just before: nothing is booked until it may begin
        (100.1, 100.1, 10.0, 100.1, 100.2),  # which is now
        (
            100.5,
            100.0,
            10.0,
            100.0,
            100.1,
        ),  # no process books so far ahead at this rate: another clock, or another rate
        (100.05, 100.0, 100.0, 100.0, 100.06),  # a rate of 100 allows 10 at once
        (100.095, 100.0, 100.0, 100.005, 100.095),  # and no more
        (100.0, 100.0, 0.5, 100.0, 102.0),  # slower than one a second
    ],
)
def test_schedule_of_a_rate_returns_start_and_booking(
    booked_until: float, now: float, per_second: float, start: float, booked: float
) -> None:
    assert next_start(booked_until, now, per_second) == pytest.approx((start, booked))


@pytest.mark.parametrize("per_second", [0.25, 3.0, 40.0, 2000.0])
def test_schedule_of_many_requests_keeps_the_rate_after_one_burst(per_second: float) -> None:
    booked, now, starts = 0.0, 50.0, []
    while len(starts) < 100:
        start, booked = next_start(booked, now, per_second)
        if start <= now:
            starts.append(start)
        now = start
    assert starts == sorted(starts)
    burst = max(1.0, 0.1 * per_second)
    for number, start in enumerate(starts):
        assert number + 1 <= burst + (start - 50.0) * per_second + 1e-6


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (Window(4.0, 64.0, 128), 5.0),  # below the threshold: one more for each success
        (Window(64.0, 64.0, 128), 64.0 + 1 / 64),  # above: one more for a windowful
        (Window(127.999, 64.0, 128), 128.0),
        (Window(128.0, 64.0, 128), 128.0),
        (Window(1024.0, 0.0, 16), 1024.0),  # requests that other processes may have in flight are not taken from them
        (Window(16.5, 20.0, 16), 16.5),
    ],
)
def test_window_after_a_success_grows(window: Window, expected: float) -> None:
    assert after_success(window).size == pytest.approx(expected)


@pytest.mark.parametrize(
    ("window", "size", "threshold"),
    [
        (Window(1024.0, 0.0, 128), FEW_REQUESTS, 64.0),
        (Window(40.0, 64.0, 128), FEW_REQUESTS, 20.0),
        (Window(4.0, 64.0, 128), 2.0, 2.0),
        (Window(2.0, 2.0, 128), 2.0, 2.0),  # one that hangs must not block all
        (Window(1024.0, 0.0, 1), 1.0, 1.0),
    ],
)
def test_window_after_a_slow_down_shrinks(window: Window, size: float, threshold: float) -> None:
    after = after_busy(window)
    assert (after.size, after.threshold, after.most) == (size, threshold, window.most)


def test_window_at_its_minimum_opens_again() -> None:
    window = Window(1024.0, 0.0, 64)
    for _ in range(20):
        window = after_busy(window)
    assert window.requests == 2
    successes = 0
    while not window.is_open:
        window, successes = after_success(window), successes + 1
    assert window.requests == 64
    assert 64 <= successes < 64 * 64


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
def test_backoff_after_failures_has_full_jitter_below_a_doubling_maximum(draw: float) -> None:
    assert [backoff(failures, draw) for failures in range(1, 7)] == pytest.approx(
        [draw * ceiling for ceiling in (0.5, 1.0, 2.0, 4.0, 5.0, 5.0)]
    )
    assert backoff(10_000, draw) == pytest.approx(draw * 5.0)


@pytest.mark.parametrize(
    ("closings", "retry_after", "least", "most"),
    [
        (0, None, 0.125, 0.25),
        (3, None, 1.0, 2.0),
        (5, None, 2.0, 4.0),
        (10_000, None, 2.0, 4.0),
        (0, 7.0, 7.0, 7.7),  # never less than requested
        (4, 7.0, 7.0, 7.7),
        (0, 100.0, 100.0, 105.0),
        (0, 0.0, 0.05, 0.055),
        (0, 1e9, LONGEST_CLOSED_SECONDS, LONGEST_CLOSED_SECONDS),
        (0, math.inf, LONGEST_CLOSED_SECONDS, LONGEST_CLOSED_SECONDS),
    ],
)
def test_pause_of_a_gate_follows_closings_and_retry_after(
    closings: int, retry_after: float | None, least: float, most: float
) -> None:
    assert pause_of_gate(closings, retry_after, 0.0) == pytest.approx(least)
    assert pause_of_gate(closings, retry_after, 1.0) == pytest.approx(most)


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (OriginBusyError("slow down", retry_after=3), Verdict.WAIT_FOR_GATE),
        (OriginUnavailableError("reset"), Verdict.RETRY),
        (REFUSED, Verdict.RAISE),
        (DeniedError("403"), Verdict.RAISE),
        (ObjectNotFoundError("404"), Verdict.RAISE),
        (ObjectChangedError("412"), Verdict.RAISE),
        (ObjectExistsError("409"), Verdict.RAISE),
        (UsageError("past the end"), Verdict.RAISE),
        (ConfigurationError("option"), Verdict.RAISE),
        (OutcomeUnknownError("lost"), Verdict.RAISE),
    ],
)
def test_verdict_on_an_error_decides_about_a_retry(error: MillraceError, verdict: Verdict) -> None:
    assert verdict_on(error) is verdict
    # Failures that may have had their effect.
    assert is_unsure(error) == (verdict is Verdict.RETRY)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        (" 120 ", 120.0),
        ("0", 0.0),
        ("Tue, 15 Nov 1994 07:30:05 GMT", 5.0),
        ("Tue, 15 Nov 1994 08:30:05 +0100", 5.0),
        ("Tue, 15 Nov 1994 07:29:00 GMT", 0.0),
        (None, None),
        ("", None),
        ("soon", None),
        ("-3", None),
        ("1.5", None),
        ("٣", None),
        ("Tue, 99 Nov 1994 07:29:00 GMT", None),
        ("Tue, 15 Nov 1994 07:29:00 +999999999", None),
    ],
)
def test_retry_after_header_is_parsed(header: str | None, seconds: float | None) -> None:
    assert parse_retry_after(header, HALF_PAST_SEVEN) == seconds


@pytest.mark.parametrize(
    ("value", "per_second"),
    [(200, 200.0), ("200/s", 200.0), ("5000/5min", 5000 / 300), ("1000 / m", 1000 / 60), (0.5, 0.5), ("none", None)],
)
def test_request_rate_in_a_known_form_is_parsed(value: object, per_second: float | None) -> None:
    found = resolve_limits({"request_rate": value}, environ={"HOME": "/h"}, file={})
    assert found.requests_per_second == (None if per_second is None else pytest.approx(per_second))


@pytest.mark.parametrize("value", ["many", 0, -1, True, "5/", "/s", "nan", "inf", "5/0s", "10/parsec", [], 1e12])
def test_request_rate_in_another_form_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="request_rate"):
        resolve_limits({"request_rate": value}, environ={"HOME": "/h"}, file={})


@pytest.mark.parametrize("value", ["many", 0, -1, True, 1025, 1.5, "none", []])
def test_max_requests_with_an_invalid_number_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="max_requests"):
        resolve_limits({"max_requests": value}, environ={"HOME": "/h"}, file={})


@pytest.mark.parametrize(
    ("value", "seconds"), [(30, 30.0), ("2min", 120.0), ("1.5", 1.5), ("none", None), (None, None)]
)
def test_timeout_in_a_known_form_is_parsed(value: object, seconds: float | None) -> None:
    assert resolve_limits({"timeout": value}, environ={"HOME": "/h"}, file={}).timeout_seconds == seconds


@pytest.mark.parametrize("value", ["soon", 0, 0.5, -1, True, [], float("nan"), float("inf")])
def test_timeout_below_a_second_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="timeout"):
        resolve_limits({"timeout": value}, environ={"HOME": "/h"}, file={})


def test_patience_outlasts_a_server_that_refuses_connections_for_half_a_minute() -> None:
    pauses = sum(backoff(failures, 0.5) for failures in range(1, PATIENCE.tries))  # a refusal itself takes no time
    assert min(pauses, PATIENCE.seconds) >= 45.0


def test_timeout_limits_tries_and_requests_together() -> None:
    for timeout in (1.0, 30.0, 90.0, 600.0):
        assert patience_within(timeout).seconds + request_seconds(timeout) <= timeout
    assert patience_within(600.0) == patience_within(None) == PATIENCE


def test_limits_are_read_from_argument_environment_and_file() -> None:
    reported: Callable[..., int | None] = lambda given, **where: resolve_limits(given, **where).max_requests  # noqa: E731
    environ, file = {"HOME": "/h", "MILLRACE_MAX_REQUESTS": "20"}, {"max_requests": 30}
    assert reported({"max_requests": 10}, environ=environ, file=file) == 10
    assert reported({"max_requests": None}, environ=environ, file=file) == 20
    assert reported({}, environ={"HOME": "/h"}, file=file) == 30
    assert reported({}, environ={"HOME": "/h"}, file={}) is None


def test_limits_without_a_cache_directory_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda text: text)  # as for a user without a home
    assert resolve_limits({}, environ={}, file={}).directory is None
    assert str(resolve_limits({"cache_dir": "/disk"}, environ={}, file={}).directory) == "/disk"
