"""The model families of examples/speech: built, trained, stored, and loaded by Transformers."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import millrace
from finetune.models import SpeechModel, speech_model
from finetune.options import Settings
from finetune.preprocessing import SAMPLE_RATE
from millrace.errors import UsageError

SETTINGS = Settings(data="d", run="r", hidden_size=32, layers=1, max_seconds=2.0)
SENTENCES = ["ja", "über größe und maß"]


@pytest.fixture(autouse=True)
def quiet_torch() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["ctc", "whisper"])
def small(request: pytest.FixtureRequest) -> SpeechModel:
    return speech_model(replace(SETTINGS, family=request.param))


@pytest.fixture
def fs(tmp_path: Path) -> millrace.MillraceFileSystem:
    return millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), members="none", min_free=0)


def clip(seconds: float, seed: int = 0) -> Any:
    time = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    noise = np.random.default_rng(seed).normal(0, 0.02, len(time))
    return (0.3 * np.sin(2 * np.pi * (200 + 100 * seed + 300 * time) * time) + noise).astype(np.float32)


def batch_of(model: SpeechModel) -> dict[str, Any]:
    features = [model.preprocessor.features(clip(1.0 + 0.5 * index, index)) for index in range(2)]
    return model.collate(features, [np.asarray(model.preprocessor.labels(sentence)) for sentence in SENTENCES])


def learned(small: SpeechModel) -> Any:
    """A model that was trained on one batch until it transcribes it."""
    model = small.build()
    optimizer = torch.optim.AdamW([values for values in model.parameters() if values.requires_grad], lr=5e-3)
    for step in range(300):
        optimizer.zero_grad()
        small.loss(model, batch_of(small)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 19:
            if small.transcribe(model.eval(), batch_of(small)) == SENTENCES:
                break
            model.train()
    return model.eval()


def test_small_model_with_same_seed_is_equal(small: SpeechModel) -> None:
    first, second = small.build().state_dict(), pickle.loads(pickle.dumps(small)).build().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_each_trained_parameter_gets_a_gradient(small: SpeechModel) -> None:
    """DDP waits for each of them."""
    model = small.build()
    small.loss(model, batch_of(small)).backward()
    assert [name for name, values in model.named_parameters() if values.requires_grad and values.grad is None] == []


def test_batch_of_silence_has_a_finite_loss(small: SpeechModel) -> None:
    assert torch.isfinite(small.loss(small.build(), small.spare_batch()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_small_model_learns_and_is_loaded_by_transformers(
    small: SpeechModel, fs: millrace.MillraceFileSystem, tmp_path: Path
) -> None:
    model, folder = learned(small), str(tmp_path / "model")
    assert small.transcribe(model, batch_of(small)) == SENTENCES
    small.save(model, fs, folder)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    inputs = processor(clip(1.0), sampling_rate=SAMPLE_RATE, return_tensors="pt")
    if small.settings.family == "ctc":
        labels = transformers.AutoModelForCTC.from_pretrained(folder)(**inputs).logits.argmax(dim=-1)
        assert processor.batch_decode(labels) == SENTENCES[:1]
    else:
        loaded = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
        assert processor.batch_decode(loaded.generate(**inputs), skip_special_tokens=True) == SENTENCES[:1]
    # The folder is a model to fine-tune, too.
    again = speech_model(replace(small.settings, model=folder))
    continued = again.build().eval()
    assert again.transcribe(continued, batch_of(again)) == SENTENCES
    assert all(torch.equal(values, continued.state_dict()[name]) for name, values in model.state_dict().items())


def test_model_of_another_type_is_refused(tmp_path: Path) -> None:
    transformers.Wav2Vec2Config().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="models of type wav2vec2 are not supported"):
        speech_model(replace(SETTINGS, model=str(tmp_path)))


def test_folder_without_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be loaded"):
        speech_model(replace(SETTINGS, model=str(tmp_path)))
