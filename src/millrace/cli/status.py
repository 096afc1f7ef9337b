"""`millrace status`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.commands import LibraryCommand
from millrace.cli.common import (
    cache_dir_option,
    cluster_access,
    counted,
    existing_node,
    json_option,
    node_option,
    print_json,
    table,
)
from millrace.cli.rates import Rates, rate_lines, rates_of_all, ratio_text, total_lines
from millrace.cli.rules import rule_text
from millrace.cli.watch import interval_option, repeat, watch_option
from millrace.config import CacheOptions, resolve
from millrace.errors import ConfigurationError, printable
from millrace.figures import hit_ratio, size_text

if TYPE_CHECKING:
    from millrace.cache.disk import Disk


@click.command(cls=LibraryCommand)
@node_option
@cache_dir_option
@watch_option
@interval_option
@json_option
def status(node: str | None, cache_dir: tuple[str, ...], watch: bool, interval: float, as_json: bool) -> None:
    """Show the nodes of the cluster, and this machine's cache: hit ratio, size and rules.

    The cluster is that of a node on this machine, of the option 'members', or of --node. A node that does not respond is
    shown as silent. Creates nothing. With --watch it also shows current rates; 'millrace stats' shows them for each node.
    """
    if watch:
        repeat(_Readings(node, cache_dir).read, _lines, interval=interval, as_json=as_json)
        return
    state = read_status(node, cache_dir)
    if as_json:
        print_json(state)
        return
    click.echo("\n".join(_lines(state)))


def read_status(address: str | None, cache_dir: Sequence[str]) -> dict[str, Any]:
    """The state of this machine's cache, with that of the cluster under `cluster`, as far as they exist."""
    options = resolve({"cache_dir": list(cache_dir) or None})
    cluster = _cluster(options, address)
    try:
        here = None if address is not None else _this_node(cache_dir)
    except ConfigurationError:
        if cluster is None:  # a client of a cluster may have no cache of its own
            raise
        here = None
    return {**(here or {}), **({} if cluster is None else {"cluster": cluster})}


class _Readings:
    """Readings for `--watch`: each has the rates since the one before under `rates`."""

    def __init__(self, address: str | None, cache_dir: Sequence[str]) -> None:
        self._address = address
        self._cache_dir = cache_dir
        self._last: tuple[float, Mapping[str, Mapping[str, int]]] | None = None

    def read(self) -> dict[str, Any]:
        state = read_status(self._address, self._cache_dir)
        now, counters = time.monotonic(), counters_by_node(state)
        if self._last is not None:
            began, before = self._last
            found = rates_of_all(before, counters, now - began)
            state["rates"] = {"hit_ratio": found.hit_ratio, **found.per_second}
        self._last = now, counters
        return state


def counters_by_node(state: Mapping[str, Any]) -> dict[str, Mapping[str, int]]:
    """The counters of each node that responds, by its id; without a cluster, those of this machine under an empty id."""
    if "cluster" not in state:
        return {"": state["counters"]}
    return {node["member_id"]: node["counters"] for node in state["cluster"]["nodes"] if node["answers"]}


def _lines(state: Mapping[str, Any]) -> list[str]:
    """The state as lines: rates and hit ratios first, then sizes, then totals."""
    lines: list[str] = []
    if "rates" in state:
        shown = dict(state["rates"])
        lines += [*rate_lines(Rates(hit_ratio=shown.pop("hit_ratio"), per_second=shown)), ""]
    if "cluster" in state:
        lines += cluster_lines(state["cluster"])
    if "disks" in state:
        lines += ["", "this machine:"] if "cluster" in state else []
        lines += _machine_lines(state)
    return lines


# --- the cluster ------------------------------------------------------------------------------------------


def _cluster(options: CacheOptions, address: str | None) -> dict[str, Any] | None:
    """The status of every node of the cluster; None without a cluster."""
    from millrace.filesystem.cluster_access import statuses

    access = cluster_access(options, address)
    if access is None:
        return None
    with access:
        nodes = statuses(access)
    responding = [node for node in nodes if node["answers"]]
    names = ("used_bytes", "capacity_bytes", "objects", "complete_objects")
    totals: dict[str, Any] = {name: sum(node[name] for node in responding) for name in names}
    counters: Counter[str] = Counter()
    for node in responding:
        counters.update(node["counters"])
    return {"nodes": nodes, **totals, "counters": counters}


_COLUMNS = ("address", "state", "hits", "used", "capacity", "objects", "origin", "peers", "served", "skipped")


def cluster_lines(cluster: Mapping[str, Any]) -> list[str]:
    """A cluster as a table, and its sums."""
    if not cluster["nodes"]:
        return ["the cluster has no nodes"]
    lines = table(_COLUMNS, [_row(node, cluster["nodes"]) for node in cluster["nodes"]])
    responding = sum(node["answers"] for node in cluster["nodes"])
    silent = len(cluster["nodes"]) - responding
    lines.append(
        f"{counted(responding, 'node')}{f', {silent} more that do not respond' if silent else ''}: "
        f"{size_text(cluster['used_bytes'])} of {size_text(cluster['capacity_bytes'])}, "
        f"{counted(cluster['objects'], 'object')}, hit ratio {ratio_text(hit_ratio(cluster['counters']))}"
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
        ratio_text(ratio),
        size_text(node["used_bytes"]),
        size_text(node["capacity_bytes"]),
        str(node["objects"]),
        *(size_text(counters.get(name, 0)) for name in ("origin_bytes", "peer_bytes", "served_bytes")),
        ", ".join(addresses[name] for name in node["breakers"] if name in addresses) or "-",  # others have gone
    )


# --- this machine -----------------------------------------------------------------------------------------


def _this_node(cache_dir: Sequence[str]) -> dict[str, Any]:
    """The state of the cache of this machine. Raises `ConfigurationError` if there is none."""
    from millrace.cache import catalog

    node, missing = existing_node(cache_dir)
    objects = complete = 0
    for item in catalog.cached_objects(node):
        objects += 1
        complete += item.complete
    counters = node.counters()
    return {
        "disks": [_disk(disk) for disk in node.open_disks],
        "missing": missing,
        "objects": objects,
        "complete_objects": complete,
        "hit_ratio": hit_ratio(counters),
        "rules": [{"url": rule.url, **rule._asdict()} for rule in catalog.placed_rules(node)],
        "counters": counters,
    }


def _disk(disk: Disk) -> dict[str, Any]:
    space, used = disk.store.space, disk.store.index.used_bytes()
    capacity, free = space.capacity_bytes(), space.free_bytes() - space.min_free_bytes()
    return {
        "directory": str(disk.store.directory),
        "used_bytes": used,
        "capacity_bytes": capacity,
        "room_bytes": max(0, min(free, capacity - used)),
        "resized": disk.rules.current().capacity is not None,
    }


def _machine_lines(summary: Mapping[str, Any]) -> list[str]:
    lines = []
    counters = summary["counters"]
    if summary["hit_ratio"] is not None:
        read, fetched = size_text(counters["cache_bytes"]), size_text(counters["origin_bytes"])
        peers = f", {size_text(counters['peer_bytes'])} from other nodes" if counters["peer_bytes"] else ""
        lines.append(
            f"hit ratio {ratio_text(summary['hit_ratio'])}: {read} read from the cache, {fetched} from the origin{peers}"
        )
    for row in summary["disks"]:
        resized = ", set by resize" if row["resized"] else ""
        full = f" ({100 * row['used_bytes'] // row['capacity_bytes']}%{resized})" if row["capacity_bytes"] else ""
        used, capacity = size_text(row["used_bytes"]), size_text(row["capacity_bytes"])
        is_short = row["room_bytes"] < row["capacity_bytes"] - row["used_bytes"]
        room = f", the disk has room for {size_text(row['room_bytes'])} more" if is_short else ""
        lines.append(f"{row['directory']}: {used} of {capacity}{full}{room}")
    lines += [f"{name}: no cache" for name in summary["missing"]]
    objects, complete = summary["objects"], summary["complete_objects"]
    share = f", {'all' if complete == objects else complete} complete" if objects else ""
    lines.append(f"{counted(objects, 'object')}{share}")
    for rule in summary["rules"]:
        text = rule_text(rule["quota_bytes"], rule["ttl_seconds"], pinned=rule["pinned"], used_bytes=rule["used_bytes"])
        lines.append(printable(f"{rule['url']}: {text}"))
    return lines + total_lines(counters)
