"""deploy/hosts for real: `ray up`, all workers in, reads through the cache, `ray down`. The machines are namespaces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.deploying import cluster_file
from tests.support.machines.cloud import Cloud
from tests.support.machines.namespaces import ROOT, Machines
from tests.support.machines.rays import ENVIRONMENT
from tests.support.waiting import wait_until

pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.slow, pytest.mark.root]

SECONDS = 300.0
"""Enough for any one step on a very busy machine; what waits for more than this hangs."""

READ = """
import json, sys, millrace, ray
ray.init(address="auto", log_to_driver=False)

@ray.remote(scheduling_strategy="SPREAD")
def read(path):
    fs = millrace.filesystem("file")
    return ray.util.get_node_ip_address(), fs.cat_file(path).decode()

alive = sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
seen = ray.get([read.remote(sys.argv[1]) for _ in alive]) if len(alive) == 3 else []
print("TOLD " + json.dumps({"alive": alive, "texts": sorted({text for _, text in seen})}))
"""


def _filled_in(cloud: Cloud) -> dict[str, Any]:
    """The file for these machines. They have Millrace already, and no way to a package index; nothing else is changed."""
    config = cluster_file("hosts/raycluster.yaml")
    head, *workers = cloud.made
    config["provider"] |= {"head_ip": head.address, "worker_ips": [worker.address for worker in workers]}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(cloud.key)}
    config["setup_commands"] = []
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        small = "ray start --num-cpus=1 --object-store-memory=100000000"
        config[key] = [
            command.replace("ray start", small).replace("/mnt/millrace", "/tmp/millrace") for command in config[key]
        ]
    return config


def test_ray_up_on_existing_machines_starts_a_cluster(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "AUTOSCALER_UPDATE_INTERVAL_S": "2"}
    with (
        Machines(tmp_path / "machines", names=["laptop"], environment=environment) as machines,
        Cloud(machines) as cloud,
    ):
        laptop = machines[0]
        cloud.create({}, 3)
        head, *workers = cloud.made
        (laptop.directory / "root" / "raycluster.yaml").write_text(yaml.safe_dump(_filled_in(cloud)))
        shared = tmp_path / "machines" / "shared"  # on all machines at the same place
        shared.write_text("through the cache")
        file = f"{laptop.home}/raycluster.yaml"

        # Ray gives a node 30 s to start, too little on a very busy machine; a user would repeat the command, too.
        for _ in range(3):
            output = laptop.run("ray", "up", "--yes", file, cwd=ROOT, seconds=SECONDS, check=False)
            if "Failed to setup head node" not in output:
                break
        assert "Useful commands" in output, output
        for worker in workers:
            wait_until(
                lambda worker=worker: any("raylet" in " ".join(line) for line in worker.processes().values()),
                f"Ray does not come to {worker.name}",
                seconds=SECONDS,
            )

        reported: dict[str, Any] = {}

        def all_are_in() -> bool:
            # It may fail while a worker joins, or does so a second time: not yet.
            output = head.run("python", "-c", READ, shared, seconds=SECONDS, check=False)
            lines = [line for line in output.splitlines() if line.startswith("TOLD ")]
            if not lines:
                print(output)
                return False
            reported.update(json.loads(lines[-1].removeprefix("TOLD ")))
            return reported["alive"] == sorted(machine.address for machine in cloud.made)

        wait_until(all_are_in, "not all workers are in the cluster", seconds=SECONDS)
        assert reported["texts"] == ["through the cache"]
        # The files that Millrace would be installed from came along, to the head and from there to the workers.
        for machine in cloud.made:
            assert (machine.directory / "root/millrace/src/millrace/__init__.py").exists()
            assert (machine.directory / "root/millrace/constraints.txt").exists()
            assert not list((machine.directory / "root/millrace/src").rglob("__pycache__"))
        assert (head.directory / "tmp/millrace").is_dir()

        laptop.run("ray", "down", "--yes", file, cwd=ROOT, seconds=SECONDS)
        wait_until(
            lambda: not any("raylet" in " ".join(line) for line in head.processes().values()), "Ray stays on the head"
        )
