"""Common Voice from any file system: its tables, and its clips as what a model learns from. Loads neither torch nor ray."""

from __future__ import annotations

import csv
import io
import posixpath
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from millrace.demo.place import Place
from millrace.demo.speech import text
from millrace.demo.speech.audio import SAMPLE_RATE, decode_audio
from millrace.demo.speech.batches import PREPARED, Example, row_of
from millrace.demo.speech.families.protocol import Family
from millrace.errors import DamagedError, UsageError


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
        # A speaker has a name of 128 letters and many clips.
        clips.append(Clip(name=name, sentence=sentence, speaker=sys.intern(row.get("client_id") or "")))
    return clips


def read_split(data: Place, split: str, *, limit: int | None = None) -> list[Clip]:
    """The clips of one split below `data`, at most `limit` of them, taken evenly over the split."""
    name = f"{split}.tsv"
    source = posixpath.join(data.url, name)
    try:
        table = data.read(name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is no UTF-8 text", next_step="point to a Common Voice release") from error
    clips = parse_split(table, source=source)
    if not clips:
        raise UsageError(f"{source} has no usable row", next_step="check the data set")
    if limit is None or limit >= len(clips):
        return clips
    return [clips[index * len(clips) // limit] for index in range(limit)]


@dataclass(frozen=True, kw_only=True)
class SplitSource:
    """A split, and how its clips become what a model learns from. Picklable: how it is read best depends on who reads it.

    `heard` are the speakers of the training split, so that an evaluation can tell known voices from new ones. With
    `shuffle_seed` the clips come in another order on every pass.
    """

    data: Place
    clips: tuple[Clip, ...]
    heard: frozenset[str]
    max_seconds: float
    family: Family
    shuffle_seed: int | None = None

    def paths(self) -> list[str]:
        """The URL of every clip."""
        return [posixpath.join(self.data.url, "clips", clip.name) for clip in self.clips]

    def only(self, clips: Sequence[Clip]) -> SplitSource:
        """Some of the clips, with no more about the others than they need: it travels with every task."""
        heard = self.heard & {clip.speaker for clip in clips}
        return replace(self, clips=tuple(clips), heard=heard)

    def read(self, clip: Clip) -> bytes:
        """A clip's file."""
        return self.data.at("clips").read(clip.name)

    def row(self, clip: Clip, encoded: bytes) -> dict[str, Any] | None:
        """A clip's bytes as a row of `PREPARED`; None for one that is over-long, or too short for what is said in it."""
        try:
            samples = decode_audio(encoded)
        except RuntimeError as error:
            raise DamagedError(
                f"{self.data.url}/clips/{clip.name} cannot be decoded", next_step="take it out of the split's TSV"
            ) from error
        if len(samples) > self.max_seconds * SAMPLE_RATE:
            return None
        features, labels = self.family.features(samples), self.family.labels(clip.sentence)
        if not self.family.fits(labels, len(features)):
            return None
        example = Example(features=features, labels=labels)
        return row_of(name=clip.name, sentence=clip.sentence, known=clip.speaker in self.heard, example=example)


def table_of(rows: Iterable[dict[str, Any] | None]) -> pa.Table:
    """The rows that are there as a `PREPARED` table."""
    return pa.Table.from_pylist([row for row in rows if row is not None], schema=PREPARED)
