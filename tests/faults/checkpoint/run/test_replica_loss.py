"""A node is lost while three ranks train: the newest save that was reported as replicated is restored on two ranks."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.fork_server import ForkedProcess, torch_server
from tests.support.local_cluster import TOKEN, LocalCluster
from tests.support.waiting import wait_until

from millrace.checkpoint.run.run_layout import Run, open_run
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

TRIALS = int(os.environ.get("REPLICA_TRIALS", "3"))
"""Twenty for the record, see docs/design/0025-replicas.md."""
SCRIPT = Path(__file__).parents[3] / "support" / "replica_job.py"


class Job:
    """The processes of one job; see `tests/support/replica_job.py`."""

    def __init__(self, program: str, cluster: LocalCluster, nodes: Sequence[int], url: str, meeting: Path) -> None:
        machines = [
            {"cache_dir": str(cluster.nodes[node].cache_dir), "local": str(cluster.nodes[node].directory / "local")}
            for node in nodes
        ]
        order = {"program": program, "machines": machines, "url": url, "meeting": str(meeting)}
        order["target_options"] = cluster.target_options  # type: ignore[assignment]
        self._results = meeting.with_suffix(".results")
        order["results"] = str(self._results)
        self._output = meeting.with_suffix(".log")
        environment = {**os.environ, "MILLRACE_MEMBERS": cluster.members, "MILLRACE_CLUSTER_TOKEN": TOKEN}
        self._process = ForkedProcess(torch_server(), str(SCRIPT), json.dumps(order), log=self._output, env=environment)
        self.log = ""
        """The last lines that it printed, after the end."""

    def results(self, word: str) -> list[list[int]]:
        """The numbers of the lines that begin with a word."""
        lines = self._results.read_text().splitlines() if self._results.exists() else []
        return [list(map(int, numbers)) for found, *numbers in map(str.split, lines) if found == word]

    def steps(self, word: str) -> list[int]:
        return [step for (step,) in self.results(word)]

    def is_over(self) -> bool:
        return self._process.exit_status() is not None

    def kill(self, first: int) -> None:
        """Kill the ranks, `first` before the others."""
        ranks = dict(self.results("rank"))
        for rank in sorted(ranks, key=lambda rank: rank != first):
            os.kill(ranks[rank], signal.SIGKILL)
        self.end()

    def end(self) -> int:
        code = self._process.wait(300)
        self.log = self._output.read_text(errors="replace")[-6000:]
        return code


@pytest.fixture(scope="module")
def slow_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmulatedRegion, dict[str, Any]]]:
    """A store to which an upload takes some seconds, with its options."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        server.create_bucket("runs")
        with EmulatedRegion(server.endpoint_url, round_trip_seconds=0.01, bytes_per_second=4e6) as region:
            yield region, {**server.target_options, "endpoint_url": region.endpoint_url}


def wait_for_replicas_of_a_save_that_the_store_lacks(job: Job, region: EmulatedRegion, run: Run) -> None:
    """From now on the store accepts no files of checkpoints."""
    region.fail("status", status=500, method="PUT", path="*/step-*", count=None)
    time.sleep(1.0)  # requests that were under way end
    stored = max((found.step for found in run.scan() if found.complete), default=0)
    wait_until(lambda: job.steps("replicated")[-1] > stored or job.is_over())


@pytest.mark.slow
def test_newest_replicated_save_survives_the_loss_of_any_node(
    tmp_path: Path, slow_store: tuple[EmulatedRegion, dict[str, Any]]
) -> None:
    region, options = slow_store
    moments = random.Random(os.environ.get("REPLICA_SEED", "7"))
    from_others = 0
    with LocalCluster(tmp_path, 3, target_options=options) as cluster:
        for trial in range(TRIALS):
            url = f"s3://runs/trial-{trial}"
            job = Job("train", cluster, (0, 1, 2), url, tmp_path / f"train-{trial}")
            wait_until(lambda job=job: bool(job.steps("replicated")) or job.is_over())
            # Otherwise chance decides whether the store has the save by then.
            if is_needed := trial % 2 == 1:
                wait_for_replicas_of_a_save_that_the_store_lacks(job, region, open_run(url, options))
            assert not job.is_over() or job.end() is None, job.log
            time.sleep(moments.uniform(0.0, 4.0))  # the moment of the loss
            # The log of the first rank is checked below. It needs no replica of the last one.
            victim = moments.randrange(2 if is_needed else 3)
            lost = cluster.nodes[victim]
            lost.kill()
            job.kill(victim)
            region.clear_faults()
            shutil.rmtree(lost.directory)
            newest = job.steps("replicated")[-1]
            left = [node for node in range(3) if node != victim]
            again = Job("restore", cluster, left, url, tmp_path / f"restore-{trial}")
            assert again.end() == 0, f"trial {trial}, node {victim}, step {newest}: {again.log}"
            restored = set(again.steps("restored"))
            assert len(restored) == 1
            print(f"trial {trial}: node {victim} lost, step {newest} replicated, step {min(restored)} restored")
            assert min(restored) >= newest, f"trial {trial}, node {victim}: {again.log}"
            from_others += is_needed and "from other nodes" in again.log
            cluster.start_one(victim)
            for node in cluster.nodes:
                shutil.rmtree(node.directory / "local", ignore_errors=True)
    assert from_others == TRIALS // 2, "a restore needed no replica"
