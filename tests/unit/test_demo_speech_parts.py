"""The smaller parts of a training: precision, patience, the network's interface, the cluster that is given."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest

from millrace.demo.environment import defaults
from millrace.demo.place import Place
from millrace.demo.speech import log as training_log
from millrace.demo.speech import patience, plain
from millrace.demo.speech.interfaces import interface_of
from millrace.demo.speech.job import METRICS_NAME, SpeechJob
from millrace.demo.speech.log import LOG_NAME, EpochRecord, TrainingLog, WorkerTimes, read_events
from millrace.demo.speech.ray_cluster import given_cluster
from millrace.demo.speech.run import REPORT_NAME, Follower, _trainer, is_complete, run_speech, training_error
from millrace.demo.speech.settings import SpeechSettings
from millrace.errors import ConfigurationError, DeniedError, MillraceError, OriginUnavailableError

AWAY = OriginUnavailableError("s3://b cannot be reached")


# --- storage that is away ---------------------------------------------------------------------------


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_PAUSE_SECONDS", 0.0)


def failing(times: int, error: Exception = AWAY) -> Callable[[], str]:
    left = [error] * times

    def act() -> str:
        if left:
            raise left.pop()
        return "there"

    return act


@pytest.mark.usefixtures("no_pause")
def test_storage_that_comes_back_is_waited_for() -> None:
    assert patience.patiently(failing(3)) == "there"
    with pytest.raises(OriginUnavailableError):
        patience.patiently(failing(1000))
    with pytest.raises(DeniedError):
        patience.patiently(failing(1, DeniedError("s3://b")))


class Flaky(Place):
    """A place whose storage is away while `away` has something in it."""

    away: list[int] = []  # noqa: RUF012 - emptied by the test that fills it

    def write(self, name: str, content: bytes) -> None:
        if self.away:
            raise AWAY
        super().write(name, content)

    def read(self, name: str) -> bytes:
        if self.away:
            raise AWAY
        return super().read(name)


@pytest.fixture
def place(tmp_path: Path) -> Flaky:
    Flaky.away.clear()
    return Flaky(fs=pyarrow.fs.LocalFileSystem(), url=str(tmp_path / "run"))


def test_events_of_the_time_without_storage_are_written_later(place: Flaky) -> None:
    log = TrainingLog(place)
    log.add("start", resumed_after=0)
    place.away.append(1)
    log.add("warning", text="one")
    with pytest.raises(OriginUnavailableError):
        log.write()
    place.away.clear()
    assert [event["event"] for event in read_events(place)] == ["start"]
    log.add("warning", text="two")
    assert [event.get("text") for event in read_events(place)] == [None, "one", "two"]


def test_what_the_storage_refused_is_tried_again_now_and_then(place: Flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_log, "_RETRY_SECONDS", 3600.0)
    log = TrainingLog(place)
    log.add("start", resumed_after=0)
    (Path(place.path) / LOG_NAME).unlink()
    log.write_again()  # nothing is left to write
    assert read_events(place) == []
    place.away.append(1)
    log.add("warning", text="one")
    place.away.clear()
    log.write_again()  # not so soon
    assert read_events(place) == []
    log._next_try = 0.0
    log.write_again()
    assert [event["event"] for event in read_events(place)] == ["start", "warning"]


def test_a_run_is_complete_although_the_figures_of_its_epochs_are_lost(place: Flaky) -> None:
    settings = SpeechSettings(data_url="d", run_url=place.url, epochs=3, kill_in_epoch=None)
    log = TrainingLog(place)
    assert not is_complete(settings, place)
    log.add("start", resumed_after=0)
    assert not is_complete(settings, place)
    log.add("end", epochs=3)
    assert is_complete(settings, place)
    assert not is_complete(replace(settings, epochs=4), place)
    log.add("start", resumed_after=3)
    assert not is_complete(settings, place)


@pytest.mark.parametrize(
    ("told", "given"),
    [
        ("small Wav2Vec2-BERT (CTC), 3 layers of 64", {}),
        ("openai/whisper-tiny (Whisper)", {}),
        ("openai/whisper-tiny (Whisper)", {"model": "openai/whisper-base"}),
    ],
)
def test_a_run_goes_on_with_its_own_model_only(place: Flaky, told: str, given: dict[str, str]) -> None:
    settings = SpeechSettings(data_url="d", run_url=place.url, epochs=3, kill_in_epoch=None, **given)
    log = TrainingLog(place)
    log.add("start", resumed_after=0, model=told)
    log.add("end", epochs=3)
    with pytest.raises(ConfigurationError, match="is a run of another model"):
        run_speech(settings, place.fs)


def test_the_report_of_a_complete_run_is_made_up_for(place: Flaky) -> None:
    pytest.importorskip("matplotlib")
    settings = SpeechSettings(data_url="d", run_url=place.url, epochs=1, kill_in_epoch=None)
    log = TrainingLog(place)
    log.add("start", resumed_after=0)
    times = {"wait_seconds": 0.5, "compute_seconds": 2.0, "evaluate_seconds": 0.25, "stall_seconds": 0.25}
    log.add_epoch(
        EpochRecord(
            epoch=1, attempt=0, train_loss=1.0, dev_cer=0.5, clips=4, clips_digest="ab", steps=2, seconds=3.0,
            learning_rate=0.1, origin_bytes=1, cache_bytes=0, peer_bytes=0,
            workers=(WorkerTimes(rank=0, node="n", clips=4, steps=2, **times),),
        )
    )  # fmt: skip
    log.add("end", epochs=1)
    place.write(METRICS_NAME, b"{}")
    for kept in (None, b"as it was"):
        if kept:
            place.write(REPORT_NAME, kept)
        run_speech(settings, place.fs, progress=lambda line: None)
        assert (place.read(REPORT_NAME) == kept) if kept else place.read(REPORT_NAME).startswith(b"<!")


def test_who_follows_a_run_says_once_that_the_log_is_away(place: Flaky) -> None:
    said: list[str] = []
    follower = Follower(place, said.append)
    log = TrainingLog(place)
    log.add("warning", text="one")
    place.away.append(1)
    follower.look()
    follower.look()
    place.away.clear()
    follower.look()
    assert len(said) == 2
    assert "cannot be read now" in said[0]
    assert said[1].strip() == "one"


# --- what Ray Train is told -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("fewest", "workers"), [(None, 2), (2, 2), (1, (1, 2))])
def test_ray_train_waits_for_room_and_seldom_looks_for_more(place: Flaky, fewest: int | None, workers: Any) -> None:
    pytest.importorskip("ray")
    pytest.importorskip("torch")
    settings = SpeechSettings(data_url="d", run_url=place.url, num_workers=2, min_workers=fewest)
    job = SpeechJob(settings=settings, run=place, train_rows=1)
    trainer = _trainer(job, Any, {})
    assert trainer.scaling_config.num_workers == workers
    assert trainer.scaling_config.elastic_resize_monitor_interval_s == 600
    failures = trainer.run_config.failure_config
    assert (failures.max_failures, failures.controller_failure_limit) == (settings.max_failures, -1)


def test_the_environment_is_afterwards_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_TEST_OWN", "own")
    monkeypatch.delenv("MILLRACE_TEST_NONE", raising=False)
    before = dict(os.environ)
    with pytest.raises(ValueError), defaults({"MILLRACE_TEST_OWN": "ours", "MILLRACE_TEST_NONE": "ours"}):  # noqa: PT011, PT012
        assert os.environ["MILLRACE_TEST_OWN"] == "own"
        assert os.environ["MILLRACE_TEST_NONE"] == "ours"
        raise ValueError
    assert dict(os.environ) == before


# --- what a training failed of ----------------------------------------------------------------------


class OfWorkersError(Exception):
    """As Ray Train tells of several workers."""

    def __init__(self, failures: dict[int, Exception]) -> None:
        super().__init__("workers failed")
        self.worker_failures = failures


def test_of_several_workers_the_one_that_knows_why_is_heard() -> None:
    own = DeniedError("s3://b")
    wrapped = RuntimeError("task")
    wrapped.__cause__ = own
    assert training_error("s3://b/run", OfWorkersError({0: RuntimeError("connection reset"), 1: wrapped})) is own
    lost = training_error("s3://b/run", OfWorkersError({0: RuntimeError("connection reset"), 1: OSError("x")}))
    assert "connection reset" in str(lost)


def end_as(job: SpeechJob, family: Any, splits: Any, rank: int, meeting: str, mouth: Connection) -> None:
    """In the place of a worker of a training without Ray: the last one is killed, the others say that they lost it."""
    if rank == job.settings.num_workers - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    mouth.send(RuntimeError("connection reset"))
    mouth.close()
    os._exit(1)


@pytest.mark.parametrize("count", [1, 2])
def test_a_worker_that_was_killed_is_named(place: Flaky, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(plain, "_work", end_as)
    settings = SpeechSettings(data_url="d", run_url=place.url, num_workers=count)
    processes = plain._Processes(SpeechJob(settings=settings, run=place, train_rows=1), Any, {}, "nowhere")
    for process in processes._processes:
        process.join()
    with pytest.raises(MillraceError, match=rf"worker {count - 1} of .* was killed by SIGKILL"):
        processes.wait(Follower(place, print))


# --- where Ray is -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "expected"),
    [("", None), ("10.0.0.1:6379", "10.0.0.1:6379"), ("auto", "auto"), ("ray://h:10001", "ray://h:10001"),
     ("http://127.0.0.1:8265", None)],
)  # fmt: skip
def test_an_address_of_the_dashboard_is_no_cluster(
    monkeypatch: pytest.MonkeyPatch, address: str, expected: str | None
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert given_cluster() == expected


def test_the_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert interface_of("no address") is None


# --- precision --------------------------------------------------------------------------------------


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def test_a_cpu_computes_in_full_unless_told_otherwise(torch: Any) -> None:
    from millrace.demo.speech.precision import MixedPrecision

    cpu = torch.device("cpu")
    weights = torch.ones(2, 2)
    for asked, name, dtype in (("auto", "fp32", "float32"), ("fp32", "fp32", "float32"), ("bf16", "bf16", "bfloat16")):
        precision = MixedPrecision(asked, cpu)
        with precision.computing():
            result = weights @ weights
        assert (precision.name, str(result.dtype)) == (name, f"torch.{dtype}")
    with pytest.raises(ConfigurationError, match="fp16"):
        MixedPrecision("fp16", cpu)


def test_epochs_that_the_log_has_lost_are_told_of_once(place: Flaky, torch: Any) -> None:
    from millrace.demo.speech.training import Training

    log = TrainingLog(place)
    log.add("epoch", epoch=2)
    for done in (3, 3, 4):
        Training._tell_of_lost(log, done)
    warnings = [event for event in log.events if event["event"] == "warning"]
    assert [event["lost_epochs"] for event in warnings] == [[1, 3], [4]]
    assert "epoch 1, 3" in warnings[0]["text"]


@pytest.mark.parametrize("error", [AWAY, TimeoutError("no answer")])
def test_counters_that_fail_end_no_training(place: Flaky, torch: Any, error: Exception) -> None:
    from millrace.demo.speech.training import Training

    def fail() -> dict[str, int]:
        raise error

    settings = SpeechSettings(data_url="d", run_url=place.url)
    training = Training.__new__(Training)
    training._job = SpeechJob(settings=settings, run=place, train_rows=1, counters=fail)
    log = TrainingLog(place)
    assert training._totals(log, 3) is None
    (warning,) = read_events(place)
    assert warning["event"] == "warning"
    assert "epoch 3" in warning["text"]
    assert str(error).split(";")[0] in warning["text"]


def test_a_step_clips_gradients_and_moves(torch: Any) -> None:
    from millrace.demo.speech.precision import MixedPrecision

    model = torch.nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    precision = MixedPrecision("fp32", torch.device("cpu"))
    precision.step(1000 * model(torch.ones(1, 2)).sum(), model, optimizer, norm=0.5)
    assert float((model.weight.detach() - before).norm()) == pytest.approx(0.5, rel=1e-3)
    # What a run in one precision leaves behind, one in another can be resumed with.
    other = MixedPrecision("bf16", torch.device("cpu"))
    assert set(precision.state_dict()) == set(other.state_dict())
    other.load_state_dict(precision.state_dict())
