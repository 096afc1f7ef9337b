"""Common Voice from any file system to batches of tensors, through Ray Data.

Nothing here is kept between epochs: every pass over a dataset of `clip_dataset` opens and reads the clips again.
That is what a training job does whose data set does not fit into memory, and what the cache below is for.
"""

from __future__ import annotations

import csv
import io
import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from millrace.demo.place import Place
from millrace.demo.speech import text
from millrace.demo.speech.audio import SAMPLE_RATE, decode_audio, log_mel
from millrace.errors import DamagedError, UsageError

if TYPE_CHECKING:
    import ray.data

CLIPS_A_TASK = 64
"""One read task takes about a tenth of a second of CPU: well above what scheduling it costs."""


@dataclass(frozen=True, kw_only=True)
class Clip:
    """One row of a split: the clip's file name below `clips/`, what is said, and a token for who says it."""

    name: str
    sentence: str
    speaker: str


def parse_split(table: str, *, source: str) -> list[Clip]:
    """The usable rows of a Common Voice TSV, in order; those in which nothing can be heard are left out.

    Only `path` and `sentence` must be there; releases differ in the other columns. `source` names it in errors.
    """
    # Quotes in sentences are plain signs in these files: a reader that heeds them swallows whole lines.
    reader = csv.DictReader(io.StringIO(table), delimiter="\t", quoting=csv.QUOTE_NONE)
    missing = {"path", "sentence"} - set(reader.fieldnames or ())
    if missing:
        raise UsageError(
            f"{source} has no column {' and '.join(sorted(missing))}", next_step="point to a Common Voice release"
        )
    clips = []
    for row in reader:
        sentence = text.normalise(row["sentence"] or "")
        if not sentence or not row["path"]:
            continue
        name = posixpath.basename(row["path"])
        # Old releases leave the suffix out.
        name = name if "." in name else f"{name}.mp3"
        clips.append(Clip(name=name, sentence=sentence, speaker=row.get("client_id") or ""))
    return clips


def read_split(data: Place, split: str, *, limit: int | None = None) -> list[Clip]:
    """The clips of one split below `data`, at most `limit` of them, taken evenly over the split."""
    name = f"{split}.tsv"
    clips = parse_split(data.read(name).decode("utf-8"), source=posixpath.join(data.url, name))
    if not clips:
        raise UsageError(f"{posixpath.join(data.url, name)} has no usable row", next_step="check the data set")
    if limit is None or limit >= len(clips):
        return clips
    return [clips[index * len(clips) // limit] for index in range(limit)]


def prepare_clips(
    batch: pa.Table, *, clips: dict[str, Clip], heard: frozenset[str], max_seconds: float, features: Any
) -> pa.Table:
    """Decode a batch of (path, bytes) rows into features and labels; over-long and unusable clips are left out.

    The arrays travel as bytes: Arrow then moves them without looking inside.
    """
    rows: list[dict[str, Any]] = []
    for path, encoded in zip(batch["path"].to_pylist(), batch["bytes"].to_pylist(), strict=True):
        clip = clips[posixpath.basename(path)]
        try:
            samples = decode_audio(encoded)
        except RuntimeError as error:
            raise DamagedError(f"{path} cannot be decoded", next_step="take it out of the split's TSV") from error
        if len(samples) > max_seconds * SAMPLE_RATE:
            continue
        values = features(samples)
        labels = text.encode(clip.sentence)
        if text.frames_needed(labels) > len(values):
            continue
        rows.append(
            {
                "features": values.tobytes(),
                "width": values.shape[1],
                "labels": np.asarray(labels, dtype=np.int64).tobytes(),
                "sentence": clip.sentence,
                "heard": clip.speaker in heard,
            }
        )
    return pa.Table.from_pylist(rows, schema=_PREPARED)


_PREPARED = pa.schema(
    {
        "features": pa.binary(),
        "width": pa.int32(),
        "labels": pa.binary(),
        "sentence": pa.string(),
        "heard": pa.bool_(),
    }
)


def clip_dataset(
    data: Place,
    clips: Sequence[Clip],
    *,
    heard: Iterable[str] = (),
    max_seconds: float = 12.0,
    shuffle_seed: int | None = None,
    features: Any = log_mel,
) -> ray.data.Dataset:
    """A lazy dataset of prepared clips that reads every clip through `data.fs` on every pass.

    `heard` are the speakers of the training split, so that an evaluation can tell known voices from new ones.
    With `shuffle_seed` the clips come in another order on every pass.
    """
    import ray.data

    raw = ray.data.read_binary_files(
        [posixpath.join(data.url, "clips", clip.name) for clip in clips],
        filesystem=data.fs,
        include_paths=True,
        shuffle=None if shuffle_seed is None else ray.data.FileShuffleConfig(seed=shuffle_seed),
        override_num_blocks=max(2, -(-len(clips) // CLIPS_A_TASK)),
    )
    prepare = partial(
        prepare_clips,
        clips={clip.name: clip for clip in clips},
        heard=frozenset(heard),
        max_seconds=max_seconds,
        features=features,
    )
    return raw.map_batches(prepare, batch_format="pyarrow", batch_size=CLIPS_A_TASK)


def collate(batch: dict[str, Any]) -> dict[str, Any]:
    """Prepared rows to padded tensors: features (clips, frames, width), their mask, and labels padded with -100."""
    import torch

    features = [
        np.frombuffer(values, dtype=np.float32).reshape(-1, width)
        for values, width in zip(batch["features"], batch["width"], strict=True)
    ]
    labels = [np.frombuffer(values, dtype=np.int64) for values in batch["labels"]]
    count, frames = len(features), max(len(values) for values in features)
    padded = np.zeros((count, frames, features[0].shape[1]), dtype=np.float32)
    mask = np.zeros((count, frames), dtype=np.int64)
    targets = np.full((count, max(len(values) for values in labels)), -100, dtype=np.int64)
    for row, (values, label) in enumerate(zip(features, labels, strict=True)):
        padded[row, : len(values)] = values
        mask[row, : len(values)] = 1
        targets[row, : len(label)] = label
    return {
        "features": torch.from_numpy(padded),
        "mask": torch.from_numpy(mask),
        "labels": torch.from_numpy(targets),
        "sentences": [str(sentence) for sentence in batch["sentence"]],
        "heard": [bool(known) for known in batch["heard"]],
    }
