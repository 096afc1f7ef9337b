"""Every request through the limits, before a real S3 server that is busy, gone, or loses its answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.ports import reserved_port

from millrace.errors import ObjectNotFoundError, OriginBusyError, OutcomeUnknownError
from millrace.events import Event
from millrace.origin import Origin, open_origin
from millrace.origin.limits import retrying
from millrace.origin.limits.retrying import Patience
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server


@pytest.fixture(scope="module")
def region(s3: S3Server) -> Iterator[EmulatedRegion]:
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None) as running:
        yield running


@pytest.fixture
def origin(s3: S3Server, region: EmulatedRegion, bucket: str, tmp_path: Path) -> Iterator[Origin]:
    behind = open_origin("s3", {**s3.target_options, "endpoint_url": region.endpoint_url}, {"cache_dir": str(tmp_path)})
    for name in ("a", "d/b", "d/c"):
        behind.put(f"{bucket}/{name}", name.encode())
    region.clear_faults()
    region.reset()
    yield behind
    region.clear_faults()


def _put(origin: Origin, bucket: str) -> object:
    origin.put(f"{bucket}/new", b"new")
    return bytes(origin.read(f"{bucket}/new", 0, 3))


def _delete(origin: Origin, bucket: str) -> object:
    origin.delete([f"{bucket}/a", f"{bucket}/d/b"])
    return [info.key.partition("/")[2] for page in origin.list_all(bucket) for info in page]


def _write(origin: Origin, bucket: str) -> object:
    with origin.open_writer(f"{bucket}/stream") as writer:
        writer.write(b"stre")
        writer.write(b"am")
    return bytes(origin.read(f"{bucket}/stream", 0, 6))


def _new(origin: Origin, bucket: str) -> object:
    origin.put(f"{bucket}/once", b"once", if_absent=True)
    return origin.head(f"{bucket}/once").size


REQUESTS: dict[str, tuple[Callable[[Origin, str], object], object]] = {
    "head": (lambda origin, bucket: origin.head(f"{bucket}/d/b").size, 3),
    "read": (lambda origin, bucket: bytes(origin.read(f"{bucket}/d/b", 1, 3)), b"/b"),
    "level": (lambda origin, bucket: len(origin.list_level(f"{bucket}/d").objects), 2),
    "pages": (lambda origin, bucket: [len(page) for page in origin.list_all(bucket)], [3]),
    "put": (_put, b"new"),
    "put if absent": (_new, 4),
    "delete": (_delete, ["d/c"]),
    "stream": (_write, b"stream"),
}


@pytest.mark.parametrize("name", list(REQUESTS))
def test_busy_origin_is_retried(origin: Origin, region: EmulatedRegion, bucket: str, name: str) -> None:
    request, expected = REQUESTS[name]
    region.fail("status", status=503, code="SlowDown", count=2)
    region.fail("status", status=429, count=1)
    assert request(origin, bucket) == expected
    assert region.fault_hits() == [2, 1]


@pytest.mark.parametrize("name", [name for name in REQUESTS if name != "put if absent"])
def test_request_after_a_lost_answer_is_retried(origin: Origin, region: EmulatedRegion, bucket: str, name: str) -> None:
    request, expected = REQUESTS[name]
    region.fail("reset", count=1)
    region.fail("status", status=500, count=1)
    assert request(origin, bucket) == expected
    assert region.fault_hits() == [1, 1]


def test_new_object_after_a_lost_answer_has_an_unknown_outcome(
    origin: Origin, region: EmulatedRegion, bucket: str
) -> None:
    region.fail("reset", method="PUT", count=1)
    with pytest.raises(OutcomeUnknownError, match=f"s3://{bucket}/once exists now"):
        origin.put(f"{bucket}/once", b"once", if_absent=True)
    assert bytes(origin.read(f"{bucket}/once", 0, 4)) == b"once"


def test_request_after_a_final_refusal_is_not_retried(origin: Origin, region: EmulatedRegion, bucket: str) -> None:
    with pytest.raises(ObjectNotFoundError):
        origin.head(f"{bucket}/nothing")
    assert region.stats().requests == 1


def test_retry_after_of_an_s3_server_is_kept(
    origin: Origin,
    region: EmulatedRegion,
    bucket: str,
    events: list[Event],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """obstore does not return the header. A request of Millrace does, and its signed URL appears nowhere."""
    caplog.set_level(logging.DEBUG)
    region.fail("status", status=503, code="SlowDown", count=2, retry_after=2)
    before = time.monotonic()
    assert bytes(origin.read(f"{bucket}/a", 0, 1)) == b"a"
    assert time.monotonic() - before >= 2.0
    assert region.fault_hits() == [2]  # the read and the question; the next read went through
    assert [event.detail for event in events if "requested 2 s" in event.detail]
    reported = " ".join([caplog.text, *(f"{event.subject} {event.detail}" for event in events)])
    assert "X-Amz" not in reported
    assert "Signature" not in reported


def test_retry_after_beyond_the_patience_fails_at_once(
    origin: Origin, region: EmulatedRegion, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "PATIENCE", Patience(seconds=60.0))
    region.fail("status", status=503, count=None, retry_after=600)
    before = time.monotonic()
    with pytest.raises(OriginBusyError, match=f"s3://{bucket}/a: the origin requests a lower rate") as caught:
        origin.read(f"{bucket}/a", 0, 1)
    assert caught.value.retry_after is not None
    assert 500 < caught.value.retry_after <= 605
    assert time.monotonic() - before < 60.0  # which is as long as it would have been tried
    asked = sum(region.fault_hits())
    with pytest.raises(OriginBusyError):
        origin.head(f"{bucket}/d/b")
    assert sum(region.fault_hits()) == asked  # the gate is closed: nothing was sent


@pytest.mark.slow
def test_server_that_restarts_is_waited_for(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    open_origin("s3", s3.target_options).put(f"{bucket}/x", b"here")
    with reserved_port() as port:
        away = EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.0, port=port)
        origin = open_origin(
            "s3", {**s3.target_options, "endpoint_url": f"http://127.0.0.1:{port}"}, {"cache_dir": str(tmp_path)}
        )
        back = threading.Timer(3.0, away.start)
        back.start()
        try:
            assert bytes(origin.read(f"{bucket}/x", 0, 4)) == b"here"
        finally:
            back.join()
            away.stop()
