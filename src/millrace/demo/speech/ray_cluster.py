"""The Ray cluster that a run uses: the one that is there, or one of this process alone."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from millrace.demo import interrupts
from millrace.demo.disk import local_files
from millrace.demo.speech.ray_leftovers import cleared, end_processes_of
from millrace.demo.speech.settings import SpeechSettings
from millrace.errors import RetryableError

# Ray's sockets lie in its folder, and the path of a socket may have 107 characters.
_SCRATCH_PREFIX = "millr-"
_LONGEST_TMPDIR = 107 - len(
    f"/{_SCRATCH_PREFIX}12345678/r/session_2026-01-02_03-04-05_678901_4194304/sockets/plasma_store"
)

_ATTEMPTS = 3

_WORKER_ENVIRONMENT = {
    # Where the interface cannot be asked for by its address.
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
}


def _ray_environment() -> dict[str, str]:
    """What a cluster of this process alone needs to stay private and quiet."""
    return {
        # Any user of the machine could connect otherwise, and run code as this one.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # On Linux, Ray makes a loopback address into that of the network card, unless told that there is no cluster.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # The run kills a process on purpose and says so itself.
        "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
    }


def given_cluster() -> str | None:
    """The address of the cluster that this process was told of: as the driver of a submitted job, or by its user."""
    address = os.environ.get("RAY_ADDRESS", "")
    # An http address is meant for `ray job`.
    return address if address and not address.startswith(("http://", "https://")) else None


@contextmanager
def ray_cluster(settings: SpeechSettings, progress: Callable[[str], None]) -> Iterator[None]:
    """The cluster that this process is connected to; else the one in RAY_ADDRESS, as for the driver of a submitted job;
    else one of this process alone, on loopback, quiet, and gone afterwards."""
    address = given_cluster()
    # Ray reads these once, when it is imported. Who imported it before has decided already.
    if address is None and "ray" not in sys.modules:
        os.environ.update(_ray_environment())
    import ray

    if ray.is_initialized():
        yield
        return
    if address is not None:
        # Ray takes over SIGTERM, which `ray job stop` sends; here it is given back.
        with interrupts.held_back():
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        nodes = sum(node["Alive"] for node in ray.nodes())
        progress(f"on the Ray cluster at {address} ({nodes} node(s)); the training workers start")
        try:
            yield
        finally:
            ray.shutdown()
        return
    progress("starting Ray on this machine")
    # Ray's own folder goes with the run. Ray lets everyone write into it, so it lies in one that is ours alone.
    with local_files("the temporary directory", next_step="set TMPDIR to a directory that can be written"):
        parent = tempfile.gettempdir() if len(tempfile.gettempdir()) <= _LONGEST_TMPDIR else "/tmp"
        scratch = tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=parent)
    with cleared(scratch):
        try:
            with interrupts.held_back():
                _start(
                    scratch,
                    address="local",
                    # One slot beside the training workers, or Ray Data would wait for a slot that never comes free.
                    num_cpus=max(os.cpu_count() or 1, settings.num_workers * settings.cpus_per_worker + 1),
                    object_store_memory=256 * 2**20,
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                    # Torch would leave a folder of its own among the temporary ones.
                    runtime_env={"env_vars": {**_WORKER_ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/torch"}},
                    _node_ip_address="127.0.0.1",
                )
            yield
        finally:
            with interrupts.held_back():
                ray.shutdown()
                # A process of Ray's may write its last line of log meanwhile, which would make this fail.
                shutil.rmtree(scratch, ignore_errors=True)


def _start(scratch: str, **options: Any) -> None:
    """Have Ray start on this machine, with its files below `scratch`.

    Ray gives itself half a minute, which a very busy machine may not have: so it gets some more.
    """
    import ray

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            ray.init(**options, _temp_dir=f"{scratch}/r")
            return
        except Exception as error:  # Ray raises no class of its own for a node that does not come up
            ray.shutdown()
            end_processes_of(scratch)
            shutil.rmtree(f"{scratch}/r", ignore_errors=True)
            if attempt == _ATTEMPTS:
                line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
                raise RetryableError(
                    f"Ray did not start on this machine ({line})", next_step="try again when it has less to do"
                ) from error
