"""Make the small synthesised German speech set that the speech example and its tests use.

For developers only: the result is committed in `examples/speech/sample/`, so neither the example nor a
test needs a synthesiser. Needs the `espeak-ng` command (Debian: `apt-get install espeak-ng`); run it with

    python tools/make_speech_clips.py

The sentences were written for this project: subjects, actions and circumstances that go together in any
combination, as in matrix tests of hearing, so that new sentences can be made of known words. Everything is drawn
from one seed; the same synthesiser version gives the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import random
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import soundfile
import soxr

SAMPLE_RATE = 16_000
SEED = 20
TARGET = Path(__file__).resolve().parent.parent / "examples" / "speech" / "sample"
COLUMNS = ("split", "speaker", "age", "gender", "file", "sentence")


@dataclass(frozen=True)
class Speaker:
    """One voice: an espeak-ng variant with its pitch (0 to 99) and speed (words a minute)."""

    name: str
    variant: str
    pitch: int
    speed: int
    age: str
    gender: str


TRAIN_SPEAKERS = (
    Speaker("amrum", "m1", 38, 178, "thirties", "male"),
    Speaker("borkum", "m3", 50, 190, "twenties", "male"),
    Speaker("fehmarn", "m7", 30, 170, "fifties", "male"),
    Speaker("juist", "f1", 52, 182, "twenties", "female"),
    Speaker("langeoog", "f2", 60, 174, "thirties", "female"),
    Speaker("norderney", "f4", 46, 188, "fourties", "female"),
    Speaker("poel", "m4", 44, 184, "fourties", "male"),
    Speaker("sylt", "f5", 66, 176, "teens", "female"),
)
# Only in the test split: a voice that is not in the training data.
HELD_OUT_SPEAKER = Speaker("helgoland", "f3", 56, 180, "thirties", "female")

SUBJECTS = (
    "der Müller", "die Bäckerin", "der alte Fischer", "die junge Ärztin", "der Lehrer", "die Schülerin",
    "unser Nachbar", "meine Schwester", "der Gärtner", "die Köchin", "der kleine Junge", "das Mädchen",
    "ein Schäfer", "die Sängerin", "der Schlosser", "die Großmutter",
)  # fmt: skip
ACTIONS = (
    ("mahlt", "das Korn"), ("backt", "frisches Brot"), ("kauft", "grüne Äpfel"), ("sucht", "den Schlüssel"),
    ("öffnet", "das Tor"), ("liest", "ein Buch"), ("zählt", "die Säcke"), ("trägt", "einen Korb"),
    ("malt", "ein schönes Bild"), ("hört", "leise Musik"), ("kocht", "heiße Suppe"), ("füttert", "die Hühner"),
    ("schreibt", "einen Brief"), ("holt", "kaltes Wasser"), ("putzt", "das Mühlrad"), ("verkauft", "süßen Honig"),
)  # fmt: skip
CIRCUMSTANCES = (
    "am frühen Morgen", "am Abend", "im Garten", "auf dem Markt", "hinter dem Haus", "an der Brücke", "jeden Tag",
    "im Winter", "heute", "vor der Mühle", "nach der Schule", "mit Freude", "bei Regen", "neben dem Fluss",
    "unter dem Baum", "gegen Mittag",
)  # fmt: skip


def compose(draw: random.Random) -> str:
    """One German sentence, with its capital letter and its punctuation."""
    subject = draw.choice(SUBJECTS)
    verb, thing = draw.choice(ACTIONS)
    circumstance = draw.choice(CIRCUMSTANCES)
    sentence = draw.choice(
        (
            f"{subject} {verb} {thing}.",
            f"{subject} {verb} {circumstance} {thing}.",
            f"{circumstance} {verb} {subject} {thing}.",
            f"{verb} {subject} {thing}?",
            f"Warum {verb} {subject} {circumstance} {thing}?",
        )
    )
    return sentence[0].upper() + sentence[1:]


def speak(sentence: str, speaker: Speaker) -> bytes:
    """The sentence in the speaker's voice, as the bytes of a mono MP3 of 16 kbit/s."""
    command = ["espeak-ng", "-v", f"de+{speaker.variant}", "-p", str(speaker.pitch), "-s", str(speaker.speed)]
    wave = subprocess.run([*command, "--stdout", sentence], check=True, capture_output=True).stdout
    samples, rate = soundfile.read(io.BytesIO(wave), dtype="float32")
    mp3 = io.BytesIO()
    soundfile.write(
        mp3,
        soxr.resample(samples, rate, SAMPLE_RATE) * 0.9,
        SAMPLE_RATE,
        format="MP3",
        subtype="MPEG_LAYER_III",
        bitrate_mode="CONSTANT",
        compression_level=0.95,
    )
    return mp3.getvalue()


def plan(train: int, dev: int, test: int, held_out: int) -> list[tuple[str, Speaker, str]]:
    """The sentences of each voice in each split; none occurs twice, so none of dev and test is in train."""
    draw = random.Random(SEED)
    sentences: dict[str, None] = {}
    while len(sentences) < train + dev + test + held_out:
        sentences[compose(draw)] = None
    ordered = iter(sentences)
    rows = []
    for split, count in (("train", train), ("dev", dev), ("test", test)):
        rows += [(split, TRAIN_SPEAKERS[i % len(TRAIN_SPEAKERS)], next(ordered)) for i in range(count)]
    rows += [("test", HELD_OUT_SPEAKER, next(ordered)) for _ in range(held_out)]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=TARGET, help="folder for sentences.tsv and clips.zip")
    parser.add_argument("--train", type=int, default=416)
    parser.add_argument("--dev", type=int, default=32)
    parser.add_argument("--test", type=int, default=32)
    parser.add_argument("--held-out", type=int, default=16)
    options = parser.parse_args()
    if shutil.which("espeak-ng") is None:
        print(
            "espeak-ng is not installed: install it first, for example with apt-get install espeak-ng", file=sys.stderr
        )
        return 2

    options.target.mkdir(parents=True, exist_ok=True)
    seconds = 0.0
    table = io.StringIO()
    writer = csv.writer(table, delimiter="\t", lineterminator="\n")
    writer.writerow(COLUMNS)
    # MP3 does not compress further; a stored archive keeps one file in the repository instead of five hundred.
    with zipfile.ZipFile(options.target / "clips.zip", "w", zipfile.ZIP_STORED) as archive:
        rows = plan(options.train, options.dev, options.test, options.held_out)
        for number, (split, speaker, sentence) in enumerate(rows):
            mp3 = speak(sentence, speaker)
            seconds += soundfile.info(io.BytesIO(mp3)).duration
            # Names as in Common Voice, without speaker, split or sentence.
            digest = int.from_bytes(hashlib.sha256(f"{SEED}/{number}".encode()).digest()[:4], "big")
            name = f"common_voice_de_{10_000_000 + digest % 30_000_000}.mp3"
            archive.writestr(zipfile.ZipInfo(name, date_time=(2024, 1, 1, 0, 0, 0)), mp3)
            writer.writerow((split, speaker.name, speaker.age, speaker.gender, name, sentence))
    (options.target / "sentences.tsv").write_text(table.getvalue(), encoding="utf-8")
    size = (options.target / "clips.zip").stat().st_size
    print(f"{len(rows)} clips, {seconds / 60:.1f} minutes, {size / 1e6:.2f} MB in {options.target}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
