"""The main job, as `millrace demo` runs it: speech from S3 through the cache into training, and out as checkpoints.

Everything lies in one folder: the S3 server's data, the cache, the data set, the report. A second run there finds the data
set uploaded and cached. The data set is read through an emulated region, which makes the server seem 15 ms away, and which
counts every byte on its own: the table's "from origin" can be held against a witness that is no part of the cache.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import millrace
from millrace.demo import interrupts
from millrace.demo.disk import local_files
from millrace.demo.environment import defaults
from millrace.demo.needs import SPEECH_MODULES, check_modules
from millrace.demo.speech.defaults import SMALL_EPOCHS, learning_rate_for
from millrace.demo.speech.settings import FamilyName, SpeechSettings
from millrace.demo.speech_data import write_common_voice
from millrace.demo.summary import epoch_table, error_rates, exactness, megabytes, outputs
from millrace.errors import ConfigurationError, DiskFullError, StorageError
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

if TYPE_CHECKING:
    from millrace.demo.speech.run import SpeechResult

DATA_BUCKET = "datasets"
RUN_BUCKET = "runs"
DATA_PREFIX = "common-voice-11-de"

_NEEDED_BYTES = 1_500_000_000
_NEEDED_MODULES = (*SPEECH_MODULES, "matplotlib")

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What a user may choose. `directory` holds everything; `model` is a local folder or a hub name, None builds a small one
    of `family`."""

    directory: Path
    epochs: int | None = None
    workers: int = 1
    chaos: bool = True
    model: str | None = None
    family: FamilyName = "ctc"
    quick: bool = False
    port: int | None = None

    def __post_init__(self) -> None:
        for name, most in (("epochs", None), ("workers", None), ("port", 65535)):
            value = getattr(self, name)
            if value is None and name != "workers":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most and value > most):
                limit = f"from 1 to {most}" if most else "from 1 up"
                raise ConfigurationError(f"{name} is {value!r}", next_step=f"give a whole number {limit}")


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """What a demo run did.

    `origin_bytes` is what the cache says that it fetched of the data set from the start of the training to its end.
    `witness_bytes` is what the emulated region sent in answer to GET requests for the data set in the same time.
    """

    speech: SpeechResult
    run_url: str
    report: Path
    model_url: str
    server_directory: Path
    witness_bytes: int
    origin_bytes: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The result as plain values."""
        return {
            "run_url": self.run_url,
            "report": str(self.report),
            "model_url": self.model_url,
            "server_directory": str(self.server_directory),
            "epochs": [asdict(epoch) for epoch in self.speech.epochs],
            "metrics": self.speech.metrics,
            "restarts": self.speech.restarts,
            "kill": self.speech.kill,
            "recovery_seconds": self.speech.recovery_seconds,
            "origin_bytes": self.origin_bytes,
            "witness_bytes": self.witness_bytes,
            "seconds": self.seconds,
        }


def run_demo(settings: DemoSettings, progress: Progress) -> DemoResult:
    """Run the whole job; `progress` gets one line of text at a time.

    Raises `MillraceError` with the next step when something that it needs is missing or fails. Whatever happens, no process
    that it started is left. SIGTERM and SIGHUP come as `KeyboardInterrupt`, like Ctrl-C.
    """
    started = time.monotonic()
    check_modules(_NEEDED_MODULES, what="the demo", next_step="pip install 'millrace[demo]', or use 'make demo'")
    _check_model(settings.model)
    directory = _prepare_directory(settings.directory)
    with ExitStack() as stack:
        stack.enter_context(interrupts.remembered())
        # What else would lie in the user's home: the budgets of origins that are opened without a cache, matplotlib's fonts.
        homes = {"MILLRACE_CACHE_DIR": directory / "cache", "MPLCONFIGDIR": directory / "matplotlib"}
        stack.enter_context(defaults({name: str(home) for name, home in homes.items()}))
        server = stack.enter_context(S3Server(directory / "s3", port=settings.port))
        region = stack.enter_context(_region(server, directory / "region-port"))
        progress(f"S3 server on {server.endpoint_url}, read through an emulated region on {region.endpoint_url}")

        fs = millrace.filesystem(
            "s3",
            target_options={**server.target_options, "endpoint_url": region.endpoint_url},
            cache_dir=str(directory / "cache"),
            consistency="immutable",
            members="none",
            min_free="2%",
        )
        # What changes while the run lasts (log, metrics, model) is read past the cache's memory of it.
        run_fs = millrace.filesystem(
            "s3",
            target_options=server.target_options,
            cache_dir=str(directory / "cache-runs"),
            consistency="always",
            members="none",
            min_free="2%",
        )
        _upload_data_set(server, run_fs, directory / "common-voice", progress)

        run_url = f"s3://{RUN_BUCKET}/{time.strftime('%Y%m%d-%H%M%S')}"
        speech = _speech_settings(settings, run_url)
        region.reset()
        before = fs.cache_counters()["origin_bytes"]
        from millrace.demo.speech.run import REPORT_NAME, run_speech

        result = run_speech(
            speech,
            fs,
            run_fs=run_fs,
            counters=partial(fs.cache_counters, settled=True),
            checkpoint_options=server.target_options,
            progress=progress,
            places={
                "S3 server's data": str(directory / "s3"),
                "Cache": str(directory / "cache"),
                "Data set on disk": str(directory / "common-voice"),
            },
        )
        witness = region.stats(prefix=f"/{DATA_BUCKET}/{DATA_PREFIX}/").by_method.get("GET")
        report = directory / REPORT_NAME
        with local_files(report):
            report.write_bytes(run_fs.cat_file(f"{run_url}/{REPORT_NAME}"))
        return DemoResult(
            speech=result,
            run_url=run_url,
            report=report,
            model_url=f"{run_url}/model",
            server_directory=directory / "s3",
            witness_bytes=witness.bytes_down if witness else 0,
            origin_bytes=fs.cache_counters()["origin_bytes"] - before,
            seconds=time.monotonic() - started,
        )


def summary_table(result: DemoResult) -> str:
    """The closing table, for a terminal."""
    speech = result.speech
    look = [sys.executable, "-m", "millrace.testing.s3", "--dir", str(result.server_directory)]
    return "\n".join(
        [
            "",
            epoch_table(speech),
            "",
            error_rates(speech),
            exactness(speech),
            f"origin: {megabytes(result.origin_bytes)} by the cache's own count, {megabytes(result.witness_bytes)} by the "
            "region's",
            "",
            f"report        {result.report}",
            f"in the bucket {outputs(speech)}",
            f"look inside   {shlex.join(look)}",
            f"done in {result.seconds:.0f} s",
        ]
    )


def _check_model(model: str | None) -> None:
    """A folder that is not there would be looked for on the hub, and only when the training has started."""
    if model is not None and model.startswith(("/", ".", "~")) and not os.path.isdir(model):
        raise ConfigurationError(
            f"--model {model} is no folder", next_step="name a local folder, or a model of the hub"
        )


def _prepare_directory(directory: Path) -> Path:
    try:
        directory = directory.absolute()
    except OSError as error:
        raise StorageError(
            f"{directory}: the current directory is gone", next_step="change to one that exists"
        ) from error
    with local_files(directory):
        directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(directory).free
    if not os.access(directory, os.W_OK):
        raise StorageError(f"{directory} cannot be written", next_step="choose another --directory")
    if free < _NEEDED_BYTES:
        raise DiskFullError(
            f"{directory} has {free / 1e9:.1f} GB free, the demo needs {_NEEDED_BYTES / 1e9:.1f} GB",
            next_step="free some, or choose another --directory",
        )
    return directory


def _region(server: S3Server, memory: Path) -> EmulatedRegion:
    """An emulated region on the port of the last run, where that is free: the cache knows an origin by its address."""
    try:
        port = int(memory.read_text())
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except (OSError, OverflowError, ValueError):
        port = None  # the first run here, or somebody else has the port by now: what is cached is not used then
    region = EmulatedRegion(server.endpoint_url, port=port).start()
    try:
        with local_files(memory):
            memory.write_text(region.endpoint_url.rpartition(":")[2])
    except BaseException:
        region.stop()
        raise
    return region


def _upload_data_set(server: S3Server, fs: millrace.MillraceFileSystem, directory: Path, progress: Progress) -> None:
    """Write the data set to disk and put what is not yet there into the bucket."""
    written = write_common_voice(directory)
    clips = ", ".join(f"{count} {split}" for split, count in written.clips.items())
    progress(f"data set: {clips} clips, {written.total_bytes / 1e6:.1f} MB, in {directory}")
    server.create_bucket(DATA_BUCKET)
    server.create_bucket(RUN_BUCKET)
    base = f"{DATA_BUCKET}/{DATA_PREFIX}"
    there = {info.key: info.size for page in fs.list_all(base) for info in page}
    with local_files(directory):
        missing = [name for name in written.files if there.get(f"{base}/{name}") != (directory / name).stat().st_size]
    for number, name in enumerate(missing, start=1):
        with local_files(directory):
            content = (directory / name).read_bytes()
        fs.pipe_file(f"{base}/{name}", content)
        if number % 100 == 0 or number == len(missing):
            progress(f"uploaded {number} of {len(missing)} files to s3://{base}")
    if not missing:
        progress(f"s3://{base} is there from an earlier run")


def _speech_settings(settings: DemoSettings, run_url: str) -> SpeechSettings:
    speech = SpeechSettings(
        data_url=f"s3://{DATA_BUCKET}/{DATA_PREFIX}",
        run_url=run_url,
        model=settings.model,
        family=settings.family,
        epochs=SMALL_EPOCHS[settings.family],
        learning_rate=learning_rate_for(settings.model, settings.family),
        num_workers=settings.workers,
    )
    if settings.quick:
        speech = speech.quick()
    if settings.epochs is not None:
        kill = min(speech.kill_in_epoch or 1, settings.epochs)
        speech = replace(speech, epochs=settings.epochs, kill_in_epoch=kill)
    return speech if settings.chaos else replace(speech, kill_in_epoch=None)


def result_json(result: DemoResult) -> str:
    """The result as one line of JSON."""
    return json.dumps(result.as_json(), ensure_ascii=False)
