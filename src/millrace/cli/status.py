"""`millrace status`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.common import cache_dir_option, existing_node, json_option, node_option
from millrace.cli.rules import rule_text
from millrace.figures import size_text

if TYPE_CHECKING:
    from millrace.config import CacheOptions
    from millrace.filesystem.cluster_access import ClusterAccess


@click.command()
@node_option
@cache_dir_option
@json_option
def status(node: str | None, cache_dir: tuple[str, ...], as_json: bool) -> None:
    """Show the nodes of the cluster, and this node's cache: how full, what is pinned or limited, what was saved.

    The cluster is that of a node on this machine, of the option 'members', or of --node; a node that does not answer is
    shown as such. Makes nothing.
    """
    from millrace.config import resolve
    from millrace.errors import ConfigurationError

    options = resolve({"cache_dir": list(cache_dir) or None})
    cluster = _cluster(options, node)
    try:
        here = None if node is not None else _this_node(cache_dir)
    except ConfigurationError:
        if cluster is None:  # a client of a cluster may have no cache of its own
            raise
        here = None
    if as_json:
        click.echo(json.dumps({**({} if here is None else here), **({} if cluster is None else {"cluster": cluster})}))
        return
    if cluster is not None:
        for line in cluster_lines(cluster):
            click.echo(line)
    if here is not None:
        if cluster is not None:
            click.echo("\nthis machine:")
        _show(here)


# --- the cluster ------------------------------------------------------------------------------------------


def _cluster(options: CacheOptions, address: str | None) -> dict[str, Any] | None:
    """What the nodes of a cluster say of themselves; None without a cluster."""
    from millrace.filesystem.cluster_access import access_from_here, access_through

    access = access_from_here(options) if address is None else access_through(address, options)
    if access is None:
        return None
    with access:
        return _ask(access)


def _ask(access: ClusterAccess) -> dict[str, Any]:
    from millrace.filesystem.cluster_access import statuses

    nodes = statuses(access)
    answering = [node for node in nodes if node["answers"]]
    names = ("used_bytes", "capacity_bytes", "objects", "complete_objects")
    totals: dict[str, Any] = {name: sum(node[name] for node in answering) for name in names}
    counters: dict[str, int] = {}
    for node in answering:
        for name, value in node["counters"].items():
            counters[name] = counters.get(name, 0) + value
    return {"nodes": nodes, **totals, "counters": counters}


_COLUMNS = ("address", "state", "used", "capacity", "objects", "hits", "origin", "peers", "served", "passed over")


def cluster_lines(cluster: Mapping[str, Any]) -> list[str]:
    """A cluster as a table, and its sums."""
    if not cluster["nodes"]:
        return ["no node of the cluster is known"]
    rows = [_COLUMNS, *(_row(node, cluster["nodes"]) for node in cluster["nodes"])]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_COLUMNS))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    answering = sum(node["answers"] for node in cluster["nodes"])
    silent = len(cluster["nodes"]) - answering
    lines.append(
        f"{answering} nodes{f', {silent} more that do not answer' if silent else ''}: "
        f"{size_text(cluster['used_bytes'])} of {size_text(cluster['capacity_bytes'])}, {cluster['objects']} objects"
    )
    return lines + [node["error"] for node in cluster["nodes"] if not node["answers"]]


def _row(node: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    if not node["answers"]:
        return (node["address"], "silent", *("-" for _ in _COLUMNS[2:]))
    addresses = {other["member_id"]: other["address"] for other in nodes}
    counters, ratio = node["counters"], node["hit_ratio"]
    return (
        node["address"],
        node["state"],
        size_text(node["used_bytes"]),
        size_text(node["capacity_bytes"]),
        str(node["objects"]),
        "-" if ratio is None else f"{100 * ratio:.1f}%",
        *(size_text(counters.get(name, 0)) for name in ("origin_bytes", "peer_bytes", "served_bytes")),
        ", ".join(addresses[name] for name in node["breakers"] if name in addresses) or "-",  # others have gone
    )


# --- this machine -----------------------------------------------------------------------------------------


def _this_node(cache_dir: Sequence[str]) -> dict[str, Any]:
    """What is in the cache of this machine. Raises `ConfigurationError` where there is none."""
    from millrace.cache import catalog
    from millrace.filesystem.node_status import hit_ratio

    node, missing = existing_node(cache_dir)
    objects = complete = 0
    for item in catalog.cached_objects(node):
        objects += 1
        complete += item.complete
    counters = node.counters()
    return {
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
        "hit_ratio": hit_ratio(counters),
        "rules": [{"url": rule.url, **asdict(rule)} for rule in catalog.placed_rules(node)],
        "counters": counters,
    }


def _show(summary: Mapping[str, Any]) -> None:
    from millrace.errors import printable

    for row in summary["disks"]:
        resized = ", set by resize" if row["resized"] else ""
        full = f" ({100 * row['used_bytes'] // row['capacity_bytes']}%{resized})" if row["capacity_bytes"] else ""
        click.echo(f"{row['directory']}: {size_text(row['used_bytes'])} of {size_text(row['capacity_bytes'])}{full}")
    for name in summary["missing"]:
        click.echo(f"{name}: no cache here")
    click.echo(f"{summary['objects']} objects, {summary['complete_objects']} of them complete")
    counters = summary["counters"]
    if summary["hit_ratio"] is not None:
        read, fetched = size_text(counters["cache_bytes"]), size_text(counters["origin_bytes"])
        peers = f", {size_text(counters['peer_bytes'])} from other nodes" if counters["peer_bytes"] else ""
        click.echo(
            f"so far {read} read from the cache, {fetched} from the origin{peers}: "
            f"{100 * summary['hit_ratio']:.1f}% {'found here' if peers else 'saved'}"
        )
    for rule in summary["rules"]:
        text = rule_text(rule["quota_bytes"], rule["ttl_seconds"], pinned=rule["pinned"], used_bytes=rule["used_bytes"])
        click.echo(printable(f"{rule['url']}: {text}"))
    for name, value in counters.items():
        click.echo(f"{name.replace('_', ' '):16s} {value:,}")
