"""The small speech set that ships with Millrace, laid out on disk exactly as Mozilla Common Voice is."""

from __future__ import annotations

import csv
import hashlib
import io
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from millrace.demo.disk import local_files
from millrace.errors import MillraceError

SPLITS = ("train", "dev", "test")
COLUMNS = (
    "client_id",
    "path",
    "sentence",
    "up_votes",
    "down_votes",
    "age",
    "gender",
    "accents",
    "locale",
    "segment",
)


@dataclass(frozen=True, kw_only=True)
class WrittenSpeech:
    """What `write_common_voice` left in `directory`."""

    directory: Path
    files: tuple[str, ...]
    clips: dict[str, int]
    total_bytes: int


def write_common_voice(directory: Path, *, limits: dict[str, int] | None = None) -> WrittenSpeech:
    """Write `train.tsv`, `dev.tsv`, `test.tsv` and `clips/*.mp3` below `directory`, which is made if need be.

    `limits` takes only the first clips of a split; the others are left out altogether. The files of an earlier call
    are replaced by the same bytes. Not for two processes at a time in one directory. Raises `StorageError`
    (`DiskFullError`) when they cannot be written.
    """
    limits = limits or {}
    source = resources.files("millrace.testing.speech_data")
    rows = csv.DictReader(io.StringIO((source / "sentences.tsv").read_text(encoding="utf-8")), delimiter="\t")
    tables: dict[str, list[dict[str, str]]] = {split: [] for split in SPLITS}
    for row in rows:
        tables[row["split"]].append(row)
    tables = {split: _first(table, limits.get(split)) for split, table in tables.items()}

    files: list[str] = []
    total = 0
    clips = directory / "clips"
    with local_files(directory):
        clips.mkdir(parents=True, exist_ok=True)
    with (source / "clips.zip").open("rb") as stream, zipfile.ZipFile(stream) as archive:
        for table in tables.values():
            for row in table:
                content = archive.read(row["file"])
                with local_files(directory):
                    (clips / row["file"]).write_bytes(content)
                files.append(f"clips/{row['file']}")
                total += len(content)
    for split, table in tables.items():
        content = _tsv(table).encode("utf-8")
        with local_files(directory):
            (directory / f"{split}.tsv").write_bytes(content)
        files.append(f"{split}.tsv")
        total += len(content)
    counts = {split: len(table) for split, table in tables.items()}
    return WrittenSpeech(directory=directory, files=tuple(sorted(files)), clips=counts, total_bytes=total)


def _first(table: list[dict[str, str]], limit: int | None) -> list[dict[str, str]]:
    """The first `limit` rows, spread evenly so that a short test split still has the voice that comes last."""
    if limit is None or limit >= len(table):
        return table
    return [table[index * len(table) // limit + (len(table) - 1) // limit // 2] for index in range(limit)]


def _tsv(rows: list[dict[str, str]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator="\n", quoting=csv.QUOTE_NONE, quotechar=None)
    writer.writerow(COLUMNS)
    for row in rows:
        # Common Voice gives its speakers no names but the hash of one, 128 hexadecimal digits.
        client = hashlib.sha512(row["speaker"].encode()).hexdigest()
        writer.writerow((client, row["file"], row["sentence"], 2, 0, row["age"], row["gender"], "", "de", ""))
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m millrace.demo.speech_data FOLDER`: write the set there, to try the example scripts with."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1 or given[0].startswith("-"):
        print("usage: python3 -m millrace.demo.speech_data FOLDER", file=sys.stderr)
        return 2
    try:
        written = write_common_voice(Path(given[0]))
    except MillraceError as error:
        print(f"speech_data: {error.message}: choose another folder", file=sys.stderr)
        return 1
    clips = ", ".join(f"{count} {split}" for split, count in written.clips.items())
    print(f"{clips} clips, {written.total_bytes / 1e6:.1f} MB, in {written.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
