"""A training job of several ranks, each on the machine of another node: `python tests/support/replica_job.py JSON`.

The first process forks the ranks. They save, or restore and compare, a state that follows from the step. They append
lines to the file `results`: `rank NUMBER PID`, rank 0 `replicated STEP` for each save that is reported as replicated, and
every rank `near STEP` and `restored STEP`.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist
from tests.support.savers import PATIENT_WITH_NODES, savers_with

from millrace.checkpoint import CheckpointManager
from millrace.checkpoint.run.run_layout import parse_name
from millrace.events import Event, add_hook

ROWS = 1_500_000


def write_result(line: str) -> None:
    """Append a line to the results, in one write: libraries print to stdout in parts."""
    descriptor = os.open(os.environ["REPLICA_JOB_RESULTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def state_of(step: int) -> dict[str, Any]:
    """The state after a step, in equal parts on all ranks; a step below zero is an empty one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(max(0, step))
    values = torch.randn(ROWS, generator=generator) if step >= 0 else torch.zeros(ROWS)
    frozen = torch.arange(ROWS, dtype=torch.float32) if step >= 0 else torch.zeros(ROWS)
    return {
        "moving": distribute_tensor(values, mesh, [Shard(0)]),
        "frozen": distribute_tensor(frozen, mesh, [Shard(0)]),
        "step": step,
    }


def train(run: CheckpointManager) -> None:
    for step in range(1, 1000):
        run.save_async(step, state_of(step)).near.result()
        write_result(f"near {step}")


def restore(run: CheckpointManager) -> None:
    state = state_of(-1)
    step = run.restore(state)
    assert step is not None
    expected = state_of(step)
    assert state["step"] == step
    for key in ("moving", "frozen"):
        one, other = (each[key].to_local().view(torch.uint8) for each in (state, expected))
        assert torch.equal(one, other), f"{key} of step {step}"
    write_result(f"restored {step}")


def report(event: Event) -> None:
    if event.name == "checkpoint.replicated":
        point = parse_name(str(event.detail).split()[0])
        write_result(f"replicated {-1 if point is None else point.step}")
    elif event.name.startswith(("checkpoint.replica", "checkpoint.tier", "run.restored", "run.restore.fallback")):
        print(f"event {os.environ['RANK']} {event.name} {event.subject} {event.detail}", file=sys.stderr, flush=True)


def rank(number: int, order: dict[str, Any]) -> None:
    machines = order["machines"]
    os.environ.update(
        {"RANK": str(number), "WORLD_SIZE": str(len(machines)), "GLOO_SOCKET_IFNAME": "lo"},
        MILLRACE_CACHE_DIR=machines[number]["cache_dir"],
    )
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(order["meeting"], len(machines)),
        rank=number,
        world_size=len(machines),
        timeout=datetime.timedelta(seconds=300),
    )
    add_hook(report)
    exec(PATIENT_WITH_NODES, {})
    run = CheckpointManager(
        order["url"],
        local=machines[number]["local"],
        replicas=1,
        full_every=3,
        target_options=order["target_options"],
        thread_count=1,
    )
    with savers_with(PATIENT_WITH_NODES):
        {"train": train, "restore": restore}[order["program"]](run)


def main() -> None:
    order = json.loads(sys.argv[1])
    os.environ["REPLICA_JOB_RESULTS"] = order["results"]
    children = []
    for number in range(len(order["machines"])):
        child = os.fork()
        if child == 0:
            try:
                rank(number, order)
            except BaseException:  # noqa: BLE001 - printed, and the process ends
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
        write_result(f"rank {number} {child}")
    ended = [os.waitpid(child, 0)[1] for child in children]
    os._exit(0 if not any(ended) else 1)


if __name__ == "__main__":
    main()
