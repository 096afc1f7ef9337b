"""The command line of the example scripts: arguments to settings, progress with the time, errors in one line."""

from __future__ import annotations

import argparse
import os
import posixpath
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from millrace.demo import interrupts
from millrace.demo.needs import SPEECH_MODULES, check_modules
from millrace.demo.speech.defaults import (
    GIVEN_EPOCHS,
    GIVEN_RATE,
    SMALL_EPOCHS,
    SMALL_RATES,
    epochs_for,
    learning_rate_for,
)
from millrace.demo.speech.ray_cluster import given_cluster
from millrace.demo.speech.settings import FAMILIES, PRECISIONS, SpeechSettings
from millrace.errors import ConfigurationError, MillraceError
from millrace.origin import split_url

if TYPE_CHECKING:
    from argparse import _ArgumentGroup as _Group

_STARTED = time.monotonic()

_EPILOG = """\
Credentials and the endpoint come from the environment of the nodes (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_ENDPOINT_URL), a profile, or the machines' own role; never from this command line, which others can see.
A run that was interrupted goes on from its newest complete checkpoint: give its URL as --run again.
"""


@dataclass(frozen=True, kw_only=True)
class SpeechArguments:
    """What a script was told. `*_storage` are the keyword arguments of `millrace.filesystem`."""

    settings: SpeechSettings
    storage_options: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def data_storage(self) -> dict[str, Any]:
        """How to reach the data set."""
        return self._storage(self.settings.data_url)

    @property
    def run_storage(self) -> dict[str, Any]:
        """How to reach what comes out."""
        return self._storage(self.settings.run_url)

    @property
    def checkpoint_options(self) -> dict[str, Any] | None:
        """The `target_options` of the run's checkpoints."""
        options: dict[str, Any] | None = self.run_storage["target_options"]
        return options

    def _storage(self, url: str) -> dict[str, Any]:
        scheme, _ = split_url(url)
        return {"protocol": scheme, "target_options": None if scheme == "file" else self.storage_options}


def parse_arguments(
    description: str | None, arguments: Sequence[str] | None = None, *, workers: int | None = None
) -> SpeechArguments:
    """Parse a script's command line; with `workers` their number is settled, else it can be chosen.

    `--help` and a command line that cannot be understood end the process (exit codes 0 and 2). Raises `MillraceError`
    for what cannot work on this machine.
    """
    parser = _parser(description, choose_workers=workers is None)
    given = parser.parse_args(arguments)
    epochs = given.epochs or epochs_for(given.model, given.family)
    if workers is None and given.min_workers is not None and given.min_workers > given.workers:
        parser.error(f"--min-workers {given.min_workers} is more than --workers {given.workers}")
    if given.kill_in_epoch is not None and given.kill_in_epoch > epochs:
        parser.error(f"--kill-in-epoch {given.kill_in_epoch} is more than the {epochs} epochs of the run")
    data = _absolute(given.data)
    settings = SpeechSettings(
        data_url=data,
        run_url=default_run(data) if given.run is None else _absolute(given.run),
        model=given.model,
        family=given.family,
        precision=given.precision,
        hidden_size=given.hidden_size,
        layers=given.layers,
        epochs=epochs,
        batch_size=given.batch_size,
        learning_rate=given.learning_rate or learning_rate_for(given.model, given.family),
        max_seconds=given.max_seconds,
        train_clips=given.train_clips,
        dev_clips=given.dev_clips,
        test_clips=given.test_clips,
        num_workers=workers or given.workers,
        min_workers=None if workers else given.min_workers,
        cpus_per_worker=given.cpus,
        threads_per_worker=given.cpus,
        use_gpu=given.gpu,
        keep=given.keep,
        kill_in_epoch=given.kill_in_epoch,
        max_failures=given.max_failures,
        seed=given.seed,
    )
    check_modules(SPEECH_MODULES, what="this script", next_step="pip install 'millrace[ray,torch,speech]' on all nodes")
    _check_gpu(settings)
    options = {"endpoint_url": given.endpoint_url, "profile": given.profile}
    chosen = {name: value for name, value in options.items() if value is not None}
    return SpeechArguments(settings=settings, storage_options=chosen or None)


def default_run(data_url: str) -> str:
    """`runs/<time>` beside the data set, in UTC; of a whole bucket inside of it."""
    scheme, key = split_url(data_url.rstrip("/"))
    parent = posixpath.dirname(key) or (key if scheme != "file" else "")
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return posixpath.join(parent if "://" not in data_url else f"{scheme}://{parent}", "runs", stamp)


def say(text: str) -> None:
    """Print with the seconds since the start, at once: a job's output is followed from far away."""
    print(f"[{time.monotonic() - _STARTED:5.0f} s] {text}", flush=True)


def run_as_script(body: Callable[[], None]) -> NoReturn:
    """Run `body` and end the process: 0 when it is done, 1 with one line on stderr for an error, 128 + n for signal n."""
    name = os.path.basename(sys.argv[0])
    code = 0
    try:
        with interrupts.remembered():
            body()
    except KeyboardInterrupt as end:
        word, code = end.args if len(end.args) == 2 else ("interrupted", 130)
        print(f"{name}: {word}", file=sys.stderr, flush=True)
    except MillraceError as error:
        code = 1
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        if os.environ.get("MILLRACE_DEBUG") == "1":
            traceback.print_exc()
    sys.exit(code)


# --- the parser ---------------------------------------------------------------------------------------


class _Wide(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the descriptions of the scripts."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=24, width=110)


class _OneLine(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}: see 'python3 {self.prog} --help'\n")


def _parser(description: str | None, *, choose_workers: bool) -> argparse.ArgumentParser:
    parser = _OneLine(
        usage="python3 %(prog)s --data URL [--run URL] [--model NAME] [options]",
        description=description,
        epilog=_EPILOG,
        formatter_class=_Wide,
        allow_abbrev=False,
    )
    _add_data(parser.add_argument_group("data and outputs"))
    _add_model(parser.add_argument_group("model"))
    _add_training(parser.add_argument_group("training"))
    _add_workers(parser.add_argument_group("workers"), choose=choose_workers)
    _add_storage(parser.add_argument_group("storage"))
    return parser


def _add_data(group: _Group) -> None:
    group.add_argument(
        "--data", required=True, metavar="URL", type=_url,
        help="a Common Voice release: the folder with train.tsv, dev.tsv, test.tsv and clips/. s3://bucket/..., or a "
        "local path (for one machine, or a disk that all nodes share)",
    )  # fmt: skip
    group.add_argument(
        "--run", metavar="URL", type=_url,
        help="where everything goes that comes out; a run that is there already is resumed. Default: runs/<time> beside "
        "the data set",
    )  # fmt: skip
    for split, default in (("train", None), ("dev", 512), ("test", 2048)):
        group.add_argument(
            f"--{split}-clips", metavar="N", type=_count, default=default,
            help=f"take only so many clips of {split}, evenly spread. Default: {default or 'all'}",
        )  # fmt: skip
    group.add_argument(
        "--max-seconds", metavar="S", type=_positive, default=12.0,
        help="leave longer clips out. Default: %(default)g",
    )  # fmt: skip


def _add_model(group: _Group) -> None:
    group.add_argument(
        "--model", metavar="NAME",
        help="what to fine-tune: a local folder (on all nodes) or a name of the Hugging Face hub, of the Whisper or the "
        "Wav2Vec2 families, such as openai/whisper-tiny. Default: a small one, built and trained from scratch",
    )  # fmt: skip
    group.add_argument("--family", choices=FAMILIES, default="ctc", help="of a small one. Default: %(default)s")
    group.add_argument("--hidden-size", metavar="N", type=_width, default=128, help="of a small one. Default: 128")
    group.add_argument("--layers", metavar="N", type=_count, default=3, help="of a small one. Default: 3")


def _add_training(group: _Group) -> None:
    passes = ", ".join(f"{epochs} for {name}" for name, epochs in SMALL_EPOCHS.items())
    group.add_argument(
        "--epochs", metavar="N", type=_count,
        help=f"passes over the training split. Default: {passes}; with --model {GIVEN_EPOCHS}",
    )  # fmt: skip
    group.add_argument("--batch-size", metavar="N", type=_count, default=8, help="clips a worker. Default: 8")
    rates = ", ".join(f"{rate:g} for {name}" for name, rate in SMALL_RATES.items())
    group.add_argument(
        "--learning-rate", metavar="X", type=_positive,
        help=f"at its peak. Default: {rates}; with --model {GIVEN_RATE:g}",
    )  # fmt: skip
    group.add_argument(
        "--precision", choices=PRECISIONS, default="auto",
        help="auto: mixed on a GPU (bf16 where it has that, else fp16), fp32 on a CPU. Default: auto",
    )  # fmt: skip
    group.add_argument("--seed", metavar="N", type=_natural, default=7, help="Default: 7")
    group.add_argument(
        "--keep", metavar="N", type=_count, help="so many checkpoints stay, the newest. Default: all, one an epoch"
    )


def _add_workers(group: _Group, *, choose: bool) -> None:
    if choose:
        group.add_argument("--workers", metavar="N", type=_count, default=2, help="training workers. Default: 2")
        group.add_argument(
            "--min-workers", metavar="N", type=_count,
            help="go on with so many when no more can be had. Default: wait until all are there",
        )  # fmt: skip
    device = group.add_mutually_exclusive_group()
    device.add_argument("--gpu", action="store_true", default=True, help="one GPU a worker; the default")
    device.add_argument("--cpu", dest="gpu", action="store_false", help="train without a GPU")
    group.add_argument(
        "--cpus", metavar="N", type=_count, default=1,
        help="CPUs of each worker, and threads of its PyTorch; leave at least one on each node to Ray Data. Default: 1",
    )  # fmt: skip
    group.add_argument(
        "--max-failures", metavar="N", type=_natural, default=3,
        help="how often the training may lose workers or nodes and go on by itself. Default: 3",
    )  # fmt: skip
    group.add_argument(
        "--kill-in-epoch", metavar="N", type=_count,
        help="kill one training process in the middle of this epoch, once, to see what happens. Default: leave them alone",
    )  # fmt: skip


def _add_storage(group: _Group) -> None:
    group.add_argument("--endpoint-url", metavar="URL", help="address of an S3 service other than AWS")
    group.add_argument("--profile", metavar="NAME", help="profile of ~/.aws, which every node must have")


def _count(text: str) -> int:
    return _whole(text, least=1)


def _width(text: str) -> int:
    width = _count(text)
    if width % 4:
        raise argparse.ArgumentTypeError(f"{text!r} is no multiple of 4")
    return width


def _natural(text: str) -> int:
    return _whole(text, least=0)


def _whole(text: str, *, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} up")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _url(text: str) -> str:
    scheme, key = split_url(text) if text else ("", "")
    if scheme not in ("s3", "file") or not key.strip("/") or (scheme == "s3" and key.startswith("/")):
        raise argparse.ArgumentTypeError(f"{text!r} is neither s3://bucket/... nor a local path")
    return text


def _absolute(url: str) -> str:
    """A local path as every process of this machine understands it."""
    scheme, key = split_url(url)
    return os.path.abspath(os.path.expanduser(key)) if scheme == "file" else url.rstrip("/")


def _check_gpu(settings: SpeechSettings) -> None:
    """On a machine alone no GPU will come; in a cluster the run waits for one, and says so."""
    if not settings.use_gpu or given_cluster() is not None:
        return
    import torch

    if torch.cuda.device_count() < settings.num_workers:
        raise ConfigurationError(
            f"this machine has {torch.cuda.device_count()} of {settings.num_workers} GPU(s)",
            next_step="give --cpu, or submit the script to a cluster: ray job submit --help",
        )
