"""`millrace checkpoints verify`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from millrace.cli.checkpoints.common import (
    DIFFERENT,
    Display,
    checkpoint_url,
    is_checkpoint,
    options_of,
    step_option,
    threads_option,
)
from millrace.cli.commands import LibraryCommand
from millrace.cli.common import counted, duration_text, endpoint_option, json_option, print_json, print_note, shown
from millrace.errors import CheckpointNotFoundError, UsageError, printable
from millrace.figures import listed, size_text

if TYPE_CHECKING:
    from millrace.checkpoint.tools.verifying import VerifyReport

_KEYS = 5


@click.command(cls=LibraryCommand)
@click.argument("url")
@step_option
@click.option("--all", "every", is_flag=True, help="Verify every complete checkpoint of the run, one after the other.")
@threads_option
@endpoint_option
@json_option
def verify(
    url: str, step: int | None, every: bool, threads: int | None, endpoint_url: str | None, as_json: bool
) -> int:
    """Read every stored byte of a checkpoint, and of the checkpoints that it is a delta to, and check the checksums.

    Prints each damaged chunk or file and the tensors that it affects. Changes nothing. Checkpoints of torch's own writer
    have no checksums and are an error.

    Exit code 3: damage was found. 1: something could not be checked.
    """
    from millrace.checkpoint.tools.verifying import verify_checkpoint

    if every and step is not None:
        raise click.UsageError("verify takes --step or --all, not both")
    urls = _all_of(url, endpoint_url) if every else [checkpoint_url(url, step, endpoint_url)]
    reports = []
    for place in urls:
        display = Display("checked")
        try:
            with shown(display):
                report = verify_checkpoint(place, options_of(place, endpoint_url), threads=threads, progress=display)
        except CheckpointNotFoundError as error:
            if not every:
                raise
            print_note(f"{error.message}: not counted")  # pruned since it was listed
            continue
        reports.append(report)
        if not as_json:
            _show(report)
    if as_json:
        content = [{**asdict(each), "ok": each.ok, "damaged_keys": each.damaged_keys} for each in reports]
        print_json(content)
    elif len(reports) > 1:
        bad = sum(not each.ok for each in reports)
        click.echo(f"{len(reports)} checkpoints: {f'{bad} damaged' if bad else 'all good'}")
    return 0 if all(each.ok for each in reports) else DIFFERENT


def _all_of(url: str, endpoint_url: str | None) -> Sequence[str]:
    from millrace.checkpoint.run.run_layout import open_run

    options = options_of(url, endpoint_url)
    if is_checkpoint(url, options):
        raise UsageError(f"{url} is one checkpoint, not a run", next_step="omit --all, or give the URL of the run")
    run = open_run(url, options)
    found = [run.url_of(each.name) for each in run.scan() if each.complete]
    if not found:
        raise CheckpointNotFoundError(f"{url}: no complete checkpoint found", next_step="check the name")
    return found


def _show(report: VerifyReport) -> None:
    for damage in report.damages:
        what = damage.file if damage.chunk is None else f"chunk {damage.chunk} in {damage.file}"
        click.echo(printable(f"{what}: {damage.problem}{_touched(damage.keys)}"))
    speed = f" ({size_text(report.stored_bytes / report.seconds)}/s)" if report.seconds else ""
    # Without a manifest the keys are unknown.
    lost = _lost(len(report.damaged_keys)) if report.damaged_keys or report.files else "its tensors and objects"
    verdict = "all good" if report.ok else f"{counted(len(report.damages), 'problem')}, {lost} cannot be read"
    click.echo(
        f"{report.url}: {counted(report.chunks, 'chunk')} in {counted(report.files, 'file')} checked, "
        f"{size_text(report.stored_bytes)} in {duration_text(report.seconds)}{speed}: {verdict}"
    )
    if not report.decoded:
        click.echo(
            "it uses extensions that are not installed: the stored bytes were checked, the decoded values were not"
        )


def _lost(count: int) -> str:
    return "1 tensor or object" if count == 1 else f"{count} tensors and objects"


def _touched(keys: Sequence[str]) -> str:
    return f"; affects {listed(keys, _KEYS)}" if keys else ""
