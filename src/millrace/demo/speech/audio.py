"""Encoded audio to what an acoustic model reads. Thread-safe; numpy, soundfile and soxr only."""

from __future__ import annotations

import io
from functools import cache

import numpy as np
import numpy.typing as npt

SAMPLE_RATE = 16_000
MEL_BINS = 80
STACK = 2
FEATURES = MEL_BINS * STACK
"""Values a frame: two log-mel vectors of 10 ms each, so a frame is 20 ms."""

_WINDOW = 400
_HOP = 160
_FFT = 512
_FLOOR = 1.192092955078125e-07

Array = npt.NDArray[np.float32]


def decode_audio(encoded: bytes) -> Array:
    """The samples of an audio file (MP3, WAV, FLAC, Ogg), one channel at 16 kHz, between -1 and 1.

    Raises what soundfile raises (`soundfile.LibsndfileError`) for bytes that are no audio.
    """
    import soundfile
    import soxr

    samples, rate = soundfile.read(io.BytesIO(encoded), dtype="float32", always_2d=True)
    mono = samples.mean(axis=1)
    if rate != SAMPLE_RATE:
        mono = soxr.resample(mono, rate, SAMPLE_RATE)
    return np.asarray(mono, dtype=np.float32)


def _mel(hertz: npt.NDArray[np.float64] | float) -> npt.NDArray[np.float64]:
    return np.asarray(1127.0 * np.log1p(np.asarray(hertz) / 700.0))


@cache
def _filters() -> Array:
    """The (257, 80) bank of triangles, evenly spaced and straight-sided on the mel scale from 20 Hz to 8 kHz."""
    bins = _mel(np.linspace(0, SAMPLE_RATE / 2, _FFT // 2 + 1))[:, None]
    corners = np.linspace(_mel(20.0), _mel(SAMPLE_RATE / 2), MEL_BINS + 2)
    low, centre, high = corners[:-2], corners[1:-1], corners[2:]
    return np.maximum(0, np.minimum((bins - low) / (centre - low), (high - bins) / (high - centre))).astype(np.float32)


@cache
def _window() -> Array:
    return np.asarray(np.hanning(_WINDOW) ** 0.85, dtype=np.float32)


def log_mel(samples: Array) -> Array:
    """The (frames, 160) features that Wav2Vec2-BERT models read, each mel bin with mean 0 and variance 1 over the clip.

    The same numbers as transformers' `SeamlessM4TFeatureExtractor`, which loops over frames in Python and would
    cost more than the training step of a small model; here all frames are one matrix.
    A clip shorter than two frames gives an array of no frames.
    """
    count = 1 + (len(samples) - _WINDOW) // _HOP if len(samples) >= _WINDOW else 0
    count -= count % STACK
    if not count:
        return np.zeros((0, FEATURES), dtype=np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(samples, _WINDOW)[::_HOP].astype(np.float32) * np.float32(2**15)
    frames -= frames.mean(axis=1, keepdims=True)
    emphasised = frames.copy()
    emphasised[:, 1:] -= np.float32(0.97) * frames[:, :-1]
    emphasised[:, 0] *= np.float32(1 - 0.97)
    power = np.abs(np.fft.rfft(emphasised * _window(), n=_FFT)) ** 2
    mel = np.log(np.maximum(power.astype(np.float32) @ _filters(), np.float32(_FLOOR)))
    # The statistics include an odd last frame, which the stacking then leaves out.
    mel = (mel - mel.mean(axis=0)) / np.sqrt(mel.var(axis=0, ddof=1) + np.float32(1e-7))
    return np.ascontiguousarray(mel[:count].reshape(count // STACK, FEATURES), dtype=np.float32)
