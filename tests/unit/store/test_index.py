import fcntl
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.forked import WaitingChild, in_child
from tests.support.interrupts import interrupted_at
from tests.support.waiting import in_other_thread, wait_until

from millrace.errors import StorageError
from millrace.runtime.locks import is_byte_locked
from millrace.store.index import Index
from millrace.store.records import Entry, ObjectName, SegmentRecord
from millrace.store.signals import FIRST, METADATA_SINCE, REMOVALS, WORDS
from millrace.store.transactions import SIGNALS_NAME, WRITE_LOCK_NAME, Table, Writing

NAME = ObjectName("s3://?region=eu", "bucket/a key with ü and \udc80", "etag")
ID = bytes(range(16))
OTHER = bytes(range(16, 32))
FILE = os.stat(__file__)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    index = Index(tmp_path)
    yield index
    index.close()


def fill(index: Index, object_id: bytes = ID, blocks: int = 3) -> Entry:
    entry = index.create(object_id, blocks * 100 - 1, 100, NAME)
    for block in range(blocks):
        index.add_block(entry, block, block)
    now = index.get(object_id)
    assert now is not None
    return now


def test_record_is_read_as_written(index: Index) -> None:
    entry = index.create(ID, 299, 100, NAME)
    assert index.get(ID) == entry
    assert entry.name == NAME
    assert (entry.size, entry.block_bytes, entry.cached_bytes, entry.complete, entry.sealed) == (
        299,
        100,
        0,
        False,
        False,
    )
    assert index.create(ID, 299, 100, NAME) == entry


@pytest.mark.parametrize(
    "data", [b"", b"short", ObjectName("a", "b", "c").pack() + b"x", ObjectName("a", "b", "c").pack()[:-1]]
)
def test_name_that_is_malformed_raises(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a packed name"):
        ObjectName.unpack(data)


def test_record_after_each_block_counts_it(index: Index) -> None:
    entry = index.create(ID, 150, 100, NAME)
    first = index.add_block(entry, 0, 7)
    assert first is not None
    assert not first.complete
    second = index.add_block(entry, 1, 8)
    assert second is not None
    assert second.complete
    assert index.add_block(entry, 1, 8) == second
    assert index.used_bytes() == 150
    assert index.checksums(entry, [1, 2, 0]) == [8, None, 7]
    index.remove(ID)
    assert index.add_block(entry, 0, 7) is None
    assert index.used_bytes() == 0


def test_seal_of_incomplete_or_replaced_object_is_refused(index: Index) -> None:
    entry = index.create(ID, 150, 100, NAME)
    assert not index.seal(entry, FILE)
    index.remove(ID)
    new = fill(index)
    assert not index.seal(entry, FILE)
    assert index.seal(new, FILE)
    sealed = index.get(ID)
    assert sealed is not None
    assert (sealed.sealed, sealed.name) == (True, NAME)
    assert (sealed.seal_inode, sealed.seal_ctime_ns, sealed.seal_mtime_ns, sealed.seal_links) == (
        FILE.st_ino,
        FILE.st_ctime_ns,
        FILE.st_mtime_ns,
        FILE.st_nlink,
    )
    index.unseal(sealed)
    assert index.get(ID) == new
    index.seal(new, FILE)
    index.drop_block(new, 1)
    dropped = index.get(ID)
    assert dropped is not None
    assert (dropped.sealed, dropped.complete, dropped.cached_bytes) == (False, False, 199)


def test_segment_removed_takes_all_objects(index: Index) -> None:
    segments = [index.new_generation(), index.new_generation()]
    for segment in segments:
        index.add_segment(segment, "data set")
    ids = [os.urandom(16) for _ in range(20)]
    for number, object_id in enumerate(ids):
        entry = index.add_small(
            object_id, 10, NAME, segment=segments[number % 2], offset=number // 2 * 10, checksum=number
        )
        assert entry is not None
        assert entry == index.get(object_id)
        assert entry.complete
        assert (entry.offset, entry.checksum) == (number // 2 * 10, number)
    large = fill(index)
    assert index.used_bytes() == 200 + large.size
    index.remove(ids[0])  # its bytes stay in the segment
    assert index.segment(segments[0]) == SegmentRecord(segments[0], 100, 90, "data set")
    assert index.used_bytes() == 200 + large.size
    removed = index.remove_segment(segments[0])
    assert removed is not None
    assert {entry.object_id for entry in removed} == set(ids[2::2])
    assert index.used_bytes() == 100 + large.size
    assert {entry.object_id for entry in index.entries()} == {*ids[1::2], ID}
    assert index.segment_records() == [SegmentRecord(segments[1], 100, 100, "data set")]
    assert index.remove_segment(segments[0]) is None
    assert index.add_small(OTHER, 10, NAME, segment=segments[0], offset=0, checksum=0) is None
    assert index.get(OTHER) is None


def test_bytes_of_an_object_added_twice_count_as_waste(index: Index) -> None:
    segment = index.new_generation()
    index.add_segment(segment, "")
    first = index.add_small(ID, 10, NAME, segment=segment, offset=0, checksum=1)
    assert index.add_small(ID, 10, NAME, segment=segment, offset=10, checksum=1) == first
    assert index.segment(segment) == SegmentRecord(segment, 20, 10, "")
    assert index.used_bytes() == 20


def test_entries_iterated_leave_no_transaction_open(index: Index) -> None:
    ids = sorted(os.urandom(16) for _ in range(2500))
    for object_id in ids:
        index.create(object_id, 1, 1, NAME)
    walk = index.entries()
    assert next(walk).object_id == ids[0]
    assert "no active readers" in index._env.readers()
    assert [entry.object_id for entry in walk] == ids[1:]


def test_reader_slots_of_killed_process_are_freed(index: Index, tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        child = Index(tmp_path)
        reader = child._env.begin()
        assert reader.id()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert str(pid) in index._env.readers()
    index.clear_dead_readers()
    assert str(pid) not in index._env.readers()


def test_restore_of_objects_is_one_step(index: Index) -> None:
    large = Entry(ID, 70, 150, 100, 150, packed_name=NAME.pack())
    small = Entry(OTHER, 71, 10, 10, 10, place=50, offset=3, checksum=4, packed_name=NAME.pack())
    index.restore_segments([SegmentRecord(50, 40, 10, "g")])
    index.restore([(large, [(0, 11), (1, 12)]), (small, [])], used_bytes=150)
    index.raise_generation(1000)
    assert index.get(ID) == large
    assert index.get(OTHER) == small
    assert index.checksums(large, [0, 1]) == [11, 12]
    assert index.used_bytes() == 190
    assert index.new_generation() == 1001
    index.raise_generation(5)
    assert index.new_generation() == 1002
    assert [entry.object_id for entry in index.remove_segment(50) or []] == [OTHER]


def test_removal_of_an_index_record_raises_a_signal(index: Index) -> None:
    entry = fill(index)
    index.seal(entry, FILE)
    segment = index.new_generation()
    index.add_segment(segment, "")
    removals = [
        lambda: index.unseal(entry),
        lambda: index.drop_block(entry, 0),
        lambda: index.remove(ID),
        lambda: index.remove_segment(segment),
    ]
    for remove in removals:
        before = index.stamp()
        remove()
        after = index.stamp()
        assert before is not None
        assert after is not None
        assert after.removals != before.removals
        assert after.changes == before.changes
    before = index.stamp()
    index.meta_write(lambda txn: txn.put(b"a", b"a"), changed=True)
    after = index.stamp()
    assert before is not None
    assert after is not None
    assert after.changes != before.changes
    assert after.removals == before.removals
    before = index.stamp()
    fill(index)
    index.remove(OTHER)  # which is not there
    index.meta_write(lambda txn: txn.put(b"a", b"b"))
    assert index.stamp() == before == index.signals.read()


def test_signals_reach_other_processes(index: Index, tmp_path: Path) -> None:
    fill(index)
    before = index.signals.numbers[REMOVALS]
    pid = os.fork()
    if pid == 0:
        signal.alarm(300)
        Index(tmp_path).remove(ID)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert index.signals.numbers[REMOVALS] != before
    assert index.get(ID) is None


def test_stamp_during_a_removal_is_none(index: Index, tmp_path: Path) -> None:
    fill(index)
    pid = os.fork()
    if pid == 0:
        child = Index(tmp_path)

        def remove(txn: Writing) -> None:
            child.signals.removed(txn.id())
            os.kill(os.getpid(), signal.SIGKILL)  # before the commit

        child.write(remove)
    os.waitpid(pid, 0)
    assert index.stamp() is None
    index.new_generation()  # the next transaction takes the same id
    assert index.stamp() is not None


def test_signal_of_killed_process_is_lowered_on_open(tmp_path: Path) -> None:
    index = Index(tmp_path)
    fill(index)
    index.signals.removed(1 << 40)
    index.close()
    index = Index(tmp_path)
    assert index.stamp() is not None
    index.close()


def test_metadata_expired_without_a_transaction_is_signalled(
    tmp_path: Path,
) -> None:
    index = Index(tmp_path)
    fill(index)
    index.meta_write(lambda txn: txn.put(b"a", b"a"), changed=True)  # the last transaction is a change
    before = index.stamp()
    index.signals.expire_metadata(12.5)
    index.signals.expire_metadata(11.5)
    assert index.signals.times[METADATA_SINCE] == 12.5
    after = index.stamp()
    assert before is not None
    assert after is not None
    assert after.changes != before.changes
    index.close()
    index = Index(tmp_path)
    assert index.stamp() == after
    assert index.signals.times[METADATA_SINCE] == 12.5
    index.close()


@pytest.mark.parametrize("damaged", [math.nan, math.inf, -math.inf, 1e300])
def test_damaged_time_in_the_signals_hides_no_metadata_after_an_open(tmp_path: Path, damaged: float) -> None:
    index = Index(tmp_path)
    index.signals.times[METADATA_SINCE] = damaged
    index.close()
    index = Index(tmp_path)
    now = time.time()
    assert not index.signals.times[METADATA_SINCE] > now
    index.signals.expire_metadata(now + 1)
    assert index.signals.times[METADATA_SINCE] == now + 1
    index.close()


def _is_held(directory: Path) -> bool:
    """Whether a process holds the lock that marks LMDB's lock file as in use."""
    pid = os.fork()
    if pid == 0:
        with open(directory / "index.mdb-lock", "rb+") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            except BlockingIOError:
                os._exit(0)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_open_index_is_in_use(tmp_path: Path) -> None:
    """Else the next process would create the writers' lock again, and two could write at once."""
    for _ in range(2):  # a new index, and one that was there
        index = Index(tmp_path)
        assert _is_held(tmp_path)
        fill(index)
        with pytest.raises(StorageError, match="already open"):
            Index(tmp_path)
        assert _is_held(tmp_path)
        index.close()
        assert not _is_held(tmp_path)


def test_forked_child_in_a_copied_store_uses_the_index_of_the_copy(tmp_path: Path) -> None:
    """A copy has no hard links: the name that a child of the original used is a file of its own, and out of date."""

    def keys(folder: Path) -> str:
        index = Index(folder)
        try:
            return str([bool(index.get(name)) for name in (ID, OTHER)])
        finally:
            index.close()

    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()
    index = Index(original)
    fill(index)
    assert in_child(lambda: keys(original)) == "[True, False]"
    index.close()
    shutil.copytree(original, copy)
    index = Index(copy)
    fill(index, OTHER)
    assert in_child(lambda: keys(copy)) == "[True, True]"
    index.close()


def test_child_forked_while_an_index_is_opened_does_not_hold_its_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[WaitingChild] = []
    open_tables = Index._open_tables

    def fork_then_open(index: Index) -> list[Table]:
        children.append(WaitingChild())
        return open_tables(index)

    monkeypatch.setattr(Index, "_open_tables", fork_then_open)
    index = Index(tmp_path)
    try:
        assert words_in_use(tmp_path) == 1
        index.close()
        assert words_in_use(tmp_path) == 0  # otherwise a death of this process would not be noticed
    finally:
        for child in children:
            child.end()


def words_in_use(directory: Path) -> int:
    """The number of words of processes in the page of signals that are locked."""
    with open(directory / SIGNALS_NAME, "rb+") as page:
        return sum(is_byte_locked(page.fileno(), word) for word in range(FIRST, FIRST + WORDS))


def test_index_of_forked_child_is_in_use(tmp_path: Path) -> None:
    parent = Index(tmp_path)
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(300)
        child = Index(tmp_path)
        fill(child)
        with pytest.raises(StorageError, match="already open"):
            Index(tmp_path)
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    parent.close()
    try:
        assert _is_held(tmp_path)
    finally:
        os.write(done[1], b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not _is_held(tmp_path)
    for descriptor in (*ready, *done):
        os.close(descriptor)


@pytest.mark.parametrize(
    "write",
    [
        lambda index: index.create(bytes(16), 100, 100, NAME),
        lambda index: index.put_tail(bytes(16), b"tail"),
        lambda index: index.table(b"another"),
        lambda index: index.meta_write(lambda txn: None),
    ],
)
def test_index_with_stopped_writer_is_readable_but_not_writable(
    tmp_path: Path, write: Callable[[Index], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.runtime.locks.SILENCE_SECONDS", 0.3)
    index = Index(tmp_path)
    entry = index.create(bytes(range(16)), 100, 100, NAME)
    code = (
        "import pathlib, sys; from millrace.runtime.locks import FileLock;"
        "lock = FileLock(pathlib.Path(sys.argv[1]), 'a writer'); lock.threads.acquire(); lock.__enter__();"
        "print('held', flush=True);"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / WRITE_LOCK_NAME)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(StorageError, match="does not continue"):
            write(index)
        assert index.get(entry.object_id) == entry
        other.kill()
        other.wait()
    write(index)
    index.close()


# --- interrupts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["write", "write metadata", "create a table", "read"])
def test_interrupt_at_any_moment_leaves_the_index_free_and_no_half_write(tmp_path: Path, what: str) -> None:
    index = Index(tmp_path)
    names = itertools.count()
    actions: dict[str, Callable[[], object]] = {
        "write": lambda: index.remove(ID),
        "write metadata": lambda: index.meta_write(lambda txn: txn.put(b"a", b"a"), changed=True),
        "create a table": lambda: index.table(b"%d" % (next(names) % 8)),
        "read": index.used_bytes,
    }
    lock = os.open(tmp_path / WRITE_LOCK_NAME, os.O_RDWR)
    for number in itertools.count():
        before = fill(index)
        interrupt = interrupted_at(number, actions[what])  # as long as it exists, so does its traceback
        found = index.get(ID)
        assert (found, index.used_bytes()) in ((before, before.cached_bytes), (None, 0))
        index.new_generation()
        assert in_other_thread(index.new_generation) == index.last_generation
        wait_until(lambda: not is_byte_locked(lock, 0))  # a beat releases it
        if interrupt is None:
            break
    assert number > 5
    os.close(lock)
    index.close()


def test_write_in_a_signal_handler_during_a_write_raises(index: Index) -> None:
    def write(txn: Writing) -> None:
        txn.put(b"a", b"b", db=index._meta)
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: index.new_generation())
    try:
        with pytest.raises(StorageError, match="this thread is writing to it already"):
            index.write(write)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert index.meta_bytes() == 0
    index.new_generation()
    in_other_thread(index.new_generation)
