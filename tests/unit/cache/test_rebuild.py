import itertools
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.cache import rebuild as rebuilding
from millrace.config import Amount
from millrace.events import Event
from millrace.store import records
from millrace.store.index import Index
from millrace.store.records import Entry, ObjectName
from millrace.store.store import Store

BLOCK = 8 << 10


def open_store(directory: Path) -> Store:
    return Store(directory, capacity=Amount(nbytes=1 << 30), min_free=Amount(nbytes=0), rebuild=rebuilding.rebuild)


def name_of(number: int) -> tuple[bytes, ObjectName]:
    return bytes([number] * 16), ObjectName("s3://", f"bucket/{number}", "v1")


def data_of(number: int, blocks: int = 3) -> bytes:
    return random.Random(number).randbytes(blocks * BLOCK - 100 * number)


def write(store: Store, number: int, blocks: range = range(3), total: int = 3) -> Entry:
    object_id, name = name_of(number)
    data = data_of(number, total)
    entry = store.index.create(object_id, len(data), BLOCK, name)
    descriptor = store.open_data(entry)
    for block in blocks:
        assert store.write_block(entry, descriptor, block, data[block * BLOCK : (block + 1) * BLOCK])
    os.close(descriptor)
    now = store.index.get(object_id)
    assert now is not None
    return now


def reboot(directory: Path) -> None:
    (directory / "FORMAT").write_text("millrace-store 4\nanother-boot\n")


def lose(directory: Path) -> None:
    (directory / "index" / "index.mdb").unlink()


def damage(directory: Path) -> None:
    (directory / "index" / "index.mdb").write_bytes(os.urandom(100_000))


def read(store: Store, entry: Entry, block: int) -> bytes | None:
    descriptor = store.open_data(entry)
    try:
        return store.read_block(entry, descriptor, block)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("loss", [reboot, lose, damage])
def test_rebuild_restores_all_objects_from_the_files(
    tmp_path: Path, loss: Callable[[Path], None], events: list[Event]
) -> None:
    store = open_store(tmp_path)
    before = [write(store, 1), write(store, 2, range(1, 3)), write(store, 3, range(1))]
    store.index.create(*_args(4))  # without a block there is nothing to bring back
    used, last = store.index.used_bytes(), store.index.new_generation()
    store.close()
    loss(tmp_path)

    store = open_store(tmp_path)
    assert list(store.index.entries()) == before
    assert store.index.used_bytes() == used
    assert [read(store, before[0], block) for block in range(3)] == [
        data_of(1)[start : start + BLOCK] for start in range(0, 3 * BLOCK, BLOCK)
    ]
    assert store.missing(before[1], range(3)) == [0]
    assert store.index.new_generation() > last + 1000
    assert [event.name for event in events if event.name.startswith("cache.store")][-1] == "cache.store.rebuilt"
    store.close()


def _args(number: int) -> tuple[bytes, int, int, ObjectName]:
    object_id, name = name_of(number)
    return object_id, len(data_of(number)), BLOCK, name


def test_rebuild_seals_no_file(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.index.seal(write(store, 1), os.stat(tmp_path))
    store.close()
    reboot(tmp_path)
    store = open_store(tmp_path)
    assert not next(store.index.entries()).sealed
    store.close()


def test_damaged_data_file_is_removed(tmp_path: Path, events: list[Event]) -> None:
    store = open_store(tmp_path)
    kept = write(store, 1)
    paths = {number: Path(store.path(write(store, number))) for number in range(2, 9)}
    store.close()
    os.truncate(paths[2], paths[2].stat().st_size - 1)
    os.truncate(paths[3], 0)
    with open(f"{paths[4]}.idx", "r+b") as file:  # zeros of the right size
        size = os.fstat(file.fileno()).st_size
        os.truncate(file.fileno(), 0)
        os.truncate(file.fileno(), size)
    paths[5].rename(paths[5].with_name(paths[5].name[:-1]))
    paths[6].unlink()
    paths[6].symlink_to("/etc/passwd")
    paths[7].unlink()
    paths[7].mkdir()
    (paths[7] / "inside").write_text("")
    paths[8].unlink()
    os.mkfifo(paths[8])
    (tmp_path / "objects" / "stray").write_text("")
    (tmp_path / "objects" / "folder").mkdir()
    reboot(tmp_path)

    store = open_store(tmp_path)
    assert list(store.index.entries()) == [kept]
    left = {path for path in (tmp_path / "objects").rglob("*") if not path.is_dir()}
    assert left == {Path(store.path(kept)), Path(f"{store.path(kept)}.idx")}
    assert len(list((tmp_path / "objects").glob("*/*"))) == 2
    assert Path("/etc/passwd").exists()
    assert events[-1].detail == "1 objects found in files, 9 files dropped"
    store.close()


@pytest.mark.parametrize("batch", [1, 2, 1000])
def test_rebuild_keeps_the_younger_of_two_generations(
    tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuilding, "_BATCH_OBJECTS", batch)
    store = open_store(tmp_path)
    for number in (1, 2):
        old = write(store, number)
        saved = tmp_path / "saved"
        for suffix in ("", ".idx"):
            shutil.copy(store.path(old) + suffix, f"{saved}{suffix}")
        store.remove(old.object_id)
        write(store, number, range(2))
        for suffix in ("", ".idx"):
            os.rename(f"{saved}{suffix}", store.path(old) + suffix)
    store.close()
    reboot(tmp_path)
    store = open_store(tmp_path)
    entries = list(store.index.entries())
    assert [entry.cached_bytes for entry in entries] == [2 * BLOCK, 2 * BLOCK]
    assert store.index.used_bytes() == 4 * BLOCK
    files = [str(path) for path in (tmp_path / "objects").glob("*/*") if path.is_file()]
    assert sorted(files) == sorted(store.path(entry) + suffix for entry in entries for suffix in ("", ".idx"))
    store.close()


def test_unfinished_rebuild_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    entries = [write(store, number) for number in range(1, 5)]
    store.close()
    reboot(tmp_path)
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(rebuilding, "_BATCH_OBJECTS", 2)
        entered = rebuilding._enter
        monkeypatch.setattr(rebuilding, "_enter", lambda *args: (entered(*args), os._exit(9)))
        open_store(tmp_path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    store = open_store(tmp_path)
    assert list(store.index.entries()) == entries
    store.close()


def test_rebuild_restores_names_of_any_length(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    name = ObjectName("file", "long/" * 2000, "v")
    entry = store.index.create(bytes(16), BLOCK, BLOCK, name)
    descriptor = store.open_data(entry)
    store.write_block(entry, descriptor, 0, bytes(BLOCK))
    os.close(descriptor)
    store.close()
    reboot(tmp_path)
    store = open_store(tmp_path)
    assert next(store.index.entries()).name == name
    store.close()


def test_long_rebuild_reports_its_progress(tmp_path: Path, events: list[Event]) -> None:
    store = open_store(tmp_path)
    for number in range(1, 4):
        write(store, number)
    (tmp_path / "new").mkdir()
    index = Index(tmp_path / "new")
    seconds = itertools.count(0, 6)
    found = rebuilding.rebuild(tmp_path, index, clock=lambda: next(seconds))
    assert [event.name for event in events] == ["cache.store.rebuilding"] * 3 + ["cache.store.rebuilt"]
    assert (found.objects, found.dropped) == (3, 0)
    rebuilding.rebuild(tmp_path, index)
    assert list(index.entries()) == list(store.index.entries())
    index.close()
    store.close()


def test_blocks_with_torn_sidecar_are_fetched_again(tmp_path: Path) -> None:
    """The sidecar is torn at every byte, in turn."""
    store = open_store(tmp_path)
    entry = write(store, 1)
    path = Path(store.path(entry))
    store.close()
    sidecar = path.with_name(f"{path.name}.idx")
    whole = sidecar.read_bytes()
    start, stop = records.block_offset(entry, 0), records.block_offset(entry, 3)
    assert len(whole) == stop
    for position in range(start, stop + 1):
        for torn in (
            whole[:position],
            whole[:position] + bytes(stop - position),
            whole[:start] + bytes(position - start) + whole[position:],
        ):
            sidecar.write_bytes(torn)
            read_back = rebuilding._read_file(path)
            intact = [
                b
                for b in range(3)
                if torn[start + 16 * b : start + 16 * b + 16] == whole[start + 16 * b : start + 16 * b + 16]
            ]
            assert ([] if read_back is None else [block for block, _ in read_back[1]]) == intact
    for position in range(48, start):
        sidecar.write_bytes(whole[:position] + bytes(max(0, start - 8 - position)))
        assert rebuilding._read_file(path) is None


def test_data_file_is_the_object_and_nothing_else(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert Path(store.path(write(store, 1))).read_bytes() == data_of(1)
    store.close()


@pytest.mark.parametrize("harm", ["missing", "empty", "folder", "fifo", "link"])
def test_object_without_its_sidecar_is_read_until_the_rebuild(tmp_path: Path, harm: str) -> None:
    store = open_store(tmp_path)
    kept, entry = write(store, 1), write(store, 2, range(2))
    path = Path(store.path(entry))
    sidecar = path.with_name(f"{path.name}.idx")
    sidecar.unlink()
    if harm == "empty":
        sidecar.write_bytes(b"")
    elif harm == "folder":
        sidecar.mkdir()
    elif harm == "fifo":
        os.mkfifo(sidecar)
    elif harm == "link":
        sidecar.symlink_to("/etc/passwd")
    write(store, 2, range(2, 3))
    assert [read(store, entry, block) for block in (0, 2)] == [data_of(2)[:BLOCK], data_of(2)[2 * BLOCK :]]
    store.close()
    reboot(tmp_path)
    store = open_store(tmp_path)
    assert list(store.index.entries()) == [kept]
    assert not os.path.lexists(path)
    assert not os.path.lexists(sidecar)
    store.close()
