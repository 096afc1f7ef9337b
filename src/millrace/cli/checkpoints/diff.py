"""`millrace checkpoints diff`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from millrace.cli.checkpoints.common import (
    DIFFERENT,
    Display,
    all_option,
    checkpoint_url,
    cut,
    keys_option,
    options_of,
    print_table,
    shape_text,
    threads_option,
    trust_option,
    trusted_types,
)
from millrace.cli.commands import LibraryCommand
from millrace.cli.common import endpoint_option, json_option, print_json, shown
from millrace.errors import printable
from millrace.figures import size_text

if TYPE_CHECKING:
    from millrace.checkpoint.tools.diffing import DiffReport, TensorChange


@click.command(cls=LibraryCommand)
@click.argument("a")
@click.argument("b", required=False)
@click.option(
    "--step",
    "steps",
    type=click.IntRange(min=0),
    metavar="N",
    multiple=True,
    help="The checkpoint of this step of a run. Once: for A and B. Twice: for A, then for B.",
)
@keys_option
@all_option
@trust_option
@threads_option
@endpoint_option
@json_option
def diff(
    a: str,
    b: str | None,
    steps: tuple[int, ...],
    keys: tuple[str, ...],
    everything: bool,
    trust: tuple[str, ...],
    threads: int | None,
    endpoint_url: str | None,
    as_json: bool,
) -> int:
    """Show the tensors and objects that differ between checkpoints A and B, and by how much.

    A and B are checkpoints, or runs (the newest complete checkpoint, or that of --step). Two steps of one run:
    'diff RUN --step 100 --step 200'. 'changed' counts the elements that differ in at least one bit; 'max' and 'mean' are
    absolute differences, 'relative' is |B - A| / |A| in the Euclidean norm. Parts with equal checksums are not read.

    Exit code 0: equal. 3: different.
    """
    from millrace.checkpoint.tools.diffing import diff_checkpoints

    if len(steps) > 2:
        raise click.UsageError("diff takes --step at most twice")
    if b is None and len(steps) != 2:
        raise click.UsageError("diff takes two checkpoints, or one run and --step twice")
    first, second = (steps[0], steps[-1]) if steps else (None, None)
    one, other = checkpoint_url(a, first, endpoint_url), checkpoint_url(b or a, second, endpoint_url)
    display = Display("compared")
    with shown(display):
        report = diff_checkpoints(
            one,
            other,
            keys=keys,
            target_options=(options_of(one, endpoint_url), options_of(other, endpoint_url)),
            threads=threads,
            trusted_types=trusted_types(trust),
            progress=display,
        )
    if as_json:
        print_json({**asdict(report), "same": report.same})
    else:
        _show(report, everything=everything)
    return 0 if report.same else DIFFERENT


def _show(report: DiffReport, *, everything: bool) -> None:
    click.echo(f"A {report.urls[0]}\nB {report.urls[1]}")
    _names("only in A", report.removed, everything=everything)
    _names("only in B", report.added, everything=everything)
    others = [change for change in report.tensors if change.changed is None]
    changed = [change for change in report.tensors if change.changed is not None]
    figures = ("changed", "max", "mean", "relative")
    for columns, rows in (
        (("other dtype or shape", "A", "B"), [_other(change) for change in others]),
        (("changed tensors", "dtype", "shape", *figures), [_changed(change) for change in changed]),
        (("changed objects", "A", "B"), [(c.key, c.before[:60], c.after[:60]) for c in report.objects]),
    ):
        if rows:
            click.echo("")
            print_table(columns, rows, everything=everything, right=figures)
    different = len(report.tensors) + len(report.objects)
    click.echo(
        f"\n{report.equal} equal, {different} changed, {len(report.removed)} only in A, {len(report.added)} only in B; "
        f"{size_text(report.compared_bytes)} compared, {size_text(report.skipped_bytes)} equal by checksum"
    )


def _names(title: str, keys: Sequence[str], *, everything: bool) -> None:
    rows, more = cut(keys, everything=everything)
    if rows:
        click.echo(
            f"\n{title}: {printable(', '.join(rows))}" + (f" and {more} more (--all shows them)" if more else "")
        )


def _other(change: TensorChange) -> tuple[str, str, str]:
    a, b = (f"{dtype} {shape_text(shape)}" for dtype, shape in zip(change.dtype, change.shape, strict=True))
    return change.key, a, b


def _changed(change: TensorChange) -> tuple[str, ...]:
    share = 100 * (change.changed or 0) / change.elements
    # 100% and 0% are reserved for all and none.
    text = "100%" if change.changed == change.elements else f"{min(max(share, 0.01), 99.99):.3g}%"
    if change.not_finite:
        text += f" ({change.not_finite} inf or nan)"
    return (
        change.key,
        change.dtype[1],
        shape_text(change.shape[1]),
        text,
        *("-" if value is None else f"{value:.3g}" for value in (change.max_abs, change.mean_abs, change.relative_l2)),
    )
