"""`millrace checkpoints show`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.checkpoints.common import (
    all_option,
    checkpoint_url,
    date_text,
    iso_text,
    keys_option,
    options_of,
    print_table,
    ratio_text,
    shape_text,
    step_option,
)
from millrace.cli.commands import LibraryCommand
from millrace.cli.common import counted, endpoint_option, json_option, print_json
from millrace.figures import size_text

if TYPE_CHECKING:
    from millrace.checkpoint.format.inventory import StoredValue
    from millrace.checkpoint.storage.manifests import CheckpointSummary

_KEY_CHARACTERS = 48
_TEXT_CHARACTERS = 100
_LEGEND = (
    "rank: the ranks that wrote it; stored: its share of the compressed chunks; ratio: stored to size",
    "stored as: full, delta (changes to an earlier checkpoint), unchanged (in an earlier checkpoint)",
)


@click.command(cls=LibraryCommand)
@click.argument("url")
@step_option
@keys_option
@all_option
@endpoint_option
@json_option
def show(
    url: str, step: int | None, keys: tuple[str, ...], everything: bool, endpoint_url: str | None, as_json: bool
) -> None:
    """Show the tensors and objects of a checkpoint: size before and after compression, and the ranks that wrote them.

    'stored' is a value's share of the chunks that contain it, and 'ratio' this share divided by the size. 'stored as' is
    'full' for chunks that are stored whole, 'delta' for deltas to an earlier checkpoint, and 'unchanged' for chunks of an
    earlier checkpoint; with several of them, the number of chunks of each.
    """
    from millrace.checkpoint.format.inventory import natural_order, select_keys
    from millrace.checkpoint.reading.opening import stored_values
    from millrace.checkpoint.tools import describe

    place = checkpoint_url(url, step, endpoint_url)
    options = options_of(place, endpoint_url)
    summary = describe(place, options)
    values = {value.key: value for value in stored_values(place, options)}
    chosen = [values[key] for key in sorted(select_keys(values, keys), key=natural_order)]
    record, user = _split(summary.user)
    if as_json:
        content = {
            **asdict(summary),
            "created": iso_text(summary.created),
            "run": record,
            "user": user,
            "values": [{**asdict(value), "ranks": value.ranks} for value in chosen],
        }
        print_json(content)
        return
    tensors = [value for value in chosen if value.dtype is not None]
    objects = [value for value in chosen if value.dtype is None]
    click.echo(_head(summary))
    for name, kept in (("metrics", record.get("metrics")), ("metadata", user)):
        if kept:
            click.echo(f"{name}: {_short(kept)}")
    for title, rows in (("tensors", tensors), ("objects", objects)):
        if rows:
            click.echo("")
            _show(title, rows, everything=everything)
    click.echo("\n" + "\n".join(_LEGEND) if chosen else "the checkpoint is empty")


def _head(summary: CheckpointSummary) -> str:
    kind = "of torch's own writer" if summary.format_version == 0 else "complete"
    values = f"{counted(summary.tensors, 'tensor')}, {counted(summary.objects, 'object')}"
    ratio = ratio_text(summary.stored_bytes, summary.raw_bytes)
    return (
        f"{summary.url}\n{date_text(summary.created)}, {kind}\n"
        f"{values}, {size_text(summary.raw_bytes)}, stored in {size_text(summary.stored_bytes)} ({ratio})"
    )


def _split(user: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any]:
    """The record of the run and the metadata of the user; without a manager only the latter."""
    record = user.get("run")
    if isinstance(record, dict) and set(user) <= {"run", "user"}:
        return record, user.get("user", {})
    return {}, user


def _show(title: str, values: Sequence[StoredValue], *, everything: bool) -> None:
    stored = sum(value.stored_bytes for value in values)
    raw = sum(value.raw_bytes for value in values)
    described = ("dtype", "shape", "shards") if title == "tensors" else ()
    columns = (title, *described, "rank", "size", "stored", "ratio", "stored as")
    lines = [
        (
            _key_text(value.key),
            *((value.dtype, shape_text(value.shape), str(value.shards)) if value.dtype else ()),
            _ranks_text(value.ranks),
            size_text(value.raw_bytes),
            size_text(value.stored_bytes),
            ratio_text(value.stored_bytes, value.raw_bytes),
            _how(value),
        )
        for value in values
    ]
    print_table(columns, lines, everything=everything, right=("shards", "rank", "size", "stored", "ratio"))
    if len(values) > 1:
        click.echo(f"{len(values)} {title}: {size_text(raw)}, stored in {size_text(stored)}")


def _key_text(key: str) -> str:
    """A long key without its middle: layers differ at both ends."""
    if len(key) <= _KEY_CHARACTERS:
        return key
    half = (_KEY_CHARACTERS - 3) // 2
    return f"{key[:half]}...{key[-half:]}"


def _ranks_text(ranks: Sequence[int]) -> str:
    """`0`, `0-3`, `0,4,8`; the first and the last of many."""
    if not ranks:
        return "-"
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks)) if len(ranks) <= 3 else f"{ranks[0]},..,{ranks[-1]}"


def _how(value: StoredValue) -> str:
    counts = {"full": value.chunks_full, "delta": value.chunks_delta, "unchanged": value.chunks_referenced}
    there = {name: count for name, count in counts.items() if count}
    if len(there) > 1:
        return ", ".join(f"{count} {name}" for name, count in there.items())
    return next(iter(there), "-")


def _short(content: Any) -> str:
    text = json.dumps(content, default=repr)
    return text if len(text) <= _TEXT_CHARACTERS else f"{text[: _TEXT_CHARACTERS - 3]}..."
