"""What can be said of the main job without running it: its settings, its disk, its closing table."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest

from millrace.demo.disk import local_files
from millrace.demo.main_job import DemoResult, DemoSettings, result_json, summary_table
from millrace.demo.place import Place
from millrace.demo.speech import ray_cluster
from millrace.demo.speech.job import SpeechJob
from millrace.demo.speech.log import CheckpointRecord, EpochRecord, WorkerTimes
from millrace.demo.speech.ray_leftovers import processes_of
from millrace.demo.speech.run import SpeechResult, training_error
from millrace.demo.speech.settings import SpeechSettings
from millrace.demo.speech_data import write_common_voice
from millrace.demo.summary import summary
from millrace.errors import (
    ConfigurationError,
    DiskFullError,
    MillraceError,
    ObjectNotFoundError,
    RetryableError,
    StorageError,
)

SETTINGS = SpeechSettings(data_url="s3://b/cv", run_url="s3://b/run", epochs=1, kill_in_epoch=1)


@pytest.mark.parametrize(
    "change", [{"epochs": 0}, {"epochs": 1.5}, {"workers": 0}, {"workers": None}, {"workers": True}, {"port": 70000}]
)
def test_demo_settings_that_cannot_work_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(change))):
        DemoSettings(directory=Path("x"), **change)


def test_a_job_does_not_show_its_secrets() -> None:
    job = SpeechJob(
        settings=SETTINGS,
        run=Place(fs=pyarrow.fs.LocalFileSystem(), url="/x"),
        train_rows=1,
        checkpoint_options={"secret": "geheim"},
    )
    assert "geheim" not in f"{job} {job!r} {job.settings.public()}"


# --- disk -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, DiskFullError),
        (errno.EDQUOT, DiskFullError),
        (errno.EROFS, StorageError),
        (errno.EIO, StorageError),
    ],
)
def test_errors_of_the_disk_are_ours(number: int, kind: type[MillraceError]) -> None:
    with pytest.raises(StorageError, match=r"/d/x.*--directory") as caught, local_files("/d"):
        raise OSError(number, os.strerror(number), "/d/x")
    assert type(caught.value) is kind
    assert isinstance(caught.value.__cause__, OSError)


def test_our_own_errors_pass_the_disk_helper() -> None:
    with pytest.raises(ObjectNotFoundError), local_files("/d"):
        raise ObjectNotFoundError("s3://b/k")


def test_a_data_set_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="choose another --directory"):
        write_common_voice(tmp_path / "file", limits={"train": 1, "dev": 1, "test": 1})
    (tmp_path / "folder" / "train.tsv").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"train\.tsv"):
        write_common_voice(tmp_path / "folder", limits={"train": 1, "dev": 1, "test": 1})


# --- failures ---------------------------------------------------------------------------------------


class WrappedError(Exception):
    """As Ray wraps what a task or a worker raised."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.__dict__.update(fields)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (ValueError("bad value\nand more"), "ValueError: bad value"),
        (WrappedError("outer", cause=OSError("no such model")), "OSError: no such model"),
        (WrappedError("outer", worker_failures={0: KeyError("lost")}), "KeyError: 'lost'"),
        (WrappedError("Traceback (most recent call last)\n  File x\nIndexError: far out"), "IndexError: far out"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_a_failed_training_is_told_in_a_line(failure: BaseException, words: str) -> None:
    error = training_error("s3://b/run", failure)
    assert str(error).startswith("the training of s3://b/run failed: ")
    assert words in str(error)
    assert "MILLRACE_DEBUG" in str(error)


def test_our_own_error_in_a_worker_is_the_error() -> None:
    own = ObjectNotFoundError("s3://b/k", next_step="check the name")
    assert (
        training_error("s3://b/run", WrappedError("outer", worker_failures={1: WrappedError("inner", cause=own)}))
        is own
    )


# --- the closing table ------------------------------------------------------------------------------


def epoch(number: int, *, attempt: int, **changes: Any) -> EpochRecord:
    worker = WorkerTimes(
        rank=0, node="10.0.0.1", clips=8, steps=2, wait_seconds=0.5, compute_seconds=2.0, evaluate_seconds=0.25,
        stall_seconds=0.25,
    )  # fmt: skip
    base = EpochRecord(
        epoch=number, attempt=attempt, train_loss=1.0, dev_cer=0.5, clips=8, clips_digest="aa", steps=2, seconds=3.0,
        learning_rate=0.1, origin_bytes=0, cache_bytes=2_000_000, peer_bytes=0, workers=(worker,),
        checkpoint=CheckpointRecord(
            epoch=number, kind="full", checkpoint_bytes=800_000, raw_bytes=1_000_000, seconds=0.5
        ),
    )  # fmt: skip
    return replace(base, **changes)


def start(attempt: int, after: int, seconds: float) -> dict[str, Any]:
    return {"event": "start", "attempt": attempt, "resumed_after": after, "time": seconds}


def demo_result(speech: SpeechResult, directory: Path) -> DemoResult:
    return DemoResult(
        speech=speech, run_url="s3://runs/x", report=directory / "report.html", model_url="s3://runs/x/model",
        server_directory=directory, witness_bytes=5, origin_bytes=5, seconds=9.0,
    )  # fmt: skip


def test_a_kill_before_the_first_checkpoint_is_in_the_table(tmp_path: Path) -> None:
    speech = SpeechResult(
        settings=SETTINGS,
        epochs=[epoch(1, attempt=1)],
        events=[start(0, 0, 1.0), start(1, 0, 20.0)],
        metrics={},
        restarts=1,
        kill={"epoch": 1, "pid": 4, "time": 12.0},
    )
    table = summary_table(demo_result(speech, tmp_path))
    note = "worker killed on purpose in epoch 1; 8 s later from scratch: there was no checkpoint yet"
    assert table.index(note) < table.index("    1  1.000")
    assert json.loads(result_json(demo_result(speech, tmp_path)))["restarts"] == 1
    quiet = replace(speech, kill=None, restarts=0, events=speech.events[:1], epochs=[epoch(1, attempt=0)])
    assert "---" not in summary_table(demo_result(quiet, tmp_path))


def test_restarts_are_told_for_what_they_were(tmp_path: Path) -> None:
    speech = SpeechResult(
        settings=replace(SETTINGS, epochs=2),
        epochs=[epoch(1, attempt=0), epoch(2, attempt=2)],
        events=[start(0, 0, 1.0), start(1, 1, 15.0), start(2, 1, 20.0)],
        metrics={},
        restarts=2,
        kill={"epoch": 2, "pid": 4, "time": 12.0},
    )
    assert speech.restart_notes() == {
        2: "worker killed on purpose in epoch 2; 3 s later resumed from the checkpoint of epoch 1; "
        "then the training was started again, resumed from the checkpoint of epoch 1"
    }


def ran(*epochs: EpochRecord, **metrics: Any) -> SpeechResult:
    return SpeechResult(
        settings=SETTINGS, epochs=list(epochs), events=[start(0, 0, 1.0)], metrics=metrics, restarts=0, kill=None
    )


def test_the_table_tells_what_an_epoch_cost(tmp_path: Path) -> None:
    speech = ran(
        epoch(1, attempt=0, origin_bytes=2_160_000, cache_bytes=0), epoch(2, attempt=0), test_cer_known_speakers=0.03
    )
    heads, first, second, *rest = summary(speech).strip("\n").splitlines()
    words = [" ".join(line.split()) for line in (heads, first, second)]
    assert words[0] == "epoch loss dev CER seconds waiting standing from origin from cache checkpoint (of raw)"
    assert words[1] == "1 1.000 50.0% 3.0 0.5 0.25 2.16 MB 0 B 0.80 MB (80%, full)"
    assert "0.25 0 B 2.00 MB" in words[2]
    assert heads.index("from cache") + len("from cache") == first.index("0 B") + len("0 B")
    assert "8 clips an epoch, the same ones in every epoch" in rest
    assert "dev CER 50.0%; test CER 3.0% for speakers known from training, - for those who are not" in rest
    assert rest[-1].startswith("outputs in s3://b/run/ ")
    assert "by the region's" in summary_table(demo_result(speech, tmp_path))


def test_the_table_hides_no_fault() -> None:
    speech = ran(epoch(1, attempt=0), epoch(2, attempt=0, clips_digest="ab", checkpoint=None))
    assert "2.00 MB   never complete" in summary(speech)
    assert "not every epoch saw the clips of the first: look at epoch 2" in summary(speech)


def test_with_several_nodes_the_table_tells_them_apart() -> None:
    lines = summary(ran(epoch(1, attempt=0, peer_bytes=500_000))).strip("\n").splitlines()
    assert "own disk  other nodes" in lines[0]
    assert "2.00 MB      0.50 MB   0.80 MB (80%, full)" in lines[1]
    assert lines[0].index("other nodes") + len("other nodes") == lines[1].index("0.50 MB") + len("0.50 MB")


# --- Ray that does not start ------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [1, 3])
def test_ray_gets_more_than_one_chance_to_start(failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    calls: list[str] = []

    def init(*, _temp_dir: str) -> None:
        assert not Path(_temp_dir).exists()  # nothing of the last attempt
        Path(_temp_dir).mkdir()
        calls.append(_temp_dir)
        if len(calls) <= failures:
            raise Exception("The node timed out.\nAnd more.")  # Ray's own are of no other class

    monkeypatch.setattr(ray, "init", init)
    if failures < 3:
        ray_cluster._start(str(tmp_path))
        assert len(calls) == failures + 1
        return
    with pytest.raises(RetryableError) as caught:
        ray_cluster._start(str(tmp_path))
    assert str(caught.value) == (
        "Ray did not start on this machine (The node timed out): try again when it has less to do"
    )


# --- kill -9 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("killed", [True, False])
def test_a_killed_owner_leaves_nothing_of_ray(tmp_path: Path, killed: bool) -> None:
    scratch = tmp_path / "millrace-scratch"
    scratch.mkdir()
    # Ray's agents call themselves by other names than their commands; what they have open tells whose they are.
    (scratch / "ray-agent.py").write_text(
        "import os, sys, time\nlog = open('log', 'w'); os.chdir('/'); print(os.getpid(), flush=True)\ntime.sleep(60)\n"
    )
    program = (
        "import subprocess, sys; from millrace.demo.speech.ray_leftovers import cleared\n"
        "with cleared(sys.argv[1]):\n"
        " other = subprocess.Popen([sys.executable, 'ray-agent.py'], cwd=sys.argv[1], start_new_session=True)\n"
        " sys.stdin.readline()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(scratch)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    pid = int(owner.stdout.readline())
    assert pid in processes_of(str(scratch))
    if killed:
        owner.kill()
    owner.stdin.close()
    owner.wait(timeout=10)
    owner.stdout.close()
    deadline = time.monotonic() + 10
    while killed and scratch.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert scratch.exists() is not killed
    assert processes_of(str(scratch)) == ([] if killed else [pid])
    if not killed:
        os.kill(pid, signal.SIGKILL)
