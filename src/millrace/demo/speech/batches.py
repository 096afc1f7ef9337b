"""Prepared clips, and batches of them as a model takes them. Importing it loads neither torch nor ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from millrace.demo.speech.audio import Array

if TYPE_CHECKING:
    import torch

    from millrace.demo.speech.families.protocol import Family

PREPARED = pa.schema(
    {
        "name": pa.string(),
        "features": pa.binary(),
        "width": pa.int32(),
        "labels": pa.binary(),
        "sentence": pa.string(),
        "heard": pa.bool_(),
    }
)
"""A row a clip. Arrays travel as bytes: Arrow then moves them without looking inside."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """What a model learns from one clip: features as `Family.features` gives them, and labels."""

    features: Array
    labels: list[int]


@dataclass(frozen=True, kw_only=True)
class ClipBatch:
    """Some clips: who they are, and the padded tensors of all of them. `known`: their speakers are in the training split.

    `shortest` is one of the clips, to stand in where there is none.
    """

    names: list[str]
    sentences: list[str]
    known: list[bool]
    tensors: dict[str, torch.Tensor]
    shortest: Example

    def __len__(self) -> int:
        return len(self.names)


class Feed(Protocol):
    """Where a worker's batches come from."""

    def batches(self, split: str, *, epoch: int, size: int) -> Iterator[ClipBatch]:
        """This worker's share of a split, once; over all workers that is every clip once.

        Called by all workers alike, one pass at a time.
        """
        ...


def row_of(*, name: str, sentence: str, known: bool, example: Example) -> dict[str, Any]:
    """A clip as a row of `PREPARED`."""
    return {
        "name": name,
        "features": example.features.tobytes(),
        "width": example.features.shape[1],
        "labels": np.asarray(example.labels, dtype=np.int64).tobytes(),
        "sentence": sentence,
        "heard": known,
    }


def batch_of(rows: pa.Table, family: Family) -> ClipBatch:
    """A batch of the rows of a `PREPARED` table, of which there must be one at least."""
    examples = [
        Example(
            features=np.frombuffer(features, dtype=np.float32).reshape(-1, width),
            labels=np.frombuffer(labels, dtype=np.int64).tolist(),
        )
        for features, width, labels in zip(
            rows["features"].to_pylist(), rows["width"].to_pylist(), rows["labels"].to_pylist(), strict=True
        )
    ]
    return ClipBatch(
        names=rows["name"].to_pylist(),
        sentences=rows["sentence"].to_pylist(),
        known=rows["heard"].to_pylist(),
        tensors=tensors_of(examples, family),
        shortest=min(examples, key=lambda example: len(example.features)),
    )


def tensors_of(examples: Sequence[Example], family: Family) -> dict[str, torch.Tensor]:
    """The padded CPU tensors of some clips."""
    return family.collate([example.features for example in examples], [example.labels for example in examples])
