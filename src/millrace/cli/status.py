"""`millrace status`."""

from __future__ import annotations

import json

import click


@click.command()
@click.option(
    "--cache-dir", multiple=True, help="Cache directory; repeat for several disks. Default: the configured one."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(cache_dir: tuple[str, ...], as_json: bool) -> None:
    """Show this node's cache: where it lies, how full it is, and what it saved so far."""
    from millrace.cache.node import CacheNode, store_exists
    from millrace.config import resolve
    from millrace.errors import ConfigurationError

    options = resolve({"cache_dir": list(cache_dir) or None})
    if not store_exists(options):
        raise ConfigurationError(
            f"no cache in {', '.join(map(str, options.cache_dirs))}",
            next_step="read something through millrace.filesystem first, or name the directory with --cache-dir",
        )
    node = CacheNode(options)
    entries = node.entries()
    disks = node.disks()
    complete = sum(entry.complete for entry in entries)
    summary = {
        "disks": [
            {"directory": str(directory), "used_bytes": used, "capacity_bytes": capacity}
            for directory, used, capacity in disks
        ],
        "objects": len(entries),
        "complete_objects": complete,
        "counters": node.counters(),
    }
    if as_json:
        click.echo(json.dumps(summary))
        return
    for directory, used, capacity in disks:
        click.echo(f"{directory}: {used / 1e9:.2f} GB of {capacity / 1e9:.2f} GB")
    click.echo(f"{len(entries)} objects, {complete} of them complete")
    for name, value in node.counters().items():
        click.echo(f"{name.replace('_', ' '):16s} {value:,}")
