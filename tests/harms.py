"""What somebody may do to a file of the store, or put in its place."""

import os
from pathlib import Path


def empty(path: Path) -> None:
    os.truncate(path, 0)


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def replace_by_noise(path: Path) -> None:
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(os.urandom(size))


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_a_full_folder(path: Path) -> None:
    replace_by_a_folder(path)
    (path / "inside").write_text("precious")


def replace_by_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)
