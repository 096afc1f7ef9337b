"""The whole way on this machine: speech from a real S3 server through the cache into training, checkpoints back.

`make demo` runs it. It uploads the sample clips to an S3 server of its own, trains for several epochs, kills the training
process once, resumes, and ends with a table and a report. Every clip is read through an emulated region, which adds 15 ms
to each request and counts the bytes: an independent check of the cache's own count. All files stay in one folder, and a
second run there finds the clips uploaded and cached.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import millrace
from finetune.options import (
    SMALL_EPOCHS,
    Settings,
    default_epochs,
    default_learning_rate,
    positive_int,
    run_script,
    show,
)
from millrace.errors import DiskFullError, StorageError
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server
from sample_data import write_common_voice

DATA = "s3://datasets/common-voice-11-de"
NEEDED_BYTES = 1_500_000_000
_MIN_FREE = "2%"
SOCKET_PATH = "/r/session_2026-01-02_03-04-05_678901_4194304/sockets/plasma_store"
"""What Ray appends to its folder; the path of a socket has at most 107 characters."""

Progress = Callable[[str], None]


def main() -> None:
    """Run the demo with the options of the command line."""
    _handle_signals()
    options = _parser().parse_args()
    progress: Progress = _show_on_stderr if options.json else show
    try:
        result = run_demo(options, progress)
    except OSError as error:
        raise StorageError(str(error), next_step="choose another --directory") from error
    if options.json:
        print(json.dumps({name: value for name, value in result.items() if name != "table"}))
    else:
        print(f"\n{result['table']}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--directory", type=Path, default=Path("millrace-demo"), help="holds all files. Default: millrace-demo")
    add("--epochs", metavar="N", type=positive_int, help="passes over the clips. Default: 10 (ctc), 30 (whisper)")
    add("--workers", metavar="N", type=positive_int, default=1, help="training workers. Default: 1")
    add("--model", metavar="NAME", help="a Whisper or Wav2Vec2-BERT model: hub name or folder. Default: a small one")
    add("--family", choices=sorted(SMALL_EPOCHS), default="ctc", help="of the small model. Default: ctc")
    add("--no-chaos", action="store_true", help="do not kill the training process")
    add("--port", metavar="N", type=positive_int, help="port of the S3 server. Default: a free one")
    add("--quick", action="store_true", help="a cut-down run: every part works, but the model learns next to nothing")
    add("--json", action="store_true", help="print the result as JSON on stdout, progress on stderr")
    return parser


def run_demo(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Run all of it; returns the result as plain values. Nothing that it starts outlives it."""
    started = time.monotonic()
    directory: Path = options.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(directory).free) < NEEDED_BYTES:
        raise DiskFullError(f"{directory}: {free / 1e9:.1f} GB free of 1.5 GB", next_step="choose another --directory")
    with ExitStack() as stack:
        server = stack.enter_context(S3Server(directory / "s3", port=options.port))
        region = stack.enter_context(_region(server, directory / "region-port"))
        progress(f"S3 server on {server.endpoint_url}, read through an emulated region on {region.endpoint_url}")
        os.environ["MPLCONFIGDIR"] = str(directory / "matplotlib")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory / "torch")
        # Also for uncached access, and for the node that Ray starts.
        os.environ |= {"MILLRACE_CACHE_DIR": str(directory / "cache-outputs"), "MILLRACE_MIN_FREE": _MIN_FREE}
        cache = {"members": "none", "min_free": _MIN_FREE}
        data = millrace.filesystem(
            "s3",
            target_options={**server.target_options, "endpoint_url": region.endpoint_url},
            cache_dir=str(directory / "cache"),
            consistency="immutable",
            **cache,
        )
        outputs = millrace.filesystem("s3", target_options=server.target_options, consistency="always", **cache)
        _upload(server, outputs, directory / "common-voice", progress)
        settings = _settings(options)
        region.reset()
        origin_bytes = data.cache_counters()["origin_bytes"]
        progress("starting Ray on this machine")
        stack.enter_context(_private_ray(directory, settings))
        # Only now: Ray reads its environment when it is imported.
        from finetune.report import REPORT, megabytes, summary
        from finetune.run import fine_tune

        places = {name: str(directory / name) for name in ("s3", "cache", "common-voice")}
        result = fine_tune(settings, data, outputs, progress=progress, places=places)
        report = directory / REPORT
        report.write_bytes(outputs.cat_file(f"{settings.run}/{REPORT}"))
        read = region.stats(prefix=f"/{DATA.removeprefix('s3://')}/").by_method.get("GET")
        witness_bytes = read.bytes_down if read else 0
        origin_bytes = data.cache_counters()["origin_bytes"] - origin_bytes
    seconds = time.monotonic() - started
    look = shlex.join([sys.executable, "-m", "millrace.testing.s3", "--dir", str(directory / "s3")])
    return {
        "table": f"{summary(result)}\n"
        f"origin: {megabytes(origin_bytes)} by the cache's count, {megabytes(witness_bytes)} by the region's\n\n"
        f"report        {report}\nlook inside   {look}\ndone in {seconds:.0f} s",
        "run": settings.run,
        "report": str(report),
        "epochs": [{**asdict(epoch), "seconds": epoch.seconds} for epoch in result.epochs],
        "checkpoints": {epoch: asdict(saved) for epoch, saved in result.checkpoints.items()},
        "metrics": result.metrics,
        "restarts": result.restarts,
        "recovery_seconds": result.recovery_seconds,
        "origin_bytes": origin_bytes,
        "witness_bytes": witness_bytes,
        "seconds": seconds,
    }


def _settings(options: argparse.Namespace) -> Settings:
    settings = Settings(
        data=DATA,
        run=f"s3://runs/{time.strftime('%Y%m%d-%H%M%S')}",
        model=options.model,
        family=options.family,
        epochs=default_epochs(options.model, options.family),
        learning_rate=default_learning_rate(options.model, options.family),
        workers=options.workers,
    )
    if options.quick:
        settings = replace(settings, hidden_size=32, layers=1, epochs=3, train_clips=48, dev_clips=8, test_clips=12)
    settings = replace(settings, epochs=options.epochs or settings.epochs)
    kill = None if options.no_chaos else settings.epochs // 2 + 1
    return replace(settings, kill_in_epoch=kill)


def _upload(server: S3Server, fs: millrace.MillraceFileSystem, folder: Path, progress: Progress) -> None:
    """Write the sample clips to `folder`, and upload the files that the bucket does not have."""
    counts = write_common_voice(folder)
    progress(f"data set: {', '.join(f'{count} {split}' for split, count in counts.items())} clips in {folder}")
    for bucket in ("datasets", "runs"):
        server.create_bucket(bucket)
    base = DATA.removeprefix("s3://")
    stored = {info.key: info.size for page in fs.list_all(base) for info in page}
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    missing = [path for path in files if stored.get(f"{base}/{path.relative_to(folder)}") != path.stat().st_size]
    for path in missing:
        fs.pipe_file(f"{base}/{path.relative_to(folder)}", path.read_bytes())
    progress(
        f"uploaded {len(missing)} of {len(files)} files to {DATA}" if missing else f"{DATA} is from an earlier run"
    )


def _region(server: S3Server, memory: Path) -> EmulatedRegion:
    """The emulated region, on the port of the last run if that is free: the cache identifies an origin by its address."""
    port = None
    if memory.exists():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port = int(memory.read_text())
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                port = None  # another program uses it, and the clips are fetched again
    region = EmulatedRegion(server.endpoint_url, port=port).start()
    memory.write_text(region.endpoint_url.rpartition(":")[2])
    return region


@contextmanager
def _private_ray(directory: Path, settings: Settings) -> Iterator[None]:
    """Ray on the loopback interface with a token, and with its files in `directory` if the path is short enough."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # Without this, Ray uses the network card instead of loopback.
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
    # Nothing drains this machine: Ray Train need not start a process that waits for it.
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
    # The run kills a process on purpose and reports this itself.
    os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "A worker died or was killed"
    os.environ.pop("RAY_ADDRESS", None)
    folder = directory / "ray"
    if len(f"{folder}{SOCKET_PATH}") > 107:
        folder = Path(tempfile.mkdtemp(prefix="ray-"))
    _remove(folder)
    folder.mkdir(mode=0o700)  # Ray lets every user write to the folder that it makes below
    atexit.register(_remove, folder)  # runs after Ray's own exit handlers, which are registered later
    import ray

    from finetune.run import start_ray

    try:
        start_ray(
            settings,
            address="local",
            object_store_memory=256 << 20,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder / "r"),
        )
        _handle_signals()  # Ray has replaced the handlers
        yield
    finally:
        ray.shutdown()


def _remove(folder: Path) -> None:
    """Remove Ray's folder, into which processes that end may write a last line."""
    for _ in range(40):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.25)


def _handle_signals() -> None:
    """End in good order on SIGTERM and SIGHUP, as on Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)


def _exit(number: int, _frame: Any) -> None:
    sys.exit(128 + number)


def _show_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_script(main)
