"""One call that runs it all: Ray, the data, the training with its restart, and what is left in storage."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow.fs

from millrace.demo import interrupts
from millrace.demo.disk import local_files
from millrace.demo.place import Place
from millrace.demo.speech.data import Clip, clip_dataset, read_split
from millrace.demo.speech.job import KILL_MARKER, METRICS_NAME, Counters, SpeechJob, no_counters
from millrace.demo.speech.log import EpochRecord, final_epochs, read_events
from millrace.demo.speech.ray_leftovers import cleared
from millrace.demo.speech.settings import SpeechSettings
from millrace.errors import MillraceError

_POLL_SECONDS = 1.0

# Ray's sockets lie in its folder, and the path of a socket may have 107 characters.
_SCRATCH_PREFIX = "millr-"
_LONGEST_TMPDIR = 107 - len(
    f"/{_SCRATCH_PREFIX}12345678/r/session_2026-01-02_03-04-05_678901_4194304/sockets/plasma_store"
)

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class SpeechResult:
    """What a run did. `events` is the whole training log, `metrics` what `metrics.json` has.

    `kill` tells of the process that was killed on purpose (epoch, pid, time), if one was.
    """

    settings: SpeechSettings
    epochs: list[EpochRecord]
    events: list[dict[str, Any]]
    metrics: dict[str, Any]
    restarts: int
    kill: dict[str, Any] | None = None

    @property
    def start_after_kill(self) -> dict[str, Any] | None:
        """The `start` event of the processes that took over after the kill; None without a kill."""
        if self.kill is None:
            return None
        killed = self.kill["time"]
        return next((event for event in self.events if event["event"] == "start" and event["time"] > killed), None)

    @property
    def recovery_seconds(self) -> float | None:
        """From the kill to the moment at which a new process had the last checkpoint, or knew that there is none."""
        start = self.start_after_kill
        return None if self.kill is None or start is None else float(start["time"] - self.kill["time"])

    def restart_notes(self) -> dict[int, str]:
        """What to say before an epoch that new processes began with, by epoch."""
        notes: dict[int, str] = {}
        for event in self.events:
            if event["event"] != "start" or event["attempt"] == 0:
                continue
            after = event["resumed_after"]
            how = (
                f"resumed from the checkpoint of epoch {after}"
                if after
                else "from scratch: there was no checkpoint yet"
            )
            if self.kill is not None and event is self.start_after_kill:
                note = (
                    f"worker killed on purpose in epoch {self.kill['epoch']}; {self.recovery_seconds:.0f} s later {how}"
                )
            else:
                note = f"the training was started again, {how}"
            notes[after + 1] = f"{notes[after + 1]}; then {note}" if after + 1 in notes else note
        return notes

    @property
    def dev_cer(self) -> float | None:
        """The character error rate on the dev split after the last epoch."""
        return self.epochs[-1].dev_cer


def run_speech(
    settings: SpeechSettings,
    fs: pyarrow.fs.FileSystem,
    *,
    run_fs: pyarrow.fs.FileSystem | None = None,
    counters: Counters = no_counters,
    checkpoint_options: dict[str, Any] | None = None,
    progress: Progress = print,
) -> SpeechResult:
    """Fine-tune as `settings` say, reading the data set through `fs`. Blocks until the run has ended.

    `run_fs` is for what changes while the run lasts (log, metrics, model): a file system that shows a new version at
    once; default is `fs`. The checkpoints go to `settings.run_url` by Millrace's own writer, with
    `checkpoint_options` as its `target_options`. A folder `run_url` that has checkpoints is resumed, so give every
    new run its own. Uses the Ray cluster that this process is connected to, else starts one on the loopback
    interface and stops it in the end, whatever happens. `progress` gets a line of text now and then.

    Raises `MillraceError` when the training fails for good: the one that a worker raised, else one with Ray's reason in
    its message and as its cause.
    """
    data = Place(fs=fs, url=settings.data_url)
    run = Place(fs=run_fs or fs, url=settings.run_url)
    splits = {
        "train": read_split(data, "train", limit=settings.train_clips),
        "dev": read_split(data, "dev", limit=settings.dev_clips),
        "test": read_split(data, "test", limit=settings.test_clips),
    }
    job = SpeechJob(
        settings=settings,
        run=run,
        train_rows=len(splits["train"]),
        counters=counters,
        checkpoint_options=checkpoint_options,
    )
    with local_ray(settings, progress):
        follower = _Follower(run, progress)
        _fit(job, data, splits, follower)
        follower.look()
    metrics = json.loads(run.read(METRICS_NAME))
    events = read_events(run)
    starts = sum(event["event"] == "start" for event in events)
    marker = run.read_if_there(KILL_MARKER)
    return SpeechResult(
        settings=settings,
        epochs=final_epochs(events),
        events=events,
        metrics=metrics,
        restarts=max(0, starts - 1),
        kill=None if marker is None else json.loads(marker),
    )


_WORKER_ENVIRONMENT = {
    # Gloo would look for the address of the host's name, which need not be reachable from the host itself.
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def _ray_environment() -> dict[str, str]:
    """What a cluster of this process alone needs to stay private and quiet."""
    return {
        # Any user of the machine could connect otherwise, and run code as this one.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # On Linux, Ray makes a loopback address into that of the network card, unless told that there is no cluster.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # The run kills a process on purpose and says so itself.
        "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
    }


@contextmanager
def local_ray(settings: SpeechSettings, progress: Progress) -> Iterator[None]:
    """A Ray cluster of this process alone, on loopback, quiet, and gone afterwards; or the one that is connected."""
    # Ray reads these once, when it is imported. Who imported it before has decided already.
    if "ray" not in sys.modules:
        os.environ.update(_ray_environment())
    import ray

    if ray.is_initialized():
        yield
        return
    progress("starting Ray on this machine")
    # Ray's own folder goes with the run. Ray lets everyone write into it, so it lies in one that is ours alone.
    with local_files("the temporary directory", next_step="set TMPDIR to a directory that can be written"):
        parent = tempfile.gettempdir() if len(tempfile.gettempdir()) <= _LONGEST_TMPDIR else "/tmp"
        scratch = tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=parent)
    with cleared(scratch):
        try:
            with interrupts.held_back():
                ray.init(
                    address="local",
                    # One slot beside the training workers, or Ray Data would wait for a slot that never comes free.
                    num_cpus=max(os.cpu_count() or 1, settings.num_workers + 1),
                    object_store_memory=256 * 2**20,
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                    # Torch would leave a folder of its own among the temporary ones.
                    runtime_env={"env_vars": {**_WORKER_ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/torch"}},
                    _node_ip_address="127.0.0.1",
                    _temp_dir=f"{scratch}/r",
                )
            yield
        finally:
            with interrupts.held_back():
                ray.shutdown()
                # A process of Ray's may write its last line of log meanwhile, which would make this fail.
                shutil.rmtree(scratch, ignore_errors=True)


def _fit(job: SpeechJob, data: Place, splits: dict[str, list[Clip]], follower: _Follower) -> None:
    """Run Ray Train to its end in a thread of its own, while this one follows the log and hears Ctrl-C."""
    failure: list[BaseException] = []

    def fit() -> None:
        try:
            _trainer(job, data, splits).fit()
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            failure.append(error)

    # Ray Train would take over Ctrl-C in the main thread. In this one it does not, and the daemon flag lets the
    # process end although the thread still waits for a cluster that is being shut down.
    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        follower.look()
        interrupts.check()
    if failure:
        raise training_error(job.settings.run_url, failure[0]) from failure[0]


def training_error(run_url: str, failure: BaseException) -> MillraceError:
    """What to raise for `failure`, which may be wrapped by Ray: the Millrace error in it, else one that names it."""
    innermost = failure
    chain = _causes(failure)
    for innermost in chain:
        if isinstance(innermost, MillraceError):
            return innermost
    text = str(innermost).strip()
    # Ray's own errors bring a traceback as text, whose last line says what it was.
    line = text.splitlines()[-1 if "Traceback (most recent call last)" in text else 0].strip() if text else ""
    line, name = line.rstrip("."), type(innermost).__name__
    return MillraceError(
        f"the training of {run_url} failed: {line if line.startswith(name) else f'{name}: {line}'}",
        next_step="MILLRACE_DEBUG=1 shows all of it",
    )


def _causes(failure: BaseException) -> list[BaseException]:
    """`failure` and what it wraps, the innermost last."""
    chain: list[BaseException] = []
    following: Any = failure
    while isinstance(following, BaseException) and following not in chain:
        chain.append(following)
        # Ray Train keeps the workers' errors by rank, Ray's tasks keep theirs as `cause`.
        workers = list((getattr(following, "worker_failures", None) or {}).values())
        following = next(iter(workers), None) or getattr(following, "cause", None) or following.__cause__
    return chain


def _trainer(job: SpeechJob, data: Place, splits: dict[str, list[Clip]]) -> Any:
    """The Ray Train trainer of a job."""
    import ray.data
    from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from millrace.demo.speech.model import features_for
    from millrace.demo.speech.train import train_loop

    settings = job.settings
    ray.data.DataContext.get_current().enable_progress_bars = False
    heard = {clip.speaker for clip in splits["train"]}
    features = features_for(settings)
    datasets = {
        split: clip_dataset(
            data,
            clips,
            heard=heard,
            max_seconds=settings.max_seconds,
            shuffle_seed=settings.seed if split == "train" else None,
            features=features,
        )
        for split, clips in splits.items()
    }
    return TorchTrainer(
        train_loop,
        train_loop_config={"job": job},
        datasets=datasets,
        # Only the training split is shared out; the first worker evaluates on its own.
        dataset_config=DataConfig(datasets_to_split=["train"]),
        scaling_config=ScalingConfig(num_workers=settings.num_workers, use_gpu=settings.use_gpu),
        run_config=RunConfig(
            name=f"ray-{uuid.uuid4().hex[:8]}",
            storage_path=job.run.at(".ray").path,
            storage_filesystem=job.run.fs,
            failure_config=FailureConfig(max_failures=settings.max_failures),
        ),
    )


class _Follower:
    """Tells what is new in a run's log. The log in storage is all it knows, so it works from any machine."""

    def __init__(self, run: Place, progress: Progress) -> None:
        self._run = run
        self._progress = progress
        self._told = len(read_events(run))
        self._killed = run.read_if_there(KILL_MARKER) is not None

    def look(self) -> None:
        """Pass on a line for everything that happened since the last look, in order."""
        events = read_events(self._run)
        news = events[self._told :]
        self._told = len(events)
        if not self._killed and (marker := self._run.read_if_there(KILL_MARKER)) is not None:
            self._killed = True
            news.append({"event": "kill", **json.loads(marker)})
        for event in sorted(news, key=lambda event: float(event["time"])):
            if (line := describe(event)) is not None:
                self._progress(line)


def describe(event: dict[str, Any]) -> str | None:
    """One line of text for an event of the training log, or None where there is nothing to tell."""
    if event["event"] == "start":
        if event["resumed_after"]:
            return f"         resumed from the checkpoint of epoch {event['resumed_after']}"
        if event.get("attempt", 0):
            return "         began again from scratch: there was no checkpoint yet"
        return f"training {event['parameters'] / 1e6:.2f} M parameters on {event['workers']} worker(s)"
    if event["event"] == "kill":
        return f"         killed training process {event['pid']} on purpose in epoch {event['epoch']}"
    if event["event"] == "epoch":
        record = EpochRecord.of(event)
        cer = "   -  " if record.dev_cer is None else f"{record.dev_cer:6.1%}"
        return (
            f"epoch {record.epoch:3d}  loss {record.train_loss:6.3f}  dev CER {cer}  {record.seconds:5.1f} s  "
            f"{record.origin_bytes / 1e6:6.2f} MB from origin  {record.cache_bytes / 1e6:6.2f} MB from cache"
        )
    return None
