"""What a model reads of a clip: features of its sound and labels of its sentence.

Apart from the models, so that the tasks of Ray Data do not load their code. Feature extractors of Transformers load PyTorch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

SAMPLE_RATE = 16_000
LETTERS = "abcdefghijklmnopqrstuvwxyzäöüß"


@dataclass(frozen=True, kw_only=True)
class Preprocessor:
    """The feature extractor and the tokenizer of a model, from Hugging Face. Picklable: it travels to the tasks of Ray Data.

    `feature_shape` is that of one clip's features, with -1 for a length that differs between clips. The tokenizer's first
    `skipped_labels` labels are left out. Clips with more than `max_labels` labels cannot be used.
    """

    extractor: Any
    tokenizer: Any
    feature_shape: tuple[int, ...]
    max_labels: float = math.inf
    skipped_labels: int = 0

    def features(self, samples: np.ndarray) -> np.ndarray:
        """The features of samples at `SAMPLE_RATE`, as float32."""
        features = self.extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="np")
        return np.asarray(features["input_features"][0], dtype=np.float32)

    def labels(self, sentence: str) -> list[int]:
        """The labels of a normalised sentence."""
        return list(self.tokenizer(sentence).input_ids)[self.skipped_labels :]
