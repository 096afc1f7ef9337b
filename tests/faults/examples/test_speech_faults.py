"""Fine-tunes on a cluster whose processes, machines, storage and clients are lost: the jobs succeed without intervention."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.examples.speech_cluster import BUCKET, ENDS, FEW, Job, SpeechCluster, kill, training_processes
from tests.support.machines.rays import ENVIRONMENT

from finetune.data import read_splits
from finetune.log import Epoch, clips_digest
from finetune.options import Settings

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

EPOCHS = 6
_SMALL = ("--hidden-size", "32", "--layers", "1", "--batch-size", "4")
_AWAY_SECONDS = 20.0
_CLIPS = 48


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpeechCluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with SpeechCluster(tmp_path_factory.mktemp("speech"), limits=FEW) as started:
            yield started


@pytest.fixture(scope="module")
def every_clip(cluster: SpeechCluster) -> str:
    """The digest of an epoch that trains on each clip of the split once."""
    splits = read_splits(cluster.data_fs, Settings(data=f"s3://{BUCKET}/de", run="unused"))
    return f"{clips_digest(splits['train']['name'].to_pylist()):016x}"


def checked(job: Job, every_clip: str, *, unsaved: int) -> list[Epoch]:
    """The epochs of a job that has ended, with all that it must have left in the bucket: all but so many checkpoints."""
    epochs = job.epochs()
    assert [epoch.epoch for epoch in epochs] == list(range(1, EPOCHS + 1))
    # Every clip once an epoch, whatever happened in it.
    assert {(epoch.clips, epoch.clips_digest) for epoch in epochs} == {(_CLIPS, every_clip)}
    with job.checkpoints() as checkpoints:
        saved = checkpoints.steps()
    assert len(saved) + unsaved >= EPOCHS
    reported = [event for event in job.events("warning") if "was not saved" in event["text"]]
    assert len(saved) + len(reported) == EPOCHS
    assert epochs[-1].train_loss < 0.8 * epochs[0].train_loss
    assert {
        "training.jsonl",
        "metrics.json",
        "report.html",
        "model/config.json",
        "model/model.safetensors",
    } <= job.files()
    return epochs


def wait_for_start(job: Job, number: int) -> dict[str, Any]:
    """Wait until so many worker groups have started, the last with a state to continue from; returns its event.

    That has saved when this returns.
    """
    job.wait_for(lambda: len(job.events("start")) >= number, "the training does not start again")
    start = job.events("start")[number - 1]
    assert start["resumed_after"] >= 1
    job.wait_for_checkpoint(start["resumed_after"] + 1)
    return start


def test_training_survives_a_killed_client_a_killed_process_a_lost_node_and_an_outage(
    cluster: SpeechCluster, every_clip: str
) -> None:
    """One worker per node, without room for a second one. `speech_figures.py` measures the other case."""
    options = (*_SMALL, "--epochs", str(EPOCHS), "--min-workers", "1", "--cpus", "2")
    job, client = cluster.submit_by_command("faults", *options)
    with client:
        job.wait_for(lambda: job.status() == "RUNNING", "the job does not run")
        assert client.exit_status() is None  # it follows the job, which must not depend on it
        client.kill()

    job.wait_for_checkpoint(1)
    victim, survivor = cluster.workers
    assert job.events("start")[0]["workers"] == 2
    (process,) = training_processes(survivor)
    killed = time.time()
    kill(process)
    start = wait_for_start(job, 2)
    assert start["workers"] == 2
    report("process killed", start["time"] - killed)

    assert training_processes(victim)
    assert cached_bytes(victim.directory) > 0
    lost = time.time()
    cluster.lose(victim)
    start = wait_for_start(job, 3)
    assert start["workers"] == 1
    report("node lost", start["time"] - lost)

    cluster.s3.stop()
    time.sleep(_AWAY_SECONDS)
    assert job.status() not in ENDS
    cluster.s3.start()
    job.wait_for_end()
    assert len(job.events("start")) == 3  # no attempt failed for lack of storage
    # Records in the gap may be missing, which the log reports.
    epochs = checked(job, every_clip, unsaved=2)
    assert {worker.node for worker in epochs[0].workers} == {victim.address, survivor.address}
    assert {worker.node for worker in epochs[-1].workers} == {survivor.address}
    print(f"dev CER {epochs[-1].dev_cer:.1%}")


def report(name: str, recovery_seconds: float) -> None:
    print(f"\n{name}: trained again after {recovery_seconds:.0f} s")


def cached_bytes(machine: Path) -> int:
    """The files in the cache on a machine's disk."""
    files = (machine / "root" / ".cache").rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file() and not file.name.startswith("lock"))
