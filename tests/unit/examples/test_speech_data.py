"""Common Voice tables, and encoded clips on their way to batches, in examples/speech."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import soundfile

import millrace
from finetune.data import collate, decode, free_cpus, normalise, prepare, read_splits
from finetune.models import speech_model
from finetune.options import Settings
from finetune.preprocessing import SAMPLE_RATE
from millrace.errors import DamagedError, UsageError

MODEL = speech_model(Settings(data="d", run="r"))
PREPROCESSOR = MODEL.preprocessor


def wave(seconds: float, rate: int = SAMPLE_RATE, channels: int = 1) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(0).normal(0, 0.1, (int(seconds * rate), channels))
    soundfile.write(file, noise.astype(np.float32), rate, format="WAV")
    return file.getvalue()


def splits(folder: Path, limit: int | None = None, **tables: str) -> dict[str, pa.Table]:
    for split in ("train", "dev", "test"):
        (folder / f"{split}.tsv").write_text(tables.get(split, "path\tsentence\tclient_id\nx.mp3\tja\tx\n"), "utf-8")
    fs = millrace.filesystem("file", cache_dir=str(folder / "cache"), members="none", min_free=0)
    return read_splits(fs, Settings(data=str(folder), run="r", train_clips=limit))


@pytest.mark.parametrize(
    ("sentence", "heard"),
    [
        ("Guten Tag, Ärger – größer!", "guten tag ärger größer"),
        ("Café-Besuch im Jahr 1999", "cafe besuch im jahr"),
        ("„Geht's?“  sagte\ter.", "gehts sagte er"),
        ("...", ""),
    ],
)
def test_sentence_is_normalised_to_letters_and_single_spaces(sentence: str, heard: str) -> None:
    assert normalise(sentence) == heard


def test_quotes_in_a_table_do_not_join_lines(tmp_path: Path) -> None:
    table = 'client_id\tpath\tsentence\nx\ta.mp3\t"Ja\ny\tb.mp3\tNein" sagte er\n'
    assert splits(tmp_path, train=table)["train"]["sentence"].to_pylist() == ["ja", "nein sagte er"]


def test_rows_without_a_text_or_a_clip_are_left_out(tmp_path: Path) -> None:
    table = "path\tsentence\na.mp3\t...\n\tohne\nclips/b\tgut\n"
    assert splits(tmp_path, train=table)["train"].to_pylist() == [{"name": "b.mp3", "sentence": "gut", "known": True}]


def test_speakers_of_the_training_split_are_marked(tmp_path: Path) -> None:
    head = "client_id\tpath\tsentence\n"
    tables = splits(tmp_path, train=f"{head}a\t1.mp3\tja\n", test=f"{head}a\t2.mp3\tja\nb\t3.mp3\tja\n")
    assert tables["test"]["known"].to_pylist() == [True, False]


def test_limit_selects_clips_from_the_whole_split(tmp_path: Path) -> None:
    table = "path\tsentence\n" + "".join(f"{number}.mp3\tja\n" for number in range(12))
    assert splits(tmp_path, limit=4, train=table)["train"]["name"].to_pylist() == ["0.mp3", "3.mp3", "6.mp3", "9.mp3"]


@pytest.mark.parametrize("table", ["path\tsentence\n", "path\tsentence\na\tb\tc\td\n", ""])
def test_table_without_clips_is_named_in_the_error(tmp_path: Path, table: str) -> None:
    with pytest.raises(UsageError, match=r"train\.tsv: "):
        splits(tmp_path, train=table)


def prepared(clips: dict[str, tuple[str, bytes]]) -> pa.Table:
    rows = [{"name": name, "sentence": sentence, "known": True} for name, (sentence, _) in clips.items()]
    # In another order than the table of the split, as a task has some of its files.
    files = pa.table({"path": [f"b/clips/{name}" for name in clips], "bytes": [data for _, data in clips.values()]})
    return prepare(
        files.take(list(reversed(range(len(clips))))), pa.Table.from_pylist(rows), PREPROCESSOR, max_seconds=3.0
    )


def test_clip_is_converted_to_features_and_labels() -> None:
    [row] = prepared({"a.wav": ("guten tag", wave(1.0))}).to_pylist()
    assert np.frombuffer(row["labels"], dtype=np.int64).tolist() == PREPROCESSOR.labels("guten tag")
    assert np.frombuffer(row["features"], dtype=np.float32).reshape(PREPROCESSOR.feature_shape).shape == (49, 160)
    assert (row["name"], row["sentence"], row["known"]) == ("a.wav", "guten tag", True)


@pytest.mark.parametrize("seconds", [3.1, 0.4, 0.0])
def test_clip_of_unusable_length_is_skipped(seconds: float) -> None:
    table = prepared({"a.wav": ("nichts", wave(seconds)), "b.wav": ("gut", wave(1.0))})
    assert table["sentence"].to_pylist() == ["gut"]


def test_undecodable_clip_is_named() -> None:
    with pytest.raises(DamagedError, match=r"b/clips/a\.wav: cannot be decoded"):
        prepared({"a.wav": ("gut", b"this is not audio")})


def test_audio_of_another_rate_becomes_one_channel_at_16_khz() -> None:
    samples = decode(pa.py_buffer(wave(1.0, rate=44_100, channels=2)), "a.wav")
    assert samples.shape == (SAMPLE_RATE,)
    assert samples.dtype == np.float32


def test_batch_has_padded_tensors_and_clip_names() -> None:
    table = prepared({"b.wav": ("etwas länger", wave(1.5)), "a.wav": ("kurz", wave(0.5))})
    rows = {name: np.array(table[name].to_pylist(), dtype=object) for name in table.column_names}
    batch = collate(rows, MODEL)
    frames = batch.inputs["attention_mask"].sum(dim=1).tolist()
    assert batch.inputs["input_features"].shape == (2, max(frames), 160)
    assert frames[0] < frames[1]
    assert not batch.inputs["input_features"][0, frames[0] :].any()
    assert batch.inputs["labels"][0].tolist() == [*PREPROCESSOR.labels("kurz"), *[-100] * 8]
    assert (batch.names, batch.sentences, batch.known) == (["a.wav", "b.wav"], ["kurz", "etwas länger"], [True, True])


@pytest.mark.parametrize(
    ("cpus", "free"),
    [
        ([0, 3, 3], 2),  # a head without CPUs
        ([0, 3], 1),  # one of the two nodes is lost, and one of the two workers runs
        ([0, 2], 0),
        ([4], 0),
        ([8], 4),
        ([], 0),
    ],
)
def test_free_cpus_are_those_that_workers_which_fit_leave(cpus: list[int], free: int) -> None:
    assert free_cpus(cpus, Settings(data="d", run="r", workers=2, cpus=2)) == free
