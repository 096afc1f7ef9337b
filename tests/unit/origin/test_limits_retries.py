"""Requests through the limits, over an origin in memory that fails as real ones do: retries and their errors."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tests.support.clocks import TimeWithoutWaits
from tests.support.origins import MemoryOrigin

from millrace.errors import (
    DeniedError,
    MillraceError,
    ObjectExistsError,
    ObjectNotFoundError,
    OriginBusyError,
    OriginUnavailableError,
    OutcomeUnknownError,
)
from millrace.events import Event
from millrace.origin import ObjectInfo
from millrace.origin.base import LimitedOrigin, Limits
from millrace.origin.fsspec_origin import FsspecOrigin
from millrace.origin.limits import retrying, slots
from millrace.origin.limits.retrying import Patience


class Failing:
    """Raises the errors that are left, one a call."""

    def __init__(self, *errors: MillraceError) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self, *_: object) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)


def reset() -> OriginUnavailableError:
    return OriginUnavailableError("memory://k: connection reset", next_step="check the network")


def slow_down(retry_after: float | None = None) -> OriginBusyError:
    return OriginBusyError("memory://k: slow down", next_step="wait", retry_after=retry_after)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jitter is always small, so that the pauses are short."""
    monkeypatch.setattr("millrace.origin.limits.slots.JITTER.random", lambda: 0.01)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> TimeWithoutWaits:
    """The limits' own time: pauses and patience do not depend on the speed of the machine."""
    clock = TimeWithoutWaits()
    for module in (retrying, slots):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def inner() -> MemoryOrigin:
    origin = MemoryOrigin(identity="failing")
    origin.put("b/k", b"0123456789")
    origin.requests.clear()
    return origin


@pytest.fixture
def origin(inner: MemoryOrigin, tmp_path: Path) -> LimitedOrigin:
    return LimitedOrigin(inner, Limits.of("s3", {"cache_dir": str(tmp_path), "max_requests": 4}))


def test_read_after_temporary_errors_is_retried(
    inner: MemoryOrigin, origin: LimitedOrigin, events: list[Event]
) -> None:
    failing = inner.before_read = Failing(reset(), slow_down(0.01), reset())
    assert bytes(origin.read("b/k", 2, 5)) == b"234"
    assert failing.calls == 4
    reported = [event.name for event in events]
    assert reported.count("origin.request.failed") == 3
    assert reported.count("origin.gate.closed") == reported.count("origin.gate.opened") == 1


@pytest.mark.parametrize("error", [DeniedError("no"), ObjectNotFoundError("gone")])
def test_read_after_a_permanent_error_is_not_retried(
    inner: MemoryOrigin, origin: LimitedOrigin, error: MillraceError
) -> None:
    failing = inner.before_read = Failing(error)
    with pytest.raises(type(error)) as caught:
        origin.read("b/k", 0, 1)
    assert caught.value is error
    assert failing.calls == 1


def test_read_after_a_final_refusal_is_not_retried(inner: MemoryOrigin, origin: LimitedOrigin) -> None:
    error = reset()
    error.is_final = True
    failing = inner.before_read = Failing(error)
    with pytest.raises(OriginUnavailableError):
        origin.read("b/k", 0, 1)
    assert failing.calls == 1


def test_error_after_the_last_try_has_the_number_of_tries(
    inner: MemoryOrigin, origin: LimitedOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "PATIENCE", Patience(tries=3))
    failing = inner.before_read = Failing(*[reset() for _ in range(9)])
    with pytest.raises(OriginUnavailableError, match=r"connection reset \(tried 3 times in .* s\)") as caught:
        origin.read("b/k", 0, 1)
    assert failing.calls == 3
    assert caught.value.next_step == "check the network"
    assert isinstance(caught.value.__cause__, OriginUnavailableError)


@pytest.mark.parametrize("retry_after", [None, 0.02])
def test_read_from_a_busy_origin_fails_after_the_patience(
    inner: MemoryOrigin,
    origin: LimitedOrigin,
    clock: TimeWithoutWaits,
    monkeypatch: pytest.MonkeyPatch,
    retry_after: float | None,
) -> None:
    monkeypatch.setattr(retrying, "PATIENCE", Patience(seconds=0.5, tries=1))
    began = clock.now
    failing = inner.before_read = Failing(*[slow_down(retry_after) for _ in range(99)])
    with pytest.raises(OriginBusyError, match=r"tried \d+ times"):
        origin.read("b/k", 0, 1)
    assert failing.calls > 1  # tries count failures, not delays
    assert 0 < clock.now - began < 1


def test_pause_beyond_the_patience_fails_at_once(
    inner: MemoryOrigin, origin: LimitedOrigin, clock: TimeWithoutWaits
) -> None:
    failing = inner.before_read = Failing(slow_down(300.0))
    began = clock.now
    with pytest.raises(OriginBusyError, match=r"pause of 300 s more") as caught:
        origin.read("b/k", 0, 1)
    assert caught.value.retry_after == pytest.approx(300.05)
    with pytest.raises(OriginBusyError, match=r"s3://b/other: .* pause of"):
        origin.head("b/other")  # nor does anything else reach it meanwhile
    assert (failing.calls, inner.count("head")) == (1, 0)
    assert clock.now == began


def test_slot_after_any_outcome_is_released(inner: MemoryOrigin, origin: LimitedOrigin) -> None:
    for _ in range(3):
        inner.before_read = Failing(DeniedError("no"))
        with pytest.raises(DeniedError):
            origin.read("b/k", 0, 1)

        def fault(*_: object) -> None:
            raise KeyboardInterrupt

        inner.before_read = fault
        with pytest.raises(KeyboardInterrupt):
            origin.read("b/k", 0, 1)
        inner.before_read = Failing(reset(), slow_down(0.01))
        origin.read("b/k", 0, 1)
    assert not origin.limiter_of("b/k")._held


# --- writes -------------------------------------------------------------------------------------------


class LosesAnswers(MemoryOrigin):
    """Executes a PUT (or calls `instead`), and then fails, as if the connection broke."""

    lost: list[MillraceError]
    instead: bytes | None = None

    def put(self, key: str, data: object, *, if_absent: bool = False) -> None:
        if self.lost:
            if not isinstance(self.lost[0], OriginBusyError):
                super().put(key, self.instead if self.instead is not None else data, if_absent=if_absent)  # type: ignore[arg-type]
            raise self.lost.pop(0)
        super().put(key, data, if_absent=if_absent)  # type: ignore[arg-type]


@pytest.fixture
def losing(tmp_path: Path) -> tuple[LosesAnswers, LimitedOrigin]:
    inner = LosesAnswers(identity="losing")
    inner.lost = []
    return inner, LimitedOrigin(inner, Limits.of("s3", {"cache_dir": str(tmp_path)}))


def test_put_after_lost_answers_is_retried(losing: tuple[LosesAnswers, LimitedOrigin]) -> None:
    inner, origin = losing
    inner.lost = [reset(), slow_down(0.01)]
    origin.put("b/k", b"new")
    assert bytes(origin.read("b/k", 0, 3)) == b"new"


@pytest.mark.parametrize("instead", [None, b"another's"])
def test_put_if_absent_after_a_lost_answer_has_an_unknown_outcome(
    losing: tuple[LosesAnswers, LimitedOrigin], instead: bytes | None
) -> None:
    """The first try was not acknowledged, and no response shows whether it created the object."""
    inner, origin = losing
    inner.lost, inner.instead = [reset()], instead
    with pytest.raises(OutcomeUnknownError):
        origin.put("b/k", b"mine", if_absent=True)
    inner.lost = []
    with pytest.raises(ObjectExistsError):
        origin.put("b/k", b"mine", if_absent=True)


def test_put_if_absent_after_a_slow_down_creates_the_object_once(losing: tuple[LosesAnswers, LimitedOrigin]) -> None:
    inner, origin = losing
    inner.lost = [slow_down(0.01), slow_down(0.01)]
    origin.put("b/k", b"mine", if_absent=True)
    inner.lost = [slow_down(0.01)]
    with pytest.raises(ObjectExistsError):
        origin.put("b/k", b"mine", if_absent=True)


# --- listings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_listing_after_a_failed_page_continues_behind_the_last_page(tmp_path: Path, fails_at: int) -> None:
    inner = MemoryOrigin(identity="listed")
    for number in range(2500):
        inner.put(f"b/d/{number:05}", b"x")
    inner.requests.clear()
    origin = LimitedOrigin(inner, Limits.of("s3", {"cache_dir": str(tmp_path)}))
    pages: list[tuple[str, str]] = []

    def before_list(prefix: str, after: str) -> None:
        pages.append((prefix, after))
        if len(pages) == fails_at + 1:
            raise reset()

    inner.before_list = before_list
    found = [info.key for page in origin.list_all("b/d") for info in page]
    assert found == [f"b/d/{number:05}" for number in range(2500)]
    assert len(pages) == 4
    assert pages[fails_at] == pages[fails_at + 1]


def test_listing_that_is_not_consumed_holds_no_slot(tmp_path: Path) -> None:
    inner = MemoryOrigin(identity="slowly listed")
    for number in range(2500):
        inner.put(f"b/d/{number:05}", b"x")
    origin = LimitedOrigin(inner, Limits.of("s3", {"cache_dir": str(tmp_path), "max_requests": 1}))
    pages = origin.list_pages("b/d")
    first = next(pages)
    assert isinstance(origin.head(first.objects[0].key), ObjectInfo)  # with the only slot
    assert sum(len(page.objects) for page in pages) == 1500


def test_reads_of_many_threads_during_slow_downs_all_succeed(inner: MemoryOrigin, origin: LimitedOrigin) -> None:
    lock, at_once, most, refused = threading.Lock(), 0, 0, 0

    def before_read(*_: object) -> None:
        nonlocal at_once, most, refused
        with lock:
            at_once += 1
            most = max(most, at_once)
            storm = refused < 12
            refused += storm
        time.sleep(0.001)
        with lock:
            at_once -= 1
        if storm:
            raise slow_down(0.005)

    inner.before_read = before_read
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(bytes(origin.read("b/k", 0, 10))), daemon=True)
        for _ in range(32)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert results == [b"0123456789"] * 32
    assert most <= 4


def test_stream_of_one_part_takes_one_slot_and_is_retried(tmp_path: Path) -> None:
    class LosesConnections(MemoryFileSystem):  # type: ignore[misc]
        """A library in memory whose first tries to write fail."""

        protocol = "loses-connections"
        store: ClassVar[dict[str, object]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]
        failures = 2

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
            held.append(len(origin.limiter_of("b/k")._held))
            if len(held) <= self.failures:
                raise ConnectionResetError("reset")
            super().pipe_file(path, value, mode, **kwargs)

    held: list[int] = []
    fsspec.register_implementation("loses-connections", LosesConnections, clobber=True)
    limits = Limits.of("loses-connections", {"cache_dir": str(tmp_path)})
    origin = LimitedOrigin(FsspecOrigin("loses-connections", None), limits)
    with origin.open_writer("b/k") as writer:
        writer.write(b"small")
    assert bytes(origin.read("b/k", 0, 5)) == b"small"
    assert held == [1, 1, 1]
