"""A speech run over real Ray and real S3: two workers, one of them killed; and the same training without Ray."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.ray_sessions import start_ray

import millrace
from millrace.checkpoint import CheckpointManager
from millrace.demo.place import Place
from millrace.demo.speech.data import read_split
from millrace.demo.speech.families.choosing import family_of
from millrace.demo.speech.log import digest_of
from millrace.demo.speech.plain import run_plain
from millrace.demo.speech.run import run_speech, splits_of
from millrace.demo.speech.settings import SpeechSettings
from millrace.demo.speech_data import write_common_voice
from millrace.errors import DamagedError
from millrace.filesystem import MillraceFileSystem
from millrace.testing.s3 import S3Server

ray = pytest.importorskip("ray")
pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
    ),
]

CLIPS = 45
"""Not to be shared out equally among two."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # A trainer leaves its own: an interrupt would then start another cluster, long after this one has ended.
    on_interrupt = signal.getsignal(signal.SIGINT)
    start_ray(
        num_cpus=3,
        object_store_memory=256 << 20,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
    )
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
def settings(fs: MillraceFileSystem, bucket: str, tmp_path: Path) -> SpeechSettings:
    write_common_voice(tmp_path / "cv", limits={"train": CLIPS, "dev": 5, "test": 7})
    for file in (tmp_path / "cv").rglob("*"):
        if file.is_file():
            fs.pipe_file(f"{bucket}/cv/{file.relative_to(tmp_path / 'cv')}", file.read_bytes())
    return SpeechSettings(
        data_url=f"s3://{bucket}/cv", run_url=f"s3://{bucket}/run", hidden_size=16, layers=1, epochs=2, num_workers=2,
        kill_in_epoch=2,
    )  # fmt: skip


@pytest.mark.usefixtures("cluster")
def test_every_clip_once_an_epoch_though_a_worker_is_killed(
    settings: SpeechSettings, fs: MillraceFileSystem, s3: S3Server
) -> None:
    said: list[str] = []
    result = run_speech(settings, fs, checkpoint_options=s3.target_options, progress=said.append)
    data = Place(fs=fs, url=settings.data_url)
    digest = f"{digest_of(clip.name for clip in read_split(data, 'train')):016x}"

    assert (result.restarts, result.kill is not None) == (1, True)
    assert [(epoch.epoch, epoch.attempt) for epoch in result.epochs] == [(1, 0), (2, 1)]
    for epoch in result.epochs:
        assert (epoch.clips, epoch.clips_digest) == (CLIPS, digest)
        assert sorted(worker.rank for worker in epoch.workers) == [0, 1]
        # Whole blocks are shared out, so the shares differ, but not by much.
        assert min(worker.clips for worker in epoch.workers) > CLIPS // 4
        assert epoch.checkpoint is not None
        assert 0 < epoch.checkpoint.checkpoint_bytes < epoch.checkpoint.raw_bytes
    assert not [event for event in result.events if event["event"] == "warning"]
    assert result.metrics["test_clips"] == 7
    assert result.epochs[1].origin_bytes < result.epochs[1].cache_bytes
    assert any("resumed from the checkpoint of epoch 1" in line for line in said)

    run = Place(fs=fs, url=settings.run_url)
    assert {"model/config.json", "model/README.md", "metrics.json", "report.html"} <= set(run.sizes())
    with CheckpointManager(run.at("checkpoints").url, target_options=s3.target_options) as checkpoints:
        assert checkpoints.steps() == [1, 2]

    # What is complete is not done again; more epochs are.
    said.clear()
    again = run_speech(settings, fs, checkpoint_options=s3.target_options, progress=said.append)
    assert again.metrics == result.metrics
    assert [line for line in said if "is complete" in line] == said
    more = replace(settings, epochs=3, num_workers=1)
    result = run_speech(more, fs, checkpoint_options=s3.target_options, progress=said.append)
    assert [(epoch.epoch, len(epoch.workers)) for epoch in result.epochs] == [(1, 2), (2, 2), (3, 1)]
    assert {epoch.clips_digest for epoch in result.epochs} == {digest}


@pytest.mark.usefixtures("cluster")
def test_workers_that_hold_every_cpu_are_fed(settings: SpeechSettings, fs: MillraceFileSystem) -> None:
    from millrace.demo.speech.ray_data import EveryClipOnce

    class Busy:
        def ready(self) -> None:
            pass

    source = splits_of(settings, Place(fs=fs, url=settings.data_url), family_of(settings))["train"]
    workers = [ray.remote(num_cpus=1)(Busy).remote() for _ in range(3)]
    ray.get([worker.ready.remote() for worker in workers])
    ray.data.DataContext.get_current().enable_progress_bars = False
    shares = EveryClipOnce(cpus_per_worker=1).configure({"train": source}, 3, None, None)

    def names(share: dict[str, Any]) -> list[str]:
        return [str(name) for batch in share["train"].iter_batches(batch_size=4) for name in batch["name"]]

    passes = []
    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            passes.append([name for share in pool.map(names, shares) for name in share])
    wanted = sorted(clip.name for clip in source.clips)
    assert [sorted(each) for each in passes] == [wanted, wanted]
    assert passes[0] != passes[1]  # in another order
    for worker in workers:
        ray.kill(worker)


def test_the_same_training_without_ray(settings: SpeechSettings, fs: MillraceFileSystem, s3: S3Server) -> None:
    result = run_plain(settings, fs, checkpoint_options=s3.target_options, progress=lambda _: None)
    digest = f"{digest_of(clip.name for clip in read_split(Place(fs=fs, url=settings.data_url), 'train')):016x}"
    assert [(epoch.clips, epoch.clips_digest) for epoch in result.epochs] == [(CLIPS, digest)] * 2
    assert [[worker.clips for worker in epoch.workers] for epoch in result.epochs] == [[23, 22]] * 2
    assert result.metrics["test_clips"] == 7
    assert result.restarts == 0

    # What fails in a worker's loader is what the caller hears.
    path = f"{settings.data_url}/clips/{read_split(Place(fs=fs, url=settings.data_url), 'train')[3].name}"
    fs.pipe_file(path, b"no audio")
    other = replace(settings, run_url=f"{settings.run_url}-2", num_workers=1)
    with pytest.raises(DamagedError, match="cannot be decoded"):
        run_plain(other, fs, checkpoint_options=s3.target_options, progress=lambda _: None)
