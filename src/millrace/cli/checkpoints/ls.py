"""`millrace checkpoints ls`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.checkpoints.common import (
    checkpoints_in,
    date_text,
    is_checkpoint,
    iso_text,
    options_of,
    ratio_text,
    step_text,
)
from millrace.cli.commands import LibraryCommand
from millrace.cli.common import counted, endpoint_option, json_option, print_json, table
from millrace.cli.watch import interval_option, repeat, watch_option
from millrace.errors import MillraceError
from millrace.figures import size_text

if TYPE_CHECKING:
    from millrace.checkpoint.run.run_info import CheckpointInfo
    from millrace.checkpoint.run.run_layout import ListedCheckpoint


@click.command(cls=LibraryCommand)
@click.argument("url")
@watch_option
@interval_option
@endpoint_option
@json_option
def ls(url: str, watch: bool, interval: float, endpoint_url: str | None, as_json: bool) -> None:
    """List the checkpoints of a run: step, time, size, and the checkpoints that each one needs.

    'size' is the size of a checkpoint's own files, 'raw' that of its values, 'restore' the bytes that a load reads,
    including those of earlier checkpoints. A checkpoint whose save did not end is incomplete and cannot be loaded.
    """
    options = options_of(url, endpoint_url)

    def read() -> list[dict[str, Any]]:
        rows = [_single(url, options)] if is_checkpoint(url, options) else _run(url, options)
        return [{**row, "created": _iso(row["created"])} for row in rows] if as_json else rows

    if watch:
        repeat(read, _lines, interval=interval, as_json=as_json)
    elif as_json:
        print_json(read())
    else:
        click.echo("\n".join(_lines(read())))


def _single(url: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """One checkpoint, of Millrace or of torch."""
    from millrace.checkpoint.run.run_layout import describe_manifest, parse_name
    from millrace.checkpoint.storage.manifests import read_manifest
    from millrace.checkpoint.storage.storage import open_storage
    from millrace.checkpoint.tools import describe

    summary = describe(url, options)
    name = url.rstrip("/").rpartition("/")[2]
    if summary.format_version == 0:
        return _row(
            name=name,
            url=summary.url,
            step=None,
            created=summary.created,
            raw_bytes=summary.raw_bytes,
            stored_bytes=summary.stored_bytes,
            restore_bytes=summary.stored_bytes,
            kind="stock",
        )
    stored = read_manifest(open_storage(url, options))
    info = describe_manifest(summary.url, stored.manifest, stored.nbytes)
    return {**_of_info(info, ()), "step": info.step if parse_name(info.name) else None}


def _run(url: str, options: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    from millrace.checkpoint.run.run_layout import open_run
    from millrace.checkpoint.run.timeline import timeline

    run = open_run(url, options)
    found = checkpoints_in(run, url, options)
    described = run.describe_all(found)
    needed: dict[str, list[str]] = {}
    for known in described.values():
        if not isinstance(known, MillraceError):
            for base in known.bases:
                needed.setdefault(base, []).append(known.name)
    live = {each.name for each in timeline([each for each in found if each.complete])}
    rows = []
    for each in found:
        info = described.get(each.name)
        if info is None:  # removed after it was listed
            continue
        if isinstance(info, MillraceError):
            rows.append(_unreadable(each, run.url_of(each.name), info))
        else:
            rows.append({**_of_info(info, live), "needed_by": sorted(needed.get(info.name, ()))})
    return rows


def _of_info(info: CheckpointInfo, live: Iterable[str]) -> dict[str, Any]:
    return _row(
        name=info.name,
        url=info.url,
        step=info.step,
        revision=info.revision,
        complete=info.complete,
        superseded=info.superseded,
        abandoned=info.complete and not info.superseded and bool(live) and info.name not in live,
        created=info.created,
        raw_bytes=info.raw_bytes,
        stored_bytes=info.stored_bytes,
        restore_bytes=info.restore_bytes,
        kind=info.kind,
        bases=sorted(info.bases),
        metrics=dict(info.metrics),
        user=dict(info.user),
    )


def _unreadable(found: ListedCheckpoint, url: str, error: MillraceError) -> dict[str, Any]:
    return _row(
        name=found.name,
        url=url,
        step=found.step,
        revision=found.revision,
        stored_bytes=sum(file.size for file in found.files),
        error=str(error),
    )


def _row(**content: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "revision": 0,
        "complete": True,
        "superseded": False,
        "abandoned": False,
        "created": None,
        "raw_bytes": 0,
        "stored_bytes": 0,
        "restore_bytes": 0,
        "kind": None,
        "bases": [],
        "metrics": {},
        "user": {},
        "needed_by": [],
        "error": None,
        **content,
    }
    row["ratio"] = row["stored_bytes"] / row["raw_bytes"] if row["raw_bytes"] else None
    return row


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else iso_text(seconds)


# --- table ----------------------------------------------------------------------------------------------


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return ["no checkpoints"]
    metrics = sorted({name for row in rows for name in row["metrics"]})
    columns = ["step", "time", "size", "raw", "ratio", "restore", "base", *metrics, "state"]
    lines = [
        [
            _step_text(row),
            "-" if row["created"] is None else date_text(row["created"]),
            size_text(row["stored_bytes"]),
            *_sizes(row),
            _base_text(row),
            *(f"{row['metrics'][name]:.6g}" if name in row["metrics"] else "-" for name in metrics),
            _state(row),
        ]
        for row in rows
    ]
    complete = [row for row in rows if row["complete"] and row["error"] is None]
    stored, raw = (sum(row[name] for row in complete) for name in ("stored_bytes", "raw_bytes"))
    rest = sum(row["stored_bytes"] for row in rows) - stored
    others = f"; {counted(len(rows) - len(complete), 'other')}: {size_text(rest)}"
    return [
        *table(columns, lines, right=("step", "size", "raw", "ratio", "restore", *metrics)),
        f"{counted(len(complete), 'complete checkpoint')}: {size_text(stored)} for {size_text(raw)} of values "
        f"({ratio_text(stored, raw)}){others if len(rows) > len(complete) else ''}",
    ]


def _step_text(row: Mapping[str, Any]) -> str:
    return "-" if row["step"] is None else step_text(row["step"], row["revision"])


def _sizes(row: Mapping[str, Any]) -> tuple[str, str, str]:
    if not row["complete"] or row["error"]:
        return "-", "-", "-"
    ratio = ratio_text(row["stored_bytes"], row["raw_bytes"])
    return size_text(row["raw_bytes"]), ratio, size_text(row["restore_bytes"])


def _base_text(row: Mapping[str, Any]) -> str:
    """`full`, or the steps that the checkpoint is a delta to."""
    if row["kind"] is None:
        return "-"
    if row["kind"] == "stock":
        return "torch's own"
    if not row["bases"]:
        return "full"
    return f"delta on {_steps_text(row['bases'])}"


def _steps_text(names: Sequence[str]) -> str:
    from millrace.checkpoint.run.run_layout import parse_name

    steps = [step_text(*at) if (at := parse_name(name)) else name for name in names]
    return ", ".join(steps) if len(steps) <= 3 else f"{steps[0]}, .., {steps[-1]}"


def _state(row: Mapping[str, Any]) -> str:
    if row["error"]:
        return f"unreadable: {row['error']}"
    if not row["complete"]:
        # Pruning keeps the files that other checkpoints need.
        return f"removed, but {_steps_text(row['needed_by'])} needs it" if row["needed_by"] else "incomplete"
    if row["superseded"]:
        return "superseded"
    return "given up" if row["abandoned"] else "complete"
