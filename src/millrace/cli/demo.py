"""`millrace demo`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from millrace.demo.speech.settings import FamilyName


@click.command()
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("millrace-demo"),
    show_default=True,
    help="Where everything is kept: server data, cache, data set, report.",
)
@click.option("--epochs", type=click.IntRange(min=1), help="Passes over the data set.")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Training workers.")
@click.option(
    "--model", help="A local folder or a hub name of a Whisper or Wav2Vec2 model; the default builds a small one."
)
@click.option(
    "--family", type=click.Choice(["ctc", "whisper"]), default="ctc", help="Of the small one.  [default: ctc]"
)
@click.option("--chaos/--no-chaos", default=True, help="Kill one training worker on purpose, once.  [default: chaos]")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of the S3 server; the default is a free one.")
@click.option(
    "--quick", is_flag=True, help="A cut-down run that shows that every part works; it learns next to nothing."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout, progress on stderr.")
def demo(
    directory: Path,
    epochs: int | None,
    workers: int,
    model: str | None,
    family: FamilyName,
    chaos: bool,
    port: int | None,
    quick: bool,
    as_json: bool,
) -> None:
    """Run the main job on this machine: speech from S3 through the cache into training, and out as checkpoints.

    Starts a real S3 server and Ray on loopback, uploads a small German speech set in the layout of Common Voice, trains a
    speech-to-text model for several epochs with a checkpoint after each, kills a worker on purpose, resumes, and ends with
    a table and a report. Everything it starts is gone when it ends.
    """
    from millrace.demo.main_job import DemoSettings, result_json, run_demo, summary_table

    started = time.monotonic()

    def progress(line: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {line}", file=sys.stderr if as_json else sys.stdout, flush=True)

    settings = DemoSettings(
        directory=directory,
        epochs=epochs,
        workers=workers,
        chaos=chaos,
        model=model,
        family=family,
        quick=quick,
        port=port,
    )
    result = run_demo(settings, progress)
    click.echo(result_json(result) if as_json else summary_table(result))
