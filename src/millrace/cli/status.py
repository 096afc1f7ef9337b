"""`millrace status`."""

from __future__ import annotations

import json
from dataclasses import replace

import click


@click.command()
@click.option(
    "--cache-dir", multiple=True, help="Cache directory; repeat for several disks. Default: the configured one."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(cache_dir: tuple[str, ...], as_json: bool) -> None:
    """Show this node's cache: where it lies, how full it is, and what it saved so far. Makes nothing."""
    from millrace.cache.node import cache_node, store_exists
    from millrace.config import resolve
    from millrace.errors import ConfigurationError

    options = resolve({"cache_dir": list(cache_dir) or None})
    there = tuple(path for path in options.cache_dirs if store_exists(replace(options, cache_dirs=(path,))))
    missing = [str(path) for path in options.cache_dirs if path not in there]
    if not there:
        raise ConfigurationError(
            f"no cache in {', '.join(missing)}",
            next_step="read something through millrace.filesystem first, or name the directory with --cache-dir",
        )
    # Only what is there: a cache makes the directories that it is given.
    node = cache_node(replace(options, cache_dirs=there))
    entries = node.entries()
    disks = node.disks()
    counters = node.counters()
    complete = sum(entry.complete for entry in entries)
    summary = {
        "disks": [
            {"directory": str(directory), "used_bytes": used, "capacity_bytes": capacity}
            for directory, used, capacity in disks
        ],
        "missing": missing,
        "objects": len(entries),
        "complete_objects": complete,
        "counters": counters,
    }
    if as_json:
        click.echo(json.dumps(summary))
        return
    for directory, used, capacity in disks:
        click.echo(f"{directory}: {used / 1e9:.2f} GB of {capacity / 1e9:.2f} GB")
    for name in missing:
        click.echo(f"{name}: no cache here")
    click.echo(f"{len(entries)} objects, {complete} of them complete")
    for name, value in counters.items():
        click.echo(f"{name.replace('_', ' '):16s} {value:,}")
