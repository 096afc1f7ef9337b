"""Requests through the limits, over an origin in memory that fails as real ones do: what is tried again, what is said."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from millrace.errors import (
    DeniedError,
    MillraceError,
    ObjectExistsError,
    ObjectNotFoundError,
    OriginBusyError,
    OriginUnavailableError,
    OutcomeUnknownError,
)
from millrace.events import Event, add_hook
from millrace.origin import ObjectInfo
from millrace.origin.fsspec_origin import FsspecOrigin
from millrace.origin.limits import LimitedOrigin, Limits, Patience, patience
from millrace.testing.origins import MemoryOrigin


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
    """Chance is always small: the pauses are what they are in their shortest."""
    monkeypatch.setattr("millrace.origin.limits.chance.CHANCE.random", lambda: 0.01)


@pytest.fixture
def inner() -> MemoryOrigin:
    origin = MemoryOrigin(identity="failing")
    origin.put("b/k", b"0123456789")
    origin.requests.clear()
    return origin


@pytest.fixture
def origin(inner: MemoryOrigin, tmp_path: Path) -> LimitedOrigin:
    return LimitedOrigin(inner, Limits.of("s3", {"cache_dir": str(tmp_path), "max_requests": 4}))


@pytest.fixture
def events() -> Iterator[list[Event]]:
    seen: list[Event] = []
    remove = add_hook(seen.append)
    yield seen
    remove()


def test_a_read_that_fails_is_tried_again(inner: MemoryOrigin, origin: LimitedOrigin, events: list[Event]) -> None:
    failing = inner.before_read = Failing(reset(), slow_down(0.01), reset())
    assert bytes(origin.read("b/k", 2, 5)) == b"234"
    assert failing.calls == 4
    told = [event.name for event in events]
    assert told.count("origin.request.failed") == 3
    assert told.count("origin.gate.closed") == told.count("origin.gate.opened") == 1


@pytest.mark.parametrize("error", [DeniedError("no"), ObjectNotFoundError("gone")])
def test_what_cannot_help_is_not_tried_again(inner: MemoryOrigin, origin: LimitedOrigin, error: MillraceError) -> None:
    failing = inner.before_read = Failing(error)
    with pytest.raises(type(error)) as caught:
        origin.read("b/k", 0, 1)
    assert caught.value is error
    assert failing.calls == 1


def test_a_refusal_for_good_is_not_tried_again(inner: MemoryOrigin, origin: LimitedOrigin) -> None:
    error = reset()
    error.is_final = True
    failing = inner.before_read = Failing(error)
    with pytest.raises(OriginUnavailableError):
        origin.read("b/k", 0, 1)
    assert failing.calls == 1


def test_the_error_says_how_often_it_was_tried(
    inner: MemoryOrigin, origin: LimitedOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PATIENCE", Patience(tries=3))
    failing = inner.before_read = Failing(*[reset() for _ in range(9)])
    with pytest.raises(OriginUnavailableError, match=r"connection reset \(tried 3 times in .* s\)") as caught:
        origin.read("b/k", 0, 1)
    assert failing.calls == 3
    assert caught.value.next_step == "check the network"
    assert isinstance(caught.value.__cause__, OriginUnavailableError)


@pytest.mark.parametrize("retry_after", [None, 0.02])
def test_an_origin_that_stays_busy_is_given_up_after_a_time(
    inner: MemoryOrigin, origin: LimitedOrigin, monkeypatch: pytest.MonkeyPatch, retry_after: float | None
) -> None:
    monkeypatch.setattr(patience, "PATIENCE", Patience(seconds=0.5, tries=1))
    failing = inner.before_read = Failing(*[slow_down(retry_after) for _ in range(99)])
    with pytest.raises(OriginBusyError, match=r"tried \d+ times"):
        origin.read("b/k", 0, 1)
    assert failing.calls > 1  # tries are counted of what fails, not of what is put off


def test_a_pause_longer_than_the_patience_is_an_error_at_once(inner: MemoryOrigin, origin: LimitedOrigin) -> None:
    failing = inner.before_read = Failing(slow_down(300.0))
    before = time.monotonic()
    with pytest.raises(OriginBusyError, match=r"pause of 3.. s more") as caught:
        origin.read("b/k", 0, 1)
    assert caught.value.retry_after is not None
    assert 290 < caught.value.retry_after < 310
    with pytest.raises(OriginBusyError, match=r"s3://b/other: .* pause of"):
        origin.head("b/other")  # nor does anything else reach it meanwhile
    assert (failing.calls, inner.count("head")) == (1, 0)
    assert time.monotonic() - before < 60  # less than the patience, which nobody waited for


def test_no_turn_is_lost_by_any_end(inner: MemoryOrigin, origin: LimitedOrigin) -> None:
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
    assert not origin.budget_of("b/k")._held


# --- writes -------------------------------------------------------------------------------------------


class LosesAnswers(MemoryOrigin):
    """Does what a PUT asks for (or has it done by `instead`), and then fails, as when the connection breaks."""

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


def test_a_put_is_repeated(losing: tuple[LosesAnswers, LimitedOrigin]) -> None:
    inner, origin = losing
    inner.lost = [reset(), slow_down(0.01)]
    origin.put("b/k", b"new")
    assert bytes(origin.read("b/k", 0, 3)) == b"new"


@pytest.mark.parametrize("instead", [None, b"another's"])
def test_nobody_claims_an_object_that_may_be_anothers(
    losing: tuple[LosesAnswers, LimitedOrigin], instead: bytes | None
) -> None:
    """The first try was not acknowledged; whether it was that one which made the object, no answer tells."""
    inner, origin = losing
    inner.lost, inner.instead = [reset()], instead
    with pytest.raises(OutcomeUnknownError):
        origin.put("b/k", b"mine", if_absent=True)
    inner.lost = []
    with pytest.raises(ObjectExistsError):
        origin.put("b/k", b"mine", if_absent=True)


def test_a_new_object_that_was_put_off_is_made_once(losing: tuple[LosesAnswers, LimitedOrigin]) -> None:
    inner, origin = losing
    inner.lost = [slow_down(0.01), slow_down(0.01)]
    origin.put("b/k", b"mine", if_absent=True)
    inner.lost = [slow_down(0.01)]
    with pytest.raises(ObjectExistsError):
        origin.put("b/k", b"mine", if_absent=True)


# --- listings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_listing_goes_on_where_it_was(tmp_path: Path, fails_at: int) -> None:
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


def test_a_listing_that_is_not_read_on_holds_no_turn(tmp_path: Path) -> None:
    inner = MemoryOrigin(identity="slowly listed")
    for number in range(2500):
        inner.put(f"b/d/{number:05}", b"x")
    origin = LimitedOrigin(inner, Limits.of("s3", {"cache_dir": str(tmp_path), "max_requests": 1}))
    pages = origin.list_pages("b/d")
    first = next(pages)
    assert isinstance(origin.head(first.objects[0].key), ObjectInfo)  # with the only turn there is
    assert sum(len(page.objects) for page in pages) == 1500


def test_a_crowd_over_a_storm_ends_right(inner: MemoryOrigin, origin: LimitedOrigin) -> None:
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
        thread.join(60)
    assert results == [b"0123456789"] * 32
    assert most <= 4


def test_a_small_stream_is_one_request_in_a_turn_and_tried_again(tmp_path: Path) -> None:
    class LosesConnections(MemoryFileSystem):  # type: ignore[misc]
        """A library in memory whose first tries to write fail."""

        protocol = "loses-connections"
        store: ClassVar[dict[str, object]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]
        failures = 2

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
            held.append(len(origin.budget_of("b/k")._held))
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
