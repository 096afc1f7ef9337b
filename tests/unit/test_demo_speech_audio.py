"""Decoding and features, against the library whose numbers they are to be."""

from __future__ import annotations

import io

import numpy as np
import pytest

from millrace.demo.speech.audio import FEATURES, SAMPLE_RATE, decode_audio, log_mel, whisper_log_mel, whisper_silence

soundfile = pytest.importorskip("soundfile")


def tone(seconds: float, rate: int = SAMPLE_RATE) -> np.ndarray:
    time = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(1).normal(0, 0.01, len(time))
    return (0.3 * np.sin(2 * np.pi * (200 + 300 * time) * time) + noise).astype(np.float32)


@pytest.mark.parametrize("seconds", [0.1, 0.5, 1.005, 1.01, 2.3])
def test_features_are_those_of_the_library(seconds: float) -> None:
    transformers = pytest.importorskip("transformers")
    samples = tone(seconds)
    expected = transformers.SeamlessM4TFeatureExtractor()(samples, sampling_rate=SAMPLE_RATE, return_tensors="np")
    values, mask = expected["input_features"][0], expected["attention_mask"][0].astype(bool)
    actual = log_mel(samples)
    # The library pads to an even number of frames and masks the last one off.
    assert actual.shape == values[mask[: len(values)]][: len(actual)].shape
    assert abs(len(values) - len(actual)) <= 1
    np.testing.assert_allclose(actual, values[: len(actual)], atol=5e-3)


@pytest.mark.parametrize("count", [0, 1, 399, 400, 559])
def test_a_clip_that_is_too_short_has_no_frames(count: int) -> None:
    assert log_mel(np.zeros(count, dtype=np.float32)).shape == (0, FEATURES)


def test_silence_gives_finite_features() -> None:
    assert np.isfinite(log_mel(np.zeros(SAMPLE_RATE, dtype=np.float32))).all()


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("seconds", [0.001, 0.1, 1.005, 2.3, 2.99])
def test_whisper_features_and_silence_are_those_of_the_library(seconds: float, bins: int) -> None:
    transformers = pytest.importorskip("transformers")
    samples = tone(seconds)
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins, chunk_length=3)
    expected = extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="np")["input_features"][0].T
    values = whisper_log_mel(samples, bins)
    actual = np.full_like(expected, whisper_silence(values))
    # The last samples reach two frames further than the library looks.
    assert len(values) <= len(actual) + 2
    actual[: len(values)] = values[: len(actual)]
    np.testing.assert_allclose(actual, expected, atol=5e-4)


def test_whisper_features_of_silence_and_of_nothing() -> None:
    silence = whisper_log_mel(np.zeros(SAMPLE_RATE, dtype=np.float32))
    assert silence == pytest.approx(-1.5)
    assert whisper_silence(silence) == pytest.approx(-1.5)
    assert whisper_log_mel(np.zeros(0, dtype=np.float32)).shape == (0, 80)


@pytest.mark.parametrize("kind", ["MP3", "WAV", "FLAC", "OGG"])
@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (48_000, 1), (44_100, 2)])
def test_any_file_becomes_mono_at_16_khz(kind: str, rate: int, channels: int) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.repeat(tone(1.0, rate)[:, None], channels, axis=1), rate, format=kind)
    samples = decode_audio(file.getvalue())
    assert samples.dtype == np.float32
    assert samples.ndim == 1
    assert len(samples) == pytest.approx(SAMPLE_RATE, abs=0.2 * SAMPLE_RATE)


def test_what_is_no_audio_is_refused() -> None:
    with pytest.raises(RuntimeError):
        decode_audio(b"no audio at all")
