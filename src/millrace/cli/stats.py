"""`millrace stats`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.commands import LibraryCommand
from millrace.cli.common import cache_dir_option, cluster_access, existing_node, json_option, node_option, table
from millrace.cli.rates import rates, ratio_text
from millrace.cli.watch import interval_option, repeat
from millrace.config import resolve
from millrace.figures import hit_ratio, size_text

if TYPE_CHECKING:
    from millrace.filesystem.cluster_access import ClusterAccess

_COLUMNS = {
    "cache_bytes": "cache/s",
    "peer_bytes": "peers/s",
    "origin_bytes": "origin/s",
    "served_bytes": "served/s",
    "origin_requests": "requests/s",
    "native_opens": "opens/s",
}
"""The counters that are shown as rates. Columns in which every node has zero are hidden, except the first."""

THIS_MACHINE = "this machine"


@click.command(cls=LibraryCommand)
@interval_option
@click.option(
    "--count", type=click.IntRange(min=0), default=0, metavar="N", help="End after N outputs. Default: never."
)
@node_option
@cache_dir_option
@json_option
def stats(interval: float, count: int, node: str | None, cache_dir: tuple[str, ...], as_json: bool) -> None:
    """Show the current throughput and hit ratio of each node, until Ctrl-C.

    Each output covers the time since the one before. The nodes are those of the cluster that 'millrace status' shows;
    without a cluster, this machine's cache. A node that does not respond is missing in an output.
    """
    access = cluster_access(resolve({"cache_dir": list(cache_dir) or None}), node)
    with access or contextlib.nullcontext():
        repeat(_Source(access, cache_dir).read, table_lines, interval=interval, as_json=as_json, count=count)


class _Source:
    """Readings of the counters of each node. The first one waits a moment, so that it has rates as well."""

    def __init__(self, access: ClusterAccess | None, cache_dir: Sequence[str]) -> None:
        self._access = access
        self._node = existing_node(cache_dir)[0] if access is None else None
        self._last = (time.monotonic(), self._counters())
        time.sleep(_FIRST_SECONDS)

    def read(self) -> dict[str, Any]:
        began, before = self._last
        now, counters = time.monotonic(), self._counters()
        self._last = now, counters
        return reading(before, counters, seconds=now - began)

    def _counters(self) -> dict[str, Mapping[str, int]]:
        from millrace.filesystem.cluster_access import counted

        if self._access is None:
            assert self._node is not None
            return {THIS_MACHINE: self._node.counters()}
        addresses = {member.id: member.address for member in self._access.members()}
        return {addresses.get(id, id): response["now"] for id, response in counted(self._access).items()}


_FIRST_SECONDS = 0.6  # a process counts its opens twice a second


def reading(
    before: Mapping[str, Mapping[str, int]], now: Mapping[str, Mapping[str, int]], *, seconds: float
) -> dict[str, Any]:
    """The rates of each node, by address, between two readings of counters. A node of only one of them is left out."""
    nodes = []
    for address in sorted(set(before) & set(now)):
        found = rates(before[address], now[address], seconds)
        nodes.append(
            {
                "address": address,
                "hit_ratio": found.hit_ratio,
                "total_hit_ratio": hit_ratio(now[address]),
                "per_second": {name: round(value, 3) for name, value in found.per_second.items()},
                "counters": dict(now[address]),
            }
        )
    return {"time": round(time.time(), 3), "seconds": round(seconds, 3), "nodes": nodes}


def table_lines(state: Mapping[str, Any]) -> list[str]:
    """A reading as a table, with the sums of several nodes."""
    nodes = state["nodes"]
    if not nodes:
        return ["no node responds"]
    shown = [
        name for place, name in enumerate(_COLUMNS) if place == 0 or any(node["per_second"].get(name) for node in nodes)
    ]
    rows = [
        (
            node["address"],
            ratio_text(node["hit_ratio"]),
            ratio_text(node["total_hit_ratio"]),
            *(_rate(name, node["per_second"].get(name, 0.0)) for name in shown),
        )
        for node in nodes
    ]
    if len(nodes) > 1:
        sums = (_rate(name, sum(node["per_second"].get(name, 0.0) for node in nodes)) for name in shown)
        rows.append(("all", "", "", *sums))
    columns = ("node", "hits", "hits, total", *(_COLUMNS[name] for name in shown))
    return table(columns, rows, right=columns[1:])


def _rate(name: str, value: float) -> str:
    return size_text(value) if name.endswith("_bytes") else f"{value:,.0f}"
