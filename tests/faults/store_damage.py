"""Damages one file of a cache, and reads through it: in a process that has it open, or in one that opens it afterwards.

Run as a program with a list of cases; a forked process reads in each, since LMDB may end it. The tests do a few hundred.
`python -m tests.faults.store_damage FOLDER --cases 2000 --seed 1` does as many as you like to the index.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

# Before the fork, so that no case pays for it. Nothing of Millrace is opened in this process.
from millrace.filesystem import filesystem
from millrace.runtime import forks

_LOADED_LATER = ("encodings.idna", "millrace.cache.rebuild", "millrace.origin.object_store", "obstore.store")
"""Modules that the first use of a cache loads."""

PATIENCE_SECONDS = 60

HARMS = (
    "bit",
    "bytes",
    "page of noise",
    "page of zeros",
    "noise",
    "zeros",
    "empty",
    "shorter",
    "longer",
    "gone",
    "folder",
    "full folder",
    "fifo",
)
INDEX_HARMS = ("bit", "bytes", "page of noise", "page of zeros", "shorter")
"""Each byte of the index may be harmed by one of these."""
MAY_END_THE_PROCESS = (signal.SIGBUS, signal.SIGABRT, signal.SIGSEGV)


class Case(NamedTuple):
    """One harm, done to the file `name` of the store, while a process has the store `open` or not."""

    name: str
    harm: str
    seed: int
    open: bool


def index_cases(count: int, seed: int, *, is_open: bool) -> list[Case]:
    """Random harm to random places of the index."""
    rng = random.Random(seed)
    return [
        Case("local/index/index.mdb", INDEX_HARMS[number % len(INDEX_HARMS)], rng.randrange(1 << 30), is_open)
        for number in range(count)
    ]


def make_data(folder: Path) -> None:
    """An object with a file of its own and small ones."""
    folder.mkdir()
    (folder / "large.bin").write_bytes(random.Random(1).randbytes((1 << 20) + 1000))
    for number in range(10):
        (folder / f"small{number}.bin").write_bytes(random.Random(100 + number).randbytes(20 + 500 * number))


def make_cache(data: Path, cache: Path) -> None:
    """A cache that two processes filled and a user has pinned something in."""

    def fill() -> None:
        read_everything(data, cache)
        filesystem("file", cache_dir=str(cache), min_free=0).pin(str(data))

    for act in (fill, fill):
        wrong = in_a_process(act)
        assert not wrong, wrong


def store_files(cache: Path) -> list[str]:
    """Every file of a store but the bytes of objects, which have checksums of their own and tests of their own."""
    root = cache / "millrace"
    return sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and ("objects" not in path.parts or path.suffix == ".idx") and path.suffix != ".data"
    )


def read_everything(data: Path, cache: Path, *, rounds: int = 1) -> None:
    """Raises `AssertionError` for a wrong byte. A store that is refused because of its `FORMAT` is read around."""
    fs = filesystem("file", cache_dir=str(cache), min_free=0)
    for _ in range(rounds):
        names = sorted(os.listdir(data))
        assert sorted(Path(path).name for path in fs.ls(str(data), detail=False)) == names
        for name in names:
            expected = (data / name).read_bytes()
            assert fs.cat_file(str(data / name)) == expected, name
            with fs.open_input_file(str(data / name)) as file:
                assert file.read() == expected, name
    fs.cache_counters()


def harm(path: Path, kind: str, rng: random.Random) -> None:
    """Do one kind of harm to a file."""
    data = path.read_bytes()
    size = len(data)
    if kind in ("gone", "folder", "full folder", "fifo"):
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        elif kind != "gone":
            path.mkdir()
        if kind == "full folder":
            (path / "inside").write_text("precious")
        return
    if kind in ("empty", "shorter"):
        os.truncate(path, 0 if kind == "empty" else rng.randrange(max(1, size)))
        return
    page = rng.randrange(max(1, size // 4096)) * 4096
    at = page + rng.randrange(4096) if rng.random() < 0.5 else page + rng.randrange(64)
    at = min(at, max(0, size - 1))
    position, new = {
        "bit": (at, bytes([(data[at] if size else 0) ^ 1 << rng.randrange(8)])),
        "bytes": (at, rng.randbytes(16)),
        "page of noise": (page, rng.randbytes(4096)),
        "page of zeros": (page, bytes(4096)),
        "noise": (0, rng.randbytes(min(size, 1 << 20))),
        "zeros": (0, bytes(min(size, 1 << 20))),
        "longer": (size, b"x" * rng.choice((1, 4096))),
    }[kind]
    if kind != "longer":
        new = new[: max(0, size - position)]
    with open(path, "r+b") as file:  # in place: existing maps of the file see the damage
        file.seek(position)
        file.write(new)


def in_a_process(act: object, *arguments: object, **named: object) -> str:
    """Call `act` in a forked process; returns what went wrong: nothing, the name of a signal, or a traceback."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        signal.alarm(PATIENCE_SECONDS)
        forks._depth = 0  # the parent has no index open
        wrong = b""
        try:
            act(*arguments, **named)  # type: ignore[operator]
        except BaseException:  # noqa: BLE001 - reported
            wrong = traceback.format_exc().encode()
        os.write(writing, wrong[-60_000:])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        wrong = file.read().decode()
    status = os.waitpid(pid, 0)[1]
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else wrong


def _read_with_harm(case: Case, data: Path, cache: Path) -> None:
    read_everything(data, cache)
    path = cache / "millrace" / case.name
    if not path.exists():  # the counters of a process that has ended: those of this one then
        path = next(each for each in path.parent.iterdir() if each.name != "retired")
    harm(path, case.harm, random.Random(case.seed))
    read_everything(data, cache, rounds=2)


def _is_refused(wrong: str) -> bool:
    return "UnsupportedFormatError" in wrong and "remove the directory" in wrong


def run(case: Case, data: Path, image: Path, place: Path) -> str:
    """Returns what must not happen and did, if anything."""
    cache = place / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    shutil.copytree(image, cache)
    if case.open:
        first = in_a_process(_read_with_harm, case, data, cache)
    else:
        harm(cache / "millrace" / case.name, case.harm, random.Random(case.seed))
        first = in_a_process(read_everything, data, cache)
    is_format = case.name.endswith("FORMAT")
    names = [number.name for number in MAY_END_THE_PROCESS]
    ended = first in names
    mapped = Path(case.name).name in ("index.mdb", "index.mdb-lock", "signals") or "counters" in case.name
    if first and not (is_format and _is_refused(first)) and not (ended and mapped):
        return f"the first process: {first}"
    # A process may be the first to touch the damaged page, as the first one or later. The next one checks the index then,
    # which may take another one to be sure.
    deaths = int(ended)
    while following := in_a_process(read_everything, data, cache):
        if is_format and _is_refused(following):
            break
        deaths += 1
        if deaths > 2 or following not in names or not mapped:
            return f"following process, {deaths} deaths: {following}"
    return ""


def _run_many(folder: Path, count: int, seed: int) -> None:
    data, image = folder / "data", folder / "filled"
    make_data(data)
    make_cache(data, image)
    cases = [case for is_open in (False, True) for case in index_cases(count // 2, seed, is_open=is_open)]
    wrongs = 0
    for number, case in enumerate(cases, 1):
        if wrong := run(case, data, image, folder):
            wrongs += 1
            print(case, wrong, flush=True)
        if number % 100 == 0:
            print(f"{number} cases, {wrongs} wrong", file=sys.stderr, flush=True)
    print(f"{len(cases)} cases, {wrongs} wrong")


def main() -> None:
    """Arguments: where to make data, and a cache filled with it. Or both, a place to work in, and the cases as JSON: then
    prints as JSON each case in which something happened that must not, with what it was.
    """
    for name in _LOADED_LATER:
        importlib.import_module(name)
    if sys.argv[2] == "--cases":
        _run_many(Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[5]))
        return
    data, image = Path(sys.argv[1]), Path(sys.argv[2])
    if len(sys.argv) == 3:
        make_data(data)
        make_cache(data, image)
        return
    place, cases = Path(sys.argv[3]), [Case(*row) for row in json.loads(Path(sys.argv[4]).read_text())]
    wrongs = [(case, run(case, data, image, place)) for case in cases]
    print(json.dumps([(case, wrong) for case, wrong in wrongs if wrong]))


if __name__ == "__main__":
    main()
