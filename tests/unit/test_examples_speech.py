"""The scripts in examples/speech: their arguments, their errors, and what they hand to the run."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import millrace
from millrace.demo.needs import SPEECH_MODULES
from millrace.demo.speech import arguments as module
from millrace.demo.speech.arguments import default_run, parse_arguments, run_as_script
from millrace.demo.speech.settings import SpeechSettings
from millrace.demo.speech.shortage import shortage
from millrace.errors import ConfigurationError, ObjectNotFoundError

# Looked for, not imported: that takes seconds, and parsing a command line needs none of them.
if not all(importlib.util.find_spec(name) for name in SPEECH_MODULES):
    pytest.skip("needs the extras ray, torch and speech", allow_module_level=True)

SCRIPTS = Path(__file__).parents[2] / "examples" / "speech"
NAMES = ("remote-ray.py", "ray-train-multiple-gpu.py")
DATA = ("--data", "s3://bucket/cv/de", "--cpu")


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def settings_of(*given: str, workers: int | None = None) -> SpeechSettings:
    return parse_arguments("about", [*DATA, *given], workers=workers).settings


# --- arguments to settings ----------------------------------------------------------------------------


def test_what_is_given_is_what_is_run() -> None:
    settings = settings_of(
        "--run", "s3://out/run/", "--model", "openai/whisper-tiny", "--epochs", "4", "--workers", "5", "--min-workers",
        "2", "--precision", "bf16", "--batch-size", "16", "--learning-rate", "1e-4", "--cpus", "3", "--keep", "2",
        "--max-failures", "0", "--kill-in-epoch", "2", "--train-clips", "1000", "--dev-clips", "10", "--test-clips",
        "20", "--max-seconds", "8.5", "--seed", "11",
    )  # fmt: skip
    assert settings == SpeechSettings(
        data_url="s3://bucket/cv/de", run_url="s3://out/run", model="openai/whisper-tiny", epochs=4, num_workers=5,
        min_workers=2, precision="bf16", batch_size=16, learning_rate=1e-4, cpus_per_worker=3, threads_per_worker=3,
        keep=2, max_failures=0, kill_in_epoch=2, train_clips=1000, dev_clips=10, test_clips=20, max_seconds=8.5,
        seed=11, use_gpu=False,
    )  # fmt: skip


def test_a_given_model_is_treated_gently() -> None:
    small, given = settings_of(), settings_of("--model", "some/model")
    assert (small.epochs, given.epochs) == (10, 3)
    assert given.learning_rate < small.learning_rate / 10
    assert settings_of("--family", "whisper").learning_rate != small.learning_rate


def test_nothing_is_killed_unless_it_is_asked_for() -> None:
    assert settings_of().kill_in_epoch is None


def test_one_worker_is_one_worker(capsys: pytest.CaptureFixture[str]) -> None:
    assert settings_of(workers=1).num_workers == 1
    assert settings_of().num_workers == 2
    with pytest.raises(SystemExit):
        settings_of("--workers", "3", workers=1)
    assert "--workers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "parent"),
    [
        ("s3://bucket/cv/de", "s3://bucket/cv/runs/"),
        ("s3://bucket/cv/de/", "s3://bucket/cv/runs/"),
        ("s3://bucket/cv", "s3://bucket/runs/"),
        ("s3://bucket", "s3://bucket/runs/"),
        ("/data/cv", "/data/runs/"),
        ("file:///data/cv", "file:///data/runs/"),
    ],
)
def test_a_run_has_its_place_beside_the_data(data: str, parent: str) -> None:
    assert re.fullmatch(re.escape(parent) + r"\d{8}-\d{6}", default_run(data))


def test_a_local_path_means_the_same_to_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = parse_arguments("about", ["--data", "cv", "--run", "s3://b/r", "--endpoint-url", "http://x:1", "--cpu"])
    assert given.settings.data_url == str(tmp_path / "cv")
    assert given.data_storage == {"protocol": "file", "target_options": None}
    assert given.run_storage == {"protocol": "s3", "target_options": {"endpoint_url": "http://x:1"}}
    assert given.checkpoint_options == {"endpoint_url": "http://x:1"}


def test_without_options_credentials_are_left_to_where_they_are_read() -> None:
    assert parse_arguments("about", DATA).data_storage == {"protocol": "s3", "target_options": None}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "--data"),
        (["--data", "gs://x/y"], "'gs://x/y' is neither s3://bucket/... nor a local path"),
        (["--data", "s3://"], "'s3://' is neither"),
        (["--data", "s3:///x"], "'s3:///x' is neither"),
        (["--data", ""], "'' is neither"),
        ([*DATA, "--epochs", "0"], "'0' is no whole number from 1 up"),
        ([*DATA, "--max-failures", "-1"], "--max-failures"),
        ([*DATA, "--learning-rate", "nan"], "'nan' is no number above 0"),
        ([*DATA, "--max-seconds", "0"], "'0' is no number above 0"),
        ([*DATA, "--hidden-size", "30"], "'30' is no multiple of 4"),
        ([*DATA, "--min-workers", "3"], "--min-workers 3 is more than --workers 2"),
        ([*DATA, "--kill-in-epoch", "11"], "--kill-in-epoch 11 is more than the 10 epochs"),
        ([*DATA, "--family", "rnn"], "rnn"),
        ([*DATA, "--gpu"], "not allowed with"),
        ([*DATA, "--work", "3"], "--work"),
    ],
)
def test_a_bad_command_line_is_told_in_one_line(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments("about", given)
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.count("\n") == 1
    assert words in told
    assert "--help" in told


def test_a_machine_alone_must_have_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigurationError, match=r"1 of 2 GPU.*--cpu"):
        parse_arguments("about", ["--data", "s3://b/cv"])
    assert parse_arguments("about", ["--data", "s3://b/cv"], workers=1).settings.use_gpu
    # In a cluster they may still come.
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert parse_arguments("about", ["--data", "s3://b/cv", "--workers", "5"]).settings.use_gpu


# --- what a cluster lacks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "resources", "told"),
    [
        (["--workers", "2"], {"CPU": 3.0}, None),
        (["--workers", "2"], {"CPU": 2.0}, "the training takes all of the cluster's 2 CPUs"),
        (["--workers", "2"], {"CPU": 1.0}, "the cluster has 1 of 2 CPUs that this run needs: it waits for nodes"),
        (["--workers", "4", "--min-workers", "1"], {"CPU": 2.0}, None),
        (["--workers", "2", "--cpus", "4"], {"CPU": 7.0}, "the cluster has 7 of 8 CPUs"),
        (["--workers", "2"], {}, "the cluster has 0 of 2 CPUs"),
        (["--workers", "1"], {"CPU": 8.0, "GPU": 1.0}, "the cluster has 1 GPU, which this run leaves alone"),
    ],
)
def test_what_a_cluster_lacks_is_told(given: list[str], resources: dict[str, float], told: str | None) -> None:
    line = shortage(settings_of(*given), resources)
    assert line is None if told is None else line is not None and told in line


def test_gpus_that_are_not_there_are_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    settings = parse_arguments("about", ["--data", "s3://b/cv", "--workers", "5"]).settings
    assert shortage(settings, {"CPU": 4.0, "GPU": 2.0}) == (
        "the cluster has 4 of 5 CPUs and 2 of 5 GPUs that this run needs: it waits for nodes (--cpu trains without)"
    )
    assert shortage(settings, {"CPU": 6.0, "GPU": 5.0}) is None


# --- the scripts --------------------------------------------------------------------------------------


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name.replace("-", "_").removesuffix(".py"), SCRIPTS / name)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize(("name", "workers"), [(NAMES[0], 1), (NAMES[1], 2)])
def test_a_script_hands_over_what_it_was_told(
    name: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = loaded(name)
    calls: list[tuple[SpeechSettings, Any, dict[str, Any]]] = []
    monkeypatch.setenv("MILLRACE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [name, *DATA, "--endpoint-url", "http://127.0.0.1:1"])
    monkeypatch.setattr(script, "run_speech", lambda settings, fs, **rest: calls.append((settings, fs, rest)))
    monkeypatch.setattr(script, "summary", lambda result: f"the end of {result}")
    script.main()
    [(settings, data, rest)] = calls
    assert settings.num_workers == workers
    assert isinstance(data, millrace.MillraceFileSystem)
    assert data is not rest["run_fs"]
    assert rest["checkpoint_options"] == {"endpoint_url": "http://127.0.0.1:1"}
    told = capsys.readouterr().out
    assert f"outputs go to {settings.run_url}\n" in told
    assert "the end of None" in told


@pytest.mark.parametrize("name", NAMES)
def test_a_script_is_thin_and_helps(name: str) -> None:
    assert len((SCRIPTS / name).read_text(encoding="utf-8").splitlines()) <= 60
    done = subprocess.run(
        [sys.executable, name, "--help"], cwd=SCRIPTS, check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    assert "ray job submit" in done.stdout
    told = set(re.findall(r"--[a-z-]+", done.stdout))
    for option in ("--data", "--run", "--model", "--family", "--epochs", "--gpu", "--cpu", "--precision"):
        assert option in told
    assert ("--workers" in told) is (name != "remote-ray.py")


def test_the_help_leaves_no_option_unexplained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments("What this is.", ["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "What this is." in text
    for line in text.splitlines():
        assert len(line) <= 120
    # An option stands at the start of a line, with what it means behind it or on the next line.
    for option, rest in re.findall(r"^  (--[a-z-]+)[^\n]*((?:\n {6,}[^\n]+)*)", text, flags=re.MULTILINE):
        assert re.search(rf"^  {option}( \S+)*? {{2,}}\S", text, flags=re.MULTILINE) or rest.strip(), option


def exit_of(body: Any) -> int:
    with pytest.raises(SystemExit) as ended:
        run_as_script(body)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_script_ends_with_a_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/tmp/remote-ray.py"])
    monkeypatch.delenv("MILLRACE_DEBUG", raising=False)

    def missing() -> None:
        raise ObjectNotFoundError("s3://b/cv/train.tsv does not exist", next_step="check the name")

    def terminated() -> None:
        signal.raise_signal(signal.SIGTERM)

    assert exit_of(lambda: None) == 0
    assert capsys.readouterr().err == ""
    assert exit_of(missing) == 1
    assert capsys.readouterr().err == "remote-ray.py: s3://b/cv/train.tsv does not exist: check the name\n"
    assert exit_of(terminated) == 143
    assert capsys.readouterr().err == "remote-ray.py: terminated\n"
    monkeypatch.setenv("MILLRACE_DEBUG", "1")
    assert exit_of(missing) == 1
    assert "Traceback" in capsys.readouterr().err


def test_what_is_said_has_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    module.say("epoch 1")
    assert re.fullmatch(r"\[ *\d+ s\] epoch 1\n", capsys.readouterr().out)
