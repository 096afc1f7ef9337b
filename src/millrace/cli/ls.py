"""`millrace ls`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

import click

from millrace.cli.common import (
    cache_dir_option,
    endpoint_option,
    existing_node,
    json_option,
    places_of,
    time_text,
)
from millrace.figures import size_text


@click.command()
@click.argument("url", required=False)
@click.option("--long", "-l", is_flag=True, help="Size, how much of it is here, pinned or not, and last use as well.")
@cache_dir_option
@endpoint_option
@json_option
def ls(url: str | None, long: bool, cache_dir: tuple[str, ...], endpoint_url: str | None, as_json: bool) -> None:
    """List what is in this node's cache, at or below URL.

    It asks no server. An object that was overwritten at its origin stays listed until somebody notices. Without
    --endpoint-url the URL means that of every service from which something is cached.
    """
    from millrace.cache.catalog import cached_objects
    from millrace.cli import tell
    from millrace.errors import printable

    node, _ = existing_node(cache_dir)
    places = places_of(node, url, endpoint_url) if url else [None]
    found = sorted(
        (item for place in places for item in cached_objects(node, place)), key=lambda item: (item.url, item.origin)
    )
    if as_json:
        rows = (json.dumps({"url": item.url, **asdict(item), "complete": item.complete}) for item in found)
        click.echo("[" + ",\n ".join(rows) + "]")
        return
    if url and not found:
        tell(f"nothing of {printable(url)} is in the cache")
    now = time.time()
    for item in found:
        if not long:
            click.echo(printable(item.url))
            continue
        here = "all" if item.complete else f"{100 * item.cached_bytes // item.size}%"
        url = printable(item.url)
        used = "-" if item.last_used is None else f"{time_text(max(0.0, now - item.last_used))} ago"
        click.echo(f"{size_text(item.size):>8s}  {here:>4s}  {'pinned' if item.pinned else '-':6s}  {used:>12s}  {url}")
    if long:
        total = sum(item.cached_bytes for item in found)
        click.echo(f"{len(found)} objects, {size_text(total)} here")
