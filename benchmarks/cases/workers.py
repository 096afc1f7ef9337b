"""One training worker against two on the same work: what a second worker brings.

Both run `examples/speech`: the same model on the same clips for the same epochs, each worker with one thread and batches of
the same size, out of the same kind of cache. Ray Data's tasks decode the clips on the same cores.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.harness import ROOT, Case, Measure, Options, Prepared

_EXAMPLE = str(ROOT / "examples" / "speech")
sys.path.insert(0, _EXAMPLE)

_BUCKET = "speech"


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    import millrace
    from millrace.testing.s3 import S3Server
    from sample_data import write_common_voice

    with S3Server(options.scratch / "s3") as server:
        server.create_bucket(_BUCKET)
        clips = options.scratch / "clips"
        count = write_common_voice(clips)["train"]
        fs = millrace.filesystem(
            "s3", target_options=server.target_options, cache_dir=str(options.scratch / "up"), members="none"
        )
        for path in clips.rglob("*"):
            if path.is_file():
                fs.pipe_file(f"{_BUCKET}/data/{path.relative_to(clips)}", path.read_bytes())
        size = {"hidden_size": 32, "layers": 1} if options.quick else {"hidden_size": 192, "layers": 3}
        # Only epochs after the first count: those read from the cache, and nothing starts in them.
        epochs = 2 if options.quick else 3
        yield Prepared(
            {
                "options": dict(server.target_options),
                "settings": {**size, "epochs": epochs, "dev_clips": 16, "test_clips": 16},
            },
            notes=(
                f"{count} clips an epoch, {epochs} epochs, Wav2Vec2-BERT of {size['layers']} layers of "
                f"{size['hidden_size']}, 8 clips a worker and step, one thread a worker, {os.cpu_count()} cores.",
                "'epoch s' is the mean of all epochs but the first; it is the first worker's, as are its parts: waiting for "
                "data, training, evaluating, blocked by a save. 'start s' is everything outside of an epoch.",
            ),
        )


case = Case(
    name="workers", title="Training on one worker and on two", prepare=prepare, baseline="1 worker", rounds=3,
)  # fmt: skip


def _train(measure: Measure, context: Mapping[str, Any], workers: int) -> list[object]:
    # Ray's processes find the example by it, and read the rest when they start.
    os.environ |= {"PYTHONPATH": _EXAMPLE, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    import millrace
    from finetune.options import Settings
    from finetune.run import fine_tune

    def open_with(consistency: str, folder: str) -> Any:
        return millrace.filesystem(
            "s3",
            target_options=context["options"],
            cache_dir=f"{context['scratch']}/{folder}",
            consistency=consistency,
            members="none",
        )

    settings = Settings(
        data=f"s3://{_BUCKET}/data",
        run=f"s3://{_BUCKET}/runs/{os.path.basename(context['scratch'])}-{time.time_ns()}",
        workers=workers,
        **context["settings"],
    )
    with measure("run") as figures:
        began = time.perf_counter()
        result = fine_tune(
            settings, open_with("immutable", "data"), open_with("always", "run"), progress=lambda _: None
        )
        whole = time.perf_counter() - began
        later = result.epochs[1:]
        figures["start s"] = whole - sum(epoch.seconds for epoch in result.epochs)
        figures["epoch s"] = sum(epoch.seconds for epoch in later) / len(later)
        for name in ("wait", "compute", "evaluate", "blocked"):
            figures[f"{name} s"] = sum(getattr(epoch.workers[0], f"{name}_seconds") for epoch in later) / len(later)
    return [[epoch.clips, epoch.clips_digest] for epoch in result.epochs]


@case.contender("1 worker")
def one(measure: Measure, context: Mapping[str, Any]) -> list[object]:
    return _train(measure, context, 1)


@case.contender("2 workers")
def two(measure: Measure, context: Mapping[str, Any]) -> list[object]:
    return _train(measure, context, 2)
