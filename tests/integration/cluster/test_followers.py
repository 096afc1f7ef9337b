"""Followers of published weights on the nodes of a cluster: the storage sends each byte once."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
import torch
from tests.support import patience
from tests.support.fork_server import ForkedProcess, torch_server
from tests.support.local_cluster import TOKEN, LocalCluster

from millrace.checkpoint import WeightPublisher
from millrace.filesystem import filesystem
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

PROGRAM = (
    patience.CODE
    + """
import json, sys, warnings
warnings.filterwarnings("ignore")
import torch
from millrace.checkpoint import WeightFollower
settings = json.loads(sys.argv[1])
follower = WeightFollower(settings["url"], target_options=settings["target_options"])
weights, version = {"body": torch.zeros(settings["count"], dtype=torch.bfloat16)}, None
for _ in range(3):
    version = follower.wait(newer_than=version, timeout=300)
    assert follower.update(weights) == version
    print(version, int(weights["body"].view(torch.int16).long().sum()), flush=True)
"""
)
COUNT, FOLLOWERS = 4 << 20, 4


def weights(version: int) -> dict[str, torch.Tensor]:
    values = (torch.randn(COUNT, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    for number in range(version):
        values.view(torch.int16)[number::200] += 1
    return {"body": values}


@pytest.mark.slow
def test_four_followers_cost_the_storage_one_read_of_each_version(tmp_path: Path, s3: S3Server, bucket: str) -> None:
    url = f"s3://{bucket}/policy"
    with (
        EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None) as region,
        WeightPublisher(url, target_options=s3.target_options) as publisher,
    ):
        options = {**s3.target_options, "endpoint_url": region.endpoint_url}
        settings = json.dumps({"url": url, "target_options": options, "count": COUNT})
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "AWS_"))}
        with (
            LocalCluster(tmp_path, FOLLOWERS, target_options=options, patient=True) as cluster,
            contextlib.ExitStack() as running,
        ):
            followers = []
            for node in cluster.nodes:
                environ = {
                    **inherited,
                    "MILLRACE_CACHE_DIR": str(node.cache_dir),
                    "MILLRACE_MIN_FREE": "0",
                    "MILLRACE_MEMBERS": cluster.members,
                    "MILLRACE_CLUSTER_TOKEN": TOKEN,
                }
                log = node.directory / "follower.log"
                follower = ForkedProcess(torch_server(), PROGRAM, settings, log=log, env=environ, pipes=True)
                followers.append(running.enter_context(follower))
            for version in range(3):
                publisher.publish(version, weights(version))
                expected = f"{version} {int(weights(version)['body'].view(torch.int16).long().sum())}\n"
                for follower in followers:
                    assert follower.stdout.readline().decode() == expected
            assert [follower.output() for follower in followers] == [""] * FOLLOWERS
        found = filesystem("s3", s3.target_options, members="none").find(f"{bucket}/policy", detail=True).values()
        sizes = dict.fromkeys(("data", "manifest"), 0)
        for entry in found:
            name = entry["name"].rpartition("/")[2].partition("-")[0].partition(".")[0]
            if name in sizes:
                sizes[name] += entry["size"]
        # Each follower reads the manifests itself.
        down = region.stats(f"/{bucket}/policy/step-").by_kind["GET"].bytes_down
        assert down <= 1.02 * sizes["data"] + FOLLOWERS * sizes["manifest"]
