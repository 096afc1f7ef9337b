"""Runs a test module's own programs on several ranks: real processes with a real process group.

A module calls `run(__file__, ...)` in its tests, and `main(PROGRAMS)` where it is started as a script.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import pathlib
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from tests.support.fork_server import PATH, ForkedProcess, torch_server


def run(
    script: str,
    program: str,
    world: int,
    root: pathlib.Path,
    codes: tuple[int, ...] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Run a program of `script` on so many ranks, and `meanwhile` here; all must end with 0, or with `codes`."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": PATH}
    with contextlib.ExitStack() as running:
        directory = pathlib.Path(running.enter_context(tempfile.TemporaryDirectory()))
        logs = [directory / f"{rank}.log" for rank in range(world)]
        processes = []
        for rank, log in enumerate(logs):
            # The ranks meet at a file: a port that is free now may be taken when they have started.
            arguments = [program, str(rank), str(world), str(directory / "store"), str(root)]
            process = ForkedProcess(torch_server(), script, *arguments, log=log, env=environment)
            processes.append(process)
            running.callback(process.kill)
        meanwhile()
        ended = [process.wait(timeout=500) for process in processes]
        for code, expected in zip(ended, codes or (0,) * world, strict=True):
            assert code == expected, "\n".join(log.read_text(errors="replace") for log in logs)


def main(programs: Mapping[str, Callable[[pathlib.Path], None]]) -> None:
    """One rank, started by `run`."""
    program, rank, world, meeting, root = sys.argv[1:]
    os.environ.update(RANK=rank, WORLD_SIZE=world)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(meeting, int(world)),
        rank=int(rank),
        world_size=int(world),
        timeout=datetime.timedelta(seconds=400),
    )
    try:
        programs[program](pathlib.Path(root))
    except BaseException:  # noqa: BLE001 - printed, and the process ends
        traceback.print_exc()
        # Not waiting for the other rank, which waits for this one.
        os._exit(1)
    dist.barrier()
    # What a cycle refers to ends with the interpreter, where gloo's threads have aborted a process that had succeeded.
    gc.collect()
    dist.destroy_process_group()
