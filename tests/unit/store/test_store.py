import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.descriptors import open_below

from millrace.cache.counters import Counters, totals
from millrace.cache.rebuild import rebuild
from millrace.config import Amount
from millrace.errors import ConfigurationError, StorageError, UnsupportedFormatError
from millrace.events import Event, add_hook
from millrace.runtime.failures import LostDataError
from millrace.store.records import SIDECAR_SUFFIX, ObjectName
from millrace.store.store import Store

BLOCK = 64 << 10
NAME = bytes(range(16))
ORIGIN_NAME = ObjectName("s3://", "bucket/key", "v1")


def make_store(directory: Path, capacity_bytes: int = 1 << 30) -> Store:
    return Store(directory, capacity=Amount(nbytes=capacity_bytes), min_free=Amount(nbytes=0), rebuild=rebuild)


def write(store: Store, name: bytes, data: bytes) -> None:
    entry = store.index.create(name, len(data), BLOCK, ORIGIN_NAME)
    descriptor = store.open_data(entry)
    for block in range(-(-len(data) // BLOCK)):
        assert store.write_block(entry, descriptor, block, data[block * BLOCK : (block + 1) * BLOCK])
    os.close(descriptor)


def test_reopened_store_has_its_blocks(tmp_path: Path) -> None:
    data = os.urandom(BLOCK * 3 + 17)
    store = make_store(tmp_path / "s")
    write(store, NAME, data)
    store.close()

    store = make_store(tmp_path / "s")
    entry = store.index.get(NAME)
    assert entry is not None
    assert entry.complete
    assert store.index.used_bytes() == len(data)
    assert Path(store.path(entry)).read_bytes() == data
    store.close()


def test_object_is_complete_only_with_its_last_block(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s")
    entry = store.index.create(NAME, BLOCK + 1, BLOCK, ORIGIN_NAME)
    descriptor = store.open_data(entry)
    assert os.fstat(descriptor).st_size == BLOCK + 1  # the size proves nothing
    store.write_block(entry, descriptor, 1, b"x")
    store.write_block(entry, descriptor, 1, b"x")  # twice is the same as once
    assert not store.index.get(NAME).complete  # type: ignore[union-attr]
    assert store.missing(entry, [0, 1]) == [0]
    store.write_block(entry, descriptor, 0, bytes(BLOCK))
    assert store.index.get(NAME).complete  # type: ignore[union-attr]
    assert store.index.used_bytes() == BLOCK + 1
    os.close(descriptor)
    store.close()


def test_empty_object_is_complete(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s")
    assert store.index.create(NAME, 0, BLOCK, ORIGIN_NAME).complete
    store.close()


def test_block_whose_checksum_cannot_be_written_is_not_recorded(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s")
    entry = store.index.create(NAME, BLOCK, BLOCK, ORIGIN_NAME)
    descriptor = store.open_data(entry)
    sidecar = Path(store.path(entry) + SIDECAR_SUFFIX)
    sidecar.unlink()
    os.mkfifo(sidecar)  # it can be opened while it has a reader, but a write at an offset fails
    reader = os.open(sidecar, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(StorageError, match=f"{sidecar}: Illegal seek"):
        store.write_block(entry, descriptor, 0, bytes(BLOCK))
    assert store.missing(entry, [0]) == [0]
    os.close(reader)
    os.close(descriptor)
    store.close()


def test_corrupt_block_is_removed_and_reported(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s")
    write(store, NAME, bytes(BLOCK * 2))
    entry = store.index.get(NAME)
    assert entry is not None
    descriptor = store.open_data(entry)
    os.pwrite(descriptor, b"!", BLOCK + 5)
    events: list[Event] = []
    remove = add_hook(events.append)
    assert store.read_block(entry, descriptor, 0) == bytes(BLOCK)
    assert store.read_block(entry, descriptor, 1) is None
    remove()
    assert [event.name for event in events] == ["cache.block.corrupt"]
    assert store.missing(entry, [0, 1]) == [1]
    assert store.index.used_bytes() == BLOCK
    os.close(descriptor)
    store.close()


def test_removal_keeps_bytes_of_open_reader(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s")
    write(store, NAME, b"a" * BLOCK)
    entry = store.index.get(NAME)
    assert entry is not None
    descriptor = store.open_data(entry)
    store.remove(NAME)
    assert store.index.get(NAME) is None
    assert store.index.used_bytes() == 0
    assert not Path(store.path(entry)).exists()
    assert os.pread(descriptor, 3, 0) == b"aaa"
    # A fetch that began before the removal must not bring the object back.
    assert not store.write_block(entry, descriptor, 0, b"a" * BLOCK)
    assert store.index.get(NAME) is None
    again = store.index.create(NAME, BLOCK, BLOCK, ORIGIN_NAME)
    assert store.path(again) != store.path(entry)
    os.close(descriptor)
    store.close()


def test_store_directory_is_private(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s")
    write(store, NAME, b"abc")
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    store.close()


def test_foreign_and_newer_directories_are_refused_untouched(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigurationError, match=r"thesis\.tex"):
        make_store(foreign)
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "FORMAT").write_text("millrace-store 99\nboot\n")
    with pytest.raises(UnsupportedFormatError, match="millrace-store 99"):
        make_store(newer)
    assert (foreign / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("number", [1, 2, 3])
def test_store_of_an_earlier_format_is_emptied_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    old = tmp_path / "s" / "objects" / "ab" / "abcd-1"
    old.parent.mkdir(parents=True)
    (tmp_path / "s").chmod(0o700)
    old.write_text("of another format")
    (tmp_path / "s" / "index").mkdir()
    (tmp_path / "s" / "index" / "index.mdb").write_text("of another format")
    (tmp_path / "s" / "FORMAT").write_text(f"millrace-store {number}\nboot\n")
    events: list[Event] = []
    remove = add_hook(events.append)
    store = make_store(tmp_path / "s")
    remove()
    assert [event.name for event in events] == ["cache.store.discarded"]
    assert f"format {number}" in caplog.text
    assert not old.exists()
    write(store, NAME, b"works")
    store.close()
    assert (tmp_path / "s" / "FORMAT").read_text().startswith("millrace-store 4\n")


@pytest.mark.parametrize("intruder", ["folder", "full folder", "symlink", "fifo", "socket"])
def test_data_file_replaced_by_something_else_raises_lost_data(tmp_path: Path, intruder: str) -> None:
    store = make_store(tmp_path / "s")
    write(store, NAME, b"abc")
    entry = store.index.get(NAME)
    assert entry is not None
    path = Path(store.path(entry))
    path.unlink()
    match intruder:
        case "folder" | "full folder":
            path.mkdir()
            if intruder == "full folder":
                (path / "inside").write_text("")
        case "symlink":
            path.symlink_to(tmp_path / "s" / "FORMAT")
        case "fifo":
            os.mkfifo(path)
        case "socket":
            os.mknod(path, stat.S_IFSOCK | 0o600)
    with pytest.raises(LostDataError):
        store.open_data(entry)
    store.remove(NAME)
    write(store, NAME, b"abc")
    assert os.path.lexists(path) == (intruder == "full folder")
    assert (tmp_path / "s" / "FORMAT").read_text().startswith("millrace-store 4\n")
    store.close()


def test_directory_that_cannot_be_created_raises_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Not a directory"):
        make_store(tmp_path / "file" / "s")


def test_store_beyond_capacity_has_no_space(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", capacity_bytes=BLOCK * 2)
    assert store.space.has_room(BLOCK * 2)
    write(store, NAME, bytes(BLOCK))
    assert store.space.has_room(BLOCK)
    assert not store.space.has_room(BLOCK + 1)
    store.space.set_limits(capacity=Amount(nbytes=1 << 40), min_free=Amount(share=1.0))
    assert not store.space.has_room(1)
    store.close()


def test_counters_outlive_their_process_and_are_folded(tmp_path: Path) -> None:
    first = Counters(tmp_path)
    first.add("origin_bytes", 5)
    pid = os.fork()
    if pid == 0:
        child = Counters(tmp_path)
        child.add("origin_bytes", 7)
        os._exit(0)
    os.waitpid(pid, 0)
    assert first.measures().counters["origin_bytes"] == 12
    assert len(list(tmp_path.iterdir())) == 2
    second = Counters(tmp_path)
    second.add("origin_bytes", 1)
    names = sorted(path.name.split("-")[0] for path in tmp_path.iterdir())
    assert names == [str(os.getpid()), str(os.getpid()), "retired"]
    assert totals(tmp_path)["origin_bytes"] == 13
    first.close()
    second.close()
    assert totals(tmp_path / "nowhere")["origin_bytes"] == 0


def test_removed_object_gets_no_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its space would stay in use for the lifetime of the index, because no record names it."""
    store = make_store(tmp_path / "s")
    entry = store.index.create(NAME, BLOCK, BLOCK, ORIGIN_NAME)
    real = os.makedirs

    def removed_now(*arguments: object, **options: object) -> None:
        store.remove(NAME)  # as another process would, between the look at the index and the making of the file
        real(*arguments, **options)  # type: ignore[arg-type]

    before = open_below(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "makedirs", removed_now)
        with pytest.raises(LostDataError, match="removed"):
            store.open_data(entry)
    assert sorted(open_below(tmp_path)) == sorted(before)
    assert not os.path.exists(store.path(entry))
    store.close()


def test_reservation_after_lower_limit_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", capacity=Amount(nbytes=1 << 40), min_free=Amount(nbytes=0), rebuild=rebuild)
    assert store.space.reserve(1000)
    assert store.space.reserve(1000)
    store.space.set_limits(capacity=Amount(nbytes=2500), min_free=Amount(nbytes=0))
    assert not store.space.reserve(1000)
    store.space.set_limits(capacity=Amount(nbytes=1 << 40), min_free=Amount(share=1.0))
    assert not store.space.reserve(1000)
    store.close()


def test_reservation_while_a_written_block_counts_twice_waits_for_its_release(tmp_path: Path) -> None:
    """It was refused after 16 ms, so a load of as much as the capacity left objects out on a busy machine."""
    store = make_store(tmp_path / "s", capacity_bytes=2 * BLOCK)
    assert store.space.reserve(BLOCK)
    write(store, NAME, os.urandom(BLOCK))
    assert not store.space.reserve(BLOCK, wait=False)
    with ThreadPoolExecutor() as pool:
        granted = pool.submit(store.space.reserve, BLOCK)
        time.sleep(0.1)
        store.space.release(BLOCK)
        assert granted.result(10)
    assert not store.space.reserve(1, wait=False)
    store.close()
