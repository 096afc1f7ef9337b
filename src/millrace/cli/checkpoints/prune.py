"""`millrace checkpoints prune`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from millrace.cli.checkpoints.common import (
    Display,
    all_option,
    counted,
    cut,
    date_text,
    is_checkpoint,
    options_of,
    shown,
    step_text,
    table,
)
from millrace.cli.common import endpoint_option, json_option
from millrace.figures import size_text

if TYPE_CHECKING:
    from millrace.checkpoint.run.pruning import PruneReport
    from millrace.checkpoint.run.retention import Policy
    from millrace.checkpoint.run.run_info import CheckpointInfo
    from millrace.checkpoint.run.run_layout import Run


@click.command()
@click.argument("url")
@click.option(
    "--keep",
    required=True,
    metavar="POLICY",
    help="What stays: last=5, every=1000 (steps), best=loss:min:2, newer=7d (90s, 12h, 2w); several with commas.",
)
@click.option("--dry-run", is_flag=True, help="Show what would go, and remove nothing.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@all_option
@endpoint_option
@json_option
def prune(
    url: str, keep: str, dry_run: bool, yes: bool, everything: bool, endpoint_url: str | None, as_json: bool
) -> None:
    """Remove the checkpoints of a run that no part of POLICY keeps, and what dead saves have left.

    The newest checkpoint stays in any case, and so does every file that a kept checkpoint needs: deltas stay whole. A
    process that saves into the run meanwhile is not disturbed. Killed at any moment, it leaves every checkpoint that is
    still listed whole, and the same command goes on.
    """
    from millrace.checkpoint.run.pruning import prune as prune_run
    from millrace.checkpoint.run.retention import parse_policy
    from millrace.checkpoint.run.run_layout import open_run
    from millrace.errors import UsageError

    policy = parse_policy(keep)
    options = options_of(url, endpoint_url)
    if is_checkpoint(url, options):
        raise UsageError(f"{url} is one checkpoint, not a run", next_step="give the run's URL")
    run = open_run(url, options)
    infos = _infos(run)
    plan = prune_run(run, policy, dry_run=True)
    if not as_json:
        _show(plan, infos, policy, everything=everything)
    if not dry_run and plan.deleted_files:
        if not (yes or _agreed(plan)):
            click.echo("nothing was removed")
            return
        with shown(Display("removed"), after="the same command goes on"):
            plan = prune_run(run, policy)
    if as_json:
        click.echo(json.dumps(asdict(plan)))
    elif not dry_run and plan.deleted_files:
        click.echo(f"{counted(len(plan.removed), 'checkpoint')} removed, {size_text(plan.freed_bytes)} freed")


def _infos(run: Run) -> Sequence[CheckpointInfo]:
    """The run's checkpoints, as far as they can be read. Raises `CheckpointNotFoundError` where there are none."""
    from millrace.errors import CheckpointNotFoundError, MillraceError, MissingError

    try:
        found = run.scan()
    except MissingError:
        found = []
    if not found:
        raise CheckpointNotFoundError(f"no checkpoint lies at {run.url}", next_step="give the directory of a run")
    return [info for info in run.describe_all(found).values() if not isinstance(info, MillraceError)]


def _agreed(plan: PruneReport) -> bool:
    if not sys.stdin.isatty():
        raise click.UsageError("prune without --yes, and nobody to ask")
    what = counted(len(plan.removed), "checkpoint") if plan.removed else counted(plan.deleted_files, "file")
    return click.confirm(f"Remove {what} ({size_text(plan.freed_bytes)})?", err=True)


def _show(plan: PruneReport, infos: Sequence[CheckpointInfo], policy: Policy, *, everything: bool) -> None:
    reasons = _reasons(infos, policy)
    by_name = {info.name: info for info in infos}
    names = sorted({*plan.removed, *plan.kept} & by_name.keys(), key=lambda name: (by_name[name].step, name))
    lines = [
        (
            step_text(by_name[name].step, by_name[name].revision),
            date_text(by_name[name].created),
            size_text(by_name[name].stored_bytes),
            *_verdict(name, plan, reasons),
        )
        for name in names
    ]
    rows, more = cut(lines, everything=everything)
    for line in table(("step", "time", "size", "", "why"), rows, right=("step", "size")):
        click.echo(line)
    if more:
        click.echo(f"... and {more} more (--all shows them)")
    for name in plan.unreadable:
        click.echo(f"{name} cannot be read, and stays with what it may need")
    if plan.leftovers:
        click.echo(f"{counted(len(plan.leftovers), 'file')} that dead saves have left will go, too")
    kept = counted(len(plan.kept), "checkpoint")
    if plan.deleted_files:
        click.echo(f"{kept} of {len(names)} stay; {size_text(plan.freed_bytes)} in {plan.deleted_files} files go")
    else:
        click.echo(f"{kept} stay: there is nothing to remove")


def _verdict(name: str, plan: PruneReport, reasons: dict[str, list[str]]) -> tuple[str, str]:
    if name in plan.kept:
        return "stays", ", ".join(reasons.get(name, ())) or "the newest, or the next save builds on it"
    return "goes", "its data stays: others need it" if plan.kept_for_others.get(name) else "no policy keeps it"


def _reasons(infos: Sequence[CheckpointInfo], policy: Policy) -> dict[str, list[str]]:
    """Which parts of the policy keep each checkpoint."""
    from millrace.checkpoint.run.retention import AnyOf

    complete = sorted((info for info in infos if info.complete), key=lambda info: (info.step, info.revision))
    found: dict[str, list[str]] = {}
    for part in policy.policies if isinstance(policy, AnyOf) else (policy,):
        for name in part.keep(complete, now=time.time()):
            found.setdefault(name, []).append(str(part))
    return found
