"""`millrace pin`, `unpin`, `free`, `limit` and `resize`: what stays in this node's cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from millrace.cli.common import (
    cache_dir_option,
    endpoint_option,
    existing_node,
    file_system,
    json_option,
    places_of,
    time_text,
)
from millrace.figures import size_text

_URLS = click.argument("urls", nargs=-1, required=True, metavar="URL...")


@click.command()
@_URLS
@cache_dir_option
@endpoint_option
@json_option
def pin(urls: tuple[str, ...], cache_dir: tuple[str, ...], endpoint_url: str | None, as_json: bool) -> None:
    """Keep URL in this node's cache: it is neither evicted nor freed.

    URL is an object or a prefix; also what comes below it later is kept. Nothing is fetched: 'millrace load' does that.
    """
    fs = file_system(urls, cache_dir, endpoint_url)
    fs.pin(urls)
    _done(as_json, {"pinned": [_url(fs.unstrip_protocol(url)) for url in urls], "origin": fs.origin_identity}, "pinned")


@click.command()
@_URLS
@cache_dir_option
@endpoint_option
@json_option
def unpin(urls: tuple[str, ...], cache_dir: tuple[str, ...], endpoint_url: str | None, as_json: bool) -> None:
    """Take back every pin at or below URL."""
    from millrace.cache import catalog
    from millrace.errors import UsageError

    node, _ = existing_node(cache_dir)
    for url in urls:
        places = places_of(node, url, endpoint_url)
        if not [place for place in places if catalog.unpin(node, place)]:
            above = any(catalog.rules(node).rule_for(*place).pinned for place in places)
            raise UsageError(
                f"{url} has no pin of its own" + (", a prefix above it has" if above else ""),
                next_step="'millrace status' shows every pin",
            )
    _done(as_json, {"unpinned": list(urls)}, "unpinned")


@click.command()
@click.argument("urls", nargs=-1, metavar="[URL...]")
@click.option("--all", "everything", is_flag=True, help="Everything instead of a URL.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask before --all.")
@cache_dir_option
@endpoint_option
@json_option
def free(
    urls: tuple[str, ...],
    everything: bool,
    yes: bool,
    cache_dir: tuple[str, ...],
    endpoint_url: str | None,
    as_json: bool,
) -> None:
    """Drop what lies at or below URL from this node's cache. What is pinned stays; nothing is removed from its origin.

    Whoever reads it reads on; the disk has its space back when they have ended.
    """
    from millrace.cache import catalog

    if everything == bool(urls):
        raise click.UsageError("free takes URLs, or --all")
    node, _ = existing_node(cache_dir)
    places = [place for url in urls for place in places_of(node, url, endpoint_url)] if urls else [None]
    if everything and not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("--all without --yes, and nobody to ask")
        used = size_text(sum(used for _, used, _ in node.disks()))
        if not click.confirm(f"Drop everything that is not pinned ({used}) from the cache?", err=True):
            click.echo("nothing was dropped")
            return
    freed = [catalog.free(node, place) for place in places]
    objects, nbytes = sum(part.objects for part in freed), sum(part.nbytes for part in freed)
    pinned = sum(part.pinned_objects for part in freed)
    if as_json:
        click.echo(json.dumps({"objects": objects, "freed_bytes": nbytes, "pinned_objects": pinned}))
        return
    if objects or not pinned:
        click.echo(f"{size_text(nbytes)} freed, {objects} objects" if objects else "nothing of that is in the cache")
    if pinned:
        click.echo(f"{pinned} pinned objects stay: 'millrace unpin' them first")


@click.command()
@click.argument("url")
@click.option("--quota", help="At most so much of it at a time: 10GB, or 20% of the disks.")
@click.option("--ttl", help="Gone when nobody used it for so long: 12h, 7d.")
@click.option("--none", "unlimited", is_flag=True, help="Take both limits back.")
@cache_dir_option
@endpoint_option
@json_option
def limit(
    url: str,
    quota: str | None,
    ttl: str | None,
    unlimited: bool,
    cache_dir: tuple[str, ...],
    endpoint_url: str | None,
    as_json: bool,
) -> None:
    """Limit what URL, a prefix, may take of this node's cache.

    In place of what was set for this prefix before: without --ttl it has none, without --quota it has none. Of several
    prefixes that an object lies below, the longest that has a quota counts, and likewise for the time to live.
    """
    if unlimited == bool(quota or ttl):
        raise click.UsageError("limit takes --quota and --ttl, or --none")
    fs = file_system([url], cache_dir, endpoint_url)
    fs.limit(url, quota=quota, ttl=ttl)
    content = {"url": _url(fs.unstrip_protocol(url)), "origin": fs.origin_identity, "quota": quota, "ttl": ttl}
    _done(as_json, content, f"quota {quota or 'none'}, time to live {ttl or 'none'}")


@click.command()
@click.argument("size", required=False)
@click.option("--default", "back", is_flag=True, help="Give it back to the option 'capacity'.")
@click.option(
    "--node", metavar="HOST:PORT", help="The node of a cluster at this address, in place of this machine's cache."
)
@cache_dir_option
@json_option
def resize(size: str | None, back: bool, node: str | None, cache_dir: tuple[str, ...], as_json: bool) -> None:
    """Set how much each cache directory may hold: 200GB, or 50% of its disk.

    The store remembers it, and every process that uses the store follows within a second, whatever its option 'capacity'
    says, until 'millrace resize --default'.
    """
    if back == bool(size):
        raise click.UsageError("resize takes a size, or --default")
    rows = _resize_here(size, cache_dir) if node is None else _resize_there(size, node)
    if as_json:
        click.echo(json.dumps({"disks": rows}))
        return
    for row in rows:
        used, capacity = row["used_bytes"], row["capacity_bytes"]
        over = f", {size_text(used - capacity)} too much" if used > capacity else ""
        click.echo(f"{row['directory']}: {size_text(used)} of {size_text(capacity)}{over}")


def _resize_here(size: str | None, cache_dir: Sequence[str]) -> list[dict[str, Any]]:
    from millrace.cache import catalog
    from millrace.cache.node import cache_node
    from millrace.cli import tell
    from millrace.config import parse_amount, resolve

    node = cache_node(resolve({"cache_dir": list(cache_dir) or None}))
    catalog.resize(node, None if size is None else parse_amount(size, option="size"))
    for disk in node.open_disks:
        capacity, there = disk.store.capacity_bytes(), disk.store.disk_bytes()
        if capacity > there:
            where = f"{disk.store.directory} lies on a disk of {size_text(there)}"
            tell(f"{where}: it never holds {size_text(capacity)}, but what the disk has room for beside 'min_free'")
    return [
        {"directory": str(directory), "used_bytes": used, "capacity_bytes": capacity}
        for directory, used, capacity in node.disks()
    ]


def _resize_there(size: str | None, address: str) -> list[dict[str, Any]]:
    """Resize the disks of another node, which tells the cluster of its new weight."""
    from millrace.config import parse_amount, resolve
    from millrace.filesystem.cluster_access import access_through

    if size is not None:
        parse_amount(size, option="size")
    with access_through(address, resolve({})) as cluster:
        rows: list[dict[str, Any]] = cluster.client.call_address(
            address, "POST", "/v1/limits", {"capacity": size}, deadline=30.0
        )["disks"]
    return rows


def rule_text(quota_bytes: int | None, ttl_seconds: float | None, *, pinned: bool, used_bytes: int) -> str:
    """What holds for a prefix, in a few words."""
    parts = ["pinned"] if pinned else []
    if quota_bytes is not None:
        parts.append(f"{size_text(used_bytes)} of its quota of {size_text(quota_bytes)}")
    else:
        parts.append(f"{size_text(used_bytes)} here")
    if ttl_seconds is not None:
        parts.append(f"gone after {time_text(ttl_seconds)} without use")
    return ", ".join(parts)


def _url(url: str) -> str:
    return url.rstrip("/")


def _done(as_json: bool, content: Mapping[str, object], text: str) -> None:
    from millrace.errors import printable

    click.echo(json.dumps(content) if as_json else printable(text))
