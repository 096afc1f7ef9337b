"""The same training without Ray: processes of this machine, each with a `DataLoader` over the same file system.

It is what a benchmark holds Ray against. What Ray does beside (restarts, other nodes, a number of workers that changes) is
left out: a worker that fails ends the run.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import pyarrow.fs

from millrace.demo import interrupts
from millrace.demo.place import Place
from millrace.demo.speech.batches import ClipBatch, batch_of
from millrace.demo.speech.data import SplitSource, table_of
from millrace.demo.speech.families.choosing import family_of
from millrace.demo.speech.families.protocol import Family
from millrace.demo.speech.job import Counters, SpeechJob, be_quiet
from millrace.demo.speech.run import (
    Follower,
    Progress,
    SpeechResult,
    counters_of,
    result_of,
    splits_of,
    training_error,
)
from millrace.demo.speech.settings import SpeechSettings
from millrace.errors import MillraceError

_POLL_SECONDS = 0.5


def run_plain(
    settings: SpeechSettings,
    fs: pyarrow.fs.FileSystem,
    *,
    run_fs: pyarrow.fs.FileSystem | None = None,
    counters: Counters | None = None,
    checkpoint_options: dict[str, Any] | None = None,
    progress: Progress = print,
) -> SpeechResult:
    """`run_speech` without Ray: `settings.num_workers` processes of this machine, and one more for each that reads for it.

    `kill_in_epoch`, `min_workers` and `max_failures` mean nothing here. The processes are spawned, so a script that calls
    this needs its `if __name__ == "__main__"`. Raises `MillraceError` when the training fails.
    """
    settings = replace(settings, kill_in_epoch=None)
    run = Place(fs=run_fs or fs, url=settings.run_url)
    family = family_of(settings)
    splits = splits_of(settings, Place(fs=fs, url=settings.data_url), family)
    job = SpeechJob(
        settings=settings,
        run=run,
        train_rows=len(splits["train"].clips),
        counters=counters or counters_of(fs),
        checkpoint_options=checkpoint_options,
    )
    follower = Follower(run, progress)
    with tempfile.TemporaryDirectory(prefix="millrace-plain-") as folder:
        _Processes(job, family, splits, f"file://{folder}/meeting").wait(follower)
    follower.look()
    return result_of(settings, run)


class _Processes:
    """The workers, each with a pipe on which it tells what it failed of."""

    def __init__(self, job: SpeechJob, family: Family, splits: dict[str, SplitSource], meeting: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._run_url = job.settings.run_url
        self._processes, self._ears = [], []
        for rank in range(job.settings.num_workers):
            ear, mouth = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(job, family, splits, rank, meeting, mouth), daemon=False)
            process.start()
            mouth.close()
            self._processes.append(process)
            self._ears.append(ear)

    def wait(self, follower: Follower) -> None:
        """Until all have ended. Raises what the first that failed told, and ends the others, as when this is interrupted."""
        try:
            while running := [process for process in self._processes if process.is_alive()]:
                wait([process.sentinel for process in running], timeout=_POLL_SECONDS)
                follower.look()
                interrupts.check()
                if any(process.exitcode for process in self._processes):
                    break
            failed = [rank for rank, process in enumerate(self._processes) if process.exitcode not in (0, None)]
            if failed:
                raise self._error(failed)
        finally:
            for process in self._processes:
                process.kill()
                process.join()

    def _error(self, failed: list[int]) -> MillraceError:
        # Who lost a colleague fails, too, and says so; the one with a reason of its own is more telling.
        told = {rank: self._told_by(rank) for rank in failed}
        for error in told.values():
            if isinstance(error, MillraceError):
                return error
        # Who was killed tells nothing, and is what the others failed of.
        silent = next((rank for rank, error in told.items() if error is None), None)
        if silent is None:
            return training_error(self._run_url, next(error for error in told.values() if error is not None))
        return MillraceError(
            f"worker {silent} of the training of {self._run_url} {_ending(self._processes[silent].exitcode)}",
            next_step="see what ended it, such as a lack of memory, and start again: the newest checkpoint is gone on from",
        )

    def _told_by(self, rank: int) -> BaseException | None:
        """What a worker that has ended told; None where it had no time to."""
        ear = self._ears[rank]
        try:
            told: BaseException | None = ear.recv() if ear.poll() else None
        except (EOFError, OSError):
            return None
        return told


def _ending(code: int | None) -> str:
    """How a process ended, by its exit code as multiprocessing has it."""
    if code is None or code >= 0:
        return f"ended with exit code {code} and without a word"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _work(
    job: SpeechJob, family: Family, splits: dict[str, SplitSource], rank: int, meeting: str, mouth: Connection
) -> None:
    """One worker's process."""
    _end_with_parent()
    try:
        _train(job, family, splits, rank, meeting)
    except Exception as error:  # noqa: BLE001 - the process that started this one raises it
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - whatever its class does
            error = RuntimeError(f"{type(error).__name__}: {error}")
        mouth.send(error)
        mouth.close()
        # Not `sys.exit`: other threads may wait for a worker that is gone.
        os._exit(1)


def _train(job: SpeechJob, family: Family, splits: dict[str, SplitSource], rank: int, meeting: str) -> None:
    be_quiet()
    import torch
    import torch.distributed as dist

    from millrace.demo.speech.training import Training

    settings, world = job.settings, job.settings.num_workers
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(settings.threads_per_worker)
    device = torch.device("cpu")
    if settings.use_gpu:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if world > 1:
        backend = "nccl" if settings.use_gpu else "gloo"
        dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world)
    feed = LoaderFeed(family, splits, rank=rank, world=world)
    Training(job, family, feed, device=device, node="this machine").run()
    if world > 1:
        dist.destroy_process_group()


def _end_with_parent() -> None:
    """End this process when the one that started it is killed."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


class LoaderFeed:
    """A worker's batches through torch's `DataLoader`, with one process that reads and decodes ahead."""

    def __init__(self, family: Family, splits: dict[str, SplitSource], *, rank: int, world: int) -> None:
        from torch.utils.data import DataLoader

        self._passes = {split: _Order(source, rank=rank, world=world) for split, source in splits.items()}
        self._loaders: dict[str, Any] = {
            split: DataLoader(
                _Rows(source),
                batch_sampler=self._passes[split],
                collate_fn=_Collate(family),
                num_workers=1,
                prefetch_factor=4,
                multiprocessing_context="spawn",
                persistent_workers=split != "test",
            )
            for split, source in splits.items()
        }

    def batches(self, split: str, *, epoch: int, size: int) -> Iterator[ClipBatch]:
        """This worker's share of a split."""
        self._passes[split].begin(epoch=epoch, size=size)
        return (batch for batch in self._loaders[split] if batch is not None)


class _Rows:
    """The clips of a split as rows, for the loader's process."""

    def __init__(self, source: SplitSource) -> None:
        self._source = source

    def __getitem__(self, place: int) -> dict[str, Any] | None:
        clip = self._source.clips[place]
        return self._source.row(clip, self._source.read(clip))


class _Order:
    """Which clips make the batches of a worker in one pass: every `world`-th of an order that all workers know."""

    def __init__(self, source: SplitSource, *, rank: int, world: int) -> None:
        self._count, self._seed = len(source.clips), source.shuffle_seed
        self._rank, self._world = rank, world
        self._epoch, self._size = 0, 1

    def begin(self, *, epoch: int, size: int) -> None:
        self._epoch, self._size = epoch, size

    def __iter__(self) -> Iterator[list[int]]:
        order = np.arange(self._count)
        if self._seed is not None:
            np.random.default_rng((self._seed, self._epoch)).shuffle(order)
        own = order[self._rank :: self._world].tolist()
        for start in range(0, len(own), self._size):
            yield own[start : start + self._size]


@dataclass(frozen=True)
class _Collate:
    family: Family

    def __call__(self, rows: list[dict[str, Any] | None]) -> ClipBatch | None:
        table = table_of(rows)
        return batch_of(table, self.family) if table.num_rows else None
