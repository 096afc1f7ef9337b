"""`millrace pin`, `unpin`, `free`, `limit` and `resize`: the retention rules of this node's cache."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from millrace.cli.commands import LibraryCommand
from millrace.cli.common import (
    cache_dir_option,
    counted,
    endpoint_option,
    existing_node,
    file_system,
    is_terminal,
    json_option,
    places_of,
    print_json,
    print_note,
    time_text,
)
from millrace.config import parse_amount, resolve
from millrace.errors import printable, without_queries
from millrace.figures import size_text

_URLS = click.argument("urls", nargs=-1, required=True, metavar="URL...")


@click.command(cls=LibraryCommand)
@_URLS
@cache_dir_option
@endpoint_option
@json_option
def pin(urls: tuple[str, ...], cache_dir: tuple[str, ...], endpoint_url: str | None, as_json: bool) -> None:
    """Pin URL in this node's cache: it is not freed, and evicted last.

    URL is an object or a prefix. Objects that are cached below the prefix later are pinned too. Nothing is fetched: use
    'millrace load' for that.

    A URL with '*' or '?' is refused as a pattern, also if an object has this name: pin the prefix above it.
    """
    fs = file_system(urls, cache_dir, endpoint_url)
    fs.pin(urls)
    pinned = [_url(fs.unstrip_protocol(url)) for url in urls]
    _done(as_json, {"pinned": pinned, "origin": fs.origin_identity}, *(f"pinned {url}" for url in pinned))


@click.command(cls=LibraryCommand)
@_URLS
@cache_dir_option
@endpoint_option
@json_option
def unpin(urls: tuple[str, ...], cache_dir: tuple[str, ...], endpoint_url: str | None, as_json: bool) -> None:
    """Remove every pin at or below URL."""
    from millrace.cache import catalog

    node, _ = existing_node(cache_dir)
    named = [places_of(node, url, endpoint_url) for url in urls]
    catalog.unpin(node, named)
    unpinned = [url for url, _ in named]
    _done(as_json, {"unpinned": unpinned}, *(f"unpinned {url}" for url in unpinned))


@click.command(cls=LibraryCommand)
@click.argument("urls", nargs=-1, metavar="[URL...]")
@click.option("--all", "everything", is_flag=True, help="Free everything, instead of URLs; needs a confirmation.")
@click.option("--yes", "-y", is_flag=True, help="With --all: free without a confirmation.")
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
    """Remove the objects at or below URL from this node's cache, but not from their origin. Pinned objects stay.

    Open readers continue to read; the disk space is free when they have ended.
    """
    from millrace.cache import catalog

    if everything == bool(urls):
        raise click.UsageError("free takes URLs, or --all")
    node, _ = existing_node(cache_dir)
    places = [place for url in urls for place in places_of(node, url, endpoint_url)[1]] if urls else [None]
    if everything and not yes:
        if not is_terminal(sys.stdin):
            raise click.UsageError("--all needs --yes, because stdin is not a terminal")
        used = size_text(sum(used for _, used, _ in node.disks()))
        if not click.confirm(f"Remove everything that is not pinned ({used}) from the cache?", err=True):
            click.echo("nothing was removed")
            return
    freed = [catalog.free(node, place) for place in places]
    objects, nbytes = sum(part.objects for part in freed), sum(part.nbytes for part in freed)
    pinned = sum(part.pinned_objects for part in freed)
    if as_json:
        print_json({"objects": objects, "freed_bytes": nbytes, "pinned_objects": pinned})
        return
    if objects or not pinned:
        click.echo(
            f"{size_text(nbytes)} freed, {counted(objects, 'object')}" if objects else "nothing to free is in the cache"
        )
    if pinned:
        click.echo(f"{pinned} pinned objects stay: 'millrace unpin' them first")


@click.command(cls=LibraryCommand)
@click.argument("url")
@click.option(
    "--quota", help="Largest size in the cache: 10GB, or 20% of the disks; each of several disks gets its share."
)
@click.option("--ttl", help="Remove objects that were not used for this time: 90s, 12h, 7d.")
@click.option("--none", "unlimited", is_flag=True, help="Remove both limits.")
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
    """Limit the size and the lifetime of a prefix in this node's cache.

    Replaces both limits of the prefix: an omitted option removes that limit. For an object below several prefixes, the
    quota of the longest prefix with a quota applies, and likewise the time to live.
    """
    if unlimited == bool(quota or ttl):
        raise click.UsageError("limit takes --quota and --ttl, or --none")
    fs = file_system([url], cache_dir, endpoint_url)
    fs.limit(url, quota=quota, ttl=ttl)
    content = {"url": _url(fs.unstrip_protocol(url)), "origin": fs.origin_identity, "quota": quota, "ttl": ttl}
    limits = f"quota {_with_unit(quota, 'B')}, time to live {_with_unit(ttl, 's')}"
    _done(as_json, content, f"{content['url']}: {limits}")


def _with_unit(value: str | None, unit: str) -> str:
    """A limit as it was written, with the unit of a bare number: the user may have meant another one."""
    if not value:
        return "none"
    return f"{value} {unit}" if value.strip().isdecimal() else value


@click.command(cls=LibraryCommand)
@click.argument("size", required=False)
@click.option("--default", "back", is_flag=True, help="Use the option 'capacity' again.")
@click.option(
    "--node", metavar="HOST:PORT", help="Resize the cluster node at this address instead of this machine's cache."
)
@cache_dir_option
@json_option
def resize(size: str | None, back: bool, node: str | None, cache_dir: tuple[str, ...], as_json: bool) -> None:
    """Set the capacity of each cache directory: 200GB, or 50% of its disk.

    The store keeps the setting. It applies to every process within a second and overrides the option 'capacity' until
    'millrace resize --default'.
    """
    if back == bool(size):
        raise click.UsageError("resize takes a size, or --default")
    rows = _resize_here(size, cache_dir) if node is None else _resize_there(size, node)
    if as_json:
        print_json({"disks": rows})
        return
    for row in rows:
        used, capacity = row["used_bytes"], row["capacity_bytes"]
        over = f", {size_text(used - capacity)} over the limit" if used > capacity else ""
        click.echo(f"{row['directory']}: {size_text(used)} of {size_text(capacity)}{over}")


def _resize_here(size: str | None, cache_dir: Sequence[str]) -> list[dict[str, Any]]:
    from millrace.cache import catalog
    from millrace.cache.node import cache_node
    from millrace.cluster.attach import with_node_limits

    node = cache_node(with_node_limits(resolve({"cache_dir": list(cache_dir) or None})))
    catalog.resize(node, None if size is None else parse_amount(size, option="size"))
    for disk in node.open_disks:
        capacity, there = disk.store.space.capacity_bytes(), disk.store.space.disk_bytes()
        if capacity > there:
            where = f"{disk.store.directory} is on a disk of {size_text(there)}"
            print_note(f"{where}: the cache cannot hold {size_text(capacity)}, only the space that 'min_free' leaves")
    return [
        {"directory": str(directory), "used_bytes": used, "capacity_bytes": capacity}
        for directory, used, capacity in node.disks()
    ]


def _resize_there(size: str | None, address: str) -> list[dict[str, Any]]:
    """Resize the disks of another node, which publishes its new weight to the cluster."""
    from millrace.filesystem.cluster_access import access_through

    if size is not None:
        parse_amount(size, option="size")
    with access_through(address, resolve({})) as cluster:
        rows: list[dict[str, Any]] = cluster.client.call(
            address, "POST", "/v1/limits", {"capacity": size}, deadline=30.0
        )["disks"]
    return rows


def rule_text(quota_bytes: int | None, ttl_seconds: float | None, *, pinned: bool, used_bytes: int) -> str:
    """The rules of a prefix in a few words."""
    parts = ["pinned"] if pinned else []
    if quota_bytes is not None:
        parts.append(f"{size_text(used_bytes)} of its quota of {size_text(quota_bytes)}")
    else:
        parts.append(f"{size_text(used_bytes)} cached")
    if ttl_seconds is not None:
        parts.append(f"removed after {time_text(ttl_seconds)} without use")
    return ", ".join(parts)


def _url(url: str) -> str:
    return url.rstrip("/")


def _done(as_json: bool, content: Mapping[str, object], *lines: str) -> None:
    if as_json:
        print_json(content)
        return
    for line in lines:
        click.echo(printable(without_queries(line)))
