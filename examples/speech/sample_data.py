"""Write the sample speech set in the layout of Mozilla Common Voice: `python3 sample_data.py FOLDER`."""

from __future__ import annotations

import csv
import hashlib
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

SAMPLE = Path(__file__).resolve().parent / "sample"
SPLITS = ("train", "dev", "test")
COLUMNS = ["client_id", "path", "sentence", "up_votes", "down_votes", "age", "gender", "accents", "locale", "segment"]


def write_common_voice(folder: Path, limits: Mapping[str, int] | None = None) -> dict[str, int]:
    """Write `train.tsv`, `dev.tsv`, `test.tsv` and `clips/*.mp3` to `folder`; returns the number of clips by split.

    `limits` takes so many clips of a split, evenly spread, so that a short test split still has the new voice.
    """
    with (SAMPLE / "sentences.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    counts = {}
    (folder / "clips").mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(SAMPLE / "clips.zip") as archive:
        for split in SPLITS:
            clips = [row for row in rows if row["split"] == split]
            limit = min((limits or {}).get(split, len(clips)), len(clips))
            middle = (len(clips) - 1) // limit // 2
            clips = [clips[index * len(clips) // limit + middle] for index in range(limit)]
            lines = ["\t".join(COLUMNS)]
            for clip in clips:
                # Common Voice names its speakers by a hash.
                speaker = hashlib.sha512(clip["speaker"].encode()).hexdigest()
                fields = (speaker, clip["file"], clip["sentence"], "2", "0", clip["age"], clip["gender"], "", "de", "")
                lines.append("\t".join(fields))
                (folder / "clips" / clip["file"]).write_bytes(archive.read(clip["file"]))
            (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
            counts[split] = len(clips)
    return counts


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python3 sample_data.py FOLDER")
    try:
        written = write_common_voice(Path(sys.argv[1]))
    except OSError as error:
        sys.exit(f"sample_data.py: {error}")
    print(", ".join(f"{count} {split}" for split, count in written.items()), "clips in", sys.argv[1])
