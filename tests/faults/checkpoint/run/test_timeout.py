"""The option `timeout`: how long a silent storage can block a checkpoint manager, or a file system."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import millrace
from millrace.checkpoint import CheckpointManager
from millrace.errors import MillraceError, OriginUnavailableError, OutcomeUnknownError
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

TIMEOUT = 6.0
# Without the option each of these operations takes one to three minutes. The rest is for a loaded machine.
DEADLINE = 40.0
SMALL, TWO_PARTS = 100_000, 20 << 20


@pytest.fixture
def region(s3: S3Server) -> Iterator[EmulatedRegion]:
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None) as running:
        yield running


@pytest.fixture
def url(bucket: str) -> str:
    return f"s3://{bucket}/run"


def state(seed: int, nbytes: int = SMALL) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)}


def seconds_of(action: Callable[[], object]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


def assert_fails_in_time(action: Callable[[], object]) -> MillraceError:
    began = time.monotonic()
    with pytest.raises((OriginUnavailableError, OutcomeUnknownError)) as caught:
        action()
    assert time.monotonic() - began < DEADLINE
    return caught.value


def saved(run: CheckpointManager, step: int) -> int:
    """Save while the storage answers. The short timeout of the tests may pass where the machine itself stops for so long."""
    for _ in range(20):
        with suppress(OriginUnavailableError, OutcomeUnknownError):
            return run.save(step, state(step)).step
    raise AssertionError("a storage that answers accepts no save")


def stall(region: EmulatedRegion, method: str | None = None, path: str = "*") -> None:
    """From now on requests of the method are read and never answered."""
    region.fail("stall", method=method, path=path, seconds=600.0, count=None)


@contextmanager
def silent_server() -> Iterator[int]:
    """A server that accepts connections and never answers; returns its port."""
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            while True:
                try:
                    accepted.append(listening.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(120)
    for connection in accepted:
        connection.close()


# --- a storage that stops answering ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [SMALL, TWO_PARTS], ids=["one part", "two parts"])
def test_save_with_silent_storage_fails_within_its_timeout(
    region: EmulatedRegion, options: dict[str, Any], url: str, nbytes: int
) -> None:
    run = CheckpointManager(url, target_options=options, timeout=TIMEOUT, full_every=1, independent=False)
    saved(run, 1)
    saved(run, 2)
    stall(region, "PUT", "*/data-*")
    assert_fails_in_time(lambda: run.save(3, state(3, nbytes)))
    stall(region, "PUT")
    assert_fails_in_time(lambda: run.save(4, state(4)))
    assert_fails_in_time(lambda: run.prune(1))
    assert seconds_of(run.close) < DEADLINE
    region.clear_faults()
    with CheckpointManager(url, target_options=options) as after:
        assert after.restore(state(0)) == 2
        assert after.save(5, state(5)).step == 5
        assert after.steps() == [1, 2, 5]


@pytest.mark.slow
def test_close_during_save_with_silent_storage_ends_within_its_timeout(
    region: EmulatedRegion, options: dict[str, Any], url: str
) -> None:
    run = CheckpointManager(url, target_options=options, timeout=TIMEOUT)
    saved(run, 1)
    stall(region)
    pending = run.save_async(2, state(2))
    assert_fails_in_time(run.close)
    assert pending.done()
    # The rest of `close`, after the save had used up the time, did not start a new period.
    assert region.fault_hits()[0] <= 3


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [SMALL, TWO_PARTS], ids=["one part", "two parts"])
def test_save_with_killed_server_ends_within_its_timeout(
    region: EmulatedRegion, options: dict[str, Any], url: str, nbytes: int
) -> None:
    run = CheckpointManager(url, target_options=options, timeout=TIMEOUT)
    saved(run, 1)
    stall(region, "PUT", "*/data-*")
    run.save_async(2, state(2, nbytes))
    deadline = time.monotonic() + DEADLINE
    while not region.fault_hits()[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert region.fault_hits()[0] > 0
    region.stop()
    assert_fails_in_time(run.close)


@pytest.mark.slow
def test_uploads_to_silent_storage_fail_together_within_the_timeout(
    region: EmulatedRegion, options: dict[str, Any], url: str, tmp_path: Path
) -> None:
    run = CheckpointManager(url, target_options=options, timeout=TIMEOUT, local=tmp_path)
    saved(run, 1)
    stall(region, path="*/step-*")
    first, second = run.save_async(2, state(2)), run.save_async(3, state(3))
    assert_fails_in_time(run.close)
    assert isinstance(first.exception(), OriginUnavailableError)
    assert isinstance(second.exception(), OriginUnavailableError)
    with CheckpointManager(url, target_options=options, timeout=TIMEOUT, local=tmp_path) as after:
        region.clear_faults()
        assert after.restore(loaded := state(0)) == 3
        assert torch.equal(loaded["w"], state(3)["w"])


@pytest.mark.slow
def test_recovered_storage_is_used_by_the_same_manager(
    region: EmulatedRegion, options: dict[str, Any], url: str
) -> None:
    with CheckpointManager(url, target_options=options, timeout=TIMEOUT) as run:
        saved(run, 1)
        stall(region, "PUT")
        assert_fails_in_time(lambda: run.save(2, state(2)))
        region.clear_faults()
        assert saved(run, 3) == 3
        assert run.steps() == [1, 3]


# --- other ways to give it ------------------------------------------------------------------------


@pytest.mark.slow
def test_file_system_with_timeout_fails_within_it(tmp_path: Path) -> None:
    with silent_server() as port:
        options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{port}"}
        fs = millrace.filesystem("s3", cache_dir=str(tmp_path), target_options=options, timeout=TIMEOUT)
        assert_fails_in_time(lambda: fs.pipe_file("b/k", b"x"))
        # Once, where the machine stops for longer than a try.
        errors = (assert_fails_in_time(lambda: fs.cat_file("b/k")) for _ in range(5))
        assert any("tried 2 times" in error.message for error in errors)


@pytest.mark.slow
def test_timeout_of_the_environment_applies_to_web_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_TIMEOUT", "3s")
    with silent_server() as port:
        fs = millrace.filesystem("http", cache_dir=str(tmp_path))
        assert_fails_in_time(lambda: fs.cat_file(f"http://127.0.0.1:{port}/k"))


def test_manager_with_invalid_timeout_raises(tmp_path: Path) -> None:
    for wrong in ("soon", 0, -1, 0.5, True, float("nan")):
        with pytest.raises(millrace.errors.ConfigurationError, match="timeout"):
            CheckpointManager(tmp_path / "run", timeout=wrong)
