"""The options of the example scripts: a `Settings` object and the command line that fills it."""

from __future__ import annotations

import argparse
import math
import os
import posixpath
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace.errors import MillraceError

SMALL_EPOCHS = {"ctc": 10, "whisper": 30}
"""The small Whisper needs more epochs: its decoder learns the sentences by heart before its encoder learns to listen."""
SMALL_LEARNING_RATES = {"ctc": 3e-3, "whisper": 2e-3}
PRETRAINED_EPOCHS = 3
PRETRAINED_LEARNING_RATE = 3e-5
_STARTED = time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One fine-tuning run. The command line explains each option."""

    data: str
    run: str
    model: str | None = None
    family: str = "ctc"
    hidden_size: int = 128
    layers: int = 3
    epochs: int = 10
    batch_size: int = 8
    learning_rate: float = 3e-3
    warmup: float = 0.15
    weight_decay: float = 0.01
    precision: str = "auto"
    max_seconds: float = 12.0
    train_clips: int | None = None
    dev_clips: int | None = 512
    test_clips: int | None = 2048
    workers: int = 1
    min_workers: int | None = None
    cpus: int = 1
    gpu: bool = False
    keep: int | None = None
    kill_in_epoch: int | None = None
    max_failures: int = 3
    seed: int = 7

    def learning_rate_at(self, progress: float) -> float:
        """The learning rate at `progress` (0 to 1) of the run: a linear warm-up, then half a cosine down to zero.

        It depends on the progress only, so a resumed run needs no scheduler state.
        """
        if progress < self.warmup:
            return self.learning_rate * max(progress / self.warmup, 0.02)
        rest = min(1.0, (progress - self.warmup) / (1 - self.warmup))
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * rest))


def default_epochs(model: str | None, family: str) -> int:
    """How many epochs suit a model."""
    return SMALL_EPOCHS[family] if model is None else PRETRAINED_EPOCHS


def default_learning_rate(model: str | None, family: str) -> float:
    """Which peak learning rate suits a model."""
    return SMALL_LEARNING_RATES[family] if model is None else PRETRAINED_LEARNING_RATE


def default_run(data: str) -> str:
    """A new folder for a run: `runs/<UTC time>` next to the data set."""
    return posixpath.join(posixpath.dirname(data.rstrip("/")), "runs", time.strftime("%Y%m%d-%H%M%S", time.gmtime()))


def protocol_of(url: str) -> str:
    """The protocol to open a URL or a local path with."""
    return "s3" if url.startswith("s3://") else "file"


def parse_settings(
    description: str | None, arguments: Sequence[str] | None = None, *, workers: int | None = None
) -> Settings:
    """Parse a script's command line. A given `workers` fixes their number; otherwise `--workers` sets it."""
    parser = _parser(description, choose_workers=workers is None)
    given = vars(parser.parse_args(arguments))
    model, family = given["model"], given["family"]
    given["data"] = _absolute(given["data"])
    given["run"] = _absolute(given["run"]) if given["run"] else default_run(given["data"])
    given["epochs"] = given["epochs"] or default_epochs(model, family)
    given["learning_rate"] = given["learning_rate"] or default_learning_rate(model, family)
    settings = Settings(**{"workers": workers, **given})
    if settings.min_workers is not None and settings.min_workers > settings.workers:
        parser.error(f"--min-workers {settings.min_workers} is more than --workers {settings.workers}")
    if settings.kill_in_epoch is not None and settings.kill_in_epoch > settings.epochs:
        parser.error(f"--kill-in-epoch {settings.kill_in_epoch} is more than the {settings.epochs} epochs of the run")
    return settings


def _parser(description: str | None, *, choose_workers: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--data",
        required=True,
        metavar="URL",
        type=_url,
        help="a Common Voice release: the folder with train.tsv, "
        "dev.tsv, test.tsv and clips/; s3://bucket/... or a local path",
    )
    add(
        "--run",
        metavar="URL",
        type=_url,
        help="where all outputs go; a run that exists there is resumed. Default: runs/<time> next to the data",
    )
    add(
        "--model",
        metavar="NAME",
        help="the model to fine-tune: a Whisper or Wav2Vec2-BERT model of the Hugging Face "
        "hub, or a local folder on all nodes. Default: a small model, trained from scratch",
    )
    add("--family", choices=sorted(SMALL_EPOCHS), default="ctc", help="of the small model: ctc is Wav2Vec2-BERT")
    add("--hidden-size", metavar="N", type=positive_int, default=128, help="of the small model, a multiple of 4")
    add("--layers", metavar="N", type=positive_int, default=3, help="of the small model")
    add(
        "--epochs",
        metavar="N",
        type=positive_int,
        help="passes over the training split. Default: 10 (ctc), 30 (whisper); 3 with --model",
    )
    add("--batch-size", metavar="N", type=positive_int, default=8, help="clips per worker and step. Default: 8")
    add(
        "--learning-rate",
        metavar="X",
        type=positive_number,
        help="at its peak. Default: 3e-3 (ctc), 2e-3 (whisper); 3e-5 with --model",
    )
    add(
        "--precision",
        choices=("auto", "fp32", "bf16", "fp16"),
        default="auto",
        help="auto: fp32 on a CPU; on a GPU bf16 if it supports that, otherwise fp16",
    )
    for split, default in (("train", None), ("dev", 512), ("test", 2048)):
        add(
            f"--{split}-clips",
            metavar="N",
            type=positive_int,
            default=default,
            help=f"use only N clips of {split}, evenly spread. Default: {default or 'all'}",
        )
    add("--max-seconds", metavar="S", type=positive_number, default=12.0, help="leave longer clips out. Default: 12")
    if choose_workers:
        add("--workers", metavar="N", type=positive_int, default=2, help="training workers. Default: 2")
        add(
            "--min-workers",
            metavar="N",
            type=positive_int,
            help="continue with as few as N workers when a node is lost. Default: wait until all workers have a place",
        )
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--gpu", action="store_true", default=True, help="one GPU per worker (the default)")
    device.add_argument("--cpu", dest="gpu", action="store_false", help="train without GPUs")
    add(
        "--cpus",
        metavar="N",
        type=positive_int,
        default=1,
        help="CPUs and PyTorch threads per worker; leave at least one CPU of each node to Ray Data. Default: 1",
    )
    add("--keep", metavar="N", type=positive_int, help="how many checkpoints to keep. Default: all, one per epoch")
    add(
        "--max-failures",
        metavar="N",
        type=int,
        default=3,
        help="how many failures of workers the run survives. Default: 3",
    )
    add(
        "--kill-in-epoch",
        metavar="N",
        type=positive_int,
        help="kill one training process in the middle of epoch N, once",
    )
    add("--seed", metavar="N", type=int, default=7, help="Default: 7")
    return parser  # fmt: skip


def _url(text: str) -> str:
    if not text or ("://" in text and not text.startswith("s3://")):
        raise argparse.ArgumentTypeError(f"{text!r} is neither s3://bucket/... nor a local path")
    return text


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def positive_number(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def _absolute(url: str) -> str:
    """A local path that is valid in every process of this machine."""
    return url.rstrip("/") if protocol_of(url) == "s3" else os.path.abspath(os.path.expanduser(url))


def show(line: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.monotonic() - _STARTED:5.0f} s] {line}", flush=True)


def run_script(main: Callable[[], None]) -> None:
    """Run `main` and exit; an error of Millrace becomes one line on stderr and exit code 1."""
    try:
        main()
    except MillraceError as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")
    except KeyboardInterrupt:
        print(f"{os.path.basename(sys.argv[0])}: interrupted", file=sys.stderr)
        sys.exit(130)
