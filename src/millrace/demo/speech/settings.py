"""What a speech run is told. Pure; importing it loads neither torch nor ray."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from millrace.errors import ConfigurationError

FamilyName = Literal["ctc", "whisper"]
FAMILIES: tuple[str, ...] = get_args(FamilyName)
Precision = Literal["auto", "fp32", "bf16", "fp16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)


@dataclass(frozen=True, kw_only=True)
class SpeechSettings:
    """One fine-tuning run. The defaults teach the shipped speech set to a small model in about two minutes.

    `data_url` is a Common Voice release (`train.tsv`, `clips/`, ...); everything that comes out goes below `run_url`.
    `model` is a local folder or a hub name of a model of the Whisper or Wav2Vec2 families; None builds a small one of
    `family` from a configuration. `precision`: `"auto"` is mixed precision on a GPU (bfloat16 where it has that), and
    float32 on a CPU. With `min_workers` the run goes on with so many where `num_workers` cannot be had.
    `cpus_per_worker` are a training worker's own; what the cluster has beside these is for Ray Data.
    `keep` is how many checkpoints stay, None keeps all. `kill_in_epoch` kills one training process in the middle of that
    epoch, once; None leaves it alone.
    The `*_clips` limits take that many clips of a split, evenly spread; None takes all.
    """

    data_url: str
    run_url: str
    model: str | None = None
    family: FamilyName = "ctc"
    precision: Precision = "auto"
    hidden_size: int = 128
    layers: int = 3
    epochs: int = 10
    batch_size: int = 8
    learning_rate: float = 3e-3
    warmup: float = 0.15
    weight_decay: float = 0.01
    max_seconds: float = 12.0
    train_clips: int | None = None
    dev_clips: int | None = 512
    test_clips: int | None = 2048
    num_workers: int = 1
    min_workers: int | None = None
    cpus_per_worker: int = 1
    threads_per_worker: int = 1
    use_gpu: bool = False
    keep: int | None = None
    kill_in_epoch: int | None = 6
    max_failures: int = 3
    seed: int = 7

    def __post_init__(self) -> None:
        for name in (
            "epochs", "batch_size", "num_workers", "cpus_per_worker", "threads_per_worker", "hidden_size", "layers"
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}", next_step="give a whole number from 1 up")
        if self.hidden_size % 4:
            raise ConfigurationError(f"hidden_size is {self.hidden_size}", next_step="give a multiple of 4")
        if self.min_workers is not None and not 1 <= self.min_workers <= self.num_workers:
            raise ConfigurationError(
                f"min_workers is {self.min_workers} with {self.num_workers} workers",
                next_step=f"give a number from 1 to {self.num_workers}, or None",
            )
        for name, known in (("family", FAMILIES), ("precision", PRECISIONS)):
            if getattr(self, name) not in known:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}", next_step=f"give {', '.join(known)}")
        if not 0 <= self.warmup < 1:
            raise ConfigurationError(f"warmup is {self.warmup}", next_step="give a share of the run from 0 to below 1")
        if self.kill_in_epoch is not None and not 1 <= self.kill_in_epoch <= self.epochs:
            raise ConfigurationError(
                f"kill_in_epoch is {self.kill_in_epoch} in a run of {self.epochs} epochs",
                next_step=f"give a number from 1 to {self.epochs}, or None",
            )

    def quick(self) -> SpeechSettings:
        """The same run cut down to what shows that every part works; the model learns next to nothing."""
        return replace(
            self,
            hidden_size=32,
            layers=1,
            epochs=3,
            train_clips=48,
            dev_clips=8,
            test_clips=12,
            kill_in_epoch=None if self.kill_in_epoch is None else 2,
        )

    def learning_rate_at(self, done: float) -> float:
        """The rate when the share `done` (0 to 1) of the run is behind: a linear rise, then half a cosine to zero.

        A function of progress alone, so a resumed run needs no scheduler state to go on where it stopped.
        """
        if done < self.warmup:
            return self.learning_rate * max(done / self.warmup, 0.02)
        rest = min(1.0, (done - self.warmup) / (1 - self.warmup))
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * rest))

    def public(self) -> dict[str, Any]:
        """The settings as they may be shown and stored; there are no secrets among them."""
        return dict(self.__dict__)
