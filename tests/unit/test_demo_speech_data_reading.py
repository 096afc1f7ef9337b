"""Common Voice tables, and rows of encoded audio on their way to tensors."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pytest

from millrace.demo.place import Place
from millrace.demo.speech import text
from millrace.demo.speech.audio import FEATURES, SAMPLE_RATE
from millrace.demo.speech.batches import batch_of
from millrace.demo.speech.data import Clip, SplitSource, parse_split, read_split, table_of
from millrace.demo.speech.families.choosing import family_of
from millrace.demo.speech.settings import SpeechSettings
from millrace.demo.speech_data import write_common_voice
from millrace.errors import DamagedError, UsageError

soundfile = pytest.importorskip("soundfile")

FAMILY = family_of(SpeechSettings(data_url="s3://b/cv", run_url="s3://b/run"))


def wave(seconds: float) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(0).normal(0, 0.1, int(seconds * SAMPLE_RATE))
    soundfile.write(file, noise.astype(np.float32), SAMPLE_RATE, format="WAV")
    return file.getvalue()


def prepared(rows: dict[str, tuple[str, bytes]], *, heard: frozenset[str] = frozenset()) -> pa.Table:
    clips = tuple(Clip(name=name, sentence=sentence, speaker=f"of {name}") for name, (sentence, _) in rows.items())
    data = Place(fs=pyarrow.fs.LocalFileSystem(), url="b")
    source = SplitSource(data=data, clips=clips, heard=heard, max_seconds=3.0, family=FAMILY)
    source = pickle.loads(pickle.dumps(source))
    return table_of(source.row(clip, rows[clip.name][1]) for clip in source.clips)


def test_a_table_with_only_what_is_needed_is_enough() -> None:
    clips = parse_split("path\tsentence\na.mp3\tGuten Tag.\n", source="x.tsv")
    assert clips == [Clip(name="a.mp3", sentence="guten tag", speaker="")]


def test_a_table_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_bytes("path\tsentence\na.mp3\tja\n".encode("utf-16"))
    data = Place(fs=pyarrow.fs.LocalFileSystem(), url=str(tmp_path))
    with pytest.raises(UsageError, match=r"train\.tsv is no UTF-8 text"):
        read_split(data, "train")


def test_quotes_do_not_swallow_lines() -> None:
    table = 'client_id\tpath\tsentence\nx\ta.mp3\t"Ja\ny\tb.mp3\tNein" sagte er\n'
    assert [clip.sentence for clip in parse_split(table, source="x.tsv")] == ["ja", "nein sagte er"]


def test_names_are_relative_to_the_clips_and_have_a_suffix() -> None:
    table = "path\tsentence\nclips/a.mp3\teins\nb\tzwei\n"
    assert [clip.name for clip in parse_split(table, source="x.tsv")] == ["a.mp3", "b.mp3"]


def test_rows_without_a_sound_or_a_clip_are_left_out() -> None:
    table = "path\tsentence\na.mp3\t...\n\tohne\nb.mp3\n"
    assert parse_split(table, source="x.tsv") == []


def test_a_table_of_something_else_is_named() -> None:
    with pytest.raises(UsageError, match=r"s3://b/train\.tsv has no column path and sentence"):
        parse_split("a\tb\n1\t2\n", source="s3://b/train.tsv")


def test_a_limit_takes_clips_from_the_whole_split(tmp_path: Path) -> None:
    write_common_voice(tmp_path, limits={"train": 16, "dev": 4, "test": 12})
    place = Place(fs=pyarrow.fs.LocalFileSystem(), url=str(tmp_path))
    every = read_split(place, "test")
    some = read_split(place, "test", limit=4)
    assert len(every) == 12
    assert some == [every[0], every[3], every[6], every[9]]


def test_rows_become_features_and_labels() -> None:
    table = prepared({"a.wav": ("guten tag", wave(1.0))}, heard=frozenset({"of a.wav"}))
    assert table.num_rows == 1
    row = table.to_pylist()[0]
    assert row["width"] == FEATURES
    assert len(row["features"]) % (4 * FEATURES) == 0
    assert np.frombuffer(row["labels"], dtype=np.int64).tolist() == text.encode("guten tag")
    assert row["heard"] is True


@pytest.mark.parametrize(
    ("sentence", "seconds"),
    [("viel zu lang", 3.1), ("mehr zeichen als dieser clip bilder hat", 0.4), ("nichts", 0.0)],
)
def test_clips_that_cannot_be_learned_from_are_left_out(sentence: str, seconds: float) -> None:
    table = prepared({"a.wav": (sentence, wave(seconds)), "b.wav": ("gut", wave(1.0))})
    assert table["sentence"].to_pylist() == ["gut"]


def test_a_clip_that_cannot_be_decoded_is_named() -> None:
    with pytest.raises(DamagedError, match=r"b/clips/a\.wav cannot be decoded"):
        prepared({"a.wav": ("gut", b"this is not audio")})


def test_a_batch_has_the_names_and_the_tensors_of_its_clips() -> None:
    pytest.importorskip("torch")
    table = prepared(
        {"a.wav": ("kurz", wave(0.5)), "b.wav": ("etwas länger", wave(1.5))}, heard=frozenset({"of b.wav"})
    )
    batch = batch_of(table, FAMILY)
    frames = batch.tensors["mask"].sum(dim=1).tolist()
    assert batch.tensors["features"].shape == (2, max(frames), FEATURES)
    assert frames[0] < frames[1]
    assert not batch.tensors["features"][0, frames[0] :].any()
    assert batch.tensors["labels"][0].tolist() == text.encode("kurz") + [-100] * 8
    assert (batch.names, batch.sentences) == (["a.wav", "b.wav"], ["kurz", "etwas länger"])
    assert batch.known == [False, True]
    assert len(batch) == 2
    assert len(batch.shortest.features) == frames[0]
    assert batch.shortest.labels == text.encode("kurz")
