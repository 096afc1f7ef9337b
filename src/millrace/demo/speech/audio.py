"""Encoded audio to what an acoustic model reads. Thread-safe; numpy, soundfile and soxr only."""

from __future__ import annotations

import io
import math
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


_WHISPER_FFT = 400
_WHISPER_RANGE = 8.0
_WHISPER_FLOOR = 1e-10


@cache
def _whisper_filters(bins: int) -> Array:
    """The (201, bins) bank of triangles of equal area, from 0 to 8 kHz: linear below 1 kHz, logarithmic above."""
    break_hertz, break_mel, step = 1000.0, 15.0, np.log(6.4) / 27.0
    top = break_mel + np.log(SAMPLE_RATE / 2 / break_hertz) / step
    mels = np.linspace(0.0, top, bins + 2)
    corners = np.where(
        mels < break_mel, mels * break_hertz / break_mel, break_hertz * np.exp(step * (mels - break_mel))
    )
    frequencies = np.linspace(0, SAMPLE_RATE / 2, _WHISPER_FFT // 2 + 1)[:, None]
    low, centre, high = corners[:-2], corners[1:-1], corners[2:]
    rising, falling = (frequencies - low) / (centre - low), (high - frequencies) / (high - centre)
    return np.asarray(np.maximum(0, np.minimum(rising, falling)) * 2.0 / (high - low), dtype=np.float32)


@cache
def _whisper_window() -> Array:
    return np.hanning(_WHISPER_FFT + 1)[:-1].astype(np.float32)


def whisper_log_mel(samples: Array, bins: int = MEL_BINS) -> Array:
    """The (frames, bins) features that Whisper reads, 10 ms each, as far as the clip reaches into them.

    The same numbers as transformers' `WhisperFeatureExtractor`, which pads a clip with silence to the model's length
    first, and would have the padding sent too. All values of the frames left out are `whisper_silence`.
    """
    if not len(samples):
        return np.zeros((0, bins), dtype=np.float32)
    reach = _WHISPER_FFT // 2
    count = -(-(len(samples) + reach) // _HOP)
    padded = np.zeros(max((count - 1) * _HOP + reach, reach + 1), dtype=np.float32)
    padded[: len(samples)] = samples
    # The first frame is centred on the first sample; what lies before it is the beginning, mirrored.
    whole = np.concatenate((padded[reach:0:-1], padded))
    frames = np.lib.stride_tricks.sliding_window_view(whole, _WHISPER_FFT)[::_HOP][:count]
    power = np.abs(np.fft.rfft(frames * _whisper_window(), n=_WHISPER_FFT)) ** 2
    mel = np.log10(np.maximum(power.astype(np.float32) @ _whisper_filters(bins), np.float32(_WHISPER_FLOOR)))
    mel = (np.maximum(mel, mel.max() - np.float32(_WHISPER_RANGE)) + np.float32(4.0)) / np.float32(4.0)
    return np.ascontiguousarray(mel, dtype=np.float32)


def whisper_silence(features: Array) -> float:
    """The value that `whisper_log_mel` has for silence after the clip of these features: its range below the loudest."""
    return max(float(features.max()) - _WHISPER_RANGE / 4, (math.log10(_WHISPER_FLOOR) + 4.0) / 4.0)
