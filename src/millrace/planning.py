"""The arithmetic of `millrace plan`: the savings of a cache of given size in hits, time and money. Pure functions.

The model is a training job that reads a data set once in each epoch, each node an equal part, in a new random order:

- The first epoch reads every byte once from the origin. Each later epoch reads the part that does not fit into the cache.
- The part of a loop that fits stays cached: the hit ratio of later epochs is capacity / data, the optimum.
- Blocks are spread evenly: of the cached bytes that a node reads, the share `replicas / nodes` is on its own disk.
- Origin, disks, network and training work at the same time, so the slowest of them sets the time of an epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Inputs. Sizes in bytes, rates in bytes per second and node, prices in one currency. 0 as a rate: not a limit.

    `disk_bytes` is the capacity of the cache on one node. `origin_total` limits all nodes together. `train_rate` is how fast
    one node consumes data. `get_price` is for 1,000 requests, `transfer_price` for 10^9 bytes from the origin, `node_price`
    for an hour of one node.
    """

    data_bytes: int
    nodes: int
    disk_bytes: int
    epochs: int
    replicas: int = 1
    origin_rate: float = 0.0
    origin_total: float = 0.0
    disk_rate: float = 0.0
    network_rate: float = 0.0
    train_rate: float = 0.0
    request_bytes: int = 8 << 20
    get_price: float = 0.0
    transfer_price: float = 0.0
    node_price: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch. `limit` names the cause of its time: origin, disks, network or training; none if no rate is given."""

    hit_ratio: float
    origin_bytes: int
    seconds: float
    limit: str


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Money, in the currency of the prices."""

    requests: float
    transfer: float
    nodes: float

    @property
    def total(self) -> float:
        return self.requests + self.transfer + self.nodes


@dataclass(frozen=True, kw_only=True)
class Total:
    """All epochs together."""

    hit_ratio: float
    origin_bytes: int
    origin_requests: int
    seconds: float
    cost: Cost


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result. `cached_share` is the part of the data that fits into the cache."""

    capacity_bytes: int
    cached_share: float
    first: Epoch
    later: Epoch
    total: Total
    uncached: Total


def plan(work: Workload) -> Plan:
    """Compute the plan. Raises `ValueError` for inputs that are not positive."""
    if min(work.data_bytes, work.nodes, work.epochs, work.replicas, work.request_bytes) < 1 or work.disk_bytes < 0:
        raise ValueError("sizes and numbers must be positive")
    replicas = min(work.replicas, work.nodes)
    capacity = work.nodes * work.disk_bytes // replicas
    share = min(1.0, capacity / work.data_bytes)
    missing = work.data_bytes - min(work.data_bytes, capacity)
    first = _epoch(work, replicas, hits=0.0, origin_bytes=work.data_bytes, stored=share * replicas)
    later = _epoch(work, replicas, hits=share, origin_bytes=missing, stored=0.0)
    alone = _uncached_epoch(work)
    return Plan(
        capacity_bytes=capacity,
        cached_share=share,
        first=first,
        later=later,
        total=_total(work, first, later),
        uncached=_total(work, alone, alone),
    )


def _epoch(work: Workload, replicas: int, *, hits: float, origin_bytes: int, stored: float) -> Epoch:
    """An epoch. `stored` is how often each byte of the data is written to a disk."""
    elsewhere = 1 - replicas / work.nodes  # the share of bytes that a node gets from another one
    each = work.data_bytes / work.nodes
    times = {
        "origin": _origin_seconds(work, origin_bytes),
        "disks": _seconds(each * (hits + stored), work.disk_rate),
        "network": _seconds(each * (hits * elsewhere + (1 - hits) * (1 - 1 / work.nodes)), work.network_rate),
        "training": _seconds(each, work.train_rate),
    }
    return _slowest(times, hits, origin_bytes)


def _uncached_epoch(work: Workload) -> Epoch:
    times = {
        "origin": _origin_seconds(work, work.data_bytes),
        "training": _seconds(work.data_bytes / work.nodes, work.train_rate),
    }
    return _slowest(times, 0.0, work.data_bytes)


def _slowest(times: dict[str, float], hits: float, origin_bytes: int) -> Epoch:
    limit = max(times, key=lambda name: times[name])
    seconds = times[limit]
    return Epoch(hit_ratio=hits, origin_bytes=origin_bytes, seconds=seconds, limit=limit if seconds else "none")


def _origin_seconds(work: Workload, nbytes: float) -> float:
    return max(_seconds(nbytes / work.nodes, work.origin_rate), _seconds(nbytes, work.origin_total))


def _seconds(nbytes: float, rate: float) -> float:
    return nbytes / rate if rate else 0.0


def _total(work: Workload, first: Epoch, later: Epoch) -> Total:
    more = work.epochs - 1
    origin_bytes = first.origin_bytes + more * later.origin_bytes
    requests = sum(
        count * math.ceil(epoch.origin_bytes / work.request_bytes) for count, epoch in ((1, first), (more, later))
    )
    seconds = first.seconds + more * later.seconds
    return Total(
        hit_ratio=1 - origin_bytes / (work.epochs * work.data_bytes),
        origin_bytes=origin_bytes,
        origin_requests=requests,
        seconds=seconds,
        cost=Cost(
            requests=requests / 1000 * work.get_price,
            transfer=origin_bytes / 1e9 * work.transfer_price,
            nodes=work.nodes * seconds / 3600 * work.node_price,
        ),
    )
