"""The arithmetic of `millrace plan`, with numbers that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millrace.planning import Workload, plan

TB = 10**12
GB = 10**9
BASE = Workload(data_bytes=10 * TB, nodes=10, disk_bytes=500 * GB, epochs=5)


@pytest.mark.parametrize(
    ("changes", "share", "hit_ratio", "origin_bytes"),
    [
        ({}, 0.5, 0.4, 30 * TB),  # 10 TB once, then 4 times the half that does not fit
        ({"disk_bytes": TB}, 1.0, 0.8, 10 * TB),
        ({"disk_bytes": 3 * TB}, 1.0, 0.8, 10 * TB),
        ({"disk_bytes": 0}, 0.0, 0.0, 50 * TB),
        ({"replicas": 2}, 0.25, 0.2, 40 * TB),
        ({"nodes": 1}, 0.05, 0.04, 48 * TB),
        ({"nodes": 1, "replicas": 3}, 0.05, 0.04, 48 * TB),  # no more replicas than nodes
        ({"epochs": 1}, 0.5, 0.0, 10 * TB),
    ],
)
def test_plan_of_a_loop_reaches_the_hits_of_the_part_that_fits(
    changes: dict[str, Any], share: float, hit_ratio: float, origin_bytes: int
) -> None:
    result = plan(replace(BASE, **changes))
    assert result.cached_share == pytest.approx(share)
    assert result.later.hit_ratio == pytest.approx(share)
    assert result.total.hit_ratio == pytest.approx(hit_ratio)
    assert result.total.origin_bytes == origin_bytes
    assert result.uncached.hit_ratio == 0


@pytest.mark.parametrize(
    ("changes", "first", "later", "limits"),
    [
        ({}, 0, 0, ("none", "none")),
        ({"origin_rate": GB}, 1000, 500, ("origin", "origin")),  # a node reads 1 TB, then half of it
        ({"origin_rate": GB, "origin_total": 2 * GB}, 5000, 2500, ("origin", "origin")),
        ({"disk_rate": GB}, 500, 500, ("disks", "disks")),  # half of 1 TB is written, and later read
        ({"network_rate": GB}, 900, 900, ("network", "network")),  # nine of ten bytes belong to other nodes
        ({"network_rate": GB, "nodes": 1}, 0, 0, ("none", "none")),
        ({"train_rate": GB, "origin_rate": 2 * GB}, 1000, 1000, ("training", "training")),
        ({"train_rate": 2 * GB, "origin_rate": 1.25 * GB}, 800, 500, ("origin", "training")),
    ],
)
def test_plan_takes_the_slowest_resource_for_the_time_of_an_epoch(
    changes: dict[str, Any], first: float, later: float, limits: tuple[str, str]
) -> None:
    result = plan(replace(BASE, **changes))
    assert (result.first.seconds, result.later.seconds) == (pytest.approx(first), pytest.approx(later))
    assert (result.first.limit, result.later.limit) == limits
    assert result.total.seconds == pytest.approx(first + 4 * later)


def test_plan_counts_requests_and_money_with_a_cache_and_without() -> None:
    result = plan(
        replace(BASE, request_bytes=10**7, origin_rate=GB, get_price=0.5, transfer_price=0.01, node_price=3.6)
    )
    assert (result.total.origin_requests, result.uncached.origin_requests) == (3_000_000, 5_000_000)
    cost, without = result.total.cost, result.uncached.cost
    assert (cost.requests, without.requests) == (pytest.approx(1500), pytest.approx(2500))
    assert (cost.transfer, without.transfer) == (pytest.approx(300), pytest.approx(500))
    assert (cost.nodes, without.nodes) == (pytest.approx(30), pytest.approx(50))  # 3,000 s and 5,000 s of ten nodes
    assert cost.total == pytest.approx(1830)


def test_plan_rounds_the_requests_of_an_epoch_up() -> None:
    result = plan(Workload(data_bytes=10, nodes=1, disk_bytes=7, epochs=3, request_bytes=4))
    assert result.total.origin_requests == 3 + 2 * 1


@pytest.mark.parametrize(
    "changes", [{"data_bytes": 0}, {"nodes": 0}, {"epochs": 0}, {"disk_bytes": -1}, {"request_bytes": 0}]
)
def test_plan_of_impossible_inputs_is_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        plan(replace(BASE, **changes))
