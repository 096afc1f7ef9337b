"""`millrace status`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from millrace.cli.common import cache_dir_option, existing_node, json_option, size_text
from millrace.cli.rules import rule_text


@click.command()
@cache_dir_option
@json_option
def status(cache_dir: tuple[str, ...], as_json: bool) -> None:
    """Show this node's cache: where it lies, how full it is, what is pinned or limited, what it saved. Makes nothing."""
    from millrace.cache import catalog

    node, missing = existing_node(cache_dir)
    objects = complete = 0
    for item in catalog.cached_objects(node):
        objects += 1
        complete += item.complete
    counters = node.counters()
    served = counters["cache_bytes"] + counters["origin_bytes"]
    rules = catalog.placed_rules(node)
    summary: dict[str, Any] = {
        "disks": [
            {
                "directory": str(disk.store.directory),
                "used_bytes": disk.store.index.used_bytes(),
                "capacity_bytes": disk.store.capacity_bytes(),
                "resized": disk.store.rules.current().capacity is not None,
            }
            for disk in node.open_disks
        ],
        "missing": missing,
        "objects": objects,
        "complete_objects": complete,
        "hit_ratio": counters["cache_bytes"] / served if served else None,
        "rules": [{"url": rule.url, **asdict(rule)} for rule in rules],
        "counters": counters,
    }
    if as_json:
        click.echo(json.dumps(summary))
        return
    for row in summary["disks"]:
        resized = ", set by resize" if row["resized"] else ""
        full = f" ({100 * row['used_bytes'] // row['capacity_bytes']}%{resized})" if row["capacity_bytes"] else ""
        click.echo(f"{row['directory']}: {size_text(row['used_bytes'])} of {size_text(row['capacity_bytes'])}{full}")
    for name in missing:
        click.echo(f"{name}: no cache here")
    click.echo(f"{objects} objects, {complete} of them complete")
    if summary["hit_ratio"] is not None:
        read, fetched = size_text(counters["cache_bytes"]), size_text(counters["origin_bytes"])
        click.echo(
            f"so far {read} read from the cache, {fetched} from the origin: {100 * summary['hit_ratio']:.1f}% saved"
        )
    for rule in rules:
        text = rule_text(rule.quota_bytes, rule.ttl_seconds, pinned=rule.pinned, used_bytes=rule.used_bytes)
        click.echo(f"{rule.url}: {text}")
    for name, value in counters.items():
        click.echo(f"{name.replace('_', ' '):16s} {value:,}")
