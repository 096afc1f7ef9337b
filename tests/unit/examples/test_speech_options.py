"""The options of the scripts in examples/speech, and the sample clips next to them."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile

from finetune.options import Settings, default_run, parse_settings, run_script
from millrace.errors import ObjectNotFoundError
from sample_data import SAMPLE, write_common_voice

SCRIPTS = Path(__file__).parents[3] / "examples" / "speech"
DATA = ("--data", "s3://bucket/cv/de", "--cpu")


def test_settings_are_those_of_the_command_line() -> None:
    given = (
        "--run s3://out/run/ --model openai/whisper-tiny --epochs 4 --workers 5 --min-workers 2 --precision bf16 "
        "--batch-size 16 --learning-rate 1e-4 --cpus 3 --keep 2 --max-failures 0 --kill-in-epoch 2 --train-clips 1000 "
        "--dev-clips 10 --test-clips 20 --max-seconds 8.5 --seed 11"
    )
    assert parse_settings("", [*DATA, *given.split()]) == Settings(
        data="s3://bucket/cv/de", run="s3://out/run", model="openai/whisper-tiny", epochs=4, workers=5, min_workers=2,
        precision="bf16", batch_size=16, learning_rate=1e-4, cpus=3, keep=2, max_failures=0, kill_in_epoch=2,
        train_clips=1000, dev_clips=10, test_clips=20, max_seconds=8.5, seed=11, gpu=False,
    )  # fmt: skip


def test_pretrained_model_gets_fewer_epochs_and_a_lower_rate() -> None:
    small, pretrained = parse_settings("", DATA), parse_settings("", [*DATA, "--model", "some/model"])
    assert (small.epochs, pretrained.epochs) == (10, 3)
    assert pretrained.learning_rate < small.learning_rate / 10
    assert small.kill_in_epoch is None


def test_single_worker_script_has_no_option_for_workers(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_settings("", DATA, workers=1).workers == 1
    assert parse_settings("", DATA).workers == 2
    with pytest.raises(SystemExit):
        parse_settings("", [*DATA, "--workers", "3"], workers=1)
    assert "--workers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "parent"),
    [("s3://bucket/cv/de/", "s3://bucket/cv/runs/"), ("s3://bucket/cv", "s3://bucket/runs/"), ("/d/cv", "/d/runs/")],
)
def test_run_without_url_is_stored_next_to_the_data(data: str, parent: str) -> None:
    assert re.fullmatch(re.escape(parent) + r"\d{8}-\d{6}", default_run(data))


def test_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_settings("", ["--data", "cv"]).data == str(tmp_path / "cv")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--cpu"], "--data"),
        (["--data", "gs://x/y"], "'gs://x/y' is neither s3://bucket/... nor a local path"),
        ([*DATA, "--epochs", "0"], "--epochs"),
        ([*DATA, "--learning-rate", "nan"], "--learning-rate"),
        ([*DATA, "--min-workers", "3"], "--min-workers 3 is more than --workers 2"),
        ([*DATA, "--kill-in-epoch", "11"], "--kill-in-epoch 11 is more than the 10 epochs"),
        ([*DATA, "--gpu"], "not allowed with"),
    ],
)
def test_invalid_command_line_names_the_option(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings("", given)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_learning_rate_rises_falls_and_ends_at_zero() -> None:
    settings = Settings(data="d", run="r")
    rates = [settings.learning_rate_at(step / 100) for step in range(101)]
    assert max(rates) == rates[15] == pytest.approx(settings.learning_rate)
    assert rates[:15] == sorted(rates[:15])
    assert rates[15:] == sorted(rates[15:], reverse=True)
    assert 0 < rates[0] < 0.1 * settings.learning_rate
    assert rates[-1] == pytest.approx(0, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["remote-ray.py", "ray-train-multiple-gpu.py"])
def test_help_of_script_explains_its_options(name: str) -> None:
    command = [sys.executable, name, "--help"]
    text = subprocess.run(command, cwd=SCRIPTS, check=True, capture_output=True, text=True, timeout=300).stdout
    assert "ray job submit" in text
    options = set(re.findall(r"^  (--[a-z-]+)", text, flags=re.MULTILINE))
    assert {"--data", "--run", "--model", "--family", "--epochs", "--cpu", "--precision", "--keep"} <= options
    assert ("--workers" in options) is (name != "remote-ray.py")


def test_millrace_error_in_script_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ObjectNotFoundError("s3://b/cv/train.tsv does not exist", next_step="check the name")

    monkeypatch.setattr(sys, "argv", ["/x/remote-ray.py"])
    with pytest.raises(SystemExit) as ended:
        run_script(missing)
    assert ended.value.code == "remote-ray.py: s3://b/cv/train.tsv does not exist: check the name"


# --- the sample clips ---------------------------------------------------------------------------------


def rows(directory: Path, split: str) -> list[dict[str, str]]:
    text = (directory / f"{split}.tsv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("release")
    assert write_common_voice(directory) == {"train": 416, "dev": 32, "test": 48}
    return directory


def test_sample_has_the_layout_of_common_voice(release: Path) -> None:
    names = []
    for split in ("train", "dev", "test"):
        for row in rows(release, split):
            assert (row["locale"], len(row["client_id"])) == ("de", 128)
            names.append(row["path"])
    assert sorted(names) == sorted(path.name for path in (release / "clips").iterdir())
    for name in names[::50]:
        info = soundfile.info(str(release / "clips" / name))
        assert (info.format, info.channels, info.samplerate) == ("MP3", 1, 16_000)


def test_sample_test_split_has_new_sentences_and_one_new_voice(release: Path) -> None:
    sentences = {split: {row["sentence"] for row in rows(release, split)} for split in ("train", "dev", "test")}
    speakers = {split: {row["client_id"] for row in rows(release, split)} for split in ("train", "dev", "test")}
    assert not sentences["train"] & (sentences["dev"] | sentences["test"])
    assert speakers["dev"] <= speakers["train"]
    assert len(speakers["test"] - speakers["train"]) == 1


def test_limited_sample_keeps_the_new_voice(tmp_path: Path) -> None:
    assert write_common_voice(tmp_path, {"train": 24, "dev": 4, "test": 6}) == {"train": 24, "dev": 4, "test": 6}
    assert len(list((tmp_path / "clips").iterdir())) == 34
    known = {row["client_id"] for row in rows(tmp_path, "train")}
    assert {row["client_id"] for row in rows(tmp_path, "test")} - known


def test_sample_archive_in_the_repository_is_below_3_mb() -> None:
    assert (SAMPLE / "clips.zip").stat().st_size < 3_000_000
