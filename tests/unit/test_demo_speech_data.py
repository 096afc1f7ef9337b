"""The shipped speech set and its layout, which is that of Common Voice."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest

from millrace.demo.speech_data import COLUMNS, main, write_common_voice

soundfile = pytest.importorskip("soundfile")


def rows(directory: Path, split: str) -> list[dict[str, str]]:
    text = (directory / f"{split}.tsv").read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("release")
    write_common_voice(directory)
    return directory


def test_the_tables_have_the_columns_of_common_voice_11(release: Path) -> None:
    for split in ("train", "dev", "test"):
        first = (release / f"{split}.tsv").read_text(encoding="utf-8").splitlines()[0]
        assert first == "client_id\tpath\tsentence\tup_votes\tdown_votes\tage\tgender\taccents\tlocale\tsegment"
        for row in rows(release, split):
            assert set(row) == set(COLUMNS)
            assert row["locale"] == "de"
            assert len(row["client_id"]) == 128
            assert row["path"].startswith("common_voice_de_")


def test_dev_and_test_say_nothing_that_train_says(release: Path) -> None:
    train = {row["sentence"] for row in rows(release, "train")}
    assert len(train) == len(rows(release, "train"))
    for split in ("dev", "test"):
        assert not train & {row["sentence"] for row in rows(release, split)}


def test_one_speaker_is_heard_in_test_only(release: Path) -> None:
    speakers = {split: {row["client_id"] for row in rows(release, split)} for split in ("train", "dev", "test")}
    assert len(speakers["train"]) >= 8
    assert speakers["dev"] <= speakers["train"]
    assert len(speakers["test"] - speakers["train"]) == 1


def test_every_clip_is_there_and_is_short_mono_mp3(release: Path) -> None:
    names = [row["path"] for split in ("train", "dev", "test") for row in rows(release, split)]
    assert len(names) == len(set(names)) == len(list((release / "clips").iterdir()))
    for name in names[::25]:
        info = soundfile.info(str(release / "clips" / name))
        assert (info.format, info.channels, info.samplerate) == ("MP3", 1, 16_000)
        assert 0.5 < info.duration < 8


def test_what_was_written_is_told(release: Path, tmp_path: Path) -> None:
    written = write_common_voice(tmp_path)
    on_disk = {str(path.relative_to(tmp_path)): path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    assert set(written.files) == set(on_disk)
    assert written.total_bytes == sum(on_disk.values())
    assert written.clips == {split: len(rows(release, split)) for split in ("train", "dev", "test")}


def test_limits_leave_clips_out_but_keep_the_new_voice(tmp_path: Path) -> None:
    written = write_common_voice(tmp_path, limits={"train": 24, "dev": 4, "test": 6})
    assert written.clips == {"train": 24, "dev": 4, "test": 6}
    assert len(list((tmp_path / "clips").iterdir())) == 34
    known = {row["client_id"] for row in rows(tmp_path, "train")}
    assert len(known) > 1
    assert {row["client_id"] for row in rows(tmp_path, "test")} - known


def test_the_set_can_be_written_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "cv")]) == 0
    assert f"416 train, 32 dev, 48 test clips, 2.5 MB, in {tmp_path / 'cv'}" in capsys.readouterr().out
    assert (tmp_path / "cv" / "train.tsv").exists()
    (tmp_path / "file").write_text("x")
    assert main([str(tmp_path / "file")]) == 1
    assert re.fullmatch(r"speech_data: \S+file\S*: .+: choose another folder\n", capsys.readouterr().err)
    for given in ([], ["a", "b"], ["--help"]):
        assert main(given) == 2
        assert capsys.readouterr().err.startswith("usage: ")


def test_the_set_stays_small() -> None:
    from importlib import resources

    archive = resources.files("millrace.testing.speech_data") / "clips.zip"
    with resources.as_file(archive) as path:
        assert path.stat().st_size < 3_000_000
