"""Common Voice as Ray Data: clips are read through Millrace, decoded, and made into training rows by Ray's tasks."""

from __future__ import annotations

import io
import math
import posixpath
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import ray
import ray.data
import ray.train
import soundfile
import soxr

from millrace import MillraceFileSystem
from millrace.errors import DamagedError, UsageError
from millrace.ray import read_near

from .options import Settings
from .preprocessing import LETTERS, SAMPLE_RATE, Preprocessor

if TYPE_CHECKING:
    import torch

    from .models import SpeechModel

SPLITS = ("train", "dev", "test")
MIN_SECONDS = 0.5
"""Shorter clips are left out: Wav2Vec2-BERT hides spans of a fifth of a second from itself in training."""

_MAX_CLIPS_PER_BLOCK = 64
_MIN_CLIPS_PER_BLOCK = 8
_EVALUATION_BATCH = 16


# --- the tables of a Common Voice release -------------------------------------------------------------


def read_splits(fs: MillraceFileSystem, settings: Settings) -> dict[str, pa.Table]:
    """The clips of each split: `name`, `sentence` (normalised), and `known` (the speaker is in the training split)."""
    limits = {"train": settings.train_clips, "dev": settings.dev_clips, "test": settings.test_clips}
    tables = {split: _read_table(fs, posixpath.join(settings.data, f"{split}.tsv"), limits[split]) for split in SPLITS}
    speakers = tables["train"]["client_id"].combine_chunks()
    return {
        split: table.append_column("known", pc.is_in(table["client_id"], value_set=speakers)).drop_columns("client_id")
        for split, table in tables.items()
    }


def _read_table(fs: MillraceFileSystem, url: str, limit: int | None) -> pa.Table:
    try:
        table = pyarrow.csv.read_csv(
            pa.py_buffer(fs.cat_file(url)),
            # Quotation marks in these files are part of the sentence.
            parse_options=pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=["path", "sentence", "client_id"],
                include_missing_columns=True,
                column_types=dict.fromkeys(("path", "sentence", "client_id"), pa.string()),
                strings_can_be_null=True,
            ),
        )
    except pa.ArrowInvalid as error:
        raise UsageError(f"{url}: not a Common Voice table ({error})", next_step="check the data set") from error
    table = table.set_column(1, "sentence", pa.array([normalise(text or "") for text in table["sentence"].to_pylist()]))
    table = table.filter(pc.and_(pc.is_valid(table["path"]), pc.not_equal(table["sentence"], "")))
    table = table.set_column(0, "name", pa.array([_file_name(path) for path in table["path"].to_pylist()], pa.string()))
    if not table.num_rows:
        raise UsageError(f"{url}: no usable row", next_step="check that this is a Common Voice release")
    if limit is not None and limit < table.num_rows:
        table = table.take([index * table.num_rows // limit for index in range(limit)])
    return table


def _file_name(path: str) -> str:
    name = posixpath.basename(path)
    return name if "." in name else f"{name}.mp3"  # old releases omit the suffix


def normalise(sentence: str) -> str:
    """The part of a German sentence that can be heard: lower-case letters and single spaces.

    Accents that German does not have are removed, dashes separate words, all other characters are dropped. So are digits:
    the text does not show how they are spoken.
    """
    kept: list[str] = []
    for character in unicodedata.normalize("NFC", sentence).lower():
        if character in LETTERS:
            kept.append(character)
        elif character.isspace() or unicodedata.category(character) == "Pd":
            kept.append(" ")
        else:
            kept.extend(base for base in unicodedata.normalize("NFKD", character) if base in LETTERS)
    return " ".join("".join(kept).split())


# --- clips to rows, in tasks of Ray Data --------------------------------------------------------------


def split_dataset(
    fs: MillraceFileSystem, settings: Settings, preprocessor: ray.ObjectRef, table: pa.Table, *, shuffle: bool
) -> ray.data.Dataset:
    """A lazy data set of the prepared clips of one split. Every pass over it reads the clips again.

    Each clip is read by a task on the node that has it in its part of the cache. With `shuffle` every pass has a new order.
    `preprocessor` refers to a `Preprocessor`: processes of Ray that only plan the tasks do not load its libraries.
    """
    paths = [posixpath.join(settings.data, "clips", name) for name in table["name"].to_pylist()]
    # Ray Train hands out whole blocks, so small data sets get small blocks: the workers' shares are then about equal.
    per_block = min(_MAX_CLIPS_PER_BLOCK, max(_MIN_CLIPS_PER_BLOCK, math.ceil(len(paths) / (4 * settings.workers))))
    resources: dict[str, Any] = {}
    if free_cpus([int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]], settings) < 1:
        # The training workers may hold all CPUs, for example after the loss of a node. Tasks that request a CPU would then
        # wait for the workers, and the workers for the tasks.
        resources = {"num_cpus": 0, "concurrency": max(2, settings.workers)}
    reference = ray.put(table)  # a large one reaches each node once, instead of travelling with every task

    def prepare_block(files: pa.Table) -> pa.Table:
        return prepare(files, *ray.get([reference, preprocessor]), max_seconds=settings.max_seconds)

    def prepared(files: ray.data.Dataset) -> ray.data.Dataset:
        return files.map_batches(prepare_block, batch_format="pyarrow", batch_size=None, **resources)

    return read_near(
        ray.data.read_binary_files,
        paths,
        filesystem=fs,
        then=prepared,
        include_paths=True,
        shuffle=ray.data.FileShuffleConfig(seed=settings.seed) if shuffle else None,
        override_num_blocks=max(2, math.ceil(len(paths) / per_block)),
        **resources,
    )


def free_cpus(cpus: Sequence[int], settings: Settings) -> int:
    """How many of the nodes' CPUs the training workers leave, of which as many run as fit. Pure."""
    workers = min(settings.workers, sum(count // settings.cpus for count in cpus))
    return sum(cpus) - workers * settings.cpus


def prepare(files: pa.Table, table: pa.Table, preprocessor: Preprocessor, *, max_seconds: float) -> pa.Table:
    """Rows of encoded audio (`path`, `bytes`) to rows that a model learns from; unusable clips are left out.

    `table` is that of the split. Features and labels are stored as the bytes of float32 and int64 arrays.
    """
    names = pa.array([posixpath.basename(path) for path in files["path"].to_pylist()], pa.string())
    clips = table.take(pc.index_in(names, value_set=table["name"].combine_chunks())).to_pylist()
    rows = []
    for path, encoded, clip in zip(files["path"].to_pylist(), files["bytes"], clips, strict=True):
        samples = decode(encoded.as_buffer(), path)
        labels = preprocessor.labels(clip["sentence"])
        if MIN_SECONDS <= len(samples) / SAMPLE_RATE <= max_seconds and len(labels) <= preprocessor.max_labels:
            labels_bytes = np.asarray(labels, dtype=np.int64).tobytes()
            rows.append({**clip, "features": preprocessor.features(samples).tobytes(), "labels": labels_bytes})
    return pa.Table.from_pylist(rows, schema=_ROW)


_ROW = pa.schema(
    {"name": pa.string(), "sentence": pa.string(), "known": pa.bool_(), "features": pa.binary(), "labels": pa.binary()}
)


def decode(encoded: pa.Buffer, path: str) -> np.ndarray:
    """The samples of an audio file (MP3, WAV, FLAC, Ogg): one channel, 16 kHz, float32 between -1 and 1."""
    try:
        samples, rate = soundfile.read(io.BytesIO(encoded), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise DamagedError(f"{path}: cannot be decoded", next_step="remove it from the split's table") from error
    mono = samples.mean(axis=1)
    return mono if rate == SAMPLE_RATE else soxr.resample(mono, rate, SAMPLE_RATE).astype(np.float32)


class EveryClipOnce(ray.train.DataConfig):  # type: ignore[misc]
    """Gives every clip to exactly one worker. Ray Train's default drops clips until all shares have the same size."""

    def configure(
        self,
        datasets: dict[str, ray.data.Dataset],
        world_size: int,
        worker_handles: Any,
        worker_node_ids: Any,
        **_: Any,
    ) -> list[dict[str, ray.data.DataIterator]]:
        """One iterator per data set for each worker, as Ray Train requests them for a new group of workers."""
        shares: list[dict[str, ray.data.DataIterator]] = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            dataset.set_name(name)
            dataset.context.execution_options = self.default_ingest_options()
            iterators = dataset.streaming_split(world_size, equal=False, locality_hints=worker_node_ids)
            for share, iterator in zip(shares, iterators, strict=True):
                share[name] = iterator
        return shares


# --- rows to batches, in the training workers ---------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some clips, and the keyword arguments of the model's forward pass as CPU tensors."""

    names: list[str]
    sentences: list[str]
    known: list[bool]
    inputs: dict[str, torch.Tensor]


def collate(rows: dict[str, np.ndarray], model: SpeechModel) -> Batch:
    """Rows of `prepare` as a padded batch."""
    features = [
        np.frombuffer(row, dtype=np.float32).reshape(model.preprocessor.feature_shape) for row in rows["features"]
    ]
    labels = [np.frombuffer(row, dtype=np.int64) for row in rows["labels"]]
    return Batch(
        names=list(rows["name"]),
        sentences=list(rows["sentence"]),
        known=[bool(known) for known in rows["known"]],
        inputs=model.collate(features, labels),
    )


def worker_batches(split: str, settings: Settings, model: SpeechModel) -> Iterator[Batch]:
    """This worker's share of a split, once. Ray Data prepares the next batches meanwhile."""
    size = settings.batch_size if split == "train" else _EVALUATION_BATCH
    shard = ray.train.get_dataset_shard(split)
    return iter(
        shard.iter_torch_batches(
            batch_size=size, collate_fn=partial(collate, model=model), prefetch_batches=2, device="cpu"
        )
    )
