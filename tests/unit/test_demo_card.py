"""The model card: what the hub reads of it, what people do, and what must not be in it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
import pytest

from millrace.demo.place import Place
from millrace.demo.speech.card import model_card, public_url
from millrace.demo.speech.families.choosing import family_of
from millrace.demo.speech.log import EpochRecord, WorkerTimes
from millrace.demo.speech.settings import FAMILIES, SpeechSettings

hub = pytest.importorskip("huggingface_hub")

SETTINGS = SpeechSettings(
    data_url="s3://bucket/cv-corpus-11.0/de", run_url="s3://bucket/runs/secret-name", hidden_size=32, layers=1
)
METRICS: dict[str, Any] = {
    "test_cer": 0.15,
    "test_cer_known_speakers": 0.1,
    "test_cer_held_out_speakers": 0.25,
    "test_clips": 48,
    "test_clips_held_out": 16,
    "transcripts": [{"said": "guten tag", "heard": "guten dag", "known_speaker": True}],
}


def epochs(count: int, *, workers: int = 1, attempt: int = 0, digest: str = "d") -> list[EpochRecord]:
    times = [
        WorkerTimes(
            rank=rank,
            node="n",
            clips=8,
            steps=1,
            wait_seconds=1,
            compute_seconds=2,
            evaluate_seconds=1,
            stall_seconds=0,
        )
        for rank in range(workers)
    ]
    return [
        EpochRecord(
            epoch=epoch, attempt=attempt, train_loss=1 / epoch, dev_cer=0.5 / epoch, clips=8 * workers,
            clips_digest=digest, steps=1, seconds=30.0, learning_rate=0.1, origin_bytes=0, cache_bytes=0, peer_bytes=0,
            workers=tuple(times),
        )
        for epoch in range(1, count + 1)
    ]  # fmt: skip


def card(settings: SpeechSettings = SETTINGS, records: list[EpochRecord] | None = None, **changes: Any) -> str:
    metrics = {**METRICS, **changes}
    return model_card(settings, family_of(settings), epochs(5) if records is None else records, metrics)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hub_reads_the_head(family: Any) -> None:
    data = hub.ModelCard(card(replace(SETTINGS, family=family))).data
    assert data.language == "de"
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "automatic-speech-recognition"
    assert family in data.tags
    assert data.metrics == ["cer"]
    assert data.base_model is None
    results = {result.metric_name: (result.dataset_split, result.metric_value) for result in data.eval_results}
    assert results == {
        "CER, dev": ("dev", 0.1),
        "CER, test": ("test", 0.15),
        "CER, test, speakers of the training split": ("test", 0.1),
        "CER, test, held-out speakers": ("test", 0.25),
    }


def test_people_read_the_same_figures() -> None:
    text = card()
    for row in ("| dev | all |  | 10.0% |", "| test | speakers of the training split | 32 | 10.0% |",
                "| test | held-out speakers | 16 | 25.0% |", "| guten tag | guten dag | training split |"):  # fmt: skip
        assert row in text
    assert "lower-case letters" in text
    assert "10.0% CER) than others (25.0%)" in text


def test_figures_that_are_not_there_are_left_out() -> None:
    nothing = dict.fromkeys(METRICS)
    text = model_card(SETTINGS, family_of(SETTINGS), [], nothing)
    assert not hub.ModelCard(text).data.eval_results
    assert "Results" not in text
    assert "None" not in text
    some = card(test_cer_held_out_speakers=None, test_clips_held_out=0)
    assert "held-out" not in some
    assert "test | speakers of the training split | 48 |" in some


def test_it_tells_how_the_run_went() -> None:
    quiet = card(records=epochs(5, workers=2))
    assert "2 worker(s), 16 clips an epoch, 2.5 minutes of epochs" in quiet
    assert "Every epoch saw the same clips" in quiet
    assert "Begun again" not in quiet
    eventful = card(records=[*epochs(1, workers=2), *epochs(2, attempt=3, digest="e")[1:]])
    assert "1 to 2 worker(s)" in eventful
    assert "Not every epoch saw the same clips" in eventful
    assert "Begun again 3 time(s)" in eventful


@pytest.mark.parametrize("count", [1, 2, 12, 13, 40])
def test_the_curve_is_short_and_ends_with_the_last_epoch(count: int) -> None:
    shown = [
        int(epoch) for epoch in re.findall(r"^\| (\d+) \| [\d.]+ \| [\d.]+% \|$", card(records=epochs(count)), re.M)
    ]
    assert shown == sorted(set(shown))
    assert len(shown) == min(count, 12)
    assert shown[0] == 1
    assert shown[-1] == count


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("s3://bucket/cv/de", "s3://bucket/cv/de"),
        ("https://key:secret@host:9000/cv?token=secret", "https://host:9000/cv"),
        ("s3://key:sec@ret@bucket/a@b#secret", "s3://bucket/a@b"),
        ("/data/cv", "/data/cv"),
    ],
)
def test_places_are_named_without_credentials(url: str, public: str) -> None:
    assert public_url(url) == public


def test_no_secret_and_no_private_path_is_told(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    family = family_of(SETTINGS)
    family.save(family.build(), Place(fs=pyarrow.fs.LocalFileSystem(), url=str(tmp_path / "my-model")))
    text = card(
        replace(SETTINGS, data_url="s3://key:secret@bucket/cv/de?signature=secret", model=str(tmp_path / "my-model"))
    )
    assert "s3://bucket/cv/de" in text
    assert "my-model" in text
    assert "fine-tuned from" in text
    for private in ("secret", "key", str(tmp_path)):
        assert private not in text
    assert hub.ModelCard(text).data.base_model is None


@pytest.mark.parametrize("family_name", FAMILIES)
def test_what_it_says_of_loading_works(
    family_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers").utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    settings = replace(SETTINGS, family=family_name, max_seconds=2.0)
    family = family_of(settings)
    model: Any = family.build().eval()
    if family_name == "whisper":
        # One that has not learned babbles to the end of its room.
        model.generation_config.max_length = 24
    place = Place(fs=pyarrow.fs.LocalFileSystem(), url=str(tmp_path))
    family.save(model, place)
    place.write("README.md", card(settings).encode())
    code = re.search(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(), re.S)
    assert code is not None
    samples = np.random.default_rng(0).normal(0, 0.1, 16_000).astype(np.float32)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(code[1], {"samples": samples})
    heard = family.transcribe(model, family.collate([family.features(samples)], [family.labels("ja")]))[0]
    written = capsys.readouterr().out.strip().replace("<unk>", "")
    assert len(written) > 2
    assert heard[: len(written)] == written
