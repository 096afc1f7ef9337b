"""Folders of hard links: what links mean for seals, damage, writes, rebuilds and ended processes."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.forked import WaitingChild, in_child
from tests.support.harms import kept_times
from tests.support.interrupts import interrupted_at
from tests.support.waiting import in_other_thread, wait_until

from millrace.cache.rebuild import rebuild
from millrace.config import Amount
from millrace.errors import StorageError
from millrace.events import Event
from millrace.store.folders import Folder, link, remove_abandoned
from millrace.store.records import PAGE_BYTES, Entry, ObjectName
from millrace.store.seals import Sealer
from millrace.store.store import Store

BLOCK = 64 << 10
DATA = random.Random(1).randbytes(3 * BLOCK - 100)
ID = bytes(16)
NAME = ObjectName("s3://", "bucket/key", "v1")


def open_store(directory: Path) -> Store:
    return Store(directory, capacity=Amount(nbytes=1 << 30), min_free=Amount(nbytes=0), rebuild=rebuild)


def fill(store: Store, blocks: range = range(3)) -> Entry:
    entry = store.index.create(ID, len(DATA), BLOCK, NAME)
    descriptor = store.open_data(entry)
    for block in blocks:
        store.write_block(entry, descriptor, block, DATA[block * BLOCK : (block + 1) * BLOCK])
    os.close(descriptor)
    return current(store)


def current(store: Store) -> Entry:
    entry = store.index.get(ID)
    assert entry is not None
    return entry


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path / "s")
    yield store
    store.close()


@pytest.fixture
def sealer(store: Store) -> Iterator[Sealer]:
    failures: list[StorageError] = []
    sealer = Sealer(store, report=failures.append)
    yield sealer
    sealer.close()
    assert failures == []


def changed(events: list[Event]) -> int:
    return sum(event.name == "cache.file.changed" for event in events)


def test_object_with_a_block_of_pages_only_is_not_sealed(
    store: Store, sealer: Sealer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state that a process leaves if it is killed between the last page and the checksum of its block."""
    monkeypatch.setattr(Store, "_join_pages", lambda *_: None)
    entry = fill(store, range(2))
    descriptor = store.open_data(entry)
    for start in range(2 * BLOCK, len(DATA), PAGE_BYTES):
        store.write_pages(entry, descriptor, start, DATA[start : start + PAGE_BYTES])
    assert current(store).complete
    os.pwrite(descriptor, b"damage", 2 * BLOCK)
    os.close(descriptor)
    assert not link(store, sealer, current(store), str(tmp_path / "file"))
    assert not current(store).sealed


def test_interrupt_at_any_moment_of_a_seal_stops_no_later_one(store: Store, sealer: Sealer) -> None:
    entry = fill(store)
    for number in itertools.count():
        store.index.unseal(entry)
        interrupt = interrupted_at(number, lambda: sealer.sealed(current(store)))
        sealed = in_other_thread(lambda: sealer.sealed(current(store)))
        assert sealed is not None
        assert sealed.sealed
        if interrupt is None:
            break
    assert number > 10


def test_interrupt_of_a_seal_is_not_raised_in_threads_that_wait_for_it(
    store: Store, sealer: Sealer, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = fill(store)
    waiting: list[Future[Entry | None]] = []

    def interrupt(*_: object, **__: object) -> None:
        waiting.append(pool.submit(sealer.sealed, entry))
        wait_until(lambda: bool(sealer._running[entry.generation]._waiting))
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        patch.setattr(store, "drop_wrong_blocks", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sealer.sealed(entry)
        assert waiting[0].result() is None
    sealed = sealer.sealed(entry)
    assert sealed is not None
    assert sealed.sealed


def test_linked_file_is_read_only_and_keeps_its_seal(
    store: Store, sealer: Sealer, tmp_path: Path, events: list[Event]
) -> None:
    entry = fill(store)
    for number in range(3):
        target = tmp_path / f"file{number}"
        assert link(store, sealer, current(store), str(target))
        assert target.read_bytes() == DATA
        assert stat.S_IMODE(target.stat().st_mode) == 0o444
        assert target.stat().st_ino == os.stat(store.path(entry)).st_ino
        seal = current(store)
        assert (seal.seal_ctime_ns, seal.seal_links) == (target.stat().st_ctime_ns, number + 2)
    assert store.is_linked(entry)
    for number in range(3):
        (tmp_path / f"file{number}").unlink()
    assert not store.is_linked(entry)
    found = os.stat(store.path(entry))
    assert sealer.check_seal(current(store)) == current(store)  # only links were removed: not verified again
    assert (current(store).seal_ctime_ns, current(store).seal_links) == (found.st_ctime_ns, 1)
    assert changed(events) == 0


@pytest.mark.parametrize("linked", [True, False])
def test_file_changed_with_its_times_set_back_loses_its_seal(
    store: Store, sealer: Sealer, tmp_path: Path, events: list[Event], linked: bool
) -> None:
    entry = sealer.sealed(fill(store))
    assert entry is not None
    if linked:
        assert link(store, sealer, entry, str(tmp_path / "file"))
    path = Path(store.path(entry))
    with kept_times(path), open(path, "r+b") as file:
        file.write(b"X")
    assert not sealer.check_seal(current(store)).sealed
    assert changed(events) == 1


def test_link_of_removed_object_is_refused_without_a_trace(store: Store, sealer: Sealer, tmp_path: Path) -> None:
    entry = fill(store)
    store.remove(ID)
    assert not link(store, sealer, entry, str(tmp_path / "file"))
    assert not (tmp_path / "file").exists()


def test_link_of_damaged_file_is_refused_until_its_block_is_fetched(
    store: Store, sealer: Sealer, tmp_path: Path
) -> None:
    entry = fill(store)
    with open(store.path(entry), "r+b") as file:
        file.seek(BLOCK + 5)
        file.write(b"damage")
    assert not link(store, sealer, entry, str(tmp_path / "file"))
    assert store.missing(entry, range(3)) == [1]
    assert not (tmp_path / "file").exists()
    assert link(store, sealer, fill(store, range(1, 2)), str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == DATA


def test_damage_of_linked_file_removes_its_object_and_never_writes_it(
    store: Store, sealer: Sealer, tmp_path: Path
) -> None:
    entry, target = fill(store), tmp_path / "file"
    assert link(store, sealer, entry, str(target))
    with open(target, "r+b") as file:
        file.write(b"damage")
    damaged = target.read_bytes()
    descriptor = store.open_data(entry)
    assert store.read_block(entry, descriptor, 0) is None
    assert store.index.get(ID) is None
    assert store.write_block(entry, descriptor, 0, DATA[:BLOCK]) is None
    os.close(descriptor)
    assert target.read_bytes() == damaged
    again = fill(store)
    assert again.generation > entry.generation
    assert Path(store.path(again)).read_bytes() == DATA


def test_lost_record_of_linked_file_is_restored_without_a_write(store: Store, sealer: Sealer, tmp_path: Path) -> None:
    """The index may lose the record of a block (`transactions.py`); its bytes are still in the file."""
    entry, target = fill(store), tmp_path / "file"
    assert link(store, sealer, entry, str(target))
    before = target.stat()
    assert store.index.drop_block(entry, 1)
    assert fill(store, range(1, 2)).complete
    assert (target.stat().st_mtime_ns, target.stat().st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)


def test_damaged_file_that_was_linked_is_replaced(store: Store, sealer: Sealer, tmp_path: Path) -> None:
    entry, target = fill(store), tmp_path / "file"
    assert link(store, sealer, entry, str(target))
    kept = target.open("rb")
    target.unlink()
    with open(store.path(entry), "r+b") as file:
        file.write(b"damage")
    assert not link(store, sealer, current(store), str(target))
    assert store.index.get(ID) is None
    again = fill(store)
    assert Path(store.path(again)).read_bytes() == DATA
    assert kept.read(6) == b"damage"
    kept.close()


@pytest.mark.skipif(os.getuid() != 0, reason="root can take on another user")
def test_other_user_than_root_reads_read_only_files() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # others are below directories of this user
        tmp_path = Path(directory)
        tmp_path.chmod(0o777)
        _read_as_another_user(tmp_path)


def _read_as_another_user(tmp_path: Path) -> None:
    def use() -> str:
        os.setgid(65534)
        os.setuid(65534)
        store = open_store(tmp_path / "other")
        sealer = Sealer(store, report=lambda error: None)
        entry, target = fill(store), tmp_path / "file"
        assert link(store, sealer, entry, str(target))
        with pytest.raises(PermissionError):
            target.open("r+b")
        descriptor = store.open_data(entry)
        assert store.read_block(entry, descriptor, 2) == DATA[2 * BLOCK :]
        assert store.write_block(entry, descriptor, 0, DATA[:BLOCK]) is not None
        os.close(descriptor)
        assert Path(store.path(entry)).read_bytes() == DATA
        sealer.close()
        store.close()
        return "done"

    assert in_child(use) == "done"


def test_linked_file_survives_removal_eviction_and_rebuild(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    sealer = Sealer(store, report=lambda error: None)
    assert link(store, sealer, fill(store), str(tmp_path / "file"))
    sealer.close()
    store.close()
    (tmp_path / "s" / "index" / "index.mdb").unlink()
    store = open_store(tmp_path / "s")
    assert store.is_linked(current(store))
    store.remove(ID)
    store.close()
    assert (tmp_path / "file").read_bytes() == DATA


# --- whose folder it is ---------------------------------------------------------------------------------

HOLDER = """
import os, sys, pathlib
from millrace.store.folders import Folder
folder = Folder(pathlib.Path(sys.argv[1]))
(folder.path / "sub").mkdir()
(folder.path / "sub" / "file").write_text("x")
if len(sys.argv) > 2 and not os.fork():
    os.close(1)
    os.read(0, 1)  # until the test closes it
    os._exit(0)
print(folder.path, flush=True)
signal = __import__("signal").pause()
"""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], Path]]]:
    started: list[subprocess.Popen[str]] = []

    def hold(*more: str) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    yield hold
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def test_folder_of_killed_process_is_removed_and_no_other(
    hold: Callable[..., tuple[subprocess.Popen[str], Path]], tmp_path: Path
) -> None:
    dead, left = hold()
    alive, kept = hold()
    assert list(remove_abandoned(tmp_path)) == []
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    alive.send_signal(signal.SIGSTOP)
    assert list(remove_abandoned(tmp_path)) == [str(left)]
    assert [path.name for path in (tmp_path / "folders").iterdir()] == [kept.name]


def test_folder_stays_while_a_forked_child_of_its_process_lives(
    hold: Callable[..., tuple[subprocess.Popen[str], Path]], tmp_path: Path
) -> None:
    process, path = hold("fork")
    process.kill()
    process.wait()
    assert list(remove_abandoned(tmp_path)) == []
    assert process.stdin is not None
    process.stdin.close()
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits for the end of the child
    os.close(descriptor)
    assert list(remove_abandoned(tmp_path)) == [str(path)]


def test_child_that_was_forked_during_the_removal_holds_no_lock(
    hold: Callable[..., tuple[subprocess.Popen[str], Path]], tmp_path: Path
) -> None:
    process, path = hold()
    process.kill()
    process.wait()
    removal = remove_abandoned(tmp_path)
    assert next(removal) == str(path)
    child = WaitingChild()
    assert list(removal) == []
    try:
        in_other_thread(lambda: Folder(tmp_path).remove())
    finally:
        child.end()


@pytest.mark.skipif(os.getuid() != 0, reason="root can take on another user")
def test_folder_that_cannot_be_removed_does_not_hold_up_the_others() -> None:
    def use() -> str:
        os.setgid(65534)
        os.setuid(65534)
        for name in "abc":
            (root / name / "sub").mkdir(parents=True)
        (root / "b" / "sub" / "file").write_text("x")
        (root / "b" / "sub").chmod(0o500)
        removed = sorted(remove_abandoned(root.parent))
        (root / "b" / "sub").chmod(0o700)
        return ",".join(Path(path).name for path in removed)

    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # others are below directories of this user
        Path(directory).chmod(0o777)
        root = Path(directory) / "folders"
        assert in_child(use) == "a,c"


def test_folder_is_private_and_removed_with_its_files(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    (folder.path / "file").write_text("x")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert list(remove_abandoned(tmp_path)) == []  # also not by the process that has it
    folder.remove()
    assert list((tmp_path / "folders").iterdir()) == []


def test_anything_else_among_the_folders_stays(tmp_path: Path) -> None:
    assert list(remove_abandoned(tmp_path)) == []
    (tmp_path / "folders").write_text("not a directory")
    assert list(remove_abandoned(tmp_path)) == []
    (tmp_path / "folders").unlink()
    (tmp_path / "folders").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "folders" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "folders" / "file").write_text("x")
    assert list(remove_abandoned(tmp_path)) == []
    assert (tmp_path / "elsewhere").is_dir()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of an iterator over a directory
def test_interrupt_at_any_moment_of_a_folder_leaves_none(tmp_path: Path) -> None:
    root, folders = tmp_path / "folders", list[Folder]()
    for number in itertools.count():
        interrupt = interrupted_at(number, lambda: folders.append(Folder(tmp_path)))
        assert len(os.listdir(root) if root.exists() else []) == len(folders)
        if interrupt is None:
            break
    folder = folders.pop()
    for other in folders:  # interrupted when it was complete
        other.remove()
    (folder.path / "file").touch()
    for number in itertools.count():
        with suppress(StorageError):  # after an interrupt `shutil.rmtree` may close a descriptor twice
            if interrupted_at(number, folder.remove) is None:
                break
        folder.remove()
        assert os.listdir(root) == []
        folder = Folder(tmp_path)
        (folder.path / "file").touch()
    assert number > 10
    assert os.listdir(root) == []
