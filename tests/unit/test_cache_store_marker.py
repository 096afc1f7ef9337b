"""The marker of a store's format: flushed when it is written, and understood when a crash has left only a part of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.cache.failures import LostDataError
from millrace.cache.records import ObjectName
from millrace.cache.setup import boot_id, check_directory
from millrace.cache.store import Store
from millrace.config import Amount
from millrace.errors import ConfigurationError, UnsupportedFormatError
from millrace.events import Event

NAME = b"0123456789abcdef"
DATA = b"abc"
WHOLE = f"millrace-store 2\n{boot_id()}\n".encode()


def open_store(directory: Path) -> Store:
    return Store(directory, capacity=Amount(nbytes=1 << 40), min_free=Amount(nbytes=0))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store with one object, and nobody who uses it."""
    store = open_store(tmp_path / "s")
    entry = store.index.create(NAME, len(DATA), 4096, ObjectName("o", "k", "v"))
    descriptor = store.open_data(entry)
    assert store.write_block(entry, descriptor, 0, DATA)
    os.close(descriptor)
    store.close()
    return tmp_path / "s"


def what_is_read(store: Store) -> bytes | None:
    entry = store.index.get(NAME)
    if entry is None:
        return None
    try:
        descriptor = store.open_data(entry)
    except LostDataError:
        return None
    try:
        return store.read_block(entry, descriptor, 0)
    finally:
        os.close(descriptor)


LEFT_OF_IT = {
    "nothing": b"",
    "zeros": bytes(len(WHOLE)),
    "a block of zeros": bytes(4096),
    "the name": b"millrace-st",
    "the name, then zeros": b"millrace-st".ljust(len(WHOLE), b"\0"),
    "all of the format": b"millrace-store 2",
    "one line": b"millrace-store 2\n",
    "half of the boot": WHOLE[:30],
    "half of the boot, then zeros": WHOLE[:30].ljust(len(WHOLE), b"\0"),
    "all but the last newline": WHOLE[:-1],
}


@pytest.mark.parametrize("left", LEFT_OF_IT)
def test_what_a_crash_leaves_of_the_marker_is_no_marker(directory: Path, left: str, events: list[Event]) -> None:
    """The index is built anew from the files, for it was not flushed either; and the marker is whole again."""
    (directory / "FORMAT").write_bytes(LEFT_OF_IT[left])
    check_directory(directory)
    store = open_store(directory)
    assert {event.name for event in events} == {"cache.store.discarded", "cache.store.rebuilt"}
    assert what_is_read(store) == DATA
    store.close()
    assert (directory / "FORMAT").read_bytes() == WHOLE
    events.clear()
    open_store(directory).close()
    assert events == []


@pytest.mark.parametrize(
    "foreign",
    [b"millrace-store 3\n", b"millrace-store 22\nboot\n", b"else", b"\0millrace-store 2\n", b"m\0x", b"\xff\n"],
)
def test_a_marker_of_others_is_refused_and_nothing_changed(directory: Path, foreign: bytes) -> None:
    (directory / "FORMAT").write_bytes(foreign)
    before = {path: path.read_bytes() for path in directory.glob("[!c]*/**/*") if path.is_file()}
    for use in (check_directory, open_store):
        with pytest.raises(UnsupportedFormatError):
            use(directory)
    assert (directory / "FORMAT").read_bytes() == foreign
    assert {path: path.read_bytes() for path in directory.glob("[!c]*/**/*") if path.is_file()} == before


def test_an_empty_marker_among_files_of_others_makes_no_store(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    (tmp_path / "s" / "FORMAT").write_bytes(b"")
    (tmp_path / "s" / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigurationError, match=r"thesis\.tex"):
        open_store(tmp_path / "s")
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["FORMAT", "setup.lock", "thesis.tex"]


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was flushed and renamed, by name, in this order. (What it is for is shown by a real crash in `tests/faults`.)"""
    done: list[str] = []

    def note(real: Callable[..., None], says: Callable[..., str]) -> Callable[..., None]:
        def call(*arguments: int | str | Path) -> None:
            done.append(says(*arguments))
            real(*arguments)

        return call

    monkeypatch.setattr(os, "fsync", note(os.fsync, lambda file: Path(os.readlink(f"/proc/self/fd/{file}")).name))
    monkeypatch.setattr(os, "replace", note(os.replace, lambda _, to: f"-> {Path(to).name}"))
    return done


def test_the_marker_is_flushed_before_it_has_its_name(tmp_path: Path, flushed: list[str]) -> None:
    open_store(tmp_path / "s").close()
    assert flushed == ["FORMAT.new", "-> FORMAT", "s"]
    open_store(tmp_path / "s").close()
    assert len(flushed) == 3  # once a boot


def test_where_folders_cannot_be_flushed_the_store_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on some network file systems, of which there is none here."""
    real = os.fsync

    def refuse(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(22, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    open_store(tmp_path / "s").close()
    assert (tmp_path / "s" / "FORMAT").read_bytes() == WHOLE
