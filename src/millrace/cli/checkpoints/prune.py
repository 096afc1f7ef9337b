"""`millrace checkpoints prune`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.checkpoints.common import (
    Display,
    all_option,
    checkpoints_in,
    date_text,
    is_checkpoint,
    options_of,
    print_table,
    step_text,
)
from millrace.cli.commands import LibraryCommand
from millrace.cli.common import counted, endpoint_option, is_terminal, json_option, print_json, shown
from millrace.errors import MillraceError, UsageError
from millrace.figures import size_text

if TYPE_CHECKING:
    from millrace.checkpoint.run.pruning import PruneReport
    from millrace.checkpoint.run.retention import Policy
    from millrace.checkpoint.run.run_info import CheckpointInfo
    from millrace.checkpoint.run.run_layout import Run


@click.command(cls=LibraryCommand)
@click.argument("url")
@click.option(
    "--keep",
    required=True,
    metavar="POLICY",
    help="Checkpoints to keep: 5 or last=5, every=1000 (steps), best=loss:min:2, newer=7d (90s, 12h, 2w); comma-separated.",
)
@click.option(
    "--no-independent", is_flag=True, help="Do not keep an extra checkpoint that shares no file with the newest."
)
@click.option("--dry-run", is_flag=True, help="Show the plan, and remove nothing.")
@click.option("--yes", "-y", is_flag=True, help="Remove without a confirmation.")
@all_option
@endpoint_option
@json_option
def prune(
    url: str,
    keep: str,
    no_independent: bool,
    dry_run: bool,
    yes: bool,
    everything: bool,
    endpoint_url: str | None,
    as_json: bool,
) -> None:
    """Remove the checkpoints of a run that POLICY does not keep, and the leftovers of failed saves.

    Always kept: the newest checkpoint, the last one that shares no file with it, and every file that a kept checkpoint
    needs. A policy that matches no checkpoint, as with a misspelt metric, is an error. Processes may save into the run at
    the same time. If the command is killed, every checkpoint that is still listed stays complete; run the command again
    to continue.
    """
    from millrace.checkpoint.run.pruning import prune as prune_run
    from millrace.checkpoint.run.retention import parse_policy
    from millrace.checkpoint.run.run_layout import open_run

    policy = parse_policy(keep)
    options = options_of(url, endpoint_url)
    if is_checkpoint(url, options):
        raise UsageError(f"{url} is one checkpoint, not a run", next_step="give the URL of the run")
    run = open_run(url, options, read_through="auto")
    infos = _infos(run, url, options)
    plan = prune_run(run, policy, dry_run=True, independent=not no_independent, strict=bool(infos))
    if not as_json:
        _show(plan, infos, policy, everything=everything)
    if not dry_run and plan.deleted_files:
        if not (yes or _agreed(plan)):
            click.echo("nothing was removed")
            return
        with shown(Display("removed"), after="run the same command again to continue"):
            plan = prune_run(run, policy, independent=not no_independent)
    if as_json:
        print_json(asdict(plan))
    elif not dry_run and plan.deleted_files:
        click.echo(f"{counted(len(plan.removed), 'checkpoint')} removed, {size_text(plan.freed_bytes)} freed")


def _infos(run: Run, url: str, options: Mapping[str, Any] | None) -> Sequence[CheckpointInfo]:
    """The readable checkpoints of the run. Raises `CheckpointNotFoundError` for a URL without a run."""
    found = checkpoints_in(run, url, options)
    return [info for info in run.describe_all(found).values() if not isinstance(info, MillraceError)]


def _agreed(plan: PruneReport) -> bool:
    if not is_terminal(sys.stdin):
        raise click.UsageError("prune needs --yes, because stdin is not a terminal")
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
    print_table(("step", "time", "size", "", "why"), lines, everything=everything, right=("step", "size"))
    for name in plan.unreadable:
        click.echo(f"{name} cannot be read: it stays, with all files that it may need")
    if plan.leftovers:
        click.echo(f"{counted(len(plan.leftovers), 'file')} left by failed saves will be removed")
    kept = counted(len(plan.kept), "checkpoint")
    if plan.deleted_files:
        click.echo(
            f"{kept} of {len(names)} stay; {size_text(plan.freed_bytes)} in {plan.deleted_files} files will be removed"
        )
    else:
        click.echo(f"{kept} stay: there is nothing to remove")


def _verdict(name: str, plan: PruneReport, reasons: dict[str, list[str]]) -> tuple[str, str]:
    if name in plan.kept:
        return "stays", ", ".join(reasons.get(name, ())) or "shares no file with the newest"
    return "removed", "its data stays: others need it" if plan.kept_for_others.get(name) else "not in the policy"


def _reasons(infos: Sequence[CheckpointInfo], policy: Policy) -> dict[str, list[str]]:
    """Why each checkpoint stays: the parts of the policy, or the next save that may build on it."""
    from millrace.checkpoint.run.prune_plan import bases_of_the_next_save
    from millrace.checkpoint.run.retention import AnyOf, kept_names

    complete = sorted((info for info in infos if info.complete), key=lambda info: (info.step, info.revision))
    found: dict[str, list[str]] = {}
    for part in policy.policies if isinstance(policy, AnyOf) else (policy,):
        for name in kept_names(part, complete, now=time.time()):
            found.setdefault(name, []).append(str(part))
    for name in bases_of_the_next_save(complete) - found.keys():
        found[name] = ["the newest, or the next save builds on it"]
    return found
