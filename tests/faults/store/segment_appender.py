"""Appends objects to segments, in three groups: `python segment_appender.py FOLDER START STOP`, for each of these numbers.

It writes the number of each object to standard output once that is stored, and ends with 28 when the disk is full.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from millrace.errors import DiskFullError
from millrace.store.records import ObjectName
from millrace.store.segments import Segments


class Table:
    """Gives generations as a store's index does: no two alike, in any process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def new_generation(self) -> int:
        while True:
            number = time.monotonic_ns()
            try:
                os.close(os.open(self._directory / f"taken-{number}", os.O_CREAT | os.O_EXCL))
                return number
            except FileExistsError:
                pass

    def add_segment(self, generation: int, group: str) -> None:
        pass


def data_of(number: int) -> bytes:
    return random.Random(number).randbytes(100 + number * 97 % 3_000)


def main(directory: Path, start: int, stop: int) -> int:
    signal.alarm(400)
    segments = Segments(directory, Table(directory.parent), max_open=2)
    try:
        for number in range(start, stop):
            name = ObjectName("o", f"b/{number}", "v")
            segments.append(f"g{number % 3}", number.to_bytes(16, "big"), name, data_of(number))
            os.write(1, number.to_bytes(8, "big"))
    except DiskFullError:
        return 28
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
