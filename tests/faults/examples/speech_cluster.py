"""A cluster on machines of its own with a small speech data set in S3, and jobs submitted to it as from a laptop."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
from tests.support.machines.namespaces import ROOT, Machine, Machines
from tests.support.machines.rays import ENVIRONMENT, RayOnMachines
from tests.support.servers import steady_port

import millrace
from finetune.log import Epoch, epochs_of, read_events
from millrace.checkpoint import CheckpointManager
from millrace.errors import RetryableError
from millrace.testing.process import ChildProcess
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server
from sample_data import write_common_voice

BUCKET = "speech"
SCRIPTS = ROOT / "examples" / "speech"
_PATIENCE_SECONDS = 500.0
ENDS = ("SUCCEEDED", "FAILED", "STOPPED")
_WORKER_CPUS = 3
FEW = {"train": 48, "dev": 8, "test": 8}


class SpeechCluster:
    """A head without CPUs, two workers, and S3 behind an address that all of them reach. A context manager.

    The data set is the sample of the example, of whose splits `limits` takes so many clips; None takes all.
    """

    def __init__(self, directory: Path, *, limits: dict[str, int] | None = None) -> None:
        self._directory = directory
        self._limits = limits
        self._stack = ExitStack()
        self.s3 = S3Server(directory / "s3", port=steady_port())
        self.machines = Machines(directory / "m")

    def __enter__(self) -> SpeechCluster:
        with ExitStack() as stack:
            stack.enter_context(self.machines)
            self.s3.start()
            stack.callback(self.s3.stop)
            self.region = stack.enter_context(
                EmulatedRegion(
                    self.s3.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None, host=self.machines.gateway
                )
            )
            self.machines.environment = {
                **ENVIRONMENT,
                "AWS_ACCESS_KEY_ID": self.s3.key,
                "AWS_SECRET_ACCESS_KEY": self.s3.secret,
                "AWS_ENDPOINT_URL": self.region.endpoint_url,
                "AWS_REGION": "us-east-1",
                "MILLRACE_CAPACITY": "1GB",
                "MILLRACE_MIN_FREE": "0",
                "OMP_NUM_THREADS": "1",
                # A lost node's CPUs are counted with for a while: how long the workers wait there for a place that is gone.
                "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
            }
            self.ray = RayOnMachines(self.machines.add("head"), cpus=0)
            self.workers: list[Machine] = []
            self.data_fs = millrace.filesystem(
                "s3",
                target_options=self.s3.target_options,
                members="none",
                consistency="always",
                cache_dir=str(self._directory / "cache"),
                min_free=0,
            )
            self._upload()
            self.join(2)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def join(self, count: int) -> None:
        """So many more workers; returns when they have joined."""
        machines = [self.machines.add() for _ in range(count)]
        self.ray.join(*machines, cpus=_WORKER_CPUS)
        self.workers += machines

    def lose(self, machine: Machine) -> None:
        """A permanent power cut on a worker."""
        machine.kill()
        self.workers.remove(machine)

    def _upload(self) -> None:
        self.s3.create_bucket(BUCKET)
        folder = self._directory / "data"
        write_common_voice(folder, self._limits)
        for path in folder.rglob("*"):
            if path.is_file():
                self.data_fs.origin.put(f"{BUCKET}/de/{path.relative_to(folder)}", path.read_bytes())

    # --- jobs -----------------------------------------------------------------------------------------

    def submit(self, name: str, *options: str) -> Job:
        """Submit a fine-tune by the job API, whose outputs go to `runs/<name>`."""
        from ray.job_submission import JobSubmissionClient

        client = JobSubmissionClient(self.ray.dashboard)
        job = Job(self, name)
        client.submit_job(
            entrypoint=shlex.join(self._entrypoint(name, options)),
            submission_id=name,
            runtime_env={"working_dir": str(SCRIPTS)},
        )
        return job

    def submit_by_command(self, name: str, *options: str) -> tuple[Job, ChildProcess]:
        """The same by `ray job submit`, which follows the job."""
        command = [
            *(str(Path(sys.executable).with_name("ray")), "job", "submit", "--address", self.ray.dashboard),
            *("--working-dir", str(SCRIPTS), "--submission-id", name, "--", *self._entrypoint(name, options)),
        ]
        env = {**os.environ, **ENVIRONMENT}
        return Job(self, name), ChildProcess(command, log=self._directory / f"{name}.log", env=env)

    def _entrypoint(self, name: str, options: Sequence[str]) -> list[str]:
        data, run = f"s3://{BUCKET}/de", f"s3://{BUCKET}/runs/{name}"
        return [*("python3", "ray-train-multiple-gpu.py", "--cpu", "--data", data, "--run", run), *options]


class Job:
    """A submitted job, seen from outside: by its status, and by what it leaves in the bucket."""

    def __init__(self, cluster: SpeechCluster, name: str) -> None:
        self._cluster = cluster
        self.name = name
        self.run = f"s3://{BUCKET}/runs/{name}"
        self._events: list[dict[str, Any]] = []

    def status(self) -> str:
        """The status of the job server; empty for an unknown job."""
        found = self._cluster.ray.state(f"/api/jobs/{self.name}")
        return str(found["status"]) if found else ""

    def log(self) -> str:
        """What the script has printed."""
        found = self._cluster.ray.state(f"/api/jobs/{self.name}/logs")
        return str(found["logs"]) if found else ""

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """The training log, or the events of one kind in it; as it was when the storage last answered."""
        with suppress(RetryableError):
            self._events = read_events(self._cluster.data_fs, self.run)
        return [event for event in self._events if kind in ("", event["event"])]

    def epochs(self) -> list[Epoch]:
        """One record for each epoch."""
        return epochs_of(self.events())

    def files(self) -> set[str]:
        """The names of the files that the job has written."""
        base = self.run.removeprefix("s3://")
        return {path.removeprefix(f"{base}/") for path in self._cluster.data_fs.find(base)}

    def checkpoints(self) -> CheckpointManager:
        """The checkpoints of the job."""
        return CheckpointManager(f"{self.run}/checkpoints", target_options=self._cluster.s3.target_options)

    def wait_for(self, condition: Callable[[], bool], what: str, *, ended: Sequence[str] = ()) -> None:
        """Wait for something that a running job does, for as long as the training log grows now and then.

        With `ended` it may end so meanwhile.
        """
        reported, deadline = 0, time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            status = self.status()
            # It may have come about between the two questions.
            assert status not in ENDS or status in ended or condition(), f"{what}: {status}: {self._end_of_log()}"
            if len(self.events()) > reported:
                reported, deadline = len(self.events()), time.monotonic() + _PATIENCE_SECONDS
            assert time.monotonic() < deadline, f"{what}: {status}: {self._end_of_log()}"
            time.sleep(1.0)  # each look costs the cluster CPU

    def wait_for_checkpoint(self, epoch: int) -> None:
        """Wait until an epoch's checkpoint is complete in the bucket."""
        with self.checkpoints() as checkpoints:
            self.wait_for(lambda: (checkpoints.latest() or 0) >= epoch, f"no checkpoint {epoch}")

    def wait_for_end(self, status: str = "SUCCEEDED") -> None:
        """Wait until the job has ended like this."""
        self.wait_for(lambda: self.status() == status, "the job does not end", ended=(status,))

    def _end_of_log(self) -> str:
        return self.log()[-4000:]


def training_processes(machine: Machine) -> list[int]:
    """Of Ray Train on a machine, as this one names them."""
    return [
        pid for pid, line in machine.processes().items() if line[0].startswith("ray::") and "TrainWorker" in line[0]
    ]


def kill(pid: int) -> None:
    """`kill -9`, and see it gone."""
    with suppress(ProcessLookupError, psutil.NoSuchProcess):
        process = psutil.Process(pid)
        os.kill(pid, signal.SIGKILL)
        process.wait(120)
