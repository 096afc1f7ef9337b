"""`kill -9` of a publisher and of a follower at twenty points each: every follower holds one whole version."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fork_server import ForkedProcess, torch_server

from millrace.checkpoint import WeightFollower, WeightPublisher
from millrace.testing.s3 import S3Server

POINTS = 20


def weights(version: int) -> dict[str, torch.Tensor]:
    """Weights of which every version has others in a few places of every chunk."""
    values = (torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    values.view(torch.int16)[:: 997 + version] += version + 1
    return {"large": values, "small": torch.full((300,), float(version)), "version": torch.tensor(version)}


def empty() -> dict[str, torch.Tensor]:
    return {key: torch.zeros_like(value) for key, value in weights(0).items()}


def assert_whole(mine: dict[str, torch.Tensor]) -> int:
    """The version that all tensors are of."""
    version = int(mine["version"])
    expected = weights(version)
    assert all(torch.equal(mine[key], value) for key, value in expected.items())
    return version


# --- the processes that die (this file is their program) ------------------------------------------


class Countdown:
    """Counts the steps that reach the storage, and kills this process before the chosen one."""

    def __init__(self, last: int) -> None:
        self.last, self.count = last, 0

    def step(self) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.step()
            result = call(*args, **options)
            self.step()
            return result

        return counted


def publish(url: str, options: dict, last: int) -> int:
    """Publish the next two versions."""
    from millrace.origin import object_store

    countdown = Countdown(last)
    places = {
        object_store.ObjectStoreOrigin: ("put", "delete", "open_writer"),
        object_store.ObjectUpload: ("write", "close"),
    }
    for owner, names in places.items():
        for name in names:
            setattr(owner, name, countdown.around(getattr(owner, name)))
    with WeightPublisher(url, keep=2, full_every=3, target_options=options) as publisher:
        newest = publisher.newest()
        first = 0 if newest is None else newest + 1
        for version in (first, first + 1):
            publisher.publish(version, weights(version))
    return countdown.count


def follow(url: str, options: dict, last: int) -> int:
    """Follow from the last version but one, and check each version."""
    from millrace.origin import object_store

    countdown = Countdown(last)
    origin = object_store.ObjectStoreOrigin
    origin.read_range = countdown.around(origin.read_range)  # type: ignore[method-assign]
    follower = WeightFollower(url, target_options=options)
    mine = empty()
    for _ in range(3):
        assert follower.update(mine) == assert_whole(mine)
        mine["large"][7] += 1  # an application that changes its weights
    return countdown.count


def child(program: Callable[[str, dict, int], int], url: str, options: dict, last: int) -> int:
    """Run a program in a fork of this process; returns its count of steps, or minus the signal that ended it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, str(program(url, options, last)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    _, status = os.waitpid(pid, 0)
    return int(text) if text else -os.WTERMSIG(status)


def main(name: str, url: str, options: dict) -> None:
    """Forks stand for processes: importing torch takes longer than a publication. Nothing here has used a thread yet."""
    torch.set_num_threads(1)
    program = {"publish": publish, "follow": follow}[name]
    total = child(program, url, options, 0)
    print("total", total, flush=True)
    for number in range(POINTS):
        last = 1 + number * (total - 1) // (POINTS - 1)
        print("killed", last, child(program, url, options, last), flush=True)
        sys.stdin.readline()


# --- the tests ------------------------------------------------------------------------------------


def run(name: str, url: str, options: dict, after: Callable[[], None], log: Path) -> None:
    """Kill a program at points spread over all of its steps, and call `after` each time."""
    program = (
        f"import importlib.util as u; s = u.spec_from_file_location('kills', {__file__!r})\n"
        f"m = u.module_from_spec(s); s.loader.exec_module(m); m.main({name!r}, {url!r}, {options!r})"
    )
    with ForkedProcess(torch_server(), program, log=log, pipes=True) as process:
        word, total = (process.stdout.readline() or log.read_bytes()).split()
        assert word == b"total"
        assert int(total) > 1
        for _ in range(POINTS):
            word, last, ended = process.stdout.readline().split()
            assert (word, int(ended)) == (b"killed", -signal.SIGKILL), f"at {int(last)} of {int(total)}"
            after()
            process.stdin.write(b"\n")
            process.stdin.flush()
        process.output()


@pytest.mark.slow
def test_killed_publisher_leaves_its_last_complete_version_to_all_followers(
    s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    url, options = f"s3://{bucket}/policy", s3.target_options
    follower, mine = WeightFollower(url, target_options=options), empty()
    held = [-1]

    def look() -> None:
        version = follower.update(mine)
        assert assert_whole(mine) == version >= held[-1]
        fresh = empty()
        assert WeightFollower(url, target_options=options).update(fresh) == version
        assert assert_whole(fresh) == version
        held.append(version)

    run("publish", url, options, look, tmp_path / "log")
    assert len(set(held)) > POINTS / 2, "late deaths left new versions"


@pytest.mark.slow
def test_killed_follower_disturbs_neither_the_publisher_nor_the_next_follower(
    s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    url, options = f"s3://{bucket}/policy", s3.target_options
    other, mine = WeightFollower(url, target_options=options), empty()
    with WeightPublisher(url, keep=2, target_options=options) as publisher:
        publisher.publish(1, weights(1))
        publisher.publish(2, weights(2))
        version = 2

        def look() -> None:
            nonlocal version
            version += 1
            publisher.publish(version, weights(version))
            assert other.update(mine) == version
            assert assert_whole(mine) == version

        run("follow", url, options, look, tmp_path / "log")
