"""One training worker against two on the same work, with Ray and without: what a second worker brings, and what Ray costs.

All four train the same model on the same clips for the same epochs with the same loop (`millrace.demo.speech`), each
worker with one thread and batches of the same size, out of the same kind of cache. With Ray, the clips are decoded by Ray
Data's tasks beside the workers; without, by a `DataLoader` inside of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.harness import Case, Measure, Options, Prepared

_BUCKET = "speech"


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    import millrace
    from millrace.demo.speech_data import write_common_voice
    from millrace.testing.s3 import S3Server

    with S3Server(options.scratch / "s3") as server:
        server.create_bucket(_BUCKET)
        written = write_common_voice(options.scratch / "clips")
        fs = millrace.filesystem(
            "s3", target_options=server.target_options, cache_dir=str(options.scratch / "up"), members="none"
        )
        for name in written.files:
            fs.pipe_file(f"{_BUCKET}/data/{name}", (written.directory / name).read_bytes())
        size = {"hidden_size": 32, "layers": 1} if options.quick else {"hidden_size": 192, "layers": 3}
        # The epoch counts that are no first one: those read from the cache, and nothing starts in them.
        epochs = 2 if options.quick else 3
        yield Prepared(
            {
                "options": dict(server.target_options),
                "settings": {**size, "epochs": epochs, "dev_clips": 16, "test_clips": 16, "kill_in_epoch": None},
            },
            notes=(
                f"{written.clips['train']} clips an epoch, {epochs} epochs, Wav2Vec2-BERT of {size['layers']} layers of "
                f"{size['hidden_size']}, 8 clips a worker and step, one thread a worker, {os.cpu_count()} cores.",
                "'epoch s' is the mean of all epochs but the first; it is the first worker's, as are its parts: waiting for "
                "data, training, evaluating, waiting for the checkpoint's copy. 'start s' is all that is no epoch.",
            ),
        )


case = Case(
    name="workers", title="Training on one worker and on two, with Ray and without", prepare=prepare,
    baseline="no Ray, 1 worker", rounds=3,
)  # fmt: skip


def _train(measure: Measure, context: Mapping[str, Any], run: Callable[..., Any], workers: int) -> list[object]:
    import millrace
    from millrace.demo.speech.settings import SpeechSettings

    def open_with(consistency: str, folder: str) -> Any:
        return millrace.filesystem(
            "s3",
            target_options=context["options"],
            cache_dir=f"{context['scratch']}/{folder}",
            consistency=consistency,
            members="none",
        )

    settings = SpeechSettings(
        data_url=f"s3://{_BUCKET}/data",
        run_url=f"s3://{_BUCKET}/runs/{os.path.basename(context['scratch'])}-{time.time_ns()}",
        num_workers=workers,
        **context["settings"],
    )
    with measure("run") as figures:
        began = time.perf_counter()
        result = run(
            settings,
            open_with("immutable", "data"),
            run_fs=open_with("always", "run"),
            checkpoint_options=context["options"],
            progress=lambda line: None,
        )
        whole = time.perf_counter() - began
        later = [epoch for epoch in result.epochs if epoch.epoch > 1]
        first = [next(worker for worker in epoch.workers if worker.rank == 0) for epoch in later]
        figures["start s"] = whole - sum(epoch.seconds for epoch in result.epochs)
        figures["epoch s"] = sum(epoch.seconds for epoch in later) / len(later)
        for name in ("wait", "compute", "evaluate", "stall"):
            figures[f"{name} s"] = sum(getattr(worker, f"{name}_seconds") for worker in first) / len(later)
    return [[epoch.clips, epoch.clips_digest] for epoch in result.epochs]


def _with_ray(measure: Measure, context: Mapping[str, Any], workers: int) -> list[object]:
    from millrace.demo.speech.run import run_speech

    return _train(measure, context, run_speech, workers)


def _without_ray(measure: Measure, context: Mapping[str, Any], workers: int) -> list[object]:
    from millrace.demo.speech.plain import run_plain

    return _train(measure, context, run_plain, workers)


@case.contender("no Ray, 1 worker")
def no_ray_one(measure: Measure, context: Mapping[str, Any]) -> list[object]:
    return _without_ray(measure, context, 1)


@case.contender("no Ray, 2 workers")
def no_ray_two(measure: Measure, context: Mapping[str, Any]) -> list[object]:
    return _without_ray(measure, context, 2)


@case.contender("Ray, 1 worker")
def ray_one(measure: Measure, context: Mapping[str, Any]) -> list[object]:
    return _with_ray(measure, context, 1)


@case.contender("Ray, 2 workers", baseline="Ray, 1 worker")
def ray_two(measure: Measure, context: Mapping[str, Any]) -> list[object]:
    return _with_ray(measure, context, 2)
