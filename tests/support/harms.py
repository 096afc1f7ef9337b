"""Damage to a file, and other things in its place."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def flip(path: str | Path, offset: int) -> None:
    """Flip the lowest bit of the byte at `offset`."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def flip_in_the_middle(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


@contextmanager
def kept_times(path: Path) -> Iterator[None]:
    """Afterwards the file has the times of before, as if its disk had changed it."""
    status = path.stat()
    yield
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def and_set_back_the_times(harm: Callable[[Path], None]) -> Callable[[Path], None]:
    """`harm`, after which the file has its former times. A test id has the name of the result."""

    def harm_and_set_back(path: Path) -> None:
        with kept_times(path):
            harm(path)

    harm_and_set_back.__name__ = f"{harm.__name__}_and_set_back_the_times"
    return harm_and_set_back


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
