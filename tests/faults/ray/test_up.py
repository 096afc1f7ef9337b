"""A user with a cluster file: `ray up`, dashboard, `ray job submit`, workers that start on demand and stop, `ray down`.

The machines are namespaces with an sshd, which an emulated cloud starts. Everything else is Ray's own: launcher, updaters
over SSH, autoscaler, job server. The user's laptop is a machine as well.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import xxhash
from tests.support.machines.cloud import Cloud
from tests.support.machines.namespaces import ROOT, Machine, Machines
from tests.support.machines.rays import ENVIRONMENT
from tests.support.waiting import wait_until

from millrace.filesystem import filesystem
from millrace.testing.process import log_tail
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.root]

HERE = ROOT / "tests" / "support" / "machines"
JOB_SERVER = "http://localhost:8265"
OBJECTS, OBJECT_BYTES = 16, 500_000
SECONDS = 900.0
"""Enough for any one step. On a very busy machine Ray's own deadlines (a raylet waits half a minute for its agents) make the
autoscaler start a worker again, up to several times, at a minute each.
"""
_GET = "import sys, urllib.request as u; sys.stdout.write(u.urlopen(sys.argv[1], timeout=300).read().decode())"


def get(laptop: Machine, path: str) -> str:
    """The response of the dashboard to a browser on the laptop; empty without a server."""
    answer = laptop.run("python", "-I", "-S", "-c", _GET, f"{JOB_SERVER}{path}", seconds=SECONDS, check=False)
    return "" if "Traceback" in answer else answer


def readings(output: str) -> list[dict[str, Any]]:
    """The result of the job, from its log."""
    (line,) = [line for line in output.splitlines() if line.startswith("READINGS ")]
    return list(json.loads(line.removeprefix("READINGS ")))


@contextmanager
def logs_told(cloud: Cloud) -> Iterator[None]:
    """When the test fails, so do its reasons: they are in the logs of machines that are about to go."""
    try:
        yield
    except BaseException:
        for machine in cloud.made:
            for log in sorted(machine.directory.glob("tmp/ray/session_2*/logs/monitor*")):
                print(f"{machine.name}: {log.name}: {log_tail(log, 20)}")
        for log in sorted(cloud.machines.directory.glob("laptop/logs/*")):
            print(f"{log.name}: {log_tail(log, 20)}")
        raise


def test_ray_up_runs_jobs_and_shuts_down(tmp_path: Path, s3: S3Server, bucket: str) -> None:
    chance = random.Random(7)
    fs = filesystem("s3", s3.target_options, members="none")
    sums = {}
    for number in range(OBJECTS):
        content = chance.randbytes(OBJECT_BYTES)
        fs.origin.put(f"{bucket}/{number}", content)
        sums[f"{bucket}/{number}"] = xxhash.xxh3_64_hexdigest(content)

    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "AUTOSCALER_UPDATE_INTERVAL_S": "2"}
    with (
        Machines(tmp_path / "machines", names=["laptop"], environment=environment) as machines,
        EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None, host=machines.gateway) as region,
        Cloud(machines) as cloud,
        logs_told(cloud),
    ):
        laptop = machines[0]
        text = (HERE / "raycluster.yaml").read_text().replace("CLOUD", cloud.url).replace("KEY", str(cloud.key))
        (laptop.directory / "root" / "raycluster.yaml").write_text(text)
        job_environment = {
            "AWS_ENDPOINT_URL": region.endpoint_url,
            "AWS_ACCESS_KEY_ID": s3.target_options["key"],
            "AWS_SECRET_ACCESS_KEY": s3.target_options["secret"],
        }

        def ray(*arguments: str, **options: Any) -> str:
            return laptop.run("ray", *arguments, seconds=SECONDS, **options)

        def submit(*arguments: str, options: tuple[str, ...] = ()) -> str:
            own = (
                "--address",
                JOB_SERVER,
                "--working-dir",
                ".",
                "--runtime-env-json",
                json.dumps({"env_vars": job_environment}),
            )
            return ray("job", "submit", *own, *options, "--", "python3", "read.py", *arguments, cwd=HERE / "job")

        def downloaded() -> int:
            kinds = region.stats(prefix=f"/{bucket}/").by_kind
            return kinds["GET"].bytes_down if "GET" in kinds else 0

        ray("up", "--yes", "raycluster.yaml")
        assert kinds(cloud) == ["head"]

        with laptop.start("ray", "dashboard", "raycluster.yaml"):
            wait_until(lambda: "ray_version" in get(laptop, "/api/version"), "no dashboard", seconds=SECONDS)
            assert "<title>Ray Dashboard</title>" in get(laptop, "/")

            # Two workers are requested, and start. All read everything, and each byte is read from the object storage once.
            on_head, *on_workers = readings(submit("workers", bucket))
            head, *workers = cloud.made
            assert on_head == {"address": head.address, "sums": sums}
            assert [reading["sums"] for reading in on_workers] == [sums, sums]
            assert len({reading["address"] for reading in on_workers} & {worker.address for worker in workers}) == 2
            read_once = downloaded()
            assert OBJECTS * OBJECT_BYTES <= read_once < 1.25 * OBJECTS * OBJECT_BYTES  # a request may be made twice

            wait_until(lambda: kinds(cloud) == ["head"], "idle workers stay", seconds=SECONDS)

            # Their cached data is not lost with them.
            job = job_id(submit("head", bucket, options=("--no-wait",)))
            ended = json_when(lambda: get(laptop, f"/api/jobs/{job}"), "status", {"SUCCEEDED", "FAILED", "STOPPED"})
            assert ended["status"] == "SUCCEEDED", ended["message"]
            assert readings(json.loads(get(laptop, f"/api/jobs/{job}/logs"))["logs"]) == [on_head]
            assert downloaded() - read_once < 0.25 * OBJECTS * OBJECT_BYTES

        ray("down", "--yes", "raycluster.yaml")
        assert kinds(cloud) == []


def kinds(cloud: Cloud) -> list[str]:
    """Of the machines that run, by Ray's tag."""
    return sorted(machine["tags"]["ray-node-type"] for machine in cloud.list().values())


def job_id(output: str) -> str:
    """The job's name, from the output of `ray job submit`."""
    (line,) = [line for line in output.splitlines() if "submitted successfully" in line]
    return line.split("'")[1]


def json_when(ask: Callable[[], str], name: str, values: set[str]) -> dict[str, Any]:
    """The answer in which `name` has one of these values, when it comes."""
    answer: dict[str, Any] = {}

    def has_come() -> bool:
        answer.update(json.loads(ask() or "{}"))
        return answer.get(name) in values

    wait_until(has_come, f"{name} is none of {sorted(values)}", seconds=SECONDS)
    return answer
