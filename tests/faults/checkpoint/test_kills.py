"""`kill -9` at twenty points of a save over an existing checkpoint: the new one or the old one loads whole."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.fork_server import ForkedProcess, torch_server

from millrace.checkpoint import CheckpointReader, CheckpointWriter
from millrace.checkpoint.storage.storage import open_storage
from millrace.testing.s3 import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

POINTS = 20
SMALL = 300


def large(url: str) -> int:
    """Elements for several chunks in flight when the end comes; on an object store, for a multipart upload."""
    return 6 << 20 if url.startswith("s3:") else 3 << 19


def state(url: str, step: int) -> dict:
    generator = torch.Generator().manual_seed(step)
    return {
        "large": torch.randn(large(url), generator=generator).add_(step),
        "small": torch.full((SMALL,), float(step)),
        "step": step,
    }


def save(url: str, step: int, options: dict) -> None:
    writer = CheckpointWriter(url, target_options=options, thread_count=2)
    dcp.save(state(url, step), storage_writer=writer, no_dist=True)


def assert_whole(url: str, options: dict) -> int:
    """Load it, verified by the reader and by its content; returns which save it is of."""
    loaded = {"large": torch.zeros(large(url)), "small": torch.zeros(SMALL), "step": None}
    dcp.load(loaded, storage_reader=CheckpointReader(url, target_options=options))
    expected = state(url, loaded["step"])
    assert torch.equal(loaded["large"], expected["large"])
    assert torch.equal(loaded["small"], expected["small"])
    return loaded["step"]


# --- the process that dies (this file is its own program) -----------------------------------------


class Countdown:
    """Counts the steps of a save that reach the storage, and kills this process before the chosen one."""

    def __init__(self, last: int | None) -> None:
        self.last, self.count = last, 0

    def step(self) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, call):
        def counted(*args, **options):
            self.step()
            result = call(*args, **options)
            self.step()
            return result

        return counted


def save_counting(url: str, step: int, options: dict, last: int | None) -> int:
    """Save, dying before storage step `last`; returns how many there were."""
    countdown = Countdown(last)
    from millrace.checkpoint.storage import storage
    from millrace.origin import object_store

    places = {
        os: ("replace", "fsync", "fdatasync", "unlink"),
        storage.LocalWriter: ("__init__", "write", "close"),
        object_store.ObjectStoreOrigin: ("put", "delete", "open_writer"),
        object_store.ObjectUpload: ("write", "close"),
    }
    for owner, names in places.items():
        for name in names:
            setattr(owner, name, countdown.around(getattr(owner, name)))
    save(url, step, options)
    return countdown.count


def child(url: str, step: int, options: dict, last: int | None) -> int:
    """Run `save_counting` in a fork of this process; returns the count, or minus the signal that ended it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, str(save_counting(url, step, options, last)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    _, status = os.waitpid(pid, 0)
    return int(text) if text else -os.WTERMSIG(status)


def main(url: str, options: dict, points: int) -> None:
    """Forks stand for processes: importing torch takes longer than a save. Nothing here has used a thread yet."""
    torch.set_num_threads(1)
    total = child(url, 1, options, None)
    print("total", total, flush=True)
    for number in range(points):
        # Evenly over the whole save, its very first and last step among them.
        last = 1 + number * (total - 1) // (points - 1)
        print("killed", last, child(url, number + 2, options, last), flush=True)
        sys.stdin.readline()


# --- the tests ------------------------------------------------------------------------------------


def run(url: str, options: dict, points: int, log: Path) -> list[tuple[int, int]]:
    """The step before which each save died, and which save was there after it."""
    program = (
        f"import importlib.util as u; s = u.spec_from_file_location('kills', {__file__!r})\n"
        f"m = u.module_from_spec(s); s.loader.exec_module(m); m.main({url!r}, {options!r}, {points})"
    )
    seen: list[tuple[int, int]] = []
    with ForkedProcess(torch_server(), program, log=log, pipes=True) as process:
        assert process.stdout.readline().startswith(b"total"), log.read_text()
        complete = 1
        for number in range(points):
            word, last, ended = process.stdout.readline().split()
            assert (word, int(ended)) == (b"killed", -signal.SIGKILL)
            found = assert_whole(url, options)
            assert found in (complete, number + 2)
            complete = found
            seen.append((int(last), found))
            process.stdin.write(b"\n")
            process.stdin.flush()
        process.output()
    return seen


def test_killed_saves_on_local_disk_leave_the_old_or_the_new_checkpoint(tmp_path):
    seen = run(str(tmp_path / "run"), {}, POINTS, tmp_path / "log")
    finished = {found for _, found in seen}
    # Early deaths left the first checkpoint, late ones (old files being removed) the new one.
    assert seen[0][1] == 1
    assert seen[-1][1] == POINTS + 1
    assert len(finished) > 1
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert len(left) > POINTS / 2, "deaths in the middle leave files"
    # A day later the next save removes them.
    for path in (tmp_path / "run").iterdir():
        os.utime(path, (path.stat().st_mtime - 90_000,) * 2)
    save(str(tmp_path / "run"), 99, {})
    assert len(list((tmp_path / "run").iterdir())) == 2
    assert assert_whole(str(tmp_path / "run"), {}) == 99


@pytest.mark.slow
def test_killed_saves_on_object_store_keep_the_previous_checkpoint(tmp_path):
    with S3Server(tmp_path) as server:
        server.create_bucket("runs")
        seen = run("s3://runs/killed", server.target_options, 8, tmp_path / "log")
        assert seen[0][1] == 1
        assert seen[-1][1] == 9
        names = open_storage("s3://runs/killed", server.target_options).names()
        assert len([name for name in names if name.endswith("manifest.millrace")]) == 1
