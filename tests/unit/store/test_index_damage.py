"""Records of the index that do not verify, damage to LMDB's structure, and processes that die in a transaction."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.cache.rebuild import rebuild
from millrace.events import Event
from millrace.store.environment import DAMAGED_NAME, DamagedIndexError
from millrace.store.index import Index
from millrace.store.records import ObjectName, block_key, generation_key
from millrace.store.setup import is_intact, open_directory
from millrace.store.signals import Signals, died_inside
from millrace.store.transactions import IndexGuard

NAME = ObjectName("file://", "a key", "a version")
ID, OTHER = bytes(range(16)), bytes(range(16, 32))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def index(directory: Path) -> Iterator[Index]:
    index = open_directory(directory, rebuild)
    yield index
    index.close()


def fill(index: Index, object_id: bytes = ID) -> Any:
    entry = index.create(object_id, 250, 100, NAME)
    for block in range(3):
        entry = index.add_block(entry, block, 1000 + block)
        assert entry is not None
    return entry


def overwrite(index: Index, table: bytes, key: bytes, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a record as nothing in Millrace does."""
    with index._env.begin(write=True) as txn:
        handle = index._env.open_db(table, txn=txn)
        txn.put(key, change(txn.get(key, db=handle)), db=handle)


def flipped_at(position: int) -> Callable[[bytes], bytes]:
    def change(record: bytes) -> bytes:
        changed = bytearray(record)
        changed[position] ^= 1
        return bytes(changed)

    return change


@pytest.mark.parametrize("position", range(0, 90, 3))
def test_object_record_with_flipped_bit_is_absent_and_created_again(
    index: Index, events: list[Event], position: int
) -> None:
    entry = fill(index)
    fill(index, OTHER)
    dropped: list[int] = []
    index._on_dropped = lambda: dropped.append(1)
    overwrite(index, b"objects", ID, flipped_at(position))
    assert index.get(ID) is None
    assert [each.object_id for each in index.entries()] == [OTHER]
    again = index.create(ID, 250, 100, NAME)
    assert again.generation > entry.generation
    assert again.cached_bytes == 0
    assert index.checksums(entry, range(3)) == [None] * 3
    assert dropped == [1]
    assert [event.name for event in events] == ["cache.index.corrupt"]
    index.drop_damaged()
    assert index.used_bytes() == 250  # of the other one


def test_record_that_was_moved_to_another_key_does_not_verify(index: Index) -> None:
    fill(index)
    fill(index, OTHER)
    with index._env.begin(write=True) as txn:
        handle = index._env.open_db(b"objects", txn=txn)
        txn.put(OTHER, txn.get(ID, db=handle), db=handle)
        txn.put(ID, txn.get(ID, db=handle), db=index._env.open_db(b"tails", txn=txn))
    assert index.get(OTHER) is None
    assert index.tail(ID) is None
    assert index.get(ID) is not None


def test_block_record_that_was_damaged_is_counted_off_and_entered_again(index: Index) -> None:
    entry = fill(index)
    overwrite(index, b"blocks", block_key(ID, entry.generation, 1), flipped_at(0))
    assert index.checksums(entry, range(3)) == [1000, None, 1002]
    now = index.add_block(entry, 1, 1001)
    assert now is not None
    assert (now.cached_bytes, now.sealed, index.used_bytes()) == (250, False, 250)
    assert index.checksums(entry, range(3)) == [1000, 1001, 1002]


def test_records_found_by_a_cursor_are_removed_by_the_next_write(index: Index, events: list[Event]) -> None:
    index.add_segment(7, "group")
    index.add_segment(8, "group")
    overwrite(index, b"segments", generation_key(7), flipped_at(0))
    assert [record.generation for record in index.segment_records()] == [8]
    index.drop_damaged()
    assert [event.name for event in events] == ["cache.index.corrupt"]
    assert [record.generation for record in index.segment_records()] == [8]
    index.drop_damaged()
    assert len(events) == 1


def test_damaged_record_that_a_reader_finds_while_others_are_removed_disturbs_nothing(index: Index) -> None:
    for generation in (7, 8, 9):
        index.add_segment(generation, "group")
        overwrite(index, b"segments", generation_key(generation), flipped_at(0))
    assert index.segment_records() == []
    noted = index._noted
    table = next(iter(noted))[0]
    # As a reader does that looked the set up before the transaction began.
    index._on_dropped = lambda: noted.add((table, generation_key(10 + len(noted))))
    index.drop_damaged()
    assert index.segment_records() == []
    index.add_segment(7, "group")
    assert [record.generation for record in index.segment_records()] == [7]


def test_number_of_the_store_that_was_damaged_ends_the_use_of_the_index(directory: Path) -> None:
    index = open_directory(directory, rebuild)
    entry = fill(index)
    overwrite(index, b"state", b"generation", flipped_at(0))
    with pytest.raises(DamagedIndexError):
        index.create(OTHER, 10, 10, NAME)
    with pytest.raises(DamagedIndexError):  # from now on
        index.get(ID)
    index.close()
    later = open_directory(directory, rebuild)
    assert later.get(ID) is None  # no file contains its record
    assert later.last_generation > entry.generation
    later.close()


def test_index_that_is_cut_while_it_is_open_ends_its_use_and_is_rebuilt(directory: Path) -> None:
    index = open_directory(directory, rebuild)
    fill(index)
    os.truncate(directory / "index" / "index.mdb", 8192)
    with pytest.raises(DamagedIndexError, match="cut"):
        index.get(ID)
    assert (directory / "index" / "damaged").exists()
    index.close()
    later = open_directory(directory, rebuild)
    assert later.get(ID) is None
    assert not (directory / "index" / "damaged").exists()
    later.close()


_DIES_INSIDE = """
import os, pathlib, signal, sys
from millrace.cache.rebuild import rebuild
from millrace.store.setup import open_directory
from millrace.store.signals import Signals, died_inside
index = open_directory(pathlib.Path(sys.argv[1]), rebuild)
index.look(lambda txn: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_death_in_a_transaction_has_the_next_process_check_an_intact_index(
    directory: Path, events: list[Event]
) -> None:
    index = open_directory(directory, rebuild)
    fill(index)
    index.close()
    done = subprocess.run([sys.executable, "-c", _DIES_INSIDE, str(directory)], timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    later = open_directory(directory, rebuild)
    assert later.get(ID) is not None
    later.close()
    assert events == []


def test_death_in_a_transaction_on_a_damaged_index_has_the_next_process_rebuild_it(
    directory: Path, events: list[Event]
) -> None:
    index = open_directory(directory, rebuild)
    fill(index)
    root = index._env.info()["last_pgno"]
    index.close()
    subprocess.run([sys.executable, "-c", _DIES_INSIDE, str(directory)], timeout=300, check=False)
    with open(directory / "index" / "index.mdb", "r+b") as file:
        file.seek(2 * 4096)
        file.write(bytes((root - 1) * 4096))  # every page but LMDB's own two
    later = open_directory(directory, rebuild)
    assert later.get(ID) is None
    assert later.create(ID, 250, 100, NAME).cached_bytes == 0
    later.close()
    assert [event.name for event in events] == ["cache.store.discarded"]


def test_threads_in_transactions_at_once_leave_no_mark(index: Index) -> None:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:

        def look() -> None:
            for _ in range(10_000):
                with index._guard:
                    pass

        threads = [threading.Thread(target=look) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(usual)
    assert index.signals.numbers[index._guard._slot] == 0


def test_second_death_soon_after_a_passed_check_has_the_index_rebuilt(directory: Path, events: list[Event]) -> None:
    open_directory(directory, rebuild).close()
    for _ in range(2):
        subprocess.run([sys.executable, "-c", _DIES_INSIDE, str(directory)], timeout=300, check=False)
        open_directory(directory, rebuild).close()
    assert [event.name for event in events] == ["cache.store.discarded"]


_OPENS = """
import pathlib, sys
from millrace.cache.rebuild import rebuild
from millrace.store.setup import open_directory
open_directory(pathlib.Path(sys.argv[1]), rebuild).close()
"""


def in_another_process(program: str, directory: Path) -> int:
    """The exit code of `program`."""
    return subprocess.run([sys.executable, "-c", program, str(directory)], timeout=300, check=False).returncode


def test_deaths_in_transactions_leave_the_index_to_a_process_that_uses_it(directory: Path) -> None:
    index = open_directory(directory, rebuild)
    fill(index)
    before = os.stat(directory / "index" / "index.mdb").st_ino
    for _ in range(3):
        assert in_another_process(_DIES_INSIDE, directory) < 0
        assert in_another_process(_OPENS, directory) == 0
    assert os.stat(directory / "index" / "index.mdb").st_ino == before
    assert index.get(ID) is not None
    index.close()


def test_index_that_another_process_gave_up_is_not_used(directory: Path) -> None:
    index = open_directory(directory, rebuild)
    fill(index)
    before = index.signals.read()
    (directory / "index" / DAMAGED_NAME).touch()
    assert in_another_process(_OPENS, directory) == 0
    assert index.signals.read() != before  # results that processes keep of it are invalid
    with pytest.raises(DamagedIndexError, match="another process discarded it"):
        index.get(ID)
    assert not (directory / "index" / DAMAGED_NAME).exists()  # the new index is not marked
    index.close()


_STOPS_WHILE_IT_WRITES = """
import os, pathlib, signal, sys
from millrace.cache.rebuild import rebuild
from millrace.store.setup import open_directory
index = open_directory(pathlib.Path(sys.argv[1]), rebuild)
index.write(lambda txn: os.kill(os.getpid(), signal.SIGSTOP))
"""


def test_check_prevented_by_stopped_writer_has_no_result(directory: Path) -> None:
    index = open_directory(directory, rebuild)
    fill(index)
    index.close()
    with subprocess.Popen([sys.executable, "-c", _STOPS_WHILE_IT_WRITES, str(directory)]) as stopped:
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            assert is_intact(directory / "index") is None
        finally:
            stopped.send_signal(signal.SIGCONT)
    assert stopped.returncode == 0
    assert is_intact(directory / "index") is True


def test_damaged_list_of_free_pages_does_not_pass_the_check(directory: Path) -> None:
    index = open_directory(directory, rebuild)
    for number in range(200):
        fill(index, number.to_bytes(16, "big"))
    for number in range(200):
        index.remove(number.to_bytes(16, "big"))
    index.close()
    data = (directory / "index" / "index.mdb").read_bytes()
    meta = max((data[page * 4096 : (page + 1) * 4096] for page in range(2)), key=lambda page: page[16 + 128 : 16 + 136])
    root = int.from_bytes(meta[16 + 24 + 40 : 16 + 24 + 48], "little")
    assert root * 4096 < len(data)
    with open(directory / "index" / "index.mdb", "r+b") as file:
        file.seek(root * 4096 + 12)  # behind the page's own number and flags
        file.write(b"\xff" * 4000)
    assert is_intact(directory / "index") is False


def test_processes_beyond_the_marked_ones_and_a_damaged_page_of_marks_disturb_no_transaction(tmp_path: Path) -> None:
    signals = Signals(tmp_path / "signals")
    guards = [IndexGuard(str(tmp_path / "index.mdb"), signals) for _ in range(506)]
    with guards[-1], guards[-2], guards[0]:
        assert died_inside(signals) == []
        signals.numbers[:] = memoryview(bytes(4096)).cast("Q")
        with guards[0]:
            signals.numbers[:] = memoryview(b"\xff" * 4096).cast("Q")
    with guards[0]:
        pass
    for guard in guards:
        guard.close()
    assert signals.numbers[guards[0]._slot] == 0
