"""For tests of trainings that are killed and resumed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.fork_server import PATH, ForkedProcess, torch_server
from tests.support.waiting import wait_until

from millrace.testing.s3 import S3Server


def run_script(script: str, *arguments: str, directory: Path) -> int:
    """Run a test module as a script in a directory; returns its exit status."""
    variables = {**os.environ, "PYTHONPATH": PATH, "GLOO_SOCKET_IFNAME": "lo"}
    log = directory / "script.log"
    with ForkedProcess(torch_server(), script, *arguments, log=log, cwd=directory, env=variables) as process:
        status = process.wait(timeout=300)
    print(log.read_text(errors="replace"))
    return status


def environment_of(s3: S3Server) -> dict[str, str]:
    """The variables with which libraries find the server."""
    return {
        "AWS_ENDPOINT_URL": s3.endpoint_url,
        "AWS_ACCESS_KEY_ID": s3.key,
        "AWS_SECRET_ACCESS_KEY": s3.secret,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def set_up_rank(directory: Path) -> None:
    """The variables of a launcher such as torchrun, for one of the ranks of `tests.support.ranks`."""
    os.environ.update(
        LOCAL_RANK=os.environ["RANK"],
        LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"],
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",  # not used: there is a process group
    )
    os.chdir(directory)


def kill_with_the_others() -> None:
    """Kill this process when all ranks are here: an earlier end would be an error of the other ranks.

    They share the current directory.
    """
    Path(f"here-{os.environ.get('RANK', 0)}").touch()
    world = int(os.environ.get("WORLD_SIZE", 1))
    wait_until(lambda: all(Path(f"here-{rank}").exists() for rank in range(world)))
    os.kill(os.getpid(), signal.SIGKILL)
