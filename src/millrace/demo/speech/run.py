"""One call that runs it all: Ray, the data, the training with its restart, and what is left in storage."""

from __future__ import annotations

import importlib.util
import json
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow.fs

from millrace.demo import interrupts
from millrace.demo.environment import defaults
from millrace.demo.place import Place
from millrace.demo.speech.data import SplitSource, read_split
from millrace.demo.speech.families.choosing import family_of
from millrace.demo.speech.families.protocol import Family
from millrace.demo.speech.job import KILL_MARKER, METRICS_NAME, Counters, SpeechJob, no_counters
from millrace.demo.speech.log import EpochRecord, final_epochs, read_events
from millrace.demo.speech.ray_cluster import ray_cluster
from millrace.demo.speech.settings import SpeechSettings
from millrace.demo.speech.shortage import shortage
from millrace.errors import ConfigurationError, MillraceError, RetryableError
from millrace.filesystem import MillraceFileSystem

REPORT_NAME = "report.html"

_POLL_SECONDS = 1.0

# A cluster may take its time to have the nodes that the workers need. Each attempt to start them waits a minute for these
# and counts as a failure of the controller; over a long run it may take any number of them, so there is no limit.
_STARTS = -1

# A resize throws the epoch under way away, so Ray Train is not to look for more room every minute, as it does by itself.
_RESIZE_SECONDS = 600.0

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
        """The character error rate on the dev split after the last epoch that the log has."""
        return self.epochs[-1].dev_cer if self.epochs else None


def run_speech(
    settings: SpeechSettings,
    fs: pyarrow.fs.FileSystem,
    *,
    run_fs: pyarrow.fs.FileSystem | None = None,
    counters: Counters | None = None,
    checkpoint_options: dict[str, Any] | None = None,
    progress: Progress = print,
    places: Mapping[str, str] | None = None,
) -> SpeechResult:
    """Fine-tune as `settings` say, reading the data set through `fs`. Blocks until the run has ended.

    `run_fs` is for what changes while the run lasts (log, metrics, model): a file system that shows a new version at
    once; default is `fs`. The checkpoints go to `settings.run_url` by Millrace's own writer, with
    `checkpoint_options` as its `target_options`. A folder `run_url` that has checkpoints is resumed, so give every
    new run its own. Uses the Ray cluster that this process is connected to, or that RAY_ADDRESS names; else starts one on
    the loopback interface and stops it in the end, whatever happens. `counters` count the data set's bytes over the whole
    cluster; by default those of `fs` are asked for. `progress` gets a line of text now and then. `places` are more lines for
    the report's table of where everything lies. A run that is complete is told of, and nothing is done again
    but the report, where it is not there.

    Raises `ConfigurationError` for a `run_url` of another model, and `MillraceError` when the training fails for good: the
    one that a worker raised, else one with Ray's reason in its message and as its cause.
    """
    data = Place(fs=fs, url=settings.data_url)
    run = Place(fs=run_fs or fs, url=settings.run_url)
    _check_model(settings, read_events(run))
    if is_complete(settings, run):
        progress(f"{settings.run_url} is complete: {settings.epochs} epoch(s); nothing is left to train")
        result = result_of(settings, run)
        if run.read_if_there(REPORT_NAME) is None:
            # Whoever ran it was killed before it could.
            write_report(result, run, progress, places=places)
        return result
    family = family_of(settings)
    splits = splits_of(settings, data, family)
    job = SpeechJob(
        settings=settings,
        run=run,
        train_rows=len(splits["train"].clips),
        counters=counters or counters_of(fs),
        checkpoint_options=checkpoint_options,
    )
    # How often Ray Train looks whether a worker is lost, which it does every two seconds by itself.
    environment = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
    if settings.min_workers is not None:
        # Ray Train counts with nodes that were lost up to 20 s ago, and would wait a minute for these.
        environment["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "20"
    with defaults(environment), ray_cluster(settings, progress):
        if (lacking := shortage(settings, _cluster_resources())) is not None:
            progress(lacking)
        follower = Follower(run, progress)
        _fit(job, family, splits, follower)
        follower.look()
    result = result_of(settings, run)
    write_report(result, run, progress, places=places)
    return result


def splits_of(settings: SpeechSettings, data: Place, family: Family) -> dict[str, SplitSource]:
    """The three splits of a data set, as far as the settings want them."""
    limits = {"train": settings.train_clips, "dev": settings.dev_clips, "test": settings.test_clips}
    clips = {split: tuple(read_split(data, split, limit=limit)) for split, limit in limits.items()}
    heard = frozenset(clip.speaker for clip in clips["train"])
    return {
        split: SplitSource(
            data=data,
            clips=clips[split],
            heard=heard,
            max_seconds=settings.max_seconds,
            family=family,
            shuffle_seed=settings.seed if split == "train" else None,
        )
        for split in limits
    }


def _cluster_resources() -> dict[str, float]:
    import ray

    resources: dict[str, float] = ray.cluster_resources()
    return resources


def _check_model(settings: SpeechSettings, events: Sequence[Mapping[str, Any]]) -> None:
    """A run goes on with the model that it began with. Asks no hub."""
    told = next((str(event["model"]) for event in events if event["event"] == "start" and event.get("model")), None)
    if told is None:
        return
    if settings.model is None:
        wanted = family_of(settings).describe()
        same = told == wanted
    else:
        wanted = settings.model
        same = told.startswith(f"{wanted} (")
    if not same:
        raise ConfigurationError(
            f"{settings.run_url} is a run of another model: {told}, not {wanted}",
            next_step="give another run, or the model that it began with",
        )


def is_complete(settings: SpeechSettings, run: Place) -> bool:
    """Whether a run has been trained for so many epochs, and its model and figures are there."""
    events = read_events(run)
    if not events or events[-1]["event"] != "end":
        return False
    # The log of an older version says it by its epochs alone. These may be lost: `end` is not.
    told = (event["epoch"] for event in events if event["event"] == "epoch")
    return bool(max(events[-1].get("epochs", 0), *told, 0) >= settings.epochs)


def counters_of(fs: pyarrow.fs.FileSystem) -> Counters:
    """What counts the bytes of a file system over a whole cluster, where it is one of Millrace's."""
    if not isinstance(fs, MillraceFileSystem):
        return no_counters
    from millrace.cluster import cluster_counters

    # An epoch may be as short as the time by which some of it would be counted late.
    return partial(cluster_counters, fs, settled=True)


def result_of(settings: SpeechSettings, run: Place) -> SpeechResult:
    """What a run that has ended left in its folder."""
    events = read_events(run)
    starts = sum(event["event"] == "start" for event in events)
    marker = run.read_if_there(KILL_MARKER)
    return SpeechResult(
        settings=settings,
        epochs=final_epochs(events),
        events=events,
        metrics=json.loads(run.read(METRICS_NAME)),
        restarts=max(0, starts - 1),
        kill=None if marker is None else json.loads(marker),
    )


def write_report(
    result: SpeechResult, run: Place, progress: Progress, *, places: Mapping[str, str] | None = None
) -> None:
    """Put the report beside the model, where it can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        progress(f"no {REPORT_NAME}: it needs matplotlib (pip install matplotlib)")
        return
    if not result.epochs:
        progress(f"no {REPORT_NAME}: the log has no epoch")
        return
    from millrace.demo.report import render_report

    run.write(REPORT_NAME, render_report(result, places=places).encode("utf-8"))


def _fit(job: SpeechJob, family: Family, splits: dict[str, SplitSource], follower: Follower) -> None:
    """Run Ray Train to its end in a thread of its own, while this one follows the log and hears Ctrl-C."""
    failure: list[BaseException] = []

    def fit() -> None:
        try:
            _trainer(job, family, splits).fit()
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
        workers = [_causes(error) for error in (getattr(following, "worker_failures", None) or {}).values()]
        if workers:
            # A worker that lost another one fails, too; the one with an error of ours knows why.
            own = (each for each in workers if any(isinstance(error, MillraceError) for error in each))
            return [*chain, *next(own, workers[0])]
        following = getattr(following, "cause", None) or following.__cause__
    return chain


def _trainer(job: SpeechJob, family: Family, splits: dict[str, SplitSource]) -> Any:
    """The Ray Train trainer of a job."""
    import ray.data
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from millrace.demo.speech.ray_data import EveryClipOnce
    from millrace.demo.speech.ray_network import NodeNetwork
    from millrace.demo.speech.ray_worker import train_loop

    settings = job.settings
    ray.data.DataContext.get_current().enable_progress_bars = False
    resources = {"CPU": settings.cpus_per_worker, **({"GPU": 1} if settings.use_gpu else {})}
    elastic = settings.min_workers is not None and settings.min_workers < settings.num_workers
    return TorchTrainer(
        train_loop,
        train_loop_config={"job": job, "family": family},
        torch_config=NodeNetwork(),
        datasets=splits,
        dataset_config=EveryClipOnce(cpus_per_worker=settings.cpus_per_worker),
        scaling_config=ScalingConfig(
            num_workers=(settings.min_workers, settings.num_workers) if elastic else settings.num_workers,
            elastic_resize_monitor_interval_s=_RESIZE_SECONDS,
            use_gpu=settings.use_gpu,
            resources_per_worker=resources,
            # Every node that reads its own part of the data for a worker of its own is a node's network less.
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(
            name=f"ray-{uuid.uuid4().hex[:8]}",
            storage_path=job.run.at(".ray").path,
            storage_filesystem=job.run.fs,
            failure_config=FailureConfig(max_failures=settings.max_failures, controller_failure_limit=_STARTS),
        ),
    )


class Follower:
    """Tells what is new in a run's log. The log in storage is all it knows, so it works from any machine."""

    def __init__(self, run: Place, progress: Progress) -> None:
        self._run = run
        self._progress = progress
        self._is_blind = False
        self._told = len(read_events(run))
        self._killed = run.read_if_there(KILL_MARKER) is not None

    def look(self) -> None:
        """Pass on a line for everything that happened since the last look, in order; while storage is away, that it is."""
        try:
            news = self._news()
        except RetryableError as error:
            if not self._is_blind:
                self._progress(f"         the log cannot be read now ({error.message}); looking again")
            self._is_blind = True
            return
        self._is_blind = False
        for event in sorted(news, key=lambda event: float(event["time"])):
            if (line := describe(event)) is not None:
                self._progress(line)

    def _news(self) -> list[dict[str, Any]]:
        events = read_events(self._run)
        news = events[self._told :]
        self._told = len(events)
        if not self._killed and (marker := self._run.read_if_there(KILL_MARKER)) is not None:
            self._killed = True
            news.append({"event": "kill", **json.loads(marker)})
        return news


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
    if event["event"] == "warning":
        return f"         {event['text']}"
    if event["event"] == "epoch":
        record = EpochRecord.of(event)
        cer = "   -  " if record.dev_cer is None else f"{record.dev_cer:6.1%}"
        peers = f"  {record.peer_bytes / 1e6:6.2f} MB from other nodes" if record.peer_bytes else ""
        return (
            f"epoch {record.epoch:3d}  loss {record.train_loss:6.3f}  dev CER {cer}  {record.seconds:5.1f} s  "
            f"{record.origin_bytes / 1e6:6.2f} MB from origin  {record.cache_bytes / 1e6:6.2f} MB from cache{peers}"
        )
    return None
