"""The training loop on several ranks with shares of its own making: in step, exact, resumed by another number of ranks."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow.fs
import pytest
from tests.ranks import main, run

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from millrace.demo.place import Place  # noqa: E402
from millrace.demo.speech.audio import FEATURES  # noqa: E402
from millrace.demo.speech.batches import ClipBatch, Example, batch_of, row_of  # noqa: E402
from millrace.demo.speech.checkpoints import EpochCheckpoints  # noqa: E402
from millrace.demo.speech.data import table_of  # noqa: E402
from millrace.demo.speech.families.choosing import family_of  # noqa: E402
from millrace.demo.speech.families.protocol import Family  # noqa: E402
from millrace.demo.speech.job import METRICS_NAME, Counters, SpeechJob, no_counters  # noqa: E402
from millrace.demo.speech.log import digest_of, final_epochs, read_events  # noqa: E402
from millrace.demo.speech.settings import SpeechSettings  # noqa: E402
from millrace.demo.speech.training import Training  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:torch.distributed is disabled:UserWarning"
    ),
]

CLIPS = 7

Shares = dict[str, list[list[list[int]]]]
"""By split, by rank: the clips of each batch."""

UNEVEN: Shares = {
    "train": [[[0, 1, 2], [3, 4]], [[5]], []],
    "dev": [[[0, 1]], [], [[2]]],
    "test": [[], [[0, 1], [3]], [[2]]],
}
"""Of three ranks; the last one never has a clip to learn from."""

TOGETHER: Shares = {
    "train": [[[0, 1, 2, 5], [3, 4]]],
    "dev": [[[0, 1, 2]]],
    "test": [[[0, 1, 2, 3]]],
}
"""The same steps on one rank."""

OF_TWO: Shares = {
    "train": [[[0, 1], [3, 4]], [[2, 5]]],
    "dev": [[[0]], [[1, 2]]],
    "test": [[[0, 1]], [[2, 3]]],
}


def row(clip: int) -> dict[str, Any]:
    random = np.random.default_rng(clip)
    example = Example(
        features=random.normal(size=(40 + 5 * clip, FEATURES)).astype(np.float32),
        labels=random.integers(3, 30, size=5 + clip).tolist(),
    )
    return row_of(name=f"{clip}.mp3", sentence="ein satz", known=clip % 2 == 0, example=example)


class Given:
    """Batches that were laid down before."""

    def __init__(self, family: Family, shares: Shares, rank: int) -> None:
        self._family, self._shares, self._rank = family, shares, rank

    def batches(self, split: str, *, epoch: int, size: int) -> Iterator[ClipBatch]:
        for clips in self._shares[split][self._rank]:
            yield batch_of(table_of(map(row, clips)), self._family)


def train(
    root: pathlib.Path,
    shares: Shares,
    *,
    epochs: int,
    rank: int = 0,
    counters: Counters = no_counters,
    **changes: Any,
) -> Training:
    settings = SpeechSettings(
        data_url="unused", run_url=str(root), hidden_size=16, layers=1, epochs=epochs, kill_in_epoch=None,
        learning_rate=1e-3, **changes,
    )  # fmt: skip
    place = Place(fs=pyarrow.fs.LocalFileSystem(), url=str(root))
    family = family_of(settings)
    training = Training(
        SpeechJob(settings=settings, run=place, train_rows=CLIPS, counters=counters),
        family,
        Given(family, shares, rank),
        device=torch.device("cpu"),
        node="n",
    )
    training.run()
    return training


def events(root: pathlib.Path) -> list[dict[str, Any]]:
    return read_events(Place(fs=pyarrow.fs.LocalFileSystem(), url=str(root)))


def weights(root: pathlib.Path) -> dict[str, Any]:
    import safetensors.torch

    loaded: dict[str, Any] = safetensors.torch.load_file(root / "model" / "model.safetensors")
    return loaded


def three_ranks(root: pathlib.Path) -> None:
    rank = torch.distributed.get_rank()
    training = train(root, UNEVEN, epochs=2, rank=rank)
    torch.save(training._bare.state_dict(), root / f"rank-{rank}.pt")


def two_ranks(root: pathlib.Path) -> None:
    train(root, OF_TWO, epochs=3, rank=torch.distributed.get_rank())


PROGRAMS = {"three_ranks": three_ranks, "two_ranks": two_ranks}


def test_uneven_shares_are_learned_from_as_one(tmp_path: pathlib.Path) -> None:
    several, alone = tmp_path / "several", tmp_path / "alone"
    several.mkdir()
    run(__file__, "three_ranks", 3, several)
    train(alone, TOGETHER, epochs=2)

    # Every rank has made every step, so all have the same model, to the last bit.
    states = [torch.load(several / f"rank-{rank}.pt", weights_only=True) for rank in range(3)]
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in state)

    epochs, expected = final_epochs(events(several)), final_epochs(events(alone))
    assert [epoch.clips for epoch in epochs] == [6, 6]
    assert [epoch.steps for epoch in epochs] == [2, 2]
    assert [(worker.rank, worker.clips, worker.steps) for worker in epochs[1].workers] == [
        (0, 5, 2),
        (1, 1, 1),
        (2, 0, 0),
    ]
    digest = f"{digest_of(f'{clip}.mp3' for clip in range(6)):016x}"
    assert {epoch.clips_digest for epoch in (*epochs, *expected)} == {digest}
    # The mean over the clips of a step is what counts, not the mean over ranks.
    for one, other in zip(epochs, expected, strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, rel=1e-4)
        assert one.learning_rate == other.learning_rate
        assert one.dev_cer == pytest.approx(other.dev_cer)
    metrics = json.loads((several / METRICS_NAME).read_text(encoding="utf-8"))
    assert metrics["test_clips"] == 4
    assert sorted(line["name"] for line in metrics["transcripts"]) == ["0.mp3", "1.mp3", "2.mp3", "3.mp3"]
    assert [event["epoch"] for event in events(several) if event["event"] == "checkpoint"] == [1, 2]

    # Another number of ranks goes on from the last checkpoint, with the same clips in other shares.
    run(__file__, "two_ranks", 2, several)
    log = events(several)
    start = next(event for event in log if event["event"] == "start" and event["attempt"] == 1)
    assert (start["resumed_after"], start["workers"]) == (2, 2)
    epochs = final_epochs(log)
    assert [(epoch.epoch, epoch.attempt) for epoch in epochs] == [(1, 0), (2, 0), (3, 1)]
    assert {epoch.clips_digest for epoch in epochs} == {digest}
    assert all(epoch.checkpoint is not None for epoch in epochs)
    train(alone, TOGETHER, epochs=3)
    assert epochs[2].train_loss == pytest.approx(final_epochs(events(alone))[2].train_loss, rel=1e-3)
    assert not any(event["event"] == "warning" for event in log)


def test_an_epoch_that_saw_other_clips_is_told_of(tmp_path: pathlib.Path) -> None:
    train(tmp_path, {**TOGETHER, "train": [[[0, 1]]]}, epochs=1)
    train(tmp_path, {**TOGETHER, "train": [[[0, 2]]]}, epochs=2, precision="bf16")
    told = [event for event in events(tmp_path) if event["event"] == "warning"]
    assert [(event["epoch"], "the same clips" in event["text"]) for event in told] == [(2, True)]
    starts = [event for event in events(tmp_path) if event["event"] == "start"]
    assert [event["precision"] for event in starts] == ["fp32", "bf16"]


def test_what_is_counted_between_two_epochs_is_not_lost(tmp_path: pathlib.Path) -> None:
    told: list[int] = []

    def counters() -> dict[str, int]:
        told.append(10 * len(told) ** 2)
        return {"cache_bytes": told[-1]}

    train(tmp_path, TOGETHER, epochs=3, counters=counters)
    read = [epoch.cache_bytes for epoch in final_epochs(events(tmp_path))]
    assert all(read)
    assert sum(read) == told[-1] - told[0]


def test_an_epoch_is_in_the_log_before_its_checkpoint_begins(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a process that dies in between leaves a run that resumes behind an epoch of which nothing is known."""
    known: list[list[int]] = []
    save = EpochCheckpoints.save

    def slow_save(self: EpochCheckpoints, epoch: int, metrics: dict[str, float]) -> None:
        known.append([record.epoch for record in final_epochs(events(tmp_path))])
        time.sleep(0.25)
        save(self, epoch, metrics)

    monkeypatch.setattr(EpochCheckpoints, "save", slow_save)
    train(tmp_path, TOGETHER, epochs=3)
    assert known == [[1], [1, 2], [1, 2, 3]]
    # What the copy took is known of the last epoch, too.
    for epoch in final_epochs(events(tmp_path)):
        assert epoch.workers[0].stall_seconds >= 0.25
        assert epoch.seconds >= 0.25


if __name__ == "__main__":
    main(PROGRAMS)
