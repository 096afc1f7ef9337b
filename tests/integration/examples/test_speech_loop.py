"""The training loop of examples/speech on several ranks: in step, exact, and resumed by another number of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from tests.support.ranks import main, run

import millrace
from finetune.data import Batch
from finetune.log import METRICS, clips_digest, epochs_of, read_events
from finetune.models import speech_model
from finetune.options import Settings
from finetune.training import Counters, Job, Training

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:torch.distributed is disabled:UserWarning"
    ),
]

CLIPS = 6

Shares = dict[str, list[list[list[int]]]]
"""By split, by rank: the clips of each batch."""

UNEVEN: Shares = {
    "train": [[[0, 1, 2], [3, 4]], [[5]], []],
    "dev": [[[0, 1]], [], [[2]]],
    "test": [[], [[0, 1], [3]], [[2]]],
}
"""Of three ranks; the last one never has a clip to train on."""

TOGETHER: Shares = {"train": [[[0, 1, 2, 5], [3, 4]]], "dev": [[[0, 1, 2]]], "test": [[[0, 1, 2, 3]]]}
"""The same steps on one rank."""

OF_TWO: Shares = {"train": [[[0, 1], [3, 4]], [[2, 5]]], "dev": [[[0]], [[1, 2]]], "test": [[[0, 1]], [[2, 3]]]}


def no_bytes() -> dict[str, int]:
    return {"origin_bytes": 0, "cache_bytes": 0, "peer_bytes": 0}


def train(
    root: Path, shares: Shares, *, epochs: int, rank: int = 0, counters: Counters = no_bytes, **changes: Any
) -> None:
    settings = Settings(
        data="unused", run=str(root), hidden_size=16, layers=1, epochs=epochs, learning_rate=1e-3, **changes
    )
    model = speech_model(settings)
    fs = millrace.filesystem("file", cache_dir=str(root.parent / f"c{rank}"), consistency="always", members="none")

    def batches(split: str) -> Iterator[Batch]:
        for clips in shares[split][rank]:
            features = [np.random.default_rng(clip).normal(size=(40 + 5 * clip, 160)) for clip in clips]
            labels = [np.random.default_rng(clip).integers(3, 30, size=5 + clip) for clip in clips]
            yield Batch(
                names=[f"{clip}.mp3" for clip in clips],
                sentences=["ein satz"] * len(clips),
                known=[clip % 2 == 0 for clip in clips],
                inputs=model.collate([clip.astype(np.float32) for clip in features], labels),
            )

    job = Job(settings=settings, model=model, outputs=fs, train_rows=CLIPS, counters=counters)
    Training(job, batches, device=torch.device("cpu"), node="n").run()


def events(root: Path) -> list[dict[str, Any]]:
    fs = millrace.filesystem("file", cache_dir=str(root.parent / "look"), consistency="always", members="none")
    return read_events(fs, str(root))


def three_ranks(root: Path) -> None:
    train(root, UNEVEN, epochs=2, rank=torch.distributed.get_rank())


def two_ranks(root: Path) -> None:
    train(root, OF_TWO, epochs=3, rank=torch.distributed.get_rank())


PROGRAMS = {"three_ranks": three_ranks, "two_ranks": two_ranks}


@pytest.mark.slow
def test_uneven_shares_train_as_one_and_resume_on_other_ranks(tmp_path: Path) -> None:
    several, alone = tmp_path / "several", tmp_path / "alone"
    several.mkdir()
    run(__file__, "three_ranks", 3, several)
    train(alone, TOGETHER, epochs=2)

    epochs, expected = epochs_of(events(several)), epochs_of(events(alone))
    assert [(worker.rank, worker.clips, worker.steps) for worker in epochs[1].workers] == [
        (0, 5, 2),
        (1, 1, 1),
        (2, 0, 0),
    ]
    digest = f"{clips_digest(f'{clip}.mp3' for clip in range(CLIPS)):016x}"
    assert {epoch.clips_digest for epoch in (*epochs, *expected)} == {digest}
    # The gradient is the mean over the clips of a step, not over the ranks.
    for one, other in zip(epochs, expected, strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, rel=1e-4)
        assert one.dev_cer == pytest.approx(other.dev_cer)
    several_weights, alone_weights = (
        safetensors.torch.load_file(root / "model" / "model.safetensors") for root in (several, alone)
    )
    for name, values in several_weights.items():
        torch.testing.assert_close(values, alone_weights[name], rtol=1e-3, atol=1e-4)
    metrics = json.loads((several / METRICS).read_text(encoding="utf-8"))
    assert metrics["test_clips"] == 4
    assert sorted(line["name"] for line in metrics["transcripts"]) == ["0.mp3", "1.mp3", "2.mp3", "3.mp3"]

    # Another number of ranks continues from the last checkpoint, with the same clips in other shares.
    run(__file__, "two_ranks", 2, several)
    log = events(several)
    again = next(event for event in log if event["event"] == "start" and event["attempt"] == 1)
    assert (again["resumed_after"], again["workers"]) == (2, 2)
    epochs = epochs_of(log)
    assert [(epoch.epoch, epoch.attempt) for epoch in epochs] == [(1, 0), (2, 0), (3, 1)]
    assert {epoch.clips_digest for epoch in epochs} == {digest}
    train(alone, TOGETHER, epochs=3)
    # Adam's moments were restored, too.
    assert epochs[2].train_loss == pytest.approx(epochs_of(events(alone))[2].train_loss, rel=1e-3)
    assert not [event for event in log if event["event"] == "warning"]


def test_bytes_read_between_two_epochs_are_counted(tmp_path: Path) -> None:
    counted: list[int] = []

    def counters() -> dict[str, int]:
        counted.append(10 * len(counted) ** 2)
        return {**no_bytes(), "cache_bytes": counted[-1]}

    train(tmp_path / "run", TOGETHER, epochs=3, counters=counters, precision="bf16")
    read = [epoch.cache_bytes for epoch in epochs_of(events(tmp_path / "run"))]
    assert all(read)
    assert sum(read) == counted[-1] - counted[0]
    assert events(tmp_path / "run")[0]["precision"] == "bfloat16"


def test_counters_that_fail_do_not_end_the_training(tmp_path: Path) -> None:
    def fail() -> dict[str, int]:
        raise TimeoutError("no answer")

    train(tmp_path / "run", TOGETHER, epochs=1, counters=fail)
    log = events(tmp_path / "run")
    assert [event["event"] for event in log] == ["start", "warning", "warning", "epoch", "end"]
    assert "no answer" in log[1]["text"]


if __name__ == "__main__":
    main(PROGRAMS)
