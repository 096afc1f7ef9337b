"""The program that `ray job submit` runs on the cluster of test_up: reads the objects of a prefix and prints the result.

`read.py workers BUCKET` needs a head and two machines: all read all objects, one after the other, the head first.
`read.py head BUCKET` reads them on the head. Storage and credentials are those of the environment.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
import xxhash
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import millrace
from millrace.cluster.membership.ray import find_node


def read(bucket: str) -> dict[str, Any]:
    """Read everything; returns the node, and the checksums."""
    # The autoscaler spares nodes with actors. That of Millrace makes way after two idle minutes, here after ten seconds.
    # Less, and on a busy machine the first worker's would go while the second worker's starts.
    assert find_node.__kwdefaults__
    find_node.__kwdefaults__["idle_seconds"] = 10.0
    fs = millrace.filesystem("s3", min_free=0, consistency="immutable")
    sums = {key: xxhash.xxh3_64_hexdigest(fs.cat_file(key)) for key in sorted(fs.find(bucket))}
    return {"address": ray.util.get_node_ip_address(), "sums": sums}


def main(where: str, bucket: str) -> None:
    ray.init()
    readings = [read(bucket)]
    if where == "workers":
        group = placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
        for bundle in range(2):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            readings.append(ray.get(ray.remote(read).options(num_cpus=1, scheduling_strategy=place).remote(bucket)))
    print("READINGS", json.dumps(readings), flush=True)


main(*sys.argv[1:])
