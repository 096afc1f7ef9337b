"""`millrace checkpoints verify`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from millrace.cli.checkpoints.common import (
    DIFFERENT,
    Display,
    checkpoint_url,
    counted,
    duration_text,
    is_checkpoint,
    options_of,
    shown,
    step_option,
    threads_option,
)
from millrace.cli.common import endpoint_option, json_option
from millrace.figures import size_text

if TYPE_CHECKING:
    from millrace.checkpoint.tools.verifying import VerifyReport

_KEYS = 5


@click.command()
@click.argument("url")
@step_option
@click.option("--all", "every", is_flag=True, help="Every complete checkpoint of the run, one after the other.")
@threads_option
@endpoint_option
@json_option
def verify(
    url: str, step: int | None, every: bool, threads: int | None, endpoint_url: str | None, as_json: bool
) -> int:
    """Read every stored byte of a checkpoint and check it, and the checkpoints that it is a delta to.

    Checks both checksums of every chunk, and names what is damaged and which tensors that touches. Nothing is changed.
    Checkpoints of torch's own writer have no checksums to check.

    Exit code 3: damage was found. 1: something could not be checked.
    """
    from millrace.checkpoint.tools.verifying import verify_checkpoint

    if every and step is not None:
        raise click.UsageError("verify takes --step or --all, not both")
    urls = _all_of(url, endpoint_url) if every else [checkpoint_url(url, step, endpoint_url)]
    reports = []
    for place in urls:
        display = Display("checked")
        with shown(display):
            report = verify_checkpoint(place, options_of(place, endpoint_url), threads=threads, progress=display)
        reports.append(report)
        if not as_json:
            _show(report)
    if as_json:
        content = [{**asdict(each), "ok": each.ok, "damaged_keys": each.damaged_keys} for each in reports]
        click.echo("[" + ",\n ".join(json.dumps(each) for each in content) + "]")
    elif len(reports) > 1:
        bad = sum(not each.ok for each in reports)
        click.echo(f"{len(reports)} checkpoints: {f'{bad} damaged' if bad else 'all good'}")
    return 0 if all(each.ok for each in reports) else DIFFERENT


def _all_of(url: str, endpoint_url: str | None) -> Sequence[str]:
    from millrace.checkpoint.run.run_layout import open_run
    from millrace.errors import CheckpointNotFoundError, UsageError

    options = options_of(url, endpoint_url)
    if is_checkpoint(url, options):
        raise UsageError(f"{url} is one checkpoint, not a run", next_step="leave --all out, or give the run's URL")
    run = open_run(url, options)
    found = [run.url_of(each.name) for each in run.scan() if each.complete]
    if not found:
        raise CheckpointNotFoundError(f"no complete checkpoint lies at {url}", next_step="check the name")
    return found


def _show(report: VerifyReport) -> None:
    for damage in report.damages:
        what = damage.file if damage.chunk is None else f"chunk {damage.chunk} in {damage.file}"
        click.echo(f"{what}: {damage.problem}{_touched(damage.keys)}")
    speed = f" ({size_text(report.stored_bytes / report.seconds)}/s)" if report.seconds else ""
    verdict = (
        "all good"
        if report.ok
        else f"{counted(len(report.damages), 'problem')}, {len(report.damaged_keys)} tensors and objects cannot be read"
    )
    click.echo(
        f"{report.url}: {counted(report.chunks, 'chunk')} in {counted(report.files, 'file')} checked, "
        f"{size_text(report.stored_bytes)} in {duration_text(report.seconds)}{speed}: {verdict}"
    )
    if not report.decoded:
        click.echo(
            "it was written through extensions that are not known here: what is stored was checked, not what it decodes to"
        )


def _touched(keys: Sequence[str]) -> str:
    if not keys:
        return ""
    more = f" and {len(keys) - _KEYS} more" if len(keys) > _KEYS else ""
    return f"; touches {', '.join(keys[:_KEYS])}{more}"
