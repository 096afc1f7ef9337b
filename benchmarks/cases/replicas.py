"""What `replicas=1` costs the training loop: the time that saves block it, and slower steps next to a copy.

Three nodes on one machine, over loopback, and a store behind a region of 200 MB/s. So the nodes that receive the copies
take processor time from the training, which they do not on machines of their own.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.cases.async_save import _training
from benchmarks.harness import Case, Measure, Options, Prepared
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

_BUCKET = "runs"


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    with S3Server(options.scratch / "s3") as s3, EmulatedRegion(s3.endpoint_url) as region:
        s3.create_bucket(_BUCKET)
        elements = 2_000_000 if options.quick else 40_000_000
        yield Prepared(
            {
                "options": {**s3.target_options, "endpoint_url": region.endpoint_url},
                "elements": elements,
                "saves": 3 if options.quick else 8,
            },
            expected=0,
            notes=(f"{elements * 4 / 1e6:.0f} MB of fp32, full saves.", str(region.calibrate())),
        )


case = Case(name="replicas", title="Asynchronous saves with a replica on another node", prepare=prepare, rounds=3)


def _saves(measure: Measure, context: Mapping[str, Any], replicas: int) -> int:
    import torch
    from tests.support.local_cluster import TOKEN, LocalCluster

    from millrace.checkpoint import CheckpointManager
    from millrace.events import Event, add_hook

    scratch, replicated = Path(context["scratch"]), []

    def note(event: Event) -> None:
        if event.name == "checkpoint.replicated":
            replicated.append(event)

    remove = add_hook(note)
    step = _training()
    state = {"model": {"weights": torch.randn(context["elements"]) * 0.02}}
    with LocalCluster(scratch / "nodes", 3, target_options=context["options"]) as cluster:
        os.environ.update(
            MILLRACE_MEMBERS=cluster.members,
            MILLRACE_CLUSTER_TOKEN=TOKEN,
            MILLRACE_CACHE_DIR=str(cluster.nodes[0].cache_dir),
        )
        url = f"s3://{_BUCKET}/{time.time_ns()}"
        blocked, beside = [], []
        with CheckpointManager(
            url, local=scratch / "local", replicas=replicas, full_every=1, keep=1, target_options=context["options"]
        ) as run:
            run.save_async(0, state).result()  # maps the memory, and starts the process
            with measure("saves") as figures:
                for number in range(1, context["saves"] + 1):
                    began = time.perf_counter()
                    pending = run.save_async(number, state)
                    blocked.append(time.perf_counter() - began)
                    while not pending.done():
                        beside.append(step())
                figures["blocked ms"] = statistics.mean(blocked) * 1e3
                figures["step ms beside"] = statistics.mean(beside) * 1e3
                figures["s a save"] = sum(beside) / context["saves"]
                figures["replicated saves"] = len(replicated)
    remove()
    return 0 if not replicas or replicated else 1


@case.contender("without replicas")
def without(measure: Measure, context: Mapping[str, Any]) -> int:
    return _saves(measure, context, 0)


@case.contender("replicas=1", baseline="without replicas")
def with_replicas(measure: Measure, context: Mapping[str, Any]) -> int:
    return _saves(measure, context, 1)
