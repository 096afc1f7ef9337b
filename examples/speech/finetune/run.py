"""Starts Ray Train on a run, follows its log, and collects the result."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ray
import ray.data
import ray.train
import ray.train.torch
import ray.util
import transformers
from ray.train.torch import TorchTrainer

import millrace.errors
from millrace import MillraceFileSystem
from millrace.errors import ConfigurationError, MillraceError, RetryableError
from millrace.ray import cluster_counters

from .data import EveryClipOnce, read_splits, split_dataset, worker_batches
from .log import Result, line_of, read_events
from .models import speech_model
from .network import NodeNetwork
from .options import Settings, show
from .report import REPORT, render
from .training import Job, Training

_RESIZE_SECONDS = 600.0
"""How often a run with fewer workers than wanted looks for room: taking in a worker repeats the epoch under way."""


def fine_tune(
    settings: Settings,
    data: MillraceFileSystem,
    outputs: MillraceFileSystem,
    *,
    progress: Callable[[str], None] = show,
    places: Mapping[str, str] | None = None,
) -> Result:
    """Train with `settings` on the clips in `data`; all results go to `settings.run` in `outputs`.

    Blocks until the run is complete; a complete run is only read. Uses the Ray cluster that this process is connected to,
    the one in RAY_ADDRESS (as in a submitted job), or a new one on this machine. `outputs` must show a new version of a file
    at once (`consistency="always"`). `places` are more lines for the report. Raises the error of Millrace that stopped the
    training, otherwise the error of Ray Train.
    """
    if _is_complete(settings, outputs):
        progress(f"{settings.run} is complete: {settings.epochs} epoch(s)")
        return Result.read(settings, outputs)
    model = speech_model(settings)
    splits = read_splits(data, settings)
    if not ray.is_initialized():
        start_ray(settings)
    _check_resources(settings, progress)
    if settings.min_workers is not None:
        # Nodes that were lost a moment ago still count: how long the workers wait for a place on them.
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20")
    job = Job(
        settings=settings,
        model=model,
        outputs=outputs,
        train_rows=splits["train"].num_rows,
        # Settled: a worker process counts what it reads up to half a second late.
        counters=partial(cluster_counters, data, settled=True),
    )
    preprocessor = ray.put(model.preprocessor)
    # Called for every new group of workers: each plans its reads for the nodes that exist then.
    datasets = {
        split: partial(split_dataset, data, settings, preprocessor, table, shuffle=split == "train")
        for split, table in splits.items()
    }
    trainer = TorchTrainer(
        # Not `train_loop_config`, which Ray Train's controller loads as well, with the model's libraries.
        partial(train_loop, job),
        torch_config=NodeNetwork(),
        datasets=datasets,
        dataset_config=EveryClipOnce(),
        scaling_config=_scaling(settings),
        run_config=ray.train.RunConfig(
            name=f"ray-{uuid.uuid4().hex[:8]}",
            storage_path=f"{settings.run.removeprefix('s3://')}/.ray",
            storage_filesystem=outputs,
            # Waiting for nodes is not a failure: an autoscaler may need any number of attempts to start the workers.
            failure_config=ray.train.FailureConfig(max_failures=settings.max_failures, controller_failure_limit=-1),
        ),
    )
    progress(f"starting {settings.workers} worker{'s' * (settings.workers != 1)}")
    _fit(trainer, _Follower(settings, outputs, progress))
    result = Result.read(settings, outputs)
    if importlib.util.find_spec("matplotlib") is None:
        progress("no report: it needs matplotlib (pip install matplotlib)")
    else:
        outputs.pipe_file(f"{settings.run}/{REPORT}", render(result, places or {}).encode())
    return result


def start_ray(settings: Settings, **options: Any) -> None:
    """Connect to the cluster in RAY_ADDRESS, or start Ray on this machine, which may be too busy for the first attempt."""
    if "RAY_ADDRESS" not in os.environ:
        # At least one CPU for Ray Data next to the training workers.
        cpus = max(os.cpu_count() or 1, settings.workers * settings.cpus + 1)
        options = {"include_dashboard": False, "num_cpus": cpus, **options}
    for attempts_left in (2, 1, 0):
        try:
            ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
            return
        except Exception as error:  # Ray has no class of its own for a node that does not start in 30 seconds
            ray.shutdown()
            if not attempts_left:
                raise RetryableError(f"Ray: {error}", next_step="try again when the machine is less busy") from error


def train_loop(job: Job) -> None:
    """What Ray Train runs in every worker."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    training = Training(
        job,
        partial(worker_batches, settings=job.settings, model=job.model),
        device=ray.train.torch.get_device(),
        node=ray.util.get_node_ip_address(),
    )
    training.run()


def _scaling(settings: Settings) -> ray.train.ScalingConfig:
    elastic = settings.min_workers is not None and settings.min_workers < settings.workers
    return ray.train.ScalingConfig(
        num_workers=(settings.min_workers, settings.workers) if elastic else settings.workers,
        elastic_resize_monitor_interval_s=_RESIZE_SECONDS,
        use_gpu=settings.gpu,
        resources_per_worker={"CPU": settings.cpus, **({"GPU": 1} if settings.gpu else {})},
        placement_strategy="SPREAD",  # each node reads its own part of the data for its own worker
    )


def _is_complete(settings: Settings, outputs: MillraceFileSystem) -> bool:
    last = next(reversed(read_events(outputs, settings.run)), None)
    return last is not None and last["event"] == "end" and bool(last["epochs"] >= settings.epochs)


def _check_resources(settings: Settings, progress: Callable[[str], None]) -> None:
    """Report missing resources: the run then waits, since an autoscaler may add them. Raises on a single machine."""
    workers = settings.min_workers or settings.workers
    needed = {"CPU": workers * settings.cpus, **({"GPU": workers} if settings.gpu else {})}
    found = {name: int(ray.cluster_resources().get(name, 0)) for name in needed}
    lacking = [f"{found[name]} of {needed[name]} {name}s" for name in needed if found[name] < needed[name]]
    if not lacking:
        return
    text = f"{' and '.join(lacking)} that this run needs"
    if "RAY_ADDRESS" not in os.environ:
        raise ConfigurationError(f"this machine has {text}", next_step="give --cpu, or submit the script to a cluster")
    progress(f"the cluster has {text}; waiting for nodes (--cpu: without GPUs)")


def _fit(trainer: TorchTrainer, follower: _Follower) -> None:
    """Run Ray Train in a thread of its own, so that this one can follow the log and react to Ctrl-C."""
    failure: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            failure.append(error)

    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(1.0)
        follower.look()
    follower.look()
    if failure:
        raise error_of_millrace(failure[0]) or failure[0]


def error_of_millrace(error: BaseException) -> MillraceError | None:
    """The error of Millrace in what Ray raised. Ray keeps the errors of tasks and workers as text."""
    if isinstance(error, MillraceError):
        return error
    workers = (getattr(error, "worker_failures", None) or {}).values()
    for text in map(str, (*workers, error, error.__cause__)):
        if (found := re.search(r"\bmillrace\.errors\.(\w+): (.+)", text)) is not None:
            kind: type[MillraceError] = getattr(millrace.errors, found[1], MillraceError)
            return kind(found[2])
    return None


class _Follower:
    """Prints what is new in a run's log."""

    def __init__(self, settings: Settings, fs: MillraceFileSystem, progress: Callable[[str], None]) -> None:
        self._settings, self._fs, self._progress = settings, fs, progress
        self._seen = len(read_events(fs, settings.run))

    def look(self) -> None:
        """Print a line for each new event."""
        try:
            events = read_events(self._fs, self._settings.run)
        except MillraceError as error:
            self._progress(f"         the log cannot be read now: {error.message}")
            return
        for event in events[self._seen :]:
            if (line := line_of(event)) is not None:
                self._progress(line)
        self._seen = len(events)
