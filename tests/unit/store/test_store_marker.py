"""The marker of a store's format: flushed when it is written, and recognised when a crash has left only a part of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.cache.rebuild import rebuild
from millrace.config import Amount
from millrace.errors import ConfigurationError, UnsupportedFormatError
from millrace.events import Event
from millrace.runtime.failures import LostDataError
from millrace.store.records import ObjectName
from millrace.store.setup import boot_id, check_directory
from millrace.store.store import Store

NAME = b"0123456789abcdef"
DATA = b"abc"
WHOLE = f"millrace-store 4\n{boot_id()}\n".encode()


def open_store(directory: Path) -> Store:
    return Store(directory, capacity=Amount(nbytes=1 << 40), min_free=Amount(nbytes=0), rebuild=rebuild)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An unused store with one object."""
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
    "all of the format": b"millrace-store 4",
    "one line": b"millrace-store 4\n",
    "half of the boot": WHOLE[:30],
    "half of the boot, then zeros": WHOLE[:30].ljust(len(WHOLE), b"\0"),
    "all but the last newline": WHOLE[:-1],
}


@pytest.mark.parametrize("left", LEFT_OF_IT)
def test_torn_marker_is_treated_as_missing(directory: Path, left: str, events: list[Event]) -> None:
    """The index is rebuilt from the files, since it was not flushed either; and the marker is complete again."""
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
    [b"millrace-store 5\n", b"millrace-store 44\nboot\n", b"else", b"\0millrace-store 4\n", b"m\0x", b"\xff\n"],
)
def test_marker_of_another_program_is_refused_without_changes(directory: Path, foreign: bytes) -> None:
    (directory / "FORMAT").write_bytes(foreign)
    before = {path: path.read_bytes() for path in directory.glob("[!c]*/**/*") if path.is_file()}
    for use in (check_directory, open_store):
        with pytest.raises(UnsupportedFormatError):
            use(directory)
    assert (directory / "FORMAT").read_bytes() == foreign
    assert {path: path.read_bytes() for path in directory.glob("[!c]*/**/*") if path.is_file()} == before


def test_empty_marker_among_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    (tmp_path / "s" / "FORMAT").write_bytes(b"")
    (tmp_path / "s" / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigurationError, match=r"thesis\.tex"):
        open_store(tmp_path / "s")
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["FORMAT", "setup.lock", "thesis.tex"]


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The flushed and renamed files, in this order. (A real crash in `tests/faults` shows the purpose.)"""
    done: list[str] = []

    def note(real: Callable[..., None], describe: Callable[..., str]) -> Callable[..., None]:
        def call(*arguments: int | str | Path) -> None:
            done.append(describe(*arguments))
            real(*arguments)

        return call

    monkeypatch.setattr(os, "fsync", note(os.fsync, lambda file: Path(os.readlink(f"/proc/self/fd/{file}")).name))
    monkeypatch.setattr(os, "replace", note(os.replace, lambda _, to: f"-> {Path(to).name}"))
    return done


def test_marker_is_flushed_before_its_rename(tmp_path: Path, flushed: list[str]) -> None:
    open_store(tmp_path / "s").close()
    assert flushed == ["FORMAT.new", "-> FORMAT", "s"]
    open_store(tmp_path / "s").close()
    assert len(flushed) == 3  # once a boot


def test_store_without_directory_flush_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems, of which there is none here."""
    real = os.fsync

    def refuse(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(22, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    open_store(tmp_path / "s").close()
    assert (tmp_path / "s" / "FORMAT").read_bytes() == WHOLE
