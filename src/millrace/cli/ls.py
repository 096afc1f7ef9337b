"""`millrace ls`."""

from __future__ import annotations

import time

import click

from millrace.cli.commands import LibraryCommand
from millrace.cli.common import (
    cache_dir_option,
    counted,
    endpoint_option,
    existing_node,
    json_option,
    places_of,
    print_json,
    print_note,
    time_text,
)
from millrace.errors import printable
from millrace.figures import size_text


@click.command(cls=LibraryCommand)
@click.argument("url", required=False)
@click.option("--long", "-l", is_flag=True, help="Also show size, cached share, pin and last use.")
@cache_dir_option
@endpoint_option
@json_option
def ls(url: str | None, long: bool, cache_dir: tuple[str, ...], endpoint_url: str | None, as_json: bool) -> None:
    """List the objects in this node's cache, at or below URL.

    Sends no request. An object that was overwritten at its origin stays listed until the next read detects that. Without
    --endpoint-url the URL matches every service with cached objects.
    """
    from millrace.cache.catalog import cached_objects

    node, _ = existing_node(cache_dir)
    places = places_of(node, url, endpoint_url)[1] if url is not None else [None]
    found = sorted(
        (item for place in places for item in cached_objects(node, place)), key=lambda item: (item.url, item.origin)
    )
    if as_json:
        print_json([{"url": item.url, **item._asdict(), "complete": item.complete} for item in found])
        return
    if url is not None and not found:
        print_note(f"{printable(url)}: nothing is in the cache")
    now = time.time()
    if long and found:
        click.echo(f"{'size':>8s}  {'here':>4s}  {'pin':6s}  {'last use':>12s}  url")
    for item in found:
        if not long:
            click.echo(printable(item.url))
            continue
        cached = "all" if item.complete else f"{100 * item.cached_bytes // item.size}%"
        url = printable(item.url)
        used = "-" if item.last_used is None else f"{time_text(max(0.0, now - item.last_used))} ago"
        click.echo(
            f"{size_text(item.size):>8s}  {cached:>4s}  {'pinned' if item.pinned else '-':6s}  {used:>12s}  {url}"
        )
    if long:
        total = sum(item.cached_bytes for item in found)
        click.echo(f"{counted(len(found), 'object')}, {size_text(total)} cached")
