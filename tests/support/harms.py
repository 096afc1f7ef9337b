"""Damage to a file, and other things in its place."""

import os
from pathlib import Path


def flip(path: str | Path, offset: int) -> None:
    """Flip the lowest bit of the byte at `offset`."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


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
