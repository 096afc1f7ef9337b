"""A fine-tune of examples/speech by two workers over real Ray and real S3.

The tests of the demo kill its worker, those of tests/faults one of two.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import ray.data
from tests.support.ray_sessions import start_ray

import millrace
from finetune.data import EveryClipOnce, read_splits, split_dataset
from finetune.log import clips_digest, open_checkpoints
from finetune.network import interface_of
from finetune.options import Settings
from finetune.preprocessing import Preprocessor
from finetune.run import error_of_millrace, fine_tune
from millrace.errors import ConfigurationError, DamagedError
from millrace.filesystem import MillraceFileSystem
from millrace.testing.s3 import S3Server
from sample_data import write_common_voice

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
    ),
]

CLIPS = 45
"""Cannot be shared equally by two."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # A trainer leaves its own handler: an interrupt would then start another cluster, long after this one has ended.
    on_interrupt = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        # Ray Train runs all in processes with an environment of its own: Ray's first ones would start in vain.
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        # Its processes inherit the environment, and find the example by the path.
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[3] / "examples" / "speech"))
        start_ray(num_cpus=3, object_store_memory=256 << 20, _node_ip_address="127.0.0.1")
        yield
        ray.shutdown()
    signal.signal(signal.SIGINT, on_interrupt)


@pytest.fixture
def fs(s3: S3Server, tmp_path: Path) -> MillraceFileSystem:
    return millrace.filesystem(
        "s3",
        target_options=s3.target_options,
        cache_dir=str(tmp_path / "cache"),
        consistency="always",
        members="none",
        min_free=0,
    )


@pytest.fixture
def settings(fs: MillraceFileSystem, bucket: str, tmp_path: Path) -> Settings:
    write_common_voice(tmp_path / "cv", {"train": CLIPS, "dev": 5, "test": 7})
    for file in (tmp_path / "cv").rglob("*"):
        if file.is_file():
            fs.pipe_file(f"{bucket}/cv/{file.relative_to(tmp_path / 'cv')}", file.read_bytes())
    return Settings(
        data=f"s3://{bucket}/cv",
        run=f"s3://{bucket}/run",
        hidden_size=16,
        layers=1,
        epochs=2,
        workers=2,
    )


@pytest.mark.usefixtures("cluster")
def test_run_of_two_workers_trains_on_every_clip_once_and_continues_up_to_a_damaged_one(
    settings: Settings, fs: MillraceFileSystem
) -> None:
    lines: list[str] = []
    result = fine_tune(settings, fs, fs, progress=lines.append)
    names = read_splits(fs, settings)["train"]["name"].to_pylist()
    digest = f"{clips_digest(names):016x}"

    assert (result.restarts, result.kill) == (0, None)
    assert [(epoch.epoch, epoch.attempt) for epoch in result.epochs] == [(1, 0), (2, 0)]
    for epoch in result.epochs:
        assert (epoch.clips, epoch.clips_digest) == (CLIPS, digest)
        assert [worker.rank for worker in epoch.workers] == [0, 1]
        # Whole blocks are shared, so the shares differ, but not by much.
        assert min(worker.clips for worker in epoch.workers) > CLIPS // 4
        saved = result.checkpoints[epoch.epoch]
        assert 0 < saved.stored_bytes < saved.raw_bytes
    assert not [event for event in result.events if event["event"] == "warning"]
    assert result.metrics["test_clips"] == 7
    assert result.epochs[1].origin_bytes < result.epochs[1].cache_bytes

    base = settings.run.removeprefix("s3://")
    stored = {path.removeprefix(f"{base}/") for path in fs.find(base)}
    assert {"model/config.json", "model/model.safetensors", "metrics.json", "report.html", "training.jsonl"} <= stored
    with open_checkpoints(fs, settings) as checkpoints:
        assert checkpoints.steps() == [1, 2]

    # A complete run is not repeated.
    lines.clear()
    assert fine_tune(settings, fs, fs, progress=lines.append).metrics == result.metrics
    assert [line for line in lines if "is complete" in line] == lines

    # With more epochs it continues, here with another number of workers, up to a clip that cannot be decoded.
    fs.pipe_file(f"{settings.data}/clips/{names[3]}", b"no audio")
    more = replace(settings, epochs=3, workers=1, max_failures=0)
    with pytest.raises(DamagedError, match=f"{names[3]}: cannot be decoded"):
        fine_tune(more, fs, fs, progress=lines.append)
    log = [json.loads(line) for line in fs.cat_file(f"{base}/training.jsonl").splitlines()]
    starts = [(event["workers"], event["resumed_after"]) for event in log if event["event"] == "start"]
    assert starts == [(2, 0), (1, 2)]


@pytest.mark.usefixtures("cluster")
def test_workers_that_hold_every_cpu_still_get_data(settings: Settings, fs: MillraceFileSystem) -> None:
    class Busy:
        def ready(self) -> None:
            pass

    # In place of those of a model, which load PyTorch in each of the processes.
    def extractor(samples: np.ndarray, **_: Any) -> dict[str, Any]:
        return {"input_features": [samples]}

    def tokenizer(sentence: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[len(sentence)])

    settings = replace(settings, workers=3)
    table = read_splits(fs, settings)["train"]
    workers = [ray.remote(num_cpus=1)(Busy).remote() for _ in range(3)]
    ray.get([worker.ready.remote() for worker in workers])
    ray.data.DataContext.get_current().enable_progress_bars = False
    preprocessor = ray.put(Preprocessor(extractor=extractor, tokenizer=tokenizer, feature_shape=(-1,)))
    dataset = split_dataset(fs, settings, preprocessor, table, shuffle=True)
    shares = EveryClipOnce().configure({"train": dataset}, 3, None, None)

    def names(share: dict[str, Any]) -> list[str]:
        return [str(name) for batch in share["train"].iter_batches(batch_size=4) for name in batch["name"]]

    passes = []
    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            passes.append([name for share in pool.map(names, shares) for name in share])
    wanted = sorted(table["name"].to_pylist())
    assert [sorted(each) for each in passes] == [wanted, wanted]
    assert passes[0] != passes[1]  # in another order
    for worker in workers:
        ray.kill(worker)


@pytest.mark.usefixtures("cluster")
def test_gpu_run_on_machine_without_gpus_is_refused(
    settings: Settings, fs: MillraceFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigurationError, match="this machine has 0 of 2 GPUs that this run needs"):
        fine_tune(replace(settings, gpu=True), fs, fs)


class FailedTrainingError(Exception):
    """As Ray Train raises the errors of its workers."""

    def __init__(self, *workers: Exception) -> None:
        super().__init__("outer")
        self.worker_failures = dict(enumerate(workers))


def test_millrace_error_is_found_in_the_ray_error() -> None:
    own, lost = DamagedError("s3://b/k: cannot be decoded", next_step="remove it"), RuntimeError("connection reset")
    text = RuntimeError(
        f"Traceback (most recent call last):\n  File x\nmillrace.errors.DamagedError: {own}\n\nThe above ..."
    )
    found = error_of_millrace(FailedTrainingError(lost, text))
    assert (type(found), str(found)) == (DamagedError, str(own))
    assert error_of_millrace(own) is own
    assert error_of_millrace(FailedTrainingError(lost)) is None


def test_network_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.254") is None
